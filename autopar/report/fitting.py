"""Whether a model fits, as text: a table of the usual layouts, and the answer in its first line."""

from autopar.estimates.fitting import Fit, LayoutFit
from autopar.plan import Plan
from autopar.report.text import WIDTH, format_entries, format_items, format_share, format_table, heading, wrap
from autopar.units import format_bytes, format_count, format_seconds


def format_fit(fit: Fit) -> str:
    """Return the answer to whether a model fits on a number of devices."""
    fitting = [layout for layout in fit.layouts if layout.fits]
    model = f"{fit.model} ({format_count(fit.num_parameters)} parameters) on {fit.gpus} × {fit.cluster.device.name}"
    step = "training step" if fit.mode == "train" else "forward pass"
    entries = [("fits", _verdict(fit, fitting)), *_advice(fit, fitting)]
    samples = sorted({layout.degrees.microbatch for layout in fit.layouts})
    microbatch = f", microbatches of {' or '.join(map(str, samples))}" if samples else ""
    lines = [model, f"{step}, global batch {fit.global_batch:,}{microbatch}", "", *format_entries(entries)]
    lines += ["", *_table(fit)]
    if fit.refused:
        lines += heading("Layouts the model cannot be split by")
        lines += format_items([f"{name}: {why}" for name, why in fit.refused])
    if fit.stopped:
        lines += ["", "interrupted: the layouts looked at until then"]
    return "\n".join(lines) + "\n"


def format_largest(fit: Fit, plan: Plan) -> str:
    """Return the largest microbatches of the usual layouts, and that of a plan, the fastest one that was found."""
    fitting = [layout for layout in fit.layouts if layout.largest_microbatch]
    rows = [
        (layout.name, str(layout.largest_microbatch), f"{(layout.largest_microbatch or 0) * layout.degrees.dp:,}")
        for layout in sorted(fitting, key=lambda layout: -(layout.largest_microbatch or 0) * layout.degrees.dp)
    ]
    none = [layout.name for layout in fit.layouts if not layout.largest_microbatch]
    lines = [
        *heading(f"Largest microbatches that fit, of a global batch of {fit.global_batch:,}"),
        *wrap(
            f"fastest: {plan.microbatch:,} samples over all devices of a stage, the microbatch of the plan above", WIDTH
        ),
        "",
        *(
            format_table(("layout, everything recomputed", "per data-parallel device", "over all"), rows)
            if rows
            else []
        ),
        *([f"not even 1 sample: {', '.join(none)}"] if none else []),
    ]
    return "\n".join(lines) + "\n"


def fit_to_json(fit: Fit) -> dict[str, object]:
    """Return the answer as JSON: bytes and seconds, bytes by group of devices."""
    return {
        "model": fit.model,
        "gpus": fit.gpus,
        "global_batch": fit.global_batch,
        "fits": any(layout.fits for layout in fit.layouts),
        "layouts": [
            {
                "name": layout.name,
                "fits": layout.fits,
                "recompute": layout.degrees.recompute,
                "dp": layout.degrees.dp,
                "tp": layout.degrees.tp,
                "pp": layout.degrees.pp,
                "ep": layout.degrees.ep,
                "zero": layout.degrees.zero,
                "microbatch": layout.degrees.microbatch,
                "peak_bytes": list(layout.peak_bytes),
                "limit_bytes": list(layout.limits),
                "step_seconds": layout.step_seconds,
                "mfu": layout.mfu,
                "largest_microbatch": layout.largest_microbatch,
            }
            for layout in fit.layouts
        ],
        "refused": [{"name": name, "why": why} for name, why in fit.refused],
        "stopped": fit.stopped,
    }


def _verdict(fit: Fit, fitting: list[LayoutFit]) -> str:
    if fitting:
        return f"yes: {len(fitting)} of {len(fit.layouts)} usual layouts"
    if not fit.layouts:
        return "unknown: interrupted before the first layout"
    nearest = min(fit.layouts, key=lambda layout: layout.peak_bytes[layout.fullest] / layout.limits[layout.fullest])
    peak, limit = nearest.peak_bytes[nearest.fullest], nearest.limits[nearest.fullest]
    return (
        f"no: the usual layout with the least memory, {nearest.name}, takes {format_bytes(peak)} of "
        f"{format_bytes(limit)} with {_recompute(nearest)}"
    )


def _advice(fit: Fit, fitting: list[LayoutFit]) -> list[tuple[str, str]]:
    if fitting:
        best = min(fitting, key=lambda layout: layout.step_seconds)
        told = f"{best.name}, {_recompute(best)}: {format_seconds(best.step_seconds)} by the planner's formula"
        return [("fastest", f"{told}; autopar solve searches all layouts and microbatches")]
    return [("next", "autopar solve searches all layouts, offload included; --find-min-gpus finds how many it takes")]


def _table(fit: Fit) -> list[str]:
    asked = any(layout.largest_microbatch is not None for layout in fit.layouts)
    header = ("layout", "fits with", "fullest rank", "of limit", "step", "max batch" if asked else "MFU")
    rows = [
        (
            layout.name,
            _recompute(layout) if layout.fits else "does not fit",
            _fullest(layout),
            format_share(layout.peak_bytes[layout.fullest], layout.limits[layout.fullest]),
            format_seconds(layout.step_seconds),
            str(layout.largest_microbatch) if asked else f"{100 * layout.mfu:.1f} %",
        )
        for layout in fit.layouts
    ]
    return format_table(header, rows)


def _fullest(layout: LayoutFit) -> str:
    """Return the bytes of the fullest rank, and in which group of the pipeline it is."""
    peak = format_bytes(layout.peak_bytes[layout.fullest])
    return f"{peak}, stage {layout.fullest}" if len(layout.limits) > 1 else peak


def _recompute(layout: LayoutFit) -> str:
    return f"{'no' if layout.degrees.recompute == 'none' else layout.degrees.recompute} recompute"

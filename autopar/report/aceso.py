"""A plan in Aceso's cost model as text."""

from autopar.aceso import CostModel, Found, Stage
from autopar.report.text import format_entries, format_table
from autopar.units import format_bytes, format_seconds


def format_found(model: CostModel, found: Found, limit: float, simulated: float) -> str:
    """Return a plan stage by stage, with its objective, the bound, and the step that our pipeline rule gives.

    Args:
        model: What it costs.
        found: The plan.
        limit: Bytes of a device that it may use.
        simulated: Seconds of a step by `autopar.aceso.measured_step`.
    """
    plan, estimate = found.configuration, found.estimate
    entries = [
        ("model", f"{model.profile.model}, {model.layers} layers, global batch {model.global_batch}"),
        ("devices", f"{model.devices}, {model.node} per node, {format_bytes(limit)} of each"),
        ("step", f"{1e3 * estimate.seconds:,.1f} ms by Aceso's formula"),
        ("bound", f"{1e3 * found.bound:,.1f} ms: no plan is faster by more than {100 * found.gap:.2f} %"),
        ("simulated", f"{format_seconds(simulated)} by 1F1B, with gradients of weights"),
        ("searched", f"{found.seconds:.1f} s"),
        ("microbatch", f"{plan.microbatch}, {model.global_batch // plan.microbatch} per step"),
    ]
    rows = []
    for index, (stage, seconds, used) in enumerate(
        zip(plan.stages, estimate.stage_seconds, estimate.stage_bytes, strict=True)
    ):
        last = stage.first + stage.ops - 1
        rows.append(
            (
                str(index),
                f"{stage.first}-{last}",
                str(stage.tensor),
                str(stage.data),
                _again(stage),
                format_seconds(seconds),
                format_bytes(used),
            )
        )
    header = ("stage", "ops", "tp", "dp", "run again", "per microbatch", "memory")
    return "\n".join([*format_entries(entries), "", *format_table(header, rows)]) + "\n"


def _again(stage: Stage) -> str:
    return f"{sum(stage.again)} ops" if any(stage.again) else "-"

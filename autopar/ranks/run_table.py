"""A run as text: how far it is from the unpartitioned run, and measured next to predicted seconds."""

from autopar.ranks.records import RunReport
from autopar.ranks.stopwatch import PHASES
from autopar.report.text import format_entries, format_table
from autopar.units import format_seconds


def format_run(report: RunReport) -> str:
    """Return the report of a run."""
    start = "as the model gives them"
    if report.drawn:
        tensors = "tensor" if report.drawn == 1 else "tensors"
        start = f"{report.drawn} weight {tensors} initialised randomly (seed {report.seed})"
    verdict = "equal within tolerance" if report.passed else "DIFFERENT"
    losses = [f"{step.loss:.6g} in step {step.step}" for step in report.compared if step.loss is not None]
    lines = format_entries(
        [
            ("plan", report.summary),
            ("model", report.model),
            ("ranks", f"{report.ranks} processes over {report.backend}, on {report.device}"),
            ("weights", start),
            ("compiled", f"{report.num_models} distinct pieces on rank 0"),
            *([("loss", ", ".join(losses))] if losses else []),
            *([("verdict", f"{verdict}: {report.tolerance:g} of the largest element")] if report.compared else []),
            *([("measured", _share(report.measured_share))] if report.measured_share is not None else []),
        ]
    )
    rows = [
        (
            str(step.step),
            deviation.what,
            _error(deviation.absolute),
            _error(deviation.relative),
            "yes" if deviation.passed else "NO",
            deviation.worst,
        )
        for step in report.compared
        for deviation in step.deviations
    ]
    if rows:
        lines += ["", *format_table(("step", "compared", "absolute", "relative", "equal", "worst tensor"), rows)]
    seconds = []
    for stage in report.stages:
        for phase in PHASES:
            measured, predicted = stage.measured[phase], stage.predicted[phase]
            if measured or predicted:
                seconds.append((str(stage.stage), phase, *_pair(measured, predicted)))
    seconds.append(("all", "step", *_pair(report.measured_seconds, report.predicted_seconds)))
    lines += ["", *format_table(("stage", "phase", "measured", "predicted", "ratio"), seconds), ""]
    lines += format_entries(
        [
            ("first step", format_seconds(report.first_seconds)),
            (
                "spread",
                f"{format_seconds(report.low_seconds)} to {format_seconds(report.high_seconds)}, tenths of steps",
            ),
            *(
                [("one device", f"{format_seconds(report.unpartitioned_seconds)} for the unpartitioned step")]
                if report.compared
                else []
            ),
        ]
    )
    return "\n".join(lines) + "\n"


def _share(share: float) -> str:
    return f"{100 * share:.0f} % of the predicted seconds of ops and collectives"


def _error(number: float | None) -> str:
    return "no number" if number is None else f"{number:.1e}"


def _pair(measured: float, predicted: float) -> tuple[str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else "-"
    return format_seconds(measured), format_seconds(predicted), ratio

"""How many GPUs a goal takes, as text."""

from autopar.report.text import format_entries, format_items, format_table, heading
from autopar.sizing.records import Looked, Sizing
from autopar.units import format_bytes, format_count, format_seconds


def format_sizing(sizing: Sizing) -> str:
    """Return the answer, and a table of the numbers of GPUs that were looked at."""
    lines = format_entries(
        [
            ("wanted", sizing.goal),
            ("answer", f"{sizing.gpus} GPUs" if sizing.gpus is not None else "none"),
            ("proof", _proof(sizing)),
            ("plan", sizing.plan.summary if sizing.plan is not None else "none"),
            *_hosted(sizing),
            ("step", f"{format_count(sizing.tokens)} {sizing.unit}s"),
        ]
    )
    priced = [own for own in sizing.looked if own.step_seconds is not None]
    if priced:
        header = ["GPUs", "step", f"{sizing.unit}s/s", "peak"]
        price = sizing.gpu_hour_price
        if price is not None:
            header += ["per step", f"per M {sizing.unit}s"]
        rows = [_row(own, sizing, price) for own in priced]
        lines += [*heading("Numbers of GPUs with a plan"), *format_table([*header, ""], rows)]
    failed = [own for own in sizing.looked if own.step_seconds is None]
    if failed:
        lines += [*heading("Numbers of GPUs without one"), *format_items(_reasons(failed))]
    return "\n".join(lines) + "\n"


def _hosted(sizing: Sizing) -> list[tuple[str, str]]:
    """Return what fewer GPUs do with host memory."""
    if sizing.hosted is None:
        return []
    own = sizing.hosted
    return [("with offload", f"{own.gpus} GPUs: {format_seconds(own.step_seconds or 0.0)} per step; {own.plan}")]


def _proof(sizing: Sizing) -> str:
    if sizing.proven:
        return "proven for all numbers of GPUs that fill nodes, by bounds"
    open_ones = [own for own in sizing.looked if not own.proven and own.outcome != "meets"]
    return f"not proven: {', '.join(str(own.gpus) for own in open_ones)} GPUs are not excluded by a bound"


def _row(own: Looked, sizing: Sizing, price: float | None) -> list[str]:
    seconds = own.step_seconds or 0.0
    cells = [
        str(own.gpus),
        format_seconds(seconds),
        format_count(sizing.tokens / seconds),
        format_bytes(own.peak_bytes or 0),
    ]
    if price is not None:
        step = own.gpus * seconds * price / 3600.0
        cells += [f"{step:.4g}", f"{step / sizing.tokens * 1e6:.4g}"]
    mark = "answer" if own.gpus == sizing.gpus else own.why
    return [*cells, mark]


def _reasons(failed: list[Looked]) -> list[str]:
    """Return why numbers fail; those that fail for one reason of one kind share a line."""
    lines: list[str] = []
    group: list[Looked] = []

    def flush() -> None:
        if group:
            numbers = str(group[0].gpus) if len(group) == 1 else f"{group[0].gpus} to {group[-1].gpus}"
            proof = "" if group[-1].proven else " (not proven)"
            lines.append(f"{numbers}: {group[-1].why}{proof}")
            group.clear()

    for own in failed:
        if group and (own.why.split()[:3] != group[-1].why.split()[:3] or own.proven != group[-1].proven):
            flush()
        group.append(own)
    flush()
    return lines

"""What the alternatives to a plan cost, as text."""

from autopar.alternatives.records import Alternative, Weighing
from autopar.alternatives.tensor import TensorView
from autopar.plan import Simulated
from autopar.report.parts import changed_parts, time_parts
from autopar.report.text import (
    WIDTH,
    format_change,
    format_entries,
    format_items,
    format_share,
    format_table,
    heading,
    wrap,
)
from autopar.units import format_bytes, format_seconds

BINDING = 0.005
"""Share of the step that more memory has to save for memory to be called a limit."""

_LARGEST = 3
"""Parts of the step that are named as its limits."""


def format_weighing(weighing: Weighing) -> str:
    """Return what limits a plan, and each decision with the cost of its alternatives."""
    simulated = weighing.simulated
    lines = format_entries([("plan", weighing.plan), ("step time", format_seconds(simulated.step_seconds))])
    lines += [*heading("What limits it"), *format_items(limits(weighing))]
    lines += heading("Decisions, and what other values cost: solved again, all else free")
    for name, value in weighing.decisions:
        own = [each for each in weighing.alternatives if each.decision == name]
        told = [_told(name, value, each, simulated) for each in own if each.outcome != "not looked at"]
        left = [each.value for each in own if each.outcome == "not looked at"]
        if left:
            told.append(f"{name} {value} -> {', '.join(left)}: not looked at")
        lines += ["", f"{name} {value}", *format_items(told)]
    return "\n".join([*lines, "", *wrap(ended(weighing), WIDTH)]) + "\n"


def _told(name: str, value: str, other: Alternative, simulated: Simulated) -> str:
    return _ended_with(f"{name} {value} -> {other.value}: ", other, simulated)


def _ended_with(change: str, other: Alternative, simulated: Simulated) -> str:
    match other.outcome:
        case "plan":
            return change + cost_of(other, simulated)
        case "does not fit":
            return f"{change}does not fit: {other.why}" + ("" if other.complete else "; not proven")
        case outcome:
            return f"{change}{outcome}" + (f": {other.why}" if other.why else "")


def cost_of(other: Alternative, simulated: Simulated) -> str:
    """Return by how much the plan of an alternative is slower, in which parts, and what it is."""
    assert other.simulated is not None, "it has a plan"
    step, reference = other.simulated.step_seconds, simulated.step_seconds
    parts = changed_parts(simulated, other.simulated)
    text = f"{'' if other.complete else 'at most '}{format_change(step, reference)} ({format_seconds(step)})"
    text += f": {', '.join(parts)}" if parts else ": no part differs by more than 0.5 % of the step"
    text += f"; {other.plan}"
    if not other.complete:
        text += "; cut off" + (f", {format_seconds(other.bound)} at best" if other.bound > 0 else "")
    return text


def limits(weighing: Weighing) -> list[str]:
    """Return what would make the step shorter: memory if more of it does, and the largest parts of the step."""
    found = []
    limit, simulated, faster = weighing.limit, weighing.simulated, weighing.faster
    reference = simulated if faster is None else faster.simulated
    assert reference is not None, "a faster plan is simulated"
    if faster is not None and reference.step_seconds < (1 - BINDING) * simulated.step_seconds:
        found.append(
            f"the search: {faster.decision} {faster.value} turned up a faster plan, "
            f"{cost_of(faster, simulated)}; solve again with more time"
        )
    share = f"stage {limit.stage}, the fullest, takes {100 * limit.memory_share:.1f} % of the limit"
    more = limit.more
    if more.simulated is None:
        found.append(f"memory: {share}; whether more would help was not found out ({more.outcome})")
    else:
        saved = 1 - more.simulated.step_seconds / reference.step_seconds
        with_more = f"with 10 % more, {format_bytes(limit.raised)} per device,"
        found.append(
            f"memory: {share}; {with_more} {cost_of(more, reference)}"
            if saved > BINDING
            else f"not memory: {share}; {with_more} no faster plan was found"
        )
    step = simulated.step_seconds
    largest = sorted(time_parts(simulated), key=lambda part: -part[1])[:_LARGEST]
    named = ", ".join(f"{name} {format_share(seconds, step)}" for name, seconds in largest)
    found.append(f"the largest parts of the step: {named}")
    return found


def ended(weighing: Weighing) -> str:
    """Return how long it took, and what ended it."""
    took = f"tried in {format_seconds(weighing.seconds)}"
    match weighing.stopped:
        case "time limit":
            return f"{took}; stopped by the time limit: a larger --time-limit tries more, and each for longer"
        case "interrupted":
            return f"{took}; interrupted"
        case _:
            return took


def format_tensor(view: TensorView) -> str:
    """Return where a tensor of a plan is, what moves it, and what other placements would cost."""
    axes = [name for name, _ in view.axes]
    stands = f", one of {view.equal} equal ones" if view.equal > 1 else ""
    lines = format_entries(
        [
            ("tensor", f"{view.tensor}{stands}; {_shape(view.shape)} in a microbatch"),
            ("mesh", ", ".join(f"{name} of {size} devices" for name, size in view.axes)),
        ]
    )
    if view.placements:
        placed = ", ".join(f"{own} over {name}" for own, name in zip(view.placements, axes, strict=True))
        lines += format_entries([("placed", placed)])
    rows = [(own.phase, own.role, own.kind, *own.placements, format_bytes(own.bytes), own.op) for own in view.uses]
    lines += heading("Made and read, per device")
    lines += format_table(("phase", "", "kind", *axes, "bytes", "op"), rows) if rows else ["nowhere"]
    lines += heading("Collectives on it, each alone on its link")
    moved = [
        (
            own.phase, own.kind, own.axis, own.change, format_bytes(own.bytes), format_seconds(own.seconds),
            str(own.times), "beside compute" if own.overlaps else "",
        )
        for own in view.moves
    ]  # fmt: skip
    header = ("phase", "collective", "over", "change", "bytes", "each", "per step", "")
    lines += format_table(header, moved) if moved else ["none"]
    lines += heading("Other placements: solved again on the same stages, mesh and microbatches")
    told = [_ended_with(f"{own.value}: ", own, view.simulated) for own in view.alternatives]
    lines += format_items(told) if told else ["none that can be asked for apart"]
    return "\n".join(lines) + "\n"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "a scalar"

"""Why a plan looks the way it does.

Where time and memory go, what each mesh axis does, which tensor lies where, and why the runners-up lost.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from autopar.cluster import Cluster, cluster_from_dict
from autopar.cost.collectives import widest_tier
from autopar.describe.device_groups import track_word
from autopar.describe.one_line import name_stages
from autopar.errors import PlanError
from autopar.plan import AxisUse, BlockPlan, Plan, Simulated
from autopar.report.parts import from_peak, why_lost
from autopar.report.summary import (
    format_range,
    fullest_stage,
    headline,
    memory_breakdown,
    memory_categories,
    notes,
)
from autopar.report.text import WIDTH, bar, format_entries, format_share, format_table, heading, shorten, wrap
from autopar.sharding import Axis
from autopar.units import format_bytes, format_seconds

_PLACEMENT = re.compile(r"[RSP](?:\([^)]*\))?")
_MOSTLY = 0.5  # an axis is described by what it does to more than half of the tensors
_WORTH_NAMING = 0.005  # share of the step below which what is left over is not listed
_NAME_LENGTH = 44


def format_explain(plan: Plan, *, ops: bool = False) -> str:
    """Return the explanation of a plan.

    Args:
        plan: The plan.
        ops: Whether to list the placements of every op too, and not of the persistent tensors alone.
    """
    told = [] if plan.simulated is None else notes(plan.simulated)
    lines = [*headline(plan), "", *format_entries([("plan", plan.summary), *told])]
    if plan.simulated is not None:
        lines += _time(plan.simulated)
        lines += _memory(plan, plan.simulated)
    for number in range(len(plan.all_variants)):
        alone = plan.of_variant(number) if plan.variants else plan
        which = name_stages(plan.numbers_of(number)) if plan.variants else ""
        lines += _mesh(alone, which)
        lines += _placements(alone, which, ops=ops)
    if plan.alternatives:
        lines += _runners_up(plan)
    return "\n".join(lines) + "\n"


def _time(simulated: Simulated) -> list[str]:
    step = simulated.step_seconds
    parts = [part for part in from_peak(simulated) if part[1] > 0]
    rest = step - sum(seconds for _, seconds in parts)
    if rest > _WORTH_NAMING * step:
        parts.append(("not attributed", rest))
    bars = _waterfall([seconds for _, seconds in parts], step)
    rows = [
        (name, format_seconds(seconds), format_share(seconds, step), drawn)
        for (name, seconds), drawn in zip(parts, bars, strict=True)
    ]
    rows.append(("step", format_seconds(step), "100.0 %", bar(step, step)))
    return [
        *heading(f"Time of the busiest stage; MFU {100 * simulated.mfu:.1f} %"),
        *format_table(("part", "time", "share", ""), rows),
    ]


def _waterfall(values: Sequence[float], whole: float) -> list[str]:
    """Return a bar per value, each beginning where the one before ends."""
    return [bar(value, whole, start=sum(values[:number])) for number, value in enumerate(values)]


def _memory(plan: Plan, simulated: Simulated) -> list[str]:
    number, fullest, limit = fullest_stage(plan, simulated)
    sizes = [(name, size) for name in memory_categories(simulated) if (size := fullest.breakdown.get(name, 0.0)) > 0]
    bars = _waterfall([size for _, size in sizes], limit)
    rows = [
        (name, format_bytes(size), format_share(size, limit), drawn)
        for (name, size), drawn in zip(sizes, bars, strict=True)
    ]
    rows.append(("peak", format_bytes(fullest.peak), format_share(fullest.peak, limit), bar(fullest.peak, limit)))
    rows.append(("free", format_bytes(limit - fullest.peak), format_share(limit - fullest.peak, limit), ""))
    word = track_word(plan)
    lines = [
        *heading(f"Memory of {word} {number}, the fullest, per device; limit {format_bytes(limit)}"),
        *format_table(("category", "bytes", "of limit", ""), rows),
    ]
    if len(simulated.stages) > 1:
        lines += ["", *memory_breakdown(plan, simulated)]
    return lines


def split_placements(text: str, num_axes: int) -> tuple[str, ...]:
    """Return the placements of a text, one per mesh axis.

    Raises:
        PlanError: If the text holds anything else or not one placement per axis.

    >>> split_placements("S(0)RP(max)", 3)
    ('S(0)', 'R', 'P(max)')
    """
    parts = tuple(_PLACEMENT.findall(text))
    if "".join(parts) != text or len(parts) != num_axes:
        raise PlanError(
            f"{text!r} is not a placement on a mesh of {num_axes} axes",
            hint="write R, S(dim) or P once per mesh axis, e.g. S(0)R",
        )
    return parts


def _mesh(plan: Plan, which: str) -> list[str]:
    cluster = cluster_from_dict(plan.job.cluster)
    title = f"Mesh of {which or 'a stage'}: {plan.device_mesh if plan.mesh else 'one device'}"
    lines = heading(title if which else f"{title}; {len(plan.stages)} {'stage' if len(plan.stages) == 1 else 'stages'}")
    states = _count_placements(plan, lambda block: (state.placement for state in block.states))
    results = _count_placements(plan, lambda block: (text for op in block.ops for text in op.outputs if text))
    entries = [
        (axis.name, f"{_reach(axis, cluster)}; {_effect(states[position], results[position], use)}")
        for position, (axis, use) in enumerate(zip(plan.mesh, _uses(plan), strict=True))
    ]
    return lines + format_entries(entries)


def _count_placements(plan: Plan, texts: Callable[[BlockPlan], Iterable[str]]) -> list[Counter[str]]:
    """Return per mesh axis how often each placement occurs among the given texts of all instances of all blocks."""
    counts: list[Counter[str]] = [Counter() for _ in plan.mesh]
    for block in plan.blocks:
        for text in texts(block):
            for counter, placement in zip(counts, split_placements(text, len(plan.mesh)), strict=True):
                counter[placement] += len(block.instances)
    return counts


def _reach(axis: Axis, cluster: Cluster) -> str:
    devices = f"{axis.size} devices, {axis.stride} apart" if axis.stride > 1 else f"{axis.size} neighbouring devices"
    tier = widest_tier(axis, cluster)
    where = ("inside a node", "across nodes")[tier] if tier < 2 else f"across domains of {cluster.tiers[tier][0]}"
    return f"{devices}, {where}"


def _uses(plan: Plan) -> tuple[AxisUse | None, ...]:
    """Return what each axis of a plan of one variant does; None for all in plans written before that was kept."""
    return plan.uses[0] if plan.uses else (None,) * len(plan.mesh)


_ROLES = {
    "dp": "data parallel: splits the samples",
    "tp": "tensor parallel: splits the parameters where they are used",
    "ep": "expert parallel: splits the experts",
    "cp": "context parallel: splits the positions of a sequence",
    "spatial": "spatially parallel: splits height or width",
    "idle": "idle: all its devices do the same work",
}
_COPIED = {
    0: "copies parameters, gradients and optimizer state",
    1: "shares the optimizer state (ZeRO-1), copies parameters and gradients",
    2: "shares gradients and optimizer state (ZeRO-2), copies parameters",
    3: "shares parameters, gradients and optimizer state (ZeRO-3), gathers parameters for use",
}
"""What axes do, and what those that copy the parameters they use share of what is kept."""


def _words(use: AxisUse) -> str:
    """Return what an axis does."""
    copies = use.role in ("dp", "cp", "spatial")
    return f"{_ROLES[use.role]}, {_COPIED[use.zero]}" if copies else _ROLES[use.role]


def _effect(states: Counter[str], results: Counter[str], use: AxisUse | None) -> str:
    num_states, num_results = states.total(), results.total()
    sharded = sum(number for placement, number in states.items() if placement.startswith("S"))
    batch = results["S(0)"]
    splits_states = sharded > _MOSTLY * num_states
    splits_batch = batch > _MOSTLY * num_results
    match splits_states, splits_batch:
        case True, True:
            what = "splits dim 0 of the data and the parameters"
        case True, False:
            what = "splits the parameters"
        case False, True:
            what = "splits dim 0 of the data, copies the parameters"
        case _:
            what = "mixed"
    if use is not None:
        what = _words(use)
    counts = [f"{sharded} of {num_states} parameters sharded"] if num_states else []
    if num_results:
        inner = sum(number for placement, number in results.items() if placement.startswith("S")) - batch
        partial = sum(number for placement, number in results.items() if placement.startswith("P"))
        shares = [
            ("dim 0 sharded", batch),
            ("other dim sharded", inner),
            ("partial", partial),
            ("copied", results["R"]),
        ]
        listed = ", ".join(f"{name} {100 * number / num_results:.0f} %" for name, number in shares if number)
        counts.append(f"op results: {listed}")
    return f"{what} ({'; '.join(counts)})" if counts else what


def _placements(plan: Plan, which: str, *, ops: bool) -> list[str]:
    on = f" on {which}" if which else ""
    lines = heading(f"Placements{on} by mesh axis: S(d) sharded on dim d, R copied, P partial")
    axes = [axis.name for axis in plan.mesh]
    for axis, use in zip(axes, _uses(plan), strict=True):
        if use is not None and use.zero in (1, 2):
            what = "gradients and optimizer state are" if use.zero == 2 else "optimizer state is"
            lines += wrap(f"besides, {what} split over {axis} (ZeRO-{use.zero})", WIDTH)
    for block in plan.blocks:
        lines += ["", _describe_block(block)]
        rows = [
            (shorten(state.value, _NAME_LENGTH), *split_placements(state.placement, len(axes)))
            for state in block.states
        ]
        if rows:
            lines += format_table(("tensor", *axes), rows)
        else:
            lines.append("no persistent tensors")
        if ops:
            moves = [
                (shorten(op.op, _NAME_LENGTH), f"{_arrow_side(op.inputs)} -> {_arrow_side(op.outputs)}")
                for op in block.ops
            ]
            lines += ["", *format_table(("op", "inputs -> outputs"), moves)] if moves else []
    return lines


def _arrow_side(placements: tuple[str, ...]) -> str:
    return ", ".join(text or "." for text in placements)


def _describe_block(block: BlockPlan) -> str:
    number = len(block.instances)
    if number == 1:
        only = block.instances[0]
        return f"block {only}" + ("" if block.representative == only else f": names of block {block.representative}")
    consecutive = block.instances[-1] - block.instances[0] == number - 1
    which = (
        format_range((block.instances[0], block.instances[-1] + 1))
        if consecutive
        else ", ".join(map(str, block.instances))
    )
    return shorten(f"blocks {which}: {number} equal ones, names of block {block.representative}", WIDTH)


def _runners_up(plan: Plan) -> list[str]:
    lines = heading("Runners-up, and why they lost")
    entries = [(f"{number}", why_lost(plan, other)) for number, other in enumerate(plan.alternatives, start=2)]
    return lines + format_entries(entries)

"""What differs between two plans of a model, and what that costs."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from autopar.errors import PlanError
from autopar.plan import BlockPlan, Plan
from autopar.report.parts import time_parts
from autopar.report.summary import headline, memory_categories
from autopar.report.text import WIDTH, format_change, format_entries, format_table, heading, wrap
from autopar.units import format_bytes, format_seconds

_ANOTHER_FILE = (
    "The plans were made for different files of a model of this name and size; values that both files name alike are "
    "compared."
)
_MOST = 20
"""Placements listed per distinct block before the rest is counted."""


def format_difference(first: Plan, second: Plan) -> str:
    """Return what changes from one plan to another: degrees, stages, placements by block, and time and memory.

    Raises:
        PlanError: If the plans are of different models, or of steps of different modes.
    """
    what, other = _what(first), _what(second)
    if what != other:
        raise PlanError(f"one plan is for {what}, the other for {other}", hint="compare plans of one model")
    changes = [*_outer(first, second)]
    lines = [*headline(first), ""]
    if first.model.sha256 != second.model.sha256:
        lines += [*wrap(_ANOTHER_FILE, WIDTH), ""]
    lines += format_entries([("first", first.summary), ("second", second.summary), *_verdict(first, second)])
    lines += heading("Decisions")
    lines += format_table(("what", "first", "second"), changes) if changes else ["the same mesh, stages and schedule"]
    lines += _placements(first, second)
    lines += _costs(first, second)
    return "\n".join(lines) + "\n"


def _verdict(first: Plan, second: Plan) -> list[tuple[str, str]]:
    """Return by how much the second step is longer or shorter, and its peak higher or lower, if both are simulated."""
    if first.simulated is None or second.simulated is None:
        return []
    steps = first.simulated.step_seconds, second.simulated.step_seconds
    before, after = (
        max((stage.peak for stage in own.stages), default=0.0) for own in (first.simulated, second.simulated)
    )
    time, memory = _compared(*steps, "longer", "shorter"), _compared(before, after, "higher", "lower")
    return [
        (
            "result",
            f"the second step is {time} ({format_seconds(steps[1])} against {format_seconds(steps[0])}), "
            f"its peak memory {memory}",
        )
    ]


def _compared(before: float, after: float, more: str, less: str) -> str:
    """Return a change in words.

    >>> _compared(2.0, 3.0, "longer", "shorter"), _compared(2.0, 2.0, "longer", "shorter")
    ('50.0 % longer', 'equal')
    """
    change = 100 * (after / before - 1) if before > 0 else 0.0
    return f"{abs(change):.1f} % {more if change > 0 else less}" if abs(change) >= 0.05 else "equal"


def _what(plan: Plan) -> str:
    """Return what a plan is for: its model, by name and size, the size of a sample, and the mode of a step."""
    model = plan.model
    sample = f", samples of {model.tokens} tokens" if model.tokens else ""
    return f"{model.name} ({model.num_parameters:,} parameters{sample}, {plan.job.mode})"


def _outer(first: Plan, second: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield what differs outside the blocks, with both contents."""
    pairs = (
        ("gpus", first.job.gpus, second.job.gpus),
        ("global batch", first.job.global_batch, second.job.global_batch),
        ("mesh of a stage", _meshes(first), _meshes(second)),
        ("stages", len(first.stages), len(second.stages)),
        ("blocks per stage", _sizes(first), _sizes(second)),
        ("schedule", first.schedule, second.schedule),
        ("microbatches", first.num_microbatches, second.num_microbatches),
        ("recompute", _recompute(first), _recompute(second)),
        ("offload", _offload(first), _offload(second)),
    )
    for what, before, after in pairs:
        if str(before) != str(after):
            yield what, str(before), str(after)


def _meshes(plan: Plan) -> str:
    """Return the mesh of all stages, or those of each run of stages that have the same."""
    if not plan.variants:
        return str(plan.device_mesh)
    runs = groupby(str(plan.variant_of(stage).device_mesh) or "one device" for stage in plan.stages)
    return ", ".join(mesh if (count := len(list(run))) == 1 else f"{count} × {mesh}" for mesh, run in runs)


def _sizes(plan: Plan) -> str:
    return " ".join(str(stage.blocks[1] - stage.blocks[0]) for stage in plan.stages)


def _offload(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(stage.offload or "nothing" for stage in plan.stages))


def _recompute(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(stage.recompute for stage in plan.stages))


def _placements(first: Plan, second: Plan) -> list[str]:
    lines: list[str] = []
    compared, differ = dict[tuple[int, int], list[int]](), False
    for index in range(min(plan.stages[-1].blocks[1] for plan in (first, second))):
        pair = first.stage_of(index).variant, second.stage_of(index).variant
        compared.setdefault(pair, []).append(index)
    for (before, after), indices in compared.items():
        here, there = first.all_variants[before], second.all_variants[after]
        if [axis.name for axis in here.mesh] != [axis.name for axis in there.mesh]:
            differ = True
            continue
        others = {block.representative: block for block in there.blocks}
        for block in here.blocks:
            other, instances = others.get(block.representative), [i for i in block.instances if i in indices]
            if other is None or not instances:
                continue
            rows = [*_moved("parameter", _values(block), _values(other)), *_moved("op", _ops(block), _ops(other))]
            if rows:
                count = len(instances)
                shown = block.representative if block.representative in instances else instances[0]
                of = f" and {count - 1} equal ones" if count > 1 else ""
                lines += heading(f"Block {shown}{of}, placements that differ: {len(rows)}")
                lines += format_table(("what", "name", "first", "second"), rows[:_MOST])
                if len(rows) > _MOST:
                    lines.append(f"and {len(rows) - _MOST} more")
    if differ:
        some = " of some stages" if len(compared) > 1 else ""
        lines += [*heading("Placements"), f"not compared{some}: the meshes have different axes"]
    return lines or [*heading("Placements"), "all the same"]


def _values(block: BlockPlan) -> Mapping[str, str]:
    """Return placements of parameters, and of what enters and leaves a block, by name."""
    return {item.value: item.placement for item in (*block.states, *block.arrivals, *block.departures)}


def _ops(block: BlockPlan) -> Mapping[str, str]:
    return {op.op: f"{' '.join(op.inputs)} -> {' '.join(op.outputs)}" for op in block.ops}


def _moved(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterable[tuple[str, str, str, str]]:
    for name, placement in before.items():
        if after.get(name, placement) != placement:
            yield what, name, placement, after[name]


def _costs(first: Plan, second: Plan) -> list[str]:
    before, after = first.simulated, second.simulated
    if before is None or after is None:
        return []
    times = [("step", before.step_seconds, after.step_seconds)]
    old_parts, new_parts = dict(time_parts(before)), dict(time_parts(after))
    names = dict.fromkeys((*old_parts, *new_parts))
    times += [(name, old_parts.get(name, 0.0), new_parts.get(name, 0.0)) for name in names]
    rows = [(name, format_seconds(old), format_seconds(new), _change(new, old)) for name, old, new in times]
    lines = [*heading("Time of the busiest stage"), *format_table(("part", "first", "second", "change"), rows)]
    full = [max(found.stages, key=lambda stage: stage.peak) for found in (before, after)]
    sizes = [("peak", full[0].peak, full[1].peak)]
    categories = dict.fromkeys((*memory_categories(before), *memory_categories(after)))
    sizes += [(name, full[0].breakdown.get(name, 0.0), full[1].breakdown.get(name, 0.0)) for name in categories]
    rows = [(name, format_bytes(old), format_bytes(new), _change(new, old)) for name, old, new in sizes if old or new]
    lines += heading("Memory of the fullest stage, per device")
    return [*lines, *format_table(("category", "first", "second", "change"), rows)]


def _change(new: float, old: float) -> str:
    return format_change(new, old) if old > 0 else ""

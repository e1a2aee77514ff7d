"""How many bytes a device of a stage holds: resident tensors, activations of the microbatches in flight, and what runs.

A value takes memory from the instruction that defines it to the last one of the segment that reads it; saved values
and values handed on stay to the end of the segment, saved ones until the backward of their block reads them last.
External values are resident and stored values are written in place of one, so neither counts. A value that passes
through several blocks is one tensor: the first block of the stage that saves it pays for it.

Where the backward is split, what the weight pass of a block reads stays until then, and for a value that passed through
several blocks until the weight pass of the block that pays.

With recompute a block keeps its inputs only; what its forward saves is there from the second forward to its backward.
Receive buffers and copies that the framework or the allocator makes are not counted.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import NamedTuple

from autopar.program.records import (
    Category,
    Instruction,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    StageProgram,
    defines,
    reads,
)
from autopar.schedule import Pass, Task
from autopar.simulate.pipeline import Run
from autopar.simulate.timeline import MemoryPeak, MemorySample

Table = Mapping[tuple[int, SegmentPhase], Segment]


@dataclass(frozen=True, slots=True)
class Peak:
    """A fullest moment, without resident tensors.

    Attributes:
        bytes: All of it.
        activations: The part that outlives the running task.
    """

    bytes: float
    activations: float

    def on_top_of(self, kept: float) -> "Peak":
        """Return the moment with `kept` more bytes of activations."""
        return Peak(self.bytes + kept, self.activations + kept)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the tasks of a stage need besides resident tensors and other microbatches.

    Attributes:
        kept: Bytes one microbatch leaves behind between its forward and its backward.
        put_off: Bytes it leaves behind between its backward and its weight pass, where the schedule splits these.
        passes: Fullest moment of a task; it counts the task's own microbatch only.
        update: Fullest moment of the reductions and the update.
    """

    kept: float
    put_off: float
    passes: Mapping[Pass, Peak]
    update: float


def liveness_peak(
    instructions: Sequence[Instruction], start: Mapping[str, float], kept: Collection[str], free: Collection[str]
) -> tuple[float, frozenset[str]]:
    """Return the highest number of live bytes, and the names of the values that are live then.

    Args:
        instructions: What runs.
        start: Bytes of the values that are live before the first instruction.
        kept: Values that stay live to the end.
        free: Values that take no memory.
    """
    last_use = {operand.value: i for i, instruction in enumerate(instructions) for operand in reads(instruction)}
    live = {name: size for name, size in start.items() if name not in free}
    total = sum(live.values())
    peak, names = total, frozenset(live)
    for name in [name for name in live if name not in last_use and name not in kept]:
        total -= live.pop(name)
    for i, instruction in enumerate(instructions):
        touched = [operand for operand in defines(instruction) if operand.value not in free]
        for operand in touched:
            live[operand.value] = operand.bytes
            total += operand.bytes
        if total > peak:
            peak, names = total, frozenset(live)
        for name in {operand.value for operand in (*reads(instruction), *touched)}:
            if name in live and name not in kept and last_use.get(name, i) == i:
                total -= live.pop(name)
    return peak, names


def _sizes(operands: Sequence[Operand]) -> dict[str, float]:
    return {operand.value: operand.bytes for operand in operands}


def _stored(segment: Segment) -> set[str]:
    return {store.value.value for store in segment.stores}


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a stage.

    Attributes:
        kind: Which kind.
        paid: Its inputs that an earlier block keeps.
        fresh: Bytes it keeps besides.
        late: Values of its forward that it keeps until its weight pass.
        late_bytes: Their bytes, and those of what its backward keeps until then.
    """

    kind: int
    paid: frozenset[str]
    fresh: float
    late: frozenset[str] = frozenset()
    late_bytes: float = 0.0


def _kept(segment: Segment, recompute: bool, trains: bool) -> dict[str, float]:
    """Return what a block keeps from its forward to its backward."""
    if not trains:
        return {}
    return _sizes(segment.inputs if recompute else segment.saved)


def _weight_reads(kind: int, table: Table) -> dict[str, float]:
    """Return the values of the forward of a block that its weight pass reads."""
    weight = table.get((kind, SegmentPhase.WEIGHT))
    if weight is None:
        return {}
    names = {operand.value for instruction in weight.instructions for operand in reads(instruction)}
    return _sizes([operand for operand in table[kind, SegmentPhase.FORWARD].saved if operand.value in names])


def _held_back(kind: int, table: Table) -> dict[str, float]:
    """Return what the backward of a block keeps for its weight pass."""
    backward = table.get((kind, SegmentPhase.BACKWARD))
    return _sizes(backward.saved) if backward is not None else {}


def _blocks(stage: StageProgram, table: Table, trains: bool) -> Iterator[_Block]:
    """Yield the blocks in order, following values that pass through to their origin."""
    payers: dict[tuple[int, str], tuple[int, str, float]] = {}  # origin -> who keeps it: block, name there and bytes
    late: dict[tuple[int, str], None] = {}
    found: list[_Block] = []
    arriving: list[tuple[int, str]] = []  # origin of each value handed to the next block: block and name there
    paid: set[tuple[int, str]] = set()
    for index, kind in enumerate(stage.blocks):
        segment = table[kind, SegmentPhase.FORWARD]
        if index == 0:
            arriving = [(-1, str(position)) for position in range(len(segment.inputs))]
        origins = {operand.value: origin for operand, origin in zip(segment.inputs, arriving, strict=True)}
        kept = _kept(segment, stage.recompute, trains)
        before = frozenset(name for name, origin in origins.items() if origin in paid)
        found.append(_Block(kind, before, sum(size for name, size in kept.items() if name not in before)))
        for values, waits in ((kept, False), (_weight_reads(kind, table), True)):
            for name, size in values.items():
                origin = origins.get(name, (index, name))
                payers.setdefault(origin, (index, name, size))
                late |= {origin: None} if waits else {}
        paid.update(origins.get(name, (index, name)) for name in kept)
        arriving = [origins.get(operand.value, (index, operand.value)) for operand in segment.outputs]
    for index, block in enumerate(found):
        own = {name: size for payer, name, size in map(payers.__getitem__, late) if payer == index}
        yield replace(
            block,
            late=frozenset(own),
            late_bytes=sum(own.values()) + sum(_held_back(block.kind, table).values()),
        )


def _forward_peak(segment: Segment, paid: frozenset[str], recompute: bool, trains: bool) -> Peak:
    kept = _kept(segment, recompute, trains)
    ends = kept.keys() | {operand.value for operand in segment.outputs}
    peak, names = liveness_peak(segment.instructions, _sizes(segment.inputs), ends, paid | _stored(segment))
    return Peak(peak, sum(size for name, size in kept.items() if name in names))


def _backward_peak(forward: Segment, backward: Segment | None, block: _Block, recompute: bool) -> Peak:
    paid = block.paid
    if backward is None:
        return Peak(0.0, 0.0)
    gradients = _sizes(backward.inputs)
    saved = _sizes(forward.saved)
    outputs = {operand.value for operand in (*backward.outputs, *backward.saved)} | block.late
    if not recompute:
        free = paid | _stored(backward)
        peak, names = liveness_peak(backward.instructions, saved | gradients, outputs, free)
        return Peak(peak, sum(size for name, size in saved.items() if name in names))
    inputs = {operand.value for operand in forward.inputs}  # kept, and counted as such by the caller
    again, _ = liveness_peak(forward.instructions, {}, saved.keys(), inputs | _stored(forward))
    peak, _ = liveness_peak(backward.instructions, saved | gradients, outputs, inputs | _stored(backward))
    return Peak(max(again + sum(gradients.values()), peak), 0.0)


def _weight_peak(block: _Block, table: Table) -> Peak:
    weight = table.get((block.kind, SegmentPhase.WEIGHT))
    if weight is None:
        return Peak(block.late_bytes, block.late_bytes)
    held = _held_back(block.kind, table)
    waiting = {name: size for name, size in _weight_reads(block.kind, table).items() if name in block.late}
    others = block.late_bytes - sum(waiting.values()) - sum(held.values())  # for blocks that came before
    there = {operand.value for operand in table[block.kind, SegmentPhase.FORWARD].saved}
    free = (there - waiting.keys()) | _stored(weight)
    peak, names = liveness_peak(weight.instructions, waiting | held, (), free)
    return Peak(peak, sum(size for name, size in (waiting | held).items() if name in names)).on_top_of(others)


def stage_memory(stage: StageProgram, table: Table, trains: bool) -> StageMemory:
    """Return what the tasks of a stage need; equal blocks are looked at once."""
    blocks = list(_blocks(stage, table, trains))
    known: dict[_Block, dict[Pass, Peak]] = {}
    passes = dict.fromkeys(Pass, Peak(0.0, 0.0))
    put_off = fsum(block.late_bytes for block in blocks)
    kept, waiting, late = 0.0, put_off, 0.0  # of the blocks before this one, of those after it, of those before it
    for block in blocks:
        if block not in known:
            segment = table[block.kind, SegmentPhase.FORWARD]
            reverse = table.get((block.kind, SegmentPhase.BACKWARD)) if trains else None
            known[block] = {
                Pass.FORWARD: _forward_peak(segment, block.paid, stage.recompute, trains),
                Pass.BACKWARD: _backward_peak(segment, reverse, block, stage.recompute),
                Pass.WEIGHT: _weight_peak(block, table),
            }
        waiting -= block.late_bytes
        before = kept + (block.fresh if stage.recompute else 0.0)
        under = {Pass.FORWARD: kept, Pass.BACKWARD: before + waiting, Pass.WEIGHT: late}
        for kind, peak in known[block].items():
            passes[kind] = max(passes[kind], peak.on_top_of(under[kind]), key=lambda moment: moment.bytes)
        kept += block.fresh
        late += block.late_bytes
    once = [
        table.get((kind, phase)) for kind in set(stage.blocks) for phase in (SegmentPhase.REDUCE, SegmentPhase.UPDATE)
    ]
    update = max((liveness_peak(part.instructions, {}, (), _stored(part))[0] for part in once if part), default=0.0)
    return StageMemory(kept, put_off, passes, update)


class TaskMemory(NamedTuple):
    """Fullest moment of a task (None: the update) in bytes: what is kept of all microbatches, and everything else."""

    task: Task | None
    activations: float
    transient: float


def memory_over_time(chunks: Sequence[StageMemory], order: Sequence[Task], trains: bool) -> Iterator[TaskMemory]:
    """Yield the fullest moment of each task in order, then of the update if there is one; without resident tensors.

    Args:
        chunks: What the tasks of each stage of the group of devices need.
        order: The tasks of the group.
        trains: Whether there are backwards and an update.
    """
    left: list[dict[Pass, int]] = [dict.fromkeys(Pass, 0) for _ in chunks]  # microbatches by their last pass
    for task in order:
        counts = left[task.chunk]
        if task.kind is not Pass.FORWARD:
            counts[Pass.FORWARD if task.kind is Pass.BACKWARD else Pass.BACKWARD] -= 1
        others = sum(
            count[Pass.FORWARD] * memory.kept + count[Pass.BACKWARD] * memory.put_off
            for count, memory in zip(left, chunks, strict=True)
        )
        peak = chunks[task.chunk].passes[task.kind]
        yield TaskMemory(task, others + peak.activations, peak.bytes - peak.activations)
        counts[task.kind] += 1 if trains else 0
    if trains:
        yield TaskMemory(None, 0.0, max(memory.update for memory in chunks))


def _breakdown(chunks: Iterable[StageProgram], moment: TaskMemory) -> tuple[tuple[Category, float], ...]:
    """Return the bytes of a moment by category, every category once."""
    sizes = dict.fromkeys(Category, 0.0)
    for resident in (part for stage in chunks for part in stage.resident):
        sizes[resident.category] += resident.bytes
    sizes[Category.ACTIVATIONS] = moment.activations
    sizes[Category.TRANSIENT] = moment.transient
    return tuple(sizes.items())


@dataclass(frozen=True, slots=True)
class StageMoments:
    """The fullest moment of each task of the stages of a group of devices, and when the task starts."""

    chunks: Sequence[StageProgram]
    starts: Sequence[float]
    moments: Sequence[TaskMemory]

    @property
    def resident(self) -> float:
        """Bytes that are there all the time."""
        return fsum(part.bytes for stage in self.chunks for part in stage.resident)

    def peak(self) -> MemoryPeak:
        """Return the fullest moment of the step, the first of several."""
        sizes = [moment.activations + moment.transient for moment in self.moments]
        highest = sizes.index(max(sizes))
        moment = self.moments[highest]
        during = "update" if moment.task is None else str(moment.task)
        return MemoryPeak(self.resident + sizes[highest], self.starts[highest], during, _breakdown(self.chunks, moment))

    def samples(self) -> Iterator[MemorySample]:
        """Yield the fullest moment of each task."""
        resident = self.resident
        for start, moment in zip(self.starts, self.moments, strict=True):
            yield MemorySample(self.chunks[0].index, start, resident + moment.activations + moment.transient)


def stage_moments(
    chunks: Sequence[StageProgram], program: Program, runs: Sequence[Run], update_start: float
) -> StageMoments:
    """Return the fullest moments of the stages of a group of devices, whose tasks run as given."""
    table = program.table()
    memory = [stage_memory(stage, table, program.trains) for stage in chunks]
    moments = list(memory_over_time(memory, [run.task for run in runs], program.trains))
    starts = [run.start for run in runs]
    return StageMoments(chunks, [*starts, update_start] if program.trains else starts, moments)

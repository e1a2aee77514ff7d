"""One tensor, or the results of one op, of a plan: where it is, what moves it, and what other placements would cost."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from autopar.alternatives.decisions import base
from autopar.alternatives.job_of_plan import task_of
from autopar.alternatives.records import Alternative
from autopar.alternatives.weigh import WEIGHING_SECONDS, Scale
from autopar.cost import CostModel
from autopar.errors import PlanError
from autopar.folding.fold import Folded
from autopar.ir.graph import Op
from autopar.pins import Choices, Pins
from autopar.plan import Plan, Simulated
from autopar.program.lower import lower
from autopar.program.records import (
    Collective,
    Compute,
    Exchange,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
)
from autopar.program.units import bytes_together, units_of
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.recompute import Recompute
from autopar.sharding import Placements, Shard, parse_placements
from autopar.tactics import Shard as Split

MOST_PLACEMENTS = 8
"""Most other placements that are weighed."""


@dataclass(frozen=True, slots=True)
class Use:
    """An op that makes or reads the tensor.

    Attributes:
        phase: When it runs.
        role: "made" or "read".
        op: Its name; in the representative of equal blocks if it is in another block than the tensor.
        kind: Its kind.
        placements: Of the tensor there, one per mesh axis.
        shape: What one device has of it there.
        bytes: The same in bytes.
    """

    phase: str
    role: str
    op: str
    kind: str
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: float


@dataclass(frozen=True, slots=True)
class Move:
    """A collective on the tensor.

    Attributes:
        phase: When it runs.
        kind: "all_gather", ..., or "exchange" of rows with neighbours.
        axis: Mesh axis it goes over.
        change: Placement on that axis before and after.
        bytes: On the wire.
        seconds: Of one, alone on the link.
        times: How often a step has it, on the stage that has it most often.
        overlaps: Whether it runs beside compute.
    """

    phase: str
    kind: str
    axis: str
    change: str
    bytes: float
    seconds: float
    times: int
    overlaps: bool


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor of a plan.

    Attributes:
        asked: The name that was given.
        tensor: The tensor: the one asked for, or the first result of the op asked for.
        shape: Whole shape in one microbatch.
        equal: How many tensors it stands for.
        axes: Names and sizes of the mesh axes.
        placements: Where it is made or stored, one per mesh axis.
        uses: What makes and reads it.
        moves: What moves it.
        simulated: The simulator's verdict on the plan.
        alternatives: Other placements, one axis changed at a time; the stages, mesh, microbatches and schedule are the
            plan's, all else is free.
    """

    asked: str
    tensor: str
    shape: tuple[int, ...]
    equal: int
    axes: tuple[tuple[str, int], ...]
    placements: tuple[str, ...]
    uses: tuple[Use, ...]
    moves: tuple[Move, ...]
    simulated: Simulated
    alternatives: tuple[Alternative, ...]


def view_tensor(
    plan: Plan,
    name: str,
    *,
    time_limit: float = WEIGHING_SECONDS,
    model: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> TensorView:
    """Return what a plan does with a tensor, or with the first result of an op; arguments as of `weigh`.

    Raises:
        PlanError: If there is no such tensor or op (the hint has the nearest name), if stages have meshes of their own,
            or as of `weigh`.
    """
    if plan.simulated is None:
        raise PlanError("the plan has no simulated step to compare with", hint="solve again")
    if plan.variants:
        raise PlanError("stages of this plan have meshes of their own", hint="autopar explain PLAN --ops lists all")
    task = task_of(plan, model=model, cache_dir=cache_dir, progress=progress)
    folded = task.workload.folded(plan.microbatch)
    stands = _representatives(folded)
    own = _find(name, folded, stands)
    tensor, named = stands[own], _names(own, folded)
    uses, moves = _traffic(tensor, lower(plan, folded, task.costs), task.costs)
    placed = _placements(plan, tensor, folded)
    equal = [other for other, representative in stands.items() if representative == tensor]
    scale = Scale(task, plan, time_limit, progress, should_stop)
    alternatives: list[Alternative] = []
    pattern = _pattern(equal, stands)
    if pattern is not None and placed and tensor in folded.by_value:
        values = list(_others(plan, folded.graph.values[tensor].shape, placed, pattern))[:MOST_PLACEMENTS]
        scale.begin(len(values))
        alternatives = [
            scale.pinned(tensor, text, pins, _Holds(tensor, axis, wanted, folded))
            for text, pins, axis, wanted in values
        ]
    return TensorView(
        asked=name,
        tensor=own,
        shape=folded.graph.values[tensor].shape,
        equal=len(equal),
        axes=tuple((axis.name, axis.size) for axis in plan.mesh),
        placements=tuple(map(str, placed)),
        uses=tuple(replace(use, op=named.get(use.op, use.op)) for use in uses),
        moves=moves,
        simulated=plan.simulated,
        alternatives=tuple(alternatives),
    )


def _representatives(folded: Folded) -> dict[str, str]:
    """Return for every value the one of the same position in the representative of its block."""
    found: dict[str, str] = {}
    for op, stands in _ops(folded):
        found.update((own, other) for own, other in zip(op.outputs, stands.outputs, strict=True) if own)
    for op, stands in _ops(folded):
        for own, other in zip(op.inputs, stands.inputs, strict=True):
            if own:
                found.setdefault(own, found.get(other, other) if own != other else own)
    return found


def _ops(folded: Folded) -> Iterator[tuple[Op, Op]]:
    """Yield every op of the graph with the op that stands for it."""
    positions = [0] * folded.num_blocks
    for op in folded.graph.ops:
        yield op, folded.kinds[folded.chain[op.block]].ops[positions[op.block]]
        positions[op.block] += 1


def _find(name: str, folded: Folded, stands: Mapping[str, str]) -> str:
    """Return the tensor a name speaks of: its own, or the first result of the op of that name."""
    if name in stands:
        return name
    results = {op.name: next(own for own in op.outputs if own) for op in folded.graph.ops}
    if name in results:
        return results[name]
    close = get_close_matches(name, {**stands, **results}, n=3, cutoff=0.3)
    hint = f"did you mean {', '.join(close)}?" if close else "autopar explain PLAN --ops lists tensors and ops"
    raise PlanError(f"the model has no tensor or op {name!r}", hint=hint)


def _names(tensor: str, folded: Folded) -> dict[str, str]:
    """Return the ops that make or read a tensor by the names of the ops that stand for them."""
    return {stands.name: op.name for op, stands in _ops(folded) if tensor in op.inputs or tensor in op.outputs}


def _placements(plan: Plan, tensor: str, folded: Folded) -> Placements:
    """Return how a tensor lies where it is stored or made; empty for what is everywhere without cost."""
    for block in plan.blocks:
        for state in block.states:
            if state.value == tensor:
                return parse_placements(state.placement)
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            for name, text in zip(op.outputs, placed.outputs, strict=True):
                if name == tensor and text:
                    return parse_placements(text)
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class _Holds:
    """Whether a plan places a tensor on an axis as asked; None asks that it is not split."""

    tensor: str
    axis: int
    wanted: Shard | None
    folded: Folded

    def __call__(self, plan: Plan) -> bool:
        placed = _placements(plan, self.tensor, self.folded)[self.axis]
        return placed == self.wanted if self.wanted is not None else not isinstance(placed, Shard)


def _traffic(tensor: str, program: Program, costs: CostModel) -> tuple[tuple[Use, ...], tuple[Move, ...]]:
    uses: list[Use] = []
    moves: list[Move] = []
    for segment in program.segments:
        stages = [stage for stage in program.stages if segment.kind in stage.blocks]
        if not stages:
            continue
        own = list(_uses(tensor, segment))
        uses += own
        names = {operand.value for operand in _operands(tensor, segment)}
        times = max(_times(segment, stage, program.num_microbatches) for stage in stages)
        if times:
            moves += _moves(names, segment, costs.on(range(*stages[0].devices)), times)
    return tuple(dict.fromkeys(uses)), tuple(moves)


def _times(segment: Segment, stage: StageProgram, microbatches: int) -> int:
    """Return how often a stage runs a segment in a step."""
    kept = [own for kind, own in zip(stage.blocks, stage.recompute, strict=True) if kind == segment.kind]
    match segment.phase:
        case SegmentPhase.FORWARD:
            return microbatches * sum(2 if own is Recompute.FULL else 1 for own in kept)
        case SegmentPhase.AGAIN:
            return microbatches * sum(own is Recompute.SELECTIVE for own in kept)
        case SegmentPhase.BACKWARD | SegmentPhase.WEIGHT:
            return microbatches * len(kept)
        case _:
            return len(kept)


def _uses(tensor: str, segment: Segment) -> Iterator[Use]:
    for instruction in segment.instructions:
        if not isinstance(instruction, Compute):
            continue
        op = instruction.op
        sides = (("read", op.inputs, instruction.inputs), ("made", op.outputs, instruction.outputs))
        for role, names, operands in sides:
            for name, operand in zip(names, operands, strict=False):
                if name == tensor and operand is not None:
                    placed = tuple(map(str, operand.placements))
                    yield Use(str(segment.phase), role, op.name, op.kind, placed, operand.shape, operand.bytes)


def _operands(tensor: str, segment: Segment) -> Iterator[Operand]:
    """Yield the values of a segment that are the tensor at some placement, as ops and the segment's edge have it."""
    edge = {part.value for part in segment.parts if part.tensor == tensor}
    for operand in (*segment.inputs, *segment.external):
        if operand.value in edge:
            yield operand
    for instruction in segment.instructions:
        if isinstance(instruction, Compute):
            pairs = [
                *zip(instruction.op.inputs, instruction.inputs, strict=False),
                *zip(instruction.op.outputs, instruction.outputs, strict=False),
            ]
            yield from (operand for name, operand in pairs if name == tensor and operand is not None)


def _moves(names: set[str], segment: Segment, costs: CostModel, times: int) -> Iterator[Move]:
    """Yield the collectives of a segment on values that are the tensor, or become or were it without an op between."""
    steps = [own for own in segment.instructions if isinstance(own, Collective | Slice | Exchange)]
    grown = -1
    while grown != len(names):
        grown = len(names)
        for step in steps:
            if {step.operand.value, step.result.value} & names:
                names |= {step.operand.value, step.result.value}
    phase, units = str(segment.phase), units_of(segment)
    for step in steps:
        if step.operand.value not in names:
            continue
        if isinstance(step, Collective):
            together = bytes_together(step, units)
            seconds = float(costs.collective_seconds(step.kind, together, step.axis, step.routed))
            seconds *= step.bytes / together if together else 1.0
            change = f"{step.source} -> {step.target}"
            beside = step.overlaps or segment.phase is SegmentPhase.REDUCE
            yield Move(phase, str(step.kind), step.axis.name, change, step.bytes, seconds, times, beside)
        elif isinstance(step, Exchange):
            seconds = float(costs.exchange_seconds(step.bytes, step.axis))
            change = f"{step.before} rows before, {step.after} after"
            yield Move(phase, "exchange", step.axis.name, change, step.bytes, seconds, times, False)


def _pattern(equal: list[str], stands: Mapping[str, str]) -> str | None:
    """Return a pattern that speaks of equal tensors and no others; None if there is none."""
    if len(equal) == 1:
        return equal[0]
    parts = [re.split(r"(\d+)", name) for name in equal]
    if len({len(own) for own in parts}) > 1:
        return None
    pattern = "".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))
    spoken = {name for name in stands if fnmatchcase(name, pattern)}
    return pattern if spoken == set(equal) else None


def _others(
    plan: Plan, shape: tuple[int, ...], placed: Placements, pattern: str
) -> Iterator[tuple[str, Pins, int, Shard | None]]:
    """Yield other placements of a tensor, one axis changed at a time, with pins that say so, axis and placement.

    None is for any that does not split it.
    """
    decided = base(plan)
    for number, (axis, current) in enumerate(zip(plan.mesh, placed, strict=True)):
        if axis.size == 1:
            continue
        splits = [Split({pattern: dim}, axis.name) for dim in range(len(shape))]
        if isinstance(current, Shard):
            yield f"{axis.name}: {current} -> not split", Pins(decided, Choices(tactics=tuple(splits))), number, None
        for dim, split in enumerate(splits):
            if shape[dim] % axis.size == 0 and current != Shard(dim):
                pins = Pins(replace(decided, tactics=(split,)))
                yield f"{axis.name}: {current} -> {Shard(dim)}", pins, number, Shard(dim)

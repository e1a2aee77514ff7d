"""Which gradients of a stage could share a bucket, in the order in which its backward pass makes them.

The same order and the same keys are those of the simulator, which times them; here they are read off the instructions
alone, so that cuts of a plan or of a text are held against them before anything is timed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.fusion_plan import MICROBATCH, STEP, BucketCuts, FusionPlan
from autopar.program.bucket_order import Key, travels
from autopar.program.records import (
    Collective,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    StageProgram,
    Table,
    defines,
    reads,
)
from autopar.schedule import SCHEDULES

_SHOWN = 2
"""Gradients that a message shows on either side of the place."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient on its way into a collective.

    Attributes:
        block: Its block, counted within the stage.
        operand: The value that the collective reads.
        nbytes: Bytes that the collective deals with on one device.
    """

    block: int
    operand: Operand
    nbytes: float


def gradients(stage: StageProgram, table: Table, *, splits: bool) -> dict[Key, list[Gradient]]:
    """Return the gradients of a stage by what those that could share a bucket have in common.

    Args:
        stage: The stage.
        table: The segments of the program.
        splits: Whether the schedule splits the backward, so that gradients are made in a pass of their own.
    """
    found: dict[Key, list[Gradient]] = {}
    maker = SegmentPhase.WEIGHT if splits else SegmentPhase.BACKWARD
    for block in reversed(range(len(stage.blocks))):
        for phase, per in ((maker, MICROBATCH), (SegmentPhase.REDUCE, STEP)):
            segment = table.get((stage.blocks[block], phase))
            if segment is not None:
                for collective, hops in _traffic(segment):
                    key = (str(collective.kind), collective.axis.name, per, hops)
                    found.setdefault(key, []).append(Gradient(block, collective.operand, collective.bytes))
    return found


def _traffic(segment: Segment) -> Iterator[tuple[Collective, int]]:
    """Yield the collectives of a segment that run beside compute, each with how many of them it waits for."""
    behind: dict[str, int] = {}  # value -> collectives that it waits for
    for instruction in segment.instructions:
        hops = max((behind.get(operand.value, 0) for operand in reads(instruction)), default=0)
        if travels(instruction, segment.phase):
            assert isinstance(instruction, Collective), "gradients travel in collectives"
            yield instruction, hops
            hops += 1
        if hops:
            behind.update((operand.value, hops) for operand in defines(instruction))


def fault(stage: StageProgram, table: Table, *, splits: bool) -> str:
    """Return why the buckets of a stage cannot be, with the gradients around the place; "" if they can."""
    if not stage.buckets:
        return ""
    known = gradients(stage, table, splits=splits)
    seen: set[Key] = set()
    for cuts in stage.buckets:
        own = known.get(cuts.key)
        if wrong := cuts.fault():
            return f"{wrong}{_around(cuts, own or [])}"
        if cuts.key in seen:
            return f"cuts of {cuts.title} twice"
        seen.add(cuts.key)
        if own is None:
            others = ", ".join(BucketCuts(*key, (1,)).title for key in known) or "none at all"
            return f"no gradient of the stage is reduced by {cuts.title}; its traffic is {others}"
        if cuts.ends[-1] != len(own):
            return f"buckets of {cuts.title} hold {cuts.ends[-1]} gradients, there are {len(own)}{_around(cuts, own)}"
    return ""


def _around(cuts: BucketCuts, known: list[Gradient]) -> str:
    """Return the gradients around the place at fault."""
    at = next((end for before, end in zip((0, *cuts.ends), cuts.ends, strict=False) if end <= before), len(known))
    near = known[max(0, at - _SHOWN) : at + _SHOWN]
    return f"; there are {', '.join(repr(gradient.operand.value) for gradient in near)}" if near else ""


def with_buckets(program: Program, fusion: FusionPlan | None) -> Program:
    """Return a program with the buckets of a plan.

    Raises:
        PlanError: If its stages have no such gradients, or another number of them.
    """
    if fusion is None:
        return program
    return bucketed(program, {stage.index: fusion.cuts_of(stage.index) for stage in program.stages})


def bucketed(program: Program, cuts: Mapping[int, Iterable[BucketCuts]]) -> Program:
    """Return a program with other buckets, by stage; stages left out keep theirs.

    Raises:
        PlanError: If a stage has no such gradients, or another number of them.
    """
    table, splits = program.table(), SCHEDULES[program.schedule].splits
    stages = []
    for stage in program.stages:
        new = replace(stage, buckets=tuple(cuts.get(stage.index, stage.buckets)))
        if wrong := fault(new, table, splits=splits):
            raise PlanError(
                f"buckets of stage {stage.index}: {wrong}", hint="`autopar fuse PLAN -o DIR` cuts the gradients again"
            )
        stages.append(new)
    return replace(program, stages=tuple(stages))

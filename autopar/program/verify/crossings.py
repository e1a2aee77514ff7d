"""What crosses from block to block, and so from stage to stage."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np

from autopar.cost import Holding
from autopar.cost.handover import Division
from autopar.errors import ProgramError, ShardingError
from autopar.program.records import (
    Crossing,
    Operand,
    Program,
    SegmentPhase,
    StageProgram,
    lies_alike,
)
from autopar.program.verify.shapes import whole_shape
from autopar.sharding import format_placements

_PHASES = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.UPDATE)


def verify_crossings(program: Program) -> None:
    """Check that every block gets what its neighbours send: no send without its receive, and the other way round.

    Raises:
        ProgramError: If neighbours disagree.
    """
    table = program.table()
    chain = list(program.blocks())
    empty: tuple[Operand, ...] = ()
    for crossing in program.crossings:
        _verify_crossing(crossing, program)
    known = {
        (crossing.sender, crossing.receiver, crossing.phase, crossing.source.placements, crossing.target.placements)
        for crossing in program.crossings
    }
    keys = [(each.receiver, each.tensor, each.target.placements, each.phase) for each in program.crossings]
    if len(set(keys)) < len(keys):
        double = next(key for key in keys if keys.count(key) > 1)
        raise ProgramError(f"{double[1]!r} crosses to stage {double[0]} twice")

    def values(kind: int, phase: SegmentPhase, incoming: bool) -> tuple[Operand, ...]:
        segment = table.get((kind, phase))
        return empty if segment is None else segment.inputs if incoming else segment.outputs

    ends = ((SegmentPhase.FORWARD, chain[0][1], chain[-1][1]), (SegmentPhase.BACKWARD, chain[-1][1], chain[0][1]))
    for phase, first, last in ends:
        if values(first, phase, incoming=True):
            raise ProgramError(f"segment {first} {phase} has inputs but no block comes before it in this phase")
        if values(last, phase, incoming=False):
            raise ProgramError(f"segment {last} {phase} has outputs but no block comes after it in this phase")

    def same(sent: Operand, here: StageProgram, received: Operand, there: StageProgram, phase: SegmentPhase) -> bool:
        """Whether a value is what is received: block by block, or the same whole tensor that crosses."""
        if lies_alike(sent, here.mesh, received, there.mesh):
            return replace(sent, value=received.value) == received
        if (here.index, there.index, phase, sent.placements, received.placements) not in known:
            return False
        return whole_shape(sent, here.mesh) == whole_shape(received, there.mesh)

    for index, ((stage, kind), (next_stage, next_kind)) in enumerate(pairwise(chain)):
        for phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            ahead = phase is SegmentPhase.FORWARD
            sender, receiver = (kind, next_kind) if ahead else (next_kind, kind)
            here, there = (stage, next_stage) if ahead else (next_stage, stage)
            sent, received = values(sender, phase, incoming=False), values(receiver, phase, incoming=True)
            if len(sent) != len(received) or not all(
                same(one, here, other, there, phase) for one, other in zip(sent, received, strict=True)
            ):
                raise ProgramError(
                    f"blocks {index} (kind {kind}) and {index + 1} (kind {next_kind}) disagree in {phase}: "
                    f"{_describe(sent)} is sent, {_describe(received)} expected"
                )


def _verify_crossing(crossing: Crossing, program: Program) -> None:
    """Check that each device of the receiving stage gets its block of a value, once, from devices that have it."""
    title = f"{crossing.tensor!r} crosses from stage {crossing.sender} to stage {crossing.receiver}"
    if not (0 <= crossing.sender < len(program.stages) and 0 <= crossing.receiver < len(program.stages)):
        raise ProgramError(f"{title}, but there are {len(program.stages)}")
    here, there = program.stages[crossing.sender], program.stages[crossing.receiver]
    if here.devices == there.devices:
        raise ProgramError(f"{title}, which has the same devices")
    if crossing.phase not in _PHASES:
        raise ProgramError(f"{title} in {crossing.phase}", hint=f"values cross in {', '.join(_PHASES)}")
    divisions = []
    for stage, operand in ((here, crossing.source), (there, crossing.target)):
        if len(operand.placements) != len(stage.mesh.axes):
            placed = format_placements(operand.placements) or "nowhere"
            raise ProgramError(f"{title}: {operand.value!r} is {placed} on mesh {stage.mesh}")
        shape = whole_shape(operand, stage.mesh)
        try:
            divisions.append(Division.of(shape, Holding(stage.devices[0], stage.mesh, operand.placements)))
        except ShardingError as error:
            raise ProgramError(f"{title}: {error.args[0]}") from None
    source, target = divisions
    if source.shape != target.shape:
        raise ProgramError(f"{title}: {list(source.shape)} is sent, {list(target.shape)} expected")
    _verify_pieces(title, crossing, (here, source), (there, target))


def _verify_pieces(
    title: str, crossing: Crossing, sender: tuple[StageProgram, Division], receiver: tuple[StageProgram, Division]
) -> None:
    (here, source), (there, target) = sender, receiver
    got: dict[int, dict[int, list[tuple[tuple[int, int], ...]]]] = {
        there.devices[0] + index: {each: [] for each in source.terms_for(target, term)}
        for index, term in enumerate(target.terms.tolist())
    }
    for piece in crossing.pieces:
        where = f"{title}: piece {piece.sender}->{piece.receiver}"
        if piece.sender not in range(*here.devices) or piece.receiver not in got:
            raise ProgramError(f"{where} is not from a device of the one to a device of the other")
        if len(piece.box) != len(source.shape) or any(start >= stop for start, stop in piece.box):
            raise ProgramError(f"{where} is no part of a tensor of {len(source.shape)} dims")
        try:
            source.place(piece.sender - here.devices[0], piece.box)
            placed = target.place(piece.receiver - there.devices[0], piece.box)
        except ShardingError as error:
            raise ProgramError(f"{where}: {error.args[0]}") from None
        term = int(source.terms[piece.sender - here.devices[0]])
        if term not in got[piece.receiver]:
            raise ProgramError(f"{where} is of term {term}, which other devices add up")
        got[piece.receiver][term].append(tuple((each.start, each.stop) for each in placed))
    size = prod(crossing.target.shape)
    for device, boxes in ((device, boxes) for device, terms in got.items() for boxes in terms.values()):
        if sum(prod(stop - start for start, stop in box) for box in boxes) != size or _overlap(boxes):
            raise ProgramError(f"{title}: device {device} does not get every element of its block once")


def _overlap(boxes: Sequence[tuple[tuple[int, int], ...]]) -> bool:
    """Whether two boxes have an element in common."""
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    ranges = np.array(boxes)
    start, stop = ranges[..., 0], ranges[..., 1]
    common = ((start[:, None] < stop[None]) & (start[None] < stop[:, None])).all(axis=2)
    return bool(common.sum() > len(boxes))


def _describe(operands: Sequence[Operand]) -> str:
    texts = (f"{item.value} {item.shape} {format_placements(item.placements)}".rstrip() for item in operands)
    return ", ".join(texts) or "nothing"

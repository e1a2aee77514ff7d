"""What crosses from block to block, and so from stage to stage."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.errors import ProgramError
from autopar.program.records import Operand, Program, SegmentPhase
from autopar.sharding import format_placements


def verify_crossings(program: Program) -> None:
    """Check that every block gets what its neighbours send: no send without its receive, and the other way round.

    Raises:
        ProgramError: If neighbours disagree.
    """
    table = program.table()
    chain = list(program.blocks())
    empty: tuple[Operand, ...] = ()

    def values(kind: int, phase: SegmentPhase, incoming: bool) -> tuple[Operand, ...]:
        segment = table.get((kind, phase))
        return empty if segment is None else segment.inputs if incoming else segment.outputs

    for phase, first in ((SegmentPhase.FORWARD, chain[0]), (SegmentPhase.BACKWARD, chain[-1])):
        if values(first[1], phase, incoming=True):
            raise ProgramError(f"segment {first[1]} {phase} has inputs but no block comes before it in this phase")
    if values(chain[0][1], SegmentPhase.BACKWARD, incoming=False):
        raise ProgramError(f"segment {chain[0][1]} backward has outputs but no block comes after it in this phase")
    for index, ((stage, kind), (next_stage, next_kind)) in enumerate(pairwise(chain)):
        for phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            sender, receiver = (kind, next_kind) if phase is SegmentPhase.FORWARD else (next_kind, kind)
            sent, received = values(sender, phase, incoming=False), values(receiver, phase, incoming=True)
            same_mesh = stage.mesh.shape == next_stage.mesh.shape
            agree = len(sent) == len(received)
            if agree and same_mesh:
                pairs = zip(sent, received, strict=True)
                agree = all(replace(sent_one, value=got.value) == got for sent_one, got in pairs)
            if not agree:
                raise ProgramError(
                    f"blocks {index} (kind {kind}) and {index + 1} (kind {next_kind}) disagree in {phase}: "
                    f"{_describe(sent)} is sent, {_describe(received)} expected"
                )


def _describe(operands: Sequence[Operand]) -> str:
    texts = (f"{item.value} {item.shape} {format_placements(item.placements)}".rstrip() for item in operands)
    return ", ".join(texts) or "nothing"

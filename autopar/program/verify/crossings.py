"""What crosses from block to block, and so from stage to stage."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.errors import ProgramError
from autopar.program.records import Operand, Program, SegmentPhase
from autopar.program.verify.shapes import whole_shape
from autopar.sharding import Mesh, Partial, format_placements


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

    ends = ((SegmentPhase.FORWARD, chain[0][1], chain[-1][1]), (SegmentPhase.BACKWARD, chain[-1][1], chain[0][1]))
    for phase, first, last in ends:
        if values(first, phase, incoming=True):
            raise ProgramError(f"segment {first} {phase} has inputs but no block comes before it in this phase")
        if values(last, phase, incoming=False):
            raise ProgramError(f"segment {last} {phase} has outputs but no block comes after it in this phase")
    for index, ((stage, kind), (next_stage, next_kind)) in enumerate(pairwise(chain)):
        for phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            sender, receiver = (kind, next_kind) if phase is SegmentPhase.FORWARD else (next_kind, kind)
            sent, received = values(sender, phase, incoming=False), values(receiver, phase, incoming=True)
            meshes = stage.mesh, next_stage.mesh
            from_mesh, to_mesh = meshes if phase is SegmentPhase.FORWARD else reversed(meshes)
            if len(sent) != len(received) or not all(
                _same(one, from_mesh, other, to_mesh) for one, other in zip(sent, received, strict=True)
            ):
                raise ProgramError(
                    f"blocks {index} (kind {kind}) and {index + 1} (kind {next_kind}) disagree in {phase}: "
                    f"{_describe(sent)} is sent, {_describe(received)} expected"
                )


def _same(sent: Operand, sender: Mesh, received: Operand, receiver: Mesh) -> bool:
    """Whether a value is what is received: block by block on equal meshes, the same whole tensor on others."""
    if sender.shape == receiver.shape:
        return replace(sent, value=received.value) == received
    if not sent.placements or not received.placements:
        return True  # only timed
    terms = any(isinstance(placement, Partial) for placement in (*sent.placements, *received.placements))
    return not terms and whole_shape(sent, sender) == whole_shape(received, receiver)


def _describe(operands: Sequence[Operand]) -> str:
    texts = (f"{item.value} {item.shape} {format_placements(item.placements)}".rstrip() for item in operands)
    return ", ".join(texts) or "nothing"

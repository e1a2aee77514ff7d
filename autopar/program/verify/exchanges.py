"""Whether blocks take what others send for what it is: by position, by name, and by crossings between stages."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from autopar.errors import ProgramError
from autopar.folding.block_interface import instance_names
from autopar.folding.fold import Folded
from autopar.ir.graph import Role
from autopar.program.records import Crossing, Operand, Program, Segment, SegmentPhase, lies_alike
from autopar.sharding import Placements, format_placements

Tensors = Mapping[tuple[int, SegmentPhase], Mapping[str, str]]
"""Which tensor of its representative each value of a segment is, by kind and phase."""


def verify_exchanges(program: Program, folded: Folded, tensors: Tensors) -> None:
    """Check that what leaves a block is what the others take it for, and that all results leave.

    Raises:
        ProgramError: If it does not.
    """
    check = _Exchanges(program, folded, tensors)
    check.by_position()
    check.by_name()
    check.copies()
    check.all_needed()


class _Exchanges:
    """Follows values from block to block."""

    def __init__(self, program: Program, folded: Folded, tensors: Tensors) -> None:
        self._graph, self._folded, self._tensors = folded.graph, folded, tensors
        self._table, self._groups = program.table(), program.groups
        self._names = instance_names(folded)
        self._blocks = list(program.blocks())
        self._crossings = {
            (crossing.receiver, crossing.tensor, crossing.target.placements, crossing.phase is SegmentPhase.UPDATE): (
                crossing
            )
            for crossing in program.crossings
        }
        self._needed: set[int] = set()

    def by_position(self) -> None:
        """Check what neighbours hand to each other."""
        for block, following in pairwise(range(len(self._blocks))):
            for phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
                sender, receiver = (block, following) if phase is SegmentPhase.FORWARD else (following, block)
                sent = self._edge(sender, phase, incoming=False)
                expected = self._edge(receiver, phase, incoming=True)
                if [tensor for _, tensor in sent] != [tensor for _, tensor in expected]:
                    raise ProgramError(
                        f"block {sender} sends {', '.join(tensor for _, tensor in sent)} in {phase}, block {receiver} "
                        f"takes it for {', '.join(tensor for _, tensor in expected)}"
                    )
                for (source, tensor), (target, _) in zip(sent, expected, strict=True):
                    if not self._alike(sender, source, receiver, target):
                        crossing = self._crossing(receiver, tensor, target)
                        if crossing is None or self._unlike(crossing, sender, source, phase):
                            raise ProgramError(
                                f"{tensor!r} does not cross from block {sender} to block {receiver} in {phase}"
                            )

    def by_name(self) -> None:
        """Check what blocks further away read, and that all results leave."""
        exported: dict[str, list[tuple[int, SegmentPhase, Operand]]] = {}
        for block, phase, segment in self._visits():
            for operand, tensor in self._named(block, segment, segment.exports):
                exported.setdefault(tensor, []).append((block, phase, operand))
        for result in self._graph.outputs:
            if result in self._folded.producers and result not in exported:
                raise ProgramError(f"the program does not export {result!r}, a result of the graph")
        kept = {name for state in self._graph.states for name in (state.input, state.output)}
        for block, phase, segment in self._visits():
            for operand, tensor in self._named(block, segment, segment.external):
                if tensor not in self._folded.producers or tensor in kept:
                    continue
                if not any(
                    self._moment(sender, made) < self._moment(block, phase)
                    and self._reaches(sender, source, made, block, operand, tensor)
                    for sender, made, source in exported.get(tensor, ())
                ):
                    raise ProgramError(
                        f"block {block} reads {tensor!r} as {format_placements(operand.placements)} in {phase}, "
                        "which no other block has exported so before"
                    )

    def copies(self) -> None:
        """Check that copies of parameters on other devices follow their updates."""
        stored: dict[str, tuple[int, Operand]] = {}
        parameters = {state.input for state in self._graph.states if state.role is Role.PARAMETER}
        for block, phase, segment in self._visits():
            for store in segment.stores if phase is SegmentPhase.UPDATE else ():
                tensor = self._names[block].get(store.target, "")
                if tensor in parameters:
                    stored[tensor] = (block, store.value)
        known: set[tuple[int, str, Placements]] = set()
        for block, _, segment in self._visits():
            group = self._group(block)
            for operand, tensor in self._named(block, segment, segment.external):
                if tensor not in stored or (group, tensor, operand.placements) in known:
                    continue
                owner, source = stored[tensor]
                known.add((group, tensor, operand.placements))
                if self._group(owner) == group or self._alike(owner, source, block, operand):
                    continue
                crossing = self._crossing(block, tensor, operand, once=True)
                if crossing is None or self._unlike(crossing, owner, source, SegmentPhase.UPDATE):
                    raise ProgramError(f"the copy of {tensor!r} that block {block} reads does not follow its update")

    def all_needed(self) -> None:
        """Check that nothing crosses that nobody reads."""
        for crossing in self._crossings.values():
            if id(crossing) not in self._needed:
                raise ProgramError(
                    f"{crossing.tensor!r} crosses to stage {crossing.receiver} in {crossing.phase}, where nobody needs "
                    f"it as {format_placements(crossing.target.placements)}"
                )

    def _reaches(
        self, sender: int, source: Operand, made: SegmentPhase, receiver: int, target: Operand, tensor: str
    ) -> bool:
        if self._alike(sender, source, receiver, target):
            return True
        crossing = self._crossing(receiver, tensor, target)
        return crossing is not None and not self._unlike(crossing, sender, source, made)

    def _alike(self, sender: int, source: Operand, receiver: int, target: Operand) -> bool:
        return lies_alike(source, self._blocks[sender][0].mesh, target, self._blocks[receiver][0].mesh)

    def _crossing(self, receiver: int, tensor: str, target: Operand, *, once: bool = False) -> Crossing | None:
        """Return the crossing that brings a tensor to a block, noting that it is needed."""
        stage = self._group(receiver) if once else self._blocks[receiver][0].index  # a group has one copy
        found = self._crossings.get((stage, tensor, target.placements, once))
        if found is not None:
            self._needed.add(id(found))
        return found

    def _unlike(self, crossing: Crossing, sender: int, source: Operand, phase: SegmentPhase) -> bool:
        """Whether a crossing is of another value than that of a block."""
        stage = self._blocks[sender][0].index
        return (crossing.sender, crossing.source.placements, crossing.phase) != (stage, source.placements, phase)

    def _group(self, block: int) -> int:
        return self._groups[self._blocks[block][0].index]

    def _edge(self, block: int, phase: SegmentPhase, *, incoming: bool) -> list[tuple[Operand, str]]:
        """Return what enters or leaves a block by position, with the tensors that it is."""
        segment = self._table.get((self._blocks[block][1], phase))
        if segment is None:
            return []
        operands = segment.inputs if incoming else segment.outputs
        return self._named(block, segment, operands)

    def _named(self, block: int, segment: Segment, operands: Sequence[Operand]) -> list[tuple[Operand, str]]:
        """Return operands of a block with the tensors that they are."""
        if not operands:
            return []
        tensors, names = self._tensors[segment.kind, segment.phase], self._names[block]
        owned = [(operand, tensors[operand.value]) for operand in operands]
        return [(operand, names.get(own, own)) for operand, own in owned]

    def _visits(self) -> Iterator[tuple[int, SegmentPhase, Segment]]:
        for block, (_, kind) in enumerate(self._blocks):
            for phase in SegmentPhase:
                segment = self._table.get((kind, phase))
                if segment is not None:
                    yield block, phase, segment

    def _moment(self, block: int, phase: SegmentPhase) -> int:
        """Return when a block runs a phase, counted in blocks. Weights may follow right after their backward."""
        match phase:
            case SegmentPhase.FORWARD:
                return block
            case SegmentPhase.AGAIN | SegmentPhase.BACKWARD | SegmentPhase.WEIGHT:
                return 2 * len(self._blocks) - 1 - block
            case _:
                return 2 * len(self._blocks)

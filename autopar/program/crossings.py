"""Values that go from stage to stage other than from device i to device i: which ones there are, and in what pieces.

Most stages of a pipeline have equal meshes, and what passes between them lies alike on both, so that every device has a
counterpart. Where meshes or placements differ, a value is taken to pieces (`autopar.cost.handover`).
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autopar.cluster import Cluster
from autopar.cost import Handed, Holding
from autopar.cost.handover import pieces
from autopar.errors import PlanError, ShardingError
from autopar.folding.block_interface import instance_names
from autopar.folding.fold import Folded
from autopar.ir.graph import Role
from autopar.program.records import (
    Crossing,
    Operand,
    Piece,
    Program,
    Segment,
    SegmentPhase,
    StageProgram,
    lies_alike,
)
from autopar.program.verify.shapes import whole_shape
from autopar.sharding import Mesh, Partial, Placements, format_placements

Place = tuple[int, Mesh]
"""First device and mesh of a stage."""

_PASSES = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD)


def find_crossings(program: Program, folded: Folded, cluster: Cluster) -> tuple[Crossing, ...]:
    """Return the crossings that a program needs.

    Args:
        program: The program without them.
        folded: The graph it was lowered from.
        cluster: Says which devices are near each other.

    Raises:
        PlanError: If a value that has to cross is there as terms of another reduction than a sum.
    """
    if len({stage.variant for stage in program.stages}) == 1:
        return ()  # a value has one placement in a variant, whatever block reads it
    if sum(len(stage.blocks) for stage in program.stages) != len(folded.chain):
        return ()  # no program of this graph, as its verifier will say
    search = _Search(program, folded)
    found: dict[tuple[int, str, Placements, SegmentPhase], Crossing] = {}
    for crossing in (*search.neighbours(), *search.far(), *search.copies()):
        key = (crossing.receiver, crossing.tensor, crossing.target.placements, crossing.phase)
        if key not in found:
            found[key] = _in_pieces(crossing, program, cluster)
    return tuple(found.values())


class _Search:
    """Looks for values that go from one group of devices to another and do not lie alike there."""

    def __init__(self, program: Program, folded: Folded) -> None:
        self._program, self._graph = program, folded.graph
        self._blocks = list(program.blocks())
        self._groups = program.groups
        self._table = program.table()
        self._names = instance_names(folded)

    def neighbours(self) -> Iterator[Crossing]:
        """Yield what neighbouring blocks hand to each other."""
        for block in range(len(self._blocks) - 1):
            for phase in _PASSES:
                sender, receiver = (block, block + 1) if phase is SegmentPhase.FORWARD else (block + 1, block)
                here, there = self._segment(sender, phase), self._segment(receiver, phase)
                if here is None or there is None or self._together(sender, receiver):
                    continue
                tensors = self._tensors(sender, here)
                for source, target in zip(here.outputs, there.inputs, strict=False):
                    yield from self._between(sender, receiver, phase, tensors[source.value], source, target)

    def far(self) -> Iterator[Crossing]:
        """Yield what blocks further away read."""
        exported: dict[str, list[tuple[int, SegmentPhase, Operand]]] = {}
        for block, phase, segment in self._segments(_PASSES):
            tensors = self._tensors(block, segment)
            for operand in segment.exports:
                exported.setdefault(tensors[operand.value], []).append((block, phase, operand))
        readers = (*_PASSES, SegmentPhase.WEIGHT) if exported else ()
        for block, _, segment in self._segments(readers):
            tensors = self._tensors(block, segment)
            for target in segment.external:
                forms = exported.get(tensors.get(target.value, ""), [])
                if any(self._reaches(sender, source, block, target) for sender, _, source in forms):
                    continue
                # of a result that is read by others, too, rather the form that is no terms
                for sender, made, source in sorted(forms, key=lambda form: _is_partial(form[2]))[:1]:
                    yield from self._between(sender, block, made, tensors[target.value], source, target)

    def copies(self) -> Iterator[Crossing]:
        """Yield the parameters of which another group of devices has a copy, at another placement or mesh."""
        stored: dict[str, tuple[int, Operand]] = {}
        parameters = {state.input for state in self._graph.states if state.role is Role.PARAMETER}
        for block, _, segment in self._segments((SegmentPhase.UPDATE,)):
            names = self._names[block]
            for store in segment.stores:
                tensor = names.get(store.target, "")
                if tensor in parameters:
                    stored[tensor] = (block, store.value)
        known: set[tuple[int, str, Placements]] = set()
        for block, _, segment in self._segments(tuple(SegmentPhase) if stored else ()):
            tensors = self._tensors(block, segment)
            for target in segment.external:
                tensor = tensors.get(target.value, "")
                owner, source = stored.get(tensor, (block, target))
                key = (self._group(block), tensor, target.placements)
                if not self._together(owner, block) and key not in known:
                    known.add(key)
                    for crossing in self._between(owner, block, SegmentPhase.UPDATE, tensor, source, target):
                        yield replace(crossing, receiver=self._group(block))  # a copy for all stages of the group

    def _between(
        self, sender: int, receiver: int, phase: SegmentPhase, tensor: str, source: Operand, target: Operand
    ) -> Iterator[Crossing]:
        """Yield the crossing of a value from block to block if it needs one; without its pieces."""
        here, there = self._blocks[sender][0], self._blocks[receiver][0]
        if not self._together(sender, receiver) and not lies_alike(source, here.mesh, target, there.mesh):
            yield Crossing(here.index, there.index, phase, tensor, source, target, ())

    def _reaches(self, sender: int, source: Operand, receiver: int, target: Operand) -> bool:
        """Whether a value that a block exports is what another one reads, without a crossing."""
        here, there = self._blocks[sender][0], self._blocks[receiver][0]
        return self._together(sender, receiver) or lies_alike(source, here.mesh, target, there.mesh)

    def _group(self, block: int) -> int:
        return self._groups[self._blocks[block][0].index]

    def _together(self, block: int, other: int) -> bool:
        return self._group(block) == self._group(other)

    def _segment(self, block: int, phase: SegmentPhase) -> Segment | None:
        return self._table.get((self._blocks[block][1], phase))

    def _segments(self, phases: tuple[SegmentPhase, ...]) -> Iterator[tuple[int, SegmentPhase, Segment]]:
        for phase in phases:
            for block in range(len(self._blocks)):
                segment = self._segment(block, phase)
                if segment is not None:
                    yield block, phase, segment

    def _tensors(self, block: int, segment: Segment) -> dict[str, str]:
        names = self._names[block]
        return {part.value: names[part.tensor] for part in segment.parts}


def _is_partial(operand: Operand) -> bool:
    return any(isinstance(placement, Partial) for placement in operand.placements)


def handed(sent: Segment | None, here: Place, received: Segment | None, there: Place) -> list[Handed]:
    """Return what a block hands to its neighbour, as `CostModel.hand_over_seconds` takes it.

    Args:
        sent: Segment of the block that sends, `FORWARD` or `BACKWARD`; None if it has none.
        here: First device and mesh of its stage.
        received: Segment of the neighbour in the same phase; None if it has none.
        there: First device and mesh of its stage.
    """
    if sent is None or received is None:
        return []
    return [
        Handed(
            whole_shape(source, here[1]),
            target.bytes / max(1, prod(target.shape)),
            Holding(*here, source.placements),
            Holding(*there, target.placements),
        )
        for source, target in zip(sent.outputs, received.inputs, strict=True)
    ]


def holding(stage: StageProgram, operand: Operand) -> Holding:
    """Return how a stage holds a value."""
    return Holding(stage.devices[0], stage.mesh, operand.placements)


def _in_pieces(crossing: Crossing, program: Program, cluster: Cluster) -> Crossing:
    here, there = program.stages[crossing.sender], program.stages[crossing.receiver]
    shape = whole_shape(crossing.source, here.mesh)
    if shape != whole_shape(crossing.target, there.mesh):
        return crossing  # without pieces; the verifier says what is wrong
    try:
        sent = pieces(shape, holding(here, crossing.source), holding(there, crossing.target), cluster)
    except ShardingError as error:
        raise PlanError(
            f"{crossing.tensor!r} goes from stage {here.index} to stage {there.index} as "
            f"{format_placements(crossing.source.placements)}: {error.args[0]}",
            hint=error.hint,
        ) from None
    found = zip(sent.senders.tolist(), sent.receivers.tolist(), sent.boxes(), strict=True)
    every = tuple(Piece(sender, receiver, box) for sender, receiver, boxes in found for box in boxes)
    return replace(crossing, pieces=every)

"""Collectives that the decisions ask for, counted where they are asked for.

Per use and per parameter, before any bucket, and before the lowering shares a gathered copy between uses or finds a
cheaper way round: what PartIR counts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost import Collective, DtypePolicy
from autopar.folding.graph_facts import element_bytes
from autopar.ir.graph import Role
from autopar.sharding import Placement, Placements, Shard, local_shape
from autopar.tactics.state import is_partial, is_whole
from autopar.tactics.write import Writer


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind over one mesh axis.

    Attributes:
        collective: What is done.
        axis: Name of the mesh axis.
        count: How often.
        bytes: Bytes of the larger side on one device, added up.
    """

    collective: Collective
    axis: str
    count: int
    bytes: float


class Counter:
    """Counts the collectives of a graph; what does not depend on decisions is gathered once."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.topology = writer, writer.topology
        graph = self.topology.folded.graph
        self._values = graph.values
        self._parameters = {state.output: state.input for state in graph.states if state.role is Role.PARAMETER}
        self._sums = {state.output for state in graph.states if state.role is Role.GRADIENT}
        self._kept = {state.input for state in graph.states if state.role is not Role.PARAMETER}
        self._free = self.topology.folded.free

    def traffic(self, wire: Mapping[str, float]) -> tuple[Traffic, ...]:
        """Return the collectives of one microbatch and the update after it, over all blocks of the model.

        Args:
            wire: Bytes per element on the wire, by value.
        """
        found: dict[tuple[Collective, int], tuple[int, float]] = {}
        for kind in self.topology.folded.kinds:
            for name, source, target in self._changes(kind.id):
                for collective, axis, held in moves(source, target):
                    size = wire[name]
                    for dim in local_shape(self._values[name].shape, held, self.topology.mesh):
                        size *= dim
                    count, total = found.get((collective, axis), (0, 0.0))
                    found[collective, axis] = count + kind.count, total + size * kind.count
        names = [axis.name for axis in self.topology.mesh.axes]
        return tuple(Traffic(kind, names[axis], *found[kind, axis]) for kind, axis in sorted(found))

    def _changes(self, kind_id: int) -> Iterator[tuple[str, Placements, Placements]]:
        """Yield value, placement before and placement after of every change in one instance of a block."""
        writer, topology = self.writer, self.topology
        here: dict[str, Placements] = {}
        for position, op in enumerate(topology.folded.kinds[kind_id].ops):
            key = (kind_id, position)
            needs = zip(*(strategy.inputs for strategy in writer.by_axis(key)), strict=True)
            for name, need in zip(op.inputs, needs, strict=True):
                # Data lies where it is needed; sums and moments where the op that writes them runs.
                if name and topology.is_placed(op, name) and name not in self._free and name not in self._kept:
                    yield name, here.get(name) or writer.of_class(name), need
            for slot, name in enumerate(op.outputs):
                if not name:
                    continue
                home = writer.home(key, slot)
                if name in self._sums:
                    here[name] = home  # the update takes it as it needs it
                elif name in self._parameters:
                    yield name, home, writer.of_class(self._parameters[name])
                else:
                    here[name] = reduced = writer.reduced(key, slot)
                    yield name, home, reduced
                    if topology.of(name) in topology.boundary_set:
                        yield name, reduced, writer.of_class(name)


def traffic(writer: Writer, policy: DtypePolicy) -> tuple[Traffic, ...]:
    """Return the collectives that a state asks for."""
    return Counter(writer).traffic(element_bytes(writer.topology.folded, policy)[1])


def moves(source: Placements, target: Placements) -> Iterator[tuple[Collective, int, Placements]]:
    """Yield what takes a tensor from one placement to another, axis by axis, with the placement of the larger side."""
    current = list(source)
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        collective = _move(before, after)
        if collective is not None:
            larger = list(current)
            if collective is Collective.ALL_GATHER:
                larger[axis] = after
            yield collective, axis, tuple(larger)
        current[axis] = after


def _move(before: Placement, after: Placement) -> Collective | None:
    if before == after or is_whole(before):
        return None
    if is_partial(before):
        return Collective.REDUCE_SCATTER if isinstance(after, Shard) else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if isinstance(after, Shard) else Collective.ALL_GATHER

"""Collectives that the decisions ask for, counted where they are asked for: per use and per parameter, before any
bucket, and before the lowering shares a gathered copy between uses or finds a cheaper way round."""

from collections import Counter
from collections.abc import Iterator

from autopar.cost import Collective
from autopar.formulate.fold import Source
from autopar.ir.graph import Phase, Role
from autopar.sharding import Placement, Placements, Shard
from autopar.tactics.state import is_partial, is_whole
from autopar.tactics.write import Writer

Counts = Counter[tuple[Collective, str]]
"""How many of each collective, by mesh axis."""


def count(writer: Writer) -> Counts:
    """Return the collectives of one microbatch and the update after it, over all blocks of the model."""
    topology, found = writer.topology, Counts()
    for kind in topology.folded.kinds:
        for collective, axis in _of_kind(writer, kind.id):
            found[collective, topology.mesh.axes[axis].name] += kind.count
    return found


def moves(source: Placements, target: Placements) -> Iterator[tuple[Collective, int]]:
    """Yield what takes a tensor from one placement to another, axis by axis."""
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        collective = _move(before, after)
        if collective is not None:
            yield collective, axis


def _move(before: Placement, after: Placement) -> Collective | None:
    if before == after or is_whole(before):
        return None
    if is_partial(before):
        return Collective.REDUCE_SCATTER if isinstance(after, Shard) else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if isinstance(after, Shard) else Collective.ALL_GATHER


def _of_kind(writer: Writer, kind_id: int) -> Iterator[tuple[Collective, int]]:
    topology, graph = writer.topology, writer.topology.folded.graph
    kind = topology.folded.kinds[kind_id]
    parameters = {state.output: state.input for state in graph.states if state.role is Role.PARAMETER}
    sums = {state.output for state in graph.states if state.role is Role.GRADIENT}
    here: dict[str, Placements] = {}
    for position, op in enumerate(kind.ops):
        key = (kind_id, position)
        needs = zip(*(strategy.inputs for strategy in writer.by_axis(key)), strict=True)
        for name, need in zip(op.inputs, needs, strict=True):
            if name and topology.is_placed(op, name) and not (name in graph.inputs and name in topology.folded.free):
                if name in {state.input for state in graph.states if state.role is not Role.PARAMETER}:
                    continue  # sums and moments lie where the op that writes them runs
                yield from moves(here.get(name, writer.of_class(name)), need)
        for slot, name in enumerate(op.outputs):
            if not name:
                continue
            home, reduced = writer.home(key, slot), writer.reduced(key, slot)
            if name in sums:
                here[name] = home  # the update takes it as it needs it
            elif name in parameters:
                yield from moves(home, writer.of_class(parameters[name]))
            else:
                here[name] = reduced
                yield from moves(home, reduced)
                if topology.of(name) in topology.boundary_set:
                    yield from moves(reduced, writer.of_class(name))


_ = (Phase, Source)

"""A selection choice as the placements of each distinct block (`BlockPlan`), the form a plan stores."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from autopar.folding.fold import Source
from autopar.formulate.op_placement import op_placement
from autopar.formulate.tables import Decision, Tables
from autopar.plan import BlockPlan, OpPlacement, ValuePlacement
from autopar.sharding import format_placements

_placed: WeakKeyDictionary[Tables, dict[tuple[int, int], OpPlacement]] = WeakKeyDictionary()
"""Placements of ops by node and strategy: the choices of one mesh have most in common."""


def assemble_blocks(tables: Tables, choice: Sequence[int]) -> tuple[BlockPlan, ...]:
    """Return the block plans of a choice."""
    folded = tables.folded
    ops: dict[int, dict[str, OpPlacement]] = {kind.id: {} for kind in folded.kinds}
    states: dict[str, ValuePlacement] = {}
    owners: dict[str, int] = {}
    copies: dict[int, list[ValuePlacement]] = {kind.id: [] for kind in folded.kinds}
    boundaries: dict[str, str] = {}
    known = _placed.setdefault(tables, {})
    for index, (node, strategy) in enumerate(zip(tables.nodes, choice, strict=True)):
        if node.decision is Decision.OP:
            assert node.options is not None
            op = folded.kinds[node.kind].ops[node.position]
            placed = known.get((index, strategy))
            if placed is None:
                placed = known[index, strategy] = op_placement(
                    op, node.options.by_axis(strategy), tables.mesh, folded.graph.values
                )
            ops[node.kind][op.name] = placed
            continue
        assert node.value is not None
        assert node.placements is not None
        number = int(node.placements[strategy])
        text = format_placements(tables.meaning.placements(node.value.name, number, tables.mesh))
        match node.decision:
            case Decision.PARAMETER:
                states[node.value.name] = ValuePlacement(node.value.name, text)
                owners[node.value.name] = node.kind
            case Decision.COPY:
                copies[node.kind].append(ValuePlacement(node.name, text))
            case Decision.BOUNDARY:
                boundaries[node.name] = text
    arrivals, departures = _crossings(tables, boundaries)
    blocks = []
    for kind in folded.kinds:
        borrowed = {
            name: ValuePlacement(name, states[_representative(tables, name)].placement)
            for op in kind.ops
            for name in op.inputs
            if name in folded.by_value and folded.by_value[name].source is Source.STATE and owners.get(name) != kind.id
        }
        blocks.append(
            BlockPlan(
                kind=kind.id,
                representative=kind.representative,
                instances=kind.instances,
                ops=tuple(ops[kind.id][op.name] for op in kind.ops),
                states=tuple(state for name, state in states.items() if owners[name] == kind.id),
                borrowed=tuple(borrowed.values()),
                arrivals=tuple(arrivals[kind.id]),
                departures=tuple(departures[kind.id]),
                copies=tuple(copies[kind.id]),
                selective=tuple(kind.ops[position].name for position in sorted(tables.selective[kind.id])),
            )
        )
    return tuple(blocks)


def _representative(tables: Tables, name: str) -> str:
    """Return the name of the distinct parameter that represents `name`."""
    producer = tables.folded.by_value[name]
    return next(p.value.name for p in tables.folded.parameters if p.producer == producer)


def _crossings(
    tables: Tables, boundaries: dict[str, str]
) -> tuple[dict[int, list[ValuePlacement]], dict[int, list[ValuePlacement]]]:
    """Return arrivals and departures by kind: the values that enter and leave each block, with their placements."""
    folded = tables.folded
    arrivals: dict[int, list[ValuePlacement]] = {kind.id: [] for kind in folded.kinds}
    departures: dict[int, list[ValuePlacement]] = {kind.id: [] for kind in folded.kinds}
    by_producer = {}
    for boundary in tables.boundaries:
        text = boundaries[tables.nodes[boundary.node].name]
        for producer in boundary.producers:
            op = folded.kinds[producer.kind].ops[producer.position]
            departures[producer.kind].append(ValuePlacement(op.outputs[producer.slot], text))
            by_producer[producer] = text
    for kind in folded.kinds:
        for arrival in kind.arrivals:
            arrivals[kind.id].append(ValuePlacement(arrival.value, by_producer[arrival.producers[0][0]]))
    return arrivals, departures

"""Writing the tables of one mesh: a node per decision, an edge per change of placement, bytes per what is held."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost import ALONE, CostModel, Fused, Resharder
from autopar.cost.collectives import leaves_node
from autopar.cost.reshard import bucketed
from autopar.discover import Rules, Strategy
from autopar.folding.block_interface import is_far
from autopar.folding.fold import Arrival, Consumer, Folded, Producer, Source, boundary_groups
from autopar.folding.graph_facts import covering_ops, element_bytes, fused_ops, gradient_terms, read_bytes, states_of
from autopar.folding.selective_recompute import selective_ops
from autopar.formulate.op_memo import Sharing
from autopar.formulate.op_strategies import Options, is_partial, local_sizes
from autopar.formulate.placement_semantics import meaning
from autopar.formulate.tables import (
    Boundary,
    Bytes,
    Decision,
    Edge,
    FloatArray,
    IntArray,
    Memory,
    Node,
    Outside,
    Slot,
    Tables,
)
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.sharding import Mesh

_WAIT = {Slot.FORWARD: Slot.FORWARD_WAIT, Slot.BACKWARD: Slot.BACKWARD_WAIT}
_GATHER = {Slot.FORWARD: Slot.FORWARD_GATHER, Slot.BACKWARD: Slot.BACKWARD_GATHER}
"""Slot of the reshards before the ops of a pass: of what was computed, or of what is there before as parameters are."""

_STATE_MEMORY = {Role.GRADIENT: Memory.GRADIENTS, Role.MOMENT: Memory.OPTIMIZER}


class Restriction(Protocol):
    """What each mesh axis may do, asked for decision by decision; masks are over what one axis could do."""

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> Sequence[NDArray[np.bool_]]:
        """Return by axis which of an op's strategies on one axis it may take; none if the op is free on that axis."""

    def of_value(self, decision: Decision, kind: int, value: Value) -> Sequence[NDArray[np.bool_]]:
        """Return by axis which codes of a placement a value may have; none if it is free on that axis."""


class _Builder:
    """Collects nodes and edges of one folded graph."""

    def __init__(
        self, folded: Folded, rules: Rules, mesh: Mesh, costs: CostModel, restriction: Restriction | None = None
    ) -> None:
        self.folded, self.mesh, self.costs, self.restriction = folded, mesh, costs, restriction
        self.graph, self.meaning = folded.graph, meaning(folded, rules)
        self.sharing = Sharing(folded.graph, mesh, costs, folded.free)
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.bytes: list[Bytes] = []
        self.boundaries: list[Boundary] = []
        self.op_node: dict[tuple[int, int], int] = {}
        self.parameter_node: dict[Producer, int] = {}
        self.resharder, self.bucketed = Resharder(mesh, costs), bucketed(mesh, costs)
        self.leaves_nodes = any(leaves_node(axis, costs.cluster.devices_per_node) for axis in mesh.axes)
        self.covering_ops = covering_ops(folded)
        self.resident, self.wire = element_bytes(folded, costs.policy)
        self.read = read_bytes(folded, costs.policy)
        self.trains = any(op.phase is Phase.BACKWARD for kind in folded.kinds for op in kind.ops)
        self.results = frozenset() if self.trains else frozenset(self.graph.outputs)
        self.written = states_of(folded).written
        self.fused = fused_ops(folded, costs)
        self.selective = selective_ops(folded, costs)

    def build(self) -> Tables:
        for kind in self.folded.kinds:
            for position, op in enumerate(kind.ops):
                self._add_op(kind.id, position, op)
        for parameter in self.folded.parameters:
            self._add_parameter(parameter.producer, parameter.value, parameter.count)
        self._connect_inside()
        self._connect_between()
        self._close_step()
        return Tables(
            self.folded, self.meaning, self.mesh, self.costs, self.resharder,
            tuple(self.nodes), tuple(self.edges), tuple(self.bytes), tuple(self.boundaries),
            self.selective, *self._again(),
        )  # fmt: skip

    def _again(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the nodes and the edges that are paid again under selective recompute."""
        nodes = {self.op_node[kind, position] for kind, ops in enumerate(self.selective) for position in ops}
        read = {edge.first for edge in self.edges if edge.second in nodes}
        copies = {index for index in read if self.nodes[index].decision is Decision.COPY}
        edges = (index for index, edge in enumerate(self.edges) if edge.second in nodes or edge.second in copies)
        return tuple(sorted(nodes)), tuple(edges)

    # Nodes.

    def _add_op(self, kind: int, position: int, op: Op) -> None:
        choices = self._in_place(op, self._options(kind, op))
        slot = Slot.BACKWARD_WEIGHT if op.name in self.covering_ops else _slot(op)
        seconds = self._op_seconds(op, choices)
        self.op_node[kind, position] = len(self.nodes)
        self.nodes.append(Node(Decision.OP, kind, op.name, slot, seconds, 1.0, position, choices, None, None))
        self._op_bytes(kind, position, op, choices)

    def _options(self, kind: int, op: Op) -> Options:
        """Return what an op can do, as restricted; what no restricted axis can do with the others is free on all."""
        strategies = self.meaning.strategies(op)
        if self.restriction is not None:
            choices = self.sharing.options(op, strategies, self.restriction.of_op(kind, op, strategies))
            if choices.count:
                return choices
        return self.sharing.options(op, strategies)

    def _placements(self, decision: Decision, kind: int, value: Value, *, partial: bool) -> IntArray:
        """Return the placement numbers of a value, as restricted; free on all axes if it can have none of them."""
        chunks = self.meaning.chunks(value.name)
        if self.restriction is not None:
            allowed = self.restriction.of_value(decision, kind, value)
            numbers = self.sharing.placements(value.shape, chunks, partial=partial, allowed=allowed)
            if len(numbers):
                return numbers
        return self.sharing.placements(value.shape, chunks, partial=partial)

    def _op_seconds(self, op: Op, choices: Options) -> FloatArray:
        """Return the (S,) seconds of what devices run, rows from neighbours included."""
        sizes = self.resident if op.phase is Phase.UPDATE else self.read
        fused = self.fused.get(op.name, ALONE)
        operands = tuple(size[name] for size in (sizes, self.wire) for name in (*op.inputs, *op.outputs) if name)
        return self.sharing.seconds(op, choices, operands, fused, lambda: self._seconds(op, choices, sizes, fused))

    def _seconds(self, op: Op, choices: Options, sizes: Mapping[str, float], fused: Fused) -> FloatArray:
        """As `_op_seconds`, by the formulas."""
        seconds = self.costs.op_seconds(op, choices.local_inputs, choices.local_outputs, sizes, fused)
        for index in set(choices.local_kinds.tolist()) - {-1}:
            local, rows = choices.on_one_axis[index].local, choices.local_kinds == index
            assert local is not None
            part = choices.select(rows)
            size = self.graph.values[op.inputs[local.input]].shape[local.dim]
            other = replace(op, kind=local.kind, attrs=(*op.attrs, ("size", size)))
            seconds[rows] = self.costs.op_seconds(other, part.local_inputs, part.local_outputs, sizes, fused)
        for halos in choices.halos:
            nbytes = halos.elements.astype(np.float64) * self.wire[op.inputs[halos.input]]
            seconds += self.costs.exchange_seconds(nbytes, self.mesh.axes[halos.axis])
        return seconds

    def _in_place(self, op: Op, choices: Options) -> Options:
        """Keep the strategies that can stand: sums and moments never move, and results of inference are reduced.

        The loss of a training step may stay a partial sum: nobody waits for it.
        """
        keep = np.ones(choices.count, dtype=bool)
        for slot, name in enumerate(op.outputs):
            numbers = choices.outputs[slot]
            if name in self.results and numbers is not None:
                keep &= ~is_partial(numbers, len(self.graph.values[name].shape), len(self.mesh.axes))
            state = self.written.get(name)
            if state is not None and state.role in (Role.GRADIENT, Role.MOMENT):
                before, after = choices.inputs[op.inputs.index(state.input)], choices.outputs[slot]
                assert before is not None, state
                assert after is not None, state
                keep &= before == after
        return self.sharing.selected(choices, keep)

    def _op_bytes(self, kind: int, position: int, op: Op, choices: Options) -> None:
        node = self.op_node[kind, position]
        block = self.folded.kinds[kind]
        for index in dict.fromkeys(halos.input for halos in choices.halos):
            # With rows of its neighbours around it a block is another value, which lives while the op runs.
            local, with_rows = choices.local_inputs[index], np.zeros(choices.count, dtype=bool)
            assert local is not None, op.name
            for halos in choices.halos:
                with_rows |= (halos.elements > 0) & (halos.input == index)
            amounts = np.where(with_rows, self.sharing.elements(local) * self.resident[op.inputs[index]], 0.0)
            self.bytes.append(Bytes(node, kind, Memory.TRANSIENT, amounts, position, position + 1))
        behind = self.costs.kept_bytes(op, choices.local_inputs, choices.local_outputs, self.resident)
        if behind.any() and self.trains:
            memory = Memory.DROPPED if position in self.selective[kind] else Memory.SAVED
            self.bytes.append(Bytes(node, kind, memory, behind))
        for slot, name in enumerate(op.outputs):
            local = choices.local_outputs[slot]
            if not name or local is None:
                continue
            amounts = self.sharing.elements(local) * self.resident[name]
            state = self.written.get(name)
            if state is not None or op.phase is Phase.UPDATE:
                if state is not None and state.role in _STATE_MEMORY:
                    self.bytes.append(Bytes(node, kind, _STATE_MEMORY[state.role], amounts))
                continue
            if block.saved[position][slot]:
                memory = Memory.DROPPED if position in self.selective[kind] else Memory.SAVED
                self.bytes.append(Bytes(node, kind, memory, amounts))
            elif block.last_use[position][slot] > position:
                self.bytes.append(
                    Bytes(node, kind, Memory.TRANSIENT, amounts, position, block.last_use[position][slot])
                )

    def _add_parameter(self, producer: Producer, value: Value, count: int) -> None:
        numbers = self._placements(Decision.PARAMETER, producer.kind, value, partial=False)
        share = count / self.folded.kinds[producer.kind].count
        self.parameter_node[producer] = len(self.nodes)
        amounts = share * local_sizes(value.shape, numbers, self.mesh) * self.resident[value.name]
        self.bytes.append(Bytes(len(self.nodes), producer.kind, Memory.PARAMETERS, amounts))
        self.nodes.append(
            Node(
                Decision.PARAMETER,
                producer.kind,
                value.name,
                Slot.UPDATE,
                np.zeros(len(numbers)),
                share,
                -1,
                None,
                numbers,
                value,
            )
        )

    def _add_value(
        self, decision: Decision, kind: int, name: str, value: Value, slot: Slot, *, partial: bool = False
    ) -> int:
        numbers = self._placements(decision, kind, value, partial=partial)
        self.nodes.append(Node(decision, kind, name, slot, np.zeros(len(numbers)), 1.0, -1, None, numbers, value))
        return len(self.nodes) - 1

    # Edges.

    def _connect_inside(self) -> None:
        """Connect ops with the ops and parameters of their own block.

        A value that several ops of a phase read goes through a copy that they share.
        """
        for (producer, kind_id, slot), consumers in _inner_uses(self.folded).items():
            if producer.source is Source.STATE:
                node, value = self.parameter_node[producer], self._parameter_value(producer)
            else:
                node = self.op_node[producer.kind, producer.position]
                op = self.folded.kinds[producer.kind].ops[producer.position]
                value = self.graph.values[op.outputs[producer.slot]]
            waiting = _GATHER if producer.source is Source.STATE else _WAIT
            self._fan_out(node, producer.slot, value, kind_id, slot, consumers, waiting)

    def _connect_between(self) -> None:
        """Give every value that passes between blocks one placement wherever it crosses: blocks fit together.

        Only what is added to the gradient of a parameter that other blocks read, too, may cross as terms: these are
        reduced once, with all others.
        """
        groups = boundary_groups(self.folded)
        added = gradient_terms(self.folded)
        for number, (producers, arrivals) in enumerate(groups):
            first = producers[0]
            op = self.folded.kinds[first.kind].ops[first.position]
            value = self.graph.values[op.outputs[first.slot]]
            name = f"boundary{number}:{value.name}"
            partial = added.issuperset(producers) and self.meaning.reduction(value.name) is not None
            node = self._add_value(Decision.BOUNDARY, first.kind, name, value, _slot(op), partial=partial)
            self.boundaries.append(Boundary(node, tuple(producers)))
            for producer in producers:
                kind = self.folded.kinds[producer.kind]
                slot = _WAIT[_slot(kind.ops[producer.position])]
                source = self.op_node[producer.kind, producer.position]
                self._price(source, producer.slot, node, None, value, producer.kind, slot, 1.0, -1)
            for kind_id, arrival in arrivals:
                if arrival.saved:
                    sizes = local_sizes(value.shape, self.nodes[node].outputs(0), self.mesh)
                    memory = Memory.HANDED if self._is_saved(arrival) else Memory.ARRIVED
                    self.bytes.append(Bytes(node, kind_id, memory, sizes * self.resident[value.name]))
                if not is_far(self.folded, kind_id, arrival.value):
                    sizes = local_sizes(value.shape, self.nodes[node].outputs(0), self.mesh)
                    least = min(self.resident[value.name], self.wire[value.name])
                    self.bytes.append(Bytes(node, kind_id, Memory.RECEIVED, sizes * least))
                by_slot: dict[Slot, list[tuple[Consumer, float]]] = {}
                for consumer in arrival.uses:
                    slot = _slot(self.folded.kinds[kind_id].ops[consumer.position])
                    by_slot.setdefault(slot, []).append((consumer, 1.0))
                # What was exported is there before the pass, as parameters are.
                waiting = _GATHER if is_far(self.folded, kind_id, arrival.value) else _WAIT
                for slot, consumers in by_slot.items():
                    self._fan_out(node, 0, self.graph.values[arrival.value], kind_id, slot, consumers, waiting)

    def _is_saved(self, arrival: Arrival) -> bool:
        """Whether the blocks that a value comes from save it themselves."""
        makers = (producer for producer, _ in arrival.producers)
        return all(self.folded.kinds[made.kind].saved[made.position][made.slot] for made in makers)

    def _fan_out(
        self,
        node: int,
        output: int,
        value: Value,
        kind: int,
        slot: Slot,
        consumers: Sequence[tuple[Consumer, float]],
        waiting: Mapping[Slot, Slot],
    ) -> None:
        source = node
        if len(consumers) > 1:
            name = f"{value.name}@{kind}/{slot.name.lower()}"
            # What arrives from other blocks is reduced for several readers, and nothing becomes partial again.
            partial = self.nodes[node].decision is Decision.OP and self.meaning.reduction(value.name) is not None
            copy = self._add_value(Decision.COPY, kind, name, value, slot, partial=partial)
            share = max(share for _, share in consumers)
            self._price(node, output, copy, None, value, kind, waiting.get(slot, slot), share, -1)
            source, output = copy, 0
        for consumer, share in consumers:
            target = self.op_node[consumer.kind, consumer.position]
            op = self.folded.kinds[consumer.kind].ops[consumer.position]
            paid = waiting.get(slot, slot)
            if any(name in self.written and self.written[name].role is Role.GRADIENT for name in op.outputs):
                paid = Slot.GRADIENT
            elif op.phase is Phase.UPDATE:
                paid = Slot.REDUCE
            self._price(source, output, target, consumer.slot, value, kind, paid, share, consumer.slot)

    def _close_step(self) -> None:
        """Connect new parameters with old: who owns a shard of the update sends it to who stores the parameter."""
        for state in states_of(self.folded).updates:
            new = self.folded.by_value.get(state.output)
            old = self.folded.by_value.get(state.input)
            if new is None or old is None or old not in self.parameter_node:
                continue
            value = self.graph.values[state.input]
            share = self.nodes[self.parameter_node[old]].share
            source = self.op_node[new.kind, new.position]
            self._price(source, new.slot, self.parameter_node[old], None, value, old.kind, Slot.UPDATE, share, -1)

    def _price(
        self,
        first: int,
        output: int,
        second: int,
        input_slot: int | None,
        value: Value,
        kind: int,
        slot: Slot,
        share: float,
        consumer: int,
    ) -> None:
        source = self.nodes[first].outputs(output)
        if input_slot is None:
            target = self.nodes[second].outputs(0)
        else:
            chosen = self.nodes[second].options
            assert chosen is not None
            numbers = chosen.inputs[input_slot]
            if numbers is None:
                return
            target = numbers
        resharder = self.bucketed if slot in (Slot.GRADIENT, Slot.REDUCE, Slot.UPDATE) else self.resharder
        ways = resharder.of(value.shape, self.wire[value.name], self.meaning.chunks(value.name))
        table = self.sharing.prices(ways, source, target)
        ends = (self.sharing.places(ways, numbers) for numbers in (source, target))
        outside = Outside(ways.outside, *ends) if self.leaves_nodes else None
        self.edges.append(Edge(first, second, table, kind, slot, share, value.name, consumer, outside))

    def _parameter_value(self, producer: Producer) -> Value:
        value = self.nodes[self.parameter_node[producer]].value
        assert value is not None
        return value


def build_tables(
    folded: Folded, rules: Rules, mesh: Mesh, costs: CostModel, restriction: Restriction | None = None
) -> Tables:
    """Return the decisions and prices of a folded graph on a mesh, all of them or as restricted."""
    return _Builder(folded, rules, mesh, costs, restriction).build()


@lru_cache(maxsize=32)
def _inner_uses(folded: Folded) -> Mapping[tuple[Producer, int, Slot], list[tuple[Consumer, float]]]:
    """Return who uses what inside blocks, and how often, by what it is, the kind of block and the pass."""
    groups: dict[tuple[Producer, int, Slot], list[tuple[Consumer, float]]] = {}
    for use in folded.uses:
        if use.crossing and use.producer.source is Source.OP:
            continue
        kind = folded.kinds[use.consumer.kind]
        slot = _slot(kind.ops[use.consumer.position])
        key = (use.producer, use.consumer.kind, slot)
        groups.setdefault(key, []).append((use.consumer, use.count / kind.count))
    return groups


def _slot(op: Op) -> Slot:
    """Return when an op, and what feeds it, is paid."""
    if op.phase is Phase.UPDATE:
        return Slot.UPDATE
    return Slot.BACKWARD if op.phase is Phase.BACKWARD else Slot.FORWARD

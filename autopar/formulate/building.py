"""Build the placement decisions of one folded graph on one mesh.

Every op, parameter, boundary and shared copy becomes a node, every change of placement an edge with its seconds, every
tensor that takes memory an entry of `Tables.bytes`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost import ALONE, CostModel, Fused, Resharder, rings
from autopar.cost.collectives import Collective, leaves_node
from autopar.cost.reshard import Reshards, bucketed
from autopar.discover import Rules, Strategy
from autopar.discover.rules import Local
from autopar.folding.block_interface import is_far
from autopar.folding.fold import Arrival, Consumer, Folded, Producer, Source, boundary_groups
from autopar.folding.gather_units import NO_UNIT, gather_units, parameter_views
from autopar.folding.graph_facts import (
    beside_products,
    covering_ops,
    dealt_lengths,
    element_bytes,
    fused_ops,
    gradient_terms,
    read_bytes,
    row_routings,
    states_of,
)
from autopar.folding.selective_recompute import selective_ops
from autopar.folding.shared_experts import shared_expert_ops
from autopar.formulate.op_memo import OpCache
from autopar.formulate.op_strategies import OpStrategies, is_partial, local_sizes
from autopar.formulate.placement_semantics import meaning
from autopar.formulate.tables import (
    Boundary,
    Bytes,
    Decision,
    Edge,
    FloatArray,
    IntArray,
    InterNodeSeconds,
    Memory,
    Node,
    Slot,
    Tables,
)
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.ir.rings import RINGS
from autopar.sharding import Axis, Mesh

_WAIT = {Slot.FORWARD: Slot.FORWARD_WAIT, Slot.BACKWARD: Slot.BACKWARD_WAIT}
_GATHER = {Slot.FORWARD: Slot.FORWARD_GATHER, Slot.BACKWARD: Slot.BACKWARD_GATHER}
"""Slots of the reshards before the ops of a pass: `_WAIT` for computed values, `_GATHER` for values that exist before
the pass, such as parameters.
"""
_HIDDEN = {Slot.FORWARD_WAIT: Slot.FORWARD_GATHER, Slot.BACKWARD_WAIT: Slot.BACKWARD_GATHER}
"""Slots of collectives that compute waits for, and those of the same where they run beside compute, as gathers do."""
_IN_LINE = {Slot.BACKWARD_WAIT: Slot.BACKWARD}
"""Slots of the all-to-all of routed experts where nothing hides it: no products of weights run beside it."""
_ROWS = {Slot.FORWARD_WAIT: Slot.FORWARD_ROWS, Slot.BACKWARD_WAIT: Slot.BACKWARD_ROWS}
"""Slots of the all-to-all of routed experts where it runs beside shared experts."""
_SHARED = {
    Slot.FORWARD: Slot.FORWARD_SHARED,
    Slot.BACKWARD: Slot.BACKWARD_SHARED,
    Slot.BACKWARD_WEIGHT: Slot.BACKWARD_SHARED_WEIGHT,
}
"""Slots of kernels, and those of the kernels of shared experts that rows run beside."""

_CHUNKED = {Slot.FORWARD_WAIT: Slot.FORWARD_CHUNKED, Slot.BACKWARD_WAIT: Slot.BACKWARD_CHUNKED}
"""Slots of collectives that compute waits for, and those of the part that runs in chunks beside products."""

_STATE_MEMORY = {Role.GRADIENT: Memory.GRADIENTS, Role.MOMENT: Memory.OPTIMIZER}


class Restriction(Protocol):
    """Restricts what each mesh axis may do, decision by decision; masks are over the options of one axis alone."""

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> Sequence[NDArray[np.bool_]]:
        """Return per axis a mask of the strategies of an op that the axis may take; all false leaves the axis free."""

    def of_value(self, decision: Decision, kind: int, value: Value) -> Sequence[NDArray[np.bool_]]:
        """Return per axis a mask of the placement codes that a value may have; all false leaves the axis free."""


class _Builder:
    """Collects nodes, edges and bytes of one folded graph."""

    def __init__(
        self, folded: Folded, rules: Rules, mesh: Mesh, costs: CostModel, restriction: Restriction | None = None
    ) -> None:
        self.folded, self.mesh, self.costs, self.restriction = folded, mesh, costs, restriction
        self.graph, self.meaning = folded.graph, meaning(folded, rules)
        dealt = dealt_lengths(folded) if costs.stack.uneven else frozenset()
        self.cache = OpCache(folded.graph, mesh, costs, folded.free, dealt)
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.bytes: list[Bytes] = []
        self.boundaries: list[Boundary] = []
        self.op_node: dict[tuple[int, int], int] = {}
        self.parameter_node: dict[Producer, int] = {}
        self.resharder, self.bucketed = Resharder(mesh, costs, dealt), bucketed(mesh, costs, dealt)
        self.units, self.views = gather_units(folded, costs, mesh.shape), parameter_views(folded)
        self.leaving = tuple(leaves_node(axis, costs.cluster.devices_per_node) for axis in mesh.axes)
        self.leaves_nodes = any(self.leaving)
        self.beside = beside_products(folded)
        self.covering_ops = covering_ops(folded)
        self.resident, self.wire = element_bytes(folded, costs.policy)
        self.read, self.routings = read_bytes(folded, costs.policy), row_routings(folded)
        self.trains = any(op.phase is Phase.BACKWARD for kind in folded.kinds for op in kind.ops)
        self.results = frozenset() if self.trains else frozenset(self.graph.outputs)
        self.written = states_of(folded).written
        self.shared = shared_expert_ops(folded) if costs.stack.covers_rows else frozenset[str]()
        shared = (kind.id for kind in folded.kinds if any(op.name in self.shared for op in kind.ops))
        self.beside_shared = frozenset(shared)
        self.fused = fused_ops(folded, costs)
        self.selective = selective_ops(folded, costs)

    def build(self) -> Tables:
        """Build all nodes, edges and bytes, and return the tables."""
        for kind in self.folded.kinds:
            for position, op in enumerate(kind.ops):
                self._add_op(kind.id, position, op)
        for parameter in self.folded.parameters:
            self._add_parameter(parameter.producer, parameter.value, parameter.count)
        self._connect_inside()
        self._connect_boundaries()
        self._connect_updates()
        return Tables(
            self.folded, self.meaning, self.mesh, self.costs, self.resharder,
            tuple(self.nodes), tuple(self.edges), tuple(self.bytes), tuple(self.boundaries),
            self.selective, *self._rerun_under_selective(),
        )  # fmt: skip

    def _rerun_under_selective(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the nodes and the edges whose cost selective recompute repeats."""
        nodes = {self.op_node[kind, position] for kind, ops in enumerate(self.selective) for position in ops}
        read = {edge.first for edge in self.edges if edge.second in nodes}
        copies = {index for index in read if self.nodes[index].decision is Decision.COPY}
        edges = (index for index, edge in enumerate(self.edges) if edge.second in nodes or edge.second in copies)
        return tuple(sorted(nodes)), tuple(edges)

    # Nodes.

    def _add_op(self, kind: int, position: int, op: Op) -> None:
        """Add the node of an op and its bytes."""
        options = self._keep_valid(op, self._options(kind, op))
        slot = Slot.BACKWARD_WEIGHT if op.name in self.covering_ops else _slot(op)
        if op.name in self.shared:
            slot = _SHARED.get(slot, slot)
        seconds = self._op_seconds(op, options)
        self.op_node[kind, position] = len(self.nodes)
        self.nodes.append(Node(Decision.OP, kind, op.name, slot, seconds, 1.0, position, options, None, None))
        self._op_bytes(kind, position, op, options)

    def _options(self, kind: int, op: Op) -> OpStrategies:
        """Return the strategies of an op under the restriction; all of them if no strategy satisfies it."""
        strategies = self.meaning.strategies(op)
        if self.restriction is not None:
            options = self.cache.options(op, strategies, self.restriction.of_op(kind, op, strategies))
            if options.count:
                return options
        return self.cache.options(op, strategies)

    def _placements(self, decision: Decision, kind: int, value: Value, *, partial: bool) -> IntArray:
        """Return the placement numbers of a value under the restriction; all of them if no placement satisfies it."""
        chunks = self.meaning.chunks(value.name)
        if self.restriction is not None:
            allowed = self.restriction.of_value(decision, kind, value)
            numbers = self.cache.placements(value.shape, chunks, partial=partial, allowed=allowed)
            if len(numbers):
                return numbers
        return self.cache.placements(value.shape, chunks, partial=partial)

    def _op_seconds(self, op: Op, options: OpStrategies) -> FloatArray:
        """Return the (S,) seconds of an op, its transfers included, from the cache if an equal op was priced before."""
        sizes = self.resident if op.phase is Phase.UPDATE else self.read
        fused = self.fused.get(op.name, ALONE)
        operands = tuple(size[name] for size in (sizes, self.wire) for name in (*op.inputs, *op.outputs) if name)
        return self.cache.seconds(op, options, operands, fused, lambda: self._seconds(op, options, sizes, fused))

    def _seconds(self, op: Op, options: OpStrategies, sizes: Mapping[str, float], fused: Fused) -> FloatArray:
        """Compute the (S,) seconds of an op, halo exchange and transfers of a ring included."""
        seconds = self.costs.op_seconds(op, options.local_inputs, options.local_outputs, sizes, fused)
        for index in set(options.local_kinds.tolist()) - {-1}:
            local, rows = options.on_one_axis[index].local, options.local_kinds == index
            assert local is not None
            part = options.select(rows)
            size = self.graph.values[op.inputs[local.input]].shape[local.dim]
            other = replace(op, kind=local.kind, attrs=(*op.attrs, ("size", size)))
            seconds[rows] = self.costs.op_seconds(other, part.local_inputs, part.local_outputs, sizes, fused)
            for axis, own in options.rows_of(local).items() if local.kind in RINGS else ():
                ring, own = self.mesh.axes[axis], own & rows
                passed = self._passed_bytes(op, local.kind, options.select(own), self.wire)
                steps = self._ring_steps(op, local, ring)
                transfers = rings.all_transfers(self.costs.exchange_seconds(passed, ring), steps)
                seconds[own] += rings.added_seconds(seconds[own], transfers, steps, self.costs.stack)
        for halos in options.halos:
            nbytes = halos.elements.astype(np.float64) * self.wire[op.inputs[halos.input]]
            seconds += self.costs.exchange_seconds(nbytes, self.mesh.axes[halos.axis])
        return seconds

    def _ring_steps(self, op: Op, local: Local, ring: Axis) -> int:
        """Return how many blocks a device of a ring computes on."""
        size = self.graph.values[op.inputs[local.input]].shape[local.dim]
        return RINGS[local.kind].steps(op.attrs, size // ring.size, ring.size)

    def _passed_bytes(self, op: Op, kind: str, options: OpStrategies, sizes: Mapping[str, float]) -> FloatArray:
        """Return the bytes that a device passes on in one step of a ring, (S,)."""
        inputs, outputs = (
            [
                np.zeros(options.count) if shape is None else self.cache.elements(shape) * sizes[name]
                for name, shape in zip(names, shapes, strict=True)
            ]
            for names, shapes in ((op.inputs, options.local_inputs), (op.outputs, options.local_outputs))
        )
        return rings.transfer_bytes(kind, inputs, outputs)

    def _keep_valid(self, op: Op, options: OpStrategies) -> OpStrategies:
        """Return the strategies of an op that keep written state where it is stored, and reduce results of inference.

        Gradient sums and moments keep the placement they have before the op. The loss of a training step may stay a
        partial sum, because nothing reads it.
        """
        keep = np.ones(options.count, dtype=bool)
        for slot, name in enumerate(op.outputs):
            numbers = options.outputs[slot]
            if name in self.results and numbers is not None:
                keep &= ~is_partial(numbers, len(self.graph.values[name].shape), len(self.mesh.axes))
            state = self.written.get(name)
            if state is not None and state.role in (Role.GRADIENT, Role.MOMENT):
                before, after = options.inputs[op.inputs.index(state.input)], options.outputs[slot]
                assert before is not None, state
                assert after is not None, state
                keep &= before == after
        return self.cache.selected(options, keep)

    def _op_bytes(self, kind: int, position: int, op: Op, options: OpStrategies) -> None:
        """Add the bytes of an op: copies with halos, blocks under way in a ring, what its kernel keeps, its outputs."""
        node = self.op_node[kind, position]
        self._ring_bytes(kind, position, op, options)
        for slot, name in self.folded.caches_of(op):
            local = options.local_inputs[slot]
            assert local is not None, op.name
            amounts = self.folded.microbatches * self.cache.elements(local) * self.resident[name]
            self.bytes.append(Bytes(node, kind, Memory.CACHES, amounts))
        block = self.folded.kinds[kind]
        for index in dict.fromkeys(halos.input for halos in options.halos):
            # A shard with halo rows is a new tensor, which lives while the op runs.
            local, with_rows = options.local_inputs[index], np.zeros(options.count, dtype=bool)
            assert local is not None, op.name
            for halos in options.halos:
                with_rows |= (halos.elements > 0) & (halos.input == index)
            amounts = np.where(with_rows, self.cache.elements(local) * self.resident[op.inputs[index]], 0.0)
            self.bytes.append(Bytes(node, kind, Memory.TRANSIENT, amounts, position, position + 1))
        behind = self.costs.kept_bytes(op, options.local_inputs, options.local_outputs, self.resident)
        if behind.any() and self.trains:
            memory = Memory.DROPPED if position in self.selective[kind] else Memory.SAVED
            self.bytes.append(Bytes(node, kind, memory, behind))
        for slot, name in enumerate(op.outputs):
            local = options.local_outputs[slot]
            if not name or local is None:
                continue
            amounts = self.cache.elements(local) * self.resident[name]
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

    def _ring_bytes(self, kind: int, position: int, op: Op, options: OpStrategies) -> None:
        """Add the blocks of other devices that a device holds while it runs an op in a ring."""
        amounts = np.zeros(options.count)
        for local in dict.fromkeys(strategy.local for strategy in options.on_one_axis if strategy.local is not None):
            for axis, own in options.rows_of(local).items() if local.kind in RINGS else ():
                passed = self._passed_bytes(op, local.kind, options.select(own), self.resident)
                amounts[own] = rings.buffer_bytes(passed, self._ring_steps(op, local, self.mesh.axes[axis]))
        if amounts.any():
            node = self.op_node[kind, position]
            self.bytes.append(Bytes(node, kind, Memory.TRANSIENT, amounts, position, position + 1))

    def _add_parameter(self, producer: Producer, value: Value, count: int) -> None:
        """Add the node of a parameter's stored placement and its bytes."""
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
        """Add the node of a boundary or of a shared copy; return its index."""
        numbers = self._placements(decision, kind, value, partial=partial)
        self.nodes.append(Node(decision, kind, name, slot, np.zeros(len(numbers)), 1.0, -1, None, numbers, value))
        return len(self.nodes) - 1

    # Edges.

    def _connect_inside(self) -> None:
        """Connect ops with the ops and parameters of their own block.

        A value that several ops of a pass read goes through one copy that they share.
        """
        for (producer, kind_id, slot), consumers in _inner_uses(self.folded).items():
            if producer.source is Source.STATE:
                node, value = self.parameter_node[producer], self._parameter_value(producer)
            else:
                node = self.op_node[producer.kind, producer.position]
                op = self.folded.kinds[producer.kind].ops[producer.position]
                value = self.graph.values[op.outputs[producer.slot]]
            early = producer.source is Source.STATE or value.name in self.views
            waiting = _GATHER if early else _WAIT
            self._connect_consumers(node, producer.slot, value, kind_id, slot, consumers, waiting)

    def _connect_boundaries(self) -> None:
        """Give every value that passes between blocks one placement at all block boundaries.

        So any two blocks fit together. Only terms of the gradient of a parameter that several blocks read may pass as
        partial sums; they are reduced once, together with the other terms.
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
                self._add_edge(source, producer.slot, node, None, value, producer.kind, slot, 1.0, -1)
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
                # Exported values exist before the pass, as parameters do.
                waiting = _GATHER if is_far(self.folded, kind_id, arrival.value) else _WAIT
                for slot, consumers in by_slot.items():
                    self._connect_consumers(
                        node, 0, self.graph.values[arrival.value], kind_id, slot, consumers, waiting
                    )

    def _is_saved(self, arrival: Arrival) -> bool:
        """Whether the blocks that produce a value save it for their own backward."""
        makers = (producer for producer, _ in arrival.producers)
        return all(self.folded.kinds[made.kind].saved[made.position][made.slot] for made in makers)

    def _connect_consumers(
        self,
        node: int,
        output: int,
        value: Value,
        kind: int,
        slot: Slot,
        consumers: Sequence[tuple[Consumer, float]],
        waiting: Mapping[Slot, Slot],
    ) -> None:
        """Add the edges from a node to the ops that read its value, through a shared copy if there are several.

        Args:
            node: Node that defines the value.
            output: Output of the node's op that is the value.
            value: The value.
            kind: Kind of the reading block.
            slot: Pass of the readers.
            consumers: The readers, each with its number of uses per instance.
            waiting: Slot of the reshards, by pass: `_WAIT` or `_GATHER`.
        """
        source = node
        if len(consumers) > 1:
            name = f"{value.name}@{kind}/{slot.name.lower()}"
            # A boundary value is reduced before several ops read it, and a reduced value never becomes partial.
            partial = self.nodes[node].decision is Decision.OP and self.meaning.reduction(value.name) is not None
            copy = self._add_value(Decision.COPY, kind, name, value, slot, partial=partial)
            share = max(share for _, share in consumers)
            self._add_edge(node, output, copy, None, value, kind, waiting.get(slot, slot), share, -1)
            source, output = copy, 0
        for consumer, share in consumers:
            target = self.op_node[consumer.kind, consumer.position]
            op = self.folded.kinds[consumer.kind].ops[consumer.position]
            paid = waiting.get(slot, slot)
            if any(name in self.written and self.written[name].role is Role.GRADIENT for name in op.outputs):
                paid = Slot.GRADIENT
            elif op.phase is Phase.UPDATE:
                paid = Slot.REDUCE
            self._add_edge(source, output, target, consumer.slot, value, kind, paid, share, consumer.slot)

    def _connect_updates(self) -> None:
        """Add the reshards from the updated parameters to the stored ones."""
        for state in states_of(self.folded).updates:
            new = self.folded.by_value.get(state.output)
            old = self.folded.by_value.get(state.input)
            if new is None or old is None or old not in self.parameter_node:
                continue
            value = self.graph.values[state.input]
            share = self.nodes[self.parameter_node[old]].share
            source = self.op_node[new.kind, new.position]
            self._add_edge(source, new.slot, self.parameter_node[old], None, value, old.kind, Slot.UPDATE, share, -1)

    def _add_edge(
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
        """Add the edge of a reshard; no edge if the op has no placement for this input.

        Args:
            first: Node that defines the value.
            output: Output of the first node's op that is the value.
            second: Node that uses the value.
            input_slot: Input of the second node's op that is the value; None if the node places the value itself.
            value: The value.
            kind: Kind of the block that pays.
            slot: Slot of the seconds.
            share: Times per instance of the kind.
            consumer: As of `Edge.consumer`.
        """
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
        if value.name in self.routings:
            beside = _HIDDEN if self.costs.stack.hides_dispatch else _ROWS if kind in self.beside_shared else _IN_LINE
            slot = beside.get(slot, slot)
        resharder = self.bucketed if slot in (Slot.GRADIENT, Slot.REDUCE, Slot.UPDATE) else self.resharder
        chunks, routing = self.meaning.chunks(value.name), self.routings.get(value.name)
        unit = NO_UNIT
        if slot in _GATHER.values():
            unit = self.units[kind, slot is Slot.BACKWARD_GATHER].get(value.name, NO_UNIT)
        ways = resharder.of(value.shape, self.wire[value.name], chunks, routing, unit.share)
        table = self.cache.prices(ways, source, target)
        ends = (self.cache.places(ways, numbers) for numbers in (source, target))
        outside = InterNodeSeconds(ways.outside, *ends) if self.leaves_nodes else None
        edge = Edge(first, second, table, kind, slot, share, value.name, consumer, outside)
        chunked: Set[Collective] = frozenset()
        if self.costs.stack.hides_tp and slot in _CHUNKED and value.name not in self.routings:
            name = self._name_in_block(first, output, value)
            chunked = self.beside[kind, slot is Slot.BACKWARD_WAIT].collectives(name)
        self.edges += self._split(edge, chunked, ways, source, target) if chunked else (edge,)

    def _name_in_block(self, node: int, output: int, value: Value) -> str:
        """Return the name of a value in the block that makes it; a boundary may be named after another block's."""
        made = self.nodes[node]
        return self.folded.kinds[made.kind].ops[made.position].outputs[output] if made.options else value.name

    def _split(
        self, edge: Edge, chunked: Set[Collective], ways: Reshards, source: IntArray, target: IntArray
    ) -> tuple[Edge, ...]:
        """Return an edge as two: the collectives that run in chunks beside products, and those that are waited for."""
        parts = self.cache.parts(ways, source, target, chunked, self.leaving)
        if not parts.chunked.any():
            return (edge,)
        outside: list[InterNodeSeconds | None] = [None, None]
        if edge.outside is not None:
            rows, columns = (np.arange(count) for count in edge.table.shape)
            outside = [InterNodeSeconds(each, rows, columns) for each in (parts.whole_outside, parts.chunked_outside)]
        return (
            replace(edge, table=parts.whole, outside=outside[0]),
            replace(edge, table=parts.chunked, outside=outside[1], slot=_CHUNKED[edge.slot]),
        )

    def _parameter_value(self, producer: Producer) -> Value:
        value = self.nodes[self.parameter_node[producer]].value
        assert value is not None
        return value


def build_tables(
    folded: Folded, rules: Rules, mesh: Mesh, costs: CostModel, restriction: Restriction | None = None
) -> Tables:
    """Return the decisions and costs of a folded graph on a mesh, under an optional restriction."""
    return _Builder(folded, rules, mesh, costs, restriction).build()


@lru_cache(maxsize=32)
def _inner_uses(folded: Folded) -> Mapping[tuple[Producer, int, Slot], list[tuple[Consumer, float]]]:
    """Return the uses inside blocks: (consumer, uses per instance) by producer, kind of the reading block, and pass."""
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
    """Return the slot of an op's cost by its phase."""
    if op.phase is Phase.UPDATE:
        return Slot.UPDATE
    return Slot.BACKWARD if op.phase is Phase.BACKWARD else Slot.FORWARD

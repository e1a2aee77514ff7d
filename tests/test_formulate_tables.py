"""Decisions and costs: the cost of a choice equals the cost of its placements, op by op and value by value."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import fsum, prod

import numpy as np
import pytest

from autopar.cluster import PRESETS
from autopar.cost import ALONE, Bucketed, CostModel, Fused, Resharder
from autopar.cost.reshard import Share
from autopar.folding.fold import Producer, Source
from autopar.folding.gather_units import NO_UNIT, gather_units
from autopar.folding.graph_facts import element_bytes
from autopar.formulate.block_memory import block_bytes
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import Weights, problem, stage_mixes, weights
from autopar.formulate.step_time import Pipeline
from autopar.formulate.step_time import Split as Cut
from autopar.formulate.tables import AGAIN, OUTSIDE, Decision, IntArray, Slot, Tables
from autopar.ir.graph import Op, Phase, Role
from autopar.recompute import Recompute
from autopar.sharding import Mesh, Placements, Replicate, local_shape
from tests.formulations import COSTS, folded, good_choice, random_choice, rules, tables

NAMES = ("gpt2", "mixtral-8x7b", "mlp-xs")
CASES = [("gpt2", "train"), ("gpt2", "infer"), ("mixtral-8x7b", "train"), ("mlp-xs", "train"), ("resnet50", "infer")]


def _placements(found: Tables, value: str, number: int) -> Placements:
    return found.meaning.placements(value, int(number), found.mesh)


@pytest.mark.parametrize("name", NAMES)
def test_strategies_divide_and_decode_to_priced_shapes(name: str) -> None:
    """Every placement number decodes to placements whose local shape is the priced one."""
    found = tables(name)
    values = found.folded.graph.values
    rng = np.random.default_rng(0)

    for node in found.nodes:
        if node.options is None:
            assert node.value is not None
            assert node.placements is not None
            for number in node.placements:
                local_shape(node.value.shape, _placements(found, node.value.name, number), found.mesh)
            continue
        op = found.folded.kinds[node.kind].ops[node.position]
        for names, placed, local in (
            (op.inputs, node.options.inputs, node.options.local_inputs),
            (op.outputs, node.options.outputs, node.options.local_outputs),
        ):
            for value, numbers, shapes in zip(names, placed, local, strict=True):
                if numbers is None or shapes is None:
                    continue
                few = rng.choice(node.count, size=min(node.count, 12), replace=False)
                for number, shape in zip(numbers[few], shapes[few].tolist(), strict=True):
                    placements = _placements(found, value, number)
                    assert local_shape(values[value].shape, placements, found.mesh) == tuple(shape)


@pytest.mark.parametrize("name", NAMES)
def test_strategies_of_an_op_are_distinct(name: str) -> None:
    """No strategy is listed twice, and the first one replicates everything."""
    found = tables(name)

    for node in found.nodes:
        if node.options is not None:
            columns = [array for array in (*node.options.inputs, *node.options.outputs) if array is not None]
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            assert len(set(rows)) == len(rows) == node.count
            assert not any(rows[0])


@pytest.mark.parametrize("name", NAMES)
def test_edges_price_the_change_of_placement(name: str) -> None:
    """An edge costs zero for equal placements, infinity without a path, else the sum along the cheapest path."""
    found = tables(name)
    rng = np.random.default_rng(0)
    graph = found.folded.graph
    _, wire = element_bytes(found.folded, found.costs.policy)
    units = gather_units(found.folded, found.costs, found.mesh.shape)

    for edge in found.edges:
        first, second = found.nodes[edge.first], found.nodes[edge.second]
        shape = graph.values[edge.value].shape
        source, target = _source(found, edge.first, edge.value), _target(found, edge.second, edge.consumer)
        assert edge.table.shape == (first.count, second.count)
        assert (edge.table[source[:, None] == target[None, :]] == 0).all()
        unit = NO_UNIT
        if edge.slot in GATHER.values():
            unit = units[edge.kind, edge.slot is Slot.BACKWARD_GATHER].get(edge.value, NO_UNIT)
        resharder = _resharder(found, edge.slot)
        reshards = resharder.of(shape, wire[edge.value], found.meaning.chunks(edge.value), share=unit.share)
        for row, column in zip(rng.integers(first.count, size=4), rng.integers(second.count, size=4), strict=True):
            if np.isfinite(edge.table[row, column]):
                path = reshards.path(
                    _placements(found, edge.value, source[row]), _placements(found, edge.value, target[column])
                )
                assert edge.table[row, column] == pytest.approx(fsum(move.seconds for move in path), rel=1e-12)


def _resharder(found: Tables, slot: Slot) -> Resharder:
    """Return the resharder that prices a slot: gradients and new parameters travel in buckets."""
    if slot in (Slot.GRADIENT, Slot.REDUCE, Slot.UPDATE):
        return Resharder(found.mesh, Bucketed(found.costs))
    return found.resharder


def _source(found: Tables, node: int, value: str) -> IntArray:
    """Return the placements at which a node defines a value; a boundary may be named after another instance's."""
    item = found.nodes[node]
    if item.options is None:
        return item.outputs(0)
    op = found.folded.kinds[item.kind].ops[item.position]
    return item.outputs(op.outputs.index(value) if value in op.outputs else 0)


def _target(found: Tables, node: int, consumer: int) -> IntArray:
    item = found.nodes[node]
    numbers = item.options.inputs[consumer] if item.options is not None else item.placements
    assert numbers is not None
    return numbers


WAIT = {Slot.FORWARD: Slot.FORWARD_WAIT, Slot.BACKWARD: Slot.BACKWARD_WAIT}
GATHER = {Slot.FORWARD: Slot.FORWARD_GATHER, Slot.BACKWARD: Slot.BACKWARD_GATHER}


@dataclass
class _Unfolded:
    """Seconds by slot of the whole graph, walked op by op with the placements of a choice."""

    found: Tables
    choice: tuple[int, ...]
    totals: dict[Slot, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        folded = self.found.folded
        self.graph = folded.graph
        self.resident, self.wire = element_bytes(folded, self.found.costs.policy)
        self.op_node = {(n.kind, n.position): i for i, n in enumerate(self.found.nodes) if n.decision is Decision.OP}
        self.named = {n.name: i for i, n in enumerate(self.found.nodes) if n.decision is Decision.COPY}
        self.stored = {n.name: i for i, n in enumerate(self.found.nodes) if n.decision is Decision.PARAMETER}
        self.boundary = {p: b.node for b in self.found.boundaries for p in b.producers}
        self.states = {state.output: state for state in self.graph.states if state.output != state.input}
        self.home = {name: op for op in self.graph.ops for name in op.outputs if name}
        ranks = {name: len(value.shape) for name, value in self.graph.values.items()}
        self.fused: dict[str, Fused] = {}
        for block in range(folded.num_blocks):
            self.fused |= COSTS.fuse([op for op in self.graph.ops if op.block == block], ranks)

    def at(self, node: int) -> int:
        """Return the placement number a node that is no op decides."""
        placements = self.found.nodes[node].placements
        assert placements is not None
        return int(placements[self.choice[node]])

    def move(self, value: str, source: int, target: int, slot: Slot, block: int = -1) -> None:
        share = self.share(value, block, slot) if slot in GATHER.values() else Share()
        resharder = _resharder(self.found, slot)
        reshards = resharder.of(self.graph.values[value].shape, self.wire[value], share=share)
        self.totals[slot].append(float(reshards.between(np.array([source]), np.array([target]))[0, 0]))

    def share(self, value: str, block: int, slot: Slot) -> Share:
        """Return what a parameter pays of a gather of all that a pass through a block reads."""
        ops = [op for op in self.graph.ops if op.block == block and GATHER.get(_paid(op)) is slot]
        owners = {state.input for state in self.graph.states if state.role is Role.PARAMETER}
        read = {self.seen(name) for op in ops for name in op.inputs} & owners
        sizes = {name: self.wire[name] * self.graph.values[name].size for name in read}
        parts = fsum(sizes.values()) / sizes[self.seen(value)]
        return Share(parts, (1 / parts + 1 / len(sizes)) / 2)

    def seen(self, value: str) -> str:
        """Return the parameter that a value is the transposed of; the value itself if it is none."""
        maker = self.home.get(value)
        owners = {state.input for state in self.graph.states if state.role is Role.PARAMETER}
        is_view = maker is not None and maker.kind == "Transpose" and maker.inputs[0] in owners
        return maker.inputs[0] if maker is not None and is_view else value

    def walk(self) -> dict[Slot, float]:
        folded = self.found.folded
        own = {state.input for state in self.graph.states if state.role is not Role.BUFFER}
        lengths = [0] * folded.num_blocks
        order = {}
        for op in self.graph.ops:
            order[op.name] = (folded.chain[op.block], lengths[op.block])
            lengths[op.block] += 1
        readers: dict[tuple[str, int, Slot], list[tuple[Op, int]]] = defaultdict(list)
        crossing = set()
        for op in self.graph.ops:
            self.run(op, order[op.name])
            slot = _paid(op)
            for index, value in enumerate(op.inputs):
                if value not in folded.by_value or (op.phase is Phase.UPDATE and value in own):
                    continue
                readers[value, op.block, slot].append((op, index))
                if value in self.home and self.home[value].block != op.block:
                    crossing.add(value)
        for value, op in self.home.items():
            producer = folded.by_value[value]
            if producer in self.boundary:  # every instance hands it on, whoever reads it there
                self.move(value, self.defined(value, order), self.at(self.boundary[producer]), WAIT[_paid(op)])
        for (value, block, slot), uses in readers.items():
            producer = folded.by_value[value]
            if value in crossing and self.home[value].block != block:
                reader, index = uses[0]
                kind, position = order[reader.name]
                source = self.at(self.boundary[producer])
                label = folded.kinds[kind].ops[position].inputs[index]
            elif producer.source is Source.STATE:
                label = next(p.value.name for p in folded.parameters if p.producer == producer)
                source = self.at(self.stored[label])
            else:
                source, label = self.defined(value, order), self.representative(producer)
            early = producer.source is Source.STATE or self.seen(value) != value
            fine = (GATHER if early else WAIT).get(slot, slot)
            if len(uses) > 1:
                copy = self.at(self.named[f"{label}@{folded.chain[block]}/{slot.name.lower()}"])
                self.move(value, source, copy, fine, block)
                source = copy
            for op, index in uses:
                target = self.option(order[op.name], index)
                if target is None:
                    continue
                accumulates = any(out in self.states and self.states[out].role is Role.GRADIENT for out in op.outputs)
                paid = Slot.GRADIENT if accumulates else Slot.REDUCE if op.phase is Phase.UPDATE else fine
                self.move(value, source, target, paid, block)
        for state in self.graph.states:
            if state.role is Role.PARAMETER and state.output != state.input:
                old = folded.by_value[state.input]
                label = next(p.value.name for p in folded.parameters if p.producer == old)
                self.move(state.input, self.defined(state.output, order), self.at(self.stored[label]), Slot.UPDATE)
        return {slot: fsum(terms) for slot, terms in self.totals.items()}

    def run(self, op: Op, place: tuple[int, int]) -> None:
        node = self.found.nodes[self.op_node[place]]
        assert node.options is not None
        strategy = self.choice[self.op_node[place]]

        def pick(arrays: tuple[IntArray | None, ...]) -> list[IntArray | None]:
            return [None if array is None else array[[strategy]] for array in arrays]

        shapes = pick(node.options.local_inputs), pick(node.options.local_outputs)
        seconds = COSTS.op_seconds(op, *shapes, self.resident, self.fused.get(op.name, ALONE))
        self.totals[Slot.BACKWARD_WEIGHT if self.covers(op) else _paid(op)].append(float(seconds[0]))

    def covers(self, op: Op) -> bool:
        """Whether all uses of a backward op's outputs end in one gradient sum, by following every use."""
        ends, ways = set(), list(filter(None, op.outputs))
        while ways:
            value = ways.pop()
            users = [user for user in self.graph.ops if value in user.inputs]
            if value in self.states and self.states[value].role is Role.GRADIENT:
                ends.add(value)
            elif any(user.block != op.block or user.phase is not Phase.BACKWARD for user in users):
                return False
            else:
                ways.extend(name for user in users for name in user.outputs if name)
        return op.phase is Phase.BACKWARD and len(ends) == 1

    def defined(self, value: str, order: dict[str, tuple[int, int]]) -> int:
        op = self.home[value]
        node = self.op_node[order[op.name]]
        options = self.found.nodes[node].options
        assert options is not None
        numbers = options.outputs[op.outputs.index(value)]
        assert numbers is not None
        return int(numbers[self.choice[node]])

    def option(self, place: tuple[int, int], index: int) -> int | None:
        node = self.op_node[place]
        options = self.found.nodes[node].options
        assert options is not None
        numbers = options.inputs[index]
        return None if numbers is None else int(numbers[self.choice[node]])

    def representative(self, producer: Producer) -> str:
        return self.found.folded.kinds[producer.kind].ops[producer.position].outputs[producer.slot]


def _paid(op: Op) -> Slot:
    if op.phase is Phase.UPDATE:
        return Slot.UPDATE
    return Slot.BACKWARD if op.phase is Phase.BACKWARD else Slot.FORWARD


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_folded_seconds_equal_those_of_the_whole_graph(name: str, mode: str) -> None:
    """Instances times seconds per kind and slot equal the sum over every op and value of the unfolded graph."""
    found = tables(name, mode)
    weighting = weights(found, Pipeline(1, 2, "1f1b"), recompute=Recompute.NONE, hidden=1.0, bounding=False)
    choice = random_choice(problem(found, weighting), np.random.default_rng(1), near=good_choice(name, mode))
    counts = np.array([kind.count for kind in found.folded.kinds])

    totals = counts @ found.kind_totals(choice)

    walked = _Unfolded(found, choice).walk()
    assert {slot: totals[slot] for slot in walked} == pytest.approx(walked, rel=1e-9)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_objective_equals_weights_times_totals(name: str, mode: str) -> None:
    """The objective of a problem equals weights times `kind_totals`, for any choice and any pipeline."""
    found = tables(name, mode)
    rng = np.random.default_rng(2)
    schedule = "1f1b" if mode == "train" else "forward-only"
    near = good_choice(name, mode)

    for pipeline in (Pipeline(1, 1, schedule), Pipeline(1, 4, schedule), Pipeline(3, 4, schedule)):
        for bounding in (False, True):
            weighting = weights(found, pipeline, recompute=Recompute.NONE, hidden=0.5, bounding=bounding)
            instance = problem(found, weighting)
            for _ in range(2):
                choice = random_choice(instance, rng, near=near)
                totals = found.kind_totals(choice)
                expected = fsum((weighting.factors * totals).ravel())
                assert instance.cost(choice) == pytest.approx(expected, rel=1e-9)


def test_flat_arrays_equal_nodes_and_edges() -> None:
    """Totals, bytes and problems from flat arrays equal sequential sums over nodes and edges.

    The mesh has an axis that crosses nodes; weights are random, and bytes and one pair of nodes have prices.
    """
    near, h100 = good_choice("gpt2", "train"), PRESETS["h100"]
    costs = CostModel(replace(h100, devices_per_node=2, inter=replace(h100.inter, nics=None)))
    found = build_tables(folded("gpt2"), rules("gpt2"), Mesh.of(outer=2, inner=2), costs)
    rng = np.random.default_rng(4)
    factors, prices = rng.random((len(found.folded.kinds), len(Slot))), rng.random(len(found.bytes))
    plain = problem(found, Weights(factors, True))
    edge, costly = found.edges[0], rng.random(found.edges[0].table.shape)

    priced = problem(found, Weights(factors, True), prices=prices, pairs=[(edge.first, edge.second, costly, 0.5)])

    again_nodes, again_edges = frozenset(found.again_nodes), frozenset(found.again_edges)
    assert any(edge.outside is not None and edge.outside.seconds.any() for edge in found.edges)
    for _ in range(5):
        choice = random_choice(plain, rng, near=near)
        terms: dict[tuple[int, Slot], list[float]] = defaultdict(list)
        for index, node in enumerate(found.nodes):
            for slot in (node.slot, *([AGAIN[node.slot]] if index in again_nodes else [])):
                terms[node.kind, slot].append(node.share * float(node.seconds[choice[index]]))
        for index, edge in enumerate(found.edges):
            ends = choice[edge.first], choice[edge.second]
            for slot in (edge.slot, *([AGAIN[edge.slot]] if index in again_edges else [])):
                terms[edge.kind, slot].append(edge.share * float(edge.table[ends]))
                if edge.outside is not None and slot in OUTSIDE:
                    terms[edge.kind, OUTSIDE[slot]].append(edge.share * edge.outside.at(*ends))
        totals = found.kind_totals(choice)
        assert {place: totals[place] for place in terms} == pytest.approx({p: fsum(each) for p, each in terms.items()})
        assert np.count_nonzero(totals) == sum(any(each) for each in terms.values())
        held = [float(item.amounts[choice[item.node]]) for item in found.bytes]
        assert found.flat.held(choice).tolist() == held
        assert plain.cost(choice) == pytest.approx(fsum((factors * totals).ravel()))
        paid = fsum(price * nbytes for price, nbytes in zip(prices.tolist(), held, strict=True))
        pair = 0.5 * costly[choice[found.edges[0].first], choice[found.edges[0].second]]
        assert priced.cost(choice) == pytest.approx(plain.cost(choice) + paid + pair)


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("recompute", Recompute)
def test_memory_of_the_problem_equals_stage_bytes(name: str, mode: str, recompute: Recompute) -> None:
    """The peak use of a stage in the problem plus buffers equals `stage_bytes`."""
    found = tables(name, mode)
    chain = found.folded.chain
    pipeline = Pipeline(2, 3, "1f1b")
    cut = Cut.uniform(((0, len(chain) - 1), (len(chain) - 1, len(chain))), (recompute, recompute))
    weighting = weights(found, pipeline, recompute=recompute, hidden=1.0, bounding=False)
    choice = random_choice(problem(found, weighting), np.random.default_rng(3), near=good_choice(name, mode))
    memory = block_bytes(found, choice)

    for stage in range(2):
        counts = tuple(int(c) for c in np.bincount(chain[slice(*cut.ranges[stage])], minlength=len(found.folded.kinds)))
        every = stage_mixes(chain, pipeline, cut, len(found.folded.kinds))
        mixes = [mix for mix in every if mix.counts[list(Recompute).index(recompute)] == counts]
        if mixes:
            instance = problem(found, weighting, mixes, 1e15)
            peak = instance.peak_usage(choice) + memory.buffers
            expected = memory.stage_bytes(np.array(counts), pipeline.in_flight(stage), recompute)
            assert peak == pytest.approx(expected, rel=1e-9)


def test_parameters_gradients_and_moments_by_hand() -> None:
    """Copied everywhere, a trained element takes 2 B as parameter, 4 B as sum of gradients, 12 B in the optimizer.

    mlp-xs here: 5 layers of 16 × 16 = 1280 elements.
    """
    found = tables("mlp-xs")
    whole = tuple(
        next(
            s for s in range(node.count)
            if node.placements is not None and not node.placements[s]
        ) if node.options is None else 0
        for node in found.nodes
    )  # fmt: skip

    memory = block_bytes(found, whole)

    counts = np.array([kind.count for kind in found.folded.kinds])
    assert all(
        placement == Replicate()
        for node, s in zip(found.nodes, whole, strict=True)
        if node.placements is not None and node.value is not None
        for placement in _placements(found, node.value.name, node.placements[s])
    )
    assert counts @ memory.resident == 5 * prod((16, 16)) * (2 + 4 + 12)

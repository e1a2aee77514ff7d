"""Mesh-independent properties of a folded graph: bytes per element, fused ops, host launch times, gradient terms.

Each is computed once per graph and cached; properties independent of the microbatch size are cached for
`Folded.pattern`. Cached results must not be changed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost import ALONE, CostModel, DtypePolicy, Fused
from autopar.cost.attention import ATTENTION_KINDS
from autopar.cost.collectives import Collective
from autopar.cost.products import PRODUCT_KINDS
from autopar.cost.scans import SCAN_KERNELS
from autopar.folding.fold import Folded, Producer, Source
from autopar.ir.graph import Graph, Op, Phase, Role, State
from autopar.ir.routing import Routing, routings

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The persistent tensors of a step.

    Attributes:
        written: States that the step changes, by output name.
        parameters: Names of parameters before the step.
        owners: Parameter of each state, by output name.
        updates: Representative parameters that the step changes.
    """

    written: Mapping[str, State]
    parameters: frozenset[str]
    owners: Mapping[str, str]
    updates: tuple[State, ...]


def states_of(folded: Folded) -> States:
    """Return the persistent tensors of a graph."""
    return _states(folded.pattern)


@lru_cache(maxsize=32)
def _states(folded: Folded) -> States:
    states, distinct = folded.graph.states, {parameter.value.name for parameter in folded.parameters}
    return States(
        {state.output: state for state in states if state.output != state.input},
        frozenset(state.input for state in states if state.role is Role.PARAMETER),
        {state.output: state.owner for state in states},
        tuple(own for own in states if own.input in distinct and own.output != own.input),
    )


def layer_kinds(folded: Folded) -> frozenset[int]:
    """Return the kinds of blocks whose forward ops occur more than once in the chain: the layers of a model.

    A block before them is a layer, too, if it has attention, or a scan, and reads from the block before it what they
    read: the one dense layer of DeepSeek-V2 before its mixtures.

    The backward does not count: nothing passes a gradient on to what lies before the first trained parameter, so that
    the layer that has it is of a kind of its own.
    """
    return _layer_kinds(folded.pattern)


@lru_cache(maxsize=32)
def _layer_kinds(folded: Folded) -> frozenset[int]:
    values = folded.graph.values
    forms: dict[int, object] = {}
    for kind in folded.kinds:
        forms[kind.id] = kind.id  # a block without a forward is like none but its own kind
        forward = [op for op in kind.ops if op.phase is Phase.FORWARD]
        if forward:
            forms[kind.id] = tuple(
                (op.kind, op.attrs, tuple(values[name].shape if name else None for name in (*op.inputs, *op.outputs)))
                for op in forward
            )
    counts = Counter(forms[kind] for kind in folded.chain)
    found = {kind for kind, form in forms.items() if counts[form] > 1}
    first = next((index for index, kind in enumerate(folded.chain) if kind in found), 0)
    if first:
        read = _shapes_read(folded, folded.chain[first])
        found |= {
            kind
            for kind in folded.chain[1:first]
            if any(op.kind in ATTENTION_KINDS or op.kind in SCAN_KERNELS for op in folded.kinds[kind].ops)
            and not read.isdisjoint(_shapes_read(folded, kind))
        }
    return frozenset(found)


def _shapes_read(folded: Folded, kind: int) -> frozenset[tuple[int, ...]]:
    """Return the shapes of the float values that the forward of a kind reads from other blocks."""
    values = folded.graph.values
    return frozenset(
        values[name].shape
        for op in folded.kinds[kind].ops
        if op.phase is Phase.FORWARD
        for name in op.inputs
        if name in {arrival.value for arrival in folded.kinds[kind].arrivals} and values[name].is_float
    )


def dealt_lengths(folded: Folded) -> frozenset[int]:
    """Return the lengths of dims that may be dealt out in uneven blocks: those of vocabularies.

    They are the numbers of classes that the loss tells apart; without a loss, those of results that are also the number
    of rows of a table of parameters that is looked up.
    """
    return _dealt_lengths(folded.pattern)


_SCORES = {"autopar::CrossEntropyStats": 0, "autopar::HeadStats": 1}
"""Ops that score classes, and which of their inputs has these as its last dim: the scores, or the matrix that makes
them."""


def _axis(op: Op) -> int:
    axis = op.attr("axis")
    return axis if isinstance(axis, int) else 0


@lru_cache(maxsize=32)
def _dealt_lengths(folded: Folded) -> frozenset[int]:
    values, parameters = folded.graph.values, states_of(folded).parameters
    scored, looked_up = set(), set()
    for op in (op for kind in folded.kinds for op in kind.ops):
        if op.kind in _SCORES:
            scored.add(values[op.inputs[_SCORES[op.kind]]].shape[-1])
        elif op.kind == "Gather" and op.inputs[0] in parameters:
            looked_up.add(values[op.inputs[0]].shape[_axis(op)])
    if scored:
        return frozenset(scored)
    return frozenset(looked_up & {values[name].shape[-1] for name in folded.graph.outputs if values[name].shape})


def gradient_terms(folded: Folded) -> frozenset[Producer]:
    """Return the terms of parameter gradients: values whose only use is to be summed into a gradient."""
    return _gradient_terms(folded.pattern)


@lru_cache(maxsize=32)
def _gradient_terms(folded: Folded) -> frozenset[Producer]:
    sums = {state.output for state in folded.graph.states if state.role is Role.GRADIENT}
    used: dict[Producer, set[tuple[int, int]]] = {}
    for use in folded.uses:
        if use.producer.source is Source.OP:
            used.setdefault(use.producer, set()).add((use.consumer.kind, use.consumer.position))
    ops = {(kind.id, position): op for kind in folded.kinds for position, op in enumerate(kind.ops)}
    terms = {one for one in used if ops[one.kind, one.position].phase is Phase.BACKWARD}
    ends = {place for place, op in ops.items() if not sums.isdisjoint(op.outputs)}
    while True:  # greatest fixed point: sums may chain over blocks, so all are terms until a use shows otherwise
        adding = {(one.kind, one.position) for one in terms if ops[one.kind, one.position].kind == "Add"}
        left = {one for one in terms if used[one] <= ends | adding}
        if left == terms:
            return frozenset(terms)
        terms = left


def element_bytes(folded: Folded, policy: DtypePolicy) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the bytes per element of every value, in memory and on the wire.

    A parameter's gradient has its summation precision from the start, so that reducing it costs the same before and
    after the sum over microbatches. A gradient that also passes between blocks (of a parameter added to an activation
    of its shape) has the precision of activations, as in blocks without such a parameter.
    """
    return _element_bytes(folded.pattern, policy)


def row_routings(folded: Folded) -> Mapping[str, Routing]:
    """Return the values that are rows of experts, and which of these their tokens chose."""
    return _row_routings(folded.pattern)


@dataclass(frozen=True, slots=True)
class BesideProducts:
    """Values next to matrix products in one pass of a block: their collectives may run in chunks beside these.

    Attributes:
        read: Values that products read: a gather brings the next chunk while one is multiplied.
        made: Values that products make: a reduce-scatter sums a chunk while the next one is made.
    """

    read: frozenset[str]
    made: frozenset[str]

    @classmethod
    def of(cls, ops: Iterable[Op]) -> "BesideProducts":
        """Return the values next to the products among some ops."""
        products = [op for op in ops if op.kind in PRODUCT_KINDS]
        return cls(
            frozenset(name for op in products for name in op.inputs if name),
            frozenset(name for op in products for name in op.outputs if name),
        )

    def collectives(self, value: str) -> Set[Collective]:
        """Return the collectives of a value that may run in chunks."""
        found = {Collective.ALL_GATHER} if value in self.read else set()
        return found | {Collective.REDUCE_SCATTER} if value in self.made else found


def beside_products(folded: Folded) -> Mapping[tuple[int, bool], BesideProducts]:
    """Return the values next to products by kind of block, and by whether the pass is the backward."""
    return _beside_products(folded.pattern)


@lru_cache(maxsize=32)
def _beside_products(folded: Folded) -> dict[tuple[int, bool], BesideProducts]:
    return {
        (kind.id, is_backward): BesideProducts.of(
            op for op in kind.ops if op.phase is (Phase.BACKWARD if is_backward else Phase.FORWARD)
        )
        for kind in folded.kinds
        for is_backward in (False, True)
    }


@lru_cache(maxsize=32)
def _row_routings(folded: Folded) -> dict[str, Routing]:
    return routings(folded.graph.ops, folded.graph.values)


@lru_cache(maxsize=32)
def _element_bytes(folded: Folded, policy: DtypePolicy) -> tuple[dict[str, float], dict[str, float]]:
    graph = folded.graph
    resident, wire = policy.graph_element_bytes(graph), policy.graph_wire_bytes(graph)
    sums = {state.output: state.input for state in graph.states if state.role is Role.GRADIENT}
    for output, parameter in sums.items():
        summing = folded.producers.get(output)
        if summing is None:  # the parameter has no gradient
            continue
        for name in filter(None, summing.inputs):
            users = folded.readers[name]
            makers = [folded.producers[name]] if name in folded.producers else []
            if name != parameter and all(op.block == summing.block for op in (*users, *makers)):
                resident[name] = wire[name] = policy.gradient_wire
    return resident, wire


def read_bytes(folded: Folded, policy: DtypePolicy) -> Mapping[str, float]:
    """Return the bytes per element of every value as forward and backward read it."""
    return _read_bytes(folded.pattern, policy)


@lru_cache(maxsize=32)
def _read_bytes(folded: Folded, policy: DtypePolicy) -> dict[str, float]:
    resident, wire = element_bytes(folded, policy)
    states = [state for state in folded.graph.states if state.role is Role.PARAMETER]
    return {**resident, **{name: wire[name] for state in states for name in (state.input, state.output)}}


def moved_bytes(folded: Folded, policy: DtypePolicy) -> Mapping[str, float]:
    """Return the bytes per element of every value as kernels move it, gradients as they are stored."""
    return _moved_bytes(folded.pattern, policy)


@lru_cache(maxsize=32)
def _moved_bytes(folded: Folded, policy: DtypePolicy) -> dict[str, float]:
    return policy.graph_read_bytes(folded.graph)


@lru_cache(maxsize=32)
def fused_ops(folded: Folded, costs: CostModel) -> dict[str, Fused]:
    """Return the ops fused into another kernel, by name; the result must not be changed."""
    values = folded.graph.values
    names = {name for kind in folded.kinds for op in kind.ops for name in (*op.inputs, *op.outputs) if name}
    ranks = {name: len(values[name].shape) for name in names}
    return {name: fused for kind in folded.kinds for name, fused in costs.fuse(kind.ops, ranks).items()}


@lru_cache(maxsize=32)
def op_host_seconds(folded: Folded, costs: CostModel) -> Mapping[str, float]:
    """Return the host's launch seconds of each forward and backward op, by name."""
    values, fused, seconds = folded.graph.values, fused_ops(folded, costs), {}
    for op in (op for kind in folded.kinds for op in kind.ops if op.phase is not Phase.UPDATE):
        rank = next((len(values[name].shape) for name in op.inputs if name), 0)
        seconds[op.name] = costs.host_seconds(op, rank, fused.get(op.name, ALONE))
    return seconds


@lru_cache(maxsize=32)
def host_seconds(folded: Folded, costs: CostModel) -> FloatArray:
    """Return the host's launch seconds of a forward and a backward of one instance, (kinds, 2)."""
    each, seconds = op_host_seconds(folded, costs), np.zeros((len(folded.kinds), 2))
    for kind in folded.kinds:
        for op in kind.ops:
            seconds[kind.id, int(op.phase is Phase.BACKWARD)] += each.get(op.name, 0.0)
    return seconds


@lru_cache(maxsize=32)
def recompute_host_seconds(folded: Folded, costs: CostModel, selective: tuple[frozenset[int], ...]) -> FloatArray:
    """Return the host's launch seconds of the recomputed ops of each kind, (kinds,).

    Args:
        folded: The graph.
        costs: The cost model.
        selective: Positions of the recomputed forward ops, per kind.
    """
    each, seconds = op_host_seconds(folded, costs), np.zeros(len(folded.kinds))
    for kind, positions in zip(folded.kinds, selective, strict=True):
        seconds[kind.id] = sum(each[kind.ops[position].name] for position in positions)
    return seconds


def covering_ops(folded: Folded) -> frozenset[str]:
    """Return the names of backward ops whose outputs reach exactly one parameter gradient and nothing else.

    No other op of the block waits for them, so collectives can overlap with them.
    """
    return _covering_ops(folded.pattern)


@lru_cache(maxsize=32)
def _covering_ops(folded: Folded) -> frozenset[str]:
    sums = {state.output for state in folded.graph.states if state.role is Role.GRADIENT}
    readers = folded.readers
    found = []
    for kind in folded.kinds:
        reached: dict[str, frozenset[str]] = {}  # value -> gradients it reaches; several if it leaves the block
        for op in reversed(kind.ops):
            if op.phase is not Phase.BACKWARD:
                continue
            ends: frozenset[str] = frozenset()
            for name in filter(None, op.outputs):
                users = readers.get(name, [])
                if name in sums:
                    reached[name] = frozenset({name})
                elif any(user.block != op.block for user in users):
                    reached[name] = frozenset({name, ""})
                else:
                    uses = (reached.get(made, {made, ""}) for user in users for made in user.outputs if made)
                    reached[name] = frozenset().union(*uses)
                ends |= reached[name]
            if len(ends) == 1 and ends <= sums:
                found.append(op.name)
    return frozenset(found)


def global_shapes(graph: Graph, op: Op) -> tuple[list[NDArray[np.int64] | None], list[NDArray[np.int64] | None]]:
    """Return the global shapes of inputs and outputs as arrays of one strategy, (1, rank) each; None if absent."""

    def shapes(names: tuple[str, ...]) -> list[NDArray[np.int64] | None]:
        return [np.array([graph.values[name].shape], dtype=np.int64) if name else None for name in names]

    return shapes(op.inputs), shapes(op.outputs)

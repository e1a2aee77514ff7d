"""Manual parallelisation recipes as restrictions of the placement problem: the points of a grid search.

A recipe gives each mesh axis a role. A *data* axis splits every value along the batch, replicates parameters and sums
gradients; ZeRO-1 also splits the update, ZeRO-2 the gradient sums, ZeRO-3 the parameters between uses (Rajbhandari et
al., 2020, arXiv:1910.02054). A *tensor* axis (Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053) splits the weight
matrices of repeated blocks, or of all blocks if none repeats, and splits nothing along the batch; values between blocks
are replicated or, with sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198), split along the sequence. The
solver completes what a recipe leaves open, such as which matrix is split by rows and which by columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.discover.per_device import PER_DEVICE
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import layer_kinds
from autopar.formulate.tables import Decision, Node, Tables
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.problem import Problem, Recipe

Mask = NDArray[np.bool_]
BatchDims = Mapping[str, int]
"""The batch dim of every value that has one, by name."""

_MATRIX_RANK = 2  # tensor parallelism splits parameters of at least this rank


@dataclass(frozen=True, slots=True)
class DataParallelism:
    """Data parallelism at ZeRO level `zero`; None leaves the placement of parameters, gradients and updates free.

    If replicas are `apart` they meet once per step: with `zero` None, ZeRO-1 at most.
    """

    zero: int | None
    apart: bool = False

    def __str__(self) -> str:
        return "data" + (f"+zero-{self.zero}" if self.zero else "")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor parallelism of Megatron-LM with or without sequence parallelism; None allows either."""

    sequence: bool | None

    def __str__(self) -> str:
        return "megatron" + ("+sequence" if self.sequence else "")


Task = DataParallelism | Tensor

Placed = Sequence[tuple[str, NDArray[np.int64], bool]]
"""The tensors of a decision: (name, (S,) codes on one axis, whether it is an output).

Codes are 0 Replicate, 1 Partial, 2 + d Shard(d).
"""


@dataclass(frozen=True, slots=True, eq=False)
class GraphFacts:
    """Facts about a graph that recipes and roles depend on.

    Attributes:
        folded: The graph.
        batch: The batch dim of every value that has one.
        parameters: Names of parameters.
        gradients: Names of gradient sums.
        summands: Names of values without batch dim that backward ops produce, such as gradients before accumulation.
        layers: Kinds of blocks whose matrices tensor parallelism splits.
        sums: Names of values without batch dim that passes make of values with one; looked up for replicas that are
            apart only, whose sums stay terms until the step ends.
    """

    folded: Folded
    batch: BatchDims
    parameters: frozenset[str]
    gradients: frozenset[str]
    summands: frozenset[str]
    layers: frozenset[int]
    sums: frozenset[str] = frozenset()

    def with_sums(self) -> "GraphFacts":
        """Return the facts with `sums`."""
        sums: set[str] = set()
        for kind in self.folded.kinds:
            for op in kind.ops:
                if op.phase is not Phase.UPDATE and any(
                    name in sums or name in self.batch for name in op.inputs if name
                ):
                    sums.update(name for name in op.outputs if name and name not in self.batch)
        return replace(self, sums=frozenset(sums))

    @classmethod
    def of(cls, folded: Folded, dims: BatchDims) -> "GraphFacts":
        """Collect the facts about a graph with the given batch dims."""
        states = folded.graph.states
        parameters = frozenset(state.input for state in states if state.role is Role.PARAMETER)
        return cls(
            folded,
            dims,
            parameters,
            frozenset(name for s in states if s.role is Role.GRADIENT for name in (s.input, s.output)),
            frozenset(
                name
                for kind in folded.kinds
                for op in kind.ops
                if op.phase is Phase.BACKWARD
                for name in op.outputs
                if name not in dims
            ),
            _layers(folded, parameters),
        )


def _layers(folded: Folded, parameters: frozenset[str]) -> frozenset[int]:
    """Return the kinds of repeated blocks with matrices, or all kinds with matrices if none of them repeats."""
    matrices = {name for name in parameters if len(folded.graph.values[name].shape) >= _MATRIX_RANK}
    with_matrices = frozenset(
        kind.id for kind in folded.kinds if any(not matrices.isdisjoint(op.inputs) for op in kind.ops)
    )
    return with_matrices & layer_kinds(folded) or with_matrices


class _DifferingDims(Mapping[str, int]):
    """The first dim in which a value differs between two graphs, computed on lookup.

    Few values of a deep model are ever looked up.

    Args:
        small: The values of one graph.
        large: The values of the other graph.
    """

    def __init__(self, small: Mapping[str, Value], large: Mapping[str, Value]) -> None:
        self._small, self._large = small, large

    def __getitem__(self, name: str) -> int:
        pairs = enumerate(zip(self._small[name].shape, self._large[name].shape, strict=False))
        dim = next((dim for dim, (before, after) in pairs if before != after), None)
        if dim is None:
            raise KeyError(name)
        return dim

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._small if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


def batch_dims(small: Mapping[str, Value], large: Mapping[str, Value]) -> BatchDims:
    """Return the batch dim of every value that has one: the first dim that differs between two microbatch sizes."""
    return _DifferingDims(small, large)


def recipes(tables: Tables, dims: BatchDims) -> tuple[Recipe, ...]:
    """Return the recipes of a mesh: every axis is a data axis or a tensor axis, tensor axes being the minor ones."""
    num_axes = len(tables.mesh.axes)
    trains = any(op.phase is Phase.UPDATE for kind in tables.folded.kinds for op in kind.ops)
    data = (DataParallelism(0), DataParallelism(1)) if trains else (DataParallelism(0),)
    tasks: list[tuple[Task, ...]] = []
    for tensor_axes in range(num_axes + 1):
        for zero, sequence in product(data, (False, True) if tensor_axes else (False,)):
            if tensor_axes == num_axes and zero != data[0]:
                continue
            tasks.append((zero,) * (num_axes - tensor_axes) + (Tensor(sequence),) * tensor_axes)
    facts = GraphFacts.of(tables.folded, dims)
    places = {place for axes in tasks for place in enumerate(axes)}
    allowed: list[list[tuple[int, ...]]] = [[] for _ in tasks]
    for node in tables.nodes:
        op = tables.folded.kinds[node.kind].ops[node.position] if node.options is not None else None
        by_place = {
            (axis, task): matching_strategies(facts, task, node.decision, node.kind, op, placed_on(tables, node, axis))
            for axis, task in places
        }
        for axes, strategies in zip(tasks, allowed, strict=True):
            mask = np.ones(node.count, dtype=bool)
            for place in enumerate(axes):
                if (mask & by_place[place]).any():  # a node without a matching strategy stays free on this axis
                    mask &= by_place[place]
            strategies.append(tuple(np.flatnonzero(mask).tolist()))
    return tuple(
        Recipe(" × ".join(map(str, axes)), tuple(strategies)) for axes, strategies in zip(tasks, allowed, strict=True)
    )


def _axis_codes(numbers: NDArray[np.int64], rank: int, axis: int, num_axes: int) -> NDArray[np.int64]:
    """Return the codes on one axis of placement numbers."""
    digits: NDArray[np.int64] = numbers // (rank + 2) ** (num_axes - 1 - axis) % (rank + 2)
    return digits


def placed_on(tables: Tables, node: Node, axis: int) -> Placed:
    """Return the tensors that a node places, with their codes on one axis of the mesh."""
    num_axes = len(tables.mesh.axes)
    if node.options is None:
        assert node.value is not None, node.name
        assert node.placements is not None, node.name
        return [(node.value.name, _axis_codes(node.placements, len(node.value.shape), axis, num_axes), True)]
    op = tables.folded.kinds[node.kind].ops[node.position]
    values = tables.folded.graph.values
    placed = []
    for names, arrays, is_output in ((op.inputs, node.options.inputs, False), (op.outputs, node.options.outputs, True)):
        for name, numbers in zip(names, arrays, strict=True):
            if numbers is not None:
                placed.append((name, _axis_codes(numbers, len(values[name].shape), axis, num_axes), is_output))
    return placed


def matching_strategies(
    facts: GraphFacts, task: Task, decision: Decision, kind: int, op: Op | None, placed: Placed
) -> Mask:
    """Return a mask (S,) of the strategies of a decision that follow the role of an axis."""
    match task:
        case Tensor():
            return _follows_tensor(facts, task, decision, kind, op, placed)
        case DataParallelism():
            return _follows_data(facts, task, decision, op, placed)


def _follows_data(facts: GraphFacts, task: DataParallelism, decision: Decision, op: Op | None, placed: Placed) -> Mask:
    """Return the strategies that follow data parallelism."""
    dims, parameters = facts.batch, facts.parameters
    mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
    is_gradient_sum = op is not None and any(name in facts.gradients for name in op.outputs)
    if task.zero is None and op is not None and op.phase is Phase.UPDATE:
        return mask
    if task.zero is None and not task.apart and (decision is Decision.PARAMETER or is_gradient_sum):
        return mask
    if decision is Decision.PARAMETER:
        codes = placed[0][1]
        return np.asarray(codes >= 2 if task.zero == 3 else codes == 0)
    if op is not None and op.phase is Phase.UPDATE:
        for _, digits, _ in placed:
            mask &= digits >= 2 if task.zero else digits == 0
        return mask
    if is_gradient_sum:
        for _, digits, _ in placed:  # the sum over microbatches
            mask &= digits >= 2 if task.zero and task.zero >= 2 else digits == 1 if task.apart else digits <= 1
        return mask
    for name, digits, is_output in placed:
        if name in dims:
            mask &= digits == 2 + dims[name]
        elif name in facts.gradients or name in facts.sums:
            mask &= digits == 1
        elif is_output or name in facts.summands or (op is not None and op.attr(PER_DEVICE) and name not in parameters):
            mask &= digits <= 1  # statistics of a device's own samples are terms of a mean
        else:
            mask &= digits == 0
    return mask


def _follows_tensor(
    facts: GraphFacts, task: Tensor, decision: Decision, kind: int, op: Op | None, placed: Placed
) -> Mask:
    """Return the strategies that follow tensor parallelism."""
    dims = facts.batch
    values = facts.folded.graph.values
    mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
    if decision is Decision.BOUNDARY:
        name, digits, _ = placed[0]
        if name in facts.summands:
            return mask
        sequence = 2 + dims.get(name, 0) + 1
        if task.sequence is None:
            return np.asarray((digits == 0) | (digits == sequence))
        if task.sequence and sequence < 2 + len(values[name].shape):
            return np.asarray(digits == sequence)
        return np.asarray(digits == 0)
    for name, digits, is_output in placed:
        if name in dims:
            mask &= digits != 2 + dims[name]
        elif (
            op is not None
            and op.phase is Phase.FORWARD
            and not is_output
            and kind in facts.layers
            and name in facts.parameters
            and len(values[name].shape) >= _MATRIX_RANK
        ):
            mask &= digits >= 2
    return mask


def restrict(problem: Problem, recipe: Recipe) -> Problem:
    """Return the problem with every strategy forbidden that the recipe does not allow."""
    costs = []
    for cost, allowed in zip(problem.node_costs, recipe.allowed, strict=True):
        forbidden = np.full_like(cost, np.inf)
        forbidden[list(allowed)] = cost[list(allowed)]
        costs.append(forbidden)
    return replace(problem, node_costs=tuple(costs), kinship=None)

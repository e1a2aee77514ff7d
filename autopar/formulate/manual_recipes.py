"""What people do by hand, as restrictions of the placement problem: the points of a grid search.

A recipe gives each mesh axis a task. On a *data* axis every value is split along the batch, parameters are copied and
gradients summed; with ZeRO-1 the update is split, with ZeRO-2 the sums of gradients too, with ZeRO-3 the parameters
between their uses as well. On a *tensor* axis (Megatron-LM) the matrices of repeated blocks, or of all blocks if none
repeats, are split where they are used, values between blocks are copied or, with sequence parallelism, split along the
sequence, and nothing is split along the batch. What a recipe leaves open (which matrix by rows, which by columns) is
for the solver to complete.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.discover.per_device import PER_DEVICE
from autopar.folding.fold import Folded
from autopar.formulate.tables import Decision, Node, Tables
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.problem import Problem, Recipe

Mask = NDArray[np.bool_]
BatchDims = Mapping[str, int]
"""The batch dim of every value that has one."""

_MATRIX_RANK = 2  # of parameters: what tensor parallelism splits


@dataclass(frozen=True, slots=True)
class Data:
    """Data parallelism; `zero` 0 to 3, or None if what is kept between steps is free."""

    zero: int | None

    def __str__(self) -> str:
        return "data" + (f"+zero-{self.zero}" if self.zero else "")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Megatron's tensor parallelism, with or without sequence parallelism, or either if None."""

    sequence: bool | None

    def __str__(self) -> str:
        return "megatron" + ("+sequence" if self.sequence else "")


Task = Data | Tensor

Placed = Sequence[tuple[str, NDArray[np.int64], bool]]
"""Of every tensor of a decision: (name, (S,) code on one axis, is output); 0 Replicate, 1 Partial, 2 + d Shard(d)."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphFacts:
    """What recipes and roles need to know of a graph, gathered once.

    Attributes:
        folded: The graph.
        batch: The batch dim of every value that has one.
        parameters: Names of parameters.
        gradients: Names of sums of gradients.
        summands: What a backward pass makes of parameters: gradients on their way to the sum.
        layers: Kinds of blocks whose matrices tensor parallelism splits.
    """

    folded: Folded
    batch: BatchDims
    parameters: frozenset[str]
    gradients: frozenset[str]
    summands: frozenset[str]
    layers: frozenset[int]

    @classmethod
    def of(cls, folded: Folded, dims: BatchDims) -> "GraphFacts":
        """Gather what a graph with these batch dims tells."""
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
    """Return the kinds of blocks with matrices that repeat, or all with matrices if none of them does."""
    matrices = {name for name in parameters if len(folded.graph.values[name].shape) >= _MATRIX_RANK}
    able = [
        (number, kind.count)
        for number, kind in enumerate(folded.kinds)
        if any(not matrices.isdisjoint(op.inputs) for op in kind.ops)
    ]
    return frozenset(number for number, count in able if count > 1) or frozenset(number for number, _ in able)


class _Differing(Mapping[str, int]):
    """The first dim in which values of two graphs differ; looked up when asked for, as most of a deep model never is.

    Args:
        small: The values of one graph.
        large: Those of the other.
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
    """Return the first dim in which two microbatch sizes differ, of every value that has one."""
    return _Differing(small, large)


def recipes(tables: Tables, dims: BatchDims) -> tuple[Recipe, ...]:
    """Return the recipes of a mesh: every axis is a data axis or a tensor axis, the minor axis tensor first."""
    num_axes = len(tables.mesh.axes)
    trains = any(op.phase is Phase.UPDATE for kind in tables.folded.kinds for op in kind.ops)
    data = (Data(0), Data(1)) if trains else (Data(0),)
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
                if (mask & by_place[place]).any():  # a node that cannot follow stays free on this axis
                    mask &= by_place[place]
            strategies.append(tuple(np.flatnonzero(mask).tolist()))
    return tuple(
        Recipe(" × ".join(map(str, axes)), tuple(strategies)) for axes, strategies in zip(tasks, allowed, strict=True)
    )


def _digits(numbers: NDArray[np.int64], rank: int, axis: int, num_axes: int) -> NDArray[np.int64]:
    """Return the code of one axis of placement numbers."""
    digits: NDArray[np.int64] = numbers // (rank + 2) ** (num_axes - 1 - axis) % (rank + 2)
    return digits


def placed_on(tables: Tables, node: Node, axis: int) -> Placed:
    """Return what a node places, with codes on one axis of the mesh."""
    num_axes = len(tables.mesh.axes)
    if node.options is None:
        assert node.value is not None, node.name
        assert node.placements is not None, node.name
        return [(node.value.name, _digits(node.placements, len(node.value.shape), axis, num_axes), True)]
    op = tables.folded.kinds[node.kind].ops[node.position]
    values = tables.folded.graph.values
    placed = []
    for names, arrays, is_output in ((op.inputs, node.options.inputs, False), (op.outputs, node.options.outputs, True)):
        for name, numbers in zip(names, arrays, strict=True):
            if numbers is not None:
                placed.append((name, _digits(numbers, len(values[name].shape), axis, num_axes), is_output))
    return placed


def matching_strategies(
    facts: GraphFacts, task: Task, decision: Decision, kind: int, op: Op | None, placed: Placed
) -> Mask:
    """Return the (S,) strategies of a decision that do what a task asks of its axis."""
    match task:
        case Tensor():
            return _tensor(facts, task, decision, kind, op, placed)
        case Data():
            return _data(facts, task, decision, op, placed)


def _data(facts: GraphFacts, task: Data, decision: Decision, op: Op | None, placed: Placed) -> Mask:
    dims, parameters = facts.batch, facts.parameters
    mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
    sums = op is not None and any(name in facts.gradients for name in op.outputs)
    if task.zero is None and (decision is Decision.PARAMETER or sums or (op and op.phase is Phase.UPDATE)):
        return mask
    if decision is Decision.PARAMETER:
        codes = placed[0][1]
        return np.asarray(codes >= 2 if task.zero == 3 else codes == 0)
    if op is not None and op.phase is Phase.UPDATE:
        for _, digits, _ in placed:
            mask &= digits >= 2 if task.zero else digits == 0
        return mask
    if sums:
        for _, digits, _ in placed:  # the sum over microbatches
            mask &= digits >= 2 if task.zero and task.zero >= 2 else digits <= 1
        return mask
    for name, digits, is_output in placed:
        if name in dims:
            mask &= digits == 2 + dims[name]
        elif name in facts.gradients:
            mask &= digits == 1
        elif is_output or name in facts.summands or (op is not None and op.attr(PER_DEVICE) and name not in parameters):
            mask &= digits <= 1  # statistics that each device takes from its own samples are terms of a mean
        else:
            mask &= digits == 0
    return mask


def _tensor(facts: GraphFacts, task: Tensor, decision: Decision, kind: int, op: Op | None, placed: Placed) -> Mask:
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
    """Return the problem in which everything a recipe does not allow is forbidden."""
    costs = []
    for cost, allowed in zip(problem.node_costs, recipe.allowed, strict=True):
        forbidden = np.full_like(cost, np.inf)
        forbidden[list(allowed)] = cost[list(allowed)]
        costs.append(forbidden)
    return replace(problem, node_costs=tuple(costs), kinship=None)

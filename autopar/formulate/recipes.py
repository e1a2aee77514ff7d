"""What people do by hand, as restrictions of the placement problem: the points of a grid search, plans by degrees.

A recipe gives each mesh axis a task. On a *data* axis every value is split along the batch, parameters are copied and
gradients summed; with ZeRO-1 the update is split, with ZeRO-2 the sums of gradients too, with ZeRO-3 the parameters
between their uses as well. A *context* axis does the same with the positions of a sequence in place of the batch. On an
*expert* axis the experts of a mixture (parameters of rank 3) are dealt out and everything else is data parallel. On a
*tensor* axis (Megatron-LM) the parameters of repeated blocks are split where they are used, values between blocks are
copied or, with sequence parallelism, split along the sequence, and nothing is split along the batch. What a recipe
leaves open (which matrix by rows, which by columns) is for the solver to complete. `Megatron` leaves less open than
`Tensor`: matrices stay split wherever they are stored, read and updated, those of the vocabulary along the vocabulary,
and nothing is split along the sequence unless it is asked for.

A recipe can be applied to finished tables, as masks over the strategies of the nodes (`recipes`), or while tables are
built (`Following`): what an axis may not do is then never combined with what the other axes do, so that tables of three
axes stay small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.cost.products import PRODUCT_KINDS
from autopar.discover import Rules, Strategy
from autopar.formulate.fold import Folded, boundary_groups
from autopar.formulate.options import encode
from autopar.formulate.tables import Decision, Node, Tables
from autopar.ir.graph import Op, Phase, Role, Value
from autopar.problem import Problem, Recipe
from autopar.sharding import Shard

Mask = NDArray[np.bool_]
BatchDims = Mapping[str, int]
"""The batch dim of every value that has one."""

_MATRIX_RANK, _EXPERT_RANK = 2, 3  # of parameters: what tensor parallelism splits, what expert parallelism deals out
_SEQUENCE_RANK = 3  # of what passes between the blocks of a model of sequences: batch, positions, width
_ROUTER = 512  # a matrix with a dim up to this size is a router of experts, which Megatron-LM copies


@dataclass(frozen=True, slots=True)
class Data:
    """Data parallelism; `zero` 0 to 3."""

    zero: int

    def __str__(self) -> str:
        return "data" + (f"+zero-{self.zero}" if self.zero else "")


@dataclass(frozen=True, slots=True)
class Context:
    """Context parallelism: the positions of a sequence are split; `zero` as of `Data`."""

    zero: int

    def __str__(self) -> str:
        return "context" + (f"+zero-{self.zero}" if self.zero else "")


@dataclass(frozen=True, slots=True)
class Expert:
    """Expert parallelism: experts are dealt out, all else is data parallel; `zero` as of `Data`."""

    zero: int

    def __str__(self) -> str:
        return "expert" + (f"+zero-{self.zero}" if self.zero else "")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Megatron's tensor parallelism, with or without sequence parallelism."""

    sequence: bool

    def __str__(self) -> str:
        return "megatron" + ("+sequence" if self.sequence else "")


@dataclass(frozen=True, slots=True)
class Megatron:
    """Tensor parallelism as Megatron-LM does it, to the letter."""

    sequence: bool

    def __str__(self) -> str:
        return "megatron to the letter" + ("+sequence" if self.sequence else "")


Task = Data | Context | Expert | Tensor | Megatron

Placed = Sequence[tuple[str, NDArray[np.int64], bool]]
"""Of every tensor of a decision: (name, (S,) code on one axis, is output); 0 Replicate, 1 Partial, 2 + d Shard(d)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """What the recipes need to know of a graph, gathered once."""

    folded: Folded
    batch: BatchDims
    parameters: frozenset[str]
    gradients: frozenset[str]
    experts: frozenset[str]  # parameters of rank 3, their gradients, moments and new contents
    summands: frozenset[str]  # what a backward pass makes of parameters: gradients on their way to the sum
    positions: Mapping[str, int]  # the dim of the positions in a sequence, of values that have one
    widths: Mapping[str, int]  # the dim of the model's width, of values that have one
    codes: Mapping[str, tuple[int, ...]]  # what a tensor axis may do to matrices and to what the update makes of them

    @classmethod
    def of(cls, folded: Folded, dims: BatchDims, rules: Rules | None = None) -> "_Facts":
        states = folded.graph.states
        parameters = frozenset(state.input for state in states if state.role is Role.PARAMETER)
        values = folded.graph.values
        experts = {name for name in parameters if len(values[name].shape) == _EXPERT_RANK}
        return cls(
            folded,
            dims,
            parameters,
            frozenset(name for s in states if s.role is Role.GRADIENT for name in (s.input, s.output)),
            frozenset(name for s in states if s.owner in experts for name in (s.input, s.output)) | experts,
            frozenset(
                name
                for kind in folded.kinds
                for op in kind.ops
                if op.phase is Phase.BACKWARD
                for name in op.outputs
                if name not in dims
            ),
            {} if rules is None else _following(folded, rules, dims, 1),
            {} if rules is None else _following(folded, rules, dims, 2),
            _codes(folded),
        )


def _following(folded: Folded, rules: Rules, dims: BatchDims, offset: int) -> dict[str, int]:
    """Return the dim that holds what lies `offset` dims behind the batch between blocks, of values that have one.

    Between blocks of a model of sequences the batch is followed by the positions and those by the width. Inside, an op
    that can be split along such a dim in one tensor is split along it in others too, which is what its strategies say.
    """
    values = folded.graph.values
    found: dict[str, int] = {}

    def mark(name: str, dim: int) -> None:
        if name in dims and dim != dims[name]:
            found.setdefault(name, dim)

    for producers, arrivals in boundary_groups(folded):
        made = [folded.kinds[p.kind].ops[p.position].outputs[p.slot] for p in producers]
        for name in (*made, *(arrival.value for _, arrival in arrivals)):
            if len(values[name].shape) == _SEQUENCE_RANK and name in dims:
                mark(name, dims[name] + offset)
    ops = [op for kind in folded.kinds for op in kind.ops if op.phase is not Phase.UPDATE]
    for sweep in (ops, ops[::-1], ops):
        for op in sweep:
            names = (*op.inputs, *op.outputs)
            if not any(name in found for name in names):
                continue
            for strategy in rules.of(op).strategies:
                sharded = [
                    (name, placement.dim)
                    for name, placement in zip(names, (*strategy.inputs, *strategy.outputs), strict=True)
                    if isinstance(placement, Shard)
                ]
                if any(found.get(name) == dim for name, dim in sharded):
                    for name, dim in sharded:
                        mark(name, dim)
    return found


def _codes(folded: Folded) -> dict[str, tuple[int, ...]]:
    """Return the codes that matrices, their gradients, moments and new contents may have on a tensor axis."""
    graph = folded.graph
    ops = [op for kind in folded.kinds for op in kind.ops]
    classes = {graph.values[op.inputs[0]].shape[-1] for op in ops if op.kind == "autopar::CrossEntropyStats"}
    repeated = {p.value.name for p in folded.parameters if folded.kinds[p.producer.kind].count > 1}
    found: dict[str, tuple[int, ...]] = {}
    for parameter in folded.parameters:
        name, shape = parameter.value.name, parameter.value.shape
        if len(shape) < _MATRIX_RANK:
            continue
        if name not in repeated:
            found[name] = tuple(2 + dim for dim, size in enumerate(shape) if size in classes)[:1] or (0, 1)
        elif min(shape) > _ROUTER:
            found[name] = tuple(range(2 + (len(shape) >= _EXPERT_RANK), 2 + len(shape)))
    owned = [(s.owner, name) for s in graph.states for name in (s.input, s.output) if s.owner in found]
    return found | {name: found[owner] for owner, name in owned}


def batch_dims(small: Mapping[str, Value], large: Mapping[str, Value]) -> dict[str, int]:
    """Return the first dim in which two microbatch sizes differ, for every value that has one."""
    found = {}
    for name, value in small.items():
        other = large.get(name)
        if other is None:
            continue
        for dim, (before, after) in enumerate(zip(value.shape, other.shape, strict=False)):
            if before != after:
                found[name] = dim
                break
    return found


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
    facts = _Facts.of(tables.folded, dims)
    places = {place for axes in tasks for place in enumerate(axes)}
    allowed: list[list[tuple[int, ...]]] = [[] for _ in tasks]
    for node in tables.nodes:
        op = tables.folded.kinds[node.kind].ops[node.position] if node.options is not None else None
        wanted = {
            (axis, task): _wanted(facts, task, node.decision, node.kind, op, _tensors(tables, node, axis))
            for axis, task in places
        }
        for axes, strategies in zip(tasks, allowed, strict=True):
            mask = np.ones(node.count, dtype=bool)
            for place in enumerate(axes):
                if (mask & wanted[place]).any():  # a node that cannot follow stays free on this axis
                    mask &= wanted[place]
            strategies.append(tuple(np.flatnonzero(mask).tolist()))
    return tuple(
        Recipe(" × ".join(map(str, axes)), tuple(strategies)) for axes, strategies in zip(tasks, allowed, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """Tables that follow one recipe: what each axis may do, asked for while tables are built.

    Attributes:
        folded: The graph.
        rules: What its ops can do.
        dims: The batch dim of every value that has one.
        tasks: What each mesh axis does, major first.
    """

    folded: Folded
    rules: Rules
    dims: BatchDims
    tasks: tuple[Task, ...]
    _facts: _Facts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_facts", _Facts.of(self.folded, self.dims, self.rules))

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> tuple[Mask, ...]:
        """Return by axis which of an op's strategies on one axis it may take."""
        placed: list[tuple[str, NDArray[np.int64], bool]] = []
        for slot, name in enumerate((*op.inputs, *op.outputs)):
            if name and name not in self.folded.free:
                rows = [(*strategy.inputs, *strategy.outputs)[slot] for strategy in strategies]
                codes = np.array([encode(placement) for placement in rows], dtype=np.int64)
                placed.append((name, codes, slot >= len(op.inputs)))
        return tuple(_wanted(self._facts, task, Decision.OP, kind, op, placed) for task in self.tasks)

    def of_value(self, decision: Decision, kind: int, value: Value) -> tuple[Mask, ...]:
        """Return by axis which codes (Replicate, Partial, Shard(0), ...) a value may have."""
        placed = [(value.name, np.arange(len(value.shape) + 2, dtype=np.int64), True)]
        return tuple(_wanted(self._facts, task, decision, kind, None, placed) for task in self.tasks)


def _digits(numbers: NDArray[np.int64], rank: int, axis: int, num_axes: int) -> NDArray[np.int64]:
    """Return the code of one axis of placement numbers."""
    digits: NDArray[np.int64] = numbers // (rank + 2) ** (num_axes - 1 - axis) % (rank + 2)
    return digits


def _tensors(tables: Tables, node: Node, axis: int) -> Placed:
    """Return what a node places, with codes on one axis."""
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


def _wanted(facts: _Facts, task: Task, decision: Decision, kind: int, op: Op | None, placed: Placed) -> Mask:
    """Return the (S,) strategies of a decision that do what a task asks of its axis."""
    match task:
        case Megatron():
            return _megatron(facts, task, decision, op, placed)
        case Tensor():
            return _tensor(facts, task, decision, kind, op, placed)
        case Expert() if any(name in facts.experts for name, _, _ in placed):
            return _expert(facts, op, placed)
        case _:
            return _data(facts, task, decision, op, placed)


def _data(facts: _Facts, task: Data | Context | Expert, decision: Decision, op: Op | None, placed: Placed) -> Mask:
    dims = facts.batch
    mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
    if decision is Decision.PARAMETER:
        codes = placed[0][1]
        return np.asarray(codes >= 2 if task.zero >= 3 else codes == 0)
    if op is not None and op.phase is Phase.UPDATE:
        for _, digits, _ in placed:
            mask &= digits >= 2 if task.zero else digits == 0
        return mask
    if op is not None and any(name in facts.gradients for name in op.outputs):
        for _, digits, _ in placed:  # the sum over microbatches
            mask &= digits >= 2 if task.zero >= 2 else digits <= 1
        return mask
    for name, digits, is_output in placed:
        if name in dims:
            mask &= _split(facts, task, decision, name, digits)
        elif name in facts.gradients:
            mask &= digits == 1
        elif is_output or name in facts.summands:
            mask &= digits <= 1
        else:
            mask &= digits == 0
    return mask


def _split(
    facts: _Facts, task: Data | Context | Expert, decision: Decision, name: str, digits: NDArray[np.int64]
) -> Mask:
    """Return how a value with a batch dim is split.

    Which dim holds the positions of a sequence is clear between blocks only, where it follows the batch; inside the
    solver finds it, as nothing else may be split. In front of the experts of a mixture comes the change from the batch
    to the experts, which lie in the first dim.
    """
    batch = 2 + facts.batch[name]
    match task:
        case Context():
            if decision is Decision.BOUNDARY and name in facts.positions:
                return np.asarray(digits == 2 + facts.positions[name])
            return np.asarray(digits != batch)
        case Expert() if batch > 2:
            return np.asarray((digits == batch) | (digits == 2))
        case _:
            return np.asarray(digits == batch)


def _expert(facts: _Facts, op: Op | None, placed: Placed) -> Mask:
    """Return the strategies in which each device has its own experts, and no gradient is left to be summed."""
    mask = np.ones(len(placed[0][1]), dtype=bool)
    for name, digits, _ in placed:
        if name in facts.experts or name in facts.batch or (op is not None and op.phase is Phase.UPDATE):
            mask &= digits == 2
    return mask


def _tensor(facts: _Facts, task: Tensor, decision: Decision, kind: int, op: Op | None, placed: Placed) -> Mask:
    dims = facts.batch
    values = facts.folded.graph.values
    mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
    if decision is Decision.BOUNDARY:
        name, digits, _ = placed[0]
        sequence = 2 + dims.get(name, 0) + 1
        if task.sequence and sequence < 2 + len(values[name].shape):
            return np.asarray(digits == sequence)
        return np.asarray(digits == 0)
    repeated = facts.folded.kinds[kind].count > 1
    for name, digits, is_output in placed:
        if name in dims:
            mask &= digits != 2 + dims[name]
        elif (
            op is not None
            and op.phase is Phase.FORWARD
            and not is_output
            and repeated
            and name in facts.parameters
            and len(values[name].shape) >= _MATRIX_RANK
        ):
            mask &= digits >= 2
    return mask


def _megatron(facts: _Facts, task: Megatron, decision: Decision, op: Op | None, placed: Placed) -> Mask:
    """Return the strategies of Megatron-LM's tensor parallelism.

    With sequence parallelism products see all tokens, and what lies between them, of the model's width, a part each.
    """
    mask = np.ones(len(placed[0][1]) if placed else 1, dtype=bool)
    is_product = op is not None and op.kind in PRODUCT_KINDS
    for name, digits, _ in placed:
        position = facts.positions.get(name)
        if name in facts.codes:
            mask &= np.isin(digits, facts.codes[name])
        elif decision is Decision.BOUNDARY:
            mask &= digits == (2 + position if task.sequence and position is not None else 0)
        elif name in facts.batch:
            mask &= digits != 2 + facts.batch[name]
            if position is not None and not task.sequence:
                mask &= digits != 2 + position
            if name in facts.widths:
                mask &= digits != 2 + facts.widths[name]
            if task.sequence and position is not None:
                if is_product:
                    mask &= digits != 2 + position
                elif op is not None and name in facts.widths:
                    mask &= (digits == 2 + position) | (digits == 1)
    return mask


def restrict(problem: Problem, recipe: Recipe) -> Problem:
    """Return the problem in which everything a recipe does not allow is forbidden."""
    costs = []
    for cost, allowed in zip(problem.node_costs, recipe.allowed, strict=True):
        forbidden = np.full_like(cost, np.inf)
        forbidden[list(allowed)] = cost[list(allowed)]
        costs.append(forbidden)
    return replace(problem, node_costs=tuple(costs))

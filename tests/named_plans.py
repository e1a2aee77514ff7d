"""Plans of a kind that has a name (ZeRO-3, Megatron, sequence parallelism ...), and the check that a plan is of it.

A *task* says how tensors lie on one mesh axis if the plan is of its kind. Each placement it does not want costs 1; the
plan with the lowest cost is taken, and random prices below 1 decide what the task leaves open. Whether the result is of
the kind is then read from the plan, not from the problem.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np

from autopar import solvers
from autopar.configuration import Configuration
from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.formulate.building import build_tables
from autopar.formulate.manual_recipes import batch_dims
from autopar.formulate.step_time import Split, StepTime
from autopar.formulate.tables import Decision, Node, Tables
from autopar.ir.graph import Graph, Op, Phase, Role
from autopar.plan import Plan
from autopar.problem import Problem
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.sharding import Partial, Placement, Replicate, Shard, parse_placements
from tests.executions import COSTS, model_graph, written


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor at a place of a plan, as a task looks at it.

    Attributes:
        name: Its name in the representative block.
        op: The op that reads or defines it; None for one that rests between steps or is between blocks.
        output: Whether the op defines it.
        role: Its role if it is persistent: PARAMETER, GRADIENT or MOMENT, before or after the step.
        batch: Its batch dim; None if it has none.
        shape: Its whole shape.
    """

    name: str
    op: Op | None
    output: bool
    role: Role | None
    batch: int | None
    shape: tuple[int, ...]


_CHUNKS = (1, 2, 3)
"""Chunks in which matrices that are one product with several (q, k and v; up and gate) are split."""


class Task(Protocol):
    """What one mesh axis is for."""

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return the placements a tensor may have on the axis; () if the task does not care."""

    def insists(self, tensor: Tensor) -> bool:
        """Whether a plan is only of this kind if that is so."""


@dataclass(frozen=True, slots=True)
class Data:
    """Data parallelism: batches are split, parameters are copied.

    With `zero` 1 the update and its moments are split, with 2 the sums of gradients too, with 3 parameters rest split
    and are gathered before use.
    """

    zero: int = 0

    def __str__(self) -> str:
        return f"zero{self.zero}" if self.zero else "data"

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return the batch dim for activations; for persistent tensors what the kind of ZeRO says."""
        split = tuple(Shard(dim, chunks) for dim in range(len(tensor.shape)) for chunks in _CHUNKS)
        if tensor.batch is not None:
            return (Shard(tensor.batch),)
        match tensor.role:
            case Role.PARAMETER if tensor.op is None:
                return split if self.zero == 3 else (Replicate(),)
            case Role.PARAMETER if tensor.op is not None and tensor.op.phase is not Phase.UPDATE:
                return (Replicate(),)
            case Role.GRADIENT if tensor.op is not None and tensor.op.phase is Phase.BACKWARD:
                return split if self.zero >= 2 else (Partial(), Replicate())
            case Role.PARAMETER | Role.GRADIENT | Role.MOMENT:
                return split if self.zero else (Replicate(),)
            case _:
                return ()

    def insists(self, tensor: Tensor) -> bool:
        """Insist on all persistent tensors (tied ones are read by ops that have their own ways) and on activations."""
        if tensor.role is not None:
            return prod(tensor.shape) > 1
        return tensor.batch is not None and tensor.op is not None and tensor.op.phase is Phase.FORWARD


@dataclass(frozen=True, slots=True)
class Megatron:
    """Tensor parallelism of Megatron-LM, and of its sequence-parallel form: matrices by columns, then by rows."""

    sequence: bool = False

    def __str__(self) -> str:
        return "sequence" if self.sequence else "tensor"

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return columns or rows for the matrices of layers, and what the form says for values between blocks."""
        if tensor.role is Role.PARAMETER and (tensor.op is None or tensor.op.phase is Phase.FORWARD):
            if re.search(r"\.(q|k|v|up|gate)\.weight$", tensor.name):
                return (Shard(1),)
            if re.search(r"\.(out|down)\.weight$", tensor.name):
                return (Shard(0),)
        if tensor.batch is None or len(tensor.shape) < 3:
            return ()
        if tensor.op is None or (tensor.op.kind in ("LayerNormalization", "RMSNormalization") and tensor.output):
            return (Shard(1),) if self.sequence else (Replicate(),)
        return ()

    def insists(self, tensor: Tensor) -> bool:
        """Insist on the matrices and on what passes between blocks."""
        return bool(self.wants(tensor)) and (tensor.op is None or tensor.role is Role.PARAMETER)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Megatron-LM's vocabulary parallelism: every device has some rows of the table of embeddings and some logits.

    Embeddings are sums of what the devices find in their rows; the loss is computed on logits that stay split.
    """

    def __str__(self) -> str:
        return "vocabulary"

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return the rows of the table, the terms of what is taken from it, and the classes of logits."""
        taken = tensor.op is not None and tensor.op.kind == "Gather" and tensor.op.phase is Phase.FORWARD
        if re.search(r"embed(\.tokens)?\.weight$", tensor.name) and tensor.role is Role.PARAMETER:
            return (Shard(0),) if taken or tensor.op is None else ()
        if taken and tensor.output and re.search(r"^embed(\.tokens)?$", tensor.name):
            return (Partial(),)
        if tensor.op is None or len(tensor.shape) != 3 or tensor.shape[2] == 1:
            return ()
        is_loss = tensor.op.kind.startswith("autopar::CrossEntropy")
        return (Shard(2),) if is_loss or (tensor.name == "logits" and tensor.output) else ()

    def insists(self, tensor: Tensor) -> bool:
        """Insist on all of it."""
        return bool(self.wants(tensor))


@dataclass(frozen=True, slots=True)
class Expert:
    """The matrices of the experts split over the experts, and with them the rows dispatched to them."""

    def __str__(self) -> str:
        return "expert"

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return the dim of experts for what has one."""
        if re.search(r"\.moe\.(up|gate|down)\.weight$|\.mlp\.experts\.", tensor.name):
            return (Shard(0),)
        rows = r"\.moe\.(gate|swish|up|gated|down|dispatch(\.rows)?)$"
        if re.search(rows, tensor.name) and tensor.op is not None and tensor.op.kind != "GatherND":
            return (Shard(0),)
        return ()

    def insists(self, tensor: Tensor) -> bool:
        """Insist on how the matrices rest and on the forward."""
        return bool(self.wants(tensor)) and (tensor.op is None or tensor.op.phase is Phase.FORWARD)


@dataclass(frozen=True, slots=True)
class Free:
    """No kind at all: the axis is used at random."""

    def __str__(self) -> str:
        return "random"

    def wants(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Return nothing."""
        return ()

    def insists(self, tensor: Tensor) -> bool:
        """Insist on nothing."""
        return False


@dataclass(frozen=True, slots=True)
class _Facts:
    """What tells a tensor's role and batch dim from its name."""

    graph: Graph
    roles: Mapping[str, Role]
    batch: Mapping[str, int]

    def tensor(self, name: str, op: Op | None, *, output: bool) -> Tensor:
        shape = self.graph.values[name].shape
        return Tensor(name, op, output, self.roles.get(name), self.batch.get(name), shape)


@cache
def _facts(model: str, samples: int) -> _Facts:
    graph = model_graph(model, samples)
    roles = {name: state.role for state in graph.states for name in (state.input, state.output)}
    return _Facts(graph, roles, batch_dims(graph.values, model_graph(model, 2 * samples).values))


def named_plan(
    model: str,
    folded: Folded,
    rules: Rules,
    configuration: Configuration,
    tasks: Sequence[Task],
    samples: int,
    seed: int = 0,
    *,
    recompute: Recompute = Recompute.NONE,
    modules: tuple[str, ...] = (),
) -> Plan:
    """Return a plan in which every mesh axis has its task.

    Args:
        model: Name of the model, a key of `executions.TINY`.
        folded: Its training step for `samples`.
        rules: Its rules.
        configuration: The outer choices; stages get about equal numbers of blocks.
        tasks: One per mesh axis.
        samples: Samples per microbatch.
        seed: Of what the tasks leave open.
        recompute: What all stages recompute.
        modules: Modules that selective recompute runs again; none for what frees the most bytes for its seconds.
    """
    costs_of_ops = replace(COSTS, stack=COSTS.stack.recomputing(modules))
    facts, rng = _facts(model, samples), np.random.default_rng(seed)
    tables = build_tables(folded, rules, configuration.mesh, costs_of_ops)
    costs = []
    for node in tables.nodes:
        cost = rng.random(node.count) / (2 * len(tables.nodes))
        for tensor, placed in _tensors(tables, node, facts):
            for axis, task in enumerate(tasks):
                wanted = task.wants(tensor)
                if wanted:
                    cost += np.array([placements[axis] not in wanted for placements in placed])
        costs.append(cost)
    edges = [(edge.first, edge.second, np.where(np.isfinite(edge.table), 0.0, np.inf)) for edge in tables.edges]
    choice = solvers.load("auto").solve(Problem.build(costs, edges), time_limit=10.0).choice
    assert choice is not None, "replicating everything is always possible"
    count = configuration.num_stages
    cuts = [round(folded.num_blocks * stage / count) for stage in range(count + 1)]
    split = Split.uniform(tuple(pairwise(cuts)), (recompute,) * count)
    seconds = StepTime(1.0, 1.0, 0.0, np.ones(count))
    candidate = Candidate(configuration, tables, choice, split, seconds)
    return written(candidate, samples * configuration.num_microbatches, True)


def _tensors(tables: Tables, node: Node, facts: _Facts) -> Iterator[tuple[Tensor, list[tuple[Placement, ...]]]]:
    """Yield everything a node places, with its placements per strategy."""
    if node.options is None:
        assert node.value is not None, node.name
        assert node.placements is not None, node.name
        if node.decision is not Decision.COPY:
            name = node.value.name
            placed = [tables.meaning.placements(name, int(number), tables.mesh) for number in node.placements]
            yield facts.tensor(name, None, output=True), placed
        return
    op = tables.folded.kinds[node.kind].ops[node.position]
    for names, all_numbers, output in (
        (op.inputs, node.options.inputs, False),
        (op.outputs, node.options.outputs, True),
    ):
        for name, numbers in zip(names, all_numbers, strict=True):
            if name and numbers is not None:
                placed = [tables.meaning.placements(name, int(number), tables.mesh) for number in numbers]
                yield facts.tensor(name, op, output=output), placed


def check_kind(plan: Plan, model: str, folded: Folded, tasks: Sequence[Task], samples: int) -> None:
    """Assert that a plan is of a kind on every axis: all the task insists on is as it wants it, and there is some."""
    facts = _facts(model, samples)
    held = dict.fromkeys(map(str, tasks), 0)
    for tensor, placements in _placed(plan, folded, facts):
        for axis, task in enumerate(tasks):
            if task.insists(tensor):
                wanted = task.wants(tensor)
                where = f"of {tensor.op.name}" if tensor.op else "between ops"
                assert placements[axis] in wanted, f"{task}: {tensor.name} {where} is {placements[axis]}"
                held[str(task)] += 1
    assert all(held.values()) or "random" in held, f"the plan has nothing of a kind: {held}"


def _placed(plan: Plan, folded: Folded, facts: _Facts) -> Iterator[tuple[Tensor, tuple[Placement, ...]]]:
    """Yield every tensor of a plan with its placements."""
    ops = {op.name: op for kind in folded.kinds for op in kind.ops}
    for block in plan.blocks:
        for item in (*block.states, *block.arrivals):
            yield facts.tensor(item.value, None, output=True), parse_placements(item.placement)
        for placement in block.ops:
            op = ops[placement.op]
            for names, texts, output in ((op.inputs, placement.inputs, False), (op.outputs, placement.outputs, True)):
                for name, text in zip(names, texts, strict=True):
                    if name and name not in folded.free:
                        yield facts.tensor(name, op, output=output), parse_placements(text)

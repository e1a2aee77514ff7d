"""What is still open, decided by a solver: everything decided before is a constraint of the placement problem."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar import solvers
from autopar.bounds.roofline import roofline
from autopar.configuration import Configuration
from autopar.cost import CostModel
from autopar.discover import Rules, Strategy
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.op_strategies import encode
from autopar.formulate.step_time import Pipeline as Flow
from autopar.formulate.tables import Decision, Tables
from autopar.ir.graph import Op, Value
from autopar.problem import Choice
from autopar.progress import never, silent
from autopar.recompute import Recompute
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver
from autopar.search.settings import SearchSettings
from autopar.solvers.limited import solve_limited
from autopar.tactics.state import OpKey, State, is_partial, sharded_dim

HIDDEN = (1.0, 0.5, 0.0)
"""Shares of the gradient reduction that the last backward is taken to hide: which one it hides is known afterwards."""

Mask = NDArray[np.bool_]
T = TypeVar("T")


class Undecided:
    """The restriction of a placement problem to what has been decided, and to the axes that may be used elsewhere."""

    def __init__(self, state: State, axes: frozenset[int]) -> None:
        self.state, self.axes = state, axes
        self._keys: dict[str, OpKey] = {op.name: key for key, op in state.topology.ops.items()}

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> tuple[Mask, ...]:
        """Return by axis which strategies an op may take."""
        key = self._keys[op.name]
        masks = []
        for axis in range(len(self.state.topology.mesh.axes)):
            decided = self.state.strategy(key, axis)
            if decided is not None:
                masks.append(np.array([_alike(strategy, decided) for strategy in strategies]))
            elif axis in self.axes:
                masks.append(np.ones(len(strategies), dtype=bool))
            else:
                masks.append(np.array([_splits_nothing(strategy) for strategy in strategies]))
        return tuple(masks)

    def of_value(self, decision: Decision, kind: int, value: Value) -> tuple[Mask, ...]:
        """Return by axis which placements a value may have."""
        masks = []
        for axis in range(len(self.state.topology.mesh.axes)):
            mask = np.ones(len(value.shape) + 2, dtype=bool)
            decided = self.state.split(value.name, axis)
            if decision is not Decision.COPY and (decided is not None or axis not in self.axes):
                mask[:] = False
                if decided is None or decided.dim < 0:
                    mask[0] = mask[1] = True  # what is not split may cross as terms, where anything does
                else:
                    mask[2 + decided.dim] = True
            masks.append(mask)
        return tuple(masks)


def _alike(strategy: Strategy, other: Strategy) -> bool:
    """Whether two strategies place every tensor alike, whatever terms are terms of."""
    pairs = zip((*strategy.inputs, *strategy.outputs), (*other.inputs, *other.outputs), strict=True)
    return all(encode(own) == encode(placement) for own, placement in pairs)


def _splits_nothing(strategy: Strategy) -> bool:
    return all(sharded_dim(placement) is None for placement in (*strategy.inputs, *strategy.outputs))


def complete(
    state: State,
    rules: Rules,
    costs: CostModel,
    axes: frozenset[int],
    *,
    flow: Flow,
    global_batch: int,
    memory_limit: float,
    solver: str,
    time_limit: float | None,
    tactic: int,
) -> Iterator[State]:
    """Yield completions of a state that a solver finds good, each with everything decided on the axes given.

    Args:
        state: What has been decided; not changed.
        rules: What ops can do.
        costs: What things cost.
        axes: The mesh axes that may be used where something is open.
        flow: The pipeline.
        global_batch: Samples per step.
        memory_limit: Bytes per device.
        solver: Name of the solver.
        time_limit: Seconds; None for no limit.
        tactic: Number of the tactic that asks.
    """
    topology = state.topology
    folded = topology.folded
    tables = build_tables(folded, rules, topology.mesh, costs, Undecided(state, axes))
    samples = global_batch // flow.num_microbatches
    limit = math.inf if time_limit is None else time_limit
    search = SearchContext(
        folded=_always(folded),
        rules=_always(rules),
        costs=costs,
        solver=solvers.load(solver),
        roofline=roofline(folded, folded, (samples, samples), costs),
        global_batch=global_batch,
        memory_limit=memory_limit,
        keep=1,
        time_limit=limit,
        settings=SearchSettings(overtime_seconds=0.0),
        progress=silent,
        should_stop=never,
    )
    configuration = Configuration(flow.num_stages, topology.mesh, flow.num_microbatches, flow.schedule)
    end = time.monotonic() + limit
    node, found = NodeSolver(search, [configuration], tables, end), list[Choice]()
    for hidden in HIDDEN:
        weighting = weights(tables, flow, recompute=Recompute.NONE, hidden=hidden, bounding=False, traffic=None)
        solution = solve_limited(search.solver, problem(tables, weighting), end).solution
        if solution.choice is not None:
            found.append(solution.choice)
    bound = node.relax(math.inf)
    if math.isfinite(bound):
        node.solve(bound, math.inf)
    for choice in dict.fromkeys([*found, *node.finder.considered]):
        yield _decided(state, tables, choice, axes, tactic)


def _always(thing: T) -> Callable[[object], T]:
    return lambda _: thing


def _decided(state: State, tables: Tables, choice: Choice, axes: frozenset[int], tactic: int) -> State:
    """Return a state with everything a choice decides."""
    found, topology = state.copy(), state.topology
    keys = {op.name: key for key, op in topology.ops.items()}
    for node, strategy in zip(tables.nodes, choice, strict=True):
        if node.options is not None:
            key = keys[node.name]
            for axis, own in enumerate(node.options.by_axis(strategy)):
                if axis not in found.chosen.get(key, {}) and not (_passes(own) or own.is_replicate):
                    found.chosen.setdefault(key, {})[axis] = topology.strategies(key).index(own)
        elif node.decision in (Decision.PARAMETER, Decision.BOUNDARY):
            assert node.value is not None
            assert node.placements is not None
            number = int(node.placements[strategy])
            placements = tables.meaning.placements(node.value.name, number, topology.mesh)
            for axis, placement in enumerate(placements):
                dim = sharded_dim(placement)
                if dim is not None and axis in axes:
                    found.decide(node.value.name, axis, dim, tactic)
    for key, chosen in found.chosen.items():
        op = topology.ops[key]
        for axis, number in chosen.items():
            strategy_ = topology.strategies(key)[number]
            for name, placement in zip(op.outputs, strategy_.outputs, strict=True):
                dim = sharded_dim(placement)
                if name and dim is not None and topology.of(name) not in topology.boundary_set:
                    found.decide(name, axis, dim, tactic)
    return found


def _passes(strategy: Strategy) -> bool:
    return any(map(is_partial, strategy.inputs))

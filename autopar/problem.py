"""Strategy selection, the problem every solver sees.

    minimise   sum_i c_i[x_i]  +  sum_e w_e * d_e[x_a(e), x_b(e)]
    such that  for every limit (start, end, amount) and every time start <= t < end:
                   sum_{u: start_u <= t < end_u} amounts_u[x_node(u)] <= amount

One strategy x_i per node; a forbidden strategy or pair costs infinity. This is the public IOPDDL form (one usage per
node, whole numbers, one limit) with four liberties: a node may have several usages, limits may differ over time, an
edge has a weight, so that equal tables are stored once, and numbers may be floats (seconds, bytes).
A solver knows nothing else of neural nets.
"""

import hashlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ProblemError

FORBIDDEN = 10**18
"""In whole-number problems a cost from here on means forbidden (IOPDDL); in float problems infinity does."""

OPTIMALITY_TOLERANCE = 1e-6
"""Cost and bound that agree to this, relative to the cost, prove an optimum; LP and MIP codes promise no more."""

LIMIT_TOLERANCE = 1e-9
"""Relative slack of a limit when usages are floats, for the rounding of sums; whole-number usages get none."""

Numbers = NDArray[Any]
"""An int64 or float64 array."""

Choice = tuple[int, ...]
"""One strategy index per node."""


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """What a node uses of the limited resource while `start <= time < end`.

    Attributes:
        node: Index of the node.
        start: First time of use.
        end: First time after the use; an interval that is empty uses nothing.
        amounts: Use per strategy of the node, not negative (bytes in problems of `formulate`).
    """

    node: int
    start: int
    end: int
    amounts: Numbers


@dataclass(frozen=True, slots=True)
class Limit:
    """The summed use may not exceed `amount` while `start <= time < end`; nothing fits a negative amount."""

    amount: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named restriction of the choices, such as "data parallel + Megatron"; the grid solver tries each.

    Attributes:
        name: For reports.
        allowed: Per node the strategies the recipe permits, at least one.
    """

    name: str
    allowed: tuple[tuple[int, ...], ...]


class Kinship:
    """What problems share of which costs differ, and nothing else: neither nodes and edges nor what is forbidden.

    Attributes:
        is_valid: Whether one of them was found to be well-formed, as all are then.
        known: What a solver has found out about all of them.
    """

    def __init__(self) -> None:
        self.is_valid = False
        self.known: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Nodes with strategies, costs of nodes and edges, usages under limits. Build with `Problem.build`.

    All costs are int64 (values from `FORBIDDEN` on are forbidden) or all are float64 (infinity is forbidden).

    Attributes:
        node_costs: Per node the cost of each strategy, shape (num_strategies,).
        edge_nodes: The two nodes of each edge, shape (num_edges, 2); parallel edges are allowed, loops are not.
        edge_tables: Distinct cost tables, shape (strategies of the first node, strategies of the second).
        edge_table_ids: Per edge its index into `edge_tables`, shape (num_edges,).
        edge_weights: Per edge the factor on its table, shape (num_edges,), not negative; a forbidden pair stays
            forbidden under weight 0.
        usages: Use of the limited resource.
        limits: Upper limits; where several cover a time the smallest holds, where none does there is no limit.
        node_names: One per node, or empty.
        strategy_names: Per node one per strategy, or empty.
        recipes: Named restrictions for the grid solver.
        name: For reports.
        unit_seconds: Seconds per unit of cost in a whole-number problem made from seconds; None if unknown.
        kinship: What it shares with problems that differ in costs alone; None if it is not made to be one of many.
    """

    node_costs: tuple[Numbers, ...]
    edge_nodes: NDArray[np.int64]
    edge_tables: tuple[Numbers, ...]
    edge_table_ids: NDArray[np.int64]
    edge_weights: Numbers
    usages: tuple[Usage, ...] = ()
    limits: tuple[Limit, ...] = ()
    node_names: tuple[str, ...] = ()
    strategy_names: tuple[tuple[str, ...], ...] = ()
    recipes: tuple[Recipe, ...] = ()
    name: str = ""
    unit_seconds: float | None = None
    kinship: Kinship | None = None

    def __post_init__(self) -> None:
        if self.kinship is None or not self.kinship.is_valid:
            _validate(self)
        if self.kinship is not None:
            self.kinship.is_valid = True

    @classmethod
    def build(
        cls,
        node_costs: Iterable[Any],
        edges: Iterable[tuple[int, int, Any] | tuple[int, int, Any, float]] = (),
        *,
        usages: Iterable[Usage] = (),
        limit: float | Sequence[Limit] | None = None,
        node_names: Sequence[str] = (),
        strategy_names: Sequence[Sequence[str]] = (),
        recipes: Iterable[Recipe] = (),
        name: str = "",
        unit_seconds: float | None = None,
    ) -> "Problem":
        """Return the problem, equal tables stored once.

        Args:
            node_costs: Per node a 1-D sequence of costs. If every cost is a whole number of an integer type the problem
                is one of whole numbers, else of floats.
            edges: (first node, second node, 2-D table) or (first, second, table, weight).
            usages: Use of the limited resource.
            limit: One limit for all times, several `Limit`s, or None.
            node_names: One per node.
            strategy_names: Per node one per strategy.
            recipes: Named restrictions.
            name: For reports.
            unit_seconds: Seconds per unit of cost.

        Raises:
            ProblemError: If anything does not fit together.

        >>> problem = Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])])
        >>> problem.cost((1, 1))
        2
        """
        costs = [np.asarray(c) for c in node_costs]
        tables: list[Numbers] = []
        seen: dict[tuple[tuple[int, ...], str, bytes], int] = {}
        seen_objects: dict[
            int, int
        ] = {}  # a table given twice as the same object is not hashed again; `kept` keeps ids valid
        kept: list[Any] = []
        ends: list[tuple[int, int]] = []
        ids: list[int] = []
        weights: list[float] = []
        for edge in edges:
            first, second, table = edge[0], edge[1], edge[2]
            index = seen_objects.get(id(table))
            if index is None:
                array = np.ascontiguousarray(table)
                digest = hashlib.blake2b(array.data, digest_size=16).digest()  # the bytes would double the memory
                index = seen.setdefault((array.shape, array.dtype.str, digest), len(tables))
                if index == len(tables):
                    tables.append(array)
                seen_objects[id(table)] = index
                kept.append(table)
            ends.append((first, second))
            ids.append(index)
            weights.append(edge[3] if len(edge) == 4 else 1)
        whole = all(np.issubdtype(a.dtype, np.integer) for a in (*costs, *tables)) and all(
            float(w).is_integer() for w in weights
        )
        dtype = np.int64 if whole else np.float64
        uses = tuple(usages)
        limits: tuple[Limit, ...]
        if limit is None:
            limits = ()
        elif isinstance(limit, int | float | np.integer | np.floating):
            first = min((u.start for u in uses), default=0)
            limits = (Limit(limit, first, max([first + 1, *(u.end for u in uses)])),)
        else:
            limits = tuple(limit)
        return cls(
            tuple(_frozen(c, dtype) for c in costs),
            _frozen(np.array(ends, np.int64).reshape(-1, 2), np.int64),
            tuple(_frozen(t, dtype) for t in tables),
            _frozen(np.array(ids, np.int64), np.int64),
            _frozen(np.array(weights, np.float64), dtype),
            uses,
            limits,
            tuple(node_names),
            tuple(tuple(names) for names in strategy_names),
            tuple(recipes),
            name,
            unit_seconds,
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_costs)

    @property
    def num_edges(self) -> int:
        """Number of edges, parallel ones counted each."""
        return len(self.edge_table_ids)

    @property
    def num_strategies(self) -> tuple[int, ...]:
        """Strategies per node."""
        return tuple(len(c) for c in self.node_costs)

    @property
    def is_whole(self) -> bool:
        """Whether all costs are whole numbers, so that totals are exact."""
        return all(c.dtype == np.int64 for c in self.node_costs)

    def cost(self, choice: Sequence[int]) -> float:
        """Return the objective of `choice`; infinity if it is forbidden.

        It is an exact int in whole-number problems and a correctly rounded float in others.

        Raises:
            ProblemError: If the choice is not one strategy per node.
        """
        _check_choice(self, choice)
        terms = [c.item(s) for c, s in zip(self.node_costs, choice, strict=True)]
        pairs = [
            self.edge_tables[index].item(choice[a], choice[b])
            for (a, b), index in zip(self.edge_nodes.tolist(), self.edge_table_ids.tolist(), strict=True)
        ]
        weights = self.edge_weights.tolist()
        if self.is_whole:
            if any(t >= FORBIDDEN for t in (*terms, *pairs)):
                return math.inf
            total: int = sum(terms) + sum(map(operator.mul, weights, pairs))
            return total
        if math.inf in terms or math.inf in pairs:
            return math.inf
        return math.fsum((*terms, *map(operator.mul, weights, pairs)))

    def usage(self, choice: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """Return the summed use over time as (time, use from that time on) where it changes, in order of time.

        Raises:
            ProblemError: If the choice is not one strategy per node.
        """
        _check_choice(self, choice)
        changes: dict[int, list[float]] = {}
        for u in self.usages:
            if u.start < u.end:
                amount = u.amounts[choice[u.node]].item()
                changes.setdefault(u.start, []).append(amount)
                changes.setdefault(u.end, []).append(-amount)
        profile = []
        terms: list[float] = []
        whole = all(u.amounts.dtype == np.int64 for u in self.usages)
        total: float = 0
        for time in sorted(changes):
            if whole:
                total += sum(changes[time])
            else:
                terms += changes[time]
                terms = _exact_partials(terms)
                total = math.fsum(terms)
            profile.append((time, total))
        return tuple(profile)

    def peak_usage(self, choice: Sequence[int]) -> float:
        """Return the largest summed use at any time; 0 without usages."""
        return max((amount for _, amount in self.usage(choice)), default=0)

    def excess(self, choice: Sequence[int]) -> float:
        """Return by how much the worst limit is broken; 0 if the choice fits."""
        if not self.limits:
            return 0.0
        first = min(limit.start for limit in self.limits)
        profile = ((first, 0), *self.usage(choice))
        slack = 0.0 if all(u.amounts.dtype == np.int64 for u in self.usages) else LIMIT_TOLERANCE
        worst = 0.0
        for limit in self.limits:
            for index, (start, amount) in enumerate(profile):
                end = profile[index + 1][0] if index + 1 < len(profile) else math.inf
                if max(start, limit.start) < min(end, limit.end) and amount > limit.amount + slack * abs(limit.amount):
                    worst = max(worst, amount - limit.amount)
        return worst

    def fits(self, choice: Sequence[int]) -> bool:
        """Return whether every limit holds at every time."""
        return self.excess(choice) == 0


class Termination(StrEnum):
    """Why a solver stopped."""

    OPTIMAL = "optimal"
    """The choice is proven best, to `OPTIMALITY_TOLERANCE`."""
    FEASIBLE = "feasible"
    """There is a choice; a limit (time, or what the method can do) came before a proof."""
    CUTOFF = "cutoff"
    """The bound reached the caller's cutoff: no choice costs less than it."""
    INFEASIBLE = "infeasible"
    """Proven: no choice is permitted and fits."""
    UNKNOWN = "unknown"
    """A limit came before any choice was found."""
    INTERRUPTED = "interrupted"
    """`should_stop` said so."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found and what it proved.

    Attributes:
        termination: Why it stopped.
        choice: Strategy per node; None if none was found.
        cost: Objective of `choice`, recomputed by `Problem.cost`; infinity if none was found.
        bound: Proven lower bound on the optimum, to a relative error of `OPTIMALITY_TOLERANCE`; -infinity if nothing
            was proven, infinity if infeasible.
    """

    termination: Termination
    choice: Choice | None
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, relative to the cost; infinity if there is no choice or no bound.

        >>> Solution(Termination.FEASIBLE, (0,), 10.0, 8.0).gap
        0.2
        """
        if self.choice is None or math.isinf(self.bound) or math.isinf(self.cost):
            return math.inf
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """Return (cost - bound) / |cost|, 0 if the bound has reached the cost, infinity if only the cost is 0."""
    if bound >= cost:
        return 0.0
    return float(cost - bound) / abs(cost) if cost else math.inf


def check(problem: Problem, solution: Solution) -> None:
    """Recompute everything a solution claims.

    Raises:
        ProblemError: If the cost is not the choice's, the choice is forbidden or does not fit, the bound is above the
        cost, or the
            termination does not follow from the rest.
    """
    claim = solution.termination
    if math.isnan(solution.cost) or math.isnan(solution.bound):
        raise ProblemError(f"the solution has cost {solution.cost} and bound {solution.bound}")
    if solution.choice is None:
        if solution.cost != math.inf:
            raise ProblemError(f"the solution has cost {solution.cost} but no choice")
        if claim in (Termination.OPTIMAL, Termination.FEASIBLE):
            raise ProblemError(f"the solution claims to be {claim} but has no choice")
        if claim is Termination.INFEASIBLE and solution.bound != math.inf:
            raise ProblemError(f"the solution is {claim} but its bound is {solution.bound}, not infinity")
        return
    if claim in (Termination.INFEASIBLE, Termination.UNKNOWN):
        raise ProblemError(f"the solution claims to be {claim} but has a choice")
    cost = problem.cost(solution.choice)
    if cost == math.inf:
        raise ProblemError("the solution's choice contains a forbidden strategy or pair")
    if solution.cost != cost:
        raise ProblemError(f"the solution claims cost {solution.cost}, its choice costs {cost}")
    excess = problem.excess(solution.choice)
    if excess > 0:
        raise ProblemError(f"the solution's choice exceeds a limit by {excess}")
    if solution.bound > cost + OPTIMALITY_TOLERANCE * abs(cost):
        raise ProblemError(f"the solution claims bound {solution.bound}, above its own cost {cost}")
    if claim is Termination.OPTIMAL and solution.gap > OPTIMALITY_TOLERANCE:
        raise ProblemError(f"the solution claims to be optimal with a gap of {solution.gap:.2%}")


def check_together(problem: Problem, solutions: Mapping[str, Solution]) -> None:
    """Recompute everything that several solvers claim, and hold their claims against each other.

    Args:
        problem: What they solved.
        solutions: By the name of the solver.

    Raises:
        ProblemError: As `check`, or if the bound of one is above the cost of another.
    """
    for name, solution in solutions.items():
        try:
            check(problem, solution)
        except ProblemError as error:
            raise ProblemError(f"solver {name!r}: {error.args[0]}") from error
    for name, solution in solutions.items():
        for other, found in solutions.items():
            if found.choice is not None and solution.bound > found.cost + OPTIMALITY_TOLERANCE * abs(found.cost):
                raise ProblemError(
                    f"solver {name!r} claims bound {solution.bound}, solver {other!r} has a choice of cost {found.cost}"
                )


def _frozen(array: Numbers, dtype: Any) -> Numbers:
    if array.dtype.kind not in "iuf" or (
        array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max
    ):
        raise ProblemError(f"an array of costs has values that are no numbers or too large for 64 bits: {array!r}")
    if array.dtype == dtype and _is_frozen(array):
        return array  # nobody writes to it, so it may be shared
    result = np.array(array, dtype=dtype)
    result.flags.writeable = False
    return result


def _is_frozen(array: Numbers) -> bool:
    """Return whether nobody can write to an array, not even to one that it is a view of."""
    owner = array if array.base is None else array.base
    return (
        not array.flags.writeable
        and isinstance(owner, np.ndarray)
        and owner.flags.owndata
        and not owner.flags.writeable
    )


def _exact_partials(terms: Sequence[float]) -> list[float]:
    """Return few floats with exactly the sum of `terms` (Shewchuk's partials, what `math.fsum` does inside)."""
    partials: list[float] = []
    for term in terms:
        kept = []
        x = term
        for y in partials:
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            low = y - (high - x)
            if low:
                kept.append(low)
            x = high
        partials = [*kept, x]
    return partials


def _check_choice(problem: Problem, choice: Sequence[int]) -> None:
    if len(choice) != problem.num_nodes:
        raise ProblemError(f"a choice of {len(choice)} strategies for {problem.num_nodes} nodes")
    for node, (strategy, costs) in enumerate(zip(choice, problem.node_costs, strict=True)):
        if not 0 <= strategy < len(costs):
            raise ProblemError(f"strategy {strategy} of node {_label(problem, node)}, which has {len(costs)}")


def _label(problem: Problem, node: int) -> str:
    return repr(problem.node_names[node]) if problem.node_names else str(node)


def _validate(problem: Problem) -> None:
    sizes = problem.num_strategies
    dtypes = {a.dtype for a in (*problem.node_costs, *problem.edge_tables, problem.edge_weights)}
    if problem.num_nodes and dtypes not in ({np.dtype(np.int64)}, {np.dtype(np.float64)}):
        raise ProblemError(
            f"costs of types {sorted(map(str, dtypes))}",
            hint="make all of them int64 or all float64, or use Problem.build",
        )
    for node, costs in enumerate(problem.node_costs):
        if costs.ndim != 1 or len(costs) == 0:
            raise ProblemError(f"node {_label(problem, node)} has costs of shape {costs.shape}, not one per strategy")
    for what, arrays in (("a node", problem.node_costs), ("an edge", problem.edge_tables)):
        for index, array in enumerate(arrays):
            if array.dtype == np.float64 and array.size and not np.minimum.reduce(array, axis=None) > -np.inf:
                raise ProblemError(f"{what} has a cost that is not a number or -infinity (array {index})")
    edges, ids, weights = problem.edge_nodes, problem.edge_table_ids, problem.edge_weights
    if edges.shape != (len(ids), 2) or weights.shape != ids.shape:
        raise ProblemError(
            f"edge_nodes {edges.shape}, edge_table_ids {ids.shape} and edge_weights {weights.shape} differ"
        )
    if len(ids):
        if edges.min() < 0 or edges.max() >= problem.num_nodes:
            raise ProblemError(f"an edge names node {edges.max()}, there are {problem.num_nodes}")
        if ids.min() < 0 or ids.max() >= len(problem.edge_tables):
            raise ProblemError(f"an edge names table {ids.max()}, there are {len(problem.edge_tables)}")
        loops = np.flatnonzero(edges[:, 0] == edges[:, 1])
        if len(loops):
            raise ProblemError(
                f"edge {loops[0]} joins node {edges[loops[0], 0]} with itself",
                hint="add its diagonal to the node's costs",
            )
        if not (np.isfinite(weights).all() and weights.min() >= 0):
            raise ProblemError("an edge has a weight that is negative or not finite")
        shapes = np.array([t.shape if t.ndim == 2 else (-1, -1) for t in problem.edge_tables])
        wrong = np.flatnonzero((shapes[ids] != np.array(sizes)[edges]).any(axis=1))
        if len(wrong):
            e = int(wrong[0])
            a, b = edges[e].tolist()
            raise ProblemError(
                f"edge {e} has a table of shape {problem.edge_tables[ids[e]].shape}, "
                f"its nodes {_label(problem, a)} and {_label(problem, b)} have {sizes[a]} and {sizes[b]} strategies"
            )
    for usage in problem.usages:
        if not 0 <= usage.node < problem.num_nodes or usage.amounts.shape != (sizes[usage.node],):
            raise ProblemError(f"a usage of node {usage.node} has {usage.amounts.shape} amounts")
        if (
            usage.amounts.dtype not in (np.int64, np.float64)
            or not (np.isfinite(usage.amounts) & (usage.amounts >= 0)).all()
        ):
            raise ProblemError(
                f"a usage of node {_label(problem, usage.node)} has amounts that are no finite numbers >= 0"
            )
    for limit in problem.limits:
        if math.isnan(limit.amount):
            raise ProblemError("a limit that is not a number")
    if problem.node_names and len(problem.node_names) != problem.num_nodes:
        raise ProblemError(f"{len(problem.node_names)} names for {problem.num_nodes} nodes")
    if problem.strategy_names and tuple(map(len, problem.strategy_names)) != sizes:
        raise ProblemError("the strategy names are not one per strategy")
    for recipe in problem.recipes:
        if len(recipe.allowed) != problem.num_nodes:
            raise ProblemError(
                f"recipe {recipe.name!r} speaks of {len(recipe.allowed)} nodes, there are {problem.num_nodes}"
            )
        for node, allowed in enumerate(recipe.allowed):
            if not allowed or min(allowed) < 0 or max(allowed) >= sizes[node]:
                raise ProblemError(
                    f"recipe {recipe.name!r} allows {allowed} for node {_label(problem, node)} "
                    f"of {sizes[node]} strategies"
                )

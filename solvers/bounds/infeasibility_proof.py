"""Irreducible infeasible subsystems: the smallest proof found that a problem has no feasible choice.

A conflict is a set of nodes and times that is infeasible by itself: the least use of the nodes at these times exceeds
the limit, or (no times) their forbidden strategies and pairs exclude each other. It is irreducible if removing any one
node makes it feasible.

The verdict "infeasible" of a solver for the whole problem is not trusted; each step is proven again:

1. Forbidden strategies and pairs alone, by arc consistency and search.
2. Each time alone, the tightest first. The least use at one time is a problem without limits in which each strategy
   costs its use; if its lower bound exceeds the limit, the time is a conflict. Without forbidden pairs every node
   takes its least use, so the nodes with the largest least use form the conflict.
3. Several times together.

Nodes, and times if there are several, are then removed as long as the rest is still proven infeasible: first in large
blocks, then in smaller ones, at last one by one (deletion filter, Chinneck and Dravnieks 1991).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem import FORBIDDEN, LIMIT_TOLERANCE, OPTIMALITY_TOLERANCE, Limit, Numbers, Problem, Usage
from autopar.solvers.auto import Auto
from autopar.solvers.base import EXACT
from autopar.solvers.model.graphical_model import as_floats, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import contract

Proof = Callable[[Sequence[int]], bool]
"""Whether a subset of elements is proven infeasible."""

_MAX_TIMES = 200
"""Times tried alone before several are tried together."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """An infeasible set of nodes and times.

    Attributes:
        nodes: The nodes, ascending.
        times: Times at which their use cannot be within the limits; empty if forbidden pairs alone are infeasible.
        edges: Pairs of these nodes with forbidden combinations, which the proof may use.
        least: Least use of the nodes at the only time; None if there are several times or none.
        limit: The limit at the only time; None if there are several times or none.
        irreducible: Whether every proper subset of the nodes is proven feasible.
    """

    nodes: tuple[int, ...]
    times: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    least: float | None
    limit: float | None
    irreducible: bool

    def sentence(self, names: Sequence[str] = ()) -> str:
        """Return the conflict as one English sentence.

        >>> Conflict((3, 5), (17,), (), 120.0, 100.0, True).sentence()
        'nodes 3 and 5 use at least 120 at time 17, the limit is 100; without any one of them there is a choice'
        """
        nodes = _join_words([str(names[n]) if names else str(n) for n in self.nodes])
        pairs = (
            f" (given the forbidden pairs of edges {_join_words([f'{a}-{b}' for a, b in self.edges])})"
            if self.edges
            else ""
        )
        several = len(self.nodes) > 1
        if not self.nodes:
            return f"the limit at time {self.times[0]} is {self.limit:,.15g}, below 0"
        who = f"node{'s' if several else ''} {nodes}"
        if not self.times:
            what = f"{who} {'have' if several else 'has'} no permitted choice{pairs}"
        elif self.limit is None:
            what = f"{who} cannot keep the limits at times {_join_words([str(t) for t in self.times])}{pairs}"
        else:
            what = (
                f"{who} use{'' if several else 's'} at least {self.least:,.15g} at time {self.times[0]}{pairs}, "
                f"the limit is {self.limit:,.15g}"
            )
        if not self.irreducible:
            return f"{what}; some of these nodes may not be needed"
        return f"{what}; without {'any one of them' if several else 'it'} there is a choice"


def explain(problem: Problem, *, end: float = math.inf) -> Conflict | None:
    """Return a conflict of a problem; None if the problem is feasible, or no conflict was proven in time.

    Args:
        problem: The problem.
        end: Deadline on the monotonic clock; a conflict proven by then is returned, perhaps not irreducible.
    """
    search = _Search(problem, end)
    everything = list(range(problem.num_nodes))
    if search.pairs_infeasible(everything):
        return search.pair_conflict(everything)
    times = search.times_by_tightness()
    for t in times[:_MAX_TIMES]:
        if search.out_of_time():
            return None
        if search.exceeds_limit(everything, t):
            return search.conflict_at(t, everything)
    return search.conflict_over_times(everything, times)


class _Search:
    """Infeasibility proofs for subsets of the nodes and times of one problem."""

    def __init__(self, problem: Problem, end: float) -> None:
        self._problem = problem
        self._end = end
        self._whole = all(u.amounts.dtype == np.int64 for u in problem.usages)
        self._allowed = [np.isfinite(as_floats(costs)) for costs in problem.node_costs]
        self._tables = {i: np.isinf(as_floats(t)) for i, t in enumerate(problem.edge_tables)}
        self._ties = [
            (a, b, i)
            for (a, b), i in zip(problem.edge_nodes.tolist(), problem.edge_table_ids.tolist(), strict=True)
            if self._tables[i].any()
        ]
        self._uses_cache: tuple[int, dict[int, Numbers]] | None = None

    def out_of_time(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self._end

    def pairs_infeasible(self, nodes: Sequence[int]) -> bool:
        """Return whether the forbidden strategies and pairs of `nodes` are proven infeasible."""
        part = self._subproblem(nodes)
        prepared = prepare(part)
        contraction = None if prepared is None else contract(prepared.field, Memory.unlimited())
        if contraction is None:
            return True
        return bool(contraction.field.tables) and self._bound(part) == math.inf

    def exceeds_limit(self, nodes: Sequence[int], t: int) -> bool:
        """Return whether `nodes` are proven to use more than the limit at time `t`."""
        return self.min_use(nodes, t, self._tolerated_limit(t)) > self._tolerated_limit(t)

    def min_use(self, nodes: Sequence[int], t: int, sufficient: float = math.inf) -> float:
        """Return a lower bound on the use of `nodes` at time `t`; it may stop at any bound above `sufficient`."""
        if not all(self._allowed[n].any() for n in nodes):
            return math.inf
        used = self._uses_at(t)
        terms = [used[n][self._allowed[n]].min().item() for n in nodes if n in used]
        lowest: float = sum(terms) if self._whole else math.fsum(terms)
        if lowest > sufficient or not self._has_ties(nodes):
            return lowest
        bound = self._bound(self._subproblem(nodes, used), sufficient * (1 + EXACT) + 1 if self._whole else sufficient)
        return max(lowest, bound if self._whole else bound * (1 - OPTIMALITY_TOLERANCE))

    def times_by_tightness(self) -> list[int]:
        """Return the times whose limits may be broken, by descending excess of the least use."""
        prepared = prepare(self._subproblem(range(self._problem.num_nodes)))
        assert prepared is not None, "the forbidden pairs are feasible"
        memory = Memory.of(self._problem, prepared.labels)
        contraction = contract(prepared.field, memory)
        rows = memory if contraction is None else contraction.memory
        lowest = np.zeros(rows.num_rows + 1)
        least = np.array([float(a.min()) for a in rows.amounts])
        np.add.at(lowest, rows.first, least)
        np.add.at(lowest, rows.last, -least)
        over = (np.cumsum(lowest)[:-1] - rows.limits) / rows.scales
        return [int(rows.times[t]) for t in np.argsort(-over, kind="stable")]

    def pair_conflict(self, nodes: Sequence[int]) -> Conflict:
        """Return the conflict of forbidden strategies and pairs."""
        tied = {n for a, b, _ in self._ties for n in (a, b)}
        kept, minimal = self._filter(
            [n for n in nodes if n in tied or not self._allowed[n].any()], self.pairs_infeasible
        )
        return self._conflict(kept, (), minimal)

    def conflict_at(self, t: int, nodes: Sequence[int]) -> Conflict:
        """Return the conflict at time `t`."""
        if self._tolerated_limit(t) < 0:
            return self._conflict([], (t,), True)
        used = self._uses_at(t)
        least = {n: used[n][self._allowed[n]].min().item() for n in used}
        # In descending order of least use: the deletion filter starts from the end.
        users = sorted(used, key=lambda n: (-least[n], n))
        total = 0
        for count, node in enumerate(users, start=1):
            total += least[node]
            if total > self._tolerated_limit(t):
                if self._has_ties(users[:count]):
                    break
                return self._conflict(users[:count], (t,), True)  # its smallest user is needed, so all are
        tied = {n for a, b, _ in self._ties for n in (a, b)}
        others = [n for n in nodes if n in tied and n not in used]
        kept, minimal = self._filter([*users, *others], lambda part: self.exceeds_limit(part, t))
        return self._conflict(kept, (t,), minimal)

    def conflict_over_times(self, nodes: Sequence[int], times: Sequence[int]) -> Conflict | None:
        """Return a conflict over several times; None if none is proven."""
        if self.out_of_time() or not self._limits_infeasible(nodes, times):
            return None
        needed, fewest = self._filter(times, lambda part: self._limits_infeasible(nodes, part))
        kept, minimal = self._filter(nodes, lambda part: self._limits_infeasible(part, needed))
        return self._conflict(kept, tuple(sorted(needed)), fewest and minimal)

    def _filter(self, elements: Sequence[int], proof: Proof) -> tuple[list[int], bool]:
        """Apply the deletion filter from the end; return the kept elements, and whether each one was tried."""
        kept = list(elements)
        size = max(1, len(kept) // 2)
        while True:
            end = len(kept)
            while end > 0:
                if self.out_of_time():
                    return kept, False
                rest = kept[: max(0, end - size)] + kept[end:]
                if proof(rest):
                    kept = rest
                end = max(0, end - size)
            if size == 1:
                return kept, True
            size = max(1, min(size // 2, len(kept) // 2))

    def _conflict(self, nodes: Sequence[int], times: tuple[int, ...], minimal: bool) -> Conflict:
        inside = set(nodes)
        edges = {(min(a, b), max(a, b)) for a, b, _ in self._ties if a in inside and b in inside}
        # A missing infeasibility proof is no proof of feasibility: each subset needs a feasible choice.
        needed = minimal and (
            not (edges or len(times) > 1) or all(self._has_choice([m for m in nodes if m != n], times) for n in nodes)
        )
        single = len(times) == 1
        return Conflict(
            tuple(sorted(nodes)),
            times,
            tuple(sorted(edges)),
            self.min_use(sorted(nodes), times[0]) if single else None,
            self._limit(times[0]) if single else None,
            needed,
        )

    def _has_choice(self, nodes: Sequence[int], times: Sequence[int]) -> bool:
        """Return whether a feasible choice of `nodes` under the limits at `times` is found."""
        if self.out_of_time():
            return False
        return Auto().solve(self._subproblem(nodes, times=times), time_limit=self._seconds_left()).choice is not None

    def _limits_infeasible(self, nodes: Sequence[int], times: Sequence[int]) -> bool:
        """Return whether `nodes` are proven unable to keep the limits at `times`."""
        return self._bound(self._subproblem(nodes, times=times)) == math.inf

    def _bound(self, part: Problem, sufficient: float = math.inf) -> float:
        """Return a lower bound of a subproblem; the solver may stop once it exceeds `sufficient`."""
        return Auto().solve(part, time_limit=self._seconds_left(), cutoff=sufficient).bound

    def _seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _limit(self, t: int) -> float:
        return min((x.amount for x in self._problem.limits if x.start <= t < x.end), default=math.inf)

    def _tolerated_limit(self, t: int) -> float:
        """Return the largest use at time `t` that counts as within the limit."""
        limit = self._limit(t)
        return limit if self._whole or math.isinf(limit) else limit + LIMIT_TOLERANCE * abs(limit)

    def _has_ties(self, nodes: Sequence[int]) -> bool:
        inside = set(nodes)
        return any(a in inside and b in inside for a, b, _ in self._ties)

    def _uses_at(self, t: int) -> dict[int, Numbers]:
        """Return the use of each strategy at time `t`, per node."""
        if self._uses_cache is None or self._uses_cache[0] != t:
            used: dict[int, Numbers] = {}
            for u in self._problem.usages:
                if u.start <= t < u.end:
                    used[u.node] = used[u.node] + u.amounts if u.node in used else u.amounts
            self._uses_cache = (t, used)
        return self._uses_cache[1]

    def _subproblem(
        self, nodes: Sequence[int], costs: Mapping[int, Numbers] | None = None, times: Sequence[int] = ()
    ) -> Problem:
        """Return the subproblem of `nodes`: forbidden strategies and pairs only, plus the given costs and limits.

        Args:
            nodes: The nodes.
            costs: Costs of strategies per node; 0 by default.
            times: Times at which the limits hold.
        """
        barrier: float = FORBIDDEN if self._whole else math.inf
        place = {n: i for i, n in enumerate(nodes)}
        given = costs or {}
        return Problem.build(
            [np.where(self._allowed[n], given.get(n, 0), barrier) for n in nodes],
            [
                (place[a], place[b], np.where(self._tables[i], barrier, 0))
                for a, b, i in self._ties
                if a in place and b in place
            ],
            usages=[
                Usage(place[u.node], t, t + 1, u.amounts)
                for t in times
                for u in self._problem.usages
                if u.node in place and u.start <= t < u.end
            ],
            limit=[Limit(self._limit(t), t, t + 1) for t in times] or None,
        )


def _join_words(words: Sequence[str], most: int = 12) -> str:
    """Return at most `most` words joined with commas and "and".

    >>> _join_words(["a", "b", "c"]), _join_words(["a", "b", "c"], 2)
    ('a, b and c', 'a, b and 1 more')
    """
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""

"""Why nothing fits: a smallest proof that somebody can check by hand.

A conflict is a set of nodes, and of times, that leaves no choice by itself: what the nodes must use at these times is
above the limit, or (no times) their forbidden strategies and pairs exclude each other. It is irreducible if it leaves a
choice as soon as any one node is taken out.

The search never believes a solver that says "infeasible" for the whole problem; it proves each step anew:

1. Forbidden strategies and pairs alone are tried first, by propagation.
2. Then every time alone, the tightest first. At one time the least use is a problem without limits: each node costs
   what it uses, and if the bound of that is above the limit, the time is a conflict. Nodes that forbid nothing just
   use their least, so the largest of them are the conflict.
3. Then several times together.

Nodes, and times if there are several, are then taken out as long as what is left is still proven to leave no choice:
first in large pieces, then in smaller ones, at last one by one (deletion filter, Chinneck and Dravnieks, 1991).
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
from autopar.solvers.reductions.contraction import merge

Proof = Callable[[Sequence[int]], bool]
"""Whether some elements are proven to leave no choice."""

_MAX_TIMES = 200
"""Times tried alone before several are tried together."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nodes that leave no choice.

    Attributes:
        nodes: The nodes, ascending.
        times: The times at which their use cannot be within the limits; empty if it is forbidden pairs alone.
        edges: Pairs of these nodes with forbidden combinations, which the proof may rest on.
        least: What the nodes use at least at the only time; None if there are several times or none.
        limit: The limit at the only time; None if there are several times or none.
        irreducible: Whether it is proven that without any one of the nodes there is a choice.
    """

    nodes: tuple[int, ...]
    times: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    least: float | None
    limit: float | None
    irreducible: bool

    def sentence(self, names: Sequence[str] = ()) -> str:
        """Return the conflict in one sentence.

        >>> Conflict((3, 5), (17,), (), 120.0, 100.0, True).sentence()
        'nodes 3 and 5 use at least 120 at time 17, the limit is 100; without any one of them there is a choice'
        """
        nodes = _listed([str(names[n]) if names else str(n) for n in self.nodes])
        pairs = f" (with what the edges {_listed([f'{a}-{b}' for a, b in self.edges])} forbid)" if self.edges else ""
        several = len(self.nodes) > 1
        if not self.nodes:
            return f"the limit at time {self.times[0]} is {self.limit:,.15g}, below 0"
        who = f"node{'s' if several else ''} {nodes}"
        if not self.times:
            what = f"{who} {'have' if several else 'has'} no permitted choice{pairs}"
        elif self.limit is None:
            what = f"{who} cannot keep the limits at times {_listed([str(t) for t in self.times])}{pairs}"
        else:
            what = (
                f"{who} use{'' if several else 's'} at least {self.least:,.15g} at time {self.times[0]}{pairs}, "
                f"the limit is {self.limit:,.15g}"
            )
        if not self.irreducible:
            return f"{what}; some of them may not be needed for that"
        return f"{what}; without {'any one of them' if several else 'it'} there is a choice"


def explain(problem: Problem, *, end: float = math.inf) -> Conflict | None:
    """Return a conflict of a problem; None if there is none, or if none was proven in time.

    Args:
        problem: The problem.
        end: When to be done, on the monotonic clock; what is proven by then is returned.
    """
    search = _Search(problem, end)
    everything = list(range(problem.num_nodes))
    if search.barred(everything):
        return search.forbidden(everything)
    times = search.tightest()
    for t in times[:_MAX_TIMES]:
        if search.late():
            return None
        if search.too_much(everything, t):
            return search.at(t, everything)
    return search.together(everything, times)


class _Search:
    """The proofs for one problem, each about some of its nodes."""

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
        self._uses: tuple[int, dict[int, Numbers]] | None = None

    def late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._end

    def barred(self, nodes: Sequence[int]) -> bool:
        """Return whether the forbidden strategies and pairs of some nodes are proven to leave no choice."""
        part = self._part(nodes)
        prepared = prepare(part)
        merged = None if prepared is None else merge(prepared.field, Memory.unlimited())
        if merged is None:
            return True
        return bool(merged.field.tables) and self._bound(part) == math.inf

    def too_much(self, nodes: Sequence[int], t: int) -> bool:
        """Return whether some nodes are proven to use more than the limit at one time."""
        return self.least(nodes, t, self._room(t)) > self._room(t)

    def least(self, nodes: Sequence[int], t: int, enough: float = math.inf) -> float:
        """Return what some nodes are proven to use at least at one time, or any proven number above `enough`."""
        if not all(self._allowed[n].any() for n in nodes):
            return math.inf
        used = self._used(t)
        terms = [used[n][self._allowed[n]].min().item() for n in nodes if n in used]
        lowest: float = sum(terms) if self._whole else math.fsum(terms)
        if lowest > enough or not self._tied(nodes):
            return lowest
        bound = self._bound(self._part(nodes, used), enough * (1 + EXACT) + 1 if self._whole else enough)
        return max(lowest, bound if self._whole else bound * (1 - OPTIMALITY_TOLERANCE))

    def tightest(self) -> list[int]:
        """Return the times whose limits may be broken, those that are broken most by least use first."""
        prepared = prepare(self._part(range(self._problem.num_nodes)))
        assert prepared is not None, "the forbidden pairs leave something"
        memory = Memory.of(self._problem, prepared.labels)
        merged = merge(prepared.field, memory)
        rows = memory if merged is None else merged.memory
        lowest = np.zeros(rows.num_rows + 1)
        least = np.array([float(a.min()) for a in rows.amounts])
        np.add.at(lowest, rows.first, least)
        np.add.at(lowest, rows.last, -least)
        over = (np.cumsum(lowest)[:-1] - rows.limits) / rows.scales
        return [int(rows.times[t]) for t in np.argsort(-over, kind="stable")]

    def forbidden(self, nodes: Sequence[int]) -> Conflict:
        """Return the conflict of forbidden strategies and pairs."""
        tied = {n for a, b, _ in self._ties for n in (a, b)}
        kept, minimal = self._filter([n for n in nodes if n in tied or not self._allowed[n].any()], self.barred)
        return self._conflict(kept, (), minimal)

    def at(self, t: int, nodes: Sequence[int]) -> Conflict:
        """Return the conflict at one time."""
        if self._room(t) < 0:
            return self._conflict([], (t,), True)
        used = self._used(t)
        least = {n: used[n][self._allowed[n]].min().item() for n in used}
        # The largest first: what comes late is taken out first.
        users = sorted(used, key=lambda n: (-least[n], n))
        total = 0
        for count, node in enumerate(users, start=1):
            total += least[node]
            if total > self._room(t):
                if self._tied(users[:count]):
                    break
                return self._conflict(users[:count], (t,), True)  # the least of them is needed, so all of them are
        tied = {n for a, b, _ in self._ties for n in (a, b)}
        others = [n for n in nodes if n in tied and n not in used]
        kept, minimal = self._filter([*users, *others], lambda part: self.too_much(part, t))
        return self._conflict(kept, (t,), minimal)

    def together(self, nodes: Sequence[int], times: Sequence[int]) -> Conflict | None:
        """Return a conflict at several times; None if none is proven."""
        if self.late() or not self._unfit(nodes, times):
            return None
        needed, fewest = self._filter(times, lambda part: self._unfit(nodes, part))
        kept, minimal = self._filter(nodes, lambda part: self._unfit(part, needed))
        return self._conflict(kept, tuple(sorted(needed)), fewest and minimal)

    def _filter(self, elements: Sequence[int], proof: Proof) -> tuple[list[int], bool]:
        """Return elements that are still a proof, the last of them taken out first, and whether all were tried."""
        kept = list(elements)
        size = max(1, len(kept) // 2)
        while True:
            end = len(kept)
            while end > 0:
                if self.late():
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
        # That no proof was found without a node is not yet a proof that there is a choice.
        needed = minimal and (
            not (edges or len(times) > 1) or all(self._fits([m for m in nodes if m != n], times) for n in nodes)
        )
        single = len(times) == 1
        return Conflict(
            tuple(sorted(nodes)),
            times,
            tuple(sorted(edges)),
            self.least(sorted(nodes), times[0]) if single else None,
            self._limit(times[0]) if single else None,
            needed,
        )

    def _fits(self, nodes: Sequence[int], times: Sequence[int]) -> bool:
        """Return whether a choice for some nodes at some times is known."""
        if self.late():
            return False
        return Auto().solve(self._part(nodes, times=times), time_limit=self._left()).choice is not None

    def _unfit(self, nodes: Sequence[int], times: Sequence[int]) -> bool:
        """Return whether some nodes are proven to break the limit at one of some times."""
        return self._bound(self._part(nodes, times=times)) == math.inf

    def _bound(self, part: Problem, enough: float = math.inf) -> float:
        """Return a lower bound of a part; the solver may stop once it is above `enough`."""
        return Auto().solve(part, time_limit=self._left(), cutoff=enough).bound

    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _limit(self, t: int) -> float:
        return min((x.amount for x in self._problem.limits if x.start <= t < x.end), default=math.inf)

    def _room(self, t: int) -> float:
        """Return the use at a time up to which a choice counts as fitting."""
        limit = self._limit(t)
        return limit if self._whole or math.isinf(limit) else limit + LIMIT_TOLERANCE * abs(limit)

    def _tied(self, nodes: Sequence[int]) -> bool:
        inside = set(nodes)
        return any(a in inside and b in inside for a, b, _ in self._ties)

    def _used(self, t: int) -> dict[int, Numbers]:
        """Return what the strategies of each node use at a time."""
        if self._uses is None or self._uses[0] != t:
            used: dict[int, Numbers] = {}
            for u in self._problem.usages:
                if u.start <= t < u.end:
                    used[u.node] = used[u.node] + u.amounts if u.node in used else u.amounts
            self._uses = (t, used)
        return self._uses[1]

    def _part(
        self, nodes: Sequence[int], costs: Mapping[int, Numbers] | None = None, times: Sequence[int] = ()
    ) -> Problem:
        """Return some nodes with what they forbid and nothing else, except what is given.

        Args:
            nodes: The nodes.
            costs: Costs of the strategies of some nodes; 0 by default.
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


def _listed(words: Sequence[str], most: int = 12) -> str:
    """Return words with commas and "and", only so many of them.

    >>> _listed(["a", "b", "c"]), _listed(["a", "b", "c"], 2)
    ('a, b and c', 'a, b and 1 more')
    """
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""

"""Adaptive large-neighbourhood search from a choice within the limits (Shaw 1998; Ropke and Pisinger 2006).

Three neighbourhoods: free a set of nodes and solve it exactly; force labels and let trees of nodes follow (kick);
decode the dual at perturbed costs and prices. The one with the largest recent gain per second gets most of the time.
The dual guides all of them: labels with a large reduced cost are excluded, and a set of free nodes grows over edges
from nodes whose present label has a large reduced cost. Sets with several seeds grow from nodes that use one scarce
segment, so that they can trade its use.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import DualInformation, LagrangianDual
from autopar.solvers.local_search.neighbourhood import solve, subproblem_of
from autopar.solvers.local_search.polish import Polisher
from autopar.solvers.model.csr import FlatField, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Field, Ints

Bools = NDArray[np.bool_]
T = TypeVar("T")

SHARES = (0.03, 0.1, 0.3, 1.0)
"""Largest reduced cost of a permitted label, as a share of the gap; each subproblem draws one."""
SECONDS = (0.1, 0.4, 1.5)
"""Target seconds of a subproblem; each draws one. Short ones gain more at first, long ones in the end."""
FIRST_SIZE = 10_000.0
"""Labels and pairs of labels in the first subproblem, per target second."""
LEAST_SIZE, LARGEST_SIZE = 200.0, 1e6
LARGER, SMALLER = 2.0, 0.7
"""Largest and smallest factor on the size of a kind of subproblem, after one faster or slower than its target."""
TIME_FACTOR = 3.0
"""Time limit of a subproblem, as a factor on its target."""
RECOMBINE_SECONDS = 2.0
"""Time limit of recombining two choices."""
KICKS, KICK_NODES = 100, 100
"""Labels forced per search, and most nodes of a tree that follows."""
PERTURBATIONS = (0.001, 0.01, 0.1, 0.3)
"""Relative standard deviation of perturbed costs and prices; each search draws one."""
SETTLING_ROUNDS = 5
"""Sweeps before a choice is decoded at perturbed costs."""
PERTURB_SECONDS = 5.0
"""Time limit of polishing that choice."""
EXPLORATION = 0.3
"""Share of searches whose neighbourhood is drawn at random (exploration)."""
DECAY = 0.8
"""Weight of the past in the gain rate of a neighbourhood."""
SEEDS = (1, 1, 3, 10)
"""Seeds a set of free nodes grows from; each subproblem draws one. Distant seeds can trade room under a limit."""
SHARED_SEGMENT_SHARE = 0.5
"""Share of subproblems whose seeds all use one scarce segment."""
MOST_SEEDS = 1000
SEED_FLOOR = 1e-4
"""Seed weight of a node whose label has reduced cost 0, as a share of the gap."""


class _Neighbourhood:
    """A neighbourhood with its recent gain per second.

    Attributes:
        search: Searches it once.
    """

    def __init__(self, search: Callable[[Callable[[float], Budget]], bool]) -> None:
        self.search = search
        self._gained = self._seconds = 0.0

    def record(self, gain: float, seconds: float) -> None:
        """Record the gain and time of one search."""
        self._gained = DECAY * self._gained + gain
        self._seconds = DECAY * self._seconds + seconds

    def rate(self) -> float:
        """Return the recent gain per second; infinity before the first search."""
        return self._gained / self._seconds if self._seconds > 0 else math.inf


class Improver:
    """Neighbourhood search from a choice within the limits.

    Attributes:
        labels: The incumbent.
        cost: Its cost.
        parts: Subproblems solved so far.
        guide: Dual information; may be replaced by a better one at any time.
    """

    def __init__(
        self,
        field: Field,
        flat: FlatField,
        memory: FlatMemory,
        labels: Ints,
        guide: DualInformation,
        seed: int,
        dual: LagrangianDual | None = None,
    ) -> None:
        self.labels = labels.copy()
        self.cost = flat.cost(labels)
        self.parts = 0
        self._field = field
        self._flat = flat
        self._memory = memory
        self.guide = guide
        self._random = np.random.default_rng(seed)
        self._profile = memory.profile(indicator(flat.offsets, labels))
        self._sizes: dict[tuple[float, float], float] = {}
        self._dual = dual
        self._polisher = Polisher(flat, memory, seed)
        self._owners = np.repeat(np.arange(flat.num_nodes), np.diff(flat.offsets))
        self._users = np.repeat(np.arange(flat.num_nodes), np.diff(memory.node_at))
        self._neighbourhoods = [_Neighbourhood(self._solve_subproblem), _Neighbourhood(self._kick_labels)]
        if dual is not None:
            self._neighbourhoods.append(_Neighbourhood(self._perturb_dual))

    def adopt(self, labels: Ints) -> None:
        """Replace the incumbent by another choice within the limits."""
        self.labels = labels.copy()
        self.cost = self._flat.cost(labels)
        self._profile = self._memory.profile(indicator(self._flat.offsets, labels))

    def step(self, part_budget: Callable[[float], Budget]) -> bool:
        """Search one neighbourhood, usually the one with the largest recent gain; return whether the cost fell.

        Args:
            part_budget: Returns a budget of the given seconds. If it has no time limit, the neighbourhood is drawn.
        """
        self.parts += 1
        timed = math.isfinite(part_budget(0.0).remaining)
        neighbourhood = self._draw(self._neighbourhoods)
        if timed and self._random.random() > EXPLORATION:
            neighbourhood = max(self._neighbourhoods, key=_Neighbourhood.rate)
        before, begin = self.cost, time.monotonic()
        gained = neighbourhood.search(part_budget)
        neighbourhood.record(before - self.cost, time.monotonic() - begin)
        return gained

    def _kick_labels(self, _part_budget: Callable[[float], Budget]) -> bool:
        """Force labels of small reduced cost, and let the trees around them follow (perturbation of ILS)."""
        room = self._draw(SHARES) * (self.cost - self.guide.bound)
        permitted = np.flatnonzero(self.guide.reduced_costs <= room)
        if len(permitted) == 0:
            return False
        chosen = self._random.choice(permitted, KICKS)
        seeds = self._owners[chosen]
        labels = self.labels.copy()
        random = int(self._random.integers(1 << 30))
        self._polisher.trees.kick(
            self._flat.unary, labels, seeds, chosen - self._flat.offsets[seeds], KICK_NODES, random
        )
        changed = np.flatnonzero(labels != self.labels)
        return len(changed) > 0 and self._accept(changed, labels[changed])

    def _perturb_dual(self, part_budget: Callable[[float], Budget]) -> bool:
        """Decode the dual at perturbed costs and prices, polish the choice and recombine it with the incumbent."""
        assert self._dual is not None, "this neighbourhood exists only with a dual"
        scale = self._draw(PERTURBATIONS)
        prices = self.guide.prices * np.exp(scale * self._random.normal(size=len(self.guide.prices)))
        costs = self._flat.unary * np.exp(scale * self._random.normal(size=len(self._flat.unary)))
        labels = self._dual.decode_at(prices, SETTLING_ROUNDS, costs)
        self._polisher.offer(self.labels)
        self._polisher.polish(labels, prices, part_budget(PERTURB_SECONDS).spent)
        if self._polisher.labels is None or self._polisher.cost >= self.cost:
            return False
        self.adopt(self._polisher.labels)
        return True

    def _solve_subproblem(self, part_budget: Callable[[float], Budget]) -> bool:
        """Free a set of nodes and solve its subproblem exactly, adapting the size to the target time."""
        share, seconds = self._draw(SHARES), self._draw(SECONDS)
        size = self._sizes.get((share, seconds), FIRST_SIZE * seconds)
        guide = self.guide
        permitted: Bools = guide.reduced_costs <= share * (self.cost - guide.bound)
        permitted[self._flat.offsets[:-1] + self.labels] = True
        nodes = self._grow(guide, permitted, size)
        if len(nodes) == 0:
            return False
        kept = [np.flatnonzero(permitted[self._flat.offsets[n] : self._flat.offsets[n + 1]]) for n in nodes.tolist()]
        subproblem = subproblem_of(self._field, self._memory, self.labels, self._profile, nodes, kept)
        budget = part_budget(TIME_FACTOR * seconds)
        begin = time.monotonic()
        found = solve(subproblem, budget, guide.prices)
        if math.isfinite(budget.remaining):
            size *= min(max(math.sqrt(seconds / (time.monotonic() - begin)), SMALLER), LARGER)
            self._sizes[share, seconds] = min(max(size, LEAST_SIZE), LARGEST_SIZE)
        return found is not None and self._accept(nodes, found)

    def recombine(self, labels: Ints, part_budget: Callable[[float], Budget]) -> None:
        """Recombine the incumbent with another choice within the limits, optimising where the two differ.

        Args:
            labels: The other choice; it becomes the incumbent if no recombination is cheaper.
            part_budget: As in `step`.
        """
        mine = self.labels
        nodes = np.flatnonzero(mine != labels)
        self.adopt(labels)
        if len(nodes):
            kept = [np.unique(pair) for pair in zip(mine[nodes], labels[nodes], strict=True)]
            subproblem = subproblem_of(self._field, self._memory, self.labels, self._profile, nodes, kept)
            found = solve(subproblem, part_budget(RECOMBINE_SECONDS))
            if found is not None:
                self._accept(nodes, found)

    def _draw(self, values: Sequence[T]) -> T:
        return values[int(self._random.integers(len(values)))]

    def _grow(self, guide: DualInformation, permitted: Bools, most: float) -> Ints:
        """Return nodes with about `most` labels and pairs of labels, grown over edges as far as free labels allow."""
        counts = np.add.reduceat(permitted.astype(np.int64), self._flat.offsets[:-1])
        free = np.flatnonzero(counts > 1)
        if len(free) == 0:
            return free
        if self._random.random() < SHARED_SEGMENT_SHARE:
            free = self._competing_nodes(guide, free)
        weights = guide.reduced_costs[self._flat.offsets[free] + self.labels[free]]
        weights = weights + SEED_FLOOR * max(self.cost - guide.bound, 1e-300)
        seeds = self._random.choice(free, min(len(free), MOST_SEEDS), replace=False, p=weights / weights.sum()).tolist()
        seeds.reverse()
        count = counts.tolist()
        nodes: list[int] = []
        inside: set[int] = set()
        size = 0
        frontier = [seeds.pop() for _ in range(min(self._draw(SEEDS), len(seeds)))]
        while size < most and (frontier or seeds):
            if not frontier:
                frontier.append(seeds.pop())
            k = int(self._random.integers(len(frontier)))
            frontier[k], frontier[-1] = frontier[-1], frontier[k]
            node = frontier.pop()
            if node in inside or count[node] < 2:
                continue
            inside.add(node)
            nodes.append(node)
            size += count[node]
            for other in sorted(self._field.adjacent[node]):
                if other in inside:
                    size += count[node] * count[other]
                else:
                    frontier.append(other)
        return np.array(nodes, np.int64)

    def _competing_nodes(self, guide: DualInformation, free: Ints) -> Ints:
        """Return the nodes of `free` that use one segment, drawn by its price; all if there is none."""
        worth = guide.prices * self._memory.scales
        if not worth.any():
            return free
        t = int(self._random.choice(len(worth), p=worth / worth.sum()))
        memory = self._memory
        users = np.zeros(self._flat.num_nodes, bool)
        users[self._users[(memory.first <= t) & (t < memory.last)]] = True
        return free[users[free]] if users[free].any() else free

    def _accept(self, nodes: Ints, found: Ints) -> bool:
        """Accept labels of `nodes` unless they are worse or break a limit; return whether the cost fell."""
        labels = self.labels.copy()
        labels[nodes] = found
        cost = self._flat.cost(labels)
        profile = self._memory.profile(indicator(self._flat.offsets, labels))
        if cost > self.cost or (profile > self._memory.limits).any():
            return False
        gained = cost < self.cost
        self.labels, self.cost, self._profile = labels, cost, profile
        return gained

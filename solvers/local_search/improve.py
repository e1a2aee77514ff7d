"""Search from a choice that fits: parts are freed and solved exactly, labels forced, or the dual chooses afresh.

The way that has gained most per second of late gets most of the time.
Which labels a free node may take, and where a part is looked for, is read off the dual: labels that cost much above the
bound are left out, and a part grows, edge by edge, from a node whose present label costs most above it. Parts that grow
from several nodes grow from such as use what is scarce at one time, which only they can trade.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import Relaxation
from autopar.solvers.local_search.neighbourhood import carve, solve
from autopar.solvers.local_search.polish import Polisher
from autopar.solvers.model.csr import Flat, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Field, Floats, Ints

Bools = NDArray[np.bool_]
T = TypeVar("T")

SHARES = (0.03, 0.1, 0.3, 1.0)
"""How far above the bound a label may be, as a share of the gap; each part draws one."""
SECONDS = (0.1, 0.4, 1.5)
"""How long a part should take; each part draws one. Short parts gain more at first, long ones in the end."""
FIRST_SIZE = 10_000.0
"""Labels and pairs of labels in the first part of a second."""
LEAST_SIZE, LARGEST_SIZE = 200.0, 1e6
LARGER, SMALLER = 2.0, 0.7
"""Most and least factor on the size of parts of one kind after one that took less, or more, than it should."""
LONGEST = 3.0
"""What a part may take, in parts of what it should."""
JOIN_SECONDS = 2.0
"""What mixing two choices may take."""
KICKS, KICK_NODES = 100, 100
"""Labels forced in one go, and nodes of a tree that follows."""
OFF = (0.001, 0.01, 0.1, 0.3)
"""By how much costs and prices are off, relatively, when the dual chooses afresh; each time draws one."""
SETTLING_ROUNDS = 5
"""Sweeps before that choice."""
AFRESH_SECONDS = 5.0
"""What polishing it may take."""
CURIOSITY = 0.3
"""Part of searches whose way is drawn."""
FORGETTING = 0.8
"""Weight of the past in what a way has gained."""
SEEDS = (1, 1, 3, 10)
"""Nodes that a part grows from at once; each part draws one. Far ones can trade what a limit leaves."""
WINDOWS = 0.5
"""Share of parts whose seeds all use what is scarce at one time, so that they can trade it."""
MOST_SEEDS = 1000
SEED_FLOOR = 1e-4
"""Weight of a node as a seed whose label does not cost more than the bound, in parts of the gap."""


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """What the dual says of labels.

    Attributes:
        bound: A lower bound on the optimum.
        rises: Per label, a lower bound on how far above `bound` a choice with it costs.
        prices: Per segment, the price of use that proves this.
    """

    bound: float
    rises: Floats
    prices: Floats


class _Way:
    """A way to search, and what it has gained per second of late.

    Attributes:
        search: Does it once.
    """

    def __init__(self, search: Callable[[Callable[[float], Budget]], bool]) -> None:
        self.search = search
        self._gained = self._seconds = 0.0

    def note(self, gain: float, seconds: float) -> None:
        """Take note of what one search has brought."""
        self._gained = FORGETTING * self._gained + gain
        self._seconds = FORGETTING * self._seconds + seconds

    def rate(self) -> float:
        """Return the gain per second; infinity before the first search."""
        return self._gained / self._seconds if self._seconds > 0 else math.inf


class Improver:
    """A choice that fits, and the search that makes it cheaper.

    Attributes:
        labels: The choice.
        cost: Its cost.
        parts: Parts solved so far.
        guide: What the dual says; a better one may be put in its place at any time.
    """

    def __init__(
        self,
        field: Field,
        flat: Flat,
        memory: FlatMemory,
        labels: Ints,
        guide: Guide,
        seed: int,
        relaxation: Relaxation | None = None,
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
        self._relaxation = relaxation
        self._polisher = Polisher(flat, memory, seed)
        self._owners = np.repeat(np.arange(flat.num_nodes), np.diff(flat.offsets))
        self._users = np.repeat(np.arange(flat.num_nodes), np.diff(memory.node_at))
        self._ways = [_Way(self._part), _Way(self._kicks)]
        if relaxation is not None:
            self._ways.append(_Way(self._afresh))

    def adopt(self, labels: Ints) -> None:
        """Go on from another choice that fits."""
        self.labels = labels.copy()
        self.cost = self._flat.cost(labels)
        self._profile = self._memory.profile(indicator(self._flat.offsets, labels))

    def step(self, part_budget: Callable[[float], Budget]) -> bool:
        """Search on in the way that has gained most per second of late; return whether the choice has become cheaper.

        Args:
            part_budget: Gives a budget of so many seconds. If it has no end, all that depends on time is drawn instead.
        """
        self.parts += 1
        timed = math.isfinite(part_budget(0.0).remaining)
        way = self._draw(self._ways)
        if timed and self._random.random() > CURIOSITY:
            way = max(self._ways, key=_Way.rate)
        before, begin = self.cost, time.monotonic()
        gained = way.search(part_budget)
        way.note(before - self.cost, time.monotonic() - begin)
        return gained

    def _kicks(self, _part_budget: Callable[[float], Budget]) -> bool:
        """Force labels that the bound leaves open, and let the nodes around follow."""
        room = self._draw(SHARES) * (self.cost - self.guide.bound)
        permitted = np.flatnonzero(self.guide.rises <= room)
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
        return len(changed) > 0 and self._take(changed, labels[changed])

    def _afresh(self, part_budget: Callable[[float], Budget]) -> bool:
        """Polish what the dual chooses at costs and prices that are a little off, and mix it with the choice."""
        assert self._relaxation is not None, "it is a way only if there is a dual"
        off = self._draw(OFF)
        prices = self.guide.prices * np.exp(off * self._random.normal(size=len(self.guide.prices)))
        costs = self._flat.unary * np.exp(off * self._random.normal(size=len(self._flat.unary)))
        labels = self._relaxation.settle(prices, SETTLING_ROUNDS, costs)
        self._polisher.offer(self.labels)
        self._polisher.look(labels, prices, part_budget(AFRESH_SECONDS).spent)
        if self._polisher.labels is None or self._polisher.cost >= self.cost:
            return False
        self.adopt(self._polisher.labels)
        return True

    def _part(self, part_budget: Callable[[float], Budget]) -> bool:
        """Solve one part exactly."""
        share, seconds = self._draw(SHARES), self._draw(SECONDS)
        size = self._sizes.get((share, seconds), FIRST_SIZE * seconds)
        guide = self.guide
        permitted: Bools = guide.rises <= share * (self.cost - guide.bound)
        permitted[self._flat.offsets[:-1] + self.labels] = True
        nodes = self._grow(guide, permitted, size)
        if len(nodes) == 0:
            return False
        kept = [np.flatnonzero(permitted[self._flat.offsets[n] : self._flat.offsets[n + 1]]) for n in nodes.tolist()]
        piece = carve(self._field, self._memory, self.labels, self._profile, nodes, kept)
        budget = part_budget(LONGEST * seconds)
        begin = time.monotonic()
        found = solve(piece, budget)
        if math.isfinite(budget.remaining):
            size *= min(max(math.sqrt(seconds / (time.monotonic() - begin)), SMALLER), LARGER)
            self._sizes[share, seconds] = min(max(size, LEAST_SIZE), LARGEST_SIZE)
        return found is not None and self._take(nodes, found)

    def join(self, labels: Ints, part_budget: Callable[[float], Budget]) -> None:
        """Go on from the best mixture of the choice with another one that fits.

        Args:
            labels: The other choice; it is the one to go on from if no mixture is cheaper.
            part_budget: As in `step`.
        """
        mine = self.labels
        nodes = np.flatnonzero(mine != labels)
        self.adopt(labels)
        if len(nodes):
            kept = [np.unique(pair) for pair in zip(mine[nodes], labels[nodes], strict=True)]
            piece = carve(self._field, self._memory, self.labels, self._profile, nodes, kept)
            found = solve(piece, part_budget(JOIN_SECONDS))
            if found is not None:
                self._take(nodes, found)

    def _draw(self, values: Sequence[T]) -> T:
        return values[int(self._random.integers(len(values)))]

    def _grow(self, guide: Guide, permitted: Bools, most: float) -> Ints:
        """Return a part with about `most` labels and pairs of labels, connected as far as permitted labels allow."""
        counts = np.add.reduceat(permitted.astype(np.int64), self._flat.offsets[:-1])
        free = np.flatnonzero(counts > 1)
        if len(free) == 0:
            return free
        if self._random.random() < WINDOWS:
            free = self._together(guide, free)
        weights = guide.rises[self._flat.offsets[free] + self.labels[free]]
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

    def _together(self, guide: Guide, free: Ints) -> Ints:
        """Return those of some nodes that use what is scarce at one time, drawn by its price; all if there are none."""
        worth = guide.prices * self._memory.scales
        if not worth.any():
            return free
        t = int(self._random.choice(len(worth), p=worth / worth.sum()))
        memory = self._memory
        users = np.zeros(self._flat.num_nodes, bool)
        users[self._users[(memory.first <= t) & (t < memory.last)]] = True
        return free[users[free]] if users[free].any() else free

    def _take(self, nodes: Ints, found: Ints) -> bool:
        """Adopt labels of `nodes` unless rounding hid that they are worse; return whether they are cheaper."""
        labels = self.labels.copy()
        labels[nodes] = found
        cost = self._flat.cost(labels)
        profile = self._memory.profile(indicator(self._flat.offsets, labels))
        if cost > self.cost or (profile > self._memory.limits).any():
            return False
        gained = cost < self.cost
        self.labels, self.cost, self._profile = labels, cost, profile
        return gained

"""Choices of the dual made to fit and made cheap: repair, fast descent over trees, and the best mixture with the best.

Neighbouring iterates of the dual choose differently where labels are almost tied; each of them is a start of its own.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.solvers.bounds.lagrangian_dual import UNPRICED_ROUNDS, WINDOW, Relaxation, peaks
from autopar.solvers.local_search.tree_descent import LOOKS, Trees
from autopar.solvers.model.csr import Flat, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Floats, Ints

FIRST_ROUND = UNPRICED_ROUNDS + WINDOW
"""Rounds before the dual's choices are looked at: without prices they are far from what fits."""
NODES = 100
"""Nodes of a tree."""
CHUNK, CHUNK_SHARE = 200, 1 / 40
"""Trees between two looks at the clock, at least, and in parts of the nodes, as such a look goes over all of them."""
FIRST_RISE, RISE_GROWTH, RISES = 1e-3, 1.5, 40
"""What is added to the price of a broken limit, in parts of the cost: first, its growth, and how often."""


class Polisher:
    """The best choice made of those of the dual.

    Attributes:
        labels: The choice, which fits; None before the first.
        cost: Its cost; infinity before the first.
        seconds: Seconds spent in `look`.
        trees: What it descends over.
    """

    def __init__(self, flat: Flat, memory: FlatMemory, seed: int) -> None:
        self.labels: Ints | None = None
        self.cost = math.inf
        self.seconds = 0.0
        self._flat = flat
        self._memory = memory
        self.trees = Trees(flat, memory)
        self._chunk = max(CHUNK, int(CHUNK_SHARE * flat.num_nodes))
        self._random = np.random.default_rng(seed)
        self._usual_cost: float | None = None
        self._owners = np.repeat(np.arange(flat.num_nodes), np.diff(flat.offsets))

    def thrifty(self) -> Ints:
        """Return the labels that use least over all segments, each in its scale."""
        used = self._memory.priced(1.0 / self._memory.scales, len(self._flat.unary))
        order = np.lexsort((self._flat.unary, used, self._owners))
        return order[self._flat.offsets[:-1]] - self._flat.offsets[:-1]

    def offer(self, labels: Ints) -> bool:
        """Take a choice if it fits and is cheaper than the best; return whether it fits."""
        if not self._fits(labels):
            return False
        cost = self._flat.cost(labels)
        if cost < self.cost:
            self.labels, self.cost = labels.copy(), cost
        return True

    def look(self, labels: Ints, prices: Floats, stop: Callable[[], bool]) -> None:
        """Make a choice fit and as cheap as it becomes, mix it with the best one, and take what is cheaper.

        Args:
            labels: The choice.
            prices: Of use, to begin a repair with.
            stop: Polled; what fits is taken even then.
        """
        began = time.monotonic()
        self._look(labels, prices, stop)
        self.seconds += time.monotonic() - began

    def _look(self, labels: Ints, prices: Floats, stop: Callable[[], bool]) -> None:
        found = labels.copy()
        if not self._repair(found, prices, stop):
            return
        best = self.labels
        self._descend(self._flat.unary, found, self._all_open(), stop, offering=True)
        self.offer(found)
        if best is not None and not stop():
            self._mix(best, found, stop)

    def start(self, stop: Callable[[], bool]) -> None:
        """Look at the labels of least use, if they fit: something to have until the dual knows more."""
        labels = self.thrifty()
        if self._fits(labels):
            self.look(labels, np.zeros(len(self._memory.limits)), stop)

    def follow(self, relaxation: Relaxation, stop: Callable[[], bool]) -> None:
        """Look at what the dual chooses while another thread improves it."""
        self.start(stop)
        seen = 0
        while not stop():
            if relaxation.rounds == seen or relaxation.rounds < FIRST_ROUND:
                time.sleep(0.01)
                continue
            seen = relaxation.rounds
            self.look(relaxation.labels.copy(), relaxation.prices, stop)

    def _mix(self, first: Ints, second: Ints, stop: Callable[[], bool]) -> None:
        """Take, in each part where two choices differ, the better one; go on from there."""
        differ = np.flatnonzero(first != second)
        if len(differ) == 0:
            return
        cheaper, other = (first, second) if self._flat.cost(first) <= self._flat.cost(second) else (second, first)
        mixed = cheaper.copy()
        unary = np.full(len(self._flat.unary), np.inf)
        for labels in (cheaper, other):
            places = self._flat.offsets[:-1] + labels
            unary[places] = self._flat.unary[places]
        opened = np.zeros(self._flat.num_nodes, np.int64)
        opened[differ] = LOOKS
        self._descend(unary, mixed, opened, stop)
        opened[differ] = LOOKS
        self._descend(self._flat.unary, mixed, opened, stop)
        self.offer(mixed)

    def _all_open(self) -> Ints:
        return np.full(self._flat.num_nodes, LOOKS)

    def _descend(
        self, unary: Floats, labels: Ints, opened: Ints, stop: Callable[[], bool], *, offering: bool = False
    ) -> None:
        """Make a choice cheaper, limits kept that are, until no tree around an open node does."""
        while not stop():
            seeds = np.flatnonzero(opened)
            if len(seeds) == 0:
                return
            chosen = self._random.permutation(seeds)[: self._chunk]
            self.trees.descend(unary, labels, opened, chosen, NODES, int(self._random.integers(1 << 30)))
            if offering:
                self.offer(labels)

    def _repair(self, labels: Ints, prices: Floats, stop: Callable[[], bool]) -> bool:
        """Make the limits that are broken dearer until none is; return whether that came about."""
        if not len(prices):
            return True  # there are no limits
        prices = prices.copy()
        rise = FIRST_RISE * (abs(self._flat.cost(labels) - self._flat.constant) + self._usual())
        for _ in range(RISES):
            if stop():
                return False
            excess = (self._profile(labels) - self._memory.limits) / self._memory.scales
            broken = peaks(excess, len(excess))
            if len(broken) == 0:
                return True
            prices[broken] += rise / self._memory.scales[broken]
            rise *= RISE_GROWTH
            unary = self._flat.unary + self._memory.priced(prices, len(self._flat.unary))
            opened = np.zeros(self._flat.num_nodes, np.int64)
            opened[self._users(broken)] = LOOKS
            self._descend(unary, labels, opened, stop)
        return self._fits(labels)

    def _usual(self) -> float:
        """Return what a label or a pair usually costs, above 0."""
        if self._usual_cost is None:
            costs = np.abs(np.concatenate([self._flat.unary, self._flat.tables]))
            self._usual_cost = float(np.median(costs[costs > 0])) if costs.any() else 1.0  # a choice may cost nothing
        return self._usual_cost

    def _users(self, segments: Ints) -> Ints:
        """Return the nodes with a usage in some of the segments."""
        memory = self._memory
        before = np.zeros(len(memory.limits) + 1, np.int64)
        before[segments + 1] = 1
        np.cumsum(before, out=before)
        owners = np.repeat(np.arange(self._flat.num_nodes), np.diff(memory.node_at))
        return np.unique(owners[before[memory.last] > before[memory.first]])

    def _profile(self, labels: Ints) -> Floats:
        return self._memory.profile(indicator(self._flat.offsets, labels))

    def _fits(self, labels: Ints) -> bool:
        return bool((self._profile(labels) <= self._memory.limits).all())

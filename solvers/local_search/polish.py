"""Polishing of decoded choices: repair, descent over trees, and recombination with the incumbent (cf. Rothberg 2007).

Successive iterates of the dual decode differently where labels are nearly tied, so each gives a new start.
"""

import math
import time
from collections.abc import Callable
from threading import Lock

import numpy as np

from autopar.solvers.bounds.lagrangian_dual import UNPRICED_ROUNDS, WINDOW, LagrangianDual, peaks
from autopar.solvers.local_search.tree_descent import VISITS, TreeDescent
from autopar.solvers.model.csr import FlatField, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Floats, Ints

FIRST_ROUND = UNPRICED_ROUNDS + WINDOW
"""Rounds before the dual's choices are polished: without prices they are far from feasible."""
NODES = 100
"""Most nodes of a tree."""
CHUNK, CHUNK_SHARE = 200, 1 / 40
"""Trees between two polls of the clock: at least this many, and this share of the nodes, as a poll visits all nodes."""
FIRST_RISE, RISE_GROWTH, RISES = 1e-3, 1.5, 40
"""Price increase of a broken limit relative to the cost: the first, the growth factor, and the number of increases."""


class Polisher:
    """Heuristic: makes decoded choices feasible and cheaper, and keeps the best.

    Attributes:
        labels: The incumbent, within the limits; None before the first.
        cost: Its cost; infinity before the first.
        seconds: Seconds spent in `polish`.
        trees: The descent over trees.
        turn: Held by the thread that polishes.
    """

    def __init__(self, flat: FlatField, memory: FlatMemory, seed: int) -> None:
        self.labels: Ints | None = None
        self.cost = math.inf
        self.seconds = 0.0
        self._flat = flat
        self._memory = memory
        self.trees = TreeDescent(flat, memory)
        self.turn = Lock()
        self._chunk = max(CHUNK, int(CHUNK_SHARE * flat.num_nodes))
        self._random = np.random.default_rng(seed)
        self._median: float | None = None
        self._owners = np.repeat(np.arange(flat.num_nodes), np.diff(flat.offsets))

    def least_use_labels(self) -> Ints:
        """Return the labels of least use summed over all segments, each in its scale; cost breaks ties."""
        used = self._memory.priced(1.0 / self._memory.scales, len(self._flat.unary))
        order = np.lexsort((self._flat.unary, used, self._owners))
        return order[self._flat.offsets[:-1]] - self._flat.offsets[:-1]

    def offer(self, labels: Ints) -> bool:
        """Make `labels` the incumbent if it is cheaper and within the limits; return whether it is within them."""
        if not self._fits(labels):
            return False
        cost = self._flat.cost(labels)
        if cost < self.cost:
            self.labels, self.cost = labels.copy(), cost
        return True

    def polish(self, labels: Ints, prices: Floats, stop: Callable[[], bool]) -> None:
        """Repair a choice, descend, recombine it with the incumbent, and keep what is cheaper.

        Args:
            labels: The choice.
            prices: Prices of use to start the repair from.
            stop: Polled; a choice within the limits is kept even then.
        """
        began = time.monotonic()
        self._polish(labels, prices, stop)
        self.seconds += time.monotonic() - began

    def _polish(self, labels: Ints, prices: Floats, stop: Callable[[], bool]) -> None:
        found = labels.copy()
        if not self._repair(found, prices, stop):
            return
        best = self.labels
        self._descend(self._flat.unary, found, self._all_open(), stop, offering=True)
        self.offer(found)
        if best is not None and not stop():
            self._recombine(best, found, stop)

    def polish_least_use(self, stop: Callable[[], bool]) -> None:
        """Polish the choice of least use if it is within the limits, to have an incumbent before the dual converges."""
        labels = self.least_use_labels()
        if self._fits(labels):
            self.polish(labels, np.zeros(len(self._memory.limits)), stop)

    def polish_iterates(self, dual: LagrangianDual, stop: Callable[[], bool], pause: Callable[[], bool]) -> None:
        """Polish the decoded choices of a dual that another thread improves.

        Args:
            dual: The dual.
            stop: Polled; ends the polishing.
            pause: Polled; while it is true another thread may take its turn.
        """
        with self.turn:
            self.polish_least_use(stop)
        seen = 0
        while not stop():
            if dual.rounds == seen or dual.rounds < FIRST_ROUND or pause():
                time.sleep(0.01)
                continue
            seen = dual.rounds
            with self.turn:
                self.polish(dual.labels.copy(), dual.prices, stop)

    def _recombine(self, first: Ints, second: Ints, stop: Callable[[], bool]) -> None:
        """Recombine two choices: descend with only their two labels per node, then with all labels."""
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
        opened[differ] = VISITS
        self._descend(unary, mixed, opened, stop)
        opened[differ] = VISITS
        self._descend(self._flat.unary, mixed, opened, stop)
        self.offer(mixed)

    def _all_open(self) -> Ints:
        return np.full(self._flat.num_nodes, VISITS)

    def _descend(
        self, unary: Floats, labels: Ints, opened: Ints, stop: Callable[[], bool], *, offering: bool = False
    ) -> None:
        """Descend over trees around open nodes until none lowers the cost; limits kept stay kept."""
        while not stop():
            seeds = np.flatnonzero(opened)
            if len(seeds) == 0:
                return
            chosen = self._random.permutation(seeds)[: self._chunk]
            self.trees.descend(unary, labels, opened, chosen, NODES, int(self._random.integers(1 << 30)))
            if offering:
                self.offer(labels)

    def _repair(self, labels: Ints, prices: Floats, stop: Callable[[], bool]) -> bool:
        """Raise the prices of broken limits and descend, until none is broken; return whether that succeeded."""
        if not len(prices):
            return True  # there are no limits
        prices = prices.copy()
        rise = FIRST_RISE * (abs(self._flat.cost(labels) - self._flat.constant) + self._median_cost())
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
            opened[self._users(broken)] = VISITS
            self._descend(unary, labels, opened, stop)
        return self._fits(labels)

    def _median_cost(self) -> float:
        """Return the median nonzero cost of labels and pairs, above 0."""
        if self._median is None:
            costs = np.abs(np.concatenate([self._flat.unary, self._flat.tables]))
            self._median = float(np.median(costs[costs > 0])) if costs.any() else 1.0  # all costs may be 0
        return self._median

    def _users(self, segments: Ints) -> Ints:
        """Return the nodes with a usage in one of the segments."""
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

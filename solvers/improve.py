"""Large-neighbourhood search: free a part of a choice that fits, solve it exactly, keep what is not worse.

Which labels a free node may take, and where a part is looked for, is read off the dual: labels that cost much above the
bound are left out, and a part grows, edge by edge, from a node whose present label costs most above it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.base import Budget
from autopar.solvers.field import Field, Floats, Ints
from autopar.solvers.flat import Flat, FlatMemory, indicator
from autopar.solvers.neighbourhood import carve, solve

Bools = NDArray[np.bool_]

FIRST_SIZE = 1000.0
"""Pairs of labels in the tables of the first part."""
LEAST_SIZE, LARGEST_SIZE = 200.0, 1_000_000.0
PATIENCE = 40
"""Parts in a row without gain after which a part may take twice as long."""
FIRST_SECONDS, MOST_SECONDS = 0.1, 2.0
"""What a part should take at first, and may take at most."""
SHARES = (0.1, 0.3, 0.3, 1.0)
"""How far above the bound a label may be, as a share of the gap; each part draws one."""


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """What the dual says of labels.

    Attributes:
        bound: A lower bound on the optimum.
        rises: Per label, a lower bound on how far above `bound` a choice with it costs.
    """

    bound: float
    rises: Floats


class Improver:
    """A choice that fits, and the search that makes it cheaper.

    Attributes:
        labels: The choice.
        cost: Its cost.
        parts: Parts solved so far.
    """

    def __init__(self, field: Field, flat: Flat, memory: FlatMemory, labels: Ints, guide: Guide, seed: int) -> None:
        self.labels = labels.copy()
        self.cost = field.cost(labels.tolist())
        self.parts = 0
        self._field = field
        self._flat = flat
        self._memory = memory
        self._guide = guide
        self._random = np.random.default_rng(seed)
        self._profile = memory.profile(indicator(flat.offsets, labels))
        self._free = np.flatnonzero(np.diff(flat.offsets) > 1)
        self._size = FIRST_SIZE
        self._seconds = FIRST_SECONDS
        self._since_gain = 0

    def adopt(self, labels: Ints) -> None:
        """Go on from another choice that fits."""
        self.labels = labels.copy()
        self.cost = self._field.cost(labels.tolist())
        self._profile = self._memory.profile(indicator(self._flat.offsets, labels))

    def step(self, part_budget: Callable[[float], Budget]) -> bool:
        """Solve one part; return whether the choice has become cheaper.

        Args:
            part_budget: Gives a budget of so many seconds.
        """
        self.parts += 1
        permitted = self._permitted()
        nodes = self._grow(permitted)
        kept = [np.flatnonzero(permitted[self._flat.offsets[n] : self._flat.offsets[n + 1]]) for n in nodes.tolist()]
        piece = carve(self._field, self._memory, self.labels, self._profile, nodes, kept)
        budget = part_budget(min(MOST_SECONDS, 5 * self._seconds))
        begin = budget.remaining
        found = solve(piece, budget)
        seconds = begin - budget.remaining if math.isfinite(begin) else self._seconds
        self._size *= 1.05 if seconds < self._seconds else 0.9
        self._size = min(max(self._size, LEAST_SIZE), LARGEST_SIZE)
        gained = found is not None and self._take(nodes, found)
        self._since_gain = 0 if gained else self._since_gain + 1
        if self._since_gain >= PATIENCE:
            self._since_gain = 0
            self._seconds = min(2 * self._seconds, MOST_SECONDS / 2)
        return gained

    def _permitted(self) -> Bools:
        """Return per label whether it may be taken; the present ones always may."""
        share = SHARES[int(self._random.integers(len(SHARES)))]
        permitted: Bools = self._guide.rises <= share * (self.cost - self._guide.bound)
        permitted[self._flat.offsets[:-1] + self.labels] = True
        return permitted

    def _grow(self, permitted: Bools) -> Ints:
        """Return a connected part with about the present size of tables."""
        counts = np.add.reduceat(permitted.astype(np.int64), self._flat.offsets[:-1]).tolist()
        rises = self._guide.rises[self._flat.offsets[:-1] + self.labels][self._free]
        weights = rises + 1e-4 * max(self.cost - self._guide.bound, 1e-300)
        seed = int(self._random.choice(self._free, p=weights / weights.sum()))
        nodes, inside, size = [seed], {seed}, 0
        frontier = sorted(self._field.adjacent[seed])
        while frontier and size < self._size:
            k = int(self._random.integers(len(frontier)))
            frontier[k], frontier[-1] = frontier[-1], frontier[k]
            node = frontier.pop()
            if node in inside or counts[node] < 2:
                continue
            inside.add(node)
            nodes.append(node)
            for other in sorted(self._field.adjacent[node]):
                if other in inside:
                    size += counts[node] * counts[other]
                else:
                    frontier.append(other)
        return np.array(nodes, np.int64)

    def _take(self, nodes: Ints, found: Ints) -> bool:
        """Adopt labels of `nodes` unless rounding hid that they are worse; return whether they are cheaper."""
        labels = self.labels.copy()
        labels[nodes] = found
        cost = self._field.cost(labels.tolist())
        profile = self._memory.profile(indicator(self._flat.offsets, labels))
        if cost > self.cost or (profile > self._memory.limits).any():
            return False
        gained = cost < self.cost
        self.labels, self.cost, self._profile = labels, cost, profile
        return gained

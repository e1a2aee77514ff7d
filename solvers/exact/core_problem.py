"""Proof by core problems of growing size: labels of small reduced cost as a local polytope with lazy limits.

    optimum  >=  min(optimum of core(r), bound + r)

where core(r) holds the labels whose reduced cost above `bound` is at most r, since any other choice costs more than
bound + r (core problems: Balas and Zemel 1980, Pisinger 1997; rising ceilings: Klein and Scholl 1999). If core(r) has a
choice that costs at most bound + r, it is optimal; else the bound rises to bound + r and the core grows. Once r is the
gap, the core holds every choice that is cheaper than the incumbent.

Which core is solved next follows its size and the seconds that a core of this size is predicted to take: a power law,
corrected by the cores solved before. After one that was given up, only much smaller ones are tried. If none is worth
it, the largest is, whatever its prediction, for several times the seconds of those given up, once the search has found
nothing for that long.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.backends import highs, lazy_rows
from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import DualInformation
from autopar.solvers.model.csr import FlatField
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.dominance import Flags, undominated
from autopar.solvers.reductions.elimination import eliminate
from autopar.solvers.reductions.resource_fixing import fitting_labels

TOLERANCE = 2 * OPTIMALITY_TOLERANCE
"""Relative tolerance within which a bound has reached a ceiling: bounds of whole costs are lowered by a quarter."""
BACK_END_ERROR = OPTIMALITY_TOLERANCE / 2
"""Relative error of a bound by branch and bound, which stops at half of this: a proof has to stay within the whole."""
BASE_ENTRIES, BASE_SECONDS, POWER = 50_000, 8.0, 1.5
"""Seconds of a core: `BASE_SECONDS` at `BASE_ENTRIES` table entries, growing with this power of the entries."""
LEAST_FACTOR, LARGEST_FACTOR = 0.1, 100.0
"""Least and largest correction of the predicted seconds by what cores took."""
LEARNING = 0.5
"""Weight of the last core in the correction."""
ROOM_STEP = 2.0
"""Factor between two rooms that are considered."""
ROOMS = 16
"""Number of rooms that are considered, from the gap downwards."""
LEAST_RISE = 0.03
"""Least rise of the bound that is worth a core, as a share of the gap."""
FIRST_SHARE = 0.02
"""Share of the available seconds that the first core is predicted to take."""
GROWTH = 3.0
"""Factor on the predicted seconds from one core to the next, so that all cores together take at most half as long again
as the last."""
FEWER = 0.6
"""Entries relative to a core that was given up, below which those of the next one must be."""
PATIENCE, LEAST_PATIENCE = 3.0, 3.0
"""Seconds of the largest core, as a factor on the longest core that was given up and at least, if no other is worth it:
its relaxation bounds the optimum even where branch and bound does not end. All that are given up together waste at most
half of what the last one takes."""
OVERRUN = 3.0
"""Factor on its predicted seconds, plus one second, after which a core is given up."""


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """A core problem.

    Attributes:
        guide: The dual information it was made from.
        ceiling: Cost above which it says nothing.
        kept: Labels of each node.
        entries: Entries of its tables.
        seconds: Predicted seconds.
        most_seconds: Seconds after which it is given up.
    """

    guide: DualInformation
    ceiling: float
    kept: tuple[Ints, ...]
    entries: int
    seconds: float
    most_seconds: float


class CoreProver:
    """Chooses core problems and solves them.

    Args:
        field: Costs of the nodes.
        memory: Limits on the nodes.
        flat: `field`, softened, in arrays.
        budget: Receives bounds.
        offer: Called with labels of `field`; returns whether they are within the limits.
    """

    def __init__(
        self,
        field: Field,
        memory: Memory,
        flat: FlatField,
        budget: Budget,
        offer: Callable[[Sequence[int]], bool],
    ) -> None:
        self._field = field
        self._memory = memory
        self._flat = flat
        self._budget = budget
        self._offer = offer
        self._factor = 1.0
        self._last_seconds = 0.0
        self._too_many = math.inf
        self._given_up_seconds = 0.0
        self._violated_times: set[int] = set()
        self._magnitude = float(np.abs(flat.tables).max(initial=0.0))

    def core(self, guide: DualInformation, seconds: float) -> Core | None:
        """Return the next core to solve in `seconds`; None if every core that could raise the bound takes longer."""
        found = self._next_core(guide, seconds)
        longer = max(PATIENCE * self._given_up_seconds, LEAST_PATIENCE)
        if found is None and longer <= min(seconds, self._budget.stagnated):
            self._too_many = math.inf
            found = self._next_core(guide, math.inf, longer)
        return found

    def _next_core(self, guide: DualInformation, seconds: float, most_seconds: float | None = None) -> Core | None:
        """Return the core that is predicted to take the right share of `seconds`; None if there is none.

        Args:
            guide: Dual information.
            seconds: Seconds that are left; with infinitely many the largest core is returned.
            most_seconds: Seconds after which the core is given up; by default they follow from the prediction.
        """
        cost, known = self._budget.upper, self._budget.bound
        if math.isinf(cost):
            cost = guide.bound + max(float(guide.reduced_costs.max(initial=0.0)), abs(guide.bound))
        gap = cost - guide.bound
        slack = OPTIMALITY_TOLERANCE * abs(guide.bound) / 4 + 1e-12 * self._magnitude
        smallest = max(FIRST_SHARE * seconds, GROWTH * self._last_seconds) if math.isfinite(seconds) else math.inf
        found = None
        for step in range(ROOMS):
            room = gap / ROOM_STEP**step
            if guide.bound + room <= known + max(TOLERANCE * abs(known), LEAST_RISE * (cost - known)):
                break
            kept = guide.reduced_costs <= room + slack
            entries = self._entries(kept)
            predicted = self._factor * BASE_SECONDS * (entries / BASE_ENTRIES) ** POWER
            if predicted > seconds or entries >= self._too_many:
                continue
            if found is not None and predicted < smallest:
                break  # the one before is the smallest that takes at least this long
            found = (room, kept, entries, predicted)
            if predicted <= smallest:
                break
        if found is None:
            return None
        room, kept, entries, predicted = found
        offsets = self._flat.offsets.tolist()
        labels = tuple(np.flatnonzero(kept[first:last]) for first, last in pairwise(offsets))
        most = OVERRUN * predicted + 1.0 if most_seconds is None else most_seconds
        return Core(guide, min(guide.bound + room, self._budget.upper), labels, entries, predicted, most)

    def solve(self, core: Core, should_stop: Callable[[], bool] | None = None) -> bool:
        """Solve a core; return whether the bound has reached its ceiling or the problem is solved.

        Relaxes: labels outside the core, up to its ceiling. Valid when: the guide's reduced costs are. Costs: linear
        programs on the core, then branch and bound.

        Args:
            core: The core.
            should_stop: Polled; a core that is stopped says nothing about the seconds of the next one.
        """
        budget = self._budget.limited_to(core.most_seconds)
        if should_stop is not None:
            budget = budget.stopped_by(should_stop)
        began = time.monotonic()
        programmed = self._minimise(core, budget)
        spent = time.monotonic() - began
        reached = core.ceiling - TOLERANCE * abs(core.ceiling)
        done = self._budget.bound >= reached or self._budget.targets_met()
        if done:
            self._last_seconds = spent
            if programmed:
                ratio = self._factor * max(spent, 1e-3) / max(core.seconds, 1e-9)
                factor = self._factor ** (1 - LEARNING) * ratio**LEARNING
                self._factor = min(max(factor, LEAST_FACTOR), LARGEST_FACTOR)
        elif should_stop is None or not should_stop():
            self._too_many = FEWER * core.entries
            self._given_up_seconds = max(self._given_up_seconds, spent)
        return done

    def _minimise(self, core: Core, budget: Budget) -> bool:
        """Minimise a core below its ceiling, after the reductions that its fewer labels permit.

        Returns:
            Whether a linear program was needed.
        """

        def report(bound: float) -> None:
            self._budget.raise_bound(min(bound, core.ceiling), BACK_END_ERROR)

        def prove() -> bool:
            self._budget.raise_bound(core.ceiling, 0.0)
            return False

        field = self._field.restrict(core.kept)
        if any(len(own) == 0 for own in core.kept) or not field.propagate():
            return prove()
        kept = [own[np.isfinite(unary)] for own, unary in zip(core.kept, field.unary, strict=True)]
        field = field.restrict([np.flatnonzero(np.isfinite(unary)) for unary in field.unary])
        memory = self._memory.restrict(kept)
        fitting = fitting_labels(memory, list(map(len, kept)))
        if any(len(own) == 0 for own in fitting):
            return prove()
        kept = [own[some] for own, some in zip(kept, fitting, strict=True)]
        field, memory = field.restrict(fitting), memory.restrict(fitting)
        if memory.is_infeasible():
            return prove()
        better = undominated(field, memory)
        kept = [own[some] for own, some in zip(kept, better, strict=True)]
        field, memory = field.restrict(better), memory.restrict(better)
        rest = eliminate(field, keep=memory.resource_users())

        def offer(labels: Sequence[int]) -> bool:
            return self._offer([int(own[label]) for own, label in zip(kept, rest.invert(labels), strict=True)])

        if not any(map(len, rest.field.unary)):  # elimination has solved it
            offer([0] * len(kept))
            report(rest.field.constant)
            return False
        self._violated_times |= set(self._priced_times(core.guide.prices))
        found = lazy_rows.minimise(
            rest.field,
            memory,
            budget,
            partial(highs.run, ceiling=core.ceiling),
            offer,
            report=report,
            violated_times=self._violated_times,
            cover_rounds=lazy_rows.COVER_ROUNDS,
            ceiling=lambda: min(core.ceiling, self._budget.upper),
        )
        if found is not None:
            report(self._budget.cost)
        return True

    def _priced_times(self, prices: Floats) -> list[int]:
        """Return the times whose limit has a price."""
        times: list[int] = self._memory.times[np.flatnonzero(prices > 0)].tolist()
        return times

    def _entries(self, kept: Flags) -> int:
        """Return the number of table entries of a core."""
        counts = np.add.reduceat(kept.astype(np.int64), self._flat.offsets[:-1])
        several = np.where(counts > 1, counts, 0)
        return int((several[self._flat.edges[:, 0]] * several[self._flat.edges[:, 1]]).sum() + several.sum())

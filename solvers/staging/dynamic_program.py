"""Staging problems, exactly: a dynamic program over pipelines under a cap on the slowest stage, searched over caps.

For a cap T let W(T) be the least end of all pipelines without a slower stage; W falls with T, and a step takes at least
W(T) + (m - 1) * (the least cap with this W). A range of caps is bisected: its lower bound is W at its upper end plus
(m - 1) times its lower end, and it is pruned if that is not below the incumbent. The enumeration of caps on the slowest
stage follows Alpa (Zheng et al. 2022), the interval bounds are ours.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.progress import never
from autopar.solvers.staging.staging_kernel import END, REST, bottleneck, pareto_suffixes, prefix_bounds
from autopar.staging import FloatArray, IntArray, Leg, Route, Staged, Staging

ROOM = 4
"""Initial capacity for Pareto pairs of each pipeline class; doubled until all fit."""

MOST_BYTES = 2**29
"""Memory limit of the Pareto pairs, in bytes; larger problems are cut off."""

ALIKE = 1e-9
"""Relative difference below which caps are equal: sums over equal blocks differ by rounding only."""


def solve(problem: Staging, cutoff: float = math.inf, stops: Callable[[], bool] = never) -> Staged:
    """Return the best route, within a relative error of `OPTIMALITY_TOLERANCE`.

    A problem that exceeds the memory limit is cut off and gets the bound 0. On an early stop the bound covers all caps,
    searched or not.

    Args:
        problem: The staging problem.
        cutoff: Value from which on routes need not be found; the bound if there is no better route.
        stops: Whether to stop now, with the best route so far.
    """
    coarse, unit = problem.in_units()
    search = _CapSearch(coarse, cutoff, stops)
    search.run()
    route = tuple(replace(leg, device=leg.device * unit) for leg in search.route)
    seconds = problem.value(route) if route else math.inf
    if search.cut:
        return Staged(route, seconds, 0.0)
    if search.left < math.inf:
        return Staged(route, seconds, search.left * (1 - OPTIMALITY_TOLERANCE))
    return Staged(route, seconds, seconds * (1 - OPTIMALITY_TOLERANCE) if route else search.floor)


class _CapSearch:
    """Best-first search over ranges of caps.

    Attributes:
        route: The incumbent.
        best: Its value, or the cutoff.
        floor: Lower bound if no route is below the cutoff.
        cut: Whether the memory limit was exceeded.
        left: Lower bound on the routes of unsearched caps after an early stop; else infinity.
    """

    def __init__(self, problem: Staging, cutoff: float, stops: Callable[[], bool]) -> None:
        self._problem, self._stops = problem, stops
        self._fastest = problem.seconds.min(axis=3)
        self._least = self._fastest.min(axis=0)
        self._leads = np.where(np.isfinite(problem.seconds), problem.lead, np.inf).min(axis=(0, 3))
        self.route: Route = ()
        self.best = cutoff
        self.floor = math.inf
        self.cut = False
        self.left = math.inf

    def run(self) -> None:
        """Search all ranges of caps that may contain a better route."""
        problem = self._problem
        counts = np.array([level + 1 in problem.counts for level in range(problem.levels)])
        lowest = bottleneck(problem.at, problem.sizes, problem.starts, self._fastest, counts)
        if not math.isfinite(lowest):
            return
        self.floor = self.best
        caps = _distinct(problem.seconds[np.isfinite(problem.seconds) & (problem.seconds >= lowest)])
        waiting = [(0.0, 0, len(caps) - 1)]  # lower bound, first and last cap
        while waiting:
            least, first, last = heapq.heappop(waiting)
            if least >= self.best * (1 - OPTIMALITY_TOLERANCE):
                break
            if self._stops():
                self.left = least
                break
            follow = problem.follow * float(caps[first])
            end, pace = self._solve_cap(float(caps[last]) * (1 + ALIKE), follow)
            if not math.isfinite(end):
                continue
            # No cap down to the slowest stage of this route gives an earlier end.
            last = int(np.searchsorted(caps, pace * (1 - ALIKE))) - 1
            if last < first:
                continue
            middle = (first + last) // 2
            rest = end + problem.fixed
            for low, high in ((first, middle), (middle + 1, last)):
                if low <= high:
                    value = rest + problem.follow * float(caps[low])
                    if value < self.best * (1 - OPTIMALITY_TOLERANCE):
                        heapq.heappush(waiting, (value, low, high))

    def _solve_cap(self, cap: float, follow: float) -> tuple[float, float]:
        """Return the least end under a cap, and the slowest stage of a route that has it; infinity if pruned.

        Args:
            cap: Seconds of the slowest stage.
            follow: Lower bound on the seconds of all microbatches but one.
        """
        problem = self._problem
        most = self.best - follow - problem.fixed
        least, leads = prefix_bounds(problem.at, problem.sizes, problem.starts, self._least, self._leads, cap)
        room = ROOM
        while True:
            kept, number, enough = pareto_suffixes(
                problem.at, problem.sizes, problem.starts, problem.seconds, problem.lead, problem.slow, problem.tails,
                problem.ends, problem.classes, problem.ahead, problem.back, least, leads, cap, most, room,
            )  # fmt: skip
            if enough:
                break
            room *= 2
            if room * bytes_per_room(problem) > MOST_BYTES:
                self.cut = True
                return math.inf, math.inf
        end, level, option, index = math.inf, -1, -1, -1
        for count in problem.counts:
            if count > problem.levels:
                continue
            ends = np.where(
                np.arange(room) < number[count - 1, 0, 0, :, None], kept[count - 1, 0, 0, :, :, END], np.inf
            )
            if ends.min() < end:
                end, level = float(ends.min()), count - 1
                option, index = (int(place) for place in np.unravel_index(int(ends.argmin()), ends.shape))
        if level < 0:
            return math.inf, math.inf
        route = _trace(problem, kept, number, cap, level, option, index)
        value = problem.value(route)
        if value < self.best:
            self.best, self.route = value, route
        slowest = max(self._seconds(len(route) - 1 - number, leg) for number, leg in enumerate(route))
        return end, slowest

    def _seconds(self, level: int, leg: Leg) -> float:
        window = self._problem.at[leg.start, leg.stop - leg.start - 1]
        return float(self._problem.seconds[level, leg.option, window, leg.column])


def bytes_per_room(problem: Staging) -> int:
    """Return the bytes of one more Pareto pair in every pipeline class."""
    return 16 * problem.levels * problem.num_blocks * problem.num_devices * len(problem.sizes)


def _distinct(values: FloatArray) -> FloatArray:
    """Return the values in ascending order, values that differ by rounding only once."""
    ordered = np.sort(values)
    return np.asarray(ordered[np.concatenate([[True], np.diff(ordered) > ALIKE * ordered[1:]])])


def _trace(
    problem: Staging, kept: FloatArray, number: IntArray, cap: float, level: int, option: int, index: int
) -> Route:
    """Return the route of a Pareto pair that starts at the first block and device."""
    route = []
    block = device = 0
    while True:
        rest, end = kept[level, block, device, option, index]
        leg, following = _trace_stage(problem, kept, number, cap, level, block, device, option, rest, end)
        route.append(leg)
        if following is None:
            return tuple(route)
        level, block, device = level - 1, leg.stop, device + int(problem.sizes[option])
        option, index = following


def _trace_stage(
    problem: Staging,
    kept: FloatArray,
    number: IntArray,
    cap: float,
    level: int,
    block: int,
    device: int,
    option: int,
    rest: float,
    end: float,
) -> tuple[Leg, tuple[int, int] | None]:
    """Return the first stage of a Pareto pair, and the option and index of the pair after it; None for the last."""
    after = device + int(problem.sizes[option])
    best, found = math.inf, None
    for length in range(min(problem.at.shape[1], problem.num_blocks - block)):
        stop, window = block + length + 1, int(problem.at[block, length])
        if window < 0 or (level == 0) != (stop == problem.num_blocks):
            continue
        for column in np.flatnonzero(problem.seconds[level, option, window] <= cap).tolist():
            where = (level, option, window, column)
            own, lead = problem.seconds[where] + problem.slow[where], problem.lead[where]
            tail = problem.tails[where]
            leg = Leg(block, stop, device, option, column)
            pairs: list[tuple[float, float, tuple[int, int] | None]] = []
            if level == 0:
                pairs.append((own, own + tail, None))
            else:
                ends = (problem.ends[option], problem.ends, problem.classes[stop], after)
                ahead, back = problem.ahead[ends], problem.back[ends]
                for other in range(len(problem.sizes)):
                    for index in range(int(number[level - 1, stop, after, other])):
                        pair = kept[level - 1, stop, after, other, index]
                        total = own + pair[REST] + ahead[other] + back[other]
                        pairs.append((total, max(total + tail, lead + pair[END] + ahead[other]), (other, index)))
            for total, last, following in pairs:
                distance = max(abs(total - rest), abs(last - end))
                if distance < best:
                    best, found = distance, (leg, following)
    assert found is not None, "every pair is a stage followed by a pair"
    assert best <= ALIKE * max(1.0, abs(end)), "a pair is traced to the stage and pair it was computed from"
    return found

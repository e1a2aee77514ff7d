"""The staging problem: which blocks, which devices and which of its options each stage of a pipeline gets.

Stages s = 0 .. S - 1 take consecutive blocks and consecutive devices, all of both. A stage has an *option*: so many
devices, and what it takes of them for any range of blocks. With t_s the seconds of a microbatch, b_s those of its
backward among them, h_s, h'_s the seconds of handing it on and back, tail_s what follows the last backward and slow_s
what hiding a part of that costs (`autopar.formulate.step_time` has the formulas), m microbatches take

    step = max_s ( sum_q (t_q + h_q + h'_q) + sum_{q >= s} slow_q - sum_{q < s} (b_q + h'_q) + tail_s )
           + (m - 1) max_s t_s + fixed

The first line follows from the last stage to the first: with R the rest of a pipeline and W its end,

    R_s = t_s + slow_s + h_s + h'_s + R_{s+1}        W_s = max( R_s + tail_s, t_s - b_s + h_s + W_{s+1} )

so that a solver needs two numbers per stage. What a stage may hold depends on how many stages come after it, which is
how many microbatches are in flight.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Leg:
    """A stage of a route.

    Attributes:
        start: Its first block.
        stop: The block after its last one.
        device: Its first device.
        option: Its option.
        column: Which of the ways its blocks can be kept.
    """

    start: int
    stop: int
    device: int
    option: int
    column: int


Route = tuple[Leg, ...]
"""Stages in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """The numbers of a staging problem; `levels` are numbers of stages from one to the last: level 0 is the last one.

    Attributes:
        at: (blocks, longest) number of the range that starts at a block and has one block more than the column says; -1
            where there may be none.
        sizes: (options,) devices.
        starts: (options, devices) whether an option may start at a device.
        seconds: (levels, options, ranges, columns) t of a stage; infinity where nothing fits.
        lead: The same of t - b.
        slow: The same of what hiding reductions costs.
        tails: The same of what follows the last backward.
        ends: (options,) which of the ways to hold what is handed over an option has.
        classes: (blocks,) what is handed to each block, as a number; that of block 0 is not used.
        ahead: (ends, ends, classes, devices) seconds of handing on from one end to another that starts at a device.
        back: The same of handing back.
        counts: Numbers of stages that are allowed.
        follow: How often the slowest stage counts: m - 1.
        fixed: Seconds of every step.
    """

    at: IntArray
    sizes: IntArray
    starts: BoolArray
    seconds: FloatArray
    lead: FloatArray
    slow: FloatArray
    tails: FloatArray
    ends: IntArray
    classes: IntArray
    ahead: FloatArray
    back: FloatArray
    counts: frozenset[int]
    follow: float
    fixed: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Length of the chain of blocks."""
        return len(self.at)

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return int(self.starts.shape[1])

    @property
    def levels(self) -> int:
        """The most stages."""
        return len(self.seconds)

    def in_units(self) -> tuple["Staging", int]:
        """Return the problem with devices counted in the largest units that nothing divides, and the devices of one.

        >>> none = np.zeros((1, 1, 1, 1))
        >>> at, sizes, starts = np.array([[0]]), np.array([4]), np.array([[True] + [False] * 3])
        >>> zero, counts = sizes * 0, frozenset({1})
        >>> one = Staging(at, sizes, starts, none, none, none, none, zero, zero, none, none, counts, 0.0)
        >>> coarse, unit = one.in_units()
        >>> unit, coarse.sizes.tolist(), coarse.starts.tolist()
        (4, [1], [[True]])
        """
        places = np.flatnonzero(self.starts.any(axis=0))
        unit = math.gcd(self.num_devices, *self.sizes.tolist(), *places.tolist())
        small = replace(
            self,
            sizes=self.sizes // unit,
            starts=self.starts[:, ::unit].copy(),
            ahead=self.ahead[..., ::unit].copy(),
            back=self.back[..., ::unit].copy(),
        )
        return small, unit

    def value(self, route: Route) -> float:
        """Return the seconds of a step; infinity if the route does not keep to the problem.

        It is computed from the definition, not by the recursion that solvers follow.
        """
        if not self._allows(route):
            return math.inf
        where = [
            (len(route) - 1 - number, leg.option, self._range(leg), leg.column) for number, leg in enumerate(route)
        ]
        seconds, lead, slow, tails = (
            np.array([table[place] for place in where]) for table in (self.seconds, self.lead, self.slow, self.tails)
        )
        ahead, back = np.array([self.hop(one, other) for one, other in pairwise(route)]).reshape(-1, 2).T
        backward = seconds - lead
        flow = float(seconds.sum() + ahead.sum() + back.sum())
        ends = [
            flow + float(slow[stage:].sum() - backward[:stage].sum() - back[:stage].sum() + tails[stage])
            for stage in range(len(route))
        ]
        return max(ends) + self.follow * float(seconds.max()) + self.fixed

    def hop(self, leg: Leg, following: Leg) -> tuple[float, float]:
        """Return the seconds of handing a microbatch from a stage to the next, and back."""
        where = (self.ends[leg.option], self.ends[following.option], self.classes[following.start], following.device)
        return float(self.ahead[where]), float(self.back[where])

    def _range(self, leg: Leg) -> int:
        return int(self.at[leg.start, leg.stop - leg.start - 1])

    def _allows(self, route: Route) -> bool:
        """Whether a route has all blocks and devices in order, and only stages that may be."""
        block = device = 0
        for number, leg in enumerate(route):
            in_order = (leg.start, leg.device) == (block, device) and leg.start < leg.stop <= self.num_blocks
            if not in_order or leg.stop - leg.start > self.at.shape[1] or device >= self.num_devices:
                return False
            level = len(route) - 1 - number
            if level >= self.levels or self._range(leg) < 0 or not self.starts[leg.option, device]:
                return False
            if not math.isfinite(self.seconds[level, leg.option, self._range(leg), leg.column]):
                return False
            block, device = leg.stop, device + int(self.sizes[leg.option])
        return len(route) in self.counts and (block, device) == (self.num_blocks, self.num_devices)


@dataclass(frozen=True, slots=True)
class Staged:
    """What a solver of staging problems found.

    Attributes:
        route: The best route; empty if none was found.
        seconds: Its value; infinity without one.
        bound: No route has a lower value; infinity if there is none.
    """

    route: Route
    seconds: float
    bound: float

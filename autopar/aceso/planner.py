"""Planning in Aceso's cost model: stages, their devices and degrees, microbatch size, and which ops run again.

Two tables have the seconds of every stage there can be: one of plans (memory rounded up), one of lower bounds (memory
rounded down). A dynamic program cuts the chain of ops by either of them. The objective `max S (m - 1) + sum S` is
minimised over thresholds of the slowest stage: with the least sum f(t) of stages within t, no plan whose slowest stage
lies in (s, t] takes less than `s (m - 1) + f(t)`.
"""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from autopar.aceso.cost import STAGE_DEVICES, Configuration, CostModel, Estimate, Stage
from autopar.aceso.recompute import caps, choose_ops, choose_quantum
from autopar.aceso.stage_loops import INPUTS, KEPT, OUTPUTS, cut_chain, stage_times
from autopar.errors import InfeasibleError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

UNITS = 3000
"""Most units of memory that the activations of a stage are counted in, but for rounding."""
REACH = 1.3
"""First guess of the slowest stage, as a multiple of the mean work of a device. By hand."""
NEAR = 3e-3
"""Distance of a plan from its bound, as a share, above which plans are searched for with memory rounded up, too."""
DESCENTS = 12
"""Cuts that are tried on the way to a faster slowest stage. By hand."""
GAP = 4e-4
"""Distance of bound and plan, as a share, at which the search for either ends."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and how good it can be.

    Attributes:
        configuration: The plan.
        estimate: What it takes.
        bound: Seconds that no plan of the space takes less than.
        seconds: Wall-clock seconds of the search.
    """

    configuration: Configuration
    estimate: Estimate
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """How much faster another plan might be, as a share of this one."""
        return 1 - self.bound / self.estimate.seconds


@dataclass(frozen=True, slots=True)
class _Cut:
    """Stages that a threshold allows: their ops and sizes, the slowest and the sum in seconds."""

    stages: tuple[tuple[int, int], ...]
    slowest: float
    total: float


class Table(Enum):
    """Which seconds of stages a search is about."""

    FREE = "running ops again takes no time"
    BOUND = "memory rounded down"
    PLAN = "memory rounded up"


class _Space:
    """Stages of one microbatch size.

    Attributes:
        num: Microbatches of a step.
        work: (ops + 1) seconds on one device that all ops before some op take at least.
        mean: Seconds of a microbatch on every device, if all had as much of the least work.
        whole: Seconds that no stage takes longer than.
        known: Costs of the last search for a bound.
    """

    def __init__(self, model: CostModel, microbatch: int, limit: float, most: int) -> None:
        self.model, self.microbatch, self.limit, self.most = model, microbatch, limit, most
        self.known = np.empty(0), np.empty(0)
        self._chosen: dict[tuple[int, ...], tuple[bool, ...] | None] = {}
        self.num = model.global_batch // microbatch
        self.sizes = [size for size in STAGE_DEVICES if size <= model.node and model.degrees(size, microbatch)]
        self.tables = {
            (size, tensor, data): model.table(tensor, microbatch // data)
            for size in self.sizes
            for tensor, data in model.degrees(size, microbatch)
        }
        self.rows = model.kinds.astype(np.int64)
        num_rows = len(model.profile.ops)
        self.layer = np.arange(model.layer_kinds.start, model.layer_kinds.stop)
        self.tail = np.arange(model.layer_kinds.stop, num_rows)
        self.tails = np.maximum(0, np.arange(len(self.rows) + 1) - (len(self.rows) - len(self.tail)))
        self.starts_layer, self.may_start = np.zeros(num_rows, dtype=np.bool_), np.zeros(num_rows, dtype=np.bool_)
        self.starts_layer[self.layer[0]] = True
        self.may_start[self.rows] = model.may_start_run
        work = [table[self.rows, :2].sum(axis=1) * size for (size, _, _), table in self.tables.items()]
        self.work = np.concatenate([[0.0], np.cumsum(np.min(work, axis=0))])
        self.mean = float(self.work[-1]) / model.devices
        known = [np.where(np.isfinite(table), table, 0.0)[self.rows] for table in self.tables.values()]
        moved = max(float(table[:, [INPUTS, OUTPUTS]].max()) for table in known)
        self.whole = 2 * (max(float(table[:, :2].sum()) for table in known) + model.transfer(moved, crosses=True))

    def sequence(self, kind: int) -> NDArray[np.int64]:
        """Return the kinds of the ops from one of some kind on, as many as the model has; the tail stands alone."""
        if kind >= self.layer[-1] + 1:
            return np.arange(kind, self.tail[-1] + 1)
        following = np.tile(self.layer, self.model.layers)
        if kind < self.layer[0]:
            return np.concatenate([np.arange(kind, self.layer[0]), following])
        return following[kind - self.layer[0] :]

    def costs(self, longest: float, table: Table) -> tuple[Floats, Floats]:
        """Return the seconds of stages up to `longest`, and the least of them by row, tail and number of ops."""
        model, num_rows = self.model, len(self.model.profile.ops)
        reach = self._reach(longest)
        shape = (num_rows, len(self.tail) + 1, reach + 1, self.most)
        found = np.full((len(self.sizes), 4, *shape), np.inf)
        for (size, _, _), ops in self.tables.items():
            out = np.full(shape, np.inf)
            finite = np.where(np.isfinite(ops[:, KEPT]), ops[:, KEPT], 0.0)
            for row in range(num_rows):
                sequence = self.sequence(row)[:reach]
                within = np.cumsum(ops[sequence, :2].sum(axis=1)) <= longest
                quantum = choose_quantum(finite, self.layer, finite[sequence][within].sum() / UNITS)
                units = np.floor(finite / quantum + 1e-9).astype(np.int64)
                if table is Table.FREE:
                    units[:] = 0
                tail = self.tail if row <= self.layer[-1] else self.tail[:0]
                for cap in islice(caps(finite, self.layer), 1) if table is Table.FREE else caps(finite, self.layer):
                    stage_times(
                        sequence, tail, ops, units, cap.following, self.may_start, self.starts_layer, self.limit,
                        cap.most if table is Table.PLAN else cap.least, quantum, table is not Table.PLAN, longest,
                        out[row],
                    )  # fmt: skip
            for row in map(int, self.tail):  # what begins in the tail was recorded as if no op of it had been taken
                alone = out[row, 0].copy()
                out[row] = np.inf
                for count in range(1, len(self.tail) - (row - self.tail[0]) + 1):
                    out[row, row - self.tail[0] + count, count] = alone[count]
            place = self.sizes.index(size)
            for crossing in range(4):
                enters = np.array([model.transfer(each, crosses=crossing >= 2) for each in ops[:, INPUTS]])
                leaves = np.array([model.transfer(each, crosses=crossing % 2 == 1) for each in ops[:, OUTPUTS]])
                moved = enters[:, None, None] + leaves[self._last_kinds(reach)]
                np.minimum(found[place, crossing], out + moved[..., None], out=found[place, crossing])
        least = np.minimum.accumulate(found.min(axis=(0, 1, 5))[..., ::-1], axis=2)[..., ::-1]
        return found, np.ascontiguousarray(least)

    def _reach(self, longest: float) -> int:
        """Return the most ops that a stage of at most some seconds can have."""
        most = 1
        for table in self.tables.values():
            seconds = np.concatenate([[0.0], np.cumsum(table[self.rows, :2].sum(axis=1))])
            if np.isfinite(seconds[-1]):
                ends = np.searchsorted(seconds, seconds + longest, side="right") - 1
                most = max(most, int((ends - np.arange(len(seconds))).max()))
        return min(most, len(self.rows))

    def _last_kinds(self, reach: int) -> NDArray[np.int64]:
        """Return the kind of the last op of a stage by its row, its ops of the tail and the number of its ops."""
        found = np.zeros((len(self.model.profile.ops), len(self.tail) + 1, reach + 1), dtype=np.int64)
        for row in range(found.shape[0]):
            own = self.sequence(row)[:reach]
            found[row, 0, 1 : len(own) + 1] = own
        for count in range(1, len(self.tail) + 1):
            found[:, count] = self.tail[count - 1]
        return found

    def search(self, longest: float, cutoff: float, table: Table) -> tuple["_Cut | None", float]:
        """Return the best cut, if one is better than a cutoff, and a lower bound on all cuts."""
        costs, least = self.costs(longest, table)
        if table is Table.BOUND:
            self.known = costs, least
        shape = (len(self.rows) + 1, self.model.devices + 1, self.most + 1)
        sums, choices = np.empty(shape), np.empty(shape, dtype=np.int64)
        best: _Cut | None = None

        def cut(threshold: float) -> float:
            nonlocal best, cutoff
            cut_chain(
                costs, least, self.rows, self.tails, np.array(self.sizes), self.work, self.model.devices,
                self.model.node, self.most, threshold, sums, choices,
            )  # fmt: skip
            found = self._read(costs, sums, choices)
            if found is not None and found.slowest * (self.num - 1) + found.total < cutoff:
                best, cutoff = found, found.slowest * (self.num - 1) + found.total
            return np.inf if found is None else found.total

        total = cut(longest)
        outside = self.num * longest  # a stage that takes longer makes the step longer than this
        if total == np.inf:
            return None, outside
        low = max(self.mean, total / self.most)
        nodes = [(low * (self.num - 1) + total, low, longest, total)]
        while nodes[0][0] < cutoff * (1 - GAP / 2):
            _, low, high, total = heapq.heappop(nodes)
            middle = (low + high) / 2
            less = cut(middle)
            heapq.heappush(nodes, (middle * (self.num - 1) + total, middle, high, total))
            if less < np.inf:
                heapq.heappush(nodes, (low * (self.num - 1) + less, low, middle, less))
        return best, min(nodes[0][0], outside)

    def _read(self, costs: Floats, sums: Floats, choices: NDArray[np.int64]) -> _Cut | None:
        """Return the cut of least sum that a table of sums has."""
        totals = sums[0, self.model.devices]
        stages = int(totals.argmin())
        if totals[stages] == np.inf:
            return None
        first, used, left = 0, self.model.devices, stages
        found, slowest = [], 0.0
        while left:
            count, place = divmod(int(choices[first, used, left]), len(self.sizes))
            size, before = self.sizes[place], self.model.devices - used
            enters, leaves = self.model.crossings(before, size)
            end = first + count
            crossing = 2 * enters + leaves
            slowest = max(slowest, costs[place, crossing, self.rows[first], self.tails[end], count, left - 1])
            found.append((count, size))
            first, used, left = end, used - size, left - 1
        return _Cut(tuple(found), float(slowest), float(totals[stages]))

    def free_bound(self, cutoff: float) -> float:
        """Return a lower bound on the step if running ops again took no time; at most a cutoff."""
        longest = min(REACH * self.mean, cutoff / self.num)
        while True:
            cut, bound = self.search(longest, cutoff, Table.FREE)
            if cut is not None and bound < longest * self.num:
                return bound
            if longest >= min(self.whole, cutoff / self.num):
                return np.inf if cut is None and cutoff == np.inf else min(bound, cutoff)
            longest = min(2 * longest, cutoff / self.num)

    def reaches(self, least: float, cutoff: float) -> Iterator[float]:
        """Yield growing limits on the slowest stage, up to what a cutoff on the step or the whole model allows."""
        most = min(cutoff / self.num, self.whole)
        longest = REACH * least / self.num
        while longest < most:
            yield longest
            longest *= REACH
        if least < cutoff:
            yield most

    def attempts(
        self, cut: _Cut | None, longest: float, cutoff: float, bound: float
    ) -> Iterator[tuple[Configuration, Estimate]]:
        """Yield plans: of the cut behind a bound and, where that does not come near it, of the table of plans."""
        if cut is None:
            return
        best = cutoff
        for improved in self.descend(cut, best, bound * (1 + NEAR)):
            yield improved
            best = min(best, improved[1].seconds)
        if best > bound * (1 + NEAR):
            planned, _ = self.search(longest, best * (1 + NEAR), Table.PLAN)  # it is faster than its table says
            found = None if planned is None else self.realize(planned, self.known[0].copy())
            if found is not None:
                yield found

    def descend(self, cut: _Cut, cutoff: float, near: float) -> Iterator[tuple[Configuration, Estimate]]:
        """Yield plans: of a cut behind a bound, then of cuts whose slowest stage is faster than that of the best plan.

        What a stage of a plan takes replaces what the bound said of it, so cuts that cannot be had do not come again.
        """
        costs, least = self.known[0].copy(), self.known[1]
        shape = (len(self.rows) + 1, self.model.devices + 1, self.most + 1)
        sums, choices = np.empty(shape), np.empty(shape, dtype=np.int64)
        best, threshold = cutoff, self.whole
        following: _Cut | None = cut
        for _ in range(DESCENTS):
            if following is None:
                return
            found = self.realize(following, costs)
            if found is not None and found[1].seconds < best:
                yield found
                best, threshold = found[1].seconds, max(found[1].stage_seconds) * (1 - 1e-9)
            if best <= near:
                return
            cut_chain(
                costs, least, self.rows, self.tails, np.array(self.sizes), self.work, self.model.devices,
                self.model.node, self.most, threshold, sums, choices,
            )  # fmt: skip
            following = self._read(costs, sums, choices)

    def realize(self, cut: _Cut, costs: Floats) -> tuple[Configuration, Estimate] | None:
        """Return the configuration of a cut with degrees and ops that run again; None if a stage does not fit.

        Args:
            cut: Ops and devices of the stages.
            costs: Seconds of stages, where what is found is written down.
        """
        stages, first, before, fits = [], 0, 0, True
        for index, (count, size) in enumerate(cut.stages):
            behind = len(cut.stages) - 1 - index
            tried = []
            for own, tensor, data in self.tables:
                again = self._choose(first, count, tensor, data, behind) if own == size else None
                if again is not None:
                    stage = Stage(first, count, tensor, data, again)
                    tried.append((self.model.stage_seconds(stage, self.microbatch, before), tensor, stage))
            enters, leaves = self.model.crossings(before, size)
            place = self.sizes.index(size), 2 * enters + leaves, self.rows[first], self.tails[first + count]
            costs[(*place, count, behind)] = min((each[0] for each in tried), default=np.inf)
            fits = fits and bool(tried)
            if tried:
                stages.append(min(tried, key=lambda each: each[:2])[2])
            first, before = first + count, before + size
        if not fits:
            return None
        configuration = Configuration(self.microbatch, tuple(stages))
        return configuration, self.model.estimate(configuration)

    def _choose(self, first: int, count: int, tensor: int, data: int, behind: int) -> tuple[bool, ...] | None:
        """Return the ops of a stage that run again; stages of one row and length are alike."""
        key = self.rows[first], self.tails[first + count], count, tensor, data, behind
        if key not in self._chosen:
            bare = Stage(first, count, tensor, data, (False,) * count)
            self._chosen[key] = choose_ops(self.model, bare, self.microbatch, behind, self.limit)
        return self._chosen[key]


def plan(model: CostModel, limit: float, *, most_stages: int | None = None) -> Found:
    """Return the best configuration found, with a bound on all.

    Args:
        model: What configurations cost.
        limit: Bytes of a device that a plan may use.
        most_stages: Most pipeline stages; None if there may be as many as devices.

    Raises:
        InfeasibleError: If no configuration fits.
    """
    began = time.perf_counter()
    most = min(model.devices, most_stages or model.devices)
    spaces = [space for size in model.microbatches() if (space := _Space(model, size, limit, most)).sizes]
    bounds: dict[_Space, float] = {}
    best: tuple[Configuration, Estimate] | None = None
    cutoff = np.inf
    for space in spaces:
        bounds[space] = space.free_bound(cutoff)
        for longest in space.reaches(bounds[space], cutoff):
            cut, bounds[space] = space.search(longest, cutoff, Table.BOUND)
            for found in space.attempts(cut, longest, cutoff, bounds[space]):
                if found[1].seconds < cutoff:
                    best, cutoff = found, found[1].seconds
            if cutoff <= space.num * longest:
                break
    if best is None:
        raise InfeasibleError(
            f"no configuration of {model.profile.model} fits {limit / 2**30:.1f} GiB on each of {model.devices} GPUs",
            hint="take more GPUs, or devices with more memory",
        )
    bound = min(cutoff, *bounds.values())
    return Found(*best, float(bound), time.perf_counter() - began)

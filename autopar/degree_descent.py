"""A descent over plans by degrees: plans to begin a search with, or to hold its answer against.

Estimates of thousands of plans share tables (`autopar.estimates`), one for each combination of tensor, context and
expert degrees, samples per device and ZeRO level. The plans of one table form a cell: pipelines, schedules and kinds of
recompute of a cell are all priced, and cells are looked at by how good the best plan of their neighbours is.
"""

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from autopar.configuration import Configuration, divisors
from autopar.degrees import Degrees
from autopar.errors import JobError, TacticError
from autopar.estimates import Estimator
from autopar.folding.expert_parameters import experts_of
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.progress import StopCallback, never
from autopar.sharding import Mesh
from autopar.task import Task

PATIENCE = 3
"""Cells in a row without a better plan after whose neighbours the descent ends (figures in decision 33)."""

_AXES = frozenset({"dp", "ep", "cp", "tp"})
_LEVELS = range(4)
"""ZeRO levels."""

Cell = tuple[int, int, int, int, int]
"""Tensor, context and expert degree, samples of a microbatch on a device, ZeRO level."""

_Shape = tuple[int, int, int, int]


def roles_of(mesh: Mesh, *, has_experts: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield the data, tensor, context and expert degrees that the axes of a mesh may stand for.

    Axes named for what they do have one reading. Others are read from the outermost as data, context and tensor
    parallelism, each of which may be absent, with experts over any part of the data-parallel devices.
    """
    degrees = {axis.name: axis.size for axis in mesh.axes}
    if degrees.keys() <= _AXES:
        dp, tp, cp, ep = (degrees.get(name, 1) for name in ("dp", "tp", "cp", "ep"))
        yield dp * ep, tp, cp, ep * cp if ep > 1 else 1
        return
    for roles in combinations(("dp", "cp", "tp"), len(mesh.axes)):
        if all(axis.name != "dp" or role == "dp" for axis, role in zip(mesh.axes, roles, strict=True)):
            read = dict(zip(roles, mesh.shape, strict=True))
            dp, tp, cp = (read.get(name, 1) for name in ("dp", "tp", "cp"))
            for ep in divisors(dp) if has_experts else (1,):
                yield dp, tp, cp, ep * cp if ep > 1 else 1


@dataclass(frozen=True, slots=True)
class Found:
    """A plan by degrees with its estimate.

    Attributes:
        degrees: The plan.
        configuration: Where it lies in the space of the task.
        seconds: Step time by the formula.
        excess: Bytes on the fullest device over the limit, as a share of the limit; 0 if it fits.
    """

    degrees: Degrees
    configuration: Configuration
    seconds: float
    excess: float

    @property
    def order(self) -> tuple[float, float]:
        """Key by which plans are ordered: those that fit by their seconds, then the others by what they lack."""
        return self.excess, self.seconds


@dataclass(eq=False)
class DegreeDescent:
    """Plans by degrees of a task.

    Attributes:
        task: The task; axes of its meshes are named for what they do ("dp", "ep", "cp", "tp"), or read as that.
        runs: Whether a plan may be taken.
        flavours: Kinds of recompute.
        cells: Best plan of each cell that was looked at, by kind of recompute.
    """

    task: Task
    runs: Callable[[Degrees], bool]
    flavours: Sequence[str]
    cells: dict[Cell, dict[str, Found]] = field(default_factory=dict)

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(self.task.workload, known=self.task.rules)

    @cached_property
    def _estimator(self) -> Estimator:
        costs = self.task.costs
        return Estimator(self._predictor, costs.cluster, costs.stack, costs.policy, costs.profile)

    @cached_property
    def _shapes(self) -> dict[_Shape, list[Configuration]]:
        """The configurations by what their meshes and microbatches split."""
        found: defaultdict[_Shape, list[Configuration]] = defaultdict(list)
        batch, space = self.task.job.global_batch, self.task.space
        has_experts = bool(space) and bool(experts_of(self.task.workload.folded(batch // space[0].num_microbatches)))
        for own in space:
            samples = batch // own.num_microbatches
            for data, tp, cp, ep in () if own.block else roles_of(own.mesh, has_experts=has_experts):
                if samples % data == 0:
                    found[tp, cp, ep, samples // data].append(own)
        return dict(found)

    def run(self, end: float, should_stop: StopCallback = never) -> None:
        """Look at cells, the neighbours of the best one first, until none is better or the time is over.

        Args:
            end: When to end, on the monotonic clock.
            should_stop: Polled.
        """
        heap: list[tuple[tuple[float, float], Cell]] = []
        best, stale = (math.inf, math.inf), 0
        waiting = self._starts()
        while True:
            for cell in waiting:
                if time.monotonic() > end or should_stop():
                    return
                if cell not in self.cells:
                    own = self.cells[cell] = self._priced(cell)
                    if own:
                        heapq.heappush(heap, (min(found.order for found in own.values()), cell))
            if not heap or stale > PATIENCE:
                return
            order, cell = heapq.heappop(heap)
            stale = 0 if order < best else stale + 1
            best = min(best, order)
            waiting = self._neighbours(cell)

    def best(self, flavour: str) -> list[Found]:
        """Return the best plan of each cell that fits with one kind of recompute, the fastest first."""
        found = (own[flavour] for own in self.cells.values() if flavour in own)
        return sorted((own for own in found if not own.excess), key=lambda own: own.seconds)

    def simulated(self, found: Found) -> Plan | None:
        """Return a plan, simulated; None if it does not fit then. Its objective is what the simulator says."""
        costs, job = self.task.costs, self.task.job
        prediction = self._predictor.predict(
            found.degrees,
            costs.cluster,
            costs.stack,
            policy=costs.policy,
            profile=costs.profile,
            memory_limit=job.memory_limit,
        )
        return prediction.plan if prediction.fits else None

    def _starts(self) -> Iterator[Cell]:
        """Yield where to begin: little and much expert parallelism, as few samples at a time as can be.

        There is little tensor parallelism, and much if nothing fits then. Of ZeRO levels the one that shares nothing
        comes last; levels are yielded until one of them has a plan.
        """
        if not self._shapes:
            return
        tps, cps, eps, _ = (sorted(set(own)) for own in zip(*self._shapes, strict=True))
        node = self.task.costs.cluster.devices_per_node
        inside = max(ep for ep in eps if ep <= node)
        for tp in dict.fromkeys((tps[0], tps[-1])):
            if any(not found.excess for own in self.cells.values() for found in own.values()):
                return
            for ep in dict.fromkeys((inside, eps[-1], eps[0])):
                sizes = [own[3] for own in self._shapes if own[:3] == (tp, cps[0], ep)]
                for level in (*_LEVELS[1:], 0) if sizes else ():
                    cell = (tp, cps[0], ep, min(sizes), level)
                    yield cell
                    if self.cells.get(cell):
                        break

    def _neighbours(self, cell: Cell) -> Iterator[Cell]:
        """Yield the cells that differ in one degree, the next one there is."""
        *shape, zero = cell
        for place, size in enumerate(shape):
            others = [own for own in self._shapes if all(own[i] == shape[i] for i in range(len(shape)) if i != place)]
            smaller = max((own for own in others if own[place] < size), default=None)
            larger = min((own for own in others if own[place] > size), default=None)
            yield from ((*own, zero) for own in (smaller, larger) if own is not None)
        for level in _LEVELS:
            if level != zero:
                yield cell[0], cell[1], cell[2], cell[3], level

    def _priced(self, cell: Cell) -> dict[str, Found]:
        """Return the best plan of a cell by kind of recompute."""
        found: dict[str, Found] = {}
        limit = self.task.job.memory_limit
        for degrees, configuration in self._plans(cell):
            try:
                estimate = self._estimator.estimate([degrees])
            except (JobError, TacticError):  # such as stages without a block
                continue
            excess = max(0.0, float(estimate.peak_bytes[0]) / limit - 1)
            own = Found(degrees, configuration, float(estimate.step_seconds[0]), excess)
            known = found.get(degrees.recompute)
            if known is None or own.order < known.order:
                found[degrees.recompute] = own
        return found

    def _plans(self, cell: Cell) -> Iterator[tuple[Degrees, Configuration]]:
        """Yield the plans of a cell that can be placed."""
        tp, cp, ep, samples, zero = cell
        placed: bool | None = None
        for configuration in self._shapes[tp, cp, ep, samples]:
            degrees = Degrees(
                dp=configuration.mesh.size // (tp * cp),
                tp=tp,
                pp=configuration.num_stages,
                cp=cp,
                ep=ep,
                zero=zero,
                sequence_parallel=tp > 1,
                recompute=self.flavours[0],
                schedule=configuration.schedule,
                interleave=configuration.num_chunks,
                microbatch=samples,
                global_batch=self.task.job.global_batch,
            )
            if not self.runs(degrees):
                degrees = replace(degrees, sequence_parallel=False)
            joint = configuration.schedule == "gpipe" and self.runs(replace(degrees, schedule="1f1b"))
            if joint or not self.runs(degrees):  # 1F1B is as fast as GPipe, and holds no more
                continue
            if placed is None:
                placed = self._can_place(degrees)
            if not placed:
                return
            yield from ((replace(degrees, recompute=flavour), configuration) for flavour in self.flavours)

    def _can_place(self, degrees: Degrees) -> bool:
        try:
            self._estimator.table(self._predictor.settled(degrees))
        except (JobError, TacticError):  # such as heads that do not divide
            return False
        return True

"""What every baseline works with: the space of degrees, the price of a plan, a clock, and the best plans so far."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from typing import Self

from autopar.bench.baselines.degree_space import DegreeSpace, Partial, Value, what_splits
from autopar.cluster import Cluster
from autopar.degrees import Degrees
from autopar.errors import TacticError
from autopar.estimates import Estimator
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.progress import Progress, ProgressCallback, StopCallback
from autopar.search.history import History
from autopar.sizing.fewer import least_seconds, links_are_slow, of_part, parts
from autopar.task import Task, resized

FINALISTS = 64
"""Plans kept for the simulator, the fastest by the formula; some do not fit when simulated."""

SMALL_BATCH = 2
"""Samples at which the model is looked at to see what can be split."""
TOLD = 256
"""Prices between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a plan comes to by the formula.

    Attributes:
        seconds: Of a step; infinity if the tactics cannot place it.
        excess: Bytes on the fullest device over the limit, as a share of it; 0 if it fits.
    """

    seconds: float
    excess: float

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.excess == 0 and math.isfinite(self.seconds)


IMPOSSIBLE = Price(math.inf, math.inf)


@dataclass(eq=False)
class Race:
    """One baseline at work on one job.

    Attributes:
        task: The job.
        method: Name of the baseline.
        end: When its time is over, by `time.monotonic`.
        progress: Told of every better plan.
        should_stop: Polled.
        prices: Every plan that was priced.
        best: Least seconds of a plan that fits; infinity before the first.
        history: When which step time was reached.
        refused: Plans that the tactics cannot place on the model.
        skipped: Plans that grid search left out because others that need no more memory do not fit.
    """

    task: Task
    method: str
    end: float
    progress: ProgressCallback
    should_stop: StopCallback
    prices: dict[Degrees, Price] = field(default_factory=dict)
    best: float = math.inf
    history: History = field(init=False)
    refused: int = 0
    skipped: int = 0
    _estimators: dict[Cluster, Estimator] = field(default_factory=dict, repr=False)
    _least: dict[int, float] = field(default_factory=dict, repr=False)
    _tasks: dict[int, Task] = field(default_factory=dict, repr=False)
    _plans: dict[Degrees, Plan | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.history = History(sum(phase.seconds for phase in self.task.phases))
        for part in reversed(parts(self.task)):  # of as many devices the first part is the one that computes most
            self._tasks[part.gpus] = of_part(self.task, part)
        self._tasks[self.task.job.gpus] = self.task

    @cached_property
    def predictor(self) -> Predictor:
        """What places plans and simulates them."""
        return Predictor(self.task.workload, known=self.task.rules)

    def beside(self, method: str, end: float) -> Self:
        """Return a race of another method for the same job, which shares what this one has worked out.

        Args:
            method: Name of the method.
            end: When its time is over, by `time.monotonic`.
        """
        other = replace(self, method=method, end=end, prices={}, best=math.inf, refused=0, skipped=0)
        other.predictor, other.space = self.predictor, self.space
        return other

    def _on(self, gpus: int) -> Task:
        """Return the job on a number of devices."""
        if gpus not in self._tasks:
            self._tasks[gpus] = resized(self.task, gpus=gpus)
        return self._tasks[gpus]

    def estimator(self, gpus: int) -> Estimator:
        """Return what prices plans on a number of devices."""
        machine, costs = self._on(gpus).costs.cluster, self.task.costs
        if machine not in self._estimators:
            self._estimators[machine] = Estimator(self.predictor, machine, costs.stack, costs.policy, costs.profile)
        return self._estimators[machine]

    def limit(self, gpus: int) -> float:
        """Return the bytes that each of a number of devices may use."""
        return self._on(gpus).job.memory_limit

    def least(self, gpus: int) -> float:
        """Return a lower bound on the step time of any plan on a number of devices, without communication."""
        if gpus not in self._least:
            self._least[gpus] = least_seconds(self._on(gpus))
        return self._least[gpus]

    def may_win(self, gpus: int) -> bool:
        """Whether a plan on a number of devices may be faster than the best so far; on fewer than all once one fits."""
        return gpus == self.space.gpu_counts[0] or (math.isfinite(self.best) and self.least(gpus) < self.best)

    def is_tried(self, gpus: int) -> bool:
        """Whether a heuristic tries a number of devices: fewer than all only where links between nodes are slow.

        Its first plans are far above any bound, and where links are fast it would lose its time on fewer devices.
        """
        return gpus == self.space.gpu_counts[0] or (self._links_are_slow and self.may_win(gpus))

    def options(self, partial: Partial) -> tuple[Value, ...]:
        """Return the values the next decision of a heuristic can take."""
        if partial:
            return self.space.options(partial)
        return tuple(gpus for gpus in self.space.gpu_counts if self.is_tried(gpus))

    @cached_property
    def _links_are_slow(self) -> bool:
        return links_are_slow(self.task)

    @cached_property
    def space(self) -> DegreeSpace:
        """The plans by degrees of the job."""
        task, workload = self.task, self.task.workload
        folded = workload.folded(workload.fixed_batch or SMALL_BATCH)
        return DegreeSpace(
            gpus=task.job.gpus,
            node=task.costs.cluster.devices_per_node,
            global_batch=task.job.global_batch,
            folded=folded,
            model=what_splits(task, folded),
            counts=tuple(sorted({configuration.num_microbatches for configuration in task.space})),
            trains=workload.mode == "train",
            flavours=task.constraints.flavours(),
            hosts_optimizer=task.constraints.hosts_optimizer,
            fewer=tuple(dict.fromkeys(part.gpus for part in parts(task))),
        )

    def is_allowed(self, degrees: Degrees) -> bool:
        """Return whether the framework that the plan is for, if there is one, can run given degrees."""
        return self.task.runs is None or self.task.runs(degrees)

    @property
    def stopped(self) -> str:
        """Why to stop: "interrupted", "time limit", or "" if there is no reason to."""
        if self.should_stop():
            return "interrupted"
        return "time limit" if time.monotonic() > self.end else ""

    def price(self, degrees: Degrees) -> Price:
        """Return what a plan comes to; the second time from memory."""
        if degrees not in self.prices:
            self.prices[degrees] = price = self._price(degrees)
            if price.fits and price.seconds < self.best:
                self.best = price.seconds
                self.history.record(price.seconds, 0.0)
            if len(self.prices) % TOLD == 0:
                self.progress(Progress(self.method, len(self.prices), 0, self.best, detail=str(degrees)))
        return self.prices[degrees]

    def _price(self, degrees: Degrees) -> Price:
        if not self.is_allowed(degrees):
            return IMPOSSIBLE
        try:
            found = self.estimator(degrees.gpus).estimate([degrees])
        except TacticError:  # such as heads that do not divide by the context degree
            self.refused += 1
            return IMPOSSIBLE
        limit = self.limit(degrees.gpus)
        return Price(float(found.step_seconds[0]), max(0.0, float(found.peak_bytes[0]) / limit - 1))

    def simulate(self, degrees: Degrees) -> Plan | None:
        """Return the plan of degrees that were priced, simulated, or None if it does not fit; then from memory."""
        if degrees not in self._plans:
            costs = self.task.costs
            prediction = self.predictor.predict(
                degrees,
                self.estimator(degrees.gpus).cluster,
                costs.stack,
                policy=costs.policy,
                profile=costs.profile,
                memory_limit=self.limit(degrees.gpus),
            )
            plan = replace(prediction.plan, objective=self.prices[degrees].seconds)
            self._plans[degrees] = plan if prediction.fits else None
        return self._plans[degrees]

    def floor(self, degrees: Degrees) -> float:
        """Return seconds that a plan and those like it do not stay below (`Estimator.floor`)."""
        try:
            return self.estimator(degrees.gpus).floor(degrees)
        except TacticError:
            return math.inf

    def is_too_large(self, degrees: Degrees) -> bool:
        """Whether activations alone do not fit, whatever is shared and recomputed (`Estimator.floor_bytes`).

        Nothing is known of plans that the tactics cannot place: others with more samples may be placed.
        """
        try:
            least = self.estimator(degrees.gpus).floor_bytes(degrees, self.task.constraints.flavours())
        except TacticError:
            return False
        return least > self.limit(degrees.gpus)

    def finalists(self, among: Collection[Degrees] | None = None) -> list[Degrees]:
        """Return the fastest plans that fit of all that were priced, or of some of them, fastest first."""
        fitting = (
            (price.seconds, number, plan)
            for number, (plan, price) in enumerate(self.prices.items())
            if price.fits and (among is None or plan in among)
        )
        return [plan for _, _, plan in nsmallest(FINALISTS, fitting)]

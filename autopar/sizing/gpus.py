"""How many GPUs a goal takes: to fit, to be fast enough, or to be the fastest within a budget.

Neither feasibility nor time is monotone in the number of GPUs: 48 may fail where 32 fit, because they divide nothing.
So numbers are not skipped because a larger or smaller one failed, but because a bound says so:

    state      parameters, sums of gradients and optimizer state, each split over all devices, exceed the limit
    bytes      every configuration needs more than the limit, by `least_bytes`
    floor      every configuration takes longer than the target, or costs more than the budget, by `Roofline`
    bound      the search of that number has proven so

A number that no bound excludes is searched; when time runs out it is listed as not looked at, and the answer as not
proven.

Nothing lies in host memory unless that is pinned: plans with it take several times as long. How few GPUs do with it is
said beside the answer.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cluster import Cluster, load_cluster
from autopar.configuration import Configuration
from autopar.errors import AutoparError, ClusterError, InfeasibleError, InterruptedSearchError, JobError, PinError
from autopar.formulate.block_memory import UNHOSTED
from autopar.fusion_plan import OFF
from autopar.least_memory_plan import held_in_all, thriftiest
from autopar.pins import read_pins
from autopar.plan import Plan
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.request import JobRequest
from autopar.search.context import SearchContext
from autopar.search.node_solver import open_node
from autopar.sizing.explain import counts
from autopar.sizing.goals import Goal, Per
from autopar.sizing.planning import find_plan, quick
from autopar.sizing.records import Looked, Sizing
from autopar.task import Effort, Task, prepare, resized
from autopar.units import format_bytes, format_seconds
from autopar.workload import default_batch

MOST_GPUS = 1024
"""Default of the largest number of GPUs that is looked at."""

HOSTED_LOOKS = 3
"""Numbers of GPUs on which plans with host memory are looked for, the least first."""

HOSTED_SECONDS = 15.0
"""Longest time each is searched."""

COUNT_SECONDS = 30.0
"""Default of the longest time one number of GPUs is searched."""


def find_gpus(
    model: str | Path,
    *,
    target_seconds: float | None = None,
    budget: float | None = None,
    per: str = "step",
    steps: int | None = None,
    gpu_hour_price: float | None = None,
    max_gpus: int = MOST_GPUS,
    time_limit: float | None = None,
    solver: str = "auto",
    top_k: int = 1,
    seed: int = 0,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    **request: Any,
) -> Sizing:
    """Return how many GPUs a goal takes: without one, the fewest on which some plan fits.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        target_seconds: A step that is fast enough, simulated: the fewest GPUs with such a plan are found.
        budget: The most that may be paid: the fastest plan within it is found.
        per: What the budget is for: "step", "million" (tokens; samples if the model has none) or "run".
        steps: Steps of a run.
        gpu_hour_price: Price of a GPU for an hour, in the currency of the budget; None for what the cluster says.
        max_gpus: The largest number looked at.
        time_limit: Seconds for the search of one number; None for 30.
        solver: Solver of the placement problems.
        top_k: Plans kept for the answer.
        seed: Random seed of the solvers.
        progress: Told which number is looked at.
        should_stop: Polled; once true, what is known is returned.
        **request: Further fields of `JobRequest`: `cluster`, `global_batch`, `pins`, ...

    Raises:
        AutoparError: If the model, the cluster, the goal or the request is wrong.
        InfeasibleError: If no number up to `max_gpus` meets the goal; the message has the nearest, or what is the least
            that is possible if no number at all does.
        InterruptedSearchError: If it was stopped before any number met it.
    """
    if per not in set(Per):
        raise JobError(f"a budget per {per!r}", hint=f"it is per {', '.join(Per)}")
    given = request.get("cluster", "h100")
    machine = given if isinstance(given, Cluster) else load_cluster(given)
    price = machine.gpu_hour_price if gpu_hour_price is None else gpu_hour_price
    goal = Goal(target_seconds, budget, Per(per), steps, price)
    # Bounds on other numbers of GPUs know the uniform rule of buckets only: plans are held to it, too.
    effort = Effort(solver, top_k, time_limit or COUNT_SECONDS, seed, fusion=OFF)
    task = _first_task(model, max_gpus, progress, request)
    finder = Finder(task, goal, effort, max_gpus, progress, should_stop)
    return finder.find()


def _first_task(model: str | Path, most: int, progress: ProgressCallback, request: Mapping[str, Any]) -> Task:
    """Return the task on one node, or what of it there is; pins are applied number by number."""
    job = JobRequest(model, gpus=1, **request)
    task = prepare(replace(job, pins=None), progress=progress)
    if job.global_batch is None and default_batch(task.workload, 1) != default_batch(task.workload, 2):
        raise JobError(
            "the batch of this model depends on the number of GPUs if nobody states it",
            hint="--global-batch B says how many samples a step has",
        )
    return replace(task, pins=read_pins(job.pins))


@dataclass(slots=True, eq=False)
class Finder:
    """Looks for the number of GPUs that is the answer.

    Attributes:
        base: The job on some number of GPUs.
        goal: What is wanted.
        effort: How hard each number is searched.
        most: The largest number.
        progress: Told which number is looked at.
        should_stop: Polled.
    """

    base: Task
    goal: Goal
    effort: Effort
    most: int
    progress: ProgressCallback
    should_stop: StopCallback
    looked: dict[int, Looked] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    _state: float | None = None
    _tasks: dict[int, Task | str] = field(default_factory=dict)

    def find(self) -> Sizing:
        """Return the answer.

        Raises:
            InfeasibleError: If no number meets the goal.
            InterruptedSearchError: If it was stopped before one did.
        """
        if (least := self._least()) is not None:
            words, hint = least
            raise InfeasibleError(
                f"no number of GPUs has {self.goal.fact(self.unit)}: {words}, however many there are", hint=hint
            )
        numbers = counts(self.base, 1, self.most)
        answer = self._fastest(numbers) if self.goal.budget is not None else self._fewest(numbers)
        if answer is None and self.should_stop():
            raise InterruptedSearchError(f"interrupted before a number of GPUs had {self.goal.fact(self.unit)}")
        if answer is None:
            raise self._nothing(numbers)
        better = [number for number in numbers if self._could_be_better(number, answer)]
        for number in better:
            self.looked.setdefault(number, Looked(number, "skipped", "not looked at"))
        return Sizing(
            goal=self.goal.words(self.unit),
            gpus=answer,
            proven=not better,
            looked=tuple(self.looked[number] for number in sorted(self.looked)),
            plan=self.plans[answer],
            tokens=self.items,
            unit=self.unit,
            gpu_hour_price=self.goal.gpu_hour_price,
            hosted=self._with_host([number for number in numbers if number < answer]),
        )

    def _least(self) -> tuple[str, str] | None:
        """Return a lower bound above the goal that holds for every number of GPUs, and a hint; None if none is above.

        Whatever the number, a microbatch passes through all ops of its forward and backward pass, each of which is
        launched (the weight passes of different stages may run side by side), and all devices together take as long as
        one that does all the work.
        """
        if self.base.cluster.groups:  # they differ in this
            return None
        if self.goal.target_seconds is not None:
            roofline = self.base.context(self.effort).roofline
            seconds = roofline.chained_launches() + self.base.costs.stack["step_seconds"]
            if seconds > self.goal.target_seconds:
                return f"it takes {format_seconds(seconds)} or more", self.goal.raised_to(seconds)
        if self.goal.budget is not None:
            price = self.goal.price(1, self._floor(self.base), self.items)
            if price is not None and price > self.goal.budget:
                return f"it costs {price:.4g} or more", self.goal.raised_to(price)
        return None

    def _with_host(self, numbers: Sequence[int]) -> Looked | None:
        """Return the least of the first few numbers on which a plan fits with host memory; None if none is found."""
        if self.goal.target_seconds is not None or self.goal.budget is not None:
            return None
        left = held_in_all(self.base, UNHOSTED)
        tasks = (self._sized(number) for number in numbers if left / number <= self.base.job.memory_limit)
        for task in islice((own for own in tasks if isinstance(own, Task) and own.constraints.reserve), HOSTED_LOOKS):
            if self.should_stop():
                return None
            self.progress(Progress("gpus", detail=f"{task.job.gpus} GPUs with host memory"))
            found = self._look(task.opened, quick(self.effort, HOSTED_SECONDS))
            if found.outcome == "meets":
                return found
        return None

    def _sized(self, number: int) -> Task | str:
        """Return the job on a number of GPUs, with equal stages, or why there is none."""
        try:
            task = replace(resized(self.base, gpus=number), unequal=None)
        except (JobError, ClusterError, PinError) as error:
            return str(error.args[0])
        return task if task.space else f"no equal stages of {number} GPUs keep to the pins"

    @property
    def unit(self) -> str:
        """What a step processes: "token" if the model reads numbers of tokens, else "sample"."""
        return "token" if self._tokens_per_sample() else "sample"

    @property
    def items(self) -> int:
        """Tokens of a step, or samples."""
        return self.base.job.global_batch * (self._tokens_per_sample() or 1)

    def _tokens_per_sample(self) -> int:
        workload = self.base.workload
        graph = workload.folded(workload.fixed_batch or self.base.job.global_batch).graph
        for name in graph.inputs:
            value = graph.values[name]
            if not value.is_float and len(value.shape) == 2:
                return value.shape[1]
        return 0

    # Which numbers are looked at.

    def _fewest(self, numbers: list[int]) -> int | None:
        """Return the least number that meets the goal: numbers that no bound excludes, in ascending order.

        For a target time they may be many: a number that meets it is found first by doubling, then halved.
        """
        candidates = [number for number in numbers if not self._excluded(number)]
        if self.goal.target_seconds is None:
            return next((number for number in candidates if not self.should_stop() and self._meets(number)), None)
        high = None
        index, step = 0, 1
        while index < len(candidates) and high is None and not self.should_stop():
            if self._meets(candidates[index]):
                high = index
            index, step = index + step, step * 2
        if high is None and candidates and self._meets(candidates[-1]):
            high = len(candidates) - 1
        if high is None:
            return None
        left = [number for number in candidates[:high] if number not in self.looked]
        while left and not self.should_stop():
            middle = left[len(left) // 2]
            if self._meets(middle):
                high = candidates.index(middle)
                left = [number for number in left if number < middle]
            else:
                left = [number for number in left if number > middle]
        # Smaller numbers that were passed over may do all the same.
        for number in candidates[:high]:
            if number not in self.looked and not self.should_stop() and self._meets(number):
                return number
        return candidates[high]

    def _fastest(self, numbers: list[int]) -> int | None:
        """Return the number whose plan is the fastest of those within the budget, looked for from the largest down."""
        best: int | None = None
        for number in reversed([number for number in numbers if not self._excluded(number)]):
            if self.should_stop():
                break
            if best is not None and not self._could_be_faster(number, best):
                continue
            if self._meets(number) and (best is None or self._seconds(number) < self._seconds(best)):
                best = number
        return best

    def _seconds(self, number: int) -> float:
        seconds = self.looked[number].step_seconds
        return math.inf if seconds is None else seconds

    def _could_be_faster(self, number: int, best: int) -> bool:
        task = self._task(number)
        return isinstance(task, Task) and self._floor(task) < self._seconds(best)

    def _could_be_better(self, number: int, answer: int) -> bool:
        """Whether it is neither proven nor found out that another number is no better answer."""
        known = self.looked.get(number)
        if number == answer or (known is not None and (known.proven or known.outcome == "meets")):
            return False
        if known is None and self._excluded(number):
            return False
        if self.goal.budget is None:
            return number < answer
        return self._could_be_faster(number, answer)

    # What is known of a number.

    def _task(self, number: int) -> Task | str:
        """Return the job on a number of GPUs, with equal stages and without host memory, or why there is none.

        What is proven of a number is proven of equal stages.
        """
        if number not in self._tasks:
            task = self._sized(number)
            self._tasks[number] = task.on_device if isinstance(task, Task) else task
        return self._tasks[number]

    def _excluded(self, number: int) -> bool:
        """Whether a bound that costs nothing excludes a number; noted if so."""
        if number not in self.looked:
            task = self._task(number)
            why = task if isinstance(task, str) else self._why_not(task)
            if not why:
                return False
            self.looked[number] = Looked(number, "fails", why, proven=True)
        return self.looked[number].outcome == "fails" and self.looked[number].proven

    def _why_not(self, task: Task) -> str:
        limit, number = task.job.memory_limit, task.job.gpus
        state = self._state_bytes(task) / number
        if state > limit:
            return f"parameters, gradients and optimizer take {format_bytes(state)} of {format_bytes(limit)} per device"
        if self.goal.target_seconds is not None or self.goal.budget is not None:
            floor = self._floor(task)
            if self.goal.target_seconds is not None and floor > self.goal.target_seconds:
                return f"no plan takes less than {format_seconds(floor)}"
            price = self.goal.price(number, floor, self.items)
            if self.goal.budget is not None and price is not None and price > self.goal.budget:
                return f"no plan costs less than {price:.4g}"
        return ""

    def _state_bytes(self, task: Task) -> float:
        """Return the bytes that all devices of a job hold at least."""
        if task.constraints.hosts_optimizer:
            return 0.0
        if self._state is None:
            self._state = held_in_all(task)
        return self._state

    def _floor(self, task: Task) -> float:
        search = task.context(self.effort)
        batch = task.job.global_batch
        floors = np.array([search.roofline.seconds(configuration, batch) for configuration in task.space])
        return float(floors.min()) + task.costs.stack["step_seconds"]

    def _meets(self, number: int) -> bool:
        """Whether a number meets the goal, by its best plan; noted."""
        if number not in self.looked:
            task = self._task(number)
            assert isinstance(task, Task), "numbers without a task are excluded"
            self.progress(Progress("gpus", detail=f"{number} GPUs"))
            self.looked[number] = self._look(task, self.effort)
        return self.looked[number].outcome == "meets"

    def _look(self, task: Task, effort: Effort) -> Looked:
        number, limit = task.job.gpus, task.job.memory_limit
        end = time.monotonic() + (effort.time_limit or COUNT_SECONDS)
        thrifty = thriftiest(task, enough=limit, end=end, should_stop=self.should_stop)
        if thrifty.bytes > limit:
            proven = self._all_too_large(task)
            what = f"needs {format_bytes(thrifty.floor)} or more" if proven else (
                f"nothing found that fits: the plan with the least memory needs {format_bytes(thrifty.bytes)}"
                if math.isfinite(thrifty.bytes) else "no plan keeps to the pins"
            )  # fmt: skip
            return Looked(number, "fails", what, proven=proven)
        watch = _Watch(self.goal.target_seconds, self.should_stop)
        found = find_plan(task, effort, progress=watch.progress, should_stop=watch.should_stop)
        if found.plan is None or found.plan.simulated is None:
            return Looked(number, "fails", "a plan that fits was found by bytes, and none by the search")
        plan, seconds = found.plan, found.plan.simulated.step_seconds
        self.plans[number] = plan
        price = self.goal.price(number, seconds, self.items)
        outcome, why, proven = "meets", "", False
        if self.goal.target_seconds is not None and seconds > self.goal.target_seconds:
            proven = found.outcome.bound > self.goal.target_seconds
            outcome, why = "fits", "slower than the target" + (" (by its bound)" if proven else "")
        if self.goal.budget is not None and price is not None and price > self.goal.budget:
            cheapest = self.goal.price(number, found.outcome.bound, self.items)
            assert cheapest is not None, "there is a price"
            proven = cheapest > self.goal.budget
            outcome, why = "fits", "above the budget" + (" (by its bound)" if proven else "")
        peak = max(stage.peak for stage in found.plan.simulated.stages)
        return Looked(number, outcome, why, proven, seconds, peak, price, plan.summary)

    def _all_too_large(self, task: Task) -> bool:
        """Whether every configuration needs more than the limit, by the sum of its smallest bytes."""
        search = task.context(self.effort)
        end = time.monotonic() + (self.effort.time_limit or COUNT_SECONDS)
        return all(_too_large(search, configuration, end) for configuration in task.space)

    def _nothing(self, numbers: Iterable[int]) -> AutoparError:
        known = [self.looked[number] for number in sorted(self.looked)]
        slow = [own for own in known if own.step_seconds is not None]
        nearest = ease = ""
        if slow:
            best = min(slow, key=lambda own: own.step_seconds or math.inf)
            cheapest = min(slow, key=lambda own: own.cost or math.inf)
            nearest = f"; the fastest found takes {format_seconds(best.step_seconds or 0.0)} on {best.gpus} GPUs"
            if cheapest.cost is not None:
                nearest += f", the cheapest costs {cheapest.cost:.4g} on {cheapest.gpus}"
            missed = best.step_seconds if self.goal.target_seconds is not None else cheapest.cost
            ease = f", or {self.goal.raised_to(missed)}" if missed is not None else ""
        elif known:
            nearest = f"; {known[-1].gpus} GPUs: {known[-1].why}"
        largest = max(numbers, default=0)
        return InfeasibleError(
            f"no number of GPUs up to {largest} has {self.goal.fact(self.unit)}{nearest}",
            hint=f"--max-gpus {2 * largest}{ease}",
        )


def _too_large(search: SearchContext, configuration: Configuration, end: float) -> bool:
    if time.monotonic() > end:
        return False
    node = open_node(search, (configuration,), end)
    return node is None or min(node.state.least_bytes.values()) > search.memory_limit


class _Watch:
    """Stops a search as soon as it is known whether a target time can be met."""

    def __init__(self, target: float | None, should_stop: StopCallback) -> None:
        self._target, self._caller = target, should_stop
        self._bound = 0.0

    def progress(self, progress: Progress) -> None:
        """Note the bound."""
        if math.isfinite(progress.incumbent):
            self._bound = progress.bound

    def should_stop(self) -> bool:
        """Whether the caller wants to stop, or the bound is above the target."""
        return self._caller() or (self._target is not None and self._bound > self._target)

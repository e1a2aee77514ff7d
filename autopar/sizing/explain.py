"""Why no plan fits: what is missing where, what excludes each other, and the cheapest ways out, each simulated.

Whether a changed request has a plan is decided by the thriftiest one that is found (`least_memory_plan.py`): a plan
that fits is found, one that does not exist is not; what is proven is said apart. The conflict is found by a deletion
filter: every pin and the number of GPUs is dropped in turn, and left out if nothing fits without it either.

What is missing, and how much memory would do, is told of one plan: the thriftiest one, unless searches with as much
memory as that needs, and then with less and less, find one that needs less, or about as much and takes less time.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace

from autopar.errors import AutoparError, ClusterError, InfeasibleError, InterruptedSearchError, JobError, PinError
from autopar.formulate.block_memory import UNHOSTED
from autopar.least_memory_plan import Thrifty, held_in_all, shortage, thriftiest
from autopar.pins import Item, Pins
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.outcome import Outcome
from autopar.shortage import Shortage
from autopar.sizing.planning import Found, find_plan, quick
from autopar.sizing.records import Infeasibility, Relaxation
from autopar.task import Effort, Task, pinned, resized
from autopar.units import format_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest times of the parts of an explanation, in seconds; what one leaves is for those after it.

    Attributes:
        shortage: For what is missing, and how much memory would do.
        conflict: For what excludes each other.
        gpus: For numbers of GPUs.
        ways: For the ways out.
        look: For one changed request: whether anything fits, and its best plan.
    """

    shortage: float = 26.0
    conflict: float = 15.0
    gpus: float = 15.0
    ways: float = 14.0
    look: float = 6.0

    def within(self, seconds: float) -> "Limits":
        """Return the same times, all shorter in the same proportion if they are longer than some seconds together."""
        whole = self.seconds
        return self if whole <= seconds else Limits(*(own * seconds / whole for own in astuple(self)))

    @property
    def seconds(self) -> float:
        """All parts together."""
        return self.shortage + self.conflict + self.gpus + self.ways


USUAL = Limits()

LEAST_SHARE = 0.25
"""Of a limit of time, what there is at least for saying why nothing fits, however late that is known."""


MOST_GPUS = 65536
"""Default of the largest number of GPUs a way out is looked for on."""

ROOM = 1.001
"""Memory limits that are tried are this much above what the thriftiest plan needs, for the rounding of sums."""

THRIFTY_SHARE = 0.75
"""Of the time for what is missing, what there is for the thriftiest plan; the rest is for searches with its memory."""

LESS = 0.97
"""Of the bytes of a plan that such a search finds, what the next one has."""


class Explainer:
    """Finds out why nothing fits.

    Attributes:
        task: What nothing fits in.
        effort: How hard to look for plans.
        most_gpus: The largest number of GPUs a way out is looked for on.
        limits: How long it may take.
    """

    def __init__(
        self,
        task: Task,
        effort: Effort,
        *,
        most_gpus: int = MOST_GPUS,
        limits: Limits = USUAL,
        progress: ProgressCallback = silent,
        should_stop: StopCallback = never,
    ) -> None:
        self.task, self.effort, self.most_gpus, self.limits = task, effort, most_gpus, limits
        self._progress, self._should_stop = progress, should_stop
        self._end = math.inf
        self._complete = True

    def explain(self, outcome: Outcome) -> Infeasibility:
        """Return why nothing fits.

        Raises:
            PinError: If pins leave no plan at all, whatever the memory.
            InterruptedSearchError: If a plan fits after all, which the search had no time to find.
        """
        began = time.monotonic()
        self._end = began + self.limits.shortage
        self._tell("what is missing")
        end = began + THRIFTY_SHARE * self.limits.shortage
        found = thriftiest(self.task.last_opened or self.task.opened, end=end, should_stop=self._should_stop)
        if not self.task.space:
            raise PinError(
                f"no stages with meshes of their own were found that fit {format_bytes(self.task.job.memory_limit)}, "
                "and the pins leave no others",
                hint="drop or change the pinned number of stages, or raise --memory-limit",
            )
        if found.candidate is None:
            raise PinError("no plan keeps to the pins, whatever the memory", hint="drop one of them")
        lacking, by_memory = self._by_memory(found)
        self._tell(f"{format_bytes(lacking.bytes)} on stage {lacking.stage}, {format_bytes(lacking.over)} over")
        self._end += self.limits.conflict
        conflict = self._conflict()
        self._end += self.limits.gpus
        more = self._more_gpus()
        self._end += self.limits.ways
        ways = [by_memory, *self._by_dropping(conflict), *self._by_gpus(more)]
        return Infeasibility(
            gpus=self.task.job.gpus,
            shortage=lacking,
            proven=outcome.proves_none,
            conflict=(
                f"memory limit {format_bytes(self.task.job.memory_limit)}",
                *([f"{self.task.job.gpus} GPUs"] if more is not None else []),
                *map(str, conflict),
                *self._insisted(),
            ),
            complete=self._complete,
            relaxations=tuple(sorted(ways, key=_price)),
            interrupted=self._should_stop(),
        )

    def _tell(self, what: str) -> None:
        self._progress(Progress("explain", detail=what))

    def _late(self) -> bool:
        return time.monotonic() > self._end or self._should_stop()

    def _fitting(self, task: Task | None) -> Thrifty | None:
        """Return a plan that fits; None if none is found, be it for lack of time, which is noted."""
        if task is None:
            return None
        limit, end = task.job.memory_limit, min(self._end, time.monotonic() + self.limits.look)
        found = thriftiest(task.opened, enough=limit, end=end, should_stop=self._should_stop)
        fits = found.bytes <= limit
        self._complete &= fits or not (found.is_cut or self._should_stop())
        return found if fits else None

    def _repinned(self, pins: Pins) -> Task | None:
        """Return the task with other pins; None if they leave nothing."""
        with suppress(PinError):
            return pinned(self.task, pins)
        return None

    def _conflict(self) -> dict[Item, Thrifty | None]:
        """Return the pins that belong to the conflict, each with a plan that fits without it alone, if one is known."""
        pins = self.task.pins
        kept: dict[Item, Thrifty | None] = dict.fromkeys(pins.items)
        for item in pins.items:
            if self._late():
                self._complete = False
                break
            self._tell(f"without {item}")
            without = self._repinned(pins.without(*(own for own in pins.items if own not in kept or own == item)))
            found = self._fitting(without)
            if found is None:
                del kept[item]
            elif len(kept) == len(pins.items):
                kept[item] = found
        return kept

    def _insisted(self) -> tuple[str, ...]:
        """Return what the model insists on, if it does: microbatches cannot be smaller."""
        fixed = self.task.workload.fixed_batch
        return () if fixed is None or fixed == 1 else (f"the model, which works on {fixed} samples at a time",)

    def _more_gpus(self) -> tuple[Task, Thrifty] | None:
        """Return the task on the smallest number of GPUs on which a plan that fits is found, and that plan."""
        fits: tuple[Task, Thrifty] | None = None
        low, count = self.task.job.gpus, self.task.job.gpus * 2
        least = held_in_all(self.task, UNHOSTED) / self.task.job.memory_limit
        while count < least:
            low, count = count, count * 2
        low = max(low, math.ceil(least) - 1)
        while count <= self.most_gpus and not self._late():
            self._tell(f"{count} GPUs")
            other = sized(self.task, count)
            found = self._fitting(other)
            if other is not None and found is not None:
                fits = other, found
                break
            low, count = count, count * 2
        if fits is None:
            self._complete &= count > self.most_gpus
            return None
        while between := counts(self.task, low + 1, fits[0].job.gpus - 1):
            if self._late():
                self._complete = False
                break
            middle = between[(len(between) - 1) // 2]
            self._tell(f"{middle} GPUs")
            other = sized(self.task, middle)
            found = self._fitting(other)
            if other is not None and found is not None:
                fits = other, found
            else:
                low = middle
        return fits

    # Ways out, each solved and simulated.

    def _best(self, task: Task, known: Thrifty | None) -> Found | None:
        """Return the best plan found in the time there is, or one that is known, if it fits; None if there is none."""
        is_late = self._late()
        if is_late and (known is None or known.bytes > task.job.memory_limit):
            return None
        left = max(1.0, self._end - time.monotonic())
        effort = quick(self.effort, min(left, self.limits.look))
        found = find_plan(task, effort, should_stop=lambda: is_late or self._should_stop(), known=known)
        return found if found.plan is not None else None

    def _by_dropping(self, conflict: Mapping[Item, Thrifty | None]) -> Iterator[Relaxation]:
        for item, known in conflict.items():
            self._tell(f"without {item}")
            task = self._repinned(self.task.pins.without(item))
            found = self._best(task, known) if task is not None else None
            if found is not None:
                yield _relaxation(f"without {item}", f"leave out {item.text!r}", found)

    def _by_gpus(self, more: tuple[Task, Thrifty] | None) -> Iterator[Relaxation]:
        if more is not None:
            task, known = more
            self._tell(f"{task.job.gpus} GPUs")
            found = self._best(task, known)
            if found is not None:
                yield _relaxation(f"{task.job.gpus} GPUs", f"--gpus {task.job.gpus}", found)

    def _by_memory(self, thrifty: Thrifty) -> tuple[Shortage, Relaxation]:
        """Return what is missing, and more memory per device as a way out: both of one plan.

        Raises:
            InterruptedSearchError: If a plan fits after all, which the search had no time to find.
        """
        lacking, found = shortage(thrifty, self.task), None
        limit = lacking.bytes * ROOM
        while lacking.over > 0:
            self._tell(f"{format_bytes(limit)} per device")
            better = self._best(resized(self.task, memory_limit=limit), thrifty)
            if better is None:
                break
            found = better
            lacking = shortage(replace(thrifty, candidate=found.candidate), self.task)
            thrifty = replace(thrifty, candidate=found.candidate, bytes=lacking.bytes)
            limit = max(lacking.limit, lacking.bytes * LESS)
        need = lacking.bytes * ROOM
        device = self.task.costs.cluster.device.memory
        option = f"--memory-limit {need / 1e9:.4g}" if need <= device else f"devices with {format_bytes(need)} free"
        what = f"{format_bytes(need)} per device"
        if lacking.over <= 0:
            hint = "allow more time" if found is None else f"allow more time, or search with {option}"
            raise InterruptedSearchError(f"{lacking.plan} fits, but was found too late", hint=hint)
        if found is not None:
            return lacking, _relaxation(what, option, found)
        gpus = self.task.job.gpus
        return lacking, Relaxation(what, option, lacking.plan, lacking.step_seconds, lacking.bytes, gpus, False)


def _relaxation(what: str, option: str, found: Found) -> Relaxation:
    plan = found.plan
    assert plan is not None, "there is one"
    assert plan.simulated is not None, "plans that are found are simulated"
    peak = max(stage.peak for stage in plan.simulated.stages)
    searched = plan.search is not None and plan.search.termination in ("optimal", "exhausted")
    return Relaxation(what, option, plan.summary, plan.simulated.step_seconds, peak, plan.job.gpus, searched)


def sized(task: Task, gpus: int) -> Task | None:
    """Return a task on another number of GPUs; None if there are not so many, or its pins leave nothing there."""
    with suppress(JobError, ClusterError, PinError):
        return resized(task, gpus=gpus)
    return None


def counts(task: Task, first: int, last: int) -> list[int]:
    """Return the numbers of GPUs from `first` to `last` that fill nodes, or are less than one."""
    per_node = task.cluster.devices_per_node
    part = range(first, min(last, per_node) + 1)
    nodes = range(max(1, -(-max(first, per_node + 1) // per_node)), last // per_node + 1)
    return [*part, *(number * per_node for number in nodes)]


def explain_infeasible(
    task: Task,
    effort: Effort,
    outcome: Outcome,
    *,
    most_gpus: int = MOST_GPUS,
    limits: Limits = USUAL,
    end: float = math.inf,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> AutoparError:
    """Return the error that says why nothing fits, with all that was found out.

    Args:
        task: What nothing fits in.
        effort: How hard to look for plans.
        outcome: What the search found.
        most_gpus: The largest number of GPUs a way out is looked for on.
        limits: How long it may take at most.
        end: When to have done, on the monotonic clock; but there is `LEAST_SHARE` of the effort's limit at least.
        progress: Told how far it is.
        should_stop: Polled.
    """
    parts = [(task, outcome)]
    return explain_parts(
        parts, effort, most_gpus=most_gpus, limits=limits, end=end, progress=progress, should_stop=should_stop
    )


def explain_parts(
    parts: Sequence[tuple[Task, Outcome]],
    effort: Effort,
    *,
    most_gpus: int = MOST_GPUS,
    limits: Limits = USUAL,
    end: float = math.inf,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> AutoparError:
    """Return the error that says why nothing fits in any part of a space, with the cheapest ways out of all parts.

    Args:
        parts: The parts, each with what its search found.
        effort: As of `explain_infeasible`, like all else.
        most_gpus: The largest number of GPUs a way out is looked for on.
        limits: How long it may take at most, for all parts together.
        end: When to have done, on the monotonic clock.
        progress: Told how far it is.
        should_stop: Polled.
    """
    least = LEAST_SHARE * (effort.time_limit or 0.0)
    limits = limits.within(min(limits.seconds, max(least, end - time.monotonic())) / len(parts))
    reports: list[Infeasibility] = []
    refused: PinError | None = None
    for task, outcome in parts:
        explainer = Explainer(
            task, effort, most_gpus=most_gpus, limits=limits, progress=progress, should_stop=should_stop
        )
        try:
            reports.append(explainer.explain(outcome))
        except InterruptedSearchError as error:
            return error
        except PinError as error:
            refused = error
    if not reports:
        assert refused is not None, "there is a part"
        return refused
    report = _together(reports)
    lacking = report.shortage
    message = (
        f"no plan fits {report.gpus} device{'s' if report.gpus > 1 else ''}: "
        f"the plan with the least memory ({lacking.plan}) "
        f"needs {format_bytes(lacking.bytes)} on stage {lacking.stage}, "
        f"{format_bytes(lacking.over)} more than the limit of {format_bytes(lacking.limit)}"
    )
    hint = "; or ".join(way.option for way in report.relaxations[:2])
    return InfeasibleError(message, hint=hint, report=report)


def _together(reports: Sequence[Infeasibility]) -> Infeasibility:
    """Return the report of the part that needs least memory, with the cheapest ways out of all parts."""
    least = min(reports, key=lambda report: report.shortage.bytes)
    ways = sorted((way for report in reports for way in report.relaxations), key=_price)
    cheapest: dict[str, Relaxation] = {}
    for way in ways:
        cheapest.setdefault(way.option, way)
    return replace(
        least,
        shortage=replace(least.shortage, floor=min(report.shortage.floor for report in reports)),
        proven=all(report.proven for report in reports),
        complete=all(report.complete for report in reports),
        relaxations=tuple(cheapest.values()),
        interrupted=any(report.interrupted for report in reports),
    )


def _price(way: Relaxation) -> float:
    """Return what a step costs by a way out, in GPU seconds."""
    return way.step_seconds * way.gpus

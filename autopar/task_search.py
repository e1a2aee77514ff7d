"""Searches that end once it is proven that no plan fits, and are repeated with host memory then.

The plan with least memory is looked for where no constructed plan fits, and again, if time was too short, after some
seconds without a plan: if it fits, it is the first incumbent; if it does not, the search ends. The work is done a step
at a time, for a plan may come meanwhile, and workers wait for the process that does it.

Where nothing is found that fits on the devices alone, all is searched again with what may lie in host memory. Where
plans are found that recompute, their placements alone are tried with it: weighing it everywhere takes time where memory
is short.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

from autopar.configuration import Configuration
from autopar.formulate.constraints import Constraints
from autopar.least_memory_plan import Looking, Thrifty, look, thriftiest
from autopar.problem import Problem
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.backends import HERE, Engine
from autopar.search.branch_and_bound import search
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.host_restaging import may_gain, restaged
from autopar.search.outcome import Outcome
from autopar.search.tasks import Finding
from autopar.task import Effort, Task

PATIENCE = 4.0
"""Seconds without a plan after which the thriftiest one is looked for, but not while the first configuration is looked
at: that mostly has one, and takes longer for a model without repeated blocks."""

ASKED_SECONDS = 10.0
"""Longest time that may take, and the least there is for it where a search that proves nothing ends without a plan."""

LEAST_SECONDS = 1.0
"""A search with host memory has at least so much time."""

SURE = 1.1
"""Where not all configurations were looked at, the thriftiest plan found has to be this much too large."""


def search_plans(
    task: Task,
    effort: Effort,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    on_problem: Callable[[Problem], None] | None = None,
    engine: Engine = HERE,
    late: bool = False,
    known: Thrifty | None = None,
    incumbent: float = math.inf,
    starts: tuple[Configuration, ...] = (),
) -> Outcome:
    """Return what is found in the space of a task: without host memory, or little of it, if anything fits so.

    Args:
        task: The task.
        effort: How hard to look.
        progress: Told how far it is.
        should_stop: Polled.
        on_problem: Given every placement problem that is solved, but those with a price on memory.
        engine: Where to search.
        late: Whether to take the thriftiest plan even if the search was stopped.
        known: The thriftiest plan, host memory included, to take if it fits and none is found: then nobody looks for
            it, and the search ends at its limit even without a plan.
        incumbent: Objective in seconds of a plan known beside the search: only faster ones are looked for, and none may
            be found.
        starts: Configurations of such plans, to begin with.
    """
    began, reserve = time.monotonic(), task.constraints.reserve

    def tried(one: Task, effort: Effort, *, is_last: bool) -> tuple[SearchContext, Outcome]:
        start, limit = time.monotonic(), effort.time_limit or math.inf
        watch = FeasibilityWatch(one, progress, should_stop, start + limit, known if is_last else None)
        context = one.context(effort, progress=watch.progress, should_stop=watch.should_stop, on_problem=on_problem)
        context = replace(
            context,
            time_limit=max(0.0, start + limit - time.monotonic()),
            least_memory_plan=watch.least_memory_plan,
            incumbent=incumbent,
            starts=starts,
        )
        if known is not None:
            context = replace(context, settings=replace(context.settings, overtime_seconds=0.0))
        outcome = search(one.space, context, engine.open_executor)
        if math.isinf(incumbent) and (known is None or is_last):
            watch.rescue(outcome, late=late or known is not None)
        return context, outcome

    context, outcome = tried(task.on_device, effort, is_last=not reserve)
    if not reserve:
        return outcome
    if outcome.candidates:
        outcome.reserve, outcome.reserve_bound = reserve, min(map(context.least, zip(task.space)), default=0.0)
        if may_gain(outcome.candidates):
            outcome.restaged = True
            _restage(context, task.by_kind, outcome, effort, began)
        return outcome
    if math.isfinite(incumbent) or (outcome.stopped and known is None):  # something fits, or might all the same
        return outcome
    if effort.time_limit is not None:
        effort = replace(effort, time_limit=max(LEAST_SECONDS, effort.time_limit - (time.monotonic() - began)))
    began = time.monotonic()
    context, outcome = tried(task.opened, effort, is_last=True)
    outcome.needed, last = reserve, task.last_opened
    if may_gain(outcome.candidates) and task.by_kind[1:]:
        outcome.restaged, outcome.reserve = True, task.constraints.last
        outcome.reserve_bound = min(map(context.least, zip(task.space)), default=0.0)
        _restage(context, task.by_kind[1:], outcome, effort, began)
    if outcome.candidates or last is None or (outcome.stopped and known is None):
        return outcome
    if effort.time_limit is not None:
        effort = replace(effort, time_limit=max(LEAST_SECONDS, effort.time_limit - (time.monotonic() - began)))
    _, found = tried(last, effort, is_last=True)
    if not found.candidates:
        return outcome
    found.needed = last.constraints.hosted
    return found


def _restage(
    context: SearchContext, ways: Sequence[Constraints], outcome: Outcome, effort: Effort, began: float
) -> None:
    """Cut the placements of the best plans again with other state in host memory; faster plans go to the outcome."""
    for constraints in ways:
        opened = replace(context, constraints=constraints)
        for candidate in restaged(opened, outcome.candidates, began + (effort.time_limit or math.inf)):
            outcome.add_finding(Finding(candidate.objective, candidate, 0), effort.top_k)


class FeasibilityWatch:
    """Watches a search; it is told of progress and asked whether to stop.

    Args:
        task: What is searched.
        progress: Told what it is told.
        should_stop: Asked first.
        end: When the search is to end, on the monotonic clock.
        known: The thriftiest plan, so that nobody has to look for it.

    Attributes:
        lost: Whether the thriftiest plan is too large, so that the search was stopped.
    """

    def __init__(
        self,
        task: Task,
        progress: ProgressCallback,
        should_stop: StopCallback,
        end: float = math.inf,
        known: Thrifty | None = None,
    ) -> None:
        self.lost = False
        self._task, self._progress, self._should_stop = task, progress, should_stop
        self._began, self._end = time.monotonic(), end
        self._best, self._looked = math.inf, False
        self._patience, self._asked = PATIENCE, ASKED_SECONDS
        self._found = known
        self._looking: Looking | None = None
        self._asking = Lock()
        # The thriftiest plan has equal stages: that it does not fit says nothing of stages on larger devices.
        self._has_roomier = task.unequal is not None and task.largest_limit > task.job.memory_limit

    def progress(self, progress: Progress) -> None:
        """Note that something was looked at, and whether there is a plan."""
        self._looked = True
        self._best = min(self._best, progress.incumbent)
        self._progress(progress)

    def should_stop(self) -> bool:
        """Whether the caller wants to stop, or no plan fits."""
        if self._should_stop():
            return True
        waited = time.monotonic() - self._began
        asks = self._looked and self._found is None and self._best == math.inf and not self._has_roomier
        asks = asks and (waited > self._patience or self._looking is not None)
        # Several threads ask whether to stop: one of them finds out, and the others go on meanwhile.
        if asks and self._asking.acquire(blocking=False):
            try:
                self._ask(steps=1)
            finally:
                self._asking.release()
        return self.lost

    def _ask(self, steps: float = math.inf) -> None:
        """Look for the plan with least memory, at most `steps` steps; not after the end of the search."""
        limit, now = self._task.job.memory_limit, time.monotonic()
        if self._looking is None:
            if now > self._end:
                return
            self._looking = look(self._task, enough=limit, end=min(now + self._asked, self._end))
        try:
            while steps > 0:
                next(self._looking)
                steps -= 1
        except StopIteration as over:
            self._looking, found = None, over.value
            if found.is_cut and found.bytes > limit:  # that says nothing: a busy machine may be asked again
                self._patience, self._asked = 2 * (time.monotonic() - self._began), 2 * self._asked
            else:
                self._found = found
                is_known = found.complete or found.candidate is not None
                self.lost = is_known and found.bytes > limit * (1.0 if found.complete else SURE)

    def least_memory_plan(self) -> Candidate | None:
        """Return the thriftiest plan, or one that is known, if it fits and there is time to look for it."""
        if self._found is None:
            self._ask()
        found = self._found
        return None if found is None or found.bytes > self._task.job.memory_limit else found.candidate

    def rescue(self, outcome: Outcome, *, late: bool = False) -> None:
        """Add the thriftiest plan to an outcome without any, if it fits: looking for time may miss what just fits.

        Args:
            outcome: Of a search.
            late: Whether to do so even if the search was stopped.
        """
        if self.lost:
            outcome.stopped = ""
        if outcome.candidates or outcome.proves_none or (outcome.stopped and not late):
            return
        limit = self._task.job.memory_limit
        end = max(self._end, time.monotonic() + ASKED_SECONDS)
        found = self._found or thriftiest(self._task, enough=limit, end=end)
        if found.candidate is not None and found.bytes <= limit:
            outcome.add_finding(Finding(found.candidate.objective, found.candidate, 0), 1)

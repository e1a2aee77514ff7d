"""The decisions of a plan weighed: solved again with one decision pinned to another value and all others free.

Values nearest to the plan's come first, of every decision one, then the next ones, until the time is over; each has an
equal share of what time is left, and at least a part of what the plan itself took. Half of it goes to configurations
like the plan's, where a good plan is found soonest, the rest to everything.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from autopar import solvers
from autopar.alternatives.decisions import Decision, Value, decisions, likest, pinned_to
from autopar.alternatives.job_of_plan import task_of
from autopar.alternatives.records import Alternative, Limit, Weighing
from autopar.errors import PinError, PlanError
from autopar.least_memory_plan import shortage, thriftiest
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.outcome import Outcome
from autopar.sizing.planning import Found, find_plan, quick
from autopar.task import NO_PINS, Effort, Task, pinned, resized
from autopar.units import format_bytes

WEIGHING_SECONDS = 120.0
"""Default of the time all alternatives have together."""

LEAST_SECONDS = 1.0
"""An alternative is not begun with less time than this."""

SHARE, MOST_SECONDS = 0.1, 20.0
"""Time each alternative gets at least: a share of what the plan took, and never more than this."""

SHORTAGE_SECONDS = 8.0
"""Longest time that is spent on what an alternative without a plan lacks."""

MORE = 1.1
"""Memory limit that is tried to see whether memory limits a plan, over the plan's own."""


def weigh(
    plan: Plan,
    *,
    time_limit: float = WEIGHING_SECONDS,
    model: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Weighing:
    """Return what the alternatives to each decision of a plan cost, and what limits the plan.

    Args:
        plan: A plan with the simulator's verdict.
        time_limit: Seconds for all alternatives together, beyond importing the model.
        model: Where the model is now; None for where it was.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        progress: Told how far it is.
        should_stop: Polled; once true what is known so far is returned.

    Raises:
        PlanError: If the plan was not simulated, or is not of this model.
    """
    if plan.simulated is None:
        raise PlanError("the plan has no simulated step to compare with", hint="solve again")
    task = task_of(plan, model=model, cache_dir=cache_dir, progress=progress)
    folded = task.workload.folded(plan.microbatch)
    free = pinned(task, NO_PINS).space if task.pins else task.space
    return Scale(task, plan, time_limit, progress, should_stop).weigh(decisions(plan, folded, free))


@dataclass(slots=True, eq=False)
class Scale:
    """Solves a job again with other pins, each with its share of the time that is left.

    Attributes:
        task: The job.
        plan: Its plan.
        time_limit: Seconds for all.
        progress: Told which one is looked at.
        should_stop: Polled.
        begun: When the clock was started.
        total: How many are to be looked at.
        done: How many were.
    """

    task: Task
    plan: Plan
    time_limit: float
    progress: ProgressCallback
    should_stop: StopCallback
    begun: float = 0.0
    total: int = 0
    done: int = 0

    @property
    def least(self) -> float:
        """Seconds a question gets at least, so that it has an answer worth having: then fewer are asked."""
        return max(LEAST_SECONDS, min(MOST_SECONDS, SHARE * self.took))

    @property
    def took(self) -> float:
        """Seconds the plan itself took; 0 if unknown."""
        return sum(phase.seconds for phase in self.plan.search.phases) if self.plan.search is not None else 0.0

    def begin(self, total: int) -> None:
        """Start the clock for so many questions."""
        self.begun, self.total = time.monotonic(), total

    def weigh(self, own: tuple[Decision, ...]) -> Weighing:
        """Return what other values of decisions cost, and what limits the plan."""
        assert self.plan.simulated is not None, "checked by the caller"
        search = self.plan.search
        finished = search is not None and search.termination in ("optimal", "exhausted")
        self.begin(1 + (not finished) + sum(len(decision.others) for decision in own))
        again = None if finished else self._solved("job", "as it is", self.task)
        limit = self._limit()
        found: dict[tuple[str, str], Alternative] = {}
        for row in zip_longest(*(decision.others for decision in own)):  # nearest values of all decisions first
            for decision, value in zip(own, row, strict=True):
                if value is not None:
                    found[decision.name, value.text] = self._alternative(decision, value)
        return Weighing(
            plan=self.plan.summary,
            simulated=self.plan.simulated,
            decisions=tuple((decision.name, decision.value) for decision in own),
            alternatives=tuple(found[decision.name, value.text] for decision in own for value in decision.others),
            limit=limit,
            again=again,
            seconds=time.monotonic() - self.begun,
            stopped="interrupted" if self.should_stop() else "time limit" if self._left() < LEAST_SECONDS else "",
        )

    def _left(self) -> float:
        return self.begun + self.time_limit - time.monotonic()

    def _is_over(self) -> bool:
        return self.should_stop() or self._left() < LEAST_SECONDS

    def _limit(self) -> Limit:
        """Return what limits the plan, by solving again with a higher memory limit."""
        simulated, limit = self.plan.simulated, self.plan.job.memory_limit
        assert simulated is not None, "checked by the caller"
        stage = max(range(len(simulated.stages)), key=lambda number: simulated.stages[number].peak)
        raised = resized(self.task, memory_limit=MORE * limit)
        more = self._solved("memory limit", format_bytes(MORE * limit), raised)
        parts = tuple(sorted(simulated.parts, key=lambda part: -part[1]))
        return Limit(simulated.stages[stage].peak / limit, stage, MORE * limit, more, parts)

    def _alternative(self, decision: Decision, value: Value) -> Alternative:
        return self.pinned(decision.name, value.text, pinned_to(self.task.pins, value))

    def pinned(
        self, decision: str, value: str, pins: Pins, holds: Callable[[Plan], bool] = lambda _: True
    ) -> Alternative:
        """Return the best plan under other pins, or why there is none; `holds` tells whether a plan is as asked."""
        if self._is_over():
            self.done += 1
            return Alternative(decision, value, "not looked at")
        try:
            task = pinned(self.task, pins)
        except PinError as error:
            self.done += 1
            return Alternative(decision, value, "not possible", str(error.args[0]))
        return self._solved(decision, value, task, holds)

    def _solved(
        self, decision: str, value: str, task: Task, holds: Callable[[Plan], bool] = lambda _: True
    ) -> Alternative:
        """Return the best plan of a task, or why there is none."""
        self.progress(Progress("alternatives", self.done, self.total, detail=f"{decision} {value}"))
        share = max(self._left() / max(1, self.total - self.done), min(self.least, self._left()))
        self.done += 1
        if self._is_over():
            return Alternative(decision, value, "not looked at")
        end = time.monotonic() + share
        alike = self._alike(task, share / 2) if share < 2 * self.took else None  # with more time it ends by itself
        left = end - time.monotonic()
        if alike is not None and left < LEAST_SECONDS and holds(alike):
            return Alternative(decision, value, "plan", "", alike.summary, alike.simulated)
        try:
            found = self._found(task, left)
        except PinError as error:
            if alike is None:
                return Alternative(decision, value, "none found", str(error.args[0]))
            found = Found(None, Outcome(stopped="time limit"))
        outcome, plans = found.outcome, [own for own in (found.plan, alike) if own is not None and holds(own)]
        if plans:
            best = min(plans, key=_seconds)
            bound = min(outcome.bound, best.objective) if math.isfinite(outcome.bound) else 0.0
            return Alternative(decision, value, "plan", "", best.summary, best.simulated, bound, not outcome.stopped)
        if found.plan is not None:
            return Alternative(decision, value, "not possible", "no rule of its ops keeps it so", complete=True)
        return self._without(decision, value, task, proven=not outcome.stopped and outcome.bound == float("inf"))

    def _alike(self, task: Task, seconds: float) -> Plan | None:
        """Return the best plan of the configurations that are most like the plan's; None if none is found."""
        space = likest(self.plan, task.space)
        if len(space) == len(task.space):
            return None
        try:
            return self._found(replace(task, space=space), seconds).plan
        except PinError:
            return None

    def _found(self, task: Task, seconds: float) -> Found:
        effort = quick(Effort(solver=_solver(self.plan)), max(LEAST_SECONDS, seconds))
        return find_plan(task, effort, should_stop=self.should_stop)

    def _without(self, decision: str, value: str, task: Task, *, proven: bool) -> Alternative:
        """Return why there is no plan: by how much the one that needs the least memory exceeds the limit."""
        if self.should_stop():
            return Alternative(decision, value, "none found", "interrupted")
        thrifty = thriftiest(task.opened, enough=task.job.memory_limit, end=time.monotonic() + SHORTAGE_SECONDS)
        if thrifty.candidate is None and thrifty.complete:
            return Alternative(decision, value, "not possible", "no plan keeps to it", complete=True)
        if thrifty.candidate is None:
            return Alternative(decision, value, "none found", "out of time")
        lacking = shortage(thrifty, task)
        if lacking.over <= 0:
            why = f"out of time; there is one that fits: {lacking.plan}"
            return Alternative(decision, value, "none found", why)
        kept = "the plan with the least memory" if proven else "the plan with the least memory found"
        why = (
            f"stage {lacking.stage} of {kept} needs {format_bytes(lacking.bytes)}, {format_bytes(lacking.over)} too "
            f"much ({lacking.plan})"
        )
        return Alternative(decision, value, "does not fit", why, complete=proven)


def _seconds(plan: Plan) -> float:
    return math.inf if plan.simulated is None else plan.simulated.step_seconds


def _solver(plan: Plan) -> str:
    """Return the solver a plan was found with, as far as it is one of ours."""
    name = plan.search.solver if plan.search is not None else ""
    return name if name in solvers.available() else "auto"

"""Plans by degrees that a search begins with, or is held against, and does not end below.

Of a search for a framework they are the incumbent: it looks for faster plans only, in their nodes first, and without
one the best of them is the answer, with the bound that the search has proven. Another search under a time limit keeps
its own runners-up; its answer is the best of them where that is faster.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.configuration import Configuration
from autopar.degree_descent import DegreeDescent, Found
from autopar.degrees import Degrees
from autopar.plan import Plan, Remark, SearchReport
from autopar.practice import adopted, with_fusion
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.task import Effort, Task
from autopar.verdict import LONGER, step_seconds

SHARE, MOST_SECONDS = 0.15, 10.0
"""Time for the descent, as a share of a time limit, and its most."""
SIMULATED = 12
"""Plans that are simulated at most: those that are faster by their estimate than the fastest one simulated."""
STARTS = 3
"""Configurations of each kind of recompute with which a search begins."""

METHOD = "a descent over degrees"


@dataclass(frozen=True, slots=True)
class Seeds:
    """Plans by degrees of a task.

    Attributes:
        plan: The fastest one, simulated; None if none fits.
        found: The best of each kind of recompute by estimates, the fastest first.
    """

    plan: Plan | None
    found: tuple[tuple[str, tuple[Found, ...]], ...]

    @property
    def objective(self) -> float:
        """Step time of the plan by the simulator, in seconds; infinity without one."""
        return math.inf if self.plan is None else self.plan.objective

    def seconds(self, flavour: str) -> float:
        """Return the step time of the best plan of a kind of recompute by its estimate; infinity without one."""
        return next((own.seconds for own in dict(self.found).get(flavour, ())), math.inf)

    def starts(self, flavours: Sequence[str]) -> tuple[Configuration, ...]:
        """Return the configurations of the best plans of some kinds of recompute."""
        found = sorted((own for name, plans in self.found if name in flavours for own in plans), key=_seconds)
        return tuple(dict.fromkeys(own.configuration for own in found))[:STARTS]

    def beside(self, plan: Plan, task: Task, fusion: str) -> Plan:
        """Return the faster of the plan of a search and the plan by degrees.

        Args:
            plan: What the search came to.
            task: The task.
            fusion: What is fused, as of `Effort`.
        """
        if self.plan is None or step_seconds(self.plan) >= step_seconds(plan):
            return plan
        own = with_fusion(self.plan, task, fusion)
        assert own.simulated is not None, "it was simulated"
        slower = 100 * (step_seconds(plan) / step_seconds(own) - 1)
        told = Remark("degrees", f"found by {METHOD}; the best plan of the search itself is {slower:.1f} % slower")
        return adopted(_told(own, told), plan)

    def alone(self, report: SearchReport, task: Task, fusion: str) -> Plan:
        """Return the plan of a search that found none that is faster, with the report of the search."""
        assert self.plan is not None, "searches without a plan to begin with have one, or none at all"
        own = with_fusion(self.plan, task, fusion)
        return replace(_told(own, Remark("degrees", f"found by {METHOD}; the search found none faster")), search=report)


NO_SEEDS = Seeds(None, ())


def _seconds(found: Found) -> float:
    return found.seconds


def _told(plan: Plan, remark: Remark) -> Plan:
    assert plan.simulated is not None, "it was simulated"
    return replace(plan, simulated=replace(plan.simulated, remarks=(remark, *plan.simulated.remarks)))


def descends(task: Task, effort: Effort) -> bool:
    """Whether a search for no framework, which a time limit may cut, is held against plans by degrees.

    Not with pins, which plans by degrees may break, nor on unequal nodes, which they share equally.
    """
    is_plain = not task.pins and not task.costs.cluster.groups
    return is_plain and task.job.mode == "train" and effort.time_limit is not None


def seeds_of(
    task: Task,
    runs: Callable[[Degrees], bool],
    flavours: Sequence[str],
    effort: Effort,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Seeds:
    """Return the best plans by degrees of a task.

    Args:
        task: The task.
        runs: Whether a plan may be taken.
        flavours: Kinds of recompute.
        effort: How hard the search will look.
        progress: Told that it begins.
        should_stop: Polled.
    """
    limit = math.inf if effort.time_limit is None else min(MOST_SECONDS, SHARE * effort.time_limit)
    end = time.monotonic() + limit
    progress(Progress("degrees"))
    descent = DegreeDescent(task, runs, flavours)
    descent.run(end, should_stop)
    found = tuple((flavour, tuple(descent.best(flavour))) for flavour in flavours)
    best: Plan | None = None
    longest = 0.0
    for own in sorted((own for _, each in found for own in each), key=_seconds)[:SIMULATED]:
        began = time.monotonic()
        late = best is not None and began + LONGER * longest > end + limit
        if late or should_stop() or (best is not None and own.seconds >= step_seconds(best)):
            break
        plan = descent.simulated(own)
        longest = max(longest, time.monotonic() - began)
        if plan is not None and (best is None or step_seconds(plan) < step_seconds(best)):
            best = plan
    return Seeds(best, found)

"""The best plan of a task, or none: what questions about size are answered with."""

from dataclasses import dataclass, replace

from autopar.collector import seldom_collected
from autopar.errors import InfeasibleError, InterruptedSearchError
from autopar.plan import Plan
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.search.outcome import Outcome
from autopar.sizing.hope import search_plans
from autopar.sizing.thrift import Thrifty
from autopar.task import Effort, PhaseClock, Task
from autopar.verdict import conclude


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a search came to.

    Attributes:
        plan: The best plan; None if none was found.
        outcome: The search.
    """

    plan: Plan | None
    outcome: Outcome


@seldom_collected()
def find_plan(
    task: Task,
    effort: Effort,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    known: Thrifty | None = None,
) -> Found:
    """Return the best plan of a task, without a word on why there is none.

    Args:
        task: The task.
        effort: How hard to look.
        progress: Told how far it is.
        should_stop: Polled.
        known: A plan that fits, host memory included, to take if no other is found in time.

    Raises:
        PinError: If plans were found, none of which keeps to the pins.
    """
    clock = PhaseClock(before=task.phases)
    with clock("search"):
        outcome = search_plans(task, effort, progress=progress, should_stop=should_stop, late=True, known=known)
    try:
        return Found(conclude(outcome, task, effort.solver, effort.top_k, clock), outcome)
    except (InfeasibleError, InterruptedSearchError):
        return Found(None, outcome)


def quick(effort: Effort, seconds: float) -> Effort:
    """Return an effort for one plan within some seconds."""
    return replace(effort, top_k=1, time_limit=min(seconds, effort.time_limit or seconds))

"""The best plan of a task, or none: what questions about size are answered with."""

from dataclasses import dataclass, replace

from autopar.collector import seldom_collected
from autopar.errors import InfeasibleError, InterruptedSearchError
from autopar.least_memory_plan import Thrifty
from autopar.plan import Plan
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.search.candidate import Candidate
from autopar.search.outcome import Outcome
from autopar.task import Effort, PhaseClock, Task
from autopar.task_search import search_plans
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

    @property
    def candidate(self) -> Candidate:
        """What the plan was written from."""
        assert self.plan is not None, "there is a plan"
        return next(
            own
            for own in self.outcome.candidates
            if own.draft is not None
            and (own.objective, own.configuration.schedule, own.configuration.num_microbatches)
            == (self.plan.objective, self.plan.schedule, self.plan.num_microbatches)
            and (own.draft.stages, own.draft.blocks, own.draft.variants)
            == (self.plan.stages, self.plan.blocks, self.plan.variants)
        )


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
        known: The thriftiest plan, host memory included, to take if it fits and no other is found in time.

    Raises:
        PinError: If plans were found, none of which keeps to the pins.
    """
    clock = PhaseClock(before=task.phases)
    with clock("search"):
        outcome = search_plans(task, effort, progress=progress, should_stop=should_stop, late=True, known=known)
    try:
        return Found(
            conclude(outcome, task, effort.solver, effort.top_k, clock, should_stop=should_stop, fusion=effort.fusion),
            outcome,
        )
    except (InfeasibleError, InterruptedSearchError):
        return Found(None, outcome)


def quick(effort: Effort, seconds: float) -> Effort:
    """Return an effort for one plan within some seconds."""
    return replace(effort, top_k=1, time_limit=min(seconds, effort.time_limit or seconds))

"""Progress reports of the search: incumbent and bound, after every task."""

from autopar.progress import Progress
from autopar.search.context import SearchContext
from autopar.search.outcome import Outcome


def report_progress(context: SearchContext, outcome: Outcome, phase: str, done: int, total: int, detail: str) -> None:
    """Report incumbent and bound, and add both to the history."""
    lowest = min(outcome.frontier_bound, outcome.unequal_bound, outcome.shares_bound, outcome.closed_bound)
    outcome.history.record(outcome.best, lowest)
    context.progress(Progress(phase, done, total, outcome.best, min(outcome.best, lowest), detail))

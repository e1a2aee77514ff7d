"""Branch and bound over configurations: best-first search on lower bounds, with proven bound and runners-up.

1. *Construct*: a first plan from degrees, or in the nodes of plans known beside the search (`construction.py`); local
   search near it where memory or time is short (`configuration_descent.py`).
2. *Bound and expand*: nodes are raised on the ladder of lower bounds, least bound first (`frontier.py`).
3. *Unequal stages*: pipelines whose stages have different meshes (`heterogeneous_nodes.py`).
4. *Runners-up*: the best plans that are unlike every better one (`runners_up.py`).
5. The rest of a time limit goes to the frontier again.

Work is done in tasks, by this process or others; the answer does not depend on their number (`ordered_execution.py`).
The reported bound is the least over all nodes, searched or not.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from autopar.bounds.transfer import TransferBounds
from autopar.configuration import PLAIN, Configuration, Family, families
from autopar.formulate.data_major import is_data_major
from autopar.search.clock import Clock
from autopar.search.configuration_descent import ConfigurationDescent
from autopar.search.construction import Construction, ImproveConstructed
from autopar.search.context import SearchContext
from autopar.search.frontier import Frontier
from autopar.search.heterogeneous_nodes import UnequalSearch
from autopar.search.history import History
from autopar.search.ordered_execution import TaskSeries, run_series
from autopar.search.outcome import Outcome
from autopar.search.reporting import report_progress
from autopar.search.runners_up import RunnersUp
from autopar.search.share_nodes import ShareSearch
from autopar.search.task_executor import Executor, InProcessExecutor
from autopar.search.tasks import Finding


def search(
    space: Sequence[Configuration],
    context: SearchContext,
    open_executor: Callable[[SearchContext], Executor] = InProcessExecutor,
) -> Outcome:
    """Return the best plans of a space, best first, and a lower bound on all of its plans.

    Args:
        space: The configurations.
        context: Inputs of the search.
        open_executor: Returns the executor of the tasks.

    Raises:
        WorkerError: If processes of the search keep dying.
    """
    outcome = Outcome(
        context.incumbent,
        history=History(context.before),
        hosted=context.constraints.hosted,
        settings=context.settings,
    )
    fitting = [own for own in space if context.may_fit(own)]
    outcome.pruned = len(space) - len(fitting)
    clock, nodes = Clock(context, outcome), families(fitting)
    with closing(_transfer(context, clock)) as transfer_bounds, open_executor(context) as executor:
        phases = _Phases(context, outcome, clock, transfer_bounds, executor, nodes)
        phases.construct()
        phases.bound_and_expand()
        phases.search_shares()
        phases.search_unequal_stages()
        phases.find_runners_up()
        phases.use_remaining_time()
        outcome.workers_bytes = executor.peak_bytes
    outcome.bound = min(outcome.best, phases.bound)
    outcome.history.record(outcome.best, outcome.bound)
    return outcome


def _transfer(context: SearchContext, clock: Clock) -> TransferBounds:
    """Return the bounds from other nodes, none of which is known yet."""
    own = context.folded, context.roofline, context.costs.stack, context.global_batch, context.memory_bounds
    return TransferBounds(*own, clock.must_stop, clock.is_late)


class _Phases:
    """The phases of one search, which share incumbent, clock and workers."""

    def __init__(
        self,
        context: SearchContext,
        outcome: Outcome,
        clock: Clock,
        transfer_bounds: TransferBounds,
        executor: Executor,
        nodes: Sequence[Family],
    ) -> None:
        self._context, self._outcome, self._clock = context, outcome, clock
        self._transfer_bounds, self._executor = transfer_bounds, executor
        self._starts = [next((own for own in nodes if start in own), None) for start in context.starts]
        self._plain = [own for own in nodes if own[0].schedule in PLAIN and not is_data_major(own[0].mesh)]
        self._frontier = Frontier(context, outcome, nodes, transfer_bounds)
        self._unequal, self._shares = UnequalSearch(context, outcome), ShareSearch(context, outcome)

    @property
    def bound(self) -> float:
        """Lower bound on all plans, in seconds."""
        return min(self._frontier.bound, self._unequal.bound, self._shares.bound)

    def construct(self) -> None:
        """Find a first plan, improve it, and search near it where memory or time is short."""
        context, outcome, clock = self._context, self._outcome, self._clock
        starts = [own for own in dict.fromkeys(self._starts) if own is not None]
        construction = Construction(context, outcome, self._plain, self._transfer_bounds, starts)
        self._run(construction, construction.count)
        is_short = bool(context.constraints.hosted) or not outcome.candidates or self._has_few_relaxations()
        if self._frontier.nodes and math.isinf(outcome.best) and not clock.must_stop():
            self._record_least_memory_plan()
        settling = ImproveConstructed(context, outcome, construction.constructed)
        self._run(settling, settling.count)
        if is_short and self._plain and outcome.candidates and not clock.must_stop():
            until = clock.share_end(context.settings.descent_share)
            self._run(ConfigurationDescent(context, outcome, self._plain, self._transfer_bounds, until))

    def bound_and_expand(self) -> None:
        """Raise the least bounds until no node may hold a better plan, or a limit is reached."""
        context, settings = self._context, self._context.settings
        self._frontier.resume()
        self._unequal.announce()
        self._shares.announce()
        if math.isfinite(context.time_limit):
            share = settings.runners_up_share + settings.unequal_share * bool(context.costs.cluster.groups)
            self._frontier.until = self._clock.end() - share * context.time_limit
        self._run(self._frontier)
        self._frontier.finish()

    def search_shares(self) -> None:
        """Bound rows of unequal devices with different shares of the batch, and look for better plans with them."""
        self._run(self._shares, self._shares.open_nodes(late=self._clock.must_stop()))
        self._outcome.left += self._shares.left

    def search_unequal_stages(self) -> None:
        """Bound pipelines whose stages have different meshes, and look for better ones."""
        self._run(self._unequal, self._unequal.open_nodes(late=self._clock.must_stop()))
        self._outcome.left += self._unequal.left

    def find_runners_up(self) -> None:
        """Look for the best plans that are unlike every better one."""
        context, outcome = self._context, self._outcome
        outcome.complete = self.bound
        if context.keep == 1 or outcome.stopped or not outcome.candidates:
            return
        nodes = self._frontier.nodes
        known = [node.family for node in nodes if not is_data_major(node.family[0].mesh)]
        aside = {node.family for node in self._frontier.open_nodes()}
        runners_up = RunnersUp(context, outcome, known, outcome.complete, aside)
        self._run(runners_up)
        outcome.complete = min(runners_up.complete, self._unequal.bound, self._shares.bound, outcome.closed_bound)
        outcome.stopped = outcome.stopped.replace("time limit", "")  # the space was searched

    def use_remaining_time(self) -> None:
        """Go on with the frontier until the time limit."""
        if math.isfinite(self._context.time_limit) and not self._outcome.stopped:
            self._frontier.until = math.inf
            self._run(self._frontier)
            self._frontier.finish()
            self._outcome.left += self._unequal.left + self._shares.left

    def _run(self, series: TaskSeries, count: int = sys.maxsize) -> None:
        """Have a series of tasks done."""
        clock = self._clock
        run_series(self._executor, series, count, clock.end, clock.must_stop, clock.record_finding)

    def _has_few_relaxations(self) -> bool:
        """Whether the time limit suffices for a few relaxations only."""
        settings = self._context.settings
        if not self._plain or math.isinf(self._context.time_limit):
            return False
        folded = self._context.folded(self._context.global_batch // self._plain[0][0].num_microbatches)
        each = settings.relaxation_op_seconds * sum(len(kind.ops) for kind in folded.kinds)
        return self._clock.end() - time.monotonic() < each * min(settings.few_relaxations, len(self._plain))

    def _record_least_memory_plan(self) -> None:
        """Begin with the plan that needs least memory, if it fits."""
        context, outcome = self._context, self._outcome
        if (least_memory_plan := context.least_memory_plan()) is not None:
            finding = Finding(0.0, least_memory_plan, 0)
            self._clock.record_finding(finding)
            outcome.add_finding(finding, context.keep)
            report_progress(context, outcome, "begin", 1, 1, least_memory_plan.configuration.words)

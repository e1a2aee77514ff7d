"""The order in which the pipelines of one mesh and microbatch size are bounded by the cut LP.

Look here for which pipeline is worked on next, and when the loop ends. The pipeline with most stages per group comes
first, for it mostly has the least bound. It is bounded by cuts without memory prices; where that is below the cutoff,
cuts at standard memory prices follow, which serve all other pipelines. Large programs get these cuts at once. Then the
pipeline with the least bound is worked on until its bound stops rising. Finally the inner program of every other
pipeline below the cutoff is solved once, for its choices may have the best plan.
"""

import math
from collections.abc import Callable, Sequence

from autopar.bounds.cut_lp import RemainingCosts, TaskOrder
from autopar.bounds.priced_cuts import CutBound, CutGenerator, InnerResult
from autopar.bounds.task_lp import Basis
from autopar.configuration import Configuration

CLOSE = 2e-3
"""Relative gap between the outer and the inner program at which a pipeline is done."""

RISE, IDLE = 1e-3, 2
"""The loop also ends after `IDLE` rounds in a row in which neither program moved by more than a share `RISE`."""

SMALL_STAGES = 32
"""Stages up to which the cut LP takes less time than a placement problem at further prices: the bound is then
recomputed after each level of memory prices."""

TaskOf = Callable[[Configuration], tuple[TaskOrder, RemainingCosts]]
"""Returns the order of the tasks of a pipeline, and what it needs besides repeated blocks."""


class PipelineBounds:
    """Best-bound selection among pipelines that share cuts.

    Args:
        cut_generator: Bounds pipelines by cuts.
        pipelines: The pipelines.
        task_of: Returns the order of the tasks of a pipeline, and what it needs besides repeated blocks.
        enough: Cutoff: a bound that need not be raised further.
        should_stop: Whether to leave bounds as they are.

    Attributes:
        cut_generator: Bounds pipelines by cuts.
    """

    def __init__(
        self,
        cut_generator: CutGenerator,
        pipelines: Sequence[Configuration],
        task_of: TaskOf,
        enough: float,
        should_stop: Callable[[], bool],
    ) -> None:
        self.cut_generator = cut_generator
        # More stages mostly have a lower bound: other pipelines then skip the cuts without memory prices.
        ordered = sorted(pipelines, key=lambda pipeline: -pipeline.num_chunks)
        self._bounds = dict.fromkeys(ordered, 0.0)
        self._cut_bounds: dict[Configuration, CutBound] = {}
        self._inner_bases: dict[Configuration, Basis | None] = dict.fromkeys(ordered)
        self._inner_values = dict.fromkeys(ordered, math.inf)
        self._num_idle = 0
        self._unpriced_levels: list[float] | None = None
        self.select_pipeline(task_of, enough, should_stop)

    @property
    def bound(self) -> float:
        """Lower bound on the objective of every plan of any of the pipelines, in seconds."""
        return min(self._bounds.values())

    def select_pipeline(self, task_of: TaskOf, enough: float, should_stop: Callable[[], bool]) -> Configuration | None:
        """Select the pipeline to solve the inner program of; None if no further work helps.

        Cuts found for one pipeline may raise the bounds of others. While the least bound is below the cutoff, it is
        recomputed with all cuts known.

        Args:
            task_of: Returns the order of the tasks of a pipeline, and what it needs besides repeated blocks.
            enough: Cutoff: a bound that need not be raised further.
            should_stop: Whether to leave bounds as they are.
        """
        while not should_stop() and self.bound < enough:
            least = min(self._bounds, key=self._bounds.__getitem__)
            order, remaining = task_of(least)
            if self._unpriced_levels is None and order.num_stages > SMALL_STAGES:
                self._price_memory(order, remaining, enough)  # pricing takes less time than another solve
            is_current = least in self._cut_bounds and self._cut_bounds[least].seen == self.cut_generator.num_cuts
            if is_current and self._unpriced_levels == []:
                break
            if not is_current:
                before = self._bounds[least]
                self._raise_bound(least, task_of, enough)
                self._num_idle = 0 if self._bounds[least] > before * (1 + RISE) else self._num_idle
            if self._unpriced_levels != [] and self._bounds[least] < enough:
                self._price_memory(order, remaining, enough)
        if self.bound >= enough:
            return None
        if self._num_idle < IDLE:
            return min(self._bounds, key=self._bounds.__getitem__)
        unsolved = (
            pipeline
            for pipeline, value in self._inner_values.items()
            if math.isinf(value) and self._bounds[pipeline] < enough
        )
        return next(unsolved, None)

    def solve_inner(
        self, pipeline: Configuration, task_of: TaskOf, enough: float, should_stop: Callable[[], bool]
    ) -> InnerResult:
        """Solve the inner program of a pipeline, raise its bound by new cuts, and return the inner optimum.

        Args:
            pipeline: The pipeline.
            task_of: Returns the order of the tasks of a pipeline, and what it needs besides repeated blocks.
            enough: Cutoff: a bound that need not be raised further.
            should_stop: Whether to leave its bound as it is.
        """
        if pipeline not in self._cut_bounds:
            self._raise_bound(pipeline, task_of, enough)
        result = self.cut_generator.solve_inner(
            *task_of(pipeline), self._cut_bounds[pipeline].case, self._inner_bases[pipeline]
        )
        before, self._inner_bases[pipeline] = self._bounds[pipeline], result.basis
        if result.cuts and not should_stop():
            self._raise_bound(pipeline, task_of, enough)
        has_risen = self._bounds[pipeline] > before * (1 + RISE)
        has_moved = has_risen or result.value < self._inner_values[pipeline] * (1 - RISE)
        self._inner_values[pipeline] = min(self._inner_values[pipeline], result.value)
        is_closed = not result.cuts or self._bounds[pipeline] >= result.value * (1 - CLOSE)
        if self._num_idle < IDLE:
            self._num_idle = IDLE if is_closed else 0 if has_moved else self._num_idle + 1
        return result

    def _price_memory(self, order: TaskOrder, remaining: RemainingCosts, enough: float) -> None:
        """Add cuts at standard memory prices: one level for small pipelines, all levels for others."""
        self._unpriced_levels = (
            self.cut_generator.levels(order) if self._unpriced_levels is None else self._unpriced_levels
        )
        count = 1 if order.num_stages <= SMALL_STAGES else len(self._unpriced_levels)
        self.cut_generator.price_memory(order, remaining, self._unpriced_levels[:count], enough)
        self._unpriced_levels = self._unpriced_levels[count:]

    def _raise_bound(self, pipeline: Configuration, task_of: TaskOf, enough: float) -> None:
        """Recompute the bound of a pipeline with all known cuts."""
        result = self._cut_bounds[pipeline] = self.cut_generator.bound(
            *task_of(pipeline), enough, self._cut_bounds.get(pipeline)
        )
        self._bounds[pipeline] = max(self._bounds[pipeline], result.seconds)

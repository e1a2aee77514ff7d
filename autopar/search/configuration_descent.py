"""A primal heuristic: local search over configurations near that of the incumbent."""

import math
import time
from collections.abc import Sequence

from autopar.bounds.transfer import TransferBounds
from autopar.configuration import Configuration, Family
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import TaskSeries
from autopar.search.outcome import Outcome, status_of
from autopar.search.reporting import report_progress
from autopar.search.tasks import Finding, SearchTask, TaskKind


def distance(first: Configuration, second: Configuration) -> float:
    """Return how far two configurations are apart: factors of two that devices and microbatches are moved by.

    >>> from autopar.sharding import Mesh
    >>> first = Configuration(2, Mesh.of(outer=2, inner=4), 8, "1f1b", 1)
    >>> distance(first, Configuration(4, Mesh.of(inner=4), 8, "1f1b", 1))
    1.0
    >>> distance(first, Configuration(2, Mesh.of(outer=4, inner=2), 16, "1f1b", 1))
    2.0
    """
    pairs = zip(_devices(first), _devices(second), strict=True)
    moved = sum(abs(math.log2(one / other)) for one, other in pairs) / 2
    return moved + abs(math.log2(first.num_microbatches / second.num_microbatches))


def _devices(configuration: Configuration) -> tuple[int, int, int]:
    """Return by what the devices are divided: stages, rows of a mesh, and devices of a row."""
    *rows, inner = configuration.mesh.shape
    return configuration.num_stages, math.prod(rows), inner


class ConfigurationDescent(TaskSeries):
    """Local search over configurations: works on the nodes nearest to that of the incumbent until none improves it.

    Tried where memory is tight (host memory is in use, or no construction fits) or the time limit suffices for a few
    relaxations only. There the nodes with the least bounds need the most memory and seldom hold a plan that fits;
    neighbours of a node with a plan do.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        space: The nodes.
        transfer_bounds: Bounds from other nodes; added to.
        until: When to end, on the monotonic clock.
    """

    lead = 0

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        space: Sequence[Family],
        transfer_bounds: TransferBounds,
        until: float = math.inf,
    ) -> None:
        self._search, self._outcome, self._space, self._transfer_bounds = search, outcome, space, transfer_bounds
        self._until = until
        self._bounds: dict[int, float] = {}
        self._turns = dict.fromkeys(range(len(space)), 0)
        self._finished: set[int] = set()
        self._busy: dict[int, int] = {}
        self._failures = 0

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        is_over = self._failures >= self._search.settings.descent_failures or time.monotonic() > self._until
        return is_over or (not self._busy and self._select() is None)

    def next_task(self, index: int) -> SearchTask | None:
        """See `TaskSeries.next_task`; None if every open neighbour is already being processed."""
        number = self._select()
        if number is None:
            return None
        self._busy[index] = number
        kind = TaskKind.ADVANCE if self._turns[number] else TaskKind.BOUND
        family, bound = self._space[number], self._bound(number)
        warm_start = self._transfer_bounds.warm_start(family)
        return SearchTask(kind, family, bound, self._outcome.best, find_plan_below=math.inf, warm_start=warm_start)

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        if finding is None:
            return
        number, best = self._busy.pop(index), self._outcome.best
        family, is_new = self._space[number], not self._turns[number]
        if is_new:
            self._transfer_bounds.record_finding(family, finding)
        self._turns[number] += 1
        self._bounds[number] = max(finding.bound, self._bound(number))
        self._outcome.add_finding(finding, self._search.keep)
        self._outcome.record_standing(family, self._bounds[number], status_of(finding, is_new=is_new))
        is_better = self._outcome.best < best * (1 - OPTIMALITY_TOLERANCE)
        if finding.is_final or finding.is_settled or self._turns[number] > self._search.settings.descent_turns:
            self._finished.add(number)
        if is_better:
            self._failures = 0
        elif number in self._finished and not is_new:
            self._failures += 1
        report_progress(self._search, self._outcome, "descent", len(self._finished), len(self._space), family[0].words)

    def _bound(self, number: int) -> float:
        """Return the lower bound of a node, in seconds."""
        if number not in self._bounds:
            family = self._space[number]
            self._bounds[number] = max(self._search.least(family), self._transfer_bounds.transferred_bound(family))
        return self._bounds[number]

    def _select(self) -> int | None:
        """Return the node to work on next, nearest first; None if none is in reach."""
        best = self._outcome.candidates[0].configuration
        at_work = set(self._busy.values())
        apart = {
            number: distance(self._space[number][0], best) for number in self._turns.keys() - self._finished - at_work
        }
        reach = self._search.settings.descent_reach
        near = sorted((away, -self._turns[number], number) for number, away in apart.items() if away <= reach)
        return next((number for *_, number in near if self._bound(number) < self._outcome.best), None)

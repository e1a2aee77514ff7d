"""Nodes of pipelines with unequal stages, whose meshes differ: one node per number of microbatches.

Nodes are opened where the incumbent is `UnequalSettings.opening_ratio` times their floor, or above the floor if devices
differ; those with the least floors are solved, each by one task (`heterogeneous_stages.py`).
"""

import math
from collections.abc import Mapping

import numpy as np

from autopar.cluster import Cluster
from autopar.configuration import Configuration
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import TaskSeries
from autopar.search.outcome import Outcome
from autopar.search.reporting import report_progress
from autopar.search.settings import UnequalSettings
from autopar.search.submesh_space import Submesh, UnequalResult, UnequalSpace, nearest_submeshes
from autopar.search.tasks import Finding, SearchTask, TaskKind


class UnequalSearch(TaskSeries):
    """Bounds pipelines with unequal stages, least floor first, and improves the incumbent with them.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
    """

    lead = 0

    def __init__(self, search: SearchContext, outcome: Outcome) -> None:
        self._search, self._outcome = search, outcome
        self._space = None if search.batch_dims is not None else search.unequal
        self._floors: dict[int, float] = {}
        self._bounds: dict[int, float] = {}
        self._counts: list[int] = []
        self._closed: set[int] = set()
        self._submeshes: tuple[Submesh, ...] = ()

    @property
    def bound(self) -> float:
        """Lower bound on the plans of nodes that are or would be opened, in seconds; infinity without any."""
        return self._outcome.unequal_bound

    def announce(self) -> None:
        """Let progress reports count the nodes that the incumbent would have opened, by their floors."""
        self._record_floors(self._promising())

    def open_nodes(self, *, late: bool) -> int:
        """Open the promising numbers of microbatches, given the incumbent, and return how many there are.

        Args:
            late: Whether no time is left to solve any; then none is opened.
        """
        outcome, space = self._outcome, self._space
        if space is None:
            return 0
        best = outcome.candidates[0].configuration.mesh.size if outcome.candidates else space.devices
        found = outcome.unequal = UnequalResult(space)
        promising, floors = self._promising(), self._floors
        self._record_floors(promising)
        if late or not promising:
            found.floor = min(floors.values())
            return 0
        self._counts, self._bounds = promising, {count: floors[count] for count in promising}
        self._submeshes = nearest_submeshes(space.submeshes, min(best, space.devices / 2))
        found.floor = min((floor for count, floor in floors.items() if count not in promising), default=math.inf)
        found.opened, found.bound, found.submeshes = tuple(sorted(promising)), self.bound, self._submeshes
        return len(promising)

    @property
    def left(self) -> int:
        """Number of open nodes that may hold a better plan."""
        return sum(self._may_improve(count) for count in self._counts if count not in self._closed)

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        return index >= len(self._counts)

    def next_task(self, index: int) -> SearchTask:
        """See `TaskSeries.next_task`."""
        assert self._space is not None, "open nodes are part of a space"
        count, outcome = self._counts[index], self._outcome
        named = Configuration(self._space.stages[0], self._submeshes[0].mesh, count, self._space.schedule)
        return SearchTask(
            TaskKind.UNEQUAL,
            (named,),
            self._bounds[count],
            outcome.threshold(self._search.keep),
            find_plan_below=outcome.best,
            submeshes=self._submeshes,
        )

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        assert finding is not None, "every open node has a task"
        count, outcome = self._counts[index], self._outcome
        outcome.add_finding(finding, self._search.keep)
        bound = self._record_bound(count, finding.bound)
        if finding.is_final:
            self._closed.add(count)
            outcome.solved += bound < outcome.best
            outcome.pruned += bound >= outcome.best
        report_progress(self._search, outcome, "stages", index + 1, len(self._counts), f"{count} microbatches")

    def _promising(self) -> list[int]:
        """Return the numbers of microbatches to open, given the incumbent."""
        search, space = self._search, self._space
        if space is None:
            return []
        self._floors = self._floors or {count: unequal_roofline(search, space, count) for count in space.microbatches}
        first = search.folded(search.global_batch // min(self._floors))
        if len(first.chain) > search.settings.unequal.most_blocks and not search.costs.cluster.groups:
            return []
        return promising_counts(search.costs.cluster, self._outcome.best, self._floors, search.settings.unequal)

    def _record_floors(self, opened: list[int]) -> None:
        """Take the least floor of the nodes to open as the bound."""
        self._outcome.unequal_bound = min((self._floors[count] for count in opened), default=math.inf)

    def _record_bound(self, count: int, bound: float) -> float:
        """Record a bound of a number of microbatches, and return its best bound, in seconds."""
        found = self._outcome.unequal
        assert found is not None, "open nodes are part of a space"
        self._bounds[count] = max(self._bounds[count], bound)
        self._outcome.unequal_bound = found.bound = min(self._bounds.values())
        return self._bounds[count]

    def _may_improve(self, count: int) -> bool:
        """Whether a number of microbatches may have a plan that improves the incumbent."""
        return self._bounds[count] < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)


def unequal_roofline(search: SearchContext, space: UnequalSpace, count: int) -> float:
    """Return the roofline bound on pipelines with unequal stages and `count` microbatches, in seconds.

    A stage on n of N devices takes t seconds per microbatch. The slowest stage takes at least the mean over devices,
    sum of n t / N, so that an op on n devices adds 1 + (m - 1) n / N times its own seconds.
    """
    each = []
    for submesh in space.submeshes:
        seconds = search.rooflines[submesh.group].op_seconds(submesh.mesh, search.global_batch / count)
        each.append(seconds * (1 + (count - 1) * submesh.mesh.size / space.devices))
    least = np.min(each, axis=0)
    return float(search.rooflines[0].counts @ least) + search.costs.stack["step_seconds"]


def promising_counts(
    cluster: Cluster, best: float, floors: Mapping[int, float], settings: UnequalSettings
) -> list[int]:
    """Return the numbers of microbatches to open: those with the least floors, if these are well below `best`."""
    ratio = 1.0 if cluster.groups else settings.opening_ratio
    below = sorted((floor, count) for count, floor in floors.items() if best >= ratio * floor)
    return [count for _, count in below[: settings.most_counts]]

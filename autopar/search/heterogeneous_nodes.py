"""Node selection among pipelines with unequal stages, whose meshes differ: one node per number of microbatches.

Nodes are opened where the incumbent is `UnequalSettings.weak` times their floor, or above the floor if devices differ;
those with the least floors are solved (`heterogeneous_stages.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.heterogeneous_stages import UnequalNodeSolver
from autopar.search.outcome import Outcome
from autopar.search.reporting import report_progress
from autopar.search.settings import UnequalSettings
from autopar.search.submesh_space import UnequalResult, UnequalSpace, nearest_submeshes


class UnequalSearch:
    """Bounds pipelines with unequal stages, and improves the incumbent with them.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        should_stop: Whether to stop now.
        end: Returns when to stop, on the monotonic clock.
    """

    def __init__(
        self, search: SearchContext, outcome: Outcome, should_stop: Callable[[], bool], end: Callable[[], float]
    ) -> None:
        self._search, self._outcome, self._should_stop, self._end = search, outcome, should_stop, end
        self._bounds: dict[int, float] = {}
        self._waiting: dict[int, UnequalNodeSolver] = {}
        self._space = None if search.batch_dims is not None else search.unequal
        self._looked = False
        self._floors: dict[int, float] = {}

    @property
    def bound(self) -> float:
        """Lower bound on the plans of nodes that are or would be opened, in seconds; infinity without any."""
        return self._outcome.unequal_bound

    def announce(self) -> None:
        """Let progress reports count the nodes that the incumbent would have opened, by their floors."""
        self._record_floors(self._promising())

    @property
    def left(self) -> int:
        """Number of open nodes that may hold a better plan."""
        return sum(map(self._may_improve, self._waiting))

    def bound_and_improve(self, near: float = OPTIMALITY_TOLERANCE) -> None:
        """Bound the open nodes, and look for plans where the bound is below the incumbent by more than a share.

        Args:
            near: The share. Nodes whose bound is nearer to the incumbent stay open.
        """
        self._open_counts()
        self._looked = True
        outcome = self._outcome
        for count, solver in tuple(self._waiting.items()):
            if self._should_stop():
                break
            enough = outcome.best * (1 - near)
            bound = self._record_bound(count, solver.bound_and_improve(outcome, near))
            if bound < enough or not self._may_improve(count):
                del self._waiting[count]
                outcome.solved += bound < outcome.best
                outcome.pruned += bound >= outcome.best
            done = len(self._bounds) - len(self._waiting)
            report_progress(self._search, outcome, "stages", done, len(self._bounds), f"{count} microbatches")

    def _open_counts(self) -> None:
        """Open the promising numbers of microbatches, given the incumbent."""
        search, outcome, space = self._search, self._outcome, self._space
        if space is None or self._looked:
            return
        best = outcome.candidates[0].configuration.mesh.size if outcome.candidates else space.devices
        submeshes = nearest_submeshes(space.submeshes, min(best, space.devices / 2))
        found = outcome.unequal = UnequalResult(space)
        opened, floors = self._promising(), self._floors
        self._record_floors(opened)
        self._bounds, self._waiting = {}, {}
        if self._should_stop() or not opened:
            found.floor = min(floors.values())
            return
        found.floor = min((floor for count, floor in floors.items() if count not in opened), default=math.inf)
        found.opened, found.bound, found.submeshes = tuple(sorted(opened)), self.bound, submeshes
        for count in opened:
            self._bounds[count] = floors[count]
            self._waiting[count] = UnequalNodeSolver(search, submeshes, space, count, self._should_stop, self._end)

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

    def _record_floors(self, opened: Sequence[int]) -> None:
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

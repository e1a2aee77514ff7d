"""Which pipelines whose stages have meshes of their own are looked at, and how far (`heterogeneous_stages.py`).

They are opened if the best plan on equal stages is `WEAK` times as slow as a floor under all unequal ones, or slower
than that if devices differ: else there is little to gain. Numbers of microbatches are bounded, those of the least
floors; plans are looked for where they may be better by enough.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from autopar.cluster import Cluster
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.heterogeneous_stages import UnequalNodeSolver
from autopar.search.outcome import Outcome
from autopar.search.reporting import report_progress
from autopar.search.settings import UnequalSettings
from autopar.search.submesh_space import Unequal, UnequalSpace, nearest_submeshes


class UnequalSearch:
    """Bounds plans on unequal stages, and looks for better ones.

    Args:
        search: What it is part of.
        outcome: What was found on equal stages; added to.
        should_stop: Whether to stop now, with what there is.
        end: Returns when to end, on the monotonic clock.

    Attributes:
        bound: No plan of those that may be better has a lower objective, in seconds: their floor if there was no time
            to look at them, infinity if there are none.
    """

    def __init__(
        self, search: SearchContext, outcome: Outcome, should_stop: Callable[[], bool], end: Callable[[], float]
    ) -> None:
        self._search, self._outcome, self._should_stop, self._end = search, outcome, should_stop, end
        self.bound = math.inf
        self._bounds: dict[int, float] = {}
        self._waiting: dict[int, UnequalNodeSolver] = {}
        self._space = None if search.batch_dims is not None else search.unequal
        self._looked = False

    @property
    def left(self) -> int:
        """How many numbers of microbatches may have a better plan that was not looked for."""
        return sum(map(self._may_improve, self._waiting))

    def bound_and_improve(self, near: float = OPTIMALITY_TOLERANCE) -> None:
        """Bound all that wait, and look for plans where these may be better than the best one by more than a share.

        Args:
            near: The share; the others wait for another look.
        """
        self._open_counts()
        self._looked = True
        outcome = self._outcome
        for count, work in tuple(self._waiting.items()):
            if self._should_stop():
                break
            enough = outcome.best * (1 - near)
            bound = self._record_bound(count, work.run(outcome, near))
            if bound < enough or not self._may_improve(count):
                del self._waiting[count]
                outcome.solved += bound < outcome.best
                outcome.pruned += bound >= outcome.best
            lowest = min(outcome.closed_floor, self.bound)
            done = len(self._bounds) - len(self._waiting)
            report_progress(self._search, outcome, "stages", done, len(self._bounds), lowest, f"{count} microbatches")

    def _open_counts(self) -> None:
        """Decide which numbers of microbatches to look at, given the incumbent."""
        search, outcome, space = self._search, self._outcome, self._space
        if space is None or self._looked:
            return
        best = outcome.candidates[0].configuration.mesh.size if outcome.candidates else space.devices
        submeshes = nearest_submeshes(space.submeshes, min(best, space.devices / 2))
        found = outcome.unequal = UnequalSpace(space)
        floors = {count: unequal_floor(search, space, count) for count in space.microbatches}
        is_long = len(search.folded(search.global_batch // min(floors)).chain) > search.settings.unequal.most_blocks
        closed = is_long and not search.costs.cluster.groups
        opened = [] if closed else promising_counts(search.costs.cluster, outcome.best, floors, search.settings.unequal)
        self.bound = min((floors[count] for count in opened), default=math.inf)
        self._bounds, self._waiting = {}, {}
        if self._should_stop() or not opened:
            found.floor = min(floors.values())
            return
        found.floor = min((floor for count, floor in floors.items() if count not in opened), default=math.inf)
        found.opened, found.bound, found.submeshes = tuple(sorted(opened)), self.bound, submeshes
        for count in opened:
            self._bounds[count] = floors[count]
            self._waiting[count] = UnequalNodeSolver(search, submeshes, space, count, self._should_stop, self._end)

    def _record_bound(self, count: int, bound: float) -> float:
        """Take down a bound of so many microbatches, and return the best one known."""
        found = self._outcome.unequal
        assert found is not None, "what waits is part of a space"
        self._bounds[count] = max(self._bounds[count], bound)
        self.bound = found.bound = min(self._bounds.values())
        return self._bounds[count]

    def _may_improve(self, count: int) -> bool:
        """Whether there may be a better plan with so many microbatches."""
        return self._bounds[count] < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)


def unequal_floor(search: SearchContext, space: Unequal, count: int) -> float:
    """Return a lower bound on the step seconds of all unequal stages with so many microbatches.

    A stage of n of N devices takes t, and the slowest at least the mean of all devices, sum n t / N: every op adds its
    own seconds 1 + (m - 1) n / N times, wherever it is.
    """
    each = []
    for submesh in space.submeshes:
        seconds = search.floors[submesh.group].op_seconds(submesh.mesh, search.global_batch / count)
        each.append(seconds * (1 + (count - 1) * submesh.mesh.size / space.devices))
    least = np.min(each, axis=0)
    return float(search.floors[0].counts @ least) + search.costs.stack["step_seconds"]


def promising_counts(
    cluster: Cluster, best: float, floors: Mapping[int, float], settings: UnequalSettings
) -> list[int]:
    """Return the numbers of microbatches to look at: those with the least floors, if there is something to gain."""
    weak = 1.0 if cluster.groups else settings.weak
    below = sorted((floor, count) for count, floor in floors.items() if best >= weak * floor)
    return [count for _, count in below[: settings.most_counts]]

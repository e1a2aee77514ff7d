"""Nodes of rows with different shares of the batch: a mesh and the samples of a microbatch of one row each.

Those of the least floors are solved after the frontier, each by one task (`share_solver.py`).
"""

import math
from functools import cached_property

from autopar.configuration import Configuration
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import TaskSeries
from autopar.search.outcome import Outcome
from autopar.search.reporting import report_progress
from autopar.search.share_solver import SCHEDULE
from autopar.search.share_space import ShareNode, ShareResult, ShareSpace
from autopar.search.tasks import Finding, SearchTask, TaskKind
from autopar.shares import balanced


def share_roofline(search: SearchContext, space: ShareSpace, node: ShareNode) -> float:
    """Return the roofline bound on the plans of a node, in seconds; infinity if rows cannot share the batch.

    *Relaxes* placements: each group at the roofline of its ops; *valid* for all shares; *costs* little; *source*: the
    groups work beside each other, so that the step takes as long as the slowest of them.
    """
    samples = node.samples * node.num_rows
    paces = [search.rooflines[group].microbatch_seconds(node.mesh, samples) for group in range(len(space.devices))]
    counts = balanced(space.rows(node), space.total(node), [pace.__mul__ for pace in paces])
    if counts is None:
        return math.inf
    slowest = max(count * pace for count, pace in zip(counts, paces, strict=True))
    return slowest + search.costs.stack["step_seconds"]


class ShareSearch(TaskSeries):
    """Bounds shares on unequal groups, least floor first, and improves the incumbent with them.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
    """

    lead = 0

    def __init__(self, search: SearchContext, outcome: Outcome) -> None:
        self._search, self._outcome = search, outcome
        self._space = None if search.batch_dims is not None else search.shares
        self._bounds: dict[ShareNode, float] = {}
        self._nodes: list[ShareNode] = []
        self._closed: set[ShareNode] = set()

    @cached_property
    def _floors(self) -> dict[ShareNode, float]:
        """Roofline bound of every node of the space."""
        space = self._space
        return {} if space is None else {node: share_roofline(self._search, space, node) for node in space.nodes}

    @property
    def bound(self) -> float:
        """Lower bound on the plans of all nodes, in seconds; infinity without any."""
        return self._outcome.shares_bound

    def announce(self) -> None:
        """Let progress reports count the nodes, by their floors."""
        self._outcome.shares_bound = min(self._floors.values(), default=math.inf)

    def open_nodes(self, *, late: bool) -> int:
        """Open the nodes of the least floors, given the incumbent, and return how many there are.

        Args:
            late: Whether no time is left to solve any; then none is opened.
        """
        space, outcome = self._space, self._outcome
        if space is None:
            return 0
        below = [node for node in space.nodes if self._floors[node] < outcome.best * (1 - OPTIMALITY_TOLERANCE)]
        below.sort(key=lambda node: (self._floors[node], node.samples, node.mesh.shape))
        self._nodes = [] if late else below[: self._search.settings.most_shares]
        self._bounds = {node: self._floors[node] for node in self._nodes}
        found = outcome.shares = ShareResult(space, tuple(self._nodes))
        found.floor = min((own for node, own in self._floors.items() if node not in self._bounds), default=math.inf)
        self._record()
        return len(self._nodes)

    @property
    def left(self) -> int:
        """Number of open nodes that may hold a better plan."""
        return sum(self._may_improve(node) for node in self._nodes if node not in self._closed)

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        return index >= len(self._nodes)

    def next_task(self, index: int) -> SearchTask | None:
        """See `TaskSeries.next_task`."""
        node, outcome = self._nodes[index], self._outcome
        if not self._may_improve(node):
            self._closed.add(node)
            outcome.pruned += 1
            return None
        named = Configuration(1, node.mesh, 1, SCHEDULE)
        bound, cutoff = self._bounds[node], outcome.threshold(self._search.keep)
        return SearchTask(TaskKind.SHARES, (named,), bound, cutoff, find_plan_below=outcome.best, share_node=node)

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        if finding is None:
            return
        node, outcome = self._nodes[index], self._outcome
        outcome.add_finding(finding, self._search.keep)
        self._bounds[node] = max(self._bounds[node], finding.bound)
        self._record()
        if finding.is_final:
            self._closed.add(node)
            outcome.solved += 1
        detail = f"{node.mesh}, microbatches of {node.samples} per row"
        report_progress(self._search, outcome, "shares of the batch", index + 1, len(self._nodes), detail)

    def _record(self) -> None:
        """Record the least bounds."""
        found = self._outcome.shares
        assert found is not None, "nodes are part of a space"
        found.bound = min(self._bounds.values(), default=math.inf)
        self._outcome.shares_bound = min(found.bound, found.floor)

    def _may_improve(self, node: ShareNode) -> bool:
        """Whether a node may have a plan that improves the incumbent."""
        return self._bounds[node] < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)

"""The frontier of the branch and bound: which node is raised next, and when to stop.

A *node* is a family of configurations (pipeline degree, mesh, microbatches; schedules together). Its lower bound rises
on a ladder: roofline and transfer from other nodes (`bounds/transfer.py`) in this process, then tasks (`ladder.py`).
Nodes are selected best first; one task in `improve_every` goes to the node of the best plan while that plan improves.
"""

import heapq
import math
import time
from collections.abc import Iterable, Sequence

from autopar.bounds.submesh_tables import inner_mesh
from autopar.bounds.transfer import ALL_RUNGS, MEMORY_RUNGS, TransferBounds
from autopar.configuration import Family
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.ladder import LADDER, Knowledge
from autopar.search.node import Node, Priority, priority_of
from autopar.search.ordered_execution import TaskSeries
from autopar.search.outcome import NodeStatus, Outcome, status_of
from autopar.search.reporting import report_progress
from autopar.search.tasks import Finding, SearchTask, TaskKind


class Frontier(TaskSeries):
    """Raises the least lower bound, until no open node may hold a better plan or the limits of work are reached.

    Args:
        context: Inputs of the search.
        outcome: What is known; added to.
        families: The nodes.
        transfer_bounds: Bounds from other nodes; added to.

    Attributes:
        nodes: The nodes.
        until: When to pause, on the monotonic clock.
    """

    lead = 0

    def __init__(
        self, context: SearchContext, outcome: Outcome, families: Sequence[Family], transfer_bounds: TransferBounds
    ) -> None:
        self._context, self._outcome, self._transfer_bounds = context, outcome, transfer_bounds
        self._settings = context.settings
        self.nodes = [Node(own, priority_of(own), context.least(own)) for own in families]
        self.until = math.inf
        self._space = list(families)
        self._new: list[list[tuple[float, int]]] = [[] for _ in Priority]
        self._open: list[list[tuple[float, int]]] = [[] for _ in Priority]
        self._busy: dict[int, tuple[int, TaskKind]] = {}
        self._idle = dict.fromkeys(Priority, 0)
        self._outer_tasks = self._turn = 0
        self._class: Priority | None = None
        self._counted = (0, 0)
        self._known = Knowledge(context, outcome, transfer_bounds)

    def resume(self) -> None:
        """Open the nodes where the heuristics have left them."""
        for number, node in enumerate(self.nodes):
            if (known := self._outcome.standings.get(node.family)) is not None:
                node.bound, node.status = max(node.bound, known.bound), known.status
                node.relaxed = node.status is not NodeStatus.NEW
            if node.status is not NodeStatus.DONE:
                heaps = self._open if node.relaxed else self._new
                heaps[node.priority].append((node.bound, number))
        for heap in (*self._new, *self._open):
            heapq.heapify(heap)
        self._outcome.frontier_bound = self.bound

    @property
    def bound(self) -> float:
        """Lower bound on all plans of all nodes, in seconds."""
        return min((node.bound for node in self.nodes), default=math.inf)

    def open_nodes(self, priorities: Iterable[Priority] = Priority) -> list[Node]:
        """Return the nodes that may hold a better plan and are not done."""
        wanted = set(priorities)
        return [
            node
            for node in self.nodes
            if node.priority in wanted and node.status is not NodeStatus.DONE and node.bound < self._cutoff
        ]

    @property
    def _cutoff(self) -> float:
        """Bound in seconds from which on a node holds no better plan."""
        return self._outcome.best * (1 - OPTIMALITY_TOLERANCE)

    def _least_of(self, priority: Priority) -> float:
        """Return the least bound of the open nodes of a class that no worker has, raised by transfer."""
        heap = self._new[priority]
        self._transfer_bounds.raise_least(heap, self._space, self._relaxes_below(priority), lambda number: False)
        for bound, number in heap[:1]:
            self.nodes[number].bound = max(self.nodes[number].bound, bound)
        return min((heap[0][0] for heap in (self._new[priority], self._open[priority]) if heap), default=math.inf)

    def _relaxes_below(self, priority: Priority) -> float:
        """Bound in seconds below which nodes of a class are relaxed: plain ones may hold runners-up as well.

        Under a time limit runners-up have a share of their own.
        """
        limited = math.isfinite(self._context.time_limit)
        holds_runners_up = priority is Priority.PLAIN and not limited
        return self._outcome.threshold(self._context.keep) if holds_runners_up else self._cutoff

    def _least_final_bound(self) -> float:
        """Return the least bound that no task raises further."""
        return min((node.bound for node in self.nodes if node.status is NodeStatus.DONE), default=math.inf)

    def _next_class(self) -> Priority | None:
        """Return the class to work on; None if no class has a node that may hold a better plan.

        Without a time limit plain nodes are relaxed first, and the classes come in their order. Under one, which may
        end at any time, the class with the least bound is next; plain nodes, which bound the others, have a lead.
        """
        limited = math.isfinite(self._context.time_limit)
        least = {Priority.PLAIN: self._least_of(Priority.PLAIN)}
        if self._unrelaxed(Priority.PLAIN) and not limited:
            return Priority.PLAIN
        for priority in Priority:
            least[priority] = self._least_of(priority)
            if not limited and self._is_open(priority, least[priority]):
                return priority
        opened = [own for own in Priority if self._is_open(own, least[own])]
        least[Priority.PLAIN] = min(least[Priority.PLAIN], self._rank_of_new(Priority.PLAIN))
        return min(opened, key=least.__getitem__, default=None)

    def _rank_of_new(self, priority: Priority) -> float:
        """Return the least bound of the new nodes of a class, less the lead of plain ones below the incumbent."""
        least = self._new[priority][0][0] if self._new[priority] else math.inf
        has_lead = priority is Priority.PLAIN and least < self._cutoff
        return least * (1 - self._settings.plain_lead) if has_lead else least

    def _is_open(self, priority: Priority, least: float) -> bool:
        """Whether there is work on a class, given the least bound of its open nodes."""
        if priority is Priority.OUTER_DATA_PARALLEL:
            return least < self._cutoff and self._allows_outer_task(least)
        if self._unrelaxed(priority):
            return True
        waits = self._idle[priority] >= self._settings.patience and least >= self._least_final_bound()
        return least < self._cutoff and not waits

    def _unrelaxed(self, priority: Priority) -> bool:
        """Whether a class has a node whose relaxation is worth solving."""
        heap = self._new[priority]
        return bool(heap) and heap[0][0] < self._relaxes_below(priority)

    def _allows_outer_task(self, least: float) -> bool:
        """Whether there may be further tasks on meshes with an outer data-parallel axis, given their least bound."""
        settings = self._settings
        if math.isfinite(self._context.time_limit):
            return True
        limit = max(settings.outer_tasks, settings.outer_share * (self._outcome.num_tasks - self._outer_tasks))
        others = [math.inf, *(n.bound for n in self.nodes if n.priority is not Priority.OUTER_DATA_PARALLEL)]
        if least < min(min(others), self._outcome.best * (1 - settings.outer_gap)):
            limit *= settings.outer_factor
        return self._outer_tasks < limit

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        if time.monotonic() > self.until:
            return True
        self._class = self._next_class()
        return not self._busy and self._class is None

    def next_task(self, index: int) -> SearchTask | None:
        """See `TaskSeries.next_task`."""
        if self._class is None or (number := self._select(index, self._class)) is None:
            return None
        node = self.nodes[number]
        cutoff = self._relaxes_below(node.priority)
        tasks = (rung.raise_(node, self._known, cutoff) for rung in LADDER)
        task = next(own for own in tasks if own is not None)
        self._busy[index] = number, task.kind
        self._outer_tasks += task.kind is not TaskKind.SUBMESH and node.priority is Priority.OUTER_DATA_PARALLEL
        return task

    def _select(self, index: int, priority: Priority) -> int | None:
        """Take the next node of a class off the frontier."""
        new, opened = self._new[priority], self._open[priority]
        if index % self._settings.incumbent_turn_every == self._settings.incumbent_turn_every - 1 and opened:
            better = [(self.nodes[n].best, bound, n) for bound, n in opened if self._may_improve(n)]
            better = [own for own in better if own[1] < self._cutoff]
            self._turn += 1
            if better and self._turn % 2:
                _, bound, number = min(better)
                opened.remove((bound, number))
                heapq.heapify(opened)
                return number
            able = [own for own in opened if self.nodes[own[1]].status is not NodeStatus.SETTLED]
            if able and (least := min(able))[0] < self._cutoff:
                opened.remove(least)
                heapq.heapify(opened)
                return least[1]
        limited = math.isfinite(self._context.time_limit)
        if not limited and priority is not Priority.OUTER_DATA_PARALLEL and self._unrelaxed(priority):
            return heapq.heappop(new)[1]
        if new and (not opened or self._rank_of_new(priority) <= opened[0][0]):
            return heapq.heappop(new)[1]
        return heapq.heappop(opened)[1] if opened else None

    def _may_improve(self, number: int) -> bool:
        """Whether the next task on a node is likely to improve its plan: a proof is not, and takes seconds."""
        node = self.nodes[number]
        return node.improves and node.status is not NodeStatus.SETTLED

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        if finding is None:
            return
        number, kind = self._busy.pop(index)
        node, best = self.nodes[number], self._outcome.best
        if kind is TaskKind.SUBMESH:
            mesh, samples = node.family[0].mesh, self._known.samples(node)
            hides = node.family[0].hides_dispatch
            self._transfer_bounds.record_submesh(inner_mesh(mesh), samples // mesh.shape[0], finding, hides=hides)
            self._outcome.cut += finding.cut
            self._outcome.work += finding.work
            heapq.heappush(self._new[node.priority], (node.bound, number))
            self._report(node)
            return
        if kind is TaskKind.BOUND:
            self._transfer_bounds.record_finding(node.family, finding)
        node.bound = max(node.bound, finding.bound)
        self._outcome.add_finding(finding, self._context.keep)
        own = math.inf if finding.best is None else finding.best.objective
        node.improves = own < node.best * (1 - OPTIMALITY_TOLERANCE)
        node.best = min(own, node.best)
        improved = self._outcome.best < best * (1 - OPTIMALITY_TOLERANCE)
        node.advanced += kind is TaskKind.ADVANCE
        if improved:
            self._idle = dict.fromkeys(Priority, 0)
        self._idle[node.priority] += kind is TaskKind.ADVANCE
        node.status = status_of(finding, is_new=kind is TaskKind.BOUND)
        node.relaxed = not (finding.is_final and kind is TaskKind.BOUND)
        self._outcome.record_standing(node.family, node.bound, node.status)
        if node.status is not NodeStatus.DONE:
            heapq.heappush((self._open if node.relaxed else self._new)[node.priority], (node.bound, number))
        self._report(node)

    def _report(self, node: Node) -> None:
        """Tell incumbent and bound."""
        seen = sum(own.relaxed or own.bound >= self._cutoff for own in self.nodes)
        self._outcome.frontier_bound = self.bound
        report_progress(self._context, self._outcome, "bound", seen, len(self.nodes), node.family[0].words)

    def finish(self) -> None:
        """Raise the bounds of new nodes by transfer once more, and count solved and pruned configurations."""
        waiting = [
            (n.bound, number) for number, n in enumerate(self.nodes) if not n.relaxed and n.status is NodeStatus.NEW
        ]
        heapq.heapify(waiting)
        for most in (MEMORY_RUNGS, ALL_RUNGS):
            self._transfer_bounds.raise_least(
                waiting, self._space, self._outcome.best, lambda number: False, most, ends=True
            )
        for bound, number in waiting:
            self.nodes[number].bound = max(self.nodes[number].bound, bound)
        self._outcome.frontier_bound = self.bound
        for node in self.nodes:
            self._outcome.record_standing(node.family, node.bound, node.status)
        left = set(map(id, self.open_nodes()))
        closed = [node for node in self.nodes if id(node) not in left]
        worked = [node for node in closed if node.advanced or node.status is NodeStatus.DONE]
        solved, total = sum(len(node.family) for node in worked), sum(len(node.family) for node in closed)
        before, self._counted = self._counted, (solved, total - solved)
        self._outcome.solved += self._counted[0] - before[0]
        self._outcome.pruned += self._counted[1] - before[1]
        outer = self.open_nodes([Priority.OUTER_DATA_PARALLEL])
        self._outcome.closed = tuple(own for node in outer for own in node.family)
        self._outcome.closed_bound = min((node.bound for node in outer), default=math.inf)
        others = self.open_nodes([Priority.PLAIN, Priority.OTHER_SCHEDULES])
        self._outcome.left = sum(len(node.family) for node in others)

"""Runners-up: the k best plans, each the best of those that are akin to no better plan, with a lower bound on the rest.

A *cell* is a node with branches (`branching.py`). The cell with the least bound is solved until its best plan is known;
if that plan is among the k best so far, the cell is replaced by the branches that exclude the plan and all plans akin
to it (Lawler 1972, Management Science 18). The search ends when no cell has a bound below the k-th plan, or at the
limit `SearchSettings.runners_up_work`; the least bound of the remaining cells is what is proven.

Nodes that are open since the search for the best plan are dropped after a few tasks in a row without a wanted plan.
Where the best plan is not proven the runners-up cannot be either: the search then also ends once k plans are nearly as
fast as the best one.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.configuration import Family
from autopar.problem import OPTIMALITY_TOLERANCE, Choice
from autopar.search.branching import Branch, MoreRecompute, SequenceSplit, branches_of
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import TaskSeries
from autopar.search.outcome import NodeStatus, Outcome, Standing
from autopar.search.reporting import report_progress
from autopar.search.tasks import Cell, Finding, SearchTask, TaskKind


@dataclass(slots=True, eq=False)
class _CellState:
    """What is known of a cell.

    Attributes:
        cell: Node and branches.
        bound: Lower bound on its plans, in seconds.
        status: State of its work.
        best: Its best plan so far.
        starts: Choices to consider first.
        has_waited: Whether the frontier left its node open.
    """

    cell: Cell
    bound: float
    status: NodeStatus
    best: Candidate | None = None
    starts: tuple[Choice, ...] = ()
    has_waited: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether its best plan is known, up to what a proof would find: runners-up need no proof."""
        near = self.best is not None and self.best.objective <= self.bound * (1 + OPTIMALITY_TOLERANCE)
        return self.status in (NodeStatus.SETTLED, NodeStatus.DONE) or near

    def covers(self, other: "_CellState") -> bool:
        """Whether this cell contains all plans of another cell."""
        (family, branches), (narrower, more) = self.cell, other.cell
        return set(branches) <= set(more) and set(narrower) <= set(family)


class RunnersUp(TaskSeries):
    """Solves the cell with the least bound until no further plan can be among the k best.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        known: The nodes.
        lowest: Lower bound on all plans, in seconds.
        waiting: Nodes that the frontier left open.
    """

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        known: Sequence[Family],
        lowest: float,
        waiting: Collection[Family] = (),
    ) -> None:
        self._search, self._outcome = search, outcome
        self._idle = self._vain = 0
        self._is_proven = lowest >= outcome.best * (1 - OPTIMALITY_TOLERANCE)
        self._limit = outcome.work + max(
            search.settings.runners_up_least_work, search.settings.runners_up_work * outcome.work
        )
        self._cells: list[_CellState] = []
        self._open: list[tuple[float, int]] = []
        self._busy: dict[int, int] = {}
        self._known_cells: set[Cell] = set()
        self._closed = math.inf
        best: dict[Family, Candidate] = {}
        of = {configuration: family for family in known for configuration in family}
        for candidate in outcome.candidates:
            if candidate.configuration in of and not candidate.signature.others:
                best.setdefault(of[candidate.configuration], candidate)
        for family in known:
            standing = outcome.standings.get(family) or Standing(search.least(family), NodeStatus.NEW)
            has_waited = family in waiting
            self._open_cell(
                _CellState((family, ()), standing.bound, standing.status, best.get(family), has_waited=has_waited)
            )

    @property
    def complete(self) -> float:
        """Lower bound on the plans that are not akin to one of the k best, in seconds."""
        bounds = [*(bound for bound, _ in self._open), *(self._cells[number].bound for number in self._busy.values())]
        return min([self._closed, *bounds])

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        self._branch_settled()
        is_near = self._threshold() <= self._search.settings.runner_up_ratio * self._outcome.best
        if self._idle >= (self._search.settings.runners_up_retries if is_near else self._search.settings.patience):
            self._drop_waiting()
        more = self._busy or (self._open and self._open[0][0] < self._threshold())
        is_vain = is_near and self._vain >= self._search.settings.patience and not self._is_proven
        return self._outcome.work >= self._limit or is_vain or not more

    def next_task(self, index: int) -> SearchTask | None:
        """See `TaskSeries.next_task`; None if every promising cell is already being processed."""
        if not self._open or self._open[0][0] >= self._threshold():
            return None
        bound, number = heapq.heappop(self._open)
        state = self._cells[number]
        self._busy[index] = number
        family, branches = state.cell
        kind = TaskKind.BOUND if state.status is NodeStatus.NEW else TaskKind.ADVANCE
        return SearchTask(kind, family, bound, self._threshold(), branches=branches, starts=state.starts, proves=False)

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        if finding is None:
            return
        number, before = self._busy.pop(index), self._threshold()
        state = self._cells[number]
        was_new = state.status is NodeStatus.NEW
        state.bound = max(state.bound, finding.bound)
        state.best = min(
            (found for found in (state.best, finding.best) if found is not None),
            key=lambda candidate: candidate.objective,
            default=None,
        )
        if not finding.is_final:
            state.status = NodeStatus.SETTLED if finding.is_settled else NodeStatus.OPEN
        elif not was_new or math.isinf(finding.bound):
            state.status = NodeStatus.DONE
        self._outcome.add_finding(finding, self._search.keep)
        found = self._threshold() < before
        self._idle = 0 if found else self._idle + state.has_waited
        self._vain = 0 if found else self._vain + 1
        heapq.heappush(self._open, (state.bound, number))
        detail = state.cell[0][0].words
        report_progress(self._search, self._outcome, "runners-up", index + 1, len(self._cells), detail)

    def _threshold(self) -> float:
        """Return the step time in seconds from which on a plan is not among the k best."""
        distinct = self._outcome.distinct()
        wanted = self._search.keep
        return math.inf if len(distinct) < wanted else distinct[wanted - 1].objective * (1 - OPTIMALITY_TOLERANCE)

    def _branch_settled(self) -> None:
        """Replace settled cells whose best plan is wanted by their branches, while such a cell has the least bound."""
        threshold = self._threshold()
        while self._open:
            bound, number = self._open[0]
            state = self._cells[number]
            state.bound = max(other.bound for other in self._cells if other.covers(state))
            if state.bound > bound:
                heapq.heapreplace(self._open, (state.bound, number))
                continue
            if bound >= threshold or not state.is_settled:
                return
            heapq.heappop(self._open)
            if state.best is None or state.best.objective >= threshold:
                self._closed = min(self._closed, bound)
            else:
                self._branch(state, state.best)

    def _drop_waiting(self) -> None:
        """Drop the nodes that the frontier left open, except those with a plan that may be among the k best."""
        threshold, kept = self._threshold(), list[tuple[float, int]]()
        for bound, number in self._open:
            state = self._cells[number]
            if not state.has_waited or (state.best is not None and state.best.objective <= threshold):
                kept.append((bound, number))
            else:
                self._closed = min(self._closed, bound)
        heapq.heapify(kept)
        self._open = kept

    def _branch(self, state: _CellState, best: Candidate) -> None:
        """Open the branches of a cell that exclude its best plan and all plans akin to it."""
        family, branches = state.cell
        folded = self._search.folded(self._search.global_batch // best.configuration.num_microbatches)
        found = branches_of(best, family, folded)
        starts = (best.choice,)
        if found.others:
            self._open_cell(_CellState((found.others, branches), state.bound, NodeStatus.NEW, starts=starts))
        for branch in found.branches:
            if _is_new(branch, branches):
                cell = family, tuple(sorted((*branches, branch), key=repr))
                self._open_cell(
                    _CellState(
                        cell, state.bound, NodeStatus.NEW, starts=starts if isinstance(branch, MoreRecompute) else ()
                    )
                )

    def _open_cell(self, state: _CellState) -> None:
        if state.cell not in self._known_cells:
            self._known_cells.add(state.cell)
            heapq.heappush(self._open, (state.bound, len(self._cells)))
            self._cells.append(state)


def _is_new(branch: Branch, branches: Sequence[Branch]) -> bool:
    """Whether a branch restricts the given branches further, and to plans that no other cell contains."""
    match branch:
        case SequenceSplit():
            return not any(isinstance(other, SequenceSplit) and other.axis == branch.axis for other in branches)
        case _:
            return branch not in branches

"""Solves one node of rows with different shares of the batch: placements, and the microbatches of each group of rows.

How many microbatches is decided from the seconds of a pass on each group: the integers that end the slowest group
soonest (`autopar.shares.balanced`).

    step = max over groups c of step_c(m_c),   sum over groups of rows_c m_c = batch / samples

step_c is the formula of `autopar.formulate.step_time` for a job whose rows are all those of group c.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.configuration import Configuration
from autopar.errors import ProgramError
from autopar.formulate.step_time import StepTime, step_time
from autopar.formulate.tables import Tables
from autopar.plan import Job, ModelInfo
from autopar.program.lower import lower
from autopar.program.verify.shares import verify_shares
from autopar.search.candidate import Candidate
from autopar.search.candidate_plan import assemble
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver
from autopar.search.share_space import ShareNode, ShareSpace
from autopar.search.tasks import Finding
from autopar.shares import balanced

SCHEDULE = "1f1b"
"""The schedule of one stage; there is nothing to order."""


class ShareNodeSolver:
    """Solves one mesh and microbatch of rows with different shares.

    Args:
        search: Inputs of the search.
        space: The declared space.
        node: The node.
        end: When to stop, on the monotonic clock.

    Attributes:
        work: Units of work of all placement problems so far.
        cut: Placement problems that their limit of work or time has cut.
    """

    def __init__(self, search: SearchContext, space: ShareSpace, node: ShareNode, end: float = math.inf) -> None:
        constraints = replace(search.constraints, hosted=frozenset())  # nothing is offloaded
        self._search, self._space, self._node, self._end = replace(search, constraints=constraints), space, node, end
        self._folded = search.folded(node.samples * node.num_rows)
        self._tables: dict[int, Tables | None] = {}
        self.work, self.cut = 0.0, 0

    def solve(self, best: float = math.inf, cutoff: float = math.inf) -> Finding:
        """Return a lower bound on all plans, and the best plan found.

        Args:
            best: Step time of the incumbent in seconds.
            cutoff: Step time in seconds above which plans are of no use.
        """
        counts = self._balanced([pace.__mul__ for pace in self._paces()])
        if counts is None:
            return Finding(math.inf, None, 0)
        found = self._best_plan(counts, cutoff)
        counts = counts if found is None else tuple(share.num_microbatches for share in found.configuration.shares)
        bound = 0.0 if self._should_stop() else self._bound(counts, min(best, cutoff))
        if found is not None and not self._is_lawful(found):
            found = None
        return Finding(bound, found, self.cut, is_final=not self._should_stop(), work=self.work)

    def _best_plan(self, counts: tuple[int, ...], cutoff: float) -> Candidate | None:
        """Return the best plan found, given shares to begin with; None if none fits.

        Placements are solved for the slowest group, shares for the placements, and both again if shares have changed.
        """
        found: Candidate | None = None
        known: dict[tuple[int, ...], None] = {}
        paces = self._paces()
        while counts not in known and len(known) < self._search.settings.share_rounds:
            known[counts] = None
            slowest = max(range(len(paces)), key=lambda group: counts[group] * paces[group])
            candidate = self._plan(slowest, counts[slowest], cutoff)
            if candidate is None:
                break
            steps = [self._steps(candidate, group) for group in range(len(paces))]
            paces = [own(2).seconds - own(1).seconds for own in steps]
            shares = self._balanced([own.seconds for own in steps])
            assert shares is not None, "there were shares before"
            counts = shares
            times = [own(count) for own, count in zip(steps, counts, strict=True)]
            shared = self._shared(candidate, counts, times)
            if found is None or shared.objective < found.objective:
                found = shared
        return found

    def _paces(self) -> list[float]:
        """Return the roofline seconds of a microbatch on the rows of each group."""
        samples, mesh = self._node.samples * self._node.num_rows, self._node.mesh
        groups = range(len(self._space.devices))
        return [self._search.rooflines[group].microbatch_seconds(mesh, samples) for group in groups]

    def _balanced(self, seconds: Sequence[Callable[[int], float]]) -> tuple[int, ...] | None:
        """Return the shares that end the slowest group soonest, given the seconds of each group by microbatches."""
        return balanced(self._space.rows(self._node), self._space.total(self._node), seconds)

    def _context(self, group: int, count: int) -> SearchContext:
        """Return the inputs of a search of a job whose rows are all those of a group and run `count` microbatches."""
        search, first = self._search, sum(self._space.devices[:group])
        return replace(
            search,
            costs=search.costs.on_rows(range(first, first + self._node.row_devices)),
            roofline=search.rooflines[group],
            global_batch=self._node.samples * self._node.num_rows * count,
        )

    def _solver(self, group: int, count: int) -> NodeSolver | None:
        """Return the solver of such a job; None if constraints exclude all its plans."""
        context, mesh = self._context(group, count), self._node.mesh
        if group not in self._tables:
            rules = context.rules(self._folded)
            self._tables[group] = context.constraints.tables(self._folded, rules, mesh, context.costs, rows_apart=True)
        tables = self._tables[group]
        if tables is None:
            return None
        return NodeSolver(context, (Configuration(1, mesh, count, SCHEDULE),), tables, self._end)

    def _plan(self, group: int, count: int, cutoff: float) -> Candidate | None:
        """Return the best plan for the rows of a group; None if none fits."""
        solver = self._solver(group, count)
        if solver is None:
            return None
        bound = solver.relax(cutoff)
        solver.relaxation.find_plan()
        solver.solve(bound, cutoff)
        self.cut += solver.state.cut
        self.work += solver.state.work
        return solver.best

    def _steps(self, candidate: Candidate, group: int) -> "_Steps":
        """Return the step time of the rows of a group under the placements of a plan, by the number of microbatches."""
        if self._solver(group, 1) is None:  # writes the tables
            raise AssertionError("constraints are the same for all groups")
        tables = self._tables[group]
        assert tables is not None, "constraints are the same for all groups"
        return _Steps(self._context(group, 1), tables, candidate)

    def _shared(self, candidate: Candidate, counts: Sequence[int], times: Sequence[StepTime]) -> Candidate:
        """Return a plan with shares; its step time is that of the slowest group."""
        shares = self._space.shares(self._node, counts)
        configuration = replace(candidate.configuration, num_microbatches=max(counts), shares=shares)
        slowest = max(times, key=lambda own: own.seconds)
        return Candidate(configuration, candidate.tables, candidate.choice, candidate.split, slowest)

    def _bound(self, counts: Sequence[int], enough: float) -> float:
        """Return a lower bound on the plans of the node, in seconds.

        *Relaxes* memory, and the placements that groups have in common; *valid* for all shares, since others than
        `counts` give a row of some group at least one microbatch more; *costs* a relaxation per group for these, and
        one per group for `counts`; *source*: `search/relaxation.py`.
        """
        bounds = [self._relaxed(group, count + 1, enough) for group, count in enumerate(counts)]
        others = min(bounds)
        own = 0.0
        for group, count in enumerate(counts):
            if own < min(others, enough):
                own = max(own, self._relaxed(group, count, enough))
        return min(own, others)

    def _relaxed(self, group: int, count: int, enough: float) -> float:
        """Return a lower bound on the seconds of rows of a group that run `count` microbatches."""
        if self._should_stop():
            return 0.0
        solver = self._solver(group, count)
        if solver is None:
            return math.inf
        bound = solver.relax(enough)
        self.cut += solver.state.cut
        self.work += solver.state.work
        return bound

    def _is_lawful(self, candidate: Candidate) -> bool:
        """Whether rows are apart in all passes of a plan; tables leave a reshard between them where ops need one."""
        batch, devices = self._space.global_batch, self._node.mesh.size
        job = Job("train", devices, batch, self._search.memory_limit, {})
        plan = assemble(candidate, ModelInfo("", "", "", 0), job)
        try:
            verify_shares(lower(plan, self._folded, self._search.costs), self._folded)
        except ProgramError:
            return False
        return True

    def _should_stop(self) -> bool:
        """Whether the time is over, or the caller wants the search to end."""
        return self._search.should_stop() or time.monotonic() > self._end


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Step time of the rows of a group, given their microbatches."""

    context: SearchContext
    tables: Tables
    candidate: Candidate

    def seconds(self, count: int) -> float:
        """Return the seconds of the step."""
        return self(count).seconds

    def __call__(self, count: int) -> StepTime:
        configuration = replace(self.candidate.configuration, num_microbatches=count)
        pipeline = configuration.pipeline(self.context.costs.stack)
        totals = self.tables.block_seconds(self.candidate.choice)
        return step_time(totals, self.tables.folded.chain, pipeline, self.candidate.split, 0.0)

"""Executes search tasks in one process and keeps the solver of each cell for later tasks.

Solvers that wait long, or that another process may continue, are packed without search context, tables and programs.
"""

import gc
import pickle
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import IO

from autopar.bounds.submesh import SubmeshBounds, submesh_bounds
from autopar.collector import seldom_collected, uncollected
from autopar.configuration import Configuration, Family, Priced
from autopar.cost import Overlap
from autopar.formulate.building import build_tables
from autopar.formulate.data_major import DataMajor
from autopar.formulate.tables import Tables
from autopar.machine import peak_bytes
from autopar.progress import StopCallback
from autopar.search.branching import apply
from autopar.search.context import SearchContext
from autopar.search.heterogeneous_stages import UnequalNodeSolver
from autopar.search.node_solver import NodeSolver
from autopar.search.share_solver import ShareNodeSolver
from autopar.search.tasks import Finding, SearchTask, SolverKey, TaskKind
from autopar.solvers.limited import solve_limited

SEARCH, TABLES, PROGRAM = "search", "tables", "program"
"""Placeholders in a packed solver for objects that every process has or can write again."""

KEPT_BYTES = 200e6
"""Memory of the tables of waiting nodes: a handful of tables of a model without repeated blocks or on meshes of three
axes, dozens otherwise. Half as much per process if there are several processes."""

KEPT_TABLES = 100e6
"""Memory of the tables kept for other schedules and branches, besides the last tables; half as much likewise."""


class _Pickler(pickle.Pickler):
    """Packs a node solver without search context, tables and programs."""

    def __init__(self, file: IO[bytes], node: NodeSolver) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._left_out = {id(node.state.search): SEARCH, id(node.tables): TABLES}
        if node.state.column_generation is not None:
            self._left_out[id(node.state.column_generation.rows)] = PROGRAM
        if node.cuts.pipeline_bounds is not None:
            self._left_out |= dict.fromkeys(map(id, node.cuts.pipeline_bounds.cut_generator.programs), PROGRAM)

    def persistent_id(self, obj: object) -> str | None:
        """Return the placeholder of an object; None if it is packed."""
        return self._left_out.get(id(obj))


class _Unpickler(pickle.Unpickler):
    """Unpacks a node solver, given a new solver of the same node in this process."""

    def __init__(self, file: IO[bytes], other: NodeSolver) -> None:
        super().__init__(file)
        self._here = {SEARCH: other.state.search, TABLES: other.tables, PROGRAM: None}

    def persistent_load(self, pid: str) -> object:
        """Return the object of a placeholder; programs are written once the rest is unpacked."""
        return self._here[pid]


class Workbench:
    """Executes tasks, and keeps the solvers of their cells.

    Args:
        search: Inputs of the search.
        portable: Whether other processes may continue the cells.
    """

    def __init__(self, search: SearchContext, *, portable: bool) -> None:
        self._search = search
        self._portable = portable
        self._nodes: dict[SolverKey, NodeSolver] = {}
        self._states: dict[SolverKey, bytes] = {}
        """Packed solvers of cells that have waited long; their tables are written again when a task continues them."""
        self._tables: dict[tuple[Priced, int], Tables | None] = {}
        """Tables of the last meshes and numbers of microbatches, which all schedules and branches share."""

    @classmethod
    def unpacked(cls, search: bytes, should_stop: StopCallback) -> "Workbench":
        """Return the workbench of a worker process, given the pickled search context, which is never freed."""
        with uncollected():
            loaded: SearchContext = pickle.loads(search)
        gc.freeze()
        return cls(replace(loaded, should_stop=should_stop), portable=True)

    @seldom_collected()
    def execute(self, task: SearchTask, seconds: float, state: bytes | None = None) -> Finding:
        """Execute a task and return its finding.

        Args:
            task: The task.
            seconds: Seconds left for the task.
            state: Packed solver of its cell, if another process has it.
        """
        finding = self._execute(task, seconds, state)
        return replace(finding, peak_bytes=peak_bytes()) if self._portable else finding

    def _submesh_bound(self, alone: Configuration, end: float) -> SubmeshBounds:
        """Return the bounds of `bounds/submesh.py` on a microbatch of a configuration of the two inner axes alone."""
        search, mesh = self._search, alone.mesh
        samples, costs = search.global_batch // alone.num_microbatches, alone.costs(search.costs)
        batch = search.constraints.batch
        assert batch is not None, "meshes of three axes ask for it"
        folded = search.folded(samples)
        tables = build_tables(folded, search.rules(folded), mesh, costs)
        solve = partial(solve_limited, search.solver, end=end, should_stop=search.should_stop, seed=search.seed)
        return submesh_bounds(tables, DataMajor.of(folded, batch(folded), None), Overlap.of(costs.stack), solve)

    def _solve_unequal(self, task: SearchTask, end: float) -> Finding:
        """Bound pipelines with unequal stages, and look for plans that are faster than the incumbent."""
        space = self._search.unequal
        assert space is not None, "a task on unequal stages is part of a space"
        solver = UnequalNodeSolver(self._search, task.submeshes, space, task.family[0].num_microbatches, end)
        finding = solver.solve(task.find_plan_below, task.cutoff)
        return replace(finding, bound=max(task.bound, finding.bound))

    def _solve_shares(self, task: SearchTask, end: float) -> Finding:
        """Bound rows with different shares of the batch, and look for plans that are faster than the incumbent."""
        space, node = self._search.shares, task.share_node
        assert space is not None, "a task on shares is part of a space"
        assert node is not None, "a task on shares has a node"
        finding = ShareNodeSolver(self._search, space, node, end).solve(task.find_plan_below, task.cutoff)
        return replace(finding, bound=max(task.bound, finding.bound))

    def _execute(self, task: SearchTask, seconds: float, state: bytes | None) -> Finding:
        end = time.monotonic() + seconds
        if task.kind is TaskKind.SUBMESH:
            microbatch_bounds = self._submesh_bound(task.family[0], end)
            return Finding(
                0.0,
                None,
                microbatch_bounds.cut,
                microbatch_bound=microbatch_bounds.joint,
                split_backward_bound=microbatch_bounds.split,
                work=microbatch_bounds.work,
            )
        if task.kind is TaskKind.UNEQUAL:
            return self._solve_unequal(task, end)
        if task.kind is TaskKind.SHARES:
            return self._solve_shares(task, end)
        node = self._resume_node(task, end, state)
        if node is None:
            return Finding(float("inf"), None, 0)
        known = node.state
        cut, work = known.cut, known.work
        match task.kind:
            case TaskKind.BOUND:
                bound = max(task.bound, node.relax(task.cutoff))
                if task.needs_plan or bound < task.find_plan_below:
                    node.relaxation.find_plan()
            case TaskKind.ADVANCE:
                bound = node.advance(task.bound, task.cutoff)
        is_final = node.exhausted or (task.kind is TaskKind.BOUND and bound >= task.cutoff)
        if not is_final:
            self._keep_node(task.solver_key, node)
        return Finding(
            bound,
            node.best,
            known.cut - cut,
            _pack(node) if self._portable and not is_final else None,
            is_final=is_final,
            is_settled=node.is_settled,
            work=known.work - work,
            microbatch_bound=known.microbatch_bound,
            unlimited=known.unlimited,
            choices=known.choices,
        )

    def _new_node(self, task: SearchTask, end: float) -> NodeSolver | None:
        """Return a new solver of the cell of a task; None if constraints or branches exclude all its plans."""
        tables = self._tables_of(task.family)
        if tables is None:
            return None
        if not task.branches:
            return NodeSolver(self._search, task.family, tables, end)
        left = apply(task.branches, tables, self._search.constraints)
        if left is None:
            return None
        return NodeSolver(replace(self._search, constraints=left[1]), task.family, left[0], end)

    def _tables_of(self, family: Family) -> Tables | None:
        """Return the tables of a node, and keep them for other schedules and branches."""
        of = family[0].priced, family[0].num_microbatches
        self._tables[of] = self._tables.pop(of) if of in self._tables else self._search.tables(family)
        while len(self._tables) > 1 and self._nbytes(self._tables.values()) > KEPT_TABLES / self._share:
            self._tables.pop(next(iter(self._tables)))
        return self._tables[of]

    def _keep_node(self, on: SolverKey, node: NodeSolver) -> None:
        """Keep a solver for later tasks, and pack those that have waited longest above `KEPT_BYTES`."""
        self._nodes[on] = node
        node.finder.costs.clear_cache()
        while len(self._nodes) > 1 and self._table_bytes() > KEPT_BYTES / self._share:
            oldest = next(iter(self._nodes))
            self._states[oldest] = _pack(self._nodes.pop(oldest))

    def _table_bytes(self) -> int:
        """Return the bytes of the tables of waiting nodes."""
        return self._nbytes(node.tables for node in self._nodes.values())

    @property
    def _share(self) -> int:
        """Divisor of the memory limits, for processes that share the memory of the machine."""
        return 2 if self._portable else 1

    @staticmethod
    def _nbytes(tables: Iterable[Tables | None]) -> int:
        """Return the bytes of distinct tables."""
        return sum({id(own): own.nbytes for own in tables if own is not None}.values())

    def _resume_node(self, task: SearchTask, end: float, state: bytes | None) -> NodeSolver | None:
        """Return the solver of the cell of a task, with the earlier work on it; None if all its plans are excluded."""
        node = self._nodes.pop(task.solver_key, None)
        kept = self._states.pop(task.solver_key, None)
        state = kept if state is None else state
        if node is None or state is not None:
            node = self._new_node(task, end)
            if node is not None and state is None:
                node.consider(task.starts)
            if node is not None and state is not None:
                node = _unpacked(state, node)
        if node is not None:
            known = node.state
            known.end, known.needs_plan, known.warm_start = end, task.needs_plan, task.warm_start
            known.proves = task.proves
        return node


def _pack(node: NodeSolver) -> bytes:
    """Return a packed node solver."""
    file = BytesIO()
    _Pickler(file, node).dump(node)
    return file.getvalue()


def _unpacked(state: bytes, begun: NodeSolver) -> NodeSolver:
    """Unpack a node solver, given a new solver of the same node."""
    node = _Unpickler(BytesIO(state), begun).load()
    assert isinstance(node, NodeSolver), "a packed state is a node solver"
    if node.state.column_generation is not None:
        node.state.column_generation.rows = node.relaxation.program()
    if node.cuts.pipeline_bounds is not None:
        node.cuts.pipeline_bounds.cut_generator.program = node.cuts.program()
    return node

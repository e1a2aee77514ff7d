"""Records that pass between the search and its workers: tasks, and the findings that they return.

A task depends only on itself and on the earlier work on its cell, so that any process can execute it.
"""

from dataclasses import dataclass
from enum import StrEnum

from autopar.bounds.microbatch import COLD_START, UNKNOWN, MicrobatchBound, WarmStart
from autopar.configuration import Family
from autopar.problem import Choice
from autopar.search.branching import Branch
from autopar.search.candidate import Candidate
from autopar.search.share_space import ShareNode
from autopar.search.submesh_space import Submesh


class TaskKind(StrEnum):
    """Kinds of tasks: `BOUND` solves the relaxation of a cell, `ADVANCE` raises its bound and looks for better plans.

    `SUBMESH` bounds a microbatch on the inner axes of a mesh with an outer data-parallel axis. `UNEQUAL` bounds
    pipelines whose stages have different meshes, and `SHARES` rows of devices with different shares of the batch; both
    look for better ones.
    """

    BOUND = "bound"
    ADVANCE = "advance"
    SUBMESH = "submesh"
    UNEQUAL = "unequal"
    SHARES = "shares"


@dataclass(frozen=True, slots=True, eq=False)
class SearchTask:
    """A task of the search on one cell.

    Attributes:
        kind: Kind of task.
        family: The node: configurations that differ in the schedule only.
        bound: Lower bound on its plans known so far, in seconds.
        cutoff: Step time in seconds above which plans are of no use.
        needs_plan: Whether the search has no plan yet.
        find_plan_below: Bound in seconds below which a relaxation also looks for a plan that fits.
        warm_start: Bounds and placements known of the same microbatches under other schedules.
        branches: Restrictions of the plans.
        starts: Choices to consider first, of the tables under these branches.
        proves: Whether the bound is raised to single choices; runners-up need no proof.
        submeshes: Meshes that stages may have, of `TaskKind.UNEQUAL`.
        share_node: The node, of `TaskKind.SHARES`.
    """

    kind: TaskKind
    family: Family
    bound: float
    cutoff: float
    needs_plan: bool = False
    find_plan_below: float = 0.0
    warm_start: WarmStart = COLD_START
    branches: tuple[Branch, ...] = ()
    starts: tuple[Choice, ...] = ()
    proves: bool = True
    submeshes: tuple[Submesh, ...] = ()
    share_node: ShareNode | None = None

    @property
    def solver_key(self) -> "SolverKey":
        """Key of the solver of the task: `BOUND` and `ADVANCE` tasks of the same cell continue one another."""
        alone = None if self.kind in (TaskKind.BOUND, TaskKind.ADVANCE) else self.kind
        return alone, self.family, self.branches


Cell = tuple[Family, tuple[Branch, ...]]
"""A node, and the branches that restrict its plans."""

SolverKey = tuple[TaskKind | None, Family, tuple[Branch, ...]]
"""Kind of a task that stands alone, node and branches."""


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """The result of a task.

    Attributes:
        bound: Lower bound on the plans of the cell, in seconds; infinity if none fits.
        best: Incumbent of the cell.
        is_final: Whether no further task raises the bound.
        is_settled: Whether no further task raises the bound but a proof, which may take longer than all before.
        others: Best plan of each other signature that was found.
        work: Units of work of the placement problems of the task.
        cut: Placement problems of the task that their limit of work or time has cut.
        state: Packed solver of the node, for another process; None if this process continues.
        microbatch_bound: Lower bound on the seconds of a microbatch without memory limits.
        split_backward_bound: Such a bound for schedules that split the backward, of `TaskKind.SUBMESH`.
        unlimited: Lower bound on every plan without memory limits, in seconds; 0 if unknown.
        choices: Placements that are optimal at some prices, the best one without memory limits first.
        peak_bytes: Peak memory of the worker, in bytes; 0 if this process executed the task.
    """

    bound: float
    best: Candidate | None
    cut: int
    state: bytes | None = None
    is_final: bool = True
    is_settled: bool = False
    others: tuple[Candidate, ...] = ()
    microbatch_bound: MicrobatchBound = UNKNOWN
    split_backward_bound: MicrobatchBound = UNKNOWN
    unlimited: float = 0.0
    choices: tuple[Choice, ...] = ()
    work: float = 0.0
    peak_bytes: float = 0.0

    @property
    def plans(self) -> tuple[Candidate, ...]:
        """All plans of the finding."""
        return self.others if self.best is None else (self.best, *self.others)

"""The inputs of a search: model, costs, solver and limits, which no step of the search changes.

Worker processes receive a copy (`SearchContext.portable`); what the search finds is in `outcome.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.bounds.memory_bound import MemoryBounds
from autopar.bounds.roofline import ROUNDING, Roofline
from autopar.configuration import Configuration, Family
from autopar.cost import CostModel
from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.manual_recipes import BatchDims
from autopar.formulate.tables import Tables
from autopar.problem import Problem
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.search.candidate import Candidate
from autopar.search.settings import DEFAULT_SETTINGS, SearchSettings
from autopar.search.share_space import ShareSpace
from autopar.search.submesh_space import UnequalSpace
from autopar.solvers import Solver


def _no_plan() -> None:
    """Return no plan."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchContext:
    """The inputs of a search.

    Attributes:
        folded: Returns the folded graph for a number of samples per microbatch.
        rules: Returns the discovered strategies of a folded graph.
        costs: Cost model.
        solver: Solver of placement problems.
        roofline: Roofline bound on step times.
        global_batch: Samples per step.
        memory_limit: Bytes per device.
        keep: Number of plans wanted.
        time_limit: Seconds; infinity for no limit.
        progress: Told after every task.
        should_stop: Polled; whether the caller wants the search to end.
        on_problem: Given every placement problem that is solved, except those with a price on memory.
        seed: Seed of the solver's random choices.
        before: Seconds between the request and the start of the search.
        batch_dims: For solvers that follow recipes: the batch dim of every value.
        constraints: Pins, and what may lie in host memory.
        host_room: Bytes of host memory per device.
        unequal: The space of pipelines whose stages have different meshes; None if there is none.
        shares: The space of rows with different shares of the batch; None if there is none.
        rooflines: Roofline bound on each group of equal nodes.
        least_memory_plan: Returns the plan that needs least memory, if it fits; called if no construction fits.
        incumbent: Objective in seconds of a plan known beside the search, which looks for faster ones only; infinity if
            none is known.
        starts: Configurations of plans known beside the search, in whose nodes it begins.
        settings: Constants that steer the search.
        memory_bounds: Lower bounds on memory, and on the recompute that memory enforces.
    """

    folded: Callable[[int], Folded]
    rules: Callable[[Folded], Rules]
    costs: CostModel
    solver: Solver
    roofline: Roofline
    global_batch: int
    memory_limit: float
    keep: int
    time_limit: float
    progress: ProgressCallback
    should_stop: StopCallback
    on_problem: Callable[[Problem], None] | None = None
    seed: int = 0
    before: float = 0.0
    batch_dims: BatchDims | None = None
    constraints: Constraints = FREE
    host_room: float = math.inf
    unequal: UnequalSpace | None = None
    shares: ShareSpace | None = None
    rooflines: tuple[Roofline, ...] = ()
    least_memory_plan: Callable[[], Candidate | None] = _no_plan
    incumbent: float = math.inf
    starts: tuple[Configuration, ...] = ()
    settings: SearchSettings = DEFAULT_SETTINGS
    memory_bounds: MemoryBounds = field(init=False)

    def __post_init__(self) -> None:
        """Create the memory bounds with empty caches."""
        own = self.folded, self.roofline, self.costs, self.constraints, self.memory_limit, self.global_batch
        object.__setattr__(self, "memory_bounds", MemoryBounds(*own))

    def portable(self) -> "SearchContext":
        """Return the context without callbacks of the caller, for worker processes."""
        return replace(self, progress=silent, should_stop=never, on_problem=None, least_memory_plan=_no_plan)

    def least_bytes(self, configuration: Configuration) -> float:
        """Return a lower bound on the resident bytes of a device, whatever the plan."""
        if self.constraints.hosts_sums:
            return 0.0
        return self.roofline.bytes(configuration, offload=self.constraints.hosts_optimizer)

    def may_fit(self, configuration: Configuration) -> bool:
        """Whether the resident bytes of a configuration may fit on the devices and hosts."""
        limit = self.memory_limit
        if self.least_bytes(configuration) > limit:
            return False
        if self.constraints.hosts_sums:  # what of the state is not on a device is on its host
            return self.roofline.bytes(configuration) <= (limit + self.host_room) * (1 + ROUNDING)
        return not self.constraints.hosts_optimizer or self.roofline.finds_room(configuration, limit, self.host_room)

    def cut_lp_applies(self, configuration: Configuration) -> bool:
        """Whether plans of a configuration are bounded by the cut LP, which spreads blocks over stages."""
        return not self.constraints.hosted and self.memory_bounds.cut_lp_applies(configuration)

    def tables(self, family: Family) -> Tables | None:
        """Return the placement decisions of configurations that differ in the schedule; None if pins exclude all."""
        folded = self.folded(self.global_batch // family[0].num_microbatches)
        return self.constraints.tables(folded, self.rules(folded), family[0].mesh, family[0].costs(self.costs))

    def least(self, family: Family) -> float:
        """Return the roofline bound of a family, in seconds."""
        fixed = self.costs.stack["step_seconds"]
        return min(self.roofline.seconds(configuration, self.global_batch) for configuration in family) + fixed

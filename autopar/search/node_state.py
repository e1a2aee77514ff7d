"""What is known of one node of the branch and bound while a worker solves it: inputs, incumbent, bounds and counters.

The parts of the node solver (`node_solver.py`) read and update one `NodeState`; the state calls none of them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.microbatch import COLD_START, UNKNOWN
from autopar.configuration import Configuration
from autopar.formulate.block_memory import RESIDENT
from autopar.formulate.mean_memory import least_bytes
from autopar.formulate.tables import Tables
from autopar.problem import Choice
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.settings import NodeSettings


class NodeState:
    """What is known of one pipeline degree, mesh and number of microbatches, under any of several schedules.

    Args:
        search: Inputs of the search.
        family: Configurations that differ in the schedule only, which is decided once placements are known.
        tables: Placement decisions and their costs.
        end: When to stop, on the monotonic clock.

    Attributes:
        configuration: First configuration of the family.
        pipeline: Pipeline of this configuration.
        fastest: Per kind of block, the least recompute that constraints allow.
        flavours: Kinds of recompute that constraints allow.
        least_bytes: Per kind of recompute, a lower bound on the bytes of the fullest device.
        needs_plan: Whether the search has no plan yet: the end then waits for one, but not for long.
        proves: Whether the bound is raised to single choices at the end, which may take longer than all before.
        warm_start: Bounds and placements known of the same microbatches under other schedules.
        cutoff: Step time in seconds above which plans are of no use.
        best: The incumbent of the node; None before the first plan.
        bounded: Configurations that the bound of the master problem covers.
        bounding: Pipelines of these configurations.
        left_out: Lower bound on the plans of the other configurations, in seconds.
        microbatch_bound: Lower bound on the seconds of a microbatch without memory limits.
        unlimited: Lower bound on every plan without memory limits, in seconds; 0 if unknown.
        relaxed_choice: Best placements without memory limits; None before they are found.
        column_generation: Master problem of column generation; None before the first choice.
        cut: Placement problems that their limit of work or time has cut.
        work: Units of work of all placement problems so far.
    """

    def __init__(self, search: SearchContext, family: Sequence[Configuration], tables: Tables, end: float) -> None:
        self.search, self.family, self.tables, self.end = search, tuple(family), tables, end
        self.configuration = family[0]
        self.pipelines = tuple(configuration.pipeline(search.costs.stack) for configuration in family)
        self.pipeline = self.pipelines[0]
        folded, constraints = tables.folded, search.constraints
        self.fastest = constraints.fastest(folded.chain, len(folded.kinds))
        self.flavours = constraints.flavours()
        self.needs_plan = self.proves = False
        self.warm_start = COLD_START
        self.cutoff = math.inf
        self.best: Candidate | None = None
        self.bounding = replace(self.pipeline, others=self.pipelines[1:])
        self.bounded, self.left_out = self.family, math.inf
        self.microbatch_bound = UNKNOWN
        self.unlimited = 0.0
        self.relaxed_choice: Choice | None = None
        self.column_generation: ColumnGeneration | None = None
        self.cut = 0
        self.work = 0.0
        self.least_bytes = self.least_bytes_by_flavour(offload=constraints.hosts_optimizer)

    @property
    def settings(self) -> NodeSettings:
        """Constants of the work on one node."""
        return self.search.settings.node

    @property
    def may_fit(self) -> bool:
        """Whether the lower bound on memory is within the memory limit."""
        return min(self.least_bytes.values()) <= self.search.memory_limit

    @property
    def cut_lp_applies(self) -> bool:
        """Whether the cut LP, which spreads blocks over stages, bounds the configurations."""
        return all(map(self.search.cut_lp_applies, self.bounded))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Placements that are optimal at some prices, the best one without memory limits first."""
        found = self.warm_start.choices if self.column_generation is None else self.column_generation.choices
        return found if self.relaxed_choice is None else tuple(dict.fromkeys((self.relaxed_choice, *found)))

    def least_bytes_by_flavour(self, *, offload: bool) -> dict[Recompute, float]:
        """Return a lower bound on the bytes of the fullest device, per kind of recompute of all blocks.

        Args:
            offload: Whether the optimizer state lies in host memory.
        """
        resident = self.search.constraints.resident if offload else RESIDENT
        least = least_bytes(self.tables, self.bounding, resident=resident)
        return {flavour: least[flavour] for flavour in self.flavours}

    def is_stopped(self) -> bool:
        """Whether the work on the node has to stop now."""
        return self.search.should_stop() or time.monotonic() > self.deadline()

    def deadline(self) -> float:
        """Return when to stop, on the monotonic clock."""
        return self.end + self.search.settings.overtime_seconds if self.needs_plan and self.best is None else self.end

    def target(self, cutoff: float) -> float:
        """Return the bound in seconds that is not raised further: the cutoff, or a bound near the incumbent."""
        return min(cutoff, self.best.objective * (1 - self.settings.closed_gap)) if self.best is not None else cutoff

    def prune_schedules(self, cutoff: float) -> None:
        """Exclude schedules from the bound whose critical path is above the cutoff: the others may need more memory."""
        search, left = self.search, []
        for configuration in self.family:
            pipeline = configuration.pipeline(search.costs.stack)
            least = search.roofline.path_seconds(
                configuration, search.global_batch, pipeline, self.microbatch_bound.seconds
            )
            if least >= cutoff:
                self.left_out = min(self.left_out, least)
            else:
                left.append(configuration)
        if left:
            self.restrict_bound(left)

    def restrict_bound(self, configurations: Sequence[Configuration]) -> None:
        """Let the bound of the master problem cover these configurations only."""
        self.bounded = tuple(configurations)
        first, *others = (configuration.pipeline(self.search.costs.stack) for configuration in configurations)
        self.bounding = replace(first, others=tuple(others))

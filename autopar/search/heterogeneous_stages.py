"""Solves pipelines with unequal stages, whose meshes and placements differ, for one number of microbatches.

1. Least block times on each mesh make a relaxed staging problem (`autopar.staging`). Its optimum is a lower bound on
   all such pipelines: hand-overs between stages and tails are free.
2. Placements of the model on every mesh, from the fastest to the ones with least memory, make the staging problem
   itself; its best route is a candidate plan. Placements that are optimal for the stages of that route are added as
   columns, and the problem is solved again until no route is better.

`heterogeneous_nodes.py` selects the numbers of microbatches.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.configuration import Configuration
from autopar.cost import stage_limit
from autopar.describe.axis_roles import roles_of_axes
from autopar.describe.signature import signature
from autopar.formulate.block_memory import KEPT, RESIDENT
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.tables import Tables
from autopar.pipeline_partition.block_ranges import symbols_of, windows
from autopar.plan import BlockPlan, StagePlan, Variant
from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution
from autopar.recompute import ON_DEVICE, Recompute, format_recompute
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate, Draft
from autopar.search.context import SearchContext
from autopar.search.mesh_placements import (
    MeshPlacement,
    block_seconds_bound,
    fastest_op_seconds,
    pareto_choices,
    stage_choice,
    undominated,
)
from autopar.search.stage_chains import StageOptions, distinct_legs, stage_options, start_places
from autopar.search.submesh_space import Submesh, UnequalSpace
from autopar.search.tasks import Finding
from autopar.solvers.limited import solve_limited
from autopar.solvers.staging import dynamic_program as dynamic
from autopar.solvers.staging.integer_program import survivors
from autopar.staging import FloatArray, Route, Staging


class UnequalNodeSolver:
    """Solves unequal stages with one number of microbatches.

    Args:
        search: Inputs of the search.
        submeshes: The meshes that stages may have.
        space: The declared space.
        count: The number of microbatches.
        end: When to stop, on the monotonic clock.

    Attributes:
        work: Units of work of all placement problems so far.
    """

    def __init__(
        self,
        search: SearchContext,
        submeshes: tuple[Submesh, ...],
        space: UnequalSpace,
        count: int,
        end: float = math.inf,
    ) -> None:
        search = replace(search, constraints=replace(search.constraints, hosted=frozenset()))  # nothing is offloaded
        self._search, self._space, self._count, self._end = search, space, count, end
        self._folded = search.folded(search.global_batch // count)
        self._trains = SCHEDULES[space.schedule].trains
        self._cut = 0
        self.work = 0.0
        self._rules = search.rules(self._folded)
        self._submeshes = submeshes
        self._tables: dict[Submesh, Tables] = {}

    def quick_bound(self) -> float:
        """Return a lower bound on all plans, in seconds, without a staging problem.

        *Relaxes* edges between ops, memory and the cut into stages: each op is at its fastest on some mesh; *valid* for
        all unequal stages; *costs* the tables of every mesh; *source*: as of `heterogeneous_nodes.unequal_roofline`.
        """
        chosen = np.full(len(self._folded.kinds), np.inf)
        for submesh in self._submeshes:
            if self._should_stop():
                return 0.0
            tables = self._tables_on(submesh)
            if tables is not None:
                times = 1 + (self._count - 1) * submesh.mesh.size / self._space.devices
                chosen = np.minimum(chosen, times * fastest_op_seconds(tables))
        counts = np.array([kind.count for kind in self._folded.kinds])
        return float(counts @ chosen) + self._search.costs.stack["step_seconds"]

    def solve(self, best: float = math.inf, cutoff: float = math.inf) -> Finding:
        """Return a lower bound on all plans, and the plans found.

        Args:
            best: Step time of the incumbent in seconds; plans are looked for where the bound allows a faster one.
            cutoff: Step time in seconds above which plans are of no use.
        """
        bound, enough = self.quick_bound(), best * (1 - OPTIMALITY_TOLERANCE)
        if bound < enough and not self._is_stopped():
            bound = max(bound, self._solve_relaxation(best))
        plans = self._plans(cutoff) if bound < enough else []
        is_final = not self._should_stop()
        return Finding(
            bound, plans[-1] if plans else None, self._cut, is_final=is_final, others=tuple(plans[:-1]), work=self.work
        )

    def _plans(self, cutoff: float) -> list[Candidate]:
        """Return plans below a step time in seconds, the best one last."""
        plans: list[Candidate] = []
        placements = [] if self._is_stopped() else self._mesh_placements()
        for _ in range(self._search.settings.unequal.rounds):
            if not placements or self._is_stopped():
                break
            options = self._options(placements)
            found = dynamic.solve(options.staging, cutoff, self._should_stop)
            if not found.route:
                break
            cutoff = found.seconds
            plans.append(self.candidate(options, found.route))
            placements = self._add_stage_choices(options, found.route)
            if len(placements) == len(options.placements):
                break
        return plans

    def _should_stop(self) -> bool:
        """Whether the time is over, or the caller wants the search to end."""
        return self._search.should_stop() or time.monotonic() > self._end

    def _is_stopped(self) -> bool:
        """Whether to stop now: on request, or at the limit of work."""
        return self._should_stop() or self.work >= self._search.settings.unequal.most_work

    def first_options(self) -> StageOptions | None:
        """Return the first staging problem; None if no mesh has placements."""
        placements = self._mesh_placements()
        return self._options(placements) if placements else None

    def _options(self, placements: Sequence[MeshPlacement]) -> StageOptions:
        return stage_options(
            placements,
            self._pipeline(self._most_stages),
            frozenset(self._space.stages),
            self._search.costs,
            self._space.devices,
            [self._limit(own.submesh) for own in placements],
            self._search.constraints,
        )

    def _limit(self, submesh: Submesh) -> float:
        """Return the memory limit of a device of a mesh, in bytes: groups of nodes may differ in memory."""
        return stage_limit(self._search.costs.cluster, self._search.memory_limit, submesh.devices)

    def _add_stage_choices(self, options: StageOptions, route: Route) -> list[MeshPlacement]:
        """Return the placements, with those that are optimal for the blocks of each stage of a route."""
        found = list(options.placements)
        for leg in route:
            submesh = options.placements[leg.option].submesh
            tables = self._tables[submesh]
            counts = np.bincount(self._folded.chain[leg.start : leg.stop], minlength=len(self._folded.kinds))
            choice = stage_choice(tables, self._pipeline(len(route)), counts, self._solve)
            if choice is not None and all((own.submesh, own.choice) != (submesh, choice) for own in found):
                found.append(MeshPlacement.of(submesh, tables, choice, trains=self._trains))
        return found

    @property
    def _most_stages(self) -> int:
        """Largest number of stages on the remaining meshes."""
        devices = self._space.devices
        smallest = min((submesh.mesh.size for submesh in self._tables), default=devices)
        return max(1, min(max(self._space.stages), devices // smallest))

    def _pipeline(self, num_stages: int) -> Pipeline:
        mesh = next(iter(self._tables)).mesh
        configuration = Configuration(num_stages, mesh, self._count, self._space.schedule)
        return configuration.pipeline(self._search.costs.stack)

    def _solve(self, instance: Problem, cutoff: float) -> Solution:
        search = self._search
        found = solve_limited(
            search.solver, instance, self._end, cutoff=cutoff, should_stop=search.should_stop, seed=search.seed
        )
        self._cut += found.cut
        self.work += found.work
        return found.solution

    def _solve_relaxation(self, best: float) -> float:
        """Return the bound of the relaxed staging problem, and drop meshes that no plan better than `best` uses."""
        self._write_tables()
        if not self._tables:
            return math.inf
        relaxed = self.relaxed_staging()
        bound = dynamic.solve(relaxed, best, self._should_stop).bound
        if bound < best < math.inf and not self._should_stop():
            used = {leg.option for _, leg in survivors(relaxed, best, one_each=True)}
            self._submeshes = tuple(own for number, own in enumerate(self._tables) if number in used)
            self._tables = {own: self._tables[own] for own in self._submeshes}
        return bound

    def _write_tables(self) -> None:
        """Write the tables of all meshes that constraints allow."""
        if not self._tables:
            found = {submesh: self._tables_on(submesh) for submesh in self._submeshes}
            self._tables = {submesh: tables for submesh, tables in found.items() if tables is not None}

    def _tables_on(self, submesh: Submesh) -> Tables | None:
        """Return the placement decisions on a mesh; None if constraints exclude all."""
        search = self._search
        costs = search.costs.on(submesh.devices)
        return search.constraints.tables(self._folded, self._rules, submesh.mesh, costs)

    def relaxed_staging(self) -> Staging:
        """Return the relaxed staging problem: least seconds and bytes of each block, all other costs 0.

        *Relaxes* hand-overs, tails and the coupling of blocks by one choice of placements; *valid* for all unequal
        stages; *costs* a placement problem per heavy kind of block and mesh; *source*: `mesh_placements.py`.
        """
        self._write_tables()
        chain = np.asarray(self._folded.chain)
        found = windows(symbols_of(self._folded.chain, ()), len(chain), from_first=False)
        pipeline, stages, options = self._pipeline(self._most_stages), self._most_stages, len(self._tables)
        flying = np.array([pipeline.in_flight(stage) for stage in reversed(range(stages))], dtype=np.float64)
        seconds = np.empty((stages, options, len(found.start), 1))

        def sums(kinds: FloatArray) -> FloatArray:
            total = np.concatenate([[0.0], np.cumsum(kinds[chain])])
            return np.asarray(total[found.stop] - total[found.start])

        for number, (submesh, tables) in enumerate(self._tables.items()):
            least = block_seconds_bound(tables, self._solve, self._is_stopped, self._search.settings.unequal)
            resident, kept = _least_bytes(tables, trains=self._trains)
            held = sums(resident)[None] + flying[:, None] * sums(kept)[None] + self._folded.buffer_bytes
            seconds[:, number, :, 0] = np.where(held <= self._limit(submesh), sums(least)[None], np.inf)
        devices = self._space.devices
        return Staging(
            at=np.where(self._search.constraints.ranges(*found.at.shape), found.at, -1),
            sizes=np.array([submesh.mesh.size for submesh in self._tables]),
            starts=start_places(list(self._tables), devices),
            seconds=seconds,
            lead=np.zeros_like(seconds),
            slow=np.zeros_like(seconds),
            tails=np.zeros_like(seconds),
            ends=np.zeros(options, dtype=np.int64),
            classes=np.zeros(len(chain), dtype=np.int64),
            ahead=np.zeros((1, 1, 1, devices)),
            back=np.zeros((1, 1, 1, devices)),
            counts=frozenset(self._space.stages),
            follow=self._count - 1.0,
            fixed=pipeline.fixed,
        )

    def _mesh_placements(self) -> list[MeshPlacement]:
        """Return Pareto-optimal placements of the model on every mesh."""
        self._write_tables()
        search = self._search
        found: list[MeshPlacement] = []
        flavours = search.constraints.flavours()
        fastest = search.constraints.fastest(self._folded.chain, len(self._folded.kinds))
        for submesh, tables in self._tables.items():
            if found and self._is_stopped():
                break
            even = max(2, min(self._most_stages, round(self._space.devices / submesh.mesh.size)))
            choices = pareto_choices(
                tables,
                self._pipeline(even),
                self._limit(submesh),
                flavours,
                fastest,
                self._solve,
                self._is_stopped,
                self._search.settings.unequal,
            )
            each = [MeshPlacement.of(submesh, tables, choice, trains=self._trains) for choice in choices]
            found += undominated(each)[: self._search.settings.unequal.most_choices]
        return found

    def candidate(self, options: StageOptions, route: Route) -> Candidate:
        """Return the candidate plan of a route."""
        used = distinct_legs(route)
        first, flavours = options.placements[used[0]], options.flavours(route)
        configuration = Configuration(len(route), first.submesh.mesh, self._count, self._space.schedule)
        stages = tuple(
            StagePlan(
                (leg.start, leg.stop),
                (leg.device, leg.device + options.placements[leg.option].submesh.mesh.size),
                format_recompute(recompute),
                used.index(leg.option),
            )
            for leg, recompute in zip(route, flavours, strict=True)
        )
        variants = tuple(
            Variant(own.submesh.mesh.axes, own.blocks) for own in map(options.placements.__getitem__, used)
        )
        roles = tuple(
            roles_of_axes(variant.mesh, _held(variant, number, stages), self._folded)
            for number, variant in enumerate(variants)
        )
        draft = Draft(
            stages,
            variants[0].blocks,
            roles[0],
            signature(configuration, stages, variants[0].blocks, roles[0], roles[1:]),
            variants[1:],
            roles[1:],
        )
        split = Split(tuple((leg.start, leg.stop) for leg in route), flavours)
        return Candidate(configuration, first.tables, first.choice, split, options.time(route), draft)


def _held(variant: Variant, number: int, stages: Sequence[StagePlan]) -> tuple[BlockPlan, ...]:
    """Return the placements of a variant, restricted to the blocks of its stages."""
    held = {block for stage in stages if stage.variant == number for block in range(*stage.blocks)}
    blocks = (
        replace(block, instances=tuple(index for index in block.instances if index in held)) for block in variant.blocks
    )
    return tuple(block for block in blocks if block.instances)


def _least_bytes(tables: Tables, *, trains: bool) -> tuple[FloatArray, FloatArray]:
    """Return lower bounds on the bytes of a block per kind: resident, and per microbatch in flight, (kinds,) each."""
    resident = np.zeros(len(tables.folded.kinds))
    kept = {flavour: resident.copy() for flavour in (ON_DEVICE if trains else (Recompute.NONE,))}
    for item in tables.bytes:
        least = float(item.amounts.min())
        if item.memory in RESIDENT:
            resident[item.kind] += least
        for flavour, amounts in kept.items():
            if item.memory in KEPT[flavour]:
                amounts[item.kind] += least
    return resident, np.min(list(kept.values()), axis=0)

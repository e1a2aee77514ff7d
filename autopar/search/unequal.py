"""The search over pipelines whose stages have meshes and placements of their own.

1. Per number of microbatches, what a block takes at least on each mesh makes a staging problem (`autopar.staging`), the
   optimum of which is a lower bound on all such pipelines: hand-overs and tails are free. Numbers of microbatches that
   cannot be better than what is known end here.
2. For the others, choices of placements on every mesh, from the fastest to those that hold least, make the staging
   problem proper; its best route is a candidate. Choices that are best for the blocks of its stages are added, and the
   problem is solved again, until that gives no better route.

It is opened if the best plan on equal stages is `WEAK` times as slow as a floor under all unequal ones, or slower than
that if devices differ: else there is little to gain.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.cluster import Cluster
from autopar.formulate.memory import KEPT, RESIDENT
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import Tables
from autopar.formulate.windows import symbols_of, windows
from autopar.plan import BlockPlan, StagePlan, Variant
from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution
from autopar.recompute import ON_DEVICE, Recompute, format_recompute
from autopar.schedule import SCHEDULES
from autopar.search.legs import Options, distinct_legs, options_of, start_places
from autopar.search.limits import solve_limited
from autopar.search.outcome import Candidate, Draft, Outcome
from autopar.search.pieces import Finding
from autopar.search.placed import (
    MOST_CHOICES,
    Placed,
    least_seconds,
    pareto_choices,
    range_choice,
    rough_shares,
    undominated,
)
from autopar.search.roles import roles_of_axes
from autopar.search.signature import signature
from autopar.search.space import Configuration
from autopar.search.submeshes import Submesh, Unequal, nearest
from autopar.solvers import staging as dynamic
from autopar.solvers.staging_program import survivors
from autopar.staging import FloatArray, Route, Staging
from autopar.units import format_seconds

if TYPE_CHECKING:  # it knows this module
    from autopar.search.planner import Search

WEAK = 1.15
"""Unequal stages are opened if the best plan on equal ones is at least this much slower than a floor under them."""

MOST_COUNTS = 3
"""Numbers of microbatches that are worked on: those of the least floors."""

MOST_BLOCKS = 256
"""Longer chains are not looked at where nodes are alike: what every range of blocks takes and holds on every mesh comes
to gigabytes, and the more blocks there are the less is gained, for equal stages can be nearly as even."""

MOST_WORK = 4e10
"""Units of work on one number of microbatches from which on no further choices of placements are looked for."""

ROUNDS = 4
"""Times a staging problem is solved, each time with choices for the stages that were found the last time."""


@dataclass(slots=True)
class UnequalSpace:
    """What became of the space of unequal stages.

    Attributes:
        space: As declared.
        opened: Numbers of microbatches that were looked at.
        floor: No plan of those that were not has a lower objective, in seconds; infinity without any.
        bound: No plan of those that were has a lower objective, in seconds; infinity without any.
        submeshes: The meshes that stages could have.
        why: Why the others were not looked at.
    """

    space: Unequal
    opened: tuple[int, ...] = ()
    floor: float = math.inf
    bound: float = math.inf
    submeshes: tuple[Submesh, ...] = ()

    def words(self, best: float) -> tuple[str, ...]:
        """Return in words what was looked for and what was not, given the best objective in seconds."""
        space, found = self.space, []
        stages = f"pipelines of {_range(space.stages)} stages with meshes of their own"
        if self.opened:
            grids = dict.fromkeys("×".join(map(str, submesh.mesh.shape)) for submesh in self.submeshes)
            found.append(
                f"{stages}, {', '.join(grids)}; {', '.join(map(str, self.opened))} microbatches; {space.schedule}"
            )
        if math.isfinite(self.floor):
            rest = [count for count in space.microbatches if count not in self.opened]
            lead = "excluded by their bound" if self.floor >= best else "not opened"
            found.append(
                f"{lead}: {stages}, of {', '.join(map(str, space.sizes))} device{'s' if space.sizes[-1] > 1 else ''}, "
                f"and {', '.join(map(str, rest))} "
                f"microbatches; no plan there is faster than {format_seconds(self.floor)}"
            )
        return tuple(found)


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first} to {last}" if last - first < len(numbers) else str(list(numbers))


def search_unequal(search: "Search", outcome: Outcome, stops: Callable[[], bool], end: Callable[[], float]) -> float:
    """Look for better plans on unequal stages, if that may pay, and return a bound on those that may.

    If there is no time left to look for them, that is their floor.

    Args:
        search: What is searched.
        outcome: What was found on equal stages; added to.
        stops: Whether to stop now, with what there is.
        end: Returns when to end, on the monotonic clock.
    """
    space = search.unequal
    if space is None or search.batch_dims is not None:
        return math.inf
    found = UnequalSpace(space)
    outcome.unequal = found
    floors = {count: least_unequal(search, space, count) for count in space.microbatches}
    is_long = len(search.folded(search.global_batch // min(floors)).chain) > MOST_BLOCKS
    closed = is_long and not search.costs.cluster.groups
    opened = [] if closed else worth_while(search.costs.cluster, outcome.best, floors)
    if stops() or not opened:
        found.floor = min(floors.values())
        return min((floors[count] for count in opened), default=math.inf)
    found.floor = min((floor for count, floor in floors.items() if count not in opened), default=math.inf)
    best = outcome.candidates[0].configuration.mesh.size if outcome.candidates else space.devices
    found.submeshes = nearest(space.submeshes, min(best, space.devices / 2))
    found.opened = tuple(sorted(opened))
    found.bound = min(floors[count] for count in opened)
    bounds = dict(floors)
    for count in sorted(opened, key=lambda count: floors[count]):
        if stops():
            break
        work = UnequalAttempt(search, found.submeshes, space, count, stops, end)
        bounds[count] = max(bounds[count], work.run(outcome))
        outcome.solved += bounds[count] < outcome.best
        outcome.pruned += bounds[count] >= outcome.best
        found.bound = min(bounds[other] for other in opened)
        lowest = min(outcome.closed_floor, found.bound)
        search.tell(outcome, "stages", opened.index(count) + 1, len(opened), lowest, f"{count} microbatches")
    return found.bound


def least_unequal(search: "Search", space: Unequal, count: int) -> float:
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


def worth_while(cluster: Cluster, best: float, floors: Mapping[int, float]) -> list[int]:
    """Return the numbers of microbatches to look at: those with the least floors, if there is something to gain."""
    weak = 1.0 if cluster.groups else WEAK
    below = sorted((floor, count) for count, floor in floors.items() if best >= weak * floor)
    return [count for _, count in below[:MOST_COUNTS]]


class UnequalAttempt:
    """Work on unequal stages with one number of microbatches.

    Args:
        search: What it is part of.
        submeshes: The meshes that stages may have.
        space: What else is declared.
        count: The number of microbatches.
        stops: Whether to stop now.
        end: Returns when to end, on the monotonic clock.

    Attributes:
        work: Units of work of all placement problems so far.
    """

    def __init__(
        self,
        search: "Search",
        submeshes: tuple[Submesh, ...],
        space: Unequal,
        count: int,
        stops: Callable[[], bool],
        end: Callable[[], float],
    ) -> None:
        search = replace(search, constraints=replace(search.constraints, hosted=frozenset()))  # nothing is offloaded
        self._search, self._space, self._count, self._end = search, space, count, end
        self._asked = stops
        self._folded = search.folded(search.global_batch // count)
        self._trains = SCHEDULES[space.schedule].trains
        self._cut, self._told = 0, 0.0
        self.work = 0.0
        rules = search.rules(self._folded)
        self._tables: dict[Submesh, Tables] = {}
        for submesh in submeshes:
            tables = search.constraints.tables(self._folded, rules, submesh.mesh, search.costs.on(submesh.devices))
            if tables is not None:
                self._tables[submesh] = tables
        smallest = min((submesh.mesh.size for submesh in self._tables), default=space.devices)
        self._stages = max(1, min(max(space.stages), space.devices // smallest))

    def run(self, outcome: Outcome) -> float:
        """Return a lower bound on all plans, and add the best one to what was found."""
        if not self._tables:
            return math.inf
        relaxed = self.relaxed()
        bound = dynamic.solve(relaxed, outcome.best, self._asked).bound
        if self._stops() or bound >= outcome.best * (1 - OPTIMALITY_TOLERANCE):
            outcome.take(self._finding(bound, None), self._search.keep)
            return bound
        if outcome.candidates:  # meshes that no better plan has are let go
            used = {leg.option for _, leg in survivors(relaxed, outcome.best, one_each=True)}
            self._tables = {
                submesh: tables for number, (submesh, tables) in enumerate(self._tables.items()) if number in used
            }
        placed, cutoff = self._placed(), self._search.threshold(outcome)
        for _ in range(ROUNDS):
            if not placed or self._stops():
                break
            options = self._options(placed)
            found = dynamic.solve(options.staging, cutoff, self._asked)
            if not found.route:
                break
            cutoff = found.seconds
            outcome.take(self._finding(bound, self.candidate(options, found.route)), self._search.keep)
            placed = self._with_own(options, found.route)
            if len(placed) == len(options.placed):
                break
        outcome.take(self._finding(bound, None), self._search.keep)
        return bound

    def _finding(self, bound: float, best: Candidate | None) -> Finding:
        """Return what came of the work since the last one."""
        found = Finding(bound, best, self._cut, work=self.work - self._told)
        self._cut, self._told = 0, self.work
        return found

    def _stops(self) -> bool:
        """Whether to stop now, since somebody wants to or as much work was done as there may be."""
        return self._asked() or self.work >= MOST_WORK

    def options(self) -> Options | None:
        """Return what stages can be chosen from at first; None if there is nothing."""
        placed = self._placed()
        return self._options(placed) if placed else None

    def _options(self, placed: Sequence[Placed]) -> Options:
        return options_of(
            placed,
            self._pipeline(self._stages),
            frozenset(self._space.stages),
            self._search.costs,
            self._space.devices,
            self._search.memory_limit,
            self._search.constraints,
        )

    def _with_own(self, options: Options, route: Route) -> list[Placed]:
        """Return the options, and on the mesh of each stage of a route the best choice for its blocks alone."""
        found = list(options.placed)
        for leg in route:
            submesh = options.placed[leg.option].submesh
            tables = self._tables[submesh]
            counts = np.bincount(self._folded.chain[leg.start : leg.stop], minlength=len(self._folded.kinds))
            choice = range_choice(tables, self._pipeline(len(route)), counts, self._solve)
            if choice is not None and all((own.submesh, own.choice) != (submesh, choice) for own in found):
                found.append(Placed.of(submesh, tables, choice, trains=self._trains))
        return found

    def _pipeline(self, num_stages: int) -> Pipeline:
        mesh = next(iter(self._tables)).mesh
        configuration = Configuration(num_stages, mesh, self._count, self._space.schedule)
        return configuration.pipeline(self._search.costs.stack)

    def _solve(self, instance: Problem, cutoff: float) -> Solution:
        search = self._search
        found = solve_limited(
            search.solver, instance, self._end(), cutoff=cutoff, should_stop=search.should_stop, seed=search.seed
        )
        self._cut += found.cut
        self.work += found.work
        return found.solution

    def relaxed(self) -> Staging:
        """Return the staging problem that bounds all plans: what each block takes and holds at least, all else free."""
        folded, chain, limit = self._folded, np.asarray(self._folded.chain), self._search.memory_limit
        found = windows(symbols_of(self._folded.chain, ()), len(chain), from_first=False)
        pipeline = self._pipeline(self._stages)
        flying = np.array([pipeline.in_flight(stage) for stage in reversed(range(self._stages))], dtype=np.float64)
        seconds = np.empty((self._stages, len(self._tables), len(found.start), 1))

        def sums(kinds: FloatArray) -> FloatArray:
            total = np.concatenate([[0.0], np.cumsum(kinds[chain])])
            return np.asarray(total[found.stop] - total[found.start])

        for number, tables in enumerate(self._tables.values()):
            rough = np.zeros(len(folded.kinds)) if self._stops() else rough_shares(tables)  # launches only
            least = least_seconds(tables, self._solve, rough)
            resident, kept = _least_bytes(tables, trains=self._trains)
            held = sums(resident)[None] + flying[:, None] * sums(kept)[None] + folded.buffer_bytes
            seconds[:, number, :, 0] = np.where(held <= limit, sums(least)[None], np.inf)
        options, devices = len(self._tables), self._space.devices
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

    def _placed(self) -> list[Placed]:
        """Return what stages can be chosen from."""
        search = self._search
        found: list[Placed] = []
        flavours = search.constraints.flavours()
        fastest = search.constraints.fastest(self._folded.chain, len(self._folded.kinds))
        for submesh, tables in self._tables.items():
            if found and self._stops():
                break
            even = max(2, min(self._stages, round(self._space.devices / submesh.mesh.size)))
            choices = pareto_choices(
                tables, self._pipeline(even), search.memory_limit, flavours, fastest, self._solve, self._stops
            )
            each = [Placed.of(submesh, tables, choice, trains=self._trains) for choice in choices]
            found += undominated(each)[:MOST_CHOICES]
        return found

    def candidate(self, options: Options, route: Route) -> Candidate:
        """Return the plan of a route before it is written down."""
        used = distinct_legs(route)
        first, flavours = options.placed[used[0]], options.flavours(route)
        configuration = Configuration(len(route), first.submesh.mesh, self._count, self._space.schedule)
        stages = tuple(
            StagePlan(
                (leg.start, leg.stop),
                (leg.device, leg.device + options.placed[leg.option].submesh.mesh.size),
                format_recompute(recompute),
                used.index(leg.option),
            )
            for leg, recompute in zip(route, flavours, strict=True)
        )
        variants = tuple(Variant(own.submesh.mesh.axes, own.blocks) for own in map(options.placed.__getitem__, used))
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
    """Return the placements of a variant, of the blocks that its stages hold."""
    held = {block for stage in stages if stage.variant == number for block in range(*stage.blocks)}
    blocks = (
        replace(block, instances=tuple(index for index in block.instances if index in held)) for block in variant.blocks
    )
    return tuple(block for block in blocks if block.instances)


def _least_bytes(tables: Tables, *, trains: bool) -> tuple[FloatArray, FloatArray]:
    """Return the least that a block keeps all the time, and for each microbatch in flight, by kind, (kinds,) each."""
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

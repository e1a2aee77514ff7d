"""Work on one configuration: its best plan, and a bound on all its plans.

1. Solve the placement problem without memory limits. Its optimum bounds every plan of the configuration from below,
   raised by the parts of the step time that are not linear.
2. If the choice does not fit, put a price on memory, which bounds what fits, and solve the problem under the memory of
   every stage, without and with recompute.
3. Split each choice found on the way into stages exactly (`best_split`); the best plan is kept.
4. With one stage, raise the bound from means of choices to single ones, which mostly meets the best plan
(`bounds/integer.py`).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.bounds.block_lp import BlockProgram, block_program
from autopar.bounds.column_generation import Hull
from autopar.bounds.critical_path import LeastPath
from autopar.bounds.cut_lp import Order, Rest
from autopar.bounds.cut_order import Rounds
from autopar.bounds.integer import WHOLE_WORK, least_whole
from autopar.bounds.master_problem import MOST_APART, step_program
from autopar.bounds.master_rows import StepProgram
from autopar.bounds.microbatch import NO_HINT, UNKNOWN, Pace, launched
from autopar.bounds.priced_cuts import Spreader
from autopar.configuration import Configuration
from autopar.formulate.block_memory import RESIDENT, UNHOSTED, ChainBytes
from autopar.formulate.linear_weights import StageMix, kind_weights, problem, stage_mixes, weights
from autopar.formulate.manual_recipes import recipes, restrict
from autopar.formulate.mean_memory import least_bytes
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.step_time import Split, step_time
from autopar.formulate.tables import FloatArray, Slot, Tables
from autopar.pipeline_partition.stage_cuts import best_split
from autopar.problem import OPTIMALITY_TOLERANCE, Choice, Problem, Recipe, Solution
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.lowered_memory import Weighing
from autopar.search.placement_descent import Neighbourhood, descend
from autopar.search.stage_cutting import Cutting
from autopar.solvers.base import Budget, Work
from autopar.solvers.limited import PLACEMENT_WORK, solve_limited

BESIDE = (0.05, None)
"""Prices of gradient traffic at which placements under memory limits are looked for, as of `weights`: as if there was
room beside the passes for nearly all of it, and as if there was none."""


class Attempt:
    """Work on one pipeline degree, mesh and number of microbatches, under any schedule.

    Attributes:
        family: The configurations: they differ in the schedule only, which is decided once placements are known.
        best: The best plan so far; None before the first.
        cutoff: Plans that take longer interest nobody.
        end: When to end, on the monotonic clock.
        urgent: Whether any plan will do, so that the end waits for it, but not for long.
        proves: Whether the bound is raised as far as can be, at the end to single choices, which may take longer than
            all before.
        spreads_first: Whether pipelines are bounded by blocks that are spread over stages at once.
        cut: Placement problems that their limit of work or time has cut.
        work: Units of work of all placement problems so far.
        exhausted: Whether nothing here raises the bound further.
        is_settled: Whether nothing but a proof does.
        pace: What a microbatch takes at least, whatever memory it takes.
        unlimited: Lower bound on every plan, whatever memory it takes; 0 if unknown.
        hint: What is known of the same microbatches under other schedules.
        bounded: The configurations the bound of the hull is of.
        left_out: No plan of the others has a lower objective.
        rounds: Bounds of pipelines without a closed form; None before the first one.
    """

    def __init__(self, search: SearchContext, family: Sequence[Configuration], tables: Tables, end: float) -> None:
        self.search, self.family, self.tables, self.end = search, tuple(family), tables, end
        self._settings = search.settings.node
        self.configuration = family[0]
        pipelines = [configuration.pipeline(search.costs.stack) for configuration in family]
        self.pipeline = pipelines[0]
        self.bounding = replace(self.pipeline, others=tuple(pipelines[1:]))
        self.bounded, self.left_out = self.family, math.inf
        self.best: Candidate | None = None
        self.urgent = self.proves = self.spreads_first = False
        self.cut = 0
        self.work = 0.0
        self.exhausted = self.is_settled = False
        self.pace, self.hint = UNKNOWN, NO_HINT
        self.unlimited = 0.0
        self.cutoff = math.inf
        self.hull: Hull | None = None
        self._first = 0.0
        self._finely = False
        self._advanced = False
        folded, constraints = tables.folded, search.constraints
        self.fastest = constraints.fastest(folded.chain, len(folded.kinds))
        self._flavours = constraints.flavours()
        self.least_bytes = self._least_bytes(offload=constraints.hosts_optimizer)
        self.relaxed_choice: Choice | None = None
        self._considered: set[Choice] = set()
        self.rounds: Rounds | None = None
        self.weighing = Weighing(
            tables,
            self.pipeline,
            self.configuration.mesh.size,
            self._flavours,
            search.host_room,
            bool(constraints.hosted),
        )
        own = zip(self.family, pipelines, strict=True)
        self._cutting = Cutting(search, tuple(own), tables, self.weighing)

    def relaxed(self, cutoff: float) -> float:
        """Solve without memory limits and return a lower bound on every plan of the configuration."""
        self.cutoff = cutoff
        if min(self.least_bytes.values()) > self.search.memory_limit:
            return math.inf
        bound = min(self._without_limits(cutoff), self.left_out)
        self.unlimited = max(self.unlimited, bound)
        if self.rounds is not None:
            self.work += self.rounds.spreader.worked()
        return bound if self.rounds is None else min(max(bound, self.rounds.bound), self.left_out)

    def _without_limits(self, cutoff: float) -> float:
        if self.relaxed_choice is None:
            self._first = self._first_bound(cutoff)
        bound = self._first
        if self.relaxed_choice is None or bound >= cutoff:
            return bound
        if self.pipeline.num_stages > 1:
            bound = max(bound, self._undivided() + self.pipeline.fixed)
        if cutoff < math.inf and bound < cutoff:  # else nothing is known yet that it might exclude
            if self.hull is None:
                self.rounds = self._first_rounds(cutoff)
            else:
                bound, _ = self._raise(bound, cutoff, self._settings.relaxed_steps, memory=False)
        return bound

    def _first_bound(self, cutoff: float) -> float:
        """Return the bound of one placement problem, and begin the hull with its choice unless that is enough."""
        fixed, hint = self.pipeline.fixed, self.hint
        if hint.pace.seconds and hint.choices:
            self.pace, found = hint.pace, hint.choices[0]
            bound = hint.pace.seconds * self.bounding.rounds / self.bounding.num_groups + fixed
            return self._begun(bound, cutoff, found)
        hidden = 1.0 if self.pipeline.num_stages == 1 else 0.0
        solution = self._solve(hidden=hidden, recompute=self.fastest, bounding=True, cutoff=cutoff - fixed)
        bound = max(solution.bound, launched(self.tables, self.bounding)) + fixed
        if self.pipeline.num_stages > 1:
            seconds = (bound - fixed) * self.bounding.num_groups / self.bounding.rounds
            self.pace = Pace(seconds, hint.pace.blocks or (0.0,) * len(self.tables.folded.chain))
        return self._begun(bound, cutoff, solution.choice)

    def _begun(self, bound: float, cutoff: float, choice: Choice | None) -> float:
        """Begin with a choice unless the bound is enough, and return the bound.

        There is no hull where blocks are spread at once: who waits for whom is part of that.
        """
        if choice is None or bound >= cutoff or self._stopped():
            return bound
        self.relaxed_choice = choice
        if self.spreads_first and self._spreads:
            return bound
        self._narrow(cutoff)
        self.hull = Hull(self.tables, self.program())
        for known in (choice, *self.hint.choices):
            self.hull.add(known)
        self._consider(choice)  # now that the hull may say that it is too slow to be cut
        return bound

    def _narrow(self, cutoff: float) -> None:
        """Leave the schedules out of the bound whose longest path is too long: others may hold more."""
        search, left = self.search, []
        for configuration in self.family:
            pipeline = configuration.pipeline(search.costs.stack)
            least = search.floor.path_seconds(configuration, search.global_batch, pipeline, self.pace.seconds)
            if least >= cutoff:
                self.left_out = min(self.left_out, least)
            else:
                left.append(configuration)
        if left:
            self._bound(left)

    def _bound(self, configurations: Sequence[Configuration]) -> None:
        """Let the bound of the hull be of these configurations."""
        self.bounded = tuple(configurations)
        first, *others = (configuration.pipeline(self.search.costs.stack) for configuration in configurations)
        self.bounding = replace(first, others=tuple(others))

    def program(self) -> StepProgram:
        """Return the step program of the configurations that the bound is of."""
        main = max(self.tables.folded.kinds, key=lambda kind: kind.count)
        return step_program(
            self.tables,
            self.bounding,
            self.search.memory_limit,
            flavours=self.search.constraints.flavours(main.instances),
            fastest=self.fastest,
            hosted=self.search.constraints.hosted,
            path=self._path(),
            finely=self._finely,
        )

    def _refined(self) -> bool:
        """Tell parts of a long pipeline apart, and return whether that is new."""
        if self._finely or self.bounding.num_groups <= MOST_APART or self._spreads:
            return False
        self._finely = True
        self._begin_again()
        return True

    def block(self) -> BlockProgram:
        """Return the program of a block of the most frequent kind."""
        main = max(self.tables.folded.kinds, key=lambda kind: kind.count)
        flavours = self.search.constraints.flavours(main.instances)
        return block_program(self.tables, self.bounding, self.search.memory_limit, flavours, self.fastest)

    @property
    def _spreads(self) -> bool:
        """Whether blocks are spread over stages."""
        return all(map(self.search.spreads, self.bounded))

    def _begin_again(self) -> None:
        """Write the step program anew, for the choices that are known."""
        assert self.hull is not None, "choices are found first"
        known = self.hull.choices
        self.hull = Hull(self.tables, self.program())
        for choice in reversed(known):
            self.hull.add(choice)

    def _path(self) -> LeastPath | None:
        """Return what the longest path takes at least under each schedule; None if that is unknown of one of them."""
        known = [self.search.floor.path(configuration, self.search.global_batch) for configuration in self.bounded]
        found = known[0]
        for path in known[1:]:
            found = None if found is None or path is None else found.joined(path)
        return found

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Placements that are good at some prices, the best one without limits first."""
        found = self.hint.choices if self.hull is None else self.hull.choices
        return found if self.relaxed_choice is None else tuple(dict.fromkeys((self.relaxed_choice, *found)))

    def _raise(self, bound: float, cutoff: float, steps: int, *, memory: bool) -> tuple[float, bool]:
        """Raise the bound of the hull until it is above the cutoff or the best plan; return it and whether it may rise.

        Args:
            bound: What is known already.
            cutoff: A bound that is enough.
            steps: Prices to try at most.
            memory: Whether memory is limited.
        """
        assert self.hull is not None, "choices are found first"
        more = True
        for _ in range(steps):
            best = self.best.objective if self.best is not None else math.inf
            bound = max(bound, self.hull.bound)
            if not more or self._stopped() or bound >= self._enough(cutoff):
                break
            more = self.hull.step(self._priced, min(cutoff, best), self._consider, memory=memory)
        return max(bound, self.hull.bound), more

    def _enough(self, cutoff: float) -> float:
        """Return the bound that is not raised further: above a cutoff, or near the best plan."""
        return min(cutoff, self.best.objective * (1 - self._settings.near)) if self.best is not None else cutoff

    def _priced(self, instance: Problem, cutoff: float) -> Solution:
        most = self._settings.priced_work * self.search.time_limit
        return self._run(self._with_recipes(instance), None, cutoff, self._settings.priced_gap, most)

    def _undivided(self) -> float:
        """Return the bound that sees that blocks are not divided between stages: each kind at its own least time."""
        assert self.relaxed_choice is not None, "found before"
        chain = self.tables.folded.chain
        if not any(self.pace.blocks):
            counts = np.array([kind.count for kind in self.tables.folded.kinds])
            totals = self.tables.block_seconds(self.relaxed_choice)
            inline = counts * (totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD])
            least = np.zeros(len(counts))
            for kind in np.argsort(-inline)[: self._settings.heavy_kinds]:
                if self._stopped():
                    break
                weighting = kind_weights(self.tables, [int(kind)], 0.0)
                solution = self._run(problem(self.tables, weighting, name=str(self.configuration)))
                host = float(self.tables.host_seconds[kind].sum())
                least[kind] = max(0.0, host, solution.bound)
            self.pace = replace(self.pace, blocks=tuple(least[np.asarray(chain)].tolist()))
        return min(self.pace.flow(pipeline) for pipeline in (self.bounding, *self.bounding.others))

    def improve(self, bound: float, cutoff: float) -> float:
        """Work until the bound is above the cutoff or nothing raises it, and return the bound."""
        while not self.exhausted and bound < cutoff and not self._stopped():
            bound = self.advance(bound, cutoff)
        return bound

    def advance(self, bound: float, cutoff: float) -> float:
        """Do the next piece of work: look for better plans, and raise the bound where memory binds.

        Args:
            bound: What is known already.
            cutoff: A bound that is enough.
        """
        if self.relaxed_choice is None:
            self.exhausted = True
            return bound
        if self._spreads:
            return min(self._spread_out(bound, cutoff), self.left_out)
        assert self.hull is not None, "choices are found first"
        self._look_first()
        if self.is_settled:
            return min(self._prove_again(bound, cutoff), self.left_out)
        own, more = self._raise(bound, cutoff, self._settings.memory_steps, memory=True)
        bound = max(bound, own)
        near = self.best is not None and bound >= self._enough(math.inf)
        ends = near or not more or self.hull.steps >= self._settings.most_steps
        if ends and not (not near and bound < cutoff and self._refined()):
            self._fit(bound, cutoff)
            if self.best is not None and bound * (1 + self._settings.near) < self.best.objective < cutoff:
                self._look_nearby()
            self.is_settled = True
            self.exhausted = not (self.proves and self._ceiling(bound, cutoff))
        return min(bound, self.left_out)

    def _look_first(self) -> None:
        """Consider the best placements without memory limits, once."""
        if not self._advanced and self.pipeline.num_stages > 1:
            solution = self._solve(hidden=1.0, recompute=self.fastest, bounding=False)
            if solution.choice is not None:
                self._consider(solution.choice)
        self._advanced = True

    def _spread_out(self, bound: float, cutoff: float) -> float:
        """Do the next piece of work where blocks are spread over stages, and return the bound."""
        steps = self._settings.cut_steps
        if self.rounds is None:
            self.rounds = self._first_rounds(cutoff)
            steps = 0 if self.rounds.bound > bound * (1 + self._settings.cut_rise) else self._settings.cut_steps
        for _ in range(steps):
            own = self.rounds.next(self._task, self._enough(cutoff), self._stopped)
            if own is None or self._stopped():
                break
            self._look_first()
            found = self.rounds.spread(own, self._task, self._enough(cutoff), self._stopped)
            for choice in found.choices[: self._settings.considered]:
                whole = self._completed(choice, found.rent)
                if whole is not None:
                    self._consider(whole)
            if found.value >= self._enough(cutoff) or self.rounds.bound > bound * (1 + self._settings.cut_rise):
                break  # the choices known allow no better plan, or not at the least bound of all: it can wait
        self.is_settled = self.exhausted = self.rounds.next(self._task, self._enough(cutoff), self._stopped) is None
        self.work += self.rounds.spreader.worked()
        return max(bound, self.rounds.bound)

    def _first_rounds(self, cutoff: float) -> Rounds:
        """Return the bounds that follow from what blocks take at the first prices."""
        spreader = Spreader(self.tables, self.block(), self.choices, self._priced_block)
        return Rounds(spreader, self.bounded, self._task, self._enough(cutoff), self._stopped)

    def _task(self, configuration: Configuration) -> tuple[Order, Rest]:
        """Return the order of the tasks of a pipeline, and what there is besides blocks."""
        room = self.search.room
        return room.order(configuration), room.rest(configuration, self.pace)

    def _priced_block(self, instance: Problem, cutoff: float) -> Solution:
        gap, work = self._settings.block_gap, self._settings.block_work
        return self._run(self._with_recipes(instance), None, cutoff, gap, work)

    def _completed(self, choice: Choice, rent: float) -> Choice | None:
        """Return a choice with the same decisions in blocks of the most frequent kind, and good ones in all others.

        Args:
            choice: The choice.
            rent: Seconds that all the memory of a device costs.
        """
        tables, main = self.tables, max(self.tables.folded.kinds, key=lambda kind: kind.count).id
        price = rent / (self.search.memory_limit - tables.folded.buffer_bytes)
        prices = np.array([price * (item.kind != main and item.memory in RESIDENT) for item in tables.bytes])
        weighting = weights(tables, self.pipeline, recompute=self.fastest, hidden=1.0, bounding=False)
        instance = problem(tables, weighting, name=str(self.configuration), prices=prices)
        allowed = tuple(
            (own,) if node.kind == main else tuple(range(node.count))
            for node, own in zip(tables.nodes, choice, strict=True)
        )
        return self._run(restrict(instance, Recipe("blocks", allowed)), most=self._settings.block_work).choice

    def _prove_again(self, bound: float, cutoff: float) -> float:
        """Prove once more, as long as that finds better plans: the faster the best one, the less is left to look at."""
        known = self.best
        bound = self._prove(bound, cutoff)
        if self.best is not known:
            self._look_nearby()
        self.exhausted = not self._stopped() and (self.best is known or not self._ceiling(bound, cutoff))
        return bound

    def _ceiling(self, bound: float, cutoff: float) -> float:
        """Return the objective below which a proof would look for choices; 0 if there is nothing to prove."""
        if self.best is None or self.hull is None or self.pipeline.num_stages > 1 or not self.search.solver.counts_work:
            return 0.0
        ceiling = min(cutoff, self.best.objective)
        return ceiling if self.hull.has_prices and bound < ceiling * (1 - OPTIMALITY_TOLERANCE) else 0.0

    def _prove(self, bound: float, cutoff: float) -> float:
        """Return a bound on single choices of one stage, rather than on their means, and consider the one it is from.

        Only for solvers that count their work: the others are compared with, or follow recipes.
        """
        ceiling = self._ceiling(bound, cutoff)
        if not ceiling or self._stopped():
            return bound
        assert self.hull is not None, "there are prices"
        instance, _ = self.hull.priced()
        work, seconds = Work(WHOLE_WORK), max(0.0, self._deadline() - time.monotonic())
        budget = Budget(instance, seconds, None, math.inf, 0.0, self.search.should_stop, work=work)
        found = least_whole(self.tables, self.hull, ceiling, budget)
        self.work += work.done
        self.cut += work.left == 0.0
        if found.choice is not None:
            self._consider(found.choice)
        return max(bound, min(found.bound, ceiling))

    def _look_nearby(self) -> None:
        """Look for better plans of one stage near the best one."""
        if self.best is None or self.hull is None or self.pipeline.num_stages > 1:
            return
        split, chain = self.best.split, self.tables.folded.chain

        def seconds(choice: Choice) -> float:
            return step_time(self.tables.block_seconds(choice), chain, self.pipeline, split, 0.0).seconds

        instance, constant = self.hull.priced()
        near = Neighbourhood(self.tables, instance, self._settings)
        path = list(descend(self.best.choice, near, constant, seconds, self._stopped, self._settings))
        known = self.best
        while path and self.best is known:  # the last one is the fastest; if it does not fit, some before it may
            self._consider(path[-1])
            path = path[: len(path) // 2]

    def _fit(self, bound: float, cutoff: float) -> None:
        """Solve the placement problem under the memory of every stage, by flavour of recompute."""
        if not self.pipeline.fills:
            return  # what a stage holds is no number of microbatches
        self._fit_with(bound, cutoff, offload=False)
        offloads = self.best is None or any(self.best.split.offload)
        if offloads and self.search.constraints.hosts_optimizer:
            self._fit_with(bound, cutoff, offload=True)

    def _fit_with(self, bound: float, cutoff: float, *, offload: bool) -> None:
        """Solve the placement problem under the memory of every stage, the optimizer's state on the device or not."""
        assert self.relaxed_choice is not None, "found before"
        for recompute, least in self._least_bytes(offload=offload).items():
            if recompute is Recompute.SELECTIVE and not any(self.tables.selective):
                continue
            near = self.best is not None and self.best.objective <= bound * (1 + self._settings.memory_gap)
            if least > self.search.memory_limit or bound >= cutoff or near or self._stopped():
                continue
            split = self._even(self.relaxed_choice, recompute, offload=offload)
            if split is None:
                break
            enough = cutoff * self._slowdown(recompute)
            for traffic in BESIDE if self.pipeline.num_stages > 1 else BESIDE[-1:]:
                self._fit_split(split, recompute, traffic, enough)

    def _slowdown(self, recompute: Recompute) -> float:
        """Return how many times as long a step takes if all blocks run again what they may have to.

        The problem has all of them do so, and a plan only those that do not fit else: it may be faster than that.
        """
        assert self.relaxed_choice is not None, "found before"
        totals, factors = self.tables.kind_totals(self.relaxed_choice), []
        for own in (recompute, self.fastest):
            weighting = weights(self.tables, self.pipeline, recompute=own, hidden=1.0, bounding=False, traffic=None)
            factors.append(float((weighting.factors * totals).sum()))
        return max(1.0, factors[0] / factors[1])

    def _fit_split(self, split: Split, recompute: Recompute, traffic: float | None, cutoff: float) -> None:
        """Solve the placement problem under the memory of the stages of a split; `traffic` as of `weights`."""
        mixes = stage_mixes(self.tables.folded.chain, self.pipeline, split, len(self.tables.folded.kinds))
        limit = self.search.memory_limit
        for _ in range(self._settings.corrections):
            start = self.best.choice if self.best is not None else None
            solution = self._solve(
                hidden=1.0,
                recompute=recompute,
                bounding=False,
                mixes=mixes,
                limit=limit,
                start=start,
                cutoff=cutoff,
                traffic=traffic,
            )
            if solution.choice is None:
                break
            self._consider(solution.choice)
            # The problem does not see all bytes, such as those of collectives on the way: leave room for them.
            excess = self.weighing.peak(solution.choice, split) - self.search.memory_limit
            if excess <= 0:
                break
            limit -= excess

    def _stopped(self) -> bool:
        return self.search.should_stop() or time.monotonic() > self._deadline()

    def _deadline(self) -> float:
        """Return when to end, on the monotonic clock."""
        return self.end + self.search.overtime if self.urgent and self.best is None else self.end

    def hurry(self) -> None:
        """Look for any plan that fits: to have one to return and one to beat."""
        if self.hull is None:
            return
        for _ in range(self._settings.hurried_steps):
            if (
                self.best is not None
                or self._stopped()
                or not self.hull.step(self._priced, math.inf, self._consider, memory=True)
            ):
                break

    def begin_with(self, choices: Sequence[Choice]) -> None:
        """Consider choices that are known before."""
        for choice in choices:
            self._consider(choice)

    def follow(self, known: Sequence[Recipe]) -> None:
        """Consider the best completion of each recipe, except of those whose every completion is too large."""
        weighting = weights(self.tables, self.pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False)
        instance = problem(self.tables, weighting, name=str(self.configuration))
        for recipe in known:
            resident = UNHOSTED if self.search.constraints.hosts_optimizer else RESIDENT
            least = least_bytes(self.tables, self.bounding, recipe.allowed, resident=resident)
            if min(least.values()) > self.search.memory_limit:
                continue
            solution = self._run(restrict(instance, recipe))
            if solution.choice is not None:
                self._consider(solution.choice)

    def _solve(
        self,
        *,
        hidden: float,
        recompute: Recompute | Sequence[Recompute],
        bounding: bool,
        cutoff: float = math.inf,
        mixes: tuple[StageMix, ...] = (),
        limit: float = math.inf,
        start: Choice | None = None,
        traffic: float | None = None,
    ) -> Solution:
        weighting = weights(
            self.tables,
            self.bounding if bounding else self.pipeline,
            recompute=recompute,
            hidden=hidden,
            bounding=bounding,
            traffic=0.0 if bounding else traffic,
        )
        instance = problem(self.tables, weighting, mixes, limit, str(self.configuration))
        instance = self._with_recipes(instance)
        if self.search.on_problem is not None:
            self.search.on_problem(instance)
        return self._run(instance, start, cutoff, self._settings.memory_gap if mixes else OPTIMALITY_TOLERANCE)

    def _with_recipes(self, instance: Problem) -> Problem:
        """Return the problem with the recipes that some solvers follow."""
        if self.search.batch_dims is None:
            return instance
        return replace(instance, name=str(self.configuration), recipes=recipes(self.tables, self.search.batch_dims))

    def _run(
        self,
        instance: Problem,
        start: Choice | None = None,
        cutoff: float = math.inf,
        gap: float = OPTIMALITY_TOLERANCE,
        most: float = PLACEMENT_WORK,
    ) -> Solution:
        found = solve_limited(
            self.search.solver,
            instance,
            self._deadline(),
            start=start,
            cutoff=cutoff,
            gap=gap,
            should_stop=self.search.should_stop,
            seed=self.search.seed,
            most=most,
        )
        self.work += found.work
        self.cut += found.cut
        return found.solution

    def _consider(self, choice: Choice) -> None:
        """Split the chain for a choice and keep the plan if it is the best of the configuration."""
        if choice in self._considered:
            return
        self._considered.add(choice)
        alone: list[float] = []

        def least(configuration: Configuration) -> float:
            if self.hull is None or configuration not in self.bounded:
                return 0.0
            if not alone:
                alone.append(self.hull.alone(choice))
            return alone[0]

        self.best = self._cutting.better(choice, self.best, self.cutoff, least, self._stopped)

    def weighed(self, choice: Choice) -> tuple[ChainBytes, FloatArray]:
        """Return what every range of blocks holds for a choice, and the seconds of blocks, (kinds, slots)."""
        splits = SCHEDULES[self.pipeline.schedule].splits
        totals, passes = self.tables.block_seconds(choice), pass_seconds(self.tables, choice, splits=splits)
        return self.weighing.bytes(choice, splits=splits), self.weighing.copied(choice, totals, passes, splits=splits)

    def _least_bytes(self, *, offload: bool) -> dict[Recompute, float]:
        """Return what the fullest device holds at least, by what all blocks keep."""
        resident = UNHOSTED if offload else RESIDENT
        least = least_bytes(self.tables, self.bounding, resident=resident)
        return {flavour: least[flavour] for flavour in self._flavours}

    def _even(self, choice: Choice, recompute: Recompute, *, offload: bool) -> Split | None:
        """Return the split that would be best without memory limits; None if there is none."""
        totals = self.tables.block_seconds(choice)
        chain = self.tables.folded.chain
        nothing = ChainBytes.nothing(chain, self._flavours)
        found = best_split(totals, nothing, self.pipeline, math.inf, 0.0, self.search.constraints)
        if found is None:
            return None
        ranges = found[0].ranges
        return Split.uniform(ranges, (recompute,) * len(ranges), (offload,) * len(ranges) if offload else ())


def begin_attempt(context: SearchContext, family: Sequence[Configuration], end: float) -> Attempt | None:
    """Return the work on configurations that differ in the schedule only; None if pins exclude them."""
    tables = context.tables(tuple(family))
    return None if tables is None else Attempt(context, family, tables, end)

"""Work on one configuration: its best plan, and a bound on all its plans.

1. Solve the placement problem without memory limits. Its optimum bounds every plan of the configuration from below,
   raised by the parts of the step time that are not linear.
2. If the choice does not fit, put a price on memory, which bounds what fits, and solve the problem under the memory of
   every stage, without and with recompute.
3. Split each choice found on the way into stages exactly (`best_split`); the best plan is kept.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.formulate.cuts import best_split, least_flow
from autopar.formulate.mean import MeanBytes, least_bytes, mean_bytes
from autopar.formulate.memory import RangeBytes
from autopar.formulate.options import local_sizes
from autopar.formulate.recipes import recipes, restrict
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import Decision, FloatArray, Slot, Tables
from autopar.formulate.weights import StageMix, busiest_share, kind_weights, problem, stage_mixes, weights
from autopar.problem import OPTIMALITY_TOLERANCE, Choice, Problem, Recipe, Solution
from autopar.program.lower import lower_blocks
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.search.blocks import assemble_blocks
from autopar.search.outcome import Candidate
from autopar.search.space import Configuration
from autopar.simulate.ranges import range_bytes

if TYPE_CHECKING:  # it knows this module
    from autopar.search.planner import Search

PLACEMENT_SECONDS = 8.0
"""Longest time one placement problem may take; most take a fraction of a second."""

TAIL_STEPS = 7
"""Multipliers of the gradient reduction at the end of a step that are tried per configuration."""

HEAVY_KINDS = 3
"""Kinds of blocks whose own least time is looked for; the others count as free in that bound."""

TRAFFIC_STEPS = 4
FIRST_TRAFFIC = 0.1
"""Multipliers of gradient traffic that are tried per configuration, and the first one."""

HOPED = 0.001
"""Where passes take this share longer than if all that can hide did, they are also solved with nothing hidden."""

PRICE_STEPS = 6
"""Prices of memory that are tried per configuration."""

HURRIED_PRICES = 3
"""Prices of memory that are tried to have a first plan at all."""

CORRECTIONS = 3
"""Times a placement problem under memory limits is solved, each time with room for what the last one did not see."""

MEMORY_GAP = 0.005
"""Placement problems under memory limits need not be solved closer than this: their bounds are not used."""


class Attempt:
    """Work on one configuration.

    Attributes:
        best: The best plan so far; None before the first.
    """

    def __init__(
        self, search: "Search", configuration: Configuration, tables: Tables, pipeline: Pipeline, end: float
    ) -> None:
        self.search, self.configuration, self.tables, self.pipeline, self.end = (
            search,
            configuration,
            tables,
            pipeline,
            end,
        )
        self.best: Candidate | None = None
        self.hidden = 0.0
        self.traffic = 0.0
        folded, constraints = tables.folded, search.constraints
        self.fastest = constraints.fastest(folded.chain, len(folded.kinds))
        self._flavours = constraints.flavours()
        least = least_bytes(tables, pipeline)
        self.least_bytes = {flavour: least[flavour] for flavour in self._flavours}
        self.relaxed_choice: Choice | None = None
        self._considered: set[Choice] = set()
        self._weighed: tuple[Choice, RangeBytes] | None = None

    def relaxed(self, cutoff: float) -> float:
        """Solve without memory limits and return a lower bound on every plan of the configuration."""
        one_stage = self.pipeline.num_stages == 1
        self.hidden = 1.0 if one_stage else 0.0
        if min(self.least_bytes.values()) > self.search.memory_limit:
            return math.inf
        solution = self._solve(hidden=self.hidden, recompute=self.fastest, bounding=True, cutoff=cutoff)
        bound = max(solution.bound, self._launched())
        if solution.choice is None or bound >= cutoff:
            return bound
        self.relaxed_choice = solution.choice
        totals = self.tables.block_seconds(solution.choice)
        self._consider(solution.choice)
        if one_stage:
            totals, bound = self._share_tail(totals, bound, cutoff)
            early = self._solve(hidden=self.hidden, recompute=self.fastest, bounding=True, early=True)
            if early.choice is not None:
                self._consider(early.choice)
        bound = self._share_traffic(totals, bound, cutoff)
        if bound >= cutoff or one_stage:
            return bound
        bound = max(bound, self._undivided(totals))
        share = busiest_share(self.tables, totals, self.pipeline.num_stages)
        if share is None or bound >= cutoff:
            return bound
        other = self._solve(hidden=0.0, recompute=self.fastest, bounding=True, cutoff=cutoff, slowest=share)
        if other.choice is not None:
            self._consider(other.choice)
        return max(bound, other.bound)

    def _launched(self) -> float:
        """Return the bound that sees the host only: it launches the kernels of every block, whatever the choice."""
        counts = np.array([kind.count for kind in self.tables.folded.kinds])
        microbatch = float(counts @ self.tables.host_seconds.sum(axis=1))
        stages = self.pipeline.num_stages
        return microbatch * (self.pipeline.num_microbatches + stages - 1) / stages

    def _undivided(self, totals: FloatArray) -> float:
        """Return the bound that sees that blocks are not divided between stages: each kind at its own least time."""
        counts = np.array([kind.count for kind in self.tables.folded.kinds])
        inline = counts * (totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD])
        least = np.zeros(len(counts))
        for kind in np.argsort(-inline)[:HEAVY_KINDS]:
            weighting = kind_weights(self.tables, int(kind), self.traffic)
            solution = self._run(problem(self.tables, weighting, name=str(self.configuration)))
            host = float(self.tables.host_seconds[kind].sum())
            least[kind] = max(0.0, (1 - self.traffic) * host, solution.bound)
        return least_flow(least, self.tables.folded.chain, self.pipeline)

    def _share_tail(self, totals: FloatArray, bound: float, cutoff: float) -> tuple[FloatArray, float]:
        """Look for the multiplier at which the last backward just hides the gradient reduction, and return the bound.

        The bound is concave in the multiplier with slope r + g - b, so the halves are told apart by its sign. Also
        returns the seconds of the choice at the best multiplier.
        """
        counts = np.array([kind.count for kind in self.tables.folded.kinds])
        low, high = 0.0, 1.0
        best, at = totals, self.hidden
        hidden = at
        for step in range(TAIL_STEPS):
            exposed = totals[:, Slot.REDUCE] + totals[:, Slot.GRADIENT] - totals[:, Slot.BACKWARD]
            if counts @ exposed > 0:
                low = hidden
            else:
                high = hidden
            if low == 1.0 or high == 0.0 or bound >= cutoff or self._stopped():
                break
            hidden = 0.0 if step == 0 else (low + high) / 2  # nearly always all of it hides
            solution = self._solve(hidden=hidden, recompute=self.fastest, bounding=True, cutoff=cutoff)
            if solution.choice is None:
                bound = max(bound, solution.bound)
                break
            self._consider(solution.choice)
            totals = self.tables.block_seconds(solution.choice)
            if solution.bound >= bound:
                bound, best, at = solution.bound, totals, hidden
        self.hidden = at
        return best, bound

    def _share_traffic(self, totals: FloatArray, bound: float, cutoff: float) -> float:
        """Look for the multiplier at which gradient traffic and compute balance, and return the bound."""
        counts = np.array([kind.count for kind in self.tables.folded.kinds])
        low, high = 0.0, 1.0
        best = 0.0
        for _ in range(TRAFFIC_STEPS):
            inline = totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD]
            if counts @ (totals[:, Slot.GRADIENT] - inline) > 0:
                low = self.traffic
            else:
                high = self.traffic
            if high == 0.0 or bound >= cutoff or self._stopped():
                break
            self.traffic = FIRST_TRAFFIC if high == 1.0 and low == 0.0 else (low + high) / 2
            solution = self._solve(hidden=self.hidden, recompute=self.fastest, bounding=True, cutoff=cutoff)
            if solution.bound > bound:
                bound, best = solution.bound, self.traffic
            if solution.choice is None:
                break
            self._consider(solution.choice)
            totals = self.tables.block_seconds(solution.choice)
        self.traffic = best
        return bound

    def improve(self, bound: float, cutoff: float) -> float:
        """Look for better plans than the relaxed choice gives, and return the bound, raised where memory binds."""
        if self.pipeline.num_stages > 1 or self.traffic > 0.0:
            solution = self._solve(hidden=1.0, recompute=self.fastest, bounding=False)
            if solution.choice is not None:
                self._consider(solution.choice)
        if self.pipeline.num_stages == 1 and self._waits():
            solution = self._solve(hidden=0.0, recompute=self.fastest, bounding=False, early=True)
            if solution.choice is not None:
                self._consider(solution.choice)
        unhindered = self.best is not None and set(self.best.split.recompute) == {self._flavours[0]}
        if self.relaxed_choice is None or unhindered:
            return bound
        bound = self._priced(self.relaxed_choice, bound, cutoff)
        for recompute, least in self.least_bytes.items():
            if recompute is Recompute.SELECTIVE and not any(self.tables.selective):
                continue
            near = self.best is not None and self.best.objective <= bound * (1 + MEMORY_GAP)
            if least > self.search.memory_limit or bound >= cutoff or near or self._stopped():
                continue
            split = self._even(self.relaxed_choice, recompute)
            if split is None:
                break
            mixes = stage_mixes(self.tables.folded.chain, self.pipeline, split, len(self.tables.folded.kinds))
            limit = self.search.memory_limit
            for _ in range(CORRECTIONS):
                start = self.best.choice if self.best is not None else None
                solution = self._solve(
                    hidden=1.0,
                    recompute=recompute,
                    bounding=False,
                    mixes=mixes,
                    limit=limit,
                    start=start,
                    cutoff=cutoff,
                )
                if solution.choice is None:
                    break
                self._consider(solution.choice)
                # The problem does not see all bytes, such as those of collectives on the way: leave room for them.
                excess = self._excess(solution.choice, split)
                if excess <= 0:
                    break
                limit -= excess
        return bound

    def _waits(self) -> bool:
        """Whether the relaxed choice counted on hiding communication that is not hidden."""
        if self.relaxed_choice is None:
            return False
        raw, whole = self.tables.kind_totals(self.relaxed_choice), self.tables.block_seconds(self.relaxed_choice)
        hoped = found = 0.0
        for kind in self.tables.folded.kinds:
            hoped += kind.count * float((kind_weights(self.tables, kind.id, 0.0).factors * raw).sum())
            found += kind.count * float(whole[kind.id, Slot.FORWARD] + whole[kind.id, Slot.BACKWARD])
        return found > (1 + HOPED) * hoped

    def _stopped(self) -> bool:
        return self.search.should_stop() or time.monotonic() > self.end

    def _priced(self, choice: Choice, bound: float, cutoff: float) -> float:
        """Put a price on memory, look for the price at which the bound is highest, and return that bound.

        The blocks of the most frequent kind recompute nothing, selectively or in full, in any mixture; time and bytes
        are linear in the mixture, so the bound at a price is the least of the extremes. The other kinds have the time
        of the fastest and the bytes of the smallest.
        """
        alternatives = self._alternatives()
        price = self._first_price(choice, [mean for mean, _ in alternatives])
        low, high = 0.0, math.inf
        for _ in range(PRICE_STEPS):
            if self._stopped() or bound >= cutoff:
                break
            lowest, excess, worst = math.inf, 0.0, 0
            for number, (mean, recompute) in enumerate(alternatives):
                if lowest <= bound:
                    break  # this price raises nothing
                paid = price * mean.limit
                solution = self._solve(
                    hidden=self.hidden, recompute=recompute, bounding=True, cutoff=cutoff + paid, price=(price, mean)
                )
                if solution.choice is not None:
                    self._consider(solution.choice)
                if solution.bound - paid < lowest:
                    lowest, worst = solution.bound - paid, number
                    excess = mean.excess(self.tables, solution.choice) if solution.choice is not None else 1.0
            alternatives.insert(0, alternatives.pop(worst))  # likely to be the lowest again
            bound = max(bound, lowest)
            if excess > 0:
                low = price
                price = price * 4 if high == math.inf else math.sqrt(low * high)
            else:
                high = price
                price = price / 4 if low == 0 else math.sqrt(low * high)
            if high < low * 1.2:
                break
        return bound

    def _alternatives(self) -> list[tuple[MeanBytes, list[Recompute]]]:
        """Return the mean stage and what kinds recompute, for each flavour of the most frequent kind."""
        kinds = self.tables.folded.kinds
        main = max(kinds, key=lambda kind: kind.count).id
        if not SCHEDULES[self.pipeline.schedule].trains:
            keeps = [Recompute.NONE] * len(kinds)
            return [(mean_bytes(self.tables, self.pipeline, self.search.memory_limit, keeps), keeps)]
        alternatives = []
        for flavour in self._flavours:
            if flavour is Recompute.SELECTIVE and not self.tables.selective[main]:
                continue
            keeps = [flavour if kind.id == main else Recompute.FULL for kind in kinds]
            mean = mean_bytes(self.tables, self.pipeline, self.search.memory_limit, keeps)
            alternatives.append((mean, [flavour if kind.id == main else self.fastest[kind.id] for kind in kinds]))
        return alternatives

    def hurry(self) -> None:
        """Look for any plan that fits, at ever higher prices of memory: to have one to return and one to beat."""
        if self.best is not None or self.relaxed_choice is None:
            return
        alternatives = self._alternatives()
        price = self._first_price(self.relaxed_choice, [mean for mean, _ in alternatives])
        for _ in range(HURRIED_PRICES):
            for mean, recompute in alternatives:
                if self._stopped():
                    return
                solution = self._solve(hidden=self.hidden, recompute=recompute, bounding=True, price=(price, mean))
                if solution.choice is not None:
                    self._consider(solution.choice)
            if self.best is not None:
                return
            price *= 8

    def _first_price(self, choice: Choice, means: list[MeanBytes]) -> float:
        """Return the price of a byte at which saving activations costs as much as running the forward again."""
        totals = self.tables.block_seconds(choice)
        counts = np.array([kind.count for kind in self.tables.folded.kinds], dtype=np.float64)
        flow = 1 + (self.pipeline.num_microbatches - 1) / self.pipeline.num_stages
        seconds = float(counts @ totals[:, Slot.FORWARD]) * flow
        kept = means[0].excess(self.tables, choice) + means[0].limit
        less = means[-1].excess(self.tables, choice) + means[-1].limit
        return seconds / max(kept - less, 0.1 * kept, 1.0)

    def follow(self, known: Sequence[Recipe]) -> None:
        """Consider the best completion of each recipe, except of those whose every completion is too large."""
        weighting = weights(self.tables, self.pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False)
        instance = problem(self.tables, weighting, name=str(self.configuration))
        for recipe in known:
            if min(least_bytes(self.tables, self.pipeline, recipe.allowed).values()) > self.search.memory_limit:
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
        slowest: tuple[float, ...] | None = None,
        start: Choice | None = None,
        price: tuple[float, MeanBytes] | None = None,
        early: bool = False,
    ) -> Solution:
        weighting = weights(
            self.tables,
            self.pipeline,
            recompute=recompute,
            hidden=hidden,
            bounding=bounding,
            slowest=slowest,
            traffic=self.traffic if bounding or self.traffic == 0.0 else None,
            early=early,
        )
        instance = problem(self.tables, weighting, mixes, limit, str(self.configuration))
        if price is not None:
            instance = price[1].priced(instance, self.tables, price[0])
        if self.search.batch_dims is not None:
            instance = replace(instance, recipes=recipes(self.tables, self.search.batch_dims))
        if self.search.on_problem is not None and price is None:
            self.search.on_problem(instance)
        return self._run(instance, start, cutoff, MEMORY_GAP if mixes else OPTIMALITY_TOLERANCE)

    def _run(
        self,
        instance: Problem,
        start: Choice | None = None,
        cutoff: float = math.inf,
        gap: float = OPTIMALITY_TOLERANCE,
    ) -> Solution:
        left = max(0.1, min(PLACEMENT_SECONDS, self.end - time.monotonic()))
        return self.search.solver.solve(
            instance,
            time_limit=left,
            start=start,
            cutoff=cutoff,
            gap=gap,
            should_stop=self.search.should_stop,
            seed=self.search.seed,
        )

    def _consider(self, choice: Choice) -> None:
        """Split the chain for a choice and keep the plan if it is the best of the configuration."""
        totals, chain = self.tables.block_seconds(choice), self.tables.folded.chain
        if choice in self._considered or not np.isfinite(totals).all():
            return
        self._considered.add(choice)
        per_block = totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD]
        if self.best is not None and least_flow(per_block, chain, self.pipeline) >= self.best.objective:
            return
        memory = self._bytes(choice)
        found = best_split(
            totals, memory, chain, self.pipeline, self.search.memory_limit, self._hop(choice), self.search.constraints
        )
        if found is not None and (self.best is None or found[1].seconds < self.best.objective):
            self.best = Candidate(self.configuration, self.tables, choice, found[0], found[1])

    def _excess(self, choice: Choice, split: Split) -> float:
        """Return the bytes by which the fullest stage of a split is over the limit."""
        memory = self._bytes(choice)
        stages = enumerate(zip(split.ranges, split.recompute, strict=True))
        peaks = [memory.peak(*blocks, self.pipeline.in_flight(stage), flavour) for stage, (blocks, flavour) in stages]
        return max(peaks) - self.search.memory_limit

    def _bytes(self, choice: Choice) -> RangeBytes:
        """Return what every range of blocks holds as a stage: lowered, as the simulator counts it."""
        if self._weighed is None or self._weighed[0] != choice:
            folded, trains = self.tables.folded, SCHEDULES[self.pipeline.schedule].trains
            lowered = lower_blocks(assemble_blocks(self.tables, choice), folded, self.tables.resharder)
            self._weighed = choice, range_bytes(lowered, folded, trains=trains)
        return self._weighed[1]

    def _even(self, choice: Choice, recompute: Recompute) -> Split | None:
        """Return the split that would be best without memory limits; None if there is none."""
        totals = self.tables.block_seconds(choice)
        chain = self.tables.folded.chain
        nothing, constraints = RangeBytes.nothing(len(chain)), self.search.constraints
        found = best_split(totals, nothing, chain, self.pipeline, math.inf, 0.0, constraints)
        return None if found is None else Split(found[0].ranges, tuple(recompute for _ in found[0].ranges))

    def _hop(self, choice: Choice) -> float:
        """Return the mean seconds of handing one microbatch to the next stage: the largest boundary value counts."""
        if self.pipeline.num_stages == 1:
            return 0.0
        mesh = self.configuration.mesh
        largest = 0.0
        for node, strategy in zip(self.tables.nodes, choice, strict=True):
            if node.decision is Decision.BOUNDARY and node.value is not None and node.placements is not None:
                largest = max(
                    largest,
                    boundary_bytes(self.tables, node.value.name, node.value.shape, int(node.placements[strategy])),
                )
        costs = self.search.costs
        boundaries = range(0, (self.pipeline.num_stages - 1) * mesh.size, mesh.size)
        tiers = Counter(costs.cluster.boundary_tier(start, mesh.size) for start in boundaries)
        return math.fsum(count * costs.send_seconds(largest, tier) for tier, count in tiers.items()) / len(boundaries)


def boundary_bytes(tables: Tables, name: str, shape: tuple[int, ...], placement: int) -> float:
    """Return the bytes one device hands to the next stage for a value at a placement number."""
    elements = float(local_sizes(shape, np.array([placement]), tables.mesh)[0])
    return elements * tables.costs.policy.element_bytes(tables.folded.graph.values[name])

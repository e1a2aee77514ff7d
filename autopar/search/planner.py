"""The search over hybrids: per configuration the best placements, stage boundaries and recompute, with bounds.

1. Configurations are bounded in the order of their floors (`floor.py`), without memory limits, which also finds most
   plans that fit anyway (`attempt.py`).
2. Those whose bound is below the best plan so far are worked on, in the order of their bounds.

The reported bound is the least over all configurations, searched or not.
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost import CostModel
from autopar.discover import Rules
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.fold import Folded
from autopar.formulate.recipes import BatchDims
from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.progress import Progress, ProgressCallback, StopCallback
from autopar.search.attempt import Attempt
from autopar.search.floor import Floor
from autopar.search.history import History
from autopar.search.outcome import Outcome
from autopar.search.space import Configuration, families
from autopar.solvers import Solver

KEEP_WITHIN = 1.05
"""Configurations whose bound is within this factor of the best plan are still solved, for the top k."""

ENOUGH = 1.5
"""As long as fewer plans of different shape than wanted are known, a plan this much slower than the best will do."""


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What a search works on.

    Attributes:
        folded: Returns the folded graph for a number of samples per microbatch.
        rules: Returns the discovered strategies of a folded graph.
        costs: Cost model.
        solver: Solver of placement problems.
        floor: Floor under step times.
        global_batch: Samples per step.
        memory_limit: Bytes per device.
        keep: Number of candidates wanted.
        time_limit: Seconds.
        progress: Told after every configuration.
        should_stop: Polled.
        on_problem: Given every placement problem that is solved, but those with a price on memory.
        seed: Of whatever the solver draws at random.
        before: Seconds that have passed since the job was asked for.
        batch_dims: For solvers that follow recipes: the batch dim of every value.
        constraints: What else plans have to keep to.
    """

    folded: Callable[[int], Folded]
    rules: Callable[[Folded], Rules]
    costs: CostModel
    solver: Solver
    floor: Floor
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

    def run(self, space: list[Configuration]) -> Outcome:
        """Search the space and return the candidates found, best first, and the bound."""
        outcome = Outcome(history=History(self.before))
        end = time.monotonic() + self.time_limit
        fixed, known = self.costs.stack["step_seconds"], families(space)
        least_of = [min(self.floor.seconds(c, self.global_batch) for c in family) + fixed for family in known]
        floors = sorted((least, index) for index, least in enumerate(least_of))
        pending: list[tuple[float, int, Attempt]] = []
        bounds = [math.inf]
        for done, (least, index) in enumerate(floors):
            threshold = self._threshold(outcome)
            if self._stops(outcome, end) or least >= threshold:
                bounds.append(least)  # floors ascend: the rest is at least as slow
                outcome.pruned += 0 if outcome.stopped else sum(len(known[other]) for _, other in floors[done:])
                break
            attempt = self.attempt(known[index], end)
            if attempt is None:
                outcome.pruned += len(known[index])
                continue
            bound = max(least, attempt.relaxed(threshold))
            if not outcome.candidates:
                attempt.hurry()
            outcome.take(attempt.best, self.keep)
            if bound >= threshold:
                bounds.append(bound)
                outcome.pruned += len(known[index])
            else:
                pending.append((bound, index, attempt))
            lowest = min([least, *bounds, *(entry[0] for entry in pending)])
            self._tell(outcome, "bound", done + 1, len(floors), lowest, attempt.configuration)
        bounds += self._advance(outcome, pending, min(bounds), end)
        best = outcome.candidates[0].objective if outcome.candidates else math.inf
        outcome.bound = min(best, min(bounds))
        outcome.history.note(best, outcome.bound)
        return outcome

    def _advance(
        self, outcome: Outcome, pending: list[tuple[float, int, Attempt]], floor: float, end: float
    ) -> list[float]:
        """Work on the configuration with the lowest bound until none is below the best plan; return all bounds.

        Then work on those that may give one of the other plans wanted, a piece each.
        """
        bounds = [floor]
        total, worked = len(pending), set()
        heapq.heapify(pending)
        while pending:
            bound, index, attempt = heapq.heappop(pending)
            best = outcome.candidates[0].objective if outcome.candidates else math.inf
            rival = bound < best * (1 - OPTIMALITY_TOLERANCE)
            if not rival and (index in worked or bound >= self._threshold(outcome)):
                outcome.pruned += len(attempt.family) * (index not in worked)
                bounds.append(bound)
                continue
            if self._stops(outcome, end):
                bounds.append(bound)
                continue
            outcome.solved += len(attempt.family) * (index not in worked)
            worked.add(index)
            bound = attempt.advance(bound, best if rival else self._threshold(outcome))
            outcome.take(attempt.best, self.keep)
            if attempt.exhausted:
                bounds.append(bound)
            else:
                heapq.heappush(pending, (bound, index, attempt))
            lowest = min([*bounds, *(entry[0] for entry in pending)])
            self._tell(outcome, "solve", len(worked), total, lowest, attempt.configuration)
        return bounds

    def attempt(self, family: Sequence[Configuration], end: float) -> Attempt | None:
        """Return the work on configurations that differ in the schedule; None if constraints exclude them."""
        folded = self.folded(self.global_batch // family[0].num_microbatches)
        tables = self.constraints.tables(folded, self.rules(folded), family[0].mesh, self.costs)
        return None if tables is None else Attempt(self, family, tables, end)

    def _stops(self, outcome: Outcome, end: float) -> bool:
        """Whether to stop, and why, noted in the outcome."""
        if self.should_stop():
            outcome.stopped = "interrupted"
        elif time.monotonic() > end:
            outcome.stopped = "time limit"
        return bool(outcome.stopped)

    def _tell(
        self, outcome: Outcome, phase: str, done: int, total: int, lowest: float, configuration: Configuration
    ) -> None:
        best = outcome.candidates[0].objective if outcome.candidates else math.inf
        outcome.history.note(best, lowest)
        self.progress(Progress(phase, done, total, best, min(best, lowest), str(configuration)))

    def _threshold(self, outcome: Outcome) -> float:
        """Return the step time above which a configuration interests nobody."""
        if not outcome.candidates:
            return math.inf
        best = outcome.candidates[0].objective
        different: dict[tuple[int, int], float] = {}
        for candidate in outcome.candidates:
            shape = (candidate.configuration.num_stages, candidate.configuration.num_microbatches)
            different.setdefault(shape, candidate.objective)
        if len(different) < self.keep:
            return ENOUGH * best
        return min(KEEP_WITHIN * best, sorted(different.values())[self.keep - 1])

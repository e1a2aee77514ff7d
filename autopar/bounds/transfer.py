"""Transfer bounds: lower bounds on configurations from work on others, and the ladder of bounds without tables.

```text
k P(mesh, s) >= P(mesh, k s)                                   seconds of a microbatch of s samples
P(dp × outer × inner, s) >= P'(outer × inner, s / dp)          every dp (`submesh_tables.py`)
```

Look here for how thousands of configurations are pruned without placement problems of their own, and in which order
bounds are tried. A microbatch of k s samples takes at most k times as long as one of s samples under the same
placements: launches, latencies, host time and parameter gathers occur once, tiles are filled no worse, and whatever
divides a dim divides k times its length. So a bound P(k s) is valid for every configuration with s samples on the mesh.
Without a pipeline the step time itself transfers.

- *Relaxes*: whatever the other bound relaxes; memory on both sides, for more samples need more of it. Recompute
  (`memory_bound.py`) is added to P, which has none.
- *Valid when*: both graphs have the same ops on equal or proportional dims (`roofline.scales`); importers may simplify
  the graph of few samples. Both schedules hide the all-to-all of experts, or neither does, and stages have the same
  devices. A bound with joint backwards holds for split backwards, which hide less; not the reverse.
- *Cost*: a look-up, then the rungs of the ladder up to a linear program.
- *Source*: monotonicity of the cost model in the number of samples.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from autopar.bounds.memory_bound import MemoryBounds
from autopar.bounds.microbatch import UNKNOWN, MicrobatchBound, WarmStart
from autopar.bounds.roofline import Roofline, scales
from autopar.bounds.submesh_tables import inner_mesh
from autopar.configuration import Configuration, Family, Priced
from autopar.cost import Stack
from autopar.folding.fold import Folded
from autopar.formulate.data_major import is_data_major
from autopar.problem import Choice
from autopar.progress import never
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh

MOST_CHOICES = 12
"""Most choices in a warm start."""

HEADS = 6
"""Number of least bounds that are raised at a time."""

ALL_RUNGS, MEMORY_RUNGS = 5, 2
"""Rungs of the ladder: all of them, and those of memory alone."""


class Transferable(Protocol):
    """What work on one configuration says about others on its mesh."""

    @property
    def microbatch_bound(self) -> MicrobatchBound:
        """Lower bounds on a microbatch without a memory limit."""

    @property
    def split_backward_bound(self) -> MicrobatchBound:
        """Lower bounds on a microbatch with split backwards, if both were computed."""

    @property
    def unlimited(self) -> float:
        """Lower bound on the step seconds of every plan without a memory limit; 0 if unknown."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Good choices of placements, the best one without a memory limit first."""


class TransferBounds:
    """Known bounds of nodes, and the lower bounds that they imply for other nodes.

    Args:
        folded: Returns the folded graph for a number of samples per microbatch.
        roofline: Roofline bounds.
        stack: The software stack.
        global_batch: Samples per step.
        memory_bounds: Memory bounds; None leaves them out.
        is_over: Whether the search is over, so that only a last `raise_least` may run.
        is_late: Whether there is no time for that either.
    """

    def __init__(
        self,
        folded: Callable[[int], Folded],
        roofline: Roofline,
        stack: Stack,
        global_batch: int,
        memory_bounds: MemoryBounds | None = None,
        is_over: Callable[[], bool] = never,
        is_late: Callable[[], bool] = never,
    ) -> None:
        self._is_over, self._is_late = is_over, is_late
        self._folded, self._roofline, self._stack = folded, roofline, stack
        self._batch, self._memory_bounds = global_batch, memory_bounds
        self._microbatch_bounds: dict[tuple[Priced, bool], dict[int, MicrobatchBound]] = {}
        self._steps: dict[Priced, dict[int, float]] = {}
        self._submesh_bounds: dict[tuple[Mesh, bool, bool], dict[int, MicrobatchBound]] = {}
        self._choices: dict[tuple[Priced, int], dict[bool, tuple[Choice, ...]]] = {}
        self._scales_of: dict[tuple[int, int], bool] = {}
        self._threads = ThreadPoolExecutor(2)

    def close(self) -> None:
        """Shut the threads down."""
        self._threads.shutdown()

    def record_finding(self, family: Family, finding: Transferable) -> None:
        """Record the result of work on a family of configurations, which differ in the schedule only."""
        first = family[0]
        samples = self._samples(first)
        if finding.choices:
            self._choices.setdefault((first.priced, samples), {})[SCHEDULES[first.schedule].splits] = finding.choices
        if first.num_stages == 1:
            steps = self._steps.setdefault(first.priced, {})
            steps[samples] = max(steps.get(samples, 0.0), finding.unlimited)
        elif finding.microbatch_bound != UNKNOWN:
            # bounds on single blocks are always with joint backwards
            by_split = {False: finding.microbatch_bound}
            if SCHEDULES[first.schedule].splits:
                by_split = {False: replace(finding.microbatch_bound, seconds=0.0), True: finding.microbatch_bound}
            for splits, microbatch_bound in by_split.items():
                microbatch_bounds = self._microbatch_bounds.setdefault((first.priced, splits), {})
                microbatch_bounds[samples] = microbatch_bound.combined(microbatch_bounds.get(samples, UNKNOWN))

    def record_submesh(self, mesh: Mesh, samples: int, finding: Transferable, *, hides: bool) -> None:
        """Record bounds of microbatches on the free axes of a mesh.

        Args:
            mesh: The free axes.
            samples: Samples per part of dp.
            finding: The bounds.
            hides: Whether they are of schedules that hide the all-to-all of experts.
        """
        for splits, microbatch_bound in ((False, finding.microbatch_bound), (True, finding.split_backward_bound)):
            self._submesh_bounds.setdefault((mesh, hides, splits), {})[samples] = microbatch_bound

    def warm_start(self, family: Family) -> WarmStart:
        """Return what is known of the microbatches of a family."""
        first = family[0]
        samples, splits = self._samples(first), SCHEDULES[first.schedule].splits
        microbatch_bound = self._microbatch_bounds.get((first.priced, splits), {}).get(samples, UNKNOWN)
        joint = self._microbatch_bounds.get((first.priced, False), {}).get(samples, UNKNOWN)
        choices = self._choices.get((first.priced, samples), {})
        distinct = dict.fromkeys((*choices.get(splits, ()), *choices.get(not splits, ())))
        return WarmStart(MicrobatchBound(microbatch_bound.seconds, joint.blocks), tuple(distinct)[:MOST_CHOICES])

    def least(self, family: Family, cutoff: float = 0.0) -> float:
        """Lower bound on the step seconds of every plan of a family, by all rungs of the ladder.

        Rungs that take a linear program are skipped once the bound reaches the cutoff. Once it is late, the bound is 0.

        Args:
            family: Configurations that differ in the schedule only.
            cutoff: A bound that is enough to prune them.
        """
        return 0.0 if self._is_late() else self._ladder_bound(family, *self._transferred(family[0]), ALL_RUNGS, cutoff)

    def raise_least(
        self,
        waiting: list[tuple[float, int]],
        space: Sequence[Family],
        cutoff: float,
        has_own_bound: Callable[[int], bool],
        most: int = ALL_RUNGS,
        *,
        ends: bool = False,
    ) -> None:
        """Raise the least bound of a heap until no rung raises it.

        Bounds that a cheap rung raises go back into the heap; dearer rungs wait until they are the least again. The
        `HEADS` least bounds are raised at a time, by two threads, for workers wait for the result. Families with as
        many stages and microbatches, which share most linear programs, go to the same thread.

        Args:
            waiting: The heap: bounds in seconds, and numbers of families.
            space: The families.
            cutoff: A bound that is enough to prune a family.
            has_own_bound: Whether a family's bound comes from work on itself, which no rung can raise.
            most: Number of rungs: `MEMORY_RUNGS`, or `ALL_RUNGS`.
            ends: Whether this is the last call, for which time is reserved after the search is over.
        """
        is_over = self._is_late if ends else self._is_over
        while waiting and not has_own_bound(waiting[0][1]) and waiting[0][0] < cutoff:
            bound, number = waiting[0]
            if (transferred := self.transferred_bound(space[number])) > bound:
                heapq.heapreplace(waiting, (transferred, number))
                continue
            if is_over():  # folding graphs of other microbatch sizes may take seconds
                return
            heads = [head for head in heapq.nsmallest(HEADS, waiting) if not has_own_bound(head[1])]
            raised = self._raised_bounds(heads, space, cutoff, most, is_over)
            for head in heads:
                waiting[waiting.index(head)] = raised[head[1]], head[1]
            heapq.heapify(waiting)
            if waiting[0] == (bound, number):
                return

    def _raised_bounds(
        self,
        heads: Sequence[tuple[float, int]],
        space: Sequence[Family],
        cutoff: float,
        most: int,
        is_over: Callable[[], bool],
    ) -> dict[int, float]:
        """Return raised bounds of some families by number; arguments as of `raise_least`."""
        transferred = {number: self._transferred(space[number][0]) for _, number in heads}
        batches: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for head in heads:
            first = space[head[1]][0]
            self._folded(self._samples(first))  # two threads must not fold one graph
            batches.setdefault((first.num_stages, first.num_microbatches), []).append(head)

        def raised_of(batch: Sequence[tuple[float, int]]) -> list[tuple[int, float]]:
            return [
                (number, self._raised_bound(space[number], bound, transferred[number], cutoff, most, is_over))
                for bound, number in batch
            ]

        return dict(raised for batch in self._threads.map(raised_of, batches.values()) for raised in batch)

    def _raised_bound(
        self,
        family: Family,
        bound: float,
        transferred: tuple[float, MicrobatchBound],
        cutoff: float,
        most: int,
        is_over: Callable[[], bool],
    ) -> float:
        """Return a bound raised by the first rung, or else by all."""
        if bound < cutoff and not is_over():
            for rungs in (1, most):
                if (raised := self._ladder_bound(family, *transferred, rungs, cutoff, is_over)) > bound:
                    return raised
        return bound

    def transferred_bound(self, family: Family) -> float:
        """Lower bound as `least`, without any rung beyond transferred microbatch bounds."""
        return self._ladder_bound(family, *self._transferred(family[0]), rungs=0)

    def _ladder_bound(
        self,
        family: Family,
        transferred: float,
        microbatch_bound: MicrobatchBound,
        rungs: int,
        cutoff: float = 0.0,
        is_over: Callable[[], bool] = never,
    ) -> float:
        """Least bound over the configurations of a family, raised rung by rung.

        The configuration with the least bound climbs one rung at a time, so that dear rungs are tried only where no
        other configuration has a lesser bound.

        Args:
            family: The configurations.
            transferred: Lower bound on the step seconds from other configurations.
            microbatch_bound: Lower bounds on a microbatch from other configurations.
            rungs: Number of rungs beyond microbatch bounds: distribution under memory, recompute, cuts, precedences
                under memory, paths.
            cutoff: A bound that is enough to prune the family; 0 if there is none.
            is_over: Whether there is no time left for further rungs.
        """
        ladder = (
            self._memory_step,
            self._recompute_step,
            self._cuts_step,
            self._scheduled_memory_step,
            self._path_step,
        )
        last_rung = min(rungs, len(ladder) if family[0].num_stages > 1 else 2)
        # Ties go to the last configuration: with very many stages no rung raises its bound, nor then the family's.
        waiting = [
            (self._microbatch_step(configuration, microbatch_bound), 0, -number)
            for number, configuration in enumerate(family)
        ]
        heapq.heapify(waiting)
        while True:
            bound, rung, number = waiting[0]
            if rung == last_rung or 0 < cutoff <= bound or is_over():
                return max(transferred, bound)
            configuration = family[-number]
            if rung + 1 == ALL_RUNGS and max(bound, self._even_step(configuration, microbatch_bound)) < cutoff:
                return max(transferred, bound)  # the path bound never exceeds the step of equal stages
            heapq.heapreplace(waiting, (max(bound, ladder[rung](configuration, microbatch_bound)), rung + 1, number))

    def _transferred(self, first: Configuration) -> tuple[float, MicrobatchBound]:
        """Bounds from other configurations: on the step under any schedule, and on a microbatch."""
        samples, microbatch_bound = self._samples(first), self._from_submesh(first)
        if first.num_stages == 1:
            steps = self._steps.get(first.priced, {})
            return max((steps[many] for many in self._transferable(steps, samples)), default=0.0), microbatch_bound
        for splits in (False, True) if SCHEDULES[first.schedule].splits else (False,):
            microbatch_bounds = self._microbatch_bounds.get((first.priced, splits), {})
            for many in self._transferable(microbatch_bounds, samples):
                microbatch_bound = microbatch_bound.combined(microbatch_bounds[many].scaled(samples / many))
        return 0.0, microbatch_bound

    def _with_recompute(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> MicrobatchBound:
        """Add the least recompute to a microbatch bound, or to the roofline seconds if these are tighter."""
        recompute = 0.0 if self._memory_bounds is None else self._memory_bounds.recompute_seconds(configuration)
        if not recompute:
            return microbatch_bound
        least = self._roofline.microbatch_seconds(configuration.mesh, self._samples(configuration))
        return MicrobatchBound(max(microbatch_bound.seconds, least) + recompute, microbatch_bound.blocks)

    def _from_submesh(self, first: Configuration) -> MicrobatchBound:
        """Bounds on a microbatch of a mesh of three axes from its free axes alone."""
        microbatch_bound = UNKNOWN
        if not is_data_major(first.mesh):
            return microbatch_bound
        mesh, samples, dp = inner_mesh(first.mesh), self._samples(first), first.mesh.shape[0]
        if samples % dp:
            return microbatch_bound  # a pinned mesh may have more devices along dp than samples
        for splits in (False, True) if SCHEDULES[first.schedule].splits else (False,):
            known = self._submesh_bounds.get((mesh, first.hides_dispatch, splits), {})
            for many in self._transferable(known, samples // dp):
                if self._scales(many, many * dp):
                    microbatch_bound = microbatch_bound.combined(known[many].scaled(samples // dp / many))
        return microbatch_bound

    def _microbatch_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Bound on the step from a microbatch bound, under any schedule."""
        return (
            0.0 if microbatch_bound == UNKNOWN else microbatch_bound.step_seconds(configuration.pipeline(self._stack))
        )

    def _memory_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """First rung: blocks distributed over groups so that they fit."""
        return (
            0.0 if self._memory_bounds is None else self._memory_bounds.step_that_fits(configuration, microbatch_bound)
        )

    def _recompute_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Second rung: the microbatch bound with the least recompute."""
        return self._microbatch_step(configuration, self._with_recompute(configuration, microbatch_bound))

    def _cuts_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Third rung: all cuts of a short chain."""
        if self._folded(self._samples(configuration)).chain != self._roofline.chain:
            return 0.0  # few samples may be imported as other blocks
        return self._roofline.cut_seconds(
            configuration, self._batch, configuration.pipeline(self._stack), microbatch_bound.blocks
        )

    def _scheduled_memory_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Fourth rung: blocks distributed so that they fit, with precedences."""
        return (
            0.0
            if self._memory_bounds is None
            else self._memory_bounds.scheduled_step_that_fits(configuration, microbatch_bound)
        )

    def _even_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Upper estimate of the fifth rung: the step with equal stages."""
        seconds = self._with_recompute(configuration, microbatch_bound).seconds
        if math.isinf(seconds):
            return seconds
        return self._roofline.even_seconds(configuration, self._batch, configuration.pipeline(self._stack), seconds)

    def _path_step(self, configuration: Configuration, microbatch_bound: MicrobatchBound) -> float:
        """Fifth rung: the critical path, with the least recompute."""
        seconds = self._with_recompute(configuration, microbatch_bound).seconds
        if math.isinf(seconds):
            return seconds
        return self._roofline.path_seconds(configuration, self._batch, configuration.pipeline(self._stack), seconds)

    def _samples(self, configuration: Configuration) -> int:
        return self._batch // configuration.num_microbatches

    def _transferable(self, known: dict[int, MicrobatchBound] | dict[int, float], samples: int) -> Iterator[int]:
        """Yield known numbers of samples whose bounds transfer to microbatches of `samples`."""
        yield from (many for many in known if many == samples or (many % samples == 0 and self._scales(samples, many)))

    def _scales(self, few: int, many: int) -> bool:
        """Whether the graphs of two numbers of samples differ in the samples only."""
        usual = self._roofline.is_generic(few) and self._roofline.is_generic(many)
        sizes = self._roofline.samples if usual else (few, many)
        if sizes not in self._scales_of:
            small, large = (self._folded(samples) for samples in sizes)
            self._scales_of[sizes] = scales(small, large, sizes)
        return self._scales_of[sizes]

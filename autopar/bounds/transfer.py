"""Bounds of configurations from what is known of others on the same mesh, without a problem of their own.

A microbatch of k s samples takes at most k times as long as one of s under the same placements: a kernel or a message
has its launch or latency once, the host and gathers of parameters do not see the samples, tiles and waves are filled no
worse, and whatever divides a dim divides k times its length. So what one microbatch of s samples takes at least through
all blocks, or through one, P(s), obeys k P(s) >= P(k s), and P(k s) bounds every configuration with s samples on the
mesh: it runs such microbatches, and more often. Without pipeline the step time itself is bounded so.

P is that of joint backwards, which hide more than those of schedules that split them; what is known of the latter holds
for the latter only. Memory is left out on both sides: more samples take more of it. What blocks have to run again to
fit (`memory_bound.py`) is on top of P, which is without recompute.

On a mesh of three axes whose major one is data parallel a microbatch takes at least what one dp-th of it takes on the
two others alone (`autopar.bounds.submesh_tables`), so that the least
seconds P'(s / dp) of these axes are at most P(s) for every dp.

None of this holds where the graph of s samples has fewer ops or other dims than that of k s, as it may if an importer
simplifies what one sample needs not, or as many as another dim has. So two graphs of usual sizes are compared once, and
those of other sizes with them (`roofline.scales`).
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from autopar.bounds.memory_bound import Room
from autopar.bounds.microbatch import UNKNOWN, Hint, Pace
from autopar.bounds.roofline import Floor, scales
from autopar.bounds.submesh_tables import minor_mesh
from autopar.configuration import Configuration, Family
from autopar.cost import Stack
from autopar.folding.fold import Folded
from autopar.formulate.data_major import is_data_major
from autopar.problem import Choice
from autopar.progress import never
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh

MOST_CHOICES = 12
"""Placements that are told of at most."""

HEADS = 6
"""Of how many of the least bounds it is looked for at a time what raises them."""

ALL, ROOM = 5, 2
"""How often more is looked for of what follows for a configuration, and how often where only memory is looked at."""


class Learned(Protocol):
    """What work on one configuration says of others on its mesh."""

    @property
    def pace(self) -> Pace:
        """Least seconds of a microbatch, whatever memory it takes."""

    @property
    def split_pace(self) -> Pace:
        """Least seconds of a microbatch with split backwards, if both were looked for."""

    @property
    def unlimited(self) -> float:
        """Lower bound on the step seconds of every plan without a memory limit; 0 if unknown."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Placements that are good at some prices, the best one without limits first."""


class Carried:
    """What is known of configurations, and what follows for others.

    Args:
        folded: Returns the folded graph for a number of samples per microbatch.
        floor: Knows which numbers of samples are usual.
        stack: The software.
        global_batch: Samples per step.
        room: Knows what has to run again to fit; None where that is left out.
        is_over: Whether there is no time left but for a last look at what follows.
        is_late: Whether there is none for that either.
    """

    def __init__(
        self,
        folded: Callable[[int], Folded],
        floor: Floor,
        stack: Stack,
        global_batch: int,
        room: Room | None = None,
        is_over: Callable[[], bool] = never,
        is_late: Callable[[], bool] = never,
    ) -> None:
        self._is_over, self._is_late = is_over, is_late
        self._folded, self._floor, self._stack, self._batch, self._room = folded, floor, stack, global_batch, room
        self._paces: dict[tuple[Mesh, bool], dict[int, Pace]] = {}
        self._steps: dict[Mesh, dict[int, float]] = {}
        self._minor: dict[tuple[Mesh, bool], dict[int, Pace]] = {}
        self._choices: dict[tuple[Mesh, int], dict[bool, tuple[Choice, ...]]] = {}
        self._compared: dict[tuple[int, int], bool] = {}
        self._threads = ThreadPoolExecutor(2)

    def close(self) -> None:
        """Shut the threads down."""
        self._threads.shutdown()

    def learn(self, family: Family, finding: Learned) -> None:
        """Take what was found of configurations that differ in the schedule only."""
        first = family[0]
        samples = self._samples(first)
        if finding.choices:
            self._choices.setdefault((first.mesh, samples), {})[SCHEDULES[first.schedule].splits] = finding.choices
        if first.num_stages == 1:
            steps = self._steps.setdefault(first.mesh, {})
            steps[samples] = max(steps.get(samples, 0.0), finding.unlimited)
        elif finding.pace != UNKNOWN:
            # that of single blocks is always that of joint backwards
            parts = {False: finding.pace}
            if SCHEDULES[first.schedule].splits:
                parts = {False: replace(finding.pace, seconds=0.0), True: finding.pace}
            for splits, pace in parts.items():
                paces = self._paces.setdefault((first.mesh, splits), {})
                paces[samples] = pace.joined(paces.get(samples, UNKNOWN))

    def learn_minor(self, mesh: Mesh, samples: int, finding: Learned) -> None:
        """Take what was found of microbatches on the free axes of meshes of three, with samples of one part of dp."""
        for splits, pace in ((False, finding.pace), (True, finding.split_pace)):
            self._minor.setdefault((mesh, splits), {})[samples] = pace

    def hint(self, family: Family) -> Hint:
        """Return what is known of the same microbatches of configurations that differ in the schedule only."""
        first = family[0]
        samples, splits = self._samples(first), SCHEDULES[first.schedule].splits
        pace = self._paces.get((first.mesh, splits), {}).get(samples, UNKNOWN)
        joint = self._paces.get((first.mesh, False), {}).get(samples, UNKNOWN)
        choices = self._choices.get((first.mesh, samples), {})
        ordered = dict.fromkeys((*choices.get(splits, ()), *choices.get(not splits, ())))
        return Hint(Pace(pace.seconds, joint.blocks), tuple(ordered)[:MOST_CHOICES])

    def least(self, family: Family, cutoff: float = 0.0) -> float:
        """Return a lower bound on the step seconds of every plan of configurations that differ in the schedule only.

        It knows what others say, and what the longest path through a step takes at least: where that is not enough to
        exclude them, it may be left out, for it takes a linear program. Of thousands of configurations all this takes
        long, so that nothing follows any more once it is late.

        Args:
            family: The configurations.
            cutoff: A bound that is enough to exclude them.
        """
        return 0.0 if self._is_late() else self._following(family, *self._known(family[0]), ALL, cutoff)

    def raise_least(
        self,
        waiting: list[tuple[float, int]],
        space: Sequence[Family],
        cutoff: float,
        is_told: Callable[[int], bool],
        most: int = ALL,
        *,
        ends: bool = False,
    ) -> None:
        """Raise the least bound of a heap by what follows from others, until nothing raises it.

        Where little work raises a bound, no more is done: that is for when it is the least one again. Linear programs
        are solved for several of the least at a time, by two threads: workers wait for them. Those of as many stages
        and microbatches, which have most programs in common, are for the same thread.

        Args:
            waiting: The heap: bounds in seconds, and numbers of families.
            space: The families.
            cutoff: A bound that is enough to exclude one.
            is_told: Whether a bound tells more than what follows from others.
            most: How much is looked for: `ROOM`, or all.
            ends: Whether this is the last look, for which there is time when the search is over.
        """
        is_over = self._is_late if ends else self._is_over
        while waiting and not is_told(waiting[0][1]) and waiting[0][0] < cutoff:
            bound, number = waiting[0]
            if (follows := self.rough(space[number])) > bound:
                heapq.heapreplace(waiting, (follows, number))
                continue
            if is_over():  # nothing would be looked at, and graphs of other microbatches may take seconds
                return
            heads = [head for head in heapq.nsmallest(HEADS, waiting) if not is_told(head[1])]
            raised = self._raised(heads, space, cutoff, most, is_over)
            for head in heads:
                waiting[waiting.index(head)] = raised[head[1]], head[1]
            heapq.heapify(waiting)
            if waiting[0] == (bound, number):
                return

    def _raised(
        self,
        heads: Sequence[tuple[float, int]],
        space: Sequence[Family],
        cutoff: float,
        most: int,
        is_over: Callable[[], bool],
    ) -> dict[int, float]:
        """Return the bounds of some families by number, raised by what follows; arguments as of `raise_least`."""
        known = {number: self._known(space[number][0]) for _, number in heads}
        parts: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for head in heads:
            first = space[head[1]][0]
            self._folded(self._samples(first))  # which no two threads may look for
            parts.setdefault((first.num_stages, first.num_microbatches), []).append(head)

        def looked_at(part: Sequence[tuple[float, int]]) -> list[tuple[int, float]]:
            return [
                (number, self._looked_at(space[number], bound, known[number], cutoff, most, is_over))
                for bound, number in part
            ]

        return dict(raised for part in self._threads.map(looked_at, parts.values()) for raised in part)

    def _looked_at(
        self,
        family: Family,
        bound: float,
        known: tuple[float, Pace],
        cutoff: float,
        most: int,
        is_over: Callable[[], bool],
    ) -> float:
        """Return a bound raised by room, or else by all that follows from a pace."""
        if bound < cutoff and not is_over():
            for upto in (1, most):
                if (follows := self._following(family, *known, upto, cutoff, is_over)) > bound:
                    return follows
        return bound

    def rough(self, family: Family) -> float:
        """Return what `least` is at least: without what has to run again, and the longest path."""
        return self._following(family, *self._known(family[0]), upto=0)

    def _following(
        self,
        family: Family,
        known: float,
        pace: Pace,
        upto: int,
        cutoff: float = 0.0,
        is_over: Callable[[], bool] = never,
    ) -> float:
        """Return the least of what follows for each configuration.

        What follows for one takes more and more work, so that it is only looked for where nothing less is known.

        Args:
            family: The configurations.
            known: What others say of the seconds of the step.
            pace: What they say of a microbatch.
            upto: How much is looked for: nothing but paces, room, what runs again, cuts, order, or the longest path.
            cutoff: A bound that is enough to exclude them; 0 if none is.
            is_over: Whether there is no time left to look for more.
        """
        raises = (self._crowded, self._again, self._cut, self._ordered, self._path)
        last = min(upto, len(raises) if family[0].num_stages > 1 else 2)
        # Of equal bounds the last one is first: of many stages there is nothing to find out, and no other helps then.
        waiting = [(self._step(own, pace), 0, -number) for number, own in enumerate(family)]
        heapq.heapify(waiting)
        while True:
            bound, level, number = waiting[0]
            if level == last or 0 < cutoff <= bound or is_over():
                return max(known, bound)
            own = family[-number]
            if level + 1 == ALL and max(bound, self._even(own, pace)) < cutoff:
                return max(known, bound)  # a path is no longer than that of equal stages
            heapq.heapreplace(waiting, (max(bound, raises[level](own, pace)), level + 1, number))

    def _known(self, first: Configuration) -> tuple[float, Pace]:
        """Return what others say of the seconds of the step, whatever the schedule, and of a microbatch."""
        samples, pace = self._samples(first), self._alone(first)
        if first.num_stages == 1:
            steps = self._steps.get(first.mesh, {})
            return max((steps[more] for more in self._more(steps, samples)), default=0.0), pace
        for splits in (False, True) if SCHEDULES[first.schedule].splits else (False,):
            paces = self._paces.get((first.mesh, splits), {})
            for more in self._more(paces, samples):
                pace = pace.joined(paces[more].scaled(samples / more))
        return 0.0, pace

    def _with_again(self, configuration: Configuration, pace: Pace) -> Pace:
        """Return a pace with what has to run again, which is on top of what is known, be it the floor alone."""
        again = 0.0 if self._room is None else self._room.again(configuration)
        if not again:
            return pace
        floor = self._floor.microbatch(configuration.mesh, self._samples(configuration))
        return Pace(max(pace.seconds, floor) + again, pace.blocks)

    def _alone(self, first: Configuration) -> Pace:
        """Return what follows for the microbatches of a mesh of three axes from its free axes alone."""
        pace = UNKNOWN
        if not is_data_major(first.mesh):
            return pace
        mesh, samples, degree = minor_mesh(first.mesh), self._samples(first), first.mesh.shape[0]
        if samples % degree:
            return pace  # a pinned mesh may have more devices there than samples
        for splits in (False, True) if SCHEDULES[first.schedule].splits else (False,):
            known = self._minor.get((mesh, splits), {})
            for more in self._more(known, samples // degree):
                if self._scales(more, more * degree):
                    pace = pace.joined(known[more].scaled(samples // degree / more))
        return pace

    def _step(self, configuration: Configuration, pace: Pace) -> float:
        """Return what follows from a pace for the step, whatever its order."""
        return 0.0 if pace == UNKNOWN else pace.step(configuration.pipeline(self._stack))

    def _crowded(self, configuration: Configuration, pace: Pace) -> float:
        return 0.0 if self._room is None else self._room.crowded(configuration, pace)

    def _again(self, configuration: Configuration, pace: Pace) -> float:
        return self._step(configuration, self._with_again(configuration, pace))

    def _cut(self, configuration: Configuration, pace: Pace) -> float:
        if self._folded(self._samples(configuration)).chain != self._floor.chain:
            return 0.0  # few samples may be imported as other blocks
        return self._floor.cut_seconds(configuration, self._batch, configuration.pipeline(self._stack), pace.blocks)

    def _ordered(self, configuration: Configuration, pace: Pace) -> float:
        return 0.0 if self._room is None else self._room.ordered(configuration, pace)

    def _even(self, configuration: Configuration, pace: Pace) -> float:
        seconds = self._with_again(configuration, pace).seconds
        if math.isinf(seconds):
            return seconds
        return self._floor.even_seconds(configuration, self._batch, configuration.pipeline(self._stack), seconds)

    def _path(self, configuration: Configuration, pace: Pace) -> float:
        seconds = self._with_again(configuration, pace).seconds
        if math.isinf(seconds):
            return seconds
        return self._floor.path_seconds(configuration, self._batch, configuration.pipeline(self._stack), seconds)

    def _samples(self, configuration: Configuration) -> int:
        return self._batch // configuration.num_microbatches

    def _more(self, known: dict[int, Pace] | dict[int, float], samples: int) -> Iterator[int]:
        """Yield the known numbers of samples from which something follows for microbatches of so many."""
        yield from (more for more in known if more == samples or (more % samples == 0 and self._scales(samples, more)))

    def _scales(self, few: int, many: int) -> bool:
        """Whether the graphs of two numbers of samples differ in these only."""
        usual = self._floor.is_usual(few) and self._floor.is_usual(many)
        sizes = self._floor.samples if usual else (few, many)
        if sizes not in self._compared:
            small, large = (self._folded(samples) for samples in sizes)
            self._compared[sizes] = scales(small, large, sizes)
        return self._compared[sizes]

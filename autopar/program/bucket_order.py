"""In which order the gradients of a stage go out, bucket by bucket: one order for simulators and executors.

`BucketQueue` decides when a bucket is complete. The simulator feeds it with timed traffic; `issue_order` feeds it with
the instructions of a program, so that executors start the collectives that were simulated, in the simulated order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.overlap import full_bucket
from autopar.fusion_plan import MICROBATCH, STEP, BucketCuts
from autopar.program.records import (
    Collective,
    Instruction,
    Segment,
    SegmentPhase,
    StageProgram,
    Table,
    defines,
    reads,
)
from autopar.sharding import Axis

Key = tuple[str, str, str, int]
"""Collective, mesh axis, "step" or "microbatch", and how many collectives came before, as of `BucketCuts.key`."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A gradient of a queue: its bucket's key, the mesh axis, and the gradients that it is made from."""

    key: Key
    axis: Axis
    needed: tuple[int, ...]


class BucketQueue:
    """Gradients of one backward in the order in which it makes them, and the buckets in which they leave.

    Gradients are numbered as they are added. A bucket ends where a plan cuts it, or as soon as it is full. It leaves
    when it is complete, and no sooner than the buckets of the gradients that its own are made from.

    Args:
        limit: Bytes from which on a bucket is full, as of `full_bucket`.
        cuts: Where gradients are cut into buckets; those not named follow the limit.
    """

    def __init__(self, limit: float | None, cuts: Iterable[BucketCuts] = ()) -> None:
        self._limit = limit
        self._cuts: Mapping[Key, BucketCuts] = {own.key: own for own in cuts}
        self._gradients: list[_Waiting] = []
        self._has_left: list[bool] = []
        self._counts: dict[Key, int] = {}  # gradients so far
        self._open: dict[Key, list[int]] = {}  # numbers of the gradients of a bucket
        self._bytes: dict[Key, float] = {}  # its bytes
        self._complete: list[list[int]] = []  # buckets that others have to leave before
        self._over = False

    def key(self, number: int) -> Key:
        """Return what a gradient has in common with those it may share a bucket with."""
        return self._gradients[number].key

    def add(
        self,
        collective: CollectiveKind,
        axis: Axis,
        nbytes: float,
        *,
        once: bool,
        after: int = -1,
        besides: Iterable[int] = (),
    ) -> list[list[int]]:
        """Add a gradient, and return the numbers of the gradients of each bucket that leaves with it.

        Args:
            collective: What is done with it.
            axis: Over which devices.
            nbytes: Bytes that the collective deals with on one device.
            once: Whether it is part of the reduction of a step, not of a microbatch.
            after: Number of the last gradient that it is made from in its segment; -1 if there is none.
            besides: Numbers of others that have to leave before, which say nothing about its key.
        """
        hops = self.key(after)[3] + 1 if after >= 0 else 0
        key = (str(collective), axis.name, STEP if once else MICROBATCH, hops)
        number = len(self._gradients)
        self._gradients.append(_Waiting(key, axis, (*besides, *((after,) if after >= 0 else ()))))
        self._has_left.append(False)
        self._open.setdefault(key, []).append(number)
        full = self._bytes[key] = self._bytes.get(key, 0.0) + nbytes
        count = self._counts[key] = self._counts.get(key, 0) + 1
        cuts = self._cuts.get(key)
        is_complete = full >= full_bucket(axis, self._limit) if cuts is None else count in cuts.ends
        return self._close(key) if is_complete else []

    def flush(self) -> list[list[int]]:
        """End all buckets, and return the numbers of the gradients of each of them in the order in which they leave."""
        self._over = True
        return [numbers for key in list(self._open) if key in self._open for numbers in self._close(key)]

    def _close(self, key: Key) -> list[list[int]]:
        """End a bucket, with those it needs where no plan cuts these; return the buckets that leave now."""
        numbers, left = self._open.pop(key), list[list[int]]()
        del self._bytes[key]
        for needed in self._needed(numbers):
            known = self.key(needed)
            if not self._has_left[needed] and known in self._open and (self._over or known not in self._cuts):
                left += self._close(known)
        self._complete.append(numbers)
        while ready := [each for each in self._complete if all(self._has_left[own] for own in self._needed(each))]:
            for each in ready:
                self._complete.remove(each)
                for number in each:
                    self._has_left[number] = True
            left += ready
        return left

    def _needed(self, numbers: Iterable[int]) -> list[int]:
        return [needed for number in numbers for needed in self._gradients[number].needed]


@dataclass(frozen=True, slots=True)
class Member:
    """A gradient as instructions know it: its block, counted within the stage, and what its collective defines."""

    block: int
    phase: SegmentPhase
    result: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that leave together.

    Attributes:
        name: As in a simulated timeline.
        key: What they have in common.
        members: The gradients in order.
    """

    name: str
    key: Key
    members: tuple[Member, ...]


def travels(instruction: Instruction, phase: SegmentPhase) -> bool:
    """Whether an instruction is gradient traffic, which runs beside compute."""
    return isinstance(instruction, Collective) and (instruction.overlaps or phase is SegmentPhase.REDUCE)


def departing(instructions: Sequence[Instruction], phase: SegmentPhase, wanted: Collection[str]) -> frozenset[int]:
    """Return the gradient traffic of a segment, by position, that can leave in buckets of several blocks.

    Args:
        instructions: In an order that defines before it reads.
        phase: Of the segment.
        wanted: Values that have to be there when the block is done: what these are made from travels alone, at once.
    """
    asked, found = set(wanted), set[int]()
    for index in reversed(range(len(instructions))):
        instruction = instructions[index]
        if any(operand.value in asked for operand in defines(instruction)):
            asked.update(operand.value for operand in reads(instruction))
        elif travels(instruction, phase):
            found.add(index)
    return frozenset(found)


def wanted_of(segment: Segment) -> set[str]:
    """Return the values of a backward that others read as soon as it is over."""
    return {operand.value for operand in (*segment.saved, *segment.outputs, *segment.exports)}


def issue_order(stage: StageProgram, table: Table, *, splits: bool, last: bool) -> tuple[Bucket, ...]:
    """Return the buckets of a backward of a stage in the order in which they leave.

    It is the order of the simulator, with one more rule: the reductions of a block at the end of a step wait for the
    buckets with its gradients of the last microbatch. Gradients that travel alone (`departing`) are left out.

    Args:
        stage: The stage.
        table: The segments of the program.
        splits: Whether the schedule splits the backward, so that gradients are made in a pass of their own.
        last: Whether it is the last backward of a step, which the reductions of the step follow.
    """
    queue = BucketQueue(None, stage.buckets)
    gradients: list[tuple[Member, str, bool]] = []  # which, its name alone, and whether it leaves in a bucket
    found: list[list[int]] = []
    maker = SegmentPhase.WEIGHT if splits else SegmentPhase.BACKWARD
    for block in reversed(range(len(stage.blocks))):
        earlier: frozenset[int] = frozenset()  # traffic of the microbatch
        for phase in (maker, SegmentPhase.REDUCE) if last else (maker,):
            segment = table.get((stage.blocks[block], phase))
            if segment is None:
                continue
            behind: dict[str, frozenset[int]] = {}  # value -> traffic that it is made from
            base, leaving = len(gradients), departing(segment.instructions, phase, wanted_of(segment))
            for index, instruction in enumerate(segment.instructions):
                needed = frozenset[int]().union(*(behind.get(own.value, frozenset()) for own in reads(instruction)))
                if travels(instruction, phase):
                    assert isinstance(instruction, Collective), "gradients travel in collectives"
                    own = len(gradients)
                    name = f"{instruction.kind}[{instruction.axis.name}] {instruction.operand.value}"
                    gradients.append((Member(block, phase, instruction.result.value), name, index in leaving))
                    found += queue.add(
                        instruction.kind,
                        instruction.axis,
                        instruction.bytes,
                        once=phase is SegmentPhase.REDUCE,
                        after=max(needed, default=-1),
                        besides=needed | earlier,
                    )
                    needed = frozenset((own,))
                behind.update((operand.value, needed) for operand in defines(instruction))
            earlier = frozenset(range(base, len(gradients)))
    found += queue.flush()
    buckets = []
    for numbers in found:
        members = [gradients[number] for number in numbers]
        key = queue.key(numbers[0])
        name = members[0][1] if len(members) == 1 else f"{key[0]}[{key[1]}] of {len(members)} gradients"
        inside = tuple(member for member, _, leaves in members if leaves)
        if inside:
            buckets.append(Bucket(name, key, inside))
    return tuple(buckets)


class Departures:
    """The buckets of one backward as it runs: which of their gradients are there, and which buckets have left.

    Args:
        buckets: In the order in which they leave.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._bucket = {member: number for number, bucket in enumerate(buckets) for member in bucket.members}
        self._missing = [len(bucket.members) for bucket in buckets]
        self._next = 0

    def __contains__(self, member: Member) -> bool:
        """Return whether a gradient leaves in one of the buckets."""
        return member in self._bucket

    def offer(self, member: Member) -> None:
        """Take note that a gradient is there."""
        self._missing[self._bucket[member]] -= 1

    def take(self) -> list[Bucket]:
        """Return the buckets that leave now: those at the head that are complete."""
        first = self._next
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._next += 1
        return list(self._buckets[first : self._next])

    def has_left(self, member: Member) -> bool:
        """Return whether the bucket of a gradient has left."""
        return self._bucket[member] < self._next

    @property
    def are_over(self) -> bool:
        """Whether all buckets have left."""
        return self._next == len(self._buckets)

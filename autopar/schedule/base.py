"""What a schedule is: for every group of devices, its tasks in order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import ClassVar, NamedTuple


class Pass(StrEnum):
    """What a stage does with a microbatch.

    `BACKWARD` gives the gradients of the stage's inputs and, unless the schedule splits it, those of its parameters,
    too. `WEIGHT` gives the latter where it does.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Task(NamedTuple):  # there are stages x microbatches of them: a NamedTuple is made and hashed fastest
    """One pass of one microbatch through one chunk of a group of devices, that is, through one stage.

    >>> str(Task(Pass.FORWARD, 3)), str(Task(Pass.BACKWARD, 0, chunk=1))
    ('F3', 'B0.1')
    """

    kind: Pass
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}" if self.chunk else f"{self.kind}{self.microbatch}"


Tasks = tuple[Task, ...]


class Schedule(ABC):
    """The order of tasks on each group of devices. Groups, microbatches and chunks count from 0.

    A schedule has to say the order; all else has a default.

    Attributes:
        trains: Whether there are backward passes.
        splits: Whether the backward is two passes, `BACKWARD` and `WEIGHT`.
        steps_overlap: Whether a group starts its next step when it is done, whatever the others still do. Then a step
            takes as long as the group that takes longest from its first task on; else from the first task of any group.
    """

    trains: ClassVar[bool] = True
    splits: ClassVar[bool] = False
    steps_overlap: ClassVar[bool] = False

    @abstractmethod
    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return the tasks of a group in the order in which it runs them."""

    def group(self, stage: int, num_groups: int) -> int:
        """Return the group that runs a stage: with several chunks, groups take turns."""
        return stage % num_groups

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return what is wrong with a use of the schedule, the rest of a sentence about it, and a hint; else "", ""."""
        if num_chunks != 1:
            return (
                f"runs one stage per group of devices, not {num_chunks}",
                "schedule 'interleaved' runs several, 'zb-v' two",
            )
        return "", ""

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return of how many tasks a group holds activations at its fullest, the running one counted.

        They are held from a forward to the last pass of the same microbatch and chunk.
        """
        return _fullest(self, group, num_groups, num_microbatches, num_chunks)

    def enough(self, num_groups: int) -> float:
        """Return a number of microbatches of which groups hold the same, task after task, as of any larger number."""
        return inf

    @property
    def passes(self) -> tuple[Pass, ...]:
        """What every stage does with every microbatch, in this order."""
        if not self.trains:
            return (Pass.FORWARD,)
        return tuple(Pass) if self.splits else (Pass.FORWARD, Pass.BACKWARD)

    def groups(self, num_groups: int, num_chunks: int) -> tuple[int, ...]:
        """Return the group of every stage."""
        return tuple(self.group(stage, num_groups) for stage in range(num_groups * num_chunks))

    def orders(self, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Tasks, ...]:
        """Return the tasks of every group."""
        return _orders(self, num_groups, num_microbatches, num_chunks)


@lru_cache(maxsize=8)  # of large schedules megabytes each
def _orders(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[Tasks, ...]:
    return tuple(schedule.order(group, num_groups, num_microbatches, num_chunks) for group in range(num_groups))


@lru_cache(maxsize=4096)
def _fullest(schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int) -> int:
    if not schedule.trains:
        return 1
    held = highest = 0
    for task in schedule.order(group, num_groups, num_microbatches, num_chunks):
        held += (task.kind is Pass.FORWARD) - (task.kind is schedule.passes[-1])
        highest = max(highest, held)
    return highest


def chunks_of(groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of every group in order, its chunks, given the group of every stage.

    >>> chunks_of((0, 1, 1, 0))
    ((0, 3), (1, 2))
    """
    found: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
    for stage, group in enumerate(groups):
        found[group].append(stage)
    return tuple(map(tuple, found))

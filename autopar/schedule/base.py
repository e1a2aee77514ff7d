"""The interface of a schedule: tasks, passes, and the order of the tasks of every group of devices.

A new schedule subclasses `Schedule`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import ClassVar, NamedTuple


class Pass(StrEnum):
    """What a stage computes for a microbatch.

    `BACKWARD` computes the gradients of the stage's inputs and, unless the schedule splits the backward, the gradients
    of its parameters. `WEIGHT` computes the gradients of the parameters where the schedule splits the backward.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Task(NamedTuple):  # fastest to create and hash; a schedule may have a hundred thousand tasks
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
    """The order of tasks on each group of devices; groups, microbatches and chunks are numbered from 0.

    A subclass defines `order`; the other methods have defaults.

    Attributes:
        trains: Whether there are backward passes.
        splits: Whether the backward is split into two passes, `BACKWARD` and `WEIGHT`.
        steps_overlap: Whether a group starts its next step as soon as its own tasks are done. If true, a step takes as
            long as the slowest group needs from its first task to its last; else it counts from the first task of any
            group.
        hides_dispatch: Whether forwards run beside backwards of other microbatches, so that tokens travel to experts
            and back beside the compute of another microbatch.
    """

    trains: ClassVar[bool] = True
    splits: ClassVar[bool] = False
    steps_overlap: ClassVar[bool] = False
    hides_dispatch: ClassVar[bool] = False

    @abstractmethod
    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return the tasks of a group in execution order."""

    def group(self, stage: int, num_groups: int) -> int:
        """Return the group that runs a stage; by default stages are dealt to the groups round-robin."""
        return stage % num_groups

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return why the schedule cannot run with these numbers and a hint, or two empty strings if it can.

        The reason is the rest of a sentence whose subject is the schedule.
        """
        if num_chunks != 1:
            return (
                f"runs one stage per group of devices, not {num_chunks}",
                "schedule 'interleaved' runs several, 'zb-v' two",
            )
        return "", ""

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the most (microbatch, chunk) pairs whose activations a group holds at a time.

        The running pair counts. Activations are held from a forward to the last pass of the microbatch on that chunk.
        """
        return _most_in_flight(self, group, num_groups, num_microbatches, num_chunks)

    def enough(self, num_groups: int) -> float:
        """Return a number of microbatches above which the held activations of every group no longer change.

        More microbatches repeat the steady state. Infinity if the schedule gives no such number.
        """
        return inf

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of every stage over every microbatch, in execution order."""
        if not self.trains:
            return (Pass.FORWARD,)
        return tuple(Pass) if self.splits else (Pass.FORWARD, Pass.BACKWARD)

    def groups(self, num_groups: int, num_chunks: int) -> tuple[int, ...]:
        """Return the group of every stage."""
        return tuple(self.group(stage, num_groups) for stage in range(num_groups * num_chunks))

    def orders(self, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Tasks, ...]:
        """Return the tasks of every group."""
        return _orders(self, num_groups, num_microbatches, num_chunks)


@lru_cache(maxsize=8)  # an entry of a large schedule takes megabytes
def _orders(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[Tasks, ...]:
    return tuple(schedule.order(group, num_groups, num_microbatches, num_chunks) for group in range(num_groups))


@lru_cache(maxsize=4096)
def _most_in_flight(schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int) -> int:
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

"""Pipeline schedules: in which order a stage runs its microbatches.

A schedule is one small class; adding one is a class and a line in `SCHEDULES`. The order alone decides how many
microbatches a stage holds at once, which is what the planner needs, and when it runs them, which is what the
simulator needs.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol


class Pass(StrEnum):
    """What a stage does with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


class Task(NamedTuple):  # there are stages x microbatches of them: a NamedTuple is made and hashed fastest
    """One pass of one microbatch through one stage."""

    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


class Schedule(Protocol):
    """The order of tasks on each stage. Stages and microbatches count from 0."""

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""

    def order(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
        """Return the tasks of a stage in the order in which it runs them."""

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Return how many microbatches a stage holds activations of at its fullest, the running one counted."""


class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""
        return True

    def order(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
        """Return F0 F1 ... B0 B1 ... for every stage."""
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return (*forwards, *backwards)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Return the number of microbatches: all of them wait for the first backward."""
        return num_microbatches


class OneForwardOneBackward(Schedule):
    """A warm-up of forwards, then one forward and one backward in turn.

    Also known as PipeDream-Flush (Narayanan et al., 2021, arXiv:2104.04473).

    >>> " ".join(map(str, OneForwardOneBackward().order(stage=0, num_stages=2, num_microbatches=3)))
    'F0 F1 B0 F2 B1 B2'
    """

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""
        return True

    def order(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
        """Return as many forwards as there are later stages, then F and B in turn, then the remaining backwards."""
        ahead = self.in_flight(stage, num_stages, num_microbatches) - 1
        tasks = [Task(Pass.FORWARD, i) for i in range(ahead)]
        for i in range(num_microbatches):
            if i + ahead < num_microbatches:
                tasks.append(Task(Pass.FORWARD, i + ahead))
            tasks.append(Task(Pass.BACKWARD, i))
        return tuple(tasks)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Return the number of stages from this one to the last, or all microbatches if they are fewer."""
        return min(num_microbatches, num_stages - stage)


class ForwardOnly(Schedule):
    """Inference: every microbatch passes once."""

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""
        return False

    def order(self, stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
        """Return F0 F1 ..."""
        return tuple(Task(Pass.FORWARD, i) for i in range(num_microbatches))

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Return 1: nothing is kept for a backward."""
        return 1


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": OneForwardOneBackward(),
    "gpipe": GPipe(),
    "forward-only": ForwardOnly(),
}

"""Pipeline schedules: in which order the devices of a pipeline run its stages and microbatches.

A pipeline runs on groups of devices. Usually each group has one stage; where stages are *interleaved*, group g of p has
several, its chunks: stages g, g + p, g + 2p and so on of the chain. So stage i is chunk i // p of group i % p.

A schedule is one small class; adding one is a class and a line in `SCHEDULES`. The order alone decides how many
microbatches a group holds at once, which is what the planner needs, and when it runs them, which is what the
simulator needs.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from autopar.errors import ProgramError


class Pass(StrEnum):
    """What a stage does with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


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


class Schedule(Protocol):
    """The order of tasks on each group of devices. Groups, microbatches and chunks count from 0."""

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""

    @property
    def interleaves(self) -> bool:
        """Whether groups may have several chunks; then microbatches come in multiples of the number of groups."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return the tasks of a group in the order in which it runs them."""

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return of how many tasks a group holds activations at its fullest, the running one counted."""


class GPipe:
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

    trains = True
    interleaves = False

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return F0 F1 ... B0 B1 ... for every group."""
        assert num_chunks == 1, "not interleaved"
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return (*forwards, *backwards)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the number of microbatches: all of them wait for the first backward."""
        return num_microbatches


class OneForwardOneBackward:
    """A warm-up of forwards, then one forward and one backward in turn.

    Also known as PipeDream-Flush (Narayanan et al., 2021, arXiv:2104.04473).

    >>> " ".join(map(str, OneForwardOneBackward().order(group=0, num_groups=2, num_microbatches=3)))
    'F0 F1 B0 F2 B1 B2'
    """

    trains = True
    interleaves = False

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return as many forwards as there are later groups, then F and B in turn, then the remaining backwards."""
        assert num_chunks == 1, "not interleaved"
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return _in_turn(forwards, backwards, self.in_flight(group, num_groups, num_microbatches) - 1)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the number of groups from this one to the last, or all microbatches if they are fewer."""
        return min(num_microbatches, num_groups - group)


class Interleaved:
    """1F1B over several chunks per group, which makes the bubble smaller by their number.

    Microbatches go through in rounds of as many as there are groups, through one chunk after the other (Narayanan et
    al., 2021, arXiv:2104.04473, section 2.2).

    >>> " ".join(map(str, Interleaved().order(group=1, num_groups=2, num_microbatches=2, num_chunks=2)))
    'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1'
    """

    trains = True
    interleaves = True

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return a warm-up of forwards, then F and B in turn, then the remaining backwards, last chunk first."""
        assert num_microbatches % num_groups == 0, "rounds are complete"
        places = [
            (first + i, chunk)
            for first in range(0, num_microbatches, num_groups)
            for chunk in range(num_chunks)
            for i in range(num_groups)
        ]
        forwards = [Task(Pass.FORWARD, microbatch, chunk) for microbatch, chunk in places]
        backwards = [Task(Pass.BACKWARD, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in places]
        return _in_turn(forwards, backwards, self.in_flight(group, num_groups, num_microbatches, num_chunks) - 1)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the length of the warm-up and one; all forwards there are if they are fewer."""
        warm_up = 2 * (num_groups - group - 1) + (num_chunks - 1) * num_groups
        return min(num_microbatches * num_chunks, warm_up + 1)


class ForwardOnly:
    """Inference: every microbatch passes once."""

    trains = False
    interleaves = False

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return F0 F1 ..."""
        assert num_chunks == 1, "not interleaved"
        return tuple(Task(Pass.FORWARD, i) for i in range(num_microbatches))

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return 1: nothing is kept for a backward."""
        return 1


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": OneForwardOneBackward(),
    "gpipe": GPipe(),
    "interleaved": Interleaved(),
    "forward-only": ForwardOnly(),
}


def _in_turn(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> tuple[Task, ...]:
    """Return so many forwards, then one forward and one backward in turn, then the remaining backwards."""
    tasks = list(forwards[:ahead])
    for i, backward in enumerate(backwards):
        tasks.extend(forwards[i + ahead : i + ahead + 1])
        tasks.append(backward)
    return tuple(tasks)


def follow(orders: Sequence[Sequence[Task]]) -> list[tuple[int, Task]]:
    """Return all tasks as (stage, task), each after those it needs, every group keeping to its order.

    A forward needs the forward of the stage before, a backward the forward of its stage and the backward of the next.
    Sending does not wait for the receiver.

    Args:
        orders: Tasks of each group in order.

    Raises:
        ProgramError: If groups wait for each other, or for a task that nobody runs.
    """
    num_groups = len(orders)
    last = num_groups * (1 + max((task.chunk for order in orders for task in order), default=0)) - 1
    done: set[tuple[int, Pass, int]] = set()
    followed: list[tuple[int, Task]] = []
    position = [0] * num_groups
    waking = deque(range(num_groups))
    while waking:
        group = waking.popleft()
        order, start = orders[group], len(followed)
        while position[group] < len(order):
            task = order[position[group]]
            stage = task.chunk * num_groups + group
            if task.kind is Pass.FORWARD:
                ready = stage == 0 or (stage - 1, Pass.FORWARD, task.microbatch) in done
            else:
                ready = (stage, Pass.FORWARD, task.microbatch) in done
                ready = ready and (stage == last or (stage + 1, Pass.BACKWARD, task.microbatch) in done)
            if not ready:
                break
            done.add((stage, task.kind, task.microbatch))
            followed.append((stage, task))
            position[group] += 1
        if len(followed) > start and num_groups > 1:
            waking.extend({(group + 1) % num_groups, (group - 1) % num_groups})
    waiting = [
        f"group {group} for what {order[place]} needs"
        for group, (order, place) in enumerate(zip(orders, position, strict=True))
        if place < len(order)
    ]
    if waiting:
        raise ProgramError(f"the schedule deadlocks: {', '.join(waiting)}")
    return followed

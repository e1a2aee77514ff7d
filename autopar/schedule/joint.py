"""Schedules whose backward is one pass."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from autopar.schedule.base import Pass, Schedule, Task, Tasks


class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return F0 F1 ... B0 B1 ... for every group."""
        assert num_chunks == 1, "not interleaved"
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return (*forwards, *backwards)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the number of microbatches: all of them wait for the first backward."""
        return num_microbatches


class OneForwardOneBackward(Schedule):
    """A warm-up of forwards, then one forward and one backward in turn.

    Also known as PipeDream-Flush (Narayanan et al., 2021, arXiv:2104.04473).

    >>> " ".join(map(str, OneForwardOneBackward().order(group=0, num_groups=2, num_microbatches=3)))
    'F0 F1 B0 F2 B1 B2'
    """

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return as many forwards as there are later groups, then F and B in turn, then the remaining backwards."""
        assert num_chunks == 1, "not interleaved"
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return _in_turn(forwards, backwards, self.in_flight(group, num_groups, num_microbatches) - 1)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the number of groups from this one to the last, or all microbatches if they are fewer."""
        return min(num_microbatches, num_groups - group)

    def enough(self, num_groups: int) -> float:
        """Return as many as all groups wait for, and as many again."""
        return 2 * num_groups


class Interleaved(Schedule):
    """1F1B over several chunks per group, which makes the bubble smaller by their number.

    Microbatches go through in rounds of as many as there are groups, through one chunk after the other (Narayanan et
    al., 2021, arXiv:2104.04473, section 2.2).

    >>> " ".join(map(str, Interleaved().order(group=1, num_groups=2, num_microbatches=2, num_chunks=2)))
    'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1'
    """

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return a warm-up of forwards, then F and B in turn, then the remaining backwards, last chunk first."""
        assert num_microbatches % num_groups == 0, "rounds are complete"
        forwards, backwards = _rounds(num_groups, num_microbatches, num_chunks)
        return _in_turn(forwards, backwards, self.in_flight(group, num_groups, num_microbatches, num_chunks) - 1)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the length of the warm-up and one; all forwards there are if they are fewer."""
        warm_up = 2 * (num_groups - group - 1) + (num_chunks - 1) * num_groups
        return min(num_microbatches * num_chunks, warm_up + 1)

    def enough(self, num_groups: int) -> float:
        """Return the rounds of the longest warm-up and one."""
        return 4 * num_groups

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return what is wrong if the last round is not complete."""
        if num_microbatches % num_groups:
            return (
                f"runs microbatches in rounds of {num_groups}, one per group of devices, and {num_microbatches} are no "
                "whole number of rounds",
                f"use a multiple of {num_groups} microbatches",
            )
        return "", ""


class ForwardOnly(Schedule):
    """Inference: every microbatch passes once."""

    trains = False

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return F0 F1 ..."""
        assert num_chunks == 1, "not interleaved"
        return tuple(Task(Pass.FORWARD, i) for i in range(num_microbatches))

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return 1: nothing is kept for a backward."""
        return 1


@lru_cache(maxsize=8)  # all groups have the same
def _rounds(num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[Tasks, Tasks]:
    """Return the forwards and the backwards of a group whose chunks take turns."""
    places = [
        (first + i, chunk)
        for first in range(0, num_microbatches, num_groups)
        for chunk in range(num_chunks)
        for i in range(num_groups)
    ]
    forwards = tuple(Task(Pass.FORWARD, microbatch, chunk) for microbatch, chunk in places)
    backwards = tuple(Task(Pass.BACKWARD, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in places)
    return forwards, backwards


def _in_turn(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> Tasks:
    """Return so many forwards, then one forward and one backward in turn, then the remaining backwards."""
    together = max(0, len(forwards) - ahead)
    turns = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(turns), *backwards[together:])

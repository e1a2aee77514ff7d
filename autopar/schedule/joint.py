"""Schedules that do not split the backward: GPipe, 1F1B, interleaved 1F1B, and forward-only inference.

Schedules that split it are in `zero_bubble.py` and `dual_pipe.py`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from autopar.schedule.base import Pass, Schedule, Task, Tasks


class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return F0 F1 ... B0 B1 ... for every group."""
        assert num_chunks == 1, "this schedule runs one stage per group"
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return (*forwards, *backwards)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the number of microbatches: the first backward follows the last forward."""
        return num_microbatches


class OneForwardOneBackward(Schedule):
    """1F1B: a warm-up of forwards, then one forward and one backward alternately.

    The schedule is PipeDream-Flush (Narayanan et al., 2020, arXiv:2006.09503), used by Megatron-LM (Narayanan et al.,
    2021, arXiv:2104.04473): 1F1B of PipeDream (Narayanan et al., 2019) with a flush after every step.

    >>> " ".join(map(str, OneForwardOneBackward().order(group=0, num_groups=2, num_microbatches=3)))
    'F0 F1 B0 F2 B1 B2'
    """

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return one forward per later group, then forwards and backwards alternately, then the remaining backwards."""
        assert num_chunks == 1, "this schedule runs one stage per group"
        forwards = [Task(Pass.FORWARD, i) for i in range(num_microbatches)]
        backwards = [Task(Pass.BACKWARD, i) for i in range(num_microbatches)]
        return _alternate(forwards, backwards, self.in_flight(group, num_groups, num_microbatches) - 1)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return the number of groups from this one to the last, at most the number of microbatches."""
        return min(num_microbatches, num_groups - group)

    def enough(self, num_groups: int) -> float:
        """Return twice the number of groups: the warm-up, and as many microbatches of steady state."""
        return 2 * num_groups


class Interleaved(Schedule):
    """Interleaved 1F1B: several chunks per group divide the bubble by the number of chunks.

    Microbatches run in rounds of one per group; a round passes the chunks one after another (Narayanan et al., 2021,
    arXiv:2104.04473, section 2.2).

    >>> " ".join(map(str, Interleaved().order(group=1, num_groups=2, num_microbatches=2, num_chunks=2)))
    'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1'
    """

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return a warm-up of forwards, then forwards and backwards alternately, then the remaining backwards.

        Backwards visit the chunks from the last to the first.
        """
        why, _ = self.problem(num_groups, num_microbatches, num_chunks)
        assert not why, f"this schedule {why}"
        forwards, backwards = _rounds(num_groups, num_microbatches, num_chunks)
        return _alternate(forwards, backwards, self.in_flight(group, num_groups, num_microbatches, num_chunks) - 1)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return one more than the warm-up forwards, at most the number of all forwards."""
        warm_up = 2 * (num_groups - group - 1) + (num_chunks - 1) * num_groups
        return min(num_microbatches * num_chunks, warm_up + 1)

    def enough(self, num_groups: int) -> float:
        """Return four times the number of groups, as a multiple of a round."""
        return 4 * num_groups

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return the reason if the last round is incomplete; see `Schedule.problem`."""
        if num_microbatches % num_groups:
            return (
                f"runs microbatches in rounds of {num_groups}, one per group of devices, and {num_microbatches} are no "
                "whole number of rounds",
                f"use a multiple of {num_groups} microbatches",
            )
        return "", ""


class Overlapped(Interleaved):
    """Interleaved 1F1B in which each forward runs beside the backward before or after it, one more forward ahead.

    The all-to-all of one microbatch travels beside the compute of the other, which takes two microbatches on the last
    group: every group runs one more warm-up forward. Source: `--overlap-moe-expert-parallel-comm` of Megatron-Core
    (`pipeline_parallel/combined_1f1b.py`; `get_pp_rank_microbatches` adds the warm-up microbatch), which asks for
    several stages per group in a pipeline. With one stage per group or one group any number of microbatches will do.

    >>> " ".join(map(str, Overlapped().order(group=1, num_groups=2, num_microbatches=3)))
    'F0 F1 B0 F2 B1 B2'
    """

    hides_dispatch = True

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return one more than interleaved 1F1B holds, at most the number of all forwards."""
        warm_up = 2 * (num_groups - group - 1) + (num_chunks - 1) * num_groups + 1
        return min(num_microbatches * num_chunks, warm_up + 1)

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return the reason if stages take turns and the last round is incomplete; see `Schedule.problem`."""
        return super().problem(num_groups, num_microbatches, num_chunks) if num_chunks > 1 else ("", "")


class ForwardOnly(Schedule):
    """Inference: one forward per microbatch, no backward."""

    trains = False

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return F0 F1 ... for every group."""
        assert num_chunks == 1, "this schedule runs one stage per group"
        return tuple(Task(Pass.FORWARD, i) for i in range(num_microbatches))

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return 1: no activations are kept for a backward."""
        return 1


@lru_cache(maxsize=8)  # the result is the same for all groups
def _rounds(num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[Tasks, Tasks]:
    """Return the forwards and the backwards of a group, round by round, chunk by chunk."""
    places = [
        (first + i, chunk)
        for first in range(0, num_microbatches, num_groups)
        for chunk in range(num_chunks)
        for i in range(min(num_groups, num_microbatches - first))
    ]
    forwards = tuple(Task(Pass.FORWARD, microbatch, chunk) for microbatch, chunk in places)
    backwards = tuple(Task(Pass.BACKWARD, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in places)
    return forwards, backwards


def _alternate(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> Tasks:
    """Return `ahead` forwards, then one forward and one backward alternately, then the remaining backwards."""
    alternating = max(0, len(forwards) - ahead)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(pairs), *backwards[alternating:])

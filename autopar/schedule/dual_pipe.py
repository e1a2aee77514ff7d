"""DualPipeV: a V of two chunks per group, in whose steady state forwards run beside backwards of other microbatches.

Source: DeepSeek-V3 (2024, arXiv:2412.19437, section 3.2.1) and `dualpipe/dualpipev.py` of deepseek-ai/DualPipe.
With F, B and W the seconds of the passes of a stage (B without W), p groups and at least 2 p microbatches, a group
holds 2 p + 1 chunks, as large as half a stage of 1F1B on p groups. A forward beside a backward runs before it here,
which makes the bubble (p - 1) (F + B - W) or a little more. Run as one, both end at the end of the pair:
(p - 1) (F + 2 B - W), as published.

DualPipe, whose microbatches start at both ends, is two of these: of 2 p groups, groups g and 2 p - 1 - g both have
stages g and 2 p - 1 - g of 2 p, as two data-parallel copies of group g of DualPipeV on p groups have. Bubble, held
chunks, and the parameters of two stages per device are equal; so DualPipe has no class of its own.
"""

from collections import deque
from typing import ClassVar

from autopar.schedule.base import Pass, Tasks
from autopar.schedule.zero_bubble import TaskList, ZeroBubbleV


class DualPipeV(ZeroBubbleV):
    """DualPipeV: group g of p runs stages g and 2 p - 1 - g; a forward of one chunk, then a backward of the other.

    Weight passes follow their backward but where a group has nothing else to do: at the start, until gradients come
    from the next group, and at the end, where earlier groups wait.

    >>> " ".join(map(str, DualPipeV().order(group=0, num_groups=1, num_microbatches=2, num_chunks=2)))
    'F0 F0.1 F1 B0.1 W0.1 F1.1 B0 W0 B1.1 W1.1 B1 W1'
    """

    steps_overlap: ClassVar[bool] = False
    hides_dispatch: ClassVar[bool] = True

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return the eight parts of `DualPipeV.step`, by its names for chunk 0 and 1.

        If there are fewer microbatches than fill the pipeline, tasks of the missing microbatches are left out of the
        full order.
        """
        assert num_chunks == 2, "DualPipeV runs two chunks per group"
        tasks = _Deferring()
        enough, later = max(num_microbatches, 2 * num_groups), num_groups - group - 1
        for _ in range(2 * later):  # nF0
            tasks.append(Pass.FORWARD, 0)
        for _ in range(group + 1):  # nF0F1
            tasks.append(Pass.FORWARD, 0)
            tasks.append(Pass.FORWARD, 1)
        for _ in range(later):  # nB1W1F1
            tasks.backward(1, defers=True)
            tasks.run_deferred()
            tasks.append(Pass.FORWARD, 1)
        for _ in range(enough - 2 * num_groups + group + 1):  # nF0B1F1B0
            for forward, backward in ((0, 1), (1, 0)):
                tasks.append(Pass.FORWARD, forward)
                tasks.backward(backward)
        for _ in range(later):  # nB1F1B0
            tasks.backward(1)
            tasks.append(Pass.FORWARD, 1)
            tasks.backward(0)
        half, is_odd = (group + 1) // 2, group % 2 == 1
        for turn in range(group + 1):  # nB1B0, whose second half defers weight passes
            tasks.backward(1, defers=turn > half or (turn == half and is_odd))
            tasks.backward(0, defers=turn >= half)
        for _ in range(later):  # nWB0
            tasks.run_deferred()
            tasks.backward(0, defers=True)
        while tasks.deferred:  # nW
            tasks.run_deferred()
        return tuple(task for task in tasks.listed if task.microbatch < num_microbatches)


class _Deferring(TaskList):
    """The tasks of a group, and the chunks of its deferred weight passes, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: deque[int] = deque()

    def backward(self, chunk: int, *, defers: bool = False) -> None:
        """Append a backward of a chunk, and its weight pass unless that is deferred."""
        self.append(Pass.BACKWARD, chunk)
        if defers:
            self.deferred.append(chunk)
        else:
            self.append(Pass.WEIGHT, chunk)

    def run_deferred(self) -> None:
        """Append the oldest deferred weight pass."""
        self.append(Pass.WEIGHT, self.deferred.popleft())

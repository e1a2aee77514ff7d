"""Zero-bubble schedules: the backward is split, and weight passes fill the bubbles (Qi et al., 2023, arXiv:2401.10241).

The previous stage waits only for the gradients of a stage's inputs (`B`). The gradients of its weights (`W`) are needed
at the end of the step, so that `W` can run at any time after `B`; the activations that `W` reads are held until then.
With F, B and W the seconds of the three passes of a stage, p stages and enough microbatches, the bubble and the most
microbatches held are:

    1F1B     (p - 1) (F + B + W)    p
    ZB-H1    (p - 1) (F + B - W)    p
    ZB-H2    (p - 1) (F + B - 2 W)  2 p - 1

ZB-V (section 6 of the paper) has no bubble if F = B = W, and holds at most as much as 1F1B.

The bubble at the start of a step coincides with the bubble at the end of the previous step, because later groups start
later and end later. So steps overlap. This needs an optimizer that updates without waiting for all groups; in section 4
of the paper it updates at once, and rolls the update back if the global norm that arrives later requires it.
"""

from math import ceil
from typing import ClassVar

from autopar.schedule.base import Pass, Schedule, Task, Tasks

_ROUNDING = 1e-9  # tolerance for a ratio of seconds that rounding errors lift above a whole number


class ZeroBubble(Schedule):
    """1F1B with additional warm-up forwards on early groups and delayed weight passes on late groups.

    Group g of p runs `ahead` (p - 1 - g) warm-up forwards and delays each weight pass by `late` g backwards, both
    rounded up. The group holds the sum of both and one. ZB-H1 has ahead = late = 1, ZB-H2 has ahead = late = 2.

    >>> " ".join(map(str, ZeroBubble(ahead=1, late=1).order(group=1, num_groups=2, num_microbatches=3)))
    'F0 B0 F1 B1 W0 F2 B2 W1 W2'

    Args:
        ahead: Warm-up forwards per later group.
        late: Backwards by which a weight pass is delayed, per earlier group.
    """

    splits: ClassVar[bool] = True
    steps_overlap: ClassVar[bool] = True

    def __init__(self, ahead: float, late: float) -> None:
        self._ahead, self._late = ahead, late

    @classmethod
    def fitted(cls, forward: float, backward: float, weight: float) -> "ZeroBubble":
        """Return the schedule with almost no bubble for passes of these seconds, or of seconds in this ratio.

        The first backward of group 0 can run once F has passed p - 1 groups and B has returned through them. Filling
        this time takes 1 + B / F forwards per group. The last group finishes later than group 0 by as much, which takes
        (F + B) / W weight passes per group. The cheaper a weight pass is, the more activations are held. The remaining
        bubble comes from rounding; it is less than the passes of one microbatch if a backward takes at least as long as
        a forward, as is usual.
        """
        assert min(forward, backward, weight) > 0, "passes must take more than zero seconds"
        return cls(ahead=1 + backward / forward, late=(forward + backward) / weight)

    def _warm_up_and_delay(self, group: int, num_groups: int, num_microbatches: int) -> tuple[int, int]:
        """Return the number of warm-up forwards and the number of backwards by which weight passes are delayed."""
        counts = self._ahead * (num_groups - 1 - group), self._late * group
        ahead, late = (min(num_microbatches, ceil(count - _ROUNDING)) for count in counts)
        return ahead, late

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return warm-up forwards, then F, B and delayed W in turn, then the remaining weight passes."""
        assert num_chunks == 1, "this schedule runs one stage per group"
        ahead, late = self._warm_up_and_delay(group, num_groups, num_microbatches)
        tasks = [Task(Pass.FORWARD, i) for i in range(ahead)]
        for i in range(num_microbatches):
            if i + ahead < num_microbatches:
                tasks.append(Task(Pass.FORWARD, i + ahead))
            tasks.append(Task(Pass.BACKWARD, i))
            if i >= late:
                tasks.append(Task(Pass.WEIGHT, i - late))
        tasks.extend(Task(Pass.WEIGHT, i) for i in range(num_microbatches - late, num_microbatches))
        return tuple(tasks)

    def in_flight(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
        """Return warm-up forwards plus delayed weight passes plus one, at most the number of microbatches."""
        ahead, late = self._warm_up_and_delay(group, num_groups, num_microbatches)
        return min(num_microbatches, ahead + late + 1)

    def enough(self, num_groups: int) -> float:
        """Return two more than the largest sum of warm-up forwards and delayed weight passes."""
        return ceil((self._ahead + self._late) * num_groups) + 2


class ZeroBubbleV(Schedule):
    """ZB-V: two chunks per group in the shape of a V; group g of p runs stages g and 2 p - 1 - g.

    The group that starts a microbatch also ends it, and can run the backward of its second chunk at once. So all groups
    hold the same number of chunks, 2 p; a chunk is half as large as a stage of 1F1B (Qi et al., 2023,
    arXiv:2401.10241, section 6).

    >>> " ".join(map(str, ZeroBubbleV().order(group=0, num_groups=1, num_microbatches=2, num_chunks=2)))
    'F0 F0.1 B0.1 W0.1 F1 B0 W0 F1.1 B1.1 W1.1 B1 W1'
    """

    splits: ClassVar[bool] = True
    steps_overlap: ClassVar[bool] = True

    def group(self, stage: int, num_groups: int) -> int:
        """Return the group of a stage: 0 to p - 1 on the way down, p - 1 to 0 on the way up."""
        return min(stage, 2 * num_groups - 1 - stage)

    def enough(self, num_groups: int) -> float:
        """Return four times the number of groups: warm-up and cool-down, and as many microbatches of steady state."""
        return 4 * num_groups

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return the reason if a group does not have two chunks; see `Schedule.problem`."""
        if num_chunks != 2:
            return (
                f"runs two stages per group of devices, i and 2p - 1 - i of 2p, not {num_chunks}",
                f"cut the model into {2 * num_groups} stages: --interleave 2",
            )
        return "", ""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return a warm-up, passes of both chunks alternately, and a cool-down, as `ScheduleZBVZeroBubble` of PyTorch.

        If there are fewer microbatches than fill the pipeline, tasks of the missing microbatches are left out of the
        full order.
        """
        assert num_chunks == 2, "ZB-V runs two chunks per group"
        tasks = TaskList()
        enough = max(num_microbatches, 2 * num_groups - 1)
        # warm-up: forwards of the first chunk, then of both chunks until the first microbatch has its gradient
        tasks.append(Pass.FORWARD, 0, 2 * (num_groups - group) - 1)
        for _ in range(group):
            tasks.append(Pass.FORWARD, 1)
            tasks.append(Pass.FORWARD, 0)
        for _ in range(num_groups - group):
            tasks.append(Pass.FORWARD, 1)
            tasks.append(Pass.BACKWARD, 1)
            tasks.append(Pass.WEIGHT, 1)
        # steady state: all three passes of one chunk, then of the other
        while tasks.count[Pass.FORWARD, 1] < enough:
            if tasks.count[Pass.FORWARD, 0] < enough:
                tasks.append(Pass.FORWARD, 0)
            tasks.append(Pass.BACKWARD, 0)
            tasks.append(Pass.WEIGHT, 0)
            tasks.append(Pass.FORWARD, 1)
            tasks.append(Pass.BACKWARD, 1)
            tasks.append(Pass.WEIGHT, 1)
        # cool-down: first the backwards that other groups wait for, then weight passes
        for _ in range(group):
            tasks.append(Pass.BACKWARD, 0)
            tasks.append(Pass.BACKWARD, 1)
        for _ in range(num_groups - group):
            tasks.append(Pass.BACKWARD, 0)
            tasks.append(Pass.WEIGHT, 0)
        tasks.append(Pass.WEIGHT, 1, enough - tasks.count[Pass.WEIGHT, 1])
        tasks.append(Pass.WEIGHT, 0, enough - tasks.count[Pass.WEIGHT, 0])
        return tuple(task for task in tasks.listed if task.microbatch < num_microbatches)


class TaskList:
    """The tasks of a group with two chunks, in the order appended.

    Every pass takes the microbatches of a chunk in ascending order.
    """

    def __init__(self) -> None:
        self.listed: list[Task] = []
        self.count = {(kind, chunk): 0 for kind in Pass for chunk in (0, 1)}

    def append(self, kind: Pass, chunk: int, times: int = 1) -> None:
        """Append a pass over the next `times` microbatches of a chunk."""
        for _ in range(times):
            self.listed.append(Task(kind, self.count[kind, chunk], chunk))
            self.count[kind, chunk] += 1

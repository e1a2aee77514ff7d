"""Zero-bubble schedules: the backward is split, and passes for weights fill what would be bubbles.

Only the gradients of a stage's inputs (`B`) are waited for by the stage before. Those of its weights (`W`) are wanted
at the end of the step and can run at any time in between; until then the activations they read are held. Qi et al.,
2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, have the schedules and their bubbles; with F, B and W the
seconds of the three passes of a stage, p stages and enough microbatches:

    1F1B     (p - 1) (F + B + W)    p microbatches held at most
    ZB-H1    (p - 1) (F + B - W)    p
    ZB-H2    (p - 1) (F + B - 2 W)  2 p - 1

and none for ZB-V (Qi et al., 2024, arXiv:2405.15362) if F = B = W, with what 1F1B holds at most.

The bubble at the start of a step is the one at the end of the step before: later groups start later and end later. So
these steps overlap, which takes an optimizer that does not wait for all groups before it updates (section 4 of the
paper: it updates at once, and takes the update back if a norm that arrives later says so).
"""

from math import ceil
from typing import ClassVar

from autopar.schedule.base import Pass, Schedule, Task, Tasks

_ROUNDING = 1e-9  # a ratio of seconds may come out a little above a whole number


class ZeroBubble(Schedule):
    """1F1B with more forwards ahead on early groups, and passes for weights put off on late ones.

    Group g of p runs `ahead` (p - 1 - g) forwards ahead, and puts off a weight pass by `late` g backwards, rounded up.
    It holds the sum of both and one. ZB-H1 has 1 and 1, ZB-H2 2 and 2.

    >>> " ".join(map(str, ZeroBubble(ahead=1, late=1).order(group=1, num_groups=2, num_microbatches=3)))
    'F0 B0 F1 B1 W0 F2 B2 W1 W2'

    Args:
        ahead: Forwards ahead per later group.
        late: Weight passes put off per earlier group.
    """

    splits: ClassVar[bool] = True
    steps_overlap: ClassVar[bool] = True

    def __init__(self, ahead: float, late: float) -> None:
        self._ahead, self._late = ahead, late

    @classmethod
    def fitted(cls, forward: float, backward: float, weight: float) -> "ZeroBubble":
        """Return the one with almost no bubble for passes of these seconds, or seconds in this ratio.

        The first group's backward comes back when F has gone there and B back again over p - 1 groups, which takes
        1 + B / F forwards per group to fill; the last group ends as much later than its last backward, which takes
        (F + B) / W weight passes per group. The cheaper the weight pass is, the more is held. What is left of the
        bubble comes of rounding, and is less than the passes of one microbatch if a backward takes no less than a
        forward, as backwards do.
        """
        assert min(forward, backward, weight) > 0, "passes take time"
        return cls(ahead=1 + backward / forward, late=(forward + backward) / weight)

    def _counts(self, group: int, num_groups: int, num_microbatches: int) -> tuple[int, int]:
        """Return the forwards ahead and the weight passes put off."""
        counts = self._ahead * (num_groups - 1 - group), self._late * group
        ahead, late = (min(num_microbatches, ceil(count - _ROUNDING)) for count in counts)
        return ahead, late

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return forwards ahead, then F, B and the W put off in turn, then the remaining weight passes."""
        assert num_chunks == 1, "not interleaved"
        ahead, late = self._counts(group, num_groups, num_microbatches)
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
        """Return the forwards ahead, the weight passes put off, and one."""
        ahead, late = self._counts(group, num_groups, num_microbatches)
        return min(num_microbatches, ahead + late + 1)

    def enough(self, num_groups: int) -> float:
        """Return as many as are ahead and put off at most, and two."""
        return ceil((self._ahead + self._late) * num_groups) + 2


class ZeroBubbleV(Schedule):
    """Two chunks per group in the shape of a V: group g of p runs stages g and 2 p - 1 - g.

    So the group that starts a microbatch also ends it, and gets the gradient of its second chunk at once: all groups
    hold the same, 2 p chunks, each half as large as a stage of 1F1B.

    >>> " ".join(map(str, ZeroBubbleV().order(group=0, num_groups=1, num_microbatches=2, num_chunks=2)))
    'F0 F0.1 B0.1 W0.1 F1 B0 W0 F1.1 B1.1 W1.1 B1 W1'
    """

    splits: ClassVar[bool] = True
    steps_overlap: ClassVar[bool] = True

    def group(self, stage: int, num_groups: int) -> int:
        """Return the group of a stage: down and up again."""
        return min(stage, 2 * num_groups - 1 - stage)

    def enough(self, num_groups: int) -> float:
        """Return as many as warm-up and cool-down take at most, and as many again."""
        return 4 * num_groups

    def problem(self, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[str, str]:
        """Return what is wrong if there are not two chunks."""
        if num_chunks != 2:
            return (
                f"runs two stages per group of devices, i and 2p - 1 - i of 2p, not {num_chunks}",
                f"cut the model into {2 * num_groups} stages: --interleave 2",
            )
        return "", ""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        """Return a warm-up, the two chunks in turn, and a cool-down; `ScheduleZBVZeroBubble` of PyTorch runs alike.

        A step of fewer microbatches than fill the pipeline is the full one with the tasks of the missing ones left out.
        """
        assert num_chunks == 2, "a V has two sides"
        run = _VRun()
        enough = max(num_microbatches, 2 * num_groups - 1)
        # warm up: the first chunk ahead, then both sides in turn until the gradient of the first microbatch is there
        run.take(Pass.FORWARD, 0, 2 * (num_groups - group) - 1)
        for _ in range(group):
            run.take(Pass.FORWARD, 1)
            run.take(Pass.FORWARD, 0)
        for _ in range(num_groups - group):
            run.take(Pass.FORWARD, 1)
            run.take(Pass.BACKWARD, 1)
            run.take(Pass.WEIGHT, 1)
        # steady: all three passes of one chunk, then of the other
        while run.count[Pass.FORWARD, 1] < enough:
            if run.count[Pass.FORWARD, 0] < enough:
                run.take(Pass.FORWARD, 0)
            run.take(Pass.BACKWARD, 0)
            run.take(Pass.WEIGHT, 0)
            run.take(Pass.FORWARD, 1)
            run.take(Pass.BACKWARD, 1)
            run.take(Pass.WEIGHT, 1)
        # cool down: gradients that others wait for first, weights where there is nothing else
        for _ in range(group):
            run.take(Pass.BACKWARD, 0)
            run.take(Pass.BACKWARD, 1)
        for _ in range(num_groups - group):
            run.take(Pass.BACKWARD, 0)
            run.take(Pass.WEIGHT, 0)
        run.take(Pass.WEIGHT, 1, enough - run.count[Pass.WEIGHT, 1])
        run.take(Pass.WEIGHT, 0, enough - run.count[Pass.WEIGHT, 0])
        return tuple(task for task in run.tasks if task.microbatch < num_microbatches)


class _VRun:
    """The tasks of a group so far; each kind of pass takes the microbatches of a chunk in turn."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.count = {(kind, chunk): 0 for kind in Pass for chunk in (0, 1)}

    def take(self, kind: Pass, chunk: int, times: int = 1) -> None:
        """Run the next microbatches."""
        for _ in range(times):
            self.tasks.append(Task(kind, self.count[kind, chunk], chunk))
            self.count[kind, chunk] += 1

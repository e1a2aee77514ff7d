"""What makes a step as long as it is: the longest path through its tasks, or to what its links still carry behind it.

A group of devices is done when its last task is, and when its links have carried all that its tasks put on them. From
any of its tasks on that takes at least the seconds of all loads that are still to come, so that a step is as long as
the longest way to the start of a task and all loads of its group from there, or all tasks on the way to the last one.
Each way is a sum of seconds of passes and loads, and so a lower bound on steps of any other seconds in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Schedule
from autopar.schedule.timing import Floats, Ints, tasks_of

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """What one link of the devices of each stage carries, in seconds.

    Attributes:
        waited: (stages, 3) what each pass waits for, hidden or not; no more than the pass takes.
        behind: (stages,) what follows the last pass of every microbatch.
        once: (stages,) what follows the last pass of the step.
    """

    waited: Floats
    behind: Floats
    once: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A way through a step that ends with a group of devices: how often what is on it counts.

    Attributes:
        seconds: How long it is.
        group: The group.
        passes: (stages, 3) counts of passes.
        link: The link whose loads it ends with; -1 if it ends with the group's last task.
        waited: (stages, 3) counts of what passes wait for.
        behind: (stages,) counts of what follows microbatches.
        once: (stages,) counts of what follows the step.
    """

    seconds: float
    group: int
    passes: Ints
    link: int
    waited: Ints
    behind: Ints
    once: Ints


def longest_ways(
    schedule: Schedule, num_groups: int, num_microbatches: int, seconds: Floats, loads: Sequence[Loads]
) -> list[Way]:
    """Return the longest way to the end of each group, the loads of links included.

    Where steps overlap it begins with the first task of the group, else with that of any.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices; the stages are a multiple of them.
        num_microbatches: Microbatches per step.
        seconds: (stages, 3) seconds of a forward, a backward and a weight pass.
        loads: By link.

    >>> from autopar.schedule import SCHEDULES
    >>> [way.seconds for way in longest_ways(SCHEDULES["1f1b"], 2, 3, np.array([[1.0, 2.0, 0.0]] * 2), ())]
    [12.0, 10.0]
    """
    from autopar.schedule.kernel import longest_ways as compiled  # compiling is loaded when it is needed only

    tasks = tasks_of(schedule, num_groups, num_microbatches, len(seconds) // num_groups)
    lasting = seconds[tasks.stage, tasks.kind]
    before = np.full(len(tasks.stage), -1)
    owned = [np.flatnonzero(tasks.group == group) for group in range(num_groups)]
    for own in owned:
        before[own[1:]] = own[:-1]
    found = []
    for group, own in enumerate(owned):
        begins = own[:1] if schedule.steps_overlap else tasks.first
        starts, previous = compiled(begins, before, tasks.source, lasting)
        found.append(_longest(group, own, starts, previous, lasting, tasks.stage, tasks.kind, tasks.final, loads))
    return found


def _longest(
    group: int,
    own: Ints,
    starts: Floats,
    previous: Ints,
    lasting: Floats,
    stage: Ints,
    kind: Ints,
    final: Ints,
    loads: Sequence[Loads],
) -> Way:
    """Return the longest way to the end of a group, given the longest ways to the starts of tasks."""
    count = len(final)
    last = int(own[-1])
    is_behind, is_final = _behind(own, stage, kind), np.isin(own, final)
    best, at, link, with_waits = float(starts[last] + lasting[last]), len(own), -1, False
    for number, each in enumerate(loads):
        behind = np.where(is_behind, each.behind[stage[own]], 0.0)
        # What is carried once has only the loads of its own stage before it, if those are not carried every time.
        for waits, more in ((True, each.waited[stage[own], kind[own]]), (False, is_final * each.once[stage[own]])):
            to_come = np.cumsum((behind + more)[::-1])[::-1]
            ends = np.where(to_come > 0, starts[own] + to_come, -np.inf)
            place = int(ends.argmax())
            if ends[place] > best:
                best, at, link, with_waits = float(ends[place]), place, number, waits
    passes = np.zeros((count, 3), dtype=np.int64)
    task = int(previous[own[at]]) if link >= 0 else last
    while task >= 0:
        passes[stage[task], kind[task]] += 1
        task = int(previous[task])
    waited, behind_counts, once = np.zeros_like(passes), np.zeros(count, np.int64), np.zeros(count, np.int64)
    rest = own[at:]
    np.add.at(behind_counts, stage[rest[is_behind[at:]]], 1)
    if with_waits:
        np.add.at(waited, (stage[rest], kind[rest]), 1)
    elif link >= 0:
        once[stage[rest[is_final[at:]]]] = 1
    return Way(best, group, passes, link, waited, behind_counts, once)


def _behind(own: Ints, stage: Ints, kind: Ints) -> Mask:
    """Return which tasks of a group are the last pass of their microbatch."""
    return np.asarray(kind[own] == kind[own].max())

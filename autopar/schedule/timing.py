"""When tasks run, given the seconds of passes and of messages between stages.

    start(task)   = max(end of the group's previous task, arrival of the task's input)
    arrival       = max(end of the sender's task, channel free) + seconds of the message

From one group to another there is one channel, first in, first out; within a group nothing is sent. The simulator
follows the same rule with the whole program at hand (`autopar.simulate.pipeline`); this is for those who have seconds
of stages only, many times over: who waits for whom is found once per schedule and size.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Pass, Schedule, chunks_of
from autopar.schedule.dependencies import follow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUMBERS = {kind: number for number, kind in enumerate(Pass)}


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """When groups and stages are busy, in seconds from the first task of any group.

    Attributes:
        begins: Per group, the start of its first task.
        ends: Per group, the end of its last task.
        last_starts: Per stage, the start of its last task.
        starts: (tasks,) start of every task.
        tasks: The tasks.
    """

    begins: Floats
    ends: Floats
    last_starts: Floats
    starts: Floats
    tasks: "TaskGraph"


@dataclass(frozen=True, slots=True, eq=False)
class TaskGraph:
    """The tasks of a schedule, (tasks,) each, every one after those it waits for; see `kernel.longest_path`.

    `first` and `last` are the first and last task of every group, `final` the last one of every stage.
    """

    stage: Ints
    kind: Ints
    group: Ints
    source: Ints
    link: Ints
    num_links: int
    first: Ints
    last: Ints
    final: Ints


@lru_cache(maxsize=32)  # of large schedules megabytes each
def tasks_of(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> TaskGraph:
    """Return who waits for whom in a step."""
    from autopar.schedule.kernel import runnable  # compiling is loaded when it is needed only

    groups = schedule.groups(num_groups, num_chunks)
    orders, chunks = schedule.orders(num_groups, num_microbatches, num_chunks), chunks_of(groups)
    listed = np.array(
        [
            (own[chunk], _NUMBERS[kind], microbatch)
            for own, order in zip(chunks, orders, strict=True)
            for kind, microbatch, chunk in order
        ]
    )
    begins, group_of = np.cumsum([0, *map(len, orders)]), np.asarray(groups)
    order, count = runnable(*listed.T.copy(), begins, group_of, num_microbatches)
    if count < len(order):
        follow(orders, groups)  # says who waits for what
    stage, kind, microbatch = listed[order].T.copy()
    # With a stage before the first and one behind the last, which nobody waits for.
    every = np.full((len(Pass), len(groups) + 2, num_microbatches), -1)
    every[kind, stage + 1, microbatch] = np.arange(len(order))
    step = np.array([1, -1, 0])[kind]
    around = np.array([-1, *groups, -1])
    crosses = (step != 0) & (around[stage + 1 + step] >= 0) & (around[stage + 1 + step] != group_of[stage])
    links, own = np.unique(group_of[stage] * num_groups + around[stage + 1 + step], return_inverse=True)
    group = group_of[stage]
    first, last, final = np.empty(num_groups, int), np.empty(num_groups, int), np.empty(len(groups), int)
    first[group[::-1]] = np.arange(len(order))[::-1]
    last[group] = final[stage] = np.arange(len(order))
    return TaskGraph(
        stage=stage,
        kind=kind,
        group=group,
        source=np.where(step != 0, every[kind, stage + 1 - step, microbatch], -1),
        link=np.where(crosses, own, -1),
        num_links=len(links),
        first=first,
        last=last,
        final=final,
    )


def time_tasks(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    seconds: Floats,
    forward_hop: Floats,
    backward_hop: Floats,
) -> Timing:
    """Return when groups and stages are busy.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices; the stages are a multiple of them.
        num_microbatches: Microbatches per step.
        seconds: (stages, 3) seconds of a forward, a backward and a weight pass.
        forward_hop: (stages,) seconds of a message from each stage to the next; the last one is not looked at.
        backward_hop: (stages,) seconds of a message from each stage to the previous one; the first is not looked at.

    >>> from autopar.schedule import SCHEDULES
    >>> none = np.zeros(2)
    >>> time_tasks(SCHEDULES["1f1b"], 2, 3, np.array([[1.0, 2.0, 0.0]] * 2), none, none).ends.tolist()
    [12.0, 10.0]
    """
    from autopar.schedule.kernel import longest_path  # compiling is loaded when it is needed only

    assert len(seconds) % num_groups == 0, "all groups have equally many stages"
    tasks = tasks_of(schedule, num_groups, num_microbatches, len(seconds) // num_groups)
    hop = np.where(tasks.kind == 0, forward_hop[tasks.stage], backward_hop[tasks.stage])
    starts, ends = longest_path(
        tasks.group, seconds[tasks.stage, tasks.kind], tasks.source, tasks.link, hop, num_groups, tasks.num_links
    )
    return Timing(starts[tasks.first], ends[tasks.last], starts[tasks.final], starts, tasks)


def drained(timing: Timing, loads: Floats) -> Floats:
    """Return per group when its links have carried all they do, first in, first out on each; 0 if that is nothing.

    Args:
        timing: When tasks run.
        loads: (stages, passes + 1, links, 2) of each pass, and of the last one of a step: until when it has each link,
            if nobody else has, from its start, and for how long. What it has is ready before the pass is over.
    """
    from autopar.schedule.kernel import queue_ends  # compiling is loaded when it is needed only

    tasks, starts = timing.tasks, timing.starts
    ends: Floats = queue_ends(tasks.group, tasks.stage, tasks.kind, starts, tasks.final, loads, len(timing.ends))
    return ends

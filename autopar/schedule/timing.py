"""Start and end of every task, given the seconds of passes and of messages between stages.

    start(task)   = max(end of the group's previous task, arrival of the task's input)
    arrival       = max(end of the sender's task, channel free) + seconds of the message

Between two groups there is one FIFO channel per direction; stages of one group exchange no messages. This module serves
callers that have only the seconds of stages and time many candidates: the task graph is built once per schedule and
size and cached. The simulator times whole programs on the same task graph (`autopar.simulate.pipeline`).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Pass, Schedule, chunks_of
from autopar.schedule.dependencies import topological_order

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUMBERS = {kind: number for number, kind in enumerate(Pass)}


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """Busy intervals of groups and stages, in seconds from the first task of any group.

    Attributes:
        begins: (groups,) start of the first task of each group.
        ends: (groups,) end of the last task of each group.
        last_starts: (stages,) start of the last task of each stage.
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
    """The tasks of a schedule in topological order, one array element per task.

    Attributes:
        stage: (tasks,) stage.
        kind: (tasks,) 0, 1, 2 for a forward, a backward, a weight pass.
        microbatch: (tasks,) microbatch.
        group: (tasks,) group.
        source: (tasks,) the task of a neighbouring stage whose output the task reads; -1 if none.
        link: (tasks,) channel that carries the output of the task to another group; -1 if none.
        num_links: Number of channels.
        first: (groups,) first task of each group.
        last: (groups,) last task of each group.
        final: (stages,) last task of each stage.
    """

    stage: Ints
    kind: Ints
    microbatch: Ints
    group: Ints
    source: Ints
    link: Ints
    num_links: int
    first: Ints
    last: Ints
    final: Ints


@lru_cache(maxsize=4)  # an entry of a large schedule takes megabytes
def listed_tasks(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[Ints, Ints]:
    """Return chunk, pass and microbatch of every task, and where the tasks of each group begin.

    Returns:
        (3, tasks) group by group, in the order of the group; (groups + 1,), the last one the number of tasks.
    """
    orders = schedule.orders(num_groups, num_microbatches, num_chunks)
    listed = np.array([(chunk, _NUMBERS[kind], microbatch) for order in orders for kind, microbatch, chunk in order])
    return listed.T.copy(), np.cumsum([0, *map(len, orders)])


@lru_cache(maxsize=32)  # an entry of a large schedule takes megabytes
def tasks_of(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> TaskGraph:
    """Build the task graph of one step; cached per schedule and size."""
    from autopar.schedule.task_loops import runnable  # numba is imported only when it is needed

    groups = schedule.groups(num_groups, num_chunks)
    listed, begins = listed_tasks(schedule, num_groups, num_microbatches, num_chunks)
    group_of, stage_of = np.asarray(groups), np.array(chunks_of(groups))
    listed = np.stack([stage_of[np.repeat(np.arange(num_groups), np.diff(begins)), listed[0]], *listed[1:]])
    order, count = runnable(*listed, begins, group_of, num_microbatches)
    if count < len(order):  # the error that describes the deadlock
        topological_order(schedule.orders(num_groups, num_microbatches, num_chunks), groups)
    stage, kind, microbatch = listed[:, order]
    # Padded with a stage before the first and one after the last, whose tasks are -1.
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
        microbatch=microbatch,
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
    """Compute when tasks, groups and stages are busy.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices; the number of stages is a multiple of it.
        num_microbatches: Microbatches per step.
        seconds: (stages, 3) seconds of a forward, a backward and a weight pass.
        forward_hop: (stages,) seconds of a message from each stage to the next; the last entry is ignored.
        backward_hop: (stages,) seconds of a message from each stage to the previous one; the first entry is ignored.

    >>> from autopar.schedule import SCHEDULES
    >>> none = np.zeros(2)
    >>> time_tasks(SCHEDULES["1f1b"], 2, 3, np.array([[1.0, 2.0, 0.0]] * 2), none, none).ends.tolist()
    [12.0, 10.0]
    """
    from autopar.schedule.task_loops import longest_path  # numba is imported only when it is needed

    assert len(seconds) % num_groups == 0, "all groups must have the same number of stages"
    tasks = tasks_of(schedule, num_groups, num_microbatches, len(seconds) // num_groups)
    hop = np.where(tasks.kind == 0, forward_hop[tasks.stage], backward_hop[tasks.stage])
    starts, ends, _ = longest_path(
        tasks.group, seconds[tasks.stage, tasks.kind], tasks.source, tasks.link, hop, num_groups, tasks.num_links
    )
    return Timing(starts[tasks.first], ends[tasks.last], starts[tasks.final], starts, tasks)


def drained(timing: Timing, loads: Floats) -> Floats:
    """Return per group when its links finish their queued traffic, (groups,); 0 for a group without traffic.

    Every link serves its queue first in, first out.

    Args:
        timing: Start of every task.
        loads: (stages, passes + 1, links, 2). Index 1 is the pass, with an extra row for the last pass of a step. Last
            index 0: seconds from the start of the pass until the link has carried the traffic of this pass, if it
            carries no other. Last index 1: seconds that the link is busy. Traffic of a pass is ready before the pass
            ends.
    """
    from autopar.schedule.task_loops import queue_ends  # numba is imported only when it is needed

    tasks, starts = timing.tasks, timing.starts
    ends: Floats = queue_ends(tasks.group, tasks.stage, tasks.kind, starts, tasks.final, loads, len(timing.ends))
    return ends

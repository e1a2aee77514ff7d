"""The precedence graph of the tasks of one step, truncated for steps with many microbatches.

Look here for which tasks a bound on the step time takes into account, and which task waits for which.

The bubble of a pipeline lies at both ends of a step: groups wait for the first microbatches, and finish at different
times after the last ones. So an excerpt keeps the tasks of the first and of the last microbatches. On each group, one
aggregate node replaces all tasks between two kept ones. An aggregate has no precedence constraints with other groups;
dropping these constraints makes no path longer, so that a bound on the excerpt is a bound on the step.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Pass, Schedule, chunks_of

Ints = NDArray[np.int64]

MOST_TASKS = 576
"""Tasks of a step up to which no task is aggregated."""

KEPT_TASKS = 192
"""Approximate number of tasks that a truncated step keeps, over all groups and both ends."""

MOST_STAGES_WITH_ALL_PASSES = 256
"""Stages up to which a truncated step keeps all passes of its first and last microbatches. With more stages it keeps
the forwards of the first microbatches, and the backwards and weight passes of the last ones."""

_PASSES = list(Pass)
_STEPS = {Pass.FORWARD: -1, Pass.BACKWARD: 1}


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """Tasks of a step, and aggregate nodes that each stand for several tasks of one group.

    Nodes are numbered: first the kept tasks, then the aggregates.

    Attributes:
        stage: (tasks,) stage of each kept task.
        kind: (tasks,) number of the pass of each kept task.
        aggregates: (nodes, stages, passes) number of tasks that each aggregate stands for.
        predecessors: (pairs,) the node that has to end first: the previous node of the group, or the task that sends a
            message.
        successors: (pairs,) the node that waits for it.
        order_of_group: For each group, its nodes in their order.
    """

    stage: Ints
    kind: Ints
    aggregates: Ints
    predecessors: Ints
    successors: Ints
    order_of_group: tuple[Ints, ...]


def num_tasks(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> int:
    """Number of tasks of a step."""
    return len(schedule.passes) * num_groups * num_chunks * num_microbatches


def is_truncated(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether the excerpt of a step has aggregate nodes."""
    return num_tasks(schedule, num_groups, num_microbatches, num_chunks) > MOST_TASKS


@lru_cache(maxsize=64)
def excerpt(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Excerpt:
    """Precedence graph of a step, truncated if the step has more than `MOST_TASKS` tasks.

    >>> from autopar.schedule import SCHEDULES
    >>> found = excerpt(SCHEDULES["forward-only"], num_groups=1, num_microbatches=3)
    >>> found.predecessors.tolist(), found.successors.tolist(), len(found.aggregates)
    ([0, 1], [1, 2], 0)
    >>> found = excerpt(SCHEDULES["1f1b"], num_groups=2, num_microbatches=1024)
    >>> len(found.stage), len(found.aggregates), int(found.aggregates.sum())
    (192, 4, 3904)
    """
    num_kept, num_modelled = num_microbatches, num_microbatches
    if is_truncated(schedule, num_groups, num_microbatches, num_chunks):
        num_kept = max(1, KEPT_TASKS // (2 * num_groups * num_chunks * len(schedule.passes)))
        # Schedules are periodic in rounds of `num_groups` microbatches: skipped rounds only lengthen an aggregate.
        num_sufficient = schedule.enough(num_groups) + 2 * num_kept + num_groups
        if num_microbatches > num_sufficient:
            num_modelled -= int((num_microbatches - num_sufficient) // num_groups) * num_groups
    num_skipped = num_microbatches - num_modelled
    keeps_all_passes = num_groups * num_chunks <= MOST_STAGES_WITH_ALL_PASSES
    stages_of_group = chunks_of(schedule.groups(num_groups, num_chunks))
    stages, kinds, aggregates = list[int](), list[int](), list[Ints]()
    node_of: dict[tuple[int, Pass, int], int] = {}
    orders = []
    for own_stages, tasks in zip(stages_of_group, schedule.orders(num_groups, num_modelled, num_chunks), strict=True):
        order, first_aggregate = list[int](), len(aggregates)
        for task in tasks:
            stage, kind = own_stages[task.chunk], _PASSES.index(task.kind)
            is_early = task.microbatch < num_kept and (keeps_all_passes or task.kind is Pass.FORWARD)
            is_late = task.microbatch >= num_modelled - num_kept and (keeps_all_passes or task.kind is not Pass.FORWARD)
            if not is_early and not is_late:
                if not order or order[-1] >= 0:
                    order.append(-1 - len(aggregates))
                    aggregates.append(np.zeros((num_groups * num_chunks, len(schedule.passes)), dtype=np.int64))
                aggregates[-1][stage, kind] += 1
            else:
                node_of[stage, task.kind, task.microbatch] = len(stages)
                order.append(len(stages))
                stages.append(stage)
                kinds.append(kind)
        orders.append(order)
        if num_skipped:
            max(aggregates[first_aggregate:], key=lambda counts: int(counts.sum()))[list(own_stages)] += num_skipped
    orders = [[node if node >= 0 else len(stages) - 1 - node for node in order] for order in orders]
    pairs = [pair for order in orders for pair in pairwise(order)]
    for (reader_stage, reader_pass, microbatch), node in node_of.items():
        step = _STEPS.get(reader_pass, 0)
        source = node_of.get((reader_stage + step, reader_pass, microbatch)) if step else None
        if source is not None:
            pairs.append((source, node))
    predecessors, successors = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return Excerpt(
        np.array(stages),
        np.array(kinds),
        np.array(aggregates, dtype=np.int64).reshape(len(aggregates), num_groups * num_chunks, len(schedule.passes)),
        predecessors,
        successors,
        tuple(map(np.array, orders)),
    )

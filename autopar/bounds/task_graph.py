"""Who waits for whom in a step, of which the middle is cut short where there are many microbatches.

A bubble is at the ends of a step: groups that wait for the first microbatches, and for others after the last ones. So
the passes of these are kept, and on each group one node stands for all tasks between two of them. What the node waits
for and who waits for it are left out but for its own group, which makes no path longer.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Pass, Schedule, chunks_of

Ints = NDArray[np.int64]

MOST_TASKS = 576
"""Of a step that is not cut short."""

KEPT_TASKS = 192
"""Of one that is, about: in all groups together, of the first and the last microbatches."""

MOST_WHOLE = 256
"""Of more stages only forwards are kept of the first microbatches, and only the other passes of the last ones."""

_PASSES = list(Pass)
_STEPS = {Pass.FORWARD: -1, Pass.BACKWARD: 1}


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """Tasks of a step, and nodes that stand for several.

    Attributes:
        stage: (tasks,) stage of each task that is kept.
        kind: (tasks,) number of its pass.
        middles: (nodes, stages, passes) how many tasks each of the other nodes stands for. They are numbered after the
            tasks, and each belongs to one group.
        first: (pairs,) nodes that others wait for: the one before on their group, or the one whose message they read.
        second: (pairs,) those that wait for them.
        runs: By group its nodes, in their order.
    """

    stage: Ints
    kind: Ints
    middles: Ints
    first: Ints
    second: Ints
    runs: tuple[Ints, ...]


def num_tasks(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> int:
    """Return of how many tasks a step is."""
    return len(schedule.passes) * num_groups * num_chunks * num_microbatches


def is_cut_short(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether nodes stand for several tasks."""
    return num_tasks(schedule, num_groups, num_microbatches, num_chunks) > MOST_TASKS


@lru_cache(maxsize=64)
def excerpt(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Excerpt:
    """Return who waits for whom.

    >>> from autopar.schedule import SCHEDULES
    >>> found = excerpt(SCHEDULES["forward-only"], num_groups=1, num_microbatches=3)
    >>> found.first.tolist(), found.second.tolist(), len(found.middles)
    ([0, 1], [1, 2], 0)
    >>> found = excerpt(SCHEDULES["1f1b"], num_groups=2, num_microbatches=1024)
    >>> len(found.stage), len(found.middles), int(found.middles.sum())
    (192, 4, 3904)
    """
    each, looked_at = num_microbatches, num_microbatches
    if is_cut_short(schedule, num_groups, num_microbatches, num_chunks):
        each = max(1, KEPT_TASKS // (2 * num_groups * num_chunks * len(schedule.passes)))
        # As many more make the middle longer, and nothing else; schedules take them in rounds of all groups.
        enough = schedule.enough(num_groups) + 2 * each + num_groups
        if num_microbatches > enough:
            looked_at -= int((num_microbatches - enough) // num_groups) * num_groups
    more, whole = num_microbatches - looked_at, num_groups * num_chunks <= MOST_WHOLE
    stages_of = chunks_of(schedule.groups(num_groups, num_chunks))
    stages, kinds, middles = list[int](), list[int](), list[Ints]()
    place: dict[tuple[int, Pass, int], int] = {}
    runs = []
    for chunks, order in zip(stages_of, schedule.orders(num_groups, looked_at, num_chunks), strict=True):
        run, before = list[int](), len(middles)
        for task in order:
            stage, kind = chunks[task.chunk], _PASSES.index(task.kind)
            is_early = task.microbatch < each and (whole or task.kind is Pass.FORWARD)
            is_late = task.microbatch >= looked_at - each and (whole or task.kind is not Pass.FORWARD)
            if not is_early and not is_late:
                if not run or run[-1] >= 0:
                    run.append(-1 - len(middles))
                    middles.append(np.zeros((num_groups * num_chunks, len(schedule.passes)), dtype=np.int64))
                middles[-1][stage, kind] += 1
            else:
                place[stage, task.kind, task.microbatch] = len(stages)
                run.append(len(stages))
                stages.append(stage)
                kinds.append(kind)
        runs.append(run)
        if more:
            max(middles[before:], key=lambda counts: int(counts.sum()))[list(chunks)] += more
    runs = [[node if node >= 0 else len(stages) - 1 - node for node in run] for run in runs]
    pairs = [pair for run in runs for pair in pairwise(run)]
    for (own, what, microbatch), node in place.items():
        step = _STEPS.get(what, 0)
        source = place.get((own + step, what, microbatch)) if step else None
        if source is not None:
            pairs.append((source, node))
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return Excerpt(
        np.array(stages),
        np.array(kinds),
        np.array(middles, dtype=np.int64).reshape(len(middles), num_groups * num_chunks, len(schedule.passes)),
        first,
        second,
        tuple(map(np.array, runs)),
    )

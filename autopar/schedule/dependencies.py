"""Who waits for whom: a forward for the forward of the stage before, a backward for the backward of the next one.

Besides, a backward waits for the forward and a weight pass for the backward of its own stage. Sending does not wait for
the receiver.
"""

from collections import deque
from collections.abc import Sequence

from autopar.errors import ProgramError
from autopar.schedule.base import Pass, Task, chunks_of


def follow(orders: Sequence[Sequence[Task]], groups: Sequence[int]) -> list[tuple[int, Task]]:
    """Return all tasks as (stage, task), each after those it needs, every group keeping to its order.

    Args:
        orders: Tasks of each group in order.
        groups: The group of every stage.

    Raises:
        ProgramError: If groups wait for each other, or for a task that nobody runs.
    """
    chunks, last = chunks_of(groups), len(groups) - 1
    done: set[tuple[int, Pass, int]] = set()
    followed: list[tuple[int, Task]] = []
    position = [0] * len(orders)
    waking, awake = deque(range(len(orders))), set(range(len(orders)))
    while waking:
        group = waking.popleft()
        awake.discard(group)
        order = orders[group]
        while position[group] < len(order):
            task = order[position[group]]
            stage = chunks[group][task.chunk]
            needs = _needs(stage, task, last)
            if not done.issuperset(needs):
                break
            done.add((stage, task.kind, task.microbatch))
            followed.append((stage, task))
            position[group] += 1
            reader = stage + 1 if task.kind is Pass.FORWARD else stage - 1
            if task.kind is not Pass.WEIGHT and 0 <= reader <= last and groups[reader] not in (group, *awake):
                waking.append(groups[reader])
                awake.add(groups[reader])
    waiting = [
        f"group {group} for what {order[place]} needs"
        for group, (order, place) in enumerate(zip(orders, position, strict=True))
        if place < len(order)
    ]
    if waiting:
        raise ProgramError(f"the schedule deadlocks: {', '.join(waiting)}")
    return followed


def _needs(stage: int, task: Task, last: int) -> tuple[tuple[int, Pass, int], ...]:
    """Return the passes that have to be done before a task of a stage."""
    match task.kind:
        case Pass.FORWARD:
            return ((stage - 1, Pass.FORWARD, task.microbatch),) if stage else ()
        case Pass.BACKWARD:
            own = (stage, Pass.FORWARD, task.microbatch)
            return (own, (stage + 1, Pass.BACKWARD, task.microbatch)) if stage < last else (own,)
        case Pass.WEIGHT:
            return ((stage, Pass.BACKWARD, task.microbatch),)

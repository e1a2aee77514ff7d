"""Data dependencies between the tasks of a pipeline: a topological order of all tasks, or the error of a deadlock.

A forward depends on the forward of the previous stage, a backward on the backward of the next stage and on the forward
of its own stage, a weight pass on the backward of its own stage. A sender never waits for its receiver.
"""

from collections import deque
from collections.abc import Sequence

from autopar.errors import ProgramError
from autopar.schedule.base import Pass, Task, chunks_of


def topological_order(orders: Sequence[Sequence[Task]], groups: Sequence[int]) -> list[tuple[int, Task]]:
    """Return all tasks as (stage, task) in a topological order that keeps the order of every group.

    Args:
        orders: Tasks of each group in execution order.
        groups: The group of every stage.

    Raises:
        ProgramError: If the groups deadlock, or a task depends on a task that no group runs.
    """
    chunks, last = chunks_of(groups), len(groups) - 1
    done: set[tuple[int, Pass, int]] = set()
    ordered: list[tuple[int, Task]] = []
    position = [0] * len(orders)
    pending, queued = deque(range(len(orders))), set(range(len(orders)))
    while pending:
        group = pending.popleft()
        queued.discard(group)
        order = orders[group]
        while position[group] < len(order):
            task = order[position[group]]
            stage = chunks[group][task.chunk]
            dependencies = _dependencies(stage, task, last)
            if not done.issuperset(dependencies):
                break
            done.add((stage, task.kind, task.microbatch))
            ordered.append((stage, task))
            position[group] += 1
            reader = stage + 1 if task.kind is Pass.FORWARD else stage - 1
            if task.kind is not Pass.WEIGHT and 0 <= reader <= last and groups[reader] not in (group, *queued):
                pending.append(groups[reader])
                queued.add(groups[reader])
    waiting = [
        f"group {group} waits for the inputs of {order[place]}"
        for group, (order, place) in enumerate(zip(orders, position, strict=True))
        if place < len(order)
    ]
    if waiting:
        raise ProgramError(f"the schedule deadlocks: {', '.join(waiting)}")
    return ordered


def _dependencies(stage: int, task: Task, last: int) -> tuple[tuple[int, Pass, int], ...]:
    """Return the passes that a task of a stage depends on, as (stage, pass, microbatch)."""
    match task.kind:
        case Pass.FORWARD:
            return ((stage - 1, Pass.FORWARD, task.microbatch),) if stage else ()
        case Pass.BACKWARD:
            own = (stage, Pass.FORWARD, task.microbatch)
            return (own, (stage + 1, Pass.BACKWARD, task.microbatch)) if stage < last else (own,)
        case Pass.WEIGHT:
            return ((stage, Pass.BACKWARD, task.microbatch),)

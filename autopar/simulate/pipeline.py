"""When each stage runs each microbatch: a longest path over stages x microbatches.

Groups of devices run their tasks in the fixed order of the schedule and never wait for anything but each other, weight
passes for nobody, so no event queue is needed: a group runs on until it needs a value nobody has sent yet, and goes on
when its neighbour has. From one group to another there is one channel, first in, first out:

    start(task)   = max(end of the group's previous task, arrival of the task's input)
    arrival       = max(end of the sender's task, channel free) + seconds of the transfer

Between stages of one and the same group nothing is sent.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.schedule import Pass, Task, chunks_of


class Run(NamedTuple):
    """A task with its times in seconds.

    Attributes:
        task: What runs.
        start: When it starts.
        end: When it ends.
        sent: When the neighbour had finished what this task waited for; 0 if it waits for nobody.
    """

    task: Task
    start: float
    end: float
    sent: float


class Transfer(NamedTuple):
    """Values of one microbatch, which `task` has made, on their way from stage `sender` to stage `receiver`."""

    sender: int
    receiver: int
    task: Task
    start: float
    end: float


def run_pipeline(
    orders: Sequence[Sequence[Task]],
    groups: Sequence[int],
    seconds: Sequence[Mapping[Pass, float]],
    forward_send: Sequence[float],
    backward_send: Sequence[float],
    last_backward: Sequence[float] = (),
) -> tuple[list[list[Run]], list[Transfer]]:
    """Return what every group of devices does when, and the transfers in between.

    Args:
        orders: Tasks of each group in order.
        groups: The group of every stage.
        seconds: Duration of each pass on each stage.
        forward_send: Seconds of a transfer from stage i to i + 1; one less than there are stages.
        backward_send: Seconds of a transfer from stage i + 1 to i.
        last_backward: By how much the last pass of each stage that makes gradients is longer than the others; nothing
            if empty.

    Returns:
        The runs of each group in order, and the transfers.
    """
    chunks, last = chunks_of(groups), len(seconds) - 1
    runs: list[list[Run]] = [[] for _ in orders]
    transfers: list[Transfer] = []
    # (finished, arrived) of the input of a task, by receiving group and task; a key is there once the neighbour is done
    sent: list[dict[Task, tuple[float, float]]] = [{} for _ in orders]
    channel_free: dict[tuple[int, int], float] = {}
    final = max((task.microbatch for order in orders for task in order), default=0)
    made = Pass.WEIGHT if any(task.kind is Pass.WEIGHT for order in orders for task in order) else Pass.BACKWARD
    longer = last_backward or [0.0] * len(seconds)
    clock = [0.0] * len(orders)
    ready = deque(range(len(orders)))
    while ready:
        group = ready.popleft()
        order, done, inbox = orders[group], runs[group], sent[group]
        woken: set[int] = set()
        while len(done) < len(order):
            task = order[len(done)]
            stage = chunks[group][task.chunk]
            forward, weight = task.kind is Pass.FORWARD, task.kind is Pass.WEIGHT
            if not weight and ((stage > 0) if forward else (stage < last)):
                message = inbox.pop(task, None)
                if message is None:
                    break
                finished, arrived = message
            else:
                finished = arrived = 0.0
            start = max(clock[group], arrived)
            end = start + seconds[stage][task.kind]
            if task.microbatch == final and task.kind is made:
                end += longer[stage]
            clock[group] = end
            done.append(Run(task, start, end, finished))
            receiver = stage + 1 if forward else stage - 1
            if weight or not 0 <= receiver <= last:
                continue
            neighbour = groups[receiver]
            chunk = chunks[neighbour].index(receiver)
            arrival = end
            if neighbour != group:
                link = (group, neighbour)
                begin = max(end, channel_free.get(link, 0.0))
                arrival = begin + (forward_send[stage] if forward else backward_send[receiver])
                channel_free[link] = arrival
                transfers.append(Transfer(stage, receiver, task, begin, arrival))
                woken.add(neighbour)
            sent[neighbour][task if chunk == task.chunk else task._replace(chunk=chunk)] = (end, arrival)
        ready.extend(woken)
    stuck = [group for group, order in enumerate(orders) if len(runs[group]) < len(order)]
    assert not stuck, f"the schedule deadlocks: groups {stuck} wait for tasks nobody runs"
    return runs, transfers

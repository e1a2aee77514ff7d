"""When each stage runs each microbatch: a longest path over stages x microbatches.

Stages run their tasks in the fixed order of the schedule and never wait for anything but their neighbours, so no event
queue is needed: a stage runs on until it needs a value nobody has sent yet, and goes on when its neighbour has. Between
neighbouring stages there is one channel per direction, first in, first out:

    start(task)   = max(end of the stage's previous task, arrival of the task's input)
    arrival       = max(end of the sender's task, channel free) + seconds of the transfer
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from autopar.schedule import Pass, Task


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
    """Values of one microbatch on their way from stage `sender` to stage `receiver`."""

    sender: int
    receiver: int
    task: Task
    start: float
    end: float


def run_pipeline(
    orders: Sequence[Sequence[Task]],
    seconds: Sequence[dict[Pass, float]],
    forward_send: Sequence[float],
    backward_send: Sequence[float],
) -> tuple[list[list[Run]], list[Transfer]]:
    """Return what every stage does when, and the transfers in between.

    Args:
        orders: Tasks of each stage in order.
        seconds: Duration of a forward and of a backward on each stage.
        forward_send: Seconds of a transfer from stage i to i + 1; one less than there are stages.
        backward_send: Seconds of a transfer from stage i + 1 to i.

    Returns:
        The runs of each stage in order, and the transfers.
    """
    last = len(orders) - 1
    runs: list[list[Run]] = [[] for _ in orders]
    transfers: list[Transfer] = []
    # (finished, arrived) of the input of a task, by receiving stage and task; a key is there once the neighbour is done
    sent: list[dict[Task, tuple[float, float]]] = [{} for _ in orders]
    channel_free: dict[tuple[int, int], float] = {}
    clock = [0.0] * len(orders)
    ready = deque(range(len(orders)))
    while ready:
        stage = ready.popleft()
        order, done, inbox, took = orders[stage], runs[stage], sent[stage], seconds[stage]
        woken: set[int] = set()
        while len(done) < len(order):
            task = order[len(done)]
            forward = task.kind is Pass.FORWARD
            if (stage > 0) if forward else (stage < last):
                message = inbox.pop(task, None)
                if message is None:
                    break
                finished, arrived = message
            else:
                finished = arrived = 0.0
            start = max(clock[stage], arrived)
            clock[stage] = end = start + took[task.kind]
            done.append(Run(task, start, end, finished))
            receiver = stage + 1 if forward else stage - 1
            if 0 <= receiver <= last:
                link = (stage, receiver)
                begin = max(end, channel_free.get(link, 0.0))
                arrival = begin + (forward_send[stage] if forward else backward_send[receiver])
                channel_free[link] = arrival
                transfers.append(Transfer(stage, receiver, task, begin, arrival))
                sent[receiver][task] = (end, arrival)
                woken.add(receiver)
        ready.extend(woken)
    stuck = [stage for stage, order in enumerate(orders) if len(runs[stage]) < len(order)]
    assert not stuck, f"the schedule deadlocks: stages {stuck} wait for tasks nobody runs"
    return runs, transfers

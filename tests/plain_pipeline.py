"""The pipeline of the simulator as a plain loop: a group runs on until it needs a value that nobody has sent yet."""

from collections import deque
from collections.abc import Mapping, Sequence

from autopar.schedule import Pass, Task, chunks_of
from autopar.simulate.pipeline import Run, Transfer


def plain_pipeline(
    orders: Sequence[Sequence[Task]],
    groups: Sequence[int],
    seconds: Sequence[Mapping[Pass, float]],
    forward_send: Sequence[float],
    backward_send: Sequence[float],
    last_backward: Sequence[float] = (),
) -> tuple[list[list[Run]], list[Transfer]]:
    """Return the runs of each group in order, and the transfers; arguments as of `run_pipeline`, but for the orders."""
    chunks, last = chunks_of(groups), len(seconds) - 1
    final = max((task.microbatch for order in orders for task in order), default=0)
    made = Pass.WEIGHT if any(Pass.WEIGHT in {task.kind for task in order} for order in orders) else Pass.BACKWARD
    nothing = (0.0, 0.0)
    # (finished, arrived) of the input of a forward and of a backward, by stage and microbatch; None until it is sent
    forwards: list[list[tuple[float, float] | None]] = [[None] * (final + 1) for _ in seconds]
    backwards: list[list[tuple[float, float] | None]] = [[None] * (final + 1) for _ in seconds]
    forwards[0], backwards[last] = [nothing] * (final + 1), [nothing] * (final + 1)
    spent = {kind: [each.get(kind, 0.0) for each in seconds] for kind in Pass}
    longer = [*last_backward] or [0.0] * len(seconds)
    runs: list[list[Run]] = [[] for _ in orders]
    transfers: list[Transfer] = []
    channel_free: dict[tuple[int, int], float] = {}
    clocks = [0.0] * len(orders)
    ready = deque(range(len(orders)))
    forward_pass, weight_pass = Pass.FORWARD, Pass.WEIGHT
    while ready:
        group = ready.popleft()
        order, done, own, clock = orders[group], runs[group], chunks[group], clocks[group]
        woken: set[int] = set()
        for task in order[len(done) :]:
            kind, microbatch, chunk = task
            stage = own[chunk]
            forward = kind is forward_pass
            if forward:
                message = forwards[stage][microbatch]
            else:
                message = nothing if kind is weight_pass else backwards[stage][microbatch]
            if message is None:
                break
            finished, arrived = message
            start = clock if clock > arrived else arrived
            clock = start + spent[kind][stage]
            if microbatch == final and kind is made:
                clock += longer[stage]
            done.append(Run(task, start, clock, finished))
            receiver = stage + 1 if forward else stage - 1
            if kind is weight_pass or not 0 <= receiver <= last:
                continue
            neighbour, arrival = groups[receiver], clock
            if neighbour != group:
                link = (group, neighbour)
                begin = max(clock, channel_free.get(link, 0.0))
                arrival = begin + (forward_send[stage] if forward else backward_send[receiver])
                channel_free[link] = arrival
                transfers.append(Transfer(stage, receiver, task, begin, arrival))
                woken.add(neighbour)
            (forwards if forward else backwards)[receiver][microbatch] = (clock, arrival)
        clocks[group] = clock
        ready.extend(woken)
    stuck = [group for group, order in enumerate(orders) if len(runs[group]) < len(order)]
    assert not stuck, f"the schedule deadlocks: groups {stuck} wait for tasks nobody runs"
    return runs, transfers

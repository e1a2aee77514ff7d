"""When each stage runs each microbatch: a longest path over stages x microbatches.

Groups of devices run their tasks in the fixed order of the schedule and never wait for anything but each other, weight
passes for nobody, so no event queue is needed: tasks are timed in an order in which each comes after those it waits
for. From one group to another there is one channel, first in, first out:

    start(task)   = max(end of the group's previous task, arrival of the task's input)
    arrival       = max(end of the sender's task, channel free) + seconds of the transfer

Between stages of one and the same group nothing is sent. A step may have a million tasks, so they lie in arrays, and
the loop over them is compiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.schedule import Pass, Task, chunks_of
from autopar.schedule.timing import TaskGraph

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PASSES = tuple(Pass)
"""Passes by their numbers in arrays."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The tasks of a group of devices in the order in which it runs them; arrays are (tasks,).

    Attributes:
        kind: Pass of each, a number in `PASSES`.
        microbatch: Microbatch of each.
        chunk: Which of the stages of the group each belongs to.
        start: When each starts, in seconds.
        end: When each ends.
        sent: When the neighbour had finished what each waited for; 0 if it waits for nobody.
    """

    kind: IntArray
    microbatch: IntArray
    chunk: IntArray
    start: FloatArray
    end: FloatArray
    sent: FloatArray

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: int) -> Run:
        task = Task(PASSES[self.kind[index]], int(self.microbatch[index]), int(self.chunk[index]))
        return Run(task, float(self.start[index]), float(self.end[index]), float(self.sent[index]))

    def __iter__(self) -> Iterator[Run]:
        columns = (self.kind, self.microbatch, self.chunk, self.start, self.end, self.sent)
        for kind, microbatch, chunk, start, end, sent in zip(*(column.tolist() for column in columns), strict=True):
            yield Run(Task(PASSES[kind], microbatch, chunk), start, end, sent)

    def counts(self, num_chunks: int) -> IntArray:
        """Return the number of tasks by chunk and pass, (chunks, passes)."""
        cells = np.bincount(self.chunk * len(PASSES) + self.kind, minlength=num_chunks * len(PASSES))
        return np.asarray(cells.reshape(num_chunks, len(PASSES)), dtype=np.int64)


class Transfer(NamedTuple):
    """Values of one microbatch, which `task` has made, on their way from stage `sender` to stage `receiver`."""

    sender: int
    receiver: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Transfers between stages, those of a channel in order; arrays are (transfers,).

    Attributes:
        sender: Stage that sends.
        receiver: Stage that receives.
        kind: Pass that has made what is sent, a number in `PASSES`.
        microbatch: Its microbatch.
        chunk: Which of the stages of its group the sender is.
        start: When each starts, in seconds.
        end: When each ends.
    """

    sender: IntArray
    receiver: IntArray
    kind: IntArray
    microbatch: IntArray
    chunk: IntArray
    start: FloatArray
    end: FloatArray

    def __len__(self) -> int:
        return len(self.sender)

    def __iter__(self) -> Iterator[Transfer]:
        columns = (self.sender, self.receiver, self.kind, self.microbatch, self.chunk, self.start, self.end)
        for sender, receiver, kind, microbatch, chunk, start, end in zip(
            *(each.tolist() for each in columns), strict=True
        ):
            yield Transfer(sender, receiver, Task(PASSES[kind], microbatch, chunk), start, end)


def run_pipeline(
    tasks: TaskGraph,
    groups: Sequence[int],
    seconds: Sequence[Mapping[Pass, float]],
    forward_send: Sequence[float],
    backward_send: Sequence[float],
    last_backward: Sequence[float] = (),
) -> tuple[list[Runs], Transfers]:
    """Return what every group of devices does when, and the transfers in between.

    Args:
        tasks: The tasks of all groups.
        groups: The group of every stage.
        seconds: Duration of each pass on each stage.
        forward_send: Seconds of a transfer from stage i to i + 1; one less than there are stages.
        backward_send: Seconds of a transfer from stage i + 1 to i.
        last_backward: By how much the last pass of each stage that makes gradients is longer than the others; nothing
            if empty.

    Returns:
        The runs of each group in order, and the transfers.
    """
    from autopar.schedule.task_loops import longest_path  # numba is imported only when it is needed

    chunks = chunks_of(groups)
    chunk_of = np.empty(len(groups), dtype=np.int64)
    for own in chunks:
        chunk_of[list(own)] = np.arange(len(own))
    stage, kind, microbatch = tasks.stage, tasks.kind, tasks.microbatch
    durations = np.array([[each.get(own, 0.0) for own in PASSES] for each in seconds])[stage, kind]
    if len(last_backward):
        weight = PASSES.index(Pass.WEIGHT)
        makes = weight if (kind == weight).any() else PASSES.index(Pass.BACKWARD)
        longer = np.asarray(last_backward, dtype=np.float64)
        durations += np.where((kind == makes) & (microbatch == microbatch.max()), longer[stage], 0.0)
    ahead, back = np.array([*forward_send, 0.0]), np.array([0.0, *backward_send])
    is_forward = kind == PASSES.index(Pass.FORWARD)
    hop = np.where(is_forward, ahead[stage], back[stage])
    starts, ends, departures = longest_path(
        tasks.group, durations, tasks.source, tasks.link, hop, len(chunks), tasks.num_links
    )
    sent = np.where(tasks.source >= 0, ends[tasks.source], 0.0)
    order = np.argsort(tasks.group, kind="stable")
    stops = np.cumsum(np.bincount(tasks.group, minlength=len(chunks)))[:-1]
    runs = [
        Runs(kind[own], microbatch[own], chunk_of[stage[own]], starts[own], ends[own], sent[own])
        for own in np.split(order, stops)
    ]
    sends = np.flatnonzero(tasks.link >= 0)
    transfers = Transfers(
        sender=stage[sends],
        receiver=stage[sends] + np.where(is_forward[sends], 1, -1),
        kind=kind[sends],
        microbatch=microbatch[sends],
        chunk=chunk_of[stage[sends]],
        start=departures[sends],
        end=departures[sends] + hop[sends],
    )
    return runs, transfers

"""A rank that times events together with the others.

`python -m autopar.profile.worker FOLDER RANK` is what `autopar.profile.measure` starts on this machine; under torchrun
the command itself is a rank. All ranks go through the same events in the same order and meet before each one, also
before an event of a single device, so that memory bandwidth and clocks are shared as in a step. Rank 0 reports every
event as soon as it is timed, on standard output.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import msgspec
import numpy as np

from autopar.errors import AutoparError, ExecutionError
from autopar.events import Event, LaunchEvent, OverlapEvent, TransferEvent, event_id
from autopar.machine import pin_to_cores
from autopar.profile.actions import Action, Place, launch_work, model_action, overlap_action, transfer_action
from autopar.profile.groups import group_of_event
from autopar.profile.timed_tasks import Feed, Port, Work
from autopar.profile.timing import WARMUP, Sample, clock_of, repeats_for, sample_of
from autopar.ranks.communicator import Group
from autopar.ranks.worker import ErrorEvent, leave_process

REQUEST_FILE = "request.json"
STORE_FILE = "store"


class Item(msgspec.Struct, frozen=True):
    """An event of a request; its model, if it has one, lies in a file of its name."""

    event: Event
    inputs: tuple[Feed, ...] = ()
    outputs: tuple[Port, ...] = ()
    has_model: bool = False


class ProfileRequest(msgspec.Struct, frozen=True):
    """What ranks are asked to time.

    Attributes:
        items: Events in order.
        ranks: Number of ranks.
        local_ranks: Ranks of each node.
        backend: "gloo" or "nccl".
        threads: Threads of a rank on the CPU.
        seconds: Seconds for the timed calls of an event.
        pin: Whether each rank stays on cores of its own.
        known: Names of events that are left out; those of rank 0 count.
    """

    items: tuple[Item, ...]
    ranks: int
    local_ranks: int
    backend: str
    threads: int
    seconds: float
    pin: bool
    known: tuple[str, ...] = ()


class Found(msgspec.Struct, frozen=True, tag="found"):
    """An event was timed."""

    id: str
    seconds: float
    low: float
    high: float
    repeats: int
    warmup: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An event cannot be timed here."""

    id: str
    problem: str


Said = Found | Failed | ErrorEvent


def measure(request: ProfileRequest, folder: Path, rank: int, init_method: str, tell: Callable[[Said], None]) -> None:
    """Be one rank: time all events of a request; rank 0 tells what it finds.

    Args:
        request: The request.
        folder: Where models lie.
        rank: Own number.
        init_method: Where the ranks meet.
        tell: Called with every result, on rank 0.

    Raises:
        AutoparError: If the ranks do not meet, or there are no GPUs for them.
    """
    if request.pin:
        pin_to_cores(rank % request.local_ranks, request.threads)
    import torch

    from autopar.ranks import torch_world
    from autopar.ranks.compiled_models import Engine

    torch.set_num_threads(request.threads)
    memory = torch_world.join(request.backend, init_method, rank, request.ranks)
    groups = {group_of_event(item.event, request.ranks, request.local_ranks) for item in request.items}
    world = tuple(range(request.ranks))
    wanted = sorted({group for group in groups if group is not None and len(group) > 1} | {world})
    communicator = torch_world.TorchCommunicator(wanted, request.backend)
    place = Place(memory, Engine(memory, request.threads, memory.stream()), communicator, rank)
    ranks, known = Ranks(place, world), set(torch_world.told_by_first(request.known))
    for item in request.items:
        name = event_id(item.event)
        if name in known:
            continue
        group = group_of_event(item.event, request.ranks, request.local_ranks)
        if group is None:
            continue  # more devices than there are: the fitted law says what it takes
        work = None
        if item.has_model:
            work = Work((folder / f"{name}.onnx").read_bytes(), item.inputs, item.outputs)
        try:
            action = _action(item.event, work, group, place)
            problem = ""
        except ExecutionError as error:
            action, problem = None, str(error.args[0])
        if not ranks.all_true(not problem):  # all ranks have the same model and the same runtime
            if rank == 0:
                tell(Failed(name, problem or "another rank cannot run it"))
            continue
        is_send = isinstance(item.event, TransferEvent) and item.event.operation == "send"
        typical = fmean if isinstance(item.event, TransferEvent) and not is_send else median
        sample = ranks.timed(action if rank in group else None, group, request.seconds, typical, first=is_send)
        place.engine.clear()
        if rank == 0:
            tell(Found(name, sample.seconds, sample.low, sample.high, sample.repeats, sample.warmup))
    ranks.barrier()
    torch_world.leave()


def _action(event: Event, work: Work | None, group: Group, place: Place) -> Action | None:
    if place.rank not in group:
        return None
    match event:
        case TransferEvent():
            return transfer_action(event, group, place)
        case OverlapEvent():
            return overlap_action(event, group, place)
        case LaunchEvent():
            return model_action(launch_work(), place)
        case _:
            assert work is not None, "ops and pieces have a model"
            return model_action(work, place)


class Ranks:
    """What all ranks do together."""

    def __init__(self, place: Place, world: Group) -> None:
        assert place.communicator is not None, "there is one even of a single rank"
        self._place, self._world, self._communicator = place, world, place.communicator
        self._clock = clock_of(place.memory)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.largest(0.0)

    def largest(self, number: float) -> float:
        """Return the largest number of all ranks."""
        if len(self._world) == 1:
            return number
        memory = self._place.memory
        tensor = memory.load(np.array([number], np.float32))
        self._communicator.all_reduce(tensor, "max", self._world).wait()
        return float(memory.fetch(tensor)[0])

    def all_true(self, fact: bool) -> bool:
        """Whether something holds on all ranks."""
        return self.largest(0.0 if fact else 1.0) == 0.0

    def timed(
        self,
        action: Action | None,
        group: Group,
        budget: float,
        typical: Callable[[list[float]], float],
        *,
        first: bool,
    ) -> Sample:
        """Time an action that the ranks of a group take together.

        A rank that is slower than the others sets how often it is called. Of a send, the time is the smaller of what
        sender and receiver take, call by call: either may have waited for the other one.

        Args:
            action: What to call; None on ranks outside the group.
            group: The ranks.
            budget: Seconds for the timed calls.
            typical: What of the times counts: of collectives the mean, since over gloo a call takes a few tenths of a
                millisecond or a few milliseconds, by whether a rank sleeps, and a step waits for dozens of them.
            first: Whether it is a send.
        """
        for _ in range(WARMUP):
            if action is not None:
                action()
        self.barrier()
        probe = self._times(action, 1)
        repeats = repeats_for(self.largest(probe[0]), budget)
        if first:
            own = []
            for _ in range(repeats):
                self.barrier()
                own += self._times(action, 1)
        else:
            self.barrier()
            own = self._times(action, repeats)
        table = self._gathered(own)
        members = table[[self._world.index(rank) for rank in group]]
        if first:
            return sample_of(members.min(axis=0).tolist())
        samples = [sample_of(row.tolist(), typical) for row in members]
        return Sample(
            float(np.mean([one.seconds for one in samples])),
            float(np.mean([one.low for one in samples])),
            float(np.mean([one.high for one in samples])),
            repeats,
        )

    def _times(self, action: Action | None, repeats: int) -> list[float]:
        return [0.0] * repeats if action is None else self._clock.times(action, repeats)

    def _gathered(self, own: list[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        memory, count = self._place.memory, len(self._world)
        if count == 1:
            return np.array([own])
        out = memory.empty((count, len(own)), "float64")
        self._communicator.all_gather(out, memory.load(np.array(own, np.float64)), self._world).wait()
        return np.asarray(memory.fetch(out)).reshape(count, len(own))


def main(folder: Path, rank: int) -> int:
    """Be one rank of the request in a folder; return the exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = msgspec.json.decode((folder / REQUEST_FILE).read_bytes(), type=ProfileRequest)
    try:
        measure(request, folder, rank, f"file://{folder / STORE_FILE}", say)
    except AutoparError as error:
        say(ErrorEvent(type(error).__name__, str(error.args[0]), error.hint))
        return leave_process(1)
    except Exception as error:  # the boundary of a process: the parent reports every error
        traceback.print_exc()
        say(ErrorEvent(type(error).__name__, traceback.format_exception_only(error)[-1].strip(), ""))
        return leave_process(1)
    return leave_process(0)


def say(said: Said) -> None:
    """Write a line of JSON to standard output."""
    sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """End when standard input does: whoever started this process has gone."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

"""Events timed by ranks of this machine, or by those that torchrun started, into a database that grows meanwhile.

An interrupted profile goes on where it was: whatever was timed is in the database of the folder, and events that are
there for this machine are not timed again.
"""

import datetime
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from autopar.errors import JobError
from autopar.events import DATABASE_FILE, Database, LaunchEvent, Machine, Measurement, load_database, save_database
from autopar.machine import usable_cores
from autopar.profile.groups import group_of_event
from autopar.profile.timed_tasks import Task
from autopar.profile.worker import REQUEST_FILE, Failed, Found, Item, ProfileRequest, Said, measure
from autopar.progress import Progress, ProgressCallback, silent
from autopar.ranks.launch import check_installed, started, watch

_SAVED_EVERY = 2.0  # seconds between writes of the database while events are timed
_SOFTWARE = ("onnxruntime", "onnxruntime-gpu", "torch")


def open_database(folder: Path) -> Database:
    """Return the database of a folder, an empty one if it has none.

    Raises:
        DataError: If there is one and it is malformed.
    """
    return load_database(folder) if (folder / DATABASE_FILE).exists() else Database()


def profile_events(
    tasks: Iterable[Task],
    folder: Path,
    *,
    precision: str = "fp32",
    ranks: int = 1,
    backend: str = "gloo",
    threads: int = 1,
    seconds: float = 0.3,
    pin: bool = True,
    progress: ProgressCallback = silent,
) -> Database:
    """Time events and return the database of a folder with them; what it knows already is not timed again.

    Args:
        tasks: The events, with their models.
        folder: Folder of the database.
        precision: Precision of the job whose events they are.
        ranks: Processes that work at the same time; transfers take place among them.
        backend: "gloo", on the CPU, or "nccl", a GPU each.
        threads: Threads of each on the CPU.
        seconds: Seconds for the timed calls of an event.
        pin: Whether each process stays on cores of its own.
        progress: Told how far it is.

    Raises:
        JobError: If torch, onnxruntime or GPUs are missing.
        RankError: If a process fails; what was timed until then is in the folder.
        DataError: If the folder has a database that cannot be read.
    """
    check_installed(backend)
    world = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    local = int(os.environ["LOCAL_WORLD_SIZE"]) if world is not None else ranks
    ranks = ranks if world is None else int(world)
    machine = this_machine(backend, threads)
    every = {task.id: task for task in (Task(LaunchEvent()), *tasks)}
    database = open_database(folder).with_events([task.event for task in every.values()], precision)
    possible = [task for task in every.values() if group_of_event(task.event, ranks, local) is not None]
    known = tuple(task.id for task in possible if database.is_measured(task.id, machine.id, local))
    keeper = _Keeper(database, folder, machine, local, len(possible) - len(known), progress)
    items = tuple(_item(task) for task in possible)
    request = ProfileRequest(items, ranks, local, backend, threads, seconds, pin and backend == "gloo", known)
    if world is not None:
        return _under_torchrun(request, possible, keeper)
    if len(known) == len(possible):
        keeper.save()
        return keeper.database
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as name:
        _write_models(possible, Path(name), known)
        (Path(name) / REQUEST_FILE).write_bytes(msgspec.json.encode(request))
        try:
            with started("autopar.profile.worker", ranks, threads, Path(name)) as processes:
                watch(processes, Said, keeper.hear)
        finally:
            keeper.save()
    return keeper.database


def _under_torchrun(request: ProfileRequest, tasks: Sequence[Task], keeper: "_Keeper") -> Database:
    """Be one of the ranks that torchrun started; rank 0 keeps what is found, and knows what is known already."""
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as name:
        _write_models(tasks, Path(name))
        try:
            measure(request, Path(name), rank, "env://", keeper.hear)
        finally:
            if rank == 0:
                keeper.save()
    return keeper.database


def _item(task: Task) -> Item:
    work = task.work
    return Item(task.event) if work is None else Item(task.event, work.inputs, work.outputs, True)


def _write_models(tasks: Sequence[Task], folder: Path, known: Sequence[str] = ()) -> None:
    for task in tasks:
        if task.work is not None and task.id not in known:
            (folder / f"{task.id}.onnx").write_bytes(task.work.model)


class _Keeper:
    """The database while it grows."""

    def __init__(
        self, database: Database, folder: Path, machine: Machine, busy: int, total: int, progress: ProgressCallback
    ) -> None:
        self.database = database
        self._folder, self._machine, self._busy, self._total, self._progress = folder, machine, busy, total, progress
        self._found: dict[str, Measurement] = {}
        self._problems: dict[str, str] = {}
        self._done, self._saved = 0, time.monotonic()

    def hear(self, said: Said) -> None:
        """Note a result."""
        match said:
            case Found():
                self._found[said.id] = Measurement(
                    self._machine.id, self._busy, said.seconds, said.low, said.high, said.repeats, said.warmup,
                    datetime.datetime.now(tz=datetime.UTC).date().isoformat(), _load(),
                )  # fmt: skip
            case Failed():
                self._problems[said.id] = said.problem
        self._done += 1
        self._progress(Progress("time events", self._done, self._total))
        if time.monotonic() - self._saved > _SAVED_EVERY:
            self.save()

    def save(self) -> None:
        """Write what is known."""
        self.database = self.database.with_measurements(self._machine, self._found, self._problems)
        self._found, self._problems = {}, {}
        save_database(self.database, self._folder)
        self._saved = time.monotonic()


def _load() -> float:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def this_machine(backend: str, threads: int) -> Machine:
    """Return the description of this machine.

    Raises:
        JobError: If GPUs are asked for and there are none.
    """
    software = tuple((name, found) for name in _SOFTWARE if (found := _installed(name)))
    if backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise JobError("backend nccl needs GPUs, and torch finds none here", hint="use --backend gloo")
        properties = torch.cuda.get_device_properties(0)
        return Machine(str(properties.name), backend, threads, usable_cores(), software, float(properties.total_memory))
    return Machine(processor(), backend, threads, usable_cores(), software, _memory())


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def processor() -> str:
    """Return the name of the processor of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _memory() -> float:
    """Return the bytes of memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

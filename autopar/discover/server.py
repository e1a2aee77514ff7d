"""The process whose children run kernels, and what it does when one of them dies.

It is a fresh interpreter with a single thread, started by `workers`, so that it can fork at any time: a worker that
died is replaced within milliseconds, without importing anything again. A run that ended its worker is refused when the
search is done again; after several deaths a search tries no further candidates, and after as many more its task is
lost. The server ends when its caller's end of the connection is closed, or after a minute without tasks.
"""

import multiprocessing
import os
import resource
import signal
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

from autopar.discover.guard import Death, Guard, Searching, Task, new_board, perform, read_board
from autopar.execute import Executor

MAX_CRASHES = 24
"""Deaths of a task before its search is stopped; each costs the runs up to it again."""
MAX_HANGS = 3
"""The same for runs that took too long."""
_MAX_BYTES = 4 << 30
"""Memory of a worker; a kernel that wants more gets a MemoryError instead of ending other people's processes."""
_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Isolation:
    """How ops are run in processes of their own.

    Attributes:
        num_workers: Ops analysed at the same time.
        max_seconds: Wall time of one run of a kernel on small shapes; milliseconds are usual.
        executor: Makes the executor of a worker.
    """

    num_workers: int = field(default_factory=lambda: min(len(os.sched_getaffinity(0)), 4))
    max_seconds: float = 10.0
    executor: type[Executor] = Executor


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a task; the answer follows, as a message of its own.

    Attributes:
        index: Number of the task.
        deaths: Of workers, on the way.
        stopped: Whether the search was ended early because of them.
    """

    index: int
    deaths: tuple[Death, ...]
    stopped: bool


@dataclass(slots=True)
class _Job:
    """A task being done.

    Attributes:
        index: Number of the task.
        task: The task.
        deaths: So far.
        stop: The run from which on no more candidates are tried, and the deaths up to then; None before.
    """

    index: int
    task: Task
    deaths: list[Death] = field(default_factory=list)
    stop: tuple[int, int] | None = None

    def survives(self, death: Death) -> bool:
        """Take note of a death; return whether the task is worth another worker."""
        self.deaths.append(death)
        recent = self.deaths[self.stop[1] if self.stop else 0 :]
        if len(recent) < MAX_CRASHES and sum(death.hung for death in recent) < MAX_HANGS:
            return True
        if self.stop is None and isinstance(self.task, Searching):
            self.stop = (death.number, len(self.deaths))
            return True
        return False


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    board: mmap
    job: _Job | None = None

    def give(self, job: _Job) -> None:
        self.job = job
        refused = frozenset(death.number for death in job.deaths)
        self.pipe.send((job.task, refused, job.stop[0] if job.stop else None))

    def bury(self, isolation: Isolation) -> Death:
        """Return what ended the process."""
        self.pipe.close()
        self.process.join()
        code = self.process.exitcode
        assert code is not None, "the process has been joined"
        number = read_board(self.board)
        if code == -signal.SIGALRM:
            return Death(number, f"took more than {isolation.max_seconds:g} s", hung=True)
        return Death(number, f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}")


def serve(descriptor: int) -> None:
    """Do tasks until the caller closes the connection.

    Args:
        descriptor: Of the server's end of the connection. The first message is an `Isolation`, the others are pairs of
            a number and a `Task`; the caller has at most as many tasks unanswered as there are workers.
    """
    caller = Connection(descriptor)
    isolation: Isolation = caller.recv()
    _import_kernels()
    crew: list[_Worker] = []
    caller.send("ready")
    try:
        while True:
            ready = wait([caller, *(worker.pipe for worker in crew)], _IDLE_SECONDS)
            if not ready and not any(worker.job for worker in crew):
                return
            for worker in [worker for worker in crew if worker.pipe in ready]:
                _attend(worker, crew, caller, isolation)
            if caller in ready:
                index, task = caller.recv()
                idle = next((worker for worker in crew if worker.job is None), None)
                if idle is None:
                    crew.append(idle := _hire(isolation))
                idle.give(_Job(index, task))
    except (EOFError, ConnectionError):
        return  # the caller is gone
    finally:
        for worker in crew:
            worker.process.kill()


def _import_kernels() -> None:
    """Import what running an op needs, once for all workers; nothing is run."""
    from onnx.helper import make_graph, make_node
    from onnx.reference import ReferenceEvaluator

    import autopar.execute.kernels
    import autopar.ir.functions  # noqa: F401

    ReferenceEvaluator(make_graph([make_node("Identity", [], [])], "empty", [], []), opsets={"": 24})


def _attend(worker: _Worker, crew: list[_Worker], caller: Connection, isolation: Isolation) -> None:
    """Hand on the answer of a worker, or replace it if it died."""
    job = worker.job
    try:
        answer = worker.pipe.recv_bytes()
    except (EOFError, ConnectionError):
        crew.remove(worker)
        death = worker.bury(isolation)
        if job is None:
            return
        if job.survives(death):
            crew.append(successor := _hire(isolation))
            successor.give(job)
            return
        _report(caller, job)
        caller.send(None)
        return
    assert job is not None, "only busy workers answer"
    worker.job = None
    _report(caller, job)
    caller.send_bytes(answer)


def _report(caller: Connection, job: _Job) -> None:
    caller.send(Report(job.index, tuple(job.deaths), job.stop is not None))


def _hire(isolation: Isolation) -> _Worker:
    """Return a new worker."""
    ours, theirs = Pipe()
    board = new_board()
    process = multiprocessing.get_context("fork").Process(
        target=_work, args=(theirs, board, isolation), daemon=True, name="autopar worker"
    )
    process.start()
    theirs.close()
    return _Worker(process, ours, board)


def _work(pipe: Connection, board: mmap, isolation: Isolation) -> None:
    """Do tasks until the server closes the pipe; the main function of a worker."""
    _leave_server(pipe)
    guard = Guard(isolation.executor(), board, isolation.max_seconds)
    answer: Any
    while True:
        try:
            task, refused, stop = pipe.recv()
        except EOFError:
            return
        try:
            answer = perform(task, guard, refused, stop)
        except Exception as error:  # whatever it is, it is the caller's to see
            answer = error
        pipe.send(answer)


def _leave_server(pipe: Connection) -> None:
    """Give up what belongs to the server or to other workers, and bound what a kernel can do to the machine."""
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # what a dying library prints helps nobody
        os.dup2(silence, descriptor)
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _MAX_BYTES if hard == resource.RLIM_INFINITY else min(_MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

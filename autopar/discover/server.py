"""The process whose children run kernels, and what it does when one of them dies.

It is a fresh interpreter with a single thread, started by `workers`, so that it can fork at any time: a worker that
died is replaced within milliseconds, without importing anything again. A run that ended its worker is refused when the
search is done again; after too many deaths a search tries no further candidates, and after as many more its task is
lost. The server ends when its caller's end of the connection is closed, or after a minute without tasks.
"""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any

from autopar.discover.guard import Death, Guard, Searching, Task, new_board, perform, read_board
from autopar.execute import Executor
from autopar.machine import usable_cores

_MAX_BYTES = 4 << 30
"""Memory of a worker; a kernel that wants more must not be the reason why other processes are ended."""
_START = 25
"""Runs that take as long as starting a worker."""
_MAX_STUCK = 3
"""Deaths after the same run; refusing it does not help then."""
_NO_MEMORY = 109
"""Exit code of a worker that has none left."""
_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Isolation:
    """How ops are run in processes of their own.

    Attributes:
        num_workers: Ops analysed at the same time.
        max_seconds: Wall time of one run of a kernel on small shapes; milliseconds are usual. After a run of a task
            took more, the others of that task get a tenth.
        max_hangs: Runs of a task that may take too long.
        max_repeats: Runs of a task that may be repeated because a worker died after them; starting another one counts
            as 25.
        executor: Makes the executor of a worker; pickled, and imported there.
    """

    num_workers: int = field(default_factory=lambda: min(usable_cores(), 4))
    max_seconds: float = 10.0
    max_hangs: int = 10
    max_repeats: int = 20_000
    executor: Callable[[], Executor] = Executor


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
        stop: The run from which on no more candidates are tried; None before it comes to that.
        forgiven: How many deaths there were then.
    """

    index: int
    task: Task
    deaths: list[Death] = field(default_factory=list)
    stop: int | None = None
    forgiven: int = 0

    def max_seconds(self, isolation: Isolation) -> float:
        """Return how long a run may take."""
        return isolation.max_seconds / (10 if any(death.hung for death in self.deaths) else 1)

    def survives(self, death: Death, isolation: Isolation) -> bool:
        """Take note of a death; return whether the task is worth another worker."""
        self.deaths.append(death)
        if sum(other.number == death.number for other in self.deaths) > _MAX_STUCK:
            return False
        recent = self.deaths[self.forgiven :]
        hangs, repeats = sum(death.hung for death in recent), sum(_START + death.number for death in recent)
        if hangs <= isolation.max_hangs and repeats <= isolation.max_repeats:
            return True
        if self.stop is None and isinstance(self.task, Searching):
            self.stop, self.forgiven = death.number, len(self.deaths)
            return True
        return False


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    board: mmap
    job: _Job | None = None

    def give(self, job: _Job, isolation: Isolation) -> None:
        """Have a job done."""
        self.job = job
        refused = frozenset(death.number for death in job.deaths)
        with suppress(ConnectionError):  # if it is dead already, waiting for its answer will tell
            self.pipe.send((job.task, refused, job.stop, job.max_seconds(isolation)))

    def bury(self, isolation: Isolation) -> Death:
        """Return what ended the process."""
        self.pipe.close()
        self.process.join()
        code = self.process.exitcode
        assert code is not None, "the process has been joined"
        number = read_board(self.board)
        if code == -signal.SIGALRM:
            seconds = self.job.max_seconds(isolation) if self.job else 0
            return Death(number, f"over {seconds:g} s", hung=True)
        if code == _NO_MEMORY:
            return Death(number, "out of memory")
        return Death(number, f"by {signal.Signals(-code).name}" if code < 0 else f"by exit code {code}")


def serve(descriptor: int) -> None:
    """Do tasks until the caller closes the connection.

    Args:
        descriptor: Of the server's end of the connection. The first message is an `Isolation`, the others are pairs of
            a number and a `Task`; the caller has at most as many tasks unanswered as there are workers.
    """
    caller = Connection(descriptor)
    _import_kernels()
    crew: list[_Worker] = []
    try:
        isolation: Isolation = caller.recv()
        caller.send("ready")
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
                idle.give(_Job(index, task), isolation)
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
    except (EOFError, OSError):  # OSError: it died in the middle of its answer
        crew.remove(worker)
        death = worker.bury(isolation)
        if job is None:
            return
        if job.survives(death, isolation):
            crew.append(successor := _hire(isolation))
            successor.give(job, isolation)
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
    guard = Guard(isolation.executor(), board)
    answer: Any
    while True:
        try:
            task, refused, stop, max_seconds = pipe.recv()
        except EOFError:
            return
        try:
            answer = perform(task, guard, refused, stop, max_seconds)
        except MemoryError:
            os._exit(_NO_MEMORY)  # whether the run or those before took it: the next one gets a new process
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
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the caller's caller left it at
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _MAX_BYTES if hard == resource.RLIM_INFINITY else min(_MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

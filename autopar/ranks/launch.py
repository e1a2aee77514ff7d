"""The parent of all ranks: starts a process for each, passes on progress, and ends them all when one fails.

It needs neither torch nor onnxruntime itself.
"""

import importlib.util
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from autopar import errors
from autopar.errors import AutoparError, JobError, RankError
from autopar.progress import Progress, ProgressCallback, silent
from autopar.ranks.job import check_request
from autopar.ranks.records import RunReport, RunRequest
from autopar.ranks.worker import REQUEST_FILE, ErrorEvent, Event, ProgressEvent, ReportEvent, run_worker

_POLL = 0.05  # seconds between looks at the processes
_GRACE = 1.0  # seconds in which ranks that fail together may say why, so that the cause is named and not a consequence
_STOP = 2.0  # seconds between asking a process to end and ending it
_STILL = 10.0  # seconds that a rank may be stopped (SIGSTOP, a debugger) while the others wait for it


_LINUX = {
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are here, whatever the host is called
    # glibc hands large blocks back to the system at once and gets them back as pages to be zeroed: with tensors that
    # come and go in every step that takes more time than the collectives that fill them
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Environment of the ranks, unless the user has said otherwise."""


@dataclass(slots=True, eq=False)
class RankProcess:
    """A rank as its parent sees it.

    Attributes:
        rank: Its number.
        process: The process.
        log: What it wrote to standard error.
        error: What it said before it gave up.
        failed: When it was found to have failed; 0 while it has not.
        stopped: When it was found to be stopped; 0 while it runs.
    """

    rank: int
    process: "subprocess.Popen[bytes]"
    log: Path
    error: ErrorEvent | None = None
    failed: float = field(default=0.0)
    stopped: float = field(default=0.0)


def check_installed(backend: str) -> None:
    """Check that what ranks need is there.

    Raises:
        JobError: If it is not.
    """
    missing = [name for name in ("torch", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise JobError(
            f"running a plan needs {' and '.join(missing)}, not installed here", hint='pip install "autopar[run]"'
        )
    if backend == "nccl" and not any(Path("/dev").glob("nvidia[0-9]*")):
        raise JobError("backend nccl needs GPUs, and there are none here", hint="use --backend gloo")


def run_plan(request: RunRequest, progress: ProgressCallback = silent) -> RunReport:
    """Run a plan on processes of this machine and return how it went.

    Args:
        request: What to run.
        progress: Told how far it is.

    Raises:
        JobError: If torch, onnxruntime or GPUs are missing, or the number of ranks is wrong.
        PlanError: If the plan cannot be read or belongs to another model.
        RankError: If a rank ends before its time; the message says which one and why.
    """
    check_request(request)
    check_installed(request.backend)
    request = replace(request, plan=str(Path(request.plan).resolve()))
    with tempfile.TemporaryDirectory(prefix="autopar-run-") as name:
        folder = Path(name)
        (folder / REQUEST_FILE).write_bytes(msgspec.json.encode(request))
        with started("autopar.ranks.worker", request.ranks, request.threads, folder) as processes:
            return _report(processes, progress)


def _report(processes: Sequence[RankProcess], progress: ProgressCallback) -> RunReport:
    """Wait until all ranks are done and return what rank 0 reports.

    Raises:
        RankError: If one fails.
    """
    reports: list[RunReport] = []

    def hear(event: Event) -> None:
        match event:
            case ProgressEvent(phase=phase, done=done, total=total, detail=detail):
                progress(Progress(phase, done, total, detail=detail))
            case ReportEvent(report=report):
                reports.append(report)

    watch(processes, Event, hear)
    if not reports:
        raise RankError("all ranks ended, but rank 0 reported nothing", hint="please report this")
    return reports[-1]


def run_under_torchrun(request: RunRequest, rank: int, progress: ProgressCallback = silent) -> RunReport | None:
    """Be one rank of those that torchrun started; rank 0 returns the report.

    Args:
        request: What to run.
        rank: Own number.
        progress: Told how far it is.

    Raises:
        AutoparError: As `run_plan` does.
    """
    check_request(request)
    check_installed(request.backend)
    return run_worker(request, rank, "env://", progress if rank == 0 else silent)


@contextmanager
def started(module: str, ranks: int, threads: int, folder: Path) -> Iterator[list[RankProcess]]:
    """Start all ranks; whatever happens inside, none is left behind.

    Args:
        module: What each of them runs, with the folder and its number as arguments.
        ranks: How many.
        threads: Threads of each.
        folder: Where the request lies, and what they write to standard error.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if sys.platform == "linux":
        environment = {**_LINUX, **environment}
    processes: list[RankProcess] = []
    try:
        for rank in range(ranks):
            log = folder / f"rank{rank}.log"
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(folder), str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the parent, which ends them
                )
            processes.append(RankProcess(rank, process, log))
        yield processes
    finally:
        _stop(processes)


def _stop(processes: Sequence[RankProcess]) -> None:
    for each in processes:
        if each.process.poll() is None:
            each.process.terminate()
    deadline = time.monotonic() + _STOP
    for each in processes:
        try:
            each.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
        for stream in (each.process.stdin, each.process.stdout):
            if stream is not None:
                stream.close()


def watch(processes: Sequence[RankProcess], kind: Any, hear: Callable[[Any], None]) -> None:
    """Wait until all ranks are done, and hand on what they report.

    Args:
        processes: The ranks.
        kind: Type of the events that they write to standard output, a line of JSON each; `ErrorEvent` among them.
        hear: Called with every event but errors.

    Raises:
        RankError: If one fails.
    """
    events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for each in processes:
        assert each.process.stdout is not None, "it is a pipe"
        threading.Thread(target=_listen, args=(each.rank, each.process.stdout, kind, events), daemon=True).start()
    open_streams = len(processes)
    while True:
        try:
            rank, event = events.get(timeout=_POLL)
        except queue.Empty:
            pass
        else:
            match event:
                case None:
                    open_streams -= 1
                case ErrorEvent():
                    processes[rank].error = event
                case _:
                    hear(event)
            continue
        now = time.monotonic()
        for each in processes:
            if not each.failed and (each.process.poll() or each.error):
                each.failed = now
        _check_running(processes, now)
        failed = [each for each in processes if each.failed]
        if failed and (now - min(each.failed for each in failed) > _GRACE or len(failed) == len(processes)):
            raise _cause(failed)
        if all(each.process.poll() == 0 for each in processes) and not open_streams:
            return


def _check_running(processes: Sequence[RankProcess], now: float) -> None:
    """Check that no rank has been stopped for long: the others would wait for it until they time out.

    Raises:
        RankError: If one has.
    """
    for each in processes:
        number = _stop_signal(each.process)
        each.stopped = (each.stopped or now) if number else 0.0
        if number and now - each.stopped > _STILL:
            raise RankError(
                f"rank {each.rank} was stopped by {signal.Signals(number).name} and did not go on for {_STILL:g} s",
                hint="run again; kill -CONT lets a stopped process go on",
            )


def _stop_signal(process: "subprocess.Popen[bytes]") -> int:
    """Return the signal that has stopped a process; 0 if it runs or has ended."""
    if process.poll() is not None:
        return 0
    state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    return 0 if state is None else state.si_status


def _listen(rank: int, stream: IO[bytes], kind: Any, events: "queue.SimpleQueue[tuple[int, Any]]") -> None:
    """Pass on a process's events, and None when there are no more.

    Libraries may write other lines, which are none of ours.
    """
    try:
        for line in stream:
            if line.startswith(b'{"type":'):
                events.put((rank, msgspec.json.decode(line, type=kind)))
    except msgspec.DecodeError as error:  # a thread that ended without a word would leave everybody waiting
        events.put((rank, ErrorEvent(type(error).__name__, f"it says what nobody understands: {error}", "")))
    finally:
        events.put((rank, None))


def _cause(failed: Sequence[RankProcess]) -> AutoparError:
    """Return the error of the rank that failed first of its own accord; the others lost their connection to it."""
    own = [each for each in failed if each.error is None or each.error.kind != RankError.__name__]
    first = min(own or failed, key=lambda each: (each.failed, each.rank))
    who, error = f"rank {first.rank}", first.error
    if error is not None:
        known = getattr(errors, error.kind, None)
        if isinstance(known, type) and issubclass(known, AutoparError):
            raised: AutoparError = known(f"{who}: {error.message}", hint=error.hint)
            return raised
        return RankError(f"{who} failed: {error.message}", hint="please report this, with the plan")
    code = first.process.poll() or 0
    if code < 0:
        name = signal.Signals(-code).name
        hint = "out of memory? use fewer samples, or a plan with more GPUs" if code == -signal.SIGKILL else ""
        return RankError(f"{who} was killed by {name}", hint=_last_lines(first.log) or hint)
    return RankError(f"{who} ended with exit code {code}", hint=_last_lines(first.log))


def _last_lines(log: Path) -> str:
    """Return the last line a rank wrote to standard error, as a hint; "" if it wrote none."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"its last words: {lines[-1].strip()}" if lines else ""

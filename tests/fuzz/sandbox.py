"""One run of the program in a process of its own, ended when it takes too much time or memory.

The process is forked from this one, which has imported the program, so that a run that ends in an error takes
milliseconds.
"""

import contextlib
import io
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.cases import Case

CPU_SECONDS = 20
"""Processor time of a run, beyond which it hangs."""
WALL_FACTOR = 30
"""A run that sleeps hangs after this many times as long; other programs may have the processors meanwhile."""
MAX_BYTES = 2 << 30
_POLL = 0.02  # seconds between two looks at a process
_DIED = 99
"""Exit code of a run that raised what nobody caught."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a run ended.

    Attributes:
        code: Exit code; negative for the signal that ended it.
        out: What it wrote on standard output.
        err: What it wrote on standard error.
        written: Files it wrote, by name.
        hung: Whether it took too long.
        bytes: Most memory it was seen with.
        seconds: Wall time.
    """

    code: int
    out: bytes
    err: bytes
    written: dict[str, bytes]
    hung: bool
    bytes: int
    seconds: float

    @property
    def raised(self) -> bool:
        """Whether an exception left the program."""
        return self.code == _DIED or b"Traceback (most recent call last)" in self.err


def run(case: Case, folder: Path) -> Run:
    """Run a case in a folder, which gets its files."""
    case.write(folder)
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads of a test runner, which hold nothing of ours
        pid = os.fork()
    if pid == 0:
        _child(case.arguments, folder)
    status, hung, most = _watch(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it started and left behind
    code = os.waitstatus_to_exitcode(status)
    out, err = ((folder / name).read_bytes() for name in ("stdout", "stderr"))
    known = {*case.files, "command", "stdout", "stderr"}
    written = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name not in known
    }
    return Run(code, out, err, written, hung or -code == signal.SIGXCPU, most, time.monotonic() - began)


def _watch(pid: int) -> tuple[int, bool, int]:
    """Wait for a process and return its status, whether it hung, and the most memory it had."""
    limit = time.monotonic() + WALL_FACTOR * CPU_SECONDS
    most, hung, pause = 0, False, 0.001
    while True:
        ended, status, _ = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, hung, most
        most = max(most, _resident(pid))
        if most > MAX_BYTES or time.monotonic() > limit:
            hung = most <= MAX_BYTES
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status, _ = os.wait4(pid, 0)
            return status, hung, most
        time.sleep(pause)
        pause = min(_POLL, 1.5 * pause)


def _resident(pid: int) -> int:
    """Return the bytes a process has in memory and shares with nobody; 0 if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def _child(arguments: Sequence[str], folder: Path) -> None:
    """Run the program and end this process with its exit code."""
    code = _DIED
    try:
        os.setsid()
        os.chdir(folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", write_through=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

        from autopar.cli.entry import main

        code = main(list(arguments))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else _DIED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

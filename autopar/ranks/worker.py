"""A process that is one rank.

`python -m autopar.ranks.worker FOLDER RANK` is what `autopar.ranks.launch` starts: it finds the request in the folder
and reports on standard output, a line of JSON per event. It ends at once when whoever started it is gone.
"""

import os
import shutil
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from autopar.errors import AutoparError
from autopar.machine import pin_to_cores
from autopar.progress import Progress, ProgressCallback, silent
from autopar.ranks.job import prepare_job, run_rank
from autopar.ranks.records import RunReport, RunRequest

REQUEST_FILE = "request.json"
STORE_FILE = "store"


class ProgressEvent(msgspec.Struct, frozen=True, tag="progress"):
    """How far rank 0 is."""

    phase: str
    done: int
    total: int
    detail: str


class ReportEvent(msgspec.Struct, frozen=True, tag="report"):
    """Rank 0 is done."""

    report: RunReport


class ErrorEvent(msgspec.Struct, frozen=True, tag="error"):
    """A rank gives up; `kind` is the name of the exception's class."""

    kind: str
    message: str
    hint: str


Event = ProgressEvent | ReportEvent | ErrorEvent


def run_worker(request: RunRequest, rank: int, init_method: str, progress: ProgressCallback) -> RunReport | None:
    """Run one rank in this process; rank 0 returns the report.

    Args:
        request: What to run.
        rank: Own number.
        init_method: Where the ranks meet.
        progress: Told how far it is.

    Raises:
        AutoparError: If something is wrong with the request, the model or another rank.
    """
    if request.pin:
        pin_to_cores(rank, request.threads)
    import torch

    from autopar.ranks import torch_world
    from autopar.ranks.compiled_models import Engine
    from autopar.ranks.routes import groups_of

    torch.set_num_threads(request.threads)
    progress(Progress("import"))
    job = prepare_job(request)
    program = job.lowered.program
    progress(Progress("connect", total=request.ranks))
    memory = torch_world.join(request.backend, init_method, rank, request.ranks)
    groups = [
        group
        for stage in program.stages
        for position in range(stage.num_devices)
        for group in groups_of(stage, position).values()
        if len(group) > 1
    ]
    communicator = torch_world.TorchCommunicator(dict.fromkeys(groups), request.backend)
    return run_rank(
        job,
        communicator,
        memory,
        Engine(memory, request.threads, memory.stream()),
        progress=progress if rank == 0 else silent,
        device=torch_world.describe(memory),
        release=torch_world.leave,
    )


def main(folder: Path, rank: int) -> int:
    """Be one rank of the run described in a folder; return the exit code."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    request = msgspec.json.decode((folder / REQUEST_FILE).read_bytes(), type=RunRequest)

    def tell(progress: Progress) -> None:
        _emit(ProgressEvent(progress.phase, progress.done, progress.total, progress.detail))

    try:
        report = run_worker(request, rank, f"file://{folder / STORE_FILE}", tell if rank == 0 else silent)
    except AutoparError as error:
        _emit(ErrorEvent(type(error).__name__, str(error.args[0]), error.hint))
        return leave_process(1)
    except Exception as error:  # the boundary of a process: whatever it is, the others have to hear of it
        traceback.print_exc()
        last = traceback.format_exception_only(error)[-1].strip()
        _emit(ErrorEvent(type(error).__name__, last, ""))
        return leave_process(1)
    if report is not None:
        _emit(ReportEvent(report))
    return leave_process(0)


def leave_process(code: int) -> int:
    """End at once: threads of the communication library may still wait for ranks that will never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _emit(event: Event) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def _end_with_parent(folder: Path) -> None:
    """End when standard input does: whoever started this process has gone, and cannot remove its folder any more."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # other ranks do the same
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

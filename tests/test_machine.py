"""Workers end with the process they work for."""

import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from autopar.machine import follow_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=follow_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    input()
"""


def test_a_worker_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """It waits for work on a pipe whose other end it has itself, and would wait for ever."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as process:
        assert process.stdout is not None, "it was asked to be a pipe"
        worker = int(process.stdout.readline())
        process.kill()

    end = time.monotonic() + 60
    while _runs(worker) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(worker)


def _runs(number: int) -> bool:
    """Whether there is such a process; one that has ended may wait for somebody to ask how."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""The parent of the ranks: what it refuses, and how it tells why a run failed. Needs no torch."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.errors import AutoparError, JobError, ModelError, RankError
from autopar.progress import Progress
from autopar.ranks import launch
from autopar.ranks.records import RunReport, RunRequest, StageSeconds
from autopar.ranks.worker import ReportEvent
from tests.plans import two_stage_plan

SLEEP = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of these tests say at once why they fail."""
    monkeypatch.setattr(launch, "_GRACE", 0.2)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Return the file of a plan for some devices."""
    path = tmp_path / "plan.json"
    two_stage_plan().save(path)
    return path


def _num_devices() -> int:
    return max(stage.devices[1] for stage in two_stage_plan().stages)


# What is refused.


def test_another_number_of_ranks_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what would do."""
    count = _num_devices()

    assert main(["run", str(plan_file), "--ranks", "3"]) == 2

    error = capsys.readouterr().err
    assert f"the plan is for {count} GPUs, not for 3 ranks" in error
    assert f"use --ranks {count}" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--ranks", "2"], "cannot read plan 'missing.json'"),
        (["plan.json"], "give --ranks N"),
        (["plan.json", "--ranks", "0"], "Invalid value for '--ranks'"),
        (["plan.json", "--ranks", "2", "--steps", "0"], "Invalid value for '--steps'"),
        (["plan.json", "--ranks", "2", "--seed", "-1"], "Invalid value for '--seed'"),
        (["plan.json", "--ranks", "2", "--tolerance", "-1"], "not a finite number above 0"),
        (["plan.json", "--ranks", "2", "--backend", "mpi"], "Invalid value for '--backend'"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["run", *arguments]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["torch", "onnxruntime"])
def test_missing_libraries_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that installs them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())

    with pytest.raises(JobError, match=f"running a plan needs {missing}, not installed") as error:
        launch.check_installed("gloo")

    assert error.value.hint == 'pip install "autopar[run]"'


def test_the_parent_imports_neither_torch_nor_onnxruntime() -> None:
    """Its children do."""
    script = "import sys, autopar.ranks.launch; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()

    assert {"torch", "onnxruntime"}.isdisjoint(loaded)


# How a run ends.


def _error(kind: str, message: str, hint: str = "") -> str:
    event = {"type": "error", "kind": kind, "message": message, "hint": hint}
    return f"import sys; print({json.dumps(json.dumps(event))}, flush=True); sys.exit(1)"


def _watch(scripts: list[str], tmp_path: Path, seen: list[Progress] | None = None) -> RunReport:
    """Watch processes that run scripts in place of ranks, and stop them as a run does."""
    processes = []
    for rank, script in enumerate(scripts):
        log = tmp_path / f"rank{rank}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream
            )
        processes.append(launch.RankProcess(rank, process, log))
    try:
        return launch._report(processes, (seen if seen is not None else []).append)
    finally:
        launch._stop(processes)
        assert all(each.process.poll() is not None for each in processes)


@pytest.mark.parametrize(
    ("script", "kind", "message", "hint"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            RankError,
            "rank 1 was killed by SIGKILL",
            "memory",
        ),
        (
            "import sys; print('oh no', file=sys.stderr); sys.exit(7)",
            RankError,
            "rank 1 ended with exit code 7",
            "oh no",
        ),
        (_error("ModelError", "no weights", "get some"), ModelError, "rank 1: no weights", "get some"),
        (_error("ZeroDivisionError", "ZeroDivisionError: x"), RankError, "rank 1 failed: ZeroDivisionError: x", ""),
    ],
)
def test_a_rank_that_ends_early_ends_the_run(
    script: str, kind: type[AutoparError], message: str, hint: str, tmp_path: Path
) -> None:
    """At once, with its last words, although the other rank would go on."""
    start = time.monotonic()

    with pytest.raises(kind, match=message) as error:
        _watch([SLEEP, script], tmp_path)

    assert hint in error.value.hint
    assert time.monotonic() - start < 30, "far less than the other rank takes"


def test_a_rank_that_is_stopped_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one would wait for it until it times out; both are gone afterwards."""
    monkeypatch.setattr(launch, "_STILL", 0.2)
    script = "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"

    with pytest.raises(RankError, match=r"rank 1 was stopped by SIGSTOP and did not go on for 0\.2 s"):
        _watch([SLEEP, script], tmp_path)


def test_a_rank_that_goes_on_in_time_is_let_alone(tmp_path: Path) -> None:
    """As after a debugger has looked at it."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    rank = launch.RankProcess(0, process, tmp_path / "log")
    try:
        process.send_signal(signal.SIGSTOP)
        while not launch._stop_signal(process):
            time.sleep(0.01)
        launch._check_running([rank], now=1.0)
        process.send_signal(signal.SIGCONT)
        while launch._stop_signal(process):
            time.sleep(0.01)
        launch._check_running([rank], now=100.0)
    finally:
        launch._stop([rank])

    assert rank.stopped == 0.0


def test_the_cause_is_named_and_not_the_consequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that lose their connection report first; the one that broke it is to blame."""
    lost = _error("RankError", "lost the connection to another rank")
    broken = f"import time; time.sleep(0.3); {_error('ExecutionError', 'kernel failed')}"
    monkeypatch.setattr(launch, "_GRACE", 10.0)  # until all have failed

    with pytest.raises(AutoparError, match="rank 2: kernel failed"):
        _watch([lost, lost, broken], tmp_path)


def test_events_become_progress_and_a_report(tmp_path: Path) -> None:
    """Other lines on standard output are none of ours."""
    import msgspec

    times = StageSeconds(0, {"forward": 1.0}, {"forward": 2.0})
    report = RunReport("dp=2", "m", 2, "gloo", "CPU", 0, 0, 1e-4, (), 3, 1.0, 2.0, 3.0, 4.0, (times,))
    lines: list[Any] = ["noise", '{"type":"progress","phase":"step","done":1,"total":3,"detail":""}']
    lines.append(msgspec.json.encode(ReportEvent(report)).decode())
    seen: list[Progress] = []

    found = _watch([f"print({chr(10).join(lines)!r}, flush=True)", ""], tmp_path, seen)

    assert found == report
    assert seen == [Progress("step", 1, 3)]


def test_a_rank_that_is_not_understood_ends_the_run(tmp_path: Path) -> None:
    """It is a mistake of ours, but no reason to wait for ever."""
    line = '{"type":"report","report":{}}'

    with pytest.raises(RankError, match="rank 0 failed: it says what nobody understands"):
        _watch([f"print({line!r}, flush=True)", SLEEP], tmp_path)


def test_a_report_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 reported nothing"):
        _watch(["", ""], tmp_path)


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 4)])
def test_exit_codes_tell_the_verdict(
    equal: bool, code: int, plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As does the JSON."""
    from autopar.ranks.records import Deviation, StepComparison

    deviation = Deviation("loss", 1, 0.5, 0.0 if equal else 0.1, "loss", equal)
    compared = (StepComparison(1, 2.5, (deviation,)),)
    report = RunReport("dp=2", "m", 2, "gloo", "CPU", 0, 0, 1e-4, compared, 3, 1.0, 2.0, 3.0, 4.0, ())
    monkeypatch.setattr(launch, "run_plan", lambda request, progress: report)

    assert main(["run", str(plan_file), "--ranks", "2", "--json"]) == code

    assert json.loads(capsys.readouterr().out)["compared"][0]["deviations"][0]["passed"] is equal


def test_a_failed_rank_has_its_own_exit_code(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: RunRequest, progress: object) -> RunReport:
        raise RankError("rank 1 was killed by SIGKILL", hint="out of memory?")

    monkeypatch.setattr(launch, "run_plan", fail)

    assert main(["run", str(plan_file), "--ranks", "2"]) == 5

    assert "error: rank 1 was killed by SIGKILL\nhint: out of memory?\n" in capsys.readouterr().err

"""A solver under a wall clock: whatever it does, the answer is there in time and nothing that was found is lost."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from autopar import iopddl, solvers
from autopar.cli import main
from autopar.cli.invocation import Invocation
from autopar.cli.selecting import _Report
from autopar.engines import EngineRequest
from autopar.errors import ProblemError, SolverError
from autopar.problem import FORBIDDEN, Problem, Solution, Termination, Usage, check
from autopar.report.selection import describe_nothing, format_steps
from autopar.selection import Known, Selection, select
from autopar.selection.records import Better, Loaded, Message, Request
from autopar.selection.watchdog import _Listener
from autopar.selection.worker import _Mailbox, _work
from tests.strategies import problems

ROOT = Path(__file__).parent.parent
LONG = 60.0
"""Seconds no test here comes near: they are ended by what they are about."""

STAND_INS = """
import os, re, signal, time
from autopar import solvers

class StandIn:
    def companion(self, number):
        self.number = number
        return self

    def solve(self, problem, *, time_limit, watch, **request):
        print("libraries talk", flush=True)
        if self.found:
            watch((0, 0), 4, -float("inf"))
            watch((1, 1), 2, 1)
        self.go_on()

def stand_in(go_on, found=True):
    return type("Made", (StandIn,), {"found": found, "go_on": lambda self: go_on()})

Deaf = stand_in(lambda: re.match("(a+)+$", "a" * 60 + "b"))  # in C, with the interpreter's lock, for years
Sleeper = stand_in(lambda: time.sleep(600))
Dead = stand_in(lambda: os.kill(os.getpid(), signal.SIGSEGV))
Dead0 = stand_in(lambda: os.kill(os.getpid(), signal.SIGKILL), found=False)
Wrong = stand_in(lambda: 1 / 0, found=False)

class Relay(StandIn):
    "Process 1 finds choices; process 0 has the better bound, and says so once it has heard of the best choice."

    def solve(self, problem, *, time_limit, watch, outside, **request):
        if self.number == 1:
            watch((0, 0), 4, 1)
            watch((1, 1), 2, 1)
        else:
            while (outside() or (None, 0))[0] != (1, 1):
                time.sleep(0.01)
            watch((1, 1), 2, 2)
        time.sleep(600)

class Half(StandIn):
    "Process 1 dies, process 0 has the answer a moment later."

    def solve(self, problem, *, time_limit, watch, **request):
        if self.number == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1)
        watch((1, 1), 2, 2)
        time.sleep(600)

for name in ("Deaf", "Sleeper", "Dead", "Dead0", "Wrong", "Relay", "Half"):
    solvers.SOLVERS[name.lower()] = "sitecustomize:" + name
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make solvers that misbehave known to every process started, and return a folder on their path."""
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STAND_INS)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of a problem of two nodes; (1, 1) is best and costs 2."""
    path = tmp_path / "problem.json"
    iopddl.save(Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])], name="pair"), path)
    return path


def program(*arguments: str) -> "subprocess.Popen[str]":
    """Start the command line as a program of its own."""
    code = "import sys; from autopar.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def wait_for(fact: Callable[[], bool]) -> None:
    """Wait until something is so; fail after a minute."""
    end = time.monotonic() + LONG
    while not fact():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_a_problem_is_solved_in_a_process_of_its_own(file: Path) -> None:
    """With what presolve removed and what was known when."""
    selection = select(file, time_limit=LONG, reductions=True)

    assert selection.solution == Solution(Termination.OPTIMAL, (1, 1), 2, 2)
    assert (selection.name, selection.num_nodes, selection.num_edges) == ("pair", 2, 1)
    assert selection.seconds < LONG
    assert selection.peak_bytes > 1e6
    assert selection.history[-1].cost == selection.history[-1].bound == 2
    assert selection.steps[0].name == "parallel edges"
    assert selection.conflict is None
    assert selection.failure == ""


@pytest.mark.usefixtures("stand_ins")
def test_a_solver_that_looks_at_no_clock_is_cut_off_in_time(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The best choice it had found is the answer, and nothing it prints gets in between."""
    selection = select(file, time_limit=5.0, solver="deaf")

    assert selection.solution == Solution(Termination.FEASIBLE, (1, 1), 2, 1)
    assert selection.seconds < 5.0
    assert [known.cost for known in selection.history] == [4, 2]
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("stand_ins")
def test_an_end_that_somebody_wants_comes_at_once(file: Path) -> None:
    found: list[tuple[int, ...] | None] = []

    selection = select(
        file,
        time_limit=LONG,
        solver="sleeper",
        report=lambda _, choice: found.append(choice),
        should_stop=lambda: len(found) == 2,
    )

    assert found == [(0, 0), (1, 1)]
    assert selection.solution == Solution(Termination.INTERRUPTED, (1, 1), 2, 1)


@pytest.mark.usefixtures("stand_ins")
def test_a_solver_that_dies_leaves_what_it_had_found(file: Path) -> None:
    """And the death is told."""
    selection = select(file, time_limit=LONG, solver="dead")

    assert selection.solution.choice == (1, 1)
    assert selection.failure == "was ended by SIGSEGV"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ("dead0", "solver 'dead0' was ended by SIGKILL, perhaps for want of memory"),
        ("wrong", "solver 'wrong' ended without an answer, with exit code 1"),
    ],
)
def test_a_solver_that_dies_with_empty_hands_is_an_error(file: Path, solver: str, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        select(file, time_limit=LONG, solver=solver)


@pytest.mark.usefixtures("stand_ins")
def test_processes_hear_of_what_others_find(file: Path) -> None:
    """One proves what another found."""
    selection = select(file, time_limit=LONG, solver="relay", engine=EngineRequest(workers=2))

    assert selection.solution == Solution(Termination.OPTIMAL, (1, 1), 2, 2)
    assert selection.workers == 2
    assert selection.seconds < LONG


@pytest.mark.usefixtures("stand_ins")
def test_the_death_of_one_of_several_processes_is_told(file: Path) -> None:
    selection = select(file, time_limit=LONG, solver="half", engine=EngineRequest(workers=2))

    assert selection.solution == Solution(Termination.OPTIMAL, (1, 1), 2, 2)
    assert selection.failure == "was ended by SIGSEGV"


@pytest.mark.slow
@pytest.mark.usefixtures("stand_ins")
def test_a_process_that_never_looks_up_holds_nobody_up(file: Path) -> None:
    """Although what the others find is sent to it."""
    selection = select(file, time_limit=6.0, solver="deaf", engine=EngineRequest(workers=2))

    assert selection.solution == Solution(Termination.FEASIBLE, (1, 1), 2, 1)
    assert selection.seconds < 6.0


def test_several_processes_solve_a_problem(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["select", str(file), "60", "--workers", "2", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["termination"], found["choice"], found["workers"]) == ("optimal", [1, 1], 2)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
@pytest.mark.slow
def test_ray_actors_solve_a_problem(file: Path) -> None:
    """On a cluster started here, which is gone afterwards; a problem without an answer is said to have none."""
    import ray

    infeasible = file.parent / "infeasible.json"
    iopddl.save(Problem.build([[0], [0]], [(0, 1, [[FORBIDDEN]])]), infeasible)

    selection = select(file, time_limit=LONG, engine=EngineRequest("ray", 2))
    nothing = select(infeasible, time_limit=LONG, engine=EngineRequest("ray", 1))

    assert selection.solution == Solution(Termination.OPTIMAL, (1, 1), 2, 2)
    assert selection.workers == 2
    assert nothing.solution.termination is Termination.INFEASIBLE
    assert nothing.conflict is not None
    assert not ray.is_initialized()


def test_errors_of_the_process_are_raised_here(tmp_path: Path) -> None:
    """With their hint."""
    (tmp_path / "bad.json").write_text('{"problem": {"nodes": 3}}')

    with pytest.raises(ProblemError, match=r"bad\.json: problem\.nodes: Expected `object`") as caught:
        select(tmp_path / "bad.json", time_limit=LONG)

    assert caught.value.hint
    with pytest.raises(SolverError, match="there is no solver 'magic'"):
        select(tmp_path / "bad.json", time_limit=LONG, solver="magic")


@given(problem=problems())
@settings(max_examples=25)
def test_what_the_process_says_is_what_the_solver_found(
    problem: Problem, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The listener ends up with the solver's own solution, and would have had it without the last message, too."""
    path = tmp_path_factory.mktemp("said") / "problem.json.gz"
    iopddl.save(problem, path)
    told: list[Message] = []

    class Pipe:
        def send(self, message: Message) -> None:
            told.append(message)

    _work(Request(str(path), "auto", time.monotonic() + LONG, 1, 0, reductions=False), Pipe(), _Mailbox())  # type: ignore[arg-type]

    whole, cut = _Listener(0.0, None), _Listener(0.0, None)
    for message in told:
        whole.take(message)
        if isinstance(message, Loaded | Better):
            cut.take(message)
    loaded = iopddl.load(path)
    expected = solvers.load("auto").solve(loaded)
    check(loaded, whole.solution(interrupted=False))
    assert whole.complete
    assert whole.solution(interrupted=False) == expected == cut.solution(interrupted=False)
    assert (whole.conflict is not None) == (expected.termination is Termination.INFEASIBLE)


@pytest.mark.parametrize(
    ("choice", "cost", "bound", "interrupted", "termination"),
    [
        (None, math.inf, -math.inf, False, Termination.UNKNOWN),
        (None, math.inf, 3, True, Termination.INTERRUPTED),
        (None, math.inf, math.inf, True, Termination.INFEASIBLE),
        ((0,), 5, 3, False, Termination.FEASIBLE),
        ((0,), 5, 3, True, Termination.INTERRUPTED),
        ((0,), 5, 5, True, Termination.OPTIMAL),
    ],
)
def test_what_a_cut_off_solver_proved_still_counts(
    choice: tuple[int, ...] | None, cost: float, bound: float, interrupted: bool, termination: Termination
) -> None:
    listener = _Listener(0.0, None)
    listener.take(Better(1.0, choice, cost, bound))

    assert listener.solution(interrupted) == Solution(termination, choice, cost, bound)


def test_what_is_worse_than_what_is_known_is_not_taken() -> None:
    """Parts of a solver may tell what they know, which can be less than the whole."""
    listener = _Listener(10.0, None)

    for message in (
        Better(11.0, (0,), 5, 3),
        Better(12.0, None, 5, 4),
        Better(13.0, (1,), 7, 2),
        Better(14.0, (2,), 4, 1),
    ):
        listener.take(message)

    assert listener.history == [Known(1.0, 5, 3), Known(2.0, 5, 4), Known(4.0, 4, 4)]
    assert listener.solution(interrupted=False) == Solution(Termination.OPTIMAL, (2,), 4, 4)


def test_the_last_line_is_the_choice_and_the_line_before_tells_what_it_is_worth(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The contest's protocol."""
    code = main(["select", str(file), "60", "-v"])

    out, err = capsys.readouterr()
    status, choice = out.splitlines()
    assert code == 0
    assert choice == "[1, 1]"
    assert re.fullmatch(r"cost 2, bound 2, gap 0\.0000 %, optimal, \d+\.\d s of 60 s, [\d.]+ [MG]B", status)
    assert "presolve" in err


def test_progress_is_told_now_and_then_and_when_much_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """A first choice at once, half the gap at once, little news once a second."""
    report = _Report(stream=False)

    for known in ((0.1, math.inf, 10), (0.2, 100, 10), (0.3, 100, 20), (0.4, 100, 70), (1.5, 100, 71), (1.6, 100, 72)):
        report(Known(*known), None)

    assert [line.split("gap")[0].split() for line in capsys.readouterr().err.splitlines()] == [
        f"autopar: {seconds} s cost {cost}, bound {bound},".split()
        for seconds, cost, bound in ((0.1, "-", 10), (0.2, 100, 10), (0.4, 100, 70), (1.5, 100, 71))
    ]


def test_json_has_everything(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else is on standard output."""
    code = main(["select", str(file), "60", "-v", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (found["termination"], found["cost"], found["bound"], found["gap"]) == ("optimal", 2, 2, 0.0)
    assert found["choice"] == [1, 1]
    assert found["presolve"][0]["before"] == {"nodes": 2, "labels": 4, "pairs": 1, "rows": 0}
    assert found["history"][-1]["cost"] == 2
    assert found["conflict"] is None


def test_infeasible_exits_with_3_and_says_when_and_who(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing on standard output could be taken for a choice."""
    usages = [Usage(0, 4, 6, np.array([3, 9])), Usage(1, 5, 8, np.array([4, 2])), Usage(2, 0, 9, np.array([0, 0]))]
    path = tmp_path / "problem.json"
    iopddl.save(Problem.build([[0, 0]] * 3, usages=usages, limit=4), path)

    code = main(["select", str(path), "60"])

    out, err = capsys.readouterr()
    assert (code, out) == (3, "")
    assert err.splitlines()[-2:] == [
        "error: no choice fits: nodes 0 and 1 use at least 5 at time 5, the limit is 4; "
        "without any one of them there is a choice",
        "hint: raise usage_limit",
    ]


def test_a_limit_below_nothing_is_no_node_s_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    iopddl.save(Problem.build([[0, 0]] * 2, usages=[Usage(0, 4, 6, np.array([3, 9]))], limit=5), path)
    path.write_text(path.read_text().replace('"usage_limit":5', '"usage_limit":-1'))

    code = main(["select", str(path), "60"])

    assert code == 3
    assert capsys.readouterr().err == (
        "error: no choice fits: the limit at time 4 is -1, below 0\nhint: raise usage_limit\n"
    )


def test_a_dumped_problem_has_the_optimum_of_the_planner_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of `autopar solve --dump-problem` goes through the same engine; a unit of it is 1e-10 s.

    Every cost is rounded to half a unit, so the optima differ by half a unit per node and edge at most.
    """
    dumped: list[Problem] = []

    def save(problem: Problem, path: Path) -> None:
        dumped.append(problem)
        iopddl.save(problem, path)

    monkeypatch.setattr("autopar.api.save", save)
    path = tmp_path / "problem.json.gz"
    arguments = ["solve", "zoo:mlp-xs", "--gpus", "4", "--global-batch", "64", "--dump-problem", str(path)]
    assert main([*arguments, "--cache-dir", str(tmp_path)]) == 0
    (problem,) = dumped
    capsys.readouterr()

    assert main(["select", str(path), "60", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    expected = solvers.load("auto").solve(problem)
    assert (found["termination"], expected.termination) == ("optimal", "optimal")
    rounding = 0.5 * iopddl.UNIT_SECONDS * (problem.num_nodes + problem.num_edges)
    assert found["cost"] * iopddl.UNIT_SECONDS == pytest.approx(expected.cost, rel=2e-6, abs=rounding)
    assert problem.cost(found["choice"][: problem.num_nodes]) == pytest.approx(
        expected.cost, rel=2e-6, abs=2 * rounding
    )


def test_json_of_an_infeasible_problem_has_the_conflict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    iopddl.save(Problem.build([[0], [0]], [(0, 1, [[FORBIDDEN]])]), path)

    code = main(["select", str(path), "60", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert (code, found["termination"], found["choice"], found["cost"]) == (3, "infeasible", None, None)
    assert found["conflict"]["nodes"] == [0, 1]
    assert found["conflict"]["edges"] == [[0, 1]]
    assert found["conflict"]["irreducible"]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_keep_the_best_choice(file: Path, number: signal.Signals) -> None:
    """Although the solver never hears of them; the exit code is 130."""
    with program("select", str(file), "60", "--solver", "deaf", "--stream") as process:
        assert process.stdout is not None, "it was asked to be a pipe"
        lines = [process.stdout.readline() for _ in range(4)]

        process.send_signal(number)

        out, err = process.communicate(timeout=LONG)

    assert lines[1::2] == ["[0, 0]\n", "[1, 1]\n"]
    assert process.returncode == 130
    assert re.match(r"cost 2, bound 1, gap 50\.0000 %, interrupted, .*\n\[1, 1\]\n$", out)
    assert "interrupted: finishing with the best so far" in err


@pytest.mark.usefixtures("stand_ins")
def test_the_limit_counts_from_the_start_of_the_program(file: Path) -> None:
    """A solver that never looks up, and everything around it, is over in time."""
    begin = time.monotonic()

    with program("select", str(file), "12", "--solver", "deaf") as process:
        out, _ = process.communicate(timeout=LONG)

    assert time.monotonic() - begin < 12.0
    assert process.returncode == 0
    assert out.splitlines()[-1] == "[1, 1]"
    began = Invocation.of((), is_program=True).began
    assert began < Invocation.of((), is_program=False).began <= time.monotonic()


@pytest.mark.usefixtures("stand_ins")
def test_a_solver_does_not_outlive_its_program(file: Path) -> None:
    """Even if that is killed and cannot say so."""
    with program("select", str(file), "60", "--solver", "sleeper", "--stream") as process:
        assert process.stdout is not None, "it was asked to be a pipe"
        for _ in range(4):
            process.stdout.readline()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()

        process.kill()
        process.wait()

        wait_for(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes())


def test_nothing_found_is_not_called_infeasible() -> None:
    """The time was over before anything was known."""
    nothing = Solution(Termination.UNKNOWN, None, math.inf, 3)

    message, hint = describe_nothing(Selection("", 0, 0, "auto", 1.0, nothing, 1.0, 0.0, ()))

    assert message == "the time was over before the first choice; whether there is one is not known"
    assert hint == "allow more seconds"
    assert format_steps(()) == ""

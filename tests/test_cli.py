"""The command line: exit codes, streams, files, signals. What commands compute is tested where it is computed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import autopar
from autopar import page, report
from autopar.cli import main
from autopar.cli.interruption import Interruption
from autopar.cluster import PRESETS, cluster_from_dict
from autopar.display import LogProgress, show_progress
from autopar.errors import AutoparError, InfeasibleError, InterruptedSearchError, ModelError
from autopar.plan import Plan
from autopar.program.records import Category
from autopar.progress import Progress, silent
from autopar.search import backends
from autopar.simulate.timeline import MemoryPeak, StageTimeline, Timeline
from tests.plans import two_stage_plan, two_variant_plan
from tests.views import view_of

Calls = list[dict[str, Any]]


def _timeline() -> Timeline:
    memory = MemoryPeak(3e9, 0.5, "B0", ((Category.PARAMETERS, 1e9), (Category.ACTIVATIONS, 2e9)))
    return Timeline(1.0, (StageTimeline(0, 0.5, 0.08, 0.0, 0.2, 0.1, 0.05, 0.05, 0.02, 0.3, 0.2, memory),))


class Api(SimpleNamespace):
    """Stands for `autopar.api`: answers at once and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(calls=[], answer=two_stage_plan())

    def solve(self, model: str, **request: Any) -> Plan:
        """Answer with the prepared plan, or raise the prepared error."""
        self.calls.append({"model": model, **request})
        if isinstance(self.answer, Exception):
            raise self.answer
        assert isinstance(self.answer, Plan), "tests prepare a plan or an error"
        return self.answer

    def simulate_again(self, plan: Plan, **request: Any) -> tuple[Plan, Timeline]:
        """Answer with the plan and a timeline of one stage."""
        return plan, _timeline()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Api:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    stand_in = Api()
    monkeypatch.setitem(sys.modules, "autopar.api", stand_in)
    monkeypatch.setattr(autopar, "api", stand_in, raising=False)
    monkeypatch.setattr(page, "look", lambda plan, **request: view_of(plan=plan))
    return stand_in


def test_solve_passes_on_what_was_asked(api: Api) -> None:
    """Every option reaches the library, in its units."""
    arguments = (
        "--gpus 64 --cluster a100 --mode infer --global-batch 32 --set batch=8 --set seq=128 --top-k 5 --time-limit 2.5"
    )
    more = (
        "--solver beam --memory-limit 40 --loss mse --optimizer sgd --stack mine.yaml --seed 7 --workers 3 "
        "--pin p.yaml --fusion joint --no-cache"
    )

    start = time.monotonic()
    code = main(["solve", "zoo:gpt2", *arguments.split(), *more.split()])

    (call,) = api.calls
    assert start <= call.pop("began") <= time.monotonic(), "a limit of time counts from the start of the command"
    del call["progress"], call["should_stop"], call["rival"], call["preview"]
    assert code == 0
    assert call == {
        "model": "zoo:gpt2",
        "gpus": 64,
        "cluster": "a100",
        "mode": "infer",
        "global_batch": 32,
        "dims": {"batch": 8, "seq": 128},
        "top_k": 5,
        "time_limit": 2.5,
        "solver": "beam",
        "memory_limit": 40e9,
        "loss": "mse",
        "optimizer": "sgd",
        "fusion": "joint",
        "sync_batchnorm": False,
        "shared_expert_overlap": None,
        "lora": None,
        "stack": "mine.yaml",
        "precision": "mixed",
        "framework": None,
        "cache_dir": None,
        "dump_problem": None,
        "seed": 7,
        "pins": Path("p.yaml"),
        "profile": None,
        "recompute_modules": (),
        "workers": 3,
        "engine": "local",
        "ray_address": None,
    }


@pytest.mark.parametrize(("options", "asks"), [("", True), ("--grid 5", True), ("--grid 0", False)])
def test_grid_search_is_asked_for_unless_it_gets_no_time(api: Api, options: str, asks: bool) -> None:
    main(["solve", "zoo:gpt2", "--gpus", "8", *options.split()])

    assert (api.calls[0]["rival"] is not None) == asks


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (64, 8)])
def test_all_cores_search_that_have_something_to_do(
    api: Api, monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    monkeypatch.setattr(backends, "usable_cores", lambda: cores)

    assert main(["solve", "zoo:gpt2", "--gpus", "8"]) == 0

    assert api.calls[0]["workers"] == workers


@pytest.mark.parametrize("options", ["--engine ray", "--dump-problem {folder}/problem.json"])
def test_who_searches_is_left_open_where_this_machine_or_one_process_does_not(
    api: Api, tmp_path: Path, options: str
) -> None:
    """Ray knows the CPUs of its cluster, and only a search in the process itself can write its problem down."""
    assert main(["solve", "zoo:gpt2", "--gpus", "8", *options.format(folder=tmp_path).split()]) == 0

    assert api.calls[0]["workers"] is None


@pytest.mark.parametrize("text", ["40", "40GB", "40 gb"])
def test_memory_may_say_what_it_is_of(api: Api, text: str) -> None:
    assert main(["solve", "zoo:gpt2", "--gpus", "8", "--memory-limit", text]) == 0

    assert api.calls[0]["memory_limit"] == 40e9


def test_solve_prints_the_report_on_standard_output(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else there: the answer with what to do next, and all there is to say with -v."""
    main(["solve", "zoo:gpt2", "--gpus", "8"])
    answer = capsys.readouterr().out
    main(["solve", "zoo:gpt2", "--gpus", "8", "-v"])

    assert answer.startswith(report.format_answer(two_stage_plan()))
    assert "autopar solve zoo:gpt2 --gpus 8 -o plan" in answer
    assert capsys.readouterr().out == report.format_report(two_stage_plan())


def test_json_of_solve_is_the_plan(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """So that `autopar solve --json > plan.json` is a plan file."""
    main(["solve", "zoo:gpt2", "--gpus", "8", "--json"])

    assert Plan.from_json(capsys.readouterr().out.encode()) == two_stage_plan()


def test_output_folder_holds_plan_report_and_trace(api: Api, tmp_path: Path) -> None:
    """Missing folders are made."""
    folder = tmp_path / "a" / "b"

    code = main(["solve", "zoo:gpt2", "--gpus", "8", "-o", str(folder)])

    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "report.html", "report.txt", "trace.json"]
    assert Plan.load(folder / "plan.json") == two_stage_plan()
    assert (folder / "report.txt").read_text() == report.format_report(two_stage_plan())
    assert "traceEvents" in json.loads((folder / "trace.json").read_text())
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_output_that_is_no_folder_is_refused_before_the_search(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """An hour's search must not end with "cannot write"."""
    (tmp_path / "file").write_text("precious")

    code = main(["solve", "zoo:gpt2", "--gpus", "8", "-o", str(tmp_path / where)])

    assert code == 2
    assert api.calls == []
    assert capsys.readouterr().err.startswith("error: cannot write into ")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "command", ["solve zoo:gpt2 --gpus 8 -o {long}", "export plan.json --to megatron -o {long}", "explain {long}"]
)
def test_a_name_that_is_too_long_is_refused(api: Api, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """In one line that does not repeat all of it."""
    assert main(command.format(long="x" * 300).split()) == 2

    error = capsys.readouterr().err.splitlines()[0]
    assert error.endswith("cannot look for '" + 40 * "x" + "...': File name too long")


@pytest.mark.parametrize("option", ["--dump-problem", "--trace"])
def test_file_that_is_a_folder_is_refused_before_the_work(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """The message names it."""
    two_stage_plan().save(tmp_path / "plan.json")
    command = (
        ["solve", "zoo:gpt2", "--gpus", "8"]
        if option == "--dump-problem"
        else ["simulate", str(tmp_path / "plan.json")]
    )

    code = main([*command, option, str(tmp_path)])

    assert code == 2
    assert api.calls == []
    assert (
        capsys.readouterr().err
        == f"error: cannot write {str(tmp_path)!r}: it is a folder\nhint: give the name of a file\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("solve zoo:gpt2", "Missing option '--gpus'. Or ask for a number: --find-min-gpus"),
        (
            "solve zoo:gpt2 --gpus 8 --find-min-gpus",
            "--gpus N and a question for a number of GPUs; --max-gpus N bounds the answer",
        ),
        ("solve zoo:gpt2 --find-min-gpus --budget 3", "--find-min-gpus and --budget: ask one of them"),
        (
            "solve zoo:gpt2 --gpus 8 --max-gpus 9",
            "--max-gpus belongs to --find-min-gpus, --target-time or --budget",
        ),
        ("solve zoo:gpt2 --gpus 0", "Invalid value for '--gpus': 0 is not in the range x>=1."),
        ("solve zoo:gpt2 --gpus 7.5", "Invalid value for '--gpus': '7.5' is not a valid integer range."),
        ("solve zoo:gpt2 --gpus 8 --global-batch 0", "Invalid value for '--global-batch': 0 is not in the range x>=1."),
        (
            "solve zoo:gpt2 --gpus 8 --memory-limit 0",
            "Invalid value for '--memory-limit': 0 is not a finite number above 0",
        ),
        (
            "solve zoo:gpt2 --gpus 8 --memory-limit nan",
            "Invalid value for '--memory-limit': nan is not a finite number above 0",
        ),
        (
            "solve zoo:gpt2 --gpus 8 --memory-limit 80TB",
            "Invalid value for '--memory-limit': '80TB' is not a number of GB, such as 80",
        ),
        (
            "solve zoo:gpt2 --gpus 8 --time-limit -1",
            "Invalid value for '--time-limit': -1 is not a finite number above 0",
        ),
        (
            "solve zoo:gpt2 --gpus 8 --set batch",
            "Invalid value for '--set': 'batch' is not of the form DIM=VALUE, e.g. batch=8",
        ),
        (
            "solve zoo:gpt2 --gpus 8 --set batch=x",
            "Invalid value for '--set': 'batch' is set to 'x', not to a number from 0 on",
        ),
        (
            "predict zoo:gpt2 --set seq=-1",
            "Invalid value for '--set': 'seq' is set to '-1', not to a number from 0 on",
        ),
        (
            "solve zoo:gpt2 --gpus 8 --set b=1 --set b=2",
            "Invalid value for '--set': dim 'b' is set to 1 and to 2",
        ),
        ("solve zoo:gpt2 --gpus 8 --mode eat", "Invalid value for '--mode': 'eat' is not one of 'train', 'infer'."),
        ("model gpt2", "give a name or --from CONFIG, and -o FILE.onnx, or --list"),
        ("model gpt2 --list", "--list takes neither a name nor -o nor --set nor --from"),
        ("slove zoo:gpt2", "No such command 'slove'. Did you mean 'solve'?"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_code_2(
    api: Api, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    """Before anything is imported or solved."""
    code = main(arguments.split())

    out, err = capsys.readouterr()
    command = "" if arguments.startswith("slove") else f" {arguments.split()[0]}"
    assert (code, out) == (2, "")
    assert err == f"error: {message}\nhint: see 'autopar{command} --help'\n"
    assert api.calls == []


def test_unknown_solver_is_refused_with_the_known_ones(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the search."""
    code = main(["solve", "zoo:gpt2", "--gpus", "8", "--solver", "cplex"])

    assert code == 2
    assert "solver 'cplex' is unknown; there are auto, portfolio, highs" in capsys.readouterr().err
    assert api.calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("not ONNX", hint="give an .onnx file"), 2),
        (InfeasibleError("stage 0 lacks 3 GB", hint="use 16 GPUs"), 3),
        (InterruptedSearchError("no plan yet", hint="let it run longer"), 130),
    ],
)
def test_errors_become_a_message_a_hint_and_an_exit_code(
    api: Api, capsys: pytest.CaptureFixture[str], error: AutoparError, code: int
) -> None:
    """Never a traceback."""
    api.answer = error

    found = main(["solve", "zoo:gpt2", "--gpus", "8"])

    out, err = capsys.readouterr()
    assert found == code
    assert out == ""
    assert err == f"error: {error.args[0]}\nhint: {error.hint}\n"


def test_interrupted_search_writes_its_best_plan_and_exits_with_130(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C asks the search to stop; it is not lost."""
    plan = two_stage_plan()
    assert plan.search is not None, "the plan made by hand has a search"
    partial = replace(plan, search=replace(plan.search, termination="interrupted"))

    def solve(model: str, *, should_stop: Callable[[], bool], **request: Any) -> Plan:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        return partial

    monkeypatch.setattr(api, "solve", solve)

    code = main(["solve", "zoo:gpt2", "--gpus", "8", "-o", str(tmp_path)])

    assert code == 130
    assert Plan.load(tmp_path / "plan.json") == partial
    assert "(interrupted: this" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "work"),
    [
        (["export", "PLAN", "--to", "megatron", "-o", "OUT"], "autopar.frameworks.export"),
        (["report", "PLAN", "-o", "OUT"], "autopar.page.look"),
        (["figures", "PLAN", "-o", "OUT"], "autopar.page.look"),
        (["whatif", "zoo:gpt2", "--gpus", "8", "-o", "OUT"], "autopar.scenarios.whatif"),
        (["explain", "PLAN", "--alternatives", "-o", "OUT"], "autopar.alternatives.weigh"),
        (["simulate", "PLAN", "--trace", "OUT"], "autopar.api.simulate_again"),
    ],
)
def test_ctrl_c_in_the_middle_of_the_work_leaves_nothing(
    command: list[str], work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, no half of a file, and the exit code of an interrupted command."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    two_stage_plan().save(tmp_path / "plan.json")
    names = {"PLAN": str(tmp_path / "plan.json"), "OUT": str(tmp_path / "out")}
    monkeypatch.setattr(work, interrupted)

    code = main([names.get(word, word) for word in command])

    assert code == 130
    assert capsys.readouterr().err.strip() == "error: interrupted"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "plan.json"]


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback() -> None:
    """Which takes half a second, long enough for somebody who sees a mistake in what he typed."""
    script = """
import sys
from autopar.cli import main
class Interrupts:
    @staticmethod
    def find_spec(name, *_):
        if name == "autopar.cli.commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts)
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nerror: interrupted\n")


def test_signals_do_what_they_did_before_once_the_search_is_over() -> None:
    """A library user's handlers are given back."""
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))

    with Interruption(keeps=True) as interruption:
        signal.raise_signal(signal.SIGTERM)
        requested = interruption.requested()

    assert requested
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_search_looks_ends_the_command(number: signal.Signals) -> None:
    """While a model is imported there is nothing to keep, and nobody who would look at a flag."""
    before = signal.getsignal(number)

    with pytest.raises(KeyboardInterrupt), Interruption():
        signal.raise_signal(number)

    assert signal.getsignal(number) == before


def test_a_signal_ends_a_job_that_is_prepared() -> None:
    """Although its import looks whether it is to stop: there is no plan that it could keep."""

    def interrupted(*phases: str) -> bool:
        with Interruption() as interruption:
            progress = interruption.watch(silent)
            for phase in phases:
                progress(Progress(phase))
                interruption.requested()
            signal.raise_signal(signal.SIGINT)
            return interruption.requested()

    with pytest.raises(KeyboardInterrupt):
        interrupted("import")
    assert interrupted("import", "discover", "search")


def test_signals_that_the_caller_ignores_stay_ignored() -> None:
    """As under `nohup`, whose terminal may be closed."""
    script = """
import signal
from autopar.cli.interruption import Interruption, raise_on_signals
raise_on_signals()
with Interruption(keeps=True) as interruption:
    signal.raise_signal(signal.SIGHUP)
    assert not interruption.requested()
    signal.raise_signal(signal.SIGTERM)
    assert interruption.requested()
"""
    command = ["nohup", sys.executable, "-c", script]

    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    assert done.returncode == 0, done.stderr


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    """With one message, and everything on the way out: temporary folders, processes."""
    script = """
import sys, time
from autopar.cli import main
class Waits:
    @staticmethod
    def find_spec(name, *_):
        if name == "autopar.cli.commands":
            print("ready", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Waits)
sys.argv[1:] = ["doctor"]
try:
    code = main()
finally:
    print("let go")
sys.exit(code)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None, "it was asked to be a pipe"
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)

    assert (process.returncode, out, err) == (130, "let go\n", "\nerror: interrupted\n")


@pytest.mark.parametrize(
    ("redirected", "code", "message"),
    [
        ("| true", 141, ""),
        ("> /dev/full", 2, "error: cannot write standard output: No space left on device"),
        ("2> /dev/full | cat", 0, ""),
        ("2>&- | cat", 0, ""),
    ],
)
def test_output_that_cannot_be_written(redirected: str, code: int, message: str) -> None:
    """A reader that has gone costs no word, a full disk one error; progress that nobody hears costs nothing."""
    script = "import sys; from autopar.cli import main; sys.argv[1:] = ['clusters']; sys.exit(main())"
    shell = f'set -o pipefail; {sys.executable} -c "{script}" {redirected}'

    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)

    assert done.returncode == code, done.stderr
    assert done.stderr.partition("\n")[0] == message


def test_second_signal_ends_the_process() -> None:
    """Even if the search never looks at the flag."""
    script = """
import sys, time
from autopar.cli.interruption import Interruption
with Interruption() as interruption:
    interruption.requested()
    print("ready", flush=True)
    while not interruption.requested():
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None, "it was asked to be a pipe"
        for expected in ("ready\n", "asked\n"):
            assert process.stdout.readline() == expected
            process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)

    assert code == -signal.SIGINT


def test_progress_in_a_log_file_is_a_line_per_phase(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one every ten seconds within a phase, with incumbent and bound."""
    clock = iter([0.0, 1.0, 2.0, 13.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    log = LogProgress()

    for progress in (
        Progress("import"),
        Progress("solve", 0, 8, detail="tp=2"),
        Progress("solve", 1, 8),
        Progress("solve", 6, 8, incumbent=0.02, bound=0.019),
    ):
        log.update(progress)

    assert capsys.readouterr().err.splitlines() == [
        "autopar: read the model",
        "autopar: solve 0/8: tp=2",
        "autopar: solve 6/8: best 20 ms, bound 19 ms, gap 5.0 %",
    ]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""
        return True


def test_progress_on_a_terminal_shows_incumbent_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in brackets are no markup."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")

    with show_progress() as progress:
        progress(Progress("import", detail="[bold]"))
        progress(Progress("solve", 6, 8, incumbent=0.02, bound=0.019))

    shown = terminal.getvalue()
    assert "[bold]" in shown
    assert "best 20 ms, bound 19 ms, gap 5.0 %" in shown


def test_simulate_prints_times_and_writes_the_trace(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is what Perfetto opens."""
    two_stage_plan().save(tmp_path / "plan.json")

    code = main(["simulate", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "t.json")])

    assert code == 0
    assert capsys.readouterr().out == report.format_timeline(_timeline())
    assert "traceEvents" in json.loads((tmp_path / "t.json").read_text())


def test_json_of_simulate_has_the_stages(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In seconds and bytes."""
    two_stage_plan().save(tmp_path / "plan.json")

    main(["simulate", str(tmp_path / "plan.json"), "--json"])

    data = json.loads(capsys.readouterr().out)
    assert data["step_seconds"] == 1.0
    assert data["peak_bytes"] == 3e9
    assert data["stages"][0]["memory"]["during"] == "B0"


def test_explain_prints_the_explanation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs the plan file alone."""
    two_stage_plan().save(tmp_path / "plan.json")

    code = main(["explain", str(tmp_path / "plan.json")])

    assert code == 0
    assert capsys.readouterr().out == report.format_explain(two_stage_plan())


def test_a_plan_whose_stages_differ_has_no_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What of it can be pinned is said instead, before the model is looked for."""
    two_variant_plan().save(tmp_path / "plan.json")

    code = main(["explain", str(tmp_path / "plan.json"), "--pins"])

    assert code == 2
    assert capsys.readouterr().err == (
        "error: stages have 2 variants of mesh and placements; pins split all stages alike\n"
        "hint: pin what else it has: stages: 2, boundaries: [2], microbatches: 4\n"
    )


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"version": 1}', b"\xff\xfe"])
def test_file_that_is_no_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    """Missing, empty, incomplete or not JSON."""
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)

    code = main(["explain", str(path)])

    assert code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_model_writes_a_file_onnx_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With or without the `zoo:` that other commands need."""
    code = main(["model", "zoo:gpt2", "-o", str(tmp_path / "gpt2.onnx")])

    model = onnx.load(tmp_path / "gpt2.onnx", load_external_data=False)
    assert code == 0
    assert model.graph.output[0].name == "logits"
    assert "124,439,808 parameters" in capsys.readouterr().out


def test_sizes_of_a_written_model_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a size it does not have is refused."""
    path = tmp_path / "gpt2.onnx"
    code = main(["model", "gpt2", "--set", "num_layers=1", "--set", "vocab=512", "-o", str(path)])

    assert code == 0
    assert onnx.load(path, load_external_data=False).graph.output[0].type.tensor_type.shape.dim[2].dim_value == 512
    assert "gpt2, num_layers=1, vocab=512, " in capsys.readouterr().out
    assert main(["model", "gpt2", "--set", "layers=1", "-o", str(path)]) == 2
    assert "no hyperparameter 'layers'" in capsys.readouterr().err


def test_model_list_has_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    """As a table and as JSON."""
    main(["model", "--list"])
    table = capsys.readouterr().out.splitlines()
    main(["model", "--list", "--json"])
    entries = json.loads(capsys.readouterr().out)

    assert [line.split()[0] for line in table[1:]] == [entry["name"] for entry in entries]
    assert {"name": "gpt2", "parameters": 124439808}.items() <= entries[0].items()


def test_clusters_as_json_are_cluster_files(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed can be edited and given to --cluster."""
    main(["clusters", "--json"])

    clusters = json.loads(capsys.readouterr().out)
    assert {name: cluster_from_dict(data) for name, data in clusters.items()} == dict(PRESETS)


def test_cache_folder_comes_from_the_environment(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one variable there is."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))

    main(["solve", "zoo:gpt2", "--gpus", "8"])

    assert api.calls[0]["cache_dir"] == tmp_path


def test_cache_that_cannot_be_written_is_refused_before_the_search(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the two ways out."""
    (tmp_path / "file").write_text("")

    code = main(["solve", "zoo:gpt2", "--gpus", "8", "--cache-dir", str(tmp_path / "file" / "below")])

    assert code == 2
    assert api.calls == []
    assert "hint: choose another one with --cache-dir, or use --no-cache" in capsys.readouterr().err


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output."""
    code = main(["--version"])

    assert (code, capsys.readouterr().out) == (0, f"autopar, version {autopar.__version__}\n")


_HEAVY = {"highspy", "numba", "ortools", "pandas", "torch"}
_MISTAKES = (
    ("solve", "absent.onnx", "--gpus", "8"),
    ("solve", "text.onnx", "--gpus", "8"),
    ("solve", "zoo:gtp2", "--gpus", "8"),
    ("solve", "hf:absent", "--gpus", "8"),
    ("solve", "zoo:gpt2", "--gpus", "8", "--cluster", "nope"),
    ("predict", "absent.onnx", "--global-batch", "8"),
    ("predict", "zoo:gpt2", "--gpus", "8", "--dp", "4", "--global-batch", "8"),
    ("whatif", "absent.onnx", "--gpus", "8"),
    ("rules", "absent.onnx"),
    ("partition", "absent.onnx", "--mesh", "dp=2", "--tactics", "absent.yaml"),
    ("benchmark", "absent.onnx", "--gpus", "8"),
    ("explain", "absent.json"),
    ("simulate", "absent.json"),
    ("run", "absent.json", "--ranks", "2"),
    ("export", "absent.json", "--to", "jax"),
    ("report", "absent.json", "-o", "report.html"),
    ("diff", "absent.json", "absent.json"),
)
"""Commands with a plain mistake in what they are to read."""


def test_a_plain_mistake_is_told_without_importing_what_plans(tmp_path: Path) -> None:
    """Importing solvers and kernels takes seconds of processor time; none of it is needed to miss a file."""
    (tmp_path / "text.onnx").write_text("no model")
    script = f"""
import sys
from autopar.cli import main
for command in {_MISTAKES!r}:
    code = main([*command])
    print(code, *sorted({_HEAVY!r} & sys.modules.keys()), *command)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "AUTOPAR_CACHE_DIR": str(tmp_path / "cache"),
    }

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [" ".join(("2", *command)) for command in _MISTAKES]


def test_a_price_may_be_given_to_a_search_for_a_number_of_gpus(api: Api) -> None:
    """The answer says what a million tokens cost; the cluster is the same one otherwise."""
    assert main(["solve", "zoo:gpt2", "--gpus", "8", "--gpu-hour-price", "2.5"]) == 0

    assert api.calls[0]["cluster"] == replace(PRESETS["h100"], gpu_hour_price=2.5)


@pytest.mark.parametrize(
    ("options", "bandwidths"),
    [
        (["--intra-bandwidth", "100 GB/s"], (100e9, None)),
        (["--inter-bandwidth", "10GB/s", "--cluster", "h100"], (None, 10e9)),
        (["--nics", "4x200Gb/s"], (None, 4 * 25e9 * 0.955 / 8)),
        (["--nics", "4x25GB/s"], (None, 4 * 25e9 * 0.955 / 8)),
    ],
)
def test_links_of_a_cluster_may_be_changed(
    api: Api, options: list[str], bandwidths: tuple[float | None, float | None]
) -> None:
    assert main(["solve", "zoo:gpt2", "--gpus", "16", *options]) == 0

    cluster, preset = api.calls[0]["cluster"], PRESETS["h100"]
    intra, inter = (own or link.bandwidth for own, link in zip(bandwidths, (preset.intra, preset.inter), strict=True))
    assert (cluster.intra.bandwidth, cluster.inter.bandwidth) == pytest.approx((intra, inter))
    changed = [
        (now, before) for now, before in ((cluster.intra, preset.intra), (cluster.inter, preset.inter)) if now != before
    ]
    assert len(changed) == 1
    for now, before in changed:  # what is measured of single operations follows
        ratios = {round(own.bandwidth / was.bandwidth, 9) for own, was in zip(now.tunings, before.tunings, strict=True)}
        assert ratios <= {round(now.bandwidth / before.bandwidth, 9)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--inter-bandwidth", "400Gb/s"], "is not in B/s"),
        (["--inter-bandwidth", "0GB/s"], "not above 0"),
        (["--nics", "8"], "8x400Gb/s"),
        (["--nics", "0x400Gb/s"], "8x400Gb/s"),
        (["--nics", "8x400Gb/s", "--inter-bandwidth", "10GB/s"], "stated twice"),
    ],
)
def test_a_link_that_cannot_be_meant_is_an_error(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["solve", "zoo:gpt2", "--gpus", "16", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3-8b", "did you mean zoo:llama3-8b?"),
        ("some/where", "hf:config.json or hf:FOLDER"),
        ("x.onnx", "an .onnx"),
    ],
)
def test_a_model_that_does_not_exist_is_named_with_what_may_be_meant(
    capsys: pytest.CaptureFixture[str], name: str, hint: str
) -> None:
    assert main(["solve", name, "--gpus", "8"]) == 2

    error, told = capsys.readouterr().err.splitlines()
    assert error == f"error: {name} does not exist"
    assert hint in told


def test_names_of_files_are_escaped_where_they_are_told(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may hold ends of lines, which would look like lines of ours."""
    monkeypatch.chdir(tmp_path)

    main(["model", "mlp-xs", "--set", "num_layers=2", "-o", "a\nINJECTED b.onnx"])
    main(["solve", "zoo:gpt2", "--gpus", "8", "-o", "a\nINJECTED c"])

    told = capsys.readouterr()
    assert "wrote a\\u000aINJECTED b.onnx" in told.out
    assert not [line for line in (told.out + told.err).splitlines() if line.startswith("INJECTED")]


def test_public_names_are_listed_before_they_are_loaded() -> None:
    """As by a shell that completes `autopar.`."""
    done = subprocess.run(
        [sys.executable, "-c", "import autopar; print(*dir(autopar))"], capture_output=True, text=True, check=True
    )

    assert {"solve", "predict", "from_torch", "from_jax", "Plan", "Cluster"} <= {*done.stdout.split()}


@pytest.mark.slow
def test_a_configuration_is_compared_with_the_best_plan_for_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model, batch and devices; the best plan is no slower."""
    sizes = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "vocab-size": 512}
    degrees = {"tensor-model-parallel-size": 2, "micro-batch-size": 1, "global-batch-size": 8}
    file = tmp_path / "train.args"
    file.write_text("\n".join(f"--{name} {value}" for name, value in (sizes | degrees).items()) + "\n--bf16\n")

    command = ["import", str(file), "--from", "megatron", "--gpus", "2", "--best", "--time-limit", "20", "--no-cache"]
    assert main([*command, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    current, best = found["current"], found["best"]
    assert (current["job"]["global_batch"], current["job"]["gpus"]) == (8, 2)
    assert (best["job"]["global_batch"], best["job"]["gpus"]) == (8, 2)
    assert best["simulated"]["step_seconds"] <= current["simulated"]["step_seconds"]

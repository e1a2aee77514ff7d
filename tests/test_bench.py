"""Our planner beside the baselines: what is compared, and what is written about it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

import autopar
from autopar import bench
from autopar.bench.conditions import PACKAGES, Conditions, conditions
from autopar.bench.jobs import BenchJob, load_jobs
from autopar.bench.records import Comparison, Result, planner
from autopar.bench.report import best_so_far, format_comparison, format_markdown, verdict, write_pages
from autopar.bench.specs import SPECS, spec
from autopar.bench.sweep import in_fresh_process, run_sweep, run_tiny, spec_jobs
from autopar.cli import main
from autopar.errors import InfeasibleError, JobError, ModelError
from autopar.plan import HistoryPoint, PhaseTime, Plan
from autopar.request import JobRequest
from autopar.task import Effort
from tests.plans import two_stage_plan
from tests.shares import some
from tests.sizes import MLP

GOLDEN = Path(__file__).parent / "golden"
CLOSE = 1.005
TINY: Mapping[str, int] = {"num_layers": 1, "hidden": 16, "heads": 2, "seq": 8, "vocab": 32}
CONDITIONS = Conditions(
    date(2026, 1, 2), "autopar benchmark zoo:tiny --gpus 8", "a CPU", 2, 8e9, "Linux", {"autopar": "0.1", "numpy": "2"}
)


def _slower(plan: Plan, factor: float) -> Plan:
    assert plan.simulated is not None, "the plan made by hand is simulated"
    simulated = replace(plan.simulated, step_seconds=plan.simulated.step_seconds * factor)
    return replace(plan, simulated=simulated, alternatives=())


def _comparison(grid_factor: float = 1.25) -> Comparison:
    """Return ours, grid search slower by a factor and without a bound, and a solver that found nothing."""
    plan = two_stage_plan()
    assert plan.search is not None, "the plan made by hand says how it was found"
    ours = replace(
        Result.of(planner("auto"), plan, plan.job.gpus),
        history=(HistoryPoint(0.5, 1.2, 0.9), HistoryPoint(2.0, 0.98, 0.97)),
    )
    grid = replace(
        Result.of("grid", _slower(plan, grid_factor), plan.job.gpus), bound=0.0, solved=40, termination="exhausted"
    )
    beam = Result(planner("beam"), "time limit", (), 0.0, 40, 3, plan.search.phases, "stopped before the first plan")
    return Comparison(plan.model, plan.job, 60.0, (ours, grid, beam))


@pytest.mark.parametrize("name", some(SPECS, lambda name: name in ("gpt2", "mixtral-8x7b")))
def test_no_benchmark_is_slower_than_recipes_by_hand(name: str) -> None:
    """By the formula, for small stand-ins of all models: the planner's space holds every plan of theirs.

    The formula is applied to different tables: theirs are of lowered programs.
    """
    mode = "infer" if "net" in name else "train"  # finding the rules of its backward takes longer than the rest

    comparison = run_tiny(spec(name), mode=mode, baselines=("recipes", "megatron"))

    assert [result.method for result in comparison.results] == [planner("auto"), "recipes", "megatron"]
    ours, *others = (result.history[-1].objective for result in comparison.results)
    assert ours <= min(others) * CLOSE


def test_every_solver_asked_for_is_a_result() -> None:
    """Once each, after the baselines; these prove nothing."""
    request = JobRequest("zoo:gpt2", gpus=2, global_batch=1, dims=TINY)

    comparison = bench.compare(request, baselines=("grid", "grid"), solvers=("beam", "auto", "beam"))

    assert [result.method for result in comparison.results] == ["planner: auto", "grid", "planner: beam"]
    assert [result.gap is None for result in comparison.results] == [False, True, False]
    assert all(result.best is not None for result in comparison.results)


def test_a_model_that_fits_nowhere_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep goes on; the note says what is missing, which tests/test_sizing.py is about."""

    def brief(*_: object, **__: object) -> InfeasibleError:
        return InfeasibleError("needs 3 kB, more than the limit of 2 kB")

    monkeypatch.setattr("autopar.api.explain_infeasible", brief)

    comparison = bench.compare(JobRequest("zoo:mlp-xs", gpus=2, **MLP, memory_limit=2e3))

    assert {result.termination for result in comparison.results} == {"infeasible"}
    assert "more than the limit of 2 kB" in comparison.ours.note
    assert verdict(comparison) == "no plan of ours fits"


def test_an_interrupted_comparison_begins_no_other_method() -> None:
    """What is there is returned."""
    request = JobRequest("zoo:gpt2", gpus=2, global_batch=1, dims=TINY)

    comparison = bench.compare(request, should_stop=lambda: True)

    (ours,) = comparison.results
    assert ours.termination == "interrupted"
    assert comparison.interrupted


@pytest.mark.parametrize(
    ("methods", "effort"),
    [
        ({"baselines": ("nope",)}, {}),
        ({"solvers": ("nope",)}, {}),
        ({}, {"solver": "nope"}),
        ({}, {"top_k": 0}),
        ({}, {"time_limit": 0.0}),
    ],
)
def test_a_wrong_request_is_refused_before_any_work(methods: dict[str, Any], effort: dict[str, Any]) -> None:
    """The model is never opened."""
    with pytest.raises(autopar.errors.AutoparError) as caught:
        bench.compare(JobRequest("no such file.onnx", gpus=2), Effort(**effort), **methods)

    assert not isinstance(caught.value, ModelError)


def test_figures_of_a_result_are_those_of_its_plan() -> None:
    """Worked out by hand for the plan of two stages: gap 1 - 0.97/0.98, memory of the fuller stage."""
    result = Result.of(planner("auto"), two_stage_plan(), two_stage_plan().job.gpus)

    assert result.best is not None, "there is a plan"
    assert (result.best.step_seconds, result.best.objective, result.best.mfu) == (1.0, 0.98, 0.42)
    assert result.best.peak_bytes == 39e9  # 2 + 4 + 12 GB of states, 20 of activations, 1 transient
    assert [plan.step_seconds for plan in result.plans] == [1.0, 1.05]
    assert result.gap == pytest.approx(1 - 0.97 / 0.98)
    assert _comparison().speedup == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.25, "ours takes 20.0 % less time per step than the best baseline (grid), simulated"),
        (0.8, "ours takes 25.0 % more time per step than the best baseline (grid), simulated"),
        (1.0, "ours takes as long per step as the best baseline (grid), simulated"),
    ],
)
def test_verdict_says_who_is_faster(factor: float, text: str) -> None:
    """In percent of the step time of the best of them."""
    assert verdict(_comparison(factor)) == text


def test_text_of_a_comparison_is_the_golden_one() -> None:
    """Compared whole, and no line is longer than 100 columns."""
    text = format_comparison(_comparison())

    assert text == (GOLDEN / "benchmark.txt").read_text()
    assert max(map(len, text.splitlines())) <= 100


def test_page_of_a_benchmark_is_the_golden_one(tmp_path: Path) -> None:
    """Named after the day, with the same figures as JSON beside it, and an image of every case."""
    page, data, image = write_pages([_comparison()], CONDITIONS, tmp_path)

    assert page.name == "planner_2026-01-02.md"
    assert image.relative_to(tmp_path) == Path("planner_2026-01-02", "tiny_on_8_x_h100.svg")
    assert b"best so far" in image.read_bytes()
    assert page.read_text() == (GOLDEN / "benchmark.md").read_text()
    assert image.read_text() == (GOLDEN / image.relative_to(tmp_path)).read_text()
    record = json.loads(data.read_text())
    assert record["conditions"]["command"] == CONDITIONS.command
    assert msgspec.convert(record["comparisons"][0], Comparison, strict=False) == _comparison()


@pytest.mark.parametrize(
    ("seconds", "step", "across", "up"),
    [
        (40.0, 1.25, "included", "% above the best of all (log)"),
        (40.0, 9.0, "included", "% above the best of all (log), 200 at the edge"),
        (0.1, 1.25, "included (log)", "% above the best of all (log)"),
    ],
)
def test_axes_of_a_plot_say_what_is_done_to_them(seconds: float, step: float, across: str, up: str) -> None:
    """Time is logarithmic where methods end far apart; what is far too slow is cut off."""
    comparison = _comparison(step)
    ours, grid, beam = comparison.results
    grid = replace(grid, phases=(PhaseTime("search", seconds, 1e9),))

    image = best_so_far(replace(comparison, results=(ours, grid, beam)))

    assert image is not None
    words = [text.text or "" for text in ElementTree.fromstring(image).findall("{*}text")]
    assert next(own for own in words if own.startswith("seconds since")).endswith(across)
    assert up in words


def test_methods_look_the_same_in_every_plot() -> None:
    """A method without a plan is left out, and leaves its colour to nobody."""
    comparison = _comparison()

    def colour(results: tuple[Result, ...], name: str) -> str | None:
        image = best_so_far(replace(comparison, results=results))
        assert image is not None
        shapes = list(ElementTree.fromstring(image))
        place = next(number for number, shape in enumerate(shapes) if shape.text == name)
        return shapes[place - 1].get("stroke")

    ours, grid, *_ = comparison.results
    megatron, without = replace(grid, method="megatron"), replace(grid, plans=())

    assert colour((ours, without, megatron), "megatron") == colour((ours, grid, megatron), "megatron")
    assert len({colour((ours, grid, megatron), name) for name in (ours.method, "grid", "megatron")}) == 3


def test_a_page_without_comparisons_is_refused() -> None:
    """There would be nothing to head it with."""
    with pytest.raises(ValueError, match="at least one comparison"):
        format_markdown([], CONDITIONS)


def test_conditions_name_every_package_that_matters() -> None:
    """With the version that runs."""
    found = conditions("autopar benchmark")

    assert list(found.versions) == ["autopar", "python", *PACKAGES]
    assert found.versions["autopar"] == autopar.__version__
    assert found.cores > 0


def test_benchmarks_are_small_and_large() -> None:
    """From one node to 3,072 devices; with much and with little memory to spare."""
    cases = {name: [(case.cluster, case.gpus) for case in item.sweep] for name, item in SPECS.items()}

    assert cases["llama3-8b"] == [("h100", 64)]
    assert cases["gpt3-175b"] == [("a100", 128), ("a100", 1024)]
    assert cases["megatron-1t"] == [("a100", 3072)]
    assert len(cases) >= 7
    with pytest.raises(JobError, match="no benchmark 'gpt3'"):
        spec("gpt3")


class Recorder:
    """Stands for `compare` in a sweep: remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[JobRequest, Effort, dict[str, Any]]] = []

    def __call__(self, request: JobRequest, effort: Effort, **more: Any) -> Comparison:
        """Answer as `compare` does."""
        for name in ("progress", "should_stop"):
            more.pop(name, None)
        self.calls.append((request, effort, more))
        return _comparison()

    @property
    def jobs(self) -> list[tuple[str, int]]:
        """Models and numbers of devices."""
        return [(str(request.model), request.gpus) for request, _, _ in self.calls]


def test_figures_of_all_benchmarks_are_published() -> None:
    """Those of the list that `--all` runs, in its order."""
    (page,) = (Path(__file__).parents[1] / "docs" / "benchmarks").glob("planner_[0-9]*.json")
    found = json.loads(page.read_text())["comparisons"]

    cases = [(item.model, case.cluster, case.gpus) for item in SPECS.values() for case in item.sweep]
    assert [(own["model"]["source"], own["job"]["cluster"]["name"], own["job"]["gpus"]) for own in found] == cases


def test_a_sweep_runs_every_case() -> None:
    """Smallest first, with the settings it was given."""
    run = Recorder()

    comparisons = list(
        run_sweep(spec_jobs(spec("gpt3-175b")), Effort(time_limit=5.0), run=run, baselines=("grid",), precision="fp32")
    )

    assert len(comparisons) == 2
    assert run.calls == [
        (
            JobRequest("zoo:gpt3-175b", gpus=gpus, cluster="a100", precision="fp32"),
            Effort(time_limit=5.0),
            {"baselines": ("grid",), "solvers": ()},
        )
        for gpus in (128, 1024)
    ]


def test_a_sweep_can_be_narrowed_and_stopped() -> None:
    """To one number of devices; between cases."""
    stopped, job = Recorder(), BenchJob(model="zoo:gpt2", gpus=8)

    list(run_sweep([job] * 3, run=stopped, should_stop=lambda: len(stopped.calls) == 2))

    assert [job.gpus for job in spec_jobs(spec("gpt3-175b"), gpus=128)] == [128]
    assert stopped.jobs == [("zoo:gpt2", 8)] * 2


def test_jobs_are_read_from_a_list(tmp_path: Path) -> None:
    """What a job does not state is left to the command; gigabytes become bytes."""
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "- model: zoo:gpt2\n  gpus: 8\n- {model: a.onnx, gpus: 4, cluster: a100, memory_limit: 2.5, dims: {seq: 64}}"
    )

    first, second = (job.stated() for job in load_jobs(path))

    assert first == {"model": "zoo:gpt2", "gpus": 8, "cluster": "h100", "mode": "train"}
    assert second == {
        "model": "a.onnx", "gpus": 4, "cluster": "a100", "mode": "train", "memory_limit": 2.5e9, "dims": {"seq": 64},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "lists no job"), ("- {model: zoo:gpt2}", "gpus"), ("- {gpus: 8, nodes: 1}", "nodes")]
)
def test_a_wrong_list_of_jobs_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The message names the field."""
    path = tmp_path / "jobs.yaml"
    path.write_text(text)

    with pytest.raises(JobError, match=message):
        load_jobs(path)


def test_errors_of_a_fresh_process_come_back_whole() -> None:
    """Class, message and hint."""
    with pytest.raises(ModelError, match="no model 'gpt22'") as caught:
        in_fresh_process(JobRequest("zoo:gpt22", gpus=2))

    assert "gpt2" in caught.value.hint


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    stand_in = Recorder()
    monkeypatch.setattr(bench, "compare", stand_in)
    monkeypatch.setattr("autopar.bench.sweep.in_fresh_process", stand_in)
    monkeypatch.setattr(run_sweep, "__kwdefaults__", {**(run_sweep.__kwdefaults__ or {}), "run": stand_in})
    return stand_in


def test_command_passes_on_what_was_asked(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints the table alone on standard output."""
    baselines = ("--baselines", "grid,alpa")
    code = main(
        ["benchmark", "zoo:gpt2", "--gpus", "8", "--no-cache", "--solvers", "beam,grid", "--set", "seq=64", *baselines]
    )

    assert code == 0
    assert recorder.calls == [
        (
            JobRequest("zoo:gpt2", gpus=8, cluster="h100", stack="default", dims={"seq": 64}),
            Effort(),
            {"baselines": ("grid", "alpa"), "solvers": ("beam", "grid")},
        )
    ]
    assert capsys.readouterr().out == format_comparison(_comparison())


def test_command_writes_page_and_figures(recorder: Recorder, tmp_path: Path) -> None:
    """The page holds the command as it was typed."""
    main(["benchmark", "zoo:gpt2", "--gpus", "8", "--no-cache", "-o", str(tmp_path)])

    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark", "benchmark.json", "benchmark.md"]
    command = f"`autopar benchmark zoo:gpt2 --gpus 8 --no-cache -o {tmp_path}`"
    assert command in (tmp_path / "benchmark.md").read_text()


def test_command_prints_json(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    """The record and nothing else."""
    main(["benchmark", "zoo:gpt2", "--gpus", "8", "--no-cache", "--json"])

    assert msgspec.json.decode(capsys.readouterr().out, type=Comparison) == _comparison()


def test_command_runs_the_list_of_benchmarks(recorder: Recorder, tmp_path: Path) -> None:
    """All cases of all of them, or those of one size; on one page."""
    code = main(["benchmark", "--all", "--gpus", "64", "--time-limit", "9", "-o", str(tmp_path)])

    assert code == 0
    assert recorder.jobs == [
        ("zoo:llama3-8b", 64), ("zoo:mixtral-8x7b", 64),
    ]  # fmt: skip
    assert {effort.time_limit for _, effort, _ in recorder.calls} == {9.0}
    assert len(list(tmp_path.glob("planner_*.md"))) == 1


def test_a_page_is_one_though_midnight_passes_meanwhile(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its day is that on which the run began."""
    days = (date(2026, 1, day) for day in range(1, 32))
    monkeypatch.setattr("autopar.bench.conditions.date", SimpleNamespace(today=lambda: next(days)))

    main(["benchmark", "--all", "--gpus", "64", "--time-limit", "9", "-o", str(tmp_path)])

    assert len(recorder.calls) == 2
    assert [page.name for page in tmp_path.glob("planner_*.md")] == ["planner_2026-01-01.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give a MODEL and --gpus N, or --spec NAME, or --all"),
        ("zoo:gpt2", "give a MODEL and --gpus N"),
        ("zoo:gpt2 --all", "give either MODEL (zoo:gpt2) or --spec, --all and --jobs"),
        ("--spec gpt2 --cluster a100", "--cluster cannot be combined"),
        ("--spec gpt2 --set seq=8", "--set cannot be combined"),
        ("--spec gpt2 --gpus 7", "no case of gpt2 has 7 devices"),
        ("--spec nope", "there is no benchmark 'nope'"),
        ("--all --jobs x.yaml", "--jobs is combined with neither"),
        ("--jobs nowhere.yaml", "nowhere.yaml cannot be read"),
        ("zoo:gpt2 --gpus 8 --solvers beam,nope", "solver 'nope' is unknown"),
        ("zoo:gpt2 --gpus 8 --baselines=", "'' has an empty name"),
        ("zoo:gpt2 --gpus 8 --baselines grid,", "'grid,' has an empty name"),
        ("zoo:gpt2 --gpus 8 --baselines grid,none", "'grid,none' names none among others"),
    ],
)
def test_command_refuses_what_makes_no_sense(
    recorder: Recorder, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing is run."""
    code = main(["benchmark", *arguments.split()])

    assert code == 2
    assert message in capsys.readouterr().err
    assert recorder.calls == []

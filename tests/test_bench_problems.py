"""Solvers side by side on files of selection problems."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autopar import iopddl
from autopar.bench.conditions import Conditions
from autopar.bench.plot import step_plot
from autopar.bench.problems import ProblemRun, problem_files, run_problems, time_to
from autopar.bench.problems_report import format_page, format_run, write_page
from autopar.bench.svg import Axis, Curve, chart
from autopar.cli import main
from autopar.errors import JobError, ProblemError
from autopar.problem import Problem, Solution, Termination
from autopar.selection import Known, Selection
from autopar.solvers.reductions.presolve import ProblemSize, Step

OPTIMAL = Solution(Termination.OPTIMAL, (1, 1), 1000, 1000)
WORSE = Solution(Termination.FEASIBLE, (0, 0), 1250, 900)
NOTHING = Solution(Termination.UNKNOWN, None, math.inf, -math.inf)


def selection(solver: str, solution: Solution, *history: Known, **changes: Any) -> Selection:
    """Return what a solver made of a problem, made by hand."""
    return Selection("pair", 2, 1, solver, 10.0, solution, 8.0, 1e8, history, **changes)


def made_by_hand() -> ProblemRun:
    """Return a run of three solvers: one proves 1000, one ends at 1250, one finds nothing and dies."""
    history = (Known(1.0, 2000, 500), Known(2.0, 1005, 900), Known(6.0, 1000, 1000))
    steps = (Step("parallel edges", ProblemSize(2, 4, 3, 1), ProblemSize(2, 4, 1, 1), 0.25),)
    return ProblemRun(
        "pair.json.gz",
        2,
        3,
        steps,
        (
            selection("auto", OPTIMAL, *history),
            selection("beam", WORSE, Known(4.0, 1250, 900)),
            selection("grid", NOTHING, failure="was ended by SIGSEGV"),
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two problems and something else."""
    iopddl.save(Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])]), tmp_path / "b.json.gz")
    iopddl.save(Problem.build([[4, 3]]), tmp_path / "a.json")
    (tmp_path / "README.md").write_text("no problem")
    return tmp_path


def test_time_to_is_when_a_choice_first_came_near() -> None:
    """Within 1 % of 1000 is 1010: after 2 s; within 0.1 % is 1001: after 6 s."""
    first, second, third = made_by_hand().selections

    assert [time_to(first.history, 1000, near) for near in (0.01, 0.001)] == [2.0, 6.0]
    assert time_to(second.history, 1000, 0.01) == math.inf
    assert time_to(third.history, math.inf, 0.01) == math.inf


def test_files_of_a_folder_are_its_problems(folder: Path) -> None:
    """By name; a file is its own list, and a folder without problems is refused."""
    assert [path.name for path in problem_files(folder)] == ["a.json", "b.json.gz"]
    assert problem_files(folder / "a.json") == [folder / "a.json"]
    with pytest.raises(JobError, match="has no problems"):
        problem_files(folder / "none")


def test_every_solver_gets_every_problem_and_the_same_limits(folder: Path) -> None:
    calls: list[tuple[str, str, float, int]] = []

    def run(path: Path, *, solver: str, time_limit: float, seed: int, **request: Any) -> Selection:
        calls.append((path.name, solver, time_limit, seed))
        return selection(solver, NOTHING)

    runs = list(run_problems(problem_files(folder), ("auto", "beam"), time_limit=5.0, seed=7, run=run))

    assert calls == [(name, solver, 5.0, 7) for name in ("a.json", "b.json.gz") for solver in ("auto", "beam")]
    assert [(each.file, each.num_nodes, each.num_edges) for each in runs] == [("a.json", 1, 0), ("b.json.gz", 2, 1)]
    assert [len(each.selections) for each in runs] == [2, 2]
    assert runs[0].best_cost == math.inf


def test_a_run_that_is_stopped_keeps_what_it_has(folder: Path) -> None:
    """No other solver begins."""
    calls: list[str] = []

    def run(path: Path, *, solver: str, **request: Any) -> Selection:
        calls.append(solver)
        return selection(solver, NOTHING)

    runs = list(
        run_problems(
            problem_files(folder), ("auto", "beam"), time_limit=5.0, run=run, should_stop=lambda: len(calls) == 1
        )
    )

    assert calls == ["auto"]
    assert [len(each.selections) for each in runs] == [1]


def test_claims_are_recomputed_from_the_file(folder: Path) -> None:
    """A solver that claims what does not hold is named; (1, 1) costs 2."""

    def run(path: Path, *, solver: str, **request: Any) -> Selection:
        cost = 2 if solver == "auto" else 1
        return selection(solver, Solution(Termination.OPTIMAL, (1, 1), cost, cost))

    with pytest.raises(ProblemError, match="solver 'beam': the solution claims cost 1, its choice costs 2"):
        list(run_problems([folder / "b.json.gz"], ("auto", "beam"), time_limit=5.0, run=run))


def test_text_of_a_run_is_compared_whole() -> None:
    """Worked out by hand: b ends a quarter above the best, a is there after 6 of 8 s, and c draws nothing."""
    text = format_run(made_by_hand())

    assert text == (Path(__file__).parent / "golden" / "problem_run.txt").read_text()


def test_page_names_the_conditions_and_every_run() -> None:
    """All solvers of all problems in one table, then each problem by itself."""
    conditions = Conditions(date(2026, 1, 2), "autopar benchmark --problems p", "CPU", 2, 4e9, "Linux", {"numpy": "2"})

    page = format_page([made_by_hand()], conditions)

    assert page.startswith("# Selection problems, 2026-01-02\n\n- command: `autopar benchmark --problems p`\n")
    assert "- time limit of each solver: 10 s of wall time, reading the file included\n" in page
    assert "| pair | auto | 1,000 | 1,000 | 0.000 % | 2.0 | 6.0 | 8.0 | 100 MB | optimal |\n" in page
    assert "| pair | beam | 1,250 | 900 | 28.000 % | - | - | 8.0 | 100 MB | feasible |\n" in page
    assert "| pair | grid | - | - | - | - | - | 8.0 | 100 MB | unknown |\n" in page
    assert "## pair\n" in page
    assert "| parallel edges | 2 | 4 | 1 | 1 | 0.25 |\n" in page
    with pytest.raises(ValueError, match="at least one problem"):
        format_page([], conditions)


def test_plot_shows_the_orders_of_magnitude() -> None:
    """100, 10 and 1 are equally far apart; 0 has a line of its own; curves on one spot are a star."""
    first = [(0.0, 100.0), (2.0, 10.0), (4.0, 1.0), (6.0, 0.0)]

    lines = step_plot([("one", first), ("two", [(4.0, 1.0)])], end=8, x_label="s", y_label="y", width=8, height=4)

    assert lines == [
        "y",
        "1e+02 |aa",
        "      |  aa",
        "    1 |    **bb",
        "    0 |      aa",
        "      +--------",
        "       0 to 8 s",
        "       a: one",
        "       b: two",
        "       *: several of them",
    ]


def test_command_prints_and_writes_what_solvers_made_of_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both problems are solved for real; the page and its data are there after each."""
    code = main(
        ["benchmark", "--problems", str(folder), "--time-limit", "30", "--solvers", "beam", "-o", str(tmp_path)]
    )

    out, _ = capsys.readouterr()
    (page,) = tmp_path.glob(f"problems_{folder.name}_*.md")
    (data,) = tmp_path.glob(f"problems_{folder.name}_*.json")
    runs = json.loads(data.read_text())["runs"]
    assert code == 0
    assert out.startswith("a: 1 nodes, 0 edges\n")
    assert "## b\n" in page.read_text()
    assert [[each["cost"] for each in run["solvers"]] for run in runs] == [[3, 3], [2, 2]]
    assert [[each["solver"] for each in run["solvers"]] for run in runs] == [["portfolio", "beam"]] * 2


def test_json_of_the_command_has_the_choices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["benchmark", "--problems", str(folder / "b.json.gz"), "--json"])

    (run,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert run["solvers"][0]["choice"] == [1, 1]
    assert run["solvers"][0]["time_limit"] == 60.0
    assert run["presolve"][0]["step"] == "parallel edges"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("zoo:gpt2 --problems p", "give only one of MODEL, --spec or --all, and --problems"),
        ("--all --problems p", "give only one of"),
        ("--problems p --gpus 8", "--gpus cannot be combined with --problems"),
        ("--problems p --cluster a100", "--cluster cannot be combined with --problems"),
        ("--problems no-such-folder", "has no problems"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_images_show_what_the_letters_show(tmp_path: Path) -> None:
    """One image per problem with a choice, and one of time against nodes where problems of a kind differ in size."""
    conditions = Conditions(date(2026, 1, 2), "autopar benchmark --problems p", "CPU", 2, 4e9, "Linux", {"numpy": "2"})
    small, large = (replace(made_by_hand(), file=f"k_nodes-{n}.json", num_nodes=n) for n in (10, 100))

    page, data, *images = write_page([small, large], conditions, tmp_path, "p")

    assert [image.name for image in images] == ["k_nodes-10.svg", "k_nodes-100.svg", "scaling.svg"]
    for image in images:
        assert f"]({image.relative_to(tmp_path)})" in page.read_text()
    assert json.loads(data.read_text())["runs"][0]["nodes"] == 10
    curves = ElementTree.parse(images[0]).getroot().findall("{*}polyline[@stroke-width='2']")
    assert [len(curve.get("points", "").split()) for curve in curves] == [7, 2, 3, 2, 2]
    assert "```" not in page.read_text()


def test_a_chart_is_where_its_numbers_are() -> None:
    """By hand: the axes end at (80, 34) and (570, 350); 10 is half-way between 1 and 100; an open point is white."""
    curve = Curve("one", ((0.0, 1.0), (5.0, 10.0), (10.0, 1000.0)), frozenset({2}))

    root = ElementTree.fromstring(chart("t", [curve], Axis("s", 0, 10), Axis("y", 1, 100, log=True)))

    lines = root.findall("{*}polyline[@stroke-width='2']")
    assert lines[0].get("points") == "80,350 325,192 570,34"
    assert [circle.get("fill") for circle in root.findall("{*}circle")] == ["#0072b2", "#0072b2", "white"]
    steps = ElementTree.fromstring(chart("t", [curve], Axis("s", 0, 20), Axis("y", 1, 100, log=True), steps=True))
    assert steps.findall("{*}polyline[@stroke-width='2']")[0].get("points") == (
        "80,350 202.5,350 202.5,192 325,192 325,34"
    )
    ends = [(own.get("cx"), own.get("cy")) for own in steps.findall("{*}circle")]
    assert ends == [("325.0", "34.0")]  # where the method ends, not the axis


def test_a_bold_curve_lies_under_the_others() -> None:
    """At the same value both are seen; it keeps its colour and its line of the legend."""
    points = ((0.0, 1.0), (1.0, 1.0))

    root = ElementTree.fromstring(
        chart("t", [Curve("a", points), Curve("b", points, bold=True)], Axis("s", 0, 1), Axis("y", 0, 2), steps=True)
    )

    drawn = [own for own in root.findall("{*}polyline") if own.get("stroke-width") in ("2", "5")]
    assert [(own.get("stroke-width"), own.get("stroke")) for own in drawn[::2]] == [("5", "#d55e00"), ("2", "#0072b2")]
    names = {own.text: float(own.get("y", "0")) for own in root.findall("{*}text") if own.text in ("a", "b")}
    assert names["a"] < names["b"]


def test_no_two_of_nine_curves_look_the_same() -> None:
    """Our planner and its eight baselines; the legend shows each as it is drawn."""
    curves = [Curve(str(number), ((0.0, 1.0), (1.0, 2.0))) for number in range(9)]

    root = ElementTree.fromstring(chart("t", curves, Axis("s", 0, 1), Axis("y", 0, 2)))

    lines = [(own.get("stroke"), own.get("stroke-dasharray")) for own in root.findall("{*}polyline[@stroke-width='2']")]
    assert lines[::2] == lines[1::2]
    assert len(set(lines)) == 9

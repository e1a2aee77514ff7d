"""What a person reads about a plan."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest

from autopar import report
from autopar.cli.commands import app
from autopar.cluster import cluster_from_dict
from autopar.cost import default_limit
from autopar.discover.rules import Halo, Local, Replaced, Rule, Rules, Scaled, Strategy
from autopar.errors import JobError, PlanError
from autopar.page.document import commands as page_commands
from autopar.plan import HistoryPoint, Plan, Rival, ValuePlacement
from autopar.program.records import Category
from autopar.report.answer import format_commands
from autopar.report.parts import AT_PEAK, from_peak
from autopar.report.text import WIDTH, format_table
from autopar.sharding import Partial, Replicate, Shard
from autopar.simulate.timeline import MemoryPeak, StageTimeline, Timeline
from tests.plans import two_stage_plan, two_variant_plan

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["report", "explain", "explain_ops"])
def test_text_of_a_plan_is_the_golden_one(name: str) -> None:
    """Compared whole: a change of the text is a change of the golden file."""
    plan = two_stage_plan()

    text = report.format_report(plan) if name == "report" else report.format_explain(plan, ops=name == "explain_ops")

    assert text == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("ops", [False, True])
def test_stages_with_their_own_placements_are_explained_one_by_one(ops: bool) -> None:
    """Each variant with its stages, its mesh and the blocks on it."""
    text = report.format_explain(two_variant_plan(), ops=ops)

    assert text == (GOLDEN / f"explain_variants{'_ops' if ops else ''}.txt").read_text()


def test_a_least_objective_that_the_simulator_does_not_rank_first_is_called_proven() -> None:
    """The gap of the plan is no weakness of the bound then, and the report says whose it is."""
    plan = two_stage_plan()
    assert plan.search is not None
    ended = replace(plan.search, termination="exhausted", history=(HistoryPoint(2.0, 0.97, 0.97),))
    open_still = replace(ended, history=(HistoryPoint(2.0, 0.975, 0.97),))

    assert ended.least == 0.97
    proven, unproven = (
        " ".join(report.format_report(replace(plan, search=own)).split()) for own in (ended, open_still)
    )
    assert "970 ms is proven optimal by the formula" in proven
    assert "search complete; the remaining 1.0 % is unproven" in unproven


def test_the_answer_is_the_golden_one() -> None:
    """Without the tables of the report, and with the commands that come next."""
    plan = two_stage_plan()

    text = report.format_answer(plan, report.next_commands(plan, None, "autopar solve zoo:tiny --gpus 8"))

    assert text == (GOLDEN / "answer.txt").read_text()
    assert len(text.splitlines()) <= 25


def test_commands_that_come_next_can_be_typed_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command line reads each of the answer, of a prediction and of the page."""
    monkeypatch.chdir(tmp_path)
    plan = two_stage_plan()
    alone, infers = _without_search(plan), replace(plan, job=replace(plan.job, mode="infer"))
    given = [report.next_commands(own, folder, "autopar solve zoo:tiny --gpus 8")
             for own in (plan, alone, infers) for folder in (None, "some\\ folder")]  # fmt: skip
    commands = [command for own in (*given, page_commands(plan), page_commands(infers)) for command, _ in own]
    assert len(commands) > 20

    for name in ("plan", "some folder"):
        two_stage_plan().save(tmp_path / name / "plan.json")
    two_stage_plan().save(tmp_path / "plan.json")
    for command in commands:
        program, *arguments = shlex.split(command)
        with click.Context(app, info_name=program) as context:
            known, found, rest = app.resolve_command(context, arguments)
            assert found is not None, command
            found.make_context(known, rest, parent=context).close()


def test_long_commands_stand_below_what_they_are_for() -> None:
    """No line with a comment is longer than the terminal's 80 columns."""
    short, long = ("autopar explain plan", "why"), (f"autopar export {'folder/' * 12}plan.json", "hand it on")

    lines = format_commands([short, long])

    assert lines == ["", "Next:", "  autopar explain plan  # why", "  # hand it on", f"  {long[0]}"]


@pytest.mark.parametrize(("slower", "word"), [(1.015, "ties"), (1.03, "next best")])
def test_plans_that_predictions_do_not_tell_apart_are_ties(slower: float, word: str) -> None:
    """A plan that is one per cent slower is not called slower."""
    plan = two_stage_plan()
    (other,) = plan.alternatives
    assert plan.simulated is not None
    assert other.simulated is not None
    simulated = replace(other.simulated, step_seconds=slower * plan.simulated.step_seconds)

    text = report.format_answer(replace(plan, alternatives=(replace(other, simulated=simulated),)))

    assert {line.split("  ")[0] for line in text.splitlines()} & {"ties", "next best"} == {word}


@pytest.mark.parametrize(("step", "told"), [(0.5, "50.0 % faster"), (1.0, "as fast"), (9.0, "9 times as slow")])
def test_an_answer_says_how_far_grid_search_is(step: float, told: str) -> None:
    """In words; one configuration is not called several."""
    rival = Rival("grid search", "dp, tp, pp", "dp=8 × pp=1", step, 1e9, 1, 1, "", 0.1)

    text = " ".join(report.format_answer(replace(two_stage_plan(), rival=rival)).split())

    assert f"dp=8 × pp=1: {told}, of 1 configuration tried" in text


def _without_search(plan: Plan) -> Plan:
    return replace(plan, search=None, alternatives=())


def _long_summary(plan: Plan) -> Plan:
    return replace(
        plan, summary="dp=8 (zero-1) × tp=8 (sequence parallel) × pp=4, 1F1B, " + "64 microbatches of 1, " * 4
    )


def _many_stages(plan: Plan) -> Plan:
    assert plan.simulated is not None, "the plan made by hand is simulated"
    simulated = replace(plan.simulated, stages=plan.simulated.stages * 16)
    return replace(plan, stages=plan.stages * 16, simulated=simulated)


def _one_device(plan: Plan) -> Plan:
    blocks = tuple(
        replace(block, ops=(), states=tuple(ValuePlacement(s.value, "") for s in block.states)) for block in plan.blocks
    )
    return replace(plan, mesh=(), blocks=blocks)


def _long_names(plan: Plan) -> Plan:
    states = tuple(ValuePlacement("encoder." * 20 + str(i), "RS(1)") for i in range(2))
    return replace(plan, blocks=tuple(replace(block, states=states) for block in plan.blocks))


def _many_sizes(plan: Plan) -> Plan:
    return replace(plan, model=replace(plan.model, dims=tuple((f"num_of_{i}", 1024) for i in range(9))))


@pytest.mark.parametrize(
    "change", [_without_search, _long_summary, _many_stages, _one_device, _long_names, _many_sizes]
)
def test_every_line_fits_80_columns(change: Callable[[Plan], Plan]) -> None:
    """Whatever the plan lacks or has too much of."""
    plan = change(two_stage_plan())

    lines = (
        report.format_answer(plan) + report.format_report(plan) + report.format_explain(plan, ops=True)
    ).splitlines()

    assert [line for line in lines if len(line) > WIDTH] == []


def test_a_plan_that_was_not_simulated_says_so() -> None:
    """Objective and simulated time are never confused."""
    plan = replace(two_stage_plan(), simulated=None, alternatives=())

    text = report.format_report(plan)

    assert "980 ms by the planner's formula, not simulated" in text
    assert "MFU" not in text


@pytest.mark.parametrize("termination", ["optimal", "exhausted", "time limit", "interrupted"])
def test_report_says_why_the_search_stopped(termination: str) -> None:
    """In the record's word, but that a space is exhausted is a complete search."""
    plan = two_stage_plan()
    assert plan.search is not None, "the plan made by hand has a search"

    text = report.format_report(replace(plan, search=replace(plan.search, termination=termination)))

    told = {"exhausted": "search complete; "}.get(termination, f"{termination}: ")
    assert f"stopped     {told}" in text


def test_a_limit_is_said_to_be_given_or_what_a_reserve_leaves() -> None:
    """A device of 80 GB has a reserve of 4.7 GB, whatever limit somebody asks for."""
    plan = two_stage_plan()
    usual = default_limit(cluster_from_dict(plan.job.cluster))

    given, left = (
        report.format_report(replace(plan, job=replace(plan.job, memory_limit=limit))) for limit in (40e9, usual)
    )

    assert "a limit that was given: the device has 80 GB" in given
    assert "a reserve of" not in given
    assert "80 GB less a reserve of 4.7 GB for context, libraries and fragmentation" in left


def test_a_plan_that_uses_next_to_no_memory_is_explained() -> None:
    """Then the column of bars is empty, as for every tiny model on a real device."""
    plan = two_stage_plan()

    text = report.format_explain(replace(plan, job=replace(plan.job, memory_limit=1e18)))

    assert "#" not in text.split("Memory")[1].split("\n\n")[0]


def test_explain_refuses_a_placement_that_does_not_fit_the_mesh() -> None:
    """Plan files are edited by hand."""
    plan = two_stage_plan()
    block = replace(plan.blocks[0], states=(ValuePlacement("wte", "S(1)"),))

    with pytest.raises(PlanError, match="'S\\(1\\)' is not a placement on a mesh of 2 axes"):
        report.format_explain(replace(plan, blocks=(block,)))


def test_table_continues_underneath_when_it_is_too_wide() -> None:
    """Columns are moved, never cut."""
    header = ("stage", "aaaaaaaaaa", "bbbbbbbbbb")

    lines = format_table(header, [("0", "1 GB", "2 GB")], width=20)

    assert lines == ["stage  aaaaaaaaaa", "    0        1 GB", "", "stage  bbbbbbbbbb", "    0        2 GB"]


def test_table_wraps_its_last_column_of_text() -> None:
    """Summaries of plans are longer than the space beside the figures."""
    rows = [("1", "2 ms", "dp=8, 1F1B, 64 microbatches of 1")]

    lines = format_table(("#", "step", "plan"), rows, width=36)

    assert lines == [
        "#  step  plan",
        "1  2 ms  dp=8, 1F1B, 64 microbatches",
        "         of 1",
    ]


@pytest.mark.parametrize(("error", "band"), [(None, None), (0.25, (1.5, 2.5)), (2.0, (0.0, 6.0))])
def test_no_step_is_expected_to_take_less_than_nothing(error: float | None, band: tuple[float, float] | None) -> None:
    """Also by a stack whose error is above 100 %."""
    assert Timeline(2.0, (), error).band == band


def test_times_of_a_timeline_are_listed_by_stage() -> None:
    """One line per stage in each table."""
    memory = MemoryPeak(3e9, 0.5, "B0", ((Category.PARAMETERS, 1e9), (Category.ACTIVATIONS, 2e9)))
    timeline = Timeline(1.0, (StageTimeline(0, 0.5, 0.08, 0.0, 0.2, 0.1, 0.05, 0.05, 0.02, 0.3, 0.2, memory),))

    text = report.format_timeline(timeline)

    assert text == (GOLDEN / "timeline.txt").read_text()


WHOLE, ROWS, TERMS = Replicate(), Shard(0), Partial()


def _rules() -> Rules:
    """Return rules in which every feature occurs."""
    matmul = Rule(
        "MatMul",
        (
            Strategy((WHOLE, WHOLE), (WHOLE,)),
            Strategy((WHOLE, Shard(1)), (Shard(1),), cyclic=True, uneven=True),
            Strategy((ROWS, WHOLE), (ROWS,), cyclic=True, uneven=True),
            Strategy((Shard(1), ROWS), (TERMS,), cyclic=True),
            Strategy((TERMS, WHOLE), (TERMS,)),
        ),
        "m",
        (2, 2),
        (2,),
        61,
        shapes=("[4,6], [6,8] -> [4,8]", "[6,9], [9,12] -> [6,12]"),
        seconds=0.0142,
    )
    split = Rule(
        "Split",
        (Strategy((Shard(1, 3), WHOLE), (Shard(1),) * 3, (Scaled(1, 0), Scaled(1, 1), Scaled(1, 2))),),
        "s",
        (2, None),
        (2, 2, 2),
        30,
        shapes=("[4,24], {8,8,8} -> [4,8], [4,8], [4,8]",),
        settings="axis=1",
        seconds=0.002,
    )
    pool = Rule(
        "MaxPool",
        (
            Strategy(
                (Shard(2),),
                (Shard(2),),
                halos=(Halo(0, 2, 1, 1, "lowest"),),
                replaced=(Replaced("pads", 0, 0), Replaced("pads", 2, 0)),
            ),
            Strategy((Partial("max"),), (Partial("max"),)),
        ),
        "p",
        (4,),
        (4,),
        12,
        reason="search stopped after 12 executions",
    )
    gather = Rule(
        "Gather",
        (
            Strategy((ROWS, WHOLE), (TERMS,), local=Local("autopar::GatherRows", 0, 0)),
            Strategy((Shard(1), ROWS), (ROWS,)),
            Strategy((Shard(1), Partial("max")), (Partial("max"),)),
        ),
        "g",
        (2, 1),
        (2,),
        9,
    )
    names = {"up": matmul, "qkv": split, "pool": pool, "embed": gather, "down": matmul}
    return Rules(names, 91, 2, 0.5, frozenset("ms"))


def test_rules_are_listed_once_with_all_there_is_to_say() -> None:
    """Equal ops share a rule; every feature of a strategy shows, and the legend explains what occurs."""
    text = report.format_rules(_rules())

    assert text == (GOLDEN / "rules.txt").read_text()


def test_legend_explains_no_more_than_what_is_shown() -> None:
    """One product needs no halos explained."""
    text = report.format_rules(_rules(), kind="MatMul")

    assert "halo" not in text
    assert "a: sum" in text


def test_rules_can_be_asked_for_by_kind() -> None:
    """As JSON with the names of the ops."""
    (entry,) = report.rules_to_json(_rules(), kind="MatMul")

    assert entry["ops"] == ["up", "down"]
    assert entry["rule"] == "[a,b],[b,c]->[a,c]; b: sum; P,R->P"
    assert (entry["source"], entry["executions"], entry["seconds"]) == ("executed", 61, 0.0142)
    assert entry["shapes"] == ["[4,6], [6,8] -> [4,8]", "[6,9], [9,12] -> [6,12]"]
    assert entry["strategies"][1] == {"inputs": ["R", "S(1)"], "outputs": ["S(1)"], "cyclic": True, "uneven": True}


def test_rules_from_the_cache_say_so() -> None:
    """In this run nothing was executed for them."""
    entries = report.rules_to_json(_rules())

    assert [entry["source"] for entry in entries] == ["executed", "executed", "cache", "cache"]


def test_a_kind_the_model_does_not_have_is_an_error_with_those_it_has() -> None:
    """An empty answer would look like "cannot be sharded"."""
    with pytest.raises(JobError, match="no op of kind 'Conv'") as caught:
        report.format_rules(_rules(), kind="Conv")

    assert caught.value.hint == "it has Gather, MatMul, MaxPool, Split"


def test_compute_is_split_at_the_peak_of_the_devices() -> None:
    """The parts still add up to the step, and what runs at the peak is the MFU's share of it."""
    simulated = two_stage_plan().simulated
    assert simulated is not None

    parts = dict(from_peak(simulated))

    assert parts[AT_PEAK] == pytest.approx(simulated.mfu * simulated.step_seconds)
    assert sum(parts.values()) == pytest.approx(sum(seconds for _, seconds in simulated.parts))
    assert "compute" not in parts

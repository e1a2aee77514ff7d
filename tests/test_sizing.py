"""Sizes: why nothing fits and what would; every claim is recomputed."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar import least_memory_plan, task_search
from autopar.api import plan_task
from autopar.cli import main
from autopar.errors import InfeasibleError, InterruptedSearchError, PinError
from autopar.formulate.block_memory import UNHOSTED
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import Constraints
from autopar.formulate.least_memory import least_split, state_bytes
from autopar.formulate.step_time import Pipeline, Split
from autopar.least_memory_plan import Looking, Thrifty, held_in_all, shortage, thriftiest
from autopar.pins import pins_from
from autopar.progress import Progress, StopCallback, never
from autopar.recompute import ON_DEVICE
from autopar.report.infeasible import format_infeasibility
from autopar.request import JobRequest
from autopar.search.node_solver import open_node
from autopar.search.outcome import Outcome
from autopar.sharding import Mesh
from autopar.sizing.explain import LEAST_SHARE, Explainer, Limits, counts, explain_infeasible
from autopar.sizing.planning import find_plan
from autopar.sizing.records import Infeasibility
from autopar.task import Effort, Task, pinned, prepare, resized
from tests.formulations import DIMS, good_choice, lowered_bytes, splits, stage_peak, tables
from tests.shares import one_in
from tests.sizes import SHORT, fits, short_task

UNHURRIED = Limits(*[float("inf")] * 5)


@cache
def _report(task: Task) -> Infeasibility:
    return _unhurried(task)


def _unhurried(task: Task) -> Infeasibility:
    error = explain_infeasible(task, Effort(top_k=1), Outcome(bound=float("inf")), most_gpus=8, limits=UNHURRIED)
    assert isinstance(error, InfeasibleError)
    assert isinstance(error.report, Infeasibility)
    return error.report


# The least memory.


@pytest.mark.parametrize(("name", "mode"), [("mlp-xs", "train"), ("gpt2", "train"), ("gpt2", "infer")])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_no_split_needs_less_than_the_thriftiest(name: str, mode: str, num_stages: int) -> None:
    """All splits with all flavours by enumeration; under constraints those they leave."""
    found, choice = tables(name, mode), good_choice(name, mode)
    chain = found.folded.chain
    pipeline = Pipeline(num_stages, 4, "1f1b" if mode == "train" else "forward-only")
    memory = lowered_bytes(found, choice)
    for constraints in (
        Constraints(),
        Constraints(cuts=frozenset({1, 2}), keeps=(frozenset(ON_DEVICE[:2]),) * len(chain)),
    ):
        flavours = constraints.flavours() if mode == "train" else ON_DEVICE[:1]
        least = np.inf
        for ranges in splits(len(chain), num_stages):
            if constraints.cuts is not None and not {start for start, _ in ranges[1:]} <= constraints.cuts:
                continue
            each = [
                min(
                    stage_peak(memory, pipeline, Split.uniform(ranges, (flavour,) * num_stages), stage)
                    for flavour in flavours
                )
                for stage in range(num_stages)
            ]
            least = min(least, max(each))

        answer = least_split(memory, pipeline, constraints)

        assert answer is not None
        assert answer[0] == pytest.approx(least, rel=1e-12)
        peaks = [stage_peak(memory, pipeline, answer[1], stage) for stage in range(num_stages)]
        assert max(peaks) == pytest.approx(answer[0], rel=1e-12)


@pytest.mark.parametrize("name", ["mlp-xs"])
def test_the_thriftiest_plan_is_above_its_floor_and_below_others(name: str) -> None:
    """What the search finds for speed never needs less than the floor; what is claimed is what the simulator says."""
    task = short_task(name, 2)

    found = thriftiest(task)

    fastest = plan_task(task, Effort(top_k=1)).simulated
    assert fastest is not None
    assert found.candidate is not None
    assert found.floor <= found.bytes <= max(stage.peak for stage in fastest.stages) * (1 + 1e-9)
    lacking = shortage(found, task)
    assert lacking.bytes <= found.bytes * (1 + 1e-9)  # within the same bytes a faster split may need fewer
    assert sum(lacking.by_category.values()) == pytest.approx(lacking.bytes, rel=1e-9)


@pytest.mark.parametrize(
    ("gpus", "batch", "layers", "hidden", "opened"), [(4, 4, 3, 8, False), (2, 16, 2, 16, False), (2, 16, 2, 16, True)]
)
def test_no_search_of_a_configuration_finds_much_less(
    gpus: int, batch: int, layers: int, hidden: int, opened: bool
) -> None:
    """Searched under a twentieth less memory than the thriftiest plan needs, no configuration has a plan."""
    dims = {"num_layers": layers, "hidden": hidden}
    task = prepare(JobRequest("zoo:mlp-xs", gpus=gpus, global_batch=batch, dims=dims))
    task = task.opened if opened else task
    found = thriftiest(task)
    search = replace(task.context(Effort(top_k=1)), memory_limit=found.bytes * 0.95)
    tried = 0

    for configuration in task.space:
        node = open_node(search, (configuration,), math.inf) if configuration.schedule == "1f1b" else None
        if node is not None:
            tried += 1
            node.solve(node.relax(math.inf), math.inf)
            assert node.best is None, configuration

    assert tried >= 4
    assert found.candidate is not None
    assert shortage(found, task).bytes <= found.bytes * (1 + 1e-9)


@dataclass(frozen=True)
class _Scripted:
    """Stands for a search, and for the work on a configuration: there are plans from some bytes on."""

    needs: float
    memory_limit: float
    tried: list[float]
    should_stop: StopCallback = never
    best: Any = None

    @property
    def pipeline(self) -> Any:
        return SimpleNamespace(fills=True)

    @property
    def finder(self) -> Any:
        return SimpleNamespace(costs=SimpleNamespace(peak=lambda choice, split: self.memory_limit))

    def open_node(self, family: Any, end: float) -> "_Scripted":
        self.tried.append(self.memory_limit)
        fits = self.memory_limit >= self.needs
        return replace(self, best=SimpleNamespace(choice=None, split=None) if fits else None)

    def relax(self, cutoff: float) -> None:
        pass

    def solve(self, bound: None, cutoff: float) -> None:
        pass


@pytest.mark.parametrize(("needs", "enough"), [(40.0, 0.0), (95.0, 0.0), (40.0, 70.0), (71.0, 70.0)])
def test_searches_come_down_to_what_is_needed(needs: float, enough: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From several times as much within a few steps; nobody looks for less than is enough."""
    monkeypatch.setattr(least_memory_plan, "open_node", lambda search, *given: search.open_node(*given))
    search: Any = _Scripted(needs, math.inf, [])
    first: Any = SimpleNamespace()

    def all_of_it() -> Iterator[None]:
        answer = yield from least_memory_plan._searched(search, [first], 100.0, first, enough, math.inf)
        found.append(answer[0])

    found: list[float] = []
    for _ in all_of_it():
        pass

    assert max(needs, enough) <= found[0] <= 1.05 * max(needs, enough)
    assert min(search.tried) >= enough
    assert len(search.tried) <= least_memory_plan.STEPS


def test_a_look_that_time_has_cut_says_so() -> None:
    """Also where all configurations have had their turn: the search with less memory that follows may find a plan."""
    task = short_task("mlp-xs", 2)
    one = replace(task, space=task.space[:1])
    little = 0.5 * thriftiest(one).bytes

    whole, cut = thriftiest(one, enough=little), thriftiest(one, enough=little, end=time.monotonic())

    assert (whole.complete, whole.is_cut) == (True, False)
    assert (cut.complete, cut.is_cut) == (False, True)


def test_the_thriftiest_plan_keeps_to_a_pinned_schedule() -> None:
    """Of the schedules that are left, and not of 1F1B in their place."""
    task = pinned(short_task("mlp-xs", 2), pins_from({"pin": {"stages": 2, "schedule": "zb-h1"}}))

    found = thriftiest(task)

    assert found.candidate is not None
    assert found.candidate.configuration.schedule == "zb-h1"
    assert shortage(found, task).bytes <= found.bytes * (1 + 1e-9)


def test_stages_in_turn_need_less_where_blocks_are_unequal() -> None:
    """Two devices that each hold an end of the model: neither has the embedding and the head, nor all layers."""
    task = prepare(JobRequest("zoo:llama3-8b", gpus=2, global_batch=16, dims=DIMS["llama3-8b"]))
    turns, line = (
        thriftiest(pinned(task, pins_from({"pin": {"stages": 2, "schedule": schedule}})).opened)
        for schedule in ("interleaved", "1f1b")
    )

    assert turns.candidate is not None
    assert turns.candidate.configuration.num_chunks == 2
    assert turns.bytes < line.bytes
    assert shortage(turns, task).bytes <= turns.bytes * (1 + 1e-9)


def test_state_is_a_floor_for_any_number_of_devices() -> None:
    """Parameters, gradients and optimizer state of all devices together are at least those of one."""
    task = short_task("mlp-xs", 1)
    one = build_tables(task.workload.folded(8), task.rules, Mesh.of(inner=1), task.costs)
    whole = state_bytes(one)

    for gpus in (2, 4):
        found = thriftiest(short_task("mlp-xs", gpus))
        assert whole / gpus <= found.bytes


# Why nothing fits.


def test_what_is_missing_is_said_with_where_and_of_what() -> None:
    task = short_task("mlp-xs", 2, 4.0e3)

    report = _report(task)

    lacking = report.shortage
    assert lacking.limit == 4.0e3
    assert lacking.over == lacking.bytes - lacking.limit > 0
    assert lacking.by_category["parameters"] > 0
    assert lacking.tensors[0].bytes == max(held.bytes for held in lacking.tensors) > 0
    graph = task.workload.folded(8).graph
    assert all(held.name in graph.values for held in lacking.tensors)


@pytest.mark.parametrize("memory", [4.0e3])
def test_ways_out_are_ways_out(memory: float) -> None:
    """As many GPUs, or as much memory, as the answer says: there a plan fits, and one GPU less is too few."""
    task = short_task("mlp-xs", 2, memory)
    assert not fits(task)

    report = _report(task)

    assert report.relaxations
    assert any(way.option.startswith("--gpus") for way in report.relaxations)
    for way in report.relaxations:
        assert way.step_seconds > 0
        if way.option.startswith("--gpus"):
            assert way.peak_bytes <= memory
            assert fits(resized(task, gpus=way.gpus))
            fewer = counts(task, task.job.gpus + 1, way.gpus - 1)
            assert not fewer or thriftiest(resized(task, gpus=fewer[-1])).bytes > memory
        if way.option.startswith("--memory-limit"):
            limit = float(way.option.split()[1]) * 1e9
            assert fits(resized(task, memory_limit=limit))


def _wasteful(task: Task, **_: Any) -> Thrifty:
    """Return a plan that needs much more than others."""
    return thriftiest(
        pinned(task, pins_from({"pin": {"recompute": "none", "zero": 0, "stages": 1, "tp": 1, "microbatches": 1}})),
        enough=1e9,
    )


def test_what_is_missing_and_more_memory_are_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much the plan needs that is found by bytes: searches with its memory find others."""
    task = short_task("mlp-xs", 2, 4.0e3)
    thrifty, wasteful = thriftiest(task.opened), _wasteful(task)
    assert wasteful.bytes > 1.2 * thrifty.bytes
    monkeypatch.setattr("autopar.sizing.explain.thriftiest", _wasteful)

    report = _unhurried(task)

    lacking = report.shortage
    (way,) = (own for own in report.relaxations if own.option.startswith("--memory-limit"))
    assert (way.plan, way.peak_bytes, way.step_seconds) == (lacking.plan, lacking.bytes, lacking.step_seconds)
    assert thrifty.bytes * (1 - 1e-9) <= lacking.bytes <= 1.05 * thrifty.bytes
    assert float(way.option.split()[1]) * 1e9 == pytest.approx(lacking.bytes, rel=2e-3)
    assert sum(lacking.by_category.values()) == pytest.approx(lacking.bytes, rel=1e-9)
    assert lacking.tensors[0].bytes > 0


def test_a_plan_that_fits_after_all_is_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it found by the search for a way out: the hint finds it."""
    free = short_task("mlp-xs", 2)
    task = resized(free, memory_limit=1.01 * thriftiest(free.opened).bytes)
    monkeypatch.setattr("autopar.sizing.explain.thriftiest", _wasteful)

    error = explain_infeasible(task, Effort(top_k=1), Outcome(bound=math.inf), most_gpus=8, limits=UNHURRIED)

    assert isinstance(error, InterruptedSearchError)
    limit = float(error.hint.split("--memory-limit ")[1]) * 1e9
    plan = find_plan(resized(task, memory_limit=limit), Effort(top_k=1)).plan
    assert plan is not None
    assert plan.simulated is not None
    assert max(stage.peak for stage in plan.simulated.stages) <= task.job.memory_limit


@pytest.mark.parametrize(("limits", "stops"), [(Limits(gpus=0.0, ways=0.0), False), (UNHURRIED, True)])
def test_what_was_not_tried_is_no_complete_conflict(limits: Limits, stops: bool) -> None:
    """Numbers of GPUs included: be time over or somebody impatient, the text says so, and a way out is there."""
    task = short_task("mlp-xs", 2, 4.0e3)
    asked: list[str] = []
    assert "2 GPUs" in _report(task).conflict

    error = explain_infeasible(
        task,
        Effort(top_k=1),
        Outcome(bound=math.inf),
        most_gpus=8,
        limits=replace(limits, conflict=-1e3) if not stops else limits,
        progress=lambda progress: asked.append(progress.detail),
        should_stop=lambda: stops and "4 GPUs" in asked,
    )

    assert isinstance(error, InfeasibleError)
    report = error.report
    assert isinstance(report, Infeasibility)
    assert not report.complete
    assert report.interrupted == stops
    text = format_infeasibility(report)
    assert ("The analysis was interrupted" if stops else "The time limit ended the analysis") in text
    assert "Without any one" not in text
    assert report.relaxations
    assert _report(task).complete


CONFLICTS: dict[str, tuple[dict[str, Any], float, set[str]]] = {
    "two": ({"pin": {"microbatches": 1, "tp": 4}}, 21e3, {"microbatches", "tp"}),
    "one": (
        {"pin": {"microbatches": 1, "stages": [1, 2]}, "forbid": {"schedule": "gpipe"}}, 17.5e3, {"microbatches"}
    ),
}  # fmt: skip
"""At 256 samples 4 devices are found to need 19 to 20 kB with one microbatch, and 22.1 kB if tensor-parallel too, with
the optimizer in host memory; on devices alone 23.3 and 30.5 kB."""


@pytest.mark.parametrize("name", one_in(2, CONFLICTS))
def test_the_conflict_is_irreducible(name: str) -> None:
    """Together nothing fits; without any one of its members something does; what is idle is not in it."""
    content, memory, guilty = CONFLICTS[name]
    free = prepare(JobRequest("zoo:mlp-xs", gpus=4, global_batch=256, dims=DIMS["mlp-xs"], memory_limit=memory))
    task = pinned(free, pins_from(content))

    report = _report(task)

    named = [item for item in task.pins.items if str(item) in report.conflict]
    idle = [item for item in task.pins.items if item not in named]
    assert {item.key for item in named} == guilty
    assert thriftiest(pinned(task, task.pins.without(*idle))).bytes > memory
    ways = {way.what: way for way in report.relaxations}
    for item in named:
        assert ways[f"without {item}"].peak_bytes <= memory


def test_pins_that_leave_no_plan_at_all_are_an_error_of_their_own() -> None:
    """Whatever the memory: stages that can begin nowhere."""
    task = short_task("mlp-xs", 2)
    nowhere = list(range(1, task.workload.folded(8).num_blocks))
    pins = pins_from({"pin": {"stages": 2}, "forbid": {"boundaries": nowhere}})

    with pytest.raises(PinError, match=r"'pin stages: 2' and 'forbid boundaries: .*'"):
        pinned(task, pins)


def test_the_answer_fits_a_terminal_and_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns of text on standard error, JSON on standard output, exit code 3."""
    arguments = ["solve", "zoo:mlp-xs", "--gpus", "2", "--memory-limit", "4e-6", "--global-batch", "8", "--no-cache"]
    arguments += [word for name, size in SHORT["mlp-xs"].items() for word in ("--set", f"{name}={size}")]

    assert main([*arguments, "--json"]) == 3

    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["error"] == "infeasible"
    assert found["infeasible"]["shortage"]["limit"] == 4000.0
    assert found["infeasible"]["conflict"][0] == "memory limit 4 kB"
    assert "Conflicting requirements" in err
    assert "Possible fixes" in err
    text = err[err.index("What is missing") :]
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_report_says_everything_it_knows() -> None:
    report = _report(short_task("mlp-xs", 2, 4.0e3))

    text = format_infeasibility(report)

    for part in (*report.conflict, *(way.what for way in report.relaxations)):
        assert part in text
    for held in report.shortage.tensors:
        assert held.name in text.replace("\n", " ")


def test_an_interrupted_answer_exits_as_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is known: a plan that is not the last word exits so, too."""
    report = replace(_report(short_task("mlp-xs", 2, 4.0e3)), complete=False, interrupted=True)

    def solve(model: str, **_: object) -> None:
        raise InfeasibleError("no plan fits", report=report)

    monkeypatch.setattr("autopar.api.solve", solve)

    assert main(["solve", "zoo:mlp-xs", "--gpus", "2", "--no-cache"]) == 130

    assert format_infeasibility(report) in capsys.readouterr().err


def test_a_search_that_cannot_succeed_is_ended_by_its_bytes() -> None:
    """And one that can is not: hope is lost only if the thriftiest plan is too large."""
    task = short_task("mlp-xs", 2, 1.0e3)
    fits = short_task("mlp-xs", 2)

    for own, lost in ((task, True), (fits, False)):
        watch = task_search.FeasibilityWatch(own, lambda _: None, lambda: False)
        watch._began -= 2 * task_search.PATIENCE
        assert not watch.should_stop()  # nothing was looked at so far
        watch.progress(Progress("begin"))
        asked = 0
        while not watch.should_stop() and watch._found is None:
            asked += 1
        assert asked > 1  # a step at a time
        assert watch.should_stop() == lost
        assert watch.lost == lost
    outcome = Outcome(bound=1.0)
    watch.rescue(outcome)
    (candidate,) = outcome.candidates
    assert candidate.configuration in fits.space


def test_a_look_that_time_cuts_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a search goes on, and the thriftiest plan is looked for again, with more time."""
    nothing = Thrifty(None, math.inf, 0.0, complete=False, is_cut=True)
    asked: list[float] = []

    def look(task: Task, *, enough: float, end: float) -> Looking:
        asked.append(end - time.monotonic())
        yield from ()
        return nothing if len(asked) == 1 else replace(nothing, complete=True, is_cut=False)

    monkeypatch.setattr(task_search, "look", look)
    watch = task_search.FeasibilityWatch(short_task("mlp-xs", 2), lambda _: None, lambda: False)
    watch.progress(Progress("begin"))
    watch._began -= 2 * task_search.PATIENCE

    assert not watch.should_stop()
    assert not watch.should_stop()  # not so soon again
    watch._began -= 4 * task_search.PATIENCE
    assert watch.should_stop()
    assert len(asked) == 2
    assert asked[1] > 1.5 * asked[0]


def test_a_plan_that_comes_meanwhile_ends_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may have a plan before it is known whether there is any: they wait for a step, and not for all."""
    steps: list[int] = []

    def look(task: Task, *, enough: float, end: float) -> Looking:
        for step in range(100):
            steps.append(step)
            yield
        return Thrifty(None, math.inf, 0.0, complete=True, is_cut=False)

    monkeypatch.setattr(task_search, "look", look)
    watch = task_search.FeasibilityWatch(short_task("mlp-xs", 2), lambda _: None, lambda: False)
    watch.progress(Progress("begin"))
    watch._began -= 2 * task_search.PATIENCE

    assert not watch.should_stop()
    assert not watch.should_stop()
    watch.progress(Progress("begin", incumbent=1.0))
    assert not watch.should_stop()
    assert steps == [0, 1]
    assert watch.least_memory_plan() is None  # where one is needed, all the rest is done at once
    assert len(steps) == 100


def test_a_search_begins_with_whatfits() -> None:
    """Where memory is so short that no usual configuration fits, there is a plan to return before any is bounded."""
    limit = 1.001 * thriftiest(short_task("mlp-xs", 2).on_device).bytes
    task = short_task("mlp-xs", 2, limit)
    told: list[Progress] = []

    outcome = task_search.search_plans(
        task, Effort(top_k=1), progress=told.append, should_stop=lambda: bool(told) and told[-1].incumbent < math.inf
    )

    assert told[-1].phase == "begin"
    assert outcome.stopped == "interrupted"
    (candidate,) = outcome.candidates
    assert candidate.objective == told[-1].incumbent
    plan = find_plan(task, Effort(top_k=1)).plan
    assert plan is not None
    assert plan.objective <= candidate.objective * (1 + 1e-9)


def test_nothing_that_is_too_large_is_begun_with() -> None:
    for task, is_lost in ((short_task("mlp-xs", 2, 1.0e3), True), (short_task("mlp-xs", 2), False)):
        watch = task_search.FeasibilityWatch(task, lambda _: None, lambda: False)
        spare = watch.least_memory_plan()
        assert (spare is None) == watch.lost == is_lost
        over = task_search.FeasibilityWatch(task, lambda _: None, lambda: False, time.monotonic() - 1.0)
        assert over.least_memory_plan() is None  # nobody looks for it once the search is to have ended
        assert not over.lost


def _unasked(*_: object, **__: object) -> Thrifty:
    raise AssertionError("nobody has to look for the thriftiest plan")


def test_what_is_proven_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every configuration needs more, the thriftiest plan is only looked for to say what is missing."""
    for name in ("look", "thriftiest"):
        monkeypatch.setattr(task_search, name, _unasked)

    task = short_task("mlp-xs", 2, 1.0e3)
    assert task.last_opened is not None
    assert task.costs.cluster.host is not None
    small = replace(task.costs.cluster.host, memory=1.0e3)  # holds no state: else parameters could lie there
    task = replace(task, costs=replace(task.costs, cluster=replace(task.costs.cluster, host=small)))
    assert task.last_opened is not None

    outcome = task_search.search_plans(task, Effort())

    assert outcome.proves_none


def test_state_that_neither_devices_nor_hosts_hold_is_proven_to_be_too_much() -> None:
    """Parameters, sums of gradients and moments lie on a device or on its host, wherever the plan puts them."""
    task = short_task("mlp-xs", 2, 1.0e3).last_opened
    assert task is not None
    context = task.context(Effort())
    one = next(own for own in task.space if own.num_stages == 1)
    state = context.roofline.bytes(one)

    rooms = {room: replace(context, host_room=room * state - 1.0e3).may_fit(one) for room in (0.9, 1.1)}

    assert rooms == {0.9: False, 1.1: True}


@pytest.mark.parametrize("passed", [False, True])
def test_nobody_looks_for_it_after_the_end_of_a_search_or_twice_at_once(
    passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, asked = short_task("mlp-xs", 2), []

    def look(*_: object, **__: object) -> Looking:
        asked.append(watch.should_stop())  # as another thread may ask meanwhile
        yield from ()
        return Thrifty(None, 0.0, 0.0, complete=True, is_cut=False)

    monkeypatch.setattr(task_search, "look", look)
    watch = task_search.FeasibilityWatch(
        task, lambda _: None, lambda: False, time.monotonic() + (-1.0 if passed else 60.0)
    )
    watch.progress(Progress("begin"))
    watch._began -= 2 * task_search.PATIENCE

    assert not watch.should_stop()
    assert asked == ([] if passed else [False])


def test_a_known_plan_is_taken_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be that over by a limit or by whoever asked; a faster one is found where there is time."""
    task = short_task("mlp-xs", 2)
    known = thriftiest(task.opened)
    assert known.candidate is not None
    for name in ("look", "thriftiest"):
        monkeypatch.setattr(task_search, name, _unasked)

    stopped = find_plan(task, Effort(top_k=1), should_stop=lambda: True, known=known)
    hasty, patient = (find_plan(task, Effort(top_k=1, time_limit=own), known=known) for own in (1e-9, None))

    assert stopped.outcome.stopped == "interrupted"
    assert stopped.outcome.best == known.candidate.objective
    for found in (stopped, hasty, patient):
        assert found.plan is not None
        assert found.outcome.best <= known.candidate.objective
    assert not patient.outcome.stopped


def test_an_answer_keeps_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its parts get as much less, but never less than a share of the limit; ways out are there all the same."""
    task, given = short_task("mlp-xs", 2, 1.0e3), list[Limits]()
    report = _report(task)

    def explain(own: Explainer, outcome: Outcome) -> Infeasibility:
        given.append(own.limits)
        return report

    monkeypatch.setattr(Explainer, "explain", explain)
    for limit, left in ((None, math.inf), (100.0, 35.0), (100.0, -5.0)):
        explain_infeasible(task, Effort(time_limit=limit), Outcome(), end=time.monotonic() + left)

    usual, half, least = given
    assert usual == Limits()
    assert [own.ways for own in (usual, half, least)] == pytest.approx([14.0, 7.0, 14.0 * LEAST_SHARE / 0.7], rel=1e-3)
    assert half.look == pytest.approx(3.0, rel=1e-3)


def test_ways_out_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is known when they are looked for: no time for the fastest plan leaves the thriftiest."""
    task = short_task("mlp-xs", 2, 4.0e3)
    ways = {way.option: way for way in _report(task).relaxations}

    monkeypatch.setattr("autopar.sizing.explain.quick", lambda effort, seconds: replace(effort, time_limit=1e-9))
    error = explain_infeasible(task, Effort(top_k=1), Outcome(bound=math.inf), most_gpus=8, limits=UNHURRIED)

    assert isinstance(error, InfeasibleError)
    assert isinstance(error.report, Infeasibility)
    hasty = {way.option: way for way in error.report.relaxations}
    assert hasty.keys() == ways.keys()
    assert any("gpus" in option for option in hasty)
    for option, way in hasty.items():
        assert way.step_seconds >= ways[option].step_seconds * (1 - 1e-9)


def test_numbers_that_cannot_hold_the_state_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes to numbers that may do; without the floor smaller ones would be looked at first."""
    state = held_in_all(short_task("mlp-xs", 1), UNHOSTED)
    task, looked = short_task("mlp-xs", 1, state / 3), list[int]()

    def look(own: Task, **limits: Any) -> Thrifty:
        looked.append(own.job.gpus)
        return thriftiest(own, **limits)

    monkeypatch.setattr("autopar.sizing.explain.thriftiest", look)

    explain_infeasible(task, Effort(top_k=1), Outcome(bound=math.inf), most_gpus=4, limits=UNHURRIED)

    assert looked == [1, 4]  # 2 and 3 are too few, whatever the plan


def test_a_plan_that_is_found_too_late_is_no_reason_to_buy_devices() -> None:
    """Where a limit cut the search for a plan that fits, what says what is missing may find one."""
    error = explain_infeasible(short_task("mlp-xs", 2), Effort(), Outcome(bound=1.0))

    assert isinstance(error, InterruptedSearchError)
    assert "fits, but was found too late" in str(error)


def test_what_is_cut_says_so() -> None:
    """No time leaves the first configuration alone, unless nothing else could be better."""
    task = short_task("mlp-xs", 2)

    assert thriftiest(task, end=0.0).is_cut
    assert not thriftiest(task).is_cut

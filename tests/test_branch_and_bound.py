"""The search: no plan of the space beats its bound, none it could have found beats its best, and it is repeatable."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from autopar.api import plan_task
from autopar.bench.baselines.recipes import recipe_search
from autopar.bounds.roofline import roofline
from autopar.configuration import Configuration
from autopar.errors import InterruptedSearchError
from autopar.formulate.block_memory import RESIDENT
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.formulate.tables import Tables
from autopar.pipeline_partition.interleaved import grouped_time
from autopar.pipeline_partition.p2p import hop_seconds
from autopar.progress import Progress
from autopar.recompute import ON_DEVICE, Recompute
from autopar.request import JobRequest
from autopar.schedule import SCHEDULES
from autopar.search.branch_and_bound import search as run_search
from autopar.search.node_solver import NodeSolver, open_node
from autopar.search.outcome import Outcome
from autopar.search.settings import DEFAULT_SETTINGS, NodeSettings, SearchSettings
from autopar.task import Effort, Task, prepare
from tests.formulations import (
    COSTS,
    DIMS,
    folded,
    lowered_bytes,
    optimum,
    random_choice,
    rules,
    splits,
    stage_peak,
    tables,
)

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each, and a plan is compared with another one."""


@cache
def _task(name: str, gpus: int, mode: str = "train", memory: float | None = None, batch: int = 8) -> Task:
    return prepare(
        JobRequest(
            f"zoo:{name}", gpus=gpus, global_batch=batch, mode=mode, dims=DIMS[name] | _short(name), memory_limit=memory
        )
    )


def _short(name: str) -> dict[str, int]:
    """Return the settings that make a model small enough for enumerations."""
    return {"num_layers": 2}


def _run(task: Task, *, keep: int = 1) -> Outcome:
    return run_search(task.space, task.context(Effort(top_k=keep)))


def _tables(task: Task, configuration: Configuration) -> tuple[Tables, Pipeline]:
    samples = task.job.global_batch // configuration.num_microbatches
    found = build_tables(task.workload.folded(samples), task.rules, configuration.mesh, task.costs)
    return found, configuration.pipeline(task.costs.stack)


@cache
def _everything() -> tuple[tuple[float, float], ...]:
    """Return step seconds and peak bytes of every choice of every configuration on two devices under every split."""
    task = _task("mlp-xs", 2, "infer", batch=4)
    plans = []
    for configuration in task.space:
        found, pipeline = _tables(task, configuration)
        node = NodeSolver(task.context(Effort()), [configuration], found, np.inf)
        for choice in product(*(range(node.count) for node in found.nodes)):
            totals, memory_of = found.block_seconds(choice), lowered_bytes(found, choice)
            if not np.isfinite(totals).all():
                continue
            hop = node.finder.costs.hops(choice, pipeline)
            for ranges in splits(found.folded.num_blocks, pipeline.num_stages):
                split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
                peaks = [stage_peak(memory_of, pipeline, split, s) for s in range(len(ranges))]
                seconds = step_time(totals, found.folded.chain, pipeline, split, hop_seconds(split, hop)).seconds
                plans.append((seconds, max(peaks)))
    return tuple(plans)


@pytest.mark.parametrize("memory", [None, 1400.0, 900.0])
def test_the_whole_space_by_enumeration(memory: float | None) -> None:
    """The least step time of all plans that fit is the plan's.

    Inference of two layers; the limits let through everything, most and some.
    """
    task = _task("mlp-xs", 2, "infer", memory, batch=4)
    best = min(seconds for seconds, peak in _everything() if peak <= task.job.memory_limit)

    outcome = _run(task)

    assert outcome.candidates[0].objective == pytest.approx(best, rel=CLOSE)
    assert outcome.bound <= best * (1 + CLOSE)


def test_nothing_is_pruned_that_is_better() -> None:
    """Solving every configuration on its own, in any order and without cutoff, finds no better plan."""
    task = _task("mlp-xs", 4)
    search = task.context(Effort(top_k=1))
    best = np.inf
    for configuration in reversed(task.space):
        node = NodeSolver(search, [configuration], _tables(task, configuration)[0], np.inf)
        bound = node.relax(np.inf)
        node.solve(bound, np.inf)
        if node.best is not None:
            assert bound <= node.best.objective * (1 + CLOSE)
            best = min(best, node.best.objective)

    outcome = _run(task)

    assert outcome.candidates[0].objective <= best * (1 + CLOSE)
    assert outcome.bound <= best * (1 + CLOSE)


@pytest.mark.parametrize("memory", [None, 9.0e3, 7.0e3])
def test_the_bound_is_below_plans_nobody_looked_for(memory: float | None) -> None:
    """Random choices under every split and any recompute that fit: none is faster than the bound."""
    task = _task("mlp-xs", 2, memory=memory)
    rng = np.random.default_rng(0)

    outcome = _run(task)

    tried = 0
    for configuration in task.space:
        found, pipeline = _tables(task, configuration)
        chain = found.folded.chain
        instance = problem(found, weights(found, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True))
        choice = optimum(instance)[1]
        weighing = NodeSolver(task.context(Effort()), [configuration], found, np.inf).finder.costs
        for _ in range(4):
            totals, bytes_of = found.block_seconds(choice), lowered_bytes(found, choice)
            hop = weighing.hops(choice, pipeline)
            for ranges in splits(len(chain), pipeline.num_stages):
                redo = tuple(ON_DEVICE[number] for number in rng.integers(3, size=len(ranges)))
                split = Split.uniform(ranges, redo)
                if not pipeline.fills:
                    passes = pass_seconds(found, choice, splits=SCHEDULES[pipeline.schedule].splits)
                    timed = grouped_time(passes, totals, chain, pipeline, split, hop_seconds(split, hop))
                    fits, seconds = memory is None, timed.seconds
                else:
                    peaks = [stage_peak(bytes_of, pipeline, split, stage) for stage in range(len(ranges))]
                    fits = max(peaks) <= task.job.memory_limit
                    seconds = step_time(totals, chain, pipeline, split, hop_seconds(split, hop)).seconds
                if fits:
                    tried += 1
                    assert outcome.bound <= seconds * (1 + CLOSE)
            choice = random_choice(instance, rng, near=choice)
    assert tried > 0


def test_more_memory_is_never_worse_and_fits() -> None:
    """Over a ladder of limits, from too little to plenty; placements under a limit are solved to half a percent."""
    objectives = []
    for memory in (1.0e3, 5.0e3, 7.0e3, 9.0e3, None):
        task = _task("mlp-xs", 2, memory=memory)
        outcome = _run(task)
        objectives.append(outcome.candidates[0].objective if outcome.candidates else np.inf)
        for candidate in outcome.candidates:
            configuration, split = candidate.configuration, candidate.split
            tables = task.context(Effort()).tables((configuration,))
            assert tables is not None, "it was found in them"
            memory_of = lowered_bytes(tables, candidate.choice)
            pipeline = configuration.pipeline(task.costs.stack)
            if not pipeline.fills:
                continue  # tests/test_pipeline_partition_interleaved.py has them
            peaks = [stage_peak(memory_of, pipeline, split, s) for s in range(len(split.ranges))]
            assert max(peaks) <= task.job.memory_limit

    assert np.isinf(objectives[0])
    assert np.isfinite(objectives[-2])
    for tight, loose in pairwise(objectives):
        assert loose <= tight * 1.005


def test_the_grid_is_no_better() -> None:
    """Recipes are restrictions of the same problems, so their best completion never beats the planner."""
    task = _task("mlp-xs", 4)
    dims = _batch_dims(task)

    grid = recipe_search(task.context(Effort(top_k=1)), task.space, dims)

    assert grid.candidates
    assert _run(task).candidates[0].objective <= grid.candidates[0].objective * (1 + CLOSE)


def _batch_dims(task: Task) -> Mapping[str, int]:
    from autopar.formulate.manual_recipes import batch_dims

    return batch_dims(task.workload.folded(2).graph.values, task.workload.folded(4).graph.values)


def test_the_same_job_gives_the_same_plan() -> None:
    """But for the clock."""
    task = _task("mlp-xs", 4)

    first, second = plan_task(task, Effort()), plan_task(task, Effort())

    assert (first.blocks, first.stages, first.objective, first.simulated, first.summary) == (
        second.blocks, second.stages, second.objective, second.simulated, second.summary,
    )  # fmt: skip
    assert [plan.summary for plan in first.alternatives] == [plan.summary for plan in second.alternatives]


def test_stopped_before_the_first_plan_is_an_error() -> None:
    """There is nothing to return."""
    with pytest.raises(InterruptedSearchError, match="before the first plan"):
        plan_task(_task("mlp-xs", 4), Effort(), should_stop=lambda: True)


def test_stopped_later_returns_the_best_so_far() -> None:
    """As soon as there is a plan, an interruption costs only what is left, and the bound stays true."""
    task = _task("mlp-xs", 4)
    seen: list[float] = []
    complete = plan_task(task, Effort(top_k=9))

    plan = plan_task(
        task,
        Effort(top_k=9),
        progress=lambda progress: seen.append(progress.incumbent),
        should_stop=lambda: any(np.isfinite(seen)),
    )

    assert plan.search is not None
    assert complete.search is not None
    assert plan.search.termination == "interrupted"
    assert plan.search.solved + plan.search.pruned < complete.search.solved + complete.search.pruned
    assert plan.search.bound <= complete.objective * (1 + CLOSE)


def test_a_time_limit_waits_for_the_first_plan() -> None:
    """A limit that is over at once leaves no time for a plan: the first one is taken, and it is said why."""
    task = _task("mlp-xs", 4)
    complete = plan_task(task, Effort())

    plan = plan_task(task, Effort(time_limit=1e-9))

    assert plan.search is not None
    assert complete.search is not None
    assert plan.search.termination == "time limit"
    assert plan.search.solved + plan.search.pruned < complete.search.solved + complete.search.pruned
    assert plan.search.bound <= complete.objective * (1 + CLOSE)


def test_a_time_limit_does_not_wait_for_ever() -> None:
    """If there is no plan well after the limit, that is said, and what to do."""
    impatient = SearchSettings(overtime_seconds=0.0)

    with pytest.raises(InterruptedSearchError, match="no plan found until well after the time limit") as caught:
        plan_task(_task("mlp-xs", 4), Effort(time_limit=1e-9, settings=impatient))

    assert caught.value.hint == "allow more time"


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "mlp-xs"])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2)])
def test_the_floor_is_below_every_strategy(name: str, mode: str, shape: tuple[int, ...]) -> None:
    """Op by op: no sharding on n devices beats one n-th of the work, so no plan is below the floor.

    Three divides few dims of these models, none of most ops.

    The floor is fitted at 4 and 8 samples; it is tried at 4, 8 and 16.
    """
    under = roofline(folded(name, mode, 4), folded(name, mode, 8), (4, 8), COSTS)
    schedule = "1f1b" if mode == "train" else "forward-only"

    for samples in (4, 8, 16):
        mesh = tables(name, mode, shape=shape).mesh
        found = build_tables(folded(name, mode, samples), rules(name, mode), mesh, COSTS)
        totals = sum(
            found.folded.kinds[node.kind].count * node.seconds.min()
            for node in found.nodes
            if node.options is not None and node.slot.name != "UPDATE"
        )
        for num_stages, num_microbatches in ((1, 1), (2, 4)):
            configuration = Configuration(num_stages, found.mesh, num_microbatches, schedule)
            least = under.seconds(configuration, samples * num_microbatches)
            assert least <= totals * (1 + (num_microbatches - 1) / num_stages) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "mlp-xs"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (4,)])
def test_no_placement_holds_less_state_than_the_floor(name: str, shape: tuple[int, ...]) -> None:
    """However a mesh shards parameters, gradients and moments, alone and cut into stages."""
    under = roofline(folded(name, "train", 4), folded(name, "train", 8), (4, 8), COSTS)
    found = tables(name, shape=shape)
    held = {kind.id: 0.0 for kind in found.folded.kinds}
    for item in found.bytes:
        if item.memory in RESIDENT:
            held[item.kind] += float(item.amounts.min())
    total = sum(kind.count * held[kind.id] for kind in found.folded.kinds)

    for num_stages in (1, 2):
        assert 0 < under.bytes(Configuration(num_stages, found.mesh, 4, "1f1b")) <= total / num_stages * (1 + 1e-9)


def test_the_floor_is_below_every_candidate() -> None:
    """And below the bound that is reported for it."""
    task = _task("mlp-xs", 4)
    search = task.context(Effort(top_k=9))

    outcome = run_search(task.space, search)

    for candidate in outcome.candidates:
        assert search.roofline.seconds(candidate.configuration, task.job.global_batch) <= candidate.objective


def test_microbatches_that_are_imported_differently_have_rules_and_floors() -> None:
    """A microbatch of one sample needs no Expand of the rotary tables; its ops and their work still line up."""
    dims = {"num_layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "seq": 6, "vocab": 44}
    task = prepare(JobRequest("zoo:llama3-8b", gpus=2, cluster="h100", global_batch=8, dims=dims))
    one, eight = task.workload.folded(1), task.workload.folded(8)
    assert {op.name for op in one.graph.ops} != {op.name for op in eight.graph.ops}

    for graph in (one, eight):
        found = task.rules_of(graph)
        assert all(found.of(op).kind == op.kind for kind in graph.kinds for op in kind.ops)
    lowest = roofline(one, eight, (1, 8), task.costs)

    configuration = next(c for c in task.space if c.num_stages == 1 and c.num_microbatches == 1)
    assert 0 < lowest.seconds(configuration, 8) <= roofline(eight, eight, (8, 8), task.costs).seconds(configuration, 8)


def test_an_op_the_probe_does_not_have_gets_its_rule() -> None:
    """Rules are found by name; what is missing is discovered on the spot, what is there is not run again."""
    task = prepare(JobRequest("zoo:mlp-xs", gpus=2, cluster="h100", global_batch=8, dims=DIMS["mlp-xs"]))
    graph = task.workload.folded(4)
    some = graph.kinds[0].ops[0]
    known = {name: rule for name, rule in task.rules.by_op.items() if name != some.name}

    found = replace(task, rules=replace(task.rules, by_op=known)).rules_of(graph)

    assert found.of(some) == task.rules.of(some)
    assert task.rules_of(graph) is task.rules


def test_the_history_only_gets_better() -> None:
    """From the first plan on; it ends with what the search found and proved."""
    outcome = _run(_task("mlp-xs", 4), keep=3)

    points = outcome.history.points
    assert points
    assert points[-1].objective == outcome.candidates[0].objective
    assert points[-1].bound == outcome.bound
    for before, after in pairwise(points):
        assert before.seconds <= after.seconds
        assert before.objective >= after.objective
        assert before.bound <= after.bound
    assert all(point.bound <= outcome.candidates[0].objective for point in points)


def test_a_choice_that_is_too_slow_by_what_it_takes_alone_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own row of the step program says so before its chain of blocks is cut, which takes far longer."""
    task = _task("mlp-xs", gpus=2, memory=7e3)
    search = task.context(Effort())
    (family, *_), far = [(each,) for each in task.space if each.num_stages == 1], 1e18
    first = open_node(search, family, far)
    assert first is not None
    bound = first.relax(far)
    assert first.state.column_generation is not None
    assert first.state.relaxed_choice is not None
    alone = first.state.column_generation.bound_of_choice(first.state.relaxed_choice)
    assert bound < alone * (1 - CLOSE), "else there is no cutoff between them"
    cut: list[object] = []
    search = replace(search, settings=SearchSettings(node=NodeSettings(relaxed_steps=0)))  # steps try other choices
    monkeypatch.setattr("autopar.search.stage_cutting.best_split", lambda *given: cut.append(given))

    for cutoff in ((bound + alone) / 2, 1.05 * alone):
        again = open_node(search, family, far)
        assert again is not None
        again.relax(cutoff)
        assert bool(cut) == (cutoff > alone)


def _small_search(settings: SearchSettings = DEFAULT_SETTINGS, tasks: float = np.inf, limit: float = np.inf) -> Outcome:
    """Return what a search finds that is interrupted after so many tasks."""
    task, told = _task("mlp-xs", 4), list[Progress]()
    context = task.context(Effort(top_k=1), progress=told.append, should_stop=lambda: len(told) >= tasks)
    return run_search(task.space, replace(context, settings=settings, time_limit=limit))


def test_an_interrupted_search_keeps_its_incumbent_and_a_valid_bound() -> None:
    """The bound is below the best plan of the whole search, and rises with the number of tasks."""
    whole = _small_search()
    found = [_small_search(tasks=tasks) for tasks in (1, 2, 4)]

    for own in found:
        assert own.stopped == "interrupted"
        assert own.bound <= whole.best <= own.best < np.inf
    assert [own.best for own in found] == sorted((own.best for own in found), reverse=True)


@pytest.mark.parametrize("limit", [np.inf, 600.0])
@pytest.mark.parametrize(
    "settings",
    [
        SearchSettings(incumbent_turn_every=2, patience=1, outer_tasks=0, outer_share=0.0),
        SearchSettings(
            incumbent_turn_every=1000, patience=1000, outer_tasks=1000, weak_bound_ratio=1.0, most_improved=0
        ),
        SearchSettings(relaxation_op_seconds=1e3, descent_reach=9.0, transfer_seconds=0.0),
    ],
    ids=["impatient", "patient", "heavy"],
)
def test_no_setting_makes_a_bound_wrong(settings: SearchSettings, limit: float) -> None:
    """Settings decide where the work goes; what is proven holds for the best plan of any of them."""
    best, found = _small_search().best, _small_search(settings, limit=limit)

    assert found.bound <= best * (1 + CLOSE)
    assert found.best >= _small_search().bound * (1 - CLOSE)
    assert found.stopped == ""

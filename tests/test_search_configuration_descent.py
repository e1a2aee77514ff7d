"""Configurations like that of the best plan, where memory is short."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopar.bounds.microbatch import COLD_START
from autopar.configuration import PLAIN, Configuration, Family, configurations, families
from autopar.describe.signature import Signature
from autopar.least_memory_plan import thriftiest
from autopar.progress import Progress
from autopar.recompute import Recompute
from autopar.request import JobRequest
from autopar.search.branch_and_bound import search as run_search
from autopar.search.candidate import Candidate
from autopar.search.configuration_descent import ConfigurationDescent, distance
from autopar.search.context import SearchContext
from autopar.search.node_solver import open_node
from autopar.search.outcome import Outcome
from autopar.search.settings import DEFAULT_SETTINGS, SearchSettings
from autopar.search.task_executor import Executor, InProcessExecutor
from autopar.search.tasks import Finding, SearchTask, TaskKind
from autopar.sharding import Mesh
from autopar.task import Effort, Task, prepare

REACH, TURNS = DEFAULT_SETTINGS.descent_reach, DEFAULT_SETTINGS.descent_turns
FAILURES = DEFAULT_SETTINGS.descent_failures
COUNTS = tuple(2**power for power in range(16))
FAMILIES: list[Family] = [(Configuration(1, Mesh.of(inner=2), count, "1f1b"),) for count in COUNTS]


def _candidate(objective: float, configuration: Configuration) -> Candidate:
    signature = Signature((), configuration.num_microbatches, "", 1, "none")
    plan = SimpleNamespace(objective=objective, signature=signature, configuration=configuration)
    plan.drafted = lambda: plan
    return plan  # type: ignore[return-value]


class _Known:
    """What a search is told of, and nothing follows from."""

    keep, settings = 1, DEFAULT_SETTINGS

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        self._bounds = known or {}

    def progress(self, *_: object) -> None: ...

    def least(self, family: Family) -> float:
        return 0.0

    def transferred_bound(self, family: Family) -> float:
        return self._bounds.get(family[0].num_microbatches, 0.0)

    def warm_start(self, family: Family) -> object:
        return COLD_START

    def record_finding(self, family: Family, finding: Finding) -> None: ...


def _climbed(
    best: tuple[float, int],
    finds: Mapping[int, float],
    *,
    bounds: Mapping[int, float] | None = None,
    final: bool = True,
    until: float = math.inf,
    ahead: int = 1,
    known: Mapping[int, float] | None = None,
) -> tuple[list[tuple[TaskKind, int]], Outcome]:
    """Return what is done on which microbatches, given the first plan and those that the second piece finds.

    Args:
        best: Objective and microbatches of the first plan.
        finds: Objective of the best plan by microbatches.
        bounds: Bounds by microbatches.
        final: Whether there is nothing to do after two tasks.
        until: When to end.
        ahead: Pieces that are prepared before the first of them is taken.
        known: Bounds by microbatches that follow from others.
    """
    outcome = Outcome()
    outcome.candidates = [_candidate(best[0], FAMILIES[COUNTS.index(best[1])][0])]
    series = ConfigurationDescent(_Known(), outcome, FAMILIES, _Known(known), until)  # type: ignore[arg-type]
    done: list[tuple[TaskKind, int]] = []
    waiting: list[tuple[int, TaskKind | None, Family | None]] = []
    index = 0
    while True:
        while len(waiting) < ahead and not series.is_over(index):
            search_task = series.next_task(index)
            if search_task is None:
                waiting.append((index, None, None))
            else:
                assert search_task.cutoff == outcome.best
                waiting.append((index, search_task.kind, search_task.family))
                done.append((search_task.kind, search_task.family[0].num_microbatches))
            index += 1
        if not waiting:
            return done, outcome
        number, kind, family = waiting.pop(0)
        if kind is None or family is None:
            series.record_finding(number, None)
            continue
        count = family[0].num_microbatches
        found = finds.get(count) if kind is TaskKind.ADVANCE else None
        plan = None if found is None else _candidate(found, family[0])
        is_final = final and kind is TaskKind.ADVANCE
        series.record_finding(number, Finding((bounds or {}).get(count, 0.0), plan, 0, is_final=is_final))


@pytest.mark.parametrize("ahead", [1, 3])
def test_it_goes_from_the_best_plan_to_better_ones(ahead: int) -> None:
    """Each is better than the last one, but a better one still that has none beside it is out of reach."""
    done, outcome = _climbed((9.0, 1), {2: 8.0, 4: 7.0, 8: 6.0, 512: 1.0}, ahead=ahead)

    assert outcome.candidates[0].configuration.num_microbatches == 8
    counts = {count for _, count in done}
    assert counts == {1, 2, 4, 8, 16, 32}, "as far as the best one reaches"
    assert 2 ** (math.log2(8) + REACH) == max(counts)


def test_the_nearest_come_first_and_what_is_begun_is_gone_on_with() -> None:
    done, _ = _climbed((9.0, 4), {})

    assert done[:2] == [(TaskKind.BOUND, 4), (TaskKind.ADVANCE, 4)]
    apart = [abs(math.log2(count / 4)) for _, count in done]
    assert apart == sorted(apart)


def test_what_cannot_be_better_is_left() -> None:
    done, _ = _climbed((9.0, 1), {2: 1.0}, bounds={2: 9.5, 4: 8.0})

    assert [count for _, count in done] == [1, 1, 2, 4, 4]


def test_what_is_known_to_be_slower_is_not_looked_at() -> None:
    done, _ = _climbed((9.0, 1), {}, known={2: 9.0, 4: 8.9})

    assert [count for _, count in done] == [1, 1, 4, 4]


def test_it_does_not_go_on_for_ever() -> None:
    """Neither with one configuration, nor with configurations that have no better plan, nor after its time."""
    endless, _ = _climbed((9.0, 1), {}, final=False)
    assert [count for _, count in endless].count(1) == 1 + TURNS
    assert _climbed((9.0, 1), {2: 8.0}, until=time.monotonic() - 1.0)[0] == []

    space = configurations(
        gpus=64, devices_per_node=8, num_blocks=64, global_batch=512, batch_of_model=None, mode="train"
    )
    plain = [family for family in families(space) if family[0].schedule in PLAIN]
    middle = Configuration(4, Mesh.of(outer=4, inner=4), 32, "1f1b")
    assert sum(distance(family[0], middle) <= REACH for family in plain) > 2 * FAILURES
    outcome, done = Outcome(), 0
    outcome.candidates = [_candidate(9.0, middle)]
    series = ConfigurationDescent(_Known(), outcome, plain, _Known())  # type: ignore[arg-type]
    while not series.is_over(done):
        search_task = series.next_task(done)
        assert search_task is not None
        series.record_finding(done, Finding(1.0, None, 0, is_final=search_task.kind is TaskKind.ADVANCE))
        done += 1
    assert done == 2 * FAILURES
    assert len(outcome.finished_nodes(plain)) == FAILURES


def test_devices_that_move_are_counted_once() -> None:
    """From stages to a mesh, or from one axis of a mesh to the other; microbatches are counted besides."""
    first = Configuration(4, Mesh.of(outer=2, inner=4), 64, "1f1b")

    assert distance(first, first) == 0.0
    assert distance(first, Configuration(2, Mesh.of(outer=2, inner=8), 64, "1f1b")) == 1.0
    assert distance(first, Configuration(4, Mesh.of(inner=8), 64, "1f1b")) == 1.0
    assert distance(first, Configuration(4, Mesh.of(dp=2, outer=1, inner=4), 32, "1f1b")) == 1.0
    assert distance(first, Configuration(1, Mesh.of(outer=2, inner=16), 64, "1f1b")) == 2.0


def _small(memory: float | None = None) -> Task:
    dims = {"num_layers": 2, "hidden": 16}
    return prepare(JobRequest("zoo:mlp-xs", gpus=2, global_batch=16, dims=dims, memory_limit=memory))


def _climbs(task: Task, effort: Effort, settings: SearchSettings = DEFAULT_SETTINGS) -> bool:
    """Whether the search of a task looks for plans near its first one; it has to find one."""
    told: list[Progress] = []
    assert run_search(task.space, replace(task.context(effort, progress=told.append), settings=settings)).candidates
    return any(own.phase == "descent" for own in told)


@pytest.mark.parametrize("short", [False, True])
def test_local_search_is_for_tight_memory(short: bool) -> None:
    """It runs with host memory, or if no construction fits; not where everything fits."""
    task = _small(thriftiest(_small().opened).bytes * 1.02).opened if short else _small().on_device

    assert _climbs(task, Effort(top_k=1)) == short


@pytest.mark.parametrize(("limit", "each", "climbs"), [(60.0, 1e3, True), (60.0, 1e-9, False), (None, 1e3, False)])
def test_local_search_is_for_time_limits_that_suffice_for_few_relaxations(
    limit: float | None, each: float, climbs: bool
) -> None:
    settings = replace(DEFAULT_SETTINGS, relaxation_op_seconds=each)

    assert _climbs(_small().on_device, Effort(top_k=1, time_limit=limit), settings) == climbs


class _Recorded(InProcessExecutor):
    """Takes down which families had nothing left to do, and which were worked on after that."""

    def __init__(self, search: SearchContext) -> None:
        super().__init__(search)
        self._at_work: dict[int, SearchTask] = {}
        self.finished: set[Family] = set()
        self.again: list[SearchTask] = []

    def start(self, number: int, search_task: SearchTask, end: float) -> None:
        self._at_work[number] = search_task
        if search_task.family in self.finished and not search_task.branches:
            self.again.append(search_task)
        super().start(number, search_task, end)

    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        found = super().wait(seconds)
        for number, finding in found:
            search_task = self._at_work.pop(number)
            if search_task.kind is TaskKind.ADVANCE and finding.is_final and not search_task.branches:
                self.finished.add(search_task.family)
        return found


@pytest.mark.parametrize("short", [False, True])
def test_what_is_finished_on_the_way_is_not_worked_on_again(short: bool) -> None:
    """Be it near the first plan, or near the best plain one: there are pipelines of more stages than blocks, too."""
    opened = thriftiest(_small().opened).bytes
    task = _small(opened * 1.02).opened if short else _small(thriftiest(_small().on_device).bytes * 1.1).on_device
    task = replace(task, unequal=None)
    executors: list[_Recorded] = []

    def open_executor(search: SearchContext) -> Executor:
        executors.append(_Recorded(search))
        return executors[-1]

    outcome = run_search(task.space, task.context(Effort(top_k=1)), open_executor)

    assert outcome.candidates
    assert executors[0].finished
    assert executors[0].again == []
    assert outcome.solved + outcome.pruned <= len(task.space)


def test_what_runs_again_in_part_only_is_found_below_a_cutoff() -> None:
    """A placement with all blocks recomputed takes longer than the cutoff, and the plan that has it does not."""
    task = prepare(JobRequest("zoo:llama3-8b", gpus=8, cluster="rtx4090"))
    search = task.on_device.context(Effort(top_k=1))
    mesh = Mesh.of(inner=4)
    found = next(
        own
        for own in families(task.on_device.space)
        if own[0].schedule in PLAIN and own[0].mesh == mesh and own[0].num_microbatches == 512
    )
    free = open_node(search, found, math.inf)
    assert free is not None
    free.solve(free.relax(math.inf), math.inf)
    assert free.best is not None
    kept = {own for stage in free.best.split.recompute for own in stage}
    assert Recompute.FULL in kept
    assert len(kept) > 1, "only a part runs again"

    bound = open_node(search, found, math.inf)
    assert bound is not None
    cutoff = free.best.objective * 1.01
    bound.solve(bound.relax(cutoff), cutoff)

    assert bound.best is not None
    assert bound.best.objective < cutoff

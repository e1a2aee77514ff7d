"""The search over stages with meshes of their own: what is listed, what bounds it, what it finds, and that it pays."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from autopar import solve, solvers
from autopar.bounds.roofline import roofline
from autopar.cluster import PRESETS, Cluster, Link, NodeGroup
from autopar.configuration import Configuration, configurations
from autopar.cost import default_limit
from autopar.errors import PinError
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot
from autopar.pins import Choices, Pins, unequal_left
from autopar.plan import Plan
from autopar.progress import Progress
from autopar.schedule import SCHEDULES
from autopar.search.branch_and_bound import search as run_search
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.heterogeneous_nodes import UnequalSearch, promising_counts, unequal_roofline
from autopar.search.heterogeneous_stages import UnequalNodeSolver
from autopar.search.mesh_placements import MeshPlacement, block_seconds_bound, fastest_op_seconds
from autopar.search.settings import DEFAULT_SETTINGS, SearchSettings, UnequalSettings
from autopar.search.stage_chains import StageOptions, stage_options
from autopar.search.submesh_space import nearest_submeshes, submeshes, unequal
from autopar.search.workbench import Workbench
from autopar.simulate import simulate
from autopar.solvers.staging import dynamic_program as dynamic
from autopar.staging import Leg, Route
from tests.enumeration import slow_nodes
from tests.executions import COSTS, Execution, model_rules, random_choice, written

NOTHING = Choices()
GPUS, SAMPLES, COUNT = 6, 4, 2
"""Six devices and four samples per microbatch: dp=3 divides no batch."""


@cache
def _execution() -> Execution:
    return Execution.of("gpt2", SAMPLES, COUNT)


def _search(cache_dir: Path, limit: float = 1e12) -> SearchContext:
    """Return a search for a tiny model on six slow devices."""
    folded, rules = _execution().folded, model_rules("gpt2", cache_dir)
    costs = replace(COSTS, cluster=COSTS.cluster.of_job(GPUS))
    own = roofline(folded, folded, (SAMPLES, SAMPLES), costs)
    return SearchContext(
        folded=lambda _: folded,
        rules=lambda _: rules,
        costs=costs,
        solver=solvers.load("auto"),
        roofline=own,
        global_batch=SAMPLES * COUNT,
        memory_limit=limit,
        keep=3,
        time_limit=float("inf"),
        settings=SearchSettings(overtime_seconds=0.0),
        progress=lambda _: None,
        should_stop=lambda: False,
        unequal=unequal(_space(folded.num_blocks), costs.cluster, GPUS, folded.num_blocks),
        rooflines=(own,),
    )


def _space(num_blocks: int) -> list[Configuration]:
    """Return equal stages, without zero-bubble pipelines of few microbatches: as fast as unequal stages."""
    listed = configurations(
        gpus=GPUS,
        devices_per_node=GPUS,
        num_blocks=num_blocks,
        global_batch=SAMPLES * COUNT,
        batch_of_model=None,
        mode="train",
    )
    return [
        each
        for each in listed
        if each.num_microbatches == COUNT and (each.num_stages <= COUNT or not SCHEDULES[each.schedule].splits)
    ]


def _solver(search: SearchContext) -> UnequalNodeSolver:
    assert search.unequal is not None
    return UnequalNodeSolver(search, search.unequal.submeshes, search.unequal, COUNT)


@cache
def _options(cache_dir: Path) -> tuple[SearchContext, UnequalNodeSolver, StageOptions]:
    search = _search(cache_dir)
    solver = _solver(search)
    return search, solver, _all_of(solver)


def _all_of(solver: UnequalNodeSolver) -> StageOptions:
    options = solver.first_options()
    assert options is not None, "the tiny model can be placed on every mesh"
    return options


def _random_route(options: StageOptions, rng: np.random.Generator) -> Route:
    """Return any route of two or three stages that the problem allows."""
    problem = options.staging
    for _ in range(10_000):
        count = int(rng.integers(2, 4))
        cuts = [0, *sorted(rng.choice(np.arange(1, problem.num_blocks), count - 1, replace=False).tolist())]
        device, legs = 0, []
        for start, stop in pairwise([*cuts, problem.num_blocks]):
            option, column = int(rng.integers(len(problem.sizes))), int(rng.integers(2))
            legs.append(Leg(start, stop, device, option, column))
            device += int(problem.sizes[option])
        if math.isfinite(problem.value(tuple(legs))):
            return tuple(legs)
    raise AssertionError("most problems have routes")


def test_stages_lie_in_nodes_or_on_whole_ones() -> None:
    """24 devices on nodes of 8: 1, 2, 4 and 8 anywhere in a node, 16 from a node on."""
    found = list(submeshes(PRESETS["h100"], 24))

    assert {each.mesh.size for each in found} == {1, 2, 4, 8, 16}
    for each in found:
        size = each.mesh.size
        assert all(start % 8 + size <= 8 if size < 8 else start % 8 == 0 for start in each.starts)
        assert all(start + size <= 24 for start in each.starts)
    assert [each.starts for each in found if each.mesh.size == 16] == [(0, 8)] * 4


def test_stages_lie_in_one_group_of_nodes() -> None:
    """Eight A100, then eight V100: whole nodes of either, no stage on both."""
    found = list(submeshes(_two_generations(), 16))

    assert {each.group for each in found} == {0, 1}
    assert all(start // 8 == (start + each.mesh.size - 1) // 8 == each.group for each in found for start in each.starts)


def test_the_meshes_that_are_kept_are_nearest_to_the_best_equal_ones() -> None:
    """Of sixteen nodes, sizes around 32, all meshes of a size or none."""
    found = list(submeshes(PRESETS["a100"], 128))

    kept = nearest_submeshes(found, 32)

    sizes = {each.mesh.size for each in kept}
    assert len(kept) <= 20
    assert {16, 32} <= sizes
    assert all(each in kept for each in found if each.mesh.size in sizes)


def test_no_route_is_below_its_bounds(cache_dir: Path) -> None:
    """Floor, a glance, relaxed problem, best route, any route: each is at most the next, and the formula no less."""
    search, solver, options = _options(cache_dir)
    assert search.unequal is not None
    lowest = unequal_roofline(search, search.unequal, COUNT)
    relaxed, best = dynamic.solve(solver.relaxed_staging()), dynamic.solve(options.staging)
    rng = np.random.default_rng(3)
    found = [_random_route(options, rng) for _ in range(300)]

    assert 0 < lowest <= solver.quick_bound() <= relaxed.bound <= best.bound <= best.seconds
    for route in found:
        value = options.staging.value(route)
        assert value >= best.bound
        assert options.time(route).seconds >= value * (1 - 1e-9)


def test_no_placement_is_below_the_bounding_problem(cache_dir: Path) -> None:
    """Random placements on every mesh: what stages take of them is at least what the bounding problem says."""
    search, solver, _ = _options(cache_dir)
    assert search.unequal is not None
    bound = dynamic.solve(solver.relaxed_staging()).bound
    rng = np.random.default_rng(8)
    placements = []
    for submesh in search.unequal.submeshes:
        tables = search.constraints.tables(
            _execution().folded, model_rules("gpt2", cache_dir), submesh.mesh, search.costs.on(submesh.devices)
        )
        assert tables is not None
        placements += [MeshPlacement.of(submesh, tables, random_choice(tables, rng), trains=True) for _ in range(2)]

    limits = [1e12] * len(placements)

    found = stage_options(
        placements, Pipeline(5, COUNT, "1f1b"), frozenset(range(2, 6)), search.costs, GPUS, limits, search.constraints
    )

    assert dynamic.solve(found.staging).seconds >= bound


def test_the_value_of_a_route_is_the_formula_where_hand_overs_take_no_time(cache_dir: Path) -> None:
    """One source of costs: with hand-overs in no time the pace is that of the slowest stage, as solvers take it."""
    _, _, options = _options(cache_dir)
    nothing = np.zeros_like(options.staging.ahead)
    free = replace(options, staging=replace(options.staging, ahead=nothing, back=nothing))
    rng = np.random.default_rng(4)

    for route in [_random_route(free, rng) for _ in range(100)]:
        assert free.time(route).seconds == pytest.approx(free.staging.value(route), rel=1e-9)


def test_a_searched_plan_of_unequal_stages_trains_like_the_model(cache_dir: Path) -> None:
    """Loss, gradients and updated states of the best plan of six devices, and of plans whose stages must differ."""
    search, solver, options = _options(cache_dir)
    best = solver.solve().best
    assert best is not None
    rng = np.random.default_rng(5)
    mixed = [
        route
        for route in (_random_route(options, rng) for _ in range(40))
        if len({_size(options, leg) for leg in route}) > 1
    ]

    for candidate in [best, *(solver.candidate(options, route) for route in mixed[:3])]:
        plan = written(candidate, search.global_batch, True)
        assert plan.stages[-1].devices[1] == GPUS
        _execution().check(plan)


def _size(options: StageOptions, leg: Leg) -> int:
    return int(options.staging.sizes[leg.option])


def test_unequal_stages_are_opened_where_they_may_pay(cache_dir: Path) -> None:
    """Six devices and a batch that three do not divide: the best plan has unequal stages, and the bound is below it."""
    reports: list[Progress] = []
    search = _search(cache_dir)
    space = _space(_execution().folded.num_blocks)

    found = run_search(space, replace(search, progress=reports.append))
    equal = run_search(space, replace(search, unequal=None))

    assert found.unequal is not None
    assert found.unequal.opened == (COUNT,)
    assert found.best < 0.9 * equal.best
    assert found.bound <= found.best
    assert found.bound <= found.unequal.bound
    assert max(own.bound for own in reports) <= found.bound  # while unequal stages were not looked at, too
    draft = found.candidates[0].draft
    assert draft is not None
    assert len({stage.devices[1] - stage.devices[0] for stage in draft.stages}) > 1
    assert any("stages with meshes of their own" in line for line in found.unequal.words(found.best))
    assert _simulated(search, found.candidates[0]) < 0.9 * _simulated(search, equal.candidates[0])


def test_unequal_stages_for_which_no_time_is_left_count_by_their_floor(cache_dir: Path) -> None:
    """Where they may pay: else they are not part of what is searched."""
    search = _search(cache_dir)
    outcome = run_search(_space(_execution().folded.num_blocks), replace(search, unequal=None))

    found = UnequalSearch(search, outcome)
    assert found.open_nodes(late=True) == 0
    bound = found.bound

    assert outcome.unequal is not None
    assert outcome.unequal.opened == ()
    assert bound == outcome.unequal.floor < outcome.best / DEFAULT_SETTINGS.unequal.opening_ratio
    assert any(line.startswith("not opened: ") for line in outcome.unequal.words(outcome.best))
    near = SimpleNamespace(best=bound, candidates=[], unequal=None, unequal_bound=0.0)
    other = UnequalSearch(search, near)  # type: ignore[arg-type]
    assert other.open_nodes(late=False) == 0
    assert math.isinf(other.bound)  # a plan as fast as that leaves nothing to look for


def test_unequal_stages_that_are_stopped_stay_open(cache_dir: Path) -> None:
    """A task that is stopped closes no node, and one that may end finds a better plan."""
    search = _search(cache_dir)
    outcome = run_search(_space(_execution().folded.num_blocks), replace(search, unequal=None))
    equal, solved = outcome.best, outcome.solved
    found = UnequalSearch(search, outcome)
    assert found.open_nodes(late=False) == 1
    task = found.next_task(0)

    for should_stop, left in ((lambda: True, 1), (lambda: False, 0)):
        own = Workbench(replace(search, should_stop=should_stop), portable=False)
        found.record_finding(0, own.execute(task, math.inf))
        assert found.left == left

    assert task.bound < found.bound <= outcome.best < 0.9 * equal
    assert outcome.solved == solved + 1
    assert found.is_over(1)


def test_of_long_chains_unequal_stages_are_left_where_nodes_are_alike(cache_dir: Path) -> None:
    search = replace(_search(cache_dir), settings=SearchSettings(unequal=UnequalSettings(most_blocks=1)))

    found = run_search(_space(_execution().folded.num_blocks), search)

    assert found.unequal is not None
    assert found.unequal.opened == ()
    assert any(line.startswith("not opened: ") for line in found.unequal.words(found.best))


def test_no_block_takes_less_than_its_ops_alone(cache_dir: Path) -> None:
    """On every mesh, under random placements; the placement problem of a kind says no less than its ops alone."""
    search = _search(cache_dir)
    assert search.unequal is not None
    rng = np.random.default_rng(11)
    raised = 0.0
    for submesh in search.unequal.submeshes:
        tables = search.constraints.tables(
            _execution().folded, model_rules("gpt2", cache_dir), submesh.mesh, search.costs.on(submesh.devices)
        )
        assert tables is not None
        alone = fastest_op_seconds(tables)
        least = block_seconds_bound(
            tables, lambda problem, _: search.solver.solve(problem), lambda: False, UnequalSettings()
        )
        assert (alone <= least).all()
        raised = max(raised, float((least - alone).max()))
        for _ in range(5):
            totals = tables.block_seconds(random_choice(tables, rng))
            assert (least <= totals[:, [Slot.FORWARD, Slot.BACKWARD]].sum(axis=1) * (1 + 1e-9)).all()
    assert raised > 0


def _simulated(search: SearchContext, candidate: Candidate) -> float:
    """Return the step seconds of a candidate's plan in the simulator."""
    program = _execution().program(written(candidate, search.global_batch, True))
    return simulate(program, search.costs).step_seconds


def test_memory_limits_count(cache_dir: Path) -> None:
    """With less memory than the best plan takes, plans found keep to it; with next to none there is none."""
    _, _, free = _options(cache_dir)
    best = dynamic.solve(free.staging)
    tight = _all_of(_solver(_search(cache_dir, 0.95 * _peak(free, best.route))))
    none = _solver(_search(cache_dir, 1e3))

    found = dynamic.solve(tight.staging)

    assert found.seconds > best.seconds
    assert _peak(tight, found.route) <= 0.95 * _peak(free, best.route)
    assert dynamic.solve(none.relaxed_staging()).bound == math.inf


def _peak(options: StageOptions, route: Route) -> float:
    """Return the bytes of the fullest stage as the simulator counts them."""
    flying = range(len(route), 0, -1)
    return max(
        options.placements[leg.option].memory.peak(leg.start, leg.stop, min(COUNT, number), flavours)
        for leg, number, flavours in zip(route, flying, options.flavours(route), strict=True)
    )


def _two_generations() -> Cluster:
    a100, v100 = PRESETS["a100"], PRESETS["v100"]
    return Cluster.mixed("two", (NodeGroup(1, a100), NodeGroup(1, v100)), Link("Ethernet", 5e9, 30e-6))


def _solve(cache_dir: Path, layers: int, **arguments: object) -> Plan:
    return solve("zoo:gpt2", dims={"num_layers": layers}, cache_dir=cache_dir, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow  # a whole search for a model of real size on 16 devices
def test_different_nodes_get_different_stages(cache_dir: Path) -> None:
    """On A100 and V100 a stage on each beats one mesh of both, at the pace of the slower, in the simulator."""
    plan = _solve(
        cache_dir, 8, gpus=16, cluster=_two_generations(), global_batch=128, pins=Pins(pin=Choices(microbatches=(8,)))
    )

    equal = [other for other in plan.alternatives if not other.variants]
    assert plan.simulated is not None
    assert plan.variants
    assert equal
    steps = [other.simulated.step_seconds for other in equal if other.simulated is not None]
    assert plan.simulated.step_seconds < 0.9 * min(steps)
    assert plan.objective == pytest.approx(plan.simulated.step_seconds, rel=0.02)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_stage_may_use_the_memory_of_its_own_group(cache_dir: Path) -> None:
    """Where the smaller device of two holds less than half of the model, a stage on the larger one holds the rest."""
    nodes = slow_nodes(1, 1e8, 1e8)
    small, large = (
        replace(nodes, name=name, device=replace(nodes.device, name=name, memory=memory))
        for name, memory in (("small", 9e3), ("large", 1e6))
    )
    mixed = Cluster.mixed("mixed", (NodeGroup(1, small), NodeGroup(1, large)), nodes.inter)

    plan = solve(
        "zoo:mlp-xs", gpus=2, cluster=mixed, global_batch=4, dims={"num_layers": 6, "hidden": 16}, top_k=1,
        cache_dir=cache_dir,
    )  # fmt: skip

    assert plan.simulated is not None
    assert plan.search is not None
    peaks = [stage.peak for stage in plan.simulated.stages]
    assert peaks[0] <= default_limit(small) < peaks[1] <= default_limit(large)
    assert any("use what their group has, up to 710 kB" in line for line in plan.search.space)


def test_three_stages_on_eight_devices_can_be_pinned(cache_dir: Path) -> None:
    """No equal meshes make three stages of eight devices."""
    pins = Pins(pin=Choices(stages=(3,), microbatches=(8,)))

    plan = _solve(cache_dir, 4, gpus=8, cluster="a100", global_batch=32, pins=pins)

    assert len(plan.stages) == 3
    assert plan.stages[-1].devices[1] == 8
    with pytest.raises(PinError, match="stages"):
        _solve(
            cache_dir,
            4,
            gpus=8,
            cluster="a100",
            global_batch=32,
            pins=Pins(pin=Choices(stages=(3,), mesh=((("", 2), ("", 2)),))),
        )


def test_pins_leave_what_they_say_of_unequal_stages() -> None:
    """Numbers of stages and microbatches are taken up; who speaks of the one mesh of equal stages means those."""
    space = unequal(_space(5), COSTS.cluster.of_job(GPUS), GPUS, 5)
    assert space is not None

    def left(pin: Choices = NOTHING, forbid: Choices = NOTHING) -> tuple[int, ...]:
        found = unequal_left(space, Pins(pin=pin, forbid=forbid), SAMPLES * COUNT, 6)
        return () if found is None else found.stages

    assert left() == (2, 3, 4, 5)
    assert left(Choices(stages=(3, 7))) == (3,)
    assert left(forbid=Choices(stages=(2, 3))) == (4, 5)
    assert left(forbid=Choices(boundaries=(1, 2, 3, 4))) == (2,)
    assert left(Choices(microbatches=(COUNT,), microbatch_size=(SAMPLES,))) == (2, 3, 4, 5)
    for pin in (
        Choices(microbatches=(COUNT + 1,)),
        Choices(microbatch_size=(SAMPLES + 1,)),
        Choices(schedule=("zb-h1",)),
        Choices(mesh=((("", 2),),)),
        Choices(dp=(2,)),
    ):
        assert left(pin) == ()


def test_nothing_is_opened_near_the_floor() -> None:
    """Up to 15 % above the floor there is little to gain; where nodes differ, anything above it counts."""
    alike, floors = PRESETS["a100"], {1: 2.0, 2: 1.0, 4: 1.05, 8: 1.1, 16: 1.2}

    assert promising_counts(alike, 1.14, floors, UnequalSettings()) == []
    assert promising_counts(alike, 1.16, floors, UnequalSettings()) == [2]
    assert promising_counts(_two_generations(), 1.08, floors, UnequalSettings()) == [2, 4]
    assert promising_counts(alike, math.inf, floors, UnequalSettings()) == [2, 4, 8]


def test_work_is_counted_and_cuts_the_search_at_the_same_point(cache_dir: Path) -> None:
    """With half of the work the bound is no higher, still one of the same plans, and the same every time."""
    search = _search(cache_dir)
    whole = _solver(search).solve()
    assert whole.best is not None
    assert 0 < whole.bound <= whole.best.objective

    search = replace(search, settings=SearchSettings(unequal=UnequalSettings(most_work=whole.work / 2)))
    cut = [_solver(search).solve() for _ in range(2)]

    assert len({(own.bound, own.work, own.best and own.best.objective) for own in cut}) == 1
    assert cut[0].bound <= whole.bound
    assert cut[0].work < whole.work

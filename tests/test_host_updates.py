"""State in host memory beyond the optimizer's, and updates that the host runs: numbers, prices, memory, the search."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.api import plan_task
from autopar.cluster import PRESETS, cluster_from_dict
from autopar.configuration import Configuration
from autopar.cost import CostModel, Resharder
from autopar.degrees import Degrees
from autopar.errors import ClusterError, PinError, PlanError, ProgramError
from autopar.estimates import Estimator
from autopar.formulate.constraints import Constraints
from autopar.frameworks.restriction import kept_to
from autopar.least_memory_plan import thriftiest
from autopar.pins import Pins, pins_from
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.program.lower import lower, lower_blocks
from autopar.program.records import Category, Program, SegmentPhase
from autopar.program.text import format_program, parse_program
from autopar.recompute import STATE_KINDS, Hosted, Recompute
from autopar.request import JobRequest
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.simulate.flat import simulate_flat
from autopar.simulate.ranges import chain_bytes
from autopar.task import Effort, Task, prepare
from autopar.workload import open_workload
from tests.executions import COSTS, Execution, found_candidates, model_rules, solved_candidate, written

H100 = PRESETS["h100"]
SMALL = {"num_layers": 4, "hidden": 256, "heads": 4, "vocab": 512, "seq": 64}
PLAIN = Degrees(dp=2, pp=2, microbatch=2, global_batch=16)
KINDS = [str(own) for own in STATE_KINDS]
ON_HOST = KINDS[1:]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Return predictions of a small GPT."""
    return Predictor(open_workload("zoo:gpt2", dims=SMALL), tmp_path_factory.getbasetemp() / "rules")


def _offloading(plan: Plan, offload: str, recompute: str = "none") -> Plan:
    return replace(plan, stages=tuple(replace(own, recompute=recompute, offload=offload) for own in plan.stages))


def _case(cache_dir: Path, stages: int = 2, schedule: str = "1f1b") -> tuple[Execution, Plan]:
    execution = Execution.of("gpt2", 4, 2, steps=2)
    configuration = Configuration(stages, Mesh.of(inner=4 // stages), 2, schedule)
    candidate = solved_candidate(execution.folded, model_rules("gpt2", cache_dir), configuration, 4)
    return execution, written(candidate, 8, True)


# The law.


@pytest.mark.parametrize(
    ("stages", "schedule", "offload"),
    [
        (2, "1f1b", "parameters"),
        *(
            pytest.param(*case, own, marks=pytest.mark.slow)
            for case in ((2, "1f1b"), (1, "1f1b"), (2, "zb-h1"))
            for own in ON_HOST
        ),
    ],
)
def test_wherever_state_lies_the_numbers_are_the_same(
    stages: int, schedule: str, offload: str, cache_dir: Path
) -> None:
    """Over two steps; the text of the program says where it lies."""
    execution, plan = _case(cache_dir, stages, schedule)
    plan = _offloading(plan, offload, "full" if schedule == "1f1b" else "none")

    execution.check(plan)

    program = execution.program(plan)
    assert parse_program(format_program(program)) == program
    kind = STATE_KINDS[Hosted(offload)]
    there = {part.category for stage in program.stages for part in stage.hosted}
    wanted = {Category.GRADIENTS: kind.sums, Category.PARAMETERS: kind.parameters, Category.OPTIMIZER: True}
    assert there == {category for category, is_there in wanted.items() if is_there}


def _without(program: Program, phase: SegmentPhase) -> Program:
    segments = (
        replace(own, instructions=own.instructions[1:], stores=own.stores[1:]) if own.phase is phase else own
        for own in program.segments
    )
    return replace(program, segments=tuple(segments))


@pytest.mark.parametrize("phase", [SegmentPhase.SUM_FETCH, SegmentPhase.PARAMETER_FETCH])
def test_what_is_in_host_memory_has_to_be_fetched(phase: SegmentPhase, cache_dir: Path) -> None:
    execution, plan = _case(cache_dir)
    broken = _without(execution.program(_offloading(plan, "parameters")), phase)

    with pytest.raises(ProgramError, match="in host memory"):
        execution.check_program(broken)


def test_a_plan_has_one_kind_of_state_in_host_memory(cache_dir: Path) -> None:
    execution, plan = _case(cache_dir)
    first, second = plan.stages
    mixed = replace(plan, stages=(replace(first, offload="update"), replace(second, offload="parameters")))

    with pytest.raises(PlanError, match="parameters and update in host memory"):
        lower(mixed, execution.folded, COSTS)
    with pytest.raises(PlanError, match="several kinds"):
        replace(first, offload="update*1 parameters*1").hosted  # noqa: B018
    with pytest.raises(PlanError, match="gradients and activations"):
        lower(_offloading(plan, "gradients", "offload"), execution.folded, COSTS)


# Prices.


def test_a_host_updates_at_a_share_of_its_memory_bandwidth() -> None:
    """Eight devices share 0.45 of 614.4 GB/s: 30 bytes of a billion parameters take 0.87 s."""
    host = H100.known_host()

    assert host.update_seconds(30e9) == pytest.approx(30e9 * 8 / (0.45 * 614.4e9))
    assert host.update_seconds(0.0) == 0.0
    silent = replace(host, memory_bandwidth=0.0)
    with pytest.raises(ClusterError, match="runs no update"):
        silent.update_seconds(1.0)
    described = H100.to_dict()
    assert cluster_from_dict(described).known_host().memory_bandwidth == 614.4e9


@pytest.mark.parametrize(
    "degrees",
    [
        PLAIN,
        pytest.param(replace(PLAIN, pp=1, zero=3), marks=pytest.mark.slow),
        pytest.param(replace(PLAIN, dp=1, pp=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_estimates_and_ranges_say_what_the_simulator_says(degrees: Degrees, predictor: Predictor) -> None:
    """Bytes on devices and hosts, and what a step takes longer; the flat simulation takes as long.

    Ranges count the largest gathers of a stage beside its fullest moment, whichever blocks they are of.
    """
    before, estimator = predictor.predict(degrees, H100), Estimator(predictor, H100)
    plans = [replace(degrees, offload=own) for own in (*KINDS, "parameters=0.5")]
    folded = predictor.workload.folded(degrees.samples)
    lowered = lower_blocks(before.plan.blocks, folded, Resharder(before.plan.device_mesh, COSTS))

    estimates = estimator.estimate([degrees, *plans])

    for number, own in enumerate(plans, start=1):
        found = predictor.predict(own, H100)
        memory = chain_bytes(
            lowered, folded, trains=True, host=H100.known_host(), what=found.plan.stages[0].hosted_state
        )
        for stage, timeline in zip(found.plan.stages, found.timeline.stages, strict=True):
            flying = min(found.plan.num_microbatches, degrees.pp - timeline.index)
            peak = memory.peak(*stage.blocks, flying, stage.flavours, away=stage.hosted)
            assert timeline.memory.bytes * (1 - 1e-9) <= peak <= 1.1 * timeline.memory.bytes
            hosted = memory.host_bytes(*stage.blocks, 1, stage.flavours, away=stage.hosted)
            assert hosted == pytest.approx(timeline.host_bytes)
        added = found.timeline.step_seconds - before.timeline.step_seconds
        assert estimates.step_seconds[number] - estimates.step_seconds[0] == pytest.approx(added, rel=2e-3)
        assert estimates.peak_bytes[number] == pytest.approx(found.timeline.peak_bytes, rel=0.05)
        flat = simulate_flat(found.program, CostModel(H100))
        assert flat.step_seconds == pytest.approx(found.timeline.step_seconds, rel=1e-9)


def test_more_in_host_memory_leaves_less_on_the_device(predictor: Predictor) -> None:
    """Per parameter 12 bytes of state, 4 of sums, 2 of parameters; passes wait for what they bring."""
    alone = replace(PLAIN, dp=1, pp=1)
    found = {own: predictor.predict(replace(alone, offload=own), H100) for own in ("", *KINDS)}

    held = {own: dict(each.timeline.stages[0].memory.breakdown) for own, each in found.items()}
    hosted = [each.timeline.stages[0].host_bytes for each in found.values()]
    assert hosted == sorted(hosted)
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER):
        assert held["update"][category] == held["optimizer"][category]
    assert held["gradients"][Category.GRADIENTS] < 0.2 * held["update"][Category.GRADIENTS]
    assert held["parameters"][Category.PARAMETERS] < 0.2 * held["gradients"][Category.PARAMETERS]
    seconds = [found[own].timeline.step_seconds for own in ON_HOST]
    assert seconds == sorted(seconds)


def test_the_update_on_the_host_by_hand(predictor: Predictor) -> None:
    """Its processors read and write 32 bytes per parameter; 4 of gradients go out and 2 of parameters come back."""
    found = predictor.predict(replace(PLAIN, dp=1, pp=1, offload="update"), H100)
    count, host = found.plan.model.num_parameters, H100.known_host()

    (stage,) = found.timeline.stages

    assert stage.update_seconds == 0.0
    link = count * (4 + 2) / 55.6e9
    blocks = len(found.program.stages[0].blocks)
    assert stage.host_link_seconds == pytest.approx(link + 2 * blocks * 10e-6, rel=0.01)
    assert stage.copy_seconds == pytest.approx(host.update_seconds(32 * count), rel=0.05)


# The search.


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["update", "parameters"])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_the_search_chooses_computes_the_same(stages: int, offload: str, cache_dir: Path) -> None:
    """The law, for plans that do not fit on the device: it takes what the simulator says, and fits where it should."""
    execution, rules = Execution.of("gpt2", 4, 2), model_rules("gpt2", cache_dir)
    configuration = Configuration(stages, Mesh.of(inner=2), 2, "1f1b")
    own = Constraints(hosted=frozenset({Hosted(offload)}))
    limit, plan = 5e5, None
    while plan is None or not any(stage.offload for stage in plan.stages):
        limit /= 1.2
        (candidate, *_) = found_candidates(execution.folded, rules, configuration, 4, limit, COSTS, own)
        plan = written(candidate, 8, True)

    execution.check(plan)
    timeline = simulate(execution.program(plan), COSTS)
    assert {stage.hosted_state for stage in plan.stages if stage.offload} == {Hosted(offload)}
    assert timeline.fits(limit)
    assert timeline.step_seconds == pytest.approx(candidate.objective, rel=0.02)


def _task(memory: float | None = None, **pins: object) -> Task:
    return prepare(
        JobRequest(
            "zoo:mlp-xs",
            gpus=2,
            cluster=H100,
            global_batch=8,
            dims={"num_layers": 2},
            memory_limit=memory,
            pins=pins_from(pins) if pins else None,
        )
    )


@pytest.mark.slow
def test_parameters_leave_the_devices_where_nothing_else_fits() -> None:
    """Below the least memory with the optimizer's state in host memory a plan with parameters there is found."""
    dims = {"num_layers": 8}
    alone = prepare(JobRequest("zoo:mlp-xs", gpus=1, cluster=H100, global_batch=8, dims=dims))
    assert alone.last_opened is not None
    before, after = (thriftiest(task, enough=1.0).bytes for task in (alone.opened, alone.last_opened))
    assert after < 0.2 * before
    task = replace(alone, job=replace(alone.job, memory_limit=0.5 * before))

    plan = plan_task(task, Effort())

    assert {stage.hosted_state for stage in plan.stages} == {Hosted.PARAMETERS}
    assert plan.search is not None
    assert any("CPU offload of parameters, gradients and optimizer was tried" in line for line in plan.search.space)
    assert plan.search.bound <= plan.objective
    silent = replace(H100, host=replace(H100.known_host(), memory_bandwidth=0.0))
    assert replace(task, costs=replace(task.costs, cluster=silent)).last_opened is None


@pytest.mark.parametrize(
    ("never", "first", "last"),
    [
        ((), {"activations", "optimizer"}, {"update", "gradients", "parameters"}),
        (("optimizer",), {"activations"}, set()),
        (tuple(KINDS), {"activations"}, set()),
        (("optimizer", "gradients", "parameters"), {"activations", "update"}, set()),
        (("activations", "optimizer", "update"), {"gradients"}, {"parameters"}),
        (("optimizer", "update", "gradients"), {"parameters"}, set()),
        (("optimizer", "parameters"), {"activations", "update"}, {"gradients"}),
    ],
)
def test_host_memory_is_opened_kind_by_kind(never: tuple[str, ...], first: set[str], last: set[str]) -> None:
    """The least kind of state that is not forbidden in need, parameters last; the optimizer stands for all kinds."""
    constraints = _task(forbid={"offload": list(never)} if never else {}).constraints

    assert constraints.reserve == first
    assert constraints.last == last
    assert (constraints.last_opened is None) == (not last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "kind"), [("megatron", "update"), ("deepspeed", "gradients"), ("fsdp", "parameters")]
)
def test_a_plan_for_a_framework_has_in_host_memory_what_the_framework_has_there(framework: str, kind: str) -> None:
    """Where nothing fits on the device."""
    dims, model = {"num_layers": 4} | SMALL, "zoo:gpt2"
    pins = kept_to(framework, Pins(), model=model, gpus=1, cluster=H100, dims=dims)
    free = prepare(JobRequest(model, gpus=1, cluster=H100, global_batch=4, dims=dims, pins=pins))
    limit = 0.98 * thriftiest(free.on_device, enough=1.0).bytes

    plan = plan_task(replace(free, job=replace(free.job, memory_limit=limit)), Effort())

    assert {stage.hosted_state for stage in plan.stages if stage.offload} == {Hosted(kind)}


@pytest.mark.slow
def test_pinned_kinds_of_state_are_kept_to() -> None:
    plan = plan_task(_task(pin={"offload": "gradients"}), Effort())

    assert {stage.offload for stage in plan.stages} == {"gradients"}
    assert {flavour for stage in plan.stages for flavour in stage.flavours} == {Recompute.NONE}
    with pytest.raises(PinError, match="kinds of state"):
        plan_task(_task(pin={"offload": ["none", "update", "parameters"]}), Effort())
    with pytest.raises(PinError, match="over the host link together"):
        plan_task(_task(pin={"offload": ["none", "activations", "parameters"]}), Effort())


@pytest.mark.slow
def test_bounds_hold_for_every_kind_of_state() -> None:
    """No plan is faster than the bound of the space it is in."""
    for own in ON_HOST:
        plan = plan_task(_task(pin={"offload": ["none", own]}), Effort())

        assert plan.search is not None
        assert np.isfinite(plan.objective)
        assert plan.search.bound <= plan.objective * (1 + 1e-9)

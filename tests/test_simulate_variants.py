"""Stages of different meshes in time: hops, devices apart, memory, and clusters of different nodes."""

from dataclasses import replace
from functools import cache

import pytest

from autopar.cluster import PRESETS, Cluster, NodeGroup
from autopar.cost import CostModel
from autopar.degrees import Degrees
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.program.crossings import handed
from autopar.program.lower import lower
from autopar.program.records import Category, Program, SegmentPhase
from autopar.program.verify import verify_program
from autopar.simulate import simulate, simulate_flat
from autopar.simulate.hops import hops
from autopar.workload import open_workload
from tests.variants import staged

A100 = PRESETS["a100"]
AGREE = 1e-3
"""Relative, between a device for all of its stage and every device apart."""
ACROSS_NODES, ACROSS = {"4, 8, 4"}, 1e-2
"""Devices 4 to 11 are on two nodes: half of them get their input sooner than the others, their stage at the latest."""


@cache
def _predictor() -> Predictor:
    return Predictor(open_workload("zoo:gpt2", dims={"num_layers": 6, "vocab": 1024}))


WIDE, NARROW, DEEP = (
    Degrees(dp=4, tp=2, microbatch=2, global_batch=64),
    Degrees(dp=2, tp=2, microbatch=4, global_batch=64, zero=1),
    Degrees(dp=1, tp=4, microbatch=8, global_batch=64, sequence_parallel=True),
)
PLANS: dict[str, tuple[tuple[Degrees, ...], str, tuple[int, ...]]] = {
    "8, 4, 4": ((WIDE, NARROW, DEEP), "1f1b", (2, 2)),
    "4, 8, 4": ((DEEP, WIDE, NARROW), "gpipe", (2, 3)),
    "equal sizes": ((NARROW, DEEP), "zb-h1", (3,)),
    "interleaved": ((WIDE, DEEP), "interleaved", (2, 2, 1)),
    "all alike": ((NARROW, NARROW, NARROW), "1f1b", (2, 2)),
    "in the shape of a V": ((DEEP, WIDE), "zb-v", (1, 2, 2)),
}


def _plan(name: str, cluster: Cluster = A100) -> Plan:
    degrees, schedule, layers = PLANS[name]
    return staged([_predictor().planned(each, cluster) for each in degrees], schedule, layers)


def _lowered(plan: Plan, costs: CostModel) -> Program:
    """Return the program of a plan, verified."""
    folded = _predictor().workload.folded(plan.microbatch)
    program = lower(plan, folded, costs)
    verify_program(program, folded)
    return program


@pytest.mark.parametrize("name", PLANS)
def test_devices_apart_take_as_long(name: str) -> None:
    """Every device with a clock of its own, and one for all of its stage."""
    costs = CostModel(A100)
    program = _lowered(_plan(name), costs)

    devices = simulate_flat(program, costs)

    together = simulate(program, costs).step_seconds
    assert devices.step_seconds == pytest.approx(together, rel=ACROSS if name in ACROSS_NODES else AGREE)
    assert devices.step_seconds <= together * (1 + 1e-9)
    assert (devices.idle >= 0).all()


@pytest.mark.parametrize("name", PLANS)
def test_a_hop_takes_what_the_planner_is_told(name: str) -> None:
    """The simulator times the pieces of the program, the planner asks for a value and two placements."""
    costs = CostModel(A100)
    program = _lowered(_plan(name), costs)
    table = program.table()

    for index, hop in enumerate(hops(program, costs)):
        first, second = program.stages[index], program.stages[index + 1]
        if first.devices == second.devices:
            continue
        for way, phase in ((hop.forward, SegmentPhase.FORWARD), (hop.backward, SegmentPhase.BACKWARD)):
            ahead = phase is SegmentPhase.FORWARD
            here, there = (first, second) if ahead else (second, first)
            values = handed(
                table.get((here.blocks[-1 if ahead else 0], phase)),
                (here.devices[0], here.mesh),
                table.get((there.blocks[0 if ahead else -1], phase)),
                (there.devices[0], there.mesh),
            )
            assert way.seconds == pytest.approx(costs.hand_over_seconds(values), rel=1e-12)
            assert way.seconds == pytest.approx(way.each.max(), rel=1e-12)
            assert way.seconds > 0


@pytest.mark.parametrize("name", ["8, 4, 4", "interleaved"])
def test_the_path_of_unequal_stages_adds_up_to_the_step(name: str) -> None:
    """Events, memory over time and the critical path are there for every stage."""
    costs = CostModel(A100)
    program = _lowered(_plan(name), costs)

    timeline = simulate(program, costs, trace=True)

    assert sum(piece.seconds for piece in timeline.path) == pytest.approx(timeline.step_seconds, rel=1e-9)
    assert timeline.step_seconds == simulate(program, costs).step_seconds
    assert len(timeline.stages) == program.num_groups


def test_a_stage_holds_what_its_own_placements_say() -> None:
    """Matrices on 2-way and on 4-way tensor parallelism: of a layer on stage 1 a device has half as much as on 0."""
    program = _lowered(_plan("equal sizes"), CostModel(A100))

    timeline = simulate(program, CostModel(A100))

    for stage, layers, tp in zip(program.stages, (2, 4), (2, 4), strict=True):
        held = sum(part.bytes for part in stage.resident if part.category is Category.PARAMETERS)
        matrices = layers * 12 * 768 * 768 * 2.0 / tp  # bfloat16, as the policy has it
        vectors = layers * (13 * 768) * 2.0  # norms and biases, copied or split
        embeddings = (1024 + 1024) * 768 * 2.0  # words, of which stage 1 has a copy, and positions
        assert matrices < held < matrices + vectors + embeddings
        assert dict(timeline.stages[stage.index].memory.breakdown)[Category.PARAMETERS] == held
    assert [stage.variant for stage in program.stages] == [0, 1]


def test_a_stage_that_starts_inside_a_node_and_ends_beyond_talks_over_the_nics() -> None:
    """Devices 2 to 5 of a node of 8, and 6 to 9: tensor parallelism of the latter leaves the node."""
    degrees = (replace(NARROW, tp=1, microbatch=4), DEEP, DEEP)
    plan = staged([_predictor().planned(each, A100) for each in degrees], "1f1b", (2, 2))
    large = replace(A100, devices_per_node=16, inter=replace(A100.inter, nics=None))
    program = _lowered(plan, CostModel(A100))

    timeline, inside = (simulate(program, CostModel(cluster)) for cluster in (A100, large))

    assert [stage.devices for stage in program.stages] == [(0, 2), (2, 6), (6, 10)]
    assert timeline.stages[1].collective_seconds == inside.stages[1].collective_seconds
    assert timeline.stages[2].collective_seconds > 2 * inside.stages[2].collective_seconds


def test_stages_on_slower_devices_take_longer() -> None:
    """Equal stages, the first on A100, the second on H100: each takes what it takes on a cluster of its own."""
    between = replace(A100.inter, bandwidth=1e10, latency=2e-5, nics=None)
    mixed = Cluster.mixed("mixed", (NodeGroup(1, A100), NodeGroup(1, PRESETS["h100"])), between)
    degrees = (replace(WIDE, sequence_parallel=True), WIDE)
    plan = staged([_predictor().planned(each, mixed) for each in degrees], "1f1b", (4,))
    program = _lowered(plan, CostModel(mixed))

    timeline = simulate(program, CostModel(mixed))

    alone = [simulate(program, CostModel(cluster)) for cluster in (A100, PRESETS["h100"])]
    assert timeline.stages[0].compute_seconds == alone[0].stages[0].compute_seconds
    assert timeline.stages[1].compute_seconds == alone[1].stages[1].compute_seconds
    assert alone[0].stages[1].compute_seconds > timeline.stages[1].compute_seconds
    flat = simulate_flat(program, CostModel(mixed))
    assert flat.step_seconds == pytest.approx(timeline.step_seconds, rel=AGREE)

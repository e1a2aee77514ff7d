"""Offloading to host memory: what it costs, what it frees, and that it changes no number."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from autopar.cluster import PRESETS, Cluster, cluster_from_dict, parse_cluster
from autopar.configuration import Configuration
from autopar.cost import CostModel, Overlap, Resharder
from autopar.cost.overlap import HIDING
from autopar.degrees import Degrees
from autopar.errors import ClusterError, JobError, PlanError, ProgramError
from autopar.estimates import Estimator
from autopar.formulate.offload_costs import HostLinks, with_host
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.formulate.tables import Slot
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.program.lower import lower, lower_blocks
from autopar.program.records import HOST_PHASES, Category, Program, Segment, SegmentPhase
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.recompute import Recompute, format_hosted
from autopar.sharding import Mesh
from autopar.simulate import Timeline, simulate
from autopar.simulate.flat import simulate_flat
from autopar.simulate.offload import host_links
from autopar.simulate.ranges import chain_bytes
from autopar.simulate.timeline import Row
from autopar.workload import open_workload
from tests.executions import COSTS, Execution, model_rules, solved_candidate, written

SMALL = {"num_layers": 4, "hidden": 256, "heads": 4, "vocab": 512, "seq": 64}
PLAIN = Degrees(dp=2, pp=2, microbatch=2, global_batch=16)
H100 = PRESETS["h100"]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Return predictions of a small GPT."""
    folder = tmp_path_factory.getbasetemp() / "rules"
    return Predictor(open_workload("zoo:gpt2", dims=SMALL), folder)


def _offloading(plan: Plan, recompute: str = "offload", offload: str = "optimizer") -> Plan:
    return replace(plan, stages=tuple(replace(s, recompute=recompute, offload=offload) for s in plan.stages))


# Costs.


def test_what_copies_add_is_what_no_pass_hides() -> None:
    """4 s on the link beside 3 s add 1 s; 2 s add the twentieth that hides nowhere, and without overlap all."""
    assert HIDING.copied(4.0, 3.0) == pytest.approx(1.0)
    assert HIDING.copied(2.0, 3.0) == pytest.approx(0.1)
    assert Overlap(share=1.0).copied(2.0, 3.0) == 2.0
    assert HIDING.copied(0.0, 3.0) == 0.0


def test_slots_of_the_host_link_by_hand() -> None:
    """Kind 0 has passes of 3 and 6 s and an update of 1 s; kind 1 has nothing to copy."""
    seconds = np.zeros((2, len(Slot)))
    seconds[0, [Slot.FORWARD, Slot.BACKWARD, Slot.UPDATE]] = 3.0, 6.0, 1.0
    links = HostLinks(np.array([4.0, 0.0]), np.array([4.0, 0.0]), np.array([5.0, 0.0]))

    found = with_host(seconds, links, HIDING)

    assert found[0, [Slot.OFFLOAD, Slot.FETCH, Slot.STATE]] == pytest.approx([1.0, 0.2, 4.0])
    assert not found[1].any()
    split = Split.uniform(((0, 1), (1, 2)), (Recompute.OFFLOAD, Recompute.NONE), (True, False))
    plain = Split.uniform(split.ranges, (Recompute.NONE, Recompute.NONE))
    once = Pipeline(2, 1, "1f1b")
    added = step_time(found, (0, 1), once, split, 0.0).seconds - step_time(found, (0, 1), once, plain, 0.0).seconds
    assert added == pytest.approx(1.0 + 0.2 + 4.0)


@pytest.mark.parametrize("recompute", ["none", "offload"])
@pytest.mark.parametrize("offload", [(), (True,), (True, False)], ids=["", "optimizer", "part"])
@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "gpipe")])
def test_the_formula_adds_what_the_simulator_adds(
    recompute: str, offload: tuple[bool, ...], stages: int, schedule: str, cache_dir: Path
) -> None:
    """Offloading all blocks of a stage or all but its last one: as much longer by the formula as by events.

    To a thousandth of the step.
    """
    configuration = Configuration(stages, Mesh.of(inner=2), 3, schedule)
    execution = Execution.of("gpt2", 4, 3)
    candidate = solved_candidate(execution.folded, model_rules("gpt2", cache_dir), configuration, 4)
    ranges = candidate.split.ranges
    plain = replace(candidate, split=Split.uniform(ranges, (Recompute.NONE,) * stages), draft=None)
    plan = written(plain, 12, True)
    lowered = lower_blocks(plan.blocks, execution.folded, Resharder(plan.device_mesh, COSTS))
    tables = candidate.tables
    seconds = with_host(tables.block_seconds(candidate.choice), host_links(lowered, COSTS), Overlap.of(COSTS.stack))
    pipeline = Pipeline(stages, 3, schedule)
    away = tuple((offload[0],) * (stop - start - 1) + offload[-1:] for start, stop in ranges) if offload else ()
    split = replace(Split.uniform(ranges, (Recompute(recompute),) * stages), offload=away)

    formula, without = (
        step_time(seconds, execution.folded.chain, pipeline, each, 0.0).seconds for each in (split, plain.split)
    )

    moved = zip(plan.stages, split.away, strict=True)
    other = replace(plan, stages=tuple(replace(s, recompute=recompute, offload=format_hosted(own)) for s, own in moved))
    simulated = simulate(lower(other, execution.folded, COSTS), COSTS).step_seconds
    before = simulate(lower(plan, execution.folded, COSTS), COSTS).step_seconds
    assert formula - without == pytest.approx(simulated - before, abs=1e-3 * before)
    assert (simulated > before) == (other != plan)


# Memory.


def test_saved_values_leave_the_device_and_are_counted_on_the_host(predictor: Predictor) -> None:
    """With 2 stages and 4 microbatches the first stage has two in flight: as much on the host as it kept before."""
    plain = predictor.predict(PLAIN, H100)
    moved = predictor.predict(replace(PLAIN, recompute="offload"), H100)

    for before, after in zip(plain.timeline.stages, moved.timeline.stages, strict=True):
        kept, left = (dict(stage.memory.breakdown)[Category.ACTIVATIONS] for stage in (before, after))
        assert left < 0.2 * kept
        assert after.host_bytes > 0.8 * kept
        assert before.host_bytes == before.host_link_seconds == before.copy_seconds == 0.0
        assert after.host_link_seconds >= after.copy_seconds > 0.0
    assert plain.timeline.host is None
    assert moved.timeline.host is not None
    assert moved.timeline.host.bytes == pytest.approx(2 * sum(stage.host_bytes for stage in moved.timeline.stages))


def test_the_optimizers_state_leaves_the_device(predictor: Predictor) -> None:
    """12 bytes per parameter, the last stage's copy of the tied embedding included.

    What is on the device during the update is a few buckets.
    """
    plain = predictor.predict(PLAIN, H100)
    moved = predictor.predict(replace(PLAIN, offload="optimizer"), H100)

    for before, after in zip(plain.timeline.stages, moved.timeline.stages, strict=True):
        state = dict(before.memory.breakdown)[Category.OPTIMIZER]
        assert dict(after.memory.breakdown)[Category.OPTIMIZER] == 0.0
        assert after.host_bytes == state
        assert after.memory.bytes <= before.memory.bytes
    hosted = sum(stage.host_bytes for stage in moved.timeline.stages)
    assert hosted == 12 * plain.plan.model.num_parameters + _copied_bytes(plain.plan)


def _copied_bytes(plan: Plan) -> float:
    """Return the bytes of optimizer state of the last stage's copy of the tied embedding."""
    vocab, hidden = (dict(plan.model.dims)[name] for name in ("vocab", "hidden"))
    assert isinstance(vocab, int)
    assert isinstance(hidden, int)
    return 12.0 * vocab * hidden


def test_the_link_takes_bytes_over_bandwidth(predictor: Predictor) -> None:
    """Per step the state of a stage goes out and comes back at 55.6 GB/s, each block's with a latency of 10 us.

    So does that of a tied embedding's copy, after them.
    """
    found = predictor.predict(replace(PLAIN, offload="optimizer"), H100)
    copied = (0.0, _copied_bytes(found.plan))

    assert tuple(program.hosted_copies for program in found.program.stages) == copied
    for stage, program in zip(found.timeline.stages, found.program.stages, strict=True):
        times = sum((kind, SegmentPhase.STATE_FETCH) in found.program.table() for kind in program.blocks)
        times += program.hosted_copies > 0
        assert stage.host_link_seconds == pytest.approx(2 * (stage.host_bytes / 55.6e9 + times * 10e-6))


@pytest.mark.parametrize("share", ["optimizer", "optimizer=0.5"])
def test_the_state_of_a_copy_costs_what_the_search_takes_it_to_cost(predictor: Predictor, share: str) -> None:
    """The estimate and the ranges of blocks of a search say what the simulator does: bytes on the host, and seconds."""
    found = predictor.predict(replace(PLAIN, offload=share), H100)
    folded = predictor.workload.folded(PLAIN.microbatch)
    lowered = lower_blocks(found.plan.blocks, folded, Resharder(found.plan.device_mesh, COSTS))
    memory = chain_bytes(lowered, folded, trains=True, host=H100.known_host())
    split = Split.of_stages(
        [stage.blocks for stage in found.plan.stages],
        [stage.flavours for stage in found.plan.stages],
        [stage.hosted for stage in found.plan.stages],
        memory.shared,
    )

    estimates = Estimator(predictor, H100).estimate([replace(PLAIN, offload=share), PLAIN])

    has_copies = share == "optimizer"
    assert bool(split.copied) == has_copies
    for number, (stage, program) in enumerate(zip(found.timeline.stages, found.program.stages, strict=True)):
        blocks, away = found.plan.stages[number].blocks, found.plan.stages[number].hosted
        assert memory.host_bytes(*blocks, 1, split.recompute[number], away=away) == pytest.approx(stage.host_bytes)
        if has_copies:
            assert split.copied[number] == pytest.approx(H100.known_host().there_and_back(program.hosted_copies))
    added = predictor.predict(PLAIN, H100).timeline.step_seconds - found.timeline.step_seconds
    assert np.subtract(*estimates.step_seconds[::-1]) == pytest.approx(added, rel=1e-6)
    peak = max(stage.memory.bytes for stage in found.timeline.stages)
    assert estimates.peak_bytes[0] == pytest.approx(peak, rel=0.01)


def test_the_text_of_a_program_names_the_state_of_copies(predictor: Predictor) -> None:
    program = predictor.predict(replace(PLAIN, offload="optimizer"), H100).program

    assert parse_program(format_program(program)) == program
    assert f"copies={program.stages[1].hosted_copies:.0f}" in format_program(program)
    with pytest.raises(ProgramError, match="of copies lie in host memory"):
        replace(program.stages[1], hosted=())


def test_a_host_that_is_too_small_is_said_so(predictor: Predictor) -> None:
    """Of a host, 0.8 of its memory may be taken."""
    assert H100.host is not None
    degrees = replace(PLAIN, offload="optimizer")
    needed = predictor.predict(degrees, H100).timeline.host
    assert needed is not None

    for memory, fits in ((needed.bytes / 0.8 * 1.01, True), (needed.bytes / 0.8 * 0.99, False)):
        found = predictor.predict(degrees, replace(H100, host=replace(H100.host, memory=memory)))
        assert found.fits == fits


def test_devices_of_two_hosts_are_counted_apart(predictor: Predictor) -> None:
    """With hosts of one device each holds its own; stages hold different amounts."""
    assert H100.host is not None
    apart = replace(H100, host=replace(H100.host, devices=1))

    timeline = predictor.predict(replace(PLAIN, offload="optimizer"), apart).timeline

    assert timeline.host is not None
    assert timeline.host.bytes == max(stage.host_bytes for stage in timeline.stages)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.6])
def test_a_share_of_the_state_lies_on_the_host(predictor: Predictor, share: float) -> None:
    """That of the first blocks of each stage, as many as come nearest; bytes, seconds and devices as with all of it."""
    plain, found, whole = (
        predictor.predict(replace(PLAIN, offload=offload), H100) for offload in ("", f"optimizer={share}", "optimizer")
    )

    for stage, before, after, most in zip(
        found.plan.stages, plain.timeline.stages, found.timeline.stages, whole.timeline.stages, strict=True
    ):
        count = sum(stage.hosted)
        assert 0 < count < len(stage.hosted)
        assert stage.hosted == (True,) * count + (False,) * (len(stage.hosted) - count)
        assert abs(after.host_bytes / most.host_bytes - share) < 0.5
        state = dict(before.memory.breakdown)[Category.OPTIMIZER]
        assert dict(after.memory.breakdown)[Category.OPTIMIZER] == pytest.approx(state - after.host_bytes)
        assert after.host_link_seconds < most.host_link_seconds
    assert plain.timeline.step_seconds < found.timeline.step_seconds < whole.timeline.step_seconds
    flat = simulate_flat(found.program, CostModel(H100))
    assert flat.step_seconds == pytest.approx(found.timeline.step_seconds, rel=1e-9)


# Simulation.


@pytest.fixture(scope="module")
def both(predictor: Predictor) -> tuple[Program, Timeline]:
    """Return a program that offloads all it can, and its simulation."""
    found = predictor.predict(replace(PLAIN, recompute="offload", offload="optimizer"), H100, trace=True)
    return found.program, found.timeline


def test_every_device_apart_takes_as_long(both: tuple[Program, Timeline]) -> None:
    program, timeline = both

    assert simulate_flat(program, CostModel(H100)).step_seconds == pytest.approx(timeline.step_seconds, rel=1e-9)


def test_copies_are_in_the_trace_and_never_overlap(both: tuple[Program, Timeline]) -> None:
    """One copy at a time each way, none before the step or after it."""
    _, timeline = both

    for row in (Row.TO_HOST, Row.FROM_HOST):
        for stage in timeline.stages:
            bars = sorted(
                (e.start, e.start + e.seconds) for e in timeline.events if (e.row, e.stage) == (row, stage.index)
            )
            assert bars
            assert bars[0][0] >= -1e-12
            assert bars[-1][1] <= timeline.step_seconds * (1 + 1e-9)
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(bars))


def test_the_critical_path_names_copies(both: tuple[Program, Timeline]) -> None:
    _, timeline = both

    assert sum(piece.seconds for piece in timeline.path) == pytest.approx(timeline.step_seconds)
    assert "copy" in {piece.kind for piece in timeline.path}


def test_a_faster_link_never_makes_a_step_longer(predictor: Predictor) -> None:
    """And without a limit on the link only the latencies and the share that hides nowhere are left."""
    assert H100.host is not None
    degrees = replace(PLAIN, recompute="offload", offload="optimizer")
    seconds = []
    for factor in (0.5, 1.0, 2.0, 1e6):
        host = replace(H100.host, to_host=factor * 55.6e9, to_device=factor * 55.6e9, latency=0.0)
        seconds.append(predictor.predict(degrees, replace(H100, host=host)).timeline.step_seconds)

    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(predictor.predict(PLAIN, H100).timeline.step_seconds, rel=1e-4)


def test_ways_that_share_a_link_take_their_sum(predictor: Predictor) -> None:
    """The state of the optimizer goes both ways: half duplex takes twice as long as full duplex, latency and all."""
    assert H100.host is not None
    slow = replace(H100.host, to_host=1e7, to_device=1e7)
    degrees = replace(PLAIN, offload="optimizer")
    full, half = (
        predictor.predict(degrees, replace(H100, host=replace(slow, full_duplex=duplex))).timeline
        for duplex in (True, False)
    )

    for one, two in zip(full.stages, half.stages, strict=True):
        assert two.copy_seconds == pytest.approx(2 * one.copy_seconds, rel=0.01)


# Programs.


def _program(cache_dir: Path) -> tuple[Execution, Program]:
    execution = Execution.of("gpt2", 4, 2)
    configuration = Configuration(2, Mesh.of(inner=2), 2, "1f1b")
    candidate = solved_candidate(execution.folded, model_rules("gpt2", cache_dir), configuration, 4)
    return execution, execution.program(_offloading(written(candidate, 8, True)))


def test_copies_are_instructions(cache_dir: Path) -> None:
    _, program = _program(cache_dir)
    text = format_program(program)

    assert parse_program(text) == program
    assert {segment.phase for segment in program.segments} >= set(HOST_PHASES)
    assert " = offload(" in text
    assert " = fetch(" in text
    assert "  hosted optimizer: " in text


def test_blocks_whose_state_is_fetched_train_beside_those_that_keep_it(cache_dir: Path) -> None:
    """The law, over two steps; layers are of one kind, and only the state of the second one is on the host."""
    execution = Execution.of("gpt2", 4, 2, steps=2)
    configuration = Configuration(1, Mesh.of(inner=2), 2, "1f1b")
    candidate = solved_candidate(execution.folded, model_rules("gpt2", cache_dir), configuration, 4)
    (stage,) = written(candidate, 8, True).stages
    blocks = len(stage.hosted)
    away = tuple(block == 2 for block in range(blocks))
    plan = replace(written(candidate, 8, True), stages=(replace(stage, offload=format_hosted(away)),))

    program = execution.program(plan)

    execution.check(plan)
    assert program.stages[0].away == program.hosted_blocks == away
    assert "blocks=(2)" in format_program(program)
    assert parse_program(format_program(program)) == program
    (found,), (all_away,) = program.stages[0].hosted, execution.program(_offloading(plan)).stages[0].hosted
    assert 0 < found.bytes < all_away.bytes


@pytest.mark.parametrize("phase", [SegmentPhase.FETCH, SegmentPhase.STATE_FETCH])
def test_without_a_fetch_nothing_runs(phase: SegmentPhase, cache_dir: Path) -> None:
    """Executors keep what is offloaded aside: the law cannot hold by accident."""
    execution, program = _program(cache_dir)
    execution.check_program(program)

    def shortened(segment: Segment) -> Segment:
        if segment.phase is not phase:
            return segment
        return replace(segment, instructions=segment.instructions[1:], stores=segment.stores[1:])

    broken = replace(program, segments=tuple(map(shortened, program.segments)))

    with pytest.raises(ProgramError):
        verify_program(broken, execution.folded)
    with pytest.raises(ProgramError, match=r"not on the device|in host memory"):
        execution.check_program(broken)


def test_plans_say_what_they_offload() -> None:
    with pytest.raises(JobError, match="offload 'weights'"):
        Degrees(offload="weights")
    with pytest.raises(JobError, match="recompute 'host'"):
        Degrees(recompute="host")


@pytest.mark.parametrize(("recompute", "offload"), [("offload", ""), ("none", "optimizer")])
def test_inference_offloads_nothing(recompute: str, offload: str, cache_dir: Path) -> None:
    execution = Execution.of("mlp-xs", 4, 2, train=False)
    configuration = Configuration(1, Mesh.of(inner=2), 2, "forward-only")
    rules = model_rules("mlp-xs", cache_dir, train=False)
    plan = written(solved_candidate(execution.folded, rules, configuration, 4), 8, False)

    with pytest.raises(PlanError, match="stage 0 offloads, but nothing is trained"):
        lower(_offloading(plan, recompute, offload), execution.folded, COSTS)


def test_stages_offload_what_there_is(cache_dir: Path) -> None:
    execution = Execution.of("mlp-xs", 4, 2)
    configuration = Configuration(1, Mesh.of(inner=2), 2, "1f1b")
    plan = written(solved_candidate(execution.folded, model_rules("mlp-xs", cache_dir), configuration, 4), 8, True)

    with pytest.raises(PlanError, match="'weights' in 'weights' is no offload of a stage"):
        lower(_offloading(plan, "none", "weights"), execution.folded, COSTS)


# Clusters.


@pytest.mark.parametrize("change", [{"recompute": "offload"}, {"offload": "optimizer"}])
def test_clusters_that_do_not_say_cannot_offload(change: dict[str, str], predictor: Predictor) -> None:
    with pytest.raises(ClusterError, match="cluster 'h100' does not say how its devices reach host memory") as error:
        predictor.predict(replace(PLAIN, **change), replace(H100, host=None))  # type: ignore[arg-type]

    assert "to_host" in str(error.value.hint)


@pytest.mark.parametrize("cluster", PRESETS.values(), ids=PRESETS.keys())
def test_presets_reach_their_hosts(cluster: Cluster) -> None:
    """No device faster than NVLink-C2C or slower than 3 GB/s; hosts of 1 to 16 devices with 40 to 480 GB for each."""
    host = cluster.host

    assert host is not None
    assert 3e9 <= host.to_host / host.sharing <= 450e9
    assert 40e9 <= host.memory / host.devices <= 480e9
    assert host.devices <= 16


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("to_host", "55 Gb/s", "host.to_host"),
        ("to_device", "55", "host.to_device"),
        ("memory", 2000, "host.memory: 2000 has no unit"),
        ("latency", "10", "host.latency"),
        ("memory", "0 GB", "memory is 0"),
        ("sharing", 3, "3 devices share a link, the host has 8"),
        ("devices", 0, "devices is 0"),
        ("lanes", 16, "lanes"),
    ],
)
def test_hosts_in_files_name_what_is_wrong(field: str, value: object, message: str) -> None:
    data = H100.to_dict()
    host = data["host"]
    assert isinstance(host, dict)

    with pytest.raises(ClusterError, match=message):
        cluster_from_dict({**data, "host": {**host, field: value}})


def test_a_host_is_optional_and_has_the_devices_of_its_node() -> None:
    data = H100.to_dict()
    host = data.pop("host")
    assert isinstance(host, dict)
    del host["devices"]

    assert cluster_from_dict(data).host is None
    assert cluster_from_dict({**data, "host": host}).host == H100.host


def test_groups_of_nodes_have_the_weakest_host() -> None:
    """55.6 GB/s of one kind, 12.4 of the other, which share links; each group has hosts of its own."""
    mixed = parse_cluster(
        """
        name: both
        groups: [{nodes: 1, cluster: h100}, {nodes: 1, cluster: a100}]
        between: {tier: Ethernet, bandwidth: 5 GB/s, latency: 20 us}
        """
    )

    assert mixed.host is not None
    assert mixed.host.to_host == 24.8e9 / 2
    assert mixed.host.memory / mixed.host.devices == 2e12 / 8
    assert [mixed.host_start(device) for device in (0, 7, 8, 9)] == [0, 0, 8, 8]

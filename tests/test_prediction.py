"""Plans by degrees: they compute the model, do what their degrees say, and refuse what cannot be."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import autopar
from autopar import models
from autopar.cli import main
from autopar.cluster import Cluster, NodeGroup, load_cluster
from autopar.cost import CostModel, default_limit
from autopar.degrees import Degrees
from autopar.describe.one_line import summarise
from autopar.discover import Rules, discover
from autopar.errors import JobError, TacticError
from autopar.folding.fold import Folded
from autopar.formulate.manual_recipes import BatchDims, batch_dims
from autopar.ir.blocks import find_blocks
from autopar.ir.relays import with_relays
from autopar.onnx import load
from autopar.plan import Job, ModelInfo, Plan
from autopar.prediction import Predictor
from autopar.program.records import Collective, SegmentPhase
from autopar.tactics.by_degrees import (
    mesh_by_degrees,
    placing_by_degrees,
    ranges_by_degrees,
    stages_by_degrees,
)
from autopar.tactics.draft import Draft
from autopar.tactics.state import Topology
from autopar.training import training_step
from autopar.workload import open_workload
from tests.executions import COSTS, QUICK_MEMORY, TINY, Execution, model_graph, model_rules, random_feeds
from tests.gradients import as_float64
from tests.shares import one_in

_CASES = {
    "data": ("gpt2", Degrees(dp=4, global_batch=8)),
    "zero1": ("gpt2", Degrees(dp=4, zero=1, global_batch=8, recompute="full")),
    "zero_of_some": ("gpt2", Degrees(dp=6, zero=1, shard=2, global_batch=12)),
    "zero3_of_some": ("llama3-8b", Degrees(dp=4, zero=3, shard=2, tp=2, global_batch=8)),
    "zero2": ("llama3-8b", Degrees(dp=2, zero=2, microbatch=2, global_batch=8)),
    "zero3": ("llama3-8b", Degrees(dp=2, zero=3, microbatch=2, global_batch=8)),
    "megatron": ("gpt2", Degrees(tp=4, microbatch=2, global_batch=4)),
    "megatron_sequence": ("gpt2", Degrees(dp=2, tp=2, sequence_parallel=True, zero=1, global_batch=4)),
    "pipeline": ("gpt2", Degrees(pp=3, tp=2, global_batch=4)),
    "interleaved": ("gpt2", Degrees(pp=2, interleave=2, global_batch=4)),
    "zero_bubble": ("gpt2", Degrees(pp=2, schedule="zb-h1", global_batch=4)),
    "context": ("llama3-8b", Degrees(dp=2, cp=2, zero=1, global_batch=4)),
    "experts": ("mixtral-8x7b", Degrees(dp=4, ep=2, zero=1, global_batch=8)),
    "experts_tensor": ("mixtral-8x7b", Degrees(dp=2, ep=2, tp=2, global_batch=4)),
    "masked": ("bert-base", Degrees(dp=2, tp=2, pp=2, global_batch=4)),
    "layers": ("mlp-xs", Degrees(dp=2, pp=2, layers=(3, 0), zero=1, global_batch=8)),
    "zero1_padded": ("gpt2", Degrees(dp=3, zero=1, global_batch=6)),
    "zero2_padded": ("llama3-8b", Degrees(dp=3, zero=2, tp=2, sequence_parallel=True, global_batch=6)),
    "zero3_padded": ("gpt2", Degrees(dp=3, zero=3, tp=2, global_batch=6)),
    "pipeline_padded": ("gpt2", Degrees(dp=3, pp=2, zero=2, schedule="zb-h1", global_batch=12)),
    "experts_padded": ("mixtral-8x7b", Degrees(dp=6, ep=2, zero=1, global_batch=12)),
}


def plan_of(name: str, degrees: Degrees, cache_dir: Path, costs: CostModel = COSTS) -> tuple[Execution, Plan]:
    """Return the plan of degrees for a tiny model, and the model with data."""
    execution = Execution.of(name, degrees.samples, degrees.num_microbatches, steps=1)
    dims = batch_dims(execution.folded.graph.values, model_graph(name, 10).values)
    return execution, _plan(execution.folded, model_rules(name, cache_dir), dims, degrees, costs)


def _plan(folded: Folded, rules: Rules, dims: BatchDims, degrees: Degrees, costs: CostModel = COSTS) -> Plan:
    """Return the plan of degrees for a model."""
    job = Job("train", degrees.gpus, degrees.global_batch, 1e12, costs.cluster.to_dict())
    draft = Draft(
        folded, rules, mesh_by_degrees(degrees), costs,
        model=ModelInfo("tiny", "zoo:tiny", "00", 0), job=job, batch=dims, num_microbatches=degrees.num_microbatches,
    )  # fmt: skip
    for tactic in (*placing_by_degrees(degrees), *stages_by_degrees(degrees, folded)):
        draft.decide(tactic)
    return summarise(draft.plan(), folded)


@pytest.mark.parametrize("case", one_in(2, _CASES))
def test_plans_by_degrees_compute_the_model(case: str, cache_dir: Path) -> None:
    """Loss, gradients and updated parameters are those of the unpartitioned model, and the file says the same."""
    execution, plan = plan_of(*_CASES[case], cache_dir)

    execution.check(Plan.from_json(plan.to_json()))


def test_tied_vocabularies_that_tensor_parallel_devices_do_not_divide_are_padded(cache_dir: Path) -> None:
    """Their gradients are reduced over the data-parallel devices where their blocks are."""
    degrees, dims = Degrees(dp=2, tp=2, pp=2, sequence_parallel=True, global_batch=8), {**TINY["gpt2"], "vocab": 25}
    graph, other = (
        training_step(as_float64(with_relays(find_blocks(load(models.build("gpt2", **dims), batch=batch)))))
        for batch in (degrees.samples, 10)
    )
    execution = Execution.of_graph(graph, *random_feeds(graph, degrees.num_microbatches, {}))

    plan = _plan(
        execution.folded, discover(other, cache_dir=cache_dir), batch_dims(graph.values, other.values), degrees
    )

    execution.check(plan)
    moved = [own for segment in execution.program(plan).segments for own in segment.instructions]
    reduced = [own for own in moved if isinstance(own, Collective) and "tokens.weight.grad" in own.result.value]
    assert {(own.axis.name, str(own.kind)) for own in reduced} == {("dp", "all_reduce")}


@pytest.mark.parametrize(
    ("case", "summary"),
    [
        ("data", "dp=4 × pp=1"),
        ("zero1", "dp=4 (zero-1) × pp=1"),
        ("zero_of_some", "dp=6 (zero-0/1) × pp=1"),
        ("zero2", "dp=2 (zero-2) × pp=1"),
        ("zero3", "dp=2 (zero-3) × pp=1"),
        ("megatron", "dp=1 × tp=4 × pp=1"),
        ("megatron_sequence", "dp=2 (zero-1) × tp=2 (sequence parallel) × pp=1"),
        ("interleaved", "dp=1 × pp=2 (2 stages each), interleaved"),
    ],
)
def test_plans_are_what_their_degrees_say(case: str, summary: str, cache_dir: Path) -> None:
    """The line that is read from the placements repeats the degrees."""
    _, plan = plan_of(*_CASES[case], cache_dir)

    assert plan.summary.startswith(summary)


@pytest.mark.parametrize(
    ("sequence", "forward", "backward"),
    [
        (False, {"all_reduce": 2}, {"all_reduce": 2}),
        # the inputs of both column-parallel products are gathered again for the gradients of their weights
        (True, {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
    ],
)
def test_a_layer_has_the_collectives_of_megatron(
    sequence: bool, forward: dict[str, int], backward: dict[str, int], cache_dir: Path
) -> None:
    """Shoeybi et al. 2019, section 3: two all-reduces per layer and direction; Korthikanti et al. 2022, figure 5."""
    degrees = Degrees(tp=2, sequence_parallel=sequence, microbatch=2, global_batch=2)
    execution, plan = plan_of("gpt2", degrees, cache_dir, QUICK_MEMORY)
    layer = next(kind.id for kind in execution.folded.kinds if kind.count > 1)

    segments = {segment.phase: segment for segment in execution.program(plan).segments if segment.kind == layer}

    for phase, expected in ((SegmentPhase.FORWARD, forward), (SegmentPhase.BACKWARD, backward)):
        found = [i for i in segments[phase].instructions if isinstance(i, Collective)]
        assert Counter(str(instruction.kind) for instruction in found) == expected


def test_groups_of_a_mixed_cluster_are_held_to_their_own_figures() -> None:
    """MFU is of the peaks of the devices used, and a stage on the larger devices may take what those have."""
    large, small = (
        replace(cluster, name=name, devices_per_node=2, inter=replace(cluster.inter, nics=None))
        for cluster, name in ((load_cluster("h100"), "large"), (load_cluster("l4"), "small"))
    )
    mixed = Cluster.mixed("both", (NodeGroup(1, large), NodeGroup(1, small)), large.inter)
    degrees = Degrees(dp=2, pp=2, global_batch=8)

    plan = autopar.predict("zoo:mlp-xs", degrees, cluster=mixed, dims={"hidden": 8, "num_layers": 2}).plan

    assert plan.simulated is not None
    same = autopar.predict("zoo:mlp-xs", degrees, cluster=small, dims={"hidden": 8, "num_layers": 2}).plan
    assert same.simulated is not None
    ratio = (2 * 989 + 2 * 121) / (4 * 121) * plan.simulated.step_seconds / same.simulated.step_seconds
    assert plan.simulated.mfu * ratio == pytest.approx(same.simulated.mfu)
    assert plan.stage_limits == (default_limit(large), default_limit(small))
    assert plan.job.memory_limit == default_limit(small)


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (0, "copies parameters, gradients and optimizer state"),
        (1, "shares the optimizer state (ZeRO-1), copies parameters and gradients"),
        (2, "shares gradients and optimizer state (ZeRO-2), copies parameters"),
        (3, "shares parameters, gradients and optimizer state (ZeRO-3), gathers parameters for use"),
    ],
)
def test_an_explanation_says_what_zero_shares(zero: int, words: str) -> None:
    """At every level; the table of placements, which has parameters alone, says what else is split."""
    dims = {"hidden": 8, "num_layers": 2}
    plan = autopar.predict("zoo:mlp-xs", Degrees(dp=2, zero=zero, global_batch=4), dims=dims).plan

    text = " ".join(plan.explain().split())

    assert f"data parallel: splits the samples, {words}" in text
    besides = {
        1: "besides, optimizer state is split over dp",
        2: "besides, gradients and optimizer state are split over",
    }
    assert ("besides" in text) == (zero in besides)
    assert besides.get(zero, "") in text
    assert Plan.from_json(plan.to_json()).uses == plan.uses


def test_context_parallelism_comes_back_as_what_was_asked_for() -> None:
    """The line that is read from the placements calls the axis as the option does."""
    plan = autopar.predict("zoo:gpt2", Degrees(cp=2), dims=_GPT).plan

    assert plan.summary.startswith("dp=1 × cp=2 (ring) × pp=1")
    assert [use.role for use in plan.uses[0]] == ["cp"]


def test_heads_that_context_parallelism_takes_are_not_left_for_tensor_parallelism(cache_dir: Path) -> None:
    """4 key heads: of two axes of 2 devices each both may split them, of 4 and 2 not."""
    dims = {**TINY["llama3-8b"], "kv_heads": 4}

    with pytest.raises(JobError, match=r"tp 2 splits no heads of .*, as cp 4 splits them first"):
        autopar.predict(
            "zoo:llama3-8b", Degrees(cp=4, tp=2, cp_kind="ulysses", global_batch=4), dims=dims, cache_dir=cache_dir
        )


_GPT = {"num_layers": 2, "hidden": 32, "heads": 4, "seq": 30, "vocab": 64}


def test_sequence_parallelism_that_cannot_be_is_refused() -> None:
    """30 positions do not divide by 4 devices; by 2 they do. Megatron-LM refuses that as well."""
    with pytest.raises(
        JobError, match="sequence parallelism splits nothing of gpt-2-layers-hidden-32: tp 4 does not divide"
    ):
        autopar.predict("zoo:gpt2", Degrees(tp=4, sequence_parallel=True), dims=_GPT)

    plan = autopar.predict("zoo:gpt2", Degrees(tp=2, sequence_parallel=True), dims=_GPT).plan
    assert "tp=2 (sequence parallel)" in plan.summary


@pytest.mark.parametrize(
    ("options", "mode", "words"),
    [
        ({"zero": 1}, "train", "ZeRO-1 has no effect: no two devices hold the same parameters (dp 1)"),
        ({"zero": 1, "dp": 2}, "train", ""),
        ({"zero": 2, "dp": 2}, "infer", "ZeRO-2 has no effect in inference"),
        ({"zero": 3, "dp": 2}, "infer", ""),
        ({"schedule": "zb-h1"}, "train", "schedule zb-h1 has no effect without a pipeline (pp 1)"),
        ({"interleave": 2}, "train", "2 stages per device have no effect without a pipeline (pp 1)"),
        ({}, "train", ""),
    ],
)
def test_options_without_effect_are_said(options: dict[str, Any], mode: str, words: str) -> None:
    """The plan is predicted all the same."""
    degrees = Degrees(**options, global_batch=4)

    plan = autopar.predict("zoo:mlp-xs", degrees, mode=mode, dims={"hidden": 8, "num_layers": 2}).plan

    assert plan.simulated is not None
    said = [remark.text for remark in plan.simulated.remarks if remark.kind == "request"]
    assert len(said) == bool(words)
    assert words in "".join(said)


def test_the_schedule_follows_the_mode() -> None:
    """Degrees that name no schedule run forward passes alone in inference, and 1F1B in training."""
    dims = {"hidden": 8, "num_layers": 2}
    degrees = Degrees(pp=2, global_batch=4)

    found = {mode: autopar.predict("zoo:mlp-xs", degrees, mode=mode, dims=dims).plan for mode in ("train", "infer")}

    assert {mode: plan.schedule for mode, plan in found.items()} == {"train": "1f1b", "infer": "forward-only"}
    with pytest.raises(TacticError, match="gpipe does not go with mode infer"):
        autopar.predict("zoo:mlp-xs", replace(degrees, schedule="gpipe"), mode="infer", dims=dims)


def test_devices_that_share_are_neighbours() -> None:
    """They are inside what copies, and next to the tensor axis."""
    mesh = mesh_by_degrees(Degrees(dp=12, zero=1, shard=4, tp=2, global_batch=12))

    assert str(mesh) == "dp=3×shard=4×tp=2"
    assert [axis.stride for axis in mesh.axes] == [8, 2, 1]


@pytest.mark.parametrize(
    ("dp", "ep", "tp", "expected"), [(8, 1, 1, 8), (6, 1, 1, 6), (24, 1, 2, 24), (96, 1, 1, 48), (24, 2, 1, 12)]
)
def test_as_many_share_as_leave_each_the_least(dp: int, ep: int, tp: int, expected: int) -> None:
    """Dims that devices do not divide are padded; 96 devices are more than most dims have elements."""
    name = "zoo:mixtral-8x7b" if ep > 1 else "zoo:llama3-8b"
    dims = {"num_layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "seq": 16, "vocab": 256}
    predictor = Predictor(open_workload(name, dims=dims))

    found = predictor.settled(Degrees(dp=dp, ep=ep, tp=tp, zero=1, global_batch=dp))

    assert found.sharing == expected
    assert predictor.settled(replace(found, zero=0, shard=0)).shard == 0
    assert predictor.settled(replace(found, shard=0, cp=2, ep=4, tp=2, dp=24, global_batch=24)).shard == 0
    assert predictor.settled(replace(found, shard=1)).shard == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"zero": 0, "shard": 2}, "without ZeRO"),
        ({"shard": 4}, "do not divide 6 data-parallel devices"),
        ({"shard": 2, "dp": 12, "ep": 4, "cp": 2, "tp": 2}, "a mesh of five axes"),
    ],
)
def test_devices_that_cannot_share_are_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Degrees(**{"dp": 6, "zero": 1, "global_batch": 12, **wrong})  # type: ignore[arg-type]


def test_zero_shares_dims_that_devices_do_not_divide() -> None:
    """Six devices share a dim of 64 in blocks of 11, one of 128 in blocks of 22, one of 256 in blocks of 43."""
    dims = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "seq": 16, "vocab": 256}
    predictor = Predictor(open_workload("zoo:llama3-8b", dims=dims))
    sizes = {}
    for shard in (0, 1, 2):
        found = predictor.predict(Degrees(dp=6, zero=1, shard=shard, global_batch=6), load_cluster("a100"))
        sizes[shard] = found.plan.simulated.stages[0].breakdown["optimizer"] if found.plan.simulated else 0.0

    assert sizes[2] == pytest.approx(sizes[1] / 2)
    assert sizes[1] / 6 < sizes[0] <= sizes[1] * 11 / 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dp", "96", "--global-batch", "96"], "ZeRO over 48 of 96 data-parallel devices: more would split fewer of"),
        (
            ["--dp", "96", "--shard", "96", "--global-batch", "96"],
            "ZeRO over 96 of 96 data-parallel devices: 24 % of the parameters stay whole, whose dims are too short",
        ),
        (["--dp", "6", "--global-batch", "6"], ""),
        (["--dp", "6", "--global-batch", "6", "--shard", "2"], ""),
        (["--dp", "4", "--global-batch", "4"], ""),
    ],
)
def test_what_zero_leaves_whole_is_told(
    options: list[str], words: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["num_layers=2", "hidden=64", "heads=4", "kv_heads=2", "ffn=128", "seq=16", "vocab=256"]
    dims = [part for size in sizes for part in ("--set", size)]

    main(["predict", "zoo:llama3-8b", *dims, *options, "--zero", "1", "--cache-dir", str(cache_dir)])

    said = capsys.readouterr().err
    assert (words in said) if words else ("ZeRO over" not in said)


def test_the_tensor_axis_is_innermost() -> None:
    """Devices of a tensor group are neighbours, those of a data group furthest apart, experts around context."""
    mesh = mesh_by_degrees(Degrees(dp=8, ep=4, cp=2, tp=4, global_batch=8))

    assert str(mesh) == "dp=4×ep=2×cp=2×tp=4"
    assert [axis.stride for axis in mesh.axes] == [16, 8, 4, 1]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (70, 12, [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]),  # BLOOM: what surrounds the layers counts as one at each end
        (22, 8, [2, 3, 3, 3, 3, 3, 3, 2]),  # zero-bubble's 1.5B
        (7, 3, [2, 3, 2]),
    ],
)
def test_layers_are_cut_evenly(layers: int, stages: int, expected: list[int]) -> None:
    """What surrounds the layers joins the outer stages."""
    config = {**TINY["gpt2"], "num_layers": layers}
    folded = open_workload("zoo:gpt2", dims=config).folded(2)

    ranges = ranges_by_degrees(Degrees(pp=stages, global_batch=stages), folded)

    lengths = [stop - start for start, stop in ranges]
    lengths[0] -= 1
    lengths[-1] -= 1
    assert lengths == expected


def test_zero_stages_go_on_from_the_same_placements(cache_dir: Path) -> None:
    """What ops can do on a mesh is found once, and plans are those found one by one."""
    cluster, workload = load_cluster("h100"), open_workload("zoo:gpt2", dims=TINY["gpt2"])
    stages = [Degrees(dp=4, tp=2, zero=zero, global_batch=8) for zero in (3, 0, 1)]
    alone = [Predictor(workload, cache_dir).planned(degrees, cluster) for degrees in stages]
    predictor = Predictor(workload, cache_dir)

    with patch("autopar.tactics.draft.Topology", wraps=Topology) as made:
        assert [predictor.planned(degrees, cluster) for degrees in stages] == alone

    made.assert_called_once()


def test_a_plan_over_memory_is_predicted_and_said_so(cache_dir: Path) -> None:
    """The limit decides whether a plan fits, not whether it is predicted."""
    found = autopar.predict(
        "zoo:gpt2", Degrees(dp=8, microbatch=4, global_batch=64), memory_limit=1e9, cache_dir=cache_dir
    )

    assert not found.fits
    assert found.plan.simulated is not None
    assert found.plan.objective == found.plan.simulated.step_seconds == found.timeline.step_seconds > 0
    assert [stage.peak for stage in found.plan.simulated.stages] == [s.memory.bytes for s in found.timeline.stages]


def test_stages_share_placements(cache_dir: Path) -> None:
    """Plans that differ in stages, schedule or batch are placed once; more microbatches take longer."""
    predictor = Predictor(open_workload("zoo:gpt2"), cache_dir)
    cluster = load_cluster("a100")

    once = predictor.predict(Degrees(dp=2, pp=4, global_batch=32), cluster).timeline.step_seconds
    twice = predictor.predict(Degrees(dp=2, pp=4, global_batch=64), cluster).timeline.step_seconds
    one_stage = predictor.predict(Degrees(dp=2, global_batch=32), cluster).timeline.step_seconds

    assert len(predictor._placed) == 2, "with data parallelism, and before it"
    assert once < twice < 2 * once
    assert once < one_stage


def test_a_microbatch_as_large_as_the_probe_is_split(cache_dir: Path) -> None:
    """The batch is found by comparing two sizes; if they are equal, a third is looked at."""
    predictor = Predictor(open_workload("zoo:gpt2", dims=TINY["gpt2"]), cache_dir)
    probe = next(value.shape[0] for name, value in predictor.workload.probe.values.items() if name == "input_ids")

    _, plan = predictor.lowered(Degrees(dp=probe, global_batch=probe), _one_node(probe))

    assert plan.summary.startswith(f"dp={probe}")


def _one_node(devices: int) -> Cluster:
    cluster = load_cluster("h100")
    return replace(cluster, devices_per_node=devices, inter=cluster.intra)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"zero": 4}, "ZeRO stage 4"),
        ({"dp": 3, "global_batch": 4}, "a global batch of 4 does not divide by dp 3 x microbatch 1"),
        (
            {"dp": 4, "ep": 3, "global_batch": 4},
            "the expert-parallel degree 3 does not divide the data-parallel degree 4",
        ),
        ({"sequence_parallel": True}, "sequence parallelism without tensor parallelism"),
        ({"schedule": "soon"}, "there is no schedule 'soon'"),
        ({"recompute": "some"}, "recompute 'some'"),
        ({"pp": 2, "global_batch": 2, "layers": (1, 1, 1)}, "layers are given for 3 stages, there are 2"),
    ],
)
def test_impossible_degrees_are_refused(given: dict[str, object], message: str) -> None:
    """One clear error says what does not divide what."""
    with pytest.raises(JobError) as caught:
        Degrees(**given)  # type: ignore[arg-type]

    assert caught.value.args[0] == message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (Degrees(pp=16, global_batch=16), "12 layers and 2 other blocks cannot be cut into 16 stages"),
        (Degrees(pp=2, global_batch=2, layers=(5, 5)), "layers per stage add up to 10, the model has 12"),
        (Degrees(pp=2, interleave=2, global_batch=3), "3 are no whole number of rounds"),
        (Degrees(dp=12, global_batch=12), "12 GPUs do not fill nodes of 8"),
        (Degrees(tp=5, global_batch=1), "tp 5 splits nothing of gpt2: 5 devices would do the same work"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(degrees: Degrees, message: str, cache_dir: Path) -> None:
    """Degrees that are possible as such may not be possible for a model or a cluster."""
    with pytest.raises((JobError, TacticError)) as caught:
        autopar.predict("zoo:gpt2", degrees, cache_dir=cache_dir)

    assert message in caught.value.args[0]
    assert caught.value.hint


@pytest.mark.parametrize(("batch", "said"), [("2", []), ("4", ["microbatch"])])
def test_a_microbatch_is_named_where_there_was_a_choice(
    batch: str, said: list[str], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample for each device can only be a microbatch of one."""
    command = ["predict", "zoo:mlp-xs", "--dp", "2", "--global-batch", batch, "--cache-dir", str(cache_dir)]

    assert main(command) == 0

    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("microbatch")] == said


def test_the_number_of_devices_that_degrees_come_to_is_said(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it was given; then it has to be the product of the degrees."""
    command = ["predict", "zoo:mlp-xs", "--dp", "2", "--tp", "2", "--global-batch", "4", "--cache-dir", str(cache_dir)]

    codes = [main([*command, *more]) for more in ([], ["--gpus", "4"], ["--gpus", "8"])]

    assert codes == [0, 0, 2]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("dp", "error", "hint"))]
    assert said == [
        "dp 2 x cp 1 x tp 2 x pp 1: predicting for 4 GPUs; --gpus N checks that",
        "error: dp 2 x cp 1 x tp 2 x pp 1 are 4 devices, not 8",
        "hint: --gpus 4, or other degrees",
    ]


def test_a_folder_may_be_given_as_text(tmp_path: Path) -> None:
    """What is kept there is found again, whichever way the folder is named."""
    degrees, dims = Degrees(dp=2, global_batch=4), {"num_layers": 1, "hidden": 16}

    found = autopar.predict("zoo:mlp-xs", degrees, dims=dims, cache_dir=str(tmp_path))

    assert [*tmp_path.glob("rules-*.json")]
    assert autopar.predict("zoo:mlp-xs", degrees, dims=dims, cache_dir=tmp_path).plan.objective == found.plan.objective

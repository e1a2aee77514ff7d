"""Groups of experts over data-, context- and tensor-parallel devices: the law, what frameworks are told and lose."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

import autopar
from autopar.degrees import Degrees
from autopar.describe.axis_roles import roles_of_axes
from autopar.errors import ExportError, JobError
from autopar.frameworks import facts
from autopar.frameworks.configurations import parse_configuration
from autopar.frameworks.python_file import read_fields
from autopar.plan import Plan
from autopar.tactics import ContextParallel, ExpertParallel
from autopar.workload import open_plan
from tests.executions import TINY
from tests.shares import one_in
from tests.test_prediction import plan_of

SIZES = {**TINY["qwen3-30b-a3b"], "seq": 16}
GROUPS = {
    "over data and context": Degrees(dp=2, cp=2, ep=4, zero=1, global_batch=4),
    "over context": Degrees(dp=2, cp=2, ep=2, zero=2, global_batch=4),
    "over context and tensor, whole": Degrees(cp=2, tp=2, ep=4, etp=1, sequence_parallel=True, global_batch=2),
    "over data and context, split": Degrees(dp=2, cp=2, tp=2, ep=4, zero=1, sequence_parallel=True, global_batch=4),
}


def planned(cache_dir: Path, degrees: Degrees) -> Plan:
    """Return the plan of degrees of a small mixture without a limit of tokens per expert."""
    return autopar.predict("zoo:qwen3-30b-a3b", degrees, dims=SIZES, cache_dir=cache_dir).plan


def step(plan: Plan) -> float:
    """Return the simulated seconds of a step."""
    assert plan.simulated is not None
    return plan.simulated.step_seconds


@pytest.mark.parametrize("name", one_in(2, GROUPS))
def test_groups_of_experts_compute_the_model(name: str, cache_dir: Path) -> None:
    """Loss, gradients and new parameters are those of the unpartitioned model; `ep` devices have different experts."""
    degrees = GROUPS[name]

    execution, plan = plan_of("qwen3-30b-a3b", degrees, cache_dir)

    execution.check(plan)
    roles = roles_of_axes(plan.mesh, plan.blocks, execution.folded)
    assert prod(found.axis.size for found in roles if found.experts) == degrees.ep
    order = [axis.name for axis in plan.mesh]
    assert order == [name for name in ("dp", "ep", "cp", "tp") if name in order]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dp": 4, "cp": 2, "ep": 3}, "has to be a multiple of cp 2 that divides dp x cp = 8"),
        ({"dp": 4, "cp": 4, "ep": 2}, "has to be a multiple of cp 4 that divides dp x cp = 16"),
        ({"dp": 2, "cp": 2, "ep": 8}, "that divides dp x cp = 4"),
        (
            {"cp": 2, "tp": 2, "ep": 2, "etp": 1},
            "with whole experts the expert-parallel degree 2 has to be",
        ),
    ],
)
def test_groups_hold_all_context_parallel_devices(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(JobError) as caught:
        Degrees(**{"global_batch": 4, **wrong})  # type: ignore[arg-type]

    assert message in caught.value.args[0]
    suggested = int(caught.value.hint.split("--ep ")[1].split(",")[0])
    assert Degrees(**{"global_batch": 4, **wrong, "ep": suggested}).ep == suggested  # type: ignore[arg-type]


@pytest.mark.parametrize("name", one_in(4, GROUPS))
def test_megatron_is_told_the_group_and_reads_it_back(name: str, cache_dir: Path) -> None:
    """Nothing is lost, and what is read back is the plan: the same degrees, and the same step."""
    plan = planned(cache_dir, GROUPS[name])

    exported = plan.export("megatron", cache_dir=cache_dir)
    again = parse_configuration(exported.text, "megatron", gpus=plan.job.gpus, model="zoo:qwen3-30b-a3b").degrees

    assert [sentence for sentence in exported.lost if "mlp.gate.weight" not in sentence] == []  # the router is whole
    assert f"--expert-model-parallel-size {plan_degree(plan)}\n" in exported.text
    assert (again.dp, again.cp, again.tp, again.ep, again.etp) == tuple(
        getattr(GROUPS[name], field) for field in ("dp", "cp", "tp", "ep", "etp")
    )
    assert step(planned(cache_dir, again)) == pytest.approx(step(plan))


def plan_degree(plan: Plan) -> int:
    """Return the devices that have different experts, as the facts of a plan have it."""
    return facts.read(plan, open_plan(plan).folded(plan.microbatch)).ep


def test_torchtitan_is_told_the_group_and_reads_it_back(cache_dir: Path) -> None:
    """Its groups are neighbours of dp_shard x cp x tp; devices of a group share parameters, with or without ZeRO."""
    degrees = Degrees(dp=4, cp=2, ep=4, zero=3, cp_kind="gather", global_batch=4)
    plan, copied = planned(cache_dir, degrees), planned(cache_dir, Degrees(dp=4, ep=2, global_batch=4))

    text = plan.export("torchtitan", cache_dir=cache_dir).text
    again = parse_configuration(text, "torchtitan", gpus=8, model="zoo:qwen3-30b-a3b").degrees
    told = copied.export("torchtitan", cache_dir=cache_dir)

    assert (again.dp, again.cp, again.ep, again.zero) == (4, 2, 4, 3)
    own = read_fields(told.text)["parallelism"]
    assert (own["data_parallel_replicate_degree"], own["data_parallel_shard_degree"]) == (2, 2)
    assert any("groups of experts within those that share" in sentence for sentence in told.lost)
    wrong = text.replace('"expert_parallel_degree", 4', '"expert_parallel_degree", 3')
    wrong = wrong.replace("expert_parallel_degree = 4", "expert_parallel_degree = 3")
    with pytest.raises((ExportError, JobError), match=r"expert_parallel_degree 3 does not divide|degree 3 has to be"):
        parse_configuration(wrong, "torchtitan", gpus=8, model="zoo:qwen3-30b-a3b")


@pytest.mark.slow
def test_torchtitan_splits_no_expert(cache_dir: Path) -> None:
    """Tensor-parallel devices have different experts there: as many experts on each as in the plan."""
    plan = planned(cache_dir, Degrees(dp=2, tp=2, ep=2, zero=2, sequence_parallel=True, global_batch=4))

    exported = plan.export("torchtitan", cache_dir=cache_dir)

    assert read_fields(exported.text)["parallelism"]["expert_parallel_degree"] == 4
    assert any("torchtitan gives each device whole experts, 4 devices" in sentence for sentence in exported.lost)


@pytest.mark.parametrize("name", one_in(4, GROUPS))
def test_the_mesh_of_maxtext_has_the_devices(name: str, cache_dir: Path) -> None:
    """Its axis for experts splits the batch: context- and tensor-parallel devices have copies."""
    plan = planned(cache_dir, GROUPS[name])

    exported = plan.export("maxtext", cache_dir=cache_dir)

    fields = yaml.safe_load(exported.text)
    assert prod(size for key, size in fields.items() if key.endswith("_parallelism")) == plan.job.gpus
    assert any("MaxText deals them out over its axis expert" in sentence for sentence in exported.lost)


def test_experts_that_are_copied_inside_a_group_are_lost(cache_dir: Path) -> None:
    """Dealt out over data-parallel devices alone, beside context parallelism: no framework has such groups."""
    plan = _dealt_over_data(cache_dir)

    exported = plan.export("megatron", cache_dir=cache_dir)

    assert "--expert-model-parallel-size 2\n" in exported.text
    assert any("not dealt out to neighbours: cp (cp) inside dp (dp, experts)" in sentence for sentence in exported.lost)
    assert exported.outcome.startswith("Predicted as written")


def _dealt_over_data(cache_dir: Path) -> Plan:
    return autopar.partition(
        "zoo:qwen3-30b-a3b", {"dp": 2, "cp": 2}, (ExpertParallel("dp"), ContextParallel("cp")),
        global_batch=2, dims=SIZES, cache_dir=cache_dir,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "degree"), [({"ep": 2, "cp": 2}, 4), ({"dp": 2, "cp": 2}, 1)], ids=["beside ep", "without ep"]
)
def test_named_axes_have_groups_as_frameworks_have_them(mesh: dict[str, int], degree: int, cache_dir: Path) -> None:
    """Beside an axis ep the axis cp deals experts out, too; without one, data-parallel devices around it do not."""
    pins: dict[str, Any] = {"pin": {"stages": 1, "mesh": mesh, "zero": 0, "microbatches": 1}}

    plan = autopar.solve(
        "zoo:qwen3-30b-a3b", gpus=4, global_batch=2, dims=SIZES, pins=pins, cache_dir=cache_dir, top_k=1
    )

    assert plan_degree(plan) in (degree, 2 if "ep" not in mesh else degree)
    assert not any("neighbours" in sentence for sentence in plan.export("megatron", cache_dir=cache_dir).lost)


MOE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 32000 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --bf16 --micro-batch-size 1 --global-batch-size 64 --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 1536 --context-parallel-size 4 "
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--expert-model-parallel-size 64", "groups of 64 devices .* do not divide the 32 devices of a stage"),
        ("--expert-model-parallel-size 2", "deals experts out over any 2 neighbours; plans here over all"),
    ],
)
def test_groups_that_no_plan_has_are_refused_with_the_nearest(text: str, message: str) -> None:
    """Eight groups of four context-parallel devices on 32 devices."""
    with pytest.raises(ExportError, match=message) as raised:
        parse_configuration(MOE + text, "megatron", gpus=32)

    if "nearest" in raised.value.hint:
        again = raised.value.hint.split(" is the nearest")[0]
        assert parse_configuration(MOE + again, "megatron", gpus=32).degrees.ep == 32

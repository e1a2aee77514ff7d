"""Plans with buckets of their own: found, written, read, simulated, executed and handed over."""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.api import fuse_plan, simulate_again
from autopar.cli.entry import main
from autopar.degrees import Degrees
from autopar.errors import JobError, PlanError
from autopar.fusion.rules import RULES, SizeRule
from autopar.fusion_plan import BucketCuts, FusionPlan, StageBuckets
from autopar.plan import Plan
from autopar.task import Effort
from tests.formulations import DIMS

_DIMS = {"num_layers": 4, "hidden": 256, "heads": 4, "vocab": 2048, "seq": 64}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _predicted(cache_dir: Path, mode: str = "train") -> Plan:
    numbers = Degrees(dp=16, microbatch=4, global_batch=64)
    return autopar.predict(
        "zoo:gpt2", numbers, cluster="v100-aws", stack="ideal", dims=_DIMS, mode=mode, cache_dir=cache_dir
    ).plan


@pytest.fixture(scope="module")
def plan(cache_dir: Path) -> Plan:
    """A plan whose gradients are worth cutting: 16 devices on two nodes with 25 Gb/s."""
    found, _, _ = fuse_plan(_predicted(cache_dir), cache_dir=cache_dir)
    assert found.fusion is not None
    return found


def _step(plan: Plan) -> float:
    assert plan.simulated is not None, "it was simulated"
    return plan.simulated.step_seconds


def test_a_plan_with_buckets_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    """It is of version 3, which readers that know no buckets refuse; simulated again it takes the same time."""
    plan.save(tmp_path / "plan.json")

    again = Plan.load(tmp_path / "plan.json")

    assert again == plan
    assert again.version == 3
    assert replace(again, fusion=None).version == 1


def test_buckets_are_what_the_simulator_sees(plan: Plan, cache_dir: Path) -> None:
    """A step of the plan read back takes what it says; by the uniform rule it takes longer, as compared."""
    _, found, _ = fuse_plan(plan, cache_dir=cache_dir)

    assert _step(simulate_again(plan, cache_dir=cache_dir)[0]) == _step(plan) == found.found.found.step_seconds
    uniform = _step(simulate_again(replace(plan, fusion=None), cache_dir=cache_dir)[0])
    assert uniform == pytest.approx(found.found.uniform.step_seconds)
    assert _step(plan) < uniform
    assert found.found.bound <= _step(plan) <= found.best.timed.step_seconds
    assert found.closed >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ends: (*ends[:-1], ends[-1] + 1), "hold [0-9]+ gradients, there are"),
        (lambda ends: (ends[-1], *ends), "out of order"),
    ],
)
def test_buckets_of_an_edited_plan_are_refused(
    plan: Plan, change: Callable[[tuple[int, ...]], tuple[int, ...]], message: str, cache_dir: Path
) -> None:
    assert plan.fusion is not None
    (stage,) = plan.fusion.buckets
    cuts = tuple(replace(own, ends=change(own.ends)) for own in stage.cuts)
    edited = replace(plan, fusion=FusionPlan((replace(stage, cuts=cuts),)))

    with pytest.raises(PlanError, match=message):
        simulate_again(edited, cache_dir=cache_dir)


def test_a_plan_file_with_buckets_of_no_stage_is_refused(plan: Plan) -> None:
    cuts = BucketCuts("all_reduce", "dp", "step", 0, (2, 1))
    edited = replace(plan, fusion=FusionPlan((StageBuckets((0, 3), (cuts,)),)))

    with pytest.raises(PlanError, match="bucket 1 of all_reduce over 'dp' per step is out of order"):
        Plan.from_json(edited.to_json())
    good = replace(edited, fusion=FusionPlan((StageBuckets((0, 3), (replace(cuts, ends=(2,)),)),)))
    with pytest.raises(PlanError, match="buckets of stage 3, of 1"):
        Plan.from_json(good.to_json())


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("megatron", "--ddp-bucket-size "),
        ("nemo", "config.ddp.bucket_size = "),
        ("pytorch", "DistributedDataParallel(module, bucket_cap_mb_list=["),
        ("torchtitan", "torchtitan reduces block by block"),
        ("deepspeed", "DeepSpeed cuts by one size"),
        ("maxtext", "XLA_FLAGS=--xla_gpu_all_reduce_combine_threshold_bytes="),
        ("jax", "XLA_FLAGS=--xla_gpu_all_reduce_combine_threshold_bytes="),
        ("accelerate", "buckets cut for this plan: accelerate wraps every block, or leaves PyTorch its default size"),
        ("trainer", "buckets cut for this plan: the Trainer of transformers wraps every block, or leaves PyTorch its"),
    ],
)
def test_frameworks_get_the_best_of_one_size(plan: Plan, to: str, told: str, cache_dir: Path) -> None:
    """What of the cuts a framework cannot be told is said, with the size that comes nearest."""
    found = plan.export(to, cache_dir=cache_dir)

    assert told in found.text
    assert any("cut for this plan" in lost for lost in found.lost)
    assert not any("cut for this plan" in lost for lost in replace(plan, fusion=None).export(to).lost)


def test_fsdp_gets_units_of_whole_layers(cache_dir: Path) -> None:
    """Its groups have all layers, in order, and the script says what the plan's own cuts would bring."""
    numbers = Degrees(dp=16, zero=3, microbatch=4, global_batch=64)
    plain = autopar.predict(
        "zoo:gpt2", numbers, cluster="v100-aws", stack="ideal", dims=_DIMS, cache_dir=cache_dir
    ).plan
    cut, _, _ = fuse_plan(plain, cache_dir=cache_dir)
    assert cut.fusion is not None

    text = cut.export("fsdp", cache_dir=cache_dir)

    groups = ast.literal_eval(re.findall(r"^GROUPS = (.*?)  #", text.text, re.MULTILINE)[0])
    assert sum(groups) == _DIMS["num_layers"]
    assert any("FSDP2 reduces whole units" in lost for lost in text.lost)
    assert "GROUPS = [1, 1, 1, 1]" in plain.export("fsdp", cache_dir=cache_dir).text


def test_scripts_without_sharding_get_the_best_size(plan: Plan, cache_dir: Path) -> None:
    assert re.search(r"^BUCKET_MB = [0-9.]+ ", plan.export("fsdp", cache_dir=cache_dir).text, re.MULTILINE)


def test_a_size_is_applied_as_each_framework_does() -> None:
    """Gradients of 6, 6, 4, 20 and 1 bytes in buckets of 10: closed by what reaches 10, or before what exceeds it."""
    sizes = [6.0, 6.0, 4.0, 20.0, 1.0]

    assert replace(RULES["megatron"], limit=10.0).ends(sizes) == (2, 4, 5)
    assert replace(RULES["deepspeed"], limit=10.0).ends(sizes) == (1, 3, 4, 5)
    assert SizeRule(10.0, 5.0).ends(sizes) == (1, 3, 4, 5)
    assert replace(RULES["xla"], limit=100.0, most=2).ends(sizes) == (2, 4, 5)


def test_there_are_no_buckets_in_inference(cache_dir: Path) -> None:
    with pytest.raises(JobError, match="there are no gradients"):
        fuse_plan(_predicted(cache_dir, mode="infer"), cache_dir=cache_dir)


def test_the_command_compares_and_writes(
    plan: Plan, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(plan, fusion=None).save(tmp_path / "plan.json")

    command = ["fuse", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out"), "--cache-dir", str(cache_dir)]
    assert main(command) == 0

    told = capsys.readouterr().out
    for word in ("against the uniform rule", "PyTorch DDP", "30 MiB", "no buckets make a step shorter than", "ours"):
        assert word in told
    assert Plan.load(tmp_path / "out" / "plan.json").fusion == plan.fusion


@pytest.mark.slow
def test_a_search_cuts_gradients_and_never_makes_a_plan_slower(cache_dir: Path) -> None:
    """With the same seed both searches find the same candidates; with cuts the best of them is no slower."""
    request: dict[str, Any] = {"cluster": "a100", "stack": "ideal", "global_batch": 8, "dims": DIMS["mlp-xs"]}

    off, cut = (
        autopar.solve("zoo:mlp-xs", gpus=2, fusion=fusion, cache_dir=cache_dir, **request)
        for fusion in ("off", "buckets")
    )

    assert off.fusion is None
    assert _step(cut) <= _step(off) * (1 + 1e-9)
    assert cut.search is not None
    assert off.search is not None
    assert cut.search.bound == off.search.bound
    assert _step(simulate_again(cut, cache_dir=cache_dir)[0]) == _step(cut)


def test_what_may_be_fused_has_a_name() -> None:
    with pytest.raises(JobError, match="fusion 'all'"):
        Effort(fusion="all")

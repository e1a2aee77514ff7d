"""What an exported configuration comes to: said in the file, and refused where it does not fit into memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import autopar
from autopar.cli import main
from autopar.cost import NEAREST, Stack
from autopar.degrees import Degrees
from autopar.errors import InfeasibleError
from autopar.frameworks.configurations import parse_configuration
from autopar.plan import Exported, Plan
from tests.executions import TINY

SIZES = {"num_layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "seq": 512, "vocab": 4096}


def planned(cache_dir: Path, stack: str | Stack = NEAREST, **degrees: Any) -> Plan:
    """Return a plan by degrees of a small LLaMA."""
    stated = Degrees(**{"global_batch": 16, **degrees})
    return autopar.predict("zoo:llama3-8b", stated, stack=stack, dims=SIZES, cache_dir=cache_dir).plan


def peak(plan: Plan) -> float:
    """Return the bytes on the fullest device."""
    assert plan.simulated is not None
    return max(stage.peak for stage in plan.simulated.stages)


def plain(exported: Exported) -> str:
    """Return a file as one line, its header without marks."""
    return " ".join(exported.text.replace("\n# ", " ").split())


@pytest.fixture(scope="module")
def pipeline(cache_dir: Path) -> Plan:
    """A pipeline in a schedule that Megatron-LM does not have, whose 1F1B takes more memory."""
    return planned(cache_dir, dp=2, pp=2, zero=1, schedule="zb-v", interleave=2)


@pytest.mark.parametrize("to", ["megatron", "torchtitan", "deepspeed", "nemo"])
def test_a_configuration_says_what_it_comes_to(to: str, pipeline: Plan, cache_dir: Path) -> None:
    """Predicted as the framework would run it, in the file and on the record."""
    exported = pipeline.export(to, cache_dir=cache_dir)

    assert exported.outcome.startswith("Predicted with" if to == "deepspeed" else "Predicted as written: ")
    assert "per device; the plan: " in exported.outcome
    assert exported.outcome in plain(exported)


def test_the_outcome_is_that_of_the_file(pipeline: Plan, cache_dir: Path) -> None:
    """Read back and predicted by hand, the arguments come to the figures that their header names."""
    exported = pipeline.export("megatron", cache_dir=cache_dir)
    found = parse_configuration(exported.text, "megatron", gpus=4)

    again = autopar.predict(found.model, found.degrees, dims=found.dims, cache_dir=cache_dir).plan

    assert again.simulated is not None
    assert f"peak {autopar.units.format_bytes(peak(again))} of" in exported.outcome


def test_a_configuration_that_does_not_fit_is_refused(cache_dir: Path) -> None:
    """The plan fits, what DeepSpeed runs of it, without sequence parallelism, does not; the hint has one that does."""
    degrees: dict[str, Any] = {"dp": 2, "tp": 2, "zero": 1, "microbatch": 4}
    plan = planned(cache_dir, sequence_parallel=True, **degrees)
    other = planned(cache_dir, **degrees)
    limit = (peak(plan) + peak(other)) / 2
    assert peak(plan) < limit < peak(other)
    tight = replace(plan, job=replace(plan.job, memory_limit=limit))

    with pytest.raises(InfeasibleError, match="what deepspeed would run of this plan does not fit") as raised:
        tight.export("deepspeed", cache_dir=cache_dir)

    assert raised.value.hint.startswith("autopar predict zoo:llama3-8b --dp 2 --tp 2 --zero 1")
    assert tight.export("megatron", cache_dir=cache_dir).outcome


def test_a_refusal_is_exit_code_3_and_writes_nothing(
    pipeline: Plan, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(pipeline, job=replace(pipeline.job, memory_limit=1e6)).save(tmp_path / "plan.json")
    command = ["export", str(tmp_path / "plan.json"), "--to", "megatron", "--cache-dir", str(cache_dir)]

    assert main([*command, "-o", str(tmp_path / "args")]) == 3

    assert "does not fit" in capsys.readouterr().err
    assert not (tmp_path / "args").exists()


def test_recompute_by_layer_is_predicted_as_it_is_exported(cache_dir: Path) -> None:
    """Megatron-LM's block method: the first layers of every stage, of which the others keep what they save."""
    plan = planned(cache_dir, dp=2, pp=2, zero=1)
    mixed = replace(plan, stages=tuple(replace(stage, recompute=words) for stage, words in _halves(plan)))

    found = parse_configuration(mixed.export("megatron", cache_dir=cache_dir).text, "megatron", gpus=4)

    again = autopar.predict(
        found.model, found.degrees, dims=found.dims, first_layers=found.first_layers, cache_dir=cache_dir
    ).plan
    assert found.first_layers == 1
    assert [stage.recompute for stage in again.stages] == [words for _, words in _halves(plan)]


def _halves(plan: Plan) -> list[tuple[Any, str]]:
    first, last = plan.stages
    blocks = [stage.blocks[1] - stage.blocks[0] for stage in plan.stages]
    assert blocks == [3, 3], "two layers each, with the embedding before and the head after them"
    return [(first, "none*1 full*1 none*1"), (last, "full*1 none*2")]


def test_deepspeed_without_zero_shares_over_nothing(cache_dir: Path) -> None:
    """And a pipeline has one stage per group of devices, whose layers are told."""
    plan = planned(cache_dir, dp=2, pp=2, interleave=2)

    lost = plan.export("deepspeed", cache_dir=cache_dir).lost

    assert not any("ZeRO over" in sentence for sentence in lost)
    assert any("num_stages=2 and layers per stage 2, 2;" in sentence for sentence in lost)


@pytest.mark.parametrize(
    ("to", "sentence"),
    [("megatron", "its own keeps probabilities in float32"), ("torchtitan", "buckets of 25 MB; torchtitan reduces")],
)
def test_what_a_framework_does_otherwise_is_listed(to: str, sentence: str, pipeline: Plan, cache_dir: Path) -> None:
    """What is assumed and what the framework does, in the file and on the record."""
    exported = pipeline.export(to, cache_dir=cache_dir)

    assert any(sentence in found for found in exported.granted)
    assert all(found in plain(exported) for found in exported.granted)
    told = json.loads(pipeline.export("deepspeed", cache_dir=cache_dir).text)["autopar"]["taken for granted"]
    assert any("waits for what it sends" in found for found in told)


@pytest.mark.parametrize(
    ("to", "asked"),
    [
        ("megatron", "--tp-comm-overlap"),
        ("torchtitan", "config.compile.enable_async_tensor_parallel = True"),
        ("nemo", "config.model.tp_comm_overlap = True"),
    ],
)
def test_collectives_hidden_behind_products_are_asked_for(to: str, asked: str, cache_dir: Path) -> None:
    """Where the stack hides them, and only with sequence parallelism."""
    stack = Stack("mine", hides_tp=True)
    plans = [planned(cache_dir, tp=2, sequence_parallel=sequence, stack=stack) for sequence in (True, False)]

    found = [asked in plain(plan.export(to, cache_dir=cache_dir)) for plan in plans]

    assert found == [True, False]


def test_versions_of_names_are_said(pipeline: Plan, cache_dir: Path) -> None:
    for to, version in (
        ("megatron", "core_v0.19.2"), ("torchtitan", "torchtitan 0.3.0"), ("nemo", "Megatron-Bridge 0.6.2"),
        ("deepspeed", "DeepSpeed 0.19.8"), ("maxtext", "MaxText 0.2.5"),
    ):  # fmt: skip
        assert version in plain(pipeline.export(to, cache_dir=cache_dir))


def test_a_file_of_the_zoo_states_its_sizes(cache_dir: Path, tmp_path: Path) -> None:
    """Written by `autopar model`, it is a decoder of known sizes."""
    settings = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
    assert main(["model", "llama3-8b", *settings, "-o", str(tmp_path / "model.onnx")]) == 0
    plan = autopar.predict(tmp_path / "model.onnx", Degrees(dp=2, global_batch=16), cache_dir=cache_dir).plan

    exported = plan.export("megatron", cache_dir=cache_dir)

    assert "--num-layers 4\n--hidden-size 512\n" in exported.text
    assert not any("sizes of the model" in sentence for sentence in exported.lost)


def test_the_onnx_file_says_how_it_is_loaded(cache_dir: Path, tmp_path: Path) -> None:
    """Weights of the zoo have no data: plain `onnx.load` fails, and what to write instead is said and works."""
    exported = planned(cache_dir, dp=2).export("onnx", cache_dir=cache_dir)
    path = tmp_path / exported.name
    path.write_bytes(exported.data)

    (sentence,) = [sentence for sentence in exported.lost if sentence.startswith("weights: ")]

    assert "plain onnx.load fails; use onnx.load(path, load_external_data=False)" in sentence
    assert onnx.load(path, load_external_data=False).configuration
    with pytest.raises((onnx.checker.ValidationError, FileNotFoundError)):
        onnx.load(path)


def test_placements_are_not_predicted_again(pipeline: Plan, cache_dir: Path) -> None:
    for to in ("jax", "pytorch"):
        assert "Not predicted as written" in plain(pipeline.export(to, cache_dir=cache_dir))


def test_the_first_layers_are_offloaded_as_megatron_offloads_them(cache_dir: Path) -> None:
    """Two of four; of other layers as many are told, and which is said."""
    plan = planned(cache_dir, dp=2, recompute="offload")
    (stage,) = plan.stages
    first, others = (
        replace(plan, stages=(replace(stage, recompute=own),))
        for own in ("none*1 offload*2 none*3", "none*1 offload*1 none*1 offload*1 none*2")
    )

    exported = first.export("megatron", cache_dir=cache_dir)

    assert "--cpu-offloading-num-layers 2" in exported.text
    assert exported.outcome.startswith("Predicted as written")
    assert not any("which layers" in lost for lost in exported.lost)
    assert any("which layers are offloaded" in lost for lost in others.export("megatron").lost)


@pytest.mark.slow
def test_a_pipeline_as_megatron_lays_it_out(cache_dir: Path) -> None:
    """Embedding and head alone, multi-token prediction with a layer, pipelines inside, the dispatch hidden."""
    dims = {**TINY["deepseek-v3"], "num_layers": 4, "dense_layers": 2, "mtp": 1}
    stated = Degrees(
        dp=16, pp=2, ep=4, interleave=2, schedule="1f1b-a2a", global_batch=64, pp_inside=True,
        layers=(0, 2, 2, 0), predictions=(0, 0, 1, 0),
    )  # fmt: skip
    plan = autopar.predict("zoo:deepseek-v3", stated, dims=dims, cache_dir=cache_dir).plan

    exported = plan.export("megatron", cache_dir=cache_dir)

    lines = exported.text.splitlines()
    assert "--pipeline-model-parallel-layout 'E|t*2|t*2,m|L'" in lines
    assert "--use-tp-pp-dp-mapping" in lines
    assert "--overlap-moe-expert-parallel-comm" in lines
    assert any("refuses them with experts" in sentence for sentence in exported.lost)
    assert exported.outcome.startswith("Predicted as written: ")
    read = parse_configuration(exported.text, "megatron", gpus=32, model="zoo:deepseek-v3").degrees
    assert read == replace(stated, shard=read.shard, zero=read.zero)
    assert plan.summary.startswith("dp=16 (ep=4) × pp=2 (2 stages each, inside dp)")
    assert any("pipelines inside" in sentence for sentence in plan.export("torchtitan", cache_dir=cache_dir).lost)

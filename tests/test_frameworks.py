"""Plans in the words of frameworks: what is written is documented there, says what the plan says, names the rest."""

import json
import shlex
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

import autopar
from autopar import models
from autopar.cli import main
from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.frameworks import facts, known, megatron, nemo, targets
from autopar.frameworks.configurations import read_configuration
from autopar.frameworks.jax import partition_spec
from autopar.frameworks.megatron_layers import layer_arguments
from autopar.frameworks.onnx_devices import LOST, sharding_spec
from autopar.frameworks.python_file import read_fields
from autopar.plan import Plan, StagePlan
from autopar.sharding import Mesh, Replicate, Shard
from autopar.workload import open_plan
from tests.variants import staged

# Sizes at which what Megatron does is what pays; a model without weights is small whatever its sizes.
LLAMA = {"num_layers": 4}
MIXTRAL = {"num_layers": 4}


def planned(model: str, dims: dict[str, int], cache_dir: Path, **degrees: Any) -> Plan:
    """Return a plan by degrees of a small model."""
    stated = Degrees(**{"global_batch": 16, **degrees})
    return autopar.predict(model, stated, dims=dims, cache_dir=cache_dir).plan


@pytest.fixture(scope="module")
def hybrid(cache_dir: Path) -> Plan:
    """A plan with every word Megatron has for a dense model; stages of 1 and 3 layers."""
    return planned(
        "zoo:llama3-8b", LLAMA, cache_dir,
        dp=2, tp=2, pp=2, zero=1, sequence_parallel=True, recompute="full", layers=(1, 3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def sharded(cache_dir: Path) -> Plan:
    """A plan that shares parameters over all devices."""
    return planned("zoo:llama3-8b", LLAMA, cache_dir, dp=8, zero=3, recompute="selective")


@pytest.fixture(scope="module")
def expert(cache_dir: Path) -> Plan:
    """A plan with expert parallelism."""
    return planned("zoo:mixtral-8x7b", MIXTRAL, cache_dir, dp=4, ep=2, zero=1)


def arguments(plan: Plan) -> dict[str, str | bool]:
    """Return the Megatron arguments of a plan."""
    return megatron.parse(plan.export("megatron").text).values


def values(plan: Plan, to: str) -> dict[str, Any]:
    """Return the fields that a Python configuration of a plan sets, section by section."""
    return read_fields(plan.export(to).text)


def test_megatron_gets_the_degrees(hybrid: Plan) -> None:
    """Tensor, pipeline and data parallelism, uneven stages, ZeRO, recompute, batch and sizes."""
    found = arguments(hybrid)

    assert found["--tensor-model-parallel-size"] == "2"
    assert found["--pipeline-model-parallel-size"] == "2"
    assert found["--pipeline-model-parallel-layout"] == "Et*1|t*3,L"
    assert found["--sequence-parallel"] is True
    assert found["--use-distributed-optimizer"] is True
    assert found["--recompute-granularity"] == "full"
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("1", "16")
    assert (found["--num-layers"], found["--num-query-groups"], found["--ffn-hidden-size"]) == ("4", "8", "14336")
    assert hybrid.export("megatron").lost == ()


def test_experts_are_data_parallel_devices(expert: Plan) -> None:
    """As in Megatron: the expert degree divides the data-parallel one."""
    found = arguments(expert)

    assert found["--expert-model-parallel-size"] == "2"
    assert (found["--num-experts"], found["--moe-router-topk"]) == ("8", "2")


@pytest.mark.parametrize("name", ["hybrid", "sharded", "expert"])
def test_megatron_arguments_are_documented(name: str, request: pytest.FixtureRequest) -> None:
    """Each is known, and followed by what it takes."""
    for option, value in arguments(request.getfixturevalue(name)).items():
        kind = known.MEGATRON[option]
        assert (value is True) == (kind == "flag"), option
        if kind == "whole":
            assert str(value).isdecimal(), option


@pytest.mark.parametrize("name", ["hybrid", "sharded", "expert"])
def test_torchtitan_fields_are_documented(name: str, request: pytest.FixtureRequest) -> None:
    """The file sets known fields in known sections."""
    for section, fields in values(request.getfixturevalue(name), "torchtitan").items():
        assert (fields.keys() if isinstance(fields, dict) else set()) <= known.TORCHTITAN[section]


def test_torchtitan_gets_the_degrees(hybrid: Plan) -> None:
    """Modules of every stage, and the samples of a local batch, which a pipeline runs as microbatches."""
    tables = values(hybrid, "torchtitan")

    parallelism = tables["parallelism"]
    assert parallelism["tensor_parallel_degree"] == 2
    assert parallelism["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3", "norm", "lm_head"],
    ]
    training = tables["training"]
    assert (training["local_batch_size"], training["global_batch_size"], training["seq_len"]) == (8, 16, 8192)
    assert training["disable_cuda_graphs"] is True
    assert tables["activation_checkpoint"] == "FullAC"


@pytest.mark.parametrize("name", ["hybrid", "sharded", "expert"])
def test_deepspeed_keys_are_documented(name: str, request: pytest.FixtureRequest) -> None:
    """Beside the key that stands for a comment; the batch is what DeepSpeed checks it to be."""
    plan = request.getfixturevalue(name)
    fields = json.loads(plan.export("deepspeed").text)
    comment = fields.pop("autopar")

    for key, value in fields.items():
        assert (value.keys() if isinstance(value, dict) else set()) <= known.DEEPSPEED[key]
    data_parallel = plan.job.gpus // (fields.get("tensor_parallel", {}).get("autotp_size", 1) * len(plan.stages))
    steps = fields["train_micro_batch_size_per_gpu"] * fields["gradient_accumulation_steps"]
    assert fields["train_batch_size"] == steps * data_parallel
    assert comment["not expressed"] == list(plan.export("deepspeed").lost)


@pytest.mark.parametrize("name", ["hybrid", "sharded", "expert"])
def test_a_recipe_of_nemo_is_the_arguments_of_megatron(name: str, request: pytest.FixtureRequest) -> None:
    """By other names: every argument is a field, or is left to the recipe's model or its precision.

    But for the loss of Transformer Engine, which Megatron-LM's own parser refuses.
    """
    plan = request.getfixturevalue(name)
    found = values(plan, "nemo")

    model = {"--bf16", *(option for option in arguments(plan) if option in nemo.OF_MODEL)}
    for option, value in arguments(plan).items():
        if option == "--cross-entropy-fusion-impl":
            value = "te"
        fields = nemo.FIELDS.get(option, ())
        assert fields or option in model or option in ("--attention-backend", *nemo.OPPOSITE), option
        for section, field in (own.split(".") for own in fields):
            own = found[section][field]
            words = " ".join(own) if isinstance(own, list) else own
            assert value is own is True or str(words) == value, option
    assert found["model"]["context_parallel_size"] == 1


@pytest.mark.parametrize("name", ["hybrid", "sharded", "expert"])
def test_keys_of_maxtext_multiply_to_the_devices(name: str, request: pytest.FixtureRequest) -> None:
    plan = request.getfixturevalue(name)
    fields = yaml.safe_load(plan.export("maxtext").text)

    assert prod(size for key, size in fields.items() if key.endswith("_parallelism")) == plan.job.gpus
    samples = fields["per_device_batch_size"] * plan.job.gpus * fields["gradient_accumulation_steps"]
    assert samples == plan.job.global_batch


def test_fsdp_wraps_and_shares_over_groups(cache_dir: Path) -> None:
    """One takes replicas and shards, the other shards alone; neither takes a pipeline."""
    sharded = planned("zoo:llama3-8b", LLAMA, cache_dir, dp=4, zero=3, shard=2, recompute="full")

    found = yaml.safe_load(sharded.export("accelerate").text)
    trainer = json.loads(sharded.export("trainer").text)

    assert found["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert found["fsdp_config"]["fsdp_activation_checkpointing"] is True
    sizes = found["parallelism_config"]
    assert sizes["parallelism_config_dp_replicate_size"] == sizes["parallelism_config_dp_shard_size"] == 2
    assert trainer["per_device_train_batch_size"] * trainer["gradient_accumulation_steps"] * 4 == 16
    assert any("ZeRO over 2 of 4" in sentence for sentence in trainer["_autopar"]["not expressed"])
    pipeline = planned("zoo:llama3-8b", LLAMA, cache_dir, pp=2, tp=2)
    for to in ("accelerate", "trainer"):
        with pytest.raises(ExportError, match=r"a pipeline of 2; .* runs none"):
            pipeline.export(to)


def test_what_is_lost_is_listed(hybrid: Plan) -> None:
    """In the file as on the record."""
    mixed = replace(
        hybrid, schedule="zb-h1", stages=(hybrid.stages[0], replace(hybrid.stages[1], recompute="full*2 none*2"))
    )

    exported = mixed.export("megatron")

    assert any("schedule 'zb-h1'" in sentence for sentence in exported.lost)
    assert any("recompute by layer" in sentence for sentence in exported.lost)
    comments = " ".join(line.lstrip("# ") for line in exported.text.splitlines() if line.startswith("#"))
    for sentence in exported.lost:
        assert sentence in comments


def test_zero_holds_on_data_and_context_devices(cache_dir: Path) -> None:
    """Context-parallel devices hold the same parameters as data-parallel ones."""
    plan = planned("zoo:llama3-8b", LLAMA, cache_dir, dp=2, cp=2, zero=1)

    found = facts.read(plan, open_plan(plan).folded(plan.microbatch))

    assert (found.dp, found.cp, found.zero, found.lost) == (2, 2, 1, ())


@pytest.mark.parametrize(
    ("kind", "megatron_name", "torchtitan_name"),
    [("ring", "p2p", "alltoall"), ("gather", "all_gather", "allgather"), ("ulysses", "a2a", None)],
)
def test_the_kind_of_context_parallelism_is_exported(
    kind: str, megatron_name: str, torchtitan_name: str | None, cache_dir: Path
) -> None:
    """What torchtitan cannot do is lost."""
    plan = planned("zoo:llama3-8b", LLAMA, cache_dir, dp=2, cp=2, cp_kind=kind)

    exported = plan.export("torchtitan")

    assert arguments(plan)["--cp-comm-type"] == megatron_name
    assert any("context parallelism" in sentence for sentence in exported.lost) == (torchtitan_name != "allgather")
    assert not any("context parallelism" in sentence for sentence in plan.export("megatron").granted)


def test_shards_inside_replicas_are_hybrid(cache_dir: Path, tmp_path: Path) -> None:
    """ZeRO over the links of a node only is torchtitan's HSDP and several instances of Megatron's optimizer."""
    hybrid = planned("zoo:llama3-8b", LLAMA, cache_dir, dp=4, zero=3, shard=2)

    found = values(hybrid, "torchtitan")["parallelism"]

    assert (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"]) == (2, 2)
    assert arguments(hybrid)["--num-distributed-optimizer-instances"] == "2"
    assert any("ZeRO over 2 of 4" in sentence for sentence in hybrid.export("deepspeed").lost)
    (tmp_path / "job.py").write_text(hybrid.export("torchtitan").text)
    degrees = read_configuration(tmp_path / "job.py", "torchtitan", gpus=4, model="zoo:llama3-8b").degrees
    assert (degrees.dp, degrees.zero, degrees.shard) == (4, 3, 2)
    (tmp_path / "args").write_text(hybrid.export("megatron").text)
    assert read_configuration(tmp_path / "args", "megatron", gpus=4).degrees == degrees


@pytest.fixture(scope="module")
def unequal(cache_dir: Path) -> Plan:
    """Return a plan of 4 devices data parallel, then 2 devices tensor parallel."""
    first = planned("zoo:llama3-8b", LLAMA, cache_dir, dp=4)
    second = planned("zoo:llama3-8b", LLAMA, cache_dir, tp=2, microbatch=4)
    return staged([first, second], "1f1b", (2,))


@pytest.mark.parametrize("to", ["megatron", "torchtitan", "deepspeed", "nemo", "jax", "pytorch"])
def test_stages_with_their_own_meshes_are_refused_where_one_holds_for_all(unequal: Plan, to: str) -> None:
    with pytest.raises(ExportError, match=rf"\(stage 0: dp=4; stage 1: tp=2\); what {to} is told holds for all"):
        unequal.export(to)


def test_onnx_is_told_stage_by_stage(unequal: Plan) -> None:
    """Inputs of the second stage are on devices 4 and 5, whatever the first one does with the same kind of layer."""
    model = onnx.load_from_string(unequal.export("onnx").data)

    devices: dict[int, set[int]] = {}
    for node in model.graph.node:
        for found in node.device_configurations:
            for spec in found.sharding_spec:
                groups = {entry.key: set(entry.value) for entry in spec.index_to_device_group_map}
                for device in spec.device:
                    devices.setdefault(found.pipeline_stage, set()).update(groups.get(device, {device}))
    assert devices == {0: {0, 1, 2, 3}, 1: {4, 5}}


def test_an_idle_axis_cannot_be_said(cache_dir: Path) -> None:
    """Degrees would promise work that the plan does not share; placements are fine."""
    plan = planned("zoo:mlp-xs", {}, cache_dir, dp=2)
    doubled = json.loads(plan.to_json())
    for block in doubled["blocks"]:
        for item in [*block["states"], *block["arrivals"], *block["departures"], *block["copies"], *block["borrowed"]]:
            item["placement"] += "R"
        for op in block["ops"]:
            op["inputs"] = [text and text + "R" for text in op["inputs"]]
            op["outputs"] = [text and text + "R" for text in op["outputs"]]
    doubled["mesh"] = [{"name": "dp", "size": 2, "stride": 2}, {"name": "spare", "size": 2, "stride": 1}]
    doubled["stages"][0]["devices"] = [0, 4]
    wasteful = Plan.from_json(json.dumps(doubled).encode())

    with pytest.raises(ExportError, match="'spare' do the same work"):
        wasteful.export("megatron")
    assert "'spare'" in wasteful.export("jax").text


@pytest.mark.parametrize("target", ["megatron", "nemo"])
def test_plans_for_inference_are_no_training_jobs(target: str, cache_dir: Path) -> None:
    """One clear error."""
    plan = autopar.predict(
        "zoo:mlp-xs", Degrees(dp=2, schedule="forward-only", global_batch=4), mode="infer", cache_dir=cache_dir
    ).plan

    with pytest.raises(ExportError, match="for inference"):
        plan.export(target)


def test_a_partition_spec_names_axes_by_dim() -> None:
    """Major axis first where a dim is split twice; trailing dims that are whole are left out."""
    axes = Mesh.of(a=2, b=2, c=2).axes

    assert partition_spec((Shard(1), Shard(1), Replicate()), axes, 3) == "P(None, ('a', 'b'))"
    assert partition_spec((Replicate(), Replicate(), Replicate()), axes, 3) == "P()"


@pytest.mark.parametrize("placements", ["S(0)S(1)", "S(1)R", "RS(0)", "RR", "S(0)S(0)", "S(0/2)R"])
def test_onnx_sharding_specs_place_the_blocks(placements: str) -> None:
    """A reader of ONNX's rules finds on every device the block that the plan puts there."""
    from autopar.sharding import parse_placements

    mesh, shape = Mesh.of(outer=2, inner=2), (8, 4)
    parsed = parse_placements(placements)
    spec = sharding_spec("x", shape, parsed, mesh, first=4)

    rows = np.arange(prod(shape)).reshape(shape)
    held = _blocks(spec, rows)

    for device in range(4):
        expected = rows
        for placement, place in zip(parsed, divmod(device, 2), strict=True):
            if isinstance(placement, Shard):
                parts = np.split(expected, placement.chunks, axis=placement.dim)
                expected = np.concatenate([np.split(p, 2, axis=placement.dim)[place] for p in parts], placement.dim)
        np.testing.assert_array_equal(held[4 + device], expected)


def _blocks(spec: onnx.ShardingSpecProto, rows: Any) -> dict[int, Any]:
    """Return what each device holds, by the definition of `ShardingSpecProto`."""
    pieces = [rows]
    for dim in spec.sharded_dim:
        factors = [(item.dim_value, item.num_shards) for item in dim.simple_sharding]
        chunks = prod(size for size, shards in factors if shards == 1)
        (shards,) = [shards for _, shards in factors if shards > 1]
        cut = []
        for piece in pieces:
            parts = np.split(piece, chunks if len(factors) > 1 else 1, axis=dim.axis)
            columns = [np.split(part, shards, axis=dim.axis) for part in parts]
            cut += [np.concatenate([column[i] for column in columns], axis=dim.axis) for i in range(shards)]
        pieces = cut
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    return {device: piece for key, piece in zip(spec.device, pieces, strict=True) for device in groups.get(key, [key])}


def test_the_onnx_file_carries_the_plan(hybrid: Plan) -> None:
    """Stages in order, a spec for every MatMul, and the file still loads as the model it was."""
    model = onnx.load_from_string(hybrid.export("onnx").data)

    assert model.ir_version >= 11
    assert [(item.name, item.num_devices) for item in model.configuration] == [("autopar", 8)]
    placed = [node for node in model.graph.node if node.device_configurations]
    stages = [node.device_configurations[0].pipeline_stage for node in placed]
    assert set(stages) == {0, 1}
    for node in model.graph.node:
        if node.op_type == "MatMul":
            (configuration,) = node.device_configurations
            assert {spec.tensor_name for spec in configuration.sharding_spec} >= set(node.input)
    assert any(entry.key == LOST for entry in model.metadata_props)


def test_onnx_accepts_the_file(hybrid: Plan) -> None:
    """Its own checker, once weights that are not there have become inputs."""
    model = onnx.load_from_string(hybrid.export("onnx").data)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    kept = [item for item in model.graph.initializer if item.data_location != onnx.TensorProto.EXTERNAL]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)

    onnx.checker.check_model(model, full_check=True)


def test_every_target_writes_a_file(hybrid: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, with what is lost on standard error; a wrong name lists the right ones."""
    hybrid.save(tmp_path / "plan.json")
    command = ["export", str(tmp_path / "plan.json"), "-o", str(tmp_path), "--no-cache", "--to"]

    own = [target for target in targets() if target not in ("accelerate", "trainer", "fsdp", "maxtext")]
    for target in own:
        assert main([*command, target]) == 0

    assert "not expressed:" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1 + len(own)
    assert main([*command, "keras"]) == 2
    assert "choose megatron, torchtitan" in capsys.readouterr().err


# Configurations as plans.


@pytest.mark.parametrize("name", ["hybrid", "sharded", "expert"])
def test_megatron_arguments_come_back(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Exported and imported, a plan by degrees is the same plan."""
    plan = request.getfixturevalue(name)
    (tmp_path / "args").write_text(plan.export("megatron").text)

    found = read_configuration(tmp_path / "args", "megatron", gpus=plan.job.gpus)

    again = autopar.predict(found.model, found.degrees, dims=found.dims).plan
    assert found.ignored == ()
    assert (again.summary, again.stages, again.blocks) == (plan.summary, plan.stages, plan.blocks)


def test_torchtitan_fields_come_back(hybrid: Plan, tmp_path: Path) -> None:
    """But for ZeRO 1, which torchtitan has no word for."""
    (tmp_path / "job.py").write_text(hybrid.export("torchtitan").text)

    found = read_configuration(tmp_path / "job.py", "torchtitan", gpus=8, model="zoo:llama3-8b")

    assert found.degrees == Degrees(
        dp=2, tp=2, pp=2, zero=2, sequence_parallel=True, recompute="full", schedule="1f1b", layers=(1, 3),
        global_batch=16,
    )  # fmt: skip


def test_deepspeed_keys_come_back(cache_dir: Path, tmp_path: Path) -> None:
    """Data parallelism with ZeRO 2."""
    plan = planned("zoo:mlp-xs", {}, cache_dir, dp=4, zero=2, microbatch=2)
    (tmp_path / "ds.json").write_text(plan.export("deepspeed").text)

    found = read_configuration(tmp_path / "ds.json", "deepspeed", gpus=4, model="zoo:mlp-xs")

    assert found.degrees == Degrees(dp=4, zero=2, microbatch=2, global_batch=16)
    assert found.ignored == ()


def test_offloading_is_said_and_comes_back(cache_dir: Path, tmp_path: Path) -> None:
    """Megatron-LM offloads all layers but the last, and the optimizer with ZeRO 1; it says what it does otherwise."""
    degrees: dict[str, Any] = {"dp": 2, "zero": 1, "recompute": "offload", "offload": "optimizer"}
    plan = planned("zoo:llama3-8b", LLAMA, cache_dir, **degrees)
    exported = plan.export("megatron")
    (tmp_path / "args").write_text(exported.text)

    found = read_configuration(tmp_path / "args", "megatron", gpus=2)

    assert arguments(plan)["--cpu-offloading-num-layers"] == "3"
    assert arguments(plan)["--optimizer-cpu-offload"] is True
    assert any("updates on the CPU" in lost for lost in exported.lost)
    assert found.ignored == ()
    assert found.degrees == Degrees(**degrees | {"offload": "update"}, global_batch=16)
    assert arguments(plan)["--overlap-cpu-optimizer-d2h-h2d"] is True
    recipe = values(plan, "nemo")
    assert recipe["optimizer"]["optimizer_cpu_offload"] is True
    assert recipe["optimizer"]["overlap_cpu_optimizer_d2h_h2d"] is True
    assert recipe["model"]["cpu_offloading_num_layers"] == 3


def test_a_share_of_the_optimizer_comes_back(cache_dir: Path, tmp_path: Path) -> None:
    """As Megatron-LM and DeepSpeed with ZeRO 3 are told it: the first blocks of a stage, for half of the parameters."""
    degrees: dict[str, Any] = {"dp": 2, "zero": 3}
    plan = planned("zoo:llama3-8b", LLAMA, cache_dir, **degrees, offload="update=0.5")
    beside = planned("zoo:llama3-8b", LLAMA, cache_dir, **degrees, offload="gradients=0.5")
    (tmp_path / "args").write_text(plan.export("megatron").text)
    (tmp_path / "ds.json").write_text(beside.export("deepspeed").text)

    found = read_configuration(tmp_path / "args", "megatron", gpus=2)
    other = read_configuration(tmp_path / "ds.json", "deepspeed", gpus=2, model="zoo:llama3-8b")

    assert plan.stages[0].hosted in [(True,) * count + (False,) * (6 - count) for count in range(1, 6)]
    assert 0.3 < float(arguments(plan)["--optimizer-offload-fraction"]) < 0.7
    assert autopar.predict(found.model, found.degrees, dims=found.dims).plan.stages == plan.stages
    assert other.degrees.offload == found.degrees.offload.replace("update", "gradients")
    assert not any("CPU" in lost or "in host memory" in lost for lost in plan.export("megatron").lost)
    told = values(plan, "nemo")["optimizer"]["optimizer_offload_fraction"]
    assert told == float(arguments(plan)["--optimizer-offload-fraction"])


@pytest.mark.parametrize(("zero", "offload"), [(2, "gradients"), (3, "gradients"), (3, "parameters")])
def test_zero_offload_comes_back(zero: int, offload: str, cache_dir: Path, tmp_path: Path) -> None:
    """ZeRO-Offload has sums of gradients in host memory, ZeRO-Infinity parameters, too."""
    plan = planned("zoo:mlp-xs", {}, cache_dir, dp=4, zero=zero, microbatch=2, offload=offload)
    exported = plan.export("deepspeed")
    (tmp_path / "ds.json").write_text(exported.text)

    found = read_configuration(tmp_path / "ds.json", "deepspeed", gpus=4, model="zoo:mlp-xs")

    assert found.degrees == Degrees(dp=4, zero=zero, microbatch=2, global_batch=16, offload=offload)
    assert found.ignored == ()
    assert not any("host memory" in lost or "CPU" in lost for lost in exported.lost)


def test_what_lies_in_host_memory_is_said_where_a_framework_has_other_state_there(cache_dir: Path) -> None:
    """DeepSpeed takes sums of gradients, too, Megatron-LM nothing but the optimizer, FSDP2 all or nothing."""
    told = {
        offload: planned("zoo:mlp-xs", {}, cache_dir, dp=4, zero=3, microbatch=2, offload=offload)
        for offload in ("update", "parameters")
    }

    def lost(offload: str, to: str) -> str:
        return " ".join(told[offload].export(to).lost)

    assert "DeepSpeed keeps gradients, the optimizer's state and its update there" in lost("update", "deepspeed")
    assert "Megatron-LM keeps the optimizer's state and its update there" in lost("parameters", "megatron")
    assert "MaxText keeps the optimizer's state there" in lost("update", "maxtext")
    assert "in host memory" not in lost("parameters", "fsdp")
    assert "OFFLOADS = True" in told["parameters"].export("fsdp").text
    assert "FSDP2 keeps parameters, gradients, the optimizer's state and its update there" in lost("update", "fsdp")


def test_parameters_without_the_optimizer_in_host_memory_cannot_be_read(tmp_path: Path) -> None:
    fields = {"stage": 3, "offload_param": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 16, "zero_optimization": fields}))

    with pytest.raises(ExportError, match="offload_param"):
        read_configuration(tmp_path / "ds.json", "deepspeed", gpus=4, model="zoo:mlp-xs")


@pytest.mark.parametrize("to", ["torchtitan", "pytorch", "jax", "onnx"])
def test_what_frameworks_keep_on_devices_is_lost(to: str, cache_dir: Path) -> None:
    plan = planned("zoo:mlp-xs", {}, cache_dir, dp=4, microbatch=2, recompute="offload", offload="optimizer")

    lost = plan.export(to).lost

    assert any("activations in host memory" in sentence for sentence in lost)
    assert any("optimizer's state in host memory (1 of 1 stages)" in sentence for sentence in lost)
    assert not any(sentence.startswith("recompute") for sentence in lost)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--optimizer-cpu-offload --optimizer-offload-fraction 1.5", "--optimizer-offload-fraction 1.5"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction most", "--optimizer-offload-fraction most"),
        ("--num-layers 8 --cpu-offloading-num-layers 8", "--cpu-offloading-num-layers 8 of 8"),
    ],
)
def test_parts_that_are_offloaded_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "args").write_text(text)

    with pytest.raises(ExportError, match=message):
        read_configuration(tmp_path / "args", "megatron", gpus=2, model="zoo:mlp-xs")


SCRIPT = r"""
#!/bin/bash
DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes 2   # two machines
)
MODEL_ARGS="--num-layers 8 --hidden-size=64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    $MODEL_ARGS --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 \
    --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 --fp16
"""


def test_megatron_scripts_are_read(tmp_path: Path) -> None:
    """As people write them: arrays, strings, continued lines, comments; what has no meaning here is listed."""
    (tmp_path / "train.sh").write_text(SCRIPT)

    found = read_configuration(tmp_path / "train.sh", "megatron")

    assert found.degrees == Degrees(dp=4, tp=2, pp=2, interleave=2, microbatch=2, global_batch=64)
    assert found.dims["num_layers"] == 8
    assert (found.precision, found.ignored) == ("megatron-fp16", ("--lr 1e-4",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no arguments"),
        ("--num-layers four --tensor-model-parallel-size 1", "--num-layers is followed by 'four'"),
        ("--tensor-model-parallel-size 3", "8 devices are not divisible"),
        ("--num-layers 4 --micro-batch-size 1", "sizes of the model are not stated: --hidden-size"),
        ("--pipeline-model-parallel-layout Etx|t", "no pipeline layout"),
        ("--lr '1", "cannot be read"),
        ("--recompute-granularity half", "half is not known"),
    ],
)
def test_wrong_arguments_get_one_error(text: str, message: str, tmp_path: Path) -> None:
    """It names the argument."""
    (tmp_path / "args").write_text(text)

    with pytest.raises(ExportError, match=message):
        read_configuration(tmp_path / "args", "megatron", gpus=8)


def test_imported_from_the_command_line(hybrid: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what was understood and ignored, then the prediction; writes the plan."""
    (tmp_path / "args").write_text(hybrid.export("megatron").text + "--clip-grad 1.0\n")
    command = ["import", str(tmp_path / "args"), "--from", "megatron", "--gpus", "8", "--no-cache"]

    assert main([*command, "-o", str(tmp_path / "plan.json")]) == 0

    captured = capsys.readouterr()
    assert "understood: --tensor-model-parallel-size 2" in captured.err
    assert "ignored: --clip-grad 1.0" in captured.err
    assert "full recompute" in captured.out
    assert Plan.load(tmp_path / "plan.json").blocks == hybrid.blocks
    assert main([*command[:-3], "--no-cache"]) == 2
    assert "give --gpus N" in capsys.readouterr().err


def test_a_layout_reads_as_it_is_written() -> None:
    """Stages without a layer, too."""
    for layers in ((2, 3, 1), (0, 4), (4, 0), (1, 1, 1, 1)):
        assert megatron.parse_layout(shlex.split(megatron.layout(layers))[0]) == (layers, ())


def test_stages_may_share_devices(cache_dir: Path) -> None:
    """Interleaved stages are groups of devices times stages per group."""
    plan = planned("zoo:llama3-8b", LLAMA, cache_dir, pp=2, interleave=2)

    found = arguments(plan)

    assert isinstance(plan.stages[0], StagePlan)
    assert found["--pipeline-model-parallel-size"] == "2"
    assert found["--num-virtual-stages-per-pipeline-rank"] == "2"


def test_sizes_of_hugging_face_decoders() -> None:
    """In the words of most configurations, and in GPT-2's; other models state none."""
    llama = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96,
        "num_key_value_heads": 2, "intermediate_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32,
    }  # fmt: skip
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 32}

    assert facts.config_sizes(llama, {}) == facts.Sizes(2, 64, 4, 2, 128, 32, 96, family="llama", rope_theta=1e4)
    assert facts.config_sizes(gpt2, {"seq": 8}) == facts.Sizes(2, 64, 4, 4, 256, 8, 96, family="gpt", tied=True)
    assert facts.config_sizes({"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4}, {}) is None


def test_layers_of_a_published_mixture_are_asked_for() -> None:
    """Latent attention, dense layers first, shared experts, and how the router chooses."""
    sizes = facts.sizes_of("published", models.spec("deepseek-v3").config)
    assert sizes is not None
    assert sizes.decoder is not None
    lost: list[str] = []

    found = dict(layer_arguments(sizes.decoder, lost))

    assert found.items() >= {
        "--multi-latent-attention": True, "--q-lora-rank": 1536, "--kv-lora-rank": 512, "--qk-head-dim": 128,
        "--qk-pos-emb-head-dim": 64, "--v-head-dim": 128, "--qk-layernorm": True, "--moe-ffn-hidden-size": 2048,
        "--moe-layer-freq": "([0]*3+[1]*58)", "--moe-shared-expert-intermediate-size": 2048,
        "--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True,
        "--moe-router-topk-scaling-factor": 2.5, "--moe-router-num-groups": 8, "--moe-router-group-topk": 4,
    }.items()  # fmt: skip
    assert lost == ["scaled rotary positions (yarn): set the tokenizer's and the model's context"]


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("gpt-oss-20b", "sinks of the softmax"),
        ("bloom-176b", "scores that fall with distance"),
        ("gemma2-9b", "soft caps"),
        ("gemma3-12b", "rotary positions that differ between layers"),
        ("llama4-maverick", "weights that scale what goes into experts"),
    ],
)
def test_what_megatron_has_no_argument_for_is_said(name: str, phrase: str) -> None:
    """Of each family of today."""
    sizes = facts.sizes_of("published", models.spec(name).config)
    assert sizes is not None
    assert sizes.decoder is not None
    lost: list[str] = []

    list(layer_arguments(sizes.decoder, lost))

    assert any(phrase in sentence for sentence in lost)

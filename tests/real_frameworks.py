"""What frameworks make of exported files: `PYTHON tests/real_frameworks.py NAME FILE GPUS` prints it as JSON.

Each is parsed, built and checked by the framework's own code, on CPUs, in an interpreter that has the framework;
autopar itself is not imported.
"""

import argparse
import ast
import dataclasses
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def megatron(file: Path, gpus: int) -> dict[str, Any]:
    """Megatron-LM's parser, its checks, and Megatron-Core's configurations; a layer of each stage is built."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_RANK": "0"}
    import torch
    from megatron.training import arguments

    words = shlex.split(file.read_text(), comments=True)
    alone = [
        "--tokenizer-type",
        "NullTokenizer",
        "--lr",
        "1e-4",
        "--train-iters",
        "1",
        "--mock-data",
        "--no-rope-fusion",
    ]
    if "--use-megatron-fsdp" not in words:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # of the plan's devices, not of this machine
    arguments.get_device_arch_version = lambda: 9
    sys.argv = ["pretrain_gpt.py", *words, *alone]
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    ddp = get_megatron_ddp_config(args)
    optimizer, _ = get_megatron_optimizer_config(args)
    return {
        "dp": args.data_parallel_size,
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "cp": config.context_parallel_size,
        "ep": config.expert_model_parallel_size,
        "layers": _layers(config),
        "microbatches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        "bucket_size": ddp.bucket_size,
        "overlap": [ddp.overlap_grad_reduce, ddp.overlap_param_gather],
        "distributed": optimizer.use_distributed_optimizer,
        "sharding": ddp.data_parallel_sharding_strategy if ddp.use_megatron_fsdp else "",
        "recompute": [config.recompute_granularity, config.recompute_num_layers],
        "modules": config.recompute_modules if config.recompute_granularity == "selective" else [],
        "dispatcher": config.moe_token_dispatcher_type if config.num_moe_experts else "",
        "capacity": config.moe_expert_capacity_factor,
        "attention": config.attention_backend.name,
        "graphs": config.cuda_graph_impl,
        "hidden": config.hidden_size,
        "parameters": _built(args, config),
    }


def _layers(config: Any) -> list[int]:
    """Return the layers that Megatron-Core builds in every stage, in the order of the chain."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    pp, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        stages = [layout.layout[group][chunk] for chunk in range(chunks or 1) for group in range(pp)]
        return [stage.count(LayerType.decoder) for stage in stages]
    return [
        get_num_layers_to_build(config, vp_stage=chunk if chunks else None, pp_rank=group)
        for chunk in range(chunks or 1)
        for group in range(pp)
    ]


def _built(args: Any, config: Any) -> int:
    """Return the parameters of the part of the model that device 0 holds, built on the CPU.

    0 if it is large, or takes Transformer Engine or a device: context parallelism, experts.
    """
    import torch

    if args.num_layers * args.hidden_size > 8192 or args.context_parallel_size > 1 or args.num_experts:
        return 0
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    local = dataclasses.replace(
        config, use_cpu_initialization=True, sequence_parallel=False, tp_comm_overlap=False,
        attention_backend=type(config.attention_backend).auto,
        moe_grouped_gemm=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        recompute_modules=None, recompute_granularity=None, recompute_method=None, recompute_num_layers=None,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
    )
    stages = args.virtual_pipeline_model_parallel_size
    found = 0
    for chunk in range(stages or 1):
        model = GPTModel(
            local, spec, args.padded_vocab_size or args.vocab_size, args.max_position_embeddings,
            pre_process=chunk == 0, post_process=args.pipeline_model_parallel_size == 1 and chunk == (stages or 1) - 1,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
            vp_stage=chunk if stages else None,
        )  # fmt: skip
        found += sum(parameter.numel() for parameter in model.parameters())
    return found


def torchtitan(file: Path, gpus: int) -> dict[str, Any]:
    """The configuration manager of torchtitan, with the checks of its configuration classes and of its mesh."""
    sys.path.insert(0, str(file.parent))
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = ConfigManager().parse_args(["--module", file.stem, "--config", "planned"])
    dims = ParallelDims.from_config(config.parallelism, gpus)
    parts = config.parallelism.module_fqns_per_model_part
    names = [name for part in parts or () for name in part if name.startswith("layers.")]
    model = config.model_spec.model
    return {
        "dp": [dims.dp_replicate, dims.dp_shard],
        "tp": dims.tp,
        "pp": dims.pp,
        "cp": dims.cp,
        "ep": dims.ep,
        "layers": [sum(name.startswith("layers.") for name in part) for part in parts or ()],
        "missing": sorted({f"layers.{index}" for index in range(len(model.layers))} - set(names)) if parts else [],
        "batch": [config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len],
        "compile": [config.compile.enable, config.compile.enable_async_tensor_parallel],
        "recompute": type(config.activation_checkpoint).__qualname__,
    }


def deepspeed(file: Path, gpus: int) -> dict[str, Any]:
    """DeepSpeed's configuration class, which checks the batch against the data-parallel devices."""
    from deepspeed.runtime import config as module
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads(file.read_text())

    class Devices:
        """The devices of a job, as DeepSpeed asks a model-parallel unit for them."""

        def get_data_parallel_world_size(self) -> int:
            """Return the data-parallel devices."""
            return gpus

    module.dist.get_rank = lambda *_: 0  # a process of the job; starting one compiles kernels
    config = DeepSpeedConfig(content, mpu=Devices())
    zero = config.zero_config
    return {
        "zero": int(zero.stage),
        "batch": [
            config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        ],
        "overlap": zero.overlap_comm,
        "bucket": int(zero.reduce_bucket_size),
        "bf16": config.bfloat16_config.enabled if hasattr(config, "bfloat16_config") else config.bfloat16_enabled,
        "unknown": sorted(set(zero.model_extra or {})),
    }  # fmt: skip


def nemo(file: Path, gpus: int) -> dict[str, Any]:
    """The classes of Megatron-Bridge's container, read from their source: importing them takes Transformer Engine."""
    import importlib.util

    del gpus
    spec = importlib.util.find_spec("megatron.bridge")
    assert spec is not None, "it is installed"
    bridge = Path(next(iter(spec.submodule_search_locations or ())))
    core, training = bridge.parent / "core", bridge.parent / "training"
    sources = [
        *(bridge / "training").glob("*.py"), bridge / "models" / "gpt_provider.py", *(training / "config").glob("*.py"),
        bridge / "models" / "transformer_config.py", core / "transformer" / "transformer_config.py",
        core / "model_parallel_config.py", *(core / "distributed").glob("*.py"), *(core / "optimizer").glob("*.py"),
        *(core / "datasets").glob("*.py"), core / "rerun_state_machine.py",
    ]  # fmt: skip
    classes = _classes(sources)
    sections = {
        "model": "GPTModelProvider", "ddp": "DistributedDataParallelConfig", "optimizer": "OptimizerConfig",
        "train": "TrainingConfig", "dist": "DistributedInitConfig", "dataset": "GPTDatasetConfig",
        "checkpoint": "CheckpointConfig", "rerun_state_machine": "RerunStateMachineConfig",
        "mixed_precision": "MixedPrecisionConfig",
    }  # fmt: skip
    known = {name: _fields(classes, own) for name, own in {**sections, "": "ConfigContainer"}.items()}
    function = next(own for own in ast.parse(file.read_text()).body if isinstance(own, ast.FunctionDef))
    names = [ast.unparse(own.targets[0]).split(".")[1:] for own in function.body if isinstance(own, ast.Assign)]
    wrong = [".".join(name) for name in names if name[-1] not in known[name[0] if len(name) > 1 else ""]]
    return {"missing": wrong, "set": len(names)}


def _classes(sources: list[Path]) -> dict[str, list[tuple[set[str], list[str]]]]:
    """Return, by the name of a class, the fields and the bases of every class called so."""
    found: dict[str, list[tuple[set[str], list[str]]]] = {}
    for source in sources:
        tree = ast.parse(source.read_text())
        names = {
            alias.asname: alias.name for own in tree.body if isinstance(own, ast.ImportFrom) for alias in own.names
        }
        for own in ast.walk(tree):
            if isinstance(own, ast.ClassDef):
                fields = {ast.unparse(each.target) for each in own.body if isinstance(each, ast.AnnAssign)}
                bases = [names.get(base, base) for base in map(ast.unparse, own.bases)]
                found.setdefault(own.name, []).append((fields, bases))
    return found


def _fields(classes: dict[str, list[tuple[set[str], list[str]]]], name: str) -> set[str]:
    """Return the fields of all classes of a name, those of their bases included."""
    found: set[str] = set()
    left, seen = [name], {""}
    while left:
        current = left.pop()
        for fields, bases in classes.get(current, []):
            found |= fields
            left += [base for base in bases if base not in seen]
        seen.add(current)
    return found


def accelerate(file: Path, gpus: int) -> dict[str, Any]:
    """The configuration file of `accelerate launch`, its FSDP plugin and its parallelism."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = load_config_from_file(str(file))
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(file), "script.py"])
    args, _, _ = _validate_launch_command(args)
    from accelerate.utils.launch import prepare_multi_gpu_env

    environment = prepare_multi_gpu_env(args)
    os.environ |= {key: value for key, value in environment.items() if key.startswith(("FSDP_", "PARALLELISM_"))}
    found: dict[str, Any] = {"type": str(config.distributed_type), "processes": args.num_processes, "gpus": gpus}
    if args.use_fsdp:
        from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

        plugin = FullyShardedDataParallelPlugin()
        sizes = ParallelismConfig()
        found |= {
            "version": plugin.fsdp_version,
            "reshard": plugin.reshard_after_forward,
            "recompute": plugin.activation_checkpointing,
            "sizes": [sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.cp_size],
        }
    return found


def trainer(file: Path, gpus: int) -> dict[str, Any]:
    """`TrainingArguments` of transformers."""
    from transformers import TrainingArguments

    fields = json.loads(file.read_text())
    fields.pop("_autopar")
    with tempfile.TemporaryDirectory() as folder:
        found = TrainingArguments(output_dir=folder, use_cpu=True, **fields)
    return {
        "batch": found.per_device_train_batch_size * found.gradient_accumulation_steps * gpus,
        "fsdp": found.fsdp,
        "plugin": {key: str(value) for key, value in (found.fsdp_plugin_args or {}).items()},
    }


def maxtext(file: Path, gpus: int) -> dict[str, Any]:
    """MaxText's typed configuration: keys are known, values are of their types; the product of axes is not asked."""
    import maxtext
    import yaml
    from maxtext.configs.types import MaxTextConfig

    del gpus
    base = yaml.safe_load((Path(maxtext.__file__).parent / "configs" / "base.yml").read_text())
    own = yaml.safe_load(file.read_text())
    own.pop("base_config")
    wrong = {}
    for key, value in own.items():
        field = MaxTextConfig.model_fields.get(key)
        if key not in base and field is None:
            wrong[key] = "unknown"
        elif field is not None:
            from pydantic import TypeAdapter, ValidationError

            try:
                TypeAdapter(field.annotation).validate_python(value)
            except ValidationError as error:
                wrong[key] = str(error)
    return {"wrong": wrong, "keys": sorted(own)}


CHECKS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    check.__name__: check for check in (megatron, torchtitan, deepspeed, nemo, accelerate, trainer, maxtext)
}


def main() -> None:
    """Check a file, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("file", type=Path)
    parser.add_argument("gpus", type=int)
    asked = parser.parse_args()
    found = CHECKS[asked.name](asked.file, asked.gpus)
    sys.stdout.flush()
    sys.stdout.write(f"\n{json.dumps(found, default=str)}\n")


if __name__ == "__main__":
    main()

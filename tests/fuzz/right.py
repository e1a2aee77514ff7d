"""Files and commands that are right, of which cases are mutations: small models and jobs, so that a run is short."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import formats

TINY = (
    "zoo:gpt3-125m", "--set", "num_layers=2", "--set", "hidden=32", "--set", "heads=2", "--set", "seq=16",
    "--set", "vocab=64",
)  # fmt: skip
SMALL_JOB = ("--dp", "2", "--global-batch", "4")
_MLP = ("predict", "zoo:mlp-xs", "--dp", "2", "--global-batch", "8")

SEED_PLANS: Mapping[str, tuple[str, ...]] = {
    "plan-dp": ("predict", "zoo:mlp-xs", "--dp", "2", "--global-batch", "8", "--zero", "1"),
    "plan-pp": ("predict", *TINY, "--dp", "2", "--pp", "2", "--global-batch", "8", "--recompute", "full"),
    "plan-tp": ("predict", *TINY, "--tp", "2", "--sequence-parallel", "--global-batch", "2"),
}
"""Commands that print the plans which cases of the kind `plan` are mutations of."""

PLAN_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("simulate", "plan.json"),
    ("simulate", "plan.json", "--json", "--critical-path"),
    ("simulate", "plan.json", "--trace", "trace.json", "--flat"),
    ("explain", "plan.json"),
    ("explain", "plan.json", "--ops"),
    ("explain", "plan.json", "--tactics"),
    ("explain", "plan.json", "--pins"),
    ("diff", "plan.json", "other.json"),
    ("diff", "other.json", "plan.json"),
    ("report", "plan.json", "-o", "report.html"),
    ("export", "plan.json", "--to", "megatron", "-o", "megatron.args"),
    ("export", "plan.json", "--to", "torchtitan", "-o", "torchtitan_config.py"),
    ("export", "plan.json", "--to", "deepspeed", "-o", "deepspeed.json"),
    ("export", "plan.json", "--to", "nemo", "-o", "nemo.values"),
    ("export", "plan.json", "--to", "jax", "-o", "jax.py"),
    ("export", "plan.json", "--to", "pytorch", "-o", "pytorch.py"),
    ("export", "plan.json", "--to", "onnx", "-o", "model.onnx"),
)

SEED_PROGRAMS: Mapping[str, str] = {"program-dp": "plan-dp", "program-pp": "plan-pp", "program-tp": "plan-tp"}
"""Programs that cases of the kind `program` are mutations of, by the plans they are printed from."""

PROGRAM_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("simulate", "program.txt"),
    ("simulate", "program.txt", "--json", "--critical-path"),
    ("simulate", "program.txt", "--trace", "trace.json", "--flat", "--cluster", "a100", "--precision", "fp32"),
)

_DEVICE = {
    "name": "mine",
    "peaks": {"half": "312 TFLOP/s", "single": "19.5 TFLOP/s"},
    "memory": "80 GB",
    "memory_bandwidth": "2.039 TB/s",
    "launch": "4 us",
    "num_sms": 108,
}
_LINK = {"tier": "NVLink", "bandwidth": "234 GB/s", "latency": "30 us", "ramp": "1 MB", "overlap_slowdown": 1.1}
_NODES = {
    "name": "small",
    "devices_per_node": 2,
    "device": _DEVICE,
    "intra": {**_LINK, "tunings": [{"operation": "all_reduce", "bandwidth": "200 GB/s", "latency": "20 us"}]},
    "inter": {"tier": "IB", "latency": "20 us", "nics": {"count": 2, "rate": "200 Gb/s"}},
    "host": {"tier": "PCIe", "memory": "1 TB", "to_host": "24 GB/s", "to_device": "24 GB/s"},
    "gpu_hour_price": 2.5,
}
CLUSTERS: Mapping[str, Any] = {
    "nodes": _NODES,
    "torus": {**_NODES, "intra": {**_LINK, "torus": [2, 1], "wraps": 2}},
    "domains": {**_NODES, "domains": [{"devices": 4, "link": _LINK}]},
    "groups": {
        "name": "mixed",
        "groups": [{"nodes": 1, "cluster": _NODES}, {"nodes": 1, "cluster": "h100"}],
        "between": _LINK,
    },
}
CLUSTER_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("clusters", "cluster.yaml"),
    ("clusters", "cluster.yaml", "--json"),
    (*_MLP, "--cluster", "cluster.yaml"),
    (*_MLP, "--cluster", "cluster.yaml", "--json"),
    ("predict", "zoo:mlp-xs", "--pp", "2", "--dp", "2", "--global-batch", "8", "--cluster", "cluster.yaml"),
)

STACKS: Mapping[str, Any] = {
    "fitted": {
        "name": "mine",
        "attention": "unfused",
        "fusion": "chains",
        "clusters": ["a100"],
        "scalars": {"gemm_efficiency": 0.9, "memory_traffic": 1.5, "host_launch": "12 us", "step_seconds": "1 ms"},
        "fit": {
            "date": "2026-11-20",
            "error": 0.05,
            "p90": 0.1,
            "fitted": ["gemm_efficiency"],
            "data": {"paper": 12},
            "valid": {"gpus": [8, 64]},
        },
    },
    "plain": {"name": "plain", "scalars": {"intra_slowdown": 1.2}},
}
STACK_COMMANDS: tuple[tuple[str, ...], ...] = (
    (*_MLP, "--stack", "stack.yaml"),
    (*_MLP, "--stack", "stack.yaml", "--json"),
    ("simulate", "plan.json", "--stack", "stack.yaml"),
)

PINS: Mapping[str, Any] = {
    "degrees": {
        "pin": {"stages": [1, 2], "dp": [1, 2], "zero": [0, 1], "schedule": "1f1b", "microbatches": 2},
        "forbid": {"recompute": "full", "tp": 2},
    },
    "mesh": {"pin": {"mesh": {"dp": 2}, "recompute": {"0-3": "full", "4-7": "none"}, "within_node": ["dp"]}},
    "tactics": [{"data_parallel": {"axis": "dp"}}, {"pipeline": {"stages": 1, "microbatches": 2}}],
}
PIN_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("solve", "zoo:mlp-xs", "--set", "num_layers=2", "--gpus", "2", "--global-batch", "4", "--workers", "1",
     "--time-limit", "5", "--pin", "pins.yaml"),
)  # fmt: skip

TACTICS: Mapping[str, Any] = {
    "usual": [
        {"data_parallel": {"axis": "a"}},
        {"megatron": {"axis": "b"}},
        {"zero": {"stage": 2, "axis": "a"}},
        {"pipeline": {"stages": 2, "microbatches": 2, "schedule": "1f1b"}},
        {"recompute": {"what": "full", "stages": [0]}},
    ],
    "named": [
        {"shard": {"inputs": {"layers.*.weight": 0}, "axis": "a"}},
        {"replicate": {"pattern": "layers.1.*", "axis": "b"}},
        {"offload": {"what": "optimizer"}},
    ],
}
TACTIC_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("partition", "zoo:mlp-xs", "--mesh", "a=2,b=2", "--global-batch", "8", "--tactics", "tactics.yaml"),
    ("partition", "zoo:mlp-xs", "--mesh", "a=2,b=2", "--global-batch", "8", "--tactics", "tactics.yaml", "--json"),
)

PROBLEM = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 4], [1, 6], [2, 8]],
            "costs": [[15, 12, 9], [4, 7], [3, 3]],
            "usages": [[10, 20, 30], [5, 1], [7, 8]],
        },
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[1, 2, 3, 4, 5, 6], [0, 9, 9, 0]]},
        "usage_limit": 40,
    }
}

JOB = {
    "model": "zoo:mlp-xs",
    "global-batch": 8,
    "cluster": "h100",
    "set": {"num_layers": 4},
    "predict": {"dp": 2, "zero": 1, "recompute": "none", "json": True},
    "solve": {"top-k": 2, "time-limit": 5.0},
}

_MEGATRON = {
    "--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 1, "--sequence-parallel": None,
    "--use-distributed-optimizer": None, "--micro-batch-size": 1, "--global-batch-size": 4, "--bf16": None,
    "--num-layers": 2, "--hidden-size": 32, "--num-attention-heads": 2, "--seq-length": 16, "--vocab-size": 64,
    "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1,
    "--nproc-per-node": 4, "--untie-embeddings-and-output-weights": None,
}  # fmt: skip
_MEGATRON_LAYOUT = {
    **_MEGATRON,
    "--pipeline-model-parallel-size": 2, "--pipeline-model-parallel-layout": "'Et*1|t*1,L'", "--swiglu": None,
    "--ffn-hidden-size": 64, "--group-query-attention": None, "--num-query-groups": 2,
}  # fmt: skip
_TORCHTITAN = {
    "training": {"local_batch_size": 2, "global_batch_size": 8, "seq_len": 16},
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 1,
        "module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]],
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
}
_DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "bf16": {"enabled": True},
    "tensor_parallel": {"autotp_size": 1},
}
CONFIGURATIONS: Mapping[str, tuple[Callable[[Any], bytes], tuple[Any, ...], tuple[str, ...]]] = {
    "megatron": (formats.as_arguments, (_MEGATRON, _MEGATRON_LAYOUT), ()),
    "torchtitan": (
        formats.as_toml,
        (_TORCHTITAN, {**_TORCHTITAN, "parallelism": {"data_parallel_shard_degree": -1}}),
        ("--gpus", "4", "--model", "zoo:mlp-xs"),
    ),
    "deepspeed": (formats.as_json, (_DEEPSPEED,), ("--gpus", "2", "--model", "zoo:mlp-xs")),
}
"""Frameworks with how their files are written, files, and what is typed besides."""

_DECODER = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip
HUGGING_FACE: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_DECODER, "num_key_value_heads": 2},
    {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 32, "n_layer": 2,
        "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0,
    },
    {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_DECODER},
    {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], **_DECODER, "image_size": 32,
        "patch_size": 8,
    },
)  # fmt: skip

MODEL_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("predict", "model.onnx", *SMALL_JOB),
    ("predict", "model.onnx", "--mode", "infer", "--schedule", "forward-only", *SMALL_JOB),
    ("rules", "model.onnx", "--mode", "infer"),
    ("partition", "model.onnx", "--mesh", "a=2", "--tactics", "tactics.yaml", "--global-batch", "4"),
)

COMMANDS: tuple[tuple[str, ...], ...] = (
    (*_MLP, "--gpus", "2", "--memory-limit", "40", "--microbatch", "2", "--zero", "2", "--json"),
    (*_MLP, "--pp", "2", "--interleave", "2", "--schedule", "interleaved", "--layers", "2,2,2,2"),
    ("predict", *TINY, "--tp", "2", "--global-batch", "4", "--recompute", "full", "--precision", "fp32"),
    (*_MLP, "--cluster", "tpu-v5p-2x2x2", "--stack", "default", "--loss", "auto", "--optimizer", "adam"),
    (*_MLP, "--cluster", "h100", "--mode", "infer", "--schedule", "forward-only"),
    ("simulate", "plan.json", "--bucket-mb", "25", "--stragglers", "0.1", "--seed", "3", "--json"),
    ("simulate", "plan.json", "--trace", "trace.json", "--stack", "default"),
    ("partition", "zoo:mlp-xs", "--mesh", "a=2,b=2", "--tactics", "tactics.yaml", "--trips", "2"),
    ("solve", "zoo:mlp-xs", "--set", "num_layers=2", "--gpus", "2", "--global-batch", "4", "--workers", "1",
     "--time-limit", "5", "--top-k", "1", "--memory-limit", "10GB", "--seed", "1", "--pin", "pins.yaml"),
    ("model", "mlp-xs", "--set", "num_layers=2", "-o", "out.onnx"),
    ("clusters", "tpu-v5p-4x4x8", "--json"),
    ("export", "plan.json", "--to", "megatron", "-o", "megatron.args"),
    ("rules", "zoo:mlp-xs", "--op", "MatMul", "--json"),
    ("schedules", "--pp", "4", "--microbatches", "8"),
    ("explain", "plan.json", "--op", "layers.0.weight", "--time-limit", "1"),
)  # fmt: skip
OPTIONS = (
    "--gpus=0", "--gpus=1000000000000", "--global-batch=1" + "0" * 30, "--dp=99999999999", "--pp=1000000007",
    "--memory-limit=nan", "--memory-limit=inf", "--time-limit=nan", "--time-limit=inf", "--bucket-mb=nan",
    "--bucket-mb=inf", "--stragglers=nan", "--seed=1" + "0" * 30, "--cluster=tpu-v5p-99999999999x2x2",
    "--cluster=tpu-v5p-0x2x2", "--set=num_layers=0", "--set=num_layers=1000000000000", "--set=hidden=" + "9" * 5000,
    "--set=batch=4", "--help", "--json", "--no-cache", "--layers=", "--layers=0,0", "--mesh=a=99999999999",
    "--microbatch=1000000000000", "--interleave=1000000000000", "--zero=9", "--tp=64", "--cp=2", "--ep=2",
    "--sequence-parallel", "--schedule=zb-v", "--recompute=selective", "--offload=optimizer", "--trips=1" + "0" * 30,
)  # fmt: skip
"""Options that may or may not belong to the command they are given to."""

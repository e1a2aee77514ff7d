"""What a published recipe implies and its table of results omits: one table, by framework, version and model.

An entry fills fields of rows that its patterns match, and only fields that a row leaves out. Each says where its facts
come from: a script, a configuration or the default of an option, never a measurement. Of several entries that match,
the first that fills a field decides it; entries for a model come before those for its framework.

What a software recomputes is mapped to the nearest flavour autopar has: policies that keep all matrix products are
"selective", those that keep few of them "full"; activations copied to the host in more than half of the layers are
"offload", in fewer "none".
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.validation.records import Row


@dataclass(frozen=True, slots=True)
class Recipe:
    """Fields that a published recipe implies.

    Attributes:
        name: What rows are told to follow.
        source: Where the facts come from.
        origin: Pattern of where the row was published; "" for anywhere.
        framework: Pattern of the framework; "" for any.
        model: Pattern of the model's name; "" for any.
        gpu: Pattern of the device; "" for any.
        precision: Pattern of the numbers; "" for any.
        where: Values that fields of the row have to have.
        least_gpus: Devices from which on the entry holds.
        fills: Fields of a row and their values.
        leaves_open: Fields that the recipe has several values for: a row that states none cannot be posed.
    """

    name: str
    source: str
    origin: str = ""
    framework: str = ""
    model: str = ""
    gpu: str = ""
    precision: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    least_gpus: int = 0
    fills: Mapping[str, Any] = field(default_factory=dict)
    leaves_open: tuple[str, ...] = ()

    def matches(self, row: Row) -> bool:
        """Return whether a row follows the recipe."""
        patterns = (
            (self.origin, row.origin),
            (self.framework, row.framework),
            (self.model, row.model),
            (self.gpu, row.gpu),
            (self.precision, row.precision),
        )
        return (
            all(re.search(pattern, text or "", re.IGNORECASE) for pattern, text in patterns if pattern)
            and all(getattr(row, name) == value for name, value in self.where.items())
            and (row.n_gpus or 0) >= self.least_gpus
        )


def recipes_of(row: Row) -> Iterator[Recipe]:
    """Yield the recipes that a row follows, the most specific first."""
    return (recipe for recipe in RECIPES if recipe.matches(row))


_SIZES = {
    "GPT-3 20B": {"layers": 44, "hidden": 6144, "heads": 48, "kv_heads": 48, "ffn": 24576, "vocab": 50257},
    "Mixtral-8x7B": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "moe_ffn": 14336, "num_experts": 8, "topk": 2,
        "vocab": 32000,
    },
    "Qwen2.5 7B": {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "ffn": 18944, "vocab": 152064},
}  # fmt: skip
"""Sizes of models that rows name without stating them."""

_CI = r"Megatron-LM .*tests/functional_tests"
_DISTRIBUTED = "distributed optimizer (zero-1)"
_MEGATRON = {"zero": _DISTRIBUTED, "sequence_parallel": True, "recompute": "none"}
_ALL_TO_ALL = {"dispatch": "all-to-all"}
"""Every expert of a token gets a copy: `moe_token_dispatcher_type` "alltoall", Megatron-Core's usual one until 2025."""
_USER_BUFFERS = {"hides_tp": True}
_NO_MODEL_PARALLELISM = {"tp": 1, "pp": 1, "cp": 1}
_MLPERF = r"training_results.*"
_MLPERF_LORA = f"{_MLPERF}llama2_70b_lora"
_MLPERF_8B = f"{_MLPERF}llama31_8b"
_LORA_CONF = (
    "NVIDIA/benchmarks/llama2_70b_lora, conf/megatron_gpt_peft_tuning_config.yaml of MLPerf Training v5.0: rank 16, "
    "alpha 32 on linear_qkv and linear_proj, micro batch 1, no recompute, FP8 on unless switched off, "
    "disable_parameter_transpose_cache, fp8_activation_input_store by FP8_ACTIVATION; train.py: adapters on "
    "linear_qkv and linear_proj with a dropout of 0.1 before them"
)
_V5P = "Google/benchmarks/gpt3/implementations/maxtext of MLPerf Training v4.0 and v4.1, v5p-{}.sh"
_FOUR_LAYERS = (4,) * 15 + (1,)
_DEEPSEEK_LAYOUT = "Et*4|(t*4|)*14tmL: stages of four layers, the last with one, the head and the further prediction"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs"
_FROM_26_06 = r"Megatron-Bridge \(26\.(0[6-9]|1)"
_FROM_26_06_01 = r"Megatron-Bridge \(26\.(06\.0|0[7-9]|1)"
_FUSED_EXPERTS = {"dispatch": "per-node", "hides_dispatch": True, "graphs": "full", "experts": "fused"}


def _v5p(name: str, gpus: int, version: str, shard: int, recompute: str) -> Recipe:
    dp = gpus // 8
    return Recipe(
        f"MaxText GPT-3 175B on v5p-{name}",
        f"{_V5P.format(name)}: ici_tensor_parallelism 8, {recompute}",
        origin=rf"training_results_{version}.*Google.*maxtext/gpt3",
        where={"n_gpus": gpus},
        fills={
            "framework": "MaxText", "tp": 8, "pp": 1, "cp": 1, "dp": dp, "zero": 3, "shard": shard, "precision": "int8",
            "recompute": recompute, "num_microbatches": 1,
        },
    )  # fmt: skip


RECIPES: tuple[Recipe, ...] = (
    # MLPerf Training.
    _v5p("1024", 512, "v4.0", 64, "full"),
    _v5p("2048", 1024, "v4.0", 16, "selective (save_dot_except_logits_ffn1)"),
    _v5p("3072", 1536, "v4.0", 16, "selective (save_dot_except_logits_ffn1)"),
    _v5p("12288", 6144, "v4.0", 48, "selective (save_dot_except_logits)"),
    _v5p("4096", 2048, "v4.1", 64, "selective (save_dot_except_mlpwi)"),
    _v5p("8192", 4096, "v4.1", 32, "selective (minimal)"),
    _v5p("12288", 6144, "v4.1", 48, "selective (minimal)"),
    Recipe(
        "MLPerf LoRA on 8 H200",
        "config_*H200*_1x8x2xtp1pp1cp2.sh of Dell and Cisco, MLPerf Training v5.0 and v5.1",
        origin=_MLPERF_LORA,
        gpu="H200-SXM",
        where={"n_gpus": 8},
        fills={"tp": 1, "pp": 1, "cp": 2},
    ),
    Recipe(
        "MLPerf LoRA on 16 H200 of ASUSTeK",
        "ASUSTeK/benchmarks/llama2_70b_lora, config_ESC_N8_H200_n2.sh, MLPerf Training v5.0",
        origin=f"{_MLPERF}ASUSTeK.*llama2_70b_lora",
        where={"n_gpus": 16},
        fills={"tp": 2, "pp": 1, "cp": 1},
    ),
    Recipe(
        "MLPerf LoRA on 64 B200",
        "log of Oracle/results/8xBM.GPU.B200.8, MLPerf Training v5.0: tensor parallelism 1, context parallelism 8",
        origin=_MLPERF_LORA,
        gpu="B200-SXM",
        where={"n_gpus": 64},
        fills={"tp": 1, "pp": 1, "cp": 8},
    ),
    Recipe(
        "MLPerf LoRA on Instinct",
        "config_MI325X_1x8x1.sh of GigaComputing (v5.0) and MangoBoost (v5.1): TP, PP, CP and MBS 1, FP8",
        origin=_MLPERF_LORA,
        gpu="Instinct",
        fills={**_NO_MODEL_PARALLELISM, "precision": "fp8"},
    ),
    Recipe(
        "MLPerf LoRA on Blackwell, v5.1",
        "config_*.sh and config_*_fp4.sh of Dell, MLPerf Training v5.1: submissions ran in FP8 or in NVFP4",
        origin=r"training_results_v5\.1.*llama2_70b_lora",
        gpu="Blackwell",
        leaves_open=("precision",),
    ),
    Recipe("MLPerf LoRA in FP8", _LORA_CONF, origin=_MLPERF_LORA, gpu="H[12]00", fills={"precision": "fp8"}),
    Recipe(
        "MLPerf LoRA in FP8",
        _LORA_CONF,
        origin=r"training_results_v(4\.1|5\.0).*llama2_70b_lora",
        fills={"precision": "fp8"},
    ),
    Recipe(
        "MLPerf LoRA",
        _LORA_CONF,
        origin=_MLPERF_LORA,
        fills={
            **_MEGATRON,
            "framework": "NeMo (Megatron-Core)",
            "micro_batch": 1,
            "numbers": "copies=1,gates=8",
            "lora": "rank=16,alpha=32,targets=attention,shared=true",
            "dropout": "adapters",
        },
    ),
    Recipe(
        "MLPerf Llama-3.1-8B on Instinct",
        "AMD/benchmarks/llama31_8b, config_MI355X_1x8x1_8b.sh, MLPerf Training v5.1: TP, PP, CP 1, MBS 2, FP8",
        origin=_MLPERF_8B,
        gpu="Instinct",
        fills={**_NO_MODEL_PARALLELISM, "micro_batch": 2, "precision": "fp8"},
    ),
    Recipe(
        "MLPerf Llama-3.1-8B on 8 B300",
        "Dell, config_XE9780x8B300-SXM-270GB_1x8x2xtp1pp1cp1_8b.sh, MLPerf Training v5.1: TP, PP, CP 1, MBS 2; FP8 or "
        "NVFP4 by the file of precision sourced beside it",
        origin=_MLPERF_8B,
        gpu="B300",
        where={"n_gpus": 8},
        fills={**_NO_MODEL_PARALLELISM, "micro_batch": 2},
        leaves_open=("precision",),
    ),
    Recipe(
        "MLPerf Llama-3.1-8B on 64 H200",
        "HPE, config_XD670_8x8x1xtp1pp1cp2_8b.sh and config_common_fp8attn.sh, MLPerf Training v5.1",
        origin=_MLPERF_8B,
        gpu="H200",
        where={"n_gpus": 64},
        fills={"tp": 1, "pp": 1, "cp": 2, "micro_batch": 1, "precision": "fp8"},
    ),
    Recipe(
        "MLPerf GPT-3 175B of Oracle",
        "Oracle/benchmarks/gpt3, config_DGXH100_384x8x32x4x8_mbs2.sh and config_DGXH100_192x8x64x4x8_mbs2.sh, MLPerf "
        "Training v4.1: TP 4, PP 8, 4 interleaved stages, MBS 2, FP8",
        origin=f"{_MLPERF}Oracle.*gpt3",
        fills={"tp": 4, "pp": 8, "cp": 1, "vpp": 4, "micro_batch": 2, "precision": "fp8"},
    ),
    Recipe(
        "MLPerf pretraining with NeMo",
        "pretrain.py and conf/custom.yaml of NVIDIA/benchmarks/llama31_405b (v5.0) and gpt3 (v4.1): no recompute "
        "unless ACT_CKPT_GRANULARITY is set, distributed optimizer, sequence parallelism",
        origin=f"{_MLPERF}(llama31|gpt3)",
        fills={**_MEGATRON, "framework": "NeMo (Megatron-Core)"},
    ),
    Recipe(
        "MLPerf pretraining with user buffers",
        "config_*.sh of NVIDIA/benchmarks/llama31_405b and gpt3, MLPerf Training v4.1 and v5.0: TP_COMM_OVERLAP=True",
        origin=f"{_MLPERF}(llama31|gpt3)",
        gpu="NVIDIA|H[12]00|B[23]00",
        fills=_USER_BUFFERS,
    ),
    # NVIDIA DGX Cloud Benchmarking.
    Recipe(
        "DGXC MaxText from 64 nodes on",
        "NVIDIA/dgxc-benchmarking, maxtext/configure.sh: dcn_fsdp_parallelism 16 nodes of 8 devices",
        origin="dgxc-benchmarking.*maxtext",
        least_gpus=512,
        fills={"shard": 128},
    ),
    Recipe(
        "DGXC MaxText",
        "NVIDIA/dgxc-benchmarking, maxtext/configure.sh: FSDP, remat_policy save_qkv_proj",
        origin="dgxc-benchmarking.*maxtext",
        fills={"framework": "MaxText", "zero": 3, "recompute": "full (save_qkv_proj)"},
    ),
    Recipe(
        "DGXC PaxML 175B",
        "NVIDIA/dgxc-benchmarking, paxml/configure.sh and paxml_mod_configs.py: FSDP over 16 nodes of 8 devices, "
        "SAVE_QKV_OUT_PROJ",
        origin="dgxc-benchmarking.*paxml.*175b",
        fills={"framework": "PaxML (JAX)", "zero": 3, "shard": 128, "recompute": "full (SAVE_QKV_OUT_PROJ)"},
    ),
    Recipe(
        "DGXC PaxML 5B",
        "NVIDIA/dgxc-benchmarking, paxml/configure.sh and paxml_mod_configs.py: FSDP in a node of 8 devices, "
        "SAVE_DOT_ONLY",
        origin="dgxc-benchmarking.*paxml.*5b",
        fills={"framework": "PaxML (JAX)", "zero": 3, "shard": 8, "recompute": "selective (SAVE_DOT_ONLY)"},
    ),
    *(
        Recipe(
            f"DGXC DeepSeek-V3 in {pp} pipeline stages",
            "NVIDIA/dgxc-benchmarking, deepseek_v3/pretraining/launch.sh, and NVIDIA/NeMo, "
            "scripts/performance/llm/pretrain_deepseek_v3.py: 64 / pp layers a stage, one less in the first and two in "
            "the last; selective recompute of mla_up_proj or core_attn; tokens beyond capacity are dropped, by the "
            "dispatcher alltoall (MegatronTokenDropCallback), which moe_shared_expert_overlap goes with; one further "
            "token is predicted (README.md states 260 GFLOPs a token, which are 250 without)",
            origin="dgxc-benchmarking.*deepseek_v3",
            where={"pp": pp},
            fills={
                "stage_layers": (64 // pp - 1, *(64 // pp,) * (pp - 2), 64 // pp - 2),
                "etp": 1,
                "recompute": "selective",
                "dispatch": "all-to-all",
                "overlaps_shared": True,
                "mtp_layers": 1,
            },
        )
        for pp in (4, 8, 16)
    ),
    Recipe(
        "DGXC Nemotron-4-340B with NeMo 1",
        "NVIDIA/dgxc-benchmarking, nemotron/nemotron4-340b-synth.yaml: activations_checkpoint_granularity selective",
        origin=r"dgxc-benchmarking v(24|25\.0[1-4]).*nemotron",
        model="340B",
        fills={"recompute": "selective"},
    ),
    Recipe(
        "DGXC Llama-4 Maverick on H100",
        "NVIDIA/NeMo, scripts/performance/recommended_model_configs/model_configs_h100.csv: etp_size 4",
        origin="dgxc-benchmarking.*llama4",
        gpu="H100",
        fills={"etp": 4},
    ),
    Recipe(
        "DGXC with NeMo",
        "NVIDIA/dgxc-benchmarking, grok1_314b.yaml, nemotron4-15b-synth.yaml, gpt3_175b_hydra.yaml and "
        "pretrain_llama31.py: distributed optimizer, sequence parallelism, no activation checkpointing; NVIDIA/NeMo, "
        "nemo/collections/llm/gpt/model/deepseek.py: moe_token_dispatcher_type alltoall, as of its other mixtures",
        origin="dgxc-benchmarking",
        fills={**_MEGATRON, **_ALL_TO_ALL, "framework": "NeMo (Megatron-Core)"},
    ),
    Recipe(
        "DGXC with user buffers",
        "NVIDIA/dgxc-benchmarking, nemotron4-15b-synth.yaml and gpt3_175b_hydra.yaml: ub_tp_comm_overlap, which "
        "grok1_314b.yaml switches off; NVIDIA/NeMo, nemo/collections/llm/recipes/llama31_70b.py and llama31_405b.py: "
        "MegatronCommOverlapCallback with tp_comm_overlap",
        origin="dgxc-benchmarking(?!.*(maxtext|paxml|nemotronh))",
        where={"num_experts": None},
        fills=_USER_BUFFERS,
    ),
    # Papers and tests.
    Recipe(
        "Alpa by hand",
        "alpa-projects/alpa, benchmark/alpa/suite_manual_gpt.py: prefer_reduce_scatter, by which data-parallel devices "
        "share gradients and the optimizer's state",
        framework="Alpa manual",
        fills={"zero": 2},
    ),
    Recipe(
        "zero-bubble pipelines",
        "sail-sg/zero-bubble-pipeline-parallelism, examples/pretrain_zero_bubble.sh and pretrain_zbh1.sh: --fp16; "
        "attention_dropout and hidden_dropout have their default of 0.1 (megatron/arguments.py)",
        framework="zero-bubble",
        fills={"precision": "fp16", "dropout": "layers"},
    ),
    Recipe(
        "functional tests that offload activations",
        "NVIDIA/Megatron-LM, tests/functional_tests/test_cases/moe/gpt3_*_fine_grained_offloading/model_config.yaml: "
        "offload-modules expert_fc1 moe_act attn_norm mlp_norm qkv_linear core_attn attn_proj",
        origin=_CI,
        model="fine_grained_offloading",
        fills={"offload": True},
    ),
    Recipe(
        "functional tests with MLA and experts",
        "NVIDIA/Megatron-LM, tests/functional_tests/test_cases/moe/gpt3_*_tp2_pp2_ep4_etp1_*/model_config.yaml: 32 "
        "experts 1024 wide, kv-channels 128, attention and hidden dropout 0, recompute-modules layernorm mla_up_proj "
        "mlp moe_act, pipeline layout Et*3|(tt|)*6, 4 stages per device",
        origin=_CI,
        model="tp2_pp2_ep4_etp1",
        fills={
            "moe_ffn": 1024,
            "head_dim": 128,
            "dropout": "none",
            "vpp": 4,
            "recompute_modules": ("layernorm", "mla_up_proj", "mlp", "moe_act"),
        },
    ),
    Recipe(
        "functional tests of Megatron-Core",
        "NVIDIA/Megatron-LM, tests/functional_tests/test_cases/{bert,gpt}/*/model_config.yaml: attention-backend "
        "unfused in deterministic mode; attention_dropout and hidden_dropout have their default of 0.1 "
        "(megatron/training/arguments.py)",
        origin=_CI,
        model="^(bert|gpt3)",
        fills={"attention": "unfused", "dropout": "layers"},
    ),
    # NeMo and Megatron-Bridge.
    Recipe(
        "NeMo FSDP of the 405B on GB200",
        "NVIDIA/NeMo, model_configs_gb200.csv: use_mcore_fsdp, activation_offload_layers 95 of 126",
        origin="NeMo performance_summary",
        model="405B",
        gpu="GB200",
        where={"zero": 3},
        fills={"recompute": "offload", "framework": "NeMo (Megatron-Core)"},
    ),
    Recipe(
        "NeMo GPT-3 20B",
        "NVIDIA/NeMo, nemo/collections/llm/gpt/model/base.py, GPTConfig20B",
        model="GPT-?3.20B",
        fills=_SIZES["GPT-3 20B"],
    ),
    Recipe(
        "Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1, config.json", model="Mixtral.8x7B", fills=_SIZES["Mixtral-8x7B"]
    ),
    Recipe("Qwen2.5 7B", "Qwen/Qwen2.5-7B, config.json", model=r"Qwen2\.5.7B", fills=_SIZES["Qwen2.5 7B"]),
    Recipe(
        "NeMo performance summary",
        "NVIDIA/NeMo, scripts/performance/helpers.py (set_primary_perf_configs: sequence parallelism with tp), "
        "model_configs_*.csv (recompute_layers 0) and nemo/collections/llm/gpt/model/mixtral.py: "
        "moe_token_dispatcher_type alltoall",
        origin="NeMo performance_summary",
        fills={**_MEGATRON, **_ALL_TO_ALL, "framework": "NeMo (Megatron-Core)"},
    ),
    Recipe(
        "NeMo with user buffers",
        "NVIDIA/NeMo, nemo/collections/llm/recipes of dense models: MegatronCommOverlapCallback with tp_comm_overlap, "
        "which works where tp > 1 (scripts/performance/helpers.py)",
        origin="NeMo performance_summary",
        where={"num_experts": None},
        fills=_USER_BUFFERS,
    ),
    Recipe(
        "AutoModel LoRA",
        "NVIDIA-NeMo/Automodel, examples/llm_finetune/qwen/qwen2_5_7b_peft_benchmark.yaml: dim 16, alpha 32, all",
        origin="NeMo/Automodel",
        model=r"Qwen2\.5",
        fills={"lora": "rank=16,alpha=32,targets=all"},
    ),
    Recipe(
        "AutoModel mixtures of experts with recompute",
        "NVIDIA-NeMo/Automodel, examples/benchmark/configs/kimi_k2_te_deepep.yaml and nemotron_nano_v3_te_deepep.yaml: "
        "activation_checkpointing",
        origin="NeMo/Automodel",
        model="Kimi|Nemotron V3",
        fills={"recompute": "full"},
    ),
    Recipe(
        "AutoModel GPT-OSS",
        "NVIDIA-NeMo/Automodel, examples/benchmark/configs/gptoss_20b_te_deepep.yaml: no activation_checkpointing",
        origin="NeMo/Automodel",
        model="GPT-OSS",
        fills={"recompute": "none"},
    ),
    Recipe(
        "AutoModel",
        "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx: PyTorch FSDP2",
        origin="NeMo/Automodel",
        fills={"framework": "AutoModel (PyTorch)"},
    ),
    Recipe(
        "Megatron-Bridge mixtures in MXFP8 on racks from 26.06",
        "NVIDIA-NeMo/Megatron-Bridge, pull requests 3983 (DeepSeek-V3 on GB300) and 4249 (Qwen3), and "
        "gpt_oss_workload_base_configs.py: cuda_graph_impl full_iteration, moe_a2a_overlap, hybridep, "
        "cutedsl_fused_grouped_mlp",
        framework=_FROM_26_06,
        model="DeepSeek-?V3|GPT-OSS-120B|Qwen3-(30|235)B",
        gpu="GB[23]00",
        precision="MX",
        fills=_FUSED_EXPERTS,
    ),
    Recipe(
        "Megatron-Bridge mixtures in MXFP8 on B200 and B300 from 26.06.01",
        "NVIDIA-NeMo/Megatron-Bridge, release v0.5.1 with pull requests 4458 (DeepSeek-V3 on B300) and 4606 (Qwen3): "
        "cuda_graph_impl full_iteration, moe_a2a_overlap, hybridep, cutedsl_fused_grouped_mlp; Qwen3-30B on B200 went "
        "back, for lack of memory (5356)",
        framework=_FROM_26_06_01,
        model="DeepSeek-?V3|Qwen3-235B|Qwen3-30B",
        gpu="(?<!G)B300",
        precision="MX",
        fills=_FUSED_EXPERTS,
    ),
    Recipe(
        "Megatron-Bridge mixtures in MXFP8 on B200 and B300 from 26.06.01",
        "NVIDIA-NeMo/Megatron-Bridge, release v0.5.1 with pull request 4606: Qwen3-235B on B200 as on B300",
        framework=_FROM_26_06_01,
        model="Qwen3-235B",
        gpu="(?<!G)B200",
        precision="MX",
        fills=_FUSED_EXPERTS,
    ),
    Recipe(
        "Megatron-Bridge DeepSeek-V3 on B200 over four nodes",
        f"{_BRIDGE}/deepseek/deepseek_workload_base_configs.py: moe_flex_dispatcher_backend deepep, moe_a2a_overlap",
        framework="Megatron-Bridge",
        model="DeepSeek-?V3",
        where={"pp": 8, "ep": 32},
        fills={"dispatch": "per-node", "hides_dispatch": True, "graphs": "partial"},
    ),
    Recipe(
        "Megatron-Bridge Qwen3-235B on H100",
        f"{_BRIDGE}/qwen/qwen3_workload_base_configs.py: moe_token_dispatcher_type alltoall, moe_a2a_overlap",
        framework="Megatron-Bridge",
        model="Qwen3-235B",
        gpu="H100",
        fills={**_ALL_TO_ALL, "hides_dispatch": True},
    ),
    Recipe(
        "Megatron-Bridge Qwen3-235B on B200 and B300",
        f"{_BRIDGE}/qwen/qwen3_workload_base_configs.py: moe_token_dispatcher_type alltoall",
        framework="Megatron-Bridge",
        model="Qwen3-235B",
        gpu="(?<!G)B[23]00",
        fills=_ALL_TO_ALL,
    ),
    Recipe(
        "Megatron-Bridge Nemotron 3 Nano on H100 in FP8 before 26.07",
        f"{_BRIDGE}/nemotronh/nemotron_3_workload_base_configs.py before pull request 4628: recompute_modules moe, "
        "layernorm, core_attn and moe_act",
        framework=r"Megatron-Bridge \((25|26\.0[0-6])",
        model="Nemotron.3.Nano",
        gpu="H100",
        precision="FP8",
        where={"n_gpus": 16},
        fills={"recompute": "selective", "recompute_modules": ("moe", "layernorm", "core_attn", "moe_act")},
    ),
    Recipe(
        "Megatron-Bridge Nemotron 3 Nano",
        f"{_BRIDGE}/nemotronh/nemotron_3_workload_base_configs.py: hybridep; cuda_graph_scope attn, mamba, moe_router "
        "and moe_preprocess",
        framework="Megatron-Bridge",
        model="Nemotron.3.Nano",
        fills={"dispatch": "per-node", "graphs": "partial"},
    ),
    Recipe(
        "Megatron-Bridge GPT-OSS 120B on B300 with 1,280 sequences from 26.06",
        f"{_BRIDGE}/gpt_oss/gpt_oss_workload_base_configs.py: hybridep",
        framework=_FROM_26_06,
        model="GPT-OSS-120B",
        gpu="(?<!G)B300",
        where={"global_batch": 1280},
        fills={"dispatch": "per-node"},
    ),
    Recipe(
        "Megatron-Bridge GPT-OSS 120B on B300 and GB300",
        f"{_BRIDGE}/gpt_oss/gpt_oss_workload_base_configs.py: cuda_graph_scope attn, moe_router and moe_preprocess",
        framework="Megatron-Bridge",
        model="GPT-OSS-120B",
        gpu="B300",
        fills={"graphs": "partial"},
    ),
    Recipe(
        "Megatron-Bridge MoE on racks",
        f"{_BRIDGE}, *_workload_base_configs.py: hybridep; cuda_graph_scope attn, moe_router and moe_preprocess",
        framework="Megatron-Bridge",
        model="DeepSeek-?V3|Qwen3-(30|235)B|Kimi",
        gpu="GB[23]00",
        fills={"dispatch": "per-node", "graphs": "partial"},
    ),
    Recipe(
        "Megatron-Bridge DeepSeek-V3 and Qwen3-30B",
        f"{_BRIDGE}, *_workload_base_configs.py: moe_flex_dispatcher_backend hybridep",
        framework="Megatron-Bridge",
        model="DeepSeek-?V3|Qwen3-30B",
        fills={"dispatch": "per-node"},
    ),
    *(
        Recipe(
            f"Megatron-Bridge DeepSeek-V3 in {pp} x {vpp or 1} stages",
            "NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/recipes/deepseek/deepseek_v3.py (layout_map) and "
            f"{_BRIDGE}/deepseek/deepseek_workload_base_configs.py: {_DEEPSEEK_LAYOUT}, or longer stages alike",
            framework="Megatron-Bridge",
            model="DeepSeek-?V3",
            where={"pp": pp, "vpp": vpp},
            fills={"stage_layers": stages},
        )
        for pp, vpp, stages in (
            *((pp, vpp, _FOUR_LAYERS) for pp, vpp in ((2, 8), (4, 4), (8, 2), (16, None), (16, 1))),
            *((pp, vpp, (8,) * 7 + (5,)) for pp, vpp in ((4, 2), (8, None), (8, 1))),
            (8, 4, (1, *(2,) * 30, 0)),
        )
    ),
    Recipe(
        "Megatron-Bridge DeepSeek-V3 predicts one further token",
        "NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/recipes/deepseek/deepseek_v3.py: mtp_num_layers 1",
        framework="Megatron-Bridge",
        model="DeepSeek-?V3",
        fills={"mtp_layers": 1},
    ),
    Recipe(
        "Megatron-Bridge DeepSeek-V3 on GB300 in MXFP8 from 26.06",
        "NVIDIA-NeMo/Megatron-Bridge, pull request 3983: recompute disabled",
        framework=_FROM_26_06,
        model="DeepSeek-?V3",
        gpu="GB300",
        precision="MX",
        fills={"recompute": "none"},
    ),
    Recipe(
        "Megatron-Bridge DeepSeek-V3 on H100",
        f"{_BRIDGE}/deepseek/deepseek_workload_base_configs.py: recompute_modules mla_up_proj and mlp",
        framework="Megatron-Bridge",
        model="DeepSeek-?V3",
        gpu="H100",
        fills={"recompute": "selective", "recompute_modules": ("mla_up_proj", "mlp")},
    ),
    Recipe(
        "Megatron-Bridge DeepSeek-V3",
        f"{_BRIDGE}/deepseek/deepseek_workload_base_configs.py: recompute_modules mla_up_proj, mlp or moe_act",
        framework="Megatron-Bridge",
        model="DeepSeek-?V3",
        fills={"recompute": "selective"},
    ),
    Recipe(
        "Megatron-Bridge GPT-OSS 120B",
        f"{_BRIDGE}/gpt_oss/gpt_oss_workload_base_configs.py: recompute_modules layernorm and moe_act",
        framework="Megatron-Bridge",
        model="GPT-OSS-120B",
        gpu=r"(?<![GB])B200|GB200|H100",
        precision="BF16|FP8$",
        fills={"recompute": "selective", "recompute_modules": ("layernorm", "moe_act")},
    ),
    Recipe(
        "Megatron-Bridge Llama 3 8B on H100 in FP8",
        f"{_BRIDGE}/llama/llama3_workload_base_configs.py: recompute_num_layers 5",
        framework="Megatron-Bridge",
        model="Llama.?3.8B",
        gpu="H100",
        precision="FP8",
        fills={"recompute": "full", "recompute_layers": 5},
    ),
    Recipe(
        "Megatron-Bridge LoRA",
        "NVIDIA/NeMo, nemo/collections/llm/recipes/llama31_405b.py: rank 16, alpha 32 on linear_qkv",
        framework="Megatron-Bridge.*lora",
        fills={"lora": "rank=16,alpha=32,targets=q:k:v"},
    ),
    Recipe(
        "Megatron-Bridge with user buffers",
        f"{_BRIDGE}: CommOverlapConfig(tp_comm_overlap=True) of dense models",
        framework="Megatron-Bridge",
        where={"num_experts": None},
        fills=_USER_BUFFERS,
    ),
    Recipe(
        "Megatron-Bridge",
        f"{_BRIDGE}: no recompute where a configuration names none; NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/"
        "models: moe_token_dispatcher_type alltoall where a configuration names no backend",
        framework="Megatron-Bridge",
        fills={**_MEGATRON, **_ALL_TO_ALL},
    ),
    # Megatron-LM.
    *(
        Recipe(
            f"Megatron-LM MoE recipe, DeepSeek-V3 on {gpu}",
            f"NVIDIA/Megatron-LM, examples/moe_recipes/deepseek_v3: {_DEEPSEEK_LAYOUT}, mtp_num_layers 1, "
            f"recompute {recompute}",
            origin="moe_recipes/deepseek_v3",
            gpu=f"^{gpu}",
            where={"pp": pp},
            fills={"vpp": 16 // pp, "stage_layers": _FOUR_LAYERS, "mtp_layers": 1, "recompute": recompute},
        )
        for gpu, pp, recompute in (("B200", 8, "selective"), ("GB200", 4, "selective"), ("GB300", 4, "none"))
    ),
    Recipe(
        "Megatron-LM MoE recipe",
        "NVIDIA/Megatron-LM, examples/moe_recipes: use_distributed_optimizer, sequence_parallel, no recompute, "
        "moe_token_dispatcher_type flex",
        origin="examples/moe_recipes",
        fills={**_MEGATRON, "framework": "Megatron-Core (dev)", "dispatch": "per-node"},
    ),
    Recipe(
        "SimuMax DeepSeek-V3",
        "MooreThreads/SimuMax, scripts/run_pretrain_deepseekv2.sh: one dense layer, capacity factor 1",
        origin="SimuMax",
        model="DeepSeek-V3",
        fills={"dense_layers": 1},
    ),
    # Others.
    Recipe(
        "LiBai on OneFlow's V100",
        "Oneflow-Inc/DLPerf, README.md: the organisation's four nodes of 8 V100 have 100 Gb/s InfiniBand EDR",
        origin="Oneflow-Inc/libai",
        fills={"inter": "1x100Gb/s InfiniBand EDR"},
    ),
    Recipe(
        "PaxML without Transformer Engine",
        "NVIDIA/JAX-Toolbox, rosetta/projects/pax/README.md: rows without TE run XLA's attention, which is not fused",
        origin="JAX-Toolbox",
        precision="^bf16$",
        fills={"attention": "unfused"},
    ),
    Recipe(
        "Mist's Megatron-LM",
        "Dazz993/Mist, benchmark/megatron/scripts/base_sweap.sh and benchmark_gpt_bert_one_case.py: full recompute of "
        "every layer, distributed optimizer",
        origin="Dazz993/Mist",
        framework="Megatron-LM",
        fills={"zero": _DISTRIBUTED, "recompute": "full"},
    ),
    Recipe(
        "PaxML GPT-3",
        "google/paxml, paxml/contrib/gpu/scripts_gpu/configs.py: VOCAB_SIZE 50304 of GPT126M, which GPT5B inherits",
        origin="JAX-Toolbox",
        model="GPT-3",
        fills={"vocab": 50304},
    ),
    Recipe(
        "torchtitan",
        "pytorch/torchtitan, job configuration: activation_checkpoint.mode selective and microbatches of one sequence "
        "in pipelines unless set",
        framework="torchtitan",
        fills={"recompute": "selective"},
    ),
)
"""Recipes, the most specific first."""

"""Names that the frameworks document and the exports use, and where they were looked up.

A test holds every file that is written against these tables.
"""

from collections.abc import Mapping

from autopar.context_parallelism import ContextKind

MEGATRON_SOURCE = "Megatron-LM core_v0.19.2 (megatron/training/arguments.py, in the wheel of megatron-core 0.19.2)"
MEGATRON: Mapping[str, str] = {
    "--tensor-model-parallel-size": "whole",
    "--pipeline-model-parallel-size": "whole",
    "--context-parallel-size": "whole",
    "--cp-comm-type": "text",
    "--hierarchical-context-parallel-sizes": "text",
    "--expert-model-parallel-size": "whole",
    "--num-virtual-stages-per-pipeline-rank": "whole",
    "--num-layers-per-virtual-pipeline-stage": "whole",
    "--pipeline-model-parallel-layout": "text",
    "--decoder-first-pipeline-num-layers": "whole",
    "--decoder-last-pipeline-num-layers": "whole",
    "--sequence-parallel": "flag",
    "--use-distributed-optimizer": "flag",
    "--use-megatron-fsdp": "flag",
    "--data-parallel-sharding-strategy": "text",
    "--ckpt-format": "text",
    "--no-gradient-accumulation-fusion": "flag",
    "--recompute-activations": "flag",
    "--recompute-granularity": "text",
    "--recompute-method": "text",
    "--recompute-num-layers": "whole",
    "--cpu-offloading-num-layers": "whole",
    "--optimizer-cpu-offload": "flag",
    "--optimizer-offload-fraction": "text",
    "--overlap-cpu-optimizer-d2h-h2d": "flag",
    "--use-precision-aware-optimizer": "flag",
    "--num-distributed-optimizer-instances": "whole",
    "--overlap-grad-reduce": "flag",
    "--overlap-param-gather": "flag",
    "--overlap-moe-expert-parallel-comm": "flag",
    "--use-tp-pp-dp-mapping": "flag",
    "--ddp-bucket-size": "whole",
    "--ddp-num-buckets": "whole",
    "--tp-comm-overlap": "flag",
    "--attention-backend": "text",
    "--cross-entropy-loss-fusion": "flag",
    "--cross-entropy-fusion-impl": "text",
    "--cuda-graph-impl": "text",
    "--cuda-graph-modules": "text",
    "--no-check-for-nan-in-loss-and-grad": "flag",
    "--recompute-modules": "text",
    "--micro-batch-size": "whole",
    "--global-batch-size": "whole",
    "--num-layers": "whole",
    "--hidden-size": "whole",
    "--ffn-hidden-size": "whole",
    "--num-attention-heads": "whole",
    "--group-query-attention": "flag",
    "--num-query-groups": "whole",
    "--seq-length": "whole",
    "--max-position-embeddings": "whole",
    "--kv-channels": "whole",
    "--vocab-size": "whole",
    "--make-vocab-size-divisible-by": "whole",
    "--hidden-dropout": "text",
    "--attention-dropout": "text",
    "--no-create-attention-mask-in-dataloader": "flag",
    "--num-experts": "whole",
    "--moe-router-topk": "whole",
    "--moe-ffn-hidden-size": "whole",
    "--moe-grouped-gemm": "flag",
    "--moe-token-dispatcher-type": "text",
    "--moe-flex-dispatcher-backend": "text",
    "--moe-expert-capacity-factor": "text",
    "--moe-pad-expert-input-to-capacity": "flag",
    "--moe-token-drop-policy": "text",
    "--swiglu": "flag",
    "--normalization": "text",
    "--position-embedding-type": "text",
    "--rotary-base": "whole",
    "--disable-bias-linear": "flag",
    "--untie-embeddings-and-output-weights": "flag",
    "--bf16": "flag",
    "--fp8-format": "text",
    "--fp8-recipe": "text",
    "--fp8-param-gather": "flag",
    "--fp4-format": "text",
    "--fp4-recipe": "text",
    "--grad-reduce-in-bf16": "flag",
    "--exp-avg-dtype": "text",
    "--exp-avg-sq-dtype": "text",
    "--fp16": "flag",
}
"""Arguments, and what follows each: nothing ("flag"), a whole number or text."""

MEGATRON_RECIPES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "fp8": (("--fp8-format", "hybrid"), ("--fp8-recipe", "delayed")),
    "fp8-current": (("--fp8-format", "hybrid"), ("--fp8-recipe", "tensorwise")),
    "fp8-block": (("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise")),
    "mxfp8": (("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")),
    "nvfp4": (("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4")),
}
"""Arguments of Megatron-LM for formats of `autopar.cost.formats`."""

TORCHTITAN_SOURCE = "torchtitan 0.3.0 (torchtitan/trainer.py and torchtitan/config/configs.py), read 2026-11-28"
TORCHTITAN: Mapping[str, frozenset[str]] = {
    "training": frozenset(
        {"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "disable_cuda_graphs"}
    ),
    "parallelism": frozenset(
        {
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "fsdp_reshard_after_forward",
            "tensor_parallel_degree",
            "enable_sequence_parallel",
            "pipeline_parallel_degree",
            "module_fqns_per_model_part",
            "pipeline_parallel_schedule",
            "pipeline_parallel_microbatch_size",
            "context_parallel_degree",
            "context_parallel_rotate_method",
            "expert_parallel_degree",
        }
    ),
    "activation_checkpoint": frozenset(),
    "compile": frozenset({"enable", "enable_async_tensor_parallel"}),
    "model_spec": frozenset(),
}
"""Fields of each section; none of those that are one value."""
ROTATE_METHODS: Mapping[ContextKind, str] = {"ring": "alltoall", "gather": "allgather"}
"""Values of context_parallel_rotate_method by kind of context parallelism; allgather is the default."""
TORCHTITAN_SCHEDULES: Mapping[str, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Schedules of torch.distributed.pipelining (PyTorch 2.13, schedules.py) by our names."""

DEEPSPEED_SOURCE = "DeepSpeed 0.19.8 (deepspeed/runtime/config.py), read 2026-11-28"
DEEPSPEED: Mapping[str, frozenset[str]] = {
    "train_batch_size": frozenset(),
    "train_micro_batch_size_per_gpu": frozenset(),
    "gradient_accumulation_steps": frozenset(),
    "zero_optimization": frozenset(
        {"stage", "overlap_comm", "reduce_bucket_size", "offload_optimizer", "offload_param", "mics_shard_size"}
    ),
    "bf16": frozenset({"enabled"}),
    "fp16": frozenset({"enabled"}),
    "data_types": frozenset({"grad_accum_dtype"}),
    "communication_data_type": frozenset(),
    "tensor_parallel": frozenset({"autotp_size"}),
}
"""Keys, and those inside each that is an object."""

NEMO_SOURCE = "Megatron-Bridge 0.6.2 (megatron/bridge/training/config.py), which took the place of NeMo's recipes"
ACCELERATE_SOURCE = "accelerate 1.15.0 (accelerate/commands/config/config_args.py and launch.py)"
TRAINER_SOURCE = "transformers 5.24 (TrainingArguments)"
MAXTEXT_SOURCE = "MaxText 0.2.5 (maxtext/configs/base.yml and types.py)"

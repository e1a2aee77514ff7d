"""Names that the frameworks document and the exports use, and where they were looked up.

A test holds every file that is written against these tables.
"""

from collections.abc import Mapping

from autopar.plan import ContextKind

MEGATRON_SOURCE = "NVIDIA/Megatron-LM megatron/training/arguments.py and docs/user-guide, read 2026-11-22"
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
    "--use-precision-aware-optimizer": "flag",
    "--num-distributed-optimizer-instances": "whole",
    "--overlap-grad-reduce": "flag",
    "--overlap-param-gather": "flag",
    "--overlap-moe-expert-parallel-comm": "flag",
    "--use-tp-pp-dp-mapping": "flag",
    "--ddp-bucket-size": "whole",
    "--tp-comm-overlap": "flag",
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

TORCHTITAN_SOURCE = "pytorch/torchtitan v0.2.0, torchtitan/config/job_config.py, read 2026-11-22"
TORCHTITAN: Mapping[str, frozenset[str]] = {
    "training": frozenset({"local_batch_size", "global_batch_size", "seq_len"}),
    "parallelism": frozenset(
        {
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "fsdp_reshard_after_forward",
            "tensor_parallel_degree",
            "enable_async_tensor_parallel",
            "pipeline_parallel_degree",
            "module_fqns_per_model_part",
            "pipeline_parallel_schedule",
            "pipeline_parallel_microbatch_size",
            "context_parallel_degree",
            "context_parallel_rotate_method",
            "expert_parallel_degree",
        }
    ),
    "activation_checkpoint": frozenset({"mode", "selective_ac_option"}),
    "compile": frozenset({"enable"}),
    "model": frozenset({"converters"}),
    "quantize.linear.float8": frozenset({"enable_fsdp_float8_all_gather", "recipe_name"}),
    "quantize.linear.mx": frozenset({"recipe_name"}),
}
"""Fields of each section."""
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

DEEPSPEED_SOURCE = "deepspeed.ai/docs/config-json and deepspeed.ai/tutorials/autotp-training, read 2026-11-22"
DEEPSPEED: Mapping[str, frozenset[str]] = {
    "train_batch_size": frozenset(),
    "train_micro_batch_size_per_gpu": frozenset(),
    "gradient_accumulation_steps": frozenset(),
    "zero_optimization": frozenset({"stage", "overlap_comm", "reduce_bucket_size", "offload_optimizer"}),
    "bf16": frozenset({"enabled"}),
    "fp16": frozenset({"enabled"}),
    "tensor_parallel": frozenset({"autotp_size"}),
}
"""Keys, and those inside each that is an object."""

NEMO_SOURCE = "NVIDIA/NeMo 2.x recipes (nemo.collections.llm.recipes) and MegatronStrategy, read 2026-11-22"
NEMO: frozenset[str] = frozenset(
    {
        "trainer.num_nodes",
        "trainer.strategy.use_tp_pp_dp_mapping",
        "trainer.devices",
        "trainer.strategy.tensor_model_parallel_size",
        "trainer.strategy.pipeline_model_parallel_size",
        "trainer.strategy.virtual_pipeline_model_parallel_size",
        "trainer.strategy.context_parallel_size",
        "trainer.strategy.expert_model_parallel_size",
        "trainer.strategy.sequence_parallel",
        "trainer.strategy.ddp.use_distributed_optimizer",
        "trainer.strategy.ddp.bucket_size",
        "data.micro_batch_size",
        "data.global_batch_size",
        "data.seq_length",
        "model.config.num_layers_in_first_pipeline_stage",
        "model.config.num_layers_in_last_pipeline_stage",
        "model.config.recompute_granularity",
        "model.config.recompute_method",
        "model.config.recompute_num_layers",
        "model.config.cpu_offloading",
        "model.config.cpu_offloading_num_layers",
        "model.config.cpu_offloading_activations",
        "model.config.cpu_offloading_weights",
        "optim.config.optimizer_cpu_offload",
    }
)
"""Fields of a recipe."""

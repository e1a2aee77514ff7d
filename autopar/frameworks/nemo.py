"""NeMo: a plan as a Python function that sets the fields of a recipe of Megatron-Bridge.

Megatron-Bridge trains with Megatron-Core, so that the fields are the arguments of Megatron-LM by other names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost import load_policy
from autopar.frameworks.assumptions import taken_for_granted
from autopar.frameworks.facts import Facts
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import NEMO_SOURCE
from autopar.frameworks.megatron import arguments_of, environment
from autopar.frameworks.python_file import Expression, apply_function
from autopar.plan import Exported


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model that Megatron-Bridge has a recipe of.

    Attributes:
        module: Module below `megatron.bridge.recipes`.
        function: The function that returns its configuration.
    """

    module: str
    function: str


RECIPES: Mapping[str, Recipe] = {
    "llama3-8b": Recipe("llama.llama3", "llama3_8b_pretrain_config"),
    "llama3-70b": Recipe("llama.llama3", "llama3_70b_pretrain_config"),
    "llama3-405b": Recipe("llama.llama3", "llama31_405b_pretrain_config"),
    "qwen3-30b-a3b": Recipe("qwen.qwen3_moe", "qwen3_30b_a3b_pretrain_config"),
    "qwen3-235b-a22b": Recipe("qwen.qwen3_moe", "qwen3_235b_a22b_pretrain_config"),
    "deepseek-v3": Recipe("deepseek.deepseek_v3", "deepseek_v3_pretrain_config"),
}
"""Recipes of `NEMO_SOURCE` by our names of models."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "--tensor-model-parallel-size": ("model.tensor_model_parallel_size",),
    "--pipeline-model-parallel-size": ("model.pipeline_model_parallel_size",),
    "--context-parallel-size": ("model.context_parallel_size",),
    "--expert-model-parallel-size": ("model.expert_model_parallel_size",),
    "--expert-tensor-parallel-size": ("model.expert_tensor_parallel_size",),
    "--num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size",),
    "--pipeline-model-parallel-layout": ("model.pipeline_model_parallel_layout",),
    "--sequence-parallel": ("model.sequence_parallel",),
    "--use-distributed-optimizer": ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "--use-megatron-fsdp": ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp"),
    "--data-parallel-sharding-strategy": ("ddp.data_parallel_sharding_strategy",),
    "--num-distributed-optimizer-instances": (
        "ddp.num_distributed_optimizer_instances",
        "dist.num_distributed_optimizer_instances",
    ),
    "--ckpt-format": ("checkpoint.ckpt_format",),
    "--overlap-grad-reduce": ("ddp.overlap_grad_reduce",),
    "--overlap-param-gather": ("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    "--ddp-bucket-size": ("ddp.bucket_size",),
    "--grad-reduce-in-bf16": (),
    "--tp-comm-overlap": ("model.tp_comm_overlap",),
    "--cp-comm-type": ("model.cp_comm_type",),
    "--hierarchical-context-parallel-sizes": ("model.hierarchical_context_parallel_sizes",),
    "--use-tp-pp-dp-mapping": ("dist.use_tp_pp_dp_mapping",),
    "--moe-token-dispatcher-type": ("model.moe_token_dispatcher_type",),
    "--moe-flex-dispatcher-backend": ("model.moe_flex_dispatcher_backend",),
    "--overlap-moe-expert-parallel-comm": ("model.overlap_moe_expert_parallel_comm",),
    "--moe-shared-expert-overlap": ("model.moe_shared_expert_overlap",),
    "--moe-grouped-gemm": ("model.moe_grouped_gemm",),
    "--moe-expert-capacity-factor": ("model.moe_expert_capacity_factor",),
    "--moe-pad-expert-input-to-capacity": ("model.moe_pad_expert_input_to_capacity",),
    "--moe-token-drop-policy": ("model.moe_token_drop_policy",),
    "--cross-entropy-loss-fusion": ("model.cross_entropy_loss_fusion",),
    "--cross-entropy-fusion-impl": ("model.cross_entropy_fusion_impl",),
    "--cuda-graph-impl": ("model.cuda_graph_impl",),
    "--cuda-graph-modules": ("model.cuda_graph_modules",),
    "--recompute-granularity": ("model.recompute_granularity",),
    "--recompute-method": ("model.recompute_method",),
    "--recompute-num-layers": ("model.recompute_num_layers",),
    "--recompute-modules": ("model.recompute_modules",),
    "--cpu-offloading-num-layers": ("model.cpu_offloading_num_layers",),
    "--optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload",),
    "--optimizer-offload-fraction": ("optimizer.optimizer_offload_fraction",),
    "--overlap-cpu-optimizer-d2h-h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d",),
    "--use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer",),
    "--micro-batch-size": ("train.micro_batch_size",),
    "--global-batch-size": ("train.global_batch_size",),
    "--fp8-param-gather": ("mixed_precision.fp8_param_gather",),
    "--seq-length": ("model.seq_length", "dataset.seq_length"),
    "--make-vocab-size-divisible-by": ("model.make_vocab_size_divisible_by",),
}
"""Fields of a `ConfigContainer` that an argument of Megatron-LM stands for."""
_UNTOLD: Mapping[str, object] = {
    "comm_overlap": None,  # its defaults would replace the overlap that is set here
    "model.context_parallel_size": 1,
    "model.cpu_offloading": False,
    "model.expert_model_parallel_size": 1,
    "model.expert_tensor_parallel_size": None,
    "model.moe_shared_expert_overlap": False,
    "model.overlap_moe_expert_parallel_comm": False,
    "model.pipeline_model_parallel_layout": None,
    "model.recompute_granularity": None,
    "model.recompute_method": None,
    "model.recompute_modules": None,
    "model.recompute_num_layers": None,
    "model.sequence_parallel": False,
    "model.tp_comm_overlap": False,
    "model.virtual_pipeline_model_parallel_size": None,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "ddp.num_distributed_optimizer_instances": 1,
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
    "ddp.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False,
    "dist.use_megatron_fsdp": False,
    "optimizer.optimizer_cpu_offload": False,
    "optimizer.overlap_param_gather": False,
    "optimizer.use_distributed_optimizer": False,
    "optimizer.use_precision_aware_optimizer": False,
}
"""Fields that a recipe sets to values of its own, where the plan has no such argument."""
OPPOSITE: Mapping[str, tuple[str, ...]] = {
    "--no-gradient-accumulation-fusion": ("model.gradient_accumulation_fusion",),
    "--no-check-for-nan-in-loss-and-grad": (
        "ddp.check_for_nan_in_grad",
        "rerun_state_machine.check_for_nan_in_loss",
    ),
    "--no-create-attention-mask-in-dataloader": (),
}
"""Fields that an argument sets to false."""
_TORCH: Mapping[str, str] = {"--exp-avg-dtype": "exp_avg_dtype", "--exp-avg-sq-dtype": "exp_avg_sq_dtype"}
"""Fields of the optimizer that are types of torch."""
_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "uint8"}
_BACKEND = "--attention-backend"
_PRECISIONS: Mapping[str, str] = {
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8-current": "bf16_with_fp8_current_scaling_mixed",
    "fp8-block": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""Precision recipes by formats of `autopar.cost.formats`."""
OF_MODEL = frozenset(
    {
        "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention",
        "--num-query-groups", "--kv-channels", "--max-position-embeddings", "--vocab-size", "--hidden-dropout",
        "--attention-dropout", "--swiglu", "--normalization", "--position-embedding-type", "--rotary-base",
        "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--num-experts", "--moe-router-topk",
        "--moe-ffn-hidden-size",
    }
)  # fmt: skip
"""Arguments that are left to the model of a recipe, as are those of `autopar.frameworks.megatron_layers`."""


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a Python file whose function sets the fields of a recipe of Megatron-Bridge.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.
    """
    lost = list(facts.lost)
    arguments = arguments_of(facts, lost, "nemo")
    imports: list[str] = []
    fields = {**_precision(facts, imports), **_UNTOLD, **_fields(arguments, imports)}
    recipe = _recipe(facts)
    if recipe is None:
        lost.append("the model: Megatron-Bridge has no recipe of it that is known here; give one to apply()")
    else:
        imports.append(f"from megatron.bridge.recipes.{recipe.module} import {recipe.function}")
    granted = taken_for_granted(facts, "nemo")
    remarks = Remarks(lost, granted, f"Fields are those of {NEMO_SOURCE}.", outcome, environment(facts))
    text = header(facts.plan, "Recipe for Megatron-Bridge (NeMo)", remarks)
    text += "\n" + "".join(f"{line}\n" for line in sorted(imports)) + ("\n\n" if imports else "")
    text += apply_function(fields, "Set what the plan decides on a ConfigContainer, and return it.")
    if recipe is not None:
        text += f'\n\ndef planned():\n    """Return the configuration."""\n    return apply({recipe.function}())\n'
    return Exported("nemo_recipe.py", text.encode(), tuple(lost), granted, outcome)


def _recipe(facts: Facts) -> Recipe | None:
    """Return the recipe of the model, None if there is none or other sizes than the sequence are set."""
    changed = {name for name, _ in facts.plan.model.dims} - {"seq", "mtp"}
    return None if changed else RECIPES.get(facts.plan.model.name)


def _precision(facts: Facts, imports: list[str]) -> dict[str, object]:
    policy = load_policy(facts.plan.job.precision)
    if not policy.half:
        return {"mixed_precision": None}
    name = "" if policy.format is None else _PRECISIONS.get(policy.format.name, "")
    imports.append("from megatron.bridge.training.mixed_precision import get_mixed_precision_config")
    return {"mixed_precision": Expression(f"get_mixed_precision_config({name or f'{policy.half}_mixed'!r})")}


def _fields(arguments: Mapping[str, object], imports: list[str]) -> dict[str, object]:
    """Return fields of a recipe; sizes and kinds of layers are those of the recipe's model."""
    found: dict[str, object] = {}
    for name, value in arguments.items():
        for field in FIELDS.get(name, ()):
            found[field] = list(value) if isinstance(value, tuple) else value
        for field in OPPOSITE.get(name, ()):
            found[field] = False
        if name == "--cpu-offloading-num-layers":
            found |= {
                "model.cpu_offloading": True,
                "model.cpu_offloading_activations": True,
                "model.cpu_offloading_weights": False,
            }
        elif name == "--grad-reduce-in-bf16":
            found["ddp.grad_reduce_in_fp32"] = False
        elif name in _TORCH:
            imports.append("import torch")
            found[f"optimizer.{_TORCH[name]}"] = Expression(f"torch.{_DTYPES[str(value)]}")
        elif name == _BACKEND:
            imports.append("from megatron.core.transformer.enums import AttnBackend")
            found["model.attention_backend"] = Expression(f"AttnBackend.{value}")
        elif name == "--mtp-num-layers":
            found["model.mtp_num_layers"] = value
    imports[:] = list(dict.fromkeys(imports))
    return found

"""MaxText: a plan as a YAML configuration that goes on top of its base.yml."""

from collections.abc import Mapping

import yaml

from autopar.cluster import cluster_from_dict
from autopar.cost import load_policy
from autopar.errors import ExportError
from autopar.frameworks.abilities import ABILITIES, nearest_recompute
from autopar.frameworks.assumptions import taken_for_granted, told
from autopar.frameworks.facts import Facts, Sizes, state_lost
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import MAXTEXT_SOURCE
from autopar.frameworks.placements import check_even
from autopar.plan import Exported
from autopar.recompute import Hosted, Recompute

MODELS: Mapping[str, str] = {
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "llama3-405b": "llama3-405b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "deepseek-v3": "deepseek3-671b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gpt3-175b": "gpt3-175b",
}
"""Names of MaxText's models (configs/models) by ours."""
_BLOCKS: Mapping[str, str] = {"llama": "llama2", "mistral": "mistral", "mixtral": "mixtral"}
"""Decoder blocks of MaxText by families of the zoo."""
_QUANTIZATION: Mapping[str, str] = {"fp8": "fp8", "int8": "int8"}
"""Formats of `autopar.cost.formats` that MaxText has a name for."""
_POLICIES: Mapping[str, str] = {Recompute.SELECTIVE: "minimal_with_context", Recompute.FULL: "full"}
"""Policies of rematerialisation."""


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a YAML configuration.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.

    Raises:
        ExportError: If MaxText cannot cut the model into these stages, or parameters lie in uneven blocks.
    """
    check_even(facts.plan, "MaxText")
    lost = [*facts.lost, *([] if facts.bucket is None else [facts.bucket.lost]), *_lost_experts(facts)]
    fields: dict[str, object] = {
        "base_config": "base.yml",
        **_model(facts, lost),
        **_batch(facts),
        **_mesh(facts),
        **_pipeline(facts, lost),
        **_zero(facts, lost),
        **_recompute(facts, lost),
        **told(facts, "maxtext"),
        **_precision(facts, lost),
    }
    granted = taken_for_granted(facts, "maxtext")
    remarks = Remarks(lost, granted, f"Keys are those of {MAXTEXT_SOURCE}.", outcome, _environment(facts))
    text = header(facts.plan, "Configuration for MaxText", remarks) + yaml.safe_dump(fields, sort_keys=False)
    return Exported("maxtext.yml", text.encode(), tuple(lost), granted, outcome)


def _environment(facts: Facts) -> list[str]:
    flags = [] if facts.bucket is None else [facts.bucket.xla_flags]
    if _slices(facts) == 1:
        return flags
    return [*flags, f"num_slices is the number of nodes, {_slices(facts)}: axes named dcn lie between them"]


def _slices(facts: Facts) -> int:
    """Return the number of groups between which axes are named dcn: nodes of GPUs; one slice of TPUs is whole."""
    cluster = cluster_from_dict(facts.plan.job.cluster).by_node
    if str(facts.plan.job.cluster.get("name", "")).startswith("tpu"):
        return 1
    return max(1, facts.gpus // min(facts.gpus, cluster.devices_per_node))


def _model(facts: Facts, lost: list[str]) -> dict[str, object]:
    sizes = facts.sizes
    if sizes is None:
        lost.append("the model: set model_name or the sizes of its layers, and max_target_length")
        return {}
    changed = {name for name, _ in facts.plan.model.dims} - {"seq", "mtp"}
    fields: dict[str, object] = {"max_target_length": sizes.seq}
    name = "" if changed else MODELS.get(facts.plan.model.name, "")
    if name:
        fields["model_name"] = name
    elif sizes.decoder is None and sizes.family in _BLOCKS:
        fields |= _sizes(sizes)
    else:
        lost.append(f"the model: MaxText has none called {facts.plan.model.name}; set model_name or its sizes")
    if facts.mtp:
        fields["mtp_num_layers"] = facts.mtp
    return fields


def _sizes(sizes: Sizes) -> dict[str, object]:
    experts = {"num_experts": sizes.experts, "num_experts_per_tok": sizes.top_k} if sizes.experts else {}
    return {
        "decoder_block": _BLOCKS[sizes.family],
        "base_num_decoder_layers": sizes.layers,
        "base_emb_dim": sizes.hidden,
        "base_num_query_heads": sizes.heads,
        "base_num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_size or sizes.hidden // sizes.heads,
        "base_mlp_dim": sizes.ffn,
        "mlp_activations": ["silu", "linear"],
        "vocab_size": sizes.vocab,
        "rope_max_timescale": int(sizes.rope_theta or 10_000),
        "logits_via_embedding": sizes.tied,
        "enable_dropout": False,
        **experts,
    }


def _batch(facts: Facts) -> dict[str, object]:
    """Return the samples per device of a pass, which a pipeline cuts into microbatches."""
    microbatches = facts.num_microbatches
    samples = facts.microbatch * facts.dp * (microbatches if facts.pp > 1 else 1)
    return {
        "per_device_batch_size": samples / facts.gpus,
        "gradient_accumulation_steps": 1 if facts.pp > 1 else microbatches,
    }


def _mesh(facts: Facts) -> dict[str, object]:
    """Return the axes of the mesh: what of each lies within a node, and what between nodes."""
    experts = _experts(facts)
    shared = facts.dp // experts
    tensor = "tensor_sequence" if facts.sequence_parallel else "tensor"
    copies = shared // max(1, facts.sharded // experts) if facts.zero else shared
    axes = {  # the innermost first
        tensor: facts.tp,
        "context": facts.cp,
        "expert": experts,
        "fsdp": shared // copies,
        "data": copies,
        "pipeline": facts.pp,
    }
    left = facts.gpus // _slices(facts)
    fields: dict[str, object] = {}
    for name, size in axes.items():
        within = max(part for part in range(1, size + 1) if size % part == 0 and left % part == 0)
        left //= within
        fields[f"ici_{name}_parallelism"] = within
        fields[f"dcn_{name}_parallelism"] = size // within
    return fields


def _experts(facts: Facts) -> int:
    """Return the size of MaxText's axis for experts, which splits the batch, too: as many groups where dp allows."""
    return facts.ep if facts.dp % facts.ep == 0 else facts.ep_data


def _lost_experts(facts: Facts) -> list[str]:
    """Return what the axis for experts does otherwise than the plan."""
    inside = facts.ep // facts.ep_data
    if inside == 1:
        return []
    return [
        f"experts dealt out over {inside} context- or tensor-parallel devices, too: MaxText deals them out over its "
        f"axis expert ({_experts(facts)}), which splits the batch"
    ]


def _pipeline(facts: Facts, lost: list[str]) -> dict[str, object]:
    if facts.pp == 1:
        return {}
    layers = sum(facts.layers)
    if layers % facts.pp:
        raise ExportError(
            f"{layers} layers do not divide over {facts.pp} stages: MaxText refuses that",
            hint=f"plan with a number of stages that divides {layers}, or export --to megatron",
        )
    if len(set(facts.layers_of_groups)) > 1:
        lost.append(f"layers per stage {', '.join(map(str, facts.layers))}: stages of MaxText have as many each")
    lost.append(f"schedule {facts.plan.schedule!r}: MaxText runs all forwards before the backwards")
    return {
        "num_layers_per_pipeline_stage": layers // facts.pp,
        "num_pipeline_repeats": 1,
        "num_pipeline_microbatches": facts.num_microbatches,
        "scan_layers": False,
    }


def _zero(facts: Facts, lost: list[str]) -> dict[str, object]:
    if facts.zero in (1, 2):
        lost.append(f"ZeRO {facts.zero}: the axis fsdp of MaxText also splits parameters")
    if not facts.hosted:
        return {}
    if len(facts.hosted) < len(facts.plan.stages):
        lost.append("which stages offload the optimizer: MaxText does on all of them")
    if facts.hosted_share < 1:
        lost.append("a share of the optimizer's state in host memory: MaxText puts all of it there")
    lost.extend(state_lost(facts, Hosted.OPTIMIZER, "MaxText"))
    return {"optimizer_memory_host_offload": True}


def _recompute(facts: Facts, lost: list[str]) -> dict[str, object]:
    if any(facts.offloaded):
        lost.append(f"activations of {sum(facts.offloaded)} layers in host memory; minimal_offloaded is the nearest")
    flavour, _ = nearest_recompute(facts, ABILITIES["maxtext"])
    if set(facts.flavours) != {Recompute.FULL}:
        counts = ", ".join(f"{own} in {count}" for own, count in facts.flavours.items())
        lost.append(f"recompute ({counts} layers): remat_policy {_POLICIES[flavour]} is exported for all")
    return {"remat_policy": _POLICIES[flavour]}


def _precision(facts: Facts, lost: list[str]) -> dict[str, object]:
    policy = load_policy(facts.plan.job.precision)
    fields: dict[str, object] = {"dtype": "bfloat16" if policy.half == "bf16" else "float32"}
    if policy.half == "fp16":
        lost.append("activations in fp16: MaxText computes in bfloat16 or float32, and float32 is exported")
    if policy.format is not None:
        quantization = _QUANTIZATION.get(policy.format.name)
        if quantization is None:
            lost.append(f"products of linear layers in {policy.format.name}: MaxText has {', '.join(_QUANTIZATION)}")
        else:
            fields["quantization"] = quantization
    return fields

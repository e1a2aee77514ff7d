"""torchtitan: a plan as the sections of a job configuration (TOML)."""

import json

from autopar.cost import load_policy
from autopar.errors import ExportError
from autopar.frameworks.facts import Facts, offloads_lost
from autopar.frameworks.granted import (
    CHUNKED_COLLECTIVES,
    CONTEXT,
    OVERLAPPED_GATHERS,
    OVERLAPPED_GRADIENTS,
    hides_tp,
    taken_for_granted,
)
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import ROTATE_METHODS, TORCHTITAN_SCHEDULES, TORCHTITAN_SOURCE
from autopar.plan import Exported
from autopar.recompute import Recompute

_NAMES = (
    f"Fields are those of {TORCHTITAN_SOURCE}. torchtitan 0.3.0 reads no TOML: there a configuration is a function in "
    "Python (--module, --config), activation_checkpoint.mode and the module output have other names, and "
    "enable_sequence_parallel is a field."
)


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as TOML that goes into a job configuration.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.

    Raises:
        ExportError: If torchtitan refuses such a plan.
    """
    _check_heads(facts)
    lost = [*facts.lost, *offloads_lost(facts.plan)]
    if facts.mtp:
        lost.append(f"multi-token prediction of depth {facts.mtp}, which models of torchtitan have none of")
    sections: dict[str, dict[str, object]] = {
        "training": _training(facts, lost),
        "parallelism": _parallelism(facts, lost),
        "activation_checkpoint": _recompute(facts, lost),
    }
    if hides_tp(facts):  # async tensor parallelism is a pass of torch.compile
        sections["compile"] = {"enable": True}
    sections |= _quantized(facts, lost)
    # FSDP reduces and gathers beside compute by itself.
    if facts.plan.fusion is not None:
        lost.append("buckets cut for this plan: torchtitan reduces block by block and has no field for them")
    asked = {OVERLAPPED_GRADIENTS, OVERLAPPED_GATHERS} if facts.zero else set()
    asked |= {CONTEXT[kind] for kind in ROTATE_METHODS}
    granted = taken_for_granted(facts, frozenset(asked | {CHUNKED_COLLECTIVES}))
    remarks = Remarks(lost, granted, _NAMES, outcome)
    text = header(facts.plan, "Sections for a torchtitan job configuration", remarks)
    for name, fields in sections.items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in fields.items())
    return Exported("torchtitan.toml", text.encode(), tuple(lost), granted, outcome)


def _check_heads(facts: Facts) -> None:
    """Refuse tensor parallelism over more devices than divide the key-value heads.

    Raises:
        ExportError: If they do not divide.
    """
    if facts.sizes is not None and facts.sizes.kv_heads % facts.tp:
        kv_heads = facts.sizes.kv_heads
        raise ExportError(
            f"{kv_heads} key-value heads do not divide over tp={facts.tp} devices: torchtitan refuses that",
            hint=f"plan with a tensor-parallel degree that divides {kv_heads}, or export --to megatron",
        )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a basic string of TOML has the escapes of JSON
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


def _training(facts: Facts, lost: list[str]) -> dict[str, object]:
    # In a pipeline a local batch is run as microbatches; without one it is a microbatch, and gradients are accumulated.
    local = facts.microbatch * (facts.plan.num_microbatches if facts.pp > 1 else 1)
    fields: dict[str, object] = {"local_batch_size": local, "global_batch_size": facts.plan.job.global_batch}
    if facts.sizes is None:
        lost.append("the sequence length: set training.seq_len")
    else:
        fields["seq_len"] = facts.sizes.seq
    lost.append("the model: choose model.name and model.flavor")
    return fields


def _parallelism(facts: Facts, lost: list[str]) -> dict[str, object]:
    sharded = facts.sharded if facts.zero else 1
    fields: dict[str, object] = {
        "data_parallel_replicate_degree": facts.dp // max(1, sharded),
        "data_parallel_shard_degree": max(1, sharded),
    }
    if facts.zero:
        fields["fsdp_reshard_after_forward"] = "always" if facts.zero == 3 else "never"
        if facts.zero == 1:
            lost.append("ZeRO 1: torchtitan's FSDP also splits gradients and, between steps, parameters")
        elif facts.zero == 2:
            lost.append("ZeRO 2: torchtitan's FSDP also splits parameters between steps")
    if facts.shards_apart:
        lost.append("devices that share parameters are no neighbours here; torchtitan puts shards inside replicas")
    fields["tensor_parallel_degree"] = facts.tp
    if hides_tp(facts):
        fields["enable_async_tensor_parallel"] = True
    if facts.tp > 1 and not facts.sequence_parallel:
        lost.append("tensor parallelism without sequence parallelism; torchtitan always combines the two")
    fields["pipeline_parallel_degree"] = facts.pp
    if facts.pp > 1:
        schedule = TORCHTITAN_SCHEDULES.get(facts.plan.schedule)
        if schedule is None:
            schedule = "1F1B"
            lost.append(f"schedule {facts.plan.schedule!r}; 1F1B is exported")
        fields["pipeline_parallel_schedule"] = schedule
        fields["pipeline_parallel_microbatch_size"] = facts.microbatch
        fields["module_fqns_per_model_part"] = _parts(facts.layers)
    fields["context_parallel_degree"] = facts.cp
    if facts.cp_kind and facts.cp_kind in ROTATE_METHODS:
        fields["context_parallel_rotate_method"] = ROTATE_METHODS[facts.cp_kind]
    if facts.cp_kinds and (len(facts.cp_kinds) > 1 or facts.cp_kind not in ROTATE_METHODS):
        kinds = " inside of ".join(facts.cp_kinds)
        lost.append(f"context parallelism by {kinds}: torchtitan passes keys and values round or gathers them")
    fields["expert_parallel_degree"] = facts.ep
    return fields


def _quantized(facts: Facts, lost: list[str]) -> dict[str, dict[str, object]]:
    """Return the sections that have linear layers run in 8 bits: of scales per tensor and per 32 numbers."""
    policy = load_policy(facts.plan.job.precision)
    if policy.format is None:
        return {}
    if policy.format.name == "mxfp8":
        return {"model": {"converters": ["quantize.linear.mx"]}, "quantize.linear.mx": {"recipe_name": "mxfp8_cublas"}}
    if policy.format.name == "fp8-current":
        return {
            "model": {"converters": ["quantize.linear.float8"]},
            "quantize.linear.float8": {"enable_fsdp_float8_all_gather": policy.low_weights},
        }
    lost.append(f"products of linear layers in {policy.format.name}: torchtitan has fp8-current and mxfp8")
    return {}


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the names of the modules of every stage, as torchtitan's decoders call them."""
    parts, start = [], 0
    for count in layers:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(facts: Facts, lost: list[str]) -> dict[str, object]:
    found = facts.flavours
    (most, _), *others = found.most_common()
    if others:
        mixed = ", ".join(f"{flavour} in {count}" for flavour, count in found.items())
        lost.append(f"recompute by layer ({mixed} layers); {most} is exported for all")
    fields: dict[str, object] = {"mode": str(most)}
    if most is Recompute.SELECTIVE:
        fields["selective_ac_option"] = "op"
        lost.append("selective recompute by op of the plan; torchtitan's own list of ops decides")
    return fields

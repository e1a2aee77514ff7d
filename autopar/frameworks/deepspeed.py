"""DeepSpeed: a plan as its JSON configuration."""

import json

from autopar.cost import load_policy
from autopar.frameworks.abilities import ABILITIES, state_run
from autopar.frameworks.assumptions import taken_for_granted, told
from autopar.frameworks.facts import Facts, state_lost
from autopar.frameworks.known import DEEPSPEED_SOURCE
from autopar.frameworks.nested import nested
from autopar.plan import Exported
from autopar.recompute import Hosted, Recompute

COMMENT = "autopar"
"""Key of what the file says about itself; JSON has no comments."""

_HALF_BYTES = 2.0
_HIGHEST_IN_PIPELINE = 1
"""ZeRO level up to which DeepSpeed's pipeline engine goes."""


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a DeepSpeed configuration.

    Args:
        facts: The plan.
        outcome: What the file comes to, for what it says about itself.
    """
    lost = list(facts.lost)
    fields: dict[str, object] = {
        "train_batch_size": facts.plan.job.global_batch,
        "train_micro_batch_size_per_gpu": facts.microbatch,
        "gradient_accumulation_steps": facts.num_microbatches,
        **_zero(facts, lost),
        **told(facts, "deepspeed"),
        **_precision(facts, lost),
    }
    if facts.tp > 1:
        fields["tensor_parallel.autotp_size"] = facts.tp
        if facts.zero == 3:
            lost.append("ZeRO 3 with tensor parallelism: DeepSpeed's automatic tensor parallelism takes ZeRO 0 to 2")
        if facts.sequence_parallel:
            lost.append("sequence parallelism between tensor-parallel blocks")
    if facts.pp > 1:
        lost.append(_pipeline(facts))
        if facts.zero > _HIGHEST_IN_PIPELINE:
            lost.append(f"ZeRO {facts.zero} in a pipeline: DeepSpeed's pipeline engine takes ZeRO 0 or 1")
    if facts.cp > 1 and facts.cp_kinds == ("ulysses",):
        lost.append(f"context parallelism of {facts.cp}: register DeepSpeed's UlyssesSPAttentionHF in the model's code")
    elif facts.cp > 1:
        lost.append(
            f"context parallelism of {facts.cp}: DeepSpeed splits heads instead (Ulysses, sequence_parallel_size)"
        )
    if facts.ep > 1:
        lost.append(f"expert parallelism of {facts.ep}: give ep_size={facts.ep} to the MoE layers")
    if facts.mtp:
        lost.append(f"multi-token prediction of depth {facts.mtp}: part of the model, not of this file")
    if set(facts.flavours) != {Recompute.NONE}:
        counts = ", ".join(f"{flavour} in {count}" for flavour, count in facts.flavours.items())
        lost.append(f"recompute ({counts} layers): call deepspeed.checkpointing.checkpoint in the model")
    if any(facts.offloaded):
        lost.append(f"activations of {sum(facts.offloaded)} layers in host memory: DeepSpeed moves checkpoints only")
    granted = taken_for_granted(facts, "deepspeed")
    comment = {
        "plan": facts.plan.summary,
        **({"outcome": outcome} if outcome else {}),
        "names": f"Keys are those of {DEEPSPEED_SOURCE}.",
        "not expressed": lost,
        "taken for granted": granted,
    }
    text = json.dumps({COMMENT: comment, **nested(fields)}, indent=2, ensure_ascii=False) + "\n"
    return Exported("deepspeed.json", text.encode(), tuple(lost), granted, outcome)


def _pipeline(facts: Facts) -> str:
    """Return how the pipeline is built in code: DeepSpeed has one stage per group of devices."""
    told_in_code = (
        f"the pipeline: build a PipelineModule with num_stages={facts.pp} and layers per stage "
        f"{', '.join(map(str, facts.layers_of_groups))}; DeepSpeed runs 1F1B"
    )
    if facts.interleave > 1:
        return f"{told_in_code}, not {facts.plan.schedule} with {facts.interleave} stages per group of devices"
    return told_in_code if facts.plan.schedule == "1f1b" else f"{told_in_code}, not {facts.plan.schedule}"


def _zero(facts: Facts, lost: list[str]) -> dict[str, object]:
    """Return the fields of ZeRO, with the optimizer on the CPU (ZeRO-Offload) where the plan offloads its state."""
    level = max(facts.zero, int(bool(facts.hosted)))
    fields: dict[str, object] = {"stage": level}
    if facts.bucket is not None:
        lost.append(facts.bucket.lost)
        if not facts.zero:
            lost.append("a size of buckets: DeepSpeed takes reduce_bucket_size with ZeRO")
    if facts.zero and facts.sharded < facts.dp:
        if facts.zero == 3:
            fields["mics_shard_size"] = facts.sharded
            lost.append(
                f"ZeRO over {facts.sharded} of {facts.dp} data-parallel devices: needs deepspeed.zero.MiCS_Init"
            )
        else:
            lost.append(f"ZeRO over {facts.sharded} of {facts.dp} data-parallel devices")
    if facts.hosted:
        runs = state_run(facts.hosted_state, ABILITIES["deepspeed"], level)
        lost.extend(state_lost(facts, runs, "DeepSpeed"))
        if not facts.zero:
            lost.append("an optimizer that is offloaded whole: DeepSpeed offloads with ZeRO only, and 1 is exported")
        if len(facts.hosted) < len(facts.plan.stages):
            lost.append("which stages offload the optimizer: DeepSpeed does on all of them")
        fields |= {"offload_optimizer.device": "cpu", "offload_optimizer.pin_memory": True}
        if runs is Hosted.PARAMETERS:
            fields |= {"offload_param.device": "cpu", "offload_param.pin_memory": True}
            if facts.hosted_share < 1:
                lost.append("a share of the parameters in host memory: DeepSpeed puts all of them there")
        elif facts.hosted_share < 1 and level == 3:
            fields["offload_optimizer.ratio"] = facts.hosted_share
        elif facts.hosted_share < 1:
            lost.append("a share of the optimizer's state in host memory: DeepSpeed takes one with ZeRO 3 only")
    return {f"zero_optimization.{name}": value for name, value in fields.items()}


def _precision(facts: Facts, lost: list[str]) -> dict[str, object]:
    """Return the numbers of activations, of sums of gradients and of their reduction."""
    policy = load_policy(facts.plan.job.precision)
    if policy.format is not None:
        lost.append(f"products of linear layers in {policy.format.name}: DeepSpeed leaves them in {policy.half}")
    if not policy.half:
        return {}
    sums, wire = (policy.half if own <= _HALF_BYTES else "fp32" for own in (policy.gradient, policy.gradient_wire))
    return {
        f"{policy.half}.enabled": True,
        "data_types.grad_accum_dtype": sums,
        "communication_data_type": wire,
    }

"""DeepSpeed: a plan as its JSON configuration."""

import json

from autopar.cost import load_policy
from autopar.frameworks.facts import ON_CPU, Facts
from autopar.frameworks.granted import OVERLAPPED_GATHERS, OVERLAPPED_GRADIENTS, taken_for_granted
from autopar.frameworks.known import DEEPSPEED_SOURCE
from autopar.plan import Exported
from autopar.recompute import Recompute

COMMENT = "autopar"
"""Key of what the file says about itself; JSON has no comments."""


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
        "gradient_accumulation_steps": facts.plan.num_microbatches,
        "zero_optimization": _zero(facts, lost),
    }
    policy = load_policy(facts.plan.job.precision)
    if policy.half:
        fields[policy.half] = {"enabled": True}
    if policy.format is not None:
        lost.append(f"products of linear layers in {policy.format.name}: DeepSpeed leaves them in {policy.half}")
    if facts.tp > 1:
        fields["tensor_parallel"] = {"autotp_size": facts.tp}
        if facts.zero == 3:
            lost.append("ZeRO 3 with tensor parallelism: DeepSpeed's automatic tensor parallelism takes ZeRO 0 to 2")
        if facts.sequence_parallel:
            lost.append("sequence parallelism between tensor-parallel blocks")
    if facts.zero and facts.sharded < facts.dp:
        lost.append(f"ZeRO over {facts.sharded} of {facts.dp} data-parallel devices{_groups(facts)}")
    if facts.pp > 1:
        lost.append(_pipeline(facts))
        if facts.zero > 1:
            lost.append(f"ZeRO {facts.zero} in a pipeline: DeepSpeed's pipeline engine takes ZeRO 0 or 1")
    if facts.cp > 1 and facts.cp_kinds == ("ulysses",):
        lost.append(f"context parallelism of {facts.cp}: register DeepSpeed's UlyssesSPAttentionHF in the model's code")
    elif facts.cp > 1:
        lost.append(
            f"context parallelism of {facts.cp}: DeepSpeed splits heads instead (Ulysses, sequence_parallel_size)"
        )
    if facts.ep > 1:
        lost.append(f"expert parallelism of {facts.ep}: give ep_size={facts.ep} to the MoE layers")
    if set(facts.flavours) != {Recompute.NONE}:
        counts = ", ".join(f"{flavour} in {count}" for flavour, count in facts.flavours.items())
        lost.append(f"recompute ({counts} layers): call deepspeed.checkpointing.checkpoint in the model")
    if any(facts.offloaded):
        lost.append(f"activations of {sum(facts.offloaded)} layers in host memory: DeepSpeed moves checkpoints only")
    asked = frozenset({OVERLAPPED_GRADIENTS, OVERLAPPED_GATHERS} if facts.zero else ())
    granted = taken_for_granted(facts, asked)
    comment = {
        "plan": facts.plan.summary,
        **({"outcome": outcome} if outcome else {}),
        "names": f"Keys are those of {DEEPSPEED_SOURCE}.",
        "not expressed": lost,
        "taken for granted": granted,
    }
    text = json.dumps({COMMENT: comment, **fields}, indent=2, ensure_ascii=False) + "\n"
    return Exported("deepspeed.json", text.encode(), tuple(lost), granted, outcome)


def _groups(facts: Facts) -> str:
    """Return how DeepSpeed is told that groups share, if it can be."""
    if facts.zero < 3:
        return ""
    return f": mics_shard_size {facts.sharded} with deepspeed.zero.MiCS_Init"


def _pipeline(facts: Facts) -> str:
    """Return how the pipeline is built in code: DeepSpeed has one stage per group of devices."""
    each = facts.interleave
    layers = [sum(facts.layers[start : start + each]) for start in range(0, len(facts.layers), each)]
    told = (
        f"the pipeline: build a PipelineModule with num_stages={facts.pp} and layers per stage "
        f"{', '.join(map(str, layers))}; DeepSpeed runs 1F1B"
    )
    if each > 1:
        told += f", not {facts.plan.schedule} with {each} stages per group of devices"
    elif facts.plan.schedule != "1f1b":
        told += f", not {facts.plan.schedule}"
    return told


def _zero(facts: Facts, lost: list[str]) -> dict[str, object]:
    """Return the section of ZeRO, with the optimizer on the CPU (ZeRO-Offload) where the plan offloads its state."""
    overlap: dict[str, object] = {"overlap_comm": True} if facts.zero else {}
    if facts.bucket is not None:
        lost.append(facts.bucket.lost)
        if facts.zero:
            overlap["reduce_bucket_size"] = facts.bucket.elements
        else:
            lost.append("a size of buckets: DeepSpeed takes reduce_bucket_size with ZeRO")
    if not facts.hosted:
        return {"stage": facts.zero, **overlap}
    lost.append(ON_CPU)
    if not facts.zero:
        lost.append("an optimizer that is offloaded whole: DeepSpeed offloads with ZeRO only, and 1 is exported")
    if len(facts.hosted) < len(facts.plan.stages):
        lost.append("which stages offload the optimizer: DeepSpeed does on all of them")
    return {"stage": max(1, facts.zero), **overlap, "offload_optimizer": {"device": "cpu", "pin_memory": True}}

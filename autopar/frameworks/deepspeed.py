"""DeepSpeed: a plan as its JSON configuration."""

import json

from autopar.frameworks.facts import ON_CPU, Facts
from autopar.plan import Exported
from autopar.recompute import Recompute

COMMENT = "autopar"
"""Key of what the file says about itself; JSON has no comments."""


def export(facts: Facts) -> Exported:
    """Return a plan as a DeepSpeed configuration."""
    lost = list(facts.lost)
    fields: dict[str, object] = {
        "train_batch_size": facts.plan.job.global_batch,
        "train_micro_batch_size_per_gpu": facts.microbatch,
        "gradient_accumulation_steps": facts.plan.num_microbatches,
        "zero_optimization": _zero(facts, lost),
    }
    if facts.plan.job.precision in ("mixed", "fsdp"):
        fields["bf16"] = {"enabled": True}
    elif facts.plan.job.precision == "megatron-fp16":
        fields["fp16"] = {"enabled": True}
    if facts.tp > 1:
        fields["tensor_parallel"] = {"autotp_size": facts.tp}
        if facts.zero == 3:
            lost.append("ZeRO 3 with tensor parallelism: DeepSpeed's automatic tensor parallelism takes ZeRO 0 to 2")
        if facts.sequence_parallel:
            lost.append("sequence parallelism between tensor-parallel blocks")
    if facts.sharded not in (0, facts.dp):
        lost.append(f"ZeRO over {facts.sharded} of {facts.dp} data-parallel devices")
    if facts.pp > 1:
        lost.append(
            f"the pipeline: build a PipelineModule with num_stages={facts.pp} and layers per stage "
            f"{', '.join(map(str, facts.layers))}; DeepSpeed runs 1F1B"
        )
        if facts.zero > 1:
            lost.append(f"ZeRO {facts.zero} in a pipeline: DeepSpeed's pipeline engine takes ZeRO 0 or 1")
    if facts.cp > 1:
        lost.append(f"context parallelism of {facts.cp}: pass a mesh to deepspeed.initialize")
    if facts.ep > 1:
        lost.append(f"expert parallelism of {facts.ep}: give ep_size={facts.ep} to the MoE layers")
    if set(facts.flavours) != {Recompute.NONE}:
        counts = ", ".join(f"{flavour} in {count}" for flavour, count in facts.flavours.items())
        lost.append(f"recompute ({counts} layers): call deepspeed.checkpointing.checkpoint in the model")
    if any(facts.offloaded):
        lost.append(f"activations of {sum(facts.offloaded)} layers in host memory: DeepSpeed moves checkpoints only")
    comment = {"plan": facts.plan.summary, "not expressed": lost}
    text = json.dumps({COMMENT: comment, **fields}, indent=2, ensure_ascii=False) + "\n"
    return Exported("deepspeed.json", text.encode(), tuple(lost))


def _zero(facts: Facts, lost: list[str]) -> dict[str, object]:
    """Return the section of ZeRO, with the optimizer on the CPU (ZeRO-Offload) where the plan offloads its state."""
    if not facts.hosted:
        return {"stage": facts.zero}
    lost.append(ON_CPU)
    if not facts.zero:
        lost.append("an optimizer that is offloaded whole: DeepSpeed offloads with ZeRO only, and 1 is exported")
    if len(facts.hosted) < len(facts.plan.stages):
        lost.append("which stages offload the optimizer: DeepSpeed does on all of them")
    return {"stage": max(1, facts.zero), "offload_optimizer": {"device": "cpu", "pin_memory": True}}

"""accelerate and the Trainer of transformers: a plan as the configuration of PyTorch's FSDP2, or of plain DDP."""

import json

import yaml

from autopar.cluster import cluster_from_dict
from autopar.cost import load_policy
from autopar.frameworks.abilities import ABILITIES, nearest
from autopar.frameworks.assumptions import taken_for_granted, told
from autopar.frameworks.facts import Facts, offloads_lost, state_lost
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import ACCELERATE_SOURCE, TRAINER_SOURCE
from autopar.frameworks.nested import nested
from autopar.plan import Exported
from autopar.recompute import Hosted, Recompute

COMMENT = "_autopar"
"""Key of what a JSON file says about itself."""
_COMPILE = "compile"
_CONTEXT = "parallelism.cp_comm_strategy"
"""Words of the table of assumptions that the two files have different names for."""


def export_accelerate(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a configuration file of `accelerate launch`.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.
    """
    degrees, _ = nearest(facts, ABILITIES["accelerate"])
    lost = lost_by(facts, "accelerate")
    asked = told(facts, "accelerate")
    per_node = min(facts.gpus, cluster_from_dict(facts.plan.job.cluster).by_node.devices_per_node)
    fields: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if degrees.zero else "MULTI_GPU",
        "num_machines": max(1, facts.gpus // per_node),
        "num_processes": facts.gpus,
        "mixed_precision": _half(facts, lost) or "no",
    }
    if degrees.zero:
        shard = degrees.shard or degrees.data
        fields |= {f"fsdp_config.fsdp_{name}": value for name, value in _fsdp(facts, degrees.recompute).items()}
        fields |= {
            "parallelism_config.parallelism_config_dp_replicate_size": facts.dp // shard,
            "parallelism_config.parallelism_config_dp_shard_size": shard,
            "parallelism_config.parallelism_config_tp_size": facts.tp,
            "parallelism_config.parallelism_config_cp_size": facts.cp,
        }
        if _CONTEXT in asked:
            fields["parallelism_config.parallelism_config_cp_comm_strategy"] = asked[_CONTEXT]
    elif degrees.recompute != Recompute.NONE:
        lost.append("recompute: call model.gradient_checkpointing_enable() in the script")
    if asked.get(_COMPILE):
        fields["dynamo_config.dynamo_backend"] = "INDUCTOR"
    granted = taken_for_granted(facts, "accelerate")
    script = [
        f"batches of {facts.microbatch} samples per device in the script, and "
        f"Accelerator(gradient_accumulation_steps={facts.num_microbatches})"
    ]
    remarks = Remarks(lost, granted, f"Keys are those of {ACCELERATE_SOURCE}.", outcome, script)
    text = header(facts.plan, "Configuration for accelerate launch --config_file", remarks)
    text += yaml.safe_dump(nested(fields), sort_keys=False)
    return Exported("accelerate.yaml", text.encode(), tuple(lost), granted, outcome)


def export_trainer(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as `TrainingArguments` in JSON.

    Args:
        facts: The plan.
        outcome: What the file comes to, for what it says about itself.
    """
    degrees, _ = nearest(facts, ABILITIES["trainer"])
    lost = lost_by(facts, "trainer")
    if facts.tp > 1:
        lost.append(f"tensor parallelism of {facts.tp}: give tp_plan='auto' to from_pretrained")
    if facts.cp > 1:
        lost.append(f"context parallelism of {facts.cp}: export --to accelerate")
    if degrees.zero and facts.sharded < facts.dp:
        lost.append(f"ZeRO over {facts.sharded} of {facts.dp} data-parallel devices: export --to accelerate")
    half = _half(facts, lost)
    fields: dict[str, object] = {
        "per_device_train_batch_size": facts.microbatch,
        "gradient_accumulation_steps": facts.num_microbatches,
        "bf16": half == "bf16",
        "fp16": half == "fp16",
        "torch_compile": bool(told(facts, "trainer").get(_COMPILE)),
    }
    if "use_liger_kernel" in told(facts, "trainer"):
        fields["use_liger_kernel"] = True
    if degrees.zero:
        fields["fsdp"] = True
        fields |= {f"fsdp_config.{name}": value for name, value in _fsdp(facts, degrees.recompute).items()}
    elif degrees.recompute != Recompute.NONE:
        fields["gradient_checkpointing"] = True
    granted = taken_for_granted(facts, "trainer")
    comment = {
        "plan": facts.plan.summary,
        **({"outcome": outcome} if outcome else {}),
        "names": f"Fields are those of {TRAINER_SOURCE}; take this key out before TrainingArguments(**fields).",
        "not expressed": lost,
        "taken for granted": granted,
    }
    text = json.dumps({COMMENT: comment, **nested(fields)}, indent=2, ensure_ascii=False) + "\n"
    return Exported("trainer.json", text.encode(), tuple(lost), granted, outcome)


def _fsdp(facts: Facts, recompute: str) -> dict[str, object]:
    """Return the fields of FSDP2, which wraps the blocks that a model names (`_no_split_modules`)."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": facts.zero == 3,
        "activation_checkpointing": recompute == Recompute.FULL,
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def _half(facts: Facts, lost: list[str]) -> str:
    """Return the 16-bit numbers of activations; "" where they have 32 bits."""
    policy = load_policy(facts.plan.job.precision)
    if policy.format is not None:
        lost.append(f"products of linear layers in {policy.format.name}: convert the model with torchao")
    return policy.half


def lost_by(facts: Facts, target: str) -> list[str]:
    """Return what FSDP2 has no word for, under accelerate, the Trainer or alone."""
    ability = ABILITIES[target]
    takes = target == "fsdp" and bool(facts.zero and facts.hosted)
    lost = [*facts.lost, *offloads_lost(facts.plan, states=not takes)]
    if takes:
        lost += state_lost(facts, Hosted.PARAMETERS, ability.name)
        if facts.hosted_share < 1:
            lost.append("a share of what lies in host memory: CPUOffloadPolicy puts all of it there")
    if target != "fsdp" and facts.plan.fusion is not None and facts.plan.fusion.buckets:
        lost.append(f"buckets cut for this plan: {ability.name} wraps every block, or leaves PyTorch its default size")
    if facts.pp > 1:
        lost.append(f"the pipeline of {facts.pp} stages: {ability.name} has none")
    if facts.ep > 1:
        lost.append(f"expert parallelism of {facts.ep}: {ability.name} has none")
    if facts.sequence_parallel:
        lost.append("sequence parallelism between tensor-parallel blocks: the model's tp_plan decides")
    if facts.zero in (1, 2):
        lost.append(f"ZeRO {facts.zero}: FSDP2 also splits parameters between steps")
    flavours = facts.flavours
    if len(flavours) > 1 or Recompute.SELECTIVE in flavours:
        mixed = ", ".join(f"{flavour} in {count}" for flavour, count in flavours.items())
        lost.append(f"recompute by op or by layer ({mixed} layers): all layers recompute whole, or none")
    return lost

"""torchtitan: a plan as the sections of a job configuration (TOML)."""

from autopar.frameworks.facts import Facts, offloads_lost
from autopar.frameworks.header import header
from autopar.frameworks.known import TORCHTITAN_SCHEDULES
from autopar.plan import Exported
from autopar.recompute import Recompute


def export(facts: Facts) -> Exported:
    """Return a plan as TOML that goes into a job configuration."""
    lost = [*facts.lost, *offloads_lost(facts.plan)]
    sections: dict[str, dict[str, object]] = {
        "training": _training(facts, lost),
        "parallelism": _parallelism(facts, lost),
        "activation_checkpoint": _recompute(facts, lost),
    }
    text = header(facts.plan, "Sections for a torchtitan job configuration", lost)
    for name, fields in sections.items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in fields.items())
    return Exported("torchtitan.toml", text.encode(), tuple(lost))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
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
    data = sorted((found for found in facts.axes if found.role == "dp"), key=lambda found: found.axis.stride)
    if any(found.zero for found in data[1:]) and not data[0].zero:
        lost.append("devices that share parameters are no neighbours here; torchtitan puts shards inside replicas")
    fields["tensor_parallel_degree"] = facts.tp
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
    fields["expert_parallel_degree"] = facts.ep
    return fields


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

"""torchtitan: a plan as a Python function that sets the fields of a job configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost import load_policy
from autopar.errors import ExportError
from autopar.frameworks.abilities import ABILITIES
from autopar.frameworks.assumptions import taken_for_granted, told
from autopar.frameworks.facts import Facts, offloads_lost
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import TORCHTITAN_SCHEDULES, TORCHTITAN_SOURCE
from autopar.frameworks.python_file import Expression, apply_function
from autopar.plan import Exported
from autopar.recompute import Recompute
from autopar.workload import job_stack


@dataclass(frozen=True, slots=True)
class Registered:
    """A model that torchtitan has a configuration of.

    Attributes:
        module: Package of the model.
        function: The function that returns its configuration.
        flavor: Its name in the registry of the model.
    """

    module: str
    function: str
    flavor: str


MODELS: Mapping[str, Registered] = {
    "llama3-8b": Registered("llama3", "llama3_8b", "8B"),
    "llama3-70b": Registered("llama3", "llama3_70b", "70B"),
    "llama3-405b": Registered("llama3", "llama3_405b", "405B"),
    "qwen3-30b-a3b": Registered("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    "deepseek-v3": Registered("deepseek_v3", "deepseek_v3_671b", "671B"),
    "gpt-oss-20b": Registered("gpt_oss", "gpt_oss_20b", "20b"),
    "gpt-oss-120b": Registered("gpt_oss", "gpt_oss_120b", "120b"),
}
"""Models by our names; those of `torchtitan/models/*/config_registry.py` (`TORCHTITAN_SOURCE`)."""

_SCALED: Mapping[str, str] = {
    "fp8-current": "Float8LinearConverter",
    "mxfp8": "MXFP8LinearConverter",
    "nvfp4": "NVFP4LinearConverter",
}
"""Converters of linear layers by formats of `autopar.cost.formats`."""
_RECOMPUTE: Mapping[Recompute, str] = {Recompute.FULL: "FullAC", Recompute.SELECTIVE: "SelectiveAC"}
"""Policies of activation checkpointing."""


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a Python file whose function sets the fields of a job configuration.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.

    Raises:
        ExportError: If torchtitan refuses such a plan.
    """
    check_heads(facts)
    lost = [*facts.lost, *offloads_lost(facts.plan)]
    if facts.mtp:
        lost.append(f"multi-token prediction of depth {facts.mtp}, which models of torchtitan have none of")
    registered = _registered(facts)
    imports: list[str] = []
    fields: dict[str, object] = {
        **_training(facts, lost),
        **_parallelism(facts, lost),
        **_recompute(facts, lost, imports),
        **told(facts, "torchtitan"),
        **_quantized(facts, registered, lost, imports),
    }
    if facts.plan.fusion is not None:
        lost.append("buckets cut for this plan: torchtitan reduces block by block and has no field for them")
    if registered is not None:
        imports.append(f"from torchtitan.models.{registered.module}.config_registry import {registered.function}")
    else:
        lost.append("the model: torchtitan has no configuration of it that is known here; give one to apply()")
    granted = taken_for_granted(facts, "torchtitan")
    remarks = Remarks(lost, granted, f"Fields are those of {TORCHTITAN_SOURCE}.", outcome, _how_to_run(registered))
    text = header(facts.plan, "Configuration for torchtitan", remarks)
    text += "\n" + "".join(f"{line}\n" for line in sorted(imports)) + ("\n\n" if imports else "")
    text += apply_function(fields, "Set what the plan decides on a Trainer.Config, and return it.")
    if registered is not None:
        text += f'\n\ndef planned():\n    """Return the configuration."""\n    return apply({registered.function}())\n'
    return Exported("torchtitan_config.py", text.encode(), tuple(lost), granted, outcome)


def check_heads(facts: Facts) -> None:
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


def _registered(facts: Facts) -> Registered | None:
    """Return the configuration of the model, None if there is none or other sizes than the sequence are set."""
    changed = {name for name, _ in facts.plan.model.dims} - {"seq"}
    return None if changed else MODELS.get(facts.plan.model.name)


def _how_to_run(registered: Registered | None) -> list[str]:
    if registered is None:
        return ["a configuration function of your own that returns apply(Trainer.Config(...))"]
    return ["PYTHONPATH with the folder of this file, and --module torchtitan_config --config planned for run_train.sh"]


def _training(facts: Facts, lost: list[str]) -> dict[str, object]:
    # In a pipeline a local batch is run as microbatches; without one it is a microbatch, and gradients are accumulated.
    local = facts.microbatch * (facts.num_microbatches if facts.pp > 1 else 1)
    half = load_policy(facts.plan.job.precision).half
    fields: dict[str, object] = {
        "training.local_batch_size": local,
        "training.global_batch_size": facts.plan.job.global_batch,
        "training.mixed_precision_param": "bfloat16" if half == "bf16" else "float32",
    }
    if half not in ("bf16", ""):
        lost.append(f"{half} parameters: torchtitan computes in bfloat16 or float32, and float32 is exported")
    if facts.sizes is None:
        lost.append("the sequence length: set training.seq_len")
    else:
        fields["training.seq_len"] = facts.sizes.seq
    return fields


def _parallelism(facts: Facts, lost: list[str]) -> dict[str, object]:
    sharded = facts.sharded if facts.zero else 1
    ep = expert_degree(facts)
    if ep > 1 and sharded % facts.ep_data:  # groups of experts lie within shards
        sharded *= facts.ep_data
        lost.append(
            f"data-parallel devices with different experts ({facts.ep_data}) that share no parameters: torchtitan has "
            "groups of experts within those that share"
        )
    fields: dict[str, object] = {
        "data_parallel_replicate_degree": facts.dp // sharded,
        "data_parallel_shard_degree": sharded,
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
    fields["enable_sequence_parallel"] = facts.sequence_parallel
    fields["pipeline_parallel_degree"] = facts.pp
    if facts.pp > 1:
        schedule = TORCHTITAN_SCHEDULES.get(facts.plan.schedule)
        if schedule is None:
            schedule = "1F1B"
            lost.append(f"schedule {facts.plan.schedule!r}; 1F1B is exported")
        fields["pipeline_parallel_schedule"] = schedule
        fields["pipeline_parallel_microbatch_size"] = facts.microbatch
        runs_stages = facts.interleave == 1 or schedule != "1F1B"
        fields["module_fqns_per_model_part"] = _parts(facts.layers if runs_stages else facts.layers_of_groups)
    fields["context_parallel_degree"] = facts.cp
    if facts.cp_kinds not in ((), ("gather",)):
        lost.append(
            f"context parallelism by {' inside of '.join(facts.cp_kinds)}: torchtitan 0.3 gathers keys and values"
        )
    fields["expert_parallel_degree"] = ep
    if ep != facts.ep:
        lost.append(
            f"experts split over tensor-parallel devices: torchtitan gives each device whole experts, {ep} devices "
            "different ones"
        )
    return {f"parallelism.{name}": value for name, value in fields.items()}


def expert_degree(facts: Facts) -> int:
    """Return the devices of a group of experts: neighbours, tensor-parallel ones first, each with whole experts.

    Raises:
        ExportError: If there are fewer experts than tensor-parallel devices of a group.
    """
    if facts.ep == 1 or facts.tp == 1 or facts.etp:
        return facts.ep
    wanted = facts.ep * facts.tp
    experts = wanted if facts.sizes is None else facts.sizes.experts
    if experts % wanted:
        raise ExportError(
            f"{experts} experts do not divide over ep {facts.ep} x tp {facts.tp} devices: torchtitan splits no expert",
            hint="plan with a smaller tp or ep, or export --to megatron",
        )
    return wanted


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the names of the modules of every stage, as torchtitan's decoders call them."""
    parts, start = [], 0
    for count in layers:
        parts.append([f"layers.{index}" for index in range(start, start + count)])
        start += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _recompute(facts: Facts, lost: list[str], imports: list[str]) -> dict[str, object]:
    found = facts.flavours
    (most, _), *others = found.most_common()
    if others:
        mixed = ", ".join(f"{flavour} in {count}" for flavour, count in found.items())
        lost.append(f"recompute by layer ({mixed} layers); {most} is exported for all")
    stack = job_stack(facts.plan.job)
    if most is Recompute.SELECTIVE and ABILITIES["torchtitan"].recomputing(stack) != stack:
        lost.append("selective recompute by op of the plan; torchtitan's own list of ops decides")
    policy = _RECOMPUTE.get(most)
    if policy is None:
        return {"activation_checkpoint": None}
    imports.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    return {"activation_checkpoint": Expression(f"{policy}.Config()")}


def _quantized(facts: Facts, registered: Registered | None, lost: list[str], imports: list[str]) -> dict[str, object]:
    """Return the field that has linear layers run in fewer bits, where torchtitan has a converter for the format."""
    policy = load_policy(facts.plan.job.precision)
    if policy.format is None:
        return {}
    converter = _SCALED.get(policy.format.name)
    if converter is None:
        lost.append(f"products of linear layers in {policy.format.name}: torchtitan has {', '.join(_SCALED)}")
        return {}
    if registered is None:
        lost.append(f"products of linear layers in {policy.format.name}: give {converter} to the model's registry")
        return {}
    if converter == "Float8LinearConverter":
        lost.append("scales per tensor of 8-bit products: torchtitan scales by rows")
    imports.append(f"from torchtitan.components.quantization import {converter}")
    imports.append(f"from torchtitan.models.{registered.module} import model_registry")
    made = f"model_registry({registered.flavor!r}, converters=[{converter}.Config(model_compile_enabled=True)])"
    return {"model_spec": Expression(made)}

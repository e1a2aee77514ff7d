"""Plans in the words of the frameworks that run them, and their configurations as plans."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autopar.describe.one_line import name_stages
from autopar.errors import ExportError
from autopar.folding.fold import Folded
from autopar.frameworks import (
    deepspeed,
    fsdp,
    fsdp_script,
    jax,
    maxtext,
    megatron,
    nemo,
    onnx_devices,
    pytorch,
    torchtitan,
)
from autopar.frameworks.abilities import ABILITIES, Abilities
from autopar.frameworks.buckets import layer_units, one_size
from autopar.frameworks.export_check import outcome_of
from autopar.frameworks.facts import Facts, read
from autopar.plan import Exported, Plan
from autopar.tactics.stages import layers as layers_of
from autopar.workload import open_plan

__all__ = ["BY_DEGREES", "BY_PLACEMENTS", "Exported", "Facts", "export", "read", "targets"]

BY_DEGREES: dict[str, Callable[[Facts, str], Exported]] = {
    "megatron": megatron.export,
    "torchtitan": torchtitan.export,
    "deepspeed": deepspeed.export,
    "nemo": nemo.export,
    "accelerate": fsdp.export_accelerate,
    "trainer": fsdp.export_trainer,
    "fsdp": fsdp_script.export,
    "maxtext": maxtext.export,
}
"""Frameworks that take degrees; a file also says what it comes to."""

_BY_SIZE = ("megatron", "deepspeed", "nemo", "maxtext")
"""Frameworks that take a size of buckets."""

_STAGE_ORDERS = ("megatron", "nemo")
"""Frameworks that lay data parallelism around pipelines if they are told to."""

_NEIGHBOURS = ("megatron", "nemo", "torchtitan")
"""Frameworks whose groups of experts are neighbours: tensor- and context-parallel devices before data-parallel ones."""

BY_PLACEMENTS: dict[str, Callable[[Plan, Folded], Exported]] = {"jax": jax.export, "pytorch": pytorch.export}
"""Frameworks that take placements of tensors."""


def targets() -> tuple[str, ...]:
    """Return the names of everything a plan can be exported to."""
    return (*BY_DEGREES, *BY_PLACEMENTS, "onnx")


def export(plan: Plan, to: str, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> Exported:
    """Return a plan in the words of a framework, with a list of what of it cannot be said there.

    Args:
        plan: A plan, solved or read from a file.
        to: "megatron", "torchtitan", "deepspeed", "nemo", "accelerate", "trainer", "fsdp" or "maxtext", which take
            degrees; "jax", "pytorch" or "onnx", which take placements.
        model: Where the model is now; None for where it was.
        cache_dir: Where exported Hugging Face models are kept between runs; None to keep
            nothing.

    Raises:
        ExportError: If there is no such framework, or it cannot run anything like the plan.
        InfeasibleError: If what the framework would run does not fit into memory; the hint has a plan that does.
        ModelError: If the model is not there.
        PlanError: If it is another one than the plan was made for.
    """
    if to not in targets():
        raise ExportError(f"plans cannot be exported to {to!r}", hint=f"choose {', '.join(targets())}")
    if to in BY_DEGREES and plan.job.mode != "train":
        raise ExportError(
            f"the plan is for inference; {to} takes training jobs", hint="export --to pytorch, jax or onnx"
        )
    if plan.variants and to != "onnx":
        meshes = "; ".join(
            f"{name_stages(plan.numbers_of(number))}: {variant.device_mesh if variant.mesh else 'one device'}"
            for number, variant in enumerate(plan.all_variants)
        )
        raise ExportError(
            f"stages have meshes or placements of their own ({meshes}); what {to} is told holds for all stages",
            hint="export --to onnx, which is told stage by stage",
        )
    workload = open_plan(plan, model, cache_dir=cache_dir)
    folded = workload.folded(plan.microbatch)
    if to in BY_DEGREES:
        facts = _with_stage_order(read(plan, folded, workload.proto()), to)
        if not ABILITIES[to].shares:
            facts = facts.shared_equally()
        if to in _BY_SIZE:
            facts = replace(facts, bucket=one_size(plan, folded, to))
        if to == "fsdp" and facts.pp == 1:  # it shards by units, and wraps in DistributedDataParallel without sharding
            facts = (
                replace(facts, units=layer_units(plan, folded, layers_of(folded)))
                if facts.zero
                else replace(facts, bucket=one_size(plan, folded, to))
            )
        _check_roles(facts, ABILITIES[to])
        if to in _NEIGHBOURS:
            _check_experts(facts, ABILITIES[to])
        written = BY_DEGREES[to](facts, "")
        return BY_DEGREES[to](facts, outcome_of(plan, to, written, facts, workload, cache_dir).sentence)
    if to in BY_PLACEMENTS:
        return BY_PLACEMENTS[to](plan, folded)
    return onnx_devices.export(plan, folded, workload.proto())


_NAMED = {"tp": "tensor", "cp": "context", "ep": "expert"}


def _check_roles(facts: Facts, ability: Abilities) -> None:
    """Refuse plans whose kinds of parallelism FSDP2 alone has none of.

    Raises:
        ExportError: If the plan has one.
    """
    if ability.schedules:
        return  # trainers of their own code, in which what a configuration lacks can be built
    extra = [
        f"{_NAMED[role]} parallelism of {getattr(facts, role)}"
        for role in _NAMED
        if role not in ability.roles and getattr(facts, role) > 1
    ]
    if facts.pp > 1:
        extra.append(f"a pipeline of {facts.pp}")
    if extra:
        raise ExportError(
            f"the plan has {' and '.join(extra)}; {ability.name} runs none",
            hint="solve --for fsdp searches plans that it runs, or export --to megatron, torchtitan or pytorch",
        )


def _check_experts(facts: Facts, ability: Abilities) -> None:
    """Refuse groups of experts of a size that no group of neighbours has which can be predicted.

    Raises:
        ExportError: If the plan has such groups.
    """
    inside = facts.cp * (facts.tp if facts.etp else 1)
    if facts.ep == 1 or (facts.ep % inside == 0 and facts.dp % (facts.ep // inside) == 0):
        return
    raise ExportError(
        f"experts are dealt out over {facts.ep} devices beside context parallelism of {facts.cp}; {ability.name} deals "
        "them out over neighbours, all context-parallel devices among them",
        hint="solve --for megatron searches plans that it runs; export --to pytorch, jax or onnx takes placements",
    )


def _with_stage_order(facts: Facts, to: str) -> Facts:
    """Return facts that say so if a framework cannot lay data parallelism around pipelines."""
    if not facts.pp_inside or to in _STAGE_ORDERS:
        return facts
    lost = "pipelines inside data parallelism: the framework lays pipelines outside, across nodes"
    return replace(facts, lost=(*facts.lost, lost))

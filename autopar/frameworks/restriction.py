"""A search kept to what one framework runs: the abilities of a framework as pins.

Meshes are pinned with axes named for what they do, so that every plan is one by degrees. What pins cannot say together
is left out: pipelines where they take other ZeRO levels or need equal stages, and tensor parallelism where it excludes
the highest ZeRO level.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

from autopar import models
from autopar.cluster import Cluster, load_cluster
from autopar.configuration import divisors
from autopar.context_parallelism import ATTENTION_LIMITS, CONTEXT_KINDS, AttentionLimit
from autopar.cost import Stack, resolve_stack
from autopar.degrees import SHARD, Degrees
from autopar.errors import ExportError
from autopar.frameworks.abilities import ABILITIES, Abilities, runs
from autopar.frameworks.facts import Sizes, config_sizes, sizes_of
from autopar.huggingface import read_config
from autopar.pins import BlockOffload, BlockRecompute, Choices, Pins
from autopar.plan import DimSize
from autopar.recompute import BY_SECONDS, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.workload import HUGGING_FACE, ZOO

RESTRICTED = tuple(ABILITIES)
"""Frameworks that a search can be kept to; "fsdp" is PyTorch's FSDP2 alone."""
_WIDEST = 8
"""Devices of a tensor- or context-parallel group at most where nodes have fewer, as in the space without pins."""
_LONG = 16_384
"""Tokens of a sequence from which on context parallelism is searched."""
_INFERENCE = "forward-only"


def kept_to(
    framework: str,
    wanted: Pins,
    *,
    model: str | Path,
    gpus: int,
    cluster: str | Path | Cluster,
    dims: Mapping[str, DimSize] | None = None,
    mode: str = "train",
) -> Pins:
    """Return pins that leave what a framework runs, beside those that the user has.

    Args:
        framework: One of `RESTRICTED`.
        wanted: The user's pins, which take the place of those of the framework about the same decision.
        model: Path of an ONNX file, `zoo:NAME` or `hf:PATH`.
        gpus: Number of devices.
        cluster: What the devices are taken from: preset name, YAML file or record.
        dims: Sizes of the model that are set, by name.
        mode: "train" or "infer".

    Raises:
        ExportError: If there is no such framework, or it takes training jobs only.
        ClusterError: If there is no such cluster.
    """
    if framework not in RESTRICTED:
        raise ExportError(f"no search is kept to {framework!r}", hint=f"choose {', '.join(RESTRICTED)}")
    if mode != "train":
        raise ExportError(
            f"the job is inference; {framework} takes training jobs",
            hint="leave --for out; plans for inference are exported --to pytorch, jax or onnx",
        )
    ability = ABILITIES[framework]
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    sizes = _sizes_of_model(str(model))
    set_layers, seq = ((dims or {}).get(name) for name in ("num_layers", "seq"))
    if sizes is not None and isinstance(set_layers, int):
        sizes = replace(sizes, layers=set_layers)
    seq = (0 if sizes is None else sizes.seq) if seq is None else seq
    is_long = isinstance(seq, int) and seq >= _LONG
    has_context = bool(ability.contexts(_limits(sizes)))
    piped = bool(ability.schedules) and not ability.even and ability.zero_in_pipeline == ability.zero
    splits = "tp" in ability.roles and max(ability.zero) in ability.zero_beside_tp
    levels = ability.zero & ability.zero_beside_tp if splits else ability.zero
    stages = [own for own in divisors(gpus) if own == 1 or (piped and sizes is not None and own <= sizes.layers)]
    meshes = tuple(
        mesh
        for count in stages
        for mesh in _meshes(gpus // count, ability, sizes, machine, splits=splits, is_long=is_long and has_context)
    )
    flavours = tuple(str(own) for own in BY_SECONDS if own in ability.recompute and own is not Recompute.OFFLOAD)
    pin = Choices(
        stages=tuple(stages),
        mesh=meshes,
        unequal=(False,),
        sequence_parallel=(False,) if ability.sequence_parallel == {False} else (),
        recompute=(BlockRecompute(flavours),),
        zero=tuple(sorted(levels)),
        hybrid_zero=_hybrid_levels(levels & ability.hybrid),
    )
    hosted = tuple(str(own) for own in Hosted if own not in ability.hosted)
    forbid = Choices(
        context=_lacking_contexts(ability, sizes) if "cp" in ability.roles else (),
        schedule=tuple(own for own in SCHEDULES if own not in (*ability.schedules, "1f1b", _INFERENCE)),
        offload=(BlockOffload(hosted),) if hosted else (),
    )
    return Pins(_beside(wanted.pin, pin, wanted), _beside(wanted.forbid, forbid, wanted))


def none_left(framework: str, gpus: int, global_batch: int | None) -> ExportError:
    """Return the error of a job of which a framework runs no plan.

    Args:
        framework: One of `RESTRICTED`.
        gpus: Number of devices.
        global_batch: Samples of a step if they are stated.
    """
    batch = "" if global_batch is None else f" with {global_batch} samples a step"
    return ExportError(
        f"{framework} runs no plan on {gpus} GPUs{batch}: its data-parallel devices need equally many samples each",
        hint=f"choose a --global-batch that {gpus} divides, fewer GPUs, or another framework",
    )


def runner(framework: str, model: str | Path) -> Callable[[Degrees], bool]:
    """Return a function that tells whether a framework can run a plan by degrees of a model unchanged.

    Args:
        framework: One of `RESTRICTED`.
        model: Path of an ONNX file, `zoo:NAME` or `hf:PATH`.
    """
    return partial(_runs, ABILITIES[framework], _sizes_of_model(str(model)))


def _runs(ability: Abilities, sizes: Sizes | None, degrees: Degrees) -> bool:
    even = not ability.even or sizes is None or sizes.layers % (degrees.pp * degrees.interleave) == 0
    kinds = ability.contexts(_limits(sizes))
    has_context = degrees.cp == 1 or (degrees.cp_kind in kinds if degrees.cp_kind else bool(kinds))
    return even and has_context and _divides_heads(degrees.tp, ability, sizes) and runs(degrees, ability)


def kinds_of_recompute(framework: str, pins: Pins) -> tuple[Pins, ...]:
    """Return pins with one kind of recompute each where a framework has all layers do the same, the fastest kind first.

    There are none where layers may differ, or one kind only is left.

    Args:
        framework: One of `RESTRICTED`.
        pins: As of `kept_to`.
    """
    items = pins.pin.recompute
    if not ABILITIES[framework].recomputes_alike or len(items) != 1 or items[0].blocks is not None:
        return ()
    flavours = sorted(items[0].flavours, key=list(map(str, BY_SECONDS)).index)
    kinds = [replace(pins.pin, recompute=(BlockRecompute((own,)),)) for own in flavours]
    return tuple(Pins(own, pins.forbid) for own in kinds) if len(kinds) > 1 else ()


def stack_kept_to(
    framework: str,
    stack: str | Path | Stack,
    cluster: str | Path | Cluster,
    modules: Sequence[str] = (),
    model: str | Path = "",
) -> Stack:
    """Return a software stack that recomputes selectively and deals out vocabularies as a framework does, or can.

    Plans by degrees have a kind of context parallelism that the framework has for all attention of the model.

    Args:
        framework: One of `RESTRICTED`.
        stack: Name, YAML file or record.
        cluster: What the devices are taken from.
        modules: Modules that the user wants to run again.
        model: Path of an ONNX file, `zoo:NAME` or `hf:PATH`; "" for one without windows, chunks, sinks and masks.

    Raises:
        ClusterError: If there is no such cluster.
        ExportError: If the framework cannot be told to run these modules again.
        StackError: If there is no such stack.
    """
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    ability = ABILITIES[framework]
    in_code = Recompute.SELECTIVE in ability.recompute and ability.selective is None and not ability.recompute_modules
    unknown = [own for own in modules if own not in ability.recompute_modules and not in_code]
    if unknown:
        known = ", ".join(ability.recompute_modules)
        raise ExportError(
            f"{ability.name} cannot be told to run {', '.join(unknown)} again",
            hint=f"choose among {known}" if known else "leave --recompute-modules out",
        )
    found = ability.recomputing(resolve_stack(stack, machine))
    found = replace(found, recompute_among=ability.recompute_modules, uneven=found.uneven and ability.uneven)
    kinds = ability.contexts(_limits(_sizes_of_model(str(model))))
    return found if found.context in kinds or not kinds else replace(found, context=kinds[0])


def _beside(own: Choices, others: Choices, wanted: Pins) -> Choices:
    """Return choices with those of others where the user says nothing of the decision, in either section."""
    said = {*wanted.pin.named, *wanted.forbid.named}
    if wanted.roles:
        said.add("mesh")
    return replace(
        own, **{field.name: getattr(others, field.name) for field in fields(Choices) if field.name not in said}
    )


def _meshes(
    devices: int, ability: Abilities, sizes: Sizes | None, cluster: Cluster, *, splits: bool, is_long: bool
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the meshes of a stage whose axes are data, expert, context and tensor parallel, the last one innermost.

    Experts are dealt out to the axis `ep` and to `cp` beside it. Data-parallel devices are also two axes, the inner one
    of which shares what ZeRO splits.
    """
    widest = max(cluster.devices_per_node, _WIDEST)
    degrees = divisors(devices)
    tps = [own for own in degrees if own == 1 or (splits and own <= widest and _divides_heads(own, ability, sizes))]
    cps = [own for own in degrees if own == 1 or ("cp" in ability.roles and is_long and own <= widest)]
    experts = 0 if sizes is None else sizes.experts
    eps = [own for own in degrees if own == 1 or ("ep" in ability.roles and experts and experts % own == 0)]
    for tp, cp, ep in product(tps, cps, eps):
        if devices % (tp * cp * ep) == 0 and (ep == 1 or experts % (ep * cp) == 0):
            data = devices // (tp * cp * ep)
            axes = {"ep": ep, "cp": cp, "tp": tp}
            for shard in _shards(data, ability, others=sum(size > 1 for size in axes.values())):
                whole = {"dp": data // shard, SHARD: shard, **axes}
                used = tuple((name, size) for name, size in whole.items() if size > 1)
                assert prod(size for _, size in used) == devices, "the axes are all devices"
                yield used or (("dp", 1),)


def _hybrid_levels(levels: frozenset[int]) -> tuple[int, ...]:
    """Return the ZeRO level that is searched in groups, if there is one: a configuration states one for all parameters.

    It is 1 where the framework has it, as instances of Megatron-LM's distributed optimizer have; else the highest one.
    """
    return ((1,) if 1 in levels else (max(levels),)) if levels else ()


def _shards(data: int, ability: Abilities, *, others: int) -> Iterator[int]:
    """Yield how many data-parallel devices share what ZeRO splits while the others hold copies; 1 if that is left open.

    Beside more than one other axis there are no such groups: reshards between placements on four axes take too long.
    """
    yield 1
    if ability.hybrid & ability.zero and others <= 1:
        yield from (own for own in divisors(data) if 1 < own < data)


def _divides_heads(tp: int, ability: Abilities, sizes: Sizes | None) -> bool:
    if sizes is None:
        return True
    return sizes.heads % tp == 0 and (ability.copies_heads or sizes.kv_heads % tp == 0)


def _lacking_contexts(ability: Abilities, sizes: Sizes | None) -> tuple[str, ...]:
    """Return the kinds of context parallelism that a framework lacks: for all attention, then for limited attention.

    A configuration has one kind for all layers, so that a kind which some layers of a model lack is one that all lack.
    """
    left = ability.contexts(_limits(sizes))
    lacking = [own for own in CONTEXT_KINDS if own not in left]
    limited = ability.context_limited.items()
    return (*lacking, *(f"{own}:{limit}" for limit, kinds in limited for own in left if own not in kinds))


def _limits(sizes: Sizes | None) -> frozenset[AttentionLimit]:
    """Return what attention of a model has of windows, chunks, sinks and masks, as far as it is known."""
    if sizes is None or sizes.decoder is None:
        return frozenset()
    parts = [block.attention for block in sizes.decoder.blocks]
    return frozenset(limit for limit in ATTENTION_LIMITS if any(getattr(part, limit, 0) for part in parts))


def _sizes_of_model(model: str) -> Sizes | None:
    """Return the sizes of a decoder of the zoo or of a local configuration; None for other models."""
    if model.startswith(ZOO):
        entry = models.spec(model.removeprefix(ZOO))
        return sizes_of(entry.family, entry.config)
    if model.startswith(HUGGING_FACE):
        return config_sizes(read_config(model.removeprefix(HUGGING_FACE)), {})
    return None

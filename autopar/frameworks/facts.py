"""What the frameworks have words for, read off the records of a plan; and what of the plan they have none for.

A plan places every tensor of every op. A framework takes degrees, a schedule, a recompute policy. `read` turns the one
into the other, and writes down what is lost on the way.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from math import floor, fsum, prod
from typing import Any, Literal

import onnx

from autopar import models
from autopar.context_parallelism import AttentionLimit, ContextKind
from autopar.cost import load_policy
from autopar.cost.overlap import full_bucket
from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.describe.context_kinds import context_kinds, limited_rings, ring_limits
from autopar.errors import ExportError
from autopar.folding.fold import VIEW_KINDS, Folded
from autopar.folding.graph_facts import layer_kinds
from autopar.folding.selective_recompute import modules_of
from autopar.folding.shared_experts import shared_expert_ops
from autopar.frameworks.buckets import OneSize, Units
from autopar.huggingface import default_seq, read_config
from autopar.ir.graph import Phase, Role
from autopar.models.decoder_config import Attention, DecoderConfig, Experts, LatentAttention, Mlp
from autopar.models.decoder_settings import predicting
from autopar.models.gpt import GptConfig
from autopar.models.llama import LlamaConfig
from autopar.models.mixtral import MixtralConfig
from autopar.models.published_decoders import PublishedConfig
from autopar.models.spec import Config
from autopar.pins.levels import levels_of
from autopar.plan import DimSize, Plan
from autopar.recompute import RECOMPUTE_MODULES, Hosted, Recompute
from autopar.sharding import Axis, Shard, parse_placements
from autopar.shares import num_rows
from autopar.tactics.stages import layers as layers_of
from autopar.tactics.stages import moment_elements
from autopar.task import job_costs
from autopar.workload import HUGGING_FACE, ZOO

_FROM_INSIDE = {"tp": 0, "cp": 1, "ep": 2, "dp": 2}
"""Order of roles in the numbering of devices that Megatron, torchtitan and DeepSpeed use, the innermost first."""
_FEW = 0.001
"""Share of the matrices that may be copied without a word: frameworks copy routers, too."""
_NAMED = 3
"""Parameters named in a sentence before the rest is counted."""
_DATA_ROLES = {"dp": "data-parallel", "cp": "context-parallel"}
"""Roles of an axis on which frameworks replicate weights, in words."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a transformer decoder, as far as they are known.

    Attributes:
        layers: Equal blocks of the chain.
        hidden: Model width.
        heads: Query heads.
        kv_heads: Key and value heads.
        ffn: Width of the MLP.
        seq: Tokens per sequence.
        vocab: Tokens in the vocabulary.
        experts: Experts per layer; 0 for a dense model.
        top_k: Experts per token.
        family: Family of the zoo.
        tied: Whether the head is the token embedding.
        rope_theta: Base of the rotary frequencies; 0 if it is not known or there are none.
        head_size: Width of a head; 0 for `hidden / heads`.
        capacity: Places of an expert relative to its even share of tokens; 0 if experts drop no token.
        decoder: All that is known of a decoder that autopar builds from its configuration.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    family: str = ""
    tied: bool = False
    rope_theta: float = 0.0
    head_size: int = 0
    capacity: float = 0.0
    decoder: DecoderConfig | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Facts:
    """A plan in degrees.

    Attributes:
        plan: The plan.
        axes: What every mesh axis does.
        dp: Data-parallel degree, expert groups included.
        tp: Tensor-parallel degree.
        pp: Groups of devices in the pipeline.
        cp: Context-parallel degree.
        cp_kinds: How attention gets at positions of other devices, per context-parallel axis from inside, without
            repetition.
        ep: Expert-parallel degree: devices of any kind that have different experts.
        ep_data: Data-parallel devices among these, which have different experts.
        etp: 1 if tensor-parallel devices have different experts, whole ones; else 0.
        zero: ZeRO level over the data-parallel devices, the highest of the axes.
        sequence_parallel: Whether what tensor-parallel devices would copy is split along the sequence.
        interleave: Stages per group of devices.
        microbatch: Samples of one microbatch per data-parallel device.
        layers: Layers of every stage in the order of the chain.
        recompute: What the layers of every stage run again; nothing where their values lie in host memory.
        offloaded: Layers of every stage whose values lie in host memory.
        offloads_first: Whether these are the first layers of their stages.
        hosted: Stages whose optimizer state lies in host memory, or a part of it.
        hosted_shares: How much of the optimizer's state of each of these lies there.
        hosted_state: What of the state of their blocks lies there.
        sizes: Sizes of the model; None if the plan is for a file that does not say.
        lost: What degrees cannot say of the plan, a sentence each.
        recompute_modules: Modules of a layer that selective recompute runs again, of `RECOMPUTE_MODULES`.
        modules: Names of the modules of the layers, in order; empty if some layer has none of its own.
        recompute_beside: Kinds of ops that it runs again beside these.
        bucket: The best buckets of one size, where the plan has buckets of its own; None where it has none.
        units: The best units of whole layers likewise.
        ring_limits: What attention in rings has of windows, chunks, sinks and masks.
        shared_experts: Whether layers have experts that every token uses, beside routed ones.
        shares: Data-parallel devices and the microbatches of each, where they have different numbers of them.
    """

    plan: Plan
    axes: tuple[AxisRole, ...]
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    ep_data: int
    etp: int
    zero: int
    sequence_parallel: bool
    interleave: int
    microbatch: int
    layers: tuple[int, ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    offloaded: tuple[int, ...]
    offloads_first: bool
    hosted: tuple[int, ...]
    hosted_shares: tuple[float, ...]
    hosted_state: Hosted
    sizes: Sizes | None
    lost: tuple[str, ...]
    recompute_modules: tuple[str, ...] = ()
    recompute_beside: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    bucket: OneSize | None = None
    units: Units | None = None
    cp_kinds: tuple[ContextKind, ...] = ()
    ring_limits: frozenset[AttentionLimit] = frozenset()
    shared_experts: bool = False
    shares: tuple[tuple[int, int], ...] = ()

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step, of the devices that have most if there are shares."""
        if self.shares:
            return max(each for _, each in self.shares)
        return self.plan.job.global_batch // (self.dp * self.microbatch)

    def shared_equally(self) -> "Facts":
        """Return the plan without shares, with the largest microbatch up to its own that equal shares can have.

        Raises:
            ExportError: If the data-parallel devices cannot share the batch equally.
        """
        if not self.shares:
            return self
        batch, counts = self.plan.job.global_batch, " and ".join(f"{count} x {each}" for count, each in self.shares)
        if batch % self.dp:
            raise ExportError(
                f"the plan has shares of {counts} microbatches; equal ones of {batch} samples for {self.dp} devices, "
                "which is what the framework runs, there are none",
                hint="export --to fsdp, which runs shares",
            )
        size = next(size for size in range(self.microbatch, 0, -1) if batch // self.dp % size == 0)
        lost = f"shares of {counts} microbatches: all data-parallel devices run equally many"
        return replace(self, shares=(), microbatch=size, lost=(*self.lost, lost))

    @property
    def hosted_share(self) -> float:
        """How much of the optimizer's state frameworks are told to put in host memory: the largest share of a stage.

        Four digits, rounded down: a framework that takes parameters until a share is reached takes one more otherwise.
        """
        largest = max(self.hosted_shares, default=0.0)
        return largest if largest in (0.0, 1.0) else max(1e-4, floor(largest * 1e4) / 1e4)

    @property
    def cp_kind(self) -> ContextKind | Literal[""]:
        """The kind of context parallelism over the outermost of its axes; "" without any."""
        return self.cp_kinds[-1] if self.cp_kinds else ""

    @property
    def gpus(self) -> int:
        """Devices by degrees."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def pp_inside(self) -> bool:
        """Whether data parallelism lies around pipelines."""
        return "numbered" in self.plan.job.cluster

    @property
    def predictions(self) -> tuple[int, ...]:
        """Modules of multi-token prediction per stage: the blocks before the last one, which has the head."""
        last = self.plan.stages[-1].blocks[1] - 1
        modules = set(range(last - self.mtp, last))
        return tuple(len(modules & set(range(*stage.blocks))) for stage in self.plan.stages)

    @property
    def mtp(self) -> int:
        """Further tokens that the model predicts in training."""
        return self.sizes.decoder.mtp if self.sizes is not None and self.sizes.decoder is not None else 0

    @property
    def is_even(self) -> bool:
        """Whether all stages have as many layers."""
        return len(set(self.layers)) == 1

    @property
    def layers_of_groups(self) -> tuple[int, ...]:
        """Layers of every group of devices, where a framework has one stage on each."""
        found: dict[tuple[int, int], int] = {}
        for stage, layers in zip(self.plan.stages, self.layers, strict=True):
            found[stage.devices] = found.get(stage.devices, 0) + layers
        return tuple(found.values())

    @property
    def bucket_bytes(self) -> float:
        """Bytes of a full bucket of gradients."""
        if self.bucket is not None:
            return self.bucket.nbytes
        return full_bucket(Axis("dp", max(2, self.dp * self.cp), 1))

    @property
    def bucket_elements(self) -> int:
        """Gradients of a full bucket, counted one by one."""
        if self.bucket is not None:
            return self.bucket.elements
        return round(self.bucket_bytes / load_policy(self.plan.job.precision).gradient_wire)

    @property
    def is_latent(self) -> bool:
        """Whether attention is latent (MLA)."""
        decoder = None if self.sizes is None else self.sizes.decoder
        return decoder is not None and any(isinstance(own.attention, LatentAttention) for own in decoder.blocks)

    @property
    def flavours(self) -> Counter[Recompute]:
        """How many layers recompute what."""
        return Counter(flavour for stage in self.recompute for flavour in stage)

    @property
    def sharded(self) -> int:
        """Product of the data axes whose devices share anything (ZeRO above 0)."""
        return prod(found.axis.size for found in self.axes if found.role == "dp" and found.zero)

    @property
    def shards_apart(self) -> bool:
        """Whether data-parallel devices share over an axis outside one whose devices hold copies."""
        data = sorted((found for found in self.axes if found.role == "dp"), key=lambda found: found.axis.stride)
        return any(found.zero for found in data[1:]) and not data[0].zero


def read(plan: Plan, folded: Folded, model: onnx.ModelProto | None = None) -> Facts:
    """Return a plan in degrees.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
        model: The model of the plan, which states its sizes if the zoo wrote it; None if it need not be asked.

    Raises:
        ExportError: If an axis of the mesh is nothing that degrees have a word for, so that no degrees make the plan.
    """
    axes = roles_of_axes(plan.mesh, plan.blocks, folded)
    used = [found for found in axes if found.axis.size > 1]
    lost: list[str] = []
    dp, tp, cp = (prod(found.axis.size for found in used if found.role == role) for role in ("dp", "tp", "cp"))
    for found in used:
        name, size = found.axis.name, found.axis.size
        if found.role == "spatial":
            raise ExportError(
                f"mesh axis {name!r} splits height or width of images {size} ways; the framework has no word for that",
                hint="export --to pytorch, jax or onnx, which take placements",
            )
        if found.role == "idle":
            raise ExportError(
                f"the {size} devices of mesh axis {name!r} do the same work: they split neither data nor parameters",
                hint="plan for fewer GPUs, or export --to pytorch, jax or onnx",
            )
        if found.role == "ep":
            dp *= size
            lost.append(
                f"axis {name!r} (size {size}) splits experts only, its devices do all else alike; it is exported as "
                "data parallel, too"
            )
        if found.role == "tp" and found.in_part:
            lost.append(f"axis {name!r} is tensor parallel in part of the parameters only; the framework splits all")
    shards = [found.axis.stride for found in used if found.role == "dp" and found.zero]
    levels = {  # devices outside those that share may hold copies
        found.axis.name: found.zero
        for found in used
        if found.role in ("cp", "ep")
        or (found.role == "dp" and (found.zero or not shards or found.axis.stride < max(shards)))
    }
    by_axis = ", ".join(f"{name}: {level}" for name, level in levels.items())
    if len(set(levels.values()) - {0}) > 1:
        lost.append(f"ZeRO levels differ by axis ({by_axis}); the highest is exported for all")
    elif cp > 1 and len(set(levels.values())) > 1:
        lost.append(f"ZeRO holds on some axes only ({by_axis}); frameworks share over data and context together")
    lost += _mixed_levels(plan, folded, {found.axis.name: found.zero for found in used if found.role == "dp"})
    split_by_sequence = [found for found in used if found.role == "tp" and found.sequence_parallel]
    if split_by_sequence and len(split_by_sequence) < sum(found.role == "tp" for found in used):
        lost.append("only some of the tensor-parallel axes split values between blocks along the sequence")
    dealt = [found for found in used if _deals(found)]
    whole = tp > 1 and prod(found.axis.size for found in dealt if found.role == "tp") == tp
    lost += _order(used) + _expert_groups(used, whole=whole) + _against_roles(plan, folded, axes)
    if plan.model.trained:
        adapters = f", adapters of LoRA {plan.job.lora}" if plan.job.lora else ""
        lost.append(
            f"only {plan.model.trained} of {plan.model.num_parameters} parameters are trained{adapters}: "
            "the framework trains what its own settings say"
        )
    kinds = _context_kinds(plan, folded, used, lost)
    layers = _layers(plan, folded)
    flavours = tuple(_flavours(plan, layers))
    groups = len({stage.devices for stage in plan.stages})
    samples = plan.microbatch
    if samples % dp:
        raise ExportError(
            f"a microbatch of {samples} samples is not divisible by the data-parallel degree {dp}",
            hint="export --to pytorch, jax or onnx, which take placements",
        )
    modules, beside = _selective(plan, folded)
    return Facts(
        plan=plan,
        axes=axes,
        dp=dp,
        tp=tp,
        pp=groups,
        cp=cp,
        ep=prod(found.axis.size for found in dealt),
        ep_data=prod(found.axis.size for found in dealt if found.role in ("dp", "ep")),
        etp=1 if whole else 0,
        zero=max(levels.values(), default=0),
        sequence_parallel=bool(split_by_sequence),
        interleave=len(plan.stages) // groups,
        microbatch=samples // dp,
        layers=tuple(len(stage) for stage in layers),
        recompute=tuple(tuple(_RERUN.get(flavour, flavour) for flavour in stage) for stage in flavours),
        offloaded=tuple(stage.count(Recompute.OFFLOAD) for stage in flavours),
        offloads_first=all(set(stage[: stage.count(Recompute.OFFLOAD)]) <= {Recompute.OFFLOAD} for stage in flavours),
        hosted=tuple(index for index, stage in enumerate(plan.stages) if stage.offload),
        hosted_shares=_hosted_shares(plan, folded),
        hosted_state=next((stage.hosted_state for stage in plan.stages if stage.offload), Hosted.OPTIMIZER),
        sizes=_sizes(plan, model),
        lost=tuple(lost),
        recompute_modules=modules,
        recompute_beside=beside,
        ring_limits=ring_limits(plan.blocks, folded),
        shared_experts=bool(shared_expert_ops(folded)),
        modules=_layer_modules(folded),
        cp_kinds=kinds,
        shares=tuple((share.num_rows * dp // num_rows(plan.shares), share.num_microbatches) for share in plan.shares),
    )


def _hosted_shares(plan: Plan, folded: Folded) -> tuple[float, ...]:
    """Return which share of the optimizer's state lies in host memory, of each stage that has any there."""
    sizes, found = moment_elements(folded), list[float]()
    for stage in plan.stages:
        if stage.offload:
            each = [sizes[kind] for kind in folded.chain[slice(*stage.blocks)]]
            total = fsum(each)
            away = fsum(size for size, is_away in zip(each, stage.hosted, strict=True) if is_away)
            found.append(away / total if total else 1.0)
    return tuple(found)


def _selective(plan: Plan, folded: Folded) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the modules that run again in layers that recompute selectively, and the kinds of ops beside them."""
    known = modules_of(folded, job_costs(plan.job))
    layers = layer_kinds(folded)
    found: set[str] = set()
    left: set[str] = set()
    for block in plan.blocks:
        if block.kind not in layers or not block.selective:
            continue
        names = frozenset(block.selective)
        covered = {module: ops for module, ops in known[block.kind].items() if ops <= names}
        found |= covered.keys()
        beside = names.difference(*covered.values())
        left |= {op.kind for op in folded.kinds[block.kind].ops if op.name in beside and op.kind not in VIEW_KINDS}
    whole = {part for module, parts in _PARTS.items() if module in found for part in parts}
    return tuple(name for name in RECOMPUTE_MODULES if name in found - whole), frozenset(left)


def _layer_modules(folded: Folded) -> tuple[str, ...]:
    """Return the names that all parameters of a layer begin with, layer by layer."""
    modules = tuple(_owners(folded, layers_of(folded)).values())
    return modules if all(modules) and len(set(modules)) == len(modules) else ()


def _owners(folded: Folded, blocks: Iterable[int]) -> dict[int, str]:
    """Return the innermost module that has all parameters of a block, by block."""
    parameters = {state.input for state in folded.graph.states if state.role is Role.PARAMETER}
    names: dict[int, set[str]] = {index: set() for index in blocks}
    for op in folded.graph.ops:
        if op.block in names and op.phase is Phase.FORWARD:
            names[op.block] |= parameters.intersection(op.inputs)
    return {index: _common_owner(own) for index, own in names.items()}


def block_modules(folded: Folded) -> dict[int, str]:
    """Return the modules that have the parameters of one block and of no other, by block; blocks without are left out.

    >>> from autopar.workload import open_workload
    >>> block_modules(open_workload("zoo:gpt2", dims={"num_layers": 2}).folded(1))
    {0: 'embed', 1: 'layers.0', 2: 'layers.1'}
    """
    owners = _owners(folded, range(len(folded.chain)))

    def is_alone(index: int) -> bool:
        paths = [f"{name}." for other, name in owners.items() if other != index and name]
        return not any(path.startswith(f"{owners[index]}.") for path in paths)

    return {index: name for index, name in owners.items() if name and is_alone(index)}


def _common_owner(names: Iterable[str]) -> str:
    """Return the innermost module that has all of some parameters.

    >>> _common_owner(["layers.1.attn.q.weight", "layers.1.attn_norm.weight"])
    'layers.1'
    """
    paths = [name.split(".")[:-1] for name in names]
    common = [part[0] for part in takewhile(lambda part: len(set(part)) == 1, zip(*paths, strict=False))]
    return ".".join(common)


_SOME_PARAMETERS = 0.05
"""Share of the parameters from which on another ZeRO level is told."""
_PARTS = {"mlp": ("activation",), "moe": ("moe_act", "shared_experts", "activation"), "shared_experts": ("activation",)}
"""Modules that are parts of another one."""


def _mixed_levels(plan: Plan, folded: Folded, levels: Mapping[str, int]) -> list[str]:
    """Return on which data-parallel axes parameters have several ZeRO levels, of which one is exported for all.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
        levels: The level of most parameters by axis.
    """
    sizes: dict[str, Counter[int]] = {}
    elements = {own.value.name: own.count * own.value.size for own in folded.parameters}
    for name, axis, own in levels_of(plan, folded):
        if axis in levels and len(own) == 1:
            sizes.setdefault(axis, Counter())[max(own)] += elements.get(name, 0)
    found = []
    for axis, counts in sizes.items():
        others = 1.0 - counts[levels[axis]] / max(1, counts.total())
        if others > _SOME_PARAMETERS:
            found.append(
                f"ZeRO levels that differ by parameter (axis {axis!r}: not {levels[axis]} in {others:.0%}); "
                f"{levels[axis]} is exported for all"
            )
    return found


def _context_kinds(plan: Plan, folded: Folded, used: Sequence[AxisRole], lost: list[str]) -> tuple[ContextKind, ...]:
    """Return the kind of context parallelism of most attention ops per axis, from inside, without repetition."""
    by_axis, found = context_kinds(plan.mesh, plan.blocks, folded), dict[ContextKind, None]()
    for own in sorted((own for own in used if own.role == "cp"), key=lambda own: own.axis.stride):
        counts = by_axis[own.axis.name]
        if len(counts) > 1:
            told = ", ".join(f"{kind} in {count}" for kind, count in sorted(counts.items()))
            lost.append(f"context parallelism differs by layer ({told} over axis {own.axis.name!r})")
        if own.context is not None:
            found[own.context] = None
    limited = limited_rings(plan.blocks, folded)
    if limited:
        lost.append(
            f"attention with windows, chunks, sinks or masks in rings ({limited} layers): frameworks pass keys and "
            "values round for full attention only"
        )
    return tuple(found)


def _order(used: Sequence[AxisRole]) -> list[str]:
    """Return that devices are numbered otherwise than frameworks number them, if they are."""
    inner = sorted(used, key=lambda found: found.axis.stride)
    ranks = [_FROM_INSIDE[found.role] for found in inner]
    if ranks == sorted(ranks):
        return []
    order = " inside ".join(f"{found.axis.name} ({found.role})" for found in inner)
    return [f"devices are numbered {order}; frameworks put tensor parallel innermost, then context, then data"]


def _deals(found: AxisRole) -> bool:
    """Whether devices of an axis have different experts."""
    return found.role == "ep" or (found.role in _FROM_INSIDE and found.experts)


def _expert_groups(used: Sequence[AxisRole], *, whole: bool) -> list[str]:
    """Return which experts are dealt out otherwise than to neighbours, as frameworks do, if they are.

    Args:
        used: Axes of more than one device.
        whole: Whether all tensor-parallel devices have different experts.
    """
    dealt = [found for found in used if _deals(found)]
    if not dealt:
        return []
    if not whole and any(found.role == "tp" for found in dealt):
        return ["some of the tensor-parallel devices have different experts and some parts of the same"]
    between = sorted((found for found in used if whole or found.role != "tp"), key=lambda found: found.axis.stride)
    deals = [_deals(found) for found in between]
    if deals == sorted(deals, reverse=True):
        return []
    order = " inside ".join(f"{found.axis.name} ({found.role}{', experts' * _deals(found)})" for found in between)
    return [f"experts are not dealt out to neighbours: {order}; frameworks deal them out along the inner axes first"]


def _against_roles(plan: Plan, folded: Folded, axes: Sequence[AxisRole]) -> list[str]:
    """Return the matrices that ops use otherwise than the role of an axis says."""
    values = folded.graph.values
    parameters = {state.input for state in folded.graph.states if state.role is Role.PARAMETER}
    copied: dict[str, list[str]] = {}
    split: dict[tuple[str, str], list[str]] = {}
    for block in plan.blocks:
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            if op.phase is not Phase.FORWARD:
                continue
            for name, text in zip(op.inputs, placed.inputs, strict=True):
                if name not in parameters or len(values[name].shape) < 2:
                    continue
                for found, placement in zip(axes, parse_placements(text), strict=True):
                    if found.axis.size == 1:
                        continue
                    is_split = isinstance(placement, Shard)
                    if found.role == "tp" and not is_split:
                        copied.setdefault(found.axis.name, []).append(name)
                    elif found.role in ("dp", "cp") and is_split and not found.experts:
                        split.setdefault((found.axis.name, found.role), []).append(name)
    matrices = sum(value.size for value in folded.graph.parameters if len(value.shape) > 1)
    lost = [
        f"tensor-parallel axis {axis!r} copies {_some(names)}"
        for axis, names in copied.items()
        if sum(values[name].size for name in set(names)) > _FEW * matrices
    ]
    return lost + [
        f"tensor-parallel on the {_DATA_ROLES[role]} axis {axis!r}, exported as replicated: {_some(names)}"
        for (axis, role), names in split.items()
    ]


def _some(names: Iterable[str]) -> str:
    """Return names for reading, the first three and how many more there are."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")


def _layers(plan: Plan, folded: Folded) -> tuple[tuple[int, ...], ...]:
    """Return the layers of every stage."""
    own = set(layers_of(folded))
    return tuple(tuple(index for index in range(*stage.blocks) if index in own) for stage in plan.stages)


_RERUN = {Recompute.OFFLOAD: Recompute.NONE}


def offloads_lost(plan: Plan, *, states: bool = True) -> list[str]:
    """Return what a framework that keeps everything on devices does not take, a sentence each; or but `states`."""
    lost = []
    blocks = sum(stage.flavours.count(Recompute.OFFLOAD) for stage in plan.stages)
    if blocks:
        lost.append(f"activations in host memory ({blocks} blocks)")
    stages = sum(bool(stage.offload) for stage in plan.stages)
    if stages and states:
        what = STATE_WORDS[next(stage.hosted_state for stage in plan.stages if stage.offload)]
        lost.append(f"{what} in host memory ({stages} of {len(plan.stages)} stages)")
    return lost


STATE_WORDS = {
    Hosted.OPTIMIZER: "the optimizer's state",
    Hosted.UPDATE: "the optimizer's state and its update",
    Hosted.GRADIENTS: "gradients, the optimizer's state and its update",
    Hosted.PARAMETERS: "parameters, gradients, the optimizer's state and its update",
}
"""What of the state lies in host memory, in words."""


def state_lost(facts: Facts, runs: Hosted, framework: str) -> list[str]:
    """Return what a framework does otherwise that keeps other state in host memory, a sentence each."""
    what = facts.hosted_state
    if runs is what:
        return []
    if what is Hosted.OPTIMIZER:
        return [ON_CPU]
    return [f"what lies in host memory: {framework} keeps {STATE_WORDS[runs]} there, not {STATE_WORDS[what]}"]


ON_CPU = (
    "where the optimizer runs: the plan brings its state to the device for the update, the framework updates on the "
    "CPU, so that gradients and parameters cross the host link instead"
)
"""What a framework that offloads the optimizer does otherwise."""


def _flavours(plan: Plan, layers: Iterable[tuple[int, ...]]) -> Iterable[tuple[Recompute, ...]]:
    for stage, indices in zip(plan.stages, layers, strict=True):
        yield tuple(stage.flavours[index - stage.blocks[0]] for index in indices)


def sizes_of(family: str, config: Config) -> Sizes | None:
    """Return the sizes of a decoder of the zoo, None for other families."""
    match config:
        case GptConfig():
            return Sizes(
                config.num_layers, config.hidden, config.heads, config.heads, 4 * config.hidden, config.seq,
                config.vocab, family=family, tied=config.tied,
            )  # fmt: skip
        case PublishedConfig():
            return config_sizes(config.configuration, {"seq": config.seq, "mtp": config.mtp})
        case LlamaConfig():
            return Sizes(
                config.num_layers, config.hidden, config.heads, config.kv_heads, config.ffn, config.seq,
                config.vocab, family=family, rope_theta=config.rope_theta,
            )  # fmt: skip
        case MixtralConfig():
            return Sizes(
                config.num_layers, config.hidden, config.heads, config.kv_heads, config.ffn, config.seq,
                config.vocab, config.experts, config.top_k, family=family, rope_theta=config.rope_theta,
                capacity=config.capacity_factor,
            )  # fmt: skip
    return None


def _sizes(plan: Plan, model: onnx.ModelProto | None) -> Sizes | None:
    """Return the sizes of the model of a plan, None if neither its source nor the model states them."""
    source = plan.model.source
    if source.startswith(HUGGING_FACE):
        return config_sizes(read_config(source.removeprefix(HUGGING_FACE)), dict(plan.model.dims))
    if not source.startswith(ZOO):
        return None if model is None else _stated(plan, model)
    entry = models.spec(source.removeprefix(ZOO))
    known = {field.name: getattr(entry.config, field.name) for field in fields(entry.config)}
    changed = {name: type(known[name])(value) for name, value in plan.model.dims}
    return sizes_of(entry.family, replace(entry.config, **changed))


def _stated(plan: Plan, model: onnx.ModelProto) -> Sizes | None:
    """Return the sizes that the metadata of a file of the zoo state, if the plan's parameters are of these sizes."""
    stated = models.sizes_of(model)
    if stated is None or models.num_parameters(models.build_config(*stated)) != plan.model.num_parameters:
        return None
    return sizes_of(*stated)


_USUAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def _decoder_sizes(family: str, decoder: DecoderConfig) -> Sizes | None:
    """Return the sizes of a decoder, None if not each of its blocks is an attention and an MLP."""
    attentions = [own.attention for own in decoder.blocks if isinstance(own.attention, Attention | LatentAttention)]
    if len(attentions) < decoder.num_layers or any(block.mlp is None for block in decoder.blocks):
        return None
    attention = attentions[0]
    mixtures = [block.mlp for block in decoder.blocks if isinstance(block.mlp, Experts)]
    dense = [block.mlp.width for block in decoder.blocks if isinstance(block.mlp, Mlp)]
    latent = isinstance(attention, LatentAttention)
    size = attention.plain + attention.rope.size if isinstance(attention, LatentAttention) else attention.size
    theta = next((block.rope.theta for block in decoder.blocks if block.rope is not None), 0.0)
    return Sizes(
        decoder.num_layers, decoder.hidden, attention.heads,
        attention.heads if isinstance(attention, LatentAttention) else attention.kv_heads,
        dense[0] if dense else mixtures[0].width, decoder.seq, decoder.vocab,
        experts=mixtures[0].count if mixtures else 0, top_k=mixtures[0].top_k if mixtures else 0,
        family="gpt" if family == "gpt2" else family, tied=decoder.tied, rope_theta=theta,
        head_size=0 if latent or size * attention.heads == decoder.hidden else size, decoder=decoder,
    )  # fmt: skip


def config_sizes(config: Mapping[str, Any], dims: Mapping[str, DimSize]) -> Sizes | None:
    """Return the sizes of a decoder that a Hugging Face configuration states, None if it is another kind of model."""
    family = str(config["model_type"])
    given = dims.get("seq")
    seq = given if isinstance(given, int) else default_seq(config)
    native = models.read_architecture(config, seq)
    if isinstance(native, DecoderConfig):
        depth = dims.get("mtp", 0)
        return _decoder_sizes(family, predicting(native, depth if isinstance(depth, int) else 0))
    if "rms_norm_eps" not in config or not all(isinstance(config.get(name), int) for name in _USUAL):
        return None
    layers, hidden, heads, vocab = (config[name] for name in _USUAL)
    return Sizes(
        layers,
        hidden,
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("intermediate_size") or 4 * hidden,
        seq,
        vocab,
        family=family,
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(config.get("rope_theta") or 0.0),
        head_size=config.get("head_dim") or 0,
    )

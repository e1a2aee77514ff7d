"""What each framework can run, as restrictions of the space of plans: one row per framework.

The rows have two uses. A plan that a framework cannot run is brought to the nearest one that it can (`nearest`), which
is predicted before it is exported. And a search for one framework only (`autopar solve --for NAME`) is kept to the rows
as pins (`autopar.frameworks.restriction`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.context_parallelism import ATTENTION_LIMITS, AttentionLimit, ContextKind
from autopar.cost.stack import Selective, Stack
from autopar.degrees import Degrees
from autopar.frameworks.facts import Facts
from autopar.recompute import RECOMPUTE_MODULES, STATE_KINDS, Hosted, Recompute, share_of

_ON_DEVICE = frozenset({Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL})


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a framework can run.

    Attributes:
        name: Its name in sentences.
        schedules: Pipeline schedules, keys of `autopar.schedule.SCHEDULES`, the one that stands in for others first;
            none if there are no pipelines.
        zero: ZeRO levels without a pipeline.
        zero_in_pipeline: ZeRO levels in a pipeline.
        recompute: What layers may keep of their forward.
        recompute_modules: Modules that it can be told to run again; none if it decides itself.
        selective: What its selective recompute runs again whatever a plan says, as of `Stack.selective`; None where
            modules or the code of the model say it.
        recomputes_by_stage: Whether the first layers of every stage may recompute and the others not.
        recomputes_alike: Whether all layers of a search for it recompute the same, so that its configuration says all.
        context: Kinds of context parallelism, the one that stands in for others first.
        context_limited: Those of attention with a window, chunks, sinks, or a mask that is an input, where these are
            fewer.
        hosted: What may lie in host memory.
        hosted_shares: ZeRO levels with which a share of the optimizer's state may lie there, and not only all of it.
        roles: Kinds of parallelism beside data and pipeline parallelism: "tp", "cp", "ep".
        sequence_parallel: Whether what tensor-parallel devices would copy may be split along the sequence, or must be.
        even: Whether all stages need as many layers.
        copies_heads: Whether tensor parallelism may have more devices than there are key-value heads.
        zero_beside_tp: ZeRO levels beside tensor parallelism.
        shares: Whether data-parallel devices may run different numbers of microbatches.
        hybrid: ZeRO levels that may share over some of the data-parallel devices and copy over the others.
        uneven: Whether it pads a vocabulary that devices do not divide, or deals it out in uneven blocks.
    """

    name: str
    schedules: tuple[str, ...]
    zero: frozenset[int]
    zero_in_pipeline: frozenset[int]
    recompute: frozenset[Recompute]
    recomputes_by_stage: bool
    hosted: frozenset[Hosted]
    roles: frozenset[str]
    sequence_parallel: frozenset[bool]
    even: bool = False
    copies_heads: bool = False
    zero_beside_tp: frozenset[int] = frozenset(range(4))
    hybrid: frozenset[int] = frozenset(range(1, 4))
    recompute_modules: tuple[str, ...] = ()
    selective: Selective | None = None
    hosted_shares: frozenset[int] = frozenset()
    recomputes_alike: bool = True
    context: tuple[ContextKind, ...] = ()
    context_limited: Mapping[AttentionLimit, tuple[ContextKind, ...]] = field(default_factory=dict)
    uneven: bool = True
    shares: bool = False

    def contexts(self, limits: Iterable[AttentionLimit] = ()) -> tuple[ContextKind, ...]:
        """Return the kinds of context parallelism of attention with some limits, or of all attention of a model.

        >>> ABILITIES["megatron"].contexts(), ABILITIES["megatron"].contexts(["window"])
        (('ring', 'gather', 'ulysses'), ('gather', 'ulysses'))
        """
        kinds = [self.context_limited.get(limit, self.context) for limit in limits]
        return tuple(own for own in self.context if all(own in each for each in kinds))

    def recomputing(self, stack: Stack, modules: tuple[str, ...] = ()) -> Stack:
        """Return a stack whose selective recompute runs again what the framework runs again.

        Args:
            stack: The stack.
            modules: Modules that the framework is told to run again.
        """
        if self.selective is None:
            return stack.recomputing(modules)
        return replace(stack, selective=self.selective, recompute_modules=(), recompute_among=())


_MEGATRON = Abilities(
    "Megatron-LM",
    schedules=("1f1b", "interleaved", "1f1b-a2a"),
    zero=frozenset({0, 1, 2, 3}),
    zero_in_pipeline=frozenset({0, 1, 2, 3}),
    recompute=_ON_DEVICE | {Recompute.OFFLOAD},
    recomputes_by_stage=True,
    hosted=frozenset({Hosted.ACTIVATIONS, Hosted.UPDATE}),
    roles=frozenset({"tp", "cp", "ep"}),
    sequence_parallel=frozenset({True, False}),
    copies_heads=True,
    hosted_shares=frozenset({1, 2, 3}),
    # `activation` is not among them: Megatron-Core runs a dense MLP again whole or not at all.
    recompute_modules=tuple(own for own in RECOMPUTE_MODULES if own != "activation"),
    context=("ring", "gather", "ulysses"),
    # Transformer Engine: windows with all_gather and a2a, sinks (softmax_type) with a2a, no masks that are inputs.
    context_limited={
        "window": ("gather", "ulysses"),
        "chunk": ("gather", "ulysses"),
        "sinks": ("ulysses",),
        "mask": (),
    },
)

_FSDP2 = Abilities(
    "FSDP2",
    schedules=(),
    # Parameters stay split between steps: without resharding after the forward that is ZeRO 2.
    zero=frozenset({0, 2, 3}),
    zero_in_pipeline=frozenset(),
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    recomputes_by_stage=False,
    hosted=frozenset({Hosted.PARAMETERS}),
    roles=frozenset(),
    sequence_parallel=frozenset({False}),
    context=("gather", "ring"),
    # torch.distributed.tensor.experimental.context_parallel: plain causal attention alone.
    context_limited=dict.fromkeys(ATTENTION_LIMITS, ()),
)

ABILITIES: Mapping[str, Abilities] = {
    "megatron": _MEGATRON,
    "nemo": replace(_MEGATRON, name="Megatron-Bridge"),
    "torchtitan": Abilities(
        "torchtitan",
        schedules=("1f1b", "gpipe", "interleaved", "zb-v", "dualpipe-v"),
        zero=_FSDP2.zero,
        zero_in_pipeline=_FSDP2.zero,
        recompute=_ON_DEVICE,
        recomputes_by_stage=False,
        hosted=frozenset(),
        roles=frozenset({"tp", "cp", "ep"}),
        sequence_parallel=frozenset({True, False}),
        selective="alternate",
        context=("gather",),  # FlexAttention, whose masks are of any kind
    ),
    "deepspeed": Abilities(
        "DeepSpeed",
        schedules=("1f1b",),
        zero=frozenset({0, 1, 2, 3}),
        zero_in_pipeline=frozenset({0, 1}),
        recompute=_ON_DEVICE,
        recomputes_by_stage=True,
        recomputes_alike=False,  # its layers are checkpointed in the model's code
        hosted=frozenset({Hosted.GRADIENTS, Hosted.PARAMETERS}),
        roles=frozenset({"tp", "ep"}),
        sequence_parallel=frozenset({False}),
        zero_beside_tp=frozenset({0, 1, 2}),
        hybrid=frozenset({3}),  # MiCS
        hosted_shares=frozenset({3}),  # offload_optimizer.ratio
        context=("ulysses",),
    ),
    "accelerate": replace(
        _FSDP2,
        name="accelerate",
        hosted=frozenset(),
        roles=frozenset({"tp", "cp"}),
        zero_beside_tp=frozenset({2, 3}),
    ),
    "trainer": replace(_FSDP2, name="the Trainer of transformers", hosted=frozenset(), hybrid=frozenset()),
    "fsdp": replace(_FSDP2, shares=True),
    "maxtext": Abilities(
        "MaxText",
        # A pipeline of MaxText is a loop whose backward is made by differentiation: all forwards come first.
        schedules=("gpipe",),
        zero=frozenset({0, 3}),
        zero_in_pipeline=frozenset({0, 3}),
        recompute=_ON_DEVICE - {Recompute.NONE},
        recomputes_by_stage=False,
        hosted=frozenset({Hosted.OPTIMIZER}),
        roles=frozenset({"tp", "cp", "ep"}),
        sequence_parallel=frozenset({True, False}),
        even=True,
        uneven=False,  # shardings of what jit takes and returns have to divide
        selective="cheap",  # minimal_with_context keeps products and attention
        context=("gather", "ring", "ulysses"),
        context_limited={"window": ("gather", "ulysses"), "chunk": ("gather",), "sinks": ("gather",), "mask": ()},
    ),
}
"""What each framework that takes degrees can run."""


def nearest_zero(level: int, levels: frozenset[int]) -> int:
    """Return the least level that shares as much, or the highest there is.

    >>> nearest_zero(1, frozenset({0, 2, 3})), nearest_zero(3, frozenset({0, 1})), nearest_zero(0, frozenset({0, 3}))
    (2, 1, 0)
    """
    return min((own for own in levels if own >= level), default=max(levels))


def zero_levels(ability: Abilities, *, pp: int, tp: int) -> frozenset[int]:
    """Return the ZeRO levels of a framework beside a pipeline and tensor parallelism of these degrees."""
    levels = ability.zero_in_pipeline if pp > 1 else ability.zero
    return levels & ability.zero_beside_tp if tp > 1 else levels


def runs(degrees: Degrees, ability: Abilities) -> bool:
    """Return whether a framework can run a plan by degrees as it is, whatever the model.

    Args:
        degrees: The plan; its schedule is stated where it has a pipeline.
        ability: What the framework can run.
    """
    schedule = "interleaved" if degrees.interleave > 1 and degrees.schedule == "1f1b" else degrees.schedule
    used = {role for role in ("tp", "cp", "ep") if getattr(degrees, role) > 1}
    return (
        used <= ability.roles
        and (degrees.pp == 1 or schedule in ability.schedules)
        and (degrees.dp * degrees.cp == 1 or degrees.zero in zero_levels(ability, pp=degrees.pp, tp=degrees.tp))
        and (degrees.tp == 1 or degrees.sequence_parallel in ability.sequence_parallel)
        and Recompute(degrees.recompute) in ability.recompute
        and (not degrees.offload or share_of(degrees.offload) in ability.hosted)
        and (not degrees.cp_kind or degrees.cp_kind in ability.context)
    )


def nearest(facts: Facts, ability: Abilities) -> tuple[Degrees, int]:
    """Return what a framework runs in place of a plan, and how many layers of every stage recompute (0 for all).

    Args:
        facts: The plan.
        ability: What the framework can run.
    """
    has_schedule = facts.plan.schedule in ability.schedules
    interleave = facts.interleave if has_schedule else 1
    schedule = facts.plan.schedule if has_schedule else next(iter(ability.schedules), "")
    hosts = bool(facts.hosted) and hosts_state(ability)
    recompute, first = nearest_recompute(facts, ability)
    sequence = facts.sequence_parallel if facts.sequence_parallel in ability.sequence_parallel else True
    levels = zero_levels(ability, pp=facts.pp, tp=facts.tp)
    zero = nearest_zero(max(facts.zero, int(hosts)), levels) if facts.dp * facts.cp > 1 else 0
    degrees = Degrees(
        dp=facts.dp,
        tp=facts.tp,
        pp=facts.pp,
        cp=facts.cp,
        cp_kind=nearest_context(facts, ability),
        ep=facts.ep,
        etp=facts.etp,
        sequence_parallel=facts.tp > 1 and sequence and True in ability.sequence_parallel,
        recompute=recompute,
        offload=_offload(facts, ability, zero) if hosts else "",
        schedule=schedule if facts.pp > 1 else "",
        interleave=interleave if facts.pp > 1 else 1,
        microbatch=facts.microbatch,
        global_batch=facts.plan.job.global_batch,
        layers=_layers(facts, interleave, even=ability.even),
        **({"zero": zero} | _shares(facts, zero, ability)),
    )
    if degrees.shares:
        return degrees, first
    if zero and facts.zero and zero in ability.hybrid and 1 < facts.sharded < facts.dp and degrees.may_share_apart:
        same = degrees.expert_axis
        degrees = replace(degrees, shard=facts.sharded // same if facts.sharded % same == 0 else 0)
    return degrees, first


def nearest_context(facts: Facts, ability: Abilities) -> ContextKind | Literal[""]:
    """Return the kind of context parallelism that a framework runs in place of that of a plan.

    In place of rings of attention that is limited, all layers have a kind that the framework has for them.
    """
    kinds = ability.contexts(facts.ring_limits if facts.cp_kind == "ring" else ())
    return facts.cp_kind if not facts.cp_kind or facts.cp_kind in kinds or not kinds else kinds[0]


def hosts_state(ability: Abilities) -> bool:
    """Whether a framework keeps any state in host memory."""
    return any(own in ability.hosted for own in STATE_KINDS)


def state_run(what: Hosted, ability: Abilities, zero: int) -> Hosted:
    """Return what of the state a framework that keeps some in host memory keeps there in place of what a plan does.

    DeepSpeed moves parameters with ZeRO 3 only, FSDP2 those that it splits.
    """
    allowed = [own for own in STATE_KINDS if own in ability.hosted]
    if what is Hosted.PARAMETERS and what in allowed and (zero == 3 or len(allowed) == 1):
        return what
    return what if what in allowed and what is not Hosted.PARAMETERS else allowed[0]


def _shares(facts: Facts, zero: int, ability: Abilities) -> dict[str, Any]:
    """Return shares, and ZeRO within groups of devices that have equal shares, where a framework runs those."""
    if not facts.shares or not ability.shares:
        return {}
    inside = facts.dp // sum(share.num_rows for share in facts.plan.shares)
    return {"shares": facts.shares, "zero": zero if inside > 1 else 0, "shard": inside if inside > 1 and zero else 0}


def _offload(facts: Facts, ability: Abilities, zero: int) -> str:
    """Return what lies in host memory: a share of it where the framework has a word for that."""
    what = state_run(facts.hosted_state, ability, zero)
    share = facts.hosted_share if zero in ability.hosted_shares and what is not Hosted.PARAMETERS else 1.0
    return str(what) if share == 1 else f"{what}={share}"


def nearest_recompute(facts: Facts, ability: Abilities) -> tuple[str, int]:
    """Return what all layers recompute, or the first ones of every stage and how many those are (0 for all)."""
    if any(facts.offloaded) and Recompute.OFFLOAD in ability.recompute and facts.pp == 1:
        return "offload", facts.offloaded[0] if facts.offloaded[0] < facts.layers[0] - 1 else 0
    flavours = facts.flavours
    full = max(sum(flavour is Recompute.FULL for flavour in stage) for stage in facts.recompute)
    if ability.recomputes_by_stage and full:
        return "full", full if len(flavours) > 1 else 0
    most = flavours.most_common(1)[0][0]
    if most not in ability.recompute:
        most = Recompute.SELECTIVE if Recompute.SELECTIVE in ability.recompute else Recompute.FULL
    return str(most), 0


def _layers(facts: Facts, interleave: int, *, even: bool) -> tuple[int, ...]:
    """Return the layers of every stage, those of one group of devices together where the framework does not."""
    if facts.pp == 1 or even:
        return ()
    return facts.layers if interleave == facts.interleave else facts.layers_of_groups

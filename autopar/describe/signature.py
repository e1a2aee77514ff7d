"""The signature of a plan: the features in which plans differ for a user.

A plan is *akin* to a faster one if the two differ only in

- the mesh of equal degrees, the placement of single tensors, the number of stages per group of devices,
- stage boundaries, and which layers recompute, provided the layer that recomputes least does not recompute more.

A slower plan that recomputes more in every layer is a different plan, as it takes less memory; one that recomputes less
and is slower has no advantage. `distinct` drops every plan that is akin to a faster one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from autopar.configuration import Configuration
from autopar.describe.axis_roles import AxisRole, expert_degree
from autopar.plan import BlockPlan, StagePlan
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES

ZERO_ROLES = frozenset({"dp", "cp", "spatial"})
"""Roles shown with their ZeRO stage: axes that share work on the same parameters."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signature:
    """The features of a plan that matter to a user.

    Attributes:
        degrees: Per role of axes: its name, the highest ZeRO stage of its axes, and the product of their sizes.
        num_stages: Pipeline stages.
        schedule: Order of microbatches; "" if there is nothing to order.
        num_microbatches: Microbatches per step.
        recompute: Flavour of the layer that recomputes least.
        offload: Kinds of state in host memory in some stage.
        others: Degrees of the further meshes of stages that differ from the first.
        experts: Largest number of devices the experts are divided among in any stage.
        shares: Microbatches of rows that have different numbers of them.
    """

    degrees: tuple[tuple[str, int, int], ...]
    num_stages: int
    schedule: str
    num_microbatches: int
    recompute: str
    offload: tuple[str, ...] = ()
    others: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    experts: int = 1
    shares: tuple[int, ...] = ()

    def is_akin_to(self, faster: "Signature") -> bool:
        """Return whether a plan of this signature is akin to a faster plan."""
        order = list(Recompute)
        more = order.index(Recompute(self.recompute)) > order.index(Recompute(faster.recompute))
        return not more and replace(self, recompute=faster.recompute) == faster


def distinct(found: Iterable[T], signature_of: Callable[[T], Signature]) -> list[T]:
    """Return the items, fastest first, without those akin to an earlier one."""
    kept: list[tuple[T, Signature]] = []
    for item in found:
        own = signature_of(item)
        if not any(own.is_akin_to(faster) for _, faster in kept):
            kept.append((item, own))
    return [item for item, _ in kept]


def signature(
    configuration: Configuration,
    stages: Sequence[StagePlan],
    blocks: Sequence[BlockPlan],
    roles: Sequence[AxisRole],
    others: Sequence[Sequence[AxisRole]] = (),
) -> Signature:
    """Return the signature of a plan of a configuration.

    Args:
        configuration: The outer choices.
        stages: The stages.
        blocks: Placements per distinct block.
        roles: Roles of the mesh axes.
        others: Roles of the axes of further meshes.
    """
    splits = SCHEDULES[configuration.schedule].splits
    ordered = configuration.num_stages > 1 and (configuration.num_microbatches > 1 or splits)
    return Signature(
        _degrees(roles),
        configuration.num_stages,
        configuration.schedule if ordered else "",
        configuration.num_microbatches,
        _least_recompute(stages, blocks),
        tuple(sorted({str(stage.hosted_state) for stage in stages if stage.offload})),
        tuple(map(_degrees, others)),
        max(map(expert_degree, (roles, *others))),
        tuple(share.num_microbatches for share in configuration.shares),
    )


def _degrees(roles: Sequence[AxisRole]) -> tuple[tuple[str, int, int], ...]:
    """Return role, highest ZeRO stage and degree, per role."""
    by_name: dict[str, list[AxisRole]] = {}
    for role in roles:
        if role.axis.size > 1:
            by_name.setdefault(_role_name(role), []).append(role)
    return tuple(
        (name, max(_zero_stage(role) for role in own), prod(role.axis.size for role in own))
        for name, own in sorted(by_name.items())
    )


def _zero_stage(role: AxisRole) -> int:
    return role.zero if role.role in ZERO_ROLES else 0


def _role_name(role: AxisRole) -> str:
    """Return the name of an axis role; sequence parallelism is part of it, as it changes the collectives."""
    return "tp, sequence parallel" if role.role == "tp" and role.sequence_parallel else role.role


def _least_recompute(stages: Sequence[StagePlan], blocks: Sequence[BlockPlan]) -> str:
    """Return the flavour of the layer that recomputes least; layers are blocks that repeat, or all if none does."""
    layers = {index for block in blocks if len(block.instances) > 1 for index in block.instances}
    flavours = {
        Recompute(flavour)
        for stage in stages
        for index, flavour in enumerate(stage.flavours, stage.blocks[0])
        if not layers or index in layers
    }
    return str(min(flavours, key=list(Recompute).index))

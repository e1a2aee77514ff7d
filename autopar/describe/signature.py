"""What tells plans apart for a user: the signature of a plan.

A plan is *akin* to a faster one if the two differ in nothing but

- the mesh the same degrees lie on, the placement of single tensors, the number of stages that devices take in turns,
- stage boundaries, and which layers recompute, as long as the layer that recomputes least does not recompute more.

So a plan that keeps less in every layer is another plan, which takes longer and less memory; one that keeps more and
takes longer all the same is of no use to anybody. `distinct` leaves out what is akin to something faster.
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

LEVELLED = frozenset({"dp", "cp", "spatial"})
"""What is told with its ZeRO level: axes that share work on the same parameters."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a user cares about in a plan.

    Attributes:
        degrees: Of every role of axes: its name, the highest ZeRO level of these axes, and their degrees multiplied.
        num_stages: Pipeline stages.
        schedule: Order of microbatches; "" where there is nothing to order.
        num_microbatches: Microbatches per step.
        recompute: What the layer that recomputes least does.
        offload: What lies in host memory in some stage.
        others: Degrees of the further meshes that stages have, if they differ in them.
        experts: Over how many devices experts are dealt out, whatever else these devices share; in no stage over more.
    """

    degrees: tuple[tuple[str, int, int], ...]
    num_stages: int
    schedule: str
    num_microbatches: int
    recompute: str
    offload: tuple[str, ...] = ()
    others: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    experts: int = 1

    def is_akin_to(self, faster: "Signature") -> bool:
        """Whether a plan of this signature differs from a faster one in nothing that a user cares about."""
        order = list(Recompute)
        more = order.index(Recompute(self.recompute)) > order.index(Recompute(faster.recompute))
        return not more and replace(self, recompute=faster.recompute) == faster


def distinct(found: Iterable[T], signature_of: Callable[[T], Signature]) -> list[T]:
    """Return what is found, fastest first, without what is akin to something before it."""
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
        roles: What the mesh axes do.
        others: What those of further meshes do.
    """
    splits = SCHEDULES[configuration.schedule].splits
    ordered = configuration.num_stages > 1 and (configuration.num_microbatches > 1 or splits)
    return Signature(
        _degrees(roles),
        configuration.num_stages,
        configuration.schedule if ordered else "",
        configuration.num_microbatches,
        _least(stages, blocks),
        tuple(sorted({stage.offload for stage in stages if stage.offload})),
        tuple(map(_degrees, others)),
        max(map(expert_degree, (roles, *others))),
    )


def _degrees(roles: Sequence[AxisRole]) -> tuple[tuple[str, int, int], ...]:
    """Return role, ZeRO level and degree of what axes do."""
    by_name: dict[str, list[AxisRole]] = {}
    for role in roles:
        if role.axis.size > 1:
            by_name.setdefault(_word(role), []).append(role)
    return tuple(
        (name, max(_level(role) for role in own), prod(role.axis.size for role in own))
        for name, own in sorted(by_name.items())
    )


def _level(role: AxisRole) -> int:
    return role.zero if role.role in LEVELLED else 0


def _word(role: AxisRole) -> str:
    """Return what an axis is called; sequence parallelism is part of the name, as it takes other collectives."""
    return "tp, sequence parallel" if role.role == "tp" and role.sequence_parallel else role.role


def _least(stages: Sequence[StagePlan], blocks: Sequence[BlockPlan]) -> str:
    """Return what the layer that recomputes least does: of blocks that occur more than once, of all if none does."""
    layers = {index for block in blocks if len(block.instances) > 1 for index in block.instances}
    flavours = {
        Recompute(flavour)
        for stage in stages
        for index, flavour in enumerate(stage.flavours, stage.blocks[0])
        if not layers or index in layers
    }
    return str(min(flavours, key=list(Recompute).index))

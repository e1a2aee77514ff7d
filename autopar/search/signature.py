"""What tells plans apart for a user: the signature of a plan.

Two plans of one signature are variants of the same plan: the same degrees on another mesh, a tensor placed otherwise, a
stage boundary one block further on, a layer more or less that recomputes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.plan import BlockPlan, StagePlan
from autopar.search.roles import AxisRole
from autopar.search.space import Configuration

LEVELLED = frozenset({"dp", "sp", "spatial"})
"""What is told with its ZeRO level: axes that share work on the same parameters."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a user cares about in a plan.

    Attributes:
        degrees: Role, ZeRO level and degree of what axes do, those of one role and level multiplied.
        num_stages: Pipeline stages.
        schedule: Order of microbatches; "" where there is nothing to order.
        num_microbatches: Microbatches per step.
        recompute: What most of the layers keep of their forward.
        offload: What lies in host memory in some stage.
        others: Degrees of the further meshes that stages have, if they differ in them.
    """

    degrees: tuple[tuple[str, int, int], ...]
    num_stages: int
    schedule: str
    num_microbatches: int
    recompute: str
    offload: tuple[str, ...] = ()
    others: tuple[tuple[tuple[str, int, int], ...], ...] = ()


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
    ordered = configuration.num_stages > 1 and configuration.num_microbatches > 1
    return Signature(
        _degrees(roles),
        configuration.num_stages,
        configuration.schedule if ordered else "",
        configuration.num_microbatches,
        _recompute(stages, blocks),
        tuple(sorted({stage.offload for stage in stages if stage.offload})),
        tuple(map(_degrees, others)),
    )


def _degrees(roles: Sequence[AxisRole]) -> tuple[tuple[str, int, int], ...]:
    """Return role, ZeRO level and degree of what axes do."""
    found = [
        (role.role, role.zero if role.role in LEVELLED else 0, role.axis.size) for role in roles if role.axis.size > 1
    ]
    return tuple(
        (*kind, prod(size for name, zero, size in found if (name, zero) == kind))
        for kind in sorted({(name, zero) for name, zero, _ in found})
    )


def _recompute(stages: Sequence[StagePlan], blocks: Sequence[BlockPlan]) -> str:
    """Return what most layers keep: blocks that occur more than once, all blocks if none does."""
    layers = {index for block in blocks if len(block.instances) > 1 for index in block.instances}
    counts: Counter[str] = Counter()
    for stage in stages:
        flavours = enumerate(stage.flavours, stage.blocks[0])
        counts.update(str(flavour) for index, flavour in flavours if not layers or index in layers)
    return max(sorted(counts), key=lambda name: counts[name])

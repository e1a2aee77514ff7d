"""How attention gets at positions that other devices hold: the kinds of context parallelism in a plan."""

from collections import Counter
from collections.abc import Iterable, Iterator

from autopar.context_parallelism import AttentionLimit, ContextKind
from autopar.folding.fold import Folded
from autopar.ir.graph import Op, Phase
from autopar.ir.rings import RINGS
from autopar.plan import BlockPlan, OpPlacement
from autopar.sharding import Axis, Placement, Shard, parse_placements

_WITH_HEADS = 4
"""Dims of a query that has a dim for heads: (batch, heads, positions, channels); else (batch, positions, channels)."""


def placed_contexts(
    mesh: Iterable[Axis], blocks: Iterable[BlockPlan], folded: Folded
) -> Iterator[tuple[str, ContextKind, frozenset[AttentionLimit], int]]:
    """Yield the axis, the kind, what limits it and the number of instances of every attention op on every axis.

    Only ops of the forward pass count. Ops that the axis leaves whole, or of which it splits samples, are left out.
    """
    axes = [axis.name for axis in mesh]
    for block in blocks:
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            if op.phase is not Phase.FORWARD or "Attention" not in op.kind:
                continue
            for position, axis in enumerate(axes):
                kind = _kind(op, placed, position, folded)
                if kind is not None:
                    yield axis, kind, limits_of(op), len(block.instances)


def context_kinds(mesh: Iterable[Axis], blocks: Iterable[BlockPlan], folded: Folded) -> dict[str, Counter[ContextKind]]:
    """Return for each mesh axis by name how many attention ops of the forward pass run on it in each way.

    Ops that the axis leaves whole, or of which it splits samples, are left out.
    """
    axes = tuple(mesh)
    found: dict[str, Counter[ContextKind]] = {axis.name: Counter() for axis in axes}
    for axis, kind, _, count in placed_contexts(axes, blocks, folded):
        found[axis][kind] += count
    return found


def limits_of(op: Op) -> frozenset[AttentionLimit]:
    """Return what an attention op, or its gradient, has of windows, chunks, sinks and masks."""
    names: tuple[AttentionLimit, ...] = ("window", "chunk")
    found: set[AttentionLimit] = {name for name in names if op.attr(name, 0)}
    if "Sink" in op.kind:
        found.add("sinks")
    if "Masked" in op.kind or (op.kind == "Attention" and any(op.inputs[3:4])):
        found.add("mask")
    return frozenset(found)


def ring_limits(blocks: Iterable[BlockPlan], folded: Folded) -> frozenset[AttentionLimit]:
    """Return what attention of the forward pass that runs in rings has of windows, chunks, sinks and masks."""
    limits = (limits for limits, _ in _rings(blocks, folded))
    return frozenset().union(*limits)


def limited_rings(blocks: Iterable[BlockPlan], folded: Folded) -> int:
    """Return how many attention ops of the forward pass run in rings though something limits them."""
    return sum(count for limits, count in _rings(blocks, folded) if limits)


def _rings(blocks: Iterable[BlockPlan], folded: Folded) -> Iterator[tuple[frozenset[AttentionLimit], int]]:
    """Yield what limits attention in rings, and its instances, for every attention op of the forward pass in one."""
    for block in blocks:
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            if op.phase is Phase.FORWARD and placed.local is not None and placed.local.kind in RINGS:
                yield limits_of(op), len(block.instances)


def _kind(op: Op, placed: OpPlacement, position: int, folded: Folded) -> ContextKind | None:
    split = parse_placements(placed.inputs[0])[position]
    rank = len(folded.graph.values[op.inputs[0]].shape)
    return kind_of(split, rank, in_ring=placed.local is not None and placed.local.kind in RINGS)


def kind_of(split: Placement, rank: int, *, in_ring: bool) -> ContextKind | None:
    """Return how attention on one mesh axis gets at positions of other devices; None if it splits neither.

    Args:
        split: Placement of its queries on the axis.
        rank: Number of their dims.
        in_ring: Whether devices run it in a ring.
    """
    if not isinstance(split, Shard):
        return None
    positions = rank - 2
    if split.dim == positions:
        return "ring" if in_ring else "gather"
    heads = 1 if positions + 2 == _WITH_HEADS else 2
    return "ulysses" if split.dim == heads else None

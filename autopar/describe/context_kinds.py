"""How attention gets at positions that other devices hold: the kinds of context parallelism in a plan."""

from collections import Counter
from collections.abc import Iterable

from autopar.context_parallelism import ContextKind
from autopar.folding.fold import Folded
from autopar.ir.graph import Op, Phase
from autopar.ir.rings import RINGS
from autopar.plan import BlockPlan, OpPlacement
from autopar.sharding import Axis, Shard, parse_placements

_WITH_HEADS = 4
"""Dims of a query that has a dim for heads: (batch, heads, positions, channels); else (batch, positions, channels)."""


def context_kinds(mesh: Iterable[Axis], blocks: Iterable[BlockPlan], folded: Folded) -> dict[str, Counter[ContextKind]]:
    """Return for each mesh axis by name how many attention ops of the forward pass run on it in each way.

    Ops that the axis leaves whole, or of which it splits samples, are left out.
    """
    found: dict[str, Counter[ContextKind]] = {axis.name: Counter() for axis in mesh}
    for block in blocks:
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            if op.phase is not Phase.FORWARD or "Attention" not in op.kind:
                continue
            for position, axis in enumerate(found):
                kind = _kind(op, placed, axis, position, folded)
                if kind is not None:
                    found[axis][kind] += len(block.instances)
    return found


def limited_rings(blocks: Iterable[BlockPlan], folded: Folded) -> int:
    """Return how many attention ops of the forward pass run in rings though windows, chunks or sinks limit them."""
    count = 0
    for block in blocks:
        for op, placed in zip(folded.kinds[block.kind].ops, block.ops, strict=True):
            if op.phase is Phase.FORWARD and placed.local is not None and placed.local.kind in RINGS:
                is_limited = "Sink" in op.kind or any(op.attr(name, 0) for name in ("window", "chunk"))
                count += is_limited * len(block.instances)
    return count


def _kind(op: Op, placed: OpPlacement, axis: str, position: int, folded: Folded) -> ContextKind | None:
    split = parse_placements(placed.inputs[0])[position]
    if not isinstance(split, Shard):
        return None
    positions = len(folded.graph.values[op.inputs[0]].shape) - 2
    if split.dim == positions:
        rings = placed.local is not None and placed.local.kind in RINGS
        return "ring" if rings else "gather"
    heads = 1 if positions + 2 == _WITH_HEADS else 2
    return "ulysses" if split.dim == heads else None

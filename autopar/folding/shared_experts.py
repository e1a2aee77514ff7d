"""Shared experts: MLPs beside the routed experts of a layer, and their gradients.

Nothing of a shared expert waits for the rows of routed experts, and no row waits for a shared expert: its kernels may
run while tokens travel.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from autopar.folding.fold import BlockKind, Folded
from autopar.folding.recompute_modules import module_ops
from autopar.folding.selective_recompute import forward_block
from autopar.ir.graph import Phase

_ROW_OPS = "autopar::Expert"
"""Prefix of the kinds that send rows to experts, hold them there, and bring them back."""


def shared_expert_ops(folded: Folded) -> frozenset[str]:
    """Return the names of the forward and backward ops of shared experts.

    Backward ops are those that differentiate an op of a shared expert; sums of gradients over microbatches are not.
    """
    return _shared_expert_ops(folded.pattern)


@lru_cache(maxsize=32)
def _shared_expert_ops(folded: Folded) -> frozenset[str]:
    found: set[str] = set()
    for kind in folded.kinds:
        if any(op.kind.startswith(_ROW_OPS) for op in kind.ops):
            forward = _forward_ops(folded, kind)
            found |= forward
            found |= {op.name for op in kind.ops if op.phase is Phase.BACKWARD and op.origin in forward}
    return frozenset(found)


def _forward_ops(folded: Folded, kind: BlockKind) -> frozenset[str]:
    """Return the names of the forward ops of shared experts of a block.

    A block of several layers has other MLPs, too, which lead to the rows or follow from them.
    """
    block = forward_block(folded, kind)
    ops = [kind.ops[position] for position in block.forward]
    mlps = {kind.ops[position].name for position in module_ops(block)["shared_experts"]}
    rows = {op.name for op in ops if op.kind.startswith(_ROW_OPS)}
    makers = {name: op.name for op in ops for name in op.outputs if name}
    before = {op.name: [makers[name] for name in op.inputs if name in makers] for op in ops}
    after: dict[str, list[str]] = {op.name: [] for op in ops}
    for name, sources in before.items():
        for source in sources:
            after[source].append(name)
    return frozenset(mlps - rows - _reached(rows, before) - _reached(rows, after))


def _reached(sources: Iterable[str], edges: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the ops that are reached from some along edges."""
    found: set[str] = set()
    pending = list(sources)
    while pending:
        for following in edges[pending.pop()]:
            if following not in found:
                found.add(following)
                pending.append(following)
    return found

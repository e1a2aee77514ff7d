"""Which ops of a backward only lead to gradients of parameters, so that a schedule may put them off.

The others make what the block before waits for, or what blocks further away read (the gradient of a tied embedding).
"""

from autopar.folding.fold import BlockKind, Folded, Source
from autopar.ir.graph import Phase


def weight_ops(folded: Folded, kind: BlockKind) -> frozenset[str]:
    """Return the names of those ops of the representative of a kind."""
    leaving = {
        use.producer.position
        for use in folded.uses
        if use.crossing and use.producer.source is Source.OP and use.producer.kind == kind.id
    }
    results = set(folded.graph.outputs)
    wanted: set[str] = set()
    found = []
    for position, op in reversed(list(enumerate(kind.ops))):
        if op.phase is not Phase.BACKWARD:
            continue
        if position in leaving or not results.isdisjoint(op.outputs) or not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
        else:
            found.append(op.name)
    return frozenset(found)

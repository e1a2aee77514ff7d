"""The weight pass: backward ops that only lead to parameter gradients, which a schedule may delay.

The other backward ops make values that the previous block waits for, or that distant blocks read. Split backwards: zero
bubble pipeline parallelism (Qi et al. 2023).
"""

from autopar.folding.fold import BlockKind, Folded, Source
from autopar.ir.graph import Phase


def weight_pass_ops(folded: Folded, kind: BlockKind) -> frozenset[str]:
    """Return the names of the weight-pass ops of a kind's representative."""
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

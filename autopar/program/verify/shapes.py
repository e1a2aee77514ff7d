"""From a block to its tensor."""

from autopar.program.records import Operand
from autopar.sharding import Mesh, Shard


def whole_shape(operand: Operand, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the tensor a value is a block of.

    >>> whole_shape(Operand("x", (4, 6), 0.0, (Shard(0), Shard(0))), Mesh.of(dp=2, tp=3))
    (24, 6)
    """
    whole = list(operand.shape)
    for placement, axis in zip(operand.placements, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            whole[placement.dim] = placement.whole or whole[placement.dim] * axis.size
    return tuple(whole)

"""Write the strategy of an op on a mesh into a plan: placements, divided and replaced attributes, halo rows."""

from collections.abc import Mapping, Sequence

from autopar.discover import Replaced, Scaled, Strategy
from autopar.ir.graph import Op, Value
from autopar.plan import DividedNumber, HaloRows, LocalKind, OpPlacement, ReplacedNumber
from autopar.sharding import Mesh, Placements, format_placements, uneven


def op_placement(op: Op, by_axis: Sequence[Strategy], mesh: Mesh, values: Mapping[str, Value]) -> OpPlacement:
    """Return an op's placements and its changed attributes, given its strategy on each mesh axis.

    Dims that an axis splits alone and does not divide are dealt out in uneven blocks.
    """

    def texts(names: Sequence[str], placements: Sequence[Placements]) -> tuple[str, ...]:
        """Return the text per tensor; `placements` has one entry per axis, each with one placement per tensor."""
        return tuple(
            format_placements(uneven(values[name].shape, tuple(own), mesh)) if name else ""
            for name, *own in zip(names, *placements, strict=True)
        )

    divisors: dict[Scaled, int] = {}
    replaced: dict[Replaced, None] = {}
    halos = []
    for strategy, axis in zip(by_axis, mesh.axes, strict=True):
        for number in strategy.scaled:
            divisors[number] = divisors.get(number, 1) * axis.size
        replaced |= dict.fromkeys(strategy.replaced)
        halos += [HaloRows(h.input, h.dim, axis.name, h.before, h.after, h.fill) for h in strategy.halos]
    local_axes = [axis.name for strategy, axis in zip(by_axis, mesh.axes, strict=True) if strategy.local is not None]
    local = next((strategy.local for strategy in by_axis if strategy.local is not None), None)
    return OpPlacement(
        op.name,
        texts(op.inputs, [strategy.inputs for strategy in by_axis]),
        texts(op.outputs, [strategy.outputs for strategy in by_axis]),
        divided=tuple(DividedNumber(number.source, number.entry, divisor) for number, divisor in divisors.items()),
        replaced=tuple(ReplacedNumber(number.attr, number.entry, number.value) for number in replaced),
        halos=tuple(sorted(halos, key=lambda rows: (rows.input, rows.dim))),
        local=None if local is None else LocalKind(local.kind, local.input, local.dim, tuple(local_axes)),
    )

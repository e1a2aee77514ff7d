"""The costs of a table for another number of data-parallel devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import CostModel, Fused, Kernel, Stack
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.ir.graph import Op, Phase
from autopar.ir.routing import Routed
from autopar.sharding import Axis
from autopar.simulate.layout import Shapes


@dataclass(frozen=True, slots=True)
class Scaled:
    """The costs of a table for other data-parallel degrees; what costs the simulator asks for.

    Attributes:
        costs: Those of the cluster.
        axes: The data axes, by name.
        share: What a device does of the update it does in the table.
        known: Seconds of ops that do not depend on the degree, by name.
    """

    costs: CostModel
    axes: Mapping[str, Axis]
    share: float
    known: dict[str, NDArray[np.float64]]

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return self.costs.cluster

    @property
    def stack(self) -> Stack:
        """What the software makes of it."""
        return self.costs.stack

    @property
    def learned(self) -> None:
        """None: estimates are by the formulas."""
        return None

    def on(self, devices: range, /) -> "Scaled":
        """Return the costs of work on some devices: a table has one kind of them."""
        return self

    def overlapped(self) -> "Scaled":
        """Return the costs under a schedule that sends tokens beside the compute of another microbatch."""
        return replace(self, costs=self.costs.overlapped())

    def fuse(
        self, ops: Sequence[Op], ranks: Mapping[str, int], stated: Sequence[Kernel] | None = None, /
    ) -> Mapping[str, Fused]:
        """Return those of the ops that are not a kernel of their own."""
        return self.costs.fuse(ops, ranks, stated)

    def host_seconds(self, op: Op, rank: int, fused: Fused, /) -> float:
        """Return the seconds in which the host launches an op."""
        return self.costs.host_seconds(op, rank, fused)

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[Shapes | None],
        outputs: Sequence[Shapes | None],
        sizes: Mapping[str, float],
        fused: Fused,
        /,
    ) -> NDArray[np.float64]:
        """Return the seconds of one op, of this device's share of it if it is part of the update."""
        if op.phase is Phase.UPDATE and self.share != 1.0:
            read, made = ([_part(shape, self.share) for shape in shapes] for shapes in (inputs, outputs))
            return self.costs.op_seconds(op, read, made, sizes, fused)
        if op.name not in self.known:
            self.known[op.name] = self.costs.op_seconds(op, inputs, outputs, sizes, fused)
        return self.known[op.name]

    def collective_seconds(
        self, collective: CollectiveKind, nbytes: float, axis: Axis, routed: Routed | None = None, /
    ) -> float:
        """Return the seconds of a collective over an axis of these degrees."""
        return self.costs.collective_seconds(collective, nbytes, self.axis(axis), routed)

    def exchange_seconds(self, nbytes: float, axis: Axis, /) -> float:
        """Return the seconds of a halo exchange over an axis of these degrees."""
        return self.costs.exchange_seconds(nbytes, self.axis(axis))

    def send_seconds(self, nbytes: float, tier: int, /) -> float:
        """Return the seconds from one device to another."""
        return self.costs.send_seconds(nbytes, tier)

    def axis(self, axis: Axis) -> Axis:
        """Return the axis of these degrees."""
        return self.axes.get(axis.name, axis)


def _part(shape: Shapes | None, share: float) -> Shapes | None:
    """Return shapes with `share` of their elements, those of single numbers as they are."""
    if shape is None or shape.shape[1] == 0 or shape.prod() == 1:
        return shape
    smaller = shape.copy()
    smaller[:, 0] = np.maximum(1, np.rint(shape[:, 0] * share))
    return smaller

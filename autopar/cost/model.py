"""The cost model that solver and simulator share: seconds of ops, collectives and sends on one cluster.

op seconds = launch + max(flops / (peak x efficiency), bytes / (memory bandwidth x efficiency))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import collectives
from autopar.cost.arrays import FloatArray, IntArray
from autopar.cost.collectives import Collective
from autopar.cost.flops import op_flops
from autopar.cost.policy import MIXED, DtypePolicy
from autopar.cost.stack import DEFAULT, Stack
from autopar.cost.traffic import is_view, op_bytes
from autopar.ir.graph import Op
from autopar.sharding import Axis

FUSED_ATTENTION = frozenset(
    {
        "Attention",
        "autopar::AttentionPart",
        "autopar::ScaledAttentionPart",
        "autopar::AttentionGrad",
        "autopar::AttentionGradPart",
        "autopar::MaskedAttentionGrad",
    }
)


@dataclass(frozen=True, slots=True)
class CostModel:
    """What things cost.

    Attributes:
        cluster: The hardware.
        policy: Bytes per element and the class of numbers matrix products run in.
        stack: What the software makes of the hardware.
    """

    cluster: Cluster
    policy: DtypePolicy = MIXED
    stack: Stack = DEFAULT

    def __post_init__(self) -> None:
        self.cluster.device.peak(self.policy.numbers)

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
    ) -> FloatArray:
        """Return the seconds of an op on one device for each of n strategies.

        Args:
            op: The operation; a function kind counts as one kernel.
            inputs: Local shape array (n, rank) of each input; None where absent.
            outputs: Local shape array (n, rank) of each output; None where absent.
            element_bytes: Bytes per element by value name, from `DtypePolicy.graph_element_bytes`.

        Returns:
            (n,) seconds; 0 for views.
        """
        first = next((shape for shape in inputs if shape is not None), None)
        nbytes = op_bytes(op, inputs, outputs, element_bytes)
        if is_view(op, 0 if first is None else first.shape[1]):
            return nbytes
        device = self.cluster.device
        efficiency = device.attention_efficiency if op.kind in FUSED_ATTENTION else device.gemm_efficiency
        compute = op_flops(op, inputs, outputs) / (device.peak(self.policy.numbers) * efficiency)
        memory = nbytes / (device.memory_bandwidth * device.bandwidth_efficiency)
        return device.launch + np.maximum(compute, memory)

    @overload
    def collective_seconds(self, collective: Collective | str, nbytes: float, axis: Axis) -> float: ...

    @overload
    def collective_seconds(self, collective: Collective | str, nbytes: FloatArray, axis: Axis) -> FloatArray: ...

    def collective_seconds(
        self, collective: Collective | str, nbytes: float | FloatArray, axis: Axis
    ) -> float | FloatArray:
        """Return the seconds of a collective over a mesh axis (`autopar.cost.collectives` has the formulas).

        Args:
            collective: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
            nbytes: Bytes of the larger side on one device: the output of all_gather, the input of the others.
            axis: The mesh axis.

        Raises:
            ValueError: If there is no such collective.
        """
        seconds = collectives.collective_seconds(Collective(collective), np.asarray(nbytes, float), axis, self.cluster)
        return seconds if isinstance(nbytes, np.ndarray) else float(seconds)

    def send_seconds(self, nbytes: float, crosses_nodes: bool) -> float:
        """Return the seconds of sending `nbytes` from one device to another."""
        return collectives.send_seconds(nbytes, crosses_nodes, self.cluster)

    @overload
    def exchange_seconds(self, nbytes: float, axis: Axis) -> float: ...

    @overload
    def exchange_seconds(self, nbytes: FloatArray, axis: Axis) -> FloatArray: ...

    def exchange_seconds(self, nbytes: float | FloatArray, axis: Axis) -> float | FloatArray:
        """Return the seconds of a halo exchange over a mesh axis in which each device sends `nbytes`."""
        seconds = collectives.exchange_seconds(np.asarray(nbytes, float), axis, self.cluster)
        return seconds if isinstance(nbytes, np.ndarray) else float(seconds)

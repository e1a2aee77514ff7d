"""Bytes that stay in device memory between microbatches: parameters, gradient sums, optimizer state, buffers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.cost.policy import DtypePolicy
from autopar.ir.graph import Graph, Role


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """Bytes of persistent tensors on one device, by what they are for; `optimizer` is moments and master copies."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def resident_bytes(
    graph: Graph, policy: DtypePolicy, local_shapes: Mapping[str, tuple[int, ...]] | None = None
) -> ResidentBytes:
    """Return what the persistent tensors of a graph occupy on one device.

    Args:
        graph: A model or training step.
        policy: Bytes per element.
        local_shapes: Shape of the local block by input name of the state; the global shape for those not listed.
    """
    sizes = policy.graph_element_bytes(graph)
    local_shapes = local_shapes or {}
    totals = dict.fromkeys(Role, 0.0)
    for state in graph.states:
        elements = prod(local_shapes.get(state.input, graph.values[state.input].shape))
        totals[state.role] += elements * sizes[state.input]
    return ResidentBytes(totals[Role.PARAMETER], totals[Role.GRADIENT], totals[Role.MOMENT], totals[Role.BUFFER])

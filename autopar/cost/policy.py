"""Bytes per element: what mixed precision stores, whatever the graph says.

Graphs are float32 so that any op of them can be executed; what a training run stores is accounted here. Of a
parameter trained by Adam in mixed precision (Megatron-LM's convention, 18 bytes):

    parameter 2 + gradient buffer 4 + moments 2 x 4 + float32 master copy 4

The master copy lies where the moments lie: each of k moments counts 1/k of it. Without moments (plain SGD) it lies
with the parameter.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import ITEM_BYTES, Graph, Role, Value


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Bytes per floating-point element by what it is for; integers and booleans keep their own size.

    Attributes:
        name: Name of the preset.
        numbers: Class of numbers matrix products run in, a key of `Device.peaks`.
        activation: Bytes of an element of data, activations and their gradients, and of buffers.
        parameter: Bytes of an element of a parameter as the forward and backward pass read it.
        gradient: Bytes of an element of the buffer in which gradients are summed.
        moment: Bytes of an element of one optimizer moment.
        master: Bytes of an element of the optimizer's own copy of the parameter; 0 where the parameter itself is
            exact enough.
        gradient_wire: Bytes of an element of a gradient buffer while it is reduced over devices: 4 as Megatron-LM
            does, 2 as DDP in bfloat16 does.
    """

    name: str
    numbers: str
    activation: float
    parameter: float
    gradient: float
    moment: float
    master: float
    gradient_wire: float

    def element_bytes(self, value: Value, role: Role | None = None, num_moments: int = 2) -> float:
        """Return the resident bytes of one element.

        Args:
            value: The tensor; only its dtype matters.
            role: Its role if it is a persistent tensor.
            num_moments: Moments its owner has; they share the master copy.

        >>> MIXED.element_bytes(Value("x", (8,), "float32")), MIXED.element_bytes(Value("tokens", (8,), "int64"))
        (2.0, 8.0)
        >>> MIXED.element_bytes(Value("w.m", (8,), "float32"), Role.MOMENT)
        6.0
        """
        if not value.is_float:
            return float(ITEM_BYTES[value.dtype])
        match role:
            case Role.PARAMETER:
                return self.parameter
            case Role.GRADIENT:
                return self.gradient
            case Role.MOMENT:
                return self.moment + self.master / num_moments
            case _:
                return self.activation

    def wire_bytes(self, value: Value, role: Role | None = None) -> float:
        """Return the bytes of one element while it travels between devices."""
        if not value.is_float:
            return float(ITEM_BYTES[value.dtype])
        match role:
            case Role.GRADIENT:
                return self.gradient_wire
            case Role.MOMENT:
                return self.moment
            case _:
                return self.element_bytes(value, role)

    def graph_element_bytes(self, graph: Graph) -> dict[str, float]:
        """Return the resident bytes of one element of every value of a graph, persistent tensors by their role.

        In a graph with gradient buffers a parameter without moments carries its master copy.
        """
        moments = Counter(state.owner for state in graph.states if state.role is Role.MOMENT)
        trained = {state.owner for state in graph.states if state.role is Role.GRADIENT}
        sizes = {name: self.element_bytes(value) for name, value in graph.values.items()}
        for state in graph.states:
            for name in (state.input, state.output):
                size = self.element_bytes(graph.values[name], state.role, max(1, moments[state.owner]))
                if state.role is Role.PARAMETER and state.owner in trained and not moments[state.owner]:
                    size += self.master
                sizes[name] = size
        return sizes

    def graph_wire_bytes(self, graph: Graph) -> dict[str, float]:
        """Return the bytes of one element of every value of a graph while it travels."""
        sizes = {name: self.wire_bytes(value) for name, value in graph.values.items()}
        for state in graph.states:
            for name in (state.input, state.output):
                sizes[name] = self.wire_bytes(graph.values[name], state.role)
        return sizes


MIXED = DtypePolicy("mixed", "half", 2.0, 2.0, 4.0, 4.0, 4.0, 4.0)
FP32 = DtypePolicy("fp32", "single", 4.0, 4.0, 4.0, 4.0, 0.0, 4.0)
POLICIES: Mapping[str, DtypePolicy] = {policy.name: policy for policy in (MIXED, FP32)}

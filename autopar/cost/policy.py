"""Bytes per element: what mixed precision stores, whatever the graph says.

Graphs are float32 so that any op of them can be executed; what a training run stores is accounted here. Of a parameter
trained by Adam, by the policies in `POLICIES`:

    mixed          parameter 2 + gradient buffer 4 + moments 2 x 4 + float32 master copy 4             = 18
    megatron-fp16  parameter 2 + gradient buffer 2 + moments 2 x 4 + master copy 4 + its gradient 4    = 20
    fsdp           parameter 4, of which 2 are gathered for use + gradient 4 + moments 2 x 4           = 16
    fp32           parameter 4 + gradient buffer 4 + moments 2 x 4                                     = 16

The first two are Megatron-LM's (its README: 18 and 20, 6 + 12/d and 4 + 16/d with the distributed optimizer over d
devices), the third is PyTorch FSDP2's with `param_dtype=bfloat16` and `reduce_dtype=float32` as torchtitan has it:
shards are float32, a unit is gathered in bfloat16, gradients are reduced in float32 and kept so.

The optimizer's own copies lie where the moments lie: each of k moments counts 1/k of them. Without moments (plain SGD)
they lie with the parameter.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.errors import JobError
from autopar.ir.fills import fills
from autopar.ir.graph import ITEM_BYTES, PACKED, STORED, Graph, Role, Value


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Bytes per floating-point element by what it is for; integers and booleans keep their own size.

    Attributes:
        name: Name of the preset.
        numbers: Class of numbers matrix products run in, a key of `Device.peaks`.
        activation: Bytes of an element of data, activations and their gradients, and of buffers.
        parameter: Bytes of an element of a parameter as the forward and backward pass read it.
        stored: Bytes of an element of a trained parameter as it is kept between them; a frozen one is kept as it is
            read.
        gradient: Bytes of an element of the buffer in which gradients are summed.
        moment: Bytes of an element of one optimizer moment.
        master: Bytes of an element of the optimizer's own copies, of the parameter and of its gradient; 0 where the
            parameter itself is exact enough.
        gradient_wire: Bytes of an element of a gradient buffer while it is reduced over devices: 4 as Megatron-LM
            does, 2 as DDP in bfloat16 does.
    """

    name: str
    numbers: str
    activation: float
    parameter: float
    stored: float
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
                return self.stored
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
            case Role.PARAMETER:
                return self.parameter
            case _:
                return self.element_bytes(value, role)

    def graph_element_bytes(self, graph: Graph) -> dict[str, float]:
        """Return the resident bytes of one element of every value of a graph, persistent tensors by their role.

        The master copy lies with the moments that have the shape of the parameter, also where these are bytes; a
        trained parameter without such moments carries it itself. In a graph with gradient buffers a parameter
        without one is frozen: it is kept as it is read. Scales of packed weights keep the size their file has.
        """
        values = graph.values
        moments = Counter(
            state.owner
            for state in graph.states
            if state.role is Role.MOMENT and values[state.input].shape == values[state.owner].shape
        )
        trained = {state.owner for state in graph.states if state.role is Role.GRADIENT}
        sizes = self._by_dtype(graph, self.element_bytes)
        known: dict[tuple[str, Role, int, bool, bool], float] = {}  # there are few kinds of states, and many of each
        for state in graph.states:
            count, is_trained = moments[state.owner], state.owner in trained
            is_like = values[state.input].shape == values[state.owner].shape
            for name in (state.input, state.output):
                value = graph.values[name]
                key = value.dtype, state.role, count, is_trained, is_like
                if key not in known:
                    size = self.element_bytes(value, state.role, max(1, count))
                    if state.role is Role.MOMENT and not is_like:
                        size = self.moment
                    elif state.role is Role.MOMENT and not value.is_float:
                        size += self.master / count
                    elif state.role is Role.PARAMETER and value.is_float and is_trained and not count:
                        size += self.master
                    elif state.role is Role.PARAMETER and value.is_float and trained and not is_trained:
                        size = self.parameter
                    known[key] = size
                sizes[name] = known[key]
        return sizes | self._packed_sizes(graph)

    def graph_read_bytes(self, graph: Graph) -> dict[str, float]:
        """Return the bytes of one element of every value of a graph as forward and backward ops read it."""
        parameters = (
            name for state in graph.states if state.role is Role.PARAMETER for name in (state.input, state.output)
        )
        read = {
            name: self.element_bytes(graph.values[name]) if not graph.values[name].is_float else self.parameter
            for name in parameters
        }
        return self.graph_element_bytes(graph) | read | self._packed_sizes(graph)

    def graph_wire_bytes(self, graph: Graph) -> dict[str, float]:
        """Return the bytes of one element of every value of a graph while it travels."""
        sizes = self._by_dtype(graph, self.wire_bytes)
        known: dict[tuple[str, Role], float] = {}
        for state in graph.states:
            for name in (state.input, state.output):
                key = graph.values[name].dtype, state.role
                if key not in known:
                    known[key] = self.wire_bytes(graph.values[name], state.role)
                sizes[name] = known[key]
        return sizes | self._packed_sizes(graph)

    @staticmethod
    def _packed_sizes(graph: Graph) -> dict[str, float]:
        """Return the bytes of one element of parameters that no precision of the job is for.

        Those are packed weights with their scales, and what the graph says how it is stored.
        """
        packed: dict[str, int] = json.loads(graph.metadata.get(PACKED, "{}"))
        stored: dict[str, float] = json.loads(graph.metadata.get(STORED, "{}"))
        sizes = {name: float(ITEM_BYTES[graph.values[name].dtype]) for name in packed if name in graph.values}
        return sizes | {name: size for name, size in stored.items() if name in graph.values}

    @staticmethod
    def _by_dtype(graph: Graph, size: Callable[[Value], float]) -> dict[str, float]:
        """Return a size of every value that depends on its dtype alone: there are few of those, and many values.

        Of a value that is partly filled, that share of it.
        """
        of = {value.dtype: value for value in graph.values.values()}
        sizes = {dtype: size(value) for dtype, value in of.items()}
        found = {name: sizes[value.dtype] for name, value in graph.values.items()}
        found.update((name, found[name] * share) for name, share in fills(graph.ops, graph.values).items())
        return found


MIXED = DtypePolicy(
    "mixed",
    "half",
    activation=2.0,
    parameter=2.0,
    stored=2.0,
    gradient=4.0,
    moment=4.0,
    master=4.0,
    gradient_wire=4.0,
)
MEGATRON_FP16 = replace(MIXED, name="megatron-fp16", gradient=2.0, master=8.0, gradient_wire=2.0)
FSDP = replace(MIXED, name="fsdp", stored=4.0, master=0.0)
FP32 = DtypePolicy(
    "fp32",
    "single",
    activation=4.0,
    parameter=4.0,
    stored=4.0,
    gradient=4.0,
    moment=4.0,
    master=0.0,
    gradient_wire=4.0,
)
POLICIES: Mapping[str, DtypePolicy] = {policy.name: policy for policy in (MIXED, MEGATRON_FP16, FSDP, FP32)}
"""What can be trained in, by name."""


def load_policy(name: str) -> DtypePolicy:
    """Return a policy by name.

    Raises:
        JobError: If there is none of that name.
    """
    if name not in POLICIES:
        raise JobError(f"there is no precision {name!r}", hint=f"choose {', '.join(POLICIES)}")
    return POLICIES[name]

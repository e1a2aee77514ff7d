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

Below 16 bits (`autopar.cost.formats`) the products of linear layers (`autopar.ir.linear`) run in a quantized format,
and everything else as in `mixed`. Of an element of q bytes:

    weight of a linear layer      2 + 2 q: in 16 bits, and quantized along either dim; 2 q with `weights=low`, where the
                                  quantized copies are the parameter and what is gathered (primary weights in fp8)
    values that nothing but       q: one copy is kept for the weight gradient
    linear layers read
    results of attention          2 + q

A precision is a name of `POLICIES`, or such a name with changes behind commas (`load_policy`):

    weights=16 | low                16 bits, or quantized alone
    copies=1 | 2                    quantized weights along one dim, or both (`disable_parameter_transpose_cache`)
    gates=8 | 16                    inputs of activation functions, kept for the backward pass in the format or in 16
                                    bits (`activation_func_fp8_input_store` of Megatron-Core)
    gradients=16 | 32 | both        buffer in which gradients are summed; both: beside those of 16 bits, which stay
                                    (BF16_Optimizer of DeepSpeed under a pipeline: `update_hp_grads`)
    reduce=16 | 32                  gradients on their way between devices
    moments=8 | 16 | 32             moments of the optimizer

The optimizer's own copies lie where the moments lie: each of k moments counts 1/k of them. Without moments (plain SGD)
they lie with the parameter.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.cluster import Device
from autopar.cost.formats import COPIES, FORMATS, Format
from autopar.errors import JobError
from autopar.ir.fills import fills
from autopar.ir.graph import ITEM_BYTES, PACKED, STORED, Graph, Role, Value
from autopar.ir.linear import gate_inputs, linear_weights, quantized_values

_DISPATCHES = frozenset({"autopar::ExpertDispatch", "autopar::ExpertCombineGrad"})
"""Kinds whose results travel to the devices of experts: in 16 bits, and are quantized there (Megatron-Core,
`fused_a2a.py`)."""


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Bytes per floating-point element by what it is for; integers and booleans keep their own size.

    Attributes:
        name: Name of the preset.
        numbers: Class of numbers matrix products run in, a key of `Device.peaks`; those of linear layers in that of
            the `format`.
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
        master_gradient: Those of `master` that are there in the update alone: the gradient in float32, which the
            optimizer of Megatron-LM and DeepSpeed makes of all parameters in float16 and frees after its step.
        format: What the products of linear layers run in, where that is not `numbers`.
        low_weights: Whether their weights are kept and gathered in that format alone.
        copies: Quantized copies of a weight: along either dim, or along one.
        low_gates: Whether what activation functions of linear layers read is kept in that format.
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
    format: Format | None = None
    low_weights: bool = False
    copies: int = COPIES
    low_gates: bool = False
    master_gradient: float = 0.0

    def update_share(self, resident: float) -> float:
        """Return what of the bytes of a moment with its copies is there in the update alone, as a share.

        Args:
            resident: Bytes of an element of the moment, its part of the copies included.

        >>> MEGATRON_FP16.update_share(8.0), MIXED.update_share(6.0)
        (0.25, 0.0)
        """
        if not self.master_gradient or resident <= self.moment:
            return 0.0
        return (1 - self.moment / resident) * self.master_gradient / self.master

    def on(self, device: Device) -> "DtypePolicy":
        """Return the policy on a device: a tensor with one scale has one copy where products read either order."""
        single = self.format is not None and self.format.per_tensor and device.any_order
        return replace(self, copies=1) if single and self.copies > 1 else self

    @property
    def half(self) -> str:
        """Name of the 16-bit numbers of activations, "bf16" or "fp16"; "" where they have 32 bits."""
        if self.activation != MIXED.activation:
            return ""
        return "fp16" if self.name.partition(",")[0] == MEGATRON_FP16.name else "bf16"

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes of numbers that products run in."""
        return tuple(dict.fromkeys((self.numbers, self.format.numbers if self.format else self.numbers)))

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
        return sizes | self._quantized_sizes(graph, sizes) | self._packed_sizes(graph)

    def graph_read_bytes(self, graph: Graph) -> dict[str, float]:
        """Return the bytes of one element of every value of a graph as forward and backward ops read it."""
        parameters = (
            name for state in graph.states if state.role is Role.PARAMETER for name in (state.input, state.output)
        )
        read = {
            name: self.element_bytes(graph.values[name]) if not graph.values[name].is_float else self.parameter
            for name in parameters
        }
        if self.format is not None:
            read.update((name, self.format.bytes) for name in self._low(graph))
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
        if self.format is not None:
            if self.low_weights:
                sizes.update((name, self.format.bytes) for name in self._low(graph))
            rows = {name for name, op in quantized_values(graph).items() if op.kind in _DISPATCHES}
            found = self._quantized_values(graph, sizes)
            sizes.update((name, size) for name, size in found.items() if name not in rows)
        return sizes | self._packed_sizes(graph)

    def _quantized_sizes(self, graph: Graph, sizes: Mapping[str, float]) -> dict[str, float]:
        """Return the resident bytes of one element of what linear layers read, given those without quantization."""
        if self.format is None:
            return {}
        trains = any(state.role is Role.GRADIENT for state in graph.states)
        copies = (self.copies if trains and self.format.activations else 1) * self.format.bytes
        instead = self.parameter if self.low_weights or not trains else 0.0
        weights = {name: sizes[name] - instead + copies for name in self._low(graph)}
        return weights | self._quantized_values(graph, sizes)

    def _low(self, graph: Graph) -> list[str]:
        """Return the names, before and after a step, of the weights of linear layers that are quantized.

        Trained ones are if activations are, too: nothing is trained in 8 bits alone.
        """
        assert self.format is not None, self.name
        weights = linear_weights(graph)
        if not self.format.activations:
            weights -= {state.owner for state in graph.states if state.role is Role.GRADIENT}
        names = (name for state in graph.states if state.input in weights for name in (state.input, state.output))
        return [name for name in dict.fromkeys(names) if graph.values[name].is_float]

    def _quantized_values(self, graph: Graph, sizes: Mapping[str, float]) -> dict[str, float]:
        """Return the bytes of one element of values that are stored quantized."""
        if self.format is None or not self.format.activations:
            return {}
        share = self.format.bytes / self.activation
        found = [*quantized_values(graph), *(gate_inputs(graph) if self.low_gates else ())]
        return {name: sizes[name] * share for name in found if graph.values[name].is_float}

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
MEGATRON_FP16 = replace(MIXED, name="megatron-fp16", gradient=2.0, master=8.0, gradient_wire=2.0, master_gradient=4.0)
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
POLICIES: Mapping[str, DtypePolicy] = {
    policy.name: policy
    for policy in (
        MIXED,
        MEGATRON_FP16,
        FSDP,
        FP32,
        replace(FP32, name="tf32", numbers="tf32"),
        *(replace(MIXED, name=each.name, format=each, low_weights=not each.activations) for each in FORMATS.values()),
    )
}
"""What can be trained in, by name."""

ALIASES: Mapping[str, str] = {"bf16": "mixed", "fp16": "megatron-fp16", "fp8-delayed": "fp8"}
"""Other names of precisions."""

_CHANGES: Mapping[str, Mapping[str, Mapping[str, float | bool]]] = {
    "weights": {"16": {"low_weights": False}, "low": {"low_weights": True}},
    "copies": {"1": {"copies": 1}, "2": {"copies": 2}},
    "gates": {"8": {"low_gates": True}, "16": {"low_gates": False}},
    "gradients": {"16": {"gradient": 2.0}, "32": {"gradient": 4.0}, "both": {"gradient": 6.0}},
    "reduce": {"16": {"gradient_wire": 2.0}, "32": {"gradient_wire": 4.0}},
    "moments": {"8": {"moment": 1.0}, "16": {"moment": 2.0}, "32": {"moment": 4.0}},
}
"""Changes of a policy: by name and value, the fields that it sets."""


def load_policy(name: str) -> DtypePolicy:
    """Return a policy by name, changes included.

    >>> found = load_policy("bf16,reduce=16")
    >>> found.name, found.gradient_wire, found.gradient
    ('mixed,reduce=16', 2.0, 4.0)

    Raises:
        JobError: If there is none of that name, or no such change.
    """
    base, *changes = (part.strip() for part in name.split(","))
    policy = POLICIES.get(ALIASES.get(base, base))
    if policy is None:
        raise JobError(f"there is no precision {base!r}", hint=f"choose {', '.join(ALIASES)}, {', '.join(POLICIES)}")
    made: dict[str, str] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in _CHANGES:
            raise JobError(f"precision {name!r}: there is no {key!r}", hint=f"change {', '.join(_CHANGES)}")
        if value not in _CHANGES[key]:
            raise JobError(
                f"precision {name!r}: {key} is {value!r}", hint=f"{key} is one of {', '.join(_CHANGES[key])}"
            )
        if key in ("weights", "copies", "gates") and policy.format is None:
            raise JobError(
                f"precision {name!r}: {base} quantizes no weights", hint=f"choose {', '.join(FORMATS)} for that"
            )
        if key in made:
            raise JobError(f"precision {name!r} says {key} twice", hint="say it once")
        made[key] = value
        policy = replace(policy, **_CHANGES[key][value])  # type: ignore[arg-type]  # fields of the policy
    words = [policy.name.partition(",")[0], *(f"{key}={made[key]}" for key in _CHANGES if key in made)]
    return replace(policy, name=",".join(words))

"""The IR: an SSA graph of ONNX ops over typed values.

One graph describes one *microbatch* of a job on one (virtual) device: all shapes are global. Ops keep their ONNX
semantics, so each can be executed alone; gradient and optimizer kernels are functions of domain `autopar` with an
ONNX body (`autopar.ir.functions`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import networkx

Attr = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""What an op attribute may be. Tensor attributes become constants of the graph when a model is imported."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


FROZEN = "frozen"
"""Metadata of a graph: JSON of the names of parameters that are not trained."""

PACKED = "packed"
"""Metadata of a graph: JSON of the number of weights by parameter, where a byte holds several; 0 for their scales."""

STORED = "stored"
"""Metadata of a graph: JSON of the bytes per element by parameter, where that is not what the job's precision says."""


BRANCHES = "branches"
"""Metadata of a graph: experts of a layer that are written as separate branches, each on all tokens."""

SEPARATED = "separated"
"""Metadata of a graph: JSON of the parameter of the file by parameter of the graph, where that is a part of it."""


class Phase(StrEnum):
    """When an op runs: `UPDATE` once per step, the others once per microbatch."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(StrEnum):
    """What a persistent tensor (an input that outlives the step) is.

    `GRADIENT` is the buffer in which gradients of the microbatches are summed; `BUFFER` is not trained (running
    means, masks).
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    MOMENT = "moment"


@dataclass(frozen=True, slots=True)
class Value:
    """A typed tensor. `dtype` is numpy's name, or `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers (and so subject to mixed precision)."""
        return "float" in self.dtype

    def __reduce__(self) -> tuple[type["Value"], tuple[object, ...]]:
        # Processes are sent whole graphs: what dataclasses with slots do by themselves takes longer.
        return Value, (self.name, self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


class LinearProduct(StrEnum):
    """Which product of a linear layer an op is."""

    FORWARD = "forward"
    INPUT_GRADIENT = "dgrad"
    WEIGHT_GRADIENT = "wgrad"


class Cast(StrEnum):
    """Who quantizes the activations, or their gradients, that a product of a linear layer reads."""

    OWN = "own"  # a kernel of its own before the product
    BY_MAKER = "maker"  # the kernel that makes them, if it may
    BEFORE = "before"  # an earlier product of the same block and phase has paid for it


@dataclass(frozen=True, slots=True)
class Linear:
    """An op as a product of a linear layer (`autopar.ir.linear`).

    Attributes:
        product: Which one.
        cast: Who quantizes what it reads besides the weight: x of a forward product, dy of a gradient.
        kept: Whether the product of a weight gradient reads that, too, and so a transposed copy of it.
    """

    product: LinearProduct
    cast: Cast
    kept: bool

    def __str__(self) -> str:
        return f"{self.product}/{self.cast}{'/kept' if self.kept else ''}"


def parse_linear(text: str) -> Linear:
    """Return what `str` of a `Linear` wrote.

    Raises:
        ValueError: If it is nothing of the kind.

    >>> parse_linear("dgrad/own/kept")
    Linear(product=<LinearProduct.INPUT_GRADIENT: 'dgrad'>, cast=<Cast.OWN: 'own'>, kept=True)
    """
    product, cast, *kept = text.split("/")
    if kept not in ([], ["kept"]):
        raise ValueError(text)
    return Linear(LinearProduct(product), Cast(cast), bool(kept))


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name: Unique in the graph.
        kind: ONNX op type, prefixed with `domain::` unless the domain is the default one ("MatMul", "autopar::Adam").
        inputs: Value names; "" stands for an absent optional input.
        outputs: Value names; "" stands for an output nobody asked for.
        attrs: Attributes sorted by name.
        phase: When it runs.
        block: Index of its block in the chain of blocks, -1 before blocks were found. Backward and update ops carry
            the block of the forward op they belong to.
        origin: Name of the forward op a backward op differentiates, or the parameter an update op updates; ""
            otherwise.
        linear: Which product of a linear layer it is; None for all other ops.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    phase: Phase = Phase.FORWARD
    block: int = -1
    origin: str = ""
    linear: Linear | None = None

    def attr(self, name: str, default: Attr | None = None) -> Attr | None:
        """Return an attribute's value, or `default`."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def __reduce__(self) -> tuple[type["Op"], tuple[object, ...]]:
        own = (
            self.name,
            self.kind,
            self.inputs,
            self.outputs,
            self.attrs,
            self.phase,
            self.block,
            self.origin,
            self.linear,
        )
        return Op, own  # as of values


@dataclass(frozen=True, slots=True)
class State:
    """A persistent tensor: it enters a step as value `input` and leaves it as value `output`.

    `output` is `input` itself if the step leaves the tensor as it is.

    `owner` is the parameter a gradient buffer or a moment belongs to; a parameter owns itself.
    """

    input: str
    output: str
    role: Role
    owner: str

    def __reduce__(self) -> tuple[type["State"], tuple[object, ...]]:
        return State, (self.input, self.output, self.role, self.owner)  # as of values


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A model, or a whole training step. Treat the mappings as read-only; passes build new graphs.

    Attributes:
        name: Name of the model.
        opset: Version of the default ONNX domain the ops follow.
        values: Every value by name, in order of definition.
        inputs: Data that arrives with every microbatch (tokens, labels).
        states: Persistent tensors: parameters, buffers, gradient sums, optimizer moments.
        constants: Known small data (target shapes, axes, scalars) by value name.
        ops: In topological order.
        outputs: Results of a microbatch (logits; the loss).
        metadata: Notes of the import, such as `PACKED`.
    """

    name: str
    opset: int
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    states: tuple[State, ...]
    constants: Mapping[str, NDArray[np.generic]]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[Value, ...]:
        """The trained tensors."""
        return tuple(self.values[state.input] for state in self.states if state.role is Role.PARAMETER)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; of packed ones the weights they hold."""
        packed: dict[str, int] = json.loads(self.metadata.get(PACKED, "{}"))
        return sum(packed.get(value.name, value.size) for value in self.parameters)

    @property
    def num_trained(self) -> int:
        """Elements of the parameters that are not frozen."""
        frozen = set(json.loads(self.metadata.get(FROZEN, "[]")))
        return sum(value.size for value in self.parameters if value.name not in frozen)

    @property
    def num_blocks(self) -> int:
        """Length of the chain of blocks; 0 before blocks were found."""
        return 1 + max((op.block for op in self.ops), default=-1)

    def producers(self) -> dict[str, Op]:
        """Return the op that defines each value; inputs, states and constants have none."""
        return {name: op for op in self.ops for name in op.outputs if name}

    def to_networkx(self) -> "networkx.MultiDiGraph[str]":
        """Return the graph for the algorithms of networkx: ops are nodes, what one op reads of another an edge.

        A node of an op has the op's name, and its fields as attributes: `kind`, `phase`, `block`, `origin`, `attrs`,
        `inputs`, `outputs`. Inputs, states and constants are nodes too, called `%` and their name, of kind "input",
        "state" (with its `role`) or "constant", with `shape` and `dtype`. An edge has the index of the consumer's input
        as its key, and `value`, `shape` and `dtype`. `name`, `opset` and `outputs` are attributes of the graph.

        >>> values = {name: Value(name, (8, 4), "float32") for name in ("x", "y", "z")}
        >>> ops = Op("y", "Relu", ("x",), ("y",), block=0), Op("z", "Add", ("y", "y"), ("z",), block=1)
        >>> found = Graph("g", 24, values, ("x",), (), {}, ops, ("z",)).to_networkx()
        >>> list(found.edges(keys=True))
        [('%x', 'y', 0), ('y', 'z', 0), ('y', 'z', 1)]
        """
        import networkx

        found: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(
            name=self.name, opset=self.opset, outputs=self.outputs
        )
        sources = [(name, {"kind": "input"}) for name in self.inputs]
        sources += [(state.input, {"kind": "state", "role": str(state.role)}) for state in self.states]
        sources += [(name, {"kind": "constant"}) for name in self.constants]
        makers = {name: op.name for op in self.ops for name in op.outputs if name}
        for name, facts in sources:
            makers[name] = f"%{name}"
            value = self.values[name]
            found.add_node(makers[name], **facts, shape=value.shape, dtype=value.dtype)
        for op in self.ops:
            own: dict[str, object] = {"kind": op.kind, "phase": str(op.phase), "block": op.block, "origin": op.origin}
            found.add_node(op.name, **own, attrs=dict(op.attrs), inputs=op.inputs, outputs=op.outputs)
            for slot, name in enumerate(op.inputs):
                if name:
                    value = self.values[name]
                    found.add_edge(makers[name], op.name, slot, value=name, shape=value.shape, dtype=value.dtype)
        return found

    def consumers(self) -> dict[str, list[Op]]:
        """Return the ops that read each value, in program order, each once."""
        users: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                if name:
                    users.setdefault(name, []).append(op)
        return users

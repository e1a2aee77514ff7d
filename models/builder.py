"""Writes ONNX graphs whose weights have a shape but no data.

A weight is an initializer with external data whose file does not exist: a graph with 1e12 parameters is a megabyte. How
a weight is initialised is written beside it (`INIT_KEY`), so that `autopar.models.values` can make small models
runnable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from autopar.ir.functions import DOMAIN, function_proto

if TYPE_CHECKING:
    import onnx

OPSET = 24
"""Version of the default domain: the first with Attention, RMSNormalization, RotaryEmbedding and Swish together."""

IR_VERSION = 12
"""ONNX file format that came with the opset; initializers carry metadata since 10."""

BUFFERS_KEY = "autopar.buffers"
"""Model metadata: comma-separated names of the initializers that are not trained."""

INIT_KEY = "autopar.init"
"""Initializer metadata: `normal STD`, `constant VALUE`, `rope-cos THETA` or `rope-sin THETA`, or, of any frequencies in
radians per position, `angles-cos SCALE:FREQUENCY,...` or `angles-sin SCALE:FREQUENCY,...`, behind which `:GRID` may
state the places of patches (`values.grid_text`), or `:@FIRST` the first position, or `temperature STEP:GROWTH`, behind
which `:FIRST` may state it, too, or `sinusoids LONGEST`, sines and
cosines of positions at wavelengths of up to 2 pi LONGEST, or `distances SLOPE,...`, a row per slope of slope times
distance, 0 in the middle, or `places FIRST:SPACING:COLUMNS`, sines and cosines of columns and rows of patches."""

Dims = Sequence[int | str]
"""A shape; a string names a dynamic dim."""


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    init: str


@dataclass(frozen=True, slots=True)
class _Node:
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, int | float | str | Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Port:
    name: str
    shape: tuple[int | str, ...]
    dtype: str


class Builder:
    """Collects one graph. Values are referred to by name; a node is called like its first output.

    Args:
        name: Name of the graph.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._inputs: list[_Port] = []
        self._weights: list[_Weight] = []
        self._buffers: list[str] = []
        self._constants: dict[tuple[int, ...] | int, str] = {}
        self._scales: dict[tuple[float, ...] | float, str] = {}
        self._nodes: list[_Node] = []
        self._batch_shapes: dict[tuple[str, int], str] = {}

    def input(self, name: str, shape: Dims, dtype: str = "float32") -> str:
        """Declare data that arrives with every batch."""
        self._inputs.append(_Port(name, tuple(shape), dtype))
        return name

    def parameter(self, name: str, shape: Sequence[int], init: str = "normal 0.02") -> str:
        """Declare a trained float32 tensor."""
        self._weights.append(_Weight(name, tuple(shape), init))
        return name

    def buffer(self, name: str, shape: Sequence[int], init: str) -> str:
        """Declare a float32 tensor that is not trained: running statistics, tables."""
        self._buffers.append(name)
        return self.parameter(name, shape, init)

    def shared_buffer(self, name: str, shape: Sequence[int], init: str) -> str:
        """Declare a tensor that is not trained, if it is not there yet."""
        return name if name in self._buffers else self.buffer(name, shape, init)

    def constant(self, value: Sequence[int] | int) -> str:
        """Return an int64 constant: a shape, axes, a scalar. Equal ones are stored once."""
        key = value if isinstance(value, int) else tuple(value)
        if key not in self._constants:
            self._constants[key] = f"const.{len(self._constants)}"
        return self._constants[key]

    def scales(self, values: Sequence[float]) -> str:
        """Return a float32 constant of factors, one per dim."""
        return self._scales.setdefault(tuple(values), f"scales.{len(self._scales)}")

    def scalar(self, value: float) -> str:
        """Return a float32 constant without dims."""
        return self._scales.setdefault(value, f"scales.{len(self._scales)}")

    def op(self, kind: str, *inputs: str, name: str, **attrs: int | float | str | Sequence[int]) -> str:
        """Append a node with one output, both called `name`, and return it.

        A kind of domain `autopar` is written with that prefix ("autopar::GroupedMatMul").
        """
        return self.ops(kind, *inputs, names=(name,), **attrs)[0]

    def ops(
        self, kind: str, *inputs: str, names: Sequence[str], **attrs: int | float | str | Sequence[int]
    ) -> tuple[str, ...]:
        """Append a node with several outputs and return their names."""
        self._nodes.append(_Node(kind, inputs, tuple(names), attrs))
        return tuple(names)

    def batch_shape(self, value: str, rank: int) -> str:
        """Return the shape `[batch, 1, ..., 1]` of the given rank, its first dim read from an input; written once."""
        key = value, rank
        if key not in self._batch_shapes:
            number = f"{rank}" if any(of == value for of, _ in self._batch_shapes) else ""
            batch = self.op("Shape", value, name=f"{value}.batch{number}", start=0, end=1)
            ones = self.constant((1,) * (rank - 1))
            self._batch_shapes[key] = self.op("Concat", batch, ones, name=f"{value}.batch_shape{number}", axis=0)
        return self._batch_shapes[key]

    def model(self, outputs: Mapping[str, Dims]) -> "onnx.ModelProto":
        """Return the graph as a model with float32 outputs of the given shapes."""
        from onnx import StringStringEntryProto, TensorProto, helper

        def port(item: _Port) -> "onnx.ValueInfoProto":
            elem = TensorProto.INT64 if item.dtype == "int64" else TensorProto.FLOAT
            return helper.make_tensor_value_info(item.name, elem, item.shape)

        initializers: list[onnx.TensorProto] = []
        offset = 0
        for weight in self._weights:
            num_bytes = 4 * prod(weight.shape)
            place = {"location": f"{self.name}.weights", "offset": str(offset), "length": str(num_bytes)}
            initializers.append(
                TensorProto(
                    name=weight.name,
                    dims=weight.shape,
                    data_type=TensorProto.FLOAT,
                    data_location=TensorProto.EXTERNAL,
                    external_data=[StringStringEntryProto(key=key, value=value) for key, value in place.items()],
                    metadata_props=[StringStringEntryProto(key=INIT_KEY, value=weight.init)],
                )
            )
            offset += num_bytes
        for value, name in self._constants.items():
            dims, data = ((len(value),), value) if isinstance(value, tuple) else ((), (value,))
            initializers.append(helper.make_tensor(name, TensorProto.INT64, dims, data))
        for factors, name in self._scales.items():
            sizes, numbers = ((len(factors),), factors) if isinstance(factors, tuple) else ((), (factors,))
            initializers.append(helper.make_tensor(name, TensorProto.FLOAT, sizes, numbers))
        graph = helper.make_graph(
            nodes=[
                helper.make_node(
                    node.kind.rpartition("::")[2],
                    node.inputs,
                    node.outputs,
                    node.outputs[0],
                    domain=node.kind.rpartition("::")[0],
                    **node.attrs,
                )
                for node in self._nodes
            ],
            name=self.name,
            inputs=[port(item) for item in self._inputs],
            outputs=[port(_Port(name, tuple(shape), "float32")) for name, shape in outputs.items()],
            initializer=initializers,
        )
        own = sorted({node.kind for node in self._nodes if node.kind.startswith(f"{DOMAIN}::")})
        opsets = [helper.make_opsetid("", OPSET)] + ([helper.make_opsetid(DOMAIN, 1)] if own else [])
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            functions=[function_proto(kind) for kind in own],
            ir_version=IR_VERSION,
            producer_name="autopar",
        )
        helper.set_model_props(model, {BUFFERS_KEY: ",".join(self._buffers)})
        return model

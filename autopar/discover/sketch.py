"""What a rule depends on: an op without its names.

A `Sketch` holds kind, attributes, and for each input its shape, dtype class and, for small known constants, the
content. Two ops with equal sketches have the same rule. Proxy ops (`autopar.discover.shrink`) are sketches, too, with
small shapes.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.execute.executor import split_kind
from autopar.ir.graph import Attr, Graph, Op

_MAX_CONTENT = 16
"""Integer constants up to this many elements are taken for shapes, axes and the like, whose numbers matter."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of a sketch.

    Attributes:
        shape: Global shape.
        dtype: numpy's name; all floating types are "float64", in which rules are discovered.
        content: Flat values of a small known constant (integers, or a scalar); None for a tensor that may hold
            anything.
    """

    shape: tuple[int, ...]
    dtype: str
    content: tuple[int, ...] | tuple[float, ...] | None = None

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype == "float64"

    @property
    def is_shape_like(self) -> bool:
        """Whether its integers say what to do (a target shape, axes) and are not data."""
        return self.content is not None and not self.is_float and self.dtype != "bool"

    def __str__(self) -> str:
        return _text(self.shape) if self.content is None else "{" + ",".join(map(_text, self.content)) + "}"

    def array(self) -> NDArray[Any]:
        """Return the content as an array."""
        assert self.content is not None, "only a constant has content"
        return np.array(self.content, dtype=self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Sketch:
    """An op without names; see the module.

    Attributes:
        kind: Op kind.
        attrs: Attributes sorted by name.
        opset: Version of the default domain.
        body: Hash of the body of a function kind, "" for a standard op.
        inputs: One operand per input, None for an absent one.
        outputs: Shape per output, None for one nobody asked for.
    """

    kind: str
    attrs: tuple[tuple[str, Attr], ...]
    opset: int
    body: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[tuple[int, ...] | None, ...]

    @property
    def digest(self) -> str:
        """A hash that is the same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:24]

    @property
    def shapes(self) -> str:
        """The shapes of inputs and outputs as text, constants by their content.

        >>> inputs = Operand((4, 6), "float64"), Operand((2,), "int64", (1, 2))
        >>> Sketch("Tile", (), 24, "", inputs, ((4, 12),)).shapes
        '[4,6], {1,2} -> [4,12]'
        """
        inputs = ", ".join("-" if operand is None else str(operand) for operand in self.inputs)
        outputs = ", ".join("-" if shape is None else _text(shape) for shape in self.outputs)
        return f"{inputs} -> {outputs}"

    @property
    def settings(self) -> str:
        """The attributes as text.

        >>> Sketch("Conv", (("group", 1), ("strides", (2, 2))), 24, "", (), ()).settings
        'group=1, strides=[2,2]'
        """
        return ", ".join(f"{name}={_text(value)}" for name, value in self.attrs)

    def with_inputs(self, inputs: tuple[Operand | None, ...]) -> "Sketch":
        """Return the sketch with other inputs."""
        return replace(self, inputs=inputs)


def _text(value: Attr) -> str:
    """Return an attribute or a shape for reading."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def function_digest(kind: str) -> str:
    """Return a hash of a function kind's body, "" for ops of other domains."""
    domain, _ = split_kind(kind)
    if domain != "autopar":
        return ""
    from autopar.ir.functions import FUNCTIONS

    return hashlib.sha256(FUNCTIONS.get(kind, "").encode()).hexdigest()[:16]


def sketch_op(graph: Graph, op: Op) -> Sketch:
    """Return the sketch of an op of a graph."""
    return Sketch(
        kind=op.kind,
        attrs=op.attrs,
        opset=graph.opset,
        body=function_digest(op.kind),
        inputs=tuple(_operand(graph, name) if name else None for name in op.inputs),
        outputs=tuple(graph.values[name].shape if name else None for name in op.outputs),
    )


def _operand(graph: Graph, name: str) -> Operand:
    value = graph.values[name]
    dtype = "float64" if value.is_float else value.dtype
    data = graph.constants.get(name)
    if data is not None and data.ndim == 1 and data.size > 4 and np.array_equal(data, np.arange(data.size)):
        return Operand(value.shape, dtype)  # the ids of rows: data, of which a device may hold a part
    if data is not None and (data.size == 1 or (not value.is_float and data.size <= _MAX_CONTENT and data.ndim <= 1)):
        flat = data.astype("float64" if value.is_float else "int64").reshape(-1)
        return Operand(value.shape, dtype, tuple(flat.tolist()))
    return Operand(value.shape, dtype)

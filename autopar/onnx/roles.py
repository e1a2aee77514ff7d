"""What the initializers of a model are: trained tensors, buffers or known constants.

ONNX does not say which of its initializers are trained. In order of precedence:

1. names listed in the model's metadata `autopar.buffers` are buffers;
2. PyTorch's exporter notes on each initializer whether it was a parameter or a buffer;
3. running statistics (inputs 3 and 4 of `BatchNormalization`) are buffers;
4. integers, booleans, single numbers and inputs that must be known (sizes of a `Resize`) are constants if they are
   small and their data is
   there, else buffers;
5. any other float tensor is trained, unless metadata of the initializer says that it is frozen (`autopar.frozen`).
"""

from collections.abc import Iterator, Mapping
from math import prod

import onnx

from autopar.ir.graph import Role
from autopar.onnx.reader import Source
from autopar.onnx.tensors import DTYPES, MAX_CONSTANT, has_data

BUFFERS_KEY = "autopar.buffers"
"""Model metadata: comma-separated names of the initializers that are not trained."""

FROZEN_KEY = "autopar.frozen"
"""Metadata of an initializer that is a parameter, but not trained."""

_TORCH_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Where PyTorch's exporter says "PARAMETER" or "BUFFER"; other exporters do not."""

NOTES = frozenset({FROZEN_KEY, _TORCH_KEY})
"""Metadata of an initializer that say what it is."""

_STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}

_PACKED = {("MatMulNBits", 1), ("MatMulNBits", 2), ("MatMulNBits", 3)}
"""Weights of a few bits, their scales and zero points: parameters that are not trained."""

_TABLES = {
    ("RotaryEmbedding", 1), ("RotaryEmbedding", 2), ("RotaryEmbedding", 3), ("GroupQueryAttention", 7),
    ("GroupQueryAttention", 8),
}  # fmt: skip
"""Sines and cosines, of the standard's op and of ONNX Runtime's."""

_KNOWN_SLOTS: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2), "OneHot": (1, 2), "Pad": (2,), "Range": (0, 1, 2), "Resize": (1, 2), "Upsample": (1,),
}  # fmt: skip
"""Inputs whose elements, floats too, shape the op."""

_WEIGHT_SLOTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (1, 2), "BatchNormalization": (1, 2), "CausalAttention": (1, 2), "Conv": (1, 2),
    "ConvTranspose": (1, 2), "FusedConv": (1, 2), "FusedGemm": (1, 2), "FusedMatMul": (1,), "Gemm": (1, 2),
    "MatMul": (1,), "RelativeAttention": (1, 2, 3), "SinkAttention": (1, 2, 3), "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
}  # fmt: skip
"""Inputs that hold weights when they do not depend on data."""


class Roles:
    """Answers what a tensor of the model is.

    Args:
        source: The model.
    """

    def __init__(self, source: Source) -> None:
        graph = source.model.graph
        listed = next((entry.value for entry in source.model.metadata_props if entry.key == BUFFERS_KEY), "")
        self._buffers = set(listed.split(",")) if listed else set()
        self._torch = _noted(graph, _TORCH_KEY)
        self._frozen = frozenset(_noted(graph, FROZEN_KEY))
        self._uses: dict[str, set[tuple[str, int]]] = {}
        self._inputs = {item.name for item in graph.input}
        graphs = list(_graphs(graph))
        nodes = [node for each in graphs for node in each.node]
        self._initializers = {item.name for each in graphs for item in each.initializer}
        names = {node.output[0] for node in nodes if node.op_type in ("Constant", "ConstantOfShape") and node.output}
        names |= self._initializers
        self._unpacked: dict[str, int] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                if name in names:
                    self._uses.setdefault(name, set()).add((node.op_type, slot))
                    if (node.op_type, slot) in _PACKED:
                        self._unpacked[name] = _unpacked_size(node) if slot == 1 else 0

    def of(self, tensor: onnx.TensorProto, source: Source) -> Role | None:
        """Return the role of an initializer, None if it is a constant with data."""
        name = tensor.name
        is_float = "float" in DTYPES.get(tensor.data_type, "")
        size = prod(tensor.dims)
        known = size <= MAX_CONSTANT and has_data(tensor, source.folder)
        kind = self._torch.get(name, "")
        if self._used(name, _PACKED):
            return Role.PARAMETER
        if name in self._buffers or self._used(name, _STATISTICS) or (is_float and self._used(name, _TABLES)):
            return Role.BUFFER
        if kind == "PARAMETER" and is_float:
            return Role.PARAMETER
        if known and (not is_float or size <= 1 or self._in_slots(name, _KNOWN_SLOTS)):
            return None
        if kind == "BUFFER" or not is_float:
            return Role.BUFFER
        if self._torch and not kind and not self._in_slots(name, _WEIGHT_SLOTS):
            # PyTorch names all its parameters: this one was made by the exporter.
            return None if known else Role.BUFFER
        return Role.PARAMETER

    def of_constant(self, name: str, size: int, is_float: bool) -> Role | None:
        """Return the role of the result of a `Constant` node."""
        if is_float and size > 1 and self._in_slots(name, _WEIGHT_SLOTS):
            return Role.PARAMETER
        return None if size <= MAX_CONSTANT else Role.BUFFER

    def of_filled(self, name: str, shape: str) -> Role | None:
        """Return the role of the float result of a `ConstantOfShape` node: None if it is no weight.

        Models without weights are shipped so: a node for each weight, its shape an initializer that is an input, too.
        """
        if self._used(name, _STATISTICS):
            return Role.BUFFER
        is_weight = shape in self._initializers and (shape in self._inputs or self._in_slots(name, _WEIGHT_SLOTS))
        return Role.PARAMETER if is_weight else None

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is not trained."""
        return name in self._frozen or self._used(name, _PACKED)

    def unpacked_size(self, name: str) -> int | None:
        """Return the weights that a parameter of packed bytes holds, 0 for scales and zero points; None if unpacked."""
        return self._unpacked.get(name)

    def _used(self, name: str, slots: set[tuple[str, int]]) -> bool:
        return not slots.isdisjoint(self._uses.get(name, ()))

    def _in_slots(self, name: str, slots: Mapping[str, tuple[int, ...]]) -> bool:
        return any(slot in slots.get(kind, ()) for kind, slot in self._uses.get(name, ()))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the bodies of its control flow."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _unpacked_size(node: onnx.NodeProto) -> int:
    """Return the number of elements of the K x N matrix that a `MatMulNBits` holds packed."""
    sizes: dict[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
    return max(0, sizes.get("K", 0)) * max(0, sizes.get("N", 0))


def _noted(graph: onnx.GraphProto, key: str) -> dict[str, str]:
    """Return what the metadata of initializers say under a key, by name."""
    return {
        item.name: entry.value
        for items in (graph.value_info, graph.initializer)
        for item in items
        for entry in item.metadata_props
        if entry.key == key
    }

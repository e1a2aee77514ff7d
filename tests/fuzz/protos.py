"""Mutations of ONNX models: of their messages, field by field, and of their bytes."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz import edges, octets

_BYTES = 0.15
"""Share of cases in which bytes are changed and not the structure."""
_KINDS = (
    "Add", "MatMul", "Gemm", "Conv", "Relu", "Softmax", "Reshape", "Transpose", "Concat", "Split", "Slice", "Gather",
    "If", "Loop", "Scan", "Constant", "ConstantOfShape", "Shape", "Expand", "Identity", "Dropout", "TopK", "Einsum",
    "Cast", "Squeeze", "Unsqueeze", "ReduceSum", "Where", "LayerNormalization", "Attention", "Resize", "NonZero",
    "LSTM", "BatchNormalization", "MaxPool", "Pad", "Tile", "Range", "CumSum", "ScatterND", "Nothing",
)  # fmt: skip
Files = Mapping[str, bytes]


def mutated(random: Random) -> tuple[bytes, Files]:
    """Return the bytes of a model that is nearly right, and the files beside it."""
    name = random.choice(list(MODELS))
    model = onnx.ModelProto()
    model.CopyFrom(_built(name))
    others: dict[str, bytes] = {"tactics.yaml": b"- data_parallel: {axis: a}\n", "data.bin": bytes(4096)}
    if random.random() < _BYTES:
        return octets.mutated(random, model.SerializeToString()), others
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_MUTATIONS)(random, model)
    data = model.SerializeToString()
    if random.random() < 0.1:  # bytes that are no text, in place of a name of the same length
        data = data.replace(b"weight", b"\xff\xfe\x80w\xc3\x28")
    return data, others


@cache
def _built(name: str) -> onnx.ModelProto:
    return MODELS[name]()


def _model(nodes: list[onnx.NodeProto], shape: tuple[int | str, ...], weights: Mapping[str, Any], **more: Any) -> Any:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), *more.pop("domains", ())], **more)


def _perceptron() -> onnx.ModelProto:
    weight = np.ones((8, 8), np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("Gemm", ["r", "weight2", "bias"], ["y"], name="second", alpha=0.5, transB=1),
    ]
    return _model(nodes, (8,), {"weight": weight, "weight2": weight, "bias": np.zeros(8, np.float32)})


def _picture() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "weight"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], group=1),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], axis=1),
        helper.make_node("MatMul", ["f", "weight2"], ["y"]),
    ]
    weights = {"weight": np.ones((4, 3, 3, 3), np.float32), "weight2": np.ones((64, 4), np.float32)}
    return _model(nodes, (3, 8, 8), weights)


def _shapes() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["b"]),
        helper.make_node("Concat", ["b", "rest"], ["target"], axis=0),
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("Reshape", ["h", "target"], ["t"]),
        helper.make_node("Transpose", ["t"], ["u"], perm=[0, 2, 1]),
        helper.make_node("Softmax", ["u"], ["v"], axis=-1),
        helper.make_node("ReduceSum", ["v", "one"], ["y"], keepdims=0),
    ]
    weights = {"zero": [0], "one": [1], "rest": [2, 4], "weight": np.ones((8, 8), np.float32)}
    return _model(nodes, (8,), weights)


def _branches() -> onnx.ModelProto:
    def branch(kind: str) -> onnx.GraphProto:
        node = helper.make_node(kind, ["h"], [f"{kind}_out"])
        return helper.make_graph([node], kind, [], [helper.make_tensor_value_info(f"{kind}_out", 1, None)])

    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("If", ["flag"], ["i"], name="if", then_branch=branch("Relu"), else_branch=branch("Tanh")),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32(2))),
        helper.make_node("Mul", ["i", "c"], ["y"]),
    ]
    return _model(nodes, (8,), {"weight": np.ones((8, 8), np.float32), "flag": np.array(True)})


def _loop() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["state", "state"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("Loop", ["trips", "go0", "h"], ["y"], body=body),
    ]
    return _model(nodes, (8,), {"weight": np.ones((8, 8), np.float32), "trips": np.array(3), "go0": np.array(True)})


def _functions() -> onnx.ModelProto:
    def twice(name: str, inner: str, domain: str) -> onnx.FunctionProto:
        nodes = [
            helper.make_node(inner, ["a"], ["b"], domain=domain),
            helper.make_node(inner, ["b"], ["c"], domain=domain),
        ]
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
        return helper.make_function("local", name, ["a"], ["c"], nodes, opsets)

    functions = [twice("f0", "Relu", ""), twice("f1", "f0", "local"), twice("f2", "f1", "local")]
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("f2", ["h"], ["y"], domain="local"),
    ]
    weights = {"weight": np.ones((8, 8), np.float32)}
    return _model(nodes, (8,), weights, functions=functions, domains=(helper.make_opsetid("local", 1),))


def _external() -> onnx.ModelProto:
    model = _perceptron()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "data.bin"), ("offset", "0"), ("length", "256")):
        weight.external_data.add(key=key, value=value)
    return model


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "perceptron": _perceptron,
    "picture": _picture,
    "shapes": _shapes,
    "branches": _branches,
    "loop": _loop,
    "functions": _functions,
    "external": _external,
}
"""Models that are right."""


def _messages(message: Message) -> Iterator[Message]:
    """Yield a message and all inside it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in _items(field, value):
                yield from _messages(inner)


def _items(field: FieldDescriptor, value: Any) -> list[Any]:
    return list(value) if _repeats(field) else [value]


def _repeats(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _any_field(random: Random, model: onnx.ModelProto) -> None:
    """Change a field of some message to another value of its type, or clear it."""
    message = random.choice(list(_messages(model)))
    held = [field for field, _ in message.ListFields()]
    fields = held if held and random.random() < 0.8 else list(message.DESCRIPTOR.fields)
    field = random.choice(fields)
    if random.random() < 0.25:
        message.ClearField(field.name)
        return
    if field.message_type is not None:
        _message_field(random, message, field)
        return
    value = _value(random, field, getattr(message, field.name) if not _repeats(field) else None)
    if not _repeats(field):
        setattr(message, field.name, value)
        return
    values = getattr(message, field.name)
    match random.randrange(4):
        case 0 if values:
            values[random.randrange(len(values))] = value
        case 1 if values:
            del values[random.randrange(len(values))]
        case 2:
            values.extend([value] * random.choice((1, 30, 70)))
        case _:
            values.append(value)


def _message_field(random: Random, message: Message, field: FieldDescriptor) -> None:
    """Add, repeat, drop or reorder messages of a field."""
    if not _repeats(field):
        getattr(message, field.name).SetInParent()
        return
    values = getattr(message, field.name)
    match random.randrange(5):
        case 0 if values:
            del values[random.randrange(len(values))]
        case 1 if values:
            values.add().CopyFrom(random.choice(list(values)))
        case 2 if values:
            kept = [type(value).FromString(value.SerializeToString()) for value in values]
            random.shuffle(kept)
            del values[:]
            values.extend(kept)
        case 3 if values:
            random.choice(list(values)).Clear()
        case _:
            values.add()


def _value(random: Random, field: FieldDescriptor, old: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return random.choice([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_STRING:
        return edges.akin(random, old) if isinstance(old, str) else edges.text(random)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return octets.mutated(random, old) if isinstance(old, bytes) else edges.text(random).encode()
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return random.choice((*edges.REAL, float("nan"), float("inf")))
    low, high = (-(2**31), 2**31) if field.type == FieldDescriptor.TYPE_INT32 else (-(2**63), 2**63)
    low = 0 if field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32) else low
    return random.choice([number for number in (*edges.WHOLE, old or 0) if low <= number < high])


def _graphs(model: onnx.ModelProto) -> list[Any]:
    return [message for message in _messages(model) if isinstance(message, onnx.GraphProto | onnx.FunctionProto)]


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for graph in _graphs(model) for node in graph.node]


def _another_kind(random: Random, model: onnx.ModelProto) -> None:
    """Make another op of a node."""
    if nodes := _nodes(model):
        random.choice(nodes).op_type = random.choice(_KINDS)


def _rewired(random: Random, model: onnx.ModelProto) -> None:
    """Have a node read another value, nothing, or what is made later."""
    nodes = [node for node in _nodes(model) if node.input]
    names = [name for node in _nodes(model) for name in (*node.input, *node.output)]
    if nodes:
        node = random.choice(nodes)
        node.input[random.randrange(len(node.input))] = random.choice((*names, "", "missing"))


def _renamed(random: Random, model: onnx.ModelProto) -> None:
    """Give a value a name that breaks what it is printed into, wherever it is named."""
    names = sorted({name for node in _nodes(model) for name in (*node.input, *node.output) if name})
    if not names:
        return
    old, new = random.choice(names), random.choice(edges.NAMES)
    for message in _messages(model):
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_STRING and not _repeats(field) and value == old:
                setattr(message, field.name, new)
            elif field.type == FieldDescriptor.TYPE_STRING and _repeats(field):
                value[:] = [new if item == old else item for item in value]


def _another_shape(random: Random, model: onnx.ModelProto) -> None:
    """Change a dim of an input, an output or a weight."""
    shapes = [message for message in _messages(model) if isinstance(message, onnx.TensorShapeProto)]
    tensors = list(model.graph.initializer)
    if random.random() < 0.5 and tensors:
        tensor = random.choice(tensors)
        if tensor.dims and random.random() < 0.7:
            tensor.dims[random.randrange(len(tensor.dims))] = random.choice(_DIMS)
        else:
            tensor.dims.extend([1] * random.choice((1, 30, 70)))
    elif shapes:
        shape = random.choice(shapes)
        dim = random.choice(list(shape.dim)) if shape.dim and random.random() < 0.7 else shape.dim.add()
        dim.dim_value = random.choice(_DIMS)


_DIMS = (0, 1, 2, 5, -1, -8, 2**31, 2**40, 2**62, 2**63 - 1)


def _nested(random: Random, model: onnx.ModelProto) -> None:
    """Nest branches in branches, or functions in functions, deeply."""
    if model.functions:
        depth = random.choice((5, 22, 60))
        for level in range(3, depth):
            function = model.functions.add()
            function.CopyFrom(model.functions[1])
            function.name = f"f{level}"
            for node in function.node:
                node.op_type = f"f{level - 1}"
        target = random.choice((f"f{depth - 1}", "f0"))
        (model.graph.node[-1] if random.random() < 0.8 else model.functions[0].node[0]).op_type = target
        return
    node = next((node for node in model.graph.node if node.op_type == "If" and node.output), None)
    if node is not None and node.attribute and node.attribute[0].g.node and node.attribute[0].g.output:
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        for _ in range(random.choice((3, 20, 50))):
            outer = onnx.NodeProto()
            outer.CopyFrom(node)
            outer.attribute[0].g.node[0].CopyFrom(inner)
            outer.attribute[0].g.output[0].name = outer.attribute[0].g.node[0].output[0]
            inner = outer
        node.CopyFrom(inner)


_MUTATIONS: tuple[Callable[[Random, onnx.ModelProto], None], ...] = (
    _any_field, _any_field, _any_field, _another_kind, _rewired, _renamed, _another_shape, _nested,
)  # fmt: skip

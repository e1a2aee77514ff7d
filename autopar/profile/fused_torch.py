"""Fused groups in PyTorch: ops of the standard as functions of torch, ours by their bodies.

`torch.compile` turns a group into kernels: C++ on a CPU, Triton on a GPU. What is timed is these kernels and the code
that launches them, without the checks of torch's front end.
"""

from collections.abc import Callable, Mapping
from typing import Any

from autopar.cost.fused_groups import FusedGroup, GroupTensor
from autopar.errors import ExecutionError
from autopar.ir.functions import FUNCTIONS, function_proto

Tensor = Any
Function = Callable[..., Any]


def _table() -> dict[str, Function]:
    """Return functions of the inputs and attributes of an op, by kind."""
    import torch
    from torch.nn import functional

    def axes_of(inputs: tuple[Tensor, ...], x: Tensor) -> list[int]:
        return [int(own) for own in inputs[0]] if inputs and inputs[0] is not None else list(range(x.dim()))

    def reduced(function: Callable[..., Tensor]) -> Function:
        def call(x: Tensor, *rest: Tensor, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
            axes = axes_of(rest, x)
            if not axes:
                return x if noop_with_empty_axes else function(x, list(range(x.dim())), bool(keepdims))
            return function(x, axes, bool(keepdims))

        return call

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        return functional.gelu(x, approximate=approximate)

    def layer_norm(
        x: Tensor, scale: Tensor, bias: Tensor = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ) -> Tensor:
        return functional.layer_norm(x, x.shape[axis % x.dim() :], scale, bias, epsilon)

    def rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
        return functional.rms_norm(x, x.shape[axis % x.dim() :], scale, epsilon)

    def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
        return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)

    def clip(x: Tensor, low: Tensor = None, high: Tensor = None) -> Tensor:
        return torch.clamp(x, low, high)

    def cast(x: Tensor, *, to: int, saturate: int = 1) -> Tensor:
        return x.to(_DTYPES[to](torch))

    return {
        "Abs": torch.abs, "Add": torch.add, "And": torch.logical_and, "Cast": cast, "Clip": clip, "Cos": torch.cos,
        "CastLike": lambda x, like, **_: like_of(x, like), "Div": torch.div, "Equal": torch.eq, "Erf": torch.erf,
        "Exp": torch.exp, "Gelu": gelu, "Greater": torch.gt, "Identity": lambda x: x, "LayerNormalization": layer_norm,
        "LeakyRelu": lambda x, alpha=0.01: functional.leaky_relu(x, alpha), "Less": torch.lt, "Log": torch.log,
        "LogSoftmax": lambda x, axis=-1: torch.log_softmax(x, axis), "Max": torch.maximum, "Min": torch.minimum,
        "Mul": torch.mul, "Neg": torch.neg, "Not": torch.logical_not, "Pow": torch.pow, "RMSNormalization": rms_norm,
        "Reciprocal": torch.reciprocal, "ReduceMax": reduced(torch.amax), "ReduceMean": reduced(torch.mean),
        "ReduceMin": reduced(torch.amin), "ReduceSum": reduced(torch.sum), "Relu": torch.relu,
        "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Softmax": lambda x, axis=-1: torch.softmax(
            x, axis
        ), "Softplus": functional.softplus, "Sqrt": torch.sqrt, "Sub": torch.sub, "Swish": swish, "Tanh": torch.tanh,
        "Where": torch.where,
    }  # fmt: skip


def like_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the element type of another tensor; numbers stay numbers, which kernels have baked in."""
    return x if isinstance(x, float | int) else x.to(like.dtype)


_DTYPES: Mapping[int, Callable[[Any], Any]] = {
    1: lambda torch: torch.float32, 6: lambda torch: torch.int32, 7: lambda torch: torch.int64,
    9: lambda torch: torch.bool, 10: lambda torch: torch.float16, 11: lambda torch: torch.float64,
    16: lambda torch: torch.bfloat16,
}  # fmt: skip
"""Element types by their number in ONNX."""


def _constant(attrs: Mapping[str, Any]) -> Any:
    """Return what an op Constant makes: numbers and lists of numbers, which are baked in."""
    (value,) = attrs.values()
    if hasattr(value, "dims"):
        from onnx import numpy_helper

        data = numpy_helper.to_array(value)
        return data.item() if data.size == 1 else data.tolist()
    return list(value) if isinstance(value, list | tuple) else value


def _sizes(kind: str, inputs: list[Any]) -> Any:
    """Return the result of ops on shapes and axes, which are lists of numbers here."""
    match kind:
        case "Shape":
            return list(inputs[0].shape)
        case "Size":
            return len(inputs[0])
        case "Range":
            return list(range(*inputs))
        case "Unsqueeze":
            return [inputs[0]] if isinstance(inputs[0], int) else inputs[0].unsqueeze(inputs[1][0])
        case _:
            return None


def _run(kind: str, attrs: Mapping[str, Any], inputs: list[Any], table: Mapping[str, Function]) -> list[Any]:
    if kind in FUNCTIONS:
        return _run_body(kind, attrs, inputs, table)
    if kind == "Constant":
        return [_constant(attrs)]
    sized = _sizes(kind, inputs)
    if sized is not None:
        return [sized]
    if kind not in table:
        raise ExecutionError(f"no function of torch for op {kind}")
    return [table[kind](*inputs, **attrs)]


def _run_body(kind: str, attrs: Mapping[str, Any], inputs: list[Any], table: Mapping[str, Function]) -> list[Any]:
    from onnx import helper

    proto = function_proto(kind)
    given = {own.name: helper.get_attribute_value(own) for own in proto.attribute_proto} | dict(attrs)
    known = dict(zip(proto.input, [*inputs, *[None] * (len(proto.input) - len(inputs))], strict=True))
    for node in proto.node:
        own = {
            attr.name: given[attr.ref_attr_name] if attr.ref_attr_name else helper.get_attribute_value(attr)
            for attr in node.attribute
        }
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        own = {key: value.decode() if isinstance(value, bytes) else value for key, value in own.items()}
        made = _run(name, own, [known[read] if read else None for read in node.input], table)
        known.update(zip(node.output, made, strict=False))
    return [known[name] for name in proto.output]


def function_of(group: FusedGroup) -> Callable[..., tuple[Tensor, ...]]:
    """Return a group as a function of its inputs without known data; it returns what is written to memory."""
    table = _table()

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        fed = iter(given)
        values = [_known(own) if own.data is not None else next(fed) for own in group.inputs]
        written = []
        for op in group.ops:
            inputs = [_viewed(values[read.value], read.shape) if read.value >= 0 else None for read in op.reads]
            made = _run(op.kind, dict(op.attrs), inputs, table)
            for result, own in zip(made, op.made, strict=False):
                values.append(result)
                if own.written:
                    written.append(result)
        return tuple(written)

    return call


def _known(own: GroupTensor) -> Any:
    assert own.data is not None, "known data"
    return own.data[0] if own.shape == () else list(own.data)


def _viewed(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, int | float | list) or tuple(value.shape) == shape:
        return value
    return value.reshape(shape)


def traced(group: FusedGroup, inputs: list[Tensor]) -> Any:
    """Return a group as a graph of torch's own ops, without the code that interprets ours."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function_of(group))(*inputs)


class Compiled:
    """A group in kernels of inductor, for any number of samples unless it has views.

    Args:
        group: The group.
        inputs: Tensors of its shapes; those that share their first dim with `batch` may have another one later.
        batch: The number of samples; 0 if kernels are for these shapes only.

    Raises:
        ExecutionError: If torch does not take the group.
    """

    def __init__(self, group: FusedGroup, inputs: list[Tensor], batch: int) -> None:
        import torch
        from torch._inductor.compile_fx import compile_fx

        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

        def backend(module: Any, example: list[Any]) -> Callable[..., object]:
            inner = compile_fx(module, example)

            def call(*args: Any) -> object:
                self._held[:] = [(inner, args)]
                return inner(*args)

            return call

        try:
            module = traced(group, inputs)
            for tensor in inputs:
                if batch and tensor.dim() and tensor.shape[0] == batch:
                    torch._dynamo.mark_dynamic(tensor, 0)
            self._module = torch.compile(module, backend=backend, dynamic=None if batch else False, fullgraph=True)
            self.prepared(inputs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ExecutionError(f"torch.compile does not take the group: {str(error)[:300]}") from error

    def prepared(self, inputs: list[Tensor]) -> Callable[[], object]:
        """Return what runs the kernels once on some tensors, without the checks of torch's front end."""
        import torch

        self._held.clear()
        with torch.no_grad():
            self._module(*inputs)
        if not self._held:
            raise ExecutionError("torch.compile found nothing to compile in the group")
        inner, args = self._held[0]

        def run() -> object:
            with torch.no_grad():
                return inner(*args)

        return run

"""Ops that ONNX Runtime's optimizer and model builder write, as ops of the standard.

They are of domain `com.microsoft`, but for two norms that stand in the default domain before the standard had them.
Sources: the operator reference of ONNX Runtime (docs/ContribOperators.md) and its CPU kernels.

A key-value cache is taken as full: `past_key` holds the keys before the new ones, whatever `seqlens_k` says at run
time. B batch, S new positions, T all positions, N heads, H channels of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.ir.graph import Attr, Value
from autopar.ir.text import numpy_dtype
from autopar.onnx.schema import MICROSOFT
from autopar.onnx.upgrade import Draft


class Sweep(Protocol):
    """What the import does for an op of ONNX Runtime."""

    def value(self, name: str) -> Value:
        """Return the type of a value."""

    def known(self, name: str) -> NDArray[np.generic] | None:
        """Return the elements of a value, None if they are computed at run time."""

    def resolved(self, name: str) -> str:
        """Return the value that a name stands for."""

    def rename(self, name: str, source: str) -> None:
        """Let a name stand for a value."""

    def constant(self, array: NDArray[np.generic], hint: str) -> str:
        """Add a constant and return its name."""

    def emit(self, draft: Draft) -> None:
        """Take in one op of the target opset."""


class _Writer:
    """Writes the ops that stand for one op of ONNX Runtime.

    Args:
        sweep: The import.
        draft: The op.
        what: The op, for errors.
    """

    def __init__(self, sweep: Sweep, draft: Draft, what: str) -> None:
        self.sweep, self.draft, self.what = sweep, draft, what
        self._count = 0

    def input(self, index: int) -> str:
        """Return an input of the op, "" if it is absent."""
        return self.draft.inputs[index] if index < len(self.draft.inputs) else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.sweep.value(name).shape

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute of the op."""
        value = self.draft.attrs.get(name, default)
        if not isinstance(value, int):
            self.refuse(f"its {name} {value!r} is no whole number")
        return int(value)

    def positive(self, name: str) -> int:
        """Return an integer attribute of the op that it has to have, above 0."""
        value = self.integer(name, 0)
        if value < 1:
            self.refuse(f"its {name} is {value}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a float attribute of the op."""
        value = self.draft.attrs.get(name, default)
        if not isinstance(value, int | float):
            self.refuse(f"its {name} {value!r} is no number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return an attribute of the op that is a list of numbers, () if it is absent."""
        value = self.draft.attrs.get(name, ())
        if not isinstance(value, tuple):
            self.refuse(f"its {name} {value!r} is no list")
        return tuple(float(number) for number in value)

    def all(self, kind: str, inputs: Sequence[str], count: int, **attrs: Attr) -> list[str]:
        """Write an op of several outputs and return them."""
        name = f"{self.draft.name}.{self._count}"
        self._count += 1
        outputs = [f"{self.draft.outputs[0] or name}.{self._count}.{index}" for index in range(count)]
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        self.sweep.emit(Draft(name, kind, given, list(outputs), dict(attrs)))
        return [self.sweep.resolved(output) for output in outputs]

    def op(self, kind: str, *inputs: str, **attrs: Attr) -> str:
        """Write an op and return its output."""
        return self.all(kind, inputs, 1, **attrs)[0]

    def ints(self, *numbers: int) -> str:
        """Return a constant vector."""
        return self.sweep.constant(np.array(numbers, np.int64), f"{self.draft.name}.ints.{self._count}")

    def integer_constant(self, number: int) -> str:
        """Return a constant number."""
        return self.sweep.constant(np.array(number, np.int64), f"{self.draft.name}.int.{self._count}")

    def scalar(self, number: float, like: str) -> str:
        """Return a constant number of the type of a value."""
        array = np.array(number, numpy_dtype(self.sweep.value(like).dtype))
        return self.sweep.constant(array, f"{self.draft.name}.scalar.{self._count}")

    def finish(self, *results: str) -> None:
        """Give the results the names of the op's outputs.

        Raises:
            ModelError: If an output is asked for that has no result.
        """
        for index, name in enumerate(self.draft.outputs):
            if name and (index >= len(results) or not results[index]):
                self.refuse(f"output {index} ({name!r}) is read")
            if name:
                self.sweep.rename(name, results[index])

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error for a form that has no counterpart."""
        raise ModelError(
            f"{self.what} is not supported in this form: {reason}",
            hint="export the model without the optimization that writes it, as standard ONNX ops",
        )

    def refuse_inputs(self, names: Mapping[int, str]) -> None:
        """Refuse inputs that have no counterpart."""
        for index, name in names.items():
            if self.input(index):
                self.refuse(f"it has {name}")


def _layer_norm(w: _Writer, x: str, scale: str, bias: str, epsilon: float) -> str:
    return w.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)


def _simplified_layer_norm(w: _Writer) -> None:
    attrs: dict[str, Attr] = {"axis": w.integer("axis", -1), "epsilon": w.number("epsilon", 1e-5)}
    w.finish(w.op("RMSNormalization", w.input(0), w.input(1), **attrs, stash_type=w.integer("stash_type", 1)))


def _old_layer_norm(w: _Writer) -> None:
    """Before opset 17 ONNX Runtime had LayerNormalization in the default domain."""
    attrs: dict[str, Attr] = {"axis": w.integer("axis", -1), "epsilon": w.number("epsilon", 1e-5)}
    w.finish(w.op("LayerNormalization", w.input(0), w.input(1), w.input(2), **attrs))


def _with_skip(w: _Writer, bias: str) -> str:
    total = w.op("Add", w.input(0), w.input(1))
    return w.op("Add", total, bias) if bias else total


def _skip_layer_norm(w: _Writer) -> None:
    total = _with_skip(w, w.input(4))
    w.finish(_layer_norm(w, total, w.input(2), w.input(3), w.number("epsilon", 1e-12)), "", "", total)


def _skip_simplified_layer_norm(w: _Writer) -> None:
    total = _with_skip(w, w.input(3))
    attrs: dict[str, Attr] = {"axis": -1, "epsilon": w.number("epsilon", 1e-12)}
    w.finish(w.op("RMSNormalization", total, w.input(2), **attrs), "", "", total)


def _embed_layer_norm(w: _Writer) -> None:
    tokens, segments = w.input(0), w.input(1)
    if len(w.shape(tokens)) != 2:
        w.refuse(f"its tokens have {len(w.shape(tokens))} dims, not 2")
    length = w.shape(tokens)[1]
    total = w.op("Gather", w.input(2), tokens)
    if w.input(8):
        total = w.op("Add", total, w.op("Gather", w.input(3), w.input(8)))
    else:
        total = w.op("Add", total, w.op("Slice", w.input(3), w.ints(0), w.ints(length), w.ints(0)))
    if segments:
        total = w.op("Add", total, w.op("Gather", w.input(4), segments))
    counted = ""
    if w.input(7):
        counted = w.op("ReduceSum", w.input(7), w.ints(1), keepdims=0)
    w.finish(_layer_norm(w, total, w.input(5), w.input(6), w.number("epsilon", 1e-12)), counted, total)


def _gelu(w: _Writer) -> None:
    w.finish(w.op("Gelu", w.input(0)))


def _biased_gelu(w: _Writer) -> None:
    """BiasGelu, and FastGelu, whose bias may be absent and which is the approximation with tanh."""
    x = w.op("Add", w.input(0), w.input(1)) if w.input(1) else w.input(0)
    kind = "tanh" if w.draft.kind.endswith("FastGelu") else "none"
    w.finish(w.op("Gelu", x, approximate=kind))


def _quick_gelu(w: _Writer) -> None:
    w.finish(w.op("Swish", w.input(0), alpha=w.number("alpha", 1.702)))


def _fused_matmul(w: _Writer) -> None:
    if w.integer("transBatchA", 0) or w.integer("transBatchB", 0):
        w.refuse("it moves batch dims (transBatchA, transBatchB)")
    operands = []
    for index, name in enumerate(("transA", "transB")):
        x = w.input(index)
        rank = len(w.shape(x))
        if w.integer(name, 0) and rank > 1:
            x = w.op("Transpose", x, perm=(*range(rank - 2), rank - 1, rank - 2))
        operands.append(x)
    y = w.op("MatMul", *operands)
    alpha = w.number("alpha", 1.0)
    w.finish(y if alpha == 1.0 else w.op("Mul", y, w.scalar(alpha, y)))


_ACTIVATIONS: Mapping[str, Sequence[str]] = {
    "Relu": (), "Sigmoid": (), "Tanh": (), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"),
}  # fmt: skip
"""Activations that a fused op ends with, and the names of their parameters."""


def _activated(w: _Writer, y: str, parameters: Sequence[float]) -> str:
    kind = str(w.draft.attrs.get("activation", ""))
    if kind == "Clip" and len(parameters) == 2:
        return w.op("Clip", y, *(w.scalar(bound, y) for bound in parameters))
    if kind and kind not in _ACTIVATIONS:
        w.refuse(f"its activation is {kind}")
    return w.op(kind, y, **dict(zip(_ACTIVATIONS[kind], parameters, strict=False))) if kind else y


def _fused_conv(w: _Writer) -> None:
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attrs = {name: w.draft.attrs[name] for name in names if name in w.draft.attrs}
    y = w.op("Conv", w.input(0), w.input(1), w.input(2), **attrs)
    if w.input(3):
        y = w.op("Add", y, w.input(3))
    w.finish(_activated(w, y, w.numbers("activation_params")))


def _fused_gemm(w: _Writer) -> None:
    attrs = {name: w.draft.attrs[name] for name in ("alpha", "beta", "transA", "transB") if name in w.draft.attrs}
    y = w.op("Gemm", w.input(0), w.input(1), w.input(2), **attrs)
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    w.finish(_activated(w, y, [w.number(name, 0.0) for name in names if name in w.draft.attrs]))


def _rotated(w: _Writer, x: str, positions: str, cos: str, sin: str, attrs: Mapping[str, Attr]) -> str:
    """Return x (B, S, N * H) or (B, N, S, H) rotated; `positions` are (B, S), or the first one alone."""
    shape = w.shape(x)
    batch, length = shape[0], shape[-2]
    if w.shape(positions) in ((1,), ()):
        start = w.op("Reshape", positions, w.ints(1, 1))
        line = w.sweep.constant(np.arange(length, dtype=np.int64)[None], f"{w.draft.name}.positions.{x}")
        positions = w.op("Expand", w.op("Add", start, line), w.ints(batch, length))
    return w.op("RotaryEmbedding", x, cos, sin, positions, **attrs)


def _rotary(w: _Writer) -> None:
    if w.integer("is_packed_batching", 0) or w.number("scale", 1.0) not in (0.0, 1.0):
        w.refuse("it scales, or packs sequences of several lengths into one")
    x, positions, cos, sin = (w.input(index) for index in range(4))
    turned = w.integer("rotary_embedding_dim", 0)
    attrs: dict[str, Attr] = {"interleaved": w.integer("interleaved", 0), "rotary_embedding_dim": turned}
    if len(w.shape(x)) == len("BSD"):
        attrs["num_heads"] = w.integer("num_heads", 0) or w.shape(x)[2] // (2 * w.shape(cos)[1])
    w.finish(_rotated(w, x, positions, cos, sin, attrs))


def _visible(w: _Writer, mask: str, keys: int, like: str, hidden: float) -> str:
    """Return numbers to add to the scores for a mask of keys: (B, T), (B, S, T) or lengths (B,)."""
    shape = w.shape(mask)
    if len(shape) == 1:
        line = w.sweep.constant(np.arange(keys, dtype=w.sweep.value(mask).dtype)[None], f"{w.draft.name}.keys")
        seen = w.op("Less", line, w.op("Unsqueeze", mask, w.ints(1)))
        seen = w.op("Unsqueeze", seen, w.ints(1, 2))
    elif len(shape) in (2, 3) and shape[-1] == keys:
        seen = w.op("Cast", mask, to=9)
        seen = w.op("Unsqueeze", seen, w.ints(1, 2) if len(shape) == 2 else w.ints(1))
    else:
        w.refuse(f"its mask is of shape {list(shape)} for {keys} keys")
    return w.op("Where", seen, w.scalar(0.0, like), w.scalar(hidden, like))


def _mask(w: _Writer, mask: str, bias: str, keys: int, like: str) -> str:
    """Return what is added to the scores, "" if nothing is."""
    batch = w.shape(like)[0]
    if mask and len(w.shape(mask)) == 1 and w.shape(mask) != (batch,):
        w.refuse(f"its mask of shape {list(w.shape(mask))} gives more than the length of each of {batch} sequences")
    added = _visible(w, mask, keys, like, w.number("mask_filter_value", -10000.0)) if mask else ""
    if added and bias:
        return w.op("Add", added, bias)
    return added or bias


def _attend(
    w: _Writer, q: str, k: str, v: str, mask: str, past: tuple[str, str], heads: tuple[int, int], *, causal: bool
) -> list[str]:
    """Write attention of q (B, S, N * H) and return the result and, with `past`, all keys and values (B, N, T, H)."""
    attrs: dict[str, Attr] = {"is_causal": int(causal)}
    if len(w.shape(q)) == len("BSD"):
        attrs |= {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    scale = w.number("scale", 0.0)
    if scale:
        attrs["scale"] = scale
    if w.number("softcap", 0.0):
        attrs["softcap"] = w.number("softcap", 0.0)
    if past[0]:
        return w.all("Attention", [q, k, v, mask, *past], 3, **attrs)
    result = w.op("Attention", q, k, v, mask, **attrs)
    return [result, *(_by_head(w, x, heads[1]) for x in (k, v))] if any(w.draft.outputs[1:]) else [result]


def _by_head(w: _Writer, x: str, heads: int) -> str:
    """Return keys or values (B, T, N * H) as a cache holds them: (B, N, T, H)."""
    if len(w.shape(x)) == len("BNTH"):
        return x
    parts = w.op("Reshape", x, w.ints(0, 0, heads, -1))
    return w.op("Transpose", parts, perm=(0, 2, 1, 3))


def _split_heads(w: _Writer, packed: str, count: int) -> list[str]:
    """Return the parts of (B, S, N, count, H), each (B, S, N * H)."""
    parts = []
    for index in range(count):
        part = w.op("Gather", packed, w.integer_constant(index), axis=3)
        parts.append(w.op("Reshape", part, w.ints(0, 0, -1)))
    return parts


def _multi_head_attention(w: _Writer) -> None:
    w.refuse_inputs({8: "past_sequence_length", 9: "a cache indirection"})
    heads = w.positive("num_heads")
    q, k, v = w.input(0), w.input(1), w.input(2)
    if len(w.shape(q)) == len("BSN3H"):
        q, k, v = _split_heads(w, q, 3)
    elif k and len(w.shape(k)) == len("BTN2H"):
        k, v = _split_heads(w, k, 2)
    if not k or not v:
        w.refuse("it has no keys")
    crossed = len(w.shape(k)) == len("BNTH")
    bias = w.input(3)
    if bias:
        widths = [w.shape(x)[-1] * (heads if crossed and x != q else 1) for x in (q, k, v)]
        parts = w.all("Split", [bias, w.ints(*widths)], 3, axis=0)
        q = w.op("Add", q, parts[0])
        if not crossed:
            k, v = w.op("Add", k, parts[1]), w.op("Add", v, parts[2])
    if crossed:
        batch, length, width = w.shape(q)
        q = w.op("Reshape", q, w.ints(batch, length, heads, width // heads))
        q = w.op("Transpose", q, perm=(0, 2, 1, 3))
    past = (w.input(6), w.input(7))
    keys = w.shape(k)[-2] + (w.shape(past[0])[2] if past[0] else 0)
    mask = _mask(w, w.input(4), w.input(5), keys, q)
    results = _attend(w, q, k, v, mask, past, (heads, heads), causal=bool(w.integer("unidirectional", 0)))
    if crossed:
        results[0] = w.op("Reshape", w.op("Transpose", results[0], perm=(0, 2, 1, 3)), w.ints(0, 0, -1))
    w.finish(*results)


def _attention(w: _Writer) -> None:
    w.refuse_inputs({6: "past_sequence_length"})
    if w.integer("do_rotary", 0):
        w.refuse("it rotates queries and keys (do_rotary)")
    heads = w.positive("num_heads")
    x = w.op("MatMul", w.input(0), w.input(1))
    if w.input(2):
        x = w.op("Add", x, w.input(2))
    widths = w.numbers("qkv_hidden_sizes") or (w.shape(x)[-1] // 3,) * 3
    q, k, v = w.all("Split", [x, w.ints(*(int(width) for width in widths))], 3, axis=-1)
    past, keys = ("", ""), w.shape(k)[1]
    if w.input(4):
        rows = w.all("Split", [w.input(4)], 2, axis=0, num_outputs=2)
        past = (w.op("Squeeze", rows[0], w.ints(0)), w.op("Squeeze", rows[1], w.ints(0)))
        keys += w.shape(past[0])[2]
    mask = _mask(w, w.input(3), w.input(5), keys, x)
    results = _attend(w, q, k, v, mask, past, (heads, heads), causal=bool(w.integer("unidirectional", 0)))
    if len(results) > 1:
        both = [w.op("Unsqueeze", result, w.ints(0)) for result in results[1:]]
        results[1:] = [w.op("Concat", *both, axis=0)]
    w.finish(*results)


def _group_query_attention(w: _Writer) -> None:
    w.refuse_inputs(
        {11: "a head sink", 12: "a quantized cache", 13: "a quantized cache", 14: "norms of queries and keys"}
    )
    if w.integer("smooth_softmax", -1) > 0 or w.integer("qk_output", 0):
        w.refuse("it has a smooth softmax, or its scores are read")
    heads, groups = w.positive("num_heads"), w.positive("kv_num_heads")
    q, k, v = w.input(0), w.input(1), w.input(2)
    if not k:
        width = w.shape(q)[-1] // (heads + 2 * groups)
        q, k, v = w.all("Split", [q, w.ints(heads * width, groups * width, groups * width)], 3, axis=-1)
    batch, length = w.shape(q)[:2]
    past = (w.input(3), w.input(4))
    before = w.shape(past[0])[2] if past[0] else 0
    if w.integer("do_rotary", 0):
        positions = w.input(9)
        if not positions:
            line = np.broadcast_to(np.arange(before, before + length, dtype=np.int64), (batch, length))
            positions = w.sweep.constant(np.ascontiguousarray(line), f"{w.draft.name}.positions")
        attrs: dict[str, Attr] = {"interleaved": w.integer("rotary_interleaved", 0)}
        turned = 2 * w.shape(w.input(7))[1]
        attrs["rotary_embedding_dim"] = turned if turned != w.shape(q)[-1] // heads else 0
        q = _rotated(w, q, positions, w.input(7), w.input(8), attrs | {"num_heads": heads})
        k = _rotated(w, k, positions, w.input(7), w.input(8), attrs | {"num_heads": groups})
    mask, window = w.input(10), w.integer("local_window_size", -1)
    if window > 0 and window < before + length:
        mask = _window(w, before, length, window, q, mask)
    if past[0] and before == 0:
        past = ("", "")
    causal = bool(w.integer("causal", 1))
    w.finish(*_attend(w, q, k, v, mask, past, (heads, groups), causal=causal))


def _window(w: _Writer, before: int, length: int, window: int, like: str, mask: str) -> str:
    """Return what hides keys that lie `window` or more positions behind a query, added to a mask."""
    zero, one = w.integer_constant(0), w.integer_constant(1)
    rows = w.op("Range", w.integer_constant(before), w.integer_constant(before + length), one)
    columns = w.op("Range", zero, w.integer_constant(before + length), one)
    distance = w.op("Sub", w.op("Unsqueeze", rows, w.ints(1)), columns)
    near = w.op("Less", distance, w.integer_constant(window))
    added = w.op("Where", near, w.scalar(0.0, like), w.scalar(float("-inf"), like))
    return w.op("Add", mask, added) if mask else added


def _matmul_nbits(w: _Writer) -> None:
    """The weight stays packed: `autopar::MatMulNBits` unpacks it on the way to the product."""
    order = w.sweep.known(w.input(4)) if w.input(4) else None
    if w.input(4) and (order is None or bool((np.diff(order.astype(np.int64)) < 0).any())):
        w.refuse("it permutes groups (g_idx)")
    bits, block, width = w.integer("bits", 4), w.positive("block_size"), w.positive("N")
    if bits not in (2, 4, 8):
        w.refuse(f"its weight has {bits} bits")
    groups = w.shape(w.input(1))[1]
    x = w.input(0)
    missing = groups * block - w.shape(x)[-1]
    if missing > 0:  # rows of the weight end within a block
        x = w.op("Pad", x, w.ints(0, missing), "", w.ints(-1))
    inputs = [x, w.input(1), w.op("Reshape", w.input(2), w.ints(width, groups))]
    zeros = w.input(3)
    kind = "autopar::MatMulNBits"
    if zeros:
        packed = w.sweep.value(zeros).dtype == "uint8"
        kind += "Packed" if packed else "Shifted"
        inputs.append(w.op("Reshape", zeros, w.ints(width, -1)))
    y = w.op(kind, *inputs, bits=bits, block_size=block)
    w.finish(w.op("Add", y, w.input(5)) if w.input(5) else y)


_RULES: Mapping[str, Callable[[_Writer], None]] = {
    "Attention": _attention,
    "BiasGelu": _biased_gelu,
    "EmbedLayerNormalization": _embed_layer_norm,
    "FastGelu": _biased_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "GroupQueryAttention": _group_query_attention,
    "MatMulNBits": _matmul_nbits,
    "MultiHeadAttention": _multi_head_attention,
    "QuickGelu": _quick_gelu,
    "RotaryEmbedding": _rotary,
    "SimplifiedLayerNormalization": _simplified_layer_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_norm,
}
"""What each op of domain `com.microsoft` stands for."""

_REQUIRED: Mapping[str, int] = {
    "Attention": 2, "BiasGelu": 2, "EmbedLayerNormalization": 1, "FusedConv": 2, "FusedGemm": 2, "FusedMatMul": 2,
    "LayerNormalization": 2, "MatMulNBits": 3, "RotaryEmbedding": 4, "SimplifiedLayerNormalization": 2,
    "SkipLayerNormalization": 3, "SkipSimplifiedLayerNormalization": 3,
}  # fmt: skip
"""Inputs that an op has to have, where that is more than the first."""

_DEFAULT_DOMAIN: Mapping[str, Callable[[_Writer], None]] = {
    "LayerNormalization": _old_layer_norm,
    "SimplifiedLayerNormalization": _simplified_layer_norm,
}
"""Ops that ONNX Runtime has in the default domain at any opset."""


def rewrite(draft: Draft, domain: str, what: str, sweep: Sweep) -> bool:
    """Take in what an op of ONNX Runtime stands for; return False if it is not known.

    Args:
        draft: The op, as the model has it.
        domain: Its domain.
        what: The op, for errors.
        sweep: The import.

    Raises:
        ModelError: If it has a form without a counterpart.
    """
    rule = {MICROSOFT: _RULES, "": _DEFAULT_DOMAIN}.get(domain, {}).get(draft.kind.rpartition("::")[2])
    if rule is None:
        return False
    writer = _Writer(sweep, draft, what)
    for index in range(_REQUIRED.get(draft.kind, 1)):
        if not writer.input(index):
            writer.refuse(f"it lacks input {index}")
    rule(writer)
    return True

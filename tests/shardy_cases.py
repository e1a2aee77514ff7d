"""Ops said twice: as ONNX (or a function kind of ours) and as StableHLO, several shapes each."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tests.shardy import Case
from tests.single_ops import flags, floats, indices, ints, positive

Shape = tuple[int, ...]

_SHAPES: tuple[Shape, ...] = ((96,), (8, 16), (4, 6, 10, 12))
"""Shapes of pointwise ops."""

_UNARY = {
    "Abs": "abs",
    "Ceil": "ceil",
    "Cos": "cosine",
    "Exp": "exponential",
    "Floor": "floor",
    "Log": "log",
    "Neg": "negate",
    "Round": "round_nearest_even",
    "Sigmoid": "logistic",
    "Sign": "sign",
    "Sin": "sine",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
}
_BINARY = {
    "Add": "add",
    "Div": "divide",
    "Max": "maximum",
    "Min": "minimum",
    "Mul": "multiply",
    "Pow": "power",
    "Sub": "subtract",
}
_LOGICAL = {"And": "and", "Or": "or", "Xor": "xor"}
_COMPARE = {"Equal": "EQ", "Greater": "GT", "GreaterOrEqual": "GE", "Less": "LT", "LessOrEqual": "LE"}
_F64, _I64 = "tensor<f64>", "tensor<i64>"
_REDUCE = {"ReduceSum": "add", "ReduceMax": "maximum", "ReduceMin": "minimum", "ReduceProd": "multiply"}


_MOVES = (
    "rows move from any device to any other, which is a change of placement before the op: it is priced as one, and no "
    "strategy of an op does it"
)
_SHIFTED = (
    "without padding the blocks of the result lie at other places of the image's blocks on every device, so that no "
    "two devices need the same number of rows of their neighbours"
)
_LONGER = "the blocks of a longer result lie at other places of the blocks of the input on every device"
_TAPS = (
    "a device that holds some taps of the windows has other windows: its kernel is smaller, its rows are every other"
)
_GROUPED = "numbers of chunks are read off sizes, and the number of groups is none"
_FEW = "3 channels are so few that they are not replaced by a proxy, and 2 devices cannot share them"
_PAIRS = "the pairs of value and position have to be reduced together, and the op gives no values"
_PREFIX = "a running sum needs the rows of all devices before, not those of a neighbour"
_ALONG = "the expert keeps the gradient whole on every device; the strategy found shards it together with the image"
_UNTOLD = "no stand-in for the op knows where its block starts"


def _pointwise() -> Iterator[Case]:
    """One factor per dim."""
    for shape in _SHAPES:
        for kind, expert in _UNARY.items():
            data = positive(*shape) if kind in ("Log", "Sqrt") else floats(*shape)
            yield Case(kind, expert, [data], f"stablehlo.{expert} %x0")
        for kind, expert in _BINARY.items():
            data = positive(*shape) if kind == "Pow" else floats(*shape)
            yield Case(kind, expert, [data] * 2, f"stablehlo.{expert} %x0, %x1")
        for kind, expert in _LOGICAL.items():
            yield Case(kind, expert, [flags(*shape)] * 2, f"stablehlo.{expert} %x0, %x1")
        for kind, direction in _COMPARE.items():
            yield Case(kind, "compare", [floats(*shape)] * 2, f"stablehlo.compare {direction}, %x0, %x1")
        yield Case("Not", "not", [flags(*shape)], "stablehlo.not %x0")
        yield Case("Cast", "convert", [floats(*shape)], "stablehlo.convert %x0", {"to": 1})
        yield Case("IsNaN", "is_finite", [floats(*shape)], "stablehlo.is_finite %x0")
        yield Case("Mod", "remainder", [floats(*shape), positive(*shape)], "stablehlo.remainder %x0, %x1", {"fmod": 1})
        yield Case(
            "Where",
            "select",
            [flags(*shape), floats(*shape), floats(*shape)],
            "stablehlo.select %x0, %x1, %x2",
        )
        yield Case("Clip", "clamp", [floats(*shape), floats(), floats()], "stablehlo.clamp %x1, %x0, %x2")


def _products() -> Iterator[Case]:
    """Contractions."""
    left: Shape
    right: Shape

    def dot(left: Shape, right: Shape, batching: int = 0) -> Case:
        """A MatMul whose contraction is the last dim of the left and the first unbatched one of the right operand."""
        batch = ", ".join(map(str, range(batching)))
        batch = f"batching_dims = [{batch}] x [{batch}], " if batching else ""
        contracted = f"contracting_dims = [{len(left) - 1}] x [{batching}]"
        return Case(
            "MatMul",
            "dot_general",
            [floats(*left), floats(*right)],
            f"stablehlo.dot_general %x0, %x1, {batch}{contracted}",
        )

    yield dot((16, 96), (96, 40))
    yield dot((8, 16, 96), (96, 40))
    yield dot((8, 16, 24), (8, 24, 40), batching=1)
    yield dot((8, 12, 16, 24), (8, 12, 24, 16), batching=2)
    for left, right in (((16, 96), (96, 40)), ((96,), (96, 40)), ((16, 96), (96,))):
        yield Case("MatMul", "dot", [floats(*left), floats(*right)], "stablehlo.dot %x0, %x1")
    for trans_a, trans_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        left, right = (96, 16) if trans_a else (16, 96), (40, 96) if trans_b else (96, 40)
        yield Case(
            "Gemm",
            "dot_general",
            [floats(*left), floats(*right)],
            f"stablehlo.dot_general %x0, %x1, contracting_dims = [{1 - trans_a}] x [{trans_b}]",
            {"transA": trans_a, "transB": trans_b},
        )
    for equation, left, right, dims in (
        ("bsd,bsv->dv", (8, 16, 96), (8, 16, 40), "contracting_dims = [0, 1] x [0, 1]"),
        (
            "bhsk,bhtk->bhst",
            (8, 12, 16, 24),
            (8, 12, 20, 24),
            "batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3]",
        ),
        ("gsec,gsm->gecm", (4, 16, 6, 10), (4, 16, 24), "batching_dims = [0] x [0], contracting_dims = [1] x [1]"),
        ("ij,kl->ijkl", (4, 6), (10, 12), "contracting_dims = [] x []"),
    ):
        yield Case(
            "Einsum",
            "dot_general",
            [floats(*left), floats(*right)],
            f"stablehlo.dot_general %x0, %x1, {dims}",
            {"equation": equation},
        )


def _convolutions() -> Iterator[Case]:
    """Sliding windows over products."""

    def conv(
        x: Shape,
        w: Shape,
        pad: int = 0,
        stride: int = 1,
        dilation: int = 1,
        group: int = 1,
        missing: Mapping[str, str] = MappingProxyType({}),
    ) -> Case:
        rank = len(x) - 2
        spatial = ", ".join(map(str, range(rank)))
        numbers = f"[b, f, {spatial}]x[o, i, {spatial}]->[b, f, {spatial}]"
        pads = ", ".join([f"[{pad}, {pad}]"] * rank)
        window = f"stride = {[stride] * rank}, pad = [{pads}], rhs_dilate = {[dilation] * rank}"
        return Case(
            "Conv",
            "convolution",
            [floats(*x), floats(*w)],
            f"stablehlo.convolution(%x0, %x1) dim_numbers = {numbers}, window = {{{window}}} "
            f"{{batch_group_count = 1 : i64, feature_group_count = {group} : i64}}",
            {
                "kernel_shape": w[2:],
                "pads": (pad,) * (2 * rank),
                "strides": (stride,) * rank,
                "dilations": (dilation,) * rank,
                "group": group,
            },
            missing=missing,
        )

    yield conv((4, 16, 12, 12), (32, 16, 3, 3), pad=1)
    shifted = {f"S({dim}),R -> S({dim})": _SHIFTED for dim in (2, 3)}
    yield conv((4, 16, 12, 12), (32, 16, 3, 3), missing=shifted)
    yield conv((4, 16, 12, 12), (32, 16, 1, 1))
    taps = {f"S({dim}/12),S({dim}) -> P": _TAPS for dim in (2, 3)}
    yield conv((4, 16, 24, 24), (32, 16, 3, 3), pad=1, stride=2, missing=taps)
    yield conv((4, 16, 24, 24), (32, 16, 3, 3), pad=2, dilation=2)
    yield conv((4, 16, 32), (32, 16, 5), pad=2)
    yield conv((4, 16, 8, 8, 8), (32, 16, 3, 3, 3), pad=1)
    grouped = {"S(1/4),S(1) -> P": _GROUPED, "R,S(0/4) -> S(1/4)": _GROUPED}
    yield conv((4, 16, 12, 12), (32, 4, 3, 3), pad=1, group=4, missing=grouped)
    yield conv((4, 16, 12, 12), (16, 1, 3, 3), pad=1, group=16)
    patches = {"S(1),S(1) -> P": _FEW} | {f"S({dim}/8),S({dim}) -> P": _TAPS for dim in (2, 3)}
    yield conv((4, 3, 32, 32), (24, 3, 4, 4), stride=4, missing=patches)

    def transposed(x: Shape, w: Shape, pad: int, stride: int) -> Case:
        """The gradient of a convolution: the image is spread, the kernel reversed, in and out swapped."""
        edge = w[2] - 1 - pad
        window = f"pad = [[{edge}, {edge}], [{edge}, {edge}]], lhs_dilate = {[stride] * 2}, reverse = [true, true]"
        return Case(
            "ConvTranspose",
            "convolution",
            [floats(*x), floats(*w)],
            "stablehlo.convolution(%x0, %x1) dim_numbers = [b, f, 0, 1]x[i, o, 0, 1]->[b, f, 0, 1], "
            f"window = {{{window}}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}",
            {"kernel_shape": w[2:], "pads": (pad,) * 4, "strides": (stride,) * 2},
        )

    yield transposed((4, 16, 8, 8), (16, 32, 3, 3), pad=1, stride=1)
    yield transposed((4, 16, 8, 8), (16, 32, 4, 4), pad=1, stride=2)
    yield transposed((4, 16, 8, 8), (16, 32, 2, 2), pad=0, stride=2)

    for size, kernel, pad in ((12, 3, 1), (12, 1, 0), (8, 3, 0)):
        out = size + 2 * pad - kernel + 1
        yield Case(  # samples are contracted, input channels are the image's samples
            "autopar::ConvWeightGrad",
            "convolution",
            [floats(4, 16, size, size), floats(4, 32, out, out)],
            "stablehlo.convolution(%x0, %x1) dim_numbers = [f, b, 0, 1]x[i, o, 0, 1]->[f, b, 0, 1], "
            f"window = {{pad = [[{pad}, {pad}], [{pad}, {pad}]]}} "
            "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}",
            {
                "kernel_shape": (kernel, kernel),
                "pads": (pad,) * 4,
                "strides": (1, 1),
                "dilations": (1, 1),
                "group": 1,
            },
            missing={f"S({dim}),S({dim}) -> P": _SHIFTED for dim in (2, 3)} if out < size else {},
        )


def _region(op: str, dtype: str = "f64") -> str:
    """Return a reduction of two scalars."""
    scalar = f"tensor<{dtype}>"
    return (
        f"({{^bb0(%a: {scalar}, %b: {scalar}): %m = stablehlo.{op} %a, %b : {scalar} "
        f'"stablehlo.return"(%m) : ({scalar}) -> ()}})'
    )


def _tensor(shape: Shape, dtype: str = "f64") -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>"


def _array(numbers: Sequence[int]) -> str:
    return f"array<i64: {', '.join(map(str, numbers))}>"


def _windows() -> Iterator[Case]:
    """Pooling and running sums."""
    shape: Shape
    for kind, op in (("MaxPool", "maximum"), ("AveragePool", "add")):
        for shape, kernel, stride, pad in (
            ((4, 16, 16, 16), 2, 2, 0),
            ((4, 16, 16, 16), 3, 1, 1),
            ((4, 16, 32, 32), 3, 2, 1),
            ((4, 16, 32), 4, 4, 0),
        ):
            rank = len(shape) - 2
            edges = [[0, 0], [0, 0], *([pad, pad] for _ in range(rank))]
            attrs: dict[str, tuple[int, ...] | int] = {
                "kernel_shape": (kernel,) * rank,
                "strides": (stride,) * rank,
                "pads": (pad,) * (2 * rank),
            }
            yield Case(
                kind,
                "reduce_window",
                [floats(*shape)],
                f'"stablehlo.reduce_window"(%x0, %y) <{{window_dimensions = {_array((1, 1, *(kernel,) * rank))}, '
                f"window_strides = {_array((1, 1, *(stride,) * rank))}, "
                f"padding = dense<{edges}> : tensor<{rank + 2}x2xi64>}}> {_region(op)}",
                attrs | ({"count_include_pad": 1} if kind == "AveragePool" else {}),
            )
    for shape, axis in (((8, 16), 1), ((8, 16, 24), 1), ((12,), 0)):
        window = [size if dim == axis else 1 for dim, size in enumerate(shape)]
        edges = [[size - 1 if dim == axis else 0, 0] for dim, size in enumerate(shape)]
        yield Case(
            "CumSum",
            "reduce_window",
            [floats(*shape), np.array(axis)],
            f'"stablehlo.reduce_window"(%x0, %y) <{{window_dimensions = {_array(window)}, '
            f"padding = dense<{edges}> : tensor<{len(shape)}x2xi64>}}> {_region('add')}",
            missing={f"S({axis}),_ -> S({axis})": _PREFIX},
        )
    for size, kernel, stride in ((16, 2, 2), (18, 3, 3), (32, 4, 4)):
        yield Case(
            "autopar::MaxPoolGrad",
            "select_and_scatter",
            [floats(4, 16, size, size), floats(4, 16, size // stride, size // stride)],
            f'"stablehlo.select_and_scatter"(%x0, %x1, %y) <{{window_dimensions = {_array((1, 1, kernel, kernel))}, '
            f"window_strides = {_array((1, 1, stride, stride))}}}> "
            f"({{^bb0(%a: {_F64}, %b: {_F64}): %m = stablehlo.compare GE, %a, %b : ({_F64}, {_F64}) -> "
            f'tensor<i1> "stablehlo.return"(%m) : (tensor<i1>) -> ()}}, {_region("add")[1:]}',
            {
                "kernel_shape": (kernel, kernel),
                "strides": (stride, stride),
                "pads": (0, 0, 0, 0),
                "dilations": (1, 1),
                "crop": (0, 0, 0, 0),
            },
            missing={f"S({dim}),R -> S({dim})": _ALONG for dim in (2, 3)},
        )


def _reductions() -> Iterator[Case]:
    """Dims folded away."""
    for kind, op in _REDUCE.items():
        for shape, axes in (((8, 16), (1,)), ((8, 16, 24), (0, 2)), ((4, 6, 10), (0, 1, 2))):
            yield Case(
                kind,
                "reduce",
                [floats(*shape), ints(*axes)],
                f"stablehlo.reduce(%x0 init: %y) applies stablehlo.{op} across dimensions = {list(axes)}",
                {"keepdims": 0},
            )
    for kind, direction in (("ArgMax", "GT"), ("ArgMin", "LT")):
        for shape, axis in (((8, 16), 1), ((8, 16, 24), 2), ((8, 16, 24), 0)):
            kept = "x".join(str(size) for dim, size in enumerate(shape) if dim != axis)
            whole = "x".join(map(str, shape))
            yield Case(  # values with their positions, of which the positions are ours
                kind,
                "reduce (of pairs)",
                [floats(*shape)],
                f'"stablehlo.reduce"(%x0, %y0, %y1, %y2) <{{dimensions = {_array((axis,))}}}> '
                f"({{^bb0(%a: {_F64}, %b: {_I64}, %c: {_F64}, %d: {_I64}): "
                f"%m = stablehlo.compare {direction}, %a, %c : ({_F64}, {_F64}) -> tensor<i1> "
                f"%v = stablehlo.select %m, %a, %c : tensor<i1>, {_F64} "
                f"%n = stablehlo.select %m, %b, %d : tensor<i1>, {_I64} "
                f'"stablehlo.return"(%v, %n) : ({_F64}, {_I64}) -> ()}})',
                {"axis": axis, "keepdims": 0},
                types=f"(tensor<{whole}xf64>, tensor<{whole}xi64>, {_F64}, {_I64}) -> "
                f"(tensor<{kept}xf64>, tensor<{kept}xi64>)",
                missing={f"S({axis}) -> P": _PAIRS},
            )


def _shapes() -> Iterator[Case]:
    """Dims moved, split, merged, made, cut."""
    shape: Shape
    before: Shape
    after: Shape
    for shape, perm in (((8, 16), (1, 0)), ((8, 16, 12, 24), (0, 2, 1, 3)), ((4, 6, 10), (2, 0, 1))):
        yield Case(
            "Transpose", "transpose", [floats(*shape)], f"stablehlo.transpose %x0, dims = {list(perm)}", {"perm": perm}
        )
    for before, after in (
        ((8, 16, 96), (8, 16, 12, 8)),
        ((8, 16, 12, 8), (8, 16, 96)),
        ((8, 16, 96), (128, 96)),
        ((128, 96), (8, 16, 96)),
        ((8, 6, 4), (192,)),
        ((8, 12, 10), (4, 24, 10)),
        ((8, 1, 16), (8, 16)),
    ):
        yield Case("Reshape", "reshape", [floats(*before), ints(*after)], "stablehlo.reshape %x0")
    for shape, axis in (((8, 16, 4, 4), 1), ((8, 16, 24), 2), ((8, 16, 24), 0)):
        yield Case("Flatten", "reshape", [floats(*shape)], "stablehlo.reshape %x0", {"axis": axis})
    for shape, axis in (((8, 1, 96), 1), ((1, 16), 0), ((8, 16, 1), 2)):
        yield Case("Squeeze", "reshape", [floats(*shape), ints(axis)], "stablehlo.reshape %x0")
    for shape, axis in (((8, 96), 1), ((16,), 0), ((8, 16), 2)):
        dims = [dim if dim < axis else dim + 1 for dim in range(len(shape))]
        yield Case("Unsqueeze", "reshape", [floats(*shape), ints(axis)], "stablehlo.reshape %x0")
        yield Case(
            "Unsqueeze",
            "broadcast_in_dim",
            [floats(*shape), ints(axis)],
            f"stablehlo.broadcast_in_dim %x0, dims = {dims}",
        )
    for before, after, dims in (
        ((16,), (8, 16), [1]),
        ((8, 1, 16), (8, 12, 16), [0, 1, 2]),
        ((8, 1, 16, 1), (8, 12, 16, 40), [0, 1, 2, 3]),
    ):
        yield Case(
            "Expand",
            "broadcast_in_dim",
            [floats(*before), ints(*after)],
            f"stablehlo.broadcast_in_dim %x0, dims = {dims}",
        )
    for shapes, axis in (
        (((8, 16, 24), (8, 16, 24)), 2),
        (((8, 16), (4, 16), (12, 16)), 0),
        (((8, 6, 10), (8, 12, 10)), 1),
    ):
        operands = ", ".join(f"%x{i}" for i in range(len(shapes)))
        yield Case(
            "Concat",
            "concatenate",
            [floats(*shape) for shape in shapes],
            f"stablehlo.concatenate {operands}, dim = {axis}",
            {"axis": axis},
        )
    for shape, start, end, axis, step in (
        ((8, 16, 96), 0, 8, 1, 1),
        ((8, 16, 96), 32, 64, 2, 1),
        ((8, 16), 1, 8, 0, 1),
        ((8, 16), 0, 16, 1, 2),
    ):
        cut = ", ".join(f"{start}:{end}:{step}" if dim == axis else f"0:{size}" for dim, size in enumerate(shape))
        yield Case(
            "Slice",
            "slice",
            [floats(*shape), ints(start), ints(end), ints(axis), ints(step)],
            f"stablehlo.slice %x0 [{cut}]",
            missing={f"S({axis}),_,_,_,_ -> S({axis})": _MOVES} if step == 1 else {},
        )
    for shape, axis in (((8, 16), 1), ((8, 16, 24), 1), ((12,), 0)):
        yield Case(
            "Slice",
            "reverse",
            [floats(*shape), ints(-1), ints(-1000), ints(axis), ints(-1)],
            f"stablehlo.reverse %x0, dims = [{axis}]",
            missing={f"S({axis}),_,_,_,_ -> S({axis})": _MOVES},
        )
    for shape, low, high in (
        ((8, 16), (0, 1), (0, 1)),
        ((8, 16, 24), (0, 2, 0), (0, 0, 0)),
        ((4, 6, 10, 12), (0, 0, 1, 1), (0, 0, 1, 1)),
    ):
        yield Case(
            "Pad",
            "pad",
            [floats(*shape), ints(*low, *high), floats()],
            f"stablehlo.pad %x0, %x2, low = {list(low)}, high = {list(high)}, interior = {[0] * len(shape)}",
            missing={f"S({dim}),_,R -> S({dim})": _LONGER for dim in range(len(shape)) if low[dim] or high[dim]},
        )


def _gathers() -> Iterator[Case]:
    """Rows picked, and put back."""
    shape: Shape
    index: Shape

    def gather(numbers: str, sizes: Shape) -> str:
        return (
            f'"stablehlo.gather"(%x0, %x1) <{{dimension_numbers = #stablehlo.gather<{numbers}>, '
            f"slice_sizes = {_array(sizes)}, indices_are_sorted = false}}>"
        )

    def scatter(operands: str, numbers: str) -> str:
        return (
            f'"stablehlo.scatter"({operands}) <{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, '
            f"indices_are_sorted = false, unique_indices = false}}> {_region('add')}"
        )

    for table, index, axis in (((40, 96), (8, 16), 0), ((40, 96), (12,), 0), ((8, 40, 24), (6,), 1)):
        offsets = [d for d in range(axis)] + [d + len(index) - 1 for d in range(axis + 1, len(table))]
        sizes = tuple(1 if dim == axis else size for dim, size in enumerate(table))
        numbers = (
            f"offset_dims = {offsets}, collapsed_slice_dims = [{axis}], start_index_map = [{axis}], "
            f"index_vector_dim = {len(index)}"
        )
        yield Case(
            "Gather", "gather", [floats(*table), indices(table[axis], *index)], gather(numbers, sizes), {"axis": axis}
        )
    for shape, count in (((8, 16), 4), ((6, 10), 10), ((8, 24), 12)):
        numbers = (
            "collapsed_slice_dims = [1], operand_batching_dims = [0], start_indices_batching_dims = [0], "
            "start_index_map = [1], index_vector_dim = 2"
        )
        yield Case(
            "GatherElements",
            "gather",
            [floats(*shape), indices(shape[1], shape[0], count)],
            gather(numbers, (1, 1)),
            {"axis": 1},
        )
        numbers = (
            "inserted_window_dims = [1], input_batching_dims = [0], scatter_indices_batching_dims = [0], "
            "scatter_dims_to_operand_dims = [1], index_vector_dim = 2"
        )
        yield Case(
            "ScatterElements",
            "scatter",
            [floats(*shape), indices(shape[1], shape[0], count), floats(shape[0], count)],
            scatter("%x0, %x1, %x2", numbers),
            {"axis": 1, "reduction": "add"},
        )
    for shape, count in (((8, 16, 24), 6), ((4, 12, 40), 10), ((8, 6, 10), 4)):
        numbers = (
            "offset_dims = [2], collapsed_slice_dims = [1], operand_batching_dims = [0], "
            "start_indices_batching_dims = [0], start_index_map = [1], index_vector_dim = 2"
        )
        yield Case(
            "GatherND",
            "gather",
            [floats(*shape), indices(shape[1], shape[0], count, 1)],
            gather(numbers, (1, 1, shape[2])),
            {"batch_dims": 1},
        )
    for shape, count in (((40, 96), 12), ((16, 24), 6), ((8, 6, 10), 4)):
        window = list(range(1, len(shape)))
        numbers = (
            f"update_window_dims = {window}, inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], "
            "index_vector_dim = 1"
        )
        yield Case(
            "ScatterND",
            "scatter",
            [floats(*shape), indices(shape[0], count, 1), floats(count, *shape[1:])],
            scatter("%x0, %x1, %x2", numbers),
            {"reduction": "add"},
        )
    for vocabulary, index, width in ((40, (8, 16), 96), (24, (12,), 16), (48, (4, 6), 10)):
        numbers = (
            f"update_window_dims = [{len(index)}], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], "
            f"index_vector_dim = {len(index)}"
        )
        spread = f"tensor<{vocabulary}x{width}xf64>"
        indexed = f"tensor<{'x'.join(map(str, index))}xi64>"
        yield Case(  # into zeros; the row numbers stand for the rows of the result
            "autopar::GatherGrad",
            "scatter",
            [indices(vocabulary, *index), np.arange(vocabulary), floats(*index, width)],
            scatter("%y0, %x0, %x2", numbers),
            {"axis": 0},
            types=f"({spread}, {indexed}, tensor<{'x'.join(map(str, (*index, width)))}xf64>) -> {spread}",
        )


def _others() -> Iterator[Case]:
    """What fits nowhere else."""
    shape: Shape
    for shape, count in (((8, 16), 2), ((8, 16, 40), 4), ((12,), 3)):
        kept = "x".join(map(str, (*shape[:-1], count)))
        whole = "x".join(map(str, shape))
        yield Case(
            "TopK",
            "custom_call @mhlo.topk",
            [floats(*shape), ints(count)],
            f"stablehlo.custom_call @mhlo.topk(%x0) {{mhlo.attributes = {{k = {count} : i64, largest = true}}}}",
            num_outputs=2,
            types=f"(tensor<{whole}xf64>) -> (tensor<{kept}xf64>, tensor<{kept}xi64>)",
        )
        yield Case(
            "TopK",
            "sort",
            [floats(*shape), ints(shape[-1])],
            f'"stablehlo.sort"(%x0) <{{dimension = {len(shape) - 1} : i64, is_stable = true}}> '
            f"({{^bb0(%a: {_F64}, %b: {_F64}): %m = stablehlo.compare GT, %a, %b : ({_F64}, {_F64}) -> tensor<i1> "
            '"stablehlo.return"(%m) : (tensor<i1>) -> ()})',
            {"axis": -1},
        )
    for shape in ((8, 16), (4, 6, 10), (12,)):
        yield Case("Erf", "custom_call @mhlo.erf", [floats(*shape)], "stablehlo.custom_call @mhlo.erf(%x0)")
    for shape in ((4, 16, 8, 8), (8, 12), (6, 10, 4)):
        channels = floats(shape[1])
        yield Case(
            "BatchNormalization",
            "batch_norm_inference",
            [floats(*shape), channels, channels, channels, positive(shape[1])],
            '"stablehlo.batch_norm_inference"(%x0, %x1, %x2, %x3, %x4) <{epsilon = 1.0e-05 : f32, '
            "feature_index = 1 : i64}>",
        )
    for shape in ((8, 16), (4, 6, 10), (2, 24)):
        whole = "x".join(map(str, shape))
        yield Case(  # complex numbers are pairs in ONNX: one dim more
            "DFT",
            "fft",
            [floats(*shape, 2), None, np.array(len(shape) - 1)],
            f"stablehlo.fft %x0, type = FFT, length = [{shape[-1]}]",
            types=f"(tensor<{whole}xcomplex<f64>>) -> tensor<{whole}xcomplex<f64>>",
        )
    for shape, new in (((4, 32, 24), 8), ((8, 16, 40), 4), ((2, 12, 10), 6)):
        whole, rows = _tensor(shape), _tensor((shape[0], new, shape[2]))
        yield Case(
            "TensorScatter",
            "dynamic_update_slice",
            [floats(*shape), floats(shape[0], new, shape[2]), indices(1, shape[0])],
            "stablehlo.dynamic_update_slice %x0, %x1, %y0, %y1, %y2",
            {"axis": 1},
            types=f"({whole}, {rows}, {_I64}, {_I64}, {_I64}) -> {whole}",
            missing={"S(1),R,_ -> S(1)": _UNTOLD},
        )
    for shape in ((40, 96), (8, 16), (24, 6, 10)):  # one row
        sizes = (1, *shape[1:])
        starts = ", ".join(f"%y{dim}" for dim in range(len(shape)))
        yield Case(
            "Gather",
            "dynamic_slice",
            [floats(*shape), indices(shape[0], 1)],
            f"stablehlo.dynamic_slice %x0, {starts}, sizes = {list(sizes)}",
            types=f"({_tensor(shape)}{f', {_I64}' * len(shape)}) -> {_tensor(sizes)}",
        )


CASES: tuple[Case, ...] = (
    *_pointwise(),
    *_products(),
    *_convolutions(),
    *_windows(),
    *_reductions(),
    *_shapes(),
    *_gathers(),
    *_others(),
)

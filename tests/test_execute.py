"""Execution of single ops and graphs on numpy."""

from typing import Any

import numpy as np
import pytest

from autopar.errors import ExecutionError, ModelError, UnsupportedOpError
from autopar.execute import Executor, run_graph
from autopar.ir.graph import Attr, Graph, Op, Role, State, Value

SQUARE: dict[str, Attr] = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 0, 1, 2)}
WINDOWED: list[tuple[str, tuple[tuple[int, ...], ...], dict[str, Attr]]] = [
    ("MaxPool", ((2, 3, 9, 8),), SQUARE),
    ("MaxPool", ((2, 3, 9, 9),), {"kernel_shape": (3, 3), "dilations": (2, 2)}),
    ("MaxPool", ((2, 3, 9, 9),), {"kernel_shape": (2, 2), "strides": (2, 2), "ceil_mode": 1}),
    ("AveragePool", ((2, 3, 9, 8),), {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ("AveragePool", ((2, 3, 9, 9),), {"kernel_shape": (2, 2), "strides": (2, 2), "ceil_mode": 1}),
    ("AveragePool", ((2, 3, 8, 8),), {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": 1}),
    ("AveragePool", ((2, 3, 8, 8),), {"kernel_shape": (3, 3), "strides": (2, 2), "auto_pad": "SAME_LOWER"}),
    ("LpPool", ((2, 3, 8, 8),), {"kernel_shape": (2, 2), "p": 3}),
    ("Conv", ((2, 4, 9, 8), (6, 4, 3, 3), (6,)), SQUARE),
    ("Conv", ((2, 4, 9, 8), (6, 2, 3, 2)), {"group": 2, "dilations": (2, 1)}),
    ("Conv", ((2, 4, 9), (6, 4, 3)), {"auto_pad": "SAME_UPPER", "strides": (2,)}),
    ("ConvTranspose", ((2, 4, 5, 6), (4, 3, 3, 3), (3,)), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ("ConvTranspose", ((2, 4, 5, 6), (4, 3, 3, 3)), {"strides": (3, 2), "output_padding": (1, 1)}),
    ("ConvTranspose", ((2, 4, 5, 6), (4, 3, 2, 3)), {"dilations": (2, 1)}),
]


@pytest.mark.parametrize(("kind", "shapes", "attrs"), WINDOWED, ids=[f"{c[0]}-{i}" for i, c in enumerate(WINDOWED)])
def test_kernels_compute_what_the_reference_of_onnx_computes(
    kind: str, shapes: tuple[tuple[int, ...], ...], attrs: dict[str, Attr]
) -> None:
    """Our windowed kernels differ from the reference in speed alone; 1e-12 leaves room for another order of sums."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    names = [f"x{i}" for i in range(len(arrays))]
    # Opset 21 is the last whose function body the reference keeps apart from its own class.
    node = helper.make_node(kind, names, ["y"], **attrs)
    inputs = [helper.make_tensor_value_info(name, 11, None) for name in names]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    expected = ReferenceEvaluator(graph, opsets={"": 22}).run(None, dict(zip(names, arrays, strict=True)))

    (result,) = Executor().run(Op("op", kind, tuple(names), ("y",), tuple(sorted(attrs.items()))), arrays, opset=22)

    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_an_image_is_sampled_as_by_the_reference_of_onnx(mode: str, padding: str, aligned: int) -> None:
    """Which computes places in float32, of 1e-7: for images of 1 and slopes of 3, 1e-5 is enough."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(0)
    x, grid = rng.standard_normal((2, 3, 5, 4)), rng.uniform(-1.7, 1.7, (2, 3, 6, 2))
    attrs: dict[str, Attr] = {"align_corners": aligned, "mode": mode, "padding_mode": padding}
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], **attrs)
    inputs = [helper.make_tensor_value_info(name, 11, None) for name in ("x", "grid")]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])

    (result,) = Executor().run(
        Op("op", "GridSample", ("x", "grid"), ("y",), tuple(sorted(attrs.items()))), [x, grid], 22
    )

    expected = ReferenceEvaluator(graph, opsets={"": 22}).run(None, {"x": x, "grid": grid})
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected[0], rtol=1e-5, atol=1e-5)


def test_convolution_over_groups_is_one_convolution_per_group() -> None:
    """The law that defines `group`: channels of input and output are cut in as many independent convolutions."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 6, 5, 5)), rng.standard_normal((6, 4, 3, 3))
    executor = Executor()
    op = Op("op", "ConvTranspose", ("x", "w"), ("y",), (("group", 2), ("strides", (2, 2))))
    single = Op("op", "ConvTranspose", ("x", "w"), ("y",), (("strides", (2, 2)),))

    (result,) = executor.run(op, [x, w], opset=22)

    halves = [executor.run(single, [x[:, h], w[h]], opset=22)[0] for h in (slice(0, 3), slice(3, 6))]
    np.testing.assert_allclose(result, np.concatenate(halves, axis=1), rtol=1e-12)


@pytest.mark.parametrize("sides", [(9,), (4, 5), (4, 3, 2)], ids=str)
def test_a_global_maximum_is_that_of_all_spatial_dims(sides: tuple[int, ...]) -> None:
    """Of sound, images and volumes: `onnx.reference` has it of images alone."""
    x = np.random.default_rng(0).standard_normal((2, 3, *sides))

    (result,) = Executor().run(Op("op", "GlobalMaxPool", ("x",), ("y",)), [x], opset=22)

    np.testing.assert_array_equal(result, x.reshape(2, 3, -1).max(axis=2).reshape(2, 3, *len(sides) * (1,)))


def test_indices_of_max_pool_point_at_the_maxima() -> None:
    """The second output numbers the elements of the whole input."""
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6))
    op = Op(
        "op", "MaxPool", ("x",), ("y", "i"), (("kernel_shape", (3, 3)), ("pads", (1, 1, 1, 1)), ("strides", (2, 2)))
    )

    values, positions = Executor().run(op, [x], opset=22)

    assert positions.dtype == np.int64
    np.testing.assert_array_equal(x.reshape(-1)[positions], values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "kind", ["LayerNormalization", "RMSNormalization", "GroupNormalization", "Softmax", "Gelu", "Conv", "AveragePool"]
)
def test_floats_keep_their_precision(kind: str, dtype: str) -> None:
    """Fed with float64 an op computes in float64."""
    attrs: dict[str, tuple[tuple[str, Attr], ...]] = {
        "AveragePool": (("kernel_shape", (2, 2)),),
        "GroupNormalization": (("num_groups", 3),),
    }
    shapes = {"LayerNormalization": [(4, 6), (6,)], "RMSNormalization": [(4, 6), (6,)]}
    shapes |= {"GroupNormalization": [(4, 6), (6,), (6,)]}
    shapes |= {"Conv": [(1, 2, 4, 4), (3, 2, 3, 3)], "AveragePool": [(1, 2, 4, 4)]}
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes.get(kind, [(4, 6)])]
    names = tuple(f"x{i}" for i in range(len(arrays)))

    (result,) = Executor().run(Op("op", kind, names, ("y",), attrs.get(kind, ())), arrays, opset=24)

    assert result.dtype == dtype


def test_function_kinds_run_their_body() -> None:
    """The gradient of y = max(x, 0) is dy where y is positive."""
    op = Op("op", "autopar::ReluGrad", ("y", "dy"), ("dx",))

    (dx,) = Executor().run(op, [np.array([0.0, 2.0]), np.array([3.0, 5.0])], opset=24)

    np.testing.assert_array_equal(dx, [0.0, 5.0])


def test_absent_inputs_stay_absent() -> None:
    """Clip without a minimum only has a maximum."""
    op = Op("op", "Clip", ("x", "", "high"), ("y",))

    (result,) = Executor().run(op, [np.array([-9.0, 9.0]), None, np.array(1.0)], opset=24)

    np.testing.assert_array_equal(result, [-9.0, 1.0])


@pytest.mark.parametrize("kind", ["NoSuchOp", "com.microsoft::FusedMatMul", "autopar::NoSuchGrad"])
def test_kind_without_implementation_is_named(kind: str) -> None:
    """The error names the op and its kind."""
    op = Op("mystery", kind, ("x",), ("y",))

    with pytest.raises(UnsupportedOpError, match=f"'mystery' of kind '{kind}'"):
        Executor().run(op, [np.ones(2)], opset=24)


def test_refused_inputs_are_shown() -> None:
    """The error gives the shapes the kernel could not take."""
    op = Op("product", "MatMul", ("a", "b"), ("c",))

    with pytest.raises(ExecutionError, match=r"'product' \(MatMul\) failed on inputs float64\[2, 3\], float64\[2, 3\]"):
        Executor().run(op, [np.ones((2, 3)), np.ones((2, 3))], opset=24)


def _scaled_sum() -> Graph:
    """Return y = (x + w) * 2 with a trained w."""
    values = {name: Value(name, (3,), "float64") for name in ("x", "w", "s", "y")}
    values["two"] = Value("two", (), "float64")
    return Graph(
        name="scaled sum",
        opset=24,
        values=values,
        inputs=("x",),
        states=(State("w", "w", Role.PARAMETER, "w"),),
        constants={"two": np.array(2.0)},
        ops=(Op("add", "Add", ("x", "w"), ("s",)), Op("mul", "Mul", ("s", "two"), ("y",))),
        outputs=("y",),
    )


def test_graph_runs_in_order_and_returns_every_value() -> None:
    """Inputs and states are fed, constants are known."""
    feeds: dict[str, Any] = {"x": np.array([1.0, 2.0, 3.0]), "w": np.ones(3)}

    values = run_graph(_scaled_sum(), feeds)

    assert set(values) == {"x", "w", "s", "y", "two"}
    np.testing.assert_array_equal(values["y"], [4.0, 6.0, 8.0])


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"x": np.ones(3)}, "no data for value 'w'"),
        ({"x": np.ones(4), "w": np.ones(3)}, r"fed with data of shape \[4\]"),
    ],
)
def test_missing_or_misshapen_data_is_refused(feeds: dict[str, Any], message: str) -> None:
    """Before anything runs."""
    with pytest.raises(ModelError, match=message):
        run_graph(_scaled_sum(), feeds)

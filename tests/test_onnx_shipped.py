"""ONNX files that packages of the Python Package Index ship, held to ONNX Runtime where a package is installed."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.onnx import load

Array = NDArray[Any]
FILES: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("silero_vad", "data/silero_vad_16k_op15.onnx", {"sequence": 576}),
    ("basic_pitch", "saved_models/icassp_2022/nmp.onnx", {}),
    ("magika", "models/standard_v3_3/model.onnx", {}),
    ("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x.2": 48, "x.3": 192}),
    (
        "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx", {"x.2": 48, "p2o.DynamicDimension.1": 320},
    ),
    (
        "rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx",
        {"p2o.DynamicDimension.1": 64, "p2o.DynamicDimension.2": 64},
    ),
)  # fmt: skip
"""Package, file in it, and sizes that the file leaves open: sound, bytes and images; LSTM, convolutions, attention."""
RATE = 16000
"""What inputs of integers are given, a rate of samples among them."""


def shipped(package: str, file: str) -> Path:
    """Return a file of an installed package; skips the test where the package is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs {package}")
    return Path(found.submodule_search_locations[0]) / file


@pytest.mark.slow
@pytest.mark.parametrize(("package", "file", "dims"), FILES, ids=[Path(file).stem for _, file, _ in FILES])
def test_shipped_models_compute_the_same(package: str, file: str, dims: dict[str, int]) -> None:
    """Two samples through ONNX Runtime, and through our graph of the target opset."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="the oracle of this test")
    path = shipped(package, file)
    model = onnx.load(path)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            weights[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    rng = np.random.default_rng(0)

    graph = load(model, batch=2, dims=dims)
    data: dict[str, Array] = {}
    for name in graph.inputs:
        value = graph.values[name]
        data[name] = (
            rng.normal(size=value.shape).astype(value.dtype) if value.is_float
            else np.full(value.shape, RATE if name == "sr" else 3, value.dtype)
        )  # fmt: skip
    found = run_graph(graph, {**data, **{state.input: weights[state.input] for state in graph.states}})

    names = [item.name for item in model.graph.input]
    expected = onnxruntime.InferenceSession(path).run(None, {name: data.get(name, np.array(RATE)) for name in names})
    for output, array in zip(graph.outputs, expected, strict=True):
        np.testing.assert_allclose(found[output], array, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_condition_on_an_input_is_refused() -> None:
    """A network for each of two rates of samples, the rate an input: the hint says how to state it."""
    with pytest.raises(
        ModelError, match=r"If_0.*depends on the value of input 'sr', which a plan has to know"
    ) as error:
        load(onnx.load(shipped("silero_vad", "data/silero_vad.onnx")), batch=2, dims={"input.1": 576, "state.1": 2})

    assert "model.graph.initializer.append" in str(error.value)

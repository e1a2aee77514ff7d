"""Transformers as PyTorch exports them; slow, and only with the extra `torch`."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from autopar.execute import run_graph
from autopar.ir.blocks import block_kinds, find_blocks
from autopar.ir.graph import Graph
from autopar.onnx import load
from tests.export_transformers import BATCH, LAYERS, SEQ, export, names

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

DYNAMIC = {"batch": BATCH, "seq": SEQ}


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Path:
    """Where exports are cached: pytest's cache."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        pytest.skip("torch and transformers are not installed")
    assert request.config.cache is not None, "pytest's cache is disabled"
    return request.config.cache.mkdir("exports")


def _load(path: Path, *, batch: int | None = None) -> Graph:
    dims = DYNAMIC if "dynamic" in path.stem else {}
    return load(path, dims=dims, batch=batch)


def _weights(path: Path) -> dict[str, NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("name", names())
def test_exports_compute_the_same(name: str, folder: Path) -> None:
    """The import leaves the numbers as they were in the file."""
    path = export(name, folder)
    graph = _load(path)
    weights = _weights(path)
    tokens = {graph.inputs[0]: np.random.default_rng(0).integers(0, 96, (BATCH, SEQ))}

    found = run_graph(graph, tokens | {state.input: weights[state.input] for state in graph.states})

    expected = ReferenceEvaluator(onnx.load(path)).run(None, tokens)
    np.testing.assert_allclose(found[graph.outputs[0]], expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", names())
def test_layers_of_exports_are_found(name: str, folder: Path) -> None:
    """An embedding block, equal layers, and the head."""
    kinds = block_kinds(find_blocks(_load(export(name, folder))))

    assert kinds[: LAYERS + 2] == (0, *[1] * LAYERS, 2)


@pytest.mark.parametrize("name", [name for name in names() if "dynamic" not in name])
def test_the_batch_of_exports_can_be_replaced(name: str, folder: Path) -> None:
    """A file exported for 2 samples takes 8, and gives each sample what it got before."""
    path = export(name, folder)
    weights = _weights(path)
    tokens = np.random.default_rng(0).integers(0, 96, (8, SEQ))
    small, large = _load(path), _load(path, batch=8)

    def run(graph: Graph, data: NDArray[Any]) -> NDArray[Any]:
        # A buffer may have kept one row of those in the file.
        states = {
            state.input: weights[state.input][tuple(map(slice, graph.values[state.input].shape))]
            for state in graph.states
        }
        return run_graph(graph, {graph.inputs[0]: data, **states})[graph.outputs[0]]

    np.testing.assert_allclose(run(large, tokens)[:BATCH], run(small, tokens[:BATCH]), rtol=1e-4, atol=1e-5)

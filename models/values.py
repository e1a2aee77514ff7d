"""Weights for small models: how many there are, and values to start from."""

from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.models.builder import BUFFERS_KEY, INIT_KEY

if TYPE_CHECKING:
    import onnx


def _weights(model: "onnx.ModelProto") -> "list[onnx.TensorProto]":
    return [tensor for tensor in model.graph.initializer if any(p.key == INIT_KEY for p in tensor.metadata_props)]


def buffers(model: "onnx.ModelProto") -> frozenset[str]:
    """Return the names of the initializers of a zoo model that are not trained."""
    return frozenset(
        name for prop in model.metadata_props if prop.key == BUFFERS_KEY for name in prop.value.split(",") if name
    )


def num_parameters(model: "onnx.ModelProto") -> int:
    """Return the number of trained elements of a zoo model."""
    untrained = buffers(model)
    return sum(prod(tensor.dims) for tensor in _weights(model) if tensor.name not in untrained)


def _rope_angles(shape: tuple[int, ...], theta: float) -> NDArray[np.float64]:
    """Return angles [1, S, D/2]: position s times `theta ** (-2 i / D)` (Su et al. 2021, section 3.2.2)."""
    _, seq, half = shape
    frequencies = theta ** (-np.arange(half) / half)
    return np.multiply.outer(np.arange(seq), frequencies).reshape(shape)


def initial_values(model: "onnx.ModelProto", seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return start values for every weight and buffer of a zoo model, in memory: for models that fit there.

    Matrices are normal with variance 1 / fan-in, scales 1, biases 0; rotary tables are exact. The same seed gives the
    same values.
    """
    rng = np.random.default_rng(seed)
    values: dict[str, NDArray[np.float32]] = {}
    for tensor in _weights(model):
        shape = tuple(tensor.dims)
        kind, text = next(p.value for p in tensor.metadata_props if p.key == INIT_KEY).split()
        number = float(text)
        match kind:
            case "normal":
                array = rng.normal(0.0, number, shape)
            case "constant":
                array = np.full(shape, number)
            case "rope-cos":
                array = np.cos(_rope_angles(shape, number))
            case "rope-sin":
                array = np.sin(_rope_angles(shape, number))
            case _:
                raise AssertionError(f"weight {tensor.name} has the unknown initialisation {kind!r}")
        values[tensor.name] = array.astype(np.float32)
    return values

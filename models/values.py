"""Weights for small models: how many there are, and values to start from."""

from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.models.builder import BUFFERS_KEY, INIT_KEY
from autopar.models.rotary import Grid, Rope

if TYPE_CHECKING:
    import onnx

FIRST = "@"
"""What stands before the position of the first token in the metadata of a rotary table."""


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


def grid_text(grid: Grid) -> str:
    """Return a grid as the metadata of a table has it; `read_grid` is its inverse."""
    sides = grid.height, grid.width, grid.block, grid.first, int(grid.then_text), int(grid.axial)
    window = f"/{grid.window}" if grid.window else ""
    return ",".join(map(str, (*sides, grid.skipped, grid.frames, *grid.coordinates))) + window


def read_grid(text: str) -> Grid:
    """Return a grid that the metadata of a table states."""
    sides, _, window = text.partition("/")
    height, width, block, first, then_text, axial, skipped, frames, *coordinates = map(int, sides.split(","))
    return Grid(
        height, width, tuple(coordinates), block, first, bool(then_text), bool(axial), skipped, frames,
        int(window or 0),
    )  # fmt: skip


def _rotary_table(kind: str, text: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a table [1, S, D/2] of cosines or sines of position times frequency, times a scale.

    Args:
        kind: `rope-cos` or `rope-sin` of a base, `angles-cos` or `angles-sin` of a scale and frequencies.
        text: What follows the kind in the metadata.
        shape: Of the table.
    """
    form, function = kind.split("-")
    if form == "rope":
        scale, frequencies, grid, start = 1.0, Rope(float(text), 2 * shape[-1]).frequencies(), None, 0
    else:
        first, rest, *places = text.split(":")
        scale, frequencies = float(first), np.array([float(number) for number in rest.split(",")])
        start = int(places[0][1:]) if places and places[0].startswith(FIRST) else 0
        grid = read_grid(places[0]) if places and not start else None
    positions = Rope(1.0, 2 * shape[-1], grid=grid, first=start).positions(shape[1])
    angles = (positions * frequencies).reshape(shape)
    return scale * (np.cos(angles) if function == "cos" else np.sin(angles))


def _temperature(text: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return factors of queries by position, [S, 1] (`decoder_config.Attention.temperature`)."""
    step, growth, *start = (float(number) for number in text.split(":"))
    positions = sum(start) + np.arange(1.0, shape[0] + 1.0).reshape(shape)
    factors: NDArray[np.float64] = 1.0 + growth * np.log1p(np.floor(positions / step))
    return factors


def _sinusoids(longest: float, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a table [S, d]: sines, then cosines of positions, at wavelengths of 2 pi to 2 pi times `longest`."""
    half = shape[1] // 2
    angles = np.multiply.outer(np.arange(shape[0]), longest ** (-np.arange(half) / max(1, half - 1)))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _places(text: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a table [1, S, d] of the patches of an image: sines and cosines of the column, then those of the row.

    Args:
        text: Place of the first patch, distance of neighbours, and patches of a row.
        shape: Of the table.
    """
    first, spacing, columns = (float(number) for number in text.split(":"))
    index, quarter = np.arange(shape[1]), shape[2] // 4
    rows, places = np.divmod(index, int(columns))
    angles = [
        np.multiply.outer(first + spacing * side, 1e4 ** (-np.arange(quarter) / quarter)) for side in (places, rows)
    ]
    return np.concatenate([part(side) for side in angles for part in (np.sin, np.cos)], axis=1)[None]


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
        match kind:
            case "normal":
                array = rng.normal(0.0, float(text), shape)
            case "constant":
                array = np.full(shape, float(text))
            case "rope-cos" | "rope-sin" | "angles-cos" | "angles-sin":
                array = _rotary_table(kind, text, shape)
            case "temperature":
                array = _temperature(text, shape)
            case "distances":
                slopes = np.array([float(number) for number in text.split(",")])
                array = np.multiply.outer(slopes, np.arange(shape[1]) - shape[1] // 2)
            case "sinusoids":
                array = _sinusoids(float(text), shape)
            case "places":
                array = _places(text, shape)
            case _:
                raise AssertionError(f"weight {tensor.name} has the unknown initialisation {kind!r}")
        values[tensor.name] = array.astype(np.float32)
    return values

"""Data that leaves no room for luck.

Floats are normal, of both signs and distinct. Integers that index cover the whole range the op accepts, which is found
by trying; with every other seed the first number of the range is left out, so that a scatter does not overwrite
everything. Integers that do not index take few values of both signs, so that comparisons come true. Booleans hold both
values. An op that yields NaN (a logarithm, a root, a row whose mask forbids everything) is tried on positive, then on
small positive data.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover.shrink import run_sketch
from autopar.discover.sketch import Operand, Sketch
from autopar.execute import Executor

Array = NDArray[Any]

_UNBOUNDED = 1009
"""An index no proxy dim has: an op that takes it does not index with that input."""


def sample(sketch: Sketch, seed: int, executor: Executor) -> tuple[list[Array | None], tuple[Array, ...]] | None:
    """Return inputs for a (small) op and its outputs on them, or None if all outputs tried contain NaN.

    Args:
        sketch: The op.
        seed: Another seed, other data.
        executor: Runs the op.
    """
    bounds = _bounds(sketch, executor)
    for positive, spread, truth in _moods(sketch):
        rng = np.random.default_rng(seed)
        arrays = [
            None
            if operand is None
            else _draw(operand, bounds.get(i, (0, 2)), i in positive, spread, truth, rng, spared=seed % 2 == 0)
            for i, operand in enumerate(sketch.inputs)
        ]
        outputs = run_sketch(sketch, arrays, executor)
        if outputs is not None and not any(output.dtype.kind == "f" and np.isnan(output).any() for output in outputs):
            return arrays, outputs
    return None


def _moods(sketch: Sketch) -> Iterator[tuple[frozenset[int], float, float]]:
    """Iterate over (inputs that must be positive, upper end of positive data, share of true booleans)."""
    floats = [i for i, operand in enumerate(sketch.inputs) if operand is not None and operand.is_float]
    yield frozenset(), 2.0, 0.6
    yield frozenset(), 2.0, 0.9
    for index in reversed(floats):  # statistics such as a variance come after the data
        yield frozenset({index}), 2.0, 0.9
    yield frozenset(floats), 2.0, 0.9
    yield frozenset(floats), 0.9, 0.9


def _draw(
    operand: Operand,
    bound: tuple[int, int],
    positive: bool,
    spread: float,
    truth: float,
    rng: np.random.Generator,
    spared: bool,
) -> Array:
    """Return data for one input."""
    if operand.content is not None:
        return operand.array()
    shape = operand.shape
    if operand.is_float:
        return rng.uniform(0.1, spread, shape) if positive else rng.standard_normal(shape)
    size = int(np.prod(shape))
    if operand.dtype == "bool":
        flags = rng.random(size) < truth
        flags[: min(2, size)] = (True, False)[: min(2, size)]
        return rng.permutation(flags).reshape(shape)
    low, high = bound
    low = 0 if operand.dtype.startswith("u") else low
    count = high - low
    cycle = low + np.concatenate([rng.permutation(count) for _ in range(-(-size // count))])[:size]
    if size:  # the end of the range shows best whether a shard covers it
        cycle[0] = high - 1
    if spared and count > 1:
        cycle[cycle == low] = high - 1
    return rng.permutation(cycle).astype(operand.dtype).reshape(shape)


def _bounds(sketch: Sketch, executor: Executor) -> dict[int, tuple[int, int]]:
    """Return the range of each integer tensor: all indices the op accepts, or a few numbers of both signs."""
    integers = [
        i
        for i, operand in enumerate(sketch.inputs)
        if operand is not None and operand.content is None and operand.dtype.startswith(("int", "uint"))
    ]
    if not integers:
        return {}
    ends = {size for operand in sketch.inputs if operand is not None for size in operand.shape}
    ends |= {int(entry) for o in sketch.inputs if o is not None and o.is_shape_like for entry in o.content or ()}
    ends |= {value for _, value in sketch.attrs if isinstance(value, int)}
    ends |= {size for shape in sketch.outputs if shape for size in shape}
    candidates = [_UNBOUNDED, *sorted((end for end in ends if 1 <= end < _UNBOUNDED), reverse=True)]
    plain = [
        None
        if operand is None
        else operand.array()
        if operand.content is not None
        else np.ones(operand.shape)
        if operand.is_float
        else np.zeros(operand.shape, dtype=operand.dtype)
        for operand in sketch.inputs
    ]
    bounds: dict[int, tuple[int, int]] = {}
    for index in integers:
        operand = sketch.inputs[index]
        assert operand is not None, "chosen above"
        for end in candidates:
            trial = list(plain)
            trial[index] = np.full(operand.shape, end - 1, dtype=operand.dtype)
            if run_sketch(sketch, trial, executor) is not None:
                bounds[index] = (-2, max(candidates[1:], default=8)) if end == _UNBOUNDED else (0, end)
                break
    return bounds

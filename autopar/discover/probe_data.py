"""Data that leaves no room for luck.

Floats are normal, of both signs and distinct; wide data have some as large (or small) as the numbers in the op, so that
no threshold stays unreached: clipping at 1000 is not the identity. Integers that index cover the whole range the op
accepts, which is found by trying, and the numbers it treats as special (a label to ignore); with every other seed the
first number of the range is left out, so that a scatter does not overwrite everything. Integers that do not index take
few values of both signs, so that comparisons come true. Booleans hold both values. An op that yields NaN (a logarithm,
a root, a row whose mask forbids everything) is tried on positive, then on small positive data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover.shrink import run_sketch
from autopar.discover.sketch import Operand, Sketch
from autopar.execute import Executor
from autopar.ir.graph import Attr

Array = NDArray[Any]

_UNBOUNDED = 1009
"""An index no proxy dim has: an op that takes it does not index with that input."""
_FINE, _COARSE = 1e-9, 1e12
"""Numbers beyond are guards against division by zero and masks, not thresholds."""
_FEW = 8
"""Up to this many elements signs are not left to chance."""
_SPECIAL = 0.2
"""Share of integers that are special."""


@dataclass(frozen=True, slots=True)
class _Mood:
    """What data are like.

    Attributes:
        positive: Float inputs that are positive.
        spread: Upper end of positive data.
        truth: Share of true booleans.
        scales: Factors of the floats, of which each takes one.
        shift: What is added to floats of both signs.
    """

    positive: frozenset[int] = frozenset()
    spread: float = 2.0
    truth: float = 0.6
    scales: tuple[float, ...] = (1.0,)
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class _Range:
    """Integers from `low` to below `high`, and some that are special."""

    low: int
    high: int
    special: tuple[int, ...] = ()


def sample(
    sketch: Sketch, seed: int, executor: Executor, *, wide: bool = False
) -> tuple[list[Array | None], tuple[Array, ...]] | None:
    """Return inputs for a (small) op and its outputs on them, or None if all data tried give NaN or nothing.

    Args:
        sketch: The op.
        seed: Another seed, other data.
        executor: Runs the op.
        wide: Whether floats reach the numbers in the op.
    """
    ranges = _ranges(sketch, executor)
    for mood in _moods(sketch, wide):
        rng = np.random.default_rng(seed)
        arrays = [
            None
            if operand is None
            else _draw(
                operand,
                ranges.get(i, _Range(0, 2)),
                mood,
                rng,
                positive=i in mood.positive,
                spared=seed % 2 == 0,
                turned=(seed + i) % 2 == 0,
            )
            for i, operand in enumerate(sketch.inputs)
        ]
        outputs = run_sketch(sketch, arrays, executor)
        if outputs is not None and all(map(_tells, outputs)):
            return arrays, outputs
    return None


def _tells(output: Array) -> bool:
    """Whether parts can be compared with an output: it has elements, and all are numbers."""
    return output.size > 0 and not (output.dtype.kind == "f" and np.isnan(output).any())


def _moods(sketch: Sketch, wide: bool) -> Iterator[_Mood]:
    """Iterate over the kinds of data to try, the most telling first."""
    floats = [i for i, operand in enumerate(sketch.inputs) if operand is not None and operand.is_float]
    scales = _thresholds(sketch) if wide else ()
    if scales:
        yield _Mood(scales=(1.0, *(2 * scale for scale in scales)))
    yield _Mood()
    yield _Mood(truth=0.9)
    # The logarithm of a sum wants a positive sum, not positive numbers: parts with a negative one must not pass.
    yield _Mood(truth=0.9, shift=1.0)
    for index in reversed(floats):  # statistics such as a variance come after the data
        yield _Mood(frozenset({index}), truth=0.9)
    yield _Mood(frozenset(floats), truth=0.9)
    yield _Mood(frozenset(floats), 0.9, 0.9)


def _thresholds(sketch: Sketch) -> tuple[float, ...]:
    """Return the sizes of the numbers in an op that normal data hardly reach."""
    numbers: list[object] = [entry for _, value in sketch.attrs for entry in _entries(value)]
    numbers += [entry for operand in sketch.inputs if operand and operand.is_float for entry in operand.content or ()]
    sizes = {abs(number) for number in numbers if isinstance(number, float)}
    return tuple(sorted(size for size in sizes if _FINE < size < 0.05 or 2 < size < _COARSE))


def _entries(value: Attr) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _draw(
    operand: Operand,
    range_: _Range,
    mood: _Mood,
    rng: np.random.Generator,
    *,
    positive: bool,
    spared: bool,
    turned: bool,
) -> Array:
    """Return data for one input.

    Args:
        operand: The input.
        range_: Which integers it may hold.
        mood: What the data are like.
        rng: Draws them.
        positive: Whether floats are positive.
        spared: Whether the first integer of the range is left out.
        turned: Whether a tensor of few elements has the opposite signs: a product by a scalar is monotone only while
            its sign is luck.
    """
    if operand.content is not None:
        return operand.array()
    shape = operand.shape
    if operand.is_float:
        if positive:
            return rng.uniform(0.1, mood.spread, shape)
        normal = rng.standard_normal(shape)
        if normal.size <= _FEW:
            normal = np.abs(normal) * (-1.0) ** (np.arange(normal.size) + turned).reshape(shape)
        normal = normal + mood.shift
        return normal if len(mood.scales) == 1 else normal * rng.choice(mood.scales, shape)
    size = int(np.prod(shape))
    if operand.dtype == "bool":
        flags = rng.random(size) < mood.truth
        flags[: min(2, size)] = (not turned, turned)[: min(2, size)]
        return rng.permutation(flags).reshape(shape)
    low = max(0, range_.low) if operand.dtype.startswith("u") else range_.low
    count = range_.high - low
    cycle = low + np.concatenate([rng.permutation(count) for _ in range(-(-size // count))])[:size]
    if size:  # the end of the range shows best whether a shard covers it
        cycle[0] = range_.high - 1
    if spared and count > 1:
        cycle[cycle == low] = range_.high - 1
    if size == 1 and low < 0 and turned:
        cycle[0] = low
    values = rng.permutation(cycle)
    for number in range_.special:
        values[rng.random(size) < _SPECIAL] = number
    return values.astype(operand.dtype).reshape(shape)


def _ranges(sketch: Sketch, executor: Executor) -> dict[int, _Range]:
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
    ranges: dict[int, _Range] = {}
    for index in integers:
        operand = sketch.inputs[index]
        assert operand is not None, "chosen above"
        unbounded = min(_UNBOUNDED, np.iinfo(operand.dtype).max + 1)
        candidates = [unbounded, *sorted((end for end in ends if 1 <= end < unbounded), reverse=True)]
        accepted = partial(_accepts, sketch, plain, index, executor)
        refused = 0
        for end in candidates:
            if not accepted(end):
                refused = end
            else:
                while refused - end > 1:  # the limit is no size itself, as where a window has to fit behind an index
                    middle = (end + refused) // 2
                    end, refused = (middle, refused) if accepted(middle) else (end, middle)
                low, high = (-2, max(candidates[1:], default=8)) if end == unbounded else (0, end)
                if operand.dtype == "uint8":  # packed numbers: all their bits count
                    low, high = 0, end
                elif operand.dtype.startswith("uint"):
                    low = 0
                special = _special(sketch, plain, index, low, high, executor)
                ranges[index] = _Range(low, high, special)
                break
    return ranges


def _accepts(sketch: Sketch, plain: Sequence[Array | None], index: int, executor: Executor, end: int) -> bool:
    """Whether an op takes the last number below `end` everywhere in an integer input."""
    operand = sketch.inputs[index]
    assert operand is not None, "it is a tensor"
    trial = list(plain)
    trial[index] = np.full(operand.shape, end - 1, dtype=operand.dtype)
    return run_sketch(sketch, trial, executor) is not None


def _special(
    sketch: Sketch, plain: list[Array | None], index: int, low: int, high: int, executor: Executor
) -> tuple[int, ...]:
    """Return the numbers outside its range that an integer input may hold because an attribute says so.

    An attribute is no axis if it may also be a number that no axis is.
    """
    operand = sketch.inputs[index]
    assert operand is not None, "it is a tensor"
    fits = np.iinfo(operand.dtype)
    found = []
    for name, value in sketch.attrs:
        if isinstance(value, int) and not low <= value < high and fits.min <= value <= fits.max:
            numbers = np.full(operand.shape, value, dtype=operand.dtype)
            numbers.reshape(-1)[:1] = low
            trial = [numbers if i == index else array for i, array in enumerate(plain)]
            attrs = tuple((other, -_UNBOUNDED if other == name else kept) for other, kept in sketch.attrs)
            accepted = run_sketch(sketch, trial, executor) is not None
            if accepted and run_sketch(replace(sketch, attrs=attrs), plain, executor) is not None:
                found.append(value)
    return tuple(found)

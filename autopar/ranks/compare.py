"""How far the ranks are from the unpartitioned run, and how far they may be.

Both compute in the same precision, but add in another order. An error is measured against the largest element of its
tensor: float32 rounds to 6e-8 of a number, sums of thousands of terms in another order differ by about 1e-6 of the
largest, and tens of layers amplify that to some 1e-5. The tolerance of 1e-4 leaves a decade. Notes:

- A tensor that is zero but for rounding (the gradient of a bias that softmax cancels) has no scale of its own: no scale
  is below a thousandth of the largest element of all tensors compared together.
- An optimizer may amplify what is within tolerance: Adam's first step is the sign of a gradient, whatever its size. A
  parameter may differ by the tolerance and by what its update makes of gradients that differ by the tolerance.
- Devices that hold copies have to agree; their largest difference counts like an error.
- Infinities and NaN are errors, even where both runs have them.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ranks.records import Deviation

Array = NDArray[Any]

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 5e-2, "bfloat16": 2e-1}
"""Tolerance by the element type of the parameters; as derived above for float32, for others by their rounding."""

_FLOOR = 1e-3  # of the largest element of all tensors compared together


def scales(expected: Mapping[Any, Array]) -> dict[Any, float]:
    """Return what errors of each tensor are measured against."""
    largest = {key: float(np.max(np.abs(_wide(array)), initial=0.0)) for key, array in expected.items()}
    floor = _FLOOR * max(largest.values(), default=0.0)
    return {key: max(size, floor) for key, size in largest.items()}


def deviation(
    what: str,
    found: Mapping[Any, Array],
    expected: Mapping[Any, Array],
    tolerance: float,
    copies: Mapping[Any, float] | None = None,
    slack: Mapping[Any, Array] | None = None,
) -> Deviation:
    """Return the largest errors of a set of tensors.

    Args:
        what: What they are.
        found: What the ranks computed.
        expected: What the unpartitioned run computed.
        tolerance: Relative error allowed.
        copies: Largest difference between copies, by tensor.
        slack: Absolute error allowed besides, by tensor and element.
    """
    assert found.keys() == expected.keys(), "the same tensors are compared"
    absolute = relative = 0.0
    worst = ""
    sizes = scales(expected)
    for key, array in expected.items():
        with np.errstate(invalid="ignore"):  # the difference of infinities is no number, and no match
            error = np.abs(_wide(found[key]) - _wide(array)) + (copies or {}).get(key, 0.0)
            allowed = sizes[key] + (_wide(slack[key]) / tolerance if slack is not None else 0.0)
            share = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
        numbers = np.isfinite(error) & np.isfinite(allowed)  # what is no number in both runs proves nothing
        largest = float(np.max(np.where(numbers, share, np.inf), initial=0.0))
        absolute = max(absolute, float(np.max(np.where(np.isfinite(error), error, np.inf), initial=0.0)))
        if largest > relative or not worst:
            relative, worst = max(relative, largest), _label(key)
    return Deviation(what, len(expected), finite(absolute), finite(relative), worst, relative <= tolerance)


def finite(number: float) -> float | None:
    """Return a number, or None for what JSON has no number for.

    >>> finite(1.5), finite(float("inf"))
    (1.5, None)
    """
    return number if math.isfinite(number) else None


def _label(key: Any) -> str:
    return f"{key[1]} of microbatch {key[0]}" if isinstance(key, tuple) else str(key)


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)

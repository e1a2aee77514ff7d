"""Results of our models beside those of the library that they are from."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[Array, Array]
"""Ours, and the library's."""
Pairs = tuple[Pair, Mapping[str, Pair]]
"""Results, and gradients by parameter."""


MOST_DEVIATION = 1e-6
"""Largest deviation of results and of gradients; most of what there is comes from factors and tables in float32."""


def check_pairs(results: Pair, gradients: Mapping[str, Pair]) -> None:
    """Assert that `deviations` are at most 1e-6, and that each element of a gradient agrees to 1e-5 of itself."""
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-6)
    for name, pair in gradients.items():
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6, err_msg=name)
    assert max(deviations(results, gradients)) <= MOST_DEVIATION


def deviation(found: Array, expected: Array) -> float:
    """Return the largest difference of two elements, relative to the largest element."""
    largest = float(np.max(np.abs(expected), initial=0.0))
    return float(np.max(np.abs(found - expected), initial=0.0)) / largest if largest else 0.0


def deviations(results: Pair, gradients: Mapping[str, Pair]) -> tuple[float, float]:
    """Return the deviation of results, and the largest one of a gradient.

    Gradients are held to the largest gradient of all parameters: those of some, such as biases that shift all scores of
    a softmax, are zero but for rounding.
    """
    largest = max(float(np.max(np.abs(pair[1]), initial=0.0)) for pair in gradients.values())
    return deviation(*results), max(
        float(np.max(np.abs(found - expected), initial=0.0)) / largest for found, expected in gradients.values()
    )

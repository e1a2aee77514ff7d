"""Arrays of the cost model, and matrix products of such sizes.

Shape arrays are (n, rank): one row of local sizes per strategy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Shapes = Sequence[IntArray | None]
"""Local shapes of the operands of an op, in their order; None for an absent operand."""


def num_elements(shapes: IntArray) -> FloatArray:
    """Return the number of elements of each shape, (n, rank) -> (n,); 1 for scalars."""
    sizes: FloatArray = np.prod(shapes, axis=1, dtype=np.float64)
    return sizes


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """`batch` products of (m, k) by (k, n); all arrays of floats, (n,) or scalars.

    Attributes:
        batch: Number of products.
        m: Rows of each result.
        n: Columns of each result.
        k: Terms of each element.
        on_vectors: Whether vector units compute it, so that it takes matrix units no time.
    """

    batch: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    on_vectors: bool = False

    @property
    def flops(self) -> FloatArray:
        """A multiply and an add count 2."""
        return 2.0 * self.batch * self.m * self.n * self.k


def shape_of(shapes: Shapes, index: int) -> IntArray:
    """Return the shape array of an operand that has to be there."""
    shape = shapes[index]
    assert shape is not None, f"operand {index} is absent"
    return shape

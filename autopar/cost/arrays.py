"""Arrays of the cost model. Shape arrays are (n, rank): one row of local sizes per strategy."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def num_elements(shapes: IntArray) -> FloatArray:
    """Return the number of elements of each shape, (n, rank) -> (n,); 1 for scalars."""
    sizes: FloatArray = np.prod(shapes, axis=1, dtype=np.float64)
    return sizes

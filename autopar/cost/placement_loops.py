"""Loops over changes of placement, compiled."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]


def _shortened(seconds: Floats, part: Floats, first: NDArray[np.int16]) -> None:
    """Replace the seconds of moves by those of the cheapest ways, by Floyd and Warshall's algorithm.

    A way is shorter only if that is no matter of rounding: else it would only grow longer.

    Args:
        seconds: (tensors, states, states) of moves, 0 from a state to itself and infinity where there is none.
        part: What of them is told apart.
        first: The state that comes first on the way, of moves that they end at.
    """
    for tensor in range(seconds.shape[0]):
        for middle in range(seconds.shape[1]):
            rest = seconds[tensor, middle]
            for source in range(seconds.shape[1]):
                half, own = seconds[tensor, source, middle], seconds[tensor, source]
                if source == middle or half == np.inf:
                    continue
                for target in range(seconds.shape[1]):
                    through = half + rest[target]
                    if through < own[target] * (1.0 - 1e-12):
                        own[target] = through
                        part[tensor, source, target] = part[tensor, source, middle] + part[tensor, middle, target]
                        first[tensor, source, target] = first[tensor, source, middle]


_compiled_shortened: Callable[..., None] = compiled(_shortened)
FEW = 4096
"""Moves up to which numpy takes less time than loading machine code once does."""


def shortened(seconds: Floats, part: Floats, first: NDArray[np.int16]) -> None:
    """Replace the seconds of moves by those of the cheapest ways, as `_shortened` does."""
    if seconds.size > FEW:
        _compiled_shortened(seconds, part, first)
        return
    for middle in range(seconds.shape[1]):
        through = seconds[:, :, middle, None] + seconds[:, middle, None, :]
        shorter = through < seconds * (1.0 - 1e-12)
        if shorter.any():
            both = part[:, :, middle, None] + part[:, middle, None, :]
            part[shorter] = both[shorter]
            first[shorter] = np.broadcast_to(first[:, :, middle, None], first.shape)[shorter]
            seconds[shorter] = through[shorter]

"""Functions compiled to machine code: the hot loops that numpy has no words for."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Return `function` compiled on its first call; later processes find the machine code in a cache."""
    result: F = numba.njit(cache=True, nogil=True)(function)
    return result

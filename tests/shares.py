"""Which cases of long tests run each time; the others do with `-m slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Return cases, those marked as slow that are not to be run each time."""
    return [case if is_quick(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def one_in(count: int, cases: Iterable[Any], *, unpacked: bool = False) -> list[Any]:
    """Return cases, one in so many of which is run each time, the first one and then evenly.

    Args:
        count: How many.
        cases: The cases.
        unpacked: Whether each is a tuple of several arguments.
    """
    parts = [case if unpacked else (case,) for case in cases]
    marks = [() if number % count == 0 else (pytest.mark.slow,) for number in range(len(parts))]
    return [pytest.param(*part, marks=own) for part, own in zip(parts, marks, strict=True)]

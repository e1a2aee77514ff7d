"""Python's garbage collector, kept from looking at what is built to stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""Objects that are made before the young ones are looked at, in place of Python's 700: a search makes tables of
thousands of records, none of which is garbage."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector away, as while a graph is built: all of it stays, and there is nothing to find."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Have the garbage collector look seldom, as during a search, most of whose records stay."""
    before = gc.get_threshold()
    if before[0]:  # else it never looks by itself
        gc.set_threshold(max(YOUNG, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

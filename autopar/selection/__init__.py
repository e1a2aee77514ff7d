"""A problem file solved by a wall clock: in a process of its own, which can be cut off at any moment."""

from autopar.selection.records import Known, Selection
from autopar.selection.watchdog import select

__all__ = ["Known", "Selection", "select"]

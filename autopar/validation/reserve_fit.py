"""Fitting what a stack takes besides its tensors: gaps of the allocator, and what lies outside of it.

    shown = allocated (1 + gaps)             reserved bytes, where a row states these
    shown = allocated (1 + gaps) + outside   what the driver shows

    minimise  sum_i w(e_i) |e_i|,   e_i = log(shown_i / measured_i),   w(e) = `TOO_LOW` for e < 0, else 1

over rows for calibration. A prediction that is too low costs a run, one that is too high a part of a device: with twice
the weight for too low, two of three rows are at most as full as predicted. One row counts once, however far it is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Device
from autopar.cost import Stack, bundled_stacks
from autopar.cost.reserve import MOST_GAPS, MOST_OUTSIDE
from autopar.errors import AutoparError, DataError
from autopar.progress import Progress, ProgressCallback, silent
from autopar.validation.completion import InexpressibleError
from autopar.validation.express import express
from autopar.validation.records import MemoryKind, Row
from autopar.validation.run import batches, predict_case, rank_bytes, shown_bytes
from autopar.validation.score import Errors, errors
from autopar.validation.stacks import STACKS

TOO_LOW = 2.0
"""How often an error counts that is too low."""
_GAPS = np.linspace(0.0, MOST_GAPS, 81)
_OUTSIDE = np.linspace(0.0, MOST_OUTSIDE, 61)


@dataclass(frozen=True, slots=True)
class Held:
    """A measured row, and what of it is allocated.

    Attributes:
        kind: What the row counts.
        allocated: Predicted bytes of tensors, on the rank that was measured.
        measured: Measured bytes.
        device: The device.
    """

    kind: MemoryKind
    allocated: float
    measured: float
    device: Device

    def error(self, stack: Stack) -> float:
        """Predicted over measured bytes, less 1."""
        return shown_bytes(self.kind, self.allocated, self.device, stack) / self.measured - 1


@dataclass(frozen=True, slots=True)
class ReserveFit:
    """A stack with a fitted reserve.

    Attributes:
        stack: The stack.
        fitted: Errors on the rows of the fit.
        held_out: Errors on the others; None if there are none.
        before: Errors on the rows of the fit before it.
    """

    stack: Stack
    fitted: Errors
    held_out: Errors | None
    before: Errors


def fit_reserve(
    rows: Sequence[Row], name: str, cache_dir: str | Path | None = None, progress: ProgressCallback = silent
) -> ReserveFit:
    """Return a stack with gaps, and bytes outside of the allocator, fitted to the rows it is for.

    Args:
        rows: Measured rows; those that are held out are used to report, not to fit.
        name: Name of the stack, of the table in `autopar.validation.stacks`.
        cache_dir: Where discovered rules are kept between runs.
        progress: Told how far it is.

    Raises:
        DataError: If there is no such stack, or no row to fit it to.
    """
    known = next((entry for entry in STACKS if entry.name == name), None)
    if known is None:
        raise DataError(f"no framework is known as stack {name!r}", hint=f"choose {', '.join(e.name for e in STACKS)}")
    start = bundled_stacks().get(name, known.unfitted)
    for_fit, held_out = (
        _held([row for row in rows if row.calibrates is calibrates], name, cache_dir, progress)
        for calibrates in (True, False)
    )
    if not for_fit:
        raise DataError(f"no row states reserved bytes of {name!r}", hint="rows need memory_gb of that kind")
    stack = fitted_reserve(for_fit, start)
    fitted, before = errors([row.error(stack) for row in for_fit]), errors([row.error(start) for row in for_fit])
    assert fitted is not None, "there are rows"
    assert before is not None, "there are rows"
    return ReserveFit(stack, fitted, errors([row.error(stack) for row in held_out]), before)


def _held(rows: Sequence[Row], name: str, cache_dir: str | Path | None, progress: ProgressCallback) -> list[Held]:
    """Return the rows of a stack that count more than tensors."""
    found = []
    wanted = [row for group in batches(rows) for row in group if row.memory_bytes and row.memory_kind != "allocated"]
    for done, row in enumerate(wanted):
        progress(Progress("predict", done, len(wanted), detail=row.id))
        try:
            case = express(row)
            if case.stack.name != name:
                continue
            case, prediction = predict_case(case, case.stack, cache_dir)
        except (InexpressibleError, AutoparError):
            continue
        allocated = rank_bytes(row.memory_rank, prediction.timeline)
        measured = row.memory_bytes
        assert measured is not None, row.id
        found.append(Held(row.memory_kind, allocated, measured, case.cluster.device))
    return found


def fitted_reserve(rows: Sequence[Held], start: Stack) -> Stack:
    """Return the stack whose reserve costs least, the least gaps of several."""
    outsides = _OUTSIDE if any(row.kind == "device" for row in rows) else np.array([start.outside])
    stacks = [
        replace(start, gaps=round(float(gaps), 4), outside=float(outside)) for gaps in _GAPS for outside in outsides
    ]
    return min(stacks, key=lambda stack: _loss(np.log1p([row.error(stack) for row in rows])))


def _loss(log_ratios: NDArray[np.float64]) -> float:
    return float((np.where(log_ratios < 0, TOO_LOW, 1.0) * np.abs(log_ratios)).sum())

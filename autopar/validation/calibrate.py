"""Fitting the scalars of a stack to measured step times.

    minimise  sum_i rho(log(predicted_i / measured_i)) + sum_j (prior x (s_j - default_j) / (high_j - low_j))^2
    rho(r) = 2 c^2 (sqrt(1 + (r / c)^2) - 1)                        soft L1: outliers count linearly

over scalars within their bounds. A program does not depend on the scalars, so a prediction is one simulation of a few
milliseconds, and derivatives are differences of predictions. The method is Gauss and Newton's with a damping that
grows when a step fails (Levenberg and Marquardt), every step cut to the bounds.
"""

import datetime
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel, Stack
from autopar.cost.stack import SCALARS, Fit, FitSource, Range
from autopar.errors import AutoparError, DataError
from autopar.program.records import Program
from autopar.progress import Progress, ProgressCallback, silent
from autopar.simulate import simulate
from autopar.validation.express import Case, InexpressibleError, express
from autopar.validation.records import Row
from autopar.validation.run import batches, predictor
from autopar.validation.score import Errors, errors
from autopar.validation.stacks import STACKS

FloatArray = NDArray[np.float64]

_OUTLIER = 0.05  # error from which on a row counts less than quadratically
_PRIOR = 0.02  # error that a scalar at the far end of its bounds counts as
_STEP = 0.01  # of the range of a scalar: differences for derivatives
_FELT = 0.002  # mean change of a prediction over a tenth of its range below which a scalar is not fitted
_ITERATIONS = 12
_ENOUGH = 1e-4  # relative decrease of the loss below which a fit is done
_VALID = ("n_gpus", "hidden", "layers", "seq", "micro_batch", "tp", "pp")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A measured row, lowered: what remains is to simulate it under a stack."""

    case: Case
    program: Program

    def log_ratio(self, stack: Stack) -> float:
        """Return the logarithm of predicted over measured seconds."""
        costs = CostModel(self.case.cluster, self.case.policy, stack)
        return float(np.log(simulate(self.program, costs).step_seconds / self.case.seconds))


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A fitted stack.

    Attributes:
        stack: The stack, its fit written into it.
        fitted: Errors on the rows of the fit.
        left_out: Errors on the rows of the fit, each predicted by a fit to all others (to first order).
        held_out: Errors on the rows held out; None if there are none.
        before: Errors on the rows of the fit before it.
    """

    stack: Stack
    fitted: Errors
    left_out: Errors
    held_out: Errors | None
    before: Errors


def prepare(
    rows: Sequence[Row], name: str, cache_dir: Path | None = None, progress: ProgressCallback = silent
) -> list[Prepared]:
    """Return the rows that a stack is for, lowered; those with assumptions about the plan are left out."""
    cases = []
    for group in batches(rows):
        for row in group:
            try:
                case = express(row)
            except InexpressibleError:
                continue
            if case.stack.name == name and not case.lighter:
                cases.append(case)
    prepared = []
    for done, case in enumerate(cases):
        progress(Progress("lower", done, len(cases), detail=case.row.id))
        machine = predictor(case.family, case.config, cache_dir)  # type: ignore[arg-type]  # frozen
        try:
            program, _ = machine.lowered(case.degrees, case.cluster, policy=case.policy)
        except AutoparError:
            continue
        prepared.append(Prepared(case, program))
    return prepared


def calibrate(
    rows: Sequence[Row],
    name: str,
    *,
    scalars: Sequence[str] = (),
    cache_dir: Path | None = None,
    progress: ProgressCallback = silent,
) -> Calibration:
    """Return a stack fitted to the rows it is for.

    Args:
        rows: Measured rows; those that are held out are used to report, not to fit.
        name: Name of the stack, of the table in `autopar.validation.stacks`.
        scalars: Scalars to fit; by default all that make a difference to the rows.
        cache_dir: Where discovered rules are kept between runs.
        progress: Told how far it is.

    Raises:
        DataError: If there is no such stack, or no row to fit it to.
    """
    known = next((entry for entry in STACKS if entry.name == name), None)
    if known is None:
        raise DataError(f"no framework is known as stack {name!r}", hint=f"choose {', '.join(e.name for e in STACKS)}")
    unknown = [scalar for scalar in scalars if scalar not in SCALARS]
    if unknown:
        raise DataError(f"there is no scalar {unknown[0]!r}", hint=f"choose {', '.join(SCALARS)}")
    start = Stack(known.name, known.attention, known.fusion, clusters=known.clusters)
    every = prepare(rows, name, cache_dir, progress)
    for_fit = [one for one in every if one.case.row.calibrates]
    held_out = [one for one in every if not one.case.row.calibrates]
    if not for_fit:
        raise DataError(f"no row to calibrate {name!r} with", hint="rows need a step time, sizes and degrees")
    fitter = _Fitter(for_fit, start, progress)
    names = tuple(scalars) or fitter.felt()
    before = fitter.residuals(start)
    stack, jacobian, after = fitter.fit(names)
    found = [errors(_shares(values)) for values in (after, after / (1 - _leverage(jacobian, after)), before)]
    fitted, left_out, first = found
    assert fitted is not None
    assert left_out is not None
    assert first is not None
    checked = errors(_shares(np.array([one.log_ratio(stack) for one in held_out])))
    sources = Counter(one.case.row.source for one in for_fit)
    fit = Fit(
        datetime.datetime.now(tz=datetime.UTC).date(),
        round(fitted.mean, 4),
        round(fitted.p90, 4),
        names,
        tuple(FitSource(source, count) for source, count in sorted(sources.items())),
        tuple(_ranges(for_fit)),
        None if checked is None else round(checked.mean, 4),
    )
    rounded = tuple((scalar, float(f"{stack[scalar]:.4g}")) for scalar in names)
    done = Stack(known.name, known.attention, known.fusion, rounded, known.clusters, fit)
    return Calibration(done, fitted, left_out, checked, first)


def _shares(log_ratios: FloatArray) -> list[float]:
    return [float(value) for value in np.exp(log_ratios) - 1]


def _ranges(prepared: Sequence[Prepared]) -> list[Range]:
    found = []
    for name in _VALID:
        values = [value for one in prepared if isinstance(value := getattr(one.case.row, name), int)]
        if values:
            found.append(Range(name, min(values), max(values)))
    return found


def _weights(residuals: FloatArray) -> FloatArray:
    """Return the weights under which least squares have the gradient of soft L1."""
    return np.asarray((1 + (residuals / _OUTLIER) ** 2) ** -0.5)


def _loss(residuals: FloatArray) -> float:
    return float((2 * _OUTLIER**2 * (np.sqrt(1 + (residuals / _OUTLIER) ** 2) - 1)).sum())


def _leverage(jacobian: FloatArray, residuals: FloatArray) -> FloatArray:
    """Return by row how much of its own residual a row explains; at most 0.9, so that none is left without error."""
    rooted = jacobian * np.sqrt(_weights(residuals))[:, None]
    normal = rooted.T @ rooted + _PRIOR**2 * np.eye(jacobian.shape[1])
    return np.asarray(np.minimum(0.9, np.einsum("ij,jk,ik->i", rooted, np.linalg.inv(normal), rooted)))


class _Fitter:
    """Least squares over a number of prepared rows, in coordinates that are 0 and 1 at the bounds."""

    def __init__(self, prepared: Sequence[Prepared], start: Stack, progress: ProgressCallback) -> None:
        self._prepared, self._start, self._progress = prepared, start, progress

    def residuals(self, stack: Stack) -> FloatArray:
        """Return the log ratios of all rows under a stack."""
        return np.array([one.log_ratio(stack) for one in self._prepared])

    def felt(self) -> tuple[str, ...]:
        """Return the scalars that make a difference to the rows."""
        base = self.residuals(self._start)
        names = []
        for name, scalar in SCALARS.items():
            towards = scalar.low if scalar.default - scalar.low > scalar.high - scalar.default else scalar.high
            moved = scalar.default + 0.1 * (towards - scalar.default)
            change = np.abs(self.residuals(self._start.with_scalars(**{name: moved})) - base)
            if change.mean() > _FELT:
                names.append(name)
        return tuple(names)

    def fit(self, names: Sequence[str]) -> tuple[Stack, FloatArray, FloatArray]:
        """Return the best stack found, the derivatives there, (rows, scalars), and the residuals."""
        low = np.array([SCALARS[name].low for name in names])
        span = np.array([SCALARS[name].high for name in names]) - low
        default = (np.array([SCALARS[name].default for name in names]) - low) / span

        def stack_at(point: FloatArray) -> Stack:
            values = np.clip(low + point * span, low, low + span)
            return self._start.with_scalars(**dict(zip(names, map(float, values), strict=True)))

        def objective(residuals: FloatArray, point: FloatArray) -> float:
            return _loss(residuals) + float(((_PRIOR * (point - default)) ** 2).sum())

        point, damping = default.copy(), 1e-3
        residuals = self.residuals(stack_at(point))
        best = objective(residuals, point)
        jacobian = self._jacobian(stack_at, point, residuals)
        for iteration in range(_ITERATIONS):
            self._progress(Progress("fit", iteration + 1, _ITERATIONS, detail=f"loss {best:.4g}"))
            weights = _weights(residuals)
            gradient = jacobian.T @ (weights * residuals) + _PRIOR**2 * (point - default)
            normal = (jacobian.T * weights) @ jacobian + _PRIOR**2 * np.eye(len(names))
            improved = False
            for _ in range(6):
                moved = _step(normal, gradient, damping, point)
                tried = self.residuals(stack_at(moved))
                loss = objective(tried, moved)
                if loss < best:
                    improved = best - loss > _ENOUGH * best
                    point, residuals, best, damping = moved, tried, loss, damping / 4
                    jacobian = self._jacobian(stack_at, point, residuals)
                    break
                damping *= 6
            if not improved:
                break
        return stack_at(point), jacobian, residuals

    def _jacobian(
        self, stack_at: Callable[[FloatArray], Stack], point: FloatArray, residuals: FloatArray
    ) -> FloatArray:
        columns = []
        for index in range(len(point)):
            step = _STEP if point[index] + _STEP <= 1 else -_STEP
            moved = point.copy()
            moved[index] += step
            columns.append((self.residuals(stack_at(moved)) - residuals) / step)
        return np.stack(columns, axis=1)


def _step(normal: FloatArray, gradient: FloatArray, damping: float, point: FloatArray) -> FloatArray:
    """Return the point after a damped step; coordinates that would leave the bounds stay on them."""
    free = np.ones(len(point), dtype=bool)
    step = np.zeros(len(point))
    for _ in range(len(point)):
        index = np.flatnonzero(free)
        if not len(index):
            break
        inner = normal[np.ix_(index, index)]
        fixed = normal[np.ix_(index, np.flatnonzero(~free))] @ step[~free]
        damped = inner + damping * np.diag(np.maximum(np.diag(inner), 1e-9))
        step[index] = -np.linalg.solve(damped, gradient[index] + fixed)
        outside = free & ((point + step < 0) | (point + step > 1))
        if not outside.any():
            break
        step[outside] = np.clip(point[outside] + step[outside], 0, 1) - point[outside]
        free &= ~outside
    return np.asarray(np.clip(point + step, 0, 1))

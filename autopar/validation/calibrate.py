"""Fitting the scalars of a stack to measured step times.

    minimise  sum_i rho(log(predicted_i / measured_i)) + sum_j (prior x (s_j - default_j) / (high_j - low_j))^2
    rho(r) = 2 c^2 (sqrt(1 + (r / c)^2) - 1)                        soft L1: outliers count linearly

over scalars within their bounds; for a device with relatives (`Known.relatives`) a fit to the rows of all takes the
place of the defaults. A program does not depend on the scalars, so a prediction is one simulation of a few
milliseconds, and derivatives are differences of predictions. The method is Gauss and Newton's with a damping that
grows when a step fails (Levenberg and Marquardt), every step cut to the bounds.
"""

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import CostModel, DtypePolicy, Prices, Stack, bundled_stacks
from autopar.cost.stack import SCALARS, Fit, FitSource, Range
from autopar.errors import AutoparError, DataError
from autopar.program.records import Program
from autopar.progress import Progress, ProgressCallback, silent
from autopar.simulate.engine import run_shares
from autopar.task import job_machine
from autopar.validation.completion import InexpressibleError
from autopar.validation.express import express
from autopar.validation.records import Row
from autopar.validation.run import batches, predict_case, predictor
from autopar.validation.score import Errors, errors
from autopar.validation.stacks import STACKS, Known

FloatArray = NDArray[np.float64]

_OUTLIER = 0.05  # error from which on a row counts less than quadratically
# Error that a scalar at the far end of its bounds counts as: a fifth of the way weighs as much as a row wrong by
# `_OUTLIER`. By hand: with 0.02 fits to 48 rows of H100 ended with six scalars on a bound.
_PRIOR = 0.25
_STEP = 0.01  # of the range of a scalar: differences for derivatives
_FELT = 0.005  # mean change of predictions below which a scalar is not fitted, moved half way to its farther bound
_ROUSED = 0.25  # of the range: where scalars start that make no difference at their default (the host's launches)
_ITERATIONS = 8
_ENOUGH = 2e-3  # relative decrease of the loss below which a fit is done
_MOST = 48  # rows of either part that are looked at; more would say the same again
_VALID = ("n_gpus", "hidden", "layers", "seq", "micro_batch", "tp", "pp")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A measured step, lowered: what remains is to simulate it under a stack.

    Attributes:
        program: What ran.
        cluster: Where.
        policy: In which numbers.
        seconds: How long it took.
        source: Who says so.
        sizes: Properties of the step whose ranges the fit covers, by name.
        prices: Measured events that count in place of formulas; None if there are none.
        choices: The stack as the step ran it, whose scalars do not count; None for the stack that is fitted.
    """

    program: Program
    cluster: Cluster
    policy: DtypePolicy
    seconds: float
    source: str
    sizes: Mapping[str, int]
    prices: Prices | None = None
    choices: Stack | None = None

    def log_ratio(self, stack: Stack) -> float:
        """Return the logarithm of predicted over measured seconds: the stack's scalars, and the step's own choices."""
        own = stack if self.choices is None else replace(self.choices, scalars=stack.scalars)
        costs = CostModel(self.cluster, self.policy, own, self.prices)
        return float(np.log(max(sim.step for _, sim in run_shares(self.program, costs)) / self.seconds))


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
    rows: Sequence[Row],
    name: str,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
    relatives: Sequence[str] = (),
) -> list[Prepared]:
    """Return the rows that a stack and its relatives are for, and those it is pooled with, lowered: at most `_MOST`."""
    names = {name, *relatives, *(each for known in STACKS if known.name == name for each in known.pooled)}
    cases = []
    for group in batches(rows):
        for row in group:
            try:
                case = express(row)
            except InexpressibleError:
                continue
            if case.stack.name in names and not case.row.num_experts and case.degrees.ep == 1:
                cases.append(case)  # what sending tokens to experts costs is no scalar of a stack
    if len(cases) > _MOST:
        cases = [cases[index * len(cases) // _MOST] for index in range(_MOST)]
    prepared = []
    for done, case in enumerate(cases):
        progress(Progress("lower", done, len(cases), detail=case.row.id))
        machine = predictor(case.family, case.config, cache_dir, case.lora)  # type: ignore[arg-type]  # frozen
        try:
            if case.lighter:
                case, _ = predict_case(case, case.stack, cache_dir)
            cluster = case.degrees.numbered(job_machine(case.degrees.gpus, case.cluster.by_node))
            program, _ = machine.lowered(
                case.degrees, cluster, case.stack, policy=case.policy, first_layers=case.first_layers
            )
        except AutoparError:
            continue
        sizes = {name: size for name in _VALID if isinstance(size := getattr(case.row, name), int)}
        prepared.append(
            Prepared(program, cluster, case.policy, case.seconds, case.row.source, sizes, choices=case.stack)
        )
    return prepared


def calibrate(
    rows: Sequence[Row],
    name: str,
    *,
    scalars: Sequence[str] = (),
    cache_dir: str | Path | None = None,
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
    known = _known(name)
    unknown = [scalar for scalar in scalars if scalar not in SCALARS]
    if unknown:
        raise DataError(f"there is no scalar {unknown[0]!r}", hint=f"choose {', '.join(SCALARS)}")
    for_fit, held_out = (
        prepare([row for row in rows if row.calibrates is calibrates], name, cache_dir, progress)
        for calibrates in (True, False)
    )
    shared = None
    start = _start(known)
    if known.relatives and for_fit:
        calibrating = [row for row in rows if row.calibrates]
        together = prepare(calibrating, name, cache_dir, progress, known.relatives)
        shared = fit_prepared(together, (), start, scalars, progress).stack
    return fit_prepared(for_fit, held_out, start, scalars, progress, shared)


def _start(known: Known) -> Stack:
    """Return the stack to fit: its kernels, nothing fitted, and the reserve that was fitted to measured memory."""
    bundled = bundled_stacks().get(known.name, known.unfitted)
    return replace(known.unfitted, gaps=bundled.gaps, outside=bundled.outside)


def _known(name: str) -> Known:
    """Return the entry of a stack in the table.

    Raises:
        DataError: If there is none of that name.
    """
    known = next((entry for entry in STACKS if entry.name == name), None)
    if known is None:
        raise DataError(f"no framework is known as stack {name!r}", hint=f"choose {', '.join(e.name for e in STACKS)}")
    return known


def fit_prepared(
    for_fit: Sequence[Prepared],
    held_out: Sequence[Prepared],
    start: Stack,
    scalars: Sequence[str] = (),
    progress: ProgressCallback = silent,
    shared: Stack | None = None,
) -> Calibration:
    """Return a stack fitted to rows that are lowered already.

    Args:
        for_fit: Rows to fit it to.
        held_out: Rows to report on.
        start: Its name and kernels.
        scalars: Scalars to fit; by default all that make a difference to the rows.
        progress: Told how far it is.
        shared: A fit to more rows, towards whose scalars these are drawn; None for the defaults.

    Raises:
        DataError: If there is no row to fit it to.
    """
    if not for_fit:
        raise DataError(f"no row to calibrate {start.name!r} with", hint="rows need a step time, sizes and degrees")
    fitter = _Fitter(for_fit, start, progress)
    names = tuple(scalars) or fitter.felt()
    stack, jacobian, before, after = fitter.fit(names, shared)
    left_out = after / (1 - _leverage(jacobian, after))
    fitted, alone, first = (_errors(values) for values in (after, left_out, before))
    checked = errors(_shares(np.array([one.log_ratio(stack) for one in held_out])))
    sources = Counter(one.source for one in for_fit)
    fit = Fit(
        datetime.datetime.now(tz=datetime.UTC).date(),
        round(fitted.mean, 4),
        round(fitted.p90, 4),
        names,
        tuple(FitSource(source, count) for source, count in sorted(sources.items())),
        tuple(_ranges(for_fit)),
        None if checked is None else round(checked.mean, 4),
    )
    rounded = {**dict(start.scalars), **{scalar: float(f"{stack[scalar]:.4g}") for scalar in names}}
    done = replace(start, scalars=tuple(rounded.items()), fit=fit)
    return Calibration(done, fitted, alone, checked, first)


def _errors(log_ratios: FloatArray) -> Errors:
    found = errors(_shares(log_ratios))
    assert found is not None, "there are rows"
    return found


def _shares(log_ratios: FloatArray) -> list[float]:
    return [float(value) for value in np.exp(log_ratios) - 1]


def _ranges(prepared: Sequence[Prepared]) -> list[Range]:
    found = []
    for name in dict.fromkeys(name for one in prepared for name in one.sizes):
        values = [one.sizes[name] for one in prepared if name in one.sizes]
        found.append(Range(name, float(min(values)), float(max(values))))
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
        """Return the scalars that make a difference to the rows when they leave their default."""
        base = self.residuals(self._start)
        names = []
        for name, scalar in SCALARS.items():
            towards = scalar.low if scalar.default - scalar.low > scalar.high - scalar.default else scalar.high
            moved = self._start.with_scalars(**{name: scalar.default + 0.5 * (towards - scalar.default)})
            if np.abs(self.residuals(moved) - base).mean() > _FELT:
                names.append(name)
        return tuple(names)

    def fit(
        self, names: Sequence[str], shared: Stack | None = None
    ) -> tuple[Stack, FloatArray, FloatArray, FloatArray]:
        """Return the best stack found, the derivatives there, (rows, scalars), and residuals before and after."""
        low = np.array([SCALARS[name].low for name in names])
        span = np.array([SCALARS[name].high for name in names]) - low
        centre = [SCALARS[name].default if shared is None else shared[name] for name in names]
        default = (np.array(centre) - low) / span

        def stack_at(point: FloatArray) -> Stack:
            values = np.clip(low + point * span, low, low + span)
            return self._start.with_scalars(**dict(zip(names, map(float, values), strict=True)))

        def objective(residuals: FloatArray, point: FloatArray) -> float:
            return _loss(residuals) + float(((_PRIOR * (point - default)) ** 2).sum())

        point, damping = default.copy(), 1e-3
        before = residuals = self.residuals(stack_at(point))
        best = objective(residuals, point)
        jacobian = self._jacobian(stack_at, point, residuals)
        asleep = np.abs(jacobian).mean(axis=0) < _FELT
        if asleep.any():
            point = np.where(asleep, np.where(default > 0.5, default - _ROUSED, default + _ROUSED), point)
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
        return stack_at(point), jacobian, before, residuals

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

"""The best prices for the rows of a step program: column generation between a small linear program and placements.

The linear program (`autopar.bounds.master_problem`) knows the choices found so far, its duals price the rows, and the
placement problem at these prices gives a bound and, if the bound is not yet what the program says, a new choice.
"""

import math
from collections.abc import Callable

import highspy
import numpy as np

from autopar.bounds.master_rows import StepProgram
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.linear_weights import Weights, problem
from autopar.formulate.tables import Tables
from autopar.problem import Choice, Problem, Solution

SMOOTHING = 0.5
"""How near to the prices of the best bound the next ones are; duals of a program that knows few choices jump."""

SHARE = 1e-6
"""What counts as part of a mean of choices."""

CLOSE = 1e-4
"""The bound is not raised further when it is this close, relative, to what the known choices allow."""

Solve = Callable[[Problem, float], Solution]
"""Solves a problem, or proves that its optimum is above a cutoff."""


class Hull:
    """The step program of a configuration and the choices known to it.

    Attributes:
        bound: Lower bound on the step seconds of every plan of the configuration.
        value: What the program says of the choices known; the bound cannot be raised above it without others.
        steps: Prices tried.
    """

    def __init__(self, tables: Tables, rows: StepProgram) -> None:
        self._tables, self.rows = tables, rows
        self.bound, self.value, self.steps = 0.0, math.inf, 0
        self._unit = 0.0
        self._known: dict[tuple[Choice, int], None] = {}
        self._columns: list[FloatArray] = []
        self._best: FloatArray | None = None
        self._smoothing = SMOOTHING
        self._memory = self.rows.memory_rows

    def priced(self, flavour: int = 0) -> tuple[Problem, float]:
        """Return the placement problem of a flavour at the prices of the bound, and its constant."""
        assert self._best is not None, "prices were tried"
        paid = np.where(self._memory, self._unit, 1.0) * self._best
        factors = np.tensordot(paid, self.rows.seconds[:, flavour], axes=1)
        constant = float(paid @ (self.rows.least + self.rows.host[:, flavour])) + self.rows.fixed
        return self._priced(factors, self.rows.item_prices(flavour, paid), self.rows.pair_prices(paid)), constant

    @property
    def unit(self) -> float:
        """The seconds that prices of memory are counted in; 0 before the first choice."""
        return self._unit

    @property
    def known(self) -> list[tuple[Choice, int]]:
        """The choices known, each with the number of a flavour."""
        return list(self._known)

    @property
    def columns(self) -> FloatArray:
        """What these add to the rows, (choices, rows)."""
        return np.array(self._columns)

    def reweigh(self, rows: StepProgram) -> None:
        """Begin again with another cost of the same variables; costs of shares of memory are in units."""
        self.rows, self.bound, self.value, self._best = rows, 0.0, math.inf, None

    @property
    def has_prices(self) -> bool:
        """Whether there is a bound that prices prove."""
        return self._best is not None

    @property
    def pays_for_memory(self) -> bool:
        """Whether the bound has a price on memory; else no flavour is faster than the first."""
        return self._best is not None and bool(self._best[self._memory].any())

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices known, the latest first."""
        return tuple(dict.fromkeys(choice for choice, _ in reversed(self._known)))

    def add(self, choice: Choice, flavour: int | None = None) -> bool:
        """Make a choice known, under one flavour or under all; return whether it is new."""
        totals = self._tables.kind_totals(choice)
        if not np.isfinite(totals).all():
            return False
        amounts = self._tables.flat.held(choice)
        edges = [(self._tables.edges[buffer.edge], buffer) for buffer in self.rows.buffers]
        held = np.array([buffer.amounts[choice[edge.first], choice[edge.second]] for edge, buffer in edges])
        new = False
        for index in range(len(self.rows.flavours)) if flavour is None else (flavour,):
            if (choice, index) in self._known:
                continue
            self._known[choice, index] = None
            seconds = np.tensordot(self.rows.seconds[:, index], totals, axes=2) + self.rows.host[:, index]
            self._columns.append(seconds + self.rows.held(index, amounts, held))
            self._unit = self._unit or max(float(seconds[~self._memory].max()), 1e-12)
            new = True
        return new

    def alone(self, choice: Choice) -> float:
        """Return what the program says of one choice: no plan that has it takes less."""
        only = Hull(self._tables, self.rows)
        if not only.add(choice):
            return math.inf
        only._solved(memory=True)
        return only.value

    def step(self, solve: Solve, cutoff: float, seen: Callable[[Choice], None], *, memory: bool) -> bool:
        """Try one set of prices, and return whether another one could raise the bound further.

        Args:
            solve: Solves placement problems.
            cutoff: A bound that is enough.
            seen: Told of the choices that the best mean known consists of.
            memory: Whether memory is limited.
        """
        self.steps += 1
        prices, mixed = self._program(memory=memory)
        for choice in mixed:
            seen(choice)
        if self.bound >= self.value * (1 - CLOSE):
            return False
        smoothing = self._smoothing if self._best is not None else 0.0
        tried = prices if self._best is None else smoothing * self._best + (1 - smoothing) * prices
        new = self._price(solve, tried, cutoff)
        self._smoothing = SMOOTHING if new else 0.0
        return new or smoothing > 0.0

    def _program(self, *, memory: bool) -> tuple[FloatArray, list[Choice]]:
        """Solve the linear program of the known choices; return the prices of its rows, and what it is a mean of."""
        rows = self.rows
        duals, found = self._solved(memory=memory)
        known, weights = list(self._known), found[rows.lhs.shape[1] :]
        return duals, [known[index][0] for index in np.flatnonzero(weights >= SHARE).tolist()]

    def _solved(self, *, memory: bool) -> tuple[FloatArray, FloatArray]:
        """Solve the linear program; return its prices and its variables."""
        rows = self.rows
        scale = np.where(self._memory, 1.0, 1.0 / self._unit)
        num_variables, num_columns = rows.lhs.shape[1], len(self._columns)
        columns = np.array(self._columns).T * scale[:, None]
        # Seconds are counted in units, shares of memory are not.
        own = np.where(rows.shares & ~self._memory[:, None], 1.0 / self._unit, 1.0)
        convex = np.concatenate([np.zeros(num_variables), np.ones(num_columns)])
        matrix = np.vstack([np.hstack([rows.lhs * own, -columns]), convex])
        least = np.concatenate([rows.least * scale, [1.0]])
        if not memory:
            least[: len(rows.least)][rows.with_memory] = -np.inf
        cost = np.concatenate([rows.cost, np.zeros(num_columns)])
        value, duals, found = _minimise(cost, matrix, least)
        self.value = value * self._unit + rows.fixed
        return np.maximum(0.0, duals[: len(rows.least)]), found

    def _price(self, solve: Solve, prices: FloatArray, cutoff: float) -> bool:
        """Solve the placement problem of each flavour at prices, take the bound, and return whether a choice is new."""
        rows, new = self.rows, False
        paid = np.where(self._memory, self._unit, 1.0) * prices
        constant = float(paid @ rows.least) + rows.fixed
        lowest = math.inf
        tried = set()
        for index, flavour in enumerate(rows.flavours):
            factors = np.tensordot(paid, rows.seconds[:, index], axes=1)
            items = rows.item_prices(index, paid)
            base = constant + float(paid @ rows.host[:, index])
            if flavour is not rows.flavours[0] and not items.any():
                continue  # memory is free: no flavour is faster than the first
            if (factors.tobytes(), items.tobytes(), base) in tried:
                continue  # parts are alike
            tried.add((factors.tobytes(), items.tobytes(), base))
            instance = self._priced(factors, items, rows.pair_prices(paid))
            solution = solve(instance, min(lowest, max(cutoff, self.value)) - base)
            lowest = min(lowest, solution.bound + base)
            if solution.choice is not None:
                new |= self.add(solution.choice, index)
        if lowest > self.bound:
            self.bound, self._best = lowest, prices
        return new

    def _priced(self, factors: FloatArray, items: FloatArray, pairs: FloatArray) -> Problem:
        """Return the placement problem in which bytes of items and of pairs have a price."""
        edges = [(self._tables.edges[buffer.edge], buffer) for buffer in self.rows.buffers]
        priced = zip(edges, pairs.tolist(), strict=True) if pairs.any() else ()
        between = [(edge.first, edge.second, buffer.amounts, price) for (edge, buffer), price in priced if price]
        return problem(self._tables, Weights(factors, True), prices=items, pairs=between)


def _minimise(cost: FloatArray, matrix: FloatArray, least: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Return the least cost x with x >= 0, matrix x >= least (the last row equal), the duals of its rows, and x."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    model = highspy.HighsLp()
    num_rows, num_columns = matrix.shape
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = np.zeros(num_columns), np.full(num_columns, highspy.kHighsInf)
    upper = np.full(num_rows, highspy.kHighsInf)
    upper[-1] = least[-1]
    model.row_lower_, model.row_upper_ = least, upper
    filled = matrix != 0
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(filled.sum(axis=1))]).astype(np.int32)
    model.a_matrix_.index_ = np.nonzero(filled)[1].astype(np.int32)
    model.a_matrix_.value_ = matrix[filled]
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:  # a factorisation may be found too inexact
        highs.setOptionValue("presolve", "off")
        highs.clearSolver()
        highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal, "variables can always be raised"
    solution = highs.getSolution()
    return float(highs.getInfo().objective_function_value), np.array(solution.row_dual), np.array(solution.col_value)

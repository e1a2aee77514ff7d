"""Column generation for the master problem of a configuration: lower bound on the step time over mixtures of choices.

```text
master:    min over shares a of T(sum_i a_i V_i)  <=  min_i T(V_i)                  linear program over known choices
pricing:   step >= pi least + min over choices and flavours of pi (C V + host)      placement problem per flavour
```

Look here for the loop between the two. The duals pi of the master's rows price the slots of a choice; the pricing
problem gives a Lagrangian lower bound and, if the bound is below the master's value, a new column. `master_problem.py`
writes the rows.

- *Relaxes*: integrality: convex combinations of choices and flavours.
- *Valid when*: prices are nonnegative, the rows are lower bounds of the step time (`master_problem.py`), and the
  solver's bound of the pricing problem is proven.
- *Cost*: one linear program and one placement problem per flavour and iteration.
- *Source*: Dantzig and Wolfe, 1960, Oper. Res. 8; Gilmore and Gomory, 1961 (pricing); smoothing of the duals, Wentges,
  1997.
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
"""Weight of the best prices in the next ones (Wentges smoothing): duals of a master with few columns oscillate.
Without, gpt2-8 of the yardstick takes 13 % more CPU seconds (docs/benchmarks/ablation.md)."""

WEIGHT = 1e-6
"""Least weight in the master's optimum for a choice to count as part of it."""

CLOSE = 1e-4
"""Relative gap to the master's value at which the bound is not raised further."""

Solve = Callable[[Problem, float], Solution]
"""Solves a problem, or proves that its optimum is above a cutoff."""


class ColumnGeneration:
    """Master problem of one configuration, and its known columns.

    Attributes:
        bound: Lower bound on the step seconds of every plan of the configuration.
        value: Optimum of the master problem over known columns, which the bound does not exceed without further ones.
        steps: Number of prices tried.
    """

    def __init__(self, tables: Tables, rows: StepProgram) -> None:
        self._tables, self.rows = tables, rows
        self.bound, self.value, self.steps = 0.0, math.inf, 0
        self._unit = 0.0
        self._columns_of: dict[tuple[Choice, int], None] = {}
        self._columns: list[FloatArray] = []
        self._best_prices: FloatArray | None = None
        self._smoothing = SMOOTHING
        self._memory = self.rows.memory_rows

    def priced(self, flavour: int = 0) -> tuple[Problem, float]:
        """Pricing problem of a flavour at the best prices, and its constant."""
        assert self._best_prices is not None, "a bound has prices"
        row_prices = np.where(self._memory, self._unit, 1.0) * self._best_prices
        factors = np.tensordot(row_prices, self.rows.seconds[:, flavour], axes=1)
        constant = float(row_prices @ (self.rows.least + self.rows.host[:, flavour])) + self.rows.fixed
        return self._pricing_problem(
            factors, self.rows.item_prices(flavour, row_prices), self.rows.pair_prices(row_prices)
        ), constant

    @property
    def unit(self) -> float:
        """Seconds per unit of the master problem's rows of time; 0 before the first column."""
        return self._unit

    @property
    def keys(self) -> list[tuple[Choice, int]]:
        """Choice and flavour of every column."""
        return list(self._columns_of)

    @property
    def columns(self) -> FloatArray:
        """What each column adds to the rows, (columns, rows)."""
        return np.array(self._columns)

    def reset_costs(self, rows: StepProgram) -> None:
        """Reset the bound and the prices for a program with the same rows and another cost."""
        self.rows, self.bound, self.value, self._best_prices = rows, 0.0, math.inf, None

    @property
    def has_prices(self) -> bool:
        """Whether some prices have proven a bound."""
        return self._best_prices is not None

    @property
    def pays_for_memory(self) -> bool:
        """Whether the best prices include memory; otherwise no flavour is cheaper than the first."""
        return self._best_prices is not None and bool(self._best_prices[self._memory].any())

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Distinct choices of all columns, the latest first."""
        return tuple(dict.fromkeys(choice for choice, _ in reversed(self._columns_of)))

    def add(self, choice: Choice, flavour: int | None = None) -> bool:
        """Add a choice as a column, under one flavour or under all; return whether any column is new."""
        totals = self._tables.kind_totals(choice)
        if not np.isfinite(totals).all():
            return False
        amounts = self._tables.flat.held(choice)
        edges = [(self._tables.edges[buffer.edge], buffer) for buffer in self.rows.buffers]
        pair_bytes = np.array([buffer.amounts[choice[edge.first], choice[edge.second]] for edge, buffer in edges])
        is_new = False
        for index in range(len(self.rows.flavours)) if flavour is None else (flavour,):
            if (choice, index) in self._columns_of:
                continue
            self._columns_of[choice, index] = None
            seconds = np.tensordot(self.rows.seconds[:, index], totals, axes=2) + self.rows.host[:, index]
            self._columns.append(seconds + self.rows.memory_use(index, amounts, pair_bytes))
            self._unit = self._unit or max(float(seconds[~self._memory].max()), 1e-12)
            is_new = True
        return is_new

    def bound_of_choice(self, choice: Choice) -> float:
        """Lower bound on the step of plans with this choice: the master problem of its columns alone."""
        only = ColumnGeneration(self._tables, self.rows)
        if not only.add(choice):
            return math.inf
        only._solve_master(memory=True)
        return only.value

    def step(self, solve: Solve, cutoff: float, on_choice: Callable[[Choice], None], *, memory: bool) -> bool:
        """Do one iteration: solve the master and the pricing problem; return whether another may raise the bound.

        Args:
            solve: Solves placement problems.
            cutoff: A bound that is enough.
            on_choice: Called with each choice that has weight in the master's optimum.
            memory: Whether memory is limited.
        """
        self.steps += 1
        prices, support = self._master_prices(memory=memory)
        for choice in support:
            on_choice(choice)
        if self.bound >= self.value * (1 - CLOSE):
            return False
        smoothing = self._smoothing if self._best_prices is not None else 0.0
        smoothed = prices if self._best_prices is None else smoothing * self._best_prices + (1 - smoothing) * prices
        is_new = self._solve_pricing(solve, smoothed, cutoff)
        self._smoothing = SMOOTHING if is_new else 0.0
        return is_new or smoothing > 0.0

    def _master_prices(self, *, memory: bool) -> tuple[FloatArray, list[Choice]]:
        """Solve the master problem; return the prices of its rows, and the choices with weight."""
        rows = self.rows
        duals, values = self._solve_master(memory=memory)
        keys, weights = list(self._columns_of), values[rows.lhs.shape[1] :]
        return duals, [keys[index][0] for index in np.flatnonzero(weights >= WEIGHT).tolist()]

    def _solve_master(self, *, memory: bool) -> tuple[FloatArray, FloatArray]:
        """Solve the master problem, set `value`, and return its row prices and variables."""
        rows = self.rows
        scale = np.where(self._memory, 1.0, 1.0 / self._unit)
        num_variables, num_columns = rows.lhs.shape[1], len(self._columns)
        columns = np.array(self._columns).T * scale[:, None]
        # Rows and variables of seconds are scaled by the unit, shares of memory are not.
        variable_scale = np.where(rows.are_shares & ~self._memory[:, None], 1.0 / self._unit, 1.0)
        convex = np.concatenate([np.zeros(num_variables), np.ones(num_columns)])
        matrix = np.vstack([np.hstack([rows.lhs * variable_scale, -columns]), convex])
        least = np.concatenate([rows.least * scale, [1.0]])
        if not memory:
            least[: len(rows.least)][rows.memory_rows] = -np.inf
        cost = np.concatenate([rows.cost, np.zeros(num_columns)])
        value, duals, values = _solve_lp(cost, matrix, least)
        self.value = value * self._unit + rows.fixed
        return np.maximum(0.0, duals[: len(rows.least)]), values

    def _solve_pricing(self, solve: Solve, prices: FloatArray, cutoff: float) -> bool:
        """Solve the pricing problem of each flavour, raise the bound, and return whether a column is new."""
        rows, is_new = self.rows, False
        row_prices = np.where(self._memory, self._unit, 1.0) * prices
        constant = float(row_prices @ rows.least) + rows.fixed
        bound = math.inf
        for index, flavour in enumerate(rows.flavours):
            factors = np.tensordot(row_prices, rows.seconds[:, index], axes=1)
            items = rows.item_prices(index, row_prices)
            flavour_constant = constant + float(row_prices @ rows.host[:, index])
            if flavour is not rows.flavours[0] and not items.any():
                continue  # without a price of memory no flavour is cheaper than the first
            instance = self._pricing_problem(factors, items, rows.pair_prices(row_prices))
            solution = solve(instance, min(bound, max(cutoff, self.value)) - flavour_constant)
            bound = min(bound, solution.bound + flavour_constant)
            if solution.choice is not None:
                is_new |= self.add(solution.choice, index)
        if bound > self.bound:
            self.bound, self._best_prices = bound, prices
        return is_new

    def _pricing_problem(self, factors: FloatArray, items: FloatArray, pairs: FloatArray) -> Problem:
        """Placement problem at prices of slots, of item bytes and of pair bytes."""
        edges = [(self._tables.edges[buffer.edge], buffer) for buffer in self.rows.buffers]
        with_price = zip(edges, pairs.tolist(), strict=True) if pairs.any() else ()
        edge_bytes = [(edge.first, edge.second, buffer.amounts, price) for (edge, buffer), price in with_price if price]
        return problem(self._tables, Weights(factors, True), prices=items, pairs=edge_bytes)


def _solve_lp(cost: FloatArray, matrix: FloatArray, least: FloatArray) -> tuple[float, FloatArray, FloatArray]:
    """Minimise `cost x` over x >= 0 with `matrix x >= least`, the last row being an equation.

    Returns:
        Optimal value, row duals, x.
    """
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
    nonzero = matrix != 0
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(nonzero.sum(axis=1))]).astype(np.int32)
    model.a_matrix_.index_ = np.nonzero(nonzero)[1].astype(np.int32)
    model.a_matrix_.value_ = matrix[nonzero]
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:  # presolve may lead to an inexact factorisation
        highs.setOptionValue("presolve", "off")
        highs.clearSolver()
        highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal, "the master problem is always feasible"
    solution = highs.getSolution()
    return float(highs.getInfo().objective_function_value), np.array(solution.row_dual), np.array(solution.col_value)

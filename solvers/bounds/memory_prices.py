"""The Lagrangian dual of the memory limits, maximised by cutting planes (Kelley 1960).

    L(p) = min over choices x of  cost(x) + sum_t p[t] * (use_t(x) - limit[t]) / scale[t],   p >= 0

Every L(p) is a lower bound on the optimum; every minimiser x gives a cut
L(p') <= cost(x) + sum_t p'[t] * excess_t(x)  for all p'. The next query is a convex combination of the best prices so
far and the master problem's maximiser, which damps oscillation. A segment gets a price once a minimiser breaks it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.solvers.base import EXACT, Budget
from autopar.solvers.model.graphical_model import Floats
from autopar.solvers.model.memory_rows import Memory

Oracle = Callable[[Floats], tuple[list[int], float, float] | None]
"""Prices per segment -> a minimiser of cost plus priced use, its cost without prices, a lower bound on the minimum."""


@dataclass(frozen=True, slots=True, eq=False)
class DualSolution:
    """The best dual solution found.

    Attributes:
        prices: Multiplier per segment: cost per unit of use, shape (num_rows,).
        bound: L(prices); infinity if the limits are proven infeasible.
    """

    prices: Floats
    bound: float


def maximise_lagrangian_dual(
    oracle: Oracle,
    memory: Memory,
    budget: Budget,
    highest_cost: float,
    visit: Callable[[list[int]], None],
    *,
    max_rounds: int = 60,
    tolerance: float = 0.02,
) -> DualSolution:
    """Maximise L(p), and record its values as lower bounds in the budget.

    Relaxes: the limits, which are priced. Valid when: the oracle's bound is. Costs: one minimisation without limits
    per round, plus a master LP with a column per priced segment. Source: Held and Karp 1971 (Lagrangian bound),
    Kelley 1960 (cutting planes).

    Args:
        oracle: Minimises at given prices.
        memory: The limits.
        budget: Time, work and targets.
        highest_cost: Upper bound on the cost of permitted choices; a larger L proves infeasibility.
        visit: Called with every minimiser.
        max_rounds: Most calls of the oracle.
        tolerance: Stop when the master problem shows that L cannot rise by more than this share of the gap between L
            and the incumbent.
    """
    scales = memory.scales
    cuts: list[tuple[float, Floats]] = []
    active: list[int] = []
    best = DualSolution(np.zeros(memory.num_rows), -np.inf)
    best_prices = np.zeros(memory.num_rows)  # in the scale of the formula above
    query = best_prices
    highest_price = 0.0
    at_ceiling = False
    for _ in range(max_rounds):
        answer = oracle(query / scales)
        if answer is None or budget.spent():
            break
        labels, cost, total = answer
        profile = memory.profile(labels)
        excess = (profile - memory.limits) / scales
        bound = total - float(query @ (memory.limits / scales))
        if bound > best.bound:
            best, best_prices = DualSolution(query / scales, bound), query
            budget.raise_bound(bound, EXACT)
        visit(labels)
        cuts.append((cost, excess))
        active += [t for t in memory.peaks(profile, 4) if t not in active]
        if bound > highest_cost:
            budget.raise_bound(np.inf)
            return DualSolution(query / scales, np.inf)
        if not active or budget.targets_met() or bound >= budget.upper:
            break
        if highest_price == 0.0:
            highest_price = max(1e-9, abs(cost)) / max(1e-3, float(excess.max()))
        target, top = _solve_master(cuts, active, highest_price)
        if at_ceiling and (target >= 0.999 * highest_price).any():
            highest_price *= 10  # the limits are still broken at the highest price
            target, top = _solve_master(cuts, active, highest_price)
        at_ceiling = bool((target >= 0.999 * highest_price).any())
        room = min(budget.upper - best.bound, abs(top))
        if top - best.bound <= tolerance * room:
            break
        query = target if at_ceiling or len(active) == 1 else 0.6 * target + 0.4 * best_prices
    return best


def _solve_master(cuts: list[tuple[float, Floats]], active: list[int], highest_price: float) -> tuple[Floats, float]:
    """Solve the master problem: return the prices that maximise the minimum of all cuts, and that value."""
    num_rows = len(cuts[0][1])
    scale = max(1e-30, max(abs(cost) for cost, _ in cuts))
    count = len(active)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count + 1, len(cuts)
    model.col_cost_ = np.concatenate([np.zeros(count), [-1.0]])
    model.col_lower_ = np.concatenate([np.zeros(count), [-np.inf]])
    model.col_upper_ = np.concatenate([np.full(count, highest_price / scale), [np.inf]])
    model.row_lower_ = np.full(len(cuts), -np.inf)
    model.row_upper_ = np.array([cost / scale for cost, _ in cuts])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.arange(len(cuts) + 1, dtype=np.int32) * (count + 1)
    model.a_matrix_.index_ = np.tile(np.arange(count + 1, dtype=np.int32), len(cuts))
    model.a_matrix_.value_ = np.concatenate([np.append(-excess[active], 1.0) for _, excess in cuts])
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    highs.run()
    values = np.array(highs.getSolution().col_value)
    prices = np.zeros(num_rows)
    prices[active] = np.maximum(values[:count], 0.0) * scale
    return prices, float(values[count]) * scale

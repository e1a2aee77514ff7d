"""The Lagrangian dual at scale: messages relax the edges, prices the limits; both are improved step by step.

    bound(messages, prices)  <=  min over choices of  cost + sum_t prices[t] * (use_t - limit_t)  <=  optimum

One round is one sweep of the messages (`autopar.solvers.bounds.messages`) and one subgradient step of the prices along
the excess of the decoded labels, averaged over past rounds (deflected subgradient, Camerini, Fratta, Maffioli 1975).
Only peaks of the excess and segments with a price move; else a long usage would be priced in thousands of segments and
a short one in few. The step length grows while the bound rises and shrinks otherwise.

Once the prices have converged, the limits with a price become knapsacks (`autopar.solvers.bounds.knapsack_dual`).
"""

from dataclasses import dataclass

import numpy as np

from autopar.solvers.bounds.knapsack_dual import KnapsackDual
from autopar.solvers.bounds.messages import Messages
from autopar.solvers.model.csr import FlatField, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Floats, Ints

UNPRICED_ROUNDS = 30
"""Sweeps before the first price step: earlier labels carry little information."""
WINDOW = 10
"""Rounds after which bound and step length are updated."""
FIRST_STEP = 0.02
"""First step length of the price vector, each price in the scale of its limit, relative to the bound, or to the median
cost of a label or pair if the bound is smaller: without prices it may be 0."""
LEAST_STEP = 1e-9
"""Step length at which the dual counts as converged."""
GROWTH, SHRINKAGE = 1.1, 0.7
"""Factor on the step length after a window in which the bound has risen, or has not."""
MEMORY = 0.9
"""Weight of past rounds in the averaged excess."""
PEAKS = 20
"""Most segments that may get a first price in one round."""


@dataclass(frozen=True, slots=True, eq=False)
class DualInformation:
    """Dual information on labels.

    Attributes:
        bound: A lower bound on the optimum.
        reduced_costs: Per label, a lower bound on how far above `bound` a choice with this label costs.
        prices: Price of use per segment that proves `bound`.
    """

    bound: float
    reduced_costs: Floats
    prices: Floats


class LagrangianDual:
    """State of the Lagrangian dual of a field under limits.

    Relaxes: the limits and the agreement of edges on labels. Valid when: the flat field is finite (softened) and has
    the problem's permitted choices. Costs: one pass over the tables per round.

    Attributes:
        flat: The field.
        memory: Its limits.
        prices: Present multiplier of each segment, cost per unit of use.
        bound: Best lower bound, rounded down.
        best_prices: Prices that proved `bound`.
        labels: Labels decoded in the last round, one per node; they may break limits.
        rounds: Rounds done.
        finished: Whether neither messages nor prices nor knapsacks raise the bound any further.
    """

    def __init__(self, flat: FlatField, memory: FlatMemory) -> None:
        self.flat = flat
        self.memory = memory
        self.prices = np.zeros(len(memory.limits))
        self.best_prices = self.prices
        self.bound = -np.inf
        self.finished = False
        self._messages = Messages.zero(flat)
        self._unary = flat.unary
        self._average = np.zeros(len(memory.limits))
        self._step = FIRST_STEP
        self._least_size = _median_cost(flat)
        self.rounds = 0
        self._previous_value = -np.inf
        self._idle_windows = 0
        self._knapsacks: KnapsackDual | None = None

    @property
    def labels(self) -> Ints:
        """Labels decoded in the last round."""
        return self._messages.labels if self._knapsacks is None else self._knapsacks.labels

    def run_round(self) -> Floats:
        """Sweep once and step prices or knapsacks; return the excess of `labels` in each segment, in its scale."""
        if self._knapsacks is not None:
            self._knapsacks.run_round()
            self.rounds += 1
            self.bound = max(self.bound, self._knapsacks.bound)
            self.finished = self._knapsacks.finished
            return self.excess(self.labels)
        value = self._messages.sweep(self.flat, self._unary) - float(self.prices @ self.memory.limits)
        self.rounds += 1
        excess = self.excess(self.labels)
        self._average = MEMORY * self._average + (1 - MEMORY) * excess
        if self.rounds % WINDOW == 0:
            self._update_bound_and_step(value)
        if self.rounds >= UNPRICED_ROUNDS:
            self._step_prices(max(abs(value - self.flat.constant), self._least_size))
        return excess

    def run_window(self) -> None:
        """Do `WINDOW` rounds in one kernel call; only for fields without limits, which have no prices to step."""
        assert not len(self.prices), "prices move after every round"
        value = self._messages.sweep(self.flat, self._unary, WINDOW)
        self.rounds += WINDOW
        self._update_bound_and_step(value)

    def excess(self, labels: Ints) -> Floats:
        """Return use minus limit in each segment, in its scale."""
        return (self.memory.profile(indicator(self.flat.offsets, labels)) - self.memory.limits) / self.memory.scales

    def decode_at(self, prices: Floats, rounds: int, unary: Floats | None = None) -> Ints:
        """Return the labels decoded after `rounds` sweeps at given prices and unary costs; the state stays."""
        messages = self._messages.copy()
        unary = (self.flat.unary if unary is None else unary) + self.memory.priced(prices, len(self.flat.unary))
        for _ in range(rounds):
            messages.sweep(self.flat, unary)
        return messages.labels

    def information(self) -> DualInformation:
        """Return a bound and reduced costs at the best prices; the state stays."""
        if self._knapsacks is not None and self._knapsacks.bound == self.bound:
            bound, reduced_costs = self._knapsacks.information()
            return DualInformation(bound, reduced_costs, self.best_prices)
        messages, prices = self._messages.copy(), self.best_prices
        unary = self._priced_unary(prices)
        messages.sweep(self.flat, unary)
        bound = self._safe_bound(messages, prices, unary)
        messages.sweep(self.flat, unary)
        return DualInformation(bound, messages.reduced_costs, prices)

    def _update_bound_and_step(self, value: float) -> None:
        """Record the bound if it has risen, and set the next step length."""
        if value > self.bound:
            proven = self._safe_bound(self._messages, self.prices, self._unary)
            gain = proven - self.bound
            if gain > 0:
                self.bound, self.best_prices = proven, self.prices
            self._idle_windows = 0 if gain > 1e-7 * abs(proven) else self._idle_windows + 1
        else:
            self._idle_windows += 1
        if self.rounds > UNPRICED_ROUNDS:
            self._step *= GROWTH if value > self._previous_value else SHRINKAGE
        self._previous_value = value
        priced = bool(self.prices.any()) or len(self.prices) == 0 or not bool((self._average > 0).any())
        if self._idle_windows >= 20 or (priced and self._step < LEAST_STEP):
            self.finished = not self.best_prices.any()
            if not self.finished:
                self._knapsacks = KnapsackDual(self.flat, self.memory, self.best_prices, self._messages)
                self.finished = self._knapsacks.finished

    def _safe_bound(self, messages: Messages, prices: Floats, unary: Floats) -> float:
        """Return the lower bound of messages and prices, less its rounding error."""
        due = float(prices @ self.memory.limits)
        size = float(prices @ np.abs(self.memory.limits))
        return messages.bound(self.flat, unary) - due - 1e-13 * size

    def _step_prices(self, size: float) -> None:
        """Take a subgradient step along the averaged excess; prices stay >= 0."""
        active = self.prices > 0
        active[peaks(self._average, PEAKS)] = True
        direction = np.where(active, self._average, 0.0)
        length = float(np.linalg.norm(direction))
        if length > 0:
            step = self._step * size / length * direction
            self._set_prices(np.maximum(0.0, self.prices + step / self.memory.scales))

    def _set_prices(self, prices: Floats) -> None:
        self.prices = prices
        self._unary = self._priced_unary(prices)

    def _priced_unary(self, prices: Floats) -> Floats:
        return self.flat.unary + self.memory.priced(prices, len(self.flat.unary))


def _median_cost(flat: FlatField) -> float:
    """Return the median magnitude of all costs of labels and pairs that are not 0; 0 if there are none."""
    costs = np.abs(np.concatenate([flat.unary, flat.tables]))
    return float(np.median(costs[costs > 0])) if costs.any() else 0.0


def peaks(excess: Floats, count: int) -> Ints:
    """Return up to `count` segments with the largest positive excess, one per run of consecutive such segments."""
    above = np.flatnonzero(excess > 0)
    if len(above) == 0:
        return above
    runs = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
    tops = np.array([run[excess[run].argmax()] for run in runs])
    return tops[np.argsort(-excess[tops], kind="stable")][:count]

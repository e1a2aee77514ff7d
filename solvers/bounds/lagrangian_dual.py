"""The Lagrangian dual at scale: messages for the edges, prices for the limits, both improved a little at a time.

    bound(messages, prices)  <=  min over choices of  cost + sum_t prices[t] * (use_t - limit_t)  <=  optimum

One round is one sweep of the messages and one step of the prices along the excess of the labels that the sweep chose,
averaged over the last rounds. Only the peaks of that excess and segments that have a price already move: were all
broken segments to move, a long use would pay for thousands of them and a short one for few. The step grows while the
bound rises and shrinks where it does not.
"""

import numpy as np

from autopar.solvers.bounds.messages import Messages
from autopar.solvers.model.csr import Flat, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Floats, Ints

UNPRICED_ROUNDS = 30
"""Sweeps before limits get prices: before, labels mean little."""
WINDOW = 10
"""Rounds after which the step is judged."""
FIRST_STEP = 0.02
"""First length of a step of all prices, each in the scale of its limit, relative to the bound."""
LEAST_STEP = 1e-9
"""Where steps are shorter than this, nothing more is to be had."""
GROWTH, SHRINKAGE = 1.1, 0.7
"""Factor on the step after a window in which the bound has risen, or has not."""
MEMORY = 0.9
"""Weight of the past in the average of excesses."""
PEAKS = 20
"""Segments that may get a price in one round."""


class Relaxation:
    """The dual of a field under limits, where it stands.

    Attributes:
        flat: The field.
        memory: Its limits.
        prices: Present cost per unit of use in each segment.
        bound: Best lower bound, safe against rounding.
        best_prices: The prices it was proven at.
        labels: Labels chosen in the last round, one per node; they need not fit.
        rounds: Rounds so far.
        finished: Whether neither messages nor prices bring the bound any further.
    """

    def __init__(self, flat: Flat, memory: FlatMemory) -> None:
        self.flat = flat
        self.memory = memory
        self.prices = np.zeros(len(memory.limits))
        self.best_prices = self.prices
        self.bound = -np.inf
        self.finished = False
        self._messages = Messages.none(flat)
        self._unary = flat.unary
        self._average = np.zeros(len(memory.limits))
        self._step = FIRST_STEP
        self.rounds = 0
        self._before = -np.inf
        self._idle = 0

    @property
    def labels(self) -> Ints:
        """Labels chosen in the last round."""
        return self._messages.labels

    def round(self) -> Floats:
        """Sweep once and move the prices; return the excess of `labels` in each segment, in its scale."""
        value = self._messages.sweep(self.flat, self._unary) - float(self.prices @ self.memory.limits)
        self.rounds += 1
        excess = self.excess(self.labels)
        self._average = MEMORY * self._average + (1 - MEMORY) * excess
        if self.rounds % WINDOW == 0:
            self._judge(value)
        if self.rounds >= UNPRICED_ROUNDS:
            self._move(abs(value - self.flat.constant))
        return excess

    def window(self) -> None:
        """Do as many rounds as `WINDOW` at once; for fields without limits, whose prices are none."""
        assert not len(self.prices), "prices move after every round"
        value = self._messages.sweep(self.flat, self._unary, WINDOW)
        self.rounds += WINDOW
        self._judge(value)

    def excess(self, labels: Ints) -> Floats:
        """Return use less limit in each segment, in its scale."""
        return (self.memory.profile(indicator(self.flat.offsets, labels)) - self.memory.limits) / self.memory.scales

    def settle(self, prices: Floats, rounds: int, unary: Floats | None = None) -> Ints:
        """Sweep at fixed prices, and costs of labels, which are not kept; return the labels chosen last."""
        messages = self._messages.copy()
        unary = (self.flat.unary if unary is None else unary) + self.memory.priced(prices, len(self.flat.unary))
        for _ in range(rounds):
            messages.sweep(self.flat, unary)
        return messages.labels

    def rises(self) -> tuple[float, Floats]:
        """Return a bound, and for each label a lower bound on how far above it a choice with this label costs."""
        self._set(self.best_prices)
        self._messages.sweep(self.flat, self._unary)
        bound = self._proven()
        self._messages.sweep(self.flat, self._unary)
        return bound, self._messages.rises.copy()

    def _judge(self, value: float) -> None:
        """Record the bound if it has risen, and choose the next length of the steps."""
        if value > self.bound:
            proven = self._proven()
            gain = proven - self.bound
            if gain > 0:
                self.bound, self.best_prices = proven, self.prices
            self._idle = 0 if gain > 1e-7 * abs(proven) else self._idle + 1
        else:
            self._idle += 1
        if self.rounds > UNPRICED_ROUNDS:
            self._step *= GROWTH if value > self._before else SHRINKAGE
        self._before = value
        priced = bool(self.prices.any()) or len(self.prices) == 0 or not bool((self._average > 0).any())
        self.finished = self._idle >= 20 or (priced and self._step < LEAST_STEP)

    def _proven(self) -> float:
        """Return the bound of messages and prices as they are, safe against rounding."""
        due = float(self.prices @ self.memory.limits)
        size = float(self.prices @ np.abs(self.memory.limits))
        return self._messages.bound(self.flat, self._unary) - due - 1e-13 * size

    def _move(self, size: float) -> None:
        """Step the prices along the average excess."""
        active = self.prices > 0
        active[peaks(self._average, PEAKS)] = True
        direction = np.where(active, self._average, 0.0)
        length = float(np.linalg.norm(direction))
        if length > 0:
            step = self._step * size / length * direction
            self._set(np.maximum(0.0, self.prices + step / self.memory.scales))

    def _set(self, prices: Floats) -> None:
        self.prices = prices
        self._unary = self.flat.unary + self.memory.priced(prices, len(self.flat.unary))


def peaks(excess: Floats, count: int) -> Ints:
    """Return up to `count` segments where the excess is above 0 and largest, no two in the same run of such."""
    above = np.flatnonzero(excess > 0)
    if len(above) == 0:
        return above
    runs = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
    tops = np.array([run[excess[run].argmax()] for run in runs])
    return tops[np.argsort(-excess[tops], kind="stable")][:count]

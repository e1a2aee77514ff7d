"""Binding limits as knapsacks in the dual: a bound that does not take fractions of large nodes.

At a segment t of price p_t, let B be the nodes with large use above their least (u), S the most that all other nodes
can use above theirs, and R = limit - sum of all least uses. The prices bound this limit by a term linear in the use,

    - p_t R  =  min over u >= 0 of  - p_t u  - p_t (R - u),

which fills the limit with fractions. A knapsack over labels x of B replaces it, at costs w that start at -p_t u:

    F_t(w)  =  min over x with sum u(x) <= R of  sum over n in B of w_n(x_n)  -  p_t min(S, R - sum u(x))

    bound   =  bound of the edges at unary costs + p u - sum over t of (w - w at the start)  +  sum over t of F_t(w)

Any w gives a lower bound. Rounds alternate a sweep of the messages, which leaves a share of each node's cost with its
knapsacks, and a pass over each knapsack that returns the min-marginals to the nodes one by one (block-coordinate
ascent; higher-order factors: Werner 2010, Tarlow, Givoni, Zemel 2010; dual decomposition: Guignard and Kim 1987). No
step lowers the bound. Use is rounded down to a grid, which relaxes the knapsack.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.compiled import compiled
from autopar.problem import LIMIT_TOLERANCE
from autopar.solvers.bounds.messages import Messages
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import Floats, Ints

GRID = 512
"""Units of use in the room of a knapsack; its dynamic program has as many states."""
LEAST_UNITS = 2.0
"""Units by which the use of a node must vary for it to be in a knapsack."""
MOST_NODES = 300
"""Most nodes of a knapsack: those whose use varies most."""
MOST_LABELS = 20_000
"""Most labels in all knapsacks together: a pass takes about a microsecond per label on an AMD EPYC core."""
CHECK_ROUNDS = 10
"""Rounds between two evaluations of the bound."""
LEAST_GAIN, IDLE_CHECKS = 1e-6, 10
"""Relative rise of the bound within this many evaluations below which the ascent has converged."""


@dataclass(slots=True, eq=False)
class _Knapsack:
    """One limit as a knapsack.

    Attributes:
        at: Where the labels of each node begin, shape (num_nodes + 1,).
        columns: Each label, numbered over all nodes of the field.
        use: Use of each label above the least of its node, in units, rounded down.
        relief: Cost of the remaining room for each used number of units: other nodes' use at the price, shape
            (GRID + 1,).
        first_costs: Cost of each label at the start.
        costs: Cost of each label now; the node has lost the difference.
        due: What the prices subtract from the bound for this limit.
        value: Minimum of the knapsack.
    """

    at: Ints
    columns: Ints
    use: Ints
    relief: Floats
    first_costs: Floats
    costs: Floats
    due: float
    value: float

    def rounding_error(self) -> float:
        """Return an upper bound on the rounding error of `value` and of the costs moved."""
        largest = np.maximum.reduceat(np.abs(self.costs) + np.abs(self.first_costs), self.at[:-1])
        return 2.0**-50 * len(self.at) * (float(largest.sum()) + abs(self.due))


class KnapsackDual:
    """Dual ascent on messages and knapsacks, from the messages and prices of a converged Lagrangian dual.

    Relaxes: the agreement of edges and knapsacks on labels, small nodes' labels under the limits to fractions. Valid
    when: the flat field is finite. Costs: a sweep and a dynamic program per knapsack and round.

    Attributes:
        bound: Best lower bound, rounded down.
        finished: Whether the bound has stopped rising, or no limit makes a knapsack.
        labels: Labels decoded in the last round, one per node; they may break limits.
    """

    def __init__(self, flat: FlatField, memory: FlatMemory, prices: Floats, messages: Messages) -> None:
        self.bound = -math.inf
        self._flat = flat
        self._messages = messages.copy()
        self._priced = flat.unary + memory.priced(prices, len(flat.unary))
        self._due = float(prices @ memory.limits) + 1e-13 * float(prices @ np.abs(memory.limits))
        self._knapsacks = tuple(_knapsacks(flat, memory, prices))
        self._unary = self._priced.copy()
        self._reserved = np.zeros(flat.num_nodes, np.int64)
        owners = np.repeat(np.arange(flat.num_nodes), np.diff(flat.offsets))
        for knapsack in self._knapsacks:
            self._reserved[owners[knapsack.columns[knapsack.at[:-1]]]] += 1
        ahead, behind = np.diff(flat.earlier_at), np.diff(flat.later_at)  # of the backward pass, the last one
        chains = np.maximum(1, np.maximum(ahead, behind)) + self._reserved
        shares = (1.0 - ahead / chains) / np.maximum(1, self._reserved)
        self._share = shares[owners]
        self._random = np.random.default_rng(0)
        self._rounds = 0
        self._history: list[float] = []
        self.finished = not self._knapsacks

    @property
    def labels(self) -> Ints:
        """Labels decoded in the last round."""
        return self._messages.labels

    def run_round(self) -> None:
        """Sweep once and pass over each knapsack."""
        self._messages.sweep(self._flat, self._unary, reserved=self._reserved)
        most = abs(self.bound) if math.isfinite(self.bound) else math.inf  # larger costs only add rounding errors
        moved = np.minimum(self._messages.reduced_costs * self._share, most)
        for knapsack in self._knapsacks:
            order = self._random.permutation(len(knapsack.at) - 1)
            gathered = knapsack.costs + moved[knapsack.columns]
            costs = gathered.copy()
            knapsack.value = _return_min_marginals(order, knapsack.at, knapsack.use, knapsack.relief, costs)
            self._unary[knapsack.columns] += knapsack.costs - costs
            knapsack.costs = costs
        self._rounds += 1
        if self._rounds % CHECK_ROUNDS == 0:
            self._evaluate()

    def information(self) -> tuple[float, Floats]:
        """Return a bound and, per label, a lower bound on how far above it a choice with this label costs."""
        messages = self._messages.copy()
        unary = self._exact_unary()
        messages.sweep(self._flat, unary, reserved=self._reserved)
        bound = self._bound(messages, unary)
        messages.sweep(self._flat, unary, reserved=self._reserved)
        return bound, messages.reduced_costs

    def _evaluate(self) -> None:
        """Record the bound, and whether it has stopped rising."""
        self._unary = self._exact_unary()
        self.bound = max(self.bound, self._bound(self._messages, self._unary))
        self._history.append(self.bound)
        if len(self._history) > IDLE_CHECKS:
            gain = self.bound - self._history[-1 - IDLE_CHECKS]
            self.finished = gain <= LEAST_GAIN * abs(self.bound)

    def _exact_unary(self) -> Floats:
        """Return the costs of labels outside the knapsacks, without the rounding errors of many small changes."""
        unary = self._priced.copy()
        for knapsack in self._knapsacks:
            unary[knapsack.columns] -= knapsack.costs - knapsack.first_costs
        return unary

    def _bound(self, messages: Messages, unary: Floats) -> float:
        total = messages.bound(self._flat, unary) - self._due
        for knapsack in self._knapsacks:
            total += knapsack.value + knapsack.due - knapsack.rounding_error()
        return total


def _knapsacks(flat: FlatField, memory: FlatMemory, prices: Floats) -> Iterator[_Knapsack]:
    """Yield the knapsacks of the limits with a price, those that are worth most first."""
    worth = prices * memory.scales
    users = np.repeat(np.arange(flat.num_nodes), np.diff(memory.node_at))
    left = MOST_LABELS
    for t in np.argsort(-worth, kind="stable")[: np.count_nonzero(worth > 0)].tolist():
        uses: dict[int, Floats] = {}
        for u in np.flatnonzero((memory.first <= t) & (t < memory.last)).tolist():
            node, use = int(users[u]), memory.amounts[memory.amount_at[u] : memory.amount_at[u + 1]]
            uses[node] = uses[node] + use if node in uses else use
        exact_room = float(memory.limits[t]) - math.fsum(use.min() for use in uses.values())
        room = exact_room + LIMIT_TOLERANCE * float(memory.scales[t])  # the tolerance of a feasible choice
        if room <= 0:
            continue
        unit = room / GRID
        above = {node: use - use.min() for node, use in uses.items()}
        ranked = sorted(above, key=lambda node: -above[node].max())
        nodes = [node for node in ranked[:MOST_NODES] if above[node].max() >= LEAST_UNITS * unit]
        sizes = [len(above[node]) for node in nodes]
        left -= sum(sizes)
        if left < 0:
            return
        if not nodes:
            continue
        price = float(prices[t])
        others = math.fsum(use.max() for use in above.values()) - math.fsum(above[node].max() for node in nodes)
        exact = np.concatenate([above[node] for node in nodes])
        costs = -price * exact
        yield _Knapsack(
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.concatenate([np.arange(flat.offsets[node], flat.offsets[node + 1]) for node in nodes]),
            np.floor(exact / unit * (1 - 1e-12)).astype(np.int64),
            -price * np.minimum(others * (1 + 1e-12), room - unit * np.arange(GRID + 1)).clip(min=0.0),
            costs,
            costs,
            price * exact_room,
            -price * room,
        )


@compiled
def _return_min_marginals(order: Ints, at: Ints, use: Ints, relief: Floats, costs: Floats) -> float:
    """Subtract each node's min-marginals above their least from its `costs`, in turn; return the minimum.

    No min-marginal that is subtracted lowers the minimum. Labels that do not fit keep their costs.
    """
    states, count = len(relief), len(order)
    before = np.full((count + 1, states), np.inf)  # least cost of the first nodes in `order` at each use
    before[0, 0] = 0.0
    for k in range(count):
        for x in range(at[order[k]], at[order[k] + 1]):
            for used in range(use[x], states):
                before[k + 1, used] = min(before[k + 1, used], before[k, used - use[x]] + costs[x])
    after = relief.copy()  # least cost of the other nodes and the rest of the room, given the use so far
    for k in range(count - 1, -1, -1):
        first, last = at[order[k]], at[order[k] + 1]
        marginals = np.full(last - first, np.inf)
        for x in range(first, last):
            for used in range(states - use[x]):
                marginals[x - first] = min(marginals[x - first], before[k, used] + after[used + use[x]])
            marginals[x - first] += costs[x]
        least = marginals.min()
        following = np.full(states, np.inf)
        for x in range(first, last):
            if marginals[x - first] < np.inf:
                costs[x] -= marginals[x - first] - least
            for used in range(states - use[x]):
                following[used] = min(following[used], after[used + use[x]] + costs[x])
        after = following
    return float(after[0])

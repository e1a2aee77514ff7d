"""Local search on a field under limits: repair of a choice that does not fit, and descent by single nodes."""

from collections.abc import Sequence

import numpy as np

from autopar.solvers.base import Budget
from autopar.solvers.model.graphical_model import Field, Floats
from autopar.solvers.model.memory_rows import Memory

LOOK = 50_000
"""Units of work of looking at all labels of a node."""


class State:
    """A choice with what a change of one node would cost and use.

    Attributes:
        labels: The choice.
        profile: Use per segment, shape (memory.num_rows,).
    """

    def __init__(self, field: Field, memory: Memory, labels: Sequence[int]) -> None:
        self._field = field
        self._limits, self._scales = memory.limits, memory.scales
        self._uses: list[list[tuple[int, int, Floats]]] = [[] for _ in field.unary]
        for n, first, last, amounts in zip(
            memory.nodes.tolist(), memory.first.tolist(), memory.last.tolist(), memory.amounts, strict=True
        ):
            if len(amounts) > 1:
                self._uses[n].append((first, last, amounts))
        self.labels = list(labels)
        self.profile = memory.profile(labels)

    def excess(self) -> float:
        """Return the use above the limits, each segment's relative to its limit, summed."""
        return float(self._over(self.profile, 0).sum())

    def costs(self, node: int) -> Floats:
        """Return the cost of each label of `node`, its neighbours being as they are."""
        total = self._field.unary[node]
        for other in self._field.adjacent[node]:
            total = total + self._field.table(node, other)[:, self.labels[other]]
        return total

    def saved(self, node: int) -> Floats:
        """Return by how much the excess is less with each label of `node`, the others being as they are."""
        begin, end = self.span(node)
        window = self.profile[begin:end]
        profiles = np.repeat(window[None, :], len(self._field.unary[node]), axis=0)
        for first, last, amounts in self._uses[node]:
            profiles[:, first - begin : last - begin] += (amounts - amounts[self.labels[node]])[:, None]
        return np.asarray(self._over(window, begin).sum() - self._over(profiles, begin).sum(axis=1))

    def span(self, node: int) -> tuple[int, int]:
        """Return the first segment a label of `node` matters to, and the one after the last."""
        uses = self._uses[node]
        return min((first for first, _, _ in uses), default=0), max((last for _, last, _ in uses), default=0)

    def move(self, node: int, label: int) -> None:
        """Change one node."""
        for first, last, amounts in self._uses[node]:
            self.profile[first:last] += amounts[label] - amounts[self.labels[node]]
        self.labels[node] = label

    def users(self) -> list[int]:
        """Return the nodes whose label changes the use of some segment."""
        return [n for n, uses in enumerate(self._uses) if uses]

    def neighbours(self, node: int) -> set[int]:
        """Return the nodes whose costs depend on the label of `node`."""
        return self._field.adjacent[node]

    def _over(self, profile: Floats, begin: int) -> Floats:
        """Return the use above the limits of the segments from `begin` on, relative to them."""
        part = slice(begin, begin + profile.shape[-1])
        over = (profile - self._limits[part]) / self._scales[part]
        return np.where(over > 1e-12, over, 0.0)


def repair(state: State, budget: Budget) -> bool:
    """Change single nodes, cheapest per unit of excess removed, until the choice fits; return whether it does.

    After a change only the nodes are looked at again that share a segment or a table with the one that changed.
    """
    users = state.users()
    place = {node: k for k, node in enumerate(users)}
    spans = np.array([state.span(node) for node in users]).reshape(-1, 2)
    ratios = np.full(len(users), np.inf)
    labels = np.zeros(len(users), np.int64)
    again = set(range(len(users)))
    while state.excess() > 0 and not budget.spent():
        budget.work.spend(LOOK * len(again))
        for k in again:
            ratios[k], labels[k] = _cheapest(state, users[k])
        k = int(ratios.argmin()) if len(users) else 0
        if not len(users) or ratios[k] == np.inf:
            return False
        state.move(users[k], int(labels[k]))
        shared = (spans[:, 0] < spans[k, 1]) & (spans[:, 1] > spans[k, 0])
        again = {*np.flatnonzero(shared).tolist(), *(place[n] for n in state.neighbours(users[k]) if n in place)}
    return state.excess() == 0


def _cheapest(state: State, node: int) -> tuple[float, int]:
    """Return the least rise of cost per unit of excess removed, and the label that has it; infinity if none removes."""
    saved = state.saved(node)
    useful = saved > 1e-12
    if not useful.any():
        return np.inf, 0
    costs = state.costs(node)
    with np.errstate(invalid="ignore", divide="ignore"):
        rise = costs - costs[state.labels[node]]
        ratio = np.where(useful & np.isfinite(costs), np.where(rise > 0, rise / saved, rise * saved), np.inf)
    label = int(ratio.argmin())
    return float(ratio[label]), label


def descend(state: State, budget: Budget) -> None:
    """Give one node after another its cheapest label that keeps the excess from growing, until nothing gets cheaper."""
    nodes = [n for n, u in enumerate(state._field.unary) if len(u) > 1]
    pending = set(nodes)
    while pending and not budget.spent():
        for node in nodes:
            if node not in pending:
                continue
            pending.discard(node)
            budget.work.spend(LOOK)
            costs = state.costs(node)
            here = costs[state.labels[node]]
            better = costs < here - 1e-12 * abs(here) if np.isfinite(here) else np.isfinite(costs)
            if not better.any():
                continue
            allowed = better & (state.saved(node) >= 0)
            if allowed.any():
                state.move(node, int(np.where(allowed, costs, np.inf).argmin()))
                pending |= {n for n in state._field.adjacent[node] if len(state._field.unary[n]) > 1}

"""Local search on a field under limits: repair of a choice that does not fit, and descent by single nodes."""

from collections.abc import Sequence

import numpy as np

from autopar.solvers.base import Budget
from autopar.solvers.field import Field, Floats
from autopar.solvers.memory import Memory


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
        return float(np.maximum(self._relative(self.profile), 0.0).sum())

    def costs(self, node: int) -> Floats:
        """Return the cost of each label of `node`, its neighbours being as they are."""
        total = self._field.unary[node]
        for other in self._field.adjacent[node]:
            total = total + self._field.table(node, other)[:, self.labels[other]]
        return total

    def excesses(self, node: int) -> Floats:
        """Return the excess with each label of `node`, the others being as they are."""
        uses = self._uses[node]
        if not uses:
            return np.full(len(self._field.unary[node]), self.excess())
        profiles = np.repeat(self.profile[None, :], len(self._field.unary[node]), axis=0)
        for first, last, amounts in uses:
            profiles[:, first:last] += (amounts - amounts[self.labels[node]])[:, None]
        return np.asarray(np.maximum(self._relative(profiles), 0.0).sum(axis=1))

    def move(self, node: int, label: int) -> None:
        """Change one node."""
        for first, last, amounts in self._uses[node]:
            self.profile[first:last] += amounts[label] - amounts[self.labels[node]]
        self.labels[node] = label

    def users(self) -> list[int]:
        """Return the nodes whose label changes the use of some segment."""
        return [n for n, uses in enumerate(self._uses) if uses]

    def _relative(self, profile: Floats) -> Floats:
        over = (profile - self._limits) / self._scales
        return np.where(over > 1e-12, over, 0.0)


def repair(state: State, budget: Budget) -> bool:
    """Change single nodes, cheapest per unit of excess removed, until the choice fits; return whether it does."""
    users = state.users()
    while (excess := state.excess()) > 0 and not budget.spent():
        best: tuple[float, int, int] | None = None
        for node in users:
            saved = excess - state.excesses(node)
            useful = saved > 1e-12
            if not useful.any():
                continue
            costs = state.costs(node)
            with np.errstate(invalid="ignore", divide="ignore"):
                rise = costs - costs[state.labels[node]]
                ratio = np.where(useful & np.isfinite(costs), np.where(rise > 0, rise / saved, rise * saved), np.inf)
            label = int(ratio.argmin())
            if ratio[label] < np.inf and (best is None or ratio[label] < best[0]):
                best = (float(ratio[label]), node, label)
        if best is None:
            return False
        state.move(best[1], best[2])
    return state.excess() == 0


def descend(state: State, budget: Budget) -> None:
    """Give one node after another its cheapest label that keeps the excess from growing, until nothing gets cheaper."""
    nodes = [n for n, u in enumerate(state._field.unary) if len(u) > 1]
    pending = set(nodes)
    while pending and not budget.spent():
        for node in nodes:
            if node not in pending:
                continue
            pending.discard(node)
            costs = state.costs(node)
            here = costs[state.labels[node]]
            better = costs < here - 1e-12 * abs(here) if np.isfinite(here) else np.isfinite(costs)
            if not better.any():
                continue
            allowed = better & (state.excesses(node) <= state.excess())
            if allowed.any():
                state.move(node, int(np.where(allowed, costs, np.inf).argmin()))
                pending |= {n for n in state._field.adjacent[node] if len(state._field.unary[n]) > 1}

"""Single-node local search on a field under limits: repair of an infeasible choice, and descent."""

from collections.abc import Sequence

import numpy as np

from autopar.solvers.base import Budget
from autopar.solvers.model.graphical_model import Field, Floats
from autopar.solvers.model.memory_rows import Memory

NODE_WORK = 50_000
"""Units of work of evaluating all labels of a node."""


class State:
    """A choice with incremental evaluation of single-node moves.

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
        """Return the sum over segments of the use above the limit, relative to the segment's scale."""
        return float(self._over(self.profile, 0).sum())

    def costs(self, node: int) -> Floats:
        """Return the cost of each label of `node`, its neighbours fixed."""
        total = self._field.unary[node]
        for other in self._field.adjacent[node]:
            total = total + self._field.table(node, other)[:, self.labels[other]]
        return total

    def excess_removed(self, node: int) -> Floats:
        """Return the decrease of the excess for each label of `node`, all other nodes fixed."""
        begin, end = self.span(node)
        window = self.profile[begin:end]
        profiles = np.repeat(window[None, :], len(self._field.unary[node]), axis=0)
        for first, last, amounts in self._uses[node]:
            profiles[:, first - begin : last - begin] += (amounts - amounts[self.labels[node]])[:, None]
        return np.asarray(self._over(window, begin).sum() - self._over(profiles, begin).sum(axis=1))

    def span(self, node: int) -> tuple[int, int]:
        """Return the first segment a label of `node` changes, and the segment after the last."""
        uses = self._uses[node]
        return min((first for first, _, _ in uses), default=0), max((last for _, last, _ in uses), default=0)

    def move(self, node: int, label: int) -> None:
        """Change the label of one node."""
        for first, last, amounts in self._uses[node]:
            self.profile[first:last] += amounts[label] - amounts[self.labels[node]]
        self.labels[node] = label

    def resource_users(self) -> list[int]:
        """Return the nodes with labels of different use in some segment."""
        return [n for n, uses in enumerate(self._uses) if uses]

    def neighbours(self, node: int) -> set[int]:
        """Return the nodes whose costs depend on the label of `node`."""
        return self._field.adjacent[node]

    def _over(self, profile: Floats, begin: int) -> Floats:
        """Return the relative use above the limits of the segments from `begin` on."""
        part = slice(begin, begin + profile.shape[-1])
        over = (profile - self._limits[part]) / self._scales[part]
        return np.where(over > 1e-12, over, 0.0)


def repair(state: State, budget: Budget) -> bool:
    """Repair greedily: move the node with the least cost per unit of excess removed; return whether no excess is left.

    After a move only nodes that share a segment or a table with the moved node are evaluated again.
    """
    resource_users = state.resource_users()
    place = {node: k for k, node in enumerate(resource_users)}
    spans = np.array([state.span(node) for node in resource_users]).reshape(-1, 2)
    ratios = np.full(len(resource_users), np.inf)
    labels = np.zeros(len(resource_users), np.int64)
    stale = set(range(len(resource_users)))
    while state.excess() > 0 and not budget.spent():
        budget.work.spend(NODE_WORK * len(stale))
        for k in stale:
            ratios[k], labels[k] = _cheapest(state, resource_users[k])
        k = int(ratios.argmin()) if len(resource_users) else 0
        if not len(resource_users) or ratios[k] == np.inf:
            return False
        state.move(resource_users[k], int(labels[k]))
        shared = (spans[:, 0] < spans[k, 1]) & (spans[:, 1] > spans[k, 0])
        stale = {
            *np.flatnonzero(shared).tolist(),
            *(place[n] for n in state.neighbours(resource_users[k]) if n in place),
        }
    return state.excess() == 0


def _cheapest(state: State, node: int) -> tuple[float, int]:
    """Return the least cost per unit of excess removed, and its label; infinity if no label removes excess."""
    excess_removed = state.excess_removed(node)
    useful = excess_removed > 1e-12
    if not useful.any():
        return np.inf, 0
    costs = state.costs(node)
    with np.errstate(invalid="ignore", divide="ignore"):
        rise = costs - costs[state.labels[node]]
        ratio = np.where(
            useful & np.isfinite(costs), np.where(rise > 0, rise / excess_removed, rise * excess_removed), np.inf
        )
    label = int(ratio.argmin())
    return float(ratio[label]), label


def descend(state: State, budget: Budget) -> None:
    """Give each node in turn its cheapest label that does not raise the excess, until no move lowers the cost."""
    nodes = [n for n, u in enumerate(state._field.unary) if len(u) > 1]
    pending = set(nodes)
    while pending and not budget.spent():
        for node in nodes:
            if node not in pending:
                continue
            pending.discard(node)
            budget.work.spend(NODE_WORK)
            costs = state.costs(node)
            here = costs[state.labels[node]]
            better = costs < here - 1e-12 * abs(here) if np.isfinite(here) else np.isfinite(costs)
            if not better.any():
                continue
            allowed = better & (state.excess_removed(node) >= 0)
            if allowed.any():
                state.move(node, int(np.where(allowed, costs, np.inf).argmin()))
                pending |= {n for n in state._field.adjacent[node] if len(state._field.unary[n]) > 1}

"""The memory limits of a problem as rows over time: the segments in which a limit can bind, and the use in each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Problem
from autopar.solvers.model.graphical_model import Floats, Ints

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Use of the limited resource in the segments of time where some choice breaks a limit.

    Segment t is one of `num_rows`; usage u covers the segments `first[u] <= t < last[u]`.

    Attributes:
        times: Start of each segment, shape (num_rows,).
        limits: Limit of each segment less its constant use, shape (num_rows,); negative if the constant use alone
            breaks the limit.
        scales: Unit in which the excess of each segment is measured, shape (num_rows,), above 0.
        nodes: Node of each usage, shape (num_usages,).
        first: First segment of each usage.
        last: Segment after the last one of each usage.
        amounts: Use of each label, per usage.
    """

    times: Ints
    limits: Floats
    scales: Floats
    nodes: Ints
    first: Ints
    last: Ints
    amounts: tuple[Floats, ...]

    @property
    def num_rows(self) -> int:
        """Number of segments."""
        return len(self.limits)

    @classmethod
    def unlimited(cls) -> "Memory":
        """Return a `Memory` without rows."""
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(0), np.zeros(0), none, none, none, ())

    @classmethod
    def of(cls, problem: Problem, labels: Sequence[Ints]) -> "Memory":
        """Return the rows of `problem` if each node takes one of the strategies `labels`."""
        usages = [u for u in problem.usages if u.start < u.end and u.amounts[labels[u.node]].any()]
        limits = [limit for limit in problem.limits if limit.start < limit.end]
        if not limits:
            return cls.unlimited()
        starts = np.array([u.start for u in usages], np.int64)
        ends = np.array([u.end for u in usages], np.int64)
        times = np.unique(np.concatenate([starts, ends, *([x.start, x.end] for x in limits)]))
        bound = np.full(len(times), np.inf)  # segment k is [times[k], times[k + 1]); the last one is empty
        for limit in limits:
            inside = (times >= limit.start) & (times < limit.end)
            bound[inside] = np.minimum(bound[inside], limit.amount)
        # A segment where no use starts, or at whose end none ends, is implied by its neighbour with an equal limit.
        begins = np.isin(times, starts) | (np.concatenate([[np.nan], bound[:-1]]) != bound)
        finishes = np.concatenate([np.isin(times[1:], ends) | (bound[1:] != bound[:-1]), [True]])
        opened, keep = False, np.zeros(len(times), bool)
        for k in range(len(times)):
            opened = opened or bool(begins[k])
            if finishes[k]:
                keep[k], opened = opened, False
        first = np.searchsorted(times, starts)
        last = np.searchsorted(times, ends)
        highest = np.array([float(u.amounts[labels[u.node]].max()) for u in usages], np.float64)
        change = np.zeros(len(times) + 1)
        np.add.at(change, first, highest)
        np.add.at(change, last, -highest)
        rounding = 1e-12 * float(highest.sum())
        keep &= np.isfinite(bound) & (np.cumsum(change)[:-1] + rounding > bound)
        number = np.concatenate([[0], np.cumsum(keep)])
        first, last = number[first], number[last]
        active = np.flatnonzero(first < last)
        return cls(
            times[keep],
            bound[keep],
            np.where(bound[keep] > 0, bound[keep], 1.0),
            np.array([usages[u].node for u in active], np.int64),
            first[active],
            last[active],
            tuple(usages[u].amounts[labels[usages[u].node]].astype(np.float64) for u in active),
        )

    def is_infeasible(self) -> bool:
        """Return whether some limit is broken by every choice.

        Relaxes: all costs, and the agreement of nodes between segments. Valid when: always.
        """
        lowest, _ = self.extremes()
        return bool((lowest > self.limits + 1e-9 * self.scales).any())

    def extremes(self) -> tuple[Floats, Floats]:
        """Return the least and the most use in each segment, every node chosen for that segment alone."""
        order = np.argsort(self.nodes, kind="stable")
        starts = np.flatnonzero(np.diff(self.nodes[order], prepend=-1))
        changes = np.zeros((2, self.num_rows + 1))  # differences of least and most use between adjacent segments
        for group in np.split(order, starts[1:]):
            if len(group) == 0:
                continue
            first, last = self.first[group], self.last[group]
            if len(group) == 1:
                amounts = self.amounts[group[0]]
                ends = (amounts.min(), amounts.max())
                changes[:, first[0]] += ends
                changes[:, last[0]] -= ends
                continue
            times = np.unique(np.concatenate([first, last]))
            used = np.zeros((len(times), len(self.amounts[group[0]])))
            amounts = np.array([self.amounts[u] for u in group.tolist()])
            np.add.at(used, np.searchsorted(times, first), amounts)
            np.add.at(used, np.searchsorted(times, last), -amounts)
            np.cumsum(used, axis=0, out=used)
            changes[0, times] += np.diff(used.min(axis=1), prepend=0.0)
            changes[1, times] += np.diff(used.max(axis=1), prepend=0.0)
        lowest, highest = np.cumsum(changes, axis=1)[:, :-1]
        return lowest, highest

    def profile(self, choice: Sequence[int]) -> Floats:
        """Return the use in each segment of one label per node, shape (num_rows,)."""
        used = np.array([a[choice[n]] for n, a in zip(self.nodes.tolist(), self.amounts, strict=True)], np.float64)
        change = np.zeros(self.num_rows + 1)
        np.add.at(change, self.first, used)
        np.add.at(change, self.last, -used)
        return np.cumsum(change)[:-1]

    def resource_users(self) -> set[int]:
        """Return the nodes whose labels differ in use in some segment."""
        return {n for n, a in zip(self.nodes.tolist(), self.amounts, strict=True) if a.min() < a.max()}

    def prices(self, price: Floats, sizes: Sequence[int]) -> list[Floats]:
        """Return, per node, the cost of each label's use at `price` per unit and segment; arrays of `sizes`."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        result = [np.zeros(size) for size in sizes]
        for n, first, last, amounts in zip(
            self.nodes.tolist(), self.first.tolist(), self.last.tolist(), self.amounts, strict=True
        ):
            if total[last] > total[first]:
                result[n] += (total[last] - total[first]) * amounts
        return result

    def restrict(self, kept: Sequence[Ints]) -> "Memory":
        """Return the rows restricted to the labels `kept`; constant usages are subtracted, slack rows dropped."""
        limits = self.limits.copy()
        varying = []
        for u, (n, first, last) in enumerate(
            zip(self.nodes.tolist(), self.first.tolist(), self.last.tolist(), strict=True)
        ):
            amounts = self.amounts[u][kept[n]]
            if amounts.min() == amounts.max():
                limits[first:last] -= amounts[0]
            else:
                varying.append((u, amounts))
        index = np.array([u for u, _ in varying], np.int64)
        rest = Memory(
            self.times,
            limits,
            self.scales,
            self.nodes[index],
            self.first[index],
            self.last[index],
            tuple(amounts for _, amounts in varying),
        )
        return rest._without_slack_rows()

    def _without_slack_rows(self) -> "Memory":
        """Return the rows that some choice breaks."""
        _, highest = self.extremes()
        keep = highest + 1e-12 * sum(float(amounts.max()) for amounts in self.amounts) > self.limits
        return self._rows(keep)

    def _rows(self, keep: Flags) -> "Memory":
        """Return the rows flagged by `keep`, with the usages that cover them."""
        number = np.concatenate([[0], np.cumsum(keep)])
        first, last = number[self.first], number[self.last]
        index = np.flatnonzero(first < last)
        return Memory(
            self.times[keep],
            self.limits[keep],
            self.scales[keep],
            self.nodes[index],
            first[index],
            last[index],
            tuple(self.amounts[u] for u in index.tolist()),
        )

    def contracted(self, roots: Ints, labels: Sequence[Ints]) -> "Memory":
        """Return the rows after contraction: each node is replaced by its root; implied rows are dropped.

        Args:
            roots: Root of each node, numbered from 0.
            labels: Per node its label for each label of its root.
        """
        merged: dict[tuple[int, int, int], Floats] = {}
        for node, first, last, amounts in zip(
            self.nodes.tolist(), self.first.tolist(), self.last.tolist(), self.amounts, strict=True
        ):
            key = (int(roots[node]), first, last)
            own = amounts[labels[node]]
            merged[key] = merged[key] + own if key in merged else own
        keys = np.array(list(merged), np.int64).reshape(-1, 3)
        moved = Memory(self.times, self.limits, self.scales, keys[:, 0], keys[:, 1], keys[:, 2], tuple(merged.values()))
        return moved.without_implied_rows()

    def without_implied_rows(self) -> "Memory":
        """Drop rows implied by a neighbouring row, whose limit is no higher and whose use is never less."""
        changes: list[dict[int, Floats]] = [{} for _ in range(self.num_rows + 1)]
        for node, first, last, amounts in zip(
            self.nodes.tolist(), self.first.tolist(), self.last.tolist(), self.amounts, strict=True
        ):
            changes[first][node] = changes[first].get(node, 0.0) + amounts
            changes[last][node] = changes[last].get(node, 0.0) - amounts
        limits = self.limits.tolist()
        kept: list[int] = []
        rises: list[dict[int, Floats]] = []  # per kept row, the change of use since the previous kept row
        rise: dict[int, Floats] = {}
        for t in range(self.num_rows):
            rise = _add_changes(rise, changes[t])
            while kept and limits[t] <= limits[kept[-1]] and all((use >= 0).all() for use in rise.values()):
                kept.pop()
                rise = _add_changes(rises.pop(), rise)
            if kept and limits[t] >= limits[kept[-1]] and all((use <= 0).all() for use in rise.values()):
                continue
            kept.append(t)
            rises.append(rise)
            rise = {}
        mask = np.zeros(self.num_rows, bool)
        mask[kept] = True
        return self._rows(mask)

    def peaks(self, profile: Floats, count: int) -> list[int]:
        """Return up to `count` segments with the largest excess, one per run of consecutive broken segments."""
        excess = np.maximum((profile - self.limits) / self.scales, 0.0)
        result = []
        position = 0
        while position < len(excess):
            if excess[position] > 0:
                end = position
                while end < len(excess) and excess[end] > 0:
                    end += 1
                result.append(position + int(excess[position:end].argmax()))
                position = end
            position += 1
        return sorted(result, key=lambda t: -excess[t])[:count]


def _add_changes(first: dict[int, Floats], second: dict[int, Floats]) -> dict[int, Floats]:
    """Return the sum of two changes of use per node."""
    result = dict(first)
    for node, use in second.items():
        result[node] = result[node] + use if node in result else use
    return result

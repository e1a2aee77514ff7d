"""Labels that no limit permits: their use does not fit even if all other nodes take the least they can.

    use[t, n, s] - min over s' of use[t, n, s']  >  limit[t] - sum over nodes m of min over s' of use[t, m, s']

Where limits are tight, most labels of large nodes go. The relaxations gain more than the search does: a fraction of
such a label costs little in them and saves as much as the label.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.problem import LIMIT_TOLERANCE
from autopar.solvers.model.graphical_model import Floats, Ints
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import Contraction

Flags = NDArray[np.bool_]


class _RangeMinimum:
    """Minimum of an array over ranges (sparse table, Bender and Farach-Colton 2000)."""

    def __init__(self, values: Floats) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= len(values):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[: len(last) - width], last[width:]))
            width *= 2

    def over(self, first: int, last: int) -> float:
        """Return the minimum over first <= t < last, a range that is not empty."""
        level = (last - first).bit_length() - 1
        values = self._levels[level]
        return float(min(values[first], values[last - (1 << level)]))


def fitting_labels(memory: Memory, sizes: list[int]) -> list[Ints]:
    """Return the labels of each node that fit beside the least use of all other nodes.

    Relaxes: all costs, and the agreement of nodes between segments. Valid when: always.

    Args:
        memory: The limits.
        sizes: Number of labels of each node.
    """
    kept: list[Ints] = [np.arange(size) for size in sizes]
    if not memory.num_rows:
        return kept
    lowest, _ = memory.extremes()
    slack = _RangeMinimum(memory.limits - lowest + LIMIT_TOLERANCE * memory.scales)
    order = np.argsort(memory.nodes, kind="stable")
    starts = np.flatnonzero(np.diff(memory.nodes[order], prepend=-1))
    for group in np.split(order, starts[1:]):
        if len(group) == 0:
            continue
        node = int(memory.nodes[group[0]])
        fits = np.ones(sizes[node], bool)
        for first, last, used in _pieces(memory, group):
            fits &= used - used.min() <= slack.over(first, last)
        kept[node] = np.flatnonzero(fits)
    return kept


def _pieces(memory: Memory, group: Ints) -> list[tuple[int, int, Floats]]:
    """Return the runs of segments in which a node's use is constant, with the use of each label."""
    if len(group) == 1:
        u = int(group[0])
        return [(int(memory.first[u]), int(memory.last[u]), memory.amounts[u])]
    cuts = np.unique(np.concatenate([memory.first[group], memory.last[group]]))
    used = np.zeros((len(cuts), len(memory.amounts[int(group[0])])))
    amounts = np.array([memory.amounts[u] for u in group.tolist()])
    np.add.at(used, np.searchsorted(cuts, memory.first[group]), amounts)
    np.add.at(used, np.searchsorted(cuts, memory.last[group]), -amounts)
    np.cumsum(used, axis=0, out=used)
    return [(first, last, own) for first, last, own in zip(cuts[:-1].tolist(), cuts[1:].tolist(), used, strict=False)]


def drop_oversized(contraction: Contraction) -> Contraction | None:
    """Return the contraction without labels that no limit permits, or None if no choice is left."""
    while True:
        sizes = [len(unary) for unary in contraction.field.unary]
        kept = fitting_labels(contraction.memory, sizes)
        if all(len(own) == size for own, size in zip(kept, sizes, strict=True)):
            return contraction
        if any(len(own) == 0 for own in kept):
            return None
        contraction = contraction.restrict(kept)
        if not contraction.field.propagate():
            return None
        alive = [np.flatnonzero(np.isfinite(unary)) for unary in contraction.field.unary]
        contraction = contraction.restrict(alive)

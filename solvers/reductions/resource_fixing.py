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

    def over(self, first: Ints, last: Ints) -> Floats:
        """Return the minimum over first <= t < last for ranges that are not empty."""
        result = np.empty(len(first))
        levels = np.frexp((last - first).astype(np.float64))[1] - 1  # of the largest power of two in each range
        for level in np.unique(levels).tolist():
            at = levels == level
            values = self._levels[level]
            result[at] = np.minimum(values[first[at]], values[last[at] - (1 << level)])
        return result


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
    usages = np.bincount(memory.nodes, minlength=len(sizes))
    room = slack.over(memory.first, memory.last)
    spread = np.array([float(own.max() - own.min()) for own in memory.amounts])
    several: dict[int, list[int]] = {}
    for u in np.flatnonzero((usages[memory.nodes] > 1) | (spread > room)).tolist():
        several.setdefault(int(memory.nodes[u]), []).append(u)
    for node, group in several.items():
        cuts, used = _pieces(memory, group)
        rooms = slack.over(cuts[:-1], cuts[1:])
        kept[node] = np.flatnonzero((used - used.min(axis=1, keepdims=True) <= rooms[:, None]).all(axis=0))
    return kept


def _pieces(memory: Memory, group: list[int]) -> tuple[Ints, Floats]:
    """Return where the runs of segments with constant use of a node begin and end, and the use of each label in each.

    The shapes are (runs + 1,) and (runs, labels).
    """
    first, last = memory.first[group], memory.last[group]
    cuts = np.unique(np.concatenate([first, last]))
    used = np.zeros((len(cuts), len(memory.amounts[group[0]])))
    amounts = np.array([memory.amounts[u] for u in group])
    np.add.at(used, np.searchsorted(cuts, first), amounts)
    np.add.at(used, np.searchsorted(cuts, last), -amounts)
    return cuts, np.cumsum(used, axis=0)[:-1]


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

"""Repair at scale: single nodes change, cheapest per unit of use saved, until a choice fits."""

import numpy as np

from autopar.solvers.compiled import compiled
from autopar.solvers.field import Floats, Ints
from autopar.solvers.flat import Flat, FlatMemory, indicator


def mend(flat: Flat, memory: FlatMemory, labels: Ints, most_moves: int) -> Ints | None:
    """Return a choice that fits, reached from `labels` by at most `most_moves` changes; None if none was reached."""
    changed = labels.copy()
    profile = memory.profile(indicator(flat.offsets, labels))
    # fmt: off
    done = _mend(flat.offsets, flat.unary, flat.edges, flat.tables, flat.at,
                 flat.later, flat.later_at, flat.earlier, flat.earlier_at,
                 memory.limits, memory.scales, memory.node_at, memory.first, memory.last,
                 memory.amount_at, memory.amounts, changed, profile, most_moves)
    # fmt: on
    fits = done and bool((memory.profile(indicator(flat.offsets, changed)) <= memory.limits).all())
    return changed if fits else None


@compiled
def _mend(
    offsets: Ints,
    unary: Floats,
    edges: Ints,
    tables: Floats,
    at: Ints,
    later: Ints,
    later_at: Ints,
    earlier: Ints,
    earlier_at: Ints,
    limits: Floats,
    scales: Floats,
    node_at: Ints,
    first: Ints,
    last: Ints,
    amount_at: Ints,
    amounts: Floats,
    labels: Ints,
    profile: Floats,
    most_moves: int,
) -> bool:
    """Change `labels` and `profile` in place; return whether no segment is broken.

    A change must save use in the segment that is broken most and break no other one as much. No node takes a label
    for the second time, so it ends.
    """
    count = len(offsets) - 1
    taken = np.zeros(offsets[count], np.bool_)
    for i in range(count):
        taken[offsets[i] + labels[i]] = True
    for move in range(most_moves + 1):
        worst = 0.0
        t = -1
        for k in range(len(limits)):
            if (profile[k] - limits[k]) / scales[k] > worst:
                worst = (profile[k] - limits[k]) / scales[k]
                t = k
        if t < 0:
            return True
        if move == most_moves:
            return False
        best = np.inf
        node, label = -1, -1
        for i in range(count):
            own = labels[i]
            covers = False
            for u in range(node_at[i], node_at[i + 1]):
                covers = covers or (first[u] <= t and t < last[u])
            if not covers:
                continue
            for x in range(offsets[i + 1] - offsets[i]):
                if taken[offsets[i] + x]:
                    continue
                saved = 0.0
                for u in range(node_at[i], node_at[i + 1]):
                    if first[u] <= t and t < last[u]:
                        saved += amounts[amount_at[u] + own] - amounts[amount_at[u] + x]
                if saved <= 0.0:
                    continue
                rise = unary[offsets[i] + x] - unary[offsets[i] + own]
                for k in range(later_at[i], later_at[i + 1]):
                    j = edges[later[k], 1]
                    width = offsets[j + 1] - offsets[j]
                    base = at[later[k]] + labels[j]
                    rise += tables[base + x * width] - tables[base + own * width]
                for k in range(earlier_at[i], earlier_at[i + 1]):
                    j = edges[earlier[k], 0]
                    base = at[earlier[k]] + labels[j] * (offsets[i + 1] - offsets[i])
                    rise += tables[base + x] - tables[base + own]
                useful = min(saved, profile[t] - limits[t])
                score = rise / useful if rise > 0 else rise * useful
                if score >= best:
                    continue
                harmless = True
                for u in range(node_at[i], node_at[i + 1]):
                    more = amounts[amount_at[u] + x] - amounts[amount_at[u] + own]
                    if more > 0.0:
                        for k in range(first[u], last[u]):
                            if (profile[k] + more - limits[k]) / scales[k] >= worst:
                                harmless = False
                                break
                if harmless:
                    best, node, label = score, i, x
        if node < 0:
            return False
        for u in range(node_at[node], node_at[node + 1]):
            more = amounts[amount_at[u] + label] - amounts[amount_at[u] + labels[node]]
            for k in range(first[u], last[u]):
                profile[k] += more
        labels[node] = label
        taken[offsets[node] + label] = True
    return False

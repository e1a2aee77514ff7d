"""Dominance: a label goes if another of its node is never dearer, whatever the neighbours take, and never uses more.

Label s can stand in for label t if it uses no more and

    c[s] - c[t] + sum over neighbours n of max over labels u of n (d_n[s, u] - d_n[t, u])  <=  0

A maximum is at least the mean, so only pairs whose means satisfy this have to be looked at, which are few.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.field import Field, Floats, Ints
from autopar.solvers.memory import Memory

Flags = NDArray[np.bool_]

_SLACK = 1e-9
"""Relative rounding of means: what is that close is looked at."""

_ENTRIES = 1_000_000
"""Differences of costs looked at together (8 MB): nodes with a thousand labels would else need gigabytes."""


def undominated(field: Field, memory: Memory) -> list[Ints]:
    """Return per node the labels to keep; at least one optimal choice under the limits consists of kept labels.

    A node's labels are judged against all labels of its neighbours that are still kept, so one pass in order of nodes
    is sound.
    """
    kept = [np.arange(len(u)) for u in field.unary]
    uses: list[list[Floats]] = [[] for _ in field.unary]
    for n, amounts in zip(memory.nodes.tolist(), memory.amounts, strict=True):
        uses[n].append(amounts)
    for node, unary in enumerate(field.unary):
        if len(unary) < 2:
            continue
        beats = np.ones((len(unary), len(unary)), bool)  # [s, t]: s can stand in for t
        np.fill_diagonal(beats, False)
        for amounts in uses[node]:
            beats &= amounts[:, None] <= amounts[None, :]
        tables = [field.table(node, other)[:, kept[other]] for other in field.adjacent[node]]
        beats = _never_dearer(unary, tables, beats)
        alive = np.ones(len(unary), bool)
        for label in np.flatnonzero(beats.any(axis=0)).tolist():
            if (beats[:, label] & alive).any():
                alive[label] = False
        kept[node] = np.flatnonzero(alive)
    return kept


def _never_dearer(unary: Floats, tables: list[Floats], asked: Flags) -> Flags:
    """Return, for the pairs of labels asked for, whether the first is never dearer than the second."""
    first, second = np.nonzero(asked)
    dearer = unary[first] - unary[second]
    finite = []
    for table in tables:
        if np.isinf(table).any():
            dearer = dearer + _most_dearer(table, first, second)
        else:
            finite.append(table)
    ahead = np.array([table.mean(axis=1) for table in finite]).reshape(len(finite), len(unary))
    slack = _SLACK * (np.abs(unary).max() + np.abs(ahead).sum(axis=0).max())
    rest = ahead.sum(axis=0)
    for table, mean in zip(finite, ahead, strict=True):
        possible = dearer + rest[first] - rest[second] <= slack
        first, second, dearer = first[possible], second[possible], dearer[possible]
        dearer = dearer + _most_dearer(table, first, second)
        rest = rest - mean
    result = np.zeros(asked.shape, bool)
    result[first, second] = dearer <= 0
    return result


def _most_dearer(table: Floats, first: Ints, second: Ints) -> Floats:
    """Return, for pairs of rows of a table, by how much the first is dearer than the second at most, over all columns.

    What is forbidden with the second does not count; what is forbidden with the first alone counts infinitely.
    """
    barred = np.isinf(table)
    limited = bool(barred.any())
    costs = np.where(barred, 0.0, table) if limited else table
    result = np.empty(len(first))
    step = max(1, _ENTRIES // table.shape[1])
    for begin in range(0, len(first), step):
        part = slice(begin, begin + step)
        s, t = first[part], second[part]
        rise = costs[s] - costs[t]
        if limited:
            rise = np.where(barred[t], -np.inf, np.where(barred[s], np.inf, rise))
        result[part] = rise.max(axis=1)
    return result

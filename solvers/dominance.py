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
        barred = np.isinf(table)
        if not barred.any():
            finite.append(table)
            continue
        costs = np.where(barred, 0.0, table)
        rise = np.where(barred[second], -np.inf, np.where(barred[first], np.inf, costs[first] - costs[second]))
        dearer = dearer + rise.max(axis=1)
    ahead = np.array([table.mean(axis=1) for table in finite]).reshape(len(finite), len(unary))
    slack = _SLACK * (np.abs(unary).max() + np.abs(ahead).sum(axis=0).max())
    rest = ahead.sum(axis=0)
    for table, mean in zip(finite, ahead, strict=True):
        possible = dearer + rest[first] - rest[second] <= slack
        first, second, dearer = first[possible], second[possible], dearer[possible]
        dearer = dearer + (table[first] - table[second]).max(axis=1)
        rest = rest - mean
    result = np.zeros(asked.shape, bool)
    result[first, second] = dearer <= 0
    return result

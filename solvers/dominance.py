"""Dominance: a label goes if another of its node is never dearer, whatever the neighbours take, and never uses more."""

import numpy as np

from autopar.solvers.field import Field, Floats
from autopar.solvers.memory import Memory

CUBE = 1_000_000
"""Differences of costs looked at together (8 MB): nodes with a thousand labels would else need gigabytes."""


def undominated(field: Field, memory: Memory) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
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
        dearer = (
            unary[:, None] - unary[None, :]
        )  # [s, t]: the most by which label t can be cheaper than s, at first of the node alone
        worse = np.zeros(dearer.shape, bool)
        for other in field.adjacent[node]:
            table = field.table(node, other)[:, kept[other]]
            finite = np.where(np.isinf(table), 0.0, table)
            blocked = np.isinf(table)
            rows = max(1, CUBE // table.size)
            for first in range(0, len(unary), rows):
                part = slice(first, first + rows)
                rise = finite[part, None, :] - finite[None, :, :]
                if blocked.any():
                    rise = np.where(blocked[None, :, :], -np.inf, np.where(blocked[part, None, :], np.inf, rise))
                dearer[part] += rise.max(axis=2)
        for amounts in uses[node]:
            worse |= amounts[:, None] > amounts[None, :]
        beats = (dearer <= 0) & ~worse  # [s, t]: s can stand in for t
        alive = np.ones(len(unary), bool)
        for label in range(len(unary)):
            beats[label, label] = False
            if (beats[:, label] & alive).any():
                alive[label] = False
        kept[node] = np.flatnonzero(alive)
    return kept

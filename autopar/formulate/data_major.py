"""Meshes of three axes `dp x outer x inner` whose major axis is restricted to data parallelism.

So is the major axis of any mesh whose rows have different shares of the batch, where rows meet once per step only.

The number of strategies of an op grows exponentially with the number of axes. So the major axis splits the batch of
every op and value that can be split so, and does nothing else with them; parameters, gradient sums and updates are free
on it, as ZeRO shards them. The other two axes are free. An op then has about as many strategies as on the mesh of the
two minor axes alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.discover import Strategy
from autopar.folding.fold import Folded
from autopar.formulate.building import Restriction
from autopar.formulate.manual_recipes import DataParallelism, GraphFacts, Placed, matching_strategies
from autopar.formulate.op_strategies import encode
from autopar.formulate.tables import Decision
from autopar.ir.graph import Op, Value
from autopar.sharding import Mesh

Mask = NDArray[np.bool_]

DATA_MAJOR = ("dp", "outer", "inner")
"""Names of the axes of such a mesh."""

_DATA = DataParallelism(zero=None)
_APART = DataParallelism(zero=None, apart=True)


def is_data_major(mesh: Mesh) -> bool:
    """Whether a mesh has three axes with a data-parallel major one, by the names of the two major axes.

    The minor axis may be named after a pinned role.
    """
    return len(mesh.axes) == len(DATA_MAJOR) and tuple(axis.name for axis in mesh.axes[:2]) == DATA_MAJOR[:2]


@dataclass(frozen=True, slots=True, eq=False)
class DataMajor:
    """Restriction of the major axis of a mesh to data parallelism.

    Attributes:
        facts: Facts about the graph that the role of the axis depends on.
        others: Further restriction of all axes; None if there is none.
        num_axes: Axes of the mesh.
        role: What the major axis does.
    """

    facts: GraphFacts
    others: Restriction | None = None
    num_axes: int = len(DATA_MAJOR)
    role: DataParallelism = _DATA

    @classmethod
    def of(cls, folded: Folded, batch: Mapping[str, int], others: Restriction | None) -> "DataMajor":
        """Return the restriction for a graph with the given batch dims."""
        return cls(GraphFacts.of(folded, batch), others)

    @classmethod
    def of_rows(
        cls, folded: Folded, batch: Mapping[str, int], others: Restriction | None, num_axes: int
    ) -> "DataMajor":
        """Return the restriction of a mesh of `num_axes` axes whose rows meet once per step."""
        return cls(GraphFacts.of(folded, batch).with_sums(), others, num_axes, _APART)

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> tuple[Mask, ...]:
        """Return the masks of `Restriction.of_op`."""
        others = None if self.others is None else self.others.of_op(kind, op, strategies)
        return self._with_data(Decision.OP, kind, op, self._placed(op, strategies), len(strategies), others)

    def splitting(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> Mask:
        """Return which one-axis strategies of an op split the batch as data parallelism does; all false if none do."""
        placed = self._placed(op, strategies)
        if not placed:
            return np.zeros(len(strategies), dtype=bool)
        return matching_strategies(self.facts, self.role, Decision.OP, kind, op, placed)

    def _placed(self, op: Op, strategies: Sequence[Strategy]) -> Placed:
        """Return the tensors that an op places, with their codes on one axis."""
        return [
            (name, np.array([encode((s.outputs if is_output else s.inputs)[slot]) for s in strategies]), is_output)
            for names, is_output in ((op.inputs, False), (op.outputs, True))
            for slot, name in enumerate(names)
            if name and name not in self.facts.folded.free
        ]

    def of_value(self, decision: Decision, kind: int, value: Value) -> tuple[Mask, ...]:
        """Return the masks of `Restriction.of_value`."""
        count = len(value.shape) + 2
        placed = [(value.name, np.arange(count, dtype=np.int64), True)]
        others = None if self.others is None else self.others.of_value(decision, kind, value)
        return self._with_data(decision, kind, None, placed, count, others)

    def _with_data(
        self, decision: Decision, kind: int, op: Op | None, placed: Placed, count: int, others: Sequence[Mask] | None
    ) -> tuple[Mask, ...]:
        """Return the masks of `others` with the major axis narrowed to data parallelism.

        If no strategy remains, the major axis is narrowed to replication; if none remains again, it keeps its mask.
        """
        major, *minor = [np.ones(count, dtype=bool)] * self.num_axes if others is None else others
        idle = np.ones(count, dtype=bool)
        for _, codes, _ in placed:
            idle &= codes == 0
        for mask in (matching_strategies(self.facts, self.role, decision, kind, op, placed), idle) if placed else ():
            if (major & mask).any():
                return major & mask, *minor
        return major, *minor

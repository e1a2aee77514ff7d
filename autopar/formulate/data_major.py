"""Meshes of three axes whose major one is data parallel.

With three free axes an op has the cube of what it can do on one. Here the major axis, named `dp`, splits the batch in
every op and value that can be split so and does nothing else with it; parameters, sums of gradients and their updates
are free on it, as ZeRO splits them. The other two axes are free, so that an op has about as much to choose from as on
their mesh alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.discover import Strategy
from autopar.folding.fold import Folded
from autopar.formulate.building import Restriction
from autopar.formulate.manual_recipes import Data, Facts, Placed, wanted
from autopar.formulate.op_strategies import encode
from autopar.formulate.tables import Decision
from autopar.ir.graph import Op, Value
from autopar.sharding import Mesh

Mask = NDArray[np.bool_]

DATA_MAJOR = ("dp", "outer", "inner")
"""Names of the axes of such a mesh."""

_DATA = Data(zero=None)


def is_data_major(mesh: Mesh) -> bool:
    """Whether a mesh is one of three axes whose major one is data parallel, by the names of its axes.

    The minor one may be named for a role that is pinned.
    """
    return len(mesh.axes) == len(DATA_MAJOR) and tuple(axis.name for axis in mesh.axes[:2]) == DATA_MAJOR[:2]


@dataclass(frozen=True, slots=True, eq=False)
class DataMajor:
    """Restricts the major axis of a mesh to data parallelism.

    Attributes:
        facts: What the role needs to know of the graph.
        others: What the axes are restricted to besides; None for nothing.
    """

    facts: Facts
    others: Restriction | None = None

    @classmethod
    def of(cls, folded: Folded, batch: Mapping[str, int], others: Restriction | None) -> "DataMajor":
        """Return the restriction of a graph whose values have these batch dims."""
        return cls(Facts.of(folded, batch), others)

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> tuple[Mask, ...]:
        """See `Restriction.of_op`."""
        others = None if self.others is None else self.others.of_op(kind, op, strategies)
        return self._with_data(Decision.OP, kind, op, self._placed(op, strategies), len(strategies), others)

    def splitting(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> Mask:
        """Return which of an op's strategies on one axis split the batch, as data parallelism does; none may."""
        placed = self._placed(op, strategies)
        if not placed:
            return np.zeros(len(strategies), dtype=bool)
        return wanted(self.facts, _DATA, Decision.OP, kind, op, placed)

    def _placed(self, op: Op, strategies: Sequence[Strategy]) -> Placed:
        """Return what an op places, with codes on one axis."""
        return [
            (name, np.array([encode((s.outputs if is_output else s.inputs)[slot]) for s in strategies]), is_output)
            for names, is_output in ((op.inputs, False), (op.outputs, True))
            for slot, name in enumerate(names)
            if name and name not in self.facts.folded.free
        ]

    def of_value(self, decision: Decision, kind: int, value: Value) -> tuple[Mask, ...]:
        """See `Restriction.of_value`."""
        count = len(value.shape) + 2
        placed = [(value.name, np.arange(count, dtype=np.int64), True)]
        others = None if self.others is None else self.others.of_value(decision, kind, value)
        return self._with_data(decision, kind, None, placed, count, others)

    def _with_data(
        self, decision: Decision, kind: int, op: Op | None, placed: Placed, count: int, others: Sequence[Mask] | None
    ) -> tuple[Mask, ...]:
        """Return the masks of others with that of the major axis narrowed, where that leaves anything."""
        major, *minor = [np.ones(count, dtype=bool)] * 3 if others is None else others
        idle = np.ones(count, dtype=bool)
        for _, codes, _ in placed:
            idle &= codes == 0
        for wish in (wanted(self.facts, _DATA, decision, kind, op, placed), idle) if placed else ():
            if (major & wish).any():
                return major & wish, *minor
        return major, *minor

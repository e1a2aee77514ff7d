"""Measured seconds in place of formulas: what a profile knows, and by how much formulas are off elsewhere.

    seconds(op)       = measured, if an op of its kind and local shapes is known;  else  factor(class) x formula
    seconds(transfer) = interpolated between measured sizes of the same operation and group;  else  factor x formula

Solver, formula and simulator ask `CostModel`, which asks here, so that all of them see the same prices. How prices are
made of a database is in `autopar.cost.pricing`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.arrays import FloatArray, IntArray
from autopar.cost.attention import ATTENTION_KINDS
from autopar.cost.products import PRODUCT_KINDS
from autopar.cost.scans import SCAN_KERNELS
from autopar.events import Profile
from autopar.events.records import Family, family
from autopar.ir.graph import Op, Phase

Sizes = tuple[int, ...]
"""Sizes of all operands of an op, one after the other."""
Group = tuple[str, int, int]
"""Operation, members, and how many consecutive members share a node."""


def op_class(kind: str, *, update: bool) -> str:
    """Return the class of an op, whose formulas are off alike.

    >>> op_class("MatMul", update=False), op_class("Add", update=False), op_class("autopar::Adam", update=True)
    ('product', 'memory', 'update')
    """
    if update:
        return "update"
    if kind in ATTENTION_KINDS:
        return "attention"
    if kind in SCAN_KERNELS:
        return "scan"
    return "product" if kind in PRODUCT_KINDS else "memory"


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds of an operation of a group by bytes: two arrays in ascending order of bytes, seconds never falling."""

    nbytes: FloatArray
    seconds: FloatArray

    def at(self, nbytes: FloatArray) -> FloatArray:
        """Return seconds: between sizes by powers, below the least one its time, above the largest in proportion."""
        if len(self.nbytes) == 1:
            inner = np.full(nbytes.shape, self.seconds[0])
        else:
            inside = np.log(np.clip(nbytes, self.nbytes[0], self.nbytes[-1]))
            inner = np.exp(np.interp(inside, np.log(self.nbytes), np.log(self.seconds)))
        return np.asarray(inner * np.maximum(1.0, nbytes / self.nbytes[-1]))

    def covers(self, nbytes: float) -> bool:
        """Whether so many bytes lie between those that were measured."""
        return bool(self.nbytes[0] * 0.5 <= nbytes <= self.nbytes[-1] * 2.0)


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """What a profile says of the seconds of ops and transfers.

    Attributes:
        profile: Where they are from.
        digest: Hash of the profile and of what it was priced for.
        ops: Seconds of ops by family and sizes.
        factors: Measured over formula by class of op; classes without a measurement are missing.
        least: The least of these ratios of a single op by class, for bounds.
        curves: Seconds of transfers.
        transfer_factors: Measured over formula by operation, within nodes and beyond.
    """

    profile: Profile = field(repr=False)
    digest: str
    ops: Mapping[Family, Mapping[Sizes, float]] = field(repr=False)
    factors: Mapping[str, float]
    least: Mapping[str, float]
    curves: Mapping[Group, Curve] = field(repr=False)
    transfer_factors: Mapping[tuple[str, bool], float]

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prices) and other.digest == self.digest

    @property
    def num_ops(self) -> int:
        """Number of ops that are known."""
        return sum(len(known) for known in self.ops.values())

    def least_ratio(self, op: Op) -> float:
        """Return what the price of an op is at least, as a share of its formula, at most 1."""
        return self.least.get(op_class(op.kind, update=op.phase is Phase.UPDATE), 1.0)

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
        formula: FloatArray,
    ) -> FloatArray:
        """Return the seconds of an op for each of n strategies.

        Args:
            op: The op.
            inputs: As of `CostModel.op_seconds`.
            outputs: Likewise.
            element_bytes: Likewise.
            formula: What the formula says, (n,).
        """
        factor = self.factors.get(op_class(op.kind, update=op.phase is Phase.UPDATE), 1.0)
        seconds = formula * factor
        found = self._known(op, inputs, outputs, element_bytes)
        if found is None:
            return seconds
        return np.asarray(np.where(np.isnan(found), seconds, found))

    def knows_op(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
    ) -> bool:
        """Whether the first strategy of an op was measured; arguments as of `op_seconds`."""
        found = self._known(op, inputs, outputs, element_bytes)
        return found is not None and not bool(np.isnan(found[0]))

    def _known(
        self,
        op: Op,
        inputs: Sequence[IntArray | None],
        outputs: Sequence[IntArray | None],
        element_bytes: Mapping[str, float],
    ) -> FloatArray | None:
        """Return measured seconds by strategy, nan where there are none; None if there are none at all."""
        shapes = (*inputs, *outputs)
        ranks = [-1 if shape is None else shape.shape[1] for shape in shapes]
        names = (*op.inputs, *op.outputs)
        sizes = [element_bytes.get(name, 0.0) for name, rank in zip(names, ranks, strict=True) if rank >= 0]
        known = self.ops.get(family(op.kind, op.attrs, ranks, sizes))
        if known is None:
            return None
        there = [shape for shape in shapes if shape is not None]
        count = max(len(shape) for shape in there)
        rows = np.concatenate([np.broadcast_to(shape, (count, shape.shape[1])) for shape in there], axis=1).tolist()
        return np.array([known.get(tuple(row), np.nan) for row in rows])

    def transfer_seconds(
        self, operation: str, nbytes: FloatArray, members: int, inside: int, formula: FloatArray
    ) -> FloatArray:
        """Return the seconds of a transfer.

        Args:
            operation: A collective or "send".
            nbytes: Bytes of the larger side on one device, any shape.
            members: Size of the group.
            inside: Consecutive members that share a node.
            formula: What the formula says, of the same shape.
        """
        curve = self.curves.get((operation, members, inside))
        if curve is None:
            return formula * self.transfer_factors.get((operation, inside < members), 1.0)
        return np.where(nbytes > 0, curve.at(np.maximum(nbytes, 1.0)), formula)

    def knows_transfer(self, operation: str, nbytes: float, members: int, inside: int) -> bool:
        """Whether transfers of about so many bytes were measured in such a group."""
        curve = self.curves.get((operation, members, inside))
        return curve is not None and curve.covers(nbytes)

"""Rows of the master problem of a step: their records, and how often the costs of blocks count in them.

Look here for the data of the linear program of `master_problem.py`, and for the matrices over flavours, kinds and slots
that its rows are made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.cut_lp import Component
from autopar.bounds.reshard_buffers import Buffer
from autopar.bounds.saved_values import main_kind
from autopar.cost.collectives import leaves_node
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.link_seconds import BACKWARD_LINK_SLOTS, FORWARD_LINK_SLOTS, SELECTIVE_LINK_SLOTS
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import Recompute

Mask = NDArray[np.bool_]
IntArray = NDArray[np.int64]

SHARE_VARIABLES = {
    Component.KEPT: "kept",
    Component.RESIDENT: "resident",
    Component.BUFFERS: "beside",
    Component.RUNNING: "running",
    Component.NEXT_BUFFERS: "next",
    Component.RECEIVED: "received",
}
"""Variables of a single block's memory, which are shares of the limit."""

COPIED, HOSTED_STATE = "copied", "hosted state"
"""Variables of host memory: bytes that a block of the most frequent kind copies out per microbatch, and optimizer
state of a mean stage that lies on the host; shares of the limit."""

PassVariable = tuple[str, int, int | None]
"""Variable of the seconds of a pass: its name, the kind of block, and the number of the flavour for the main kind."""

Variable = str | PassVariable
"""The name of a variable."""


@dataclass(frozen=True, slots=True, eq=False)
class StepProgram:
    """The linear program of a step; `autopar.bounds.master_problem` states it.

    Attributes:
        flavours: Recompute flavours of blocks of the most frequent kind, from fastest to slowest.
        cost: (variables,) objective of the variables y >= 0.
        lhs: (rows, variables) factors of y.
        least: (rows,) constants, in seconds; in rows of memory, in shares of the limit.
        seconds: (rows, flavours, kinds, slots) how often the seconds of a slot count.
        host: (rows, flavours) seconds that every choice adds.
        bytes: (distinct, items of `Tables.bytes`) shares of the limit per byte; the first row is zero.
        bytes_of: (rows, flavours) index into `bytes`.
        buffers: Bytes of pairs of decisions.
        pairs: (distinct, buffers) shares of the limit per byte of a buffer; the first row is zero.
        pairs_of: (rows,) index into `pairs`.
        fixed: Seconds added to every step.
        are_shares: (variables,) which of y are shares of the limit; all others but `short` are seconds.
    """

    flavours: tuple[Recompute, ...]
    cost: FloatArray
    lhs: FloatArray
    least: FloatArray
    seconds: FloatArray
    host: FloatArray
    bytes: FloatArray
    bytes_of: IntArray
    buffers: tuple[Buffer, ...]
    pairs: FloatArray
    pairs_of: IntArray
    fixed: float
    are_shares: Mask

    @property
    def memory_rows(self) -> Mask:
        """Mask of rows with bytes."""
        filled = np.asarray(self.bytes.any(axis=1))
        return np.asarray(filled[self.bytes_of].any(axis=1) | (self.pairs_of > 0))

    def memory_use(self, flavour: int, items: FloatArray, pairs: FloatArray) -> FloatArray:
        """Shares of the limit that bytes of items and of pairs take under a flavour, (rows,)."""
        return np.asarray((self.bytes @ items)[self.bytes_of[:, flavour]] + (self.pairs @ pairs)[self.pairs_of])

    def item_prices(self, flavour: int, paid: FloatArray) -> FloatArray:
        """Price per byte of each item, (items,), at row prices `paid`."""
        return np.asarray(np.bincount(self.bytes_of[:, flavour], paid, len(self.bytes)) @ self.bytes)

    def pair_prices(self, paid: FloatArray) -> FloatArray:
        """Price per byte of each buffer, (buffers,), at row prices `paid`."""
        return np.asarray(np.bincount(self.pairs_of, paid, len(self.pairs)) @ self.pairs)


class DistinctArrays:
    """Arrays of one length, numbered by their contents; number 0 is the zero array."""

    def __init__(self, length: int) -> None:
        zeros = np.zeros(length)
        self._numbers, self._arrays = {zeros.tobytes(): 0}, [zeros]

    def number(self, array: FloatArray | None) -> int:
        """Number of an array; 0 if there is none."""
        if array is None:
            return 0
        number = self._numbers.setdefault(array.tobytes(), len(self._arrays))
        if number == len(self._arrays):
            self._arrays.append(array)
        return number

    @property
    def array(self) -> FloatArray:
        """All arrays, (distinct, length)."""
        return np.array(self._arrays)


class RowWriter:
    """Collects the rows of a `StepProgram`; variables are numbered in the order of their first use."""

    def __init__(self, tables: Tables, flavours: tuple[Recompute, ...]) -> None:
        self.shape = (len(flavours), len(tables.folded.kinds), len(Slot))
        self.flavours, self.items = flavours, len(tables.bytes)
        self.names: dict[Variable, int] = {}
        self.lhs: list[dict[int, float]] = []
        self.least: list[float] = []
        self.seconds: list[FloatArray] = []
        self.host: list[FloatArray] = []
        self.bytes = DistinctArrays(self.items)
        self.bytes_of: list[list[int]] = []
        self.buffers: tuple[Buffer, ...] = ()
        self.pairs: list[FloatArray | None] = []  # as long as `buffers` is once all rows are written

    def variable(self, name: Variable) -> int:
        """Number of a variable."""
        return self.names.setdefault(name, len(self.names))

    def add(
        self,
        variables: Mapping[Variable, float],
        seconds: FloatArray | None = None,
        host: FloatArray | float = 0.0,
        amounts: FloatArray | None = None,
        pairs: FloatArray | None = None,
        least: float = 0.0,
    ) -> None:
        """Add the row `variables >= least + seconds + host + amounts + pairs`.

        Args:
            variables: Factors by variable.
            seconds: (flavours, kinds, slots) how often the seconds of a slot count.
            host: Seconds that every choice adds, by flavour or for all.
            amounts: (flavours, items) shares of the limit per byte.
            pairs: (buffers,) shares of the limit per byte of a buffer.
            least: A constant.
        """
        self.lhs.append({self.variable(name): factor for name, factor in variables.items() if factor})
        self.least.append(least)
        self.seconds.append(np.zeros(self.shape) if seconds is None else seconds)
        self.host.append(np.broadcast_to(np.asarray(host, dtype=np.float64), (len(self.flavours),)))
        weights = [None] * len(self.flavours) if amounts is None else list(amounts)
        self.bytes_of.append([self.bytes.number(flavour_weights) for flavour_weights in weights])
        self.pairs.append(pairs)

    def program(self, cost: Mapping[Variable, float], fixed: float) -> StepProgram:
        """Return the program of all rows, with the objective `cost` by variable and the constant `fixed`."""
        lhs = np.zeros((len(self.lhs), len(self.names)))
        for row, factors in enumerate(self.lhs):
            for column, factor in factors.items():
                lhs[row, column] = factor
        costs = np.zeros(len(self.names))
        for name, factor in cost.items():
            if name in self.names:
                costs[self.names[name]] = factor
        pairs = DistinctArrays(len(self.buffers))
        pairs_of = [pairs.number(weights) for weights in self.pairs]
        return StepProgram(
            self.flavours,
            costs,
            lhs,
            np.array(self.least),
            np.array(self.seconds),
            np.array(self.host),
            self.bytes.array,
            np.array(self.bytes_of),
            self.buffers,
            pairs.array,
            np.array(pairs_of),
            fixed,
            np.array([name in (COPIED, HOSTED_STATE, *SHARE_VARIABLES.values()) for name in self.names]),
        )


class SlotCounts:
    """Matrices over flavours, kinds and slots that say how often the seconds of a slot count.

    Attributes:
        flavours: Recompute flavours of the most frequent kind, repeated once per part.
        counts: (kinds,) instances of each kind.
        main: The most frequent kind.
        shape: Shape of the matrices.
    """

    def __init__(self, tables: Tables, flavours: tuple[Recompute, ...]) -> None:
        self.flavours = flavours
        self.counts = np.array([kind.count for kind in tables.folded.kinds], dtype=np.float64)
        self.main = main_kind(tables.folded).id
        self.shape = (len(flavours), len(tables.folded.kinds), len(Slot))
        self.leaves = [leaves_node(axis, tables.costs.cluster.devices_per_node) for axis in tables.mesh.axes]

    def of_kind(self, kind: int, factors: Mapping[Slot, float], flavour: int | None = None) -> FloatArray:
        """Count given slots of one instance of a kind, under one flavour or under all."""
        seconds = np.zeros(self.shape)
        for slot, factor in factors.items():
            seconds[slice(None) if flavour is None else flavour, kind, slot] += factor
        return seconds

    def of_all_blocks(self, *slots: Slot) -> FloatArray:
        """Count given slots of all blocks."""
        seconds = np.zeros(self.shape)
        for slot in slots:
            seconds[:, :, slot] = self.counts
        return seconds

    def by_link(self, blocks: FloatArray, slots: Sequence[Slot], outside: Slot) -> list[FloatArray]:
        """Count given slots of some blocks, per link: inside a node, and between nodes.

        Args:
            blocks: (kinds,) number of instances.
            slots: Slots that contain all traffic.
            outside: The slot with the part between nodes.

        Returns:
            One matrix per link; a single one if all mesh axes use the same kind of link.
        """
        whole, between = np.zeros(self.shape), np.zeros(self.shape)
        for slot in slots:
            whole[:, :, slot] = blocks
        between[:, :, outside] = blocks
        return [whole - between, between] if any(self.leaves) and not all(self.leaves) else [whole]

    def microbatch_reductions(self, blocks: FloatArray) -> list[FloatArray]:
        """Count, per link, the gradient reductions of some blocks in every microbatch."""
        return self.by_link(blocks, (Slot.GRADIENT,), Slot.GRADIENT_OUTSIDE)

    def step_reductions(self, blocks: FloatArray) -> list[FloatArray]:
        """Count, per link, the gradient reductions of some blocks once a step."""
        return self.by_link(blocks, (Slot.REDUCE,), Slot.REDUCE_OUTSIDE)

    def forward_waits(self, blocks: FloatArray) -> list[FloatArray]:
        """Count, per link, the communication that the forwards of some blocks wait for."""
        return self.by_link(blocks, FORWARD_LINK_SLOTS, Slot.FORWARD_OUTSIDE)

    def backward_waits(self, blocks: FloatArray) -> list[FloatArray]:
        """Count, per link, the communication that the backwards of some blocks wait for.

        Communication of recompute counts as well if `blocks` contains all blocks of the most frequent kind.
        """
        waits = self.by_link(blocks, BACKWARD_LINK_SLOTS, Slot.BACKWARD_OUTSIDE)
        if blocks[self.main] < self.counts[self.main]:
            return waits
        main = blocks * (np.arange(len(blocks)) == self.main)
        for index, flavour in enumerate(self.flavours):
            if flavour is Recompute.FULL:
                recomputed = self.forward_waits(main)
            elif flavour is Recompute.SELECTIVE:
                recomputed = self.by_link(main, SELECTIVE_LINK_SLOTS, Slot.SELECTIVE_OUTSIDE)
            else:
                continue
            for matrix, recompute_matrix in zip(waits, recomputed, strict=True):
                matrix[index] += recompute_matrix[index]
        return waits

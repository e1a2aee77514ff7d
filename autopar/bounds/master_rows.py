"""What a step program is: rows of a linear program, and how often the prices of blocks count in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.cut_lp import Take
from autopar.bounds.reshard_buffers import Buffer
from autopar.bounds.saved_values import main_kind
from autopar.cost.collectives import leaves_node
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import Recompute

Mask = NDArray[np.bool_]
IntArray = NDArray[np.int64]

SHARES = {
    Take.KEPT: "kept",
    Take.RESIDENT: "resident",
    Take.BESIDE: "beside",
    Take.RUNNING: "running",
    Take.NEXT: "next",
    Take.RECEIVED: "received",
}
"""What single blocks hold; shares of the limit, too."""

COPIED, AWAY = "copied", "away"
"""Variables: what a block of the most frequent kind copies to the host per microbatch, where it does, and what of the
optimizer's state of a mean stage lies there; shares of the limit."""

Pass = tuple[str, int, int | None]
"""Of a pass of a block: what it is, the kind and, where flavours differ, their number."""

Name = str | Pass
"""Of a variable."""


@dataclass(frozen=True, slots=True, eq=False)
class StepProgram:
    """The rows of the linear program; see the top of `autopar.bounds.master_problem` for their meaning.

    Attributes:
        flavours: What the blocks of the most frequent kind do; all of them once per part where parts are apart, each
            time from the fastest to the slowest.
        cost: (variables,) weights of y in the step time; y >= 0.
        lhs: (rows, variables).
        least: (rows,) seconds; for rows of memory shares of the limit.
        seconds: (rows, flavours, kinds, slots) how often prices count.
        host: (rows, flavours) seconds that every choice adds.
        bytes: (distinct, items of `Tables.bytes`) shares of the limit per byte; the first are zero.
        bytes_of: (rows, flavours) which of them a row has: the first, if it is about seconds.
        buffers: What pairs of decisions take.
        pairs: (distinct, buffers) the same of those.
        pairs_of: (rows,) which of them.
        fixed: Seconds added to every step.
        shares: (variables,) which of y are shares of the limit; the others are seconds, or `short`.
        with_memory: (rows,) which say nothing but together with limits of memory.
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
    shares: Mask
    with_memory: Mask

    @property
    def memory_rows(self) -> Mask:
        """Which rows are about memory."""
        filled = np.asarray(self.bytes.any(axis=1))
        return np.asarray(filled[self.bytes_of].any(axis=1) | (self.pairs_of > 0))

    def held(self, flavour: int, items: FloatArray, between: FloatArray) -> FloatArray:
        """Return the shares of the limit that bytes of items and of pairs take under a flavour, (rows,)."""
        return np.asarray((self.bytes @ items)[self.bytes_of[:, flavour]] + (self.pairs @ between)[self.pairs_of])

    def item_prices(self, flavour: int, paid: FloatArray) -> FloatArray:
        """Return what a byte of each item costs where a row of so much costs what is paid, (items,)."""
        return np.asarray(np.bincount(self.bytes_of[:, flavour], paid, len(self.bytes)) @ self.bytes)

    def pair_prices(self, paid: FloatArray) -> FloatArray:
        """Return the same of pairs, (buffers,)."""
        return np.asarray(np.bincount(self.pairs_of, paid, len(self.pairs)) @ self.pairs)


class Distinct:
    """Numbers arrays of one length by what they hold; 0 is that of zeros."""

    def __init__(self, length: int) -> None:
        zeros = np.zeros(length)
        self._numbers, self._arrays = {zeros.tobytes(): 0}, [zeros]

    def number(self, array: FloatArray | None) -> int:
        """Return the number of an array, or of none."""
        if array is None:
            return 0
        found = self._numbers.setdefault(array.tobytes(), len(self._arrays))
        if found == len(self._arrays):
            self._arrays.append(array)
        return found

    @property
    def array(self) -> FloatArray:
        """All of them, (distinct, length)."""
        return np.array(self._arrays)


class Rows:
    """Collects rows; variables are numbered in the order in which they are asked for."""

    def __init__(self, tables: Tables, flavours: tuple[Recompute, ...]) -> None:
        self.shape = (len(flavours), len(tables.folded.kinds), len(Slot))
        self.flavours, self.items = flavours, len(tables.bytes)
        self.names: dict[Name, int] = {}
        self.lhs: list[dict[int, float]] = []
        self.least: list[float] = []
        self.seconds: list[FloatArray] = []
        self.host: list[FloatArray] = []
        self.bytes = Distinct(self.items)
        self.bytes_of: list[list[int]] = []
        self.buffers: tuple[Buffer, ...] = ()
        self.pairs: list[FloatArray | None] = []  # of as many as there are once all rows are there
        self.with_memory: list[bool] = []

    def variable(self, name: Name) -> int:
        """Return the number of a variable."""
        return self.names.setdefault(name, len(self.names))

    def add(
        self,
        variables: Mapping[Name, float],
        seconds: FloatArray | None = None,
        host: FloatArray | float = 0.0,
        amounts: FloatArray | None = None,
        pairs: FloatArray | None = None,
        least: float = 0.0,
        *,
        with_memory: bool = False,
    ) -> None:
        """Add a row: the variables weighted by their numbers are at least all the rest."""
        self.lhs.append({self.variable(name): factor for name, factor in variables.items() if factor})
        self.least.append(least)
        self.seconds.append(np.zeros(self.shape) if seconds is None else seconds)
        self.host.append(np.broadcast_to(np.asarray(host, dtype=np.float64), (len(self.flavours),)))
        each = [None] * len(self.flavours) if amounts is None else list(amounts)
        self.bytes_of.append([self.bytes.number(own) for own in each])
        self.pairs.append(pairs)
        self.with_memory.append(with_memory or amounts is not None)

    def program(self, cost: Mapping[Name, float], fixed: float) -> StepProgram:
        """Return the program of these rows; `cost` are weights of variables in the step time, the rest as there."""
        lhs = np.zeros((len(self.lhs), len(self.names)))
        for row, factors in enumerate(self.lhs):
            for column, factor in factors.items():
                lhs[row, column] = factor
        costs = np.zeros(len(self.names))
        for name, factor in cost.items():
            if name in self.names:
                costs[self.names[name]] = factor
        pairs = Distinct(len(self.buffers))
        pairs_of = [pairs.number(own) for own in self.pairs]
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
            np.array([name in (COPIED, AWAY, *SHARES.values()) for name in self.names]),
            np.array(self.with_memory),
        )


class Counting:
    """How often prices count: matrices over flavours, kinds and slots.

    Attributes:
        flavours: Of blocks of the most frequent kind, once per part.
        counts: (kinds,) instances.
        main: The most frequent kind.
        shape: Of the matrices.
    """

    def __init__(self, tables: Tables, flavours: tuple[Recompute, ...]) -> None:
        self.flavours = flavours
        self.counts = np.array([kind.count for kind in tables.folded.kinds], dtype=np.float64)
        self.main = main_kind(tables.folded).id
        self.shape = (len(flavours), len(tables.folded.kinds), len(Slot))
        self.leaves = [leaves_node(axis, tables.costs.cluster.devices_per_node) for axis in tables.mesh.axes]

    def prices(self, kind: int, factors: Mapping[Slot, float], flavour: int | None = None) -> FloatArray:
        """Return how often prices of one instance of a kind count: under one flavour, or under all."""
        seconds = np.zeros(self.shape)
        for slot, factor in factors.items():
            seconds[slice(None) if flavour is None else flavour, kind, slot] += factor
        return seconds

    def sums(self, *slots: Slot) -> FloatArray:
        """Return how often prices of all blocks count."""
        seconds = np.zeros(self.shape)
        for slot in slots:
            seconds[:, :, slot] = self.counts
        return seconds

    def links(self, blocks: FloatArray, slots: Sequence[Slot], outside: Slot) -> list[FloatArray]:
        """Return how often prices of so many instances count that are on the link inside a node, and between nodes.

        On a mesh with one kind of link they are all on that.
        """
        whole, between = np.zeros(self.shape), np.zeros(self.shape)
        for slot in slots:
            whole[:, :, slot] = blocks
        between[:, :, outside] = blocks
        return [whole - between, between] if any(self.leaves) and not all(self.leaves) else [whole]

    def gradients(self, blocks: FloatArray) -> list[FloatArray]:
        """Return by link how often prices count of what so many instances reduce in every microbatch."""
        return self.links(blocks, (Slot.GRADIENT,), Slot.GRADIENT_OUTSIDE)

    def reduced(self, blocks: FloatArray) -> list[FloatArray]:
        """Return the same of what they reduce once."""
        return self.links(blocks, (Slot.REDUCE,), Slot.REDUCE_OUTSIDE)

    def ahead(self, blocks: FloatArray) -> list[FloatArray]:
        """Return the same of what their forwards wait for."""
        return self.links(blocks, (Slot.FORWARD_WAIT, Slot.FORWARD_GATHER), Slot.FORWARD_OUTSIDE)

    def behind(self, blocks: FloatArray) -> list[FloatArray]:
        """Return the same of what a backward waits for, and of what runs again if these are all blocks that may."""
        found = self.links(blocks, (Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER), Slot.BACKWARD_OUTSIDE)
        if blocks[self.main] < self.counts[self.main]:
            return found
        main = blocks * (np.arange(len(blocks)) == self.main)
        for index, flavour in enumerate(self.flavours):
            if flavour is Recompute.FULL:
                again = self.ahead(main)
            elif flavour is Recompute.SELECTIVE:
                again = self.links(main, (Slot.SELECTIVE_WAIT, Slot.SELECTIVE_GATHER), Slot.SELECTIVE_OUTSIDE)
            else:
                continue
            for own, more in zip(found, again, strict=True):
                own[index] += more[index]
        return found

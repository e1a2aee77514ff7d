"""Decisions and costs of one folded graph on one mesh, independent of how a pipeline weighs them.

A *node* is a decision: the strategy of an op, the placement of a parameter between steps, of a value on its way between
blocks (*boundary*), or of the copy of a value that several ops of a block share. An *edge* prices the change of
placement between two nodes. Every price is in seconds for one block instance and belongs to a *slot*: how often it is
paid depends on the schedule, which only `step_time.py` knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel, Overlap, Resharder
from autopar.cost.overlap import launched
from autopar.folding.fold import Folded, Producer
from autopar.folding.graph_facts import host_seconds, recompute_host_seconds
from autopar.formulate.op_strategies import Options
from autopar.formulate.placement_semantics import Meaning
from autopar.formulate.table_arrays import FlatTables
from autopar.ir.graph import Value
from autopar.sharding import Mesh

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Slot(IntEnum):
    """What a price is for, and how often it is paid.

    `FORWARD` and `BACKWARD` are kernels, once per microbatch; `GRADIENT` is once per microbatch beside compute
    (gradients reduced before they are summed over microbatches); `REDUCE` once per step beside the last backward;
    `UPDATE` once per step. In a pass `WAIT` are the collectives that compute waits for, `GATHER` the gathers of
    parameters, which run beside compute, and `BACKWARD_WEIGHT` the kernels that only make gradients of parameters,
    beside which collectives of the backward run. `SELECTIVE` holds what of the forward is paid again where a block
    recomputes selectively. Three are what the host link adds to whole passes: where what a block saves lies in
    host memory, `OFFLOAD` to its forward and `FETCH` to its backward; where the optimizer's state does, `STATE` to its
    update. They are known of lowered blocks only, and 0 in tables (`autopar.formulate.offload_costs` fills them in).
    """

    FORWARD = 0
    BACKWARD = 1
    GRADIENT = 2
    REDUCE = 3
    UPDATE = 4
    FORWARD_WAIT = 5
    FORWARD_GATHER = 6
    BACKWARD_WEIGHT = 7
    BACKWARD_WAIT = 8
    BACKWARD_GATHER = 9
    SELECTIVE = 10
    SELECTIVE_WAIT = 11
    SELECTIVE_GATHER = 12
    OFFLOAD = 13
    FETCH = 14
    STATE = 15
    GRADIENT_OUTSIDE = 16
    REDUCE_OUTSIDE = 17
    FORWARD_OUTSIDE = 18
    BACKWARD_OUTSIDE = 19
    SELECTIVE_OUTSIDE = 20


AGAIN = {
    Slot.FORWARD: Slot.SELECTIVE,
    Slot.FORWARD_WAIT: Slot.SELECTIVE_WAIT,
    Slot.FORWARD_GATHER: Slot.SELECTIVE_GATHER,
}
"""Slots of the forward, and what they are where it runs again in part."""

OUTSIDE = {
    Slot.GRADIENT: Slot.GRADIENT_OUTSIDE,
    Slot.REDUCE: Slot.REDUCE_OUTSIDE,
    Slot.FORWARD_WAIT: Slot.FORWARD_OUTSIDE,
    Slot.FORWARD_GATHER: Slot.FORWARD_OUTSIDE,
    Slot.BACKWARD_WAIT: Slot.BACKWARD_OUTSIDE,
    Slot.BACKWARD_GATHER: Slot.BACKWARD_OUTSIDE,
    Slot.SELECTIVE_WAIT: Slot.SELECTIVE_OUTSIDE,
    Slot.SELECTIVE_GATHER: Slot.SELECTIVE_OUTSIDE,
}
"""Slots of collectives, and where the part of them is told that leaves nodes."""


class Memory(StrEnum):
    """What bytes are for.

    `SAVED`, `DROPPED`, `ARRIVED` and `HANDED` exist once per microbatch in flight: `DROPPED` without recompute only,
    `SAVED` with selective recompute too, `ARRIVED` always, `HANDED` with full recompute only (else the block before has
    it). `TRANSIENT` is there while the neighbours of its op run. `RECEIVED` comes from a neighbouring block, and is
    there besides where that is on another stage.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    SAVED = "saved"
    DROPPED = "dropped"
    ARRIVED = "arrived"
    HANDED = "handed"
    TRANSIENT = "transient"
    RECEIVED = "received"


NODE_BYTES = 2000
"""Of memory that a decision and its edges take besides arrays, about."""


class Decision(IntEnum):
    """What a node decides."""

    OP = 0
    PARAMETER = 1
    BOUNDARY = 2
    COPY = 3


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A decision with S strategies.

    Attributes:
        decision: What it decides.
        kind: Distinct block it belongs to.
        name: Op or value it is about, in the representative instance; copies add their phase.
        slot: When its own seconds are paid.
        seconds: (S,) seconds per instance.
        share: Occurrences per instance of the kind (1, except for parameters shared between blocks).
        position: Position of the op in its block; -1 for other decisions.
        options: Placements of an op; None for other decisions.
        placements: (S,) placement numbers of the value; None for an op.
        value: The value, for other decisions than ops.
    """

    decision: Decision
    kind: int
    name: str
    slot: Slot
    seconds: FloatArray
    share: float
    position: int
    options: Options | None
    placements: IntArray | None
    value: Value | None

    @property
    def count(self) -> int:
        """Number of strategies."""
        return len(self.seconds)

    def outputs(self, slot: int) -> IntArray:
        """Return the (S,) placement numbers of what the node defines."""
        if self.options is None:
            assert self.placements is not None, self.name
            return self.placements
        numbers = self.options.outputs[slot]
        assert numbers is not None, f"{self.name} does not define output {slot}"
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The price of a change of placement.

    Attributes:
        first: Node that defines the value.
        second: Node that uses it.
        table: (S of first, S of second) seconds.
        kind: Block whose slot it is paid in.
        slot: When it is paid.
        share: Times per instance of the kind.
        value: Name of the value.
        consumer: Input slot of the consuming op; -1 if the consumer is no op.
        outside: What of the seconds leaves nodes; None if nothing ever does.
    """

    first: int
    second: int
    table: FloatArray
    kind: int
    slot: Slot
    share: float
    value: str
    consumer: int
    outside: "Outside | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """The seconds of a change of placement that links between nodes are busy.

    Attributes:
        seconds: From one placement to another, as of `Reshards.outside`.
        source: (S of first) rows of them.
        target: (S of second) columns.
    """

    seconds: FloatArray
    source: IntArray
    target: IntArray

    def at(self, first: int, second: int) -> float:
        """Return the seconds under two strategies."""
        return float(self.seconds[self.source[first], self.target[second]])

    @property
    def table(self) -> FloatArray:
        """(S of first, S of second) seconds."""
        return self.seconds[np.ix_(self.source, self.target)]


@dataclass(frozen=True, slots=True, eq=False)
class Bytes:
    """Bytes per device of a node for one instance: (S,) amounts; if transient, while ops `start` to `end` run."""

    node: int
    kind: int
    memory: Memory
    amounts: FloatArray
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Forbidden:
    """Pairs of strategies that two nodes must not have together: (S of first, S of second) seconds, 0 or infinite."""

    first: int
    second: int
    seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Boundary:
    """Values that pass between blocks under one placement: the node that decides it, and what defines them."""

    node: int
    producers: tuple[Producer, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Tables:
    """Everything the placement problem of one (microbatch size, mesh) is made of.

    Attributes:
        folded: The graph.
        meaning: What placements stand for.
        mesh: The devices of a stage.
        costs: What things cost.
        resharder: Changes of placement.
        nodes: The decisions.
        edges: What they cost in pairs.
        bytes: The memory they take.
        boundaries: The decisions about values that pass between blocks.
        selective: By kind, positions of the ops that selective recompute runs again.
        again_nodes: Their nodes.
        again_edges: The edges that are paid again with them.
        forbidden: What must not be chosen together.
    """

    folded: Folded
    meaning: Meaning
    mesh: Mesh
    costs: CostModel
    resharder: Resharder
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    bytes: tuple[Bytes, ...]
    boundaries: tuple[Boundary, ...]
    selective: tuple[frozenset[int], ...]
    again_nodes: tuple[int, ...]
    again_edges: tuple[int, ...]
    forbidden: tuple[Forbidden, ...] = ()

    def block_seconds(self, choice: Sequence[int]) -> FloatArray:
        """Return the seconds of one instance by kind and slot, (kinds, slots), with whole passes.

        `FORWARD`, `BACKWARD` and `SELECTIVE` are what the passes take, by the formulas of `autopar.cost.overlap`, and
        never less than the host needs to launch them; the other slots are those of `kind_totals`.
        """
        totals = self.kind_totals(choice)
        overlap = Overlap.of(self.costs.stack)
        weight = totals[:, Slot.BACKWARD_WEIGHT]
        forward = overlap.forward(totals[:, Slot.FORWARD], totals[:, Slot.FORWARD_WAIT], totals[:, Slot.FORWARD_GATHER])
        backward = overlap.backward(
            totals[:, Slot.BACKWARD] + weight, weight, totals[:, Slot.BACKWARD_WAIT], totals[:, Slot.BACKWARD_GATHER]
        )
        again = (totals[:, slot] for slot in AGAIN.values())
        totals[:, Slot.SELECTIVE] = launched(overlap.forward(*again), self.recompute_host_seconds)
        host = self.host_seconds
        totals[:, Slot.FORWARD] = launched(forward, host[:, 0])
        totals[:, Slot.BACKWARD] = launched(backward, host[:, 1])
        return totals

    @property
    def host_seconds(self) -> FloatArray:
        """Seconds in which the host launches the kernels of a forward and of a backward, (kinds, 2)."""
        return host_seconds(self.folded, self.costs)

    @property
    def recompute_host_seconds(self) -> FloatArray:
        """Seconds in which the host launches the kernels that selective recompute runs again, (kinds,)."""
        return recompute_host_seconds(self.folded, self.costs, self.selective)

    def kind_totals(self, choice: Sequence[int]) -> FloatArray:
        """Return the summed prices of one instance by kind and slot, shape (kinds, slots)."""
        return self.flat.kind_totals(choice)

    @property
    def flat(self) -> FlatTables:
        """The prices as arrays, laid out once."""
        found = _FLAT.get(self)
        if found is None:
            found = _FLAT[self] = FlatTables(self, len(Slot), AGAIN, OUTSIDE)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of memory of what tables of other meshes do not share, about."""
        return self.flat.nbytes + self.resharder.nbytes + NODE_BYTES * len(self.nodes)


_FLAT: WeakKeyDictionary[Tables, FlatTables] = WeakKeyDictionary()

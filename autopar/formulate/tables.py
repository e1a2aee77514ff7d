"""Decisions and costs of one folded graph on one mesh, independent of the pipeline.

    minimise sum_i theta_i(x_i) + sum_ij theta_ij(x_i, x_j)

A *node* i is a decision: the strategy of an op, or the placement of a parameter between steps, of a value that passes
between blocks (*boundary*), or of the copy of a value that several ops of a block share. An *edge* ij has the cost of
the reshard between two nodes. Every cost is in seconds for one block instance and belongs to a *slot*;
`linear_weights.py` and `step_time.py` decide how often a slot counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel, Overlap, Resharder
from autopar.cost.overlap import Rows, launched
from autopar.folding.fold import Folded, Producer
from autopar.folding.graph_facts import host_seconds, recompute_host_seconds
from autopar.formulate.op_strategies import OpStrategies
from autopar.formulate.placement_semantics import PlacementSemantics
from autopar.formulate.table_arrays import FlatTables
from autopar.ir.graph import Value
from autopar.sharding import Mesh

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Slot(IntEnum):
    """What a cost is for, and how often it counts.

    `FORWARD` and `BACKWARD` are kernels, once per microbatch; `GRADIENT` is gradient traffic before accumulation, once
    per microbatch beside compute; `REDUCE` is gradient reduction after accumulation, once per step beside the last
    backward; `UPDATE` once per step. Of a pass, `WAIT` are the collectives that compute waits for, `GATHER` the gathers
    of parameters, which overlap compute, and `BACKWARD_WEIGHT` the kernels that only produce parameter gradients, which
    collectives of the backward overlap. `SELECTIVE` is the part of the forward that selective recompute repeats. Three
    slots are the additional seconds of the host link: with offloaded activations `OFFLOAD` in the forward and `FETCH`
    in the backward, with offloaded optimizer state `STATE` in the update. They are known for lowered blocks only and
    are 0 in tables (`autopar.formulate.offload_costs` fills them in). `OUTSIDE` slots hold the seconds of the other
    slots that are on links between nodes. `CHUNKED` are collectives that run in chunks beside the products next to
    them, and are no part of `WAIT`. `ROWS` are transfers of rows of experts that run beside shared experts, and no part
    of `WAIT` either; `SHARED` are the kernels of shared experts, which `FORWARD`, `BACKWARD` and `BACKWARD_WEIGHT` do
    not count where rows run beside them. `HOST_FORWARD` and `HOST_BACKWARD` are what parameters and sums of gradients
    in host memory add to passes; they are 0 in tables, too.
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
    FORWARD_CHUNKED = 21
    BACKWARD_CHUNKED = 22
    SELECTIVE_CHUNKED = 23
    FORWARD_SHARED = 24
    FORWARD_ROWS = 25
    BACKWARD_SHARED = 26
    BACKWARD_SHARED_WEIGHT = 27
    BACKWARD_ROWS = 28
    SELECTIVE_SHARED = 29
    SELECTIVE_ROWS = 30
    HOST_FORWARD = 31
    HOST_BACKWARD = 32


AGAIN = {
    Slot.FORWARD: Slot.SELECTIVE,
    Slot.FORWARD_WAIT: Slot.SELECTIVE_WAIT,
    Slot.FORWARD_CHUNKED: Slot.SELECTIVE_CHUNKED,
    Slot.FORWARD_GATHER: Slot.SELECTIVE_GATHER,
    Slot.FORWARD_SHARED: Slot.SELECTIVE_SHARED,
    Slot.FORWARD_ROWS: Slot.SELECTIVE_ROWS,
}
"""Slots of the forward, and the slots of their repetition under selective recompute."""

OUTSIDE = {
    Slot.GRADIENT: Slot.GRADIENT_OUTSIDE,
    Slot.REDUCE: Slot.REDUCE_OUTSIDE,
    Slot.FORWARD_WAIT: Slot.FORWARD_OUTSIDE,
    Slot.FORWARD_GATHER: Slot.FORWARD_OUTSIDE,
    Slot.BACKWARD_WAIT: Slot.BACKWARD_OUTSIDE,
    Slot.BACKWARD_GATHER: Slot.BACKWARD_OUTSIDE,
    Slot.SELECTIVE_WAIT: Slot.SELECTIVE_OUTSIDE,
    Slot.SELECTIVE_GATHER: Slot.SELECTIVE_OUTSIDE,
    Slot.FORWARD_CHUNKED: Slot.FORWARD_OUTSIDE,
    Slot.BACKWARD_CHUNKED: Slot.BACKWARD_OUTSIDE,
    Slot.SELECTIVE_CHUNKED: Slot.SELECTIVE_OUTSIDE,
    Slot.FORWARD_ROWS: Slot.FORWARD_OUTSIDE,
    Slot.BACKWARD_ROWS: Slot.BACKWARD_OUTSIDE,
    Slot.SELECTIVE_ROWS: Slot.SELECTIVE_OUTSIDE,
}
"""Slots of collectives, and the slots of their seconds on links between nodes."""


class Memory(StrEnum):
    """What bytes are for.

    `CACHES` are those of all microbatches of a step. `SAVED`, `DROPPED`, `ARRIVED` and `HANDED` count once per
    microbatch in flight: `DROPPED` only without recompute, `SAVED` also with selective recompute, `ARRIVED` always,
    `HANDED` only with full recompute (else the block before keeps the value). `TRANSIENT` bytes exist while the
    neighbours of their op run. `RECEIVED` bytes come from a neighbouring block, and count in addition if that block is
    on another stage.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    CACHES = "caches"
    SAVED = "saved"
    DROPPED = "dropped"
    ARRIVED = "arrived"
    HANDED = "handed"
    TRANSIENT = "transient"
    RECEIVED = "received"


NODE_BYTES = 2000
"""Approximate bytes of memory of a decision and its edges, arrays not counted."""


class Decision(IntEnum):
    """Type of a decision."""

    OP = 0
    PARAMETER = 1
    BOUNDARY = 2
    COPY = 3


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A decision with S strategies.

    Attributes:
        decision: Its type.
        kind: Distinct block it belongs to.
        name: Op or value of the decision, in the representative instance; copies add their pass.
        slot: Slot of its own seconds.
        seconds: (S,) seconds per instance.
        share: Times per instance of the kind (1, except for parameters shared between blocks).
        position: Position of the op in its block; -1 for other decisions.
        options: Placements of an op; None for other decisions.
        placements: (S,) placement numbers of the value; None for an op.
        value: The value of a decision that is not an op; None for an op.
    """

    decision: Decision
    kind: int
    name: str
    slot: Slot
    seconds: FloatArray
    share: float
    position: int
    options: OpStrategies | None
    placements: IntArray | None
    value: Value | None

    @property
    def count(self) -> int:
        """Number of strategies."""
        return len(self.seconds)

    def outputs(self, slot: int) -> IntArray:
        """Return the (S,) placement numbers of a value that the node defines."""
        if self.options is None:
            assert self.placements is not None, self.name
            return self.placements
        numbers = self.options.outputs[slot]
        assert numbers is not None, f"{self.name} does not define output {slot}"
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The cost of a reshard.

    Attributes:
        first: Node that defines the value.
        second: Node that uses it.
        table: (S of first, S of second) seconds.
        kind: Block that pays.
        slot: Slot of the seconds.
        share: Times per instance of the kind.
        value: Name of the value.
        consumer: Input slot of the consuming op; -1 if the consumer is not an op.
        outside: The part of the seconds on links between nodes; None if it is always zero.
    """

    first: int
    second: int
    table: FloatArray
    kind: int
    slot: Slot
    share: float
    value: str
    consumer: int
    outside: "InterNodeSeconds | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class InterNodeSeconds:
    """The seconds of a reshard on links between nodes.

    Attributes:
        seconds: By source and target placement, as of `Reshards.outside`.
        source: (S of first) rows of `seconds`.
        target: (S of second) columns of `seconds`.
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
    """Bytes per device of a node for one instance: (S,) amounts; transient ones from op `start` to before `end`."""

    node: int
    kind: int
    memory: Memory
    amounts: FloatArray
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Forbidden:
    """Forbidden pairs of strategies of two nodes: (S of first, S of second) seconds, 0 or infinite."""

    first: int
    second: int
    seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Boundary:
    """Values that pass between blocks under one placement: the node that decides it, and the ops that produce them."""

    node: int
    producers: tuple[Producer, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Tables:
    """All parts of the placement problem of one microbatch size and mesh.

    Attributes:
        folded: The graph.
        meaning: Meaning of the placements of its values.
        mesh: The devices of a stage.
        costs: The cost model.
        resharder: Costs of reshards.
        nodes: The decisions.
        edges: Pairwise costs.
        bytes: Memory of the decisions.
        boundaries: The decisions about values that pass between blocks.
        selective: By kind, positions of the ops that selective recompute repeats.
        again_nodes: Nodes of these ops.
        again_edges: Edges that selective recompute repeats.
        forbidden: Forbidden pairs of strategies.
    """

    folded: Folded
    meaning: PlacementSemantics
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

        `FORWARD`, `BACKWARD` and `SELECTIVE` are the seconds of whole passes by the formulas of `autopar.cost.overlap`,
        including kernel launches on the host; the other slots are those of `kind_totals`.
        """
        totals = self.kind_totals(choice)
        overlap = Overlap.of(self.costs.stack)
        shared, shared_weight = totals[:, Slot.BACKWARD_SHARED], totals[:, Slot.BACKWARD_SHARED_WEIGHT]
        weight = totals[:, Slot.BACKWARD_WEIGHT] + shared_weight
        forward = _forward(totals, overlap, AGAIN)
        backward = overlap.backward(
            totals[:, Slot.BACKWARD] + shared + weight,
            weight,
            totals[:, Slot.BACKWARD_WAIT],
            totals[:, Slot.BACKWARD_CHUNKED],
            totals[:, Slot.BACKWARD_GATHER],
            rows=Rows(totals[:, Slot.BACKWARD_ROWS], shared + shared_weight, shared_weight),
        )
        rerun = _forward(totals, overlap, AGAIN.values())
        totals[:, Slot.SELECTIVE] = launched(rerun, self.recompute_host_seconds)
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
        """Seconds in which the host launches the kernels that selective recompute repeats, (kinds,)."""
        return recompute_host_seconds(self.folded, self.costs, self.selective)

    def kind_totals(self, choice: Sequence[int]) -> FloatArray:
        """Return the summed costs of one instance by kind and slot, (kinds, slots)."""
        return self.flat.kind_totals(choice)

    @property
    def flat(self) -> FlatTables:
        """The costs as flat arrays, built on first use."""
        found = _FLAT.get(self)
        if found is None:
            found = _FLAT[self] = FlatTables(self, len(Slot), AGAIN, OUTSIDE)
        return found

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory that tables of other meshes do not share."""
        return self.flat.nbytes + self.resharder.nbytes + NODE_BYTES * len(self.nodes)


def _forward(totals: FloatArray, overlap: Overlap, slots: Iterable[Slot]) -> FloatArray:
    """Return the seconds of a forward of one instance by kind, given (kinds, slots) and its slots, as in `AGAIN`."""
    kernels, waits, chunked, gathers, shared, rows = (totals[:, slot] for slot in slots)
    return overlap.forward(kernels + shared, waits, chunked, gathers, rows=Rows(rows, shared, 0.0 * shared))


_FLAT: WeakKeyDictionary[Tables, FlatTables] = WeakKeyDictionary()

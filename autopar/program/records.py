"""The records of a program: what every device of every stage does in one training (or inference) step.

A program is SPMD within a stage: one list of instructions stands for all devices of the stage, and all shapes are
those of one device's block. Equal blocks share their instructions, so the program of a model with 96 equal layers
holds the instructions of a handful of blocks:

    Program ─ stages ─▶ StageProgram ─ blocks ─▶ (kind, phase) ─▶ Segment ─ instructions ─▶ Compute | Collective | ...
            └ crossings ─▶ Crossing ─ pieces ─▶ Piece

Every value says how it lies on the mesh. Every change of placement is an explicit instruction; a value with a new
placement is a new value with a name of its own (SSA in a segment). Blocks form a chain. Values cross from one block to
the next by position: output i of a block is input i of the next one. Where the next block lives on another stage that
is a send and its receive: device i of a stage sends to device i of the other one if both have equal meshes and the
value lies alike on them. Every other value that goes from stage to stage is a `Crossing`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import prod
from typing import assert_never

from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.rings import transfer_bytes
from autopar.errors import ProgramError
from autopar.fusion_plan import BucketCuts
from autopar.ir.graph import Op, Phase
from autopar.ir.rings import RINGS
from autopar.ir.routing import Routed
from autopar.recompute import STATE_KINDS, Hosted, Recompute, StateKind
from autopar.schedule import SCHEDULES, Task, chunks_of
from autopar.sharding import Axis, Mesh, Partial, Placement, Placements, Replicate, Shard
from autopar.shares import Share, mean_microbatches


class SegmentPhase(StrEnum):
    """When a segment runs: those of passes once per microbatch, those of reductions and updates once per step.

    `AGAIN` holds the instructions of a forward that run again before the backward of a block that recomputes
    selectively. `WEIGHT` is there if the schedule splits the backward: it holds what leads to gradients of parameters
    only, and `BACKWARD` the rest. `REDUCE` holds the collectives that finish the gradient sums of a block; it starts
    when the block's last sum is there and runs beside compute. `UPDATE` is the optimizer and whatever makes the new
    parameters available to the next step. What a block saves goes to the host in `OFFLOAD`, which follows its forward,
    and comes back in `FETCH`, which comes before its backward. The optimizer's state does so in `STATE_FETCH` before
    the update and `STATE_OFFLOAD` after it, sums of gradients in `SUM_FETCH` and `SUM_OFFLOAD` around every backward,
    and parameters in `PARAMETER_FETCH` before every pass; `PARAMETER_OFFLOAD` follows the update. These run beside
    compute, as far as it hides them.
    """

    FORWARD = "forward"
    AGAIN = "again"
    BACKWARD = "backward"
    WEIGHT = "weight"
    REDUCE = "reduce"
    UPDATE = "update"
    OFFLOAD = "offload"
    FETCH = "fetch"
    STATE_FETCH = "state-fetch"
    STATE_OFFLOAD = "state-offload"
    SUM_FETCH = "sum-fetch"
    SUM_OFFLOAD = "sum-offload"
    PARAMETER_FETCH = "parameter-fetch"
    PARAMETER_OFFLOAD = "parameter-offload"


def segment_phase(phase: Phase) -> SegmentPhase:
    """Return the phase of the segment that holds the ops of a phase of the graph if the backward is not split."""
    match phase:
        case Phase.FORWARD | Phase.LOSS:
            return SegmentPhase.FORWARD
        case Phase.BACKWARD:
            return SegmentPhase.BACKWARD
        case Phase.UPDATE:
            return SegmentPhase.UPDATE


class Category(StrEnum):
    """What memory holds.

    The first six have a size per stage (`Resident`). All of them outlive the step but `UPDATE`, what the optimizer
    makes of all parameters in its update and frees after it. `CACHES` are what serving keeps of earlier tokens, of all
    samples of a step. `ACTIVATIONS` are forward values of the microbatches in flight, kept
    for their backward; `GATHERED` parameters put together from their shards for use; `COMMUNICATION` values under way
    to or from other devices beside compute; `TRANSIENT` is what the running segment needs besides.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    UPDATE = "update"
    BUFFERS = "buffers"
    CACHES = "caches"
    ACTIVATIONS = "activations"
    GATHERED = "gathered"
    COMMUNICATION = "communication"
    TRANSIENT = "transient"


_LASTING = (
    Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.UPDATE, Category.BUFFERS, Category.CACHES,
)  # fmt: skip
OPTIMIZER_STATE = (Category.OPTIMIZER, Category.UPDATE)
"""What of a block lies in host memory if its optimizer's state does."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A value as one device holds it.

    Attributes:
        value: Name; unique in the segment that defines it.
        shape: Local shape.
        bytes: Local size under the job's dtype policy.
        placements: One per mesh axis: which part of the whole tensor it is. A program that is only timed need not say.
    """

    value: str
    shape: tuple[int, ...]
    bytes: float
    placements: Placements = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """One op on local blocks.

    Attributes:
        op: What to compute, with attributes as they have to be for the local shapes. Its input and output names are
            those of the graph.
        inputs: What is read, one per input of the op; None for an absent optional one.
        outputs: What is defined, one per output of the op; None for one nobody asked for.
        constants: Inputs whose numbers are other ones on a shard (the target shape of a Reshape, the ends of a Slice):
            (index of the input, its flat content), to be taken instead of what the graph's constant holds.
        start: Where the device's block starts, if the op has to know: its value is one more input, last. Ops of
            `autopar.ir.rings` are run by all devices of its one axis together.
        kept: Bytes its kernel leaves behind for its gradient, besides its outputs: the scores of unfused attention.
        kernel: Name of the first op of the kernel it runs in, if the plan states it; "" where the stack decides.
        again: Of that first op, the ops of the segment that run in the kernel again, besides their own.
        shared: Whether it is an op of a shared expert: rows of the routed experts may travel beside it.
    """

    op: Op
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand | None, ...]
    constants: tuple[tuple[int, tuple[int, ...]], ...] = ()
    start: "Start | None" = None
    kept: float = 0.0
    kernel: str = ""
    again: tuple[str, ...] = ()
    shared: bool = False

    @property
    def ring(self) -> Axis | None:
        """The axis whose devices run the op together, passing blocks of some inputs round; None if each runs alone."""
        if self.op.kind not in RINGS or self.start is None:
            return None
        return self.start.axes[0]

    @property
    def ring_steps(self) -> int:
        """How many blocks a device of such a ring computes on, its own included; 1 if it runs alone."""
        if self.ring is None or self.start is None:
            return 1
        return RINGS[self.op.kind].steps(self.op.attrs, self.start.rows, self.ring.size)

    @property
    def passed_bytes(self) -> float:
        """Bytes that a device sends in one step of such a ring."""
        inputs, outputs = (
            [0.0 if operand is None else operand.bytes for operand in operands]
            for operands in (self.inputs, self.outputs)
        )
        return transfer_bytes(self.op.kind, inputs, outputs)


@dataclass(frozen=True, slots=True)
class Start:
    """The position of the first row a device holds of a dim split over `axes`, as an int64 scalar.

    Attributes:
        axes: Mesh axes that split the dim, major first.
        rows: Rows per device.
    """

    axes: tuple[Axis, ...]
    rows: int

    def of(self, coordinates: Sequence[int]) -> int:
        """Return the position for a device, given its coordinates on `axes`.

        >>> Start((Axis("dp", 2, 4), Axis("tp", 4, 1)), rows=10).of((1, 2))
        60
        """
        index = 0
        for axis, coordinate in zip(self.axes, coordinates, strict=True):
            index = index * axis.size + coordinate
        return index * self.rows


@dataclass(frozen=True, slots=True)
class Collective:
    """A change of placement on one mesh axis that needs communication.

    Attributes:
        kind: The collective; implied by the two placements and checked against them.
        axis: Mesh axis over which the devices talk.
        source: Placement of `operand` on that axis.
        target: Placement of `result` on that axis.
        operand: What is read.
        result: What is defined.
        bytes: Size on the wire of the larger of the two sides on one device; what a cost model takes as its size.
            Gradients may travel in fewer bytes than they are summed in.
        overlaps: Whether it runs beside compute and only the optimizer waits for it (traffic of gradients). What is
            computed from its result inside the segment is taken to be on time.
        routed: Of rows of experts, which of these the tokens chose.
        unit: Of a parameter, the unit of the block that it is gathered with: collectives of a segment with equal units,
            kinds and axes travel as one. "" if it travels alone.
    """

    kind: CollectiveKind
    axis: Axis
    source: Placement
    target: Placement
    operand: Operand
    result: Operand
    bytes: float
    overlaps: bool = False
    routed: Routed | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        implied = collective_kind(self.source, self.target)
        assert self.kind == implied, f"{self.source} to {self.target} is {implied}, not {self.kind}"


@dataclass(frozen=True, slots=True)
class Slice:
    """The device's own block of a value replicated over `axis`, a copy too cheap to cost; `target` says which block."""

    axis: Axis
    target: Shard
    operand: Operand
    result: Operand


@dataclass(frozen=True, slots=True)
class Exchange:
    """The device's block with rows of its neighbours around it (a halo): a permutation of boundary rows over one axis.

    Attributes:
        axis: Mesh axis that splits `dim`; no other axis does.
        dim: Tensor dim.
        before: Rows taken from the previous device on the axis, put in front.
        after: Rows taken from the next device, put behind.
        fill: What the first and last device put where they have no neighbour: "zero" or "lowest" (minus infinity).
        operand: What is read; it has at least `before` and `after` rows.
        result: What is defined: `before + after` rows more along `dim`, at the same placements.
        bytes: Size on the wire of the rows one device sends.
    """

    axis: Axis
    dim: int
    before: int
    after: int
    fill: str
    operand: Operand
    result: Operand
    bytes: float


@dataclass(frozen=True, slots=True)
class Offload:
    """A copy from the device to the memory of its host, after which the device need not hold the value.

    Attributes:
        operand: What is read on the device.
        result: What is defined: the value in host memory.
        bytes: What goes over the host link: the value's memory, and what the kernel that made it has left behind; 0
            for a view of another value that goes there, too.
    """

    operand: Operand
    result: Operand
    bytes: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """A copy from host memory back to the device; attributes are as of `Offload`, the operand is in host memory."""

    operand: Operand
    result: Operand
    bytes: float


HostCopy = Offload | Fetch

Instruction = Compute | Collective | Slice | Exchange | Offload | Fetch


def collective_kind(source: Placement, target: Placement) -> CollectiveKind | None:
    """Return the collective that turns one placement of an axis into another; None if it is local or impossible.

    >>> print(collective_kind(Partial(), Shard(0)), collective_kind(Replicate(), Shard(0)))
    reduce_scatter None
    """
    match source, target:
        case Partial(), Replicate():
            return CollectiveKind.ALL_REDUCE
        case Partial(), Shard():
            return CollectiveKind.REDUCE_SCATTER
        case Shard(), Replicate():
            return CollectiveKind.ALL_GATHER
        case Shard(), Shard() if source != target:
            return CollectiveKind.ALL_TO_ALL
        case _:
            return None


def reads(instruction: Instruction) -> tuple[Operand, ...]:
    """Return what an instruction reads, absent inputs left out."""
    match instruction:
        case Compute():
            return tuple(operand for operand in instruction.inputs if operand is not None)
        case Collective() | Slice() | Exchange() | Offload() | Fetch():
            return (instruction.operand,)
        case _:
            assert_never(instruction)


def defines(instruction: Instruction) -> tuple[Operand, ...]:
    """Return what an instruction defines, unwanted outputs left out."""
    match instruction:
        case Compute():
            return tuple(operand for operand in instruction.outputs if operand is not None)
        case Collective() | Slice() | Exchange() | Offload() | Fetch():
            return (instruction.result,)
        case _:
            assert_never(instruction)


@dataclass(frozen=True, slots=True)
class Part:
    """Which tensor of the graph a value is, as a whole or in part.

    Attributes:
        value: Name of the value in its segment.
        tensor: Name of the tensor in the graph; blocks of one kind have the names of their representative, each
            instance stands for its own tensors.
    """

    value: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Store:
    """New content of a persistent tensor, written in place: `value` takes no memory of its own.

    Attributes:
        value: Defined in the segment; a gradient sum, an updated parameter or moment.
        target: What gets the content: the persistent tensor as it enters a step (parameter, gradient buffer, moment),
            or the external value of that name in later segments of the block.
    """

    value: Operand
    target: str


@dataclass(frozen=True, slots=True)
class Segment:
    """The instructions of one kind of block in one phase.

    Attributes:
        kind: Which kind of block; blocks of one kind have equal instructions and equal shapes. A kind of the graph on
            another variant of the plan is another kind: `variant * kinds of the graph + kind of the graph`.
        phase: When it runs.
        inputs: Values that arrive from the neighbouring block, by position: from the previous block in `FORWARD`
            (activations), from the next one in `BACKWARD` (their gradients).
        external: Values that are there anyway: persistent tensors (their memory is in `StageProgram.resident`),
            constants, data of the microbatch that every stage loads for itself.
        instructions: In order of execution.
        saved: In `FORWARD`: values kept until the same block's backward of the same microbatch, which may read them.
            They are inputs or defined here. In `BACKWARD` likewise, for the block's `WEIGHT`, which may read both. In
            `AGAIN`: the values of the forward that are kept in place of those, of which the rest follows; a segment
            `AGAIN` reads no others. In `OFFLOAD`: those of the forward that stay on the device.
        outputs: Values handed on, by position: to the next block in `FORWARD`, to the previous one in `BACKWARD`; an
            input may be passed on. Empty in `WEIGHT`, `REDUCE` and `UPDATE`.
        stores: Persistent tensors that get new content.
        exports: Values read elsewhere than in the neighbouring block: results of the model, and what blocks further
            away read as external values. They are inputs or defined here. A result may leave as terms (the loss of a
            part of the batch): whoever looks at it adds them up.
        parts: What the values are that cross the segment's edge: inputs, external values, outputs, stores and exports.
            An external value without a part is what an earlier segment of the block stored under its name. Programs
            that are only timed need none.
    """

    kind: int
    phase: SegmentPhase
    inputs: tuple[Operand, ...]
    external: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    saved: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    stores: tuple[Store, ...] = ()
    exports: tuple[Operand, ...] = ()
    parts: tuple[Part, ...] = ()


def forward_values(forward: Segment) -> tuple[Operand, ...]:
    """Return the values a forward receives and makes: what it could keep."""
    made = (operand for instruction in forward.instructions for operand in defines(instruction))
    return (*forward.inputs, *made)


Table = Mapping[tuple[int, SegmentPhase], Segment]
"""Segments by kind and phase."""

STATE_COPIES = {
    SegmentPhase.STATE_FETCH: SegmentPhase.STATE_OFFLOAD,
    SegmentPhase.SUM_FETCH: SegmentPhase.SUM_OFFLOAD,
    SegmentPhase.PARAMETER_FETCH: SegmentPhase.PARAMETER_OFFLOAD,
}
"""Phases that bring persistent tensors from host memory, with those that take them back."""

HOST_PHASES = (SegmentPhase.OFFLOAD, SegmentPhase.FETCH, *(phase for pair in STATE_COPIES.items() for phase in pair))
"""Phases of segments that only copy to and from host memory."""


def saved_for(kind: int, phase: SegmentPhase, table: Table) -> tuple[Operand, ...]:
    """Return what earlier segments of a block have saved of the same microbatch for the segment of a phase."""
    match phase:
        case SegmentPhase.BACKWARD:
            makers: tuple[SegmentPhase, ...] = (SegmentPhase.FORWARD,)
        case SegmentPhase.WEIGHT:
            makers = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD)
        case SegmentPhase.AGAIN:
            again = table.get((kind, phase))
            return () if again is None else again.saved
        case SegmentPhase.OFFLOAD:
            makers = (SegmentPhase.FORWARD,)
        case SegmentPhase.FETCH:
            return in_host_memory(table.get((kind, SegmentPhase.OFFLOAD)))
        case _:
            return ()
    found = (table.get((kind, maker)) for maker in makers)
    return tuple(operand for maker in found if maker is not None for operand in maker.saved)


def in_host_memory(segment: Segment | None) -> tuple[Operand, ...]:
    """Return the values that a segment leaves in host memory."""
    instructions = () if segment is None else segment.instructions
    return tuple(instruction.result for instruction in instructions if isinstance(instruction, Offload))


def kept_values(table: Table, kind: int, recompute: Recompute) -> tuple[Operand, ...]:
    """Return what a block of a kind keeps on its devices from its forward until its backward.

    These are values of its forward segment.
    """
    forward = table[kind, SegmentPhase.FORWARD]
    match recompute:
        case Recompute.NONE:
            return forward.saved
        case Recompute.SELECTIVE:
            again = table.get((kind, SegmentPhase.AGAIN))
            return forward.saved if again is None else again.saved
        case Recompute.FULL:
            return forward.inputs
        case Recompute.OFFLOAD:
            offload = table.get((kind, SegmentPhase.OFFLOAD))
            return forward.saved if offload is None else offload.saved


def rerun(table: Table, kind: int, recompute: Recompute) -> Segment | None:
    """Return what a block of a kind runs before its backward to have what that reads; None if it keeps all of it."""
    match recompute:
        case Recompute.NONE:
            return None
        case Recompute.SELECTIVE:
            return table.get((kind, SegmentPhase.AGAIN))
        case Recompute.FULL:
            return table[kind, SegmentPhase.FORWARD]
        case Recompute.OFFLOAD:
            return table.get((kind, SegmentPhase.FETCH))


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes per device of one category that stay allocated through the whole step."""

    category: Category
    bytes: float

    def __post_init__(self) -> None:
        assert self.category in _LASTING, f"{self.category} come and go"


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What the devices of one pipeline stage do.

    Attributes:
        index: Position in the pipeline, 0 first.
        devices: Half-open range of device numbers; stages that are interleaved share them.
        mesh: Those devices as a grid; the axes of its collectives are axes of this mesh.
        blocks: Kind of each of its blocks, in order.
        recompute: What each of its blocks keeps of its forward; what it does not keep runs again right before its
            backward, or comes back from host memory.
        resident: Persistent memory per device, one entry per category at most.
        variant: Which mesh and placements of the plan it has.
        hosted: Persistent bytes per device that lie in host memory, likewise; nothing if the stage offloads none.
        away: Whether the state of each of its blocks lies there; empty if that of all does, or of none.
        buckets: Where its gradients are cut into buckets; those that are not named share them by the uniform rule.
        hosted_copies: What of `hosted` is the state of copies of parameters that other stages own.
        what: What of the state of its blocks lies in host memory, of those that have some there.
    """

    index: int
    devices: tuple[int, int]
    mesh: Mesh
    blocks: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    resident: tuple[Resident, ...]
    variant: int = 0
    hosted: tuple[Resident, ...] = ()
    away: tuple[bool, ...] = ()
    buckets: tuple[BucketCuts, ...] = ()
    hosted_copies: float = 0.0
    what: Hosted = Hosted.OPTIMIZER

    def __post_init__(self) -> None:
        if self.hosted_copies and (self.away or self.hosted_copies > sum(part.bytes for part in self.hosted)):
            raise ProgramError(
                f"stage {self.index}: {self.hosted_copies:g} bytes of copies lie in host memory",
                hint="they are a part of what lies there, where the state of all blocks does",
            )
        if self.away and (len(self.away) != len(self.blocks) or len(set(self.away)) < 2 or not self.hosted):
            raise ProgramError(
                f"stage {self.index} of {len(self.blocks)} blocks: the state of {sum(self.away)} of {len(self.away)} "
                f"lies in host memory, {'' if self.hosted else 'without a size'}",
                hint="name some of its blocks, but not all, and how many bytes they have there",
            )

    @property
    def hosted_blocks(self) -> tuple[bool, ...]:
        """Whether the optimizer's state of each block lies in host memory."""
        return self.away or (bool(self.hosted),) * len(self.blocks)

    @property
    def state_kind(self) -> StateKind:
        """What of the state of hosted blocks lies in host memory, and where their update runs."""
        return STATE_KINDS[self.what]

    @property
    def num_devices(self) -> int:
        """Size of the range of devices."""
        return self.devices[1] - self.devices[0]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor on its way from one device to another.

    Attributes:
        sender: Number of a device that has it.
        receiver: Number of a device that needs it.
        box: Half-open range of each dim of the whole tensor.
    """

    sender: int
    receiver: int
    box: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that goes from one stage to another, which has another mesh or holds it at another placement.

    Attributes:
        sender: Index of the stage that has it.
        receiver: Index of the stage that needs it; of a copy the first one of its group.
        phase: When it is made: `FORWARD` or `BACKWARD`, once per microbatch; a parameter of which the receiver has a
            copy follows its `UPDATE`, once per step.
        tensor: Name of the tensor in the graph.
        source: The value on the sending stage; terms are those of a sum.
        target: The value on the receiving stage.
        pieces: What which device sends to which. Those from one device to another travel together, in this order. A
            device that gets several terms of an element adds them up, one that gets none has a zero.
    """

    sender: int
    receiver: int
    phase: SegmentPhase
    tensor: str
    source: Operand
    target: Operand
    pieces: tuple[Piece, ...]

    @property
    def element_bytes(self) -> float:
        """Bytes of an element on its way."""
        return self.target.bytes / max(1, prod(self.target.shape))


def lies_alike(source: Operand, sender: Mesh, target: Operand, receiver: Mesh) -> bool:
    """Whether device i of a stage has of a value what device i of another one has."""
    return sender.shape == receiver.shape and source.placements == target.placements


CrossingTable = Mapping[tuple[int, str, Placements], Crossing]
"""Crossings once per microbatch, by receiving stage, tensor and placements on that stage."""


@dataclass(frozen=True, slots=True)
class Program:
    """A plan lowered to instructions.

    Attributes:
        stages: In pipeline order. Several may have the same devices, a *group*; they are its chunks.
        segments: Each (kind, phase) at most once; a phase a kind has no instructions for may be missing, except
            `FORWARD`.
        schedule: Order of microbatches, a key of `autopar.schedule.SCHEDULES`; it says which stages share devices.
        num_microbatches: Microbatches per step; of the busiest rows if rows have different shares.
        crossings: Values that go from stage to stage other than from device i to device i.
        shares: Microbatches of each row of the major mesh axis, where rows have different numbers of them; else empty.
    """

    stages: tuple[StageProgram, ...]
    segments: tuple[Segment, ...]
    schedule: str
    num_microbatches: int
    crossings: tuple[Crossing, ...] = ()
    shares: tuple[Share, ...] = ()

    @property
    def mean_microbatches(self) -> Fraction:
        """Microbatches per step, on the mean of all rows: what the loss of a microbatch is divided by."""
        return mean_microbatches(self.shares) if self.shares else Fraction(self.num_microbatches)

    def of_share(self, share: Share) -> "Program":
        """Return the program as rows of a share run it, each for itself."""
        return replace(self, num_microbatches=share.num_microbatches, shares=())

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return sum(stop - start for start, stop in {stage.devices for stage in self.stages})

    @property
    def num_groups(self) -> int:
        """Groups of devices: as many as there are stages, unless some share theirs."""
        return len({stage.devices for stage in self.stages})

    @property
    def num_chunks(self) -> int:
        """Stages per group of devices."""
        return len(self.stages) // self.num_groups

    def orders(self) -> tuple[tuple[Task, ...], ...]:
        """Return the tasks of each group of devices in the order in which it runs them."""
        return SCHEDULES[self.schedule].orders(self.num_groups, self.num_microbatches, self.num_chunks)

    @property
    def groups(self) -> tuple[int, ...]:
        """The group of every stage."""
        return SCHEDULES[self.schedule].groups(self.num_groups, self.num_chunks)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every group in order."""
        return chunks_of(self.groups)

    @property
    def trains(self) -> bool:
        """Whether there is a backward to run: a training step, not inference."""
        return any(segment.phase is SegmentPhase.BACKWARD for segment in self.segments)

    def table(self) -> dict[tuple[int, SegmentPhase], Segment]:
        """Return the segments by kind and phase."""
        return {(segment.kind, segment.phase): segment for segment in self.segments}

    def crossing_table(self) -> CrossingTable:
        """Return the crossings of microbatches by receiving stage, tensor and placements there."""
        return {
            (crossing.receiver, crossing.tensor, crossing.target.placements): crossing
            for crossing in self.crossings
            if crossing.phase is not SegmentPhase.UPDATE
        }

    @property
    def hosted_blocks(self) -> tuple[bool, ...]:
        """Whether the optimizer's state of each block of the chain lies in host memory."""
        return tuple(away for stage in self.stages for away in stage.hosted_blocks)

    def blocks(self) -> Iterable[tuple[StageProgram, int]]:
        """Yield (stage, kind) of every block, in order of the chain."""
        for stage in self.stages:
            for kind in stage.blocks:
                yield stage, kind

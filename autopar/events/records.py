"""The distinct events of training steps: what can be measured once and used for every plan that contains it.

Look here for what makes two events the same. An op is its kind, its attributes and its local shapes, wherever it runs:
equal layers, microbatches and replicas share it. A transfer is its operation, its bytes, its group and how much of the
group lies in one node. A piece is a run of ops between collectives, as `autopar run` compiles it; it ties the times of
its ops to what they take together.
"""

import hashlib
from collections.abc import Sequence

import msgspec

Scalar = int | float | str
Attr = Scalar | tuple[Scalar, ...]
"""An attribute of an op, as a file can tell it apart."""

LOCAL_ATTRS = frozenset({"group", "num_groups", "pads"})
"""Attributes that are other numbers on a shard; the shapes say the same."""


class TensorType(msgspec.Struct, frozen=True):
    """An operand of an op on one device.

    Attributes:
        shape: Local shape.
        bytes: Bytes of an element, as the cost model counts them.
        dtype: Element type it is computed in.
    """

    shape: tuple[int, ...]
    bytes: float
    dtype: str


class OpEvent(msgspec.Struct, frozen=True, tag="op"):
    """An op on local shapes.

    Attributes:
        kind: Kind of the op.
        inputs: What it reads; None for an absent input.
        outputs: What it makes; None for an output nobody asked for.
        attrs: Attributes sorted by name.
        update: Whether it belongs to the update of a step.
    """

    kind: str
    inputs: tuple[TensorType | None, ...]
    outputs: tuple[TensorType | None, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    update: bool = False


class PieceEvent(msgspec.Struct, frozen=True, tag="piece"):
    """Ops that run as one compiled piece.

    Attributes:
        phase: Phase of the segment it is part of.
        ops: Id of each op event in it, and how often it occurs.
        digest: Hash of its ops and of how they are wired.
        name: Kind of block and ops, for people.
    """

    phase: str
    ops: tuple[tuple[str, int], ...]
    digest: str
    name: str = ""


class TransferEvent(msgspec.Struct, frozen=True, tag="transfer"):
    """A collective of a group of devices, a send, or a copy to or from host memory.

    Attributes:
        operation: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "offload" or "fetch".
        bytes: Bytes of the larger side on one device.
        members: Devices of the group; 2 for a send, 1 for a copy.
        inside: Consecutive members of the group that share a node.
        inner: Whether the tensor is cut along another dim than its first, so that blocks are not contiguous.
    """

    operation: str
    bytes: float
    members: int
    inside: int
    inner: bool = False


class LaunchEvent(msgspec.Struct, frozen=True, tag="launch"):
    """A compiled piece that does next to nothing: what a call takes before and after its kernels."""


class OverlapEvent(msgspec.Struct, frozen=True, tag="overlap"):
    """A matrix product that runs beside a transfer; the time is that of both.

    Attributes:
        size: Rows and columns of the square matrices.
        products: Products one after the other.
        operation: What runs beside them, as of `TransferEvent`.
        bytes: Its bytes.
        members: Devices of its group.
        parts: Which of both run: "both", "compute" or "transfer".
    """

    size: int
    products: int
    operation: str
    bytes: float
    members: int
    parts: str = "both"


Event = OpEvent | PieceEvent | TransferEvent | LaunchEvent | OverlapEvent


def event_id(event: Event) -> str:
    """Return the name of an event: its type and a hash of what makes it what it is.

    >>> event_id(TransferEvent("send", 1e6, 2, 2)) == event_id(TransferEvent("send", 1e6, 2, 2))
    True
    """
    kind = type(event).__name__.removesuffix("Event").lower()
    parts: object = event
    match event:
        case OpEvent():
            parts = (op_family(event), op_sizes(event))
        case PieceEvent():
            parts = (event.phase, event.digest)
        case TransferEvent():
            parts = (event.operation, event.bytes, event.members, event.inside)
    return f"{kind}-{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]}"


Family = tuple[str, tuple[tuple[str, Attr], ...], tuple[int, ...], tuple[float, ...]]
"""What an op is but for its sizes: kind, attributes, dims of each operand (-1 if absent), bytes of their elements."""


def family(
    kind: str, attrs: Sequence[tuple[str, Attr]], ranks: Sequence[int], element_bytes: Sequence[float]
) -> Family:
    """Return the family of an op.

    Args:
        kind: Its kind.
        attrs: Its attributes.
        ranks: Dims of each input and output; -1 for an absent one.
        element_bytes: Bytes of an element of those that are there.
    """
    kept = tuple((name, value) for name, value in attrs if name not in LOCAL_ATTRS)
    return kind, kept, tuple(ranks), tuple(round(size, 3) for size in element_bytes)


def op_family(event: OpEvent) -> Family:
    """Return the family of an op event."""
    operands = (*event.inputs, *event.outputs)
    ranks = [-1 if operand is None else len(operand.shape) for operand in operands]
    return family(event.kind, event.attrs, ranks, [operand.bytes for operand in operands if operand is not None])


def op_sizes(event: OpEvent) -> tuple[int, ...]:
    """Return the sizes of all operands of an op event, one after the other."""
    return tuple(size for operand in (*event.inputs, *event.outputs) if operand is not None for size in operand.shape)

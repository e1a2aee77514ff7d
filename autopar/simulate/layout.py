"""How long a segment takes and what it occupies: its instructions laid end to end.

Compute and the collectives that compute waits for follow each other; collectives that overlap (gradient traffic) are
only listed with the moment from which they may run. Each distinct segment is laid out once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import ALONE, Fused
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.collectives import devices_in_node
from autopar.ir.graph import Op
from autopar.program.records import (
    Collective,
    Compute,
    Exchange,
    Operand,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    reads,
)
from autopar.sharding import Axis

Shapes = NDArray[np.int64]
"""Local shapes, (n, rank), one row per strategy; the simulator asks for one."""


class Costs(Protocol):
    """What the simulator asks of a cost model; `autopar.cost.CostModel` is one."""

    @property
    def cluster(self) -> Cluster:
        """The hardware; the simulator reads which devices share a node."""

    def fuse(self, ops: Sequence[Op], ranks: Mapping[str, int], /) -> Mapping[str, Fused]:
        """Return by name those of the ops of a segment that are not a kernel of their own."""

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[Shapes | None],
        outputs: Sequence[Shapes | None],
        sizes: Mapping[str, float],
        fused: Fused,
        /,
    ) -> NDArray[np.float64]:
        """Return the seconds of one op, (n,).

        Args:
            op: The operation.
            inputs: Local shapes (n, rank) of its inputs; None for an absent one.
            outputs: Local shapes (n, rank) of its outputs; None for an unwanted one.
            sizes: Bytes per element by the name the op knows the value by.
            fused: What is left to the op's own kernel.
        """

    def collective_seconds(self, collective: CollectiveKind, nbytes: float, axis: Axis, /) -> float:
        """Return the seconds of a collective over an axis; `nbytes` is the larger side on one device."""

    def exchange_seconds(self, nbytes: float, axis: Axis, /) -> float:
        """Return the seconds of a halo exchange over an axis in which each device sends `nbytes`."""

    def send_seconds(self, nbytes: float, tier: int, /) -> float:
        """Return the seconds from one device to another that it meets on a tier of the cluster."""

    def on(self, devices: range, /) -> "Costs":
        """Return the costs of work on some devices, where a cluster has several kinds of them."""


class Resource(StrEnum):
    """What a device has one of: its compute stream, its link inside the node, its share of the NICs."""

    COMPUTE = "compute"
    INTRA = "intra-node link"
    INTER = "inter-node link"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a segment: `resource` is busy with `name` from `offset` seconds after the segment starts on."""

    resource: Resource
    name: str
    offset: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """A collective that overlaps.

    Attributes:
        resource: Its link.
        name: Kind, axis and value.
        ready: Seconds after the start of the segment from which on it may run.
        seconds: Time on the link.
        after: Index, in the segment's list of traffic, of the last one whose result it needs; -1 if there is none.
    """

    resource: Resource
    name: str
    ready: float
    seconds: float
    after: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A segment in time.

    Attributes:
        compute_seconds: Sum over its ops.
        collective_seconds: Sum over the collectives that compute waits for.
        spans: Ops and those collectives, in order, end to end.
        traffic: Collectives that overlap, in order.
    """

    compute_seconds: float
    collective_seconds: float
    spans: tuple[Span, ...]
    traffic: tuple[Traffic, ...]

    @property
    def seconds(self) -> float:
        """Duration of the segment."""
        return self.compute_seconds + self.collective_seconds


def _shapes(operands: Sequence[Operand | None]) -> list[Shapes | None]:
    return [
        None if operand is None else np.array([operand.shape], dtype=np.int64).reshape(1, len(operand.shape))
        for operand in operands
    ]


def _fused(segment: Segment, costs: Costs) -> Mapping[str, Fused]:
    computes = [instruction for instruction in segment.instructions if isinstance(instruction, Compute)]
    ranks = {
        name: len(operand.shape)
        for compute in computes
        for name, operand in zip(
            (*compute.op.inputs, *compute.op.outputs), (*compute.inputs, *compute.outputs), strict=True
        )
        if operand is not None
    }
    return costs.fuse([compute.op for compute in computes], ranks)


def _op_seconds(compute: Compute, costs: Costs, fused: Fused) -> float:
    op = compute.op
    sizes = {
        name: operand.bytes / max(1, prod(operand.shape))
        for name, operand in zip((*op.inputs, *op.outputs), (*compute.inputs, *compute.outputs), strict=True)
        if operand is not None
    }
    return float(costs.op_seconds(op, _shapes(compute.inputs), _shapes(compute.outputs), sizes, fused)[0])


def _link(axis: Axis, costs: Costs) -> Resource:
    """Return the link that carries the collectives of an axis; the NIC if any part of them leaves the node."""
    inside = devices_in_node(axis, costs.cluster.devices_per_node)
    return Resource.INTRA if inside == axis.size else Resource.INTER


def lay_out(segment: Segment, costs: Costs) -> Layout:
    """Return the segment in time; everything in a `REDUCE` segment overlaps, whether marked or not."""
    compute_seconds = collective_seconds = offset = 0.0
    spans: list[Span] = []
    traffic: list[Traffic] = []
    fused = _fused(segment, costs)
    origin: dict[str, int] = {}  # value -> index of the traffic it comes from
    for instruction in segment.instructions:
        after = max((origin.get(operand.value, -1) for operand in reads(instruction)), default=-1)
        match instruction:
            case Compute():
                seconds = _op_seconds(instruction, costs, fused.get(instruction.op.name, ALONE))
                spans.append(Span(Resource.COMPUTE, instruction.op.name, offset, seconds))
                compute_seconds += seconds
                offset += seconds
            case Collective():
                axis = instruction.axis
                seconds = float(costs.collective_seconds(instruction.kind, instruction.bytes, axis))
                link = _link(axis, costs)
                name = f"{instruction.kind}[{axis.name}] {instruction.operand.value}"
                if instruction.overlaps or segment.phase is SegmentPhase.REDUCE:
                    traffic.append(Traffic(link, name, offset, seconds, after))
                    after = len(traffic) - 1
                else:
                    spans.append(Span(link, name, offset, seconds))
                    collective_seconds += seconds
                    offset += seconds
            case Exchange(axis=axis, operand=operand):
                seconds = float(costs.exchange_seconds(instruction.bytes, axis))
                spans.append(Span(_link(axis, costs), f"exchange[{axis.name}] {operand.value}", offset, seconds))
                collective_seconds += seconds
                offset += seconds
            case Slice():
                pass
            case _:
                assert_never(instruction)
        if after >= 0:
            origin.update((operand.value, after) for operand in defines(instruction))
    return Layout(compute_seconds, collective_seconds, tuple(spans), tuple(traffic))

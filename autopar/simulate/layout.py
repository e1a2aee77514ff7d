"""How long a segment takes and what it occupies: its instructions laid end to end.

Kernels follow each other. Collectives that compute waits for, and gathers of parameters, stop them for as long as the
formulas of `autopar.cost.overlap` say; the rest of their time the link works beside kernels of the same segment.
Collectives that overlap whole (gradient traffic) are only listed with the moment from which they may run. Each distinct
segment is laid out once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import fsum, prod
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import ALONE, Fused, Kernel, Overlap, Stack, rings
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.collectives import leaves_node
from autopar.cost.fusion import Work
from autopar.cost.learned_kernels import LearnedKernels
from autopar.cost.overlap import bucket_share, full_bucket, launched
from autopar.folding.graph_facts import BesideProducts
from autopar.ir.graph import Op
from autopar.ir.routing import Routed
from autopar.program.records import (
    HOST_PHASES,
    Collective,
    Compute,
    Exchange,
    Fetch,
    Offload,
    Operand,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    reads,
)
from autopar.program.units import unit_key, units_of
from autopar.sharding import Axis
from autopar.simulate.learned import learned_seconds

Shapes = NDArray[np.int64]
"""Local shapes, (n, rank), one row per strategy; the simulator asks for one."""


class Costs(Protocol):
    """What the simulator asks of a cost model; `autopar.cost.CostModel` is one."""

    @property
    def cluster(self) -> Cluster:
        """The hardware; the simulator reads which devices share a node."""

    @property
    def stack(self) -> Stack:
        """What the software makes of it; the simulator reads the scalars of overlap and of the step."""

    def fuse(
        self, ops: Sequence[Op], ranks: Mapping[str, int], stated: Sequence[Kernel] | None = None, /
    ) -> Mapping[str, Fused]:
        """Return by name those of the ops of a segment that are not a kernel of their own, `stated` ones if given."""

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

    @property
    def learned(self) -> LearnedKernels | None:
        """Learned seconds of fused groups; None if formulas count."""

    def host_seconds(self, op: Op, rank: int, fused: Fused, /) -> float:
        """Return the seconds in which the host launches an op whose first input has `rank` dims."""

    def collective_seconds(
        self, collective: CollectiveKind, nbytes: float, axis: Axis, routed: Routed | None = None, /
    ) -> float:
        """Return the seconds of a collective over an axis.

        Args:
            collective: What is done.
            nbytes: Bytes of the larger side on one device.
            axis: Over which devices.
            routed: Of rows of experts, which of these the tokens chose.
        """

    def exchange_seconds(self, nbytes: float, axis: Axis, /) -> float:
        """Return the seconds of a halo exchange over an axis in which each device sends `nbytes`."""

    def send_seconds(self, nbytes: float, tier: int, /) -> float:
        """Return the seconds from one device to another that it meets on a tier of the cluster."""

    def on(self, devices: range, /) -> "Costs":
        """Return the costs of work on some devices, where a cluster has several kinds of them."""

    def overlapped(self) -> "Costs":
        """Return the costs under a schedule that sends tokens beside the compute of another microbatch."""


class Resource(StrEnum):
    """What a device has one of: compute stream, link inside the node, share of the NICs, link to host memory."""

    COMPUTE = "compute"
    INTRA = "intra-node link"
    INTER = "inter-node link"
    TO_HOST = "link to the host"
    FROM_HOST = "link from the host"


NETWORK = (Resource.INTRA, Resource.INTER)
"""Links between devices."""


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
        seconds: Time on the link if it travels alone.
        after: Index, in the segment's list of traffic, of the last one whose result it needs; -1 if there is none.
        collective: What is done; collectives of one kind and axis may share a bucket.
        axis: Over which devices.
        nbytes: Bytes of the larger side.
    """

    resource: Resource
    name: str
    ready: float
    seconds: float
    after: int
    collective: CollectiveKind
    axis: Axis
    nbytes: float


@dataclass(frozen=True, slots=True)
class Stop:
    """A collective in line: after so many seconds of kernels devices of an axis meet, and wait for it so long."""

    at: float
    seconds: float
    axis: Axis


@dataclass(frozen=True, slots=True)
class Layout:
    """A segment in time.

    Attributes:
        compute_seconds: Sum over its kernels.
        collective_seconds: What collectives and gathers add to that.
        host_seconds: What the launching host adds to both.
        link_seconds: Link time of these collectives and gathers, hidden or not.
        gather_seconds: That of gathers alone.
        spans: Kernels in order, and these collectives and gathers in order.
        stops: Where devices wait for them.
        traffic: Collectives that overlap whole, in order.
        copy_seconds: What copies to or from host memory add to what they run beside.
        host_link_seconds: Their time on the host link, hidden or not.
        exchanges: Seconds by mesh axis of halo exchanges, of what a ring cannot hide, and of rows of experts in the
            backward; kernels wait for all.
    """

    compute_seconds: float
    collective_seconds: float
    host_seconds: float
    link_seconds: float
    gather_seconds: float
    spans: tuple[Span, ...]
    stops: tuple[Stop, ...]
    traffic: tuple[Traffic, ...]
    copy_seconds: float = 0.0
    host_link_seconds: float = 0.0
    exchanges: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """Duration of the segment."""
        return self.compute_seconds + self.collective_seconds + self.host_seconds + self.copy_seconds


def shapes_of(operands: Sequence[Operand | None]) -> list[Shapes | None]:
    """Return the local shapes of operands as the cost model takes them, one row each."""
    return [
        None if operand is None else np.array([operand.shape], dtype=np.int64).reshape(1, len(operand.shape))
        for operand in operands
    ]


def stated_kernels(computes: Sequence[Compute]) -> list[Kernel] | None:
    """Return the kernels that a plan states for the ops of a segment; None if it states none."""
    members: dict[str, list[Compute]] = {}
    for compute in computes:
        if compute.kernel:
            members.setdefault(compute.kernel, []).append(compute)
    kernels = (
        Kernel(tuple(own.op.name for own in group), tuple(name for own in group for name in own.again))
        for group in members.values()
    )
    return list(kernels) or None


def fused_in(segment: Segment, costs: Costs) -> Mapping[str, Fused]:
    """Return by name those of the ops of a segment that are not kernels of their own."""
    computes = [instruction for instruction in segment.instructions if isinstance(instruction, Compute)]
    ranks = ranks_of(computes)
    stated = stated_kernels(computes)
    ops = [compute.op for compute in computes]
    return costs.fuse(ops, ranks) if stated is None else costs.fuse(ops, ranks, stated)


def ranks_of(computes: Sequence[Compute]) -> dict[str, int]:
    """Return the number of dims of the values of some ops, by name."""
    return {
        name: len(operand.shape)
        for compute in computes
        for name, operand in zip(
            (*compute.op.inputs, *compute.op.outputs), (*compute.inputs, *compute.outputs), strict=True
        )
        if operand is not None
    }


def _repeated_seconds(segment: Segment, costs: Costs) -> Mapping[str, float]:
    """Return the seconds of what kernels run again besides their own ops, by the first op of the kernel."""
    computes = {item.op.name: item for item in segment.instructions if isinstance(item, Compute)}
    stated = stated_kernels(list(computes.values())) or ()
    if not any(kernel.again for kernel in stated):
        return {}
    work = Work.of([compute.op for compute in computes.values()], ranks_of(list(computes.values())), costs.stack.fusion)
    return {
        kernel.ops[0]: fsum(
            compute_seconds(computes[name], costs, fused) for name, fused in work.repeated(kernel).items()
        )
        for kernel in stated
        if kernel.again
    }


def _learned(segment: Segment, fused: Mapping[str, Fused], costs: Costs) -> Mapping[str, float]:
    """Return the seconds of ops by learned costs; none if formulas count."""
    if costs.learned is None:
        return {}
    computes = [item for item in segment.instructions if isinstance(item, Compute)]
    return learned_seconds(segment, fused, stated_kernels(computes) or (), ranks_of(computes), costs.learned)


def element_bytes(compute: Compute) -> dict[str, float]:
    """Return the bytes of an element of what an op reads and makes, by the name the op knows it by."""
    op = compute.op
    return {
        name: operand.bytes / max(1, prod(operand.shape))
        for name, operand in zip((*op.inputs, *op.outputs), (*compute.inputs, *compute.outputs), strict=True)
        if operand is not None
    }


def compute_seconds(compute: Compute, costs: Costs, fused: Fused) -> float:
    """Return the seconds of the kernels of an op of a segment."""
    op, sizes = compute.op, element_bytes(compute)
    return float(costs.op_seconds(op, shapes_of(compute.inputs), shapes_of(compute.outputs), sizes, fused)[0])


def _host_seconds(compute: Compute, costs: Costs, fused: Fused) -> float:
    first = next((operand for operand in compute.inputs if operand is not None), None)
    return float(costs.host_seconds(compute.op, 0 if first is None else len(first.shape), fused))


def _link(axis: Axis, costs: Costs) -> Resource:
    """Return the link that carries the collectives of an axis; the NIC if any part of them leaves the node."""
    return Resource.INTER if leaves_node(axis, costs.cluster.devices_per_node) else Resource.INTRA


class _Way(Enum):
    """How a collective in line runs: whole; in chunks beside the product next to it; or early, as gathers do.

    Rows of experts run as gathers do where they travel beside the compute of another microbatch.
    """

    WHOLE = 0
    CHUNKED = 1
    EARLY = 2


@dataclass(slots=True)
class _Wait:
    """A collective in line: after how many seconds of kernels it is needed, and how it runs beside them."""

    link: Resource
    name: str
    at: float
    seconds: float
    way: _Way
    axis: Axis


class _Chunks:
    """The collectives of a segment that may run in chunks beside the products next to them.

    Args:
        segment: What its products are looked up in.
    """

    def __init__(self, segment: Segment) -> None:
        self._origin: dict[str, str] = {}  # name of a value, changed in placement -> the one it began with
        for move in segment.instructions:
            if isinstance(move, Collective | Slice):
                self._origin[move.result.value] = self._origin.get(move.operand.value, move.operand.value)
        self._beside = BesideProducts.of(part.op for part in segment.instructions if isinstance(part, Compute))

    def __contains__(self, collective: Collective) -> bool:
        """Return whether a product reads what it gathers, or makes what it scatters."""
        name = self._origin[collective.result.value]
        return collective.routed is None and collective.kind in self._beside.collectives(name)


def _covering(segment: Segment) -> set[int]:
    """Return the kernels, by position, that only make the gradient of one parameter: collectives run beside them."""
    stored = {store.value.value for store in segment.stores}
    leaving = {operand.value for operand in (*segment.outputs, *segment.exports, *segment.saved)}
    reached: dict[str, frozenset[str]] = {}  # value -> the sums it goes into, with "" if it leaves the block
    found = set()
    for position in reversed(range(len(segment.instructions))):
        instruction = segment.instructions[position]
        ends: frozenset[str] = frozenset()
        for operand in defines(instruction):
            name = operand.value
            ends |= reached.get(name, frozenset())
            ends |= {name} if name in stored else {""} if name in leaving else set()
        for operand in reads(instruction):
            reached[operand.value] = reached.get(operand.value, frozenset()) | ends
        if isinstance(instruction, Compute | Exchange) and len(ends) == 1 and ends <= stored:
            found.add(position)
    return found


def lay_out(segment: Segment, costs: Costs, bucket: float | None = None) -> Layout:
    """Return the segment in time; everything in a `REDUCE` segment overlaps, whether marked or not.

    Args:
        segment: What to lay out.
        costs: What it is made of takes.
        bucket: Bytes of new parameters that travel together, as of `full_bucket`.
    """
    if segment.phase in HOST_PHASES:
        return _lay_out_copies(segment, costs.cluster)
    is_backward = segment.phase is SegmentPhase.BACKWARD
    covering = _covering(segment) if is_backward else set()
    kernels, weight, launches, hidden = 0.0, 0.0, 0.0, 0.0
    exchanges: list[tuple[str, float]] = []
    spans: list[Span] = []
    waits: list[_Wait] = []
    traffic: list[Traffic] = []
    fused, repeated = fused_in(segment, costs), _repeated_seconds(segment, costs)
    learned = _learned(segment, fused, costs)
    origin: dict[str, int] = {}  # value -> index of the traffic it comes from
    beside = _Chunks(segment) if costs.stack.hides_tp else None
    there = {operand.value for operand in segment.external}  # what is known before the pass, at any placement
    units = units_of(segment)
    for position, instruction in enumerate(segment.instructions):
        after = max((origin.get(operand.value, -1) for operand in reads(instruction)), default=-1)
        match instruction:
            case Compute():
                name = instruction.op.name
                if name in learned:
                    seconds = learned[name]
                else:
                    seconds = compute_seconds(instruction, costs, fused.get(name, ALONE)) + repeated.get(name, 0.0)
                spans.append(Span(Resource.COMPUTE, instruction.op.name, kernels, seconds))
                kernels += seconds
                weight += seconds if position in covering else 0.0
                launches += _host_seconds(instruction, costs, fused.get(instruction.op.name, ALONE))
                ring = instruction.ring
                if ring is not None:  # what of its transfers does not run beside its own kernels
                    steps, sent = instruction.ring_steps, costs.exchange_seconds(instruction.passed_bytes, ring)
                    transfers = rings.all_transfers(sent, steps)
                    shown = float(rings.added_seconds(seconds, transfers, steps, costs.stack))
                    hidden += transfers - shown
                    if shown:
                        name = f"ring[{ring.name}] {instruction.op.name}"
                        spans.append(Span(_link(ring, costs), name, kernels, shown))
                        kernels += shown
                        exchanges.append((ring.name, shown))
            case Collective():
                axis, kind, link = instruction.axis, instruction.kind, _link(instruction.axis, costs)
                name = f"{kind}[{axis.name}] {instruction.operand.value}"
                members = [instruction]
                if instruction.unit:  # all of its unit travels with the first
                    members = units.pop(unit_key(instruction), [])
                    if not members:
                        there.add(instruction.result.value)
                        continue
                    if len(members) > 1:
                        name = f"{kind}[{axis.name}] of {len(members)} parameters"
                nbytes = fsum(member.bytes for member in members)
                seconds = float(costs.collective_seconds(kind, nbytes, axis, instruction.routed))
                if instruction.overlaps or segment.phase is SegmentPhase.REDUCE:
                    traffic.append(Traffic(link, name, kernels, seconds, after, kind, axis, instruction.bytes))
                    after = len(traffic) - 1
                elif segment.phase is SegmentPhase.UPDATE:
                    many = float(bucket_share(instruction.bytes, full_bucket(axis, bucket)))
                    seconds = float(costs.collective_seconds(kind, many * instruction.bytes, axis)) / many
                    waits.append(_Wait(link, name, kernels, seconds, _Way.WHOLE, axis))
                elif instruction.routed is not None and not costs.stack.hides_dispatch and is_backward:
                    # The products of the experts stand between it and those of the weights that it could run beside.
                    spans.append(Span(link, name, kernels, seconds))
                    kernels += seconds
                    exchanges.append((axis.name, seconds))
                else:
                    way = _Way.CHUNKED if beside is not None and instruction in beside else _Way.WHOLE
                    if (
                        instruction.unit
                        or instruction.operand.value in there
                        or (instruction.routed and costs.stack.hides_dispatch)
                    ):
                        way = _Way.EARLY
                    waits.append(_Wait(link, name, kernels, seconds, way, axis))
            case Exchange(axis=axis, operand=operand):
                # It belongs to the op that follows, which needs it at once.
                seconds = float(costs.exchange_seconds(instruction.bytes, axis))
                spans.append(Span(_link(axis, costs), f"exchange[{axis.name}] {operand.value}", kernels, seconds))
                kernels += seconds
                exchanges.append((axis.name, seconds))
                weight += seconds if position in covering else 0.0
            case Slice():
                pass
            case Offload() | Fetch():
                raise AssertionError("copies are in segments of their own")
            case _:
                assert_never(instruction)
        if after >= 0:
            origin.update((operand.value, after) for operand in defines(instruction))
        if isinstance(instruction, Collective | Slice) and instruction.operand.value in there:
            there.add(instruction.result.value)

    exchanged = fsum(seconds for _, seconds in exchanges)
    overlap = Overlap.of(costs.stack)
    alone = [fsum(wait.seconds for wait in waits if wait.way is way) for way in _Way]
    added: Sequence[float] = alone
    if segment.phase is not SegmentPhase.UPDATE and waits:
        added = [float(seconds) for seconds in overlap.added(kernels, weight, *alone)]
    share = {way: paid / taken if taken else 0.0 for way, taken, paid in zip(_Way, alone, added, strict=True)}
    busy = kernels + sum(added)
    host = 0.0 if segment.phase is SegmentPhase.UPDATE else float(launched(busy, launches)) - busy
    return Layout(
        compute_seconds=kernels - exchanged,
        collective_seconds=exchanged + sum(added),
        host_seconds=host,
        link_seconds=exchanged + hidden + sum(alone),
        gather_seconds=alone[_Way.EARLY.value],
        spans=tuple(_in_place(spans, waits, share)),
        stops=tuple(Stop(wait.at, wait.seconds * share[wait.way], wait.axis) for wait in waits),
        traffic=tuple(traffic),
        exchanges=tuple(exchanges),
    )


def _lay_out_copies(segment: Segment, cluster: Cluster) -> Layout:
    """Return copies to or from host memory one after the other, as if nothing ran beside them."""
    copies = [copy for copy in segment.instructions if isinstance(copy, Offload | Fetch)]
    total = fsum(copy.bytes for copy in copies)
    if not total:
        return Layout(0.0, 0.0, 0.0, 0.0, 0.0, (), (), ())
    host = cluster.known_host()
    out = isinstance(copies[0], Offload)
    seconds = host.out_seconds(total) if out else host.back_seconds(total)
    resource = Resource.TO_HOST if out else Resource.FROM_HOST
    spans, clock = [], 0.0
    for copy in copies:
        if copy.bytes:  # the latency is shared like the time: copies wait for each other in one queue
            spent = seconds * copy.bytes / total
            spans.append(Span(resource, f"{'offload' if out else 'fetch'} {copy.operand.value}", clock, spent))
            clock += spent
    return Layout(0.0, 0.0, 0.0, 0.0, 0.0, tuple(spans), (), (), seconds, seconds)


def beside(copies: Layout, cover: float, added: float, *, late: bool) -> Layout:
    """Return copies that add so many seconds to a pass of `cover` seconds and run beside the rest of it.

    Args:
        copies: Laid out alone.
        cover: What they run beside.
        added: What they add.
        late: Whether they follow the pass; else they come before it.
    """
    shift = added - copies.host_link_seconds if late else 0.0
    assert shift >= -cover * (1 + 1e-9), "copies fit beside what they run beside"
    spans = tuple(replace(span, offset=span.offset + shift) for span in copies.spans)
    return replace(copies, spans=spans, copy_seconds=added)


def _in_place(spans: Sequence[Span], waits: Sequence[_Wait], share: Mapping[_Way, float]) -> list[Span]:
    """Return kernels with the pauses that collectives make, and the collectives, which share one line.

    Args:
        spans: Kernels end to end.
        waits: Collectives in order.
        share: What of a collective is waited for.
    """
    placed: list[Span] = []
    ends: list[float] = []  # when each collective has to be done
    pause, following = 0.0, 0
    for span in spans:
        while following < len(waits) and waits[following].at <= span.offset:
            wait = waits[following]
            pause += wait.seconds * share[wait.way]
            ends.append(wait.at + pause)
            following += 1
        placed.append(replace(span, offset=span.offset + pause))
    for wait in waits[following:]:
        pause += wait.seconds * share[wait.way]
        ends.append(wait.at + pause)
    starts = [end - wait.seconds for end, wait in zip(ends, waits, strict=True)]
    for i in reversed(range(len(starts) - 1)):  # as late as the next one lets it
        starts[i] = min(starts[i], starts[i + 1] - waits[i].seconds)
    clock = 0.0
    for start, wait in zip(starts, waits, strict=True):  # but not before the segment
        clock = max(clock, start)
        placed.append(Span(wait.link, wait.name, clock, wait.seconds))
        clock += wait.seconds
    return placed

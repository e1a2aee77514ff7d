"""The distinct events of lowered plans: what has to be timed to know the time of every instruction.

Look here for what DistSim calls event extraction. Blocks of one kind share their instructions, devices of a stage and
microbatches repeat them, so that the number of distinct events depends on the kinds of blocks and on the local shapes,
not on layers, microbatches or replicas. Transfers are found by running the simulator with a cost model that records
each transfer it prices.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import CostModel, Fused, Kernel, Stack, devices_in_node
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.learned_kernels import LearnedKernels
from autopar.events import Event, OpEvent, PieceEvent, TensorType, TransferEvent, event_id
from autopar.folding.fold import Folded
from autopar.ir.graph import Op, Phase
from autopar.ir.routing import Routed
from autopar.profile.timed_tasks import Feed, Port, Task, Work
from autopar.program.records import (
    HOST_PHASES,
    Collective,
    Compute,
    HostCopy,
    Offload,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    reads,
)
from autopar.ranks.lowered import Lowered
from autopar.ranks.segments import RunModel, SegmentCompiler
from autopar.ranks.step_data import Batches
from autopar.sharding import Axis, Shard
from autopar.simulate.engine import run_shares
from autopar.simulate.layout import Shapes

ONCE = (SegmentPhase.REDUCE, SegmentPhase.UPDATE, SegmentPhase.STATE_FETCH, SegmentPhase.STATE_OFFLOAD)
"""Phases that run once per step; the others run once per microbatch."""
BUCKETS = (None, 0.0)
"""Sizes of gradient buckets whose transfers are events: those of frameworks, and each gradient alone."""


@dataclass(slots=True)
class Extraction:
    """Distinct events of plans.

    Attributes:
        tasks: One per distinct event, by name.
        naive: Instructions of the plans if every device, microbatch and layer counts.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    naive: int = 0

    def add(self, task: Task) -> None:
        """Add an event unless it is known."""
        self.tasks.setdefault(task.id, task)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of distinct events by type."""
        return Counter(name.partition("-")[0] for name in self.tasks)


def extract(program: Program, folded: Folded, costs: CostModel, into: Extraction) -> None:
    """Add the events of a program.

    Args:
        program: The lowered plan.
        folded: The graph it was lowered from.
        costs: Hardware and bytes per element.
        into: What is known of other plans.
    """
    lowered = Lowered(program, folded)
    for task in _compute_tasks(lowered):
        into.add(task)
    for event in _transfers(program, costs):
        into.add(Task(event))
    into.naive += unrolled(program)


def unrolled(program: Program) -> int:
    """Return the instructions of a step if every device, microbatch and layer counts."""
    table, total = program.table(), 0
    sizes = {key: len(segment.instructions) for key, segment in table.items()}
    for stage in program.stages:
        for kind in stage.blocks:
            for phase in SegmentPhase:
                times = 1 if phase in ONCE else program.num_microbatches
                total += sizes.get((kind, phase), 0) * times * stage.num_devices
    return total


def _compute_tasks(lowered: Lowered) -> Iterable[Task]:
    """Yield ops and pieces, each kind of block once per group of devices."""
    batches, seen = Batches(lowered.graph, 0), set()
    for group in range(lowered.program.num_groups):
        compiler = SegmentCompiler(lowered, group, 0)
        blocks = [block for stage in lowered.stages_of(group) for block in lowered.blocks_of(stage)]
        for block in blocks:
            kind = lowered.blocks[block][1]
            for phase in SegmentPhase:
                segment = lowered.segment(block, phase)
                if segment is None or phase in HOST_PHASES or (kind, phase) in seen:
                    continue
                seen.add((kind, phase))
                limits = _limits(lowered, block, segment, batches)
                for single in compiler.single_ops(block, phase):
                    (instruction,) = single.run.instructions
                    assert isinstance(instruction, Compute), "asked for ops"
                    yield Task(op_event(instruction, lowered.dtypes(segment)), _work(single, limits))
                for piece in compiler.pieces(block, phase):
                    event = _piece_event(piece, kind, phase, lowered.dtypes(segment))
                    if event.ops:
                        yield Task(event, _work(piece, limits))


def op_event(compute: Compute, types: Mapping[str, str]) -> OpEvent:
    """Return the event of an op.

    Args:
        compute: The op on local shapes.
        types: Element type by name of value.
    """

    def described(operands: Sequence[Operand | None]) -> tuple[TensorType | None, ...]:
        return tuple(
            None
            if operand is None
            else TensorType(operand.shape, round(operand.bytes / max(1, prod(operand.shape)), 3), types[operand.value])
            for operand in operands
        )

    op = compute.op
    return OpEvent(op.kind, described(compute.inputs), described(compute.outputs), op.attrs, op.phase is Phase.UPDATE)


def _piece_event(piece: RunModel, kind: int, phase: SegmentPhase, types: Mapping[str, str]) -> PieceEvent:
    """Return the event of a piece: which ops it consists of, and how they are wired."""
    numbers: dict[str, int] = {}
    wiring: list[object] = []
    found: Counter[str] = Counter()
    for instruction in piece.run.instructions:
        if isinstance(instruction, Compute):
            name = event_id(op_event(instruction, types))
            found[name] += 1
        else:
            assert isinstance(instruction, Slice), "pieces compute and slice"
            name = f"slice {instruction.operand.shape} {instruction.result.shape}"
        ends = (*reads(instruction), *defines(instruction))
        wiring.append((name, [numbers.setdefault(operand.value, len(numbers)) for operand in ends]))
    wiring.append(sorted(numbers.get(port.name, -1) for port in piece.outputs))
    digest = hashlib.sha256(repr(wiring).encode()).hexdigest()[:16]
    return PieceEvent(str(phase), tuple(sorted(found.items())), digest, f"block kind {kind}, {len(wiring) - 1} ops")


def _limits(lowered: Lowered, block: int, segment: Segment, batches: Batches) -> Mapping[str, int]:
    """Return below what whole numbers are drawn, by value of a segment that is data of the model."""
    found = {}
    for value, tensor in lowered.tensors(block, segment).items():
        limit = batches.limit(tensor)
        if limit is not None:
            found[value] = limit
    return found


def _work(model: RunModel, limits: Mapping[str, int]) -> Work:
    own = dict(limits)
    for instruction in model.run.instructions:  # a table's rows are what its indices choose from
        if isinstance(instruction, Compute) and instruction.op.kind == "Gather":
            table, indices = instruction.inputs[:2]
            axis = instruction.op.attr("axis", 0)
            if table is not None and indices is not None and isinstance(axis, int):
                own[indices.value] = min(own.get(indices.value, table.shape[axis]), table.shape[axis])
    feeds = tuple(Feed(port.name, port.shape, port.dtype, own.get(port.name)) for port in model.inputs)
    return Work(model.model, feeds, tuple(Port(port.name, port.shape, port.dtype) for port in model.outputs))


class _Asked:
    """A cost model that notes which transfers the simulator asks for."""

    def __init__(self, costs: CostModel, found: dict[str, TransferEvent], inner: Mapping[object, bool]) -> None:
        self._costs, self._found, self._inner = costs, found, inner

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return self._costs.cluster

    @property
    def stack(self) -> Stack:
        """The software."""
        return self._costs.stack

    @property
    def learned(self) -> LearnedKernels | None:
        """The learned seconds of fused groups; None if formulas count."""
        return self._costs.learned

    def fuse(
        self, ops: Sequence[Op], ranks: Mapping[str, int], stated: Sequence[Kernel] | None = None, /
    ) -> Mapping[str, Fused]:
        """Return what is fused."""
        return self._costs.fuse(ops, ranks, stated)

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[Shapes | None],
        outputs: Sequence[Shapes | None],
        sizes: Mapping[str, float],
        fused: Fused,
        /,
    ) -> NDArray[np.float64]:
        """Return the seconds of an op."""
        return self._costs.op_seconds(op, inputs, outputs, sizes, fused)

    def host_seconds(self, op: Op, rank: int, fused: Fused, /) -> float:
        """Return the seconds of the host."""
        return self._costs.host_seconds(op, rank, fused)

    def collective_seconds(
        self, collective: CollectiveKind, nbytes: float, axis: Axis, routed: Routed | None = None, /
    ) -> float:
        """Return the seconds of a collective, and note it."""
        if axis.size > 1:
            inside = devices_in_node(axis, self.cluster.devices_per_node)
            inner = self._inner.get((collective, nbytes, axis), False)
            self._note(TransferEvent(str(collective), nbytes, axis.size, inside, inner))
        return self._costs.collective_seconds(collective, nbytes, axis, routed)

    def exchange_seconds(self, nbytes: float, axis: Axis, /) -> float:
        """Return the seconds of a halo exchange, and note what is sent."""
        if axis.size > 1 and nbytes > 0:
            inside = devices_in_node(axis, self.cluster.devices_per_node)
            self._note(TransferEvent("send", nbytes, 2, min(2, inside)))
        return self._costs.exchange_seconds(nbytes, axis)

    def send_seconds(self, nbytes: float, tier: int, /) -> float:
        """Return the seconds of a send, and note it."""
        if nbytes > 0:
            self._note(TransferEvent("send", nbytes, 2, 1 if tier else 2))
        return self._costs.send_seconds(nbytes, tier)

    def on(self, devices: range, /) -> "_Asked":
        """Return the costs of work on some devices."""
        return _Asked(self._costs.on(devices), self._found, self._inner)

    def overlapped(self) -> "_Asked":
        """Return the costs under a schedule that sends tokens beside the compute of another microbatch."""
        return _Asked(self._costs.overlapped(), self._found, self._inner)

    def _note(self, event: TransferEvent) -> None:
        self._found.setdefault(event_id(event), event)


def _transfers(program: Program, costs: CostModel) -> Iterable[Event]:
    """Return the transfers that the simulator asks for, with either size of buckets, and the copies to the host."""
    found: dict[str, TransferEvent] = {}
    inner: dict[object, bool] = {}
    for segment in program.segments:
        copied = sum(each.bytes for each in segment.instructions if isinstance(each, HostCopy))
        if copied:
            out = any(isinstance(each, Offload) for each in segment.instructions)
            event = TransferEvent("offload" if out else "fetch", copied, 1, 1)
            found.setdefault(event_id(event), event)
        for each in segment.instructions:
            if isinstance(each, Collective):
                ends = (each.source, each.target)
                cut = any(isinstance(end, Shard) and end.dim > 0 for end in ends)
                inner.setdefault((each.kind, each.bytes, each.axis), cut)
    for bucket in BUCKETS:
        run_shares(program, _Asked(costs, found, inner), bucket=bucket)
    return found.values()

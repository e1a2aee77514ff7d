"""Estimates: thousands of plans by degrees of one model, by formula from tables that they share.

What a block takes depends on the tensor and context degrees, on ZeRO, on sequence parallelism and on the samples of a
device. A table is made for each combination of these that occurs: the blocks are placed and lowered as for any plan,
on two data-parallel devices, and laid out as for the event simulator. The data-parallel degree only changes how long
collectives over its axis take, how much of the update a device does and how much of the optimizer's state it holds,
which is worked out from the same instructions. What is left (pipeline degree, microbatches, schedule, interleaving,
recompute) goes through the formula that the planner minimises, `autopar.formulate.step`.

So an estimate differs from a prediction by what the formula leaves out of the event simulator: buckets that are not
full, traffic that waits for other traffic, uneven waits in a pipeline. The tests hold it to that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import BUCKET_BYTES, DEFAULT, CostModel, Fused, Overlap, Resharder, Stack
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.policy import MIXED, DtypePolicy
from autopar.degrees import Degrees
from autopar.errors import JobError
from autopar.formulate.fold import Folded
from autopar.formulate.step import Pipeline, Split, StageTimes, stage_times, time_of
from autopar.formulate.tables import Slot
from autopar.ir.graph import Op, Phase
from autopar.prediction import Predictor, kernels
from autopar.program.lower import LoweredKind, lower_blocks
from autopar.program.records import HOST_PHASES, Category, Collective, Segment, SegmentPhase
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Pass
from autopar.sharding import Axis
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.layout import Layout, Shapes, lay_out
from autopar.simulate.memory import StageMemory, received_bytes, stage_memory
from autopar.tactics.by_degrees import ranges_by_degrees

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_REFERENCE = 2  # data-parallel devices of a table
_SHARED_FROM = {Category.OPTIMIZER: 1, Category.GRADIENTS: 2, Category.PARAMETERS: 3}
"""ZeRO stage from which on data-parallel devices share what a category holds."""
_ROUNDS = 2
_PASSES = (Pass.FORWARD, Pass.BACKWARD)
_FORMULA = ("1f1b", "gpipe", "interleaved", "forward-only")


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """What plans come to, (plans,) each: seconds of a step, and bytes on the fullest device."""

    step_seconds: FloatArray
    peak_bytes: FloatArray


@dataclass(frozen=True, slots=True)
class _Scaled:
    """The costs of a table for another data-parallel degree; what costs the simulator asks for.

    Attributes:
        costs: Those of the cluster.
        degree: Data-parallel degree.
        share: What a device does of the update it does in the table.
        known: Seconds of ops that do not depend on the degree, by name.
    """

    costs: CostModel
    degree: int
    share: float
    known: dict[str, NDArray[np.float64]]

    @property
    def cluster(self) -> Cluster:
        return self.costs.cluster

    @property
    def stack(self) -> Stack:
        return self.costs.stack

    def on(self, devices: range, /) -> "_Scaled":
        return self

    def fuse(self, ops: Sequence[Op], ranks: Mapping[str, int], /) -> Mapping[str, Fused]:
        return self.costs.fuse(ops, ranks)

    def host_seconds(self, op: Op, rank: int, fused: Fused, /) -> float:
        return self.costs.host_seconds(op, rank, fused)

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[Shapes | None],
        outputs: Sequence[Shapes | None],
        sizes: Mapping[str, float],
        fused: Fused,
        /,
    ) -> NDArray[np.float64]:
        if op.phase is Phase.UPDATE and self.share != 1.0:
            read, made = ([_part(shape, self.share) for shape in shapes] for shapes in (inputs, outputs))
            return self.costs.op_seconds(op, read, made, sizes, fused)
        if op.name not in self.known:
            self.known[op.name] = self.costs.op_seconds(op, inputs, outputs, sizes, fused)
        return self.known[op.name]

    def collective_seconds(self, collective: CollectiveKind, nbytes: float, axis: Axis, /) -> float:
        return self.costs.collective_seconds(collective, nbytes, self.axis(axis))

    def exchange_seconds(self, nbytes: float, axis: Axis, /) -> float:
        return self.costs.exchange_seconds(nbytes, self.axis(axis))

    def send_seconds(self, nbytes: float, tier: int, /) -> float:
        return self.costs.send_seconds(nbytes, tier)

    def axis(self, axis: Axis) -> Axis:
        """Return the axis of this degree."""
        return replace(axis, size=self.degree) if axis.name == "dp" else axis


def _part(shape: Shapes | None, share: float) -> Shapes | None:
    """Return shapes with `share` of their elements, those of single numbers as they are."""
    if shape is None or shape.shape[1] == 0 or shape.prod() == 1:
        return shape
    smaller = shape.copy()
    smaller[:, 0] = np.maximum(1, np.rint(shape[:, 0] * share))
    return smaller


@dataclass(eq=False)
class _Table:
    """What plans of equal tensor and context degrees, ZeRO, sequence parallelism and samples share.

    Attributes:
        folded: The graph on the reference devices.
        kinds: Its blocks, lowered.
        costs: Of the cluster.
        zero: ZeRO stage.
        reference: Data-parallel degree it was lowered for.
    """

    folded: Folded
    kinds: Mapping[int, LoweredKind]
    costs: CostModel
    zero: int
    reference: int
    _ops: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _seconds: dict[int, FloatArray] = field(default_factory=dict)
    _layouts: dict[tuple[int, SegmentPhase], Layout] = field(default_factory=dict)
    _memory: dict[object, StageMemory] = field(default_factory=dict)
    _stages: dict[object, StageTimes] = field(default_factory=dict)
    _live: dict[object, FloatArray] = field(default_factory=dict)
    _resident: dict[object, FloatArray] = field(default_factory=dict)
    _ranges: dict[object, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @cached_property
    def segments(self) -> dict[tuple[int, SegmentPhase], Segment]:
        """The instructions by kind and phase."""
        return {(segment.kind, segment.phase): segment for kind in self.kinds.values() for segment in kind.segments}

    @cached_property
    def memories(self) -> BlockMemories:
        """The memory of the kinds of blocks."""
        return BlockMemories(self.segments, self.trains)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(phase is SegmentPhase.BACKWARD for _, phase in self.segments)

    def seconds(self, degree: int) -> FloatArray:
        """Return the seconds of one block by kind and slot for a data-parallel degree, as `Tables.block_seconds`."""
        if degree not in self._seconds:
            share = self.reference / degree if self.zero else 1.0
            view = _Scaled(self.costs, degree, share, self._ops)
            found = np.zeros((len(self.folded.kinds), len(Slot)))
            for (kind, phase), segment in self.segments.items():
                if phase in HOST_PHASES:
                    continue
                if (kind, phase) not in self._layouts:
                    layout = lay_out(segment, view)
                    if not self._depends(segment):
                        self._layouts[kind, phase] = layout
                else:
                    layout = self._layouts[kind, phase]
                self._add(found[kind], phase, layout, view)
            self._seconds[degree] = found
        return self._seconds[degree]

    def _depends(self, segment: Segment) -> bool:
        """Whether what a segment takes depends on the data-parallel degree."""
        if segment.phase is SegmentPhase.UPDATE and self.zero:
            return True
        return any(isinstance(part, Collective) and part.axis.name == "dp" for part in segment.instructions)

    def _add(self, row: FloatArray, phase: SegmentPhase, layout: Layout, view: _Scaled) -> None:
        traffic = 0.0
        for item in layout.traffic:
            whole = max(item.nbytes, BUCKET_BYTES)
            traffic += item.nbytes / whole * view.collective_seconds(item.collective, whole, item.axis)
        match phase:
            case SegmentPhase.FORWARD:
                row[Slot.FORWARD], row[Slot.FORWARD_GATHER] = layout.seconds, layout.gather_seconds
            case SegmentPhase.AGAIN:
                row[Slot.SELECTIVE], row[Slot.SELECTIVE_GATHER] = layout.seconds, layout.gather_seconds
            case SegmentPhase.BACKWARD:
                row[Slot.BACKWARD], row[Slot.BACKWARD_GATHER] = layout.seconds, layout.gather_seconds
                row[Slot.GRADIENT] = traffic
            case SegmentPhase.REDUCE:
                row[Slot.REDUCE] = traffic
            case SegmentPhase.UPDATE:
                row[Slot.UPDATE] = layout.seconds

    def ranges(self, degrees: Degrees) -> tuple[tuple[int, int], ...]:
        """Return the blocks of every stage."""
        key = (degrees.num_stages, degrees.layers)
        if key not in self._ranges:
            self._ranges[key] = ranges_by_degrees(degrees, self.folded)
        return self._ranges[key]

    def stages(self, degrees: Degrees) -> StageTimes:
        """Return the seconds of the stages of a plan."""
        key = (degrees.dp, degrees.recompute, degrees.num_stages, degrees.layers)
        if key not in self._stages:
            totals = self.seconds(degrees.dp).copy()
            for kind in self.folded.kinds:
                if kind.count > 1 and degrees.recompute != Recompute.NONE:  # what surrounds layers recomputes nothing
                    full = degrees.recompute == Recompute.FULL
                    totals[kind.id, Slot.BACKWARD] += totals[kind.id, Slot.FORWARD if full else Slot.SELECTIVE]
                    gathers = Slot.FORWARD_GATHER if full else Slot.SELECTIVE_GATHER
                    totals[kind.id, Slot.BACKWARD_GATHER] += totals[kind.id, gathers]
            ranges = self.ranges(degrees)
            split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
            self._stages[key] = stage_times(totals, self.folded.chain, split, Overlap.of(self.costs.stack))
        return self._stages[key]

    def hop(self, degrees: Degrees) -> float:
        """Return the mean seconds from a stage to the next, and back."""
        ranges = self.ranges(degrees)
        devices = degrees.dp * degrees.cp * degrees.tp
        chain, cluster = self.folded.chain, self.costs.cluster
        seconds = []
        for (_, stop), group in zip(ranges[:-1], range(len(ranges) - 1), strict=True):
            here, there = (number % degrees.pp * devices for number in (group, group + 1))
            tier = max(cluster.tier(here, there), cluster.tier(here + devices - 1, there + devices - 1))
            for segment in (
                self.segments[chain[stop - 1], SegmentPhase.FORWARD],
                self.segments.get((chain[stop], SegmentPhase.BACKWARD)),
            ):
                if segment is not None:
                    size = sum(operand.bytes for operand in segment.outputs)
                    seconds.append(self.costs.send_seconds(size, tier))
        return float(np.mean(seconds)) if seconds and degrees.pp > 1 else 0.0

    def peak(self, degrees: Degrees) -> float:
        """Return the bytes on the fullest device."""
        count = degrees.num_microbatches
        if degrees.schedule != "gpipe":  # more rounds of microbatches than a few fill no device further
            count = min(count, _ROUNDS * degrees.pp)
        shape = (degrees.recompute, degrees.num_stages, degrees.layers)
        key = (*shape, degrees.pp, count, _schedule(degrees))
        if key not in self._live:
            self._live[key] = self._live_bytes(degrees, count)
        held = (degrees.dp, *shape, degrees.pp)
        if held not in self._resident:
            self._resident[held] = self._resident_bytes(degrees)
        return float((self._resident[held] + self._live[key]).max())

    def _live_bytes(self, degrees: Degrees, count: int) -> FloatArray:
        """Return the bytes that come and go at the fullest moment of each group of devices, (groups,)."""
        ranges = self.ranges(degrees)
        last = len(ranges) - 1
        stages = [
            self._stage(self.folded.chain[start:stop], degrees.recompute, index == 0, index == last)
            for index, (start, stop) in enumerate(ranges)
        ]
        fullest = []
        for group, held in enumerate(_held(_schedule(degrees), degrees.pp, count, degrees.interleave)):
            chunks = stages[group :: degrees.pp]
            left = np.array([memory.left[Pass.FORWARD] for memory in chunks])
            running = np.array([[memory.passes[kind].bytes for kind in _PASSES] for memory in chunks])
            most = (held[:, 2:] @ left + running[held[:, 0], held[:, 1]]).max()
            beside = max(memory.gathered + memory.reducing for memory in chunks)
            beside += sum(memory.receiving for memory in chunks)
            update = max(memory.update for memory in chunks) if self.trains else 0.0
            fullest.append(max(most + beside, update))
        return np.array(fullest)

    def _stage(self, kinds: tuple[int, ...], recompute: str, first: bool, last: bool) -> StageMemory:
        """Return what the tasks of a stage need, the first or the last of the pipeline or one in between."""
        key = (kinds, recompute, first, last)
        if key not in self._memory:
            flavours = [Recompute(recompute) if self.folded.kinds[kind].count > 1 else Recompute.NONE for kind in kinds]
            receiving = received_bytes(self.segments, kinds, first, last)
            self._memory[key] = stage_memory(self.memories.walk(kinds, flavours), receiving)
        return self._memory[key]

    def _resident_bytes(self, degrees: Degrees) -> FloatArray:
        """Return the bytes that each group of devices always holds, (groups,)."""
        shared = self.reference / degrees.dp
        kinds = np.zeros(len(self.folded.kinds))
        for kind, lowered in self.kinds.items():
            kinds[kind] = sum(
                amount * (shared if self.zero >= _SHARED_FROM.get(category, 4) else 1.0)
                for category, amount in lowered.resident.items()
            )
        blocks = kinds[np.asarray(self.folded.chain)]
        starts = [start for start, _ in self.ranges(degrees)]
        stages = np.add.reduceat(blocks, starts).reshape(degrees.interleave, -1)
        return np.asarray(stages.sum(axis=0) + self.folded.buffer_bytes)


def _schedule(degrees: Degrees) -> str:
    return "interleaved" if degrees.interleave > 1 and degrees.schedule == "1f1b" else degrees.schedule


@lru_cache(maxsize=4096)
def _held(schedule: str, groups: int, microbatches: int, chunks: int) -> tuple[IntArray, ...]:
    """Return what each group holds while it runs: distinct rows of chunk and pass that run, then held by chunk.

    A microbatch is held by a chunk from its forward to its backward, while neither runs.
    """
    found = []
    trains = SCHEDULES[schedule].trains
    for order in SCHEDULES[schedule].orders(groups, microbatches, chunks):
        held, rows = [0] * chunks, set()
        for task in order:
            backward = task.kind is Pass.BACKWARD
            held[task.chunk] -= backward
            rows.add((task.chunk, int(backward), *held))
            held[task.chunk] += trains and not backward
        found.append(np.array(sorted(rows), dtype=np.int64))
    return tuple(found)


@dataclass(eq=False)
class Estimator:
    """Estimates for one model on one cluster.

    Attributes:
        predictor: The model.
        cluster: The hardware.
        stack: The software.
        policy: Bytes per element.
        tables: Those that have been made.
    """

    predictor: Predictor
    cluster: Cluster
    stack: Stack = DEFAULT
    policy: DtypePolicy = MIXED
    tables: dict[object, _Table] = field(default_factory=dict, repr=False)

    def estimate(self, plans: Sequence[Degrees]) -> Estimates:
        """Return what plans come to; the tables that are missing are made first.

        Raises:
            JobError: If a plan does not fit the model, or its schedule has no formula.
        """
        found = np.array([_estimate(self.table(degrees), degrees) for degrees in plans], dtype=np.float64).reshape(
            -1, 2
        )
        return Estimates(found[:, 0], found[:, 1])

    def table(self, degrees: Degrees) -> _Table:
        """Return the table a plan is estimated from, made if it is not there.

        Raises:
            JobError: As of `estimate`.
        """
        key = (degrees.tp, degrees.cp, degrees.zero, degrees.sequence_parallel, degrees.microbatch, degrees.dp > 1)
        _check(degrees)
        if key not in self.tables:
            self.tables[key] = self._make(degrees)
        return self.tables[key]

    def _make(self, degrees: Degrees) -> _Table:
        reference = min(degrees.dp, _REFERENCE)
        small = replace(
            degrees,
            dp=reference,
            pp=1,
            interleave=1,
            layers=(),
            schedule="1f1b" if SCHEDULES[degrees.schedule].trains else degrees.schedule,
            recompute=Recompute.SELECTIVE,
            global_batch=reference * degrees.microbatch,
        )
        plan = self.predictor.planned(small, self.cluster, self.stack, policy=self.policy)
        folded = self.predictor.workload.folded(small.samples)
        resharder = Resharder(plan.device_mesh, CostModel(self.cluster, self.policy, kernels(self.stack)))
        kinds = lower_blocks(plan.blocks, folded, resharder)
        return _Table(folded, kinds, CostModel(self.cluster, self.policy, self.stack), degrees.zero, reference)


def _check(degrees: Degrees) -> None:
    if degrees.ep > 1:
        raise JobError("estimates know no expert parallelism", hint="use `autopar predict`")
    if degrees.offload or degrees.recompute == Recompute.OFFLOAD:
        raise JobError("estimates know no host memory", hint="use `autopar predict`, or offload nothing")
    if degrees.schedule not in _FORMULA:
        raise JobError(
            f"there is no formula for schedule {degrees.schedule!r}",
            hint=f"use `autopar predict`, or {', '.join(_FORMULA)}",
        )


def _estimate(table: _Table, degrees: Degrees) -> tuple[float, float]:
    """Return the seconds of a step and the bytes on the fullest device."""
    schedule = _schedule(degrees)
    why, hint = SCHEDULES[schedule].problem(degrees.pp, degrees.num_microbatches, degrees.interleave)
    if why:
        raise JobError(f"schedule {schedule} {why}", hint=hint)
    stack = table.costs.stack
    pipeline = Pipeline(
        degrees.num_stages,
        degrees.num_microbatches,
        schedule,
        Overlap.of(stack),
        stack["step_seconds"],
        degrees.interleave,
        stack["interleave_overhead"],
    )
    return time_of(table.stages(degrees), pipeline, table.hop(degrees)).seconds, table.peak(degrees)

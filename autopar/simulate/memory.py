"""How many bytes a device of a stage holds: resident tensors, activations of the microbatches in flight, and what runs.

    resident + what other microbatches have left behind + the fullest moment of the running task + buffers

`describe/block_decisions.py` says what a block keeps and needs. Buffers are there while tasks run, whichever task it
is:

- Parameters that are stored in shards are gathered by block: those of the block that runs and of the next one.
  PyTorch FSDP lets at most two all-gathers run ahead (`limit_all_gathers`), and frees a unit when it has run. The loss
  and its gradient run before the last block asks for those of the block before it.
- Gradients of a block whose reduction runs beside compute stay until it is done, which is taken to be when the next
  block has run.
- Sums of gradients that a stack makes in the backward (`Stack.gradients`) are not there before, if there is but one.
- What the optimizer makes in its update alone (`Category.UPDATE`: float32 gradients of parameters in float16) is not
  there while passes run.
- What the neighbouring stages send next is received while a task runs: one microbatch from either side.
- Where blocks keep what they save in host memory, what one of them saves is on its way out and what another one saves
  on its way in (`TRANSIT_BLOCKS`); where the optimizer's state lies there, a few buckets of it are on the device.

Copies that the allocator or a library makes are no part of this, but of the reserve (`autopar.cost.reserve`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.cost.stack import Gradients
from autopar.program.hosted import fetched_bytes
from autopar.program.records import Category, Program, SegmentPhase, StageProgram, Table
from autopar.schedule import Pass
from autopar.simulate.blocks import NOTHING, BlockMemories, BlockMemory, Peak
from autopar.simulate.pipeline import PASSES, Runs
from autopar.simulate.stages import StageLayout, TaskLayout
from autopar.simulate.timeline import HostMemory, MemoryPeak, MemorySample

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the tasks of a stage need besides resident tensors and other microbatches.

    Attributes:
        left: Bytes one microbatch leaves behind on the stage after a pass.
        passes: Fullest moment of a task; it counts the task's own microbatch only.
        blocks: Fullest moments of a task by block of the stage, which count its own microbatch only, too; empty unless
            asked for.
        receiving: Values under way from the neighbouring stages.
        update: Fullest moment of the reductions and the update.
        transit: Values under way to and from the host.
        hosted: Bytes one microbatch leaves in host memory between its passes.
    """

    left: Mapping[Pass, float]
    passes: Mapping[Pass, Peak]
    blocks: Mapping[Pass, tuple[float, ...]]
    receiving: float
    update: float
    transit: float = 0.0
    hosted: float = 0.0


def received_bytes(table: Table, kinds: Sequence[int], is_first: bool, is_last: bool) -> float:
    """Return the bytes of what a stage receives next from its neighbours."""
    ends = []
    if not is_first:
        ends.append(table.get((kinds[0], SegmentPhase.FORWARD)))
    if not is_last:
        ends.append(table.get((kinds[-1], SegmentPhase.BACKWARD)))
    return fsum(operand.bytes for segment in ends if segment for operand in segment.inputs)


def stage_memory(
    blocks: Iterable[BlockMemory],
    receiving: float,
    buffers: float = 0.0,
    streamed: float = 0.0,
    *,
    repeats: bool = True,
    unmade: bool = False,
    by_block: bool = False,
) -> StageMemory:
    """Return what the tasks of a stage need.

    Args:
        blocks: Its blocks in order.
        receiving: Values under way from the neighbouring stages.
        buffers: Bytes on the device while it updates state that lies in host memory.
        streamed: Most bytes of a block that are on the device while it runs, of what lies in host memory otherwise.
        repeats: Whether there are several microbatches: gradients of one are reduced while the next one runs.
        unmade: Whether sums of gradients are not there before they are made; only of a single microbatch.
        by_block: Whether moments are wanted by block.
    """
    passed = list(blocks)
    passes = dict.fromkeys(Pass, NOTHING)
    moments: dict[Pass, list[float]] = {kind: [0.0] * len(passed) for kind in Pass} if by_block else {}
    put_off = fsum(block.late for block in passed)
    kept, late, later = 0.0, 0.0, put_off  # of the blocks before this one; put off, of those before it and after it
    wait = passed[0].reducing if repeats else 0.0  # of the last block of the backward before
    missing = fsum(block.summed for block in passed) if unmade else 0.0
    left = 0.0  # sums of gradients of this block and those before it, which the backward makes later
    for number, block in enumerate(passed):
        later -= block.late
        before = passed[number - 1].gathered if number else 0.0
        after = passed[number + 1].gathered if number + 1 < len(passed) else 0.0
        reducing = passed[number + 1].reducing if number + 1 < len(passed) else wait
        left += block.summed if unmade else 0.0
        own = block.gathered
        for kind, moment in (
            (Pass.FORWARD, block.forward.on_top_of(kept).beside(own + after, 0.0 if number else wait, missing)),
            (Pass.BACKWARD, block.early.on_top_of(kept + later).beside(own, reducing, left)),
            (Pass.BACKWARD, block.backward.on_top_of(kept + later).beside(own + before, reducing, left)),
            (Pass.WEIGHT, block.weight.on_top_of(late).beside(own + before, reducing, left)),
        ):
            passes[kind] = max(passes[kind], moment, key=lambda peak: peak.total)
            if by_block:
                moments[kind][number] = max(moments[kind][number], moment.total)
        kept += block.kept
        late += block.late
    return StageMemory(
        left={Pass.FORWARD: kept, Pass.BACKWARD: put_off, Pass.WEIGHT: 0.0},
        passes=passes,
        blocks={kind: tuple(found) for kind, found in moments.items()},
        receiving=receiving,
        update=max(block.update for block in passed) + buffers,
        transit=TRANSIT_BLOCKS * (max(block.hosted for block in passed) + streamed),
        hosted=fsum(block.hosted for block in passed),
    )


class TaskMemory(NamedTuple):
    """Fullest moment of a task in bytes, by category; without resident tensors.

    What counts as resident and is not there is subtracted: sums of gradients, and what the update makes.
    """

    activations: float
    gathered: float
    communication: float
    transient: float
    unmade: float = 0.0
    absent: float = 0.0


_SIGNS = np.array([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
"""How the fields of `TaskMemory` count."""


def memory_over_time(chunks: Sequence[StageMemory], runs: Runs, trains: bool, absent: float = 0.0) -> FloatArray:
    """Return the fullest moment of each task in order, then of the update if there is one; without resident tensors.

    Args:
        chunks: What the tasks of each stage of the group of devices need.
        runs: The tasks of the group.
        trains: Whether there are backwards and an update.
        absent: Bytes that are there in the update alone, of those that count as resident.

    Returns:
        (tasks, fields of `TaskMemory`); (tasks + 1, ...) with the update.
    """
    communication = fsum(memory.receiving for memory in chunks) + max(memory.transit for memory in chunks)
    peaks = np.array(
        [
            [
                (peak.activations, peak.gathered, communication + peak.reducing, peak.bytes - peak.activations,
                 peak.unmade, absent)
                for peak in (memory.passes[kind] for kind in PASSES)
            ]
            for memory in chunks
        ]
    )  # fmt: skip
    moments = peaks[runs.chunk, runs.kind]
    if not trains:
        return np.asarray(moments)
    for chunk, memory in enumerate(chunks):
        passes = [np.where(runs.chunk == chunk, runs.kind == number, False) for number in range(len(PASSES))]
        for kind, own, following in zip(PASSES, passes, passes[1:], strict=False):
            if memory.left[kind]:  # what a pass leaves is held until the next pass of its microbatch starts
                held = np.cumsum(own) - own - np.cumsum(following)
                moments[:, TaskMemory._fields.index("activations")] += memory.left[kind] * held
    update = np.zeros((1, moments.shape[1]))
    update[0, TaskMemory._fields.index("transient")] = max(memory.update for memory in chunks)
    return np.concatenate([moments, update])


def _streamed(stage: StageProgram, table: Table) -> float:
    """Return the most bytes of a block that come from host memory for its passes."""
    kinds = {kind for kind, away in zip(stage.blocks, stage.hosted_blocks, strict=True) if away}
    phases = (SegmentPhase.SUM_FETCH, SegmentPhase.PARAMETER_FETCH)
    found = ([table[kind, phase] for phase in phases if (kind, phase) in table] for kind in kinds)
    return max((fetched_bytes(own) for own in found), default=0.0)


def host_bytes(chunks: Sequence[StageMemory], runs: Runs) -> float:
    """Return the most bytes that a device of a group has left in host memory, the optimizer's state not counted."""
    sizes = np.array([memory.hosted for memory in chunks])[runs.chunk]
    signs = np.array([{Pass.FORWARD: 1.0, Pass.BACKWARD: -1.0}.get(kind, 0.0) for kind in PASSES])
    return float(np.cumsum(signs[runs.kind] * sizes).max(initial=0.0))


def fullest_host(program: Program, cluster: Cluster, per_device: Sequence[float]) -> HostMemory | None:
    """Return what lies in the memory of the fullest host; None if nothing lies in any.

    Args:
        program: The program.
        cluster: Its devices.
        per_device: Bytes of one device of each group.

    Raises:
        ClusterError: If the cluster does not say how its devices reach host memory.
    """
    if not any(per_device):
        return None
    held: dict[int, float] = {}
    for chunks, size in zip(program.chunks, per_device, strict=True):
        for device in range(*program.stages[chunks[0]].devices):
            start = cluster.host_start(device)
            held[start] = held.get(start, 0.0) + size
    hosts = (HostMemory(size, cluster.group_of(start).known_host().usable) for start, size in held.items())
    return max(hosts, key=lambda host: host.bytes / host.usable)


def _breakdown(chunks: Iterable[StageProgram], moment: TaskMemory) -> tuple[tuple[Category, float], ...]:
    """Return the bytes of a moment by category, every category once."""
    sizes = dict.fromkeys(Category, 0.0)
    for resident in (part for stage in chunks for part in stage.resident):
        sizes[resident.category] += resident.bytes
    sizes[Category.GRADIENTS] -= moment.unmade
    sizes[Category.UPDATE] -= moment.absent
    sizes[Category.ACTIVATIONS] = moment.activations
    sizes[Category.GATHERED] = moment.gathered
    sizes[Category.COMMUNICATION] = moment.communication
    sizes[Category.TRANSIENT] = moment.transient
    return tuple(sizes.items())


@dataclass(frozen=True, slots=True)
class StageMoments:
    """The fullest moment of each task of the stages of a group of devices, and of the update.

    Attributes:
        chunks: The stages.
        runs: The tasks of the group, in order.
        update_start: When the update starts; None if there is none.
        moments: The fullest moment of each task and of the update, as of `memory_over_time`.
        host_bytes: Most bytes of a device in host memory.
        needs: What the tasks of each stage need.
    """

    chunks: Sequence[StageProgram]
    runs: Runs
    update_start: float | None
    moments: FloatArray
    host_bytes: float
    needs: Sequence[StageMemory]

    @property
    def resident(self) -> float:
        """Bytes that are there all the time."""
        return fsum(part.bytes for stage in self.chunks for part in stage.resident)

    @property
    def sizes(self) -> FloatArray:
        """Bytes at each moment without resident tensors, (moments,)."""
        return np.asarray(self.moments @ _SIGNS)

    def peak(self) -> MemoryPeak:
        """Return the fullest moment of the step, the first of several."""
        sizes = self.sizes
        highest = int(sizes.argmax())
        moment = TaskMemory(*self.moments[highest].tolist())
        start, during = self.update_start, "update"
        if highest < len(self.runs):
            run = self.runs[highest]
            start, during = run.start, str(run.task)
        assert start is not None, "without an update there are tasks only"
        return MemoryPeak(self.resident + float(sizes[highest]), start, during, _breakdown(self.chunks, moment))

    def samples(self, layouts: Sequence[StageLayout]) -> Iterator[MemorySample]:
        """Yield the fullest moment of each block within each task, or of a task where moments are not known by block.

        Args:
            layouts: What each stage does in time.
        """
        group, resident = self.chunks[0].index, self.resident
        for size, run in zip_longest(self.sizes.tolist(), self.runs):
            whole = resident + size
            if run is None:
                assert self.update_start is not None, "there are no other moments"
                yield MemorySample(group, self.update_start, whole)
                continue
            blocks = self.needs[run.task.chunk].blocks.get(run.task.kind, ())
            parts = layouts[run.task.chunk].passes[run.task.kind] if blocks else TaskLayout(())
            fullest = max(range(len(blocks)), key=blocks.__getitem__, default=0)
            if not parts.seconds or all(part.index != fullest for part in parts.parts):
                yield MemorySample(group, run.start, whole)
                continue
            begun = whole - blocks[fullest]
            stretched = (run.end - run.start) / parts.seconds  # tasks that share the devices take longer
            last = -1
            for part in parts.parts:
                if part.index != last:  # what runs again before a backward is in its block's moment
                    yield MemorySample(group, run.start + stretched * part.offset, begun + blocks[part.index])
                last = part.index


def stage_moments(
    chunks: Sequence[StageProgram],
    program: Program,
    memories: BlockMemories,
    runs: Runs,
    update_start: float,
    gradients: Gradients = "kept",
    *,
    by_block: bool = False,
) -> StageMoments:
    """Return the fullest moments of the stages of a group of devices, whose tasks run as given.

    Args:
        chunks: The stages.
        program: Their program.
        memories: The memory of its kinds of blocks.
        runs: The tasks of the group, in order.
        update_start: When the update begins.
        gradients: How long sums of gradients take memory.
        by_block: Whether moments are wanted by block.
    """
    table, last = program.table(), len(program.stages) - 1
    needs = [
        stage_memory(
            memories.walk(stage.blocks, stage.recompute),
            received_bytes(table, stage.blocks, stage.index == 0, stage.index == last),
            float(state_buffers(fsum(part.bytes for part in stage.hosted), stage.what)),
            _streamed(stage, table),
            repeats=program.num_microbatches > 1,
            unmade=gradients == "made"
            and program.num_microbatches == 1
            and len(chunks) == 1
            and not (stage.hosted and stage.state_kind.sums),
            by_block=by_block,
        )
        for stage in chunks
    ]
    passing = fsum(part.bytes for stage in chunks for part in stage.resident if part.category is Category.UPDATE)
    moments = memory_over_time(needs, runs, program.trains, passing)
    hosted = host_bytes(needs, runs) + fsum(part.bytes for stage in chunks for part in stage.hosted)
    return StageMoments(chunks, runs, update_start if program.trains else None, moments, hosted, needs)

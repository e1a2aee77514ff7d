"""How many bytes a device of a stage holds: resident tensors, activations of the microbatches in flight, and what runs.

    resident + what other microbatches have left behind + the fullest moment of the running task + buffers

`describe/block_decisions.py` says what a block keeps and needs. Buffers are there while tasks run, whichever task it
is:

- Parameters that are stored in shards are gathered by block: those of the block that runs and of the next one
  (`GATHERED_BLOCKS`) are there together.
- Gradients of a block whose reduction runs beside compute stay until it is done, which is taken to be when the next
  block has run.
- What the neighbouring stages send next is received while a task runs: one microbatch from either side.
- Where blocks keep what they save in host memory, what one of them saves is on its way out and what another one saves
  on its way in (`TRANSIT_BLOCKS`); where the optimizer's state lies there, a few buckets of it are on the device.

Copies that the allocator or a library makes are no part of this, but of the reserve (`autopar.cost.reserve`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from autopar.cluster import Cluster
from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.program.records import Category, Program, SegmentPhase, StageProgram, Table
from autopar.schedule import Pass, Task
from autopar.simulate.blocks import NOTHING, BlockMemories, BlockMemory, Peak
from autopar.simulate.pipeline import Run
from autopar.simulate.timeline import HostMemory, MemoryPeak, MemorySample

GATHERED_BLOCKS = 2
"""Blocks whose parameters are gathered at once: the one that runs and the one that is prefetched.

PyTorch FSDP lets at most two all-gathers run ahead (`limit_all_gathers`), and frees a unit when it has run.
"""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the tasks of a stage need besides resident tensors and other microbatches.

    Attributes:
        left: Bytes one microbatch leaves behind on the stage after a pass.
        passes: Fullest moment of a task; it counts the task's own microbatch only.
        gathered: Gathered parameters.
        reducing: Gradients under way to their reduction.
        receiving: Values under way from the neighbouring stages.
        update: Fullest moment of the reductions and the update.
        transit: Values under way to and from the host.
        hosted: Bytes one microbatch leaves in host memory between its passes.
    """

    left: Mapping[Pass, float]
    passes: Mapping[Pass, Peak]
    gathered: float
    reducing: float
    receiving: float
    update: float
    transit: float = 0.0
    hosted: float = 0.0


def gathered_bytes(blocks: Sequence[float]) -> float:
    """Return the bytes of gathered parameters of a stage, given those of its blocks."""
    assert GATHERED_BLOCKS == 2, "pairs of neighbours"
    return max((one + other for one, other in pairwise(blocks)), default=blocks[0])


def received_bytes(table: Table, kinds: Sequence[int], is_first: bool, is_last: bool) -> float:
    """Return the bytes of what a stage receives next from its neighbours."""
    ends = []
    if not is_first:
        ends.append(table.get((kinds[0], SegmentPhase.FORWARD)))
    if not is_last:
        ends.append(table.get((kinds[-1], SegmentPhase.BACKWARD)))
    return fsum(operand.bytes for segment in ends if segment for operand in segment.inputs)


def stage_memory(blocks: Iterable[BlockMemory], receiving: float, state: float = 0.0) -> StageMemory:
    """Return what the tasks of a stage need.

    Args:
        blocks: Its blocks in order.
        receiving: Values under way from the neighbouring stages.
        state: Bytes of the optimizer's state that lie in host memory.
    """
    passed = list(blocks)
    passes = dict.fromkeys(Pass, NOTHING)
    put_off = fsum(block.late for block in passed)
    kept, late, later = 0.0, 0.0, put_off  # of the blocks before this one; put off, of those before it and after it
    for block in passed:
        later -= block.late
        moments = {
            Pass.FORWARD: block.forward.on_top_of(kept),
            Pass.BACKWARD: block.backward.on_top_of(kept + later),
            Pass.WEIGHT: block.weight.on_top_of(late),
        }
        passes = {kind: max(passes[kind], moment, key=lambda peak: peak.bytes) for kind, moment in moments.items()}
        kept += block.kept
        late += block.late
    return StageMemory(
        left={Pass.FORWARD: kept, Pass.BACKWARD: put_off, Pass.WEIGHT: 0.0},
        passes=passes,
        gathered=gathered_bytes([block.gathered for block in passed]),
        reducing=max(block.reducing for block in passed),
        receiving=receiving,
        update=max(block.update for block in passed) + float(state_buffers(state)),
        transit=TRANSIT_BLOCKS * max(block.hosted for block in passed),
        hosted=fsum(block.hosted for block in passed),
    )


class TaskMemory(NamedTuple):
    """Fullest moment of a task (None: the update) in bytes, by category; without resident tensors."""

    task: Task | None
    activations: float
    gathered: float
    communication: float
    transient: float

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.activations + self.gathered + self.communication + self.transient


def memory_over_time(chunks: Sequence[StageMemory], order: Sequence[Task], trains: bool) -> Iterator[TaskMemory]:
    """Yield the fullest moment of each task in order, then of the update if there is one; without resident tensors.

    Args:
        chunks: What the tasks of each stage of the group of devices need.
        order: The tasks of the group.
        trains: Whether there are backwards and an update.
    """
    held: dict[tuple[int, int], float] = {}
    total = 0.0
    communication = fsum(memory.receiving for memory in chunks) + max(memory.reducing for memory in chunks)
    communication += max(memory.transit for memory in chunks)
    for task in order:
        memory, key = chunks[task.chunk], (task.chunk, task.microbatch)
        total -= held.pop(key, 0.0)
        peak = memory.passes[task.kind]
        yield TaskMemory(task, total + peak.activations, memory.gathered, communication, peak.bytes - peak.activations)
        left = memory.left[task.kind]
        if trains and left:
            held[key] = left
            total += left
    if trains:
        yield TaskMemory(None, 0.0, 0.0, 0.0, max(memory.update for memory in chunks))


def host_bytes(chunks: Sequence[StageMemory], order: Sequence[Task]) -> float:
    """Return the most bytes that a device of a group has left in host memory, the optimizer's state not counted."""
    most = total = 0.0
    for task in order:
        size = chunks[task.chunk].hosted
        total += {Pass.FORWARD: size, Pass.BACKWARD: -size}.get(task.kind, 0.0)
        most = max(most, total)
    return most


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
    sizes[Category.ACTIVATIONS] = moment.activations
    sizes[Category.GATHERED] = moment.gathered
    sizes[Category.COMMUNICATION] = moment.communication
    sizes[Category.TRANSIENT] = moment.transient
    return tuple(sizes.items())


@dataclass(frozen=True, slots=True)
class StageMoments:
    """The fullest moment of each task of the stages of a group of devices, and when the task starts.

    Attributes:
        chunks: The stages.
        starts: When each task starts.
        moments: The fullest moment of each.
        host_bytes: Most bytes of a device in host memory.
    """

    chunks: Sequence[StageProgram]
    starts: Sequence[float]
    moments: Sequence[TaskMemory]
    host_bytes: float

    @property
    def resident(self) -> float:
        """Bytes that are there all the time."""
        return fsum(part.bytes for stage in self.chunks for part in stage.resident)

    def peak(self) -> MemoryPeak:
        """Return the fullest moment of the step, the first of several."""
        sizes = [moment.bytes for moment in self.moments]
        highest = sizes.index(max(sizes))
        moment = self.moments[highest]
        during = "update" if moment.task is None else str(moment.task)
        return MemoryPeak(self.resident + sizes[highest], self.starts[highest], during, _breakdown(self.chunks, moment))

    def samples(self) -> Iterator[MemorySample]:
        """Yield the fullest moment of each task."""
        resident = self.resident
        for start, moment in zip(self.starts, self.moments, strict=True):
            yield MemorySample(self.chunks[0].index, start, resident + moment.bytes)


def stage_moments(
    chunks: Sequence[StageProgram],
    program: Program,
    memories: BlockMemories,
    runs: Sequence[Run],
    update_start: float,
) -> StageMoments:
    """Return the fullest moments of the stages of a group of devices, whose tasks run as given.

    Args:
        chunks: The stages.
        program: Their program.
        memories: The memory of its kinds of blocks.
        runs: The tasks of the group, in order.
        update_start: When the update begins.
    """
    table, last = program.table(), len(program.stages) - 1
    needs = [
        stage_memory(
            memories.walk(stage.blocks, stage.recompute),
            received_bytes(table, stage.blocks, stage.index == 0, stage.index == last),
            fsum(part.bytes for part in stage.hosted),
        )
        for stage in chunks
    ]
    order = [run.task for run in runs]
    moments = list(memory_over_time(needs, order, program.trains))
    starts = [run.start for run in runs]
    hosted = host_bytes(needs, order) + fsum(part.bytes for stage in chunks for part in stage.hosted)
    return StageMoments(chunks, [*starts, update_start] if program.trains else starts, moments, hosted)

"""The reference executor: a whole step of a program, all devices of all stages in one process.

The law it is for: outputs, loss, gradients and updated parameters equal the unpartitioned model's. It follows the
program and nothing else, instruction by instruction on local arrays, and checks the shape of whatever is computed.
Groups of devices run their tasks in the order of the schedule, each as soon as what it needs is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError, ProgramError
from autopar.execute import Executor
from autopar.execute.rings import run_ring
from autopar.folding.block_interface import instance_names
from autopar.folding.fold import Folded
from autopar.ir.graph import Graph, Role
from autopar.ir.rings import RINGS
from autopar.program.bucket_order import Bucket, Departures, Member, issue_order, travels
from autopar.program.offload import MASTER
from autopar.program.records import (
    STATE_COPIES,
    Collective,
    Compute,
    Exchange,
    Fetch,
    HostCopy,
    Instruction,
    Offload,
    Operand,
    Part,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    in_host_memory,
    kept_values,
    reads,
    rerun,
    saved_for,
)
from autopar.program.text import format_instruction
from autopar.recompute import Recompute
from autopar.runtime.blocks import Blocks, block_starts, exchange, gather, lines, move, move_together, scatter
from autopar.runtime.crossings import deliver
from autopar.runtime.shard_check import Check
from autopar.schedule import SCHEDULES, Pass, Task, topological_order
from autopar.sharding import Axis, Mesh, Placement, Placements, Replicate, own_shape
from autopar.shares import num_rows, of_row
from autopar.training.losses import LOSS_SCALE

Array = NDArray[Any]

_OF_BACKWARDS = (SegmentPhase.SUM_FETCH, SegmentPhase.PARAMETER_FETCH)
_ONCE = (
    SegmentPhase.REDUCE,
    SegmentPhase.UPDATE,
    SegmentPhase.STATE_FETCH,
    SegmentPhase.STATE_OFFLOAD,
)
"""Phases of a step, of which all rows run all."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step computed, as whole tensors.

    Attributes:
        outputs: Per microbatch, the outputs of the graph by name. The losses of all microbatches add up to the loss of
            the step, the mean over all its samples.
        gradients: Gradient of that loss by parameter, on top of what the gradient buffer held.
        states: Content of every state after the step, by the name under which it enters the next one.
        departed: Per group of devices, the collectives of gradients in the order in which they ran, named as in a
            simulated timeline; buckets of a plan, or of the uniform rule, are one each.
    """

    outputs: tuple[Mapping[str, Array], ...]
    gradients: Mapping[str, Array]
    states: Mapping[str, Array]
    departed: tuple[tuple[str, ...], ...]


def run_step(
    program: Program,
    folded: Folded,
    microbatches: Sequence[Mapping[str, Array]],
    states: Mapping[str, Array],
    executor: Executor | None = None,
    *,
    check: float | None = None,
) -> StepResult:
    """Run one training or inference step.

    Floats keep the precision they are fed with, see `autopar.execute`.

    Args:
        program: The lowered plan.
        folded: The graph it was lowered from.
        microbatches: Per microbatch, an array for each input of the graph, by name. What the optimizer reads (the
            number of the update) is taken from the last one.
        states: An array for each state of the graph, by the name under which it enters the step. Gradient buffers
            are usually zero.
        executor: Reused if given.
        check: Hold every value that is computed against the unpartitioned graph's, as soon as it is computed. Floats
            may deviate by so much, relative to the largest element of the tensor. None checks nothing.

    Raises:
        ModelError: If an array is missing or has another shape than the graph says.
        ProgramError: If an instruction does not compute what the program says, values are not there when they are
            needed, or copies of a tensor differ. With `check` also for the first value, in the order of execution, that
            is not what it should be.
        UnsupportedOpError: If nothing implements an op's kind.
        ExecutionError: If a kernel fails.
    """
    _check_feeds(program, folded.graph, microbatches, states)
    step = _Step(program, folded, microbatches, states, executor or Executor(), check)
    for stage, task in topological_order(program.orders(), program.groups):
        step.run_task(stage, task)
    for block in range(len(folded.chain)):
        step.update(block)
    return step.result()


def _check_feeds(
    program: Program, graph: Graph, microbatches: Sequence[Mapping[str, Array]], states: Mapping[str, Array]
) -> None:
    if len(microbatches) != program.num_microbatches:
        raise ModelError(f"{len(microbatches)} microbatches for a program of {program.num_microbatches}")
    wanted = [(microbatch, name) for microbatch in microbatches for name in graph.inputs]
    wanted += [(states, state.input) for state in graph.states]
    for feeds, name in wanted:
        if name not in feeds:
            raise ModelError(f"no data for value {name!r}", hint="feed every input and every state of the graph")
        if feeds[name].shape != graph.values[name].shape:
            raise ModelError(f"value {graph.values[name]} is fed with data of shape {list(feeds[name].shape)}")


@dataclass(slots=True, eq=False)
class _Passage:
    """What one microbatch has left behind.

    Attributes:
        handed: Values between blocks, by the block that receives them and the phase.
        saved: Forward values kept for the backward, by block and name.
        hosted: Those that lie in host memory until then.
        put_off: Values kept for the weight pass likewise, where the schedule splits the backward.
        exports: Values read far away, by tensor, placement and shape of the mesh.
        outputs: Results of the model.
    """

    handed: dict[tuple[int, SegmentPhase], list[Blocks]] = field(default_factory=dict)
    saved: dict[int, dict[str, Blocks]] = field(default_factory=dict)
    hosted: dict[int, dict[str, Blocks]] = field(default_factory=dict)
    put_off: dict[int, dict[str, Blocks]] = field(default_factory=dict)
    exports: dict[tuple[str, Placements, tuple[int, ...]], Blocks] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Activity:
    """A segment being run.

    Attributes:
        block: Its block in the chain.
        phase: Its phase.
        microbatch: Of which microbatch.
        segment: Its record.
        values: What is there by now.
        tensors: What the values are in the graph, by name in the representative.
        todo: Gradient traffic that leaves in buckets, and what waits for it.
        offered: Results of that traffic whose operands are there.
        idle: Devices of rows that have no such microbatch.
    """

    block: int
    phase: SegmentPhase
    microbatch: int
    segment: Segment
    values: dict[str, Blocks]
    tensors: dict[str, str]
    todo: list[Instruction] = field(default_factory=list)
    offered: set[str] = field(default_factory=set)
    idle: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Backward:
    """A backward of a stage in progress.

    Attributes:
        first: The first block of the stage.
        is_last: Whether the reductions of the step follow it.
        departures: Its buckets.
        active: Segments that wait for some of them.
    """

    first: int
    is_last: bool
    departures: Departures
    active: list[_Activity] = field(default_factory=list)


class _Step:
    """A step in progress."""

    def __init__(
        self,
        program: Program,
        folded: Folded,
        microbatches: Sequence[Mapping[str, Array]],
        states: Mapping[str, Array],
        executor: Executor,
        check: float | None,
    ) -> None:
        self._graph = folded.graph
        self._shares = program.shares
        self._segments = program.table()
        self._crossings = program.crossing_table()
        self._splits = SCHEDULES[program.schedule].splits
        self._blocks, self._is_hosted = list(program.blocks()), program.hosted_blocks
        self._names = instance_names(folded)
        self._ranges: list[range] = []
        for stage in program.stages:
            start = self._ranges[-1].stop if self._ranges else 0
            self._ranges.append(range(start, start + len(stage.blocks)))
        self._stages = program.stages
        maker = Pass.WEIGHT if self._splits else Pass.BACKWARD
        self._maker, self._groups = maker, program.groups
        orders, chunks = program.orders(), program.chunks
        self._left = [
            sum(task.kind is maker and chunks[group][task.chunk] == stage for task in orders[group])
            for stage, group in enumerate(program.groups)
        ]
        self._issued = [
            [issue_order(stage, self._segments, splits=self._splits, last=last) for last in (False, True)]
            for stage in program.stages
        ]
        self._departed: list[list[str]] = [[] for _ in orders]
        self._refreshes = [crossing for crossing in program.crossings if crossing.phase is SegmentPhase.UPDATE]
        self._data = microbatches
        self._states = states
        self._executor = executor
        self._constants = dict(self._graph.constants)
        scale = self._graph.metadata.get(LOSS_SCALE)
        if scale is not None:
            held = self._constants[scale]
            self._constants[scale] = np.asarray(np.divide(held, float(program.mean_microbatches)), held.dtype)
        self._check: Check | None = None
        if check is not None:
            feeds = {**states, **({scale: self._constants[scale]} if scale is not None else {})}
            self._check = Check(self._graph, microbatches, feeds, check, executor)
        self._passages = [_Passage() for _ in microbatches]
        self._persistent: dict[str, tuple[Placements, Blocks, Mesh]] = {}
        self._hosted: dict[str, tuple[Placements, Blocks, Mesh]] = {}  # persistent tensors in host memory
        self._in_host_memory = [self._tensors_in_host_memory(block) for block in range(len(self._blocks))]
        self._stored: dict[tuple[int, str], Blocks] = {}
        self._scattered: dict[tuple[str, Placements, Mesh], Blocks] = {}

    def _tensors_in_host_memory(self, block: int) -> frozenset[str]:
        """Return the persistent tensors of a block that have to be fetched."""
        if not self._is_hosted[block]:
            return frozenset()
        moments = {state.input for state in self._graph.states if state.role is Role.MOMENT}
        own = {tensor for phase in STATE_COPIES.values() for _, tensor in self._state_copies(block, phase)}
        return frozenset(moments | own)

    def run_task(self, stage: int, task: Task) -> None:
        """Run one microbatch through the blocks of a stage; what a block does not keep it makes again."""
        blocks, passage = self._ranges[stage], self._passages[task.microbatch]
        flavours = dict(zip(blocks, self._stages[stage].recompute, strict=True))
        if task.kind is Pass.FORWARD:
            for block in blocks:
                self._fetch_state(block, (SegmentPhase.PARAMETER_FETCH,))
                values = self._run(block, SegmentPhase.FORWARD, task.microbatch, {})
                self._drop_parameters(block)
                if flavours[block] is not Recompute.FULL:
                    kept = kept_values(self._segments, self._blocks[block][1], flavours[block])
                    passage.saved[block] = {operand.value: values[operand.value] for operand in kept}
                if flavours[block] is Recompute.OFFLOAD:
                    values = self._run(block, SegmentPhase.OFFLOAD, task.microbatch, values)
                    hosted = in_host_memory(self._segment(block, SegmentPhase.OFFLOAD))
                    passage.hosted[block] = {operand.value: values[operand.value] for operand in hosted}
            return
        backward: _Backward | None = None
        if task.kind is self._maker:
            self._left[stage] -= 1
            is_last = not self._left[stage]
            backward = _Backward(blocks.start, is_last, Departures(self._issued[stage][is_last]))
        for block in blocks:
            self._fetch_state(block, _OF_BACKWARDS)
        for block in reversed(blocks):
            kind = self._blocks[block][1]
            if task.kind is Pass.WEIGHT:
                saved = passage.put_off.pop(block)
                self._run(block, SegmentPhase.WEIGHT, task.microbatch, saved, backward)
                continue
            again = rerun(self._segments, kind, flavours[block])
            saved = passage.saved.pop(block, {})  # under full recompute a block's inputs are still there
            if again is not None:
                saved |= self._run(block, again.phase, task.microbatch, saved | passage.hosted.pop(block, {}))
            segment = self._segment(block, SegmentPhase.FORWARD)
            assert segment is not None, "every kind has a forward"
            missing = [operand.value for operand in segment.saved if operand.value not in saved]
            if missing:
                raise ProgramError(f"block {block} reads {missing[0]!r} of its forward, which is not on the device")
            saved = {operand.value: saved[operand.value] for operand in segment.saved}
            values = saved | self._run(block, SegmentPhase.BACKWARD, task.microbatch, saved, backward)
            if self._splits:
                late = saved_for(kind, SegmentPhase.WEIGHT, self._segments)
                passage.put_off[block] = {operand.value: values[operand.value] for operand in late}
        assert backward is None or (backward.departures.are_over and not backward.active), "all gradients are there"
        for block in blocks:
            self._offload_state(block, (SegmentPhase.SUM_OFFLOAD,))
            self._drop_parameters(block)

    def run_once(self, block: int, phase: SegmentPhase) -> None:
        """Run what a block does once per step."""
        self._run(block, phase, len(self._passages) - 1, {})

    def update(self, block: int) -> None:
        """Update the parameters of a block; what of its state is in host memory comes and returns."""
        self._fetch_state(block, tuple(STATE_COPIES))
        self.run_once(block, SegmentPhase.UPDATE)
        self._offload_state(block, tuple(STATE_COPIES.values()))

    def _fetch_state(self, block: int, phases: Sequence[SegmentPhase]) -> None:
        for instruction, tensor in (own for phase in phases for own in self._state_copies(block, phase)):
            mesh, placements = self._blocks[block][0].mesh, instruction.operand.placements
            if tensor not in self._hosted:  # as it is before the first update
                self._hosted[tensor] = (placements, scatter(np.asarray(self._states[tensor]), placements, mesh), mesh)
            self._persistent[tensor] = self._copied(instruction, self._hosted.pop(tensor))

    def _offload_state(self, block: int, phases: Sequence[SegmentPhase]) -> None:
        for instruction, tensor in (own for phase in phases for own in self._state_copies(block, phase)):
            self._hosted[tensor] = self._copied(instruction, self._persistent.pop(tensor))

    def _drop_parameters(self, block: int) -> None:
        """Free the parameters of a block that host memory has, too."""
        self._offload_state(block, (SegmentPhase.PARAMETER_OFFLOAD,))

    def _state_copies(self, block: int, phase: SegmentPhase) -> Iterator[tuple[HostCopy, str]]:
        """Yield the copies of a segment, each with the tensor that is copied."""
        segment = self._segment(block, phase) if self._is_hosted[block] else None
        if segment is None:
            return
        tensors = {part.value: self._names[block][part.tensor] for part in segment.parts}
        for instruction in segment.instructions:
            assert isinstance(instruction, Offload | Fetch), "the segment only copies"
            operand = instruction.operand if phase in STATE_COPIES.values() else instruction.result
            yield instruction, tensors[operand.value]

    def _copied(self, instruction: HostCopy, held: tuple[Placements, Blocks, Mesh]) -> tuple[Placements, Blocks, Mesh]:
        placements, blocks, mesh = held
        values = {instruction.operand.value: blocks}
        self._execute(instruction, values, mesh, "the optimizer's state")
        return placements, values[instruction.result.value], mesh

    def result(self) -> StepResult:
        """Return what was computed, as whole tensors.

        Raises:
            ProgramError: If something the graph computes was not.
        """
        graph = self._graph
        for passage in self._passages:
            for name in graph.outputs:
                if name not in passage.outputs:
                    raise ProgramError(f"the program does not compute output {name!r}")
        for crossing in self._refreshes:
            placements, blocks, mesh = self._persistent[crossing.tensor]
            receiver = self._stages[crossing.receiver].mesh
            copy = gather(deliver(crossing, blocks, self._stages), crossing.target.placements, receiver)
            if not np.array_equal(copy, gather(blocks, placements, mesh)):
                raise ProgramError(f"the copy of {crossing.tensor!r} on stage {crossing.receiver} is not the original")
        states, gradients = {}, {}
        for state in graph.states:
            if state.input in self._persistent or state.input in self._hosted:
                placements, blocks, mesh = self._persistent.get(state.input) or self._hosted[state.input]
                states[state.input] = gather(blocks, placements, mesh)
            elif state.output != state.input:
                raise ProgramError(f"the program does not compute {state.output!r}, the new {state.input!r}")
            else:
                states[state.input] = self._states[state.input]
            if state.role is Role.GRADIENT:
                gradients[state.owner] = states[state.input]
        outputs, departed = tuple(passage.outputs for passage in self._passages), tuple(map(tuple, self._departed))
        return StepResult(outputs, gradients, states, departed)

    # One segment.

    def _segment(self, block: int, phase: SegmentPhase) -> Segment | None:
        return self._segments.get((self._blocks[block][1], phase))

    def _run(
        self,
        block: int,
        phase: SegmentPhase,
        microbatch: int,
        saved: Mapping[str, Blocks],
        backward: _Backward | None = None,
    ) -> dict[str, Blocks]:
        """Run a block's segment, hand on what it makes, and return its values.

        Of a `backward` that makes gradients, what waits for the buckets of its gradients follows when these leave.
        """
        activity = self._begin(block, phase, microbatch, saved, backward)
        if activity is None:
            reduces = backward is not None and backward.is_last
            activity = self._begin(block, SegmentPhase.REDUCE, microbatch, {}, backward) if reduces else None
            if activity is None:
                return {}
        if backward is None:
            self._store(activity)
        else:
            backward.active.append(activity)
            self._proceed(backward)
        return activity.values

    def _begin(
        self,
        block: int,
        phase: SegmentPhase,
        microbatch: int,
        saved: Mapping[str, Blocks],
        backward: _Backward | None,
    ) -> _Activity | None:
        """Run what of a segment waits for no bucket, and hand on what it makes; None if there is no segment."""
        segment = self._segment(block, phase)
        if segment is None:
            return None
        mesh = self._blocks[block][0].mesh
        passage = self._passages[microbatch]
        parts = {part.value: part for part in segment.parts}
        values: dict[str, Blocks] = dict(saved)
        for operand in segment.external:
            values[operand.value] = self._external(block, operand, parts.get(operand.value), microbatch)
        handed = passage.handed.get((block, phase), [])
        if len(handed) != len(segment.inputs):
            raise ProgramError(f"block {block} {phase} gets {len(handed)} values, {len(segment.inputs)} expected")
        for operand, blocks in zip(segment.inputs, handed, strict=True):
            tensor = self._names[block][parts[operand.value].tensor]
            values[operand.value] = self._crossed(block, phase, tensor, operand, blocks)
        tensors = {part.value: part.tensor for part in segment.parts}
        idle = self._idle(block, phase, microbatch)
        activity = _Activity(block, phase, microbatch, segment, values, tensors, idle=idle)
        late: set[str] = set()
        for instruction in segment.instructions:
            waits = any(operand.value in late for operand in reads(instruction))
            if waits or (backward is not None and self._member(activity, instruction, backward) is not None):
                activity.todo.append(instruction)
                late.update(operand.value for operand in defines(instruction))
                continue
            self._execute(instruction, values, mesh, f"block {block} {phase}", idle)
            self._hold(instruction, activity)

        following = block + 1 if phase is SegmentPhase.FORWARD else block - 1
        if phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            passage.handed[following, phase] = [values[operand.value] for operand in segment.outputs]
        for operand in segment.exports:
            part = parts[operand.value]
            tensor = self._names[block][part.tensor]
            passage.exports[tensor, operand.placements, mesh.shape] = values[operand.value]
            if tensor in self._graph.outputs:
                passage.outputs[tensor] = gather(values[operand.value], operand.placements, mesh)
        return activity

    def _idle(self, block: int, phase: SegmentPhase, microbatch: int) -> frozenset[int]:
        """Return the devices of a block's stage whose rows have no such microbatch."""
        if not self._shares or phase in _ONCE:
            return frozenset()
        mesh = self._blocks[block][0].mesh
        counts = [of_row(self._shares, row).num_microbatches for row in range(num_rows(self._shares))]
        return frozenset(rank for rank in range(mesh.size) if counts[rank * len(counts) // mesh.size] <= microbatch)

    def _store(self, activity: _Activity) -> None:
        """Keep what a segment stores, once it is over; idle devices keep what they have."""
        block, segment, mesh = activity.block, activity.segment, self._blocks[activity.block][0].mesh
        known = {part.value for part in segment.parts}
        for store in segment.stores:
            value = activity.values[store.value.value]
            if activity.idle:
                (before,) = (
                    activity.values[operand.value]
                    for operand in segment.external
                    if activity.tensors.get(operand.value) == store.target
                )
                value = [before[rank] if rank in activity.idle else own for rank, own in enumerate(value)]
            if store.value.value in known:
                self._persistent[self._names[block][store.target]] = (store.value.placements, value, mesh)
            else:
                self._stored[block, store.target] = value

    # Gradients in buckets.

    def _member(self, activity: _Activity, instruction: Instruction, backward: _Backward) -> Member | None:
        """Return the gradient that an instruction brings into a bucket; None if it does not."""
        if not travels(instruction, activity.phase):
            return None
        member = Member(activity.block - backward.first, activity.phase, defines(instruction)[0].value)
        return member if member in backward.departures else None

    def _proceed(self, backward: _Backward) -> None:
        """Let buckets leave whose gradients are there, and what waits for them go on, as far as it can."""
        while True:
            for activity in backward.active:
                self._advance(activity, backward)
            over = [activity for activity in backward.active if not activity.todo]
            backward.active = [activity for activity in backward.active if activity.todo]
            for activity in over:
                self._store(activity)
                if backward.is_last and activity.phase is not SegmentPhase.REDUCE:
                    last = len(self._passages) - 1
                    reduction = self._begin(activity.block, SegmentPhase.REDUCE, last, {}, backward)
                    backward.active += [] if reduction is None else [reduction]
            buckets = backward.departures.take()
            for bucket in buckets:
                self._depart(bucket, backward)
            if not over and not buckets:
                return

    def _advance(self, activity: _Activity, backward: _Backward) -> None:
        """Run what of a segment has waited for buckets that have left."""
        mesh, waiting = self._blocks[activity.block][0].mesh, list[Instruction]()
        for instruction in activity.todo:
            member = self._member(activity, instruction, backward)
            is_ready = all(operand.value in activity.values for operand in reads(instruction))
            if member is not None and is_ready and member.result not in activity.offered:
                activity.offered.add(member.result)
                backward.departures.offer(member)
            if member is not None or not is_ready:
                waiting.append(instruction)
                continue
            where = f"block {activity.block} {activity.phase}"
            self._execute(instruction, activity.values, mesh, where, activity.idle)
            self._hold(instruction, activity)
        activity.todo = waiting

    def _depart(self, bucket: Bucket, backward: _Backward) -> None:
        """Run the collective of a bucket."""
        members = set(bucket.members)
        found = [
            (activity, instruction)
            for activity in backward.active
            for instruction in activity.todo
            if self._member(activity, instruction, backward) in members
        ]
        stage = self._blocks[backward.first][0]
        moves: list[tuple[Placement, Placement]] = []
        tensors: list[Blocks] = []
        for activity, instruction in found:
            assert isinstance(instruction, Collective), "gradients travel in collectives"
            moves.append((instruction.source, instruction.target))
            tensors.append(activity.values[instruction.operand.value])
        axis = [own.name for own in stage.mesh.axes].index(bucket.key[1])
        moved = move_together(tensors, axis, moves, stage.mesh)
        for (activity, instruction), blocks in zip(found, moved, strict=True):
            activity.todo.remove(instruction)
            activity.values[defines(instruction)[0].value] = blocks
            _check_shapes(instruction, activity.values, stage.mesh, f"block {activity.block} {activity.phase}")
            self._hold(instruction, activity)
        self._departed[self._groups[stage.index]].append(bucket.name)

    def _crossed(self, block: int, phase: SegmentPhase, tensor: str, operand: Operand, blocks: Blocks) -> Blocks:
        """Return what a block gets of what its neighbour has handed on: all of it, or what crosses to its stage."""
        sender = self._blocks[block - 1 if phase is SegmentPhase.FORWARD else block + 1][0].index
        crossing = self._crossings.get((self._blocks[block][0].index, tensor, operand.placements))
        if crossing is None or crossing.sender != sender:
            return blocks
        return deliver(crossing, blocks, self._stages)

    def _external(self, block: int, operand: Operand, part: Part | None, microbatch: int) -> Blocks:
        """Return a value that is there anyway."""
        if part is None:
            if (block, operand.value) not in self._stored:
                raise ProgramError(f"block {block} reads {operand.value!r}, which it has not stored before")
            return self._stored[block, operand.value]
        tensor, placements, mesh = self._names[block][part.tensor], operand.placements, self._blocks[block][0].mesh
        exports = self._passages[microbatch].exports
        if (tensor, placements, mesh.shape) in exports:
            return exports[tensor, placements, mesh.shape]
        crossing = self._crossings.get((self._blocks[block][0].index, tensor, placements))
        if crossing is not None:
            sender = self._stages[crossing.sender].mesh.shape
            return deliver(crossing, exports[tensor, crossing.source.placements, sender], self._stages)
        is_master = operand.value.endswith(MASTER)  # the optimizer's own copy, wherever it lies
        if tensor in self._persistent and not is_master:
            stored, blocks, _ = self._persistent[tensor]
            if stored != placements:
                raise ProgramError(f"block {block} reads {tensor!r} at another placement than it was stored at")
            return blocks
        if tensor in self._in_host_memory[block] and not is_master:
            raise ProgramError(f"block {block} reads {tensor!r}, which is in host memory: nothing has fetched it")
        if tensor in self._graph.inputs:
            return scatter(self._data[microbatch][tensor], placements, mesh)
        key = (tensor, placements, mesh)
        if key not in self._scattered:
            whole = self._states.get(tensor, self._constants.get(tensor))
            if whole is None:
                raise ProgramError(f"block {block} reads {tensor!r}, which nothing has made yet")
            self._scattered[key] = scatter(np.asarray(whole), placements, mesh)
        return self._scattered[key]

    def _execute(
        self,
        instruction: Instruction,
        values: dict[str, Blocks],
        mesh: Mesh,
        where: str,
        idle: frozenset[int] = frozenset(),
    ) -> None:
        match instruction:
            case Compute():
                self._compute(instruction, values, mesh, idle)
            case Collective(axis=axis, source=source, target=target, operand=operand, result=result):
                values[result.value] = move(values[operand.value], mesh.axes.index(axis), source, target, mesh)
            case Slice(axis=axis, target=target, operand=operand, result=result):
                values[result.value] = move(values[operand.value], mesh.axes.index(axis), Replicate(), target, mesh)
            case Exchange(axis=axis, dim=dim, operand=operand, result=result):
                rows, fill = (instruction.before, instruction.after), instruction.fill
                values[result.value] = exchange(values[operand.value], mesh.axes.index(axis), dim, rows, fill, mesh)
            case Offload(operand=operand, result=result) | Fetch(operand=operand, result=result):
                copies = {id(block): block.copy() for block in values[operand.value]}  # devices may share one
                values[result.value] = [copies[id(block)] for block in values[operand.value]]
            case _:
                assert_never(instruction)
        _check_shapes(instruction, values, mesh, where)

    def _hold(self, instruction: Instruction, activity: _Activity) -> None:
        """Hold what an instruction has computed against the unpartitioned graph, if that is asked for.

        What its results are in the graph is noted in the tensors of the activity.
        """
        check, values, tensors = self._check, activity.values, activity.tensors
        block, phase, microbatch = activity.block, activity.phase, activity.microbatch
        if check is None or isinstance(instruction, Offload | Fetch):
            return  # nothing is asked for, or nothing is computed
        if any(share.num_microbatches <= microbatch for share in self._shares):
            return  # some rows have no such microbatch, and the unpartitioned graph has no rows
        if isinstance(instruction, Exchange):
            return  # rows with their neighbours are no part of a tensor; what is computed from them is checked
        made = defines(instruction)
        if isinstance(instruction, Compute):
            names = [name for name, out in zip(instruction.op.outputs, instruction.outputs, strict=True) if out]
        else:
            # What has not been made here came in under its own name.
            names = [tensors.get(instruction.operand.value, instruction.operand.value)]
        stage = self._blocks[block][0]
        once = phase in (SegmentPhase.REDUCE, SegmentPhase.UPDATE)
        for operand, name in zip(made, names, strict=True):
            tensors[operand.value] = name
            tensor = self._names[block][name]
            if once:
                tensor = check.total(tensor)
            problem = check.problem(operand, values[operand.value], stage.mesh, microbatch, tensor)
            if problem:
                where = f"stage {stage.index}, block {block} {phase}" + ("" if once else f", microbatch {microbatch}")
                raise ProgramError(
                    f"{where}: {problem}, in\n  {format_instruction(instruction)}",
                    hint="all that it reads was right, so its strategy, or what was changed inside it, is wrong",
                )

    def _compute(self, compute: Compute, values: dict[str, Blocks], mesh: Mesh, idle: frozenset[int]) -> None:
        """Run an op on every device; devices with the same inputs share the result, idle ones have zeros."""
        op = compute.op
        if compute.ring is not None:
            self._compute_in_ring(compute, compute.ring, values, mesh)  # of idle devices, too: nobody looks at it
            return
        numbers = {}
        for index, content in compute.constants:
            held = self._graph.constants[op.inputs[index]]
            numbers[index] = np.array(content, held.dtype).reshape(held.shape)
        starts = block_starts(compute.start, mesh) if compute.start is not None else []
        known: dict[tuple[int, ...], tuple[Array, ...]] = {}
        outputs: list[tuple[Array, ...]] = []
        for rank in range(mesh.size):
            if rank in idle:
                outputs.append(())
                continue
            inputs = [
                numbers.get(index, None if operand is None else values[operand.value][rank])
                for index, operand in enumerate(compute.inputs)
            ]
            if compute.start is not None:
                inputs.append(starts[rank])
            key = tuple(id(array) for array in inputs)
            if key not in known:
                known[key] = self._executor.run(op, inputs, self._graph.opset)
            outputs.append(known[key])
        at_work = next(result for result in outputs if result)
        nothing = tuple(np.zeros_like(array) for array in at_work) if idle else ()
        for slot, operand in enumerate(compute.outputs):
            if operand is not None:
                values[operand.value] = [(result or nothing)[slot] for result in outputs]

    def _compute_in_ring(self, compute: Compute, axis: Axis, values: dict[str, Blocks], mesh: Mesh) -> None:
        """Run an op on every line of devices along an axis, which pass blocks round."""
        assert compute.start is not None, "a ring is told where blocks start"
        op, starts = compute.op, block_starts(compute.start, mesh)

        def run(kind: str, inputs: Sequence[Array], num_outputs: int) -> tuple[Array, ...]:
            return self._executor.run_kind(kind, op.attrs, inputs, num_outputs, self._graph.opset, name=op.name)

        made: dict[int, tuple[Array, ...]] = {}
        known: dict[tuple[int, ...], list[tuple[Array, ...]]] = {}
        for line in lines(mesh, mesh.axes.index(axis)):
            blocks = [
                [values[operand.value][rank] for operand in compute.inputs if operand is not None] for rank in line
            ]
            key = tuple(id(array) for inputs in blocks for array in inputs)
            if key not in known:
                found = run_ring(RINGS[op.kind], blocks, [starts[rank] for rank in line], run, compute.ring_steps)
                assert found is not None, "the executor raises where a step cannot be run"
                known[key] = found
            made.update(zip(line, known[key], strict=True))
        for slot, operand in enumerate(compute.outputs):
            if operand is not None:
                values[operand.value] = [made[rank][slot] for rank in range(mesh.size)]


def _check_shapes(instruction: Instruction, values: Mapping[str, Blocks], mesh: Mesh, where: str) -> None:
    """Check that the results of an instruction have the shapes that the program states.

    Raises:
        ProgramError: If one has another shape.
    """
    for operand in defines(instruction):
        for position, block in enumerate(values[operand.value]):
            if block.shape != own_shape(operand.shape, operand.placements, mesh, position):
                line = format_instruction(instruction)
                raise ProgramError(f"{where}: {operand.value!r} is {list(block.shape)} in\n  {line}")

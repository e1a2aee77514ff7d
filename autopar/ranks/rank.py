"""One rank at work: its blocks, microbatch by microbatch, as the program says.

It is the counterpart of `autopar.runtime.reference`, which runs all devices in one process op by op: here a device
runs its own share, in compiled pieces, and talks to the others through a communicator.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeGuard, assert_never

from numpy.typing import NDArray

from autopar.cost.collectives import Collective as Kind
from autopar.errors import ProgramError
from autopar.ir.graph import Role
from autopar.program.bucket_order import Member, issue_order
from autopar.program.records import (
    STATE_COPIES,
    Collective,
    HostCopy,
    Operand,
    SegmentPhase,
    kept_values,
    rerun,
    saved_for,
)
from autopar.ranks.collectives import Pending, all_gather, begin, begin_together
from autopar.ranks.communicator import Communicator, Group, Memory, Tensor
from autopar.ranks.compiled_models import Compiled, Engine
from autopar.ranks.gradient_traffic import GradientTraffic
from autopar.ranks.instruction_order import Communication, Start, Wait
from autopar.ranks.lowered import Lowered
from autopar.ranks.mailbox import Mailbox
from autopar.ranks.rings import CompiledRing, run_ring
from autopar.ranks.routes import Refresh, forms, groups_of, held, messages, refreshes
from autopar.ranks.segments import CompiledSegment, CompiledStep, SegmentCompiler, asked
from autopar.ranks.stopwatch import Clock
from autopar.recompute import Recompute
from autopar.runtime.blocks import scatter
from autopar.schedule import SCHEDULES, Pass, Task
from autopar.sharding import Placements, Shard, format_placements, local_shape, own_shape

Array = NDArray[Any]
Values = dict[str, Tensor]
Key = tuple[str, Placements]

_CLOCK = {
    SegmentPhase.FORWARD: ("forward", "collectives"),
    SegmentPhase.AGAIN: ("backward", "collectives"),
    SegmentPhase.BACKWARD: ("backward", "collectives"),
    SegmentPhase.WEIGHT: ("backward", "collectives"),
    SegmentPhase.REDUCE: ("reduce", "reduce"),
    SegmentPhase.UPDATE: ("update", "gather"),
}
"""What compute and waiting count as, by phase."""


@dataclass(slots=True, eq=False)
class _Passage:
    """What one microbatch has left behind on this rank.

    Attributes:
        handed: Inputs of segments, by block, phase and position.
        saved: Forward values kept for the backward, by block and name.
        hosted: Those that lie in host memory until then.
        put_off: Values kept for the weight pass likewise, where the schedule splits the backward.
        exports: Values read far away.
    """

    handed: dict[tuple[int, SegmentPhase], dict[int, Tensor]] = field(default_factory=dict)
    saved: dict[int, Values] = field(default_factory=dict)
    hosted: dict[int, Values] = field(default_factory=dict)
    put_off: dict[int, Values] = field(default_factory=dict)
    exports: dict[Key, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Activity:
    """A segment being run.

    Attributes:
        block: Its block.
        phase: Its phase.
        compiled: Its steps.
        values: What it has read and made.
        again: Whether a forward runs again, for its backward.
        pending: Collectives under way, by the name of their result.
        todo: Steps of its tail that are left.
    """

    block: int
    phase: SegmentPhase
    compiled: CompiledSegment
    values: Values
    again: bool = False
    pending: dict[str, Pending] = field(default_factory=dict)
    todo: list[CompiledStep] = field(init=False)

    def __post_init__(self) -> None:
        self.todo = list(self.compiled.tail)

    @property
    def clock(self) -> tuple[str, str]:
        """What compute and waiting count as."""
        return _CLOCK[SegmentPhase.AGAIN if self.again else self.phase]


@dataclass(slots=True, eq=False)
class _Backward:
    """A backward of a stage in progress.

    Attributes:
        first: The first block of the stage.
        is_last: Whether the reductions of the step follow it.
        traffic: Its gradients.
        active: Segments that wait for some of them.
    """

    first: int
    is_last: bool
    traffic: GradientTraffic
    active: list[_Activity] = field(default_factory=list)

    def member(self, activity: _Activity, collective: Communication) -> Member:
        """Return the gradient that a collective is for."""
        return Member(activity.block - self.first, activity.phase, collective.result.value)


class Rank:
    """One device of a program.

    Args:
        lowered: The program.
        communicator: Reaches the other ranks.
        memory: Where tensors live.
        engine: Runs compute there.

    Attributes:
        group: Its group of devices: those of a stage, or of several that are interleaved.
        position: Its position in their mesh.
        outputs: Results of the model that its group made in the last step: by microbatch and tensor, the placements and
            its share.
        departed: Collectives of gradients of the last step in the order in which they started, named as in a simulated
            timeline.

    Raises:
        JobError: If the program has no such rank.
        ExecutionError: If the runtime does not take a piece of the model.
    """

    def __init__(self, lowered: Lowered, communicator: Communicator, memory: Memory, engine: Engine) -> None:
        lowered = lowered.of_rank(communicator.rank)
        program = lowered.program
        self.group, self.position = lowered.place(communicator.rank)
        self.outputs: dict[tuple[int, str], tuple[Placements, Tensor]] = {}
        self._lowered, self._communicator, self._memory, self._engine = lowered, communicator, memory, engine
        self.departed: list[str] = []
        self._splits = SCHEDULES[program.schedule].splits
        self._maker = Pass.WEIGHT if self._splits else Pass.BACKWARD
        self._mesh = program.stages[self.group].mesh
        self._stages = [program.stages[stage] for stage in lowered.stages_of(self.group)]
        self._issued = [
            [issue_order(stage, lowered.segments, splits=self._splits, last=last) for last in (False, True)]
            for stage in self._stages
        ]
        self._blocks = [block for stage in self._stages for block in lowered.blocks_of(stage.index)]
        self._groups: dict[str, Group] = groups_of(program.stages[self.group], self.position)
        compiler = SegmentCompiler(lowered, self.group, self.position, engine)
        self._compiled: dict[tuple[int, SegmentPhase], CompiledSegment] = {}
        self._constants: dict[tuple[int, SegmentPhase], Values] = {}
        self._tensors: dict[tuple[int, SegmentPhase], dict[str, str]] = {}
        for block in self._blocks:
            for phase in SegmentPhase:
                compiled = compiler.compile(block, phase)
                if compiled is not None:
                    self._compiled[block, phase] = compiled
                    self._constants[block, phase] = {
                        name: memory.load(array) for name, array in compiled.constants.items()
                    }
                    self._tensors[block, phase] = lowered.tensors(block, compiled.segment)
        self._mailbox = Mailbox(lowered, messages(lowered), self.group, self.position, communicator, memory)
        self._refreshes = refreshes(lowered)
        self._gradients = {state.input for state in lowered.graph.states if state.role is Role.GRADIENT}
        self._held: dict[Key, Tensor] = {}
        self._aside: dict[Key, Tensor] = {}  # persistent tensors in host memory
        self._begin_step((), Clock())

    def load(self, content: Callable[[str], Array]) -> None:
        """Take this rank's share of the persistent tensors.

        Args:
            content: Returns a whole tensor by name; gradient buffers are not asked for.
        """
        self._held, self._aside = {}, {}
        hosted = {
            key for block in self._blocks for phase in STATE_COPIES for _, key in self._state_copies(block, phase)
        }
        for key in held(self._lowered, self.group):
            if key in hosted and key[0] not in self._gradients:
                self._aside[key] = self._memory.offload(self._share(content(key[0]), key[1]))
            elif key[0] not in self._gradients:
                self._held[key] = self._share(content(key[0]), key[1])

    def output(self, microbatch: int, tensor: str, placements: Placements) -> Tensor:
        """Return this rank's share of an output of the last step; zeros if its row has no such microbatch."""
        if microbatch < self._lowered.program.num_microbatches:
            return self.outputs[microbatch, tensor][1]
        value = self._lowered.graph.values[tensor]
        return self._memory.zeros(local_shape(value.shape, placements, self._mesh), value.dtype)

    def kept(self, tensor: str, placements: Placements) -> Tensor:
        """Return this rank's share of a persistent tensor.

        Raises:
            ProgramError: If it has none.
        """
        if (tensor, placements) in self._aside:
            return self._memory.back(self._aside[tensor, placements])
        if (tensor, placements) not in self._held:
            raise ProgramError(
                f"rank {self._communicator.rank} has no {tensor!r} placed {format_placements(placements)}"
            )
        return self._held[tensor, placements]

    def step(self, microbatches: Sequence[Mapping[str, Array]], clock: Clock) -> None:
        """Run one step; gradient buffers start empty.

        Args:
            microbatches: Per microbatch, an array for each input of the graph. What the optimizer reads is taken from
                the last one.
            clock: Takes the seconds.

        Raises:
            ExecutionError: If a kernel fails.
            ProgramError: If values are not there when they are needed.
        """
        program = self._lowered.program
        microbatches = microbatches[: program.num_microbatches]  # rows may have different shares
        self._begin_step(microbatches, clock)
        tasks = program.orders()[self.group]
        left = Counter(task.microbatch for task in tasks)
        backwards = Counter(task.chunk for task in tasks if task.kind is self._maker)
        ends: list[_Backward] = []
        for task in tasks:
            backward: _Backward | None = None
            if task.kind is self._maker:
                backwards[task.chunk] -= 1
                backward = self._backward(task.chunk, is_last=not backwards[task.chunk])
                ends += [backward] if backward.is_last else []
            self._run_task(task, backward, keeps=program.trains)
            left[task.microbatch] -= 1
            if not left[task.microbatch]:
                self._passages[task.microbatch] = _Passage()
        last = len(microbatches) - 1
        for backward in ends:
            self._drain(backward, reductions=True)
        for block in self._blocks:
            self._fetch_state(block, tuple(STATE_COPIES))
            update = self._begin(block, SegmentPhase.UPDATE, last)
            if update is not None:
                self._end(update)
            self._offload_state(block, tuple(STATE_COPIES.values()))
        for refresh in self._refreshes:
            with clock("gather" if refresh.source == refresh.target else "transfers"):
                self._refresh(refresh)
        with clock("transfers"):
            self._mailbox.finish()

    def _fetch_state(self, block: int, phases: Sequence[SegmentPhase]) -> None:
        """Bring what of a block's state lies in host memory."""
        with self._clock("transfers"):
            for _, key in (own for phase in phases for own in self._state_copies(block, phase)):
                self._held[key] = self._memory.back(self._aside.pop(key))

    def _offload_state(self, block: int, phases: Sequence[SegmentPhase]) -> None:
        """Take state of a block back to host memory."""
        with self._clock("transfers"):
            for _, key in (own for phase in phases for own in self._state_copies(block, phase)):
                self._aside[key] = self._memory.offload(self._held.pop(key))

    def _state_copies(self, block: int, phase: SegmentPhase) -> Iterator[tuple[HostCopy, Key]]:
        """Yield the copies of a block's state in a phase, if it lies in host memory, and what they copy."""
        segment = self._lowered.segment(block, phase) if self._lowered.hosted_blocks[block] else None
        if segment is None:
            return
        tensors = self._lowered.tensors(block, segment)
        for copy in segment.instructions:
            assert isinstance(copy, HostCopy), "the segment only copies"
            here = copy.result if phase in STATE_COPIES else copy.operand
            yield copy, (tensors[here.value], here.placements)

    # A step.

    def _begin_step(self, microbatches: Sequence[Mapping[str, Array]], clock: Clock) -> None:
        self._data = microbatches
        self._clock = clock
        self._passages = [_Passage() for _ in microbatches]
        self._stored: dict[tuple[int, str], Tensor] = {}
        self._loaded: dict[tuple[int, Key], Tensor] = {}
        self.outputs, self.departed = {}, []
        self._mailbox.begin()
        for tensor, placements in held(self._lowered, self.group):
            if tensor in self._gradients:
                value = self._lowered.graph.values[tensor]
                self._held[tensor, placements] = self._memory.zeros(self._shape(value.shape, placements), value.dtype)
        for block in self._blocks:
            self._offload_state(block, (SegmentPhase.SUM_OFFLOAD,))

    def _backward(self, chunk: int, *, is_last: bool) -> _Backward:
        """Return a backward of a stage that is about to run."""
        stage = self._stages[chunk]
        buckets, communicator = self._issued[chunk][is_last], self._communicator
        traffic = GradientTraffic(buckets, self._groups, communicator, self._memory, self.departed)
        return _Backward(self._lowered.blocks_of(stage.index).start, is_last, traffic)

    def _run_task(self, task: Task, backward: _Backward | None, *, keeps: bool) -> None:
        """Run one microbatch through the blocks; what a block does not keep it makes again.

        Of a pass that makes gradients, what waits for traffic of a block is put off until another block has run.
        """
        passage, stage = self._passages[task.microbatch], self._stages[task.chunk]
        blocks = self._lowered.blocks_of(stage.index)
        with self._clock("transfers"):
            for message, tensor in self._mailbox.receive(task):
                if message.reader is None:
                    passage.exports[message.tensor, message.received.placements] = tensor
                else:
                    block, position = message.reader
                    passage.handed.setdefault((block, message.phase), {})[position] = tensor
        flavours = dict(zip(blocks, stage.recompute, strict=True))
        table = self._lowered.segments
        if task.kind is Pass.FORWARD:
            for block in blocks:
                full = flavours[block] is Recompute.FULL
                self._fetch_state(block, (SegmentPhase.PARAMETER_FETCH,))
                values = self._whole(block, SegmentPhase.FORWARD, task.microbatch, keep=full)
                self._offload_state(block, (SegmentPhase.PARAMETER_OFFLOAD,))
                if keeps and not full:
                    kept = kept_values(table, self._lowered.blocks[block][1], flavours[block])
                    passage.saved[block] = {operand.value: values[operand.value] for operand in kept}
                if flavours[block] is Recompute.OFFLOAD:
                    passage.hosted[block] = self._copied(block, SegmentPhase.OFFLOAD, values)
        else:
            for block in blocks:
                self._fetch_state(block, (SegmentPhase.SUM_FETCH, SegmentPhase.PARAMETER_FETCH))
            for block in reversed(blocks):
                kind = self._lowered.blocks[block][1]
                if task.kind is Pass.WEIGHT:
                    saved = passage.put_off.pop(block)
                    activity = self._begin(block, SegmentPhase.WEIGHT, task.microbatch, saved, backward=backward)
                else:
                    again, saved = rerun(table, kind, flavours[block]), passage.saved.pop(block, {})
                    if again is not None and again.phase is SegmentPhase.FETCH:
                        saved |= self._copied(block, again.phase, passage.hosted.pop(block))
                    elif again is not None:
                        saved |= self._whole(block, again.phase, task.microbatch, saved, again=True)
                    missing = [
                        item.value for item in table[kind, SegmentPhase.FORWARD].saved if item.value not in saved
                    ]
                    if missing:
                        raise ProgramError(f"block {block} reads {missing[0]!r} of its forward, which is not here")
                    saved = {operand.value: saved[operand.value] for operand in table[kind, SegmentPhase.FORWARD].saved}
                    activity = self._begin(block, SegmentPhase.BACKWARD, task.microbatch, saved, backward=backward)
                    late = saved_for(kind, SegmentPhase.WEIGHT, table) if self._splits else ()
                    if activity is not None:
                        passage.put_off[block] = {operand.value: activity.values[operand.value] for operand in late}
                if backward is not None:
                    self._follow(backward, block, activity)
                elif activity is not None:
                    self._end(activity)
            if backward is not None:
                self._drain(backward, reductions=False)
            for block in blocks:
                self._offload_state(block, (SegmentPhase.SUM_OFFLOAD, SegmentPhase.PARAMETER_OFFLOAD))

    # Gradients in buckets.

    def _follow(self, backward: _Backward, block: int, activity: _Activity | None) -> None:
        """Let buckets leave after the backward of a block, and what waits for earlier ones go on."""
        if activity is None:
            self._reduce(backward, block)
        else:
            carried = activity.compiled.carried
            activity.values = {name: tensor for name, tensor in activity.values.items() if name in carried}
            backward.active.append(activity)
        self._proceed(backward, wait=False)
        backward.traffic.end_turn()

    def _drain(self, backward: _Backward, *, reductions: bool) -> None:
        """Run a backward to its end, with the reductions of the step or without."""
        while backward.active and (
            reductions or any(activity.phase is not SegmentPhase.REDUCE for activity in backward.active)
        ):
            moved = self._proceed(backward, wait=True)
            assert moved, "buckets leave in an order in which they are complete"
        assert not reductions or backward.traffic.are_over, "all gradients have been there"

    def _proceed(self, backward: _Backward, *, wait: bool) -> bool:
        """Start buckets whose gradients are there, and carry on with what waits for those that have left.

        Args:
            backward: The backward.
            wait: Whether to wait for buckets that have left since the last block ran, too.

        Returns:
            Whether there was anything to do.
        """
        moves, moved = True, False
        while moves:
            moves = False
            for activity in backward.active:
                is_reduction = activity.phase is SegmentPhase.REDUCE
                if wait or not is_reduction or _starts_more(activity):
                    moved |= self._advance(backward, activity, wait=wait)
            over = [activity for activity in backward.active if not activity.todo]
            backward.active = [activity for activity in backward.active if activity.todo]
            for activity in over:
                self._keep(activity)
                if activity.phase is not SegmentPhase.REDUCE:
                    self._reduce(backward, activity.block)
                moves = True
            with self._clock("reduce"):
                moves |= backward.traffic.depart()
            moved |= moves
        return moved

    def _reduce(self, backward: _Backward, block: int) -> None:
        """Begin the reductions of a block if the step ends with this backward."""
        last = len(self._passages) - 1
        found = self._begin(block, SegmentPhase.REDUCE, last, backward=backward) if backward.is_last else None
        backward.active += [] if found is None else [found]

    def _advance(self, backward: _Backward, activity: _Activity, *, wait: bool) -> bool:
        """Carry on with the tail of a segment, but for what needs a bucket that has not left, or has only just.

        Returns:
            Whether a step was taken.
        """
        left: list[CompiledStep] = []
        for step in activity.todo:
            if self._is_ready(backward, activity, step, wait=wait):
                self._take_step(activity, step, backward, late=True)
            else:
                left.append(step)
        moved, activity.todo = len(left) < len(activity.todo), left
        return moved

    def _is_ready(self, backward: _Backward, activity: _Activity, step: CompiledStep, *, wait: bool) -> bool:
        """Return whether a step of a tail finds what it reads, and the bucket it waits for has left."""
        if isinstance(step, Wait):
            member = backward.member(activity, step.instruction)
            if member in backward.traffic:
                return backward.traffic.has_left(member, before_this_turn=not wait)
            return step.instruction.result.value in activity.pending
        return asked(step) <= activity.values.keys()

    def _copied(self, block: int, phase: SegmentPhase, values: Values) -> Values:
        """Return what a segment copies to or from host memory."""
        segment = self._lowered.segment(block, phase)
        copy = self._memory.offload if phase is SegmentPhase.OFFLOAD else self._memory.back
        with self._clock("transfers"):
            return {
                each.result.value: copy(values[each.operand.value])
                for each in (() if segment is None else segment.instructions)
                if isinstance(each, HostCopy)
            }

    def _whole(
        self,
        block: int,
        phase: SegmentPhase,
        microbatch: int,
        saved: Mapping[str, Tensor] | None = None,
        *,
        again: bool = False,
        keep: bool = False,
    ) -> Values:
        """Run a block's forward, or what of it runs `again`, to its end, and return its values.

        It may `keep` its inputs, to be run again later.
        """
        activity = self._begin(block, phase, microbatch, saved, again=again, keep=keep)
        assert activity is not None, "every kind has a forward"
        self._end(activity)
        return activity.values

    # A segment.

    def _begin(
        self,
        block: int,
        phase: SegmentPhase,
        microbatch: int,
        saved: Mapping[str, Tensor] | None = None,
        *,
        again: bool = False,
        keep: bool = False,
        backward: _Backward | None = None,
    ) -> _Activity | None:
        """Run the main part of a block's segment and hand on what it makes; None if there is nothing to do.

        Gradients are handed to the traffic of a `backward`, if there is one.
        """
        compiled = self._compiled.get((block, phase))
        if compiled is None:
            return None
        segment, passage = compiled.segment, self._passages[microbatch]
        values: Values = {**self._constants[block, phase], **(saved or {})}
        for operand in segment.external:
            if operand.value not in values:
                values[operand.value] = self._external(block, phase, operand, microbatch)
        handed = passage.handed.get((block, phase), {})
        if len(handed) != len(segment.inputs):
            raise ProgramError(f"block {block} {phase} gets {len(handed)} values, {len(segment.inputs)} expected")
        for position, operand in enumerate(segment.inputs):
            values[operand.value] = handed[position]
        if not keep:
            passage.handed.pop((block, phase), None)
        activity = _Activity(block, phase, compiled, values, again)
        self._take_steps(activity, compiled.main, backward)
        if not again:
            self._hand_on(activity, microbatch)
        return activity

    def _end(self, activity: _Activity) -> None:
        """Run the tail of a segment and keep what it stores."""
        self._take_steps(activity, activity.compiled.tail, late=True)
        self._keep(activity)

    def _keep(self, activity: _Activity) -> None:
        """Keep what a segment stores, once it is over."""
        segment, values = activity.compiled.segment, activity.values
        tensors = self._tensors[activity.block, activity.phase]
        known = forms(segment) if activity.phase is SegmentPhase.UPDATE else {}
        for store in segment.stores:
            value = store.value
            if value.value not in tensors:
                self._stored[activity.block, store.target] = values[value.value]
                continue
            tensor = self._lowered.names[activity.block][store.target]
            if tensor in self._gradients and (tensor, value.placements) not in self._held:
                raise ProgramError(f"block {activity.block} sums {tensor!r} at another placement than it keeps it at")
            self._held[tensor, value.placements] = values[value.value]
            for placements, name in known.get(store.target, {}).items():
                if (tensor, placements) in self._held:
                    self._held[tensor, placements] = values[name]

    def _hand_on(self, activity: _Activity, microbatch: int) -> None:
        """Pass on the outputs and exports of a segment, to other stages where they are needed."""
        block, phase, segment, values = activity.block, activity.phase, activity.compiled.segment, activity.values
        passage, tensors = self._passages[microbatch], self._tensors[block, phase]
        following = block + 1 if phase is SegmentPhase.FORWARD else block - 1
        if segment.outputs and following in self._blocks:
            for position, operand in enumerate(segment.outputs):
                passage.handed.setdefault((following, phase), {})[position] = values[operand.value]
        for operand in segment.exports:
            tensor = tensors[operand.value]
            passage.exports[tensor, operand.placements] = values[operand.value]
            if tensor in self._lowered.graph.outputs:
                self.outputs[microbatch, tensor] = (operand.placements, values[operand.value])
        if self._mailbox.outgoing(block, phase):
            with self._clock("transfers"):
                for message in self._mailbox.outgoing(block, phase):
                    self._mailbox.deliver(message, values[message.value.value])

    def _take_steps(
        self,
        activity: _Activity,
        steps: Sequence[CompiledStep],
        backward: _Backward | None = None,
        *,
        late: bool = False,
    ) -> None:
        """Take steps in order; gathers of parameters that start one after the other are one collective per axis."""
        for is_start, own in groupby(steps, lambda step: isinstance(step, Start)):
            left = list(own)
            gathers = [
                instruction
                for instruction in (step.instruction for step in left if isinstance(step, Start))
                if not self._travels(activity, instruction, backward) and _gathers(instruction, activity)
            ]
            if is_start and len(gathers) > 1:
                self._gather_together(activity, gathers)
                left = [step for step in left if not (isinstance(step, Start) and step.instruction in gathers)]
            for step in left:
                self._take_step(activity, step, backward, late=late)

    def _gather_together(self, activity: _Activity, gathers: Sequence[Collective]) -> None:
        """Start gathers of a segment, one collective per unit, mesh axis and element type."""
        together: dict[tuple[str, str], list[Collective]] = {}
        for instruction in gathers:
            together.setdefault((instruction.axis.name, instruction.unit), []).append(instruction)
        with self._clock(activity.clock[1]):
            for (axis, _), own in together.items():
                items = [(instruction, activity.values[instruction.operand.value]) for instruction in own]
                started = begin_together(items, self._groups[axis], self._communicator, self._memory)
                activity.pending.update(zip((item.result.value for item in own), started, strict=True))

    def _take_step(
        self, activity: _Activity, step: CompiledStep, backward: _Backward | None = None, *, late: bool = False
    ) -> None:
        values, (computing, waiting) = activity.values, activity.clock
        if late and activity.phase in (SegmentPhase.BACKWARD, SegmentPhase.WEIGHT):
            waiting = "reduce"
        match step:
            case Compiled():
                with self._clock(computing):
                    values.update(self._engine.run(step, values))
            case CompiledRing(instruction=instruction):
                assert instruction.ring is not None, "it runs in a ring"
                with self._clock(computing):
                    group = self._groups[instruction.ring.name]
                    values.update(run_ring(step, values, group, self._communicator, self._memory, self._engine))
            case Start(instruction=instruction) if self._travels(activity, instruction, backward):
                assert backward is not None and isinstance(instruction, Collective), "it brings a gradient"  # noqa: PT018
                member = backward.member(activity, instruction)
                backward.traffic.offer(member, instruction, values[instruction.operand.value])
            case Wait(instruction=instruction) if self._travels(activity, instruction, backward):
                assert backward is not None, "it brings a gradient"
                with self._clock(waiting):
                    member = backward.member(activity, instruction)
                    values[instruction.result.value] = backward.traffic.wait(member)
            case Start(instruction=instruction):
                with self._clock(waiting):
                    tensor, group = values[instruction.operand.value], self._groups[instruction.axis.name]
                    activity.pending[instruction.result.value] = begin(
                        instruction, tensor, group, self._communicator, self._memory
                    )
            case Wait(instruction=instruction):
                with self._clock(waiting):
                    values[instruction.result.value] = activity.pending.pop(instruction.result.value).wait()
            case _:
                assert_never(step)

    def _travels(self, activity: _Activity, instruction: Communication, backward: _Backward | None) -> bool:
        """Return whether communication is that of a gradient that travels in a bucket."""
        return backward is not None and backward.member(activity, instruction) in backward.traffic

    # Values.

    def _share(self, whole: Array, placements: Placements) -> Tensor:
        """Return this rank's block of a tensor."""
        return self._memory.load(scatter(whole, placements, self._mesh)[self.position])

    def _external(self, block: int, phase: SegmentPhase, operand: Operand, microbatch: int) -> Tensor:
        """Return a value that is there anyway."""
        tensor = self._tensors[block, phase].get(operand.value)
        if tensor is None:
            if (block, operand.value) not in self._stored:
                raise ProgramError(f"block {block} reads {operand.value!r}, which it has not stored before")
            return self._stored[block, operand.value]
        key = (tensor, operand.placements)
        if key in self._passages[microbatch].exports:
            return self._passages[microbatch].exports[key]
        if key in self._held:
            return self._held[key]
        if tensor not in self._lowered.graph.inputs:
            raise ProgramError(f"block {block} reads {tensor!r}, which nothing has made yet")
        if (microbatch, key) not in self._loaded:
            self._loaded[microbatch, key] = self._share(self._data[microbatch][tensor], operand.placements)
        return self._loaded[microbatch, key]

    def _refresh(self, refresh: Refresh) -> None:
        """Bring a copy of an updated tensor up to date; inside a group by way of the whole tensor."""
        here, there = refresh.source == self.group, refresh.target == self.group
        if not (here or there):
            return
        if here and there:
            tensor = self._gathered(self._held[refresh.tensor, refresh.stored], refresh.stored)
            self._held[refresh.tensor, refresh.copy] = self._share(self._memory.fetch(tensor), refresh.copy)
        elif here and refresh.crossing is not None:
            self._mailbox.send_pieces(refresh.crossing, self._held[refresh.tensor, refresh.stored], refresh.dtype)
        elif here:
            self._mailbox.send(refresh.target, self._held[refresh.tensor, refresh.stored])
        elif refresh.crossing is not None:
            self._held[refresh.tensor, refresh.copy] = self._mailbox.receive_pieces(refresh.crossing, refresh.dtype)
        else:
            shape = self._shape(refresh.shape, refresh.copy)
            self._held[refresh.tensor, refresh.copy] = self._mailbox.receive_from(refresh.source, shape, refresh.dtype)

    def _shape(self, shape: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
        """Return the shape of this rank's block of a tensor."""
        return own_shape(local_shape(shape, placements, self._mesh), placements, self._mesh, self.position)

    def _gathered(self, tensor: Tensor, placements: Placements) -> Tensor:
        """Return the whole tensor of which this rank has a share."""
        for axis, placement in zip(reversed(self._mesh.axes), reversed(placements), strict=True):
            if isinstance(placement, Shard) and axis.size > 1:
                group = self._groups[axis.name]
                tensor = all_gather(tensor, placement, group, self._communicator, self._memory).wait()
        return tensor


def _gathers(instruction: Communication, activity: _Activity) -> TypeGuard[Collective]:
    """Return whether a collective gathers a parameter: one that is there before the pass, or an updated one."""
    if not isinstance(instruction, Collective) or instruction.kind is not Kind.ALL_GATHER:
        return False
    return activity.phase is SegmentPhase.UPDATE or instruction.operand in activity.compiled.segment.external


def _starts_more(activity: _Activity) -> bool:
    """Whether the remaining steps of a segment start a collective after they have waited for another one."""
    return any(isinstance(step, Start) for step in activity.todo)

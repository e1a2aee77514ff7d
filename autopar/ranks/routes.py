"""What travels between stages, and which copies of a tensor have to follow its update.

Some schedules let stages share their devices, a *group*. Device i of a group talks to device i of another one, unless a
value crosses in pieces. A group sends in the order of its schedule, so what arrives from one group comes in an order
that its receiver knows beforehand.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.program.records import (
    Collective,
    Compute,
    Crossing,
    Operand,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
)
from autopar.ranks.communicator import Group
from autopar.ranks.lowered import Lowered
from autopar.schedule import Pass, Task
from autopar.sharding import Placements

_PASS_PHASES = {
    Pass.FORWARD: SegmentPhase.FORWARD,
    Pass.BACKWARD: SegmentPhase.BACKWARD,
    Pass.WEIGHT: SegmentPhase.WEIGHT,
}


@dataclass(frozen=True, slots=True)
class Message:
    """A value that a stage makes and one on other devices needs, once per microbatch.

    Attributes:
        source: Group of devices that sends.
        target: Group that receives.
        stage: Stage that needs it.
        block: Block that makes it.
        phase: In this phase.
        value: Its name there, with its local shape.
        dtype: Its element type.
        task: The pass at whose start the receiver needs it.
        reader: Receiving block and position in its inputs; None for a value found by name.
        tensor: Name of the tensor in the graph; "" for a value found by position.
        crossing: How it crosses; None if it goes from device i to device i.
    """

    source: int
    target: int
    stage: int
    block: int
    phase: SegmentPhase
    value: Operand
    dtype: str
    task: Pass
    reader: tuple[int, int] | None
    tensor: str
    crossing: Crossing | None = field(default=None, compare=False)

    @property
    def received(self) -> Operand:
        """The value as the receiver holds it."""
        return self.value if self.crossing is None else self.crossing.target


@dataclass(frozen=True, slots=True)
class Refresh:
    """A copy of a persistent tensor that must follow its update.

    Attributes:
        tensor: Name in the graph.
        source: Group of devices that updates it.
        stored: Placements it is stored at there.
        target: Group that has the copy.
        copy: Placements of the copy.
        shape: Shape of the whole tensor.
        dtype: Its element type.
        crossing: How it crosses; None if it stays in its group, or goes from device i to device i.
    """

    tensor: str
    source: int
    stored: Placements
    target: int
    copy: Placements
    shape: tuple[int, ...]
    dtype: str
    crossing: Crossing | None = None


def groups_of(stage: StageProgram, position: int) -> dict[str, Group]:
    """Return the ranks that a device of a stage talks to over each axis, itself among them, by axis name."""
    mesh, first = stage.mesh, stage.devices[0]
    coordinates = np.unravel_index(position, mesh.shape)
    grid = np.arange(first, first + mesh.size).reshape(mesh.shape)
    groups = {}
    for index, axis in enumerate(mesh.axes):
        line = tuple(slice(None) if each == index else coordinates[each] for each in range(len(mesh.axes)))
        groups[axis.name] = tuple(int(rank) for rank in grid[line])
    return groups


def messages(lowered: Lowered) -> tuple[Message, ...]:
    """Return all values that cross from one stage to another."""
    readers = _far_readers(lowered)
    return tuple(message for block in range(len(lowered.blocks)) for message in _sent_by(lowered, block, readers))


_Readers = dict[str, dict[tuple[int, Placements], Pass]]
"""By tensor, the stages that read it as an external value and its placements there; in which pass first."""


def _far_readers(lowered: Lowered) -> _Readers:
    readers: _Readers = {}
    for kind, phase in _PASS_PHASES.items():
        for block, (stage, _) in enumerate(lowered.blocks):
            segment = lowered.segment(block, phase)
            if segment is None:
                continue
            tensors = lowered.tensors(block, segment)
            for operand in segment.external:
                if operand.value in tensors:
                    found = readers.setdefault(tensors[operand.value], {})
                    found.setdefault((stage.index, operand.placements), kind)
    return readers


def _sent_by(lowered: Lowered, block: int, readers: _Readers) -> Iterator[Message]:
    stage = lowered.blocks[block][0].index
    for kind, phase in _PASS_PHASES.items():
        segment = lowered.segment(block, phase)
        if segment is None:
            continue
        types, tensors = lowered.dtypes(segment), lowered.tensors(block, segment)
        following = block + 1 if phase is SegmentPhase.FORWARD else block - 1
        for position, operand in enumerate(segment.outputs):
            expected = lowered.segment(following, phase)
            assert expected is not None, "what is sent is received"
            reader, tensor = lowered.blocks[following][0].index, tensors[operand.value]
            way = _way(lowered, stage, operand, reader, tensor, expected.inputs[position].placements)
            if way is not None:
                own, target, crossing = way
                at, dtype = (following, position), types[operand.value]
                yield Message(own, target, reader, block, phase, operand, dtype, kind, at, "", crossing)
        for operand in segment.exports:
            tensor = tensors[operand.value]
            for (reader, placements), first in sorted(readers.get(tensor, {}).items(), key=lambda item: item[0][0]):
                way = _way(lowered, stage, operand, reader, tensor, placements)
                if way is not None:
                    own, target, crossing = way
                    dtype = types[operand.value]
                    yield Message(own, target, reader, block, phase, operand, dtype, first, None, tensor, crossing)


def _way(
    lowered: Lowered, stage: int, operand: Operand, reader: int, tensor: str, placements: Placements
) -> tuple[int, int, Crossing | None] | None:
    """Return how a value goes to a stage that reads it at some placements: the groups of devices, and its crossing.

    None if it is there already, or if another form of it is what goes there.
    """
    source, target = lowered.group(stage), lowered.group(reader)
    if source == target:
        return None
    here, there = lowered.program.stages[stage].mesh, lowered.program.stages[reader].mesh
    if here.shape == there.shape and operand.placements == placements:
        return source, target, None
    crossing = lowered.crossings.get((reader, tensor, placements))
    if crossing is None or (crossing.sender, crossing.source.placements) != (stage, operand.placements):
        return None
    return source, target, crossing


def sent_in_order(lowered: Lowered, all_messages: tuple[Message, ...], source: int) -> Iterator[tuple[Message, Task]]:
    """Yield what a group of devices sends during a step, in order, each with the task during which it is made."""
    by_block: dict[tuple[int, SegmentPhase], list[Message]] = {}
    for message in all_messages:
        if message.source == source:
            by_block.setdefault((message.block, message.phase), []).append(message)
    for task in lowered.program.orders()[source]:
        blocks = lowered.blocks_of(lowered.stages_of(source)[task.chunk])
        for block in blocks if task.kind is Pass.FORWARD else reversed(blocks):
            for message in by_block.get((block, _PASS_PHASES[task.kind]), ()):
                yield message, task


def held(lowered: Lowered, group: int) -> dict[tuple[str, Placements], None]:
    """Return the persistent tensors a group of devices reads, with their placements, in order of first use."""
    states = {state.input for state in lowered.graph.states}
    found: dict[tuple[str, Placements], None] = {}
    for block in (block for stage in lowered.stages_of(group) for block in lowered.blocks_of(stage)):
        for phase in SegmentPhase:
            segment = lowered.segment(block, phase)
            if segment is None:
                continue
            tensors = lowered.tensors(block, segment)
            for operand in segment.external:
                if tensors.get(operand.value) in states:
                    found[tensors[operand.value], operand.placements] = None
    return found


def stored(lowered: Lowered) -> dict[str, tuple[int, Placements]]:
    """Return where the update leaves every persistent tensor it changes: group of devices and placements."""
    found: dict[str, tuple[int, Placements]] = {}
    for block, (stage, _) in enumerate(lowered.blocks):
        segment = lowered.segment(block, SegmentPhase.UPDATE)
        for store in segment.stores if segment is not None else ():
            found[lowered.names[block][store.target]] = (lowered.group(stage.index), store.value.placements)
    return found


def forms(segment: Segment) -> dict[str, dict[Placements, str]]:
    """Return, for every tensor an update stores, the values it is on the way: name by placements.

    An update computes the new parameter at one placement and moves it to another: both are the same tensor.
    """
    made = {
        instruction.result.value: instruction.operand
        for instruction in segment.instructions
        if isinstance(instruction, Collective | Slice)
    }
    found: dict[str, dict[Placements, str]] = {}
    for store in segment.stores:
        value: Operand | None = store.value
        while value is not None:
            found.setdefault(store.target, {})[value.placements] = value.value
            value = made.get(value.value)
    assert all(isinstance(instruction, Compute | Collective | Slice) for instruction in segment.instructions), (
        "updates exchange no halos"
    )
    return found


def refreshes(lowered: Lowered) -> tuple[Refresh, ...]:
    """Return the copies of updated tensors that no instruction brings up to date.

    These are parameters read by blocks on other devices or at other placements than their own block keeps them at (tied
    embeddings).
    """
    homes = stored(lowered)
    passed: dict[tuple[str, int], set[Placements]] = {}
    for block, (stage, _) in enumerate(lowered.blocks):
        segment = lowered.segment(block, SegmentPhase.UPDATE)
        if segment is not None:
            for target, known in forms(segment).items():
                passed.setdefault((lowered.names[block][target], lowered.group(stage.index)), set()).update(known)
    crossings = {
        (lowered.group(crossing.receiver), crossing.tensor, crossing.target.placements): crossing
        for crossing in lowered.program.crossings
        if crossing.phase is SegmentPhase.UPDATE
    }
    found = []
    for group in range(lowered.program.num_groups):
        for tensor, placements in held(lowered, group):
            if tensor in homes and placements not in passed.get((tensor, group), ()):
                source, home = homes[tensor]
                value = lowered.graph.values[tensor]
                crossing = crossings.get((group, tensor, placements))
                found.append(Refresh(tensor, source, home, group, placements, value.shape, value.dtype, crossing))
    return tuple(found)

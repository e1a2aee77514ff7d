"""Segments compiled for one rank: every run of compute is one model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.program.records import (
    HOST_PHASES,
    Compute,
    Instruction,
    Operand,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    reads,
)
from autopar.ranks.assemble import Node, Port, assemble
from autopar.ranks.compiled_models import Compiled, Engine
from autopar.ranks.instruction_order import Round, Run, Start, Step, Wait, order
from autopar.ranks.lowered import Lowered
from autopar.ranks.rings import CompiledRing, RingModel, ring_model
from autopar.ranks.routes import forms
from autopar.runtime.blocks import scatter
from autopar.sharding import Mesh, Shard, own_shape

Array = NDArray[Any]

CompiledStep = Compiled | CompiledRing | Start | Wait


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """A run of compute as a model, not compiled yet.

    Attributes:
        run: The instructions.
        model: The serialised model.
        inputs: What it reads.
        outputs: What it returns.
    """

    run: Run
    model: bytes
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


_ModelStep = RunModel | RingModel | Start | Wait


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSegment:
    """What a rank does for a block in a phase.

    Attributes:
        segment: Its record.
        main: Steps until the segment's outputs are there.
        tail: What waits for overlapped collectives.
        constants: Values that are known data and are read by communication: fed to every run.
        carried: Values that the tail reads or the segment stores: what is kept until then.
    """

    segment: Segment
    main: tuple[CompiledStep, ...]
    tail: tuple[CompiledStep, ...]
    constants: Mapping[str, Array]
    carried: frozenset[str]


class SegmentCompiler:
    """Compiles the segments of one rank; blocks of one kind with equal constants share them.

    Args:
        lowered: The program.
        group: Group of devices of the rank.
        position: Its position in their mesh.
        engine: Compiles the models; None if only `pieces` are asked for.
    """

    def __init__(self, lowered: Lowered, group: int, position: int, engine: Engine | None = None) -> None:
        self._lowered = lowered
        self._mesh: Mesh = lowered.program.stages[group].mesh
        self._position = position
        self._engine = engine
        self._known: dict[tuple[int, SegmentPhase, bytes], CompiledSegment] = {}

    def compile(self, block: int, phase: SegmentPhase) -> CompiledSegment | None:
        """Return a block's segment, ready to run; None if it does nothing in that phase.

        Raises:
            ExecutionError: If the runtime does not take a model.
        """
        segment = self._lowered.segment(block, phase)
        if segment is None or phase in HOST_PHASES:  # copies have nothing to compile
            return None
        constants = self._constants(block, segment)
        digest = hashlib.sha256()
        for name, array in constants.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        key = (segment.kind, phase, digest.digest())
        if key not in self._known:
            self._known[key] = self._compile(segment, constants)
        return self._known[key]

    def _constants(self, block: int, segment: Segment) -> dict[str, Array]:
        """Return the blocks of known data the segment reads."""
        tensors, known = self._lowered.tensors(block, segment), self._lowered.constants
        found: dict[str, Array] = {}
        for operand in segment.external:
            whole = known.get(tensors.get(operand.value, ""))
            if whole is not None:
                found[operand.value] = np.asarray(scatter(whole, operand.placements, self._mesh)[self._position])
        return found

    def pieces(self, block: int, phase: SegmentPhase) -> tuple[RunModel, ...]:
        """Return the runs of compute of a block's segment as models; none if it does nothing in that phase."""
        segment = self._lowered.segment(block, phase)
        if segment is None or phase in HOST_PHASES:
            return ()
        main, tail = self._steps(segment, self._constants(block, segment))
        return tuple(step for step in (*main, *tail) if isinstance(step, RunModel))

    def single_ops(self, block: int, phase: SegmentPhase) -> tuple[RunModel, ...]:
        """Return every op of a block's segment that a rank runs alone as a model of its own; none if there is none."""
        segment = self._lowered.segment(block, phase)
        if segment is None or phase in HOST_PHASES:
            return ()
        types, constants = self._lowered.dtypes(segment), self._constants(block, segment)
        return tuple(
            self._piece(Run((instruction,)), types, constants, {operand.value for operand in defines(instruction)})
            for instruction in segment.instructions
            if isinstance(instruction, Compute) and instruction.ring is None
        )

    def _compile(self, segment: Segment, constants: Mapping[str, Array]) -> CompiledSegment:
        engine = self._engine
        assert engine is not None, "it was given one to compile with"

        def ready(step: _ModelStep) -> CompiledStep:
            match step:
                case RunModel():
                    return engine.compile(step.model, step.inputs, step.outputs)
                case RingModel():
                    return step.compile(engine)
                case _:
                    return step

        main, tail = self._steps(segment, constants)
        carried = {store.value.value for store in segment.stores}.union(*map(asked, tail))
        if segment.phase is SegmentPhase.UPDATE:
            carried.update(value for known in forms(segment).values() for value in known.values())
        return CompiledSegment(segment, tuple(map(ready, main)), tuple(map(ready, tail)), constants, frozenset(carried))

    def _steps(self, segment: Segment, constants: Mapping[str, Array]) -> tuple[list[_ModelStep], list[_ModelStep]]:
        """Return the steps of a segment, main part and tail, with every run of compute as a model."""
        wanted = {operand.value for operand in (*self._kept(segment), *segment.outputs, *segment.exports)}
        kept = wanted | {store.value.value for store in segment.stores}
        if segment.phase is SegmentPhase.UPDATE:  # parameters may be kept at every placement they pass through
            kept |= {value for known in forms(segment).values() for value in known.values()}
        steps = order(_needed(segment.instructions, kept), wanted, segment.phase)
        types = self._lowered.dtypes(segment)
        every = [*steps.main, *steps.tail]
        found: list[_ModelStep] = []
        for index, step in enumerate(every):
            if isinstance(step, Run):
                read_later = {value for later in every[index + 1 :] for value in _reads(later)}
                found.append(self._piece(step, types, constants, kept | read_later))
            elif isinstance(step, Round):
                dtypes = [types[operand.value] for operand in reads(step.instruction)]
                found.append(ring_model(step.instruction, dtypes, self._lowered.graph.opset))
            else:
                found.append(step)
        cut = len(steps.main)
        return found[:cut], found[cut:]

    def _kept(self, segment: Segment) -> set[Operand]:
        """Return what a segment makes for the backward, whichever way its blocks recompute."""
        table, kind = self._lowered.segments, segment.kind
        if segment.phase is SegmentPhase.AGAIN:
            made = {operand for instruction in segment.instructions for operand in defines(instruction)}
            return made & set(table[kind, SegmentPhase.FORWARD].saved)
        again = table.get((kind, SegmentPhase.AGAIN)) if segment.phase is SegmentPhase.FORWARD else None
        return {*segment.saved, *(again.saved if again is not None else ())}

    def _piece(self, run: Run, types: Mapping[str, str], constants: Mapping[str, Array], wanted: set[str]) -> RunModel:
        """Return a run of compute as a model."""
        nodes: list[Node] = []
        known: dict[str, Array] = {}
        inputs: dict[str, Operand] = {}
        outputs: dict[str, Operand] = {}
        for index, instruction in enumerate(run.instructions):
            for operand in reads(instruction):
                if operand.value in constants:
                    known[operand.value] = constants[operand.value]
                elif operand.value not in outputs:
                    inputs[operand.value] = operand
            outputs.update((operand.value, operand) for operand in defines(instruction))
            node, numbers = self._node(instruction, f"number.{index}")
            nodes.append(node)
            known.update(numbers)
        ports = [Port(name, self._shape(operand), types[name]) for name, operand in inputs.items()]
        results = [Port(name, self._shape(operand), types[name]) for name, operand in outputs.items() if name in wanted]
        model = assemble(nodes, ports, results, known, self._lowered.graph.opset)
        return RunModel(run, model, tuple(ports), tuple(results))

    def _node(self, instruction: Compute | Slice, stem: str) -> tuple[Node, dict[str, Array]]:
        """Return an instruction as an op of a model, with the numbers that are its own."""
        if isinstance(instruction, Slice):
            axis = instruction.axis
            rows = _own_rows(
                instruction.operand.shape[instruction.target.dim],
                instruction.target,
                axis.size,
                self._coordinates()[self._mesh.axes.index(axis)],
            )
            attrs = (("axis", instruction.target.dim),)
            return Node("Gather", attrs, (instruction.operand.value, stem), (instruction.result.value,)), {stem: rows}
        op = instruction.op
        names = ["" if operand is None else operand.value for operand in instruction.inputs]
        numbers: dict[str, Array] = {}
        for index, content in instruction.constants:
            held = self._lowered.graph.constants[op.inputs[index]]
            names[index] = f"{stem}.{index}"
            numbers[names[index]] = np.array(content, held.dtype).reshape(held.shape)
        if instruction.start is not None:
            coordinates = self._coordinates()
            start = instruction.start.of([coordinates[self._mesh.axes.index(axis)] for axis in instruction.start.axes])
            names.append(f"{stem}.start")
            numbers[names[-1]] = np.array(start, np.int64)
        results = tuple("" if operand is None else operand.value for operand in instruction.outputs)
        return Node(op.kind, op.attrs, tuple(names), results), numbers

    def _shape(self, operand: Operand) -> tuple[int, ...]:
        """Return the shape of the rank's own block of a value."""
        return own_shape(operand.shape, operand.placements, self._mesh, self._position)

    def _coordinates(self) -> tuple[int, ...]:
        return tuple(int(index) for index in np.unravel_index(self._position, self._mesh.shape))


def _own_rows(count: int, target: Shard, size: int, coordinate: int) -> Array:
    """Return which rows of a whole dim a device keeps.

    >>> _own_rows(12, Shard(0, chunks=2), 3, 1).tolist()
    [2, 3, 8, 9]
    """
    if target.whole:
        ends = (0, *target.ends(size))
        return np.arange(ends[coordinate], ends[coordinate + 1], dtype=np.int64)
    return np.arange(count, dtype=np.int64).reshape(target.chunks, size, -1)[:, coordinate].reshape(-1)


def _needed(instructions: Sequence[Instruction], kept: set[str]) -> list[Instruction]:
    """Return the instructions that what is kept depends on."""
    read = set(kept)
    needed: list[Instruction] = []
    for instruction in reversed(instructions):
        if any(operand.value in read for operand in defines(instruction)):
            read.update(operand.value for operand in reads(instruction))
            needed.append(instruction)
    return needed[::-1]


def asked(step: _ModelStep | CompiledStep) -> set[str]:
    """Return the values that a step reads, or whose collective it waits for."""
    match step:
        case RunModel() | Compiled():
            return {port.name for port in step.inputs}
        case RingModel() | CompiledRing():
            return {operand.value for operand in reads(step.instruction)}
        case Start(instruction=instruction) | Wait(instruction=instruction):
            return {instruction.operand.value}


def _reads(step: Step) -> Sequence[str]:
    match step:
        case Run(instructions=instructions):
            return [operand.value for instruction in instructions for operand in reads(instruction)]
        case Round(instruction=instruction):
            return [operand.value for operand in reads(instruction)]
        case Start(instruction=instruction):
            return [instruction.operand.value]
        case Wait():
            return []

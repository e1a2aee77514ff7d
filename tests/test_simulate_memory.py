"""Simulated memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given

from autopar.program.records import (
    Category,
    Collective,
    Compute,
    Offload,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    StageProgram,
    Table,
    defines,
    kept_values,
    reads,
    rerun,
    saved_for,
)
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Pass
from autopar.sharding import Mesh
from autopar.simulate import simulate
from tests.programs import ExactCosts, equal_stages, programs, two_block_step

Tensor = tuple[object, ...]
"""A tensor of the whole step: where and for which microbatch it was defined, and its name there."""


@dataclass
class _Step:
    """A moment: tensors that are read and tensors that come to be."""

    uses: list[Tensor]
    makes: list[tuple[Tensor, float]]


class _Flat:
    """Everything one device of a stage does in a step, instruction by instruction, microbatches apart."""

    def __init__(self, program: Program, stage: StageProgram) -> None:
        self.program, self.stage, self.table = program, stage, program.table()
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}  # (microbatch, block) -> tensors by name
        self.handed: dict[tuple[object, ...], list[Tensor]] = {}  # (pass, microbatch) -> tensors on their way
        self.steps = list(self._walk())

    def _walk(self) -> Iterator[_Step]:
        order = SCHEDULES[self.program.schedule].order(
            self.stage.index, len(self.program.stages), self.program.num_microbatches
        )
        blocks = list(enumerate(zip(self.stage.blocks, self.stage.recompute, strict=True)))
        for task in order:
            if task.kind is Pass.FORWARD:
                for block, (kind, flavour) in blocks:
                    yield from self._forward(task.microbatch, block, kind, flavour)
            elif task.kind is Pass.BACKWARD:
                for block, (kind, flavour) in reversed(blocks):
                    yield from self._backward(task.microbatch, block, kind, flavour)
            else:
                for block, (kind, _) in reversed(blocks):
                    segment, known = self.table[kind, SegmentPhase.WEIGHT], self.kept[task.microbatch, block]
                    yield from self._body(("W", task.microbatch, block), segment, known)
        for block, (kind, _) in blocks:
            for phase in (SegmentPhase.REDUCE, SegmentPhase.UPDATE):
                if (kind, phase) in self.table and self.program.trains:
                    yield from self._body(("once", phase, block), self.table[kind, phase], {})

    def _receive(self, key: tuple[object, ...], inputs: tuple[Operand, ...]) -> Iterator[_Step]:
        """Take what the block before handed over, or have it sent by the neighbouring stage."""
        if key not in self.handed:
            self.handed[key] = [("received", *key, operand.value) for operand in inputs]
            sizes = [operand.bytes for operand in inputs]
            yield _Step([], list(zip(self.handed[key], sizes, strict=True)))

    def _body(
        self, tag: tuple[object, ...], segment: Segment, known: dict[str, Tensor], *, again: bool = False
    ) -> Iterator[_Step]:
        """Run instructions; values that are stored or external take nothing, views nothing of their own.

        What is handed over is read at the end.
        """
        stored = {store.value.value for store in segment.stores}
        for instruction in segment.instructions:
            uses = [known[operand.value] for operand in reads(instruction) if operand.value in known]
            makes: list[tuple[Tensor, float]] = []
            for operand in defines(instruction):
                if isinstance(instruction, Compute) and instruction.op.kind == "Reshape":
                    if uses:
                        known[operand.value] = uses[0]
                elif operand.value not in stored:
                    known[operand.value] = (*tag, operand.value)
                    makes.append((known[operand.value], operand.bytes))
            if isinstance(instruction, Compute) and instruction.kept:
                known[f"behind {instruction.op.name}"] = (*tag, "behind", instruction.op.name)
                makes.append((known[f"behind {instruction.op.name}"], instruction.kept))
            yield _Step(uses, makes)
        if not again:
            yield _Step([known[operand.value] for operand in segment.outputs], [])

    def _forward(self, microbatch: int, block: int, kind: int, flavour: Recompute) -> Iterator[_Step]:
        segment = self.table[kind, SegmentPhase.FORWARD]
        yield from self._receive((Pass.FORWARD, microbatch), segment.inputs)
        arrived = self.handed[Pass.FORWARD, microbatch]
        known = {operand.value: tensor for operand, tensor in zip(segment.inputs, arrived, strict=True)}
        yield _Step(list(known.values()), [])
        yield from self._body(("F", microbatch, block), segment, known)
        self.handed[Pass.FORWARD, microbatch] = [known[operand.value] for operand in segment.outputs]
        hosted = flavour is Recompute.OFFLOAD and (kind, SegmentPhase.OFFLOAD) in self.table
        if hosted:  # all of it is there when the forward ends; then it leaves
            saved = {operand.value for operand in segment.saved}
            yield _Step([known[name] for name in known if name in saved or name.startswith("behind ")], [])
        again = rerun(self.table, kind, flavour)
        repeated = {f"behind {i.op.name}" for i in again.instructions if isinstance(i, Compute)} if again else set()
        kept = {operand.value for operand in kept_values(self.table, kind, flavour)}
        kept |= {name for name in known if name.startswith("behind ") and name not in repeated and not hosted}
        self.kept[microbatch, block] = {name: known[name] for name in kept if name in known}

    def _fetch(self, tag: tuple[object, ...], fetch: Segment, known: dict[str, Tensor], forward: Segment) -> _Step:
        """Bring back what was taken to host memory, as tensors of their own; views share one, as in the forward."""
        memory: dict[str, str] = {}
        makes: dict[Tensor, float] = {}
        for instruction in forward.instructions:
            if isinstance(instruction, Compute) and instruction.op.kind == "Reshape":
                ((source,), (target,)) = reads(instruction), defines(instruction)
                memory[target.value] = memory.get(source.value, source.value)
            elif isinstance(instruction, Compute) and instruction.kept:
                known[f"behind {instruction.op.name}"] = (*tag, "behind", instruction.op.name)
                makes[*tag, "behind", instruction.op.name] = instruction.kept
        for operand in (operand for copy in fetch.instructions for operand in defines(copy)):
            known[operand.value] = (*tag, memory.get(operand.value, operand.value))
            makes[known[operand.value]] = operand.bytes
        return _Step([], list(makes.items()))

    def _backward(self, microbatch: int, block: int, kind: int, flavour: Recompute) -> Iterator[_Step]:
        forward, segment = self.table[kind, SegmentPhase.FORWARD], self.table[kind, SegmentPhase.BACKWARD]
        kept = self.kept[microbatch, block]
        known = dict(kept)
        yield from self._receive((Pass.BACKWARD, microbatch), segment.inputs)
        arrived = self.handed[Pass.BACKWARD, microbatch]
        again = rerun(self.table, kind, flavour)
        if again is not None and again.phase is SegmentPhase.FETCH:
            yield self._fetch(("again", microbatch, block), again, known, forward)
        elif again is not None:
            yield from self._body(("again", microbatch, block), again, known, again=True)
        behind = [tensor for name, tensor in known.items() if name.startswith("behind ")]
        known = {operand.value: known[operand.value] for operand in forward.saved if operand.value in known}
        known |= {operand.value: tensor for operand, tensor in zip(segment.inputs, arrived, strict=True)}
        yield _Step(list(known.values()), [])
        yield from self._body(("B", microbatch, block), segment, known)
        self.handed[Pass.BACKWARD, microbatch] = [known[operand.value] for operand in segment.outputs]
        if flavour is Recompute.FULL:  # a block's inputs are kept until its backward is done
            yield _Step(list(kept.values()), [])
        yield _Step(behind, [])  # and what kernels leave behind
        late = saved_for(kind, SegmentPhase.WEIGHT, self.table)
        self.kept[microbatch, block] = {
            operand.value: known[operand.value] for operand in late if operand.value in known
        }

    def peaks(self) -> tuple[float, float]:
        """Return the most bytes at once in passes and in the update.

        A tensor lives from the step that makes it to the last one that reads it.
        """
        last = {tensor: i for i, step in enumerate(self.steps) for tensor in (*step.uses, *(t for t, _ in step.makes))}
        live: dict[Tensor, float] = {}
        highest = {False: 0.0, True: 0.0}
        for i, step in enumerate(self.steps):
            live.update(step.makes)
            once = any(tensor[0] == "once" for tensor in live)
            highest[once] = max(highest[once], sum(live.values()))
            live = {tensor: size for tensor, size in live.items() if last[tensor] > i}
        return highest[False], highest[True]


@given(program=programs())
def test_peak_is_that_of_the_whole_step_instruction_by_instruction(program: Program) -> None:
    """From block peaks and counts of microbatches the same follows as from all tensors of the step.

    Where the backward is split, a value that one block makes and the weight pass of the next one reads counts twice
    while the backward of the first runs; and one that a block makes again, while a weight pass waits for the first of
    its makings, counts once.

    Gradients are reduced while the next block runs: those of the block that runs last are not there in its own fullest
    moment, so that a peak is between those without any reduction and with the largest.
    """
    timeline = simulate(program, ExactCosts())

    for stage, simulated in zip(program.stages, timeline.stages, strict=True):
        resident = sum(part.bytes for part in stage.resident)
        table, sizes = program.table(), dict(simulated.memory.breakdown)
        ends = [table[stage.blocks[0], SegmentPhase.FORWARD].inputs]
        if stage.index < len(program.stages) - 1 and program.trains:
            ends.append(table[stage.blocks[-1], SegmentPhase.BACKWARD].inputs)
        splits = SCHEDULES[program.schedule].splits
        maker = SegmentPhase.WEIGHT if splits else SegmentPhase.BACKWARD
        reducing = max(_reducing(table.get((kind, maker))) for kind in stage.blocks)
        buffers = sum(operand.bytes for operands in ends for operand in operands) + reducing
        buffers += 2 * max(_hosted(table, kind, what) for kind, what in zip(stage.blocks, stage.recompute, strict=True))
        flat = _Flat(program, stage)
        tasks, update = flat.peaks()
        update += sum(part.bytes for part in stage.hosted)  # less than the buckets it passes through
        if splits:
            twice = sum(o.bytes for kind in stage.blocks[1:] for o in table[kind, SegmentPhase.FORWARD].inputs)
            blocks = zip(stage.blocks, stage.recompute, strict=True)
            redone = sum(
                o.bytes
                for kind, flavour in blocks
                if flavour in (Recompute.FULL, Recompute.OFFLOAD)
                for o in table[kind, SegmentPhase.FORWARD].outputs
            )
            assert simulated.memory.bytes >= resident + max(tasks - redone + buffers - reducing, update)
            assert simulated.memory.bytes <= resident + max(tasks + twice + buffers, update)
            continue
        assert simulated.memory.bytes >= resident + max(tasks + buffers - reducing, update)
        assert simulated.memory.bytes <= resident + max(tasks + buffers, update)
        assert sizes[Category.COMMUNICATION] == 0.0 or sizes[Category.COMMUNICATION] >= buffers - reducing
        assert sizes[Category.GATHERED] == 0.0  # programs drawn gather nothing


def _hosted(table: Table, kind: int, flavour: Recompute) -> float:
    """Return the bytes a block takes to host memory, by what the copies and kernels of its segments say."""
    offload = table.get((kind, SegmentPhase.OFFLOAD)) if flavour is Recompute.OFFLOAD else None
    return sum(copy.bytes for copy in offload.instructions if isinstance(copy, Offload)) if offload else 0.0


def _reducing(segment: Segment | None) -> float:
    """Return the bytes a block hands to collectives that run beside compute."""
    instructions = segment.instructions if segment else ()
    return sum(i.operand.bytes for i in instructions if isinstance(i, Collective) and i.overlaps)


@given(program=programs())
def test_breakdown_adds_up_to_the_peak(program: Program) -> None:
    for stage in simulate(program, ExactCosts()).stages:
        sizes = [size for _, size in stage.memory.breakdown]
        assert sum(sizes) == stage.memory.bytes
        assert min(sizes) >= 0


@given(program=programs())
def test_samples_reach_the_peak_and_no_higher(program: Program) -> None:
    """The maximum of memory over time is the reported peak, in the reported task."""
    timeline = simulate(program, ExactCosts(), trace=True)

    for stage in timeline.stages:
        samples = [sample for sample in timeline.samples if sample.stage == stage.index]
        highest = max(samples, key=lambda sample: sample.bytes)
        ends = [event.start + event.seconds for event in timeline.events if event.start <= stage.memory.start]
        assert highest.bytes == pytest.approx(stage.memory.bytes, rel=1e-12)
        assert stage.memory.start <= highest.start <= max([stage.memory.start, *ends])


def test_memory_rises_block_by_block() -> None:
    """3 blocks keep 5 bytes each on top of 10; forwards of a second, backwards of two, which free them; the update."""
    program = equal_stages(1, 1, "gpipe", blocks_per_stage=3, activation=5.0)

    timeline = simulate(program, ExactCosts(), trace=True)

    found = [(sample.start, sample.bytes) for sample in timeline.samples]
    assert found == [(0, 15), (1, 20), (2, 25), (3, 25), (5, 20), (7, 15), (9, 10)]


def test_recompute_keeps_block_inputs_only() -> None:
    """4 blocks on a stage, 3 microbatches in flight, 5 bytes saved per block; boundary values take nothing here.

    Without recompute 3 x 4 x 5 = 60 bytes on top of 10 resident ones, with it the 5 bytes of one block at a time.
    """
    plain, recomputed = (
        simulate(equal_stages(3, 4, "1f1b", activation=5, blocks_per_stage=4, recompute=recompute), ExactCosts())
        for recompute in (Recompute.NONE, Recompute.FULL)
    )

    assert plain.stages[0].memory.bytes == 70
    assert recomputed.stages[0].memory.bytes == 15
    assert dict(recomputed.stages[0].memory.breakdown)[Category.ACTIVATIONS] == 0


def test_peak_of_two_blocks_is_the_one_worked_out_by_hand() -> None:
    """12 bytes are resident; in the backward of block 1 `a` of block 0 and `x` are there, `dx` and `v.acc` come.

    They are of 4 bytes each: 12 + 16 = 28, reached in the first backward, which starts at 6.
    """
    memory = simulate(two_block_step(Mesh.of(dp=2, tp=8)), ExactCosts()).stages[0].memory

    assert (memory.bytes, memory.start, memory.during) == (28, 6, "B0")

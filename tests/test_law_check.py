"""Every value can be held against the unpartitioned model's, and the first wrong one is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.configuration import Configuration
from autopar.errors import ProgramError
from autopar.program.records import Collective, Compute, Instruction, SegmentPhase
from autopar.program.text import format_instruction
from autopar.runtime import run_step
from autopar.sharding import Mesh, Partial
from tests.executions import EXECUTOR, TINY, TOLERANCE, Execution, model_rules, random_plan
from tests.shares import some

CONFIGURATION = Configuration(2, Mesh.of(outer=2, inner=2), 2, "1f1b")


@pytest.mark.parametrize("name", some(TINY, lambda name: name == "gpt2"))
def test_every_value_of_a_program_is_the_models(name: str, cache_dir: Path) -> None:
    """Of forward, backward, sums and updates, in all microbatches."""
    execution = Execution.of(name, 4, 2)
    for seed in range(2):
        plan = random_plan(execution.folded, model_rules(name, cache_dir), CONFIGURATION, 4, seed)

        run_step(
            execution.program(plan), execution.folded, execution.microbatches, execution.states, EXECUTOR,
            check=TOLERANCE,
        )  # fmt: skip


def _epsilon(instruction: Instruction) -> Instruction | None:
    """Change an attribute of a kernel."""
    if isinstance(instruction, Compute) and instruction.op.kind == "LayerNormalization":
        return replace(instruction, op=replace(instruction.op, attrs=(("axis", -1), ("epsilon", 0.5))))
    return None


def _reduction(instruction: Instruction) -> Instruction | None:
    """Take the largest term for the sum of terms."""
    if isinstance(instruction, Collective) and instruction.source == Partial():
        return replace(instruction, source=Partial("max"))
    return None


def _sign(instruction: Instruction) -> Instruction | None:
    """Subtract a gradient from the sum so far."""
    if isinstance(instruction, Compute) and instruction.op.name.endswith(".grad.sum"):
        return replace(instruction, op=replace(instruction.op, kind="Sub"))
    return None


def _rate(instruction: Instruction) -> Instruction | None:
    """Give the optimizer another learning rate."""
    if isinstance(instruction, Compute) and instruction.op.kind == "autopar::Adam":
        attrs = tuple((key, 1.0 if key == "learning_rate" else value) for key, value in instruction.op.attrs)
        return replace(instruction, op=replace(instruction.op, attrs=attrs))
    return None


CORRUPTIONS = (
    (SegmentPhase.FORWARD, _epsilon),
    (SegmentPhase.FORWARD, _reduction),
    (SegmentPhase.BACKWARD, _reduction),
    (SegmentPhase.BACKWARD, _sign),
    (SegmentPhase.REDUCE, _reduction),
    (SegmentPhase.UPDATE, _rate),
)


@pytest.mark.parametrize(("phase", "corrupt"), CORRUPTIONS)
def test_the_first_wrong_value_is_named(
    phase: SegmentPhase, corrupt: Callable[[Instruction], Instruction | None], cache_dir: Path
) -> None:
    """One instruction of the repeated block is made wrong: the error has its text and the block that runs it first."""
    execution, rules = Execution.of("gpt2", 4, 2), model_rules("gpt2", cache_dir)
    repeated = max(execution.folded.chain, key=execution.folded.chain.count)
    plans = (random_plan(execution.folded, rules, CONFIGURATION, 4, seed) for seed in range(100))
    program, segment, index, wrong = next(
        (program, segment, index, made)
        for program in map(execution.program, plans)
        for segment in [program.table()[repeated, phase]]
        for index, instruction in enumerate(segment.instructions)
        if (made := corrupt(instruction)) is not None
    )
    changed = replace(segment, instructions=(*segment.instructions[:index], wrong, *segment.instructions[index + 1 :]))
    program = replace(program, segments=tuple(changed if each is segment else each for each in program.segments))
    kinds = execution.folded.chain

    with pytest.raises(ProgramError) as error:
        run_step(program, execution.folded, execution.microbatches, execution.states, EXECUTOR, check=TOLERANCE)

    backward = phase is SegmentPhase.BACKWARD
    block = len(kinds) - 1 - kinds[::-1].index(repeated) if backward else kinds.index(repeated)
    stage = next(stage.index for stage in program.stages if (block := block - len(stage.blocks)) < 0)
    block += sum(len(stage.blocks) for stage in program.stages[: stage + 1])
    once = phase in (SegmentPhase.REDUCE, SegmentPhase.UPDATE)
    message = str(error.value)
    assert message.startswith(f"stage {stage}, block {block} {phase}{'' if once else ', microbatch 0'}: ")
    assert "is off by" in message
    assert format_instruction(wrong) in message

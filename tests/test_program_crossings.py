"""The laws of values that cross between stages of other meshes, on programs made by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import ProgramError
from autopar.ir.graph import Op
from autopar.program.records import Compute, Crossing, Operand, Piece, Program, Segment, SegmentPhase, StageProgram
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.recompute import Recompute
from autopar.sharding import Mesh, Partial, Replicate, Shard
from tests.executions import Execution, model_rules
from tests.programs import equal_stages
from tests.variants import random_plan_of_variants

FORWARD = SegmentPhase.FORWARD


def _op(name: str, output: Operand) -> Compute:
    return Compute(Op(name, "Work", (), (output.value,), block=0), (), (output,))


def _two_meshes(sent: Operand, received: Operand, *crossings: Crossing) -> Program:
    """Return a program whose stages have meshes dp=2 and tp=4."""
    made = _op("g", Operand("g", (), 0.0, (Replicate(),)))
    segments = (
        Segment(0, FORWARD, (), (), (_op("f", sent),), outputs=(sent,)),
        Segment(1, FORWARD, (received,), (), (made,)),
    )
    stages = (
        StageProgram(0, (0, 2), Mesh.of(dp=2), (0,), (Recompute.NONE,), ()),
        StageProgram(1, (2, 6), Mesh.of(tp=4), (1,), (Recompute.NONE,), ()),
    )
    return Program(stages, segments, "forward-only", 1, crossings)


HALF, QUARTER = Operand("y", (4, 12), 0.0, (Shard(0),)), Operand("x", (8, 3), 0.0, (Shard(1),))
PIECES = tuple(Piece(i, 2 + j, ((4 * i, 4 * i + 4), (3 * j, 3 * j + 3))) for j in range(4) for i in range(2))
CROSSING = Crossing(0, 1, FORWARD, "y", HALF, QUARTER, PIECES)


def test_stages_of_other_meshes_may_lie_differently_but_agree_on_the_tensor() -> None:
    """What one stage has split over dp=2 the next has split over tp=4: it crosses in eight pieces."""
    verify_program(_two_meshes(HALF, QUARTER, CROSSING))
    with pytest.raises(ProgramError, match="disagree in forward"):
        verify_program(_two_meshes(HALF, QUARTER))
    with pytest.raises(ProgramError, match="disagree in forward"):
        verify_program(_two_meshes(HALF, replace(QUARTER, shape=(8, 12)), CROSSING))


UNLAWFUL_CROSSINGS = {
    "no such stage": (replace(CROSSING, receiver=2), "to stage 2, but there are 2"),
    "the same stage": (replace(CROSSING, receiver=0), "which has the same devices"),
    "a phase in which nothing crosses": (replace(CROSSING, phase=SegmentPhase.REDUCE), "in reduce"),
    "terms of a maximum": (
        replace(CROSSING, source=replace(HALF, placements=(Partial("max"),))),
        "its terms are put together by max",
    ),
    "a term for others": (
        replace(
            CROSSING,
            source=replace(HALF, shape=(8, 12), placements=(Partial(),)),
            target=replace(QUARTER, shape=(8, 12), placements=(Partial(),)),
            pieces=(Piece(1, 2, ((0, 8), (0, 12))),),
        ),
        "is of term 1, which other devices add up",
    ),
    "too few placements": (replace(CROSSING, target=replace(QUARTER, placements=())), "'x' is nowhere on mesh tp=4"),
    "a block that cannot be": (
        replace(CROSSING, source=replace(HALF, placements=(Shard(0, 3),))),
        "not divisible by mesh axis 'dp' of size 2 in 3 chunks",
    ),
    "another tensor": (replace(CROSSING, target=replace(QUARTER, shape=(8, 12))), r"\[8, 12\] is sent, \[8, 48\]"),
    "a foreign sender": (replace(CROSSING, pieces=(replace(PIECES[0], sender=3),)), "3->2 is not from a device of"),
    "a foreign receiver": (replace(CROSSING, pieces=(replace(PIECES[0], receiver=1),)), "0->1 is not from a device of"),
    "a box of other dims": (replace(CROSSING, pieces=(replace(PIECES[0], box=((0, 4),)),)), "no part of a tensor of 2"),
    "an empty box": (replace(CROSSING, pieces=(replace(PIECES[0], box=((0, 0), (0, 3))),)), "no part of a tensor of 2"),
    "what the sender lacks": (
        replace(CROSSING, pieces=(replace(PIECES[0], box=((4, 8), (0, 3))),)),
        "does not hold",
    ),
    "what the receiver does not need": (
        replace(CROSSING, pieces=(replace(PIECES[0], box=((0, 4), (3, 6))),)),
        "does not hold",
    ),
    "a piece too few": (replace(CROSSING, pieces=PIECES[1:]), "device 2 does not get every element of its block once"),
    "a piece twice": (
        replace(CROSSING, pieces=(PIECES[0], *PIECES[2:], PIECES[0])),
        "device 2 does not get every element of its block once",
    ),
}


@pytest.mark.parametrize("name", UNLAWFUL_CROSSINGS)
def test_unlawful_crossings_are_refused(name: str) -> None:
    """Each device of the receiving stage gets each element of its block once, from a device that has it."""
    crossing, message = UNLAWFUL_CROSSINGS[name]

    with pytest.raises(ProgramError, match=message):
        verify_program(_two_meshes(HALF, QUARTER, crossing))


def test_a_value_crosses_to_a_stage_once() -> None:
    with pytest.raises(ProgramError, match="'y' crosses to stage 1 twice"):
        verify_program(_two_meshes(HALF, QUARTER, CROSSING, CROSSING))


def test_programs_with_crossings_survive_being_written_and_read() -> None:
    """With the variant of the stage, too."""
    program = _two_meshes(HALF, QUARTER, CROSSING)
    program = replace(program, stages=(program.stages[0], replace(program.stages[1], variant=1)))

    assert parse_program(format_program(program)) == program
    assert "crossing 0->1 forward y\n  source y: [4, 12] S(0) 0\n" in format_program(program)
    assert "\n  piece 0->3 [0:4, 3:6]\n" in format_program(program)


@pytest.fixture(scope="module")
def tied(cache_dir: Path) -> tuple[Execution, Program]:
    """Return a model with tied weights on 2 and 4 devices: activations, gradients and the embedding cross."""
    execution = Execution.of("gpt2", 4, 2)
    meshes = (Mesh.of(a=2), Mesh.of(a=2, b=2))
    plan = random_plan_of_variants(execution.folded, model_rules("gpt2", cache_dir), meshes, "1f1b", 2, 4, 1)
    return execution, execution.program(plan)


def _is_of(phase: SegmentPhase, tensor: str) -> Callable[[Crossing], bool]:
    return lambda crossing: crossing.phase is phase and tensor in crossing.tensor


GRADIENT, COPY = _is_of(SegmentPhase.BACKWARD, "logits.weight"), _is_of(SegmentPhase.UPDATE, "embed.tokens")


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (GRADIENT, "which no other block has exported so before"),
        (COPY, "the copy of 'embed.tokens.weight' that block . reads does not follow its update"),
    ],
)
def test_what_others_read_crosses(
    tied: tuple[Execution, Program], which: Callable[[Crossing], bool], message: str
) -> None:
    """The gradient of a tied embedding goes to its owner, and its new content to whoever has a copy."""
    execution, program = tied
    left = tuple(crossing for crossing in program.crossings if not which(crossing))
    assert len(left) == len(program.crossings) - 1

    with pytest.raises(ProgramError, match=message):
        verify_program(replace(program, crossings=left), execution.folded)


def test_a_crossing_is_of_the_tensor_that_is_read(tied: tuple[Execution, Program]) -> None:
    """Neighbours hand over what the graph says."""
    execution, program = tied
    named = tuple(
        replace(crossing, tensor="another") if crossing.phase is FORWARD else crossing for crossing in program.crossings
    )

    with pytest.raises(ProgramError, match=r"does not cross from block . to block . in forward"):
        verify_program(replace(program, crossings=named), execution.folded)


def test_nothing_crosses_that_nobody_reads(tied: tuple[Execution, Program]) -> None:
    execution, program = tied
    spare = replace(next(filter(COPY, program.crossings)), tensor="embed.positions.weight")

    with pytest.raises(ProgramError, match="crosses to stage 1 in update, where nobody needs it"):
        verify_program(replace(program, crossings=(*program.crossings, spare)), execution.folded)


def test_the_law_holds_of_the_pieces(tied: tuple[Execution, Program]) -> None:
    """A copy that gets another device's part of its embedding is found by the executor, too."""
    execution, program = tied
    execution.check_program(program)
    copy = next(filter(COPY, program.crossings))
    swapped = replace(copy, pieces=copy.pieces[1:])

    with pytest.raises(ProgramError, match=r"the copy of '.*' on stage 1 is not the original|copies of one tensor"):
        execution.check_program(
            replace(program, crossings=tuple(swapped if each is copy else each for each in program.crossings))
        )


def test_groups_of_devices_keep_to_one_variant() -> None:
    """Stages that take turns have one mesh, and a kind of block one variant."""
    turns, apart = equal_stages(4, 4, "interleaved", num_chunks=2), equal_stages(3, 4, "1f1b")
    mixed = (*turns.stages[:3], replace(turns.stages[3], variant=1))
    shared = (*apart.stages[:2], replace(apart.stages[2], blocks=(1,), variant=1))

    with pytest.raises(ProgramError, match="stage 3 has the devices of stage 1 and another mesh or other placements"):
        verify_program(replace(turns, stages=mixed))
    with pytest.raises(ProgramError, match="stage 2 has blocks of kind 1, which another variant has, too"):
        verify_program(replace(apart, stages=shared))

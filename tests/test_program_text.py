"""The text form of programs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from autopar.cost import Collective as CollectiveKind
from autopar.errors import ProgramError
from autopar.ir.graph import Op
from autopar.ir.routing import Routed, Routing
from autopar.program.records import (
    Collective,
    Compute,
    Exchange,
    Instruction,
    Operand,
    Part,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
    Start,
)
from autopar.program.text import format_instruction, format_program, parse_program
from autopar.recompute import Recompute
from autopar.sharding import Axis, Mesh, Partial, Replicate, Shard
from tests.programs import equal_stages, programs, two_block_step

GOLDEN = Path(__file__).parent / "golden"
DP = Axis("dp", 4, 2)


@given(program=programs())
def test_print_then_parse_is_the_identity(program: Program) -> None:
    assert parse_program(format_program(program)) == program


def _one_op(op: Op, inputs: tuple[Operand | None, ...], outputs: tuple[Operand | None, ...]) -> Program:
    """Return a program of one op; what it reads is external."""
    external = tuple(dict.fromkeys(operand for operand in inputs if operand is not None))
    segment = Segment(0, SegmentPhase.FORWARD, (), external, (Compute(op, inputs, outputs),))
    return Program(
        (StageProgram(0, (0, 1), Mesh.of(dp=1), (0,), (Recompute.NONE,), ()),), (segment,), "forward-only", 1
    )


def test_names_and_attributes_of_any_kind_survive() -> None:
    """Spaces, quotes and keywords in names; attributes of every type; absent values; other names in the graph."""
    op = Op(
        name="/model/layers.0/mul 1",
        kind="com.acme::Fancy",
        inputs=("a b", "", '"q"', "-"),
        outputs=("", "input"),
        attrs=(
            ("alpha", 0.5),
            ("axes", (0, -1)),
            ("empty", ()),
            ("eps", 1e-05),
            ("mode", "a, b"),
            ("names", ("x", "y")),
            ("scales", (1.0, 2.0)),
            ("to", 7),
        ),
        block=-1,
        origin="some op",
    )
    inputs = (Operand("a b", (2, 3), 12.0), None, Operand('"q"', (), 0.25), Operand("-|S(0)R|forward", (1,), 1e30))
    program = _one_op(op, inputs, (None, Operand("input", (4,), 16.0)))

    assert parse_program(format_program(program)) == program


def test_constants_parts_and_exports_survive() -> None:
    """Content of constants, with negative numbers and none; placements of all kinds; where blocks start; exports."""
    op = Op("reshape", "Reshape", ("a b", "shape"), ("y",))
    given = (Operand("a b", (4,), 16.0, (Shard(0, 3), Replicate())), Operand("shape", (2,), 16.0, (Partial("max"),)))
    made = Operand("y", (2, 2), 16.0)
    program = _one_op(op, given, (made,))
    (segment,) = program.segments
    compute = Compute(op, given, (made,), constants=((1, (2, -1)), (0, ())), start=Start((DP,), rows=2))
    parts = (Part("a b", "x y"), Part("y", "y"), Part("shape", "z"))
    changed = replace(segment, instructions=(compute,), exports=(made,), parts=parts)
    program = replace(program, segments=(changed,))

    assert parse_program(format_program(program)) == program


X = Operand("x", (4, 8), 64.0, (Replicate(),))
BLOCK = Operand("y", (1, 8), 16.0, (Shard(0, 2),))


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Slice(DP, Shard(0, 2), X, BLOCK), "y: [1, 8] S(0/2) 16 = slice(x) axis=(dp: 4/2) R->S(0/2)"),
        (
            Exchange(DP, 0, 2, 1, "lowest", X, BLOCK, 24.0),
            "y: [1, 8] S(0/2) 16 = exchange(x) axis=(dp: 4/2) dim=0 before=2 after=1 fill=lowest bytes=24",
        ),
        (
            Collective(CollectiveKind.ALL_TO_ALL, DP, Shard(0), Shard(0, 2), X, BLOCK, 16.0),
            "y: [1, 8] S(0/2) 16 = all_to_all(x) axis=(dp: 4/2) S(0)->S(0/2) bytes=16",
        ),
        (
            Collective(
                CollectiveKind.ALL_TO_ALL,
                DP,
                Shard(0),
                Shard(0, 2),
                X,
                BLOCK,
                16.0,
                routed=Routed(Routing(256, 8, 8, 4), 2),
            ),
            "y: [1, 8] S(0/2) 16 = all_to_all(x) axis=(dp: 4/2) S(0)->S(0/2) bytes=16 routed=(256, 8, 8, 4, 2)",
        ),
    ],
)
def test_changes_of_placement_read_as_one_line(instruction: Instruction, text: str) -> None:
    segment = Segment(0, SegmentPhase.FORWARD, (), (X,), (instruction,))
    program = Program(
        (StageProgram(0, (0, 4), Mesh((DP,)), (0,), (Recompute.NONE,), ()),), (segment,), "forward-only", 1
    )

    assert format_instruction(instruction) == text
    assert parse_program(format_program(program)) == program


def test_listing_reads_as_documented() -> None:
    """The listing of two blocks with tensor and data parallelism, whole."""
    text = format_program(two_block_step(Mesh.of(dp=2, tp=8)))

    assert text == (GOLDEN / "program_two_blocks.txt").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("end\n", "", "does not finish with 'end'"),
        ("program 1f1b", "programme 1f1b", "line 1: expected"),
        ("microbatches=3", "microbatches=three", "line 1: expected a whole number at column 27"),
        ("segment 0 forward", "segment 0 sideways", "line 6: expected a phase"),
        ("Work(dy, saved)", "Work(dy, lost)", "expected the name of a value defined before"),
        ("[8] 1 =", "[8 1 =", "expected ','"),
        ("recompute=none", "recompute=perhaps", "expected none, offload, selective or full"),
        ("resident parameters", "resident luggage", "expected a category"),
        ("output y", "output y y", "expected the end of the line"),
        ("[8] 0 =", "[8] S(1)Q 0 =", "expected a number"),
        ("[8] 0 =", "[8] S(x) 0 =", "expected placements ('S(x)' is not a placement"),
    ],
)
def test_malformed_text_points_at_the_place(old: str, new: str, message: str) -> None:
    text = format_program(equal_stages(2, 3, "1f1b"))
    assert old in text

    with pytest.raises(ProgramError, match=re.escape(message)):
        parse_program(text.replace(old, new, 1))

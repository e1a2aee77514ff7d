"""The laws of programs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from autopar.cost import Collective as CollectiveKind
from autopar.errors import ProgramError
from autopar.program.records import (
    Collective,
    Instruction,
    Operand,
    Part,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    Store,
)
from autopar.program.verify import verify_program
from autopar.sharding import Axis, Mesh, Partial, Replicate, Shard
from tests.programs import all_reduce, equal_stages, programs, value, work

TP = Axis("tp", 1, 1)


@given(program=programs())
def test_drawn_programs_are_lawful(program: Program) -> None:
    """What the other tests draw keeps every law."""
    verify_program(program)


def _segment(program: Program, index: int, /, **changes: Any) -> Program:
    """Return the program with one segment changed."""
    segments = list(program.segments)
    segments[index] = replace(segments[index], **changes)
    return replace(program, segments=tuple(segments))


def _append(program: Program, index: int, *instructions: Instruction) -> Program:
    return _segment(program, index, instructions=(*program.segments[index].instructions, *instructions))


def _stage(program: Program, index: int, /, **changes: Any) -> Program:
    stages = list(program.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(program, stages=tuple(stages))


def _once(phase: SegmentPhase, **fields: Any) -> Callable[[Program], Program]:
    """Return a change that adds a once-per-step segment to block kind 0."""
    parts: dict[str, Any] = {"inputs": (), "external": (), "instructions": ()}
    segment = Segment(0, phase, **(parts | fields))
    return lambda program: replace(program, segments=(*program.segments, segment))


def _kind_with_update_only(program: Program) -> Program:
    segments = (Segment(7, SegmentPhase.FORWARD, (), (), ()), Segment(7, SegmentPhase.UPDATE, (), (), ()))
    return replace(program, segments=(*program.segments, *segments))


Y = value("y")
PARTIAL_X = replace(value("x"), placements=(Partial(),))
BROKEN: dict[str, tuple[Callable[[Program], Program], str]] = {
    "part of a value that is not there": (
        lambda p: _segment(p, 0, parts=(Part("nowhere", "t"),)),
        "'nowhere' is a part of 't' but not there",
    ),
    "export of a value that is not there": (
        lambda p: _segment(p, 0, exports=(value("nowhere"),)),
        "export .*nowhere.* is no input and not defined there",
    ),
    "neighbours with other placements": (
        lambda p: _segment(
            _segment(p, 2, inputs=(PARTIAL_X,), instructions=(), saved=()),
            3,
            instructions=(work((), (value("dx"),), 1),),
        ),
        r"disagree in forward: y \(8,\) is sent, x \(8,\) P expected",
    ),
    "output of the last block": (
        lambda p: _segment(p, 2, outputs=(Y,)),
        "segment 1 forward has outputs but no block comes after it",
    ),
    "unknown schedule": (lambda p: replace(p, schedule="2f2b"), "no schedule '2f2b'"),
    "schedule without backward": (lambda p: replace(p, schedule="forward-only"), "has backward segments"),
    "no microbatches": (lambda p: replace(p, num_microbatches=0), "0 microbatches"),
    "no stages": (lambda p: replace(p, stages=()), "no stages"),
    "stage index": (lambda p: _stage(p, 1, index=3), "stage 1 has index 3"),
    "gap between devices": (lambda p: _stage(p, 1, devices=(2, 3)), "the previous one ends at 1"),
    "mesh of another size": (lambda p: _stage(p, 0, mesh=Mesh.of(tp=2)), "has 1 devices and mesh tp=2 of 2"),
    "no blocks": (lambda p: _stage(p, 0, blocks=()), "stage 0 has no blocks"),
    "block without forward": (lambda p: _stage(p, 1, blocks=(9,)), "kind 9, which has no forward"),
    "resident twice": (lambda p: _stage(p, 0, resident=p.stages[0].resident * 2), "twice: parameters, parameters"),
    "segment twice": (lambda p: replace(p, segments=(*p.segments, p.segments[0])), "5 segments for 4 pairs"),
    "read before defined": (lambda p: _append(p, 0, work((value("z"),), (), 1)), "'z' is read before it is defined"),
    "read with another shape": (
        lambda p: _append(p, 0, work((Operand("y", (4,), 0.0),), (), 1)),
        r"reads Operand\(value='y', shape=\(4,\)",
    ),
    "defined twice": (lambda p: _append(p, 0, work((), (Y,), 1)), "'y' is defined twice"),
    "wrong number of inputs": (
        lambda p: _append(p, 0, replace(work((Y,), (), 1), inputs=(Y, None))),
        "op 'make_' has 1 inputs",
    ),
    "saved but not defined": (lambda p: _segment(p, 0, saved=(value("q"),)), "saved Operand"),
    "saved by a backward": (lambda p: _segment(p, 1, saved=(value("dx"),)), "no weight segment to read them"),
    "output not defined": (lambda p: _segment(p, 0, outputs=(value("q"),)), "output Operand"),
    "stored but not defined": (lambda p: _segment(p, 0, stores=(Store(value("q"), "w"),)), "'q' is stored"),
    "neighbours disagree": (lambda p: _segment(p, 0, outputs=()), r"disagree in forward: nothing is sent, x \(8,\)"),
    "first block with inputs": (lambda p: _stage(p, 0, blocks=(1,)), "forward has inputs but no block"),
    "exchange once per step": (_once(SegmentPhase.UPDATE, inputs=(Y,)), "runs once per step"),
    "compute in a reduction": (_once(SegmentPhase.REDUCE, instructions=(work((), (Y,), 1),)), "only communicate"),
    "update of what has no backward": (
        _kind_with_update_only,
        "segment 7 update follows a backward, but kind 7 has none",
    ),
    "foreign axis": (
        lambda p: _append(p, 0, all_reduce(Axis("dp", 1, 1), Y, "z", seconds=1)),
        "axis Axis.* is none of mesh tp=1",
    ),
    "forward that overlaps": (
        lambda p: _append(p, 0, all_reduce(TP, Y, "z", seconds=1, overlaps=True)),
        "only gradient traffic overlaps",
    ),
    "slice of another size": (
        lambda p: _append(p, 0, Slice(TP, Shard(0), Y, Operand("z", (4,), 0.0))),
        r"a slice of \(8,\) on dim 0 is not \(4,\)",
    ),
    "gather of another size": (
        lambda p: _append(
            p, 0, Collective(CollectiveKind.ALL_GATHER, TP, Shard(0), Replicate(), Y, Operand("z", (16,), 0.0), 1.0)
        ),
        r"all_gather over 1 devices does not turn \(8,\) into \(16,\)",
    ),
    "scatter of a missing dim": (
        lambda p: _append(p, 0, Collective(CollectiveKind.REDUCE_SCATTER, TP, Partial(), Shard(1), Y, value("z"), 1.0)),
        "reduce_scatter over 1 devices",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_unlawful_programs_are_refused(name: str) -> None:
    change, message = BROKEN[name]
    program = equal_stages(2, 2, "1f1b")
    verify_program(program)

    with pytest.raises(ProgramError, match=message):
        verify_program(change(program))


def test_inference_saves_nothing() -> None:
    program = _segment(equal_stages(2, 2, "forward-only"), 0, saved=(Y,))

    with pytest.raises(ProgramError, match="saves values but the program has no backward"):
        verify_program(program)


def test_errors_show_the_neighbourhood() -> None:
    """The instruction at fault is marked, two on either side are shown."""
    chain = [work((value(f"a{i}"),), (value(f"a{i + 1}"),), 1, name=f"op{i}") for i in range(6)]
    program = _append(equal_stages(1, 1, "forward-only"), 0, work((), (value("a0"),), 1), *chain[:3], *chain[4:])

    with pytest.raises(ProgramError) as caught:
        verify_program(program)

    assert str(caught.value) == (
        "segment 0 forward, instruction 5: 'a4' is read before it is defined\n"
        '    a2: [8] 0 = Work(a1) {"seconds": 1.0} op=op1 phase=forward block=0\n'
        '    a3: [8] 0 = Work(a2) {"seconds": 1.0} op=op2 phase=forward block=0\n'
        '  > a5: [8] 0 = Work(a4) {"seconds": 1.0} op=op4 phase=forward block=0\n'
        '    a6: [8] 0 = Work(a5) {"seconds": 1.0} op=op5 phase=forward block=0'
    )


def test_all_collectives_change_shapes_as_their_placements_say() -> None:
    """On 4 devices: (8,) partial -> (2,) by reduce_scatter -> (8,) by all_gather; (2, 8) -> (8, 2) by all_to_all."""
    axis = Axis("tp", 4, 1)
    whole, part = Operand("a", (8,), 32.0), Operand("b", (2,), 8.0)
    rows, columns = Operand("d", (2, 8), 64.0), Operand("e", (8, 2), 64.0)
    program = _append(
        _stage(equal_stages(1, 1, "forward-only"), 0, devices=(0, 4), mesh=Mesh((axis,))),
        0,
        work((), (whole, rows), 1),
        Collective(CollectiveKind.REDUCE_SCATTER, axis, Partial(), Shard(0), whole, part, 32.0),
        Collective(CollectiveKind.ALL_GATHER, axis, Shard(0), Replicate(), part, Operand("c", (8,), 32.0), 32.0),
        Collective(CollectiveKind.ALL_TO_ALL, axis, Shard(0), Shard(1), rows, columns, 64.0),
    )

    verify_program(program)

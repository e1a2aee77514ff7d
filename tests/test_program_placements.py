"""The laws of placements, persistent tensors, halos and local kinds, on programs made by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.cost import Collective as CollectiveKind
from autopar.discover import Rule, Rules, Strategy
from autopar.discover.rules import Halo, Local, Replaced, Scaled
from autopar.errors import ProgramError
from autopar.folding.fold import Folded, fold
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Attr, Graph, Op, Role, State, Value
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
    Store,
)
from autopar.program.verify import verify_program
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Schedule, Task
from autopar.sharding import Mesh, Partial, Placement, Placements, Replicate, Shard, local_shape, parse_placements
from tests.programs import OP_PHASE, equal_stages

MESH = Mesh.of(dp=2, tp=2)
DP, TP = MESH.axes
R = Replicate()
FORWARD, _AGAIN, BACKWARD, WEIGHT, REDUCE, UPDATE, *_ = SegmentPhase


def _value(name: str, whole: tuple[int, ...], placements: str) -> Operand:
    """Return a value of a tensor of that shape."""
    parsed = parse_placements(placements)
    return Operand(name, local_shape(whole, parsed, MESH), 0.0, parsed)


def _op(name: str, inputs: tuple[Operand, ...], output: Operand, phase: SegmentPhase = FORWARD) -> Compute:
    names = tuple(operand.value for operand in inputs)
    return Compute(Op(name, "Work", names, (output.value,), phase=OP_PHASE[phase], block=0), inputs, (output,))


def _program(*segments: Segment) -> Program:
    """Return a program of one stage on the mesh."""
    schedule = "1f1b" if any(segment.phase is BACKWARD for segment in segments) else "forward-only"
    return Program((StageProgram(0, (0, 4), MESH, (0,), (Recompute.NONE,), ()),), segments, schedule, 1)


X, Y = _value("x", (8, 12), "S(0)R"), _value("y", (8, 12), "S(0)P")


def _forward(*instructions: Instruction) -> Program:
    """Return a program that makes y, (8, 12) as S(0)P, from x, (8, 12) as S(0)R, and goes on with these."""
    return _program(Segment(0, FORWARD, (), (X,), (_op("f", (X,), Y), *instructions)))


def _collective(kind: str, axis: int, source: Placement, target: Placement, before: Operand, after: str) -> Collective:
    """Return a collective from a value of an (8, 12) tensor; `after` are the placements of its result."""
    result = _value(f"{before.value}.{kind}", (8, 12), after)
    return Collective(CollectiveKind(kind), MESH.axes[axis], source, target, before, result, 1.0)


def _exchange(before: int = 1, after: int = 1, **changes: Any) -> Exchange:
    """Return an exchange of rows of x."""
    shape = (X.shape[0] + before + after, *X.shape[1:])
    exchange = Exchange(DP, 0, before, after, "zero", X, Operand("x.halo", shape, 0.0, X.placements), 1.0)
    return replace(exchange, **changes)


Z = _value("z", (8, 12), "S(0)S(1/3)")
W = _value("w", (8, 12), "S(0)S(0)")
LAWFUL: tuple[tuple[Instruction, ...], ...] = (
    (_collective("all_reduce", 1, Partial(), R, Y, "S(0)R"),),
    (_collective("reduce_scatter", 1, Partial(), Shard(1), Y, "S(0)S(1)"),),
    (_collective("reduce_scatter", 1, Partial(), Shard(1, 3), Y, "S(0)S(1/3)"),),
    (_op("g", (X,), Z), _collective("all_to_all", 1, Shard(1, 3), Shard(1), Z, "S(0)S(1)")),
    (Slice(TP, Shard(0), X, _value("x.slice", (8, 12), "S(0)S(0)")),),
    (_exchange(),),
    (_exchange(0, 4, fill="lowest"),),
    (replace(_op("g", (X,), _value("g", (8, 12), "S(0)R")), start=Start((DP,), 4)),),
    (_op("g", (X,), W), replace(_op("h", (X, W), _value("h", (8,), "S(0)R")), start=Start((DP, TP), 2))),
)


@pytest.mark.parametrize("instructions", LAWFUL, ids=lambda items: str(items[-1])[:40])
def test_lawful_changes_of_placement_are_accepted(instructions: tuple[Instruction, ...]) -> None:
    verify_program(_forward(*instructions))


def _told(*axes: int, rows: int = 4) -> Compute:
    """Return an op on x that is told where its block starts."""
    return replace(
        _op("g", (X,), _value("g", (8, 12), "S(0)R")), start=Start(tuple(MESH.axes[axis] for axis in axes), rows)
    )


UNLAWFUL: dict[str, tuple[tuple[Instruction, ...], str]] = {
    "too few placements": ((_op("g", (X,), Operand("g", (8,), 0.0, (R,))),), "'g' is R on mesh dp=2×tp=2"),
    "no placements": ((_op("g", (X,), Operand("g", (8,), 0.0)),), "'g' is nowhere on mesh"),
    "no such dim": ((_op("g", (X,), Operand("g", (8,), 0.0, (R, Shard(1)))),), r"'g' is RS\(1\), but has 1 dims"),
    "chunks that disagree": (
        (_op("g", (X,), Operand("g", (6,), 0.0, (Shard(0), Shard(0, 3)))),),
        "cut it into different numbers of chunks",
    ),
    "no whole chunks": ((_op("g", (X,), Operand("g", (4,), 0.0, (R, Shard(0, 3)))),), "4 rows are no 3 chunks"),
    "read at another placement": (
        (_op("g", (replace(Y, placements=(Shard(0), R)),), _value("g", (8, 12), "S(0)R")),),
        r"reads Operand\(value='y'.*defined was",
    ),
    "wrong collective": ((_collective("all_gather", 1, Shard(1), R, Y, "S(0)R"),), "does not turn"),
    "source that is not": (
        (replace(_collective("all_reduce", 0, Partial(), R, Y, "S(0)P"), result=replace(Y, value="r")),),
        r"'y' is S\(0\) on axis 'dp', not P",
    ),
    "target that is not": (
        (replace(_collective("all_reduce", 1, Partial(), R, Y, "S(0)R"), result=replace(Y, value="r")),),
        r"'r' is S\(0\)P, not S\(0\)R",
    ),
    "minor axis first": (
        (
            _op("g", (X,), W),
            Collective(CollectiveKind.ALL_GATHER, DP, Shard(0), R, W, _value("r", (8, 12), "RS(0)"), 1.0),
        ),
        "dim 0 is split over an axis after 'dp', which has to be joined first",
    ),
    "slice of a block": (
        (Slice(DP, Shard(1), X, Operand("s", (4, 6), 0.0, (Shard(1), R))),),
        r"'x' is S\(0\) on axis 'dp', not R",
    ),
    "exchange on an axis that does not split": ((_exchange(axis=TP),), "if axis 'tp' splits dim 0, alone"),
    "exchange of a dim that two axes split": (
        (_op("g", (X,), W), _exchange(operand=W, result=Operand("r", (4, 12), 0.0, W.placements))),
        "if axis 'dp' splits dim 0, alone",
    ),
    "exchange of chunks": (
        (
            _op("g", (X,), _value("g", (8, 12), "S(0/2)R")),
            _exchange(operand=_value("g", (8, 12), "S(0/2)R"), result=Operand("r", (6, 12), 0.0, (Shard(0, 2), R))),
        ),
        "if axis 'dp' splits dim 0, alone",
    ),
    "exchange that moves": (
        (_exchange(result=Operand("r", (6, 12), 0.0, (Shard(0), Shard(0)))),),
        "'r' does not lie as 'x' does",
    ),
    "exchange of nothing": ((_exchange(0, 0),), "0 rows of the previous and 0 of the next"),
    "exchange of more than there is": ((_exchange(5, 0),), "the neighbours have no more than 4 rows"),
    "exchange that fills with something": ((_exchange(fill="one"),), "filled with 'one', not with one of zero, lowest"),
    "exchange of another size": (
        (replace(_exchange(2, 2), after=1),),
        r"\(4, 12\) with 2\+1 rows on dim 0 is not \(8, 12\)",
    ),
    "start on no axis": ((_told(),), "on axes of none, not in the order of mesh"),
    "start on minor axis first": ((_told(1, 0),), "on axes 'tp', 'dp', not in the order of mesh"),
    "start on an axis that does not split": ((_told(1),), "no input has 4 rows of a dim split over 'tp'"),
    "start with other rows": ((_told(0, rows=8),), "no input has 8 rows of a dim split over 'dp'"),
}


@pytest.mark.parametrize("name", UNLAWFUL)
def test_unlawful_placements_are_refused(name: str) -> None:
    instructions, message = UNLAWFUL[name]

    with pytest.raises(ProgramError, match=message):
        verify_program(_forward(*instructions))


# Persistent tensors.

STATE, SUM = _value("w", (8, 12), "RR"), _value("w.sum", (8, 12), "PR")
GRADIENT, TOTAL = replace(SUM, value="w.grad"), _value("w.grad|S(0)R", (8, 12), "S(0)R")
MASTER, UPDATED = replace(TOTAL, value="w|master"), replace(TOTAL, value="w.new")
REDUCED = Collective(CollectiveKind.REDUCE_SCATTER, DP, Partial(), Shard(0), GRADIENT, TOTAL, 1.0)
WHOLE = replace(STATE, value="w.whole")
GATHERED = Collective(CollectiveKind.ALL_GATHER, DP, Shard(0), R, UPDATED, WHOLE, 1.0)


def _step() -> Program:
    """Return a step with a gradient summed as terms, reduced once, and a parameter updated by parts (ZeRO 2)."""
    part = Part("w", "w")
    return _program(
        Segment(0, FORWARD, (), (STATE,), (_op("f", (STATE,), X),), parts=(part,)),
        Segment(
            0,
            BACKWARD,
            (),
            (GRADIENT,),
            (_op("b", (GRADIENT,), SUM, BACKWARD),),
            stores=(Store(SUM, "w.grad"),),
            parts=(Part("w.grad", "w.grad"), Part("w.sum", "w.grad")),
        ),
        Segment(
            0,
            REDUCE,
            (),
            (GRADIENT,),
            (REDUCED,),
            stores=(Store(TOTAL, TOTAL.value),),
            parts=(Part("w.grad", "w.grad"),),
        ),
        Segment(
            0,
            UPDATE,
            (),
            (TOTAL, MASTER),
            (_op("u", (TOTAL, MASTER), UPDATED, UPDATE), GATHERED),
            stores=(Store(WHOLE, "w"),),
            parts=(Part("w|master", "w"), Part("w.whole", "w")),
        ),
    )


TWO_PARTS = (Part("w.whole", "w"), Part("w.new", "w"))


def _changed(index: int, **changes: Any) -> Program:
    program = _step()
    segments = list(program.segments)
    segments[index] = replace(segments[index], **changes)
    return replace(program, segments=tuple(segments))


def _reading(operand: Operand) -> dict[str, Any]:
    return {"external": (operand,), "instructions": (_op("f", (operand,), X),)}


def _summing(placements: Placements) -> Program:
    """Return the step with the gradient summed at other placements."""
    old, new = replace(GRADIENT, placements=placements), replace(SUM, placements=placements)
    return _changed(1, external=(old,), instructions=(_op("b", (old,), new, BACKWARD),), stores=(Store(new, "w.grad"),))


def test_the_optimizer_may_have_its_own_copy() -> None:
    verify_program(_step())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_changed(2, stores=()), r"segment 0 update reads 'w.grad\|S\(0\)R', which no earlier segment has stored"),
        (
            _changed(2, stores=(Store(TOTAL, "w.grad|S(0)R"),), phase=UPDATE),
            "segments for",
        ),
        (
            _changed(0, **_reading(_value("w", (8, 12), "S(0)R"))),
            r"forward reads 'w' as \[4, 12\] S\(0\)R, segment 0 update stores it as \[8, 12\] RR",
        ),
        (
            _changed(3, stores=(Store(UPDATED, "w"),), parts=(Part("w|master", "w"), Part("w.new", "w"))),
            r"forward reads 'w' as \[8, 12\] RR, segment 0 update stores it as \[4, 12\] S\(0\)R",
        ),
        (
            _changed(3, stores=(Store(WHOLE, "w"), Store(UPDATED, "w")), parts=TWO_PARTS),
            "segment 0 update stores 'w' twice",
        ),
        (_summing((R, R)), r"reduce reads 'w.grad' as \[8, 12\] PR, segment 0 backward stores it as \[8, 12\] RR"),
        (
            _changed(3, instructions=(_op("u", (TOTAL, MASTER), SUM, UPDATE),), stores=(Store(SUM, "w"),), parts=()),
            "segment 0 update stores 'w.sum' as terms, PR",
        ),
        (_changed(0, parts=(Part("w", "w"), Part("w", "v"))), "a value is a part of two tensors"),
    ],
)
def test_what_does_not_fit_what_is_stored_is_refused(program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify_program(program)


# Ops with halos, local kinds, divided numbers and chunks, against rules made by hand.


def _one_op(op: Op, whole: dict[str, tuple[int, ...]], constants: dict[str, list[int]]) -> Folded:
    """Return a graph of one op; its first input is data, the others are parameters or constants."""
    values = {name: Value(name, shape, "float64") for name, shape in whole.items()}
    states = tuple(State(name, name, Role.PARAMETER, name) for name in op.inputs[1:] if name not in constants)
    held = {name: np.array(content) for name, content in constants.items()}
    return fold(find_blocks(Graph("one", 24, values, op.inputs[:1], states, held, (op,), op.outputs)))


def _run(folded: Folded, strategies: tuple[Strategy, ...], *instructions: Instruction) -> None:
    """Verify a program that runs these and exports what the last one makes."""
    (op,) = folded.graph.ops
    compute = instructions[-1]
    assert isinstance(compute, Compute)
    (made,) = compute.outputs
    assert made is not None
    made_here = {item.result.value for item in instructions if not isinstance(item, Compute)}
    given = {item.operand for item in instructions if not isinstance(item, Compute)} | set(compute.inputs)
    external = sorted((item for item in given if item and item.value not in made_here), key=lambda item: item.value)
    parts = [Part(item.value, item.value.split("|")[0]) for item in (*external, made)]
    segment = Segment(0, FORWARD, (), tuple(external), instructions, exports=(made,), parts=tuple(parts))
    rule = Rule(op.kind, strategies, "", (), (), 0)
    verify_program(_program(segment), folded, Rules({op.name: rule}, 0, 0, 0.0))


CONV = Op("conv", "Conv", ("x", "w"), ("y",), (("group", 2), ("pads", (1, 1, 1, 1))), block=0)
CONVOLUTION = _one_op(CONV, {"x": (2, 4, 8, 8), "w": (4, 2, 3, 3), "y": (2, 4, 8, 8)}, {})
WHOLE_OP = Strategy((R, R), (R,))
ROWS = Strategy(
    (Shard(2), R),
    (Shard(2),),
    halos=(Halo(0, 2, 1, 1),),
    replaced=(Replaced("pads", 0, 0), Replaced("pads", 2, 0)),
)
CHANNELS = Strategy((Shard(1), Shard(0)), (Shard(1),), scaled=(Scaled("group", 0),))
STRATEGIES = (WHOLE_OP, ROWS, CHANNELS)


def _conv(x: Operand, w: Operand, y: Operand, attrs: dict[str, Attr]) -> Compute:
    return Compute(replace(CONV, attrs=tuple(attrs.items())), (x, w), (y,))


BLOCK, KERNEL = _value("x", (2, 4, 8, 8), "S(2)S(1)"), _value("w", (4, 2, 3, 3), "RS(0)")
AROUND = Operand("x|halo", (2, 2, 6, 8), 0.0, BLOCK.placements)
HALO = Exchange(DP, 2, 1, 1, "zero", BLOCK, AROUND, 1.0)
RESULT = _value("y", (2, 4, 8, 8), "S(2)S(1)")
LOCAL: dict[str, Attr] = {"group": 1, "pads": (0, 1, 0, 1)}


def test_a_convolution_with_a_halo_runs_by_its_rule() -> None:
    """Rows over one axis, with those of the neighbours and no padding; groups of channels over the other."""
    _run(CONVOLUTION, STRATEGIES, HALO, _conv(AROUND, KERNEL, RESULT, LOCAL))


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ((_conv(BLOCK, KERNEL, RESULT, LOCAL),), r"on axis 'dp' op 'conv' runs as S\(2\),R -> S\(2\), which is no"),
        (
            (
                replace(HALO, after=0, result=replace(AROUND, shape=(2, 2, 5, 8))),
                _conv(replace(AROUND, shape=(2, 2, 5, 8)), KERNEL, RESULT, LOCAL),
            ),
            r"on axis 'dp' op 'conv' runs as S\(2\),R -> S\(2\) with 1 halos, which is no strategy of Conv",
        ),
        ((replace(HALO, fill="lowest"), _conv(AROUND, KERNEL, RESULT, LOCAL)), "with 1 halos, which is no strategy"),
        ((HALO, _conv(AROUND, KERNEL, RESULT, LOCAL | {"group": 2})), "other numbers than its shards need.*'group': 2"),
        ((HALO, _conv(AROUND, KERNEL, RESULT, LOCAL | {"pads": (1, 1, 0, 1)})), "other numbers than its shards need"),
        (
            (HALO, replace(_conv(AROUND, KERNEL, RESULT, LOCAL), start=Start((DP,), 6))),
            "on axis 'dp' op 'conv' runs as",
        ),
        (
            (HALO, _conv(AROUND, KERNEL, Operand("y", (2, 2, 6, 8), 0.0, RESULT.placements), LOCAL)),
            r"'y' is \[2, 2, 6, 8\] as S\(2\)S\(1\) of y: float64\[2,4,8,8\]",
        ),
    ],
)
def test_a_convolution_against_its_rule_is_refused(instructions: tuple[Instruction, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        _run(CONVOLUTION, STRATEGIES, *instructions)


GATHER = Op("rows", "Gather", ("table", "ids"), ("y",), block=0)
LOOKUP = _one_op(GATHER, {"table": (8, 6), "ids": (4,), "y": (4, 6)}, {})
VOCABULARY = Strategy((Shard(0), R), (Partial(),), local=Local("autopar::GatherFrom", 0, 0))


def _lookup(kind: str, placements: str, start: Start | None) -> Compute:
    table, ids = _value("table", (8, 6), placements), _value("ids", (4,), "RR")
    terms = parse_placements(placements.replace("S(0)", "P"))
    y = Operand("y", (4, 6), 0.0, terms)
    attrs = (("size", 8),) if kind != "Gather" else ()
    return Compute(replace(GATHER, kind=kind, attrs=attrs), (table, ids), (y,), start=start)


@pytest.mark.parametrize(
    ("placements", "axes", "rows"), [("S(0)R", (0,), 4), ("RS(0)", (1,), 4), ("S(0)S(0)", (0, 1), 2)]
)
def test_a_vocabulary_is_split_by_telling_where_the_block_starts(
    placements: str, axes: tuple[int, ...], rows: int
) -> None:
    """Over any axes; the op told nothing, told of other axes, or the plain op told something, is refused."""
    rules = (Strategy((R, R), (R,)), VOCABULARY)
    start = Start(tuple(MESH.axes[axis] for axis in axes), rows)

    _run(LOOKUP, rules, _lookup("autopar::GatherFrom", placements, start))
    for kind, told in (("autopar::GatherFrom", None), ("Gather", start), ("Gather", None)):
        with pytest.raises(ProgramError, match=r"which is no strategy of Gather|other numbers"):
            _run(LOOKUP, rules, _lookup(kind, placements, told))


RESHAPE = Op("reshape", "Reshape", ("x", "shape"), ("y",), block=0)


def test_a_reshape_has_its_target_divided() -> None:
    """(8, 6) to (8, 2, 3) with 8 split over dp and 2 over tp: each device makes (4, 1, 3) of (4, 3)."""
    folded = _one_op(RESHAPE, {"x": (8, 6), "shape": (3,), "y": (8, 2, 3)}, {"shape": [8, 2, 3]})
    strategies = (
        Strategy((R, R), (R,)),
        Strategy((Shard(0), R), (Shard(0),), scaled=(Scaled(1, 0),)),
        Strategy((Shard(1), R), (Shard(1),), scaled=(Scaled(1, 1),)),
    )
    x, shape, y = _value("x", (8, 6), "S(0)S(1)"), _value("shape", (3,), "RR"), _value("y", (8, 2, 3), "S(0)S(1)")

    _run(folded, strategies, Compute(RESHAPE, (x, shape), (y,), constants=((1, (4, 1, 3)),)))
    for constants in ((), ((1, (4, 2, 3)),)):
        with pytest.raises(ProgramError, match="op 'reshape' has other numbers than its shards need"):
            _run(folded, strategies, Compute(RESHAPE, (x, shape), (y,), constants=constants))


RELU = Op("relu", "Relu", ("x",), ("y",), block=0)


@pytest.mark.parametrize(
    ("strategy", "x", "y", "is_lawful"),
    [
        (Strategy((Shard(1),), (Shard(1),), cyclic=True), "RS(1/3)", "RS(1/3)", True),
        (Strategy((Shard(1),), (Shard(1),), cyclic=True), "RS(1/3)", "RS(1)", False),
        (Strategy((Shard(1),), (Shard(1),)), "RS(1/3)", "RS(1/3)", False),
        (Strategy((Shard(1, 2),), (Shard(1),), cyclic=True), "RS(1/6)", "RS(1/3)", True),
        (Strategy((Shard(1, 2),), (Shard(1),), cyclic=True), "RS(1/3)", "RS(1/3)", False),
        (Strategy((Shard(1, 2),), (Shard(1),)), "RS(1/2)", "RS(1)", True),
    ],
)
def test_chunks_multiply_where_the_strategy_is_cyclic(strategy: Strategy, x: str, y: str, is_lawful: bool) -> None:
    """All sharded dims by the same factor, and only then."""
    folded = _one_op(RELU, {"x": (8, 12), "y": (8, 12)}, {})
    compute = Compute(RELU, (_value("x", (8, 12), x),), (_value("y", (8, 12), y),))
    strategies = (Strategy((R,), (R,)), strategy)

    if is_lawful:
        _run(folded, strategies, compute)
    else:
        with pytest.raises(ProgramError, match="which is no strategy of Relu"):
            _run(folded, strategies, compute)


# Schedules.


class _Backwards(Schedule):
    """Groups run microbatches in opposite orders."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return F0 B0 F1 B1 on one group, F1 B1 F0 B0 on the next."""
        numbers = range(num_microbatches) if group % 2 else reversed(range(num_microbatches))
        return tuple(Task(kind, i) for i in numbers for kind in self.passes)


class _Forgetful(_Backwards):
    """The last backward is left out."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return F0 B0 F1."""
        return super().order(1, num_groups, num_microbatches)[:-1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (_Backwards, "the schedule deadlocks: group 0 waits for the inputs of B1, group 1 waits for the inputs of F0"),
        (_Forgetful, "schedule '_Forgetful' does not run every task once; group 0 lacks B1"),
    ],
)
def test_schedules_that_do_not_run_through_are_refused(
    schedule: Callable[[], Schedule], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = getattr(schedule, "__name__", "")
    monkeypatch.setitem(SCHEDULES, name, schedule())

    with pytest.raises(ProgramError, match=message):
        verify_program(replace(equal_stages(2, 2, "1f1b"), schedule=name))

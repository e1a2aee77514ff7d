"""Programs that do not compute their graph are refused: lawful programs of tiny models, broken in one place.

A broken program may by chance be another lawful one: a sum over two dims takes a tensor split over either. Then it has
to compute what the model computes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.configuration import Configuration
from autopar.discover import Rules
from autopar.errors import ProgramError
from autopar.program.records import (
    HOST_PHASES,
    Compute,
    Instruction,
    Operand,
    Part,
    Program,
    Segment,
    SegmentPhase,
    Store,
    defines,
    reads,
)
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.sharding import Mesh, Partial, Placement, Replicate, Shard
from tests.executions import Execution, model_rules, random_plan, solved_plan

NAMES = ("mlp-xs", "gpt2", "mixtral-8x7b")
SPACE = (Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b"), Configuration(2, Mesh.of(inner=4), 2, "gpipe"))


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A lowered plan with the model and the rules it comes from."""

    program: Program
    execution: Execution
    rules: Rules

    def verify(self, program: Program) -> None:
        """Check the program, or another one of the same graph."""
        verify_program(program, self.execution.folded, self.rules)

    def is_refused(self, program: Program) -> bool:
        """Whether a program is refused; one that is not has to compute what the model computes."""
        try:
            self.verify(program)
        except ProgramError:
            return True
        self.execution.check_program(program)
        return False


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Case]:
    """Return random plans of tiny models on 4 devices per stage, one stage or two; that of seed -1 is the best."""
    folder: Path = tmp_path_factory.getbasetemp() / "rules"

    @cache
    def model(name: str) -> tuple[Execution, Rules]:
        return Execution.of(name, 4, 2), model_rules(name, folder)

    @cache
    def case(name: str, seed: int) -> Case:
        execution, rules = model(name)
        if seed < 0:
            plan = solved_plan(execution.folded, rules, SPACE[0], 4)
        else:
            plan = random_plan(execution.folded, rules, SPACE[seed % 2], 4, seed)
        return Case(execution.program(plan), execution, rules)

    return case


LEFT_OUT = r"does not store|no earlier segment has stored|does not export|no other block"
CASES = st.tuples(st.sampled_from(NAMES), st.integers(-1, 2))


def _with(program: Program, *changed: Segment) -> Program:
    """Return the program with segments replaced."""
    new = {(segment.kind, segment.phase): segment for segment in changed}
    return replace(program, segments=tuple(new.get((s.kind, s.phase), s) for s in program.segments))


def _renamed(segment: Segment, old: str, new: Operand) -> Segment:
    """Return the segment with another value wherever one is read, kept, handed on, stored or exported."""

    def swap(operand: Operand | None) -> Any:
        return new if operand is not None and operand.value == old else operand

    def swap_all(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(map(swap, operands))

    def instruction(item: Instruction) -> Instruction:
        if isinstance(item, Compute):
            return replace(item, inputs=tuple(map(swap, item.inputs)))
        return replace(item, operand=swap(item.operand))

    known = {part.value for part in segment.parts if part.value != old}
    parts = (Part(new.value, p.tensor) if p.value == old and new.value not in known else p for p in segment.parts)
    return replace(
        segment,
        instructions=tuple(map(instruction, segment.instructions)),
        saved=swap_all(segment.saved),
        outputs=swap_all(segment.outputs),
        stores=tuple(Store(swap(store.value), store.target) for store in segment.stores),
        exports=swap_all(segment.exports),
        parts=tuple(p for p in parts if p.value != old),
    )


def _moves(program: Program) -> Iterator[tuple[Segment, int]]:
    """Yield where placements change, and something reads the result."""
    for segment in program.segments:
        read = {operand.value for instruction in segment.instructions for operand in reads(instruction)}
        read |= {operand.value for operand in (*segment.saved, *segment.outputs, *segment.exports)}
        read |= {store.value.value for store in segment.stores}
        for index, instruction in enumerate(segment.instructions):
            if not isinstance(instruction, Compute) and instruction.result.value in read:
                yield segment, index


@given(which=CASES)
def test_lowered_plans_are_faithful(which: tuple[str, int], cases: Callable[[str, int], Case]) -> None:
    """What the other tests break is lawful before."""
    case = cases(*which)

    case.verify(case.program)


@given(which=CASES, data=st.data())
def test_no_change_of_placement_can_be_left_out(
    which: tuple[str, int], data: st.DataObject, cases: Callable[[str, int], Case]
) -> None:
    """Not even if all that read its result read what it read instead: then no op has such a strategy."""
    case = cases(*which)
    moves = list(_moves(case.program))
    segment, index = moves[data.draw(st.integers(0, len(moves) - 1))]
    instruction = segment.instructions[index]
    shortened = replace(segment, instructions=segment.instructions[:index] + segment.instructions[index + 1 :])
    (before,), (after,) = reads(instruction), defines(instruction)
    rewired = _renamed(shortened, after.value, before)

    with pytest.raises(ProgramError):
        verify_program(_with(case.program, shortened))
    case.is_refused(_with(case.program, rewired))


@given(which=CASES, data=st.data())
def test_no_copy_to_or_from_host_memory_can_be_left_out(
    which: tuple[str, int], data: st.DataObject, cases: Callable[[str, int], Case]
) -> None:
    """Nor can a whole segment of them: what is not fetched is not there, what is not taken away is not in the host."""
    case = cases(*which)
    segments = [segment for segment in case.program.segments if segment.phase in HOST_PHASES]
    assume(segments)
    segment = segments[data.draw(st.integers(0, len(segments) - 1))]
    index = data.draw(st.integers(0, len(segment.instructions) - 1))
    shortened = replace(segment, instructions=segment.instructions[:index] + segment.instructions[index + 1 :])
    without = replace(case.program, segments=tuple(each for each in case.program.segments if each is not segment))

    with pytest.raises(ProgramError):
        case.verify(_with(case.program, shortened))
    with pytest.raises(ProgramError):
        case.verify(without)


def _draw_compute(case: Case, data: st.DataObject) -> tuple[Segment, int]:
    """Return some op of the program, as segment and index of the instruction."""
    copying = (SegmentPhase.REDUCE, *HOST_PHASES)
    segments = [segment for segment in case.program.segments if segment.phase not in copying]
    segment = segments[data.draw(st.integers(0, len(segments) - 1))]
    computes = [i for i, item in enumerate(segment.instructions) if isinstance(item, Compute)]
    return segment, data.draw(st.sampled_from(computes))


@given(which=CASES, data=st.data())
def test_no_op_can_be_left_out_or_come_earlier(
    which: tuple[str, int], data: st.DataObject, cases: Callable[[str, int], Case]
) -> None:
    """Leaving it out is noticed even if nobody reads its results; so is putting it before what it reads."""
    case = cases(*which)
    segment, index = _draw_compute(case, data)
    instruction = segment.instructions[index]
    rest = (*segment.instructions[:index], *segment.instructions[index + 1 :])
    made = {operand.value for earlier in segment.instructions[:index] for operand in defines(earlier)}

    with pytest.raises(ProgramError):
        case.verify(_with(case.program, replace(segment, instructions=rest)))
    assume(made.intersection(operand.value for operand in reads(instruction)))
    with pytest.raises(ProgramError, match=r"is read before it is defined|not in this order"):
        case.verify(_with(case.program, replace(segment, instructions=(instruction, *rest))))


PLACEMENTS: st.SearchStrategy[Placement] = st.sampled_from([Replicate(), Partial(), Partial("max"), Shard(0), Shard(1)])


@given(which=CASES, data=st.data(), other=PLACEMENTS)
def test_ops_do_not_run_at_other_placements(
    which: tuple[str, int], data: st.DataObject, other: Placement, cases: Callable[[str, int], Case]
) -> None:
    """If an op claims another placement of its result on one axis and all that read it agree, it breaks its rule."""
    case = cases(*which)
    segment, index = _draw_compute(case, data)
    compute = segment.instructions[index]
    assert isinstance(compute, Compute)
    operand = data.draw(st.sampled_from([output for output in compute.outputs if output is not None]))
    axis = data.draw(st.integers(0, len(operand.placements) - 1))
    assume(operand.placements[axis] != other)
    placements = (*operand.placements[:axis], other, *operand.placements[axis + 1 :])
    claimed = replace(operand, placements=placements)
    changed = replace(compute, outputs=tuple(claimed if output == operand else output for output in compute.outputs))
    instructions = (*segment.instructions[:index], changed, *segment.instructions[index + 1 :])

    renamed = _renamed(replace(segment, instructions=instructions), operand.value, claimed)
    assert case.is_refused(_with(case.program, renamed))


@given(which=CASES, data=st.data())
def test_no_store_or_result_can_be_left_out(
    which: tuple[str, int], data: st.DataObject, cases: Callable[[str, int], Case]
) -> None:
    """Gradient sums, reduced sums, moments, parameters; the loss, and what blocks further away read."""
    case = cases(*which)
    segments = [s for s in case.program.segments if s.stores or s.exports]
    segment = segments[data.draw(st.integers(0, len(segments) - 1))]
    left = [("stores", i) for i in range(len(segment.stores))] + [("exports", i) for i in range(len(segment.exports))]
    name, index = data.draw(st.sampled_from(left))
    items = getattr(segment, name)
    changes: dict[str, Any] = {name: items[:index] + items[index + 1 :]}

    with pytest.raises(ProgramError, match=LEFT_OUT):
        case.verify(_with(case.program, replace(segment, **changes)))


@given(which=CASES, data=st.data())
def test_no_line_of_the_text_can_be_left_out(
    which: tuple[str, int], data: st.DataObject, cases: Callable[[str, int], Case]
) -> None:
    """But for what only says how much memory is taken, and what nobody reads."""
    case = cases(*which)
    lines = format_program(case.program).splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    assume(not lines[index].startswith("  resident"))
    text = "".join(lines[:index] + lines[index + 1 :])

    try:
        program = parse_program(text)
    except ProgramError:
        return
    case.is_refused(program)

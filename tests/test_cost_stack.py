"""Software stacks: bounds hold, files round-trip, errors name the field and what it may be."""

import json
import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import load_cluster
from autopar.cost import IDEAL, SCALARS, CostModel, Fit, FitSource, Stack, bundled_stacks, load_stack
from autopar.cost.stack import Range, format_stack, parse_stack, stack_from_dict
from autopar.errors import StackError
from autopar.ir.graph import Op

DOCS = Path(__file__).parents[1] / "docs" / "cost_model.md"

FIT = Fit(
    date(2026, 1, 31),
    0.036,
    0.08,
    ("gemm_efficiency", "host_launch"),
    (FitSource("korth", 9),),
    (Range("gpus", 8, 512),),
)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Any stack there can be."""
    names = draw(st.sets(st.sampled_from(sorted(SCALARS))))
    values = tuple((name, draw(st.floats(SCALARS[name].low, SCALARS[name].high))) for name in sorted(names))
    return Stack(
        draw(st.sampled_from(["mine", "megatron-a100"])),
        draw(st.sampled_from(["fused", "unfused"])),
        draw(st.sampled_from(["chains", "none"])),
        values,
        draw(st.sampled_from([(), ("a100", "h100")])),
        draw(st.sampled_from([None, FIT])),
        draw(st.sampled_from(["all-to-all", "per-node"])),
        draw(st.booleans()),
        draw(st.sampled_from(["none", "partial", "full"])),
    )


def test_no_stack_has_more_than_ten_scalars_and_defaults_are_within_bounds() -> None:
    assert len(SCALARS) <= 10
    assert all(scalar.low <= scalar.default <= scalar.high for scalar in SCALARS.values())


@given(stack=stacks())
def test_stacks_survive_being_written_and_read(stack: Stack) -> None:
    assert parse_stack(format_stack(stack)) == stack
    assert stack_from_dict(stack.to_dict()) == stack
    assert stack_from_dict(json.loads(json.dumps(stack.to_dict()))) == stack  # as a plan holds it


def test_bundled_stacks_are_found_by_name_and_files_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(format_stack(Stack("mine", "unfused")))

    assert load_stack(path) == Stack("mine", "unfused")
    for name, stack in bundled_stacks().items():
        assert load_stack(name) is stack


def test_the_default_is_no_other_than_a_stack_without_scalars() -> None:
    """A value at its default is the same as none, so that equal stacks compare equal."""
    assert load_stack("ideal") == IDEAL == Stack("ideal", scalars=(("gemm_efficiency", 1.0),))
    assert IDEAL.with_scalars(gemm_efficiency=0.9).with_scalars(gemm_efficiency=1.0) == IDEAL


def test_a_fit_that_touches_a_bound_says_so() -> None:
    """Of the scalars that were free; one that was left at a default on its bound says nothing."""
    stack = Stack(
        "mine", scalars=(("gemm_efficiency", 1.3),), fit=Fit(date(2026, 1, 31), 0.1, 0.2, ("gemm_efficiency",), ())
    )

    assert stack.at_bounds == ("gemm_efficiency",)
    assert Stack("mine", fit=FIT).at_bounds == ("host_launch",)
    assert Stack("mine", scalars=(("gemm_efficiency", 1.3),)).at_bounds == ()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("name: x\nscalars: {memory_traffic: 9}", "memory_traffic is 9", "from 0.7 to 3"),
        ("name: x\nscalars: {memory_traffic: 2 GB}", "'2 GB' is a text", "a number without a unit"),
        ("name: x\nscalars: {host_launch: 12}", "scalars.host_launch: 12 has no unit", "like '12 us'"),
        ("name: x\nscalars: {host_launch: 12 GB}", "'12 GB' is not a time", "like '12 us'"),
        ("name: x\nscalars: {memory_trafic: 2}", "no scalar 'memory_trafic'", "did you mean memory_traffic?"),
        ("name: x\nattention: flash", "attention is 'flash'", "fused or unfused"),
        ("name: x\nfusion: all", "fusion is 'all'", "chains or none"),
        ("attention: fused", "missing required field `name`", "docs/cost_model.md"),
        ("name: x\nspeed: 2", "unknown field `speed`", "docs/cost_model.md"),
        ("name: [", "mine.yaml", "docs/cost_model.md"),
        ("name: x\nfit: {date: today, error: 0, p90: 0, fitted: [], data: {}}", "fit.date is 'today'", "YYYY-MM-DD"),
        (
            "name: x\nfit: {date: 2026-01-31, error: -1, p90: 0, fitted: [], data: {}}",
            "fit.error is -1",
            "0.04 for 4 %",
        ),
        (
            "name: x\nfit: {date: 2026-01-31, error: 0, p90: 0, fitted: [speed], data: {}}",
            "fit.fitted names the scalar 'speed'",
            "there are gemm_efficiency",
        ),
        (
            "name: x\nfit: {date: 2026-01-31, error: 0, p90: 0, fitted: [], data: {korth: 0}}",
            "'korth' has 0 rows",
            "1 or more",
        ),
        (
            "name: x\nfit: {date: 2026-01-31, error: 0, p90: 0, fitted: [], data: {}, valid: {gpus: [8, 2]}}",
            "fit.valid.gpus is from 8 to 2",
            "[lowest, highest]",
        ),
    ],
)
def test_errors_name_the_file_the_field_and_what_it_may_be(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)

    with pytest.raises(StackError) as caught:
        load_stack(path)

    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_an_unknown_stack_or_file_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"no stack 'defualt'\n.*did you mean default"):
        load_stack("defualt")
    with pytest.raises(StackError, match="cannot be read"):
        load_stack(tmp_path / "none.yaml")


def seconds(stack: Stack, op: Op, *shapes: tuple[int, ...]) -> float:
    """Return the seconds of an op on an A100; the last shape is that of its output."""
    arrays = [np.array([shape], np.int64) for shape in shapes]
    costs = CostModel(load_cluster("a100"), stack=stack)
    return float(costs.op_seconds(op, arrays[:-1], arrays[-1:], dict.fromkeys((*op.inputs, *op.outputs), 2.0))[0])


MATMUL = Op("p", "MatMul", ("a", "b"), ("c",))
ADD = Op("s", "Add", ("a", "b"), ("c",))
HEADS = (4, 8, 2048, 96)
SQUARE = (8192, 8192)


def test_each_scalar_changes_the_ops_it_is_about_and_no_others() -> None:
    """Twice as good or as bad within bounds; the rest to the last digit."""
    ops: dict[str, tuple[Op, tuple[tuple[int, ...], ...]]] = {
        "product": (MATMUL, (SQUARE, SQUARE, SQUARE)),
        "addition": (ADD, (SQUARE, SQUARE, SQUARE)),
        "attention": (Op("f", "Attention", ("q", "k", "v"), ("y",)), (HEADS,) * 4),
        "scores": (MATMUL, (HEADS, (4, 8, 96, 2048), (4, 8, 2048, 2048))),
    }

    def changed(**scalars: float) -> set[str]:
        stack = IDEAL.with_scalars(**scalars)
        return {
            name for name, (op, shapes) in ops.items() if seconds(stack, op, *shapes) != seconds(IDEAL, op, *shapes)
        }

    assert changed(gemm_efficiency=0.9) == {"product"}
    assert changed(attention_efficiency=0.9) == {"attention", "scores"}
    assert changed(memory_traffic=2.0) == {"addition"}
    assert changed(host_launch=1e-5, overlap_slowdown=1.1, step_seconds=0.1) == set()


@given(
    name=st.sampled_from(["gemm_efficiency", "attention_efficiency"]), low=st.floats(0.5, 1.3), high=st.floats(0.5, 1.3)
)
def test_a_more_efficient_stack_is_never_slower(name: str, low: float, high: float) -> None:
    low, high = sorted((low, high))
    attention = Op("f", "Attention", ("q", "k", "v"), ("y",))

    for mode in ("fused", "unfused"):
        worse, better = (Stack("x", attention=mode, scalars=((name, value),)) for value in (low, high))
        assert seconds(better, MATMUL, SQUARE, SQUARE, SQUARE) <= seconds(worse, MATMUL, SQUARE, SQUARE, SQUARE)
        assert seconds(better, attention, *[HEADS] * 4) <= seconds(worse, attention, *[HEADS] * 4)


def test_the_example_of_the_docs_is_a_stack() -> None:
    """The YAML block of docs/cost_model.md that names scalars states every field of the file."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = [block for block in blocks if "scalars:" in block]

    stack = parse_stack(text)

    assert stack["host_launch"] == 12e-6
    assert stack.fit is not None
    assert stack.fit.rows == 49
    choices = {
        "attention",
        "fusion",
        "dispatch",
        "hides_dispatch",
        "overlaps_shared",
        "hides_tp",
        "graphs",
        "experts",
        "loss",
        "gradients",
        "context",
        "selective",
        "recompute_modules",
        "recompute_among",
        "uneven",
        "dropout",
        "gaps",
        "outside",
        "gathers",
    }
    assert set(stack.to_dict()) == {"name", "clusters", "scalars", "fit", *choices}

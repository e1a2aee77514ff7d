"""Software stacks: bounds hold, files round-trip, errors name the field and what it may be."""

import json
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import DEFAULT, SCALARS, Fit, FitSource, Stack, bundled_stacks, load_stack
from autopar.cost.stack import Range, format_stack, parse_stack, stack_from_dict
from autopar.errors import StackError

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
    assert load_stack("default") == DEFAULT == Stack("default", scalars=(("gemm_efficiency", 1.0),))
    assert DEFAULT.with_scalars(gemm_efficiency=0.9).with_scalars(gemm_efficiency=1.0) == DEFAULT


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

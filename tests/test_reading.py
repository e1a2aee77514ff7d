"""Files of settings: what no field means is refused once, with its place."""

from collections.abc import Callable
from typing import Any

import pytest

from autopar.cluster import load_cluster
from autopar.degrees import Degrees
from autopar.errors import AutoparError, ClusterError, JobError, ModelError
from autopar.frameworks.megatron import parse_layout
from autopar.limits import MAX_DEVICES
from autopar.models import build
from autopar.reading import UnreadableError, parse_json, parse_toml, parse_yaml
from autopar.units import parse_quantity


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_yaml, "a: {b: [1, .nan]}", r"a\.b\[1\] is nan, not a finite number"),
        (parse_yaml, "a: -.inf", "a is -inf, not a finite number"),
        (parse_json, '{"a": NaN}', "a is nan, not a finite number"),
        (parse_json, '{"a": 1e999}', "a is inf, not a finite number"),
        (parse_toml, "a = inf", "a is inf, not a finite number"),
        (parse_yaml, "a: 1" + "0" * 30, "a is 10{30}, a number of more than 64 bits"),
        (parse_json, "[1" + "0" * 300 + "]", r"\[0\] is about 2\^996, a number of more than 64 bits"),
        (parse_yaml, "a: " + "9" * 5000, "cannot be read as int"),
        (parse_json, '{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        (parse_toml, "a = " + "9" * 5000, "Exceeds the limit"),
        (parse_yaml, "a: 2026-13-45", "'2026-13-45' cannot be read as timestamp"),
        (parse_yaml, "a: !!bool maybe", "'maybe' cannot be read as bool"),
        (parse_yaml, '"a\\nb": 1', r"'a\\nb', which has control characters"),
        (parse_yaml, 'a: "\\e[31m"', r"a is '\\x1b\[31m', which has control characters"),
        (parse_json, '{"a": "\\u202e"}', r"a is '\\u202e', which has control characters"),
        (parse_json, "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        (parse_yaml, "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        (parse_toml, "a = " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        (parse_toml, ".".join("a" * 500) + " = 1", "nested too deeply"),
        (parse_yaml, "&a [*a]", "is part of itself"),
        (parse_yaml, "a: 1\na: 2", "a is given twice"),
        (parse_json, b"\xff", "can't decode"),
        (parse_json, "{", "property name"),
        (parse_yaml, "a: [", "expected the node content"),
    ],
)
def test_what_no_field_means_is_refused(parse: Callable[[Any], Any], text: Any, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(text)


def test_aliases_of_yaml_cannot_come_to_more_than_they_say() -> None:
    """Nine levels of ten aliases are a billion items in a file of a few lines."""
    levels = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]

    with pytest.raises(UnreadableError, match="items with its aliases"):
        parse_yaml("\n".join(levels))
    assert parse_yaml("a: &x [1]\nb: *x") == {"a": [1], "b": [1]}


def test_files_of_other_programs_may_hold_what_ours_may_not() -> None:
    """A description of several lines, a limit of infinity."""
    assert parse_json('{"a": "b\\nc", "d": Infinity}', foreign=True) == {"a": "b\nc", "d": float("inf")}


@pytest.mark.parametrize(
    ("text", "unit"),
    [("1e999999 GB/s", "B/s"), ("inf s", "s"), ("nan s", "s"), ("9" * 5000 + " B", "B"), ("1e300 PB", "B")],
)
def test_quantities_beyond_anything_are_refused(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=r"is larger than anything|is not a quantity"):
        parse_quantity(text, unit)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: load_cluster("tpu-v5p-99999999999x2x2"), ClusterError, "torus is 99999999999"),
        (lambda: load_cluster("tpu-v5p-999999x999999x2"), ClusterError, "devices_per_node is 1999996000002"),
        (lambda: Degrees(global_batch=10**30), JobError, "are more than can be planned"),
        (lambda: Degrees(dp=MAX_DEVICES, tp=2, global_batch=MAX_DEVICES), JobError, "2097152 devices are more"),
        (lambda: build("gpt2", num_layers=2**31), ModelError, "num_layers=2147483648 of gpt2 is more than 10000"),
        (lambda: build("gpt2", hidden=10**12), ModelError, "hidden=1000000000000 of gpt2 is more than"),
        (lambda: parse_layout("Et*999999999|L"), AutoparError, "has more than 10,000 layers"),
        (lambda: parse_layout("Et*" + "9" * 5000), AutoparError, "has more than 10,000 layers"),
    ],
)
def test_more_than_can_be_planned_is_an_error_before_any_list(
    ask: Callable[[], Any], error: type[AutoparError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask()

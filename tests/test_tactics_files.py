"""Schedules as files: every tactic survives the way there and back, and a bad file has one clear error."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import TacticError
from autopar.recompute import Recompute as Flavour
from autopar.schedule import SCHEDULES
from autopar.tactics import (
    TACTICS,
    Automatic,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Offload,
    Pipeline,
    Place,
    Recompute,
    Replicate,
    SequenceParallel,
    Shard,
    Tactic,
    ZeRO,
    format_schedule,
    load_schedule,
)

_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
_COUNTS = st.integers(1, 64)
_TACTICS: st.SearchStrategy[Tactic] = st.one_of(
    st.builds(Shard, st.dictionaries(_NAMES, st.integers(-4, 4), min_size=1, max_size=3), _NAMES),
    st.builds(Replicate, _NAMES, st.none() | _NAMES),
    st.builds(Place, *(st.dictionaries(_NAMES, _NAMES, max_size=2) for _ in range(3))),
    st.builds(DataParallel, _NAMES),
    st.builds(Megatron, _NAMES, st.booleans()),
    st.builds(SequenceParallel, _NAMES),
    st.builds(ContextParallel, _NAMES),
    st.builds(ExpertParallel, _NAMES, st.booleans()),
    st.builds(ZeRO, st.integers(1, 3), _NAMES, st.integers(0, 3)),
    st.builds(
        Pipeline,
        _COUNTS | st.lists(_COUNTS, min_size=1, max_size=4).map(tuple),
        st.none() | st.sampled_from(sorted(SCHEDULES)),
        st.none() | _COUNTS,
        _COUNTS,
    ),
    st.builds(Recompute, st.sampled_from(list(Flavour)).map(str), st.none() | st.lists(st.integers(0, 9)).map(tuple)),
    st.builds(Offload, stages=st.none() | st.lists(st.integers(0, 9)).map(tuple)),
    st.builds(
        Automatic,
        axes=st.lists(_NAMES, min_size=1, max_size=3).map(tuple),
        time_limit=st.none() | st.floats(0.1, 100),
        method=_NAMES,
        seed=st.integers(0, 99),
    ),
)


@given(schedule=st.lists(_TACTICS, max_size=5).map(tuple))
def test_a_schedule_reads_as_it_was_written(
    schedule: tuple[Tactic, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("schedule") / "schedule.yaml"
    path.write_text(format_schedule(schedule), encoding="utf-8")

    assert load_schedule(path) == schedule


def test_every_tactic_is_drawn() -> None:
    drawn = {Shard, Replicate, DataParallel, Megatron, SequenceParallel, ContextParallel, ExpertParallel, ZeRO}

    assert drawn | {Place, Pipeline, Recompute, Offload, Automatic} == set(TACTICS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of tactics"),
        ("megatron: {axis: m}", "not a list of tactics"),
        ("- [megatron]", "tactic 1: not a tactic"),
        ("- {megatron: {axis: m}, zero: {stage: 1, axis: m}}", "tactic 1: not a tactic"),
        ("- data_parallel: {axis: b}\n- tensor: {axis: m}", "tactic 2: there is no tactic 'tensor'"),
        ("- 7: {axis: m}", "tactic 1: there is no tactic 7"),
        ("- megatron: m", "megatron has no fields"),
        ("- megatron", "megatron: Object missing required field `axis`"),
        ("- megatron: {axis: m, heads: 3}", "megatron: Object contains unknown field `heads`"),
        ("- megatron: {axis: 3}", "megatron: Expected `str`, got `int`"),
        ("- shard: {inputs: {w: x}, axis: b}", "shard: Expected `int`, got `str`"),
        ("- shard: {inputs: {}, axis: b}", "shard: names no values"),
        ("- zero: {stage: two, axis: b}", "zero: Expected `int`, got `str`"),
        ("- [", "line 2:"),
    ],
)
def test_a_bad_file_has_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.yaml"
    path.write_text(text + "\n")

    with pytest.raises(TacticError) as caught:
        load_schedule(path)

    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(TacticError, match="No such file"):
        load_schedule(tmp_path / "absent.yaml")
    with pytest.raises(TacticError, match="not a text file"):
        load_schedule(binary)
    with pytest.raises(TacticError, match="Is a directory"):
        load_schedule(tmp_path)


def test_a_predicate_has_no_text() -> None:
    with pytest.raises(TacticError, match="shard has a predicate"):
        format_schedule([Shard({lambda value: True: 0}, "b")])
    with pytest.raises(TacticError, match="replicate has a predicate"):
        format_schedule([Replicate(lambda value: True)])


def test_a_schedule_is_a_line_per_tactic() -> None:
    text = format_schedule([DataParallel("b"), Pipeline((3, 4), microbatches=8), Recompute()])

    assert text == "- data_parallel: {axis: b}\n- pipeline:\n    stages: [3, 4]\n    microbatches: 8\n- recompute: {}\n"
    assert yaml.safe_load(text)[0] == {"data_parallel": {"axis": "b"}}

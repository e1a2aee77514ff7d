"""Events and their database: names, files, merging."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import DataError
from autopar.events import (
    DATABASE_FILE,
    Database,
    Entry,
    LaunchEvent,
    Machine,
    Measurement,
    OpEvent,
    OverlapEvent,
    PieceEvent,
    Profile,
    TensorType,
    TransferEvent,
    event_id,
    load_database,
    merge_databases,
    save_database,
)

ONE = Machine("one", "gloo", 1, 2, (("onnxruntime", "1"),), 8e9)
OTHER = Machine("other", "nccl", 1, 8, (("torch", "2"),), 80e9)
_A = TensorType((4, 8), 4.0, "float32")
EVENTS = (
    OpEvent("MatMul", (_A, TensorType((8, 2), 4.0, "float32")), (TensorType((4, 2), 4.0, "float32"),)),
    OpEvent("Softmax", (_A, None), (_A,), (("axis", -1), ("perm", (1, 0)), ("scale", 0.5), ("mode", "fast"))),
    PieceEvent("forward", (("op-1", 2),), "abc", "block kind 0"),
    TransferEvent("all_reduce", 1e6, 4, 2, True),
    LaunchEvent(),
    OverlapEvent(512, 8, "all_reduce", 1e6, 2),
)


def _measured(machine: Machine, seconds: float, busy: int = 1, repeats: int = 10) -> Measurement:
    return Measurement(machine.id, busy, seconds, seconds, seconds, repeats, 3, "2026-01-01")


def _database(machine: Machine, seconds: float, repeats: int = 10) -> Database:
    found = {event_id(event): _measured(machine, seconds, repeats=repeats) for event in EVENTS}
    return Database().with_events(EVENTS, "fp32").with_measurements(machine, found)


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    """Events of all types, with attributes of all types."""
    database = _database(ONE, 1e-3)

    save_database(database, tmp_path)

    assert load_database(tmp_path) == database
    assert load_database(tmp_path / DATABASE_FILE) == database


def test_names_say_what_matters() -> None:
    """Not the name of a piece, nor what a shard changes of an attribute, nor along which dim a transfer cuts."""
    conv = OpEvent("Conv", (_A,), (_A,), (("group", 4), ("strides", (1, 1))))

    assert event_id(conv) == event_id(msgspec.structs.replace(conv, attrs=(("group", 2), ("strides", (1, 1)))))
    assert event_id(conv) != event_id(msgspec.structs.replace(conv, attrs=(("group", 4), ("strides", (2, 2)))))
    assert event_id(EVENTS[2]) == event_id(PieceEvent("forward", (("op-1", 2),), "abc", "another"))
    assert event_id(EVENTS[3]) == event_id(TransferEvent("all_reduce", 1e6, 4, 2, False))
    assert event_id(EVENTS[3]) != event_id(TransferEvent("all_reduce", 1e6, 4, 4, True))


@given(st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.floats(1e-6, 1.0), st.integers(1, 50)), max_size=4))
def test_merging_forgets_nothing_and_counts_repeats(parts: list[tuple[Machine, float, int]]) -> None:
    """Of one machine the measurement with the most repeats stays, whatever the order."""
    merged = merge_databases([_database(*part) for part in parts])

    for machine in {machine for machine, _, _ in parts}:
        most = max(repeats for own, _, repeats in parts if own == machine)
        for entry in merged.events.values():
            (one,) = [each for each in entry.measured if each.machine == machine.id]
            assert one.repeats == most
    assert merge_databases([merged, merged]) == merged


def test_a_measurement_takes_the_place_of_a_problem() -> None:
    """What one machine could not run another one has timed."""
    name = event_id(EVENTS[0])
    failed = Database().with_events(EVENTS[:1]).with_measurements(ONE, {}, {name: "no kernel"})

    merged = merge_databases([failed, _database(OTHER, 1e-3)])

    assert failed.is_measured(name, ONE.id, 1)
    assert failed.num_measured == 0
    assert merged.events[name].problem == ""
    assert merged.num_measured == len(EVENTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": 1', '"version": 2'), "of version 2"),
        (lambda text: text.replace("all_reduce", "all_gather", 1), "was edited"),
        (lambda text: text.replace(f'"machine": "{ONE.id}"', '"machine": "m-0"', 1), "unknown machine"),
        (lambda text: text.replace('"seconds": 0.001', '"seconds": -1.0', 1), "takes -1 s"),
        (lambda text: text.replace('"kind": "MatMul"', '"kind": 3', 1), "events"),
        (lambda text: text[:-20], "profile"),
    ],
)
def test_wrong_files_are_refused(change: object, message: str, tmp_path: Path) -> None:
    """With one message that says what and where."""
    path = save_database(_database(ONE, 1e-3), tmp_path)
    assert callable(change)
    path.write_text(change(path.read_text()))

    with pytest.raises(DataError, match=message):
        load_database(tmp_path)


def test_there_is_no_profile_in_an_empty_folder(tmp_path: Path) -> None:
    """The hint names the command that makes one."""
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_database(tmp_path)

    assert "autopar profile" in caught.value.hint


def test_profiles_are_equal_by_content(tmp_path: Path) -> None:
    """Wherever they lie."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
        save_database(_database(ONE, 1e-3), folder)

    first, second = (Profile.of(folder) for folder in folders)

    assert first == second
    assert hash(first) == hash(second)
    assert first is not None
    assert second is not None
    assert (first.name, second.name) == ("a", "b")
    assert Profile.of(first) is first
    assert Profile.of(None) is None


def test_entries_keep_one_measurement_per_machine_and_load() -> None:
    """One busy device and two are different measurements."""
    entry = Entry(EVENTS[0])
    for busy, repeats in ((1, 10), (2, 10), (1, 5), (2, 20)):
        entry = entry.with_measurement(_measured(ONE, 1e-3 * repeats, busy, repeats))

    assert [(one.busy, one.repeats) for one in entry.measured] == [(1, 10), (2, 20)]

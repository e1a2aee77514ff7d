"""Pipeline schedules."""

import pytest

from autopar.schedule import SCHEDULES, Pass, Task


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_microbatch_passes_once(name: str, num_stages: int, num_microbatches: int) -> None:
    """Each stage runs every forward once, and in training every backward once and after its forward."""
    schedule = SCHEDULES[name]
    passes = list(Pass) if schedule.trains else [Pass.FORWARD]
    expected = {Task(kind, i) for kind in passes for i in range(num_microbatches)}

    for stage in range(num_stages):
        order = schedule.order(stage, num_stages, num_microbatches)

        assert len(order) == len(expected)
        assert set(order) == expected
        if schedule.trains:
            for i in range(num_microbatches):
                assert order.index(Task(Pass.FORWARD, i)) < order.index(Task(Pass.BACKWARD, i))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_in_flight_is_what_the_order_implies(name: str, num_stages: int, num_microbatches: int) -> None:
    """The closed form equals the highest number of forwards without their backward; 1 where nothing is kept."""
    schedule = SCHEDULES[name]

    for stage in range(num_stages):
        held, highest = 0, 0
        for task in schedule.order(stage, num_stages, num_microbatches):
            held += 1 if task.kind is Pass.FORWARD else -1
            highest = max(highest, held)

        in_flight = schedule.in_flight(stage, num_stages, num_microbatches)

        assert in_flight == (highest if schedule.trains else 1)


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("forward-only", 2, "F0 F1 F2 F3"),
    ],
)
def test_order_is_the_published_one(name: str, stage: int, expected: str) -> None:
    order = SCHEDULES[name].order(stage, num_stages=3, num_microbatches=4)

    assert " ".join(map(str, order)) == expected

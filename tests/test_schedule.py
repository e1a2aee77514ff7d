"""Pipeline schedules."""

from itertools import product

import numpy as np
import pytest

from autopar.errors import ProgramError
from autopar.schedule import SCHEDULES, Pass, Task, chunks_of, follow
from autopar.schedule.base import Schedule, Tasks
from autopar.schedule.timing import time_tasks

SIZES = [(p, m, 1) for p in (1, 2, 4) for m in (1, 2, 3, 7)]
CASES = [(name, *size) for name in ("1f1b", "gpipe", "forward-only") for size in SIZES]
CASES += [(name, *size) for name in ("zb-h1", "zb-h2") for size in SIZES]
CASES += [("zb-v", p, m, 2) for p in (1, 2, 3, 4) for m in (1, 2, 3, 7, 12)]
CASES += [("interleaved", p, p * rounds, v) for p in (1, 2, 3, 8) for rounds in (1, 2, 3) for v in (1, 2, 4)]
each_case = pytest.mark.parametrize(("name", "num_groups", "num_microbatches", "num_chunks"), CASES)


@each_case
def test_every_microbatch_passes_once(name: str, num_groups: int, num_microbatches: int, num_chunks: int) -> None:
    """Each stage runs every forward once, and in training every backward once, after its forward, in one or two passes.

    Each kind of pass takes the microbatches of a chunk in their order: so sums of gradients are the same everywhere.
    """
    schedule = SCHEDULES[name]
    microbatches = [(i, chunk) for i in range(num_microbatches) for chunk in range(num_chunks)]
    expected = {Task(kind, i, chunk) for kind in schedule.passes for i, chunk in microbatches}

    for group in range(num_groups):
        order = schedule.order(group, num_groups, num_microbatches, num_chunks)

        assert len(order) == len(expected)
        assert set(order) == expected
        for i, chunk in microbatches:
            places = [order.index(Task(kind, i, chunk)) for kind in schedule.passes]
            assert places == sorted(places)
        for kind, chunk in product(schedule.passes, range(num_chunks)):
            own = [task.microbatch for task in order if (task.kind, task.chunk) == (kind, chunk)]
            assert own == sorted(own)


@each_case
def test_in_flight_is_what_the_order_implies(
    name: str, num_groups: int, num_microbatches: int, num_chunks: int
) -> None:
    """The closed form equals the highest number of forwards without their last pass; 1 where nothing is kept."""
    schedule = SCHEDULES[name]

    for group in range(num_groups):
        held, highest = 0, 0
        for task in schedule.order(group, num_groups, num_microbatches, num_chunks):
            held += (task.kind is Pass.FORWARD) - (task.kind is schedule.passes[-1])
            highest = max(highest, held)

        in_flight = schedule.in_flight(group, num_groups, num_microbatches, num_chunks)

        assert in_flight == (highest if schedule.trains else 1)


@each_case
def test_no_group_waits_for_what_another_does_later(
    name: str, num_groups: int, num_microbatches: int, num_chunks: int
) -> None:
    """All tasks can be put in one order that keeps to that of every group and has nothing before what it needs."""
    schedule = SCHEDULES[name]
    orders, groups = schedule.orders(num_groups, num_microbatches, num_chunks), schedule.groups(num_groups, num_chunks)

    followed = follow(orders, groups)

    place = {entry: i for i, entry in enumerate(followed)}
    chunk_of = {stage: stages.index(stage) for stages in chunks_of(groups) for stage in stages}
    for group, order in enumerate(orders):
        assert [task for stage, task in followed if groups[stage] == group] == list(order)
    for (stage, (kind, i, _)), at in place.items():
        before = stage - 1 if kind is Pass.FORWARD else stage + 1
        if kind is not Pass.WEIGHT and 0 <= before < len(groups):
            assert place[before, Task(kind, i, chunk_of[before])] < at
        if kind is not Pass.FORWARD:
            earlier = Pass.FORWARD if kind is Pass.BACKWARD else Pass.BACKWARD
            assert place[stage, Task(earlier, i, chunk_of[stage])] < at


def _orders(*texts: str) -> list[list[Task]]:
    return [[Task(Pass(word[0]), int(word[1:])) for word in text.split()] for text in texts]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("B0 F0", "F0 B0"),  # a backward before its forward
        ("F0 B0 F1 B1", "F1 B1 F0 B0"),  # one waits for the backward that the other does after another forward
        ("F1 B1", "F0 B0"),  # nobody sends what is waited for
    ],
)
def test_deadlocks_are_found(first: str, second: str) -> None:
    with pytest.raises(ProgramError, match=r"the schedule deadlocks: group 0 for what .* needs, group 1 for what"):
        follow(_orders(first, second), (0, 1))


class _Stuck(Schedule):
    """A schedule whose groups wait for each other."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        assert (num_groups, num_microbatches, num_chunks) == (2, 2, 1)
        return tuple(_orders("F0 B0 F1 B1", "F1 B1 F0 B0")[group])


def test_what_never_ends_is_not_timed() -> None:
    hops = np.zeros(2)
    with pytest.raises(ProgramError, match="the schedule deadlocks"):
        time_tasks(_Stuck(), 2, 2, np.ones((2, 3)), hops, hops)


def test_messages_may_cross() -> None:
    """The second group returns microbatch 1 first, the first one wants 0 first: both are there in time."""
    orders = _orders("F0 F1 B0 B1", "F1 F0 B1 B0")

    assert len(follow(orders, (0, 1))) == 8


@pytest.mark.parametrize(
    ("name", "group", "expected"),
    [
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("forward-only", 2, "F0 F1 F2 F3"),
        ("zb-h1", 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
        ("zb-h1", 2, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
        ("zb-h2", 1, "F0 F1 F2 B0 F3 B1 B2 W0 B3 W1 W2 W3"),
    ],
)
def test_order_is_the_published_one(name: str, group: int, expected: str) -> None:
    order = SCHEDULES[name].order(group, num_groups=3, num_microbatches=4)

    assert " ".join(map(str, order)) == expected


@pytest.mark.parametrize(
    ("group", "warm_up", "steady"),
    [
        (0, "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5", "F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1"),
        (3, "F0 F1 F2 F3", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3"),
    ],
)
def test_interleaved_order_is_the_published_one(group: int, warm_up: str, steady: str) -> None:
    """4 groups of 2 chunks and 8 microbatches, as in figure 4 of Narayanan et al.; the start of it."""
    order = SCHEDULES["interleaved"].order(group, num_groups=4, num_microbatches=8, num_chunks=2)

    assert " ".join(map(str, order)).startswith(f"{warm_up} {steady} ")

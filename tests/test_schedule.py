"""Pipeline schedules: task orders, in-flight counts, topological order and deadlocks."""

from itertools import product

import numpy as np
import pytest

from autopar.errors import ProgramError
from autopar.schedule import SCHEDULES, Pass, Task, chunks_of, topological_order
from autopar.schedule.base import Schedule, Tasks
from autopar.schedule.timing import time_tasks

SIZES = [(p, m, 1) for p in (1, 2, 4) for m in (1, 2, 3, 7)]
CASES = [(name, *size) for name in ("1f1b", "gpipe", "forward-only") for size in SIZES]
CASES += [(name, *size) for name in ("zb-h1", "zb-h2") for size in SIZES]
CASES += [("zb-v", p, m, 2) for p in (1, 2, 3, 4) for m in (1, 2, 3, 7, 12)]
CASES += [("dualpipe-v", p, m, 2) for p in (1, 2, 3, 4) for m in (1, 2, 3, 7, 12)]
CASES += [("1f1b-a2a", p, p * rounds, v) for p in (1, 2, 3) for rounds in (1, 2, 3) for v in (2, 4)]
CASES += [("1f1b-a2a", p, m, 1) for p in (1, 2, 3) for m in (1, 2, 3, 7)]
CASES += [("interleaved", p, p * rounds, v) for p in (1, 2, 3, 8) for rounds in (1, 2, 3) for v in (1, 2, 4)]
each_case = pytest.mark.parametrize(("name", "num_groups", "num_microbatches", "num_chunks"), CASES)


@each_case
def test_every_pass_of_every_microbatch_runs_once(
    name: str, num_groups: int, num_microbatches: int, num_chunks: int
) -> None:
    """Each stage runs every pass of every microbatch once, in the order forward, backward, weight pass.

    Each pass takes the microbatches of a chunk in ascending order, so that gradient sums are equal on all groups.
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
def test_in_flight_equals_the_count_over_the_order(
    name: str, num_groups: int, num_microbatches: int, num_chunks: int
) -> None:
    """`in_flight` equals the largest number of forwards without their last pass in `order`; 1 in inference."""
    schedule = SCHEDULES[name]

    for group in range(num_groups):
        held, highest = 0, 0
        for task in schedule.order(group, num_groups, num_microbatches, num_chunks):
            held += (task.kind is Pass.FORWARD) - (task.kind is schedule.passes[-1])
            highest = max(highest, held)

        in_flight = schedule.in_flight(group, num_groups, num_microbatches, num_chunks)

        assert in_flight == (highest if schedule.trains else 1)


@each_case
def test_topological_order_keeps_every_group_order(
    name: str, num_groups: int, num_microbatches: int, num_chunks: int
) -> None:
    """The topological order keeps the order of every group and has every task after its dependencies."""
    schedule = SCHEDULES[name]
    orders, groups = schedule.orders(num_groups, num_microbatches, num_chunks), schedule.groups(num_groups, num_chunks)

    ordered = topological_order(orders, groups)

    place = {entry: i for i, entry in enumerate(ordered)}
    chunk_of = {stage: stages.index(stage) for stages in chunks_of(groups) for stage in stages}
    for group, order in enumerate(orders):
        assert [task for stage, task in ordered if groups[stage] == group] == list(order)
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
        ("F0 B0 F1 B1", "F1 B1 F0 B0"),  # each group waits for a pass that the other one runs later
        ("F1 B1", "F0 B0"),  # no group runs the forward that group 1 depends on
    ],
)
def test_a_deadlock_raises(first: str, second: str) -> None:
    with pytest.raises(
        ProgramError, match=r"the schedule deadlocks: group 0 waits for the inputs of .*, group 1 waits"
    ):
        topological_order(_orders(first, second), (0, 1))


class _Deadlocked(Schedule):
    """A schedule whose groups deadlock."""

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> Tasks:
        assert (num_groups, num_microbatches, num_chunks) == (2, 2, 1)
        return tuple(_orders("F0 B0 F1 B1", "F1 B1 F0 B0")[group])


def test_timing_a_deadlocked_schedule_raises() -> None:
    hops = np.zeros(2)
    with pytest.raises(ProgramError, match="the schedule deadlocks"):
        time_tasks(_Deadlocked(), 2, 2, np.ones((2, 3)), hops, hops)


def test_messages_may_cross() -> None:
    """Group 1 returns microbatch 1 first and group 0 expects microbatch 0 first: no deadlock."""
    orders = _orders("F0 F1 B0 B1", "F1 F0 B1 B0")

    assert len(topological_order(orders, (0, 1))) == 8


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
def test_order_equals_the_published_order(name: str, group: int, expected: str) -> None:
    order = SCHEDULES[name].order(group, num_groups=3, num_microbatches=4)

    assert " ".join(map(str, order)) == expected


@pytest.mark.parametrize(
    ("group", "warm_up", "steady"),
    [
        (0, "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5", "F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1"),
        (3, "F0 F1 F2 F3", "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3"),
    ],
)
def test_interleaved_order_equals_the_published_order(group: int, warm_up: str, steady: str) -> None:
    """The start of the order of 4 groups, 2 chunks, 8 microbatches in figure 4 of Narayanan et al., 2021."""
    order = SCHEDULES["interleaved"].order(group, num_groups=4, num_microbatches=8, num_chunks=2)

    assert " ".join(map(str, order)).startswith(f"{warm_up} {steady} ")

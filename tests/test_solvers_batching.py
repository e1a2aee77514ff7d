"""Cuts into batches, compared with all cuts there are."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.solvers.batching import Cuts, FloatArray, Law, cut_batches, cut_front

_TIMES = st.integers(0, 12).map(float)


def _law(start: float, power: float) -> Law:
    return lambda sizes: start + sizes**power


def _every_cut(count: int) -> Iterator[tuple[int, ...]]:
    for number in range(count):
        for chosen in combinations(range(1, count), number):
            yield (*chosen, count)


def _run(ends: tuple[int, ...], release: list[float], sizes: list[float], law: Law, free: float) -> Cuts:
    """Return what cuts come to, batch after batch."""
    clock, total, begin = free, 0.0, 0
    for end in ends:
        seconds = float(law(np.array([sum(sizes[begin:end])]))[0])
        clock = max(clock, *release[begin:end]) + seconds
        total += seconds
        begin = end
    return Cuts(ends, clock, total)


@given(
    jobs=st.lists(st.tuples(_TIMES, st.integers(0, 9).map(float)), min_size=1, max_size=8),
    start=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    power=st.sampled_from([0.7, 1.0]),
    free=_TIMES,
)
def test_no_cuts_end_earlier_or_are_beaten_in_end_and_total(
    jobs: list[tuple[float, float]], start: float, power: float, free: float
) -> None:
    """The front has the earliest end and the least total of all cuts, and each of its members does what it says."""
    release, sizes = sorted(time for time, _ in jobs), [size for _, size in jobs]
    law = _law(start, power)
    every = [_run(ends, release, sizes, law, free) for ends in _every_cut(len(jobs))]

    front = cut_front(release, sizes, law, free=free)
    best = cut_batches(release, sizes, law, free=free)

    assert best.finish == pytest.approx(min(cuts.finish for cuts in every))
    assert front[0].finish == pytest.approx(best.finish)
    assert front[-1].total == pytest.approx(min(cuts.total for cuts in every))
    for cuts in (best, *front):
        again = _run(cuts.ends, release, sizes, law, free)
        assert (cuts.finish, cuts.total) == pytest.approx((again.finish, again.total))
    for cuts in every:  # each is met or beaten by one of the front
        assert any(
            own.finish <= cuts.finish * (1 + 1e-9) + 1e-9 and own.total <= cuts.total * (1 + 1e-9) + 1e-9
            for own in front
        )


def test_batches_end_only_where_they_may() -> None:
    """Four jobs of a second with a start of a tenth; a batch may end after the second one only."""
    allowed = np.array([True, False, True, False, True])

    free = cut_batches([0.0, 1.0, 2.0, 3.0], [1.0] * 4, lambda sizes: 0.1 + sizes)
    bound = cut_batches([0.0, 1.0, 2.0, 3.0], [1.0] * 4, lambda sizes: 0.1 + sizes, allowed=allowed)

    assert free.ends == (1, 2, 3, 4)
    assert bound.ends == (2, 4)
    assert free.finish == pytest.approx(4.4)
    assert bound.finish == pytest.approx(5.2)


def test_no_job_is_no_batch() -> None:
    assert cut_front([], [], lambda sizes: sizes, free=3.0) == (Cuts((), 3.0, 0.0),)


def test_a_thinned_front_keeps_its_ends() -> None:
    """Of 40 jobs with a start that costs as much as two of them there are many trade-offs; two labels keep the ends."""
    rng = np.random.default_rng(0)
    release, sizes = np.sort(rng.uniform(0, 40, 40)), rng.uniform(0, 2, 40)

    def law(loads: FloatArray) -> FloatArray:
        return 2.0 + loads

    whole, thin = cut_front(release, sizes, law, most=64), cut_front(release, sizes, law, most=2)

    assert len(whole) > 2
    assert thin[0].finish == pytest.approx(whole[0].finish)
    assert thin[-1].total == pytest.approx(whole[-1].total)

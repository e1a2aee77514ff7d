"""Gradient traffic beside compute."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ProgramError
from autopar.program.records import Program
from autopar.sharding import Mesh
from autopar.simulate import Row, Timeline, simulate
from autopar.simulate.fitting import Interval, Job, Jobs, fit_in
from autopar.simulate.layout import Resource
from tests.programs import ExactCosts, programs, two_block_step

GOLDEN = Path(__file__).parent / "golden"


def _listing(timeline: Timeline) -> str:
    """Return the events by row and time, one a line."""
    rows = list(Row)
    events = sorted(
        timeline.events, key=lambda event: (event.stage, rows.index(event.row), event.start, -event.seconds)
    )
    return "".join(
        f"{event.row:<24} {event.start:>4g} - {event.start + event.seconds:<4g} {event.name}\n" for event in events
    )


@pytest.mark.parametrize("tp", [2, 8])
def test_reductions_run_beside_the_backward_as_worked_out_by_hand(tp: int) -> None:
    """Two microbatches of F 3 + 3 s and B 4 + 4 s end at 28; the last backward of block 1 ends at 24.

    tp=8 fills the node, so dp crosses nodes: the reductions of 5 s and 2 s have the NIC from 24 on and end at 31, 3 s
    after the backward. With tp=2 both share the link in the node: block 0's all_reduce takes it from 27 to 28, so they
    end at 32.
    """
    timeline = simulate(two_block_step(Mesh.of(dp=2, tp=tp)), ExactCosts(), trace=True, bucket=0)

    assert timeline.stages[0].gradient_seconds == (3 if tp == 8 else 4)
    assert _listing(timeline) == (GOLDEN / f"events_tp{tp}.txt").read_text()


def test_what_fits_beside_compute_costs_nothing() -> None:
    """At 4 times the bandwidth the last reduction, ready at 26.5, takes 0.5 s: only that is exposed."""
    timeline = simulate(two_block_step(Mesh.of(dp=2, tp=8)), ExactCosts(bandwidth=4.0), bucket=0)

    stage = timeline.stages[0]
    assert stage.gradient_seconds == 0.5
    assert stage.overlapped_seconds == 1.75


@given(program=programs())
def test_exposed_gradient_traffic_is_part_of_it(program: Program) -> None:
    """Without latency nothing but gradient traffic has a link after the last backward of a stage."""
    for stage in simulate(program, ExactCosts()).stages:
        assert stage.gradient_seconds <= stage.overlapped_seconds * (1 + 1e-12)  # both are sums


_JOBS = st.lists(
    st.tuples(st.sampled_from([Resource.INTRA, Resource.INTER]), st.integers(0, 9), st.integers(0, 5), st.booleans()),
    max_size=6,
)
_BUSY = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=6)


def _second_by_second(jobs: list[Job], busy: dict[Resource, list[Interval]]) -> list[float]:
    """Return the ends of jobs of whole seconds, at least 1 each, by walking through time."""
    left = [job.seconds for job in jobs]
    ends = [0.0] * len(jobs)
    second = 0.0
    while any(left):
        served: dict[Resource, int] = {}
        for i, job in enumerate(jobs):  # the first unfinished job of a link keeps those behind it waiting
            if left[i] and job.resource not in served:
                served[job.resource] = i
        able = [
            i
            for resource, i in served.items()
            if jobs[i].ready <= second
            and (jobs[i].after < 0 or not left[jobs[i].after])
            and not any(start <= second < end for start, end in busy[resource])
        ]
        second += 1
        for i in able:
            left[i] -= 1
            ends[i] = second
    return ends


@given(drawn=_JOBS, intra=_BUSY, inter=_BUSY)
def test_links_are_shared_as_by_walking_through_time(
    drawn: list[tuple[Resource, int, int, bool]], intra: list[tuple[int, int]], inter: list[tuple[int, int]]
) -> None:
    """First in, first out per link, interrupted by what is urgent, after the job before where that is needed."""
    jobs: list[Job] = []
    ready = 0
    for i, (resource, pause, seconds, chained) in enumerate(drawn):
        ready += pause
        jobs.append(Job(resource, str(i), float(ready), float(seconds + 1), i - 1 if chained else -1))
    busy = {
        resource: [(float(start), float(start + seconds)) for start, seconds in parts]
        for resource, parts in ((Resource.INTRA, intra), (Resource.INTER, inter))
    }

    times = fit_in(Jobs.of(jobs), {resource: np.array(own).reshape(-1, 2) for resource, own in busy.items()})

    assert [end for _, end in times] == _second_by_second(jobs, busy)
    for job, (start, end) in zip(jobs, times, strict=True):
        assert start >= job.ready
        assert end - start >= job.seconds


def test_the_laws_of_a_program_are_checked_unless_it_is_known_to_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    program = two_block_step(Mesh.of(dp=2, tp=2))
    lawful = simulate(program, ExactCosts())

    def refuse(program: Program) -> None:
        raise ProgramError("it breaks one")

    monkeypatch.setattr("autopar.simulate.engine.verify_program", refuse)

    assert simulate(program, ExactCosts(), verified=True) == lawful
    with pytest.raises(ProgramError, match="it breaks one"):
        simulate(program, ExactCosts())

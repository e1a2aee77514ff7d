"""Which blocks of a stage have their optimizer state in host memory: the fewest first ones, and shares of it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.overlap import STATE_BUCKET_BYTES, STATE_BUFFERS, state_buffers
from autopar.errors import JobError, PlanError
from autopar.formulate.block_memory import ChainBytes, SharedBytes, copied_seconds
from autopar.formulate.constraints import Constraints
from autopar.formulate.hosted_state import HostedState, needed_state
from autopar.recompute import Hosted, Recompute, first_share, format_hosted, parse_hosted, parse_share

_LIES = st.sampled_from([frozenset({False}), frozenset({True}), frozenset({False, True})])
_UNIT = 1e8
"""Bytes of a state, as large as a bucket."""


@given(st.lists(st.tuples(st.integers(0, 9), _LIES), min_size=1, max_size=6), st.integers(0, 60), st.data())
def test_the_least_boundary_hosts_enough_and_no_block_more(
    blocks: list[tuple[int, frozenset[bool]]], needed: int, data: st.DataObject
) -> None:
    """Of the blocks before it that may, and of all that must; without one block fewer it is not enough."""
    states, lies = zip(*blocks, strict=True)
    memory = replace(ChainBytes.nothing(range(len(blocks))), state=np.array(states, dtype=np.float64))
    places = HostedState.of(memory, Constraints(hosted=frozenset({Hosted.OPTIMIZER}), states=lies))
    start = data.draw(st.integers(0, len(blocks) - 1))
    stop = data.draw(st.integers(start + 1, len(blocks)))
    ends = np.array([start]), np.array([stop])

    def hosted(boundary: int) -> float:
        away = places.away(start, stop, boundary)
        found = float(sum(size for size, own in zip(states[start:stop], away, strict=True) if own))
        assert places.bytes(*ends, np.array([boundary]))[0] == found
        return found

    least = int(places.least(*ends, np.array([float(needed)]))[0])

    if least > stop:
        assert hosted(stop) < needed
    else:
        assert hosted(least) >= needed
        assert least == start or hosted(least - 1) < needed
    most = int(places.most(*ends, np.array([float(needed)]))[0])
    assert most == start or hosted(most) <= needed
    assert most == stop or hosted(most + 1) > needed


@given(st.lists(_LIES, min_size=2, max_size=6), st.data())
def test_the_state_of_a_copy_is_where_that_of_all_blocks_is(lies: list[frozenset[bool]], data: st.DataObject) -> None:
    """On a stage that reads a parameter which another one owns: its bytes and seconds, as a stage counts them."""
    count = len(lies)
    numbers = st.integers(0, count - 1)
    owner, readers = data.draw(numbers), data.draw(st.lists(numbers, min_size=1, max_size=2, unique=True))
    shared = SharedBytes(owner, tuple((block, 9.0) for block in readers), state=5.0, state_seconds=0.5)
    memory = replace(ChainBytes.nothing(range(count)), state=np.ones(count), shared=(shared,))
    places = HostedState.of(memory, Constraints(hosted=frozenset({Hosted.OPTIMIZER}), states=tuple(lies)))
    start = data.draw(numbers)
    stop = data.draw(st.integers(start + 1, count))

    for boundary in range(start, stop + 1):
        ends, away = (np.array([start]), np.array([stop]), np.array([boundary])), places.away(start, stop, boundary)
        assert places.bytes(*ends)[0] == memory.host_bytes(start, stop, 1, [Recompute.NONE] * count, away=away)
        assert places.seconds(*ends)[0] == copied_seconds(memory.shared, start, stop, away)
    whole, room = (np.array([start]), np.array([stop])), stop - start + 1.0
    most = places.most(*whole, np.array([room]))
    assert places.bytes(*whole, most)[0] <= room or all(own == {True} for own in lies[start:stop])


@given(*[st.integers(0, 20)] * 4)
def test_as_much_state_as_is_needed_makes_a_stage_fit(resident: int, passes: int, update: int, limit: int) -> None:
    """Buckets on the device while the update runs are counted; where nothing is needed the stage fits as it is."""
    held, beside, once = (_UNIT * np.array(each, dtype=np.float64) for each in (resident, passes, update))

    needed = needed_state(held, beside, once, limit * _UNIT)

    def peak(state: float) -> float:
        return float(held - state + max(float(beside), float(once + state_buffers(np.array(state)))))

    assert peak(float(needed)) <= limit * _UNIT * (1 + 1e-12)
    if needed > STATE_BUFFERS * STATE_BUCKET_BYTES:
        assert peak(float(needed) - 1.0) > limit * _UNIT


def test_shares_are_those_of_first_blocks() -> None:
    """As many as come nearest, at least one; all of them for all of it."""
    assert first_share([1.0, 1.0, 1.0, 1.0], 0.6) == (True, True, False, False)
    assert first_share([8.0, 1.0, 1.0], 0.1) == (True, False, False)
    assert first_share([1.0, 0.0, 0.0], 1.0) == (True, True, True)


def test_what_lies_where_is_read_as_it_is_written() -> None:
    for away in ((False, False), (True, True), (True, False, True)):
        assert parse_hosted(format_hosted(away), len(away)) == away
    for text, message in (("weights", "no offload"), ("optimizer*3", "for more blocks"), ("none*2", "leaves all")):
        with pytest.raises(PlanError, match=message):
            parse_hosted(text, 2)
    for text in ("optimizer=0", "optimizer=1.5", "optimizer=half", "optimizer=nan", "weights"):
        with pytest.raises(JobError, match="offload"):
            parse_share(text)

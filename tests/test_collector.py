"""The garbage collector is kept away for as long as was asked, and then as it was before."""

import gc

import pytest

from autopar.collector import YOUNG, seldom_collected, uncollected


@pytest.mark.parametrize("young", [700, 2 * YOUNG, 0])
def test_it_looks_seldom_and_then_as_before(young: int) -> None:
    """Never more often than the caller has it, and not at all if that was switched off."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(young, 7, 8)
        with seldom_collected():
            during = gc.get_threshold()
        with pytest.raises(KeyError), seldom_collected():
            raise KeyError

        assert during == (max(young, YOUNG) if young else 0, 7, 8)
        assert gc.get_threshold() == (young, 7, 8)
    finally:
        gc.set_threshold(*before)


def test_it_is_away_and_then_as_before() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()

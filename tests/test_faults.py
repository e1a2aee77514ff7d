"""Whatever the world does: nothing is lost, no process is left, no file is half written, there is one message."""

import pytest

from tests.faults import FAULTS, do


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_program_holds(name: str) -> None:
    """Each fault says what has to hold; a limit of time is kept by a machine that has nothing else to do."""
    fault = FAULTS[name]
    if fault.missing:
        pytest.skip(fault.missing)

    seen = do(fault)

    assert not seen.wrong
    assert not seen.leftovers

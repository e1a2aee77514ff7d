"""Predicted memory against PyTorch's own memory tracker, on fake tensors and a fake process group."""

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker", reason="torch 2.6 or newer is not installed")

from tests.memory_cases import NAMED, TOLERANCE, cases, compare


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), list(cases()))
@pytest.mark.filterwarnings("ignore")
def test_peaks_are_those_of_the_tracker(name: str, layout: str, cache_dir: Path) -> None:
    """Within 3 %, but for cases in which a term that is not ours is named."""
    measured, ours = compare(name, layout, cache_dir)["peak"]

    tolerance, _ = NAMED.get((name, layout), (TOLERANCE, ""))
    assert ours == pytest.approx(measured, rel=tolerance)

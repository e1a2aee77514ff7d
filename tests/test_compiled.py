"""Machine code is run only from folders that nobody else can write to."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import caching

from autopar.compiled import _check_private, compiled
from autopar.cost import placement_loops
from autopar.errors import JobError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of ours; the folders of tests are readable by nobody else."""
    folder = tmp_path / "own"
    folder.mkdir(mode=0o755)
    return folder


def test_a_folder_of_ones_own_is_private(folder: Path) -> None:
    _check_private(folder)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    """Also one in which they cannot remove what is not theirs: they could be there first."""
    folder.chmod(mode)

    with pytest.raises(JobError, match="others may write to") as caught:
        _check_private(folder)

    assert f"chmod go-w {folder}" in caught.value.hint


def test_a_folder_that_others_may_exchange_is_refused(folder: Path) -> None:
    """It is as if they could write to it; in a folder like /tmp they cannot."""
    inside = folder / "numba"
    inside.mkdir(mode=0o755)
    folder.chmod(0o1777)
    _check_private(inside)
    _check_private.cache_clear()
    folder.chmod(0o777)

    with pytest.raises(JobError, match="others may write to"):
        _check_private(inside)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    os.chown(folder, 1234, 1234)

    with pytest.raises(JobError, match="others may write to"):
        _check_private(folder)


def test_a_shared_folder_ends_the_command_before_anything_is_loaded(folder: Path) -> None:
    """One error, and no file of that folder is read."""
    folder.chmod(0o777)
    script = "import sys; from autopar.cli import main; sys.exit(main(['simulate', 'plan.json']))"
    plan = "import sys; from tests.plans import two_stage_plan; two_stage_plan().save('plan.json')"
    subprocess.run([sys.executable, "-c", plan], check=True, cwd=folder.parent, env=_environment({}))

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder.parent,
        env=_environment({"NUMBA_CACHE_DIR": str(folder)}),
    )

    assert done.returncode == 2
    assert done.stderr.startswith("error: numba would run machine code from ")
    assert done.stderr.count("\n") == 2


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.getcwd(), **more}


def test_without_a_folder_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only system."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def double(number: int) -> int:
        return 2 * number

    assert compiled(double)(4) == 8


def test_a_full_disk_costs_no_more_than_compiling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)

    def triple(number: int) -> int:
        return 3 * number

    assert compiled(triple)(4) == 12


def test_numba_is_imported_at_the_first_call_of_a_kernel() -> None:
    """Neither what checks whether a model fits nor what prices small reshards needs it."""
    script = (
        "import sys; import autopar.estimates.fitting; from autopar.cost.placement_loops import shortened; "
        "import numpy as np; a = np.ones((1, 2, 2)); shortened(a, a.copy(), np.zeros((1, 2, 2), np.int16)); "
        "before = 'numba' in sys.modules; import tests.kernels; "
        "print(before, tests.kernels.tripled(2), 'numba' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "6", "True"]


def test_moves_are_shortened_alike_by_numpy_and_by_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: which of both runs depends on their number."""
    random = np.random.default_rng(0)
    seconds = random.random((3, 6, 6))
    seconds[random.random(seconds.shape) < 0.4] = np.inf
    seconds[:, np.arange(6), np.arange(6)] = 0.0
    first = np.broadcast_to(np.arange(6, dtype=np.int16), seconds.shape)
    found = []
    for few in (0, placement_loops.FEW):
        monkeypatch.setattr(placement_loops, "FEW", few)
        own = seconds.copy(), seconds.copy(), first.copy()
        placement_loops.shortened(*own)
        found.append(own)

    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert (found[0][0] < seconds).any()

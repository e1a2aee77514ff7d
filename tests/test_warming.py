"""Kernels are compiled before a search, once on a machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import types

from autopar import warming
from autopar.compiled import KERNELS, compiled, is_kept
from autopar.progress import Progress


def doubled(value: float) -> float:
    """Return twice a number."""
    return 2.0 * value


@pytest.mark.parametrize("module", warming.listed())
def test_every_listed_kernel_is_there(module: str) -> None:
    """With types that numba knows and as many as it has arguments: a list that is out of date ends every search."""
    versions = warming._versions(module)

    assert len(versions) == sum(map(len, warming.listed()[module].values()))
    assert all(len(kinds) == kernel.py_func.__code__.co_argcount for kernel, kinds in versions)


def test_types_are_those_that_are_spelled() -> None:
    """Arrays are contiguous; those that cannot be written to are another type."""
    spelled = ("float64", "int64[2]", "const float64[1]")

    found = tuple(map(warming._numba_type, spelled))

    assert found == (types.float64, types.int64[:, ::1], types.Array(types.float64, 1, "C", readonly=True))


def test_missing_kernels_are_compiled_and_then_are_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process, where there are no workers."""
    kernel: Any = compiled(doubled)
    monkeypatch.setitem(KERNELS, f"{__name__}:doubled", kernel)
    monkeypatch.setattr(kernel._cache._cache_file, "_index_path", str(tmp_path / "doubled.nbi"))
    monkeypatch.setattr(kernel._cache._cache_file, "_cache_path", str(tmp_path))
    monkeypatch.setattr(warming, "listed", lambda: {__name__: {"doubled": [["float64"]]}})
    before, told = warming.missing(), list[Progress]()

    with warming.Warming(processes=0) as own:
        own.finish(progress=told.append)

    assert (before, warming.missing()) == ([__name__], [])
    assert is_kept(kernel, (types.float64,))
    assert [step.phase for step in told] == ["compile"]


COLD = """
import time
from numba.core import event
import autopar
from autopar import warming

asked = []
with warming.Warming(2) as own:
    own.finish(meanwhile=lambda should_stop: asked.append(should_stop()))
assert asked == [False], asked
assert warming.missing() == [], warming.missing()

class Compiled(event.Listener):
    def on_start(self, event):
        kernel = event.data["dispatcher"].py_func
        if kernel.__module__.startswith("autopar."):
            print("compiled", kernel.__module__, kernel.__qualname__)
    def on_end(self, event):
        pass

event.register("numba:compile", Compiled())
autopar.solve("zoo:gpt2", gpus=8, workers=1, cache_dir=None)
"""


@pytest.mark.slow
def test_a_search_of_a_usual_model_compiles_nothing_more(tmp_path: Path) -> None:
    """On a machine where nothing was compiled before, by two processes."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    tmp_path.chmod(0o700)

    done = subprocess.run(
        [sys.executable, "-c", COLD], env=environment, capture_output=True, text=True, check=False, timeout=600
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr

"""The published configurations that docs/benchmarks/published_megatron.py simulates."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from autopar import models

SCRIPT = Path(__file__).parent.parent / "docs" / "benchmarks" / "published_megatron.py"


@cache
def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_megatron", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_megatron"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_model_of_the_table_is_there_once() -> None:
    """With degrees that make the devices, the batch and the layers of the model."""
    rows = _script().ROWS

    assert [row.name for row in rows] == [name for name in models.names() if name.startswith("megatron-")]
    for row in rows:
        assert row.degrees.gpus == row.gpus
        assert models.spec(row.name).num_layers % row.degrees.num_stages == 0


@pytest.mark.parametrize(
    ("name", "seconds"), [("megatron-1.7b", 3.528), ("megatron-18b", 9.399), ("megatron-76b", 16.058)]
)
def test_measured_seconds_follow_from_the_published_rate(name: str, seconds: float) -> None:
    """Worked out apart by the paper's formula: 137, 135 and 140 TFLOP/s per device."""
    (row,) = (row for row in _script().ROWS if row.name == name)

    assert row.measured == pytest.approx(seconds, rel=1e-3)

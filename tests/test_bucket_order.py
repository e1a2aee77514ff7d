"""The benchmark that trains with several buckets on two gloo ranks: its predictions, and that it runs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "docs/benchmarks/bucket_order.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bucket_order", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bucket_order", module)  # where dataclasses look their names up
    spec.loader.exec_module(module)
    return module


def test_a_step_ends_with_the_last_bucket_or_with_compute(bench: ModuleType) -> None:
    """Gradients at 1, 2 and 3 seconds, all-reduces of 1 second and 1 per byte: worked out by hand."""
    found = bench.Found((1.0, 2.0, 3.0), (1.0, 1.0, 2.0), 3.5, 1.0, 1.0, (2, 3), {})

    assert bench.predicted(found, (1, 2, 3)) == 1 + 2 + 2 + 3
    assert bench.predicted(found, (2, 3)) == 2 + 3 + 3
    assert bench.predicted(found, (3,)) == 3 + 5
    assert bench.predicted(bench.Found((1.0,), (0.0,), 9.0, 1.0, 1.0, (1,), {}), (1,)) == 9.0


def test_pairs_are_compared_where_predictions_differ(bench: ModuleType) -> None:
    sizes = (0.02 * 2**20,) * 3
    steps = {name: float(number) for number, name in enumerate([f"DDP {cap:g} MiB" for cap in bench.CAPS], start=2)}
    found = bench.Found((1.0, 2.0, 3.0), sizes, 3.0, 1.0, 0.0, (2, 3), {**steps, bench.OURS: 1.0})

    same, pairs = bench.agreeing(found)

    assert pairs == 0  # 3 + 1 seconds whatever the buckets
    assert same == 0


@pytest.mark.slow
def test_two_ranks_train_with_all_buckets(bench: ModuleType) -> None:
    """Every way takes time; our cuts cover all gradients, and no way is predicted to be faster."""
    pytest.importorskip("torch")

    found = bench.measure(rounds=1)

    assert found.ours[-1] == len(found.sizes) == 2 * bench.DEPTH
    assert set(found.steps) == set(bench.ways(found))
    assert all(seconds > 0 for seconds in found.steps.values())
    best = bench.predicted(found, found.ours)
    assert all(best <= bench.predicted(found, ends) * (1 + 1e-9) for ends in bench.ways(found).values())

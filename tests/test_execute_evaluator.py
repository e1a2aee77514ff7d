"""The evaluator computes, bit by bit, what that of `onnx.reference` does, which it only looks things up for before."""

import numpy as np
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from autopar.discover.probe_data import sample
from autopar.discover.shrink import shrink
from autopar.discover.sketch import Sketch, sketch_op
from autopar.execute import Executor
from autopar.execute.evaluator import Evaluator
from autopar.workload import open_workload
from tests.formulations import DIMS


def _outputs(sketches: list[Sketch]) -> dict[Sketch, list[tuple[np.ndarray, ...]]]:
    """Return the outputs of each op on some data, with executors that know nothing."""
    executor, found = Executor(), {}
    for sketch in sketches:
        proxies = shrink(sketch, executor)
        data = [sample(proxy.sketch, seed, executor) for seed, proxy in enumerate(proxies or ())]
        found[sketch] = [known[1] for known in data if known is not None]
    return found


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_training_steps_are_computed_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op, with functions within functions and attributes that they hand on (an optimizer's, an axis)."""
    graph = open_workload(f"zoo:{name}", dims=DIMS[name]).probe
    sketches = list(dict.fromkeys(sketch_op(graph, op) for op in graph.ops))

    ours = _outputs(sketches)
    monkeypatch.setattr(Evaluator, "run", ReferenceEvaluator.run)
    theirs = _outputs(sketches)

    assert sum(map(len, ours.values())) > len(sketches)
    for sketch, found in ours.items():
        for mine, other in zip(found, theirs[sketch], strict=True):
            assert [array.dtype for array in mine] == [array.dtype for array in other]
            assert all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("chosen", [True, False])
def test_graphs_within_graphs_see_what_is_around_them(chosen: bool) -> None:
    """Which a plain node does not: all values are handed on."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (bool c, float[2] x) => (float[2] z) {
            y = Add(x, x)
            z = If (c) <then_branch = g () => (float[2] u) { u = Neg(y) },
                        else_branch = h () => (float[2] v) { v = Mul(y, x) }>
        }"""
    )
    x = np.array([2.0, 3.0], np.float32)

    (found,) = Evaluator(model).run(None, {"c": np.array(chosen), "x": x})

    assert found.tolist() == ([-4.0, -6.0] if chosen else [8.0, 18.0])

"""What fused element-wise kernels compute again in the backward: the same numbers, and fewer values kept."""

from typing import Any

import numpy as np
import pytest

from autopar import models
from autopar.execute import run_graph
from autopar.folding.fold import fold
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Phase
from autopar.ir.verify import verify
from autopar.models.builder import Builder
from autopar.onnx import load
from autopar.training import training_step
from autopar.workload import open_workload
from tests.gradients import EXECUTOR, as_float64
from tests.test_training_step import TINY, tiny_feeds


def _step(name: str, *, fused: bool) -> Graph:
    graph = as_float64(find_blocks(load(models.build(name, **TINY[name]), batch=4)))
    return training_step(graph, fused=fused)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-moe-16b", "unet-sd1"])
def test_the_fused_step_computes_the_same(name: str) -> None:
    """Loss, sums of gradients and updated states to the last bit: the same ops on the same numbers."""
    whole, fused = (_step(name, fused=each) for each in (False, True))
    feeds = tiny_feeds(name, whole)

    verify(fused)
    expected, found = (run_graph(step, feeds, EXECUTOR) for step in (whole, fused))

    outputs = {*whole.outputs, *(state.output for state in whole.states)}
    assert len(fused.ops) > len(whole.ops) or name == "unet-sd1"
    for output in outputs & expected.keys():
        np.testing.assert_array_equal(found[output], expected[output])


def _kept(**arguments: Any) -> set[str]:
    folded = open_workload("zoo:llama3-8b", dims=TINY["llama3-8b"], **arguments).folded(2)
    kind = max(folded.kinds, key=lambda own: own.count)
    pairs = (
        pair for op, saved in zip(kind.ops, kind.saved, strict=True) for pair in zip(op.outputs, saved, strict=True)
    )
    return {name.split(".", 2)[2] for name, saved in pairs if saved and ".mlp." in name}


def test_the_activation_of_a_gated_layer_is_kept_by_stacks_that_do_not_fuse() -> None:
    """SwiGLU keeps gate, up and its result, as Megatron-LM does; eager PyTorch keeps swish(gate), too."""
    assert _kept() == {"mlp.gate", "mlp.up", "mlp.gated"}
    assert _kept(fusion="none") == {"mlp.gate", "mlp.up", "mlp.gated", "mlp.swish"}


def test_what_a_product_reads_is_kept() -> None:
    """The gradient of its weight needs it, however cheap it is; so is what only inputs that are not kept would make."""
    g = Builder("mlp")
    x = g.input("x", ("batch", 4))
    h = g.op("MatMul", x, g.parameter("a", (4, 4)), name="h")
    y = g.op("MatMul", g.op("Gelu", h, name="gelu"), g.parameter("b", (4, 4)), name="y")
    scaled = g.op("Mul", y, g.parameter("s", (4,)), name="scaled")
    gated = g.op("Mul", g.op("Exp", scaled, name="exp"), h, name="gated")
    model = g.model({gated: ("batch", 4)})

    folded = fold(training_step(find_blocks(load(model, batch=2)), fused=True))

    again = [op.name for op in folded.graph.ops if op.phase is Phase.BACKWARD and op.name.endswith(".again")]
    assert again == []

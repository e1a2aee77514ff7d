"""The costs of a whole layer against a published measurement."""

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import CostModel
from autopar.ir.graph import Op
from autopar.sharding import Axis

COST = CostModel(load_cluster("a100"))
TENSOR = Axis("tp", 8, 1)

# The 22B model of Korthikanti et al. 2022, Reducing Activation Recomputation: hidden size h, a heads, sequence s,
# microbatch b, on 8 A100. Numbers of tokens T, local heads A, channels per head D, local channels H and F.
T, S, H = 4 * 2048, 2048, 6144
A, D = 4 * 64 // 8, H // 64
QKV, PROJ, F = 3 * H // 8, H // 8, 4 * H // 8

Shape = tuple[int, ...]
Kernel = tuple[str, list[Shape], list[Shape]]


def layer(tokens: int) -> list[Kernel]:
    """Return the kernels of Megatron-LM's forward, attention unfused; norms and dropouts see `tokens` tokens."""
    dropout_add: Kernel = ("BiasDropoutAdd", [(tokens, H), (tokens, H), (H,)], [(tokens, H), (tokens, H // 2)])
    norm: Kernel = ("LayerNormalization", [(tokens, H), (H,), (H,)], [(tokens, H)])
    return [
        norm,
        ("MatMul", [(T, H), (H, QKV)], [(T, QKV)]),
        ("MatMul", [(A, S, D), (A, D, S)], [(A, S, S)]),
        ("ScaledMaskedSoftmax", [(A, S, S)], [(A, S, S)]),
        ("Dropout", [(A, S, S)], [(A, S, S), (A, S, S // 2)]),  # the mask has 1 byte per element, half of 2
        ("MatMul", [(A, S, S), (A, S, D)], [(A, S, D)]),
        ("MatMul", [(T, PROJ), (PROJ, H)], [(T, H)]),
        dropout_add,
        norm,
        ("MatMul", [(T, H), (H, F)], [(T, F)]),
        ("BiasGelu", [(T, F), (F,)], [(T, F)]),
        ("MatMul", [(T, F), (F, H)], [(T, H)]),
        dropout_add,
    ]


def seconds(kernels: list[Kernel]) -> float:
    total = 0.0
    for kind, inputs, outputs in kernels:
        names = tuple(f"x{i}" for i in range(len(inputs))), tuple(f"y{i}" for i in range(len(outputs)))
        op = Op(kind, kind, *names)
        arrays = [[np.array([shape], np.int64) for shape in shapes] for shapes in (inputs, outputs)]
        total += float(COST.op_seconds(op, arrays[0], arrays[1], dict.fromkeys((*names[0], *names[1]), 2.0))[0])
    return total


def test_forward_of_a_22b_layer_takes_the_measured_7_7_ms() -> None:
    """Korthikanti et al., table 4: 7.7 ms with tensor parallelism 8; two all-reduces of 100 MB are in it.

    No constant was fitted to it. 5 % is what costs of single kernels are good for (they err by 5 to 8 %).
    """
    total = seconds(layer(T)) + 2 * COST.collective_seconds("all_reduce", T * H * 2, TENSOR)

    assert total == pytest.approx(7.7e-3, rel=0.05)


def test_sequence_parallelism_lowers_it_to_the_measured_7_2_ms() -> None:
    """Same table: norms and dropouts on an eighth of the tokens, all-reduces split into scatters and gathers."""
    wire = COST.collective_seconds("all_gather", T * H * 2, TENSOR)
    wire += COST.collective_seconds("reduce_scatter", T * H * 2, TENSOR)

    total = seconds(layer(T // 8)) + 2 * wire

    assert total == pytest.approx(7.2e-3, rel=0.05)


def test_fused_attention_beats_the_unfused_kernels() -> None:
    """A causal fused kernel does half of the products and never writes the s x s scores."""
    unfused = seconds(layer(T)[2:6])
    op = Op("attention", "Attention", ("q", "k", "v"), ("y",), (("is_causal", 1),))
    block = np.array([(4, 8, S, D)], np.int64)

    fused = COST.op_seconds(op, [block] * 3, [block], dict.fromkeys("qkvy", 2.0))

    assert fused[0] < unfused / 2

"""Which ops are kernels of their own: chains of element-wise ops, biases, sums of gradients."""

import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.fusion import ALONE, OPTIMIZER, POINTWISE, Fused, fuse
from autopar.ir.graph import Op, Phase
from tests.formulations import COSTS, folded


def op(name: str, kind: str, inputs: str, phase: Phase = Phase.FORWARD, origin: str = "") -> Op:
    return Op(name, kind, tuple(inputs.split()), (name,), (), phase, 0, origin)


RANKS = dict.fromkeys(("x", "w", "y", "r", "a", "b", "c", "d", "e", "n", "g"), 2) | {"bias": 1}


def test_a_bias_is_added_by_the_product_before_it() -> None:
    """In every stack; what follows reads the product's result."""
    ops = [op("a", "MatMul", "x w"), op("b", "Add", "a bias"), op("c", "Relu", "b")]

    for fusion in ("chains", "none"):
        assert fuse(ops, RANKS, fusion) == {"b": Fused(frozenset({0, 1}), frozenset({0}), "a")}


def test_a_chain_reads_what_enters_and_writes_what_leaves() -> None:
    """Of gelu(x) * r + r: one launch, x and r read once, y written once."""
    ops = [op("a", "Gelu", "x"), op("b", "Mul", "a r"), op("c", "Add", "b r"), op("d", "MatMul", "c w")]

    found = fuse(ops, RANKS, "chains")

    assert found == {
        "a": Fused(frozenset(), frozenset({0})),
        "b": Fused(frozenset({0}), frozenset({0}), "a"),
        "c": Fused(frozenset({0, 1}), frozenset(), "a"),
    }
    assert fuse(ops, RANKS, "none") == {}


def test_a_chain_ends_where_others_read_from_it() -> None:
    """A residual that a norm has read already is read again by the addition behind the product."""
    ops = [
        op("a", "Add", "x r"),
        op("n", "LayerNormalization", "a"),
        op("b", "MatMul", "n w"),
        op("c", "Mul", "b y"),
        op("d", "Add", "a c"),
    ]

    found = fuse(ops, RANKS, "chains")

    assert found.get("a", ALONE) == ALONE
    assert found["c"] == Fused(frozenset(), frozenset({0}))
    assert found["d"] == Fused(frozenset({1}), frozenset(), "c")


def test_a_chain_waits_for_a_product_whose_result_it_needs() -> None:
    """SwiGLU: swish(x w) * (x v) is one kernel although the second product comes between."""
    ops = [op("a", "MatMul", "x w"), op("b", "Swish", "a"), op("c", "MatMul", "x y"), op("d", "Mul", "b c")]

    found = fuse(ops, RANKS, "chains")

    assert found["b"] == Fused(frozenset(), frozenset({0}))
    assert found["d"] == Fused(frozenset({0}), frozenset(), "b")


def test_views_do_not_end_a_chain() -> None:
    ops = [op("a", "Relu", "x"), op("b", "Reshape", "a s"), op("c", "Neg", "b")]

    found = fuse(ops, RANKS, "chains")

    assert found["a"].unwritten == {0}
    assert found["c"] == Fused(frozenset({0}), frozenset(), "a")


def test_sums_of_gradients_are_made_by_the_product() -> None:
    """Where the stack fuses; a bias gradient, which no product makes, is added by a kernel of its own."""
    ops = [
        op("g", "Einsum", "x y", Phase.BACKWARD, "f"),
        op("w.grad.sum", "Add", "w.grad g", Phase.BACKWARD, "w"),
        op("c", "ReduceSum", "y", Phase.BACKWARD, "f"),
        op("bias.grad.sum", "Add", "bias.grad c", Phase.BACKWARD, "bias"),
    ]

    assert fuse(ops, RANKS, "chains") == {"w.grad.sum": Fused(frozenset({0, 1}), frozenset({0}), "g")}
    assert fuse(ops, RANKS, "none") == {}


def test_optimizers_launch_nothing_of_their_own() -> None:
    assert fuse([op("a", "autopar::Adam", "x", Phase.UPDATE)], RANKS, "none") == {"a": Fused(kernel=OPTIMIZER)}


@st.composite
def blocks(draw: st.DrawFn) -> list[Op]:
    """A block of element-wise ops, norms and products in any order."""
    names = ["x", "w"]
    ops = []
    for index in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["Add", "Mul", "Relu", "LayerNormalization", "MatMul"]))
        count = 2 if kind in ("Add", "Mul", "MatMul") else 1
        inputs = " ".join(draw(st.sampled_from(names)) for _ in range(count))
        ops.append(op(f"v{index}", kind, inputs))
        names.append(f"v{index}")
    return ops


@given(ops=blocks())
def test_kernels_can_run_one_after_the_other(ops: list[Op]) -> None:
    """Chains are kernels: whatever is read from memory was written before, by a kernel that could run earlier.

    A value that is not written is read by its chain alone. Contracting chains leaves a graph without cycles.
    """
    found = fuse(ops, dict.fromkeys(("x", "w", *(item.name for item in ops)), 2), "chains")

    made = {item.name for item in ops}
    kernel = {item.name: found.get(item.name, ALONE).kernel or item.name for item in ops}
    assert all(item.kind in POINTWISE for item in ops if item.name in found)
    for item in ops:
        for index, name in enumerate(item.inputs):
            part = found.get(item.name, ALONE)
            if name in found and found[name].unwritten:
                assert index in part.unread
                assert kernel[name] == kernel[item.name]
            elif index in part.unread and kernel.get(name) != kernel[item.name]:
                # read once for the whole chain, by another of its ops or at another place of this one
                chain = [other for other in ops if kernel[other.name] == kernel[item.name]]
                assert any(
                    name == source and i not in found.get(other.name, ALONE).unread
                    for other in chain
                    for i, source in enumerate(other.inputs)
                )
    edges = {
        (kernel[name], kernel[item.name])
        for item in ops
        for name in item.inputs
        if name in made and kernel[name] != kernel[item.name]
    }
    remaining = set(kernel.values())
    while remaining:
        free = {node for node in remaining if not any(b == node and a in remaining for a, b in edges)}
        assert free, "chains wait for each other"
        remaining -= free


def parts(ops: Sequence[Op], fused: Mapping[str, Fused]) -> list[tuple[frozenset[int], frozenset[int], bool]]:
    """Return what is left to each op, without the names of kernels."""
    found = [fused.get(op.name, ALONE) for op in ops]
    return [(part.unread, part.unwritten, part.launches) for part in found]


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_every_instance_of_a_block_is_fused_alike(name: str) -> None:
    """What the planner fuses in a representative block is what every block of its kind would fuse."""
    found = folded(name)
    ranks = {value.name: len(value.shape) for value in found.graph.values.values()}
    per_kind = {kind.id: parts(kind.ops, COSTS.fuse(kind.ops, ranks)) for kind in found.kinds}

    for block, kind in enumerate(found.chain):
        ops = [op for op in found.graph.ops if op.block == block]
        assert parts(ops, COSTS.fuse(ops, ranks)) == per_kind[kind]


def test_a_long_chain_is_one_kernel_and_takes_no_longer_than_many() -> None:
    """Each op is taken into the chain before it: 20,000 of them would be copied 2e8 times if all were each time."""
    count = 20_000
    ops = [Op(f"n{number}", "Relu", (f"v{number}",), (f"v{number + 1}",)) for number in range(count)]
    began = time.process_time()

    found = fuse(ops, {f"v{number}": 2 for number in range(count + 1)}, "chains")

    assert {found[op.name].kernel for op in ops[1:]} == {"n0"}
    assert time.process_time() - began < 10.0

"""Fused groups of ops: as records, timed, and priced by what was learned of timed ones."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import IDEAL, CostModel, Kernel, load_policy
from autopar.cost.fused_groups import FusedGroup, GroupOp, GroupTensor, Made, Read, group_of
from autopar.cost.fusion import Work
from autopar.cost.learned_kernels import (
    KNOTS,
    NUM_FEATURES,
    LearnedKernels,
    Provenance,
    Range,
    curve,
    encode,
    shipped_weights,
)
from autopar.errors import ClusterError
from autopar.ir.graph import Op, Phase
from autopar.profile.fused_draw import draw_groups, resized
from autopar.profile.fused_timing import arrays_for, load_timed, model_of, time_with_ort

_X = (4, 8)


def _op(name: str, kind: str, inputs: str) -> Op:
    return Op(name, kind, tuple(inputs.split()), (name,), (), Phase.FORWARD, 0)


_OPS = (_op("a", "Gelu", "x"), _op("m", "MatMul", "a w"), _op("b", "Mul", "a y"), _op("c", "Add", "b bias"))
_TYPED = {
    **dict.fromkeys(("x", "a", "y", "b", "c"), GroupTensor(_X, "float32")),
    "bias": GroupTensor((8,), "float32"),
    "w": GroupTensor((8, 8), "float32"),
    "m": GroupTensor(_X, "float32"),
}


def _work(ops: Sequence[Op] = _OPS) -> Work:
    return Work.of(ops, {name: len(own.shape) for name, own in _TYPED.items()}, "chains")


def _group(*kinds: str, samples: int = 4) -> FusedGroup:
    """Return a chain of ops of one input each, the last one written."""
    shape = (samples, 8)
    ops = tuple(
        GroupOp(kind, (), (Read(number, shape),), (Made(shape, "float32", number == len(kinds) - 1),))
        for number, kind in enumerate(kinds)
    )
    return FusedGroup((GroupTensor(shape, "float32"),), ops)


def test_a_group_reads_what_enters_it_and_writes_what_others_read() -> None:
    """A is read by the product, too, so it is written; b is not; the bytes are those of x, y, bias, a and c."""
    group = group_of(Kernel(("a", "b", "c")), _work(), _TYPED)

    assert group is not None
    assert [own.shape for own in group.inputs] == [_X, _X, (8,)]
    assert [own.made[0].written for own in group.ops] == [True, False, True]
    assert (group.read_bytes, group.written_bytes) == (4 * (32 + 32 + 8), 4 * (32 + 32))


def test_an_op_that_runs_again_is_not_written() -> None:
    group = group_of(Kernel(("b", "c"), ("a",)), _work(), _TYPED)

    assert group is not None
    assert [(own.kind, own.made[0].written) for own in group.ops] == [("Gelu", False), ("Mul", False), ("Add", True)]


def test_a_value_that_leaves_the_segment_is_written() -> None:
    group = group_of(Kernel(("b", "c")), _work(), _TYPED, frozenset({"b"}))

    assert group is not None
    assert [own.made[0].written for own in group.ops] == [True, True]


def _kernels(**weights: float) -> LearnedKernels:
    """Return kernels that take what a rate per element, a call and a tensor take, without a network."""
    blank = {"kinds": np.zeros((2, 1)), "features": np.zeros((NUM_FEATURES, 1)), "out": np.zeros(1)}
    rates = np.log([weights["gelu"], weights["add"]])
    call = np.log([weights["call"], weights["tensor"]])
    blank |= {"curve": np.zeros((2, len(KNOTS))), "nodes": np.full(2, np.log(11.0))}
    arrays = {name: np.asarray(own, np.float32) for name, own in {**blank, "rates": rates, "call": call}.items()}
    made = Provenance("my processor", "onnxruntime", "1", 1, 1, 1, 0.0, 0.0, 0.0, "")
    return LearnedKernels(made, Range(("Gelu", "Relu"), 16, 64, 2), arrays)


def test_a_kernel_takes_the_sum_of_its_ops() -> None:
    """32 elements at 3 and 2 seconds each, 11 for each op, 5 for the call, 7 for each of the two tensors."""
    kernels = _kernels(gelu=3.0, add=2.0, call=5.0, tensor=7.0)

    (seconds,) = kernels.seconds([_group("Gelu", "Relu")])

    assert seconds == pytest.approx(32 * 3 + 32 * 2 + 2 * 11 + 5 + 2 * 7, rel=1e-5)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (_group("Gelu", "Tanh"), "op Tanh, of which no kernel was timed"),
        (_group("Gelu", samples=9), "72 elements, trained on 16 to 64"),
        (_group("Gelu", "Relu", "Gelu"), "3 ops, trained on 2 at most"),
    ],
)
def test_outside_its_range_a_learned_cost_says_nothing(group: FusedGroup, reason: str) -> None:
    kernels = _kernels(gelu=3.0, add=2.0, call=5.0, tensor=7.0)

    assert kernels.seconds([group, _group("Gelu")])[0] is None
    assert kernels.told() == (
        f"1 kernels by what was learned of onnxruntime on my processor, 1 by the formula (as {reason})"
    )


@pytest.mark.parametrize("name", shipped_weights())
def test_shipped_weights_are_of_measured_groups(name: str) -> None:
    """They say where they come from; alone and in a batch a group takes equally long, longer with more elements."""
    kernels = LearnedKernels.load(name)
    small, large = (_group("Gelu", "Relu", "Tanh", samples=size) for size in (1 << 12, 1 << 15))

    together = kernels.predict([small, large, small])

    assert kernels.provenance.held_out > 100
    assert 0 < kernels.provenance.median_error < 0.5
    assert not kernels.range.fault(small)
    np.testing.assert_allclose(together[[0, 2]], kernels.predict([small])[0], rtol=1e-5)
    assert together[0] < together[1]


@pytest.mark.parametrize("name", shipped_weights())
def test_weights_come_with_the_groups_they_were_trained_on(name: str) -> None:
    """The timed groups are those of the provenance, and the weights tell most of them as well as it says."""
    kernels = LearnedKernels.load(name)
    file = files("autopar.cost") / "fused_kernels" / f"{name}.jsonl.gz"
    timed = load_timed(Path(str(file)))

    predicted = kernels.predict([own.group for own in timed])

    made = kernels.provenance
    assert {(own.machine, own.runtime, own.version) for own in timed} == {(made.machine, made.runtime, made.version)}
    assert len(timed) == made.groups
    assert len({own.group.structure for own in timed}) == made.structures
    off = np.abs(predicted / [own.seconds for own in timed] - 1)
    assert np.median(off) <= made.median_error
    assert len(Path(str(file)).read_bytes()) < 1 << 20


def test_drawn_groups_are_single_ops_and_many() -> None:
    """What an op takes by itself is timed, too; no structure comes twice."""
    groups = list(draw_groups(("vit-b16",), 25, 1))

    counts = [len(group.ops) for group in groups]
    assert min(counts) == 1
    assert max(counts) > 4
    assert len({group.structure for group in groups}) == len(groups) == 25


def test_weights_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ClusterError, match="nowhere has no weights of fused kernels") as caught:
        LearnedKernels.load("nowhere")

    assert "docs/benchmarks/fused_kernels.py" in caught.value.hint


def test_learned_costs_count_on_their_processor_in_their_numbers_only() -> None:
    kernels = _kernels(gelu=3.0, add=2.0, call=5.0, tensor=7.0)
    cluster, policy = load_cluster("v100"), load_policy("fp32")
    own = replace(cluster, device=replace(cluster.device, name="my processor"))

    found = [
        CostModel(machine, numbers, IDEAL, kernels=kernels).learned
        for machine, numbers in ((own, policy), (cluster, policy), (own, load_policy("mixed")))
    ]

    assert found == [kernels, None, None]


def test_edges_go_from_producers_to_readers() -> None:
    batch = encode([_group("Gelu", "Relu"), _group("Relu")], {"Gelu": 0, "Relu": 1})

    assert batch.kinds.tolist() == [0, 1, 1]
    assert list(zip(batch.sources.tolist(), batch.targets.tolist(), strict=True)) == [(0, 1)]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.inputs.tolist() == [2.0, 2.0]


def test_a_group_is_encoded_alike_alone_and_in_a_batch() -> None:
    """Of b = a y, c = b + bias with (4, 8) and (8,): what enters, what repeats by row, and what stays inside."""
    whole = group_of(Kernel(("b", "c")), _work(), _TYPED)
    assert whole is not None
    groups = [_group("Gelu", "Relu"), whole, _group("Relu")]
    kinds = {"Gelu": 0, "Relu": 1, "Mul": 2, "Add": 3}

    together, alone = encode(groups, kinds), [encode([own], kinds) for own in groups]

    np.testing.assert_array_equal(together.features, np.concatenate([own.features for own in alone]))
    np.testing.assert_array_equal(together.inputs, np.concatenate([own.inputs for own in alone]))
    (product, total), traffic = alone[1].features, 4 * (32 + 32 + 8 + 32)
    size, width, rest = np.log2(32) / 10 - 1.8, np.log2(8) / 10 - 0.8, np.log2(1 + traffic) / 10 - 2
    head = [size, width, size, 1, rest]
    np.testing.assert_allclose(product, [2, 0, 0, 1, 0, *head, 10 / 32, 0, 0, 0, 0, 1, 0, 0, 0.2], rtol=1e-6)
    np.testing.assert_allclose(total, [0, 1, 0.25, 1, 1, *head, 1, 1, 1, 1, 0, 1, 0, 0, 0.2], rtol=1e-6)


def test_a_timed_group_is_read_as_it_was_written(tmp_path: Path) -> None:
    """From lines of JSON, and from compressed ones; the shortest call of all rounds counts."""
    group = group_of(Kernel(("a", "b", "c")), _work(), _TYPED)
    assert group is not None

    (before,), (timed,) = time_with_ort([group], 1e-4, "my processor", rounds=3)

    line = msgspec.json.encode(timed) + b"\n"
    for name, data in (("plain.jsonl", line), ("small.jsonl.gz", gzip.compress(line))):
        (tmp_path / name).write_bytes(data)
        assert load_timed(tmp_path / name) == [timed]
    assert 0 < timed.seconds == min(timed.first, timed.second)
    assert timed.seconds <= before.seconds
    assert (before.rounds, timed.rounds) == (2, 3)
    assert timed.group == group


def test_a_group_as_a_model_computes_what_its_ops_do() -> None:
    import onnxruntime

    group = group_of(Kernel(("b", "c")), _work(), _TYPED, frozenset({"b"}))
    assert group is not None
    fed = arrays_for(group)

    session = onnxruntime.InferenceSession(model_of(group), providers=["CPUExecutionProvider"])
    product, total = session.run(None, dict(zip((item.name for item in session.get_inputs()), fed, strict=True)))

    np.testing.assert_allclose(product, fed[0] * fed[1], rtol=1e-6)
    np.testing.assert_allclose(total, fed[0] * fed[1] + fed[2], rtol=1e-6)


def test_other_sizes_keep_the_structure() -> None:
    group = _group("Gelu", "Relu", samples=3)

    larger = resized(group, 800)

    assert larger is not None
    assert larger.structure == group.structure
    assert larger.elements == 800


@pytest.mark.slow
def test_torch_computes_what_onnx_runtime_does() -> None:
    """Drawn groups of the zoo: functions of torch and models of ONNX Runtime return equal numbers."""
    torch = pytest.importorskip("torch")
    import onnxruntime

    from autopar.profile.fused_torch import function_of

    for group in draw_groups(("gpt2", "resnet50", "llama2-7b"), 40, 5):
        small = resized(group, 1 << 13) or group
        fed = arrays_for(small)
        session = onnxruntime.InferenceSession(model_of(small), providers=["CPUExecutionProvider"])
        names = [f"i{number}" for number, own in enumerate(small.inputs) if own.data is None]
        taken = {item.name for item in session.get_inputs()}
        given = {name: array for name, array in zip(names, fed, strict=True) if name in taken}

        results = function_of(small)(*map(torch.from_numpy, fed))

        for own, other in zip(results, session.run(None, given), strict=True):
            np.testing.assert_allclose(own.numpy(), other, rtol=2e-3, atol=2e-4, equal_nan=True)


def test_rates_are_interpolated_between_knots() -> None:
    """Hat functions add up to one: at 2^15 elements half of each neighbour, beyond the ends those alone."""
    found = curve(np.log(np.array([2.0**15, 2.0**3, 2.0**30], np.float32)))

    np.testing.assert_allclose(found[0], [0, 0.5, 0.5, 0, 0, 0], atol=1e-5)
    np.testing.assert_allclose(found[1:], np.eye(6)[[0, 5]], atol=1e-5)

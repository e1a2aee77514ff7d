"""Blocks found by structure."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import models
from autopar.errors import GraphError
from autopar.ir.blocks import block_kinds, find_blocks, instance_ops
from autopar.ir.graph import Graph, Op, Phase
from autopar.ir.text import parse_graph
from autopar.ir.verify import verify
from autopar.onnx import load

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def _zoo(name: str, **overrides: int) -> Graph:
    return load(models.build(name, **overrides), batch=2)


def _pattern(kinds: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return runs of equal kinds as (kind, length)."""
    runs: list[tuple[int, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return runs


@pytest.mark.parametrize(
    ("name", "num_layers"), [("gpt2", 12), ("gpt3-175b", 96), ("llama3-8b", 32), ("bert-base", 12), ("vit-b16", 12)]
)
def test_transformers_are_embedding_layers_head(name: str, num_layers: int) -> None:
    """L layers give an embedding block, L equal blocks and a head block."""
    graph = find_blocks(_zoo(name))

    assert _pattern(block_kinds(graph)) == [(0, 1), (1, num_layers), (2, 1)]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        # Three layers with a scan and one with attention, twelve times.
        ("qwen3-next-80b-a3b", [1, *[3, 1] * 12, 1]),
        # Five layers with a window and one without, ten times, and two with.
        ("gemma3-27b", [1, *[5, 1] * 10, 2, 1]),
        ("bamba-9b", [1, 9, 1, 8, 1, 8, 1, 4, 1]),
    ],
)
def test_repeated_groups_of_layers_are_divided_into_layers(name: str, runs: list[int]) -> None:
    """A block is one layer where most layers of a group are equal; equal layers are of one kind everywhere."""
    kinds = block_kinds(find_blocks(_zoo(name)))

    assert [length for _, length in _pattern(kinds)] == runs
    assert len(set(kinds)) == 4


def test_layers_exchange_one_value() -> None:
    """Cuts cross the residual stream only: each block of GPT-2 reads one value of another block."""
    graph = find_blocks(_zoo("gpt2"))
    block_of = {name: op.block for op in graph.ops for name in op.outputs}

    for ops in instance_ops(graph)[1:]:
        arrivals = {name for op in ops for name in op.inputs if block_of.get(name, op.block) != op.block}
        assert len(arrivals) == 1


def test_two_layers_are_enough() -> None:
    graph = find_blocks(_zoo("gpt2", num_layers=2))

    assert _pattern(block_kinds(graph)) == [(0, 1), (1, 2), (2, 1)]


def test_layers_without_embedding_and_head_are_found() -> None:
    """Of n equal layers, the first reads data and the last gives the result: three kinds."""
    lines = ["graph mlp opset=24", "input %h0: float32[8,16]"]
    lines += [f"state %w{index}: float32[16,16] parameter" for index in range(5)]
    for index in range(5):
        lines += [
            f"%m{index}: float32[8,16] = MatMul(%h{index}, %w{index})",
            f"%h{index + 1}: float32[8,16] = Relu(%m{index})",
        ]
    graph = find_blocks(parse_graph("\n".join([*lines, "output %h5"])))

    assert [[op.kind for op in ops] for ops in instance_ops(graph)] == [["MatMul", "Relu"]] * 5
    assert block_kinds(graph) == (0, 1, 1, 1, 2)


def test_resnet_has_a_block_per_bottleneck() -> None:
    """ResNet-50: stem, stages of 3, 4, 6 and 3 bottlenecks whose first one differs, head."""
    graph = find_blocks(_zoo("resnet50"))

    runs = [length for _, length in _pattern(block_kinds(graph))]
    assert runs == [1, 1, 2, 1, 3, 1, 5, 1, 2, 1]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("resnet50", [1, 1, 2, 1, 3, 1, 5, 1, 2, 1]),
        # Units of stages with 4, 8 and 4, the first of each with a stride.
        ("shufflenet", [1, 1, 3, 1, 7, 1, 3, 1]),
    ],
)
def test_shipped_networks_repeat_as_published(name: str, runs: list[int]) -> None:
    graph = find_blocks(load(LIGHT / f"light_{name}.onnx"))

    assert [length for _, length in _pattern(block_kinds(graph))] == runs


@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_networks_without_repeats_are_cut_into_pieces(path: Path) -> None:
    """All nine shipped networks become chains of 6 to 64 blocks."""
    graph = find_blocks(load(path))

    verify(graph)
    assert 6 <= graph.num_blocks <= 64
    assert all(instance_ops(graph))


def test_masks_shared_by_all_layers_belong_to_the_first_block() -> None:
    """What needs no trained tensor comes first, wherever the file has it."""
    graph = find_blocks(_zoo("llama3-8b", num_layers=3))

    first = instance_ops(graph)[0]
    assert {"Expand", "Gather"} <= {op.kind for op in first}
    assert len(instance_ops(graph)[1]) == len(instance_ops(graph)[2])


def _shuffled(graph: Graph, seed: int) -> Graph:
    """Return the graph with its ops in a random topological order."""
    rng = random.Random(seed)
    producers = graph.producers()
    waiting = {op.name: {producers[name].name for name in op.inputs if name in producers} for op in graph.ops}
    by_name = {op.name: op for op in graph.ops}
    ops: list[Op] = []
    while waiting:
        name = rng.choice([name for name, sources in waiting.items() if not sources])
        del waiting[name]
        for sources in waiting.values():
            sources.discard(name)
        ops.append(by_name[name])
    return replace(graph, ops=tuple(ops))


SMALL = _zoo("gpt2", num_layers=4, hidden=16, heads=2, seq=8, vocab=32)


@given(seed=st.integers(0, 10**6))
def test_blocks_do_not_depend_on_the_order_of_ops(seed: int) -> None:
    """Any topological order of the same graph gives the same blocks."""
    expected = {op.name: op.block for op in find_blocks(SMALL).ops}

    found = find_blocks(_shuffled(SMALL, seed))

    verify(found)
    assert {op.name: op.block for op in found.ops} == expected


def test_equal_kinds_correspond_position_by_position() -> None:
    """The j-th op of one instance is of the kind and types of the j-th op of any other."""
    graph = find_blocks(SMALL)
    kinds = block_kinds(graph)
    shapes: dict[int, list[object]] = {}

    for kind, ops in zip(kinds, instance_ops(graph), strict=True):
        lines: list[object] = [(op.kind, op.attrs, [graph.values[name].shape for name in op.outputs]) for op in ops]
        assert shapes.setdefault(kind, lines) == lines


def test_a_layer_of_another_size_is_of_another_kind() -> None:
    """One layer with its own constant interrupts the chain of equal blocks."""
    graph = find_blocks(SMALL)
    ops = tuple(
        replace(op, attrs=(("approximate", "none"),)) if op.kind == "Gelu" and op.block == 2 else op for op in graph.ops
    )

    assert block_kinds(replace(graph, ops=ops)) == (0, 1, 2, 1, 1, 3)


def test_shared_weights_make_the_first_user_differ() -> None:
    """With one weight for all layers, one block owns it and the others borrow it."""
    lines = ["graph albert opset=24", "input %x: float32[8,16]", "state %e: float32[16,16] parameter"]
    lines += [
        "state %w: float32[16,16] parameter",
        "%h0: float32[8,16] = MatMul(%x, %e)",
    ]
    lines.append("%a0: float32[8,16] = Sigmoid(%h0)")
    for index in range(4):
        lines += [
            f"%m{index}: float32[8,16] = MatMul(%a{index}, %w)",
            f"%a{index + 1}: float32[8,16] = Relu(%m{index})",
        ]
    graph = find_blocks(parse_graph("\n".join([*lines, "%y: float32[8,16] = Softmax(%a4)", "output %y"])))

    assert _pattern(block_kinds(graph)) == [(0, 1), (1, 1), (2, 3), (3, 1)]


def test_a_bias_computed_in_the_first_layer_for_all_is_moved_up() -> None:
    """T5's first layer looks up the position bias that all layers add; the layers are equal all the same."""
    lines = ["graph t5 opset=24", "input %ids: int64[8]", "const %pos: int64[8] = [0, 1, 2, 3, 4, 5, 6, 7]"]
    lines += ["state %e: float32[32,64] parameter", "state %b: float32[8,64] parameter"]
    lines += [f"state %w{index}: float32[64,64] parameter" for index in range(4)]
    lines += ["%h0: float32[8,64] = Gather(%e, %ids)"]
    for index in range(4):
        lines += [f"%q{index}: float32[8,64] = MatMul(%h{index}, %w{index})"]
        lines += ["%bias: float32[8,64] = Gather(%b, %pos)"] if index == 0 else []
        lines += [
            f"%s{index}: float32[8,64] = Add(%q{index}, %bias)",
            f"%p{index}: float32[8,64] = Softmax(%s{index})",
            f"%h{index + 1}: float32[8,64] = Add(%h{index}, %p{index})",
        ]
    graph = find_blocks(parse_graph("\n".join([*lines, "output %h4"])))

    assert [len(ops) for ops in instance_ops(graph)] == [2, 4, 4, 4, 4]
    assert block_kinds(graph) == (0, 1, 1, 1, 2)


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_encoder_decoders_are_two_chains_of_equal_layers(kind: str) -> None:
    """What an encoder makes is read by all layers of the decoder, as are biases of its own, which come after it."""
    sizes = {"num_layers": 5, "num_decoder_layers": 3, "encoder_layers": 5, "decoder_layers": 3}
    native = models.read_architecture({"model_type": kind, **sizes}, 16)
    assert not isinstance(native, models.Unbuilt)
    graph = find_blocks(load(models.build_architecture(kind, native), batch=2))
    front = [(0, 1), (1, 1)] if kind == "whisper" else [(0, 1)]  # the two convolutions
    first = len(front)

    assert _pattern(block_kinds(graph)) == [*front, (first, 5), (first + 1, 1), (first + 2, 3), (first + 3, 1)]


def test_a_training_step_is_refused() -> None:
    graph = replace(SMALL, ops=(*SMALL.ops[:-1], replace(SMALL.ops[-1], phase=Phase.BACKWARD)))

    with pytest.raises(GraphError, match="training step"):
        find_blocks(graph)


def test_instances_need_blocks() -> None:
    with pytest.raises(GraphError, match="belongs to no block"):
        instance_ops(SMALL)


def test_every_op_is_kept_once() -> None:
    """Finding blocks reorders ops and changes nothing else."""
    found = find_blocks(SMALL)

    assert Counter(replace(op, block=-1) for op in found.ops) == Counter(SMALL.ops)

"""Values that blocks further on read are handed from block to block: computed alike, and sent between stages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar import models
from autopar.degrees import Degrees
from autopar.execute import run_graph
from autopar.folding.block_interface import hand_overs
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Phase
from autopar.ir.relays import with_relays
from autopar.onnx import load
from autopar.program.records import SegmentPhase
from autopar.training import training_step
from autopar.workload import open_workload
from tests.executions import TINY
from tests.gradients import as_float64, feeds_of, gradients

T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 4, "num_heads": 4,
}  # fmt: skip


def forward(name: str) -> Graph:
    """Return a small model with blocks."""
    if name != "t5":
        return find_blocks(load(models.build(name, **TINY[name]), batch=4))
    native = models.read_architecture(T5, 8)
    assert not isinstance(native, models.Unbuilt)
    return find_blocks(load(models.build_architecture(name, native), batch=4))


@pytest.mark.parametrize("name", ["t5", "unet-sd1"])
def test_relays_change_no_number(name: str) -> None:
    """Output and gradients of an encoder-decoder and of a net with skip connections."""
    graph = as_float64(forward(name))
    plain, relayed = (training_step(each, loss="mse", optimizer="sgd") for each in (graph, with_relays(graph)))
    rng = np.random.default_rng(0)
    whole = {
        key: rng.integers(0, 48, graph.values[key].shape) for key in graph.inputs if not graph.values[key].is_float
    }
    feeds = feeds_of(plain, whole)

    expected, found = gradients(plain, feeds), gradients(relayed, feeds)

    assert run_graph(plain, feeds)[plain.outputs[0]] == run_graph(relayed, feeds)[relayed.outputs[0]]
    assert set(found) == set(expected)
    for key, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[key], rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", ["t5", "unet-sd1"])
def test_every_activation_comes_from_the_block_before(name: str) -> None:
    """In the forward pass, and back from the block behind: none is read by name alone."""
    graph = with_relays(forward(name))
    made = {value: op.block for op in graph.ops if op.phase is Phase.FORWARD for value in op.outputs}
    data = set(graph.inputs)
    for op in graph.ops:
        data |= set(op.outputs) if not data.isdisjoint(op.inputs) else set()

    for op in graph.ops:
        for value in set(op.inputs) & data & set(made):
            assert op.block - made[value] in (0, 1), f"{op.name} reads {value}"


def test_models_without_such_values_stay_as_they_are() -> None:
    """Masks, tables of angles and tied weights are made by every stage for itself."""
    graph = forward("llama3-8b")

    assert with_relays(graph) is graph


def test_what_the_encoder_makes_is_handed_through_the_decoder(tmp_path: Path) -> None:
    """Blocks: embedding, 4 of the encoder, its norm with the decoder's embedding, 4 of the decoder, head.

    Between two blocks of the decoder go two values of 4 x 8 x 16 elements, ahead and back; between two of the encoder
    one.
    """
    (tmp_path / "config.json").write_text(json.dumps(T5))
    folded = open_workload(f"hf:{tmp_path}", dims={"seq": 8}).folded(4)
    sides = hand_overs(folded)

    def sent(block: int) -> tuple[int, int]:
        here = sides[folded.chain[block]]
        return len(here.forward_out), len(here.backward_in)

    assert [sent(block) for block in range(10)] == [(1, 1)] * 5 + [(2, 2)] * 4 + [(1, 1)]
    shapes = {folded.graph.values[name].shape for side in sides.values() for name in side.forward_out}
    assert shapes == {(4, 8, 16)}


def test_stages_of_the_decoder_receive_both_values(tmp_path: Path, cache_dir: Path) -> None:
    """Stages of the blocks 0-1, 2-4, 5-7 and 8-10 send 4 x 8 x 16 elements of 2 bytes, or twice as many."""
    (tmp_path / "config.json").write_text(json.dumps(T5))
    degrees = Degrees(pp=4, microbatch=4, global_batch=8)

    program = autopar.predict(f"hf:{tmp_path}", degrees, dims={"seq": 8}, cache_dir=cache_dir).program

    table = program.table()
    ends = [(stage.blocks[0], stage.blocks[-1]) for stage in program.stages]
    ahead = [sum(value.bytes for value in table[last, SegmentPhase.FORWARD].outputs) for _, last in ends[:-1]]
    back = [sum(value.bytes for value in table[first, SegmentPhase.BACKWARD].outputs) for first, _ in ends[1:]]
    assert [len(stage.blocks) for stage in program.stages] == [2, 3, 3, 3]
    assert ahead == back == [1024, 1024, 2048]


def test_a_deep_encoder_decoder_is_made_at_any_size(tmp_path: Path) -> None:
    """One block sums up the gradients of biases of all layers, so that an excerpt with fewer layers tells nothing."""
    (tmp_path / "config.json").write_text(json.dumps({**T5, "num_layers": 12}))
    workload = open_workload(f"hf:{tmp_path}", dims={"seq": 8})

    for samples in (4, 8):
        graph = workload.folded(samples).graph
        assert graph.values["logits"].shape == (samples, 8, 48)

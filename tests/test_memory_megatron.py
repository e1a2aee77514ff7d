"""Predicted memory against Megatron-LM's own formula (megatron/training/theoretical_memory_usage.py), term by term.

With L layers, width h, ffn f, a heads of which k for keys, V tokens in the vocabulary, s positions, b samples, degrees
t, p and d, and v stages per device, of the first stage:

    parameters      (L (2 h (1.5 f + 1) + 2 h^2 (1 + k / a)) / p + h V) / t       SwiGLU and RMSNorm, untied
    bytes of each   18, or 6 + 12 / d with the distributed optimizer
    activations     L / p layers x sbh (18 + 4 f / h) / t x in flight             selective recompute, sequence parallel
                    sbh (10 + 24 / t) per layer without sequence parallelism
    dropout         sbh / t x in flight                                           of the embedding
    in flight       min(microbatches, p); interleaved p (1 + (p - 1) / (p v))
    head            4 sb (h + V) / t                                              without a pipeline
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.cluster import load_cluster
from autopar.cost import Stack
from autopar.degrees import Degrees
from autopar.prediction import Prediction, Predictor
from autopar.program.records import Category
from autopar.schedule import Pass
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.memory import stage_memory
from autopar.workload import open_workload

A100 = load_cluster("a100")
MEGATRON = Stack("megatron", attention="unfused", loss="float32", dropout="layers", recompute_modules=("core_attn",))
SIZES = {"num_layers": 8, "hidden": 64, "heads": 4, "seq": 16, "vocab": 256, "tied": 0}
WIDTH, HEADS, SEQ, VOCAB = 64, 4, 16, 256
SAMPLES = 2
SBH = SEQ * SAMPLES * WIDTH
LLAMA = {"num_layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "seq": 16, "vocab": 64}


@cache
def predictor(name: str, cache_dir: Path) -> Predictor:
    """Return a model, opened once."""
    dims: dict[str, Any] = LLAMA if name == "llama3-8b" else SIZES
    return Predictor(open_workload(f"zoo:{name}", dims=dict(dims)), cache_dir)


def predicted(cache_dir: Path, *, name: str = "gpt2", stack: Stack = MEGATRON, **degrees: Any) -> Prediction:
    """Return a plan of microbatches of `SAMPLES`."""
    return predictor(name, cache_dir).predict(Degrees(microbatch=SAMPLES, **degrees), A100, stack)


def kept_bytes(found: Prediction) -> list[float]:
    """Return what the blocks of the first stage keep of a microbatch."""
    stage = found.program.stages[0]
    walk = BlockMemories(found.program.table(), True).walk(stage.blocks, stage.recompute)
    return [block.kept for block in walk]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_weights_and_optimizer(zero: int, tp: int, pp: int, cache_dir: Path) -> None:
    """The first stage has its share of the layers and the embedding; without a pipeline the head, too.

    Norms, which the formula divides by t, are whole on every device.
    """
    found = predicted(cache_dir, name="llama3-8b", dp=2, tp=tp, pp=pp, zero=zero, global_batch=4 * SAMPLES)

    matrices = 4 * (2 * 64 * 1.5 * 96 + 2 * 64**2 * (1 + 2 / 8)) / pp + 64 * 64 * (2 if pp == 1 else 1)
    norms = 4 * 2 * 64 / pp + (64 if pp == 1 else 0)
    each = 6 + 12 / 2 if zero else 18
    resident = {part.category: part.bytes for part in found.program.stages[0].resident}
    tables = resident.pop(Category.BUFFERS)  # of rotary embeddings, which the formula has not
    assert tables == 2 * 2 * 16 * 8 / 2
    assert sum(resident.values()) == pytest.approx(each * (matrices / tp + norms), rel=1e-9)


@pytest.mark.parametrize("tp", [1, 2])
def test_activations_of_a_layer(tp: int, cache_dir: Path) -> None:
    """34 sbh / t with selective recompute and sequence parallelism, sbh (10 + 24 / t) and scores without either.

    Of the 34, 2 are the result of attention, which runs again here with its scores.
    """
    sizes: dict[str, Any] = {"tp": tp, "global_batch": SAMPLES}
    parallel = predicted(cache_dir, **sizes, sequence_parallel=tp > 1, recompute="selective")
    plain = predicted(cache_dir, **sizes)

    assert kept_bytes(parallel)[2] == (18 + 4 * 4 - 2) * SBH / tp
    assert kept_bytes(plain)[2] == (10 + 24 / tp + 5 * HEADS * SEQ / WIDTH / tp) * SBH


def test_dropout_of_the_embedding(cache_dir: Path) -> None:
    """A byte per element of the sum of tokens and positions."""
    with_masks, without = (
        kept_bytes(predicted(cache_dir, stack=replace(MEGATRON, dropout=dropout), global_batch=SAMPLES))[0]
        for dropout in ("layers", "scores")
    )

    assert with_masks - without == SBH


@pytest.mark.parametrize(("interleave", "microbatches"), [(1, 8), (1, 2), (2, 8)])
def test_microbatches_in_flight(interleave: int, microbatches: int, cache_dir: Path) -> None:
    """min(m, p) of a whole stage, or p (1 + (p - 1) / (p v)) of them in chunks of 1 / v."""
    found = predicted(cache_dir, pp=4, interleave=interleave, global_batch=microbatches * SAMPLES)

    chunks = found.program.chunks[0]
    memories = BlockMemories(found.program.table(), True)
    stages = [found.program.stages[index] for index in chunks]
    left = [stage_memory(memories.walk(stage.blocks, stage.recompute), 0.0).left[Pass.FORWARD] for stage in stages]
    expected = min(microbatches, 4) if interleave == 1 else 4 * (1 + 3 / (4 * interleave))
    held = dict(found.timeline.stages[0].memory.breakdown)[Category.ACTIVATIONS]
    assert held == pytest.approx(expected * sum(left), rel=0.12)  # chunks are not quite alike: one has the embedding


def test_output_layer(cache_dir: Path) -> None:
    """Without a pipeline the inputs of norm and head, 4 sbh, and 4 bytes per logit.

    The last block also has the sum of the last layer, with its mask.
    """
    whole = kept_bytes(predicted(cache_dir, global_batch=SAMPLES))[-1]

    assert whole - SBH == pytest.approx(4 * SEQ * SAMPLES * (WIDTH + VOCAB), rel=0.01)

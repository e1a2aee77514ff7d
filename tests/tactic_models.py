"""Models whose collectives can be counted by hand, and drafts of them."""

from collections.abc import Sequence
from pathlib import Path

from autopar.cluster.presets import PRESETS
from autopar.cost import Collective, CostModel
from autopar.discover import discover
from autopar.formulate.recipes import batch_dims
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.plan import Job
from autopar.sharding import Mesh
from autopar.tactics import Tactic
from autopar.tactics.draft import Draft
from autopar.task import rules_for
from autopar.workload import Workload

COSTS = CostModel(PRESETS["a100"])


def decoder(num_layers: int, *, norm: str = "layer", hidden: int = 64, heads: int = 8, vocab: int = 128) -> Workload:
    """Return the training step of a decoder with 9 parameters a layer, 4 of them matrices, and a tied embedding.

    Args:
        num_layers: Layers.
        norm: "layer" for LayerNormalization, "rms" for RMSNorm written in element-wise ops and a mean.
        hidden: Width.
        heads: Attention heads.
        vocab: Rows of the embedding.
    """
    g = Builder(f"decoder{num_layers}")
    seq, size = 16, hidden // heads
    tokens = g.input("tokens", ("batch", seq), "int64")
    embedding = g.parameter("embed", (vocab, hidden))
    x = g.op("Gather", embedding, tokens, name="embedded", axis=0)
    for index in range(num_layers):
        name = f"layers.{index}"
        normed = _norm(g, x, f"{name}.norm1", hidden, norm)
        qkv = g.op("MatMul", normed, g.parameter(f"{name}.wqkv", (hidden, 3 * hidden)), name=f"{name}.qkv")
        if norm == "rms":
            qkv = g.op("Add", qkv, g.parameter(f"{name}.bqkv", (3 * hidden,)), name=f"{name}.qkv.biased")
        split = g.constant((hidden,) * 3)
        parts = g.ops("Split", qkv, split, names=[f"{name}.{part}" for part in "qkv"], axis=-1)
        q, k, v = (layers.split_heads(g, part, part, seq, heads, size) for part in parts)
        attended = g.op("Attention", q, k, v, name=f"{name}.attention", is_causal=1)
        merged = layers.merge_heads(g, attended, f"{name}.attention", seq, hidden)
        out = g.op("MatMul", merged, g.parameter(f"{name}.wo", (hidden, hidden)), name=f"{name}.out")
        if norm == "rms":
            out = g.op("Add", out, g.parameter(f"{name}.bo", (hidden,)), name=f"{name}.out.biased")
        x = g.op("Add", x, out, name=f"{name}.residual1")
        normed = _norm(g, x, f"{name}.norm2", hidden, norm)
        up = layers.linear(g, normed, f"{name}.w1", hidden, 4 * hidden)
        act = g.op("Gelu", up, name=f"{name}.act")
        down = g.op("MatMul", act, g.parameter(f"{name}.w2", (4 * hidden, hidden)), name=f"{name}.down")
        x = g.op("Add", x, down, name=f"{name}.residual2")
    layers.tied_head(g, x, embedding, "logits")
    return Workload(g.name, g.model({"logits": ("batch", seq, vocab)}), "train", {}, "auto", "adam")


def _norm(g: Builder, x: str, name: str, hidden: int, norm: str) -> str:
    if norm == "layer":
        return layers.layer_norm(g, x, name, hidden)
    square = g.op("Mul", x, x, name=f"{name}.square")
    mean = g.op("ReduceMean", square, g.constant((2,)), name=f"{name}.mean", keepdims=1)
    root = g.op("Sqrt", mean, name=f"{name}.root")
    return g.op("Mul", g.op("Div", x, root, name=f"{name}.normed"), g.parameter(f"{name}.weight", (hidden,)), name=name)


def chain() -> Workload:
    """Return two products: x [256, 8] with w1 [8, 16] and w2 [16, 8]."""
    g = Builder("chain")
    x = g.input("x", ("batch", 8))
    h = g.op("MatMul", x, g.parameter("w1", (8, 16)), name="h")
    g.op("MatMul", h, g.parameter("w2", (16, 8)), name="y")
    return Workload(g.name, g.model({"y": ("batch", 8)}), "infer", {}, "auto", "adam")


def draft(workload: Workload, mesh: Mesh, samples: int, cache_dir: Path) -> Draft:
    """Return a draft of a model for a number of samples in one microbatch."""
    folded = workload.folded(samples)
    rules = rules_for(folded, discover(workload.probe, cache_dir=cache_dir))
    job = Job(workload.mode, mesh.size, samples, 75e9, COSTS.cluster.to_dict())
    dims = batch_dims(folded.graph.values, workload.probe.values)
    return Draft(folded, rules, mesh, COSTS, model=workload.info(), job=job, batch=dims, num_microbatches=1)


def counts(found: Draft, schedule: Sequence[Tactic]) -> tuple[int, int, int, int]:
    """Apply a schedule and return its all-gathers, all-reduces, reduce-scatters and all-to-alls."""
    for tactic in schedule:
        found.apply(tactic)
    totals = dict.fromkeys(Collective, 0)
    for item in found.steps[-1].traffic:
        totals[item.collective] += item.count
    order = (Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
    gathers, reduces, scatters, exchanges = (totals[collective] for collective in order)
    return gathers, reduces, scatters, exchanges

"""Models whose collectives can be counted by hand, and drafts of them."""

from collections.abc import Sequence
from pathlib import Path

from autopar.cluster.presets import PRESETS
from autopar.cost import Collective, CostModel
from autopar.discover import discover
from autopar.formulate.manual_recipes import batch_dims
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


def decode_step(num_layers: int, *, hidden: int = 64, heads: int = 8, cached: int = 31) -> Workload:
    """Return one step of a decoding loop with multi-query attention: one token, one head of keys and values.

    What the steps before have left comes in as data `layers.I.keys`, `layers.I.values` [batch, cached, hidden / heads].
    """
    g = Builder(f"decode{num_layers}")
    size = hidden // heads
    x = g.input("x", ("batch", 1, hidden))
    for index in range(num_layers):
        name = f"layers.{index}"
        normed = layers.rms_norm(g, x, f"{name}.norm1", hidden)
        query = layers.linear(g, normed, f"{name}.wq", hidden, hidden, bias=False)
        q = g.op("Reshape", query, g.constant((0, heads, size)), name=f"{name}.q")  # one position: B, H, D
        states = []
        for part in ("keys", "values"):
            new = layers.linear(g, normed, f"{name}.new_{part}", hidden, size, bias=False)
            cache = g.input(f"{name}.{part}", ("batch", cached, size))
            states.append(g.op("Concat", cache, new, name=f"{name}.all_{part}", axis=1))
        keys = g.op("Transpose", states[0], name=f"{name}.columns", perm=(0, 2, 1))
        weights = g.op("Softmax", g.op("MatMul", q, keys, name=f"{name}.scores"), name=f"{name}.weights", axis=-1)
        attended = g.op("MatMul", weights, states[1], name=f"{name}.attended")
        merged = g.op("Reshape", attended, g.constant((0, 1, hidden)), name=f"{name}.merged")
        x = g.op("Add", x, layers.linear(g, merged, f"{name}.wo", hidden, hidden, bias=False), name=f"{name}.mid")
        normed = layers.rms_norm(g, x, f"{name}.norm2", hidden)
        down = layers.mlp(g, normed, f"{name}.mlp", hidden, 4 * hidden, approximate="none", bias=False)
        x = g.op("Add", x, down, name=f"{name}.end")
    return Workload(g.name, g.model({x: ("batch", 1, hidden)}), "infer", {}, "auto", "adam")


def unet(depth: int, channels: int = 8, size: int = 32) -> Workload:
    """Return the training step of a U-Net: per level two convolutions down, two up, and one that makes it larger.

    Levels are joined by concatenation; what is made larger is four times the channels, laid out as pixels.
    """
    g = Builder(f"unet{depth}")

    def conv(x: str, name: str, num_in: int, num_out: int, stride: int = 1) -> str:
        weight = g.parameter(f"{name}.weight", (num_out, num_in, 3, 3))
        pads = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (stride, stride)}
        return g.op("Relu", g.op("Conv", x, weight, g.parameter(f"{name}.bias", (num_out,)), name=name, **pads),
                    name=f"{name}.relu")  # fmt: skip

    x = conv(g.input("image", ("batch", 8, size, size)), "stem", 8, channels)
    skips, width = [], channels
    for level in range(depth):
        x = conv(x, f"down.{level}.same", width, width)
        skips.append((x, width, size))
        x = conv(x, f"down.{level}.half", width, 2 * width, stride=2)
        width, size = 2 * width, size // 2
    for level in reversed(range(depth)):
        skip, own, pixels = skips.pop()
        wide = conv(x, f"up.{level}.wide", width, 4 * own)
        parts = g.op("Reshape", wide, g.constant((0, own, 2, 2, size, size)), name=f"up.{level}.parts")
        laid = g.op("Transpose", parts, name=f"up.{level}.laid", perm=(0, 1, 4, 2, 5, 3))
        large = g.op("Reshape", laid, g.constant((0, own, pixels, pixels)), name=f"up.{level}.large")
        joined = g.op("Concat", large, skip, name=f"up.{level}.joined", axis=1)
        x, width, size = conv(joined, f"up.{level}.same", 2 * own, own), own, pixels
    return Workload(g.name, g.model({x: ("batch", width, size, size)}), "train", {}, "mse", "adam")


def graph_network(steps: int, nodes: int = 24, edges: int = 32, width: int = 16) -> Workload:
    """Return the training step of a graph network: edges learn from their ends, nodes from the sum of their edges.

    Who sends and who receives comes in as incidence matrices [batch, edges, nodes].
    """
    g = Builder(f"graph{steps}")
    x = g.input("nodes", ("batch", nodes, width))
    e = g.input("edges", ("batch", edges, width))
    senders, receivers = (g.input(name, ("batch", edges, nodes)) for name in ("senders", "receivers"))
    incoming = g.op("Transpose", receivers, name="incoming", perm=(0, 2, 1))
    for step in range(steps):
        name = f"steps.{step}"
        ends = [g.op("MatMul", end, x, name=f"{name}.{end}") for end in (senders, receivers)]
        told = g.op("Concat", e, *ends, name=f"{name}.told", axis=2)
        learnt = g.op("Relu", layers.linear(g, told, f"{name}.edge", 3 * width, width), name=f"{name}.learnt")
        e = g.op("Add", e, learnt, name=f"{name}.edges")
        heard = g.op("MatMul", incoming, e, name=f"{name}.heard")
        both = g.op("Concat", x, heard, name=f"{name}.both", axis=2)
        change = g.op("Relu", layers.linear(g, both, f"{name}.node", 2 * width, width), name=f"{name}.change")
        x = g.op("Add", x, change, name=f"{name}.nodes")
    return Workload(g.name, g.model({x: ("batch", nodes, width)}), "train", {}, "mse", "adam")


def fork() -> Workload:
    """Return two products whose result is read by an op that needs all of it and by one that could take terms of it."""
    g = Builder("fork")
    h = g.op("MatMul", g.input("x", ("batch", 8)), g.parameter("w1", (8, 16)), name="h")
    y = g.op("MatMul", h, g.parameter("w2", (16, 8)), name="y")
    g.op("Relu", y, name="whole")
    g.op("Neg", y, name="linear")
    return Workload(g.name, g.model({"whole": ("batch", 8), "linear": ("batch", 8)}), "infer", {}, "auto", "adam")


def draft(workload: Workload, mesh: Mesh, samples: int, cache_dir: Path, *, trips: int = 1) -> Draft:
    """Return a draft of a model for a number of samples in one microbatch, run a number of times."""
    folded = workload.folded(samples)
    rules = rules_for(folded, discover(workload.probe, cache_dir=cache_dir))
    job = Job(workload.mode, mesh.size, samples, 75e9, COSTS.cluster.to_dict())
    dims = batch_dims(folded.graph.values, workload.probe.values)
    info = workload.info()
    return Draft(folded, rules, mesh, COSTS, model=info, job=job, batch=dims, num_microbatches=1, trips=trips)


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

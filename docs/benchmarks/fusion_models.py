"""Models of DisCo's comparison that the zoo does not have: VGG19, a Transformer, an LSTM language model, a Reformer.

`build` writes one as an ONNX file without weights. Sizes are published ones; DisCo (Yi et al., TPDS 2022) states none.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.architectures import build_architecture, read_architecture
from autopar.models.builder import Builder

if TYPE_CHECKING:
    import onnx

_VGG19 = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and convolutions of each stage (Simonyan & Zisserman 2015, configuration E)."""


def _vgg19(name: str) -> "onnx.ModelProto":
    g = Builder(name)
    x, channels = g.input("images", ("batch", 3, 224, 224)), 3
    for stage, (width, count) in enumerate(_VGG19):
        for index in range(count):
            at = f"stages.{stage}.{index}"
            weight = g.parameter(f"{at}.weight", (width, channels, 3, 3), f"normal {(2 / (9 * channels)) ** 0.5:.6g}")
            bias = g.parameter(f"{at}.bias", (width,), "constant 0")
            x = g.op("Conv", x, weight, bias, name=f"{at}.conv", kernel_shape=(3, 3), pads=(1, 1, 1, 1))
            x, channels = g.op("Relu", x, name=f"{at}.relu"), width
        x = g.op("MaxPool", x, name=f"stages.{stage}.pool", kernel_shape=(2, 2), strides=(2, 2))
    x = g.op("Flatten", x, name="flat", axis=1)
    for index, (num_in, num_out) in enumerate(((512 * 49, 4096), (4096, 4096))):
        x = g.op("Relu", layers.linear(g, x, f"head.{index}", num_in, num_out), name=f"head.{index}.relu")
    layers.linear(g, x, "logits", 4096, 1000)
    return g.model({"logits": ("batch", 1000)})


def _rnnlm(name: str, hidden: int = 1500, vocab: int = 10_000, steps: int = 35, depth: int = 2) -> "onnx.ModelProto":
    """The large model of Zaremba et al. 2014 (arXiv 1409.2329): 66 million weights."""
    g = Builder(name)
    tokens = g.input("input_ids", ("batch", steps), "int64")
    x = g.op("Gather", g.parameter("embed.weight", (vocab, hidden)), tokens, name="embed", axis=0)
    x = g.op("Transpose", x, name="embed.steps", perm=(1, 0, 2))
    for layer in range(depth):
        at = f"layers.{layer}"
        weights = [
            g.parameter(f"{at}.weight_ih", (1, 4 * hidden, hidden)),
            g.parameter(f"{at}.weight_hh", (1, 4 * hidden, hidden)),
            g.parameter(f"{at}.bias", (1, 8 * hidden), "constant 0"),
        ]
        x = g.op("LSTM", x, *weights, name=at, hidden_size=hidden)
        x = g.op("Squeeze", x, g.constant((1,)), name=f"{at}.out")
    x = g.op("Transpose", x, name="hidden", perm=(1, 0, 2))
    layers.linear(g, x, "logits", hidden, vocab)
    return g.model({"logits": ("batch", steps, vocab)})


def _transformer(name: str) -> "onnx.ModelProto":
    """The base model of Vaswani et al. 2017 in the form of T5-base: encoder and decoder of 12 blocks, width 768."""
    config = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_kv": 64, "d_ff": 3072,
        "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "vocab_size": 32128, "feed_forward_proj": "relu",
        "relative_attention_num_buckets": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    return build_architecture(name, read_architecture(config, 256))


def _reformer(name: str, hidden: int = 1024, depth: int = 6, heads: int = 8, seq: int = 1024) -> "onnx.ModelProto":
    """A Reformer-like decoder: chunked attention with queries that are keys, and chunks of 64 (Kitaev et al. 2020).

    Tokens are not sorted by hash: their chunks are neighbours, so that the products have the sizes of the paper's. The
    vocabulary has 320 words, as that of its enwik8 and Crime and Punishment checkpoints.
    """
    g = Builder(name)
    chunk, size, vocab, ffn = 64, hidden // heads, 320, 4 * hidden
    tokens = g.input("input_ids", ("batch", seq), "int64")
    x = g.op("Gather", g.parameter("embed.weight", (vocab, hidden)), tokens, name="embed", axis=0)
    x = g.op("Add", x, g.parameter("positions", (seq, hidden)), name="embed.placed")
    scale = g.scalar(size**-0.5)
    for index in range(depth):
        at = f"layers.{index}"
        y = layers.layer_norm(g, x, f"{at}.norm1", hidden)
        parts = []
        for part in ("qk", "v"):
            z = layers.linear(g, y, f"{at}.{part}", hidden, hidden, bias=False)
            shape = g.constant((0, seq // chunk, chunk, heads, size))
            z = g.op("Reshape", z, shape, name=f"{at}.{part}.chunks")
            parts.append(g.op("Transpose", z, name=f"{at}.{part}.heads", perm=(0, 1, 3, 2, 4)))
        qk, v = parts
        keys = g.op("Transpose", qk, name=f"{at}.keys", perm=(0, 1, 2, 4, 3))
        scores = g.op("Mul", g.op("MatMul", qk, keys, name=f"{at}.products"), scale, name=f"{at}.scores")
        shares = g.op("Softmax", scores, name=f"{at}.shares", axis=-1)
        z = g.op("MatMul", shares, v, name=f"{at}.mixed")
        z = g.op("Transpose", z, name=f"{at}.together", perm=(0, 1, 3, 2, 4))
        z = g.op("Reshape", z, g.constant((0, seq, hidden)), name=f"{at}.merged")
        z = layers.linear(g, z, f"{at}.out", hidden, hidden, bias=False)
        x = g.op("Add", x, z, name=f"{at}.attended")
        y = layers.layer_norm(g, x, f"{at}.norm2", hidden)
        y = g.op("Relu", layers.linear(g, y, f"{at}.up", hidden, ffn), name=f"{at}.relu")
        x = g.op("Add", x, layers.linear(g, y, f"{at}.down", ffn, hidden), name=f"{at}.done")
    layers.linear(g, layers.layer_norm(g, x, "norm", hidden), "logits", hidden, vocab)
    return g.model({"logits": ("batch", seq, vocab)})


BUILDERS: Mapping[str, Callable[[str], "onnx.ModelProto"]] = {
    "vgg19": _vgg19,
    "transformer": _transformer,
    "rnnlm": _rnnlm,
    "reformer": _reformer,
}


def build(name: str, folder: Path) -> Path:
    """Write a model as an ONNX file; return the file."""
    path = folder / f"{name}.onnx"
    path.write_bytes(BUILDERS[name](name).SerializeToString())
    return path

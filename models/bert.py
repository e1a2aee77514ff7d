"""BERT (Devlin et al. 2019) with its masked-language-model head.

Post-norm encoder with learned positions. The published 110M and 340M are encoder plus pooler (109,482,240 and
335,141,888); a masked language model has no use for the pooler and adds a transform (dense, GELU, norm) and an output
bias to the tied head: 109,514,298 and 335,174,458, the counts of the released checkpoints loaded as a masked language
model. Sequences are full (no padding mask) and of one segment (segment embedding 0).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

_EPSILON = 1e-12  # google-research/bert, modeling.py


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Hyperparameters of a BERT.

    Attributes:
        num_layers: Encoder blocks.
        hidden: Model width.
        heads: Attention heads.
        seq: Tokens per sequence, and rows of the position table.
        vocab: Tokens in the vocabulary.
    """

    num_layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int

    def __post_init__(self) -> None:
        layers.head_size(self.hidden, self.heads)

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq


def build(name: str, config: BertConfig) -> "onnx.ModelProto":
    """Return the graph from `input_ids` int64 [batch, seq] to `logits` [batch, seq, vocab]."""
    g = Builder(name)
    hidden, seq = config.hidden, config.seq
    tokens = g.input("input_ids", ("batch", seq), "int64")
    embedding = g.parameter("embed.tokens.weight", (config.vocab, hidden))
    segments = g.parameter("embed.segments.weight", (2, hidden))
    x = g.op("Gather", embedding, tokens, name="embed.tokens", axis=0)
    x = g.op("Add", x, g.parameter("embed.positions.weight", (seq, hidden)), name="embed.positions")
    x = g.op("Add", x, g.op("Gather", segments, g.constant(0), name="embed.segment", axis=0), name="embed")
    x = layers.layer_norm(g, x, "embed.norm", hidden, epsilon=_EPSILON)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        attended = layers.self_attention(
            g, x, f"{layer}.attn", seq=seq, hidden=hidden, heads=config.heads, causal=False
        )
        x = g.op("Add", x, attended, name=f"{layer}.attn_residual")
        x = layers.layer_norm(g, x, f"{layer}.attn_norm", hidden, epsilon=_EPSILON)
        fed = layers.mlp(g, x, f"{layer}.mlp", hidden, 4 * hidden, approximate="none")
        x = g.op("Add", x, fed, name=f"{layer}.mlp_residual")
        x = layers.layer_norm(g, x, f"{layer}.mlp_norm", hidden, epsilon=_EPSILON)
    x = g.op("Gelu", layers.linear(g, x, "head.dense", hidden, hidden), name="head.gelu", approximate="none")
    x = layers.layer_norm(g, x, "head.norm", hidden, epsilon=_EPSILON)
    product = layers.tied_head(g, x, embedding, "head.decoder")
    g.op("Add", product, g.parameter("head.bias", (config.vocab,), "constant 0"), name="logits")
    return g.model({"logits": ("batch", seq, config.vocab)})


# 256 sequences per batch (appendix A.2); vocabulary of the uncased models.
_SOURCE = "Devlin et al. 2019, section 3 and appendix A.2; google-research/bert checkpoints"

SPECS = (
    ModelSpec("bert-base", "bert", 109_514_298, 256, "sequence", _SOURCE, BertConfig(12, 768, 12, 512, 30522)),
    ModelSpec("bert-large", "bert", 335_174_458, 256, "sequence", _SOURCE, BertConfig(24, 1024, 16, 512, 30522)),
)
"""All BERT models."""

"""LLaMA 2 (Touvron et al. 2023) and Llama 3 (Grattafiori et al. 2024).

Pre-norm decoder with RMSNorm, rotary positions, SwiGLU, grouped-query attention and an untied LM head; no biases.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autopar.errors import ModelError
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx


class Rotary(Protocol):
    """What attention with rotary positions needs to know of a configuration."""

    @property
    def hidden(self) -> int:
        """Model width."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, a divisor of `heads`."""

    @property
    def seq(self) -> int:
        """Tokens per sequence."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Hyperparameters of a LLaMA.

    Attributes:
        num_layers: Decoder blocks.
        hidden: Model width.
        heads: Query heads.
        kv_heads: Key and value heads.
        ffn: Width of the gated MLP.
        seq: Tokens per sequence.
        vocab: Tokens in the vocabulary.
        rope_theta: Base of the rotary frequencies.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    rope_theta: float

    def __post_init__(self) -> None:
        check_heads(self)

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq


def check_heads(config: Rotary) -> None:
    """Refuse head counts that do not divide.

    Raises:
        ModelError: If query heads do not divide the width, key-value heads the query heads, or a head is odd.
    """
    size = layers.head_size(config.hidden, config.heads)
    if size % 2:
        raise ModelError(f"a head of {size} elements cannot be rotated in pairs", hint="make hidden / heads even")
    if config.kv_heads < 1 or config.heads % config.kv_heads:
        raise ModelError(
            f"{config.heads} query heads are not divisible by {config.kv_heads} key-value heads",
            hint=f"give kv_heads={config.heads} or a divisor of it",
        )


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Names of the rotary tables [1, S, D/2] and of the shape that broadcasts them over the batch."""

    cos: str
    sin: str
    shape: str


def rope_tables(g: Builder, tokens: str, config: Rotary) -> RopeTables:
    """Declare the rotary tables, one for all layers."""
    shape = (1, config.seq, config.hidden // config.heads // 2)
    cos = g.buffer("rope.cos", shape, f"rope-cos {config.rope_theta:g}")
    sin = g.buffer("rope.sin", shape, f"rope-sin {config.rope_theta:g}")
    return RopeTables(cos, sin, g.batch_shape(tokens, 3))


def attention(g: Builder, x_BSd: str, name: str, config: Rotary, tables: RopeTables) -> str:
    """Return causal grouped-query self-attention of `x` with rotary positions."""
    size, seq = config.hidden // config.heads, config.seq
    # RotaryEmbedding wants tables [B, S, D/2]. They are broadcast in every layer, not once, so that no table is sent
    # from one pipeline stage to the next.
    cos = g.op("Expand", tables.cos, tables.shape, name=f"{name}.cos")
    sin = g.op("Expand", tables.sin, tables.shape, name=f"{name}.sin")

    def project(part: str, heads: int) -> str:
        flat = layers.linear(g, x_BSd, f"{name}.{part}", config.hidden, heads * size, bias=False)
        return layers.split_heads(g, flat, f"{name}.{part}", seq, heads, size)

    q = g.op("RotaryEmbedding", project("q", config.heads), cos, sin, name=f"{name}.q.rotated")
    k = g.op("RotaryEmbedding", project("k", config.kv_heads), cos, sin, name=f"{name}.k.rotated")
    y_BHSD = g.op("Attention", q, k, project("v", config.kv_heads), name=f"{name}.core", is_causal=1)
    merged = layers.merge_heads(g, y_BHSD, f"{name}.core", seq, config.hidden)
    return layers.linear(g, merged, f"{name}.out", config.hidden, config.hidden, bias=False)


def gated_mlp(g: Builder, x: str, name: str, hidden: int, ffn: int) -> str:
    """Return `down(swish(gate(x)) * up(x))`."""
    gate = g.op("Swish", layers.linear(g, x, f"{name}.gate", hidden, ffn, bias=False), name=f"{name}.swish")
    up = layers.linear(g, x, f"{name}.up", hidden, ffn, bias=False)
    return layers.linear(g, g.op("Mul", gate, up, name=f"{name}.gated"), f"{name}.down", ffn, hidden, bias=False)


def build(name: str, config: LlamaConfig) -> "onnx.ModelProto":
    """Return the graph from `input_ids` int64 [batch, seq] to `logits` [batch, seq, vocab]."""
    g = Builder(name)
    hidden, seq = config.hidden, config.seq
    tokens = g.input("input_ids", ("batch", seq), "int64")
    tables = rope_tables(g, tokens, config)
    x = g.op("Gather", g.parameter("embed.weight", (config.vocab, hidden)), tokens, name="embed", axis=0)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        normed = layers.rms_norm(g, x, f"{layer}.attn_norm", hidden)
        x = g.op("Add", x, attention(g, normed, f"{layer}.attn", config, tables), name=f"{layer}.attn_residual")
        normed = layers.rms_norm(g, x, f"{layer}.mlp_norm", hidden)
        x = g.op("Add", x, gated_mlp(g, normed, f"{layer}.mlp", hidden, config.ffn), name=f"{layer}.mlp_residual")
    layers.linear(g, layers.rms_norm(g, x, "final_norm", hidden), "logits", hidden, config.vocab, bias=False)
    return g.model({"logits": ("batch", seq, config.vocab)})


# LLaMA 2: batches of 4M tokens (section 2.2) are 1024 sequences of 4096; counts of the released checkpoints.
_LLAMA2 = "Touvron et al. 2023 (LLaMA 2), section 2; meta-llama checkpoints"
# Llama 3: Table 3 gives the sizes, section 3.4.1 the batch of 405B after its ramp-up, 16M tokens = 2048 sequences of
# 8192 (also Table 4). For 8B and 70B none is published; theirs here is the 4M tokens the ramp-up starts with. Rotary
# scaling to longer contexts came after this phase.
_LLAMA3 = "Grattafiori et al. 2024 (Llama 3), Tables 3 and 4; meta-llama checkpoints"


def _spec(name: str, count: int, batch: int, source: str, config: LlamaConfig) -> ModelSpec:
    return ModelSpec(name, "llama", count, batch, "sequence", source, config)


SPECS = (
    _spec("llama2-7b", 6_738_415_616, 1024, _LLAMA2, LlamaConfig(32, 4096, 32, 32, 11008, 4096, 32000, 1e4)),
    _spec("llama2-13b", 13_015_864_320, 1024, _LLAMA2, LlamaConfig(40, 5120, 40, 40, 13824, 4096, 32000, 1e4)),
    _spec("llama2-70b", 68_976_648_192, 1024, _LLAMA2, LlamaConfig(80, 8192, 64, 8, 28672, 4096, 32000, 1e4)),
    _spec("llama3-8b", 8_030_261_248, 512, _LLAMA3, LlamaConfig(32, 4096, 32, 8, 14336, 8192, 128256, 5e5)),
    _spec("llama3-70b", 70_553_706_496, 512, _LLAMA3, LlamaConfig(80, 8192, 64, 8, 28672, 8192, 128256, 5e5)),
    _spec("llama3-405b", 405_853_388_800, 2048, _LLAMA3, LlamaConfig(126, 16384, 128, 8, 53248, 8192, 128256, 5e5)),
)
"""All LLaMA models."""

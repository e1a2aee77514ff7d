"""DeepSeekMoE (Dai et al. 2024): many small experts of which a token chooses some, and experts that all share.

A token goes to the `top_k` experts with the highest scores, the softmax over all of them, and each counts by its score
(section 3.1, equations 9 to 11); what shared experts make is added. The first layer has a dense MLP in place of the
mixture. Places per expert are limited as in `mixtral`. The rest is LLaMA.

Dims as in `mixtral`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.models import layers, llama, mixtral
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """Hyperparameters of a DeepSeekMoE.

    Attributes:
        num_layers: Decoder blocks, the dense ones included.
        hidden: Model width.
        heads: Query heads.
        kv_heads: Key and value heads.
        dense_ffn: Width of the MLP of the dense layers.
        ffn: Width of one expert.
        seq: Tokens per sequence.
        vocab: Tokens in the vocabulary.
        experts: Routed experts per layer.
        top_k: Routed experts per token.
        shared: Shared experts per layer.
        dense_layers: Layers without experts, the first ones.
        capacity_factor: Places per expert, relative to an even distribution.
        rope_theta: Base of the rotary frequencies.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    dense_ffn: int
    ffn: int
    seq: int
    vocab: int
    experts: int = 64
    top_k: int = 6
    shared: int = 2
    dense_layers: int = field(default=1, metadata={"least": 0})
    capacity_factor: float = 1.25
    rope_theta: float = 1e4

    def __post_init__(self) -> None:
        assert self.mixture, "the numbers of a mixture are checked there"

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq

    @property
    def mixture(self) -> mixtral.MixtralConfig:
        """The routed experts of a layer, as a Mixtral has them.

        Raises:
            ModelError: If heads or experts make no sense.
        """
        return mixtral.MixtralConfig(
            self.num_layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.seq, self.vocab, self.experts,
            self.top_k, self.capacity_factor, self.rope_theta,
        )  # fmt: skip


def build(name: str, config: DeepseekConfig) -> "onnx.ModelProto":
    """Return the graph from `input_ids` int64 [batch, seq] to `logits` [batch, seq, vocab]."""
    g = Builder(name)
    hidden, seq = config.hidden, config.seq
    tokens = g.input("input_ids", ("batch", seq), "int64")
    tables = llama.rope_tables(g, tokens, config)
    x = g.op("Gather", g.parameter("embed.weight", (config.vocab, hidden)), tokens, name="embed", axis=0)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        normed = layers.rms_norm(g, x, f"{layer}.attn_norm", hidden)
        attended = llama.attention(g, normed, f"{layer}.attn", config, tables)
        x = g.op("Add", x, attended, name=f"{layer}.attn_residual")
        normed = layers.rms_norm(g, x, f"{layer}.mlp_norm", hidden)
        if index < config.dense_layers:
            fed = llama.gated_mlp(g, normed, f"{layer}.mlp", hidden, config.dense_ffn)
        else:
            fed = experts(g, normed, f"{layer}.moe", config)
        x = g.op("Add", x, fed, name=f"{layer}.mlp_residual")
    layers.linear(g, layers.rms_norm(g, x, "final_norm", hidden), "logits", hidden, config.vocab, bias=False)
    return g.model({"logits": ("batch", seq, config.vocab)})


def experts(g: Builder, x_BSd: str, name: str, config: DeepseekConfig) -> str:
    """Return what routed and shared experts make of `x` [B, S, d]; the shared ones are one MLP of their widths."""
    routed = mixtral.moe(g, x_BSd, name, config.mixture, over_all=True)
    shared = llama.gated_mlp(g, x_BSd, f"{name}.shared", config.hidden, config.shared * config.ffn)
    return g.op("Add", routed, shared, name=f"{name}.all")


# Count of the released checkpoint; batches of 4.5k sequences of 4096 tokens (section 5.1.2).
_SOURCE = "Dai et al. 2024 (DeepSeekMoE), section 5.1; deepseek-ai/deepseek-moe-16b-base"

SPECS = (
    ModelSpec(
        "deepseek-moe-16b", "deepseek", 16_375_728_128, 4608, "sequence", _SOURCE,
        DeepseekConfig(
            num_layers=28, hidden=2048, heads=16, kv_heads=16, dense_ffn=10944, ffn=1408, seq=4096, vocab=102400
        ),
    ),
)  # fmt: skip
"""All DeepSeekMoE models."""

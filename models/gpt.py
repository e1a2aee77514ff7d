"""GPT: GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020) and Megatron's scaling series (Narayanan et al., SC'21).

Pre-norm decoder with learned positions and an LM head tied to the token embedding. Q, K and V are three matrices where
the published code has one of [d, 3d]; the count is the same. With L layers, width d, V tokens and S positions there are
`L (12 d^2 + 13 d) + (V + S) d + 2 d` parameters. GPT-3 alternates dense and locally banded sparse attention; here every
layer is dense.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Hyperparameters of a GPT.

    Attributes:
        num_layers: Decoder blocks.
        hidden: Model width.
        heads: Attention heads.
        seq: Tokens per sequence, and rows of the position table.
        vocab: Tokens in the vocabulary.
        tied: Whether the LM head is the token embedding; a pipeline keeps a copy at either end.
        bias: Whether projections and normalisations have one (MPT's have none).
    """

    num_layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    tied: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        layers.head_size(self.hidden, self.heads)

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq


def build(name: str, config: GptConfig) -> "onnx.ModelProto":
    """Return the graph from `input_ids` int64 [batch, seq] to `logits` [batch, seq, vocab]."""
    g = Builder(name)
    hidden, seq, bias = config.hidden, config.seq, config.bias
    tokens = g.input("input_ids", ("batch", seq), "int64")
    embedding = g.parameter("embed.tokens.weight", (config.vocab, hidden))
    x = g.op("Gather", embedding, tokens, name="embed.tokens", axis=0)
    x = g.op("Add", x, g.parameter("embed.positions.weight", (seq, hidden)), name="embed")
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        normed = layers.layer_norm(g, x, f"{layer}.attn_norm", hidden, bias=bias)
        attended = layers.self_attention(
            g, normed, f"{layer}.attn", seq=seq, hidden=hidden, heads=config.heads, causal=True, bias=bias
        )
        x = g.op("Add", x, attended, name=f"{layer}.attn_residual")
        normed = layers.layer_norm(g, x, f"{layer}.mlp_norm", hidden, bias=bias)
        x = g.op(
            "Add",
            x,
            layers.mlp(g, normed, f"{layer}.mlp", hidden, 4 * hidden, approximate="tanh", bias=bias),
            name=f"{layer}.mlp_residual",
        )
    normed = layers.layer_norm(g, x, "final_norm", hidden, bias=bias)
    if config.tied:
        layers.tied_head(g, normed, embedding, "logits")
    else:
        layers.linear(g, normed, "logits", hidden, config.vocab, bias=False)
    return g.model({"logits": ("batch", seq, config.vocab)})


# GPT-2: counts of the released checkpoints; a batch of 512 sequences of 1024 tokens for all sizes (section 2.3).
_GPT2 = "Radford et al. 2019, Table 2; openai/gpt-2 checkpoints"
# GPT-3: Table 2.1 gives layers, width, heads and the batch in tokens (0.5M to 3.2M), here divided by 2048; the 3.2M of
# 175B are 1536 sequences, as in Narayanan et al. and MLPerf. Published counts are rounded (125M ... 175B). The
# vocabulary is GPT-2's. Where heads x head size is not the width, XL has 16 heads of 128 (the table: 24) and 13B the
# width 5120 (the table: 5140).
_GPT3 = "Brown et al. 2020, Table 2.1"
# Megatron: Table 1 gives heads, width, layers and batch; vocabulary 51,200 and sequences of 2048 (section 5.1).
# Published counts are rounded to 0.1B and leave out the final normalisation.
_MEGATRON = "Narayanan et al. 2021 (SC'21), Table 1"


def _spec(name: str, count: int, batch: int, source: str, config: GptConfig) -> ModelSpec:
    return ModelSpec(name, "gpt", count, batch, "sequence", source, config)


SPECS = (
    _spec("gpt2", 124_439_808, 512, _GPT2, GptConfig(12, 768, 12, 1024, 50257)),
    _spec("gpt2-medium", 354_823_168, 512, _GPT2, GptConfig(24, 1024, 16, 1024, 50257)),
    _spec("gpt2-large", 774_030_080, 512, _GPT2, GptConfig(36, 1280, 20, 1024, 50257)),
    _spec("gpt2-xl", 1_557_611_200, 512, _GPT2, GptConfig(48, 1600, 25, 1024, 50257)),
    _spec("gpt3-125m", 125_226_240, 256, _GPT3, GptConfig(12, 768, 12, 2048, 50257)),
    _spec("gpt3-350m", 355_871_744, 256, _GPT3, GptConfig(24, 1024, 16, 2048, 50257)),
    _spec("gpt3-760m", 760_300_032, 256, _GPT3, GptConfig(24, 1536, 16, 2048, 50257)),
    _spec("gpt3-xl", 1_315_723_264, 512, _GPT3, GptConfig(24, 2048, 16, 2048, 50257)),
    _spec("gpt3-2.7b", 2_651_553_280, 512, _GPT3, GptConfig(32, 2560, 32, 2048, 50257)),
    _spec("gpt3-6.7b", 6_658_404_352, 1024, _GPT3, GptConfig(32, 4096, 32, 2048, 50257)),
    _spec("gpt3-13b", 12_853_386_240, 1024, _GPT3, GptConfig(40, 5120, 40, 2048, 50257)),
    _spec("gpt3-175b", 174_604_259_328, 1536, _GPT3, GptConfig(96, 12288, 96, 2048, 50257)),
    _spec("megatron-1.7b", 1_652_230_656, 512, _MEGATRON, GptConfig(24, 2304, 24, 2048, 51200)),
    _spec("megatron-3.6b", 3_562_168_320, 512, _MEGATRON, GptConfig(30, 3072, 32, 2048, 51200)),
    _spec("megatron-7.5b", 7_467_786_240, 512, _MEGATRON, GptConfig(36, 4096, 32, 2048, 51200)),
    _spec("megatron-18b", 18_449_756_160, 1024, _MEGATRON, GptConfig(40, 6144, 48, 2048, 51200)),
    _spec("megatron-39b", 39_096_041_472, 1536, _MEGATRON, GptConfig(48, 8192, 64, 2048, 51200)),
    _spec("megatron-76b", 76_050_739_200, 1792, _MEGATRON, GptConfig(60, 10240, 80, 2048, 51200)),
    _spec("megatron-145b", 145_622_261_760, 2304, _MEGATRON, GptConfig(80, 12288, 96, 2048, 51200)),
    _spec("megatron-310b", 310_130_540_544, 2160, _MEGATRON, GptConfig(96, 16384, 128, 2048, 51200)),
    _spec("megatron-530b", 529_600_819_200, 2520, _MEGATRON, GptConfig(105, 20480, 128, 2048, 51200)),
    _spec("megatron-1t", 1_008_038_758_400, 3072, _MEGATRON, GptConfig(128, 25600, 160, 2048, 51200)),
)
"""All GPT models."""

"""Mixtral (Jiang et al. 2024): LLaMA with a mixture of experts in place of the MLP.

Each token goes to the two experts with the highest router logits, weighted by the softmax of those two logits (section
2.1). An expert takes at most `C = ceil(capacity_factor * k * S / E)` tokens of a sequence, in order of position; what
exceeds that is dropped, i.e. contributes 0. The published model drops nothing; the limit gives every tensor a static
shape, as in GShard and Switch Transformer, whose factor of 1.25 is used.

Dims: B batch, S sequence, d width, E experts, K choices per token, C capacity, f expert width.
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from autopar.errors import ModelError
from autopar.models import layers, llama
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class MixtralConfig:
    """Hyperparameters of a Mixtral.

    Attributes:
        num_layers: Decoder blocks.
        hidden: Model width.
        heads: Query heads.
        kv_heads: Key and value heads.
        ffn: Width of one expert.
        seq: Tokens per sequence.
        vocab: Tokens in the vocabulary.
        experts: Experts per layer.
        top_k: Experts per token.
        capacity_factor: Places per expert, relative to an even distribution.
        rope_theta: Base of the rotary frequencies.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    experts: int = 8
    top_k: int = 2
    capacity_factor: float = 1.25
    rope_theta: float = 1e6

    def __post_init__(self) -> None:
        llama.check_heads(self)
        if not 1 <= self.top_k <= self.experts:
            raise ModelError(
                f"a token cannot choose {self.top_k} of {self.experts} experts",
                hint=f"give experts={self.top_k} or more",
            )

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq

    @property
    def capacity(self) -> int:
        """Places per expert and sequence; an expert is chosen at most once by a token, so never more than `seq`."""
        return min(self.seq, ceil(self.capacity_factor * self.top_k * self.seq / self.experts))


def moe(g: Builder, x_BSd: str, name: str, config: MixtralConfig, *, over_all: bool = False) -> str:
    """Return the mixture of experts applied to `x` [B, S, d].

    Experts weigh what the softmax over the chosen ones says, or over all of them (`over_all`).

    Routing is integer work without gradient: a TopK over positions finds the tokens of each expert (`slots`), an
    exclusive running count the place of each token at its experts (`place`). Tokens travel by two gathers, there and
    back; experts are a batched product over E, which expert parallelism shards.
    """
    hidden, seq, experts, capacity = config.hidden, config.seq, config.experts, config.capacity
    last, k = g.constant((-1,)), g.constant((config.top_k,))
    logits_BSE = layers.linear(g, x_BSd, f"{name}.router", hidden, experts, bias=False)
    scores_BSE = g.op("Softmax", logits_BSE, name=f"{name}.scores", axis=-1) if over_all else logits_BSE
    chosen_BSK, expert_BSK = g.ops("TopK", scores_BSE, k, names=(f"{name}.chosen", f"{name}.expert"), axis=-1)
    weight_BSK = chosen_BSK if over_all else g.op("Softmax", chosen_BSK, name=f"{name}.weight", axis=-1)

    onehot_BSKE = g.op("OneHot", expert_BSK, g.constant(experts), g.constant((0, 1)), name=f"{name}.onehot", axis=-1)
    mine_BSE = g.op("ReduceSum", onehot_BSKE, g.constant((2,)), name=f"{name}.mine", keepdims=0)
    count_BSE = g.op("CumSum", mine_BSE, g.constant(1), name=f"{name}.count", exclusive=1)
    place_BSK = g.op("GatherElements", count_BSE, expert_BSK, name=f"{name}.place", axis=2)
    fits_BSK = g.op("Less", place_BSK, g.constant(capacity), name=f"{name}.fits")

    # Earlier positions rank higher; places that stay empty hold the index of a token that did not choose the expert and
    # are never read back.
    rank_BES = g.op(
        "Mul",
        g.op("Transpose", mine_BSE, name=f"{name}.mine_first", perm=(0, 2, 1)),
        g.constant(tuple(range(seq, 0, -1))),
        name=f"{name}.rank",
    )
    _, slots_BEC = g.ops("TopK", rank_BES, g.constant((capacity,)), names=(f"{name}.ranked", f"{name}.slots"), axis=-1)
    slots_BEC1 = g.op("Unsqueeze", slots_BEC, last, name=f"{name}.slots.index")
    x_BECd = g.op("GatherND", x_BSd, slots_BEC1, name=f"{name}.dispatch", batch_dims=1)
    x_EBCd = g.op("Transpose", x_BECd, name=f"{name}.dispatch.expert_major", perm=(1, 0, 2, 3))
    x_End = g.op("Reshape", x_EBCd, g.constant((experts, -1, hidden)), name=f"{name}.dispatch.rows")

    def product(rows: str, part: str, num_in: int, num_out: int) -> str:
        weight = g.parameter(f"{name}.{part}.weight", (experts, num_in, num_out), f"normal {num_in**-0.5:.6g}")
        return g.op("MatMul", rows, weight, name=f"{name}.{part}")

    gate_Enf = g.op("Swish", product(x_End, "gate", hidden, config.ffn), name=f"{name}.swish")
    gated_Enf = g.op("Mul", gate_Enf, product(x_End, "up", hidden, config.ffn), name=f"{name}.gated")
    y_End = product(gated_Enf, "down", config.ffn, hidden)

    y_EBCd = g.op("Reshape", y_End, g.constant((experts, -1, capacity, hidden)), name=f"{name}.combine.places")
    y_BECd = g.op("Transpose", y_EBCd, name=f"{name}.combine.batch_major", perm=(1, 0, 2, 3))
    # A dropped token reads the last place of its expert with weight 0.
    read_BSK = g.op("Min", place_BSK, g.constant(capacity - 1), name=f"{name}.read")
    pair = (g.op("Unsqueeze", index, last, name=f"{index}.index") for index in (expert_BSK, read_BSK))
    address_BSK2 = g.op("Concat", *pair, name=f"{name}.address", axis=-1)
    y_BSKd = g.op("GatherND", y_BECd, address_BSK2, name=f"{name}.combine", batch_dims=1)
    kept_BSK = g.op("Mul", weight_BSK, g.op("Cast", fits_BSK, name=f"{name}.kept.mask", to=1), name=f"{name}.kept")
    kept_BSK1 = g.op("Unsqueeze", kept_BSK, last, name=f"{name}.kept.column")
    weighted_BSKd = g.op("Mul", y_BSKd, kept_BSK1, name=f"{name}.weighted")
    return g.op("ReduceSum", weighted_BSKd, g.constant((2,)), name=name, keepdims=0)


def build(name: str, config: MixtralConfig) -> "onnx.ModelProto":
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
        normed = layers.rms_norm(g, x, f"{layer}.moe_norm", hidden)
        x = g.op("Add", x, moe(g, normed, f"{layer}.moe", config), name=f"{layer}.moe_residual")
    layers.linear(g, layers.rms_norm(g, x, "final_norm", hidden), "logits", hidden, config.vocab, bias=False)
    return g.model({"logits": ("batch", seq, config.vocab)})


# Counts of the released checkpoints, vocabulary of 8x22B as in its Instruct release. The training batch was not
# published. Pre-training used a context of 32k; the default here is LLaMA 2's 1024 sequences of 4096, which is what
# training systems are commonly compared at; `seq=32768` is the published one.
_SOURCE = "Jiang et al. 2024 (Mixtral of Experts), Table 1; mistralai checkpoints"

SPECS = (
    ModelSpec(
        "mixtral-8x7b", "mixtral", 46_702_792_704, 1024, "sequence", _SOURCE,
        MixtralConfig(num_layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, seq=4096, vocab=32000),
    ),
    ModelSpec(
        "mixtral-8x22b", "mixtral", 140_630_071_296, 1024, "sequence", _SOURCE,
        MixtralConfig(num_layers=56, hidden=6144, heads=48, kv_heads=8, ffn=16384, seq=4096, vocab=32768),
    ),
)  # fmt: skip
"""All Mixtral models."""

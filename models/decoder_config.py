"""Records of a decoder: norm, kinds of attention, MLP and experts, names of weights, and the whole.

Families differ in the norm, where it stands, how queries, keys and values come about, what gates the MLP, and in
names; a `DecoderConfig` says all of it. Weights are called as in Hugging Face's checkpoints. Where a checkpoint fuses
several matrices into one (queries, keys and values; gate and up), the parts are weights of their own here, so that each
can be sharded by its own dims; `.q`, `.k`, `.v`, `.gate`, `.up` and the like behind its name tell them apart. A weight
that is [in, out] here where the checkpoint has [out, in] ends in `TRANSPOSED`.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from autopar.errors import ModelError
from autopar.models.rotary import Rope

TRANSPOSED = ".T"
"""End of the name of a weight that is [in, out] in the graph where the checkpoint has [out, in]."""


PER_HEAD = ".heads"
"""End of the name of a weight that is a matrix per head, where the checkpoint has one of all heads."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the model width.

    Attributes:
        kind: Root mean square (Zhang and Sennrich 2019) or mean and variance.
        epsilon: Added to the mean square or variance.
        bias: Whether a layer norm has one.
        from_zero: Whether the stored scale is the distance from 1.
    """

    kind: Literal["rms", "layer"]
    epsilon: float
    bias: bool = True
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a sequence to itself, or to another one.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of `heads`.
        size: Elements of a head.
        fused: How a checkpoint fuses the three projections: not at all; as three blocks of rows; head by head, or
            group by group, the queries, keys and values of each. It changes names only.
        qkv_bias: Whether queries, keys and values have a bias.
        key_bias: Whether keys have one, too.
        out_bias: Whether the output projection has one.
        qk_norm: Whether queries and keys are normalised: each head by itself, all heads together, or each head by
            itself behind the rotation and without a scale.
        scale: Factor of the scores; None for the inverse root of the head size.
        rope: Rotary positions; None without.
        transposed: Whether the checkpoint has [out, in].
        window: Last keys that a query sees, its own included; 0 for all.
        chunk: Positions per chunk, beyond which no query sees a key; 0 without chunks.
        softcap: Limit that scores approach as `softcap tanh(score / softcap)`; 0 without.
        interleaved: Whether neighbours are rotated as pairs, not the halves of the rotated part.
        temperature: Positions per step by which the scores of later queries grow, and the growth: a query at position
            p has its scores times `1 + growth ln(1 + floor((p + 1) / positions))`; None without.
        sinks: Whether each head has a logit of its own in the denominator of the softmax.
        gated: Whether a sigmoid of a second part of the projection of queries scales the result.
        causal: Whether no query sees a later key.
        slopes: What the scores of each head fall by per position between query and key (Press et al. 2022, ALiBi);
            none where they do not fall.
        cached: Tokens before those of the sequence whose keys and values lie in a cache; 0 without one.
        first: Position of the first token of the sequence.
    """

    heads: int
    kv_heads: int
    size: int
    fused: Literal["", "blocks", "heads", "groups"] = ""
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    qk_norm: Literal["", "head", "width", "unit"] = ""
    scale: float | None = None
    rope: Rope | None = None
    transposed: bool = True
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    interleaved: bool = False
    temperature: tuple[float, float] | None = None
    sinks: bool = False
    gated: bool = False
    causal: bool = True
    slopes: tuple[float, ...] = ()
    cached: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads are not divisible by {self.kv_heads} key-value heads",
                hint="num_key_value_heads has to divide num_attention_heads",
            )
        if self.rope is not None and (self.rope.size % 2 or not 0 < self.rope.size <= self.size):
            raise ModelError(
                f"{self.rope.size} of the {self.size} elements of a head cannot be rotated in pairs",
                hint="head_dim times partial_rotary_factor has to be even",
            )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Causal multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    Keys and values of all heads are made of one latent vector per token; a rotated part of the key is shared by all
    heads. Names are DeepSeek's.

    Attributes:
        heads: Heads.
        query_rank: Elements of the latent vector of queries; 0 for queries made directly.
        latent_rank: Elements of the latent vector of keys and values.
        plain: Elements of a head's query and key that are not rotated.
        rope: Rotary positions of the others.
        value: Elements of a head's value.
        scale: Factor of the scores; None for the inverse root of the size of a query.
        bias: Whether the projections from and to the model width have one.
        interleaved: Whether neighbours are rotated as pairs, not the halves of the rotated part.
        chunk: Positions per chunk, beyond which no query sees a key; 0 without chunks.
        cached: Tokens before those of the sequence whose latent vectors and rotated keys lie in a cache; 0 without one.
            With one, the projections from the latent vector are part of queries and results.
    """

    heads: int
    query_rank: int
    latent_rank: int
    plain: int
    rope: Rope
    value: int
    scale: float | None = None
    bias: bool = False
    interleaved: bool = True
    chunk: int = 0
    cached: int = 0

    def __post_init__(self) -> None:
        if self.rope.size % 2:
            raise ModelError(
                f"{self.rope.size} elements of a key cannot be rotated in pairs", hint="qk_rope_head_dim has to be even"
            )


Activation = Literal["silu", "gelu", "gelu-tanh", "gelu-sigmoid", "relu", "relu-squared"]


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba 2's mixer, in the place of attention (Dao and Gu 2024).

    Attributes:
        heads: Heads.
        size: Channels of a head.
        groups: Groups of heads that share what reads and writes their states, a divisor of `heads`.
        state: Numbers of state per channel.
        kernel: Tokens of the convolution before the scan.
        kernel_bias: Whether the convolution has a bias.
        bias: Whether the projections have one.
        activation: Nonlinearity behind the convolution.
        least_step: Least step of a token.
        most_step: Largest step of a token; 0 for any.
        continues: Whether states and the tokens before the convolution are those that earlier tokens left.
    """

    heads: int
    size: int
    groups: int
    state: int
    kernel: int
    kernel_bias: bool = True
    bias: bool = False
    activation: Activation = "silu"
    least_step: float = 0.0
    most_step: float = 0.0
    continues: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups:
            raise ModelError(
                f"{self.heads} heads of the scan are not divisible by its {self.groups} groups",
                hint="n_groups (mamba_n_groups) has to divide the heads",
            )


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Mamba's mixer, in the place of attention (Gu and Dao 2023).

    Attributes:
        channels: Channels of the scan.
        state: Numbers of state per channel.
        rank: Elements of the vector that the steps of all channels are made of.
        kernel: Tokens of the convolution before the scan.
        kernel_bias: Whether the convolution has a bias.
        bias: Whether the projections from and to the model width have one.
        activation: Nonlinearity behind the convolution.
        norm: Whether what steps are made of, and what writes and reads states, are divided by their root mean squares:
            not at all, or without or with a trained scale.
        norm_epsilon: Added to these mean squares.
        continues: Whether states and the tokens before the convolution are those that earlier tokens left.
    """

    channels: int
    state: int
    rank: int
    kernel: int
    kernel_bias: bool = True
    bias: bool = False
    activation: Activation = "silu"
    norm: Literal["", "unit", "scaled"] = ""
    norm_epsilon: float = 1e-6
    continues: bool = False


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """A gated delta net, in the place of attention (Yang et al. 2024, Gated Delta Networks).

    Attributes:
        heads: Heads of values.
        size: Elements of a value.
        key_heads: Heads of queries and keys, a divisor of `heads`.
        key_size: Elements of a query or key.
        kernel: Tokens of the convolution before the scan.
        activation: Nonlinearity behind the convolution.
        continues: Whether states and the tokens before the convolution are those that earlier tokens left.
    """

    heads: int
    size: int
    key_heads: int
    key_size: int
    kernel: int
    activation: Activation = "silu"
    continues: bool = False

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ModelError(
                f"{self.heads} value heads of the delta rule are not divisible by its {self.key_heads} key heads",
                hint="linear_num_key_heads has to divide linear_num_value_heads",
            )


Scan = StateSpace | SelectiveScan | DeltaRule
"""What stands in the place of attention and passes states from token to token."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP of a block.

    Attributes:
        width: Elements inside.
        activation: Nonlinearity.
        gated: Whether a second projection multiplies what was activated.
        bias: Whether projections have one.
        fused: Whether the checkpoint holds gate and up in one matrix.
        transposed: Whether the checkpoint has [out, in].
    """

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    fused: bool = False
    transposed: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP: gated experts of which a token chooses `top_k`, none dropped.

    Attributes:
        count: Experts.
        top_k: Experts of a token.
        width: Elements inside an expert.
        activation: Nonlinearity of experts.
        scores: What turns router logits into scores: a softmax or a sigmoid of each, or a softmax of those chosen.
        normalized: Whether the weights of the chosen experts are divided by their sum.
        scale: Factor of the weights.
        correction: Whether a bias that is no parameter is added to the scores for the choice (Wang et al. 2024).
        groups: Groups of experts of which the best are chosen first; 1 without.
        chosen_groups: How many of them.
        group_by: Score of a group: its best expert, or the sum of its best two.
        shared: Elements inside the experts that every token uses; 0 without.
        shared_gate: Whether what they make is scaled by a sigmoid of its own.
        names: Names of the router, the matrices of gate and up, those of down, the shared experts, and their gate.
        bias: Whether router and experts have biases.
        limit: Most that gate and up, and least that up may be, as gpt-oss clips them; 0 without.
        transposed: Whether the checkpoint has [out, in].
        interleaved: Whether the checkpoint holds columns of gate and up in turn.
        scaled_input: Whether weights of experts scale what goes into them, not what comes out.
        imbalance: Rows of the fullest device relative to an even load.
        gated: Whether experts have gates; the matrices of gate and up are those of up alone where not.
    """

    count: int
    top_k: int
    width: int
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_by: Literal["best", "two"] = "best"
    shared: int = 0
    shared_gate: bool = False
    names: tuple[str, str, str, str, str] = (
        "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_experts", "mlp.shared_expert_gate"
    )  # fmt: skip
    bias: bool = False
    limit: float = 0.0
    transposed: bool = True
    interleaved: bool = False
    scaled_input: bool = False
    imbalance: float = 1.0
    gated: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise ModelError(
                f"a token cannot choose {self.top_k} of {self.count} experts",
                hint="num_experts_per_tok is at most the number of experts",
            )
        if self.count % self.groups or not self.top_k <= self.chosen_groups * (self.count // self.groups):
            raise ModelError(
                f"a token cannot choose {self.top_k} of {self.count} experts in {self.chosen_groups} of "
                f"{self.groups} groups",
                hint="n_group divides the number of experts, and topk_group of them hold num_experts_per_tok",
            )

    @property
    def fill(self) -> float:
        """Share of the rows of experts that carry a token, on the fullest device."""
        return min(1.0, self.imbalance * self.top_k / self.count)


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of a decoder consists of.

    Attributes:
        attention: Its attention, or the scan in the place of attention; None in a block that is only an MLP.
        mlp: Its MLP; None in a block without.
    """

    attention: Attention | LatentAttention | Scan | None
    mlp: Mlp | Experts | None

    @property
    def rope(self) -> Rope | None:
        """Rotary positions of its attention."""
        return self.attention.rope if isinstance(self.attention, Attention | LatentAttention) else None


@dataclass(frozen=True, slots=True)
class Names:
    """How a family calls its weights, without `.weight` and `.bias`; those of a block follow `layer`.

    Attributes:
        embed: Token embedding.
        layer: A block; `{}` stands for its number.
        attention_norm: Norm of the attention.
        mlp_norm: Norm of the MLP.
        qkv: The projections of queries, keys and values, or the fused one.
        out: Output projection of the attention.
        mlp: Projections gate, up and down; without a gate up and down; with a fused gate gate-and-up and down.
        final_norm: Norm before the head.
        head: Output projection, where it is not the token embedding.
        positions: Table of learned positions.
        qk_norm: Norms of queries and keys.
        post_norms: Norms behind attention and MLP, of blocks that have norms before and behind.
        scan: What a scan is in a block.
        embed_norm: Norm of the embedding; "" without.
    """

    embed: str
    layer: str
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp: tuple[str, ...]
    final_norm: str
    head: str = "lm_head"
    positions: str = ""
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    post_norms: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    scan: str = "mixer"
    embed_norm: str = ""


Arrangement = Literal["pre", "post", "both", "after", "parallel", "parallel-shared"]
"""Where norms stand: before attention and MLP; behind them, before what they add is added; before and behind; behind
the sum; before both, which run side by side; or one norm before both."""


class BlockStack(Protocol):
    """What a block needs to know of the stack that it is part of: fields as of `DecoderConfig`."""

    @property
    def hidden(self) -> int:
        """Model width."""

    @property
    def seq(self) -> int:
        """Length of the sequence."""

    @property
    def norm(self) -> Norm:
        """Norm of every block."""

    @property
    def arrangement(self) -> Arrangement:
        """Where norms stand."""

    @property
    def names(self) -> Names:
        """Names of the weights."""

    @property
    def residual_scale(self) -> float:
        """Factor of what attention and MLP add."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder.

    Attributes:
        blocks: Attention and MLP of each block.
        hidden: Model width.
        seq: Tokens per sequence.
        vocab: Tokens in the vocabulary.
        norm: Of every block and before the head.
        arrangement: Where norms stand.
        names: Names of the weights.
        tied: Whether the head is the token embedding.
        head_bias: Whether the head has a bias.
        positions: Rows of the table of learned positions; 0 without one.
        first_position: Row of the first token.
        embedding_scale: Factor of the embedding.
        residual_scale: Factor of what attention and MLP add.
        logits_scale: Factor of the logits.
        logits_cap: Limit that logits approach as `cap tanh(logit / cap)`; 0 without.
        mtp: Further tokens that are predicted in training, each by a module that is one more block.
    """

    blocks: tuple[Block, ...]
    hidden: int
    seq: int
    vocab: int
    norm: Norm
    arrangement: Arrangement
    names: Names
    tied: bool = False
    head_bias: bool = False
    positions: int = 0
    first_position: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    mtp: int = 0

    def __post_init__(self) -> None:
        if self.positions and self.first_position + self.seq > self.positions:
            raise ModelError(
                f"the model has learned positions for {self.positions - self.first_position} tokens, "
                f"fewer than the {self.seq} of a sequence",
                hint=f"--set seq={self.positions - self.first_position}, or less",
            )

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.blocks)

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq


def uniform(
    num_layers: int, attention: Attention | LatentAttention | Scan, mlp: Mlp | Experts | None, **parts: Any
) -> DecoderConfig:
    """Return a decoder of equal blocks; `parts` are the other fields of `DecoderConfig`."""
    return DecoderConfig((Block(attention, mlp),) * num_layers, **parts)

"""Decoders of one build: a stack of equal blocks, each attention and an MLP, whose parts are chosen by a configuration.

Families differ in the norm, where it stands, how queries, keys and values come about, what gates the MLP, and in
names; a `DecoderConfig` says all of it. Weights are called as in Hugging Face's checkpoints. Where a checkpoint fuses
queries, keys and values (or gate and up) into one matrix, the parts are weights of their own here, so that each can be
sharded by its own heads; `.q`, `.k`, `.v`, `.gate` and `.up` behind its name tell them apart. A weight that is
[in, out] here where the checkpoint has [out, in] ends in `TRANSPOSED`.

Dims: B batch, S sequence, H heads, D head size, d model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from autopar.errors import ModelError
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.rotary import Rope

if TYPE_CHECKING:
    import onnx

TRANSPOSED = ".T"
"""End of the name of a weight that is [in, out] in the graph where the checkpoint has [out, in]."""


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
    """Causal self-attention.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads, a divisor of `heads`.
        size: Elements of a head.
        fused: How a checkpoint fuses the three projections: not at all; as three blocks of rows; head by head, or
            group by group, the queries, keys and values of each. It changes names only.
        qkv_bias: Whether queries, keys and values have a bias.
        out_bias: Whether the output projection has one.
        qk_norm: Whether queries and keys are normalised: each head by itself, or all heads together.
        scale: Factor of the scores; None for the inverse root of the head size.
        rope: Rotary positions; None without.
        transposed: Whether the checkpoint has [out, in].
    """

    heads: int
    kv_heads: int
    size: int
    fused: Literal["", "blocks", "heads", "groups"] = ""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["", "head", "width"] = ""
    scale: float | None = None
    rope: Rope | None = None
    transposed: bool = True

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


Activation = Literal["silu", "gelu", "gelu-tanh", "relu", "relu-squared"]


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


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder.

    Attributes:
        num_layers: Blocks.
        hidden: Model width.
        seq: Tokens per sequence.
        vocab: Tokens in the vocabulary.
        attention: Of every block.
        mlp: Of every block.
        norm: Of every block and before the head.
        arrangement: Where norms stand: before attention and MLP; behind them, before what they add is added; before
            both, which run side by side; or one norm before both.
        names: Names of the weights.
        tied: Whether the head is the token embedding.
        head_bias: Whether the head has a bias.
        positions: Rows of the table of learned positions; 0 without one.
        first_position: Row of the first token.
        embedding_scale: Factor of the embedding.
        residual_scale: Factor of what attention and MLP add.
        logits_scale: Factor of the logits.
    """

    num_layers: int
    hidden: int
    seq: int
    vocab: int
    attention: Attention
    mlp: Mlp
    norm: Norm
    arrangement: Literal["pre", "post", "parallel", "parallel-shared"]
    names: Names
    tied: bool = False
    head_bias: bool = False
    positions: int = 0
    first_position: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.positions and self.first_position + self.seq > self.positions:
            raise ModelError(
                f"the model has learned positions for {self.positions - self.first_position} tokens, "
                f"fewer than the {self.seq} of a sequence",
                hint=f"--set seq={self.positions - self.first_position}, or less",
            )

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq


def build(name: str, config: DecoderConfig) -> "onnx.ModelProto":
    """Return the graph from `input_ids` int64 [batch, seq] to `logits` [batch, seq, vocab]."""
    return _Decoder(name, config).model()


class _Decoder:
    """Builds one decoder."""

    def __init__(self, name: str, config: DecoderConfig) -> None:
        self.g = Builder(name)
        self.config = config
        self.tables: tuple[str, str, str] | None = None

    def model(self) -> "onnx.ModelProto":
        g, config, names = self.g, self.config, self.config.names
        tokens = g.input("input_ids", ("batch", config.seq), "int64")
        embedding = g.parameter(f"{names.embed}.weight", (config.vocab, config.hidden))
        self._declare_tables(tokens)
        x = self._scaled(g.op("Gather", embedding, tokens, name="embed", axis=0), config.embedding_scale)
        if config.positions:
            x = g.op("Add", x, self._learned_positions(), name="embed.placed")
        for index in range(config.num_layers):
            x = self._block(x, f"layers.{index}", names.layer.format(index))
        x = self._norm(x, "final_norm", names.final_norm)
        logits = "logits" if config.logits_scale == 1.0 else "logits.raw"
        if config.tied:
            layers.tied_head(g, x, embedding, logits)
        else:
            self._linear(x, logits, names.head, config.hidden, config.vocab, bias=config.head_bias)
        if config.logits_scale != 1.0:
            g.op("Mul", logits, g.scales((config.logits_scale,)), name="logits")
        return g.model({"logits": ("batch", config.seq, config.vocab)})

    def _declare_tables(self, tokens: str) -> None:
        """Declare the rotary tables, one for all blocks."""
        g, rope = self.g, self.config.attention.rope
        if rope is None:
            return
        shape = (1, self.config.seq, rope.size // 2)
        values = f"{rope.amplitude!r}:" + ",".join(map(repr, rope.frequencies().tolist()))
        cos, sin = (g.buffer(f"rope.{part}", shape, f"angles-{part} {values}") for part in ("cos", "sin"))
        self.tables = (cos, sin, g.batch_shape(tokens, 3))

    def _learned_positions(self) -> str:
        g, config = self.g, self.config
        table = g.parameter(f"{config.names.positions}.weight", (config.positions, config.hidden))
        if config.first_position == 0 and config.seq == config.positions:
            return table
        first, last = config.first_position, config.first_position + config.seq
        return g.op("Slice", table, g.constant((first,)), g.constant((last,)), g.constant((0,)), name="embed.positions")

    def _block(self, x: str, name: str, weights: str) -> str:
        config, names = self.config, self.config.names

        def norm(value: str, part: str, of: str) -> str:
            return self._norm(value, f"{name}.{part}", f"{weights}.{of}")

        def added(value: str, part: str, term: str) -> str:
            return self.g.op("Add", value, self._scaled(term, config.residual_scale), name=f"{name}.{part}")

        match config.arrangement:
            case "pre":
                y = self._attention(norm(x, "attn_norm", names.attention_norm), f"{name}.attn", weights)
                x = added(x, "attn_residual", y)
                y = self._mlp(norm(x, "mlp_norm", names.mlp_norm), f"{name}.mlp", weights)
                return added(x, "mlp_residual", y)
            case "post":
                y = norm(self._attention(x, f"{name}.attn", weights), "attn_norm", names.attention_norm)
                x = added(x, "attn_residual", y)
                y = norm(self._mlp(x, f"{name}.mlp", weights), "mlp_norm", names.mlp_norm)
                return added(x, "mlp_residual", y)
            case "parallel" | "parallel-shared":
                normed = norm(x, "attn_norm", names.attention_norm)
                own = config.arrangement == "parallel"
                y = self._attention(normed, f"{name}.attn", weights)
                z = self._mlp(norm(x, "mlp_norm", names.mlp_norm) if own else normed, f"{name}.mlp", weights)
                return added(x, "residual", self.g.op("Add", y, z, name=f"{name}.both"))

    def _attention(self, x_BSd: str, name: str, weights: str) -> str:
        g, config, names, part = self.g, self.config, self.config.names, self.config.attention
        width, seq = part.heads * part.size, config.seq

        def project(which: str, index: int, heads: int) -> str:
            fused = bool(part.fused)
            of = f"{weights}.{names.qkv[0 if fused else index]}"
            flat = self._linear(
                x_BSd, f"{name}.{which}", of, config.hidden, heads * part.size,
                bias=part.qkv_bias, part=f".{which}" if fused else "", transposed=part.transposed,
            )  # fmt: skip
            if which != "v" and part.qk_norm == "width":
                flat = self._norm(flat, f"{name}.{which}_norm", f"{weights}.{names.qk_norm[index]}", heads * part.size)
            if which != "v" and part.qk_norm == "head":
                flat = g.op("Reshape", flat, g.constant((0, seq, heads, part.size)), name=f"{name}.{which}.split")
                flat = self._norm(flat, f"{name}.{which}_norm", f"{weights}.{names.qk_norm[index]}", part.size)
                return g.op("Transpose", flat, name=f"{name}.{which}.heads", perm=(0, 2, 1, 3))
            return layers.split_heads(g, flat, f"{name}.{which}", seq, heads, part.size)

        q, k = project("q", 0, part.heads), project("k", 1, part.kv_heads)
        v = project("v", 2, part.kv_heads)
        if self.tables is not None and part.rope is not None:
            # RotaryEmbedding takes tables [B, S, D/2]; broadcast in every block, so that no table travels between
            # pipeline stages.
            cos, sin, shape = self.tables
            cos, sin = g.op("Expand", cos, shape, name=f"{name}.cos"), g.op("Expand", sin, shape, name=f"{name}.sin")
            turned = {} if part.rope.size == part.size else {"rotary_embedding_dim": part.rope.size}
            q = g.op("RotaryEmbedding", q, cos, sin, name=f"{name}.q.rotated", **turned)
            k = g.op("RotaryEmbedding", k, cos, sin, name=f"{name}.k.rotated", **turned)
        scale = {} if part.scale is None else {"scale": part.scale}
        y_BHSD = g.op("Attention", q, k, v, name=f"{name}.core", is_causal=1, **scale)
        merged = layers.merge_heads(g, y_BHSD, f"{name}.core", seq, width)
        return self._linear(
            merged, f"{name}.out", f"{weights}.{names.out}", width, config.hidden,
            bias=part.out_bias, transposed=part.transposed,
        )  # fmt: skip

    def _mlp(self, x: str, name: str, weights: str) -> str:
        config, names, part = self.config, self.config.names, self.config.mlp

        def project(which: str, index: int, value: str, num_in: int, num_out: int, fused: bool = False) -> str:
            return self._linear(
                value, f"{name}.{which}", f"{weights}.{names.mlp[index]}", num_in, num_out,
                bias=part.bias, part=f".{which}" if fused else "", transposed=part.transposed,
            )  # fmt: skip

        hidden, width, last = config.hidden, part.width, len(names.mlp) - 1
        if not part.gated:
            inner = self._activated(project("up", 0, x, hidden, width), name)
        else:
            gate = self._activated(project("gate", 0, x, hidden, width, part.fused), name)
            up = project("up", 0 if part.fused else 1, x, hidden, width, part.fused)
            inner = self.g.op("Mul", gate, up, name=f"{name}.gated")
        return project("down", last, inner, width, hidden)

    def _activated(self, x: str, name: str) -> str:
        g = self.g
        match self.config.mlp.activation:
            case "silu":
                return g.op("Swish", x, name=f"{name}.swish")
            case "gelu":
                return g.op("Gelu", x, name=f"{name}.gelu", approximate="none")
            case "gelu-tanh":
                return g.op("Gelu", x, name=f"{name}.gelu", approximate="tanh")
            case "relu":
                return g.op("Relu", x, name=f"{name}.relu")
            case "relu-squared":
                positive = g.op("Relu", x, name=f"{name}.relu")
                return g.op("Mul", positive, positive, name=f"{name}.squared")

    def _norm(self, x: str, name: str, weight: str, width: int = 0) -> str:
        """Return `x` normalised over its last dim, of `width` elements or those of the model."""
        g, norm = self.g, self.config.norm
        shape = (width or self.config.hidden,)
        scale = g.parameter(f"{weight}.weight", shape, f"constant {0 if norm.from_zero else 1}")
        if norm.from_zero:
            scale = g.op("Add", scale, g.scales((1.0,)), name=f"{name}.scale")
        if norm.kind == "rms":
            return g.op("RMSNormalization", x, scale, name=name, axis=-1, epsilon=norm.epsilon)
        bias = (g.parameter(f"{weight}.bias", shape, "constant 0"),) if norm.bias else ()
        return g.op("LayerNormalization", x, scale, *bias, name=name, axis=-1, epsilon=norm.epsilon)

    def _linear(
        self,
        x: str,
        name: str,
        weight: str,
        num_in: int,
        num_out: int,
        *,
        bias: bool,
        part: str = "",
        transposed: bool = True,
    ) -> str:
        """Return `x @ weight [num_in, num_out] + bias`; `part` of the weight the checkpoint has under that name."""
        g = self.g
        end = TRANSPOSED if transposed else ""
        matrix = g.parameter(f"{weight}.weight{part}{end}", (num_in, num_out), f"normal {num_in**-0.5:.6g}")
        if not bias:
            return g.op("MatMul", x, matrix, name=name)
        product = g.op("MatMul", x, matrix, name=f"{name}.matmul")
        return g.op("Add", product, g.parameter(f"{weight}.bias{part}", (num_out,), "constant 0"), name=name)

    def _scaled(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self.g.op("Mul", x, self.g.scales((factor,)), name=f"{x}.scaled")

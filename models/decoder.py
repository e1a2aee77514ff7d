"""Decoders of one build: an embedding, a stack of blocks, each attention and an MLP or experts, and a head.

What the parts are, a `DecoderConfig` says. Dims: B batch, S sequence, d model width, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.attention import grouped_attention, latent_attention
from autopar.models.decoder_config import Block, DecoderConfig, Experts, LatentAttention, Scan
from autopar.models.experts import experts, mlp
from autopar.models.scans import scan
from autopar.models.writer import Writer

if TYPE_CHECKING:
    import onnx


def build(name: str, config: DecoderConfig) -> "onnx.ModelProto":
    """Return the graph from `input_ids` int64 [batch, seq] to `logits` [batch, seq, vocab].

    With multi-token prediction of depth D there are inputs `input_ids_1` to `input_ids_D`, the tokens that many places
    later, and `logits` are [batch, 1 + D, seq, vocab].
    """
    w = Writer(name, config)
    tokens = w.g.input("input_ids", ("batch", config.seq), "int64")
    return write_decoder(w, tokens, config)


def write_decoder(
    w: Writer, tokens: str, config: DecoderConfig, before: str = "", added: Sequence[str] = (), num_before: int = 0
) -> "onnx.ModelProto":
    """Return the graph with a decoder and its head, behind what was written before.

    Args:
        w: Where to write.
        tokens: The tokens, int64 [B, S'].
        config: The decoder.
        before: What comes before the tokens in the sequence [B, S - S', d]; "" if that is nothing.
        added: What is added to `before` behind the first blocks, of its shape.
        num_before: Length of `before`.
    """
    g, names = w.g, config.names
    embedding = g.parameter(f"{names.embed}.weight", (config.vocab, config.hidden))
    w.declare_tables(tokens, [block.rope for block in config.blocks if block.rope is not None])
    x = w.scaled(g.op("Gather", embedding, tokens, name="embed", axis=0), config.embedding_scale)
    if names.embed_norm:
        x = w.norm(x, "embed.norm", names.embed_norm)
    if before:
        x = g.op("Concat", before, x, name="embed.sequence", axis=1)
    if config.positions:
        x = g.op("Add", x, _learned_positions(w, config), name="embed.placed")
    for index, block in enumerate(config.blocks):
        x = transformer_block(w, x, f"layers.{index}", names.layer.format(index), block)
        if index < len(added):
            pads = g.constant((0, 0, 0, 0, config.seq - num_before, 0))
            x = g.op("Add", x, g.op("Pad", added[index], pads, name=f"tap.{index}"), name=f"tap.{index}.residual")
    x = w.norm(x, "final_norm", names.final_norm)
    shape: tuple[int | str, ...] = ("batch", config.seq, config.vocab)
    if config.mtp:
        x = _with_predictions(w, x, embedding, config)
        shape = ("batch", 1 + config.mtp, config.seq, config.vocab)
    changed = config.logits_scale != 1.0 or config.logits_cap
    logits = "logits.raw" if changed else "logits"
    if config.tied:
        layers.tied_head(g, x, embedding, logits)
    else:
        w.linear(x, logits, names.head, config.hidden, config.vocab, bias=config.head_bias)
    if config.logits_cap:
        small = g.op("Mul", logits, g.scales((config.logits_scale / config.logits_cap,)), name="logits.small")
        bent = g.op("Tanh", small, name="logits.bent")
        g.op("Mul", bent, g.scales((config.logits_cap,)), name="logits")
    elif config.logits_scale != 1.0:
        g.op("Mul", logits, g.scales((config.logits_scale,)), name="logits")
    return g.model({"logits": shape})


def _with_predictions(w: Writer, x_BSd: str, embedding_Vd: str, config: DecoderConfig) -> str:
    """Return the normalised outputs of the decoder and of its modules of multi-token prediction, [B, 1 + D, S, d].

    A module joins what the one before it made with the embedding of the next token, both normalised, projects that to
    the model width and applies one more block. Embedding and head are the decoder's own. Source: DeepSeek-AI 2024
    (DeepSeek-V3), section 2.2; names and order of the joined parts are those of the released checkpoint.

    Args:
        w: Where to write.
        x_BSd: Normalised output of the decoder.
        embedding_Vd: Token embedding.
        config: The decoder.
    """
    g, hidden, axis = w.g, config.hidden, w.g.constant((1,))
    outputs = [x_BSd]
    for depth in range(1, config.mtp + 1):
        name, weights = f"mtp.{depth - 1}", config.names.layer.format(config.num_layers + depth - 1)
        tokens = g.input(f"input_ids_{depth}", ("batch", config.seq), "int64")
        embedded = w.scaled(g.op("Gather", embedding_Vd, tokens, name=f"{name}.embed", axis=0), config.embedding_scale)
        parts = (
            w.norm(embedded, f"{name}.embed_norm", f"{weights}.enorm"),
            w.norm(outputs[-1], f"{name}.previous_norm", f"{weights}.hnorm"),
        )
        joined = g.op("Concat", *parts, name=f"{name}.joined", axis=-1)
        x = w.linear(joined, f"{name}.projected", f"{weights}.eh_proj", 2 * hidden, hidden)
        x = transformer_block(w, x, name, weights, config.blocks[-1])
        outputs.append(w.norm(x, f"{name}.final_norm", f"{weights}.shared_head.norm"))
    rows = [g.op("Unsqueeze", x, axis, name=f"{x}.row") for x in outputs]
    return g.op("Concat", *rows, name="predictions", axis=1)


def _learned_positions(w: Writer, config: DecoderConfig) -> str:
    g = w.g
    table = g.parameter(f"{config.names.positions}.weight", (config.positions, config.hidden))
    if config.first_position == 0 and config.seq == config.positions:
        return table
    first, last = config.first_position, config.first_position + config.seq
    return g.op("Slice", table, g.constant((first,)), g.constant((last,)), g.constant((0,)), name="embed.positions")


def transformer_block(w: Writer, x: str, name: str, weights: str, block: Block) -> str:
    """Return what a block makes of `x` [B, S, d]: attention and an MLP or experts, with norms as the stack has them.

    Args:
        w: Where to write.
        x: What enters the block.
        name: Prefix of all ops.
        weights: Prefix of all weights.
        block: The block.
    """
    config, names = w.config, w.config.names

    def norm(value: str, part: str, of: str) -> str:
        return w.norm(value, f"{name}.{part}", f"{weights}.{of}")

    def added(value: str, part: str, term: str) -> str:
        return w.g.op("Add", value, w.scaled(term, config.residual_scale), name=f"{name}.{part}")

    def attend(value: str) -> str:
        if isinstance(block.attention, Scan):
            return scan(w, value, f"{name}.scan", f"{weights}.{names.scan}", block.attention)
        if isinstance(block.attention, LatentAttention):
            return latent_attention(w, value, f"{name}.attn", weights, block.attention)
        assert block.attention is not None, "only blocks with attention attend"
        return grouped_attention(w, value, f"{name}.attn", weights, block.attention, names)

    def feed(value: str) -> str:
        if isinstance(block.mlp, Experts):
            return experts(w, value, f"{name}.moe", weights, block.mlp)
        assert block.mlp is not None, "only blocks with an MLP feed"
        return mlp(w, value, f"{name}.mlp", weights, block.mlp, names.mlp)

    match config.arrangement:
        case "pre":
            if block.attention is not None:
                x = added(x, "attn_residual", attend(norm(x, "attn_norm", names.attention_norm)))
            if block.mlp is not None:
                x = added(x, "mlp_residual", feed(norm(x, "mlp_norm", names.mlp_norm)))
            return x
        case "both":
            y = norm(attend(norm(x, "attn_norm", names.attention_norm)), "attn_post_norm", names.post_norms[0])
            x = added(x, "attn_residual", y)
            y = norm(feed(norm(x, "mlp_norm", names.mlp_norm)), "mlp_post_norm", names.post_norms[1])
            return added(x, "mlp_residual", y)
        case "post":
            x = added(x, "attn_residual", norm(attend(x), "attn_norm", names.attention_norm))
            return added(x, "mlp_residual", norm(feed(x), "mlp_norm", names.mlp_norm))
        case "after":
            x = norm(added(x, "attn_residual", attend(x)), "attn_norm", names.attention_norm)
            return norm(added(x, "mlp_residual", feed(x)), "mlp_norm", names.mlp_norm)
        case "parallel" | "parallel-shared":
            normed = norm(x, "attn_norm", names.attention_norm)
            y = attend(normed)
            z = feed(norm(x, "mlp_norm", names.mlp_norm) if config.arrangement == "parallel" else normed)
            return added(x, "residual", w.g.op("Add", y, z, name=f"{name}.both"))

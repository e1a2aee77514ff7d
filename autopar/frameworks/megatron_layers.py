"""What the layers of a decoder are, in the arguments of Megatron-LM; and what of them it has no argument for."""

from collections.abc import Iterable, Iterator

from autopar.models.decoder_config import Attention, DecoderConfig, Experts, LatentAttention

Argument = tuple[str, int | float | str | bool]
_ROTARY_BASE = 10000.0
"""Megatron-LM's default."""


def layer_arguments(decoder: DecoderConfig, lost: list[str]) -> Iterable[Argument]:
    """Yield the arguments that make the layers of a decoder.

    Args:
        decoder: The decoder.
        lost: Added to: what there is no argument for.
    """
    attention = decoder.blocks[0].attention
    assert isinstance(attention, Attention | LatentAttention), "sizes of other decoders are not known"
    yield from _norms(decoder)
    if isinstance(attention, LatentAttention):
        yield from _latent(attention)
    else:
        yield from _grouped(attention)
    ropes = {block.rope for block in decoder.blocks}
    if ropes == {None}:
        yield "--position-embedding-type", "learned_absolute" if decoder.positions else "none"
    else:
        yield "--position-embedding-type", "rope"
    for rope in list(ropes - {None})[:1]:
        assert rope is not None, "it was taken out"
        if rope.theta != _ROTARY_BASE:
            yield "--rotary-base", int(rope.theta)
        if isinstance(attention, Attention) and rope.size != attention.size:
            yield "--rotary-percent", rope.size / attention.size
    yield from _mlps(decoder)
    if decoder.mtp:
        yield "--mtp-num-layers", decoder.mtp
    lost += _special(decoder)


def _norms(decoder: DecoderConfig) -> Iterator[Argument]:
    yield "--normalization", "RMSNorm" if decoder.norm.kind == "rms" else "LayerNorm"
    yield "--norm-epsilon", decoder.norm.epsilon
    if decoder.norm.from_zero:
        yield "--apply-layernorm-1p", True


def _latent(attention: LatentAttention) -> Iterator[Argument]:
    yield "--multi-latent-attention", True
    if attention.query_rank:
        yield "--q-lora-rank", attention.query_rank
    yield "--kv-lora-rank", attention.latent_rank
    yield "--qk-head-dim", attention.plain
    yield "--qk-pos-emb-head-dim", attention.rope.size
    yield "--v-head-dim", attention.value
    yield "--qk-layernorm", True
    if not attention.bias:
        yield "--disable-bias-linear", True


def _grouped(attention: Attention) -> Iterator[Argument]:
    if attention.qk_norm:
        yield "--qk-layernorm", True
    if not attention.out_bias:
        yield "--disable-bias-linear", True
        if attention.qkv_bias:
            yield "--add-qkv-bias", True


def _mlps(decoder: DecoderConfig) -> Iterator[Argument]:
    mixture = next((block.mlp for block in decoder.blocks if isinstance(block.mlp, Experts)), None)
    dense = next((block.mlp for block in decoder.blocks if not isinstance(block.mlp, Experts)), None)
    if mixture is not None or (dense is not None and dense.gated and dense.activation == "silu"):
        yield "--swiglu", True
    elif dense is not None and dense.activation == "relu-squared":
        yield "--squared-relu", True
    if mixture is None:
        return
    yield "--moe-ffn-hidden-size", mixture.width
    pattern = [int(isinstance(block.mlp, Experts)) for block in decoder.blocks]
    if not all(pattern):
        yield "--moe-layer-freq", _pattern(pattern)
    if mixture.shared:
        yield "--moe-shared-expert-intermediate-size", mixture.shared
    if mixture.scores == "sigmoid":
        yield "--moe-router-score-function", "sigmoid"
    elif mixture.scores == "softmax" and not mixture.normalized:
        yield "--moe-router-pre-softmax", True
    if mixture.correction:
        yield "--moe-router-enable-expert-bias", True
    if mixture.scale != 1.0:
        yield "--moe-router-topk-scaling-factor", mixture.scale
    if mixture.groups > 1:
        yield "--moe-router-num-groups", mixture.groups
        yield "--moe-router-group-topk", mixture.chosen_groups


def _pattern(layers: list[int]) -> str:
    """Return runs of equal layers in the form that is evaluated there.

    >>> _pattern([0, 1, 1])
    '([0]*1+[1]*2)'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    return f"({'+'.join(f'[{kind}]*{count}' for kind, count in runs)})"


def _special(decoder: DecoderConfig) -> Iterator[str]:
    """Yield what has to be checked by hand, a phrase each."""
    if decoder.arrangement != "pre":
        yield f"norms that are not before attention and MLP alone ({decoder.arrangement})"
    if decoder.embedding_scale != 1.0 or decoder.residual_scale != 1.0 or decoder.logits_scale != 1.0:
        yield "factors of embedding, residuals or logits"
    attentions = [block.attention for block in decoder.blocks]
    grouped = [own for own in attentions if isinstance(own, Attention)]
    ropes = {block.rope for block in decoder.blocks}
    if len(ropes) > 1:
        yield "rotary positions that differ between layers"
    scalings = sorted({rope.scaling for rope in ropes if rope is not None} - {"default"})
    if scalings:
        yield f"scaled rotary positions ({', '.join(scalings)}): set the tokenizer's and the model's context"
    if any(own.window or own.chunk for own in grouped):
        sizes = sorted({own.window or own.chunk for own in grouped} - {0})
        yield f"attention that sees the last {' or '.join(map(str, sizes))} positions in some layers"
    if any(own.slopes for own in grouped):
        yield "scores that fall with distance (ALiBi)"
    if decoder.names.embed_norm:
        yield "a norm of the embedding"
    if any(own.sinks for own in grouped):
        yield "sinks of the softmax"
    if decoder.logits_cap or any(own.softcap for own in grouped):
        yield "soft caps of scores or logits"
    if any(own.qk_norm in ("width", "unit") for own in grouped):
        yield "norms of queries and keys other than one with a scale per head"
    mixtures = [block.mlp for block in decoder.blocks if isinstance(block.mlp, Experts)]
    if any(own.bias or own.limit for own in mixtures):
        yield "biases and clipping of experts"
    if any(own.scaled_input or own.shared_gate for own in mixtures):
        yield "weights that scale what goes into experts, or the shared ones"

"""What a job sets on a decoder: packed documents, an uneven load of experts, further tokens, caches of earlier ones."""

from dataclasses import replace

from autopar.errors import ModelError
from autopar.models.decoder_config import Attention, DecoderConfig, Experts, LatentAttention, Scan


def packed(decoder: DecoderConfig, documents: int) -> DecoderConfig:
    """Return a decoder whose sequences hold several documents of equal length, which do not see each other.

    Raises:
        ModelError: If it has scans, whose states would pass from document to document, or scores that fall with
            distance.
    """
    if documents == 1:
        return decoder
    length = -(-decoder.seq // documents)
    blocks = []
    for own in decoder.blocks:
        if isinstance(own.attention, Scan):
            raise ModelError(
                f"{documents} documents per sequence cannot be kept apart by a scan",
                hint="leave docs_per_sequence at 1, and state the length of a document as seq",
            )
        if isinstance(own.attention, Attention) and own.attention.slopes:
            raise ModelError(
                f"{documents} documents per sequence are not known to attention whose scores fall with distance",
                hint="leave docs_per_sequence at 1, and state the length of a document as seq",
            )
        if own.attention is not None:
            near = replace(own.attention, chunk=min(length, own.attention.chunk or length))
            own = replace(own, attention=near)
        blocks.append(own)
    return replace(decoder, blocks=tuple(blocks))


def decoding(decoder: DecoderConfig, cached: int) -> DecoderConfig:
    """Return a decoder whose sequences go on behind tokens whose keys and values are known.

    A cache holds what the sequence may still see: of a window its last tokens, of chunks those of the last one. Scans
    go on from their states, whatever the number of tokens before.

    Args:
        decoder: The decoder, whose sequence has these tokens, too.
        cached: Tokens before; 0 for none.

    Raises:
        ModelError: If it has scores that fall with distance, or modules of multi-token prediction.
    """
    if not cached:
        return decoder
    parts = [own.attention for own in decoder.blocks]
    for what, is_there in (
        ("scores that fall with distance", any(isinstance(part, Attention) and part.slopes for part in parts)),
        ("multi-token prediction", bool(decoder.mtp)),
    ):
        if is_there:
            raise ModelError(f"steps of decoding of a model with {what} are not known", hint="leave cached out")
    blocks = []
    for own in decoder.blocks:
        part = own.attention
        rope = None if own.rope is None else replace(own.rope, first=cached)
        if isinstance(part, Attention):
            kept = min(cached, part.window - 1) if part.window else cached % part.chunk if part.chunk else cached
            own = replace(own, attention=replace(part, rope=rope, cached=kept, first=cached))
        elif isinstance(part, LatentAttention):
            assert rope is not None, "latent attention has a rotated part"
            kept = cached % part.chunk if part.chunk else cached
            own = replace(own, attention=replace(part, rope=rope, cached=kept))
        elif part is not None:
            own = replace(own, attention=replace(part, continues=True))
        blocks.append(own)
    first, seq = decoder.first_position + cached, decoder.seq - cached
    return replace(decoder, blocks=tuple(blocks), first_position=first, seq=seq)


def unbalanced(decoder: DecoderConfig, imbalance: float) -> DecoderConfig:
    """Return a decoder whose fullest device has so many times the tokens of an even load of experts.

    Raises:
        ModelError: If it is below 1, or above it without experts.
    """
    if imbalance == 1.0:
        return decoder
    if not imbalance >= 1.0 or not any(isinstance(own.mlp, Experts) for own in decoder.blocks):
        raise ModelError(
            f"an expert imbalance of {imbalance:g} is that of no model: it is 1 or more, of a mixture of experts",
            hint="--expert-imbalance 1.2 gives the fullest device 1.2 times the tokens of an even load",
        )
    blocks = (
        replace(own, mlp=replace(own.mlp, imbalance=imbalance)) if isinstance(own.mlp, Experts) else own
        for own in decoder.blocks
    )
    return replace(decoder, blocks=tuple(blocks))


def predicting(decoder: DecoderConfig, depth: int) -> DecoderConfig:
    """Return a decoder with modules of multi-token prediction, whose blocks are equal to the last one of the decoder.

    Args:
        decoder: The decoder.
        depth: Further tokens that are predicted; 0 for none.

    Raises:
        ModelError: If its last block is not both attention and MLP.
    """
    if depth and (decoder.blocks[-1].attention is None or decoder.blocks[-1].mlp is None):
        raise ModelError(
            "the blocks of this model are attention, scan or MLP alone: which of them predicts further tokens is not "
            "known",
            hint="leave mtp out",
        )
    return replace(decoder, mtp=depth)


def with_settings(decoder: DecoderConfig, documents: int, imbalance: float, depth: int, cached: int) -> DecoderConfig:
    """Return a decoder as a job sets it; arguments as of `packed`, `unbalanced`, `predicting` and `decoding`.

    Raises:
        ModelError: If they do not fit the decoder, or each other.
    """
    if cached and documents > 1:
        raise ModelError(
            f"{documents} documents per sequence behind a cache of one", hint="leave docs_per_sequence or cached out"
        )
    return decoding(predicting(unbalanced(packed(decoder, documents), imbalance), depth), cached)

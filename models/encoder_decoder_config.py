"""Records of encoder-decoders: two stacks of blocks, of which the second attends to what the first makes."""

from dataclasses import dataclass
from math import log

import numpy as np

from autopar.errors import ModelError
from autopar.models.decoder_config import Arrangement, Attention, Block, Names, Norm


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """A trained bias of scores per head and bucket of distances, shared by the blocks of a stack.

    Source of the buckets: Raffel et al. 2020, section 2.1; transformers, `T5Attention._relative_position_bucket`.

    Attributes:
        table: Name of the biases [buckets, heads].
        buckets: Number of buckets.
        reach: Distance from which on all are in one bucket.
        both_ways: Whether later keys have buckets of their own, half of them.
    """

    table: str
    buckets: int
    reach: int
    both_ways: bool

    def __post_init__(self) -> None:
        exact = self.buckets // (4 if self.both_ways else 2)
        if exact < 1 or self.reach <= exact:
            raise ModelError(
                f"{self.buckets} buckets do not cover distances up to {self.reach}",
                hint="relative_attention_max_distance is above half of relative_attention_num_buckets, at least 4",
            )

    def bucket_of_distance(self) -> tuple[int, ...]:
        """Return the bucket of each distance from query to key, -reach to reach.

        Half of the buckets of a direction are for one distance each, the others grow logarithmically; logarithms are in
        float32, as in transformers.
        """
        distance = np.arange(-self.reach, self.reach + 1)
        count = self.buckets // 2 if self.both_ways else self.buckets
        first = count * (distance > 0) if self.both_ways else np.zeros_like(distance)
        size = np.abs(distance) if self.both_ways else np.maximum(-distance, 0)
        exact = count // 2
        ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(log(self.reach / exact))
        grown = exact + (ratio * np.float32(count - exact)).astype(np.int64)
        buckets = first + np.where(size < exact, size, np.minimum(grown, count - 1))
        return tuple(buckets.tolist())


@dataclass(frozen=True, slots=True)
class Side:
    """The stack of blocks of an encoder or a decoder.

    Attributes:
        blocks: Self-attention and MLP of each block.
        hidden: Model width.
        seq: Length of the sequence.
        norm: Every norm.
        names: Names of the weights.
        relative: Biases of the scores of self-attention; None without.
        positions: Rows of the table of positions; 0 without one.
        positions_are_trained: Whether that table is; else it holds sines and cosines.
        arrangement: Where norms stand.
        residual_scale: Factor of what attention and MLP add.
    """

    blocks: tuple[Block, ...]
    hidden: int
    seq: int
    norm: Norm
    names: Names
    relative: RelativePositions | None = None
    positions: int = 0
    positions_are_trained: bool = True
    arrangement: Arrangement = "pre"
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.positions and self.seq > self.positions:
            raise ModelError(
                f"the model has positions for {self.positions} tokens, fewer than the {self.seq} of a sequence",
                hint=f"--set seq={self.positions}, or less",
            )


@dataclass(frozen=True, slots=True)
class Audio:
    """Log-mel features of sound, brought to half their frames by two convolutions (Radford et al. 2022).

    Attributes:
        channels: Features of a frame.
        convolutions: Names of the convolutions; both of width 3, the second of stride 2.
    """

    channels: int
    convolutions: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Cross:
    """Attention of each block of the decoder to the encoder's result, between its self-attention and its MLP.

    Attributes:
        attention: The attention.
        names: Names of its norm (`attention_norm`) and projections (`qkv`, `out`).
    """

    attention: Attention
    names: Names


@dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """An encoder-decoder whose blocks have norms before attention and MLP.

    Attributes:
        encoder: Its encoder.
        decoder: Its decoder.
        cross: Attention of the decoder to the encoder.
        audio: What the encoder reads; None for tokens, embedded as those of the decoder.
        vocab: Tokens in the vocabulary.
        tied: Whether the head is the token embedding.
        logits_scale: Factor of what enters the head.
    """

    encoder: Side
    decoder: Side
    cross: Cross
    vocab: int
    audio: Audio | None = None
    tied: bool = True
    logits_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        """Blocks of encoder and decoder."""
        return len(self.encoder.blocks) + len(self.decoder.blocks)

    @property
    def sample_size(self) -> int:
        """Tokens per sequence of the decoder."""
        return self.decoder.seq

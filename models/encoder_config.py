"""Records of encoders: what makes a sequence of an input, the blocks, and what is made of their result."""

from dataclasses import dataclass
from typing import Literal

from autopar.errors import ModelError
from autopar.models.decoder_config import Activation, Arrangement, Block, Mlp, Names, Norm


@dataclass(frozen=True, slots=True)
class Tokens:
    """Embedding of tokens: the sum of those of token, position and, if there are segments, segment 0, normalised.

    Attributes:
        vocab: Tokens in the vocabulary.
        positions: Rows of the table of positions.
        first_position: Row of the first token.
        segments: Rows of the table of segments; 0 without one.
        names: Tables of tokens, positions and segments, and the norm; "" for what is not there.
    """

    vocab: int
    positions: int
    first_position: int
    segments: int
    names: tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Patches:
    """Embedding of the patches of an image, with learned positions.

    Attributes:
        channels: Channels of the image.
        image: Height and width of the image in pixels.
        patch: Height and width of a patch in pixels.
        bias: Whether the projection of patches has one.
        class_token: Name of a vector that is put before the patches, in full; "" without.
        class_shape: Its shape.
        projection: Name of the projection.
        positions: Name of the table of positions, in full.
        positions_rank: Dims of that table: [S, d], or [1, S, d].
        norm: Name of a norm of the whole; "" without.
        class_last: Whether the class token is put behind the patches.
        flat_kernel: Whether the checkpoint holds the projection as a matrix [d, channels x height x width].
    """

    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]
    bias: bool
    class_token: str
    class_shape: tuple[int, ...]
    projection: str
    positions: str
    positions_rank: Literal[2, 3]
    norm: str = ""
    class_last: bool = False
    flat_kernel: bool = False

    def __post_init__(self) -> None:
        if not all(self.grid):
            raise ModelError(
                f"an image of {self.image[0]} x {self.image[1]} pixels holds no patch of "
                f"{self.patch[0]} x {self.patch[1]}",
                hint="patch_size is at most image_size",
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Whole patches from top to bottom and from left to right; pixels beyond them are not used."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def seq(self) -> int:
        """Length of the sequence."""
        return self.grid[0] * self.grid[1] + bool(self.class_token)


@dataclass(frozen=True, slots=True)
class FlatPatches:
    """Embedding of patches that come as rows of their pixels, in squares that are merged into one token later.

    Attributes:
        pixels: Numbers of a patch, those of all channels and moments.
        grid: Patches from top to bottom and from left to right.
        block: Side of the squares of patches that follow each other.
        projection: Name of the projection.
        bias: Whether it has one.
        positions: Name of a square table of positions, with one row per patch of an image of its size; "" without.
        window: Side of the windows, in patches, that blocks see the patches in; 0 without windows.
    """

    pixels: int
    grid: tuple[int, int]
    block: int
    projection: str
    bias: bool
    positions: str = ""
    window: int = 0

    def __post_init__(self) -> None:
        if any(side % self.block for side in self.grid):
            raise ModelError(
                f"{self.grid[0]} x {self.grid[1]} patches of an image are not squares of {self.block} x {self.block}",
                hint="image_size has to be a multiple of patch_size times spatial_merge_size",
            )

    @property
    def seq(self) -> int:
        """Length of the sequence."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True)
class MaskedLanguageHead:
    """Logits of every token: a projection, a nonlinearity, a norm, the transposed embedding, a bias.

    Attributes:
        activation: Nonlinearity.
        names: Projection, norm, and the bias in full.
    """

    activation: Activation
    names: tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class OneToken:
    """What is made of the first or the last element of the sequence: the normalised element, or a projection of that.

    Attributes:
        norm: Name of the norm.
        projection: Name of a projection; "" without.
        width: Elements it makes; 0 without.
        bias: Whether it has a bias.
        output: Name of the model's output.
        is_last: Whether it is the last element.
    """

    norm: str
    projection: str
    width: int
    bias: bool
    output: str
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPool:
    """What a learned query makes of the normalised sequence: attention, then a norm and an MLP whose result is added.

    Weights are called as in SigLIP, those of the attention as in PyTorch's `MultiheadAttention`.

    Attributes:
        norm: Name of the norm of the sequence.
        prefix: What the other names begin with.
        heads: Heads of the attention.
        mlp: The MLP.
        output: Name of the model's output.
    """

    norm: str
    prefix: str
    heads: int
    mlp: Mlp
    output: str


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """The normalised sequence itself.

    Attributes:
        norm: Name of the norm.
        output: Name of the model's output.
    """

    norm: str
    output: str


Head = MaskedLanguageHead | OneToken | AttentionPool | WholeSequence


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder.

    Attributes:
        embedding: What makes a sequence of the input.
        blocks: Attention and MLP of each block.
        hidden: Model width.
        seq: Length of the sequence.
        norm: Every norm.
        arrangement: Where norms of blocks stand.
        names: Names of the weights of blocks.
        head: What is made of the last block's result.
        residual_scale: Factor of what attention and MLP add.
    """

    embedding: Tokens | Patches | FlatPatches
    blocks: tuple[Block, ...]
    hidden: int
    seq: int
    norm: Norm
    arrangement: Arrangement
    names: Names
    head: Head
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.embedding, Tokens) and self.embedding.first_position + self.seq > self.embedding.positions:
            longest = self.embedding.positions - self.embedding.first_position
            raise ModelError(
                f"the model has learned positions for {longest} tokens, fewer than the {self.seq} of a sequence",
                hint=f"--set seq={longest}, or less",
            )

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.blocks)

    @property
    def sample_size(self) -> int:
        """Tokens or patches per sequence, or pixels of an image's height."""
        return self.embedding.image[0] if isinstance(self.embedding, Patches) else self.seq

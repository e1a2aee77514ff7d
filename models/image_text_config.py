"""Records of decoders that read images besides text: a vision tower, a projector, a decoder."""

from dataclasses import dataclass

from autopar.errors import ModelError
from autopar.models.decoder_config import Activation, DecoderConfig, Norm
from autopar.models.encoder_config import EncoderConfig, FlatPatches, Patches


@dataclass(frozen=True, slots=True)
class Projector:
    """Two projections with a nonlinearity between them, from the width of the tower to that of the decoder (LLaVA).

    Attributes:
        activation: Nonlinearity.
        bias: Whether projections have one.
        names: Names of the projections.
    """

    activation: Activation
    bias: bool
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Means of squares of patches, a norm and a projection (Gemma 3).

    Attributes:
        side: Patches of a square's side.
        norm: The norm.
        norm_name: Its name.
        projection: Name of the projection, in full.
    """

    side: int
    norm: Norm
    norm_name: str
    projection: str


@dataclass(frozen=True, slots=True)
class Merger:
    """Squares of patches joined into one row each, and two projections with a nonlinearity between them (Qwen-VL).

    Attributes:
        side: Patches of a square's side; they follow each other in the sequence.
        norm: Name of the norm.
        norm_behind: Whether rows are normalised after they are joined, not patches before.
        names: Names of the projections.
    """

    side: int
    norm: str
    norm_behind: bool
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class PixelShuffle:
    """Squares of patches joined into one row each, an MLP that ends in its nonlinearity, and a projection (Llama 4).

    Attributes:
        side: Patches of a square's side.
        inner: Elements inside the MLP.
        output: Elements that it makes.
        names: Names of its two projections and of the last one, none of which has a bias.
    """

    side: int
    inner: int
    output: int
    names: tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Tap:
    """What an inner layer of the tower adds to the patches of the decoder (DeepStack, Meng et al. 2024).

    Attributes:
        layer: Layer of the tower whose result is used.
        merger: What makes rows of the decoder's width of it. They are added behind the decoder's layer of the tap's
            number.
    """

    layer: int
    merger: Merger


@dataclass(frozen=True, slots=True)
class ImageTextConfig:
    """A decoder of sequences that begin with the patches of an image (Liu et al. 2023, LLaVA).

    Attributes:
        tower: The vision tower, of which only embedding and blocks are used, without its class token.
        projector: What makes tokens of the tower's result.
        decoder: The decoder; its sequence holds the patches and then the text.
        norm: Name of a norm of the tower's result; "" without.
        taps: What inner layers of the tower add to the first layers of the decoder.
    """

    tower: EncoderConfig
    projector: Projector | Pooled | Merger | PixelShuffle
    decoder: DecoderConfig
    norm: str = ""
    taps: tuple[Tap, ...] = ()

    def __post_init__(self) -> None:
        if any(side % self._side for side in self.grid):
            raise ModelError(
                f"{self.grid[0]} x {self.grid[1]} patches of an image are not squares of {self._side} x {self._side}",
                hint="correct image_size and patch_size",
            )
        if self.text < 1:
            raise ModelError(
                f"a sequence of {self.decoder.seq} tokens has no room for text behind the {self.patches} of an image",
                hint=f"--set seq={2 * self.patches}, tokens per sequence with those of the image",
            )
        if len(self.taps) > self.decoder.num_layers or any(tap.layer >= self.tower.num_layers for tap in self.taps):
            raise ModelError(
                f"a tower of {self.tower.num_layers} layers and a decoder of {self.decoder.num_layers} have no layers "
                f"for {len(self.taps)} taps",
                hint="correct deepstack_visual_indexes",
            )

    @property
    def _side(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return 1 if isinstance(self.projector, Projector) else self.projector.side

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of an image from top to bottom and from left to right."""
        assert isinstance(self.tower.embedding, Patches | FlatPatches), "a vision tower embeds patches"
        return self.tower.embedding.grid

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return self.grid[0] * self.grid[1] // self._side**2

    @property
    def text(self) -> int:
        """Tokens of text per sequence."""
        return self.decoder.seq - self.patches

    @property
    def num_layers(self) -> int:
        """Blocks of the decoder."""
        return self.decoder.num_layers

    @property
    def sample_size(self) -> int:
        """Tokens per sequence, those of the image included."""
        return self.decoder.seq

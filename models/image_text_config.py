"""Records of decoders that read images besides text: a vision tower, a projector, a decoder."""

from dataclasses import dataclass

from autopar.errors import ModelError
from autopar.models.decoder_config import Activation, DecoderConfig
from autopar.models.encoder_config import EncoderConfig


@dataclass(frozen=True, slots=True)
class Projector:
    """Two projections with a nonlinearity between them, from the width of the tower to that of the decoder.

    Attributes:
        activation: Nonlinearity.
        bias: Whether projections have one.
        names: Names of the projections.
    """

    activation: Activation
    bias: bool
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class ImageTextConfig:
    """A decoder of sequences that begin with the patches of an image (Liu et al. 2023, LLaVA).

    Attributes:
        tower: The vision tower, of which only embedding and blocks are used, without its class token.
        projector: What makes tokens of the tower's result.
        decoder: The decoder; its sequence holds the patches and then the text.
    """

    tower: EncoderConfig
    projector: Projector
    decoder: DecoderConfig

    def __post_init__(self) -> None:
        if self.text < 1:
            raise ModelError(
                f"a sequence of {self.decoder.seq} tokens has no room for text behind the {self.patches} of an image",
                hint=f"--set seq={2 * self.patches}, tokens per sequence with those of the image",
            )

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return self.tower.seq - 1

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

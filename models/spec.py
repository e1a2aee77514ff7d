"""What the zoo knows about a model before it is built."""

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Literal, Protocol

Sample = Literal["sequence", "image", "row"]
"""What one sample of a batch is."""


class Config(Protocol):
    """Hyperparameters of one model: a frozen dataclass per family, whose fields `build` can override."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def num_layers(self) -> int:
        """Number of layers, as the model's authors count them."""

    @property
    def sample_size(self) -> int:
        """Tokens of a sequence, pixels of an image's side, or features of a row."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One entry of the zoo.

    Attributes:
        name: Name in the zoo.
        family: Builder it is made by.
        num_parameters: Trained elements; equal to the published count wherever an exact one was published.
        global_batch: Samples per training step in the published run.
        sample: What one sample is.
        source: Where configuration, parameter count and batch come from.
        config: Hyperparameters.
    """

    name: str
    family: str
    num_parameters: int
    global_batch: int
    sample: Sample
    source: str
    config: Config

    @property
    def num_layers(self) -> int:
        """Number of layers, as the model's authors count them."""
        return self.config.num_layers

    @property
    def sample_size(self) -> int:
        """Tokens of a sequence, pixels of an image's side, or features of a row."""
        return self.config.sample_size

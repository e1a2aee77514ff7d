"""What a rank is asked to time: a compiled model fed with drawn numbers, a transfer, or a product beside a transfer."""

from dataclasses import dataclass

import msgspec

from autopar.events import Event, event_id


class Feed(msgspec.Struct, frozen=True):
    """An input of a model and what it is fed with.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        dtype: Its element type.
        limit: Whole numbers are drawn below this; None for ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    limit: int | None = None


class Port(msgspec.Struct, frozen=True):
    """An output of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A model to be timed.

    Attributes:
        model: The serialised ONNX model.
        inputs: What it reads.
        outputs: What it returns.
    """

    model: bytes
    inputs: tuple[Feed, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """An event to be timed.

    Attributes:
        event: The event.
        work: The model of an op, of a piece or of a launch; None of transfers and overlaps.
    """

    event: Event
    work: Work | None = None

    @property
    def id(self) -> str:
        """Name of the event."""
        return event_id(self.event)

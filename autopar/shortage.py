"""The memory that the least demanding plan of a job lacks, and the tensors that take it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What one tensor takes on a device of the fullest stage, all its equals in the stage together.

    Attributes:
        name: The value, in the representative of equal blocks.
        what: "parameters", "gradients", "optimizer" or "activations".
        bytes: Its bytes.
    """

    name: str
    what: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """The plan with the least memory that was found, or one with about as much that takes less time, and what it lacks.

    Attributes:
        plan: The plan in one line.
        stage: Its fullest stage.
        bytes: What a device of that stage needs.
        limit: What it may use.
        by_category: The bytes by what they are for.
        tensors: The largest tensors among them; () if stages have meshes of their own.
        step_seconds: Its simulated step time, were there room for it.
        floor: No plan was missed that needs fewer bytes than this.
    """

    plan: str
    stage: int
    bytes: float
    limit: float
    by_category: Mapping[str, float]
    tensors: tuple[Held, ...]
    step_seconds: float
    floor: float

    @property
    def over(self) -> float:
        """Bytes over the limit."""
        return self.bytes - self.limit

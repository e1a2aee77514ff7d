"""What the simulator found for a plan: the step, its parts, and the memory of every stage."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory per device of one stage.

    Attributes:
        peak: Peak bytes.
        breakdown: The same by category.
        host: Bytes of a device in the memory of its host.
        limit: Bytes a device of the stage may use; 0 for the job's limit, which holds but for groups of nodes that have
            more memory than others.
    """

    peak: float
    breakdown: Mapping[str, float]
    host: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class PartTimes:
    """A part of the step by the planner's formula and as simulated, in seconds.

    Attributes:
        name: "passes" (of all microbatches through the busiest stage), "waits" (for other stages) or "end" (what
            follows the last pass: gradients, gathers, the update).
        formula: By the formula; the parts add up to the objective.
        simulated: Simulated; the parts add up to the step.
    """

    name: str
    formula: float
    simulated: float


@dataclass(frozen=True, slots=True)
class Remark:
    """What the reader of a prediction should know before believing it.

    Attributes:
        kind: "fit" (it does not), "memory", "mfu", "cost" (ops of guessed cost), "idle", "rings", "calibration",
            "choice" (among plans that are equally fast as far as can be told), "adopted" (found beside the search),
            "degrees" (found by degrees before the search) or "request" (an option without effect).
        text: A sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the event simulator found for the lowered plan; seconds and bytes.

    Attributes:
        step_seconds: Duration of one step.
        compute_seconds: Busy time of the busiest stage.
        exposed_seconds: Communication inside stages that nothing hides, of the same stage.
        gradient_seconds: Gradient reduction that the backward pass does not hide.
        bubble_seconds: Idle time of that stage.
        mfu: Model FLOPs (no recompute) over peak FLOPs of all devices in one step.
        stages: Memory per stage.
        host_bytes: What lies in the memory of the fullest host.
        parts: Where the step of the busiest stage goes, in the field's words; they add up to the step.
        against: Parts of the step by the formula and simulated, of plans that were searched for.
        error: Mean absolute error of the software stack's calibration, as a share of the step; None if uncalibrated.
        remarks: What is unusual about these figures (`autopar.remarks`).
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    gradient_seconds: float
    bubble_seconds: float
    mfu: float
    stages: tuple[StageMemory, ...]
    host_bytes: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()
    error: float | None = None
    against: tuple[PartTimes, ...] = ()
    remarks: tuple[Remark, ...] = ()

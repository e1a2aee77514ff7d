"""What a simulation says: one record per stage, in seconds and bytes of one of its devices.

Stages that are interleaved on the same devices have one record together: "stage" below stands for all of them, and its
index is that of the first.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from autopar.program.records import Category

if TYPE_CHECKING:  # they know this module
    from autopar.simulate.path import PathStep
    from autopar.simulate.step_arrays import StepArrays


class Row(StrEnum):
    """A row of the trace. What is in one row never overlaps, except that a task encloses its blocks and their ops."""

    COMPUTE = "compute"
    COLLECTIVES = "collectives"
    GRADIENTS_INTRA = "gradients inside the node"
    GRADIENTS_INTER = "gradients between nodes"
    SEND_NEXT = "send to next stage"
    SEND_PREVIOUS = "send to previous stage"
    TO_HOST = "copies to the host"
    FROM_HOST = "copies from the host"


@dataclass(frozen=True, slots=True)
class Event:
    """A bar of the trace: in `row` of a device of `stage`, `name` runs for `seconds` from `start` on.

    In the row of compute, `depth` is 0 for a task, 1 for a block and 2 for an op; elsewhere it is 0.

    Attributes:
        block: Position in the chain of the block it is part of; None if it is of no block.
        phase: Phase of that block; "" likewise.
        receiver: Of a transfer, the record in the timeline of the devices it is for, and their task that takes it.
    """

    stage: int
    row: Row
    name: str
    start: float
    seconds: float
    depth: int = 0
    block: int | None = None
    phase: str = ""
    receiver: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Highest bytes on a device of `stage` while the block, or the task, runs that starts at `start`."""

    stage: int
    start: float
    bytes: float


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The fullest moment of a stage.

    Attributes:
        bytes: Bytes per device.
        start: Start of the task in which it happens, in seconds.
        during: That task: `F3`, `B0`, `F1.2` (of chunk 2 of interleaved stages), `update`.
        breakdown: Bytes by category, every category once; they add up to `bytes`.
    """

    bytes: float
    start: float
    during: str
    breakdown: tuple[tuple[Category, float], ...]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What lies in the memory of a host.

    Attributes:
        bytes: Bytes of all its devices together.
        usable: Bytes that offloading may take there.
    """

    bytes: float
    usable: float

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.bytes <= self.usable


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """Where the step of one stage goes. The first eight times and `copy_seconds` add up to the step.

    Attributes:
        index: Position in the pipeline.
        compute_seconds: Kernels of forward and backward, recomputed ones included.
        collective_seconds: Collectives inside forward and backward, as far as compute waits for them.
        wait_seconds: Idle although the neighbour was done: its values were on the way.
        bubble_seconds: Idle because a neighbour was not done, or because another stage finishes the step later.
        gradient_seconds: From the last backward to the end of the last gradient reduction.
        update_seconds: Kernels of the optimizer.
        gather_seconds: Collectives of the update phase.
        delay_seconds: Waiting for the host to launch kernels, what gradient traffic beside them, interleaving and
            stragglers make passes longer, and the fixed seconds of a step.
        overlapped_seconds: Link time of all gradient traffic, hidden or not; not part of the sum.
        link_seconds: Link time of the collectives inside forward and backward, hidden or not; not part of the sum.
        memory: Its fullest moment.
        copy_seconds: Copies to and from host memory, as far as passes and the update wait for them.
        host_link_seconds: Time of such copies on the host link, hidden or not; not part of the sum.
        host_bytes: Most bytes of one of its devices in host memory.
        again_seconds: What of `compute_seconds` is kernels of the forward that run again.
        axis_seconds: `collective_seconds` by the mesh axis whose devices wait for each other.
    """

    index: int
    compute_seconds: float
    collective_seconds: float
    wait_seconds: float
    bubble_seconds: float
    gradient_seconds: float
    update_seconds: float
    gather_seconds: float
    delay_seconds: float
    overlapped_seconds: float
    link_seconds: float
    memory: MemoryPeak
    copy_seconds: float = 0.0
    host_link_seconds: float = 0.0
    host_bytes: float = 0.0
    again_seconds: float = 0.0
    axis_seconds: tuple[tuple[str, float], ...] = ()

    @property
    def busy_seconds(self) -> float:
        """Time in which the device computes."""
        return self.compute_seconds + self.update_seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step.

    Attributes:
        step_seconds: From the first forward to the end of the last update of any stage.
        stages: In pipeline order.
        error: Mean absolute error of the software stack's calibration, as a share of the step; None if uncalibrated.
        events: Bars of the trace; empty unless asked for.
        samples: Memory over time; empty unless asked for.
        path: The critical path in order of time; empty unless asked for.
        arrays: The same as arrays; None unless asked for.
        host: Memory of the fullest host; None if nothing lies in host memory.
        tracks: What the records in `stages` are, with devices and blocks; empty unless asked for.
        measured: Share of the seconds of all ops and collectives that is of a profile; None without one.
        stages_per_group: Pipeline stages of each record in `stages`.
        num_shares: Shares of rows that have records of their own, one after the other.
    """

    step_seconds: float
    stages: tuple[StageTimeline, ...]
    error: float | None = None
    events: tuple[Event, ...] = ()
    samples: tuple[MemorySample, ...] = ()
    path: tuple["PathStep", ...] = ()
    arrays: "StepArrays | None" = field(default=None, compare=False)
    host: HostMemory | None = None
    tracks: tuple[str, ...] = ()
    measured: float | None = None
    stages_per_group: int = 1
    num_shares: int = 1

    @property
    def unit(self) -> str:
        """What a record in `stages` is of: a stage, a device group that has several, or a share of the batch."""
        if len(self.stages) == self.num_shares > 1:
            return "share"
        return "stage" if self.stages_per_group == 1 else "device group"

    @property
    def band(self) -> tuple[float, float] | None:
        """Seconds between which the step is expected, by the error of calibration; None if uncalibrated.

        With an error of 100 % or more nothing is known of the least.
        """
        if self.error is None:
            return None
        return self.step_seconds * max(0.0, 1 - self.error), self.step_seconds * (1 + self.error)

    @property
    def peak_bytes(self) -> float:
        """Bytes on the fullest device."""
        return max(stage.memory.bytes for stage in self.stages)

    def fits(self, *limits: float) -> bool:
        """Return whether every device stays within so many bytes, and every host within its memory.

        Args:
            limits: Bytes of a device, stage by stage; one for all if it is one.
        """
        own = limits if len(limits) > 1 else limits * len(self.stages)
        within = all(stage.memory.bytes <= limit for stage, limit in zip(self.stages, own, strict=True))
        return within and (self.host is None or self.host.fits)

    @property
    def busiest(self) -> StageTimeline:
        """The stage that computes longest; the first of several."""
        return max(self.stages, key=lambda stage: stage.busy_seconds)

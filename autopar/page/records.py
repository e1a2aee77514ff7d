"""What a page shows, before anything is drawn: series and tables, in seconds and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.simulate.comparison import Comparison


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure.

    Attributes:
        name: What it is.
        value: The figure with its unit.
        detail: What it is relative to, or how sure it is.
        share: How much of a limit it takes, from 0 to 1 or more; None without a limit.
        warns: Whether that is close to the limit or above it.
    """

    name: str
    value: str
    detail: str
    share: float | None = None
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Lanes:
    """Whom a row of a chart belongs to: a pipeline stage, or a device group that takes turns on several stages.

    Attributes:
        stages: The stages of each lane, in the order of the timeline's records.
        are_shares: Whether each lane is a share of the batch.
    """

    stages: tuple[tuple[int, ...], ...]
    are_shares: bool = False

    @property
    def word(self) -> str:
        """What a lane is called: "stage", "device group" where groups have several stages, or "share"."""
        if self.are_shares:
            return "share"
        return "stage" if all(len(held) == 1 for held in self.stages) else "device group"

    @property
    def names(self) -> tuple[str, ...]:
        """Numbers of the lanes."""
        return tuple(map(str, range(len(self.stages))))

    @property
    def titles(self) -> tuple[str, ...]:
        """Lanes in words.

        >>> Lanes(((0,), (1,))).titles, Lanes(((0, 2), (1, 3))).titles[1]
        (('stage 0', 'stage 1'), 'device group 1 (stages 1, 3)')
        """
        if self.word != "device group":
            return tuple(f"{self.word} {number}" for number in self.names)
        return tuple(
            f"device group {number} (stage{'s' if len(held) > 1 else ''} {', '.join(map(str, held))})"
            for number, held in enumerate(self.stages)
        )

    def __len__(self) -> int:
        return len(self.stages)


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """The devices of a lane.

    Attributes:
        devices: Half-open range of device numbers.
        axes: Role, size and stride of each axis of their mesh.
    """

    devices: tuple[int, int]
    axes: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes and devices.

    Attributes:
        num_devices: Devices of the job, those that do nothing included.
        node_starts: The first device of each node.
        lanes: Devices of each stage, or device group, by their numbers in the plan.
        numbers: Number in the plan of each device, node by node; empty if devices are numbered so.
    """

    num_devices: int
    node_starts: tuple[int, ...]
    lanes: tuple[DeviceRange, ...]
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan beside others for the same job.

    Attributes:
        name: What it is: "this plan", "runner-up 1", "grid search", "given plan".
        kind: The same without a number, a key of the palette where it has a colour of its own.
        summary: The plan in one line.
        step: Seconds of a step, simulated.
        peak: Bytes on the fullest device.
    """

    name: str
    kind: str
    summary: str
    step: float
    peak: float


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """Bars of one kind in a timeline, by lane and then by start; bars of a lane never overlap.

    Attributes:
        kind: What they are: "forward", "collective", ...
        lane: Lane they belong to, (n,).
        row: Row of that lane, an index of `Gantt.rows`, (n,).
        start: Seconds, (n,).
        seconds: Duration, (n,).
        name: Index of the name in `Gantt.names`, (n,).
    """

    kind: str
    lane: NDArray[np.uint16]
    row: NDArray[np.uint8]
    start: NDArray[np.float64]
    seconds: NDArray[np.float32]
    name: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, eq=False)
class Gantt:
    """A step as bars.

    Attributes:
        seconds: Where the time axis ends.
        lanes: Stages, or device groups.
        rows: Names of the rows that every lane has, from top to bottom.
        bars: One entry per kind that occurs.
        names: Names of bars.
    """

    seconds: float
    lanes: Lanes
    rows: tuple[str, ...]
    bars: tuple[Bars, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return sum(len(bars) for bars in self.bars)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """Bytes on a device of a lane; `bytes[i]` is the most between `start[i]` and `start[i + 1]`."""

    lane: str
    start: NDArray[np.float64]
    bytes: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Waterfall:
    """What adds up to a total: named parts in order, in seconds or bytes; parts of 0 are left out."""

    title: str
    total_name: str
    parts: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """The sum."""
        return sum(value for _, value in self.parts)


@dataclass(frozen=True, slots=True)
class LaneShares:
    """The same parts for every lane.

    Attributes:
        lanes: Stages, or device groups.
        parts: Names of the parts that are above 0 on any lane.
        values: Per part, one value per lane.
    """

    lanes: Lanes
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class StepBar:
    """A bar of a measured or a simulated step.

    Attributes:
        step: "simulated" or "measured".
        row: Where it is drawn: "compute", "collectives", ...
        kind: What its colour means, a key of the palette.
        start: Seconds from the start of the step on.
        seconds: Duration.
        name: What it is.
    """

    step: str
    row: str
    kind: str
    start: float
    seconds: float
    name: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured step of a rank beside the simulated one.

    Attributes:
        comparison: Seconds of either by term.
        lane: Stage, or device group, of the rank in words.
        bars: Both steps.
    """

    comparison: Comparison
    lane: str
    bars: tuple[StepBar, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How the search went.

    Attributes:
        seconds: Wall time of each point, ascending.
        objective: Best objective by then in seconds; infinity before the first plan.
        bound: Proven lower bound by then in seconds.
        explored: Why it stopped and how much of the space was looked at, in words.
    """

    seconds: tuple[float, ...]
    objective: tuple[float, ...]
    bound: tuple[float, ...]
    explored: str


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan of the ranking.

    Attributes:
        summary: The plan in one line.
        objective: Step by the planner's formula, in seconds.
        simulated: Step by the simulator, in seconds; None if it was not simulated.
        peak: Bytes on the fullest device; None if it was not simulated.
        mfu: Model FLOPs utilisation; None if it was not simulated.
    """

    summary: str
    objective: float
    simulated: float | None
    peak: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Weighed:
    """What another value of a decision costs.

    Attributes:
        name: The decision.
        own: The plan's value.
        value: The other value.
        step: Seconds of a step of the best plan with it, simulated; None if there is none.
        outcome: Why there is none, or what it differs in.
        plan: The best plan in one line; "" if there is none.
    """

    name: str
    own: str
    value: str
    step: float | None
    outcome: str
    plan: str


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What other decisions than a plan's cost.

    Attributes:
        step: Seconds of a step of the plan, simulated.
        limits: What limits the plan, a sentence each.
        weighed: The other values that were looked at, decision by decision.
        ended: How long that took, and what ended it.
    """

    step: float
    limits: tuple[str, ...]
    weighed: tuple[Weighed, ...]
    ended: str


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The best plan known for a number of devices.

    Attributes:
        gpus: Number of devices.
        cluster: Its name.
        step: Seconds of a step, simulated if the plan was, else by the formula.
        batch: Samples per step.
        bound: No plan of the space that was searched has a faster step; None if none was searched.
        summary: The plan in one line.
    """

    gpus: int
    cluster: str
    step: float
    batch: int
    bound: float | None
    summary: str

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.step


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor and the part of it that a device holds.

    Attributes:
        name: Its name; "" for the result of an op, which has the op's.
        whole: Global shape; with what pads it where devices do not divide a dim.
        local: Local shape.
        placements: One per mesh axis, as they print; empty if the program does not say.
        bytes: Local size.
    """

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    placements: tuple[str, ...]
    bytes: float


@dataclass(frozen=True, slots=True)
class Node:
    """An instruction of a block.

    Attributes:
        name: Name of the op, or of the value that is moved.
        kind: Kind of the op, or the collective.
        over: Mesh axis of a collective; "" for an op.
        result: What it makes.
        parameters: The parameters it reads, as it reads them: gathered, if they were.
        placements: Placement of the result per mesh axis; of a collective, "before > after" on its axis.
        bytes: Size of the result on one device; of a collective, on the wire.
        seconds: Time it takes alone.
        beside: Whether it runs beside compute.
        reads: Positions, in the list of instructions, of those whose results it takes.
        column: Place in a drawing of the block, in the middle of its row.
        row: Row of the drawing, from the top.
        ring: Mesh axis whose devices run an op together, passing some of its inputs round beside it; "" for none.
        passed: Bytes that a device sends in one step of the ring.
    """

    name: str
    kind: str
    over: str
    result: Sharded
    parameters: tuple[Sharded, ...]
    placements: tuple[str, ...]
    bytes: float
    seconds: float
    beside: bool
    reads: tuple[int, ...]
    column: float
    row: int
    ring: str = ""
    passed: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """A distinct block in one phase, as every device runs it.

    Attributes:
        block: Which blocks of the chain are so, in words.
        instances: How many they are.
        phase: When it runs.
        axes: Names of the axes of its mesh.
        sizes: Devices along each of these axes.
        roles: What each of these axes does, in the field's words: "dp", "tp", ...
        nodes: Its instructions in order.
        states: Parameters and their placement between steps, one per axis; they are those of all phases.
    """

    block: str
    instances: int
    phase: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    roles: Mapping[str, str]
    nodes: tuple[Node, ...]
    states: tuple[tuple[str, tuple[str, ...]], ...]

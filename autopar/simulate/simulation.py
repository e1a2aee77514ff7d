"""What the parts of the simulator hand on: a step in time, before it is turned into reports."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.simulate.fitting import FloatArray, Jobs
from autopar.simulate.gradients import Boundary
from autopar.simulate.pipeline import Runs, Transfers
from autopar.simulate.stages import StageLayout


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Devices that are slower than others, by chance: a device takes exp(sigma z) times as long, z standard normal.

    A stage runs at the pace of its slowest device. The numbers are drawn from `seed`, in order of devices.
    """

    sigma: float = 0.0
    seed: int = 0

    def factors(self, num_devices: int) -> NDArray[np.float64]:
        """Return how many times as long each device takes."""
        return np.asarray(np.exp(self.sigma * np.random.default_rng(self.seed).standard_normal(num_devices)))

    def slowest(self, devices: tuple[int, int]) -> float:
        """Return how many times as long the slowest device of a range takes."""
        return float(self.factors(devices[1])[devices[0] :].max()) if self.sigma else 1.0


EVEN = Stragglers()
"""All devices are equally fast."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A step in time, everything by group of devices unless said otherwise.

    Attributes:
        groups: What the stages of each group do.
        boundaries: What lies between each stage and the next.
        runs: Tasks in order.
        transfers: All transfers between stages.
        jobs: Gradient traffic in order of issue.
        times: When each of these jobs runs, from its first to its last moment on the link, (jobs, 2).
        reduced: When the reductions are over and the update starts.
        slower: How many times as long the slowest device takes.
        begins: When the step of each group begins; later than 0 only where steps overlap.
        ends: When the update of each group is over.
        fixed: Seconds added to every step.
        others: When the slowest rows with another share of the batch have run their last backward and end their update;
            0 if there are none.
    """

    groups: Sequence[Sequence[StageLayout]]
    boundaries: Sequence[Boundary]
    runs: Sequence[Runs]
    transfers: Transfers
    jobs: Sequence[Jobs]
    times: Sequence[FloatArray]
    reduced: Sequence[float]
    slower: Sequence[float]
    begins: Sequence[float]
    ends: Sequence[float]
    fixed: float
    others: tuple[float, float] = (0.0, 0.0)

    @property
    def longest(self) -> float:
        """Seconds from begin to end of the group that takes longest."""
        return max(self.others[1], *(end - begin for end, begin in zip(self.ends, self.begins, strict=True)))

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.longest + self.fixed

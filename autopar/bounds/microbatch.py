"""What one microbatch takes at least on a mesh, and what follows for the steps of a pipeline of such meshes."""

import math
from dataclasses import dataclass

import numpy as np

from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Tables
from autopar.pipeline_partition.stage_cuts import least_flow
from autopar.problem import Choice


@dataclass(frozen=True, slots=True)
class Pace:
    """Lower bounds on the seconds of a microbatch, forward and backward, whatever memory it takes.

    Attributes:
        seconds: Of all blocks under any one choice of placements; 0 if unknown.
        blocks: Of each block of the chain, under the placements that are best for it alone; zeros if unknown.
    """

    seconds: float
    blocks: tuple[float, ...]

    def scaled(self, share: float) -> "Pace":
        """Return that of microbatches with a share of the samples, which take no less than that share."""
        return Pace(self.seconds * share, tuple(seconds * share for seconds in self.blocks))

    def joined(self, other: "Pace") -> "Pace":
        """Return what follows from two paces of the same microbatch."""
        blocks = other.blocks if sum(other.blocks) > sum(self.blocks) else self.blocks
        return Pace(max(self.seconds, other.seconds), blocks)

    def flow(self, pipeline: Pipeline) -> float:
        """Return the least seconds of a step that follow from whole blocks in stages."""
        if not any(self.blocks):
            return 0.0
        return pipeline.with_turns * least_flow(self.blocks, np.arange(len(self.blocks)), pipeline)

    def step(self, pipeline: Pipeline) -> float:
        """Return the least seconds of a step that follow, whatever its order."""
        if math.isinf(self.seconds):
            return self.seconds
        mean = pipeline.with_turns * self.seconds * pipeline.rounds / pipeline.num_groups
        return max(mean, self.flow(pipeline)) + pipeline.fixed


UNKNOWN = Pace(0.0, ())
"""Nothing is known."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of microbatches on a mesh when another configuration with the same ones is looked at.

    Attributes:
        pace: What they take at least.
        choices: Placements that are good at some prices, the best one without limits first.
    """

    pace: Pace
    choices: tuple[Choice, ...]


NO_HINT = Hint(UNKNOWN, ())
"""Nobody was there before."""


def launched(tables: Tables, pipeline: Pipeline) -> float:
    """Return the least seconds of a step that see the host only: it launches the kernels of every block."""
    counts = np.array([kind.count for kind in tables.folded.kinds])
    microbatch = float(counts @ tables.host_seconds.sum(axis=1))
    return microbatch * pipeline.rounds / pipeline.num_groups

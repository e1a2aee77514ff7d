"""Lower bounds on one microbatch of a mesh, and the step bounds of pipelines that follow from them.

```text
step >= max(rounds P / p, flow(B))       rounds = m + p - 1  (1F1B, GPipe, inference),  m  (other schedules)
```

Look here for what is transferred between configurations: P are the least seconds of a microbatch through all blocks,
B those of each block, `flow` the best cut of whole blocks.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Tables
from autopar.pipeline_partition.stage_cuts import least_flow
from autopar.problem import Choice


@dataclass(frozen=True, slots=True)
class MicrobatchBound:
    """Lower bounds on the seconds of one microbatch, forward and backward, without a memory limit.

    Attributes:
        seconds: Of all blocks under one common choice of placements; 0 if unknown.
        blocks: Of each block of the chain, each under the best placements for it alone; zeros or empty if unknown.
    """

    seconds: float
    blocks: tuple[float, ...]

    def scaled(self, share: float) -> "MicrobatchBound":
        """Return lower bounds for smaller microbatches: at least their share of the samples in seconds."""
        return MicrobatchBound(self.seconds * share, tuple(seconds * share for seconds in self.blocks))

    def combined(self, other: "MicrobatchBound") -> "MicrobatchBound":
        """Return the tighter of two bounds on the same microbatch, for all blocks and by block."""
        blocks = other.blocks if sum(other.blocks) > sum(self.blocks) else self.blocks
        return MicrobatchBound(max(self.seconds, other.seconds), blocks)

    def partition_bound(self, pipeline: Pipeline) -> float:
        """Lower bound on the step from whole blocks in stages, without fixed seconds; 0 if unknown.

        - *Relaxes*: memory and communication between stages; every block has its own best placements.
        - *Valid when*: `blocks` are lower bounds.
        - *Cost*: a dynamic program over blocks and stages (`stage_cuts.least_flow`).
        - *Source*: chain partitioning, Pinar and Aykanat, 2004; with several chunks, `balance.least_load`.
        """
        if not any(self.blocks):
            return 0.0
        return pipeline.with_turns * least_flow(self.blocks, np.arange(len(self.blocks)), pipeline)

    def step_seconds(self, pipeline: Pipeline) -> float:
        """Lower bound on the step under any schedule of the pipeline.

        The slowest stage is no faster than the mean of all stages.
        """
        if math.isinf(self.seconds):
            return self.seconds
        even = pipeline.with_turns * self.seconds * pipeline.rounds / pipeline.num_groups
        return max(even, self.partition_bound(pipeline)) + pipeline.fixed


UNKNOWN = MicrobatchBound(0.0, ())
"""No bound is known."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What earlier work found for the same microbatches and mesh.

    Attributes:
        microbatch_bound: Lower bounds on a microbatch.
        choices: Good choices of placements, the best one without a memory limit first.
    """

    microbatch_bound: MicrobatchBound
    choices: tuple[Choice, ...]


COLD_START = WarmStart(UNKNOWN, ())
"""No earlier work."""


def host_launch_bound(tables: Tables, pipeline: Pipeline) -> float:
    """Lower bound on the step from the host alone, which launches the kernels of every block."""
    counts = np.array([kind.count for kind in tables.folded.kinds])
    microbatch = float(counts @ tables.host_seconds.sum(axis=1))
    return microbatch * pipeline.rounds / pipeline.num_groups

"""Critical path bound: the step time from below, by the best convex combination of paths through its tasks.

```text
min T   such that   start_v >= start_u + duration_u              v waits for u
                    duration_u linear in the shares of its stage,   shares of all stages sum to the whole
step >= seconds + forward (F - A_f) + backward (B - A_b)
```

Look here for the bound on schedules whose bubble has no closed form. A step takes at least as long as any path of
tasks, hence at least as long as a convex combination of paths. The duals of the linear program are the best
combination: how often it contains the forwards (F) and the backwards with weight passes (B) of all stages, wherever
the chain is cut. Repeated blocks need the same ratio of passes everywhere, so that each stage has one share of their
work A; this tightens the bound for schedules that split the backward.

- *Relaxes*: placements and memory; work is divisible between stages.
- *Valid when*: several groups wait for each other, and the stages are at most `MOST_STAGES`. Where steps overlap, paths
  run from the first to the last task of one group.
- *Cost*: one linear program per schedule and rounded ratio of passes, cached for all meshes.
- *Source*: critical path method as a linear program, Kelley and Walker, 1959; linear programming duality.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.bounds.task_graph import excerpt
from autopar.bounds.task_lp import SLACK, SparseLP, add_precedences, durations_of
from autopar.schedule.base import Schedule

MOST_STAGES = 256
"""Stages of a step up to which its paths are bounded; beyond, the linear program takes seconds."""

PARTS = 600
"""Resolution of the ratio of passes: shares are rounded to this many parts, so that one program serves many meshes."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """A lower bound on the step time that is linear in the work of the stages.

    Attributes:
        seconds: The bound for the repeated blocks alone.
        forward: Seconds that it rises per second of other forwards of a microbatch, summed over all stages.
        backward: Seconds that it rises per second of other backwards and weight passes of a microbatch.
        alike: Seconds of the repeated blocks for one microbatch: forwards, and backwards with weight passes.
    """

    seconds: float
    forward: float
    backward: float
    alike: tuple[float, float]

    @property
    def constant(self) -> float:
        """The bound less its terms for all forwards and backwards, those of repeated blocks included."""
        return self.seconds - self.forward * self.alike[0] - self.backward * self.alike[1]

    def step(self, forward: float, backward: float) -> float:
        """Lower bound on the step time.

        Args:
            forward: Seconds of all forwards of one microbatch, those of repeated blocks included.
            backward: Seconds of all backwards and weight passes of one microbatch.
        """
        assert forward >= self.alike[0] * (1 - SLACK), "all forwards include those of repeated blocks"
        assert backward >= self.alike[1] * (1 - SLACK), "all backwards include those of repeated blocks"
        return self.constant + self.forward * forward + self.backward * backward

    def joined(self, other: "CriticalPath") -> "CriticalPath":
        """Return a bound that is valid wherever `self` or `other` is; both have the same repeated blocks."""
        assert self.alike == other.alike, "both bounds are on the same work"
        return CriticalPath(
            min(self.seconds, other.seconds),
            min(self.forward, other.forward),
            min(self.backward, other.backward),
            self.alike,
        )


def has_path_bound(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether `least_path` bounds a step with work: several groups, and at most `MOST_STAGES` stages."""
    return num_groups > 1 and num_groups * num_chunks <= MOST_STAGES


def least_path(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    alike: Sequence[float],
    rest: Sequence[float],
) -> CriticalPath | None:
    """Critical path bound on the step time, or None if there is one group or too many stages.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
        alike: Seconds of each pass of the repeated blocks for one microbatch, summed over all stages.
        rest: Estimated seconds of the other forwards and backwards. The bound is best for these, and valid for any.

    >>> from autopar.schedule import SCHEDULES
    >>> found = least_path(SCHEDULES["zb-h1"], 2, 4, 1, alike=(2.0, 2.0, 2.0), rest=(0.0, 0.0))
    >>> round(found.seconds, 3)
    13.0
    """
    assert len(alike) == len(schedule.passes), "one number per pass"
    total = sum(alike)
    if not has_path_bound(schedule, num_groups, num_microbatches, num_chunks) or total <= 0:
        return None
    rounded_alike = tuple(int(part / total * PARTS) for part in alike)
    rounded_rest = tuple(round(part / total * PARTS) for part in rest)
    seconds, forward, backward = _solve_path_lp(
        schedule, num_groups, num_microbatches, num_chunks, rounded_alike, rounded_rest
    )
    unit = total / PARTS
    alike_seconds = unit * rounded_alike[0], unit * sum(rounded_alike[1:])
    return CriticalPath(unit * seconds, forward, backward, alike_seconds)


@lru_cache(maxsize=4096)
def _solve_path_lp(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    alike: tuple[float, ...],
    rest: tuple[float, ...],
) -> tuple[float, float, float]:
    """Solve the linear program; return its duals, lowered by `SLACK`: of repeated blocks, other forwards and backwards.

    Variables are the starts of the nodes, each stage's share of the repeated blocks, each stage's other seconds by
    pass, and the seconds of the step.
    """
    graph = excerpt(schedule, num_groups, num_microbatches, num_chunks)
    num_nodes = len(graph.stage) + len(graph.aggregates)
    num_stages, num_passes = num_groups * num_chunks, len(schedule.passes)
    first_rest = num_nodes + num_stages
    step = first_rest + num_stages * num_passes
    stages = [
        [
            {num_nodes + stage: per_share, first_rest + num_passes * stage + kind: 1.0}
            for kind, per_share in enumerate(alike)
        ]
        for stage in range(num_stages)
    ]
    program = SparseLP()
    add_precedences(program, graph, durations_of(graph, stages), step, overlap=schedule.steps_overlap)
    program.fix_sum(range(num_nodes, first_rest), 1.0)
    rest_variables = range(first_rest, step)
    program.fix_sum(rest_variables[::num_passes], rest[0])
    program.fix_sum([number for kind in range(1, num_passes) for number in rest_variables[kind::num_passes]], rest[1])
    optimum = program.bound({step: 1.0}, step + 1)
    seconds, forward, backward = np.maximum(0.0, optimum.duals[-3:]) * (1 - SLACK)
    return float(seconds), float(forward), float(backward)

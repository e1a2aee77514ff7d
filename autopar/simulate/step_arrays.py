"""A simulated step as numpy arrays, one row per thing that happens; seconds and bytes as everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.program.records import Program
from autopar.simulate.simulation import Simulation
from autopar.simulate.timeline import MemorySample

_TASK = [("stage", "i4"), ("pass", "U1"), ("microbatch", "i4"), ("start", "f8"), ("end", "f8"), ("sent", "f8")]
_TRANSFER = [("sender", "i4"), ("receiver", "i4"), ("pass", "U1"), ("microbatch", "i4"), ("start", "f8"), ("end", "f8")]
_TRAFFIC = [("group", "i4"), ("link", "U16"), ("ready", "f8"), ("start", "f8"), ("end", "f8"), ("seconds", "f8")]
_MEMORY = [("group", "i4"), ("start", "f8"), ("bytes", "f8")]


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """Structured arrays of a step; a group is the devices that share a stage, or several if these are interleaved.

    Attributes:
        tasks: A pass of a microbatch through a stage: `stage`, `pass` ("F", "B" ...), `microbatch`, `start`, `end`, and
            `sent`, when the neighbour had finished what it waited for (0 if it waited for nobody). Ordered by group,
            then by time.
        transfers: Between stages: `sender`, `receiver`, `pass`, `microbatch`, `start`, `end`.
        traffic: Gradients on a link: `group`, `link`, `ready`, `start`, `end`, and `seconds` it needs the link for.
        memory: Highest `bytes` on a device of `group` during the task that starts at `start`.
    """

    tasks: NDArray[Any]
    transfers: NDArray[Any]
    traffic: NDArray[Any]
    memory: NDArray[Any]


def step_arrays(program: Program, sims: Sequence[Simulation], samples: Sequence[MemorySample]) -> StepArrays:
    """Return a simulated step as arrays; groups and stages of each share of rows follow those of the share before."""
    chunks, stages, groups = program.chunks, len(program.stages), program.num_groups
    return StepArrays(
        tasks=_table(
            _TASK,
            (
                (
                    part * stages + chunks[group][run.task.chunk],
                    str(run.task.kind),
                    run.task.microbatch,
                    run.start,
                    run.end,
                    run.sent,
                )
                for part, sim in enumerate(sims)
                for group, runs in enumerate(sim.runs)
                for run in runs
            ),
        ),
        transfers=_table(
            _TRANSFER,
            (
                (
                    part * stages + t.sender,
                    part * stages + t.receiver,
                    str(t.task.kind),
                    t.task.microbatch,
                    t.start,
                    t.end,
                )
                for part, sim in enumerate(sims)
                for t in sim.transfers
            ),
        ),
        traffic=_table(
            _TRAFFIC,
            (
                (part * groups + group, str(job.resource), job.ready, start, end, job.seconds)
                for part, sim in enumerate(sims)
                for group, (jobs, times) in enumerate(zip(sim.jobs, sim.times, strict=True))
                for job, (start, end) in zip(jobs, times.tolist(), strict=True)
            ),
        ),
        memory=_table(_MEMORY, ((sample.stage, sample.start, sample.bytes) for sample in samples)),
    )


def _table(columns: list[tuple[str, str]], rows: Iterable[tuple[Any, ...]]) -> NDArray[Any]:
    return np.array(list(rows), dtype=columns)

"""Rows with different shares of a batch: each share is simulated apart but for its gradients, which all rows sum.

A part of the program is that of the rows of one share: equal devices, with microbatches of their own. Collectives over
the major axis start when the last part is ready for them and take the time of the slowest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost import CostModel
from autopar.errors import ClusterError
from autopar.program.records import Crossing, Program, SegmentPhase, StageProgram
from autopar.sharding import Mesh
from autopar.shares import Share, num_rows
from autopar.simulate.fitting import FloatArray, Interval, Jobs, Line
from autopar.simulate.layout import NETWORK, Costs, Resource


@dataclass(frozen=True, slots=True)
class RowsPart:
    """What the rows of a share do.

    Attributes:
        program: The program of these rows alone; devices are numbered from the first of their group of nodes.
        costs: What they work on; the link between rows is that of the whole cluster.
        devices: First and last device of each stage in the whole program.
    """

    program: Program
    costs: Costs
    devices: tuple[tuple[int, int], ...]


def rows_of(program: Program, costs: Costs) -> list[RowsPart]:
    """Return the parts of a program whose rows have different shares.

    Raises:
        ClusterError: If the devices of a share lie in several groups of nodes.
    """
    return [_part(program, costs, share) for share in program.shares]


def _part(program: Program, costs: Costs, share: Share) -> RowsPart:
    devices = tuple(_devices(stage, share, program) for stage in program.stages)
    row = (devices[0][1] - devices[0][0]) // share.num_rows
    first, last = min(start for start, _ in devices), max(stop for _, stop in devices)
    if not costs.cluster.one_kind(range(first, last)):
        raise ClusterError(
            f"the rows of a share have devices {first} to {last - 1}, which lie in several groups of cluster "
            f"{costs.cluster.name!r}",
            hint="give each group a share of its own, in one pipeline stage",
        )
    start = first - costs.cluster.group_start(first)
    stages = tuple(
        replace(stage, devices=(own[0] - first + start, own[1] - first + start), mesh=_mesh(stage.mesh, share.num_rows))
        for stage, own in zip(program.stages, devices, strict=True)
    )
    crossings = tuple(_crossing(crossing, devices, start - first) for crossing in program.crossings)
    own = replace(program.of_share(share), stages=stages, crossings=crossings)
    view = range(first, first + row)
    return RowsPart(own, costs.on_rows(view) if isinstance(costs, CostModel) else costs.on(view), devices)


def _devices(stage: StageProgram, share: Share, program: Program) -> tuple[int, int]:
    """Return the devices of a stage that are in the rows of a share."""
    row = stage.num_devices // num_rows(program.shares)
    return stage.devices[0] + share.rows[0] * row, stage.devices[0] + share.rows[1] * row


def _mesh(mesh: Mesh, rows: int) -> Mesh:
    """Return a mesh with fewer rows."""
    major, *minor = mesh.axes
    return Mesh((replace(major, size=rows), *minor))


def _crossing(crossing: Crossing, devices: Sequence[tuple[int, int]], shift: int) -> Crossing:
    """Return the pieces of a crossing that rows of a share send and receive."""
    sender, receiver = devices[crossing.sender], devices[crossing.receiver]
    once = crossing.phase is SegmentPhase.UPDATE
    pieces = tuple(
        replace(piece, sender=piece.sender + shift, receiver=piece.receiver + shift)
        for piece in crossing.pieces
        if sender[0] <= piece.sender < sender[1] and (once or receiver[0] <= piece.receiver < receiver[1])
    )
    return replace(crossing, pieces=pieces)


def aligned(jobs: Sequence[Jobs], common: int, major: str) -> list[Jobs]:
    """Return the jobs of a stage in every part, those that all rows do together ready when the last part is.

    Args:
        jobs: By part, in order of issue.
        common: How many of the last ones are of the last backward, and alike in all parts.
        major: Name of the axis over which rows meet.
    """
    if not common:
        return list(jobs)
    tails = [own.each(lambda job: job.axis is None or job.axis.name == major) for own in jobs]
    ready = np.max([own.ready[len(own) - common :] for own in jobs], axis=0)
    seconds = np.max([own.seconds[len(own) - common :] for own in jobs], axis=0)
    found = []
    for own, meets in zip(jobs, tails, strict=True):
        first, together = len(own) - common, meets[len(own) - common :]
        readies, spent = own.ready.copy(), own.seconds.copy()
        readies[first:] = np.where(together, ready, readies[first:])
        spent[first:] = np.where(together, seconds, spent[first:])
        found.append(replace(own, ready=readies, seconds=spent))
    return found


def fit_jointly(
    jobs: Sequence[Jobs], busy: Sequence[Mapping[Resource, FloatArray]], common: int, major: str
) -> list[FloatArray]:
    """Return when each job of every part runs, (jobs, 2); what rows do together ends for all parts at once.

    Args:
        jobs: By part, as `aligned` returns them.
        busy: By part, when each link has something more urgent to do.
        common: As of `aligned`.
        major: As of `aligned`.
    """
    lines = [{link: Line(own.get(link, np.zeros((0, 2)))) for link in NETWORK} for own in busy]
    times: list[list[Interval]] = [[] for _ in jobs]
    for own, links, done in zip(jobs, lines, times, strict=True):
        for index in range(len(own) - common):
            done.append(_fit(own, index, links, done))
    for place in range(common, 0, -1):
        model = jobs[0][len(jobs[0]) - place]
        spans = [_fit(own, len(own) - place, links, done) for own, links, done in zip(jobs, lines, times, strict=True)]
        if model.axis is None or model.axis.name == major:
            end = max(end for _, end in spans)
            spans = [(begin, end) for begin, _ in spans]
            for links in lines:
                links[model.resource].free = end
        for span, done in zip(spans, times, strict=True):
            done.append(span)
    return [np.array(done).reshape(-1, 2) for done in times]


def _fit(jobs: Jobs, index: int, links: Mapping[Resource, Line], done: Sequence[Interval]) -> Interval:
    """Return when a job runs on the links of a part, after those that are done."""
    job = jobs[index]
    ready = max(job.ready, done[job.after][1]) if job.after >= 0 else job.ready
    return links[job.resource].fit(ready, job.seconds)

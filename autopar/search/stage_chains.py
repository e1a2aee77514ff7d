"""The staging problem of unequal stages: placements on several meshes as options, and routes through it as stages.

A range of blocks has two columns per option, as of `autopar.pipeline_partition.stage_cuts`: the fastest mixture of
recompute that fits, and the one whose reductions end earliest. Hand-overs between neighbouring stages take
`CostModel.hand_over_seconds`, as in the simulator.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from autopar.cost import CostModel
from autopar.errors import ShardingError
from autopar.formulate.constraints import Constraints
from autopar.formulate.step_time import Pipeline, Split, StageTimes, StepTime, stage_times, time_of
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.block_ranges import Windows, windows
from autopar.pipeline_partition.stage_cuts import UNLIMITED, FittingStages, fitting_stages, symbols_for
from autopar.program.crossings import handed
from autopar.program.records import SegmentPhase
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.search.mesh_placements import MeshPlacement
from autopar.search.submesh_space import Submesh
from autopar.staging import BoolArray, FloatArray, IntArray, Route, Staging

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class StageOptions:
    """A staging problem and its options.

    Attributes:
        staging: The problem.
        placements: Its options.
        fitting: Per option, the stages that fit, by number of stages before them in the longest pipeline.
        pipeline: The longest pipeline.
    """

    staging: Staging
    placements: tuple[MeshPlacement, ...]
    fitting: tuple[FittingStages, ...]
    pipeline: Pipeline

    def flavours(self, route: Route) -> tuple[tuple[Recompute, ...], ...]:
        """Return the recompute flavour of each block of each stage."""
        found = []
        for level, leg in zip(reversed(range(len(route))), route, strict=True):
            fitting, window = self.fitting[leg.option], int(self.staging.at[leg.start, leg.stop - leg.start - 1])
            mixture = int(fitting.taken[self.staging.levels - 1 - level, window, leg.column])
            found.append(fitting.mixtures.flavours(window, mixture))
        return tuple(found)

    def time(self, route: Route) -> StepTime:
        """Return the step time of a route by the planner's formula, with its hand-overs."""
        each = [
            stage_times(
                own.totals,
                own.memory.chain[leg.start : leg.stop],
                Split(((0, leg.stop - leg.start),), (flavours,)),
                self.pipeline.overlap,
            )
            for leg, flavours in zip(route, self.flavours(route), strict=True)
            for own in (self.placements[leg.option],)
        ]
        names = [field.name for field in fields(StageTimes)]
        stages = StageTimes(*(np.concatenate([getattr(one, name) for one in each]) for name in names))
        hops = np.array([self.staging.hop(one, other) for one, other in pairwise(route)]).reshape(-1, 2)
        return time_of(stages, replace(self.pipeline, num_stages=len(route)), hops)


def stage_options(
    placements: Sequence[MeshPlacement],
    pipeline: Pipeline,
    counts: frozenset[int],
    costs: CostModel,
    devices: int,
    limits: Sequence[float],
    constraints: Constraints,
) -> StageOptions:
    """Return the staging problem of choices of placements.

    Args:
        placements: The choices.
        pipeline: The longest pipeline.
        counts: Numbers of stages that are allowed.
        costs: Cost model of hand-overs.
        devices: Number of devices of all stages.
        limits: Bytes per device of the mesh of each choice.
        constraints: Cuts and recompute that are allowed.
    """
    chain = placements[0].memory.chain
    # Two ranges are alike if they are alike for every option.
    symbols, _ = _numbered(list(zip(*(symbols_for(own.memory, constraints) for own in placements), strict=True)))
    found = windows(tuple(symbols), len(chain), from_first=False)
    fitting = tuple(
        fitting_stages(found, own.totals, own.memory, pipeline, min(limit, UNLIMITED), constraints)
        for own, limit in zip(placements, limits, strict=True)
    )
    leads = [_lead_seconds(own, found, stages) for own, stages in zip(placements, fitting, strict=True)]
    ends, hand_over_key = _numbered([own.hand_over_key for own in placements])
    classes, pairs = _numbered(list(pairwise(chain)))
    holders = [placements[ends.index(number)] for number in range(len(hand_over_key))]
    trains = SCHEDULES[pipeline.schedule].trains
    ahead = _hop_seconds(holders, pairs, costs, devices, SegmentPhase.FORWARD)
    problem = Staging(
        at=np.ascontiguousarray(fitting[0].at),
        sizes=np.array([own.submesh.mesh.size for own in placements]),
        starts=start_places([own.submesh for own in placements], devices),
        seconds=_by_level([stages.seconds for stages in fitting]),
        lead=_by_level(leads),
        slow=_by_level([stages.slow for stages in fitting]),
        tails=_by_level([stages.tails for stages in fitting]),
        ends=np.array(ends),
        classes=np.array([0, *classes]),  # nothing is handed to the first block
        ahead=ahead,
        back=_hop_seconds(holders, pairs, costs, devices, SegmentPhase.BACKWARD) if trains else np.zeros_like(ahead),
        counts=counts,
        follow=pipeline.num_microbatches - 1.0,
        fixed=pipeline.fixed,
    )
    return StageOptions(problem, tuple(placements), fitting, pipeline)


def start_places(submeshes: Sequence[Submesh], devices: int) -> BoolArray:
    """Return a mask of the devices at which a stage on each mesh may start, (meshes, devices)."""
    found = np.zeros((len(submeshes), devices), dtype=bool)
    for number, submesh in enumerate(submeshes):
        found[number, list(submesh.starts)] = True
    return found


def _by_level(tables: Sequence[FloatArray]) -> FloatArray:
    """Stack (stages, ...) arrays of each option to (levels, options, ...); levels count stages from the last one."""
    return np.ascontiguousarray(np.stack([table[::-1] for table in tables], axis=1))


def _lead_seconds(own: MeshPlacement, found: Windows, stages: FittingStages) -> FloatArray:
    """Return the seconds of stages without their backward, (stages, ranges, columns)."""
    sums = np.concatenate([[0.0], np.cumsum(own.totals[np.asarray(own.memory.chain), Slot.BACKWARD])])
    backward = (sums[found.stop] - sums[found.start])[None, :, None]
    each = np.arange(len(found.start))[None, :, None]
    return np.asarray(stages.seconds - backward - stages.mixtures.again[each, stages.taken])


def _hop_seconds(
    holders: Sequence[MeshPlacement],
    pairs: Sequence[tuple[int, int]],
    costs: CostModel,
    devices: int,
    phase: SegmentPhase,
) -> FloatArray:
    """Return hand-over seconds, (holders, holders, pairs, devices), as in `Staging.ahead` and `Staging.back`."""
    segments = [
        {(kind, segment.phase): segment for kind, block in own.lowered.items() for segment in block.segments}
        for own in holders
    ]
    found = np.full((len(holders), len(holders), len(pairs), devices), np.inf)
    meshes, known = [own.submesh.mesh for own in holders], dict[Hashable, float]()
    starts = start_places([own.submesh for own in holders], devices)
    for one, other in np.ndindex(len(holders), len(holders)):
        size = meshes[one].size
        senders = np.flatnonzero(starts[one, : devices - size] & starts[other, size:])
        alike, at, place = np.unique(_place_classes(senders, costs), return_index=True, return_inverse=True)
        for number, (before, after) in enumerate(pairs):
            first, second = segments[one].get((before, phase)), segments[other].get((after, phase))
            sent, received = (first, second) if phase is SegmentPhase.FORWARD else (second, first)
            if sent is None or received is None:
                found[one, other, number, senders + size] = 0.0
                continue
            ends = (*(each.placements for each in sent.outputs), *(each.placements for each in received.inputs))
            each = np.empty(len(alike))
            for index, (spot, sender) in enumerate(zip(alike.tolist(), senders[at].tolist(), strict=True)):
                key = (before, after, spot, *meshes[one].axes, 0, *meshes[other].axes, ends)
                if key not in known:
                    here, there = (sender, meshes[one]), (sender + size, meshes[other])
                    source, target = (here, there) if phase is SegmentPhase.FORWARD else (there, here)
                    try:
                        known[key] = costs.hand_over_seconds(handed(sent, source, received, target))
                    except ShardingError:  # partial terms of a reduction other than a sum cannot be sent
                        known[key] = math.inf
                each[index] = known[key]
            found[one, other, number, senders + size] = each[place]
    return found


def _place_classes(devices: IntArray, costs: CostModel) -> IntArray:
    """Return equal numbers for devices at equal positions in their node or domain, which have equal links."""
    cluster = costs.cluster
    if cluster.groups:
        return devices
    return devices % (cluster.domains[-1].devices if cluster.domains else cluster.devices_per_node)


def _numbered(items: Sequence[T]) -> tuple[list[int], list[T]]:
    """Return the number of each item among the distinct items, and the distinct items."""
    distinct = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return [distinct[item] for item in items], list(distinct)


def distinct_legs(route: Route) -> list[int]:
    """Return the distinct options of a route, in the order of its stages."""
    return list(dict.fromkeys(leg.option for leg in route))

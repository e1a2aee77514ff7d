"""What plans by degrees share: the seconds and bytes of blocks placed once, for any number of data-parallel devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import fsum
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel, Overlap
from autopar.cost.overlap import TRANSIT_BLOCKS, bucket_share, full_bucket, state_buffers, state_seconds
from autopar.degrees import SHARD, Degrees
from autopar.estimates.scaled import Scaled
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import layer_kinds
from autopar.formulate.link_seconds import NUM_LINKS
from autopar.formulate.offload_costs import HostLinks, with_host
from autopar.formulate.scheduled_step import StageWork, link_jobs
from autopar.formulate.step_time import Split, StageTimes, stage_times
from autopar.formulate.tables import Slot
from autopar.plan import Plan
from autopar.program.block import LoweredKind
from autopar.program.hosted import hosted_bytes, shared_parameters, streamed_bytes
from autopar.program.lower import copies
from autopar.program.records import HOST_PHASES, OPTIMIZER_STATE, Category, Collective, Segment, SegmentPhase
from autopar.recompute import Hosted, Recompute, first_share, parse_share, share_of
from autopar.schedule import SCHEDULES, Pass, chunks_of
from autopar.schedule.holding import moments
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.layout import Layout, Resource, lay_out
from autopar.simulate.memory import StageMemory, received_bytes, stage_memory
from autopar.simulate.offload import host_links
from autopar.tactics.by_degrees import data_axes, held_by_kind, ranges_by_degrees
from autopar.tactics.stages import moment_elements

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_SHARED_FROM = {Category.OPTIMIZER: 1, Category.UPDATE: 1, Category.GRADIENTS: 2, Category.PARAMETERS: 3}
"""ZeRO stage from which on data-parallel devices share what a category holds."""
_ROUNDS, _SPLIT_ROUNDS = 2, 4
"""Rounds of as many microbatches as groups after which devices are as full as they get; weight passes put off last."""
_PASSES = (Pass.FORWARD, Pass.BACKWARD)
WEIGHT = len(Slot)
"""Column of the seconds of weight passes, after those of the slots."""


@dataclass(eq=False)
class Table:
    """What plans of equal tensor and context degrees, ZeRO, sequence parallelism and samples share.

    Attributes:
        plan: The plan on the reference devices.
        folded: The graph of one of its microbatches.
        kinds: Its blocks, lowered.
        costs: Of the cluster.
        zero: ZeRO stage.
        reference: Devices that share what ZeRO splits in what was lowered.
    """

    plan: Plan
    folded: Folded
    kinds: Mapping[int, LoweredKind]
    costs: CostModel
    zero: int
    reference: int
    _ops: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _seconds: dict[object, FloatArray] = field(default_factory=dict)
    _layouts: dict[tuple[int, SegmentPhase], Layout] = field(default_factory=dict)
    _memory: dict[object, StageMemory] = field(default_factory=dict)
    _stages: dict[object, StageTimes] = field(default_factory=dict)
    _works: dict[object, tuple[StageWork, ...]] = field(default_factory=dict)
    _live: dict[object, FloatArray] = field(default_factory=dict)
    _resident: dict[object, FloatArray] = field(default_factory=dict)
    _held_by: dict[int, dict[int, float]] = field(default_factory=dict)
    _ranges: dict[object, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    _host_links: dict[Hosted, HostLinks] = field(default_factory=dict)

    @cached_property
    def segments(self) -> dict[tuple[int, SegmentPhase], Segment]:
        """The instructions by kind and phase."""
        return {(segment.kind, segment.phase): segment for kind in self.kinds.values() for segment in kind.segments}

    @cached_property
    def memories(self) -> BlockMemories:
        """The memory of the kinds of blocks."""
        return BlockMemories(self.segments, self.trains)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(phase is SegmentPhase.BACKWARD for _, phase in self.segments)

    def seconds(self, degrees: Degrees) -> FloatArray:
        """Return the seconds of one block by kind and slot, as `Tables.block_seconds`, and its weight pass."""
        axes = data_axes(degrees)
        if axes not in self._seconds:
            share = self.reference / degrees.sharing if self.zero else 1.0
            view = Scaled(self.costs, {axis.name: axis for axis in axes}, share, self._ops)
            found = np.zeros((len(self.folded.kinds), WEIGHT + 1))
            for (kind, phase), segment in self.segments.items():
                if phase in HOST_PHASES:
                    continue
                if (kind, phase) not in self._layouts:
                    layout = lay_out(_resized(segment, view), view)
                    if not self._depends(segment):
                        self._layouts[kind, phase] = layout
                else:
                    layout = self._layouts[kind, phase]
                self._add(found[kind], phase, layout, view)
            self._seconds[axes] = found
        return self._seconds[axes]

    def busy_seconds(self, degrees: Degrees) -> float:
        """Return what one microbatch keeps one group of devices busy if that has all blocks."""
        passes = self.seconds(degrees)[:, [Slot.FORWARD, Slot.BACKWARD, WEIGHT]].sum(axis=1)
        return float(passes[np.asarray(self.folded.chain)].sum())

    def _depends(self, segment: Segment) -> bool:
        """Whether what a segment takes depends on the data-parallel degrees."""
        if segment.phase is SegmentPhase.UPDATE and self.zero:
            return True
        return any(isinstance(part, Collective) and part.axis.name in ("dp", SHARD) for part in segment.instructions)

    def _add(self, row: FloatArray, phase: SegmentPhase, layout: Layout, view: Scaled) -> None:
        traffic, outside = 0.0, 0.0
        most: list[float] = []
        for item in layout.traffic:
            most.append(max(item.nbytes, most[item.after] if item.after >= 0 else 0.0))
            many = float(bucket_share(most[-1], full_bucket(view.axis(item.axis))))
            seconds = view.collective_seconds(item.collective, many * item.nbytes, item.axis) / many
            traffic += seconds
            outside += seconds * (item.resource is Resource.INTER)
        waited = fsum(span.seconds for span in layout.spans if span.resource is Resource.INTER)
        collectives = layout.link_seconds - layout.gather_seconds
        match phase:
            case SegmentPhase.FORWARD:
                row[Slot.FORWARD], row[Slot.FORWARD_GATHER] = layout.seconds, layout.gather_seconds
                row[Slot.FORWARD_WAIT], row[Slot.FORWARD_OUTSIDE] = collectives, waited
            case SegmentPhase.AGAIN:
                row[Slot.SELECTIVE], row[Slot.SELECTIVE_GATHER] = layout.seconds, layout.gather_seconds
                row[Slot.SELECTIVE_WAIT], row[Slot.SELECTIVE_OUTSIDE] = collectives, waited
            case SegmentPhase.BACKWARD:
                row[Slot.BACKWARD], row[Slot.BACKWARD_GATHER] = layout.seconds, layout.gather_seconds
                row[Slot.BACKWARD_WAIT], row[Slot.BACKWARD_OUTSIDE] = collectives, waited
                row[Slot.GRADIENT], row[Slot.GRADIENT_OUTSIDE] = traffic, outside
            case SegmentPhase.WEIGHT:
                row[WEIGHT] = layout.seconds + layout.gather_seconds
                row[Slot.GRADIENT] += traffic
                row[Slot.GRADIENT_OUTSIDE] += outside
            case SegmentPhase.REDUCE:
                row[Slot.REDUCE], row[Slot.REDUCE_OUTSIDE] = traffic, outside
            case SegmentPhase.UPDATE:
                row[Slot.UPDATE] = layout.seconds

    def ranges(self, degrees: Degrees) -> tuple[tuple[int, int], ...]:
        """Return the blocks of every stage."""
        key = (degrees.num_stages, degrees.layers, degrees.predictions)
        if key not in self._ranges:
            self._ranges[key] = ranges_by_degrees(degrees, self.folded)
        return self._ranges[key]

    def stages(self, degrees: Degrees) -> StageTimes:
        """Return the seconds of the stages of a plan."""
        key = (data_axes(degrees), _rerun(degrees), degrees.offload, degrees.num_stages, degrees.layers)
        if key not in self._stages:
            ranges = self.ranges(degrees)
            split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
            split = replace(
                split, offload=self._away(degrees), copied=self._copied(degrees), what=share_of(degrees.offload)
            )
            totals = self._recomputing(degrees)
            self._stages[key] = stage_times(totals, self.folded.chain, split, Overlap.of(self.costs.stack))
        return self._stages[key]

    def works(self, degrees: Degrees) -> tuple[StageWork, ...]:
        """Return what the stages of a plan take whose schedule splits the backward."""
        key = (data_axes(degrees), _rerun(degrees), degrees.offload, degrees.num_stages, degrees.layers)
        if key not in self._works:
            blocks = self._recomputing(degrees)[np.asarray(self.folded.chain)]
            for slot, extra in (
                (Slot.UPDATE, Slot.STATE),
                (Slot.FORWARD, Slot.HOST_FORWARD),
                (Slot.BACKWARD, Slot.HOST_BACKWARD),
            ):
                blocks[:, slot] += np.where(self._is_away(degrees), blocks[:, extra], 0.0)
            copied = self._copied(degrees) or (0.0,) * degrees.num_stages
            stages = zip(self.ranges(degrees), copied, strict=True)
            self._works[key] = tuple(_work(blocks[start:stop], added) for (start, stop), added in stages)
        return self._works[key]

    def _away(self, degrees: Degrees) -> tuple[tuple[bool, ...], ...]:
        """Return whether the optimizer's state of each block of every stage is in host memory; () if of none."""
        if not degrees.offload:
            return ()
        sizes, share = moment_elements(self.folded), parse_share(degrees.offload)
        kinds = (self.folded.chain[start:stop] for start, stop in self.ranges(degrees))
        return tuple(first_share([sizes[kind] for kind in own], share) for own in kinds)

    def _is_away(self, degrees: Degrees) -> NDArray[np.bool_]:
        """Return whether the optimizer's state of each block is in host memory, (blocks,)."""
        away = [own for stage in self._away(degrees) for own in stage]
        return np.array(away or [False] * len(self.folded.chain))

    def _recomputing(self, degrees: Degrees) -> FloatArray:
        """Return the seconds of one block by kind and slot with what layers run again, and with copies to the host."""
        totals = self.seconds(degrees).copy()
        if degrees.offload:
            hosts = [Slot.STATE, Slot.HOST_FORWARD, Slot.HOST_BACKWARD]
            totals[:, hosts] = self._copies(degrees, totals)[:, hosts]
        layers = layer_kinds(self.folded)
        for kind in self.folded.kinds:
            if kind.id not in layers:  # what surrounds layers recomputes nothing
                continue
            if degrees.recompute == Recompute.OFFLOAD:
                copies = self._copies(degrees, totals)[kind.id]
                totals[kind.id, Slot.FORWARD] += copies[Slot.OFFLOAD]
                totals[kind.id, Slot.BACKWARD] += copies[Slot.FETCH]
            elif degrees.recompute != Recompute.NONE:
                own, share = totals[kind.id], 1 / degrees.recompute_every
                for target, full, selective in _RERUN:
                    own[target] += share * own[full if degrees.recompute == Recompute.FULL else selective]
        return totals

    def _copies(self, degrees: Degrees, totals: FloatArray) -> FloatArray:
        """Return the seconds of blocks with the slots of the host link filled in."""
        links = self._links(share_of(degrees.offload))
        share, stored = (
            self.reference / degrees.sharing if self.zero >= _SHARED_FROM[category] else 1.0
            for category in (Category.OPTIMIZER, Category.PARAMETERS)
        )
        links = replace(
            links,
            state=links.state * share,
            forward=links.forward * stored,
            backward=links.backward * stored,
            updates=None if links.updates is None else links.updates * share,
        )
        return with_host(totals, links, Overlap.of(self.costs.stack))

    def _links(self, what: Hosted) -> HostLinks:
        if what not in self._host_links:
            self._host_links[what] = host_links(self.kinds, self.costs, what)
        return self._host_links[what]

    def hops(self, degrees: Degrees) -> tuple[float, float]:
        """Return the mean seconds from a stage to the next, and back, where that is on other devices."""
        ranges = self.ranges(degrees)
        devices = degrees.dp * degrees.cp * degrees.tp
        chain, cluster = self.folded.chain, self.costs.cluster
        groups = _groups(degrees)
        there: list[float] = []
        back: list[float] = []
        for (_, stop), left, right in zip(ranges[:-1], groups[:-1], groups[1:], strict=True):
            if left == right:
                continue
            first, second = left * devices, right * devices
            tier = max(cluster.tier(first, second), cluster.tier(first + devices - 1, second + devices - 1))
            for found, segment in (
                (there, self.segments[chain[stop - 1], SegmentPhase.FORWARD]),
                (back, self.segments.get((chain[stop], SegmentPhase.BACKWARD))),
            ):
                if segment is not None:
                    size = sum(operand.bytes for operand in segment.outputs)
                    found.append(self.costs.send_seconds(size, tier))
        forward = fmean(there) if there else 0.0
        return forward, fmean(back) if back else forward

    def peaks(self, degrees: Degrees) -> FloatArray:
        """Return the bytes at the fullest moment of each group of devices of the pipeline, (groups,)."""
        shape = (_rerun(degrees), degrees.offload, degrees.num_stages, degrees.layers)
        held = (degrees.sharing, *shape, degrees.pp, schedule_of(degrees))
        if held not in self._resident:
            self._resident[held] = self._resident_bytes(degrees)
        return self._resident[held] + self._alive(degrees)

    def peak(self, degrees: Degrees) -> float:
        """Return the bytes on the fullest device."""
        return float(self.peaks(degrees).max())

    def live(self, degrees: Degrees) -> float:
        """Return the bytes that come and go on the device where these are most."""
        return float(self._alive(degrees).max())

    def _alive(self, degrees: Degrees) -> FloatArray:
        count = degrees.num_microbatches
        if degrees.schedule != "gpipe":  # more rounds of microbatches than a few fill no device further
            rounds = _SPLIT_ROUNDS if SCHEDULES[degrees.schedule].splits else _ROUNDS
            count = min(count, rounds * degrees.pp)
        shape = (_rerun(degrees), degrees.num_stages, degrees.layers, degrees.pp)
        key = (*shape, count, schedule_of(degrees), degrees.offload, degrees.offload and degrees.sharing)
        if key not in self._live:
            self._live[key] = self._live_bytes(degrees, count)
        return self._live[key]

    def _live_bytes(self, degrees: Degrees, count: int) -> FloatArray:
        """Return the bytes that come and go at the fullest moment of each group of devices, (groups,)."""
        ranges = self.ranges(degrees)
        last = len(ranges) - 1
        stages = [
            self._stage(self.folded.chain[start:stop], _rerun(degrees), index == 0, index == last, count > 1)
            for index, (start, stop) in enumerate(ranges)
        ]
        hosted, chain = self._hosted_bytes(degrees), np.asarray(self.folded.chain)
        streamed, what = self._streamed(degrees), share_of(degrees.offload)
        passing = np.where(self._is_away(degrees), 0.0, self._held(degrees, (Category.UPDATE,))[chain])
        copied = self._copied_bytes(degrees)
        away = [float(hosted[start:stop].sum()) + own for (start, stop), own in zip(ranges, copied, strict=True)]
        fullest = []
        schedule = SCHEDULES[schedule_of(degrees)]
        for group, numbers in enumerate(chunks_of(_groups(degrees))):
            chunks = [stages[number] for number in numbers]
            if schedule.splits:
                held = moments(schedule, group, degrees.pp, count, degrees.interleave)
                sizes = [
                    [*(memory.left[kind] for kind in _PASSES), *(memory.passes[kind].total for kind in Pass)]
                    for memory in chunks
                ]
                most = (held @ np.ravel(sizes)).max()
            else:
                rows = _held(schedule_of(degrees), degrees.pp, count, degrees.interleave)[group]
                left = np.array([memory.left[Pass.FORWARD] for memory in chunks])
                running = np.array([[memory.passes[kind].total for kind in _PASSES] for memory in chunks])
                most = (rows[:, 2:] @ left + running[rows[:, 0], rows[:, 1]]).max()
            beside = sum(memory.receiving for memory in chunks) + max(memory.transit for memory in chunks)
            beside += TRANSIT_BLOCKS * max(float(streamed[slice(*ranges[number])].max()) for number in numbers)
            updates = (stages[number].update + float(state_buffers(away[number], what)) for number in numbers)
            update = max(updates) if self.trains else 0.0
            absent = sum(float(passing[slice(*ranges[number])].sum()) for number in numbers)
            fullest.append(max(most + beside - absent, update))
        return np.array(fullest)

    def _stage(
        self, kinds: tuple[int, ...], rerun: tuple[str, int], first: bool, last: bool, repeats: bool
    ) -> StageMemory:
        """Return what the tasks of a stage need, the first or the last of the pipeline or one in between."""
        key = (kinds, rerun, first, last, repeats)
        if key not in self._memory:
            recompute, every = rerun
            layers = layer_kinds(self.folded)
            again = [index for index, kind in enumerate(kinds) if kind in layers][every - 1 :: every]
            flavours = [Recompute.NONE] * len(kinds)
            for index in again:
                flavours[index] = Recompute(recompute)
            receiving = received_bytes(self.segments, kinds, first, last)
            self._memory[key] = stage_memory(
                self.memories.walk(kinds, flavours), receiving, repeats=repeats,
                unmade=self.costs.stack.gradients == "made" and not repeats and first and last,
            )  # fmt: skip
        return self._memory[key]

    def _held(self, degrees: Degrees, categories: Sequence[Category]) -> FloatArray:
        """Return the bytes of some categories that a device has of one block of each kind."""
        found, shares = np.zeros(len(self.folded.kinds)), self._shares(degrees)
        for kind, lowered in self.kinds.items():
            found[kind] = sum(
                lowered.resident.get(category, 0.0)
                * (shares[kind] if self.zero >= _SHARED_FROM.get(category, 4) else 1.0)
                * (degrees.num_microbatches if category is Category.CACHES else 1)
                for category in categories
            )
        return found

    def _shares(self, degrees: Degrees) -> dict[int, float]:
        """Return what a device has of what ZeRO splits, by kind, as a share of what it has in the table."""
        if degrees.sharing not in self._held_by:
            here, there = (held_by_kind(self.folded, own, degrees.tp) for own in (degrees.sharing, self.reference))
            self._held_by[degrees.sharing] = {kind: here[kind] / there[kind] if there[kind] else 1.0 for kind in here}
        return self._held_by[degrees.sharing]

    def _hosted_bytes(self, degrees: Degrees) -> FloatArray:
        """Return the bytes of the optimizer's state of each block that are in host memory, (blocks,)."""
        if not degrees.offload:
            return np.zeros(len(self.folded.chain))
        what, shared, found = share_of(degrees.offload), self._in_common, np.zeros(len(self.folded.kinds))
        for kind, lowered in self.kinds.items():
            gone = hosted_bytes(lowered, what, shared)
            share = {category: self._held_share(degrees, kind, category) for category in gone}
            found[kind] = sum(amount * share[category] for category, amount in gone.items())
        return np.where(self._is_away(degrees), found[np.asarray(self.folded.chain)], 0.0)

    @cached_property
    def _in_common(self) -> frozenset[str]:
        return shared_parameters(self.kinds.values())

    def _held_share(self, degrees: Degrees, kind: int, category: Category) -> float:
        """Return what a device has of a category of a block as a share of what it has in the table."""
        return self._shares(degrees)[kind] if self.zero >= _SHARED_FROM.get(category, 4) else 1.0

    def _streamed(self, degrees: Degrees) -> FloatArray:
        """Return the bytes of each block that come from host memory for its passes, (blocks,)."""
        found = np.zeros(len(self.folded.kinds))
        if degrees.offload:
            for kind, lowered in self.kinds.items():
                own = streamed_bytes(lowered, share_of(degrees.offload), self._in_common)
                found[kind] = own * self._held_share(degrees, kind, Category.PARAMETERS)
        return np.where(self._is_away(degrees), found[np.asarray(self.folded.chain)], 0.0)

    def _copied_bytes(self, degrees: Degrees) -> list[float]:
        """Return the bytes of state in host memory of copies of parameters that other groups own, per stage."""
        ranges, groups, away = self.ranges(degrees), _groups(degrees), self._away(degrees)
        found = [0.0] * len(ranges)
        if not away:
            return found
        share = self.reference / degrees.sharing if self.zero >= _SHARED_FROM[Category.OPTIMIZER] else 1.0
        for copy in copies([self.kinds[kind] for kind in self.folded.chain], self.folded):
            owner = next(group for group, (start, stop) in zip(groups, ranges, strict=True) if copy.owner < stop)
            state = share * sum(amount for category, amount in copy.state if category in OPTIMIZER_STATE)
            for stage, (blocks, group, own) in enumerate(zip(ranges, groups, away, strict=True)):
                if all(own) and group != owner and copy.on(range(*blocks)):
                    found[stage] += state
        return found

    def _copied(self, degrees: Degrees) -> tuple[float, ...]:
        """Return what these add to the update of each stage; () if there is nothing."""
        found = self._copied_bytes(degrees)
        if not any(found):
            return ()
        host, what = self.costs.cluster.known_host(), share_of(degrees.offload)
        return tuple(state_seconds(host, what, own) for own in found)

    def _resident_bytes(self, degrees: Degrees) -> FloatArray:
        """Return the bytes that each group of devices always holds, (groups,)."""
        kinds = self._held(degrees, tuple(Category))
        blocks = kinds[np.asarray(self.folded.chain)] - self._hosted_bytes(degrees)
        starts = [start for start, _ in self.ranges(degrees)]
        groups = _groups(degrees)
        held = np.bincount(groups, weights=np.add.reduceat(blocks, starts)) + self.folded.buffer_bytes
        group_of = np.repeat(groups, [stop - start for start, stop in self.ranges(degrees)])
        shared, is_away = self.reference / degrees.sharing, self._is_away(degrees)
        for copy in copies([self.kinds[kind] for kind in self.folded.chain], self.folded):
            most: dict[int, float] = {}
            for block, size in copy.readers:
                group = int(group_of[block])
                most[group] = max(most.get(group, 0.0), size)
            for group in most.keys() - {int(group_of[copy.owner])}:
                held[group] += sum(
                    amount * (shared if self.zero >= _SHARED_FROM[category] else 1.0)
                    for category, amount in ((Category.PARAMETERS, most[group]), *copy.state)
                    if not (category in OPTIMIZER_STATE and is_away[group_of == group].all())
                )
        return np.asarray(held)


def schedule_of(degrees: Degrees) -> str:
    """Return the schedule of a plan: 1F1B with several stages per group of devices is the interleaved one."""
    return "interleaved" if degrees.interleave > 1 and degrees.schedule == "1f1b" else degrees.schedule


_RERUN = (
    (Slot.BACKWARD, Slot.FORWARD, Slot.SELECTIVE),
    (Slot.BACKWARD_GATHER, Slot.FORWARD_GATHER, Slot.SELECTIVE_GATHER),
    (Slot.BACKWARD_WAIT, Slot.FORWARD_WAIT, Slot.SELECTIVE_WAIT),
    (Slot.BACKWARD_OUTSIDE, Slot.FORWARD_OUTSIDE, Slot.SELECTIVE_OUTSIDE),
)
"""Slots of a backward, and what full and selective recompute add to each."""


def _rerun(degrees: Degrees) -> tuple[str, int]:
    """Return what layers recompute, and of how many layers the last one does."""
    return degrees.recompute, degrees.recompute_every


def _groups(degrees: Degrees) -> tuple[int, ...]:
    """Return the group of devices of every stage."""
    return SCHEDULES[schedule_of(degrees)].groups(degrees.pp, degrees.interleave)


def _resized(segment: Segment, view: Scaled) -> Segment:
    """Return a segment whose collectives are on the data-parallel axis of a degree: it decides which link they take."""
    instructions = (
        replace(part, axis=view.axis(part.axis)) if isinstance(part, Collective) else part
        for part in segment.instructions
    )
    return replace(segment, instructions=tuple(instructions))


def _work(blocks: FloatArray, added: float) -> StageWork:
    """Return what a stage takes whose blocks take (blocks, slots) seconds, the weight pass last; its update more."""
    weight = blocks[:, WEIGHT]
    backward = blocks[:, Slot.BACKWARD]
    return StageWork(
        forward=float(blocks[:, Slot.FORWARD].sum()),
        backward=float(backward.sum()),
        weight=float(weight.sum()),
        links=link_jobs(blocks, np.zeros((NUM_LINKS, len(blocks))), backward, weight),
        update=float(blocks[:, Slot.UPDATE].sum()) + added,
    )


@lru_cache(maxsize=4096)
def _held(schedule: str, groups: int, microbatches: int, chunks: int) -> tuple[IntArray, ...]:
    """Return what each group holds while it runs: distinct rows of chunk and pass that run, then held by chunk.

    A microbatch is held by a chunk from its forward to its backward, while neither runs.
    """
    found = []
    trains = SCHEDULES[schedule].trains
    for order in SCHEDULES[schedule].orders(groups, microbatches, chunks):
        held, rows = [0] * chunks, set()
        for task in order:
            backward = task.kind is Pass.BACKWARD
            held[task.chunk] -= backward
            rows.add((task.chunk, int(backward), *held))
            held[task.chunk] += trains and not backward
        found.append(np.array(sorted(rows), dtype=np.int64))
    return tuple(found)

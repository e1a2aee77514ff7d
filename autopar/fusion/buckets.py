"""Cuts of gradients into buckets for a program, and the step that no buckets are faster than.

Gradients that one collective reduces over one mesh axis are jobs for one link, in the order in which the backward makes
them. Compute and what it waits for have the link first, so jobs are planned on the free seconds of the link
(`link_clock`), where `solvers.batching` cuts them exactly. What is exact: the end of the gradients of a stage, if all
that its link carries beside compute are those of one collective and one axis. Where several collectives or axes share a
link, or wait for each other, they are cut in turns, each beside what the others are at the moment.

The simulator decides. The uniform rule is where it starts, and cuts are taken if they make its step shorter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel, Overlap
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.overlap import full_bucket
from autopar.fusion.link_clock import FloatArray, LinkClock
from autopar.fusion_plan import STEP, BucketCuts
from autopar.program.bucket_order import Key
from autopar.program.buckets import gradients
from autopar.program.records import Program
from autopar.schedule import SCHEDULES
from autopar.simulate.engine import maker_of, run_step, stages_in_time, traffic_of
from autopar.simulate.fitting import Jobs
from autopar.simulate.gradients import Busy, StageTraffic, making, transfers_by_group, urgent_intervals
from autopar.simulate.layout import NETWORK, Resource
from autopar.simulate.pipeline import PASSES
from autopar.simulate.simulation import Simulation
from autopar.solvers.batching import Cuts, cut_front

StageCuts = tuple[BucketCuts, ...]
"""The cuts of a stage."""

ROUNDS = 3
"""Turns of collectives that share links; one is enough where none does."""

LABELS = 8
"""Trade-offs between end and total that are kept where the total counts, too."""

LEAST_GAIN = 1e-3
"""Share of a step that cuts have to save, by the simulator, to be worth leaving the uniform rule. By hand: a tenth of
what frameworks vary by from step to step."""

MOST_SHARE = 1 - 1e-6
"""Share of reductions that overlaps nothing in the search for cuts: with all of it they would have no length."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Timed:
    """A step with some buckets.

    Attributes:
        step_seconds: The step.
        exposed_seconds: Gradient traffic after the last pass, of the group of devices that has most of it.
        num_buckets: Collectives of gradients per step, of the group that has most of them.
    """

    step_seconds: float
    exposed_seconds: float
    num_buckets: int


@dataclass(frozen=True, slots=True)
class Bucketing:
    """Buckets found for a program.

    Attributes:
        cuts: The cuts of every stage; empty where the uniform rule stands.
        uniform: The step by the uniform rule.
        found: The step with the cuts.
        bound: Step time in seconds if all communication of gradients were beside compute: the full-overlap bound.
        num_gradients: Gradients of the stage that has most of them.
    """

    cuts: tuple[StageCuts, ...]
    uniform: Timed
    found: Timed
    bound: float
    num_gradients: int

    @property
    def gain(self) -> float:
        """Share of the step by the uniform rule that the cuts save."""
        return 1.0 - self.found.step_seconds / self.uniform.step_seconds if self.uniform.step_seconds > 0 else 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether the cuts save enough to leave the uniform rule."""
        return any(self.cuts) and self.gain >= LEAST_GAIN


class BucketTimer:
    """The simulator, for many ways to cut the gradients of one program: its passes are laid out once.

    Args:
        program: A lawful program.
        costs: What it costs.
        whole_blocks: Whether buckets may end at the end of a block only, as those of units of FSDP.
    """

    def __init__(self, program: Program, costs: CostModel, *, whole_blocks: bool = False) -> None:
        self.program, self.costs = program, costs
        self.allowed = _block_ends(program) if whole_blocks else None
        self.stages = stages_in_time(program, costs, None)
        self.maker = maker_of(program)
        self.uncut: tuple[StageCuts, ...] = tuple(() for _ in program.stages)

    @property
    def start(self) -> tuple[StageCuts, ...]:
        """The cuts that others have to be better than: none, or a bucket per block."""
        if self.allowed is None:
            return self.uncut
        return tuple(
            tuple(BucketCuts(*key, tuple((1 + np.flatnonzero(own[1:])).tolist())) for key, own in stage.items())
            for stage in self.allowed
        )

    def traffic(self, cuts: Sequence[StageCuts]) -> list[StageTraffic]:
        """Return the gradient traffic of every stage with some cuts."""
        stages = (replace(stage, buckets=own) for stage, own in zip(self.program.stages, cuts, strict=True))
        return traffic_of(self.stages, replace(self.program, stages=tuple(stages)), self.costs, None)

    def run(self, traffic: Sequence[StageTraffic]) -> Simulation:
        """Return the step with some gradient traffic."""
        return run_step(self.program, self.costs, stages=self.stages, traffic=traffic)

    def time(self, cuts: Sequence[StageCuts]) -> Timed:
        """Return the step with some cuts."""
        return timed(self.run(self.traffic(cuts)))

    def time_uniform(self, bucket: float) -> Timed:
        """Return the step with buckets of so many bytes, 0 if every gradient travels alone; so do new parameters."""
        return timed(run_step(self.program, self.costs, bucket=bucket))

    def full_overlap(self) -> float:
        """Lower bound on the step time with any buckets: compute and communication beside each other.

        Relaxes when gradients are there, and how they share links with each other: each link of a group of devices
        carries what compute waits for, and the gradients of each backward in one bucket per collective and axis.
        Valid when a collective of several gradients together takes no longer than one by one. Source: the bound "FO" of
        Yi et al., "Optimizing DNN compilation for distributed training with joint OP and tensor fusion" (DisCo, TPDS
        2022).
        """
        nothing = [StageTraffic(Jobs.of(()), Jobs.of(()), (), 0.0, 0.0) for _ in self.stages]
        sim = self.run(nothing)
        every, urgent = self.traffic(self.uncut), self.urgent(sim)
        longest = 0.0
        for group, chunks in enumerate(self.program.chunks):
            carried = {link: _taken(spans) for link, spans in urgent[group].items()}
            counts = sim.runs[group].counts(len(chunks))[:, PASSES.index(self.maker)].tolist()
            for chunk, number in enumerate(counts):
                for link, once, seconds in self._least(chunks[chunk], every[chunks[chunk]]):
                    carried[link] += seconds if once else number * seconds
            update = sim.ends[group] - sim.reduced[group]
            end = max(sim.reduced[group], sim.begins[group] + max(carried.values())) + update
            longest = max(longest, end - sim.begins[group])
        return longest + sim.fixed

    def _least(self, stage: int, traffic: StageTraffic) -> Iterable[tuple[Resource, bool, float]]:
        """Yield link, whether it is once per step, and seconds of all gradients of each key of a stage together."""
        costs = self.costs.on(range(*self.program.stages[stage].devices))
        for key in dict.fromkeys(own.key for own in traffic.issued):
            members = [own.traffic for own in traffic.issued if own.key == key]
            first, total = members[0], fsum(own.nbytes for own in members)
            seconds = float(costs.collective_seconds(first.collective, total, first.axis))
            yield first.resource, key[2] == STEP, seconds

    def urgent(self, sim: Simulation) -> list[Busy]:
        """Return, per group of devices, when its links have something that compute or another stage waits for."""
        passing = transfers_by_group(sim.transfers, sim.boundaries, self.program.groups, -1.0)
        return [urgent_intervals(*own, -1.0) for own in zip(sim.groups, sim.runs, passing, strict=True)]


def _taken(spans: FloatArray) -> float:
    """Return the seconds in which any of some intervals is."""
    end = float(spans[:, 1].max(initial=0.0))
    return end - float(LinkClock(spans).free(np.array([end]))[0])


def timed(sim: Simulation) -> Timed:
    """Return what of a step buckets change."""
    exposed = max(reduced - runs[-1].end for reduced, runs in zip(sim.reduced, sim.runs, strict=True))
    return Timed(sim.step, exposed, max(map(_num_buckets, sim.jobs)))


def _num_buckets(jobs: Jobs) -> int:
    """Return the number of buckets among jobs, without those that stand for traffic that cannot overlap."""
    return int(jobs.each(lambda job: job.key is not None).sum()) if len(jobs) else 0


def _block_ends(program: Program) -> list[dict[Key, NDArray[np.bool_]]]:
    """Return, by stage and key, whether a bucket may end before each gradient: where a block begins."""
    table, splits = program.table(), SCHEDULES[program.schedule].splits
    return [
        {
            key: np.array([True, *(one.block != other.block for one, other in pairwise(own)), True])
            for key, own in gradients(stage, table, splits=splits).items()
        }
        for stage in program.stages
    ]


def cut_gradients(
    program: Program, costs: CostModel, *, whole_blocks: bool = False, least_gain: float = 0.0
) -> Bucketing:
    """Return the buckets found for a program, whatever buckets it has; the uniform rule stands where nothing is better.

    Buckets of whole blocks start with one per block, and are never slower than these.

    Args:
        program: A lawful program.
        costs: What it costs.
        whole_blocks: As of `BucketTimer`.
        least_gain: Share of the step that cuts have to save to be of use: where full overlap saves less, nothing is
            looked for; 0 to look anyhow.
    """
    timer = BucketTimer(program, costs, whole_blocks=whole_blocks)
    uniform, bound = timer.time(timer.uncut), timer.full_overlap()
    if least_gain and bound > (1.0 - least_gain) * uniform.step_seconds:
        most = max((len(each.issued) for each in timer.traffic(timer.uncut)), default=0)
        return Bucketing(timer.uncut, uniform, uniform, bound, most)
    cuts = timer.start
    traffic = timer.traffic(cuts)
    sim = timer.run(traffic)
    keys = sorted({own.key for each in traffic for own in each.issued}, key=lambda key: (key[3], key))
    for _ in range(ROUNDS if len(keys) > 1 else 1):
        before = _score(sim)
        for key in keys:
            for proposed in _proposals(timer, cuts, traffic, sim, key):
                other = timer.traffic(proposed)
                changed = timer.run(other)
                if _is_better(_score(changed), _score(sim)):
                    cuts, traffic, sim = proposed, other, changed
        if not _is_better(_score(sim), before):
            break
    most = max((len(each.issued) for each in traffic), default=0)
    return Bucketing(cuts, uniform, timed(sim), bound, most)


def _score(sim: Simulation) -> tuple[float, float]:
    return sim.step, fsum(sim.reduced)


def _is_better(score: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a step is shorter, or as long with reductions that end earlier on the mean."""
    scale = _ROUNDING * other[0]
    return score[0] < other[0] - scale or (score[0] <= other[0] and score[1] < other[1] - scale)


def _proposals(
    timer: BucketTimer, cuts: Sequence[StageCuts], traffic: Sequence[StageTraffic], sim: Simulation, key: Key
) -> list[tuple[StageCuts, ...]]:
    """Return ways to cut the gradients of a key on all stages: of best end and total, of earliest end, of least total.

    Where nothing but the end counts these are one. Gradients per microbatch have others of their kind before them on
    the link, which the same cuts make earlier: for them there are those that are best for a backward by itself, too.
    """
    overlap = Overlap.of(timer.costs.stack)
    counts = overlap.share > 0 or overlap.slowdown > 1 or key[2] != STEP
    urgent = timer.urgent(sim)
    found: dict[int, list[StageCuts]] = {}
    for group, chunks in enumerate(timer.program.chunks):
        for chunk, stage in enumerate(chunks):
            members = [number for number, own in enumerate(traffic[stage].issued) if own.key == key]
            if not members:
                continue
            chosen: list[Cuts] = []
            for alone in (False, True) if key[2] != STEP else (False,):
                front, weight = _front(
                    timer, traffic, sim, urgent[group], group, chunk, key, members, LABELS if counts else 1, alone
                )
                end = sim.runs[group][-1].end
                chosen.append(min(front, key=lambda own: max(own.finish, end) + weight * own.total))
                chosen += [front[0], front[len(front) // 2], front[-1]] if counts else []
            for place, own in enumerate(chosen):
                changed = found.setdefault(place, list(cuts))
                others = tuple(each for each in changed[stage] if each.key != key)
                changed[stage] = (*others, BucketCuts(*key, own.ends))
    return list(dict.fromkeys(tuple(each) for each in found.values()))


def _front(
    timer: BucketTimer,
    traffic: Sequence[StageTraffic],
    sim: Simulation,
    urgent: Busy,
    group: int,
    chunk: int,
    key: Key,
    members: Sequence[int],
    most: int,
    alone: bool,
) -> tuple[list[Cuts], float]:
    """Return cuts of the gradients of a key on a stage, ends in real time, and what a second of their total costs.

    Args:
        timer: Of the program.
        traffic: What all gradients do now.
        sim: The step with that.
        urgent: When the links of these devices have something more urgent, as of `BucketTimer.urgent`.
        group: The devices of the stage.
        chunk: Which of their stages it is.
        key: The gradients.
        members: Their numbers.
        most: Labels of `cut_front`.
        alone: As if no other gradients had the link.
    """
    stage = timer.program.chunks[group][chunk]
    costs, issued = timer.costs.on(range(*timer.program.stages[stage].devices)), traffic[stage].issued
    first = issued[members[0]].traffic
    begin, offset = last_backward(timer, traffic, sim, group, chunk)
    times, jobs = sim.times[group], sim.jobs[group]
    links, keys = jobs.each(lambda job: NETWORK.index(job.resource)), [model.key for model in jobs.models]
    own_part = np.arange(len(jobs))
    here = (links == NETWORK.index(first.resource)) & np.array([keys[number] is not None for number in jobs.model])
    in_part = (own_part >= offset) & (own_part < offset + len(traffic[stage].last))
    own = in_part & np.array([keys[number] == key for number in jobs.model])
    earlier = here & (own_part < offset)
    others = times[here & ~own & ~earlier]
    taken = [urgent[first.resource], *([] if alone else [others])]
    clock = LinkClock(np.concatenate(taken))
    release = [begin + issued[number].ready for number in members]
    for place, number in enumerate(members):
        if issued[number].needed >= 0:
            release[place] = max(release[place], times[offset + issued[issued[number].needed].job, 1])
    overlap = Overlap.of(timer.costs.stack)
    # what overlaps nothing is paid by the total; a little is left to the end so that it has an order
    share = min(overlap.share, MOST_SHARE) if key[2] == STEP else 0.0
    kind, sizes = CollectiveKind(key[0]), [issued[number].traffic.nbytes for number in members]
    # Under ZeRO-2 and 3 gradients wait whole for their bucket: it may hold no more of them than by the uniform rule.
    most_bytes = np.inf if key[2] == STEP else full_bucket(first.axis) + max(sizes)

    def law(loads: FloatArray) -> FloatArray:
        seconds = (1.0 - share) * np.asarray(costs.collective_seconds(kind, loads, first.axis))
        return np.where(loads <= most_bytes, seconds, np.inf)

    free = 0.0 if alone else float(times[earlier, 1].max(initial=0.0))
    front = cut_front(
        clock.free(np.array(release)),
        sizes,
        law,
        free=float(clock.free(np.array([free]))[0]),
        allowed=None if timer.allowed is None else timer.allowed[stage][key],
        most=most,
    )
    weight = (share + (overlap.slowdown - 1.0)) / (1.0 - share)
    return [replace(cuts, finish=float(clock.time(np.array([cuts.finish]))[0])) for cuts in front], weight


def last_backward(
    timer: BucketTimer, traffic: Sequence[StageTraffic], sim: Simulation, group: int, chunk: int
) -> tuple[float, int]:
    """Return when the last backward of a stage starts, and the first of its jobs among those of its group."""
    runs, chunks = sim.runs[group], timer.program.chunks[group]
    makers, is_last = making(runs, timer.maker)
    own = [traffic[stage] for stage in chunks]
    lengths = np.array([[len(each.every), len(each.last)] for each in own])[runs.chunk[makers], is_last.astype(int)]
    number = int(np.flatnonzero(is_last & (runs.chunk[makers] == chunk))[0])
    return float(runs.start[makers[number]]), int(lengths[:number].sum())

"""Step time of a pipeline in closed form, from the seconds of its blocks.

    n_s    = max_l (g_sl + w_sl)                        busiest link, over the links with g_sl > 0
    t_s    = max(f_s + b_s + e g_s, n_s) + (d - 1) min(f_s + b_s, (1 - e) g_s)
    pace   = max_{s<=q} (sum_{s<=i<=q} t_i + 2 (q - s) h) / (q - s + 1)   with 1F1B; else max_s t_s
    flow   = sum_s t_s + (m - 1) pace + 2 (p - 1) h
    late_s = max_lj (sum_{i<=j} ((1 - e) r_il + g_il) - sum_{i<j} (b_i - w_il))    over the blocks i of stage s
    left_s = max(0, late_s - max(0, n_s - f_s - b_s - e g_s))     traffic that the last backward does not hide
    slow_s = (d - 1) max(0, (1 - e) r_s - left_s)                 slowdown of the backward by hidden traffic
    tail_s = left_s + e r_s + u_s
    step   = max_s (flow + sum_{q>=s} slow_q - sum_{q<s} b_q - s h + tail_s) + fixed

f_s, b_s are the forward and backward seconds of stage s for one microbatch (full recompute adds f_s to b_s, selective
recompute the part that is repeated), g_s its gradient traffic per microbatch, r_s its gradient reduction per step, u_s
its update, h the seconds of one hop between stages (if hops differ, h is replaced by their sums,
`pipeline_partition/p2p.py`), p the stages and m the microbatches, e the share of traffic that overlaps nothing and d
the slowdown of overlapped work. A device has two links, one inside its node and one between nodes: g_sl is the part of
g_s on link l, and w_sl the seconds per microbatch that collectives and parameter gathers of the passes use link l,
hidden or not; w_il in late_s is that of the backward.

f and b of a block are those of `autopar.cost.overlap`. Gradient traffic overlaps compute; a link carries one transfer
at a time, and transfers that compute waits for go first. Under 1F1B (Narayanan et al., 2021, arXiv:2104.04473) a stage
waits for the backward of its oldest microbatch before it starts a new one: between stages s and q there are q - s + 1
microbatches, each of which passes all these stages and the hops between them in both directions. The backward ends with
the first block, and gradients of a block travel when its backward ends: late_s is the traffic that the remaining
backward leaves no time for; the traffic of the first block hides behind nothing. Stage 0 ends last; stage s > 0 ends
its last backward sum_{q<s} (b_q + h) earlier. Inference has only f. The event simulator computes the same quantities
from the lowered program; its difference from this formula is reported.

Lower bound over all splits into stages: relaxes max_s t_s to mean_s t_s; uses t_0 + left_0 >= f_0 + b_0 + late_0 for a
single stage; assumes that compute always suffices to hide collectives as far as any compute could. All terms are linear
in the costs of blocks, so that the best choice of strategies is a `Problem` (`linear_weights.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autopar.cost import Overlap, op_flops
from autopar.cost.overlap import HIDING
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import global_shapes
from autopar.formulate.block_memory import FloatArray, SharedBytes, copied_seconds
from autopar.formulate.link_seconds import backward_links, forward_links, gradient_links, recompute_links, reduce_links
from autopar.formulate.tables import Slot
from autopar.ir.graph import Phase
from autopar.recompute import Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.schedule.holding import least_held

Hop: TypeAlias = float | FloatArray
"""Seconds of a message to the next stage and back: one number for all hops, or (stages - 1, 2) for both directions."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline configuration: how a step is cut in time.

    Attributes:
        num_stages: Number of stages.
        num_microbatches: Microbatches per step.
        schedule: Name of the schedule.
        overlap: How compute and communication overlap.
        fixed: Seconds added to every step.
        num_chunks: Stages per group of devices; above 1 they are interleaved.
        turns: Relative overhead of a pass where a device holds several stages.
        others: Pipelines with other schedules for which bounds have to hold as well.
    """

    num_stages: int
    num_microbatches: int
    schedule: str
    overlap: Overlap = HIDING
    fixed: float = 0.0
    num_chunks: int = 1
    turns: float = 0.0
    others: tuple["Pipeline", ...] = ()

    @property
    def num_groups(self) -> int:
        """Number of groups of devices."""
        return self.num_stages // self.num_chunks

    @property
    def fills(self) -> bool:
        """Whether every step has a fill phase: a pass through all groups before the last group is busy.

        Schedules whose steps overlap have none, and groups with several stages may have a first stage of any length.
        """
        own = self.num_chunks == 1 and not SCHEDULES[self.schedule].steps_overlap
        return own and all(other.fills for other in self.others)

    @property
    def with_turns(self) -> float:
        """Factor on the seconds of a pass from running several stages per group."""
        return 1 + (self.turns if self.num_chunks > 1 else 0.0)

    @property
    def rounds(self) -> int:
        """Least number of times that a step takes the mean seconds of all groups for one microbatch."""
        return self.num_microbatches + (self.num_groups - 1 if self.fills else 0)

    def hops(self, hop: Hop) -> float:
        """Return the seconds of all hops of one microbatch; `hop` as of `step_time`."""
        if isinstance(hop, float | int):
            return (2 if SCHEDULES[self.schedule].trains else 1) * (self.num_stages - 1) * hop
        return float(hop.sum())

    def pace(self, stages: FloatArray, hop: Hop) -> float:
        """Return the seconds from one microbatch to the next, given (groups,) seconds; `hop` as of `step_time`."""
        if self.schedule != "1f1b" or not np.any(hop):
            return float(stages.max())
        sums = np.concatenate([[0.0], np.cumsum(stages)])
        first, last = np.triu_indices(len(stages))
        trips = np.arange(len(stages)) * 2 * hop if isinstance(hop, float | int) else _prefix_sums(hop.sum(axis=1))
        return float(((sums[last + 1] - sums[first] + trips[last] - trips[first]) / (last - first + 1)).max())

    def in_flight(self, group: int) -> int:
        """Return a lower bound on the microbatches whose activations all stages of a group keep at one moment.

        The bound holds for this pipeline and for all `others`.
        """
        return min(
            self._own_in_flight(group), *(other.in_flight(group) for other in self.others), self.num_microbatches
        )

    def _own_in_flight(self, group: int) -> int:
        schedule, groups = SCHEDULES[self.schedule], self.num_groups
        if not schedule.splits and self.num_chunks == 1:
            return schedule.in_flight(group, groups, self.num_microbatches)
        return least_held(schedule, group, groups, self.num_microbatches, self.num_chunks)


@dataclass(frozen=True, slots=True)
class Split:
    """Stages of a chain of blocks.

    Attributes:
        ranges: Half-open range of blocks per stage.
        recompute: Per stage, the recompute flavour of each of its blocks.
        offload: Per stage, whether the optimizer state of each of its blocks is in host memory; empty if none is.
        copied: Per stage, what the state of its copies of parameters that other stages own adds to its update, of
            copies whose state is in host memory; empty if there is none.
        what: What of the state of those blocks is in host memory.
    """

    ranges: tuple[tuple[int, int], ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    offload: tuple[tuple[bool, ...], ...] = ()
    copied: tuple[float, ...] = ()
    what: Hosted = Hosted.OPTIMIZER

    @classmethod
    def uniform(
        cls, ranges: Sequence[tuple[int, int]], recompute: Sequence[Recompute], offload: Sequence[bool] = ()
    ) -> "Split":
        """Return the split in which all blocks of a stage have one flavour, and their optimizer state one place."""
        stages = zip(ranges, recompute, strict=True)
        each = tuple((flavour,) * (stop - start) for (start, stop), flavour in stages)
        places = zip(ranges, offload, strict=True) if any(offload) else ()
        return cls(tuple(ranges), each, tuple((away,) * (stop - start) for (start, stop), away in places))

    @classmethod
    def of_stages(
        cls,
        ranges: Sequence[tuple[int, int]],
        recompute: Sequence[tuple[Recompute, ...]],
        offload: Sequence[tuple[bool, ...]],
        shared: Sequence[SharedBytes],
        what: Hosted = Hosted.OPTIMIZER,
    ) -> "Split":
        """Return the split of stages whose copies of shared parameters have their state where their blocks have it."""
        if not any(map(any, offload)):
            return cls(tuple(ranges), tuple(recompute))
        copied = tuple(copied_seconds(shared, *each, away) for each, away in zip(ranges, offload, strict=True))
        return cls(tuple(ranges), tuple(recompute), tuple(offload), copied if any(copied) else (), what)

    @property
    def flavours(self) -> tuple[Recompute, ...]:
        """Recompute flavour of each block of the chain."""
        return tuple(flavour for stage in self.recompute for flavour in stage)

    @property
    def hosted(self) -> tuple[bool, ...]:
        """Whether the optimizer state of each block of the chain is in host memory."""
        return tuple(away for stage in self.away for away in stage)

    @property
    def away(self) -> tuple[tuple[bool, ...], ...]:
        """Per stage, whether the optimizer state of each of its blocks is in host memory."""
        return self.offload or tuple((False,) * (stop - start) for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """Seconds of a step by the formula of this module, and its parts for the slowest stage.

    Attributes:
        seconds: The step.
        flow: From the first forward to the last backward of stage 0.
        tail: After the last backward of the slowest stage.
        stage_seconds: (stages,) t_s.
    """

    seconds: float
    flow: float
    tail: float
    stage_seconds: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Seconds of stages, (stages,) each: f_s, b_s, g_s, n_s, r_s, u_s and late_s of this module."""

    forward: FloatArray
    backward: FloatArray
    gradient: FloatArray
    busiest: FloatArray
    reduced: FloatArray
    update: FloatArray
    late: FloatArray


def stage_times(totals: FloatArray, chain: Sequence[int], split: Split, overlap: Overlap) -> StageTimes:
    """Return the seconds of the stages of a split; arguments as of `step_time`."""
    blocks, flavours = totals[np.asarray(chain)], split.flavours
    forward = blocks[:, Slot.FORWARD].copy()
    update = blocks[:, Slot.UPDATE] + np.where(split.hosted, blocks[:, Slot.STATE], 0.0)
    forward += np.where(split.hosted, blocks[:, Slot.HOST_FORWARD], 0.0)
    rerun, waited = np.where(split.hosted, blocks[:, Slot.HOST_BACKWARD], 0.0), backward_links(blocks)
    for recompute in set(flavours):
        chosen = np.array([flavour is recompute for flavour in flavours])
        rerun[chosen] += rerun_seconds(blocks[chosen], recompute)
        waited[:, chosen] += recompute_links(blocks[chosen], recompute)
        forward[chosen] += copy_seconds(blocks[chosen], recompute)
    starts = np.array([start for start, _ in split.ranges])
    backward, gradient = blocks[:, Slot.BACKWARD] + rerun, gradient_links(blocks)
    due = (1 - overlap.share) * reduce_links(blocks) + gradient
    spare = backward - waited  # free seconds per link
    spent, owed = np.cumsum(spare, axis=1) - spare, np.cumsum(due, axis=1) - due  # sums over the blocks before each
    late = np.maximum.reduceat(owed + due - spent, starts, axis=1) - owed[:, starts] + spent[:, starts]
    sums = np.add.reduceat(blocks, starts)
    return StageTimes(
        np.add.reduceat(forward, starts),
        np.add.reduceat(backward, starts),
        sums[:, Slot.GRADIENT],
        busiest_link(gradient_links(sums), forward_links(sums) + np.add.reduceat(waited, starts, axis=1)),
        sums[:, Slot.REDUCE],
        np.add.reduceat(update, starts) + (split.copied or 0.0),
        np.maximum(late.max(axis=0), due.sum(axis=0)[starts]),
    )


def step_time(totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, split: Split, hop: Hop) -> StepTime:
    """Return the step time of blocks split into stages.

    Args:
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        chain: Kind of every block.
        pipeline: Stages, microbatches, schedule.
        split: The stages.
        hop: Seconds of sending the boundary values of one microbatch to the next stage, and of sending their gradients
            back: one number for all stages, or (stages - 1, 2) for both directions.
    """
    return time_of(stage_times(totals, chain, split, pipeline.overlap), pipeline, hop)


def time_of(stages: StageTimes, pipeline: Pipeline, hop: Hop) -> StepTime:
    """Return the step time of stages; `hop` as of `step_time`."""
    overlap, chunks = pipeline.overlap, pipeline.num_chunks
    backward = stages.backward
    trains = bool(backward.any())
    passes = stages.forward + backward
    stage = stage_seconds(passes, stages.gradient, stages.busiest, overlap)
    if chunks > 1:
        stage = stage * (1 + pipeline.turns)
    # A group is busy for the sum of its stages; a microbatch fills the pipeline one stage at a time.
    groups = stage.reshape(chunks, -1).sum(axis=0)
    busiest = groups.max()
    follow = (pipeline.num_microbatches - 1) * pipeline.pace(groups, hop)
    flow = float(groups.sum() + (chunks - 1) * busiest) / chunks + follow + pipeline.hops(hop)
    left = left_seconds(stages.late, passes, stages.gradient, stages.busiest, overlap)
    slow = slow_seconds(stages.reduced, left, overlap)
    # The first chunk of a group runs its backward last; reductions of the other chunks are taken to be done by then.
    first = slice(0, len(groups))
    once = (overlap.share * stages.reduced + stages.update).reshape(chunks, -1).sum(axis=0)
    tail = left[first] + once
    hops = hop * np.arange(len(groups)) if isinstance(hop, float | int) else _prefix_sums(hop[:, 1])
    earlier = _prefix_sums(backward[first])[:-1] + hops
    ends = flow - (earlier if trains else 0.0) + np.cumsum(slow[first][::-1])[::-1] + tail + pipeline.fixed
    slowest = int(ends.argmax())
    return StepTime(float(ends[slowest]), flow, float(tail[slowest]), stage)


def busiest_link(gradient: FloatArray, waited: FloatArray) -> FloatArray:
    """Return n_s from (2, ...) seconds of gradient traffic and of other collectives of a microbatch on each link."""
    return np.asarray(np.where(gradient > 0, gradient + waited, 0.0).max(axis=0))


def _prefix_sums(each: FloatArray) -> FloatArray:
    """Return the prefix sums, from 0 to the sum of all."""
    return np.concatenate([[0.0], np.cumsum(each)])


def stage_seconds(passes: FloatArray, gradient: FloatArray, busiest: FloatArray, overlap: Overlap) -> FloatArray:
    """Return t_s from the seconds of both passes, of gradient traffic and n_s."""
    beside = np.minimum(passes, (1 - overlap.share) * gradient)
    return np.asarray(np.maximum(passes + overlap.share * gradient, busiest) + (overlap.slowdown - 1) * beside)


def left_seconds(
    late: FloatArray, passes: FloatArray, gradient: FloatArray, busiest: FloatArray, overlap: Overlap
) -> FloatArray:
    """Return left_s from late_s and the arguments of `stage_seconds`.

    If a link sets the pace of a stage, it has carried the excess by the end of the last backward.
    """
    return np.maximum(0.0, late - np.maximum(0.0, busiest - passes - overlap.share * gradient))


def slow_seconds(reduced: FloatArray, left: FloatArray, overlap: Overlap) -> FloatArray:
    """Return slow_s from r_s and left_s."""
    return (overlap.slowdown - 1) * np.maximum(0.0, (1 - overlap.share) * reduced - left)


def rerun_seconds(seconds: FloatArray, recompute: Recompute) -> FloatArray:
    """Return (...,) seconds of recompute or fetches before a backward, given (..., slots) seconds."""
    match recompute:
        case Recompute.NONE:
            return np.zeros(seconds.shape[:-1])
        case Recompute.SELECTIVE:
            return np.asarray(seconds[..., Slot.SELECTIVE])
        case Recompute.FULL:
            return np.asarray(seconds[..., Slot.FORWARD])
        case Recompute.OFFLOAD:
            return np.asarray(seconds[..., Slot.FETCH])


def copy_seconds(seconds: FloatArray, recompute: Recompute) -> FloatArray:
    """Return (...,) seconds that a forward waits for copies to host memory, given (..., slots) seconds."""
    if recompute is Recompute.OFFLOAD:
        return np.asarray(seconds[..., Slot.OFFLOAD])
    return np.zeros(seconds.shape[:-1])


def model_flops(folded: Folded) -> float:
    """Return the FLOPs of one microbatch, forward and backward, without recompute."""
    total = 0.0
    for kind in folded.kinds:
        for op in kind.ops:
            if op.phase is not Phase.UPDATE:
                inputs, outputs = global_shapes(folded.graph, op)
                total += kind.count * float(op_flops(op, inputs, outputs)[0])
    return total

"""Estimates: thousands of plans by degrees of one model, by formula from tables that they share.

What a block takes depends on the tensor, context and expert degrees, on ZeRO, on sequence parallelism and on the
samples of a device. A table is made for each combination of these that occurs: the blocks are placed and lowered as for
any plan, with few devices (or groups that share what ZeRO splits) on the data-parallel axis, two where these cross as
many tiers of links as those of the plan, and laid out as for the event simulator: which collectives bring a gradient to
where it is stored depends on the tiers. Beyond that the number of data-parallel devices only changes how long
collectives over their axis take, how much of the update a device does and how much of the optimizer's state it holds,
which is worked out from the same instructions.
What is left (pipeline degree, microbatches, schedule, interleaving, recompute) goes through the formula that the
planner minimises, `autopar.formulate.step_time`, or for schedules that split the backward through
`autopar.formulate.scheduled_step`.

So an estimate differs from a prediction by what the formula leaves out of the event simulator: buckets that are not
full, traffic that waits for other traffic, uneven waits in a pipeline. The tests hold it to that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.cost import IDEAL, CostModel, Overlap, Resharder, Stack, priced
from autopar.cost.collectives import widest_tier
from autopar.cost.policy import MIXED, DtypePolicy
from autopar.degrees import Degrees
from autopar.errors import JobError
from autopar.estimates.table import Table, schedule_of
from autopar.events import Profile
from autopar.folding.graph_facts import dealt_lengths
from autopar.formulate.scheduled_step import scheduled_step
from autopar.formulate.step_time import Pipeline, time_of
from autopar.prediction import Predictor, check_work, in_context, kernels
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES, usual_schedule
from autopar.tactics.by_degrees import data_axes
from autopar.task import job_machine
from autopar.training import OPTIMIZERS

FloatArray = NDArray[np.float64]

_REFERENCE = 2
"""Least devices on the data-parallel axis of a table, or groups of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """What plans come to, (plans,) each: seconds of a step, and bytes on the fullest device."""

    step_seconds: FloatArray
    peak_bytes: FloatArray


@dataclass(eq=False)
class Estimator:
    """Estimates for one model on one cluster.

    Attributes:
        predictor: The model.
        cluster: The hardware; plans get the part of it that a job of theirs would.
        stack: The software.
        policy: Bytes per element.
        profile: Measured events that count in place of formulas; None if there are none.
        tables: Those that have been made.
    """

    predictor: Predictor
    cluster: Cluster
    stack: Stack = IDEAL
    policy: DtypePolicy = MIXED
    profile: Profile | None = None
    tables: dict[object, Table] = field(default_factory=dict, repr=False)
    _machines: dict[tuple[int, int, int], tuple[Cluster, int]] = field(default_factory=dict, repr=False)

    def estimate(self, plans: Sequence[Degrees]) -> Estimates:
        """Return what plans come to; the tables that are missing are made first.

        Raises:
            JobError: If a plan does not fit the model or its schedule.
            TacticError: If it has more stages than the model has blocks.
        """
        known = map(self.predictor.settled, plans)
        found = np.array([_estimate(self.table(own), own) for own in known], dtype=np.float64).reshape(-1, 2)
        return Estimates(found[:, 0], found[:, 1])

    def peaks(self, degrees: Degrees) -> FloatArray:
        """Return the bytes at the fullest moment of each group of devices of a plan's pipeline, (groups,).

        Raises:
            JobError, TacticError: As of `estimate`.
        """
        settled = self.predictor.settled(degrees)
        return self.table(settled).peaks(settled)

    def check(self, degrees: Degrees) -> None:
        """Refuse a plan whose tensor- or expert-parallel devices would do the same work.

        Raises:
            JobError, TacticError: If they would, or the model cannot be placed so.
        """
        settled = self.predictor.settled(degrees)
        table = self.table(settled)
        check_work(table.plan, table.folded, settled)

    def floor(self, degrees: Degrees) -> float:
        """Return a lower bound on the step time of plans that differ in ZeRO, recompute, schedule and stages only.

        What all blocks take for all microbatches, shared evenly by the groups of devices, without any bubble. ZeRO and
        recompute make no pass shorter, nor does a backward that is split.

        Raises:
            TacticError: If the model cannot be placed so.
        """
        return degrees.num_microbatches * self._bare(degrees).busy_seconds(self._plain(degrees)) / degrees.pp

    def floor_bytes(self, degrees: Degrees, flavours: Sequence[Recompute] = ON_DEVICE) -> float:
        """Return a lower bound on the bytes of activations of plans that differ in ZeRO, recompute and offload only.

        Args:
            degrees: The plan.
            flavours: What layers may keep of their forward.

        Raises:
            TacticError: If the model cannot be placed so.
        """
        least = {Recompute.FULL, Recompute.OFFLOAD} & set(flavours) or set(flavours)
        table, plain = self._bare(degrees), self._plain(degrees)
        least = least if SCHEDULES[plain.schedule].trains else {Recompute.NONE}
        return min(table.live(replace(plain, recompute=str(flavour))) for flavour in least)

    def _bare(self, degrees: Degrees) -> Table:
        hides = SCHEDULES[degrees.schedule].hides_dispatch if degrees.schedule else False
        joint = "1f1b-a2a" if hides else usual_schedule(self.predictor.workload.mode)
        return self.table(replace(self._plain(degrees), schedule=joint, interleave=1))

    def _plain(self, degrees: Degrees) -> Degrees:
        return replace(degrees.in_mode(self.predictor.workload.mode), zero=0, shard=0, offload="")

    def table(self, degrees: Degrees) -> Table:
        """Return the table a plan is estimated from, made if it is not there.

        Args:
            degrees: The plan, with what `Predictor.sharing` says.

        Raises:
            ClusterError: If a plan offloads on a cluster of which it is not known how devices reach host memory, or if
                the cluster has fewer devices than it takes.
            JobError: As of `estimate`.
        """
        degrees = degrees.in_mode(self.predictor.workload.mode)
        machine, number = self._machine(degrees)
        if degrees.offload or degrees.recompute == Recompute.OFFLOAD:
            machine.known_host()
        experts = degrees.ep, degrees.whole_experts
        context = (degrees.cp, in_context(degrees, self.stack).cp_kind)
        placed = (degrees.tp, context, experts, degrees.zero, degrees.sequence_parallel, degrees.microbatch)
        schedule = SCHEDULES[degrees.schedule]
        key = (*placed, self._reference(degrees, machine), schedule.splits, schedule.hides_dispatch, number)
        if key not in self.tables:
            self.tables[key] = self._make(degrees, machine)
        return self.tables[key]

    def _machine(self, degrees: Degrees) -> tuple[Cluster, int]:
        """Return the part of the cluster that a plan gets, as it numbers devices, and its number: few are distinct."""
        inside = (degrees.pp, degrees.data) if degrees.pp_inside else (1, 1)
        key = degrees.gpus, *inside
        if key not in self._machines:
            machine = degrees.numbered(job_machine(degrees.gpus, self.cluster.by_node))
            numbers = {known: number for known, number in self._machines.values()}
            self._machines[key] = machine, numbers.get(machine, len(numbers))
        return self._machines[key]

    def _make(self, degrees: Degrees, machine: Cluster) -> Table:
        (data, sharing), schedule = self._reference(degrees, machine), SCHEDULES[degrees.schedule]
        small = replace(
            _on_data_devices(degrees, data, sharing),
            schedule=usual_schedule(self.predictor.workload.mode),
            recompute=Recompute.SELECTIVE if schedule.trains else Recompute.NONE,
            offload="",
        )
        plan = self.predictor.planned(small, machine, self.stack, policy=self.policy)
        folded = self.predictor.workload.folded(small.samples)
        costs = CostModel(machine, self.policy, kernels(self.stack))
        resharder = Resharder(plan.device_mesh, costs, dealt_lengths(folded))
        kinds = lower_blocks(plan.blocks, folded, resharder, splits=schedule.splits)
        costs = priced(CostModel(machine, self.policy, self.stack), self.profile)
        costs = costs.overlapped() if schedule.hides_dispatch else costs
        return Table(plan, folded, kinds, costs, degrees.zero, sharing)

    def _reference(self, degrees: Degrees, machine: Cluster) -> tuple[int, int]:
        """Return how many data-parallel devices a table is made for, and how many of them share what ZeRO splits.

        The fewest whose axes cross the tiers that those of the plan do. What a group reduces that shares is reduced
        once more by all groups, each its part: so as many share as in the plan. As many share as well if an update
        reads more than an element: such a part does not scale.
        """
        workload, data, sharing = self.predictor.workload, degrees.data, degrees.sharing
        if workload.mode == "train" and degrees.zero and OPTIMIZERS[workload.optimizer].whole:
            return data, sharing
        apart, tiers = sharing < data, _tiers(degrees, machine)
        fewest = _REFERENCE * (sharing if apart else 1)
        while fewest < data:
            found = fewest, sharing if apart else fewest
            if _tiers(_on_data_devices(degrees, *found), machine) == tiers:
                return found
            fewest *= 2
        return data, sharing


def _on_data_devices(degrees: Degrees, data: int, sharing: int) -> Degrees:
    """Return one microbatch and one stage of a plan with `data` devices that have the same experts.

    Args:
        degrees: The plan.
        data: Devices that have the same experts.
        sharing: How many of them share what ZeRO splits, if anything.
    """
    devices = data * degrees.expert_axis
    return replace(
        degrees,
        dp=devices,
        shard=sharing if degrees.zero else 0,
        pp=1,
        interleave=1,
        layers=(),
        predictions=(),
        pp_inside=False,
        global_batch=devices * degrees.microbatch,
    )


def _tiers(degrees: Degrees, machine: Cluster) -> tuple[int, ...]:
    """Return the widest tier of links that each data axis crosses."""
    return tuple(widest_tier(axis, machine) for axis in data_axes(degrees))


def _estimate(table: Table, degrees: Degrees) -> tuple[float, float]:
    """Return the seconds of a step and the bytes on the fullest device."""
    name = schedule_of(degrees)
    why, hint = SCHEDULES[name].problem(degrees.pp, degrees.num_microbatches, degrees.interleave)
    if why:
        raise JobError(f"schedule {name} {why}", hint=hint)
    stack, there_and_back = table.costs.stack, table.hops(degrees)
    if SCHEDULES[name].splits:
        works = table.works(degrees)
        seconds = scheduled_step(name, degrees.pp, degrees.num_microbatches, works, there_and_back)
        return seconds + stack["step_seconds"], table.peak(degrees)
    pipeline = Pipeline(
        degrees.num_stages,
        degrees.num_microbatches,
        name,
        Overlap.of(stack),
        stack["step_seconds"],
        degrees.interleave,
        stack["interleave_overhead"],
    )
    return time_of(table.stages(degrees), pipeline, fmean(there_and_back)).seconds, table.peak(degrees)

"""Usual practice in seconds: what grid search and Megatron-LM's rules would have found, to stand beside a plan.

The degrees that sweeps vary: data, tensor (within a node), pipeline and expert parallelism, samples per microbatch (one
about per factor of two), stages per group, recompute, and devices where fewer may be as fast. What sweeps settle
beforehand: 1F1B, sequence parallelism wherever there is tensor parallelism, ZeRO 1 or 3, no context parallelism. Plans
nearest to the one they stand beside are priced first, so that a sweep that is cut has seen those that are most likely
to be as good. `autopar benchmark` sweeps the whole space of degrees.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain

from autopar.bench.baselines import best_simulated, raced
from autopar.bench.baselines.degree_space import DECISIONS, DegreeSpace, Partial, Value
from autopar.bench.baselines.megatron import megatron
from autopar.bench.baselines.race import Race
from autopar.bench.records import PlanFigures
from autopar.degrees import Degrees
from autopar.describe.axis_roles import roles_of_axes
from autopar.plan import Plan, Rival
from autopar.practice import Practice
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.recompute import Recompute
from autopar.task import Effort, Task
from autopar.verdict import step_seconds

SHARE = 0.1
"""Time of the grid if nobody says, as a share of what its plan took."""
LEAST_SECONDS, MOST_SECONDS = 1.0, 10.0
"""That time is never less or more than this."""
RULES_SHARE = 0.25
"""Time of Megatron's rules, as a share of that of the grid, most of whose prices they share."""
RULES = "tensor parallelism within a node as small as fits, then pipelines; ZeRO-1; experts within a node"
"""Megatron's rules in words."""
PREVIEW_SECONDS = 1.0
"""Processor time of the plans that are told while kernels compile; the first one takes a quarter of a second."""
SWEPT = {"train": "1F1B, tensor parallelism within a node, ZeRO 1 or 3", "infer": "tensor parallelism within a node"}
"""The degrees in words, by mode."""

_SCHEDULES = ("1f1b", "forward-only")
_ZERO = (1, 3)


class UsualSpace(DegreeSpace):
    """The part of the space of degrees that people sweep."""

    def options(self, partial: Partial) -> tuple[Value, ...]:
        """Return the values the next decision can take; none if the decisions so far lead nowhere."""
        found = super().options(partial)
        match DECISIONS[len(partial)]:
            case "tp":
                return tuple(tp for tp in found if isinstance(tp, int) and tp <= self.node)
            case "cp":
                return tuple(cp for cp in found if cp == 1)
            case "microbatch":
                return _doubling([size for size in found if isinstance(size, int)])
            case "flow":
                return tuple(flow for flow in found if isinstance(flow, tuple) and flow[0] in _SCHEDULES)
            case "zero":
                return tuple(level for level in found if level in _ZERO) or found[:1]
            case "sequence_parallel":
                return found[-1:]
            case _:
                return found


def _doubling(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the first of ascending sizes, the next that are twice as many or more, and the last.

    >>> _doubling([1, 2, 3, 4, 6, 12])
    (1, 2, 4, 12)
    """
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 2 * kept[-1] or size == sizes[-1]:
            kept.append(size)
    return tuple(kept)


class UsualRace(Race):
    """Grid search at work on that part."""

    @cached_property
    def space(self) -> DegreeSpace:
        """The plans by degrees that people sweep."""
        whole = super().space
        return UsualSpace(**{field.name: getattr(whole, field.name) for field in fields(whole)})


@dataclass(slots=True, eq=False)
class Sweep:
    """Prices all plans of a race, those nearest to given degrees first.

    Attributes:
        center: Degrees by their names in `Degrees`.
        seconds: Step time to compare with: numbers of devices on which no plan is as fast are left out.
        total: How many plans there are; known once it has begun.
        counts: The numbers of devices of these plans, descending; known once it has begun.
    """

    center: Mapping[str, int]
    seconds: float = 0.0
    total: int = 0
    counts: tuple[int, ...] = ()

    def __call__(self, race: Race) -> None:
        """Price plans until all are, or the race is stopped."""
        counts = race.space.gpu_counts
        self.counts = (*counts[:1], *filter(lambda gpus: race.least(gpus) < self.seconds, counts[1:]))
        leaves = chain.from_iterable(race.space.leaves({"gpus": gpus}) for gpus in self.counts)
        plans = sorted(filter(race.is_allowed, map(race.space.degrees, leaves)), key=self.distance)
        self.total = len(plans)
        for plan in plans:
            stopped = race.stopped
            if stopped == "interrupted" or (stopped and race.prices):
                return  # the nearest plan is priced however short the time is
            race.price(plan)

    def distance(self, plan: Degrees) -> float:
        """Return how far a plan is away: factors of two between its degrees and the given ones, added up."""
        return sum(abs(math.log2(getattr(plan, name) / value)) for name, value in self.center.items())


def usual_practice(
    task: Task,
    plan: Plan,
    *,
    seconds: float | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Practice:
    """Return what grid search over the usual degrees and Megatron-LM's documented rules find for the task of a plan.

    Args:
        task: The task; of its pins only those count that `Task.runs` knows.
        plan: What was found for it.
        seconds: For the grid; None for a tenth of what the plan took. The rules get a quarter of that more.
        progress: Told of every better plan.
        should_stop: Polled; once true the best so far is returned.
    """
    limit = seconds if seconds is not None else grid_seconds(plan)
    effort = Effort(top_k=1, time_limit=limit)
    sweep = Sweep(_degrees(plan, task), step_seconds(plan))
    hosts = any(stage.offload or Recompute.OFFLOAD in stage.flavours for stage in plan.stages)
    own, began = task.opened if hosts else task, time.monotonic()
    race, plans, stopped, _ = raced(sweep, own, effort, "grid", progress, should_stop, kind=UsualRace)
    space = ", ".join((SWEPT[task.job.mode], *(f"on {gpus} GPUs, too" for gpus in sweep.counts[1:])))
    grid = _rival("grid search", space, plans, race, sweep.total, stopped, began)
    if stopped == "interrupted":
        return Practice(grid, best=next(iter(plans), None))
    began = time.monotonic()
    ruled = race.beside("megatron", began + RULES_SHARE * limit)
    megatron(ruled)
    by_rules = best_simulated(ruled, ruled.finalists(), 1, ruled.end)
    rules = _rival("Megatron's rules", RULES, by_rules, ruled, len(ruled.prices), ruled.stopped, began)
    return Practice(grid, rules, min((*plans, *by_rules), key=step_seconds, default=None))


def _rival(method: str, space: str, plans: Sequence[Plan], race: Race, total: int, stopped: str, began: float) -> Rival:
    """Return what is told of a method: its best plan and how many it priced of how many since some time."""
    best = PlanFigures.of(plans[0], race.task.job.gpus) if plans else None
    return Rival(
        method=method,
        space=space,
        summary="" if best is None else best.summary,
        step_seconds=None if best is None else best.step_seconds,
        peak_bytes=None if best is None else best.peak_bytes,
        tried=len(race.prices),
        plans=total,
        stopped=stopped,
        seconds=time.monotonic() - began,
    )


def usual_preview(task: Task, progress: ProgressCallback = silent, should_stop: StopCallback = never) -> None:
    """Tell the fastest of the usual plans of a task, by estimates, while other processes prepare the search.

    Those that split the model least come first, of them those with the largest microbatches. It ends once it is
    stopped, all are priced, or one has been found that fits and `PREVIEW_SECONDS` are over: others need the processor.

    Args:
        task: The task, without pins.
        progress: Told of every better plan.
        should_stop: Polled between plans.
    """
    began = time.process_time()
    race = UsualRace(task, "usual", math.inf, silent, should_stop)
    gpus = race.space.gpu_counts[0]
    plans = sorted(map(race.space.degrees, race.space.leaves({"gpus": gpus})), key=_split)
    best = math.inf
    for number, plan in enumerate(plans, 1):
        if race.stopped or (best < math.inf and time.process_time() - began > PREVIEW_SECONDS):
            return
        race.price(plan)
        if race.best < best:
            best = race.best
            progress(Progress("usual", number, len(plans), best, detail=str(plan)))


def _split(plan: Degrees) -> tuple[int, int]:
    """Return on how many devices a plan splits the model, and the negated samples of a microbatch."""
    return plan.tp * plan.pp * plan.cp, -plan.microbatch


def _degrees(plan: Plan, task: Task) -> dict[str, int]:
    """Return what degrees come nearest to a plan; of stages with meshes of their own, those of the first."""
    roles = roles_of_axes(plan.mesh, plan.blocks, task.workload.folded(plan.microbatch))
    data = math.prod(found.axis.size for found in roles if found.role in ("dp", "ep"))
    groups = len({stage.devices for stage in plan.stages})
    return {
        "gpus": plan.job.gpus,
        "tp": math.prod(found.axis.size for found in roles if found.role == "tp"),
        "pp": groups,
        "interleave": len(plan.stages) // groups,
        "microbatch": max(1, plan.microbatch // data),
    }


def grid_seconds(plan: Plan) -> float:
    """Return the seconds a grid beside a plan may take if nobody says."""
    took = sum(phase.seconds for phase in plan.search.phases) if plan.search is not None else 0.0
    return min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * took))

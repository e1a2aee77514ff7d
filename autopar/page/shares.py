"""Where time and memory go, how the search went, how plans compare: what the other charts and the tables show."""

import math
from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.page.records import Progress, Ranked, ScalePoint, StageShares, Waterfall
from autopar.plan import Plan, SearchReport
from autopar.report.summary import WHY_STOPPED
from autopar.simulate import StageTimeline, Timeline

_TIMES = (
    ("compute", "compute_seconds"),
    ("collectives waited for", "collective_seconds"),
    ("values on their way", "wait_seconds"),
    ("bubble", "bubble_seconds"),
    ("gradient reduction", "gradient_seconds"),
    ("update", "update_seconds"),
    ("gathers of the update", "gather_seconds"),
    ("host, slowdown, fixed", "delay_seconds"),
)
"""Parts of a step as `StageTimeline` has them; they add up to the step."""


def time_waterfall(timeline: Timeline) -> Waterfall:
    """Return where the step of the busiest stage goes."""
    busiest = timeline.busiest
    parts = tuple((name, seconds) for name, seconds in _times(busiest) if seconds > 0)
    return Waterfall(f"Time of stage {busiest.index}, the busiest", "step", parts)


def time_shares(timeline: Timeline) -> StageShares:
    """Return where the step of every stage goes."""
    return _shares(timeline, [dict(_times(stage)) for stage in timeline.stages])


def memory_waterfall(timeline: Timeline) -> Waterfall:
    """Return what is on the fullest device at its fullest moment."""
    fullest = max(timeline.stages, key=lambda stage: stage.memory.bytes)
    parts = tuple((str(name), size) for name, size in fullest.memory.breakdown if size > 0)
    return Waterfall(f"Memory of stage {fullest.index}, the fullest, during {fullest.memory.during}", "peak", parts)


def memory_shares(timeline: Timeline) -> StageShares:
    """Return what is on the devices of every stage at their fullest moment."""
    breakdowns = [{str(name): size for name, size in stage.memory.breakdown} for stage in timeline.stages]
    return _shares(timeline, breakdowns)


def _times(stage: StageTimeline) -> list[tuple[str, float]]:
    return [(name, getattr(stage, field)) for name, field in _TIMES]


def _shares(timeline: Timeline, values: Sequence[dict[str, float]]) -> StageShares:
    parts = [part for part in values[0] if any(stage[part] > 0 for stage in values)]
    return StageShares(
        tuple(str(stage.index) for stage in timeline.stages),
        tuple(parts),
        tuple(tuple(stage[part] for stage in values) for part in parts),
    )


def search_progress(plan: Plan) -> Progress | None:
    """Return how the search of a plan went; None if it says nothing of it.

    Where the search kept no history there is one point, its end: nothing to draw a curve through.
    """
    search = plan.search
    if search is None:
        return None
    history = [(point.seconds, point.objective, point.bound) for point in getattr(search, "history", ())]
    if not history:
        history = [(math.fsum(phase.seconds for phase in search.phases), search.objective, search.bound)]
    seconds, objective, bound = zip(*history, strict=True)
    return Progress(seconds, objective, bound, _explored(search))


def _explored(search: SearchReport) -> str:
    left = search.configurations - search.solved - search.pruned
    return (
        f"{WHY_STOPPED.get(search.termination, search.termination)}; of {search.configurations} configurations "
        f"{search.solved} solved, {search.pruned} excluded by their bound, {left} not looked at"
    )


def ranking(plan: Plan) -> tuple[Ranked, ...]:
    """Return the plan and its runners-up."""
    return tuple(_ranked(candidate) for candidate in (plan, *plan.alternatives))


def _ranked(plan: Plan) -> Ranked:
    simulated = plan.simulated
    if simulated is None:
        return Ranked(plan.summary, plan.objective, None, None, None)
    peak = max((stage.peak for stage in simulated.stages), default=0.0)
    return Ranked(plan.summary, plan.objective, simulated.step_seconds, peak, simulated.mfu)


def scaling(plan: Plan, others: Sequence[Plan]) -> tuple[ScalePoint, ...]:
    """Return a plan and plans of the same model for other devices, by number of devices; nothing without others.

    Raises:
        PlanError: If one of them is of another model or mode.
    """
    for other in others:
        if (other.model.sha256, other.job.mode) != (plan.model.sha256, plan.job.mode):
            raise PlanError(
                f"a plan of {other.model.name} ({other.job.mode}) cannot be compared with one of {plan.model.name} "
                f"({plan.job.mode})",
                hint="give plans of one model, made with the same --set and --mode",
            )
    points = [_point(each) for each in (plan, *others)] if others else []
    return tuple(sorted(points, key=lambda point: (point.gpus, point.step)))


def _point(plan: Plan) -> ScalePoint:
    return ScalePoint(
        gpus=plan.job.gpus,
        cluster=str(plan.job.cluster.get("name", "")),
        step=plan.objective if plan.simulated is None else plan.simulated.step_seconds,
        batch=plan.job.global_batch,
        bound=None if plan.search is None else plan.search.bound,
        summary=plan.summary,
    )

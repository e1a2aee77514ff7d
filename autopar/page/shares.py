"""Where time and memory go, how the search went, how plans compare: what the other charts and the tables show."""

import math
from collections.abc import Mapping, Sequence

from autopar.alternatives import Alternative, Weighing
from autopar.describe.step_parts import busiest_parts, stage_parts
from autopar.errors import PlanError
from autopar.page.records import Alternatives, Lanes, LaneShares, Progress, Ranked, ScalePoint, Waterfall, Weighed
from autopar.plan import Plan, SearchReport, Simulated
from autopar.report.alternatives import ended, limits
from autopar.report.parts import changed_parts, split_at_peak
from autopar.report.summary import why_stopped
from autopar.report.timeline import format_task
from autopar.simulate import Timeline


def time_waterfall(
    timeline: Timeline, roles: Sequence[Mapping[str, str]], lanes: Lanes, ideal: float = 0.0
) -> Waterfall:
    """Return where the step of the busiest lane goes.

    Args:
        timeline: The simulated step.
        roles: What each mesh axis does, by stage.
        lanes: Stages, or device groups.
        ideal: Seconds that the model's FLOPs would take at the peak of all devices, where compute is split; 0 not to.
    """
    busiest = timeline.busiest
    parts = tuple(split_at_peak(busiest_parts(timeline, roles), ideal))
    return Waterfall(f"Time of {lanes.titles[busiest.index]}, the busiest", "step", parts)


def time_shares(timeline: Timeline, roles: Sequence[Mapping[str, str]], lanes: Lanes) -> LaneShares:
    """Return where the step of every lane goes; `roles` say what each mesh axis does, by stage."""
    return _shares(lanes, [dict(stage_parts(stage, roles[stage.index])) for stage in timeline.stages])


def memory_waterfall(timeline: Timeline, lanes: Lanes) -> Waterfall:
    """Return what is on the fullest device at its fullest moment."""
    fullest = max(timeline.stages, key=lambda stage: stage.memory.bytes)
    parts = tuple((str(name), size) for name, size in fullest.memory.breakdown if size > 0)
    title = f"Memory of {lanes.titles[fullest.index]}, the fullest, during {format_task(fullest.memory.during)}"
    return Waterfall(title, "peak", parts)


def memory_shares(timeline: Timeline, lanes: Lanes) -> LaneShares:
    """Return what is on the devices of every lane at their fullest moment."""
    breakdowns = [{str(name): size for name, size in stage.memory.breakdown} for stage in timeline.stages]
    return _shares(lanes, breakdowns)


def _shares(lanes: Lanes, values: Sequence[Mapping[str, float]]) -> LaneShares:
    """Return what lanes have of each part, the parts in the order of the lane that has most of them."""
    names = dict.fromkeys(name for stage in sorted(values, key=len, reverse=True) for name in stage)
    parts = [part for part in names if any(stage.get(part, 0.0) > 0 for stage in values)]
    return LaneShares(
        lanes,
        tuple(parts),
        tuple(tuple(stage.get(part, 0.0) for stage in values) for part in parts),
    )


def search_progress(plan: Plan) -> Progress | None:
    """Return how the search of a plan went; None if it says nothing of it.

    Where the search kept no history there is one point, its end: nothing to draw a curve through.
    """
    search = plan.search
    if search is None:
        return None
    history = [(point.seconds, point.objective, point.bound) for point in search.history]
    if not history:
        history = [(math.fsum(phase.seconds for phase in search.phases), search.objective, search.bound)]
    seconds, objective, bound = zip(*history, strict=True)
    return Progress(seconds, objective, bound, _explored(search))


def _explored(search: SearchReport) -> str:
    left = search.configurations - search.solved - search.pruned
    return (
        f"{why_stopped(search)}; of {search.configurations} configurations "
        f"{search.solved} solved, {search.pruned} excluded by their bound, {left} left"
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


def alternatives(weighing: Weighing | None) -> Alternatives | None:
    """Return what other decisions cost, as far as they were looked at; None if nobody asked."""
    if weighing is None:
        return None
    own = dict(weighing.decisions)
    return Alternatives(
        weighing.simulated.step_seconds,
        tuple(limits(weighing)),
        tuple(
            _weighed(own[other.decision], other, weighing.simulated)
            for other in weighing.alternatives
            if other.outcome != "not looked at"
        ),
        ended(weighing),
    )


def _weighed(own: str, other: Alternative, simulated: Simulated) -> Weighed:
    if other.simulated is None:
        told = other.outcome + (f": {other.why}" if other.why else "")
        return Weighed(other.decision, own, other.value, None, told, "")
    told = ", ".join(changed_parts(simulated, other.simulated)) or "no part by more than 0.5 % of the step"
    cut = "" if other.complete else "; search cut off"
    return Weighed(other.decision, own, other.value, other.simulated.step_seconds, told + cut, other.plan)


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

"""All there is to say of a plan: figures, memory by stage, the space that was searched, other plans, the search."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from autopar.cluster import cluster_from_dict
from autopar.cost import IDEAL, stack_from_dict
from autopar.cost.reserve import context_of, gaps_of, reserve_of
from autopar.describe.device_groups import device_groups, track_word
from autopar.plan import Job, ModelInfo, Plan, Rival, SearchReport, Simulated, StageMemory, StagePlan
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.report.parts import time_parts, why_lost
from autopar.report.ranking import ranking
from autopar.report.text import (
    WIDTH,
    format_change,
    format_entries,
    format_items,
    format_share,
    format_table,
    heading,
    wrap,
)
from autopar.schedule import SCHEDULES
from autopar.sizing.goals import price_per_million
from autopar.units import format_bytes, format_count, format_seconds, parse_quantity

WHY_STOPPED: Mapping[str, str] = {
    "optimal": "optimal: the gap is proven to be within tolerance",
    "exhausted": "search complete; the remaining gap is unproven",
    "time limit": "time limit: a larger --time-limit may find a better plan or a better bound",
    "interrupted": "interrupted: this is the best plan found until then",
}

_WORTH_NAMING = 0.001
"""Share of a step below which a part of it is not named."""


def format_report(plan: Plan) -> str:
    """Return the full report of a plan, which `autopar solve -v` prints and `-o` writes.

    Args:
        plan: A plan as `autopar.solve` returns it; parts it lacks (simulation, search, alternatives) are left out.
    """
    lines = [*headline(plan), ""]
    lines += format_entries(verdict(plan))
    if plan.simulated is not None:
        lines += _memory(plan, plan.simulated)
    if plan.search is not None:
        lines += _search(plan.search)
    if plan.alternatives:
        lines += ranking(plan)
    if plan.search is not None and plan.search.phases:
        lines += _phases(plan.search)
    return "\n".join(lines) + "\n"


class Planned(Protocol):
    """Whatever was worked out for a job on a model: a plan, or a comparison of several."""

    @property
    def model(self) -> ModelInfo:
        """The model."""

    @property
    def job(self) -> Job:
        """The request."""


def describe_model(plan: Planned) -> str:
    """Return which model runs on which cluster, in one line."""
    cluster = cluster_from_dict(plan.job.cluster)
    device, name = cluster.device.name, cluster.name
    parameters = format_count(plan.model.num_parameters)
    software = f", software {plan.job.stack['name']}" if plan.job.stack else ""
    part = f", {format_count(plan.model.trained)} trained" if plan.model.trained else ""
    return f"{plan.model.name} ({parameters} parameters{part}) on {plan.job.gpus} × {device} ({name}){software}"


def describe_job(plan: Planned) -> str:
    """Return what was asked for, in one line."""
    job = plan.job
    what = f"training step with {job.optimizer}" if job.mode == "train" else "forward pass"
    dims = "".join(f", {name}={size}" for name, size in plan.model.dims)
    statistics = "" if job.sync_batchnorm else ", batches normalised per device"
    what += f", LoRA {job.lora}" if job.lora else ""
    return f"{what}, global batch {job.global_batch}{dims}{statistics}"


def headline(plan: Planned) -> list[str]:
    """Return the lines a report begins with: model, cluster and job."""
    return [line for text in (describe_model(plan), describe_job(plan)) for line in wrap(text, WIDTH, rest="  ")]


def verdict(plan: Plan) -> list[tuple[str, str]]:
    """Return what there is to know of a plan first, by name: what to run, how fast it is, what is proven."""
    entries = [("plan", plan.summary)]
    simulated = plan.simulated
    formula = f"{format_seconds(plan.objective)} by the planner's formula"
    if simulated is None:
        entries.append(("step time", f"{formula}, not simulated"))
    else:
        step = simulated.step_seconds
        error = format_change(plan.objective, step)
        entries += [
            ("step time", f"{format_seconds(step)}{step_band(plan, simulated)} simulated, {formula} ({error})"),
            ("spent on", spent(simulated)),
            ("throughput", throughput(plan, step)),
            ("MFU", f"{100 * simulated.mfu:.1f} %"),
            ("memory", fullest(plan, simulated)),
            *occupied(plan, simulated),
            *price(plan, simulated),
            *buckets(plan),
            *assumptions(plan),
            *notes(simulated),
        ]
    search = plan.search
    if search is not None:
        bound = f"no plan of the declared space is faster than {format_seconds(search.bound)} by the formula"
        entries += [
            ("bound", f"{bound}; gap {100 * search.gap:.1f} %"),
            ("stopped", why_stopped(search)),
        ]
        if plan.alternatives:
            entries.append(("runner-up", why_lost(plan, plan.alternatives[0])))
        for rival in (plan.rival, plan.by_rules):
            if rival is not None:
                entries.append((rival.method, rival_words(rival, plan)))
        if search.history:
            entries.append(("progress", _history(search)))
        if search.cached:
            entries.append(
                ("from cache", "found before for the same model, cluster and job; --no-cache searches again")
            )
    return entries


def why_stopped(search: SearchReport) -> str:
    """Return why a search ended, and what that says of its plan."""
    if search.termination == "exhausted" and search.bound >= search.least * (1 - OPTIMALITY_TOLERANCE):
        return (
            f"search complete; {format_seconds(search.least)} is proven optimal by the formula; that plan "
            "is slower than this one when simulated, does not fit, or is less simple and not noticeably faster"
        )
    if search.termination == "exhausted":
        return f"search complete; the remaining {100 * search.gap:.1f} % is unproven"
    return WHY_STOPPED.get(search.termination, search.termination)


def step_band(plan: Plan, simulated: Simulated) -> str:
    """Return by how much measured steps have differed from simulated ones, if the software stack was calibrated."""
    if simulated.error is None:
        return ""
    return f" ± {100 * simulated.error:.1f} % (stack {plan.job.stack.get('name', IDEAL.name)})"


def throughput(plan: Plan, step: float) -> str:
    """Return samples and tokens per second of a plan whose step takes so many seconds."""
    samples = plan.job.global_batch / step
    tokens = f", {format_count(samples * plan.model.tokens)} tokens/s" if plan.model.tokens else ""
    return f"{format_count(samples)} samples/s{tokens}"


def price(plan: Plan, simulated: Simulated) -> list[tuple[str, str]]:
    """Return what a million tokens, or samples, and an hour cost, if the cluster says."""
    hour = cluster_from_dict(plan.job.cluster).hour_price(plan.job.gpus)
    if hour is None:
        return []
    unit, each = ("tokens", plan.model.tokens) if plan.model.tokens else ("samples", 1)
    million = price_per_million(hour, simulated.step_seconds, plan.job.global_batch * each)
    return [("price", f"{million:.4g} per million {unit}, {hour:.4g} an hour")]


def fullest(plan: Plan, simulated: Simulated) -> str:
    """Return the peak of the stage with the least memory to spare, and its limit."""
    number, memory, limit = fullest_stage(plan, simulated)
    word = track_word(plan)
    where = f"{word} {number} of {len(simulated.stages)}, the fullest: " if len(simulated.stages) > 1 else ""
    share = format_share(memory.peak, limit)
    return f"{where}{format_bytes(memory.peak)} per device, {share} of the limit of {format_bytes(limit)}"


def fullest_stage(plan: Plan, simulated: Simulated) -> tuple[int, StageMemory, float]:
    """Return number, memory and limit of the stage that takes the greatest share of what it may use."""
    stages = zip(simulated.stages, plan.stage_limits, strict=True)
    found = ((number, stage, limit) for number, (stage, limit) in enumerate(stages))
    return max(found, key=lambda entry: entry[1].peak / entry[2])


def occupied(plan: Plan, simulated: Simulated) -> list[tuple[str, str]]:
    """Return what devices would show: what is allocated, the allocator's gaps, context and libraries.

    One entry has all of it for the fullest device. Where stages are several, another one has what is allocated and
    reserved on the ranks of the first, the last and the fullest.
    """
    memory = _device_memory(plan)
    if memory is None:
        return []
    gaps, outside = _reserve_of_stack(plan)
    number, stage, limit = fullest_stage(plan, simulated)

    def reserved(peak: float) -> float:
        return peak + gaps_of(peak, memory, gaps, outside)

    shown = reserved(stage.peak) + context_of(memory, outside)
    words = (
        f"{format_bytes(stage.peak)} allocated, about {format_bytes(reserved(stage.peak))} reserved with gaps, "
        f"{format_bytes(shown)} of {format_bytes(memory)} with context and libraries"
    )
    entries = [("device", words)]
    stages = simulated.stages
    if len(stages) > 1:
        names = {0: "first", len(stages) - 1: "last"}
        names[number] = f"{names[number]} and fullest" if number in names else f"fullest ({number})"
        ranks = (
            f"{name} {format_bytes(peak)} allocated, {format_bytes(reserved(peak))} reserved"
            for name, peak in ((names[index], stages[index].peak) for index in sorted(names))
        )
        entries.append(("by rank", f"{'; '.join(ranks)}; limit {format_bytes(limit)}"))
    return entries


def _reserve_of_stack(plan: Plan) -> tuple[float, float]:
    """Return the share of gaps, and the bytes outside of the allocator, of the stack of a plan."""
    stack = stack_from_dict(plan.job.stack, "job.stack") if plan.job.stack else IDEAL
    return stack.gaps, stack.outside


def _device_memory(plan: Plan) -> float | None:
    """Return the bytes of memory of a device; None where devices differ."""
    whole = plan.job.cluster.get("device", {}).get("memory")
    return parse_quantity(whole, "B") if isinstance(whole, str) else None


def rival_words(rival: Rival, plan: Plan) -> str:
    """Return what another way to search came to, against a plan, and how it was obtained."""
    part = f"{rival.tried:,} of" if rival.stopped else "all"
    told = f"{part} {rival.plans:,} dp/tp/pp combinations ({rival.space}), tried in {format_seconds(rival.seconds)}"
    if not rival.tried:
        return f"none of {rival.plans:,} dp/tp/pp combinations tried in {format_seconds(rival.seconds)}"
    if rival.step_seconds is None:
        return f"no plan that fits among {told}"
    against = format_change(rival.step_seconds, plan.simulated.step_seconds) if plan.simulated is not None else "-"
    return f"{rival.summary}: {format_seconds(rival.step_seconds)} ({against}); best of {told}"


def is_plan_of(rival: Rival, plan: Plan) -> bool:
    """Whether the best plan of another way to search reads like a plan, devices that are left free apart."""
    read, _, free = rival.summary.partition(f"{plan.summary}; ")
    return rival.summary == plan.summary or (not read and free.endswith("GPUs are left free"))


def _history(search: SearchReport) -> str:
    """Return when the first and the last plan were found."""
    first, last = search.history[0], search.history[-1]
    best = next(point for point in search.history if point.objective == last.objective)
    told = f"first plan after {format_seconds(first.seconds)}"
    if best.objective < first.objective:
        slower = 100 * (first.objective / best.objective - 1)
        told += f" ({slower:.1f} % slower than the best), best after {format_seconds(best.seconds)}"
    return told


def buckets(plan: Plan) -> list[tuple[str, str]]:
    """Return how the gradients of a plan are cut into buckets, if otherwise than by the uniform rule."""
    if plan.fusion is None or not plan.fusion.buckets:
        return []
    counts = [sum(len(cuts.ends) for cuts in each.cuts) for each in plan.fusion.buckets]
    number = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    where = " per stage" if len(plan.stages) > 1 else ""
    told = f"gradients travel in {number} buckets{where}, cut for this plan; `autopar fuse` compares them with others"
    searched = "; the bound is proven for plans with uniform buckets" if plan.search is not None else ""
    return [("buckets", told + searched)]


def assumptions(plan: Plan) -> list[tuple[str, str]]:
    """Return what the simulated time of a plan takes for granted beyond its program."""
    schedule = SCHEDULES.get(plan.schedule)
    if schedule is None or not schedule.steps_overlap or len(plan.stages) == 1:
        return []
    return [("assumes", "no global gradient-norm clipping: pipeline groups start their next step while others finish")]


def notes(simulated: Simulated, without: str = "") -> list[tuple[str, str]]:
    """Return what is unusual about the figures of a plan, remarks of one kind left out."""
    return [("note", remark.text) for remark in simulated.remarks if remark.kind != without]


def spent(simulated: Simulated) -> str:
    """Return the parts of a step as shares of it."""
    step = simulated.step_seconds
    named = [(name, seconds) for name, seconds in time_parts(simulated) if seconds >= _WORTH_NAMING * step]
    return ", ".join(f"{name} {format_share(seconds, step)}" for name, seconds in named)


def memory_categories(simulated: Simulated) -> list[str]:
    """Return the categories of memory that any stage uses, in the order of the breakdown."""
    names = dict.fromkeys(name for stage in simulated.stages for name in stage.breakdown)
    return [name for name in names if any(stage.breakdown.get(name, 0.0) > 0 for stage in simulated.stages)]


def memory_breakdown(plan: Plan, simulated: Simulated) -> list[str]:
    """Return the table of memory by stage, or device group, and category."""
    categories = memory_categories(simulated)
    rows = [
        (str(number), *(format_bytes(stage.breakdown.get(name, 0.0)) for name in categories))
        for number, stage in enumerate(simulated.stages)
    ]
    return format_table((track_word(plan), *categories), rows)


def format_range(bounds: Sequence[int]) -> str:
    """Return a half-open range for reading, both ends included.

    >>> format_range((0, 8)), format_range((3, 4))
    ('0-7', '3')
    """
    start, end = bounds
    return str(start) if end - start == 1 else f"{start}-{end - 1}"


def _memory(plan: Plan, simulated: Simulated) -> list[str]:
    limit = plan.job.memory_limit
    rows = [
        (
            str(number),
            format_range(stage.devices),
            format_range(stage.blocks),
            stage.recompute,
            format_bytes(memory.peak),
            format_share(memory.peak, memory.limit or limit),
        )
        for number, (stage, memory) in enumerate(_by_stage(plan, simulated))
    ]
    word = track_word(plan) if plan.shares else "stage"
    limits = sorted(set(plan.stage_limits), reverse=True)
    return [
        *heading(f"Memory per device, limit {' and '.join(map(format_bytes, limits))}"),
        *_reserve(plan),
        *format_table((word, "devices", "blocks", "recompute", "peak", "of limit"), rows),
        "",
        *memory_breakdown(plan, simulated),
        *_hosts(plan, simulated),
    ]


def _by_stage(plan: Plan, simulated: Simulated) -> Iterator[tuple[StagePlan, StageMemory]]:
    """Yield every stage with the memory of its devices."""
    for stage, group in zip(plan.apart.stages, device_groups(plan.apart), strict=True):
        yield stage, simulated.stages[group]


def _hosts(plan: Plan, simulated: Simulated) -> list[str]:
    """Return what lies in host memory, if anything does."""
    if not simulated.host_bytes:
        return []
    rows = [
        (str(number), stage.offload or "-", format_bytes(memory.host))
        for number, (stage, memory) in enumerate(_by_stage(plan, simulated))
    ]
    return [
        "",
        f"In host memory, up to {format_bytes(simulated.host_bytes)} on one host:",
        "",
        *format_table(("stage", "offload", "per device"), rows),
    ]


def _reserve(plan: Plan) -> list[str]:
    """Return what the device has besides the limit, which no plan counts on."""
    memory = _device_memory(plan)
    if memory is None:
        return []
    reserve = reserve_of(memory)
    if not math.isclose(plan.job.memory_limit, memory - reserve):
        return [f"a limit that was given: the device has {format_bytes(memory)}", ""]
    return [
        f"{format_bytes(memory)} less a reserve of {format_bytes(reserve)} for context, libraries and fragmentation",
        "",
    ]


def _search(search: SearchReport) -> list[str]:
    left = search.configurations - search.solved - search.pruned
    counts = f"{search.solved} solved, {search.pruned} excluded by their bound, {left} left"
    if search.cut:
        counts += f"; {search.cut} placement problem{'s' if search.cut > 1 else ''} cut by their limit"
    return [
        *heading("Space searched"),
        *format_items(search.space),
        *format_items((f"{search.configurations} configurations: {counts}", f"placements by solver {search.solver}")),
    ]


def _phases(search: SearchReport) -> list[str]:
    rows = [(phase.name, format_seconds(phase.seconds), format_bytes(phase.peak_bytes)) for phase in search.phases]
    total = sum(phase.seconds for phase in search.phases)
    peak = max(phase.peak_bytes for phase in search.phases)
    rows.append(("total", format_seconds(total), format_bytes(peak)))
    return [*heading("Time and memory of the search"), *format_table(("phase", "time", "peak memory"), rows)]

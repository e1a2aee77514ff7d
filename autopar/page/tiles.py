"""The headline of a page: step time, throughput, MFU, memory, gap and price, a tile each."""

from autopar.cluster import cluster_from_dict
from autopar.describe.device_groups import track_word
from autopar.page.records import Tile
from autopar.plan import Plan, Simulated
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.report.summary import fullest_stage
from autopar.sizing.goals import price_per_million
from autopar.units import format_bytes, format_count, format_seconds

MEMORY_WARNING = 0.95
"""Share of the memory limit from which on the tile warns: fragmentation of the allocator may take the rest."""


def tiles(plan: Plan) -> tuple[Tile, ...]:
    """Return the figures of a plan that a reader looks for first; those it lacks are left out."""
    simulated = plan.simulated
    if simulated is None:
        found = [Tile("step time", format_seconds(plan.objective), "by the planner's formula, not simulated")]
    else:
        found = [
            _step(simulated),
            _throughput(plan, simulated),
            Tile("MFU", f"{100 * simulated.mfu:.1f} %", "model FLOPs, without recompute, of the peak"),
            _memory(plan, simulated),
        ]
    if plan.search is not None:
        found.append(_gap(plan))
    return (*found, *([] if simulated is None else _price(plan, simulated)))


def _step(simulated: Simulated) -> Tile:
    step, error = simulated.step_seconds, simulated.error
    if error is None:
        return Tile("step time", format_seconds(step), "simulated, not calibrated")
    low, high = (format_seconds(step * (1 + sign * error)) for sign in (-1, 1))
    return Tile("step time", format_seconds(step), f"{low} to {high}: ± {100 * error:.1f} %, the stack's mean error")


def _throughput(plan: Plan, simulated: Simulated) -> Tile:
    samples = plan.job.global_batch / simulated.step_seconds
    if not plan.model.tokens:
        return Tile(
            "throughput", f"{format_count(samples)} samples/s", f"{format_count(samples / plan.job.gpus)} per GPU"
        )
    tokens = samples * plan.model.tokens
    return Tile("throughput", f"{format_count(tokens)} tokens/s", f"{format_count(tokens / plan.job.gpus)} per GPU")


def _memory(plan: Plan, simulated: Simulated) -> Tile:
    number, memory, limit = fullest_stage(plan, simulated)
    share = memory.peak / limit
    word = track_word(plan)
    where = f"{word} {number}, the fullest, " if len(simulated.stages) > 1 else ""
    detail = f"{where}{100 * share:.1f} % of the limit of {format_bytes(limit)}"
    return Tile("peak memory", format_bytes(memory.peak), detail, share, share >= MEMORY_WARNING)


def _gap(plan: Plan) -> Tile:
    search = plan.search
    assert search is not None, "only plans of a search have a gap"
    if search.gap <= OPTIMALITY_TOLERANCE:
        return Tile("optimality gap", "0 %", "no plan of the searched space is faster by the formula")
    bound = f"no plan of the searched space is faster than {format_seconds(search.bound)} by the formula"
    return Tile("optimality gap", f"{100 * search.gap:.1f} %", bound)


def _price(plan: Plan, simulated: Simulated) -> list[Tile]:
    hour = cluster_from_dict(plan.job.cluster).hour_price(plan.job.gpus)
    if hour is None:
        return []
    unit, each = ("tokens", plan.model.tokens) if plan.model.tokens else ("samples", 1)
    million = price_per_million(hour, simulated.step_seconds, plan.job.global_batch * each)
    return [Tile("price", f"{million:.4g} per M {unit}", f"{hour:.4g} an hour for {plan.job.gpus} GPUs")]

"""Plans in notebooks: as a small table of HTML, and as data frames."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.describe.device_groups import device_groups
from autopar.describe.one_line import name_stages
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.report.summary import describe_job, describe_model, verdict
from autopar.sharding import parse_placements
from autopar.simulate.timeline import Row

if TYPE_CHECKING:
    import pandas

    from autopar.simulate import Timeline

TABLES = ("stages", "tensors", "plans", "ops", "collectives", "timeline")
"""The tables a plan can be turned into; the last three take its model, which is simulated."""


_COLLECTIVES = (Row.COLLECTIVES, Row.GRADIENTS_INTRA, Row.GRADIENTS_INTER)


def to_html(plan: Plan) -> str:
    """Return the verdict on a plan as a table of HTML, without style sheets or scripts."""
    rows = "".join(
        f'<tr><th style="text-align:left;vertical-align:top">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in verdict(plan)
    )
    return f"<p>{escape(describe_model(plan))}<br>{escape(describe_job(plan))}</p><table>{rows}</table>"


def to_dataframe(
    plan: Plan, what: str = "stages", *, model: str | Path | None = None, cache_dir: str | Path | None = None
) -> "pandas.DataFrame":
    """Return a part of a plan as a table, in seconds and bytes.

    Args:
        plan: The plan.
        what: "stages": devices, blocks, recompute and memory by category of each stage. "tensors": placement of every
            persistent tensor by mesh axis. "plans": the plan and its runners-up. "ops" and "collectives": what runs for
            the first microbatch and in the update, with block, phase and seconds. "timeline": all bars of the step.
        model: Where the model is now; None for where it was.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        PlanError: If there is no such table, pandas is not installed, or the plan does not fit the model.
    """
    if what not in TABLES:
        raise PlanError(f"a plan has no table {what!r}", hint=f"there are {', '.join(TABLES)}")
    try:
        import pandas
    except ImportError:
        raise PlanError("data frames need pandas", hint="pip install pandas") from None
    if what in _OF_PLAN:
        rows = _OF_PLAN[what](plan)
    else:
        rows = list(_bars(plan.timeline(model=model, cache_dir=cache_dir), what))
    return pandas.DataFrame.from_records(rows)


def _stages(plan: Plan) -> list[dict[str, Any]]:
    found = plan.simulated.stages if plan.simulated is not None else ()
    categories = dict.fromkeys(name for memory in found for name in memory.breakdown)
    plan = plan.apart
    groups = device_groups(plan)
    rows = []
    for number, stage in enumerate(plan.stages):
        row: dict[str, Any] = {
            "stage": number,
            "first_block": stage.blocks[0],
            "blocks": stage.blocks[1] - stage.blocks[0],
            "first_device": stage.devices[0],
            "devices": stage.devices[1] - stage.devices[0],
            "recompute": stage.recompute,
        }
        if found:
            memory = found[groups[number]]
            row |= {"peak": memory.peak, **{name: memory.breakdown.get(name, 0.0) for name in categories}}
        rows.append(row)
    return rows


def _tensors(plan: Plan) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, variant in enumerate(plan.all_variants):
        axes = [axis.name for axis in variant.mesh]
        on = {"on": name_stages(plan.numbers_of(number))} if plan.variants else {}
        rows += [
            {
                "tensor": state.value,
                "blocks": len(block.instances),
                **on,
                **dict(zip(axes, map(str, parse_placements(state.placement)), strict=True)),
            }
            for block in plan.of_variant(number).blocks
            for state in block.states
        ]
    return rows


def _plans(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "plan": each.summary,
            "objective": each.objective,
            "step_seconds": None if each.simulated is None else each.simulated.step_seconds,
            "peak": None if each.simulated is None else max(memory.peak for memory in each.simulated.stages),
            "mfu": None if each.simulated is None else each.simulated.mfu,
        }
        for each in (plan, *plan.alternatives)
    ]


def _bars(timeline: "Timeline", what: str) -> Iterator[dict[str, Any]]:
    """Yield bars of a simulated step: ops, collectives, or all."""
    for event in timeline.events:
        is_op = event.row is Row.COMPUTE and event.depth == 2
        is_collective = event.row in _COLLECTIVES
        if (what == "ops" and not is_op) or (what == "collectives" and not is_collective):
            continue
        yield {
            timeline.unit.replace(" ", "_"): event.stage,
            **({} if what == "ops" else {"row": str(event.row)}),
            "name": event.name,
            "block": event.block,
            "phase": event.phase,
            "start": event.start,
            "seconds": event.seconds,
        }


_OF_PLAN: Mapping[str, Callable[[Plan], Sequence[Mapping[str, Any]]]] = {
    "stages": _stages,
    "tensors": _tensors,
    "plans": _plans,
}

"""The page: charts, tables and texts put into one file that needs nothing else."""

from collections.abc import Mapping
from importlib import resources
from itertools import chain
from typing import Any

import msgspec
from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import CustomJS
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined

from autopar import __version__
from autopar.page import charts
from autopar.page.bars import memory_top
from autopar.page.compare import RUNNER_UP, THIS
from autopar.page.machine_picture import machine_data
from autopar.page.palette import DARK, LIGHT, MEANINGS, legend, lettered, ordered
from autopar.page.records import BlockGraph, LaneShares, Measured, Node, Progress, Sharded
from autopar.page.tiles import tiles
from autopar.page.view import View
from autopar.plan import Plan, StagePlan
from autopar.recompute import Recompute
from autopar.report.summary import describe_job, describe_model, format_range, format_report, verdict
from autopar.report.text import format_change, format_share
from autopar.report.timeline import format_host, format_path, format_task
from autopar.report.whatif import whatif_table
from autopar.units import format_bytes, format_count, format_seconds

_PARTS = resources.files("autopar.page") / "static"


def render(view: View) -> str:
    """Return the page of a plan as HTML, with all it needs in it."""
    plots, timeline, memory = _plots(view)
    document = Document()
    for plot in plots.values():
        document.add_root(plot)
    ready = CustomJS(args={"bars": timeline.state, "curves": memory.state}, code="autopar.ready(bars, curves)")
    document.js_on_event("document_ready", ready)
    for name, plot in plots.items():
        plot.js_on_change("inner_width", CustomJS(code=f"autopar.resized('{name}')"))
    for name in ("start", "end"):
        timeline.plot.x_range.js_on_change(name, CustomJS(code="autopar.redraw()"))
    script, divs = components(plots, wrap_script=False)
    picture = machine_data(view.machine, view.gantt.lanes)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_read("page.html.j2"))
    return template.render(
        title=f"{view.plan.model.name} on {view.plan.job.gpus} GPUs",
        model=describe_model(view.plan),
        job=describe_job(view.plan),
        tiles=tiles(view.plan),
        verdict=verdict(view.plan),
        limit=format_bytes(view.plan.job.memory_limit),
        limit_is_seen=memory_top(view.memory, view.plan.job.memory_limit) > view.plan.job.memory_limit,
        num_bars=f"{len(view.gantt):,}",
        charts=divs,
        stages=_stage_table(view),
        time=_shares_table(view.time_shares, format_seconds),
        memory=_shares_table(view.memory_shares, format_bytes),
        path=format_path(view.timeline.path) if view.timeline.path else "",
        progress=view.progress,
        ended=None if view.progress is None else _ended(view.progress),
        ranking=_ranking_table(view),
        scaling=_scaling_table(view),
        host=_host(view),
        alternatives=view.alternatives,
        weighed=_weighed_table(view),
        whatif=None if view.whatif is None else whatif_table(view.whatif),
        measured=[_measured(found) for found in view.measured],
        graphs=[f"{graph.block}, {graph.phase}, {_counted(len(graph.nodes), 'instruction')}" for graph in view.graphs],
        chosen=_first_choice(view),
        legend=_legend(view),
        ramps={name: ", ".join(ordered(5, ground)) for name, ground in (("light", LIGHT), ("dark", DARK))},
        commands=commands(view.plan),
        lane=view.gantt.lanes.word,
        lanes=view.gantt.lanes.titles,
        machine=_json(picture),
        choices=picture["choices"],
        blocks=_json({"graphs": [_graph(graph) for graph in view.graphs]}),
        report=format_report(view.plan),
        version=__version__,
        colours={"light": LIGHT, "dark": DARK},
        style=_read("page.css"),
        script=_read("page.js"),
        library=Resources(mode="inline", components=["bokeh"]).render_js(),
        drawing=script,
    )


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _plots(view: View) -> tuple[dict[str, figure], charts.Timed, charts.Timed]:
    """Return all charts by name, and of these the two with a time axis."""
    limit = view.plan.job.memory_limit
    timeline = charts.gantt_chart(view.gantt)
    memory = charts.memory_chart(view.memory, limit, timeline.plot)
    plots = {
        "timeline": timeline.plot,
        "memory": memory.plot,
        "time_parts": charts.waterfall_chart("time_parts", view.time_parts),
        "memory_parts": charts.waterfall_chart("memory_parts", view.memory_parts, limit=limit),
        "machine": charts.machine_chart(),
        "block": charts.block_chart(),
    }
    if len(view.gantt.lanes) > 1:
        plots["time_shares"] = charts.shares_chart("time_shares", view.time_shares)
        plots["memory_shares"] = charts.shares_chart("memory_shares", view.memory_shares, limit=limit)
    if view.progress is not None and len(view.progress.seconds) > 1:
        plots["progress"] = charts.progress_chart(view.progress)
    if len(view.compared) > 1:
        plots["compared"] = charts.compared_chart(view.compared)
        plots["tradeoff"] = charts.tradeoff_chart(view.compared, limit)
    if view.alternatives is not None and any(own.step is not None for own in view.alternatives.weighed):
        plots["alternatives"] = charts.alternatives_chart(view.alternatives)
    if view.whatif is not None and any(cell.plan is not None for cell in view.whatif.cells):
        plots["whatif"] = charts.whatif_chart(view.whatif)
    for number, measured in enumerate(view.measured):
        plots[f"measured_{number}"] = charts.measured_chart(f"measured_{number}", measured)
    if view.scaling:
        plots["scaling"] = charts.scaling_chart(view.scaling)
    return plots, timeline, memory


def commands(plan: Plan) -> list[tuple[str, str]]:
    """Return what to do with the plan next: commands, and what each is for."""
    trained = [("torchtitan", "arguments of torchtitan"), ("megatron", "arguments of Megatron-LM")]
    targets = [*(trained if plan.job.mode == "train" and plan.model.tokens else []), ("pytorch", "DTensor placements")]
    return [
        *((f"autopar export plan.json --to {name}", purpose) for name, purpose in targets),
        ("autopar explain plan.json --alternatives", "what other decisions cost"),
        ("autopar figures plan.json -o figures", "these charts for a paper"),
    ]


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Header and rows."""


def _stage_table(view: View) -> Table:
    """Return what each stage has; where device groups have several stages, what is known by group is of its group."""
    plan, step, lanes = view.plan, view.timeline.step_seconds, view.gantt.lanes
    limits = plan.stage_limits or (plan.job.memory_limit,)
    lane_of = {stage: lane for lane, held in enumerate(lanes.stages) for stage in held}
    grouped = lanes.word == "device group"
    rows: list[tuple[str, ...]] = []
    for number, stage in enumerate(plan.apart.stages):
        lane = lane_of[number]
        found = view.timeline.stages[lane]
        rows.append(
            (
                str(number),
                *([str(lane)] if grouped else []),
                format_range(stage.devices),
                format_range(stage.blocks),
                stage.recompute,
                format_share(found.busy_seconds, step),
                format_bytes(found.memory.bytes),
                format_share(found.memory.bytes, limits[lane % len(limits)]),
                format_task(found.memory.during),
            )
        )
    own = " of group" if grouped else ""
    columns = (f"busy{own}", f"peak{own}", "of limit", "during")
    word = lanes.word if plan.shares else "stage"
    return (word, *(["device group"] if grouped else []), "devices", "blocks", "recompute", *columns), rows


def _shares_table(shares: LaneShares, show: Any) -> Table:
    rows = [
        (name, *(show(values[number]) for values in shares.values)) for number, name in enumerate(shares.lanes.names)
    ]
    return (shares.lanes.word, *shares.parts), rows


def _legend(view: View) -> list[tuple[str, str]]:
    """Return the colours of all charts and what they mean."""
    shares = (view.time_shares.parts, view.memory_shares.parts)
    waterfalls = (view.time_parts.parts, view.memory_parts.parts)
    return legend(
        [
            *(bars.kind for bars in view.gantt.bars),
            *chain.from_iterable(shares),
            *(name for parts in waterfalls for name, _ in parts),
            "limit",
        ]
    )


def _ended(progress: Progress) -> dict[str, str]:
    """Return what a search had at its end."""
    return {
        "took": format_seconds(progress.seconds[-1]),
        "objective": format_seconds(progress.objective[-1]),
        "bound": format_seconds(progress.bound[-1]),
    }


def _ranking_table(view: View) -> Table:
    best = view.ranking[0]
    rows: list[tuple[str, ...]] = []
    for number, plan in enumerate(view.ranking, start=1):
        step = plan.objective if plan.simulated is None else plan.simulated
        rows.append(
            (
                str(number),
                plan.summary,
                format_seconds(plan.objective),
                "-" if plan.simulated is None else format_seconds(plan.simulated),
                "-" if plan.simulated is None else format_change(plan.objective, plan.simulated),
                "-"
                if plan is best
                else format_change(step, best.objective if best.simulated is None else best.simulated),
                "-" if plan.peak is None else format_bytes(plan.peak),
                "-" if plan.mfu is None else f"{100 * plan.mfu:.1f} %",
            )
        )
    step = best.objective if best.simulated is None else best.simulated
    rows += [
        (
            each.name,
            each.summary,
            "-",
            format_seconds(each.step),
            "-",
            format_change(each.step, step),
            format_bytes(each.peak),
            "-",
        )
        for each in view.compared
        if each.kind not in (THIS, RUNNER_UP)
    ]
    return ("#", "plan", "formula", "simulated", "formula against simulated", "against the best", "peak", "MFU"), rows


def _scaling_table(view: View) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            str(point.gpus),
            point.cluster,
            str(point.batch),
            format_seconds(point.step),
            "-" if point.bound is None else format_seconds(point.bound),
            format_count(point.throughput),
            format_count(point.throughput / point.gpus),
            point.summary,
        )
        for point in view.scaling
    ]
    return ("GPUs", "cluster", "batch", "step", "bound", "samples/s", "per GPU", "plan"), rows


def _measured(found: Measured) -> dict[str, Any]:
    """Return a measured step in words and by term."""
    own = found.comparison
    rank = "a rank" if own.rank is None else f"rank {own.rank}"
    change = format_change(own.simulated_seconds, own.measured_seconds)
    rows: list[tuple[str, ...]] = [
        (
            row.name,
            format_seconds(row.simulated),
            format_seconds(row.measured),
            format_change(row.simulated, row.measured),
            "off" if row.is_off else "",
        )
        for row in own.rows
    ]
    return {
        "words": f"{rank} on {found.lane}: {format_seconds(own.measured_seconds)} measured, mean of {own.steps} steps; "
        f"{format_seconds(own.simulated_seconds)} simulated, {change}",
        "table": (("term", "simulated", "measured", "simulated against measured", ""), rows),
    }


def _host(view: View) -> dict[str, Any] | None:
    """Return what lies in host memory, if anything does: in words, and by stage."""
    entries = format_host(view.timeline)
    if not entries:
        return None
    lane_of = {stage: lane for lane, held in enumerate(view.gantt.lanes.stages) for stage in held}
    timed = [view.timeline.stages[lane_of[number]] for number in range(len(view.plan.apart.stages))]
    rows: list[tuple[str, ...]] = [
        (
            str(number),
            ", ".join((*filter(None, (stage.offload,)), *(["activations"] if _keeps_on_host(stage) else []))) or "-",
            format_bytes(timed[number].host_bytes),
            format_seconds(timed[number].host_link_seconds),
            format_seconds(timed[number].copy_seconds),
        )
        for number, stage in enumerate(view.plan.apart.stages)
    ]
    header = ("stage", "what", "per device", "host link busy", "step waits")
    return {"words": "; ".join(text for _, text in entries), "table": (header, rows)}


def _keeps_on_host(stage: StagePlan) -> bool:
    return Recompute.OFFLOAD in stage.flavours


def _weighed_table(view: View) -> Table:
    found = view.alternatives
    if found is None:
        return (), []
    rows: list[tuple[str, ...]] = [
        (
            f"{own.name} {own.own}",
            own.value,
            "-" if own.step is None else format_seconds(own.step),
            "-" if own.step is None else format_change(own.step, found.step),
            own.outcome,
            own.plan or "-",
        )
        for own in found.weighed
    ]
    return ("decision", "other value", "step", "against the plan", "what changes", "best plan with it"), rows


def _first_choice(view: View) -> int:
    """Return the block that stands for most of the model, in its first phase: one that repeats, where any does."""
    sizes = [sum(node.seconds for node in graph.nodes) * graph.instances for graph in view.graphs]
    forward = [i for i, graph in enumerate(view.graphs) if graph.phase == view.graphs[0].phase]
    return max(forward, key=lambda i: (view.graphs[i].instances > 1, sizes[i]))


def _graph(graph: BlockGraph) -> dict[str, Any]:
    return {
        "axes": graph.axes,
        "sizes": graph.sizes,
        "roles": [graph.roles.get(axis, axis) for axis in graph.axes],
        "block": graph.block,
        "states": [(name, *placements) for name, placements in graph.states],
        "nodes": [
            {
                "title": f"{node.kind.removeprefix('autopar::')}[{node.over}]"
                if node.over
                else node.kind.removeprefix("autopar::"),
                "name": node.name,
                "kind": node.kind.removeprefix("autopar::"),
                "over": node.over,
                "shape": " × ".join(map(str, node.result.local)),
                "result": _sharded(node.result),
                "parameters": [_sharded(each) for each in node.parameters],
                "placement": " ".join(node.placements) or "whole",
                "colour": lettered(MEANINGS[_meaning(node, graph.roles)]),
                "bytes": node.bytes,
                "seconds": node.seconds,
                "beside": node.beside,
                "reads": node.reads,
                "column": node.column,
                "row": node.row,
                "ring": node.ring,
                "passed": node.passed,
                "ringColour": lettered(MEANINGS[_over(node.ring, graph.roles)]),
            }
            for node in graph.nodes
        ],
    }


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _sharded(tensor: Sharded) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "whole": tensor.whole,
        "local": tensor.local,
        "placements": tensor.placements,
        "bytes": tensor.bytes,
    }


def _meaning(node: Node, roles: Mapping[str, str]) -> str:
    """Return what the colour of an instruction means, a key of `MEANINGS`."""
    if not node.over:
        return "host copies" if node.kind in ("offload", "fetch") else "compute"
    return _over(node.over, roles)


def _over(axis: str, roles: Mapping[str, str]) -> str:
    """Return what the colour of communication over a mesh axis means."""
    named = f"{roles.get(axis, '')} communication"
    return named if named in MEANINGS else "collectives"


def _json(value: Any) -> str:
    """Return JSON that may stand in a script element."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")

"""The charts of the page, drawn by Bokeh: on canvases that zoom and answer the mouse, without a server.

Bars and curves over time are handed over whole, and `static/page.js` shows as many of them as the window has pixels
for, so that 100,000 bars zoom as smoothly as 100 ([decision 10](../../docs/decisions/0010-charts.md)).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    Range1d,
    Span,
    Tool,
)
from bokeh.models.tools import BoxZoomTool, PanTool, ResetTool, WheelZoomTool, ZoomInTool, ZoomOutTool
from bokeh.plotting import figure

from autopar.page.bars import memory_top, row_edges
from autopar.page.compare import pareto
from autopar.page.measured import MEASURED, ROWS, SIMULATED
from autopar.page.palette import DARK, LIGHT, MEANINGS, PLAIN, colours, ordered, series
from autopar.page.records import (
    Alternatives,
    Compared,
    Gantt,
    Lanes,
    LaneShares,
    Measured,
    MemoryCurve,
    Progress,
    ScalePoint,
    Waterfall,
)
from autopar.report.text import format_change
from autopar.scenarios import WhatIf
from autopar.units import format_bytes, format_count, format_seconds

INK = "ink"
"""Tag of what is written in the colour of the page's text."""
SHADE = "shade"
"""Tag of what has another colour on a dark page; the two colours are the next tags."""
_MANY = 10  # curves above which a legend says less than their order
_LEGEND_COLUMNS = 3  # until the page knows its width
_ROOM_FOR_TEXT = 1.6  # of a waterfall, so that figures stand beside its longest bar on a telephone, too
_LONGEST = 3.0  # of bars of alternatives, in steps of the plan
_BYTES_HERE = "return autopar.describeMemory(full[value].data, special_vars.x)"


def seconds_axis() -> CustomJSTickFormatter:
    """Return what writes the ticks of an axis of seconds."""
    return CustomJSTickFormatter(code="return autopar.seconds(tick)")


def bytes_axis() -> CustomJSTickFormatter:
    """Return what writes the ticks of an axis of bytes."""
    return CustomJSTickFormatter(code="return autopar.bytes(tick)")


@dataclass(frozen=True, slots=True)
class Timed:
    """A chart with a time axis, and what the page's script needs to choose what of it to draw."""

    plot: figure
    state: Mapping[str, Any]


def gantt_chart(gantt: Gantt) -> Timed:
    """Return the timeline of the pipeline."""
    count = len(gantt.lanes)
    columns = ("left", "right", "top", "bottom", "alpha", "what", "when")
    shown = [ColumnDataSource({name: [] for name in columns}) for _ in gantt.bars]
    full = [
        ColumnDataSource(
            {
                "lane": bars.lane,
                "row": bars.row,
                "start": bars.start,
                "seconds": bars.seconds,
                "name": bars.name.astype(np.uint16) if len(gantt.names) < 2**16 else bars.name,
            }
        )
        for bars in gantt.bars
    ]
    plot = _timed("timeline", height=min(900, 170 + max(24, 90 - 6 * count) * count), end=gantt.seconds)
    plot.y_range = Range1d(count, 0, bounds=(0, count))
    plot.yaxis.axis_label = gantt.lanes.word
    plot.yaxis.ticker, plot.yaxis.major_label_overrides = _lane_ticks(gantt.lanes)
    plot.ygrid.ticker = FixedTicker(ticks=list(range(count + 1)))
    fills = colours([bars.kind for bars in gantt.bars])
    drawn = [
        plot.quad(
            left="left", right="right", top="top", bottom="bottom", source=source,
            fill_color=colour, fill_alpha="alpha", line_color=None, legend_label=bars.kind,
        )
        for bars, source, colour in zip(gantt.bars, shown, fills, strict=True)
    ]  # fmt: skip
    tops, bottoms = row_edges(gantt)
    state = {
        "plot": plot, "full": full, "shown": shown, "tops": tops, "bottoms": bottoms,
        "kinds": [bars.kind for bars in gantt.bars], "names": list(gantt.names), "lanes": list(gantt.lanes.titles),
    }  # fmt: skip
    formatters = {
        f"@{wanted}": CustomJSHover(code=f"return autopar.describeBar(value, '{wanted}')")
        for wanted in ("what", "when")
    }
    plot.add_tools(
        HoverTool(
            renderers=drawn,
            tooltips=[("", "@what{custom}"), ("", "@when{custom}")],
            formatters=formatters,
            point_policy="follow_mouse",
            visible=False,
        )
    )
    _legend(plot)
    return Timed(plot, state)


def memory_chart(curves: Sequence[MemoryCurve], limit: float, shared: figure) -> Timed:
    """Return memory over time by lane, on the time axis of another chart."""
    plot = _timed("memory", height=320, end=1.0)
    plot.x_range = shared.x_range
    plot.y_range = Range1d(0, memory_top(curves, limit))
    plot.yaxis.formatter = bytes_axis()
    shades = {name: ordered(len(curves), ground) for name, ground in (("light", LIGHT), ("dark", DARK))}
    full = [ColumnDataSource({"start": curve.start, "bytes": curve.bytes.astype(np.float32)}) for curve in curves]
    shown = ColumnDataSource(
        {
            "xs": [[] for _ in curves],
            "ys": [[] for _ in curves],
            "lane": [curve.lane for curve in curves],
            "name": [curve.lane.split(" (")[0] for curve in curves],
            "colour": shades["light"],
            "alpha": [1.0] * len(curves),
            "here": list(range(len(curves))),
        }
    )
    grouping = {"legend_group": "name"} if 1 < len(curves) <= _MANY else {}
    lines = plot.multi_line(
        xs="xs", ys="ys", line_color="colour", line_alpha="alpha", line_width=1.5, source=shown, **grouping
    )
    _limit(plot, limit, "width")
    plot.add_tools(
        HoverTool(
            renderers=[lines],
            tooltips=[("", "@lane: @here{custom}")],
            formatters={"@here": CustomJSHover(args={"full": full}, code=_BYTES_HERE)},
            line_policy="interp",
            visible=False,
        )
    )
    if grouping:
        _legend(plot)
    return Timed(plot, {"plot": plot, "full": full, "shown": shown, "shades": shades})


def waterfall_chart(name: str, waterfall: Waterfall, *, limit: float | None = None) -> figure:
    """Return what adds up to a total, part below part; seconds, or bytes if there is a limit."""
    show = format_seconds if limit is None else format_bytes
    ends = list(accumulate(value for _, value in waterfall.parts))
    rows = [(part, end - value, end, value) for (part, value), end in zip(waterfall.parts, ends, strict=True)]
    rows.append((waterfall.total_name, 0.0, waterfall.total, waterfall.total))
    if limit is not None:
        low, high = sorted((waterfall.total, limit))
        rows.append(("free" if high == limit else "over the limit", low, high, high - low))
    fills = [*colours([part for part, _ in waterfall.parts]), *[PLAIN] * (len(rows) - len(ends))]
    whole = limit or waterfall.total
    source = ColumnDataSource(
        {
            "label": [row[0] for row in rows],
            "left": [row[1] for row in rows],
            "right": [row[2] for row in rows],
            "colour": fills,
            "alpha": [1.0] * len(ends) + [0.35] * (len(rows) - len(ends)),
            "text": [f"{show(value)} ({100 * value / whole:.1f} %)" for *_, value in rows],
        }
    )
    end = _ROOM_FOR_TEXT * max(row[2] for row in rows)
    plot = _still(name, 60 + 26 * len(rows), y_range=[row[0] for row in rows][::-1], x_range=Range1d(0, end))
    plot.xaxis.formatter = seconds_axis() if limit is None else bytes_axis()
    plot.grid.grid_line_color = None  # figures stand beside the bars
    plot.hbar(y="label", left="left", right="right", height=0.7, color="colour", fill_alpha="alpha", source=source)
    plot.text(
        x="right", y="label", text="text", source=source, x_offset=5, text_baseline="middle", text_font_size="12px",
        tags=[INK],
    )  # fmt: skip
    return plot


def shares_chart(name: str, shares: LaneShares, *, limit: float | None = None) -> figure:
    """Return the parts of every lane side by side; seconds, or bytes if there is a limit."""
    axis = seconds_axis() if limit is None else bytes_axis()
    count = len(shares.lanes)
    totals = [sum(values) for values in zip(*shares.values, strict=True)]
    end = 1.02 * max(*totals, limit or 0.0)
    plot = _still(name, 130 + max(12, 30 - count) * count, x_range=Range1d(0, end), y_range=Range1d(count, 0))
    plot.xaxis.formatter = axis
    plot.yaxis.axis_label = shares.lanes.word
    plot.yaxis.ticker, plot.yaxis.major_label_overrides = _lane_ticks(shares.lanes)
    plot.ygrid.grid_line_color = None
    middles = [i + 0.5 for i in range(count)]
    columns = {"lane": middles, "title": list(shares.lanes.titles)}
    source = ColumnDataSource({**columns, **{f"part{i}": values for i, values in enumerate(shares.values)}})
    stack = plot.hbar_stack(
        [f"part{i}" for i in range(len(shares.parts))], y="lane", height=0.75, source=source,
        color=colours(shares.parts), legend_label=list(shares.parts),
    )  # fmt: skip
    write = CustomJSHover(code=f"return autopar.{'seconds' if limit is None else 'bytes'}(value)")
    for i, (part, drawn) in enumerate(zip(shares.parts, stack, strict=True)):
        tooltips = [("", f"@title: {part} @part{i}{{custom}}")]
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=tooltips, formatters={f"@part{i}": write}, visible=False))
    if limit is not None:
        _limit(plot, limit, "height")
    _legend(plot)
    return plot


def progress_chart(progress: Progress) -> figure:
    """Return by how much the best plan and the bound differ from the last best plan, against wall time.

    What lies between the two curves is the gap. Bounds of 0, before anything is proven, are left out.
    """
    best = progress.objective[-1]
    first, last = progress.seconds[0], progress.seconds[-1]
    start = 0.0 if first < last / 2 else first - 0.1 * (last - first)  # most of the time may pass before the first plan
    plot = _still("progress", 300, x_range=Range1d(start, last + 0.03 * (last - start)))
    plot.xaxis.formatter = seconds_axis()
    plot.yaxis.formatter = CustomJSTickFormatter(code="return autopar.percent(tick)")
    plot.xaxis.axis_label, plot.yaxis.axis_label = "wall time", "against the best plan"
    for name, values in (("this plan", progress.objective), ("bound", progress.bound)):
        source = ColumnDataSource(
            {
                "seconds": progress.seconds,
                "change": [_finite(100 * (value / best - 1)) if value > 0 else math.nan for value in values],
                "step": [_finite(value) for value in values],
            }
        )
        colour, label = MEANINGS[name], "best plan" if name == "this plan" else name
        plot.step(x="seconds", y="change", mode="after", line_width=2, color=colour, source=source, legend_label=label)
        points = plot.scatter(x="seconds", y="change", size=6, color=colour, source=source, legend_label=label)
        write = CustomJSHover(code="return autopar.seconds(value)")
        plot.add_tools(
            HoverTool(
                renderers=[points],
                tooltips=[("", f"{label} @step{{custom}} after @seconds{{custom}}")],
                formatters={"@step": write, "@seconds": write},
                visible=False,
            )
        )
    _legend(plot)
    return plot


def compared_chart(found: Sequence[Compared]) -> figure:
    """Return the step of a plan and of others for the same job as bars, the fastest first."""
    rows = sorted(found, key=lambda each: each.step)
    step = found[0].step
    most = _LONGEST * step
    source = ColumnDataSource(
        {
            "label": [row.name for row in rows],
            "step": [min(most, row.step) for row in rows],
            "colour": [MEANINGS.get(row.kind, PLAIN) for row in rows],
            "plan": [row.summary for row in rows],
            "text": [
                format_seconds(row.step) + (f" ({format_change(row.step, step)})" if row is not found[0] else "")
                for row in rows
            ],
        }
    )
    end = _ROOM_FOR_TEXT * min(most, rows[-1].step)
    labels = [row.name for row in rows][::-1]
    plot = _still("compared", 60 + 26 * len(rows), y_range=labels, x_range=Range1d(0, end))
    plot.xaxis.formatter = seconds_axis()
    plot.grid.grid_line_color = None  # figures stand beside the bars
    bars = plot.hbar(y="label", left=0, right="step", height=0.7, color="colour", source=source)
    plot.text(
        x="step", y="label", text="text", source=source, x_offset=5, text_baseline="middle", text_font_size="12px",
        tags=[INK],
    )  # fmt: skip
    plot.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@plan")], visible=False))
    return plot


def tradeoff_chart(found: Sequence[Compared], limit: float) -> figure:
    """Return step time against memory of a plan and of others for the same job, with the limit and the Pareto front."""
    steps = [each.step for each in found]
    plot = _still("tradeoff", 320, x_range=Range1d(0.95 * min(steps), 1.05 * max(steps)))
    plot.xaxis.formatter, plot.yaxis.formatter = seconds_axis(), bytes_axis()
    plot.xaxis.axis_label, plot.yaxis.axis_label = "step time", "peak memory"
    plot.y_range = Range1d(0, 1.1 * max(limit, *(each.peak for each in found)))
    front = pareto(found)
    plot.step(
        [each.step for each in front], [each.peak for each in front], mode="after", line_dash="dotted", line_width=2,
        color=PLAIN, legend_label="Pareto front",
    )  # fmt: skip
    kinds = dict.fromkeys(each.kind for each in reversed(found))  # the plan is drawn above the others
    for kind in kinds:
        mine = [each for each in found if each.kind == kind]
        source = ColumnDataSource(
            {
                "step": [each.step for each in mine],
                "peak": [each.peak for each in mine],
                "name": [each.name for each in mine],
                "plan": [each.summary for each in mine],
            }
        )
        colour = MEANINGS.get(kind, PLAIN)
        drawn = plot.scatter(x="step", y="peak", size=11, color=colour, source=source, legend_label=kind)
        plot.add_tools(
            HoverTool(
                renderers=[drawn],
                tooltips=[("", "@name: @step{custom}, @peak{custom}"), ("", "@plan")],
                formatters={
                    "@step": CustomJSHover(code="return autopar.seconds(value)"),
                    "@peak": CustomJSHover(code="return autopar.bytes(value)"),
                },
                visible=False,
            )
        )
    _limit(plot, limit, "width")
    _legend(plot)
    return plot


def whatif_chart(found: WhatIf) -> figure:
    """Return the throughput of the best plan of each cluster and number of GPUs that has one, as bars."""
    cells = [cell for cell in found.cells if cell.items_per_second is not None]
    rates = [cell.items_per_second or 0.0 for cell in cells]
    labels = [f"{cell.gpus} × {cell.cluster}" for cell in cells]
    fastest = max(rates)
    source = ColumnDataSource(
        {
            "label": labels,
            "rate": rates,
            "colour": [MEANINGS["this plan"] if rate == fastest else PLAIN for rate in rates],
            "text": [f"{format_count(rate)}/s" for rate in rates],
        }
    )
    plot = _still("whatif", 60 + 26 * len(cells), y_range=labels[::-1], x_range=Range1d(0, _ROOM_FOR_TEXT * fastest))
    plot.xaxis.axis_label = f"{found.unit}s per second"
    plot.xaxis.formatter = CustomJSTickFormatter(code="return autopar.count(tick)")
    plot.grid.grid_line_color = None  # figures stand beside the bars
    plot.hbar(y="label", left=0, right="rate", height=0.7, color="colour", source=source)
    plot.text(
        x="rate", y="label", text="text", source=source, x_offset=5, text_baseline="middle", text_font_size="12px",
        tags=[INK],
    )  # fmt: skip
    return plot


def measured_chart(name: str, found: Measured) -> figure:
    """Return a measured step below the simulated one, from the same moment on."""
    used = [(step, row) for step in (SIMULATED, MEASURED) for row in ROWS
            if any((bar.step, bar.row) == (step, row) for bar in found.bars)]  # fmt: skip
    labels = [f"{step}: {row}" for step, row in used]
    end = max(bar.start + bar.seconds for bar in found.bars)
    plot = _timed(name, 90 + 34 * len(labels), end, y_range=labels[::-1])
    plot.ygrid.grid_line_color = None
    drawn = []
    for kind in dict.fromkeys(bar.kind for bar in found.bars):
        own = [bar for bar in found.bars if bar.kind == kind]
        source = ColumnDataSource(
            {
                "label": [f"{bar.step}: {bar.row}" for bar in own],
                "left": [bar.start for bar in own],
                "right": [bar.start + bar.seconds for bar in own],
                "text": [f"{kind} {bar.name}, {format_seconds(bar.seconds)} from {format_seconds(bar.start)} on"
                         for bar in own],
            }
        )  # fmt: skip
        (colour,) = colours([kind])
        drawn.append(
            plot.hbar(y="label", left="left", right="right", height=0.7, color=colour, source=source, legend_label=kind)
        )
    plot.add_tools(HoverTool(renderers=drawn, tooltips="@text", point_policy="follow_mouse", visible=False))
    _legend(plot)
    return plot


def machine_chart() -> figure:
    """Return the empty picture of the machine; the page fills it in, coloured by the groups that are chosen."""
    names = ("x", "y", "width", "height", "colour", "alpha", "detail")
    cells = ColumnDataSource({name: [] for name in names}, name="cells")
    frames = ColumnDataSource({name: [] for name in ("x", "y", "width", "height", "label")}, name="frames")
    plot = _plot("machine", 200, (), x_range=Range1d(0, 1), y_range=Range1d(1, 0))
    plot.axis.visible = False
    plot.grid.visible = False
    plot.min_border = 0
    plot.rect(
        x="x", y="y", width="width", height="height", source=frames, fill_color=None, line_color=PLAIN, border_radius=3
    )
    drawn = plot.rect(
        x="x", y="y", width="width", height="height", source=cells, fill_color="colour", fill_alpha="alpha",
        line_color=None, border_radius=2,
    )  # fmt: skip
    plot.add_tools(HoverTool(renderers=[drawn], tooltips="@detail{safe}", point_policy="follow_mouse", visible=False))
    plot.js_on_event("tap", CustomJS(code="autopar.pick(cb_obj.x, cb_obj.y)"))
    return plot


def alternatives_chart(found: Alternatives) -> figure:
    """Return the step of the best plan with each other value of a decision, beside that of the plan.

    Bars much longer than the plan's are cut off; what is written beside them is not.
    """
    rows = [(f"{own.name} \u2192 {own.value}", own.step) for own in found.weighed if own.step is not None]
    most = _LONGEST * found.step
    source = ColumnDataSource(
        {
            "label": [label for label, _ in rows],
            "step": [min(most, step) for _, step in rows],
            "text": [format_change(step, found.step) for _, step in rows],
        }
    )
    end = _ROOM_FOR_TEXT / 1.2 * min(most, max(found.step, *(step for _, step in rows)))
    labels = [label for label, _ in rows][::-1]
    plot = _still("alternatives", 80 + 24 * len(rows), y_range=labels, x_range=Range1d(0, end))
    plot.xaxis.formatter = seconds_axis()
    plot.grid.grid_line_color = None  # figures stand beside the bars
    plot.hbar(y="label", left=0, right="step", height=0.7, color=PLAIN, source=source)
    plot.text(
        x="step", y="label", text="text", source=source, x_offset=5, text_baseline="middle", text_font_size="12px",
        tags=[INK],
    )  # fmt: skip
    _line(plot, found.step, "height", "this plan")
    return plot


def scaling_chart(points: Sequence[ScalePoint]) -> figure:
    """Return samples per second against devices, with what the bounds and proportional growth would give."""
    gpus = [point.gpus for point in points]
    first = points[0]
    plot = _still("scaling", 340, x_axis_type="log", y_axis_type="log")
    plot.xaxis.axis_label, plot.yaxis.axis_label = "GPUs", "samples/s"
    plot.xaxis.ticker = FixedTicker(ticks=sorted(set(gpus)))
    ends = [min(gpus), max(gpus)]
    plot.line(
        ends, [first.throughput / first.gpus * count for count in ends], line_dash="dotted", line_width=2, color=PLAIN,
        legend_label=f"in proportion to {first.gpus} GPUs",
    )  # fmt: skip
    clusters = list(dict.fromkeys(point.cluster for point in points))
    for cluster, colour, night in zip(clusters, series(len(clusters)), series(len(clusters), DARK), strict=True):
        shade = {"color": colour, "tags": [SHADE, colour, night]}
        mine = [point for point in points if point.cluster == cluster]
        source = ColumnDataSource(
            {
                "gpus": [point.gpus for point in mine],
                "rate": [point.throughput for point in mine],
                "plan": [point.summary for point in mine],
            }
        )
        plot.line(x="gpus", y="rate", source=source, line_width=2, legend_label=cluster, **shade)
        drawn = plot.scatter(x="gpus", y="rate", source=source, size=8, legend_label=cluster, **shade)
        tooltips = [("", "@gpus GPUs: @rate samples/s"), ("", "@plan")]
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=tooltips, visible=False))
        proven = [(point.gpus, point.batch / point.bound) for point in mine if point.bound]
        if proven:
            x, y = zip(*proven, strict=True)
            label = f"{cluster}: proven maximum"
            plot.scatter(x, y, marker="dash", size=16, line_width=2, legend_label=label, **shade)
    _legend(plot)
    return plot


def block_chart() -> figure:
    """Return the empty drawing of a block; the page fills it in with the block and phase that are chosen."""
    nodes = ColumnDataSource({name: [] for name in ("x", "y", "colour", "text", "detail", "width")}, name="nodes")
    edges = ColumnDataSource({name: [] for name in ("x0", "y0", "x1", "y1")}, name="edges")
    pan = PanTool()
    tools: list[Tool] = [pan, WheelZoomTool(modifiers="ctrl"), ZoomInTool(), ZoomOutTool(), ResetTool()]
    plot = _plot("block", 400, tools, x_range=Range1d(-3, 3), y_range=Range1d(3, -0.5))
    plot.axis.visible = False
    plot.grid.visible = False
    plot.segment(x0="x0", y0="y0", x1="x1", y1="y1", source=edges, line_color=PLAIN, line_alpha=0.7, line_width=1.2)
    boxes = plot.rect(x="x", y="y", width="width", height=0.62, source=nodes, color="colour", border_radius=4)
    plot.text(
        x="x", y="y", text="text", source=nodes, text_align="center", text_baseline="middle", text_font_size="11px",
        text_color="#ffffff", name="labels",
    )  # fmt: skip
    plot.add_tools(HoverTool(renderers=[boxes], tooltips="@detail{safe}", visible=False))
    return plot


def _plot(name: str, height: int, tools: Sequence[Tool], **options: Any) -> figure:
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        tools=list(tools),
        toolbar_location="above" if tools else None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        **options,
    )
    plot.toolbar.logo = None
    return plot


def _still(name: str, height: int, **options: Any) -> figure:
    """Return a chart that one looks at as a whole."""
    plot = _plot(name, height, (), **options)
    for axis in plot.xaxis:
        if isinstance(axis.ticker, BasicTicker):
            axis.ticker.desired_num_ticks = 4  # more would meet on a telephone
    return plot


def _timed(name: str, height: int, end: float, **options: Any) -> figure:
    """Return a chart whose time axis can be zoomed."""
    tools = [
        PanTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers="ctrl"), BoxZoomTool(),
        ZoomInTool(dimensions="width"), ZoomOutTool(dimensions="width"), ResetTool(),
    ]  # fmt: skip
    plot = _plot(name, height, tools, x_range=Range1d(0, end, bounds=(0, end), min_interval=end * 1e-7), **options)
    plot.xaxis.formatter = seconds_axis()
    return plot


def _lane_ticks(lanes: Lanes) -> tuple[FixedTicker, dict[float, str]]:
    """Return a tick in the middle of each lane, of every few if there are many, and what to write there."""
    step = 1 + (len(lanes) - 1) // 32
    places = {i + 0.5: lanes.names[i] for i in range(0, len(lanes), step)}
    return FixedTicker(ticks=list(places)), places


def _limit(plot: figure, limit: float, dimension: str) -> None:
    _line(plot, limit, dimension, "limit")


def _line(plot: figure, place: float, dimension: str, meaning: str) -> None:
    """Draw a dashed line across the chart in the colour of a meaning."""
    colour = MEANINGS[meaning]
    plot.add_layout(Span(location=place, dimension=dimension, line_color=colour, line_dash="dashed", line_width=2))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _legend(plot: figure) -> None:
    """Put the legend below the chart, each entry a switch; the page's script chooses how many are beside each other."""
    (legend,) = plot.legend
    plot.add_layout(legend, "below")
    legend.click_policy = "hide"
    legend.ncols = _LEGEND_COLUMNS
    legend.orientation = "horizontal"
    legend.border_line_color = None
    legend.background_fill_alpha = 0
    legend.label_text_font_size = "12px"
    legend.padding, legend.margin, legend.spacing = 2, 2, 8

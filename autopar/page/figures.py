"""The same charts as figures for papers, drawn by matplotlib: white ground, letters of 8 pt."""

import io
from collections.abc import Iterator, Sequence
from itertools import accumulate

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from autopar.page.bars import memory_top, row_edges
from autopar.page.palette import MEANINGS, PLAIN, colours, ordered, series
from autopar.page.records import Gantt, Lanes, LaneShares, MemoryCurve, Progress, ScalePoint, Waterfall
from autopar.page.view import View
from autopar.units import format_bytes, format_count, format_seconds

WIDTH = 6.9
"""Inches: the text of a page in two columns."""
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "autopar",
    "pdf.fonttype": 42,
}
"""Letters stay letters, and the same plan makes the same file."""
_METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}
_RASTER_BARS = 4000  # bars above which they are an image inside the figure, whose lines and letters stay sharp
_DPI = 200


def draw(view: View, formats: Sequence[str]) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, format and content of each figure there is."""
    limit = view.plan.job.memory_limit
    with mpl.rc_context(_STYLE):
        found = {
            "timeline": timeline_figure(view.gantt),
            "memory": memory_figure(view.memory, limit),
            "time_waterfall": waterfall_figure(view.time_parts, None),
            "memory_waterfall": waterfall_figure(view.memory_parts, limit),
        }
        if len(view.gantt.lanes) > 1:
            found["time_by_stage"] = shares_figure(view.time_shares, None)
            found["memory_by_stage"] = shares_figure(view.memory_shares, limit)
        if view.progress is not None and len(view.progress.seconds) > 1:
            found["search"] = progress_figure(view.progress)
        if view.scaling:
            found["scaling"] = scaling_figure(view.scaling)
        for name, figure in found.items():
            for kind in formats:
                yield name, kind, _saved(figure, kind)


def draw_scaling(points: Sequence[ScalePoint], formats: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield format and content of the figure of throughput against devices."""
    with mpl.rc_context(_STYLE):
        figure = scaling_figure(points)
        for kind in formats:
            yield kind, _saved(figure, kind)


def _saved(figure: Figure, kind: str) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format=kind, dpi=_DPI, metadata=_METADATA[kind])
    return data.getvalue()


def _new(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def timeline_figure(gantt: Gantt) -> Figure:
    """Return the bars of every lane over the time of a step."""
    count = len(gantt.lanes)
    figure, axes = _new(min(6.0, 0.9 + max(0.12, 0.5 - 0.03 * count) * count))
    tops, bottoms = (np.array(edges) for edges in row_edges(gantt))
    for bars, colour in zip(gantt.bars, colours([bars.kind for bars in gantt.bars]), strict=True):
        corners = _corners(
            bars.start, bars.start + bars.seconds, bars.lane + tops[bars.row], bars.lane + bottoms[bars.row]
        )
        collection = PolyCollection(list(corners), facecolor=colour, edgecolor="none", label=bars.kind, linewidth=0)
        collection.set_rasterized(len(gantt) > _RASTER_BARS)
        axes.add_collection(collection)
    axes.set_xlim(0, gantt.seconds)
    axes.set_ylim(count, 0)
    _lanes(axes, gantt.lanes)
    _seconds(axes.xaxis)
    _legend(figure)
    return figure


def _corners(
    left: NDArray[np.float64], right: NDArray[np.float64], top: NDArray[np.float64], bottom: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the corners of bars, (n, 4, 2)."""
    x = np.stack([left, right, right, left], axis=1)
    y = np.stack([top, top, bottom, bottom], axis=1)
    return np.stack([x, y], axis=2)


def memory_figure(curves: Sequence[MemoryCurve], limit: float) -> Figure:
    """Return memory over time of every lane, against the limit."""
    figure, axes = _new(2.4)
    for curve, colour in zip(curves, ordered(len(curves)), strict=True):
        (line,) = axes.step(curve.start, curve.bytes, where="post", color=colour, linewidth=0.8)
        line.set_rasterized(sum(len(each.start) for each in curves) > _RASTER_BARS)
        if 1 < len(curves) <= 8:
            line.set_label(curve.lane)
    axes.axhline(limit, color=MEANINGS["limit"], linestyle="dashed", linewidth=1, label=f"limit {format_bytes(limit)}")
    axes.set_ylim(0, memory_top(curves, limit))
    axes.set_xlim(0, max(float(curve.start[-1]) for curve in curves))
    _seconds(axes.xaxis)
    _bytes(axes.yaxis)
    _legend(figure)
    return figure


def waterfall_figure(waterfall: Waterfall, limit: float | None) -> Figure:
    """Return what adds up to a total, part below part; seconds, or bytes if there is a limit."""
    show = format_seconds if limit is None else format_bytes
    ends = list(accumulate(value for _, value in waterfall.parts))
    rows = [(name, end - value, value) for (name, value), end in zip(waterfall.parts, ends, strict=True)]
    rows.append((waterfall.total_name, 0.0, waterfall.total))
    figure, axes = _new(0.5 + 0.19 * len(rows))
    axes.barh(
        range(len(rows)), [row[2] for row in rows], left=[row[1] for row in rows], height=0.7,
        color=[*colours([part for part, _ in waterfall.parts]), PLAIN],
    )  # fmt: skip
    for place, (_, left, value) in enumerate(rows):
        axes.annotate(
            f"{show(value)} ({100 * value / waterfall.total:.1f} %)", (left + value, place), (3, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    if limit is not None:
        axes.axvline(limit, color=MEANINGS["limit"], linestyle="dashed", linewidth=1)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(waterfall.total, limit or 0.0))
    (_seconds if limit is None else _bytes)(axes.xaxis)
    axes.set_title(waterfall.title, loc="left")
    return figure


def shares_figure(shares: LaneShares, limit: float | None) -> Figure:
    """Return the parts of every lane side by side; seconds, or bytes if there is a limit."""
    count = len(shares.lanes)
    figure, axes = _new(min(6.0, 0.8 + 0.2 * count))
    places = np.arange(count) + 0.5
    left = np.zeros(count)
    for part, values, colour in zip(shares.parts, shares.values, colours(shares.parts), strict=True):
        axes.barh(places, values, left=left, height=0.75, color=colour, label=part)
        left += values
    if limit is not None:
        axes.axvline(limit, color=MEANINGS["limit"], linestyle="dashed", linewidth=1)
    axes.set_ylim(count, 0)
    _lanes(axes, shares.lanes)
    (_seconds if limit is None else _bytes)(axes.xaxis)
    _legend(figure)
    return figure


def progress_figure(progress: Progress) -> Figure:
    """Return the best plan found and the bound proven, against wall time."""
    figure, axes = _new(2.2)
    for name, values, colour in (
        ("best plan", progress.objective, MEANINGS["this plan"]),
        ("bound", progress.bound, MEANINGS["bound"]),
    ):
        finite = [(x, y) for x, y in zip(progress.seconds, values, strict=True) if np.isfinite(y)]
        axes.step(
            *zip(*finite, strict=True), where="post", color=colour, marker="o", markersize=3, linewidth=1, label=name
        )
    axes.set_xlim(left=0)
    axes.set_xlabel("wall time")
    axes.set_ylabel("step by the formula")
    _seconds(axes.xaxis)
    _seconds(axes.yaxis)
    _legend(figure)
    return figure


def scaling_figure(points: Sequence[ScalePoint]) -> Figure:
    """Return samples per second against devices."""
    figure, axes = _new(2.6)
    gpus = sorted({point.gpus for point in points})
    first = points[0]
    axes.plot(
        [gpus[0], gpus[-1]], [first.throughput / first.gpus * count for count in (gpus[0], gpus[-1])],
        linestyle="dotted", color=PLAIN, label=f"in proportion to {first.gpus} GPUs",
    )  # fmt: skip
    clusters = list(dict.fromkeys(point.cluster for point in points))
    for cluster, colour in zip(clusters, series(len(clusters)), strict=True):
        mine = [point for point in points if point.cluster == cluster]
        axes.plot(
            [p.gpus for p in mine], [p.throughput for p in mine], marker="o", markersize=4, color=colour, label=cluster
        )
        proven = [(p.gpus, p.batch / p.bound) for p in mine if p.bound]
        if proven:
            axes.plot(
                *zip(*proven, strict=True),
                linestyle="none",
                marker="_",
                markersize=9,
                color=colour,
                label=f"{cluster}: proven maximum",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("GPUs")
    axes.set_ylabel("samples/s")
    _legend(figure)
    return figure


def _lanes(axes: Axes, lanes: Lanes) -> None:
    step = 1 + (len(lanes) - 1) // 16
    shown = range(0, len(lanes), step)
    axes.set_yticks([i + 0.5 for i in shown], [lanes.names[i] for i in shown])
    axes.set_ylabel(lanes.word)


def _seconds(axis: mpl.axis.Axis) -> None:
    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))


def _bytes(axis: mpl.axis.Axis) -> None:
    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)

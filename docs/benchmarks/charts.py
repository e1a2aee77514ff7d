"""How chart libraries that ship their JavaScript in a wheel cope with a timeline of 100,000 bars.

    pip install plotly vl-convert-python   # to measure them, too
    python docs/benchmarks/charts.py

Prints a table: size of the page, CPU seconds to make it, seconds until it is drawn, milliseconds per step of zooming
(the median of several views, from the whole step to a thousandth of it, and the slowest). Without a GPU Chromium draws
in software, WebGL included.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from usage import show_usage  # noqa: E402

from autopar.page.document import render  # noqa: E402
from autopar.page.records import Bars, Gantt, Lanes  # noqa: E402
from tests.browser import Page, browser_path, open_browser  # noqa: E402
from tests.views import view_of  # noqa: E402

LANES, BARS = 64, 1600
VIEWS = [2.0**-power for power in range(11)]
COLOURS = ("#3b86c6", "#d0722b")
FRAMES = (
    "for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); await new Promise((r) => setTimeout(r, 0));"
)
"""Wait until what was asked for is drawn."""


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def timeline() -> Gantt:
    """Return two kinds of bars that alternate in every lane."""
    seconds = np.random.default_rng(0).uniform(0.5, 1.5, (LANES, BARS))
    start = np.cumsum(seconds, axis=1) - seconds
    lane = np.broadcast_to(np.arange(LANES)[:, None], seconds.shape)
    bars = []
    for kind, name in enumerate(("forward", "backward")):
        mine = np.s_[:, kind::2]
        count = seconds[mine].size
        bars.append(
            Bars(
                name,
                lane[mine].ravel().astype(np.uint16),
                np.zeros(count, np.uint8),
                start[mine].ravel(),
                seconds[mine].ravel().astype(np.float32),
                np.zeros(count, np.uint32),
            )
        )
    lanes = Lanes(tuple((i,) for i in range(LANES)))
    return Gantt(float((start + seconds).max()), lanes, ("tasks",), tuple(bars), ("a task",))


def ours(gantt: Gantt) -> tuple[str, str]:
    """Return the page of autopar with that timeline, its other charts included, and a script that zooms it."""
    page = render(replace(view_of(), gantt=gantt))
    script = "Bokeh.documents[0].get_model_by_name('timeline').x_range.setv({start: from, end: to});"
    return page, script


def bokeh(backend: str) -> Callable[[Gantt], tuple[str, str]]:
    """Return what makes a page of Bokeh alone, on a canvas or by WebGL."""

    def make(gantt: Gantt) -> tuple[str, str]:
        from bokeh.embed import file_html
        from bokeh.plotting import figure
        from bokeh.resources import INLINE

        plot = figure(height=600, sizing_mode="stretch_width", output_backend=backend, name="timeline")
        for bars, colour in zip(gantt.bars, COLOURS, strict=True):
            plot.hbar(
                y=bars.lane.astype(np.float32), left=bars.start, right=bars.start + bars.seconds, height=0.8,
                color=colour, line_color=None,
            )  # fmt: skip
        script = "Bokeh.documents[0].get_model_by_name('timeline').x_range.setv({start: from, end: to});"
        return file_html(plot, INLINE, "timeline"), script

    return make


def plotly(gantt: Gantt) -> tuple[str, str]:
    """Return a page of Plotly: bars as thick lines of WebGL, for its bars are SVG and take a minute."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for bars, colour in zip(gantt.bars, COLOURS, strict=True):
        gap = np.full(len(bars), np.nan)
        x = np.stack([bars.start, bars.start + bars.seconds, gap], axis=1).ravel()
        y = np.stack([bars.lane, bars.lane, gap], axis=1).ravel()
        figure.add_trace(go.Scattergl(x=x, y=y, mode="lines", line={"width": 8, "color": colour}))
    page = figure.to_html(include_plotlyjs=True, div_id="timeline", default_height="600px")
    return page, "await Plotly.relayout('timeline', {'xaxis.range': [from, to]});"


def vega(gantt: Gantt) -> tuple[str, str]:
    """Return a page of Vega-Lite, which the wheel of vl-convert holds, on a canvas."""
    import vl_convert

    rows = [
        {"l": round(float(start), 3), "r": round(float(start + seconds), 3), "s": int(lane), "k": kind}
        for kind, bars in enumerate(gantt.bars)
        for lane, start, seconds in zip(bars.lane, bars.start, bars.seconds, strict=True)
    ]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": 1100,
        "height": 600,
        "data": {"values": rows},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "bar", "clip": True, "tooltip": True},
        "encoding": {
            "x": {"field": "l", "type": "quantitative"},
            "x2": {"field": "r"},
            "y": {"field": "s", "type": "ordinal"},
            "color": {"field": "k", "type": "nominal"},
        },
    }
    page = vl_convert.vegalite_to_html(json.dumps(spec), bundle=True, renderer="canvas")
    page = page.replace("vegaEmbed(", "window.made = vegaEmbed(")
    script = "const {view} = await window.made; view.signal('zoom_l', [from, to]); await view.runAsync();"
    return page, script


CANDIDATES: dict[str, tuple[str, Callable[[Gantt], tuple[str, str]]]] = {
    "report.html (Bokeh, bars chosen by the view)": ("bokeh", ours),
    "Bokeh, canvas": ("bokeh", bokeh("canvas")),
    "Bokeh, WebGL": ("bokeh", bokeh("webgl")),
    "Plotly, scattergl": ("plotly", plotly),
    "Vega-Lite, canvas": ("vl_convert", vega),
}
"""Package and maker of a page, by name."""


def measure(page: Page, path: Path, script: str, end: float) -> tuple[float, list[float]]:
    """Return seconds until a page is drawn, and milliseconds of each step of zooming."""
    begin = time.perf_counter()
    page.open(path.as_uri())
    page.evaluate(f"(async () => {{ {FRAMES} }})()")
    drawn = time.perf_counter() - begin
    time.sleep(1.0)
    page.evaluate(
        f"window.zoomTo = async (from, to) => {{ const begin = performance.now(); {script} {FRAMES}"
        " return performance.now() - begin; }"
    )
    views = [(0.4 * end * (1 - share), end * share * (1 - 0.001 * nudge)) for share in VIEWS for nudge in range(3)]
    steps = [page.evaluate(f"zoomTo({start}, {start + width})") for start, width in views]
    return drawn, steps


def main() -> None:
    """Print the table."""
    program = browser_path()
    if program is None:
        sys.exit("no Chromium: apt-get install chromium")
    gantt = timeline()
    say(f"{len(gantt):,} bars\n")
    say("| library | page, MB | made, s | drawn, s | zoom step, ms | slowest, ms |")
    say("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, (package, make) in CANDIDATES.items():
            if importlib.util.find_spec(package) is None:
                say(f"| {name} | not installed | | | | |")
                continue
            begin = time.process_time()
            text, script = make(gantt)
            made = time.process_time() - begin
            path = Path(folder) / "page.html"
            path.write_text(text)
            with open_browser(program) as page:
                drawn, steps = measure(page, path, script, gantt.seconds)
            say(
                f"| {name} | {len(text) / 1e6:.1f} | {made:.1f} | {drawn:.1f} | {statistics.median(steps):.0f} "
                f"| {max(steps):.0f} |"
            )


if __name__ == "__main__":
    show_usage(__doc__)
    main()

"""The page in a browser: it loads without a word, draws, zooms, answers the mouse, and fits its window."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.page import palette, write_page
from autopar.page.bars import gantt, memory_curves
from autopar.page.view import View
from autopar.simulate import simulate
from tests.browser import Page, browser_path, open_browser
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages
from tests.views import view_of, weighing_of, whatif_of

pytestmark = pytest.mark.skipif(browser_path() is None, reason="needs Chromium, Debian's package chromium")

PAINTED = """
(() => {
  const counts = {};
  for (const holder of document.querySelectorAll("[data-chart]")) {
    let painted = 0;
    const walk = (node) => {
      if (node.tagName === "CANVAS" && node.width && node.height) {
        const { data } = node.getContext("2d").getImageData(0, 0, node.width, node.height);
        for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
      }
      if (node.shadowRoot) walk(node.shadowRoot);
      for (const child of node.children) walk(child);
    };
    walk(holder);
    counts[holder.dataset.chart] = painted;
  }
  return counts;
})()
"""
"""Pixels that are not empty, by chart."""

TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0))))"
MODEL = "Bokeh.documents[0].get_model_by_name"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """Return a browser for all tests."""
    program = browser_path()
    assert program is not None, "tests are skipped without one"
    with open_browser(program) as page:
        yield page


def _open(browser: Page, view: View, folder: Path, **window: Any) -> Page:
    write_page(view, folder / "report.html")
    browser.open((folder / "report.html").as_uri(), **window)
    _wait(browser, "'ready' in document.documentElement.dataset")
    _settle(browser)
    return browser


def _wait(page: Page, condition: str) -> None:
    """Wait until something is so; the browser gives up when it takes too long."""
    page.evaluate(
        f"new Promise((done) => {{ const look = () => ({condition} ? done() : setTimeout(look, 20)); look(); }})"
    )


def _settle(page: Page) -> None:
    """Wait until all frames that were asked for are drawn."""
    for _ in range(3):
        page.evaluate(TWO_FRAMES)
    _wait(page, "Bokeh.documents[0].is_idle")


def _range(page: Page, chart: str) -> tuple[float, float]:
    start, end = page.evaluate(f"[{MODEL}('{chart}').x_range.start, {MODEL}('{chart}').x_range.end]")
    return start, end


def _shown(page: Page) -> int:
    """Return how many bars the timeline draws, those that stand for several counted once."""
    number = page.evaluate(
        f"{MODEL}('timeline').renderers.map((each) => each.data_source.data.left.length - 1).reduce((a, b) => a + b)"
    )
    return int(number)


def _zoom(page: Page, start: float, end: float) -> None:
    page.evaluate(f"{MODEL}('timeline').x_range.setv({{start: {start}, end: {end}}})")
    _settle(page)


def _middle(page: Page, chart: str) -> tuple[float, float]:
    """Return the middle of a chart, after scrolling to it."""
    x, y = page.evaluate(
        f"""(() => {{
          const holder = document.querySelector('[data-chart="{chart}"]');
          holder.scrollIntoView({{block: 'start'}});
          const box = holder.getBoundingClientRect();
          return [box.left + box.width / 2, box.top + 60];
        }})()"""
    )
    return x, y


def _turn_wheel(page: Page, delta: int, **event: int) -> None:
    """Turn the wheel over the timeline."""
    x, y = _middle(page, "timeline")
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta, **event)
    _settle(page)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_draws_all_charts_and_asks_for_nothing(browser: Page, tmp_path: Path, width: int, dark: bool) -> None:
    """No message in the console, no request but its own, nothing wider than the window."""
    other = replace(two_stage_plan(), job=replace(two_stage_plan().job, gpus=16))

    plan = two_stage_plan()
    view = view_of(others=[other], weighing=weighing_of(plan), whatif=whatif_of(plan))

    page = _open(browser, view, tmp_path, width=width, dark=dark)

    assert page.messages == []
    assert [address for address in page.requests if not address.startswith("data:")] == [
        (tmp_path / "report.html").as_uri()
    ]
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    _settle(page)
    painted = page.evaluate(PAINTED)
    assert {
        "whatif",
        "machine",
        "timeline",
        "memory",
        "compared",
        "tradeoff",
        "time_parts",
        "memory_parts",
        "time_shares",
        "memory_shares",
        "block",
        "alternatives",
    } <= set(painted)
    assert min(painted.values()) > 500, painted
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_wheel_with_ctrl_zooms_timeline_and_memory(browser: Page, tmp_path: Path) -> None:
    """Around the pointer; without Ctrl the page scrolls."""
    page = _open(browser, view_of(), tmp_path)
    before = _range(page, "timeline")

    _turn_wheel(page, 240)
    untouched = _range(page, "timeline")
    _turn_wheel(page, -240, modifiers=2)
    _wait(page, f"{MODEL}('timeline').x_range.end < {before[1]}")
    _settle(page)

    assert untouched == before
    start, end = _range(page, "timeline")
    assert before[0] < start < end < before[1]
    assert _range(page, "memory") == (start, end)
    assert page.messages == []


def test_pointing_at_a_bar_tells_what_it_is(browser: Page, tmp_path: Path) -> None:
    """The first task of the first stage: a forward of 1 s in a step of 13.5 s."""
    page = _open(browser, view_of(), tmp_path)
    x, y = _middle(page, "timeline")
    _zoom(page, 0.0, 1.0)

    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 3, y=y + 2)
    _settle(page)

    text = page.evaluate(
        """(() => {
          let found = '';
          const walk = (node) => {
            if (node.classList && node.classList.contains('bk-tooltip-row-value')) found += node.textContent + '|';
            if (node.shadowRoot) walk(node.shadowRoot);
            for (const child of node.children || []) walk(child);
          };
          walk(document.body);
          return found;
        })()"""
    )
    assert "forward F0, stage 0" in text
    assert "1 s, from 0 s to 1 s" in text


def test_a_hundred_thousand_bars_are_drawn_as_few_and_none_is_lost(browser: Page, tmp_path: Path) -> None:
    """Whatever part is seen, a bounded number is drawn; close up each bar is there by itself."""
    program = equal_stages(64, 512, "1f1b")
    timeline = simulate(program, ExactCosts(latency=0.25), trace=True)
    shown = gantt(timeline, program.groups)
    assert len(shown) > 100_000
    view = view_of()
    devices = replace(view.machine, lanes=(view.machine.lanes[0],) * len(shown.lanes.stages))
    view = replace(view, gantt=shown, machine=devices, memory=memory_curves(timeline, shown.lanes))

    page = _open(browser, view, tmp_path)

    whole = _range(page, "timeline")
    assert whole == (0.0, shown.seconds)
    for power in range(12):
        width = shown.seconds / 2**power
        _zoom(page, 0.4 * (shown.seconds - width), 0.4 * (shown.seconds - width) + width)
        assert 0 < _shown(page) <= 15_000
    start, end = _range(page, "timeline")
    seen = sum(
        int(((bars.start <= end) & (bars.start + bars.seconds >= start) & (bars.seconds > 0)).sum())
        for bars in shown.bars
    )
    assert _shown(page) == seen
    assert page.messages == []


def test_choosing_a_block_draws_it(browser: Page, tmp_path: Path) -> None:
    """The drawing and both tables have the instructions of the chosen block and phase."""
    view = view_of()
    page = _open(browser, view, tmp_path)

    for number, graph in enumerate(view.graphs):
        page.evaluate(
            f"""(() => {{
              const choice = document.querySelector('#block-choice');
              choice.value = '{number}';
              choice.dispatchEvent(new Event('change'));
            }})()"""
        )
        _settle(page)
        assert page.evaluate(f"{MODEL}('block').renderers[1].data_source.data.x.length") == len(graph.nodes)
        assert page.evaluate("document.querySelectorAll('#instructions tbody tr').length") == len(graph.nodes)
        assert page.evaluate("document.querySelectorAll('#states tbody tr').length") == len(graph.states)
    assert page.messages == []


def test_a_layer_is_drawn_row_by_row(browser: Page, tmp_path: Path) -> None:
    """An op that takes time is a row, a collective a band, in the order of the program."""
    view = view_of()
    page = _open(browser, view, tmp_path)
    chosen = int(page.evaluate("document.querySelector('#block-choice').value"))

    rows = page.evaluate("document.querySelectorAll('#layer > li:not(.part):not(.columns)').length")
    bands = page.evaluate("document.querySelectorAll('#layer > .move').length")

    nodes = view.graphs[chosen].nodes
    assert bands == sum(bool(node.over) and node.kind != "slice" for node in nodes)
    assert rows == bands + sum((not node.over or node.kind == "slice") and node.seconds > 0 for node in nodes)
    assert rows > 0


def test_a_click_on_a_gpu_shows_its_stage_alone(browser: Page, tmp_path: Path) -> None:
    """In the timeline and in what is drawn by stage; a second click shows all again, and so does the list."""
    page = _open(browser, view_of(), tmp_path)
    shown = f"[{MODEL}('timeline').y_range.start, {MODEL}('timeline').y_range.end]"
    cells = f"{MODEL}('machine').renderers[1].data_source.data"
    before = page.evaluate(shown)

    x, y = page.evaluate(f"[{cells}.x[1], {cells}.y[1]]")
    page.evaluate(f"autopar.pick({x}, {y})")
    _settle(page)
    one = page.evaluate(shown)
    lines = page.evaluate(f"{MODEL}('memory').renderers[0].data_source.data.alpha")
    listed = page.evaluate("document.querySelector('#lane-choice').value")
    page.evaluate(f"autopar.pick({x}, {y})")
    _settle(page)

    assert before == [2, 0]
    assert one == [2, 1]
    assert (lines[0] < 0.5, lines[1]) == (True, 1)
    assert listed == "1"
    assert page.evaluate(shown) == before
    assert page.messages == []


def test_copy_takes_the_command(browser: Page, tmp_path: Path) -> None:
    """Even where the browser gives the page no clipboard: then the command is selected."""
    page = _open(browser, view_of(), tmp_path)

    page.evaluate("document.querySelector('[data-copy]').click()")
    _wait(page, "document.querySelector('[data-copy]').textContent !== 'Copy'")

    assert page.evaluate("document.querySelector('[data-copy]').textContent") in ("Copied", "Selected: press Ctrl+C")
    assert page.messages == []


def test_switch_turns_light_to_dark(browser: Page, tmp_path: Path) -> None:
    """The letters of the charts with the page."""
    page = _open(browser, view_of(), tmp_path)
    ink = f"{MODEL}('timeline').below[0].major_label_text_color"
    paper = "getComputedStyle(document.body).backgroundColor"
    light = (page.evaluate(ink), page.evaluate(paper))

    page.evaluate("document.querySelector('[data-switch]').click()")
    _settle(page)

    dark = (page.evaluate(ink), page.evaluate(paper))
    assert light[0] != dark[0]
    assert (light[1], dark[1]) == ("rgb(255, 255, 255)", "rgb(20, 23, 28)")
    assert page.evaluate("document.querySelector('[data-switch]').textContent") == "Light"


@pytest.mark.parametrize("width", [1280, 400])
def test_legends_are_as_wide_as_their_charts_at_most(browser: Page, tmp_path: Path, width: int) -> None:
    """Also those with the long names of device groups; none has an entry that is cut off."""
    view = view_of(equal_stages(8, 8, "interleaved", num_chunks=2))

    page = _open(browser, view, tmp_path, width=width)

    boxes = page.evaluate(
        """[...Bokeh.documents[0].all_models].filter((each) => each.type === 'Legend').map((legend) => {
          const { bbox, parent } = Bokeh.index.find_one(legend);
          return [bbox.left, bbox.right, parent.bbox.width];
        })"""
    )
    assert len(boxes) >= 4
    for left, right, most in boxes:
        assert left >= 0
        assert right <= most
    assert page.messages == []


def test_dark_page_has_lighter_stages(browser: Page, tmp_path: Path) -> None:
    """In the machine, in the curves of memory and in the legend; turning back restores them."""
    page = _open(browser, view_of(), tmp_path)
    colours = (
        f"[{MODEL}('machine').renderers[1].data_source.data.colour[0], "
        f"{MODEL}('memory').renderers[0].data_source.data.colour[0], "
        "getComputedStyle(document.querySelector('.key .ramp')).backgroundImage]"
    )
    light = page.evaluate(colours)

    page.evaluate("document.querySelector('[data-switch]').click()")
    _settle(page)
    dark = page.evaluate(colours)
    page.evaluate("document.querySelector('[data-switch]').click()")
    _settle(page)

    assert light[:2] == [palette.ordered(2)[0]] * 2
    assert dark[:2] == [palette.ordered(2, palette.DARK)[0]] * 2
    assert light[2] != dark[2]
    assert page.evaluate(colours) == light
    assert page.messages == []


@pytest.mark.parametrize("width", [1280, 400])
def test_figures_beside_bars_are_not_cut_off(browser: Page, tmp_path: Path, width: int) -> None:
    """Whatever bar is the longest, its figure ends before the chart does, and the chart not much later."""
    plan = two_stage_plan()
    view = view_of(weighing=weighing_of(plan), whatif=whatif_of(plan))

    page = _open(browser, view, tmp_path, width=width)

    free = page.evaluate(
        """(() => {
          const pen = document.createElement('canvas').getContext('2d');
          pen.font = '12px helvetica, sans-serif';
          const free = {};
          for (const plot of [...Bokeh.documents[0].all_models].filter((each) => each.type === 'Figure')) {
            const written = plot.renderers.find(({ glyph }) => glyph.type === 'Text' && glyph.tags.includes('ink'));
            if (!written) continue;
            const { data } = written.data_source;
            const ends = [...data[written.glyph.x.field]].map((right, i) =>
              (right / plot.x_range.end) * plot.inner_width + 5 + pen.measureText(data.text[i]).width);
            free[plot.name] = plot.inner_width - Math.max(...ends);
          }
          return free;
        })()"""
    )
    assert set(free) == {"time_parts", "memory_parts", "whatif", "compared", "alternatives"}
    assert 0 <= min(free.values()) <= max(free.values()) < 60, free
    assert page.messages == []

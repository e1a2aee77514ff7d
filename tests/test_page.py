"""What a page shows of a plan, and the page itself, as far as that can be told without a browser."""

import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from bokeh.models import ColumnDataSource, Span
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import api
from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.degrees import Degrees
from autopar.errors import JobError, PlanError
from autopar.page import FORMATS, look, palette, write_figures, write_page
from autopar.page.bars import gantt, lanes_of, memory_curves, memory_top, row_edges
from autopar.page.charts import alternatives_chart, whatif_chart
from autopar.page.compare import compared, pareto
from autopar.page.document import _first_choice, _stage_table, render
from autopar.page.graph import COLUMNS, arrange, block_graphs
from autopar.page.machine_picture import machine, machine_data
from autopar.page.records import Compared, Lanes
from autopar.page.shares import memory_shares, memory_waterfall, scaling, search_progress, time_shares, time_waterfall
from autopar.page.tiles import tiles
from autopar.plan import Plan, Rival
from autopar.program.records import Category, Program
from autopar.report.parts import from_peak
from autopar.report.whatif import whatif_table
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh
from autopar.simulate import Event, Row, simulate
from autopar.simulate.kineto import read_trace
from autopar.units import format_seconds
from tests.formulations import DIMS
from tests.kineto_traces import kineto
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages, programs
from tests.variants import staged
from tests.views import view_of, weighing_of, whatif_of


@given(program=programs())
def test_every_bar_of_the_trace_is_in_the_timeline(program: Program) -> None:
    """By stage and row; tasks, blocks and ops of the row of compute are three rows here."""
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    shown = gantt(timeline, program.groups)

    wanted: dict[tuple[int, str], float] = defaultdict(float)
    for event in timeline.events:
        row = ("tasks", "blocks", "ops")[event.depth] if event.row is Row.COMPUTE else str(event.row)
        wanted[event.stage, row] += event.seconds
    found: dict[tuple[int, str], float] = defaultdict(float)
    for bars in shown.bars:
        for stage, row, seconds in zip(bars.lane, bars.row, bars.seconds, strict=True):
            if bars.kind != "critical path" and (bars.kind != "update" or shown.rows[row] != "tasks"):
                found[int(stage), shown.rows[row]] += float(seconds)
    assert found == pytest.approx({key: seconds for key, seconds in wanted.items() if seconds}, rel=1e-5)


@given(program=programs())
def test_bars_of_a_lane_are_in_order_and_apart(program: Program) -> None:
    """What the page's script takes for granted, which finds them by bisection."""
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    for bars in gantt(timeline, program.groups).bars:
        lanes = list(zip(bars.lane.tolist(), bars.row.tolist(), bars.start.tolist(), strict=True))
        assert lanes == sorted(lanes)
        ends = bars.start + bars.seconds
        same = (bars.lane[1:] == bars.lane[:-1]) & (bars.row[1:] == bars.row[:-1])
        assert (bars.start[1:][same] >= ends[:-1][same] - 1e-5 * timeline.step_seconds).all()


@given(program=programs())
def test_critical_path_is_as_long_as_the_step(program: Program) -> None:
    """On whatever stages it runs; where steps overlap it is that of the slowest group."""
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    shown = gantt(timeline, program.groups)

    if not SCHEDULES[program.schedule].steps_overlap:
        path = [fsum(bars.seconds) for bars in shown.bars if bars.kind == "critical path"]
        assert sum(path) == pytest.approx(timeline.step_seconds, rel=1e-5)


@given(program=programs())
def test_parts_add_up(program: Program) -> None:
    """To the step, to the peak, and for every stage."""
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    lanes = lanes_of(program.groups)

    for ideal in (0.0, 0.1 * timeline.step_seconds):
        parts = time_waterfall(timeline, [{}] * len(program.stages), lanes, ideal)
        assert parts.total == pytest.approx(timeline.step_seconds)
    assert memory_waterfall(timeline, lanes).total == pytest.approx(timeline.peak_bytes)
    for shares, whole in (
        (time_shares(timeline, [{}] * len(program.stages), lanes), [timeline.step_seconds] * len(timeline.stages)),
        (memory_shares(timeline, lanes), [stage.memory.bytes for stage in timeline.stages]),
    ):
        sums = [fsum(values[i] for values in shares.values) for i in range(len(shares.lanes))]
        assert sums == pytest.approx(whole)


@given(program=programs())
def test_curves_of_memory_have_the_peaks(program: Program) -> None:
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    curves = memory_curves(timeline, lanes_of(program.groups))

    assert [curve.bytes.max() for curve in curves] == [stage.memory.bytes for stage in timeline.stages]
    assert all((curve.start[1:] >= curve.start[:-1]).all() for curve in curves)


def test_limit_is_left_out_where_it_would_hide_the_rest() -> None:
    """A model that needs a hundredth of the device; the page says where the limit is."""
    view = view_of()
    peak = max(float(curve.bytes.max()) for curve in view.memory)

    tight, roomy = (replace(view, plan=_with_limit(view.plan, limit)) for limit in (2 * peak, 100 * peak))

    assert memory_top(view.memory, 2 * peak) > 2 * peak
    assert peak < memory_top(view.memory, 100 * peak) < 2 * peak
    assert "the dashed line is the limit" in render(tight)
    assert "is far above the chart" in render(roomy)


def _with_limit(plan: Plan, limit: float) -> Plan:
    return replace(plan, job=replace(plan.job, memory_limit=limit))


def test_update_is_one_bar_beside_the_tasks() -> None:
    """The trace has it only block by block."""
    timeline = simulate(equal_stages(2, 2, "1f1b", blocks_per_stage=3), ExactCosts(), trace=True)
    events = [event for event in timeline.events if event.name.startswith("update of block")]

    shown = gantt(timeline, (0, 1))

    updates = [bars for bars in shown.bars if bars.kind == "update"]
    assert len(updates) == (1 if any(event.seconds for event in events) else 0)


def test_rows_of_a_stage_fill_it_without_meeting() -> None:
    """From the top; the row of tasks is the highest, and most of the stage where there are many."""
    few, many = (view_of(equal_stages(count, 2, "1f1b")).gantt for count in (2, 20))

    for shown in (few, many):
        tops, bottoms = row_edges(shown)
        assert tops[0] == 0.0
        assert tops[1:] == bottoms[:-1]
        assert bottoms[-1] < 1.0
        assert max(bottom - top for top, bottom in zip(tops, bottoms, strict=True)) == bottoms[0]
    assert row_edges(many)[1][0] > row_edges(few)[1][0]


@st.composite
def _reads(draw: st.DrawFn) -> list[list[int]]:
    count = draw(st.integers(1, 40))
    return [draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else [] for i in range(count)]


@given(sources=_reads())
def test_drawing_puts_everything_below_what_it_reads(sources: list[list[int]]) -> None:
    """And nothing on top of anything else, and no more side by side than can be read."""
    places = arrange(sources)

    assert len(set(places)) == len(places)
    for i, before in enumerate(sources):
        assert all(places[j][1] < places[i][1] for j in before)
    assert max(abs(column) for column, _ in places) <= (COLUMNS - 1) / 2


@pytest.fixture(scope="module")
def plan(cache_dir: Path) -> Plan:
    """Return a training plan for two devices."""
    return autopar.solve("zoo:mlp-xs", gpus=2, dims=DIMS["mlp-xs"], global_batch=8, cache_dir=cache_dir)


def test_blocks_have_all_instructions_of_the_program(plan: Plan, cache_dir: Path) -> None:
    """Once per distinct block and phase, with the collectives."""
    program, costs, _ = api.lower_plan(plan, cache_dir=cache_dir)

    graphs = block_graphs(plan, program, costs, [{}] * len(program.stages))

    wanted = sorted(len(segment.instructions) for segment in program.segments if segment.instructions)
    assert sorted(len(graph.nodes) for graph in graphs) == wanted
    assert {node.over for graph in graphs for node in graph.nodes} - {""} <= {axis.name for axis in plan.mesh}
    for graph in graphs:
        assert all(source < i for i, node in enumerate(graph.nodes) for source in node.reads)
        assert graph.states or graph.block
    whole = {state.value for block in plan.blocks for state in block.states}
    assert {name for graph in graphs for name, _ in graph.states} == whole


def test_time_of_the_busiest_stage_is_that_of_the_plan(plan: Plan, cache_dir: Path) -> None:
    """Page and terminal say the same, part by part."""
    view = look(plan, cache_dir=cache_dir)

    assert plan.simulated is not None, "plans of searches are simulated"
    assert view.time_parts.parts == tuple(from_peak(plan.simulated))
    assert view.time_parts.total == pytest.approx(plan.simulated.step_seconds)


def test_stages_with_their_own_meshes_are_told_apart(cache_dir: Path) -> None:
    """Two devices data parallel, then two tensor parallel: a kind of block that both have is shown once per mesh."""
    plans = [
        autopar.predict("zoo:mlp-xs", degrees, dims=DIMS["mlp-xs"], cache_dir=cache_dir).plan
        for degrees in (Degrees(dp=2, microbatch=2, global_batch=8), Degrees(tp=2, microbatch=4, global_batch=8))
    ]
    plan = staged(plans, "1f1b", (2,))

    view = look(plan, cache_dir=cache_dir)

    assert {graph.axes for graph in view.graphs} == {("dp",), ("tp",)}
    assert len(view.gantt.lanes) == 2
    assert "</html>" in render(view)


def test_copies_to_host_memory_are_a_kind(cache_dir: Path) -> None:
    """Of activations and of the optimizer's states: in rows of their own and among the blocks, none left out."""
    degrees = Degrees(dp=2, microbatch=2, global_batch=8)
    plan = autopar.predict("zoo:mlp-xs", degrees, dims=DIMS["mlp-xs"], cache_dir=cache_dir).plan
    stages = tuple(replace(stage, recompute="offload", offload="optimizer") for stage in plan.stages)

    view = look(replace(plan, stages=stages), cache_dir=cache_dir)

    assert {"copies to the host", "copies from the host"} <= set(view.gantt.rows)
    assert {bars.kind for bars in view.gantt.bars} <= set(palette.MEANINGS)
    assert dict(view.time_parts.parts)["host memory"] > 0
    assert view.time_parts.total == pytest.approx(view.timeline.step_seconds)
    page = render(view)
    assert "Host memory</h3>" in page
    assert "optimizer, activations" in page


def test_tiles_have_the_figures_of_the_plan() -> None:
    """By hand: 32 samples in 1 s are 32 a second; a stage at 96 % of its limit warns, one at half does not."""
    plan = two_stage_plan()
    simulated = plan.simulated
    assert simulated is not None
    full = replace(simulated, error=0.1, stages=(replace(simulated.stages[0], peak=0.96 * plan.job.memory_limit),))

    shown = {tile.name: tile for tile in tiles(replace(plan, simulated=full))}

    assert shown["step time"].value == format_seconds(simulated.step_seconds)
    assert "± 10.0 %" in shown["step time"].detail
    assert shown["MFU"].value == f"{100 * simulated.mfu:.1f} %"
    assert shown["peak memory"].share == pytest.approx(0.96)
    assert shown["peak memory"].warns
    half = replace(simulated, stages=(replace(simulated.stages[0], peak=0.5 * plan.job.memory_limit),))
    assert not {tile.name: tile for tile in tiles(replace(plan, simulated=half))}["peak memory"].warns
    assert plan.search is not None
    assert shown["optimality gap"].value == f"{100 * plan.search.gap:.1f} %"
    assert "price" not in shown


def test_tile_of_the_price_is_that_of_the_hour() -> None:
    """2 an hour and GPU, 8 GPUs, 64 samples in 2 s: 16 an hour are 16 / 3600 * 2 / 64 * 1e6 for a million samples."""
    plan = two_stage_plan()
    assert plan.simulated is not None
    cluster = {**load_cluster("h100").to_dict(), "gpu_hour_price": 2.0}
    simulated = replace(plan.simulated, step_seconds=2.0)
    job = replace(plan.job, gpus=8, global_batch=64, cluster=cluster)

    shown = {
        tile.name: tile
        for tile in tiles(replace(plan, job=job, simulated=simulated, model=replace(plan.model, tokens=0)))
    }

    assert shown["price"].value == f"{16 / 3600 * 2 / 64 * 1e6:.4g} per M samples"
    assert shown["throughput"].value == "32 samples/s"


def test_a_plan_that_was_not_simulated_has_the_time_of_the_formula() -> None:
    plan = _without_search(two_stage_plan())

    assert [(tile.name, tile.value) for tile in tiles(plan)] == [("step time", format_seconds(plan.objective))]


def test_search_without_history_is_its_end() -> None:
    """A plan of an older file."""
    progress = search_progress(two_stage_plan())

    assert progress is not None
    assert (progress.seconds, progress.objective, progress.bound) == ((3.5,), (0.98,), (0.97,))
    assert search_progress(replace(two_stage_plan(), search=None)) is None


def _for_gpus(gpus: int) -> Plan:
    plan = two_stage_plan()
    return replace(plan, job=replace(plan.job, gpus=gpus))


def test_scaling_has_the_plans_by_devices() -> None:
    """Throughput is batch over simulated step; without other plans there is nothing to show."""
    points = scaling(_for_gpus(16), [_for_gpus(32), _for_gpus(8)])

    assert [point.gpus for point in points] == [8, 16, 32]
    assert points[0].throughput == 64.0
    assert scaling(_for_gpus(16), []) == ()


def test_plans_of_different_models_have_no_scaling() -> None:
    """The message names both."""
    other = replace(two_stage_plan(), model=replace(two_stage_plan().model, sha256="11", name="huge"))

    with pytest.raises(PlanError, match=r"huge .* cannot be compared with one of tiny") as caught:
        scaling(two_stage_plan(), [other])

    assert "plans of one model" in caught.value.hint


def test_colours_can_be_seen_on_both_backgrounds() -> None:
    """Contrast of 3 for what is drawn, 4.5 for white letters on nodes (WCAG 2.2, 1.4.11 and 1.4.3)."""
    drawn = [*palette.MEANINGS.values()]
    drawn += [palette.lettered(colour) for colour in palette.MEANINGS.values()]

    assert min(palette.contrast(colour, ground) for colour in drawn for ground in (palette.LIGHT, palette.DARK)) >= 3
    assert min(palette.contrast(palette.lettered(colour), "#ffffff") for colour in palette.MEANINGS.values()) >= 4.5


@pytest.mark.parametrize("ground", [palette.LIGHT, palette.DARK])
def test_stages_and_groups_look_like_no_pass(ground: str) -> None:
    """They are darker than all that has a meaning on a white page, lighter on a dark one, and can be seen on it."""
    shades = [*palette.series(palette.SERIES, ground), *palette.ordered(64, ground)]
    meanings = [*palette.MEANINGS.values(), palette.PLAIN]

    assert len(set(shades[: palette.SERIES])) == palette.SERIES
    assert min(palette.contrast(shade, ground) for shade in shades) >= 3
    assert min(palette.contrast(shade, colour) for shade in shades for colour in meanings) >= 1.5


def test_colours_of_different_meanings_can_be_told_apart() -> None:
    """Their distance in CIELAB is at least 10; 2.3 is the least difference that is noticed."""
    found = sorted(set(palette.MEANINGS.values()))

    assert min(math.dist(_lab(one), _lab(other)) for one, other in combinations(found, 2)) >= 10


def _lab(colour: str) -> tuple[float, float, float]:
    """Return a colour in CIELAB (white point D65)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = palette.luminance(colour)
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    a, b, c = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


def test_collectives_are_told_apart_by_what_their_axis_does() -> None:
    """As in the parts of the step; without a role they are collectives, whatever they are for."""
    events = tuple(
        Event(0, Row.COLLECTIVES, f"all_gather[{axis}] x|S(0)R|forward", float(i), 0.5)
        for i, axis in enumerate(("inner", "outer", "third"))
    )
    timeline = replace(simulate(equal_stages(1, 1, "1f1b"), ExactCosts(), trace=True), events=events)

    with_roles = gantt(timeline, (0,), [{"inner": "tp", "outer": "ep", "third": "idle"}])
    without = gantt(timeline, (0,))

    kinds = {"tp communication", "ep communication", "collectives"}
    assert {bars.kind for bars in with_roles.bars} - {"critical path"} == kinds
    assert {bars.kind for bars in without.bars} - {"critical path"} == {"collectives"}


def test_the_line_of_the_plan_is_not_the_limit() -> None:
    """Among alternatives a dashed line is the plan, in its colour; red is the limit of memory alone."""
    view = view_of(weighing=weighing_of(two_stage_plan()))
    assert view.alternatives is not None

    (line,) = alternatives_chart(view.alternatives).select(Span)

    assert line.line_color == palette.MEANINGS["this plan"]


def test_figures_beside_bars_fit_a_telephone() -> None:
    """Prices of what-if stand in its table: beside a bar they would be cut off."""
    (texts,) = (source.data["text"] for source in whatif_chart(whatif_of(two_stage_plan())).select(ColumnDataSource))

    assert texts == ["65.5 k/s"]


def test_a_plan_alone_is_not_compared() -> None:
    """A page of a plan without others has no ranking of one."""
    alone = render(view_of(plan=_without_search(two_stage_plan())))

    assert '<a href="#plans">' not in alone
    assert "Why this plan</h2>" not in alone
    assert "Why this plan</h2>" in render(view_of())


def test_legend_shows_the_colours_of_stages() -> None:
    """Of several stages, or device groups; one stage has none to tell apart."""
    assert "stages, first to last" in render(view_of())
    assert "device groups, first to last" in render(view_of(equal_stages(4, 4, "interleaved", num_chunks=2)))
    assert "first to last" not in render(view_of(equal_stages(1, 1, "1f1b")))


def _without_search(plan: Plan) -> Plan:
    return replace(plan, search=None, alternatives=(), simulated=None)


PAGES: dict[str, Any] = {
    "pipeline": lambda: view_of(),
    "one stage": lambda: view_of(equal_stages(1, 1, "1f1b")),
    "inference": lambda: view_of(equal_stages(2, 4, "forward-only")),
    "interleaved": lambda: view_of(equal_stages(4, 4, "interleaved", num_chunks=2)),
    "zero bubble": lambda: view_of(equal_stages(4, 4, "zb-v", num_chunks=2)),
    "without search": lambda: view_of(plan=_without_search(two_stage_plan())),
    "scaling": lambda: view_of(others=[_for_gpus(16), _for_gpus(32)]),
    "alternatives": lambda: view_of(weighing=weighing_of(two_stage_plan())),
    "what if": lambda: view_of(whatif=whatif_of(two_stage_plan())),
    "64 stages": lambda: view_of(equal_stages(64, 8, "1f1b", blocks_per_stage=2)),
}
"""Views of all kinds of plans."""


@pytest.mark.parametrize("name", PAGES)
def test_page_needs_nothing_but_itself(name: str) -> None:
    """No address that a browser would load, every section reachable, one main heading."""
    page = render(PAGES[name]())

    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", outside) == []
    assert re.findall(r"<script[^>]*\ssrc=|@import|<link(?! rel=\"icon\" href=\"data:)", outside + page[:2000]) == []
    ids = set(re.findall(r'\bid="([\w-]+)"', outside))
    assert set(re.findall(r'href="#([\w-]+)"', outside)) <= ids
    assert set(re.findall(r'(?:aria-labelledby|\bfor)="([\w-]+)"', outside)) <= ids
    assert len(re.findall(r"<h1>", outside)) == 1
    assert ("Scaling</h2>" in page) == (name == "scaling")
    assert ("Alternatives</h2>" in page) == (name == "alternatives")
    assert ("What if</h2>" in page) == (name == "what if")


def test_alternatives_that_were_looked_at_are_shown() -> None:
    """With what each costs, or why it has no plan; a bar for each that has one."""
    view = view_of(weighing=weighing_of(two_stage_plan()))

    page = render(view)

    assert view.alternatives is not None
    assert [(f"{own.name} {own.own}", own.value) for own in view.alternatives.weighed] == [
        ("pp 2", "4"), ("pp 2", "1"), ("tp 2", "4"),
    ]  # fmt: skip
    for text in (
        "+25.0 %",
        "does not fit: stage 0 needs 99 GB, 27 GB too much",
        "search cut off",
        "not memory: stage 0",
    ):
        assert text in page
    assert alternatives_chart(view.alternatives).renderers[0].data_source.data["step"] == [1.25, 1.25]


def test_cells_without_a_plan_have_a_row_with_the_reason() -> None:
    header, rows = whatif_table(whatif_of(two_stage_plan()))

    assert header[:3] == ("cluster", "GPUs", "step")
    assert [row[0] for row in rows] == ["h100", "a100"]
    assert rows[0][header.index("per M tokens")] == f"{8 * 1.0 * 2.5 / 3600 / 65536 * 1e6:.4g}"
    assert rows[1][-1] == "does not fit: 9 GB"
    assert {len(row) for row in rows} == {len(header)}


def test_host_memory_is_on_the_page_when_a_plan_uses_it() -> None:
    """In words and by stage, and not at all otherwise."""
    assert "Host memory</h3>" not in render(view_of())


def test_stages_and_device_groups_are_told_apart() -> None:
    """Where a device group has several stages, what is known of groups is not called a stage."""
    interleaved = view_of(equal_stages(4, 4, "interleaved", num_chunks=2))
    plain = view_of(equal_stages(4, 4, "1f1b"))

    assert (interleaved.gantt.lanes.word, plain.gantt.lanes.word) == ("device group", "stage")
    assert interleaved.gantt.lanes.titles[1] == "device group 1 (stages 1, 3)"
    assert interleaved.memory[1].lane == "device group 1 (stages 1, 3)"
    assert interleaved.time_parts.title.startswith("Time of device group ")
    header, rows = _stage_table(interleaved)
    assert header[:2] == ("stage", "device group")
    assert [row[:2] for row in rows] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert "<h3>Peak by device group</h3>" in render(interleaved)
    assert "device group" not in render(plain)


def test_a_colour_means_one_thing() -> None:
    """Names share a colour where they are one thing; the legend of the page has each colour once."""
    synonyms = [
        {"forward", "compute", "model FLOPs at peak"}, {"update", "optimizer"}, {"gradients", "dp communication"},
        {"sends", "pp communication"}, {"host copies", "host memory"},
        {"collectives", "other communication"},
    ]  # fmt: skip
    shared: dict[str, set[str]] = defaultdict(set)
    for name, colour in palette.MEANINGS.items():
        shared[colour].add(name)

    assert sorted(sorted(names) for names in shared.values() if len(names) > 1) == sorted(map(sorted, synonyms))
    assert {str(category) for category in Category} <= set(palette.MEANINGS)
    found = palette.legend(palette.MEANINGS)
    assert len({colour for _, colour in found}) == len(found) == len(shared)


def staged_program() -> Program:
    """Return two stages of 4 devices, dp=2 × tp=2 each."""
    program = equal_stages(2, 4, "1f1b")
    mesh = Mesh.of(dp=2, tp=2)
    stages = [replace(stage, devices=(4 * i, 4 * i + 4), mesh=mesh) for i, stage in enumerate(program.stages)]
    return replace(program, stages=tuple(stages))


def test_devices_of_the_machine_have_their_groups() -> None:
    """Two stages of dp=2 × tp=2 in nodes of 8, by hand; a role is chosen only where an axis has several devices."""
    plan, program = two_stage_plan(), staged_program()
    found = machine(plan, program, [{"dp": "dp", "tp": "tp"}] * 2)

    data = machine_data(found, Lanes(program.chunks))

    assert (found.num_devices, found.node_starts) == (8, (0,))
    assert [lane.devices for lane in found.lanes] == [(0, 4), (4, 8)]
    assert found.lanes[0].axes == (("dp", 2, 2), ("tp", 2, 1))
    assert data["choices"] == ["pp", "dp", "tp"]
    twice = machine(replace(plan, job=replace(plan.job, gpus=20)), program, [{}] * 2)
    assert (twice.num_devices, twice.node_starts) == (20, (0, 8, 16))


def test_devices_of_numbered_plans_lie_where_the_machine_has_them() -> None:
    """Two stages of 4 devices inside nodes of 4: a node has 2 devices of either stage."""
    inside = replace(load_cluster("h200-nvl"), host=None).by_group(groups=2, size=4, block=2)
    plan = two_stage_plan()
    plan = replace(plan, job=replace(plan.job, cluster=inside.to_dict()))

    found = machine(plan, staged_program(), [{}] * 2)

    assert found.node_starts == (0, 4)
    assert found.numbers == (0, 1, 4, 5, 2, 3, 6, 7)


def test_experts_share_a_data_parallel_group() -> None:
    """Devices of an expert-parallel group have samples of their own."""
    mesh = Mesh.of(dp=2, ep=2)
    program = staged_program()
    program = replace(program, stages=tuple(replace(stage, mesh=mesh) for stage in program.stages))

    data = machine_data(machine(two_stage_plan(), program, [{}] * 2), Lanes(program.chunks))

    assert data["choices"] == ["pp", "dp", "ep", "expert dp"]
    assert data["groups"] == {"dp": ("dp", "ep"), "ep": ("ep",), "expert dp": ("dp",)}


def test_a_measured_step_lies_beside_the_simulated_one(tmp_path: Path) -> None:
    """A trace of what was simulated: equal seconds by term, and bars of compute from the same moment on."""
    program = equal_stages(2, 4, "1f1b")
    timeline = simulate(program, ExactCosts(latency=0.25), trace=True)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(kineto(timeline, 0, {})))

    view = view_of(program, traces={"trace.json": replace(read_trace(path), rank=0)})

    (found,) = view.measured
    starts = {
        step: min(bar.start for bar in found.bars if (bar.step, bar.kind) == (step, "forward"))
        for step in ("simulated", "measured")
    }
    assert found.lane == "stage 0"
    assert starts["measured"] == pytest.approx(starts["simulated"])
    assert "Measured beside simulated" in render(view)
    assert "forward kernels" in render(view)


def test_plans_for_the_same_job_are_compared() -> None:
    """The plan, its runner-up, grid search and a given plan; one for other devices is not among them."""
    plan = two_stage_plan()
    assert plan.simulated is not None
    rival = Rival("grid search", "dp/tp/pp", "dp=8", 1.2, 40e9, 10, 10, "", 1.0)
    plan = replace(plan, rival=rival)

    found = compared(plan, [replace(plan, alternatives=()), _for_gpus(16)])

    assert [(each.name, each.step) for each in found] == [
        ("this plan", 1.0), ("runner-up", 1.05), ("given plan", 1.0), ("grid search", 1.2),
    ]  # fmt: skip
    assert [each.name for each in compared(replace(plan, simulated=None, alternatives=(), rival=None))] == []


def test_a_ring_is_a_band_below_its_op(cache_dir: Path) -> None:
    """Attention that passes keys and values round is drawn with what a GPU sends; a layer that repeats comes first."""
    degrees = Degrees(cp=2, cp_kind="ring", global_batch=1)
    plan = autopar.predict("zoo:gpt2", degrees, dims=DIMS["gpt2"], cache_dir=cache_dir).plan

    view = look(plan, cache_dir=cache_dir)

    rings = [node for graph in view.graphs for node in graph.nodes if node.ring]
    assert {node.ring for node in rings} == {"cp"}
    assert all(node.passed > 0 and not node.over for node in rings)
    chosen = view.graphs[_first_choice(view)]
    assert chosen.instances > 1
    assert any(node.ring for node in chosen.nodes)


@given(points=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_no_plan_beats_one_of_the_pareto_front(points: list[tuple[int, int]]) -> None:
    """In both step time and memory; whoever is not in the front is beaten, or equalled, by one that is."""
    plans = [Compared("", "", "", float(step), float(peak)) for step, peak in points]

    front = pareto(plans)

    for own in front:
        assert not any(each.step <= own.step and each.peak < own.peak for each in plans)
    for own in plans:
        assert any(each.step <= own.step and each.peak <= own.peak for each in front)


def test_global_shapes_of_a_layer_are_those_of_the_model(plan: Plan, cache_dir: Path) -> None:
    """Parameters of the forward, whole and as a device reads them; whole is local times the axes that split it."""
    program, costs, folded = api.lower_plan(plan, cache_dir=cache_dir)
    graphs = block_graphs(plan, program, costs, [{}] * len(program.stages))
    shapes = {state.value: folded.graph.values[state.value].shape for block in plan.blocks for state in block.states}

    read = [each for graph in graphs for node in graph.nodes for each in node.parameters if each.name in shapes]

    assert {each.name for each in read} == set(shapes)
    assert all(each.whole == shapes[each.name] for each in read)
    assert all(len(each.local) == len(each.whole) for each in read)


def test_page_has_the_commands_that_come_next() -> None:
    """Exports only to frameworks that train where the plan trains."""
    page = render(view_of())

    assert "autopar export plan.json --to torchtitan" in page
    inference = replace(two_stage_plan(), job=replace(two_stage_plan().job, mode="infer"))
    assert "torchtitan" not in render(view_of(plan=inference))
    assert "autopar export plan.json --to pytorch" in render(view_of(plan=inference))


def test_page_of_what_if_begins_with_its_comparison() -> None:
    page = render(view_of(whatif=whatif_of(two_stage_plan())))

    assert page.index("What if</h2>") < page.index("The plan</h2>")
    assert "Throughput of the best plans" in page


def test_names_cannot_break_out_of_the_page() -> None:
    """Ops and models are called what their makers like."""
    name = "</script><script>alert(1)</script>"
    plan = replace(two_stage_plan(), model=replace(two_stage_plan().model, name=name), summary=name)
    view = view_of(plan=plan)
    nodes = tuple(replace(node, name=name) for node in view.graphs[0].nodes)

    page = render(
        replace(view, graphs=(replace(view.graphs[0], nodes=nodes),), gantt=replace(view.gantt, names=(name,) * 99))
    )

    assert "<script>alert" not in page
    blocks = re.search(r'<script type="application/json" id="blocks">(.*?)</script>', page, re.DOTALL)
    assert blocks is not None
    assert json.loads(blocks[1])["graphs"][0]["nodes"][0]["name"] == name


def test_page_of_a_solved_plan_is_written_whole(plan: Plan, cache_dir: Path, tmp_path: Path) -> None:
    """All of its ops are in it."""
    view = look(plan, cache_dir=cache_dir)

    write_page(view, tmp_path / "new" / "report.html")

    page = (tmp_path / "new" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert plan.summary.replace("'", "&#39;") in page
    assert all(op.op in page for block in plan.blocks for op in block.ops)


def test_commands_write_page_and_figures(
    plan: Plan, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the plan itself as another one, scaling is shown."""
    pytest.importorskip("matplotlib", reason="figures need the extra `figures`")
    path = str(tmp_path / "plan.json")
    plan.save(path)
    options = ["--cache-dir", str(cache_dir), "--with", path]

    codes = (
        main(["report", path, "-o", str(tmp_path / "page.html"), *options]),
        main(["figures", path, "-o", str(tmp_path / "figures"), "--format", "svg", *options]),
    )

    assert codes == (0, 0)
    assert "Scaling</h2>" in (tmp_path / "page.html").read_text()
    assert {"timeline.svg", "scaling.svg"} <= {file.name for file in (tmp_path / "figures").iterdir()}
    assert f"wrote {tmp_path / 'page.html'}" in capsys.readouterr().err


def test_command_refuses_a_plan_of_another_model(
    plan: Plan, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page, other = (tmp_path / name for name in ("plan.json", "page.html", "other.json"))
    plan.save(path)
    two_stage_plan().save(other)

    code = main(["report", str(path), "-o", str(page), "--with", str(other), "--cache-dir", str(cache_dir)])

    assert code == 2
    assert "cannot be compared" in capsys.readouterr().err
    assert not page.exists()


_BEGINS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_drawn_of_every_plan(name: str, tmp_path: Path) -> None:
    """In every format."""
    pytest.importorskip("matplotlib", reason="figures need the extra `figures`")
    formats = FORMATS if name == "pipeline" else ("svg",)

    paths = write_figures(PAGES[name](), tmp_path, formats)

    assert {path.suffix for path in paths} == {f".{kind}" for kind in formats}
    assert all(path.read_bytes().startswith(_BEGINS[path.suffix[1:]]) for path in paths)
    names = {path.stem for path in paths}
    assert {"timeline", "memory", "time_waterfall", "memory_waterfall"} <= names
    assert ("scaling" in names) == (name == "scaling")
    assert ("time_by_stage" in names) == (name != "one stage")


def test_figures_of_a_plan_are_the_same_every_time(tmp_path: Path) -> None:
    """Papers are kept under version control."""
    pytest.importorskip("matplotlib", reason="figures need the extra `figures`")

    one, other = (write_figures(view_of(), tmp_path / folder, FORMATS) for folder in ("one", "other"))

    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_figures_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(JobError, match="not installed") as caught:
        write_figures(view_of(), tmp_path)

    assert caught.value.hint == 'pip install "autopar[figures]"'


def test_figures_of_an_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="'gif'") as caught:
        write_figures(view_of(), tmp_path, ["gif"])

    assert "png, svg, pdf" in caught.value.hint

"""The step time formula compared with the simulator, where gradient reductions and parameter gathers share links."""

from dataclasses import replace
from functools import cache
from math import fsum
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from autopar.cluster import Tuning
from autopar.cluster.presets import PRESETS
from autopar.configuration import Configuration
from autopar.cost import CostModel, Overlap, Stack
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.link_seconds import backward_links, gradient_links, reduce_links
from autopar.formulate.mean_memory import mean_bytes
from autopar.formulate.scheduled_step import scheduled_step, stage_works
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Slot, Tables
from autopar.program.lower import lower
from autopar.program.records import Collective, SegmentPhase
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.simulate.hops import hops
from autopar.simulate.layout import lay_out
from autopar.task import rules_for
from autopar.workload import open_workload
from tests.executions import written
from tests.formulations import optimum, rules

H100 = PRESETS["h100"]
COSTS = CostModel(replace(H100, devices_per_node=2, inter=replace(H100.inter, nics=None)))
"""Nodes of two devices: the outer axis of two crosses nodes, the inner one does not."""

CLOSE = 0.04
"""Relative tolerance. The formula ignores a partly filled last bucket, which matters in a model of four layers, and
gradients that are ready before the backward of their block ends.
"""

SHARDING = 1e-10
"""Price in seconds per byte at which the solver shards parameters."""

WIDE = {"num_layers": 4, "hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192}
"""As many layers as the tiny model whose rules are used, and wide enough for several buckets per block."""

SAMPLES = 64
ONCE = Stack("once", dispatch="per-node")


@cache
def _tables(outer: int) -> Tables:
    folded = open_workload("zoo:gpt2", dims=WIDE).folded(SAMPLES)
    return build_tables(folded, rules("gpt2"), Mesh.of(outer=outer, inner=2), COSTS)


def _ranges(num_blocks: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return stages with equal numbers of blocks."""
    size = num_blocks // num_stages
    return tuple((start, start + size) for start in range(0, num_blocks, size))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("price", [0.0, SHARDING])
@pytest.mark.parametrize(("num_stages", "outer", "num_microbatches"), [(1, 8, 1), (1, 8, 4), (2, 4, 8)])
def test_the_step_time_formula_agrees_with_the_simulator(
    num_stages: int, outer: int, num_microbatches: int, price: float, recompute: Recompute
) -> None:
    """The formula and the simulator agree within `CLOSE` on the best choice of a linear objective.

    With a price on bytes the choice shards parameters. They are gathered over the link that reduces their gradients,
    which is then busier than the kernels.
    """
    tables = _tables(outer)
    configuration = Configuration(num_stages, Mesh.of(outer=outer, inner=2), num_microbatches, "1f1b")
    pipeline = Pipeline(num_stages, num_microbatches, "1f1b")
    weighting = weights(tables, pipeline, recompute=recompute, hidden=0.3, bounding=False, traffic=None)
    kinds = [recompute] * len(tables.folded.kinds)
    mean = mean_bytes(tables, pipeline, COSTS.cluster.device.memory, kinds)
    _, choice = optimum(mean.priced(problem(tables, weighting), tables, price))
    ranges = _ranges(tables.folded.num_blocks, num_stages)
    split = Split.uniform(ranges, (recompute,) * num_stages)

    nothing = StepTime(0.0, 0.0, 0.0, np.zeros(num_stages))
    candidate = Candidate(configuration, tables, choice, split, nothing)
    program = lower(written(candidate, SAMPLES * num_microbatches, True), tables.folded, COSTS)
    directions = [direction.seconds for hop in hops(program, COSTS) for direction in (hop.forward, hop.backward)]
    hop = fmean(directions) if directions else 0.0

    time = step_time(tables.block_seconds(choice), tables.folded.chain, pipeline, split, hop)

    assert time.seconds == pytest.approx(simulate(program, COSTS).step_seconds, rel=CLOSE)


@pytest.mark.parametrize("splits", [False, True])
def test_the_formula_agrees_where_collectives_run_in_chunks_beside_products(splits: bool) -> None:
    """A microbatch of one sample leaves the sequence and the products to the axis, whose collectives hide.

    All-reduces are slow here, so that gathers and reduce-scatters take their place.
    """
    intra = replace(H100.intra, tunings=(Tuning("all_reduce", 2, 1e9, 1e-4),))
    cluster = replace(COSTS.cluster, intra=intra)
    folded, mesh = open_workload("zoo:gpt2", dims=WIDE | {"seq": 256}).folded(1), Mesh.of(inner=2)
    num_stages, schedule = (2, "zb-h1") if splits else (1, "1f1b")
    configuration = Configuration(num_stages, mesh, 4, schedule)
    split = Split.uniform(_ranges(folded.num_blocks, num_stages), (Recompute.NONE,) * num_stages)
    nothing = StepTime(0.0, 0.0, 0.0, np.zeros(num_stages))
    hiding = Stack("chunked", hides_tp=True)
    tables = build_tables(folded, rules("gpt2"), mesh, CostModel(cluster, stack=hiding))
    pipeline = Pipeline(num_stages, 4, schedule, Overlap.of(hiding))
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.3, bounding=False, traffic=None)
    mean = mean_bytes(tables, pipeline, cluster.device.memory, [Recompute.NONE] * len(folded.kinds))
    _, choice = optimum(mean.priced(problem(tables, weighting), tables, SHARDING))
    simulated = {}
    for stack in (Stack("whole"), hiding):
        costs = CostModel(cluster, stack=stack)
        tables = build_tables(folded, rules("gpt2"), mesh, costs)
        program = lower(written(Candidate(configuration, tables, choice, split, nothing), 4, True), folded, costs)
        simulated[stack.name] = simulate(program, costs).step_seconds

        layer = tables.block_seconds(choice)[folded.chain[1]]
        if splits:
            predicted = scheduled_step(schedule, 2, 4, stage_works(tables, choice, split, splits=True))
        else:
            predicted = step_time(tables.block_seconds(choice), folded.chain, pipeline, split, 0.0).seconds

        assert (min(layer[Slot.FORWARD_CHUNKED], layer[Slot.BACKWARD_CHUNKED]) > 0) == stack.hides_tp
        assert predicted == pytest.approx(simulated[stack.name], rel=CLOSE)
    assert simulated["chunked"] < 0.97 * simulated["whole"]


def test_gathers_and_reductions_of_these_plans_share_links() -> None:
    """Sharded parameters are gathered between nodes in the backward, while gradients are reduced between nodes."""
    tables = _tables(8)
    weighting = weights(
        tables, Pipeline(1, 1, "1f1b"), recompute=Recompute.NONE, hidden=0.3, bounding=False, traffic=None
    )
    mean = mean_bytes(tables, Pipeline(1, 1, "1f1b"), 1e12, [Recompute.NONE] * len(tables.folded.kinds))

    found = [optimum(mean.priced(problem(tables, weighting), tables, price))[1] for price in (0.0, SHARDING)]

    for choice, gathered in zip(found, (False, True), strict=True):
        layer = tables.block_seconds(choice)[tables.folded.chain[1]]
        assert reduce_links(layer)[1] + gradient_links(layer)[1] > 0
        assert (backward_links(layer)[1] > 0.1 * layer[Slot.BACKWARD]) == gathered


EXPERTS = {
    "num_layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "head": 64, "seq": 512, "vocab": 8192,
    "experts": 16, "top_k": 4, "expert_ffn": 512,
}  # fmt: skip
"""Experts whose tokens cost less to move than their weights to reduce, if a token is sent once."""
SHARED = EXPERTS | {"dense_layers": 1}
CLIPPED = {**{name: size for name, size in EXPERTS.items() if name != "expert_ffn"}, "ffn": 512}


@pytest.mark.parametrize(
    ("stack", "model", "dims"),
    [
        (ONCE, "qwen3-30b-a3b", EXPERTS),
        (replace(ONCE, hides_dispatch=True), "qwen3-30b-a3b", EXPERTS),
        (replace(ONCE, experts="each"), "qwen3-30b-a3b", EXPERTS),
        pytest.param(replace(ONCE, overlaps_shared=True), "glm-4.5-air", SHARED, marks=pytest.mark.slow),
        pytest.param(
            replace(ONCE, overlaps_shared=True, hides_dispatch=True), "glm-4.5-air", SHARED, marks=pytest.mark.slow
        ),
        pytest.param(replace(ONCE, experts="each"), "gpt-oss-20b", CLIPPED, marks=pytest.mark.slow),
    ],
    ids=["waited for", "hidden", "a kernel per expert", "beside shared experts", "hidden once", "clipped and biased"],
)
def test_the_formula_agrees_where_tokens_travel_to_experts(
    stack: Stack, model: str, dims: dict[str, int], cache_dir: Path
) -> None:
    """In line with compute, or beside it."""
    workload = open_workload(f"zoo:{model}", dims=dims)
    folded, mesh, costs = workload.folded(SAMPLES), Mesh.of(inner=2), replace(COSTS, stack=stack)
    tables = build_tables(folded, rules_for(folded, workload.rules(cache_dir=cache_dir)), mesh, costs)
    pipeline, split = Pipeline(1, 1, "1f1b"), Split.uniform(((0, folded.num_blocks),), (Recompute.NONE,))
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.3, bounding=False, traffic=None)
    _, choice = optimum(problem(tables, weighting))
    nothing = StepTime(0.0, 0.0, 0.0, np.zeros(1))
    candidate = Candidate(Configuration(1, mesh, 1, "1f1b"), tables, choice, split, nothing)
    program = lower(written(candidate, SAMPLES, True), folded, costs)

    time = step_time(tables.block_seconds(choice), folded.chain, pipeline, split, 0.0)

    moves = [step for segment in program.segments for step in segment.instructions if isinstance(step, Collective)]
    assert {step.kind for step in moves if step.routed is not None and step.routed.parts} == {CollectiveKind.ALL_TO_ALL}
    assert time.seconds == pytest.approx(simulate(program, costs).step_seconds, rel=CLOSE)


def test_a_layer_gathers_as_long_in_the_formula_as_in_the_simulator() -> None:
    """Where all of its parameters are sharded alike, the shares of the latency add up to that of one gather."""
    tables = _tables(8)
    folded, pipeline = tables.folded, Pipeline(1, 1, "1f1b")
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.3, bounding=False, traffic=None)
    mean = mean_bytes(tables, pipeline, 1e12, [Recompute.NONE] * len(folded.kinds))
    _, choice = optimum(mean.priced(problem(tables, weighting), tables, 100 * SHARDING))
    configuration = Configuration(1, Mesh.of(outer=8, inner=2), 1, "1f1b")
    split = Split.uniform(_ranges(folded.num_blocks, 1), (Recompute.NONE,))
    candidate = Candidate(configuration, tables, choice, split, StepTime(0.0, 0.0, 0.0, np.zeros(1)))
    program, kind = lower(written(candidate, SAMPLES, True), folded, COSTS), folded.chain[1]

    layer, table = tables.block_seconds(choice)[kind], program.table()

    for phase, slot in (
        (SegmentPhase.FORWARD, Slot.FORWARD_GATHER),
        (SegmentPhase.BACKWARD, Slot.BACKWARD_GATHER),
    ):
        layout = lay_out(table[kind, phase], COSTS)
        members = [own for own in table[kind, phase].instructions if isinstance(own, Collective) and own.unit]
        alone = fsum(COSTS.collective_seconds(own.kind, own.bytes, own.axis) for own in members)
        assert layer[slot] == pytest.approx(layout.gather_seconds, rel=CLOSE)
        assert alone > 1.5 * layout.gather_seconds

"""Memory bound: bytes that any placement holds, mixtures of flavours, and no plan below the bound."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.bounds.block_lp import block_program
from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.cut_lp import Component
from autopar.bounds.memory_bound import MemoryBounds, _fractional_knapsack
from autopar.bounds.microbatch import UNKNOWN
from autopar.bounds.saved_values import deferred_values, main_kind, most_shards, resident_states, saved_by_main
from autopar.bounds.transfer import TransferBounds
from autopar.configuration import Configuration
from autopar.describe.block_decisions import assemble_blocks
from autopar.formulate.block_memory import KEPT, RESIDENT
from autopar.formulate.constraints import Constraints
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Memory, Tables
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.request import JobRequest
from autopar.search.context import SearchContext
from autopar.search.node_solver import open_node
from autopar.sharding import Mesh
from autopar.simulate.ranges import chain_bytes
from autopar.task import Effort, prepare
from tests.formulations import COSTS, folded, optimum, random_choice, rules, workload
from tests.shares import one_in

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each."""

MESHES = (Mesh.of(inner=4), Mesh.of(outer=2, inner=2), Mesh.of(outer=3, inner=2), Mesh.of(dp=2, outer=2, inner=2))


def _tables(name: str, mesh: Mesh) -> Tables:
    """Return the decisions of a tiny model on a mesh, the major one of three axes data parallel."""
    found = Constraints(batch=workload(name, "train").batch_dims_of).tables(folded(name), rules(name), mesh, COSTS)
    assert found is not None
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "mlp-xs"])
def test_no_placement_keeps_less_than_the_bound(name: str, mesh: Mesh) -> None:
    """Of a block of the most frequent kind, for each purpose; on free axes some placements keep all of it."""
    own = folded(name)
    tables = _tables(name, mesh)
    found, main = saved_by_main(own, COSTS), main_kind(own).id
    for memory in {memory for memories in KEPT.values() for memory in memories}:
        least = sum(
            item.bytes / (mesh.size if item.shape is None else most_shards(item.shape, mesh.shape))
            for item in found
            if item.memory is memory
        )
        items = [item for item in tables.bytes if item.kind == main and item.memory is memory]

        assert least <= sum(float(item.amounts.min()) for item in items) * (1 + 1e-9)
        whole = sum(item.bytes for item in found if item.memory is memory)
        if len(mesh.axes) < 3:
            assert whole == pytest.approx(sum(float(item.amounts.max()) for item in items))
    assert any(item.memory in KEPT[Recompute.SELECTIVE] for item in found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "mlp-xs"])
def test_no_placement_defers_less_than_the_bound(name: str, mesh: Mesh) -> None:
    """Bytes that a lowered block of the most frequent kind retains until its weight pass, with its neighbours."""
    own = folded(name)
    tables = _tables(name, mesh)
    least = sum(memory.least(mesh.shape) for memory in deferred_values(own, COSTS))
    assert least > 0
    block = main_kind(own).instances[-1]
    instance = problem(
        tables, weights(tables, Pipeline(1, 1, "1f1b"), recompute=Recompute.NONE, hidden=0.0, bounding=True)
    )
    rng, ratios = np.random.default_rng(0), []
    _, choice = optimum(instance)
    for _ in range(6):
        lowered = lower_blocks(assemble_blocks(tables, choice), own, tables.resharder, splits=True)
        memory = chain_bytes(lowered, own, trains=True)
        before, _ = memory.deferred_bytes(max(0, block - 2), block) if block else (0.0, 0.0)
        late, _ = memory.deferred_bytes(max(0, block - 2), block + 1)
        ratios.append((late - before) / least)
        choice = random_choice(instance, rng, near=choice)
    assert min(ratios) >= 1 - 1e-9


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b"])
def test_the_bound_on_deferred_bytes_is_close(name: str) -> None:
    """On one device, where placements do not matter."""
    own, mesh = folded(name), Mesh.of(inner=1)
    tables = Constraints().tables(own, rules(name), mesh, COSTS)
    assert tables is not None
    instance = problem(
        tables, weights(tables, Pipeline(1, 1, "1f1b"), recompute=Recompute.NONE, hidden=0.0, bounding=True)
    )
    _, choice = optimum(instance)
    lowered = lower_blocks(assemble_blocks(tables, choice), own, tables.resharder, splits=True)
    first, *_, last = main_kind(own).instances
    late, _ = chain_bytes(lowered, own, trains=True).deferred_bytes(first, last + 1)
    said = sum(memory.least(mesh.shape) for memory in deferred_values(own, COSTS))
    assert 0.75 * late <= said * (last + 1 - first) <= late * (1 + 1e-9)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "mlp-xs"])
def test_no_placement_has_fewer_resident_bytes_than_the_bound(name: str, mesh: Mesh) -> None:
    """Of a block of the most frequent kind, with and without moments; all of it on free axes."""
    own = folded(name)
    tables = _tables(name, mesh)
    for offload in (False, True):
        memories = [memory for memory in RESIDENT if not offload or memory is not Memory.OPTIMIZER]
        items = [item for item in tables.bytes if item.kind == main_kind(own).id and item.memory in memories]
        said = resident_states(own, COSTS, offload=offload)
        assert (
            0
            < sum(memory.least(mesh.shape) for memory in said)
            <= sum(float(item.amounts.min()) for item in items) * (1 + 1e-9)
        )
        if len(mesh.axes) < 3:
            whole = sum(memory.bytes for memory in said)
            assert whole == pytest.approx(sum(float(item.amounts.max()) for item in items))


def test_the_fractional_knapsack_by_enumeration() -> None:
    """Of any flavours, also if a slower one keeps more; in steps of a tenth of the blocks."""
    rng = np.random.default_rng(0)
    shares = [(a / 10, b / 10, 1 - (a + b) / 10) for a in range(11) for b in range(11 - a)]
    for _ in range(50):
        blocks = [(float(rng.uniform(0, 10)), float(rng.uniform(0, 3))) for _ in range(3)]
        room = float(rng.uniform(0, 12))

        least = _fractional_knapsack(room, blocks)

        seconds = [
            sum(share * block[1] for share, block in zip(own, blocks, strict=True))
            for own in shares
            if sum(share * block[0] for share, block in zip(own, blocks, strict=True)) <= room
        ]
        assert least <= min(seconds, default=np.inf) + 1e-12
        assert least >= min(seconds, default=np.inf) - 0.4  # a tenth of two blocks that differ most


def _search(limit: float = np.inf, gpus: int = 8) -> SearchContext:
    dims = {"num_layers": 6, "hidden": 1024, "heads": 8, "seq": 1024, "vocab": 512}
    task = prepare(JobRequest("zoo:gpt2", gpus=gpus, cluster="h100", global_batch=64, dims=dims))
    return replace(task.context(Effort()), memory_limit=limit)


def _memory_bounds(search: SearchContext) -> MemoryBounds:
    return MemoryBounds(
        search.folded, search.roofline, search.costs, search.constraints, search.memory_limit, search.global_batch
    )


CONFIGURATIONS = [
    Configuration(1, Mesh.of(outer=4, inner=2), 1, "1f1b"),
    Configuration(1, Mesh.of(dp=2, outer=2, inner=2), 2, "1f1b"),
    Configuration(2, Mesh.of(outer=2, inner=2), 4, "1f1b"),
    Configuration(2, Mesh.of(outer=2, inner=2), 4, "zb-h1"),
    Configuration(2, Mesh.of(outer=2, inner=2), 4, "zb-v", num_chunks=2),
    Configuration(2, Mesh.of(outer=2, inner=2), 4, "interleaved", num_chunks=2),
    Configuration(4, Mesh.of(inner=2), 8, "1f1b"),
    Configuration(4, Mesh.of(inner=2), 8, "zb-h1"),
    Configuration(2, Mesh.of(dp=2, outer=2, inner=4), 8, "1f1b"),
    Configuration(2, Mesh.of(dp=2, outer=2, inner=4), 8, "zb-h1"),
    Configuration(2, Mesh.of(dp=2, outer=2, inner=4), 8, "interleaved", num_chunks=2),
]


@pytest.mark.parametrize("configuration", one_in(4, CONFIGURATIONS), ids=str)
def test_no_plan_that_fits_is_faster_than_what_has_to_run_again(configuration: Configuration) -> None:
    """Under limits from where all fits to where nothing does, of good and of random choices in their best split."""
    search = _search(gpus=configuration.num_stages * configuration.mesh.size)
    free = open_node(search, (configuration,), np.inf)
    assert free is not None
    free.relax(np.inf)
    assert free.best is not None
    weighting = weights(free.tables, free.pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
    instance, rng = problem(free.tables, weighting), np.random.default_rng(0)
    choices = [free.best.choice]
    for _ in range(8):
        choices.append(random_choice(instance, rng, near=choices[-1]))
    peak = free.finder.costs.peak(free.best.choice, free.best.split)
    without = TransferBounds(search.folded, search.roofline, search.costs.stack, search.global_batch)
    before, raised, found = without.least((configuration,)), 0, 0
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.6, 0.5, 0.45, 0.4, 0.35, 0.2, 0.01):
        limited = replace(search, memory_limit=peak * share)
        room = _memory_bounds(limited)
        transfer_bounds = TransferBounds(search.folded, search.roofline, search.costs.stack, search.global_batch, room)
        least = transfer_bounds.least((configuration,))
        assert least >= before
        raised += before < least < np.inf
        before = least
        node = open_node(limited, (configuration,), np.inf)
        assert node is not None
        node.consider(choices)
        if node.best is not None:
            again = any(flavour is not Recompute.NONE for own in node.best.split.recompute for flavour in own)
            found += again
            assert again or not room.recompute_seconds(configuration)
            assert least <= node.best.objective * (1 + CLOSE)

    assert raised or len(configuration.mesh.axes) == 3, "recompute is little there beside parameters"
    assert found or configuration.schedule != "1f1b", "less fits where others have to wait"
    assert before == np.inf, "parameters alone do not fit"


def test_the_ladder_stops_between_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rung may be a linear program of a second: the clock is asked after each rung, and bounds stay valid."""
    search = _search(1e9)
    family = tuple(own for own in CONFIGURATIONS if own.schedule == "zb-h1" and own.mesh.size == 4)
    steps = list[str]()

    def told(name: str, own: Callable[..., float]) -> Callable[..., float]:
        def step(*given: object) -> float:
            steps.append(name)
            return own(*given)

        return step

    for name in ("step_that_fits", "recompute_seconds", "scheduled_step_that_fits"):
        monkeypatch.setattr(MemoryBounds, name, told(name, getattr(MemoryBounds, name)))

    def raised(most: float) -> float:
        waiting = [(0.0, 0)]
        steps.clear()
        known = (search.folded, search.roofline, search.costs.stack, search.global_batch, _memory_bounds(search))
        TransferBounds(*known, lambda: len(steps) >= most).raise_least(waiting, [family], np.inf, lambda number: False)
        return waiting[0][0]

    full = raised(np.inf)
    assert {*steps} == {"step_that_fits", "recompute_seconds", "scheduled_step_that_fits"}
    for most in range(len(steps)):
        assert raised(most) <= full
        assert len(steps) == most
    assert raised(2) < full


def test_nothing_is_recomputed_with_room_or_with_offload() -> None:
    """Without limits, with enough memory, and where activations may be offloaded; forbidden flavours count."""
    configuration = CONFIGURATIONS[0]
    short = _search(1e9)
    assert _memory_bounds(short).recompute_seconds(configuration) > 0
    assert _memory_bounds(_search()).recompute_seconds(configuration) == 0
    assert _memory_bounds(_search(80e9)).recompute_seconds(configuration) == 0

    hosted = replace(short, constraints=replace(short.constraints, hosted=frozenset({Hosted.ACTIVATIONS})))
    only_full = frozenset({Recompute.FULL})
    forced = replace(short, memory_limit=80e9, constraints=replace(short.constraints, keeps=(only_full,) * 8))

    assert _memory_bounds(hosted).recompute_seconds(configuration) == 0
    assert (
        _memory_bounds(forced).recompute_seconds(configuration)
        > _memory_bounds(short).recompute_seconds(configuration)
        > 0
    )


def test_nothing_fits_if_buffers_take_all_memory() -> None:
    """Nor if they take more."""
    for limit in (0.0, -1e9):
        assert _memory_bounds(_search(limit)).step_that_fits(CONFIGURATIONS[2], UNKNOWN) == np.inf


@pytest.mark.parametrize("samples", [4, 16])
def test_fewer_resident_bytes_cost_link_seconds_in_every_microbatch(samples: int) -> None:
    """Where data parallelism leaves nodes: sharded parameters are gathered, and gradients reduced."""
    search = _search(80e9, gpus=32)
    configuration = Configuration(2, Mesh.of(dp=2, outer=2, inner=4), 64 // samples, "zb-h1")
    tables = search.tables((configuration,))
    assert tables is not None
    pipeline, folded_ = configuration.pipeline(search.costs.stack), tables.folded
    program = block_program(tables, pipeline, 80e9, ON_DEVICE, (Recompute.NONE,) * len(folded_.kinds))
    column_generation = ColumnGeneration(tables, program.rows)
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
    instance, rng = problem(tables, weighting), np.random.default_rng(1)
    _, choice = optimum(instance)
    for _ in range(60):
        column_generation.add(choice)
        choice = random_choice(instance, rng, near=choice)
    points = program.points(column_generation.columns)
    own = sum(
        memory.least(configuration.mesh.shape) for memory in resident_states(folded_, search.costs, offload=False)
    )

    whole, ways = _memory_bounds(search)._resident_options(configuration, own)

    assert len(ways) == 3, "parameters, sums of gradients, or both"
    assert all(0 < held < whole and link > 0 for held, link in ways)
    assert min(held for held, _ in ways) == pytest.approx(own)
    held, link = points[:, Component.RESIDENT] * 80e9, points[:, Component.LINK]
    assert link.min() < 0.5 * link.max(), "random choices have little and much"
    for price in np.geomspace(1e6, 1e16, 40):  # bytes that a second is worth
        said = min(resident + price * seconds for resident, seconds in ((whole, 0.0), *ways))
        assert said <= (held + price * link).min() * (1 + 1e-9)
    near = _memory_bounds(search)._resident_options(
        Configuration(4, Mesh.of(dp=2, outer=2, inner=2), 64 // samples, "zb-h1"), own
    )
    assert near == (own, ()), "within a node no link between nodes has it"

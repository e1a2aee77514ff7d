"""Submesh bounds: tables and microbatch bounds of the free axes, and what follows for meshes of three axes."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from autopar.bounds.microbatch import UNKNOWN
from autopar.bounds.roofline import scales
from autopar.bounds.saved_values import main_kind
from autopar.bounds.submesh_tables import inner_mesh, placements, tables_of_passes
from autopar.bounds.transfer import MEMORY_RUNGS, TransferBounds
from autopar.configuration import Configuration, Family, families
from autopar.cost import Overlap
from autopar.folding.graph_facts import element_bytes
from autopar.formulate.constraints import Constraints
from autopar.formulate.data_major import DataMajor, is_data_major
from autopar.formulate.linear_weights import kind_weights, problem, weights
from autopar.formulate.op_strategies import IntArray
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Decision, Node, Tables
from autopar.ir.graph import Phase, Role
from autopar.recompute import Recompute
from autopar.request import JobRequest
from autopar.search.context import SearchContext
from autopar.search.node_solver import open_node
from autopar.search.tasks import Finding, SearchTask, TaskKind
from autopar.search.workbench import Workbench
from autopar.sharding import Mesh
from autopar.task import Effort, Task, prepare
from tests.formulations import COSTS, folded, optimum, rules, workload
from tests.test_bounds_transfer import _random_plans

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each."""

SIZES = [(8, (2, 2, 2)), (4, (2, 2, 2)), (2, (2, 2, 2)), (8, (4, 2, 2)), (8, (2, 3, 2))]
"""Samples and mesh: with few samples a batch that dp has split cannot be split over both free axes as well."""


@cache
def _whole(name: str, samples: int, shape: tuple[int, ...], mode: str = "train") -> Tables:
    """Tables of a mesh of three axes."""
    mesh = Mesh.of(**dict(zip(("dp", "outer", "inner"), shape, strict=True)))
    found = Constraints(batch=workload(name, mode).batch_dims_of).tables(
        folded(name, mode, samples), rules(name, mode), mesh, COSTS
    )
    assert found is not None
    return found


@cache
def _restricted(name: str, samples: int, shape: tuple[int, ...], mode: str = "train") -> Tables:
    """Tables of its free axes, restricted to the terms that are valid for every dp."""
    dp, outer, inner = shape
    own = folded(name, mode, samples // dp)
    found = Constraints().tables(own, rules(name, mode), Mesh.of(outer=outer, inner=inner), COSTS)
    assert found is not None
    return tables_of_passes(found, DataMajor.of(own, workload(name, mode).batch_dims_of(own), None))


def _minor(numbers: IntArray, rank: int) -> IntArray:
    """Return placement numbers on the free axes."""
    return numbers % (rank + 2) ** 2


def _places(tables: Tables, node: Node, *, minor: bool) -> list[tuple[int, ...]]:
    """Return for each strategy of a node what it does on the free axes."""
    values = tables.folded.graph.values
    if node.options is None:
        assert node.value is not None
        placed = [(len(node.value.shape), node.outputs(0))]
    else:
        op = tables.folded.kinds[node.kind].ops[node.position]
        names, numbers = (*op.inputs, *op.outputs), (*node.options.inputs, *node.options.outputs)
        placed = [(len(values[n].shape), own) for n, own in zip(names, numbers, strict=True) if own is not None]
    columns = [_minor(own, rank) if minor else own for rank, own in placed]
    return list(zip(*(column.tolist() for column in columns), strict=True)) if columns else [()] * node.count


@pytest.mark.parametrize(("samples", "shape"), SIZES, ids=str)
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpt2", "train"), ("llama3-8b", "train"), ("mixtral-8x7b", "train"), ("mlp-xs", "train"), ("gpt2", "infer")],
)
def test_no_strategy_of_three_axes_costs_less_than_on_the_free_axes(
    name: str, mode: str, samples: int, shape: tuple[int, ...]
) -> None:
    """For every strategy and pair, hence for every choice."""
    if not scales(folded(name, mode, samples // shape[0]), folded(name, mode, samples), (samples // shape[0], samples)):
        assert samples == shape[0], "one sample may be imported otherwise"
        return
    three, two = _whole(name, samples, shape, mode), _restricted(name, samples, shape, mode)
    priced = {(edge.first, edge.second, edge.consumer, edge.slot, edge.kind): edge for edge in two.edges}
    used = {number for edge in two.edges for number in (edge.first, edge.second)}
    onto: dict[int, IntArray] = {}
    for number, (whole, own) in enumerate(zip(three.nodes, two.nodes, strict=True)):
        assert (whole.name, whole.slot, whole.share) == (own.name, own.slot, own.share)
        if number not in used and not own.seconds.any():
            continue  # left out
        known = {place: index for index, place in enumerate(_places(two, own, minor=False))}
        onto[number] = np.array([known[place] for place in _places(three, whole, minor=True)])
        assert (own.seconds[onto[number]] <= whole.seconds * (1 + 1e-9)).all(), own.name

    checked = 0
    for edge in three.edges:
        own_edge = priced.get((edge.first, edge.second, edge.consumer, edge.slot, edge.kind))
        if own_edge is not None:
            assert own_edge.share == edge.share
            least = own_edge.table[np.ix_(onto[edge.first], onto[edge.second])]
            assert (least <= edge.table * (1 + 1e-9)).all(), edge.value
            checked += 1
    assert checked == len(two.edges) > 5


def test_only_terms_that_the_major_axis_may_shard_are_left_out() -> None:
    """Reshards of parameters, gradient sums and updates; all other ops of a transformer's passes count in full."""
    found = _restricted("llama3-8b", 8, (2, 2, 2))
    whole = Constraints().tables(found.folded, rules("llama3-8b"), found.mesh, COSTS)
    assert whole is not None
    gradients = {state.output for state in found.folded.graph.states if state.role is Role.GRADIENT}
    counted = 0
    for node, own in zip(found.nodes, whole.nodes, strict=True):
        if node.decision is Decision.OP:
            op = found.folded.kinds[node.kind].ops[node.position]
            free = op.phase is Phase.UPDATE or not gradients.isdisjoint(op.outputs)
            np.testing.assert_array_equal(node.seconds, 0.0 if free else own.seconds)
            counted += not free
    assert counted > 50
    assert not any(found.nodes[edge.first].decision is Decision.PARAMETER for edge in found.edges)


@pytest.mark.parametrize("samples", [4, 2])
def test_prices_are_those_of_the_tables_if_the_batch_is_divisible(samples: int) -> None:
    """Of 4 samples on 2 × 2, for every pair; of 2 samples, which are not, prices are no higher."""
    whole = Constraints().tables(folded("gpt2", samples=samples), rules("gpt2"), Mesh.of(outer=2, inner=2), COSTS)
    assert whole is not None
    _, wire = element_bytes(whole.folded, COSTS.policy)
    alone = _restricted("gpt2", 2 * samples, (2, 2, 2))
    by_nodes = {(edge.first, edge.second, edge.consumer): edge for edge in whole.edges}
    for edge in alone.edges:
        known = by_nodes[edge.first, edge.second, edge.consumer]
        ways = whole.resharder.of(
            whole.folded.graph.values[edge.value].shape, wire[edge.value], whole.meaning.chunks(edge.value)
        )
        np.testing.assert_array_equal(ways.between(*placements(whole, edge)), known.table)
        assert (edge.table <= known.table * (1 + 1e-12)).all()
        assert samples < 4 or (edge.table == known.table).all()


@cache
def _task() -> Task:
    """Return a small job whose blocks take time that is not for launches alone."""
    dims = {"num_layers": 4, "hidden": 1024, "heads": 8, "seq": 1024, "vocab": 512}
    return prepare(JobRequest("zoo:gpt2", gpus=16, cluster="h100", global_batch=24, dims=dims))


@cache
def _space() -> tuple[Family, ...]:
    return tuple(
        families([each for each in _task().space if is_data_major(each.mesh) and each.num_microbatches in (2, 6)])
    )


@pytest.mark.parametrize("splits", [False, True])
def test_no_microbatch_is_faster_than_its_share_on_the_free_axes(splits: bool) -> None:
    """Compared with the placement problem on three axes, for every mesh and number of samples; mostly close."""
    task = _task()
    search = task.context(Effort())
    near = 0
    pairs = {(family[0].mesh, 24 // family[0].num_microbatches) for family in _space()}
    pipeline = Pipeline(2, 1, "zb-h1" if splits else "1f1b", Overlap.of(task.costs.stack))
    for mesh, samples in sorted(pairs, key=str):
        dp, minor = mesh.shape[0], inner_mesh(mesh)
        alone = Configuration(1, minor, 24 * dp // samples, "1f1b")
        found = Workbench(search, portable=False)._submesh_bound(alone, np.inf)
        family = (Configuration(1, mesh, 24 // samples, "1f1b"),)
        tables = search.tables(family)
        assert tables is not None

        weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
        least = optimum(problem(tables, weighting))[0] * pipeline.num_groups / pipeline.rounds

        own = (found.split if splits else found.joint).seconds
        assert 0 < own <= least * (1 + CLOSE)
        main = main_kind(tables.folded).id
        (block,) = set(found.joint.blocks) - {0.0}
        assert block <= optimum(problem(tables, kind_weights(tables, [main], 0.0)))[0] * (1 + CLOSE)
        near += own > 0.9 * least  # sums of gradients are left out
    assert near > len(pairs) / 2


_SLOW = pytest.mark.slow(reason="three seconds each, for what one mesh shows too")


@pytest.mark.parametrize(
    "shape", [(2, 2, 2), *(pytest.param(own, marks=_SLOW) for own in ((2, 2, 4), (4, 2, 2)))], ids=str
)
def test_no_microbatch_that_hides_the_dispatch_is_faster_than_its_share_on_the_free_axes(
    shape: tuple[int, int, int],
) -> None:
    """Compared with the placement problem on three axes at the same prices, which are below those without hiding."""
    experts = {"experts": 8, "top_k": 2, "expert_ffn": 256}
    dims = {"num_layers": 4, "seq": 256, "vocab": 512, "hidden": 512, "heads": 8, "kv_heads": 4, "head": 64, **experts}
    task = prepare(JobRequest("zoo:qwen3-30b-a3b", gpus=32, cluster="h100", global_batch=16, dims=dims))
    search = task.context(Effort())
    mesh = Mesh.of(**dict(zip(("dp", "outer", "inner"), shape, strict=True)))
    bench, count = Workbench(search, portable=False), 16 // shape[0] // 2
    found, exposed = (
        bench._submesh_bound(Configuration(1, inner_mesh(mesh), 8, schedule), np.inf)
        for schedule in ("1f1b-a2a", "1f1b")
    )
    own = Configuration(2, mesh, count, "1f1b-a2a")
    tables = search.tables((own,))
    assert tables is not None

    for bound, schedule in ((found.joint, "1f1b"), (found.split, "zb-h1")):
        pipeline = Pipeline(2, 1, schedule, own.pipeline(task.costs.stack).overlap)
        weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
        least = optimum(problem(tables, weighting))[0] * pipeline.num_groups / pipeline.rounds
        assert 0.7 * least < bound.seconds <= least * (1 + CLOSE)
    assert found.joint.seconds < exposed.joint.seconds


def _with_room(
    transfer_bounds: TransferBounds, space: Sequence[Family], search: SearchContext
) -> list[tuple[float, int]]:
    """Return a heap of the bounds of families, and their numbers: floors, the least raised by room in memory."""
    heap = sorted((search.least(family), number) for number, family in enumerate(space))
    transfer_bounds.raise_least(heap, space, np.inf, lambda number: False, MEMORY_RUNGS)
    return heap


def _submeshes(space: Sequence[Family]) -> set[tuple[Mesh, int]]:
    """Return the free axes of some meshes, and the samples that devices along them work on."""
    return {(inner_mesh(own[0].mesh), 24 // own[0].num_microbatches // own[0].mesh.shape[0]) for own in space}


def test_no_plan_of_three_axes_is_faster_than_what_follows() -> None:
    """Whatever the schedule, from bounds of microbatches on the free axes; nor is any that the planner finds."""
    search = _task().context(Effort())
    space = list(_space())
    transfer_bounds = TransferBounds(search.folded, search.roofline, search.costs.stack, search.global_batch)
    assert all(transfer_bounds._from_submesh(family[0]) == UNKNOWN for family in space)
    bench = Workbench(search, portable=False)
    before = _with_room(transfer_bounds, space, search)[0][0]
    for mesh, samples in sorted(_submeshes(space), key=str):
        alone = Configuration(1, mesh, 24 // samples, "1f1b")
        finding = bench.execute(SearchTask(TaskKind.SUBMESH, (alone,), 0.0, np.inf), np.inf)
        transfer_bounds.record_submesh(mesh, samples, finding, hides=False)

    for family in space:
        assert 0 < transfer_bounds.transferred_bound(family) <= transfer_bounds.least(family)
        waiting = [(0.0, 0)]
        transfer_bounds.raise_least(waiting, [family], np.inf, lambda number: False)
        assert waiting == [(transfer_bounds.least(family, np.inf), 0)]
    for family in space[:: len(space) // 8]:
        least = transfer_bounds.least(family)
        assert 0 < least <= min(_random_plans(_task(), family, 2)) * (1 + CLOSE), str(family[0])
        if family[0].num_stages == 1:
            node = open_node(search, family, np.inf)
            assert node is not None
            assert node.relax(np.inf) > 0
            assert node.best is not None
            assert least <= node.best.objective * (1 + CLOSE)
    known = [max(search.least(family), transfer_bounds.least(family, np.inf)) for family in space]
    heap = _with_room(transfer_bounds, space, search)
    assert before < heap[0][0] <= min(known)
    transfer_bounds.raise_least(heap, space, np.inf, lambda number: False)
    assert heap[0][0] == pytest.approx(min(known))
    assert sorted(number for _, number in heap) == [*range(len(space))]


def test_once_it_is_late_no_bound_is_raised_further() -> None:
    """Then floors, and what follows at once, are what is known: a bound is there at any time."""
    search, late = _task().context(Effort()), False
    transfer_bounds = TransferBounds(
        search.folded, search.roofline, search.costs.stack, search.global_batch, is_late=lambda: late
    )
    for mesh in {inner_mesh(family[0].mesh) for family in _space()}:
        found = Workbench(search, portable=False)._submesh_bound(Configuration(1, mesh, 4, "1f1b"), np.inf)
        finding = Finding(0.0, None, 0, microbatch_bound=found.joint, split_backward_bound=found.split)
        transfer_bounds.record_submesh(mesh, 6, finding, hides=False)
    assert all(transfer_bounds.least(family) > 0 for family in _space())

    late = True

    assert not any(transfer_bounds.least(family) for family in _space())


def test_paces_are_told_of_divisors_only() -> None:
    """Of 4 samples on the free axes something follows for 2, not for 8 or 3, nor for other free axes."""
    search = _task().context(Effort())
    transfer_bounds = TransferBounds(search.folded, search.roofline, search.costs.stack, search.global_batch)
    mesh = Mesh.of(outer=2, inner=2)
    found = Workbench(search, portable=False)._submesh_bound(Configuration(1, mesh, 6, "1f1b"), np.inf)
    finding = Finding(0.0, None, 0, microbatch_bound=found.joint, split_backward_bound=found.split)
    transfer_bounds.record_submesh(mesh, 4, finding, hides=False)

    def seconds(samples: int, inner: int = 2, schedule: str = "1f1b") -> float:
        own = Configuration(2, Mesh.of(dp=2, outer=2, inner=inner), 24 // samples, schedule)
        return transfer_bounds._from_submesh(own).seconds

    assert seconds(8) == found.joint.seconds
    assert seconds(4) == found.joint.seconds / 2
    assert [seconds(24), seconds(6), seconds(8, inner=4), seconds(8, schedule="1f1b-a2a")] == [0.0] * 4

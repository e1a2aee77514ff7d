"""Strategies of ops on a mesh: which one-axis strategies are compatible, their costs, and their lowered programs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

from autopar.configuration import Configuration
from autopar.cost import Stack
from autopar.discover import Halo, Local, Replaced, Rules, Strategy, discover
from autopar.errors import PlanError
from autopar.folding.fold import Folded, fold
from autopar.folding.graph_facts import element_bytes
from autopar.formulate.building import build_tables
from autopar.formulate.op_strategies import OpStrategies, options
from autopar.formulate.tables import Slot
from autopar.ir.graph import Graph
from autopar.plan import BlockPlan, HaloRows, LocalKind, ReplacedNumber
from autopar.program.records import Compute, Exchange, Program, Start
from autopar.sharding import Mesh, Shard, parse_placement
from autopar.simulate.layout import lay_out
from tests.executions import COSTS, Execution, solved_plan
from tests.fused_models import fused_gpt, spatial_net
from tests.pinned_plans import execution, op_placements, pinned_candidate, pinned_plan, plan_of
from tests.random_graphs import Writer

MESH = Mesh.of(outer=4, inner=2)


def strategy(text: str, **details: Any) -> Strategy:
    """Return the strategy written like "S(0),R->S(0)"."""
    inputs, outputs = (tuple(map(parse_placement, side.split(","))) for side in text.split("->"))
    return replace(Strategy(inputs, outputs), **details)


def halo(dim: int, rows: int) -> Strategy:
    """Return the strategy of a convolution on a spatial dim of 2 whose padding becomes rows of neighbours."""
    gone = tuple(Replaced("pads", entry, 0) for entry in (dim - 2, dim))
    return strategy(f"S({dim}),R->S({dim})", halos=(Halo(0, dim, rows, rows),), replaced=gone)


def convolution(size: int, rows: int) -> Graph:
    """Return a convolution of `rows` rows of padding on each side."""
    writer = Writer(2)
    x, weight = writer.input((2, 3, size, size)), writer.parameter(4, 3, 2 * rows + 1, 2 * rows + 1)
    return writer.graph(writer.emit("Conv", [x, weight], pads=(rows,) * 4)[0])


def on_mesh(graph: Graph, strategies: Sequence[Strategy]) -> OpStrategies:
    """Return the options of a graph's only op."""
    (op,) = graph.ops
    whole = strategy(",".join("R" * len(op.inputs)) + "->R")
    return options(graph, op, (whole, *strategies), MESH, frozenset())


def combined(found: OpStrategies) -> set[tuple[int, ...]]:
    """Return which strategies are combined, by axis; 0 replicates."""
    return {tuple(row) for row in found.combined.tolist()}


@pytest.mark.parametrize(("size", "rows"), [(16, 1), (16, 5), (24, 3), (16, 4)])
def test_a_halo_dim_is_split_by_one_axis_and_has_enough_rows(size: int, rows: int) -> None:
    """Two axes may split two spatial dims; one dim with halo is split by one axis only, into shards of enough rows."""
    found = on_mesh(convolution(size, rows), [halo(2, rows), halo(3, rows), strategy("S(0),R->S(0)")])

    expected = set()
    for outer, inner in product(range(4), repeat=2):
        samples = prod(axis.size for axis, chosen in zip(MESH.axes, (outer, inner), strict=True) if chosen == 3)
        enough = all(
            size // axis.size >= rows
            for axis, chosen in zip(MESH.axes, (outer, inner), strict=True)
            if chosen in (1, 2)
        )
        if enough and 2 % samples == 0 and not (outer == inner and outer in (1, 2)):
            expected.add((outer, inner))
    assert combined(found) == expected


def test_halos_are_exchanged_dim_by_dim() -> None:
    """A 16 × 16 image over 4 × 2: 4 + 2 × 1 rows of 8 + 2 × 1; the columns are sent with the rows already there."""
    found = on_mesh(convolution(16, 1), [halo(2, 1), halo(3, 1)])
    chosen = found.combined.tolist().index([1, 2])

    local, made = found.local_inputs[0], found.local_outputs[0]
    assert local is not None
    assert made is not None
    assert local[chosen].tolist() == [2, 3, 6, 10]
    assert made[chosen].tolist() == [2, 4, 4, 8]
    sent = [(item.input, item.axis, elements) for item in found.halos if (elements := int(item.elements[chosen]))]
    assert sent == [(0, 0, 2 * 3 * 2 * 8), (0, 1, 2 * 3 * 6 * 2)]


def test_axes_may_not_replace_a_number_differently() -> None:
    one, other = (
        strategy(f"S({dim}),R->S({dim})", replaced=(Replaced("pads", 0, value),)) for dim, value in ((2, 0), (3, 1))
    )
    graph = convolution(16, 1)

    assert (1, 2) not in combined(on_mesh(graph, [one, other]))
    assert (1, 2) in combined(on_mesh(graph, [one, replace(other, replaced=one.replaced)]))


def gather() -> Graph:
    """Return a gather from a table of 16 rows."""
    writer = Writer(2)
    tokens = writer.input((2, 8), high=16)
    return writer.graph(writer.emit("Gather", [writer.parameter(16, 4), tokens])[0])


def test_all_axes_that_split_a_dim_use_one_variant() -> None:
    """Else a device would not know the offset of its shard; and a device cannot run two variants."""
    told = strategy("S(0),R->P", local=Local("autopar::GatherPart", 0, 0))
    other = strategy("S(1),R->S(2)", local=Local("autopar::Other", 0, 1))
    untold = strategy("S(0),R->S(1)")

    found = on_mesh(gather(), [told, other, untold])

    alone = {(0, 0)} | {pair for i in (1, 2, 3) for pair in ((0, i), (i, 0))}
    assert combined(found) == alone | {(1, 1), (3, 3), (2, 3), (3, 2)}
    kinds = dict(zip(map(tuple, found.combined.tolist()), found.local_kinds.tolist(), strict=True))
    assert [kinds[pair] for pair in ((0, 0), (1, 1), (2, 3), (3, 3))] == [-1, 1, 2, -1]


@pytest.mark.parametrize(("columns", "both"), [(12, set()), (24, {(1, 1), (2, 2)})])
def test_axes_agree_on_chunks_that_divide(columns: int, both: set[tuple[int, int]]) -> None:
    """12 columns in 3 chunks are split by one axis, of 2 or of 4, not by both, and never with two chunk counts."""
    writer = Writer(2)
    graph = writer.graph(writer.emit("Relu", [writer.input((2, columns))])[0])

    found = on_mesh(graph, [strategy("S(1/3)->S(1/3)"), strategy("S(1)->P")])

    assert combined(found) == {(0, 0), (0, 1), (1, 0), (0, 2), (2, 0)} | both


def test_halos_are_priced_and_held() -> None:
    """Seconds include the op on the shard with halo and the exchange; the shard with halo is held while the op runs."""
    graph = spatial_net(train=False)
    whole = fold(graph)
    tables = build_tables(whole, discover(graph), MESH, COSTS)
    resident, wire = element_bytes(whole, COSTS.policy)
    checked = 0

    for index, node in enumerate(tables.nodes):
        if node.options is None or not node.options.halos:
            continue
        op = whole.kinds[node.kind].ops[node.position]
        plain = COSTS.op_seconds(op, node.options.local_inputs, node.options.local_outputs, resident)
        sent = np.zeros(node.count)
        for item in node.options.halos:
            nbytes = item.elements * wire[op.inputs[item.input]]
            sent += COSTS.exchange_seconds(nbytes.astype(float), MESH.axes[item.axis])
        np.testing.assert_allclose(node.seconds, plain + sent, rtol=1e-12)
        (held,) = (
            item.amounts
            for item in tables.bytes
            if item.node == index and (item.start, item.end) == (node.position, node.position + 1)
        )
        local = node.options.local_inputs[0]
        assert local is not None
        np.testing.assert_allclose(held, np.where(sent > 0, local.prod(axis=1) * resident[op.inputs[0]], 0.0))
        checked += int((sent > 0).sum())
    assert checked


def computes(program: Program, kind: str) -> list[tuple[Compute, list[Exchange]]]:
    """Return the ops of a kind with the exchanges that come right before them."""
    found = []
    for segment in program.segments:
        before: list[Exchange] = []
        for item in segment.instructions:
            if isinstance(item, Compute) and item.op.kind == kind:
                found.append((item, before))
            before = [*before, item] if isinstance(item, Exchange) else []
    return found


def spatial_pins(folded: Folded, placement: str) -> dict[str, str]:
    """Return a pin to a placement for the output of every convolution of repeated blocks."""
    return {op.outputs[0]: placement for kind in folded.kinds if kind.count > 1 for op in kind.ops if op.kind == "Conv"}


@pytest.fixture(scope="module")
def net() -> Execution:
    return execution(spatial_net(train=False))


@pytest.fixture(scope="module")
def net_rules(net: Execution) -> Rules:
    return discover(net.folded.graph)


@pytest.mark.parametrize(("mesh", "placement"), [({"inner": 4}, "S(2)"), ({"outer": 2, "inner": 4}, "S(3)S(2)")])
def test_a_spatial_split_exchanges_rows_and_equals_the_whole(
    net: Execution, net_rules: Rules, mesh: dict[str, int], placement: str
) -> None:
    """Each device sends 1 + 1 rows per split dim, pads nothing there, and the net's outputs are the whole one's."""
    configuration = Configuration(1, Mesh.of(**mesh), 2, "forward-only")

    plan = pinned_plan(net.folded, net_rules, configuration, 2, spatial_pins(net.folded, placement))

    net.check(plan)
    exchanged = [item for item in computes(net.program(plan), "Conv") if item[1]]
    assert exchanged
    for compute, exchanges in exchanged:
        assert [item.dim for item in exchanges] == sorted(
            p.dim for p in exchanges[0].operand.placements if isinstance(p, Shard)
        )
        pads = compute.op.attr("pads")
        for item in exchanges:
            assert (item.before, item.after, item.fill) == (1, 1, "zero")
            assert item.bytes == 2 * item.operand.bytes / item.operand.shape[item.dim]
            assert isinstance(pads, tuple)
            assert pads[item.dim - 2] == pads[item.dim] == 0
        assert compute.inputs[0] == exchanges[-1].result


def test_a_spatial_split_trains_like_the_whole_net() -> None:
    """Activations and their gradients are split in strips; weight gradients are partial sums."""
    graph = spatial_net(size=8)
    model = execution(graph)
    layer = next(kind for kind in model.folded.kinds if kind.count > 1)
    strips = [name for op in layer.ops for name in op.outputs if graph.values[name].shape[-2:] == (8, 8)]
    configuration = Configuration(1, Mesh.of(inner=4), 2, "1f1b")

    plan = pinned_plan(model.folded, discover(graph), configuration, 2, dict.fromkeys(strips, "S(2)"))

    model.check(plan)
    halos = {op.kind: op_placements(plan)[op.name].halos for op in layer.ops}
    rows = (HaloRows(0, 2, "inner", 1, 1),)
    assert (halos["Conv"], halos["ConvTranspose"], halos["autopar::ConvWeightGrad"]) == (rows, rows, rows)
    assert plan.summary.startswith("dp=1 × spatial=4 ")


def test_simulated_seconds_equal_planned_seconds(net: Execution, net_rules: Rules) -> None:
    """Planned and simulated seconds agree kind by kind, with exchanges, padding and halos."""
    configuration = Configuration(1, Mesh.of(outer=2, inner=4), 2, "forward-only")
    pins = spatial_pins(net.folded, "S(3)S(2)")
    candidate = pinned_candidate(net.folded, net_rules, configuration, pins)

    program = net.program(plan_of(candidate, 2))

    totals = candidate.tables.block_seconds(candidate.choice)[:, Slot.FORWARD]
    simulated = {segment.kind: lay_out(segment, COSTS).seconds for segment in program.segments}
    assert [simulated[kind] for kind in range(len(totals))] == pytest.approx(totals.tolist(), rel=1e-9)
    assert any(item[1] for item in computes(program, "Conv"))


@pytest.mark.parametrize(
    ("mesh", "placement", "axes"),
    [({"inner": 4}, "S(0)", ("inner",)), ({"outer": 2, "inner": 2}, "S(0)S(0)", ("outer", "inner"))],
)
def test_devices_look_up_their_own_rows_of_a_table(mesh: dict[str, int], placement: str, axes: tuple[str, ...]) -> None:
    """Embedding and its gradient with a vocabulary of 24 on 4 devices: each device looks up its own six rows."""
    graph, configuration = fused_gpt(), Configuration(1, Mesh.of(**mesh), 2, "1f1b")
    gpt = execution(graph)

    plan = pinned_plan(gpt.folded, discover(graph), configuration, 4, {"w0": placement})

    gpt.check(plan)
    assert op_placements(plan)["op0"].local == LocalKind("autopar::GatherPart", 0, 0, axes)
    ((compute, _),) = computes(gpt.program(plan), "autopar::GatherPart")
    assert compute.start == Start(tuple(a for a in configuration.mesh.axes if a.name in axes), rows=6)
    assert compute.op.attr("size") == 24


def test_a_large_table_stays_sharded() -> None:
    """Nothing is pinned: 8192 rows make logits where they lie; to bring them elsewhere costs more than to add terms.

    Unless software hides it.
    """
    eager = replace(COSTS, stack=Stack("eager", scalars=(("exposed_share", 1.0),)))
    graph = fused_gpt(vocabulary=8192, layers=1)
    model = execution(graph)
    configuration = Configuration(1, Mesh.of(inner=4), 2, "1f1b")

    plan = solved_plan(model.folded, discover(graph), configuration, 4, costs=eager)

    model.check(plan)
    found = op_placements(plan)["op0"]
    assert (found.inputs[0], found.outputs) == ("S(0)", ("P",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"halos": (HaloRows(5, 2, "inner", 1, 1),)},
            "the plan speaks of dim 2 of input 5 of op 'OP', which is not there",
        ),
        ({"halos": (HaloRows(0, 4, "inner", 1, 1),)}, "the plan speaks of dim 4 of input 0"),
        ({"halos": (HaloRows(0, 2, "up", 1, 1),)}, "op 'OP' speaks of axis 'up', which mesh inner=4 does not have"),
        ({"halos": (HaloRows(0, 2, "inner", 5, 1),)}, r"op 'OP' needs 5\+1 rows of its neighbours, which have 4"),
        (
            {"replaced": (ReplacedNumber("pads", 4, 0),)},
            r"replaces number pads\[4\] of op 'OP', which has \[1, 1, 1, 1\]",
        ),
        ({"local": LocalKind("autopar::GatherPart", 2, 0, ("inner",))}, "the plan speaks of dim 0 of input 2"),
        ({"local": LocalKind("autopar::GatherPart", 0, 4, ("inner",))}, "the plan speaks of dim 4 of input 0"),
        ({"local": LocalKind("autopar::GatherPart", 0, 0, ("up",))}, "op 'OP' speaks of axis 'up'"),
    ],
)
def test_plans_of_other_models_are_refused(
    net: Execution, net_rules: Rules, changes: dict[str, Any], message: str
) -> None:
    configuration = Configuration(1, Mesh.of(inner=4), 2, "forward-only")
    pins = spatial_pins(net.folded, "S(2)")
    plan = pinned_plan(net.folded, net_rules, configuration, 2, pins)
    name = next(name for name, op in op_placements(plan).items() if op.halos)

    def change(block: BlockPlan) -> BlockPlan:
        return replace(block, ops=tuple(replace(op, **changes) if op.op == name else op for op in block.ops))

    with pytest.raises(PlanError, match=message.replace("OP", name)):
        net.program(replace(plan, blocks=tuple(map(change, plan.blocks))))

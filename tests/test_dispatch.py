"""Tokens on their way to experts and back: how many parts they reach, what that costs, and what hides it."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import comb
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import models
from autopar.cluster import PRESETS, Cluster
from autopar.cost import IDEAL, CostModel, Stack
from autopar.cost.arrays import FloatArray
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.cost.fusion import ALONE
from autopar.cost.model import MEMORY_LAUNCH
from autopar.cost.policy import MIXED, load_policy
from autopar.cost.reshard import Resharder
from autopar.cost.stack import Experts, Graphs
from autopar.cost.traffic import PLAIN_SHARE
from autopar.degrees import Degrees
from autopar.estimates import Estimator
from autopar.folding.graph_facts import row_routings
from autopar.formulate.building import build_tables
from autopar.formulate.tables import Slot
from autopar.ir.fills import fills
from autopar.ir.graph import Cast, Graph, Linear, LinearProduct, Op
from autopar.ir.routing import Routed, Routing, routings
from autopar.onnx import load
from autopar.prediction import Predictor
from autopar.program.records import Collective, SegmentPhase
from autopar.sharding import Axis, Mesh, parse_placements
from autopar.simulate.layout import lay_out
from autopar.training import training_step
from autopar.workload import open_workload

ONCE = Stack("once", dispatch="per-node")
HIDDEN = replace(ONCE, name="hidden", hides_dispatch=True)
EACH = replace(ONCE, name="each", experts="each")
STACKS = (IDEAL, ONCE, HIDDEN, EACH)
H100, GB200 = PRESETS["h100"], PRESETS["gb200"]
V3 = Routing(256, 8, 8, 4)


# How many parts of the experts a token reaches.


@st.composite
def small_routings(draw: st.DrawFn) -> Routing:
    """Routings whose choices can be listed."""
    groups = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.integers(1, 3))
    chosen = draw(st.integers(1, groups))
    return Routing(groups * size, draw(st.integers(1, min(4, chosen * size))), groups, chosen)


def _listed(routing: Routing, parts: int) -> float:
    """Return the mean number of parts reached over all choices of groups and of experts in them."""
    size, part = routing.experts // routing.groups, routing.experts // parts
    reached = []
    for groups in combinations(range(routing.groups), routing.chosen_groups):
        open_experts = [group * size + number for group in groups for number in range(size)]
        reached += [len({e // part for e in chosen}) for chosen in combinations(open_experts, routing.top_k)]
    return fmean(reached)


@given(routing=small_routings(), data=st.data())
def test_as_many_parts_are_reached_as_all_choices_reach_on_average(routing: Routing, data: st.DataObject) -> None:
    """Of parts that lie within groups, or are made of whole ones."""
    divisors = [n for n in range(1, routing.experts + 1) if routing.experts % n == 0]
    parts = data.draw(st.sampled_from([n for n in divisors if n % routing.groups == 0 or routing.groups % n == 0]))

    assert routing.reached(parts) == pytest.approx(_listed(routing, parts))


@given(routing=small_routings(), parts=st.integers(1, 12))
def test_a_token_reaches_one_part_at_least_and_no_more_than_it_has_experts(routing: Routing, parts: int) -> None:
    """And more parts are never fewer."""
    reached = routing.reached(parts)

    assert 1 - 1e-9 <= reached <= min(parts, routing.top_k) + 1e-9
    assert routing.reached(routing.experts) == pytest.approx(routing.top_k)
    assert routing.reached(1) == pytest.approx(1)


def test_groups_bound_the_nodes_of_deepseek_v3() -> None:
    """4 of 8 groups of experts, two on each of four nodes: at most 4 (1 - 15 / 70) nodes."""
    nodes = 4 * (1 - comb(6, 4) / comb(8, 4))

    assert 0.9 * nodes < V3.reached(4) < nodes  # some of the chosen groups have none of the 8 experts
    assert V3.reached(8) < 4
    assert Routing(256, 8).reached(8) > 5


@pytest.mark.parametrize(("model", "routing"), [("qwen3-30b-a3b", (8, 2, 1, 1)), ("deepseek-v3", (8, 2, 4, 2))])
def test_all_rows_of_a_step_know_what_their_tokens_chose(model: str, routing: tuple[int, ...]) -> None:
    """Forward and backward: they are the values of which a share carries tokens."""
    step = training_step(_tiny(model))

    assert routings(step.ops, step.values) == dict.fromkeys(fills(step.ops, step.values), Routing(*routing))


def _tiny(model: str) -> Graph:
    sizes = {"num_layers": 2, "hidden": 16, "heads": 4, "seq": 8, "vocab": 32, "experts": 8, "top_k": 2}
    own = {"kv_heads": 2, "head": 4, "expert_ffn": 8}
    if model == "deepseek-v3":
        own = {"groups": 4, "chosen_groups": 2, "dense_layers": 1, "expert_ffn": 8}
    return load(models.build(model, **sizes, **own), batch=2)


# What sending costs.


def _seconds(cluster: Cluster, stack: Stack, size: int, nbytes: float, routing: Routing = V3) -> float:
    return CostModel(cluster, MIXED, stack).collective_seconds(
        "all_to_all", nbytes, Axis("ep", size, 1), Routed(routing)
    )


@given(nodes=st.sampled_from([2, 4, 8]), nbytes=st.floats(1e6, 1e9), top_k=st.integers(1, 8))
def test_sending_a_token_once_to_a_node_never_takes_longer_than_all_copies(
    nodes: int, nbytes: float, top_k: int
) -> None:
    """Between nodes, where NICs set the time of both."""
    routing = Routing(64, top_k)

    once, every = (_seconds(H100, stack, 8 * nodes, nbytes, routing) for stack in (ONCE, IDEAL))

    assert once <= every * 1.1  # kernels of dispatchers reach 0.92 of a NIC, all-to-alls 0.985


def test_bytes_that_leave_a_node_are_those_of_distinct_nodes() -> None:
    """By hand: 4096 tokens of 7168 bf16 to 8 of 256 experts on 4 nodes; 3/4 of the reached nodes are others."""
    nbytes = 4096 * 8 * 7168 * 2.0
    nic = H100.inter.tuning("dispatch", 4)

    expected = nbytes * V3.reached(4) / 8 * 3 / 4 / nic.bandwidth + nic.latency + 2 * nic.latency_per_member

    assert _seconds(H100, ONCE, 32, nbytes) == pytest.approx(expected)


@pytest.mark.parametrize(("devices", "rate"), [(8, 764.0), (16, 706.95), (24, 665.97), (32, 642.23), (36, 632.31)])
def test_dispatch_reaches_the_published_bandwidth_on_nvl72(devices: int, rate: float) -> None:
    """Hybrid-EP on GB200, 32 SMs: 4096 tokens of 7168 bf16 to 8 of 8 experts a device, kernels alone.

    Published are the bytes that a device receives, its own tokens included, over the seconds, in GB/s.
    """
    routing = Routing(8 * devices, 8)
    received = 4096 * routing.reached(devices) * 7168 * 2.0

    rack = replace(GB200, devices_per_node=devices, inter=replace(GB200.inter, nics=None))

    found = _seconds(rack, ONCE, devices, 4096 * 8 * 7168 * 2.0, routing)

    assert received / found / 1e9 == pytest.approx(rate, rel=0.06)


def test_one_domain_sends_a_token_once_to_each_device() -> None:
    """A token whose two experts lie on one device takes one copy there; a device of its own sends nothing."""
    once = _seconds(H100, ONCE, 8, 1e9, Routing(16, 2))

    assert once < _seconds(H100, IDEAL, 8, 1e9, Routing(16, 2))
    assert _seconds(H100, ONCE, 1, 1e9) == 0


def test_links_are_not_faster_than_alone() -> None:
    """A stack whose factor on NICs is below one makes nothing of the rows of experts faster."""
    fast = replace(ONCE, scalars=(("intra_slowdown", 0.7), ("inter_slowdown", 0.5)))

    assert _seconds(H100, fast, 32, 1e8) == _seconds(H100, ONCE, 32, 1e8)
    assert _seconds(H100, replace(ONCE, scalars=(("inter_slowdown", 1.5),)), 32, 1e8) > _seconds(H100, ONCE, 32, 1e8)


def test_all_copies_are_sorted_by_expert_where_a_device_has_several() -> None:
    """The same bytes to as many devices as there are experts need no sorting."""
    several, one = (_seconds(H100, IDEAL, 8, 1e9, Routing(experts, 2)) for experts in (16, 8))

    assert several - one == pytest.approx(2 * 1e9 / (0.6 * 0.85 * 3.35e12), rel=0.05)


def test_experts_on_two_axes_are_told_apart() -> None:
    """Behind an axis of 4 nodes, tokens reach parts of 32: the way back over the inner axis carries fewer copies."""
    mesh = Mesh.of(ep=4, tp=8)
    costs = CostModel(H100, MIXED, ONCE)
    ways = Resharder(mesh, costs).of((256, 32, 64, 128), 2.0, routing=V3)

    moves = ways.path(parse_placements("S(1)S(2)"), parse_placements("S(0)S(0)"))

    assert [move.routed for move in moves] == [Routed(V3, 1), Routed(V3, 4)]
    for move in moves:
        assert move.seconds == costs.collective_seconds("all_to_all", move.nbytes, mesh.axes[move.axis], move.routed)


def test_rows_go_out_in_16_bits_whatever_products_run_in() -> None:
    """Forward tokens and the gradients of what came back, which are quantized where they arrive."""
    step = training_step(_tiny("qwen3-30b-a3b"))
    sizes = load_policy("mxfp8").graph_wire_bytes(step)
    sent = [op.outputs[0] for op in step.ops if op.kind in ("autopar::ExpertDispatch", "autopar::ExpertCombineGrad")]

    assert len(sent) == 4
    assert {sizes[name] for name in sent} == {2.0 * 2 / 8}


# Plans by degrees.


@cache
def _predictor() -> Predictor:
    dims = {
        "num_layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "head": 32, "seq": 128, "vocab": 1024,
        "experts": 16, "top_k": 4, "expert_ffn": 128,
    }  # fmt: skip
    return Predictor(open_workload("zoo:qwen3-30b-a3b", dims=dims))


@pytest.mark.parametrize("degrees", [
    Degrees(dp=8, ep=8, global_batch=8), Degrees(dp=8, ep=16, tp=2, etp=1, sequence_parallel=True, global_batch=8),
])  # fmt: skip
def test_tokens_go_to_experts_and_back_once_in_each_pass(degrees: Degrees) -> None:
    """Over each axis that the experts are dealt out to; nothing is gathered for the experts."""
    program, _ = _predictor().lowered(_predictor().settled(degrees), H100)
    axes = 2 if degrees.tp > 1 else 1

    for phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
        moved = Counter(
            instruction.kind
            for segment in program.segments if segment.phase is phase
            for instruction in segment.instructions
            if isinstance(instruction, Collective) and instruction.routed is not None
        )  # fmt: skip
        assert moved == {CollectiveKind.ALL_TO_ALL: 2 * axes}, phase


def test_a_stack_that_sends_once_and_one_that_hides_it_are_faster() -> None:
    """In this order, over nodes; what is hidden is bounded by the compute it runs beside."""
    degrees = Degrees(dp=32, ep=16, microbatch=4, global_batch=128)

    every, once, hidden = (_predictor().predict(degrees, H100, stack).timeline for stack in STACKS[:3])

    assert every.step_seconds > once.step_seconds > hidden.step_seconds
    (slow,), (fast,) = once.stages, hidden.stages
    assert fast.link_seconds == pytest.approx(slow.link_seconds)
    assert fast.collective_seconds >= slow.collective_seconds - slow.compute_seconds


@pytest.mark.parametrize("schedule", ["1f1b-a2a", pytest.param("dualpipe-v", marks=pytest.mark.slow)])
def test_a_schedule_that_hides_the_dispatch_is_priced_as_a_stack_that_does(schedule: str) -> None:
    """The simulator and estimates by formula; the stack of the plan stays that of the job."""
    degrees = Degrees(dp=8, ep=8, pp=2, interleave=2, schedule=schedule, global_batch=32)

    plain, hidden = (_predictor().predict(degrees, H100, stack) for stack in (ONCE, HIDDEN))
    exposed = _predictor().predict(replace(degrees, schedule=""), H100, ONCE).timeline

    assert plain.timeline.step_seconds == hidden.timeline.step_seconds
    assert plain.timeline.stages[0].collective_seconds < exposed.stages[0].collective_seconds
    found, same = (Estimator(_predictor(), H100, stack).estimate([degrees]).step_seconds for stack in (ONCE, HIDDEN))
    assert found.tolist() == same.tolist()


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_tables_and_simulator_price_rows_alike(stack: Stack) -> None:
    """Each slot of a pass, of a plan in which tokens travel."""
    degrees = _predictor().settled(Degrees(dp=8, ep=8, global_batch=8))
    program, plan = _predictor().lowered(degrees, H100, stack)
    folded = _predictor()._folded(degrees)
    costs = CostModel(H100, MIXED, stack)
    tables = build_tables(folded, _predictor()._rules_of(degrees.samples, folded), plan.device_mesh, costs)
    rows = row_routings(folded)
    kind = next(kind.id for kind in folded.kinds if any(name in rows for op in kind.ops for name in op.outputs))
    edges = [edge for edge in tables.edges if edge.value in rows and edge.kind == kind]
    slots = {edge.slot for edge in edges}

    for segment in program.segments:
        if segment.kind != kind or segment.phase not in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            continue
        layout = lay_out(segment, costs)
        moves = [i for i in segment.instructions if isinstance(i, Collective) and i.routed is not None]
        seconds = sum(costs.collective_seconds(i.kind, i.bytes, i.axis, i.routed) for i in moves)
        priced = [edge.table for edge in edges if edge.slot in _SLOTS[segment.phase]]
        each = seconds / len(moves)
        assert sum(bool(np.isclose(table, each).any()) for table in priced) >= len(moves)
        hidden = layout.gather_seconds if stack.hides_dispatch else 0.0
        assert hidden == pytest.approx(seconds if stack.hides_dispatch else 0.0)
    assert (Slot.FORWARD_GATHER in slots) == stack.hides_dispatch
    assert (Slot.BACKWARD in slots) != stack.hides_dispatch


_SLOTS = {
    SegmentPhase.FORWARD: (Slot.FORWARD_WAIT, Slot.FORWARD_GATHER),
    SegmentPhase.BACKWARD: (Slot.BACKWARD, Slot.BACKWARD_GATHER),
}


# Products of experts, and what CUDA graphs launch.


def _grouped(kind: str, experts: int, rows: int, width: int, inner: int, costs: CostModel) -> float:
    """Return the seconds of a grouped product of `rows` rows for each expert."""
    names = ("x", "y") if "WeightGrad" in kind else ("x", "w")
    op = Op("p", f"autopar::{kind}", names, ("z",))
    x, y, w = ([experts, 1, rows, inner], [experts, 1, rows, width], [experts, inner, width])
    sides = {"GroupedMatMul": ((x, w), y), "GroupedMatMulGrad": ((y, w), x), "GroupedMatMulWeightGrad": ((x, y), w)}
    inputs, output = sides[kind]
    sizes = {**dict.fromkeys(names, 2.0), "z": 4.0 if "WeightGrad" in kind else 2.0}
    seconds: FloatArray = costs.op_seconds(op, [np.array([side]) for side in inputs], [np.array([output])], sizes)
    return float(seconds[0])


B200 = CostModel(PRESETS["b200"], MIXED, Stack("kernels", scalars=(("gemm_efficiency", 0.709),)))


@pytest.mark.parametrize("kind", ["GroupedMatMul", "GroupedMatMulGrad", "GroupedMatMulWeightGrad"])
@given(rows=st.integers(1, 8192), more=st.integers(1, 4096))
def test_more_tokens_of_an_expert_never_take_less_time(kind: str, rows: int, more: int) -> None:
    """Partly filled tiles included."""
    assert _grouped(kind, 8, rows + more, 512, 1024, B200) >= _grouped(kind, 8, rows, 512, 1024, B200) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kind", "experts", "rows", "width", "inner", "share"),
    [
        ("GroupedMatMul", 32, 1024, 4096, 7168, 0.457),
        ("GroupedMatMul", 64, 512, 7168, 2048, 0.427),
        ("GroupedMatMul", 256, 128, 4096, 7168, 0.208),
        ("GroupedMatMulGrad", 32, 1024, 4096, 7168, 0.435),
        ("GroupedMatMulGrad", 128, 256, 7168, 2048, 0.233),
        ("GroupedMatMulWeightGrad", 32, 1024, 4096, 7168, 0.289),
        ("GroupedMatMulWeightGrad", 64, 512, 7168, 2048, 0.215),
        ("GroupedMatMulWeightGrad", 256, 128, 4096, 7168, 0.0775),
    ],
)
def test_grouped_products_reach_published_shares_of_the_peak(
    kind: str, experts: int, rows: int, width: int, inner: int, share: float
) -> None:
    """Transformer Engine on B200 with sums in float32 (MooreThreads/SimuMax, b200_bf16_ceperm.json)."""
    seconds = 2 * experts * rows * width * inner / (share * 2250e12)

    assert _grouped(kind, experts, rows, width, inner, B200) == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("kind", ["GroupedMatMul", "GroupedMatMulGrad", "GroupedMatMulWeightGrad"])
@pytest.mark.parametrize(
    ("experts", "graphs", "kernels"),
    [("grouped", "none", 1), ("fused", "none", 1), ("each", "none", 16), ("each", "partial", 16), ("each", "full", 1)],
)
def test_a_product_per_expert_costs_a_launch_each(kind: str, experts: Experts, graphs: Graphs, kernels: int) -> None:
    """Unless a CUDA graph holds the launches."""
    costs = replace(B200, stack=replace(B200.stack, experts=experts, graphs=graphs))

    more = _grouped(kind, 16, 256, 512, 1024, costs) - _grouped(kind, 16, 256, 512, 1024, B200)

    assert more == pytest.approx((kernels - 1) * B200.cluster.device.launch, abs=1e-12)


def test_a_slow_host_launches_the_products_of_experts_slowly() -> None:
    """The host of GB200 takes 2.75 times as long as that of DGX H100 (NVIDIA/TransformerEngine, issue 2053)."""
    grace = CostModel(GB200, MIXED, EACH)
    alone = replace(grace, stack=ONCE)

    more = _grouped("GroupedMatMul", 16, 256, 512, 1024, grace) - _grouped("GroupedMatMul", 16, 256, 512, 1024, alone)

    assert more == pytest.approx(15 * 2.75 * GB200.device.launch)
    assert _grouped("GroupedMatMul", 1, 256, 512, 1024, grace) == _grouped("GroupedMatMul", 1, 256, 512, 1024, alone)


def _gpt_oss_experts(stack: Stack) -> dict[str, float]:
    """Return the seconds of ops of gpt-oss's experts but for products, 4 of 64 x 64, half of 2 x 256 rows, by name."""
    sizes = {"num_layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head": 16, "seq": 256, "vocab": 64, "ffn": 64}
    graph = training_step(load(models.build("gpt-oss-20b", **sizes, experts=4, top_k=2), batch=2))
    costs = CostModel(B200.cluster, MIXED, stack)
    ops = [op for op in graph.ops if op.name.startswith("layers.1.")]
    ranks = {name: len(value.shape) for name, value in graph.values.items()}
    fused, sizes_of = costs.fuse(ops, ranks), costs.policy.graph_element_bytes(graph)
    found = {}
    for op in ops:
        inputs, outputs = (
            [np.array([graph.values[name].shape]) if name else None for name in names]
            for names in (op.inputs, op.outputs)
        )
        seconds = costs.op_seconds(op, inputs, outputs, sizes_of, fused.get(op.name, ALONE))
        if "Grouped" not in op.kind:
            found[op.name] = float(seconds[0])
    return found


def test_clipped_and_biased_experts_are_several_kernels_in_megatron_core() -> None:
    """Gate and up are clipped and copied; biases of results are weighted in float32; backward likewise.

    Of the rows of 4 experts that are half full, 2,048 x 64 numbers of 2 bytes, what moves besides.
    """
    rate = B200.cluster.device.memory_bandwidth * B200.cluster.device.bandwidth_efficiency * PLAIN_SHARE
    rows = 4 * 2 * 256 * 64 * 2 / 2 / rate
    each, grouped = _gpt_oss_experts(EACH), _gpt_oss_experts(ONCE)

    more = {name.removeprefix("layers.1.moe."): round((each[name] - grouped[name]) / rows, 6) for name in each}

    assert {name: times for name, times in more.items() if times} == {
        "gate.clipped": 4, "up.clipped": 4, "down": 12,
        "gate.clipped.vjp.1": 5, "up.clipped.vjp.1": 5, "down.vjp.0": 19,
    }  # fmt: skip
    assert _gpt_oss_experts(replace(ONCE, experts="fused")) == grouped


def _quantized(experts: Experts, cast: Cast) -> float:
    """Return the seconds in MXFP8 of a product of 16 experts whose rows an activation or something else made."""
    costs = replace(B200, policy=load_policy("mxfp8"), stack=replace(B200.stack, experts=experts))
    op = Op("p", "autopar::GroupedMatMul", ("x", "w"), ("y",), linear=Linear(LinearProduct.FORWARD, cast, kept=True))
    shapes = [[16, 1, 256, 512], [16, 512, 1024], [16, 1, 256, 1024]]
    x, w, y = (np.array([shape]) for shape in shapes)
    seconds: FloatArray = costs.op_seconds(op, [x, w], [y], {"x": 2.0, "w": 2.0, "y": 2.0})
    return float(seconds[0])


def test_fused_experts_write_what_the_next_product_reads() -> None:
    """An activation in the kernel before is cast there; rows that come from the dispatcher have a cast of their own."""
    launch = B200.cluster.device.launch

    assert _quantized("fused", Cast.BY_MAKER) == pytest.approx(_quantized("grouped", Cast.BEFORE))
    assert _quantized("fused", Cast.OWN) == pytest.approx(_quantized("grouped", Cast.OWN))
    assert _quantized("each", Cast.OWN) - _quantized("grouped", Cast.OWN) == pytest.approx(
        15 * (1 + MEMORY_LAUNCH) * launch
    )


def test_cuda_graphs_launch_all_but_what_depends_on_the_router() -> None:
    """Or all; a host that launches nothing takes no time."""
    slow = Stack("slow", scalars=(("host_launch", 1e-5),))
    ops = [Op("a", "MatMul", ("x", "w"), ("y",)), Op("b", "autopar::GroupedMatMul", ("x", "w"), ("y",))]

    seconds = {
        graphs: [CostModel(H100, MIXED, replace(slow, graphs=graphs)).host_seconds(op, 3) for op in ops]
        for graphs in ("none", "partial", "full")
    }

    assert seconds == {"none": [1e-5, 1e-5], "partial": [0.0, 1e-5], "full": [0.0, 0.0]}

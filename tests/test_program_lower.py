"""Lowering: hand-over between blocks, far values, ops rewritten for the shapes of one device, plans that do not fit."""

from dataclasses import replace
from typing import Any

import pytest

from autopar.configuration import Configuration
from autopar.discover import Rules, discover
from autopar.errors import PlanError, ShardingError
from autopar.folding.block_interface import hand_overs, instance_names
from autopar.folding.fold import fold
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Op, Role, State, Value
from autopar.plan import DividedNumber, Plan
from autopar.program.lower import lower
from autopar.program.records import Compute, Program, SegmentPhase
from autopar.program.text import format_program, parse_program
from autopar.sharding import Mesh, local_shape
from autopar.training import training_step
from tests.executions import COSTS, Execution, random_feeds, random_plan
from tests.pinned_plans import pinned_plan

MESH = Mesh.of(outer=2, inner=2)
NUM_LAYERS = 5


def _graph(name: str, inputs: list[Value], parameters: list[Value], made: list[Value], ops: list[Op]) -> Graph:
    """Return a forward graph whose last value is its output."""
    states = tuple(State(value.name, value.name, Role.PARAMETER, value.name) for value in parameters)
    values = {value.name: value for value in (*inputs, *parameters, *made)}
    names = tuple(value.name for value in inputs)
    return Graph(name, 24, values, names, states, {}, tuple(ops), (made[-1].name,))


def skips(samples: int = 4) -> Graph:
    """Return a training step of layers h + Relu(h @ u) @ v * gate; all read `gate`, and h0 is added at the end."""

    def activation(name: str) -> Value:
        return Value(name, (samples, 8), "float64")

    def weight(name: str) -> Value:
        return Value(name, (8, 8), "float64")

    parameters = [weight("w.in"), weight("w.gate")]
    made = [activation("h0"), activation("g0"), activation("gate")]
    ops = [
        Op("in", "MatMul", ("x", "w.in"), ("h0",)),
        Op("g0", "MatMul", ("h0", "w.gate"), ("g0",)),
        Op("gate", "Sigmoid", ("g0",), ("gate",)),
    ]
    for layer in range(1, NUM_LAYERS + 1):
        parameters += [weight(f"u{layer}"), weight(f"v{layer}")]
        made += [activation(f"{stem}{layer}") for stem in "arbgh"]
        ops += [
            Op(f"up{layer}", "MatMul", (f"h{layer - 1}", f"u{layer}"), (f"a{layer}",)),
            Op(f"relu{layer}", "Relu", (f"a{layer}",), (f"r{layer}",)),
            Op(f"down{layer}", "MatMul", (f"r{layer}", f"v{layer}"), (f"b{layer}",)),
            Op(f"mul{layer}", "Mul", (f"b{layer}", "gate"), (f"g{layer}",)),
            Op(f"add{layer}", "Add", (f"h{layer - 1}", f"g{layer}"), (f"h{layer}",)),
        ]
    made.append(activation("y"))
    ops.append(Op("skip", "Add", (f"h{NUM_LAYERS}", "h0"), ("y",)))
    blocks = [0] * 3 + [1 + i // 5 for i in range(5 * NUM_LAYERS)] + [NUM_LAYERS + 1]
    ops = [replace(op, block=block) for op, block in zip(ops, blocks, strict=True)]
    return training_step(_graph("skips", [activation("x")], parameters, made, ops), loss="mse")


def grouped(samples: int = 4) -> Graph:
    """Return a training step of a convolution in 16 groups."""
    x, y = (Value(name, (samples, 32, 4, 4), "float64") for name in "xy")
    attrs = (("group", 16), ("kernel_shape", (3, 3)), ("pads", (1, 1, 1, 1)))
    op = Op("conv", "Conv", ("x", "w"), ("y",), attrs)
    weight = Value("w", (32, 2, 3, 3), "float64")
    return training_step(find_blocks(_graph("grouped", [x], [weight], [y], [op])), loss="mse")


@pytest.fixture(scope="module")
def skip_rules() -> Rules:
    return discover(skips(10))


@pytest.fixture(scope="module")
def grouped_rules() -> Rules:
    return discover(grouped(10))


def _plan(graph: Graph, rules: Rules, seed: int, num_stages: int = 1) -> Plan:
    return random_plan(fold(graph), rules, Configuration(num_stages, MESH, 2, "1f1b"), 4, seed)


def _computes(program: Program) -> dict[str, Compute]:
    """Return the instructions that compute, by op."""
    instructions = (instruction for segment in program.segments for instruction in segment.instructions)
    return {item.op.name: item for item in instructions if isinstance(item, Compute)}


def test_equal_layers_hand_over_by_position_and_skips_do_not() -> None:
    """The sum h passes from layer to layer; the gate, which all read, and h0, which the last block reads, are far.

    So are the gradients that layers send to the gate, and the last block to h0.
    """
    folded = fold(skips())
    layer = max(folded.kinds, key=lambda kind: kind.count)
    names = instance_names(folded)[layer.instances[0]]

    handed = hand_overs(folded)

    first, last = handed[folded.chain[0]], handed[folded.chain[-1]]
    assert layer.count >= NUM_LAYERS - 2
    assert len(handed[layer.id].forward_in) == len(handed[layer.id].forward_out) == 1
    assert len(handed[layer.id].backward_in) == len(handed[layer.id].backward_out) == 1
    assert {"gate", "h0"} <= set(first.far)
    assert len(handed[layer.id].far) == 1
    assert last.forward_out == first.forward_in == ()
    assert names[handed[layer.id].forward_in[0]].startswith("h")


@pytest.mark.parametrize("seed", range(4))
def test_far_values_reach_their_readers(seed: int, skip_rules: Rules) -> None:
    """Across blocks and stages, forward and backward, at any placement; the text of the program keeps them."""
    graph = skips()
    execution = Execution.of_graph(graph, *random_feeds(graph, 2, {}))
    plan = _plan(graph, skip_rules, seed, num_stages=3)

    program = execution.program(plan)

    exported = {part.tensor for segment in program.segments for part in segment.parts if segment.exports}
    assert {"gate", "h0"} <= exported
    assert parse_program(format_program(program)) == program
    execution.check(plan)


def test_every_value_at_an_edge_is_a_part_of_a_tensor(skip_rules: Rules) -> None:
    """Only reduced gradients, which a block keeps for itself, have no part; shapes are those of the placements."""
    graph = skips()
    program = lower(_plan(graph, skip_rules, 0), fold(graph), COSTS)

    for segment in program.segments:
        parts = {part.value: part for part in segment.parts}
        stored = {store.value.value for store in segment.stores}
        edge = {*segment.inputs, *segment.external, *segment.outputs, *segment.exports}
        for operand in edge:
            if operand.value not in parts:
                assert segment.phase is SegmentPhase.UPDATE, operand
                assert operand.value.endswith("|reduce"), operand
            else:
                whole = graph.values[parts[operand.value].tensor].shape
                assert operand.shape == local_shape(whole, operand.placements, MESH)
        assert segment.phase is SegmentPhase.REDUCE or stored <= parts.keys()


@pytest.mark.parametrize(("placement", "groups"), [("RR", 16), ("RS(0)", 8), ("S(0)S(0)", 4)])
def test_attributes_are_divided(placement: str, groups: int, grouped_rules: Rules) -> None:
    """With channels split, each device convolves fewer groups; whatever the plan, the numbers are right."""
    graph = grouped()
    execution = Execution.of_graph(graph, *random_feeds(graph, 2, {}))

    plan = pinned_plan(fold(graph), grouped_rules, Configuration(1, MESH, 2, "1f1b"), 4, {"w": placement})

    execution.check(plan)
    assert _computes(execution.program(plan))["conv"].op.attr("group") == groups


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_of_grouped_convolutions_are_right(seed: int, grouped_rules: Rules) -> None:
    graph = grouped()

    Execution.of_graph(graph, *random_feeds(graph, 2, {})).check(_plan(graph, grouped_rules, seed))


def _with_divided(plan: Plan, op: str, *numbers: DividedNumber) -> Plan:
    """Return the plan with other numbers divided inside an op."""
    blocks = tuple(
        replace(block, ops=tuple(replace(p, divided=numbers) if p.op == op else p for p in block.ops))
        for block in plan.blocks
    )
    return replace(plan, blocks=blocks)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (DividedNumber("group", 0, 3), r"divides number group\[0\] of op 'conv' by 3, which \[16\] does not allow"),
        (DividedNumber("group", 1, 2), r"divides number group\[1\] of op 'conv' by 2, which \[16\] does not allow"),
        (DividedNumber("axis", 0, 2), r"divides number axis\[0\] of op 'conv' by 2, which \[\] does not allow"),
        (DividedNumber(1, 0, 2), r"divides number 1\[0\] of op 'conv' by 2, which \[\] does not allow"),
        (DividedNumber(7, 0, 2), r"divides number 7\[0\] of op 'conv' by 2, which \[\] does not allow"),
        (DividedNumber("group", 0, 0), r"divides number group\[0\] of op 'conv' by 0, which \[16\] does not allow"),
    ],
)
def test_numbers_that_cannot_be_divided_are_refused(number: DividedNumber, message: str, grouped_rules: Rules) -> None:
    """The plan is of another model, or was edited."""
    graph = grouped()
    plan = _with_divided(_plan(graph, grouped_rules, 0), "conv", number)

    with pytest.raises(PlanError, match=message):
        lower(plan, fold(graph), COSTS)


def test_plans_of_other_models_are_refused(skip_rules: Rules) -> None:
    graph = skips()
    plan = _plan(graph, skip_rules, 0)

    with pytest.raises(PlanError, match="the plan says nothing about op 'conv'"):
        lower(plan, fold(grouped()), COSTS)
    with pytest.raises(PlanError, match=r"the plan has a block kind \d, the model has \d"):
        lower(replace(plan, blocks=plan.blocks[-1:]), fold(grouped()), COSTS)


def _edited(plan: Plan, kind: int, **changes: Any) -> Plan:
    """Return the plan with other contents of a kind of block."""
    return replace(
        plan, blocks=tuple(replace(block, **changes) if block.kind == kind else block for block in plan.blocks)
    )


def test_plans_that_are_incomplete_are_refused(skip_rules: Rules) -> None:
    """Whatever is taken away from a plan is named, never a crash."""
    folded = fold(skips())
    plan = _plan(folded.graph, skip_rules, 0)
    for block in plan.blocks:
        for name, what in (("states", "state"), ("arrivals", "arrival"), ("departures", "departure"), ("ops", "op")):
            items = getattr(block, name)
            for index in range(len(items)):
                fewer = _edited(plan, block.kind, **{name: (*items[:index], *items[index + 1 :])})
                with pytest.raises(PlanError, match=rf"the plan says nothing about ({what}|parameter) '"):
                    lower(fewer, folded, COSTS)
        for index, op in enumerate(block.ops):
            unplaced = replace(op, outputs=("",) * len(op.outputs))
            fewer = _edited(plan, block.kind, ops=(*block.ops[:index], unplaced, *block.ops[index + 1 :]))
            with pytest.raises(PlanError, match=f"the plan does not place '.*', a result of '{op.op}'"):
                lower(fewer, folded, COSTS)
    with pytest.raises(PlanError, match=r"the plan says nothing about blocks of kind \d"):
        lower(replace(plan, blocks=plan.blocks[:-1]), folded, COSTS)
    with pytest.raises(PlanError, match="the plan has a block kind -1, the model has"):
        lower(replace(plan, blocks=(replace(plan.blocks[0], kind=-1), *plan.blocks[1:])), folded, COSTS)


def test_placements_that_cannot_be_are_refused(skip_rules: Rules) -> None:
    """An input too many, a dim that is not there, a mesh without devices or with strides of another one."""
    folded = fold(skips())
    plan = _plan(folded.graph, skip_rules, 0)
    block = plan.blocks[0]
    first, *rest = block.ops

    more = replace(first, inputs=(*first.inputs, "R"))
    with pytest.raises(PlanError, match=r"the plan places \d inputs of op '.*', which has \d"):
        lower(_edited(plan, block.kind, ops=(more, *rest)), folded, COSTS)
    more = replace(first, outputs=(*first.outputs, "R"))
    with pytest.raises(PlanError, match=r"the plan places \d outputs of op '.*', which has \d"):
        lower(_edited(plan, block.kind, ops=(more, *rest)), folded, COSTS)
    axes = len(plan.mesh)
    for op in block.ops:
        elsewhere = replace(op, inputs=("S(9)" * axes, *op.inputs[1:]))
        changed = tuple(elsewhere if each is op else each for each in block.ops)
        with pytest.raises(ShardingError, match=r"dim 9 of .* does not exist"):
            lower(_edited(plan, block.kind, ops=changed), folded, COSTS)
    with pytest.raises(ShardingError, match="has size 0"):
        lower(replace(plan, mesh=(replace(plan.mesh[0], size=0), *plan.mesh[1:])), folded, COSTS)
    with pytest.raises(PlanError, match="the strides of mesh"):
        lower(replace(plan, mesh=(replace(plan.mesh[0], stride=7), *plan.mesh[1:])), folded, COSTS)

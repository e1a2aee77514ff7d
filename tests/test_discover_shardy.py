"""Discovery against the sharding rules of Shardy's authors: nothing they allow is missed without a reason."""

import pytest

from autopar.discover import Strategy, discover
from autopar.sharding import Partial, Placement, Replicate, Shard, parse_placement
from tests.shardy import Comparison, Wanted, compare, expert_rules
from tests.shardy_cases import CASES
from tests.single_ops import check_rule, draw_all, merge, single_op

pytest.importorskip("jaxlib", reason="needs Shardy, which comes with jaxlib: pip install autopar[jax]")
pytest.importorskip("jax", reason="needs jax, which sets up Shardy's dialects: pip install autopar[jax]")

NAMES = [f"{case.kind}-{case.expert}-{i}" for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return compare(CASES)


def test_many_ops_are_compared_on_several_shapes(comparisons: list[Comparison]) -> None:
    """At least 36 kinds on either side, each pair on at least three shapes."""
    pairs = [(comparison.case.kind, comparison.case.expert) for comparison in comparisons]

    assert len({kind for kind, _ in pairs}) >= 36
    assert len({expert for _, expert in pairs}) >= 36
    assert min(pairs.count(pair) for pair in pairs) >= 3


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_what_the_expert_shards_is_found_or_explained(comparisons: list[Comparison], number: int) -> None:
    """Every factor that may be sharded is a strategy; the exceptions are listed with the case, and no longer."""
    comparison = comparisons[number]

    missed = {str(wanted) for wanted in comparison.missed}

    assert missed == comparison.case.missing.keys(), comparison.expert.text


@pytest.mark.slow
def test_strategies_of_all_compared_ops_hold() -> None:
    """Sharded op == whole op on the real shapes, on axes of 2, 3 and 4, also beyond the expert's rules."""
    graphs = [single_op(case.kind, case.inputs, case.num_outputs, **case.attrs) for case in CASES]
    merged = merge([graph for graph, _ in graphs])
    rules = discover(merged)

    for case, (graph, op), renamed in zip(CASES, graphs, merged.ops, strict=True):
        if op.kind != "Cast":  # to float32, which rounds every term
            for size in (2, 3, 4):
                check_rule(graph, op, rules.of(renamed), draw_all(case.inputs, seed=size), size)


def test_rule_is_read_as_shardy_prints_it() -> None:
    """(128, 96) as (8, 16, 96): the rows are a product of two factors."""
    text = "func.func @{name}(%x0: tensor<128x96xf64>) {\n"
    text += "%r = stablehlo.reshape %x0 : (tensor<128x96xf64>) -> tensor<8x16x96xf64>\nreturn }\n"

    (rule,) = expert_rules([text])

    assert rule.text == "([ij, k])->([i, j, k]) {i=8, j=16, k=96}"
    assert rule.sizes == (8, 16, 96)
    assert rule.operands == (((0, 1), (2,)),)
    assert rule.results == (((0,), (1,), (2,)),)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("S(1) S(0) P", True),
        ("S(1) S(0) P(max)", True),
        ("S(1) R P", False),
        ("S(1) S(0) R", False),
        ("S(1) S(0) S(1)", False),
        ("R R R", False),
    ],
)
def test_strategy_meets_a_reduction_only_if_it_shards_the_same_dims(found: str, expected: bool) -> None:
    """A contraction is met by shards of both operands and terms of any reduction."""
    *inputs, output = (parse_placement(text) for text in found.split())
    wanted = Wanted("reduction", (Shard(1), Shard(0)), (Partial(),))

    assert wanted.is_met_by(Strategy(tuple(inputs), (output,))) is expected


@pytest.mark.parametrize(("placement", "expected"), [(Replicate(), True), (Shard(0), True), (Partial(), True)])
def test_inputs_the_expert_does_not_have_are_free(placement: Placement, expected: bool) -> None:
    """The target shape of a reshape has no operand in StableHLO."""
    wanted = Wanted("", (Shard(0), None), (Shard(0),))

    assert wanted.is_met_by(Strategy((Shard(0), placement), (Shard(0),))) is expected

"""The rules of more than 83 ops against what was worked out by hand, and the law that every strategy keeps."""

from collections.abc import Mapping

import pytest

from autopar.discover import Rule, discover
from tests.discovery_cases import BFLOAT16, CASES, Case, found, strategies
from tests.single_ops import check_rule, draw_all, merge

every_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{i}" for i, case in enumerate(CASES)])


@pytest.fixture(scope="module")
def rules() -> Mapping[int, Rule]:
    """The rules of all cases, discovered as those of one graph."""
    graph = merge([case.build()[0] for case in CASES])
    discovered = discover(graph)
    return {id(case): discovered.of(op) for case, op in zip(CASES, graph.ops, strict=True)}


def test_there_are_enough_cases() -> None:
    """The neighbour's list has 83."""
    assert len(CASES) >= 83


@every_case
def test_strategies_are_those_worked_out_by_hand(rules: Mapping[int, Rule], case: Case) -> None:
    """All strategies of the op, and no other, are found by execution alone; if something is left out, it is said."""
    rule = rules[id(case)]

    assert found(rule) == strategies(case.rule)
    assert rule.reason.startswith(case.reason) if case.reason else not rule.reason


EXACT = [case for case in CASES if not case.reason and case.attrs.get("to") != BFLOAT16]
"""Cases whose results do not change from run to run, nor by the rounding of every term."""


@pytest.mark.parametrize("case", EXACT, ids=[f"{case.kind}-{i}" for i, case in enumerate(EXACT)])
def test_devices_that_follow_a_strategy_compute_what_one_device_computes(rules: Mapping[int, Rule], case: Case) -> None:
    """Sharded op == whole op on the real shapes, which are not those of the discovery, on axes of 2 and 3."""
    graph, op = case.build()

    for size in (2, 3):
        check_rule(graph, op, rules[id(case)], draw_all(case.inputs, seed=size), size)

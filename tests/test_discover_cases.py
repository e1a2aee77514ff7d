"""The rules of more than 83 ops against what was worked out by hand, and what finding them all costs."""

import pytest

from autopar.discover import Rule, discover, format_rule
from tests.discovery_cases import CASES, Case, found, strategies
from tests.single_ops import draw_all, fits_axis, merge, check_strategy
from tests.test_discover_ops import CASES as OTHER_CASES
from tests.test_discover_ops import draw_outputs

every_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}-{i}" for i, case in enumerate(CASES)])


@every_case
def test_strategies_are_those_worked_out_by_hand(case: Case) -> None:
    """All strategies of the op, and no other, are found by execution alone; if something is left out, it is said."""
    graph, op = case.build()

    rule = discover(graph).of(op)

    assert found(rule) == strategies(case.rule)
    assert rule.reason.startswith(case.reason) if case.reason else not rule.reason

"""Strategies that were once found by luck and broke the law on random graphs."""

import pytest

from autopar.discover import discover
from autopar.ir.text import parse_graph

CASES = {
    "all rows of the proxy, but not of the real tensor": (
        """graph slice opset=24
        input %x: float64[14,6]
        const %start: int64[1] = [0]
        const %end: int64[1] = [12]
        %y: float64[12,6] = Slice(%x, %start, %end, %start) as op
        output %y
        """,
        {"S(0),R,R,R -> S(0)"},
    ),
    "floats that are never equal": (
        """graph equal opset=24
        input %a: float64[12,6]
        input %b: float64[12,6]
        %y: bool[12,6] = Equal(%a, %b) as op
        output %y
        """,
        {"P,R -> R", "R,P -> R", "P,P -> R"},
    ),
    "a single condition that is always true": (
        """graph where opset=24
        input %c: bool[]
        input %a: float64[12,6]
        input %b: float64[12,6]
        %y: float64[12,6] = Where(%c, %a, %b) as op
        output %y
        """,
        {"R,P,R -> P", "R,S(0),R -> S(0)", "R,R,P -> P"},
    ),
    "a single row that is larger than that of the other device": (
        """graph gather opset=24
        input %x: float64[1,12,1]
        const %rows: int64[1] = [0]
        %y: float64[1,1,1] = Gather(%x, %rows) {axis=1} as op
        output %y
        """,
        {"S(1),R -> P(max)", "S(1),R -> P(min)"},
    ),
    "a single window that one of two devices has all rows of": (
        """graph pool opset=24
        input %x: float64[8,6,4]
        %y: float64[8,6,1] = AveragePool(%x) {kernel_shape=[3], pads=[0, 0], strides=[2]} as op
        output %y
        """,
        {"S(2) -> P(max) with halo #0 dim 2 +0+1 lowest"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_holds_by_luck_is_no_strategy(case: str) -> None:
    text, wrong = CASES[case]
    graph = parse_graph("\n".join(line.strip() for line in text.splitlines()))

    strategies = {str(strategy) for strategy in discover(graph).of(graph.ops[0]).strategies}

    assert strategies.isdisjoint(wrong)
    assert len(strategies) > 1

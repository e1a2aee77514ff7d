"""Ops whose results depend on where something lies: they have the strategies that follow, and no other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.discover import discover
from autopar.execute import Executor
from autopar.sharding import Partial
from tests.single_ops import Input, check_strategy, draw_all, fits_axis, flags, floats, indices, ints, single_op

B, S, D, V = 24, 12, 24, 48

Case = tuple[str, Sequence[Input], dict[str, Any], set[str]]

POSITIONS: list[Case] = [
    # A sum up to here needs the sums of all devices before: only the other dims.
    ("CumSum", [floats(B, S, D), np.array(1)], {"exclusive": 1}, {"S(0),R -> S(0)", "S(2),R -> S(2)", "P,R -> P"}),
    ("CumSum", [floats(B, S, D), np.array(-1)], {"reverse": 1}, {"S(0),R -> S(0)", "S(1),R -> S(1)", "P,R -> P"}),
    # The diagonal of a block is not a part of the diagonal; which numbers the input has does not matter.
    ("EyeLike", [floats(S, V)], {"k": 1}, {"P -> R"}),
    ("Range", [np.array(0), np.array(24), np.array(1)], {}, set()),
    ("Trilu", [floats(B, 5, 7)], {}, {"S(0) -> S(0)", "P -> P"}),  # of rows and columns: tests of local kinds
    # Without a seed nobody can repeat it; with one, each device would draw the numbers of the first block.
    ("RandomNormalLike", [floats(S, V)], {}, set()),
    ("RandomNormalLike", [floats(S, V)], {"seed": 1.0}, {"P -> R"}),
    ("Dropout", [floats(S, V), np.array(0.5), np.array(True)], {}, set()),
    ("Dropout", [floats(S, V), np.array(0.5), np.array(True)], {"seed": 3}, {"P,R,R -> P"}),
    ("Dropout", [floats(S, V)], {}, {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"}),  # inference
    # Positions come in as numbers, so the sequence can be sharded; the table they index is read anywhere.
    (
        "RotaryEmbedding",
        [floats(B, 4, S, 8), floats(V, 4), floats(V, 4), indices(V, B, S)],
        {},
        {
            "S(0),R,R,S(0) -> S(0)",
            "S(1),R,R,R -> S(1)",
            "S(2),R,R,S(1) -> S(2)",
            "P,R,R,R -> P",
            "R,P,P,R -> P",
        },
    ),
    # The largest of a block need not be among the largest; which one it is counts from the first of the whole.
    ("TopK", [floats(B, S, D), ints(2)], {"axis": 1}, {"S(0),R -> S(0),S(0)", "S(2),R -> S(2),S(2)"}),
    ("ArgMax", [floats(B, S, D)], {"axis": 1}, {"S(0) -> S(0)", "S(2) -> S(2)"}),
    ("Hardmax", [floats(B, S)], {"axis": 1}, {"S(0) -> S(0)"}),
    (
        "OneHot",  # classes are counted from 0: not by shards
        [indices(V, B, S), np.array(V), floats(2)],
        {"axis": 1},
        {"S(0),R,R -> S(0)", "S(1),R,R -> S(2)", "R,R,P -> P"},
    ),
    # How many rows come out depends on data.
    ("NonZero", [flags(S, V)], {}, set()),
    ("Compress", [floats(S, D), flags(S)], {"axis": 0}, {"S(1),R -> S(1)", "P,R -> P"}),
    ("Unique", [indices(5, S)], {}, set()),
    # The nearest row lies in the block, twice as many rows make twice as many; in between, a neighbour's row counts.
    (
        "Resize",
        [floats(8, 12, 6, 6), None, None, ints(8, 12, 12, 12)],
        {"mode": "nearest"},
        {*(f"S({dim}),R,R,R -> S({dim}) scaling #3[{dim}]" for dim in range(4)), "P,R,R,R -> P"},
    ),
    (
        "Resize",
        [floats(8, 12, 6, 6), None, None, ints(8, 12, 12, 12)],
        {"mode": "linear"},
        {*(f"S({dim}),R,R,R -> S({dim}) scaling #3[{dim}]" for dim in range(2)), "P,R,R,R -> P"},
    ),
    # Rows are put at the ends of the whole.
    ("Pad", [floats(B, S, D), ints(0, 1, 0, 0, 1, 0)], {}, {"S(0),R -> S(0)", "S(2),R -> S(2)", "P,R -> P"}),
    (
        "Pad",
        [floats(B, S, D), ints(0, 1, 0, 0, 1, 0)],
        {"mode": "reflect"},
        {"S(0),R -> S(0)", "S(2),R -> S(2)", "P,R -> P"},
    ),
    (
        "ReverseSequence",
        [floats(S, B, D), indices(S, B)],
        {"time_axis": 0, "batch_axis": 1},
        {"S(1),S(0) -> S(1)", "S(2),R -> S(2)", "P,R -> P"},
    ),
    # The image is read anywhere; each point of the grid is looked up by itself.
    (
        "GridSample",
        [floats(4, 6, 8, 8), floats(4, 8, 12, 2)],
        {"mode": "linear"},
        {"S(0),S(0) -> S(0)", "S(1),R -> S(1)", "R,S(1) -> S(2)", "R,S(2) -> S(3)", "P,R -> P"},
    ),
    # 4 channels make a square: those of one square lie a quarter apart, or side by side.
    (
        "DepthToSpace",
        [floats(B, 48, 8, 20)],
        {"blocksize": 2},
        {"S(0) -> S(0)", "S(1/4) -> S(1)", "S(2) -> S(2)", "S(3) -> S(3)", "P -> P"},
    ),
    (
        "DepthToSpace",
        [floats(B, 48, 8, 20)],
        {"blocksize": 2, "mode": "CRD"},
        {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)", "S(3) -> S(3)", "P -> P"},
    ),
    (
        "SpaceToDepth",
        [floats(B, 36, 8, 20)],
        {"blocksize": 2},
        {"S(0) -> S(0)", "S(1) -> S(1/4)", "S(2) -> S(2)", "S(3) -> S(3)", "P -> P"},
    ),
    # The whole again behind the whole: each half of the result is sharded by itself.
    ("Tile", [floats(S, V), ints(2, 1)], {}, {"S(0),R -> S(0/2)", "S(1),R -> S(1)", "P,R -> P"}),
    # From the last row to the first: the blocks would come in the wrong order. Every second row: in the right one.
    (
        "Slice",
        [floats(B, S, D), ints(-1), ints(-(2**31)), ints(1), ints(-1)],
        {},
        {"S(0),R,R,R,R -> S(0)", "S(2),R,R,R,R -> S(2)", "P,R,R,R,R -> P"},
    ),
    (
        "Slice",
        [floats(B, V, D), ints(0), ints(V), ints(1), ints(2)],
        {},
        {*(f"S({dim}),R,R,R,R -> S({dim})" for dim in range(3)), "P,R,R,R,R -> P"},
    ),
    # A window over channels has neighbours.
    (
        "LRN",
        [floats(B, S, 6, 6)],
        {"size": 3, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
        {"S(0) -> S(0)", "S(2) -> S(2)", "S(3) -> S(3)"},
    ),
    # One step after the other, in the order of time.
    ("LSTM", [floats(S, B, D), floats(1, 32, D), floats(1, 32, 8)], {"hidden_size": 8}, {"S(1),R,R -> S(2)"}),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "expected"),
    # onnx's reference needs seconds for a handful of points of a grid.
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] == "GridSample" else []) for case in POSITIONS],
    ids=[f"{case[0]}-{i}" for i, case in enumerate(POSITIONS)],
)
def test_what_depends_on_a_position_is_not_sharded_along_it(
    kind: str, inputs: Sequence[Input], attrs: dict[str, Any], expected: set[str]
) -> None:
    """The strategies with shards and sums are those that follow, and hold on axes of 2, 3 and 4."""
    graph, op = single_op(kind, inputs, 2 if kind == "TopK" else 1, **attrs)

    rule = discover(graph).of(op)

    placed = [s for s in rule.strategies[1:] if all(p == Partial() for p in s.inputs if isinstance(p, Partial))]
    assert {str(s) for s in placed if s.local is None} == expected
    data = draw_all(inputs, seed=5)
    outputs = Executor().run(op, data, graph.opset)
    for strategy in placed:
        for size in (2, 3, 4):
            if fits_axis(op, strategy, data, outputs, size):
                check_strategy(op, strategy, data, graph.opset, size)

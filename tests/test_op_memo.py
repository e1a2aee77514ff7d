"""The cache of op strategies and seconds changes no result."""

from dataclasses import replace
from functools import partial
from itertools import zip_longest

import numpy as np
import pytest

from autopar.cost import ALONE, Fused
from autopar.formulate.op_memo import OpCache
from autopar.formulate.op_strategies import IntArray, options
from autopar.ir.graph import Op
from tests.formulations import COSTS, tables

NAMES = ("gpt2", "mixtral-8x7b")


def _same(first: tuple[IntArray | None, ...], second: tuple[IntArray | None, ...]) -> bool:
    pairs = zip_longest(first, second)
    return all(
        one is other or (one is not None and other is not None and np.array_equal(one, other)) for one, other in pairs
    )


@pytest.mark.parametrize("name", NAMES)
def test_cached_strategies_equal_those_listed_per_op(name: str) -> None:
    """Strategies listed once per signature equal the strategies listed for each op."""
    found = tables(name)
    graph, free = found.folded.graph, found.folded.free
    shared = OpCache(graph, found.mesh, COSTS, free)
    ops = [op for kind in found.folded.kinds for op in kind.ops]

    several = [shared.options(op, found.meaning.strategies(op)) for op in ops]

    for op, own in zip(ops, several, strict=True):
        alone = options(graph, op, found.meaning.strategies(op), found.mesh, free)
        assert own.on_one_axis == alone.on_one_axis
        assert _same(own.inputs, alone.inputs)
        assert _same(own.outputs, alone.outputs)
        assert _same(own.local_inputs, alone.local_inputs)
        assert _same(own.local_outputs, alone.local_outputs)
        assert _same((own.combined, own.local_kinds), (alone.combined, alone.local_kinds))
    assert len({id(own) for own in several}) < len(ops)


def test_seconds_of_different_ops_are_separate() -> None:
    """Ops with equal strategies but another kind, other operands, bytes or attributes have separate seconds."""
    found = tables("gpt2")
    choices = found.nodes[0].options
    assert choices is not None
    shared = OpCache(found.folded.graph, found.mesh, COSTS, found.folded.free)
    relu, drop = Op("a", "Relu", ("x",), ("y",)), Op("b", "Relu", ("x",), ("",))
    asked = [
        (relu, (2.0,), ALONE),
        (drop, (2.0,), ALONE),
        (replace(relu, kind="Neg"), (2.0,), ALONE),
        (replace(relu, attrs=(("alpha", 1),)), (2.0,), ALONE),
        (relu, (4.0,), ALONE),
        (relu, (2.0,), Fused(unread=frozenset({0}))),
    ]

    seconds = [
        float(shared.seconds(op, choices, sizes, fused, partial(np.full, 1, float(number)))[0])
        for number, (op, sizes, fused) in enumerate(asked)
    ]

    assert seconds == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

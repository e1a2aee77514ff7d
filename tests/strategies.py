"""What a valid input is, as hypothesis strategies."""

import math

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.problem import FORBIDDEN, Limit, Problem, Usage


@st.composite
def problems(draw: st.DrawFn, *, max_nodes: int = 6, max_strategies: int = 4, limited: bool | None = None) -> Problem:
    """Draw a small problem: any graph, parallel edges, weights, forbidden entries, several usages and limits.

    Args:
        draw: Given by hypothesis.
        max_nodes: Nodes at most.
        max_strategies: Strategies of a node at most.
        limited: Whether there is a limit; drawn by default.
    """
    whole = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forbidden = draw(st.sampled_from([0.0, 0.0, 0.2, 0.5]))
    scale = draw(st.sampled_from([1e-6, 1.0, 1e3]))

    def costs(*shape: int) -> NDArray[np.int64] | NDArray[np.float64]:
        values = rng.integers(0, 20, shape)
        barred = rng.random(shape) < forbidden
        if whole:
            return np.where(barred, FORBIDDEN, values)
        return np.where(barred, math.inf, values * scale * rng.choice([1.0, 1.0, rng.random()], shape))

    sizes = draw(st.lists(st.integers(1, max_strategies), min_size=1, max_size=max_nodes))
    pairs = [(a, b) for a in range(len(sizes)) for b in range(len(sizes)) if a != b]
    ends = draw(st.lists(st.sampled_from(pairs), max_size=2 * len(sizes))) if pairs else []
    edges = [(a, b, costs(sizes[a], sizes[b]), draw(st.sampled_from([1, 1, 2, 0]))) for a, b in ends]
    usages = []
    for node in draw(st.lists(st.integers(0, len(sizes) - 1), max_size=len(sizes) + 2)):
        start = draw(st.integers(0, 6))
        usages.append(Usage(node, start, start + draw(st.integers(0, 5)), rng.integers(0, 9, sizes[node])))
    if not (draw(st.booleans()) if limited is None else limited):
        return Problem.build([costs(size) for size in sizes], edges, usages=usages)
    first, second = (draw(st.integers(0, 9 * len(sizes))) for _ in range(2))
    several = [Limit(first, 0, 4), Limit(second, draw(st.integers(2, 5)), 9)]
    limit = several if draw(st.booleans()) else first
    return Problem.build([costs(size) for size in sizes], edges, usages=usages, limit=limit)


@st.composite
def tied_problems(draw: st.DrawFn) -> Problem:
    """Draw problems in which some nodes follow others: edges forbidden but for one partner of each strategy."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    costs = st.integers(0, 20)
    edges = []
    for _ in range(draw(st.integers(1, 7))):
        a, b = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=2, max_size=2, unique=True))
        table = np.array(draw(st.lists(costs, min_size=sizes[a] * sizes[b], max_size=sizes[a] * sizes[b])))
        table = table.reshape(sizes[a], sizes[b])
        if draw(st.booleans()):
            partner = draw(st.lists(st.integers(0, sizes[b] - 1), min_size=sizes[a], max_size=sizes[a]))
            table = np.where(np.arange(sizes[b]) == np.array(partner)[:, None], table, FORBIDDEN)
        edges.append((a, b, table))
    amounts = [draw(st.lists(costs, min_size=size, max_size=size)) for size in sizes]
    spans = [sorted(draw(st.lists(st.integers(0, 4), min_size=2, max_size=2))) for _ in sizes]
    usages = [
        Usage(node, start, end, np.array(used))
        for node, (used, (start, end)) in enumerate(zip(amounts, spans, strict=True))
    ]
    node_costs = [draw(st.lists(costs, min_size=size, max_size=size)) for size in sizes]
    return Problem.build(node_costs, edges, usages=usages, limit=draw(st.integers(5, 80)))

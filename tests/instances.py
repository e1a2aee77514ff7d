"""Synthetic problems shaped like the sharding of a training step, for speed and for tests at real sizes."""

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Problem, Usage

MATMUL = (("R", "R", "R"), ("S0", "R", "S0"), ("R", "S1", "S1"), ("S1", "S0", "P"))
"""Strategies of a product on one mesh axis: activations, weight, output."""
POINTWISE = (("R", "R"), ("S0", "S0"), ("S1", "S1"))
SHARDS = ("R", "S0", "S1")


def reshard(source: tuple[str, ...], target: tuple[str, ...], size: float, mesh: tuple[int, ...]) -> float:
    """Return the seconds to change the placement of `size` bytes, axis by axis; nothing can become a partial sum."""
    seconds = 0.0
    for i, (a, b, n) in enumerate(zip(source, target, mesh, strict=True)):
        local = size
        for j, (p, m) in enumerate(zip(source, mesh, strict=True)):
            local /= m if j != i and p.startswith("S") else 1
        speed = 300e9 if i else 40e9
        if a == b or (a == "R" and b != "P"):
            continue
        if b == "P":
            return np.inf
        factor = {("P", "R"): 2.0, ("P", "S0"): 1.0, ("P", "S1"): 1.0}.get((a, b), 1.0 if b == "R" else 1.0 / n)
        seconds += 1e-5 + factor * local * (n - 1) / n / speed
    return seconds


def training_step(
    layers: int, *, mesh: tuple[int, ...] = (8, 8), tightness: float | None = None, seed: int = 0
) -> Problem:
    """Return a chain of products with residual connections, its mirrored backward pass, and updates.

    Args:
        layers: Residual blocks of two products each; about 21 nodes per block.
        mesh: Size of each mesh axis; strategies are products over axes.
        tightness: Limit between the least (0) and greatest (1) possible peak; None for no limit.
        seed: Of the sizes.
    """
    rng = np.random.default_rng(seed)
    kinds: dict[str, list[tuple[tuple[str, ...], ...]]] = {
        "matmul": [tuple(zip(*s, strict=True)) for s in product(MATMUL, repeat=len(mesh))],
        "pointwise": [tuple(zip(*s, strict=True)) for s in product(POINTWISE, repeat=len(mesh))],
        "state": [(s, s) for s in product(SHARDS, repeat=len(mesh))],
    }
    costs: list[NDArray[Any]] = []
    kind_of: list[str] = []
    spans: list[tuple[int, float, int, int]] = []
    edges: list[tuple[int, int, NDArray[Any]]] = []
    tables: dict[tuple[str, str, int, float], NDArray[Any]] = {}
    clock = 0

    def shards(placement: tuple[str, ...]) -> float:
        return float(np.prod([m for p, m in zip(placement, mesh, strict=True) if p.startswith("S")]))

    def node(kind: str, seconds: float) -> int:
        nonlocal clock
        clock += 1
        kind_of.append(kind)
        work = []
        for s in kinds[kind]:
            split = np.prod([m for axis, m in enumerate(mesh) if any(p[axis] != "R" for p in s)]) if seconds else 1.0
            work.append(seconds / split + (2e-6 if seconds else 0.0))
        costs.append(np.array(work))
        return len(costs) - 1

    def edge(source: int, target: int, operand: int, size: float) -> None:
        key = (kind_of[source], kind_of[target], operand, size)
        if key not in tables:
            tables[key] = np.array(
                [[reshard(s[-1], t[operand], size, mesh) for t in kinds[key[1]]] for s in kinds[key[0]]]
            )
        edges.append((source, target, tables[key]))

    size = 2.0**28
    residual = node("pointwise", 1e-4)
    saved: list[tuple[int, int, int, float, float]] = []
    for _ in range(layers):
        x = residual
        for _ in range(2):
            weight_size = float(2.0 ** rng.integers(24, 29))
            weight = node("state", 0.0)
            product_node = node("matmul", 6e-2)
            edge(x, product_node, 0, size)
            edge(weight, product_node, 1, weight_size)
            act = node("pointwise", 3e-4)
            edge(product_node, act, 0, size)
            saved.append((x, weight, act, size, weight_size))
            spans.append((x, size, clock, -1))
            x = act
        joined = node("pointwise", 2e-4)
        edge(x, joined, 0, size)
        edge(residual, joined, 0, size)
        residual = joined
    gradient = residual
    for index, (x, weight, act, size, weight_size) in reversed(list(enumerate(saved))):
        back = node("pointwise", 4e-4)
        edge(gradient, back, 0, size)
        edge(act, back, 0, size)
        by_input = node("matmul", 6e-2)
        edge(back, by_input, 0, size)
        edge(weight, by_input, 1, weight_size)
        by_weight = node("matmul", 6e-2)
        edge(x, by_weight, 0, size)
        edge(back, by_weight, 1, size)
        update = node("state", 0.0)
        edge(by_weight, update, 0, weight_size)
        edge(update, weight, 0, weight_size)
        spans.append((update, 6 * weight_size, 0, -2))
        spans.append((weight, weight_size, 0, -2))
        start = spans[index][2]
        spans[index] = (x, size, start, clock)
        gradient = by_input
    usages = []
    for user, bytes_, start, end in spans:
        amounts = np.array([bytes_ / shards(s[-1]) for s in kinds[kind_of[user]]])
        usages.append(Usage(user, start, clock + 1 if end == -2 else end, amounts))
    limit = None
    if tightness is not None:
        peaks = []
        for pick in (np.min, np.max):
            change = np.zeros(clock + 2)
            for u in usages:
                change[u.start] += pick(u.amounts)
                change[u.end] -= pick(u.amounts)
            peaks.append(float(np.cumsum(change).max()))
        limit = peaks[0] + tightness * (peaks[1] - peaks[0])
    return Problem.build(costs, edges, usages=usages, limit=limit, name=f"training-step-{layers}")

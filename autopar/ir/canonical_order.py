"""A canonical order of ops, which depends on the structure of a graph and not on the order it was written in.

Ops without a trained tensor upstream (masks, tables of angles, preprocessing) come first. The others follow in
depth-first post-order from the deepest output: as every layer of a chain depends on the whole layer before it, the
ops of one layer end up side by side, and in the same order in each layer.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from autopar.ir.graph import Graph, Op, Role


@dataclass(frozen=True, slots=True)
class Ordered:
    """Ops in canonical order.

    Attributes:
        early: Ops that need no trained tensor.
        core: The others.
    """

    early: tuple[Op, ...]
    core: tuple[Op, ...]


def canonical_order(graph: Graph, ops: Sequence[Op], first: Iterable[str] = ()) -> Ordered:
    """Return ops of a graph in canonical order.

    Args:
        graph: The graph.
        ops: Ops to order, in some topological order, closed under producers.
        first: Values to be computed before all else.
    """
    trained = {state.input for state in graph.states if state.role is Role.PARAMETER}
    weighted = downstream(ops, trained or set(graph.inputs))
    core = [op for op in ops if not weighted.isdisjoint(op.outputs)]
    producer = {name: index for index, op in enumerate(core) for name in op.outputs if name}
    inputs = [tuple(dict.fromkeys(producer[name] for name in op.inputs if name in producer)) for op in core]

    roots = [producer[name] for name in first if name in producer]
    outputs = [
        producer[name] for name in (*graph.outputs, *(state.output for state in graph.states)) if name in producer
    ]
    depths = _depths(inputs)
    main = max(outputs, key=lambda index: depths[index], default=len(core) - 1)
    order, seen = _post_order(inputs, [*roots, main] if core else [], set())
    anchors = {index: position for position, index in enumerate(order)}
    # What the deepest output does not need (results on the side, dead ops) goes right behind what it needs.
    aside: dict[int, list[int]] = {}
    extra, _ = _post_order(inputs, [*outputs, *range(len(core))], seen)
    for index in extra:
        anchor = max((anchors[source] for source in inputs[index]), default=-1)
        anchors[index] = anchor
        aside.setdefault(anchor, []).append(index)
    merged = list(aside.get(-1, ()))
    for position, index in enumerate(order):
        merged.append(index)
        merged += aside.get(position, ())
    early = tuple(op for op in ops if weighted.isdisjoint(op.outputs))
    return Ordered(early, tuple(core[index] for index in merged))


def downstream(ops: Sequence[Op], sources: Set[str]) -> set[str]:
    """Return `sources` and all values computed from them."""
    reached = set(sources)
    for op in ops:
        if not reached.isdisjoint(op.inputs):
            reached.update(name for name in op.outputs if name)
    return reached


def _depths(inputs: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the length of the longest path that ends at each op."""
    depths: list[int] = []
    for sources in inputs:
        depths.append(1 + max((depths[source] for source in sources), default=0))
    return depths


def _post_order(inputs: Sequence[tuple[int, ...]], roots: Sequence[int], seen: set[int]) -> tuple[list[int], set[int]]:
    """Return ops in post-order of a depth-first walk along `inputs`, without those in `seen`; and the grown `seen`."""
    order: list[int] = []
    seen = set(seen)
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(inputs[root]))]
        while stack:
            index, sources = stack[-1]
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    stack.append((source, iter(inputs[source])))
                    break
            else:
                order.append(index)
                stack.pop()
    return order, seen

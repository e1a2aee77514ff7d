"""Whether an op runs by its rule: on every mesh axis by one of its strategies, its numbers divided accordingly."""

from collections.abc import Sequence
from itertools import product

from autopar.discover import Rule, Strategy
from autopar.ir.graph import Attr, Graph, Op
from autopar.program.records import Compute, Operand
from autopar.sharding import Axis, Mesh, Placement, Shard

Halos = frozenset[tuple[Axis, int, int, int, str]]
"""Rows of neighbours that are around a value: axis, dim, rows before and after, fill."""


def strategy_problem(
    compute: Compute, original: Op, rule: Rule, halos: Sequence[Halos], graph: Graph, mesh: Mesh
) -> str:
    """Return why an op does not run by its rule; "" if it does.

    Args:
        compute: The op as a device runs it.
        original: The op of the graph.
        rule: Its rule.
        halos: Per input, what was put around it.
        graph: Holds the constants of the op.
        mesh: The devices.
    """
    told = compute.start.axes if compute.start is not None else ()
    per_axis = []
    for position, axis in enumerate(mesh.axes):
        inputs, outputs = _on_axis(compute.inputs, position), _on_axis(compute.outputs, position)
        around = {(index, *rows) for index, found in enumerate(halos) for owner, *rows in found if owner == axis}
        fitting = [
            strategy
            for strategy in rule.strategies
            if _fits(strategy, (*inputs, *outputs))
            and around == {(halo.input, halo.dim, halo.before, halo.after, halo.fill) for halo in strategy.halos}
            and (strategy.local is not None) == (axis in told)
        ]
        if not fitting:
            form = f"{','.join(map(_text, inputs))} -> {','.join(map(_text, outputs))}"
            rows = f" with {len(around)} halos" if around else ""
            return (
                f"on axis {axis.name!r} op {original.name!r} runs as {form}{rows}, which is no strategy of {rule.kind}"
            )
        per_axis.append(fitting)
    if any(_is_local(compute, _divided(original, strategies, graph, mesh)) for strategies in product(*per_axis)):
        return ""
    return f"op {original.name!r} has other numbers than its shards need: {dict(compute.op.attrs)}, {compute.constants}"


def _on_axis(operands: Sequence[Operand | None], position: int) -> tuple[Placement | None, ...]:
    return tuple(None if operand is None else operand.placements[position] for operand in operands)


def _text(placement: Placement | None) -> str:
    return "_" if placement is None else str(placement)


def _fits(strategy: Strategy, placements: Sequence[Placement | None]) -> bool:
    """Whether these are the placements of a strategy.

    All of its sharded dims may be cut into more chunks alike, or lie in uneven blocks if it holds on these.
    """
    factors: set[float] = set()
    for found, wanted in zip(placements, (*strategy.inputs, *strategy.outputs), strict=True):
        if isinstance(found, Shard) and isinstance(wanted, Shard) and found.dim == wanted.dim:
            if found.whole and not strategy.uneven:
                return False
            factors.add(found.chunks / wanted.chunks)
        elif found is not None and found != wanted:
            return False
    return factors <= {1.0} or (strategy.cyclic and len(factors) == 1 and factors.pop().is_integer())


_Local = tuple[str, dict[str, Attr], dict[int, tuple[int, ...]]]
"""Kind, attributes and contents of constant inputs of an op on one device."""


def _is_local(compute: Compute, local: _Local | None) -> bool:
    return local == (compute.op.kind, dict(compute.op.attrs), dict(compute.constants))


def _divided(op: Op, strategies: Sequence[Strategy], graph: Graph, mesh: Mesh) -> _Local | None:
    """Return what a device runs by one strategy per axis; None if a number is not divisible."""
    kind, attrs = op.kind, dict(op.attrs)
    contents: dict[int, list[int]] = {}
    for strategy, axis in zip(strategies, mesh.axes, strict=True):
        for number in strategy.scaled:
            if isinstance(number.source, int):
                held = graph.constants[op.inputs[number.source]]
                entries = contents.setdefault(number.source, [int(entry) for entry in held.reshape(-1)])
            else:
                entries = _entries(attrs[number.source])
            if entries[number.entry] % axis.size:
                return None
            entries[number.entry] //= axis.size
            if isinstance(number.source, str):
                attrs[number.source] = _like(attrs[number.source], entries)
        for other in strategy.replaced:
            entries = _entries(attrs[other.attr])
            entries[other.entry] = other.value
            attrs[other.attr] = _like(attrs[other.attr], entries)
        if strategy.local is not None:
            kind = strategy.local.kind
            attrs["size"] = graph.values[op.inputs[strategy.local.input]].shape[strategy.local.dim]
    return kind, attrs, {index: tuple(content) for index, content in contents.items()}


def _entries(value: Attr) -> list[int]:
    return [entry for entry in (value if isinstance(value, tuple) else (value,)) if isinstance(entry, int)]


def _like(value: Attr, entries: Sequence[int]) -> Attr:
    return tuple(entries) if isinstance(value, tuple) else entries[0]

"""The levels of ZeRO as pairs of decisions that must not meet, parameter by parameter and axis by axis.

On one axis a parameter has the level

    3   if it is stored split and used whole: it is gathered before its use
    2   if it is stored whole and its gradients are summed split
    1   if it is stored whole, its gradients are summed whole and its update runs split
    0   if all of these are whole

and none if it is stored and used split, as tensor parallelism has it. So each level is a pair: (stored split, used
whole), (summed split, stored whole), (summed whole, updated split), (updated whole, stored whole). What cannot be
divided over an axis is whole there, whatever the level.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.folding.fold import Producer
from autopar.folding.graph_facts import states_of
from autopar.formulate.tables import Decision, FloatArray, Forbidden, Slot, Tables
from autopar.ir.graph import Role

LEVELS = frozenset(range(4))
"""All there are (Rajbhandari et al., 2020): nothing, the update and its state, sums of gradients, parameters."""

_GATHERS = (Slot.FORWARD_GATHER, Slot.BACKWARD_GATHER)

Digits = NDArray[np.int64]


def keep_levels(tables: Tables, levels: frozenset[int], axis: int | None = None) -> Tables:
    """Return the tables with every pair of decisions forbidden that makes another level, on one axis or on all."""
    pairs = list(_pairs(tables, LEVELS - levels, axis))
    return replace(tables, forbidden=(*tables.forbidden, *pairs))


def _pairs(tables: Tables, unwanted: frozenset[int], axis: int | None) -> Iterator[Forbidden]:
    """Yield what makes an unwanted level."""
    axes = slice(None) if axis is None else slice(axis, axis + 1)
    if 3 in unwanted:
        yield from _gathers(tables, axes)
    ops = {(node.kind, node.position): index for index, node in enumerate(tables.nodes) if node.options is not None}
    parameters = {node.name: index for index, node in enumerate(tables.nodes) if node.decision is Decision.PARAMETER}
    made: dict[str, dict[Role, Producer]] = {}
    for name, state in states_of(tables.folded).written.items():
        producer = tables.folded.by_value.get(name)
        if producer is not None and state.owner in parameters:
            made.setdefault(state.owner, {})[state.role] = producer
    for name, parameter in parameters.items():
        own = made.get(name, {})
        if not {Role.GRADIENT, Role.PARAMETER} <= own.keys():
            continue
        total, update = own[Role.GRADIENT], own[Role.PARAMETER]
        total_node, update_node = ops[total.kind, total.position], ops[update.kind, update.position]
        rank = _rank(tables, name)
        sums = _split(tables, tables.nodes[total_node].outputs(total.slot), rank)
        updates = _split(tables, tables.nodes[update_node].outputs(update.slot), rank)
        stored = _split(tables, tables.nodes[parameter].outputs(0), rank)
        whole = ~stored & _could_be_split(tables, tables.nodes[parameter].outputs(0), rank)
        sums, updates, stored, whole = (own[:, axes] for own in (sums, updates, stored, whole))
        if 2 in unwanted:
            yield Forbidden(total_node, parameter, _meet(sums, ~stored))
        if 1 in unwanted:
            yield Forbidden(total_node, update_node, _meet(~sums, updates))
        if 0 in unwanted:
            yield Forbidden(update_node, parameter, _meet(~updates, whole))


def _gathers(tables: Tables, axes: slice) -> Iterator[Forbidden]:
    """Yield the changes from a split parameter to a whole one in front of what reads it."""
    for edge in tables.edges:
        if edge.slot not in _GATHERS:
            continue
        rank = _rank(tables, edge.value)
        first, second = tables.nodes[edge.first], tables.nodes[edge.second]
        if second.options is None:
            read = second.outputs(0)
        else:
            placed = second.options.inputs[edge.consumer]
            assert placed is not None, edge.value
            read = placed
        stored, used = (_split(tables, numbers, rank)[:, axes] for numbers in (first.outputs(0), read))
        yield Forbidden(edge.first, edge.second, _meet(stored, ~used))


def _rank(tables: Tables, name: str) -> int:
    return len(tables.folded.graph.values[name].shape)


def _split(tables: Tables, numbers: Digits, rank: int) -> NDArray[np.bool_]:
    """Return which axes of more than one device split a value, (strategies, axes)."""
    axes = tables.mesh.axes
    digits = [numbers // (rank + 2) ** (len(axes) - 1 - axis) % (rank + 2) for axis in range(len(axes))]
    return np.stack([own >= 2 if axis.size > 1 else np.zeros(len(own), dtype=bool)
                     for own, axis in zip(digits, axes, strict=True)], axis=1)  # fmt: skip


def _could_be_split(tables: Tables, numbers: Digits, rank: int) -> NDArray[np.bool_]:
    """Return where a value is whole on an axis though it could be split there with all else as it is."""
    num_axes, base = len(tables.mesh.axes), rank + 2
    listed = set(numbers.tolist())
    found = np.zeros((len(numbers), num_axes), dtype=bool)
    for axis, own in enumerate(tables.mesh.axes):
        if own.size == 1:
            continue
        unit = base ** (num_axes - 1 - axis)
        for row, number in enumerate(numbers.tolist()):
            rest = number - number // unit % base * unit
            found[row, axis] = any(rest + digit * unit in listed for digit in range(2, base))
    return found


def _meet(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> FloatArray:
    """Return infinity for the pairs of strategies of which both hold on some axis, (strategies of first, of second)."""
    return np.where((first[:, None, :] & second[None, :, :]).any(axis=2), np.inf, 0.0)

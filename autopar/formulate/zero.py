"""ZeRO levels (Rajbhandari et al., 2020, arXiv:1910.02054) as forbidden pairs of decisions, per parameter and axis.

    level   stored   used     gradients accumulated   update
    0       whole    whole    whole                   whole
    1       whole    whole    whole                   sharded
    2       whole    whole    sharded                 sharded
    3       sharded  whole    sharded                 sharded

A parameter that is stored and used sharded (tensor parallelism) has no level. Each level is detected by one pair: 3 by
(stored sharded, used whole), 2 by (accumulated sharded, stored whole), 1 by (accumulated whole, updated sharded), 0 by
(updated whole, stored whole). A tensor that an axis cannot divide is whole on that axis at any level. A frozen
parameter has neither gradient nor update, so levels 0, 1 and 2 are one, detected by (stored whole, used whole).
"""

from collections.abc import Iterator, Set
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.folding.fold import Producer
from autopar.folding.graph_facts import row_routings, states_of
from autopar.formulate.tables import Decision, FloatArray, Forbidden, Slot, Tables
from autopar.ir.graph import Role

LEVELS = frozenset(range(4))
"""All levels: 0 shards nothing, 1 the update and its optimizer state, 2 also gradient sums, 3 also parameters."""

_GATHERS = (Slot.FORWARD_GATHER, Slot.BACKWARD_GATHER)

Digits = NDArray[np.int64]


def keep_levels(tables: Tables, levels: frozenset[int], axis: int | None = None) -> Tables:
    """Return the tables with every pair forbidden that makes another level, on one axis or on all axes."""
    pairs = list(_forbidden_pairs(tables, LEVELS - levels, axis))
    return replace(tables, forbidden=(*tables.forbidden, *pairs))


def _forbidden_pairs(tables: Tables, unwanted: frozenset[int], axis: int | None) -> Iterator[Forbidden]:
    """Yield the forbidden pairs of the unwanted levels."""
    axes = slice(None) if axis is None else slice(axis, axis + 1)
    if 3 in unwanted:
        yield from _forbidden_uses(tables, axes, None)
    ops = {(node.kind, node.position): index for index, node in enumerate(tables.nodes) if node.options is not None}
    parameters = {node.name: index for index, node in enumerate(tables.nodes) if node.decision is Decision.PARAMETER}
    producers: dict[str, dict[Role, Producer]] = {}
    for name, state in states_of(tables.folded).written.items():
        producer = tables.folded.by_value.get(name)
        if producer is not None and state.owner in parameters:
            producers.setdefault(state.owner, {})[state.role] = producer
    trained = {name for name in parameters if {Role.GRADIENT, Role.PARAMETER} <= producers.get(name, {}).keys()}
    if LEVELS - {3} <= unwanted:
        yield from _forbidden_uses(tables, axes, parameters.keys() - trained)
    for name in sorted(trained):
        parameter, own = parameters[name], producers[name]
        total, update = own[Role.GRADIENT], own[Role.PARAMETER]
        total_node, update_node = ops[total.kind, total.position], ops[update.kind, update.position]
        rank = _rank(tables, name)
        sums = _is_split(tables, tables.nodes[total_node].outputs(total.slot), rank)
        updates = _is_split(tables, tables.nodes[update_node].outputs(update.slot), rank)
        stored = _is_split(tables, tables.nodes[parameter].outputs(0), rank)
        whole = ~stored & _could_be_split(tables, tables.nodes[parameter].outputs(0), rank)
        sums, updates, stored, whole = (own[:, axes] for own in (sums, updates, stored, whole))
        if 2 in unwanted:
            yield Forbidden(total_node, parameter, _forbid_common_axis(sums, ~stored))
        if 1 in unwanted:
            yield Forbidden(total_node, update_node, _forbid_common_axis(~sums, updates))
        if 0 in unwanted:
            yield Forbidden(update_node, parameter, _forbid_common_axis(~updates, whole))


def _forbidden_uses(tables: Tables, axes: slice, frozen: Set[str] | None) -> Iterator[Forbidden]:
    """Yield the pairs of how a parameter is stored and how a pass uses it: level 3, or the lower ones of frozen ones.

    Args:
        tables: The placement problem.
        axes: Axes that are looked at.
        frozen: Parameters that must not be stored whole where they are used whole; None to forbid that a sharded
            parameter is gathered before an op that reads it whole.
    """
    rows = row_routings(tables.folded)  # hidden like gathers, but no parameters
    for edge in tables.edges:
        if edge.slot not in _GATHERS or (frozen is not None and edge.value not in frozen) or edge.value in rows:
            continue
        rank = _rank(tables, edge.value)
        first, second = tables.nodes[edge.first], tables.nodes[edge.second]
        if second.options is None:
            read = second.outputs(0)
        else:
            placed = second.options.inputs[edge.consumer]
            assert placed is not None, edge.value
            read = placed
        stored, used = (_is_split(tables, numbers, rank) for numbers in (first.outputs(0), read))
        if frozen is not None:
            if first.decision is not Decision.PARAMETER:  # a copy that several ops share has been gathered
                continue
            stored = ~stored & _could_be_split(tables, first.outputs(0), rank)
        yield Forbidden(edge.first, edge.second, _forbid_common_axis(stored[:, axes], ~used[:, axes]))


def _rank(tables: Tables, name: str) -> int:
    return len(tables.folded.graph.values[name].shape)


def _is_split(tables: Tables, numbers: Digits, rank: int) -> NDArray[np.bool_]:
    """Return which axes of more than one device split a value, (strategies, axes)."""
    axes = tables.mesh.axes
    digits = [numbers // (rank + 2) ** (len(axes) - 1 - axis) % (rank + 2) for axis in range(len(axes))]
    return np.stack([own >= 2 if axis.size > 1 else np.zeros(len(own), dtype=bool)
                     for own, axis in zip(digits, axes, strict=True)], axis=1)  # fmt: skip


def _could_be_split(tables: Tables, numbers: Digits, rank: int) -> NDArray[np.bool_]:
    """Return where a value is whole on an axis that could split it, its other axes unchanged; (strategies, axes)."""
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


def _forbid_common_axis(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> FloatArray:
    """Return (S of first, S of second) costs: infinity where both conditions hold on one axis."""
    return np.where((first[:, None, :] & second[None, :, :]).any(axis=2), np.inf, 0.0)

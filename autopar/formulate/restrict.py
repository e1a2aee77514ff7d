"""Tables with some strategies of some decisions left out."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.tables import Bytes, Edge, Forbidden, IntArray, Node, Outside, Tables

Mask = NDArray[np.bool_]


def narrow(tables: Tables, masks: Mapping[int, Mask]) -> Tables | None:
    """Return the tables with the strategies that masks leave; None if a decision has none left.

    Args:
        tables: The decisions.
        masks: By index of a node, which of its strategies are left; nodes that are not named keep all.
    """
    if not all(mask.any() for mask in masks.values()):
        return None
    kept = {index: np.flatnonzero(mask) for index, mask in masks.items() if not mask.all()}
    if not kept:
        return tables

    def node(index: int, own: Node) -> Node:
        if index not in kept:
            return own
        left = kept[index]
        return replace(
            own,
            seconds=own.seconds[left],
            options=None if own.options is None else own.options.select(left),
            placements=None if own.placements is None else own.placements[left],
        )

    def rows(index: int, numbers: IntArray) -> IntArray:
        return numbers[kept[index]] if index in kept else numbers

    def pair(first: int, second: int, table: NDArray[np.float64]) -> NDArray[np.float64]:
        table = table[kept[first]] if first in kept else table
        return table[:, kept[second]] if second in kept else table

    def edge(own: Edge) -> Edge:
        if own.first not in kept and own.second not in kept:
            return own
        outside = own.outside and Outside(
            own.outside.seconds, rows(own.first, own.outside.source), rows(own.second, own.outside.target)
        )
        return replace(own, table=pair(own.first, own.second, own.table), outside=outside)

    def bytes_of(own: Bytes) -> Bytes:
        return replace(own, amounts=own.amounts[kept[own.node]]) if own.node in kept else own

    return replace(
        tables,
        nodes=tuple(node(index, own) for index, own in enumerate(tables.nodes)),
        edges=tuple(edge(own) for own in tables.edges),
        bytes=tuple(bytes_of(own) for own in tables.bytes),
        forbidden=tuple(
            Forbidden(own.first, own.second, pair(own.first, own.second, own.seconds)) for own in tables.forbidden
        ),
    )

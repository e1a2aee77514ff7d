"""Restrict tables to some strategies of some decisions.

`narrow` filters every array of the tables that the strategies index.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.tables import Bytes, Edge, Forbidden, IntArray, InterNodeSeconds, Node, Tables

Mask = NDArray[np.bool_]


def narrow(tables: Tables, masks: Mapping[int, Mask]) -> Tables | None:
    """Return the tables with only the strategies that the masks keep; None if a decision has none.

    Args:
        tables: The decisions.
        masks: Mask of kept strategies by index of a node; other nodes keep all strategies.
    """
    if not all(mask.any() for mask in masks.values()):
        return None
    kept = {index: np.flatnonzero(mask) for index, mask in masks.items() if not mask.all()}
    if not kept:
        return tables

    def node(index: int, own: Node) -> Node:
        if index not in kept:
            return own
        indices = kept[index]
        return replace(
            own,
            seconds=own.seconds[indices],
            options=None if own.options is None else own.options.select(indices),
            placements=None if own.placements is None else own.placements[indices],
        )

    def rows(index: int, numbers: IntArray) -> IntArray:
        return numbers[kept[index]] if index in kept else numbers

    def pair(first: int, second: int, table: NDArray[np.float64]) -> NDArray[np.float64]:
        table = table[kept[first]] if first in kept else table
        return table[:, kept[second]] if second in kept else table

    def edge(own: Edge) -> Edge:
        if own.first not in kept and own.second not in kept:
            return own
        outside = own.outside and InterNodeSeconds(
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

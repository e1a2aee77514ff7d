"""What equal ops of a graph have in common on one mesh: strategies, seconds, and the prices of what lies between them.

A model without repeated blocks still repeats its ops: a U-Net has a convolution of the same shapes many times over, and
every parameter is updated alike. Whatever is listed or priced here is a function of the signature of an op, so it is
computed once per signature. Equal arrays are then one array, which whoever joins tables recognises, too.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.cost import ALONE, CostModel, Fused
from autopar.cost.reshard import Reshards
from autopar.discover import Scaled, Strategy
from autopar.formulate.op_strategies import IntArray, Options, all_placements, number_inside, options
from autopar.ir.graph import Graph, Op
from autopar.sharding import Mesh

FloatArray = NDArray[np.float64]
Masks = Sequence[NDArray[np.bool_]]
Found = TypeVar("Found")


class OpCache:
    """Finds what was computed for an equal op before.

    Arrays that it returns are shared, and never to be written to.

    Args:
        graph: The graph of the ops.
        mesh: The devices.
        costs: What things cost.
        free: Values that lie wherever they are needed.
    """

    def __init__(self, graph: Graph, mesh: Mesh, costs: CostModel, free: frozenset[str]) -> None:
        self._graph, self._mesh, self._costs, self._free = graph, mesh, costs, free
        self._known: dict[Hashable, object] = {}
        self._kept: dict[int, object] = {}  # what keys speak of by identity, so that no other object gets the same
        self._numbers: dict[int, tuple[Scaled, ...]] = {}

    def options(self, op: Op, strategies: tuple[Strategy, ...], allowed: Masks | None = None) -> Options:
        """Return what an op can do on the mesh; see `op_strategies.options`."""
        names = (*op.inputs, *op.outputs)
        values = self._graph.values
        operands = tuple((values[name].shape, name in self._free) if name else None for name in names)
        numbers = tuple(number_inside(self._graph, op, number) for number in self._divided(strategies))
        key = ("options", self._id(strategies), len(op.inputs), operands, numbers, _bits(allowed))
        return self._once(key, lambda: options(self._graph, op, strategies, self._mesh, self._free, allowed))

    def selected(self, choices: Options, keep: NDArray[np.bool_]) -> Options:
        """Return those of an op's strategies that are kept."""
        if keep.all():
            return choices
        return self._once(("selected", self._id(choices), keep.tobytes()), lambda: choices.select(keep))

    def seconds(
        self,
        op: Op,
        choices: Options,
        sizes: tuple[float, ...],
        fused: Fused,
        compute: Callable[[], FloatArray],
    ) -> FloatArray:
        """Return the (S,) seconds of an op.

        Args:
            op: The op.
            choices: What it can do, as of `options`.
            sizes: Bytes per element of every operand, in memory and on the wire.
            fused: What is left to the op's own kernel.
            compute: Computes them, from the arguments and no others.
        """
        left = None if fused is ALONE else (fused.unread, fused.unwritten, fused.launches)
        absent = tuple(not name for name in (*op.inputs, *op.outputs))
        return self._once(("seconds", self._id(choices), op.kind, op.attrs, absent, sizes, left), compute)

    def elements(self, local: IntArray) -> FloatArray:
        """Return the (S,) elements of blocks of local shapes (S, rank)."""
        return self._once(("elements", self._id(local)), lambda: local.prod(axis=1, dtype=np.float64))

    def placements(
        self, shape: tuple[int, ...], chunks: tuple[int, ...], *, partial: bool, allowed: Masks | None = None
    ) -> IntArray:
        """Return the placement numbers of a value; see `op_strategies.all_placements`."""
        return self._once(
            ("placements", shape, chunks, partial, _bits(allowed)),
            lambda: all_placements(shape, chunks, self._mesh, partial=partial, allowed=allowed),
        )

    def prices(self, ways: Reshards, source: IntArray, target: IntArray) -> FloatArray:
        """Return the (S of source, S of target) seconds between two decisions' placement numbers of a value."""
        key = ("prices", self._id(ways), self._id(source), self._id(target))
        return self._once(key, lambda: ways.between(source, target))

    def places(self, ways: Reshards, numbers: IntArray) -> IntArray:
        """Return the rows and columns of ways that placement numbers of a value have."""
        return self._once(("places", self._id(ways), self._id(numbers)), lambda: ways.places[numbers])

    def _divided(self, strategies: tuple[Strategy, ...]) -> tuple[Scaled, ...]:
        """Return the numbers inside an op that some strategy divides."""
        found = self._numbers.get(self._id(strategies))
        if found is None:
            found = tuple(dict.fromkeys(number for strategy in strategies for number in strategy.scaled))
            self._numbers[id(strategies)] = found
        return found

    def _id(self, thing: object) -> int:
        """Return a number that stands for an object as long as this lives."""
        self._kept.setdefault(id(thing), thing)
        return id(thing)

    def _once(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        if key not in self._known:
            self._known[key] = compute()
        return cast(Found, self._known[key])  # keys of one kind are made in one place


def _bits(allowed: Masks | None) -> tuple[bytes, ...] | None:
    """Return masks in a form that can be compared."""
    return None if allowed is None else tuple(mask.tobytes() for mask in allowed)

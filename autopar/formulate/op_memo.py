"""Cache of the strategies, seconds and reshard costs of equal ops on one mesh.

Models without repeated blocks still repeat ops: a U-Net has many equal convolutions, and the updates of equal
parameters are equal. Listing and pricing depend only on the signature of an op, and are done once per signature. Equal
results are one array object, which later stages use to recognise equal tables.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from autopar.cost import ALONE, CostModel, Fused
from autopar.cost.collectives import Collective
from autopar.cost.reshard import Reshards
from autopar.discover import Scaled, Strategy
from autopar.formulate.op_strategies import IntArray, OpStrategies, all_placements, number_inside, options
from autopar.ir.graph import Graph, Op
from autopar.sharding import Mesh

FloatArray = NDArray[np.float64]
Masks = Sequence[NDArray[np.bool_]]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False)
class ReshardParts:
    """Prices of reshards in two parts: collectives that run in chunks beside products, and those that run whole.

    Attributes:
        whole: (S of source, S of target) seconds of the latter; infinity where there is no way.
        chunked: Seconds of the former.
        whole_outside: Those of `whole` that a link between nodes is busy.
        chunked_outside: Those of `chunked` that a link between nodes is busy.
    """

    whole: FloatArray
    chunked: FloatArray
    whole_outside: FloatArray
    chunked_outside: FloatArray

    @classmethod
    def of(
        cls,
        ways: Reshards,
        source: IntArray,
        target: IntArray,
        chunked: Set[Collective],
        leaving: tuple[bool, ...],
    ) -> "ReshardParts":
        """Split the prices of the reshards between placement numbers; arguments are as of `OpCache.parts`."""
        prices, between = ways.between(source, target), ways.outside[np.ix_(ways.places[source], ways.places[target])]
        parts = ways.seconds_of(chunked, source, target, (True,) * len(leaving))
        outside = ways.seconds_of(chunked, source, target, leaving)
        return cls(_less(prices, parts), parts, _less(between, outside), outside)


def _less(whole: FloatArray, part: FloatArray) -> FloatArray:
    """Return the rest of a sum without a part of it: 0 where nothing but rounding is left."""
    rest = whole - part
    return np.where(rest < whole * 1e-12, 0.0, rest)


class OpCache:
    """Memoises results by the signature of an op.

    The returned arrays are shared and must not be written to.

    Args:
        graph: The graph of the ops.
        mesh: The devices.
        costs: The cost model.
        free: Values without a placement of their own, such as data and constants.
        dealt: Lengths of dims that may be dealt out in uneven blocks.
    """

    def __init__(
        self, graph: Graph, mesh: Mesh, costs: CostModel, free: frozenset[str], dealt: frozenset[int] = frozenset()
    ) -> None:
        self._graph, self._mesh, self._costs, self._free, self._dealt = graph, mesh, costs, free, dealt
        self._results: dict[Hashable, object] = {}
        # objects whose identity is part of a key, kept alive so that no other object gets this identity
        self._referenced: dict[int, object] = {}
        self._numbers: dict[int, tuple[Scaled, ...]] = {}

    def options(self, op: Op, strategies: tuple[Strategy, ...], allowed: Masks | None = None) -> OpStrategies:
        """Return the strategies of an op on the mesh; see `op_strategies.options`."""
        names = (*op.inputs, *op.outputs)
        values = self._graph.values
        operands = tuple((values[name].shape, name in self._free) if name else None for name in names)
        numbers = tuple(number_inside(self._graph, op, number) for number in self._divided(strategies))
        key = ("options", self._id(strategies), len(op.inputs), operands, numbers, _hashable(allowed))
        return self._cached(
            key, lambda: options(self._graph, op, strategies, self._mesh, self._free, allowed, dealt=self._dealt)
        )

    def selected(self, options: OpStrategies, keep: NDArray[np.bool_]) -> OpStrategies:
        """Return the strategies of an op that a mask keeps."""
        if keep.all():
            return options
        return self._cached(("selected", self._id(options), keep.tobytes()), lambda: options.select(keep))

    def seconds(
        self,
        op: Op,
        options: OpStrategies,
        sizes: tuple[float, ...],
        fused: Fused,
        compute: Callable[[], FloatArray],
    ) -> FloatArray:
        """Return the (S,) seconds of an op.

        Args:
            op: The op.
            options: Its strategies, as of `options`.
            sizes: Bytes per element of every operand, in memory and on the wire.
            fused: The parts of the op that its own kernel still executes, if other parts are fused into other kernels.
            compute: Computes the seconds; its result must depend on the other arguments only.
        """
        left = None if fused is ALONE else (fused.unread, fused.unwritten, fused.launches)
        absent = tuple(not name for name in (*op.inputs, *op.outputs))
        return self._cached(("seconds", self._id(options), op.kind, op.attrs, absent, sizes, left), compute)

    def elements(self, local: IntArray) -> FloatArray:
        """Return the (S,) numbers of elements of shards with local shapes (S, rank)."""
        return self._cached(("elements", self._id(local)), lambda: local.prod(axis=1, dtype=np.float64))

    def placements(
        self, shape: tuple[int, ...], chunks: tuple[int, ...], *, partial: bool, allowed: Masks | None = None
    ) -> IntArray:
        """Return the placement numbers of a value; see `op_strategies.all_placements`."""
        return self._cached(
            ("placements", shape, chunks, partial, _hashable(allowed)),
            lambda: all_placements(shape, chunks, self._mesh, partial=partial, allowed=allowed, dealt=self._dealt),
        )

    def prices(self, ways: Reshards, source: IntArray, target: IntArray) -> FloatArray:
        """Return the (S of source, S of target) seconds of reshards between placement numbers of a value."""
        key = ("prices", self._id(ways), self._id(source), self._id(target))
        return self._cached(key, lambda: ways.between(source, target))

    def parts(
        self,
        ways: Reshards,
        source: IntArray,
        target: IntArray,
        chunked: Set[Collective],
        leaving: tuple[bool, ...],
    ) -> ReshardParts:
        """Return the prices of reshards in two parts.

        Args:
            ways: The reshards.
            source: (S of source) placement numbers.
            target: (S of target) placement numbers.
            chunked: Collectives that run in chunks.
            leaving: By mesh axis, whether it leaves a node.
        """
        key = ("parts", self._id(ways), self._id(source), self._id(target), frozenset(chunked))
        return self._cached(key, lambda: ReshardParts.of(ways, source, target, chunked, leaving))

    def places(self, ways: Reshards, numbers: IntArray) -> IntArray:
        """Return the rows (or columns) of a reshard table for the placement numbers of a value."""
        return self._cached(("places", self._id(ways), self._id(numbers)), lambda: ways.places[numbers])

    def _divided(self, strategies: tuple[Strategy, ...]) -> tuple[Scaled, ...]:
        """Return the numbers inside an op that some strategy divides."""
        found = self._numbers.get(self._id(strategies))
        if found is None:
            found = tuple(dict.fromkeys(number for strategy in strategies for number in strategy.scaled))
            self._numbers[id(strategies)] = found
        return found

    def _id(self, thing: object) -> int:
        """Return the identity of an object as a key, and keep the object alive so that the identity stays unique."""
        self._referenced.setdefault(id(thing), thing)
        return id(thing)

    def _cached(self, key: Hashable, compute: Callable[[], Found]) -> Found:
        """Return the cached result of a key; compute it on the first call."""
        if key not in self._results:
            self._results[key] = compute()
        # every key prefix belongs to one method, which fixes the type of the result
        return cast(Found, self._results[key])


def _hashable(allowed: Masks | None) -> tuple[bytes, ...] | None:
    """Return masks in a hashable form."""
    return None if allowed is None else tuple(mask.tobytes() for mask in allowed)

"""Strategies of one op on a mesh: compatible products over the mesh axes of its strategies on one axis.

A placement is coded as one digit per mesh axis: 0 Replicate, 1 Partial, 2 + d Shard(d). The reduction of a Partial and
the chunks of a Shard are properties of the value (`placement_semantics.py`). The placements of a tensor on all axes are
the digits of one number in base rank + 2, major axis first; tables of a problem are indexed with arrays of such
numbers.

A product of one-axis strategies is a strategy on the mesh if

- all sharded dims, chunks and divided numbers divide evenly, or the dim is one that may be dealt out in uneven blocks
  (a vocabulary), one axis alone splits it, no block is empty, and the strategy on that axis holds on uneven blocks;
- at most one axis splits a dim that needs halo rows, and at most one is a ring;
- no two axes replace a number of the op by different values;
- if devices run a variant of the op that depends on the offset of their shard, all axes that split that dim use it.

A variant for inputs with fewer rows than devices (`Local.fewer`) is left out where the rows divide, because sharding
them too is not slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.discover import Halo, Local, Scaled, Strategy
from autopar.ir.graph import Graph, Op
from autopar.ir.rings import RINGS
from autopar.sharding import Mesh, Partial, Placement, Replicate, Shard, deals

IntArray = NDArray[np.int64]


def encode(placement: Placement) -> int:
    """Return the digit of a placement."""
    match placement:
        case Replicate():
            return 0
        case Partial():
            return 1
        case Shard(dim):
            return 2 + dim


@dataclass(frozen=True, slots=True, eq=False)
class Halos:
    """Elements that devices send to their neighbours before an op.

    Attributes:
        input: Index of the input.
        axis: Index of the mesh axis.
        elements: (S,) elements that one device sends; 0 for strategies without halo.
    """

    input: int
    axis: int
    elements: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class OpStrategies:
    """The S strategies of one op on a mesh.

    Attributes:
        inputs: Per input (S,) placement numbers; None for an absent or free input.
        outputs: Per output (S,) placement numbers; None for an unused output.
        local_inputs: Per input (S, rank) local shapes, halo rows included; None for an absent input.
        local_outputs: Per output (S, rank) local shapes; None for an unused output.
        on_one_axis: The one-axis strategies that are combined.
        combined: (S, axes) index into `on_one_axis` per mesh axis.
        halos: Halo exchanges, by input and axis.
        local_kinds: (S,) index into `on_one_axis` of the strategy that defines the variant devices run; -1 if they run
            the op itself.
    """

    inputs: tuple[IntArray | None, ...]
    outputs: tuple[IntArray | None, ...]
    local_inputs: tuple[IntArray | None, ...]
    local_outputs: tuple[IntArray | None, ...]
    on_one_axis: tuple[Strategy, ...]
    combined: IntArray
    halos: tuple[Halos, ...]
    local_kinds: IntArray

    @property
    def count(self) -> int:
        """Number of strategies."""
        return len(self.combined)

    def by_axis(self, strategy: int) -> tuple[Strategy, ...]:
        """Return the one-axis strategy on each mesh axis."""
        return tuple(self.on_one_axis[index] for index in self.combined[strategy])

    def rows_of(self, local: Local) -> dict[int, NDArray[np.bool_]]:
        """Return for each mesh axis (an index) on which devices run a local kind the strategies in which they do."""
        runs = np.array([strategy.local == local for strategy in self.on_one_axis])[self.combined]
        return {axis: rows for axis, rows in enumerate(runs.T) if rows.any()}

    def select(self, keep: NDArray[np.bool_] | IntArray) -> "OpStrategies":
        """Return the options with only the given strategies."""

        def pick(arrays: tuple[IntArray | None, ...]) -> tuple[IntArray | None, ...]:
            return tuple(None if array is None else array[keep] for array in arrays)

        return OpStrategies(
            pick(self.inputs),
            pick(self.outputs),
            pick(self.local_inputs),
            pick(self.local_outputs),
            self.on_one_axis,
            self.combined[keep],
            tuple(Halos(item.input, item.axis, item.elements[keep]) for item in self.halos),
            self.local_kinds[keep],
        )


def options(
    graph: Graph,
    op: Op,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    free: frozenset[str],
    allowed: Sequence[NDArray[np.bool_]] | None = None,
    *,
    dealt: frozenset[int] = frozenset(),
    pads: bool = False,
) -> OpStrategies:
    """Return the strategies of an op on a mesh, given its strategies on one axis.

    Of strategies with equal placements of all tensors only the first is listed.

    Args:
        graph: The graph of the op.
        op: The op.
        strategies: Its strategies on one axis.
        mesh: The devices.
        free: Values without a placement of their own, such as data and constants.
        allowed: Per axis a mask of allowed strategies; None for all. An axis with no allowed strategy is free.
        dealt: Lengths of dims that may be dealt out in uneven blocks.
        pads: Whether any dim that one axis alone splits may be, of ops that work element by element.
    """
    names = (*op.inputs, *op.outputs)
    shapes = [graph.values[name].shape if name else () for name in names]
    offsets = np.cumsum([0, *(len(shape) for shape in shapes)])
    sizes_D = np.array([size for shape in shapes for size in shape], dtype=np.int64)
    placed_PT = [(*strategy.inputs, *strategy.outputs) for strategy in strategies]  # P strategies on one axis
    codes_PT = np.array([[encode(placement) for placement in row] for row in placed_PT], dtype=np.int64)

    ways = [np.asarray(own, np.int64) for own in _allowed_by_axis(len(strategies), mesh, allowed)]
    combos_SA = np.stack(np.meshgrid(*ways, indexing="ij"), axis=-1).reshape(-1, len(ways))
    digits_SAT = codes_PT[combos_SA]  # S strategies, A axes, T tensors
    tensor_D = np.repeat(np.arange(len(shapes)), [len(shape) for shape in shapes])  # D dims of all tensors
    code_D = 2 + np.arange(offsets[-1]) - offsets[tensor_D]
    axis_A = np.array(mesh.shape, dtype=np.int64)
    divisors_SD = np.where(digits_SAT[:, :, tensor_D] == code_D, axis_A[:, None], 1).prod(axis=1)
    divides = sizes_D[None, :] % divisors_SD == 0
    if pads:
        divides |= (digits_SAT[:, :, tensor_D] == code_D).sum(axis=1) == 1
    elif not dealt.isdisjoint(sizes_D.tolist()):
        divides |= _deals(strategies, combos_SA, digits_SAT[:, :, tensor_D] == code_D, sizes_D, axis_A, dealt)
    valid = divides.all(axis=1) & _divides_numbers(graph, op, strategies, combos_SA, mesh)
    valid &= _chunks_divide(placed_PT, combos_SA, divisors_SD, sizes_D, offsets)
    valid &= _is_compatible(strategies, combos_SA, digits_SAT)
    valid &= _needs_fewer_rows_variant(strategies, combos_SA, divisors_SD, sizes_D, offsets)
    for (tensor, dim), halos in _halos_by_dim(strategies).items():
        before_after = np.array([max(halo.before, halo.after) if halo else 0 for halo in halos])[combos_SA].max(axis=1)
        valid &= sizes_D[offsets[tensor] + dim] // divisors_SD[:, offsets[tensor] + dim] >= before_after

    base_T = np.array([len(shape) + 2 for shape in shapes], dtype=np.int64)
    numbers_ST = np.zeros((len(combos_SA), len(names)), dtype=np.int64)
    for digits_ST in digits_SAT.transpose(1, 0, 2):
        numbers_ST = numbers_ST * base_T + digits_ST
    kept = np.flatnonzero(valid)
    kept = kept[_first_occurrences(numbers_ST[kept], base_T ** len(mesh.axes))]

    numbers_ST, combos_SA = numbers_ST[kept], combos_SA[kept]
    local_SD = -(-sizes_D[None, :] // divisors_SD[kept])
    sent = _add_halo_rows(strategies, combos_SA, local_SD, offsets)
    placed: list[IntArray | None] = []
    local: list[IntArray | None] = []
    for tensor, name in enumerate(names):
        local.append(local_SD[:, offsets[tensor] : offsets[tensor + 1]] if name else None)
        placed.append(numbers_ST[:, tensor] if name and name not in free else None)
    split = len(op.inputs)
    own = np.array([index if strategy.local else -1 for index, strategy in enumerate(strategies)], dtype=np.int64)
    return OpStrategies(
        tuple(placed[:split]),
        tuple(placed[split:]),
        tuple(local[:split]),
        tuple(local[split:]),
        tuple(strategies),
        combos_SA,
        sent,
        own[combos_SA].max(axis=1),
    )


def _deals(
    strategies: Sequence[Strategy],
    combos_SA: IntArray,
    splits_SAD: NDArray[np.bool_],
    sizes_D: IntArray,
    axis_A: IntArray,
    lengths: frozenset[int],
) -> NDArray[np.bool_]:
    """Return for each combination and dim whether the dim is dealt out in uneven blocks, (S, D).

    Args:
        strategies: Those on one axis.
        combos_SA: Which of them each axis takes.
        splits_SAD: Whether an axis splits a dim.
        sizes_D: Lengths of the dims.
        axis_A: Sizes of the axes.
        lengths: Lengths of dims that may be dealt out.
    """
    may_AD = np.array([[length in lengths and deals(length, size) for length in sizes_D.tolist()] for size in axis_A])
    holds_SA = np.array([strategy.uneven for strategy in strategies])[combos_SA]
    # All that an axis splits has one length: blocks of the same rows are together.
    alike_SA = np.ones(combos_SA.shape, dtype=bool)
    for length in set(sizes_D.tolist()) & lengths:
        own = splits_SAD & (sizes_D == length)
        alike_SA &= ~own.any(axis=2) | (own == splits_SAD).all(axis=2)
    deals_SAD = splits_SAD & may_AD & (holds_SA & alike_SA)[:, :, None]
    return np.asarray(deals_SAD.any(axis=1) & (splits_SAD.sum(axis=1) == 1))


def _first_occurrences(rows: IntArray, bases: IntArray) -> IntArray:
    """Return the indices of the first occurrences of distinct rows, ascending; columns are below `bases`."""
    if prod(bases.tolist()) < np.iinfo(np.int64).max:  # a row fits into one integer
        keys = np.zeros(len(rows), dtype=np.int64)
        for base, column in zip(bases.tolist(), rows.T, strict=True):
            keys = keys * base + column
        _, first = np.unique(keys, return_index=True)
    else:
        _, first = np.unique(rows, axis=0, return_index=True)
    return np.sort(first)


def _chunks_divide(
    placed_PT: Sequence[tuple[Placement, ...]],
    combos_SA: IntArray,
    divisors_SD: IntArray,
    sizes_D: IntArray,
    offsets: IntArray,
) -> NDArray[np.bool_]:
    """Return for each combination whether its axes agree on the chunks of every dim and the chunks divide evenly."""
    valid = np.ones(len(combos_SA), dtype=bool)
    chunked = {
        (tensor, placement.dim)
        for row in placed_PT
        for tensor, placement in enumerate(row)
        if isinstance(placement, Shard) and placement.chunks > 1
    }
    for tensor, dim in sorted(chunked):
        own = [row[tensor] for row in placed_PT]
        counts = np.array([p.chunks if isinstance(p, Shard) and p.dim == dim else 0 for p in own])[combos_SA]
        most = counts.max(axis=1)
        index = offsets[tensor] + dim
        valid &= ((counts == 0) | (counts == most[:, None])).all(axis=1)
        valid &= sizes_D[index] % (divisors_SD[:, index] * np.maximum(most, 1)) == 0
    return valid


def _halos_by_dim(strategies: Sequence[Strategy]) -> dict[tuple[int, int], list[Halo | None]]:
    """Return the halo of each strategy around each (input, dim) that has one in any strategy."""
    dims = dict.fromkeys((halo.input, halo.dim) for strategy in strategies for halo in strategy.halos)
    return {
        key: [next((h for h in strategy.halos if (h.input, h.dim) == key), None) for strategy in strategies]
        for key in dims
    }


def _is_compatible(strategies: Sequence[Strategy], combos_SA: IntArray, digits_SAT: IntArray) -> NDArray[np.bool_]:
    """Return for each combination whether its halos, replaced numbers and variants are compatible."""
    valid = np.ones(len(combos_SA), dtype=bool)
    for (tensor, dim), halos in _halos_by_dim(strategies).items():
        needed = np.array([halo is not None for halo in halos])[combos_SA].any(axis=1)
        valid &= ~needed | ((digits_SAT[:, :, tensor] == 2 + dim).sum(axis=1) == 1)
    for attr, entry in dict.fromkeys((n.attr, n.entry) for strategy in strategies for n in strategy.replaced):
        own = [[n.value for n in strategy.replaced if (n.attr, n.entry) == (attr, entry)] for strategy in strategies]
        has = np.array([bool(values) for values in own])[combos_SA]
        values = np.array([values[0] if values else 0 for values in own])[combos_SA]
        first = np.take_along_axis(values, has.argmax(axis=1)[:, None], axis=1)
        valid &= (~has | (values == first)).all(axis=1)
    num_kinds = np.zeros(len(combos_SA), dtype=np.int64)
    for local in dict.fromkeys(strategy.local for strategy in strategies if strategy.local is not None):
        has = np.array([strategy.local == local for strategy in strategies])[combos_SA]
        shards = digits_SAT[:, :, local.input] == 2 + local.dim
        valid &= ~has.any(axis=1) | (has == shards).all(axis=1)
        if local.kind in RINGS:  # one axis is one ring
            valid &= has.sum(axis=1) <= 1
        num_kinds += has.any(axis=1)
    return valid & (num_kinds <= 1)


def _needs_fewer_rows_variant(
    strategies: Sequence[Strategy], combos_SA: IntArray, divisors_SD: IntArray, sizes_D: IntArray, offsets: IntArray
) -> NDArray[np.bool_]:
    """Return for each combination whether variants for too few rows are used only where the rows do not divide."""
    valid = np.ones(len(combos_SA), dtype=bool)
    for local in dict.fromkeys(strategy.local for strategy in strategies if strategy.local is not None):
        if local.fewer is not None:
            has = np.array([strategy.local == local for strategy in strategies])[combos_SA].any(axis=1)
            devices = divisors_SD[:, offsets[local.input] + local.dim]
            valid &= ~has | (sizes_D[offsets[local.fewer] + local.dim] % devices > 0)
    return valid


def _add_halo_rows(
    strategies: Sequence[Strategy], combos_SA: IntArray, local_SD: IntArray, offsets: IntArray
) -> tuple[Halos, ...]:
    """Add halo rows to the local shapes in place; return the exchanged elements, in the order of the dims."""
    sent: list[Halos] = []
    for (tensor, dim), halos in sorted(_halos_by_dim(strategies).items()):
        rows_SA = np.array([halo.before + halo.after if halo else 0 for halo in halos], dtype=np.int64)[combos_SA]
        index, span = offsets[tensor] + dim, slice(offsets[tensor], offsets[tensor + 1])
        others = local_SD[:, span].prod(axis=1) // local_SD[:, index]
        sent.extend(Halos(tensor, axis, rows * others) for axis, rows in enumerate(rows_SA.T) if rows.any())
        local_SD[:, index] += rows_SA.sum(axis=1)
    return tuple(sent)


def _divides_numbers(
    graph: Graph, op: Op, on_one_axis: Sequence[Strategy], combos: IntArray, mesh: Mesh
) -> NDArray[np.bool_]:
    """Return for each combination (S, axes) whether the numbers inside the op that it divides are divisible."""
    valid = np.ones(len(combos), dtype=bool)
    for number in dict.fromkeys(scaled for strategy in on_one_axis for scaled in strategy.scaled):
        divides = np.array([number in strategy.scaled for strategy in on_one_axis])
        divisors = np.where(divides[combos], np.array(mesh.shape, dtype=np.int64), 1).prod(axis=1)
        valid &= number_inside(graph, op, number) % divisors == 0
    return valid


def number_inside(graph: Graph, op: Op, number: Scaled) -> int:
    """Return the value of a number inside an op: an entry of an attribute or of a constant input."""
    if isinstance(number.source, int):
        return int(graph.constants[op.inputs[number.source]].reshape(-1)[number.entry])
    value = op.attr(number.source)
    entry = value[number.entry] if isinstance(value, tuple) else value
    assert isinstance(entry, int), f"{number} of {op.name} is not an integer"
    return entry


def all_placements(
    shape: Sequence[int],
    chunks: Sequence[int],
    mesh: Mesh,
    *,
    partial: bool,
    allowed: Sequence[NDArray[np.bool_]] | None = None,
    dealt: frozenset[int] = frozenset(),
) -> IntArray:
    """Return the numbers of all placements of a tensor that divide evenly, or deal a dim out in uneven blocks.

    Args:
        shape: Global shape.
        chunks: Per dim, the number of chunks it is cut into before it is sharded.
        mesh: The devices.
        partial: Whether to list placements with Partial.
        allowed: Per axis a mask of allowed codes; None for all. An axis with no allowed code is free.
        dealt: Lengths of dims that may be dealt out in uneven blocks.
    """
    rank = len(shape)
    numbers = []
    for digits in product(*_allowed_by_axis(rank + 2, mesh, allowed)):
        if not partial and 1 in digits:
            continue
        left = list(shape)
        number = 0
        alone = [digits.count(2 + dim) == 1 and chunks[dim] == 1 and shape[dim] in dealt for dim in range(rank)]
        for digit, axis in zip(digits, mesh.axes, strict=True):
            number = number * (rank + 2) + digit
            if digit >= 2:
                length = left[digit - 2]
                if length % (axis.size * chunks[digit - 2]) == 0:
                    left[digit - 2] //= axis.size
                elif not (alone[digit - 2] and deals(length, axis.size)):
                    break
        else:
            numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def _allowed_by_axis(count: int, mesh: Mesh, allowed: Sequence[NDArray[np.bool_]] | None) -> list[Sequence[int]]:
    """Return which of `count` options each axis may take: the allowed ones, or all if none is allowed."""
    every: Sequence[int] = range(count)
    if allowed is None:
        return [every] * len(mesh.axes)
    return [np.flatnonzero(own).tolist() or every for own in allowed]


def is_partial(numbers: IntArray, rank: int, num_axes: int) -> NDArray[np.bool_]:
    """Return for each placement number of a tensor whether it is partial on any axis.

    >>> is_partial(np.array([0, 1, 4]), rank=2, num_axes=2)
    array([False,  True,  True])
    """
    found = np.zeros(len(numbers), dtype=bool)
    left = numbers
    for _ in range(num_axes):
        left, digits = np.divmod(left, rank + 2)
        found |= digits == 1
    return found


def local_sizes(shape: Sequence[int], numbers: IntArray, mesh: Mesh) -> NDArray[np.float64]:
    """Return the elements on the device that has most for each placement number.

    Replicate and Partial do not divide a tensor.
    """
    rank = len(shape)
    left = numbers.copy()
    sizes = np.full(len(numbers), float(np.prod(shape, dtype=np.float64)))
    for axis in reversed(mesh.axes):
        left, digits = np.divmod(left, rank + 2)
        split = sizes / axis.size
        for dim, length in enumerate(shape):
            if length % axis.size:  # a placement that splits it deals it out
                split = np.where(digits == 2 + dim, sizes / length * -(-length // axis.size), split)
        sizes = np.where(digits >= 2, split, sizes)
    return sizes

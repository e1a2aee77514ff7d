"""Strategies of one op on a mesh: the products over mesh axes of the strategies discovered for one axis.

Placements are coded as small integers, one per mesh axis: 0 Replicate, 1 Partial (sum), 2 + d Shard(d). A tensor's
placements are the digits of one number in base rank + 2, major axis first; arrays of such numbers are what the tables
of a problem are indexed with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.discover import Rule, Scaled, Strategy
from autopar.ir.graph import Graph, Op
from autopar.sharding import Mesh, Partial, Placement, Placements, Replicate, Shard

IntArray = NDArray[np.int64]


def encode(placement: Placement) -> int | None:
    """Return a placement's digit; None for a partial that is no sum and for chunks, which no strategy uses yet."""
    match placement:
        case Replicate():
            return 0
        case Shard(dim, chunks=1):
            return 2 + dim
        case Shard():
            return None
        case Partial("sum"):
            return 1
        case Partial():
            return None


def decode(digit: int) -> Placement:
    """Return the placement of a digit."""
    if digit == 0:
        return Replicate()
    return Partial() if digit == 1 else Shard(digit - 2)


def decode_index(index: int, rank: int, num_axes: int) -> Placements:
    """Return the placements that are number `index` for a tensor of `rank` dims.

    >>> decode_index(2 * 4 + 0, 2, 2)
    (Shard(dim=0), Replicate())
    """
    base = rank + 2
    digits = []
    for _ in range(num_axes):
        index, digit = divmod(index, base)
        digits.append(digit)
    return tuple(decode(digit) for digit in reversed(digits))


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What one op can do on a mesh; S strategies.

    Attributes:
        inputs: Per input: (S,) placement numbers; None for an absent or free input.
        outputs: Per output: (S,) placement numbers; None for an unwanted one.
        local_inputs: Per input: (S, rank) local shapes; None for an absent one.
        local_outputs: Per output: (S, rank) local shapes; None for an unwanted one.
        on_one_axis: The strategies on a single axis that are combined.
        combined: (S, axes) index into `on_one_axis` per mesh axis.
    """

    inputs: tuple[IntArray | None, ...]
    outputs: tuple[IntArray | None, ...]
    local_inputs: tuple[IntArray | None, ...]
    local_outputs: tuple[IntArray | None, ...]
    on_one_axis: tuple[Strategy, ...]
    combined: IntArray

    @property
    def count(self) -> int:
        """Number of strategies."""
        return len(self.combined)

    def by_axis(self, strategy: int) -> tuple[Strategy, ...]:
        """Return what a strategy does on each mesh axis."""
        return tuple(self.on_one_axis[index] for index in self.combined[strategy])

    def select(self, keep: NDArray[np.bool_] | IntArray) -> "Options":
        """Return the options with these strategies only."""

        def pick(arrays: tuple[IntArray | None, ...]) -> tuple[IntArray | None, ...]:
            return tuple(None if array is None else array[keep] for array in arrays)

        return Options(
            pick(self.inputs),
            pick(self.outputs),
            pick(self.local_inputs),
            pick(self.local_outputs),
            self.on_one_axis,
            self.combined[keep],
        )


def options(graph: Graph, op: Op, rule: Rule, mesh: Mesh, free: frozenset[str]) -> Options:
    """Return the strategies of `op` whose shards, and the numbers they divide, divide evenly.

    Strategies that place every tensor alike are listed once.
    """
    names = (*op.inputs, *op.outputs)
    shapes = [graph.values[name].shape if name else () for name in names]
    offsets = np.cumsum([0, *(len(shape) for shape in shapes)])
    on_one_axis, per_axis = [], []
    for strategy in rule.strategies:
        digits = [encode(placement) for placement in (*strategy.inputs, *strategy.outputs)]
        if None not in digits:
            on_one_axis.append(strategy)
            per_axis.append(digits)
    codes = np.array(per_axis, dtype=np.int64)  # (strategies on one axis, tensors)

    num_axes = len(mesh.axes)
    combos = np.array(list(product(range(len(codes)), repeat=num_axes)), dtype=np.int64)
    digits_SAT = codes[combos]  # S strategies, A axes, T tensors
    divisors_SD = np.ones((len(combos), offsets[-1]), dtype=np.int64)  # D dims of all tensors
    for tensor, shape in enumerate(shapes):
        for dim in range(len(shape)):
            for axis_index, axis in enumerate(mesh.axes):
                sharded = digits_SAT[:, axis_index, tensor] == 2 + dim
                divisors_SD[sharded, offsets[tensor] + dim] *= axis.size
    sizes_D = np.array([size for shape in shapes for size in shape], dtype=np.int64)
    valid = (sizes_D[None, :] % divisors_SD == 0).all(axis=1) & _divides_numbers(graph, op, on_one_axis, combos, mesh)

    numbers_ST = np.zeros((len(combos), len(names)), dtype=np.int64)
    for tensor, shape in enumerate(shapes):
        for axis_index in range(num_axes):
            numbers_ST[:, tensor] = numbers_ST[:, tensor] * (len(shape) + 2) + digits_SAT[:, axis_index, tensor]
    kept = np.flatnonzero(valid)
    _, first = np.unique(numbers_ST[kept], axis=0, return_index=True)
    kept = kept[np.sort(first)]

    numbers_ST = numbers_ST[kept]
    local_SD = sizes_D[None, :] // divisors_SD[kept]
    placed: list[IntArray | None] = []
    local: list[IntArray | None] = []
    for tensor, name in enumerate(names):
        local.append(local_SD[:, offsets[tensor] : offsets[tensor + 1]] if name else None)
        placed.append(numbers_ST[:, tensor] if name and name not in free else None)
    split = len(op.inputs)
    return Options(
        tuple(placed[:split]),
        tuple(placed[split:]),
        tuple(local[:split]),
        tuple(local[split:]),
        tuple(on_one_axis),
        combos[kept],
    )


def _divides_numbers(
    graph: Graph, op: Op, on_one_axis: Sequence[Strategy], combos: IntArray, mesh: Mesh
) -> NDArray[np.bool_]:
    """Return for each combination (S, axes) whether the numbers inside the op that it divides are divisible."""
    valid = np.ones(len(combos), dtype=bool)
    for number in dict.fromkeys(scaled for strategy in on_one_axis for scaled in strategy.scaled):
        divides = np.array([number in strategy.scaled for strategy in on_one_axis])
        divisors = np.where(divides[combos], np.array(mesh.shape, dtype=np.int64), 1).prod(axis=1)
        valid &= _number(graph, op, number) % divisors == 0
    return valid


def _number(graph: Graph, op: Op, number: Scaled) -> int:
    """Return a number inside an op."""
    if isinstance(number.source, int):
        return int(graph.constants[op.inputs[number.source]].reshape(-1)[number.entry])
    value = op.attr(number.source)
    entry = value[number.entry] if isinstance(value, tuple) else value
    assert isinstance(entry, int), f"{number} of {op.name} is no integer"
    return entry


def all_placements(shape: Sequence[int], mesh: Mesh, *, partial: bool) -> IntArray:
    """Return the numbers of all placements of a tensor that divide evenly, with or without partial ones."""
    rank = len(shape)
    numbers = []
    for digits in product(range(rank + 2), repeat=len(mesh.axes)):
        if not partial and 1 in digits:
            continue
        left = list(shape)
        number = 0
        for digit, axis in zip(digits, mesh.axes, strict=True):
            number = number * (rank + 2) + digit
            if digit >= 2:
                if left[digit - 2] % axis.size:
                    break
                left[digit - 2] //= axis.size
        else:
            numbers.append(number)
    return np.array(numbers, dtype=np.int64)


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
    """Return the elements one device holds for each placement number (Replicate and Partial hold all)."""
    rank = len(shape)
    left = numbers.copy()
    sizes = np.full(len(numbers), float(np.prod(shape, dtype=np.float64)))
    for axis in reversed(mesh.axes):
        left, digits = np.divmod(left, rank + 2)
        sizes = np.where(digits >= 2, sizes / axis.size, sizes)
    return sizes


def whole_shapes(graph: Graph, op: Op) -> tuple[list[IntArray | None], list[IntArray | None]]:
    """Return the global shapes of inputs and outputs as arrays of one strategy, (1, rank) each; None if absent."""

    def shapes(names: tuple[str, ...]) -> list[IntArray | None]:
        return [np.array([graph.values[name].shape], dtype=np.int64) if name else None for name in names]

    return shapes(op.inputs), shapes(op.outputs)

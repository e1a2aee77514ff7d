"""Block-cyclic candidates: dims that hold several things side by side.

A number of chunks comes from what the op says about its sizes: how many outputs it has, how often a size goes into
another, or, where it only regroups elements, a dim of its own. Such a number has a value on each proxy and one on the
real op. A strategy is tried with the first, confirmed with the second, and recorded with the third; a number of chunks
that is nowhere to be read off the op says nothing about its real size and is not recorded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from autopar.discover.rules import Strategy
from autopar.discover.sizes import made_sizes, refinement
from autopar.discover.sketch import Sketch
from autopar.sharding import Placement, Shard


@dataclass(frozen=True, slots=True, order=True)
class Count:
    """A number of chunks on the even proxy, on the triple proxy and on the real op."""

    even: int
    triple: int
    real: int


def chunk_counts(real: Sketch, even: Sketch, triple: Sketch) -> tuple[Count, ...]:
    """Return the numbers of chunks an op could mean; none if it makes no size that its inputs do not have.

    Where the op regroups elements, as a Reshape does, they are its factors and products of them, each of which has a
    proxy of its own. Else they are proportions of sizes along the dim where a size is new, and the proxies have to keep
    them. A number that could mean two things means nothing.
    """
    new = made_sizes(real)
    if not new:
        return ()
    dims = _dims(real, even, triple)
    made = [(dim, size) for dim, size in dims if size.real in new]
    regroups = refinement(real) is not None
    if regroups and _has_one_factor(even):
        return ()  # a product of factors could be any other one
    if regroups:
        found = [size for _, size in dims]
        found += [ratio for _, one in made for _, other in dims for ratio in _ratios(one, other)]
    else:
        num_inputs = sum(operand is not None and operand.content is None for operand in real.inputs)
        found = [Count(number, number, number) for number in (num_inputs, len(real.outputs))]
        numbers = _numbers(real, even, triple)
        for place in {dim for dim, _ in made}:
            sizes = [*numbers, *(size for dim, size in dims if dim == place)]
            found += [ratio for one in sizes for other in sizes for ratio in _ratios(one, other)]
    meanings: dict[tuple[int, int], set[int]] = {}
    for count in found:
        meanings.setdefault((count.even, count.triple), set()).add(count.real)
    counts = [Count(*key, *reals) for key, reals in meanings.items() if len(reals) == 1]
    return tuple(
        sorted(
            count
            for count in counts
            if min(count.even, count.triple, count.real) > 1 and (regroups or count.even == count.triple == count.real)
        )
    )


def _has_one_factor(sketch: Sketch) -> bool:
    """Whether all common factors of the dims before and after a reshape are equal, and several."""
    refined = refinement(sketch)
    factors = [factor for dim in refined[0] for factor in dim if factor > 1] if refined is not None else []
    return len(factors) > 1 and len(set(factors)) == 1


def _dims(real: Sketch, even: Sketch, triple: Sketch) -> list[tuple[int, Count]]:
    """Return (dim, its size on each of the three) of all tensors of an op, each pair once."""
    shapes = [
        (r.shape, e.shape, t.shape)
        for r, e, t in zip(real.inputs, even.inputs, triple.inputs, strict=True)
        if r is not None and e is not None and t is not None and r.content is None
    ]
    shapes += [
        (r, e, t)
        for r, e, t in zip(real.outputs, even.outputs, triple.outputs, strict=True)
        if r is not None and e is not None and t is not None
    ]
    sizes = [(dim, Count(e, t, r)) for each in shapes for dim, (r, e, t) in enumerate(zip(*each, strict=True))]
    return list(dict.fromkeys(sizes))


def _numbers(real: Sketch, even: Sketch, triple: Sketch) -> list[Count]:
    """Return the numbers in shape-like constants, such as where a slice starts, on each of the three."""
    contents = [
        (r.content, e.content or (), t.content or ())
        for r, e, t in zip(real.inputs, even.inputs, triple.inputs, strict=True)
        if r is not None and e is not None and t is not None and r.is_shape_like and r.content is not None
    ]
    numbers = [Count(int(e), int(t), int(r)) for each in contents for r, e, t in zip(*each, strict=False)]
    return [number for number in numbers if min(number.even, number.triple, number.real) > 1]


def _ratios(one: Count, other: Count) -> list[Count]:
    """Return how often the smaller of two sizes goes into the larger one on the proxies; 0 really if not whole."""
    large, small = (one, other) if one.real >= other.real else (other, one)
    if min(small.even, small.triple, small.real) < 1 or large.even % small.even or large.triple % small.triple:
        return []
    real = 0 if large.real % small.real else large.real // small.real
    return [Count(large.even // small.even, large.triple // small.triple, real)]


def chunked(placements: tuple[Placement, ...], sketch: Sketch, counts: tuple[Count, ...]) -> Iterator[list[Placement]]:
    """Iterate over the ways to shard the same dims in chunks on the even proxy.

    One input is sharded in any of the numbers of chunks; several of them, along the same dim, in chunks of one size.
    """
    numbers = {count.even for count in counts}
    sharded = [(i, placement) for i, placement in enumerate(placements) if isinstance(placement, Shard)]
    if not numbers or len({placement.dim for _, placement in sharded}) != 1:
        return
    dim = sharded[0][1].dim
    sizes = []
    for index, _ in sharded:
        operand = sketch.inputs[index]
        assert operand is not None, "only tensors are sharded"
        sizes.append(operand.shape[dim])
    if len(sharded) == 1:
        ways: list[tuple[int, ...]] = [(number,) for number in sorted(numbers)]
    else:
        units = [unit for unit in sorted(set(sizes)) if all(size % unit == 0 for size in sizes)]
        ways = [tuple(size // unit for size in sizes) for unit in units]
    for way in ways:
        fits = all(size % (2 * number) == 0 for size, number in zip(sizes, way, strict=True))
        if fits and max(way) > 1 and numbers.issuperset(set(way) - {1}):
            candidate = list(placements)
            for (index, _), number in zip(sharded, way, strict=True):
                candidate[index] = Shard(dim, number)
            yield candidate


def is_multiple(strategy: Strategy, known: Iterable[Strategy]) -> bool:
    """Whether a strategy is a known one with all numbers of chunks multiplied."""
    factor = gcd(*(_number(p) for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)))
    if factor <= 1:
        return False
    numbers = {number: number // factor for number in map(_number, (*strategy.inputs, *strategy.outputs))}
    return _renumbered(strategy, numbers) in known


def readings(strategy: Strategy, counts: tuple[Count, ...]) -> Iterator[tuple[Strategy, Strategy]]:
    """Iterate over what a strategy of the even proxy can mean: (on the triple proxy, on the real op)."""
    numbers = sorted({number for number in map(_number, (*strategy.inputs, *strategy.outputs)) if number > 1})
    for meaning in product(*([count for count in counts if count.even == number] for number in numbers)):
        triple = {count.even: count.triple for count in meaning}
        real = {count.even: count.real for count in meaning}
        yield _renumbered(strategy, triple), _renumbered(strategy, real)


def _number(placement: Placement) -> int:
    return placement.chunks if isinstance(placement, Shard) else 1


def _renumbered(strategy: Strategy, numbers: dict[int, int]) -> Strategy:
    """Return a strategy with other numbers of chunks."""

    def renumber(placement: Placement) -> Placement:
        number = _number(placement)
        return Shard(placement.dim, numbers[number]) if isinstance(placement, Shard) and number > 1 else placement

    return replace(
        strategy, inputs=tuple(map(renumber, strategy.inputs)), outputs=tuple(map(renumber, strategy.outputs))
    )

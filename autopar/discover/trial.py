"""One op with data, run whole and on shards: the experiment discovery is made of.

A strategy is tried by giving each of n devices its part of every input, changing what the strategy changes inside the
op, running it, and looking for the way in which the n results make the whole one:

    identity   every part equals the whole                        -> Replicate
    concat     the parts, side by side along one dim, are it      -> Shard(dim), or Shard(dim, chunks)
    reduction  their sum, mean, maximum, ... is it                -> Partial(...)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover.rules import Halo, Local, Replaced, Scaled, Strategy
from autopar.discover.shrink import Proxy, run_sketch
from autopar.discover.sketch import Operand, Sketch, function_digest
from autopar.execute import Executor
from autopar.execute.rings import run_ring
from autopar.ir.graph import Attr
from autopar.ir.rings import RINGS
from autopar.sharding import Partial, Placement, Replicate, Shard

Array = NDArray[Any]

_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 1e-2, 1: 0.0}
"""Largest error relative to the largest element, by bytes per float of the output; kernels that compute in float32
whatever they are fed show in the output type. Quantised numbers are equal or different."""


class Trial:
    """An op with data, run whole once and on shards many times.

    Attributes:
        proxy: The op.
        arrays: Its inputs.
        whole: Its outputs on them.
        num_executions: Runs so far.
    """

    def __init__(self, proxy: Proxy, arrays: list[Array | None], whole: tuple[Array, ...], executor: Executor) -> None:
        self.proxy = proxy
        self.arrays = arrays
        self.whole = whole
        self.num_executions = 0
        self._wanted = [shape is not None for shape in proxy.sketch.outputs]
        self._executor = executor
        self._parts: dict[tuple[int, Placement, int], list[Array]] = {}
        self._sketches: dict[tuple[Strategy, int], Sketch | None] = {}

    def run(self, strategy: Strategy, n: int) -> tuple[Placement, ...] | None:
        """Return the placements of the outputs when the op runs on n devices as a strategy says.

        Args:
            strategy: What to try; its outputs are not looked at.
            n: Number of devices.

        Returns:
            One placement per output, or None if the parts do not combine, a kernel refuses its part, or something is
            not divisible by n.
        """
        if any(self._indivisible(i, placement, n) for i, placement in enumerate(strategy.inputs)):
            return None
        local = self._blocks(strategy, n)
        parts = None if local is None else self._outputs(strategy, n, local, lambda first: self._may_combine(first, n))
        if parts is None:
            return None
        combined = [
            recombine([part[i] for part in parts], whole) if self._wanted[i] else Replicate()
            for i, whole in enumerate(self.whole)
        ]
        found = tuple(placement for placement in combined if placement is not None)
        return found if len(found) == len(combined) else None

    def holds(self, strategy: Strategy, n: int, *, uneven: bool = False) -> bool:
        """Whether n devices that follow a strategy hold its outputs; what it divides must be divisible.

        Args:
            strategy: What to try, without halos.
            n: Number of devices.
            uneven: Cut every sharded dim into blocks of different sizes.
        """
        local = [
            cut(array, placement.dim, _uneven_sizes(array.shape[placement.dim], n))
            if uneven and isinstance(placement, Shard) and array is not None
            else self.part(i, placement, n)
            for i, (array, placement) in enumerate(zip(self.arrays, strategy.inputs, strict=True))
        ]
        parts = self._outputs(strategy, n, local, lambda _: True)
        return parts is not None and all(
            _makes([part[i] for part in parts], placement, whole, uneven)
            for i, (placement, whole) in enumerate(zip(strategy.outputs, self.whole, strict=True))
            if self._wanted[i]
        )

    def _outputs(
        self, strategy: Strategy, n: int, local: list[list[Array]], promising: Callable[[tuple[Array, ...]], bool]
    ) -> list[tuple[Array, ...]] | None:
        """Return the outputs of each device on its parts of the inputs; None if a kernel refuses or the first fail."""
        sketch = self._local(strategy, n)
        if sketch is None:
            return None
        if strategy.local is not None and strategy.local.kind in RINGS:
            return self._ring_outputs(sketch, strategy.local, local)
        parts: list[tuple[Array, ...]] = []
        for rank in range(n):
            arrays: list[Array | None] = [part[rank] if part else None for part in local]
            for number in strategy.scaled:
                if isinstance(number.source, int):
                    operand = sketch.inputs[number.source]
                    assert operand is not None, "only constants are scaled"
                    arrays[number.source] = operand.array()
            if strategy.local is not None:
                arrays.append(_starts(local, strategy.local)[rank])
            self.num_executions += 1
            outputs = run_sketch(sketch, arrays, self._executor)
            if outputs is None or (rank == 0 and not promising(outputs)):
                return None
            parts.append(outputs)
        return parts

    def _ring_outputs(self, sketch: Sketch, kind: Local, local: list[list[Array]]) -> list[tuple[Array, ...]] | None:
        """Return the outputs of each device of a ring on its parts of the inputs; None if a kernel refuses."""

        def run(step: str, arrays: Sequence[Array], num_outputs: int) -> tuple[Array, ...] | None:
            self.num_executions += 1
            other = replace(sketch, kind=step, outputs=(None,) * num_outputs)
            return run_sketch(other, arrays, self._executor)

        blocks, ring = list(zip(*local, strict=True)), RINGS[kind.kind]
        rows = {block[kind.input].shape[kind.dim] for block in blocks}
        steps = ring.steps(sketch.attrs, min(rows), len(blocks)) if len(rows) == 1 else len(blocks)
        return run_ring(ring, blocks, _starts(local, kind), run, steps)

    def sharded_sizes(self, strategy: Strategy) -> list[tuple[int, int]]:
        """Return (size, chunks) of every sharded dim of the inputs and outputs."""
        arrays = (*self.arrays, *self.whole)
        placements = (*strategy.inputs, *strategy.outputs)
        return [
            (array.shape[placement.dim], placement.chunks)
            for array, placement in zip(arrays, placements, strict=True)
            if isinstance(placement, Shard) and array is not None
        ]

    def divisor(self, strategy: Strategy) -> int | None:
        """Return the largest of 3 and 2 that divides all that a strategy divides; None if neither does."""
        sizes = self.sharded_sizes(strategy)
        for n in (3, 2):
            if all(size % (n * chunks) == 0 for size, chunks in sizes) and self._local(strategy, n) is not None:
                return n
        return None

    def keeps_shape(self, placements: Sequence[Placement], n: int) -> bool:
        """Whether the first device's outputs have the shapes of the whole: the parts could be terms of a sum."""
        if any(self._indivisible(i, placement, n) for i, placement in enumerate(placements)):
            return False
        local = [self.part(i, placement, n) for i, placement in enumerate(placements)]
        self.num_executions += 1
        outputs = run_sketch(self.proxy.sketch, [part[0] if part else None for part in local], self._executor)
        return outputs is not None and [o.shape for o in outputs] == [w.shape for w in self.whole]

    def ignores(self, inputs: Sequence[int], outputs: Sequence[Placement]) -> bool:
        """Whether the outputs that are replicated stay what they are whatever these inputs hold.

        A comparison that never comes true stays what it is whatever it compares, and shows nothing.
        """
        if any(whole.dtype == bool and (whole.all() or not whole.any()) for whole in self.whole):
            return False
        for nonsense in (0.0, np.nan, np.inf, -np.inf):
            arrays = [
                _filled(array, nonsense) if array is not None and i in inputs else array
                for i, array in enumerate(self.arrays)
            ]
            self.num_executions += 1
            results = run_sketch(self.proxy.sketch, arrays, self._executor)
            if results is None:
                return False
            for result, whole, placement in zip(results, self.whole, outputs, strict=True):
                if isinstance(placement, Replicate) and not (result.shape == whole.shape and close(result, whole)):
                    return False
        return True

    def part(self, index: int, placement: Placement, n: int) -> list[Array]:
        """Return what each of n devices holds of an input; empty if it is absent."""
        array = self.arrays[index]
        if array is None:
            return []
        key = (index, placement, n)
        if key not in self._parts:
            match placement:
                case Replicate():
                    parts = [array] * n
                case Shard(dim, chunks):
                    parts = split(array, dim, n, chunks)
                case Partial(reduce):
                    parts = _terms(array, reduce, n, np.random.default_rng([index, n]))
            self._parts[key] = parts
        return self._parts[key]

    def _blocks(self, strategy: Strategy, n: int) -> list[list[Array]] | None:
        """Return what each device holds of each input, halos included; None if a block is smaller than its halo."""
        blocks = [self.part(i, placement, n) for i, placement in enumerate(strategy.inputs)]
        for halo in strategy.halos:
            parts = blocks[halo.input]
            if min(part.shape[halo.dim] for part in parts) < max(halo.before, halo.after):
                return None
            blocks[halo.input] = with_halo(parts, halo)
        return blocks

    def _may_combine(self, outputs: tuple[Array, ...], n: int) -> bool:
        """Whether the first device's outputs look like parts of the whole ones."""
        each = zip(self._wanted, outputs, self.whole, strict=True)
        return all(_may_combine(output, whole, n) for wanted, output, whole in each if wanted)

    def _indivisible(self, index: int, placement: Placement, n: int) -> bool:
        array = self.arrays[index]
        if not isinstance(placement, Shard):
            return False
        return array is None or array.shape[placement.dim] % (n * placement.chunks) != 0

    def _local(self, strategy: Strategy, n: int) -> Sketch | None:
        """Return the op one device runs."""
        key = (replace(strategy, outputs=()), n)
        if key not in self._sketches:
            self._sketches[key] = local_sketch(self.proxy.sketch, strategy, n)
        return self._sketches[key]


def _starts(local: list[list[Array]], kind: Local) -> list[Array]:
    """Return for each device the position of the first row it holds of the dim that a local kind is told about."""
    rows = np.cumsum([0, *(block.shape[kind.dim] for block in local[kind.input])])
    return [np.asarray(start, np.int64) for start in rows[:-1]]


def cut(array: Array, dim: int, sizes: Sequence[int]) -> list[Array]:
    """Return blocks of these sizes along a dim."""
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


def _uneven_sizes(size: int, n: int) -> list[int]:
    """Return the sizes of n blocks, the first one row larger and the last one row smaller than they would be.

    >>> _uneven_sizes(6, 2), _uneven_sizes(6, 3)
    ([4, 2], [3, 2, 1])
    """
    return [size // n + 1, *[size // n] * (n - 2), size // n - 1]


def _makes(parts: Sequence[Array], placement: Placement, whole: Array, uneven: bool) -> bool:
    """Whether parts with a placement make the whole array."""
    match placement:
        case Replicate():
            return all(part.shape == whole.shape and close(part, whole) for part in parts)
        case Partial(reduce):
            if any(part.shape != whole.shape for part in parts):
                return False
            with np.errstate(all="ignore"):
                return close(_REDUCTIONS[reduce](np.stack(parts)).astype(whole.dtype), whole)
        case Shard(dim, chunks):
            n = len(parts)
            if uneven:
                blocks = cut(whole, dim, _uneven_sizes(whole.shape[dim], n))
            elif whole.shape[dim] % (n * chunks) == 0:
                blocks = split(whole, dim, n, chunks)
            else:
                return False
            return all(part.shape == block.shape for part, block in zip(parts, blocks, strict=True)) and close(
                np.concatenate(parts, axis=dim), np.concatenate(blocks, axis=dim)
            )


def local_sketch(sketch: Sketch, strategy: Strategy, n: int) -> Sketch | None:
    """Return the op one of n devices runs; None if a number that has to be divided is not divisible."""
    scaled = scale(sketch, strategy.scaled, n)
    if scaled is None:
        return None
    if strategy.replaced:
        scaled = replace(scaled, attrs=replace_numbers(scaled.attrs, strategy.replaced))
    if strategy.local is not None:
        kind, told = strategy.local.kind, sketch.inputs[strategy.local.input]
        assert told is not None, "the input a local op is told about is there"
        attrs = (*scaled.attrs, ("size", told.shape[strategy.local.dim]))
        inputs = (*scaled.inputs, Operand((), "int64"))
        scaled = replace(scaled, kind=kind, body=function_digest(kind), attrs=attrs, inputs=inputs)
    return scaled


def scale(sketch: Sketch, scaled: Sequence[Scaled], n: int) -> Sketch | None:
    """Return the sketch with these numbers divided by n, or None if one is not divisible."""
    inputs, attrs = list(sketch.inputs), dict(sketch.attrs)
    for number in scaled:
        if isinstance(number.source, int):
            operand = inputs[number.source]
            assert operand is not None, "only constants are scaled"
            content = [int(entry) for entry in operand.content or ()]
            if content[number.entry] % n:
                return None
            content[number.entry] //= n
            inputs[number.source] = Operand(operand.shape, operand.dtype, tuple(content))
        else:
            value: Attr = attrs[number.source]
            entries = list(value) if isinstance(value, tuple) else [value]
            entry = entries[number.entry]
            assert isinstance(entry, int), "only integers are scaled"
            if entry % n:
                return None
            entries[number.entry] = entry // n
            attrs[number.source] = tuple(entries) if isinstance(value, tuple) else entries[0]  # type: ignore[assignment]
    return Sketch(sketch.kind, tuple(attrs.items()), sketch.opset, sketch.body, tuple(inputs), sketch.outputs)


def replace_numbers(attrs: tuple[tuple[str, Attr], ...], numbers: Sequence[Replaced]) -> tuple[tuple[str, Attr], ...]:
    """Return attributes with some numbers replaced."""
    changed: dict[str, Attr] = dict(attrs)
    for number in numbers:
        value = changed[number.attr]
        entries = [entry for entry in (value if isinstance(value, tuple) else (value,)) if isinstance(entry, int)]
        entries[number.entry] = number.value
        changed[number.attr] = tuple(entries) if isinstance(value, tuple) else entries[0]
    return tuple(changed.items())


def _filled(array: Array, number: float) -> Array:
    """Return an array that holds nothing but a number, or the integer that comes closest; 0 for NaN."""
    if array.dtype.kind == "f":
        return np.full_like(array, number)
    ends = np.iinfo(array.dtype)
    return np.full_like(array, 0 if np.isnan(number) else ends.max if number > 0 else ends.min if number < 0 else 0)


def split(array: Array, dim: int, n: int, chunks: int = 1) -> list[Array]:
    """Return what each of n devices holds of an array sharded along a dim, block-cyclic if `chunks` is above 1.

    >>> [part.tolist() for part in split(np.arange(8), 0, 2, chunks=2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    pieces = np.split(array, n * chunks, axis=dim)
    return [np.concatenate(pieces[rank::n], axis=dim) for rank in range(n)]


def with_halo(parts: Sequence[Array], halo: Halo) -> list[Array]:
    """Return each device's block with rows of its neighbours around it."""

    def rows(part: Array, first: int, last: int) -> Array:
        return part[(slice(None),) * halo.dim + (slice(first, last),)]

    def edge(part: Array, count: int) -> Array:
        shape = (*part.shape[: halo.dim], count, *part.shape[halo.dim + 1 :])
        lowest = -np.inf if part.dtype.kind == "f" else np.iinfo(part.dtype).min if part.dtype.kind in "iu" else 0
        return np.full(shape, 0 if halo.fill == "zero" else lowest, part.dtype)

    extended = []
    for rank, part in enumerate(parts):
        size = part.shape[halo.dim]
        first, last = rank == 0, rank == len(parts) - 1
        pieces = [part]
        if halo.before:
            before = edge(part, halo.before) if first else rows(parts[rank - 1], size - halo.before, size)
            pieces.insert(0, before)
        if halo.after:
            pieces.append(edge(part, halo.after) if last else rows(parts[rank + 1], 0, halo.after))
        extended.append(np.concatenate(pieces, axis=halo.dim))
    return extended


def _terms(array: Array, reduce: str, n: int, rng: np.random.Generator) -> list[Array]:
    """Return n different terms that make the array, of its type."""
    noise = [rng.standard_normal(array.shape) for _ in range(n - 1)]
    if array.dtype.kind == "f":
        return _float_terms(array, reduce, n, noise, rng)
    terms = _float_terms(array.astype(np.float64), reduce, n, [np.rint(4 * term) for term in noise], rng)
    return [np.rint(term).astype(array.dtype) for term in terms]


def _float_terms(array: Array, reduce: str, n: int, noise: list[Array], rng: np.random.Generator) -> list[Array]:
    match reduce:
        case "sum":
            return [*noise, array - sum(noise)]
        case "mean":
            return [*noise, n * array - sum(noise)]
        case "prod":
            factors = [np.where(term < 0, -1.0, 1.0) * np.exp(np.abs(term) - 1) for term in noise]
            return [*factors, array / np.prod(factors, axis=0)]
        case "max" | "min":
            sign = -1.0 if reduce == "max" else 1.0
            owner = rng.integers(0, n, array.shape)  # each element is right on one device, further off on the others
            return [np.where(owner == i, array, _further(array, sign, rng)) for i in range(n)]
        case "logsumexp":
            shares = rng.dirichlet(np.ones(n), array.shape)
            return [array + np.log(shares[..., i]) for i in range(n)]
        case _:
            raise AssertionError(f"{reduce} is no reduction")


def _further(array: Array, sign: float, rng: np.random.Generator) -> Array:
    """Return elements above (sign 1) or below (-1) those of an array, where there are some from all over its range."""
    other = rng.permutation(array.reshape(-1)).reshape(array.shape)
    return np.where((other - array) * sign > 0, other, array + sign * rng.uniform(0.1, 2.0, array.shape))


def _may_combine(part: Array, whole: Array, n: int) -> bool:
    """Whether the first part has the whole's shape, or is an n-th of it along one dim that starts like it."""
    if part.shape == whole.shape:
        return True
    dim = _concat_dim(part, whole, n)
    if dim is None:
        return False
    first = (slice(None),) * dim + (slice(0, 1),)
    return close(part[first], whole[first])


def _concat_dim(part: Array, whole: Array, n: int) -> int | None:
    """Return the only dim in which the part is an n-th of the whole, all others being equal."""
    if part.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(part.ndim) if part.shape[dim] != whole.shape[dim]]
    return dims[0] if len(dims) == 1 and part.shape[dims[0]] * n == whole.shape[dims[0]] else None


def close(part: Array, whole: Array) -> bool:
    """Whether two arrays of one shape agree: exactly for integers, within rounding for floats."""
    if part.dtype != whole.dtype or whole.dtype.kind not in "fV":
        return part.dtype == whole.dtype and bool(np.array_equal(part, whole))
    if np.array_equal(part, whole):
        return True
    a, b = part.astype(np.float64), whole.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, a), np.where(finite, 0, b)):
        return False
    scale = float(np.max(np.abs(b[finite]), initial=0.0))
    difference = np.abs(a - b)[finite]
    largest = float(np.max(difference, initial=0.0))  # NaN if any is
    return largest <= _TOLERANCE[whole.dtype.itemsize] * scale


def recombine(parts: Sequence[Array], whole: Array) -> Placement | None:
    """Return how the parts make the whole, or None."""
    n = len(parts)
    if any(part.shape != parts[0].shape for part in parts):
        return None
    if parts[0].shape != whole.shape:
        dim = _concat_dim(parts[0], whole, n)
        if dim is None:
            return None
        chunks = _chunks(parts, whole, dim)
        return Shard(dim, chunks) if chunks else None
    if all(close(part, whole) for part in parts):
        return Replicate()
    if whole.dtype.kind not in "fViu":
        return None
    stacked = np.stack(parts)
    if whole.dtype.kind == "V":  # bfloat16, in which numpy cannot reduce
        stacked = stacked.astype(np.float64)
    with np.errstate(all="ignore"):
        for reduce, reduction in _REDUCTIONS.items():
            if whole.dtype.kind not in "fV" and reduce in ("mean", "logsumexp"):
                continue
            if close(reduction(stacked).astype(whole.dtype), whole):
                return Partial(reduce)
    return None


def _chunks(parts: Sequence[Array], whole: Array, dim: int) -> int:
    """Return the smallest number of chunks whose blocks, side by side, are the parts; 0 if there is none."""
    size = parts[0].shape[dim]
    for chunks in range(1, size + 1):
        if size % chunks == 0:
            pieces = zip(*(np.split(part, chunks, axis=dim) for part in parts), strict=True)
            if close(np.concatenate([piece for chunk in pieces for piece in chunk], axis=dim), whole):
                return chunks
    return 0


_REDUCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "sum": lambda terms: terms.sum(axis=0),
    "max": lambda terms: terms.max(axis=0),
    "min": lambda terms: terms.min(axis=0),
    "mean": lambda terms: terms.mean(axis=0),
    "prod": lambda terms: terms.prod(axis=0),
    "logsumexp": lambda terms: np.logaddexp.reduce(terms, axis=0),
}
"""Reductions over the first dim, those tried first that are met most."""

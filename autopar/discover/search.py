"""The search for strategies: run the op on shards, put the parts together, compare with the whole.

A candidate shards at most one dim of each tensor input (and may divide some numbers inside the op). It is a strategy if
every output of the n local runs can be put together in one of these ways, tried in this order:

    identity   every part equals the whole                        -> Replicate
    concat     the parts, side by side along one dim, are it      -> Shard(dim)
    reduction  their sum, maximum, minimum or mean is it          -> Partial(...)

Then inputs are split into random terms instead: an op that is linear in an input maps partial sums to partial sums.
Whatever is found with 2 shards on the even proxy is confirmed on the triple proxy, with other data and 3 shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover.data import sample
from autopar.discover.rules import Rule, Scaled, Strategy
from autopar.discover.shrink import Proxy, run_sketch
from autopar.discover.sketch import Operand, Sketch
from autopar.execute import Executor
from autopar.ir.graph import Attr
from autopar.sharding import Partial, Placement, Replicate, Shard

Array = NDArray[Any]

_MAX_EXECUTIONS = 4000
"""Per signature; a search that reaches it stops and says so."""
_MAX_PRODUCT = 400
"""Up to this many candidates all are tried; above, only those whose sharded dims have equal or divisible sizes."""
_MAX_PAIRED = 6
"""Up to this many float inputs all pairs are tried as partial sums; above, single ones and all of them."""
_TOLERANCE = {8: 1e-9, 4: 1e-4, 2: 1e-2}
"""Largest error relative to the largest element, by bytes per float of the output; kernels that compute in float32
whatever they are fed show in the output type."""


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
        self._sketches: dict[tuple[tuple[Scaled, ...], int], Sketch | None] = {}

    def run(self, placements: Sequence[Placement], scaled: tuple[Scaled, ...], n: int) -> tuple[Placement, ...] | None:
        """Return the placements of the outputs when the op runs on n devices whose inputs are placed so.

        Returns:
            One placement per output, or None if the parts do not combine, a kernel refuses its part or something is
            not divisible by n.
        """
        sketch = self._local(scaled, n)
        if sketch is None or any(self._indivisible(i, placement, n) for i, placement in enumerate(placements)):
            return None
        local = [self._part(i, placement, n) for i, placement in enumerate(placements)]
        parts: list[tuple[Array, ...]] = []
        for rank in range(n):
            arrays: list[Array | None] = [part[rank] if part else None for part in local]
            for scale in scaled:
                if isinstance(scale.source, int):
                    operand = sketch.inputs[scale.source]
                    assert operand is not None, "only constants are scaled"
                    arrays[scale.source] = operand.array()
            self.num_executions += 1
            outputs = run_sketch(sketch, arrays, self._executor)
            if outputs is None or (rank == 0 and not self._may_combine(outputs, n)):
                return None
            parts.append(outputs)
        combined = [
            recombine([part[i] for part in parts], whole) if self._wanted[i] else Replicate()
            for i, whole in enumerate(self.whole)
        ]
        found = tuple(placement for placement in combined if placement is not None)
        return found if len(found) == len(combined) else None

    def keeps_shape(self, placements: Sequence[Placement], n: int) -> bool:
        """Whether the first device's outputs have the shapes of the whole: the parts could be terms of a sum."""
        if any(self._indivisible(i, placement, n) for i, placement in enumerate(placements)):
            return False
        local = [self._part(i, placement, n) for i, placement in enumerate(placements)]
        self.num_executions += 1
        outputs = run_sketch(self.proxy.sketch, [part[0] if part else None for part in local], self._executor)
        return outputs is not None and [o.shape for o in outputs] == [w.shape for w in self.whole]

    def _may_combine(self, outputs: tuple[Array, ...], n: int) -> bool:
        """Whether the first device's outputs look like parts of the whole ones."""
        each = zip(self._wanted, outputs, self.whole, strict=True)
        return all(_may_combine(output, whole, n) for wanted, output, whole in each if wanted)

    def _indivisible(self, index: int, placement: Placement, n: int) -> bool:
        array = self.arrays[index]
        return isinstance(placement, Shard) and (array is None or array.shape[placement.dim] % n != 0)

    def _part(self, index: int, placement: Placement, n: int) -> list[Array]:
        """Return what each device holds of an input; empty if it is absent."""
        array = self.arrays[index]
        if array is None:
            return []
        key = (index, placement, n)
        if key not in self._parts:
            match placement:
                case Replicate():
                    parts = [array] * n
                case Shard(dim):
                    parts = [np.ascontiguousarray(part) for part in np.split(array, n, axis=dim)]
                case Partial():
                    rng = np.random.default_rng([index, n])
                    terms = [rng.standard_normal(array.shape) for _ in range(n - 1)]
                    parts = [*terms, array - sum(terms)]
            self._parts[key] = parts
        return self._parts[key]

    def _local(self, scaled: tuple[Scaled, ...], n: int) -> Sketch | None:
        """Return the op one device runs: numbers in `scaled` divided by n."""
        key = (scaled, n)
        if key not in self._sketches:
            self._sketches[key] = scale(self.proxy.sketch, scaled, n)
        return self._sketches[key]


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


def _may_combine(part: Array, whole: Array, n: int) -> bool:
    """Whether the first part has the whole's shape, or is its first n-th along one dim."""
    if part.shape == whole.shape:
        return True
    dim = _concat_dim(part, whole, n)
    return dim is not None and close(part, whole[(slice(None),) * dim + (slice(0, part.shape[dim]),)])


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
        return Shard(dim) if dim is not None and close(np.concatenate(parts, axis=dim), whole) else None
    if all(close(part, whole) for part in parts):
        return Replicate()
    if whole.dtype.kind not in "fiu":
        return None
    stacked = np.stack(parts)
    with np.errstate(all="ignore"):
        if close(stacked.sum(axis=0, dtype=whole.dtype), whole):
            return Partial("sum")
        if close(stacked.max(axis=0), whole):
            return Partial("max")
        if close(stacked.min(axis=0), whole):
            return Partial("min")
        if whole.dtype.kind == "f" and close(stacked.mean(axis=0, dtype=whole.dtype), whole):
            return Partial("mean")
    return None


def _candidates(sketch: Sketch) -> Iterator[tuple[Placement, ...]]:
    """Iterate over the ways to shard one dim, or none, of each tensor input; not the one that shards nothing."""
    options: list[list[int]] = [
        []
        if operand is None or operand.content is not None
        else [d for d, size in enumerate(operand.shape) if size > 1]
        for operand in sketch.inputs
    ]
    shapes = [operand.shape if operand is not None else () for operand in sketch.inputs]

    def choices(allowed: list[list[int]]) -> Iterator[tuple[Placement, ...]]:
        placements: list[list[Placement]] = [[Replicate(), *map(Shard, dims)] for dims in allowed]
        for choice in product(*placements):
            if any(isinstance(placement, Shard) for placement in choice):
                yield choice

    def many(allowed: list[list[int]]) -> Iterator[tuple[Placement, ...]]:
        """All, all but one, or one of many inputs."""
        full: list[Placement] = [Shard(dims[0]) if dims else Replicate() for dims in allowed]
        sharded = [i for i, placement in enumerate(full) if isinstance(placement, Shard)]
        yield tuple(full)
        for index in sharded:
            yield tuple(Replicate() if i == index else placement for i, placement in enumerate(full))
            yield tuple(placement if i == index else Replicate() for i, placement in enumerate(full))

    if prod(1 + len(dims) for dims in options) <= _MAX_PRODUCT:
        yield from choices(options)
        return
    seen: set[tuple[Placement, ...]] = set()
    sizes = sorted({shapes[i][dim] for i, dims in enumerate(options) for dim in dims})
    groups = [{size} for size in sizes]
    groups += [{small, large} for small, large in combinations(sizes, 2) if large % small == 0]
    for group in groups:
        allowed = [[dim for dim in dims if shapes[i][dim] in group] for i, dims in enumerate(options)]
        tries = choices if prod(1 + len(dims) for dims in allowed) <= _MAX_PRODUCT else many
        for candidate in tries(allowed):
            if any(isinstance(placement, Shard) for placement in candidate) and candidate not in seen:
                seen.add(candidate)
                yield candidate


def _scalings(scalable: tuple[Scaled, ...]) -> list[tuple[Scaled, ...]]:
    """Return the sets of numbers to try dividing: none, one, or two in different places."""
    pairs = [pair for pair in combinations(scalable, 2) if pair[0].source != pair[1].source]
    return [(), *((single,) for single in scalable), *pairs]


def _float_inputs(sketch: Sketch) -> list[int]:
    return [
        i
        for i, operand in enumerate(sketch.inputs)
        if operand is not None and operand.is_float and operand.content is None
    ]


def _terms(sketch: Sketch) -> Iterator[tuple[Placement, ...]]:
    """Iterate over the sets of inputs that could be partial sums together: one, two, or all."""
    floats = _float_inputs(sketch)
    sets: list[tuple[int, ...]] = [(i,) for i in floats]
    if len(floats) <= _MAX_PAIRED:
        sets += combinations(floats, 2)
    if len(floats) > 2:
        sets.append(tuple(floats))
    for chosen in sets:
        yield tuple(Partial() if i in chosen else Replicate() for i in range(len(sketch.inputs)))


@dataclass(frozen=True, slots=True)
class _Found:
    """Strategies of the even proxy, before they are confirmed."""

    strategies: list[Strategy]
    reason: str


def _explore(trial: Trial) -> _Found:
    """Return all strategies on 2 devices."""
    sketch = trial.proxy.sketch
    scalings = _scalings(trial.proxy.scalable)
    floats = _float_inputs(sketch)
    found: list[Strategy] = []
    whole = (Replicate(),) * len(sketch.inputs)
    for scaled in scalings[1:]:  # an output made from a shape alone (Expand, OneHot) is made in shards
        outputs = trial.run(whole, scaled, 2)
        if outputs is not None and any(isinstance(placement, Shard) for placement in outputs):
            found.append(Strategy(whole, outputs, scaled))
    for placements in _candidates(sketch):
        if trial.num_executions > _MAX_EXECUTIONS:
            return _Found(found, f"search stopped after {trial.num_executions} executions")
        for scaled in scalings:
            outputs = trial.run(placements, scaled, 2)
            if outputs is not None:
                found.append(Strategy(placements, outputs, scaled))
                break
        else:
            # A bias is added once: with the contraction sharded, it has to be a partial sum itself.
            rest = [i for i in floats if isinstance(placements[i], Replicate)]
            if rest and sum(isinstance(p, Shard) for p in placements) > 1 and trial.keeps_shape(placements, 2):
                for index in rest:
                    mixed = tuple(Partial() if i == index else placement for i, placement in enumerate(placements))
                    outputs = trial.run(mixed, (), 2)
                    if outputs is not None:
                        found.append(Strategy(mixed, outputs))
    for placements in _terms(sketch):
        outputs = trial.run(placements, (), 2)
        if outputs is not None:
            found.append(Strategy(placements, outputs))
    return _Found(found, "")


def _confirmed(strategy: Strategy, trial: Trial) -> bool:
    """Whether a strategy holds on 3 devices, or on 2 if a fixed size is not divisible by 3."""
    for n in (3, 2):
        sizes = [
            array.shape[placement.dim]
            for array, placement in zip(trial.arrays, strategy.inputs, strict=True)
            if isinstance(placement, Shard) and array is not None
        ]
        if all(size % n == 0 for size in sizes) and scale(trial.proxy.sketch, strategy.scaled, n) is not None:
            return trial.run(strategy.inputs, strategy.scaled, n) == strategy.outputs
    return False


def find_rule(sketch: Sketch, proxies: tuple[Proxy, Proxy], executor: Executor) -> Rule:
    """Discover the rule of an op on its even and its triple proxy.

    Args:
        sketch: The real op, of which only the ranks are used.
        proxies: From `shrink`.
        executor: Runs the op.
    """
    even, triple = proxies
    replicate = Strategy((Replicate(),) * len(sketch.inputs), (Replicate(),) * len(sketch.outputs))
    data = sample(even.sketch, 1, executor), sample(triple.sketch, 2, executor), sample(triple.sketch, 3, executor)
    strategies: list[Strategy] = []
    executions = len(data)
    if any(part is None for part in data):
        reason = "replicated: every data tried gives NaN or an error"
    else:
        trials = [
            Trial(proxy, *part, executor) for proxy, part in zip((even, triple, triple), data, strict=True) if part
        ]
        first = trials[0]
        again = run_sketch(even.sketch, first.arrays, executor)
        if again is None or not all(close(a, b) for a, b in zip(again, first.whole, strict=True)):
            reason = "replicated: two runs on the same data differ"
        else:
            found = _explore(first)
            reason = found.reason
            strategies = [strategy for strategy in found.strategies if all(_confirmed(strategy, t) for t in trials[1:])]
        executions += 1 + sum(trial.num_executions for trial in trials)
    return Rule(
        kind=sketch.kind,
        strategies=(replicate, *strategies),
        signature=signature(proxies),
        input_ranks=_ranks(sketch),
        output_ranks=tuple(len(shape or ()) for shape in sketch.outputs),
        num_executions=executions,
        reason=reason,
    )


def no_rule(sketch: Sketch) -> Rule:
    """Return the rule of an op that could not be shrunk: replicate, and the reason."""
    replicate = Strategy((Replicate(),) * len(sketch.inputs), (Replicate(),) * len(sketch.outputs))
    reason = "replicated: no small shapes found on which it runs"
    return Rule(
        sketch.kind, (replicate,), sketch.digest, _ranks(sketch), tuple(len(s or ()) for s in sketch.outputs), 0, reason
    )


def signature(proxies: tuple[Proxy, Proxy]) -> str:
    """Return the hash a rule is filed under: two ops with the same proxies have the same rule."""
    even, triple = proxies
    return Sketch(repr(even), (), 0, repr(triple), (), ()).digest


def _ranks(sketch: Sketch) -> tuple[int | None, ...]:
    return tuple(None if operand is None or operand.is_shape_like else len(operand.shape) for operand in sketch.inputs)

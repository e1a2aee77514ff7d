"""The search for strategies: run the op on shards, put the parts together, compare with the whole.

A candidate shards at most one dim of each tensor input (and may divide some numbers inside the op). It is a strategy if
every output of the n local runs can be put together (`trial`).

Then inputs are split into random terms instead: an op that is linear in an input maps partial sums to partial sums.
Whatever is found with 2 shards on the even proxy is confirmed on the triple proxy, with other data and 3 shards.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

from autopar.discover.data import sample
from autopar.discover.halos import halo_strategies
from autopar.discover.locals import local_strategies
from autopar.discover.rules import Rule, Scaled, Strategy
from autopar.discover.shrink import Proxy, run_sketch
from autopar.discover.sketch import Sketch
from autopar.discover.trial import Trial, close, local_sketch
from autopar.execute import Executor
from autopar.sharding import Partial, Placement, Replicate, Shard

_MAX_EXECUTIONS = 4000
"""Per signature; a search that reaches it stops and says so."""
_MAX_PRODUCT = 400
"""Up to this many candidates all are tried; above, only those whose sharded dims have equal or divisible sizes."""
_MAX_PAIRED = 6
"""Up to this many float inputs all pairs are tried as partial sums; above, single ones and all of them."""


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

    def attempt(candidate: Strategy) -> Strategy | None:
        outputs = trial.run(candidate, 2)
        return None if outputs is None else replace(candidate, outputs=outputs)

    whole = (Replicate(),) * len(sketch.inputs)
    for scaled in scalings[1:]:  # an output made from a shape alone (Expand, OneHot) is made in shards
        strategy = attempt(Strategy(whole, (), scaled))
        if strategy is not None and any(isinstance(placement, Shard) for placement in strategy.outputs):
            found.append(strategy)
    for placements in _candidates(sketch):
        if trial.num_executions > _MAX_EXECUTIONS:
            return _Found(found, f"search stopped after {trial.num_executions} executions")
        for scaled in scalings:
            strategy = attempt(Strategy(placements, (), scaled))
            if strategy is not None:
                found.append(strategy)
                break
        else:
            # A bias is added once: with the contraction sharded, it has to be a partial sum itself.
            rest = [i for i in floats if isinstance(placements[i], Replicate)]
            if rest and sum(isinstance(p, Shard) for p in placements) > 1 and trial.keeps_shape(placements, 2):
                for index in rest:
                    mixed = tuple(Partial() if i == index else placement for i, placement in enumerate(placements))
                    strategy = attempt(Strategy(mixed, ()))
                    if strategy is not None:
                        found.append(strategy)
    for placements in _terms(sketch):
        strategy = attempt(Strategy(placements, ()))
        if strategy is not None:
            found.append(strategy)
    found += local_strategies(trial, found)
    found += halo_strategies(trial, found)
    return _Found(found, "")


def _confirmed(strategy: Strategy, trial: Trial) -> bool:
    """Whether a strategy holds on 3 devices, or on 2 if a fixed size is not divisible by 3."""
    for n in (3, 2):
        pairs = [*zip(trial.arrays, strategy.inputs, strict=True), *zip(trial.whole, strategy.outputs, strict=True)]
        parts = [
            (array.shape[placement.dim], placement.chunks)
            for array, placement in pairs
            if isinstance(placement, Shard) and array is not None
        ]
        divisible = all(size % (n * chunks) == 0 for size, chunks in parts)
        if divisible and local_sketch(trial.proxy.sketch, strategy, n) is not None:
            return trial.run(strategy, n) == strategy.outputs
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

"""The search for strategies: run the op on shards, put the parts together, compare with the whole.

A candidate shards at most one dim of each tensor input (and may divide some numbers inside the op). It is a strategy if
every output of the n local runs can be put together (`trial`). Where the plain shard of a dim fails, it is sharded in
chunks (`chunks`). Then inputs are split into random terms instead (`terms`).

Whatever is found with 2 shards on the even proxy is confirmed on the triple proxy, with other data and 3 shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

from autopar.discover.chunks import chunked, is_multiple, readings
from autopar.discover.flags import holds_cyclic, holds_uneven
from autopar.discover.halos import halo_strategies
from autopar.discover.locals import local_strategies
from autopar.discover.per_device import with_own_means
from autopar.discover.probe_data import sample
from autopar.discover.rules import Rule, Scaled, Strategy
from autopar.discover.shrink import Proxy, run_sketch
from autopar.discover.sizes import refinement
from autopar.discover.sketch import Sketch
from autopar.discover.terms import IDEMPOTENT, as_terms, float_inputs, term_sets
from autopar.discover.trial import Trial, close
from autopar.execute import Executor
from autopar.progress import StopCallback, never
from autopar.sharding import Partial, Placement, Replicate, Shard

_MAX_EXECUTIONS = 4000
"""Per signature; a search that reaches it stops and says so."""
_FEW, _MORE = 6, 8
"""Outputs with fewer elements are confirmed on so many more data: a single element is the maximum of two by luck."""
_MAX_PRODUCT = 400
"""Up to this many candidates all are tried; above, only those whose sharded dims have equal or divisible sizes."""


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
        """All, all but one, or one of many inputs; where inputs have several dims, all their first, second, ..."""
        for at in range(max(map(len, allowed))):
            full = [Shard(dims[min(at, len(dims) - 1)]) if dims else Replicate() for dims in allowed]
            yield tuple(full)
            for index in (i for i, placement in enumerate(full) if isinstance(placement, Shard)):
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
    """Return the sets of numbers to try dividing: none, one, two in different places, or all in one place."""
    pairs = [pair for pair in combinations(scalable, 2) if pair[0].source != pair[1].source]
    places = [tuple(number for number in scalable if number.source == s) for s in {n.source: 0 for n in scalable}]
    lists = [place for place in places if len(place) > 1]
    return [(), *((single,) for single in scalable), *pairs, *lists]


@dataclass(frozen=True, slots=True)
class _Found:
    """Strategies of the even proxy, before they are confirmed."""

    strategies: list[Strategy]
    reason: str


def _explore(trial: Trial, should_stop: StopCallback) -> _Found:
    """Return all strategies on 2 devices."""
    sketch, counts = trial.proxy.sketch, trial.proxy.counts
    scalings = _scalings(trial.proxy.scalable)
    regroups = refinement(sketch) is not None
    floats = float_inputs(sketch)
    found: list[Strategy] = []

    def stopped() -> bool:
        return trial.num_executions > _MAX_EXECUTIONS or should_stop()

    def early() -> _Found:
        return _Found(found, f"search stopped after {trial.num_executions} executions")

    def attempt(candidate: Strategy) -> bool:
        outputs = trial.run(candidate, 2)
        if outputs is None:
            return False
        strategy = replace(candidate, outputs=outputs)
        if not is_multiple(strategy, found):
            found.append(strategy)
        return True

    def attempt_scaled(placements: Sequence[Placement]) -> bool:
        return any(attempt(Strategy(tuple(placements), (), scaled)) for scaled in scalings)

    whole = (Replicate(),) * len(sketch.inputs)
    for scaled in scalings[1:]:  # an output made from a shape alone (Expand, OneHot) is made in shards
        outputs = trial.run(Strategy(whole, (), scaled), 2)
        if outputs is not None and any(isinstance(placement, Shard) for placement in outputs):
            found.append(Strategy(whole, outputs, scaled))
    for placements in _candidates(sketch):
        if stopped():
            return early()
        holds = attempt_scaled(placements)
        if not holds:
            # A bias is added once: with the contraction sharded, it has to be a partial sum itself.
            rest = [i for i in floats if isinstance(placements[i], Replicate)]
            if rest and sum(isinstance(p, Shard) for p in placements) > 1 and trial.keeps_shape(placements, 2):
                for index in rest:
                    attempt(Strategy((*placements[:index], Partial(), *placements[index + 1 :]), ()))
        if regroups or not holds:
            for candidate in chunked(placements, sketch, counts):
                attempt_scaled(candidate)
    for strategy in _partial_strategies(trial):
        if stopped():
            return early()
        found.append(strategy)
    found += local_strategies(trial, found)
    found += halo_strategies(trial, found)
    return _Found(found, "")


def _partial_strategies(trial: Trial) -> Iterator[Strategy]:
    """Iterate over the strategies on 2 devices that only take terms."""
    sets: dict[str, list[tuple[int, ...]]] = {}
    for reduce, chosen in term_sets(trial.proxy.sketch):
        if reduce in IDEMPOTENT and any(set(chosen) <= set(larger) for larger in sets.get(reduce, ())):
            continue
        placements = as_terms(trial.proxy.sketch, reduce, chosen)
        outputs = trial.run(Strategy(placements, ()), 2)
        if outputs is not None and _follows(trial, placements, outputs):
            sets.setdefault(reduce, []).append(chosen)
            yield Strategy(placements, outputs)


def _follows(trial: Trial, placements: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> bool:
    """Whether what is found for terms is more than luck: outputs that are no terms do not depend on them at all.

    An op that reads only the shape of an input takes any terms; that is recorded for sums alone. Factors made of the
    terms of a sum (exponentials) overflow where their product does not, so they are no way to compute it.
    """
    if any(placement == Partial("prod") for placement in outputs) and Partial("prod") not in placements:
        return False
    if not any(isinstance(placement, Replicate) for placement in outputs):
        return True
    terms = [index for index, placement in enumerate(placements) if isinstance(placement, Partial)]
    read = any(isinstance(placement, Partial) for placement in outputs)
    return (read or Partial() in placements) and trial.ignores(terms, outputs)


def _confirmed(strategy: Strategy, trials: Sequence[Trial]) -> Strategy | None:
    """Return a strategy of the first trial as it is on the real op if it holds in the others, else None."""
    first, *others = trials
    for on_triple, on_real in readings(strategy, first.proxy.counts):
        if all(_repeats(on_triple, trial) for trial in others):
            last = others[-1]
            return replace(
                on_real,
                cyclic=holds_cyclic(strategy, first, finest=False) and holds_cyclic(on_triple, last, finest=True),
                uneven=holds_uneven(strategy, first) and holds_uneven(on_triple, last),
            )
    return None


def _repeats(strategy: Strategy, trial: Trial) -> bool:
    """Whether a strategy holds on 3 devices, or on 2 if a fixed size is not divisible by 3."""
    n = trial.divisor(strategy)
    return n is not None and trial.run(strategy, n) == strategy.outputs


def find_rule(
    sketch: Sketch, proxies: tuple[Proxy, Proxy], executor: Executor, should_stop: StopCallback = never
) -> Rule:
    """Discover the rule of an op on its even and its triple proxy.

    Args:
        sketch: The real op, of which only the ranks are used.
        proxies: From `shrink`.
        executor: Runs the op.
        should_stop: Polled before each candidate; once true, what was found so far is confirmed and returned.
    """
    even, triple = proxies
    replicate = Strategy((Replicate(),) * len(sketch.inputs), (Replicate(),) * len(sketch.outputs))
    few = any(prod(shape) < _FEW for shape in even.sketch.outputs if shape is not None)
    data = [
        sample(even.sketch, 1, executor),
        sample(triple.sketch, 2, executor),
        sample(triple.sketch, 3, executor, wide=True),
        *(sample(triple.sketch, seed, executor) for seed in range(4, 4 + few * _MORE)),
    ]
    strategies: list[Strategy] = []
    executions = len(data)
    if any(part is None for part in data):
        reason = "replicated: every data tried gives NaN, nothing or an error"
    else:
        trials = [Trial(triple if i else even, *part, executor) for i, part in enumerate(data) if part]
        first = trials[0]
        again = run_sketch(even.sketch, first.arrays, executor)
        if again is None or not all(close(a, b) for a, b in zip(again, first.whole, strict=True)):
            reason = "replicated: two runs on the same data differ"
        else:
            found = _explore(first, should_stop)
            reason = found.reason
            confirmed = {strategy: _confirmed(strategy, trials) for strategy in found.strategies}
            strategies = list(dict.fromkeys(filter(None, confirmed.values())))
        executions += 1 + sum(trial.num_executions for trial in trials)
    return Rule(
        kind=sketch.kind,
        strategies=with_own_means(sketch.kind, dict(sketch.attrs), (replicate, *strategies)),
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

"""Beam search: degrees are decided one after the other, and only the best few beginnings are followed.

A beginning is as good as the best of its completions by rules of thumb: tensor parallelism none or a whole node, ZeRO-1
or ZeRO-3, few or some samples per microbatch, any recompute. With one beginning kept it is greedy search.
"""

from collections.abc import Iterator

from autopar.bench.baselines.degree_space import DECISIONS, DegreeSpace, Partial, Value
from autopar.bench.baselines.race import Race

WIDTH = 16
"""Beginnings kept."""

Energy = tuple[float, float]


def beam(race: Race) -> None:
    """Follow the best beginnings."""
    _follow(race, WIDTH)


def greedy(race: Race) -> None:
    """Take the best value of each degree in turn."""
    _follow(race, 1)


def _follow(race: Race, width: int) -> None:
    space = race.space
    kept: list[Partial] = [{}]
    for name in DECISIONS:
        scored: list[tuple[Energy, int, Partial]] = []
        for partial in kept:
            for value in space.options(partial):
                if race.stopped:
                    return
                if name == "gpus" and isinstance(value, int) and not race.is_tried(value):
                    continue
                longer = {**partial, name: value}
                scored.append((_score(race, longer), len(scored), longer))
        scored.sort(key=lambda item: item[:2])
        kept = [partial for _, _, partial in scored[:width]]


def _score(race: Race, partial: Partial) -> Energy:
    """Return excess bytes and seconds of the best completion by rules of thumb; of those priced once it is stopped."""
    least = (float("inf"), float("inf"))
    for leaf in completions(race.space, partial):
        if race.stopped:
            break
        price = race.price(race.space.degrees(leaf))
        least = min(least, (price.excess, price.seconds))
    return least


def completions(space: DegreeSpace, partial: Partial) -> Iterator[Partial]:
    """Yield the completions of a beginning by rules of thumb."""
    if len(partial) == len(DECISIONS):
        yield partial
        return
    name = DECISIONS[len(partial)]
    for value in _thumb(space, name, space.options(partial)):
        yield from completions(space, {**partial, name: value})


def _thumb(space: DegreeSpace, name: str, options: tuple[Value, ...]) -> tuple[Value, ...]:
    if not options:
        return ()
    match name:
        case "gpus" | "pp" | "cp":
            return options[:1]
        case "tp":
            inside = [tp for tp in options if isinstance(tp, int) and tp <= space.node]
            return tuple(dict.fromkeys((options[0], inside[-1]))) if inside else options[:1]
        case "ep":
            return options[-1:]
        case "microbatch":
            return tuple(dict.fromkeys((options[0], options[min(2, len(options) - 1)])))
        case "flow":
            return options[:1]
        case "zero":
            return tuple(stage for stage in options if stage in (1, 3)) or options[:1]
        case "sequence_parallel":
            return options[-1:]
        case _:
            return options

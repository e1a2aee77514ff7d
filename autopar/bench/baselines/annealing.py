"""Simulated annealing: one degree of a plan is changed at random, and a worse plan taken the more rarely the cooler.

The energy of a plan is the logarithm of its seconds, and much more for every byte over the limit, so that a walk finds
its way to plans that fit. Several walks start from random plans.
"""

import math
from random import Random

from autopar.bench.baselines.degree_space import DECISIONS, Partial, Value
from autopar.bench.baselines.race import Race

WALKS = 6
STEPS = 1500
HOT, COLD = 0.3, 0.002
"""First and last temperature, in units of the energy: a plan 35 % slower is taken one time in e, then 0.2 %."""
OVERFULL = 3.0
"""Energy of being over the limit by once as much."""


def annealing(race: Race) -> None:
    """Walk through the space from several places, seed 0."""
    random = Random(0)
    for _ in range(WALKS if race.options({}) else 0):
        place = random_leaf(race, random)
        energy = _energy(race, place)
        for step in range(STEPS):
            if race.stopped:
                return
            heat = HOT * (COLD / HOT) ** (step / STEPS)
            other = _moved(race, place, random)
            found = _energy(race, other)
            if found <= energy or random.random() < math.exp((energy - found) / heat):
                place, energy = other, found


def random_leaf(race: Race, random: Random, partial: Partial | None = None) -> Partial:
    """Return a random completion of a beginning."""
    found = dict(partial or {})
    while len(found) < len(DECISIONS):
        found[DECISIONS[len(found)]] = random.choice(race.options(found))
    return found


def _energy(race: Race, leaf: Partial) -> float:
    price = race.price(race.space.degrees(leaf))
    if not math.isfinite(price.seconds):
        return math.inf
    return math.log(price.seconds) + (OVERFULL * (1 + price.excess) if price.excess else 0.0)


def _moved(race: Race, leaf: Partial, random: Random) -> Partial:
    """Return a plan with one decision changed; what depends on it stays as near as it can."""
    changed = random.choice([name for name in DECISIONS if len(_options(race, leaf, name)) > 1] or list(DECISIONS))
    found: dict[str, Value] = {}
    for name in DECISIONS:
        options = race.options(found)
        if name == changed:
            others = [value for value in options if value != leaf[name]] or list(options)
            found[name] = random.choice(others)
        else:
            found[name] = leaf[name] if leaf[name] in options else _nearest(leaf[name], options)
    return found


def _options(race: Race, leaf: Partial, name: str) -> tuple[Value, ...]:
    return race.options({known: leaf[known] for known in DECISIONS[: DECISIONS.index(name)]})


def _nearest(wanted: Value, options: tuple[Value, ...]) -> Value:
    numbers = [value for value in options if isinstance(value, int)]
    if isinstance(wanted, int) and numbers:
        return min(numbers, key=lambda value: abs(math.log((1 + value) / (1 + wanted))))
    return options[0]

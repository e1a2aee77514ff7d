"""Monte Carlo tree search over the tree of decisions (UCT), with random completions.

Automap and PartIR search so, over shardings instead of degrees; `tactics.Automatic` with method "mcts" is the like for
placements. A visit is worth the best seconds so far over those of the plan it ended in, less for a plan that does not
fit; the tree is kept for the whole search.
"""

import math
from dataclasses import dataclass, field
from random import Random

from autopar.bench.baselines.annealing import random_leaf
from autopar.bench.baselines.degree_space import DECISIONS, Partial, Value
from autopar.bench.baselines.race import Price, Race

VISITS = 8000
EXPLORE = 0.5
"""Weight of the bonus of rarely visited nodes; worths are between 0 and 1."""


@dataclass(eq=False)
class _Node:
    """A beginning: its options, and what visits were worth by option."""

    options: tuple[Value, ...]
    visits: int = 0
    worth: float = 0.0
    children: dict[Value, "_Node"] = field(default_factory=dict)


def mcts(race: Race) -> None:
    """Visit the tree many times, seed 0."""
    random = Random(0)
    root = _Node(race.options({}))
    for _ in range(VISITS if root.options else 0):
        if race.stopped:
            return
        root.options = race.options({})  # numbers of devices that may win, by the best plan so far
        path, partial = _descend(race, root, random)
        price = race.price(race.space.degrees(random_leaf(race, random, partial)))
        worth = _worth(race, price)
        for node in path:
            node.visits += 1
            node.worth += worth


def _descend(race: Race, root: _Node, random: Random) -> tuple[list[_Node], Partial]:
    """Return the nodes from the root to a new one, and its decisions."""
    node, path = root, [root]
    partial: dict[str, Value] = {}
    while len(partial) < len(DECISIONS):
        name = DECISIONS[len(partial)]
        fresh = [value for value in node.options if value not in node.children]
        known = [value for value in node.options if value in node.children]
        value = random.choice(fresh) if fresh else max(known, key=lambda own, at=node: _bound(at, own))  # type: ignore[misc]  # bound by default
        partial[name] = value
        if value not in node.children:
            options = race.space.options(partial) if len(partial) < len(DECISIONS) else ()
            node.children[value] = _Node(options)
        node = node.children[value]
        path.append(node)
        if fresh:
            break
    return path, partial


def _bound(node: _Node, value: Value) -> float:
    child = node.children[value]
    return child.worth / child.visits + EXPLORE * math.sqrt(math.log(node.visits) / child.visits)


def _worth(race: Race, price: Price) -> float:
    if not price.fits:
        return 0.0 if math.isinf(price.excess) else 0.1 / (1 + price.excess)
    return race.best / price.seconds

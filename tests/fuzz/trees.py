"""Mutations of the structure of a file: tables, lists and values, whatever they are written as."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz import edges

Place = tuple[Any, Any]
"""A table or list, and the key or index of an item of it."""


def mutated(random: Random, tree: Any) -> Any:
    """Return a tree with one to three of its places changed; the tree itself is left as it is."""
    changed = {"": deepcopy(tree)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(changed))
        holder, key = random.choice(places)
        random.choice(_MUTATIONS)(random, holder, key, places)
        if "" not in changed:
            changed[""] = edges.value(random)
    return changed[""]


def _places(tree: Any) -> Iterator[Place]:
    """Yield every item of every table and list, outermost first."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield tree, key
        yield from _places(item)


def _other_value(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    holder[key] = edges.akin(random, holder[key])


def _any_value(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    holder[key] = edges.value(random)


def _left_out(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    del holder[key]


def _swapped(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    other, place = random.choice(places)
    holder[key] = deepcopy(other[place])


def _further(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    if isinstance(holder, list):
        holder.insert(key, random.choice((deepcopy(holder[key]), edges.value(random))))
    else:
        holder[edges.text(random)] = edges.value(random)


def _renamed(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    if isinstance(holder, dict):
        holder[random.choice((edges.text(random), f"{key}s", key.upper()))] = holder.pop(key)


def _emptied(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    if isinstance(holder[key], dict | list):
        holder[key].clear()


def _reordered(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    if isinstance(holder, list):
        random.shuffle(holder)


def _repeated(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    if isinstance(holder, list):
        holder.extend(deepcopy(holder) * random.choice((1, 30)))


def _wrapped(random: Random, holder: Any, key: Any, places: list[Place]) -> None:
    holder[key] = random.choice(([holder[key]], {"x": holder[key]}))


_MUTATIONS: tuple[Callable[[Random, Any, Any, list[Place]], None], ...] = (
    _other_value, _other_value, _other_value, _any_value, _any_value, _left_out, _swapped, _further, _renamed,
    _emptied, _reordered, _repeated, _wrapped,
)  # fmt: skip

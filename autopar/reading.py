"""Files of settings as trees of tables, lists and values: JSON, YAML and TOML.

What no field of any file means is refused here, once, with the place it stands at: numbers that are not finite or
longer than 64 bits, text with control characters, and aliases of YAML that come to more than they say. So readers of
fields need to look at types and ranges only.
"""

import json
import math
import tomllib
from collections.abc import Callable
from typing import Any

import yaml

from autopar.escaping import is_plain, one_line

MAX_ITEMS = 10_000_000
"""Items of a tree, those behind aliases counted each time; the plan of a model of 100,000 ops has fewer."""
MAX_DEPTH = 100
"""Levels of tables and lists inside each other; files have ten."""
_DEEP = "it is nested too deeply"
_MAX_WHOLE = 2**63
_SHOWN = 60
"""Characters of a text that a message shows."""


class UnreadableError(ValueError):
    """A text is not in its format, or holds what no field means.

    Attributes:
        line: Line of the text, from 1; None if it is unknown.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line

    def in_file(self, source: str) -> str:
        """Return in one line what is wrong with a file, and where.

        >>> UnreadableError("found a tab", 3).in_file("cluster.yaml")
        'cluster.yaml, line 3: found a tab'
        """
        return f"{source}{'' if self.line is None else f', line {self.line}'}: {self.args[0]}"


def parse_json(text: str | bytes, *, foreign: bool = False) -> Any:
    """Return what a JSON text holds; for `foreign` see `check`.

    Raises:
        UnreadableError: If it is no JSON, or holds what no field means.
    """
    return _parse(lambda: json.loads(text), foreign)


def parse_toml(text: str, *, foreign: bool = False) -> dict[str, Any]:
    """Return what a TOML text holds; for `foreign` see `check`.

    Raises:
        UnreadableError: If it is no TOML, or holds what no field means.
    """
    tables: dict[str, Any] = _parse(lambda: tomllib.loads(text), foreign)
    return tables


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds; a key that is given twice is an error.

    Raises:
        UnreadableError: If it is no YAML, or holds what no field means.
    """
    try:
        return _parse(lambda: yaml.load(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UnreadableError(one_line(error.problem or str(error)), None if mark is None else mark.line + 1) from None
    except yaml.YAMLError as error:
        raise UnreadableError(one_line(str(error).partition("\n")[0])) from None


def _parse(load: Callable[[], Any], foreign: bool = False) -> Any:
    try:
        tree = load()
    except RecursionError:
        raise UnreadableError(_DEEP) from None
    except ValueError as error:  # of json and tomllib, and of int() on more digits than Python takes
        raise UnreadableError(one_line(str(error).partition(";")[0])) from None
    check(tree, foreign=foreign)
    return tree


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice, of which YAML would take the last, and values that are not of their tag."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See `yaml.SafeLoader`."""
        known: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                known.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """See `yaml.SafeLoader`, whose constructors take the text of a scalar for what its tag says it is."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{_shortened(node.value)} cannot be read as {kind}", node.start_mark
            ) from None


def check(tree: Any, *, foreign: bool = False) -> None:
    """Check that a tree of tables, lists and values holds nothing that no field means.

    Args:
        tree: The tree.
        foreign: Whether it is of another program's file, whose texts may be of several lines and numbers infinite.
            Whoever shows a text escapes it.

    Raises:
        UnreadableError: If a number is not finite or longer than 64 bits, a text or a key has control characters, or
            aliases make it larger than `MAX_ITEMS`, or part of itself.
    """
    sizes: dict[int, int] = {}
    stack: list[tuple[str, Any, int, bool]] = [("", tree, 0, False)]
    while stack:
        place, item, depth, entered = stack.pop()
        if not isinstance(item, dict | list | tuple):
            _check_value(place, item, foreign)
            continue
        children = list(item.items() if isinstance(item, dict) else enumerate(item))
        if entered:
            sizes[id(item)] = 1 + sum(sizes[id(child)] or 1 if _is_inner(child) else 1 for _, child in children)
            if sizes[id(item)] > MAX_ITEMS:
                raise UnreadableError(f"{place or 'it'} comes to more than {MAX_ITEMS:,} items with its aliases")
            continue
        if id(item) in sizes:
            if not sizes[id(item)]:
                raise UnreadableError(f"{place} is part of itself")
            continue
        if depth > MAX_DEPTH:
            raise UnreadableError(_DEEP)
        sizes[id(item)] = 0
        stack.append((place, item, depth, True))
        for key, child in children:
            _check_value(place, key, foreign)
            stack.append((_inside(place, key), child, depth + 1, False))


def _is_inner(item: Any) -> bool:
    return isinstance(item, dict | list | tuple)


def _inside(place: str, key: Any) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else str(key)


def _check_value(place: str, value: Any, foreign: bool) -> None:
    where = f"{one_line(place)} is " if place else ""
    if isinstance(value, float) and not foreign and not math.isfinite(value):
        raise UnreadableError(f"{where}{value}, not a finite number")
    if isinstance(value, int) and not -_MAX_WHOLE <= value < _MAX_WHOLE:
        raise UnreadableError(f"{where}{_digits(value)}, a number of more than 64 bits")
    if isinstance(value, str) and not foreign and not is_plain(value):
        raise UnreadableError(f"{where}{_shortened(value)}, which has control characters")


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 200 else f"about 2^{value.bit_length() - 1}"


def _shortened(text: str) -> str:
    return ascii(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")

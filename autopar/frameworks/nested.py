"""Fields by dotted name as nested mappings, and what of them files cannot hold."""

from collections.abc import Mapping
from typing import Any


def nested(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return fields by dotted name as nested mappings, in the order of their first names.

    >>> nested({"a.b": 1, "c": 2, "a.d": (3, 4)})
    {'a': {'b': 1, 'd': [3, 4]}, 'c': 2}
    """
    found: dict[str, Any] = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = list(value) if isinstance(value, tuple) else value
    return found

"""Trees written as JSON, YAML, TOML or arguments, with tokens that no writer would write."""

import json
import re
from typing import Any

import yaml

from tests.fuzz.edges import DEEP, Raw

_TOKEN = re.compile(r"""["']?@@RAW(.*?)WAR@@["']?""")
_NAMES = {
    "json": {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"},
    "yaml": {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"},
    "toml": {},
}


def as_json(tree: Any) -> bytes:
    """Return a tree as JSON."""
    return _filled(json.dumps(_marked(tree), indent=1, ensure_ascii=False), "json")


def as_yaml(tree: Any) -> bytes:
    """Return a tree as YAML."""
    return _filled(yaml.safe_dump(_marked(tree), sort_keys=False, width=10**6), "yaml")


def as_toml(tree: Any) -> bytes:
    """Return a tree as TOML; what is no table becomes one."""
    table = tree if isinstance(tree, dict) else {"x": tree}
    lines = [f"{_toml(key)} = {_toml(value)}\n" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(f"[{_toml(key)}]\n")
            lines += [f"{_toml(name)} = {_toml(item)}\n" for name, item in value.items()]
    return _filled("".join(lines), "toml")


def as_arguments(tree: Any) -> bytes:
    """Return a table as arguments of a script, one per line; a value of None stands for a flag."""
    table = tree if isinstance(tree, dict) else {"x": tree}
    return _filled(
        "".join(f"{key}\n" if value is None else f"{key} {_marked(value)}\n" for key, value in table.items()), "json"
    )


def _toml(value: Any) -> str:
    value = _marked(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '""' if value is None else json.dumps(value)


def _marked(tree: Any) -> Any:
    """Return a tree with its raw tokens as texts that `_filled` finds again."""
    if isinstance(tree, Raw):
        return f"@@RAW{tree}WAR@@"
    if isinstance(tree, dict):
        return {_marked(key): _marked(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_marked(value) for value in tree]
    return tree


def _filled(text: str, form: str) -> bytes:
    deep = {"deep list": "[" * DEEP + "]" * DEEP, "deep table": _table(form) * DEEP + "1" + "}" * DEEP}
    tokens = {**deep, **_NAMES[form]}
    return _TOKEN.sub(lambda found: tokens.get(found[1], found[1]), text).encode(errors="surrogatepass")


def _table(form: str) -> str:
    return "{a=" if form == "toml" else '{"a": '

"""Configurations that are Python: a function that sets fields of one, written and read back.

What is written holds imports, functions and literals only, so that no name of a model or a device is ever run; what is
read is parsed and never executed.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import ExportError

APPLY = "apply"
"""The function that sets fields."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Python that stands in a file as it is, such as a constructor without arguments."""

    text: str


def apply_function(fields: Mapping[str, object], doc: str) -> str:
    """Return the function that sets fields of a configuration, by dotted name, and returns it.

    >>> print(apply_function({"training.seq_len": 4096, "ac": Expression("FullAC.Config()")}, "Set fields."))
    def apply(config):
        \"\"\"Set fields.\"\"\"
        config.training.seq_len = 4096
        config.ac = FullAC.Config()
        return config
    <BLANKLINE>
    """
    lines = [f"def {APPLY}(config):", f'    """{doc}"""']
    lines += [f"    config.{name} = {_literal(value)}" for name, value in fields.items()]
    return "\n".join([*lines, "    return config", ""])


def _literal(value: object) -> str:
    return value.text if isinstance(value, Expression) else ascii(value)


def is_python(text: str) -> bool:
    """Return whether a configuration is Python with a function that sets fields."""
    return f"def {APPLY}(" in text


def read_fields(text: str) -> dict[str, Any]:
    r"""Return the fields that `apply` sets, as nested mappings; a call without arguments is the name of its class.

    Raises:
        ExportError: If the file is no Python, or the function sets something else than fields.

    >>> read_fields("def apply(config):\n    config.a.b = [1]\n    config.c = FullAC.Config()\n    return config\n")
    {'a': {'b': [1]}, 'c': 'FullAC'}
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExportError(f"the configuration is no Python: {error}", hint="give the file that was exported") from None
    found: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == APPLY and statement.args.args:
            root = statement.args.args[0].arg
            for inner in statement.body:
                if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                    _set(found, _dotted(inner.targets[0], root), _value(inner.value))
    if not found:
        raise ExportError(f"no function {APPLY!r} sets fields", hint="give the file that was exported")
    return found


def _set(tables: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ExportError(f"{'.'.join(names)} is set inside a value", hint="set the fields one by one")
        tables = inner
    tables[names[-1]] = value


def _dotted(node: ast.expr, root: str) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name) or node.id != root:
        raise ExportError(f"line {node.lineno} sets no field of {root}", hint=f"write {root}.section.field = value")
    return names


def _value(node: ast.expr) -> Any:
    """Return a literal, the name of a class that is made without arguments, or the text of any other expression."""
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        return ast.unparse(node.func).removesuffix(".Config")
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.unparse(node)

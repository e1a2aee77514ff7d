"""Write the references: every command with all its options, every public name with its signature.

    python docs/reference.py

Both pages are made of what the program itself says (help, signatures, docstrings); a test compares them with that.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import click  # noqa: E402

import autopar  # noqa: E402
from autopar.cli.commands import app  # noqa: E402

MODULES = ("autopar.alternatives", "autopar.bench", "autopar.page")
"""Modules beside the package itself whose names are for users, too."""

_COMMANDS = """# The command line

Made by `python docs/reference.py` from what `autopar COMMAND --help` says.
Results go to standard output, progress and errors to standard error.
Every option can stand in a [job file](using.md#job-files), too.
Exit codes: 0 done, 2 bad input, 3 nothing fits, 130 interrupted (with an answer that was cut short, or none).
141: the reader of standard output closed it.
Those of `autopar run` besides: 4 the run does not compute what the model computes, 5 a process failed.
"""
_NAMES = """# The Python interface

Made by `python docs/reference.py` from signatures and docstrings.
Everything works in seconds, bytes, FLOP/s and bytes/s.
What a caller can get wrong is an [error](errors.md) of its own; anything else is a mistake of autopar's.
"""


def commands() -> str:
    """Return the page of all commands."""
    context = click.Context(app, info_name="autopar")
    parts = [_COMMANDS, "\n## `autopar`\n", _table(app, context)]
    for name, command in sorted(app.commands.items()):
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(["autopar", name, *(_usage(own, inner) for own in command.params)]).strip()
        parts.append(f"\n## `{re.sub(' +', ' ', usage)}`\n\n{_text(command.help or '')}{_table(command, inner)}")
    return "".join(parts)


def _usage(parameter: click.Parameter, context: click.Context) -> str:
    return parameter.make_metavar(context) if isinstance(parameter, click.Argument) else ""


def _table(command: click.Command, context: click.Context) -> str:
    rows = [_row(own, context) for own in command.params if isinstance(own, click.Option)]
    return "".join(["\n| option | meaning |\n|---|---|\n", *rows])


def _row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None, "options are not hidden"
    names, meaning = record
    return f"| `{_cell(names)}` | {_cell(meaning).replace('  [', ' [')} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(text: str) -> str:
    return inspect.cleandoc(text) + "\n"


def names() -> str:
    """Return the page of all public names."""
    parts = [_NAMES, *(_entry("autopar", autopar, name) for name in autopar.__all__ if not name.startswith("_"))]
    for path in MODULES:
        module = import_module(path)
        parts.append(f"\n## `{path}`\n\n{_text(module.__doc__ or '').split(chr(10))[0]}\n")
        parts += [_entry(path, module, name) for name in module.__all__]
    return "".join(parts)


def _entry(path: str, module: Any, name: str) -> str:
    """Return signature and docstring of a name; of a class also its methods and properties."""
    value = getattr(module, name)
    if not callable(value):
        return f"\n### `{path}.{name}`\n\n`{value!r}`\n"
    parts = [f"\n### `{path}.{name}`\n", _block(f"{name}{_signature(value)}", value)]
    if inspect.isclass(value):
        parts += [_block(f"{name}.{own}{_signature(member)}", member) for own, member in _members(value)]
    return "".join(parts)


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if name.startswith("_") or not getattr(value, "__doc__", None):
            continue
        if isinstance(value, property | classmethod) or inspect.isfunction(value):
            yield name, value


def _signature(value: Any) -> str:
    """Return the parameters with their defaults; the docstring says what they are."""
    if isinstance(value, property):
        return ""
    parts: list[str] = []
    for parameter in inspect.signature(getattr(value, "__func__", value)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        sign = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        parts.append(f"{sign}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def _default(value: Any) -> str:
    if inspect.isfunction(value):
        return value.__name__
    return repr(value) if isinstance(value, str | int | float | tuple | None) else "..."


def _block(head: str, value: Any) -> str:
    return f"\n```text\n{head}\n\n{inspect.getdoc(value) or ''}\n```\n"


PAGES = {"commands.md": commands, "python.md": names}
"""What makes each page."""


def main() -> None:
    """Write both pages beside this file."""
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()

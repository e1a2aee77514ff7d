"""Job files: what would be typed on the command line, in a TOML file.

    model = "zoo:gpt2"
    gpus = 64
    [set]
    seq = 2048
    [solve]
    top-k = 5

A key is the long name of an option, or a command's argument in lower case. Keys above the first table go to every
command that knows them, those of a table named like a command to that command only. What is typed goes before what the
file says.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from autopar.errors import JobError
from autopar.reading import UnreadableError, parse_toml

JOB_FILE = "autopar.toml"
"""The job file that is read if it lies in the current folder and no other one is named."""

_NOT_IN_FILES = frozenset({"help", "version", "job"})


def read_job_file(path: Path, commands: Mapping[str, click.Command]) -> dict[str, dict[str, Any]]:
    """Return the defaults that a job file gives each command, by the names of its parameters.

    Args:
        path: The file.
        commands: The commands by name.

    Raises:
        JobError: If the file cannot be read, or says something that no command takes.
    """
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read job file {str(path)!r}: {error.strerror}", hint="name a file with --job") from None
    except (UnreadableError, UnicodeDecodeError) as error:
        raise JobError(f"job file {str(path)!r} is no TOML: {error}", hint="see https://toml.io") from None
    parameters = {name: dict(_parameters(command)) for name, command in commands.items()}
    everywhere = {key for known in parameters.values() for key in known}
    defaults: dict[str, dict[str, Any]] = {name: {} for name in commands}
    own: list[tuple[str, Mapping[str, Any]]] = []
    for key, value in content.items():
        if isinstance(value, dict) and key in commands and key not in everywhere:
            own.append((key, value))
            continue
        if key not in everywhere:
            raise _unknown(path, key, "", {*everywhere, *commands})
        for name, known in parameters.items():
            if key in known:
                defaults[name][_name(known[key])] = _value(path, key, value, known[key])
    for name, table in own:
        for key, value in table.items():
            if key not in parameters[name]:
                raise _unknown(path, key, f" in [{name}]", set(parameters[name]))
            parameter = parameters[name][key]
            defaults[name][_name(parameter)] = _value(path, key, value, parameter)
    return defaults


def _parameters(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    """Yield the parameters of a command by their keys in a file."""
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            yield parameter.make_metavar(click.Context(command)).strip("[].").lower(), parameter
            continue
        for option in parameter.opts:
            key = option.lstrip("-")
            if option.startswith("--") and key not in _NOT_IN_FILES:
                yield key, parameter


def _name(parameter: click.Parameter) -> str:
    assert parameter.name is not None, "a parameter of a command has a name"
    return parameter.name


def _value(path: Path, key: str, value: Any, parameter: click.Parameter) -> Any:
    """Return a value as the command line would have it: a table as NAME=VALUE, everything else as text."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise JobError(f"{key} = {value!r} in job file {str(path)!r}", hint=f"{key} is true or false")
        return value
    if isinstance(value, dict):
        if not parameter.multiple:
            raise JobError(f"{key} is a table in job file {str(path)!r}", hint=f"give it one value: {key} = ...")
        return [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, list):
        if not (parameter.multiple or parameter.nargs != 1):
            return ",".join(map(str, value))
        return [str(each) for each in value]
    return [str(value)] if parameter.multiple else str(value)


def _unknown(path: Path, key: str, where: str, known: set[str]) -> JobError:
    near = get_close_matches(key, sorted(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "keys are the long names of options, see 'autopar COMMAND --help'"
    return JobError(f"job file {str(path)!r} has {key!r}{where}, which no command takes", hint=hint)

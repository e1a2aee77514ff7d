"""Schedules of tactics as YAML: a list with one mapping per tactic, from its name to its fields.

- data_parallel: {axis: b}
- megatron: {axis: m}
- shard: {inputs: {"layers.*.mlp.up.weight": 0}, axis: b}
- zero: {stage: 3, axis: b}
- pipeline: {stages: 4, microbatches: 8}
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from autopar.errors import AutoparError, TacticError
from autopar.reading import UnreadableError, parse_yaml
from autopar.tactics.records import (
    Automatic,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Offload,
    Pipeline,
    Place,
    Recompute,
    Replicate,
    SequenceParallel,
    Shard,
    Tactic,
    ZeRO,
)

TACTICS: Mapping[str, type[Tactic]] = {
    "shard": Shard,
    "replicate": Replicate,
    "place": Place,
    "data_parallel": DataParallel,
    "megatron": Megatron,
    "sequence_parallel": SequenceParallel,
    "context_parallel": ContextParallel,
    "expert_parallel": ExpertParallel,
    "zero": ZeRO,
    "pipeline": Pipeline,
    "recompute": Recompute,
    "offload": Offload,
    "automatic": Automatic,
}
"""Tactics by the name they have in a file."""

_NAMES = {record: name for name, record in TACTICS.items()}


def load_schedule(path: str | Path) -> tuple[Tactic, ...]:
    """Read a schedule of tactics.

    Raises:
        TacticError: If the file cannot be read, is no YAML, or a tactic or a field of it is not what it should be.
    """
    content = read_yaml(path, TacticError, "give a YAML file with a list of tactics")
    return schedule_from(content, str(path))


def read_yaml(path: str | Path, error: type[AutoparError], example: str) -> object:
    """Return what a YAML file holds.

    Args:
        path: The file.
        error: What is raised if it cannot be read or is no YAML.
        example: What to do then.

    Raises:
        AutoparError: An `error` that says where in the file.
    """
    try:
        content: object = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise error(f"cannot read {str(path)!r}: {failure.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise error(f"{str(path)!r} is not a text file", hint=example) from None
    except UnreadableError as failure:
        raise error(failure.in_file(repr(str(path))), hint=example) from None
    return content


def schedule_from(content: object, where: str = "schedule") -> tuple[Tactic, ...]:
    """Return the tactics of what a file holds.

    Args:
        content: A list of mappings.
        where: What to call it in errors.

    Raises:
        TacticError: If it is none.
    """
    if not isinstance(content, list):
        raise TacticError(f"{where}: not a list of tactics", hint="write one tactic per line: - megatron: {axis: m}")
    return tuple(_tactic(item, f"{where}, tactic {number}") for number, item in enumerate(content, start=1))


def format_schedule(schedule: Sequence[Tactic]) -> str:
    """Return a schedule as YAML.

    Raises:
        TacticError: If a tactic has a predicate, which has no text.
    """
    return yaml.safe_dump(schedule_to(schedule), default_flow_style=None, sort_keys=False, width=120)


def schedule_to(schedule: Sequence[Tactic]) -> list[dict[str, Any]]:
    """Return what a file of a schedule holds; `schedule_from` reads it back.

    Raises:
        TacticError: If a tactic has a predicate, which has no text.
    """
    return [_mapping(tactic) for tactic in schedule]


def _tactic(item: object, where: str) -> Tactic:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, dict) or len(item) != 1:
        raise TacticError(f"{where}: not a tactic", hint="write its name and its fields: - megatron: {axis: m}")
    ((name, given),) = item.items()
    record = TACTICS.get(name)
    if record is None:
        raise TacticError(f"{where}: there is no tactic {name!r}", hint=f"there are {', '.join(TACTICS)}")
    if not isinstance(given, dict):
        raise TacticError(f"{where}: {name} has no fields", hint=f"it has {', '.join(f.name for f in fields(record))}")
    try:
        read = msgspec.convert(given, _readable(name), strict=True)
    except msgspec.ValidationError as error:
        raise TacticError(f"{where}: {name}: {error}", hint=_fields(record)) from None
    if record is Shard and not read.inputs:
        raise TacticError(f"{where}: shard: names no values", hint="write inputs: {NAME: DIM}")
    return record(**{field.name: getattr(read, field.name) for field in fields(record)})


def _fields(record: type[Tactic]) -> str:
    return f"its fields are {', '.join(field.name for field in fields(record))}"


@cache
def _readable(name: str) -> type[Any]:
    """Return a record with the fields of a tactic: values are named by patterns only, other fields are errors."""
    record = TACTICS[name]
    named = dict[str, str]
    types: dict[str, Any] = {"inputs": dict[str, int], "pattern": str, "ops": named, "values": named, "copies": named}
    found: list[Any] = []
    for field in fields(record):
        kind = types.get(field.name, field.type)
        if field.default_factory is not MISSING:
            found.append((field.name, kind, msgspec.field(default_factory=dict)))
        else:
            found.append((field.name, kind, field.default) if _has_default(field) else (field.name, kind))
    return msgspec.defstruct(record.__name__, found, forbid_unknown_fields=True)


def _has_default(field: "Field[Any]") -> bool:
    return field.default is not MISSING


def _mapping(tactic: Tactic) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for field in fields(tactic):
        value = getattr(tactic, field.name)
        if (_has_default(field) and value == field.default) or (field.default_factory is not MISSING and not value):
            continue
        if isinstance(value, Mapping):
            value = dict(value)
        names = list(value) if isinstance(value, dict) else [value] if field.name == "pattern" else []
        if any(callable(name) for name in names):
            raise TacticError(f"{_NAMES[type(tactic)]} has a predicate, which has no text", hint="use names with *")
        given[field.name] = list(value) if isinstance(value, tuple) else value
    return {_NAMES[type(tactic)]: given}

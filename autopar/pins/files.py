"""Pins as YAML: a mapping from `pin` and `forbid` to decisions and their values.

Decisions at the top level are pinned, and so is a list of tactics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import PinError, TacticError
from autopar.pins.records import AXIS_NAMES, CONTEXTS, MOST_FREE, Axes, BlockOffload, BlockRecompute, Choices, Pins
from autopar.recompute import BY_SECONDS, Hosted, parse_recompute
from autopar.schedule import SCHEDULES
from autopar.tactics import Offload as OffloadTactic
from autopar.tactics import Pipeline, Replicate, Shard, Tactic, schedule_from
from autopar.tactics import Recompute as RecomputeTactic
from autopar.tactics.files import read_yaml
from autopar.units import parse_whole

SECTIONS = ("pin", "forbid")
_KEYS = tuple(own.name for own in fields(Choices))


def load_pins(path: str | Path) -> Pins:
    """Read pins from a file.

    Raises:
        PinError: If the file cannot be read, is no YAML, or says what no pin can say.
    """
    name, _, value = str(path).partition("=")
    if value and not Path(path).exists():
        raise PinError(
            f"{str(path)!r} is no file of pins", hint=f"write '{name}: {value}' into a YAML file and give that"
        )
    content = read_yaml(path, PinError, "give a YAML file; docs/pins.md has an example")
    return pins_from(content, str(path))


def read_pins(given: "str | Path | Pins | Mapping[str, object] | None") -> Pins:
    """Return pins in any of the ways in which a caller may give them: a file, a record, or what a file holds.

    Raises:
        PinError: If a file cannot be read, or something is said that no pin can say.
    """
    if given is None:
        return Pins()
    if isinstance(given, Pins):
        return given
    return pins_from(given) if isinstance(given, Mapping | list) else load_pins(given)


def pins_from(content: object, where: str = "pins") -> Pins:
    """Return the pins of what a file holds.

    Args:
        content: A mapping with `pin`, `forbid` or both; or of decisions, or a list of tactics, all of which are pinned.
        where: What to call it in errors.

    Raises:
        PinError: If it is none.
    """
    if isinstance(content, list):
        content = {"pin": {"tactics": content}}
    if not isinstance(content, Mapping):
        raise PinError(f"{where}: not a mapping", hint="write pin: and forbid:, each with decisions and their values")
    for name in content:
        if name not in (*SECTIONS, *_KEYS):
            raise PinError(
                f"{where}: {name!r} is neither pin nor forbid, nor a decision",
                hint=_nearest(str(name), (*SECTIONS, *_KEYS)),
            )
    decisions = {name: value for name, value in content.items() if name in _KEYS}
    if decisions and len(decisions) < len(content):
        raise PinError(
            f"{where}: {', '.join(decisions)} beside {' and '.join(name for name in content if name in SECTIONS)}",
            hint=f"write pin: {_shown(decisions)}",
        )
    if decisions:
        content = {"pin": decisions}
    sections = {name: _choices(content.get(name), name, f"{where}, {name}") for name in SECTIONS}
    return Pins(sections["pin"], sections["forbid"])


def _shown(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=2**16).partition("\n")[0]


def format_pins(pins: Pins) -> str:
    """Return pins as YAML.

    Raises:
        TacticError: If a tactic has a predicate, which has no text.
    """
    return yaml.safe_dump(pins.to_mapping(), default_flow_style=None, sort_keys=False, width=120)


def _choices(given: object, section: str, where: str) -> Choices:
    if given is None:
        return Choices()
    if not isinstance(given, Mapping):
        raise PinError(f"{where}: not a mapping", hint=f"decisions are {', '.join(_KEYS)}")
    found: dict[str, tuple[Any, ...]] = {}
    for key, value in given.items():
        if key not in _KEYS:
            raise PinError(f"{where}: there is no decision {key!r}", hint=_nearest(str(key), _KEYS))
        found[key] = _READERS[key](value, f"{where}: {key}")
        if not found[key]:
            raise PinError(f"{where}: {key} has no value", hint="give one value, or a list of them")
    if section == "forbid":
        _check_forbidden(found.get("tactics", ()), where)
        return Choices(**found)
    return _with_tactics(found, where)


def _check_forbidden(tactics: Sequence[Tactic], where: str) -> None:
    for tactic in tactics:
        if not isinstance(tactic, Shard | Replicate):
            raise PinError(
                f"{where}: tactics: only shard and replicate can be forbidden",
                hint="forbid stages, schedule, recompute or zero by their own names",
            )


def _with_tactics(found: dict[str, tuple[Any, ...]], where: str) -> Choices:
    """Return choices in which pipeline and recompute tactics say what they say of stages, schedule and recompute."""
    placing: list[Tactic] = []
    sizes: tuple[int, ...] = ()
    for tactic in found.pop("tactics", ()):
        said: dict[str, tuple[Any, ...]] = {}
        match tactic:
            case Pipeline(stages, schedule, microbatches, chunks):
                groups = stages if isinstance(stages, int) else len(stages) // chunks
                said = {"stages": (groups,), "chunks": (chunks,)}
                if schedule is not None:
                    said["schedule"] = (schedule,)
                if microbatches is not None:
                    said["microbatches"] = (microbatches,)
                if not isinstance(stages, int):
                    sizes = stages
                    if len(sizes) > 1:
                        said["boundaries"] = tuple(sum(sizes[:stage]) for stage in range(1, len(sizes)))
            case OffloadTactic(what, None):
                said = {"offload": (BlockOffload((what,)),)}
            case OffloadTactic(what, of_stages) if of_stages is not None:
                ends = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
                if max(of_stages) >= len(sizes):
                    raise PinError(
                        f"{where}: tactics: offload speaks of stages whose blocks no pipeline before it gives",
                        hint="pin offload by ranges of blocks: offload: {0-7: optimizer}",
                    )
                own = tuple(BlockOffload((what,), (ends[stage], ends[stage + 1] - 1)) for stage in of_stages)
                found["offload"] = (*found.get("offload", ()), *own)
            case RecomputeTactic(what, None):
                said = {"recompute": _recompute(what, f"{where}: recompute")}
            case RecomputeTactic(what, of_stages) if of_stages is not None:
                if not sizes or max(of_stages) >= len(sizes):
                    raise PinError(
                        f"{where}: tactics: recompute speaks of stages whose blocks no pipeline before it gives",
                        hint="pin recompute by ranges of blocks: recompute: {0-7: full}",
                    )
                ranges = [_stage_recompute(what, sizes, stage) for stage in of_stages]
                found["recompute"] = (*found.get("recompute", ()), *(item for own in ranges for item in own))
            case _:
                placing.append(tactic)
        for key, value in said.items():
            if found.setdefault(key, value) != value:
                raise PinError(f"{where}: {key} is pinned twice", hint="say it once")
    if sizes and "recompute" in found and all(item.blocks for item in found["recompute"]):
        found["recompute"] = _filled(found["recompute"], sum(sizes))
    if placing:
        found["tactics"] = tuple(placing)
    return Choices(**found)


def _stage_recompute(what: str, sizes: tuple[int, ...], stage: int) -> list[BlockRecompute]:
    first = sum(sizes[:stage])
    flavours = parse_recompute(what, sizes[stage])
    found: list[BlockRecompute] = []
    for block, flavour in enumerate(flavours, first):
        if found and found[-1].flavours == (str(flavour),):
            (start, _), found[-1:] = found[-1].blocks or (block, block), []
            found.append(BlockRecompute((str(flavour),), (start, block)))
        else:
            found.append(BlockRecompute((str(flavour),), (block, block)))
    return found


def _filled(items: Sequence[BlockRecompute], num_blocks: int) -> tuple[BlockRecompute, ...]:
    """Return the ranges of a schedule with those between them, which recompute nothing."""
    found: list[BlockRecompute] = []
    done = 0
    for item in sorted(items, key=lambda item: item.blocks or (0, 0)):
        first, last = item.blocks or (0, num_blocks - 1)
        if first > done:
            found.append(BlockRecompute(("none",), (done, first - 1)))
        found.append(item)
        done = last + 1
    if done < num_blocks:
        found.append(BlockRecompute(("none",), (done, num_blocks - 1)))
    return tuple(found)


# Readers of values.


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _whole(least: int) -> Callable[[object, str], tuple[int, ...]]:
    def read(value: object, where: str) -> tuple[int, ...]:
        numbers = _listed(value)
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise PinError(
                    f"{where}: {number!r} is not a whole number from {least} on", hint="give a number or a list"
                )
        return tuple(dict.fromkeys(numbers))

    return read


def _among(known: Sequence[str]) -> Callable[[object, str], tuple[str, ...]]:
    def read(value: object, where: str) -> tuple[str, ...]:
        # YAML reads a bare `none` as text, but `null` and `~` as nothing.
        names = ["none" if name is None and "none" in known else name for name in _listed(value)]
        for name in names:
            if name not in known:
                raise PinError(f"{where}: there is no {name!r}", hint=_nearest(str(name), known))
        return tuple(dict.fromkeys(names))

    return read


def _flags(value: object, where: str) -> tuple[bool, ...]:
    flags = _listed(value)
    for flag in flags:
        if not isinstance(flag, bool):
            raise PinError(f"{where}: {flag!r} is neither true nor false", hint="write true or false")
    return tuple(dict.fromkeys(flags))


def _names(value: object, where: str) -> tuple[str, ...]:
    names = _listed(value)
    if not all(isinstance(name, str) for name in names):
        raise PinError(f"{where}: {value!r} is no name of a mesh axis", hint="axes are outer and inner, or dp, tp, ...")
    return tuple(dict.fromkeys(names))


def _meshes(value: object, where: str) -> tuple[Axes, ...]:
    return tuple(_mesh(item, where) for item in _listed(value))


def _mesh(value: object, where: str) -> Axes:
    if isinstance(value, dict):
        axes = tuple((str(name), size) for name, size in value.items())
    elif isinstance(value, str | int):
        parts = str(value).replace("×", "x").split("x")
        axes = tuple(("", part if (size := parse_whole(part.strip())) is None else size) for part in parts)
    else:
        axes = ()
    if not axes or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for _, size in axes):
        raise PinError(f"{where}: {value!r} is no mesh", hint="write sizes, 8x8, or {outer: 8, inner: 8}")
    if sum(name not in AXIS_NAMES for name, _ in axes) > MOST_FREE:
        raise PinError(
            f"{where}: {value!r} has more than {MOST_FREE} axes that may do anything",
            hint=f"give at most {MOST_FREE}, or name axes for what they do: {', '.join(AXIS_NAMES)}",
        )
    return axes


def _recompute(value: object, where: str) -> tuple[BlockRecompute, ...]:
    return tuple(BlockRecompute(own, blocks) for own, blocks in _ranged(value, BY_SECONDS, where))


def _offload(value: object, where: str) -> tuple[BlockOffload, ...]:
    return tuple(BlockOffload(own, blocks) for own, blocks in _ranged(value, ("none", *Hosted), where))


def _ranged(value: object, known: Sequence[str], where: str) -> list[tuple[tuple[str, ...], tuple[int, int] | None]]:
    """Return names, and the blocks they are for."""
    names = _among(known)
    if not isinstance(value, Mapping):
        return [(names(value, where), None)]
    return [(names(own, f"{where} of {blocks}"), _blocks(blocks, where)) for blocks, own in value.items()]


def _blocks(text: object, where: str) -> tuple[int, int] | None:
    if text == "layers":
        return None
    start, _, end = str(text).partition("-")
    first, last = parse_whole(start), parse_whole(end or start)
    if first is None or last is None or last < first:
        raise PinError(f"{where}: {text!r} are no blocks", hint="write first and last block: {0-7: full}")
    return first, last


def _tactics(value: object, where: str) -> tuple[Tactic, ...]:
    if isinstance(value, str):
        raise PinError(f"{where}: {value!r} is no list of tactics", hint="copy what `autopar explain --tactics` prints")
    try:
        schedule = schedule_from(value, where)
    except TacticError as error:
        raise PinError(error.args[0], hint=error.hint) from None
    if any(type(tactic).__name__ == "Automatic" for tactic in schedule):
        raise PinError(f"{where}: automatic is what the solver does anyway", hint="leave it out")
    return schedule


_READERS: Mapping[str, Callable[[object, str], tuple[Any, ...]]] = {
    "stages": _whole(1),
    "mesh": _meshes,
    "unequal": _flags,
    "dp": _whole(1),
    "ep": _whole(1),
    "cp": _whole(1),
    "tp": _whole(1),
    "sequence_parallel": _flags,
    "within_node": _names,
    "microbatches": _whole(1),
    "microbatch_size": _whole(1),
    "schedule": _among(tuple(SCHEDULES)),
    "chunks": _whole(1),
    "pp_inside": _flags,
    "boundaries": _whole(1),
    "recompute": _recompute,
    "offload": _offload,
    "zero": _whole(0),
    "hybrid_zero": _whole(1),
    "context": _among(CONTEXTS),
    "tactics": _tactics,
}


_MEANT = {"pp": "stages", "interleave": "chunks", "microbatch": "microbatch_size", "layers": "boundaries"}
"""Decisions by the words of degrees, where these are others."""


def _nearest(name: str, known: Sequence[str]) -> str:
    meant = _MEANT.get(name)
    close = [meant] if meant in known else get_close_matches(name, known, n=1, cutoff=0.5)
    listed = f"there are {', '.join(known)}"
    return f"did you mean {close[0]}? {listed}" if close else listed

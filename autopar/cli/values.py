"""Types of arguments: what is typed, as the value a command works with. All of it is checked before any work starts."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.units import parse_quantity, parse_whole

if TYPE_CHECKING:
    from autopar.cluster.links import Nics

_SHOWN = 40
"""Characters of a number that a message shows."""
_NICS = re.compile(r"^\s*(\d{1,9})\s*x\s*([0-9.eE+]+\s*[kMGTP]?)(?:B/s|(b/s|bit/s|bps))\s*$")
_MAX_WHOLE = 2**31 - 1
"""Numbers that are typed; solvers take no longer ones, and nothing has so many of anything."""


def module_names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return modules of layers that selective recompute can run again.

    Raises:
        click.BadParameter: If there is no such module.
    """
    from autopar.recompute import RECOMPUTE_MODULES

    names = tuple(filter(None, text.replace(",", " ").split())) if isinstance(text, str) else text
    for name in names:
        if name not in RECOMPUTE_MODULES:
            raise click.BadParameter(f"{name!r} is no module; choose among {', '.join(RECOMPUTE_MODULES)}")
    return names


def positive_number(text: str) -> float:
    """Return a finite number above 0.

    Raises:
        click.BadParameter: If the text is none.
    """
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None
    if not (math.isfinite(number) and number > 0):
        raise click.BadParameter(f"{text} is not a finite number above 0")
    return number


def not_negative_number(text: str | float) -> float:
    """Return a finite number, 0 or above.

    Raises:
        click.BadParameter: If the text is none.
    """
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise click.BadParameter(f"{text} is not a finite number, 0 or above")
    return number


def gigabytes(text: str) -> float:
    """Return a finite number of GB above 0, which may say what it is of: `80` or `80GB`.

    Raises:
        click.BadParameter: If the text is none.
    """
    number = re.sub(r"\s*GB$", "", str(text), flags=re.IGNORECASE)
    try:
        float(number)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of GB, such as 80") from None
    return positive_number(number)


def dim_binding(text: str) -> tuple[str, int | float]:
    """Return name and size of a dim, or of a field of a zoo model's configuration, written as `DIM=VALUE`.

    What a dim or field allows (0, fractions) is known once the model is: dims of files are whole numbers above 0.

    Raises:
        click.BadParameter: If it is written otherwise, or the size is no finite number from 0 on.
    """
    name, separator, size = (part.strip() for part in text.partition("="))
    if not (separator and name):
        raise click.BadParameter(f"{text!r} is not of the form DIM=VALUE, e.g. batch=8")
    if re.fullmatch(r"[0-9]{1,18}", size):
        return name, int(size)
    if not re.fullmatch(r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]{1,2})?", size) or not math.isfinite(float(size)):
        raise click.BadParameter(f"{name!r} is set to {size!r}, not to a number from 0 on")
    return name, float(size)


def solver_name(name: str) -> str:
    """Return the name of a solver that is installed.

    Raises:
        click.BadParameter: If there is none of that name; the message lists those there are.
    """
    from autopar import solvers

    available = solvers.available()
    if name not in available:
        why = "not installed" if name in solvers.names() else "unknown"
        raise click.BadParameter(f"solver {name!r} is {why}; there are {', '.join(available)}")
    return name


USUAL_PRECISION = "mixed"
"""The default of --precision, which is known without importing what knows all of them."""
AUTO_PRECISION = "auto"
"""Value of --precision that asks what each would bring; of `solve` alone."""


def precision_name(name: str) -> str:
    """Return a precision, as plans name it, or `AUTO_PRECISION`.

    Raises:
        click.BadParameter: If there is none of that name, or it has no such change.
    """
    if name in (AUTO_PRECISION, USUAL_PRECISION):
        return name

    from autopar.cost import load_policy
    from autopar.errors import JobError

    try:
        return load_policy(name).name
    except JobError as error:
        raise click.BadParameter(f"{error.args[0]}; {error.hint}") from None


def solver_names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of solvers written with commas between them.

    Raises:
        click.BadParameter: If one is not installed.
    """
    if isinstance(text, tuple):  # click converts a default, too
        return text
    return tuple(solver_name(name.strip()) for name in text.split(",") if name.strip())


def comma_separated(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return names written with commas between them; "none" for none.

    Raises:
        click.BadParameter: If one is empty, or "none" is one among others.
    """
    if isinstance(text, tuple):  # click converts a default, too
        return text
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise click.BadParameter(f"{text!r} has an empty name; give names with commas between them, or none")
    if "none" in names and len(names) > 1:
        raise click.BadParameter(f"{text!r} names none among others; give either names or none")
    return () if names == ("none",) else names


def whole_numbers(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """Return whole numbers from 1 on, written with commas between them.

    Raises:
        click.BadParameter: If one is none.
    """
    if isinstance(text, tuple):
        return text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = []
    for part in parts:
        number = parse_whole(part)
        if not number:
            raise click.BadParameter(f"{part!r} is not a whole number above 0; e.g. 32,64,128")
        numbers.append(number)
    if not parts:
        raise click.BadParameter("no number; e.g. 32,64,128")
    return tuple(numbers)


def bandwidth(text: str) -> float:
    """Return bytes/s, written with their unit: `50 GB/s`.

    Raises:
        click.BadParameter: If the text is no bandwidth above 0.
    """
    try:
        found = parse_quantity(text, "B/s")
    except ValueError as error:
        raise click.BadParameter(f"{error}; e.g. 50GB/s") from None
    if found <= 0:
        raise click.BadParameter(f"{text!r} is not above 0")
    return found


def network_cards(text: str) -> "Nics":
    """Return the network cards of a node, written as their number and the rate of one: `8x400Gb/s`, `8x50GB/s`.

    Raises:
        click.BadParameter: If the text is not that.
    """
    from autopar.cluster.links import Nics

    match = _NICS.match(text)
    count = parse_whole(match[1]) if match else None
    if match is None or not count:
        raise click.BadParameter(f"{text[:_SHOWN]!r} is not a number of cards and the rate of one; e.g. 8x400Gb/s")
    return Nics(count, bandwidth(f"{match[2]}B/s") / (8 if match[3] else 1))


def price_by_cluster(text: str) -> float | dict[str, float]:
    """Return one price, or prices by cluster, written `NAME=X,NAME=X`.

    Raises:
        click.BadParameter: If one is not a number above 0.
    """
    if "=" not in text:
        return positive_number(text)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): positive_number(price.strip()) for name, _, price in pairs}


class _Reachable(click.Path):
    """A path that the system can look for: its name is not too long, and folders on the way may be entered."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        try:
            Path(value).exists()
        except OSError as error:
            shown = str(value) if len(str(value)) <= _SHOWN else f"{str(value)[:_SHOWN]}..."
            self.fail(f"cannot look for {shown!r}: {error.strerror}", param, ctx)
        return super().convert(value, param, ctx)


def file_path() -> click.Path:
    """Return the type of a file's path; whether it can be read or written is found out where that is done."""
    return _Reachable(path_type=Path)


def folder_path() -> click.Path:
    """Return the type of a folder's path."""
    return _Reachable(path_type=Path, file_okay=False)


class _Whole(click.IntRange):
    """A whole number that a solver takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        if isinstance(value, str) and len(value) > _SHOWN:
            self.fail(f"{value[:_SHOWN]!r}... is no number of {_SHOWN} digits or fewer", param, ctx)
        number = super().convert(value, param, ctx)
        if number > _MAX_WHOLE:
            self.fail(f"{number} is more than {_MAX_WHOLE}", param, ctx)
        return number


def positive_whole() -> click.IntRange:
    """Return the type of a whole number from 1 on."""
    return _Whole(min=1)


def not_negative() -> click.IntRange:
    """Return the type of a whole number from 0 on."""
    return _Whole(min=0)


def share(text: str | float) -> float:
    """Return a number from 0 to 1.

    Raises:
        click.BadParameter: If the text is none.
    """
    number = not_negative_number(text)
    if number > 1:
        raise click.BadParameter(f"{text} is not a number from 0 to 1")
    return number

"""One line of the text of a program, read token by token; errors point at the place."""

import json
import math
import re
from collections.abc import Callable
from typing import TypeVar

from autopar.errors import ProgramError, ShardingError
from autopar.escaping import is_plain
from autopar.program.records import Operand, Start
from autopar.sharding import Axis, Placement, Placements, parse_placement, parse_placements

_T = TypeVar("_T")
_PLAIN = re.compile(r"[A-Za-z0-9_./@~#$%+*-][A-Za-z0-9_./:@~#$%+*-]*(?<!:)")
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")
_PLACEMENT = re.compile(r"[RSP](?:\([a-z0-9/]+\))?")
_PLACEMENTS = re.compile(f"(?:{_PLACEMENT.pattern})*")
_DECODER = json.JSONDecoder()
_SHOWN = 60
"""Characters of a line that an error shows on either side of the place."""
MAX_WHOLE = 2**63
"""What whole numbers are below."""
COMMENT = "//"
"""How a line begins that is no part of a text."""


def format_name(name: str) -> str:
    """Return a name as `Line.name` reads it."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


class Line:
    """A cursor over one line; spaces between tokens do not matter.

    What reads a token raises a `ProgramError` that points at the place if another one is there.

    Args:
        number: Number of the line in its file, from 1.
        text: The line.
    """

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.at = 0
        self._skip()

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def fail(self, expected: str) -> ProgramError:
        """Return the error that something else was expected here."""
        first = max(0, self.at - _SHOWN) if len(self.text) > 2 * _SHOWN else 0
        shown = self.text[first : max(self.at, first) + 2 * _SHOWN]
        return ProgramError(
            f"line {self.number}: expected {expected} at column {self.at + 1}\n  {shown}\n  {' ' * (self.at - first)}^",
            hint="`autopar explain PLAN --program` prints a program to compare with",
        )

    def accept(self, token: str) -> bool:
        """Whether the line goes on with a token, which is read."""
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        self._skip()
        return True

    def expect(self, token: str) -> None:
        """Read a token."""
        if not self.accept(token):
            raise self.fail(repr(token))

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        """Read what a pattern matches; `expected` says in words what that is."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.fail(expected)
        self.at = found.end()
        self._skip()
        return found[0]

    def json(self) -> object:
        """Read a value of JSON."""
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except (ValueError, RecursionError):  # no JSON, more digits than Python takes, lists in lists without end
            raise self.fail("JSON") from None
        self._skip()
        return value

    def name(self) -> str:
        """Read a name, in quotes or not."""
        if not self.text.startswith('"', self.at):
            return self.match(_PLAIN, "a name")
        column = self.at
        name = str(self.json())
        if not is_plain(name):
            self.at = column
            raise self.fail("a name without control characters")
        return name

    def size(self) -> float:
        """Read a number of bytes."""
        column = self.at
        value = float(self.match(_NUMBER, "a number"))
        if not 0 <= value < math.inf:
            self.at = column
            raise self.fail("a finite number, 0 or above,")
        return value

    def integer(self, least: int = -MAX_WHOLE) -> int:
        """Read a whole number."""
        column = self.at
        text = self.match(_NUMBER, "a whole number")
        if not text.removeprefix("-").isdecimal():
            self.at = column
            raise self.fail("a whole number")
        if len(text) > len(str(MAX_WHOLE)) or not least <= int(text) < MAX_WHOLE:
            self.at = column
            raise self.fail(f"a whole number{'' if least < 0 else f' from {least} on'} of up to 63 bits")
        return int(text)

    def sequence(self, item: Callable[[], _T], opening: str = "(", closing: str = ")") -> tuple[_T, ...]:
        """Read items in brackets, with commas between them."""
        self.expect(opening)
        items: list[_T] = []
        while not self.accept(closing):
            if items:
                self.expect(",")
            items.append(item())
        return tuple(items)

    def axis(self) -> Axis:
        """Read a mesh axis."""
        name = self.name()
        self.expect(":")
        size = self.integer(1)
        self.expect("/")
        return Axis(name, size, self.integer(1))

    def placement(self) -> Placement:
        """Read one placement."""
        try:
            return parse_placement(self.match(_PLACEMENT, "a placement"))
        except ShardingError as error:
            raise self.fail(f"a placement ({error})") from error

    def placements(self) -> Placements:
        """Read placements, none of them too."""
        try:
            return parse_placements(self.match(_PLACEMENTS, "placements"))
        except ShardingError as error:
            raise self.fail(f"placements ({error})") from error

    def numbered(self) -> tuple[int, tuple[int, ...]]:
        """Read an index and a list of whole numbers."""
        index = self.integer()
        self.expect(":")
        return index, self.sequence(self.integer, "[", "]")

    def range(self) -> tuple[int, int]:
        """Read a half-open range."""
        start = self.integer()
        self.expect(":")
        return start, self.integer()

    def arrow(self) -> tuple[int, int]:
        """Read two numbers with an arrow between them."""
        start = self.integer()
        self.expect("->")
        return start, self.integer()

    def start(self) -> Start:
        """Read where blocks of devices start."""
        axes = self.sequence(self.axis)
        return Start(axes, self.labelled("rows"))

    def labelled(self, label: str) -> int:
        """Read a whole number behind its label."""
        self.expect(f"{label}=")
        return self.integer()

    def definition(self) -> Operand | None:
        """Read the definition of a value; None if nobody asked for it."""
        if self.text[self.at : self.at + 2] in ("_ ", "_,"):
            self.expect("_")
            return None
        name = self.name()
        self.expect(":")
        shape = self.sequence(lambda: self.integer(0), "[", "]")
        placements = self.placements()
        return Operand(name, shape, self.size(), placements)

    def operand(self) -> Operand:
        """Read the definition of a value that is there."""
        operand = self.definition()
        if operand is None:
            raise self.fail("a value")
        return operand

    def end(self) -> None:
        """Check that the line has no more."""
        if self.at < len(self.text):
            raise self.fail("the end of the line")

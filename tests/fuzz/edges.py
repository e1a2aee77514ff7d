"""Values at the edges of what a field may hold, and names that break what they are printed into."""

from random import Random
from typing import Any

MARK = "INJECTED"
"""What a name says at the beginning of a line, or in an element of a page, where it was not escaped."""

NAMES = (
    f"a\n{MARK} b",
    f"a\r\n{MARK}",
    "a\x1b[31mred\x1b[0m",
    "a\x1b]0;title\x07",
    "a\x00b\x7f",
    "a\x9b2Jb",
    "a\u202egnp.exe\u202c",
    "a\u2028b\u2066c",
    f"<script>{MARK}()</script>",
    f"</script><img src=x onerror={MARK}>",
    f"\"');{MARK}();('\"",
    f"$(touch {MARK})`touch {MARK}`;touch {MARK} && x",
    "[bold red]x[/bold red]",
    f'"""\n{MARK} = 1\n"""',
    "a\\b\\n{0}{name}%s%(x)s",
    "é日本語🎉",
    "\ufeffa\u200b",
    "../../../../etc/passwd",
    "a/b\\c:d|e*f?g",
    "a: b # c",
    "- a",
    "{{ 7*7 }}{% x %}",
    "",
    " ",
    "*",
    "x" * 5000,
)
"""Names as texts; bytes that are no text come from `octets`."""

TEXTS = (
    "1e999999 GB/s", "-1 GB/s", "0 GB/s", "inf s", "nan s", "1e-999999 s", "9" * 5000 + " GB", "1 Gb/s", "80", "GB",
    "1.5.5 GB", "1e400 TFLOP/s", "0x10 GB", "nan", "inf", "-0", "1e308 PB", "none", "auto", "null", "true", "S(0)",
    "S(99)R", "S(0)S(0)S(0)", "P(sum)", "R" * 40, "S(99999999999999999999)", "full*4 none*2", "full*99999999999",
    "full*-1", "2-1", "0-99999999999", "zoo:mlp-xs", "zoo:", "hf:", "/dev/null", "/", ".", "2026-13-45",
)  # fmt: skip
"""Quantities, placements, ranges and words that some field knows."""

WHOLE = (
    0, 1, 2, 3, 7, 64, 1000, -1, -2, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64,
    -(2**63) - 1, 10**12, 10**18, 10**30, 10**300,
)  # fmt: skip
REAL = (0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-320, 1e-30, 1e30, 1e308, -1e308, 2.0**53)


class Raw(str):
    """A token that is written as it is, without quotes, in whatever a file is written as."""

    __slots__ = ()


DEEP = 20_000
"""Levels of nesting; Python's readers take about 1,000."""
NUMBERS = ("nan", "inf", "-inf", "1e999999", "-1e999999", "9" * 5000, "-" + "9" * 5000, "1" + "0" * 400)
"""Numbers that a reader of JSON, YAML or TOML may or may not take."""


def text(random: Random) -> str:
    """Return a name or another text."""
    return random.choice(random.choice((NAMES, TEXTS)))


def scalar(random: Random) -> Any:
    """Return a value at the edge of some type."""
    kind = random.random()
    if kind < 0.3:
        return random.choice(WHOLE)
    if kind < 0.45:
        return random.choice(REAL)
    if kind < 0.6:
        return Raw(random.choice(NUMBERS))
    if kind < 0.9:
        return text(random)
    return random.choice((None, True, False))


def value(random: Random) -> Any:
    """Return a value of any shape."""
    kind = random.random()
    if kind < 0.75:
        return scalar(random)
    if kind < 0.8:
        return Raw("deep list" if random.random() < 0.5 else "deep table")
    if kind < 0.9:
        return [scalar(random) for _ in range(random.randrange(4))]
    return {text(random): scalar(random) for _ in range(random.randrange(3))}


def akin(random: Random, old: Any) -> Any:
    """Return another value of the type of `old`."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return random.choice((*WHOLE, old + 1, old - 1, old * 2, old // 2, -old))
    if isinstance(old, float):
        return random.choice((*REAL, -old, old * 2, old * 1e12, old / 1e12, Raw("nan"), Raw("inf")))
    if isinstance(old, str):
        start = random.randrange(len(old) + 1)
        return random.choice((text(random), old[:start], old[:start] + text(random) + old[start:], old + old))
    return value(random)

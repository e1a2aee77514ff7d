"""Parsing and printing of quantities. Inside autopar everything is in seconds, bytes, FLOPs and bytes/s."""

import math
import re
from decimal import Decimal

_DECIMAL = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NO_TIME = 1e-15
"""Seconds that are what is left of a sum by rounding."""
_MAX_POWER = 30
"""Of ten, before a unit: what is computed with quantities up to that stays finite."""
_SHOWN = 40
"""Characters of a quantity that a message shows."""
_MAX_DIGITS = 18
"""Of a whole number: as many as fit 64 bits."""
_PREFIXES = ("P", "T", "G", "M", "k", "")
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,9})?)\s*([A-Za-z/]*)\s*$")


def parse_quantity(text: str, unit: str) -> float:
    """Return `text` in the base unit `unit` ("B", "B/s", "FLOP/s", "s").

    Bytes take decimal (`GB`) and binary (`GiB`) prefixes, times take `s`, `ms`, `us`; bits are refused, because
    `Gb/s` for `GB/s` is the commonest mistake in cluster files.

    Raises:
        ValueError: If the text is no quantity of that unit.

    >>> parse_quantity("80 GB", "B"), parse_quantity("2 GiB", "B"), parse_quantity("989 TFLOP/s", "FLOP/s")
    (80000000000.0, 2147483648.0, 989000000000000.0)
    >>> parse_quantity("12 us", "s")
    1.2e-05
    """
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity like '80 G{unit}'")
    number, suffix = Decimal(match[1]), match[2]  # decimal, so that 19 us is 19e-6 and not its neighbour
    if number and number.adjusted() > _MAX_POWER:
        raise ValueError(f"{text[:_SHOWN]!r}{'...' * (len(text) > _SHOWN)} is larger than anything there is")
    if unit == "s":
        scales = {"s": 0, "ms": -3, "us": -6, "ns": -9}
        if suffix not in scales:
            raise ValueError(f"{text!r} is not a time: write s, ms, us or ns")
        return float(number.scaleb(scales[suffix]))
    if not suffix.endswith(unit):
        raise ValueError(f"{text!r} is not in {unit} (with a prefix k, M, G, T or P before it)")
    prefix = suffix[: len(suffix) - len(unit)]
    if prefix.endswith("i") and prefix[:-1].lower() in _DECIMAL and unit.startswith("B"):
        return float(number * 1024 ** _DECIMAL[prefix[:-1].lower()])
    if prefix.lower() not in _DECIMAL:
        raise ValueError(f"{text!r} has the unknown prefix {prefix!r}")
    return float(number * 1000 ** _DECIMAL[prefix.lower()])


def parse_whole(text: str) -> int | None:
    """Return a whole number that is written in decimal digits; None if the text is none, or longer than 64 bits.

    >>> parse_whole("64"), parse_whole("-1"), parse_whole("9" * 5000)
    (64, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _scaled(value: float, unit: str) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def format_bytes(value: float) -> str:
    """Return bytes for reading, with decimal prefixes.

    >>> format_bytes(80e9)
    '80 GB'
    """
    return _scaled(value, "B")


def format_count(value: float) -> str:
    """Return a large count for reading.

    >>> format_count(124_439_808)
    '124 M'
    """
    return _scaled(value, "").rstrip()


def format_seconds(value: float) -> str:
    """Return seconds for reading.

    >>> format_seconds(0.01234), format_seconds(3.2e-5), format_seconds(71.5), format_seconds(-1e-19)
    ('12.3 ms', '32 us', '71.5 s', '0 s')
    """
    if abs(value) < _NO_TIME:
        return "0 s"
    if not math.isfinite(value):
        return f"{value:g} s"
    if abs(value) >= 1000:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def format_quantity(value: float, unit: str) -> str:
    """Return the shortest text that `parse_quantity` reads back as exactly `value`.

    >>> format_quantity(3.12e14, "FLOP/s"), format_quantity(8e-06, "s"), format_quantity(0.0, "B")
    ('312 TFLOP/s', '8 us', '0 B')
    """
    if unit == "s":
        scales = [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)]
    else:
        scales = [(f"{prefix}{unit}", 1000.0 ** (5 - power)) for power, prefix in enumerate(_PREFIXES)]
    for suffix, scale in scales:
        text = f"{value / scale:.15g} {suffix}"
        if value >= scale and parse_quantity(text, unit) == value:
            return text
    return f"{value!r} {unit}" if value else f"0 {unit}"

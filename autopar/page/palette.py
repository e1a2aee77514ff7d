"""Colours that can be told apart on a white page and on a dark one.

Their relative luminance lies between 0.12 and 0.30, so that each has a contrast of 3 or more to white and to the dark
background of the page (WCAG 2.2, 1.4.11 non-text contrast); the tests compute it.
"""

import colorsys
from collections.abc import Mapping, Sequence
from itertools import cycle

LIGHT, DARK = "#ffffff", "#14171c"
"""Backgrounds of the page."""

KINDS: Mapping[str, str] = {
    "forward": "#3b86c6",
    "backward": "#d0722b",
    "weight gradients": "#b5842a",
    "update": "#8a6cc0",
    "ops": "#6f9a4b",
    "collectives": "#c94f86",
    "gradients": "#2a9485",
    "sends": "#7d8794",
    "critical path": "#d6423c",
}
"""Colours of kinds of bars."""

_SERIES = ("#3b86c6", "#d0722b", "#2a9485", "#c94f86", "#8a6cc0", "#b5842a", "#6f9a4b", "#7d8794", "#d6423c")

_PARTS = (
    ("compute", "parameters"),
    ("tp communication", "gradients"),
    ("dp communication", "optimizer"),
    ("bubble", "activations"),
    ("optimizer", "gathered"),
    ("recompute", "transient"),
    ("launches, overlap", "communication"),
    ("pp communication", "buffers"),
)
"""Parts of a step and of a peak, in the order of the series of colours: a part has one colour in all plans."""

PLACED: Mapping[str, str] = {
    "split": "#1f7c6f",
    "partly split": "#2f6fa8",
    "copied": "#666f7a",
    "terms": "#a85a1d",
    "communication": "#b03a72",
}
"""Colours of nodes of a block, dark enough for white letters: how the result lies on the mesh, or that it moves."""

_LUMINANCE = 0.2


def kind_colours(kinds: Sequence[str]) -> list[str]:
    """Return a colour per kind of bars; kinds that are not known get those that are left."""
    return _coloured(kinds, KINDS)


def _coloured(names: Sequence[str], known: Mapping[str, str]) -> list[str]:
    taken = {known[name] for name in names if name in known}
    spare = cycle([colour for colour in _SERIES if colour not in taken] or _SERIES)
    return [known[name] if name in known else next(spare) for name in names]


def series(number: int) -> list[str]:
    """Return colours of curves that have no order."""
    return [_SERIES[i % len(_SERIES)] for i in range(number)]


def part_colours(parts: Sequence[str]) -> list[str]:
    """Return a colour per part of a step or of a peak; parts that are not known get those that are left."""
    memory = "parameters" in parts or "activations" in parts
    known = {names[memory]: colour for names, colour in zip(_PARTS, _SERIES, strict=False)}
    return _coloured(parts, known)


def ordered(number: int) -> list[str]:
    """Return colours of curves in order, from blue over green to red, equally bright."""
    hues = [0.6 * (1 - i / max(1, number - 1)) for i in range(number)]
    return [_of_luminance(hue, _LUMINANCE) for hue in hues]


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, from 0 to 1 (WCAG 2.2).

    >>> luminance("#ffffff"), luminance("#000000")
    (1.0, 0.0)
    """
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21 (WCAG 2.2).

    >>> round(contrast("#ffffff", "#000000"), 6)
    21.0
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _of_luminance(hue: float, wanted: float) -> str:
    """Return the colour of a hue that is as bright as wanted, found by bisection over its lightness."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if luminance(_hex(hue, middle)) < wanted:
            low = middle
        else:
            high = middle
    return _hex(hue, low)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, 0.65))

"""Colours that can be told apart on a white page and on a dark one.

Their relative luminance lies between 0.12 and 0.30, so that each has a contrast of 3 or more to white and to the dark
background of the page (WCAG 2.2, 1.4.11 non-text contrast); the tests compute it. Stages and groups of devices are
darker than all of these on a white page and lighter on a dark one, so that none looks like a pass or a collective.
"""

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

LIGHT, DARK = "#ffffff", "#14171c"
"""Backgrounds of the page."""

MEANINGS: Mapping[str, str] = {
    "forward": "#3b86c6",
    "compute": "#3b86c6",
    "model FLOPs at peak": "#3b86c6",
    "kernels below peak": "#5f7f9c",
    "ops": "#5b76b8",
    "backward": "#d0722b",
    "weight gradients": "#b5842a",
    "recompute": "#8f8420",
    "update": "#8a6cc0",
    "optimizer": "#8a6cc0",
    "collectives": "#d926bb",
    "tp communication": "#c94f86",
    "cp communication": "#9d26d9",
    "ep communication": "#b05cb0",
    "spatial communication": "#a65966",
    "gradients": "#2a9485",
    "dp communication": "#2a9485",
    "sends": "#2790b0",
    "pp communication": "#2790b0",
    "imbalance": "#a8742f",
    "bubble": "#7d8794",
    "launches, overlap": "#6f7f5e",
    "host copies": "#9a7560",
    "host memory": "#9a7560",
    "critical path": "#63636d",
    "limit": "#d6423c",
    "parameters": "#6a70cf",
    "gathered": "#c15ce2",
    "communication": "#5252e0",
    "other communication": "#d926bb",
    "activations": "#6f9a4b",
    "transient": "#157746",
    "buffers": "#85837c",
    "caches": "#8a7a4f",
    "this plan": "#3f9b3f",
    "grid search": "#a06a9c",
    "Megatron's rules": "#4d8f9e",
    "given plan": "#b5553f",
    "bound": "#94763a",
}
"""What colours mean, in every chart: parts of a step, categories of memory, bars of the timeline, plans. Names of one
colour are one thing seen twice: the update is the optimizer's time, gradients travel as dp communication."""

PLAIN = "#78787c"
"""Colour of sums and of what is left, which are drawn pale, and of frames."""

_SPARE = ("#3b86c6", "#d0722b", "#2a9485", "#c94f86", "#8a6cc0", "#b5842a", "#6f9a4b", "#7d8794", "#d6423c")
"""Colours of parts that have no meaning of their own, where the other parts leave them."""

_SERIES_HUES = (0.6, 0.06, 0.37, 0.86, 0.5, 0.73, 0.13, 0.97)
"""Hues of things that have no order, such as clusters and groups of devices."""
SERIES = len(_SERIES_HUES)
"""Things without an order that have different colours."""

_FIRST_HUE, _LAST_HUE = 0.62, 0.07
"""Hues of the first and the last curve in order: no red, which is the limit's."""
_SHADES = {LIGHT: 0.05, DARK: 0.55}
"""Relative luminance of stages and groups by background: outside of what `MEANINGS` uses."""
_LETTERED = 0.16
_SATURATION = 0.65


def colours(names: Sequence[str]) -> list[str]:
    """Return the colour of what each name means; names that are not known get colours that the others leave."""
    taken = {MEANINGS[name] for name in names if name in MEANINGS}
    spare = cycle([colour for colour in _SPARE if colour not in taken] or _SPARE)
    return [MEANINGS[name] if name in MEANINGS else next(spare) for name in names]


def legend(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return colours and what they mean, of the names that occur, names of one colour together.

    >>> legend(["update", "bubble", "optimizer"])
    [('update, optimizer', '#8a6cc0'), ('bubble', '#7d8794')]
    """
    wanted = set(names)
    found: dict[str, list[str]] = {}
    for name, colour in MEANINGS.items():
        if name in wanted:
            found.setdefault(colour, []).append(name)
    return [(", ".join(named), colour) for colour, named in found.items()]


def lettered(colour: str) -> str:
    """Return a colour of the same hue that is dark enough for white letters on it (contrast 4.5, WCAG 2.2, 1.4.3).

    >>> contrast(lettered("#3b86c6"), "#ffffff") >= 4.5
    True
    """
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, _, saturation = colorsys.rgb_to_hls(red, green, blue)
    return _of_luminance(hue, _LETTERED, saturation)


def series(number: int, ground: str = LIGHT) -> list[str]:
    """Return colours of things that have no order on a background; after eight they repeat."""
    return [_of_luminance(_SERIES_HUES[i % SERIES], _SHADES[ground]) for i in range(number)]


def ordered(number: int, ground: str = LIGHT) -> list[str]:
    """Return colours of things in order on a background, from blue over green to brown, equally bright."""
    hues = [_FIRST_HUE + (_LAST_HUE - _FIRST_HUE) * i / max(1, number - 1) for i in range(number)]
    return [_of_luminance(hue, _SHADES[ground]) for hue in hues]


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


def _of_luminance(hue: float, wanted: float, saturation: float = _SATURATION) -> str:
    """Return the colour of a hue that is as bright as wanted, found by bisection over its lightness."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if luminance(_hex(hue, middle, saturation)) < wanted:
            low = middle
        else:
            high = middle
    return _hex(hue, low, saturation)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))

"""Curves as SVG images, for pages that a browser shows.

An image is a few dozen lines and rectangles, so the standard library writes it; a plotting library would be the largest
dependency of the project.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

WIDTH, HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 190, 34, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by colour-blind readers (Okabe and Ito, 2008); further curves have them again, and are dashed."""

_DASHES = ("", "6 4", "2 3")
_THIN, _BOLD = 2, 5


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line.

    Attributes:
        name: For the legend.
        points: (x, y) in order of x.
        open: Points that are only lower bounds, by their index; they are drawn as open circles.
        bold: Whether it is thick, and under the others, so that it is told apart where they are at the same value.
        look: Number of its colour and dashes, for charts that have those of a name in common; None for its place.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    open: frozenset[int] = frozenset()
    bold: bool = False
    look: int | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        label: What it shows.
        low: Its first value.
        high: Its last value, above `low`.
        log: Whether it is logarithmic; `low` is then above 0, and stands for everything below.
    """

    label: str
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies between the ends, from 0 to 1.

        >>> Axis("s", 1, 100, log=True).share(10), Axis("s", 0, 8).share(2)
        (0.5, 0.25)
        """
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the values to be named: powers of ten, and 2 and 5 times these if they are few, or round steps.

        >>> Axis("s", 0.5, 2000, log=True).ticks(), Axis("s", 50, 800, log=True).ticks(), Axis("s", 0, 60).ticks()[:3]
        ([1.0, 10.0, 100.0, 1000.0], [50.0, 100.0, 200.0, 500.0], [0.0, 10.0, 20.0])
        """
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if self.high < 1000 * self.low else (1,)
            ticks = [round(part * 10.0**k, 12) for k in decades for part in parts]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(k for k in (1, 2, 5, 10) if (self.high - self.low) / (k * step) <= 8)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(k * step, 12) for k in range(first, last + 1)]


def chart(title: str, curves: Sequence[Curve], x: Axis, y: Axis, *, steps: bool = False) -> bytes:
    """Return an SVG image of curves.

    Args:
        title: What it shows.
        curves: The lines, in the order of the legend.
        x: The horizontal axis.
        y: The vertical axis.
        steps: Whether y holds until the next x, and only the last point is marked, where the curve ends; else points
            are joined, and all are marked.
    """
    root = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", width=str(WIDTH), height=str(HEIGHT)
    )
    root.set("font-family", "sans-serif")
    root.set("font-size", "12")
    ElementTree.SubElement(root, "title").text = title
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="white")
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across, up = x.share(point[0]), y.share(point[1])
        return round(_LEFT + across * (right - _LEFT), 1), round(bottom - up * (bottom - _TOP), 1)

    _text(root, _LEFT, 20, title, weight="bold")
    _text(root, (_LEFT + right) / 2, HEIGHT - 12, x.label, anchor="middle")
    label = _text(root, 16, (_TOP + bottom) / 2, y.label, anchor="middle")
    label.set("transform", f"rotate(-90 16 {(_TOP + bottom) / 2:g})")
    for value in x.ticks():
        at, _ = place((value, y.low))
        _line(root, [(at, _TOP), (at, bottom)], "#dddddd")
        _text(root, at, bottom + 18, f"{value:,g}", anchor="middle")
    for value in y.ticks():
        _, at = place((x.low, value))
        _line(root, [(_LEFT, at), (right, at)], "#dddddd")
        _text(root, _LEFT - 8, at + 4, f"{value:,g}", anchor="end")
    _line(root, [(_LEFT, _TOP), (_LEFT, bottom), (right, bottom)], "#444444")
    for number, curve in sorted(enumerate(curves), key=lambda item: not item[1].bold):
        look = number if curve.look is None else curve.look
        colour, dashes = _COLOURS[look % len(_COLOURS)], _DASHES[look // len(_COLOURS) % len(_DASHES)]
        width = _BOLD if curve.bold else _THIN
        placed = [place(point) for point in curve.points]
        marked = list(enumerate(placed))[-1:] if steps else list(enumerate(placed))
        if steps and placed:
            corners = placed[:1]
            for across, up in placed[1:]:
                corners += [(across, corners[-1][1]), (across, up)]
            placed = corners
        if placed:
            _line(root, placed, colour, width=width, dashes=dashes)
        for index, (across, up) in marked:
            circle = ElementTree.SubElement(
                root, "circle", cx=str(across), cy=str(up), r=f"{3 + width / 2:g}", stroke=colour
            )
            circle.set("fill", "white" if index in curve.open else colour)
        height = _TOP + 18 * number + 8
        _line(root, [(right + 14, height), (right + 34, height)], colour, width=width, dashes=dashes)
        _text(root, right + 40, height + 4, curve.name)
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f"{text}\n".encode()


def _line(
    root: ElementTree.Element, points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashes: str = ""
) -> None:
    text = " ".join(f"{across:g},{up:g}" for across, up in points)
    line = ElementTree.SubElement(root, "polyline", points=text, fill="none", stroke=colour)
    line.set("stroke-width", f"{width:g}")
    if dashes:
        line.set("stroke-dasharray", dashes)


def _text(
    root: ElementTree.Element, x: float, y: float, words: str, anchor: str = "start", weight: str = "normal"
) -> ElementTree.Element:
    element = ElementTree.SubElement(root, "text", x=f"{x:g}", y=f"{y:g}")
    element.set("text-anchor", anchor)
    element.set("font-weight", weight)
    element.text = words
    return element

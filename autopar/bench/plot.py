"""Curves drawn with letters: what a terminal and a Markdown file can both show."""

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]
"""(x, y) in order of x; y holds until the next x."""


def step_plot(
    curves: Sequence[tuple[str, Points]],
    *,
    end: float,
    x_label: str,
    y_label: str,
    width: int = 72,
    height: int = 12,
    floor: float = 1e-6,
) -> list[str]:
    """Return the lines of a plot of step curves, y on a logarithmic axis.

    Args:
        curves: Name and points of each curve; it is drawn with the first letter of its place in the list (a, b, ...).
        end: Last x; the first is 0.
        x_label: What x is.
        y_label: What y is.
        width: Columns between the axes.
        height: Lines between the axes.
        floor: Values up to this are drawn on the lowest line, which stands for 0.

    >>> curve = [(0, 1.0), (5, 0.0)]
    >>> for line in step_plot([("one", curve)], end=10, x_label="s", y_label="gap", width=10, height=3):
    ...     print(line)
    gap
       1 |aaaaa
         |
       0 |     aaaaa
         +----------
          0 to 10 s
          a: one
    """
    values = [y for _, points in curves for _, y in points if math.isfinite(y) and y > floor]
    highest = max(values, default=1.0)
    lowest = min(*values, highest / 10) if values else highest / 10
    grid = [[" "] * width for _ in range(height)]
    for number, (_, points) in enumerate(curves):
        letter = chr(ord("a") + number % 26)
        for column in range(width):
            x = (column + 0.5) * end / width
            known = [y for at, y in points if at <= x and math.isfinite(y)]
            if known:
                line = grid[_line(known[-1], lowest, highest, height, floor)]
                line[column] = letter if line[column] == " " else "*"
    labels = {0: f"{highest:.2g}", height - 1: "0"}
    if height > 3:
        labels[height - 2] = f"{lowest:.2g}"
    margin = max(4, *(len(label) for label in labels.values()))
    lines = [y_label]
    lines += [f"{labels.get(i, ''):>{margin}} |{''.join(row).rstrip()}".rstrip() for i, row in enumerate(grid)]
    lines += [f"{'':>{margin}} +{'-' * width}", f"{'':>{margin}}  0 to {end:g} {x_label}"]
    lines += [f"{'':>{margin}}  {chr(ord('a') + i % 26)}: {name}" for i, (name, _) in enumerate(curves)]
    if any("*" in row for row in grid):
        lines.append(f"{'':>{margin}}  *: several of them")
    return lines


def _line(y: float, lowest: float, highest: float, height: int, floor: float) -> int:
    """Return the line of a value, the highest first; the last one is for 0."""
    if y <= floor:
        return height - 1
    share = math.log(highest / y) / math.log(highest / lowest) if highest > lowest else 0.0
    return min(height - 2, round(share * (height - 2))) if height > 1 else 0

"""Tables and paragraphs of plain text that fit a given number of columns."""

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
_GAP = "  "
_FIGURE = re.compile(r"[+-]?[0-9][0-9.,e+-]*( [a-zA-Z%×]{1,2})?")  # "1,024", "0-7", "12.3 ms", "+3.1 %"
_UNIT = re.compile(r"(?<=[0-9]) (?=(?:%|×|[kMGTP]?B|[mun]?s)(?![a-zA-Z]))")  # the space between a figure and its unit
_NO_BREAK = "\u00a0"
_SEVERAL = 3  # ratio from which on sentences tell how many times as slow something is
_TIMES = 10  # ratio from which on it is told as such, no longer in percent
_MIN_WRAPPED = 24  # narrowest column worth wrapping into; below it the table is continued underneath instead


def format_share(part: float, whole: float) -> str:
    """Return a part of a whole in percent.

    >>> format_share(1, 8), format_share(1, 0)
    ('12.5 %', '-')
    """
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def format_change(value: float, reference: float) -> str:
    """Return how much larger a value is than a reference, in percent and with its sign, or how many times as large.

    >>> format_change(1.1, 1.0), format_change(40.0, 1.0), format_change(1.0, 0.0)
    ('+10.0 %', '40 ×', '-')
    """
    if reference <= 0:
        return "-"
    ratio = value / reference
    return f"{100 * (ratio - 1):+.1f} %" if ratio < _TIMES else f"{ratio:,.0f} ×"


def format_slower(value: float, reference: float) -> str:
    """Return how much slower something is that takes `value` seconds, in words.

    >>> format_slower(1.1, 1.0), format_slower(0.95, 1.0), format_slower(1.0, 1.0), format_slower(14.8, 1.0)
    ('10.0 % slower', '5.0 % faster', 'as fast', '15 times as slow')
    """
    ratio = value / reference
    if ratio >= _SEVERAL:
        return f"{ratio:.0f} times as slow"
    percent = f"{abs(100 * (ratio - 1)):.1f}"
    if percent == "0.0":
        return "as fast"
    return f"{percent} % {'slower' if ratio > 1 else 'faster'}"


def bar(part: float, whole: float, length: int = 28, start: float = 0.0) -> str:
    """Return a bar of `#`, full at `part == whole`, that begins where the parts before it end.

    >>> bar(1, 4, length=8), bar(2, 4, length=8, start=1)
    ('##', '  ####')
    """
    if whole <= 0:
        return ""
    first, last = (round(length * min(1.0, max(0.0, at / whole))) for at in (start, start + part))
    return " " * first + "#" * (last - first) if last > first else ""


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return the lines of a paragraph; figures stay with their units.

    Args:
        text: The paragraph.
        width: Columns, indentation included.
        first: Indentation of the first line.
        rest: Indentation of the other lines.

    >>> wrap("it takes 12.3 ms", 14)
    ['it takes', '12.3 ms']
    """
    glued = _UNIT.sub(_NO_BREAK, text)
    lines = textwrap.wrap(glued, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def heading(title: str) -> list[str]:
    """Return the lines that start a section."""
    return ["", title, "-" * len(title)]


def format_entries(entries: Sequence[tuple[str, str]], width: int = WIDTH) -> list[str]:
    """Return labelled paragraphs, the texts aligned and wrapped.

    >>> format_entries([("plan", "dp=8"), ("MFU", "41.2 %")])
    ['plan  dp=8', 'MFU   41.2 %']
    """
    indent = max((len(label) for label, _ in entries), default=0) + len(_GAP)
    lines: list[str] = []
    for label, text in entries:
        lines += wrap(text, width, label.ljust(indent), " " * indent) or [label]
    return lines


def format_items(items: Sequence[str], width: int = WIDTH) -> list[str]:
    """Return a list with dashes, wrapped."""
    lines: list[str] = []
    for item in items:
        lines += wrap(item, width, "- ", "  ")
    return lines


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> list[str]:
    """Return a table; columns of figures are aligned right, others left.

    A last column of text is wrapped if it does not fit. A table that is still too wide is continued underneath, with
    its first column repeated.

    >>> format_table(("stage", "peak"), [("0", "41 GB"), ("1", "7 GB")])
    ['stage   peak', '    0  41 GB', '    1   7 GB']
    """
    sizes = [
        max(len(header[i]), *(len(row[i]) for row in rows)) if rows else len(header[i]) for i in range(len(header))
    ]
    right = [bool(rows) and all(_is_figure(row[i]) for row in rows) for i in range(len(header))]
    total = sum(sizes) + len(_GAP) * (len(sizes) - 1)
    spare = width - (total - sizes[-1])
    if total > width and not right[-1] and spare >= min(_MIN_WRAPPED, sizes[-1]):
        sizes[-1] = spare
    elif total > width and len(header) > 2:
        return _continued(header, rows, sizes, width)
    lines: list[str] = []
    for row in (header, *rows):
        wrapped = wrap(row[-1], max(1, sizes[-1])) or [""]  # a column may be empty, its header included
        for number, last in enumerate(wrapped):
            cells = (*row[:-1], last) if number == 0 else (*[""] * (len(row) - 1), last)
            aligned = [
                cell.rjust(size) if is_right else cell.ljust(size)
                for cell, size, is_right in zip(cells, sizes, right, strict=True)
            ]
            lines.append(_GAP.join(aligned).rstrip())
    return lines


def _continued(header: Sequence[str], rows: Sequence[Sequence[str]], sizes: Sequence[int], width: int) -> list[str]:
    groups: list[list[int]] = [[0]]
    used = sizes[0]
    for i in range(1, len(header)):
        if used + len(_GAP) + sizes[i] > width and len(groups[-1]) > 1:
            groups.append([0])
            used = sizes[0]
        groups[-1].append(i)
        used += len(_GAP) + sizes[i]
    lines: list[str] = []
    for number, group in enumerate(groups):
        if number:
            lines.append("")
        part = [[row[i] for i in group] for row in rows]
        lines += format_table([header[i] for i in group], part, width)
    return lines


def _is_figure(cell: str) -> bool:
    return cell in {"", "-"} or _FIGURE.fullmatch(cell) is not None


def shorten(name: str, length: int) -> str:
    """Return a name of at most `length` characters, its middle left out.

    >>> shorten("encoder.layer.11.output.dense.weight", 20)
    'encoder.l...e.weight'
    """
    if len(name) <= length:
        return name
    head = (length - 3 + 1) // 2
    return f"{name[:head]}...{name[len(name) - (length - 3 - head) :]}"

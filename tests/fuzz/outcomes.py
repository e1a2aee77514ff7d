"""What became of a run: an answer, an error, or a failure of the program."""

import ast
import json
import math
import re
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from html.parser import HTMLParser
from typing import Any

from tests.fuzz.edges import MARK
from tests.fuzz.sandbox import MAX_BYTES, Run


class Outcome(StrEnum):
    """What became of a run."""

    ANSWER = "answer"
    ERROR = "error"
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"
    TRACEBACK = "traceback"
    CRASH = "crash"
    HANG = "hang"
    MEMORY = "memory"
    NONSENSE = "nonsense"
    UNESCAPED = "unescaped"

    @property
    def failed(self) -> bool:
        """Whether the program is at fault."""
        return self not in (Outcome.ANSWER, Outcome.ERROR, Outcome.INFEASIBLE, Outcome.STOPPED)


_CODES = {0: Outcome.ANSWER, 2: Outcome.ERROR, 3: Outcome.INFEASIBLE, 130: Outcome.STOPPED}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, marks that turn the direction of text, and line separators."""
_INJECTED = re.compile(rf"^{MARK}", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.-])(nan|-\d[\d.,]*) (n|u|m)?s\b|(?<![\w.-])nan (%|[PTGMk]?B)")
"""A time that is negative or no number, or a share or size that is none, as a report prints it."""
_ROUNDING = 1e-15
"""Seconds that rounding may leave of a difference that is nothing; reports print them as 0."""
_TIMES = re.compile(r"(^|_)seconds$|^objective$|^bound$|^latency$")


def judge(run: Run) -> tuple[Outcome, str]:
    """Return what became of a run, and what shows it."""
    if run.bytes > MAX_BYTES:
        return Outcome.MEMORY, f"{run.bytes / 1e9:.1f} GB"
    if run.hung:
        return Outcome.HANG, f"{run.seconds:.0f} s"
    if run.raised:
        return Outcome.TRACEBACK, _last_lines(run.err)
    if run.code not in _CODES:
        return Outcome.CRASH, f"exit code {run.code}: {_last_lines(run.err)}"
    for data in (run.out, run.err):
        text = data.decode(errors="replace")
        if found := _CONTROL.search(text) or _INJECTED.search(text):
            return Outcome.UNESCAPED, ascii(text[max(0, found.start() - 60) : found.end() + 20])
    outcome = _CODES[run.code]
    if outcome is Outcome.ERROR and run.err.count(b"error: ", 0, 10**6) == 0:
        return Outcome.NONSENSE, "exit code 2 without an error"
    if outcome is Outcome.ANSWER and (found := _NUMBER.search(run.out.decode(errors="replace"))):
        return Outcome.NONSENSE, found[0]
    for name, data in {"stdout": run.out, **run.written}.items():
        if fault := _fault(name, data):
            return fault[0], f"{name}: {fault[1]}"
    return outcome, ""


def _last_lines(err: bytes) -> str:
    lines = err.decode(errors="replace").strip().splitlines()
    where = next((line.strip() for line in reversed(lines) if line.startswith('  File "')), "")
    return f"{where} {lines[-1] if lines else ''}"[:400]


def _fault(name: str, data: bytes) -> tuple[Outcome, str] | None:
    """Return what is wrong with what a run wrote."""
    text = data.decode(errors="replace")
    try:
        if name.endswith(".json") or (name == "stdout" and text.startswith(("{", "["))):
            wrong = next(_nonsense(json.loads(text, parse_constant=_no_number), ""), None)
            return None if wrong is None else (Outcome.NONSENSE, wrong)
        if name.endswith(".py"):
            return _foreign(ast.parse(text))
        if name.endswith(".toml"):
            tomllib.loads(text)
        if name.endswith(".html"):
            return _Page.read(text)
    except (ValueError, SyntaxError) as error:
        return (Outcome.UNESCAPED, f"cannot be read: {error}"[:300]) if name != "stdout" else None
    if name.endswith((".args", ".values", ".txt")) and (found := _CONTROL.search(text) or _INJECTED.search(text)):
        return Outcome.UNESCAPED, ascii(text[max(0, found.start() - 60) : found.end() + 20])
    return None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _nonsense(tree: Any, key: str) -> Iterator[str]:
    """Yield the times of an answer that are negative or no numbers."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _nonsense(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nonsense(value, key)
    elif _TIMES.search(key) and isinstance(tree, int | float) and (tree < -_ROUNDING or not math.isfinite(tree)):
        yield f"{key} is {tree}"


def _foreign(tree: ast.Module) -> tuple[Outcome, str] | None:
    """Return a statement that a name smuggled into a script."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == MARK:
            return Outcome.UNESCAPED, f"line {node.lineno} runs {MARK}"
    return None


class _Page(HTMLParser):
    """Finds what a name smuggled into a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._script = tag == "script"
        if any(name.startswith("on") and MARK in (value or "") for name, value in attrs):
            self.found = f"<{tag}> with a handler"

    def handle_data(self, data: str) -> None:
        if self._script and data.startswith(MARK):
            self.found = "a script"

    @classmethod
    def read(cls, text: str) -> tuple[Outcome, str] | None:
        """Return what is wrong with a page."""
        page = cls()
        page.feed(text)
        return (Outcome.UNESCAPED, page.found) if page.found else None

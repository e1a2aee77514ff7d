r"""Text from files as it is shown: characters that a terminal, a page or a reader would obey are written as escapes.

These are control characters, escape codes among them, separators of lines, marks that turn the direction of text, tags
that are not seen, and halves of characters that no encoding takes. Their escape, `\u001b`, means the character itself
in JSON, YAML, TOML and Python.
"""

import re

_OBEYED = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f"
_IN_LINE = re.compile(f"[\x00-\x1f{_OBEYED}]")
_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_OBEYED}]")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def is_plain(text: str) -> bool:
    r"""Whether a text has no characters that `one_line` escapes.

    >>> is_plain("naïve"), is_plain("a\nb")
    (True, False)
    """
    return _IN_LINE.search(text) is None


def one_line(text: str) -> str:
    r"""Return text with what is obeyed as escapes, ends of lines and tabs included.

    >>> one_line("a\nb\x1b[31m"), one_line("naïve")
    ('a\\u000ab\\u001b[31m', 'naïve')
    """
    return _IN_LINE.sub(_escape, text)


def lines(text: str) -> str:
    r"""Return text of several lines with what is obeyed as escapes, but for ends of lines and tabs.

    >>> lines("a\tb\nc\x1b[31m\r")
    'a\tb\nc\\u001b[31m\\u000d'
    """
    return _IN_LINES.sub(_escape, text)

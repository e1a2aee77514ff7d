"""Mutations of a text of lines and words, in a format that is nobody else's: of programs."""

import json
import re
from random import Random

from tests.fuzz.edges import NAMES, TEXTS, WHOLE

_WORD = re.compile(r"\d+|[\w.%]+|[^\w\s]")


def mutated(random: Random, data: bytes) -> bytes:
    """Return a text with one or two lines left out, repeated or exchanged, or with other words in them."""
    lines = data.decode().split("\n")
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(len(lines))
        match random.randrange(8):
            case 0:
                del lines[place]
            case 1:
                lines.insert(place, random.choice(lines))
            case 2:
                other = random.randrange(len(lines))
                lines[place], lines[other] = lines[other], lines[place]
            case _:
                lines[place] = _other_word(random, lines[place], lines)
        lines = lines or [""]
    return "\n".join(lines).encode(errors="surrogatepass")


def _other_word(random: Random, line: str, lines: list[str]) -> str:
    """Return a line with another number or word in place of one, of another line or such as nobody writes."""
    words = list(_WORD.finditer(line))
    if not words:
        return line
    word = random.choice(words)
    others = _WORD.findall(random.choice(lines)) or [""]
    match random.randrange(5):
        case 0:
            new = str(random.choice(WHOLE))
        case 1 if word[0].isdecimal():
            new = str(max(0, int(word[0]) + random.choice((-1, 1, 2))))
        case 2:
            new = random.choice((json.dumps(random.choice(NAMES)), random.choice(TEXTS)))
        case 3:
            new = ""
        case _:
            new = random.choice(others)
    return line[: word.start()] + new + line[word.end() :]

"""Mutations of the bytes of a file."""

from random import Random

_INSERTED = (b"\x00", b"\xff\xfe", b"\xc3\x28", b"\x1b[31m", b"\r", b"\n", b'"', b"{", b"]", b"\xf0\x9f", b"\x80" * 9)


def mutated(random: Random, data: bytes) -> bytes:
    """Return bytes with one to four places changed."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(len(changed) + 1)
        length = random.choice((1, 1, 4, 32, 1000))
        match random.randrange(6):
            case 0:
                del changed[place:]
            case 1:
                del changed[place : place + length]
            case 2:
                changed[place:place] = random.choice(_INSERTED)
            case 3:
                changed[place:place] = changed[place : place + length]
            case 4:
                changed[place : place + 1] = bytes((random.randrange(256),))
            case _:
                if place < len(changed):
                    changed[place] ^= 1 << random.randrange(8)
    return bytes(changed)

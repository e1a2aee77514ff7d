"""Rings on a torus: which of its axes a group of devices lies on, and how many links it may use.

Devices are numbered row-major over the axes of the torus. A group of devices a stride apart lies on some of them; on
each it is a ring (if the axis is closed and the group covers it) with two directions, or a line with one. Groups that
interleave on one axis share its links. A collective is cut over the axes a group lies on, so that their rates add.
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Ring:
    """The part of a group that lies on one axis of a torus.

    Attributes:
        members: Devices of the group along the axis.
        rate: Bytes/s it may send, in units of one direction of one link.
        closed: Whether it is a ring and not a line.
    """

    members: int
    rate: float
    closed: bool


def rings(size: int, stride: int, torus: tuple[int, ...], wraps: int) -> tuple[Ring, ...]:
    """Return the rings of a group of `size` devices, `stride` apart, that lies within a torus.

    Args:
        size: Devices of the group, 2 or more.
        stride: How far apart they are numbered.
        torus: Sizes of the axes, major first.
        wraps: An axis is closed if its size is a multiple of this.

    Returns:
        One ring per axis, minor first. A group that does not lie on the axes evenly counts as one line that it shares
        with the groups beside it.

    >>> rings(16, 1, (4, 4, 4), 4)
    (Ring(members=4, rate=2.0, closed=True), Ring(members=4, rate=2.0, closed=True))
    >>> rings(2, 2, (4, 4, 4), 4)
    (Ring(members=2, rate=0.5, closed=False),)
    """
    found = []
    inner, left, apart = 1, size, stride
    for axis in reversed(torus):
        outer = inner * axis
        if left > 1 and apart < outer:
            if apart % inner:
                break
            step = apart // inner
            members = min(left, -(-axis // step))
            if left % members or (members * step != axis and left > members):
                break
            closed = members * step == axis and axis % wraps == 0 and members > 2
            if members > 1:
                found.append(Ring(members, (2.0 if closed else 1.0) / step, closed))
            left //= members
            apart = outer
        inner = outer
    if left > 1 or prod(ring.members for ring in found) != size:
        return (Ring(size, 1.0 / stride, False),)
    return tuple(found)

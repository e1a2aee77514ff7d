"""Values that go from stage to stage in pieces, as one rank sends and receives them.

What a device has for another one travels as one tensor, box by box.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.program.records import Crossing, StageProgram
from autopar.ranks.communicator import Memory, Tensor
from autopar.runtime.crossings import divisions
from autopar.sharding import own_shape

Place = tuple[slice, ...]
"""Where a box lies in the block of a device."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels between a rank and another one.

    Attributes:
        peer: The other rank.
        places: Where its boxes lie in the rank's own block, in the order in which they travel.
    """

    peer: int
    places: tuple[Place, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(map(_elements, self.places))


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a rank has to do with a value that crosses.

    Attributes:
        sends: What it sends to whom.
        receives: What it receives from whom.
        adds: Whether it adds up terms.
        shape: Shape of its block on the receiving side.
    """

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    adds: bool
    shape: tuple[int, ...]


def exchanged(crossing: Crossing, stages: Sequence[StageProgram], rank: int) -> Exchanged:
    """Return what a rank has to do with a value that crosses."""
    source, target = divisions(crossing, stages)
    first, other = stages[crossing.sender].devices[0], stages[crossing.receiver].devices[0]
    sends: dict[int, list[Place]] = {}
    receives: dict[int, list[Place]] = {}
    for piece in crossing.pieces:
        if piece.sender == rank:
            sends.setdefault(piece.receiver, []).append(source.place(rank - first, piece.box))
        if piece.receiver == rank:
            receives.setdefault(piece.sender, []).append(target.place(rank - other, piece.box))
    there = stages[crossing.receiver].mesh
    position = rank - other
    placed = crossing.target.placements
    shape = own_shape(crossing.target.shape, placed, there, position) if receives else crossing.target.shape
    return Exchanged(_parcels(sends), _parcels(receives), source.num_terms > 1, shape)


def _parcels(places: dict[int, list[Place]]) -> tuple[Parcel, ...]:
    return tuple(Parcel(peer, tuple(found)) for peer, found in places.items())


def pack(parcel: Parcel, tensor: Tensor, dtype: str, memory: Memory) -> Tensor:
    """Return the boxes of a parcel, cut out of a block, as one flat tensor."""
    flat = memory.empty((parcel.elements,), dtype)
    start = 0
    for place in parcel.places:
        stop = start + _elements(place)
        flat[start:stop] = tensor[place].reshape(-1)
        start = stop
    return flat


def unpack(parcel: Parcel, flat: Tensor, block: Tensor, *, adds: bool) -> None:
    """Put the boxes of a parcel into a block, or add them to what is there."""
    start = 0
    for place in parcel.places:
        stop = start + _elements(place)
        box = flat[start:stop].reshape([each.stop - each.start for each in place])
        block[place] = block[place] + box if adds else box
        start = stop


def _elements(place: Place) -> int:
    return prod(each.stop - each.start for each in place)

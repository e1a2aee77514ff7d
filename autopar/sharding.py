"""Meshes and placements: which block of a tensor each device holds.

A `Mesh` has named axes; axis 0 is the major one (its neighbours are furthest apart). A placement says, per mesh axis,
whether a tensor dim is split over the axis (`Shard`), copied (`Replicate`) or present as terms still to be reduced
(`Partial`). A dim split over several axes is split by the major axis first.

A dim that holds several things side by side (queries, keys and values of a fused projection) is sharded *block-cyclic*:
cut into equal chunks first, then every chunk is split over the axis, so that each device has its share of all of them.

A vocabulary, or the state of the optimizer, may be split along a dim that the axis does not divide: the shards are
*uneven*. Every device has as many rows as the largest block, until none are left for the last devices, as in PyTorch's
DTensor and FSDP2 (Megatron-LM and DeepSpeed pad the last blocks to the same size). One axis alone splits such a dim.
Shapes of a program are those of the first device, whose block is the largest.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autopar.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Device i of the axis holds the i-th of equal blocks along `dim`.

    With `chunks` above 1 it holds, side by side, the i-th block of each of that many equal chunks of the dim. All axes
    that split a dim agree on its chunks. With `whole` above 0 the axis does not divide the dim, which has that many
    elements, and the blocks are uneven.

    >>> str(Shard(1)), str(Shard(1, chunks=3)), str(Shard(0, whole=10))
    ('S(1)', 'S(1/3)', 'S(0:10)')
    """

    dim: int
    chunks: int = 1
    whole: int = 0

    def __str__(self) -> str:
        if self.whole:
            return f"S({self.dim}:{self.whole})"
        return f"S({self.dim})" if self.chunks == 1 else f"S({self.dim}/{self.chunks})"

    def block(self, size: int) -> int:
        """Return the elements of the largest block of a dim in uneven blocks over `size` devices."""
        return -(-self.whole // size)

    def ends(self, size: int) -> tuple[int, ...]:
        """Return where each of the uneven blocks over `size` devices ends.

        >>> Shard(0, whole=10).ends(4), Shard(0, whole=5).ends(4)
        ((3, 6, 9, 10), (2, 4, 5, 5))
        """
        rows = self.block(size)
        return tuple(min(rows * (index + 1), self.whole) for index in range(size))


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device of the axis holds one term; `reduce`, a key of `REDUCTIONS`, over them gives the tensor."""

    reduce: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"


REDUCTIONS = ("sum", "mean", "max", "min", "prod", "logsumexp")
"""What terms can be put together by; "logsumexp" is the logarithm of the sum of their exponentials."""

Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]
"""One placement per mesh axis, in mesh order."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: `size` devices, `stride` apart in the numbering of devices."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices numbered row-major.

    >>> Mesh.of(dp=4, tp=2).axes
    (Axis(name='dp', size=4, stride=2), Axis(name='tp', size=2, stride=1))
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, **sizes: int) -> "Mesh":
        """Return the row-major mesh with these axes, the first one major.

        Raises:
            ShardingError: If a size is not positive.
        """
        axes = []
        stride = prod(sizes.values())
        for name, size in sizes.items():
            if size < 1:
                raise ShardingError(f"mesh axis {name!r} has size {size}", hint="sizes are positive whole numbers")
            stride //= size
            axes.append(Axis(name, size, stride))
        return cls(tuple(axes))

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(axis.size for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    def __str__(self) -> str:
        return "×".join(f"{axis.name}={axis.size}" for axis in self.axes)


def parse_placement(text: str) -> Placement:
    """Return the placement that prints as `text`.

    Raises:
        ShardingError: If the text is none.

    >>> parse_placement("S(1/3)"), parse_placement("R"), parse_placement("P(max)")
    (Shard(dim=1, chunks=3, whole=0), Replicate(), Partial(reduce='max'))
    """
    if text == "R":
        return Replicate()
    if text == "P":
        return Partial()
    if text.startswith(("S(", "P(")) and text.endswith(")"):
        inner = text[2:-1]
        if text[0] == "P" and inner in REDUCTIONS:
            return Partial(inner)
        if text[0] == "S" and (match := re.fullmatch(r"(\d{1,9})(?:/([1-9]\d{0,8})|:([1-9]\d{0,17}))?", inner)):
            return Shard(int(match[1]), int(match[2] or 1), int(match[3] or 0))
    raise ShardingError(f"{text!r} is not a placement", hint="write R, S(dim), S(dim/chunks), S(dim:rows), P or P(max)")


@lru_cache(maxsize=1 << 16)  # a plan says the same again and again
def parse_placements(text: str) -> Placements:
    """Return the placements that print as `text`, major axis first.

    Raises:
        ShardingError: If the text is none.

    >>> parse_placements("S(0/2)RP(max)")
    (Shard(dim=0, chunks=2, whole=0), Replicate(), Partial(reduce='max'))
    """
    parts = re.findall(r"[A-Z](?:\([^)]*\))?", text)
    if "".join(parts) != text:
        raise ShardingError(f"{text!r} are not placements", hint="write one of R, S(dim), P per mesh axis")
    return tuple(parse_placement(part) for part in parts)


def format_placements(placements: Placements) -> str:
    """Return placements for reading, major axis first.

    >>> format_placements((Shard(0), Replicate()))
    'S(0)R'
    """
    return "".join(map(str, placements))


def local_shape(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the block one device holds.

    Args:
        shape: Global shape.
        placements: One placement per mesh axis, in mesh order.
        mesh: The devices.

    Raises:
        ShardingError: If a dim is out of range or not divisible by its axis.

    >>> local_shape((8, 6), (Shard(0), Replicate()), Mesh.of(dp=4, tp=2))
    (2, 6)
    """
    if len(placements) != len(mesh.axes):
        raise ShardingError(f"{len(placements)} placements for a mesh of {len(mesh.axes)} axes ({mesh})")
    local = list(shape)
    for placement, axis in zip(placements, mesh.axes, strict=True):
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim
        if not 0 <= dim < len(local):
            raise ShardingError(f"dim {dim} of {shape} does not exist", hint=f"dims are 0 to {len(local) - 1}")
        if placement.whole:
            if local[dim] != placement.whole:
                raise ShardingError(f"dim {dim} of {shape} has {local[dim]} elements left, not {placement.whole}")
            local[dim] = placement.block(axis.size)
            continue
        parts = axis.size * placement.chunks
        if local[dim] % parts:
            padded = -(-local[dim] // parts) * parts
            each = f" in {placement.chunks} chunks" if placement.chunks > 1 else ""
            raise ShardingError(
                f"dim {dim} of {shape} has {local[dim]} elements left, "
                f"not divisible by mesh axis {axis.name!r} of size {axis.size}{each}",
                hint=f"pad it to {padded} or shard another dim",
            )
        local[dim] //= axis.size
    return tuple(local)


def own_shape(block: tuple[int, ...], placements: Placements, mesh: Mesh, position: int) -> tuple[int, ...]:
    """Return the shape of the block of one device, given the shape of the largest block.

    Args:
        block: Shape of the largest block, as of `local_shape`.
        placements: One placement per mesh axis; () for a value without placements.
        mesh: The devices.
        position: Position of the device in the mesh.

    >>> own_shape((3, 6), (Shard(0, whole=10), Replicate()), Mesh.of(dp=4, tp=2), 7)
    (1, 6)
    """
    own = list(block)
    for placement, axis in zip(placements, mesh.axes if placements else (), strict=True):
        if isinstance(placement, Shard) and placement.whole:
            index = position // axis.stride % axis.size
            ends = (0, *placement.ends(axis.size))
            own[placement.dim] = ends[index + 1] - ends[index]
    return tuple(own)


def deals(length: int, size: int) -> bool:
    """Whether a dim can be dealt to `size` devices in uneven blocks none of which is empty.

    >>> deals(50257, 8), deals(9, 8)
    (True, False)
    """
    return -(-length // size) * (size - 1) < length


def fits(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> bool:
    """Whether `local_shape` exists: every sharded dim is there and divisible."""
    local = list(shape)
    for placement, axis in zip(placements, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(local):
                return False
            if placement.whole:
                if local[placement.dim] != placement.whole:
                    return False
                local[placement.dim] = placement.block(axis.size)
            elif local[placement.dim] % (axis.size * placement.chunks):
                return False
            else:
                local[placement.dim] //= axis.size
    return True


def uneven(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> Placements:
    """Return placements with dims marked as uneven that an axis splits alone and does not divide.

    >>> format_placements(uneven((10, 6), (Shard(0), Shard(1)), Mesh.of(dp=4, tp=2)))
    'S(0:10)S(1)'
    """
    split = [placement.dim for placement in placements if isinstance(placement, Shard)]
    return tuple(
        Shard(placement.dim, whole=shape[placement.dim])
        if isinstance(placement, Shard)
        and placement.chunks == 1
        and split.count(placement.dim) == 1
        and shape[placement.dim] % axis.size
        else placement
        for placement, axis in zip(placements, mesh.axes, strict=True)
    )

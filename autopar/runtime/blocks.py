"""Tensors on a mesh in one process: one array per device, in row-major order of the mesh.

Devices that hold the same block share one array object, so that copies cost nothing and equal work is done once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ProgramError
from autopar.program.records import Start
from autopar.sharding import Mesh, Partial, Placement, Placements, Replicate, Shard, own_shape

Array = NDArray[Any]
Blocks = list[Array]
"""What each device of a mesh holds of one tensor."""

_REDUCE: Mapping[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "logsumexp": np.logaddexp,
}
_ROUNDING = {8: 1e-9, 4: 1e-4, 2: 1e-2}
"""By how much copies may differ, relative to the largest element, by bytes per float."""
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "logsumexp": -np.inf}


def split(array: Array, placement: Placement, size: int) -> Blocks:
    """Return what the devices of one axis hold of an array.

    Of terms the first is the array (times `size` for a mean) and the others leave it as it is; of a maximum or minimum
    all are the array.
    """
    match placement:
        case Shard(dim, _, whole) if whole:
            return np.split(array, placement.ends(size)[:-1], axis=dim)
        case Shard(dim, chunks):
            pieces = np.split(array, size * chunks, axis=dim)
            return pieces if chunks == 1 else [np.concatenate(pieces[i::size], axis=dim) for i in range(size)]
        case Partial(reduce) if reduce in _NEUTRAL:
            first = array * size if reduce == "mean" else array
            return [first, *[np.full_like(array, _NEUTRAL[reduce])] * (size - 1)]
        case _:
            return [array] * size


def join(parts: Sequence[Array], placement: Placement) -> Array:
    """Return the array that the devices of one axis hold parts of.

    Raises:
        ProgramError: If copies differ: the devices did not compute the same.
    """
    match placement:
        case Shard(dim, 1):
            return np.concatenate(parts, axis=dim)
        case Shard(dim, chunks):
            rows = zip(*(np.split(part, chunks, axis=dim) for part in parts), strict=True)
            return np.concatenate([piece for chunk in rows for piece in chunk], axis=dim)
        case Partial(reduce):
            total = _REDUCE[reduce].reduce(np.stack(parts), axis=0, dtype=parts[0].dtype)
            return np.asarray(total / len(parts) if reduce == "mean" else total)
        case Replicate():
            for part in parts[1:]:
                if part is not parts[0] and not _same(part, parts[0]):
                    raise ProgramError("devices that should hold copies of one tensor hold different values")
            return parts[0]


def _same(first: Array, second: Array) -> bool:
    """Whether two arrays are equal up to the order of additions inside a kernel."""
    if first.dtype.kind != "f":
        return bool(np.array_equal(first, second))
    scale = float(np.max(np.abs(first), initial=0.0, where=np.isfinite(first)))
    return bool(np.allclose(first, second, rtol=0.0, atol=_ROUNDING[first.dtype.itemsize] * scale, equal_nan=True))


def scatter(array: Array, placements: Placements, mesh: Mesh) -> Blocks:
    """Return what each device holds of a tensor.

    >>> [block.tolist() for block in scatter(np.arange(4), (Shard(0), Replicate()), Mesh.of(dp=2, tp=2))]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    blocks = [array]
    for placement, axis in zip(placements, mesh.axes, strict=True):
        # what devices share stays one object: equal blocks are split once
        pieces: dict[int, Blocks] = {}
        for block in blocks:
            pieces.setdefault(id(block), split(block, placement, axis.size))
        blocks = [piece for block in blocks for piece in pieces[id(block)]]
    return blocks


def gather(blocks: Blocks, placements: Placements, mesh: Mesh) -> Array:
    """Return the tensor of which each device holds a block; the inverse of `scatter`.

    Raises:
        ProgramError: If copies differ.
    """
    for placement, axis in zip(reversed(placements), reversed(mesh.axes), strict=True):
        groups = [blocks[start : start + axis.size] for start in range(0, len(blocks), axis.size)]
        blocks = [join(group, placement) for group in groups]
    return blocks[0]


def move(blocks: Blocks, axis: int, source: Placement, target: Placement, mesh: Mesh) -> Blocks:
    """Return the blocks after the placement on one axis (an index) has changed: what every collective does."""
    return _along(blocks, axis, mesh, lambda group: split(join(group, source), target, len(group)))


def move_together(
    tensors: Sequence[Blocks], axis: int, moves: Sequence[tuple[Placement, Placement]], mesh: Mesh
) -> list[Blocks]:
    """Return the blocks of several tensors after one collective for all of them, as buckets of gradients take.

    Sums to copies travel end to end in one array, sums to blocks as one row per device; tensors of other element types
    or other moves, or in uneven blocks over other axes, take collectives of their own.

    Args:
        tensors: What each device holds of each of them.
        axis: The axis whose placement changes (an index).
        moves: Placement of each of them on that axis before and after.
        mesh: The devices.
    """
    found: list[Blocks] = [[] for _ in tensors]
    alike: dict[tuple[str, str, np.dtype[Any]], list[int]] = {}
    size = mesh.axes[axis].size
    for number, (blocks, (source, target)) in enumerate(zip(tensors, moves, strict=True)):
        sums = isinstance(source, Partial) and source.reduce == "sum" and isinstance(target, Replicate | Shard)
        if isinstance(source, Partial) and sums and len({block.shape for block in blocks}) == 1:
            alike.setdefault((source.reduce, type(target).__name__, blocks[0].dtype), []).append(number)
        else:
            found[number] = move(blocks, axis, source, target, mesh)
    for (reduce, *_), numbers in alike.items():
        rows = [[_rows(block, moves[number][1], size) for block in _shared(tensors[number])] for number in numbers]
        shapes = [(own[0].shape[0], own[0][0].shape) for own in rows]
        flat = [[row.reshape(len(row), -1) for row in own] for own in rows]
        ends = np.cumsum([own[0].shape[1] for own in flat])[:-1]
        target = Replicate() if shapes[0][0] == 1 else Shard(0)
        places = [_places(tensors[number]) for number in numbers]
        known: dict[tuple[int, ...], Array] = {}
        joined = []
        for key in zip(*places, strict=True):
            if key not in known:
                known[key] = np.concatenate([own[place] for own, place in zip(flat, key, strict=True)], axis=1)
            joined.append(known[key])
        moved = move(joined, axis, Partial(reduce), target, mesh)
        parts: dict[int, list[Array]] = {id(block): np.split(block, ends, axis=1) for block in moved}
        for place, (number, (_, shape)) in enumerate(zip(numbers, shapes, strict=True)):
            cut = {key: own[place].reshape(shape) for key, own in parts.items()}
            found[number] = _own_blocks([cut[id(block)] for block in moved], axis, moves[number][1], mesh)
    return found


def _own_blocks(blocks: Blocks, axis: int, placement: Placement, mesh: Mesh) -> Blocks:
    """Return equal blocks without the rows that pad them, if the placement deals out uneven ones."""
    if not isinstance(placement, Shard) or not placement.whole:
        return blocks
    own: dict[tuple[int, int], Array] = {}
    found = []
    for rank, block in enumerate(blocks):
        index = rank // mesh.axes[axis].stride % mesh.axes[axis].size
        if (id(block), index) not in own:
            rows = own_shape(block.shape, (placement,), Mesh.of(axis=mesh.axes[axis].size), index)[placement.dim]
            own[id(block), index] = block[(*(slice(None),) * placement.dim, slice(0, rows))]
        found.append(own[id(block), index])
    return found


def _shared(blocks: Blocks) -> Blocks:
    """Return the distinct arrays that devices hold, in order."""
    return list({id(block): block for block in blocks}.values())


def _places(blocks: Blocks) -> list[int]:
    """Return the position of each device's array among the distinct ones."""
    known: dict[int, int] = {}
    return [known.setdefault(id(block), len(known)) for block in blocks]


def _rows(block: Array, target: Placement, size: int) -> Array:
    """Return what a device hands to a collective: its array as one row, or the share of each device as a row."""
    if not isinstance(target, Shard):
        return block[None]
    if target.whole:
        width = [(0, 0)] * block.ndim
        width[target.dim] = (0, target.block(size) * size - target.whole)
        return np.stack(np.split(np.pad(block, width), size, axis=target.dim))
    return np.stack(split(block, target, size))


def exchange(blocks: Blocks, axis: int, dim: int, rows: tuple[int, int], fill: str, mesh: Mesh) -> Blocks:
    """Return the blocks of a dim split over one axis (an index) with rows of their neighbours around them.

    Args:
        blocks: What each device holds.
        axis: The axis that splits the dim.
        dim: Tensor dim.
        rows: How many rows of the previous and of the next device.
        fill: What is there where no device is: "zero" or "lowest".
        mesh: The devices.

    Raises:
        ProgramError: If a block has fewer rows than its neighbour asks for.
    """
    have = min(block.shape[dim] for block in blocks)
    if have < max(rows):
        raise ProgramError(f"blocks of {have} rows are asked for {max(rows)} of them by their neighbours")

    def windows(group: Blocks) -> Blocks:
        width = [rows if each == dim else (0, 0) for each in range(group[0].ndim)]
        padded = np.pad(np.concatenate(group, axis=dim), width, constant_values=_fill(fill, group[0].dtype))
        ends = np.cumsum([block.shape[dim] for block in group]).tolist()
        before = (slice(None),) * dim
        return [
            padded[(*before, slice(end - block.shape[dim], end + sum(rows)))]
            for block, end in zip(group, ends, strict=True)
        ]

    return _along(blocks, axis, mesh, windows)


def _fill(fill: str, dtype: np.dtype[Any]) -> float | int:
    """Return the number that stands where a halo has no neighbour."""
    if fill == "zero":
        return 0
    assert fill == "lowest", f"{fill!r} fills nothing"
    return int(np.iinfo(dtype).min) if dtype.kind in "iu" else -np.inf


def lines(mesh: Mesh, axis: int) -> list[list[int]]:
    """Return the ranks of every line of devices along one axis (an index).

    >>> lines(Mesh.of(dp=2, tp=3), 0)
    [[0, 3], [1, 4], [2, 5]]
    """
    ranks = np.arange(mesh.size).reshape(mesh.shape)
    found: list[list[int]] = np.moveaxis(ranks, axis, -1).reshape(-1, mesh.shape[axis]).tolist()
    return found


def _along(blocks: Blocks, axis: int, mesh: Mesh, change: Callable[[Blocks], Blocks]) -> Blocks:
    """Return what becomes of the blocks if the devices of every line along one axis (an index) talk to each other."""
    changed: dict[int, Array] = {}
    known: dict[tuple[int, ...], Blocks] = {}
    for line in lines(mesh, axis):
        key = tuple(id(blocks[rank]) for rank in line)
        if key not in known:
            known[key] = change([blocks[rank] for rank in line])
        changed.update(zip(line, known[key], strict=True))
    return [changed[rank] for rank in range(len(blocks))]


def block_starts(start: Start, mesh: Mesh) -> Blocks:
    """Return where the block of each device starts; equal numbers are one object."""
    known: dict[int, Array] = {}
    coordinates = zip(*np.unravel_index(np.arange(mesh.size), mesh.shape), strict=True)
    starts = []
    for place in coordinates:
        position = start.of([int(place[mesh.axes.index(axis)]) for axis in start.axes])
        starts.append(known.setdefault(position, np.array(position, np.int64)))
    return starts

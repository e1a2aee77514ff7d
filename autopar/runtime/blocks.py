"""Tensors on a mesh in one process: one array per device, in row-major order of the mesh.

Devices that hold the same block share one array object, so that copies cost nothing and equal work is done once.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ProgramError
from autopar.program.records import Start
from autopar.sharding import Mesh, Partial, Placement, Placements, Replicate, Shard

Array = NDArray[Any]
Blocks = list[Array]
"""What each device of a mesh holds of one tensor."""

_REDUCE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def split(array: Array, placement: Placement, size: int) -> Blocks:
    """Return what the devices of one axis hold of an array.

    Terms of a sum or mean are the array (times `size` for a mean) and zeros; of a maximum or minimum all are the array.
    """
    match placement:
        case Shard(dim):
            return list(np.split(array, size, axis=dim))
        case Partial("sum" | "mean" as reduce):
            first = array * size if reduce == "mean" else array
            return [first, *[np.zeros_like(array)] * (size - 1)]
        case _:
            return [array] * size


def join(parts: Sequence[Array], placement: Placement) -> Array:
    """Return the array that the devices of one axis hold parts of.

    Raises:
        ProgramError: If copies differ: the devices did not compute the same.
    """
    match placement:
        case Shard(dim):
            return np.concatenate(parts, axis=dim)
        case Partial(reduce):
            total = parts[0]
            for part in parts[1:]:
                total = _REDUCE[reduce](total, part)
            return total / len(parts) if reduce == "mean" else total
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
    return bool(np.allclose(first, second, rtol=0.0, atol=1e-9 * scale, equal_nan=True))


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
    ranks = np.arange(mesh.size).reshape(mesh.shape)
    size = mesh.shape[axis]
    groups = np.moveaxis(ranks, axis, -1).reshape(-1, size)
    moved: list[Array | None] = [None] * len(blocks)
    known: dict[tuple[int, ...], Blocks] = {}
    for group in groups.tolist():
        key = tuple(id(blocks[rank]) for rank in group)
        if key not in known:
            known[key] = split(join([blocks[rank] for rank in group], source), target, size)
        for rank, block in zip(group, known[key], strict=True):
            moved[rank] = block
    return [block for block in moved if block is not None]


def exchange(blocks: Blocks, axis: int, dim: int, rows: tuple[int, int], fill: str, mesh: Mesh) -> Blocks:
    """Return the blocks with rows of their neighbours on one axis (an index) around them.

    Args:
        blocks: A tensor whose `dim` that axis splits.
        axis: Index of the axis.
        dim: Tensor dim.
        rows: How many rows of the previous and of the next device.
        fill: What stands where there is no neighbour: "zero" or "lowest" (minus infinity).
        mesh: The devices.
    """
    before, after = rows
    size, stride = mesh.shape[axis], prod(mesh.shape[axis + 1 :])
    first = blocks[0]
    outside = -np.inf if fill == "lowest" else 0
    edge = np.full((*first.shape[:dim], max(rows), *first.shape[dim + 1 :]), outside, first.dtype)
    known: dict[tuple[int, int, int], Array] = {}
    extended = []
    for rank, block in enumerate(blocks):
        position = rank // stride % size
        previous = blocks[rank - stride] if position else edge
        following = blocks[rank + stride] if position < size - 1 else edge
        key = (id(previous), id(block), id(following))
        if key not in known:
            head = np.take(previous, range(previous.shape[dim] - before, previous.shape[dim]), axis=dim)
            tail = np.take(following, range(after), axis=dim)
            known[key] = np.concatenate([head, block, tail], axis=dim)
        extended.append(known[key])
    return extended


def block_starts(start: Start, mesh: Mesh) -> Blocks:
    """Return where the block of each device starts; equal numbers are one object."""
    known: dict[int, Array] = {}
    coordinates = zip(*np.unravel_index(np.arange(mesh.size), mesh.shape), strict=True)
    starts = []
    for place in coordinates:
        position = start.of([int(place[mesh.axes.index(axis)]) for axis in start.axes])
        starts.append(known.setdefault(position, np.array(position, np.int64)))
    return starts

"""Changes of placement between ranks: the layout around the primitives of a communicator.

Primitives move whole pieces, stacked along a new leading dim. A dim split over n devices in c chunks has the layout
(c, n, rows): every chunk is split over the devices. Device i holds (c, rows) of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

from autopar.cost.collectives import Collective as Kind
from autopar.program.records import Collective, Exchange
from autopar.ranks.communicator import Communicator, Group, Handle, Memory, Tensor
from autopar.sharding import Partial, Placement, Shard

_NATIVE = ("sum", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Pending:
    """A change of placement under way."""

    handle: Handle | None
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Return its result."""
        if self.handle is not None:
            self.handle.wait()
        return self.finish()


def begin(
    instruction: Collective | Exchange, tensor: Tensor, group: Group, communicator: Communicator, memory: Memory
) -> Pending:
    """Start a collective; `tensor` must stay as it is until it is waited for."""
    if isinstance(instruction, Exchange):
        return _exchange(instruction, tensor, group, communicator, memory)
    size, source, target = len(group), instruction.source, instruction.target
    if size == 1:  # a single device holds the one term and the one block
        return Pending(None, lambda: tensor)
    match instruction.kind:
        case Kind.ALL_REDUCE:
            assert isinstance(source, Partial), "only terms are reduced"
            return all_reduce(tensor, source.reduce, group, communicator, memory)
        case Kind.REDUCE_SCATTER:
            assert isinstance(source, Partial) and isinstance(target, Shard), "terms become blocks"  # noqa: PT018
            return _reduce_scatter(tensor, source.reduce, target, group, communicator, memory)
        case Kind.ALL_GATHER:
            assert isinstance(source, Shard), "blocks become copies"
            return all_gather(tensor, source, group, communicator, memory)
        case Kind.ALL_TO_ALL:
            assert isinstance(source, Shard) and isinstance(target, Shard), "blocks become other blocks"  # noqa: PT018
            if source.dim == target.dim:  # other chunks of the same dim: rows of a device come from anywhere
                whole = all_gather(tensor, source, group, communicator, memory)
                own = group.index(communicator.rank)
                return Pending(whole.handle, lambda: memory.contiguous(split(whole.finish(), target, size)[own]))
            pieces = memory.contiguous(split(tensor, target, size))
            out = memory.xp.empty_like(pieces)
            handle = communicator.all_to_all(out, pieces, group)
            return Pending(handle, lambda: memory.contiguous(merge(out, source)))
        case _:
            raise AssertionError(f"{instruction.kind} is no change of placement")


class _Once(Handle):
    """A handle that several results share; libraries may let it be waited for once only."""

    def __init__(self, handle: Handle) -> None:
        self._handle: Handle | None = handle

    def wait(self) -> None:
        """Return when the results can be read."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None


def begin_together(
    items: Sequence[tuple[Collective, Tensor]], group: Group, communicator: Communicator, memory: Memory
) -> list[Pending]:
    """Start one collective for several tensors, as buckets of gradients take; return what becomes of each of them.

    Sums of one element type travel end to end: to copies in one array, to blocks as one row per device. So do blocks
    that are gathered into copies. Others take collectives of their own, one after the other.

    Args:
        items: Changes of placement over the axis of the group, each with its operand.
        group: The ranks.
        communicator: Reaches them.
        memory: Where tensors live.
    """
    found: dict[int, Pending] = {}
    alike: dict[tuple[Kind, str, str], list[int]] = {}
    for number, (instruction, tensor) in enumerate(items):
        source = instruction.source
        if isinstance(source, Partial) and source.reduce in ("sum", "mean") and len(group) > 1:
            alike.setdefault((instruction.kind, source.reduce, str(tensor.dtype)), []).append(number)
        elif instruction.kind is Kind.ALL_GATHER and len(group) > 1:
            alike.setdefault((instruction.kind, "", str(tensor.dtype)), []).append(number)
        else:
            found[number] = begin(instruction, tensor, group, communicator, memory)
    for (kind, reduce, _), numbers in alike.items():
        if len(numbers) == 1:
            instruction, tensor = items[numbers[0]]
            found[numbers[0]] = begin(instruction, tensor, group, communicator, memory)
            continue
        chosen = [items[number] for number in numbers]
        if kind is Kind.ALL_GATHER:
            started = _begin_gathers(chosen, group, communicator, memory)
        else:
            started = _begin_sums(chosen, kind, reduce, group, communicator, memory)
        found.update(zip(numbers, started, strict=True))
    return [found[number] for number in range(len(items))]


def _begin_gathers(
    items: Sequence[tuple[Collective, Tensor]], group: Group, communicator: Communicator, memory: Memory
) -> list[Pending]:
    """Start one all-gather of several tensors of one element type."""
    size = len(group)
    filled = [_filled(tensor, instruction.source, size, memory) for instruction, tensor in items]
    blocks = memory.contiguous(memory.xp.concatenate([tensor.reshape((-1,)) for tensor in filled], 0))
    out = memory.blank(blocks, (size, *blocks.shape))
    handle = _Once(communicator.all_gather(out, blocks, group))
    shapes = [tuple(tensor.shape) for tensor in filled]
    ends = [0, *accumulate(prod(shape) for shape in shapes)]

    def own(number: int) -> Tensor:
        source = items[number][0].source
        assert isinstance(source, Shard), "blocks become copies"
        pieces = out[:, ends[number] : ends[number + 1]].reshape((size, *shapes[number]))
        return memory.contiguous(merge(pieces, source))

    return [Pending(handle, partial(own, number)) for number in range(len(items))]


def _begin_sums(
    items: Sequence[tuple[Collective, Tensor]],
    kind: Kind,
    reduce: str,
    group: Group,
    communicator: Communicator,
    memory: Memory,
) -> list[Pending]:
    """Start one all-reduce or reduce-scatter of several tensors of one element type."""
    size, rows = len(group), list[Tensor]()
    shapes: list[tuple[int, ...]] = []
    for instruction, tensor in items:
        target = instruction.target
        parts = split(tensor, target, size) if isinstance(target, Shard) else tensor.reshape((1, *tensor.shape))
        shapes.append(tuple(parts.shape[1:]))
        rows.append(parts.reshape((parts.shape[0], -1)))
    pieces = memory.contiguous(memory.xp.concatenate(rows, 1))
    if kind is Kind.ALL_REDUCE:
        out = pieces
        handle = _Once(communicator.all_reduce(out, "sum", group))
    else:
        assert kind is Kind.REDUCE_SCATTER, f"{kind} sums nothing"
        out = memory.blank(pieces, tuple(pieces.shape[1:]))
        handle = _Once(communicator.reduce_scatter(out, pieces, group))
    ends = [0, *accumulate(int(row.shape[1]) for row in rows)]

    def own(number: int) -> Tensor:
        cut = memory.copy(out.reshape((-1,))[ends[number] : ends[number + 1]]).reshape(shapes[number])
        cut = _own(cut, items[number][0].target, group, communicator, memory)
        return cut / size if reduce == "mean" else cut

    return [Pending(handle, partial(own, number)) for number in range(len(items))]


def split(tensor: Tensor, placement: Shard, size: int) -> Tensor:
    """Return the blocks of `size` devices, stacked: (size, *shape of a block)."""
    dim, chunks = placement.dim, placement.chunks
    if placement.whole:
        tensor = _padded(tensor, placement, size)
    shape = tuple(tensor.shape)
    rows = shape[dim] // (size * chunks)
    laid_out = tensor.reshape((*shape[:dim], chunks, size, rows, *shape[dim + 1 :]))
    block = (*shape[:dim], chunks * rows, *shape[dim + 1 :])
    return _moved(laid_out, dim + 1, 0).reshape((size, *block))


def merge(pieces: Tensor, placement: Shard) -> Tensor:
    """Return the tensor of which each of the stacked pieces is a device's block; the inverse of `split`."""
    dim, chunks, size, shape = placement.dim, placement.chunks, pieces.shape[0], tuple(pieces.shape[1:])
    laid_out = pieces.reshape((size, *shape[:dim], chunks, shape[dim] // chunks, *shape[dim + 1 :]))
    whole = _moved(laid_out, 0, dim + 1).reshape((*shape[:dim], size * shape[dim], *shape[dim + 1 :]))
    return whole[(*(slice(None),) * dim, slice(0, placement.whole))] if placement.whole else whole


def _padded(tensor: Tensor, placement: Shard, size: int) -> Tensor:
    """Return a tensor with its last row again until `size` devices divide the dim; nobody reads these rows."""
    last = placement.whole - 1
    rows = [min(row, last) for row in range(size * placement.block(size))]
    return tensor[(*(slice(None),) * placement.dim, rows)]


def _filled(block: Tensor, placement: Placement, size: int, memory: Memory) -> Tensor:
    """Return a device's block with as many rows as the largest one; nobody reads those that are added."""
    if not isinstance(placement, Shard) or not placement.whole:
        return block
    shape = tuple(block.shape)
    rows = placement.block(size) - shape[placement.dim]
    if not rows:
        return block
    added = memory.filled(block, (*shape[: placement.dim], rows, *shape[placement.dim + 1 :]), 0)
    return memory.xp.concatenate([block, added], placement.dim)


def _own(block: Tensor, placement: Placement, group: Group, communicator: Communicator, memory: Memory) -> Tensor:
    """Return the rows of a block that are the device's own, if the placement deals out uneven blocks."""
    if not isinstance(placement, Shard) or not placement.whole:
        return block
    ends, index = (0, *placement.ends(len(group))), group.index(communicator.rank)
    rows = ends[index + 1] - ends[index]
    return memory.contiguous(block[(*(slice(None),) * placement.dim, slice(0, rows))])


def _moved(tensor: Tensor, source: int, target: int) -> Tensor:
    axes = list(range(len(tensor.shape)))
    axes.insert(target, axes.pop(source))
    # numpy and torch name it differently; the axes mean the same
    return tensor.permute(axes) if hasattr(tensor, "permute") else tensor.transpose(axes)


def all_gather(tensor: Tensor, placement: Shard, group: Group, communicator: Communicator, memory: Memory) -> Pending:
    """Start to gather the blocks of a group into copies."""
    tensor = memory.contiguous(_filled(tensor, placement, len(group), memory))
    out = memory.blank(tensor, (len(group), *tensor.shape))
    handle = communicator.all_gather(out, tensor, group)
    return Pending(handle, lambda: memory.contiguous(merge(out, placement)))


def all_reduce(tensor: Tensor, reduce: str, group: Group, communicator: Communicator, memory: Memory) -> Pending:
    """Start to reduce terms to copies; log-sum-exp is scaled by the largest term so that nothing overflows."""
    size, xp = len(group), memory.xp
    total = memory.copy(tensor)
    if reduce in _NATIVE:
        return Pending(communicator.all_reduce(total, reduce, group), lambda: total)
    if reduce == "mean":
        return Pending(communicator.all_reduce(total, "sum", group), lambda: total / size)
    assert reduce == "logsumexp", f"{reduce!r} is no reduction"
    communicator.all_reduce(total, "max", group).wait()
    largest = _finite(total, xp)
    terms = memory.contiguous(xp.exp(tensor - largest))
    return Pending(communicator.all_reduce(terms, "sum", group), lambda: largest + xp.log(terms))


def _finite(largest: Tensor, xp: Any) -> Tensor:
    """Return maxima that can be subtracted: 0 where all terms are minus infinity."""
    return xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))


def _reduce_scatter(
    tensor: Tensor, reduce: str, target: Shard, group: Group, communicator: Communicator, memory: Memory
) -> Pending:
    size, xp = len(group), memory.xp
    pieces = memory.contiguous(split(tensor, target, size))

    def own(block: Tensor) -> Tensor:
        return _own(block, target, group, communicator, memory)

    if reduce in ("sum", "mean"):
        out = memory.blank(tensor, tuple(pieces.shape[1:]))
        handle = communicator.reduce_scatter(out, pieces, group)
        return Pending(handle, lambda: own(out / size if reduce == "mean" else out))
    received = xp.empty_like(pieces)
    handle = communicator.all_to_all(received, pieces, group)
    return Pending(handle, lambda: own(memory.contiguous(_reduced(received, reduce, xp))))


def _reduced(pieces: Tensor, reduce: str, xp: Any) -> Tensor:
    match reduce:
        case "max":
            return xp.amax(pieces, 0)
        case "min":
            return xp.amin(pieces, 0)
        case "prod":
            return xp.prod(pieces, 0)
        case "logsumexp":
            largest = _finite(xp.amax(pieces, 0), xp)
            return largest + xp.log(xp.sum(xp.exp(pieces - largest), 0))
    raise AssertionError(f"{reduce!r} is no reduction")


def _exchange(
    instruction: Exchange, tensor: Tensor, group: Group, communicator: Communicator, memory: Memory
) -> Pending:
    own, dim, rows = group.index(communicator.rank), instruction.dim, tensor.shape[instruction.dim]

    def cut(first: int, last: int) -> Tensor:
        return memory.contiguous(tensor[(*(slice(None),) * dim, slice(first, last))])

    def halo(count: int, *, neighbour: bool) -> Tensor:
        shape = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
        value = memory.lowest(tensor) if instruction.fill == "lowest" and not neighbour else 0
        return memory.filled(tensor, shape, value)

    has_previous, has_next = own > 0, own < len(group) - 1
    before = halo(instruction.before, neighbour=has_previous)
    after = halo(instruction.after, neighbour=has_next)
    sends, receives = [], []
    if has_previous:
        if instruction.after:
            sends.append((cut(0, instruction.after), group[own - 1]))
        if instruction.before:
            receives.append((before, group[own - 1]))
    if has_next:
        if instruction.before:
            sends.append((cut(rows - instruction.before, rows), group[own + 1]))
        if instruction.after:
            receives.append((after, group[own + 1]))
    handle = communicator.swap(sends, receives, group) if sends or receives else None
    return Pending(handle, lambda: memory.xp.concatenate([before, tensor, after], dim))

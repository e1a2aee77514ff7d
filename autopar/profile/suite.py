"""The events that measure a machine without a model: products, memory-bound ops, attention, transfers, overlap.

Sizes are those of layers: from what a launch hides to what fills a device. Together they take about ten minutes with
0.3 s per event.
"""

from collections.abc import Iterator

from autopar.cost import load_policy
from autopar.events import OpEvent, OverlapEvent, TensorType, TransferEvent
from autopar.profile.actions import FLOAT32
from autopar.profile.timed_tasks import Feed, Port, Task, Work
from autopar.ranks.assemble import Node, assemble
from autopar.ranks.assemble import Port as ModelPort

_OPSET = 24
ROWS = (64, 256, 1024, 4096)
"""Rows of matrix products: tokens of a microbatch."""
WIDTHS = ((256, 256), (256, 1024), (1024, 1024), (1024, 4096), (4096, 1024))
"""Terms and columns of matrix products."""
ELEMENTS = ((64, 256), (1024, 256), (1024, 1024), (4096, 1024), (8192, 2048))
"""Shapes of memory-bound ops: from within caches to far beyond."""
HEADS = ((1, 4, 128, 32), (4, 8, 128, 32), (2, 8, 512, 64), (1, 8, 1024, 64))
"""Samples, heads, tokens and channels of attention."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
BYTES = tuple(float(4**power) for power in range(5, 14))
"""1 KiB to 64 MiB."""
OVERLAP_SIZES = (512, 1024)
MOST_MEMBERS = 8
"""Larger groups follow the fitted law, as DistSim found enough: they change its batch times by less than 2 %."""


def suite(ranks: int, local_ranks: int, precision: str, *, largest: float = BYTES[-1]) -> Iterator[Task]:
    """Yield the events.

    Args:
        ranks: Ranks that take part.
        local_ranks: Ranks of a node.
        precision: Of what ops read and write, a key of `autopar.cost.POLICIES`.
        largest: Bytes of the largest transfer.
    """
    element = load_policy(precision).activation
    dtype = "float32" if element == FLOAT32 else "float16"
    for rows in ROWS:
        for terms, columns in WIDTHS:
            yield _op("MatMul", ((rows, terms), (terms, columns)), (rows, columns), dtype, element)
    for shape in ELEMENTS:
        yield _op("Add", (shape, shape), shape, dtype, element)
        yield _op("Gelu", (shape,), shape, dtype, element)
        yield _op("Softmax", (shape,), shape, dtype, element, (("axis", -1),))
        yield _op("LayerNormalization", (shape, shape[-1:]), shape, dtype, element, (("axis", -1),))
        yield _op("Transpose", (shape,), shape[::-1], dtype, element, (("perm", (1, 0)),))
    for heads in HEADS:
        yield _op("Attention", (heads,) * 3, heads, dtype, element, (("is_causal", 1),))
    for nbytes in (size for size in BYTES if size <= largest):
        for members, inside in groups(ranks, local_ranks):
            for operation in COLLECTIVES:
                yield Task(TransferEvent(operation, nbytes, members, inside))
            if members == 2:
                yield Task(TransferEvent("send", nbytes, members, inside))
        for operation in ("offload", "fetch"):
            yield Task(TransferEvent(operation, nbytes, 1, 1))
    if local_ranks > 1:
        for size in OVERLAP_SIZES:
            for parts in ("compute", "transfer", "both"):
                nbytes = min(largest, 16 * float(size * size))
                yield Task(OverlapEvent(size, 8, "all_reduce", nbytes, min(local_ranks, MOST_MEMBERS), parts))


def groups(ranks: int, local_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield members and members inside a node of the groups that are measured.

    >>> list(groups(4, 2)), list(groups(1, 1))
    ([(2, 2), (2, 1), (4, 2)], [])
    """
    nodes = ranks // local_ranks
    sizes = [2**power for power in range(1, MOST_MEMBERS.bit_length())]
    yield from ((size, size) for size in sizes if size <= local_ranks)
    yield from ((size, 1) for size in sizes if size <= nodes)
    if nodes > 1 and local_ranks > 1:
        yield ranks, local_ranks


def _op(
    kind: str,
    inputs: tuple[tuple[int, ...], ...],
    output: tuple[int, ...],
    dtype: str,
    element: float,
    attrs: tuple[tuple[str, int | tuple[int, ...]], ...] = (),
) -> Task:
    """Return the task of an op whose operands all have one element type."""
    names = [f"x{number}" for number in range(len(inputs))]
    ports = [ModelPort(name, shape, dtype) for name, shape in zip(names, inputs, strict=True)]
    model = assemble([Node(kind, attrs, tuple(names), ("y",))], ports, [ModelPort("y", output, dtype)], {}, _OPSET)
    event = OpEvent(
        kind, tuple(TensorType(shape, element, dtype) for shape in inputs), (TensorType(output, element, dtype),), attrs
    )
    feeds = tuple(Feed(port.name, port.shape, dtype) for port in ports)
    return Task(event, Work(model, feeds, (Port("y", output, dtype),)))

"""The layouts people try first on a number of devices, stated by degrees."""

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.configuration import divisors
from autopar.degrees import Degrees

_DEEPEST = 16  # pipeline stages beside tensor parallelism; deeper pipelines are rarely the first thing tried


@dataclass(frozen=True, slots=True)
class Layout:
    """A usual way to use all devices.

    Attributes:
        name: What people call it.
        degrees: The plan, with one sample per microbatch and no recompute.
    """

    name: str
    degrees: Degrees


def usual_layouts(gpus: int, node: int, global_batch: int, *, trains: bool, experts: int = 1) -> tuple[Layout, ...]:
    """Return the layouts people try first, from the simplest on.

    Data parallelism with each ZeRO stage, FSDP within nodes (HSDP), tensor parallelism within a node beside ZeRO-1 or
    FSDP, pipelines of such groups, and with experts expert parallelism within a node and over all devices. Layouts
    whose data-parallel degree does not divide the global batch are left out.

    Args:
        gpus: Number of devices.
        node: Devices of a node.
        global_batch: Samples per step.
        trains: Whether there is a backward pass; without one there are neither gradients nor optimizer state to share.
        experts: Experts per layer; 1 for a dense model.

    >>> [layout.name for layout in usual_layouts(16, 8, 64, trains=False)]
    ['data parallel', 'FSDP', 'tp 2', 'tp 4', 'tp 8', 'tp 8, pp 2']
    """
    found = {layout.degrees: layout for layout in _layouts(gpus, node, global_batch, trains, experts)}
    return tuple(found.values())


def _layouts(gpus: int, node: int, batch: int, trains: bool, experts: int) -> Iterator[Layout]:
    def layout(name: str, *, tp: int = 1, pp: int = 1, ep: int = 1, zero: int = 0, shard: int = 0) -> Iterator[Layout]:
        dp = gpus // (tp * pp)
        if batch % dp:
            return
        yield Layout(
            name,
            Degrees(
                dp=dp, tp=tp, pp=pp, ep=ep, zero=zero if dp > 1 else 0, shard=shard, sequence_parallel=tp > 1,
                global_batch=batch,
            ),
        )  # fmt: skip

    yield from layout("data parallel")
    if trains and gpus > 1:
        yield from layout("ZeRO-1", zero=1)
        yield from layout("ZeRO-2", zero=2)
    if gpus > 1:
        yield from layout("FSDP", zero=3)
    if trains and gpus > node > 1 and gpus % node == 0:
        yield from layout(f"HSDP, groups of {node}", zero=3, shard=node)
    optimizer = ", ZeRO-1" if trains else ""
    tensor = [tp for tp in divisors(min(gpus, node)) if tp > 1 and gpus % tp == 0]
    for tp in tensor:
        yield from layout(f"tp {tp}{optimizer if gpus > tp else ''}", tp=tp, zero=int(trains))
    for tp in tensor:
        if trains and gpus > tp:
            yield from layout(f"tp {tp}, FSDP", tp=tp, zero=3)
    widest = tensor[-1] if tensor else 1
    for pp in divisors(gpus // widest):
        if 1 < pp <= _DEEPEST:
            told = optimizer if gpus > widest * pp else ""
            yield from layout(f"tp {widest}, pp {pp}{told}", tp=widest, pp=pp, zero=int(trains))
    for ep in sorted(
        {ep for ep in divisors(experts) if ep > 1 and gpus % ep == 0 and ep in (node, min(experts, gpus))}
    ):
        yield from layout(f"ep {ep}{optimizer}", ep=ep, zero=int(trains))
        yield from layout(f"ep {ep}, FSDP", ep=ep, zero=3)
        for pp in divisors(gpus // ep):
            if 1 < pp <= _DEEPEST:
                yield from layout(f"ep {ep}, pp {pp}{optimizer}", ep=ep, pp=pp, zero=int(trains))

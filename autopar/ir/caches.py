"""Caches of serving: data inputs that a step of decoding reads and that stay in memory from step to step.

Which inputs of a graph they are follows from the ops that read them, so that any file has them.
"""

from collections.abc import Iterator, Mapping

from autopar.ir.graph import Op

CACHE_SLOTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (4, 5),
    "autopar::CachedAttention": (1, 2),
    "autopar::CachedSinkAttention": (1, 2),
    "autopar::CachedLatentAttention": (1,),
    "autopar::CachedConvolution": (0,),
    "autopar::CachedGatedDeltaRule": (0,),
    "autopar::CachedSelectiveScan": (0,),
    "autopar::CachedStateSpaceScan": (0,),
}
"""Inputs of an op that hold what earlier tokens left, by kind."""

WRITTEN_SLOTS: Mapping[str, tuple[int, ...]] = {
    "autopar::CachedAttention": (3, 4),
    "autopar::CachedAttentionHeadsPart": (3, 4),
    "autopar::CachedSinkAttention": (3, 4),
    "autopar::CachedSinkAttentionHeadsPart": (3, 4),
    "autopar::CachedLatentAttention": (2,),
    "autopar::CachedConvolution": (0,),
    "autopar::CachedGatedDeltaRule": (0,),
    "autopar::CachedSelectiveScan": (0,),
    "autopar::CachedStateSpaceScan": (0,),
}
"""Inputs of an op that its kernel writes behind what the caches hold, or states that it overwrites, by kind."""


def caches_of(op: Op) -> Iterator[tuple[int, str]]:
    """Yield the inputs of an op that may be caches, by slot.

    >>> op = Op("a", "autopar::CachedLatentAttention", ("q", "cache", "latent"), ("y",))
    >>> [*caches_of(op)]
    [(1, 'cache')]
    """
    for slot in CACHE_SLOTS.get(op.kind, ()):
        if slot < len(op.inputs) and op.inputs[slot]:
            yield slot, op.inputs[slot]

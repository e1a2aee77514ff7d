"""Strategies on which a device runs another op, because it has to know where its block starts.

A gather from a table of which a device holds some rows is the standard example: the rows of other devices read as 0,
and the sum over the devices is the result. A table names the kinds that could do for an op; on which dims they do, and
what comes out, is found by running them. Kinds of `autopar.ir.rings` are run by all devices of the axis together, which
pass blocks of some inputs round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.discover.rules import Local, Strategy
from autopar.discover.sketch import Sketch
from autopar.discover.trial import Trial
from autopar.ir.functions import function_proto
from autopar.ir.rings import RINGS
from autopar.sharding import Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A kind to try in place of an op.

    Attributes:
        kind: It is told where the block of the op's first input starts.
        sharded: Inputs of the op to shard, all along the same dim.
        fewer: Input that has to have fewer rows along that dim; see `Local.fewer`.
    """

    kind: str
    sharded: tuple[int, ...] = (0,)
    fewer: int | None = None


_MASKED = ((0, 1, 2, 3), (0, 1, 2))
"""Inputs of masked attention that a ring shards: the mask by its rows where it has those of all queries, or not."""

_LOCAL_KINDS: Mapping[str, tuple[_Candidate, ...]] = {
    "Attention": (
        _Candidate("autopar::ScaledAttentionPart"),
        _Candidate("autopar::AttentionPart"),
        _Candidate("autopar::ScaledAttentionHeadsPart", fewer=1),
        _Candidate("autopar::AttentionHeadsPart", fewer=1),
        _Candidate("autopar::ScaledMaskedAttentionHeadsPart", fewer=1),
        _Candidate("autopar::MaskedAttentionHeadsPart", fewer=1),
        _Candidate("autopar::RingAttention", (0, 1, 2)),
        *(_Candidate(f"autopar::Ring{kind}Attention", sharded) for kind in ("Masked", "Hidden") for sharded in _MASKED),
    ),
    "autopar::AttentionGrad": (
        _Candidate("autopar::AttentionGradPart", (0, 3)),
        _Candidate("autopar::AttentionGradHeadsPart", (0, 3), fewer=1),
        _Candidate("autopar::RingAttentionGrad", (0, 1, 2, 3)),
    ),
    "autopar::MaskedAttentionGrad": (
        _Candidate("autopar::MaskedAttentionGradHeadsPart", (0, 4), fewer=1),
        *(_Candidate("autopar::RingMaskedAttentionGrad", (*sharded, 4)) for sharded in _MASKED),
    ),
    "autopar::CausalAttention": (
        _Candidate("autopar::CausalAttentionPart"),
        _Candidate("autopar::CausalAttentionHeadsPart", fewer=1),
        _Candidate("autopar::RingCausalAttention", (0, 1, 2)),
    ),
    "autopar::CausalAttentionGrad": (
        _Candidate("autopar::CausalAttentionGradPart", (0, 3)),
        _Candidate("autopar::CausalAttentionGradHeadsPart", (0, 3), fewer=1),
        _Candidate("autopar::RingCausalAttentionGrad", (0, 1, 2, 3)),
    ),
    "autopar::SinkAttention": (
        _Candidate("autopar::SinkAttentionPart"),
        _Candidate("autopar::SinkAttentionHeadsPart", fewer=1),
        _Candidate("autopar::RingSinkAttention", (0, 1, 2)),
    ),
    "autopar::SinkAttentionGrad": (
        _Candidate("autopar::SinkAttentionGradPart", (0, 4)),
        _Candidate("autopar::SinkAttentionGradHeadsPart", (0, 4), fewer=1),
        _Candidate("autopar::RingSinkAttentionGrad", (0, 1, 2, 4)),
    ),
    "autopar::CachedAttention": (_Candidate("autopar::CachedAttentionHeadsPart", fewer=1),),
    "autopar::CachedSinkAttention": (_Candidate("autopar::CachedSinkAttentionHeadsPart", fewer=1),),
    "Gather": (_Candidate("autopar::GatherPart"),),
    "GatherElements": (_Candidate("autopar::GatherElementsPart"),),
    "GatherND": (_Candidate("autopar::GatherNDPart"),),
    "ScatterElements": (_Candidate("autopar::ScatterElementsPart"),),
    "ScatterND": (_Candidate("autopar::ScatterNDPart"),),
    "Trilu": (
        _Candidate("autopar::TriluRowsPart"),
        _Candidate("autopar::TriluColumnsPart"),
        _Candidate("autopar::ShiftedTriluRowsPart"),
        _Candidate("autopar::ShiftedTriluColumnsPart"),
    ),
}
"""By kind of the op; those that take its inputs and attributes are tried."""


def local_strategies(trial: Trial, found: Sequence[Strategy]) -> Iterator[Strategy]:
    """Iterate over the strategies on 2 devices that shard a dim of the first input and run a local kind.

    Args:
        trial: The op with data.
        found: Strategies with the op itself; where one shards the same, no other is needed.
    """
    sketch = trial.proxy.sketch
    data, known = sketch.inputs[0] if sketch.inputs else None, {strategy.inputs for strategy in found}
    if data is None or data.content is not None:
        return
    others = [other for other in _LOCAL_KINDS.get(sketch.kind, ()) if _takes(other.kind, sketch)]
    for dim in range(len(data.shape)):
        for other in others:
            placements: tuple[Placement, ...] = tuple(
                Shard(dim) if i in other.sharded else Replicate() for i in range(len(sketch.inputs))
            )
            if placements in known or any(len(_shape(sketch, i)) <= dim for i in other.sharded):
                continue
            if other.fewer is not None and not _has_fewer(sketch, other.fewer, dim):
                continue
            candidate = Strategy(placements, (), local=Local(other.kind, 0, dim, other.fewer))
            outputs = trial.run(candidate, 2)
            if outputs is not None:
                known.add(placements)
                yield replace(candidate, outputs=outputs)


def _shape(sketch: Sketch, index: int) -> tuple[int, ...]:
    operand = sketch.inputs[index]
    return () if operand is None else operand.shape


def _has_fewer(sketch: Sketch, index: int, dim: int) -> bool:
    """Whether an input has fewer rows along a dim than the first one, each for several of its rows."""
    first, other = sketch.inputs[0], sketch.inputs[index]
    assert first is not None, "the first input is there"
    if other is None or len(other.shape) != len(first.shape):
        return False
    return other.shape[dim] < first.shape[dim] and first.shape[dim] % max(1, other.shape[dim]) == 0


def _takes(kind: str, sketch: Sketch) -> bool:
    """Whether a function takes the inputs and attributes of an op, and `start` and `size`.

    A step of a ring takes what is carried besides, and where the block starts that is passed on.
    """
    function, ring, more = function_proto(kind), RINGS.get(kind), 1
    if ring is not None:
        if any(name in ring.without and value for name, value in sketch.attrs):
            return False
        more = len(function.input) - ring.passes[-1].reads
    given = {name for name, _ in sketch.attrs} | {"size"}
    required, optional = set(function.attribute), {attribute.name for attribute in function.attribute_proto}
    return len(function.input) == len(sketch.inputs) + more and required <= given <= required | optional

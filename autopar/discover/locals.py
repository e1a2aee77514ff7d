"""Strategies on which a device runs another op, because it has to know where its block starts.

A gather from a table of which a device holds some rows is the standard example: the rows of other devices read as 0,
and the sum over the devices is the result. A table names the ops that could stand in for an op; on which dims they do,
and what comes out, is found by running them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.discover.rules import Local, Strategy
from autopar.discover.trial import Trial
from autopar.sharding import Placement, Replicate, Shard

_STAND_INS: Mapping[tuple[str, int], tuple[str, ...]] = {
    ("Gather", 2): ("autopar::GatherPart",),
    ("GatherElements", 2): ("autopar::GatherElementsPart",),
    ("GatherND", 2): ("autopar::GatherNDPart",),
    ("ScatterElements", 3): ("autopar::ScatterElementsPart",),
    ("ScatterND", 3): ("autopar::ScatterNDPart",),
    ("Trilu", 1): ("autopar::TriluRowsPart", "autopar::TriluColumnsPart"),
    ("Trilu", 2): ("autopar::ShiftedTriluRowsPart", "autopar::ShiftedTriluColumnsPart"),
}
"""Kinds to try by kind and number of inputs of the op; they are told where the block of its first input starts."""


def local_strategies(trial: Trial, found: Sequence[Strategy]) -> Iterator[Strategy]:
    """Iterate over the strategies on 2 devices that shard one dim of the first input and run a stand-in for the op.

    Args:
        trial: The op with data.
        found: Strategies with the op itself; where one shards the same, no stand-in is needed.
    """
    sketch = trial.proxy.sketch
    data, known = sketch.inputs[0] if sketch.inputs else None, {strategy.inputs for strategy in found}
    if data is None or data.content is not None:
        return
    for dim in range(len(data.shape)):
        rest: tuple[Placement, ...] = (Replicate(),) * (len(sketch.inputs) - 1)
        placements = (Shard(dim), *rest)
        if placements in known:
            continue
        for kind in _STAND_INS.get((sketch.kind, len(sketch.inputs)), ()):
            candidate = Strategy(placements, (), local=Local(kind, 0, dim))
            outputs = trial.run(candidate, 2)
            if outputs is not None:
                yield replace(candidate, outputs=outputs)
                break

"""Values that go from stage to stage in pieces, on numpy arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.handover import Division
from autopar.program.crossings import holding
from autopar.program.records import Crossing, StageProgram
from autopar.program.verify.shapes import whole_shape
from autopar.runtime.blocks import Blocks
from autopar.sharding import own_shape

Array = NDArray[Any]


def divisions(crossing: Crossing, stages: Sequence[StageProgram]) -> tuple[Division, Division]:
    """Return how the sending and the receiving stage divide a value that crosses."""
    here, there = stages[crossing.sender], stages[crossing.receiver]
    shape = whole_shape(crossing.source, here.mesh)
    return Division.of(shape, holding(here, crossing.source)), Division.of(shape, holding(there, crossing.target))


def deliver(crossing: Crossing, blocks: Blocks, stages: Sequence[StageProgram]) -> Blocks:
    """Return what each device of the receiving stage holds, given the blocks of the sending one.

    Devices that get the same from the same arrays share one array.
    """
    here, there = stages[crossing.sender], stages[crossing.receiver]
    source, target = divisions(crossing, stages)
    coming: dict[int, list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]] = {
        device: [] for device in range(*there.devices)
    }
    for piece in crossing.pieces:
        i, j = piece.sender - here.devices[0], piece.receiver - there.devices[0]
        coming[piece.receiver].append((i, source.place(i, piece.box), target.place(j, piece.box)))
    known: dict[object, Array] = {}
    received = []
    for position, parts in enumerate(coming.values()):
        shape = own_shape(crossing.target.shape, crossing.target.placements, there.mesh, position)
        key = str((shape, [(id(blocks[sender]), *places) for sender, *places in parts]))
        if key not in known:
            known[key] = np.zeros(shape, blocks[0].dtype)
            for sender, taken, put in parts:
                if source.num_terms > 1:
                    known[key][put] += blocks[sender][taken]
                else:
                    known[key][put] = blocks[sender][taken]
        received.append(known[key])
    return received

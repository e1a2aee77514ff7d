"""An op that devices run together in a ring, all of them in one process: the meaning of `autopar.ir.rings`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.rings import Ring

Array = NDArray[Any]
RunStep = Callable[[str, Sequence[Array], int], tuple[Array, ...] | None]
"""Runs a function of domain `autopar`, given its kind, inputs and number of outputs; None if it does not take them."""


def run_ring(
    ring: Ring, blocks: Sequence[Sequence[Array]], starts: Sequence[Array], run: RunStep, steps: int
) -> list[tuple[Array, ...]] | None:
    """Return the outputs of every device of a ring.

    Args:
        ring: What goes round.
        blocks: Inputs of the op by device, in the order of the ring.
        starts: Position of the first row of each device.
        run: Runs one step on one device.
        steps: How many blocks a device computes on, `Ring.steps`.

    Returns:
        A tuple per device; None if a step cannot be run.
    """
    devices = range(len(blocks))
    before: list[list[Array]] = [[] for _ in devices]
    values: list[list[Array]] = []
    for each in ring.passes:
        values = [
            [
                np.full(carried.shape([array.shape for array in inputs]), carried.initial, inputs[0].dtype)
                for carried in each.carried
            ]
            for inputs in blocks
        ]
        for step in range(steps):
            for device in devices:
                sender = (device - step) % len(blocks)
                homes = [sender if carried.travels else device for carried in each.carried]
                inputs = [blocks[sender if index in ring.passed else device][index] for index in range(each.reads)]
                carried_in = [values[home][slot] for slot, home in enumerate(homes)]
                made = run(
                    each.kind, [*inputs, *before[device], *carried_in, starts[device], starts[sender]], len(homes)
                )
                if made is None:
                    return None
                for slot, (home, array) in enumerate(zip(homes, made, strict=True)):
                    values[home][slot] = array
        before = values
    return [tuple(own[: ring.results]) for own in values]

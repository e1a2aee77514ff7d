"""Whole tensors on rank 0, put together from what the ranks hold."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Role
from autopar.program.records import SegmentPhase
from autopar.ranks.communicator import Communicator, Handle, Memory, Tensor
from autopar.ranks.lowered import Lowered
from autopar.ranks.routes import stored
from autopar.runtime.blocks import join
from autopar.sharding import Mesh, Placements, Replicate, local_shape, own_shape

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor as the devices of a stage hold it; `key` is what the result is known by."""

    key: Any
    tensor: str
    stage: int
    placements: Placements


def state_items(lowered: Lowered) -> list[Item]:
    """Return the parameters and moments that a step changes, where the update leaves them."""
    return [Item(tensor, tensor, stage, placements) for tensor, (stage, placements) in stored(lowered).items()]


def gradient_items(lowered: Lowered) -> list[Item]:
    """Return the gradient buffers, where the backward pass leaves them: sums, or terms of them."""
    gradients = {state.input for state in lowered.graph.states if state.role is Role.GRADIENT}
    items = []
    for block, (stage, _) in enumerate(lowered.blocks):
        found = (lowered.segment(block, phase) for phase in (SegmentPhase.BACKWARD, SegmentPhase.WEIGHT))
        for store in (store for segment in found if segment is not None for store in segment.stores):
            tensor = lowered.names[block].get(store.target, "")
            if tensor in gradients:
                items.append(Item(tensor, tensor, stage.index, store.value.placements))
    return items


def output_items(lowered: Lowered) -> list[Item]:
    """Return the outputs of the graph for every microbatch, as their stage makes them."""
    items = []
    for block, (stage, _) in enumerate(lowered.blocks):
        segment = lowered.segment(block, SegmentPhase.FORWARD)
        assert segment is not None, "every kind has a forward"
        tensors = lowered.tensors(block, segment)
        for operand in segment.exports:
            tensor = tensors[operand.value]
            if tensor in lowered.graph.outputs:
                microbatches = range(lowered.program.num_microbatches)
                items += [Item((index, tensor), tensor, stage.index, operand.placements) for index in microbatches]
    return items


def collect(
    items: Iterable[Item],
    share: Callable[[Item], Tensor],
    lowered: Lowered,
    communicator: Communicator,
    memory: Memory,
) -> tuple[dict[Any, Array], dict[Any, float]]:
    """Return whole tensors and the largest difference between copies of each; empty on all ranks but 0.

    Args:
        items: What to collect; the same on every rank.
        share: Returns this rank's share of an item of its own stage.
        lowered: The program.
        communicator: Reaches the other ranks.
        memory: Where tensors live.
    """
    wholes: dict[Any, Array] = {}
    differences: dict[Any, float] = {}
    sends: list[tuple[Handle, Tensor]] = []
    own = communicator.rank
    for item in items:
        stage, value = lowered.program.stages[item.stage], lowered.graph.values[item.tensor]
        if own == 0:
            largest = local_shape(value.shape, item.placements, stage.mesh)
            blocks = []
            for position, rank in enumerate(range(*stage.devices)):
                shape = own_shape(largest, item.placements, stage.mesh, position)
                tensor = share(item) if rank == 0 else memory.empty(shape, value.dtype)
                if rank != 0:
                    communicator.receive(tensor, rank).wait()
                blocks.append(memory.fetch(tensor))
            wholes[item.key], differences[item.key] = put_together(blocks, item.placements, stage.mesh)
        elif stage.devices[0] <= own < stage.devices[1]:
            tensor = memory.contiguous(share(item))
            sends.append((communicator.send(tensor, 0), tensor))
    for handle, _ in sends:
        handle.wait()
    return wholes, differences


def put_together(blocks: Sequence[Array], placements: Placements, mesh: Mesh) -> tuple[Array, float]:
    """Return the tensor of which each device holds a block, and the largest difference between copies of it."""
    difference = 0.0
    parts = list(blocks)
    for placement, axis in zip(reversed(placements), reversed(mesh.axes), strict=True):
        groups = [parts[start : start + axis.size] for start in range(0, len(parts), axis.size)]
        if isinstance(placement, Replicate):
            for group in groups:
                first = np.asarray(group[0], np.float64)
                for copy in group[1:]:
                    second = np.asarray(copy, np.float64)
                    with np.errstate(invalid="ignore"):  # infinities of one sign do not differ, though not by a number
                        apart = np.where(second == first, 0.0, np.abs(second - first))
                    difference = max(difference, float(np.max(np.nan_to_num(apart, nan=np.inf), initial=0.0)))
            parts = [group[0] for group in groups]
        else:
            parts = [join(group, placement) for group in groups]
    return parts[0], difference

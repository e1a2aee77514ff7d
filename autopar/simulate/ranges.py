"""What any range of blocks would hold as a stage, from lowered blocks: the simulator's memory, for the planner."""

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cluster import Host
from autopar.cost.overlap import state_seconds
from autopar.folding.fold import Folded
from autopar.formulate.block_memory import BlockHolding, ChainBytes, FloatArray, SharedBytes, State
from autopar.program.block import LoweredKind
from autopar.program.hosted import hosted_bytes, shared_parameters, streamed_bytes
from autopar.program.lower import Copy, copies
from autopar.program.records import OPTIMIZER_STATE
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.memory import received_bytes


def chain_bytes(
    lowered: Mapping[int, LoweredKind],
    folded: Folded,
    *,
    trains: bool,
    flavours: Sequence[Recompute] = ON_DEVICE,
    host_room: float = np.inf,
    host: Host | None = None,
    what: Hosted = Hosted.OPTIMIZER,
) -> ChainBytes:
    """Return what every range of a chain of blocks holds as a stage: what `stage_memory` says of it.

    Args:
        lowered: The kinds of blocks.
        folded: The chain of blocks; every stage holds the buffers of the model.
        trains: Whether there are backwards and an update.
        flavours: What blocks may keep of their forward if there are.
        host_room: Bytes of host memory per device.
        host: How devices reach it, if anything may lie there.
        what: What of the state of blocks may.
    """
    table = {(kind, segment.phase): segment for kind, block in lowered.items() for segment in block.segments}
    memories = BlockMemories(table, trains)
    kinds, in_common = range(len(folded.kinds)), shared_parameters(lowered.values())
    alone = {kind: memories.advance(kind, Recompute.NONE, memories.enter(kind))[0] for kind in lowered}

    def each(value: Mapping[int, float]) -> FloatArray:
        return np.array([value.get(kind, 0.0) for kind in kinds])

    def block(attribute: str) -> FloatArray:
        return each({kind: getattr(memory, attribute) for kind, memory in alone.items()})

    arriving, returning = (
        {kind: received_bytes(table, (kind,), is_first=not first, is_last=first) for kind in lowered}
        for first in (True, False)
    )
    return ChainBytes(
        chain=folded.chain,
        walk=_Walk(memories),
        flavours=tuple(flavours) if trains else (Recompute.NONE,),
        resident=each({kind: sum(amount for _, amount in own.resident.items()) for kind, own in lowered.items()}),
        gathered=block("gathered"),
        reducing=block("reducing"),
        update=block("update"),
        arriving=each(arriving),
        returning=each(returning),
        hosted=each({kind: _offloaded(memories, kind) for kind in lowered}),
        state=each({kind: sum(hosted_bytes(own, what, in_common).values()) for kind, own in lowered.items()}),
        buffers=folded.buffer_bytes,
        shared=tuple(_shared(copy, host, what) for copy in copies([lowered[kind] for kind in folded.chain], folded)),
        host_room=host_room,
        streamed=each({kind: streamed_bytes(own, what, in_common) for kind, own in lowered.items()}),
        what=what,
    )


def _shared(copy: Copy, host: Host | None, what: Hosted) -> SharedBytes:
    state = sum(amount for category, amount in copy.state if category in OPTIMIZER_STATE)
    return SharedBytes(
        copy.owner,
        tuple((block, size + copy.state_bytes) for block, size in copy.readers),
        state,
        0.0 if host is None else state_seconds(host, what, state),
    )


def _offloaded(memories: BlockMemories, kind: int) -> float:
    return memories.advance(kind, Recompute.OFFLOAD, memories.enter(kind))[0].hosted


class _Walk:
    """The blocks of a stage one after the other, in numbers."""

    def __init__(self, memories: BlockMemories) -> None:
        self._memories = memories
        self._known: dict[tuple[int, Recompute, State], tuple[BlockHolding, State]] = {}

    def enter(self, kind: int) -> State:
        return self._memories.enter(kind)

    def advance(self, kind: int, recompute: Recompute, state: State) -> tuple[BlockHolding, State]:
        key = (kind, recompute, state)
        if key not in self._known:
            memory, after = self._memories.advance(kind, recompute, state)
            peaks = memory.forward.bytes, max(memory.backward.bytes, memory.early.bytes)
            self._known[key] = BlockHolding(memory.kept, *peaks, memory.late, memory.weight.bytes), after
        return self._known[key]

    def meet(self, states: Sequence[State]) -> State:
        return tuple(_meet(parts) for parts in zip(*states, strict=True))


def _meet(parts: Sequence[tuple[int, bool, bool]]) -> tuple[int, bool, bool]:
    tensor = parts[0][0]
    assert all(part[0] == tensor for part in parts), "which tensor a value is does not depend on what is kept"
    return tensor, all(kept for _, kept, _ in parts), all(late for _, _, late in parts)

"""Which bytes of a segment live when: its instructions by the memory their values have.

A value takes memory from the instruction that defines it to the last one that reads it. Values that share memory are
one: a view (a reshape, a transposition that matrix products read as it is) has the memory of what it is a view of.
External values are resident and stored values are written in place of one, so neither counts. Parameters that are
gathered for use count by block, not by instruction (`Lifetimes.gathered`): frameworks gather a block ahead of its use.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import fsum

from autopar.cost.rings import buffer_bytes
from autopar.cost.traffic import is_view
from autopar.program.records import (
    Collective,
    Compute,
    Instruction,
    Operand,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    reads,
)

_NO_MEMORY = frozenset({"Constant", "Shape", "Size"})


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """A segment by the memory of its values.

    Attributes:
        steps: Per instruction the memory it reads, and what it defines with bytes.
        last_use: Index of the last instruction that reads a memory.
        shared: Whose memory each value has that has none of its own.
        hidden: Memory that kernels leave behind for their gradient, by name, with bytes.
        gathered: Bytes of the parameters that are gathered for the segment.
        reducing: Bytes of the gradients that are handed over to collectives which run beside compute.
        first_gather: Index of the first instruction that gathers a parameter; their number if none does.
    """

    steps: tuple[tuple[tuple[str, ...], tuple[tuple[str, float], ...]], ...]
    last_use: Mapping[str, int]
    shared: Mapping[str, str]
    hidden: dict[str, float]
    gathered: float
    reducing: float
    first_gather: int

    def sizes(self, operands: Collection[Operand]) -> dict[str, float]:
        """Return the bytes of values by the memory they have; views of the same memory count once."""
        return {self.shared.get(operand.value, operand.value): operand.bytes for operand in operands}


def lifetimes(segment: Segment, shared: Mapping[str, str] | None = None) -> Lifetimes:
    """Return a segment by the memory of its values.

    Args:
        segment: What runs.
        shared: Whose memory values have that the segment finds.
    """
    known = dict(shared or {})
    first = set(known.values()) if segment.phase is SegmentPhase.AGAIN else set()
    free = {store.value.value for store in segment.stores} | {operand.value for operand in segment.external}
    outside = set(free) if segment.phase not in (SegmentPhase.REDUCE, SegmentPhase.UPDATE) else set()
    gathered: dict[str, float] = {}
    read: set[str] = set()
    steps, hidden, last_use, reducing = [], {}, {}, []
    first_gather = len(segment.instructions)
    for index, instruction in enumerate(segment.instructions):
        uses = tuple(known.get(operand.value, operand.value) for operand in reads(instruction))
        makes: list[tuple[str, float]] = []
        for operand in defines(instruction):
            if operand.value in free:
                continue
            if _is_view(instruction):
                known[operand.value] = uses[0]
            elif isinstance(instruction, Collective | Slice) and uses[0] in outside:
                outside.add(operand.value)
                if isinstance(instruction, Collective):
                    gathered[operand.value] = operand.bytes
                    first_gather = min(first_gather, index)
            else:
                name = operand.value
                if name in first:  # made again, beside a view that was kept of what was made first
                    name = known[operand.value] = f"{operand.value}|again"
                makes.append((name, operand.bytes))
        if isinstance(instruction, Compute):
            read.update(uses)
            if instruction.kept:
                hidden[f"{instruction.op.name}|kept"] = instruction.kept
                makes.append((f"{instruction.op.name}|kept", instruction.kept))
            if instruction.ring is not None:
                size = buffer_bytes(instruction.passed_bytes, instruction.ring_steps)
                makes.append((f"{instruction.op.name}|ring", size))
        elif isinstance(instruction, Collective) and instruction.overlaps:
            reducing.append(instruction.operand.bytes)
        steps.append((uses, tuple(makes)))
        for name in uses:
            last_use[name] = index
    return Lifetimes(
        tuple(steps),
        last_use,
        known,
        hidden,
        fsum(size for name, size in gathered.items() if name in read),
        fsum(reducing),
        first_gather,
    )


def _is_view(instruction: Instruction) -> bool:
    if not isinstance(instruction, Compute) or instruction.op.kind in _NO_MEMORY:
        return False
    first = instruction.inputs[0] if instruction.inputs else None
    return first is not None and is_view(instruction.op, len(first.shape))


def liveness_peak(
    segment: Lifetimes,
    start: Mapping[str, float],
    kept: Collection[str],
    free: Collection[str] = (),
    *,
    since: int = 0,
    until: int | None = None,
) -> tuple[float, frozenset[str]]:
    """Return the highest number of live bytes, and whose memory is live then.

    Args:
        segment: What runs.
        start: Bytes of what is live before the first instruction.
        kept: What stays live to the end.
        free: What takes no memory.
        since: First instruction whose moment counts.
        until: The one after the last that counts; None for all.
    """
    last_use = segment.last_use
    live = {name: size for name, size in start.items() if name not in free}
    total = sum(live.values())
    peak, names = (0.0, frozenset[str]()) if since else (total, frozenset(live))
    for name in [name for name in live if name not in last_use and name not in kept]:
        total -= live.pop(name)
    for index, (uses, makes) in enumerate(segment.steps):
        for name, size in makes:
            if name not in free:
                live[name] = size
                total += size
        if total > peak and index >= since and (until is None or index < until):
            peak, names = total, frozenset(live)
        for name in {*uses, *(name for name, _ in makes)}:
            if name in live and name not in kept and last_use.get(name, index) == index:
                total -= live.pop(name)
    return peak, names

"""What a block runs again when it recomputes selectively: part of its forward, found from what has to come of it."""

from collections.abc import Collection

from autopar.cost import is_view
from autopar.program.records import Compute, Operand, Segment, SegmentPhase, defines, forward_values, reads


def run_again(forward: Segment, ops: Collection[str]) -> Segment | None:
    """Return the segment that runs ops again, and what has to be kept for it; None if that would keep no less.

    What the ops make and the backward reads is not kept but made again. The segment holds the instructions of the
    forward that this takes: of the ops those that are needed, and the changes of placement on the way from the values
    that are kept.

    Args:
        forward: A forward segment.
        ops: Names of ops in it.
    """
    makers = {
        operand.value: index
        for index, instruction in enumerate(forward.instructions)
        for operand in defines(instruction)
    }

    chosen_ops: set[int] = set()
    for index, instruction in enumerate(forward.instructions):
        if isinstance(instruction, Compute):
            # A view of what is made again is made again with it: keeping one would keep the memory of both.
            source = instruction.inputs[0] if _is_view(instruction) else None
            follows = source is not None and makers.get(source.value) in chosen_ops
            if follows or instruction.op.name in ops:
                chosen_ops.add(index)

    def repeats(index: int) -> bool:
        return index in chosen_ops or not isinstance(forward.instructions[index], Compute)

    dropped = [makers[operand.value] for operand in forward.saved if makers.get(operand.value) in chosen_ops]
    hidden = [
        index
        for index, instruction in enumerate(forward.instructions)
        if index in chosen_ops and isinstance(instruction, Compute) and instruction.kept
    ]
    chosen: set[int] = set()
    pending = dropped + hidden
    while pending:
        index = pending.pop()
        if index in chosen:
            continue
        chosen.add(index)
        for operand in reads(forward.instructions[index]):
            maker = makers.get(operand.value)
            if maker is not None and repeats(maker):
                pending.append(maker)
    instructions = tuple(instruction for index, instruction in enumerate(forward.instructions) if index in chosen)
    if not instructions:
        return None
    remade = {operand.value for instruction in instructions for operand in defines(instruction)}
    needed = {operand.value for instruction in instructions for operand in reads(instruction)}
    needed |= {operand.value for operand in forward.saved}
    kept = tuple(operand for operand in forward_values(forward) if operand.value in needed - remade)
    external = tuple(operand for operand in forward.external if operand.value in needed)
    outside = {operand.value for operand in external}
    return Segment(
        forward.kind,
        SegmentPhase.AGAIN,
        inputs=(),
        external=external,
        instructions=instructions,
        saved=_in_order(kept, forward.saved),
        parts=tuple(part for part in forward.parts if part.value in outside),
    )


def _is_view(compute: Compute) -> bool:
    first = compute.inputs[0] if compute.inputs else None
    return first is not None and is_view(compute.op, len(first.shape))


def _in_order(kept: tuple[Operand, ...], saved: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Return what is kept, what would have been saved first, in its order."""
    also = {operand.value for operand in saved}
    still = {operand.value for operand in kept}
    return (
        *(operand for operand in saved if operand.value in still),
        *(operand for operand in kept if operand.value not in also),
    )

"""What a block runs again when it recomputes selectively: part of its forward, found from what has to come of it."""

from collections.abc import Collection

from autopar.program.records import Compute, Instruction, Operand, Segment, SegmentPhase, defines, forward_values, reads


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

    def repeats(instruction: Instruction) -> bool:
        return not isinstance(instruction, Compute) or instruction.op.name in ops

    dropped = [
        operand.value
        for operand in forward.saved
        if operand.value in makers
        and isinstance(forward.instructions[makers[operand.value]], Compute)
        and repeats(forward.instructions[makers[operand.value]])
    ]
    hidden = [
        index
        for index, instruction in enumerate(forward.instructions)
        if isinstance(instruction, Compute) and instruction.kept and instruction.op.name in ops
    ]
    chosen: set[int] = set()
    pending = [makers[value] for value in dropped] + hidden
    while pending:
        index = pending.pop()
        if index in chosen:
            continue
        chosen.add(index)
        for operand in reads(forward.instructions[index]):
            maker = makers.get(operand.value)
            if maker is not None and repeats(forward.instructions[maker]):
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


def _in_order(kept: tuple[Operand, ...], saved: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Return what is kept, what would have been saved first, in its order."""
    also = {operand.value for operand in saved}
    still = {operand.value for operand in kept}
    return (
        *(operand for operand in saved if operand.value in still),
        *(operand for operand in kept if operand.value not in also),
    )

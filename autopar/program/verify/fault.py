"""Errors of the verifier: which segment, which instruction, and what stands around it."""

from autopar.errors import ProgramError
from autopar.program.records import Segment
from autopar.program.text import format_instruction

_CONTEXT = 2  # instructions printed before and after the one at fault


def title(segment: Segment) -> str:
    """Return the name of a segment for messages."""
    return f"segment {segment.kind} {segment.phase}"


def fault(segment: Segment, index: int, problem: str) -> ProgramError:
    """Return an error that shows the instruction at fault among its neighbours."""
    first = max(0, index - _CONTEXT)
    lines = [
        f"  {'>' if i == index else ' '} {format_instruction(segment.instructions[i])}"
        for i in range(first, min(len(segment.instructions), index + _CONTEXT + 1))
    ]
    return ProgramError("\n".join([f"{title(segment)}, instruction {index}: {problem}", *lines]))

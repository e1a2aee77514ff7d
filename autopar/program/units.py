"""Units of parameters: which collectives of a segment travel as one.

FSDP gathers the parameters of a block with one collective. In a program each parameter has a collective of its own that
names its unit; those of a segment with equal units, kinds and axes take the time of one with all their bytes.
"""

from collections.abc import Mapping, Sequence
from math import fsum

from autopar.cost.collectives import Collective as CollectiveKind
from autopar.program.records import Collective, Segment
from autopar.sharding import Axis

UnitKey = tuple[CollectiveKind, Axis, str]
"""What collectives of a unit have in common: kind, axis and name of the unit."""


def unit_key(collective: Collective) -> UnitKey:
    """Return what a collective has in common with those of its unit."""
    return collective.kind, collective.axis, collective.unit


def units_of(segment: Segment) -> dict[UnitKey, list[Collective]]:
    """Return the collectives of a segment that travel together; those that travel alone are left out."""
    found: dict[UnitKey, list[Collective]] = {}
    for instruction in segment.instructions:
        if isinstance(instruction, Collective) and instruction.unit:
            found.setdefault(unit_key(instruction), []).append(instruction)
    return found


def bytes_together(collective: Collective, units: Mapping[UnitKey, Sequence[Collective]]) -> float:
    """Return the bytes that travel in one collective with those of a given one, its own included."""
    members = units.get(unit_key(collective), ()) if collective.unit else ()
    return fsum(member.bytes for member in members) if members else collective.bytes

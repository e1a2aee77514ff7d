"""The decisions of a plan, and the pins that give one of them another value."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from operator import mul
from typing import Any

from autopar.cluster import cluster_from_dict
from autopar.configuration import Configuration, divisors
from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.folding.fold import Folded
from autopar.formulate.zero import LEVELS
from autopar.pins import BlockOffload, BlockRecompute, Choices, Pins
from autopar.plan import Plan
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.tactics.stages import layers

MOST_VALUES = 4
"""Most values of one decision that are weighed, those nearest to the plan's."""

_ROLES = ("dp", "tp", "cp", "ep")
"""Degrees, as pins and the roles of axes call them."""


LIKEST = 6
"""Configurations most like the plan's that are searched before all others."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a decision could have.

    Attributes:
        text: How it is written.
        pin: What pins say of the decision then.
    """

    text: str
    pin: Choices


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of a plan.

    Attributes:
        name: What it is called.
        value: What the plan has, in words.
        others: Other values, those nearest to the plan's first.
    """

    name: str
    value: str
    others: tuple[Value, ...]


def pinned_to(pins: Pins, value: Value) -> Pins:
    """Return the pins of a job with one decision pinned to a value, in place of what they say of it."""
    named = {key: getattr(value.pin, key) for key in value.pin.named}
    return Pins(replace(pins.pin, **named), pins.forbid)


def likest(plan: Plan, space: Sequence[Configuration]) -> list[Configuration]:
    """Return the few configurations of a space that are most like a plan's, the likest first.

    Likeness is in factors of two: of stages, of each axis of the mesh from the innermost one on, of the samples of a
    microbatch per device, and of stages per group; another schedule counts as one.
    """
    groups, sizes = _groups(plan), [axis.size for axis in plan.mesh]
    samples = plan.num_microbatches * math.prod(sizes)

    def distance(own: Configuration) -> float:
        pairs = [(own.num_stages, groups), (own.num_chunks, len(plan.stages) // groups)]
        pairs += [(own.num_microbatches * own.mesh.size, samples)]
        pairs += list(zip_longest([axis.size for axis in own.mesh.axes][::-1], sizes[::-1], fillvalue=1))
        return sum(abs(math.log2(one / other)) for one, other in pairs) + (own.schedule != plan.schedule)

    return sorted(space, key=distance)[:LIKEST]


def _groups(plan: Plan) -> int:
    return len({stage.devices for stage in plan.stages})


def base(plan: Plan) -> Choices:
    """Return what is decided outside of placements: stages, mesh, microbatches and schedule of a plan with one mesh."""
    groups = _groups(plan)
    return Choices(
        stages=(groups,),
        mesh=(tuple((axis.name, axis.size) for axis in plan.mesh),),
        microbatches=(plan.num_microbatches,),
        schedule=(plan.schedule,),
        chunks=(len(plan.stages) // groups,),
    )


def decisions(plan: Plan, folded: Folded, space: Sequence[Configuration]) -> tuple[Decision, ...]:
    """Return the decisions of a plan with the values they could have.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
        space: The declared space of its job, without pins.
    """
    groups = _groups(plan)
    found = [_number("pp", "stages", groups, {own.num_stages for own in space})]
    found += _degrees(plan, folded)
    counts = {own.num_microbatches for own in space}
    found.append(_number("microbatches", "microbatches", plan.num_microbatches, counts))
    if groups > 1:  # one group has neither an order of passes nor stages to take turns with
        found.append(_schedules(plan, space))
        chunks = {own.num_chunks for own in space}
        found.append(_number("stages per group", "chunks", len(plan.stages) // groups, chunks))
    if plan.job.mode == "train":
        found += [_recompute(plan, folded), _zero(plan, folded)]
        if cluster_from_dict(plan.job.cluster).host is not None:
            found.append(_offload(plan, folded))
    return tuple(own for own in found if own.others)


def nearest(value: int, others: Iterable[int]) -> list[int]:
    """Return other values, those whose ratio to a value is nearest to 1 first.

    >>> nearest(4, [1, 2, 4, 8, 16])
    [2, 8, 1, 16]
    """
    return sorted(set(others) - {value}, key=lambda other: (abs(math.log(other / value)), other))


def _number(name: str, key: str, value: int, values: Iterable[int]) -> Decision:
    others = nearest(value, values)[:MOST_VALUES]
    return Decision(name, str(value), tuple(Value(str(own), _number_pin(key, own)) for own in others))


def _number_pin(key: str, value: int) -> Choices:
    said: dict[str, Any] = {key: (value,)}
    return Choices(**said)


def _degrees(plan: Plan, folded: Folded) -> list[Decision]:
    """Return the degrees of parallelism inside stages: data, tensor, and those of the others that the plan has."""
    if plan.variants:  # stages differ: there is no one degree to change
        return []
    roles = roles_of_axes(plan.mesh, plan.blocks, folded)
    found = []
    for role in _ROLES:
        degree = _degree(own for own in roles if own.role == role)
        if degree > 1 or role in ("dp", "tp"):
            found.append(_number(role, role, degree, divisors(plan.job.gpus)))
    return found


def _degree(axes: Iterable[AxisRole]) -> int:
    return reduce(mul, (own.axis.size for own in axes), 1)


def _schedules(plan: Plan, space: Sequence[Configuration]) -> Decision:
    names = dict.fromkeys(own.schedule for own in space)
    others = tuple(Value(name, Choices(schedule=(name,))) for name in names if name != plan.schedule)
    return Decision("schedule", plan.schedule, others)


def _recompute(plan: Plan, folded: Folded) -> Decision:
    flavours = [str(flavour) for stage in plan.stages for flavour in stage.flavours]
    own = [flavours[block] for block in layers(folded)]
    kept = {flavour: own.count(flavour) for flavour in dict.fromkeys(own)}
    text = next(iter(kept)) if len(kept) == 1 else ", ".join(f"{name} in {count}" for name, count in kept.items())
    others = tuple(
        Value(f"{flavour} in all layers" if len(kept) > 1 else str(flavour), _everywhere(str(flavour)))
        for flavour in ON_DEVICE
        if kept.keys() != {str(flavour)}
    )
    return Decision("recompute", text, others)


def _everywhere(flavour: str) -> Choices:
    return Choices(recompute=(BlockRecompute((flavour,)),))


def _hosted(plan: Plan) -> tuple[int, int, str]:
    """Return of how many stages, or else blocks, the optimizer's state is in host memory, of how many, and which."""
    if all(any(stage.hosted) == all(stage.hosted) for stage in plan.stages):
        return sum(bool(stage.offload) for stage in plan.stages), len(plan.stages), "stages"
    away = [own for stage in plan.stages for own in stage.hosted]
    return sum(away), len(away), "blocks"


def _offload(plan: Plan, folded: Folded) -> Decision:
    """Return what lies in host memory, of the layers and of the stages."""
    flavours = [flavour for stage in plan.stages for flavour in stage.flavours]
    own = layers(folded)
    away = {
        Hosted.ACTIVATIONS: (sum(flavours[block] is Recompute.OFFLOAD for block in own), len(own), "layers"),
        Hosted.OPTIMIZER: _hosted(plan),
    }
    named = [
        str(what) if count == total else f"{what} of {count} {of}" for what, (count, total, of) in away.items() if count
    ]
    whole = {what for what, (count, total, _) in away.items() if count == total}
    mixed = any(0 < count < total for count, total, _ in away.values())
    ways = ((), (Hosted.OPTIMIZER,), (Hosted.ACTIVATIONS,), (Hosted.ACTIVATIONS, Hosted.OPTIMIZER))
    others = tuple(
        Value(" and ".join(way) or "nothing", Choices(offload=(BlockOffload(tuple(map(str, way)) or ("none",)),)))
        for way in ways
        if mixed or set(way) != whole
    )
    return Decision("offload", " and ".join(named) or "nothing", others)


def _zero(plan: Plan, folded: Folded) -> Decision:
    level = max(
        (
            own.zero
            for number in range(len(plan.all_variants))
            for own in roles_of_axes(plan.all_variants[number].mesh, plan.all_variants[number].blocks, folded)
            if own.axis.size > 1 and own.role in ("dp", "cp", "spatial")
        ),
        default=0,
    )
    others = sorted(LEVELS - {level}, key=lambda other: (abs(other - level), other))
    return Decision("zero", str(level), tuple(Value(str(own), Choices(zero=(own,))) for own in others))

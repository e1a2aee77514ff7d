"""Whether a plan keeps to pins, read off the plan itself: what the tests and the verdict hold plans against."""

from collections.abc import Iterator

from autopar.formulate.fold import Folded
from autopar.pins.levels import levels_of
from autopar.pins.records import ROLES, Choices, Pins
from autopar.pins.space import as_mesh
from autopar.plan import Plan
from autopar.search.roles import AxisRole, roles_of_axes
from autopar.tactics.stages import layers


def broken(plan: Plan, pins: Pins, folded: Folded) -> tuple[str, ...]:
    """Return what of a plan is not as pinned, or is as forbidden, a sentence each; none if it keeps to the pins.

    Tactics are not looked at: the placement problem leaves nothing else.

    Args:
        plan: The plan.
        pins: The pins.
        folded: The graph of one of its microbatches.
    """
    return (*_differs(plan, pins.pin, folded), *_has(plan, pins.forbid, folded))


def _facts(plan: Plan) -> dict[str, object]:
    groups = len({stage.devices for stage in plan.stages})
    return {
        "stages": groups,
        "microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch,
        "schedule": plan.schedule,
        "chunks": len(plan.stages) // groups,
    }


def _differs(plan: Plan, pin: Choices, folded: Folded) -> Iterator[str]:
    for key, value in _facts(plan).items():
        if getattr(pin, key) and value not in getattr(pin, key):
            yield f"{key} is {value}"
    if pin.mesh and not any(as_mesh(own).shape == plan.device_mesh.shape for own in pin.mesh):
        yield f"mesh is {plan.device_mesh}"
    roles = roles_of_axes(plan.mesh, plan.blocks, folded)
    for role in ROLES:
        named = [own for own in roles if own.axis.name == role and own.axis.size > 1]
        for own in named:
            if not _plays(own, role):
                yield f"axis {role} is {own.role}"
        degrees = getattr(pin, role)
        if degrees:
            degree = named[0].axis.size if named else 1
            others = [own for own in roles if own.axis.name not in ROLES and own.axis.size > 1 and own.role == role]
            if degree not in degrees or (others and role != "ep"):
                yield f"{role} is {degree}" + (f", and axis {others[0].axis.name} is {role} too" if others else "")
    begins = {stage.blocks[0] for stage in plan.stages[1:]}
    if pin.boundaries and not begins <= set(pin.boundaries):
        yield f"stages begin at blocks {', '.join(map(str, sorted(begins)))}"
    kept = [str(flavour) for stage in plan.stages for flavour in stage.flavours]
    own_layers = set(layers(folded))
    for item in pin.recompute:
        for block, flavour in enumerate(kept):
            inside = block in own_layers if item.blocks is None else item.blocks[0] <= block <= item.blocks[1]
            if inside and flavour not in item.flavours:
                yield f"block {block} recomputes {flavour}"
    if pin.zero:
        for name, axis, level in levels_of(plan, folded):
            if level not in pin.zero:
                yield f"{name} has ZeRO level {level} on axis {axis}"


def _plays(own: AxisRole, role: str) -> bool:
    if role == "ep":
        return own.experts
    return own.role == ("sp" if role == "cp" else role)


def _has(plan: Plan, forbid: Choices, folded: Folded) -> Iterator[str]:
    for key, value in _facts(plan).items():
        if value in getattr(forbid, key):
            yield f"{key} is {value}"
    if any(as_mesh(own).shape == plan.device_mesh.shape for own in forbid.mesh):
        yield f"mesh is {plan.device_mesh}"
    begins = {stage.blocks[0] for stage in plan.stages[1:]}
    for block in sorted(begins & set(forbid.boundaries)):
        yield f"a stage begins at block {block}"
    kept = [str(flavour) for stage in plan.stages for flavour in stage.flavours]
    own_layers = set(layers(folded))
    for item in forbid.recompute:
        for block, flavour in enumerate(kept):
            inside = block in own_layers if item.blocks is None else item.blocks[0] <= block <= item.blocks[1]
            if inside and flavour in item.flavours:
                yield f"block {block} recomputes {flavour}"
    if forbid.zero:
        for name, axis, level in levels_of(plan, folded):
            if level in forbid.zero:
                yield f"{name} has ZeRO level {level} on axis {axis}"

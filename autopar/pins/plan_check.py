"""Whether a plan keeps to pins, read off the plan itself: what the tests and the verdict hold plans against."""

from collections.abc import Iterator, Sequence
from math import prod

from autopar.degrees import SHARD
from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.describe.context_kinds import placed_contexts
from autopar.folding.fold import Folded
from autopar.formulate.zero import LEVELS
from autopar.pins.hosting import forbids_state
from autopar.pins.levels import levels_of
from autopar.pins.records import ROLES, Choices, Pins
from autopar.pins.space import is_mesh
from autopar.plan import Plan
from autopar.recompute import STATE_KINDS, Hosted, Recompute
from autopar.tactics.stages import layers


def broken(plan: Plan, pins: Pins, folded: Folded) -> tuple[str, ...]:
    """Return what of a plan is not as pinned, or is as forbidden, a sentence each; none if it keeps to the pins.

    Tactics are not looked at: the placement problem leaves nothing else.

    Args:
        plan: The plan.
        pins: The pins.
        folded: The graph of one of its microbatches.
    """
    roles = roles_of_axes(plan.mesh, plan.blocks, folded)
    return (
        *_strays(plan, pins, roles),
        *_contexts(plan, pins, folded),
        *_differs(plan, pins.pin, folded, roles),
        *_has(plan, pins.forbid, folded, roles),
    )


def _facts(plan: Plan) -> dict[str, object]:
    groups = len({stage.devices for stage in plan.stages})
    return {
        "stages": groups,
        "microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch,
        "schedule": plan.schedule,
        "chunks": len(plan.stages) // groups,
        "pp_inside": "numbered" in plan.job.cluster,
    }


def _strays(plan: Plan, pins: Pins, roles: Sequence[AxisRole]) -> Iterator[str]:
    """Yield what is so and is not to be, or the other way round: forbidding the one is pinning the other."""
    if plan.variants and True not in pins.unequal:
        yield "stages have meshes of their own"
    for own in roles:
        if own.axis.size > 1 and own.sequence_parallel not in pins.sequence_parallel:
            if own.sequence_parallel and own.axis.name != "cp":
                yield f"axis {own.axis.name} splits the sequence between blocks"
            if not own.sequence_parallel and own.axis.name == "tp":
                yield "axis tp does not split the sequence between blocks"


def _contexts(plan: Plan, pins: Pins, folded: Folded) -> Iterator[str]:
    """Yield the kinds of context parallelism that are not left."""
    if pins.limits_context:
        for axis, kind, limits, count in placed_contexts(plan.mesh, plan.blocks, folded):
            if kind not in pins.contexts(limits) and (kind != "ulysses" or axis == "cp"):
                with_limits = f" with {', '.join(sorted(limits))}" if limits else ""
                yield f"attention{with_limits} of {count} layers has context parallelism of kind {kind} on axis {axis}"


def _differs(plan: Plan, pin: Choices, folded: Folded, roles: Sequence[AxisRole]) -> Iterator[str]:
    for key, value in _facts(plan).items():
        if getattr(pin, key) and value not in getattr(pin, key):
            yield f"{key} is {value}"
    if pin.mesh and not any(is_mesh(plan.mesh, own) for own in pin.mesh):
        yield f"mesh is {plan.device_mesh}"
    for role in ROLES:
        named = [own for own in roles if own.axis.name == role and own.axis.size > 1]
        for own in named:
            if not _plays(own, role):
                yield f"axis {role} is {own.role}"
        degrees = getattr(pin, role)
        if degrees:
            degree = named[0].axis.size if named else 1
            others = [own for own in roles if own.axis.name not in ROLES and own.axis.size > 1 and _plays(own, role)]
            if degree not in degrees or others:
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
    yield from _not_hosted(plan, pin, own_layers)
    yield from _levels(plan, pin, folded)


def _levels(plan: Plan, pin: Choices, folded: Folded) -> Iterator[str]:
    """Yield the ZeRO levels that are not as pinned; beside an axis `shard` devices of `dp` hold copies."""
    apart = any(axis.name == SHARD and axis.size > 1 for axis in plan.mesh)
    if not (pin.zero or pin.hybrid_zero or apart):
        return
    for name, axis, levels in levels_of(plan, folded):
        allowed = set(pin.zero or LEVELS)
        if apart and axis == "dp":
            allowed = {0}
        elif apart and axis != "tp":
            sharing = set(pin.hybrid_zero or LEVELS - {0})
            allowed = allowed & sharing or sharing
        if levels.isdisjoint(allowed):
            yield f"{name} has ZeRO level {max(levels)} on axis {axis}"


def _not_hosted(plan: Plan, pin: Choices, own_layers: set[int]) -> Iterator[str]:
    """Yield what is not on the device or in host memory as pinned."""
    for item in pin.offload:
        first, last = item.blocks or (0, plan.stages[-1].blocks[1] - 1)
        free = "none" in item.what
        for stage in plan.stages:
            places = zip(stage.flavours, stage.hosted, strict=True)
            for block, (flavour, lies) in enumerate(places, stage.blocks[0]):
                if not first <= block <= last:
                    continue
                away, wanted = flavour is Recompute.OFFLOAD, Hosted.ACTIVATIONS in item.what
                must = wanted and not free and (item.blocks is not None or block in own_layers)
                if (away and not wanted) or (must and not away):
                    yield f"block {block} keeps its activations {'in host memory' if away else 'on the device'}"
                wanted = stage.hosted_state in item.what if lies else any(own in item.what for own in STATE_KINDS)
                if lies != wanted and not (free and wanted):
                    yield f"the optimizer of block {block} lies {'in host memory' if lies else 'on the device'}"


def _plays(own: AxisRole, role: str) -> bool:
    if role == "ep":
        return own.experts
    return own.role == role


def _has(plan: Plan, forbid: Choices, folded: Folded, roles: Sequence[AxisRole]) -> Iterator[str]:
    for key, value in _facts(plan).items():
        if value in getattr(forbid, key):
            yield f"{key} is {value}"
    if any(is_mesh(plan.mesh, own) for own in forbid.mesh):
        yield f"mesh is {plan.device_mesh}"
    for role in ROLES:
        degree = prod(own.axis.size for own in roles if _plays(own, role))
        if degree in getattr(forbid, role):
            yield f"{role} is {degree}"
    begins = {stage.blocks[0] for stage in plan.stages[1:]}
    for block in sorted(begins & set(forbid.boundaries)):
        yield f"a stage begins at block {block}"
    kept = [str(flavour) for stage in plan.stages for flavour in stage.flavours]
    own_layers = set(layers(folded))
    hosted = [away for stage in plan.stages for away in stage.hosted]
    what = [stage.hosted_state for stage in plan.stages for _ in stage.hosted]
    for item in forbid.recompute:
        for block, flavour in enumerate(kept):
            inside = block in own_layers if item.blocks is None else item.blocks[0] <= block <= item.blocks[1]
            if inside and flavour in item.flavours:
                yield f"block {block} recomputes {flavour}"
    for own in forbid.offload:
        for block, away in enumerate(hosted):
            if own.blocks is None or own.blocks[0] <= block <= own.blocks[1]:
                if Hosted.ACTIVATIONS in own.what and kept[block] == Recompute.OFFLOAD:
                    yield f"block {block} keeps its activations in host memory"
                if away and (what[block] in own.what or forbids_state(own.what)):
                    yield f"the {what[block]} of block {block} lies in host memory"
    if forbid.zero:
        for name, axis, levels in levels_of(plan, folded):
            if levels <= set(forbid.zero):
                yield f"{name} has ZeRO level {max(levels)} on axis {axis}"

"""What pins leave of the outer space: configurations that are listed because they are pinned, and those left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from autopar.cluster import Cluster
from autopar.configuration import GROUP_NODES, Configuration, data_major_meshes, divisors, inside_block, meshes
from autopar.cost import widest_tier
from autopar.degrees import SHARD
from autopar.errors import PinError
from autopar.formulate.data_major import is_data_major
from autopar.pins.records import MOST_FREE, RANGED, ROLES, Axes, Choices, Item, Pins
from autopar.pins.unequal import EQUAL_ONLY
from autopar.search.submesh_space import UnequalSpace
from autopar.sharding import Axis, Mesh

AXIS_NAMES = {1: ("inner",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
"""Names of the axes of a mesh of which only the sizes are pinned."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What pins are held against.

    Attributes:
        cluster: What the job runs on.
        gpus: Number of devices.
        global_batch: Samples per step.
        fixed_batch: Samples per microbatch the model insists on; None if it takes any number.
        num_blocks: Length of the chain of blocks.
        unequal: Stages with meshes of their own that the pins leave; None if none.
        stages: Numbers of such stages that could be pinned, all else as it is pinned.
    """

    cluster: Cluster
    gpus: int
    global_batch: int
    fixed_batch: int | None
    num_blocks: int
    unequal: UnequalSpace | None = None
    stages: tuple[int, ...] = ()


def pinned_space(space: Sequence[Configuration], pins: Pins, frame: Frame) -> list[Configuration]:
    """Return what pins leave of the space of a job, with the pinned meshes and virtual stages it does not list.

    That may be nothing if unequal stages are left.

    Raises:
        PinError: If a pinned value cannot occur, or nothing is left.
    """
    space = _with_chunks(space, pins.pin.chunks, frame.num_blocks)
    _check_values(space, pins, frame)
    found = _filtered(space, pins, frame)
    if not found and frame.unequal is None:
        guilty = conflicting(pins, lambda some: not _filtered(space, some, frame))
        raise PinError(
            f"no configuration of {frame.gpus} GPUs and {frame.global_batch} samples keeps to "
            f"{' and '.join(f'{str(item)!r}' for item in guilty)}",
            hint="drop or change one of them" if len(guilty) > 1 else "drop or change it",
        )
    return found


def conflicting(pins: Pins, fails: Callable[[Pins], bool]) -> tuple[Item, ...]:
    """Return an irreducible set of pins that fails: without any of them it does not."""
    kept = list(pins.items)
    for item in pins.items:
        dropped = [other for other in pins.items if other not in kept or other == item]
        if fails(pins.without(*dropped)):
            kept.remove(item)
    return tuple(kept)


def _filtered(space: Sequence[Configuration], pins: Pins, frame: Frame) -> list[Configuration]:
    listed = dict.fromkeys(_with_meshes(space, pins, frame)) if False in pins.unequal else {}
    return [
        configuration
        for configuration in listed
        if _keeps_to(configuration, pins.pin, frame, forbidden=False)
        and not _keeps_to(configuration, pins.forbid, frame, forbidden=True)
    ]


def _with_chunks(space: Sequence[Configuration], pinned: Sequence[int], num_blocks: int) -> list[Configuration]:
    """Return a space with interleaved stages in pinned numbers per group; the space lists some numbers only."""
    more = (
        replace(configuration, num_chunks=chunks)
        for configuration in space
        if configuration.schedule == "interleaved"
        for chunks in pinned
        if 1 < chunks <= num_blocks // configuration.num_stages
    )
    return list(dict.fromkeys((*space, *more)))


def _with_meshes(space: Sequence[Configuration], pins: Pins, frame: Frame) -> Iterator[Configuration]:
    """Yield the configurations on the meshes that are pinned, or on all of the space if none is.

    Where a degree is pinned or forbidden an axis of its own has what is left of it.
    """
    sizes = {configuration.mesh.size for configuration in space}
    known = {role: pins.degrees(role, sizes) for role in ROLES}
    roles = {role: degrees for role, degrees in known.items() if degrees is not None}
    if pins.pin.mesh:
        yield from _on_pinned_meshes(space, pins.pin.mesh, frame)
        return
    for configuration in space:
        if roles:
            per_node = frame.cluster.devices_per_node
            samples = frame.global_batch // configuration.num_microbatches
            for mesh in _role_meshes(roles, configuration.mesh.size, per_node):
                if not is_data_major(mesh) or samples % mesh.axes[0].size == 0:
                    yield from _on_mesh(configuration, mesh, frame)
        else:
            yield configuration


def _on_pinned_meshes(space: Sequence[Configuration], pinned: Sequence[Axes], frame: Frame) -> Iterator[Configuration]:
    """Yield the configurations of a space on pinned meshes of as many devices.

    Axes named for the batch, `dp`, `shard` and `ep`, divide the samples of a microbatch.
    """
    by_size: dict[int, list[tuple[Mesh, int]]] = {}
    for axes in dict.fromkeys(pinned):
        mesh = as_mesh(axes)
        batch = prod(axis.size for axis in mesh.axes if axis.name in ("dp", SHARD, "ep"))
        by_size.setdefault(mesh.size, []).append((mesh, batch))
    seen = set()
    for configuration in space:  # one of those that differ in the mesh alone stands for all
        size, inside = configuration.mesh.size, configuration.block > 0
        key = replace(configuration, mesh=Mesh.of(inner=size), block=int(inside))
        if key in seen:
            continue
        seen.add(key)
        samples = frame.global_batch // configuration.num_microbatches
        for mesh, batch in by_size.get(size, ()):
            if samples % batch == 0:
                yield from _on_mesh(configuration, mesh, frame)


def _on_mesh(configuration: Configuration, mesh: Mesh, frame: Frame) -> Iterator[Configuration]:
    """Yield a configuration on another mesh, unless pipelines with data parallelism around them do not lie so."""
    block = 0
    if configuration.block:
        block = inside_block(configuration.num_stages, mesh, frame.cluster.devices_per_node)
    if bool(block) == bool(configuration.block):
        yield replace(configuration, mesh=mesh, block=block)


def as_mesh(axes: Axes) -> Mesh:
    """Return a pinned mesh, with the usual names if it has none.

    >>> str(as_mesh((("", 4), ("", 2))))
    'outer=4×inner=2'
    """
    sizes = dict(axes)
    if all(name for name, _ in axes):
        return Mesh.of(**sizes)
    names = AXIS_NAMES.get(len(axes), tuple(f"axis{index}" for index in range(len(axes))))
    return Mesh.of(**dict(zip(names, (size for _, size in axes), strict=True)))


def _role_meshes(roles: dict[str, tuple[int, ...]], devices: int, devices_per_node: int) -> Iterator[Mesh]:
    """Yield the meshes with an axis per pinned degree above 1; what devices are left make axes that are free.

    Where nothing is said of data parallelism, and of one other degree at most, these are also a data-parallel axis and
    free ones inside it, as in the space without pins: so that fewer devices than all may share what ZeRO splits. Those
    that lie within a node are on two free axes.
    """
    for degrees in product(*roles.values()):
        pinned = {role: degree for role, degree in zip(roles, degrees, strict=True) if degree > 1}
        taken = prod(pinned.values())
        if devices % taken:
            continue
        rest = devices // taken
        if rest == 1 and pinned:
            yield Mesh.of(**pinned)
            continue
        for mesh in meshes(rest, max(1, devices_per_node // taken)):
            if len(mesh.axes) > max(1, MOST_FREE - len(pinned)):
                continue
            free = {axis.name: axis.size for axis in mesh.axes}
            yield Mesh.of(**free, **pinned)
            if rest > 1 and len(free) == 1 and pinned:
                yield Mesh.of(**pinned, **free)
        if "dp" in roles:
            continue
        if not pinned:
            yield from data_major_meshes(rest, devices_per_node)
        elif len(pinned) == 1:
            for outer in divisors(rest):
                if devices_per_node < outer * taken <= GROUP_NODES * devices_per_node and 1 < outer < rest:
                    yield Mesh.of(dp=rest // outer, outer=outer, **pinned)


def _keeps_to(configuration: Configuration, choices: Choices, frame: Frame, *, forbidden: bool) -> bool:
    """Whether a configuration has the values of all decisions that choices speak of; of any of them if forbidden."""
    mesh = configuration.mesh
    samples = frame.global_batch // configuration.num_microbatches
    checks = []
    if choices.stages:
        checks.append(configuration.num_stages in choices.stages)
    if choices.mesh:
        named, unnamed = _pinned_axes(choices.mesh)
        own = tuple((axis.name, axis.size) for axis in mesh.axes)
        checks.append(own in named or tuple(size for _, size in own) in unnamed)
    if choices.microbatches:
        checks.append(configuration.num_microbatches in choices.microbatches)
    if choices.microbatch_size:
        checks.append(samples in choices.microbatch_size)
    if choices.schedule:
        checks.append(configuration.schedule in choices.schedule)
    if choices.chunks:
        checks.append(configuration.num_chunks in choices.chunks)
    if choices.pp_inside:
        checks.append((configuration.block > 0) in choices.pp_inside)
    for name in choices.within_node:
        inside = [widest_tier(axis, frame.cluster) == 0 for axis in mesh.axes if axis.name == name]
        checks.append(all(inside) if not forbidden else any(inside))
    if choices.boundaries:
        total = configuration.num_stages * configuration.num_chunks
        starts = _starts(choices.boundaries, frame.num_blocks, forbidden=forbidden)
        checks.append((total > len(starts) + 1) if forbidden else total <= len(starts) + 1)
    return any(checks) if forbidden else all(checks)


def _starts(boundaries: Sequence[int], num_blocks: int, *, forbidden: bool) -> set[int]:
    inside = {block for block in boundaries if 0 < block < num_blocks}
    return set(range(1, num_blocks)) - inside if forbidden else inside


@lru_cache(maxsize=16)
def _pinned_axes(pinned: tuple[Axes, ...]) -> tuple[frozenset[Axes], frozenset[tuple[int, ...]]]:
    """Return the meshes that are pinned with names, and the sizes of those without."""
    named = frozenset(own for own in pinned if all(name for name, _ in own))
    return named, frozenset(tuple(size for _, size in own) for own in pinned if own not in named)


def is_mesh(axes: Sequence[Axis], pinned: Axes) -> bool:
    """Whether a mesh is a pinned one; of one without names only the sizes are compared."""
    if all(name for name, _ in pinned):
        return tuple((axis.name, axis.size) for axis in axes) == pinned
    return [axis.size for axis in axes] == [size for _, size in pinned]


def _check_values(space: Sequence[Configuration], pins: Pins, frame: Frame) -> None:
    """Raise an error for the first pinned value that cannot occur, whatever else is pinned."""
    pin = pins.pin
    stages = sorted({*(configuration.num_stages for configuration in space), *frame.stages})
    _check("stages", pin.stages, stages, f"{frame.gpus} GPUs and {frame.num_blocks} blocks")
    _check("schedule", pin.schedule, sorted({c.schedule for c in space}), "this job")
    _check("pp_inside", pin.pp_inside, sorted({c.block > 0 for c in space}), "this job")
    _check("chunks", pin.chunks, sorted({c.num_chunks for c in space}), "this job")
    batch = frame.global_batch
    if frame.fixed_batch is not None:
        why = f"the model works on {frame.fixed_batch} samples at a time"
        _check("microbatches", pin.microbatches, [batch // frame.fixed_batch], why)
        _check("microbatch_size", pin.microbatch_size, [frame.fixed_batch], why)
    for key, values in (("microbatches", pin.microbatches), ("microbatch_size", pin.microbatch_size)):
        for value in values:
            if batch % value:
                near = min((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: abs(d - value))
                raise PinError(f"pin {key}: {value} does not divide the batch of {batch}", hint=f"{near} does")
    sizes = sorted({configuration.mesh.size for configuration in space})
    for axes in pin.mesh:
        size = prod(own for _, own in axes)
        if size not in sizes:
            raise PinError(
                f"pin mesh: {as_mesh(axes)} has {size} devices, a stage of {frame.gpus} GPUs never has",
                hint=f"a stage has {', '.join(map(str, sizes))}",
            )
    for role in ROLES:
        for degree in getattr(pin, role):
            if not any(size % degree == 0 for size in sizes):
                raise PinError(
                    f"pin {role}: {degree} divides no stage of {frame.gpus} GPUs",
                    hint=f"a stage has {', '.join(map(str, sizes))}",
                )
    alike = [item for item in pins.items if item.key in EQUAL_ONLY]
    if False not in pins.unequal and alike:
        raise PinError(
            f"only stages with meshes of their own are left by 'unequal', and {str(alike[0])!r} is about equal ones",
            hint="drop one of them",
        )
    if pin.mesh and pins.roles:
        raise PinError("pin mesh and degrees are both given", hint="name the axes of the mesh: mesh: {dp: 4, tp: 2}")
    _check_forbidden(space, pins, frame)
    for section, choices in (("pin", pins.pin), ("forbid", pins.forbid)):
        for block in choices.boundaries:
            if not 0 < block < frame.num_blocks:
                raise PinError(
                    f"{section} boundaries: no stage can begin at block {block}",
                    hint=f"blocks at which one can are 1 to {frame.num_blocks - 1}",
                )
        for key in RANGED:
            for item in getattr(choices, key):
                if item.blocks is not None and item.blocks[1] >= frame.num_blocks:
                    raise PinError(
                        f"{section} {key}: there is no block {item.blocks[1]}",
                        hint=f"blocks are 0 to {frame.num_blocks - 1}",
                    )
        for key in ("zero", "hybrid_zero"):
            for level in getattr(choices, key):
                if level > 3:
                    raise PinError(f"{section} {key}: there is no level {level}", hint="levels are 0, 1, 2 and 3")


def _check_forbidden(space: Sequence[Configuration], pins: Pins, frame: Frame) -> None:
    """Raise an error for a forbidden mesh whose axes have names that no mesh has, so that it would forbid nothing."""
    if not pins.forbid.mesh:
        return
    names = {axis.name for configuration in _with_meshes(space, pins, frame) for axis in configuration.mesh.axes}
    for axes in pins.forbid.mesh:
        unknown = [name for name, _ in axes if name and name not in names]
        if unknown:
            sizes = "x".join(str(size) for _, size in axes)
            raise PinError(
                f"forbid mesh: there is no mesh axis {unknown[0]!r}",
                hint=f"forbid the sizes, mesh: {sizes}, or a degree, tp: 8; axes are {', '.join(sorted(names))}",
            )


def _check(key: str, values: Sequence[object], possible: Sequence[object], why: str) -> None:
    for value in values:
        if value not in possible:
            raise PinError(
                f"pin {key}: {value} cannot occur: {why}", hint=f"there {'are' if len(possible) > 1 else 'is'} "
                f"{', '.join(map(str, possible))}",
            )  # fmt: skip

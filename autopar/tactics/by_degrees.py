"""Plans by degrees as schedules of tactics."""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from math import prod

from autopar.configuration import divisors
from autopar.degrees import SHARD, Degrees
from autopar.folding.fold import Folded
from autopar.recompute import Recompute as Flavour
from autopar.sharding import Axis, Mesh
from autopar.tactics.records import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Offload,
    Pipeline,
    Recompute,
    SequenceParallel,
    Tactic,
    ZeRO,
)
from autopar.tactics.stages import blocks_per_stage, even_blocks, layers


def mesh_by_degrees(degrees: Degrees) -> Mesh:
    """Return the mesh of a stage: data axes outside, the tensor axis inside a node; degrees of 1 have no axis.

    Data-parallel devices that have different experts are an axis `ep` of their own next to the axis `cp`.
    Where fewer than all data-parallel devices share what ZeRO splits, these are neighbours on an axis of their own.
    """
    data = {"dp": degrees.data}
    if degrees.sharing < degrees.data:
        data = {"dp": degrees.data // degrees.sharing, SHARD: degrees.sharing}
    sizes = {**data, "ep": degrees.expert_axis, "cp": degrees.cp, "tp": degrees.tp}
    return Mesh.of(**({name: size for name, size in sizes.items() if size > 1} or {"dp": 1}))


def data_axes(degrees: Degrees) -> tuple[Axis, ...]:
    """Return the data axes of that mesh, along which devices have the same experts."""
    return tuple(axis for axis in mesh_by_degrees(degrees).axes if axis.name in ("dp", SHARD))


def sharing_devices(degrees: Degrees, folded: Folded) -> int:
    """Return how many data-parallel devices share what ZeRO splits of a model where that leaves each the least.

    A dim that so many do not divide is padded. What cannot be padded stays whole: dims that tensor parallelism splits,
    dims of fewer elements than devices.
    """
    held = {devices: sum(held_by_kind(folded, devices, degrees.tp).values()) for devices in divisors(degrees.data)}
    return min(held, key=lambda devices: (held[devices], devices))


def held_by_kind(folded: Folded, devices: int, tp: int) -> dict[int, float]:
    """Return how many elements of the parameters of each kind of blocks a device has left if so many share these.

    Those that tensor parallelism splits count as a whole.
    """
    held = dict.fromkeys((kind.id for kind in folded.kinds), 0.0)
    for parameter in folded.parameters:
        shape = parameter.value.shape
        size = parameter.count * prod(shape)
        held[parameter.producer.kind] += size * _held_share(devices, shape, tp)
    return held


def whole_by_degrees(degrees: Degrees, folded: Folded) -> float:
    """Return the share of a model's parameters that ZeRO leaves whole, as their dims are too short."""
    sharing = degrees.sharing
    held, every = (sum(held_by_kind(folded, devices, degrees.tp).values()) for devices in (sharing, 1))
    return 1.0 if sharing == 1 or not every else (held / every - 1 / sharing) / (1 - 1 / sharing)


def _held_share(devices: int, shape: Sequence[int], tp: int) -> float:
    """Return the share of a parameter that each of so many devices holds, padding included."""
    if devices == 1 or _divides(devices, shape, tp):
        return 1 / devices
    sizes = [size for size in shape if size >= devices]
    if not sizes or (tp > 1 and len(sizes) < 2):  # the tensor axis may split the one dim there is
        return 1.0
    return min(-(-size // devices) / size for size in sizes)


def _divides(devices: int, shape: Sequence[int], tp: int) -> bool:
    """Whether a dim can be split over so many devices, be it on top of a tensor axis, which splits one dim at most."""
    return sum(size % devices == 0 for size in shape) > 1 or any(size % (devices * tp) == 0 for size in shape)


def placing_by_degrees(degrees: Degrees) -> tuple[Tactic, ...]:
    """Return the tactics that say where values lie, on the axes of `mesh_by_degrees`.

    Experts are dealt out to the axis `ep`, on which all else is data parallel, to the context axis, and, where each is
    to stay whole, to the tensor axis, too. The vocabulary is split as Megatron-LM has it. ZeRO takes parameters of any
    number of dims, over all axes that would copy them but the tensor axis, and but `dp` where fewer share.
    """
    copying = [axis.name for axis in mesh_by_degrees(degrees).axes if axis.name != "tp" and axis.size > 1]
    found: list[Tactic] = []
    if "ep" in copying:
        found.append(ExpertParallel("ep"))
    if degrees.context_experts:
        found.append(ExpertParallel("cp", batch=False))
    if degrees.whole_experts:
        found.append(ExpertParallel("tp", batch=False))
    context = ContextParallel("cp", degrees.cp_kind) if degrees.cp_kind else ContextParallel("cp")
    found += [context if axis == "cp" else DataParallel(axis) for axis in copying if axis != "ep"]
    if degrees.tp > 1:
        found.append(Megatron("tp", vocabulary=True))
    if degrees.sequence_parallel:
        found.append(SequenceParallel("tp"))
    if degrees.zero:
        apart = degrees.sharing < degrees.data
        found += [ZeRO(degrees.zero, axis, min_dims=1, pads=True) for axis in copying if not (apart and axis == "dp")]
    return tuple(found)


def stages_by_degrees(degrees: Degrees, folded: Folded, first_layers: int = 0) -> tuple[Tactic, ...]:
    """Return the tactics that say what stages there are, in which order they run and what they recompute.

    Args:
        degrees: The plan.
        folded: The graph of one microbatch.
        first_layers: Layers of every stage, the first ones, that recompute, as Megatron-LM's block method has it; 0
            for all.

    Raises:
        TacticError: If layers are given that the model does not have.
    """
    joint = degrees.schedule in ("", "1f1b")
    schedule = "interleaved" if degrees.interleave > 1 and joint else degrees.schedule or None
    stages = blocks_per_stage(folded, degrees.layers, degrees.predictions) if degrees.layers else degrees.pp
    pipeline = Pipeline(stages, schedule, degrees.num_microbatches, degrees.interleave)
    found: list[Tactic] = [pipeline]
    if degrees.recompute != "none" and not first_layers and degrees.recompute_every == 1:
        found.append(Recompute(degrees.recompute))
    elif degrees.recompute != "none":
        found += _some_layers(degrees, folded, first_layers)
    if degrees.offload:
        found.append(Offload(degrees.offload))
    return tuple(found)


def _some_layers(degrees: Degrees, folded: Folded, first_layers: int) -> list[Tactic]:
    """Return the tactics by which the first layers of every stage recompute, or every n-th one."""
    repeated = set(layers(folded))
    found: list[Tactic] = []
    for stage, (start, stop) in enumerate(ranges_by_degrees(degrees, folded)):
        again = [index for index in range(start, stop) if index in repeated]
        again = again[: first_layers or None][degrees.recompute_every - 1 :: degrees.recompute_every]
        words = [degrees.recompute if index in again else str(Flavour.NONE) for index in range(start, stop)]
        runs = " ".join(f"{word}*{len(list(run))}" for word, run in groupby(words))
        found.append(Recompute(runs, (stage,)))
    return found


def ranges_by_degrees(degrees: Degrees, folded: Folded) -> tuple[tuple[int, int], ...]:
    """Return the range of blocks of every stage.

    Raises:
        TacticError: If there are fewer blocks than stages, or other layers than given.
    """
    given = degrees.layers
    counts = blocks_per_stage(folded, given, degrees.predictions) if given else even_blocks(folded, degrees.num_stages)
    ends = [0, *accumulate(counts)]
    return tuple(pairwise(ends))

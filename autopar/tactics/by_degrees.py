"""Plans by degrees as schedules of tactics."""

from itertools import accumulate, pairwise

from autopar.degrees import Degrees
from autopar.formulate.fold import Folded
from autopar.sharding import Mesh
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
from autopar.tactics.stages import blocks_per_stage, even_blocks


def mesh_by_degrees(degrees: Degrees) -> Mesh:
    """Return the mesh of a stage: data axes outside, the tensor axis inside a node; degrees of 1 have no axis."""
    sizes = {"dp": degrees.dp // degrees.ep, "cp": degrees.cp, "ep": degrees.ep, "tp": degrees.tp}
    return Mesh.of(**({name: size for name, size in sizes.items() if size > 1} or {"dp": 1}))


def placing_by_degrees(degrees: Degrees) -> tuple[Tactic, ...]:
    """Return the tactics that say where values lie, on the axes of `mesh_by_degrees`.

    Experts are dealt out to the axis `ep`, on which all else is data parallel. The vocabulary is split as Megatron-LM
    has it. ZeRO takes parameters of any number of dims, over all axes that would copy them but the tensor axis.
    """
    copying = [axis.name for axis in mesh_by_degrees(degrees).axes if axis.name != "tp" and axis.size > 1]
    found: list[Tactic] = []
    if "ep" in copying:
        found.append(ExpertParallel("ep"))
    found += [ContextParallel(axis) if axis == "cp" else DataParallel(axis) for axis in copying if axis != "ep"]
    if degrees.tp > 1:
        found.append(Megatron("tp", vocabulary=True))
    if degrees.sequence_parallel:
        found.append(SequenceParallel("tp"))
    if degrees.zero:
        found += [ZeRO(degrees.zero, axis, min_dims=1) for axis in copying]
    return tuple(found)


def stages_by_degrees(degrees: Degrees, folded: Folded) -> tuple[Tactic, ...]:
    """Return the tactics that say what stages there are, in which order they run and what they recompute.

    Raises:
        TacticError: If layers are given that the model does not have.
    """
    schedule = "interleaved" if degrees.interleave > 1 and degrees.schedule == "1f1b" else degrees.schedule
    stages = blocks_per_stage(folded, degrees.layers) if degrees.layers else degrees.pp
    pipeline = Pipeline(stages, schedule, degrees.num_microbatches, degrees.interleave)
    found: list[Tactic] = [pipeline]
    if degrees.recompute != "none":
        found.append(Recompute(degrees.recompute))
    if degrees.offload:
        found.append(Offload(degrees.offload))
    return tuple(found)


def ranges_by_degrees(degrees: Degrees, folded: Folded) -> tuple[tuple[int, int], ...]:
    """Return the range of blocks of every stage.

    Raises:
        TacticError: If there are fewer blocks than stages, or other layers than given.
    """
    given = degrees.layers
    counts = blocks_per_stage(folded, given) if given else even_blocks(folded, degrees.num_stages)
    ends = [0, *accumulate(counts)]
    return tuple(pairwise(ends))

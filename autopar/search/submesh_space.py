"""The declared space of pipelines with unequal stages: devices and meshes that a stage may have.

A stage is on a part of a node, whose number of devices divides the node or is a power of two, or on whole nodes, whose
number divides that of all nodes or is 2^i or 3 2^i. All its nodes are in one group of equal nodes. A stage on a part of
a node starts at any device of the node, a stage on whole nodes at the first device of a node.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.configuration import PLAIN, Configuration, divisors, meshes
from autopar.sharding import Mesh
from autopar.units import format_seconds

MOST_SUBMESHES = 20
"""Meshes that are searched at most; those whose size is furthest from the best equal stages are left out."""

MOST_STAGES = 16
"""Stages of a pipeline with unequal stages at most."""


@dataclass(frozen=True, slots=True)
class Submesh:
    """A mesh that stages may have, with its places in the cluster.

    Attributes:
        mesh: The mesh.
        starts: First device of each place; all places have equal links inside.
        group: Number of its group of equal nodes.
    """

    mesh: Mesh
    starts: tuple[int, ...]
    group: int = 0

    @property
    def devices(self) -> range:
        """The devices of its first place."""
        return range(self.starts[0], self.starts[0] + self.mesh.size)


@dataclass(frozen=True, slots=True)
class UnequalSpace:
    """The space of pipelines with unequal stages.

    Attributes:
        submeshes: Meshes that a stage may have.
        stages: Numbers of stages.
        microbatches: Numbers of microbatches per step.
        schedule: The schedule.
        devices: Number of devices of all stages.
    """

    submeshes: tuple[Submesh, ...]
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    schedule: str
    devices: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of a stage, in ascending order."""
        return tuple(sorted({submesh.mesh.size for submesh in self.submeshes}))


def unequal(space: Sequence[Configuration], cluster: Cluster, gpus: int, num_blocks: int) -> UnequalSpace | None:
    """Return the space of unequal stages of a job; None if it has none.

    Args:
        space: Declared configurations with equal stages, which determine the microbatches and the schedule.
        cluster: The devices.
        gpus: Number of devices.
        num_blocks: Length of the chain of blocks.
    """
    schedules = {each.schedule for each in space} & (PLAIN - {"gpipe"})
    most = min(num_blocks, gpus, MOST_STAGES)
    found = tuple(submeshes(cluster, gpus))
    if not schedules or most < 2 or not found:
        return None
    (schedule,) = schedules
    counts = tuple(sorted({each.num_microbatches for each in space if each.schedule == schedule}))
    return UnequalSpace(found, tuple(range(2, most + 1)), counts, schedule, gpus)


def submeshes(cluster: Cluster, gpus: int) -> Iterator[Submesh]:
    """Yield the meshes that a stage may have.

    >>> from autopar.cluster import PRESETS
    >>> [f"{found.mesh} at {found.starts}" for found in submeshes(PRESETS["h100"].of_job(4), 4)]
    ['inner=1 at (0, 1, 2, 3)', 'inner=2 at (0, 1, 2)']
    """
    first = 0
    groups = [(group.cluster, group.devices) for group in cluster.groups] or [(cluster, gpus)]
    for number, (group, devices) in enumerate(groups):
        end, node = min(gpus, first + devices), group.devices_per_node
        inside = [size for size in range(1, node + 1) if node % size == 0 or size & (size - 1) == 0]
        whole = [node * count for count in _counts((end - first) // node) if count > 1]
        for size in (*inside, *whole):
            starts = tuple(start for start in range(first, end - size + 1) if _is_place(start - first, size, node))
            if starts and size < gpus:
                yield from (Submesh(mesh, starts, number) for mesh in meshes(size, node))
        first = end


def nearest_submeshes(found: Sequence[Submesh], size: float) -> tuple[Submesh, ...]:
    """Return at most `MOST_SUBMESHES` of the meshes, those nearest to a size; all meshes of a size or none."""
    kept: list[Submesh] = []
    for own in sorted({each.mesh.size for each in found}, key=lambda own: (max(own / size, size / own), own)):
        more = [each for each in found if each.mesh.size == own]
        if kept and len(kept) + len(more) > MOST_SUBMESHES:
            break
        kept += more
    return tuple(each for each in found if each in kept)


def _counts(num_nodes: int) -> list[int]:
    """Return the numbers of whole nodes of a stage."""
    rounds = {factor * 2**power for factor in (1, 3) for power in range(num_nodes.bit_length())}
    return sorted(count for count in {*divisors(max(1, num_nodes)), *rounds} if count <= num_nodes)


def _is_place(start: int, size: int, node: int) -> bool:
    """Whether a stage of `size` devices may start `start` devices after the start of its group."""
    return start % node == 0 if size >= node else start % node + size <= node


@dataclass(slots=True)
class UnequalResult:
    """Result of the search of unequal stages.

    Attributes:
        space: The declared space.
        opened: Numbers of microbatches that were opened.
        floor: Lower bound on the plans with other numbers, in seconds; infinity without any.
        bound: Lower bound on the plans with opened numbers, in seconds; infinity without any.
        submeshes: Meshes that were searched.
    """

    space: UnequalSpace
    opened: tuple[int, ...] = ()
    floor: float = math.inf
    bound: float = math.inf
    submeshes: tuple[Submesh, ...] = ()

    def words(self, best: float) -> tuple[str, ...]:
        """Describe what was searched and what was not, given the best objective in seconds."""
        space, found = self.space, []
        stages = f"pipelines of {_range(space.stages)} stages with meshes of their own"
        if self.opened:
            grids = dict.fromkeys("×".join(map(str, submesh.mesh.shape)) for submesh in self.submeshes)
            found.append(
                f"{stages}, {', '.join(grids)}; {', '.join(map(str, self.opened))} microbatches; {space.schedule}"
            )
        if math.isfinite(self.floor):
            rest = [count for count in space.microbatches if count not in self.opened]
            lead = "excluded by their bound" if self.floor >= best else "not opened"
            found.append(
                f"{lead}: {stages}, of {', '.join(map(str, space.sizes))} device{'s' if space.sizes[-1] > 1 else ''}, "
                f"and {', '.join(map(str, rest))} "
                f"microbatches; no plan there is faster than {format_seconds(self.floor)}"
            )
        return tuple(found)


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first} to {last}" if last - first < len(numbers) else str(list(numbers))

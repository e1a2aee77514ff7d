"""The declared space of shares: rows of unequal devices that run different numbers of microbatches.

A node is a mesh and the samples of a microbatch of one row. A row lies in one group of equal nodes, within a node or on
whole nodes, on meshes of one or two axes; rows of a group run equally many microbatches. All rows have the same
placements, so that they hold the same bytes, within the limit of the group with the least memory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.configuration import data_major_meshes, divisors
from autopar.sharding import Mesh
from autopar.shares import Share
from autopar.units import format_seconds


@dataclass(frozen=True, slots=True)
class ShareNode:
    """A node of the space of shares.

    Attributes:
        mesh: All devices; rows are the coordinates on the major axis.
        samples: Samples of a microbatch of one row.
    """

    mesh: Mesh
    samples: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.mesh.shape[0]

    @property
    def row_devices(self) -> int:
        """Devices of a row."""
        return self.mesh.size // self.num_rows


@dataclass(frozen=True, slots=True)
class ShareSpace:
    """The space of shares on unequal groups.

    Attributes:
        nodes: Meshes of all devices, with the samples of a microbatch of one row.
        devices: Devices of each group.
        global_batch: Samples per step.
    """

    nodes: tuple[ShareNode, ...]
    devices: tuple[int, ...]
    global_batch: int

    def rows(self, node: ShareNode) -> tuple[int, ...]:
        """Return the rows of each group."""
        size = node.row_devices
        return tuple(devices // size for devices in self.devices)

    def total(self, node: ShareNode) -> int:
        """Return the microbatches of all rows together."""
        return self.global_batch // node.samples

    def shares(self, node: ShareNode, counts: Sequence[int]) -> tuple[Share, ...]:
        """Return the shares of the groups, given the microbatches of each of their rows."""
        found, first = [], 0
        for rows, count in zip(self.rows(node), counts, strict=True):
            found.append(Share((first, first + rows), count))
            first += rows
        return tuple(found)


def share_space(
    cluster: Cluster, gpus: int, global_batch: int, mode: str, fixed_batch: int | None
) -> ShareSpace | None:
    """Return the space of shares of a job; None if its devices are all alike, or it has none.

    Args:
        cluster: The devices.
        gpus: Number of devices.
        global_batch: Samples per step.
        mode: "train" or "infer".
        fixed_batch: Samples the model insists on per microbatch; None if it takes any number.
    """
    devices, left = list[int](), gpus
    for group in cluster.groups:
        devices.append(min(left, group.devices))
        left -= devices[-1]
    devices = [own for own in devices if own]
    if mode != "train" or len(devices) < 2 or fixed_batch is not None:
        return None
    nodes = [group.cluster.devices_per_node for group in cluster.groups[: len(devices)]]
    found = [
        ShareNode(mesh, samples)
        for size in divisors(math.gcd(*devices))
        if all(node % size == 0 or size % node == 0 for node in nodes)
        for mesh in _meshes(gpus, size, cluster.devices_per_node)
        for samples in divisors(global_batch)
        if global_batch // samples >= gpus // size
    ]
    return ShareSpace(tuple(found), tuple(devices), global_batch) if found else None


def _meshes(gpus: int, size: int, devices_per_node: int) -> Iterator[Mesh]:
    """Yield the meshes of all devices whose rows have `size` devices."""
    if size == 1:
        yield Mesh.of(inner=gpus)
        return
    yield Mesh.of(outer=gpus // size, inner=size)
    yield from (mesh for mesh in data_major_meshes(gpus, devices_per_node) if mesh.size // mesh.shape[0] == size)


@dataclass(slots=True)
class ShareResult:
    """Result of the search of shares.

    Attributes:
        space: The declared space.
        opened: Nodes that were opened.
        bound: Lower bound on the plans of opened nodes, in seconds; infinity without any.
        floor: Lower bound on the plans of the others, in seconds; infinity without any.
    """

    space: ShareSpace
    opened: tuple[ShareNode, ...] = ()
    bound: float = math.inf
    floor: float = math.inf

    def words(self, best: float) -> tuple[str, ...]:
        """Describe what was searched and what was not, given the best objective in seconds."""
        space, found = self.space, []
        what = "data parallelism whose rows of devices take shares of the batch by their speed"
        if self.opened:
            grids = dict.fromkeys("×".join(map(str, node.mesh.shape)) for node in self.opened)
            sizes = sorted({node.samples for node in self.opened})
            found.append(
                f"{what}, ZeRO-1 at most between rows; {', '.join(grids)}; microbatches of "
                f"{', '.join(map(str, sizes))} samples per row, any numbers of them"
            )
        if math.isfinite(self.floor):
            lead = "excluded by their bound" if self.floor >= best else "not opened"
            found.append(
                f"{lead}: {len(space.nodes) - len(self.opened)} other meshes and microbatches of shares; no plan there "
                f"is faster than {format_seconds(self.floor)}"
            )
        return tuple(found)

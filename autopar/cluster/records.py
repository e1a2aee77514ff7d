"""What a cluster is: devices, nodes, and the tiers of links between them.

Seconds, bytes, FLOP/s and bytes/s throughout; `autopar.cluster.links` has the links.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cluster.checks import require_not_negative, require_positive, require_share, require_whole
from autopar.cluster.host import Host, weakest_host
from autopar.cluster.links import Link, Nics
from autopar.errors import ClusterError
from autopar.units import format_quantity

_LESS_IS_BETTER = frozenset({"launch", "host_launch"})
"""Fields of a device of which the slowest one has the most."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Attributes:
        name: Product name.
        peaks: Dense FLOP/s of matrix products by class of number: "half" (float16, bfloat16), "tf32", "single"
            (float32), "fp8", ...
        memory: Bytes.
        memory_bandwidth: Bytes/s of the data sheet.
        launch: Seconds every matrix product takes however small it is.
        gemm_efficiency: Share of the peak that large matrix products and convolutions reach.
        attention_efficiency: Share of the peak that fused attention reaches.
        bandwidth_efficiency: Share of `memory_bandwidth` that memory-bound kernels reach.
        num_sms: Multiprocessors: as many tiles of a matrix product are computed at a time; 0 if products of all dims
            reach `gemm_efficiency`.
        batched_efficiency: Share of the peak that batches of small products reach, those of unfused attention.
        efficiencies: `gemm_efficiency` of classes of numbers where it is another one, in the order of `peaks`.
        any_order: Whether products of 8 bits read operands in either order, so that no transposed copy is written.
        host_launch: Seconds between kernels that a host launches one after the other, with nothing to hide behind; 0
            for no more than `launch`.
    """

    name: str
    peaks: tuple[tuple[str, float], ...]
    memory: float
    memory_bandwidth: float
    launch: float
    gemm_efficiency: float
    attention_efficiency: float
    bandwidth_efficiency: float
    num_sms: int = 0
    batched_efficiency: float = 0.4
    efficiencies: tuple[tuple[str, float], ...] = ()
    any_order: bool = False
    host_launch: float = 0.0

    def __post_init__(self) -> None:
        if not self.peaks:
            raise ClusterError(f"device {self.name!r} has no peaks", hint="give at least one, e.g. half: 312 TFLOP/s")
        owner = f"device {self.name!r}"
        require_positive(owner, **{f"peaks.{name}": value for name, value in self.peaks})
        require_positive(owner, memory=self.memory, memory_bandwidth=self.memory_bandwidth, launch=self.launch)
        require_not_negative(owner, host_launch=self.host_launch)
        require_share(
            owner,
            gemm_efficiency=self.gemm_efficiency,
            attention_efficiency=self.attention_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
            batched_efficiency=self.batched_efficiency,
        )
        require_share(owner, **{f"efficiencies.{name}": value for name, value in self.efficiencies})
        for name, _ in self.efficiencies:
            self.peak(name)
        if self.num_sms < 0:
            raise ClusterError(f"{owner}: num_sms is {self.num_sms}", hint="num_sms is a whole number, 0 if unknown")

    def peak(self, numbers: str) -> float:
        """Return the dense FLOP/s of matrix products of a class of numbers.

        Raises:
            ClusterError: If the device states no peak for it.
        """
        for name, value in self.peaks:
            if name == numbers:
                return value
        known = ", ".join(name for name, _ in self.peaks)
        raise ClusterError(f"device {self.name!r} has no peak for {numbers!r} numbers", hint=f"it has {known}")

    def efficiency(self, numbers: str) -> float:
        """Return the share of the peak that large products of a class of numbers reach."""
        return dict(self.efficiencies).get(numbers, self.gemm_efficiency)

    def to_dict(self) -> dict[str, object]:
        """Return the device as the mapping a cluster file holds."""
        other: dict[str, object] = {"efficiencies": dict(self.efficiencies)} if self.efficiencies else {}
        if self.any_order:
            other["any_order"] = True
        if self.host_launch:
            other["host_launch"] = format_quantity(self.host_launch, "s")
        return {
            "name": self.name,
            "peaks": {name: format_quantity(value, "FLOP/s") for name, value in self.peaks},
            "memory": format_quantity(self.memory, "B"),
            "memory_bandwidth": format_quantity(self.memory_bandwidth, "B/s"),
            "launch": format_quantity(self.launch, "s"),
            "gemm_efficiency": self.gemm_efficiency,
            "attention_efficiency": self.attention_efficiency,
            "bandwidth_efficiency": self.bandwidth_efficiency,
            "num_sms": self.num_sms,
            "batched_efficiency": self.batched_efficiency,
            **other,
        }


@dataclass(frozen=True, slots=True)
class Domain:
    """Devices that the tiers so far connect, and the link from one such domain to the next.

    Attributes:
        devices: Devices of a domain: a rail group, a pod, a slice of accelerators.
        link: Link between domains; its bandwidth is one device's share.
    """

    devices: int
    link: Link

    def to_dict(self, *, editable: bool = False) -> dict[str, object]:
        """Return the domain as the mapping a cluster file holds; `editable` as of `Link.to_dict`."""
        return {"devices": self.devices, "link": self.link.to_dict(editable=editable)}


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes of a cluster that has other nodes as well.

    Attributes:
        nodes: How many of them there are.
        cluster: What they are.
    """

    nodes: int
    cluster: "Cluster"

    def __post_init__(self) -> None:
        require_whole(f"group {self.cluster.name!r}", 1, nodes=self.nodes)
        if self.cluster.groups:
            raise ClusterError(
                f"group {self.cluster.name!r} has groups of its own", hint="list all groups in one cluster"
            )

    @property
    def devices(self) -> int:
        """Devices of the group."""
        return self.nodes * self.cluster.devices_per_node

    def to_dict(self, *, editable: bool = False) -> dict[str, object]:
        """Return the group as the mapping a cluster file holds; `editable` as of `Link.to_dict`."""
        return {"nodes": self.nodes, "cluster": self.cluster.to_dict(editable=editable)}


@dataclass(frozen=True, slots=True)
class Numbering:
    """Devices numbered group by group where the groups of a pipeline share nodes.

    On the machine, blocks of `block` devices of every group follow each other, then the next blocks of all groups:
    pipelines inside, data parallelism around them, as with `--use-tp-pp-dp-mapping` of Megatron-LM.

    >>> Numbering(groups=2, size=4, block=2).place(np.arange(8)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]

    Attributes:
        groups: Groups of the pipeline.
        size: Devices of a group.
        block: Devices of a group that are neighbours.
    """

    groups: int
    size: int
    block: int

    def place(self, devices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where devices lie, by their numbers node by node."""
        row, inside = np.divmod(devices % self.size, self.block)
        return np.asarray((row * self.groups + devices // self.size) * self.block + inside)

    def in_node(self, devices_per_node: int) -> int:
        """Return how many devices of a group a node has; 0 if nodes have different numbers of them."""
        if devices_per_node <= self.block:
            return devices_per_node if self.block % devices_per_node == 0 else 0
        if devices_per_node <= self.groups * self.block:
            return self.block if devices_per_node % self.block == 0 else 0
        return 0 if devices_per_node % (self.groups * self.block) else devices_per_node // self.groups


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, as many as a job needs, or groups of such nodes. Devices are numbered node by node.

    Of a cluster with groups, `device`, `devices_per_node`, `intra` and `inter` describe what holds on all of its
    devices (`Cluster.mixed`); `on` gives the part that some devices lie in.

    Attributes:
        name: Name of the preset or file.
        device: What each of them is.
        devices_per_node: Devices that `intra` connects.
        intra: Link between devices of one node.
        inter: Link between devices of different nodes.
        domains: Wider domains of nodes, the narrowest first, if nodes do not all reach each other alike.
        groups: Different nodes in the order of their devices; none if all nodes are equal.
        between: Link between groups; None if there are none.
        host: The memory beside the devices and the link to it; None if unknown, and then nothing can be offloaded.
        gpu_hour_price: Price of a device for an hour, in whatever currency; None if unknown.
        numbered: The numbering of devices, and the cluster whose nodes have them all; None if they are numbered node by
            node. Of a numbered cluster, `devices_per_node` is the number of devices of one group in a node.
    """

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link
    domains: tuple[Domain, ...] = ()
    groups: tuple[NodeGroup, ...] = ()
    between: Link | None = None
    host: Host | None = None
    gpu_hour_price: float | None = None
    numbered: "tuple[Numbering, Cluster] | None" = None

    def __post_init__(self) -> None:
        owner = f"cluster {self.name!r}"
        require_whole(owner, 1, devices_per_node=self.devices_per_node)
        if self.gpu_hour_price is not None:
            require_positive(owner, gpu_hour_price=self.gpu_hour_price)
        if self.intra.nics is not None:
            raise ClusterError(f"{owner}: intra has nics", hint="NICs connect nodes: give them to inter")
        if self.intra.torus and math.prod(self.intra.torus) != self.devices_per_node:
            raise ClusterError(
                f"{owner}: devices_per_node is {self.devices_per_node}, but the torus of intra has "
                f"{math.prod(self.intra.torus)} devices",
                hint=f"write devices_per_node: {math.prod(self.intra.torus)}",
            )
        if self.inter.torus or any(domain.link.torus for domain in self.domains):
            raise ClusterError(f"{owner}: a torus lies between nodes", hint="a torus is the intra link of its slice")
        if self.inter.nics is not None and self.inter.bandwidth != self.inter.nics.share(self.devices_per_node):
            raise ClusterError(
                f"{owner}: inter has a bandwidth that its nics do not give", hint="state nics or bandwidth, not both"
            )
        inner = self.devices_per_node
        for domain in self.domains:
            require_whole(owner, 1, devices=domain.devices)
            if domain.devices <= inner or domain.devices % inner:
                raise ClusterError(
                    f"{owner}: a domain of {domain.devices} devices does not consist of domains of {inner}",
                    hint=f"devices is a multiple of {inner}, e.g. {2 * inner}",
                )
            inner = domain.devices

    def __hash__(self) -> int:
        """Hash by name: equal clusters have equal names, and costs look clusters up often."""
        return hash(self.name)

    @classmethod
    def mixed(cls, name: str, groups: tuple[NodeGroup, ...], between: Link) -> "Cluster":
        """Return the cluster of several groups of nodes that the link `between` connects.

        Where devices of several groups work together, the slowest sets the time: the device has the least of every
        figure, the links are the slowest of each tier, and a node has as many devices as divide all nodes.

        Args:
            name: Its name.
            groups: The groups in the order of their devices.
            between: Link between groups, as one device's share.

        Raises:
            ClusterError: If there are no groups, or their devices share no class of numbers.
        """
        if not groups:
            raise ClusterError(f"cluster {name!r} has no groups", hint="list at least one")
        require_whole(f"cluster {name!r}", 1, devices=sum(group.devices for group in groups))
        members = [group.cluster for group in groups]
        if any(member.domains for member in members):
            raise ClusterError(f"cluster {name!r}: a group has domains", hint="groups have an intra and an inter link")
        hosts = [member.host for member in members if member.host is not None]
        return cls(
            name,
            _weakest_device(name, [member.device for member in members]),
            math.gcd(*(member.devices_per_node for member in members)),
            _slowest([member.intra for member in members]),
            _slowest([*(member.inter for member in members), between]),
            groups=groups,
            between=between,
            host=weakest_host(hosts) if len(hosts) == len(members) else None,
        )

    @property
    def tiers(self) -> tuple[tuple[int, Link], ...]:
        """The hierarchy from the inside out: devices of an inner domain (1 at first) and the link between them."""
        sizes = (1, self.devices_per_node, *(domain.devices for domain in self.domains))
        return tuple(zip(sizes, (self.intra, self.inter, *(domain.link for domain in self.domains)), strict=True))

    @cached_property
    def _spans(self) -> tuple[tuple[int, "Cluster"], ...]:
        """End of each group in the numbering of devices, and its cluster."""
        spans, end = [], 0
        for group in self.groups:
            end += group.devices
            spans.append((end, group.cluster))
        return tuple(spans)

    def hour_price(self, devices: int) -> float | None:
        """Return the price of the first devices for an hour; None if it is unknown of one of them."""
        if not self.groups:
            return None if self.gpu_hour_price is None else devices * self.gpu_hour_price
        total = 0.0
        for group in self.groups:
            used = min(devices, group.devices)
            price = group.cluster.hour_price(used)
            if used and price is None:
                return None
            total, devices = total + (price or 0.0), devices - used
        return total

    def priced(self, gpu_hour_price: float) -> "Cluster":
        """Return the cluster at another price of a device for an hour, the same in all groups of nodes."""
        groups = tuple(replace(group, cluster=group.cluster.priced(gpu_hour_price)) for group in self.groups)
        return replace(self, gpu_hour_price=gpu_hour_price, groups=groups)

    def linked(self, *, intra: float | None = None, inter: float | None = None, nics: Nics | None = None) -> "Cluster":
        """Return the cluster with other bandwidths of its links.

        Args:
            intra: Bytes/s each device reaches inside a node.
            inter: Bytes/s each device reaches between nodes.
            nics: Network cards of a node, in place of `inter`.

        Raises:
            ClusterError: If the cluster has groups of different nodes, or both `inter` and `nics` are given.
        """
        if self.groups:
            raise ClusterError(
                f"cluster {self.name!r} has groups of different nodes, whose links differ",
                hint="state the links of each group in a cluster file; autopar clusters NAME prints one to begin with",
            )
        if inter is not None and nics is not None:
            raise ClusterError(
                "the network between nodes is stated twice, by its bandwidth and by its cards", hint="state one of them"
            )
        bandwidth = inter if nics is None else nics.share(self.devices_per_node)
        return replace(
            self,
            intra=self.intra if intra is None else self.intra.at(intra),
            inter=self.inter if bandwidth is None else self.inter.at(bandwidth, nics),
        )

    def total_peak(self, numbers: str, devices: int) -> float:
        """Return the dense FLOP/s of the first devices together, for a class of numbers.

        Raises:
            ClusterError: If a device states no peak for it.
        """
        if not self.groups:
            return devices * self.device.peak(numbers)
        total = 0.0
        for group in self.groups:
            used = min(devices, group.devices)
            total, devices = total + group.cluster.total_peak(numbers, used), devices - used
        return total

    def known_host(self) -> Host:
        """Return the host of a device.

        Raises:
            ClusterError: If the cluster does not say.
        """
        if self.host is None:
            raise ClusterError(
                f"cluster {self.name!r} does not say how its devices reach host memory: nothing can be offloaded",
                hint="give it a host with tier, memory, devices, to_host and to_device, or offload nothing",
            )
        return self.host

    def host_start(self, device: int) -> int:
        """Return the first device of the host of a device, by its number node by node."""
        if self.numbered is not None:
            numbering, machine = self.numbered
            return machine.host_start(int(numbering.place(np.array(device))))
        start = self._start(device) if self.groups else 0
        devices = self.group_of(device).known_host().devices
        return start + (device - start) // devices * devices

    def group_of(self, device: int) -> "Cluster":
        """Return the group of equal nodes that a device lies in; the cluster itself if all nodes are equal.

        Raises:
            ClusterError: If the groups have fewer devices.
        """
        if not self.groups:
            return self
        for end, cluster in self._spans:
            if device < end:
                return cluster
        raise ClusterError(
            f"cluster {self.name!r} has {self._spans[-1][0]} devices, none with number {device}",
            hint=f"ask for at most {self._spans[-1][0]} devices",
        )

    def on(self, devices: range) -> "Cluster":
        """Return what some devices work on: their group if they lie in one, else the weakest of the whole cluster.

        A mesh on a cluster starts with a node. Where devices start inside a node and go on beyond it, nodes are taken
        to be so small that none is shared by a part of the mesh: with 8 devices per node, devices 4 to 11 work on nodes
        of 4.

        >>> from autopar.cluster import PRESETS
        >>> [PRESETS["h100"].on(range(*devices)).devices_per_node for devices in ((2, 6), (4, 12), (8, 24))]
        [8, 4, 8]
        """
        group, start = self._group(devices)
        return group if group is self and self.groups else group._from(devices[0] - start, devices[-1] - start)

    def on_rows(self, row: range) -> "Cluster":
        """Return what rows of equal devices work on, given one of them, where rows of other groups work beside them.

        Devices and links of a row are those of its group; rows meet on the slowest link of the whole cluster.

        Raises:
            ClusterError: If the row lies in several groups.
        """
        if not self.groups:
            return self
        group = self.on(row)
        if group is self:
            raise ClusterError(
                f"devices {row[0]} to {row[-1]} lie in several groups of cluster {self.name!r}",
                hint="rows with different shares lie in one group each",
            )
        if len(row) <= self.devices_per_node:
            return replace(group, devices_per_node=self.devices_per_node, inter=self.inter)
        nodes = -(-len(row) // group.devices_per_node)
        return replace(group, domains=(Domain(nodes * group.devices_per_node, self.inter),))

    def group_start(self, device: int) -> int:
        """Return the first device of the group of equal nodes that a device lies in."""
        return self._start(device) if self.groups else 0

    def one_kind(self, devices: range) -> bool:
        """Whether some devices lie in one group of equal nodes."""
        return not self.groups or self._group(devices)[0] is not self

    def _group(self, devices: range) -> tuple["Cluster", int]:
        """Return the one group that some devices lie in, or else the cluster itself, and its first device."""
        if not self.groups:
            return self, 0
        first, last = self.group_of(devices[0]), self.group_of(devices[-1])
        start = self._start(devices[0])
        return (first, start) if first is last and start == self._start(devices[-1]) else (self, 0)

    def _from(self, first: int, last: int) -> "Cluster":
        """Return the cluster as a mesh from one device to another meets it."""
        if self.intra.torus:
            return self  # a slice is a node of its own

        def least(size: int) -> int:
            return size if first // size == last // size else math.gcd(first, size)

        node, beyond, domains = least(self.devices_per_node), self.inter, list[Domain]()
        for domain in self.domains:
            size = least(domain.devices)
            if size > (domains[-1].devices if domains else node):
                domains.append(replace(domain, devices=size))
            elif domains:  # what leaves the domain inside leaves this one too
                domains[-1] = replace(domain, devices=size)
            else:
                beyond = domain.link
        if (node, tuple(domains)) == (self.devices_per_node, self.domains):
            return self
        return replace(self, devices_per_node=node, inter=replace(beyond, nics=None), domains=tuple(domains))

    def by_group(self, groups: int, size: int, block: int) -> "Cluster":
        """Return the cluster with devices numbered group by group where the groups of a pipeline share nodes.

        Collectives of a group find fewer of its devices in a node, and neighbouring groups meet in one.

        Args:
            groups: Groups of the pipeline.
            size: Devices of a group.
            block: Devices of a group that are neighbours.

        Raises:
            ClusterError: If nodes would have different numbers of devices of a group, or are of several kinds.

        >>> from autopar.cluster import PRESETS
        >>> found = PRESETS["h100"].by_group(groups=4, size=16, block=2)
        >>> found.devices_per_node, found.tier(0, 2), [found.boundary_tier(16 * group, 16) for group in range(3)]
        (2, 1, [0, 0, 0])
        """
        if self.numbered is not None:
            return self.numbered[1].by_group(groups, size, block)
        if self.groups or self.domains or self.intra.torus:
            raise ClusterError(
                f"cluster {self.name!r}: pipelines inside nodes need equal nodes, none wider and no torus",
                hint="leave the order of stages at its default",
            )
        numbering = Numbering(groups, size, block)
        inside = numbering.in_node(self.devices_per_node)
        if block < 1 or size % block or not inside:
            raise ClusterError(
                f"pipelines of {groups} groups with {block} neighbouring devices each do not lie evenly in nodes of "
                f"{self.devices_per_node} devices",
                hint="choose degrees that divide a node",
            )
        inter = replace(self.inter, nics=None)
        return replace(self, devices_per_node=inside, inter=inter, numbered=(numbering, self))

    @property
    def by_node(self) -> "Cluster":
        """The cluster with devices numbered node by node."""
        return self if self.numbered is None else self.numbered[1]

    def of_job(self, devices: int) -> "Cluster":
        """Return what a job of so many devices gets: a slice of its size of a torus, or a part of each node.

        A part of one node, where the job would otherwise count as one that straddles nodes; of several nodes, if equal
        parts of at least 8/9 make up the job: 64 of the 72 devices of a rack are customary.

        >>> from autopar.cluster import PRESETS
        >>> PRESETS["tpu-v5p"].of_job(256).intra.torus, PRESETS["h100"].of_job(6).devices_per_node
        ((4, 8, 8), 6)
        >>> PRESETS["gb200"].of_job(128).devices_per_node
        64

        Of several groups it gets the first ones; a job inside the first group has nothing to do with the others.
        """
        if self.groups and devices <= self.groups[0].devices:
            return self.groups[0].cluster.of_job(devices)
        if self.groups or self.domains or devices % self.devices_per_node == 0 or self.devices_per_node % devices == 0:
            used = self.devices_per_node if not self.intra.torus else min(devices, self.devices_per_node)
        elif devices < self.devices_per_node:
            used = devices
        else:
            used = next(part for part in range(self.devices_per_node, 0, -1) if devices % part == 0)
            if 9 * used < 8 * self.devices_per_node or self.intra.torus:
                used = self.devices_per_node
        if used == self.devices_per_node:
            return self
        torus = squarest(used, self.intra.torus, self.intra.wraps) if self.intra.torus else ()
        if torus is None:
            return self
        inter = self.inter
        if inter.nics is not None:  # a device alone does not use the NICs of others
            most = max(inter.nics.share(inter.nics.count), inter.bandwidth)
            inter = replace(inter, bandwidth=min(inter.nics.share(used), most), nics=None)
        return replace(self, devices_per_node=used, intra=replace(self.intra, torus=torus), inter=inter)

    def _start(self, device: int) -> int:
        """Return the first device of the group of a device."""
        return max((end for end, _ in self._spans if end <= device), default=0)

    def tier(self, first: int, second: int) -> int:
        """Return which tier two devices meet on: 0 within a node, 1 between nodes, 2 and more between wider domains."""
        if self.numbered is not None:
            return int(self.tiers_between(np.array(first), np.array(second)))
        if self.groups:
            group, start = self._group(range(min(first, second), max(first, second) + 1))
            if group is self:
                return 1
            return group.tier(first - start, second - start)
        sizes = (self.devices_per_node, *(domain.devices for domain in self.domains))
        return sum(first // size != second // size for size in sizes)

    def tiers_between(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which tier devices meet on, as `tier` of any number of pairs at once; shapes broadcast."""
        if self.numbered is not None:
            numbering, machine = self.numbered
            return machine.tiers_between(numbering.place(first), numbering.place(second))
        if not self.groups:
            sizes = (self.devices_per_node, *(domain.devices for domain in self.domains))
            return np.asarray(sum((first // size != second // size).astype(np.int64) for size in sizes))
        ends = np.array([end for end, _ in self._spans])
        owners, others = np.searchsorted(ends, first, "right"), np.searchsorted(ends, second, "right")
        met = np.ones(np.broadcast_shapes(first.shape, second.shape), np.int64)
        for number, (end, cluster) in enumerate(self._spans):
            start = end - self.groups[number].devices
            both = np.broadcast_to((owners == number) & (others == number), met.shape)
            met = np.where(both, cluster.tiers_between(first - start, second - start), met)
        return met

    def boundary_tier(self, start: int, size: int) -> int:
        """Return the widest tier on which a stage of `size` devices from `start` on meets the next one of that size.

        Every device meets its counterpart, `size` devices further on.

        >>> from autopar.cluster import PRESETS
        >>> [PRESETS["h100"].boundary_tier(4 * stage, 4) for stage in range(4)]
        [0, 1, 0, 1]
        """
        if self.numbered is not None:
            devices = np.arange(start, start + size)
            return int(self.tiers_between(devices, devices + size).max())
        last = start + 2 * size - 1
        if self.groups:
            group, offset = self._group(range(start, last + 1))
            return 1 if group is self else group.boundary_tier(start - offset, size)
        sizes = (self.devices_per_node, *(domain.devices for domain in self.domains))
        return sum(size >= inner or start // inner != last // inner for inner in sizes)

    def to_dict(self, *, editable: bool = False) -> dict[str, object]:
        """Return the cluster as the mapping a cluster file holds; `cluster_from_dict` reads it back equal.

        Args:
            editable: As of `Link.to_dict`.
        """
        if self.numbered is not None:
            numbering, machine = self.numbered
            return {**machine.to_dict(editable=editable), "numbered": asdict(numbering)}
        if self.groups:
            groups = [group.to_dict(editable=editable) for group in self.groups]
            assert self.between is not None, "groups are connected by a link"
            return {"name": self.name, "groups": groups, "between": self.between.to_dict(editable=editable)}
        data: dict[str, object] = {
            "name": self.name,
            "devices_per_node": self.devices_per_node,
            "device": self.device.to_dict(),
            "intra": self.intra.to_dict(editable=editable),
            "inter": self.inter.to_dict(editable=editable),
        }
        if self.domains:
            data["domains"] = [domain.to_dict(editable=editable) for domain in self.domains]
        if self.host is not None:
            data["host"] = self.host.to_dict()
        if self.gpu_hour_price is not None:
            data["gpu_hour_price"] = self.gpu_hour_price
        return data


def squarest(devices: int, largest: tuple[int, ...], wraps: int) -> tuple[int, ...] | None:
    """Return the shape of a slice of a torus: axes as equal as can be, in ascending order.

    Axes that are no power of two come first: they are the outermost, so that degrees that are powers of two fill whole
    axes. On chips a runtime assigns axes of the mesh to those of the torus so (jax, `mesh_utils.create_device_mesh`).

    Args:
        devices: Devices of the slice.
        largest: Sizes of the axes of the largest slice.
        wraps: Axes that are multiples of this are closed; of equal sums, more of them are better.

    Returns:
        None if no slice has so many devices.

    >>> squarest(64, (16, 16, 24), 4), squarest(32, (16, 16, 24), 4), squarest(8, (16, 16), 16), squarest(7, (4, 4), 4)
    ((4, 4, 4), (2, 4, 4), (2, 4), None)
    >>> squarest(1536, (16, 16, 24), 4)
    (12, 8, 16)
    """
    limits = sorted(largest)
    shapes: list[tuple[int, ...]] = [()]
    for limit in limits:
        shapes = [
            (*shape, size)
            for shape in shapes
            for size in range(shape[-1] if shape else 1, limit + 1)
            if devices % (math.prod(shape) * size) == 0
        ]
    whole = [shape for shape in shapes if math.prod(shape) == devices]
    if not whole:
        return None
    shape = min(whole, key=lambda shape: (sum(shape), -sum(size % wraps == 0 for size in shape)))
    return tuple(sorted(shape, key=lambda size: (size > 1, size & (size - 1) == 0, size)))


def _weakest_device(name: str, devices: list[Device]) -> Device:
    classes = [numbers for numbers, _ in devices[0].peaks if all(numbers in dict(d.peaks) for d in devices)]
    if not classes:
        raise ClusterError(
            f"cluster {name!r}: its devices have no class of numbers in common",
            hint="give every device a peak of the same class, e.g. half: 312 TFLOP/s",
        )
    values: dict[str, Any] = {
        "name": " and ".join(dict.fromkeys(device.name for device in devices)),
        "peaks": tuple((numbers, min(device.peak(numbers) for device in devices)) for numbers in classes),
        "efficiencies": tuple(
            (numbers, min(device.efficiency(numbers) for device in devices))
            for numbers in classes
            if any(numbers in dict(device.efficiencies) for device in devices)
        ),
    }
    for field in fields(Device):
        if field.name not in values:
            worst = max if field.name in _LESS_IS_BETTER else min
            values[field.name] = worst(getattr(device, field.name) for device in devices)
    return Device(**values)


def _slowest(links: list[Link]) -> Link:
    """Return the link of least bandwidth with the longest latency; tunings count if all links agree on them."""
    slowest = min(links, key=lambda link: link.bandwidth)
    tunings = slowest.tunings if all(link.tunings == slowest.tunings for link in links) else ()
    return replace(
        slowest,
        latency=max(link.latency for link in links),
        latency_per_member=max(link.latency_per_member for link in links),
        overlap_slowdown=max(link.overlap_slowdown for link in links),
        tunings=tunings,
        nics=None,
        torus=(),
    )

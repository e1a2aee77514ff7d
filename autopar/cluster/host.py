"""Hosts: the memory beside devices, and the link over which a device reaches it."""

from dataclasses import dataclass

from autopar.cluster.checks import require_not_negative, require_positive, require_whole
from autopar.errors import ClusterError
from autopar.units import format_quantity

USABLE = 0.8
"""Share of a host's memory that offloading may take; the rest is for the operating system, loaders of data and caches.
Hand-set."""

UPDATE_EFFICIENCY = 0.45
"""Share of its memory's bandwidth that an update on a host reaches: CPU-Adam takes 0.22 to 2.57 s for 1 to 10 billion
parameters, 30 bytes each, on two sockets of six channels of DDR4-2666, 256 GB/s (Ren et al., ZeRO-Offload, ATC'21,
table 4, DGX-2)."""


@dataclass(frozen=True, slots=True)
class Host:
    """The memory that some devices share, and the link of one of them to it. Bytes, bytes/s and seconds.

    Attributes:
        tier: Name of the technology of the link ("PCIe 5 x16", "NVLink-C2C").
        memory: Bytes of one host.
        devices: Devices of one host; they are numbered one after the other.
        to_host: Bytes/s of one device that nobody shares its link with.
        to_device: The same the other way.
        latency: Seconds of a copy of nothing.
        sharing: Devices that share a link: each gets its part of the bandwidth.
        full_duplex: Whether both ways reach their bandwidth at the same time.
        memory_bandwidth: Bytes/s of one host's memory by its data sheet; 0 if unknown, and then it runs no update.
    """

    tier: str
    memory: float
    devices: int
    to_host: float
    to_device: float
    latency: float = 10e-6
    sharing: int = 1
    full_duplex: bool = True
    memory_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        owner = f"host link {self.tier!r}"
        require_positive(owner, memory=self.memory, to_host=self.to_host, to_device=self.to_device)
        require_not_negative(owner, latency=self.latency, memory_bandwidth=self.memory_bandwidth)
        require_whole(owner, 1, devices=self.devices, sharing=self.sharing)
        if self.devices % self.sharing:
            raise ClusterError(
                f"{owner}: {self.sharing} devices share a link, the host has {self.devices}",
                hint="sharing divides devices",
            )

    @property
    def usable(self) -> float:
        """Bytes of one host that offloading may take."""
        return USABLE * self.memory

    def out_seconds(self, nbytes: float) -> float:
        """Compute the seconds each device takes to copy `nbytes` to its host, all devices at once."""
        return self.latency + nbytes * self.sharing / self.to_host if nbytes else 0.0

    def back_seconds(self, nbytes: float) -> float:
        """Compute the seconds each device takes to copy `nbytes` from its host, all devices at once."""
        return self.latency + nbytes * self.sharing / self.to_device if nbytes else 0.0

    def both(self, out: float, back: float) -> float:
        """Return the seconds of traffic both ways at once, of which each alone takes `out` and `back` seconds."""
        return max(out, back) if self.full_duplex else out + back

    def there_and_back(self, nbytes: float) -> float:
        """Compute the seconds each device takes to copy `nbytes` from its host and `nbytes` back."""
        return self.both(self.out_seconds(nbytes), self.back_seconds(nbytes))

    def update_seconds(self, nbytes: float) -> float:
        """Compute the seconds the host's processors take to read and write `nbytes` for each of its devices.

        Raises:
            ClusterError: If the bandwidth of its memory is unknown.
        """
        if not nbytes:
            return 0.0
        if not self.memory_bandwidth:
            raise ClusterError(
                f"host link {self.tier!r}: the bandwidth of the host's memory is unknown, so that it runs no update",
                hint="give the host of the cluster a memory_bandwidth, or let devices run the update: optimizer",
            )
        return nbytes * self.devices / (UPDATE_EFFICIENCY * self.memory_bandwidth)

    def to_dict(self) -> dict[str, object]:
        """Return the host as the mapping a cluster file holds."""
        data: dict[str, object] = {
            "tier": self.tier,
            "memory": format_quantity(self.memory, "B"),
            "devices": self.devices,
            "to_host": format_quantity(self.to_host, "B/s"),
            "to_device": format_quantity(self.to_device, "B/s"),
            "latency": format_quantity(self.latency, "s"),
        }
        if self.sharing != 1:
            data["sharing"] = self.sharing
        if not self.full_duplex:
            data["full_duplex"] = False
        if self.memory_bandwidth:
            data["memory_bandwidth"] = format_quantity(self.memory_bandwidth, "B/s")
        return data


def weakest_host(hosts: list[Host]) -> Host:
    """Return a host with the least of every figure of some."""
    first = hosts[0]
    if all(host == first for host in hosts):
        return first
    per_device = min(host.memory / host.devices for host in hosts)
    slowest = max(hosts, key=lambda host: host.sharing / min(host.to_host, host.to_device))
    return Host(
        " and ".join(dict.fromkeys(host.tier for host in hosts)),
        per_device,
        1,
        min(host.to_host / host.sharing for host in hosts),
        min(host.to_device / host.sharing for host in hosts),
        max(host.latency for host in hosts),
        full_duplex=slowest.full_duplex and all(host.full_duplex for host in hosts),
        memory_bandwidth=min(host.memory_bandwidth / host.devices for host in hosts),
    )

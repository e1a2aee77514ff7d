"""What a cluster is: devices, nodes and the two tiers of links between them.

Seconds, bytes, FLOP/s and bytes/s throughout. A link's `bandwidth` is an *algorithm* bandwidth: what one device
reaches in one direction inside a collective, as measured, and not the figure of the data sheet
(`autopar.cost.collectives` has the formula it is used in).
"""

import math
from dataclasses import dataclass

from autopar.errors import ClusterError
from autopar.units import parse_quantity

PREFIXES = ("P", "T", "G", "M", "k", "")


def format_quantity(value: float, unit: str) -> str:
    """Return the shortest text that `parse_quantity` reads back as exactly `value`.

    >>> format_quantity(3.12e14, "FLOP/s"), format_quantity(8e-06, "s"), format_quantity(0.0, "B")
    ('312 TFLOP/s', '8 us', '0 B')
    """
    if unit == "s":
        scales = [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)]
    else:
        scales = [(f"{prefix}{unit}", 1000.0 ** (5 - power)) for power, prefix in enumerate(PREFIXES)]
    for suffix, scale in scales:
        text = f"{value / scale:.15g} {suffix}"
        if value >= scale and parse_quantity(text, unit) == value:
            return text
    return f"{value!r} {unit}" if value else f"0 {unit}"


def _require_positive(owner: str, **fields: float) -> None:
    for name, value in fields.items():
        if not (math.isfinite(value) and value > 0):
            raise ClusterError(f"{owner}: {name} is {value:g}", hint=f"{name} is a positive number")


def _require_share(owner: str, **fields: float) -> None:
    for name, value in fields.items():
        if not 0 < value <= 1:
            raise ClusterError(
                f"{owner}: {name} is {value:g}", hint=f"{name} is a share of the peak: above 0, at most 1"
            )


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

    def __post_init__(self) -> None:
        if not self.peaks:
            raise ClusterError(f"device {self.name!r} has no peaks", hint="give at least one, e.g. half: 312 TFLOP/s")
        owner = f"device {self.name!r}"
        _require_positive(owner, **{f"peaks.{name}": value for name, value in self.peaks})
        _require_positive(owner, memory=self.memory, memory_bandwidth=self.memory_bandwidth, launch=self.launch)
        _require_share(
            owner,
            gemm_efficiency=self.gemm_efficiency,
            attention_efficiency=self.attention_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
            batched_efficiency=self.batched_efficiency,
        )
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

    def to_dict(self) -> dict[str, object]:
        """Return the device as the mapping a cluster file holds."""
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
        }


@dataclass(frozen=True, slots=True)
class Link:
    """One tier of the network: between the devices of a node, or between nodes.

    A transfer of S bytes takes `latency + S / bandwidth * (1 + (ramp / S) ** ramp_exponent)` seconds.

    Attributes:
        tier: Name of the technology ("NVLink3", "InfiniBand HDR").
        bandwidth: Bytes/s each device reaches in each direction while all of them communicate; between nodes that is
            its share of the node's NICs.
        latency: Seconds of an empty collective.
        ramp: Bytes at which the bandwidth is half of `bandwidth`; 0 if it does not depend on the size.
        ramp_exponent: How fast the bandwidth approaches its limit, at least 0 and below 1.
    """

    tier: str
    bandwidth: float
    latency: float
    ramp: float = 0.0
    ramp_exponent: float = 0.5

    def __post_init__(self) -> None:
        owner = f"link {self.tier!r}"
        _require_positive(owner, bandwidth=self.bandwidth)
        for name, value in (("latency", self.latency), ("ramp", self.ramp)):
            if not (math.isfinite(value) and value >= 0):
                raise ClusterError(f"{owner}: {name} is {value:g}", hint=f"{name} is 0 or a positive number")
        if not 0 <= self.ramp_exponent < 1:
            raise ClusterError(f"{owner}: ramp_exponent is {self.ramp_exponent:g}", hint="it is at least 0 and below 1")

    def to_dict(self) -> dict[str, object]:
        """Return the link as the mapping a cluster file holds."""
        return {
            "tier": self.tier,
            "bandwidth": format_quantity(self.bandwidth, "B/s"),
            "latency": format_quantity(self.latency, "s"),
            "ramp": format_quantity(self.ramp, "B"),
            "ramp_exponent": self.ramp_exponent,
        }


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices, as many as a job needs. Devices are numbered node by node.

    Attributes:
        name: Name of the preset or file.
        device: What each of them is.
        devices_per_node: Devices that `intra` connects.
        intra: Link between devices of one node.
        inter: Link between devices of different nodes.
    """

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise ClusterError(
                f"cluster {self.name!r}: devices_per_node is {self.devices_per_node}",
                hint="it is a positive whole number",
            )

    def to_dict(self) -> dict[str, object]:
        """Return the cluster as the mapping a cluster file holds; `cluster_from_dict` reads it back equal."""
        return {
            "name": self.name,
            "devices_per_node": self.devices_per_node,
            "device": self.device.to_dict(),
            "intra": self.intra.to_dict(),
            "inter": self.inter.to_dict(),
        }

"""Hosts known by name, each with where its constants come from.

*Hand-set*: taken from a similar machine, not stated by a source.
"""

from dataclasses import dataclass, replace

from autopar.cluster.host import Host

GB = 1e9
GIB = 2.0**30

# Bytes/s of copies to and from pinned memory, one way at a time.
PCIE3 = 12e9  # GPU to CPU of a DGX-2: Rajbhandari et al., ZeRO-Infinity, SC'21, figure 2; nvbandwidth's page has 12.4
PCIE4 = 24.8e9  # nvbandwidth on 8 A100-SXM4, NVIDIA developer forum, thread 352186
PCIE5 = 55.6e9  # nvbandwidth's host_to_device_memcpy_ce on PCIe 5 x16 in NVIDIA's post on the tool: 55.63 GB/s
# NVLink-C2C has 450 GB/s each way, a Grace CPU 512 GB/s of LPDDR5X for two GPUs and both ways (GB200 data sheet); 0.85
# of that, hand-set like the efficiency of device memory.
C2C_PAIR = 0.85 * 512e9
TPU_PCIE = 15e9  # bytes/s per chip that "How to Scale Your Model" (JAX authors) takes for PCIe of TPU v6e


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host and where its constants come from.

    Attributes:
        host: The host.
        source: The source.
    """

    host: Host
    source: str


_THREE = "link: ZeRO-Infinity, SC'21, figure 2 (PCIe 3 x16, DGX-2)"
_FOUR = "link: nvbandwidth on 8 A100 (PCIe 4 x16, NVIDIA forum 352186)"
_FIVE = "link: nvbandwidth on PCIe 5 x16 (NVIDIA)"
_SWITCH = "two GPUs share a PCIe switch"


def _pcie(generation: int, memory: float, devices: int, sharing: int = 1, *, dram: float) -> Host:
    rate = {3: PCIE3, 4: PCIE4, 5: PCIE5}[generation]
    name = f"PCIe {generation} x16"
    return Host(name, memory, devices, rate, rate, sharing=sharing, memory_bandwidth=dram)


def _channels(count: int, megatransfers: int) -> float:
    """Compute the bytes/s of two sockets with `count` memory channels of 8 bytes each."""
    return 2 * count * 8 * megatransfers * 1e6


# Bytes/s of the memory of two sockets, by the data sheets of their processors.
BROADWELL = _channels(4, 2400)  # Xeon E5-2698 v4 of DGX-1, E5-2686 v4 of AWS p3
SKYLAKE = _channels(6, 2666)  # Xeon Platinum 8168 of DGX-2
CASCADE_LAKE = _channels(6, 2933)  # Xeon Platinum 8275CL of AWS p4d, 8259CL of g4dn
MILAN = _channels(8, 3200)  # EPYC 7742 of DGX A100, 7543 of Jean Zay, 7R13 and 7R32 of AWS g6 and g5
SAPPHIRE_RAPIDS = _channels(8, 4800)  # Xeon Platinum 8480C of DGX H100, DGX H200 and Azure's ND MI300X v5
EMERALD_RAPIDS = _channels(8, 5600)  # Xeon Platinum 8570 of DGX B200


DGX_1 = KnownHost(
    _pcie(3, 512 * GB, 8, 2, dram=BROADWELL), f"{_THREE}; {_SWITCH}, 512 GB (DGX-1 system architecture, NVIDIA)"
)
AWS_P3 = KnownHost(
    _pcie(3, 488 * GIB, 8, 2, dram=BROADWELL), f"{_THREE}; sharing as in DGX-1; 488 GiB (AWS p3.16xlarge)"
)
DGX_2 = KnownHost(
    _pcie(3, 1500 * GB, 16, 4, dram=SKYLAKE), f"{_THREE}: 3 of 12 GB/s if all devices copy; 1.5 TB (DGX-2 data sheet)"
)
DGX_A100 = KnownHost(_pcie(4, 2000 * GB, 8, 2, dram=MILAN), f"{_FOUR}; {_SWITCH}, 2 TB (DGX A100 640GB data sheet)")
DGX_A100_40 = KnownHost(_pcie(4, 1000 * GB, 8, 2, dram=MILAN), f"{_FOUR}; {_SWITCH}, 1 TB (DGX A100 320GB data sheet)")
JEAN_ZAY = KnownHost(
    _pcie(4, 512 * GB, 8, 2, dram=MILAN), f"{_FOUR}; sharing as in DGX A100; 512 GB (BLOOM chronicles)"
)
AWS_P4 = KnownHost(
    _pcie(4, 1152 * GIB, 8, 2, dram=CASCADE_LAKE), f"{_FOUR}; sharing as in DGX A100; 1152 GiB (AWS p4d.24xlarge)"
)
FOUR_A100 = KnownHost(_pcie(4, 512 * GB, 4, dram=MILAN), f"{_FOUR}; memory hand-set")
DGX_H100 = KnownHost(_pcie(5, 2000 * GB, 8, dram=SAPPHIRE_RAPIDS), f"{_FIVE}; 2 TB (DGX H100 data sheet)")
DGX_B200 = KnownHost(
    _pcie(5, 2000 * GB, 8, dram=EMERALD_RAPIDS), f"{_FIVE}; 2 TB (DGX H200, B200 and B300 data sheets)"
)
AWS_P6 = KnownHost(_pcie(5, 2048 * GIB, 8, dram=EMERALD_RAPIDS), f"{_FIVE}; 2 TiB (AWS p6-b200.48xlarge)")
GRACE = KnownHost(
    Host("NVLink-C2C", 480 * GB, 2, C2C_PAIR, C2C_PAIR, sharing=2, full_duplex=False, memory_bandwidth=512e9),
    "480 GB, 512 GB/s of LPDDR5X for two GPUs (GB200 data sheet), 0.85 of it hand-set; the link itself is faster",
)
EIGHT_L4 = KnownHost(_pcie(4, 768 * GIB, 8, dram=MILAN), f"{_FOUR}; 768 GiB (AWS g6.48xlarge)")
AWS_G5 = KnownHost(_pcie(4, 768 * GIB, 8, dram=MILAN), f"{_FOUR}; 768 GiB (AWS g5.48xlarge)")
FOUR_GPUS = KnownHost(_pcie(5, 1000 * GB, 4, dram=SAPPHIRE_RAPIDS), f"{_FIVE}; memory hand-set")
FOUR_L40S = KnownHost(_pcie(4, 512 * GB, 4, dram=MILAN), f"{_FOUR}; memory hand-set")
GRACE_HOPPER = KnownHost(
    Host("NVLink-C2C", 480 * GB, 1, 0.85 * 450e9, 0.85 * 450e9, memory_bandwidth=384e9),
    "480 GB of LPDDR5X at 384 GB/s, NVLink-C2C of 450 GB/s each way (GH200 data sheet), 0.85 of the latter hand-set",
)
EIGHT_4090 = KnownHost(_pcie(4, 512 * GB, 8, dram=MILAN), f"{_FOUR}; memory hand-set")
TWO_1080TI = KnownHost(_pcie(3, 128 * GB, 2, dram=BROADWELL), f"{_THREE}; memory hand-set")
EIGHT_T4 = KnownHost(_pcie(3, 384 * GIB, 8, dram=CASCADE_LAKE), f"{_THREE}; 384 GiB (AWS g4dn.metal)")
AZURE_MI300X = KnownHost(_pcie(5, 1850 * GIB, 8, dram=SAPPHIRE_RAPIDS), f"{_FIVE}; 1850 GiB (Azure ND MI300X v5)")


def _tpu(memory: float, chips: int) -> Host:
    return Host("PCIe", memory, chips, TPU_PCIE, TPU_PCIE)


_CHIPS = "memory and chips of a host: Google's TPU documentation; link:"
TPU_V5E = KnownHost(_tpu(512 * GIB, 8), f"{_CHIPS} hand-set to that of TPU v6e in 'How to Scale Your Model'")
TPU_V5P = KnownHost(_tpu(448 * GB, 4), f"{_CHIPS} hand-set to that of TPU v6e in 'How to Scale Your Model'")
TPU_V6E = KnownHost(_tpu(1440 * GB, 8), f"{_CHIPS} 'How to Scale Your Model' (JAX authors)")
TPU_V7X = KnownHost(_tpu(960 * GB, 4), f"{_CHIPS} hand-set to that of TPU v6e in 'How to Scale Your Model'")

_BY_PRESET = {
    **dict.fromkeys(("a100", "a100-80"), DGX_A100),
    **dict.fromkeys(("a100-4hdr", "a100-roce"), replace(DGX_A100, source=f"{DGX_A100.source}, hand-set")),
    "a100-40": DGX_A100_40,
    "a100-opa": JEAN_ZAY,
    "a100-4x100": AWS_P4,
    "a100-pcie": FOUR_A100,
    "h100": DGX_H100,
    **dict.fromkeys(("h100-2x400", "h100-96"), replace(DGX_H100, source=f"{DGX_H100.source}, hand-set")),
    **dict.fromkeys(("h800", "h20", "h100-pcie"), replace(DGX_H100, source=f"{DGX_H100.source}, hand-set")),
    "h200-nvl": FOUR_GPUS,
    "gh200": GRACE_HOPPER,
    "h200": KnownHost(DGX_H100.host, DGX_B200.source),
    **dict.fromkeys(("b200", "b300"), DGX_B200),
    "b200-efa": AWS_P6,
    **dict.fromkeys(("gb200", "gb300"), GRACE),
    "v100": DGX_1,
    "v100-aws": AWS_P3,
    "v100-dgx2": DGX_2,
    "l4": EIGHT_L4,
    "l20": replace(EIGHT_L4, source=f"{EIGHT_L4.source}, hand-set"),
    "l40s": FOUR_L40S,
    "a10g": AWS_G5,
    "rtx4090": EIGHT_4090,
    "gtx1080ti": TWO_1080TI,
    "t4": EIGHT_T4,
    "mi300x": AZURE_MI300X,
    "mi325x": replace(AZURE_MI300X, source=f"{AZURE_MI300X.source}, hand-set"),
    "mi355x": replace(AZURE_MI300X, source=f"{AZURE_MI300X.source}, hand-set"),
    "tpu-v5e": TPU_V5E,
    "tpu-v5p": TPU_V5P,
    "tpu-v6e": TPU_V6E,
    "tpu-v7x": TPU_V7X,
}


def host_of_preset(name: str) -> KnownHost:
    """Return the host of a preset and its source."""
    return _BY_PRESET[name]

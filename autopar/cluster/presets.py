"""Clusters known by name. Every constant says where it comes from.

`SOURCES` says it of every preset for users; `autopar.cluster.networks` of the links.
*Fit*: a constant of a formula in docs/cost_model.md or docs/collectives.md, fitted to published measurements.
GEMM fits are of launch, efficiency and bandwidth in `autopar.cost.gemm` to the kernel times of microsoft/vidur;
`autopar.cost.accuracy.gemm_report` prints the errors.
*Hand-set*: chosen between published values or after a similar device, not fitted.
"""

from collections.abc import Mapping
from dataclasses import replace

from autopar.cluster import networks
from autopar.cluster.hosts import host_of_preset
from autopar.cluster.links import Link
from autopar.cluster.networks import Known
from autopar.cluster.records import Cluster, Device, Domain

# Hand-set: additions and fused Adam reach 0.8 to 1 of the data sheet; A100 and H100 have the figure of their GEMM fit.
BANDWIDTH_EFFICIENCY = 0.85


def _a100(memory: float, memory_bandwidth: float) -> Device:
    return Device(
        name=f"A100-SXM4-{memory / 1e9:.0f}GB",
        peaks=(("half", 312e12), ("tf32", 156e12), ("single", 19.5e12)),  # NVIDIA A100 data sheet, dense
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        launch=4.2e-6,  # GEMM fit
        gemm_efficiency=0.763,  # GEMM fit
        attention_efficiency=0.45,  # hand-set between 0.36 (llm-foundry step times) and 0.6 (FlashAttention-2, causal)
        bandwidth_efficiency=0.8,  # GEMM fit
        num_sms=108,  # NVIDIA A100 data sheet
        batched_efficiency=0.5,  # hand-set: with memory 0.3 to 0.4 of the peak, layer times of Korthikanti et al. 2022
    )


def _hopper(name: str, memory: float, memory_bandwidth: float) -> Device:
    return Device(
        name=name,
        # NVIDIA H100 data sheet (SXM), dense: half of the figures with sparsity. H200 has the same.
        peaks=(("half", 989e12), ("tf32", 494.5e12), ("single", 67e12), ("fp8", 1979e12)),
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        launch=5.3e-6,  # GEMM fit
        gemm_efficiency=0.762,  # GEMM fit
        attention_efficiency=0.4,  # hand-set between 0.2 (llm-foundry step times) and 0.6 (FlashAttention-3, causal)
        bandwidth_efficiency=0.88,  # GEMM fit
        num_sms=132,  # NVIDIA H100 data sheet (SXM)
        batched_efficiency=0.45,  # hand-set
        # The best fp8 product reaches 70.9 % (H100) where the best bf16 one reaches 80.3 %, and 73.4 % on H200
        # (stas00/ml-engineering, table of maximum achievable FLOPS): 0.88 of the fit for bf16.
        efficiencies=(("fp8", 0.67),),
    )


_V100 = Device(
    name="V100-SXM2-32GB",
    peaks=(("half", 125e12), ("single", 15.7e12)),  # NVIDIA V100 data sheet (SXM2); float16 only, no bfloat16 or TF32
    memory=32e9,
    memory_bandwidth=900e9,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.7,  # hand-set
    attention_efficiency=0.3,  # hand-set: FlashAttention-2 does not run on it
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=80,  # NVIDIA V100 data sheet
)
_A100_80 = _a100(80e9, 2.039e12)  # NVIDIA A100 data sheet (SXM)
_A100_40 = _a100(40e9, 1.555e12)
_H100 = _hopper("H100-SXM5-80GB", 80e9, 3.35e12)  # NVIDIA H100 data sheet (SXM)
_H200 = _hopper("H200-SXM5-141GB", 141e9, 4.8e12)  # NVIDIA H200 data sheet (SXM)

_V100_16 = replace(_V100, name="V100-SXM2-16GB", memory=16e9)
_A100_PCIE = replace(_A100_80, name="A100-PCIe-80GB", memory_bandwidth=1.935e12)  # NVIDIA A100 data sheet (PCIe)
# H100 of 500 W with HBM2e in Meta's Grand Teton, as pytorch/torchtitan describes it; peaks are the data sheet's.
_H100_96 = replace(_H100, name="H100-SXM5-96GB", memory=96e9, memory_bandwidth=2.4e12)


def _blackwell(name: str, half: float, fp4: float, memory: float) -> Device:
    return Device(
        name=name,
        # NVIDIA data sheets (HGX B200 and B300, GB200 and GB300 NVL72), dense; float32 of HGX B200.
        peaks=(("half", half), ("tf32", half / 2), ("single", 80e12), ("fp8", 2 * half), ("fp4", fp4)),
        memory=memory,
        memory_bandwidth=8e12,  # NVIDIA data sheets
        launch=5.3e-6,  # hand-set to the H100's
        gemm_efficiency=0.68,  # hand-set: 0.73 to 0.78 is the best measured (stas00/ml-engineering), times H100's ratio
        attention_efficiency=0.4,  # hand-set to the H100's
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        num_sms=148,  # CUDA device properties of B200; the others are taken to have as many
        # The best fp8 products reach 0.95 (B300) to 0.99 (GB200) of the share of bf16 ones (stas00/ml-engineering);
        # fp4 is hand-set below that.
        efficiencies=(("fp8", 0.66), ("fp4", 0.55)),
        # Unlike Hopper, Blackwell multiplies 8-bit operands in any layout (Transformer Engine,
        # `is_non_tn_fp8_gemm_supported`).
        any_order=True,
    )


_B200 = _blackwell("B200-SXM-180GB", 2.25e15, 9e15, 180e9)  # DGX B200: 1,440 GB in 8 devices
_B300 = _blackwell("B300-SXM-288GB", 2.25e15, 13.5e15, 288e9)  # DGX B300: 2.3 TB in 8 devices
# Seconds of the host for a linear layer of PyTorch on GB200 and GH200 by those on DGX H100, 37.1 and 33.2 by 13.5 us:
# NVIDIA/TransformerEngine, issue 2053. Launches of x86 hosts are taken to hide behind the device's own.
_GRACE_GB, _GRACE_GH = 2.75 * 5.3e-6, 2.46 * 5.3e-6
# GB200 NVL72: 13.4 TB in 72 devices; GB300 NVL72: 288 GB each.
_GB200 = replace(_blackwell("GB200-186GB", 2.5e15, 10e15, 186e9), host_launch=_GRACE_GB)
_GB300 = replace(_blackwell("GB300-288GB", 2.5e15, 15e15, 288e9), host_launch=_GRACE_GB)
_T4 = Device(
    name="T4-16GB",
    peaks=(("half", 65e12), ("single", 8.1e12)),  # NVIDIA T4 data sheet; float16 only, no bfloat16 or TF32
    memory=16e9,
    memory_bandwidth=320e9,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.6,  # hand-set to the L4's, a card of as little power
    attention_efficiency=0.3,  # hand-set to the V100's
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=40,  # NVIDIA Turing whitepaper
)
_GTX1080TI = Device(
    name="GTX-1080Ti-11GB",
    # NVIDIA GeForce GTX 1080 Ti data sheet. Its float16 units are slow, so that products run in float32 either way.
    peaks=(("half", 11.34e12), ("single", 11.34e12)),
    memory=11e9,
    memory_bandwidth=484e9,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.7,  # hand-set to the V100's
    attention_efficiency=0.3,  # hand-set to the V100's
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=28,  # NVIDIA Pascal whitepaper
)
_L4 = Device(
    name="L4-24GB",
    peaks=(("half", 121e12), ("tf32", 60e12), ("single", 30.3e12), ("fp8", 242.5e12)),  # NVIDIA L4 data sheet, dense
    memory=24e9,
    memory_bandwidth=300e9,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.6,  # hand-set below the A100's: 72 W do not hold the clock of the data sheet
    attention_efficiency=0.4,  # hand-set
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=58,  # NVIDIA Ada whitepaper
)
_RTX4090 = Device(
    name="RTX-4090-24GB",
    # NVIDIA Ada whitepaper, dense, products of half precision summed in float32.
    peaks=(("half", 165.2e12), ("tf32", 82.6e12), ("single", 82.6e12), ("fp8", 330.3e12)),
    memory=24e9,
    memory_bandwidth=1.008e12,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.8,  # hand-set: consumer cards run above the boost clock of the whitepaper
    attention_efficiency=0.5,  # hand-set
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=128,  # NVIDIA Ada whitepaper
)

_L40S = Device(
    name="L40S-48GB",
    peaks=(
        ("half", 362.05e12),
        ("tf32", 183e12),
        ("single", 91.6e12),
        ("fp8", 733e12),
    ),  # NVIDIA L40S data sheet, dense
    memory=48e9,
    memory_bandwidth=864e9,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.6,  # hand-set to the L4's, of the same generation
    attention_efficiency=0.4,  # hand-set
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=142,  # NVIDIA Ada whitepaper
)
_L20 = replace(
    _L40S,
    name="L20-48GB",
    peaks=(("half", 119.5e12), ("tf32", 59.8e12), ("single", 59.8e12), ("fp8", 239e12)),  # NVIDIA L20 data sheet, dense
    num_sms=92,  # CUDA device properties
)
_A10G = Device(
    name="A10G-24GB",
    peaks=(("half", 70e12), ("tf32", 35e12), ("single", 31.52e12)),  # NVIDIA A10G data sheet, dense
    memory=24e9,
    memory_bandwidth=600e9,
    launch=4.2e-6,  # hand-set to the A100's
    gemm_efficiency=0.763,  # hand-set to the A100's, of the same generation
    attention_efficiency=0.4,  # hand-set
    bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    num_sms=80,  # CUDA device properties
)
_H800 = replace(_H100, name="H800-SXM5-80GB")
_H20 = replace(
    _H100,
    name="H20-SXM5-96GB",
    peaks=(("half", 148e12), ("tf32", 74e12), ("single", 44e12), ("fp8", 296e12)),  # NVIDIA H20 data sheet, dense
    memory=96e9,
    memory_bandwidth=4.0e12,
    num_sms=78,  # CUDA device properties
)
_H100_PCIE = replace(
    _H100,
    name="H100-PCIe-80GB",
    peaks=(("half", 756e12), ("tf32", 378e12), ("single", 51e12), ("fp8", 1513e12)),  # NVIDIA H100 data sheet (PCIe)
    memory_bandwidth=2.0e12,
    num_sms=114,  # NVIDIA H100 data sheet (PCIe)
)
_H200_NVL = replace(
    _H200,
    name="H200-NVL-141GB",
    peaks=(
        ("half", 835.5e12),
        ("tf32", 417.5e12),
        ("single", 60e12),
        ("fp8", 1670.5e12),
    ),  # NVIDIA H200 data sheet (NVL)
)
_GH200 = replace(  # NVIDIA GH200 data sheet (HBM3)
    _H100, name="GH200-96GB", memory=96e9, memory_bandwidth=4.0e12, host_launch=_GRACE_GH
)


def _instinct(name: str, half: float, memory: float, memory_bandwidth: float) -> Device:
    return Device(
        name=name,
        peaks=(("half", half), ("single", half / 8), ("fp8", 2 * half)),  # AMD data sheets, dense; vector float32
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        launch=10e-6,  # hand-set above the A100's
        gemm_efficiency=0.5,  # hand-set: 0.45 to 0.55 of the peak is what large products reach
        attention_efficiency=0.3,  # hand-set
        bandwidth_efficiency=0.7,  # hand-set
    )


_MI300X = _instinct("MI300X-192GB", 1.3074e15, 192e9, 5.3e12)
_MI325X = _instinct("MI325X-256GB", 1.3074e15, 256e9, 6e12)
_MI355X = _instinct("MI355X-288GB", 2.5166e15, 288e9, 8e12)


def _tpu(name: str, half: float, fp8: float, int8: float, memory: float, memory_bandwidth: float) -> Device:
    return Device(
        name=name,
        # Google's TPU documentation; float32 products take six passes of bfloat16.
        peaks=(("half", half), ("single", half / 6), ("fp8", fp8), ("int8", int8)),
        memory=memory,
        memory_bandwidth=memory_bandwidth,
        launch=2e-6,  # hand-set: a compiled program has no launches, only the fill of the pipelines
        gemm_efficiency=0.8,  # hand-set after MaxText's 64 to 70 % of the peak in whole steps
        attention_efficiency=0.5,  # hand-set
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
    )


GIB = 2.0**30
_TPU_V5E = _tpu("TPU-v5e", 197e12, 197e12, 394e12, 16 * GIB, 819e9)
_TPU_V5P = _tpu("TPU-v5p", 459e12, 459e12, 918e12, 95 * GIB, 2.765e12)
_TPU_V6E = _tpu("TPU-v6e", 918e12, 918e12, 1.836e15, 32 * GIB, 1.638e12)
_TPU_V7X = _tpu("TPU-v7x", 2.307e15, 4.614e15, 4.614e15, 192 * GIB, 7.38e12)

_NVIDIA = (
    "peaks, memory and memory_bandwidth: NVIDIA data sheet, dense; gemm_efficiency and launch: fit to the kernels of "
    "microsoft/vidur (A100, H100) or hand-set after those; other efficiencies hand-set"
)
_AMD = "peaks, memory and memory_bandwidth: AMD data sheet, dense; efficiencies and launch hand-set"
_GOOGLE = "peaks, memory and memory_bandwidth: Google's TPU documentation; efficiencies and launch hand-set"


def _nodes(name: str, device: Device, intra: Known, inter: Link, count: int = 8) -> Cluster:
    return Cluster(name, device, count, intra.link, inter)


def _tpus(
    name: str, device: Device, tier: str, sizes: tuple[int, ...], rates: tuple[float, float], wraps: int
) -> Cluster:
    """Return the cluster of slices of TPUs; `rates` are GB/s of a chip's links and Gb/s of its data-center network."""
    link = networks.torus(tier, sizes, rates[0] * 1e9, wraps)
    chips = 1
    for size in sizes:
        chips *= size
    return Cluster(name, device, chips, link, networks.data_center(rates[1]))


_EDR, _HDR, _NDR = "InfiniBand EDR", "InfiniBand HDR", "InfiniBand NDR"
_A100_CLUSTER = _nodes("a100", _A100_80, networks.NVLINK3, networks.nics(_HDR, 8, 200, 8))

_WITHOUT_HOSTS = {
    "a100": _A100_CLUSTER,
    "a100-80": _A100_CLUSTER,
    "a100-40": _nodes("a100-40", _A100_40, networks.NVLINK3, networks.nics(_HDR, 8, 200, 8)),
    # The machines of published runs: vTrain (4 HDR), Jean Zay (BLOOM), AWS p4d and InternEvo (4 x 100 Gb/s Ethernet).
    "a100-4hdr": _nodes("a100-4hdr", _A100_80, networks.NVLINK3, networks.nics(_HDR, 4, 200, 8)),
    "a100-opa": _nodes("a100-opa", _A100_80, networks.NVLINK3, networks.nics("Omni-Path", 4, 100, 8)),
    "a100-roce": _nodes("a100-roce", _A100_80, networks.NVLINK3, networks.nics("RoCE", 8, 200, 8)),
    "a100-4x100": _nodes("a100-4x100", _A100_80, networks.NVLINK3, networks.nics("RoCE", 4, 100, 8)),
    "a100-pcie": Cluster(
        "a100-pcie",
        _A100_PCIE,
        2,
        networks.NVLINK_BRIDGE.link,
        networks.PCIE4_PAIRS.link,
        (Domain(4, networks.nics(_HDR, 1, 200, 4)),),
    ),
    "h100": _nodes("h100", _H100, networks.NVLINK4, networks.nics(_NDR, 8, 400, 8)),
    "h100-2x400": _nodes("h100-2x400", _H100, networks.NVLINK4, networks.nics("Ethernet", 2, 400, 8)),
    "h100-96": _nodes("h100-96", _H100_96, networks.NVLINK4, networks.nics("RoCE", 8, 400, 8)),
    "h200": _nodes("h200", _H200, networks.NVLINK4_H200, networks.nics(_NDR, 8, 400, 8)),
    "b200": _nodes("b200", _B200, networks.NVLINK5, networks.nics(_NDR, 8, 400, 8)),
    "b200-efa": _nodes("b200-efa", _B200, networks.NVLINK5, networks.efa(8, 400, 8)),
    "b300": _nodes("b300", _B300, networks.NVLINK5, networks.nics("InfiniBand XDR", 8, 800, 8)),
    "gb200": _nodes("gb200", _GB200, networks.NVLINK5_72, networks.racks(_NDR, 400), 72),
    "gb300": _nodes("gb300", _GB300, networks.NVLINK5_72, networks.racks("InfiniBand XDR", 800), 72),
    "v100": _nodes("v100", _V100, networks.NVLINK2, networks.nics(_EDR, 4, 100, 8)),
    "v100-aws": _nodes("v100-aws", _V100_16, networks.NVLINK2, networks.nics("Ethernet", 1, 25, 8)),
    "v100-dgx2": _nodes("v100-dgx2", _V100, networks.NVLINK2_SWITCH, networks.nics(_EDR, 8, 100, 16), 16),
    "l4": _nodes("l4", _L4, networks.PCIE4, networks.nics("Ethernet", 1, 100, 8)),
    # The machines of DisCo (Yi et al., TPDS 2022).
    "gtx1080ti": _nodes("gtx1080ti", _GTX1080TI, networks.PCIE3_HOST, networks.nics("Ethernet", 1, 100, 2), 2),
    "t4": _nodes("t4", _T4, networks.PCIE3_HOST, networks.nics("Ethernet", 1, 100, 8)),
    "rtx4090": _nodes("rtx4090", _RTX4090, networks.PCIE4_HOST, networks.nics("Ethernet", 1, 100, 8)),
    "l40s": _nodes("l40s", _L40S, networks.PCIE4, networks.nics("Ethernet", 2, 400, 4), 4),
    "l20": _nodes("l20", _L20, networks.PCIE4, networks.nics("Ethernet", 1, 100, 8)),
    "a10g": _nodes("a10g", _A10G, networks.PCIE4_HOST, networks.nics("Ethernet", 1, 100, 8)),
    "h800": _nodes("h800", _H800, networks.NVLINK4_H800, networks.nics(_NDR, 8, 400, 8)),
    "h20": _nodes("h20", _H20, networks.NVLINK4, networks.nics(_NDR, 8, 400, 8)),
    "h100-pcie": _nodes("h100-pcie", _H100_PCIE, networks.PCIE5, networks.nics(_NDR, 2, 400, 8)),
    "h200-nvl": _nodes("h200-nvl", _H200_NVL, networks.NVLINK4, networks.nics(_NDR, 2, 400, 4), 4),
    "gh200": _nodes("gh200", _GH200, networks.NVLINK4, networks.nics(_NDR, 1, 400, 1), 1),
    "mi300x": _nodes("mi300x", _MI300X, networks.INFINITY3, networks.nics("RoCE", 8, 400, 8)),
    "mi325x": _nodes("mi325x", _MI325X, networks.INFINITY3, networks.nics("RoCE", 8, 400, 8)),
    "mi355x": _nodes("mi355x", _MI355X, networks.INFINITY4, networks.nics("RoCE", 8, 400, 8)),
    # The largest slice; `tpu-v5p-4x4x8` is a smaller one. Axes are rings if they have whole cubes, or all of a pod.
    "tpu-v5e": _tpus("tpu-v5e", _TPU_V5E, "ICI v5e", (16, 16), (400, 25), 16),
    "tpu-v5p": _tpus("tpu-v5p", _TPU_V5P, "ICI v5p", (16, 16, 24), (1200, 50), 4),
    "tpu-v6e": _tpus("tpu-v6e", _TPU_V6E, "ICI v6e", (16, 16), (800, 100), 16),
    "tpu-v7x": _tpus("tpu-v7x", _TPU_V7X, "ICI v7x", (16, 16, 36), (1200, 100), 4),
}
_WITH_HOSTS = {name: replace(cluster, host=host_of_preset(name).host) for name, cluster in _WITHOUT_HOSTS.items()}
PRESETS: Mapping[str, Cluster] = {**_WITH_HOSTS, "a100-80": _WITH_HOSTS["a100"]}


def sources(cluster: Cluster) -> dict[str, str]:
    """Return where the constants of a cluster come from by field of its file, as far as they are those of a preset.

    >>> sorted(sources(PRESETS["h100"])), sources(replace(PRESETS["h100"], intra=Link("mine", 1e9, 1e-6)))["intra"]
    (['device', 'host', 'inter', 'intra'], 'stated by the user')
    """
    found = {"device": next((text for device, text in _DEVICES if device == cluster.device), USER)}
    links = {"intra": cluster.intra, "inter": cluster.inter}
    links.update({f"domains[{index}].link": domain.link for index, domain in enumerate(cluster.domains)})
    known = [(value.link, value.source) for value in vars(networks).values() if isinstance(value, Known)]
    known += [(link, _link_source(link)) for preset in PRESETS.values() for _, link in preset.tiers]
    for field, link in links.items():
        plain = replace(link, torus=())
        found[field] = next((text for other, text in known if replace(other, torus=()) == plain), USER)
    if cluster.host is not None:
        named = PRESETS.get(cluster.name)
        names = [cluster.name] if named is not None and named.host == cluster.host else list(PRESETS)
        hosts = [host_of_preset(name) for name in names]
        found["host"] = next((known.source for known in hosts if known.host == cluster.host), USER)
    return found


USER = "stated by the user"


def _link_source(link: Link) -> str:
    if link.torus:
        return networks.TORUS_SOURCE
    if link.tier == "EFA":
        return networks.EFA_SOURCE
    if link.tier == "DCN":
        return networks.DATA_CENTER_SOURCE
    return networks.RACKS_SOURCE if link.nics is not None and link.nics.count == 72 else networks.NIC_SOURCE


_DEVICES = [
    (cluster.device, _AMD if name.startswith("mi") else _GOOGLE if name.startswith("tpu") else _NVIDIA)
    for name, cluster in PRESETS.items()
]

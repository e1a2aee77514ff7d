"""Clusters known by name. Every constant says where it comes from.

*Fit*: a constant of a formula in docs/cost_model.md, fitted to published measurements.
GEMM fits are of launch, efficiency and bandwidth in `autopar.cost.gemm` to the kernel times of microsoft/vidur;
`autopar.cost.accuracy.gemm_report` prints the errors.
All-reduce fits are to nccl-tests tables (stas00/ml-engineering, coreweave/nccl-tests) and, for V100, to the table of
VIA-Research/vTrain.
*Hand-set*: chosen between published values, not fitted.
"""

from collections.abc import Mapping

from autopar.cluster.records import Cluster, Device, Link

# Hand-set: additions and fused Adam reach 0.8 to 1 of the data sheet; A100 and H100 have the figure of their GEMM fit.
BANDWIDTH_EFFICIENCY = 0.85
# Share of a NIC's rate that hierarchical collectives reach in a training step; fit to step times of A100 clusters.
NIC_EFFICIENCY = 0.73
INTER_LATENCY = 20e-6  # s, InfiniBand in the system files of calculon-ai/calculon
INTER_RAMP = 20e6  # B, fit: all-reduce of 32 B200 on 4 nodes, error 6.1 %
INTER_RAMP_EXPONENT = 0.44  # same fit


def _nic(tier: str, rate: float) -> Link:
    """Return the link between nodes that gives each device `rate` bytes/s of the NICs."""
    return Link(tier, rate * NIC_EFFICIENCY, INTER_LATENCY, INTER_RAMP, INTER_RAMP_EXPONENT)


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

_NVLINK2 = Link("NVLink2", 137e9, 82e-6)  # all-reduce fit, 8 devices, 1 MB to 1 GB, error 6.7 %
_NVLINK3 = Link("NVLink3", 234e9, 19e-6, 15e6, 0.75)  # all-reduce fit, 8 devices, 32 KB to 16 GB, error 6.9 %
# All-reduce fit on DGX H100, 8 devices, error 7.8 %. Gather and scatter measure 345 to 362 GB/s; an all-reduce in the
# switches (NVLS) reaches up to 480 GB/s.
_NVLINK4 = Link("NVLink4", 383e9, 34e-6)
_EDR = _nic("InfiniBand EDR", 6.25e9)  # DGX-1: 4 NICs of 100 Gb/s shared by 8 devices
_HDR = _nic("InfiniBand HDR", 25e9)  # DGX A100: 8 NICs of 200 Gb/s, one per device
_NDR = _nic("InfiniBand NDR", 50e9)  # DGX H100 and H200: 8 NICs of 400 Gb/s, one per device

_A100_CLUSTER = Cluster("a100", _A100_80, 8, _NVLINK3, _HDR)

PRESETS: Mapping[str, Cluster] = {
    "a100": _A100_CLUSTER,
    "a100-80": _A100_CLUSTER,
    "a100-40": Cluster("a100-40", _A100_40, 8, _NVLINK3, _HDR),
    "h100": Cluster("h100", _H100, 8, _NVLINK4, _NDR),
    "h200": Cluster("h200", _H200, 8, _NVLINK4, _NDR),
    "v100": Cluster("v100", _V100, 8, _NVLINK2, _EDR),
}

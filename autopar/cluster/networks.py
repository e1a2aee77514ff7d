"""Links known by name, each with where its constants come from.

*Fit*: fitted to published timings by docs/benchmarks/fit_collectives.py, which prints the constants and their error.
*Hand-set*: chosen between published values or after a similar link, not fitted.
Alone: collectives that run beside nothing else. What a training step makes of them is the stack's business.
"""

from dataclasses import dataclass

from autopar.cluster.links import Link, Nics, Tuning

# Hetu-Galvatron measured 1.1256 for computation and communication that overlap on 8 devices of a node.
NVLINK_OVERLAP = 1.126
NIC_OVERLAP = 1.02  # InfiniBand in the system files of calculon-ai/calculon: 2 % of the processors move data
# Bus bandwidth of large all-reduces per NIC: 192 of 200 on 8x200 Gb/s (NVIDIA GTC24 s62129), 382 of 400 on 4 nodes of
# B200 (stas00/ml-engineering), 387 of 400 on 12 nodes of H100 (coreweave/nccl-tests); 0.96 whatever the number of nodes
# in SimAI's table.
NIC_EFFICIENCY = 0.955
NIC_LATENCY = 20e-6  # s, InfiniBand in the system files of calculon-ai/calculon
# Fit, 12 nodes of H100: 358 us, of which 36 us within nodes, over 10 further nodes and two rounds.
NIC_LATENCY_PER_NODE = 15e-6
SEND_EFFICIENCY = 0.73  # fit, sends between H100: 36.5 of 50 GB/s (microsoft/vidur)
SEND_LATENCY = 17e-6  # s, same table, smallest messages

# Dispatch and combine of 4096 tokens of 7168 bf16 to 8 of 64 to 512 experts, kernels alone: 39 to 45 GB/s that leave a
# device over a NIC of 50 on 2 to 8 nodes of H100 (README of deepseek-ai/DeepEP and its hybrid-ep branch; bandwidths
# there count what stays on the node, too).
NIC_DISPATCH = 0.92
# All-to-alls of 2 to 8 B200: 0.5968 of 900 GB/s, 51 to 58 us (MooreThreads/SimuMax, b200_bf16_ceperm.json).
NVLINK5_ALL_TO_ALL = Tuning("all_to_all", 2, 537e9, 55e-6)
# 403 and 418 us for 270 MB between 8 devices, 674 and 714 us for 414 MB between 36 (hybrid-ep branch, GB200, 32 SMs).
NVLINK5_DISPATCH = Tuning("dispatch", 2, 700e9, 9e-6, latency_per_member=2.7e-6)


@dataclass(frozen=True, slots=True)
class Known:
    """A link and where its constants come from.

    Attributes:
        link: The link.
        source: The source.
    """

    link: Link
    source: str


_RINGS = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations that go round the same rings; an all-reduce goes twice, and must not be slower than the two others."""


def _tunings(operations: tuple[str, ...], *rows: tuple[int, float, float, float, float]) -> tuple[Tuning, ...]:
    """Return tunings of operations alike from rows of members, microseconds, GB/s, ramp in MB and exponent."""
    return tuple(
        Tuning(operation, members, rate * 1e9, latency / 1e6, ramp * 1e6, exponent)
        for operation in operations
        for members, latency, rate, ramp, exponent in rows
    )


NVLINK2 = Known(
    Link(
        "NVLink2",
        139.3e9,
        74.6e-6,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=_tunings(
            _RINGS,
            (2, 21.7, 22.6, 0, 0.5), (3, 28.7, 45.4, 0, 0.5), (4, 47.8, 86.5, 0, 0.5), (5, 36.3, 36.9, 0, 0.5),
            (6, 61.1, 46.4, 0, 0.5), (7, 77.1, 88.3, 0, 0.5), (8, 74.6, 139.3, 0, 0.5),
        ),
    ),
    "fit: all-reduces of 2 to 8 V100 of a DGX-1, VIA-Research/vTrain",
)  # fmt: skip
NVLINK2_SWITCH = Known(
    Link("NVLink2 NVSwitch", 139.3e9, 74.6e-6, overlap_slowdown=NVLINK_OVERLAP),
    "hand-set: all-reduces of 8 V100 of a DGX-1 (VIA-Research/vTrain), which use all six links as well",
)
NVLINK3 = Known(
    Link(
        "NVLink3",
        235.2e9,
        29.6e-6,
        8e6,
        0.75,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(
            *_tunings(
                _RINGS,
                (2, 39.5, 190.3, 0, 0.5), (3, 56.5, 208.2, 0, 0.5), (4, 19.2, 223.2, 4, 0.75),
                (5, 37.9, 234.4, 1, 0.45), (6, 62.0, 225.6, 0, 0.5), (7, 43.1, 237.2, 1, 0.45),
                (8, 29.6, 235.2, 8, 0.75),
            ),
            Tuning("all_to_all", 2, 159.5e9, 92.4e-6),
            Tuning("all_to_all", 4, 210.1e9, 10e-6, 24e6, 0.75),
            Tuning("all_to_all", 8, 205.9e9, 1.1e-6, 32e6, 0.9),
            Tuning("send", 2, 281.8e9, 12.9e-6),
        ),
    ),
    "fit: all-reduces of 2 to 8 A100 (VIA-Research/vTrain, stas00/ml-engineering), all-to-alls (Hetu-Galvatron), sends "
    "(microsoft/vidur); gather and scatter go round the rings of all-reduce",
)  # fmt: skip
NVLINK4 = Known(
    Link(
        "NVLink4",
        344.75e9,
        35.5e-6,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(
            *_tunings(("all_reduce",), (2, 34.1, 328.9, 0, 0.5), (4, 30.0, 358.3, 0, 0.5), (8, 35.5, 409.2, 0, 0.5)),
            *_tunings(
                ("all_gather", "reduce_scatter"),
                (2, 34.1, 268.5, 0, 0.5), (4, 30.0, 325.5, 0, 0.5), (8, 35.5, 344.75, 0, 0.5),
            ),
            Tuning("all_to_all", 2, 380e9, 30e-6),
            Tuning("send", 2, 364e9, 7.8e-6),
        ),
    ),
    "fit: all-reduces and sends of 2 to 8 H100 (microsoft/vidur, meta-pytorch/autoparallel); gather, scatter and "
    "all-to-all as measured by the latter, with the latency of all-reduce",
)  # fmt: skip
NVLINK4_H800 = Known(
    Link("NVLink4 of 400 GB/s", 400 / 900 * 344.75e9, 35.5e-6, overlap_slowdown=NVLINK_OVERLAP),
    "hand-set to 400 / 900 of the H100's, whose data sheet states 900 GB/s where the H800's states 400",
)
NVLINK4_H200 = Known(
    Link(
        "NVLink4 NVLS",
        362e9,
        30e-6,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(
            *_tunings(("all_reduce",), (5, 30.6, 414.2, 0, 0.5), (7, 30.6, 460.0, 0, 0.5), (8, 30.6, 483.9, 8.0, 0.6)),
            Tuning("all_to_all", 2, 380e9, 30e-6),
            Tuning("send", 2, 364e9, 7.8e-6),
        ),
    ),
    "fit: all-reduces of 5 to 8 H200, in the switches from 5 on; rings below and for other collectives "
    "(stas00/ml-engineering); all-to-alls and sends are the H100's",
)
NVLINK5 = Known(
    Link(
        "NVLink5",
        713e9,  # 678 GB/s at 8 GiB, with the ramp of the all-reduce
        46.5e-6,
        12e6,
        0.45,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(
            *_tunings(
                ("all_reduce",), (6, 46.5, 818, 12.0, 0.45), (7, 46.5, 853, 12.0, 0.45), (8, 46.5, 851.3, 12.0, 0.45)
            ),
            NVLINK5_ALL_TO_ALL,
            NVLINK5_DISPATCH,
            Tuning("send", 2, 746e9, 7.8e-6),
        ),
    ),
    "fit: all-reduces of 4 to 8 B200, in the switches from 6 on; rings below and for other collectives "
    "(stas00/ml-engineering); sends measured at 746 GB/s, latencies are the H100's; dispatch: deepseek-ai/DeepEP",
)
NVLINK5_72 = Known(
    Link(
        "NVLink5 NVL72",
        713e9,
        46.5e-6,
        12e6,
        0.45,
        latency_per_member=6.55e-6,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(
            *_tunings(
                ("all_reduce",), (6, 46.5, 818, 12.0, 0.45), (7, 46.5, 853, 12.0, 0.45), (8, 46.5, 851.3, 12.0, 0.45)
            ),
            Tuning("all_reduce", 9, 813.2e9, 60e-6, latency_per_member=6.36e-6),  # 505 us for 72
            NVLINK5_DISPATCH,
            Tuning("send", 2, 746e9, 7.8e-6),
        ),
    ),
    "fit: all-reduces of 72 GB200 (coreweave/nccl-tests), of up to 8 B200 below; dispatch: deepseek-ai/DeepEP",
)
NVLINK_BRIDGE = Known(
    Link(
        "NVLink3 bridge",
        210.7e9,
        6.6e-6,
        4e6,
        0.5,
        overlap_slowdown=NVLINK_OVERLAP,
    ),
    "fit: all-reduces of 2 A100 PCIe (microsoft/vidur)",
)
PCIE4 = Known(
    Link("PCIe 4.0 x16", 24e9, 59.1e-6, overlap_slowdown=NVLINK_OVERLAP),
    "fit: all-reduces of 4 A100 PCIe, pairs of which have a bridge (microsoft/vidur)",
)
# 24 GB/s leave a pair of devices on its two links; 59.1 us, of which 6.6 us on the bridge.
PCIE4_PAIRS = Known(
    Link("PCIe 4.0 x16", 12e9, 52.5e-6, overlap_slowdown=NVLINK_OVERLAP),
    "fit: all-reduces of 4 A100 PCIe, pairs of which have a bridge (microsoft/vidur)",
)
PCIE5 = Known(
    Link("PCIe 5.0 x16", 48e9, 59.1e-6, overlap_slowdown=NVLINK_OVERLAP),
    "hand-set to twice PCIe 4.0 between A100",
)
PCIE4_HOST = Known(
    Link("PCIe 4.0 x16 through the host", 12e9, 59.1e-6, overlap_slowdown=NVLINK_OVERLAP),
    "hand-set to half of PCIe 4.0 between A100: without peer access every byte crosses the bus twice",
)
PCIE3_HOST = Known(
    Link("PCIe 3.0 x16 through the host", 6e9, 59.1e-6, overlap_slowdown=NVLINK_OVERLAP),
    "hand-set to half of PCIe 4.0 through the host",
)
INFINITY3 = Known(
    Link(
        "Infinity Fabric 3",
        0.7 * 448e9,
        40e-6,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(Tuning("send", 2, 48e9, 10e-6),),
    ),
    "hand-set to 0.7 of the seven links of 64 GB/s of AMD's data sheet; a send uses one link",
)
INFINITY4 = Known(
    Link(
        "Infinity Fabric 4",
        0.7 * 537.6e9,
        40e-6,
        overlap_slowdown=NVLINK_OVERLAP,
        tunings=(Tuning("send", 2, 58e9, 10e-6),),
    ),
    "hand-set to 0.7 of the seven links of 76.8 GB/s of AMD's data sheet; a send uses one link",
)


def nics(tier: str, count: int, gigabits: float, devices: int) -> Link:
    """Return the link of nodes with `count` NICs of `gigabits` Gb/s for their devices.

    Args:
        tier: Name of the technology.
        count: NICs of a node.
        gigabits: Rate of one by its data sheet.
        devices: Devices of a node.
    """
    cards = Nics(count, gigabits / 8 * 1e9, NIC_EFFICIENCY)
    share = cards.share(devices)
    return Link(
        tier,
        share,
        NIC_LATENCY,
        latency_per_member=NIC_LATENCY_PER_NODE,
        overlap_slowdown=NIC_OVERLAP,
        tunings=(
            Tuning("all_reduce", 2, share, NIC_LATENCY, latency_per_member=2 * NIC_LATENCY_PER_NODE),
            # Shares of the NIC's rate by number of nodes, and latencies of 37 to 98 us on 2 to 16 nodes of H100:
            # meta-pytorch/autoparallel; SimAI's table has 0.80 and 0.95.
            Tuning("all_to_all", 2, share * 0.82, 37e-6, latency_per_member=4.4e-6),
            Tuning("all_to_all", 4, share * 0.985, 37e-6, latency_per_member=4.4e-6),
            Tuning("dispatch", 2, share * NIC_DISPATCH, 37e-6, latency_per_member=4.4e-6),
            Tuning("send", 2, share * SEND_EFFICIENCY / NIC_EFFICIENCY, SEND_LATENCY),
        ),
        nics=cards,
    )


NIC_SOURCE = (
    "NICs by their data sheet; efficiency 0.955, latencies and ramp: fit to all-reduces over nodes of H100 and B200 "
    "(coreweave/nccl-tests, stas00/ml-engineering), sends (microsoft/vidur), all-to-alls (meta-pytorch/autoparallel), "
    "dispatch (deepseek-ai/DeepEP)"
)


def efa(count: int, gigabits: float, devices: int) -> Link:
    """Return the link of nodes on Amazon's network, whose latency is many times that of InfiniBand."""
    cards = Nics(count, gigabits / 8 * 1e9, NIC_EFFICIENCY)
    return Link(
        "EFA",
        cards.share(devices),
        88e-6,  # fit, 4 nodes of B200: 308 us of which 47 us within nodes
        4e6,  # same fit: 32 MB of 8 devices
        0.75,
        87e-6,
        NIC_OVERLAP,
        nics=cards,
    )


EFA_SOURCE = "fit: all-reduces of 4 nodes of 8 B200 (stas00/ml-engineering)"


def racks(tier: str, gigabits: float) -> Link:
    """Return the link between NVL72 racks with a NIC of `gigabits` Gb/s per device.

    Large groups reach an eighth of the NICs' rate: NCCL's rings leave a rack on a few of its 72 NICs.
    """
    cards = Nics(72, gigabits / 8 * 1e9, NIC_EFFICIENCY)
    share = cards.share(72)
    return Link(
        tier,
        share,
        NIC_LATENCY,
        latency_per_member=NIC_LATENCY_PER_NODE,
        overlap_slowdown=NIC_OVERLAP,
        tunings=(
            *(
                tuning
                for operation, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1))
                for tuning in (
                    Tuning(operation, 2, share, rounds * 219e-6, latency_per_member=rounds * 87e-6),
                    Tuning(operation, 20, 6.294e9, rounds * 222e-6, 0.444e6, 0.45, rounds * 87e-6),
                )
            ),
            Tuning("send", 2, share * SEND_EFFICIENCY / NIC_EFFICIENCY, SEND_LATENCY),
        ),
        nics=cards,
    )


RACKS_SOURCE = "fit: all-reduces of 2 and 20 racks of GB200 (coreweave/nccl-tests); else as between nodes"


def torus(tier: str, sizes: tuple[int, ...], per_chip: float, wraps: int) -> Link:
    """Return the link of a slice of TPUs.

    Args:
        tier: Name of the technology.
        sizes: Sizes of its axes.
        per_chip: Bytes/s of all links of a chip in both directions, as Google states it.
        wraps: Axes of multiples of this size are rings.
    """
    one_way = per_chip / 2 / (2 * len(sizes))
    # Hand-set: 0.9 of the data sheet, 1 us per hop.
    return Link(tier, 0.9 * one_way, 5e-6, latency_per_member=1e-6, torus=sizes, wraps=wraps)


def data_center(gigabits: float) -> Link:
    """Return the data-center network between slices, with `gigabits` Gb/s per chip."""
    return Link("DCN", 0.8 * gigabits / 8 * 1e9, 100e-6, overlap_slowdown=NIC_OVERLAP)


TORUS_SOURCE = "rate of Google's TPU documentation; 0.9 of it and 1 us per hop are hand-set"
DATA_CENTER_SOURCE = "rate of Google's TPU documentation; 0.8 of it and 100 us are hand-set"

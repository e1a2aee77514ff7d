"""What a device keeps for what no program shows."""

from autopar.cluster import Cluster, Device

CONTEXT = 1.5e9
"""Bytes of the CUDA context, cuBLAS workspaces and NCCL's channels, by hand: a context takes about 0.5 GB, a cuBLAS
workspace on Hopper 32 MiB per stream, NCCL some 100 MB per communicator, of which a run has three to six."""
FRAGMENTATION = 0.04
"""Share of the memory that no plan should count on because the caching allocator loses it to gaps, by hand; with the
context the reserve of a device of 80 GB is 4.7 GB. Megatron Bridge's guide to memory tuning names both as what
estimates of tensors leave out. It is less than `GAPS`: an allocator that is short of memory gives cached blocks back
before it fails."""
GAPS = 0.12
"""What the allocator holds besides what is allocated, as a share of it, where there is room: the median of 19 ranks of
Megatron-LM on devices of 24 and 40 GB whose logs state the maxima of both (Dazz993/Mist, logs of Aceso: 5 to 18 %).
With expandable segments it is less. Stacks have shares of their own
(`Stack.gaps`), fitted where their rows state reserved bytes."""
MOST_GAPS = 0.4
"""Largest such share that a stack may have: beyond all that was measured (5 to 18 % in logs, 20.5 % fitted)."""
MOST_OUTSIDE = 6e9
"""Most bytes beside the allocator that a stack may have; the fit of BLOOM's stack lies on it."""


def reserve_bytes(device: Device) -> float:
    """Return the bytes of a device that no plan should count on."""
    return reserve_of(device.memory)


def default_limit(cluster: Cluster) -> float:
    """Return the bytes per device a plan may use if nobody says: what the device has, less a reserve."""
    return cluster.device.memory - reserve_bytes(cluster.device)


def stage_limit(cluster: Cluster, limit: float, devices: range) -> float:
    """Return the bytes that each of some devices may use, given the limit of a job.

    Devices of a group of nodes that has more memory than others may use more than these, unless a limit was given.
    """
    return default_limit(cluster.on(devices)) if cluster.groups and limit == default_limit(cluster) else limit


def reserve_of(memory: float) -> float:
    """Return the same, given the bytes of all its memory."""
    return context_of(memory) + FRAGMENTATION * memory


def context_of(memory: float, outside: float = CONTEXT) -> float:
    """Return what the driver shows beyond what the allocator has reserved, given the bytes of all memory."""
    return min(outside, 0.25 * memory)


def gaps_of(allocated: float, memory: float, share: float = GAPS, outside: float = CONTEXT) -> float:
    """Return what the allocator reserves beyond what is allocated at most.

    Args:
        allocated: Bytes of tensors at their peak.
        memory: Bytes of all memory, which bounds what can be reserved.
        share: Gaps as a share of what is allocated, where there is room.
        outside: Bytes that others than the allocator have.

    >>> gaps_of(50e9, 80e9), gaps_of(76e9, 80e9), gaps_of(90e9, 80e9)
    (6000000000.0, 2500000000.0, 0.0)
    """
    return max(0.0, min(share * allocated, memory - context_of(memory, outside) - allocated))

"""Seconds of collectives on a mesh axis.

On one tier, for a group of n devices and S bytes:

    t = latency + f S / bandwidth (1 + (ramp / S) ^ exponent)
    f = 2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all

S is the larger side of the collective on one device: the input of all_reduce, reduce_scatter and all_to_all, the
output of all_gather.

A group of n = k m devices, k on each of m nodes, works hierarchically: reduce-scatter within the node, the collective
between nodes on S / k (each device through its own share of the NICs), all-gather within the node. Chunks are
pipelined, so the slower tier sets the time and the latencies add:

    t = latency_intra + latency_inter + max(f(k) S / bandwidth_intra (...), f(m) (S / k) / bandwidth_inter (...))

An all_to_all sends (m - 1) / m of S between nodes directly and (k - 1) / n within.
"""

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from autopar.cluster import Cluster, Link
from autopar.cost.arrays import FloatArray
from autopar.sharding import Axis


class Collective(StrEnum):
    """What changes a placement along one mesh axis."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


_ROUNDS: Mapping[Collective, int] = {
    Collective.ALL_REDUCE: 2,
    Collective.ALL_GATHER: 1,
    Collective.REDUCE_SCATTER: 1,
    Collective.ALL_TO_ALL: 1,
}


def devices_in_node(axis: Axis, devices_per_node: int) -> int:
    """Return how many consecutive members of every group of an axis share a node.

    The mesh starts at the first device of a node, or divides a node. Where groups straddle nodes unevenly it is the
    largest block that never does.

    >>> axes = Axis("tp", 4, 1), Axis("tp", 16, 1), Axis("dp", 4, 4), Axis("dp", 4, 8), Axis("dp", 6, 1)
    >>> [devices_in_node(axis, 8) for axis in axes]
    [4, 8, 2, 1, 2]
    """
    blocks = (size for size in range(axis.size, 1, -1) if axis.size % size == 0)
    return next((size for size in blocks if devices_per_node % (size * axis.stride) == 0), 1)


def _transfer(nbytes: FloatArray, link: Link) -> FloatArray:
    """Return the seconds of `nbytes` without latency; 0 bytes take none because the exponent is below 1."""
    ramp = link.ramp**link.ramp_exponent * nbytes ** (1.0 - link.ramp_exponent) if link.ramp else 0.0
    return (nbytes + ramp) / link.bandwidth


def collective_seconds(collective: Collective, nbytes: FloatArray, axis: Axis, cluster: Cluster) -> FloatArray:
    """Return the seconds of a collective over every group of a mesh axis at once.

    Args:
        collective: What is done.
        nbytes: Bytes of the larger side on one device, any shape.
        axis: The devices of each group: `axis.size` of them, `axis.stride` apart.
        cluster: Where they are.

    Returns:
        Seconds, of the shape of `nbytes`; 0 for groups of one device.
    """
    if axis.size == 1:
        return np.zeros_like(nbytes)
    inside = devices_in_node(axis, cluster.devices_per_node)
    nodes = axis.size // inside
    rounds = _ROUNDS[collective]
    within = rounds * (inside - 1) / inside
    between = rounds * (nodes - 1) / nodes
    if nodes == 1:
        return cluster.intra.latency + within * _transfer(nbytes, cluster.intra)
    if collective is Collective.ALL_TO_ALL:
        within /= nodes
        share = nbytes
    else:
        share = nbytes / inside
    outer = between * _transfer(share, cluster.inter)
    if inside == 1:
        return cluster.inter.latency + outer
    inner = within * _transfer(nbytes, cluster.intra)
    return cluster.intra.latency + cluster.inter.latency + np.maximum(inner, outer)


def send_seconds(nbytes: float, crosses_nodes: bool, cluster: Cluster) -> float:
    """Return the seconds of a point-to-point transfer: `latency + S / bandwidth` (the ramp belongs to collectives)."""
    link = cluster.inter if crosses_nodes else cluster.intra
    return link.latency + nbytes / link.bandwidth


def exchange_seconds(nbytes: FloatArray, axis: Axis, cluster: Cluster) -> FloatArray:
    """Return the seconds in which every device sends boundary rows to its neighbours on an axis: a halo exchange.

    `latency + S / bandwidth`, S being what one device sends to both sides; the messages leave together. If the axis
    crosses nodes, some neighbours do, and those set the time.

    Args:
        nbytes: Bytes one device sends, any shape; nothing is sent where they are 0.
        axis: The devices.
        cluster: Where they are.
    """
    if axis.size == 1:
        return np.zeros_like(nbytes)
    link = cluster.intra if devices_in_node(axis, cluster.devices_per_node) == axis.size else cluster.inter
    return np.where(nbytes > 0, link.latency + nbytes / link.bandwidth, 0.0)

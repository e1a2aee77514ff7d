"""Seconds of collectives on a mesh axis.

On one tier, for a group of n devices and S bytes:

    t = latency + f S / bandwidth (1 + (ramp / S) ^ exponent)
    f = 2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all

S is the larger side of the collective on one device: the input of all_reduce, reduce_scatter and all_to_all, the
output of all_gather. The constants are those of the operation and the number of members on the tier (`Link.tuning`).

A group over several tiers, k of whose members share a domain of the tiers inside, works as rings through all members:
every tier carries f S in and out of each domain, and the k members share that. The rings run on all tiers at once, so
the slowest tier sets the time, and the latencies add:

    t = sum of latencies + max over tiers of f(n) (S / k) / bandwidth (1 + (ramp k / S) ^ exponent)

An all_to_all sends to all members directly: (n - k) / n of S leaves a domain of each device, and messages on different
tiers do not wait for each other, so that the slowest tier sets the time with its latency.

Rows of experts, sent by a dispatcher that sends a token once (`autopar.ir.routing`): of S bytes, which count a token
top_k times, a tier carries between the b parts that its domains are of, each in a group of c of them,

    S reached(b) / top_k (c - 1) / c

A token goes to a node once and is handed on inside, to each device once; combining adds up on the way back, where
dispatching made copies.

On a torus (`autopar.cost.torus`) the rates of the rings of a group add; an all_to_all sends every byte a quarter of a
ring (half of that on average, over two directions) or of a line far:

    t = latency + max over rings of S members / 4 / (rate bandwidth)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from autopar.cluster import Cluster, Link
from autopar.cost.arrays import FloatArray
from autopar.cost.torus import rings
from autopar.ir.routing import Routed
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
    """Return how many consecutive members of every group of an axis share a node, or a wider domain.

    The mesh starts at the first device of a node, or divides a node. Where groups straddle nodes unevenly it is the
    largest block that never does.

    >>> axes = Axis("tp", 4, 1), Axis("tp", 16, 1), Axis("dp", 4, 4), Axis("dp", 4, 8), Axis("dp", 6, 1)
    >>> [devices_in_node(axis, 8) for axis in axes]
    [4, 8, 2, 1, 2]
    """
    blocks = (size for size in range(axis.size, 1, -1) if axis.size % size == 0)
    return next((size for size in blocks if devices_per_node % (size * axis.stride) == 0), 1)


def leaves_node(axis: Axis, devices_per_node: int) -> bool:
    """Return whether collectives of an axis take the links between nodes, as they do if any part of them leaves one.

    >>> [leaves_node(axis, 8) for axis in (Axis("tp", 8, 1), Axis("dp", 4, 8), Axis("dp", 16, 1))]
    [False, True, True]
    """
    return devices_in_node(axis, devices_per_node) < axis.size


@lru_cache(maxsize=4096)
def widest_tier(axis: Axis, cluster: Cluster) -> int:
    """Return the widest tier that the groups of an axis cross: 0 within a node, 1 between nodes, 2 and more beyond."""
    sizes = [size for size, _ in cluster.tiers[1:]]
    return next((tier for tier, size in enumerate(sizes) if devices_in_node(axis, size) == axis.size), len(sizes))


@dataclass(frozen=True, slots=True)
class _Leg:
    """One tier of a collective: `latency + linear S + ramp S ** power` seconds."""

    tier: int
    latency: float
    linear: float
    ramp: float
    power: float


def _leg(tier: int, link: Link, operation: str, members: int, factor: float, share: float) -> _Leg:
    """Return the leg that carries `factor` times S / `share` over a link on which a group has `members`."""
    constants = link.tuning(operation, members)
    latency = constants.latency + (members - 2) * constants.latency_per_member
    power = 1.0 - constants.ramp_exponent
    scale = factor / constants.bandwidth
    ramp = constants.ramp**constants.ramp_exponent * scale * share**-power if constants.ramp else 0.0
    return _Leg(tier, latency, scale / share, ramp, power)


def _torus_leg(link: Link, collective: Collective, axis: Axis, inside: int, factor: float) -> _Leg:
    found = rings(inside, axis.stride, link.torus, link.wraps)
    hops = 2 + sum(ring.members - 1 for ring in found)
    if collective is Collective.ALL_TO_ALL:
        slowest = max(ring.members / (4 * ring.rate) for ring in found)
        return _leg(0, link, collective, hops, slowest, 1.0)
    return _leg(0, link, collective, hops, factor / sum(ring.rate for ring in found), 1.0)


DISPATCH = "dispatch"
"""Operation of links whose constants are those of a dispatcher that sends a token once."""


@lru_cache(maxsize=4096)
def _dispatch_legs(routed: Routed, axis: Axis, cluster: Cluster) -> tuple[_Leg, ...]:
    """Return the tiers on which tokens are sent once to each domain that has experts of theirs, from the inside out."""
    legs, tiers, inner = [], cluster.tiers, 1
    for tier, (_, link) in enumerate(tiers):
        outer = axis.size if tier == len(tiers) - 1 else devices_in_node(axis, tiers[tier + 1][0])
        if outer > inner:
            copies = routed.routing.reached(routed.parts * axis.size // inner) / routed.routing.top_k
            legs.append(_leg(tier, link, DISPATCH, outer // inner, copies * (1.0 - inner / outer), 1.0))
        inner = outer
    return tuple(legs)


@lru_cache(maxsize=4096)
def _legs(collective: Collective, axis: Axis, cluster: Cluster) -> tuple[_Leg, ...]:
    """Return the tiers a collective over an axis works on, from the inside out."""
    legs = []
    tiers = cluster.tiers
    inner = 1
    direct = collective is Collective.ALL_TO_ALL
    factor = _ROUNDS[collective] * (axis.size - 1) / axis.size
    for tier, (_, link) in enumerate(tiers):
        last = tier == len(tiers) - 1
        outer = axis.size if last else devices_in_node(axis, tiers[tier + 1][0])
        if outer > inner:
            carried = (outer - inner) / axis.size if direct and tier == 0 else factor
            if direct and tier > 0:
                carried = (axis.size - inner) / axis.size
            if link.torus:
                legs.append(_torus_leg(link, collective, axis, outer, carried))
            else:
                legs.append(_leg(tier, link, collective, outer // inner, carried, 1.0 if direct else inner))
        inner = outer
    return tuple(legs)


def collective_seconds(
    collective: Collective,
    nbytes: FloatArray,
    axis: Axis,
    cluster: Cluster,
    slowdowns: tuple[float, float] = (1.0, 1.0),
    routed: Routed | None = None,
) -> FloatArray:
    """Return the seconds of a collective over every group of a mesh axis at once.

    Args:
        collective: What is done.
        nbytes: Bytes of the larger side on one device, any shape.
        axis: The devices of each group: `axis.size` of them, `axis.stride` apart.
        cluster: Where they are.
        slowdowns: Factors on the seconds within nodes and beyond.
        routed: Of an all-to-all of rows of experts whose tokens are sent once, what they chose.

    Returns:
        Seconds, of the shape of `nbytes`; 0 for groups of one device.
    """
    if axis.size == 1:
        return np.zeros_like(nbytes)
    direct = collective is Collective.ALL_TO_ALL
    start, slowest = 0.0, None
    once = direct and routed is not None and not cluster.intra.torus
    for leg in _dispatch_legs(routed, axis, cluster) if once and routed else _legs(collective, axis, cluster):
        factor = slowdowns[leg.tier > 0]
        seconds = nbytes * (factor * leg.linear)
        if leg.ramp:
            seconds = seconds + factor * leg.ramp * nbytes**leg.power
        if direct:
            seconds = seconds + factor * leg.latency
        else:
            start += factor * leg.latency
        slowest = seconds if slowest is None else np.maximum(slowest, seconds)
    assert slowest is not None, "a group of two or more devices meets on some tier"
    return slowest + start


@lru_cache(maxsize=256)
def _send_constants(cluster: Cluster, tier: int) -> tuple[float, float]:
    """Return seconds of latency and bytes/s of a send on a tier."""
    constants = cluster.tiers[tier][1].tuning("send", 2)
    return constants.latency, constants.bandwidth


def send_seconds(nbytes: float, tier: int, cluster: Cluster, slowdowns: tuple[float, float] = (1.0, 1.0)) -> float:
    """Return the seconds of a point-to-point transfer: `latency + S / bandwidth` (the ramp belongs to collectives).

    Args:
        nbytes: What is sent.
        tier: Where sender and receiver meet: 0 (or False) within a node, 1 (or True) between nodes, 2 and more
            between wider domains.
        cluster: Where they are.
        slowdowns: Factors on the seconds within nodes and beyond.
    """
    latency, bandwidth = _send_constants(cluster, tier)
    return slowdowns[tier > 0] * (latency + nbytes / bandwidth)


def exchange_seconds(
    nbytes: FloatArray, axis: Axis, cluster: Cluster, slowdowns: tuple[float, float] = (1.0, 1.0)
) -> FloatArray:
    """Return the seconds in which every device sends boundary rows to its neighbours on an axis: a halo exchange.

    `latency + S / bandwidth`, S being what one device sends to both sides; the messages leave together. If the axis
    crosses nodes, some neighbours do, and those set the time.

    Args:
        nbytes: Bytes one device sends, any shape; nothing is sent where they are 0.
        axis: The devices.
        cluster: Where they are.
        slowdowns: Factors on the seconds within nodes and beyond.
    """
    if axis.size == 1:
        return np.zeros_like(nbytes)
    tier = widest_tier(axis, cluster)
    latency, bandwidth = _send_constants(cluster, tier)
    seconds = slowdowns[tier > 0] * (latency + nbytes / bandwidth)
    return np.where(nbytes > 0, seconds, 0.0)

"""Costs of collectives: exact values, the tiers an axis crosses, and the laws."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.cluster import PRESETS, Cluster, Link, load_cluster
from autopar.cost import IDEAL, Collective, CostModel, devices_in_node
from autopar.cost.torus import rings
from autopar.sharding import Axis

H100 = CostModel(load_cluster("h100"))
INSIDE = Axis("tp", 8, 1)
ACROSS = Axis("dp", 4, 8)
BOTH = Axis("dp", 32, 1)
NIC = 50e9 * 0.955  # one device's share of 8 NICs of 400 Gb/s

names = st.sampled_from(sorted(PRESETS))
clusters = names.map(load_cluster)
collectives = st.sampled_from(sorted(Collective))
axes = st.builds(
    lambda size, stride: Axis("a", size, stride), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 8])
)
sizes = st.floats(1.0, 1e11)


def wider(link: Link, factor: float) -> Link:
    """Return a link with `factor` times the bandwidth for every operation."""
    tunings = tuple(replace(tuning, bandwidth=tuning.bandwidth * factor) for tuning in link.tunings)
    return replace(link, bandwidth=link.bandwidth * factor, tunings=tunings, nics=None)


def plain(cluster: Cluster) -> Cluster:
    """Return a cluster whose links have the same constants for every operation and group size."""
    return replace(
        cluster,
        intra=replace(cluster.intra, tunings=()),
        inter=replace(cluster.inter, tunings=()),
        domains=tuple(replace(domain, link=replace(domain.link, tunings=())) for domain in cluster.domains),
    )


def test_all_reduce_in_a_node_is_the_measured_fit() -> None:
    """35.5 us + 2 x 7/8 x 100 MB / 409.2 GB/s = 35.5 us + 427.7 us."""
    assert H100.collective_seconds("all_reduce", 100e6, INSIDE) == pytest.approx(35.5e-6 + 1.75 * 100e6 / 409.2e9)


def test_constants_are_those_of_operation_and_group_size() -> None:
    """Gathers stay at 344.75 GB/s; four H200 are on a ring of 362 GB/s, seven reduce in the switches at 460."""
    h200 = CostModel(replace(load_cluster("h200"), devices_per_node=28, inter=load_cluster("h200").intra))

    assert H100.collective_seconds("all_gather", 1e9, INSIDE) == pytest.approx(35.5e-6 + 0.875e9 / 344.75e9)
    assert h200.collective_seconds("all_reduce", 1e9, Axis("tp", 4, 1)) == pytest.approx(30e-6 + 1.5e9 / 362e9)
    assert h200.collective_seconds("all_reduce", 1e9, Axis("tp", 7, 1)) == pytest.approx(30.6e-6 + 12 / 7 * 1e9 / 460e9)


def test_small_messages_see_less_bandwidth_on_nvlink3() -> None:
    """29.6 us + 7/8 x 8 MB / 235.2 GB/s x (1 + 1): at the ramp the bandwidth is halved."""
    cost = CostModel(load_cluster("a100"))

    assert cost.collective_seconds("all_gather", 8e6, INSIDE) == pytest.approx(29.6e-6 + 2 * 0.875 * 8e6 / 235.2e9)


def test_between_nodes_only_the_nic_share_counts() -> None:
    """Between 4 nodes: 20 us, 15 us for each of two further nodes, and 3/4 x 20 MB / (50 GB/s x 0.955)."""
    assert H100.collective_seconds("all_gather", 20e6, ACROSS) == pytest.approx(50e-6 + 0.75 * 20e6 / NIC)


def test_a_group_over_nodes_works_as_rings_through_all_members() -> None:
    """8 x 4 devices, 1.28 GB: each of 8 NICs carries 2 x 31/32 of 160 MB, each NVLink 2 x 31/32 of 1.28 GB."""
    inter = 2 * 31 / 32 * 160e6 / NIC
    intra = 2 * 31 / 32 * 1280e6 / 409.2e9

    seconds = H100.collective_seconds("all_reduce", 1280e6, BOTH)

    assert inter > intra
    assert seconds == pytest.approx(35.5e-6 + 80e-6 + inter)


def test_rings_explain_measured_groups_over_nodes() -> None:
    """Hetu-Galvatron measured bus bandwidths of 44.7, 20.8 and 8.1 GB/s for 16, 8 and 2 devices on two nodes of 8.

    Every device took part in a group, so 1, 2 and 8 groups crossed: 44.7, 41.5 and 65.0 GB/s left a node. Rings
    through all members say the same for the first two; a hierarchical all-reduce would have moved half of that.
    """
    base = load_cluster("a100")
    cost = CostModel(plain(replace(base, inter=replace(base.inter, bandwidth=44.7e9 / 8, nics=None))))

    for devices, stride, measured in ((16, 1, 44.7e9), (8, 2, 20.8e9)):
        nbytes = 1e10
        seconds = cost.collective_seconds("all_reduce", nbytes, Axis("dp", devices, stride))
        assert 2 * (devices - 1) / devices * nbytes / seconds == pytest.approx(measured, rel=0.08)


def test_all_to_all_over_nodes_sends_most_of_it_through_the_nics() -> None:
    """Of 32 blocks 24 leave the node: 3/4 of 320 MB, at 0.985 of the share for 4 nodes; 37 us and 2 x 4.4 us."""
    inter = 0.75 * 320e6 / (NIC * 0.985)

    assert H100.collective_seconds("all_to_all", 320e6, BOTH) == pytest.approx(45.8e-6 + inter)


def test_wider_domains_are_tiers_of_their_own() -> None:
    """16 devices on 2 hosts of 2 pairs of 2: each ring leaves a host once, on the NIC that its 4 devices share."""
    cluster = plain(load_cluster("a100-pcie"))
    cost = CostModel(cluster)
    bridge, bus, nic = (link for _, link in cluster.tiers)

    seconds = cost.collective_seconds("all_gather", 1e9, Axis("dp", 8, 1))

    assert nic.bandwidth == pytest.approx(25e9 * 0.955 / 4)
    assert seconds == pytest.approx(bridge.latency + bus.latency + nic.latency + 7 / 8 * 1e9 / 4 / nic.bandwidth)
    assert [cluster.tier(0, other) for other in (1, 2, 4)] == [0, 1, 2]


def test_rings_on_a_torus_add_up() -> None:
    """On 4 x 4 x 8 v5p chips 8 neighbours are a ring, 32 are two: two directions of 90 GB/s each."""
    cost = CostModel(load_cluster("tpu-v5p-4x4x8"))

    assert cost.collective_seconds("all_gather", 1e9, Axis("tp", 8, 1)) == pytest.approx(12e-6 + 0.875e9 / 180e9)
    assert cost.collective_seconds("all_gather", 1e9, Axis("tp", 32, 1)) == pytest.approx(15e-6 + 31 / 32 * 1e9 / 360e9)
    assert cost.collective_seconds("all_gather", 1e9, Axis("dp", 4, 8)) == pytest.approx(8e-6 + 0.75e9 / 180e9)
    assert cost.collective_seconds("all_to_all", 1e9, Axis("tp", 8, 1)) == pytest.approx(12e-6 + 1e9 * 8 / 4 / 180e9)


@pytest.mark.parametrize(
    ("size", "stride", "torus", "expected"),
    [
        (4, 1, (4, 4), [(4, 2.0, True)]),  # a whole axis
        (2, 1, (4, 4), [(2, 1.0, False)]),  # half of it is a line
        (2, 2, (4, 4), [(2, 0.5, False)]),  # two groups interleave on its links
        (4, 4, (4, 4), [(4, 2.0, True)]),  # the other axis
        (8, 2, (4, 4), [(2, 0.5, False), (4, 2.0, True)]),
        (16, 1, (4, 4), [(4, 2.0, True), (4, 2.0, True)]),
        (6, 1, (6, 6), [(6, 1.0, False)]),  # no whole cubes: not closed
        (3, 3, (4, 4), [(3, 1 / 3, False)]),  # lies on no axis
    ],
)
def test_groups_on_a_torus(
    size: int, stride: int, torus: tuple[int, ...], expected: list[tuple[int, float, bool]]
) -> None:
    assert [(ring.members, ring.rate, ring.closed) for ring in rings(size, stride, torus, 4)] == expected


@pytest.mark.parametrize(
    ("size", "stride", "devices_per_node", "inside"),
    [
        (8, 1, 8, 8),
        (64, 1, 8, 8),
        (8, 8, 8, 1),
        (4, 4, 8, 2),
        (3, 1, 8, 1),
        (6, 1, 8, 2),
        (2, 3, 8, 1),
        (72, 1, 72, 72),
    ],
)
def test_members_of_a_group_that_share_a_node(size: int, stride: int, devices_per_node: int, inside: int) -> None:
    """Counted by brute force over all groups of two repeats of the axis: no block of that many straddles nodes."""
    blocks = [
        [start + first + stride * index for index in range(block, block + inside)]
        for start in (0, size * stride)
        for first in range(stride)
        for block in range(0, size, inside)
    ]

    assert devices_in_node(Axis("a", size, stride), devices_per_node) == inside
    if stride in (1, 4, 8):
        assert all(len({device // devices_per_node for device in block}) == 1 for block in blocks)


@given(cluster=clusters, collective=collectives, nbytes=sizes)
def test_a_group_of_one_is_free(cluster: Cluster, collective: Collective, nbytes: float) -> None:
    assert CostModel(cluster).collective_seconds(collective, nbytes, Axis("a", 1, 4)) == 0.0


@given(cluster=clusters, collective=collectives, axis=axes, nbytes=sizes, factor=st.floats(1.0, 100.0))
def test_more_bytes_take_longer_and_more_bandwidth_never_does(
    cluster: Cluster, collective: Collective, axis: Axis, nbytes: float, factor: float
) -> None:
    seconds = CostModel(cluster).collective_seconds(collective, nbytes, axis)
    faster = replace(
        cluster,
        intra=wider(cluster.intra, factor),
        inter=wider(cluster.inter, factor),
        domains=tuple(replace(domain, link=wider(domain.link, factor)) for domain in cluster.domains),
    )

    assert CostModel(cluster).collective_seconds(collective, nbytes * factor, axis) >= seconds
    assert CostModel(faster).collective_seconds(collective, nbytes, axis) <= seconds


@given(cluster=clusters.map(plain), collective=collectives, size=st.sampled_from([2, 4, 8, 16, 32]), nbytes=sizes)
def test_larger_groups_take_longer_for_equal_constants(
    cluster: Cluster, collective: Collective, size: int, nbytes: float
) -> None:
    """Neighbours on links alone: a torus offers larger groups more rings, a tuning other constants.

    An all_to_all that leaves the node also sends less within it, so that it is compared where groups fill nodes.
    """
    assume(not cluster.intra.torus)
    assume(collective is not Collective.ALL_TO_ALL or cluster.devices_per_node % (2 * size) == 0)
    cost = CostModel(cluster)

    seconds = cost.collective_seconds(collective, nbytes, Axis("a", size, 1))

    assert cost.collective_seconds(collective, nbytes, Axis("a", 2 * size, 1)) >= seconds * (1 - 1e-12)


@given(cluster=clusters, axis=axes, nbytes=st.just(0.0) | sizes)
def test_an_all_reduce_is_never_slower_than_the_two_halves_of_it(cluster: Cluster, axis: Axis, nbytes: float) -> None:
    """Otherwise a planner would take a scatter and a gather wherever it needs an all-reduce."""
    cost = CostModel(cluster)

    both = cost.collective_seconds("reduce_scatter", nbytes, axis) + cost.collective_seconds("all_gather", nbytes, axis)

    assert cost.collective_seconds("all_reduce", nbytes, axis) <= both * (1 + 1e-9)


@given(cluster=clusters, nodes=st.sampled_from([2, 4, 64]), nbytes=sizes)
def test_crossing_nodes_costs_at_least_either_tier_alone(cluster: Cluster, nodes: int, nbytes: float) -> None:
    cost = CostModel(cluster)
    inside = cluster.devices_per_node

    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        seconds = cost.collective_seconds(collective, nbytes, Axis("a", inside * nodes, 1))
        assert seconds >= cost.collective_seconds(collective, nbytes, Axis("a", inside, 1))
        assert seconds >= cost.collective_seconds(collective, nbytes / inside, Axis("a", nodes, inside)) * (1 - 1e-12)


@given(name=names, collective=collectives, axis=axes, nbytes=sizes)
def test_names_of_axes_and_clusters_do_not_matter(name: str, collective: Collective, axis: Axis, nbytes: float) -> None:
    cluster = load_cluster(name)
    renamed = CostModel(replace(cluster, name="other"))

    seconds = renamed.collective_seconds(collective, nbytes, replace(axis, name="b"))

    assert seconds == CostModel(cluster).collective_seconds(collective, nbytes, axis)


@given(cluster=clusters, collective=collectives, axis=axes, factor=st.floats(1.0, 2.0))
def test_slowdowns_of_the_stack_lengthen_their_tier(
    cluster: Cluster, collective: Collective, axis: Axis, factor: float
) -> None:
    both = CostModel(cluster, stack=IDEAL.with_scalars(intra_slowdown=factor, inter_slowdown=factor))

    seconds = CostModel(cluster).collective_seconds(collective, 1e8, axis)

    assert both.collective_seconds(collective, 1e8, axis) == pytest.approx(factor * seconds)
    assert both.send_seconds(1e6, 1) == pytest.approx(factor * CostModel(cluster).send_seconds(1e6, 1))


@given(cluster=clusters, collective=collectives, axis=axes)
def test_arrays_are_priced_element_by_element(cluster: Cluster, collective: Collective, axis: Axis) -> None:
    cost = CostModel(cluster)
    nbytes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])

    seconds = cost.collective_seconds(collective, nbytes, axis)

    assert seconds.tolist() == [cost.collective_seconds(collective, size, axis) for size in nbytes.tolist()]


def test_sends_cross_one_link() -> None:
    """7.8 us and 364 GB/s on NVLink, 17 us and 0.73 of a NIC of 50 GB/s between nodes."""
    assert H100.send_seconds(364e6, 0) == pytest.approx(7.8e-6 + 1e-3)
    assert H100.send_seconds(36.5e6, 1) == pytest.approx(17e-6 + 1e-3)


def test_overlap_slows_both_sides_by_the_factor_of_the_widest_link() -> None:
    """1.126 within a node and 1.02 between nodes, times that of the stack."""
    stack = CostModel(load_cluster("h100"), stack=IDEAL.with_scalars(overlap_slowdown=1.5))

    assert [H100.overlap_slowdown(axis) for axis in (INSIDE, ACROSS, BOTH)] == [1.126, 1.02, 1.02]
    assert stack.overlap_slowdown(INSIDE) == pytest.approx(1.5 * 1.126)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        H100.collective_seconds("broadcast", 1.0, INSIDE)


def test_a_halo_exchange_is_latency_and_bytes_over_bandwidth() -> None:
    """1 MB in a node as a send: 7.8 us + 1 MB / 364 GB/s; where neighbours are on other nodes the NIC's."""
    assert H100.exchange_seconds(1e6, INSIDE) == pytest.approx(7.8e-6 + 1e6 / 364e9)
    assert H100.exchange_seconds(1e6, ACROSS) == H100.exchange_seconds(1e6, BOTH) == pytest.approx(17e-6 + 1e6 / 36.5e9)
    np.testing.assert_array_equal(H100.exchange_seconds(np.array([0.0, 1e6]), Axis("tp", 1, 1)), [0.0, 0.0])
    np.testing.assert_allclose(H100.exchange_seconds(np.array([0.0, 1e6]), INSIDE), [0.0, 7.8e-6 + 1e6 / 364e9])

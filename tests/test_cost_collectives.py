"""Costs of collectives: exact values, the tiers an axis crosses, and the laws."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import PRESETS, Cluster, load_cluster
from autopar.cost import Collective, CostModel, devices_in_node
from autopar.sharding import Axis

H100 = CostModel(load_cluster("h100"))
INSIDE = Axis("tp", 8, 1)
ACROSS = Axis("dp", 4, 8)
BOTH = Axis("dp", 32, 1)

clusters = st.sampled_from(sorted(PRESETS)).map(load_cluster)
collectives = st.sampled_from(sorted(Collective))
axes = st.builds(
    lambda size, stride: Axis("a", size, stride), st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 8])
)
sizes = st.floats(1.0, 1e11)


def test_all_reduce_in_a_node_is_the_measured_fit() -> None:
    """34 us + 2 x 7/8 x 100 MB / 383 GB/s = 34 us + 456.9 us."""
    assert H100.collective_seconds("all_reduce", 100e6, INSIDE) == pytest.approx(34e-6 + 1.75 * 100e6 / 383e9)


def test_small_messages_see_less_bandwidth_on_nvlink3() -> None:
    """19 us + 7/8 x 15 MB / 234 GB/s x (1 + 1): at the ramp the bandwidth is halved."""
    cost = CostModel(load_cluster("a100"))

    assert cost.collective_seconds("all_gather", 15e6, INSIDE) == pytest.approx(19e-6 + 2 * 0.875 * 15e6 / 234e9)


def test_between_nodes_only_the_nic_share_counts() -> None:
    """Between 4 nodes: 20 us + 3/4 x 20 MB / (50 GB/s x 0.73) x (1 + 1) at the ramp."""
    assert H100.collective_seconds("all_gather", 20e6, ACROSS) == pytest.approx(20e-6 + 1.5 * 20e6 / 36.5e9)


def test_a_group_over_nodes_works_hierarchically() -> None:
    """8 x 4 devices, 1.28 GB: each NIC share carries 2 x 3/4 of 160 MB, slower than 2 x 7/8 x 1.28 GB on NVLink."""
    inter = 1.5 * 160e6 / 36.5e9 * (1 + (20 / 160) ** 0.44)
    intra = 1.75 * 1280e6 / 383e9

    seconds = H100.collective_seconds("all_reduce", 1280e6, BOTH)

    assert inter > intra
    assert seconds == pytest.approx(34e-6 + 20e-6 + inter)


def test_all_to_all_over_nodes_sends_most_of_it_through_the_nics() -> None:
    """Of 32 blocks 24 leave the node: 3/4 of 320 MB."""
    inter = 0.75 * 320e6 / 36.5e9 * (1 + (20 / 320) ** 0.44)

    assert H100.collective_seconds("all_to_all", 320e6, BOTH) == pytest.approx(54e-6 + inter)


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
    wider = replace(
        cluster,
        intra=replace(cluster.intra, bandwidth=cluster.intra.bandwidth * factor),
        inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth * factor),
    )

    assert CostModel(cluster).collective_seconds(collective, nbytes * factor, axis) >= seconds
    assert CostModel(wider).collective_seconds(collective, nbytes, axis) <= seconds


@given(cluster=clusters, axis=axes, nbytes=sizes)
def test_all_reduce_is_reduce_scatter_and_all_gather_with_one_latency(
    cluster: Cluster, axis: Axis, nbytes: float
) -> None:
    cost = CostModel(cluster)
    latency = cost.collective_seconds("all_reduce", 0.0, axis)

    both = cost.collective_seconds("reduce_scatter", nbytes, axis) + cost.collective_seconds("all_gather", nbytes, axis)

    assert cost.collective_seconds("all_reduce", nbytes, axis) + latency == pytest.approx(both)


@given(cluster=clusters, nodes=st.sampled_from([2, 4, 64]), nbytes=sizes)
def test_crossing_nodes_costs_at_least_either_tier_alone(cluster: Cluster, nodes: int, nbytes: float) -> None:
    cost = CostModel(cluster)

    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        seconds = cost.collective_seconds(collective, nbytes, Axis("a", 8 * nodes, 1))
        assert seconds >= cost.collective_seconds(collective, nbytes, Axis("a", 8, 1))
        assert seconds >= cost.collective_seconds(collective, nbytes / 8, Axis("a", nodes, 8))


@given(cluster=clusters, collective=collectives, axis=axes)
def test_arrays_are_priced_element_by_element(cluster: Cluster, collective: Collective, axis: Axis) -> None:
    cost = CostModel(cluster)
    nbytes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])

    seconds = cost.collective_seconds(collective, nbytes, axis)

    assert seconds.tolist() == [cost.collective_seconds(collective, size, axis) for size in nbytes.tolist()]


def test_sends_cross_one_link() -> None:
    assert H100.send_seconds(383e6, crosses_nodes=False) == pytest.approx(34e-6 + 1e-3)
    assert H100.send_seconds(36.5e6, crosses_nodes=True) == pytest.approx(20e-6 + 1e-3)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        H100.collective_seconds("broadcast", 1.0, INSIDE)


def test_a_halo_exchange_is_latency_and_bytes_over_bandwidth() -> None:
    """1 MB in a node: 34 us + 1 MB / 383 GB/s; where neighbours are on other nodes 20 us + 1 MB / 36.5 GB/s."""
    assert H100.exchange_seconds(1e6, INSIDE) == pytest.approx(34e-6 + 1e6 / 383e9)
    assert H100.exchange_seconds(1e6, ACROSS) == H100.exchange_seconds(1e6, BOTH) == pytest.approx(20e-6 + 1e6 / 36.5e9)
    np.testing.assert_array_equal(H100.exchange_seconds(np.array([0.0, 1e6]), Axis("tp", 1, 1)), [0.0, 0.0])
    np.testing.assert_allclose(H100.exchange_seconds(np.array([0.0, 1e6]), INSIDE), [0.0, 34e-6 + 1e6 / 383e9])

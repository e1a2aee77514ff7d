"""What stages of different meshes send to each other."""

from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import PRESETS, Cluster, Domain, NodeGroup
from autopar.cost import CostModel, Handed, Holding
from autopar.cost.handover import Division, pieces
from autopar.errors import ShardingError
from autopar.runtime.blocks import scatter
from autopar.sharding import Mesh, Placement, Replicate, Shard, parse_placements

H100 = PRESETS["h100"]
MESHES = (Mesh.of(), Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3), Mesh.of(a=4, b=2))
SHAPE = (144, 144)


@st.composite
def _holdings(draw: st.DrawFn, first: int) -> Holding:
    """Draw how a stage holds a value of `SHAPE`."""
    mesh = draw(st.sampled_from(MESHES))
    chunks = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    allowed: list[Placement] = [Replicate(), Shard(0, chunks[0]), Shard(1, chunks[1])]
    placements = [draw(st.sampled_from(allowed)) for _ in mesh.axes]
    return Holding(first, mesh, tuple(placements))


@given(data=st.data())
def test_every_device_gets_its_block(data: st.DataObject) -> None:
    """Boxes put together are the blocks that scattering the whole value gives, and nothing is sent twice."""
    source = data.draw(_holdings(2))
    target = data.draw(_holdings(2 + source.mesh.size))
    whole = np.arange(prod(SHAPE)).reshape(SHAPE)
    held, wanted = (scatter(whole, side.placements, side.mesh) for side in (source, target))
    here, there = (Division.of(SHAPE, side) for side in (source, target))
    found = [np.full(block.shape, -1) for block in wanted]

    sent = pieces(SHAPE, source, target, H100)

    for sender, receiver, boxes in zip(sent.senders.tolist(), sent.receivers.tolist(), sent.boxes(), strict=True):
        for box in boxes:
            i, j = sender - source.first, receiver - target.first
            found[j][there.place(j, box)] = held[i][here.place(i, box)]
    assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))
    assert sent.elements.sum() == sum(block.size for block in wanted)


def _counts(source: str, target: str, meshes: tuple[Mesh, Mesh], first: int = 0) -> Counter[tuple[int, int]]:
    """Return how many elements of a value of 8 by 8 go from which device to which."""
    here = Holding(first, meshes[0], parse_placements(source))
    there = Holding(first + meshes[0].size, meshes[1], parse_placements(target))
    sent = pieces((8, 8), here, there, H100)
    return Counter(
        {
            (i, j): n
            for i, j, n in zip(sent.senders.tolist(), sent.receivers.tolist(), sent.elements.tolist(), strict=True)
        }
    )


def test_devices_of_equal_stages_meet_their_counterparts() -> None:
    """Device i sends to device i, copies included."""
    mesh = Mesh.of(dp=2, tp=2)

    assert _counts("S(0)R", "S(0)R", (mesh, mesh)) == {(0, 4): 32, (1, 5): 32, (2, 6): 32, (3, 7): 32}


def test_copies_share_the_load() -> None:
    """Four holders of a whole value serve one receiver each, or the parts of eight receivers two each."""
    four, eight = Mesh.of(tp=4), Mesh.of(tp=8)

    assert _counts("R", "R", (four, four)) == {(i, 4 + i): 64 for i in range(4)}
    assert _counts("R", "S(1)", (four, eight)) == {(i % 4, 4 + i): 8 for i in range(8)}


def test_parts_come_from_all_who_have_them() -> None:
    """A quarter of the columns is one half of what a device held before; another dim takes a part of each."""
    two, four = Mesh.of(tp=2), Mesh.of(tp=4)

    assert _counts("S(1)", "S(1)", (two, four)) == {(0, 2): 16, (0, 3): 16, (1, 4): 16, (1, 5): 16}
    assert _counts("S(1)", "S(0)", (four, two)) == {(i, 4 + j): 8 for i in range(4) for j in range(2)}


def test_what_is_in_the_node_is_not_fetched_from_another() -> None:
    """Devices 4 to 11 hold the value, of which 8 to 11 share a node with 12 to 15."""
    found = _counts("R", "RR", (Mesh.of(tp=8), Mesh.of(dp=4, tp=2)), first=4)

    assert {sender for sender, receiver in found if receiver < 16} == {8, 9, 10, 11}
    assert sorted(sender for sender, receiver in found if receiver >= 16) == [4, 5, 6, 7]


def _seconds(source: str, target: str, first: int, meshes: tuple[Mesh, Mesh], costs: CostModel) -> float:
    here = Holding(first, meshes[0], parse_placements(source))
    there = Holding(first + meshes[0].size, meshes[1], parse_placements(target))
    return costs.hand_over_seconds([Handed((1024, 1024), 2.0, here, there)])


def test_the_fullest_device_of_the_slowest_tier_sets_the_time() -> None:
    """Half of 2 MB each inside a node; all of it from one device to eight of the next node."""
    costs, mesh = CostModel(H100), Mesh.of(tp=4)
    whole = 1024 * 1024 * 2.0

    assert _seconds("S(0)", "S(0)", 0, (mesh, mesh), costs) == costs.send_seconds(whole / 4, 0)
    assert _seconds("S(0)", "S(0)", 4, (mesh, mesh), costs) == costs.send_seconds(whole / 4, 1)
    assert _seconds("S(0)", "R", 0, (mesh, Mesh.of(tp=2)), costs) == costs.send_seconds(whole, 0)
    # devices 4 to 7 have it; 8 to 15 get it from another node, two of them from each
    assert _seconds("R", "R", 4, (mesh, Mesh.of(tp=8)), costs) == costs.send_seconds(2 * whole, 1)
    both = [Handed((4, 4), 2.0, Holding(0, mesh, (Shard(0),)), Holding(4, mesh, (Shard(0),)))] * 2
    assert costs.hand_over_seconds(both) == costs.send_seconds(16.0, 0)
    assert costs.hand_over_seconds([]) == 0.0


@given(data=st.data(), nodes=st.integers(1, 5))
def test_hand_overs_cost_the_same_wherever_they_are(data: st.DataObject, nodes: int) -> None:
    """Some whole nodes, or racks, further on; one value costs what two halves of it do."""
    source = data.draw(_holdings(data.draw(st.integers(0, 7))))
    target = data.draw(_holdings(source.first + source.mesh.size))
    racks = replace(H100, domains=(Domain(16, replace(H100.inter, nics=None)),))
    for cluster, period in ((H100, 8), (racks, 16)):
        costs = CostModel(cluster)
        further = [replace(side, first=side.first + nodes * period) for side in (source, target)]

        seconds = costs.hand_over_seconds([Handed(SHAPE, 2.0, source, target)])

        assert seconds == costs.hand_over_seconds([Handed(SHAPE, 2.0, *further)])
        halves = [Handed(SHAPE, 1.0, source, target)] * 2
        assert seconds == pytest.approx(costs.hand_over_seconds(halves), rel=1e-12)


def test_what_goes_far_leaves_the_node_too() -> None:
    """A device sends a part to the next node and a part beyond the rack: its NIC carries both."""
    far = replace(H100.inter, bandwidth=H100.inter.bandwidth / 2, latency=5 * H100.inter.latency, nics=None)
    costs = CostModel(
        replace(H100, devices_per_node=2, inter=replace(H100.inter, nics=None), domains=(Domain(4, far),))
    )
    mesh = Mesh.of(a=2, b=2)

    # stage 0: devices 0, 1; stage 1: devices 2 to 5, of which 4 and 5 are in another rack
    seconds = _seconds("S(0)", "S(0)R", 0, (Mesh.of(a=2), mesh), costs)

    half = 1024 * 1024.0
    assert seconds == max(costs.send_seconds(2 * half, 1), costs.send_seconds(2 * half, 2))


def test_terms_of_a_sum_are_spread_over_the_terms_of_the_next_stage() -> None:
    """Four terms become two: those of even numbers one, the others the other; or one for everybody."""
    four, two = Mesh.of(dp=4), Mesh.of(dp=2)

    assert _counts("P", "P", (four, two)) == {(0, 4): 64, (2, 4): 64, (1, 5): 64, (3, 5): 64}
    assert _counts("P", "S(0)", (two, two)) == {(i, 2 + j): 32 for i in range(2) for j in range(2)}
    assert _counts("P", "P", (two, four)) == {(0, 2): 64, (1, 3): 64}  # devices 4 and 5 have zeros


def test_other_terms_are_refused() -> None:
    mesh = Mesh.of(tp=2)

    with pytest.raises(ShardingError, match="its terms are put together by max"):
        pieces((4, 4), Holding(0, mesh, parse_placements("P(max)")), Holding(2, mesh, parse_placements("R")), H100)


MIXED = Cluster.mixed(
    "mixed",
    (NodeGroup(2, PRESETS["a100"]), NodeGroup(2, H100)),
    replace(H100.inter, bandwidth=1e10, latency=2e-5, nics=None),
)


@given(first=st.integers(0, 31), second=st.integers(0, 31))
def test_tiers_of_many_pairs_are_those_of_each(first: int, second: int) -> None:
    """In clusters of equal nodes, with domains, and of groups."""
    wide = replace(H100, domains=(Domain(16, replace(H100.inter, nics=None)),))
    for cluster in (H100, wide, MIXED):
        assert cluster.tiers_between(np.array([first]), np.array([second])).tolist() == [cluster.tier(first, second)]


def test_a_hand_over_inside_a_group_has_its_links() -> None:
    """Between groups it has the link between them, or the slowest there is."""
    costs, mesh = CostModel(MIXED), Mesh.of(tp=4)

    inside = _seconds("S(0)", "S(0)", 16, (mesh, mesh), costs)
    across = _seconds("S(0)", "S(0)", 12, (mesh, mesh), costs)

    assert inside == CostModel(H100).send_seconds(2 * 1024 * 1024 / 4, 0)
    assert across == costs.send_seconds(2 * 1024 * 1024 / 4, 1)

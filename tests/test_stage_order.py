"""Devices numbered group by group: where they lie, what collectives and hand-overs cost, what a plan keeps of it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.cluster import PRESETS, Numbering, cluster_from_dict
from autopar.cost import CostModel
from autopar.degrees import Degrees
from autopar.errors import ClusterError
from autopar.estimates import Estimator
from autopar.partitioning import read_pins
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.sharding import Axis
from autopar.workload import open_workload
from tests.executions import TINY

H100 = PRESETS["h100"]
powers = st.sampled_from([1, 2, 4, 8])


@given(groups=powers, blocks=powers, block=powers)
def test_nodes_of_a_group_are_parts_of_nodes(groups: int, blocks: int, block: int) -> None:
    """Every device has a place of its own; what a group has of a node are neighbours by number."""
    size = blocks * block
    numbering, inside = Numbering(groups, size, block), Numbering(groups, size, block).in_node(8)
    if groups * size % 8:
        return

    places = numbering.place(np.arange(groups * size))

    assert sorted(places.tolist()) == list(range(groups * size))
    for group in range(groups) if inside else ():
        own = np.arange(group * size, (group + 1) * size)
        nodes = {
            (number // inside, place // 8) for number, place in zip(own.tolist(), places[own].tolist(), strict=True)
        }
        assert len(nodes) == len({node for node, _ in nodes}) == len({place for _, place in nodes})


@given(groups=powers, blocks=powers, block=powers)
def test_tiers_are_those_of_the_places(groups: int, blocks: int, block: int) -> None:
    size = blocks * block
    numbering = Numbering(groups, size, block)
    if groups * size % 8 or not numbering.in_node(8):
        return
    cluster, devices = H100.by_group(groups, size, block), np.arange(groups * size)

    tiers = cluster.tiers_between(devices[:, None], devices)

    places = numbering.place(devices)
    np.testing.assert_array_equal(tiers, (places[:, None] // 8 != places // 8).astype(int))
    assert [cluster.boundary_tier(group * size, size) for group in range(groups - 1)] == [
        tiers[devices[:size] + group * size, devices[:size] + (group + 1) * size].max() for group in range(groups - 1)
    ]
    assert cluster_from_dict(cluster.to_dict()) == cluster
    assert cluster.by_node == H100


def test_a_pipeline_inside_nodes_hands_over_inside_and_reduces_outside() -> None:
    """4 groups of 16 devices, 2 of each in a node of 8: a group is spread over 8 nodes instead of 2."""
    cluster, data = H100.by_group(groups=4, size=16, block=2), Axis("dp", 8, 2)

    assert cluster.devices_per_node == 2
    assert [H100.boundary_tier(16 * group, 16) for group in range(3)] == [1, 1, 1]
    assert [cluster.boundary_tier(16 * group, 16) for group in range(3)] == [0, 0, 0]
    across, around = (CostModel(own).collective_seconds("all_reduce", np.array(1e9), data) for own in (H100, cluster))
    assert around > 3 * across


@pytest.mark.parametrize(("cluster", "size", "block"), [("h100", 12, 3), ("gb200", 40, 10), ("tpu-v5p", 16, 2)])
def test_what_does_not_lie_evenly_is_refused(cluster: str, size: int, block: int) -> None:
    with pytest.raises(ClusterError, match="pipelines"):
        PRESETS[cluster].by_group(groups=4, size=size, block=block)


@pytest.mark.slow
def test_a_plan_keeps_the_order_of_its_stages(cache_dir: Path) -> None:
    """Simulated with it, written, read back, and estimated alike; without several nodes it has no effect."""
    predictor = Predictor(open_workload("zoo:llama3-8b", dims={**TINY["llama3-8b"], "seq": 512}), cache_dir)
    usual = Degrees(dp=8, tp=2, pp=2, global_batch=32)
    inside = Degrees(dp=8, tp=2, pp=2, global_batch=32, pp_inside=True)

    across, around = (predictor.predict(own, H100) for own in (usual, inside))

    assert around.timeline.stages[0].gradient_seconds > across.timeline.stages[0].gradient_seconds
    assert around.timeline.stages[1].wait_seconds < across.timeline.stages[1].wait_seconds
    read = Plan.from_json(around.plan.to_json())
    assert read.job.cluster["numbered"] == {"groups": 2, "size": 16, "block": 2}
    assert "pp=2 (inside dp)" in read.summary
    found = Estimator(predictor, H100).estimate([usual, inside]).step_seconds
    assert found[0] != found[1]
    alone = Degrees(dp=2, tp=2, pp=2, global_batch=32, pp_inside=True)
    assert "numbered" not in predictor.predict(alone, H100).plan.job.cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        ("llama3-8b", {"stages": 2, "pp_inside": True}),
        ("qwen3-30b-a3b", {"stages": 2, "schedule": "1f1b-a2a"}),
        ("qwen3-30b-a3b", {"stages": 2, "schedule": "dualpipe-v"}),
        ("qwen3-30b-a3b", {"stages": 1, "schedule": "1f1b-a2a"}),
    ],
    ids=str,
)
def test_the_search_finds_what_is_pinned(model: str, pins: dict[str, object], cache_dir: Path) -> None:
    """The formula agrees with the simulator, and the bound is no higher than either.

    Steps of a millisecond are mostly latencies, of which the simulator hides fewer at the end of a step.
    """
    plan = autopar.solve(
        f"zoo:{model}", gpus=16, global_batch=32, dims={**TINY[model], "num_layers": 4, "seq": 512}, stack="ideal",
        pins=pins, cache_dir=cache_dir,
    )  # fmt: skip

    assert plan.search is not None
    assert plan.simulated is not None
    assert plan.search.bound <= plan.objective * (1 + 1e-6)
    assert plan.simulated.step_seconds == pytest.approx(plan.objective, rel=0.15)
    assert plan.schedule == pins.get("schedule", plan.schedule)
    assert ("numbered" in plan.job.cluster) == pins.get("pp_inside", False)
    again = read_pins(plan, cache_dir=cache_dir)
    assert again.pin.pp_inside == ((True,) if pins.get("pp_inside") else ())

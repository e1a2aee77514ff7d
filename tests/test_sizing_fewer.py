"""Plans on fewer GPUs than asked for, where links between nodes are slow."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.cluster import Cluster, load_cluster
from autopar.degrees import Degrees
from autopar.plan import Plan
from autopar.request import JobRequest
from autopar.sizing.fewer import fewer_counts, links_are_slow, reserved
from autopar.task import Effort, prepare, resized


def _nodes(bandwidth: float) -> Cluster:
    """Nodes of two devices that reach each other at so many bytes/s."""
    preset = load_cluster("h100")
    link = replace(preset.inter, tier="Ethernet", bandwidth=bandwidth, tunings=(), nics=None)
    return replace(preset, name=f"pairs at {bandwidth:g}", devices_per_node=2, inter=link, host=None)


SLOW, FAST = _nodes(1e8), _nodes(1e12)
DIMS = {"num_layers": 2, "hidden": 4096}
JOB: dict[str, Any] = {"global_batch": 8192, "dims": DIMS, "cluster": SLOW}
"""2.3 ms of products on one device; gradients of 134 MB take more than a second from node to node."""


@cache
def _planned() -> Plan:
    return autopar.solve("zoo:mlp-xs", gpus=4, **JOB)


def test_halves_that_fill_nodes_are_looked_at() -> None:
    """Of 8 nodes of 2: 8, 4 and 2 devices; none inside a node, none beside pins."""
    task = prepare(JobRequest("zoo:mlp-xs", gpus=16, **JOB))

    assert fewer_counts(task) == (8, 4, 2)
    assert fewer_counts(resized(task, gpus=2)) == ()


def test_time_is_kept_for_fewer_gpus_only_where_links_are_slow() -> None:
    """A quarter of the limit; a search without a limit needs none."""
    slow, fast = (prepare(JobRequest("zoo:mlp-xs", gpus=4, **{**JOB, "cluster": own})) for own in (SLOW, FAST))

    assert links_are_slow(slow)
    assert not links_are_slow(fast)
    assert reserved(slow, Effort(time_limit=40.0)) == 10.0
    assert reserved(slow, Effort()) == reserved(fast, Effort(time_limit=40.0)) == 0.0


def test_a_plan_on_fewer_gpus_is_found_and_said() -> None:
    """Two devices of one node are faster than four that talk over 100 MB/s, and two are left free."""
    plan = _planned()

    assert plan.job.gpus == 2
    assert plan.simulated is not None
    assert plan.search is not None
    assert (
        "2 of 4 GPUs are left free: no plan was found in which they make the step shorter"
        in {remark.kind: remark.text for remark in plan.simulated.remarks}["idle"].partition(";")[0]
    )
    assert any(line.startswith("plans on fewer GPUs; on 2 GPUs: ") for line in plan.search.space)
    assert plan.search.bound <= plan.objective
    assert plan == Plan.from_json(plan.to_json())


@pytest.mark.parametrize("degrees", [{"dp": 4}, {"dp": 2}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"dp": 2, "zero": 3}, {}])
def test_no_plan_by_degrees_on_fewer_gpus_is_faster(degrees: dict[str, int]) -> None:
    """Whatever number of the devices asked for it takes."""
    plan = _planned()
    batch = plan.job.global_batch
    samples = batch // degrees.get("dp", 1)

    for microbatch in (samples, samples // 2, samples // 8):
        stated = replace(Degrees(microbatch=microbatch, global_batch=batch), **degrees)  # type: ignore[arg-type]
        found = autopar.predict("zoo:mlp-xs", stated, cluster=SLOW, dims=DIMS)
        assert plan.simulated is not None
        assert found.timeline.step_seconds >= plan.simulated.step_seconds * (1 - 1e-9)
        assert plan.search is not None
        assert found.timeline.step_seconds >= plan.search.bound * (1 - 1e-9)

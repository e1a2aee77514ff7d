"""Plans on fewer GPUs than asked for, where links between nodes are slow."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.cluster import Cluster, NodeGroup, load_cluster
from autopar.cost import default_limit
from autopar.degrees import Degrees
from autopar.plan import Plan
from autopar.request import JobRequest
from autopar.sizing.fewer import links_are_slow, of_part, parts, reserved
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

    assert [part.gpus for part in parts(task)] == [8, 4, 2]
    assert parts(resized(task, gpus=2)) == ()
    assert parts(prepare(JobRequest("zoo:mlp-xs", gpus=16, pins={"stages": 1}, **JOB))) == ()


def _mixed() -> Cluster:
    """A node of two devices of half the speed and half the memory, then one of two H100, over 100 MB/s."""
    device = SLOW.device
    half = replace(
        device,
        name="half",
        memory=device.memory / 2,
        peaks=tuple((numbers, peak / 2) for numbers, peak in device.peaks),
        memory_bandwidth=device.memory_bandwidth / 2,
    )
    groups = NodeGroup(1, replace(SLOW, name="halves", device=half)), NodeGroup(1, SLOW)
    return Cluster.mixed("two kinds", groups, SLOW.inter)


def test_each_kind_of_nodes_is_looked_at_alone() -> None:
    """The faster kind first, with the memory it has; a limit that was given holds there, too."""
    job = {**JOB, "cluster": _mixed()}
    task = prepare(JobRequest("zoo:mlp-xs", gpus=4, **job))
    limited = prepare(JobRequest("zoo:mlp-xs", gpus=4, memory_limit=1e9, **job))

    fast, slow = parts(task)
    assert [str(fast), str(slow)] == [f"2 GPUs of {SLOW.device.name}", "2 GPUs of half"]
    assert of_part(task, fast).job.memory_limit == default_limit(SLOW) > task.job.memory_limit
    assert of_part(limited, fast).job.memory_limit == 1e9


def test_mixtures_of_some_kinds_are_looked_at() -> None:
    """Of three kinds each two together, and each alone; a job takes the first of them only."""
    kinds = [replace(SLOW, name=name, device=replace(SLOW.device, name=name)) for name in "abc"]
    three = Cluster.mixed("three kinds", tuple(NodeGroup(1, kind) for kind in kinds), SLOW.inter)
    task = prepare(JobRequest("zoo:mlp-xs", gpus=6, **{**JOB, "cluster": three}))

    found = {str(part): part.machine for part in parts(task)}

    assert set(found) == {
        *(f"2 GPUs of {kind}" for kind in "abc"),
        *(f"4 GPUs of {pair}" for pair in ("a and b", "a and c", "b and c")),
    }
    assert [group.cluster.name for group in found["4 GPUs of a and c"].groups] == ["a", "c"]
    assert [str(part) for part in parts(resized(task, gpus=4))] == ["2 GPUs of a", "2 GPUs of b"]


def test_the_faster_kind_of_nodes_alone_is_found_and_said() -> None:
    """Two H100 are faster than with two others behind 100 MB/s, though these are the first devices."""
    plan = autopar.solve("zoo:mlp-xs", gpus=4, **{**JOB, "cluster": _mixed()})

    assert plan.simulated is not None
    assert plan.search is not None
    assert plan.job.gpus == 2
    assert plan.job.cluster["name"] == SLOW.name
    idle = {remark.kind: remark.text for remark in plan.simulated.remarks}["idle"]
    assert idle.startswith(f"2 of 4 GPUs are left free (the plan is on {SLOW.device.name}): no plan was found")
    assert plan.search.bound <= plan.objective
    assert plan == Plan.from_json(plan.to_json())


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

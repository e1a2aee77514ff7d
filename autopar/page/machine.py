"""The picture of the machine: which device lies in which node, and in which groups it works."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.cluster import cluster_from_dict
from autopar.page.palette import PLAIN, ordered, series
from autopar.page.records import DeviceRange, Lanes, Machine
from autopar.plan import Plan
from autopar.program.records import Program

ROLES = ("dp", "tp", "cp", "ep", "spatial")
"""Roles of mesh axes by which devices can be coloured, besides "pp"."""


def machine(plan: Plan, program: Program, roles: Sequence[Mapping[str, str]]) -> Machine:
    """Return nodes and devices of a plan; `roles` say what each mesh axis does, by stage."""
    ranges = []
    for held in program.chunks:
        stage = program.stages[held[0]]
        axes = tuple((roles[stage.index].get(axis.name, axis.name), axis.size, axis.stride) for axis in stage.mesh.axes)
        ranges.append(DeviceRange(stage.devices, axes))
    count = max(plan.job.gpus, program.num_devices)
    return Machine(count, tuple(_node_starts(plan, count)), tuple(ranges))


def _node_starts(plan: Plan, count: int) -> Iterator[int]:
    """Yield the first device of each node."""
    cluster = cluster_from_dict(plan.job.cluster)
    start = 0
    for group in cluster.groups:
        for _ in range(group.nodes):
            if start < count:
                yield start
            start += group.cluster.devices_per_node
    while start < count:
        yield start
        start += cluster.devices_per_node


def machine_data(found: Machine, named: Lanes) -> dict[str, Any]:
    """Return what the page's script draws the machine from.

    Choices are the groups a device can be coloured by: pipeline stages, if there are several, and the roles of axes of
    more than one device.
    """
    present = {role for lane in found.lanes for role, size, _ in lane.axes if size > 1}
    choices = [*(["pp"] if len(found.lanes) > 1 else []), *(role for role in ROLES if role in present)]
    return {
        "word": named.word,
        "count": found.num_devices,
        "nodes": found.node_starts,
        "lanes": [
            {"title": title, "devices": lane.devices, "axes": lane.axes}
            for title, lane in zip(named.titles, found.lanes, strict=True)
        ],
        "choices": choices or ["pp"],
        "ordered": ordered(len(found.lanes)),
        "series": series(9),
        "plain": PLAIN,
    }

"""The picture of the machine: which device lies in which node, and in which groups it works."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cluster import Cluster, cluster_from_dict
from autopar.page.palette import DARK, LIGHT, PLAIN, SERIES, ordered, series
from autopar.page.records import DeviceRange, Lanes, Machine
from autopar.plan import Plan
from autopar.program.records import Program

GROUPS: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp", "ep"),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "expert dp": ("dp",),
    "spatial": ("spatial",),
}
"""Groups by which devices can be coloured, besides "pp", and the roles of the mesh axes that their devices lie along.

Devices of an expert-parallel group have samples of their own, so they are in one data-parallel group, too."""


def machine(plan: Plan, program: Program, roles: Sequence[Mapping[str, str]]) -> Machine:
    """Return nodes and devices of a plan; `roles` say what each mesh axis does, by stage."""
    ranges = []
    for devices in dict.fromkeys(stage.devices for stage in plan.stages):
        number = next(number for number, stage in enumerate(plan.stages) if stage.devices == devices)
        stage = program.stages[number % len(program.stages)]
        major, *minor = stage.mesh.axes
        rows = (devices[1] - devices[0]) // major.stride
        sizes = (rows, *(axis.size for axis in minor))
        axes = tuple(
            (roles[stage.index].get(axis.name, axis.name), size, axis.stride)
            for axis, size in zip(stage.mesh.axes, sizes, strict=True)
        )
        ranges.append(DeviceRange(devices, axes))
    count = max(plan.job.gpus, program.num_devices)
    cluster = cluster_from_dict(plan.job.cluster)
    return Machine(count, tuple(_node_starts(cluster.by_node, count)), tuple(ranges), _numbers(cluster, count))


def _numbers(cluster: Cluster, count: int) -> tuple[int, ...]:
    """Return the number in the plan of each device, node by node; empty if devices are numbered so."""
    if cluster.numbered is None:
        return ()
    numbering, _ = cluster.numbered
    used = numbering.groups * numbering.size
    return (*map(int, np.argsort(numbering.place(np.arange(used)))), *range(used, count))


def _node_starts(cluster: Cluster, count: int) -> Iterator[int]:
    """Yield the first device of each node."""
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
    groups = {name: roles for name, roles in GROUPS.items() if present.intersection(roles)}
    if "ep" not in present or "dp" not in present:
        groups.pop("expert dp", None)
    grounds = {"light": LIGHT, "dark": DARK}
    choices = [*(["pp"] if len(found.lanes) > 1 else []), *groups]
    return {
        "word": named.word,
        "count": found.num_devices,
        "nodes": found.node_starts,
        "numbers": found.numbers,
        "groups": groups,
        "lanes": [
            {"title": title, "devices": lane.devices, "axes": lane.axes}
            for title, lane in zip(named.titles, found.lanes, strict=True)
        ],
        "choices": choices or ["pp"],
        "ordered": {name: ordered(len(found.lanes), ground) for name, ground in grounds.items()},
        "series": {name: series(SERIES, ground) for name, ground in grounds.items()},
        "plain": PLAIN,
    }

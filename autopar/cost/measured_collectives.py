"""Published timings of collectives beside what the cost model says.

A record states operation, hardware, group and bytes; it is priced by `CostModel` on the preset of that hardware, as any
plan is. The constants of the presets were fitted to a part of the records only (`held_out`): every third message size
of a table was left out, and some tables as a whole.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, Link, load_cluster
from autopar.cost.collectives import Collective
from autopar.cost.model import CostModel
from autopar.errors import ClusterError
from autopar.sharding import Axis

Row = Mapping[str, Any]

_CLUSTERS = (
    # hardware as records name it -> preset
    ("A100 PCIe pairwise", "a100-pcie"),
    ("A100", "a100"),
    ("V100", "v100"),
    ("H100", "h100"),
    ("H200", "h200"),
    ("GB200", "gb200"),
    ("B200", "b200"),
)

_WHOLE_TABLES = ("a100_dgx/all_reduce", "sp_time_1nodes", "16 GiB, 8x H200")
"""Tables of which no row was used, unless `_FITTED` says so."""

_FITTED = (("sp_time_1nodes", "all_to_all"),)
"""Tables and operations of them that are fitted all the same: there is no other source."""

_RING = frozenset({"Ring", "NVLS off (ring)"})

_CORRECTED_GROUPS = {"H100 64 GPU SHARP": 96}
"""Group sizes that contradict the ratio of bus to algorithm bandwidth in the same row."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One published timing and its prediction.

    Attributes:
        source: Where it was published.
        gpu: Hardware as it is named there.
        operation: What was timed.
        devices: Devices of the group.
        nbytes: Bytes of the larger side on one device.
        measured: Seconds.
        predicted: Seconds.
        held_out: Whether no constant was fitted to it.
    """

    source: str
    gpu: str
    operation: str
    devices: int
    nbytes: float
    measured: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """Signed error as a share of the measured time."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A record that cannot be priced.

    Attributes:
        source: Where it was published.
        operation: What was timed.
        reason: Why not.
    """

    source: str
    operation: str
    reason: str


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """All records of a file.

    Attributes:
        timings: Those that could be priced.
        unpriced: The others.
    """

    timings: tuple[Timing, ...]
    unpriced: tuple[Unpriced, ...]

    def tables(self) -> dict[tuple[str, str, str, int, bool], tuple[Timing, ...]]:
        """Return the timings by source, hardware, operation, group size and whether they were held out."""
        tables = defaultdict(list)
        for timing in self.timings:
            key = (timing.source, timing.gpu, timing.operation, timing.devices, timing.held_out)
            tables[key].append(timing)
        return {key: tuple(rows) for key, rows in sorted(tables.items())}


def collective_report(path: Path, model: CostModel | None = None) -> CollectiveReport:
    """Return what the cost model says of the records of a file.

    Args:
        path: `comm.json`, a list of records with source, op, gpu, n_gpus, nodes, bytes and time_us or busbw_gbps.
        model: Cost model whose cluster to use for all records; by default each is priced on the preset of its hardware.

    Raises:
        ClusterError: If the file cannot be read.
    """
    rows = read_rows(path)
    timings, unpriced = [], []
    for row, held_out in zip(rows, split(rows), strict=True):
        priced = _price(row, held_out, model)
        if isinstance(priced, Timing):
            timings.append(priced)
        else:
            unpriced.append(Unpriced(row["source"], row["op"], priced))
    return CollectiveReport(tuple(timings), tuple(unpriced))


def read_rows(path: Path) -> list[Row]:
    """Return the records of a file.

    Raises:
        ClusterError: If it cannot be read or is no list of records with a source and an op.
    """
    hint = "give the path of a list of records as docs/published_steps.md describes them"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path} cannot be read: {error}", hint=hint) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"source", "op"} <= set(row) for row in rows):
        raise ClusterError(f"{path} is no list of records with a source and an op", hint=hint)
    return rows


def split(rows: Sequence[Row]) -> list[bool]:
    """Return for each record whether it is held out of fits.

    Every third message size of a table (source, hardware, operation, group), in ascending order, and whole tables.
    """
    tables = defaultdict(list)
    for index, row in enumerate(rows):
        tables[row["source"], row.get("gpu"), row["op"], row.get("n_gpus"), row.get("nodes")].append(index)
    held_out = [False] * len(rows)
    for (source, _, operation, *_), members in tables.items():
        fitted = any(name in source and operation == known for name, known in _FITTED)
        whole = not fitted and any(name in source for name in _WHOLE_TABLES)
        for position, index in enumerate(sorted(members, key=lambda index: rows[index].get("bytes") or 0)):
            held_out[index] = whole or position % 3 == 2
    return held_out


def bus_factor(operation: str, devices: int) -> float:
    """Return the ratio of bus to algorithm bandwidth of an operation, as nccl-tests defines it."""
    if operation == "send":
        return 1.0
    return (2 if operation == Collective.ALL_REDUCE else 1) * (devices - 1) / devices


def measured_seconds(row: Row) -> float | None:
    """Return the measured seconds of a record; None if it states no size or neither time nor bandwidth."""
    nbytes, devices = row.get("bytes"), row.get("n_gpus")
    if nbytes is None or devices is None:
        return None
    if row.get("time_us") is not None:
        return float(row["time_us"]) * 1e-6
    if nbytes == 0 and row.get("latency_us") is not None:
        return float(row["latency_us"]) * 1e-6
    if row.get("busbw_gbps"):
        return float(bus_factor(operation(row), devices) * nbytes / (row["busbw_gbps"] * 1e9))
    return None


def operation(row: Row) -> str:
    """Return the operation of a record by the name that links know it by."""
    return "send" if row["op"] in ("send_recv", "p2p") else str(row["op"])


def _price(row: Row, held_out: bool, model: CostModel | None) -> Timing | str:
    """Return the priced record, or why it cannot be."""
    if row.get("busbw_ratio") is not None:
        return "a share of a peak that is not stated, of hardware that is not named"
    seconds = measured_seconds(row)
    if seconds is None:
        return "no message size or no group size: a bandwidth alone says nothing of a transfer"
    name = row.get("gpu") or ""
    preset = next((preset for text, preset in _CLUSTERS if text in name), None)
    if preset is None:
        return f"hardware {name or 'not stated'!r}"
    nodes = row.get("nodes") or 1
    if preset == "a100" and nodes > 1:
        return "NICs between these nodes are not stated"
    if preset == "b200" and nodes > 1 and "EFA" in (row.get("inter") or ""):
        preset = "b200-efa"
    cluster = load_cluster(preset) if model is None else model.cluster
    if row.get("algo") in _RING:
        cluster = replace(cluster, intra=_plain(cluster.intra))
    if nodes == 1 and not cluster.domains:
        cluster = _one_node(cluster, int(row["n_gpus"]))
    costs = CostModel(cluster) if model is None else replace(model, cluster=cluster)
    devices = next((size for text, size in _CORRECTED_GROUPS.items() if text in row["source"]), int(row["n_gpus"]))
    predicted = _predict(operation(row), float(row["bytes"]), devices, nodes, costs)
    return Timing(row["source"], name, operation(row), devices, float(row["bytes"]), seconds, predicted, held_out)


def _one_node(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster with as many devices in a node as take part, so that one group lies in one node."""
    if devices >= cluster.devices_per_node or cluster.intra.torus:
        return cluster
    return replace(cluster, devices_per_node=devices, inter=replace(cluster.inter, nics=None))


def _plain(link: Link) -> Link:
    """Return a link whose all-reduces are rings like its other collectives."""
    return replace(link, tunings=tuple(tuning for tuning in link.tunings if tuning.operation != "all_reduce"))


def _predict(name: str, nbytes: float, devices: int, nodes: int, costs: CostModel) -> float:
    if name == "send":
        return costs.send_seconds(nbytes, _crosses(devices, nodes, costs.cluster))
    return costs.collective_seconds(Collective(name), nbytes, Axis("group", devices, 1))


def _crosses(devices: int, nodes: int, cluster: Cluster) -> bool:
    return nodes > 1 and cluster.devices_per_node > devices // nodes

"""Cluster files: YAML whose quantities are texts with units. docs/clusters.md has the schema and examples."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TypeVar

import msgspec

from autopar.cluster.host import Host
from autopar.cluster.links import Link, Nics, Tuning
from autopar.cluster.presets import PRESETS
from autopar.cluster.records import Cluster, Device, Domain, NodeGroup
from autopar.errors import ClusterError
from autopar.reading import UnreadableError, check, parse_yaml
from autopar.units import format_quantity, parse_quantity

_EXAMPLES = {"B": "80 GB", "B/s": "234 GB/s", "FLOP/s": "312 TFLOP/s", "s": "8 us"}

MOST_TUNED = 1.5
"""How many times the bandwidth of a link one operation may reach over it: all-reduces in the switches of H200 reach
1.34 times what rings do (`autopar.cluster.networks`), the most of any preset."""

_SLICE = re.compile(r"(?P<preset>.+)-(?P<sizes>\d{1,12}(x\d{1,12})+)")
"""A preset with the shape of the slice a job has, e.g. `tpu-v5p-4x4x8`."""

_Quantity = str | int | float
"""A number is accepted by the schema so that the error can ask for its unit."""

_Record = TypeVar("_Record")


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A part of a cluster file."""


class _DeviceFile(_File, frozen=True):
    name: str
    peaks: dict[str, _Quantity]
    memory: _Quantity
    memory_bandwidth: _Quantity
    launch: _Quantity = "8 us"
    gemm_efficiency: float = 0.7
    attention_efficiency: float = 0.4
    bandwidth_efficiency: float = 0.85
    num_sms: int = 0
    batched_efficiency: float = 0.4
    efficiencies: dict[str, float] = {}
    any_order: bool = False
    host_launch: _Quantity = "0 s"


class _TuningFile(_File, frozen=True):
    operation: str
    bandwidth: _Quantity
    latency: _Quantity
    members: int = 2
    ramp: _Quantity = "0 B"
    ramp_exponent: float = 0.5
    latency_per_member: _Quantity = "0 s"


class _NicsFile(_File, frozen=True):
    count: int
    rate: _Quantity
    efficiency: float = 0.955


class _TunedAtFile(_File, frozen=True):
    bandwidth: _Quantity
    latency: _Quantity
    ramp: _Quantity = "0 B"
    ramp_exponent: float = 0.5
    latency_per_member: _Quantity = "0 s"


class _LinkFile(_File, frozen=True):
    tier: str
    latency: _Quantity
    bandwidth: _Quantity | None = None
    ramp: _Quantity = "0 B"
    ramp_exponent: float = 0.5
    latency_per_member: _Quantity = "0 s"
    overlap_slowdown: float = 1.0
    tunings: tuple[_TuningFile, ...] = ()
    tuned_at: _TunedAtFile | None = None
    nics: _NicsFile | None = None
    torus: tuple[int, ...] = ()
    wraps: int = 4


class _HostFile(_File, frozen=True):
    tier: str
    memory: _Quantity
    to_host: _Quantity
    to_device: _Quantity
    devices: int | None = None
    latency: _Quantity = "10 us"
    sharing: int = 1
    full_duplex: bool = True
    memory_bandwidth: _Quantity = "0 B/s"


class _DomainFile(_File, frozen=True):
    devices: int
    link: _LinkFile


class _GroupFile(_File, frozen=True):
    nodes: int
    cluster: "str | _ClusterFile"


class _NumberedFile(_File, frozen=True):
    groups: int
    size: int
    block: int


class _ClusterFile(_File, frozen=True):
    name: str
    devices_per_node: int | None = None
    device: _DeviceFile | None = None
    intra: _LinkFile | None = None
    inter: _LinkFile | None = None
    domains: tuple[_DomainFile, ...] = ()
    groups: tuple[_GroupFile, ...] = ()
    between: _LinkFile | None = None
    host: _HostFile | None = None
    gpu_hour_price: float | None = None
    numbered: _NumberedFile | None = None


def _quantity(field: str, text: _Quantity, unit: str) -> float:
    hint = f"{field} is in {unit}, written like '{_EXAMPLES[unit]}'"
    if not isinstance(text, str):
        raise ClusterError(f"{field}: {text} has no unit", hint=hint)
    try:
        return parse_quantity(text, unit)
    except ValueError as error:
        raise ClusterError(f"{field}: {error}", hint=hint) from error


def _rate(field: str, text: _Quantity) -> float:
    """Return bytes/s; data sheets of NICs are in bits, so that they are taken here and nowhere else."""
    if isinstance(text, str) and text.rstrip().endswith("b/s"):
        try:
            return parse_quantity(text, "b/s") / 8
        except ValueError as error:
            raise ClusterError(f"{field}: {error}", hint=f"{field} is written like '200 Gb/s'") from error
    return _quantity(field, text, "B/s")


def _tuning(field: str, data: _TuningFile) -> Tuning:
    return Tuning(
        operation=data.operation,
        members=data.members,
        bandwidth=_quantity(f"{field}.bandwidth", data.bandwidth, "B/s"),
        latency=_quantity(f"{field}.latency", data.latency, "s"),
        ramp=_quantity(f"{field}.ramp", data.ramp, "B"),
        ramp_exponent=data.ramp_exponent,
        latency_per_member=_quantity(f"{field}.latency_per_member", data.latency_per_member, "s"),
    )


def _link(field: str, data: _LinkFile, devices_per_node: int) -> Link:
    nics = None
    if data.nics is not None:
        nics = Nics(data.nics.count, _rate(f"{field}.nics.rate", data.nics.rate), data.nics.efficiency)
        if data.bandwidth is not None:
            raise ClusterError(
                f"{field} states bandwidth and nics",
                hint="bandwidth is one device's share of the NICs: keep one of them",
            )
        bandwidth = nics.share(devices_per_node)
    elif data.bandwidth is None:
        raise ClusterError(
            f"{field} states no bandwidth",
            hint=f"write {field}.bandwidth: 18 GB/s, or {field}.nics with count and rate",
        )
    else:
        bandwidth = _quantity(f"{field}.bandwidth", data.bandwidth, "B/s")
    link = Link(
        tier=data.tier,
        bandwidth=bandwidth,
        latency=_quantity(f"{field}.latency", data.latency, "s"),
        ramp=_quantity(f"{field}.ramp", data.ramp, "B"),
        ramp_exponent=data.ramp_exponent,
        latency_per_member=_quantity(f"{field}.latency_per_member", data.latency_per_member, "s"),
        overlap_slowdown=data.overlap_slowdown,
        tunings=tuple(_tuning(f"{field}.tunings[{index}]", tuning) for index, tuning in enumerate(data.tunings)),
        nics=nics,
        torus=data.torus,
        wraps=data.wraps,
    )
    if data.tuned_at is not None:
        return link.retuned(_tuned_at(f"{field}.tuned_at", data.tuned_at))
    for index, tuning in enumerate(link.tunings):
        if tuning.bandwidth > MOST_TUNED * bandwidth:
            reached = format_quantity(bandwidth, "B/s")
            raise ClusterError(
                f"{field}.tunings[{index}]: {tuning.operation} reaches {format_quantity(tuning.bandwidth, 'B/s')} over "
                f"a link of {reached}",
                hint=f"write the bandwidth that the link had before it was edited, {field}.tuned_at: "
                "{bandwidth: 47.75 GB/s, latency: 20 us}, as `autopar clusters NAME` does, or leave tunings out",
            )
    return link


def _tuned_at(field: str, data: _TunedAtFile) -> Tuning:
    return Tuning(
        operation="send",
        members=2,
        bandwidth=_quantity(f"{field}.bandwidth", data.bandwidth, "B/s"),
        latency=_quantity(f"{field}.latency", data.latency, "s"),
        ramp=_quantity(f"{field}.ramp", data.ramp, "B"),
        ramp_exponent=data.ramp_exponent,
        latency_per_member=_quantity(f"{field}.latency_per_member", data.latency_per_member, "s"),
    )


def _host(field: str, data: _HostFile, devices_per_node: int) -> Host:
    return Host(
        tier=data.tier,
        memory=_quantity(f"{field}.memory", data.memory, "B"),
        devices=devices_per_node if data.devices is None else data.devices,
        to_host=_quantity(f"{field}.to_host", data.to_host, "B/s"),
        to_device=_quantity(f"{field}.to_device", data.to_device, "B/s"),
        latency=_quantity(f"{field}.latency", data.latency, "s"),
        sharing=data.sharing,
        full_duplex=data.full_duplex,
        memory_bandwidth=_quantity(f"{field}.memory_bandwidth", data.memory_bandwidth, "B/s"),
    )


def _device(field: str, device: _DeviceFile) -> Device:
    return Device(
        name=device.name,
        peaks=tuple((name, _quantity(f"{field}.peaks.{name}", text, "FLOP/s")) for name, text in device.peaks.items()),
        memory=_quantity(f"{field}.memory", device.memory, "B"),
        memory_bandwidth=_quantity(f"{field}.memory_bandwidth", device.memory_bandwidth, "B/s"),
        launch=_quantity(f"{field}.launch", device.launch, "s"),
        gemm_efficiency=device.gemm_efficiency,
        attention_efficiency=device.attention_efficiency,
        bandwidth_efficiency=device.bandwidth_efficiency,
        num_sms=device.num_sms,
        batched_efficiency=device.batched_efficiency,
        efficiencies=tuple(device.efficiencies.items()),
        any_order=device.any_order,
        host_launch=_quantity(f"{field}.host_launch", device.host_launch, "s"),
    )


def _given(field: str, value: _Record | None, hint: str) -> _Record:
    if value is None:
        raise ClusterError(f"Object missing required field `{field}`", hint=hint)
    return value


def _cluster(prefix: str, data: _ClusterFile) -> Cluster:
    if data.groups:
        return _mixed(prefix, data)
    hint = "a cluster of equal nodes has devices_per_node, device, intra and inter; one of several kinds has groups"
    if data.between is not None:
        raise ClusterError(f"{prefix}between: there are no groups", hint="a cluster of equal nodes has inter")
    count = _given(f"{prefix}devices_per_node", data.devices_per_node, hint)
    if count < 1:
        raise ClusterError(f"cluster {data.name!r}: devices_per_node is {count}", hint="it is a positive whole number")
    found = Cluster(
        name=data.name,
        device=_device(f"{prefix}device", _given(f"{prefix}device", data.device, hint)),
        devices_per_node=count,
        intra=_link(f"{prefix}intra", _given(f"{prefix}intra", data.intra, hint), count),
        inter=_link(f"{prefix}inter", _given(f"{prefix}inter", data.inter, hint), count),
        domains=tuple(
            Domain(domain.devices, _link(f"{prefix}domains[{index}].link", domain.link, domain.devices))
            for index, domain in enumerate(data.domains)
        ),
        host=None if data.host is None else _host(f"{prefix}host", data.host, count),
        gpu_hour_price=data.gpu_hour_price,
    )
    given = data.numbered
    return found if given is None else found.by_group(given.groups, given.size, given.block)


def _mixed(prefix: str, data: _ClusterFile) -> Cluster:
    hint = "a cluster with groups has name, groups and between; the nodes are described in each group's cluster"
    for field in ("devices_per_node", "device", "intra", "inter", "host", "gpu_hour_price", "numbered"):
        if getattr(data, field) is not None:
            raise ClusterError(f"{prefix}{field}: the cluster has groups", hint=hint)
    if data.domains:
        raise ClusterError(f"{prefix}domains: the cluster has groups", hint=hint)
    groups = []
    for index, group in enumerate(data.groups):
        inner = group.cluster
        field = f"{prefix}groups[{index}].cluster"
        cluster = load_cluster(inner) if isinstance(inner, str) else _cluster(f"{field}.", inner)
        groups.append(NodeGroup(group.nodes, cluster))
    between = _link(
        f"{prefix}between", _given(f"{prefix}between", data.between, hint), groups[0].cluster.devices_per_node
    )
    return Cluster.mixed(data.name, tuple(groups), between)


_SCHEMA = "docs/clusters.md lists the fields of a cluster file, with an example"


def _read(source: str, load: Callable[[], object]) -> Cluster:
    try:
        parsed = msgspec.convert(load(), _ClusterFile)
    except UnreadableError as error:
        raise ClusterError(error.in_file(source), hint=_SCHEMA) from error
    except msgspec.ValidationError as error:
        raise ClusterError(f"{source}: {error}", hint=_SCHEMA) from error
    try:
        return _cluster("", parsed)
    except ClusterError as error:
        raise ClusterError(f"{source}: {error.args[0]}", hint=error.hint) from error


def cluster_from_dict(data: object, source: str = "cluster") -> Cluster:
    """Return the cluster that `Cluster.to_dict` wrote, or that a cluster file holds.

    Args:
        data: The mapping.
        source: What to call it in errors.

    Raises:
        ClusterError: If a field is missing, unknown, of the wrong type or unit, or out of range; the message names it.
    """

    def load() -> object:
        check(data)
        return data

    return _read(source, load)


def parse_cluster(text: str, source: str = "cluster") -> Cluster:
    """Return the cluster a YAML text describes.

    Raises:
        ClusterError: If the text is no YAML, or as for `cluster_from_dict`.
    """
    return _read(source, lambda: parse_yaml(text))


def format_cluster(cluster: Cluster) -> str:
    """Return the YAML text of a cluster, to be edited; `parse_cluster` reads it back equal."""
    return msgspec.yaml.encode(cluster.to_dict(editable=True)).decode()


def cluster_schema() -> Mapping[str, object]:
    """Return the JSON schema of a cluster file, for editors that check YAML while it is written."""
    return msgspec.json.schema(_ClusterFile)


def _slice(name: str) -> Cluster | None:
    """Return a preset whose nodes are a torus with the shape that the name ends with; None if it names none."""
    match = _SLICE.fullmatch(name)
    preset = PRESETS.get(match["preset"]) if match else None
    if match is None or preset is None or not preset.intra.torus:
        return None
    torus = tuple(int(size) for size in match["sizes"].split("x"))
    if len(torus) != len(preset.intra.torus):
        raise ClusterError(
            f"cluster {name!r}: a slice of {match['preset']} has {len(preset.intra.torus)} axes",
            hint=f"write {match['preset']}-{'x'.join(map(str, preset.intra.torus))}",
        )
    return replace(preset, name=name, devices_per_node=prod(torus), intra=replace(preset.intra, torus=torus))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return a preset by name, or the cluster a YAML file describes.

    Args:
        name_or_path: A key of `PRESETS`, one whose nodes are a torus with the shape of a slice behind it
            (`tpu-v5p-4x4x8`), or the path of a `.yaml` or `.yml` file.

    Raises:
        ClusterError: If there is no such preset or file, or the file is wrong.

    >>> load_cluster("h100").device.name, load_cluster("tpu-v5p-4x4x8").devices_per_node
    ('H100-SXM5-80GB', 128)
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        name = str(name_or_path).lower()
        cluster = PRESETS.get(name) or _slice(name)
        if cluster is None:
            close = get_close_matches(name, PRESETS, n=2, cutoff=0.4)
            nearest = f"did you mean {' or '.join(close)}? " if close else ""
            hint = f"{nearest}known are {', '.join(PRESETS)}, or give the path of a .yaml file"
            raise ClusterError(f"there is no cluster {str(name_or_path)!r}", hint=hint)
        return cluster
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, or a path that is none
        raise ClusterError(
            f"{path} cannot be read: {error}", hint=f"known clusters are {', '.join(PRESETS)}"
        ) from error
    return parse_cluster(text, str(path))

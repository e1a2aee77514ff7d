"""Cluster files: YAML whose quantities are texts with units. docs/cost_model.md has the schema and an example."""

from difflib import get_close_matches
from pathlib import Path

import msgspec

from autopar.cluster.presets import PRESETS
from autopar.cluster.records import Cluster, Device, Link
from autopar.errors import ClusterError
from autopar.units import parse_quantity

_EXAMPLES = {"B": "80 GB", "B/s": "234 GB/s", "FLOP/s": "312 TFLOP/s", "s": "8 us"}


_Quantity = str | int | float
"""A number is accepted by the schema so that the error can ask for its unit."""


class _DeviceFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
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


class _LinkFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tier: str
    bandwidth: _Quantity
    latency: _Quantity
    ramp: _Quantity = "0 B"
    ramp_exponent: float = 0.5


class _ClusterFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    devices_per_node: int
    device: _DeviceFile
    intra: _LinkFile
    inter: _LinkFile


def _quantity(source: str, field: str, text: _Quantity, unit: str) -> float:
    hint = f"{field} is in {unit}, written like '{_EXAMPLES[unit]}'"
    if not isinstance(text, str):
        raise ClusterError(f"{source}: {field}: {text} has no unit", hint=hint)
    try:
        return parse_quantity(text, unit)
    except ValueError as error:
        raise ClusterError(f"{source}: {field}: {error}", hint=hint) from error


def _link(source: str, field: str, data: _LinkFile) -> Link:
    return Link(
        tier=data.tier,
        bandwidth=_quantity(source, f"{field}.bandwidth", data.bandwidth, "B/s"),
        latency=_quantity(source, f"{field}.latency", data.latency, "s"),
        ramp=_quantity(source, f"{field}.ramp", data.ramp, "B"),
        ramp_exponent=data.ramp_exponent,
    )


def _cluster(source: str, data: _ClusterFile) -> Cluster:
    device = data.device
    try:
        return Cluster(
            name=data.name,
            device=Device(
                name=device.name,
                peaks=tuple(
                    (name, _quantity(source, f"device.peaks.{name}", text, "FLOP/s"))
                    for name, text in device.peaks.items()
                ),
                memory=_quantity(source, "device.memory", device.memory, "B"),
                memory_bandwidth=_quantity(source, "device.memory_bandwidth", device.memory_bandwidth, "B/s"),
                launch=_quantity(source, "device.launch", device.launch, "s"),
                gemm_efficiency=device.gemm_efficiency,
                attention_efficiency=device.attention_efficiency,
                bandwidth_efficiency=device.bandwidth_efficiency,
                num_sms=device.num_sms,
                batched_efficiency=device.batched_efficiency,
            ),
            devices_per_node=data.devices_per_node,
            intra=_link(source, "intra", data.intra),
            inter=_link(source, "inter", data.inter),
        )
    except ClusterError as error:
        if str(error).startswith(source):
            raise
        raise ClusterError(f"{source}: {error.args[0]}", hint=error.hint) from error


def _schema_error(source: str, error: msgspec.DecodeError) -> ClusterError:
    return ClusterError(
        f"{source}: {error}", hint="docs/cost_model.md lists the fields of a cluster file, with an example"
    )


def cluster_from_dict(data: object, source: str = "cluster") -> Cluster:
    """Return the cluster that `Cluster.to_dict` wrote, or that a cluster file holds.

    Args:
        data: The mapping.
        source: What to call it in errors.

    Raises:
        ClusterError: If a field is missing, unknown, of the wrong type or unit, or out of range; the message names it.
    """
    try:
        parsed = msgspec.convert(data, _ClusterFile)
    except msgspec.ValidationError as error:
        raise _schema_error(source, error) from error
    return _cluster(source, parsed)


def parse_cluster(text: str, source: str = "cluster") -> Cluster:
    """Return the cluster a YAML text describes.

    Raises:
        ClusterError: If the text is no YAML, or as for `cluster_from_dict`.
    """
    try:
        parsed = msgspec.yaml.decode(text, type=_ClusterFile)
    except msgspec.DecodeError as error:  # also the base of ValidationError
        raise _schema_error(source, error) from error
    return _cluster(source, parsed)


def format_cluster(cluster: Cluster) -> str:
    """Return the YAML text of a cluster; `parse_cluster` reads it back equal."""
    return msgspec.yaml.encode(cluster.to_dict()).decode()


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Return a preset by name, or the cluster a YAML file describes.

    Args:
        name_or_path: A key of `PRESETS`, or the path of a `.yaml` or `.yml` file.

    Raises:
        ClusterError: If there is no such preset or file, or the file is wrong.

    >>> load_cluster("h100").device.name
    'H100-SXM5-80GB'
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        name = str(name_or_path)
        cluster = PRESETS.get(name.lower())
        if cluster is None:
            close = get_close_matches(name.lower(), PRESETS, n=2, cutoff=0.4)
            nearest = f"did you mean {' or '.join(close)}? " if close else ""
            hint = f"{nearest}known are {', '.join(PRESETS)}, or give the path of a .yaml file"
            raise ClusterError(f"there is no cluster {name!r}", hint=hint)
        return cluster
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"{path} cannot be read: {error}", hint=f"known clusters are {', '.join(PRESETS)}"
        ) from error
    return parse_cluster(text, str(path))

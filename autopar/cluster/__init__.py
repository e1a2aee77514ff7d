"""Clusters: what the devices and links can do, as presets with sources or as YAML files."""

from autopar.cluster.files import cluster_from_dict, format_cluster, load_cluster, parse_cluster
from autopar.cluster.presets import PRESETS
from autopar.cluster.records import Cluster, Device, Link

__all__ = [
    "PRESETS",
    "Cluster",
    "Device",
    "Link",
    "cluster_from_dict",
    "format_cluster",
    "load_cluster",
    "parse_cluster",
]

"""Clusters: what the devices and links can do, as presets with sources or as YAML files."""

from autopar.cluster.files import cluster_from_dict, cluster_schema, format_cluster, load_cluster, parse_cluster
from autopar.cluster.host import Host
from autopar.cluster.links import OPERATIONS, Link, Nics, Tuning
from autopar.cluster.presets import PRESETS, sources
from autopar.cluster.records import Cluster, Device, Domain, NodeGroup, Numbering

__all__ = [
    "OPERATIONS",
    "PRESETS",
    "Cluster",
    "Device",
    "Domain",
    "Host",
    "Link",
    "Nics",
    "NodeGroup",
    "Numbering",
    "Tuning",
    "cluster_from_dict",
    "cluster_schema",
    "format_cluster",
    "load_cluster",
    "parse_cluster",
    "sources",
]

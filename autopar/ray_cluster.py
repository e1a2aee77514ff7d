"""Connections to Ray clusters: start or find one, count its free CPUs, and check its nodes.

Every node needs this package in the same version, which is checked first: otherwise workers would fail one by one.
"""

import socket
import time
from importlib.metadata import PackageNotFoundError, version

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autopar.errors import WorkerError

CONNECT_SECONDS = 5.0
"""Longest time until a cluster accepts a connection."""

ANSWER_SECONDS = 60.0
"""Longest time until a node answers which version it has."""

FREE_SECONDS = 10.0
"""Longest time to wait for free CPUs: those of a search that has just ended are released a moment later."""

POLL_SECONDS = 0.2
"""Time between two questions for free CPUs."""


def _check_listening(address: str | None) -> None:
    """Check that a server listens at an address HOST:PORT; Ray itself would try for minutes.

    Raises:
        OSError: If no server listens.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def num_workers(size: int | None) -> int:
    """Return the number of actors: the requested one, or one per free CPU.

    Raises:
        WorkerError: If fewer CPUs are free.
    """
    num_cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    if size is not None and size > num_cpus:
        raise WorkerError(f"{size} workers on a cluster of {num_cpus} CPUs", hint=f"--workers {num_cpus}")
    end = time.monotonic() + FREE_SECONDS
    while (free := int(ray.available_resources().get("CPU", 0))) < (size or num_cpus) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    if free < (size or 1):
        raise WorkerError(
            f"{free} of the {num_cpus} CPUs of the Ray cluster are free, of {size or 1} that workers need",
            hint=f"--workers {free}" if free else "wait for what runs there, or leave --engine ray out",
        )
    return size or free


def check_nodes() -> None:
    """Check that every node has this package, in the version of this process.

    Raises:
        WorkerError: If a node has another version or none, or does not answer.
    """
    here = version("autopar")
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = []
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(ray.remote(num_cpus=0, scheduling_strategy=where)(version).remote("autopar"))
    for node, answer in zip(nodes, asked, strict=True):
        name = node["NodeManagerAddress"]
        try:
            there = ray.get(answer, timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(f"node {name} of the Ray cluster does not answer", hint="see its logs") from None
        except (PackageNotFoundError, ray.exceptions.RayError) as error:
            is_absent = isinstance(error, PackageNotFoundError)
            raise WorkerError(
                f"node {name} of the Ray cluster {'has no autopar' if is_absent else f'cannot run anything: {error}'}",
                hint=f"install autopar {here} on every node, for the Python that runs Ray there",
            ) from None
        if there != here:
            raise WorkerError(
                f"node {name} of the Ray cluster has autopar {there}, here it is {here}",
                hint="install the same version on every node",
            )


def connect(size: int | None, address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        WorkerError: If neither is possible.
    """
    try:
        _check_listening(address)
        if address is None:  # ignores RAY_ADDRESS, which "auto" follows
            ray.init("local", num_cpus=size, include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # `ray.init` raises bare exceptions, for example if a node is slow to start
        raise WorkerError(
            f"no Ray cluster at {address!r}: {error}" if address else f"Ray cannot be started: {error}",
            hint="start one with `ray start --head`, or leave --ray-address out",
        ) from error

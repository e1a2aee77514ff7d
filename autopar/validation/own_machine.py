"""A profile as a cluster and a stack: the constants of the cost model fitted to measured events.

device   peak, memory bandwidth and launch with which the formulas of ops are nearest to the measured seconds,
by a pattern search on logarithms that minimises the mean error, events weighted by the root of their time
links    latency and bandwidth of every operation and size of group, by least squares of relative errors
stack    what a transfer adds to products that run beside it (`exposed_share`), and what attention reaches
"""

import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster, Device, Link
from autopar.cluster.links import OPERATIONS, Tuning
from autopar.cost import CostModel, DtypePolicy, Stack, load_policy
from autopar.cost.collectives import Collective
from autopar.cost.prices import op_class
from autopar.cost.pricing import event_seconds, formula_seconds, measured_host
from autopar.cost.stack import SCALARS, Fit, FitSource, Range
from autopar.errors import DataError
from autopar.events import Event, Machine, OpEvent, OverlapEvent, Profile, TransferEvent, event_id
from autopar.sharding import Axis
from autopar.validation.score import Errors, errors

FloatArray = NDArray[np.float64]
_FIRST_STEP, _LAST_STEP = 0.7, 0.01  # of logarithms: a factor of two, and one per cent
_FITTED = ("product", "memory", "update")
"""Classes of ops that the device is fitted to; attention gets a scalar of its own."""
_START = {"peak": 1e11, "bandwidth": 2e10, "launch": 1e-6}
"""Where the search begins: FLOP/s, bytes/s and seconds of a core of a server, all in reach of a GPU's."""
_WITHIN = {"peak": (1e8, 1e16), "bandwidth": (1e8, 1e14), "launch": (1e-9, 1e-3)}


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """A machine as it was measured.

    Attributes:
        cluster: Its devices and links.
        stack: What software makes of them.
        ops: Errors of ops, measured against the formulas.
        transfers: Errors of transfers; None if none was measured.
    """

    cluster: Cluster
    stack: Stack
    ops: Errors
    transfers: Errors | None


def fit_machine(profile: Profile, name: str, *, base: Cluster | None = None, busy: int | None = None) -> OwnMachine:
    """Return the cluster and the stack that a profile describes.

    Args:
        profile: Measured events.
        name: What both are called.
        base: Cluster whose memory, size of nodes, host and price are taken over; None to take what was measured.
        busy: Devices of a node; None for as many as worked at the same time.

    Raises:
        DataError: If the profile has no matrix product or no memory-bound op, so that nothing can be fitted.
    """
    database = profile.database
    measured = [one for entry in database.events.values() for one in entry.measured]
    if not measured:
        raise DataError(f"profile {profile.name} has no measured event", hint="`autopar profile --suite -o DIR`")
    width = busy or (base.devices_per_node if base is not None else max(one.busy for one in measured))
    seconds, prices = event_seconds(database, width)
    policy = load_policy(database.precisions[0] if database.precisions else "fp32")
    machine = database.machines[measured[0].machine]
    ops = {key: event for key in prices if isinstance(event := database.events[key].event, OpEvent)}
    classes = {op_class(event.kind, update=event.update) for event in ops.values()}
    if not {"product", "memory"} <= classes:
        raise DataError(
            f"profile {profile.name} has no matrix products or no memory-bound ops", hint="`autopar profile --suite`"
        )
    is_cpu = machine.backend == "gloo"
    stack = Stack(name, "unfused" if is_cpu else "fused", "none")
    links = _links(database.events[key].event for key in seconds)
    curves = {place: {key: seconds[key] for key in keys if key in seconds} for place, keys in links.items()}
    intra = _link(curves.get("intra", {}), profile, f"{machine.backend} in a node")
    inter = _link(curves.get("inter", {}), profile, f"{machine.backend} between nodes") or intra
    device = _device(machine, width, policy, base)
    copies = {
        event: own for key, own in seconds.items() if isinstance(event := database.events[key].event, TransferEvent)
    }
    start = _cluster(name, device, width, intra, inter, base, copies)
    fitted = _fit_device(start, policy, stack, list(ops.values()), [prices[key] for key in ops])
    cluster = replace(start, device=fitted)
    stack, names = _fit_stack(stack, cluster, policy, profile, seconds, prices)
    found = _op_errors(cluster, policy, stack, ops, prices)
    transfers = _transfer_errors(cluster, policy, stack, profile, seconds)
    every = [*found[1], *([] if transfers is None else transfers[1])]
    total = errors(every)
    assert total is not None, "there are ops"
    sizes = [event.bytes for key in seconds if isinstance(event := database.events[key].event, TransferEvent)]
    fit = Fit(
        datetime.datetime.now(tz=datetime.UTC).date(),
        round(found[0].mean if transfers is None else max(found[0].mean, transfers[0].mean), 4),
        round(total.p90, 4),
        names,
        (FitSource(f"events of profile {profile.name} ({profile.digest})", len(every)),),
        (Range("transfer_bytes", min(sizes), max(sizes)),) if sizes else (),
    )
    return OwnMachine(cluster, replace(stack, fit=fit), found[0], None if transfers is None else transfers[0])


def _device(machine: Machine, width: int, policy: DtypePolicy, base: Cluster | None) -> Device:
    known = base.device if base is not None else None
    numbers = ("half", "single") if policy.numbers == "single" else (policy.numbers,)
    peaks = tuple((kind, _START["peak"]) for kind in numbers)
    memory = machine.memory / (width if machine.backend == "gloo" else 1)
    return Device(
        name=machine.device if known is None else known.name,
        peaks=peaks,
        memory=memory if known is None else known.memory,
        memory_bandwidth=_START["bandwidth"],
        launch=_START["launch"],
        gemm_efficiency=1.0,
        attention_efficiency=0.5,
        bandwidth_efficiency=1.0,
        batched_efficiency=0.5,
    )


def _cluster(
    name: str,
    device: Device,
    width: int,
    intra: Link | None,
    inter: Link | None,
    base: Cluster | None,
    copies: Mapping[TransferEvent, float],
) -> Cluster:
    if base is not None:
        host = None if base.host is None else measured_host(base.host, copies)
        return replace(base, name=name, device=device, intra=intra or base.intra, inter=inter or base.inter, host=host)
    alone = Link("not measured", 1e9, 1e-4)
    return Cluster(name, device, width, intra or alone, inter or alone)


def _fit_device(
    start: Cluster, policy: DtypePolicy, stack: Stack, events: Sequence[OpEvent], seconds: Sequence[float]
) -> Device:
    """Return the device whose formulas are nearest to the measured seconds."""
    chosen = [
        (event, own)
        for event, own in zip(events, seconds, strict=True)
        if op_class(event.kind, update=event.update) in _FITTED
    ]
    weights = np.sqrt([own for _, own in chosen])
    weights /= weights.sum()

    def device_at(point: FloatArray) -> Device:
        low, high = np.array(list(_WITHIN.values())).T
        peak, bandwidth, launch = np.clip(np.exp(point), low, high).tolist()
        peaks = tuple((kind, peak) for kind, _ in start.device.peaks)
        return replace(start.device, peaks=peaks, memory_bandwidth=bandwidth, launch=launch)

    def loss(point: FloatArray) -> float:
        costs = CostModel(replace(start, device=device_at(point)), policy, stack)
        said = np.array([formula_seconds(event, costs) for event, _ in chosen])
        is_priced = said > 0
        measured = np.array([own for _, own in chosen])
        ratios = np.abs(np.log(np.where(is_priced, said, measured) / measured))
        return float((weights * ratios).sum())

    point = np.log(np.array(list(_START.values())))
    best, step = loss(point), _FIRST_STEP
    while step > _LAST_STEP:
        improved = False
        for index in range(len(point)):
            for sign in (1.0, -1.0):
                moved = point.copy()
                moved[index] += sign * step
                found = loss(moved)
                while found < best - 1e-9:
                    point, best, improved = moved, found, True
                    moved = point.copy()
                    moved[index] += sign * step
                    found = loss(moved)
        if not improved:
            step /= 2
    found_device = device_at(point)
    rounded = tuple((kind, float(f"{peak:.3g}")) for kind, peak in found_device.peaks)
    bandwidth, launch = (float(f"{value:.3g}") for value in (found_device.memory_bandwidth, found_device.launch))
    return replace(found_device, peaks=rounded, memory_bandwidth=bandwidth, launch=launch)


def _links(events: Iterable[Event]) -> dict[str, list[str]]:
    """Return names of transfers by tier: within a node, or all members on nodes of their own."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for event in events:
        if isinstance(event, TransferEvent) and event.members > 1:
            if event.inside == event.members:
                found["intra"].append(event_id(event))
            elif event.inside == 1:
                found["inter"].append(event_id(event))
    return found


_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def _link(points: Mapping[str, float], profile: Profile, tier: str) -> Link | None:
    """Return a link with the constants of every operation; None if nothing was measured."""
    groups: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for key, own in points.items():
        event = profile.database.events[key].event
        assert isinstance(event, TransferEvent), key
        if event.operation in OPERATIONS:
            groups[event.operation, event.members].append((event.bytes, own))
    tunings = []
    for (operation, members), known in sorted(groups.items()):
        factor = _FACTORS[operation] * (members - 1) / members if operation in _FACTORS else 1.0
        latency, bandwidth = _line(np.array(known), factor)
        tunings.append(Tuning(operation, members, float(f"{bandwidth:.3g}"), float(f"{latency:.3g}")))
    if not tunings:
        return None
    first = next((own for own in tunings if own.operation == "send"), tunings[0])
    return Link(tier, first.bandwidth, first.latency, tunings=tuple(tunings))


def _line(points: FloatArray, factor: float) -> tuple[float, float]:
    """Return latency and bandwidth with the least squares of relative errors; both stay above 0."""
    nbytes, seconds = points.T
    columns = np.stack([np.ones_like(nbytes), factor * nbytes], 1) / seconds[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency <= 0:
        latency = float(seconds.min()) * 1e-3
        slope = float(np.sum(columns[:, 1]) / np.sum(columns[:, 1] ** 2))
    if slope <= 0:
        slope = 1e-12
    return float(latency), float(1 / slope)


def _fit_stack(
    stack: Stack,
    cluster: Cluster,
    policy: DtypePolicy,
    profile: Profile,
    seconds: Mapping[str, float],
    prices: Mapping[str, float],
) -> tuple[Stack, tuple[str, ...]]:
    """Return the stack with the scalars that events tell, and their names."""
    scalars: dict[str, float] = {}
    parts: defaultdict[OverlapEvent, dict[str, float]] = defaultdict(dict)
    for key, own in seconds.items():
        event = profile.database.events[key].event
        if isinstance(event, OverlapEvent):
            whole = OverlapEvent(event.size, event.products, event.operation, event.bytes, event.members)
            parts[whole][event.parts] = own
    exposed = [
        (own["both"] - own["compute"]) / own["transfer"] for own in parts.values() if len(own) == 3 and own["transfer"]
    ]
    if exposed:
        scalars["exposed_share"] = float(np.clip(np.mean(exposed), 0.0, 1.0))
    costs = CostModel(cluster, policy, stack)
    attention = {
        key: event
        for key in prices
        if isinstance(event := profile.database.events[key].event, OpEvent)
        and op_class(event.kind, update=event.update) == "attention"
    }
    if attention:
        ratio = sum(formula_seconds(event, costs) for event in attention.values()) / sum(
            prices[key] for key in attention
        )
        scalar = SCALARS["attention_efficiency"]
        scalars["attention_efficiency"] = float(np.clip(ratio, scalar.low, scalar.high))
    rounded = {name: float(f"{value:.3g}") for name, value in scalars.items()}
    return stack.with_scalars(**rounded), tuple(name for name in SCALARS if name in rounded)


def _op_errors(
    cluster: Cluster, policy: DtypePolicy, stack: Stack, ops: Mapping[str, OpEvent], prices: Mapping[str, float]
) -> tuple[Errors, list[float]]:
    costs = CostModel(cluster, policy, stack)
    said = {key: formula_seconds(event, costs) for key, event in ops.items()}
    shares = [own / prices[key] - 1 for key, own in said.items() if own > 0]
    found = errors(shares)
    assert found is not None, "there are ops"
    return found, shares


def _transfer_errors(
    cluster: Cluster, policy: DtypePolicy, stack: Stack, profile: Profile, seconds: Mapping[str, float]
) -> tuple[Errors, list[float]] | None:
    costs, shares = CostModel(cluster, policy, stack), []
    for key, own in seconds.items():
        event = profile.database.events[key].event
        if not isinstance(event, TransferEvent) or event.members != event.inside or event.members < 2:
            continue
        if event.members > cluster.devices_per_node:
            continue
        if event.operation == "send":
            said = costs.send_seconds(event.bytes, 0)
        else:
            said = costs.collective_seconds(Collective(event.operation), event.bytes, Axis("x", event.members, 1))
        shares.append(said / own - 1)
    found = errors(shares)
    return None if found is None else (found, shares)

"""Prices made of a database of events.

An op is timed alone, and as part of the pieces that run it (`PieceEvent`). Alone it finds caches as it left them, pays
for a call of its own, and is fused with nothing; what its pieces take is what a step takes. So the times alone are
scaled until the ops of each piece add up to the piece, by iterative proportional fitting:

    p_o <- t_o
    repeat:  r_k = T_k / sum of n_ko p_o  for every piece k
             p_o <- p_o x (product of r_k ^ (n_ko p_o))^(1 / sum of n_ko p_o)  over the pieces of o

Copies to and from host memory are measured, too: their seconds give the latency and the bandwidths of the link of the
cluster, which solver, formula and simulators read there.

The calls of pieces are in the prices of their ops. Where measurements were made with several numbers of busy devices,
that counts which is nearest to the devices of a node of the job.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from autopar.cluster import Cluster, Host
from autopar.cost.arrays import FloatArray, IntArray
from autopar.cost.collectives import Collective
from autopar.cost.prices import Curve, Group, Prices, op_class
from autopar.errors import JobError
from autopar.events import (
    Database,
    Entry,
    LaunchEvent,
    OpEvent,
    PieceEvent,
    Profile,
    TransferEvent,
    op_family,
    op_sizes,
)
from autopar.events.records import Family
from autopar.ir.graph import Op, Phase
from autopar.sharding import Axis

if TYPE_CHECKING:  # it knows prices
    from autopar.cost.model import CostModel

HOST_COPIES = ("offload", "fetch")
"""Transfers to and from host memory."""

_ROUNDS = 30
_CLOSE = 1e-3
"""Largest change of a price, as a share, below which fitting ends."""
_FREE = 0.1
"""Share of its time alone that an op keeps at least when the time of a call is taken off."""
_BOUNDS = (0.05, 20.0)
"""Of what pieces make of a time alone: beyond, one of both was measured wrong."""


def prices_of(profile: Profile, costs: "CostModel") -> Prices:
    """Return the prices that a profile gives a job.

    Args:
        profile: Events and their seconds.
        costs: The formulas; they say nothing of the profile.

    Raises:
        JobError: If the events are of jobs in other precisions.
    """
    assert costs.prices is None, "formulas are corrected once"
    database, precision = profile.database, costs.policy.name
    if database.precisions and precision not in database.precisions:
        known = ", ".join(database.precisions)
        raise JobError(
            f"profile {profile.name} was measured in {known}, the job is planned in {precision}",
            hint=f"--precision {database.precisions[0]}, or profile with --precision {precision}",
        )
    seconds, fitted = event_seconds(database, costs.cluster.devices_per_node)
    ops: defaultdict[Family, dict[tuple[int, ...], float]] = defaultdict(dict)
    for key, price in fitted.items():
        event = database.events[key].event
        assert isinstance(event, OpEvent), key
        ops[op_family(event)][op_sizes(event)] = price
    factors, least = _op_factors(fitted, database, costs)
    curves = _curves(database, seconds)
    digest = hashlib.sha256(f"{profile.digest} {precision} {costs.cluster} {costs.stack}".encode()).hexdigest()[:12]
    return Prices(profile, digest, dict(ops), factors, least, curves, _transfer_factors(curves, costs))


def event_seconds(database: Database, busy: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of all measured events, and the prices of ops in the pieces that run them, by name.

    Args:
        database: The events.
        busy: Devices of a node that work at the same time.
    """
    seconds = {key: found for key, entry in database.events.items() if (found := _chosen(entry, busy)) is not None}
    return seconds, in_pieces(_alone(database, seconds), database, seconds)


@lru_cache(maxsize=64)  # of a job on each number of devices that is looked at
def priced(costs: "CostModel", profile: Profile | None) -> "CostModel":
    """Return a cost model with the prices of a profile and its link to host memory; as it is without one.

    Raises:
        JobError: As of `prices_of`.
    """
    if profile is None:
        return costs
    costs = replace(costs, prices=None, cluster=_with_measured_host(costs.cluster, profile.database))
    return replace(costs, prices=prices_of(profile, costs))


def _with_measured_host(cluster: Cluster, database: Database) -> Cluster:
    """Return a cluster whose devices reach host memory as fast as copies were measured, if some were.

    What a host holds is not measured: a cluster that does not say keeps devices that cannot offload. So do clusters of
    several kinds of nodes, of which a profile does not say which one it is of.
    """
    if cluster.host is None or cluster.groups:
        return cluster
    seconds = {
        entry.event: found
        for entry in database.events.values()
        if isinstance(entry.event, TransferEvent)
        and entry.event.operation in HOST_COPIES
        and (found := _chosen(entry, cluster.devices_per_node)) is not None
    }
    return replace(cluster, host=measured_host(cluster.host, seconds))


def measured_host(host: Host, seconds: Mapping[TransferEvent, float]) -> Host:
    """Return a host whose link has the latency and the bandwidths of measured copies.

    Both ways have one latency. They are fitted by least squares of relative errors; a way that was not measured keeps
    its bandwidth. What was measured beside other devices' copies has their share of the link in it.

    Args:
        host: The host as a cluster file states it.
        seconds: Seconds of copies, "offload" and "fetch".
    """
    copies = [(event.operation, event.bytes, own) for event, own in seconds.items() if event.operation in HOST_COPIES]
    if not copies:
        return host
    ways = sorted({operation for operation, *_ in copies})
    times = np.array([own for *_, own in copies])
    slopes = np.array([[nbytes * (operation == way) for way in ways] for operation, nbytes, _ in copies])
    columns = np.concatenate([np.ones((len(copies), 1)), slopes], 1) / times[:, None]
    if len({nbytes for _, nbytes, _ in copies}) == 1:  # one size says nothing of the latency
        latency = min(host.latency, 0.5 * float(times.min()))
    else:
        (latency, *_), *_ = np.linalg.lstsq(columns, np.ones(len(copies)), rcond=None)
        latency = max(0.0, float(latency))
    rates = {}
    for number, way in enumerate(ways, start=1):
        own = columns[:, number] > 0
        rest = 1.0 - latency * columns[own, 0]
        slope = float(np.sum(rest * columns[own, number]) / np.sum(columns[own, number] ** 2))
        if slope > 0:
            rates[way] = host.sharing / slope
    return replace(
        host,
        latency=latency,
        to_host=rates.get("offload", host.to_host),
        to_device=rates.get("fetch", host.to_device),
    )


def _chosen(entry: Entry, busy: int) -> float | None:
    """Return the seconds of an event with about so many busy devices; None if it was not measured."""
    if not entry.measured:
        return None
    nearest = min(abs(np.log(one.busy / busy)) for one in entry.measured)
    found = [one.seconds for one in entry.measured if abs(np.log(one.busy / busy)) <= nearest]
    return float(np.median(found))


def _alone(database: Database, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of ops by name, without the time of a call of their own."""
    calls = [found for key, found in seconds.items() if isinstance(database.events[key].event, LaunchEvent)]
    call = min(calls, default=0.0)
    return {
        key: max(_FREE * found, found - call, 1e-9)
        for key, found in seconds.items()
        if isinstance(database.events[key].event, OpEvent)
    }


def in_pieces(alone: Mapping[str, float], database: Database, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the prices of ops with which those of each piece add up to it.

    Args:
        alone: Seconds of ops alone, by name.
        database: Has the pieces.
        seconds: Measured seconds of all events.
    """
    names = {key: number for number, key in enumerate(alone)}
    pieces = []
    for key, found in seconds.items():
        event = database.events[key].event
        if isinstance(event, PieceEvent):
            known = [(names[op], count) for op, count in event.ops if op in names]
            if known and len(known) == len(event.ops):
                members, times = zip(*known, strict=True)
                pieces.append((np.array(members), np.array(times, float), found))
    start = np.array(list(alone.values()))
    prices = start.copy()
    for _ in range(_ROUNDS if pieces else 0):
        logs, weights = np.zeros(len(prices)), np.zeros(len(prices))
        for numbers, counts, found in pieces:
            parts = counts * prices[numbers]
            np.add.at(logs, numbers, parts * np.log(found / parts.sum()))
            np.add.at(weights, numbers, parts)
        step = np.exp(logs / np.maximum(weights, 1e-30))
        after = np.clip(prices * step, start * _BOUNDS[0], start * _BOUNDS[1])
        change = float(np.abs(after / prices - 1).max())
        prices = after
        if change < _CLOSE:
            break
    return dict(zip(alone, prices.tolist(), strict=True))


def as_op(event: OpEvent) -> tuple[Op, list[IntArray | None], list[IntArray | None], dict[str, float]]:
    """Return an event as the cost model takes an op: the op, shapes of inputs and outputs, bytes of elements."""
    operands = (*event.inputs, *event.outputs)
    names = ["" if operand is None else f"v{number}" for number, operand in enumerate(operands)]
    count = len(event.inputs)
    phase = Phase.UPDATE if event.update else Phase.FORWARD
    attrs = tuple(event.attrs)
    op = Op("measured", event.kind, tuple(names[:count]), tuple(names[count:]), attrs, phase)  # type: ignore[arg-type]  # attributes of a file
    shapes: list[IntArray | None] = [
        None if operand is None else np.array([operand.shape], np.int64).reshape(1, len(operand.shape))
        for operand in operands
    ]
    sizes = {name: operand.bytes for name, operand in zip(names, operands, strict=True) if operand is not None}
    return op, shapes[:count], shapes[count:], sizes


def formula_seconds(event: OpEvent, costs: "CostModel") -> float:
    """Return what the formulas say of an op."""
    op, inputs, outputs, sizes = as_op(event)
    return float(costs.op_seconds(op, inputs, outputs, sizes)[0])


def _op_factors(
    fitted: Mapping[str, float], database: Database, costs: "CostModel"
) -> tuple[dict[str, float], dict[str, float]]:
    """Return measured over formula by class of op: of all seconds, and the least of a single op, at most 1."""
    measured: defaultdict[str, float] = defaultdict(float)
    said: defaultdict[str, float] = defaultdict(float)
    least: dict[str, float] = {}
    for key, price in fitted.items():
        event = database.events[key].event
        assert isinstance(event, OpEvent), key
        formula = formula_seconds(event, costs)
        if formula <= 0:
            continue  # a view to the formula
        name = op_class(event.kind, update=event.update)
        measured[name] += price
        said[name] += formula
        least[name] = min(least.get(name, 1.0), price / formula)
    factors = {name: measured[name] / said[name] for name in measured}
    return factors, {name: min(least[name], factors[name]) for name in least}


def _curves(database: Database, seconds: Mapping[str, float]) -> dict[Group, Curve]:
    points: defaultdict[Group, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, found in seconds.items():
        event = database.events[key].event
        if isinstance(event, TransferEvent) and event.members > 1:
            points[event.operation, event.members, event.inside][event.bytes].append(found)
    return {group: _curve(known) for group, known in points.items()}


def _curve(points: Mapping[float, Sequence[float]]) -> Curve:
    nbytes = np.array(sorted(points))
    raw = np.array([float(np.median(points[size])) for size in nbytes.tolist()])
    return Curve(nbytes, np.maximum.accumulate(raw))


def _transfer_factors(curves: Mapping[Group, Curve], costs: "CostModel") -> dict[tuple[str, bool], float]:
    """Return measured over formula by operation, within nodes and beyond: the median over sizes."""
    ratios: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    per_node = costs.cluster.devices_per_node
    for (operation, members, inside), curve in curves.items():
        said = _formula_of_transfer(operation, members, inside, curve.nbytes, costs)
        if said is not None and inside <= per_node:
            ratios[operation, inside < members].extend((curve.seconds / said).tolist())
    return {key: float(np.median(found)) for key, found in ratios.items()}


def _formula_of_transfer(
    operation: str, members: int, inside: int, nbytes: FloatArray, costs: "CostModel"
) -> FloatArray | None:
    if operation == "send":
        return np.array([costs.send_seconds(size, int(inside < members)) for size in nbytes.tolist()])
    if operation not in set(Collective):
        return None
    per_node = costs.cluster.devices_per_node
    stride = 1 if inside > 1 or members == inside else per_node
    return np.asarray(costs.collective_seconds(Collective(operation), nbytes, Axis("group", members, stride)))

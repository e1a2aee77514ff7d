"""Reading and writing problems as IOPDDL JSON, the form of the ASPLOS/EuroSys 2025 contest (github.com/google/iopddl).

    {"problem": {"name": ..., "nodes": {"intervals": [[0, 9], ...], "costs": [[...], ...], "usages": [[...], ...]},
                 "edges": {"nodes": [[a, b], ...], "costs": [row-major, ...]}, "usage_limit": ...}}

The form knows whole numbers only, one usage per node and one limit. What a `Problem` has beyond that is written so that
every reader of the form sees the same optimum:

- Costs in seconds become whole numbers of 1e-10 s (1e-4 us); "unit_seconds" records it. Usages are rounded up, limits
  down, to whole bytes.
- Further usages of a node go to clones: nodes without cost, appended at the end, tied to it by an edge that forbids all
  but equal strategies.
- Several limits become the largest one, and a node with a single strategy that uses the difference while a smaller one
  holds.

The first `num_nodes` entries of a choice for the file are therefore a choice for the problem. Names and recipes are not
written.
"""

import gzip
import json
import math
import os
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import ProblemError
from autopar.problem import FORBIDDEN, Limit, Numbers, Problem, Usage

UNIT_SECONDS = 1e-10
"""Seconds per unit in which float costs are written: less is of no consequence, and 10^18 of them are three years."""

_MAGIC = b"\x1f\x8b"


def load(path: str | Path) -> Problem:
    """Return the problem in an IOPDDL file, which may be compressed by gzip. Its costs are whole numbers.

    Raises:
        ProblemError: If the file cannot be read or is not such a problem.
    """
    try:
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data.startswith(_MAGIC) else data
        document = json.loads(text)
    except OSError as error:
        raise ProblemError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise ProblemError(f"{path} is not JSON: {error}", hint="give an IOPDDL file, .json or .json.gz") from error
    try:
        return _problem(document)
    except ProblemError as error:
        raise ProblemError(f"{path}: {error.args[0]}", hint=error.hint) from error


def save(problem: Problem, path: str | Path) -> None:
    """Write a problem, compressed if the name ends in `.gz`. The file appears whole or not at all.

    Raises:
        ProblemError: If the costs do not fit whole numbers below 10^18, or the file cannot be written.
    """
    text = json.dumps({"problem": _document(problem)}, separators=(",", ":")).encode()
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            file.write(gzip.compress(text, mtime=0) if target.suffix == ".gz" else text)
        os.replace(file.name, target)
    except OSError as error:
        raise ProblemError(f"cannot write {path}: {error.strerror or error}") from error


def _member(document: Any, name: str, kind: type, where: str) -> Any:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise ProblemError(f"{where} has no {name!r} of type {kind.__name__}")
    return value


def _whole(values: Any, where: str) -> Numbers:
    if not isinstance(values, list):
        raise ProblemError(f"{where} is {values!r}, not a list of whole numbers")
    try:
        array = np.array(values)
    except ValueError as error:
        raise ProblemError(f"{where} is not a flat list of whole numbers") from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype != np.int64:
        raise ProblemError(f"{where} is not a flat list of whole numbers of at most 64 bits")
    return array


def _problem(document: Any) -> Problem:
    body = _member(document, "problem", dict, "the file")
    nodes = _member(body, "nodes", dict, "problem")
    edges = _member(body, "edges", dict, "problem")
    node_costs = [_whole(c, f"the costs of node {i}") for i, c in enumerate(_member(nodes, "costs", list, "nodes"))]
    intervals = _member(nodes, "intervals", list, "nodes")
    amounts = _member(nodes, "usages", list, "nodes")
    ends = _member(edges, "nodes", list, "edges")
    tables = _member(edges, "costs", list, "edges")
    if not len(intervals) == len(amounts) == len(node_costs):
        raise ProblemError(f"{len(node_costs)} nodes have costs, {len(intervals)} intervals, {len(amounts)} usages")
    if len(ends) != len(tables):
        raise ProblemError(f"{len(ends)} edges have nodes, {len(tables)} have costs")
    usages = []
    for node, (interval, amount) in enumerate(zip(intervals, amounts, strict=True)):
        use = _whole(amount, f"the usages of node {node}")
        span = _whole(interval, f"the interval of node {node}")
        if len(span) != 2:
            raise ProblemError(f"the interval of node {node} is {interval!r}, not [start, end]")
        if len(use) != len(node_costs[node]):
            raise ProblemError(f"node {node} has {len(node_costs[node])} costs and {len(use)} usages")
        if span[0] < span[1]:
            usages.append(Usage(node, int(span[0]), int(span[1]), use))
    joined: list[tuple[int, int, Numbers]] = []
    shared: dict[tuple[int, int, bytes], Numbers] = {}
    for edge, (pair, costs) in enumerate(zip(ends, tables, strict=True)):
        place = _whole(pair, f"the nodes of edge {edge}")
        if len(place) != 2 or place.min() < 0 or place.max() >= len(node_costs):
            raise ProblemError(f"edge {edge} joins {pair!r}, which are not two of {len(node_costs)} nodes")
        a, b = place.tolist()
        table = _whole(costs, f"the costs of edge {edge}")
        rows, columns = len(node_costs[a]), len(node_costs[b])
        if table.size != rows * columns:
            raise ProblemError(f"edge {edge} has {table.size} costs for {rows} x {columns} pairs of strategies")
        key = (rows, columns, table.tobytes())
        joined.append((a, b, shared.setdefault(key, table.reshape(rows, columns))))
    limit = body.get("usage_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise ProblemError(f"usage_limit is {limit!r}, not a whole number")
    unit = body.get("unit_seconds")
    if unit is not None and not isinstance(unit, float | int):
        raise ProblemError(f"unit_seconds is {unit!r}, not a number")
    return Problem.build(
        node_costs, joined, usages=usages, limit=limit, name=str(body.get("name", "")), unit_seconds=unit
    )


def _document(problem: Problem) -> dict[str, Any]:
    unit = problem.unit_seconds if problem.is_whole else UNIT_SECONDS
    sizes = problem.num_strategies
    costs = [_written(c, problem.is_whole) for c in problem.node_costs]
    ends: list[list[int]] = problem.edge_nodes.tolist()
    tables = [
        _written(_weighted(problem.edge_tables[i], w), problem.is_whole)
        for i, w in zip(problem.edge_table_ids.tolist(), problem.edge_weights.tolist(), strict=True)
    ]
    intervals = [[0, 0] for _ in sizes]
    amounts: list[list[int]] = [[0] * size for size in sizes]
    used: set[int] = set()
    for usage in problem.usages:
        if usage.start >= usage.end:
            continue
        node = usage.node
        if node in used:
            node = len(costs)
            costs.append([0] * sizes[usage.node])
            intervals.append([])
            amounts.append([])
            ends.append([usage.node, node])
            same = np.full((sizes[usage.node],) * 2, FORBIDDEN)
            np.fill_diagonal(same, 0)
            tables.append(same.ravel().tolist())
        used.add(node)
        intervals[node] = [usage.start, usage.end]
        amounts[node] = [math.ceil(a) for a in usage.amounts.tolist()]
    document: dict[str, Any] = {"name": problem.name}
    if unit is not None:
        document["unit_seconds"] = unit
    if problem.limits:
        limit, fillers = _one_limit(problem)
        document["usage_limit"] = limit
        for start, end, amount in fillers:
            costs.append([0])
            intervals.append([start, end])
            amounts.append([amount])
    document["nodes"] = {"intervals": intervals, "costs": costs, "usages": amounts}
    document["edges"] = {"nodes": ends, "costs": tables}
    return document


def _one_limit(problem: Problem) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the largest limit, and what to use up while a smaller one holds as (start, end, amount)."""
    spans_of: tuple[Limit | Usage, ...] = (*problem.limits, *problem.usages)
    times = sorted({t for x in spans_of for t in (x.start, x.end)})
    highest = sum(math.ceil(u.amounts.max()) for u in problem.usages)
    spans = []
    for start, end in pairwise(times):
        amount = min((x.amount for x in problem.limits if x.start <= start < x.end), default=math.inf)
        spans.append((start, end, math.floor(min(amount, highest))))
    limit = max((amount for _, _, amount in spans), default=0)
    fillers: list[tuple[int, int, int]] = []
    for start, end, amount in spans:
        spare = limit - amount
        if fillers and fillers[-1][1] == start and fillers[-1][2] == spare:
            fillers[-1] = (fillers[-1][0], end, spare)
        elif spare:
            fillers.append((start, end, spare))
    return limit, fillers


def _weighted(table: Numbers, weight: float) -> Numbers:
    if table.dtype == np.int64:
        return np.where(table >= FORBIDDEN, FORBIDDEN, np.where(table >= FORBIDDEN, 0, table) * int(weight))
    return np.where(np.isinf(table), np.inf, np.where(np.isinf(table), 0.0, table) * weight)


def _written(costs: Numbers, whole: bool) -> list[int]:
    flat = costs.ravel()
    if whole:
        values: list[int] = np.minimum(flat, FORBIDDEN).tolist()
        return values
    finite = flat[np.isfinite(flat)]
    if len(finite) and abs(finite).max() >= FORBIDDEN * UNIT_SECONDS:
        raise ProblemError(f"a cost of {abs(finite).max():g} s is too large for whole numbers of {UNIT_SECONDS:g} s")
    return [FORBIDDEN if math.isinf(c) else round(c / UNIT_SECONDS) for c in flat.tolist()]

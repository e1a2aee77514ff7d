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
import hashlib
import math
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from autopar.errors import PlanError, ProblemError
from autopar.problem import FORBIDDEN, Limit, Numbers, Problem, Usage
from autopar.writing import write_atomically

UNIT_SECONDS = 1e-10
"""Seconds per unit in which float costs are written: less is of no consequence, and 10^18 of them are three years."""

_TIMES = (-(2**63), 2**63 - 1)
_MAGIC = b"\x1f\x8b"
_COMPRESSION = 6  # a tenth larger files than with gzip's 9, in a fifth of the time


class _Nodes(msgspec.Struct):
    intervals: list[tuple[int, int]]
    costs: list[msgspec.Raw]
    usages: list[msgspec.Raw]


class _Edges(msgspec.Struct):
    nodes: list[tuple[int, ...]]
    costs: list[msgspec.Raw]


class _Body(msgspec.Struct):
    nodes: _Nodes
    edges: _Edges
    name: str = ""
    usage_limit: int | None = None
    unit_seconds: float | None = None


class _File(msgspec.Struct):
    problem: _Body


def load(path: str | Path) -> Problem:
    """Return the problem in an IOPDDL file, which may be compressed by gzip. Its costs are whole numbers.

    Equal lists of numbers are read once and share one array: files of contest size are mostly repetition.

    Raises:
        ProblemError: If the file cannot be read or is not such a problem; the message says what is wrong with which
            node, edge or strategy.
    """
    try:
        data = read(path)
        text = gzip.decompress(data) if data.startswith(_MAGIC) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ProblemError(
            f"{path} is not whole: {error}", hint="copy the file again; `gzip -t` says whether it is whole"
        ) from error
    try:
        return _problem(msgspec.json.decode(text, type=_File).problem)
    except msgspec.ValidationError as error:
        raise ProblemError(f"{path}: {_in_words(str(error))}", hint=_FORM) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(f"{path} is not JSON: {error}", hint="give an IOPDDL file, .json or .json.gz") from error
    except ProblemError as error:
        raise ProblemError(f"{path}: {error.args[0]}", hint=error.hint) from error


def read(path: str | Path) -> bytes:
    """Return the bytes of a problem file.

    Raises:
        ProblemError: If it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ProblemError(
            f"cannot read {path}: {error.strerror or error}", hint="give an IOPDDL file, .json or .json.gz"
        ) from error


def save(problem: Problem, path: str | Path) -> None:
    """Write a problem, compressed if the name ends in `.gz`. The file appears whole or not at all.

    Raises:
        ProblemError: If the costs do not fit whole numbers below 10^18, or the file cannot be written.
    """
    text = msgspec.json.encode({"problem": _document(problem)})
    target = Path(path)
    try:
        write_atomically(target, gzip.compress(text, _COMPRESSION, mtime=0) if target.suffix == ".gz" else text)
    except PlanError as error:
        raise ProblemError(error.args[0], hint="choose another path") from error


_FORM = "the form is described at github.com/google/iopddl; numbers are whole"
_PLACE = re.compile(r" - at `\$\.(.*)`$")
_ITEM = re.compile(r"problem\.(nodes\.intervals|edges\.nodes)\[(\d+)\](?:\[\d+\])?$")
_POSITION = re.compile(r" - at `\$\[(\d+)\]`$")


def _in_words(message: str) -> str:
    """Return a message of msgspec with the place in front and in words."""
    found = _PLACE.search(message)
    if found is None:
        return message
    item = _ITEM.match(found[1])
    place = found[1]
    if item is not None:
        place = f"the {'interval of node' if item[1] == 'nodes.intervals' else 'nodes of edge'} {item[2]}"
    return f"{place}: {message[: found.start()]}"


class _Lists:
    """Reads lists of whole numbers, equal ones once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Numbers] = {}

    def read(self, raw: msgspec.Raw, where: str) -> Numbers:
        """Return the numbers of a list.

        Raises:
            ProblemError: If it is not a list of whole numbers of at most 64 bits.
        """
        text = memoryview(raw)
        digest = hashlib.blake2b(text, digest_size=16).digest()  # the texts themselves would take half of the memory
        known = self._known.get(digest)
        if known is None:
            try:
                known = np.array(msgspec.json.decode(text, type=list[int]), np.int64)
            except msgspec.ValidationError as error:
                message = _POSITION.sub(r" at position \1", str(error))
                raise ProblemError(f"{where} are not a flat list of whole numbers: {message}", hint=_FORM) from error
            except OverflowError as error:
                raise ProblemError(
                    f"{where} have a number of more than 64 bits", hint=f"write {FORBIDDEN} for what is forbidden"
                ) from error
            known.flags.writeable = False
            self._known[digest] = known
        return known


def _problem(body: _Body) -> Problem:
    nodes, edges = body.nodes, body.edges
    lists = _Lists()
    if not len(nodes.intervals) == len(nodes.usages) == len(nodes.costs):
        raise ProblemError(
            f"{len(nodes.costs)} nodes have costs, {len(nodes.intervals)} intervals, {len(nodes.usages)} usages",
            hint="give every node one of each",
        )
    if len(edges.nodes) != len(edges.costs):
        raise ProblemError(
            f"{len(edges.nodes)} edges have nodes, {len(edges.costs)} have costs", hint="give every edge one of each"
        )
    node_costs = [lists.read(raw, f"the costs of node {node}") for node, raw in enumerate(nodes.costs)]
    for node, costs in enumerate(node_costs):
        if len(costs) == 0:
            raise ProblemError(f"node {node} has no strategy", hint="give it at least one cost")
    usages = []
    for node, ((start, end), raw) in enumerate(zip(nodes.intervals, nodes.usages, strict=True)):
        use = lists.read(raw, f"the usages of node {node}")
        if len(use) != len(node_costs[node]):
            raise ProblemError(
                f"node {node} has {len(node_costs[node])} costs and {len(use)} usages",
                hint="give every strategy one of each",
            )
        if use.min() < 0:
            raise ProblemError(
                f"strategy {use.argmin()} of node {node} has a usage of {use.min()}", hint="give usages of 0 or more"
            )
        if not (_TIMES[0] <= start and end <= _TIMES[1]):
            raise ProblemError(
                f"the interval of node {node} ends at {start if start < _TIMES[0] else end}",
                hint="give times of at most 64 bits",
            )
        if start < end:
            usages.append(Usage(node, start, end, use))
    tables: dict[tuple[int, int, int], Numbers] = {}
    joined: list[tuple[int, int, Numbers]] = []
    for edge, (ends, raw) in enumerate(zip(edges.nodes, edges.costs, strict=True)):
        if len(ends) != 2 or min(ends) < 0 or max(ends) >= len(node_costs):
            raise ProblemError(
                f"edge {edge} joins nodes {list(ends)}, not two of the {len(node_costs)} there are",
                hint="number nodes from 0 and join two with every edge",
            )
        a, b = ends
        if a == b:
            raise ProblemError(f"edge {edge} joins node {a} with itself", hint="add its diagonal to the node's costs")
        costs = lists.read(raw, f"the costs of edge {edge}")
        rows, columns = len(node_costs[a]), len(node_costs[b])
        if costs.size != rows * columns:
            raise ProblemError(
                f"edge {edge} has {costs.size} costs for {rows} x {columns} pairs of strategies of nodes {a} and {b}",
                hint=f"give one cost per pair, those of strategy 0 of node {a} first",
            )
        key = (id(costs), rows, columns)
        if key not in tables:
            tables[key] = costs.reshape(rows, columns)
        joined.append((a, b, tables[key]))
    return Problem.build(
        node_costs, joined, usages=usages, limit=body.usage_limit, name=body.name, unit_seconds=body.unit_seconds
    )


def _document(problem: Problem) -> dict[str, Any]:
    unit = problem.unit_seconds if problem.is_whole else UNIT_SECONDS
    sizes = problem.num_strategies
    lists = _Texts(problem.is_whole)
    costs = [lists.costs(c) for c in problem.node_costs]
    ends: list[list[int]] = problem.edge_nodes.tolist()
    tables = [
        lists.costs(problem.edge_tables[i], w)
        for i, w in zip(problem.edge_table_ids.tolist(), problem.edge_weights.tolist(), strict=True)
    ]
    intervals = [[0, 0] for _ in sizes]
    amounts = [lists.nothing(size) for size in sizes]
    used: set[int] = set()
    for usage in problem.usages:
        if usage.start >= usage.end:
            continue
        node = usage.node
        if node in used:
            node = len(costs)
            costs.append(lists.nothing(sizes[usage.node]))
            intervals.append([])
            amounts.append(lists.nothing(0))
            ends.append([usage.node, node])
            tables.append(lists.equal(sizes[usage.node]))
        used.add(node)
        intervals[node] = [usage.start, usage.end]
        amounts[node] = lists.amounts(usage.amounts)
    document: dict[str, Any] = {"name": problem.name}
    if unit is not None:
        document["unit_seconds"] = unit
    if problem.limits:
        limit, fillers = _one_limit(problem)
        document["usage_limit"] = limit
        for start, end, amount in fillers:
            costs.append(lists.nothing(1))
            intervals.append([start, end])
            amounts.append(_text([amount]))
    document["nodes"] = {"intervals": intervals, "costs": costs, "usages": amounts}
    document["edges"] = {"nodes": ends, "costs": tables}
    return document


class _Texts:
    """Writes lists of numbers, each array once: large problems are mostly repetition.

    The arrays must outlive it.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._costs: dict[tuple[int, float], msgspec.Raw] = {}
        self._amounts: dict[int, msgspec.Raw] = {}
        self._equal: dict[int, msgspec.Raw] = {}

    def costs(self, array: Numbers, weight: float = 1) -> msgspec.Raw:
        """Return costs times a weight, in row-major order.

        Raises:
            ProblemError: If a cost does not fit the form.
        """
        key = (id(array), weight)
        if key not in self._costs:
            self._costs[key] = _text(_written(_weighted(array, weight), self._whole))
        return self._costs[key]

    def amounts(self, array: Numbers) -> msgspec.Raw:
        """Return use, rounded up."""
        if id(array) not in self._amounts:
            self._amounts[id(array)] = _text([math.ceil(amount) for amount in array.tolist()])
        return self._amounts[id(array)]

    def equal(self, size: int) -> msgspec.Raw:
        """Return the table of an edge that forbids all but equal strategies."""
        if size not in self._equal:
            same = np.full((size, size), FORBIDDEN)
            np.fill_diagonal(same, 0)
            self._equal[size] = _text(same.ravel().tolist())
        return self._equal[size]

    def nothing(self, size: int) -> msgspec.Raw:
        """Return zeros."""
        return _text([0] * size)


def _text(numbers: list[int]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(numbers))


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
    if weight == 1:
        return table
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

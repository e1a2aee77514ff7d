"""Seconds of fused groups by a small graph network that was trained on measured ones.

    seconds(group) = sum over ops o of (elements(o) rate(o) + exp(n[kind(o)])) + exp(c) + exp(d) tensors
    rate(o)    = exp(w . h_L(o) + r[kind(o)] + R[kind(o)] . curve(elements(o)))
    h_0(o)     = relu(E[kind(o)] + F features(o))
    h_{l+1}(o) = h_l(o) + relu(A_l h_l(o) + B_l sum of h_l over what o reads + C_l mean of h_l over who reads o + a_l)

The seconds of a kernel are a sum over its ops, each of which sees its neighbourhood: what stays in registers and what
goes to memory. `curve` has hat functions over the logarithm of elements: caches hold small tensors. Weights hold for
the machine and the runtime they were measured on, and for groups like those they were trained on (`Range`); for all
others there is no answer, and the analytic cost counts. `docs/benchmarks/fused_kernels.py` trains them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.resources import files
from math import log, log2, prod
from pathlib import Path

import msgspec
import numpy as np

from autopar.cluster import Device
from autopar.cost.arrays import FloatArray
from autopar.cost.fused_groups import FusedGroup, GroupOp
from autopar.cost.policy import DtypePolicy
from autopar.errors import ClusterError

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

NUM_FEATURES = 19
KNOTS = (11.0, 14.0, 16.0, 18.0, 20.0, 22.0)
"""Of the curve of rates: logarithms to base 2 of elements; between them rates are interpolated."""
_FLOAT32 = 4.0  # bytes


class Range(msgspec.Struct, frozen=True):
    """Groups like those that weights were trained on.

    Attributes:
        kinds: Kinds of their ops.
        least_elements: Fewest elements of the largest tensor.
        most_elements: Most elements.
        most_ops: Most ops.
    """

    kinds: tuple[str, ...]
    least_elements: int
    most_elements: int
    most_ops: int

    def fault(self, group: FusedGroup) -> str:
        """Return why a group is outside; "" if it is not."""
        if len(group.ops) > self.most_ops:
            return f"{len(group.ops)} ops, trained on {self.most_ops} at most"
        strange = next((op.kind for op in group.ops if op.kind not in self.kinds), "")
        if strange:
            return f"op {strange}, of which no kernel was timed"
        if not self.least_elements <= group.elements <= self.most_elements:
            return f"{group.elements} elements, trained on {self.least_elements} to {self.most_elements}"
        wide = next((own.dtype for own in group.inputs if own.data is None and own.dtype not in _KNOWN), "")
        return f"elements of {wide}, trained on float32" if wide else ""


_KNOWN = ("float32", "bool")


class Provenance(msgspec.Struct, frozen=True):
    """Where weights come from.

    Attributes:
        machine: Processor that ran the groups.
        runtime: What ran them.
        version: Its version.
        groups: Groups that were timed.
        structures: Structures among them.
        held_out: Groups of structures that training did not see.
        within_14_percent: Share of those that are predicted within 14 %.
        median_error: Median of their errors, as a share of the measured seconds.
        noise: Median difference of two rounds of the same measurement.
        command: What made the file.
    """

    machine: str
    runtime: str
    version: str
    groups: int
    structures: int
    held_out: int
    within_14_percent: float
    median_error: float
    noise: float
    command: str


class WeightsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of weights holds; matrices as lists of rows.

    Attributes:
        provenance: Where they come from.
        range: Groups they hold for.
        weights: Arrays by name.
    """

    provenance: Provenance
    range: Range
    weights: dict[str, list[float | list[float]]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Groups as arrays: N ops of G groups, E edges from a producer to a reader.

    Attributes:
        kinds: Number of the kind of each op, (N,).
        features: (N, NUM_FEATURES).
        scale: Logarithm of the elements of each op, (N,).
        group: Number of the group of each op, ascending, (N,).
        sources: Producers of edges, (E,).
        targets: Readers of edges, (E,).
        inputs: Tensors that each group reads and writes, (G,).
    """

    kinds: np.ndarray[tuple[int], np.dtype[np.int64]]
    features: Float32
    scale: Float32
    group: np.ndarray[tuple[int], np.dtype[np.int64]]
    sources: np.ndarray[tuple[int], np.dtype[np.int64]]
    targets: np.ndarray[tuple[int], np.dtype[np.int64]]
    inputs: Float32


def _stretch(shape: Sequence[int], last: Sequence[int]) -> tuple[int, bool]:
    """Return over how many trailing elements of a result an operand goes on alike, and whether it repeats one number.

    >>> _stretch((8,), (4, 8)), _stretch((4, 1), (4, 8)), _stretch((), (4, 8)), _stretch((4, 8), (4, 8))
    ((8, False), (8, True), (32, True), (32, False))
    """
    padded = (*(1,) * (len(last) - len(shape)), *shape)
    count, repeats = 1, None
    for size, whole in zip(reversed(padded), reversed(last), strict=False):
        if whole == 1:
            continue
        if repeats is None:
            repeats = size == 1
        if (size == 1) is not repeats:
            break
        count *= whole
    return count, bool(repeats)


def _op_features(op: GroupOp, group: FusedGroup, inner: Mapping[int, bool], single: Set[int]) -> list[float]:
    """Return what tells an op from others of its kind.

    Args:
        op: The op.
        group: Its group.
        inner: Values made inside, with whether they are written.
        single: Values that one op reads.
    """
    elements = op.elements
    last = op.made[0].shape if op.made else ()
    read = inside = broadcast = small = reused = row_repeats = column_repeats = 0.0
    stretch = prod(last)
    for own in op.reads:
        if own.value < 0:
            continue
        share = prod(own.shape) / elements
        if share < 0.5:
            small += 1.0
            broadcast += share
            # One number after the other is looked up for a stretch: what its begin costs, its elements share.
            count, repeats = _stretch(own.shape, last)
            stretch = min(stretch, count)
            row_repeats += 0.0 if repeats else 1.0
            column_repeats += 1.0 if repeats and count < prod(last) else 0.0
        elif own.value in inner:
            inside += share
            reused = max(reused, 1.0 if own.value in single and not inner[own.value] else 0.0)
        else:
            read += share
    made = sum(prod(own.shape) for own in op.made) / elements
    written = sum(prod(own.shape) for own in op.made if own.written) / elements
    row = op.reads[0].shape[-1] if op.reads and op.reads[0].shape else 1
    return [
        read,
        small,
        broadcast,
        made,
        written,
        log2(max(1, elements)) / 10 - 1.8,
        log2(row) / 10 - 0.8,
        log2(max(1, prod(last))) / 10 - 1.8,
        1.0 if last and last[-1] == row else 0.0,
        log2(1 + group.read_bytes + group.written_bytes) / 10 - 2.0,
        10.0 / max(10, stretch),
        inside,
        reused,
        row_repeats,
        column_repeats,
        10.0 / max(10, row),
        1.0 if len(op.made) > 1 else 0.0,
        1.0 if any(value == "tanh" for _, value in op.attrs) else 0.0,
        len(group.ops) / 10.0,
    ]


def encode(groups: Sequence[FusedGroup], kinds: Mapping[str, int]) -> Batch:
    """Return groups as arrays.

    Args:
        groups: The groups.
        kinds: Number of each kind of op; others are an error.
    """
    numbers: list[int] = []
    features: list[list[float]] = []
    scale: list[float] = []
    owner: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    inputs: list[int] = []
    for index, group in enumerate(groups):
        start = len(numbers)
        makers: dict[int, int] = {}
        value = len(group.inputs)
        inner: dict[int, bool] = {}
        uses = Counter(read.value for op in group.ops for read in op.reads)
        single = {number for number, times in uses.items() if times == 1}
        for place, op in enumerate(group.ops):
            for read in op.reads:
                if read.value in makers:
                    sources.append(makers[read.value])
                    targets.append(start + place)
            features.append(_op_features(op, group, inner, single))
            for made in op.made:
                makers[value], inner[value] = start + place, made.written
                value += 1
            numbers.append(kinds[op.kind])
            scale.append(log(op.elements))
            owner.append(index)
        inputs.append(
            sum(1 for own in group.inputs if own.data is None) + sum(m.written for o in group.ops for m in o.made)
        )
    return Batch(
        np.array(numbers, np.int64),
        np.array(features, np.float32).reshape(-1, NUM_FEATURES),
        np.array(scale, np.float32),
        np.array(owner, np.int64),
        np.array(sources, np.int64),
        np.array(targets, np.int64),
        np.array(inputs, np.float32),
    )


def curve(scale: Float32) -> Float32:
    """Return the hat functions of the knots at logarithms of elements, (N, knots)."""
    knots = np.array(KNOTS, np.float32)
    place = np.clip(scale / np.float32(log(2)), knots[0], knots[-1])[:, None]
    width = np.diff(knots)
    left = np.concatenate([width[:1], width])
    right = np.concatenate([width, width[-1:]])
    off = place - knots
    return np.asarray(np.maximum(0, 1 - np.where(off < 0, -off / left, off / right)), np.float32)


def _sums(values: Float32, index: np.ndarray[tuple[int], np.dtype[np.int64]], count: int) -> Float32:
    """Return the sums of rows by index, (count, H)."""
    out = np.zeros((count, values.shape[1]), np.float32)
    if len(index):
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        out[ordered[starts]] = np.add.reduceat(values[order], starts, axis=0)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class LearnedKernels:
    """Seconds of fused groups of one machine.

    Attributes:
        provenance: Where the weights come from.
        range: Groups they hold for.
        weights: Arrays by name.
        known: Seconds of groups that were asked for before.
        outside: Why others that were asked for are outside the range.
    """

    provenance: Provenance
    range: Range
    weights: Mapping[str, Float32]
    known: dict[FusedGroup, float] = field(default_factory=dict, repr=False)
    outside: dict[FusedGroup, str] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, path: str | Path) -> "LearnedKernels":
        """Return the weights of a file, or those that autopar comes with for a runtime.

        Raises:
            ClusterError: If there are none.
        """
        shipped = files("autopar.cost") / "fused_kernels" / f"{path}.json"
        try:
            data = shipped.read_bytes() if shipped.is_file() else Path(path).read_bytes()
            read = msgspec.json.decode(data, type=WeightsFile)
        except (OSError, msgspec.DecodeError) as error:
            raise ClusterError(
                f"{path} has no weights of fused kernels: {error}",
                hint="docs/benchmarks/fused_kernels.py trains them; autopar has " + ", ".join(shipped_weights()),
            ) from error
        weights = {name: np.asarray(rows, np.float32) for name, rows in read.weights.items()}
        return cls(read.provenance, read.range, weights)

    def holds_for(self, device: Device, policy: DtypePolicy) -> bool:
        """Whether groups were measured on a device, by the name of its processor, in the numbers of a precision."""
        return device.name == self.provenance.machine and policy.activation == _FLOAT32

    def seconds(self, groups: Iterable[FusedGroup]) -> list[float | None]:
        """Return the seconds of groups; None for those outside the range."""
        wanted = list(groups)
        new = []
        for own in dict.fromkeys(wanted):
            if own not in self.known and own not in self.outside:
                fault = self.range.fault(own)
                if fault:
                    self.outside[own] = fault
                else:
                    new.append(own)
        if new:
            self.known.update(zip(new, self.predict(new).tolist(), strict=True))
        return [self.known.get(own) for own in wanted]

    def told(self) -> str:
        """Return how many groups were priced so far, by what, in words."""
        made = self.provenance
        text = f"{len(self.known)} kernels by what was learned of {made.runtime} on {made.machine}"
        if not self.outside:
            return text
        reasons = Counter(self.outside.values()).most_common(1)
        return f"{text}, {len(self.outside)} by the formula (as {reasons[0][0]})"

    def predict(self, groups: Sequence[FusedGroup]) -> FloatArray:
        """Return the seconds of groups that are all in range, (n,)."""
        return self.of_batch(encode(groups, {kind: number for number, kind in enumerate(self.range.kinds)}))

    def of_batch(self, batch: Batch) -> FloatArray:
        """Return the seconds of encoded groups, (n,)."""
        own, count = self.weights, len(batch.kinds)
        hidden = np.maximum(own["kinds"][batch.kinds] + batch.features @ own["features"], 0)
        degree = np.maximum(np.bincount(batch.sources, minlength=count), 1)[:, None].astype(np.float32)
        layer = 0
        while f"self.{layer}" in own:
            read = _sums(hidden[batch.sources], batch.targets, count)
            given = _sums(hidden[batch.targets], batch.sources, count) / degree
            step = hidden @ own[f"self.{layer}"] + read @ own[f"read.{layer}"] + given @ own[f"given.{layer}"]
            hidden = hidden + np.maximum(step + own[f"bias.{layer}"], 0)
            layer += 1
        rate = hidden @ own["out"] + own["rates"][batch.kinds]
        rate = rate + np.sum(own["curve"][batch.kinds] * curve(batch.scale), axis=1)
        each = np.exp(np.clip(rate + batch.scale, -40, 10)) + np.exp(own["nodes"][batch.kinds])
        total = np.bincount(batch.group, weights=each, minlength=len(batch.inputs))
        call, tensor = np.exp(own["call"])
        return np.asarray(total + call + tensor * batch.inputs, np.float64)


def shipped_weights() -> tuple[str, ...]:
    """Return the names of the weights that autopar comes with."""
    folder = files("autopar.cost") / "fused_kernels"
    return tuple(sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")))

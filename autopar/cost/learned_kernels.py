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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import log, prod
from pathlib import Path

import msgspec
import numpy as np

from autopar.cluster import Device
from autopar.cost.arrays import FloatArray
from autopar.cost.fused_groups import FusedGroup
from autopar.cost.policy import DtypePolicy
from autopar.errors import ClusterError
from autopar.ir.graph import ITEM_BYTES

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64 | np.int64 | np.bool_]]

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


@cache
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


def _totals(values: Numbers, owners: np.ndarray[tuple[int], np.dtype[np.int64]], count: int) -> FloatArray:
    """Return the sums of numbers by owner, (count,)."""
    return np.bincount(owners, weights=values, minlength=count).astype(np.float64, copy=False)


class _Sizes(dict[tuple[int, ...], int]):
    """Number of elements by shape."""

    def __missing__(self, shape: tuple[int, ...]) -> int:
        self[shape] = size = prod(shape)
        return size


def encode(groups: Sequence[FusedGroup], kinds: Mapping[str, int]) -> Batch:
    """Return groups as arrays.

    Args:
        groups: The groups.
        kinds: Number of each kind of op; others are an error.
    """
    sizes = _Sizes()
    ops = [op for group in groups for op in group.ops]
    reads = [read for op in ops for read in op.reads]
    made = [own for op in ops for own in op.made]
    entering = [own for group in groups for own in group.inputs]
    num_ops, num_groups = len(ops), len(groups)

    group_of_op = np.repeat(np.arange(num_groups), [len(group.ops) for group in groups])
    group_of_input = np.repeat(np.arange(num_groups), [len(group.inputs) for group in groups])
    op_of_read = np.repeat(np.arange(num_ops), [len(op.reads) for op in ops])
    num_made = np.array([len(op.made) for op in ops], np.int64)
    op_of_made = np.repeat(np.arange(num_ops), num_made)
    group_of_made = group_of_op[op_of_made]

    # Values of all groups have one numbering: per group its inputs, then what its ops make.
    num_inputs = np.bincount(group_of_input, minlength=num_groups)
    first_value = np.cumsum(num_inputs + np.bincount(group_of_made, minlength=num_groups))
    num_values = int(first_value[-1]) if num_groups else 0
    first_value = np.concatenate([[0], first_value[:-1]])
    made_value = np.arange(len(made)) + np.cumsum(num_inputs)[group_of_made]
    maker, kept = np.full(num_values, -1), np.zeros(num_values, bool)
    written = np.array([own.written for own in made], bool)
    maker[made_value], kept[made_value] = op_of_made, written

    present = np.array([read.value >= 0 for read in reads], bool)
    read_value = np.array([read.value for read in reads], np.int64) + first_value[group_of_op[op_of_read]]
    read_value[~present] = 0
    source = np.where(present & (maker[read_value] < op_of_read), maker[read_value], -1) if reads else read_value
    is_edge = source >= 0
    uses = np.bincount(read_value[present], minlength=num_values)

    read_size = np.array([sizes[read.shape] for read in reads], np.int64)
    made_size = np.array([sizes[own.shape] for own in made], np.int64)
    elements = np.ones(num_ops, np.int64)
    np.maximum.at(elements, op_of_read, read_size)
    np.maximum.at(elements, op_of_made, made_size)

    share = read_size / elements[op_of_read]
    is_small = present & (share < 0.5)
    inside = ~is_small & is_edge
    outside = ~is_small & present & ~is_edge
    reused = inside & (uses[read_value] == 1) & ~kept[read_value]

    lasts = [op.made[0].shape if op.made else () for op in ops]
    last_size = np.array([sizes[last] for last in lasts], np.int64)
    # One number after the other is looked up for a stretch: what its begin costs, its elements share.
    stretch, repeats = last_size.copy(), np.zeros(len(reads), bool)
    column_repeats = np.zeros(num_ops)
    for number in np.flatnonzero(is_small).tolist():
        op = int(op_of_read[number])
        count, repeats[number] = _stretch(reads[number].shape, lasts[op])
        stretch[op] = min(stretch[op], count)
        column_repeats[op] += repeats[number] and count < last_size[op]

    input_bytes = np.array(
        [0 if own.data is not None else sizes[own.shape] * ITEM_BYTES[own.dtype] for own in entering], np.int64
    )
    made_bytes = np.array([sizes[own.shape] * ITEM_BYTES[own.dtype] for own in made], np.int64)
    traffic = _totals(input_bytes, group_of_input, num_groups) + _totals(
        made_bytes * written, group_of_made, num_groups
    )
    row = np.array([op.reads[0].shape[-1] if op.reads and op.reads[0].shape else 1 for op in ops], np.int64)
    width = np.array([last[-1] if last else -1 for last in lasts], np.int64)
    is_tanh = [any(value == "tanh" for _, value in op.attrs) if op.attrs else False for op in ops]
    features = (
        _totals(share * outside, op_of_read, num_ops),
        _totals(is_small, op_of_read, num_ops),
        _totals(share * is_small, op_of_read, num_ops),
        _totals(made_size, op_of_made, num_ops) / elements,
        _totals(made_size * written, op_of_made, num_ops) / elements,
        np.log2(elements) / 10 - 1.8,
        np.log2(row) / 10 - 0.8,
        np.log2(np.maximum(1, last_size)) / 10 - 1.8,
        width == row,
        (np.log2(1 + traffic) / 10 - 2.0)[group_of_op],
        10.0 / np.maximum(10, stretch),
        _totals(share * inside, op_of_read, num_ops),
        _totals(reused, op_of_read, num_ops) > 0,
        _totals(is_small & ~repeats, op_of_read, num_ops),
        column_repeats,
        10.0 / np.maximum(10, row),
        num_made > 1,
        is_tanh,
        np.bincount(group_of_op, minlength=num_groups)[group_of_op] / 10.0,
    )
    unknown = np.array([own.data is None for own in entering], bool)
    return Batch(
        np.array([kinds[op.kind] for op in ops], np.int64),
        np.array(features, np.float64).T.astype(np.float32, order="C").reshape(-1, NUM_FEATURES),
        np.log(elements).astype(np.float32),
        group_of_op,
        source[is_edge],
        op_of_read[is_edge],
        (_totals(unknown, group_of_input, num_groups) + _totals(written, group_of_made, num_groups)).astype(np.float32),
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

"""`If`, `Loop` and `Scan` as plain nodes: the branch that is taken, and a body once per iteration.

That needs conditions and trip counts that are known when a model is imported: constants, or numbers that follow from
shapes. Names of a body are local to it: each iteration defines them again under names of its own, while initializers
and constants of the body are defined once, so that a weight read by all iterations stays one weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.ir.graph import Value
from autopar.onnx.upgrade import Draft

CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Kinds whose bodies are graphs."""

MAX_NODES = 100_000
"""Nodes that the loops of a model may be unrolled to."""

_SMALL = 16
"""Elements of an input up to which a condition computed from it is taken for a setting rather than for data."""

_SHORTER = "export the model for shorter sequences, or with an op such as LSTM in place of the loop"

_FIRST_SCAN = 9
"""The opset from which on `Scan` has no batch dim of its own."""


class Sweep(Protocol):
    """What the import does for an expansion."""

    opset: int
    """Version of the default domain of the model."""

    def known(self, name: str) -> NDArray[np.generic] | None:
        """Return the elements of a value, None if they are computed at run time."""

    def value(self, name: str) -> Value:
        """Return the type of a value."""

    def defines(self, name: str) -> bool:
        """Whether a value of that name exists."""

    def resolved(self, name: str) -> str:
        """Return the value that a name stands for."""

    def sources(self, name: str) -> Sequence[Value]:
        """Return the data inputs and weights a value is computed from."""

    def constant(self, array: NDArray[np.generic], hint: str) -> str:
        """Add a constant and return its name."""

    def rename(self, name: str, source: str) -> None:
        """Let a name stand for a value."""

    def initializers(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Take in initializers."""

    def node(self, node: onnx.NodeProto, index: int) -> None:
        """Take in one node of the model's opset."""

    def emit(self, draft: Draft) -> None:
        """Take in one op of the target opset."""


class Expansion:
    """Expands control flow, and keeps count of the nodes that it makes.

    Args:
        sweep: The import.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._made = 0

    def expand(self, node: onnx.NodeProto, what: str) -> None:
        """Take in the nodes that a control-flow node stands for.

        Args:
            node: An `If`, `Loop` or `Scan`.
            what: The node, for errors.

        Raises:
            ModelError: If a condition or trip count depends on data, or there would be more than `MAX_NODES` nodes.
        """
        match node.op_type:
            case "If":
                self._if(node, what)
            case "Loop":
                self._loop(node, what)
            case "Scan":
                self._scan(node, what)
            case _:
                raise ModelError(
                    f"{what} is control flow over a sequence of tensors, which is not supported",
                    hint="export with torch.onnx.export(..., dynamo=True), which unrolls or removes it",
                )

    def _if(self, node: onnx.NodeProto, what: str) -> None:
        if len(node.input) != 1:
            raise ModelError(f"{what} has {len(node.input)} inputs, not one", hint="check the model with onnx.checker")
        condition = self._sweep.known(node.input[0])
        if condition is None:
            self._refuse(what, "condition", node.input[0])
        taken = "then_branch" if _is_true(condition, what) else "else_branch"
        branch = _body(node, taken, what)
        results = self._inlined(branch, [], self._fixed(branch), "", what)
        self._finish(node, results, what)

    def _loop(self, node: onnx.NodeProto, what: str) -> None:
        body = _body(node, "body", what)
        limit = self._trips(node, what)
        carried = [self._sweep.resolved(name) for name in node.input[2:]]
        if len(body.input) != 2 + len(carried) or len(body.output) <= len(carried):
            raise ModelError(
                f"{what} carries {len(carried)} values, but its body has {len(body.input)} inputs and "
                f"{len(body.output)} outputs",
                hint="check the model with onnx.checker",
            )
        go_on = len(node.input) < 2 or not node.input[1] or self._condition(node.input[1], what)
        fixed = self._fixed(body)
        stem = node.name or node.output[0]
        yes = self._sweep.constant(np.array(True), f"{stem}.true")
        rows: list[Sequence[str]] = []
        iteration = 0
        while go_on and (limit is None or iteration < limit):
            number = self._sweep.constant(np.array(iteration, np.int64), f"{stem}.{iteration}")
            results = self._inlined(body, [number, yes, *carried], fixed, f".{iteration}", what)
            carried = list(results[1 : 1 + len(carried)])
            rows.append(results[1 + len(carried) :])
            go_on = self._condition(results[0], what)
            iteration += 1
        stacked = [
            self._stacked([row[index] for row in rows], 0, f"{stem}.stack.{index}", what)
            for index in range(len(body.output) - 1 - len(carried))
        ]
        self._finish(node, [*carried, *stacked], what)

    def _scan(self, node: onnx.NodeProto, what: str) -> None:
        if self._sweep.opset < _FIRST_SCAN:
            raise ModelError(f"{what} is a Scan of opset 8, a form that opset 9 removed", hint="export with opset 9+")
        body = _body(node, "body", what)
        lists = {attribute.name: list(attribute.ints) for attribute in node.attribute}
        count = next((int(attribute.i) for attribute in node.attribute if attribute.name == "num_scan_inputs"), 0)
        states, scanned = node.input[: len(node.input) - count], node.input[len(node.input) - count :]
        carried = [self._sweep.resolved(name) for name in states]
        num_rows = len(body.output) - len(carried)
        if not scanned or len(body.input) != len(node.input) or num_rows < 0:
            raise ModelError(f"{what} does not fit its body", hint="check the model with onnx.checker")
        axes = lists.get("scan_input_axes") or [0] * count
        backwards = lists.get("scan_input_directions") or [0] * count
        out_axes = lists.get("scan_output_axes") or [0] * num_rows
        out_backwards = lists.get("scan_output_directions") or [0] * num_rows
        stem = node.name or node.output[0]
        slices = [self._slices(name, axis, stem, what) for name, axis in zip(scanned, axes, strict=True)]
        slices = [each[::-1] if turned else each for each, turned in zip(slices, backwards, strict=True)]
        if len({len(each) for each in slices}) > 1:
            raise ModelError(f"{what} scans inputs of different lengths {[len(each) for each in slices]}")
        self._check(len(slices[0]), body, what)
        fixed = self._fixed(body)
        rows: list[Sequence[str]] = []
        for iteration, given in enumerate(zip(*slices, strict=True)):
            results = self._inlined(body, [*carried, *given], fixed, f".{iteration}", what)
            carried, row = list(results[: len(carried)]), results[len(carried) :]
            rows.append(row)
        stacked = []
        for index, (axis, turned) in enumerate(zip(out_axes, out_backwards, strict=True)):
            column = [row[index] for row in rows]
            stacked.append(self._stacked(column[::-1] if turned else column, axis, f"{stem}.stack.{index}", what))
        self._finish(node, [*carried, *stacked], what)

    def _trips(self, node: onnx.NodeProto, what: str) -> int | None:
        """Return the trip count of a loop, None if only its condition ends it."""
        if not node.input or not node.input[0]:
            if len(node.input) < 2 or not node.input[1]:
                raise ModelError(f"{what} has neither a trip count nor a condition: it never ends")
            return None
        trips = self._sweep.known(node.input[0])
        if trips is None:
            self._refuse(what, "trip count", node.input[0])
        if trips.size != 1:
            raise ModelError(f"{what} has a trip count of {trips.size} elements, not one")
        count = max(0, int(trips.reshape(())))
        self._check(count, _body(node, "body", what), what)
        return count

    def _check(self, trips: int, body: onnx.GraphProto, what: str) -> None:
        nodes = trips * max(1, len(body.node))
        if self._made + nodes > MAX_NODES:
            raise ModelError(
                f"{what} runs its body of {len(body.node)} nodes {trips:,} times; loops are unrolled to at most "
                f"{MAX_NODES:,} nodes",
                hint=_SHORTER,
            )

    def _condition(self, name: str, what: str) -> bool:
        """Return the value of a loop's condition."""
        condition = self._sweep.known(name)
        if condition is None:
            self._refuse(what, "condition", name)
        return _is_true(condition, what)

    def _refuse(self, what: str, part: str, name: str) -> NoReturn:
        """Raise the error for control flow whose course is not known."""
        sources = self._sweep.sources(name)
        inputs = ", ".join(repr(value.name) for value in sources)
        if sources and all(value.size <= _SMALL for value in sources):
            first = sources[0]
            number = "True" if first.dtype == "bool" else "..."
            raise ModelError(
                f"{what} has a {part} that depends on the value of input {inputs}, which a plan has to know",
                hint="put the value into the file: model.graph.initializer.append(onnx.numpy_helper.from_array("
                f"np.full({first.shape}, {number}, np.{first.dtype}), {first.name!r}))",
            )
        raise ModelError(
            f"{what} is control flow that depends on data, which is not supported: its {part} {name!r} is computed "
            f"from {inputs or 'random numbers'}",
            hint="export with torch.onnx.export(..., dynamo=True), which unrolls or removes it",
        )

    def _fixed(self, body: onnx.GraphProto) -> dict[str, str]:
        """Take in what a body computes alike in every iteration: initializers and constants; return their names."""
        names: dict[str, str] = {}
        for tensor in body.initializer:
            names[tensor.name] = self._fresh(tensor.name, "")
            if names[tensor.name] != tensor.name:
                copy = onnx.TensorProto()
                copy.CopyFrom(tensor)
                copy.name = names[tensor.name]
                tensor = copy
            self._sweep.initializers([tensor])
        for index, node in enumerate(body.node):
            if node.op_type == "Constant" and not node.input and node.output:
                names[node.output[0]] = self._fresh(node.output[0], "")
                self._sweep.node(_renamed(node, names, ""), index)
        return names

    def _fresh(self, name: str, suffix: str) -> str:
        """Return the name of a local value of a body outside it."""
        fresh = name + suffix
        while self._sweep.defines(fresh):
            fresh += "_"
        return fresh

    def _inlined(
        self, body: onnx.GraphProto, given: Sequence[str], fixed: Mapping[str, str], suffix: str, what: str
    ) -> list[str]:
        """Take in the nodes of a body; return the values of its outputs.

        Args:
            body: The body.
            given: The value of each of its inputs.
            fixed: Names of what is defined already.
            suffix: End of the names of this iteration.
            what: The node, for errors.
        """
        self._made += max(1, len(body.node))
        if self._made > MAX_NODES:
            raise ModelError(
                f"{what} does not end within the {MAX_NODES:,} nodes that loops are unrolled to", hint=_SHORTER
            )
        names = dict(fixed) | dict(zip((item.name for item in body.input), given, strict=True))
        for index, node in enumerate(body.node):
            if node.output and node.output[0] in fixed:
                continue
            names |= {name: self._fresh(name, suffix) for name in node.output if name}
            self._sweep.node(_renamed(node, names, suffix), index)
        return [self._sweep.resolved(names.get(item.name, item.name)) for item in body.output]

    def _slices(self, name: str, axis: int, stem: str, what: str) -> list[str]:
        """Return the slices of a value along an axis, without that axis."""
        value = self._sweep.value(self._sweep.resolved(name))
        if not -len(value.shape) <= axis < len(value.shape):
            raise ModelError(f"{what} scans axis {axis} of {value}")
        length = value.shape[axis]
        parts = [f"{stem}.{name}.{index}" for index in range(length)]
        axes = self._sweep.constant(np.array([axis], np.int64), f"{stem}.{name}.axis")
        if length > 1:
            attrs = {"axis": axis % len(value.shape), "num_outputs": length}
            self._sweep.emit(Draft(f"{stem}.{name}.split", "Split", [value.name], [*parts], {**attrs}))
        slices = []
        for part in parts:
            source = self._sweep.resolved(part) if length > 1 else value.name
            self._sweep.emit(Draft(f"{part}.row", "Squeeze", [source, axes], [f"{part}.row"]))
            slices.append(self._sweep.resolved(f"{part}.row"))
        return slices

    def _stacked(self, rows: Sequence[str], axis: int, name: str, what: str) -> str:
        """Return values stacked along a new axis."""
        if not rows:
            raise ModelError(f"{what} runs no iteration, so that its results have no shape")
        axes = self._sweep.constant(np.array([axis], np.int64), f"{name}.axis")
        lifted = []
        for index, row in enumerate(rows):
            self._sweep.emit(Draft(f"{name}.{index}", "Unsqueeze", [row, axes], [f"{name}.{index}"]))
            lifted.append(self._sweep.resolved(f"{name}.{index}"))
        self._sweep.emit(Draft(name, "Concat", lifted, [name], {"axis": axis}))
        return self._sweep.resolved(name)

    def _finish(self, node: onnx.NodeProto, results: Sequence[str], what: str) -> None:
        if len(results) < len(node.output):
            raise ModelError(
                f"{what} has {len(node.output)} outputs, its body {len(results)}",
                hint="check the model with onnx.checker",
            )
        for name, result in zip(node.output, results, strict=False):
            if name and not self._sweep.defines(result):
                raise ModelError(f"{what} returns {result!r}, which nothing defines")
            if name:
                self._sweep.rename(name, result)


def _body(node: onnx.NodeProto, name: str, what: str) -> onnx.GraphProto:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.g
    raise ModelError(f"{what} has no {name}", hint="check the model with onnx.checker")


def _is_true(condition: NDArray[np.generic], what: str) -> bool:
    if condition.size != 1:
        raise ModelError(f"{what} has a condition of {condition.size} elements, not one")
    return bool(condition.reshape(()))


def _renamed(node: onnx.NodeProto, names: Mapping[str, str], suffix: str) -> onnx.NodeProto:
    """Return a copy of a node, and of the graphs in it, that reads and writes values under other names."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    if node.name:
        copy.name = node.name + suffix
    for slots in (copy.input, copy.output):
        for slot, name in enumerate(slots):
            slots[slot] = names.get(name, name)
    for attribute in copy.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            _rename_graph(attribute.g, names)
    return copy


def _rename_graph(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename what a graph reads of its surroundings, and its own values where they would take such a name."""
    own = {item.name for item in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    outer = {name: other for name, other in names.items() if name not in own}
    taken = own | set(outer.values())
    for name in sorted(own & set(outer.values())):
        other = name
        while other in taken:
            other += "_"
        taken.add(other)
        outer[name] = other
    for node in graph.node:
        for slots in (node.input, node.output):
            for slot, name in enumerate(slots):
                slots[slot] = outer.get(name, name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename_graph(attribute.g, outer)
    for item in (*graph.input, *graph.initializer, *graph.output):
        item.name = outer.get(item.name, item.name)

"""The import proper: one forward sweep that folds what is known, infers every shape and drops what does nothing."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx
from numpy.typing import NDArray

from autopar.errors import ModelError, stopped
from autopar.ir.graph import BRANCHES, FROZEN, PACKED, Attr, Graph, Op, Role, State, Value
from autopar.ir.verify import verify
from autopar.onnx.batch import Batch, Ports, bind, resolve
from autopar.onnx.border import border
from autopar.onnx.control_flow import CONTROL_FLOW, Expansion
from autopar.onnx.expert_loops import raise_expert_loops
from autopar.onnx.explicit import make_explicit
from autopar.onnx.folding import Folding
from autopar.onnx.inference import Inference, Type
from autopar.onnx.isolated import Isolated, isolated
from autopar.onnx.microsoft import rewrite
from autopar.onnx.operands import check_operands
from autopar.onnx.own import NUMBERED, check_own, is_own
from autopar.onnx.projections import separate_projections
from autopar.onnx.reader import Source
from autopar.onnx.roles import Roles
from autopar.onnx.schema import check_node, check_results, check_shape, is_known, unknown_op
from autopar.onnx.simplify import same_as
from autopar.onnx.tensors import MAX_CONSTANT, constant_tensor, has_data, read_array, read_attrs, tensor_type
from autopar.onnx.upgrade import TARGET_OPSET, Draft, upgrade
from autopar.plan import DimSize
from autopar.progress import StopCallback, never

_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_MAX_DATA = 256  # elements of a constant that shape inference is shown


@border
def import_model(
    source: Source, dims: Mapping[str, DimSize], batch: int | None, should_stop: StopCallback = never
) -> Graph:
    """Return the model as a graph; see `autopar.onnx.load`."""
    model, branches = raise_expert_loops(source.model)
    source = replace(source, model=model)
    with isolated(should_stop) as process:
        sweep = _sweep(source, dims, batch, process)
    ports = sweep.ports
    graph = sweep.finish([item.name for item in source.model.graph.output])
    graph = separate_projections(replace(graph, metadata=_metadata(source, ports) | sweep.noted(graph)))
    if branches > 1:
        graph = replace(graph, metadata={**graph.metadata, BRANCHES: str(branches)})
    verify(graph)
    return graph


def _sweep(source: Source, dims: Mapping[str, DimSize], batch: int | None, process: Isolated) -> "_Sweep":
    """Return the finished sweep over the model."""
    ports = bind(source, dims, batch)
    if ports.batch is not None and ports.batch.replaced:
        exported = _swept(source, bind(source, dims, ports.batch.exported), {}, process).types
        try:
            return _swept(source, ports, exported, process)
        except ModelError as error:
            was, wanted = ports.batch.exported, ports.batch.size
            raise ModelError(
                f"the model is exported for a batch of {was} and cannot take {wanted}: {error}",
                hint="export it with a dynamic batch dim",
            ) from error
    return _swept(source, ports, {}, process)


def _swept(source: Source, ports: Ports, exported: Mapping[str, Type], process: Isolated) -> "_Sweep":
    sweep = _Sweep(source, ports, exported, process)
    sweep.start()
    for index, node in enumerate(source.model.graph.node):
        sweep.node(node, index)
    return sweep


def _metadata(source: Source, ports: Ports) -> dict[str, str]:
    model = source.model
    metadata = {
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "sha256": source.sha256,
        "dims": json.dumps(dict(sorted(ports.dims.items()))),
    }
    if ports.batch is not None:
        batch = ports.batch
        metadata |= {"batch": str(batch.size), "batch_inputs": json.dumps(batch.inputs)}
        if any(batch.axes):
            metadata["batch_axes"] = json.dumps(dict(zip(batch.inputs, batch.axes, strict=True)))
    return metadata


class _Sweep:
    """Walks the nodes in order. It is the `Context` of the upgrade rules and the `Sweep` of control flow.

    Args:
        source: The model.
        ports: Its data inputs.
        exported: Types of values in a sweep with the exported batch; empty if that is the batch.
        process: Where shapes are inferred, and ops run whose cost is not known.

    Attributes:
        ports: The data inputs.
        types: Types of inputs, initializers and all results, also of ops that were dropped.
        opset: Version of the default domain of the model.
    """

    def __init__(self, source: Source, ports: Ports, exported: Mapping[str, Type], process: Isolated) -> None:
        self._source = source
        self.ports = ports
        self._batch = ports.batch if exported else None
        self._process = process
        self._exported = exported
        self._inner: dict[str, int] = {}
        self.types: dict[str, Type] = {}
        self._same: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._weighted: set[str] = set()
        self._roles = Roles(source)
        self.opset = source.opset
        self._expansion = Expansion(self)
        self._opset = max(source.opset, TARGET_OPSET)
        self._inference = Inference(self._opset, source.domains, process)
        self._folding = Folding(process, self._opset)
        self._values: dict[str, Value] = {}
        self._known: dict[str, NDArray[np.generic]] = {}
        self._alias: dict[str, str] = {}
        self._made: dict[str, Op] = {}
        self._ops: list[Op] = []
        self._names: set[str] = set()
        self._inputs: list[str] = []
        self._states: dict[str, Role] = {}

    def start(self) -> None:
        """Take in data inputs and initializers."""
        for value in self.ports.inputs:
            self._values[value.name] = value
            self.types[value.name] = (value.shape, value.dtype)
            self._inputs.append(value.name)
        self.initializers(self._source.model.graph.initializer)
        sparse = self._source.model.graph.sparse_initializer
        if sparse:
            raise ModelError(f"initializer {sparse[0].values.name!r} is sparse, which is not supported")

    def initializers(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Take in initializers of the model or of a body."""
        for tensor in tensors:
            shape, dtype = tensor_type(tensor, f"initializer {tensor.name!r}")
            role = self._roles.of(tensor, self._source)
            if role is not Role.PARAMETER and self._batch is not None and has_data(tensor, self._source.folder):
                array = self._batch.one_row(read_array(tensor, self._source.folder))
                shape = array.shape
                if role is None:
                    self._known[tensor.name] = array
            elif role is None:
                self._known[tensor.name] = read_array(tensor, self._source.folder)
            if role is not None:
                self._state(tensor.name, role)
            self._values[tensor.name] = Value(tensor.name, shape, dtype)
            self.types[tensor.name] = (tuple(tensor.dims), dtype)

    def _state(self, name: str, role: Role) -> None:
        self._states[name] = role
        if role is Role.PARAMETER:
            self._weighted.add(name)

    def constant(self, array: NDArray[np.generic], hint: str) -> str:
        """Add a constant and return its name."""
        name = hint
        while name in self._values:
            name += "_"
        self._known[name] = array
        self._values[name] = Value(name, array.shape, str(array.dtype))
        return name

    def value(self, name: str) -> Value:
        """Return the type of a value."""
        return self._values[name]

    def known(self, name: str) -> NDArray[np.generic] | None:
        """Return the elements of a value, None if they are computed at run time."""
        return self._known.get(self.resolved(name))

    def defines(self, name: str) -> bool:
        """Whether a value of that name exists."""
        return name in self._values or name in self._alias

    def resolved(self, name: str) -> str:
        """Return the value that a name stands for."""
        return self._alias.get(name, name)

    def rename(self, name: str, source: str) -> None:
        """Let a name stand for a value."""
        self._alias[name] = source

    def sources(self, name: str) -> Sequence[Value]:
        """Return the data inputs and weights a value is computed from."""
        found: dict[str, Value] = {}
        seen: set[str] = set()
        stack = [self.resolved(name)]
        while stack:
            name = stack.pop()
            if name in seen or name in self._known:
                continue
            seen.add(name)
            if name in self._made:
                stack += [source for source in self._made[name].inputs if source]
            elif name in self._values:
                found[name] = self._values[name]
        return tuple(found.values())

    def node(self, node: onnx.NodeProto, index: int) -> None:
        """Take in one node.

        Raises:
            ModelError: If it cannot be imported.
        """
        op_type = node.op_type
        domain = "" if node.domain == "ai.onnx" else node.domain
        name = node.name or (node.output[0] if node.output else "") or f"{op_type}_{index}"
        what = f"node {name!r} ({domain + '::' if domain else ''}{op_type})"
        version = self._source.domains.get(domain, 1) if domain else self._source.opset
        known = is_known(op_type, domain, version)
        own = is_own(f"{domain}::{op_type}")
        if known:
            check_node(node, domain, version, what)
        if own:
            check_own(node, what)
        if self._process.should_stop():
            raise stopped()
        if op_type in CONTROL_FLOW and not domain:
            self._expansion.expand(node, what)
            return
        inputs = [self._alias.get(item, item) for item in node.input]
        for item in inputs:
            if item and item not in self._values:
                raise ModelError(
                    f"{what} reads {item!r}, which nothing before it defines", hint="check the model with onnx.checker"
                )
        if op_type == "Constant" and not domain:
            self._constant_node(node, what)
            return
        if op_type == "ConstantOfShape" and not domain and self._filled(node, inputs, what):
            return
        if not known and not own:
            check_results(node, what)
            if rewrite(
                Draft(name, op_type, inputs, list(node.output), {**read_attrs(node.attribute, what)}),
                domain,
                what,
                self,
            ):
                return
            raise unknown_op(domain, version, what)
        kind = f"{domain}::{op_type}" if domain else op_type
        draft = Draft(name, kind, inputs, list(node.output), dict(read_attrs(node.attribute, what)))
        drafts = [draft] if self._source.opset >= TARGET_OPSET or domain else upgrade(draft, self._source.opset, self)
        for item in drafts:
            self.emit(item)

    def _constant_node(self, node: onnx.NodeProto, what: str) -> None:
        tensor, name = constant_tensor(node, what), node.output[0]
        shape, dtype = tensor_type(tensor, what)
        role = self._roles.of_constant(name, prod(shape), "float" in dtype)
        if role is Role.PARAMETER or not has_data(tensor, self._source.folder):
            self._state(name, role or Role.BUFFER)
        elif role is None or self._batch is not None:
            array = read_array(tensor, self._source.folder)
            array = self._batch.one_row(array) if self._batch is not None else array
            shape = array.shape
            if prod(shape) <= MAX_CONSTANT:
                self._known[name] = array
            else:
                self._state(name, Role.BUFFER)
        else:
            self._state(name, role)
        self._values[name] = Value(name, shape, dtype)

    def _filled(self, node: onnx.NodeProto, inputs: Sequence[str], what: str) -> bool:
        """Take in a `ConstantOfShape`, unless its shape is not known: a weight, or an `Expand` of a scalar."""
        fill = _fill(node, what)
        target = self._known.get(inputs[0])
        if target is None:
            return False
        if target.dtype != np.int64 or target.ndim != 1:
            raise ModelError(f"{what} has a shape of {target.dtype}{list(target.shape)}, not a list of int64")
        name, shape = node.output[0], tuple(map(int, target))
        check_shape(shape, what)
        role = self._roles.of_filled(name, inputs[0]) if fill.dtype.kind not in "biu" else None
        if role is not None:
            self._state(name, role)
            self._values[name] = Value(name, shape, str(fill.dtype))
        elif prod(shape) <= MAX_CONSTANT:
            self._known[name] = np.full(shape, fill)
            self._values[name] = Value(name, shape, str(fill.dtype))
        else:
            scalar = self.constant(np.asarray(fill), f"{name}.value")
            self.emit(Draft(node.name or name, "Expand", [scalar, inputs[0]], [name]))
        return True

    def emit(self, draft: Draft) -> None:
        """Fold, drop or append one op of the target opset."""
        while draft.outputs and not draft.outputs[-1]:
            draft.outputs.pop()
        if draft.kind == "Dropout":
            self._dropout(draft)
            return
        if self._batch is not None and draft.kind in ("Reshape", "Expand"):
            self._rebatch(draft, self._batch)
        attrs = tuple(sorted(draft.attrs.items()))
        inputs = [self._values[name] if name else None for name in draft.inputs]
        if draft.kind in ("Shape", "Size") and inputs[0] is not None:
            self._fold(draft, [_size(draft, inputs[0])])
            return
        data = [self._known.get(name) for name in draft.inputs]
        shown = [None if array is None or array.size > _MAX_DATA else array for array in data]
        types = self._inference.infer(draft.name, draft.kind, attrs, inputs, shown, len(draft.outputs))
        check_operands(draft, inputs, types[0][0] if types and types[0] is not None else None)
        if draft.kind not in _RANDOM:
            arrays = self._folding.fold(draft, attrs, data, types)
            if arrays is not None and all(array.size <= MAX_CONSTANT for array in arrays):
                self._fold(draft, arrays)
                return
            if arrays is not None:
                types = tuple((array.shape, str(array.dtype)) for array in arrays)
        self._note(draft.outputs, types)
        if self._batch is not None and draft.kind not in ("Reshape", "Expand"):
            self._carry(draft)
        source = same_as(draft, self._values, self._known, self._made, types)
        if source is not None:
            self._alias[draft.outputs[0]] = source
            return
        make_explicit(draft, types[0] and types[0][0], self._known, self)
        if draft.kind in NUMBERED:
            self._number(draft, NUMBERED[draft.kind])
        attrs = tuple(sorted(draft.attrs.items()))
        if not self._merged(draft, attrs):
            self._append(draft, attrs, types)

    def _number(self, draft: Draft, slot: int) -> None:
        """Let an op count the numbers of its experts: what an op makes can be sharded, a constant cannot."""
        known = self._known.get(draft.inputs[slot])
        if known is None or not np.array_equal(known, np.arange(known.size)):
            raise ModelError(
                f"node {draft.name!r} ({draft.kind}) does not number its experts 0, 1, 2, ...",
                hint="write the model again with autopar model",
            )
        bounds = [self.constant(np.array(number, np.int64), f"{draft.name}.bound") for number in (0, known.size, 1)]
        name = f"{draft.name}.numbers"
        draft.inputs[slot] = name
        self._append(Draft(name, "Range", bounds, [name]), (), [(known.shape, "int64")])

    def _note(self, names: Sequence[str], types: Sequence[Type | None]) -> None:
        for name, kept in zip(names, types, strict=True):
            if kept is not None:
                self.types[name] = kept

    def _rebatch(self, draft: Draft, batch: Batch) -> None:
        """Put the new batch into the target shape of an op."""
        entries = self._known.get(draft.inputs[1])
        source, result = self._values[draft.inputs[0]].shape, self._exported.get(draft.outputs[0])
        before = self._exported.get(draft.inputs[0])
        if entries is None or before is None or result is None:
            return
        inner = self._inner.get(draft.inputs[0], 1)
        target, self._inner[draft.outputs[0]] = batch.target(draft.kind, before[0], source, result[0], inner)
        given = [int(entry) for entry in entries]
        if draft.kind == "Expand" or resolve(given, source, zero_is_copy=not draft.attrs.get("allowzero")) != target:
            draft.inputs[1] = self.constant(np.array(target, np.int64), f"{draft.name}.batched")

    def _carry(self, draft: Draft) -> None:
        """Note where in a dim the batch lies: an op that keeps a dim keeps that, too."""
        held = {self._batched_dim(name): self._inner[name] for name in draft.inputs if name in self._inner}
        for name in draft.outputs:
            size = self._batched_dim(name)
            if size is not None and size in held:
                self._inner[name] = held[size]

    def _batched_dim(self, name: str) -> int | None:
        """Return the exported size of the dim of a value that holds the batch; None if it is none or several."""
        before, now = self._exported.get(name), self.types.get(name)
        if before is None or now is None:
            return None
        changed = [size for size, other in zip(before[0], now[0], strict=False) if size != other]
        return changed[0] if len(changed) == 1 else None

    def _merged(self, draft: Draft, attrs: tuple[tuple[str, Attr], ...]) -> bool:
        """Drop an op that repeats another one, if no trained tensor is upstream (masks, tables made once per layer)."""
        if not self._weighted.isdisjoint(draft.inputs):
            self._weighted.update(draft.outputs)
            return False
        if draft.kind in _RANDOM:
            return False
        key = (draft.kind, attrs, tuple(draft.inputs), tuple(map(bool, draft.outputs)))
        first = self._same.setdefault(key, tuple(draft.outputs))
        if first == tuple(draft.outputs):
            return False
        self._alias.update(zip(draft.outputs, first, strict=True))
        return True

    def _dropout(self, draft: Draft) -> None:
        """Keep everything: that is the expected value, and backends fuse the op into a neighbour."""
        self._alias[draft.outputs[0]] = draft.inputs[0]
        for mask in draft.outputs[1:]:
            keep = self.constant(np.array(True), f"{mask}.value")
            shape = self.constant(np.array(self._values[draft.inputs[0]].shape, np.int64), f"{mask}.shape")
            self.emit(Draft(f"{draft.name}.mask", "Expand", [keep, shape], [mask]))

    def _append(self, draft: Draft, attrs: tuple[tuple[str, Attr], ...], types: Sequence[Type | None]) -> None:
        for name, kept in zip(draft.outputs, types, strict=True):
            if kept is None and name:
                raise ModelError(
                    f"the shape of {name!r}, result of node {draft.name!r} ({draft.kind}), depends on data",
                    hint="export with fixed shapes: replace the op, or compute its input from shapes only",
                )
            if kept is not None and name:
                self._values[name] = Value(name, *kept)
        name = draft.name
        while name in self._names:
            name += "_"
        self._names.add(name)
        op = Op(name, draft.kind, tuple(draft.inputs), tuple(draft.outputs), attrs)
        self._ops.append(op)
        for output in op.outputs:
            self._made[output] = op

    def _fold(self, draft: Draft, arrays: Sequence[NDArray[np.generic]]) -> None:
        for name, array in zip(draft.outputs, arrays, strict=True):
            if name:
                self._known[name] = array
                self._values[name] = Value(name, array.shape, str(array.dtype))
                self.types[name] = (array.shape, str(array.dtype))

    def noted(self, graph: Graph) -> dict[str, str]:
        """Return the metadata of parameters: names of those that are not trained, and sizes of packed ones."""
        names = [value.name for value in graph.parameters]
        frozen = [name for name in names if self._roles.is_frozen(name)]
        sizes = {name: self._roles.unpacked_size(name) for name in names}
        packed = {name: size for name, size in sizes.items() if size is not None}
        return ({FROZEN: json.dumps(frozen)} if frozen else {}) | ({PACKED: json.dumps(packed)} if packed else {})

    def finish(self, outputs: Sequence[str]) -> Graph:
        """Return the graph of what the outputs need."""
        wanted: list[str] = []
        renamed: dict[str, str] = {}
        for name in outputs:
            source = self._alias.get(name, name)
            if source not in self._values:
                raise ModelError(
                    f"output {name!r} is not defined by any node", hint="the file is damaged: export it again"
                )
            if source != name and source in self._made and source not in renamed and source not in outputs:
                renamed[source] = name
            wanted.append(source)
        needed = set(wanted)
        ops: list[Op] = []
        for op in reversed(self._ops):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
                outputs_kept = tuple([name if name in needed else "" for name in op.outputs])
                ops.append(op if outputs_kept == op.outputs else replace(op, outputs=outputs_kept))
        ops.reverse()

        def final(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(renamed.get(name, name) for name in names)

        if renamed:
            ops = [
                op
                if renamed.keys().isdisjoint((*op.inputs, *op.outputs))
                else replace(op, inputs=final(op.inputs), outputs=final(op.outputs))
                for op in ops
            ]
        states = tuple(State(name, name, role, name) for name, role in self._states.items() if name in needed)
        constants = {name: array for name, array in self._known.items() if name in needed}
        sources = [*self._inputs, *(state.input for state in states), *constants]
        defined = [name for op in self._ops for name in op.outputs if name in needed]
        values = {name: self._values[name] for name in sources}
        for name in defined:
            kept = renamed.get(name, name)
            values[kept] = replace(self._values[name], name=kept)
        graph = self._source.model.graph
        return Graph(
            name=graph.name or "model",
            opset=self._opset,
            values=values,
            inputs=tuple(self._inputs),
            states=states,
            constants=constants,
            ops=tuple(ops),
            outputs=final(wanted),
        )


def _fill(node: onnx.NodeProto, what: str) -> NDArray[np.generic]:
    """Return the scalar that a `ConstantOfShape` is filled with."""
    tensor = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
    if tensor is None:
        return np.zeros((), np.float32)
    if prod(tensor.dims) != 1:
        raise ModelError(f"{what} is filled with {prod(tensor.dims)} elements, not one")
    return read_array(tensor, None).reshape(())


def _size(draft: Draft, value: Value) -> NDArray[np.generic]:
    """Return what `Shape` or `Size` of a value is."""
    if draft.kind == "Size":
        return np.array(value.size, np.int64)
    start, end = draft.attrs.get("start", 0), draft.attrs.get("end")
    assert isinstance(start, int), "ONNX's schema makes start an integer"
    assert end is None or isinstance(end, int), "ONNX's schema makes end an integer"
    return np.array(value.shape[start:end], np.int64)

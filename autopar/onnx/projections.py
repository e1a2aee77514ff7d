"""Fused projections of unequal parts, taken apart: queries of many heads, keys and values of few, from one matrix.

`x @ [A B C]` with parts of unequal widths is split behind the product. Devices that divide A need not divide B, and a
matrix that is one tensor can only be copied or split as a whole: with more devices than key heads all of attention
would be copied, where Megatron-LM copies keys and values. So each part gets a parameter of its own, named after the
matrix with the number of the part, and what is written down is `x @ A`, `x @ B`, `x @ C`: the same numbers.
Equal parts stay together, because block-cyclic shards split them alike.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import FROZEN, PACKED, SEPARATED, Graph, Op, Role, State, Value

_TRANSPOSED = ".T"


@dataclass(frozen=True, slots=True)
class _Fused:
    """A projection that is split into parts.

    Attributes:
        product: `MatMul` of a value and the matrix.
        bias: `Add` of the bias; None without.
        view: `Reshape` of the last dim into several; None if that is split itself.
        splits: What splits the result: one `Split`, or slices.
        parts: Value and width of each part, in order; widths count along `axis`.
        axis: The dim that is split.
        shape: Shape of what is split.
    """

    product: Op
    bias: Op | None
    view: Op | None
    splits: tuple[Op, ...]
    parts: tuple[tuple[str, int], ...]
    axis: int
    shape: tuple[int, ...]


def separate_projections(graph: Graph) -> Graph:
    """Return an imported model whose fused projections of unequal parts are products of their own.

    The matrix, and the bias, have to be parameters that nothing else reads.
    """
    found = _projections(graph)
    if not found:
        return graph
    values, constants = dict(graph.values), dict(graph.constants)
    states, parts_of = {state.input: state for state in graph.states}, dict[str, list[str]]()
    before: dict[str, list[Op]] = {}
    gone: set[str] = set()
    for fused in found:
        before[fused.product.name] = _separated(fused, values, constants, parts_of)
        gone.update(op.name for op in (fused.product, fused.bias, fused.view, *fused.splits) if op is not None)
    ops = []
    for op in graph.ops:
        ops += before.get(op.name, [] if op.name in gone else [op])
    listed: list[State] = []
    for name, state in states.items():
        listed += [State(part, part, Role.PARAMETER, part) for part in parts_of[name]] if name in parts_of else [state]
    read = {name for op in ops for name in op.inputs} | {state.input for state in listed}
    made = {name for op in ops for name in op.outputs}
    return replace(
        graph,
        values={name: value for name, value in values.items() if name in read | made or name in graph.inputs},
        states=tuple(listed),
        constants={name: array for name, array in constants.items() if name in read},
        ops=tuple(ops),
        metadata=_metadata(graph.metadata, parts_of),
    )


def _projections(graph: Graph) -> list[_Fused]:
    """Return the fused projections of unequal parts."""
    readers, makers = graph.consumers(), graph.producers()
    packed = json.loads(graph.metadata.get(PACKED, "{}"))
    trained = {value.name for value in graph.parameters if len(readers.get(value.name, ())) == 1} - packed.keys()
    found: dict[str, _Fused] = {}
    for op in graph.ops:
        if op.kind not in ("Split", "Slice") or op.inputs[0] in found or op.inputs[0] in graph.outputs:
            continue
        fused = _fused(op.inputs[0], graph, readers, makers, trained)
        if fused is not None:
            found[op.inputs[0]] = fused
    return list(found.values())


def _fused(
    name: str, graph: Graph, readers: Mapping[str, Sequence[Op]], makers: Mapping[str, Op], trained: set[str]
) -> _Fused | None:
    """Return the projection behind a value that is split; None if it is none, or has equal parts."""
    chain: dict[str, Op] = {}
    at = name
    for kind in ("Reshape", "Add", "MatMul"):
        maker = makers.get(at)
        if maker is None or maker.kind != kind:
            continue
        if at != name and (len(readers[at]) > 1 or at in graph.outputs):
            return None
        chain[kind] = maker
        at = _input_of(maker, trained)
    product, bias, view = (chain.get(kind) for kind in ("MatMul", "Add", "Reshape"))
    if product is None or product.inputs[1] not in trained or len(graph.values[product.inputs[1]].shape) != 2:
        return None
    added = _bias_of(bias, trained) if bias is not None else None
    if bias is not None and (added is None or graph.values[added].shape != (graph.values[product.inputs[1]].shape[1],)):
        return None
    whole, flat = graph.values[name].shape, graph.values[product.outputs[0]].shape
    keeps = whole[: len(flat) - 1] == flat[:-1]
    if view is not None and not keeps:
        return None
    parts = _parts(name, graph, readers[name])
    if parts is None or parts[1] < len(flat) - 1 or len({size for _, size in parts[0]}) == 1:
        return None
    return _Fused(product, bias, view, tuple(readers[name]), parts[0], parts[1], whole)


def _input_of(op: Op, trained: set[str]) -> str:
    """Return the activation that an op of the chain reads."""
    return op.inputs[1] if op.kind == "Add" and op.inputs[0] in trained else op.inputs[0]


def _bias_of(op: Op, trained: set[str]) -> str | None:
    """Return the bias that is added; None if none of the terms is a parameter."""
    return next((name for name in op.inputs if name in trained), None)


def _parts(name: str, graph: Graph, readers: Sequence[Op]) -> tuple[tuple[tuple[str, int], ...], int] | None:
    """Return the parts a value is split into, and along which dim; None if they do not make up the whole."""
    shape = graph.values[name].shape
    if len(readers) == 1 and readers[0].kind == "Split":
        axis = readers[0].attr("axis", 0)
        assert isinstance(axis, int), "the axis of Split is a whole number"
        axis %= len(shape)
        if not all(readers[0].outputs):
            return None
        return tuple((part, graph.values[part].shape[axis]) for part in readers[0].outputs), axis
    found: dict[int, tuple[int, str]] = {}
    axes = set()
    for op in readers:
        window = _window(op, shape, graph.constants) if op.kind == "Slice" else None
        if window is None or window[1] in found:
            return None
        axes.add(window[0])
        found[window[1]] = window[2], op.outputs[0]
    if len(axes) != 1 or len(found) < 2:
        return None
    (axis,) = axes
    ends = [start + size for start, (size, _) in sorted(found.items())]
    if sorted(found) != [0, *ends[:-1]] or ends[-1] != shape[axis]:
        return None
    return tuple((part, size) for _, (size, part) in sorted(found.items())), axis


def _window(
    op: Op, shape: tuple[int, ...], constants: Mapping[str, NDArray[np.generic]]
) -> tuple[int, int, int] | None:
    """Return axis, start and size of a slice of one dim without steps; None if it is another one."""
    given = [constants.get(name) for name in op.inputs[1:]]
    if any(array is None or array.size != 1 for array in given) or len(given) < 3:
        return None
    start, end, axis, *step = (int(array.item()) for array in given if array is not None)
    axis %= len(shape)
    if step not in ([], [1]):
        return None
    first, last, _ = slice(start, end).indices(shape[axis])
    return (axis, first, last - first) if last > first else None


def _separated(
    fused: _Fused,
    values: dict[str, Value],
    constants: dict[str, NDArray[np.generic]],
    parts_of: dict[str, list[str]],
) -> list[Op]:
    """Return the ops of the parts of a projection, and note the parameters that they read."""
    matrix = fused.product.inputs[1]
    flat = values[fused.product.outputs[0]]
    bias = None
    if fused.bias is not None:
        bias = next(name for name in fused.bias.inputs if name != fused.product.outputs[0])
    ops: list[Op] = []
    for number, (result, size) in enumerate(fused.parts):
        width = flat.shape[-1] // fused.shape[fused.axis] * size
        own = _part(matrix, number, (*values[matrix].shape[:-1], width), values, parts_of)
        stem = f"{fused.product.name}.{number}"
        steps: list[tuple[str, str, tuple[str, ...]]] = [("MatMul", stem, (fused.product.inputs[0], own))]
        if bias is not None and fused.bias is not None:
            own = _part(bias, number, (width,), values, parts_of)
            steps.append(("Add", f"{fused.bias.name}.{number}", (stem, own)))
        if fused.view is not None:
            target = f"{fused.view.name}.{number}.shape"
            shape = np.array(constants[fused.view.inputs[1]]).astype(np.int64)
            shape[fused.axis] = size
            constants[target], values[target] = shape, Value(target, shape.shape, "int64")
            steps.append(("Reshape", f"{fused.view.name}.{number}", (steps[-1][1], target)))
        for step, (kind, name, inputs) in enumerate(steps):
            last = step == len(steps) - 1
            output = result if last else name
            attrs = fused.view.attrs if kind == "Reshape" and fused.view is not None else ()
            if not last:
                values[name] = Value(name, (*flat.shape[:-1], width), flat.dtype)
            ops.append(Op(name, kind, inputs, (output,), attrs))
    return ops


def _part(
    name: str, number: int, shape: tuple[int, ...], values: dict[str, Value], parts_of: dict[str, list[str]]
) -> str:
    """Declare the parameter of a part."""
    end = _TRANSPOSED if name.endswith(_TRANSPOSED) else ""
    own = f"{name.removesuffix(_TRANSPOSED) if end else name}.{number}{end}"
    while own in values:
        own += "_"
    values[own] = Value(own, shape, values[name].dtype)
    parts_of.setdefault(name, []).append(own)
    return own


def _metadata(metadata: Mapping[str, str], parts_of: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the metadata of a model whose parameters were taken apart."""
    found = dict(metadata)
    if FROZEN in found:
        names = (parts_of.get(name, (name,)) for name in json.loads(found[FROZEN]))
        found[FROZEN] = json.dumps([part for parts in names for part in parts])
    found[SEPARATED] = json.dumps({part: name for name, parts in parts_of.items() for part in parts})
    return found

"""Loops over experts, as exporters write them, raised to the planner's ops for experts.

Hand-written mixtures run each expert on the rows of the tokens that chose it: `NonZero` of a mask says which these are,
a gather takes them, a scatter adds what the expert made of them times its weight. How many rows there are depends on
data. A loop is raised where it says exactly what `ExpertDispatch`, grouped products and `ExpertCombine` say
(`autopar.ir.bodies.experts`): all experts of one choice `TopK`, each once, alike but for their parameters, and what
they make multiplied by the weights of that choice and added up. Matrices of the experts become one parameter.

A loop that runs every expert on all tokens and multiplies by the weights of a one-hot mask says so, too. One that is
not raised is left as it is written: each expert a branch, on all tokens.

Sizes: T tokens, K choices of a token, E experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from autopar.errors import ModelError
from autopar.ir.functions import DOMAIN
from autopar.onnx.roles import NOTES
from autopar.onnx.tensors import has_data

_VIEWS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Ops that keep the elements of coordinates, and their order."""
_ROWWISE = frozenset(
    {
        "Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish",
        "Mul", "Neg", "Pow", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
    }
)  # fmt: skip
"""Ops that do to each element of a row the same, whatever the other rows are."""
_LARGEST = 1 << 20
"""Elements of a constant that is looked at."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """Rows of one expert: which tokens chose it, and as which of their choices.

    Attributes:
        expert: Its number.
        indices: Value [T, K] of the chosen experts.
        order: What the coordinates count, first and second: "T" and "K", or the other way round; "" of an expert that
            runs on all tokens.
    """

    expert: int
    indices: str
    order: str


@dataclass(frozen=True, slots=True)
class _Expr:
    """What an expert makes of its rows, as a tree.

    Attributes:
        kind: Kind of the op; "rows" for the rows themselves, "parameter" or "constant" for a tensor of the file.
        name: Of the tensor, or of the value whose rows these are.
        node: The op.
        inputs: What it reads.
    """

    kind: str
    name: str = ""
    node: onnx.NodeProto | None = None
    inputs: tuple["_Expr", ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of a value.

    Attributes:
        what: "coordinates", "columns" (their transpose), "column", "pair", "rows", "made", "weight", "weighted",
            "update" or "sum"; "all weights" of weights [T, E] that are 0 for experts that were not chosen.
        choice: Whose rows it is about; None for a sum of several experts'.
        index: Of a column: which coordinate. Of a pair: "TK" or "KT". Of an update: the sum it is for. Of all weights:
            the choices [T, K]. Of what an expert made of all tokens, weighted: the value before it was.
        expr: Of rows, and what is made of them.
        weights: Value [T, K] that holds the weights.
        sum_of: Of a sum: where it begins, and its terms.
    """

    what: str
    choice: _Choice | None = None
    index: str = ""
    expr: _Expr | None = None
    weights: str = ""
    sum_of: tuple[str, tuple["_Found", ...]] = ("", ())


@dataclass(slots=True)
class _Reader:
    """Follows the rows of experts through the nodes of a graph."""

    graph: onnx.GraphProto
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    tensors: dict[str, onnx.TensorProto] = field(default_factory=dict)
    notes: dict[str, dict[str, str]] = field(default_factory=dict)
    found: dict[str, _Found] = field(default_factory=dict)
    choices: list[_Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.tensors = {tensor.name: tensor for tensor in self.graph.initializer}
        for item in (*self.graph.value_info, *self.graph.initializer):  # exporters note roles on either
            if item.name in self.tensors:
                noted = {entry.key: entry.value for entry in item.metadata_props if entry.key in NOTES}
                self.notes.setdefault(item.name, {}).update(noted)

    def constant(self, name: str) -> NDArray[np.generic] | None:
        """Return the data of a small constant; None if it is none, or its data is not in the file."""
        node, tensor = self.makers.get(name), self.tensors.get(name)
        if node is not None and node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensor = attribute.t
                elif attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                    return np.asarray(helper.get_attribute_value(attribute))
        if tensor is None or not has_data(tensor, None) or np.prod(tensor.dims) > _LARGEST:
            return None
        data: NDArray[np.generic] = numpy_helper.to_array(tensor)
        return data

    def number(self, name: str) -> int | None:
        """Return the only element of a constant."""
        array = self.constant(name)
        return int(array.reshape(())) if array is not None and array.size == 1 else None

    def chosen(self, mask: str) -> _Choice | None:
        """Return which expert a mask [T, K] or [K, T] is of."""
        node = self._behind(mask, _VIEWS)
        if node is None:
            return None
        if node.op_type == "Equal":
            for name, other in (node.input, reversed(node.input)):
                number = self.number(other)
                if number is not None and self._is_choice(name):
                    return _Choice(number, name, "TK")
            return None
        if node.op_type != "Gather" or (number := self.number(node.input[1])) is None:
            return None
        axis, dims, source = int(_attr(node, "axis", 0)), "TKE", self._behind(node.input[0], {"Cast", "Identity"})
        if source is not None and source.op_type == "Transpose":
            dims = "".join(dims[place] for place in _attr(source, "perm", (2, 1, 0)))
            source = self._behind(source.input[0], {"Cast", "Identity"})
        if source is None or dims[axis] != "E":
            return None
        indices = self._one_hot(source)
        return _Choice(number, indices, dims.replace("E", "")) if indices else None

    def _one_hot(self, node: onnx.NodeProto) -> str:
        """Return the choices whose one-hot code a node makes."""
        if node.op_type == "OneHot" and int(_attr(node, "axis", -1)) == -1 and self._is_choice(node.input[0]):
            return str(node.input[0])
        if node.op_type != "Equal":
            return ""
        for name, other in (node.input, reversed(node.input)):
            numbers, spread = self.constant(other), self.makers.get(name)
            is_range = numbers is not None and np.array_equal(numbers.ravel(), np.arange(numbers.size))
            if is_range and spread is not None and spread.op_type == "Unsqueeze" and self._is_choice(spread.input[0]):
                return str(spread.input[0])
        return ""

    def _is_choice(self, name: str) -> bool:
        return self.top_k(name) is not None

    def top_k(self, name: str) -> int | None:
        """Return how many experts a token chooses, given the choices; None if they are no result of TopK."""
        node = self._behind(name, {"Cast", "Identity"})
        is_index = node is not None and node.op_type == "TopK" and _is_output(node, 1, self._origin(name))
        return self.number(node.input[1]) if is_index and node is not None else None

    def _origin(self, name: str) -> str:
        """Return the value that casts lead back to."""
        node = self.makers.get(name)
        while node is not None and node.op_type in ("Cast", "Identity"):
            name, node = node.input[0], self.makers.get(node.input[0])
        return name

    def _behind(self, name: str, kinds: Iterable[str]) -> onnx.NodeProto | None:
        """Return the node that makes a value, behind those of some kinds."""
        node = self.makers.get(name)
        while node is not None and node.op_type in kinds:
            node = self.makers.get(node.input[0])
        return node

    def base(self, name: str) -> str:
        """Return the value whose rows a gather reads: dims of size 1 come and go, and change places with the rows."""
        node = self.makers.get(name)
        if node is not None and node.op_type == "Transpose" and tuple(_attr(node, "perm", ())) == (1, 0, 2):
            inner = self.makers.get(node.input[0])
            if inner is not None and inner.op_type == "Unsqueeze":
                return str(inner.input[0])
        if node is not None and node.op_type == "Unsqueeze":
            return str(node.input[0])
        return name

    def read(self) -> None:
        """Follow all nodes in order."""
        for node in self.graph.node:
            if node.domain:
                continue
            if node.op_type == "NonZero" and (choice := self.chosen(node.input[0])) is not None:
                self.choices.append(choice)
                self.found[node.output[0]] = _Found("coordinates", choice)
                continue
            known = self._all_weights(node) or self._step(node, [self.found.get(name) for name in node.input])
            if known is not None:
                self.found[node.output[0]] = known

    def _step(self, node: onnx.NodeProto, given: Sequence[_Found | None]) -> _Found | None:
        """Return what is known of the result of a node."""
        kind, first = node.op_type, given[0] if given else None
        whats = {own.what for own in given if own is not None}
        if not whats:
            return None
        if first is not None and first.what == "all weights":
            return self._own_weights(node, first)
        if node.op_type in ("Add", "Sum", "Mul") and len(given) == 2 and None in given:
            (known,) = (own for own in given if own is not None)
            other = node.input[given.index(None)]
            if node.op_type == "Mul" and known.what == "weight" and not _order(known):
                return _Found("weighted", known.choice, other, weights=known.weights)
        if node.op_type in ("Add", "Sum") and whats <= {"weighted", "sum"}:
            return self._added(node, given)
        if first is not None and first.what in ("coordinates", "columns") and first.choice is not None:
            return self._column(node, first)
        if kind == "Concat" and whats == {"column"} and len(given) == 2 and None not in given:
            return _Found("pair", _choice_of(given), "".join(own.index for own in given if own is not None))
        if kind in ("GatherND", "Gather") and len(given) == 2 and given[1] is not None:
            return self._gathered(node, given[1])
        if first is not None and kind in _VIEWS and first.what in ("column", "weight", "rows"):
            return first
        if first is not None and first.what == "rows" and kind == "Transpose":
            return first if tuple(_attr(node, "perm", ())) == (1, 0, 2) else None
        if kind == "ScatterND":
            return self._scattered(node, given)
        return self._made(node, given)

    def _all_weights(self, node: onnx.NodeProto) -> _Found | None:
        """Return what is known of weights that are 0 where an expert was not chosen: of one expert, or of all."""
        if (
            node.op_type == "ScatterElements"
            and int(_attr(node, "axis", 0)) in (1, -1)
            and self._is_choice(node.input[1])
        ):
            is_fresh = _attr(node, "reduction", b"none") == b"none" and is_zero(self, node.input[0])
            return _Found("all weights", index=node.input[1], weights=node.input[2]) if is_fresh else None
        if node.op_type != "ReduceSum" or len(node.input) < 2:
            return None
        axis, masked = self.number(node.input[1]), self.makers.get(node.input[0])
        if masked is None or masked.op_type not in ("Mul", "Where"):
            return None
        if masked.op_type == "Where" and not is_zero(self, masked.input[2]):
            return None
        pair = masked.input[:2]
        for mask, weights in (pair, reversed(pair)) if masked.op_type == "Mul" else (pair,):
            choice = self.chosen(mask)
            if choice is not None and choice.order == "TK" and axis in (1, -1):
                return _Found("weight", _Choice(choice.expert, choice.indices, ""), weights=weights)
            node_of_mask = self._behind(mask, {"Cast", "Identity"})
            indices = self._one_hot(node_of_mask) if node_of_mask is not None else ""
            if indices and axis in (1, -2) and not _attr(node, "keepdims", 1):
                return _Found("all weights", index=indices, weights=self.base(weights))
        return None

    def _own_weights(self, node: onnx.NodeProto, whole: _Found) -> _Found | None:
        """Return the weights of one expert that are a column of those of all."""
        start = self.number(node.input[1]) if len(node.input) > 1 else None
        is_column = node.op_type == "Gather" and int(_attr(node, "axis", 0)) in (1, -1)
        if node.op_type == "Slice" and start is not None and len(node.input) > 3:
            is_column = self.number(node.input[2]) == start + 1 and self.number(node.input[3]) in (1, -1)
        if not is_column or start is None:
            return None
        return _Found("weight", _Choice(start, whole.index, ""), weights=whole.weights)

    def _added(self, node: onnx.NodeProto, given: Sequence[_Found | None]) -> _Found | None:
        """Return what is known of a sum to which what an expert made of all tokens is added."""
        start, terms = "", list[_Found]()
        for name, own in zip(node.input, given, strict=True):
            if own is None or (own.what == "weighted" and _order(own)):
                if start:
                    return None
                start = name
            elif own.what == "sum":
                if start or any(_order(term) for term in own.sum_of[1]):
                    return None
                start, terms = own.sum_of[0], [*own.sum_of[1], *terms]
            else:
                terms.append(own)
        return _Found("sum", sum_of=(start, tuple(terms))) if terms else None

    def _column(self, node: onnx.NodeProto, first: _Found) -> _Found | None:
        """Return what is known of one of the two coordinates."""
        assert first.choice is not None, "coordinates are those of an expert"
        if node.op_type == "Transpose":
            return _Found("columns" if first.what == "coordinates" else "coordinates", first.choice)
        axis = 0 if first.what == "coordinates" else 1
        start = self.number(node.input[1]) if len(node.input) > 1 else None
        if node.op_type == "Slice" and start is not None and len(node.input) > 3:
            ends, axes = self.number(node.input[2]), self.number(node.input[3])
            if ends == start + 1 and axes == axis:
                return _Found("column", first.choice, first.choice.order[start])
        if node.op_type == "Gather" and start is not None and int(_attr(node, "axis", 0)) == axis:
            return _Found("column", first.choice, first.choice.order[start])
        return None

    def _gathered(self, node: onnx.NodeProto, place: _Found) -> _Found | None:
        """Return what is known of rows, or of weights, that are taken from a value."""
        if node.op_type == "Gather" and int(_attr(node, "axis", 0)) != 0:
            return None
        source = self.found.get(node.input[0])
        if place.what == "column" and place.index == "T":
            name = node.input[0] if source is not None else self.base(node.input[0])
            return _Found("rows", place.choice, expr=_Expr("rows", name))
        if place.what == "pair" and place.index == "TK" and node.op_type == "GatherND":
            return _Found("weight", place.choice, weights=self.base(node.input[0]))
        return None

    def _made(self, node: onnx.NodeProto, given: Sequence[_Found | None]) -> _Found | None:
        """Return what is known of what an expert makes of its rows."""
        own = [item for item in given if item is not None]
        whats, choice = sorted(item.what for item in own), _choice_of(given)
        if choice is None:
            return None
        if node.op_type == "Mul" and whats in (["made", "weight"], ["rows", "weight"]):
            made, weight = sorted(own, key=lambda item: item.what == "weight")
            return _Found("weighted", choice, expr=made.expr, weights=weight.weights)
        if node.op_type in ("Cast", "Identity") and whats == ["weighted"]:
            return own[0]
        if node.op_type == "Add" and whats == ["rows", "weighted"]:
            rows, term = sorted(own, key=lambda item: item.what)
            assert rows.expr is not None, "rows are those of a value"
            return _Found("update", choice, rows.expr.name, term.expr, term.weights)
        is_product = node.op_type in ("Gemm", "MatMul") and given[0] is not None
        if not (set(whats) <= {"made", "rows"} and (is_product or node.op_type in _ROWWISE)):
            return None
        inputs = [
            item.expr if item is not None and item.expr is not None else self._tensor(name)
            for name, item in zip(node.input, given, strict=True)
        ]
        if any(item is None for item in inputs):
            return None
        tree = _Expr(node.op_type, node.output[0], node, tuple(item for item in inputs if item is not None))
        return _Found("made", choice, expr=tree)

    def _tensor(self, name: str) -> _Expr | None:
        """Return a tensor of the file as an expression; None if it is computed."""
        if self.number(name) is not None or not name:
            return _Expr("constant", name)
        return _Expr("parameter", name) if name in self.tensors else None

    def _scattered(self, node: onnx.NodeProto, given: Sequence[_Found | None]) -> _Found | None:
        """Return what is known of a sum to which the rows of an expert are added."""
        before, place, term = given
        if place is None or term is None or (place.what, place.index) != ("column", "T"):
            return None
        adds = _attr(node, "reduction", b"none") == b"add"
        if term.what != ("weighted" if adds else "update") or (not adds and term.index != node.input[0]):
            return None
        if term.choice != place.choice:
            return None
        start, terms = before.sum_of if before is not None and before.what == "sum" else (node.input[0], ())
        return _Found("sum", sum_of=(start, (*terms, term)))


def _order(found: _Found) -> str:
    """Return the order of the coordinates of rows; "" if an expert runs on all tokens."""
    return found.choice.order if found.choice is not None else ""


def _is_output(node: onnx.NodeProto, slot: int, name: str) -> bool:
    """Whether a value is the output of a node in some place."""
    return len(node.output) > slot and node.output[slot] == name


def _choice_of(given: Sequence[_Found | None]) -> _Choice | None:
    """Return the one expert whose rows some values are about; None if there are several."""
    choices = {item.choice for item in given if item is not None}
    return next(iter(choices)) if len(choices) == 1 else None


def _attr(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(own) for own in node.attribute if own.name == name), default)


class _DifferenceError(Exception):
    """What keeps a loop from being raised; caught in `raise_expert_loops`."""


@dataclass(slots=True)
class _Writer:
    """Writes the ops of one loop over experts.

    Attributes:
        reader: What is known of the graph.
        prefix: Of all names.
        fill: Share of the rows that carry a token.
        count: Experts.
        rows: Rows of all experts.
        nodes: What was written.
        tensors: Parameters of all experts.
    """

    reader: _Reader
    prefix: str
    fill: float
    count: int
    rows: str = ""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: list[onnx.TensorProto] = field(default_factory=list)
    written: dict[tuple[str, ...], str] = field(default_factory=dict)

    def op(self, kind: str, inputs: Sequence[str], **attrs: Any) -> str:
        """Write an op of domain `autopar`, or of the standard in lower case letters with an underscore before."""
        name = f"{self.prefix}.{len(self.nodes)}"
        own = {} if kind.startswith("_") else {"domain": DOMAIN}
        self.nodes.append(helper.make_node(kind.removeprefix("_"), inputs, [name], name, **own, **attrs))
        return name

    def ints(self, *numbers: int) -> str:
        """Return a constant list of integers."""
        name = f"{self.prefix}.const.{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def merged(self, each: Sequence[_Expr]) -> str:
        """Write what all experts make of their rows, given the tree of each.

        Raises:
            _DifferenceError: If they are not alike.
        """
        key = tuple(tree.name for tree in each)
        if key not in self.written:
            self.written[key] = self._merged(each)
        return self.written[key]

    def _merged(self, each: Sequence[_Expr]) -> str:
        first = each[0]
        if len({(tree.kind, len(tree.inputs)) for tree in each}) > 1:
            raise _DifferenceError(f"its experts run {' and '.join(sorted({tree.kind for tree in each}))}")
        if first.kind == "rows":
            return self.rows
        if first.kind == "constant":
            if len({self.reader.constant(tree.name).tobytes() for tree in each if tree.name}) > 1:  # type: ignore[union-attr]
                raise _DifferenceError(f"constant {first.name!r} is another one in other experts")
            return first.name
        assert first.node is not None, "an op has a node"
        if len({_attributes(tree.node) for tree in each if tree.node is not None}) > 1:
            raise _DifferenceError(f"node {first.node.name!r} has other attributes in other experts")
        parts = list(zip(*(tree.inputs for tree in each), strict=True))
        if first.kind in ("Gemm", "MatMul"):
            return self._product(first.node, parts)
        inputs = [
            self.stacked([tree.name for tree in part]) if part[0].kind == "parameter" else self.merged(part)
            for part in parts
        ]
        attrs = {own.name: helper.get_attribute_value(own) for own in first.node.attribute}
        return self.op(f"_{first.kind}", inputs, **attrs)

    def _product(self, node: onnx.NodeProto, parts: Sequence[Sequence[_Expr]]) -> str:
        plain = [float(_attr(node, name, 1.0)) for name in ("alpha", "beta")] == [1.0, 1.0]
        if not plain or _attr(node, "transA", 0) or parts[1][0].kind != "parameter":
            raise _DifferenceError(f"node {node.name!r} is no product of rows with a matrix of parameters")
        turned = bool(_attr(node, "transB", 0))
        matrix = self.stacked([tree.name for tree in parts[1]], matrices=True, turned=turned)
        y = self.op("GroupedMatMul", [self.merged(parts[0]), matrix], fill=self.fill)
        if len(parts) < 3:
            return y
        return self.op("_Add", [y, self.stacked([tree.name for tree in parts[2]])])

    def stacked(self, names: Sequence[str], *, matrices: bool = False, turned: bool = False) -> str:
        """Declare the parameter that holds one of each expert, and return its name."""
        key = ("parameter", *names)
        if key in self.written:
            return self.written[key]
        tensors = [self.reader.tensors[name] for name in names if name in self.reader.tensors]
        notes = self.reader.notes
        kinds = {(tuple(own.dims), own.data_type, tuple(sorted(notes[own.name].items()))) for own in tensors}
        if len(tensors) < len(names) or len(kinds) > 1 or len(set(names)) < len(names):
            raise _DifferenceError(f"parameter {names[0]!r} has no counterpart of its shape in each expert")
        dims = list(tensors[0].dims)
        if len(dims) != 2 if matrices else len(dims) > 1:
            raise _DifferenceError(f"parameter {names[0]!r} of shape {dims} is neither a matrix nor a bias")
        own = list(reversed(dims)) if turned else dims
        shape = [self.count, *own] if matrices else [self.count, 1, 1, *(dims or [1])]
        name = _common(names) + (".T" if turned else "")
        while name in self.reader.tensors or name in {tensor.name for tensor in self.tensors}:
            name += "_"
        tensor = onnx.TensorProto(name=name, data_type=tensors[0].data_type, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="weights.bin")
        for note, value in notes[tensors[0].name].items():
            tensor.metadata_props.add(key=note, value=value)
        self.tensors.append(tensor)
        self.written[key] = name
        return name


def _attributes(node: onnx.NodeProto) -> bytes:
    """Return the attributes of a node as bytes that can be compared."""
    return b"".join(own.SerializeToString(deterministic=True) for own in sorted(node.attribute, key=lambda a: a.name))


def _common(names: Sequence[str]) -> str:
    """Return the parts of names that all share.

    >>> _common(["moe.experts.0.up.weight", "moe.experts.1.up.weight"])
    'moe.experts.up.weight'
    """
    parts = list(zip(*(name.split(".") for name in names), strict=False))
    return ".".join(part[0] for part in parts if len(set(part)) == 1) or "experts"


def raise_expert_loops(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """Return a model whose loops over experts are ops for experts, and how many experts are branches of it still.

    Raises:
        ModelError: If rows are picked out by the choice of experts, and the loop is no such op.
    """
    if all(node.op_type != "TopK" for node in model.graph.node):
        return model, 0
    reader = _Reader(model.graph)
    reader.read()
    loops: dict[str, tuple[str, _Found]] = {}
    for name, found in reader.found.items():
        if found.what == "sum":
            choice = found.sum_of[1][0].choice
            assert choice is not None, "terms are of experts"
            known = loops.get(choice.indices)
            if known is None or len(found.sum_of[1]) > len(known[1].sum_of[1]):
                loops[choice.indices] = (name, found)
    written: dict[str, _Writer] = {}
    branches = 0
    try:
        covered = {term.choice for _, found in loops.values() for term in found.sum_of[1]}
        left = [choice for choice in reader.choices if choice not in covered]
        if left:
            raise _DifferenceError(f"what expert {left[0].expert} makes of its rows is not added up by a scatter")
        for name, found in loops.values():
            start, terms = found.sum_of
            try:
                written[name] = _loop(reader, name, start, terms)
            except _DifferenceError:
                if any(map(_order, terms)):
                    raise
                branches = max(branches, len(terms))
    except _DifferenceError as error:
        node = next(node for node in model.graph.node if node.op_type == "NonZero")
        raise ModelError(
            f"experts as separate branches: node {node.name or node.output[0]!r} picks the rows of an expert out of "
            f"the data, and the loop is not one of grouped products: {error}",
            hint="let all experts run the same products and element-wise ops, or plan a model of the zoo with experts, "
            "such as zoo:mixtral-8x7b",
        ) from None
    weighted = {own.choice for own in reader.found.values() if own.what == "weight" and not _order(own)} - covered
    branches = max(branches, len({choice.expert for choice in weighted if choice is not None}))
    return (_with(model, written) if written else model), branches


def _loop(reader: _Reader, name: str, start: str, terms: Sequence[_Found]) -> _Writer:
    """Return the ops of a loop over experts.

    Raises:
        _DifferenceError: If it is not the same for all experts.
    """
    ordered = sorted(terms, key=lambda term: -1 if term.choice is None else term.choice.expert)
    choices = [term.choice for term in ordered if term.choice is not None]
    trees = [term.expr for term in ordered if term.expr is not None]
    if not trees:
        trees = _trees(reader, [term.index for term in ordered])
    if [choice.expert for choice in choices] != list(range(len(choices))) or len(choices) < 2:
        raise _DifferenceError(f"it runs experts {', '.join(str(choice.expert) for choice in choices)}")
    sources = {leaf for tree in trees for leaf in _leaves(tree)}
    if len(sources) > 1 or len({term.weights for term in ordered}) > 1 or len({own.indices for own in choices}) > 1:
        raise _DifferenceError("its experts read different rows, choices or weights")
    chosen = reader.top_k(choices[0].indices)
    assert chosen is not None, "the choice is that of a TopK"
    count = len(choices)
    writer = _Writer(reader, f"{name}.experts", min(1.0, chosen / count), count)
    first = writer.ints(0)
    x, expert, weight = (
        writer.op("_Unsqueeze", [value, first])
        for value in (next(iter(sources)), choices[0].indices, ordered[0].weights)
    )
    numbers = writer.ints(*range(count))
    writer.rows = writer.op("ExpertDispatch", [x, expert, numbers], fill=writer.fill)
    made = writer.merged(trees)
    y = writer.op("ExpertCombine", [made, weight, expert, numbers], fill=writer.fill)
    y = writer.op("_Squeeze", [y, first])
    if start and not is_zero(reader, start):
        y = writer.op("_Add", [start, y])
    writer.nodes[-1].output[0] = name
    return writer


def _trees(reader: _Reader, names: Sequence[str]) -> list[_Expr]:
    """Return what each expert makes of the tokens that all read, given the values it makes.

    Raises:
        _DifferenceError: If an op is none of those that do the same to each token.
    """
    before = [_ancestors(reader, name) for name in names]
    shared = set.intersection(*before)

    def tree(name: str) -> _Expr:
        if reader.number(name) is not None or not name:
            return _Expr("constant", name)
        if name in reader.tensors:
            return _Expr("parameter", name)
        node = reader.makers.get(name)
        if name in shared or node is None:
            return _Expr("rows", name)
        if node.domain or node.op_type not in _ROWWISE | {"Gemm", "MatMul"}:
            raise _DifferenceError(f"node {node.name!r} ({node.op_type}) is no product and not element-wise")
        return _Expr(node.op_type, name, node, tuple(map(tree, node.input)))

    return [tree(name) for name in names]


def _ancestors(reader: _Reader, name: str) -> set[str]:
    """Return all values that a value is made from by products and element-wise ops."""
    found, pending = set[str](), [name]
    while pending:
        node = reader.makers.get(pending.pop())
        passes = node is not None and not node.domain and node.op_type in _ROWWISE | {"Gemm", "MatMul"}
        for source in node.input if node is not None and passes else ():
            if source and source not in found:
                found.add(source)
                pending.append(source)
    return found


def _leaves(tree: _Expr) -> set[str]:
    """Return the values whose rows a tree reads."""
    return {tree.name} if tree.kind == "rows" else {leaf for own in tree.inputs for leaf in _leaves(own)}


def is_zero(reader: _Reader, name: str) -> bool:
    """Whether a value is nothing but zeros."""
    node, array = reader.makers.get(name), reader.constant(name)
    if array is not None:
        return not array.any()
    if node is None:
        return False
    if node.op_type == "ConstantOfShape":
        fill = _attr(node, "value", None)
        return fill is None or not numpy_helper.to_array(fill).any()
    passes = node.op_type in (*_VIEWS, "Expand", "Transpose")
    return passes and is_zero(reader, node.input[0])


def _with(model: onnx.ModelProto, written: dict[str, _Writer]) -> onnx.ModelProto:
    """Return a model with loops replaced, and without the nodes that only they read."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        own = next((written[name] for name in node.output if name in written), None)
        nodes += [node] if own is None else own.nodes
    needed = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(_reads(node))
    del found.graph.node[:]
    found.graph.node.extend(reversed(kept))
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in needed]
    del found.graph.initializer[:]
    found.graph.initializer.extend([*tensors, *(tensor for own in written.values() for tensor in own.tensors)])
    if all(item.domain != DOMAIN for item in found.opset_import):
        found.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return found


def _reads(node: onnx.NodeProto) -> set[str]:
    """Return what a node reads, in the bodies of its control flow, too."""
    found = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                found |= _reads(inner)
            found.update(value.name for value in attribute.g.output)
    return found

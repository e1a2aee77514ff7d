"""Products of linear layers: what training in 8 or 4 bits quantizes.

A linear layer multiplies activations with a trained matrix. Its three products, forward (x, w), input gradient (dy, w)
and weight gradient (x, dy), run in the low precision of a job; all other products (attention, scans, the router of a
mixture of experts, the projection to the vocabulary) stay in 16 bits, as Transformer Engine, torchao and DeepSeek-V3
have it. Which products those are depends on the graph alone, and is written on the ops (`Op.linear`).

Quantizing is a pass over the operand: the first product that reads a value in a phase pays for it, unless the kernel
that makes the value may write it quantized (norms and activations).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Cast, Graph, Linear, LinearProduct, Op, Phase, Role

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "autopar::ExpertRows"})
"""Kinds that pass on the numbers of their first input."""
_PLAIN = frozenset({"MatMul", "Gemm"})
_GROUPED = frozenset({"autopar::GroupedMatMul"})
_GRADIENTS = frozenset({"MatMul", "Gemm", "Einsum", "autopar::GroupedMatMulGrad", "autopar::GroupedMatMulWeightGrad"})
_ROUTES = frozenset({"TopK"})
"""Kinds that choose experts."""
_TOWARDS_ROUTES = frozenset({"Add", "Cast", "Div", "Mul", "Sigmoid", "Softmax", *_VIEWS})
"""Kinds between a router's product and the choice."""
_AFTER_HEAD = frozenset(
    {"Add", "Cast", "Div", "LogSoftmax", "Mul", "Sigmoid", "Slice", "Softmax", "Sub", "Tanh", *_VIEWS}
)
"""Kinds between the projection to the results and these: biases, scaling, soft caps, probabilities."""
_ALIGNMENT = 16
"""Both dims of a quantized matrix are multiples of it: kernels take nothing else (cuBLASLt; Transformer Engine)."""
_WRITERS = frozenset(
    {
        "BiasGelu", "Gelu", "HardSwish", "LayerNormalization", "Mul", "RMSNormalization", "Relu", "Swish",
        "autopar::GeluGrad", "autopar::GeluTanhGrad", "autopar::ReluGrad", "autopar::SwishGrad",
    }
)  # fmt: skip
"""Kinds of kernels that may write their result quantized: norms, activations and gates, and gradients of those."""


_GATES = frozenset({"BiasGelu", "Gelu", "HardSwish", "Mul", "Relu", "Swish"})
"""Activation functions, and the product with a gate."""


def mark_linear(graph: Graph) -> Graph:
    """Return a graph, or a training step, with `Op.linear` set on the products of linear layers."""
    source = _sources(graph.ops)
    weights = {state.input for state in graph.states if state.role is Role.PARAMETER}
    forward = _forward(graph, source, weights)
    if not forward:
        return graph
    data = {name: source(graph_op.inputs[0]) for name, graph_op in forward.items()}
    weight = {name: source(graph_op.inputs[1]) for name, graph_op in forward.items()}
    products: dict[str, tuple[LinearProduct, int]] = dict.fromkeys(forward, (LinearProduct.FORWARD, 0))
    for op in graph.ops:
        if op.phase is Phase.BACKWARD and op.origin in forward and op.kind in _GRADIENTS and len(op.inputs) == 2:
            first, second = map(source, op.inputs)
            if second == weight[op.origin]:
                products[op.name] = LinearProduct.INPUT_GRADIENT, 0
            elif first == data[op.origin]:
                products[op.name] = LinearProduct.WEIGHT_GRADIENT, 1
    kept = {
        source(name)
        for op in graph.ops
        if op.name in products and products[op.name][0] is LinearProduct.WEIGHT_GRADIENT
        for name in op.inputs
    }
    makers = graph.producers()
    met: set[tuple[int, bool, str]] = set()
    ops = []
    for op in graph.ops:
        found = products.get(op.name)
        if found is None:
            ops.append(op)
            continue
        product, index = found
        value = source(op.inputs[index])
        place = op.block, op.phase is Phase.BACKWARD, value
        maker = makers.get(value)
        cast = Cast.BEFORE if place in met else Cast.BY_MAKER if maker and maker.kind in _WRITERS else Cast.OWN
        met.add(place)
        ops.append(replace(op, linear=Linear(product, cast, value in kept)))
    return replace(graph, ops=tuple(ops))


def linear_weights(graph: Graph) -> frozenset[str]:
    """Return the parameters that linear layers multiply with, and nothing else reads but the optimizer."""
    source = _sources(graph.ops)
    found = {
        source(op.inputs[1]) for op in graph.ops if op.linear is not None and op.linear.product is LinearProduct.FORWARD
    }
    parameters = {state.input for state in graph.states if state.role is Role.PARAMETER}
    return frozenset((found & parameters) - set(_read_otherwise(graph.ops, source)))


def quantized_values(graph: Graph) -> Mapping[str, Op]:
    """Return the values that are quantized whenever they are stored, and the op that makes each.

    Nothing but linear layers reads them; results of attention are not among them, since its gradient reads these.
    """
    source = _sources(graph.ops)
    makers = graph.producers()
    read = {
        source(name) for op in graph.ops if op.linear is not None for name in op.inputs[:2] if source(name) in makers
    }
    found = read - set(_read_otherwise(graph.ops, source)) - set(map(source, graph.outputs))
    return {
        name: makers[source(name)]
        for op in graph.ops
        for name in op.outputs
        if name and source(name) in found and "Attention" not in makers[source(name)].kind
    }


def gate_inputs(graph: Graph) -> frozenset[str]:
    """Return the results of linear layers that activation functions and gates read, and no other forward op."""
    source = _sources(graph.ops)
    made = {
        op.outputs[0]
        for op in graph.ops
        if op.phase is Phase.FORWARD and op.linear is not None and op.linear.product is LinearProduct.FORWARD
    }
    read: dict[str, set[str]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.kind not in _VIEWS:
            for name in filter(None, op.inputs):
                read.setdefault(source(name), set()).add(op.kind)
    gates = {name for name in made if read.get(name) and read[name] <= _GATES}
    return frozenset(name for op in graph.ops for name in op.outputs if name and source(name) in gates)


class _Sources:
    """Tells the value that a value is a view of."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._known: dict[str, str] = {}
        for op in ops:
            if op.kind in _VIEWS:
                self._known[op.outputs[0]] = self(op.inputs[0])

    def __call__(self, name: str) -> str:
        return self._known.get(name, name)


def _sources(ops: Iterable[Op]) -> _Sources:
    return _Sources(ops)


def _read_otherwise(ops: Sequence[Op], source: _Sources) -> Iterator[str]:
    """Yield the values that ops other than the products of linear layers and updates read."""
    for op in ops:
        if op.kind in _VIEWS or op.phase is Phase.UPDATE:
            continue
        yield from (source(name) for name in (op.inputs if op.linear is None else op.inputs[2:]) if name)


def _forward(graph: Graph, source: _Sources, weights: set[str]) -> dict[str, Op]:
    """Return the forward products of linear layers by name: no router, and no projection to the results."""
    users = graph.consumers()
    given = weights | set(graph.constants)
    return {
        op.name: op
        for op in graph.ops
        if op.phase is Phase.FORWARD
        and _is_linear(graph, op, source, weights)
        and not _is_router(op, users)
        and not _is_head(op, users, given, source)
    }


def _is_head(op: Op, users: Mapping[str, Sequence[Op]], given: set[str], source: _Sources) -> bool:
    """Whether what a product computes is a result, or goes into the loss: after biases and scaling at most."""
    waiting = list(op.outputs)
    while waiting:
        name = waiting.pop()
        for user in users.get(name, ()):
            if user.phase is not Phase.FORWARD:
                continue
            others = [source(each) for each in user.inputs if each and each != name]
            if user.kind not in _AFTER_HEAD or not given.issuperset(others):
                return False
            waiting.extend(user.outputs)
    return True


def _is_linear(graph: Graph, op: Op, source: _Sources, weights: set[str]) -> bool:
    if op.kind not in _PLAIN | _GROUPED or source(op.inputs[0]) in weights or source(op.inputs[1]) not in weights:
        return False
    sizes = graph.values[op.inputs[1]].shape
    matrix = sizes[-2:]
    if op.kind in _PLAIN and len(sizes) != 2:
        return False
    return len(matrix) == 2 and all(size % _ALIGNMENT == 0 for size in matrix)


def _is_router(op: Op, users: Mapping[str, Sequence[Op]]) -> bool:
    waiting = list(op.outputs)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        for user in users.get(name, ()):
            if user.kind in _ROUTES:
                return True
            if user.kind in _TOWARDS_ROUTES and user.name not in seen and user.phase is Phase.FORWARD:
                seen.add(user.name)
                waiting.extend(user.outputs)
    return False

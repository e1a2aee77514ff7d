"""Which parameters are the weights of products in layers: what adapters stand beside, and what Muon trains."""

from collections.abc import Iterable, Mapping

from autopar.ir.graph import Graph, Op, Role

GROUPED = "autopar::GroupedMatMul"
"""Kind of the products of rows per expert with a matrix per expert."""
_PRODUCTS = frozenset(
    {"MatMul", "Gemm", GROUPED, *(f"autopar::MatMulNBits{zeros}" for zeros in ("", "Packed", "Shifted"))}
)


def product_weights(graph: Graph) -> Mapping[str, str]:
    """Return the weight of every product of data with a parameter, by name of the op."""
    parameters = {state.input for state in graph.states if state.role is Role.PARAMETER}
    return {
        op.name: op.inputs[1]
        for op in graph.ops
        if _is_plain(op)
        and op.inputs[1] in parameters
        and op.inputs[0] not in parameters
        and len(graph.values[op.inputs[1]].shape) > 1
    }


def in_layers(weights: Iterable[str]) -> frozenset[str]:
    """Return the weights with a number in their name, which those of layers have; all of them if none has.

    >>> sorted(in_layers(["layers.0.up.weight", "head.weight"]))
    ['layers.0.up.weight']
    """
    found = frozenset(weights)
    return frozenset(name for name in found if any(part.isdigit() for part in name.split("."))) or found


def _is_plain(op: Op) -> bool:
    """Whether an op is a product whose rows are those of its first input, times 1."""
    return op.kind in _PRODUCTS and not op.attr("transA", 0) and op.attr("alpha", 1.0) == 1.0

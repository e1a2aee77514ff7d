"""Mixtures of experts as exporters write them, whose costs in training say nothing."""

from autopar.errors import ModelError
from autopar.ir.graph import Graph, Role

_GATHERS = ("Gather", "GatherND", "GatherElements")
_MATRICES = 3
"""Dims from which on a parameter holds several matrices."""


def check_experts(graph: Graph) -> None:
    """Refuse graphs that copy a matrix of weights for every token.

    PyTorch's exporter traces a mixture of experts so. No framework trains so: the copies take more memory than all
    experts, and experts cannot be dealt out over devices.

    Raises:
        ModelError: If an op gathers matrices of a parameter by indices that depend on data, and more than there are.
    """
    matrices = {
        state.input
        for state in graph.states
        if state.role is Role.PARAMETER and len(graph.values[state.input].shape) >= _MATRICES
    }
    fixed = {state.input for state in graph.states} | graph.constants.keys()
    for op in graph.ops:
        if op.kind not in _GATHERS or op.inputs[0] not in matrices or op.inputs[1] in fixed:
            continue
        weights, copies = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
        if copies.size > weights.size:
            raise ModelError(
                f"op {op.name!r} ({op.kind}) copies {copies.shape} of the weights {weights.name!r} {weights.shape}, a "
                "matrix of an expert for every token: so exporters write a mixture of experts, and nothing trains so",
                hint="plan a model of the zoo, such as zoo:mixtral-8x7b --set experts=8, or write experts as a batched "
                "MatMul over [experts, rows, width]",
            )

"""Results of fused element-wise kernels that the backward computes again instead of keeping.

A stack that fuses chains of element-wise ops has a kernel such as SwiGLU, y = swish(x) * up. Its backward kernel reads
dy, x and up, and computes swish(x) again: only x and up are kept (`bias_swiglu` of Megatron-LM, Liger Kernel,
torch.compile). The training step as differentiated op by op reads swish(x) in the backward, too, and so keeps it.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from autopar.cost.fusion import POINTWISE
from autopar.ir.graph import Graph, Op, Phase, Value

_RANDOM = frozenset({"Dropout"})
"""Element-wise kinds that give another result when they run again."""


def compute_again(graph: Graph) -> Graph:
    """Return a training step whose backward computes again what fused forward kernels need not write.

    That is the result of an element-wise op that only element-wise ops of its block read in the forward, and whose
    inputs the backward of the block reads anyway, or are constants. The backward then runs the op once more, in the
    kernel that reads its result.
    """
    again = _again(graph)
    if not again:
        return graph
    values, ops, renamed = dict(graph.values), list[Op](), dict[tuple[str, int], str]()
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            for name in dict.fromkeys(op.inputs):
                maker = again.get(name)
                if maker is not None and maker.block == op.block and (name, op.block) not in renamed:
                    own = _fresh(f"{name}.again", values)
                    inputs = tuple(renamed.get((read, op.block), read) for read in maker.inputs)
                    values[own] = Value(own, values[name].shape, values[name].dtype)
                    renamed[name, op.block] = own
                    ops.append(
                        replace(maker, name=own, inputs=inputs, outputs=(own,), phase=Phase.BACKWARD, origin=maker.name)
                    )
            op = replace(op, inputs=tuple(renamed.get((name, op.block), name) for name in op.inputs))
        ops.append(op)
    return replace(graph, values=values, ops=tuple(ops))


def _again(graph: Graph) -> dict[str, Op]:
    """Return the values that are computed again, each with the op that makes it."""
    readers = graph.consumers()
    backward = {(name, op.block) for op in graph.ops if op.phase is Phase.BACKWARD for name in op.inputs if name}
    found: dict[str, Op] = {}
    for op in graph.ops:
        if _is_inner(op, graph, readers) and (op.outputs[0], op.block) in backward:
            kept = (name for name in op.inputs if name and name not in graph.constants)
            if all((name, op.block) in backward and name not in found for name in kept):
                found[op.outputs[0]] = op
    return found


def _is_inner(op: Op, graph: Graph, readers: Mapping[str, Sequence[Op]]) -> bool:
    """Whether an op is inside a fused forward kernel, and its result is read in its own block alone."""
    if op.phase is not Phase.FORWARD or op.kind not in POINTWISE - _RANDOM or len(op.outputs) != 1:
        return False
    name = op.outputs[0]
    users = readers.get(name, ())
    forward = [user for user in users if user.phase in (Phase.FORWARD, Phase.LOSS)]
    fused = all(user.kind in POINTWISE and user.phase is Phase.FORWARD for user in forward)
    own = all(user.block == op.block for user in users)
    return bool(forward) and fused and own and name not in graph.outputs and graph.values[name].is_float


def _fresh(name: str, taken: Mapping[str, Value] | Set[str]) -> str:
    """Return `name`, lengthened until it is free."""
    while name in taken:
        name += "_"
    return name

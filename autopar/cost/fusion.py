"""Which ops of a block run inside the kernel of another: chains of element-wise ops, biases, sums of gradients.

A stack whose `fusion` is "chains" runs element-wise ops that feed each other as one kernel: it reads what comes from
outside the chain and writes what others read. An op joins a chain if the chain can wait for it, that is if nothing else
has read from the chain before. In a backward pass that reads a value from inside a forward chain, the chain's input is
read instead and the value computed again, as fused kernels do.

Whatever the stack, a bias is added by the matrix product it follows. With "chains" the product of a weight's gradient
also adds to the buffer the gradients are summed in. Optimizers go over all parameters in one kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.products import PRODUCT_KINDS
from autopar.cost.stack import Fusion
from autopar.cost.traffic import is_view
from autopar.ir.graph import Op, Phase

POINTWISE = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Celu", "Clip",
        "Cos", "Cosh", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Gelu", "Greater", "HardSigmoid", "HardSwish",
        "LeakyRelu", "Less", "Log", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
        "Reciprocal", "Relu", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum",
        "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where",
        *(
            f"autopar::{kind}Grad"
            for kind in (
                "Celu", "Elu", "Erf", "Gelu", "GeluTanh", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu",
                "PReluSlope", "Relu", "Selu", "Sigmoid", "Softsign", "Swish", "Tanh", "ThresholdedRelu",
            )
        ),
    }
)  # fmt: skip
"""Kinds that compute each element of their result from the elements at the same place."""


OPTIMIZER = "optimizer"
"""Name of the kernel that updates all parameters."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What of an op is left to its own kernel.

    Attributes:
        unread: Inputs, by index, that do not come from memory.
        unwritten: Outputs, by index, that do not go to memory.
        kernel: Name of the op in whose kernel it runs; empty if it starts one of its own.
    """

    unread: frozenset[int] = frozenset()
    unwritten: frozenset[int] = frozenset()
    kernel: str = ""

    @property
    def launches(self) -> bool:
        """Whether the op starts a kernel."""
        return not self.kernel


ALONE = Fused()
"""An op that is a kernel of its own."""


@dataclass(slots=True)
class _Chain:
    """Element-wise ops, by position, that are one kernel; closed once others have read from it."""

    members: list[int] = field(default_factory=list)
    closed: bool = False


def fuse(ops: Sequence[Op], ranks: Mapping[str, int], fusion: Fusion) -> dict[str, Fused]:
    """Return by name those of the ops of a block that are not a kernel of their own.

    Args:
        ops: Ops of one block in order, of one phase or of all.
        ranks: Number of dims by value name.
        fusion: What the stack fuses.
    """
    found: dict[str, Fused] = {}
    forward = [op for op in ops if op.phase in (Phase.FORWARD, Phase.LOSS)]
    backward = [op for op in ops if op.phase is Phase.BACKWARD]
    for phase in (forward, backward):
        found |= _fuse_phase(phase, ranks, fusion)
    updates = [op.name for op in ops if op.phase is Phase.UPDATE]
    found |= {name: Fused(kernel=OPTIMIZER) for name in updates}
    return found


def _fuse_phase(ops: Sequence[Op], ranks: Mapping[str, int], fusion: Fusion) -> dict[str, Fused]:
    found: dict[str, Fused] = {}
    origin: dict[str, str] = {}  # value -> the value it is a view of
    kernels: list[Op] = []
    readers: dict[str, list[int]] = {}

    def source(name: str) -> str:
        return origin.get(name, name)

    uses: dict[str, int] = {}
    products = {op.outputs[0]: op.name for op in ops if op.kind in PRODUCT_KINDS}
    for op in ops:
        for name in op.inputs:
            uses[name] = uses.get(name, 0) + 1
    for op in ops:
        if op.inputs and is_view(op, ranks.get(op.inputs[0], 0)):
            origin.update((name, source(op.inputs[0])) for name in op.outputs if name)
            continue
        into = _epilogue_of(op, products, uses, ranks, fusion)
        if into is not None:
            everything = frozenset(range(len(op.inputs)))
            found[op.name] = Fused(everything, frozenset(range(len(op.outputs))), products[into])
            origin[op.outputs[0]] = source(into)
            continue
        for name in dict.fromkeys(op.inputs):
            readers.setdefault(source(name), []).append(len(kernels))
        kernels.append(op)
    if fusion == "chains":
        found |= _chains(kernels, readers, source)
    return found


def _epilogue_of(
    op: Op, products: Mapping[str, str], uses: Mapping[str, int], ranks: Mapping[str, int], fusion: Fusion
) -> str | None:
    """Return the product that an addition is made by; None if it is a kernel of its own."""
    if op.kind != "Add":
        return None
    for index, name in enumerate(op.inputs):
        other = op.inputs[1 - index]
        if name not in products or uses[name] > 1:
            continue
        if ranks.get(other) == 1 and op.phase is not Phase.BACKWARD:
            return name
        # `training.training_step` sums the gradients of parameter p in `p.grad`.
        if fusion == "chains" and op.phase is Phase.BACKWARD and other == f"{op.origin}.grad":
            return name
    return None


def _chains(ops: Sequence[Op], readers: Mapping[str, Sequence[int]], source: Callable[[str], str]) -> dict[str, Fused]:
    chain_of: dict[str, _Chain] = {}  # by value
    for position, op in enumerate(ops):
        names = [source(name) for name in op.inputs if name]
        met = {id(chain_of[name]): chain_of[name] for name in names if name in chain_of}
        if op.kind not in POINTWISE:
            for chain in met.values():
                chain.closed = True
            continue
        # The longest takes in the others, so that a graph that is one chain takes no longer than one of many.
        joined, *others = sorted(
            (chain for chain in met.values() if not chain.closed), key=lambda chain: -len(chain.members)
        ) or [_Chain()]
        for chain in others:
            joined.members += chain.members
            for member in chain.members:
                chain_of.update((name, joined) for name in ops[member].outputs if name)
        joined.members.append(position)
        chain_of.update((name, joined) for name in op.outputs if name)
    found: dict[str, Fused] = {}
    for chain in {id(chain): chain for chain in chain_of.values()}.values():
        members = set(chain.members)
        seen: set[str] = set()
        first = min(members)
        for position in sorted(members):
            op = ops[position]
            unread = set()
            for index, name in enumerate(op.inputs):
                known = source(name)
                if chain_of.get(known) is chain or known in seen:
                    unread.add(index)
                seen.add(known)
            unwritten = {
                index
                for index, name in enumerate(op.outputs)
                if readers.get(name) and members.issuperset(readers[name])
            }
            if unread or unwritten or position > first:
                kernel = ops[first].name if position > first else ""
                found[op.name] = Fused(frozenset(unread), frozenset(unwritten), kernel)
    return found

"""Which ops of a block run inside the kernel of another: chains of element-wise ops, biases, sums of gradients.

A stack whose `fusion` is "chains" runs element-wise ops that feed each other as one kernel: it reads what comes from
outside the chain and writes what others read. An op joins a chain if the chain can wait for it, that is if nothing else
has read from the chain before. In a backward pass that reads a value from inside a forward chain, the chain's input is
read instead and the value computed again, as fused kernels do.

Whatever the stack, a bias is added by the matrix product it follows. With "chains" the product of a weight's gradient
also adds to the buffer the gradients are summed in. Optimizers go over all parameters in one kernel.

Megatron-Core's experts with a product each (`Stack.experts`) clip gate and up, and add the bias of their results,
kernel by kernel: what that moves besides is in `CLIPPED` and `BIASED`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.products import PRODUCT_KINDS
from autopar.cost.stack import Experts, Fusion
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

ROWWISE = frozenset(
    {
        "LayerNormalization", "LogSoftmax", "RMSNormalization", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
        "Softmax", "autopar::LayerNormalizationGrad", "autopar::RMSNormalizationGrad",
    }
)  # fmt: skip
"""Kinds that reduce rows or columns: compilers run element-wise ops before and after one of them in its kernel."""

OPTIMIZER = "optimizer"
"""Name of the kernel that updates all parameters."""

_MAKES_ROWS = frozenset(
    {"autopar::ExpertCombineGrad", "autopar::ExpertDispatch", "autopar::GroupedMatMul", "autopar::GroupedMatMulGrad"}
)
"""Kinds whose first output is rows of experts."""
_RETURNS = frozenset({"autopar::ExpertCombine", "autopar::ExpertSum"})
"""Kinds that read what experts return."""
CLIPPED: Mapping[str, float] = {"Clip": 4.0, "Where": 5.0}
"""Times that rows of experts are moved besides where they are clipped, forward and backward. Megatron-Core clips gate
and up each in a kernel and copies both into one tensor before its fused activation (`weighted_bias_quick_geglu_impl` of
megatron/core/fusions/fused_bias_geglu.py): 2 and 2. The gradient of a clip reads two tensors and writes one, and is
copied: 3 and 2."""
BIASED: Mapping[str, float] = {"Add": 12.0, "ReduceSum": 19.0}
"""Times that rows in 16 bits are moved besides where the bias of their results is added, forward and backward.
Megatron-Core multiplies it by a token's probability in float32, adds it, and joins and rounds the rows of all experts
(`TEGroupedMLP._apply_bias` of megatron/core/transformer/moe/experts.py): 2, 5, 4 and 3, of which an addition counts 2.
Backward, rounded and added: 3 and 3; products with bias and probabilities written and summed in float32, twice 6; rows
joined: 2; of which the sum counts 1."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What of an op is left to its own kernel.

    Attributes:
        unread: Inputs, by index, that do not come from memory.
        unwritten: Outputs, by index, that do not go to memory.
        kernel: Name of the op in whose kernel it runs; empty if it starts one of its own.
        experts: Whether it works on rows of experts.
        moved: Times that its largest operand is moved besides, by kernels of a framework that the graph does not have.
    """

    unread: frozenset[int] = frozenset()
    unwritten: frozenset[int] = frozenset()
    kernel: str = ""
    experts: bool = False
    moved: float = 0.0

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


@dataclass(frozen=True, slots=True)
class Kernel:
    """Ops that a plan runs in one kernel.

    Attributes:
        ops: Their names in order.
        again: Names of ops that run in it, too, besides the kernels that they have elsewhere.
    """

    ops: tuple[str, ...]
    again: tuple[str, ...] = ()


def fuse(
    ops: Sequence[Op],
    ranks: Mapping[str, int],
    fusion: Fusion,
    stated: Sequence[Kernel] | None = None,
    experts: Experts = "grouped",
) -> dict[str, Fused]:
    """Return by name those of the ops of a block that are not a kernel of their own.

    Args:
        ops: Ops of one block in order, of one phase or of all.
        ranks: Number of dims by value name.
        fusion: What the stack fuses.
        stated: Kernels that take the place of chains; None if there are none stated.
        experts: Kernels of the products of a device's experts.
    """
    found: dict[str, Fused] = {}
    forward = [op for op in ops if op.phase in (Phase.FORWARD, Phase.LOSS)]
    backward = [op for op in ops if op.phase is Phase.BACKWARD]
    for phase in (forward, backward):
        found |= _fuse_phase(phase, ranks, fusion, stated)
        for name, moved in _on_rows(phase, ranks, experts).items():
            found[name] = replace(found.get(name, ALONE), experts=True, moved=moved)
    updates = [op.name for op in ops if op.phase is Phase.UPDATE]
    found |= {name: Fused(kernel=OPTIMIZER) for name in updates}
    return found


def _on_rows(ops: Sequence[Op], ranks: Mapping[str, int], experts: Experts) -> dict[str, float]:
    """Return the element-wise ops and sums of a phase that read rows of experts, and what they move besides."""
    makers: dict[str, str] = {}  # rows of experts -> kind of what made them
    origin: dict[str, str] = {}  # value -> the value it is a view of
    returned: set[str] = set()
    readers: list[tuple[Op, str]] = []
    for op in ops:
        rows = next((origin.get(name, name) for name in op.inputs if origin.get(name, name) in makers), None)
        if op.kind in _MAKES_ROWS:
            makers[op.outputs[0]] = op.kind
        elif rows is not None and is_view(op, ranks.get(op.inputs[0], 0)):
            origin[op.outputs[0]] = rows
        elif rows is not None and op.kind in _RETURNS:
            returned.add(rows)
        elif rows is not None and (op.kind in POINTWISE or op.kind == "ReduceSum"):
            readers.append((op, rows))
            if op.kind in POINTWISE:
                makers[op.outputs[0]] = op.kind
    found = {op.name: 0.0 for op, _ in readers}
    for op, rows in readers if experts == "each" else ():
        adds = op.kind == "Add" and op.phase is Phase.FORWARD and op.outputs[0] in returned
        if op.kind in CLIPPED:
            found[op.name] = CLIPPED[op.kind]
        elif adds or (op.kind == "ReduceSum" and makers[rows] == "autopar::ExpertCombineGrad"):
            found[op.name] = BIASED[op.kind]
    return found


def _fuse_phase(
    ops: Sequence[Op], ranks: Mapping[str, int], fusion: Fusion, stated: Sequence[Kernel] | None
) -> dict[str, Fused]:
    work = Work.of(ops, ranks, fusion)
    found = dict(work.fixed)
    if stated is not None:
        for kernel in stated:
            found |= work.fused(kernel)
    elif fusion == "chains":
        found |= _chains(work.kernels, work.readers, work.source)
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """The ops of a phase of a block that may start kernels.

    Attributes:
        fixed: What other kernels do in any case: biases, sums of gradients.
        kernels: The other ops in order, views left out.
        readers: Which of these, by position, read a value or a view of it.
        origin: Value by the name of a view of it.
        numbers: Positions by name.
    """

    fixed: Mapping[str, Fused]
    kernels: Sequence[Op]
    readers: Mapping[str, Sequence[int]]
    origin: Mapping[str, str]
    numbers: Mapping[str, int]

    def source(self, name: str) -> str:
        """Return the value that a name shows."""
        return self.origin.get(name, name)

    @classmethod
    def of(cls, ops: Sequence[Op], ranks: Mapping[str, int], fusion: Fusion) -> "Work":
        """Return the work of the ops of one phase in order; arguments as of `fuse`."""
        found, kernels, readers, origin = _kernels(ops, ranks, fusion)
        return cls(found, kernels, readers, origin, {op.name: number for number, op in enumerate(kernels)})

    def fused(self, kernel: Kernel) -> dict[str, Fused]:
        """Return what is left to each op of a kernel; ops that are not here, as of other phases, are skipped."""
        members = {self.numbers[name] for name in kernel.ops if name in self.numbers}
        again = {self.numbers[name] for name in kernel.again if name in self.numbers}
        if len(members) < 2 and not again:
            return {}
        made = {name for number in again for name in self.kernels[number].outputs if name}
        return _one_kernel(self.kernels, members, self.readers, self.source, made)

    def repeated(self, kernel: Kernel) -> dict[str, Fused]:
        """Return what is left to each op that runs again in a kernel: its inputs, unless the kernel has them anyway."""
        numbers = [self.numbers[name] for name in (*kernel.again, *kernel.ops) if name in self.numbers]
        first = self.kernels[min(numbers)].name if numbers else ""
        known = {name for number in numbers for name in self.kernels[number].outputs if name}
        known |= {self.source(name) for op in kernel.ops if op in self.numbers for name in self._op(op).inputs}
        found = {}
        for name in kernel.again:
            if name in self.numbers:
                op = self._op(name)
                unread = {index for index, read in enumerate(op.inputs) if self.source(read) in known}
                known |= {self.source(read) for read in op.inputs}
                found[name] = Fused(frozenset(unread), frozenset(range(len(op.outputs))), first)
        return found

    def _op(self, name: str) -> Op:
        return self.kernels[self.numbers[name]]


def _kernels(
    ops: Sequence[Op], ranks: Mapping[str, int], fusion: Fusion
) -> tuple[dict[str, Fused], list[Op], dict[str, list[int]], dict[str, str]]:
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
    return found, kernels, readers, origin


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
        found |= _one_kernel(ops, set(chain.members), readers, source)
    return found


def _one_kernel(
    ops: Sequence[Op],
    members: Collection[int],
    readers: Mapping[str, Sequence[int]],
    source: Callable[[str], str],
    known: Collection[str] = (),
) -> dict[str, Fused]:
    """Return what is left to each op of a kernel.

    Args:
        ops: All ops in order.
        members: Those of the kernel, by position.
        readers: Which ops, by position, read a value.
        source: The value that a name shows.
        known: Values that the kernel makes again.
    """
    found: dict[str, Fused] = {}
    made = {name for position in members for name in ops[position].outputs if name}
    seen: set[str] = set(known)
    inside, first = set(members), min(members)
    for position in sorted(members):
        op = ops[position]
        unread = set()
        for index, name in enumerate(op.inputs):
            value = source(name)
            if value in made or value in seen:
                unread.add(index)
            seen.add(value)
        unwritten = {
            index for index, name in enumerate(op.outputs) if readers.get(name) and inside.issuperset(readers[name])
        }
        if unread or unwritten or position > first:
            kernel = ops[first].name if position > first else ""
            found[op.name] = Fused(frozenset(unread), frozenset(unwritten), kernel)
    return found

"""Selective recompute: the forward ops of a block that run again in its backward, found from the block's structure.

Between products with parameters (projections, convolutions) lie ops that are cheap for the bytes they leave behind:
attention scores and softmax, norms, activation functions. Of the saved values that can be recomputed from other saved
values without such a product, and without sending tokens to experts again, two groups are dropped:

1. the core of attention: values with one number per score, as in Megatron-LM's selective recompute (Korthikanti et al.
   2022, arXiv:2205.05198), whatever the model width.
2. values that free at least `WORTH` times as many bytes per second of rerun as rerunning the rest of the forward:
   norms and activation functions. This is a greedy ratio rule; an optimal choice is an integer program (Checkmate, Jain
   et al. 2020).

Fused attention keeps no scores, so only rule 2 applies to it. Rows that experts received are kept: seconds of a rerun
are those of one device, and leave out the all-to-all that a second dispatch takes.

With the stack's `selective: alternate` what torchtitan's selective checkpointing by op keeps is left: results of
attention, rows that experts received or sent back, and results of every other product with parameters, from the first
one on, where products of routers and of experts do not count; all else of the block runs again. Where
torchtitan keeps the result of a product and the backward reads a value made of that result (rotated queries), that
value is kept here. Torchtitan also keeps sums over tensor-parallel devices, which run again here, and the result of the
last product, which no backward reads and which is not counted here.

Bytes and seconds are those of the whole block on one device: both are divided alike by most placements, so all
placements of a block share one answer.

Where the software stack names modules (`Stack.recompute_modules`), these run again instead, products included. Where
it says which modules there are (`Stack.recompute_among`), rule 2 chooses among these, in place of single values.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

from autopar.cost import CostModel, op_flops
from autopar.cost.attention import ATTENTION_KINDS
from autopar.cost.products import GROUPED_KINDS, PRODUCT_KINDS
from autopar.cost.scans import SCAN_KERNELS
from autopar.folding.fold import VIEW_KINDS, BlockKind, Folded
from autopar.folding.graph_facts import global_shapes, moved_bytes, states_of
from autopar.folding.recompute_modules import MODULES, BlockForward, module_ops
from autopar.ir.graph import Op, Phase

WORTH = 2.0
"""Bytes freed per second of rerun that a value must reach, relative to rerunning the forward without the core of
attention."""

_ROWS = "autopar::ExpertRows"
"""Kind whose result is its input on the devices where that is needed: those of experts, or those of tokens."""
_EXCHANGES = frozenset({"GatherND", "autopar::ExpertDispatch", _ROWS})
"""Kinds that bring tokens to the devices of their experts, among the ops of routed experts."""


def is_forward(op: Op) -> bool:
    """Return whether an op belongs to the forward pass, the loss included."""
    return op.phase in (Phase.FORWARD, Phase.LOSS)


@dataclass(frozen=True, slots=True)
class _Recomputable:
    """A saved value, or an op's internal saved bytes, that can be recomputed.

    Attributes:
        bytes: Its bytes.
        ops: Positions of the ops that recompute it.
        is_core: Whether it belongs to the core of attention: one number per score.
    """

    bytes: float
    ops: frozenset[int]
    is_core: bool


@lru_cache(maxsize=64)  # meshes are many, graphs few
def selective_ops(folded: Folded, costs: CostModel) -> tuple[frozenset[int], ...]:
    """Return, per kind, the positions of the ops that selective recompute runs again, including views of their outputs.

    Args:
        folded: The graph.
        costs: Seconds of ops, and bytes they keep.
    """
    element_bytes = moved_bytes(folded, costs.policy)
    return tuple(_of_kind(folded, kind, costs, element_bytes) for kind in folded.kinds)


@lru_cache(maxsize=64)
def modules_of(folded: Folded, costs: CostModel) -> tuple[Mapping[str, frozenset[str]], ...]:
    """Return, per kind, the names of the ops that each module of `MODULES` runs again, for modules that have any.

    Args:
        folded: The graph.
        costs: Seconds of ops, and bytes they keep.
    """
    element_bytes = moved_bytes(folded, costs.policy)
    found: list[Mapping[str, frozenset[str]]] = []
    for kind in folded.kinds:
        search = _ForwardOps(folded, kind, costs, element_bytes)
        each = {name: search.modules((name,)) for name in MODULES}
        found.append({name: frozenset(kind.ops[own].name for own in ops) for name, ops in each.items() if ops})
    return tuple(found)


def _of_kind(folded: Folded, kind: BlockKind, costs: CostModel, element_bytes: Mapping[str, float]) -> frozenset[int]:
    if not any(op.phase is Phase.BACKWARD for op in kind.ops):
        return frozenset()
    search = _ForwardOps(folded, kind, costs, element_bytes)
    if costs.stack.recompute_modules:
        return search.modules(costs.stack.recompute_modules)
    if costs.stack.recompute_among:
        return search.worthwhile_modules(costs.stack.recompute_among)
    if costs.stack.selective == "alternate":
        chosen = search.between_kept()
        return frozenset(chosen | search.views_of(chosen))
    recomputable = search.recomputable()
    core = [item for item in recomputable if item.is_core]
    left = [item for item in recomputable if not item.is_core]
    chosen = {position for item in core for position in item.ops}
    rate = search.rate_of_rest(fsum(item.bytes for item in core), frozenset(chosen))
    while left:
        rates = [item.bytes / max(1e-12, search.seconds_of(item.ops - chosen)) for item in left]
        best = max(range(len(left)), key=rates.__getitem__)
        if rates[best] < WORTH * rate:
            break
        chosen |= left.pop(best).ops
    return frozenset(chosen | search.views_of(chosen)) if chosen else frozenset()


def forward_block(folded: Folded, kind: BlockKind) -> BlockForward:
    """Return the forward ops of a block, and which of them are products with parameters."""
    values = folded.graph.values
    forward = tuple(position for position, op in enumerate(kind.ops) if is_forward(op))
    read = {name for position in forward for name in kind.ops[position].inputs}
    parameters = set(states_of(folded).parameters & read)
    products, experts = set[int](), set[int]()
    for position in forward:
        op = kind.ops[position]
        weights = [name for name in op.inputs if name in parameters]
        if weights and op.kind in (*VIEW_KINDS, "Transpose"):
            parameters |= set(op.outputs)  # a parameter in another layout
        # Attention sinks, and factors of the heads of a scan, are parameters, but in no product.
        is_product = op.kind not in ATTENTION_KINDS and op.kind not in SCAN_KERNELS
        if weights and is_product and float(op_flops(op, *global_shapes(folded.graph, op))[0]) > 0:
            products.add(position)
            is_matrices = op.kind == "MatMul" and max(len(values[name].shape) for name in weights) > 2
            if op.kind in GROUPED_KINDS or is_matrices:
                experts.add(position)
    return BlockForward(kind.ops, forward, frozenset(products), frozenset(experts))


class _ForwardOps:
    """The forward ops of one block as a graph."""

    def __init__(self, folded: Folded, kind: BlockKind, costs: CostModel, element_bytes: Mapping[str, float]) -> None:
        graph = folded.graph
        self._kind, self._values, self._bytes = kind, graph.values, element_bytes
        self._keeps_scores = costs.stack.attention == "unfused"
        self._forward = [position for position, op in enumerate(kind.ops) if is_forward(op)]
        self._maker = {name: position for position in self._forward for name in kind.ops[position].outputs if name}
        self._seconds, self._kept = {}, {}
        for position in self._forward:
            op = kind.ops[position]
            inputs, outputs = global_shapes(graph, op)
            self._seconds[position] = float(costs.op_seconds(op, inputs, outputs, element_bytes)[0])
            self._kept[position] = float(costs.kept_bytes(op, inputs, outputs, element_bytes)[0])
        self.block = forward_block(folded, kind)
        self._products = self.block.products
        found = module_ops(self.block)
        self._routed = found["moe"] - found["shared_experts"]
        exchanges = frozenset(own for own in self._routed if kind.ops[own].kind in _EXCHANGES)
        self._exchanges = exchanges | self._last_experts()
        self._saved = {
            name
            for position in self._forward
            for name, saved in zip(kind.ops[position].outputs, kind.saved[position], strict=True)
            if saved
        }
        self._saved_arrivals = {arrival.value for arrival in kind.arrivals if arrival.saved}
        self._arrivals = {arrival.value for arrival in kind.arrivals}
        block = kind.ops[0].block
        self._leaving = {
            name for name in self._maker if any(reader.block != block for reader in folded.readers.get(name, ()))
        } | set(graph.outputs)

    def modules(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ops of modules that run again: those that make what is saved, and what these read of the modules.

        Args:
            names: Keys of `autopar.folding.recompute_modules.MODULES`.
        """
        found = module_ops(self.block)
        chosen = frozenset(position for name in names for position in found[name])
        pending = [position for position in chosen if self._kept[position] or self._is_dropped(position)]
        ops: set[int] = set()
        while pending:
            position = pending.pop()
            if position not in ops:
                ops.add(position)
                makers = (self._maker.get(name) for name in self._kind.ops[position].inputs)
                pending += [maker for maker in makers if maker is not None and maker in chosen]
        return frozenset(ops | self.views_of(ops)) if ops else frozenset()

    def worthwhile_modules(self, names: Iterable[str]) -> frozenset[int]:
        """Return the ops of modules that free `WORTH` times as many bytes per second as the forward without scores.

        Args:
            names: Keys of `autopar.folding.recompute_modules.MODULES`.
        """
        each = {name: ops for name in names if (ops := self.modules((name,)))}
        chosen = {"core_attn"} & each.keys() if self._keeps_scores else set[str]()
        core = frozenset().union(*(each[name] for name in chosen))
        rate = self.rate_of_rest(self._freed(core), core)
        for name, ops in each.items():
            if self._freed(ops) >= WORTH * rate * max(1e-12, self.seconds_of(ops)):
                chosen.add(name)
        return self.modules(chosen)

    def _freed(self, ops: frozenset[int]) -> float:
        """Return the bytes that are not kept if ops run again, less those of values that are kept for it."""
        made = {name for position in ops for name in self._kind.ops[position].outputs}
        read = {name for position in ops for name in self._kind.ops[position].inputs if name in self._maker}
        also = read - made - self._saved
        dropped = (made & self._saved) - self._leaving
        sizes = fsum(map(self._size, dropped)) - fsum(map(self._size, also))
        return sizes + fsum(self._kept[position] for position in ops)

    def _last_experts(self) -> frozenset[int]:
        """Return the products of experts whose results go back to the devices of the tokens."""
        experts = self.block.experts
        left = set(experts)
        for product in experts:
            seen, pending = set[int](), [product]
            while pending:
                makers = (self._maker.get(name) for name in self._kind.ops[pending.pop()].inputs)
                new = {maker for maker in makers if maker is not None} - seen
                seen |= new
                pending += new
            left -= seen
        return frozenset(left)

    def _is_dropped(self, position: int) -> bool:
        """Return whether an op makes a value that the backward needs and no other block reads."""
        return any(name in self._saved and name not in self._leaving for name in self._kind.ops[position].outputs)

    def seconds_of(self, ops: frozenset[int]) -> float:
        return fsum(self._seconds[position] for position in ops)

    def rate_of_rest(self, dropped: float, ops: frozenset[int]) -> float:
        """Return the bytes freed per second of rerunning the forward without `ops`, which free `dropped` bytes."""
        freed = fsum(self._size(name) for name in self._saved) + fsum(self._kept.values()) - dropped
        return freed / max(1e-12, fsum(self._seconds.values()) - self.seconds_of(ops))

    def recomputable(self) -> list[_Recomputable]:
        """Return what can be recomputed without a product with parameters, with the ops that recompute it."""
        found = []
        scores = self._scores()
        for name in sorted(self._saved - self._leaving):
            ops = self._recomputed_ops(self._maker[name])
            if ops is not None:
                found.append(_Recomputable(self._size(name), ops, name in scores))
        for position, kept in self._kept.items():
            ops = self._recomputed_ops(position) if kept else None
            if ops is not None:
                found.append(_Recomputable(kept, ops, self._keeps_scores))
        return found

    def between_kept(self) -> set[int]:
        """Return the ops that run again where attention and every other product outside routed experts are kept."""
        attention = {position for position in self._forward if self._kind.ops[position].kind in ATTENTION_KINDS}
        kept = frozenset(sorted(self._products - self._routed)[::2]) | attention
        found = (self._recomputed_ops(self._maker[name], kept) for name in self._saved - self._leaving)
        return {position for ops in found if ops is not None for position in ops}

    def _scores(self) -> frozenset[str]:
        """Return the attention probabilities of unfused attention, and values made of them.

        These are outputs of a softmax over a product of two activations, and of all later ops up to the next product.
        """
        products: set[str] = set()  # products of activations, and values made of them by other ops
        probabilities: set[str] = set()
        for position in self._forward:
            op = self._kind.ops[position]
            if op.kind in PRODUCT_KINDS:
                if position not in self._products:
                    products |= set(op.outputs)
                continue
            if not probabilities.isdisjoint(op.inputs) or (op.kind == "Softmax" and not products.isdisjoint(op.inputs)):
                probabilities |= set(op.outputs)
            elif not products.isdisjoint(op.inputs):
                products |= set(op.outputs)
        return frozenset(probabilities)

    def views_of(self, chosen: set[int]) -> set[int]:
        """Return the views of the chosen ops' outputs: they cost nothing, and keeping one would keep its buffer."""
        names = {name for position in chosen for name in self._kind.ops[position].outputs}
        views = set()
        for position in self._forward:
            op = self._kind.ops[position]
            if op.kind in VIEW_KINDS and op.inputs[0] in names:
                views.add(position)
                names |= set(op.outputs)
        return views

    def _recomputed_ops(self, position: int, kept: Set[int] | None = None) -> frozenset[int] | None:
        """Return the ops that recompute an op's outputs from saved values; None if that takes an op that is kept.

        Args:
            position: The op.
            kept: Ops that do not run again, beside those that send tokens to experts; None for products with
                parameters.
        """
        kept = self._exchanges | (self._products if kept is None else kept)
        ops: set[int] = set()
        pending = [position]
        while pending:
            current = pending.pop()
            if current in ops:
                continue
            if current in kept:
                return None
            ops.add(current)
            for name in self._kind.ops[current].inputs:
                if name in self._arrivals and name not in self._saved_arrivals:
                    return None
                maker = self._maker.get(name)
                if maker is not None and not self._is_there(name):
                    pending.append(maker)
        return frozenset(ops)

    def _is_there(self, name: str) -> bool:
        """Return whether a value is saved: itself, or the one it is on other devices."""
        maker = self._kind.ops[self._maker[name]]
        return name in self._saved or (maker.kind == _ROWS and maker.inputs[0] in self._saved)

    def _size(self, name: str) -> float:
        return self._values[name].size * self._bytes[name]

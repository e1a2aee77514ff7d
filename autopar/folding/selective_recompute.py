"""What selective recompute runs again, found from the structure of a block.

Between products with parameters (projections, convolutions) lie ops that are cheap for the bytes they leave behind:
the scores and the softmax of attention, norms, activation functions. Dropped of the values that a forward saves is, out
of those that can be made again without such a product from values that are saved anyway:

1. the core of attention: whatever has one number per score. Megatron-LM's selective recompute means these always
   (Korthikanti et al., 2022, arXiv:2205.05198), however wide the model.
2. what frees at least `WORTH` times as many bytes per second of rerun as running all the rest of the forward again:
   norms and activation functions.

Fused attention keeps no scores, so that only the second rule finds something there.

Bytes and seconds are those of the whole block on one device: what is worth it does not change much when both are
divided alike, and all placements of a block share one answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

from autopar.cost import CostModel, op_flops
from autopar.cost.products import PRODUCT_KINDS
from autopar.folding.fold import VIEW_KINDS, BlockKind, Folded
from autopar.folding.graph_facts import moved_bytes, states_of, whole_shapes
from autopar.ir.graph import Op, Phase

WORTH = 2.0
"""Bytes per second of rerun that a value must free, in units of what rerunning the forward without the core of
attention frees per second."""


def is_forward(op: Op) -> bool:
    """Whether an op belongs to the forward pass, the loss included."""
    return op.phase in (Phase.FORWARD, Phase.LOSS)


@dataclass(frozen=True, slots=True)
class _Droppable:
    """Something the forward leaves behind.

    Attributes:
        bytes: Its bytes.
        ops: Positions of the ops that make it again.
        is_core: Whether it belongs to the core of attention: one number per score.
    """

    bytes: float
    ops: frozenset[int]
    is_core: bool


@lru_cache(maxsize=64)  # meshes are many, graphs few
def selective_ops(folded: Folded, costs: CostModel) -> tuple[frozenset[int], ...]:
    """Return by kind the positions of the ops that selective recompute runs again, views of what they make included.

    Args:
        folded: The graph.
        costs: Seconds of ops, bytes they keep.
    """
    element_bytes = moved_bytes(folded, costs.policy)
    return tuple(_of_kind(folded, kind, costs, element_bytes) for kind in folded.kinds)


def _of_kind(folded: Folded, kind: BlockKind, costs: CostModel, element_bytes: Mapping[str, float]) -> frozenset[int]:
    if not any(op.phase is Phase.BACKWARD for op in kind.ops):
        return frozenset()
    search = _Search(folded, kind, costs, element_bytes)
    droppable = search.droppable()
    core = [item for item in droppable if item.is_core]
    left = [item for item in droppable if not item.is_core]
    chosen = {position for item in core for position in item.ops}
    rate = search.rate_of_rest(fsum(item.bytes for item in core), frozenset(chosen))
    while left:
        rates = [item.bytes / max(1e-12, search.seconds_of(item.ops - chosen)) for item in left]
        best = max(range(len(left)), key=rates.__getitem__)
        if rates[best] < WORTH * rate:
            break
        chosen |= left.pop(best).ops
    return frozenset(chosen | search.views_of(chosen)) if chosen else frozenset()


class _Search:
    """One block, its forward ops as a graph."""

    def __init__(self, folded: Folded, kind: BlockKind, costs: CostModel, element_bytes: Mapping[str, float]) -> None:
        graph = folded.graph
        self._kind, self._values, self._bytes = kind, graph.values, element_bytes
        self._keeps_scores = costs.stack.attention == "unfused"
        self._forward = [position for position, op in enumerate(kind.ops) if is_forward(op)]
        self._maker = {name: position for position in self._forward for name in kind.ops[position].outputs if name}
        self._seconds, self._kept = {}, {}
        read = {name for position in self._forward for name in kind.ops[position].inputs}
        parameters = set(states_of(folded).parameters & read)
        self._products: set[int] = set()
        for position in self._forward:
            op = kind.ops[position]
            inputs, outputs = whole_shapes(graph, op)
            self._seconds[position] = float(costs.op_seconds(op, inputs, outputs, element_bytes)[0])
            self._kept[position] = float(costs.kept_bytes(op, inputs, outputs, element_bytes)[0])
            weighs = any(name in parameters for name in op.inputs)
            if weighs and op.kind in (*VIEW_KINDS, "Transpose"):
                parameters |= set(op.outputs)  # a parameter in another form
            if weighs and float(op_flops(op, inputs, outputs)[0]) > 0:
                self._products.add(position)
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

    def seconds_of(self, ops: frozenset[int]) -> float:
        return fsum(self._seconds[position] for position in ops)

    def rate_of_rest(self, dropped: float, ops: frozenset[int]) -> float:
        """Return the bytes freed per second of rerun if the forward but for `ops`, which free `dropped`, runs again."""
        freed = fsum(self._size(name) for name in self._saved) + fsum(self._kept.values()) - dropped
        return freed / max(1e-12, fsum(self._seconds.values()) - self.seconds_of(ops))

    def droppable(self) -> list[_Droppable]:
        """Return what could be made again without a product with parameters, with the ops that would make it."""
        found = []
        scores = self._scores()
        for name in sorted(self._saved - self._leaving):
            ops = self._making(self._maker[name])
            if ops is not None:
                found.append(_Droppable(self._size(name), ops, name in scores))
        for position, kept in self._kept.items():
            ops = self._making(position) if kept else None
            if ops is not None:
                found.append(_Droppable(kept, ops, self._keeps_scores))
        return found

    def _scores(self) -> frozenset[str]:
        """Return the probabilities of attention that is written as single ops, and what is made of them.

        That is a softmax over the product of two activations, and all ops behind it up to the next product.
        """
        products: set[str] = set()  # products of activations, and what other ops make of them
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
        """Return the views of what chosen ops make: they cost nothing and would be kept by their name."""
        names = {name for position in chosen for name in self._kind.ops[position].outputs}
        views = set()
        for position in self._forward:
            op = self._kind.ops[position]
            if op.kind in VIEW_KINDS and op.inputs[0] in names:
                views.add(position)
                names |= set(op.outputs)
        return views

    def _making(self, position: int) -> frozenset[int] | None:
        """Return the ops that make what an op makes, from values that are saved; None if that takes a product."""
        ops: set[int] = set()
        pending = [position]
        while pending:
            current = pending.pop()
            if current in ops:
                continue
            if current in self._products:
                return None
            ops.add(current)
            for name in self._kind.ops[current].inputs:
                if name in self._arrivals and name not in self._saved_arrivals:
                    return None
                maker = self._maker.get(name)
                if maker is not None and name not in self._saved:
                    pending.append(maker)
        return frozenset(ops)

    def _size(self, name: str) -> float:
        return self._values[name].size * self._bytes[name]

"""Modules of a layer that can run again in the backward, found from the structure of a block: one row per module.

Frameworks name what selective recompute runs again by modules (`--recompute-modules` of Megatron-LM). A row of
`MODULES` says which forward ops of a block are such a module. Names of ops do not count: attention is where scores of
two activations are (`Roles.core`), its side what leads to it and the products behind it; MLPs are the other products
with parameters and what lies between them, experts those that a dispatch feeds.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.attention import ATTENTION_KINDS
from autopar.cost.products import GROUPED_KINDS, PRODUCT_KINDS
from autopar.cost.scans import SCAN_KERNELS
from autopar.folding.fold import VIEW_KINDS
from autopar.ir.graph import Op

_MOVES = frozenset({*VIEW_KINDS, "Transpose", "Split", "Slice", "Concat", "Expand"})
"""Ops that compute nothing: a value behind one of them has the role of the value before it."""
_EXPERTS = frozenset({"autopar::ExpertDispatch", "autopar::ExpertCombine"})


@dataclass(frozen=True, slots=True)
class BlockForward:
    """The forward ops of a block as a graph.

    Attributes:
        ops: All ops of the block.
        forward: Positions of the forward ops, in order.
        products: Positions of the products with parameters among them.
        experts: Positions of the products whose parameters are those of several experts.
    """

    ops: tuple[Op, ...]
    forward: tuple[int, ...]
    products: frozenset[int]
    experts: frozenset[int]


class Roles:
    """What the forward ops of a block are for, as sets of positions.

    Attributes:
        core: Scores of attention, softmax, and their product with values; scans of state-space models are none.
        norms: Normalisations outside of attention: of the input of attention, and of MLPs.
        latent: What lies between the latent values of queries, keys and values and the core of attention.
        dense: MLPs of single matrices, in layers without experts.
        shared: MLPs beside routed experts.
        routed: Routers, dispatch, routed experts and what combines them.
    """

    def __init__(self, block: BlockForward) -> None:
        self._block, self._ops = block, block.ops
        makers = {name: own for own in block.forward for name in block.ops[own].outputs if name}
        self._before = {
            own: tuple(makers[name] for name in block.ops[own].inputs if name in makers) for own in block.forward
        }
        self._after: dict[int, list[int]] = {own: [] for own in block.forward}
        for own, sources in self._before.items():
            for source in sources:
                self._after[source].append(own)
        self.core = self._core()
        attention = self.core | {own for own in block.forward if self._kind(own) in SCAN_KERNELS}
        leading = self._reached(attention, self._before)
        behind = self._products_behind(attention)
        self._attention = attention | leading | behind | self._reached(behind, self._before)
        self.latent = self._latent(leading)
        inner = frozenset(own for own in leading if self._is_made_by_product(own))  # norms of queries and keys
        self.norms = self._all_norms - self.latent - inner - self._reached(attention, self._after, block.products)
        self.routed, self.shared, self.dense = self._mlps()

    @cached_property
    def _all_norms(self) -> frozenset[int]:
        return frozenset(own for own in self._block.forward if self._kind(own).endswith("Normalization"))

    @property
    def expert_products(self) -> frozenset[int]:
        """The products with the parameters of several experts."""
        return self._block.experts

    @property
    def single_products(self) -> frozenset[int]:
        """The products of dense MLPs and shared experts."""
        return self._block.products & (self.dense | self.shared)

    def activation_of(self, products: frozenset[int]) -> frozenset[int]:
        """Return the ops between some products: activation functions, and gates."""
        between = self._reached(products, self._before) & self._reached(products, self._after)
        return frozenset(own for own in between - products if not self._is_bias(own))

    def _is_bias(self, position: int) -> bool:
        """Return whether an op adds a value from outside the block to the result of a product."""
        makers = self._before[position]
        return self._kind(position) == "Add" and len(makers) == 1 and self._is_made_by_product(position)

    def _kind(self, position: int) -> str:
        return self._ops[position].kind

    def _reached(
        self, sources: Iterable[int], edges: Mapping[int, Iterable[int]], stop: Set[int] = frozenset()
    ) -> frozenset[int]:
        """Return the ops that are reached from some along edges, these not included unless another leads to them."""
        found: set[int] = set()
        pending = [following for own in sources for following in edges[own]]
        while pending:
            own = pending.pop()
            if own not in found and own not in stop:
                found.add(own)
                pending += edges[own]
        return frozenset(found)

    def _core(self) -> frozenset[int]:
        fused = {own for own in self._block.forward if self._kind(own) in ATTENTION_KINDS}
        inner = {
            own
            for own in self._block.forward
            if self._kind(own) in PRODUCT_KINDS - GROUPED_KINDS and own not in self._block.products
        }
        softmax = {own for own in self._block.forward if self._kind(own) == "Softmax"}
        softmax &= self._reached(inner, self._after, self._block.products)
        scores = self._reached(softmax, self._before, self._block.products) & inner
        values = self._reached(softmax, self._after, self._block.products) & inner
        between = self._reached(scores, self._after, self._block.products) & self._reached(
            values, self._before, self._block.products
        )
        return frozenset(fused | (scores | values | between if softmax else set()))

    def _products_behind(self, attention: Set[int]) -> frozenset[int]:
        """Return the first products with parameters behind attention: output projections."""
        found = self._reached(attention, self._after, self._block.products)
        nearest = {following for own in found | attention for following in self._after[own]}
        return frozenset(nearest & self._block.products)

    def _is_made_by_product(self, position: int) -> bool:
        """Return whether an op reads the result of a product with parameters, moved at most."""
        sources = list(self._before[position])
        while sources:
            own = sources.pop()
            if own in self._block.products:
                return True
            if self._kind(own) in _MOVES:
                sources += self._before[own][:1]
        return False

    def _latent(self, leading: Set[int]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for own in self._all_norms & leading:
            further = self._reached({own}, self._after) & leading
            if self._is_made_by_product(own) and further & self._block.products:
                found |= further | {own}
        return found

    def _mlps(self) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Return the ops of routed experts, of MLPs beside them, and of MLPs in blocks without experts."""
        outside = self._attention | self._all_norms
        experts = self._block.experts | {own for own in self._block.forward if self._kind(own) in _EXPERTS}
        sinks = (self._block.products - outside) | experts
        region = sinks | (self._reached(sinks, self._after, outside) & self._reached(sinks, self._before, outside))
        parts: list[frozenset[int]] = []
        left = set(region)
        while left:
            part, pending = set[int](), [left.pop()]
            while pending:
                own = pending.pop()
                part.add(own)
                near = {*self._before[own], *self._after[own]} & left
                left -= near
                pending += near
            parts.append(frozenset(part))
        routed = frozenset().union(*(part for part in parts if part & experts))
        # A product alone is a head, or a router whose choice nothing reads: no MLP.
        others = frozenset().union(
            *(part for part in parts if not part & experts and len(part & self._block.products) > 1)
        )
        return (routed, others, frozenset()) if routed else (routed, frozenset(), others)


@dataclass(frozen=True, slots=True)
class RecomputeModule:
    """A module of a layer that can run again.

    Attributes:
        meaning: What it is.
        find: Its ops.
    """

    meaning: str
    find: Callable[[Roles], frozenset[int]]


MODULES: Mapping[str, RecomputeModule] = {
    "core_attn": RecomputeModule("scores, softmax and their product with values", lambda roles: roles.core),
    "layernorm": RecomputeModule("normalisations before attention and MLPs", lambda roles: roles.norms),
    "mla_up_proj": RecomputeModule(
        "normalisation and up-projection of the latent queries, keys and values of MLA", lambda roles: roles.latent
    ),
    "activation": RecomputeModule(
        "activation functions of dense MLPs and shared experts",
        lambda roles: roles.activation_of(roles.single_products),
    ),
    "mlp": RecomputeModule("dense MLPs, projections included", lambda roles: roles.dense),
    "moe_act": RecomputeModule(
        "activation functions of experts", lambda roles: roles.activation_of(roles.expert_products)
    ),
    "shared_experts": RecomputeModule("shared experts", lambda roles: roles.shared),
    "moe": RecomputeModule("routers, dispatch, experts and shared experts", lambda roles: roles.routed | roles.shared),
}
"""Modules by name. The names are those of Megatron-Core 0.19 (`TransformerConfig.recompute_modules`), and `activation`,
which is none of them: it runs again a dense MLP whole or not at all."""


def module_ops(block: BlockForward) -> Mapping[str, frozenset[int]]:
    """Return the positions of the ops of every module of a block."""
    roles = Roles(block)
    return {name: module.find(roles) for name, module in MODULES.items()}

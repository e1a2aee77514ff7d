"""What a search has to keep to besides memory: which placements, cuts, recompute and ZeRO levels are left open.

Everything is open by default. Whoever restricts (`autopar.pins`) says it in these terms; the tables, the split into
stages and the bounds are then those of what is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel
from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.formulate.building import Restriction, build_tables
from autopar.formulate.data_major import DataMajor, is_data_major
from autopar.formulate.manual_recipes import BatchDims
from autopar.formulate.tables import Tables
from autopar.formulate.zero import LEVELS, keep_levels
from autopar.recompute import BY_SECONDS, ON_DEVICE, Hosted, Recompute
from autopar.sharding import Mesh

Mask: TypeAlias = NDArray[np.bool_]
Restrict: TypeAlias = Callable[[Folded, Rules, Mesh], Restriction | None]
"""Returns what the axes of a mesh may do; None if the mesh cannot do what is asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """What is left open.

    Attributes:
        restrict: Restricts placements; None if they are free.
        zero: The levels of ZeRO that parameters may have.
        cuts: The blocks at which a stage may begin besides block 0; None for all.
        keeps: For each block what it may keep of its forward; empty for anything.
        hosted: What may lie in host memory.
        reserve: What may lie there besides if nothing fits without.
        states: For each block whether the optimizer's state may lie in host memory (True) and on the device (False);
            empty for either, if `hosted` has it.
        batch: Returns the batch dim of every value of a folded graph that has one: what a data-parallel major axis of
            a mesh of three splits.
    """

    restrict: Restrict | None = None
    zero: frozenset[int] = LEVELS
    cuts: frozenset[int] | None = None
    keeps: tuple[frozenset[Recompute], ...] = ()
    hosted: frozenset[Hosted] = frozenset()
    reserve: frozenset[Hosted] = frozenset()
    states: tuple[frozenset[bool], ...] = ()
    batch: Callable[[Folded], BatchDims] | None = None

    def tables(self, folded: Folded, rules: Rules, mesh: Mesh, costs: CostModel) -> Tables | None:
        """Return the decisions and prices that are left on a mesh; None if it cannot do what is asked."""
        restriction = None
        if self.restrict is not None:
            restriction = self.restrict(folded, rules, mesh)
            if restriction is None:
                return None
        if is_data_major(mesh) and self.batch is not None:
            restriction = DataMajor.of(folded, self.batch(folded), restriction)
        tables = build_tables(folded, rules, mesh, costs, restriction)
        return tables if self.zero == LEVELS else keep_levels(tables, self.zero)

    def ranges(self, num_blocks: int, longest: int) -> Mask:
        """Return which ranges may be a stage, (blocks, longest): from a block on, one more than the column says."""
        if self.cuts is None:
            return np.ones((num_blocks, longest), dtype=bool)
        edges = np.zeros(num_blocks + longest + 1, dtype=bool)
        edges[self.edges(num_blocks)] = True
        start = np.arange(num_blocks)[:, None]
        return np.asarray(edges[start] & edges[start + 1 + np.arange(longest)[None, :]])

    def edges(self, num_blocks: int) -> list[int]:
        """Return where a stage may begin or end, ascending, the ends of the chain included."""
        cuts = range(num_blocks) if self.cuts is None else self.cuts
        return sorted({0, num_blocks, *(cut for cut in cuts if 0 < cut < num_blocks)})

    def fastest(self, chain: Sequence[int], num_kinds: int) -> tuple[Recompute, ...]:
        """Return by kind the fastest flavour that any of its blocks may have: what bounds may count on.

        What is offloaded runs nothing again, so that it counts as none.
        """
        found = [Recompute.FULL] * num_kinds
        order = list(ON_DEVICE)
        for block, kind in enumerate(chain):
            keeps = self.keeps[block] if self.keeps else frozenset(ON_DEVICE)
            own = min((flavour for flavour in order if flavour in keeps), key=order.index, default=Recompute.NONE)
            offloads = Hosted.ACTIVATIONS in self.hosted and Recompute.OFFLOAD in keeps
            found[kind] = min(found[kind], Recompute.NONE if offloads else own, key=order.index)
        return tuple(found)

    def flavours(self, blocks: Sequence[int] | None = None) -> tuple[Recompute, ...]:
        """Return the flavours that some of the blocks may have, or any block at all, from fastest to slowest.

        Nothing is faster than to offload, but to keep all on the device, where the host link takes no time.
        """
        known = BY_SECONDS if Hosted.ACTIVATIONS in self.hosted else ON_DEVICE
        keeps = self.keeps if blocks is None or not self.keeps else [self.keeps[block] for block in blocks]
        return tuple(flavour for flavour in known if not keeps or any(flavour in own for own in keeps))

    def may_lie(self, start: int, stop: int, *, away: bool) -> bool:
        """Return whether the optimizer's state of a range of blocks may lie in host memory, or on the device."""
        return (not away or self.hosts_optimizer) and all(away in own for own in self.states[start:stop])

    @property
    def needs_host(self) -> bool:
        """Whether some block has to have something in host memory."""
        return any(own.isdisjoint(ON_DEVICE) for own in self.keeps) or any(False not in own for own in self.states)

    @property
    def opened(self) -> "Constraints":
        """The constraints with all that may lie in host memory."""
        return replace(self, hosted=self.hosted | self.reserve, reserve=frozenset())

    @property
    def hosts_optimizer(self) -> bool:
        """Whether the optimizer's state of some stage may lie in host memory."""
        return Hosted.OPTIMIZER in self.hosted and (not self.states or any(True in own for own in self.states))


FREE = Constraints()
"""Everything is open that needs no host memory."""

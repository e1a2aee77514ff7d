"""What a search has to keep to besides memory: which placements, cuts, recompute and ZeRO levels are left open.

Everything is open by default. Whoever restricts (`autopar.pins`) says it in these terms; the tables, the split into
stages and the bounds are then those of what is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel
from autopar.discover import Rules
from autopar.formulate.building import Restriction, build_tables
from autopar.formulate.data_major import DataMajor, is_data_major
from autopar.formulate.fold import Folded
from autopar.formulate.recipes import BatchDims
from autopar.formulate.tables import Tables
from autopar.formulate.zero import LEVELS, keep_levels
from autopar.recompute import ON_DEVICE, Recompute
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
        batch: Returns the batch dim of every value of a folded graph that has one: what a data-parallel major axis of
            a mesh of three splits.
    """

    restrict: Restrict | None = None
    zero: frozenset[int] = LEVELS
    cuts: frozenset[int] | None = None
    keeps: tuple[frozenset[Recompute], ...] = ()
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
        edges[[0, num_blocks, *(cut for cut in self.cuts if 0 < cut < num_blocks)]] = True
        start = np.arange(num_blocks)[:, None]
        return np.asarray(edges[start] & edges[start + 1 + np.arange(longest)[None, :]])

    def fastest(self, chain: Sequence[int], num_kinds: int) -> tuple[Recompute, ...]:
        """Return by kind the fastest flavour that any of its blocks may have: what bounds may count on."""
        found = [Recompute.FULL] * num_kinds
        order = list(Recompute)
        for block, kind in enumerate(chain):
            own = min(self.keeps[block], key=order.index) if self.keeps else Recompute.NONE
            found[kind] = min(found[kind], own, key=order.index)
        return tuple(found)

    def flavours(self, blocks: Sequence[int] | None = None) -> tuple[Recompute, ...]:
        """Return the flavours that some of the blocks may have, or any block at all, from fastest to slowest."""
        keeps = self.keeps if blocks is None or not self.keeps else [self.keeps[block] for block in blocks]
        return tuple(flavour for flavour in ON_DEVICE if not keeps or any(flavour in own for own in keeps))


FREE = Constraints()
"""Everything is open."""

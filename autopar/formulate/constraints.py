"""Constraints of a search besides memory: allowed placements, stage cuts, recompute flavours, ZeRO levels, offload.

Everything is allowed by default. `autopar.pins` translates user pins into these constraints; tables, staging and bounds
then refer to the restricted space.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost import CostModel
from autopar.degrees import SHARD
from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.formulate.block_memory import RESIDENT, STREAMED, UNHOSTED
from autopar.formulate.building import Restriction, build_tables
from autopar.formulate.data_major import DataMajor, is_data_major
from autopar.formulate.manual_recipes import BatchDims
from autopar.formulate.tables import Memory, Tables
from autopar.formulate.zero import LEVELS, keep_levels
from autopar.recompute import BY_SECONDS, ON_DEVICE, STATE_KINDS, Hosted, Recompute
from autopar.sharding import Mesh

Mask: TypeAlias = NDArray[np.bool_]
Restrict: TypeAlias = Callable[[Folded, Rules, Mesh], Restriction | None]
"""Returns the restriction of the axes of a mesh; None if the mesh cannot satisfy the constraints."""


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """The choices that a search may make.

    Attributes:
        restrict: Restricts placements; None if they are free.
        zero: Allowed ZeRO levels of parameters.
        hybrid: Of these, the levels over the devices that share where an axis `shard` is beside `dp`, which holds
            copies then.
        cuts: Blocks at which a stage may begin, besides block 0; None for all.
        keeps: Allowed recompute flavours per block; empty for all flavours.
        hosted: What may be offloaded to host memory.
        reserve: What may be offloaded in addition if nothing fits without it.
        last: What may be offloaded in place of all that if nothing fits with it either.
        states: Allowed locations of the optimizer state per block: True for host memory, False for the device; empty
            for both, if `hosted` contains the optimizer.
        batch: Returns the batch dim of every value of a folded graph that has one; the data-parallel major axis of a
            mesh of three axes splits it.
    """

    restrict: Restrict | None = None
    zero: frozenset[int] = LEVELS
    hybrid: frozenset[int] = LEVELS - {0}
    cuts: frozenset[int] | None = None
    keeps: tuple[frozenset[Recompute], ...] = ()
    hosted: frozenset[Hosted] = frozenset()
    reserve: frozenset[Hosted] = frozenset()
    states: tuple[frozenset[bool], ...] = ()
    batch: Callable[[Folded], BatchDims] | None = None
    last: frozenset[Hosted] = frozenset()

    def tables(
        self, folded: Folded, rules: Rules, mesh: Mesh, costs: CostModel, *, rows_apart: bool = False
    ) -> Tables | None:
        """Return the decisions and costs on a mesh under the constraints; None if the mesh cannot satisfy them.

        Args:
            folded: The graph of one microbatch.
            rules: Its strategies.
            mesh: The mesh.
            costs: What things cost on it.
            rows_apart: Whether rows of the mesh meet once per step only, as with different shares of the batch.
        """
        restriction = None
        if self.restrict is not None:
            restriction = self.restrict(folded, rules, mesh)
            if restriction is None:
                return None
        if rows_apart:
            assert self.batch is not None, "rows split the batch"
            restriction = DataMajor.of_rows(folded, self.batch(folded), restriction, len(mesh.axes))
        elif is_data_major(mesh) and self.batch is not None:
            restriction = DataMajor.of(folded, self.batch(folded), restriction)
        tables = build_tables(folded, rules, mesh, costs, restriction)
        return self._with_levels(tables)

    def _with_levels(self, tables: Tables) -> Tables:
        """Return tables with the ZeRO levels that are allowed on each axis."""
        names = [axis.name for axis in tables.mesh.axes]
        if SHARD not in names:
            return tables if self.zero == LEVELS else keep_levels(tables, self.zero)
        sharing = (self.zero & self.hybrid) or self.hybrid
        for index, name in enumerate(names):
            levels = {0} if name == "dp" else self.zero if name == "tp" else sharing
            tables = keep_levels(tables, frozenset(levels), index)
        return tables

    def ranges(self, num_blocks: int, longest: int) -> Mask:
        """Return which ranges of blocks may be a stage, (blocks, longest) booleans.

        Entry (i, n) is the range of n + 1 blocks from block i.
        """
        if self.cuts is None:
            return np.ones((num_blocks, longest), dtype=bool)
        edges = np.zeros(num_blocks + longest + 1, dtype=bool)
        edges[self.edges(num_blocks)] = True
        start = np.arange(num_blocks)[:, None]
        return np.asarray(edges[start] & edges[start + 1 + np.arange(longest)[None, :]])

    def edges(self, num_blocks: int) -> list[int]:
        """Return the blocks at which a stage may begin or end, ascending, with both ends of the chain."""
        cuts = range(num_blocks) if self.cuts is None else self.cuts
        return sorted({0, num_blocks, *(cut for cut in cuts if 0 < cut < num_blocks)})

    def fastest(self, chain: Sequence[int], num_kinds: int) -> tuple[Recompute, ...]:
        """Return by kind the fastest flavour that one of its blocks may have, for use in lower bounds.

        Offload recomputes nothing, so that it counts as no recompute.
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
        """Return the flavours that one of the given blocks (all if None) may have, from fastest to slowest.

        Offload ranks after no recompute: with a host link that took no time it would be as fast.
        """
        known = BY_SECONDS if Hosted.ACTIVATIONS in self.hosted else ON_DEVICE
        keeps = self.keeps if blocks is None or not self.keeps else [self.keeps[block] for block in blocks]
        return tuple(flavour for flavour in known if not keeps or any(flavour in own for own in keeps))

    @property
    def needs_host(self) -> bool:
        """Whether some block must use host memory."""
        return any(own.isdisjoint(ON_DEVICE) for own in self.keeps) or any(False not in own for own in self.states)

    @property
    def opened(self) -> "Constraints":
        """These constraints with the reserve of offload opened."""
        return replace(self, hosted=self.hosted | self.reserve, reserve=frozenset())

    @property
    def last_opened(self) -> "Constraints | None":
        """These constraints with what is opened last; None if that is nothing, or something is pinned there."""
        if not self.last or self.hosted:
            return None
        most = max(self.last, key=list(STATE_KINDS).index)
        return replace(self, hosted=frozenset({most}), reserve=frozenset(), last=frozenset())

    @property
    def by_kind(self) -> "tuple[Constraints, ...]":
        """These constraints with the reserve opened, and with each kind of state opened that is opened last."""
        others = (
            frozenset({own}) if STATE_KINDS[own].sums else self.reserve - STATE_KINDS.keys() | {own}
            for own in STATE_KINDS
            if own in self.last
        )
        ways = (self.hosted | self.reserve, *others) if self.reserve else ()
        return tuple(replace(self, hosted=hosted, reserve=frozenset(), last=frozenset()) for hosted in ways)

    @property
    def hosts_optimizer(self) -> bool:
        """Whether the optimizer state of some stage may be in host memory, at least."""
        is_open = any(own in self.hosted for own in STATE_KINDS)
        return is_open and (not self.states or any(True in own for own in self.states))

    @property
    def what(self) -> Hosted:
        """What of the state of blocks may be in host memory if any may."""
        return next((own for own in STATE_KINDS if own in self.hosted), Hosted.OPTIMIZER)

    @property
    def resident(self) -> tuple[Memory, ...]:
        """Memory that every plan holds throughout the step."""
        return STREAMED if self.hosts_sums else UNHOSTED if self.hosts_optimizer else RESIDENT

    @property
    def hosts_sums(self) -> bool:
        """Whether sums of gradients may be in host memory, so that a device need hold nothing of some blocks."""
        return self.hosts_optimizer and STATE_KINDS[self.what].sums


FREE = Constraints()
"""No constraints; host memory is not used."""

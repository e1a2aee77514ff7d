"""Costs of a choice of placements that only its lowered blocks show: memory, hand-overs and host copies.

They are counted as in the simulator.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.describe.block_decisions import assemble_blocks
from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.offload_costs import HostLinks, with_host
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.tables import Slot, Tables
from autopar.pipeline_partition.block_ranges import IntArray
from autopar.pipeline_partition.p2p import StageTransfers
from autopar.plan import BlockPlan
from autopar.problem import Choice
from autopar.program.block import LoweredKind
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.simulate.offload import host_links
from autopar.simulate.ranges import chain_bytes

NO_HOP = -1
"""In place of a network tier, where both stages are on the same devices."""


class ChoiceCosts:
    """Lowers choices of placements and returns their costs; those of the last choice are cached.

    Args:
        tables: Placement decisions.
        pipeline: The stages.
        size: Devices of a stage.
        flavours: Kinds of recompute that constraints allow.
        host_room: Bytes of host memory per device.
        offloads: Whether anything may lie in host memory.
        what: What of the state of blocks may.
    """

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        size: int,
        flavours: Sequence[Recompute] = ON_DEVICE,
        host_room: float = math.inf,
        offloads: bool = False,
        what: Hosted = Hosted.OPTIMIZER,
    ) -> None:
        self._tables, self._pipeline, self._size = tables, pipeline, size
        self._flavours, self._host_room, self._offloads = tuple(flavours), host_room, offloads
        self._what = what
        self._known: tuple[Choice, dict[bool, tuple[ChainBytes, HostLinks | None]]] | None = None
        self._lowered: dict[
            bool, dict[BlockPlan, LoweredKind]
        ] = {}  # of the last choice: the next one has most blocks in common

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the cache, which another process fills quickly."""
        return {**vars(self), "_known": None, "_lowered": {}}

    def clear_cache(self) -> None:
        """Empty the cache, which takes megabytes, while other nodes are solved."""
        self._known, self._lowered = None, {}

    def bytes(self, choice: Choice, *, splits: bool) -> ChainBytes:
        """Return the bytes of every range of blocks as a stage."""
        return self._lowered_costs(choice, splits=splits)[0]

    def seconds_with_copies(
        self, choice: Choice, totals: FloatArray, passes: FloatArray, *, splits: bool
    ) -> FloatArray:
        """Return the seconds of blocks, (kinds, slots), with exposed copies to and from host memory.

        Args:
            choice: The choice.
            totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
            passes: (kinds, 3) seconds of its passes, `scheduled_step.pass_seconds`.
            splits: Whether the backward is split.
        """
        _, links = self._lowered_costs(choice, splits=splits)
        if links is None:
            return totals
        whole = totals.copy()
        whole[:, Slot.BACKWARD] = passes[:, 1]  # fetches overlap the whole backward, split or not
        found = with_host(whole, links, self._pipeline.overlap)
        found[:, Slot.BACKWARD] = totals[:, Slot.BACKWARD]
        return found

    def _lowered_costs(self, choice: Choice, *, splits: bool) -> tuple[ChainBytes, HostLinks | None]:
        """Return the bytes of ranges of blocks, and the host copies if anything may lie in host memory."""
        if self._known is None or self._known[0] != choice:
            self._known = choice, {}
        known = self._known[1]
        if splits not in known:
            folded, trains = self._tables.folded, SCHEDULES[self._pipeline.schedule].trains
            blocks = assemble_blocks(self._tables, choice)
            before = self._lowered.get(splits)
            lowered = lower_blocks(blocks, folded, self._tables.resharder, splits=splits, known=before)
            self._lowered[splits] = {block: lowered[block.kind] for block in blocks}
            costs = self._tables.costs
            host = costs.cluster.known_host() if self._offloads else None
            memory = chain_bytes(
                lowered,
                folded,
                trains=trains,
                flavours=self._flavours,
                host_room=self._host_room,
                host=host,
                what=self._what,
            )
            known[splits] = memory, host_links(lowered, costs, self._what) if self._offloads else None
        return known[splits]

    def peak(self, choice: Choice, split: Split) -> float:
        """Return the bytes of the fullest stage of a split, with its microbatches in flight."""
        memory = self.bytes(choice, splits=False)
        stages = zip(split.ranges, split.recompute, split.away, strict=True)
        return max(
            memory.peak(*blocks, self._pipeline.in_flight(stage), flavours, away=away)
            for stage, (blocks, flavours, away) in enumerate(stages)
        )

    def hops(self, choice: Choice, pipeline: Pipeline) -> StageTransfers | float:
        """Return the seconds of sending one microbatch from stage to stage; 0 if there is one group of devices.

        Args:
            choice: The choice.
            pipeline: The stages; the groups of devices do not depend on the schedule.
        """
        if pipeline.num_groups == 1:
            return 0.0
        costs, memory = self._tables.costs, self.bytes(choice, splits=False)
        tiers_met = self._hop_tiers(pipeline)
        tiers = sorted(set(tiers_met.tolist()))
        taken = [
            [[costs.send_seconds(amount, tier) if tier != NO_HOP else 0.0 for amount in amounts] for tier in tiers]
            for amounts in (memory.arriving.tolist(), memory.returning.tolist())
        ]
        ahead, back = np.array(taken)
        trains = SCHEDULES[pipeline.schedule].trains
        return StageTransfers(
            np.array(memory.chain), np.searchsorted(tiers, tiers_met), ahead, back if trains else np.zeros_like(back)
        )

    def _hop_tiers(self, pipeline: Pipeline) -> IntArray:
        """Return the network tier between consecutive stages, (stages - 1,); `NO_HOP` if they share their devices."""
        cluster, size, tiers_met = self._tables.costs.cluster, self._size, dict[tuple[int, int], int]()
        groups = SCHEDULES[pipeline.schedule].groups(pipeline.num_groups, pipeline.num_chunks)
        for pair in set(pairwise(groups)):
            one, other = (np.arange(group * size, (group + 1) * size) for group in pair)
            tiers_met[pair] = int(cluster.tiers_between(one, other).max()) if pair[0] != pair[1] else NO_HOP
        return np.array([tiers_met[pair] for pair in pairwise(groups)])

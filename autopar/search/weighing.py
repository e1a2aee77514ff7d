"""What the blocks of a choice hold, hand over and copy to the host, lowered, as the simulator counts it."""

import math
from collections import Counter
from collections.abc import Sequence

from autopar.formulate.memory import ChainBytes, FloatArray
from autopar.formulate.offload import HostLinks, with_host
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import Slot, Tables
from autopar.plan import BlockPlan
from autopar.problem import Choice
from autopar.program.block import LoweredKind
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES
from autopar.search.blocks import assemble_blocks
from autopar.simulate.offload import host_links
from autopar.simulate.ranges import chain_bytes


class Weighing:
    """Weighs choices; that of the last one is kept.

    Args:
        tables: What choices are of.
        pipeline: The stages.
        size: Devices of a stage.
        flavours: What blocks may keep of their forward.
        host_room: Bytes of host memory per device.
        offloads: Whether anything may lie there.
    """

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        size: int,
        flavours: Sequence[Recompute] = ON_DEVICE,
        host_room: float = math.inf,
        offloads: bool = False,
    ) -> None:
        self._tables, self._pipeline, self._size = tables, pipeline, size
        self._flavours, self._host_room, self._offloads = tuple(flavours), host_room, offloads
        self._weighed: tuple[Choice, dict[bool, tuple[ChainBytes, HostLinks | None]]] | None = None
        self._lowered: dict[bool, dict[BlockPlan, LoweredKind]] = {}  # of the last choice: the next has most of them

    def __getstate__(self) -> dict[str, object]:
        """Return what another process needs: what is kept is quickly found again."""
        return {**vars(self), "_weighed": None, "_lowered": {}}

    def forget(self) -> None:
        """Let go of what is kept of the last choice: megabytes, where others are worked on meanwhile."""
        self._weighed, self._lowered = None, {}

    def bytes(self, choice: Choice, *, splits: bool) -> ChainBytes:
        """Return what every range of blocks holds as a stage: lowered, as the simulator counts it."""
        return self._weigh(choice, splits=splits)[0]

    def copied(self, choice: Choice, totals: FloatArray, passes: FloatArray, *, splits: bool) -> FloatArray:
        """Return the seconds of blocks with those of copies to and from host memory, if anything may lie there.

        Args:
            choice: The choice.
            totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
            passes: (kinds, 3) seconds of its passes, `scheduled.pass_seconds`.
            splits: Whether the backward is split.
        """
        _, links = self._weigh(choice, splits=splits)
        if links is None:
            return totals
        whole = totals.copy()
        whole[:, Slot.BACKWARD] = passes[:, 1]  # what is fetched runs beside the backward as it is, split or not
        found = with_host(whole, links, self._pipeline.overlap)
        found[:, Slot.BACKWARD] = totals[:, Slot.BACKWARD]
        return found

    def _weigh(self, choice: Choice, *, splits: bool) -> tuple[ChainBytes, HostLinks | None]:
        """Return the bytes of ranges of blocks, and the time of their copies if anything may lie in host memory."""
        if self._weighed is None or self._weighed[0] != choice:
            self._weighed = choice, {}
        known = self._weighed[1]
        if splits not in known:
            folded, trains = self._tables.folded, SCHEDULES[self._pipeline.schedule].trains
            blocks = assemble_blocks(self._tables, choice)
            before = self._lowered.get(splits)
            lowered = lower_blocks(blocks, folded, self._tables.resharder, splits=splits, known=before)
            self._lowered[splits] = {block: lowered[block.kind] for block in blocks}
            memory = chain_bytes(lowered, folded, trains=trains, flavours=self._flavours, host_room=self._host_room)
            known[splits] = memory, host_links(lowered, self._tables.costs) if self._offloads else None
        return known[splits]

    def peak(self, choice: Choice, split: Split) -> float:
        """Return the bytes of the fullest stage of a split, each holding what it has in flight."""
        memory, away = self.bytes(choice, splits=False), split.offload or (False,) * len(split.ranges)
        stages = zip(split.ranges, split.recompute, away, strict=True)
        return max(
            memory.peak(*blocks, self._pipeline.in_flight(stage), flavours, offload=hosted)
            for stage, (blocks, flavours, hosted) in enumerate(stages)
        )

    def hop(self, choice: Choice) -> float:
        """Return the mean seconds of handing one microbatch to the next stage, or back, over all places to cut."""
        groups, chain = self._pipeline.num_groups, self._tables.folded.chain
        if groups == 1:
            return 0.0
        memory, size = self.bytes(choice, splits=False), self._size
        sent = [memory.arriving[kind] for kind in chain[1:]]
        if SCHEDULES[self._pipeline.schedule].trains:
            sent += [memory.returning[kind] for kind in chain[:-1]]
        costs = self._tables.costs
        tiers = Counter(costs.cluster.boundary_tier(start, size) for start in range(0, (groups - 1) * size, size))
        amounts = Counter(sent)
        seconds = (
            many * count * costs.send_seconds(amount, tier)
            for amount, many in amounts.items()
            for tier, count in tiers.items()
        )
        return math.fsum(seconds) / (len(sent) * (groups - 1))

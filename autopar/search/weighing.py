"""What the blocks of a choice hold and hand over, lowered, as the simulator counts it."""

import math
from collections import Counter

from autopar.formulate.memory import ChainBytes
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import Tables
from autopar.problem import Choice
from autopar.program.lower import lower_blocks
from autopar.schedule import SCHEDULES
from autopar.search.blocks import assemble_blocks
from autopar.simulate.ranges import chain_bytes


class Weighing:
    """Weighs choices; that of the last one is kept.

    Args:
        tables: What choices are of.
        pipeline: The stages.
        size: Devices of a stage.
    """

    def __init__(self, tables: Tables, pipeline: Pipeline, size: int) -> None:
        self._tables, self._pipeline, self._size = tables, pipeline, size
        self._weighed: tuple[Choice, dict[bool, ChainBytes]] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what another process needs: what is kept is quickly found again."""
        return {**vars(self), "_weighed": None}

    def bytes(self, choice: Choice, *, splits: bool) -> ChainBytes:
        """Return what every range of blocks holds as a stage: lowered, as the simulator counts it."""
        if self._weighed is None or self._weighed[0] != choice:
            self._weighed = choice, {}
        known = self._weighed[1]
        if splits not in known:
            folded, trains = self._tables.folded, SCHEDULES[self._pipeline.schedule].trains
            blocks = assemble_blocks(self._tables, choice)
            lowered = lower_blocks(blocks, folded, self._tables.resharder, splits=splits)
            known[splits] = chain_bytes(lowered, folded, trains=trains)
        return known[splits]

    def peak(self, choice: Choice, split: Split) -> float:
        """Return the bytes of the fullest stage of a split, each holding what it has in flight."""
        memory, stages = self.bytes(choice, splits=False), zip(split.ranges, split.recompute, strict=True)
        return max(
            memory.peak(*blocks, self._pipeline.in_flight(stage), flavours)
            for stage, (blocks, flavours) in enumerate(stages)
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

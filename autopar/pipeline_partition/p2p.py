"""Seconds of handing a microbatch from stage to stage, by where the chain of blocks is cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.formulate.block_memory import FloatArray
from autopar.formulate.step_time import Hop, Split
from autopar.pipeline_partition.block_ranges import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StageTransfers:
    """Seconds of handing one microbatch to the next stage, and its gradient back.

    Attributes:
        chain: (blocks,) kind of every block.
        tiers: (stages - 1,) row of the network tier between a stage and the next; a row of zeros if they share devices.
        ahead: (tiers, kinds) seconds forward, by the kind of the receiving stage's first block.
        back: (tiers, kinds) seconds backward, by the kind of the receiving stage's last block; zeros in inference.
    """

    chain: IntArray
    tiers: IntArray
    ahead: FloatArray
    back: FloatArray

    def between_stages(self, ranges: Sequence[tuple[int, int]]) -> FloatArray:
        """Return the seconds between the stages of a cut, (stages - 1, 2): forward and backward."""
        starts = np.array([start for start, _ in ranges[1:]], dtype=np.int64)
        on, back = self.ahead[self.tiers, self.chain[starts]], self.back[self.tiers, self.chain[starts - 1]]
        return np.stack([on, back], axis=1)

    @property
    def least(self) -> FloatArray:
        """Lower bound on the seconds between the stages of any cut, (stages - 1, 2)."""
        on, back = self.ahead[:, self.chain[1:]].min(axis=1), self.back[:, self.chain[:-1]].min(axis=1)
        return np.stack([on[self.tiers], back[self.tiers]], axis=1)

    @property
    def mean(self) -> FloatArray:
        """Mean seconds over all places to cut, (stages - 1, 2)."""
        on, back = self.ahead[:, self.chain[1:]].mean(axis=1), self.back[:, self.chain[:-1]].mean(axis=1)
        return np.stack([on[self.tiers], back[self.tiers]], axis=1)


def hop_seconds(split: Split, hop: StageTransfers | float) -> Hop:
    """Return the hop seconds of a split; a float holds for any cut and is returned as it is."""
    return hop.between_stages(split.ranges) if isinstance(hop, StageTransfers) else hop

"""What handing a microbatch from stage to stage takes, by where the chain of blocks is cut."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.formulate.block_memory import FloatArray
from autopar.formulate.step_time import Hop, Split
from autopar.pipeline_partition.block_ranges import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """Seconds of handing one microbatch on to the next stage, and back.

    Attributes:
        chain: (blocks,) kind of every block.
        tiers: (stages - 1,) row of the tier on which a stage and the next one meet; one of zeros if that is no way.
        ahead: (tiers, kinds) of what a stage receives that begins with a block of a kind.
        back: (tiers, kinds) of what a stage receives back that ends with one; zeros in inference.
    """

    chain: IntArray
    tiers: IntArray
    ahead: FloatArray
    back: FloatArray

    def of(self, ranges: Sequence[tuple[int, int]]) -> FloatArray:
        """Return the seconds between the stages of a cut, (stages - 1, 2): on, and back."""
        starts = np.array([start for start, _ in ranges[1:]], dtype=np.int64)
        on, back = self.ahead[self.tiers, self.chain[starts]], self.back[self.tiers, self.chain[starts - 1]]
        return np.stack([on, back], axis=1)

    @property
    def least(self) -> FloatArray:
        """No less are they between the stages of any cut, (stages - 1, 2)."""
        on, back = self.ahead[:, self.chain[1:]].min(axis=1), self.back[:, self.chain[:-1]].min(axis=1)
        return np.stack([on[self.tiers], back[self.tiers]], axis=1)

    @property
    def mean(self) -> FloatArray:
        """What they are on average over all places to cut, (stages - 1, 2)."""
        on, back = self.ahead[:, self.chain[1:]].mean(axis=1), self.back[:, self.chain[:-1]].mean(axis=1)
        return np.stack([on[self.tiers], back[self.tiers]], axis=1)


def between(split: Split, hop: Hops | float) -> Hop:
    """Return the seconds between the stages of a split, of which it may be known that they are the same for any."""
    return hop.of(split.ranges) if isinstance(hop, Hops) else hop

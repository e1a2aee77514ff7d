"""What offloading to host memory adds to the passes and the update of a block.

With o and i the seconds in which what a block saves goes over the host link and comes back, s those in which the
optimizer's state does both, and f, b, u the block's forward, backward and update:

    OFFLOAD = o - min(f, (1 - e) o)    FETCH = i - min(b, (1 - e) i)    STATE = s - min(u, (1 - e) s)

e is the share of copies that overlaps nothing (`autopar.cost.overlap`). The sums are additive in blocks, so that ranges
of blocks add up as those of other slots do.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cluster.host import Host
from autopar.cost import Overlap
from autopar.formulate.tables import Slot

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class HostLinks:
    """Seconds of the host link by kind of block, (kinds,) each.

    Attributes:
        out: What a block saves of one microbatch on its way to the host.
        back: The same on its way back.
        state: The optimizer's state of a block, there and back.
    """

    out: FloatArray
    back: FloatArray
    state: FloatArray


@dataclass(frozen=True, slots=True)
class HostRates:
    """Seconds in which each device copies a byte, or more, with nothing else on the link; latency not counted.

    Attributes:
        out: To its host.
        back: From it.
        both: There and back.
    """

    out: float
    back: float
    both: float

    @classmethod
    def of(cls, host: Host) -> "HostRates":
        """Return the rates of a host's link."""
        out, back = host.sharing / host.to_host, host.sharing / host.to_device
        return cls(out, back, host.both(out, back))

    def per(self, nbytes: float) -> "HostRates":
        """Return the seconds for so many bytes."""
        return HostRates(self.out * nbytes, self.back * nbytes, self.both * nbytes)


def with_host(seconds: FloatArray, links: HostLinks, overlap: Overlap) -> FloatArray:
    """Return the seconds of blocks with the slots of the host link filled in.

    Args:
        seconds: (kinds, slots), `Tables.block_seconds`: whole passes.
        links: Time on the host link.
        overlap: How copies and compute share time.
    """
    found = seconds.copy()
    found[:, Slot.OFFLOAD] = overlap.copied(links.out, seconds[:, Slot.FORWARD])
    found[:, Slot.FETCH] = overlap.copied(links.back, seconds[:, Slot.BACKWARD])
    found[:, Slot.STATE] = overlap.copied(links.state, seconds[:, Slot.UPDATE])
    return found

"""Seconds that offload to host memory adds to the forward, backward and update of a block.

    OFFLOAD = o - min(f, (1 - e) o)    FETCH = i - min(b, (1 - e) i)    STATE = s - min(u, (1 - e) s)

Here o and i are the seconds of a block's saved activations on the host link, out and back; s the seconds of the
optimizer state, both ways; f, b, u the block's forward, backward and update; e the share of copies that overlaps
nothing (`autopar.cost.overlap`). The terms are additive over blocks, like other slots. Where the update runs on the
host, STATE is what it takes longer than on the device. Parameters and sums of gradients in host memory are copied
beside the forward and the backward in the same way.
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
    """Seconds on the host link by kind of block, (kinds,) each.

    Attributes:
        out: Saved activations of one microbatch, device to host.
        back: Saved activations of one microbatch, host to device.
        state: Optimizer state of a block, both ways.
        forward: Parameters for a forward.
        backward: Parameters and sums of gradients around a backward, both ways.
        updates: The whole update on the host, (kinds,); None if it runs on the device.
    """

    out: FloatArray
    back: FloatArray
    state: FloatArray
    forward: FloatArray | float = 0.0
    backward: FloatArray | float = 0.0
    updates: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class HostRates:
    """Seconds per byte over the host link if all devices that share the link copy at once; latency is not counted.

    Attributes:
        out: Device to host.
        back: Host to device.
        both: Both ways.
    """

    out: float
    back: float
    both: float

    @classmethod
    def of(cls, host: Host) -> "HostRates":
        """Return the rates of a host's link, shared by the devices of the host."""
        out, back = host.sharing / host.to_host, host.sharing / host.to_device
        return cls(out, back, host.both(out, back))

    def per(self, nbytes: float) -> "HostRates":
        """Return the rates multiplied by a number of bytes: seconds."""
        return HostRates(self.out * nbytes, self.back * nbytes, self.both * nbytes)


def with_host(seconds: FloatArray, links: HostLinks, overlap: Overlap) -> FloatArray:
    """Return the seconds of blocks with the slots of the host link filled in.

    Args:
        seconds: (kinds, slots) seconds as of `Tables.block_seconds`.
        links: Seconds on the host link.
        overlap: How copies and compute overlap.
    """
    found = seconds.copy()
    found[:, Slot.OFFLOAD] = overlap.copied(links.out, seconds[:, Slot.FORWARD])
    found[:, Slot.FETCH] = overlap.copied(links.back, seconds[:, Slot.BACKWARD])
    found[:, Slot.STATE] = overlap.copied(links.state, seconds[:, Slot.UPDATE])
    if links.updates is not None:
        found[:, Slot.STATE] = links.updates - seconds[:, Slot.UPDATE]
    for slot, link, cover in (
        (Slot.HOST_FORWARD, links.forward, Slot.FORWARD),
        (Slot.HOST_BACKWARD, links.backward, Slot.BACKWARD),
    ):
        found[:, slot] = overlap.copied(np.broadcast_to(link, len(seconds)), seconds[:, cover])
    return found

"""What a pass through a block takes, and what communication adds to it that compute only partly hides.

With c the seconds of kernels, w those of them that only make gradients of parameters, x those of collectives that
compute waits for, a those of gathers of parameters, and k seconds of the host to launch its kernels:

    forward  = both(k, c + x + a - s min(c, (1 - e) a))
    backward = both(k, c + x - s min(0.9 w, (1 - e') x) + a - s min(c - 0.9 w, (1 - e) a))
    both(k, d) = (k^3 + d^3)^(1/3)

Where tensor parallelism runs its gathers and reduce-scatters beside the products next to them (`hides_tp` of a stack),
y are the seconds of these collectives, in chunks, and x those of all others:

    forward  = both(k, c + x + y + a - s (y' + min(c - y', (1 - e) a)))                     y' = min(0.6 c, (1 - e") y)
    backward = both(k, c + x + y + a - s (x' + y' + min(c - x' - y', (1 - e) a)))           x' = min(0.9 w, (1 - e') x)
                                                                                y' = min(0.6 (c - x'), (1 - e") y)

Where rows of routed experts travel beside shared experts (`covers_rows` of a stack), r are the seconds of these
transfers, v those of the kernels of shared experts, which c counts, too, and v_w those of v that only make gradients of
parameters, which w counts, too:

    r' = min(v, (1 - e_r) r)                           hidden transfers, which save s' = s - 0.17 of their seconds
    left = w - max(0, r' - (v - v_w))                  weight gradients that cover no rows, to be read for w above

and c - r' is to be read for c in the minima above; a pass adds r - s' r'.

Host and device work beside each other, but not for a whole pass: where one of them waits for the other in some parts of
a block and is waited for in others, both show. The cube is between their sum and their maximum and far from neither.

A gather of parameters runs beside the compute of the block before; equal blocks are alike, so the block's own compute
stands for it. A collective of the backward runs beside the products that make gradients of parameters, as in
Megatron-LM (Korthikanti et al., 2022, arXiv:2205.05198): nothing waits for these.
`e` is the share of communication that overlaps nothing, see `Overlap.exposed`.

While compute and communication run together, both are slower by a factor (Hetu-Galvatron measured 1.13): h seconds of
each take slowdown h, so that hiding h seconds saves s = 2 - slowdown of each.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autopar.cluster import Cluster, Host
from autopar.cost.arrays import FloatArray
from autopar.cost.collectives import Collective
from autopar.cost.model import CostModel
from autopar.cost.stack import Stack
from autopar.ir.routing import Routed
from autopar.recompute import STATE_KINDS, Hosted
from autopar.sharding import Axis

WEIGHT_COVER = 0.9
"""Share of the seconds of weight-gradient products that a collective can run beside."""
LEAST_WAIT = 0.15
"""Least share of collectives in the backward that is waited for; both fit the backward of the 22B model of Korthikanti
et al., table 4, on 8 A100."""
LEAST_CHUNKED = 0.125
"""Least share of collectives in chunks that is waited for: reduce-scatters are pipelined in 4 chunks, the last of which
has nothing to run beside; gathers, of as many bytes, in a ring that begins with the device's own chunk, or whole beside
another product (NVIDIA/dgxc-benchmarking, nemo_megatron/gpt3_175b_hydra.yaml, ub_tp_comm_overlap_cfg: num_splits 4;
method ring_exchange or bulk). PyTorch's async TP runs both in rings of as many chunks as devices."""
CHUNK_COVER = 0.6
"""Share of a pass's kernels that a collective in chunks can run beside: products of linear layers, of which a chunk has
nothing beside it. By hand: they are 71 to 87 % of the seconds of a layer of Llama-3 8B and 70B at tp 8 on H100 by this
cost model, and 7 of 8 chunks have a collective beside them."""
LEAST_GATHER = 0.05
"""Least share of gathers of parameters that is waited for: the first one of a pass has nothing to run beside. By hand,
for passes of 20 blocks."""
BUCKET_BYTES = 25e6
"""Gradients are reduced in buckets of so many bytes at least; the default of PyTorch's DistributedDataParallel."""
MEMBER_BYTES = 2e6
"""Bytes of a bucket per device of a group, so that a ring's latency, which grows with the group, stays a small share.

Megatron-Core (`DistributedDataParallel`, bucket_size) takes 1,000,000 parameters per device, here of 2 bytes."""

TRANSIT_BLOCKS = 2
"""Blocks whose saved values are on their way to or from the host at once: one goes out, one comes in."""
STATE_BUFFERS = 3
"""Buckets of the optimizer's state on a device, where it lies in host memory: one that comes, one that is updated, and
one that goes."""
STATE_BUCKET_BYTES = 100e6
"""Bytes of such a bucket: by hand, large enough that its copies take many times their latency."""

LEAST_ROWS = 0.0
"""Least share of rows of experts that is waited for beside shared experts: the first projection and its activation run
beside the dispatch and the last projection beside the combination, which both can cover whole."""

DISPATCH_PROCESSORS = 0.17
"""Share of multiprocessors that dispatchers hold while they run beside compute: 24 of 132 or 148, and 32 on racks
(`moe_deepep_num_sms` and `moe_hybridep_num_sms` of NVIDIA/Megatron-LM, examples/moe_recipes)."""

LAUNCH_EXPONENT = 3.0
"""How far host and device hide each other. Fit to 240 of vTrain's step times on A100, in many of which both take about
as long: errors on unseen rows are 9.0 % with the maximum, 7.8 % with 6 and 7.2 % with 3."""

LEAST_COPY = LEAST_GATHER
"""Least share of copies to and from the host that is waited for: the last copy out of a pass, or the first one in, has
nothing to run beside. By hand, as that of gathers."""

Seconds = TypeVar("Seconds", float, FloatArray)
Bytes = TypeVar("Bytes", float, FloatArray)


def launched(device: Seconds, host: Seconds) -> Seconds:
    """Return what a pass takes that keeps the device busy for so long, and the host that launches it.

    >>> [round(float(launched(device, host)), 2) for device, host in ((2.0, 0.0), (1.0, 1.0), (10.0, 1.0))]
    [2.0, 1.26, 10.0]
    """
    longer, shorter = np.maximum(device, host), np.minimum(device, host)
    ratio = shorter / np.maximum(longer, 1e-30)
    seconds: Seconds = longer * (1.0 + ratio**LAUNCH_EXPONENT) ** (1.0 / LAUNCH_EXPONENT)
    return seconds


def state_buffers(state: Bytes, what: Hosted = Hosted.OPTIMIZER) -> Bytes:
    """Return the bytes on a device of state that lies on its host, while it is updated: none if that runs there.

    Args:
        state: Bytes of state on the host.
        what: What of it lies there.
    """
    most = 0.0 if STATE_KINDS[what].updates_there else STATE_BUFFERS * STATE_BUCKET_BYTES
    buffers: Bytes = np.minimum(most, state)
    return buffers


def state_seconds(host: Host, what: Hosted, state: float) -> float:
    """Return what the state of a copy of a parameter adds to an update: nothing hides its way or the host's update.

    Args:
        host: The host.
        what: What of the state of blocks lies in its memory.
        state: Bytes of the optimizer's state of the copy.
    """
    return host.update_seconds(2 * state) if STATE_KINDS[what].updates_there else host.there_and_back(state)


@dataclass(frozen=True, slots=True)
class Rows(Generic[Seconds]):
    """Rows of experts that travel in a pass, and the shared experts beside which they may.

    Attributes:
        seconds: Seconds of the transfers.
        cover: Seconds of the kernels of shared experts.
        weight_cover: Seconds of the kernels of shared experts that only make gradients of parameters.
    """

    seconds: Seconds
    cover: Seconds
    weight_cover: Seconds


@dataclass(frozen=True, slots=True)
class Overlap:
    """How compute and communication share time.

    Attributes:
        slowdown: Factor on both while both run, 1 to 2.
        share: Share of communication that could overlap and does not, 0 to 1.
        held: Share of a device's multiprocessors that kernels of the transfer occupy while compute runs, 0 to 1.
        chunked: Whether some collectives run in chunks beside the products next to them, as of `Stack.hides_tp`.
        shared: Whether rows of experts travel beside shared experts, as of `Stack.covers_rows`.
    """

    slowdown: float = 1.0
    share: float = 0.0
    held: float = 0.0
    chunked: bool = False
    shared: bool = False

    @classmethod
    def of(cls, stack: Stack) -> "Overlap":
        """Return what a software stack makes of it."""
        held = DISPATCH_PROCESSORS if stack.hides_dispatch else 0.0
        return cls(stack["overlap_slowdown"], stack["exposed_share"], held, stack.hides_tp, stack.covers_rows)

    @property
    def saving(self) -> float:
        """Seconds saved per second of communication that runs beside compute."""
        return 2.0 - self.slowdown

    def exposed(self, least: float) -> float:
        """Return the share of communication that is waited for, `least` being that of a stack that hides all it can."""
        return self.share + (1.0 - self.share) * least

    def price(self, least: float) -> float:
        """Return a lower bound on the seconds that a second of such communication adds, whatever there is to cover."""
        return 1.0 - self.saving * (1.0 - self.exposed(least))

    @property
    def rows_saving(self) -> float:
        """Seconds saved per second of rows of experts that travel beside shared experts."""
        return max(0.0, self.saving - DISPATCH_PROCESSORS) if self.shared else 0.0

    @property
    def rows_price(self) -> float:
        """Lower bound on the seconds that a second of rows of experts adds, however long shared experts take."""
        return 1.0 - self.rows_saving * (1.0 - self.exposed(LEAST_ROWS))

    def added(
        self,
        kernels: Seconds,
        weight: Seconds,
        collectives: Seconds,
        chunked: Seconds,
        gathers: Seconds,
        *,
        rows: "Rows[Seconds] | None" = None,
    ) -> tuple[Seconds, Seconds, Seconds, Seconds]:
        """Return what communication adds to the kernels of a pass: collectives, those in chunks, gathers, and rows.

        Args:
            kernels: Seconds of all kernels.
            weight: Seconds of those that only make gradients of parameters; 0 in a forward.
            collectives: Seconds of collectives that compute waits for and that run whole.
            chunked: Seconds of those that run in chunks beside the products next to them.
            gathers: Seconds of gathers of parameters.
            rows: Rows of experts that travel beside shared experts; None if there are none.
        """
        travelling = beside = 0.0 * kernels
        if rows is not None:
            travelling = rows.seconds
            beside = np.minimum(rows.cover, (1.0 - self.exposed(LEAST_ROWS)) * rows.seconds) if self.shared else beside
            weight = weight - np.maximum(0.0, beside - (rows.cover - rows.weight_cover))
            kernels = kernels - beside
        whole = np.minimum(WEIGHT_COVER * weight, (1.0 - self.exposed(LEAST_WAIT)) * collectives)
        parts = 0.0 * chunked
        cover = kernels - WEIGHT_COVER * weight
        if self.chunked:
            parts = np.minimum(CHUNK_COVER * (kernels - whole), (1.0 - self.exposed(LEAST_CHUNKED)) * chunked)
            cover = kernels - whole - parts
        hidden = np.minimum(cover, (1.0 - self.exposed(LEAST_GATHER)) * gathers)
        return (
            collectives - self.saving * whole,
            chunked - self.saving * parts,
            gathers - max(0.0, self.saving - self.held) * hidden,
            travelling - self.rows_saving * beside,
        )

    def copied(self, link: Seconds, cover: Seconds) -> Seconds:
        """Return what copies to or from the host add to a pass of `cover` seconds, `link` being their time on the link.

        They run beside compute and collectives alike, those of the neighbouring block; equal blocks are alike, so the
        block's own pass stands for its neighbour's. Copy engines move them: nothing is slower for it.
        """
        copied: Seconds = link - np.minimum(cover, (1.0 - self.exposed(LEAST_COPY)) * link)
        return copied

    def forward(
        self,
        kernels: Seconds,
        collectives: Seconds,
        chunked: Seconds,
        gathers: Seconds,
        *,
        rows: "Rows[Seconds] | None" = None,
    ) -> Seconds:
        """Return the seconds of a forward through a block, as fast as the host launches it."""
        return self.backward(kernels, 0.0 * kernels, collectives, chunked, gathers, rows=rows)

    def backward(
        self,
        kernels: Seconds,
        weight: Seconds,
        collectives: Seconds,
        chunked: Seconds,
        gathers: Seconds,
        *,
        rows: "Rows[Seconds] | None" = None,
    ) -> Seconds:
        """Return the seconds of a backward; `kernels` counts `weight`, those that only make gradients of parameters."""
        whole, parts, gathered, travelling = self.added(kernels, weight, collectives, chunked, gathers, rows=rows)
        return kernels + whole + parts + gathered + travelling


HIDING = Overlap()
"""All that can overlap does, and nothing is slower for it: the software stack of a user who names none."""


def full_bucket(axis: Axis, nbytes: float | None = None) -> float:
    """Return the bytes from which on a bucket of gradients that an axis reduces is full.

    Args:
        axis: The devices of a group.
        nbytes: What it is set to; None for what frameworks do, 0 if every gradient travels alone.

    >>> full_bucket(Axis("dp", 8, 1)), full_bucket(Axis("dp", 64, 1)), full_bucket(Axis("dp", 64, 1), 1e6)
    (25000000.0, 128000000.0, 1000000.0)
    """
    return max(BUCKET_BYTES, MEMBER_BYTES * axis.size) if nbytes is None else nbytes


def bucket_share(most: Seconds, full: float) -> Seconds:
    """Return how many times what one tensor hands to collectives its bucket hands to them.

    A bucket is closed by the tensor that fills it, which on the mean is half too large for it. What a bucket holds goes
    through all its collectives together, so that one that deals with shards deals with less than a full bucket.

    Args:
        most: The most bytes of the tensor that any of its collectives deals with.
        full: Bytes from which on a bucket is full; 0 if every tensor travels alone.

    >>> [round(float(bucket_share(most, 25e6)), 2) for most in (1e6, 25e6, 100e6)]
    [25.5, 1.5, 1.0]
    """
    share: Seconds = np.maximum(1.0, full / np.maximum(most, 1.0) + 0.5)
    return share


@dataclass(frozen=True, slots=True)
class Bucketed:
    """A cost model for tensors that travel in buckets with others: small ones pay their share of a full bucket.

    So a hundred gradients of a quarter of a megabyte cost as much as one bucket, not a hundred latencies more.

    Attributes:
        costs: What a bucket costs.
        nbytes: Bytes of a full bucket, as of `full_bucket`.
    """

    costs: CostModel
    nbytes: float | None = None

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return self.costs.cluster

    def collective_seconds(
        self, collective: Collective | str, nbytes: FloatArray, axis: Axis, routed: Routed | None = None
    ) -> FloatArray:
        """Return the seconds of collectives of `nbytes`, as `CostModel.collective_seconds` does of lonely ones."""
        return self.carrying(0.0).collective_seconds(collective, nbytes, axis, routed)

    def carrying(self, nbytes: float | FloatArray) -> "Carried":
        """Return the costs of a tensor that begins with so many bytes on a device, or of several of them."""
        return Carried(self.costs, self.nbytes, nbytes)


@dataclass(frozen=True, slots=True)
class Carried:
    """A cost model for the collectives, one after the other, of tensors that travel in buckets.

    Attributes:
        costs: What a bucket costs.
        full: Bytes of a full bucket, as of `full_bucket`.
        start: Bytes of a tensor on a device before the first of them.
    """

    costs: CostModel
    full: float | None
    start: float | FloatArray

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return self.costs.cluster

    def collective_seconds(
        self, collective: Collective | str, nbytes: FloatArray, axis: Axis, routed: Routed | None = None
    ) -> FloatArray:
        """Return the seconds of collectives of `nbytes`, as `CostModel.collective_seconds` does of lonely ones."""
        many = bucket_share(np.maximum(nbytes, self.start), full_bucket(axis, self.full))
        return self.costs.collective_seconds(collective, many * nbytes, axis, routed) / many

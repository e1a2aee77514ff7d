"""Gradients of one backward on a rank: they wait for their buckets, which leave in the order of the program."""

from collections.abc import Mapping

from autopar.program.bucket_order import Bucket, Departures, Member
from autopar.program.records import Collective
from autopar.ranks.collectives import Pending, begin_together
from autopar.ranks.communicator import Communicator, Group, Memory, Tensor


class GradientTraffic:
    """The buckets of one backward of a stage.

    Args:
        buckets: In the order in which they leave.
        groups: Ranks by mesh axis.
        communicator: Reaches them.
        memory: Where tensors live.
        departed: Gets the names of the buckets as they leave.
    """

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        groups: Mapping[str, Group],
        communicator: Communicator,
        memory: Memory,
        departed: list[str],
    ) -> None:
        self._departed = departed
        self._departures = Departures(buckets)
        self._groups, self._communicator, self._memory = groups, communicator, memory
        self._offered: dict[Member, tuple[Collective, Tensor]] = {}
        self._pending: dict[Member, Pending] = {}
        self._turn = 0  # blocks whose backward has run
        self._left_in: dict[Member, int] = {}

    def __contains__(self, member: Member) -> bool:
        """Return whether a gradient travels in one of the buckets."""
        return member in self._departures

    def offer(self, member: Member, collective: Collective, tensor: Tensor) -> None:
        """Take a gradient; the tensor must stay as it is until its bucket is waited for."""
        self._offered[member] = (collective, tensor)
        self._departures.offer(member)

    def depart(self) -> bool:
        """Start the buckets whose turn it is and whose gradients are all there; return whether there was one."""
        buckets = self._departures.take()
        for bucket in buckets:
            items = [self._offered.pop(member) for member in bucket.members]
            started = begin_together(items, self._groups[bucket.key[1]], self._communicator, self._memory)
            self._pending.update(zip(bucket.members, started, strict=True))
            self._left_in.update(dict.fromkeys(bucket.members, self._turn))
            self._departed.append(bucket.name)
        return bool(buckets)

    def end_turn(self) -> None:
        """Take note that the backward of one more block has run."""
        self._turn += 1

    def has_left(self, member: Member, *, before_this_turn: bool = False) -> bool:
        """Return whether the bucket of a gradient has left, or had before the block whose turn it is."""
        return member in self._left_in and not (before_this_turn and self._left_in[member] == self._turn)

    def wait(self, member: Member) -> Tensor:
        """Return what the collective has made of a gradient."""
        return self._pending.pop(member).wait()

    @property
    def are_over(self) -> bool:
        """Whether all buckets have left."""
        return self._departures.are_over

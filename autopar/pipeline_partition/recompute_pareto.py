"""What the blocks of a stage recompute, each its own: the mixtures of flavours that no other beats.

A mixture says of every block of a range whether it recomputes nothing, selectively or in full, or keeps what it saves
in host memory. Block by block the seconds that run again, the bytes kept per microbatch and the fullest moment of a
pass follow from those of the range without its last block, so mixtures that another one beats in all three are dropped
at once: equal blocks in another order, above all. A range of equal blocks is left with as many mixtures as have another
number of each flavour. Where blocks may offload, a mixture also has to be beaten in what forwards wait for (only what
backwards do gives reductions time to hide), in bytes under way, and in bytes on the host if those are limited.

What a block keeps depends on what earlier blocks keep of values that pass through, so that only mixtures that keep all
of them that another one keeps beat it. Of chains in which that comes to many cases (long skips), a mixture is taken to
keep only what all keep, which is never too little; mixtures of one flavour are counted exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from autopar.cost import Overlap
from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.formulate.block_memory import ChainBytes, FloatArray, Holding, State
from autopar.formulate.constraints import FREE, Constraints, Mask
from autopar.formulate.link_seconds import again_links, backward_links, forward_links, gradient_links, reduce_links
from autopar.formulate.step_time import copy_seconds, left_seconds, rerun_seconds, slow_seconds, stage_seconds
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.block_ranges import IntArray, Windows
from autopar.recompute import Recompute

MOST, MOST_OF_ALL = 128, 1 << 17
"""Mixtures kept per range; of more, so many are kept evenly, the fastest and the smallest among them. Where ranges are
few, as of one stage that has all blocks, as many per range as come to so many in all ranges."""

STATES = 8
"""Ways in which values that pass through may be kept that are told apart."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Bytes of windows whatever they recompute, (windows,) each; see `ChainBytes`.

    Attributes:
        resident: There all the time.
        gathered: Gathered parameters.
        reducing: Gradients under way to their reduction.
        received: What arrives from the neighbouring stages.
        update: Fullest moment of the update.
        state: Of what is there all the time, the optimizer's state, which can lie in host memory.
        least: What no longer window has less of.
    """

    resident: FloatArray
    gathered: FloatArray
    reducing: FloatArray
    received: FloatArray
    update: FloatArray
    state: FloatArray
    least: FloatArray

    @property
    def beside(self) -> FloatArray:
        """What is there beside any pass."""
        return self.gathered + self.reducing + self.received


@dataclass(frozen=True, slots=True, eq=False)
class Mixtures:
    """The mixtures of each window, those of one flavour first; (windows, mixtures) arrays.

    Attributes:
        seconds: t_s of `autopar.formulate.step_time`; infinity where there is no mixture.
        tails: tail_s.
        slow: slow_s.
        copying: (windows,) what tail_s is longer by with the optimizer's state in host memory.
        again: Seconds that run again, or wait for copies from and to the host.
        kept: Bytes that one microbatch leaves behind.
        running: Fullest moment of a forward or a backward, no other microbatch counted.
        transit: Bytes on their way to and from the host while a pass runs.
        hosted: Bytes that one microbatch leaves in host memory.
        fixed: What depends on the window alone.
        grows: (windows,) whether a window with more blocks behind it might fit.
    """

    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    copying: FloatArray
    again: FloatArray
    kept: FloatArray
    running: FloatArray
    transit: FloatArray
    hosted: FloatArray
    fixed: "Fixed"
    grows: Mask
    _windows: Windows
    _flavours: tuple[Recompute, ...]
    _source: IntArray
    _flavour: IntArray

    @property
    def lengths(self) -> IntArray:
        """(windows,) blocks of each window."""
        return self._windows.stop - self._windows.start

    def peaks(self, in_flight: int, *, offload: bool = False) -> FloatArray:
        """Return the peak bytes of each mixture with so many microbatches in flight, the running one counted.

        Args:
            in_flight: Microbatches in flight.
            offload: Whether the optimizer's state lies in host memory.
        """
        state = self.fixed.state if offload else np.zeros(len(self.fixed.state))
        passes = (in_flight - 1) * self.kept + self.running + self.transit + self.fixed.beside[:, None]
        update = self.fixed.update + state_buffers(state)
        return np.asarray((self.fixed.resident - state)[:, None] + np.maximum(passes, update[:, None]))

    def host_bytes(self, in_flight: int, *, offload: bool = False) -> FloatArray:
        """Return the bytes of a device that lie in host memory, for each mixture; arguments as of `peaks`."""
        state = self.fixed.state if offload else np.zeros(len(self.fixed.state))
        return np.asarray(state[:, None] + in_flight * self.hosted)

    def flavours(self, window: int, mixture: int) -> tuple[Recompute, ...]:
        """Return what each block of a window recomputes."""
        count = len(self._flavours)
        if mixture < count:
            return (self._flavours[mixture],) * int(self._windows.stop[window] - self._windows.start[window])
        mixture -= count
        found = []
        while window >= 0:
            found.append(self._flavours[self._flavour[window, mixture]])
            window, mixture = int(self._windows.parent[window]), int(self._source[window, mixture])
        return tuple(reversed(found))


def mixtures(
    found: Windows,
    totals: FloatArray,
    memory: ChainBytes,
    overlap: Overlap,
    limit: float,
    in_flight: tuple[int, int],
    constraints: Constraints = FREE,
    together: int = 1,
) -> Mixtures:
    """Return the mixtures of windows.

    Args:
        found: The windows of the chain of blocks.
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: What ranges of blocks hold.
        overlap: How compute and communication share time.
        limit: Bytes per device.
        in_flight: Microbatches that every stage holds at least, and at most.
        constraints: What blocks may keep, and whether the optimizer's state may lie in host memory. Blocks of a window
            that stand for others may do the same.
        together: Stages that share a device.
    """
    keeps = constraints.keeps
    sums = _Sums(found, totals[np.asarray(memory.chain)])
    fixed = _fixed(found, memory, hosts_optimizer=constraints.hosts_optimizer)
    room = limit - fixed.least
    last = np.asarray(memory.chain)[found.stop - 1]
    forth = np.array([copy_seconds(totals, flavour) for flavour in memory.flavours]).T[last]
    again = forth + np.array([rerun_seconds(totals, flavour) for flavour in memory.flavours]).T[last]
    zero = np.zeros(len(totals))
    hosted = np.array([memory.hosted if own is Recompute.OFFLOAD else zero for own in memory.flavours]).T[last]
    transit = TRANSIT_BLOCKS * hosted
    gathers = np.array([again_links(totals, flavour).sum(axis=0) for flavour in memory.flavours]).T[last]
    gradient, waited = sums.by_link(gradient_links), sums.by_link(backward_links)
    due = (1 - overlap.share) * sums.by_link(reduce_links) + gradient
    spent = sums.of(Slot.BACKWARD) - waited  # what each link has time for, of all blocks but the last
    spent -= totals[last, Slot.BACKWARD] - backward_links(totals)[:, last]
    owed = (due - spent).max(axis=0)
    first = found.parent < 0
    owed[first] = due.sum(axis=0)[first]
    closed = np.zeros(again.shape)  # bytes that are too many for any device
    if keeps:
        allowed = [[flavour in keeps[block] for flavour in memory.flavours] for block in (found.stop - 1).tolist()]
        closed[~np.array(allowed)] = np.inf
    whole = _uniform(found, memory, Added(again, gathers, forth, transit, hosted), owed, closed)
    each, source, flavour = np.zeros((len(last), 0, 8)), np.zeros((len(last), 0), int), np.zeros((len(last), 0), int)
    waiting = in_flight[0] - 1
    fullest = (in_flight[1] - 1) * whole[:, 0, 2] + whole[:, 0, 3] + fixed.beside + fixed.resident
    if len(memory.flavours) > 1 and (together * fullest > limit).any():
        from autopar.pipeline_partition.partition_kernel import frontiers  # compiling is loaded when it is needed only

        held = _holdings(found, memory)
        each, number, source, flavour = frontiers(
            found.parent, np.zeros(len(owed)), owed, again, gathers,
            held.own, held.kept, held.running, closed, held.late, held.after, held.covers,
            forth, transit, hosted, room, _host_room(memory, in_flight[1]), waiting,
            max(MOST, MOST_OF_ALL // len(owed)),
        )  # fmt: skip
        each[np.arange(each.shape[1]) >= number[:, None], 3] = np.inf
    rows = np.concatenate([whole, each], axis=1)
    passes = sums.of(Slot.FORWARD)[:, None] + sums.of(Slot.BACKWARD)[:, None] + rows[..., 0]
    total, busiest = sums.of(Slot.GRADIENT)[:, None], np.zeros(passes.shape)
    for on_link, before in zip(gradient, waited + sums.by_link(forward_links), strict=True):
        # Which link has what runs again is not told apart here: it counts on both.
        busy = np.where(on_link > 0, on_link + before, -np.inf)[:, None] + rows[..., 1]
        busiest = np.maximum(busiest, busy)
    left = left_seconds(rows[..., 4], passes, total, busiest, overlap)
    return Mixtures(
        seconds=stage_seconds(passes, total, busiest, overlap),
        tails=left + overlap.share * sums.of(Slot.REDUCE)[:, None] + sums.of(Slot.UPDATE)[:, None],
        slow=slow_seconds(sums.of(Slot.REDUCE)[:, None], left, overlap),
        copying=sums.of(Slot.STATE),
        again=rows[..., 0],
        kept=rows[..., 2],
        running=rows[..., 3],
        transit=rows[..., 6],
        hosted=rows[..., 7],
        fixed=fixed,
        grows=(waiting * rows[..., 2] + rows[..., 3] + rows[..., 6] <= room[:, None]).any(axis=1),
        _windows=found,
        _flavours=memory.flavours,
        _source=source,
        _flavour=flavour,
    )


def _host_room(memory: ChainBytes, in_flight: int) -> float:
    """Return the bytes of host memory per device; infinity if all that a chain could leave there fits."""
    chain = np.asarray(memory.chain)
    most = in_flight * float(memory.hosted[chain].sum()) + float(memory.state[chain].sum())
    return np.inf if most <= memory.host_room else memory.host_room


class _Sums:
    """Sums of seconds over the blocks of windows."""

    def __init__(self, found: Windows, blocks: FloatArray) -> None:
        self._found, self._blocks = found, blocks

    def of(self, slot: Slot) -> FloatArray:
        return self.all(self._blocks[:, slot])

    def by_link(self, links: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Return (2, windows) seconds of what `links` makes of blocks."""
        return np.array([self.all(each) for each in links(self._blocks)])

    def all(self, blocks: FloatArray) -> FloatArray:
        sums = np.concatenate([[0.0], np.cumsum(blocks)])
        return np.asarray(sums[self._found.stop] - sums[self._found.start])


def _fixed(found: Windows, memory: ChainBytes, *, hosts_optimizer: bool) -> Fixed:
    from autopar.pipeline_partition.partition_kernel import fullest  # compiling is loaded when it is needed only

    chain = np.asarray(memory.chain)
    own = _Sums(found, chain).all(memory.resident[chain]) + memory.buffers
    state = _Sums(found, chain).all(memory.state[chain])
    resident = own.copy()
    for shared in memory.shared:
        owned = (found.start <= shared.owner) & (shared.owner < found.stop)
        size = np.zeros(len(owned))
        for reader, amount in shared.readers:
            size = np.where((found.start <= reader) & (reader < found.stop), np.maximum(size, amount), size)
        resident += size * ~owned
    first, last = chain[found.start], chain[found.stop - 1]
    gathered, reducing, update = memory.gathered[last], memory.reducing[last], memory.update[last]
    pairs, reducing, update = fullest(found.parent, gathered, reducing, update)
    received = np.where(found.start > 0, memory.arriving[first], 0.0)
    received = received + np.where(found.stop < len(chain), memory.returning[last], 0.0)
    least = own + pairs + reducing - (state if hosts_optimizer else 0.0)
    return Fixed(resident, pairs, reducing, received, update, state, least)


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """What the last block of a window adds, by flavour; (windows, flavours) each, see `partition_kernel.frontiers`."""

    again: FloatArray
    gathers: FloatArray
    forth: FloatArray
    transit: FloatArray
    hosted: FloatArray


def _uniform(found: Windows, memory: ChainBytes, added: Added, late: FloatArray, closed: FloatArray) -> FloatArray:
    """Return the rows of the mixtures of one flavour, (windows, flavours, 8); `late` without what runs again."""
    from autopar.pipeline_partition.partition_kernel import uniform  # compiling is loaded when it is needed only

    bytes_of = np.empty((3, len(found.parent), len(memory.flavours)))
    for number, flavour in enumerate(memory.flavours):

        def advance(kind: int, state: State, flavour: Recompute = flavour) -> tuple[Holding, State]:
            return memory.walk.advance(kind, flavour, state)

        own, each = _walked(found, memory.chain, memory.walk.enter, advance)
        amounts = [(holding.kept, max(holding.forward, holding.backward), holding.late) for holding in each]
        bytes_of[:, :, number] = np.array(amounts)[own].T
    kept, running, put_off = bytes_of
    return uniform(
        found.parent, late, added.again, added.gathers, kept, running + closed, put_off,
        added.forth, added.transit, added.hosted,
    )  # fmt: skip


def _walked(
    found: Windows, chain: Sequence[int], enter: Callable[[int], S], advance: Callable[[int, S], tuple[T, S]]
) -> tuple[IntArray, list[T]]:
    """Walk through the blocks of all windows.

    A chain of equal blocks comes to few states, so that each block is looked at once in each of them.

    Args:
        found: The windows.
        chain: Kind of every block.
        enter: Returns the state before a first block of a kind.
        advance: Returns what a block of a kind adds in a state, and the state after it.

    Returns:
        (windows,) numbers of what the last blocks add, and what that is.
    """
    states: list[S] = []
    number_of: dict[S, int] = {}
    known: dict[tuple[int, int], tuple[int, int]] = {}
    added: list[T] = []
    own: list[int] = []
    after: list[int] = []
    last = np.asarray(chain)[found.stop - 1]
    for before, kind in zip(found.parent.tolist(), last.tolist(), strict=True):
        key = kind, after[before] if before >= 0 else -1
        step = known.get(key)
        if step is None:
            what, state = advance(kind, states[key[1]] if before >= 0 else enter(kind))
            number = number_of.setdefault(state, len(states))
            if number == len(states):
                states.append(state)
            step = known[key] = len(added), number
            added.append(what)
        own.append(step[0])
        after.append(step[1])
    return np.array(own), added


@dataclass(frozen=True, slots=True, eq=False)
class _Holdings:
    """Bytes and seconds of the last block of a window; (windows, states, flavours) arrays.

    The arrays are those of `partition_kernel.frontiers`.

    Each has one row for all windows that are alike in this, whose numbers are in `own`, (windows,).
    """

    own: IntArray
    kept: FloatArray
    running: FloatArray
    late: FloatArray
    after: IntArray
    covers: IntArray


def _holdings(found: Windows, memory: ChainBytes) -> _Holdings:
    walk, flavours = memory.walk, len(memory.flavours)
    steps: list[tuple[list[list[tuple[Holding, State]]], tuple[State, ...]]] = []

    def advance(kind: int, states: tuple[State, ...]) -> tuple[int, tuple[State, ...]]:
        advanced = [[walk.advance(kind, flavour, state) for flavour in memory.flavours] for state in states]
        following = tuple(dict.fromkeys(state for row in advanced for _, state in row))
        if len(following) > STATES:
            following = (walk.meet(following),)
        steps.append((advanced, following))
        return len(steps) - 1, following

    own, _ = _walked(found, memory.chain, lambda kind: (walk.enter(kind),), advance)
    count = len(steps)
    kept, running = (np.zeros((count, STATES, flavours)) for _ in range(2))
    late, after = np.zeros(count), np.zeros((count, STATES, flavours), dtype=np.int64)
    covers = np.zeros((count, STATES, STATES), dtype=np.int64)
    for step, (advanced, following) in enumerate(steps):
        for number, row in enumerate(advanced):
            for flavour, (holding, state) in enumerate(row):
                kept[step, number, flavour] = holding.kept
                running[step, number, flavour] = max(holding.forward, holding.backward)
                late[step] = max(late[step], holding.late)
                after[step, number, flavour] = following.index(state) if state in following else 0
        for one, other in product(range(len(following)), repeat=2):
            covers[step, one, other] = walk.meet((following[one], following[other])) == following[other]
    return _Holdings(own, kept, running, late, after, covers)


def special_blocks(memory: ChainBytes) -> Sequence[tuple[int, ...]]:
    """Return groups of blocks that hold more than others of their kind: owners and readers of shared parameters."""
    groups = (((shared.owner,), tuple(reader for reader, _ in shared.readers)) for shared in memory.shared)
    return [group for pair in groups for group in pair]

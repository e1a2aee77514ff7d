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

import numpy as np

from autopar.cost import Overlap
from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.links import again_links, backward_links, forward_links, gradient_links, reduce_links
from autopar.formulate.memory import ChainBytes, FloatArray, State
from autopar.formulate.step import copy_seconds, left_seconds, rerun_seconds, slow_seconds, stage_seconds
from autopar.formulate.tables import Slot
from autopar.formulate.windows import IntArray, Windows
from autopar.recompute import Recompute

MOST = 128
"""Mixtures kept per range; of more, so many are kept evenly, the fastest and the smallest among them."""

STATES = 8
"""Ways in which values that pass through may be kept that are told apart."""


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
        seconds: t_s of `autopar.formulate.step`; infinity where there is no mixture.
        tails: tail_s.
        slow: slow_s.
        copying: (windows,) what tail_s is longer by with the optimizer's state in host memory.
        again: Seconds that run again, or wait for copies from and to the host.
        kept: Bytes that one microbatch leaves behind.
        running: Fullest moment of a forward or a backward, no other microbatch counted.
        transit: Bytes on their way to and from the host while a pass runs.
        hosted: Bytes that one microbatch leaves in host memory.
        fixed: What depends on the window alone.
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
    _windows: Windows
    _flavours: tuple[Recompute, ...]
    _source: IntArray
    _flavour: IntArray

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
    if (
        len(memory.flavours) > 1
        and (waiting * whole[:, 0, 2] + whole[:, 0, 3] + fixed.beside + fixed.resident > limit).any()
    ):
        from autopar.formulate.kernel import frontiers  # compiling is loaded when it is needed only

        held = _holdings(found, memory)
        each, number, source, flavour = frontiers(
            found.parent, np.zeros(len(owed)), owed, again, gathers,
            held.kept, held.running + closed[:, None, :], held.late, held.after, held.covers,
            forth, transit, hosted, room, _host_room(memory, in_flight[1]), waiting, MOST,
        )  # fmt: skip
        each[np.arange(MOST) >= number[:, None], 3] = np.inf
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
    pairs = gathered.copy()
    for window in np.flatnonzero(found.parent >= 0):
        before = found.parent[window]
        pairs[window] = max(pairs[before], gathered[window] + gathered[before])
        reducing[window] = max(reducing[window], reducing[before])
        update[window] = max(update[window], update[before])
    received = np.where(found.start > 0, memory.arriving[first], 0.0)
    received = received + np.where(found.stop < len(chain), memory.returning[last], 0.0)
    least = own + pairs + reducing - (state if hosts_optimizer else 0.0)
    return Fixed(resident, pairs, reducing, received, update, state, least)


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """What the last block of a window adds, by flavour; (windows, flavours) each, see `kernel.frontiers`."""

    again: FloatArray
    gathers: FloatArray
    forth: FloatArray
    transit: FloatArray
    hosted: FloatArray


def _uniform(found: Windows, memory: ChainBytes, added: Added, late: FloatArray, closed: FloatArray) -> FloatArray:
    """Return the rows of the mixtures of one flavour, (windows, flavours, 8); `late` without what runs again."""
    each = []
    places = list(zip(found.parent.tolist(), found.stop.tolist(), late.tolist(), strict=True))
    for number, flavour in enumerate(memory.flavours):
        states: list[State] = []
        rows: list[tuple[float, ...]] = []
        own = (added.again, added.gathers, added.forth, added.transit, added.hosted, closed)
        columns = zip(places, *(array[:, number].tolist() for array in own), strict=True)
        for (before, stop, due), seconds, gathered, waited, moved, hosted, too_much in columns:
            kind = memory.chain[stop - 1]
            state = states[before] if before >= 0 else memory.walk.enter(kind)
            holding, state = memory.walk.advance(kind, flavour, state)
            states.append(state)
            again, parameters, kept, running, owed, forth, transit, there = rows[before] if before >= 0 else (0.0,) * 8
            fullest = max(running + holding.late, kept + max(holding.forward, holding.backward) + too_much)
            rows.append(
                (
                    again + seconds, parameters + gathered, kept + holding.kept, fullest,
                    max(owed, due - (again - forth)), forth + waited, max(transit, moved), there + hosted,
                )
            )  # fmt: skip
        each.append(rows)
    return np.array(each).transpose(1, 0, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Holdings:
    """What the last blocks of windows keep and need; (windows, states, flavours) arrays, see `kernel.frontiers`."""

    kept: FloatArray
    running: FloatArray
    late: FloatArray
    after: IntArray
    covers: IntArray


def _holdings(found: Windows, memory: ChainBytes) -> _Holdings:
    count, flavours = len(found.parent), len(memory.flavours)
    kept, running = (np.zeros((count, STATES, flavours)) for _ in range(2))
    late, after = np.zeros(count), np.zeros((count, STATES, flavours), dtype=np.int64)
    covers = np.zeros((count, STATES, STATES), dtype=np.int64)
    known: dict[tuple[int, tuple[State, ...]], int] = {}
    states: list[tuple[State, ...]] = []
    for window, (before, stop) in enumerate(zip(found.parent.tolist(), found.stop.tolist(), strict=True)):
        kind = memory.chain[stop - 1]
        key = (kind, states[before] if before >= 0 else (memory.walk.enter(kind),))
        if key in known:
            same = known[key]
            kept[window], running[window], late[window] = kept[same], running[same], late[same]
            after[window], covers[window] = after[same], covers[same]
            states.append(states[same])
            continue
        known[key] = window
        advanced = [[memory.walk.advance(kind, flavour, state) for flavour in memory.flavours] for state in key[1]]
        following = tuple(dict.fromkeys(state for row in advanced for _, state in row))
        if len(following) > STATES:
            following = (memory.walk.meet(following),)
        for number, row in enumerate(advanced):
            for own, (holding, state) in enumerate(row):
                kept[window, number, own] = holding.kept
                running[window, number, own] = max(holding.forward, holding.backward)
                late[window] = max(late[window], holding.late)
                after[window, number, own] = following.index(state) if state in following else 0
        for one, other in product(range(len(following)), repeat=2):
            covers[window, one, other] = memory.walk.meet((following[one], following[other])) == following[other]
        states.append(following)
    return _Holdings(kept, running, late, after, covers)


def special_blocks(memory: ChainBytes) -> Sequence[tuple[int, ...]]:
    """Return groups of blocks that hold more than others of their kind: owners and readers of shared parameters."""
    groups = (((shared.owner,), tuple(reader for reader, _ in shared.readers)) for shared in memory.shared)
    return [group for pair in groups for group in pair]

"""What the blocks of a stage recompute, each its own: the mixtures of flavours that no other beats.

A mixture says of every block of a range whether it recomputes nothing, selectively or in full. Block by block the
seconds that run again, the bytes kept per microbatch and the fullest moment of a pass follow from those of the range
without its last block, so mixtures that another one beats in all three are dropped at once: equal blocks in another
order, above all. A range of equal blocks is left with as many mixtures as have another number of each flavour.

What a block keeps depends on what earlier blocks keep of values that pass through, so that only mixtures that keep all
of them that another one keeps beat it. Of chains in which that comes to many cases (long skips), a mixture is taken to
keep only what all keep, which is never too little; mixtures of one flavour are counted exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.cost import Overlap
from autopar.formulate.links import again_links, backward_links, forward_links, gradient_links, reduce_links
from autopar.formulate.memory import ChainBytes, FloatArray, State
from autopar.formulate.step import left_seconds, rerun_seconds, slow_seconds, stage_seconds
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
        least: What no longer window has less of.
    """

    resident: FloatArray
    gathered: FloatArray
    reducing: FloatArray
    received: FloatArray
    update: FloatArray
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
        again: Seconds that run again.
        kept: Bytes that one microbatch leaves behind.
        running: Fullest moment of a forward or a backward, no other microbatch counted.
        fixed: What depends on the window alone.
    """

    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    again: FloatArray
    kept: FloatArray
    running: FloatArray
    fixed: "Fixed"
    _windows: Windows
    _flavours: tuple[Recompute, ...]
    _source: IntArray
    _flavour: IntArray

    def peaks(self, in_flight: int) -> FloatArray:
        """Return the peak bytes of each mixture with so many microbatches in flight, the running one counted."""
        passes = (in_flight - 1) * self.kept + self.running + self.fixed.beside[:, None]
        return np.asarray(self.fixed.resident[:, None] + np.maximum(passes, self.fixed.update[:, None]))

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
    least_in_flight: int,
    keeps: Sequence[frozenset[Recompute]] = (),
) -> Mixtures:
    """Return the mixtures of windows.

    Args:
        found: The windows of the chain of blocks.
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: What ranges of blocks hold.
        overlap: How compute and communication share time.
        limit: Bytes per device.
        least_in_flight: Microbatches that every stage holds at least.
        keeps: For each block what it may keep of its forward; empty for anything. Blocks of a window that stand for
            others may do the same.
    """
    sums = _Sums(found, totals[np.asarray(memory.chain)])
    fixed = _fixed(found, memory)
    room = limit - fixed.least
    last = np.asarray(memory.chain)[found.stop - 1]
    again = np.array([rerun_seconds(totals, flavour) for flavour in memory.flavours]).T[last]
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
    whole = _uniform(found, memory, again, gathers, owed, closed)
    each, source, flavour = np.zeros((len(last), 0, 5)), np.zeros((len(last), 0), int), np.zeros((len(last), 0), int)
    waiting = least_in_flight - 1
    if (
        len(memory.flavours) > 1
        and (waiting * whole[:, 0, 2] + whole[:, 0, 3] + fixed.beside + fixed.resident > limit).any()
    ):
        from autopar.formulate.kernel import frontiers  # compiling is loaded when it is needed only

        held = _holdings(found, memory)
        each, number, source, flavour = frontiers(
            found.parent, np.zeros(len(owed)), owed, again, gathers,
            held.kept, held.running + closed[:, None, :], held.late, held.after, held.covers,
            room, waiting, MOST,
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
        again=rows[..., 0],
        kept=rows[..., 2],
        running=rows[..., 3],
        fixed=fixed,
        _windows=found,
        _flavours=memory.flavours,
        _source=source,
        _flavour=flavour,
    )


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


def _fixed(found: Windows, memory: ChainBytes) -> Fixed:
    chain = np.asarray(memory.chain)
    own = _Sums(found, chain).all(memory.resident[chain]) + memory.buffers
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
    return Fixed(resident, pairs, reducing, received, update, own + pairs + reducing)


def _uniform(
    found: Windows,
    memory: ChainBytes,
    again: FloatArray,
    gathers: FloatArray,
    late: FloatArray,
    closed: FloatArray,
) -> FloatArray:
    """Return the rows of the mixtures of one flavour, (windows, flavours, 5); `late` without what runs again."""
    each = []
    places = list(zip(found.parent.tolist(), found.stop.tolist(), late.tolist(), strict=True))
    columns = zip(memory.flavours, again.T.tolist(), gathers.T.tolist(), closed.T.tolist(), strict=True)
    for flavour, seconds, traffic, over in columns:
        states: list[State] = []
        rows: list[tuple[float, float, float, float, float]] = []
        for (before, stop, due), more, gathered, too_much in zip(places, seconds, traffic, over, strict=True):
            kind = memory.chain[stop - 1]
            state = states[before] if before >= 0 else memory.walk.enter(kind)
            holding, state = memory.walk.advance(kind, flavour, state)
            states.append(state)
            ran, parameters, kept, running, owed = rows[before] if before >= 0 else (0.0, 0.0, 0.0, 0.0, 0.0)
            fullest = max(running + holding.late, kept + max(holding.forward, holding.backward) + too_much)
            rows.append((ran + more, parameters + gathered, kept + holding.kept, fullest, max(owed, due - ran)))
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

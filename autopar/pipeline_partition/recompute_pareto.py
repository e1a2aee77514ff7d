"""Recompute per block of a stage: the Pareto frontier of *mixtures* of recompute flavours.

A mixture gives every block of a range a flavour: no recompute, selective, full, or offload of saved values to host
memory. A dynamic program extends the frontier of a range by one block: rerun seconds, bytes kept per microbatch and the
fullest moment of a pass follow from those of the range without its last block, so mixtures dominated in all three are
dropped at once, above all permutations of equal blocks. With offload, a mixture must also be dominated in the seconds
forwards wait (only backward time hides reductions), in bytes in transit and, if host memory is limited, in host bytes.

What a block keeps depends on which passing values earlier blocks keep, so a mixture dominates only if it keeps all
passing values that the other keeps. In chains with many such states (long skip connections), a mixture is assumed to
keep only what all states keep, which overestimates memory; mixtures of one flavour are exact.

Recompute trades time for memory as in Chen et al. 2016 (sublinear memory) and Checkmate (Jain et al. 2020), here with
blocks as units; adaptive recompute per stage: AdaPipe (Sun et al. 2024).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from autopar.cost import Overlap
from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.formulate.block_memory import BlockHolding, ChainBytes, FloatArray, State
from autopar.formulate.constraints import FREE, Constraints, Mask
from autopar.formulate.link_seconds import backward_links, forward_links, gradient_links, recompute_links, reduce_links
from autopar.formulate.step_time import copy_seconds, left_seconds, rerun_seconds, slow_seconds, stage_seconds
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.block_ranges import IntArray, Windows
from autopar.recompute import Hosted, Recompute

MOST_MIXTURES, MOST_MIXTURES_OF_ALL = 128, 1 << 17
"""Most mixtures kept per range; a larger frontier is thinned out evenly, its fastest and smallest mixtures kept. If
there are few ranges, the second number divided by their number applies instead."""

MOST_STATES = 8
"""Most states of passing values told apart."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class WindowBytes:
    """Bytes of windows independent of recompute, (windows,) each; see `ChainBytes`.

    Attributes:
        resident: Held all the time.
        gathered: Gathered parameters.
        reducing: Gradients in reduction.
        received: Values received from the neighbouring stages.
        update: Fullest moment of the update.
        state: Optimizer state, part of `resident`, which may be in host memory.
        least: Lower bound on the fixed bytes of every longer window.
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
        """Bytes held beside any pass."""
        return self.gathered + self.reducing + self.received


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeMixtures:
    """The mixtures of each window, those of one flavour first; (windows, mixtures) arrays.

    Attributes:
        seconds: t_s of `autopar.formulate.step_time`; infinity where there is no mixture.
        tails: tail_s.
        slow: slow_s.
        again: Seconds of recompute, and of waiting for copies from and to the host.
        kept: Bytes that one microbatch leaves behind.
        running: Fullest moment of a forward or a backward, other microbatches not counted.
        transit: Bytes in transit to and from the host while a pass runs.
        hosted: Bytes that one microbatch leaves in host memory.
        fixed: Bytes that depend on the window alone.
        grows: (windows,) whether a longer window might fit.
    """

    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    again: FloatArray
    kept: FloatArray
    running: FloatArray
    transit: FloatArray
    hosted: FloatArray
    fixed: "WindowBytes"
    grows: Mask
    _windows: Windows
    _flavours: tuple[Recompute, ...]
    _source: IntArray
    _flavour: IntArray

    @property
    def first_blocks(self) -> IntArray:
        """(windows,) first block of the first range of each window."""
        return self._windows.start

    @property
    def lengths(self) -> IntArray:
        """(windows,) number of blocks."""
        return self._windows.stop - self._windows.start

    def passes(self, in_flight: int) -> FloatArray:
        """Return the bytes of each mixture beside resident ones while passes run.

        Args:
            in_flight: Microbatches in flight, including the running one.
        """
        passes = (in_flight - 1) * self.kept + self.running + self.transit
        return np.asarray(passes + self.fixed.beside[:, None])

    def peaks(
        self,
        in_flight: int,
        hosted: FloatArray | float = 0.0,
        streamed: FloatArray | float = 0.0,
        what: Hosted = Hosted.OPTIMIZER,
    ) -> FloatArray:
        """Return the peak bytes of each mixture.

        Args:
            in_flight: Microbatches in flight, including the running one.
            hosted: Bytes of state in host memory, of all mixtures or (windows, mixtures).
            streamed: Bytes beside passes of what comes from there for them, likewise.
            what: What of the state is there.
        """
        update = self.fixed.update[:, None] + state_buffers(np.asarray(hosted, dtype=np.float64), what)
        return np.asarray(self.fixed.resident[:, None] - hosted + np.maximum(self.passes(in_flight) + streamed, update))

    def host_bytes(self, in_flight: int, hosted: FloatArray | float = 0.0) -> FloatArray:
        """Return the host memory bytes of each mixture; arguments as in `peaks`."""
        return np.asarray(hosted + in_flight * self.hosted)

    def flavours(self, window: int, mixture: int) -> tuple[Recompute, ...]:
        """Return the flavour of each block of a window."""
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
) -> RecomputeMixtures:
    """Return the Pareto frontiers of mixtures of all windows.

    Args:
        found: The windows of the chain of blocks.
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: Bytes of ranges of blocks.
        overlap: Overlap of compute and communication.
        limit: Bytes per device.
        in_flight: Least and most microbatches held by any stage.
        constraints: Allowed flavours, and whether the optimizer state may be in host memory; blocks represented by one
            window have equal constraints.
        together: Stages that share a device.
    """
    keeps = constraints.keeps
    sums = _WindowSums(found, totals[np.asarray(memory.chain)])
    fixed = _fixed(found, memory, hosts_optimizer=constraints.hosts_optimizer)
    room = limit - fixed.least
    last = np.asarray(memory.chain)[found.stop - 1]
    forth = np.array([copy_seconds(totals, flavour) for flavour in memory.flavours]).T[last]
    again = forth + np.array([rerun_seconds(totals, flavour) for flavour in memory.flavours]).T[last]
    zero = np.zeros(len(totals))
    hosted = np.array([memory.hosted if own is Recompute.OFFLOAD else zero for own in memory.flavours]).T[last]
    transit = TRANSIT_BLOCKS * hosted
    gathers = np.array([recompute_links(totals, flavour).sum(axis=0) for flavour in memory.flavours]).T[last]
    gradient, waited = sums.by_link(gradient_links), sums.by_link(backward_links)
    due = (1 - overlap.share) * sums.by_link(reduce_links) + gradient
    spent = sums.of(Slot.BACKWARD) - waited  # per link, the time to hide reductions, last block excluded
    spent -= totals[last, Slot.BACKWARD] - backward_links(totals)[:, last]
    owed = (due - spent).max(axis=0)
    first = found.parent < 0
    owed[first] = due.sum(axis=0)[first]
    closed = np.zeros(again.shape)  # infinite where a flavour is forbidden
    if keeps:
        allowed = [[flavour in keeps[block] for flavour in memory.flavours] for block in (found.stop - 1).tolist()]
        closed[~np.array(allowed)] = np.inf
    whole = _uniform(found, memory, LastBlockCosts(again, gathers, forth, transit, hosted), owed, closed)
    each, source, flavour = np.zeros((len(last), 0, 8)), np.zeros((len(last), 0), int), np.zeros((len(last), 0), int)
    waiting = in_flight[0] - 1
    fullest = (in_flight[1] - 1) * whole[:, 0, 2] + whole[:, 0, 3] + fixed.beside + fixed.resident
    if len(memory.flavours) > 1 and (together * fullest > limit).any():
        from autopar.pipeline_partition.partition_kernel import frontiers  # imported late: loads the compiler

        held = _last_block_bytes(found, memory)
        each, number, source, flavour = frontiers(
            found.parent, np.zeros(len(owed)), owed, again, gathers,
            held.own, held.kept, held.running, closed, held.late, held.after, held.covers,
            forth, transit, hosted, room, _host_room(memory, in_flight[1]), waiting,
            max(MOST_MIXTURES, MOST_MIXTURES_OF_ALL // len(owed)),
        )  # fmt: skip
        each[np.arange(each.shape[1]) >= number[:, None], 3] = np.inf
    rows = np.concatenate([whole, each], axis=1)
    passes = sums.of(Slot.FORWARD)[:, None] + sums.of(Slot.BACKWARD)[:, None] + rows[..., 0]
    total, busiest = sums.of(Slot.GRADIENT)[:, None], np.zeros(passes.shape)
    for on_link, before in zip(gradient, waited + sums.by_link(forward_links), strict=True):
        # The link used by recompute is not recorded, so its gathers count on both links.
        busy = np.where(on_link > 0, on_link + before, -np.inf)[:, None] + rows[..., 1]
        busiest = np.maximum(busiest, busy)
    left = left_seconds(rows[..., 4], passes, total, busiest, overlap)
    return RecomputeMixtures(
        seconds=stage_seconds(passes, total, busiest, overlap),
        tails=left + overlap.share * sums.of(Slot.REDUCE)[:, None] + sums.of(Slot.UPDATE)[:, None],
        slow=slow_seconds(sums.of(Slot.REDUCE)[:, None], left, overlap),
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
    """Return the bytes of host memory per device; infinity if everything the chain could offload fits."""
    chain = np.asarray(memory.chain)
    state = float(memory.state[chain].sum()) + sum(shared.state * len(shared.readers) for shared in memory.shared)
    most = in_flight * float(memory.hosted[chain].sum()) + state
    return np.inf if most <= memory.host_room else memory.host_room


class _WindowSums:
    """Sums of block seconds over windows, by prefix sums."""

    def __init__(self, found: Windows, blocks: FloatArray) -> None:
        self._found, self._blocks = found, blocks

    def of(self, slot: Slot) -> FloatArray:
        return self.all(self._blocks[:, slot])

    def by_link(self, links: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Return (2, windows) seconds per link, `links` giving those of the blocks."""
        return np.array([self.all(each) for each in links(self._blocks)])

    def all(self, blocks: FloatArray) -> FloatArray:
        sums = np.concatenate([[0.0], np.cumsum(blocks)])
        return np.asarray(sums[self._found.stop] - sums[self._found.start])


def _fixed(found: Windows, memory: ChainBytes, *, hosts_optimizer: bool) -> WindowBytes:
    from autopar.pipeline_partition.partition_kernel import fullest  # imported late: loads the compiler

    chain = np.asarray(memory.chain)
    own = _WindowSums(found, chain).all(memory.resident[chain]) + memory.buffers
    state = _WindowSums(found, chain).all(memory.state[chain])
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
    return WindowBytes(resident, pairs, reducing, received, update, state, least)


@dataclass(frozen=True, slots=True, eq=False)
class LastBlockCosts:
    """What the last block of a window adds per flavour, (windows, flavours) each; see `partition_kernel.frontiers`."""

    again: FloatArray
    gathers: FloatArray
    forth: FloatArray
    transit: FloatArray
    hosted: FloatArray


def _uniform(
    found: Windows, memory: ChainBytes, added: LastBlockCosts, late: FloatArray, closed: FloatArray
) -> FloatArray:
    """Return the rows of the mixtures of one flavour, (windows, flavours, 8); `late` excludes recompute time."""
    from autopar.pipeline_partition.partition_kernel import uniform  # imported late: loads the compiler

    bytes_of = np.empty((3, len(found.parent), len(memory.flavours)))
    for number, flavour in enumerate(memory.flavours):

        def advance(kind: int, state: State, flavour: Recompute = flavour) -> tuple[BlockHolding, State]:
            return memory.walk.advance(kind, flavour, state)

        own, each = _scan_windows(found, memory.chain, memory.walk.enter, advance)
        amounts = [(holding.kept, max(holding.forward, holding.backward), holding.late) for holding in each]
        bytes_of[:, :, number] = np.array(amounts)[own].T
    kept, running, put_off = bytes_of
    return uniform(
        found.parent, late, added.again, added.gathers, kept, running + closed, put_off,
        added.forth, added.transit, added.hosted,
    )  # fmt: skip


def _scan_windows(
    found: Windows, chain: Sequence[int], enter: Callable[[int], S], advance: Callable[[int, S], tuple[T, S]]
) -> tuple[IntArray, list[T]]:
    """Evaluate the last block of every window in the state left by the blocks before it.

    A chain of equal blocks has few states, so each (kind, state) is evaluated once.

    Args:
        found: The windows.
        chain: Kind of every block.
        enter: Returns the state before a first block of a kind.
        advance: Returns what a block of a kind adds in a state, and the state after it.

    Returns:
        (windows,) index of the result of each window's last block, and the distinct results.
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
class _LastBlockBytes:
    """Bytes and seconds of the last block of a window: the (steps, ...) arrays of `partition_kernel.frontiers`.

    A step is shared by all windows with equal values; `own`, (windows,), holds the step of each window.
    """

    own: IntArray
    kept: FloatArray
    running: FloatArray
    late: FloatArray
    after: IntArray
    covers: IntArray


def _last_block_bytes(found: Windows, memory: ChainBytes) -> _LastBlockBytes:
    walk, flavours = memory.walk, len(memory.flavours)
    steps: list[tuple[list[list[tuple[BlockHolding, State]]], tuple[State, ...]]] = []

    def advance(kind: int, states: tuple[State, ...]) -> tuple[int, tuple[State, ...]]:
        advanced = [[walk.advance(kind, flavour, state) for flavour in memory.flavours] for state in states]
        following = tuple(dict.fromkeys(state for row in advanced for _, state in row))
        if len(following) > MOST_STATES:
            following = (walk.meet(following),)
        steps.append((advanced, following))
        return len(steps) - 1, following

    own, _ = _scan_windows(found, memory.chain, lambda kind: (walk.enter(kind),), advance)
    count = len(steps)
    kept, running = (np.zeros((count, MOST_STATES, flavours)) for _ in range(2))
    late, after = np.zeros(count), np.zeros((count, MOST_STATES, flavours), dtype=np.int64)
    covers = np.zeros((count, MOST_STATES, MOST_STATES), dtype=np.int64)
    for step, (advanced, following) in enumerate(steps):
        for number, row in enumerate(advanced):
            for flavour, (holding, state) in enumerate(row):
                kept[step, number, flavour] = holding.kept
                running[step, number, flavour] = max(holding.forward, holding.backward)
                late[step] = max(late[step], holding.late)
                after[step, number, flavour] = following.index(state) if state in following else 0
        for one, other in product(range(len(following)), repeat=2):
            covers[step, one, other] = walk.meet((following[one], following[other])) == following[other]
    return _LastBlockBytes(own, kept, running, late, after, covers)


def special_blocks(memory: ChainBytes) -> Sequence[tuple[int, ...]]:
    """Return groups of blocks that hold more than others of their kind: owners and readers of shared parameters."""
    groups = (((shared.owner,), tuple(reader for reader, _ in shared.readers)) for shared in memory.shared)
    return [group for pair in groups for group in pair]

"""The step time of a configuration as a linear program over its choices: a bound that sees all maxima at once.

Every term of the step time is convex in the prices of blocks: sums, and maxima of sums. So what the formula gives for a
mean of several choices is at most the mean of what it gives for each, and the least over all means is a lower bound on
the step time of every choice. With one number a_i >= 0 per choice i, sum a_i = 1, that is a linear program

    min T   such that   lhs y >= least + sum_i a_i (seconds . V_i + host),   sum_i a_i bytes_i <= limit

with V_i the prices of choice i by kind and slot, and y the seconds of passes, stages, tail and step, one row for each
term of each maximum. Blocks of the most frequent kind have flavours of recompute in any mixture: a column is a choice
and a flavour, and what a flavour adds is counted on its own columns. Each of a few parts of the pipeline, groups of
devices or several neighbours, has flavours of its own, for the first ones hold more microbatches and may have to
recompute where the last ones do not.
Where host memory may be used, y has the shares of memory that lie there, too, which make room on the device and take
the time of the host link (`HostRates`).

By duality, prices of the rows make the rest linear in V: with p >= 0, p lhs <= the cost of y,

    step >= p least + min over choices and flavours of p (seconds . V + host)

which is a placement problem per flavour. `autopar.search.hull` looks for the best prices.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost.collectives import leaves_node
from autopar.cost.overlap import LAUNCH_EXPONENT, LEAST_COPY, LEAST_GATHER, LEAST_WAIT, WEIGHT_COVER
from autopar.formulate.buffers import Buffer, BufferUse, buffers
from autopar.formulate.mean import mean_bytes, stage_weights
from autopar.formulate.memory import KEPT, RESIDENT, FloatArray
from autopar.formulate.offload import HostRates
from autopar.formulate.step import Pipeline
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.schedule.least import LeastPath

HOST_RATIOS = (0.5, 1.0, 2.0)
"""Seconds of the device over those of the host at which the mean of both (`launched`) is replaced by its tangent."""

MOST_APART = 4
"""Parts of a pipeline of which it is said apart what they hold, each a group of devices or several neighbours: each
asks for placements of its own."""

SHORTAGE = 10.0
"""Price of memory that is not there, in step times for all that there is: enough to prefer any choice that fits."""

Mask = NDArray[np.bool_]
IntArray = NDArray[np.int64]

COPIED, AWAY = "copied", "away"
"""Variables: what a block of the most frequent kind copies to the host per microbatch, where it does, and what of the
optimizer's state of a mean stage lies there; shares of the limit."""

_Pass = tuple[str, int, int | None]
"""Of a pass of a block: what it is, the kind and, where flavours differ, their number."""

Name = str | _Pass
"""Of a variable."""


@dataclass(frozen=True, slots=True, eq=False)
class StepProgram:
    """The rows of the linear program; see the top of the module for their meaning.

    Attributes:
        flavours: What the blocks of the most frequent kind do; all of them once per part where parts are apart, each
            time from the fastest to the slowest.
        cost: (variables,) weights of y in the step time; y >= 0.
        lhs: (rows, variables).
        least: (rows,) seconds; for rows of memory shares of the limit.
        seconds: (rows, flavours, kinds, slots) how often prices count.
        host: (rows, flavours) seconds that every choice adds.
        bytes: (distinct, items of `Tables.bytes`) shares of the limit per byte; the first are zero.
        bytes_of: (rows, flavours) which of them a row has: the first, if it is about seconds.
        buffers: What pairs of decisions take.
        pairs: (distinct, buffers) the same of those.
        pairs_of: (rows,) which of them.
        fixed: Seconds added to every step.
        shares: (variables,) which of y are shares of the limit; the others are seconds, or `short`.
        with_memory: (rows,) which say nothing but together with limits of memory.
    """

    flavours: tuple[Recompute, ...]
    cost: FloatArray
    lhs: FloatArray
    least: FloatArray
    seconds: FloatArray
    host: FloatArray
    bytes: FloatArray
    bytes_of: IntArray
    buffers: tuple[Buffer, ...]
    pairs: FloatArray
    pairs_of: IntArray
    fixed: float
    shares: Mask
    with_memory: Mask

    @property
    def memory_rows(self) -> Mask:
        """Which rows are about memory."""
        filled = np.asarray(self.bytes.any(axis=1))
        return np.asarray(filled[self.bytes_of].any(axis=1))

    def held(self, flavour: int, items: FloatArray, between: FloatArray) -> FloatArray:
        """Return the shares of the limit that bytes of items and of pairs take under a flavour, (rows,)."""
        return np.asarray((self.bytes @ items)[self.bytes_of[:, flavour]] + (self.pairs @ between)[self.pairs_of])

    def item_prices(self, flavour: int, paid: FloatArray) -> FloatArray:
        """Return what a byte of each item costs where a row of so much costs what is paid, (items,)."""
        return np.asarray(np.bincount(self.bytes_of[:, flavour], paid, len(self.bytes)) @ self.bytes)

    def pair_prices(self, paid: FloatArray) -> FloatArray:
        """Return the same of pairs, (buffers,)."""
        return np.asarray(np.bincount(self.pairs_of, paid, len(self.pairs)) @ self.pairs)


class _Distinct:
    """Numbers arrays of one length by what they hold; 0 is that of zeros."""

    def __init__(self, length: int) -> None:
        zeros = np.zeros(length)
        self._numbers, self._arrays = {zeros.tobytes(): 0}, [zeros]

    def number(self, array: FloatArray | None) -> int:
        """Return the number of an array, or of none."""
        if array is None:
            return 0
        found = self._numbers.setdefault(array.tobytes(), len(self._arrays))
        if found == len(self._arrays):
            self._arrays.append(array)
        return found

    @property
    def array(self) -> FloatArray:
        """All of them, (distinct, length)."""
        return np.array(self._arrays)


class _Rows:
    """Collects rows; variables are numbered in the order in which they are asked for."""

    def __init__(self, tables: Tables, flavours: tuple[Recompute, ...]) -> None:
        self.shape = (len(flavours), len(tables.folded.kinds), len(Slot))
        self.flavours, self.items = flavours, len(tables.bytes)
        self.names: dict[Name, int] = {}
        self.lhs: list[dict[int, float]] = []
        self.least: list[float] = []
        self.seconds: list[FloatArray] = []
        self.host: list[FloatArray] = []
        self.bytes = _Distinct(self.items)
        self.bytes_of: list[list[int]] = []
        self.buffers: tuple[Buffer, ...] = ()
        self.pairs: list[FloatArray | None] = []  # of as many as there are once all rows are there
        self.with_memory: list[bool] = []

    def variable(self, name: Name) -> int:
        return self.names.setdefault(name, len(self.names))

    def add(
        self,
        variables: Mapping[Name, float],
        seconds: FloatArray | None = None,
        host: FloatArray | float = 0.0,
        amounts: FloatArray | None = None,
        pairs: FloatArray | None = None,
        least: float = 0.0,
        *,
        with_memory: bool = False,
    ) -> None:
        """Add a row: the variables weighted by their numbers are at least all the rest."""
        self.lhs.append({self.variable(name): factor for name, factor in variables.items() if factor})
        self.least.append(least)
        self.seconds.append(np.zeros(self.shape) if seconds is None else seconds)
        self.host.append(np.broadcast_to(np.asarray(host, dtype=np.float64), (len(self.flavours),)))
        each = [None] * len(self.flavours) if amounts is None else list(amounts)
        self.bytes_of.append([self.bytes.number(own) for own in each])
        self.pairs.append(pairs)
        self.with_memory.append(with_memory or amounts is not None)

    def program(self, cost: Mapping[Name, float], fixed: float) -> StepProgram:
        lhs = np.zeros((len(self.lhs), len(self.names)))
        for row, factors in enumerate(self.lhs):
            for column, factor in factors.items():
                lhs[row, column] = factor
        costs = np.zeros(len(self.names))
        for name, factor in cost.items():
            if name in self.names:
                costs[self.names[name]] = factor
        pairs = _Distinct(len(self.buffers))
        pairs_of = [pairs.number(own) for own in self.pairs]
        return StepProgram(
            self.flavours,
            costs,
            lhs,
            np.array(self.least),
            np.array(self.seconds),
            np.array(self.host),
            self.bytes.array,
            np.array(self.bytes_of),
            self.buffers,
            pairs.array,
            np.array(pairs_of),
            fixed,
            np.array([name in (COPIED, AWAY) for name in self.names]),
            np.array(self.with_memory),
        )


def step_program(
    tables: Tables,
    pipeline: Pipeline,
    limit: float,
    *,
    flavours: Sequence[Recompute] = ON_DEVICE,
    fastest: Sequence[Recompute] = (),
    hosted: Collection[Hosted] = (),
    path: LeastPath | None = None,
    finely: bool = False,
) -> StepProgram:
    """Return the linear program of a configuration.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        flavours: What blocks may recompute, from fastest to slowest.
        fastest: By kind the least that its blocks recompute; nothing if not given.
        hosted: What may lie in host memory.
        path: What is known of the longest path through a step, under each of its schedules.
        finely: Whether parts of long pipelines are apart, too, which takes several times as long to price.
    """
    least = tuple(fastest) or (Recompute.NONE,) * len(tables.folded.kinds)
    return _Step(tables, pipeline, limit, tuple(flavours), least, hosted, path, finely).program()


def parts_of(num_groups: int) -> tuple[range, ...]:
    """Return the groups of a pipeline in parts of about equal length, one each if they are few.

    >>> parts_of(6)
    (range(0, 1), range(1, 3), range(3, 4), range(4, 6))
    """
    count = min(num_groups, MOST_APART)
    ends = [part * num_groups // count for part in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


class _Step:
    """Writes the rows of one configuration."""

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        limit: float,
        flavours: tuple[Recompute, ...],
        fastest: tuple[Recompute, ...],
        hosted: Collection[Hosted],
        path: LeastPath | None,
        finely: bool,
    ) -> None:
        self.fastest, self.hosted, self.path = fastest, hosted, path
        self.tables, self.pipeline, self.limit = tables, pipeline, limit
        self.overlap = pipeline.overlap
        self.kinds = tables.folded.kinds
        self.counts = np.array([kind.count for kind in self.kinds], dtype=np.float64)
        self.main = int(self.counts.argmax())
        self.trains = SCHEDULES[pipeline.schedule].trains
        allowed = flavours if self.trains else (Recompute.NONE,)
        useful = [own for own in allowed if own is not Recompute.SELECTIVE or tables.selective[self.main]]
        each = tuple(useful or allowed[:1])
        apart = pipeline.num_groups <= MOST_APART or finely
        limited = self.trains and np.isfinite(limit) and not hosted
        self.parts = parts_of(pipeline.num_groups) if apart and limited else (range(pipeline.num_groups),)
        self.flavours, self.part_of = each * len(self.parts), np.repeat(np.arange(len(self.parts)), len(each))
        self.rows = _Rows(tables, self.flavours)
        rates = HostRates.of(tables.costs.cluster.known_host()) if hosted else HostRates(0.0, 0.0, 0.0)
        self.rates = rates.per(limit - tables.folded.buffer_bytes) if np.isfinite(limit) else rates
        self.least_copy = self.overlap.exposed(LEAST_COPY)
        self.leaves = [leaves_node(axis, tables.costs.cluster.devices_per_node) for axis in tables.mesh.axes]

    def program(self) -> StepProgram:
        pipeline, rows = self.pipeline, self.rows
        groups = pipeline.num_groups
        passes = self._passes()
        self._whole: dict[Name, float] = {name: -factor for name, factor in passes.items()}
        self._groups(passes)
        rows.add({"pace": 1.0, "all": -1.0 / groups})
        if groups > 1:
            self._undivided(groups)
            self._first_block()
        else:
            self._tail()
        if np.isfinite(self.limit):
            self._memory()
        if len(self.parts) > 1:
            self._by_part(passes)
        self._flow(passes)
        return rows.program({"flow": 1.0, "tail": 1.0, "short": SHORTAGE}, pipeline.fixed)

    # Prices: matrices over flavours, kinds and slots.

    def _prices(self, kind: int, factors: Mapping[Slot, float], flavour: int | None = None) -> FloatArray:
        """Return how often prices of one instance of a kind count: under one flavour, or under all."""
        seconds = np.zeros(self.rows.shape)
        for slot, factor in factors.items():
            seconds[slice(None) if flavour is None else flavour, kind, slot] += factor
        return seconds

    def _sums(self, *slots: Slot) -> FloatArray:
        """Return how often prices of all blocks count."""
        seconds = np.zeros(self.rows.shape)
        for slot in slots:
            seconds[:, :, slot] = self.counts
        return seconds

    def _links(self, blocks: FloatArray, slots: Sequence[Slot], outside: Slot) -> list[FloatArray]:
        """Return how often prices of so many instances count that are on the link inside a node, and between nodes.

        On a mesh with one kind of link they are all on that.
        """
        whole, between = np.zeros(self.rows.shape), np.zeros(self.rows.shape)
        for slot in slots:
            whole[:, :, slot] = blocks
        between[:, :, outside] = blocks
        return [whole - between, between] if any(self.leaves) and not all(self.leaves) else [whole]

    def _gradients(self, blocks: FloatArray) -> list[FloatArray]:
        return self._links(blocks, (Slot.GRADIENT,), Slot.GRADIENT_OUTSIDE)

    def _reduced(self, blocks: FloatArray) -> list[FloatArray]:
        return self._links(blocks, (Slot.REDUCE,), Slot.REDUCE_OUTSIDE)

    def _ahead(self, blocks: FloatArray) -> list[FloatArray]:
        return self._links(blocks, (Slot.FORWARD_WAIT, Slot.FORWARD_GATHER), Slot.FORWARD_OUTSIDE)

    def _behind(self, blocks: FloatArray) -> list[FloatArray]:
        """Return the same of what a backward waits for, and of what runs again if these are all blocks that may."""
        found = self._links(blocks, (Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER), Slot.BACKWARD_OUTSIDE)
        if blocks[self.main] < self.counts[self.main]:
            return found
        main = blocks * (np.arange(len(blocks)) == self.main)
        for index, flavour in enumerate(self.flavours):
            if flavour is Recompute.FULL:
                again = self._ahead(main)
            elif flavour is Recompute.SELECTIVE:
                again = self._links(main, (Slot.SELECTIVE_WAIT, Slot.SELECTIVE_GATHER), Slot.SELECTIVE_OUTSIDE)
            else:
                continue
            for own, more in zip(found, again, strict=True):
                own[index] += more[index]
        return found

    # Rows.

    def _passes(self) -> dict[_Pass, float]:
        """Write the rows of the passes of one instance of each kind, and return the sum of all passes."""
        host, again = self.tables.host_seconds, self.tables.host_seconds_again
        total: dict[_Pass, float] = {}
        for kind, count in enumerate(self.counts):
            for index in range(len(self.flavours)) if kind == self.main else [None]:
                offloads = index is not None and self.flavours[index] is Recompute.OFFLOAD
                out, back = (self.rates.out, self.rates.back) if offloads else (0.0, 0.0)
                self._pass(("forward", kind, index), self._forward_terms(*_FORWARD), kind, index, host[kind, 0], out)
                total["forward", kind, index] = count
                if self.trains:
                    self._pass(("backward", kind, index), self._backward_terms(), kind, index, host[kind, 1], back)
                    total["backward", kind, index] = count
            if kind != self.main and self.fastest[kind] is Recompute.FULL:
                total["forward", kind, None] *= 2
        for index, flavour in enumerate(self.flavours):
            if flavour is Recompute.FULL:
                total["forward", self.main, index] *= 2
            elif flavour is Recompute.SELECTIVE:
                terms = self._forward_terms(*_AGAIN)
                self._pass(("again", self.main, index), terms, self.main, index, float(again[self.main]))
                total["again", self.main, index] = self.counts[self.main]
        return total

    def _pass(
        self,
        name: Name,
        terms: Sequence[Mapping[Slot, float]],
        kind: int,
        flavour: int | None,
        host: float,
        link: float = 0.0,
    ) -> None:
        """Write the rows of one pass: at least each term, and with what the host takes at least each tangent.

        With copies beside it, `link` seconds for a share of the limit, it takes as long as they do at least, and a part
        of them is waited for.
        """
        own = np.ones(len(self.flavours)) if flavour is None else np.eye(len(self.flavours))[flavour]
        whole = {name: 1.0, COPIED: -self.least_copy * link}
        if link:
            self.rows.add({name: 1.0, COPIED: -link})
        for term in terms:
            self.rows.add(whole, self._prices(kind, term, flavour))
            for ratio in HOST_RATIOS if host else ():
                scale = (1 + ratio**LAUNCH_EXPONENT) ** (1 / LAUNCH_EXPONENT - 1)
                device = {slot: factor * ratio ** (LAUNCH_EXPONENT - 1) * scale for slot, factor in term.items()}
                self.rows.add(whole, self._prices(kind, device, flavour), host * scale * own)
        if host:
            self.rows.add(whole, None, host * own)

    def _forward_terms(self, kernels: Slot, waits: Slot, gathers: Slot) -> list[dict[Slot, float]]:
        """Return the terms of `Overlap.forward`: gathers hide behind all kernels, or as far as any do."""
        saving = self.overlap.saving
        return [
            {kernels: 1 - saving, waits: 1.0, gathers: 1.0},
            {kernels: 1.0, waits: 1.0, gathers: self.overlap.price(LEAST_GATHER)},
        ]

    def _backward_terms(self) -> list[dict[Slot, float]]:
        """Return the terms of `Overlap.backward`, or what the halves of a split one take at least."""
        s, gather, wait = self.overlap.saving, self.overlap.price(LEAST_GATHER), self.overlap.price(LEAST_WAIT)
        if SCHEDULES[self.pipeline.schedule].splits:
            return [_backward(1 - s, 1 - s, 1.0, 1.0), _backward(1.0, 1.0, 1.0, gather)]
        cover = WEIGHT_COVER
        return [
            _backward(1 - s, 1 - s, 1.0, 1.0),
            _backward(1.0, 1 - s * cover, 1.0, gather),
            _backward(1 - s, 1 - s * (1 - cover), wait, 1.0),
            _backward(1.0, 1.0, wait, gather),
        ]

    def _groups(self, passes: Mapping[_Pass, float]) -> None:
        """Write the rows of t_s, summed over all stages: a sum of maxima is at least each maximum of sums."""
        share, slower = self.overlap.share, self.overlap.slowdown - 1
        gradient, counts = self._sums(Slot.GRADIENT), self.counts
        turns = self.pipeline.with_turns
        whole: dict[Name, float] = {"all": 1 / turns}
        whole.update({name: -factor for name, factor in passes.items()})
        self.rows.add(whole, (share + slower * (1 - share)) * gradient)
        for parts in zip(self._gradients(counts), self._ahead(counts), self._behind(counts), strict=True):
            self.rows.add({"all": 1 / turns}, sum(parts, np.zeros(self.rows.shape)))
        if slower > 0:
            slow: dict[Name, float] = {"all": 1 / turns}
            slow.update({name: -slower * factor for name, factor in passes.items()})
            self.rows.add(slow, gradient)

    def _flow(self, passes: Mapping[_Pass, float]) -> None:
        """Write what all microbatches take.

        1F1B and GPipe: sum_g t_g + (m - 1) max_g t_g. Where the backward is split, or groups hold several stages, the
        first of which may be short: what the slowest group does, m max_g t_g; what all groups do on average, and then
        update; and what the longest path has of all passes (`least_counts`), and of blocks that are alike
        (`least_path`).
        """
        pipeline, rows = self.pipeline, self.rows
        if pipeline.fills:
            rows.add({"flow": 1.0, "all": -1.0, "pace": 1.0 - pipeline.num_microbatches})
            return
        own = pipeline.num_microbatches / pipeline.num_groups
        rows.add({"flow": 1.0, "pace": -float(pipeline.num_microbatches)})
        rows.add({"flow": 1.0, "all": -own}, self._sums(Slot.UPDATE) / pipeline.num_groups)
        forward, backward = pipeline.counts
        if forward > own or backward > own:
            rows.add(self._longest(passes, forward, backward))
        if self.path is not None:
            longest = self._longest(passes, self.path.forward, self.path.backward)
            rows.add(longest, least=pipeline.with_turns * self.path.constant)

    def _longest(self, passes: Mapping[_Pass, float], forward: float, backward: float) -> dict[Name, float]:
        """Return the flow less so many times what all forwards and all backwards take."""
        turns = self.pipeline.with_turns
        path: dict[Name, float] = {"flow": 1.0}
        for name, count in passes.items():
            once = self.counts[name[1]] if name[0] == "forward" else 0.0  # what runs again is part of the backward
            path[name] = -turns * (forward * once + backward * (count - once))
        return path

    def _undivided(self, groups: int) -> None:
        """Write that the slowest group holds at least its share of any one kind, in whole blocks."""
        for kind, count in enumerate(self.counts):
            held = float(np.ceil(count / groups))
            if held * groups > count:
                passes = range(len(self.flavours)) if kind == self.main else (None,)
                names: list[Name] = [(name, kind, index) for name in ("forward", "backward") for index in passes]
                own = {name: -held for name in names if name in self.rows.names}
                self.rows.add({"pace": 1.0, **own}, self._prices(kind, {Slot.GRADIENT: held * self.overlap.share}))
                blocks = held * (np.arange(len(self.counts)) == kind)
                for parts in zip(self._gradients(blocks), self._ahead(blocks), self._behind(blocks), strict=True):
                    self.rows.add({"pace": 1.0}, sum(parts, np.zeros(self.rows.shape)))

    def _first_block(self) -> None:
        """Write that the first group waits for what its first block reduces and updates.

        So it does for what its passes and those of the others take, even if a link is busier than they are.
        """
        if self.trains and self.pipeline.fills:
            first = self.tables.folded.chain[0]
            own = {Slot.REDUCE: 1.0, Slot.GRADIENT: 1.0, Slot.UPDATE: 1.0}
            self.rows.add({"all": 1.0, "tail": 1.0, **self._whole}, self._prices(first, own))
            self.rows.add({"tail": 1.0}, self._prices(first, {Slot.UPDATE: 1.0}))
            if Hosted.OPTIMIZER in self.hosted:
                self._mean_copies()

    def _mean_copies(self) -> None:
        """Write that a mean stage waits for the copies of its optimizer's state.

        Stage s is done with its last backward earlier than stage 0, but by no more than all backwards of a microbatch.
        """
        groups = self.pipeline.num_groups
        flying = np.array([self.pipeline.in_flight(group) for group in range(groups)], dtype=np.float64)
        whole = float((1 / flying).sum() * flying.max())  # of the mean stage's bytes, see `mean_bytes`
        backwards = dict[Name, float]()
        for name, factor in self._whole.items():
            first = self.counts[int(name[1])] if name[0] == "forward" else 0.0
            backwards[name] = -factor - first
        self.rows.add({"tail": 1.0, **backwards, AWAY: -self.rates.both * whole / groups})

    def _tail(self) -> None:
        """Write what one stage does after its last backward: what that does not hide of gradients, and the update.

        t + left >= f + b + e by the formulas of `step.py`, and b in e is what is not there: f, and the backward from
        a block on, and the links of what comes after.
        """
        share, slower, rows = self.overlap.share, self.overlap.slowdown - 1, self.rows
        once = share * self._sums(Slot.REDUCE) + self._sums(Slot.UPDATE)
        away: dict[Name, float] = {AWAY: -self.least_copy * self.rates.both} if Hosted.OPTIMIZER in self.hosted else {}
        rows.add({"tail": 1.0, **away}, once)
        if not self.trains:
            return
        if away:
            rows.add({"tail": 1.0, AWAY: -self.rates.both}, share * self._sums(Slot.REDUCE))
        rest = slower * (1 - share) * self._sums(Slot.REDUCE)
        chain = self.tables.folded.chain
        for last in sorted({0, min(1, len(chain) - 1), max(0, len(chain) - 2), len(chain) - 1}):
            # The blocks up to this one are done with their backward and all they reduce comes after the blocks behind.
            before = np.bincount(chain[:last], minlength=len(self.counts)).astype(np.float64)
            upto = before.copy()
            upto[chain[last]] += 1
            time: dict[Name, float] = {"all": 1 - slower, "tail": 1.0, **away}
            for name, factor in self._lasting(before).items():
                time[name] = -(1 - slower) * factor
            reduced, gradients = self._reduced(upto), self._gradients(upto)
            for link, waited in enumerate(self._behind(before)):
                due = (1 - share) * reduced[link] + gradients[link] + waited
                rows.add(time, once + rest + (1 - slower) * due)

    def _lasting(self, before: FloatArray) -> dict[Name, float]:
        """Return the forwards of all blocks and the backwards of those that are not `before`, at least."""
        total: dict[Name, float] = {}
        for kind, count in enumerate(self.counts):
            for index in range(len(self.flavours)) if kind == self.main else (None,):
                total["forward", kind, index] = count
                total["backward", kind, index] = count - before[kind]
        return total

    def _memory(self) -> None:
        """Write that the mean stage fits."""
        amounts = self._mean(evenly=False)
        limit = self.limit - self.tables.folded.buffer_bytes
        room: dict[Name, float] = {"short": 1.0}
        if Recompute.OFFLOAD in self.flavours:
            flying = [self.pipeline.in_flight(group) for group in range(self.pipeline.num_groups)]
            room[COPIED] = float(self.counts[self.main]) / sum(1 / count for count in flying)
        if Hosted.OPTIMIZER in self.hosted:
            room[AWAY] = 1.0
        if self.pipeline.num_stages > 1:
            self.rows.add(room, amounts=amounts, least=-1.0)
            if not self.hosted:
                self.rows.add({"short": 1.0}, amounts=self._mean(evenly=True), least=-1.0)
            return
        # One stage holds all blocks, and buffers for two neighbours and for one block besides.
        self.rows.buffers = buffers(self.tables)
        chain = self.tables.folded.chain
        for first, second in dict.fromkeys(pairwise(chain)) or {(chain[0], chain[0]): None}:
            for use in (BufferUse.FORWARD, BufferUse.BACKWARD):
                together = Counter((first, second) if len(chain) > 1 else (first,))
                held = [
                    float(together[own.kind]) if own.use is use
                    else float(own.use is BufferUse.REDUCING and own.kind == self.main)
                    for own in self.rows.buffers
                ]  # fmt: skip
                self.rows.add(room, amounts=amounts, pairs=np.array(held) / limit, least=-1.0)

    def _by_part(self, passes: Mapping[_Pass, float]) -> None:
        """Write what each part of the pipeline does and holds of the most frequent kind: a block is in one of them.

        Its groups do no more than so many of the slowest group, and the mean of them, weighted as of `stage_weights`,
        holds no more than a device can.
        """
        share, slower = self.overlap.share, self.overlap.slowdown - 1
        count, limit = float(self.counts[self.main]), self.limit - self.tables.folded.buffer_bytes
        for number, groups in enumerate(self.parts):
            own = self.part_of == number
            time: dict[Name, float] = {"pace": len(groups) / self.pipeline.with_turns}
            time.update({name: -factor for name, factor in passes.items() if name[1] == self.main and own[name[2]]})
            seconds = self._prices(self.main, {Slot.GRADIENT: (share + slower * (1 - share)) * count})
            self.rows.add(time, seconds * own[:, None, None], with_memory=True)
            for evenly in (True, False) if len(groups) > 1 else (True,):
                held, kept = stage_weights(self.pipeline, groups, evenly=evenly)
                amounts = np.zeros((len(self.flavours), len(self.tables.bytes)))
                for flavour in np.flatnonzero(own):
                    for index, item in enumerate(self.tables.bytes):
                        if item.kind == self.main and item.memory in RESIDENT:
                            amounts[flavour, index] = held * count / limit
                        elif item.kind == self.main and item.memory in KEPT[self.flavours[flavour]]:
                            amounts[flavour, index] = kept * count / limit
                self.rows.add({"short": 1.0}, amounts=amounts, least=-1.0, with_memory=True)

    def _mean(self, *, evenly: bool) -> FloatArray:
        """Return the shares of the limit that a byte of each item is of a mean stage, (flavours, items)."""
        amounts = []
        least = Recompute.OFFLOAD if Hosted.ACTIVATIONS in self.hosted else Recompute.FULL
        for flavour in self.flavours:
            own = Recompute.NONE if flavour is Recompute.OFFLOAD else flavour  # less what is copied
            keeps = [own if kind.id == self.main or not self.trains else least for kind in self.kinds]
            mean = mean_bytes(self.tables, self.pipeline, self.limit, keeps, evenly=evenly)
            amounts.append(mean.factors / mean.limit)
        return np.array(amounts)


_FORWARD = (Slot.FORWARD, Slot.FORWARD_WAIT, Slot.FORWARD_GATHER)
_AGAIN = (Slot.SELECTIVE, Slot.SELECTIVE_WAIT, Slot.SELECTIVE_GATHER)


def _backward(kernels: float, weight: float, waits: float, gathers: float) -> dict[Slot, float]:
    return {
        Slot.BACKWARD: kernels,
        Slot.BACKWARD_WEIGHT: weight,
        Slot.BACKWARD_WAIT: waits,
        Slot.BACKWARD_GATHER: gathers,
    }

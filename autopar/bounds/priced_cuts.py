"""Bounds of pipelines without a closed form: blocks at prices, spread over stages (`autopar.bounds.cut_lp`).

A linear program spreads blocks of the choices known, and says at what prices others would help. At these prices a
placement problem per flavour of recompute says what a block takes at least, which is a cut for every stage of every
schedule, and a choice. A second linear program, of cuts alone, has the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.bounds.block_lp import BlockProgram
from autopar.bounds.column_generation import Hull, Solve
from autopar.bounds.cut_lp import Order, Rest, Spread, Take
from autopar.bounds.master_rows import SHARES, StepProgram
from autopar.bounds.task_lp import Basis
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import Tables
from autopar.problem import Choice

LEVELS = 8
"""Parts of the stages of a pipeline, by how many microbatches they hold, for which there are prices at first."""

PARTS = 8
"""Of the stages of a pipeline, which have prices in common later: like those that are furthest apart."""

USUAL = (1.0, 0.35)
"""What a device costs where memory has a price first, in what its blocks take for as many microbatches as there are
groups: the longer the step, the less of it is won by more room."""

FEW = 1.0
"""Microbatches that a stage counts as holding besides: where others are at their fullest, it may hold but these."""

WAITS = 0.05
"""What a second of a link costs then, in seconds of passes: most of it is hidden. What follows the last passes costs
nothing: steps mostly do not wait for it, and would have more of it in place of memory than any block does."""

APART = 0.05
"""Numbers of microbatches that differ by less, relative, are one."""

ROW_WORK = 1e5
"""Units of work per row of a linear program that spreads blocks: two thousand rows take about a fifth of a second."""

MOST_WHOLE = 16
"""Blocks of a group of which one more makes enough of a difference for a second linear program."""

ALIKE = 1e-4
"""Points are one where nothing differs by more, relative, and so are prices."""

NOTHING = 1e-9
"""Prices of a stage that are less, of the highest ones, count as none."""

SHARE = 1e-3
"""Blocks that are like a choice, of all, from which on it counts: an interior point has some of every one."""

_SHARES = np.array([take in SHARES for take in Take])


@dataclass(frozen=True, slots=True)
class Case:
    """How many blocks some group has, whether none has more, and how many none has more of in any case, if known."""

    most: int
    is_most: bool
    cap: int | None = None


class Bounded(NamedTuple):
    """What is known of a pipeline.

    Attributes:
        seconds: No step has fewer.
        case: The case that may have as few.
        basis: Where to go on.
        cuts: Numbers of the cuts that say so.
        seen: How many cuts there were.
    """

    seconds: float
    case: Case
    basis: Basis | None
    cuts: tuple[int, ...]
    seen: int


@dataclass(frozen=True, slots=True)
class Spreaded:
    """What choices known allow a pipeline.

    Attributes:
        value: Seconds of its step.
        choices: Those that its blocks are like, the most frequent first.
        rent: Seconds of the step that all the memory of a group would save at most, if it had as much again.
        cuts: Whether cuts were found that say more.
        basis: Where to go on.
    """

    value: float
    choices: tuple[Choice, ...]
    rent: float
    cuts: bool
    basis: Basis | None


class Spreader:
    """Bounds the pipelines of one mesh and one size of microbatches.

    Args:
        tables: The decisions.
        program: The program of a block.
        choices: Choices that are known.
        solve: Solves placement problems.

    Attributes:
        program: The program of a block.
    """

    def __init__(self, tables: Tables, program: BlockProgram, choices: Sequence[Choice], solve: Solve) -> None:
        self.program, self._hull, self._solve = program, Hull(tables, program.rows), solve
        for choice in choices:
            self._hull.add(choice)
        self._unit, self._work = self._hull.unit, 0.0
        self._plain = 0.0
        self._cuts: list[tuple[FloatArray, float]] = []
        self._kept: list[int] = []
        self._seen = 0

    @property
    def programs(self) -> tuple[BlockProgram, StepProgram]:
        """What need not be kept if `program` can be written anew."""
        return self.program, self._hull.rows

    @property
    def num_cuts(self) -> int:
        """How many cuts there are."""
        return len(self._cuts)

    def worked(self) -> float:
        """Return the units of work that linear programs took since this was asked last."""
        work, self._work = self._work, 0.0
        return work

    def bound(self, order: Order, rest: Rest, enough: float = math.inf, known: Bounded | None = None) -> Bounded:
        """Return what no step of a pipeline is shorter than, by what is known of blocks.

        Either no group has more than its share of whole blocks, or some group does; then more are at work longer.

        Args:
            order: The order of its tasks.
            rest: What there is besides, in seconds.
            enough: A bound that need not be raised further.
            known: What was found before: cuts that said nothing then are left out.
        """
        if not self._cuts:
            self._begin(order)
        points, _ = self._points()
        scaled, block, share = self._scaled(rest), _block(points), order.share(rest.blocks)
        seen = len(self._cuts)
        cuts = list(range(seen)) if known is None else [*known.cuts, *range(known.seen, seen)]
        start = known.basis if known is not None else None
        cap = self._cap(order, scaled, enough / self._unit)
        most = math.inf if cap is None else self._alone(order, scaled, cap + 1)  # and more take no less
        if share > MOST_WHOLE:
            either = Case(share, is_most=False, cap=cap)
            least, basis, holding = self._least(order, scaled, block, either, cuts, start)
            return Bounded(min(least, most) * self._unit, either, basis, holding, seen)
        even, more = Case(share, is_most=True), Case(share + 1, is_most=False, cap=cap)
        least, basis, holding = self._least(order, scaled, block, even, cuts, start)
        uneven = self._alone(order, scaled, more.most)
        if uneven < min(least, enough / self._unit):
            found, other, others = self._least(order, scaled, block, more, cuts, basis)
            uneven = min(max(uneven, found), most)
            basis = basis if least <= uneven else other
            holding = tuple(sorted({*holding, *others}))
        return Bounded(min(least, uneven) * self._unit, even if least <= uneven else more, basis, holding, seen)

    def _cap(self, order: Order, rest: Rest, enough: float) -> int | None:
        """Return how many blocks no group has more of in a step that takes less, in units; None if that is unknown."""
        each = self._alone(order, rest, 1) - rest.fixed
        return math.floor((enough - rest.fixed) / each) if each and enough < math.inf else None

    def _alone(self, order: Order, rest: Rest, blocks: int) -> float:
        """Return what no step is shorter than in which a group has so many blocks, in units."""
        return rest.turns * order.num_microbatches * blocks * self._plain + rest.fixed

    def _least(
        self, order: Order, rest: Rest, block: float, case: Case, cuts: Sequence[int], start: Basis | None
    ) -> tuple[float, Basis | None, tuple[int, ...]]:
        """Return the same of a case, in units, where to go on, and the cuts that say so; all that it goes on with."""
        spread = Spread(order, rest, case.most, is_most=case.is_most, cap=case.cap)
        self._work += ROW_WORK * (spread.num_rows + len(cuts) * order.num_stages)
        found = spread.of_cuts([self._cuts[number] for number in cuts], block, start)
        holding = cuts if found.basis is not None else np.array(cuts)[found.holding].tolist()
        return found.seconds, found.basis, tuple(holding)

    def spread(self, order: Order, rest: Rest, case: Case | None = None, start: Basis | None = None) -> Spreaded:
        """Spread blocks of the choices known, and add the cuts that are missing.

        Args:
            order: The order of tasks.
            rest: What there is besides, in seconds.
            case: How blocks are spread; if not given, in any way.
            start: Where to go on, if they were spread before.
        """
        points, known = self._points()
        case = Case(order.share(rest.blocks), is_most=False) if case is None else case
        spread = Spread(order, self._scaled(rest), case.most, is_most=case.is_most, cap=case.cap)
        self._work += ROW_WORK * (spread.num_rows + len(Take) * order.num_stages)
        found = spread.of_points(points, start)
        rises = False
        for prices in _parts(found.prices):
            rises |= self._cut(prices)
        chosen = found.shares.sum(axis=0)
        own = [known[index][0] for index in np.argsort(-chosen, kind="stable").tolist() if chosen[index] > SHARE]
        rent = float(found.prices[:, Take.RESIDENT].max()) * self._unit
        return Spreaded(found.seconds * self._unit, tuple(dict.fromkeys(own)), rent, rises, found.basis)

    def _scaled(self, rest: Rest) -> Rest:
        """Return the rest in units."""
        unit = self._unit
        halves = rest.halves[0] / unit, rest.halves[1] / unit
        ends = tuple(own / unit for own in rest.ends[0]), tuple(own / unit for own in rest.ends[1])
        edges = rest.edges[0] / unit, rest.edges[1] / unit
        seconds, whole, fixed, hop = (own / unit for own in (rest.seconds, rest.whole, rest.fixed, rest.hop))
        return replace(rest, halves=halves, seconds=seconds, whole=whole, fixed=fixed, ends=ends, edges=edges, hop=hop)

    def _begin(self, order: Order) -> None:
        """Add cuts at prices of no memory: of passes without what runs again, and of all that takes time."""
        prices = np.zeros(len(Take))
        prices[Take.PLAIN] = 1.0
        self._cut(prices)
        _, self._plain = self._cuts[-1]
        self._cut(_usual(order))

    def levels(self, order: Order) -> list[float]:
        """Return how many microbatches stages hold that have usual prices of memory."""
        return levels_of(order)

    def price_memory(self, order: Order, rest: Rest, levels: Sequence[float], enough: float = math.inf) -> None:
        """Add cuts at usual prices of memory: of much and some.

        What is there besides where blocks follow each other has one where they do in every group: cuts are worth
        little where that may be missing.

        Args:
            order: The order of tasks.
            rest: What there is besides, in seconds.
            levels: Microbatches that a stage holds, which say what those cost that it keeps.
            enough: A bound that need not be raised further.
        """
        if not self._cuts:
            self._begin(order)
        points, _ = self._points()
        whole = _block(points) * rest.blocks / order.num_microbatches
        prices = _usual(order)
        prices[Take.LINK], prices[Take.ONCE] = WAITS, 0.0
        even = order.share(rest.blocks)
        most = self._cap(order, self._scaled(rest), enough / self._unit) if even > MOST_WHOLE else even
        fewest = 0 if most is None else rest.blocks - most * (order.num_groups - 1)
        for held in levels:
            for share in USUAL:
                prices[Take.RESIDENT] = share * whole
                prices[Take.KEPT] = held * prices[Take.RESIDENT]
                prices[Take.BESIDE] = prices[Take.RESIDENT] * order.num_groups / rest.blocks
                prices[Take.RUNNING] = 0.0 if order.schedule.splits else prices[Take.BESIDE]
                prices[Take.NEXT] = prices[Take.BESIDE] * (fewest > order.num_chunks)
                self._cut(prices)

    def _cut(self, prices: FloatArray) -> bool:
        """Add the cut of some prices, and return whether it says more than those known, or a choice is new."""
        total = float(prices.sum())
        if total <= 0:
            return False
        own = prices / total
        hull, before = self._hull, len(self._hull.known)
        hull.reweigh(self.program.priced(own))
        hull.step(self._solve, 0.0, lambda choice: None, memory=True)
        least = hull.bound / self._unit
        known = any(np.abs(own - other).max() <= ALIKE and least <= value * (1 + ALIKE) for other, value in self._cuts)
        self._cuts.append((own, least))
        return not known or len(hull.known) > before

    def _points(self) -> tuple[FloatArray, list[tuple[Choice, int]]]:
        """Return what blocks of the choices known take, and which these are.

        Choices that another one was better than in all when they were found are left out.
        """
        points = self.program.points(self._hull.columns)
        points[:, ~_SHARES] /= self._unit
        new = np.arange(self._seen, len(points))
        for index in new[np.argsort(points[new].sum(axis=1), kind="stable")].tolist():
            near = points[self._kept] <= points[index] * (1 + ALIKE) + 1e-12
            if not near.all(axis=1).any():
                self._kept.append(index)
        self._seen = len(points)
        known = self._hull.known
        return points[self._kept], [known[index] for index in self._kept]


def _parts(prices: FloatArray) -> list[FloatArray]:
    """Return sums of prices, (stages, takes), of stages that are alike in how these are shared out.

    >>> [part.tolist() for part in _parts(np.array([[2.0, 0.0], [0.0, 1.0], [4.0, 0.0], [0.0, 0.0]]))]
    [[6.0, 0.0], [0.0, 1.0]]
    """
    totals = prices.sum(axis=1)
    own = np.flatnonzero(totals > NOTHING * totals.max(initial=0.0))
    if not len(own):
        return []
    shares = prices[own] / totals[own, None]
    middles, near = list[int](), np.full(len(own), np.inf)
    nearest = np.zeros(len(own), dtype=np.int64)
    following = int(totals[own].argmax())
    while len(middles) < PARTS and near[following] > ALIKE:
        away = np.abs(shares - shares[following]).sum(axis=1)
        nearest[away < near] = len(middles)
        near = np.minimum(near, away)
        middles.append(following)
        following = int((near * np.sqrt(totals[own])).argmax())
    return [prices[own[nearest == number]].sum(axis=0) for number in range(len(middles))]


def _usual(order: Order) -> FloatArray:
    """Return prices of passes, and of what comes once a step, of no memory."""
    prices = np.zeros(len(Take))
    prices[: Take.KEPT] = 1.0
    prices[[Take.UPDATE, Take.ONCE]] = 1 / order.num_microbatches
    return prices


def _block(points: FloatArray) -> float:
    """Return what passes of a block take at least."""
    return float(points[:, : Take.KEPT].sum(axis=1).min())


def levels_of(order: Order) -> list[float]:
    """Return how many microbatches stages hold where their group is fullest: means of parts without near ones, and few.

    The most come first: what is cheap where memory is dearest says what to pay for parts of passes elsewhere.
    """
    held = np.concatenate(
        [order.fullest(group)[:, : order.num_chunks].max(axis=0) for group in range(order.num_groups)]
    )
    found = list[float]()
    for part in np.array_split(np.sort(held), min(LEVELS, len(held))):
        mean = float(part.mean())
        if not found or mean > found[-1] * (1 + APART):
            found.append(mean)
    return [*reversed(found), FEW]

"""Lower bounds on pipelines under a memory limit, by alternating the cut LP with pricing of single blocks.

Look here for the loop between the two linear programs of `cut_lp.py`, and for the first cuts of a mesh. The inner
program over known choices has duals; at these prices a placement problem per recompute flavour bounds what a block
needs. Its bound is a cut, valid for every stage of every schedule, and its optimum a new choice. The outer program over
all cuts is the lower bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.bounds.block_lp import BlockProgram
from autopar.bounds.column_generation import ColumnGeneration, Solve
from autopar.bounds.cut_lp import Component, CutLP, RemainingCosts, TaskOrder
from autopar.bounds.master_rows import SHARE_VARIABLES, StepProgram
from autopar.bounds.task_lp import Basis
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import Tables
from autopar.problem import Choice

LEVELS = 8
"""Most levels of microbatches in flight for which memory is priced before the first bound."""

MOST_PRICES = 8
"""Most price vectors per round; stages with similar prices share one."""

LEAST_LEVEL = 1.0
"""The last level of microbatches in flight: of a stage that holds little while other stages are at their peaks."""

SAME_LEVEL = 0.05
"""Relative difference below which levels are merged."""

ROW_WORK = 1e5
"""Units of work per row of a cut LP: two thousand rows take about a fifth of a second."""

MOST_WHOLE = 16
"""Blocks per group up to which one more block differs enough to solve both cases."""

SAME_POINT = 1e-4
"""Relative difference below which points, and prices, are equal."""

NEGLIGIBLE = 1e-9
"""Share of the highest total price below which the prices of a stage are ignored."""

SHARE = 1e-3
"""Blocks of a choice from which on it counts as used: an interior point gives every choice a little."""

_SHARES = np.array([component in SHARE_VARIABLES for component in Component])


@dataclass(frozen=True, slots=True)
class BlockCase:
    """A case of the cut LP: how many blocks the fullest group has.

    Attributes:
        most: Blocks of the fullest group at least.
        is_most: Whether no group has more.
        cap: Upper bound on the blocks of any group, if known.
    """

    most: int
    is_most: bool
    cap: int | None = None


class CutBound(NamedTuple):
    """A lower bound on one pipeline, and what the next solve starts from.

    Attributes:
        seconds: Lower bound on the step.
        case: The case with the lesser bound.
        basis: Final basis of that case.
        cuts: Numbers of the cuts for the next solve: the binding ones after an interior point method, otherwise all.
        seen: Number of cuts that were known.
    """

    seconds: float
    case: BlockCase
    basis: Basis | None
    cuts: tuple[int, ...]
    seen: int


@dataclass(frozen=True, slots=True)
class InnerResult:
    """Optimum of the inner program of one pipeline.

    Attributes:
        value: Step seconds that convex combinations of known choices reach.
        choices: Choices with weight, the heaviest first.
        rent: Greatest saving in step seconds per device of additional memory.
        cuts: Whether pricing found a new cut or a new choice.
        basis: Final basis.
    """

    value: float
    choices: tuple[Choice, ...]
    rent: float
    cuts: bool
    basis: Basis | None


class CutGenerator:
    """Bounds all pipelines of one mesh and microbatch size, which share their cuts.

    Args:
        tables: The placement problem's tables.
        program: Linear program of a block.
        choices: Known choices.
        solve: Solves placement problems.

    Attributes:
        program: Linear program of a block.
    """

    def __init__(self, tables: Tables, program: BlockProgram, choices: Sequence[Choice], solve: Solve) -> None:
        self.program, self._column_generation, self._solve = program, ColumnGeneration(tables, program.rows), solve
        for choice in choices:
            self._column_generation.add(choice)
        self._unit, self._work = self._column_generation.unit, 0.0
        self._plain_seconds = 0.0
        self._cuts: list[tuple[FloatArray, float]] = []
        self._undominated: list[int] = []
        self._num_filtered = 0

    @property
    def programs(self) -> tuple[BlockProgram, StepProgram]:
        """The parts of this object that can be rebuilt from `program`, and need not be pickled."""
        return self.program, self._column_generation.rows

    @property
    def num_cuts(self) -> int:
        """Number of cuts."""
        return len(self._cuts)

    def drain_work(self) -> float:
        """Units of work of linear programs since the last call."""
        work, self._work = self._work, 0.0
        return work

    def bound(
        self, order: TaskOrder, remaining: RemainingCosts, enough: float = math.inf, known: CutBound | None = None
    ) -> CutBound:
        """Lower bound on the step of a pipeline by all known cuts: the lesser of two cases.

        Either no group has more than its share of whole blocks, or some group has at least one more, which takes
        longer. With more than `MOST_WHOLE` blocks per group one program covers both cases.

        Args:
            order: The order of its tasks.
            remaining: What it needs besides repeated blocks, in seconds.
            enough: Cutoff: a bound that need not be raised further.
            known: An earlier result: cuts that were not binding in it are left out.
        """
        if not self._cuts:
            self._add_first_cuts(order)
        points, _ = self._points()
        scaled, pass_seconds = self._in_units(remaining), _least_pass_seconds(points)
        fewest, num_cuts = order.least_of_fullest(remaining.blocks), len(self._cuts)
        cuts = list(range(num_cuts)) if known is None else [*known.cuts, *range(known.seen, num_cuts)]
        start = known.basis if known is not None else None
        cap = self._cap(order, scaled, enough / self._unit)
        # The bound of steps with a group above the cap: further blocks only lengthen the step.
        capped = math.inf if cap is None else self._step_of_blocks(order, scaled, cap + 1)
        if fewest > MOST_WHOLE:
            case = BlockCase(fewest, is_most=False, cap=cap)
            least, basis, binding = self._solve_case(order, scaled, pass_seconds, case, cuts, start)
            return CutBound(min(least, capped) * self._unit, case, basis, binding, num_cuts)
        even_case, uneven_case = BlockCase(fewest, is_most=True), BlockCase(fewest + 1, is_most=False, cap=cap)
        least, basis, binding = self._solve_case(order, scaled, pass_seconds, even_case, cuts, start)
        uneven = self._step_of_blocks(order, scaled, uneven_case.most)
        if uneven < min(least, enough / self._unit):
            solved, uneven_basis, uneven_binding = self._solve_case(
                order, scaled, pass_seconds, uneven_case, cuts, basis
            )
            uneven = min(max(uneven, solved), capped)
            basis = basis if least <= uneven else uneven_basis
            binding = tuple(sorted({*binding, *uneven_binding}))
        return CutBound(
            min(least, uneven) * self._unit, even_case if least <= uneven else uneven_case, basis, binding, num_cuts
        )

    def _cap(self, order: TaskOrder, remaining: RemainingCosts, enough: float) -> int | None:
        """Upper bound on the blocks of a group in any step below `enough` units; None if unbounded."""
        one_block = self._step_of_blocks(order, remaining, 1) - remaining.fixed
        return math.floor((enough - remaining.fixed) / one_block) if one_block and enough < math.inf else None

    def _step_of_blocks(self, order: TaskOrder, remaining: RemainingCosts, blocks: int) -> float:
        """Lower bound on the step, in units, if a group holds `blocks` blocks."""
        return remaining.turns * order.num_microbatches * blocks * self._plain_seconds + remaining.fixed

    def _solve_case(
        self,
        order: TaskOrder,
        remaining: RemainingCosts,
        block: float,
        case: BlockCase,
        cuts: Sequence[int],
        start: Basis | None,
    ) -> tuple[float, Basis | None, tuple[int, ...]]:
        """Solve the cut LP of one case: value in units, final basis, binding cuts."""
        program = CutLP(order, remaining, case.most, is_most=case.is_most, cap=case.cap)
        self._work += ROW_WORK * (program.num_rows + len(cuts) * order.num_stages)
        solution = program.solve_outer([self._cuts[number] for number in cuts], block, start)
        binding = cuts if solution.basis is not None else np.array(cuts)[solution.is_binding].tolist()
        return solution.seconds, solution.basis, tuple(binding)

    def solve_inner(
        self, order: TaskOrder, remaining: RemainingCosts, case: BlockCase | None = None, start: Basis | None = None
    ) -> InnerResult:
        """Distribute blocks over known choices, and add the cuts that the prices ask for.

        Args:
            order: The order of tasks.
            remaining: What the step needs besides repeated blocks, in seconds.
            case: The case of whole blocks; neither if not given.
            start: Final basis of the last solve.
        """
        points, known = self._points()
        case = BlockCase(order.least_of_fullest(remaining.blocks), is_most=False) if case is None else case
        program = CutLP(order, self._in_units(remaining), case.most, is_most=case.is_most, cap=case.cap)
        self._work += ROW_WORK * (program.num_rows + len(Component) * order.num_stages)
        solution = program.solve_inner(points, start)
        is_new = False
        for prices in _merged_prices(solution.prices):
            is_new |= self._add_cut(prices)
        blocks_of_point = solution.shares.sum(axis=0)
        choices = [
            known[index][0]
            for index in np.argsort(-blocks_of_point, kind="stable").tolist()
            if blocks_of_point[index] > SHARE
        ]
        rent = float(solution.prices[:, Component.RESIDENT].max()) * self._unit
        return InnerResult(solution.seconds * self._unit, tuple(dict.fromkeys(choices)), rent, is_new, solution.basis)

    def _in_units(self, remaining: RemainingCosts) -> RemainingCosts:
        """Convert the seconds of a `RemainingCosts` to units."""
        unit = self._unit
        halves = remaining.halves[0] / unit, remaining.halves[1] / unit
        ends = (
            tuple(number / unit for number in remaining.ends[0]),
            tuple(number / unit for number in remaining.ends[1]),
        )
        edges = remaining.edges[0] / unit, remaining.edges[1] / unit
        seconds, whole, fixed, hop = (
            number / unit for number in (remaining.seconds, remaining.whole, remaining.fixed, remaining.hop)
        )
        return replace(
            remaining, halves=halves, seconds=seconds, whole=whole, fixed=fixed, ends=ends, edges=edges, hop=hop
        )

    def _add_first_cuts(self, order: TaskOrder) -> None:
        """Add cuts at prices without memory: of passes without recompute, and `_base_prices`."""
        prices = np.zeros(len(Component))
        prices[Component.PLAIN] = 1.0
        self._add_cut(prices)
        _, self._plain_seconds = self._cuts[-1]
        self._add_cut(_base_prices(order))

    def levels(self, order: TaskOrder) -> list[float]:
        """Levels of microbatches in flight for `price_memory`."""
        return levels_of(order)

    def price_memory(
        self, order: TaskOrder, remaining: RemainingCosts, levels: Sequence[float], enough: float = math.inf
    ) -> None:
        """Add cuts at a standard price of memory per level.

        A device of memory costs the pass seconds of all blocks for one microbatch: the longer the step, the smaller the
        share of it that memory saves. A second, lower price per level raised no bound (docs/benchmarks/ablation.md).

        Buffers of consecutive blocks have a price only if every group certainly has consecutive blocks; otherwise such
        a cut is weak.

        Args:
            order: The order of tasks.
            remaining: What the step needs besides repeated blocks, in seconds.
            levels: Microbatches in flight of a stage: the price of kept bytes relative to resident ones.
            enough: Cutoff: a bound that need not be raised further.
        """
        if not self._cuts:
            self._add_first_cuts(order)
        points, _ = self._points()
        device_price = _least_pass_seconds(points) * remaining.blocks / order.num_microbatches
        prices = _base_prices(order)
        prices[Component.LINK] = prices[Component.LINK_ONCE] = 0.0  # most of it is hidden
        fewest_of_fullest = order.least_of_fullest(remaining.blocks)
        most_of_group = (
            self._cap(order, self._in_units(remaining), enough / self._unit)
            if fewest_of_fullest > MOST_WHOLE
            else fewest_of_fullest
        )
        least_of_group = 0 if most_of_group is None else remaining.blocks - most_of_group * (order.num_groups - 1)
        for level in levels:
            prices[Component.RESIDENT] = device_price
            prices[Component.KEPT] = level * prices[Component.RESIDENT]
            prices[Component.BUFFERS] = prices[Component.RESIDENT] * order.num_groups / remaining.blocks
            prices[Component.RUNNING] = 0.0 if order.schedule.splits else prices[Component.BUFFERS]
            prices[Component.NEXT_BUFFERS] = prices[Component.BUFFERS] * (least_of_group > order.num_chunks)
            self._add_cut(prices)

    def _add_cut(self, prices: FloatArray) -> bool:
        """Price a block and add the cut; return whether the cut is tighter than known ones or a choice is new."""
        total = float(prices.sum())
        if total <= 0:
            return False
        normalised = prices / total
        column_generation, num_known = self._column_generation, len(self._column_generation.keys)
        column_generation.reset_costs(self.program.with_prices(normalised))
        column_generation.step(self._solve, 0.0, lambda choice: None, memory=True)
        least = column_generation.bound / self._unit
        is_known = any(
            np.abs(normalised - other).max() <= SAME_POINT and least <= value * (1 + SAME_POINT)
            for other, value in self._cuts
        )
        self._cuts.append((normalised, least))
        return not is_known or len(column_generation.keys) > num_known

    def _points(self) -> tuple[FloatArray, list[tuple[Choice, int]]]:
        """Return undominated points, (points, components), and the choice and flavour of each.

        A point is dominated if a kept one is no greater in every component.
        """
        points = self.program.points(self._column_generation.columns)
        points[:, ~_SHARES] /= self._unit
        new = np.arange(self._num_filtered, len(points))
        for index in new[np.argsort(points[new].sum(axis=1), kind="stable")].tolist():
            dominates = points[self._undominated] <= points[index] * (1 + SAME_POINT) + 1e-12
            if not dominates.all(axis=1).any():
                self._undominated.append(index)
        self._num_filtered = len(points)
        known = self._column_generation.keys
        return points[self._undominated], [known[index] for index in self._undominated]


def _merged_prices(prices: FloatArray) -> list[FloatArray]:
    """Sum the prices of stages with similar proportions; return at most `MOST_PRICES` price vectors.

    Cluster centres are chosen greedily by distance and weight, as in farthest-first traversal (Gonzalez, 1985).

    >>> [part.tolist() for part in _merged_prices(np.array([[2.0, 0.0], [0.0, 1.0], [4.0, 0.0], [0.0, 0.0]]))]
    [[6.0, 0.0], [0.0, 1.0]]
    """
    totals = prices.sum(axis=1)
    priced = np.flatnonzero(totals > NEGLIGIBLE * totals.max(initial=0.0))
    if not len(priced):
        return []
    shares = prices[priced] / totals[priced, None]
    centres, distance = list[int](), np.full(len(priced), np.inf)
    centre_of = np.zeros(len(priced), dtype=np.int64)
    farthest = int(totals[priced].argmax())
    while len(centres) < MOST_PRICES and distance[farthest] > SAME_POINT:
        to_farthest = np.abs(shares - shares[farthest]).sum(axis=1)
        centre_of[to_farthest < distance] = len(centres)
        distance = np.minimum(distance, to_farthest)
        centres.append(farthest)
        farthest = int((distance * np.sqrt(totals[priced])).argmax())
    return [prices[priced[centre_of == number]].sum(axis=0) for number in range(len(centres))]


def _base_prices(order: TaskOrder) -> FloatArray:
    """Prices of passes, and per microbatch of the update and of traffic once a step; no prices of memory."""
    prices = np.zeros(len(Component))
    prices[: Component.KEPT] = 1.0
    prices[[Component.UPDATE, Component.LINK_ONCE]] = 1 / order.num_microbatches
    return prices


def _least_pass_seconds(points: FloatArray) -> float:
    """Least seconds of the passes of a block over points."""
    return float(points[:, : Component.KEPT].sum(axis=1).min())


def levels_of(order: TaskOrder) -> list[float]:
    """Typical numbers of microbatches in flight of stages at their peaks, the highest first, then `LEAST_LEVEL`.

    Stages are sorted by their peaks and averaged in `LEVELS` parts; near-equal levels are merged. High levels come
    first: choices that are cheap at the highest memory price say what to pay for passes elsewhere.
    """
    held = np.concatenate(
        [order.held_at_peaks(group)[:, : order.num_chunks].max(axis=0) for group in range(order.num_groups)]
    )
    levels = list[float]()
    for part in np.array_split(np.sort(held), min(LEVELS, len(held))):
        mean = float(part.mean())
        if not levels or mean > levels[-1] * (1 + SAME_LEVEL):
            levels.append(mean)
    return [*reversed(levels), LEAST_LEVEL]

"""Order of the cut LPs of the pipelines of one mesh and microbatch size."""

from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from autopar.bounds.cut_lp import RemainingCosts, TaskOrder
from autopar.bounds.cut_order import IDLE, PipelineBounds
from autopar.bounds.priced_cuts import BlockCase, CutBound, CutGenerator, InnerResult
from autopar.configuration import Configuration
from autopar.sharding import Mesh

FEW, MANY = (Configuration(4, Mesh.of(inner=2), 8, schedule="interleaved", num_chunks=chunks) for chunks in (2, 4))


class _ScriptedCutGenerator:
    """A cut generator with scripted results; configurations stand in for orders, which only have to be told apart.

    Args:
        bounds: By configuration, the bound of every call; the last one repeats.
        values: By configuration, value and `cuts` of every inner result.
    """

    def __init__(
        self, bounds: dict[Configuration, list[float]], values: Mapping[Configuration, Sequence[tuple[float, bool]]]
    ) -> None:
        self._bounds, self.cases, self.num_cuts = bounds, list[int](), 1
        self.priced, self.memory_cuts = list[Configuration](), 0
        self._values = {own: iter(each) for own, each in values.items()}

    def bound(
        self, order: TaskOrder, remaining: RemainingCosts, enough: float, known: CutBound | None = None
    ) -> CutBound:
        own = self._bounds[cast(Configuration, order)]
        seconds = own.pop(0) if len(own) > 1 else own[0]
        return CutBound(seconds, BlockCase(round(10 * seconds), is_most=True), None, (), self.num_cuts)

    def levels(self, order: TaskOrder) -> list[float]:
        return [1.0]

    def price_memory(self, order: TaskOrder, remaining: RemainingCosts, levels: Sequence[float], enough: float) -> None:
        self.priced.append(cast(Configuration, order))
        self.num_cuts += self.memory_cuts

    def solve_inner(self, order: TaskOrder, remaining: RemainingCosts, case: BlockCase, start: None) -> InnerResult:
        self.cases.append(case.most)
        value, cuts = next(self._values[cast(Configuration, order)])
        self.num_cuts += cuts
        return InnerResult(value, (), 0.0, cuts, None)


def _pipeline_bounds(
    bounds: dict[Configuration, list[float]], values: Mapping[Configuration, Sequence[tuple[float, bool]]]
) -> PipelineBounds:
    return PipelineBounds(
        cast(CutGenerator, _ScriptedCutGenerator(bounds, values)), list(bounds), _task, 9.0, lambda: False
    )


def _task(own: Configuration) -> tuple[TaskOrder, RemainingCosts]:
    return cast(TaskOrder, own), cast(RemainingCosts, None)


def _selected(pipeline_bounds: PipelineBounds, enough: float, *, stops: bool = False) -> list[Configuration]:
    """Return the selected pipelines, in order, until no work helps."""
    found = list[Configuration]()
    while (own := pipeline_bounds.select_pipeline(_task, enough, lambda: stops)) is not None:
        pipeline_bounds.solve_inner(own, _task, enough, lambda: stops)
        found.append(own)
        assert len(found) < 50
    return found


def test_the_least_bound_is_raised_up_to_the_cutoff() -> None:
    """Then the other pipeline is selected, if the new cuts do not raise its bound enough."""
    pipeline_bounds = _pipeline_bounds(
        {FEW: [1.0, 2.0, 4.0], MANY: [3.0, 3.2, 5.0]}, {FEW: [(9.0, True)] * 2, MANY: [(9.0, True)]}
    )

    assert _selected(pipeline_bounds, 3.5) == [FEW, FEW, MANY]
    assert pipeline_bounds.bound == 4.0
    assert cast(_ScriptedCutGenerator, pipeline_bounds.cut_generator).cases == [
        10,
        20,
        32,
    ]  # the cases that had the bound before


def test_cuts_of_one_pipeline_may_raise_the_bound_of_another() -> None:
    """Pipelines without the least bound wait; a bound that rises resets the count of idle pipeline_bounds."""
    cuts = {FEW: [(9.0, True)] * 9, MANY: [(9.0, True)] * 9}
    bounds = {FEW: [1.0, 3.0], MANY: [2.0, 4.0, 8.0]}
    raised = _pipeline_bounds(bounds, cuts)
    again = _pipeline_bounds({FEW: [1.0] * (2 + IDLE) + [1.5], MANY: [2.0]}, {**cuts, MANY: [(9.0, True)]})

    assert _selected(raised, 3.5) == [FEW] * (1 + IDLE)
    assert raised.bound == 3.0
    assert bounds[MANY] == [8.0]
    assert _selected(again, 3.0) == [FEW] * (1 + IDLE) + [MANY] + [FEW] * IDLE


def test_other_pipelines_are_solved_once_when_no_bound_rises() -> None:
    """Only once, and only while their bounds are below the cutoff."""
    bounds = {FEW: [1.0], MANY: [2.0]}
    values = {FEW: [(9.0, True)] * (1 + IDLE), MANY: [(5.0, True)]}

    assert _selected(_pipeline_bounds(bounds, values), 3.0) == [FEW] * (1 + IDLE) + [MANY]
    assert _selected(_pipeline_bounds(bounds, {FEW: values[FEW]}), 1.5) == [FEW] * (1 + IDLE)


@pytest.mark.parametrize("last", [(1.001, True), (9.0, False)])
def test_a_pipeline_is_done_when_the_gap_is_closed_or_no_cut_is_new(last: tuple[float, bool]) -> None:
    """With the outer program near the inner one, or without new cuts."""
    assert _selected(_pipeline_bounds({FEW: [1.0]}, {FEW: [last]}), 3.0) == [FEW]


def test_an_inner_value_that_falls_is_progress() -> None:
    """A better inner value counts as a rising bound does."""
    values = [(9.0 - number, True) for number in range(4)] + [(6.0, True)] * IDLE

    assert _selected(_pipeline_bounds({FEW: [1.0]}, {FEW: values}), 3.0) == [FEW] * (4 + IDLE)


def test_no_bound_is_raised_after_the_stop() -> None:
    """Nor does a bound ever fall."""
    stopped = _pipeline_bounds({FEW: [1.0, 2.0]}, {FEW: [(9.0, True)] * 9})
    falls = _pipeline_bounds({FEW: [1.0, 0.5]}, {FEW: [(9.0, True)] * 9})

    _selected(stopped, 3.0, stops=True)
    _selected(falls, 3.0)

    assert stopped.bound == falls.bound == 1.0


def test_memory_is_priced_once_a_bound_without_is_below_the_cutoff() -> None:
    """Prices are those of the first such pipeline; all other bounds follow from its cuts.

    A pipeline pruned without memory prices costs no further placement problem.
    """
    script = _ScriptedCutGenerator({FEW: [1.0, 3.0], MANY: [2.0, 2.5]}, {FEW: [(4.0, False)], MANY: [(4.0, False)]})
    script.memory_cuts = 4
    pipeline_bounds = PipelineBounds(cast(CutGenerator, script), [FEW, MANY], _task, 1.0, lambda: False)
    assert pipeline_bounds.select_pipeline(_task, 1.0, lambda: False) is None
    assert not script.priced
    assert pipeline_bounds.select_pipeline(_task, 9.0, lambda: False) is MANY
    assert script.priced == [FEW]
    assert pipeline_bounds.bound == 2.5
    pipeline_bounds.solve_inner(MANY, _task, 9.0, lambda: False)
    pipeline_bounds.select_pipeline(_task, 9.0, lambda: False)
    assert script.priced == [FEW]


def test_a_pipeline_without_a_bound_is_bounded_before_its_inner_program() -> None:
    """As after a stop before the first bound."""
    script = _ScriptedCutGenerator({FEW: [1.0], MANY: [2.0]}, {FEW: [(4.0, False)], MANY: [(4.0, False)]})
    pipeline_bounds = PipelineBounds(cast(CutGenerator, script), [FEW, MANY], _task, 9.0, lambda: True)
    assert pipeline_bounds.bound == 0.0  # without any bound
    pipeline_bounds.solve_inner(FEW, _task, 9.0, lambda: True)
    assert script.cases == [10]


def test_the_pipeline_with_most_stages_is_bounded_first() -> None:
    """It mostly has the least bound; the others then start with memory prices."""
    script = _ScriptedCutGenerator({FEW: [3.0], MANY: [1.0, 4.0]}, {})
    script.memory_cuts = 4
    pipeline_bounds = PipelineBounds(cast(CutGenerator, script), [FEW, MANY], _task, 2.0, lambda: False)

    assert script.priced == [MANY]
    assert pipeline_bounds.bound == 3.0
    assert pipeline_bounds._cut_bounds[FEW].seen == script.num_cuts

"""The order in which pipelines of one mesh and one size of microbatches are bounded by spreading blocks."""

from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from autopar.bounds.cut_lp import Order, Rest
from autopar.bounds.cut_order import IDLE, Rounds
from autopar.bounds.priced_cuts import Bounded, Case, Spreaded, Spreader
from autopar.configuration import Configuration
from autopar.sharding import Mesh

FEW, MANY = (Configuration(4, Mesh.of(inner=2), 8, schedule="interleaved", num_chunks=chunks) for chunks in (2, 4))


class _Script:
    """A spreader that says what it was told to; orders are configurations here, for they only have to be told apart.

    Args:
        bounds: By configuration what it bounds it by, first and each time it is asked again.
        values: What the choices known allow, spread by spread, and whether cuts were found.
    """

    def __init__(
        self, bounds: dict[Configuration, list[float]], values: Mapping[Configuration, Sequence[tuple[float, bool]]]
    ) -> None:
        self._bounds, self.cases, self.num_cuts = bounds, list[int](), 1
        self.priced, self.memory_cuts = list[Configuration](), 0
        self._values = {own: iter(each) for own, each in values.items()}

    def bound(self, order: Order, rest: Rest, enough: float, known: Bounded | None = None) -> Bounded:
        own = self._bounds[cast(Configuration, order)]
        seconds = own.pop(0) if len(own) > 1 else own[0]
        return Bounded(seconds, Case(round(10 * seconds), is_most=True), None, (), self.num_cuts)

    def levels(self, order: Order) -> list[float]:
        return [1.0]

    def price_memory(self, order: Order, rest: Rest, levels: Sequence[float], enough: float) -> None:
        self.priced.append(cast(Configuration, order))
        self.num_cuts += self.memory_cuts

    def spread(self, order: Order, rest: Rest, case: Case, start: None) -> Spreaded:
        self.cases.append(case.most)
        value, cuts = next(self._values[cast(Configuration, order)])
        self.num_cuts += cuts
        return Spreaded(value, (), 0.0, cuts, None)


def _rounds(
    bounds: dict[Configuration, list[float]], values: Mapping[Configuration, Sequence[tuple[float, bool]]]
) -> Rounds:
    return Rounds(cast(Spreader, _Script(bounds, values)), list(bounds), _task, 9.0, lambda: False)


def _task(own: Configuration) -> tuple[Order, Rest]:
    return cast(Order, own), cast(Rest, None)


def _done(rounds: Rounds, enough: float, *, stops: bool = False) -> list[Configuration]:
    """Return what is looked at, in order, until nothing helps."""
    found = list[Configuration]()
    while (own := rounds.next(_task, enough, lambda: stops)) is not None:
        rounds.spread(own, _task, enough, lambda: stops)
        found.append(own)
        assert len(found) < 50
    return found


def test_the_least_bound_is_raised_until_it_is_enough() -> None:
    """Then it is the turn of the other one, if the cuts that were found do not say enough of it."""
    rounds = _rounds({FEW: [1.0, 2.0, 4.0], MANY: [3.0, 3.2, 5.0]}, {FEW: [(9.0, True)] * 2, MANY: [(9.0, True)]})

    assert _done(rounds, 3.5) == [FEW, FEW, MANY]
    assert rounds.bound == 4.0
    assert cast(_Script, rounds.spreader).cases == [10, 20, 32]  # those that had the bound until then


def test_cuts_of_one_may_raise_the_other() -> None:
    """Bounds that are not the least ones wait; what has risen is worth another look."""
    cuts = {FEW: [(9.0, True)] * 9, MANY: [(9.0, True)] * 9}
    bounds = {FEW: [1.0, 3.0], MANY: [2.0, 4.0, 8.0]}
    raised = _rounds(bounds, cuts)
    again = _rounds({FEW: [1.0] * (2 + IDLE) + [1.5], MANY: [2.0]}, {**cuts, MANY: [(9.0, True)]})

    assert _done(raised, 3.5) == [FEW] * (1 + IDLE)
    assert raised.bound == 3.0
    assert bounds[MANY] == [8.0]
    assert _done(again, 3.0) == [FEW] * (1 + IDLE) + [MANY] + [FEW] * IDLE


def test_of_others_it_is_looked_up_what_they_allow_once_nothing_rises() -> None:
    """Only once, and only while their bounds leave room for a better plan."""
    bounds = {FEW: [1.0], MANY: [2.0]}
    values = {FEW: [(9.0, True)] * (1 + IDLE), MANY: [(5.0, True)]}

    assert _done(_rounds(bounds, values), 3.0) == [FEW] * (1 + IDLE) + [MANY]
    assert _done(_rounds(bounds, {FEW: values[FEW]}), 1.5) == [FEW] * (1 + IDLE)


@pytest.mark.parametrize("last", [(1.001, True), (9.0, False)])
def test_a_bound_is_done_at_what_choices_allow_or_without_cuts(last: tuple[float, bool]) -> None:
    """What is as near rises no more, nor does anything if no cut says more."""
    assert _done(_rounds({FEW: [1.0]}, {FEW: [last]}), 3.0) == [FEW]


def test_what_choices_allow_may_move_instead() -> None:
    """A plan that gets better is as good as a bound that rises."""
    values = [(9.0 - number, True) for number in range(4)] + [(6.0, True)] * IDLE

    assert _done(_rounds({FEW: [1.0]}, {FEW: values}), 3.0) == [FEW] * (4 + IDLE)


def test_no_bound_is_raised_once_there_is_no_time() -> None:
    """Nor does it ever fall."""
    stopped = _rounds({FEW: [1.0, 2.0]}, {FEW: [(9.0, True)] * 9})
    falls = _rounds({FEW: [1.0, 0.5]}, {FEW: [(9.0, True)] * 9})

    _done(stopped, 3.0, stops=True)
    _done(falls, 3.0)

    assert stopped.bound == falls.bound == 1.0


def test_memory_has_prices_once_a_bound_is_not_enough_without() -> None:
    """They are of the first one of which that is so, and the bounds of all others follow from them.

    A pipeline that is excluded without them costs no placement problem more.
    """
    script = _Script({FEW: [1.0, 3.0], MANY: [2.0, 2.5]}, {FEW: [(4.0, False)], MANY: [(4.0, False)]})
    script.memory_cuts = 4
    rounds = Rounds(cast(Spreader, script), [FEW, MANY], _task, 1.0, lambda: False)
    assert rounds.next(_task, 1.0, lambda: False) is None
    assert not script.priced
    assert rounds.next(_task, 9.0, lambda: False) is MANY
    assert script.priced == [FEW]
    assert rounds.bound == 2.5
    rounds.spread(MANY, _task, 9.0, lambda: False)
    rounds.next(_task, 9.0, lambda: False)
    assert script.priced == [FEW]


def test_what_was_not_bounded_for_want_of_time_is_bounded_when_it_is_spread() -> None:
    script = _Script({FEW: [1.0], MANY: [2.0]}, {FEW: [(4.0, False)], MANY: [(4.0, False)]})
    rounds = Rounds(cast(Spreader, script), [FEW, MANY], _task, 9.0, lambda: True)
    assert rounds.bound == 0.0  # nothing is known
    rounds.spread(FEW, _task, 9.0, lambda: True)
    assert script.cases == [10]


def test_what_has_most_stages_is_bounded_first() -> None:
    """It has the least bound, mostly: then the others are bounded at prices of memory at once."""
    script = _Script({FEW: [3.0], MANY: [1.0, 4.0]}, {})
    script.memory_cuts = 4
    rounds = Rounds(cast(Spreader, script), [FEW, MANY], _task, 2.0, lambda: False)

    assert script.priced == [MANY]
    assert rounds.bound == 3.0
    assert rounds._known[FEW].seen == script.num_cuts

"""The course of a search: what is looked at before what, and what is not looked at any more."""

import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace

import pytest

from autopar.bounds.microbatch import NO_HINT, UNKNOWN, Pace
from autopar.bounds.transfer import ALL, Carried, Learned
from autopar.configuration import Configuration, Family, closed_words, configurations, families
from autopar.describe.signature import Signature
from autopar.formulate.data_major import is_data_major
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.node_solver import Attempt
from autopar.search.outcome import Outcome, Stage, stage_of
from autopar.search.outer_data_parallel import ThirdAxis, scouts
from autopar.search.phases import (
    HURRIES,
    LATE_SECONDS,
    LATE_SHARE,
    PATIENCE,
    SETTLED,
    Advancing,
    Aside,
    Bounding,
    Clock,
    Settling,
)
from autopar.search.runners_up import RETRIES, RunnersUp
from autopar.search.tasks import Finding, Work
from autopar.sharding import Mesh

FLOORS = {1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0}
"""Of configurations by their number of microbatches."""

FAMILIES: list[Family] = [(Configuration(1, Mesh.of(inner=2), count, "1f1b"),) for count in FLOORS]


class _Known(Carried):
    """Knows what follows for some configurations as soon as another one was looked at."""

    def __init__(self, follows: Mapping[int, float]) -> None:
        floor = SimpleNamespace(samples=(1, 2))
        super().__init__(lambda samples: SimpleNamespace(), floor, SimpleNamespace(), 8)  # type: ignore[arg-type,return-value]
        self._follows, self._told = follows, False

    def learn(self, family: Family, finding: Learned) -> None:
        self._told = True

    def least(self, family: Family, cutoff: float = 0.0) -> float:
        return self._follows.get(family[0].num_microbatches, 0.0) if self._told else 0.0

    def rough(self, family: Family) -> float:
        return 0.0

    def _known(self, first: Configuration) -> tuple[float, Pace]:
        return 0.0, UNKNOWN

    def _looked_at(self, family: Family, bound: float, *_: object) -> float:
        return max(bound, self.least(family))

    def hint(self, family: Family) -> object:  # type: ignore[override]
        return NO_HINT


class _Told(_Known):
    """Knows all of it at once, and whom it was asked for."""

    def __init__(self, follows: Mapping[int, float]) -> None:
        super().__init__(follows)
        self._told, self.asked = True, list[int]()

    def least(self, family: Family, cutoff: float = 0.0) -> float:
        self.asked.append(family[0].num_microbatches)
        return super().least(family, cutoff)


@pytest.mark.parametrize("has_plan", [True, False])
def test_it_is_late_soon_after_the_search_has_stopped(has_plan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be that at its limit of time, or later where there was no plan yet."""
    now = [100.0]
    monkeypatch.setattr("autopar.search.phases.time.monotonic", lambda: now[0])
    outcome = Outcome()
    clock = Clock(SimpleNamespace(time_limit=10.0, overtime=30.0, should_stop=lambda: False), outcome)  # type: ignore[arg-type]
    if has_plan:
        clock.heard(Finding(0.0, _candidate(5.0), 0))
    late = min(LATE_SECONDS, LATE_SHARE * 10.0)
    end = 110.0 - late + (0.0 if has_plan else 30.0)

    def state(seconds: float) -> tuple[bool, bool]:
        now[0] = seconds
        return clock.stops(), clock.is_late()

    assert state(end - 0.1) == (False, False)
    assert state(end + 0.1) == (True, False)
    assert state(end + 0.1 + 0.9 * late) == (True, False)
    assert state(end + 0.2 + late) == (True, True)
    assert outcome.stopped == "time limit"


@pytest.mark.parametrize(("limit", "left"), [(10.0, 0.7 - min(LATE_SHARE, LATE_SECONDS / 10.0)), (math.inf, 1.0)])
def test_a_share_of_a_limit_is_left(limit: float, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for a last look is not; without a limit all is left."""
    now = [100.0]
    monkeypatch.setattr("autopar.search.phases.time.monotonic", lambda: now[0])
    clock = Clock(SimpleNamespace(time_limit=limit), Outcome())  # type: ignore[arg-type]

    now[0] = 103.0

    assert clock.left() == pytest.approx(left)


def _search(keep: int = 1) -> SearchContext:
    found = SimpleNamespace(
        least=lambda family: FLOORS[family[0].num_microbatches],
        threshold=lambda outcome: outcome.best,
        tell=lambda *_: None,
        keep=keep,
        spreads=lambda configuration: configuration.schedule != "1f1b",
    )
    return found  # type: ignore[return-value]


def _ahead(families: Sequence[Family]) -> list[tuple[float, int]]:
    return sorted((FLOORS[family[0].num_microbatches], number) for number, family in enumerate(families))


def _order(series: Bounding | ThirdAxis, bounds: Mapping[int, list[float]], outcome: Outcome, best: float) -> list[int]:
    """Return the microbatches of what is looked at, given what comes of it each time; a plan is known after two."""
    found: list[int] = []
    left = {count: list(each) for count, each in bounds.items()}
    while not series.ends(len(found)):
        piece = series.piece(len(found))
        assert piece is not None
        count = piece.configuration[0].num_microbatches
        found.append(count)
        bound = left[count].pop(0)
        series.take(len(found) - 1, Finding(bound, None, 0, is_final=not left[count]))
        if len(found) == 2 and math.isfinite(best):
            outcome.candidates = [_candidate(best)]
    return found


def _planned(objective: float, count: int) -> Candidate:
    """Return a plan of a family by its microbatches."""
    plan = _candidate(objective, count)
    object.__setattr__(plan, "configuration", next(own[0] for own in FAMILIES if own[0].num_microbatches == count))
    return plan


def _candidate(objective: float, stages: int = 1) -> Candidate:
    plan = SimpleNamespace(objective=objective, signature=Signature((), stages, "", 1, "none"), configuration=None)
    plan.drafted = lambda: plan
    return plan  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("follows", "best", "order", "closed"),
    [
        ({}, math.inf, [1, 2, 4, 8], math.inf),
        ({2: 9.0}, math.inf, [1, 4, 8, 2], math.inf),  # its floor is far too low: it waits
        ({2: 9.0}, 8.0, [1, 4, 8], 9.0),  # and by then a plan is faster
        ({4: 5.5, 8: 6.5}, 6.0, [1, 2, 4], 6.5),
    ],
)
def test_what_is_known_to_be_slow_waits(
    follows: dict[int, float], best: float, order: list[int], closed: float
) -> None:
    outcome = Outcome()
    bounding = Bounding(_search(), outcome, FAMILIES, _ahead(FAMILIES), math.inf, _Known(follows), rivals=True)

    found = _order(bounding, {1: [1.5], 2: [2.5], 4: [5.7], 8: [5.8]}, outcome, best)

    assert found == order
    assert bounding.closed == closed
    assert bounding.unseen == math.inf
    assert outcome.pruned == len(FAMILIES) - len(order)
    for family in FAMILIES:
        count = family[0].num_microbatches
        assert count in order or outcome.standings[family].bound == follows[count]


def test_what_nobody_looked_at_is_bounded_by_what_follows_and_no_more_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor of 1 raised to 2.5 is the least: below it is that of 2, which follows at 9, and none of the others."""
    monkeypatch.setattr("autopar.bounds.transfer.HEADS", 1)
    told = _Told({1: 2.5, 2: 9.0, 4: 9.0})
    bounding = Bounding(_search(), Outcome(), FAMILIES, _ahead(FAMILIES), math.inf, told, rivals=True)

    assert bounding.unseen == 2.5
    assert set(told.asked) == {1, 2}
    assert bounding.unseen == 2.5
    bounding = Bounding(_search(), Outcome(), FAMILIES, _ahead(FAMILIES), math.inf, told, rivals=True)
    assert bounding.piece(0).configuration == FAMILIES[0]
    assert bounding.unseen == 2.5, "that of a piece that nobody has done is raised, too"


def test_the_least_bounds_are_raised_until_nothing_raises_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time: that of 4 is looked at beside that of 2, and of 8 nothing is asked; told ones are left alone."""
    monkeypatch.setattr("autopar.bounds.transfer.HEADS", 2)
    told = _Told({1: 2.5, 2: 9.0, 4: 3.2})
    waiting = [(FLOORS[family[0].num_microbatches], number) for number, family in enumerate(FAMILIES)]

    told.raise_least(waiting, FAMILIES, math.inf, lambda number: False)
    assert sorted(waiting) == [(2.5, 0), (3.2, 2), (4.0, 3), (9.0, 1)]
    assert 8 not in told.asked

    waiting = [(1.0, 0), (2.0, 1)]
    told.raise_least(waiting, FAMILIES, math.inf, lambda number: number == 0)
    assert waiting == [(1.0, 0), (2.0, 1)]
    told.raise_least(waiting, FAMILIES, 0.5, lambda number: False)
    assert waiting == [(1.0, 0), (2.0, 1)], "what is above the cutoff is raised no further"


@pytest.mark.parametrize(("follows", "order", "own"), [(7.0, [1, 2, 1, 4, 8], 7.5), (7.3, [1, 2, 1, 4], 7.3)])
def test_the_least_bound_of_three_axes_is_raised_first(follows: float, order: list[int], own: float) -> None:
    """Whether by a bound of its own or by what follows; it ends where nothing is below the best plan, at 7.2."""
    outcome = Outcome()
    third = ThirdAxis(_search(), outcome, FAMILIES, _Known({8: follows}), math.inf)
    assert third.own == 1.0
    assert len(third.left) == len(FAMILIES)

    found = _order(third, {1: [2.5, 7.9], 2: [9.0], 4: [7.5], 8: [8.0]}, outcome, 7.2)

    assert found == order
    assert third.own == own
    assert third.left == ()
    assert (third.worked, third.excluded) == (1, 3)


@pytest.mark.parametrize("spreads_first", [True, False])
def test_the_order_of_tasks_is_asked_for_before_first_pieces(spreads_first: bool) -> None:
    """They know it as well, but take longer: what follows from others leaves fewer of them to be done."""

    class _Asked(_Known):
        def _looked_at(self, family: Family, bound: float, *rest: object) -> float:
            asked.append(rest[2])
            return bound

    asked = list[object]()
    third = ThirdAxis(_search(), Outcome(), FAMILIES, _Asked({}), math.inf, spreads_first=spreads_first)
    third.ends(0)
    assert set(asked) == {ALL}


def test_families_of_three_axes_whose_blocks_take_as_much_are_worked_on_together() -> None:
    """What is found of them holds for each; others, and those of other microbatches, stay alone."""
    mesh = Mesh.of(dp=2, outer=2, inner=2)
    each = [
        *((Configuration(2, mesh, 2, name),) for name in ("1f1b", "zb-h1")),
        (Configuration(2, mesh, 2, "zb-v", 2),),
        (Configuration(2, mesh, 2, "interleaved", 2), Configuration(2, mesh, 2, "interleaved", 4)),
        (Configuration(2, mesh, 4, "zb-h1"),),
    ]
    outcome = Outcome()
    outcome.note(each[2], 2.5, Stage.OPEN)
    third = ThirdAxis(_search(), outcome, each, _Known({}), math.inf, spreads_first=True)
    apart = ThirdAxis(_search(), outcome, each, _Known({}), math.inf)

    assert third.own == apart.own == 2.0
    assert len(third.left) == len(apart.left) == 6
    pieces = [third.piece(number) for number in range(4)]
    assert third.piece(4) is None
    found = [piece.configuration for piece in pieces if piece is not None]
    assert sorted(found, key=str) == sorted([each[0], (*each[1], *each[2]), each[3], each[4]], key=str)
    third.take(found.index((*each[1], *each[2])), Finding(5.0, None, 0))
    assert [outcome.standings[own].bound for own in each[1:3]] == [5.0, 5.0]
    assert each[0] not in outcome.standings


def test_the_best_plan_of_three_axes_is_gone_on_with_as_long_as_it_becomes_better() -> None:
    """One in four pieces is for it, whatever its bound; others have no turn of their own, nor has one that is far."""
    outcome = Outcome()
    outcome.candidates = [_planned(10.0, 8), _planned(10.9, 4)]
    third = ThirdAxis(_search(), outcome, FAMILIES, _Known({}), math.inf)
    plans, found = {8: [10.0, 9.0, 9.0, 9.0]}, list[int]()
    for number in range(16):
        assert not third.ends(number)
        piece = third.piece(number)
        assert piece is not None
        count = piece.configuration[0].num_microbatches
        found.append(count)
        best = _planned(plans[count].pop(0), count) if count in plans else None
        third.take(number, Finding(piece.bound + 0.01, best, 0, is_final=False))

    assert found[3::4] == [8, 8, 8, 1], "a bound, a better plan, and none better"
    assert set(found) == {1, 8}


def test_three_axes_are_left_when_they_are_near_enough_or_it_is_time() -> None:
    """What is nearer to the best plan than is asked for counts as left, and in the bound."""
    outcome = Outcome()
    third = ThirdAxis(_search(), outcome, FAMILIES, _Known({}), math.inf)
    third.near = 0.5

    assert _order(third, {1: [2.5, 4.0], 2: [3.0, 3.7], 4: [3.8]}, outcome, 7.2) == [1, 2, 1, 2, 4]
    third.note()
    assert [configuration.num_microbatches for configuration in outcome.closed] == [4, 8]
    assert outcome.closed_floor == 3.7
    assert (outcome.solved, outcome.pruned) == (2, 0)
    third.near, third.enough = 0.0, 3.5
    assert third.ends(0), "others are no nearer"
    third.enough = 4.0
    assert not third.ends(0)
    third.until = -math.inf
    assert third.ends(0)


@pytest.mark.parametrize(
    ("aside", "known", "lowest", "pieces", "complete"),
    [
        (True, 5.1, 0.0, RETRIES, 1.0),
        (True, 5.5, 0.0, PATIENCE, 1.0),
        (False, 5.1, 0.0, PATIENCE, 1.0),
        (False, 5.5, 0.0, 40, 5.5),
        (False, 5.1, 5.0, 40, 5.5),
    ],
)
def test_runners_up_are_not_looked_for_long_where_nothing_was_found(
    aside: bool, known: float, lowest: float, pieces: int, complete: float
) -> None:
    """The best plan takes 5, the other one known a little or a tenth more; a configuration with a bound of 1 has none.

    It needs forty pieces to say so. It is worked on to the end only where the best plan is proven, or the other one is
    slow, and left soon if it was put aside before.
    """
    outcome, family = Outcome(), FAMILIES[0]
    outcome.candidates = [_candidate(5.0), _candidate(known, 2)]
    others = RunnersUp(_search(keep=2), outcome, FAMILIES[:1], lowest, {family} if aside else ())
    found = 0
    while not others.ends(found):
        piece = others.piece(found)
        assert piece is not None
        found += 1
        others.take(found - 1, Finding(1.0 if found < 40 else 5.5, None, 0, is_final=False))

    assert found == pieces
    assert others.complete == complete


@pytest.mark.parametrize("known", [None, Finding(1.5, None, 0, is_final=False, is_settled=True)], ids=["now", "before"])
def test_runners_up_are_not_proven(known: Finding | None) -> None:
    """What only lacks a proof, be it since before, is not gone on with: its bound is where another plan may be."""
    outcome, family = Outcome(), FAMILIES[0]
    outcome.candidates = [_candidate(5.0), _candidate(6.0, 2)]
    if known is not None:
        outcome.note(family, known.bound, stage_of(known, is_new=False))
    others = RunnersUp(_search(keep=2), outcome, FAMILIES[:1], 1.0)
    for index, settled in enumerate((False, False, True) if known is None else ()):
        assert not others.ends(index)
        assert others.piece(index) is not None
        others.take(index, Finding(1.5, None, 0, is_final=False, is_settled=settled))

    assert others.ends(3)
    assert others.complete == 1.5


def _worked_through(bounding: Bounding, found: Sequence[tuple[Work, int, Finding]]) -> list[float]:
    """Take what is found of each piece, which has to be the one expected, to the end; return the bounds they had."""
    bounds = []
    for index, (work, count, finding) in enumerate(found):
        assert not bounding.ends(index)
        piece = bounding.piece(index)
        assert (piece.work, piece.configuration[0].num_microbatches) == (work, count)
        assert bounding.own <= piece.bound, "what is at work counts"
        bounds.append(piece.bound)
        bounding.take(index, finding)
    assert bounding.ends(len(found))
    return bounds


def test_the_best_plans_are_improved_while_plain_schedules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn with the least bound: the best one is gone on with, others have one turn, and what has none has none."""
    monkeypatch.setattr("autopar.search.phases.EVERY", 2)
    mesh, outcome = Mesh.of(inner=2), Outcome()
    families = [*FAMILIES, *((Configuration(1, mesh, count, "1f1b"),) for count in (16, 32, 64, 128))]
    outcome.candidates = [_candidate(6.0)]
    ahead = [(1.0, number) for number in range(len(families))]
    bounding = Bounding(_search(), outcome, families, ahead, math.inf, _Known({}), rivals=False)
    found = [
        (Work.BOUND, 1, Finding(1.5, None, 0, is_final=False)),
        (Work.ADVANCE, 1, Finding(1.6, _candidate(9.0), 0, is_final=False)),  # no plan: the least bound has its turn
        (Work.BOUND, 2, Finding(2.5, _candidate(7.0), 0, is_final=False)),
        (Work.ADVANCE, 1, Finding(1.7, _candidate(9.0), 0, is_final=False)),
        (Work.BOUND, 4, Finding(3.1, _candidate(6.5), 0, is_final=False)),
        (Work.ADVANCE, 4, Finding(3.2, _candidate(5.5), 0, is_final=False)),
        (Work.BOUND, 8, Finding(4.5, None, 0, is_final=False)),
        (Work.ADVANCE, 1, Finding(1.8, _candidate(9.0), 0, is_final=False)),
        (Work.BOUND, 16, Finding(4.5, _candidate(8.0), 0, is_final=False)),
        (Work.ADVANCE, 4, Finding(3.3, _candidate(5.5), 0, is_final=False)),  # the best one again
        (Work.BOUND, 32, Finding(4.6, None, 0, is_final=False)),
        (Work.ADVANCE, 1, Finding(1.9, _candidate(9.0), 0, is_final=False)),
        (Work.BOUND, 64, Finding(4.6, None, 0, is_final=False)),
        (Work.ADVANCE, 2, Finding(2.6, _candidate(7.0), 0, is_final=False)),
        (Work.BOUND, 128, Finding(4.6, None, 0, is_final=False)),
    ]
    _worked_through(bounding, found)

    assert bounding.pending == [(4.5, 3), (4.5, 4), (4.6, 5), (4.6, 6), (4.6, 7)]


def test_the_least_bound_is_worked_on_while_plain_schedules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other piece here: what is open has its turn again, but neither what lacks a proof nor what is done."""
    monkeypatch.setattr("autopar.search.phases.EVERY", 2)
    outcome = Outcome()
    outcome.candidates = [_candidate(6.0)]
    bounding = Bounding(_search(), outcome, FAMILIES, _ahead(FAMILIES), math.inf, _Known({}), rivals=False)
    found = [
        (Work.BOUND, 1, Finding(1.5, None, 0, is_final=False)),
        (Work.ADVANCE, 1, Finding(3.5, None, 0, is_final=False)),
        (Work.BOUND, 2, Finding(2.5, None, 0, is_final=False)),
        (Work.ADVANCE, 2, Finding(2.7, None, 0, is_final=False, is_settled=True)),
        (Work.BOUND, 4, Finding(3.1, None, 0, is_final=False)),
        (Work.ADVANCE, 4, Finding(3.3, _candidate(5.0), 0, is_final=True)),
        (Work.BOUND, 8, Finding(4.5, None, 0, is_final=False)),
    ]
    bounds = _worked_through(bounding, found)

    assert bounds[1::2] == [finding.bound for _, _, finding in found[:-1:2]]

    assert bounding.pending == [(4.5, 3)]
    assert bounding.worked == [
        Aside(3.5, FAMILIES[0], is_counted=True),
        Aside(2.7, FAMILIES[1], is_counted=True, is_settled=True),
    ]
    assert (bounding.closed, bounding.stuck, bounding.own) == (3.3, 3.3, 2.7)
    assert (outcome.solved, outcome.pruned, outcome.best) == (3, 0, 5.0)
    assert outcome.standings[FAMILIES[2]].stage is Stage.DONE
    after = Advancing(_search(), outcome, [bounding], math.inf, bounding.worked, proves=False)
    assert _worked(after, {1: [(4.0, False)], 8: [(4.9, False)]}) == [1, 8]
    assert (after.own, after.proven, outcome.solved) == (2.7, 3.3, 4)


def test_what_cannot_have_the_best_plan_is_not_worked_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything with other schedules than plain ones."""
    monkeypatch.setattr("autopar.search.phases.EVERY", 1)
    outcome = Outcome()
    outcome.candidates = [_candidate(2.0)]
    for rivals, bound in ((False, 2.0), (True, 1.5)):
        series = Bounding(_search(), outcome, FAMILIES[:2], _ahead(FAMILIES[:2]), math.inf, _Known({}), rivals=rivals)
        assert series.piece(0).work is Work.BOUND
        series.take(0, Finding(bound, None, 0, is_final=False))

        assert series.piece(1).work is Work.BOUND


def _advanced(bounds: Mapping[int, list[tuple[float, bool]]], *, proves: bool) -> tuple[Outcome, Advancing, list[int]]:
    """Work on two configurations with bounds 1 and 2; what comes of them are bounds, and whether a proof is left."""
    outcome = Outcome()
    outcome.candidates = [_candidate(5.0)]
    bounding = Bounding(_search(), outcome, [], [], math.inf, _Known({}), rivals=True)
    bounding.space, bounding.pending = FAMILIES[:2], [(1.0, 0), (2.0, 1)]
    series = Advancing(_search(), outcome, [bounding], math.inf, proves=proves)
    return outcome, series, _worked(series, {count: list(each) for count, each in bounds.items()})


def _worked(
    series: Advancing, left: dict[int, list[tuple[float, bool]]], plans: Mapping[int, float] = MappingProxyType({})
) -> list[int]:
    """Return the microbatches of what is worked on; `plans` are objectives of those that pieces find, by number."""
    found: list[int] = []
    while not series.ends(len(found)):
        piece = series.piece(len(found))
        assert piece is not None
        count = piece.configuration[0].num_microbatches
        found.append(count)
        bound, settled = left[count].pop(0)
        plan = _candidate(plans[len(found)]) if len(found) in plans else None
        finding = Finding(bound, plan, 0, is_final=not left[count], is_settled=settled)
        series.take(len(found) - 1, finding)
    return found


def test_proofs_wait_until_all_schedules_are_bounded() -> None:
    """They are put aside with their bounds, which count until they are proven, and are counted once."""
    bounds = {1: [(3.0, True), (4.9, True)], 2: [(4.0, False)]}
    outcome, series, worked = _advanced(bounds, proves=False)
    assert worked == [1, 2]
    assert series.aside == [Aside(3.0, FAMILIES[0], is_counted=True, is_settled=True)]
    assert (series.own, series.proven) == (3.0, 4.0)
    assert (outcome.solved, outcome.pruned) == (2, 0)

    later = Advancing(_search(), outcome, [], math.inf, series.aside)
    assert later.own == 3.0
    assert _worked(later, {1: [(4.9, True)]}) == [1]
    assert (later.own, later.aside) == (4.9, [])
    assert (outcome.solved, outcome.pruned) == (2, 0)

    *_, worked = _advanced(bounds, proves=True)
    assert worked == [1, 2, 1]


def test_what_only_lacks_a_proof_stays_aside_until_there_are_proofs() -> None:
    """Its bound counts meanwhile, and nothing is done on it again."""
    outcome, lacking = Outcome(), Aside(3.0, FAMILIES[0], is_counted=True, is_settled=True)
    outcome.candidates = [_candidate(5.0)]
    before = [lacking, Aside(4.0, FAMILIES[1], is_counted=True)]

    series = Advancing(_search(), outcome, [], math.inf, before, proves=False)

    assert _worked(series, {2: [(4.5, False)]}) == [2]
    assert series.aside == [lacking]
    assert (series.own, series.proven) == (3.0, 4.5)
    assert _worked(Advancing(_search(), outcome, [], math.inf, before), {1: [(3.5, False)], 2: [(4.5, False)]}) == [
        1,
        2,
    ]


def test_configurations_near_the_best_plan_are_put_aside() -> None:
    """With bounds within a tenth of it nothing more is done on them for now; those further away come first."""
    outcome = Outcome()
    outcome.candidates = [_candidate(5.0)]
    before = [Aside(3.0, FAMILIES[0], is_counted=True), Aside(4.0, FAMILIES[1], is_counted=False)]

    series = Advancing(_search(), outcome, [], math.inf, before, near=0.1)

    assert _worked(series, {1: [(3.9, False), (4.6, False), (4.9, False)], 2: [(4.5, False), (4.9, False)]}) == [
        1,
        1,
        2,
    ]
    assert sorted((each.bound, each.is_counted) for each in series.aside) == [(4.5, True), (4.6, True)]
    assert (series.own, series.proven, outcome.pruned) == (4.5, math.inf, 0)


def test_what_is_left_when_time_is_over_is_put_aside() -> None:
    outcome = Outcome()
    outcome.candidates = [_candidate(5.0)]
    before = [Aside(3.0, FAMILIES[0], is_counted=True), Aside(4.0, FAMILIES[1], is_counted=False)]

    series = Advancing(_search(), outcome, [], math.inf, before, until=time.monotonic() - 1.0)

    assert _worked(series, {}) == []
    assert series.aside == before
    assert series.own == 3.0


@pytest.mark.parametrize(("limit", "at"), [(10.0, 107.0 - min(LATE_SHARE * 10.0, LATE_SECONDS)), (math.inf, math.inf)])
def test_it_is_known_when_a_share_of_a_limit_will_be_left(
    limit: float, at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.search.phases.time.monotonic", lambda: 100.0)
    clock = Clock(SimpleNamespace(time_limit=limit), Outcome())  # type: ignore[arg-type]

    assert clock.at(0.3) == pytest.approx(at)


def test_what_is_done_is_not_worked_on_again() -> None:
    """Its bound counts, on meshes of three axes as well."""
    outcome = Outcome()
    outcome.candidates = [_candidate(6.0)]
    outcome.note(FAMILIES[1], 2.2, Stage.DONE)
    outcome.note(FAMILIES[2], 3.5, Stage.OPEN)

    third = ThirdAxis(_search(), outcome, FAMILIES, _Known({}), math.inf)

    assert outcome.done(FAMILIES) == {FAMILIES[1]: 2.2}
    assert third.own == 1.0
    found = _order(third, {1: [5.0, 6.5], 4: [5.1, 6.5], 8: [5.2, 6.5]}, outcome, math.inf)
    assert set(found) == {1, 4, 8}
    assert third.own == 2.2


def test_what_cannot_raise_the_bound_is_put_aside_after_a_while() -> None:
    """Nothing raises the bound of the first one further: the others may have better plans, but are left."""
    bounds = {1: [(3.0, False)], 2: [(3.5, False), (4.0, False), (4.2, False)], 4: [(3.6, False), (4.1, False)]}

    def worked(patience: float, better: float = math.inf) -> tuple[list[int], Outcome, Advancing]:
        outcome = Outcome()
        outcome.candidates = [_candidate(5.0)]
        bounding = Bounding(_search(), outcome, [], [], math.inf, _Known({}), rivals=True)
        bounding.space, bounding.pending = FAMILIES[:3], [(2.0, 0), (3.1, 1), (3.2, 2)]
        series = Advancing(_search(), outcome, [bounding], math.inf, patience=patience)
        left = {count: list(each) for count, each in bounds.items()}
        return _worked(series, left, {2: better}), outcome, series

    assert worked(math.inf)[0] == [1, 2, 4, 2, 4, 2]
    assert worked(4.0, better=4.9)[0] == [1, 2, 4, 2, 4, 2], "a better plan was found meanwhile"
    found, outcome, series = worked(3.0)
    assert found == [1, 2, 4]
    assert [(each.bound, each.family, each.is_counted) for each in series.aside] == [
        (3.5, FAMILIES[1], True),
        (3.6, FAMILIES[2], True),
    ]
    assert (series.own, series.proven, outcome.solved, outcome.pruned) == (3.0, 3.0, 3, 0)
    assert worked(1.0)[0] == [1]
    assert [each.is_counted for each in worked(1.0)[2].aside] == [False, False]


@pytest.mark.parametrize(
    ("found", "hurries"), [(math.inf, HURRIES), (5.5, HURRIES), (4.9, 8)], ids=["none", "worse", "better"]
)
def test_no_plan_is_hurried_for_where_that_finds_no_better_ones(found: float, hurries: int) -> None:
    """All bounds are far below the best plan, and what a piece finds is no plan, a worse or ever a better one."""
    outcome, families = Outcome(), FAMILIES[:1] * 8
    outcome.candidates = [_candidate(5.0)]
    bounding = Bounding(_search(), outcome, families, _ahead(families), math.inf, _Known({}), rivals=True)
    hasty = 0
    for index in range(8):
        assert not bounding.ends(index)
        piece = bounding.piece(index)
        hasty += piece.hasty > 0.0
        plan = None if math.isinf(found) else _candidate(found - 0.01 * index)
        bounding.take(index, Finding(1.0, plan, 0, is_final=False))
    assert hasty == hurries


def test_what_is_excluded_meanwhile_is_not_proven() -> None:
    outcome, series, _ = _advanced({1: [(3.0, True), (4.9, True)], 2: [(4.0, False)]}, proves=False)
    outcome.candidates = [_candidate(2.9)]

    later = Advancing(_search(), outcome, [], math.inf, series.aside)

    assert _worked(later, {}) == []
    assert later.own == 3.0
    assert (outcome.solved, outcome.pruned) == (2, 0), "it was solved before"


def _settled(begun: list[tuple[float, int]], finds: Mapping[int, float]) -> list[int]:
    """Return the microbatches of what is worked on of what was begun with, objective of the best plan and number."""
    outcome = Outcome()
    outcome.candidates = [_candidate(min(objective for objective, _ in begun))]
    of = {family[0].num_microbatches: family for family in FAMILIES}
    series = Settling(_search(), outcome, [(objective, FLOORS[count], of[count]) for objective, count in begun])
    found = []
    for index in range(series.count):
        piece = series.piece(index)
        if piece is None:
            series.take(index, None)
            continue
        assert piece.work is Work.ADVANCE
        count = piece.configuration[0].num_microbatches
        found.append(count)
        outcome.candidates = [_candidate(min(outcome.best, finds.get(count, math.inf)))]
        series.take(index, Finding(piece.bound, None, 0, is_final=False))
    return found


def test_what_was_begun_with_is_settled_first() -> None:
    """The best plans first, until the best one is near what may be there, and no more than a few."""
    assert _settled([(9.0, 1), (8.0, 2)], {}) == [2, 1]
    assert _settled([(9.0, 1), (8.0, 2)], {2: 1.2}) == [2]
    assert _settled([(1.2, 1)], {}) == []
    assert len(_settled([(9.0 - each, count) for each, count in enumerate(FLOORS)], {})) == SETTLED < len(FLOORS)


class _Proving(Attempt):
    """Proves again and again; each time the best plan is of the next objective."""

    def __init__(self, objectives: Sequence[float], *, left: bool, is_cut: bool = False) -> None:
        self.best, self.exhausted, self._is_cut = None, False, is_cut
        self._found, self._left, self.nearby = [_candidate(each) for each in objectives], left, 0

    def _prove(self, bound: float, cutoff: float) -> float:
        self.best = self._found.pop(0) if self._found else self.best
        return bound + 1.0

    def _look_nearby(self) -> None:
        self.nearby += 1

    def _ceiling(self, bound: float, cutoff: float) -> float:
        return 1.0 if self._left else 0.0

    def _stopped(self) -> bool:
        return self._is_cut


def test_proofs_are_repeated_as_long_as_they_find_better_plans() -> None:
    proving = _Proving([5.0, 4.0], left=True)

    assert [(proving._prove_again(bound, 9.0), proving.exhausted) for bound in (1.0, 2.0, 3.0)] == [
        (2.0, False),
        (3.0, False),
        (4.0, True),
    ]
    assert proving.nearby == 2
    proven = _Proving([5.0], left=False)
    assert (proven._prove_again(1.0, 9.0), proven.exhausted) == (2.0, True), "nothing is left to prove"


class _Near(Attempt):
    """Finds better plans of the first few choices near the best one only."""

    def __init__(self, fitting: int) -> None:
        self.best, self.considered, self._fitting = _best(0), list[int](), fitting
        self.hull = SimpleNamespace(priced=lambda: (None, 0.0))  # type: ignore[assignment]
        self.pipeline = SimpleNamespace(num_stages=1)  # type: ignore[assignment]
        self.tables = SimpleNamespace(folded=SimpleNamespace(chain=()))  # type: ignore[assignment]

    def _consider(self, choice: object) -> None:
        assert isinstance(choice, int)
        self.considered.append(choice)
        self.best = _best(choice) if choice <= self._fitting else self.best


def _best(choice: int) -> Candidate:
    return SimpleNamespace(choice=choice, split=None)  # type: ignore[return-value]


@pytest.mark.parametrize(("fitting", "considered"), [(8, [8]), (7, [8, 4]), (2, [8, 4, 2]), (0, [8, 4, 2, 1])])
def test_where_changes_end_is_looked_at_and_half_as_far_if_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, fitting: int, considered: list[int]
) -> None:
    monkeypatch.setattr("autopar.search.node_solver.Neighbourhood", lambda *_: None)
    monkeypatch.setattr("autopar.search.node_solver.descend", lambda *_: iter(range(1, 9)))
    near = _Near(fitting)

    near._look_nearby()

    assert near.considered == considered


def test_a_proof_that_time_has_cut_is_not_over() -> None:
    """So that a search that ends with it says that its limit ended it."""
    proving = _Proving([], left=True, is_cut=True)

    assert (proving._prove_again(1.0, 9.0), proving.exhausted) == (2.0, False)


def test_scouts_are_most_like_what_is_set_up_by_hand() -> None:
    """One per number of stages that take turns, whole nodes as minor axes, a sample for each row, best bounds first."""
    space = configurations(
        gpus=256, devices_per_node=8, num_blocks=32, global_batch=256, batch_of_model=None, mode="train"
    )
    third = families([own for own in space if is_data_major(own.mesh)])

    found = scouts(third, 256, lambda family: 1.0 / family[0].num_stages)
    fewer = scouts(third, 256, lambda family: float(family[0].mesh.shape[1]))

    assert [family[0].num_stages for family in found] == [8, 4, 2], "more stages leave no mesh of three axes with nodes"
    assert [family[0].mesh.shape for family in found] == [(2, 2, 8), (2, 4, 8), (4, 4, 8)]
    for first, *_ in found:
        assert first.schedule == "interleaved"
        assert 256 // first.num_microbatches == first.mesh.shape[0] * first.mesh.shape[1]
    assert {family[0].mesh.shape[1] for family in fewer} == {2}, "the least bound comes before the most devices"
    assert scouts([], 256, lambda family: 0.0) == []


def test_what_is_left_is_said_with_where_it_is() -> None:
    """On meshes of three axes alone, or of other schedules, too."""
    third = Configuration(2, Mesh.of(dp=2, outer=2, inner=2), 4, "1f1b")
    other = Configuration(2, Mesh.of(inner=8), 4, "zb-h1")

    (alone,) = closed_words([third, third], 2.0)
    (both,) = closed_words([third, third, other], 2.0)

    assert "2 configurations on meshes of three axes whose major one is data parallel; no plan there" in alone
    assert "3 configurations on meshes" in both
    assert "(2) and of schedules that are not plain; no plan there is faster than 2 s" in both
    assert closed_words([], 2.0) == ()

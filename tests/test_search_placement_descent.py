"""Choices near others: what is found is possible, better by the formula, and no worse than what is next to it."""

import itertools
import math

import numpy as np
import pytest

from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.problem import Choice
from autopar.recompute import Recompute
from autopar.search.placement_descent import Neighbourhood, descend
from autopar.search.settings import NodeSettings
from tests.formulations import good_choice, random_choice, tables

PIPELINE = Pipeline(1, 2, "1f1b")


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_near_and_better_is_found(seed: int) -> None:
    """From a choice that was spoilt at random to one that no single change with what follows from it makes better."""
    found = tables("mlp-xs")
    whole = Split.uniform(((0, found.folded.num_blocks),), (Recompute.NONE,))
    weighting = weights(found, PIPELINE, recompute=Recompute.NONE, hidden=0.0, bounding=True)
    instance = problem(found, weighting)

    def seconds(choice: Choice) -> float:
        return step_time(found.block_seconds(choice), found.folded.chain, PIPELINE, whole, 0.0).seconds

    start = random_choice(instance, np.random.default_rng(seed), near=good_choice("mlp-xs", "train"))
    near = Neighbourhood(found, instance, NodeSettings())
    steps = [start, *descend(start, near, 0.0, seconds, lambda: False, NodeSettings())]

    times = [seconds(choice) for choice in steps]
    assert all(math.isfinite(instance.cost(choice)) for choice in steps)
    assert len(steps) > 1, "what was spoilt can be mended"
    assert all(later < earlier for earlier, later in itertools.pairwise(times))
    for index in range(len(start)):
        for other in near.changed(steps[-1], index, math.inf):
            assert other is None or seconds(other) >= times[-1] * (1 - 1e-6)


def test_prices_that_are_too_high_are_not_timed() -> None:
    """With a constant above what the start takes nothing is looked at but the start."""
    found = tables("mlp-xs")
    instance = problem(found, weights(found, PIPELINE, recompute=Recompute.NONE, hidden=0.0, bounding=True))
    timed: list[Choice] = []

    def seconds(choice: Choice) -> float:
        timed.append(choice)
        return 1.0

    start = good_choice("mlp-xs", "train")

    assert not list(
        descend(start, Neighbourhood(found, instance, NodeSettings()), 2.0, seconds, lambda: False, NodeSettings())
    )
    assert timed == [start]


@pytest.mark.parametrize(("saved", "ends"), [(2e-3, False), (5e-4, True)])
def test_changes_end_that_save_next_to_nothing(saved: float, ends: bool) -> None:
    """Ten in a row have to save a hundredth; each that is timed saves as much, until all changes are looked at."""
    settings = NodeSettings(descent_share=10, descent_worth=1e-2, descent_changes=100)
    found = tables("mlp-xs")
    instance = problem(found, weights(found, PIPELINE, recompute=Recompute.NONE, hidden=0.0, bounding=True))
    timed = 0

    def seconds(choice: Choice) -> float:
        nonlocal timed
        timed += 1
        return 1e9 * (1 - saved) ** timed

    start = good_choice("mlp-xs", "train")
    steps = list(descend(start, Neighbourhood(found, instance, settings), 0.0, seconds, lambda: False, settings))

    assert steps
    assert (len(steps) <= 10) == ends


@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_change_costs_is_told_from_what_it_changes(seed: int) -> None:
    """A change is yielded if the limit is just above its cost, as the problem has it, and not if it is just below."""
    found = tables("mlp-xs")
    instance = problem(found, weights(found, PIPELINE, recompute=Recompute.NONE, hidden=0.0, bounding=True))
    start = random_choice(instance, np.random.default_rng(seed), near=good_choice("mlp-xs", "train"))
    near, looked_at = Neighbourhood(found, instance, NodeSettings()), 0
    for index in range(len(start)):
        every = list(near.changed(start, index, math.inf))
        for number, other in enumerate(every):
            if other is None:
                continue
            cost = instance.cost(other)
            assert list(near.changed(start, index, cost * (1 + 1e-9)))[number] == other
            assert list(near.changed(start, index, cost * (1 - 1e-9)))[number] is None
            looked_at += 1
    assert looked_at > len(start)

"""Integer bound: the rows of the master problem with binary choices, compared with choices one by one."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.integer import integer_bound, objective_of_rows
from autopar.bounds.master_problem import step_program
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.formulate.tables import Tables
from autopar.problem import Choice, Problem, Solution
from autopar.recompute import Recompute
from autopar.solvers import load
from autopar.solvers.base import Budget
from autopar.solvers.exact.aggregate_objective import minimise
from autopar.solvers.reductions.reduced_cost_fixing import Survivors
from tests.formulations import good_choice, lowered_bytes, random_choice, tables

TOLERANCE = 2e-6
"""Relative: linear programs are solved to 1e-7 in units of about a step time."""

NONE = Recompute.NONE


def _solve(instance: Problem, cutoff: float) -> Solution:
    return load("auto").solve(instance, cutoff=cutoff)


def _budget(instance: Problem) -> Budget:
    return Budget(instance, math.inf, None, math.inf, 0.0, None)


def _instance(found: Tables) -> Problem:
    return problem(found, weights(found, Pipeline(1, 2, "1f1b"), recompute=NONE, hidden=0.0, bounding=True))


def _choices(found: Tables, model: str, seed: int, number: int) -> list[Choice]:
    rng, choice, instance = np.random.default_rng(seed), good_choice(model, "train"), _instance(found)
    result = [choice]
    for _ in range(number):
        choice = random_choice(instance, rng, near=choice)
        result.append(choice)
    return result


def _survivors(found: Tables, allowed: Sequence[tuple[int, ...]]) -> Survivors:
    """Survivors if only some strategies of each node are allowed."""
    labels = []
    for node, own in zip(found.nodes, allowed, strict=True):
        mask = np.zeros(node.count, np.bool_)
        mask[list(own)] = True
        labels.append(mask)
    pairs: dict[tuple[int, int], np.ndarray] = {}
    tables_of = [(edge.first, edge.second, edge.table) for edge in found.edges]
    for first, second, table in (*tables_of, *((own.first, own.second, own.seconds) for own in found.forbidden)):
        at, mask = (min(first, second), max(first, second)), np.isfinite(table)
        mask = mask if at == (first, second) else mask.T
        pairs[at] = pairs[at] & mask if at in pairs else mask
    return Survivors(tuple(labels), pairs)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("model", ["gpt2", "mlp-xs"])
def test_of_one_choice_it_is_the_master_problem_of_this_choice(model: str, limited: bool) -> None:
    """Equal rows give an equal value without a memory limit, and no less with whole blocks under a limit."""
    found = tables(model)
    pipeline, stop = Pipeline(1, 4, "1f1b"), found.folded.num_blocks
    for choice in _choices(found, model, 3, 4):
        if not np.isfinite(found.block_seconds(choice)).all():
            continue
        limit = math.inf
        if limited:  # between what all keep and none
            memory = lowered_bytes(found, choice)
            limit = sum(memory.peak(0, stop, 1, (own,) * stop) for own in (NONE, Recompute.FULL)) / 2
        rows = step_program(found, pipeline, limit)
        column_generation = ColumnGeneration(found, rows)
        column_generation.add(choice, None if limited else 0)
        column_generation.step(_solve, 0.0, lambda _: None, memory=limited)
        modes = list(range(len(rows.flavours))) if limited else [0]

        function = objective_of_rows(found, rows, modes, column_generation.value, memory=limited)
        least = minimise(function, _survivors(found, [(own,) for own in choice]), math.inf, _budget(_instance(found)))

        assert least.bound * column_generation.value >= column_generation.value * (1 - TOLERANCE)
        if not limited:
            assert least.bound * column_generation.value <= column_generation.value * (1 + TOLERANCE)
        assert least.choice == choice


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["gpt2", "mlp-xs"])
def test_the_optimum_is_that_of_enumeration(model: str, seed: int) -> None:
    """With three strategies for a few nodes no choice is faster, and the one found is as fast."""
    found = tables(model)
    pipeline, chain = Pipeline(1, 3, "1f1b"), found.folded.chain
    whole = Split.uniform(((0, len(chain)),), (NONE,))
    rng, best = np.random.default_rng(seed), good_choice(model, "train")
    allowed = [(own,) for own in best]
    possible = [node for node in range(len(best)) if found.nodes[node].count > 1]
    for node in rng.choice(possible, size=5, replace=False).tolist():
        others = rng.choice(found.nodes[node].count, size=min(3, found.nodes[node].count), replace=False).tolist()
        allowed[node] = tuple({best[node], *others})
    times, instance = {}, _instance(found)
    for choice in itertools.product(*allowed):
        if np.isfinite(instance.cost(choice)):
            times[choice] = step_time(found.block_seconds(choice), chain, pipeline, whole, 0.0).seconds
    fastest = min(times.values())

    function = objective_of_rows(found, step_program(found, pipeline, np.inf), [0], fastest, memory=False)
    least = minimise(function, _survivors(found, allowed), math.inf, _budget(_instance(found)))

    assert least.choice is not None
    assert fastest * 0.98 <= least.bound * fastest <= fastest * (1 + TOLERANCE)
    assert times[least.choice] <= fastest * 1.02, "what blocks in the middle reduce late is not seen"


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("model", ["gpt2", "mlp-xs"])
def test_no_choice_is_faster_than_the_integer_bound(model: str, num_microbatches: int) -> None:
    """It is at least the bound of column generation; its choice attains it up to late reductions."""
    found = tables(model)
    chain, pipeline = found.folded.chain, Pipeline(1, num_microbatches, "1f1b")
    whole = Split.uniform(((0, len(chain)),), (NONE,))
    seconds = {}
    for choice in _choices(found, model, 5, 30):
        totals = found.block_seconds(choice)
        if np.isfinite(totals).all():
            seconds[choice] = step_time(totals, chain, pipeline, whole, 0.0).seconds
    column_generation = ColumnGeneration(found, step_program(found, pipeline, np.inf))
    column_generation.add(good_choice(model, "train"))
    for _ in range(12):
        column_generation.step(_solve, np.inf, lambda _: None, memory=False)
    ceiling = 1.001 * min(seconds.values())

    least = integer_bound(found, column_generation, ceiling, _budget(_instance(found)))

    assert least.choice is not None
    assert column_generation.bound <= least.bound <= min(seconds.values()) * (1 + TOLERANCE)
    totals = found.block_seconds(least.choice)
    assert step_time(totals, chain, pipeline, whole, 0.0).seconds == pytest.approx(least.bound, rel=0.02)

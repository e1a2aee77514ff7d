"""Conflicts are infeasible, and every node of an irreducible one is needed."""

import math
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.problem import FORBIDDEN, Limit, Problem, Usage
from autopar.solvers.bounds.infeasibility_proof import Conflict, explain
from tests.checks import choices
from tests.strategies import problems, tied_problems


def fits_somehow(problem: Problem, nodes: Sequence[int], times: Sequence[int]) -> bool:
    """Return whether some choice of `nodes` is permitted and within the limits at `times`."""
    inside = set(nodes)
    place = {n: i for i, n in enumerate(nodes)}
    for labels in product(*(range(problem.num_strategies[n]) for n in nodes)):
        barred = any(math.isinf(float(problem.node_costs[n][s])) for n, s in zip(nodes, labels, strict=True)) or (
            problem.is_whole and any(problem.node_costs[n][s] >= FORBIDDEN for n, s in zip(nodes, labels, strict=True))
        )
        for (a, b), table in zip(problem.edge_nodes.tolist(), problem.edge_table_ids.tolist(), strict=True):
            if a in inside and b in inside:
                cost = problem.edge_tables[table][labels[place[a]], labels[place[b]]]
                barred = barred or math.isinf(float(cost)) or (problem.is_whole and cost >= FORBIDDEN)
        over = any(
            sum(u.amounts[labels[place[u.node]]] for u in problem.usages if u.node in inside and u.start <= t < u.end)
            > min((x.amount for x in problem.limits if x.start <= t < x.end), default=math.inf)
            for t in times
        )
        if not barred and not over:
            return True
    return False


@given(problem=problems(max_nodes=5) | tied_problems())
@settings(max_examples=300)
def test_conflicts_are_infeasible_and_irreducible(problem: Problem) -> None:
    """A conflict exists exactly if the problem is infeasible; without any one node it is feasible."""
    feasible = any(problem.cost(c) < math.inf and problem.fits(c) for c in choices(problem))

    conflict = explain(problem)

    assert (conflict is None) == feasible
    if conflict is None:
        return
    assert not fits_somehow(problem, conflict.nodes, conflict.times)
    assert conflict.irreducible
    for node in conflict.nodes:
        assert fits_somehow(problem, [n for n in conflict.nodes if n != node], conflict.times)


def test_a_conflict_at_one_time_names_the_time_and_fewest_nodes() -> None:
    """At time 4 the four nodes use at least 1, 5, 2 and 4; the second and the last alone exceed 8."""
    amounts = [[1, 9], [7, 5], [2, 2], [4, 9]]
    usages = [Usage(node, 4, 6, np.array(use)) for node, use in enumerate(amounts)]
    problem = Problem.build([[0, 0]] * 4, usages=[*usages, Usage(0, 0, 9, np.array([0, 0]))], limit=8)

    conflict = explain(problem)

    assert conflict == Conflict((1, 3), (4,), (), 9, 8, irreducible=True)
    assert conflict.sentence() == (
        "nodes 1 and 3 use at least 9 at time 4, the limit is 8; without any one of them there is a choice"
    )


def test_forbidden_pairs_that_force_use_are_part_of_the_conflict() -> None:
    """Node 0 could use nothing, but node 1 forbids that; node 2 is unrelated."""
    tie = [[FORBIDDEN, FORBIDDEN], [0, 0]]
    problem = Problem.build(
        [[0, 0]] * 3,
        [(0, 1, tie), (1, 2, [[0, 1], [2, 3]])],
        usages=[Usage(0, 2, 3, np.array([0, 7])), Usage(2, 2, 3, np.array([0, 1]))],
        limit=5,
    )

    conflict = explain(problem)

    assert conflict == Conflict((0, 1), (2,), ((0, 1),), 7, 5, irreducible=True)
    assert conflict.sentence(["w", "x", "y"]) == (
        "nodes w and x use at least 7 at time 2 (given the forbidden pairs of edges 0-1), the limit is 5; "
        "without any one of them there is a choice"
    )


def test_forbidden_pairs_alone_can_be_the_conflict() -> None:
    """Three nodes of two strategies, each pair different: an odd cycle, which arc consistency does not refute."""
    different = [[FORBIDDEN, 0], [0, FORBIDDEN]]
    edges = [(0, 1, different), (1, 2, different), (2, 0, different), (2, 3, [[0, 1], [1, 0]])]
    problem = Problem.build([[0, 0]] * 4, edges)

    conflict = explain(problem)

    assert conflict == Conflict((0, 1, 2), (), ((0, 1), (0, 2), (1, 2)), None, None, irreducible=True)
    assert conflict.sentence().startswith(
        "nodes 0, 1 and 2 have no permitted choice (given the forbidden pairs of edges 0-1, 0-2"
    )


def test_limits_that_exclude_each_other_form_one_conflict() -> None:
    """Either strategy keeps one of the two limits."""
    usages = [Usage(0, 0, 1, np.array([9, 0])), Usage(0, 5, 6, np.array([0, 9])), Usage(1, 0, 9, np.array([1, 1]))]
    problem = Problem.build([[0, 0], [0, 0]], usages=usages, limit=[Limit(5, 0, 9)])

    conflict = explain(problem)

    assert conflict == Conflict((0,), (0, 5), (), None, None, irreducible=True)
    assert conflict.sentence() == ("node 0 cannot keep the limits at times 0 and 5; without it there is a choice")


def test_a_conflict_of_thousands_of_nodes_needs_no_deletion_filter() -> None:
    """5,000 nodes use 2 each at one time, the limit is 6,001: any 3,001 of them are a conflict."""
    usages = [Usage(node, node % 7, 40, np.array([2, 3])) for node in range(5000)]
    problem = Problem.build([[0, 0]] * 5000, usages=usages, limit=6001)

    conflict = explain(problem)

    assert conflict is not None
    assert (len(conflict.nodes), conflict.least, conflict.irreducible) == (3001, 6002, True)
    assert conflict.sentence().startswith("nodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2989 more use at least 6,002")


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_without_time_only_proven_conflicts_are_returned(seconds: float) -> None:
    """Without time the result is None, or a conflict that may be reducible."""
    tie = np.where(np.eye(3), 0, FORBIDDEN)
    usages = [Usage(node, 0, 1, np.array([0, 1, 2])) for node in range(200)]
    edges = [(node, node + 1, tie if node % 3 else np.roll(tie, 1, axis=1)) for node in range(199)]
    problem = Problem.build([[0, 0, 0]] * 200, edges, usages=usages, limit=120)

    conflict = explain(problem, end=time.monotonic() + seconds)

    assert conflict is None or conflict.least is None or conflict.limit is None or conflict.least > conflict.limit

"""The synthetic families are what they say they are."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import iopddl, solvers
from autopar.problem import Problem, Termination
from tests import instances
from tests.checks import check_solution
from tests.instances import k_tree


def least_choice(problem: Problem) -> list[int]:
    """Return the strategy of least use of each node."""
    result = [0] * problem.num_nodes
    for usage in problem.usages:
        result[usage.node] = int(usage.amounts.argmin())
    return result


@given(nodes=st.integers(1, 60), width=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_k_tree_has_its_tree_width(nodes: int, width: int, seed: int) -> None:
    """Taken out in reverse, each node has min(width, those before) neighbours left, all joined to each other."""
    problem = k_tree(nodes, width=width, tightness=None, seed=seed)

    pairs = {(min(a, b), max(a, b)) for a, b in problem.edge_nodes.tolist()}
    for node in range(nodes):
        earlier = [a for a, b in pairs if b == node]
        assert len(earlier) == min(width, node)
        assert all((min(a, b), max(a, b)) in pairs for a in earlier for b in earlier if a != b)


@pytest.mark.parametrize("tightness", [0.0, 0.3, 1.0])
def test_tightness_places_the_limit(tightness: float) -> None:
    """At 0 the thriftiest choice just fits; at 1 so does what is cheapest for each node alone."""
    problem = k_tree(200, width=3, tightness=tightness)
    (limit,) = problem.limits
    thrifty, cheap = least_choice(problem), [int(costs.argmin()) for costs in problem.node_costs]
    least, most = problem.peak_usage(thrifty), problem.peak_usage(cheap)

    assert problem.fits(thrifty)
    assert problem.fits(cheap) == (tightness == 1.0)
    assert limit.amount == pytest.approx(least + tightness * (most - least), abs=1)


def test_equal_seeds_give_equal_problems() -> None:
    first, second, third = (k_tree(50, width=2, tightness=0.5, seed=seed) for seed in (1, 1, 2))

    assert all(np.array_equal(a, b) for a, b in zip(first.node_costs, second.node_costs, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.node_costs, third.node_costs, strict=True))


@pytest.mark.parametrize(("nodes", "tightness"), [(5000, None), (40, 0.3)])
def test_k_trees_are_solved_to_a_proof(nodes: int, tightness: float | None) -> None:
    """Without a limit at any size, because the tree-width is small; with one, small ones."""
    problem = k_tree(nodes, width=2, tightness=tightness)

    solution = solvers.load("auto").solve(problem, time_limit=60)

    check_solution(problem, solution)
    assert solution.termination is Termination.OPTIMAL


def test_the_family_is_written_as_problem_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file per size, width and tightness."""
    monkeypatch.setattr(instances, "FAMILY", ((20, 2, 0.3), (30, 4, 0.9)))

    instances.write_family(tmp_path / "family")

    names = sorted(path.name for path in (tmp_path / "family").iterdir())
    assert names == ["width-2_tightness-0.3_nodes-00020.json.gz", "width-4_tightness-0.9_nodes-00030.json.gz"]
    assert iopddl.load(tmp_path / "family" / names[0]).num_nodes == 20

"""The synthetic families are what they say they are."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import iopddl, solvers
from autopar.problem import FORBIDDEN, Problem, Termination
from tests import instances
from tests.checks import check_solution
from tests.instances import hubs, k_tree, layered, tensors


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


@given(nodes=st.integers(1, 60), tied=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_layers_have_the_traits_they_are_made_with(nodes: int, tied: float, seed: int) -> None:
    """Edges reach back less than a layer, followers have one permitted strategy each, and some choice exists."""
    problem = layered(nodes, nodes_per_layer=20, max_strategies=5, tied=tied, tightness=None, seed=seed)

    assert all(0 < b - a < 20 for a, b in problem.edge_nodes.tolist())
    barred = [table >= FORBIDDEN for table in problem.edge_tables]
    assert all((~flags).sum(axis=1).tolist() == [1] * len(flags) for flags in barred if flags.any())
    assert any(flags.any() for flags in barred) <= (tied > 0)
    assert len(problem.edge_tables) <= 1.5 * 20 + 1
    solution = solvers.load("auto").solve(problem, time_limit=60)
    check_solution(problem, solution)
    assert solution.choice is not None


@pytest.mark.parametrize("seed", [0, 1])
def test_hubs_have_most_nodes_as_leaves(seed: int) -> None:
    """Nothing is forbidden, four nodes have a tenth of the edges each or more, and the least use just fits."""
    problem = hubs(400, seed=seed)

    degrees = np.bincount(problem.edge_nodes.ravel(), minlength=400)
    assert 0.55 <= np.mean(degrees <= 1) <= 0.8
    assert degrees[0] >= 40
    assert degrees[:4].min() > degrees[4:].max()
    assert all((table < FORBIDDEN).all() for table in problem.edge_tables)
    least = problem.peak_usage(least_choice(problem))
    assert problem.limits[0].amount == pytest.approx(1.1 * least, abs=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_few_tensors_fill_the_memory(seed: int) -> None:
    """Uses differ by factors of the mesh, and ten tensors hold over half of the memory at the time of the peak."""
    problem = tensors(400, mesh=(4, 8), seed=seed)

    degrees = np.bincount(problem.edge_nodes.ravel(), minlength=400)
    assert 0.55 <= np.mean(degrees <= 1) <= 0.8
    assert all((table < FORBIDDEN).all() for table in problem.edge_tables)
    ratios = [u.amounts.max() / u.amounts.min() for u in problem.usages]
    assert max(ratios) == pytest.approx(32, rel=0.05)
    least = problem.peak_usage(least_choice(problem))
    limit = problem.limits[0].amount
    assert limit == pytest.approx(1.1 * least, abs=1)
    alive = [[int(u.amounts.min()) for u in problem.usages if u.start <= t < u.end] for t in range(401)]
    peak = sorted(max(alive, key=sum), reverse=True)
    assert sum(peak[:10]) > sum(peak) / 2


def test_large_problems_are_written_equal_and_distinct(tmp_path: Path) -> None:
    """The same nodes and edges; only how many tables there are differs."""
    instances.write_large(tmp_path, num_nodes=300)

    equal, distinct = (iopddl.load(tmp_path / f"layers-{name}.json.gz") for name in ("equal", "distinct"))

    assert equal.num_nodes == distinct.num_nodes == 300
    assert equal.num_edges == distinct.num_edges
    assert len(equal.edge_tables) < 10 < 100 < len(distinct.edge_tables)

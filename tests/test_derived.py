"""Problems made from others keep what makes them problems of that kind."""

from pathlib import Path

import numpy as np
import pytest

from autopar import iopddl
from autopar.problem import Problem
from tests import derived
from tests.derived import VARIANTS, denser, joined, least_peak, rescaled, tighter, window, write_variants
from tests.instances import k_tree


def small(seed: int = 0) -> Problem:
    """Return a problem of 60 nodes."""
    return k_tree(60, width=2, tightness=0.5, seed=seed)


def test_the_least_peak_is_that_of_the_least_uses() -> None:
    """No choice undercuts it, and in this family the strategies of least use reach it."""
    problem = small()
    least = [int(u.amounts.argmin()) for u in problem.usages]

    assert least_peak(problem) == problem.peak_usage(least)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_tighter_problems_have_a_share_of_the_memory_above_the_least_peak(share: float) -> None:
    """All of it is the problem itself; none of it still leaves the choice of least use."""
    problem = small()
    least = least_peak(problem)

    tight = tighter(problem, share)

    assert tight.limits[0].amount == int(least + share * (problem.limits[0].amount - least))
    assert tight.fits([int(u.amounts.argmin()) for u in problem.usages])


def test_rescaled_costs_are_whole_multiples() -> None:
    """Every cost is between once and `most` times what it was."""
    problem = small()
    choice = [1] * problem.num_nodes

    scaled = rescaled(problem, most=3, seed=1)

    assert problem.cost(choice) < scaled.cost(choice) < 3 * problem.cost(choice)
    assert scaled.usages == problem.usages


def test_joined_problems_cost_the_sum() -> None:
    """Side by side, with as much spare memory above the least peak as the one that has most."""
    first, second = small(0), small(1)
    choices = [0, 1, 2, 3] * 15, [3, 2, 1, 0] * 15

    whole = joined([first, second], shift=0.5, name="both")

    assert whole.cost(choices[0] + choices[1]) == first.cost(choices[0]) + second.cost(choices[1])
    spare = max(p.limits[0].amount / least_peak(p) for p in (first, second))
    assert whole.limits[0].amount == int(spare * least_peak(whole))
    assert max(u.start for u in whole.usages) > max(u.start for u in first.usages)


def test_a_window_keeps_its_nodes_and_what_joins_them() -> None:
    """The first half has the costs of the first half, and no edge to the rest."""
    problem = small()

    part = window(problem, 0.0, 0.5)

    assert part.num_nodes == 30
    assert all(np.array_equal(a, b) for a, b in zip(part.node_costs, problem.node_costs, strict=False))
    inside = (problem.edge_nodes < 30).all(axis=1)
    assert part.num_edges == int(inside.sum())


def test_denser_problems_have_more_edges_with_known_tables() -> None:
    """Nothing else changes."""
    problem = small()

    dense = denser(problem, 0.5, seed=2)

    assert problem.num_edges < dense.num_edges <= 1.5 * problem.num_edges
    assert {t.tobytes() for t in dense.edge_tables} <= {t.tobytes() for t in problem.edge_tables}
    assert dense.usages == problem.usages


def test_variants_are_written_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per problem with one limit and per name, readable again."""
    monkeypatch.setattr(derived, "VARIANTS", {name: VARIANTS[name] for name in ("tighter-0.3", "twice")})
    source = tmp_path / "from"
    source.mkdir()
    iopddl.save(small(), source / "one.json.gz")

    write_variants(source, tmp_path / "to")

    names = sorted(path.name for path in (tmp_path / "to").iterdir())
    assert names == ["one_tighter-0.3.json.gz", "one_twice.json.gz"]
    assert iopddl.load(tmp_path / "to" / "one_twice.json.gz").num_nodes == 2 * small().num_nodes

"""Tables with strategies left out: what is left costs what it did."""

from functools import cache

import numpy as np
import pytest

from autopar.formulate.building import build_tables
from autopar.formulate.narrow import narrow
from autopar.formulate.step import Pipeline
from autopar.formulate.tables import Tables
from autopar.formulate.weights import problem, weights
from autopar.recompute import Recompute
from autopar.sharding import Mesh
from tests.formulations import COSTS, folded, optimum, random_choice, rules


@cache
def _tables() -> Tables:
    """Return tables on two nodes, so that some collectives leave nodes."""
    return build_tables(folded("gpt2"), rules("gpt2"), Mesh.of(outer=2, inner=8), COSTS)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_takes_what_it_did(seed: int) -> None:
    """Seconds of blocks and the cost of the problem, over random choices that stay and random others left out."""
    found, rng = _tables(), np.random.default_rng(seed)
    assert any(edge.outside is not None for edge in found.edges)
    weighting = weights(found, Pipeline(1, 2, "1f1b"), recompute=Recompute.NONE, hidden=0.5, bounding=True)
    whole = problem(found, weighting)
    choice = random_choice(whole, rng, near=optimum(whole)[1])
    masks = {index: rng.random(node.count) < 0.5 for index, node in enumerate(found.nodes)}
    for index, mask in masks.items():
        mask[choice[index]] = True

    narrower = narrow(found, masks)

    assert narrower is not None
    moved = tuple(int(masks[index][:own].sum()) for index, own in enumerate(choice))
    np.testing.assert_allclose(narrower.block_seconds(moved), found.block_seconds(choice))
    assert problem(narrower, weighting).cost(moved) == pytest.approx(whole.cost(choice))


def test_nothing_left_is_none() -> None:
    """A decision without a strategy has no tables; masks that leave all change nothing."""
    found = _tables()

    assert narrow(found, {0: np.zeros(found.nodes[0].count, dtype=bool)}) is None
    assert narrow(found, {0: np.ones(found.nodes[0].count, dtype=bool)}) is found

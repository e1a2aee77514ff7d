"""Tables with some strategies left out."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from autopar.formulate.building import build_tables
from autopar.formulate.narrow import narrow
from autopar.sharding import Mesh
from tests.executions import COSTS, Execution, model_rules, random_choice


def test_what_is_left_costs_what_it_did(cache_dir: Path) -> None:
    """Of every decision a random choice and a part of the others are left, on a mesh of two nodes."""
    costs = replace(COSTS, cluster=replace(COSTS.cluster, devices_per_node=2))
    tables = build_tables(
        Execution.of("mlp-xs", 4, 1).folded, model_rules("mlp-xs", cache_dir), Mesh.of(outer=2, inner=2), costs
    )
    rng = np.random.default_rng(0)
    choice = random_choice(tables, rng)
    masks = {index: rng.random(node.count) < 0.5 for index, node in enumerate(tables.nodes)}
    for index, strategy in enumerate(choice):
        masks[index][strategy] = True
    assert any(edge.outside is not None for edge in tables.edges)

    left = narrow(tables, masks)

    assert left is not None
    same = [int(masks[index][:strategy].sum()) for index, strategy in enumerate(choice)]
    np.testing.assert_allclose(left.kind_totals(same), tables.kind_totals(choice))
    for edge in left.edges:
        if edge.outside is not None:
            assert edge.outside.table.shape == edge.table.shape

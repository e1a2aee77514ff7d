"""Restricted tables keep the costs of the remaining strategies."""

import numpy as np

from autopar.cluster.presets import PRESETS
from autopar.cost import CostModel
from autopar.formulate.building import build_tables
from autopar.formulate.restrict import narrow
from autopar.sharding import Mesh
from tests.formulations import folded, good_choice, rules


def test_remaining_strategies_keep_their_costs() -> None:
    """Seconds by kind and slot, links between nodes included, of a choice if two strategies per decision remain.

    Nodes have eight devices: the outer axis of the mesh crosses nodes, the inner one does not.
    """
    tables = build_tables(folded("gpt2"), rules("gpt2"), Mesh.of(outer=2, inner=8), CostModel(PRESETS["h100"]))
    rng = np.random.default_rng(0)
    for choice in (good_choice("gpt2", "train"), tuple(int(rng.integers(node.count)) for node in tables.nodes)):
        choice = tuple(min(own, node.count - 1) for own, node in zip(choice, tables.nodes, strict=True))
        masks = {}
        for index, node in enumerate(tables.nodes):
            masks[index] = np.zeros(node.count, dtype=bool)
            masks[index][[choice[index], int(rng.integers(node.count))]] = True

        less = narrow(tables, masks)

        assert less is not None
        same = tuple(int(mask[: choice[index]].sum()) for index, mask in masks.items())
        assert less.kind_totals(same).tolist() == tables.kind_totals(choice).tolist()
        for edge in less.edges:
            assert edge.outside is not None
            assert edge.outside.table.shape == edge.table.shape

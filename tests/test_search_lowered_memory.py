"""What choices hold: found faster for one that is like the last, and equal."""

import numpy as np
import pytest

from autopar.configuration import Configuration
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.tables import Tables
from autopar.program.block import BlockLowering, LoweredKind
from autopar.recompute import Recompute
from autopar.search.lowered_memory import ChoiceCosts
from autopar.sharding import Mesh
from tests.formulations import COSTS, random_choice, tables

CONFIGURATION = Configuration(2, Mesh.of(outer=2, inner=2), 4, "1f1b")


def _choices(found: Tables) -> list[tuple[int, ...]]:
    """Return a choice and others, each of which differs from the one before in a few decisions."""
    pipeline = CONFIGURATION.pipeline(COSTS.stack)
    instance = problem(found, weights(found, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=True))
    rng = np.random.default_rng(0)
    choices = [tuple([0] * instance.num_nodes)]
    for _ in range(6):
        choices.append(random_choice(instance, rng, near=choices[-1]))
    return choices


def test_what_was_weighed_before_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has weighed other choices says what a new one says, and lowers fewer blocks."""
    found, pipeline = tables("mlp-xs"), CONFIGURATION.pipeline(COSTS.stack)
    lowered: list[int] = []
    run = BlockLowering.run

    def count(block: BlockLowering) -> LoweredKind:
        lowered.append(block.kind.id)
        return run(block)

    monkeypatch.setattr(BlockLowering, "run", count)
    choices = list(dict.fromkeys(_choices(found)))

    kept = ChoiceCosts(found, pipeline, found.mesh.size)
    one = [kept.bytes(choice, splits=False) for choice in choices]
    few = len(lowered)
    other = [ChoiceCosts(found, pipeline, found.mesh.size).bytes(choice, splits=False) for choice in choices]

    assert len(choices) > 2
    assert few < len(lowered) - few == len(choices) * len(found.folded.kinds)
    for memory, anew in zip(one, other, strict=True):
        for what in ("resident", "gathered", "reducing", "update", "arriving", "returning", "state"):
            np.testing.assert_array_equal(getattr(memory, what), getattr(anew, what))
        blocks = len(found.folded.chain)
        assert memory.peak(0, blocks, 2, (Recompute.NONE,) * blocks) == anew.peak(
            0, blocks, 2, (Recompute.NONE,) * blocks
        )

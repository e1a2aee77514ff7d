"""The words for what a mesh axis does."""

from pathlib import Path

import pytest

import autopar
from autopar.degrees import Degrees
from autopar.search.roles import AxisTallies
from autopar.sharding import Partial, Placement, Replicate, Shard


def tallies(**fields: tuple[Placement, float]) -> AxisTallies:
    """Return an axis that places a part of the elements so and replicates the rest, by field."""
    result = AxisTallies.empty()
    for name, (placement, share) in fields.items():
        getattr(result, name).add(placement, share, 4)
        getattr(result, name).add(Replicate(), 1 - share, 4)
    return result


@pytest.mark.parametrize(
    ("axis", "role"),
    [
        (tallies(activations=(Shard(0), 0.9)), "dp"),
        (tallies(activations=(Shard(0), 0.9), used=(Shard(1), 0.9)), "dp"),
        (tallies(activations=(Shard(2), 0.4), used=(Shard(1), 0.9)), "tp"),
        (tallies(activations=(Shard(1), 0.9), used=(Shard(0), 0.2)), "sp"),
        (tallies(activations=(Shard(2), 0.9)), "spatial"),
        (tallies(experts=(Shard(0), 0.9), used=(Shard(0), 0.4)), "ep"),
        (tallies(activations=(Shard(2), 0.4), used=(Shard(1), 0.2)), "tp"),
        (tallies(activations=(Shard(2), 0.4), used=(Shard(1), 0.01)), "idle"),
    ],
)
def test_an_axis_is_called_what_it_does_to_most_elements(axis: AxisTallies, role: str) -> None:
    """An axis that splits a fifth of the parameters is not idle, one that splits a hundredth is."""
    assert axis.role == role


def test_a_tied_head_is_no_activation(cache_dir: Path) -> None:
    """Its transposed embedding is larger than all activations of a short sequence, and split by no data axis."""
    dims = {"num_layers": 2, "seq": 32}

    plan = autopar.predict("zoo:gpt2", Degrees(dp=2, tp=2, global_batch=8), dims=dims, cache_dir=cache_dir).plan

    assert plan.summary.startswith("dp=2 × tp=2")


@pytest.mark.parametrize("halves", [(Shard(1), Shard(2)), (Shard(1), Partial("sum"))])
def test_an_axis_that_shares_all_work_is_not_idle(halves: tuple[Placement, Placement]) -> None:
    """The logits of a head by their vocabulary, dim 2 or, turned for the loss, 1; or as terms of a sum."""
    axis = AxisTallies.empty()
    for placement in halves:
        axis.activations.add(placement, 0.5, 3)
    axis.used.add(Replicate(), 1.0, 2)  # the embedding, whose transpose is split

    assert axis.role == "tp"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(dp=4, ep=2, zero=1, global_batch=16), "dp=4 (zero-1) × pp=1"),
        (Degrees(dp=4, ep=2, tp=2, sequence_parallel=True, global_batch=16), "dp=4 × tp=2 (sequence parallel) × pp=1"),
    ],
)
def test_expert_groups_are_data_parallel(degrees: Degrees, words: str, cache_dir: Path) -> None:
    """Rows of experts are split by expert and by place; what experts have of their own is not shared by ZeRO."""
    plan = autopar.predict("zoo:mixtral-8x7b", degrees, dims={"num_layers": 2}, cache_dir=cache_dir).plan

    assert plan.summary.startswith(words)

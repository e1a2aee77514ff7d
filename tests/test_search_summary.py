"""The words for what a mesh axis does."""

import pytest

from autopar.search.roles import AxisTallies
from autopar.sharding import Placement, Replicate, Shard


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

"""What else holds of a strategy: blocks of unequal sizes, and shards that are block-cyclic.

Both say that the op does not mind which rows of a sharded dim a device has. They are found like the strategy itself, by
running it on such parts.
"""

from dataclasses import replace
from math import gcd

from autopar.discover.rules import Strategy
from autopar.discover.trial import Trial
from autopar.sharding import Placement, Shard


def holds_cyclic(strategy: Strategy, trial: Trial, *, finest: bool) -> bool:
    """Whether a strategy also holds with all its numbers of chunks multiplied by the same factor.

    Args:
        strategy: What was found.
        trial: Where it holds.
        finest: Try the largest factor, chunks of a single row per device, and not the smallest.
    """
    sizes = trial.sharded_sizes(strategy)
    n = trial.divisor(strategy)
    if not sizes or n is None or strategy.halos or strategy.local is not None:
        return False
    rows = gcd(*(size // (n * chunks) for size, chunks in sizes))
    factors = [factor for factor in range(2, rows + 1) if rows % factor == 0]
    return bool(factors) and trial.holds(_finer(strategy, factors[-1 if finest else 0]), n)


def _finer(strategy: Strategy, factor: int) -> Strategy:
    """Return a strategy with all its numbers of chunks multiplied."""

    def multiplied(placement: Placement) -> Placement:
        return Shard(placement.dim, placement.chunks * factor) if isinstance(placement, Shard) else placement

    return replace(
        strategy, inputs=tuple(map(multiplied, strategy.inputs)), outputs=tuple(map(multiplied, strategy.outputs))
    )


def holds_uneven(strategy: Strategy, trial: Trial) -> bool:
    """Whether a strategy also holds on blocks of unequal sizes, if all that it shards is of one size."""
    sizes = trial.sharded_sizes(strategy)
    n = trial.divisor(strategy)
    changed = (*strategy.scaled, *strategy.halos, *strategy.replaced)
    if len(set(sizes)) != 1 or n is None or changed:
        return False
    size, chunks = sizes[0]
    return chunks == 1 and size > n and trial.holds(strategy, n, uneven=True)

"""Ops that are defined to take a device's own term of a mean for the whole: batch normalisation per device.

That is a semantics, not something that running an op on shards could show: a device that holds some of the samples
normalises them by their own mean and variance, as `torch.nn.BatchNorm2d` does under data parallelism. Such an op says
so in its attribute `per_device`. Where it shards the batch (dim 0 of its first input), its inputs named here are terms
of a mean instead of whole values. An axis that shards other dims is not concerned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.discover.rules import Strategy
from autopar.ir.graph import Attr
from autopar.sharding import Partial, Replicate, Shard

PER_DEVICE = "per_device"

_MEANS: Mapping[str, tuple[int, ...]] = {
    "autopar::BatchNorm": (3, 4),
    "autopar::BatchNormGradMeans": (1, 2),
    "autopar::BatchNormGrad": (2, 3, 4, 5),
}
"""Inputs that are means over the batch, by kind."""
_MADE: Mapping[str, tuple[int, ...]] = {"autopar::BatchNormGradMeans": (2, 3)}
"""Outputs that are, where terms of a sum are possible, too: a value has one kind of terms."""


def with_own_means(kind: str, attrs: Mapping[str, Attr], strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return the strategies of an op, with terms for means over the batch where it shards the batch and says so.

    Those that would leave other terms of such means are left out.
    """
    means = _MEANS.get(kind, ()) if attrs.get(PER_DEVICE) else ()
    if not means:
        return tuple(strategies)
    made = _MADE.get(kind, ())
    return tuple(
        _own(strategy, means) if _shards_batch(strategy) else strategy
        for strategy in strategies
        if all(strategy.outputs[index] != Partial() for index in made)
    )


def takes_own_mean(strategy: Strategy) -> bool:
    """Whether a strategy takes terms of a mean beside a shard of the batch, which only ops named here do."""
    return _shards_batch(strategy) and Partial("mean") in strategy.inputs


def _shards_batch(strategy: Strategy) -> bool:
    return bool(strategy.inputs) and isinstance(strategy.inputs[0], Shard) and strategy.inputs[0].dim == 0


def _own(strategy: Strategy, means: Sequence[int]) -> Strategy:
    assert all(isinstance(strategy.inputs[index], Replicate) for index in means), f"{strategy} shards statistics"
    inputs = tuple(Partial("mean") if index in means else own for index, own in enumerate(strategy.inputs))
    return replace(strategy, inputs=inputs)

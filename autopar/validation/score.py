"""How good predictions are: errors by source, and whether the plan predicted to be best is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from autopar.validation.run import Outcome

NEAR = 0.04
"""Error that counts as near."""
GOOD_REGRET = 0.03
"""A choice of plan this much slower than the best counts as good."""
_GROUP = 3
"""Plans that make a group worth ranking."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predicted step times, as shares of the measured ones.

    Attributes:
        rows: Rows predicted.
        mean: Mean of the absolute error.
        median: Its median.
        p90: What 90 % of the rows do not exceed.
        near: Share of rows with an error of at most `NEAR`.
        bias: Mean of the error with its sign: below zero is optimistic.
    """

    rows: int
    mean: float
    median: float
    p90: float
    near: float
    bias: float


def errors(values: Sequence[float]) -> Errors | None:
    """Return the summary of errors, None if there are none.

    >>> errors([0.1, -0.02, 0.03]).median
    0.03
    """
    if not values:
        return None
    sizes = sorted(abs(value) for value in values)
    last = sizes[min(len(sizes) - 1, -(-9 * len(sizes) // 10) - 1)]
    near = sum(size <= NEAR for size in sizes) / len(sizes)
    return Errors(len(values), fmean(sizes), median(sizes), last, near, fmean(values))


@dataclass(frozen=True, slots=True)
class Ranking:
    """How plans of one job are ranked: one model, software and precision, on one number of devices.

    Attributes:
        name: Framework, model and number of devices.
        plans: How many plans were measured and predicted; a plan that was measured several times has their median.
        tau: Kendall's rank correlation of predicted and measured seconds per sample.
        regret: How much slower the plan predicted to be best is than the best measured one.
    """

    name: str
    plans: int
    tau: float
    regret: float


def rankings(outcomes: Sequence[Outcome]) -> tuple[Ranking, ...]:
    """Return how the plans of every job are ranked, by seconds per sample."""
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        row = outcome.row
        if outcome.predicted is not None and row.global_batch:
            job = row.framework, row.arch, row.layers, row.hidden, row.heads, row.seq, row.gpu, row.n_gpus
            key = *job, outcome.stack, row.precision, row.numbers, row.lora
            groups.setdefault(key, []).append(outcome)
    found = []
    for members in groups.values():
        plans: dict[float, list[float]] = {}
        for o in members:
            if o.measured is not None and o.predicted is not None and o.row.global_batch:
                plans.setdefault(o.predicted / o.row.global_batch, []).append(o.measured / o.row.global_batch)
        # what is predicted alike is one plan, run with several versions or on several machines
        pairs = [(median(measured), predicted) for predicted, measured in plans.items()]
        if len(pairs) < _GROUP:
            continue
        best = min(measured for measured, _ in pairs)
        chosen = min(pairs, key=lambda pair: pair[1])[0]
        row = members[0].row
        sizes = f"{row.model or row.arch} {row.layers}x{row.hidden}" if row.layers else str(row.model)
        name = f"{row.source} {sizes}, {row.n_gpus} devices"
        found.append(Ranking(name, len(pairs), kendall(pairs), chosen / best - 1))
    return tuple(found)


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-a: concordant less discordant pairs, over all pairs.

    >>> kendall([(1, 10), (2, 20), (3, 15)])
    0.3333333333333333
    """
    total = 0
    for (first, other_first), (second, other_second) in combinations(pairs, 2):
        product = (first - second) * (other_first - other_second)
        total += (product > 0) - (product < 0)
    return total / (len(pairs) * (len(pairs) - 1) / 2)


def good_share(found: Sequence[Ranking]) -> float:
    """Return the share of groups in which the plan predicted to be best is about as fast as the best."""
    return sum(ranking.regret <= GOOD_REGRET for ranking in found) / len(found) if found else 0.0

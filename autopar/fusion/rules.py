"""Buckets as frameworks cut them: by one size, in the order in which the backward makes gradients.

Each framework has its own restriction (`RULES`); the best size under it is found by trying sizes in the simulator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.fusion.buckets import BucketTimer, StageCuts, Timed
from autopar.fusion_plan import BucketCuts

MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class SizeRule:
    """How gradients are cut by size.

    Attributes:
        limit: Bytes of a bucket.
        first: Bytes of the first bucket, where it has a limit of its own.
        before: Whether a bucket ends before the gradient that would exceed the limit; else with the one that reaches
            it.
        most: Gradients of a bucket at most; 0 for any number.
    """

    limit: float
    first: float | None = None
    before: bool = False
    most: int = 0

    def ends(self, sizes: Sequence[float]) -> tuple[int, ...]:
        """Return one past the last gradient of each bucket.

        >>> [SizeRule(4.0, *rest).ends([1.0, 3.0, 2.0, 2.0, 3.0]) for rest in ((), (1.0,), (None, True))]
        [(2, 4, 5), (1, 3, 5), (2, 4, 5)]
        >>> SizeRule(100.0, before=True, most=2).ends([1.0, 3.0, 2.0, 2.0, 3.0])
        (2, 4, 5)
        """
        found: list[int] = []
        held, limit = 0.0, self.limit if self.first is None else self.first
        for number, size in enumerate(sizes):
            first = found[-1] if found else 0
            if (self.before and held and held + size > limit) or (self.most and number - first == self.most):
                found.append(number)
                held, limit = 0.0, self.limit
            held += size
            if not self.before and held >= limit:
                found.append(number + 1)
                held, limit = 0.0, self.limit
        return tuple(found) if found and found[-1] == len(sizes) else (*found, len(sizes))


DDP_FIRST = 1 * MIB
"""First bucket of DistributedDataParallel in the order of arrival (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)."""

RULES = {
    "ddp": SizeRule(25 * MIB, DDP_FIRST),
    "megatron": SizeRule(25e6),
    "deepspeed": SizeRule(25e6, before=True),
    "xla": SizeRule(30 * MIB, before=True, most=256),
}
"""What each framework does with a size; the sizes here are placeholders for those that are tried.

PyTorch: `Reducer::rebuild_buckets` and `compute_bucket_assignment_by_size` close a bucket with the gradient that
reaches `bucket_cap_mb`, the first one at its own limit; since PyTorch 2.13 it has that of the others where a size is
given, and `bucket_cap_mb_list` gives each bucket its own. Megatron-Core: `_ParamAndGradBuffer` closes one with the
parameter that reaches `bucket_size`. DeepSpeed: stage_1_and_2.py reduces what it has before a gradient that would
exceed `reduce_bucket_size`. XLA: `CombineInstructionsByKey` (collective_combiner_utils.h) combines what stays within
`xla_gpu_all_reduce_combine_threshold_bytes` (or that of reduce-scatters), 256 collectives at most (nvgpu_compiler)."""

NUM_SIZES = 24
"""Sizes that are tried, from the mean gradient to all of them, in equal ratios."""


def rule_cuts(timer: BucketTimer, rule: SizeRule) -> tuple[StageCuts, ...]:
    """Return the buckets of every stage of a program by a rule."""
    found = []
    for each in timer.traffic(timer.uncut):
        sizes: dict[tuple[str, str, str, int], list[float]] = {}
        for own in each.issued:
            sizes.setdefault(own.key, []).append(own.traffic.nbytes)
        found.append(tuple(BucketCuts(*key, rule.ends(own)) for key, own in sizes.items()))
    return tuple(found)


def sizes_to_try(timer: BucketTimer) -> list[float]:
    """Return sizes of buckets between that of a gradient and that of all gradients of a stage."""
    every = [[own.traffic.nbytes for own in each.issued] for each in timer.traffic(timer.uncut) if each.issued]
    if not every:
        return []
    least, most = min(sum(own) / len(own) for own in every), max(sum(own) for own in every)
    return np.geomspace(max(1.0, least), max(1.0, most), NUM_SIZES).tolist() if most > least else [max(1.0, most)]


def best_rule(timer: BucketTimer, rule: SizeRule, sizes: Iterable[float] | None = None) -> tuple[SizeRule, Timed]:
    """Return a rule with the size that makes the shortest step, the smallest of those that tie, and the step.

    Args:
        timer: Of the program; it has gradients to reduce.
        rule: The restriction; its size is not used.
        sizes: Sizes to try; None for `sizes_to_try`.
    """
    known: dict[tuple[StageCuts, ...], Timed] = {}
    best: tuple[SizeRule, Timed] | None = None
    for size in sizes_to_try(timer) if sizes is None else sizes:
        tried = replace(rule, limit=float(size))
        cuts = rule_cuts(timer, tried)
        if cuts not in known:
            known[cuts] = timer.time(cuts)
        if best is None or known[cuts].step_seconds < best[1].step_seconds:
            best = tried, known[cuts]
    assert best is not None, "there are sizes to try where there are gradients"
    return best

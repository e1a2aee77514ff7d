"""The microbatch of a plan by degrees that does not say which."""

from dataclasses import dataclass, replace

from autopar.configuration import divisors
from autopar.cost import default_limit
from autopar.degrees import Degrees
from autopar.errors import JobError, TacticError
from autopar.estimates.estimator import Estimator
from autopar.prediction import Setting
from autopar.task import job_machine

_WORSE = 2
"""Sizes in a row that are slower than the best one, after which larger ones are not estimated."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Degrees with a microbatch, and what it was chosen among.

    Attributes:
        degrees: The plan.
        tried: Sizes that were estimated, ascending.
        fits: Whether any of them fits into memory.
        is_only: Whether no other size can be planned.
    """

    degrees: Degrees
    tried: tuple[int, ...]
    fits: bool
    is_only: bool


def choose_microbatch(setting: Setting, degrees: Degrees, memory_limit: float | None = None) -> Chosen:
    """Return degrees with the microbatch that is fastest by formula among those that fit into memory.

    Args:
        setting: Model, hardware and software.
        degrees: The plan; its microbatch is not looked at.
        memory_limit: Bytes per device; None for most of the device's memory.

    Raises:
        AutoparError: If the degrees fit neither the model nor the cluster with any microbatch.
    """
    limit = memory_limit or default_limit(job_machine(degrees.gpus, setting.cluster))
    estimator = Estimator(setting.predictor, setting.cluster, setting.stack, setting.policy, setting.profile)
    fixed = setting.predictor.workload.fixed_batch
    sizes = divisors(degrees.global_batch // degrees.dp) if fixed is None else [max(1, fixed // degrees.dp)]
    tried: list[int] = []
    best, seconds, slower = 0, float("inf"), 0
    trouble: JobError | TacticError | None = None
    for size in sizes:
        sized = replace(degrees, microbatch=size)
        try:
            found = estimator.estimate([sized])
        except (JobError, TacticError) as error:  # too few microbatches for the schedule, say
            trouble = trouble or error
            continue
        tried.append(size)
        if found.peak_bytes[0] > limit:
            break
        slower = 0 if found.step_seconds[0] < seconds else slower + 1
        if not slower:
            best, seconds = size, float(found.step_seconds[0])
        if slower == _WORSE:
            break
    if not tried and trouble is not None:
        raise trouble
    is_only = len(sizes) == 1 or (best > 0 and len(tried) == 1)
    return Chosen(replace(degrees, microbatch=best or tried[0]), tuple(tried), best > 0, is_only)

"""What other precisions would bring a plan: the same plan, lowered and simulated in each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import Cluster, cluster_from_dict
from autopar.cost import POLICIES, CostModel, DtypePolicy, load_policy
from autopar.plan import Plan
from autopar.program.lower import lower
from autopar.simulate import simulate
from autopar.workload import job_stack, open_plan

LOW_WEIGHTS = ("fp8", "fp8-current", "mxfp8")
"""Formats that frameworks can keep weights in alone."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A plan in another precision.

    Attributes:
        precision: Its name.
        step_seconds: Simulated seconds of a step.
        peak_bytes: Bytes on the fullest device.
        fits: Whether every stage stays within the memory limit.
    """

    precision: str
    step_seconds: float
    peak_bytes: float
    fits: bool


def in_other_precisions(
    plan: Plan, *, model: str | Path | None = None, cache_dir: str | Path | None = None
) -> list[Effect]:
    """Return a plan in every precision its devices have numbers for, its own first.

    Degrees, microbatches and recompute stay as they are: a search in another precision may find better ones.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    workload = open_plan(plan, model, cache_dir=cache_dir)
    folded = workload.folded(plan.microbatch)
    cluster = cluster_from_dict(plan.job.cluster)
    effects = []
    for policy in _policies(plan, cluster):
        costs = CostModel(cluster, policy, job_stack(plan.job))
        # where buckets are cut belongs to the plan's own precision
        fusion = plan.fusion if policy.name == plan.job.precision else None
        own = replace(plan, job=replace(plan.job, precision=policy.name), fusion=fusion)
        timeline = simulate(lower(own, folded, costs), costs, verified=True)
        fits = timeline.fits(*plan.stage_limits)
        effects.append(Effect(policy.name, timeline.step_seconds, timeline.peak_bytes, fits))
    return effects


def _policies(plan: Plan, cluster: Cluster) -> Iterator[DtypePolicy]:
    own = load_policy(plan.job.precision)
    names = [own.name, *POLICIES, *(f"{name},weights=low" for name in LOW_WEIGHTS)]
    known = {numbers for numbers, _ in cluster.device.peaks}
    for name in dict.fromkeys(names):
        policy = load_policy(name)
        is_of_weights = policy.format is not None and not policy.format.activations
        if known.issuperset(policy.classes) and not (is_of_weights and plan.job.mode == "train"):
            yield policy

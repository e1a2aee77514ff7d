"""A plan beside others for the same job: the best of other families, usual practice, plans that were given."""

from collections.abc import Sequence

from autopar.page.records import Compared
from autopar.plan import Plan

THIS, RUNNER_UP, GIVEN = "this plan", "runner-up", "given plan"


def compared(plan: Plan, others: Sequence[Plan] = ()) -> tuple[Compared, ...]:
    """Return a plan, its runners-up, what usual practice found, and those of `others` that are for the same devices.

    Plans that were not simulated have no peak to compare and are left out. The search keeps only runners-up that
    differ substantially, so that each stands for a family of plans.
    """
    cluster = plan.job.cluster.get("name")
    same = [
        other
        for other in others
        if (other.job.gpus, other.job.global_batch, other.job.cluster.get("name"))
        == (plan.job.gpus, plan.job.global_batch, cluster)
    ]
    found = [
        *_numbered(THIS, [plan]),
        *_numbered(RUNNER_UP, plan.alternatives),
        *_numbered(GIVEN, same),
    ]
    found += [
        Compared(rival.method, rival.method, rival.summary, rival.step_seconds, rival.peak_bytes)
        for rival in (plan.rival, plan.by_rules)
        if rival is not None and rival.step_seconds is not None and rival.peak_bytes is not None
    ]
    return tuple(found)


def pareto(points: Sequence[Compared]) -> list[Compared]:
    """Return the plans that no other plan beats in both step time and memory, fastest first."""
    front: list[Compared] = []
    for point in sorted(points, key=lambda each: (each.step, each.peak)):
        if not front or point.peak < front[-1].peak:
            front.append(point)
    return front


def _numbered(kind: str, plans: Sequence[Plan]) -> list[Compared]:
    simulated = [(plan.summary, plan.simulated) for plan in plans if plan.simulated is not None]
    return [
        Compared(
            kind if len(plans) == 1 else f"{kind} {number}",
            kind,
            summary,
            found.step_seconds,
            max((stage.peak for stage in found.stages), default=0.0),
        )
        for number, (summary, found) in enumerate(simulated, start=1)
    ]

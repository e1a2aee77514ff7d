"""A plan beside usual practice: what grid search and rules of thumb find, and whichever plan is the best known.

A search that a time limit cuts may miss a plan that grid search comes across. Such a plan is adopted: it becomes the
answer, with the bound that the search has proven, and the best plan of the search is the first of its runners-up.
"""

import math
from dataclasses import dataclass, replace

from autopar.cluster import cluster_from_dict
from autopar.fusion_plan import BUCKETS
from autopar.plan import HistoryPoint, Plan, Remark, Rival, SearchReport
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.program.lower import lower
from autopar.remarks import left_free
from autopar.simplicity import NEAR
from autopar.simulate import simulate
from autopar.task import Task
from autopar.verdict import fused, simplest, simulated, step_seconds


@dataclass(frozen=True, slots=True)
class Practice:
    """What usual practice finds for the task of a plan.

    Attributes:
        grid: What grid search comes to.
        rules: What Megatron-LM's documented rules come to; None if nobody asked.
        best: The fastest plan of both that fits, simulated; None if there is none.
    """

    grid: Rival
    rules: Rival | None = None
    best: Plan | None = None

    @property
    def method(self) -> str:
        """The method that found the fastest plan."""
        is_of_rules = (
            self.rules is not None
            and self.rules.step_seconds is not None
            and self.rules.step_seconds < (self.grid.step_seconds or math.inf)
        )
        return self.rules.method if self.rules is not None and is_of_rules else self.grid.method


def beside(plan: Plan, practice: Practice, task: Task, fusion: str = BUCKETS) -> Plan:
    """Return the best plan known, with what usual practice comes to beside it.

    Args:
        plan: What the search for a task came to.
        practice: What usual practice finds for it.
        task: The task.
        fusion: What is fused, as of `Effort`.
    """
    best, chosen = practice.best, plan
    if best is not None and step_seconds(best) <= (1 + NEAR) * step_seconds(plan):
        own = with_fusion(best, task, fusion)
        ordered = sorted((plan, own), key=step_seconds)
        number, _ = simplest(ordered, task)
        if step_seconds(own) < step_seconds(plan) and ordered[number] is own:
            chosen = _adopted(own, plan, practice.method, task)
    return replace(chosen, rival=practice.grid, by_rules=practice.rules)


def with_fusion(plan: Plan, task: Task, fusion: str) -> Plan:
    """Return a plan by degrees with what is fused in plans of the search, simulated."""
    folded = task.workload.folded(plan.microbatch)
    costs = replace(task.costs, cluster=cluster_from_dict(plan.job.cluster))
    found, program = fused(plan, lower(plan, folded, costs), folded, costs, fusion)
    return plan if found.fusion is None else simulated(found, simulate(program, costs), folded, costs)


def _adopted(own: Plan, plan: Plan, method: str, task: Task) -> Plan:
    """Return a plan of usual practice as the answer of a search that came to a slower one."""
    report = plan.search
    assert report is not None, "it was searched for"
    assert own.simulated is not None, "it was simulated"
    slower = 100 * (step_seconds(plan) / step_seconds(own) - 1)
    more = "; a larger --time-limit lets the search find more" if report.termination == "time limit" else ""
    told = [Remark("adopted", f"found by {method}; the best plan of the search is {slower:.1f} % slower{more}")]
    if free := task.job.gpus - own.job.gpus:
        told.append(left_free(free, task.job.gpus, task.costs.cluster))
    return adopted(replace(own, simulated=replace(own.simulated, remarks=(*told, *own.simulated.remarks))), plan)


def adopted(own: Plan, plan: Plan) -> Plan:
    """Return a plan known beside a search as its answer, with the search's report and its plans as alternatives.

    Args:
        own: The plan, which is faster.
        plan: The best plan of the search.
    """
    assert plan.search is not None, "it was searched for"
    others = sorted((plan, *plan.alternatives), key=step_seconds)[: max(1, len(plan.alternatives))]
    return replace(
        own,
        search=_report(plan.search, own.objective),
        alternatives=tuple(other.without_alternatives() for other in others),
    )


def _report(report: SearchReport, objective: float) -> SearchReport:
    """Return the report of a search whose plan is another one, by its seconds by the formula."""
    bound = min(report.bound, objective)
    ended, history = report.termination, report.history
    if ended in ("optimal", "exhausted"):
        ended = "optimal" if bound >= objective * (1 - OPTIMALITY_TOLERANCE) else "exhausted"
    if history and objective < history[-1].objective:
        now = sum(phase.seconds for phase in report.phases)
        history = (*history, HistoryPoint(max(now, history[-1].seconds), objective, min(history[-1].bound, objective)))
    return replace(
        report,
        objective=objective,
        bound=bound,
        termination=ended,
        complete=min(report.complete, objective),
        history=history,
    )

"""The answer in at most about 25 lines: what to run, how fast it will be, whether it fits, what to do next."""

import math
from collections.abc import Sequence

from autopar.escaping import one_line
from autopar.plan import Plan, Rival, SearchReport, Simulated
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.report.summary import (
    assumptions,
    buckets,
    fullest,
    headline,
    is_plan_of,
    price,
    spent,
    step_band,
    throughput,
)
from autopar.report.text import WIDTH, format_change, format_entries, format_slower
from autopar.units import format_seconds

TOLD_APART = 0.02
"""Share of a step from which on predictions tell plans of one job apart: of pairs of published steps that are predicted
to differ by less, the order is right in about 55 of 100 (docs/benchmarks/pairs.md)."""


def format_answer(plan: Plan, commands: Sequence[tuple[str, str]] = ()) -> str:
    """Return the answer to a request for a plan: the text `autopar solve` ends with.

    Args:
        plan: A plan as `autopar.solve` returns it; parts it lacks (simulation, search, alternatives) are left out.
        commands: What to do next: commands, and what each is for.
    """
    lines = [*headline(plan), "", *format_entries(_entries(plan)), *format_commands(commands)]
    return "\n".join(lines) + "\n"


def format_commands(commands: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines with commands to paste and what each is for, beside it where the line has room, else above it."""
    if not commands:
        return []
    typed = [(f"  {one_line(command)}", f"# {purpose}") for command, purpose in commands]
    beside = max((len(command) for command, purpose in typed if len(command) + len(purpose) + 2 <= WIDTH), default=0)
    lines = ["", "Next:"]
    for command, purpose in typed:
        if beside + len(purpose) + 2 <= WIDTH and len(command) <= beside:
            lines.append(f"{command:<{beside}}  {purpose}")
        else:
            lines += [f"  {purpose}", command]
    return lines


def next_commands(plan: Plan, folder: str | None, command: str) -> list[tuple[str, str]]:
    """Return what to do with a plan next: commands, and what each is for.

    Args:
        plan: The plan.
        folder: Where it was written, quoted for a shell; None if it was not.
        command: How it was made, quoted for a shell.
    """
    where = folder or "plan"
    trains = plan.job.mode == "train" and plan.model.tokens > 0
    framework, others = ("megatron", "torchtitan, jax, ...") if trains else ("pytorch", "jax, onnx")
    file = f"{where}/plan.json"
    page = f"autopar report {file} -o {where}/report.html"
    return [
        *([] if folder else [(f"{command} -o {where}", "write the plan")]),
        (f"autopar export {file} --to {framework}", f"or {others}"),
        (f"autopar explain {file}", "where time and memory go"),
        (f"autopar simulate {file} --critical-path", "what the step waits for"),
        *([(page, "a page to look at")] if plan.search is None else []),
    ]


def _entries(plan: Plan) -> list[tuple[str, str]]:
    simulated, search = plan.simulated, plan.search
    entries = [("plan", plan.summary)]
    if simulated is None:
        entries.append(("step time", f"{format_seconds(plan.objective)} by the planner's formula, not simulated"))
    else:
        step = simulated.step_seconds
        entries += [
            ("step time", f"{format_seconds(step)}{step_band(plan, simulated)}"),
            ("throughput", f"{throughput(plan, step)}, MFU {100 * simulated.mfu:.1f} %"),
            *price(plan, simulated),
            ("memory", fullest(plan, simulated)),
            ("spent on", spent(simulated)),
            *buckets(plan),
            *assumptions(plan),
        ]
    if search is not None:
        entries.append(("optimality", _optimality(search)))
    if simulated is not None:
        entries += [*_ties(plan, simulated), *_usual(plan, simulated)]
        entries += [("note", remark.text) for remark in simulated.remarks if remark.kind not in ("choice", "adopted")]
    return entries


def _optimality(search: SearchReport) -> str:
    """Return how much faster another plan could be, and why the search ended."""
    if search.gap <= OPTIMALITY_TOLERANCE:
        told = "no plan of the searched space is faster"
    else:
        told = f"no plan of the searched space is more than {math.ceil(1000 * search.gap - 1e-6) / 10:.1f} % faster"
    why = {
        "exhausted": "search complete",
        "optimal": "search complete",
        "time limit": "stopped by the time limit: a larger --time-limit may find a better plan or prove more",
        "interrupted": "interrupted: this is the best plan found until then",
    }
    return f"{told} ({why.get(search.termination, search.termination)})"


def _ties(plan: Plan, simulated: Simulated) -> list[tuple[str, str]]:
    """Return the plans that are as fast as far as predictions can tell, if there are any; else the runner-up."""
    others = [(own, own.simulated.step_seconds) for own in plan.alternatives if own.simulated is not None]
    step = simulated.step_seconds
    ties = [(own, seconds) for own, seconds in others if seconds <= (1 + TOLD_APART) * step]
    if ties:
        named = "; ".join(f"{own.summary} ({format_change(seconds, step)})" for own, seconds in ties)
        return [("ties", f"equal within the model's error ({100 * TOLD_APART:.0f} %): {named}")]
    if others:
        own, seconds = others[0]
        return [("next best", f"{own.summary}: {format_slower(seconds, step)}")]
    return []


def _usual(plan: Plan, simulated: Simulated) -> list[tuple[str, str]]:
    """Return what usual practice comes to: grid search and Megatron's rules, as far as they were tried."""
    grid, rules = plan.rival, plan.by_rules
    entries = []
    if grid is not None:
        adopted = next((remark.text for remark in simulated.remarks if remark.kind == "adopted"), "")
        entries.append((grid.method, _beside(grid, plan, simulated, adopted)))
    if rules is not None and rules.step_seconds is not None:
        among = f" (of {rules.tried:,} tried in its share of the time)" if rules.stopped else ""
        entries.append(("Megatron", f"its documented rules lead to {_against(rules, plan, simulated)}{among}"))
    elif rules is not None and rules.tried and not rules.stopped:
        entries.append(("Megatron", "its documented rules lead to no plan that fits"))
    return entries


def _beside(rival: Rival, plan: Plan, simulated: Simulated, adopted: str) -> str:
    """Return what another way to search came to, and how many configurations it tried."""
    if not rival.tried:
        return "no configuration tried in its share of the time"
    if rival.step_seconds is None:
        which = f"{rival.tried:,} of {rival.plans:,}" if rival.stopped else f"{rival.tried:,}"
        return f"no plan that fits among {which} configurations"
    among = f"of {rival.tried:,} configuration{'' if rival.tried == 1 else 's'} tried"
    if adopted and is_plan_of(rival, plan):
        return f"this plan is its best, {among}; {adopted.partition('; ')[2]}"
    return f"{_against(rival, plan, simulated)}, {among}"


def _against(rival: Rival, plan: Plan, simulated: Simulated) -> str:
    """Return the best plan of another way to search, and how much slower it is."""
    if is_plan_of(rival, plan):
        return "the same plan"
    assert rival.step_seconds is not None, "it has a plan"
    return f"{rival.summary}: {format_slower(rival.step_seconds, simulated.step_seconds)}"

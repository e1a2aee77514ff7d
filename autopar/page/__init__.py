"""A plan to look at: one HTML file with charts that work offline, and figures for papers.

    Plan ─ lower, simulate ─▶ Program, Timeline ─ prepare ─▶ View ─ Bokeh ─▶ report.html
                                                             View ─ matplotlib ─▶ figures

What is shown is prepared in one place (`View`), so that page and figures cannot disagree.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autopar.alternatives import Weighing
    from autopar.cost import Stack
    from autopar.page.view import View
    from autopar.plan import Plan
    from autopar.scenarios import WhatIf
    from autopar.simulate.kineto import Recording

__all__ = ["FORMATS", "check_formats", "look", "write_figures", "write_page", "write_scaling"]

FORMATS = ("png", "svg", "pdf")
"""What figures can be written as."""


def look(
    plan: "Plan",
    *,
    others: "Sequence[Plan]" = (),
    weighing: "Weighing | None" = None,
    whatif: "WhatIf | None" = None,
    traces: "Mapping[str, Recording] | None" = None,
    model: str | Path | None = None,
    stack: "str | Path | Stack | None" = None,
    cache_dir: str | Path | None = None,
) -> "View":
    """Return what there is to see of a plan, its simulated step included (`View.timeline`).

    Args:
        plan: A plan, solved or read from a file.
        others: Other plans of the same model: for other devices, for the chart of scaling, or for the same job.
        weighing: What other decisions than the plan's cost (`autopar.alternatives.weigh`).
        whatif: The model on several clusters and numbers of devices (`autopar.whatif`).
        traces: Measured steps of ranks (`autopar.simulate.kineto.read_trace`), by name.
        model: Where the model is now; None for where it was.
        stack: Name, YAML file or record of a software stack; None for the one it was planned for.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.

    Raises:
        PlanError: If the plan does not fit the model, or one of the others is of another model.
        StackError: If there is no such stack.
        ProgramError: If the plan does not compute the model.
        DataError: If a rank of a trace is not one of the plan.
    """
    from autopar.api import lower_plan
    from autopar.describe.step_parts import roles_by_stage
    from autopar.page.view import prepare
    from autopar.simulate import simulate

    program, costs, folded = lower_plan(plan, model=model, stack=stack, cache_dir=cache_dir)
    timeline = simulate(program, costs, trace=True, verified=True)
    return prepare(plan, program, costs, timeline, roles_by_stage(plan, folded), others, weighing, whatif, traces)


def write_page(view: "View", path: str | Path) -> None:
    """Write the page of a plan: one HTML file that needs neither a network nor a server.

    Raises:
        PlanError: If the file cannot be written.
    """
    from autopar.page.document import render
    from autopar.writing import write_atomically

    write_atomically(Path(path), render(view).encode())


def check_formats(formats: Sequence[str]) -> None:
    """Check that figures can be drawn, before the work whose result they are to show.

    Raises:
        JobError: If matplotlib is not installed, or there is no such format.
    """
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise JobError(f"figures cannot be written as {unknown[0]!r}", hint=f"choose {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise JobError(
            "figures are drawn by matplotlib, which is not installed", hint='pip install "autopar[figures]"'
        ) from None


def write_figures(view: "View", folder: str | Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write the charts of a plan as figures for papers, and return their paths; it takes matplotlib.

    Args:
        view: What there is to see of a plan.
        folder: Where to write timeline, memory, time and the others there are.
        formats: Of `FORMATS`, one file each.

    Raises:
        JobError: If matplotlib is not installed, or there is no such format.
        PlanError: If a file cannot be written.
    """
    check_formats(formats)
    from autopar.page.figures import draw
    from autopar.writing import write_atomically

    paths = []
    for name, kind, data in draw(view, formats):
        paths.append(Path(folder) / f"{name}.{kind}")
        write_atomically(paths[-1], data)
    return paths


def write_scaling(plans: "Sequence[Plan]", folder: str | Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write the figure of throughput against devices, of two plans of one model or more; errors as of `write_figures`.

    Args:
        plans: The plans.
        folder: Where to write it.
        formats: Of `FORMATS`, one file each.
    """
    check_formats(formats)
    from autopar.page.figures import draw_scaling
    from autopar.page.shares import scaling
    from autopar.writing import write_atomically

    paths = []
    for kind, data in draw_scaling(scaling(plans[0], plans[1:]), formats):
        paths.append(Path(folder) / f"scaling.{kind}")
        write_atomically(paths[-1], data)
    return paths

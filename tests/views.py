"""What a page shows of plans and programs that were made by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.alternatives import Alternative, Limit, Weighing
from autopar.page.view import View, prepare
from autopar.plan import BlockPlan, Plan, StagePlan, ValuePlacement
from autopar.program.records import Program
from autopar.scenarios import Cell, WhatIf
from autopar.simulate import simulate
from autopar.simulate.kineto import Recording
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages


def view_of(
    program: Program | None = None,
    plan: Plan | None = None,
    others: Sequence[Plan] = (),
    weighing: Weighing | None = None,
    whatif: WhatIf | None = None,
    traces: Mapping[str, Recording] | None = None,
) -> View:
    """Return the view of a program, by default of two stages and four microbatches, as that of a plan made by hand."""
    program = program or equal_stages(2, 4, "1f1b")
    costs = ExactCosts(latency=0.25)
    timeline = simulate(program, costs, trace=True)
    return prepare(
        _fitted(plan or two_stage_plan(), program), program, costs, timeline, [{}] * len(program.stages), others,
        weighing, whatif, traces,
    )  # fmt: skip


def weighing_of(plan: Plan) -> Weighing:
    """Return what alternatives to a simulated plan cost, made by hand: one of each outcome."""
    simulated = plan.simulated
    assert simulated is not None, "it is weighed against its simulated step"
    slower = replace(simulated, step_seconds=1.25 * simulated.step_seconds)
    more = Alternative("memory limit", "80 GB", "plan", plan=plan.summary, simulated=simulated, complete=True)
    return Weighing(
        plan=plan.summary,
        simulated=simulated,
        decisions=(("pp", "2"), ("tp", "2")),
        alternatives=(
            Alternative("pp", "4", "plan", plan="dp=1 × tp=2 × pp=4", simulated=slower, bound=0.9),
            Alternative("pp", "1", "does not fit", "stage 0 needs 99 GB, 27 GB too much", complete=True),
            Alternative("tp", "4", "plan", plan="tp=4 × pp=2", simulated=slower, bound=1.2, complete=True),
            Alternative("tp", "1", "not looked at"),
        ),
        limit=Limit(0.8, 0, 80e9, more, (("compute", 0.7),)),
        again=None,
        seconds=12.0,
        stopped="time limit",
    )


def whatif_of(plan: Plan) -> WhatIf:
    """Return a model on clusters, made by hand: a plan with a price, and a cell without a plan."""
    return WhatIf(
        "zoo:tiny",
        "token",
        (Cell("h100", 8, "plan", plan=plan, items=65536, gpu_hour_price=2.5), Cell("a100", 4, "does not fit", "9 GB")),
    )


def _fitted(plan: Plan, program: Program) -> Plan:
    """Return a plan with the mesh, the stages and the blocks of a program, and memory for each group of devices."""
    chain = [kind for _, kind in program.blocks()]
    mesh = program.stages[0].mesh.axes
    ends = [0]
    for stage in program.stages:
        ends.append(ends[-1] + len(stage.blocks))
    blocks = tuple(
        BlockPlan(
            kind,
            chain.index(kind),
            tuple(place for place, each in enumerate(chain) if each == kind),
            ops=(),
            states=(ValuePlacement("weight", "R" * len(mesh)),),
        )
        for kind in dict.fromkeys(chain)
    )
    stages = tuple(
        StagePlan(part, stage.devices, "none") for part, stage in zip(pairwise(ends), program.stages, strict=True)
    )
    simulated = plan.simulated
    if simulated is not None:
        groups = len({stage.devices for stage in stages})
        simulated = replace(simulated, stages=(*simulated.stages, *simulated.stages[-1:] * groups)[:groups])
    return replace(plan, mesh=mesh, blocks=blocks, stages=stages, simulated=simulated)

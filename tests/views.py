"""What a page shows of plans and programs that were made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.page.view import View, prepare
from autopar.plan import BlockPlan, Plan, StagePlan, ValuePlacement
from autopar.program.records import Program
from autopar.simulate import simulate
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages


def view_of(program: Program | None = None, plan: Plan | None = None, others: Sequence[Plan] = ()) -> View:
    """Return the view of a program, by default of two stages and four microbatches, as that of a plan made by hand."""
    program = program or equal_stages(2, 4, "1f1b")
    costs = ExactCosts(latency=0.25)
    timeline = simulate(program, costs, trace=True)
    return prepare(
        _fitted(plan or two_stage_plan(), program), program, costs, timeline, [{}] * len(program.stages), others
    )


def _fitted(plan: Plan, program: Program) -> Plan:
    """Return a plan with the mesh, the stages and the blocks of a program."""
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
    return replace(plan, mesh=mesh, blocks=blocks, stages=stages)

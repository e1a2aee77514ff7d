"""What a page shows of plans and programs that were made by hand."""

from collections.abc import Sequence

from autopar.page.view import View, prepare
from autopar.plan import Plan
from autopar.program.records import Program
from autopar.simulate import simulate
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages


def view_of(program: Program | None = None, plan: Plan | None = None, others: Sequence[Plan] = ()) -> View:
    """Return the view of a program, by default of two stages and four microbatches, as that of a plan made by hand."""
    program = program or equal_stages(2, 4, "1f1b")
    costs = ExactCosts(latency=0.25)
    return prepare(plan or two_stage_plan(), program, costs, simulate(program, costs, trace=True), others)

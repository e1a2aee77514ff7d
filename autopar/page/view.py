"""Everything a page or a set of figures shows of a plan, prepared once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.alternatives import Weighing
from autopar.page.bars import gantt, lanes_of, memory_curves
from autopar.page.compare import compared
from autopar.page.graph import block_graphs
from autopar.page.machine_picture import machine
from autopar.page.measured import measured_step
from autopar.page.records import (
    Alternatives,
    BlockGraph,
    Compared,
    Gantt,
    LaneShares,
    Machine,
    Measured,
    MemoryCurve,
    Progress,
    Ranked,
    ScalePoint,
    Waterfall,
)
from autopar.page.shares import (
    alternatives,
    memory_shares,
    memory_waterfall,
    ranking,
    scaling,
    search_progress,
    time_shares,
    time_waterfall,
)
from autopar.plan import Plan
from autopar.program.records import Program
from autopar.scenarios import WhatIf
from autopar.simulate import Costs, Timeline
from autopar.simulate.kineto import Recording


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What is shown of a plan.

    Attributes:
        plan: The plan.
        timeline: Its simulated step, with the bars of a trace.
        gantt: The step as bars.
        memory: Memory over time by lane.
        time_parts: Where the time of the busiest lane goes, from the peak of the devices on.
        memory_parts: Where the memory of the fullest lane goes.
        time_shares: Where the time of every lane goes.
        memory_shares: Where the memory of every lane goes.
        progress: How the search went; None for a plan that was not searched for.
        ranking: The plan and its runners-up.
        scaling: Plans for other numbers of devices, if there are any, with this one.
        compared: The plan, its runners-up and others for the same job that were simulated.
        machine: Nodes and devices, and their groups.
        graphs: Distinct blocks as every device runs them.
        alternatives: What other decisions cost; None if nobody asked.
        whatif: The model on several clusters and numbers of devices; None if nobody asked.
        measured: Measured steps beside the simulated one.
    """

    plan: Plan
    timeline: Timeline
    gantt: Gantt
    memory: tuple[MemoryCurve, ...]
    time_parts: Waterfall
    memory_parts: Waterfall
    time_shares: LaneShares
    memory_shares: LaneShares
    progress: Progress | None
    ranking: tuple[Ranked, ...]
    scaling: tuple[ScalePoint, ...]
    compared: tuple[Compared, ...]
    machine: Machine
    graphs: tuple[BlockGraph, ...]
    alternatives: Alternatives | None = None
    whatif: WhatIf | None = None
    measured: tuple[Measured, ...] = ()


def prepare(
    plan: Plan,
    program: Program,
    costs: Costs,
    timeline: Timeline,
    roles: Sequence[Mapping[str, str]],
    others: Sequence[Plan] = (),
    weighing: Weighing | None = None,
    whatif: WhatIf | None = None,
    traces: Mapping[str, Recording] | None = None,
) -> View:
    """Return what is shown of a plan.

    Args:
        plan: The plan.
        program: The plan lowered.
        costs: What its instructions take.
        timeline: The program simulated with `trace=True`.
        roles: What each mesh axis does, in the field's words, by stage.
        others: Plans of the same model for other numbers of devices.
        weighing: What other decisions cost.
        whatif: The model on several clusters and numbers of devices.
        traces: What ranks did, by the name of the trace.

    Raises:
        PlanError: If one of the others is of another model.
        DataError: If a rank is not one of the plan.
    """
    count = program.num_groups
    groups = tuple(share * count + group for share in range(timeline.num_shares) for group in program.groups)
    lanes = lanes_of(groups, are_shares=timeline.unit == "share")
    drawn = gantt(timeline, groups, roles)
    ideal = 0.0 if plan.simulated is None else plan.simulated.mfu * plan.simulated.step_seconds
    return View(
        plan=plan,
        timeline=timeline,
        gantt=drawn,
        memory=memory_curves(timeline, lanes),
        time_parts=time_waterfall(timeline, roles, lanes, ideal),
        memory_parts=memory_waterfall(timeline, lanes),
        time_shares=time_shares(timeline, roles, lanes),
        memory_shares=memory_shares(timeline, lanes),
        progress=search_progress(plan),
        ranking=ranking(plan),
        scaling=scaling(plan, others),
        compared=compared(plan, others),
        machine=machine(plan.apart, program, roles),
        graphs=block_graphs(plan, program, costs, roles),
        alternatives=alternatives(weighing),
        whatif=whatif,
        measured=tuple(
            measured_step(program, timeline, drawn, recording, repr(name)) for name, recording in (traces or {}).items()
        ),
    )

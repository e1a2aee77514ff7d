"""Writing a candidate down as a plan."""

from autopar.plan import Job, ModelInfo, Plan, StagePlan
from autopar.recompute import format_recompute
from autopar.schedule import SCHEDULES
from autopar.search.blocks import assemble_blocks
from autopar.search.outcome import Candidate
from autopar.search.summary import summarise


def assemble(candidate: Candidate, model: ModelInfo, job: Job) -> Plan:
    """Return the plan of a candidate, not yet simulated."""
    configuration = candidate.configuration
    devices = configuration.mesh.size
    groups = SCHEDULES[configuration.schedule].groups(configuration.num_stages, configuration.num_chunks)
    stages = tuple(
        StagePlan(blocks, (group * devices, (group + 1) * devices), format_recompute(recompute))
        for group, blocks, recompute in zip(groups, candidate.split.ranges, candidate.split.recompute, strict=True)
    )
    blocks = assemble_blocks(candidate.tables, candidate.choice)
    plan = Plan(
        model=model,
        job=job,
        summary="",
        mesh=configuration.mesh.axes,
        stages=stages,
        schedule=configuration.schedule,
        num_microbatches=configuration.num_microbatches,
        blocks=blocks,
        objective=candidate.objective,
    )
    return summarise(plan, candidate.tables.folded)

"""Conversion of a candidate of the search to a `Plan`."""

from dataclasses import replace

from autopar.cluster import cluster_from_dict
from autopar.describe.one_line import summarise_roles
from autopar.plan import Job, ModelInfo, Plan
from autopar.search.candidate import Candidate, draft_of


def assemble(candidate: Candidate, model: ModelInfo, job: Job) -> Plan:
    """Return the plan of a candidate, not yet simulated."""
    configuration = candidate.configuration
    draft = candidate.draft or draft_of(candidate)
    if configuration.block:
        job = replace(job, cluster=configuration.cluster(cluster_from_dict(job.cluster)).to_dict())
    plan = Plan(
        model=model,
        job=job,
        summary="",
        mesh=configuration.mesh.axes,
        stages=draft.stages,
        schedule=configuration.schedule,
        num_microbatches=configuration.num_microbatches,
        blocks=draft.blocks,
        objective=candidate.objective,
        variants=draft.variants,
        shares=configuration.shares,
    )
    return summarise_roles(plan, draft.roles, *draft.variant_roles)

"""What the simulator says of a program, in the phases a rank's clock knows."""

from autopar.cluster import cluster_from_dict
from autopar.cost import CostModel, priced
from autopar.cost.policy import POLICIES
from autopar.events import Profile
from autopar.plan import Job
from autopar.program.records import Program
from autopar.schedule import Pass
from autopar.simulate import Timeline, simulate
from autopar.simulate.layout import Costs, lay_out
from autopar.simulate.shares import rows_of
from autopar.simulate.stages import lay_out_stage
from autopar.workload import job_stack


def run_costs(job: Job, profile: Profile | None = None) -> CostModel:
    """Return the costs of a run in the numbers of the graph, float32, if the cluster states what it makes of them."""
    cluster = cluster_from_dict(job.cluster)
    knows = any(name == POLICIES["fp32"].numbers for name, _ in cluster.device.peaks)
    return priced(CostModel(cluster, POLICIES["fp32" if knows else "mixed"], job_stack(job)), profile)


def predict(program: Program, costs: CostModel) -> tuple[Timeline, tuple[dict[str, float], ...]]:
    """Return the simulated step, and the seconds of each group of devices by phase."""
    timeline = simulate(program, costs)
    parts = [(part.program, part.costs) for part in rows_of(program, costs)] if program.shares else [(program, costs)]
    spent = [seconds for own, view in parts for seconds in _pass_seconds(own, view)]
    stages = [
        {
            "forward": own[Pass.FORWARD],
            "backward": own[Pass.BACKWARD] + own[Pass.WEIGHT],
            # differences of sums, which rounding may leave below zero
            "collectives": max(0.0, found.collective_seconds),
            "transfers": found.wait_seconds + found.bubble_seconds + found.copy_seconds,
            "reduce": found.gradient_seconds,
            "update": found.update_seconds,
            "gather": max(0.0, found.gather_seconds),
        }
        for own, found in zip(spent, timeline.stages, strict=True)
    ]
    return timeline, tuple(stages)


def _pass_seconds(program: Program, costs: Costs) -> list[dict[Pass, float]]:
    """Return the seconds of kernels of each group of devices by pass."""
    layouts = {(segment.kind, segment.phase): lay_out(segment, costs) for segment in program.segments}
    passes = [lay_out_stage(stage, layouts, costs).passes for stage in program.stages]
    found = []
    for tasks, chunks in zip(program.orders(), program.chunks, strict=True):
        spent = dict.fromkeys(Pass, 0.0)
        for task in tasks:
            spent[task.kind] += passes[chunks[task.chunk]][task.kind].compute_seconds
        found.append(spent)
    return found

"""What the simulator says of a program, in the phases a rank's clock knows."""

from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.cost.policy import POLICIES
from autopar.program.records import Program
from autopar.schedule import SCHEDULES, Pass
from autopar.simulate import Timeline, simulate
from autopar.simulate.layout import lay_out
from autopar.simulate.stages import lay_out_stage


def run_costs(cluster: Cluster) -> CostModel:
    """Return the costs of a run in the numbers of the graph, float32, if the cluster states what it makes of them."""
    knows = any(name == POLICIES["fp32"].numbers for name, _ in cluster.device.peaks)
    return CostModel(cluster, POLICIES["fp32" if knows else "mixed"])


def predict(program: Program, costs: CostModel) -> tuple[Timeline, tuple[dict[str, float], ...]]:
    """Return the simulated step, and the seconds of each of its stages by phase."""
    timeline = simulate(program, costs)
    layouts = {(segment.kind, segment.phase): lay_out(segment, costs) for segment in program.segments}
    schedule, count = SCHEDULES[program.schedule], len(program.stages)
    stages = []
    for stage, found in zip(program.stages, timeline.stages, strict=True):
        passes = lay_out_stage(stage, layouts).passes
        tasks = schedule.order(stage.index, count, program.num_microbatches)
        spent = {kind: passes[kind].compute_seconds * sum(task.kind is kind for task in tasks) for kind in Pass}
        stages.append(
            {
                "forward": spent[Pass.FORWARD],
                "backward": spent[Pass.BACKWARD],
                "collectives": found.collective_seconds,
                "transfers": found.wait_seconds + found.bubble_seconds,
                "reduce": found.gradient_seconds,
                "update": found.update_seconds,
                "gather": found.gather_seconds,
            }
        )
    return timeline, tuple(stages)

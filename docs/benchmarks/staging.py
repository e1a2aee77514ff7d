"""Unequal stages: `python docs/benchmarks/staging.py solvers | plans [JOB]`.

`solvers` compares the dynamic program with HiGHS and CP-SAT on the staging problems of jobs, `plans` what the planner
finds with and without stages with meshes of their own, in the simulator.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from usage import show_usage

from autopar.api import plan_task
from autopar.cluster import PRESETS, Cluster, Link, NodeGroup
from autopar.request import JobRequest
from autopar.search.heterogeneous_stages import UnequalNodeSolver
from autopar.search.submesh_space import nearest_submeshes
from autopar.solvers.staging.dynamic_program import solve
from autopar.solvers.staging.integer_program import program, solve_cp_sat, solve_highs
from autopar.staging import Staged
from autopar.task import Effort, prepare

TIME_LIMIT = 60.0
"""Seconds for each of the second opinions."""

SLACK = 1.25
"""The second opinions look at routes up to the best value, and at all up to so many times as much."""


@dataclass(frozen=True)
class Case:
    """A job, and the number of microbatches at which it is looked at."""

    name: str
    model: str
    gpus: int
    cluster: Cluster
    batch: int
    microbatches: int
    dims: dict[str, int]


def _two_generations() -> Cluster:
    a100, v100 = PRESETS["a100"], PRESETS["v100"]
    return Cluster.mixed("two", (NodeGroup(1, a100), NodeGroup(1, v100)), Link("Ethernet", 5e9, 30e-6))


CASES = (
    Case("gpt2, 4 layers, 6 L4", "zoo:gpt2", 6, PRESETS["l4"], 64, 8, {"num_layers": 4}),
    Case("gpt2, 8 A100", "zoo:gpt2", 8, PRESETS["a100"], 64, 8, {}),
    Case("gpt2, 8 layers, 8 A100 + 8 V100", "zoo:gpt2", 16, _two_generations(), 128, 8, {"num_layers": 8}),
    Case("wide-resnet-250m, 6 V100", "zoo:wide-resnet-250m", 6, PRESETS["v100"], 64, 8, {}),
)


def _row(case: Case) -> str:
    task = prepare(
        JobRequest(case.model, gpus=case.gpus, cluster=case.cluster, global_batch=case.batch, dims=case.dims)
    )
    search = task.context(Effort())
    space = task.unequal
    assert space is not None, case.name
    submeshes = nearest_submeshes(space.submeshes, case.gpus / 2)
    solver = UnequalNodeSolver(search, submeshes, space, case.microbatches, time.monotonic() + 600)
    options = solver.first_options()
    assert options is not None, case.name
    solve(options.staging, 0.0)  # compiled before it is timed
    found, seconds = _timed(partial(solve, options.staging))
    relaxed = solve(solver.relaxed_staging())
    sizes = "+".join(str(options.staging.sizes[leg.option]) for leg in found.route)
    row = f"{case.name:34}{sizes:8}{len(options.placements):8}{found.seconds * 1e3:10.2f}{relaxed.bound * 1e3:10.2f}"
    row += f"{seconds:8.2f}"
    for most in (1 + 1e-6, SLACK):
        row += f"{len(program(options.staging, most * found.seconds).legs):10}"
        for second in (solve_highs, solve_cp_sat):
            other, seconds = _timed(partial(second, options.staging, most * found.seconds, TIME_LIMIT))
            agrees = abs(other.seconds - found.seconds) <= 1e-5 * found.seconds
            row += f"{seconds:8.2f} {'same' if agrees else f'>= {other.bound * 1e3:.1f}':9}"
    return row


def _plans(case: Case) -> str:
    """Return the best plans with and without unequal stages."""
    task = prepare(
        JobRequest(case.model, gpus=case.gpus, cluster=case.cluster, global_batch=case.batch, dims=case.dims)
    )
    row = f"{case.name:34}"
    for own in (replace(task, unequal=None), task):
        start = time.process_time()
        plan = plan_task(own, Effort())
        assert plan.simulated is not None, case.name
        assert plan.search is not None, case.name
        row += f"{plan.simulated.step_seconds * 1e3:10.2f} ms{plan.search.gap:8.1%}{time.process_time() - start:8.1f} s"
    return f"{row}  {plan.summary}"


def _timed(work: Callable[[], Staged]) -> tuple[Staged, float]:
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


if __name__ == "__main__":
    show_usage(__doc__)
    what, wanted = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    opinions = f"{'arcs':>10}{'HiGHS s':>8}{'':10}{'CP s':>8}{'':10}"
    heads = {
        "solvers": f"{'job':34}{'stages':8}{'options':>8}{'ms':>10}{'bound':>10}{'DP s':>8}{opinions}{opinions}",
        "plans": f"{'job':34}{'equal stages':>32}{'any stages':>32}",
    }
    sys.stdout.write(heads[what] + "\n")
    for case in CASES:
        if wanted in case.name:
            sys.stdout.write((_row if what == "solvers" else _plans)(case) + "\n")
            sys.stdout.flush()

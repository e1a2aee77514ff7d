"""Hold what the planner minimises against what the simulator says, plan by plan, and print a page.

    python docs/benchmarks/agreement.py > docs/benchmarks/agreement.md      all cases
    python docs/benchmarks/agreement.py gpt2-64 resnet50-8                  some of them
    python docs/benchmarks/agreement.py --seconds 300 mixtral-8x7b-64       searched for longer

Each case is searched with nothing cached for so many seconds at most, and the best plans it found are simulated; the
limit decides how good they are, not how far formula and simulator agree on them.
"""

import sys
from dataclasses import dataclass

from usage import show_usage

from autopar.api import plan_task
from autopar.configuration import Configuration
from autopar.request import JobRequest
from autopar.sharding import Mesh
from autopar.task import Effort, prepare

SECONDS = 60.0
PLANS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A job.

    Attributes:
        model: Name in the zoo.
        gpus: Number of devices.
        cluster: Preset.
        batch: Samples per step; None for the published ones.
        mesh: The mesh of the only stage; () for the whole space.
    """

    model: str
    gpus: int
    cluster: str = "h100"
    batch: int | None = None
    mesh: tuple[int, ...] = ()


CASES = {
    "llama3-8b-32x8": Case("llama3-8b", 256, batch=64, mesh=(32, 8)),
    "llama3-8b-64-batch-8": Case("llama3-8b", 64, batch=8),
    "llama3-8b-64": Case("llama3-8b", 64),
    "gpt2-64": Case("gpt2", 64),
    "gpt3-13b-32": Case("gpt3-13b", 32, "v100"),
    "mixtral-8x7b-64": Case("mixtral-8x7b", 64),
    "resnet50-8": Case("resnet50", 8),
}


def say(line: str = "") -> None:
    """Print a line of the page."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rows(name: str, seconds: float) -> list[tuple[str, float, float]]:
    """Return the best plans of a case: what they are, and seconds by the formula and by the simulator."""
    case = CASES[name]
    task = prepare(JobRequest(f"zoo:{case.model}", gpus=case.gpus, cluster=case.cluster, global_batch=case.batch))
    if case.mesh:
        outer, inner = case.mesh
        task.space[:] = [Configuration(1, Mesh.of(outer=outer, inner=inner), 1, "1f1b")]
    best = plan_task(task, Effort(time_limit=seconds, top_k=PLANS))
    found = []
    for plan in (best, *best.alternatives):
        assert plan.simulated is not None, "plans that are returned were simulated"
        found.append((plan.summary, plan.objective, plan.simulated.step_seconds))
    return found


def main() -> None:
    """Print the page of the cases named, or of all."""
    names, seconds = sys.argv[1:], SECONDS
    if names[:1] == ["--seconds"]:
        seconds, names = float(names[1]), names[2:]
    say("# Objective and simulation")
    say()
    say(f"`python docs/benchmarks/{' '.join(['agreement.py', *sys.argv[1:]])}`")
    say(f"The best plans of searches of at most {seconds:g} s; cases as in the script.")
    say()
    say("| case | plan | objective | simulated | difference |")
    say("|---|---|---|---|---|")
    worst = 0.0
    for name in names or CASES:
        for summary, objective, simulated in rows(name, seconds):
            difference = objective / simulated - 1
            worst = max(worst, abs(difference))
            say(f"| {name} | {summary} | {objective:.6g} s | {simulated:.6g} s | {difference:+.2%} |")
    say()
    say(f"The largest difference is {worst:.2%}.")


if __name__ == "__main__":
    show_usage(__doc__)
    main()

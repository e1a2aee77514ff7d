"""Shares of the batch on unequal devices: what they bring beside equal shares and pipelines over both kinds.

    python docs/benchmarks/shares.py               the table
    python docs/benchmarks/shares.py --only gpt2   some rows

Each job is searched twice, without shares (equal ones, and stages with meshes of their own) and with them, for
`LIMIT` seconds of processor time at most.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.api import plan_task
from autopar.cluster import PRESETS, Cluster, Link, NodeGroup
from autopar.plan import Plan
from autopar.request import JobRequest
from autopar.task import Effort, prepare
from autopar.units import format_seconds

LIMIT = 60.0
HEAD = """| job | devices | without shares | with shares | plan | bound, s of processor |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A job on two kinds of nodes.

    Attributes:
        model: Model of the zoo.
        groups: Preset and number of nodes of each kind.
        batch: Samples per step.
    """

    model: str
    groups: tuple[tuple[str, int], ...]
    batch: int

    @property
    def cluster(self) -> Cluster:
        """The nodes, on a network of 12 GB/s per device."""
        groups = tuple(NodeGroup(nodes, PRESETS[name]) for name, nodes in self.groups)
        return Cluster.mixed("+".join(name for name, _ in self.groups), groups, Link("network", 12e9, 30e-6))


CASES = (
    Case("zoo:gpt2", (("a100", 1), ("v100", 1)), 512),
    Case("zoo:gpt3-xl", (("a100", 2), ("v100", 2)), 512),
    Case("zoo:llama3-8b", (("h100", 2), ("a100", 2)), 256),
)


def row(case: Case) -> str:
    """Return the row of a job."""
    gpus = sum(group.devices for group in case.cluster.groups)
    task = prepare(JobRequest(case.model, gpus=gpus, cluster=case.cluster, global_batch=case.batch))
    plans, spent = [], []
    for own in (replace(task, shares=None), task):
        begun = time.monotonic()
        plans.append(plan_task(own, Effort(time_limit=LIMIT)))
        spent.append(time.monotonic() - begun)
    before, after = map(_seconds, plans)
    assert plans[1].search is not None, "it was searched for"
    devices = " + ".join(f"{group.devices} {group.cluster.name}" for group in case.cluster.groups)
    return (
        f"| {case.model.removeprefix('zoo:')}, batch {case.batch} | {devices} | {format_seconds(before)}: "
        f"{plans[0].summary} | {format_seconds(after)}, {100 * (1 - after / before):.1f} % less | {plans[1].summary} | "
        f"{format_seconds(plans[1].search.bound)}, {spent[0]:.0f} and {spent[1]:.0f} s |\n"
    )


def _seconds(plan: Plan) -> float:
    assert plan.simulated is not None, "it was simulated"
    return plan.simulated.step_seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of a model")
    wanted = parser.parse_args().only
    time.monotonic = time.process_time  # a limit means the same work on a busy machine
    sys.stdout.write(HEAD)
    for case in CASES:
        if wanted in case.model:
            sys.stdout.write(row(case))
            sys.stdout.flush()

"""Run twelve planning jobs and compare them with an earlier run: the yardstick of every change of the planner.

    python docs/benchmarks/planner_regression.py -o after.json             all jobs
    python docs/benchmarks/planner_regression.py gpt2-8 resnet50-8         some of them
    python docs/benchmarks/planner_regression.py --against docs/benchmarks/planner_regression.json
    python docs/benchmarks/planner_regression.py --show after.json --against before.json   two files, nothing run
    python docs/benchmarks/planner_regression.py --set node.relaxed_steps=1                other constants of the search
    python docs/benchmarks/planner_regression.py --alone                                  in one process

Each job runs in a process of its own with nothing cached and is planned by two workers. With `--alone` this process
works by itself and limits of time count its processor seconds, twice as many as of two workers: other work on the
machine then changes plans and bounds hardly. Objective and bound are seconds of the cost formula, `simulated` those of
the event simulator for the returned plan; `cpu` and `bytes` are processor seconds and peak resident memory of all
processes together. With `--against` the exit code is 1 if a limit is passed:
objectives and bounds 0.3 % worse in the geometric mean or 2 % on one job, seconds 10 % more in the geometric mean.
"""

import argparse
import ast
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale import watched  # the folder of this file is on the path of a script

if TYPE_CHECKING:  # a job counts the import as part of its time
    from autopar.search.settings import SearchSettings

MIXED = """\
name: a100-and-v100
groups:
- {nodes: 2, cluster: a100-40}
- {nodes: 2, cluster: v100}
between: {tier: Ethernet, bandwidth: 5 GB/s, latency: 30 us}
"""


@dataclass(frozen=True, slots=True)
class Job:
    """Arguments of `autopar solve`.

    Attributes:
        model: Name in the zoo.
        gpus: Number of devices.
        cluster: Preset, or the text of a cluster file.
        dims: Settings of the model.
        mode: "train" or "infer".
        memory: Bytes per device; None for what the device has.
        seconds: Limit of time in seconds; None for none.
    """

    model: str
    gpus: int
    cluster: str
    dims: Mapping[str, int] = field(default_factory=dict)
    mode: str = "train"
    memory: float | None = None
    seconds: float | None = None


JOBS = {
    "gpt2-8": Job("gpt2", 8, "a100"),
    "bert-large-16": Job("bert-large", 16, "v100"),
    "llama3-8b-16": Job("llama3-8b", 16, "a100", {"num_layers": 8}),
    "gpt3-2.7b-short": Job("gpt3-2.7b", 16, "v100", memory=12e9),
    "mixtral-16": Job("mixtral-8x7b", 16, "h100", {"num_layers": 4}),
    "resnet50-8": Job("resnet50", 8, "v100"),
    "wide-resnet-short": Job("wide-resnet-250m", 8, "v100", memory=8e9),
    "vit-l16-16": Job("vit-l16", 16, "a100"),
    "gpt3-xl-mixed": Job("gpt3-xl", 32, MIXED, {"num_layers": 8}),
    "llama3-8b-infer": Job("llama3-8b", 8, "h100", {"num_layers": 8}, mode="infer"),
    "deepseek-8": Job("deepseek-moe-16b", 8, "h100", {"num_layers": 4}),
    "gpt3-175b-1024": Job("gpt3-175b", 1024, "a100", seconds=30),
}

LIMITED = {
    "deepseek-v3-256": Job("deepseek-v3", 256, "h100", seconds=30),
    "gpt3-175b-16": Job("gpt3-175b", 16, "a100", seconds=30),
}
"""Further jobs that their limit ends, for parts of the search that matter there only."""

MEAN_LIMITS = {"objective": 1.003, "bound": 1.003, "seconds": 1.10}
"""How much worse the geometric mean of all jobs may be."""

JOB_LIMITS = {"objective": 1.02, "bound": 1.02}
"""How much worse one job may be."""


def run(name: str, folder: Path, changes: Sequence[str], *, alone: bool = False) -> dict[str, object]:
    """Plan a job in this process, or by two workers of it, and return its record."""
    if alone:
        time.monotonic = time.process_time
    with watched() as usage:
        found = planned((JOBS | LIMITED)[name], folder, changes, 1 if alone else 2)
    return {**found, "cpu": sum(usage.seconds.values()), "bytes": usage.bytes}


def changed(changes: Sequence[str]) -> "SearchSettings":
    """Return the settings of the search with some changed.

    Args:
        changes: Each `name=value` or `part.name=value` of a setting, or `module:NAME=value` of a constant of a module,
            which changes in this process only.
    """
    for change in changes:
        path, value = change.split("=")
        if ":" in path:
            module, _, name = path.partition(":")
            owner = import_module(module)  # before others, which import the constant by its name
            assert hasattr(owner, name), f"{module} has no {name}"
            setattr(owner, name, ast.literal_eval(value))

    from autopar.search.settings import DEFAULT_SETTINGS

    found = DEFAULT_SETTINGS
    for path, value in (change.split("=") for change in changes if ":" not in change):
        *part, name = path.split(".")
        owner = getattr(found, part[0]) if part else found
        owner = replace(owner, **{name: type(getattr(owner, name))(float(value))})
        found = replace(found, **{part[0]: owner}) if part else owner
    return found


def planned(job: Job, folder: Path, changes: Sequence[str], workers: int = 2) -> dict[str, object]:
    """Plan a job; `folder` receives its cluster file, if it has one."""
    start, settings = time.perf_counter(), changed(changes)

    from autopar.api import solve

    cluster: str | Path = job.cluster
    if "\n" in job.cluster:
        cluster = folder / "cluster.yaml"
        cluster.write_text(job.cluster)
    plan = solve(
        f"zoo:{job.model}",
        gpus=job.gpus,
        cluster=cluster,
        dims=job.dims,
        mode=job.mode,
        memory_limit=job.memory,
        time_limit=None if job.seconds is None else job.seconds * 2 / workers,
        workers=workers,
        settings=settings,
        stack="ideal",  # so that a stack that is fitted again leaves the record comparable
    )
    search = plan.search
    assert search is not None, "a plan that was searched says how"
    assert plan.simulated is not None, "plans are simulated before they are returned"
    return {
        "plan": plan.summary,
        "objective": search.least,
        "bound": search.bound,
        "simulated": plan.simulated.step_seconds,
        "seconds": time.perf_counter() - start,
        "termination": search.termination,
        "solved": search.solved,
        "pruned": search.pruned,
        "configurations": search.configurations,
    }


def run_all(
    names: Iterable[str], changes: Sequence[str], *, alone: bool = False
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run jobs in processes of their own; return their records, and a line for each that failed."""
    results, failed = {}, []
    for name in names:
        command = [sys.executable, __file__, "--one", name, *(f"--set={change}" for change in changes)]
        command += ["--alone"] * alone
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            failed.append(f"{name} ended with exit code {done.returncode}")
            continue
        results[name] = json.loads(done.stdout)
        sys.stderr.write(f"{name}: {results[name]['seconds']:.1f} s\n")
    return results, failed


def worse(measure: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Ratio by which a measure got worse, above 1 if it did: bounds are better when higher, all others when lower."""
    ratio = float(after[measure]) / float(before[measure])
    return 1 / ratio if measure == "bound" else ratio


def say(line: str = "") -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table of some results."""
    say("| job | objective | bound | gap | simulated | seconds | CPU s | memory | ended | plan |")
    say("|" + "---|" * 10)
    for name, found in results.items():
        say(
            f"| {name} | {found['objective']:.6g} s | {found['bound']:.6g} s "
            f"| {1 - found['bound'] / found['objective']:.2%} | {found['simulated']:.6g} s | {found['seconds']:.1f} "
            f"| {found['cpu']:.1f} | {found['bytes'] / 1e9:.2f} GB | {found['termination']} | {found['plan']} |"
        )
    say()
    say(f"{sum(found['seconds'] for found in results.values()):.0f} s altogether")


def compare(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Print by which ratio each job got worse and return which limits are passed."""
    measures = ("objective", "bound", "simulated", "seconds", "cpu", "bytes")
    both = [name for name in after if name in before]
    passed = []
    say("Ratios of worse to better; above 1 is worse than the earlier run.")
    say()
    say("| job | " + " | ".join(measures) + " |")
    say("|" + "---|" * (len(measures) + 1))
    rows = {name: {each: worse(each, before[name], after[name]) for each in measures} for name in both}
    for name, row in rows.items():
        say(f"| {name} | " + " | ".join(f"{row[each]:.4f}" for each in measures) + " |")
        passed += [f"{each} of {name}: {row[each]:.4f}" for each, most in JOB_LIMITS.items() if row[each] > most]
    means = {each: math.exp(sum(math.log(row[each]) for row in rows.values()) / len(rows)) for each in measures}
    say("| geometric mean | " + " | ".join(f"{means[each]:.4f}" for each in measures) + " |")
    return passed + [f"mean {each}: {means[each]:.4f}" for each, most in MEAN_LIMITS.items() if means[each] > most]


def main() -> int:
    """Run jobs, print their table and what changed; 1 if a limit is passed or a job fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "jobs", nargs="*", choices=[[], *JOBS, *LIMITED], metavar="JOB", help=", ".join([*JOBS, *LIMITED])
    )
    parser.add_argument("-o", dest="output", type=Path, help="JSON file of the results")
    parser.add_argument("--against", type=Path, help="JSON file of an earlier run")
    parser.add_argument("--show", type=Path, help="print a JSON file instead of running")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="constant of the search")
    parser.add_argument("--alone", action="store_true", help="in one process, with limits of processor seconds")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(json.dumps(run(asked.one, Path(folder), asked.set, alone=asked.alone)))
        return 0
    results: dict[str, dict[str, Any]] = {}
    failed = []
    if asked.show:
        results = json.loads(asked.show.read_text())
    else:
        results, failed = run_all(asked.jobs or JOBS, asked.set, alone=asked.alone)
    if asked.output:
        asked.output.write_text(json.dumps(results, indent=1) + "\n")
    show(results)
    if asked.against:
        say()
        failed += compare(json.loads(asked.against.read_text()), results)
    for line in failed:
        say(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plan large jobs of today, and print what of each plan can be handed over to which framework.

    python docs/benchmarks/large_jobs.py -o docs/benchmarks/large_jobs.json            all jobs that are not in the file
    python docs/benchmarks/large_jobs.py llama3-8b-8k -o large_jobs.json               some of them, anew
    python docs/benchmarks/large_jobs.py llama3-8b-8k --only megatron -o large_jobs.json    one search of a job
    python docs/benchmarks/large_jobs.py --before FOLDER -o large_jobs.json            also by an older checkout
    python docs/benchmarks/large_jobs.py --show docs/benchmarks/large_jobs.json > docs/benchmarks/large_jobs.md

Each search runs in a process of its own, one at a time, with nothing cached: first the whole space, whose plan is
exported to every framework, then what each framework runs (`autopar solve --for NAME`), whose plan is exported to it.
With `--before`, an older checkout searches its whole space in the same time, and its plan is simulated once more by
this one, so that the two steps have the same prices.
Limits of time count processor seconds of the process that searches, so that other work on the machine hardly changes
what is found.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.cluster import Cluster

FRAMEWORKS = ("megatron", "torchtitan", "deepspeed", "nemo", "maxtext")
WHOLE = "all"
"""Name of the search of the whole space."""
BEFORE = "before"
"""Name of that search by an older checkout."""
SECONDS = 60.0
TWO_FABRICS = "two-fabrics"
"""The preset h100 in two halls of 256 devices: four cards of 400 Gb/s per node from one to the other."""
_CLUSTERS = {TWO_FABRICS: "h100 in two halls of 256, 4 x 400 Gb/s per node between them"}


@dataclass(frozen=True, slots=True)
class Job:
    """A job as people run it.

    Attributes:
        model: Name in the zoo.
        gpus: Number of devices.
        batch: Samples of a step.
        cluster: Preset, or `TWO_FABRICS`.
        dims: Settings of the model.
    """

    model: str
    gpus: int
    batch: int
    cluster: str = "h100"
    dims: Mapping[str, int] = field(default_factory=dict)


_LONG = {"seq": 131072}
JOBS: Mapping[str, Job] = {
    # 4M tokens a step, 16M for 405B as published; as many at 128k.
    "llama3-8b-8k": Job("llama3-8b", 64, 512),
    "llama3-8b-128k": Job("llama3-8b", 64, 32, dims=_LONG),
    "llama3-70b-8k": Job("llama3-70b", 256, 512),
    "llama3-70b-128k": Job("llama3-70b", 256, 32, dims=_LONG),
    "llama3-405b-8k": Job("llama3-405b", 1024, 2048),
    "llama3-405b-128k": Job("llama3-405b", 1024, 128, dims=_LONG),
    "qwen3-30b": Job("qwen3-30b-a3b", 64, 1024),
    "qwen3-235b": Job("qwen3-235b-a22b", 256, 1024),
    "deepseek-v3-256": Job("deepseek-v3", 256, 1920, "h800"),
    "deepseek-v3-2048": Job("deepseek-v3", 2048, 15360, "h800"),  # as published
    "mixtral-8x7b": Job("mixtral-8x7b", 64, 1024),
    "vit-h14": Job("vit-h14", 64, 4096, "a100"),
    "llama3-70b-two-fabrics": Job("llama3-70b", 512, 1024, TWO_FABRICS),
}


def cluster_of(name: str) -> "str | Cluster":
    """Return a preset by its name, or the cluster of two halls."""
    if name != TWO_FABRICS:
        return name
    from autopar.cluster import PRESETS
    from autopar.cluster.records import Domain

    preset = PRESETS["h100"]
    between = replace(
        preset.inter, tier="between halls", bandwidth=preset.inter.bandwidth / 2, nics=None, tunings=(), latency=60e-6
    )
    return replace(preset, name=name, domains=(Domain(256, between),))


def search(job: Job, framework: str, seconds: float) -> dict[str, Any]:
    """Return what a search finds, and what of its plan can be handed over.

    Args:
        job: The job.
        framework: A framework whose plans are searched, or `WHOLE`.
        seconds: Limit in processor seconds.
    """
    time.monotonic = time.process_time
    from autopar.api import solve
    from autopar.errors import AutoparError

    start = time.process_time()
    kept = {} if framework in (WHOLE, BEFORE) else {"framework": framework}  # older checkouts have no such argument
    try:
        plan = solve(
            f"zoo:{job.model}",
            gpus=job.gpus,
            cluster=cluster_of(job.cluster),
            global_batch=job.batch,
            dims=job.dims,
            time_limit=seconds,
            workers=1,
            top_k=1,
            fusion="off",
            **kept,
        )
    except AutoparError as error:
        return {"error": str(error.args[0]), "cpu": time.process_time() - start}
    assert plan.search is not None, "a plan that was searched says how"
    assert plan.simulated is not None, "plans are simulated before they are returned"
    found: dict[str, Any] = {
        "plan": plan.summary,
        "step": plan.simulated.step_seconds,
        "peak": max(stage.peak for stage in plan.simulated.stages),
        "gap": 1.0 - plan.search.bound / plan.search.least,
        "ended": str(plan.search.termination),
        "cpu": time.process_time() - start,
        "told": {},
    }
    if framework == BEFORE:
        return {**found, "file": plan.to_json().decode()}
    for target in FRAMEWORKS if framework == WHOLE else (framework,):
        try:
            exported = plan.export(target)
            found["told"][target] = exported.outcome
            found.setdefault("lost", {})[target] = exported.lost
        except AutoparError as error:
            found["told"][target] = str(error.args[0])
    return found


def simulated_again(file: str) -> dict[str, float]:
    """Return what a plan of an older checkout comes to by the simulator of this one.

    Args:
        file: The plan as JSON.
    """
    from autopar.api import simulate_again
    from autopar.plan import Plan

    plan, timeline = simulate_again(Plan.from_json(file.encode()))
    assert plan.simulated is not None, "it was simulated"
    return {"again": timeline.step_seconds, "again_peak": max(stage.peak for stage in plan.simulated.stages)}


def run(name: str, framework: str, seconds: float, before: Path | None) -> dict[str, Any]:
    """Return what a search in a process of its own finds.

    Args:
        name: The job.
        framework: As of `search`, or `BEFORE`.
        seconds: Limit in processor seconds.
        before: The older checkout.
    """
    environment = dict(os.environ)
    if framework == BEFORE:
        environment["PYTHONPATH"] = str(before)
    found = _in_process([name, "--only", framework, "--time-limit", str(seconds), "--here"], environment)
    if "file" in found:
        file = found.pop("file")
        found |= {key: own for key, own in _in_process(["--again"], None, file).items() if key != "error"}
    return found


def _in_process(
    arguments: Sequence[str], environment: Mapping[str, str] | None, given: str | None = None
) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, input=given, text=True, check=False)
    if done.returncode:
        return {"error": f"ended with exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


HEAD = """# Large jobs

`python docs/benchmarks/large_jobs.py -o docs/benchmarks/large_jobs.json` on {machine}, Python {python}; `--show` prints this page from that file.
Each search is one process with nothing cached and a limit of {seconds:.0f} processor seconds, so that other work on the machine does not count.
Step times are the simulator's, on the fitted software stack nearest to the cluster (`autopar solve` without `--stack`), in bfloat16 with Adam, with gradients in the buckets of the stack.
"""  # noqa: E501
BEFORE_HEAD = """## Before and after

The same search by the checkout before ring attention and the other additions to the space of plans; its plan is simulated by today's simulator.
"""  # noqa: E501
_STEP = re.compile(r": (\d\S* \S+) a step")


def page(results: Mapping[str, Mapping[str, Any]], seconds: float) -> str:
    """Return the page of some results."""
    results = {name: results[name] for name in JOBS if name in results}
    lines = [HEAD.format(machine=platform.machine(), python=platform.python_version(), seconds=seconds)]
    lines += ["| job | GPUs | samples a step | plan | step | peak | gap | CPU s |", "|---|---|---|---|---|---|---|---|"]
    for name, job in JOBS.items():
        own = results.get(name, {}).get(WHOLE)
        if own is None:
            continue
        where = f"{job.gpus} {_CLUSTERS.get(job.cluster, job.cluster)}"
        if "error" in own:
            lines.append(f"| {name} | {where} | {job.batch} | {own['error']} | | | | {own.get('cpu', 0.0):.0f} |")
        else:
            lines.append(
                f"| {name} | {where} | {job.batch} | {own['plan']} | {own['step']:.3f} s | {own['peak'] / 1e9:.1f} GB "
                f"| {own['gap']:.1%} | {own['cpu']:.0f} |"
            )
    if missing := [name for name in JOBS if WHOLE not in results.get(name, {})]:
        lines += ["", f"Not searched yet: {', '.join(missing)}."]
    lines += ["", *_before_and_after(results), *_by_framework(results)]
    return "\n".join(lines).rstrip() + "\n"


def _before_and_after(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of what an older checkout finds; nothing without one."""
    rows = {name: own for name, own in results.items() if BEFORE in own and WHOLE in own}
    if not rows:
        return []
    found = [BEFORE_HEAD, "| job | before: plan | step | gap | CPU s | after: step | gap | CPU s |"]
    found.append("|---|---|---|---|---|---|---|---|")
    for name, own in rows.items():
        old, new = own[BEFORE], own[WHOLE]
        cells = [name, old.get("error") or old["plan"]]
        cells.append("" if "error" in old else f"{old['again']:.3f} s" if "again" in old else f"({old['step']:.3f} s)")
        cells += ["" if "gap" not in old else f"{old['gap']:.1%}", f"{old.get('cpu', 0.0):.0f}"]
        cells += [f"{new['step']:.3f} s", f"{new['gap']:.1%}"] if "error" not in new else ["", ""]
        found.append("| " + " | ".join([*cells, f"{new.get('cpu', 0.0):.0f}"]) + " |")
    return [*found, ""]


def _by_framework(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the tables of what frameworks run of the plans, and of plans searched for them."""
    found = ["## What each framework runs of these plans", ""]
    found += ["| job | " + " | ".join(FRAMEWORKS) + " |", "|---|" + "---|" * len(FRAMEWORKS)]
    notes: list[str] = []
    for name, searches in results.items():
        told = searches.get(WHOLE, {}).get("told")
        if told:
            found.append(f"| {name} | " + " | ".join(_step(told[each], notes) for each in FRAMEWORKS) + " |")
    found += ["", *_noted(notes), "## What is found for each framework", ""]
    found += ["| job | " + " | ".join(FRAMEWORKS) + " |", "|---|" + "---|" * len(FRAMEWORKS)]
    notes = []
    for name, searches in results.items():
        if any(each in searches for each in FRAMEWORKS):
            cells = []
            for each in FRAMEWORKS:
                own = searches.get(each)
                if own is None:
                    cells.append("")
                elif "error" in own:
                    cells.append(f"[{_number(own['error'], notes)}]")
                else:
                    cells.append(f"{_step(own['told'][each], notes)} ({own['plan']}, gap {own['gap']:.1%})")
            found.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*found, "", *_noted(notes)]


def _step(told: str, notes: list[str]) -> str:
    """Return the step time that an export names; a number of a note where nothing can be handed over."""
    match = _STEP.search(told)
    does_not_fit = "does not fit" in told
    return match[1] if match and not does_not_fit else f"[{_number(told, notes)}]"


def _number(note: str, notes: list[str]) -> int:
    if note not in notes:
        notes.append(note)
    return notes.index(note) + 1


def _noted(notes: Sequence[str]) -> list[str]:
    return [*(f"{number}. {' '.join(note.split())}" for number, note in enumerate(notes, 1)), ""] if notes else []


def main() -> int:
    """Search jobs, or print the page of what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("-o", dest="output", type=Path, help="JSON file of the results, added to")
    parser.add_argument(
        "--only", action="append", choices=(BEFORE, WHOLE, *FRAMEWORKS), help="some searches of the jobs"
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="an older checkout, which searches its space")
    parser.add_argument("--time-limit", type=float, default=SECONDS, help="processor seconds of a search")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the page of a JSON file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := [name for name in asked.jobs if name not in JOBS]:
        parser.error(f"no job is called {', '.join(unknown)}; there are {', '.join(JOBS)}")
    if asked.again:
        sys.stdout.write(json.dumps(simulated_again(sys.stdin.read())))
        return 0
    wanted = asked.only or (*((BEFORE,) if asked.before else ()), WHOLE, *FRAMEWORKS)
    if BEFORE in wanted and not (asked.before or asked.here):
        parser.error(f"--only {BEFORE} needs --before FOLDER")
    if asked.here:
        sys.stdout.write(json.dumps(search(JOBS[asked.jobs[0]], wanted[0], asked.time_limit)))
        return 0
    if asked.show:
        known = json.loads(asked.show.read_text())
        sys.stdout.write(page(known["jobs"], known["seconds"]))
        return 0
    if asked.output is None:
        parser.error("give -o FILE, or --show FILE")
    known = json.loads(asked.output.read_text()) if asked.output.exists() else {"seconds": asked.time_limit, "jobs": {}}
    if known["seconds"] != asked.time_limit:
        parser.error(f"{asked.output} is of searches of {known['seconds']} s; write another file")
    for name in asked.jobs or JOBS:
        for framework in wanted:
            searches = known["jobs"].setdefault(name, {})
            if framework in searches and not asked.jobs:
                continue
            searches[framework] = run(name, framework, asked.time_limit, asked.before)
            asked.output.write_text(json.dumps(known, indent=1) + "\n")
            own = searches[framework]
            sys.stderr.write(f"{name} {framework}: {own.get('plan', own.get('error'))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Profile this machine with one and two ranks, predict plans, run them, and print predicted against measured.

    python docs/benchmarks/own_machine.py > docs/benchmarks/own_machine.md

Needs torch and onnxruntime (`pip install "autopar[run]"`). With 100 steps a plan it takes about half an hour on two
cores; `--steps 10 --seconds 0.1` shows in ten minutes that it works. What was profiled is kept in `--folder`, so that a
second run times nothing twice.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import fmean, median

from autopar.degrees import Degrees
from autopar.events import Profile, load_database, merge_databases, save_database
from autopar.machine import usable_cores
from autopar.prediction import Prediction, Setting, open_setting
from autopar.profile.extract import Extraction
from autopar.profile.measure import profile_events, this_machine
from autopar.profile.plans import extract_degrees, parse_degrees
from autopar.profile.suite import suite
from autopar.profile.timed_tasks import Task
from autopar.ranks.launch import run_plan
from autopar.ranks.records import RunReport, RunRequest
from autopar.ranks.stopwatch import PHASES
from autopar.units import format_seconds
from autopar.validation.own_machine import OwnMachine, fit_machine

RANKS = 2
LARGEST = 2.0**22
"""Bytes of the largest transfer, and of what an op of the suite reads: plans below have no larger ones."""
GPT = {"num_layers": 4, "hidden": 256, "heads": 8, "seq": 128, "vocab": 4096}
BERT = {"num_layers": 4, "hidden": 256, "heads": 8, "seq": 128, "vocab": 4096}
T5 = {"num_layers": 2, "hidden": 256, "heads": 4, "head": 64, "ffn": 1024, "seq": 64, "vocab": 4096}
MLP = {"num_layers": 6, "hidden": 1024}
Case = tuple[str, dict[str, int], str]
CASES: tuple[Case, ...] = (
    ("zoo:gpt2", GPT, "microbatch=4 global_batch=8"),
    ("zoo:gpt2", GPT, "dp=2 microbatch=4 global_batch=8"),
    ("zoo:gpt2", GPT, "dp=2 zero=1 microbatch=2 global_batch=8"),
    ("zoo:gpt2", GPT, "dp=2 zero=2 microbatch=4 global_batch=8"),
    ("zoo:gpt2", GPT, "dp=2 zero=3 microbatch=4 global_batch=8"),
    ("zoo:gpt2", GPT, "tp=2 microbatch=8 global_batch=8"),
    ("zoo:gpt2", GPT, "tp=2 sequence_parallel=true microbatch=8 global_batch=8"),
    ("zoo:gpt2", GPT, "pp=2 microbatch=2 global_batch=8"),
    ("zoo:gpt2", GPT, "pp=2 microbatch=2 global_batch=8 schedule=gpipe recompute=full"),
    ("zoo:bert-base", BERT, "dp=2 microbatch=4 global_batch=8"),
    ("zoo:bert-base", BERT, "pp=2 microbatch=1 global_batch=8"),
    ("zoo:t5-11b", T5, "dp=2 microbatch=2 global_batch=4"),
    ("zoo:t5-11b", T5, "tp=2 microbatch=4 global_batch=4"),
    ("zoo:mlp-xs", MLP, "dp=2 zero=1 microbatch=64 global_batch=128"),
    ("zoo:mlp-xs", MLP, "tp=2 microbatch=128 global_batch=128"),
    ("zoo:resnet50", {"image_size": 64}, "dp=2 microbatch=2 global_batch=4"),
)
"""Model, sizes and degrees of the plans."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan, predicted and run twice."""

    name: str
    first: RunReport
    second: RunReport
    events: int
    unrolled: int

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.first.predicted_seconds / self.first.measured_seconds - 1

    @property
    def spread(self) -> float:
        """How far two runs of the same plan lie apart."""
        return self.second.measured_seconds / self.first.measured_seconds - 1


def tell(text: str) -> None:
    """Say what is being done."""
    sys.stderr.write(text + "\n")


def measure_machine(folder: Path, seconds: float) -> OwnMachine:
    """Return this machine as a cluster and a stack, measured by the suite with one and two ranks."""
    for ranks in (1, RANKS):
        tell(f"the suite with {ranks} ranks")
        tasks = [task for task in suite(ranks, ranks, "fp32", largest=LARGEST) if _elements(task) <= LARGEST / 4]
        profile_events(tasks, folder, ranks=ranks, seconds=seconds)
    profile = Profile.of(folder)
    assert profile is not None, "it was just written"
    return fit_machine(profile, "this machine", busy=RANKS)


def _elements(task: Task) -> float:
    """Return the elements that the op of a task reads."""
    return 0.0 if task.work is None else float(sum(prod(feed.shape) for feed in task.work.inputs))


def settings(machine: OwnMachine, chosen: Sequence[Case]) -> dict[str, Setting]:
    """Return what plans of each model are predicted for."""
    found: dict[str, Setting] = {}
    for model, dims, _ in chosen:
        if model not in found:
            tell(f"open {model}")
            found[model] = open_setting(
                model, cluster=machine.cluster, stack=machine.stack, dims=dims, precision="fp32"
            )
    return found


def profile_cases(
    folder: Path, known: dict[str, Setting], cases: Sequence[tuple[str, Degrees]], seconds: float
) -> None:
    """Time the events of all plans, each with as many ranks as the plan has."""
    for ranks in (1, RANKS):
        events = Extraction()
        for model, degrees in cases:
            if degrees.gpus == ranks:
                extract_degrees(known[model], [degrees], events)
        tell(f"{len(events.tasks)} events of plans for {ranks} ranks, {events.naive:,} instructions unrolled")
        profile_events(events.tasks.values(), folder, ranks=ranks, seconds=seconds)


def run(prediction: Prediction, profile: Path, steps: int, folder: Path) -> RunReport:
    """Run a plan, pinned, and return how it went."""
    path = folder / "plan.json"
    prediction.plan.save(path)
    ranks = prediction.plan.job.gpus
    return run_plan(RunRequest(str(path), ranks, steps=steps, profile=str(profile), pin=True, compare=False))


def rows(chosen: Sequence[Case], folder: Path, steps: int, seconds: float) -> tuple[OwnMachine, list[Row]]:
    """Profile, predict and run plans."""
    machine = measure_machine(folder / "suite", seconds)
    known = settings(machine, chosen)
    cases = [(model, parse_degrees(text)) for model, _, text in chosen]
    profile_cases(folder / "plans", known, cases, seconds)
    whole = folder / "all"
    save_database(merge_databases(load_database(folder / part) for part in ("suite", "plans")), whole)
    profile, found = Profile.of(whole), []
    with tempfile.TemporaryDirectory() as name:
        for (model, degrees), (_, _, text) in zip(cases, chosen, strict=True):
            setting, events = replace(known[model], profile=profile), Extraction()
            prediction = setting.predict(degrees)
            extract_degrees(setting, [degrees], events)
            tell(f"run {model} {text}")
            first, second = (run(prediction, whole, steps, Path(name)) for _ in range(2))
            title = f"{model.removeprefix('zoo:')}: {text}"
            found.append(Row(title, first, second, len(events.tasks), events.naive))
    return machine, found


def order_agreement(found: Sequence[Row]) -> tuple[int, int]:
    """Return of how many pairs of plans of one model the predicted order is the measured one, and of how many."""
    agreed = total = 0
    for one, other in combinations(found, 2):
        if one.name.partition(":")[0] == other.name.partition(":")[0]:
            total += 1
            predicted = one.first.predicted_seconds - other.first.predicted_seconds
            agreed += predicted * (one.first.measured_seconds - other.first.measured_seconds) > 0
    return agreed, total


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for line in lines:
        yield "| " + " | ".join(line) + " |"
    yield ""


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a plan in the table of steps."""
    first = row.first
    low, high = (value / first.measured_seconds - 1 for value in (first.low_seconds, first.high_seconds))
    return (
        row.name,
        format_seconds(first.predicted_seconds),
        format_seconds(first.measured_seconds),
        f"{100 * row.error:+.1f} %",
        f"{100 * row.spread:+.1f} %",
        f"{100 * low:+.0f} to {100 * high:+.0f} %",
        f"{100 * (first.measured_share or 0.0):.0f} %",
        str(row.events),
        f"{row.unrolled:,}",
    )


def phases(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each stage in the table of phases."""
    for row in found:
        for stage in row.first.stages:
            pairs = ((stage.measured[phase], stage.predicted[phase]) for phase in PHASES)
            yield row.name, str(stage.stage), *(" / ".join(map(format_seconds, pair)) for pair in pairs)


def page(
    machine: OwnMachine, found: Sequence[Row], options: argparse.Namespace, load: Sequence[float]
) -> Iterator[str]:
    """Yield the lines of the page."""
    own, device = this_machine("gloo", 1), machine.cluster.device
    errors, spreads = [abs(row.error) for row in found], [abs(row.spread) for row in found]
    agreed, total = order_agreement(found)
    busy = max(load) > RANKS + 0.5
    yield "# Predicted against measured, on this machine"
    yield ""
    yield "Events are profiled with one and two ranks; plans for these ranks are predicted from them, and run by"
    yield f"`autopar run` pinned to a core each: {options.steps} steps, the median of all but the first, twice."
    yield ""
    stated = f"--steps {options.steps} --seconds {options.seconds:g}"
    stated += f" --only '{options.only}'" if options.only else ""
    yield f"Made by `python docs/benchmarks/own_machine.py {stated}`."
    yield f"These are {len(found)} of the {len(CASES)} plans of the script."
    yield f"{own.device}, {usable_cores()} cores, {', '.join(' '.join(pair) for pair in own.software)}."
    yield f"Load of the machine (runnable processes, mean of a minute) before: {load[0]:.1f}, after: {load[1]:.1f}."
    if busy:
        yield "**Others worked on the same cores meanwhile: seconds of this page say that the script works, and little"
        yield "else. Run it again on an idle machine.**"
    yield ""
    header = ("plan", "predicted", "measured", "error", "second run", "tenths of steps", "measured events")
    yield from table((*header, "distinct events", "unrolled"), map(cells, found))
    yield f"Error of step times: mean {100 * fmean(errors):.1f} %, median {100 * median(errors):.1f} %."
    yield f"Two runs of a plan differ by {100 * fmean(spreads):.1f} % on the mean, {100 * max(spreads):.1f} % at most."
    yield f"Of {total} pairs of plans of one model the order is predicted right in {agreed}."
    yield "*Measured events* is the share of the predicted seconds that was profiled, *distinct events* what is to be"
    yield "profiled of the plan, *unrolled* its instructions if every device, layer and microbatch counts."
    yield ""
    yield "## By stage and kind of work"
    yield ""
    yield "Seconds of a step, measured / predicted."
    yield ""
    yield from table(("plan", "stage", *PHASES), phases(found))
    yield "## The machine"
    yield ""
    yield f"Fitted to the suite: {device.peak('single') / 1e9:.1f} GFLOP/s and {device.memory_bandwidth / 1e9:.1f} GB/s"
    yield f"per rank; {100 * machine.stack['exposed_share']:.0f} % of communication beside compute is waited for."
    yield f"Formulas alone are off by {100 * machine.ops.median:.0f} % (median of the suite's ops)."
    yield ""
    for tuning in machine.cluster.intra.tunings:
        rate = f"{tuning.bandwidth / 1e9:.2f} GB/s"
        yield f"- {tuning.operation} of {tuning.members}: {format_seconds(tuning.latency)} and {rate}"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.5, help="for the calls of an event")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "autopar-own-machine")
    parser.add_argument("--only", default="", metavar="TEXT,TEXT", help="plans that have one of these texts in them")
    options = parser.parse_args()
    for name in ("suite", "plans", "all"):
        (options.folder / name).mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    wanted = options.only.split(",")
    chosen = [case for case in CASES if any(text in f"{case[0]} {case[2]}" for text in wanted)]
    machine, found = rows(chosen, options.folder, options.steps, options.seconds)
    for line in page(machine, found, options, (before, os.getloadavg()[0])):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

"""Measure how long whole spaces are searched, and print a page.

    python docs/benchmarks/scale.py > docs/benchmarks/scale.md      all cases
    python docs/benchmarks/scale.py gpt3-175b-1024 mixtral-8x7b-64  some of them
    python docs/benchmarks/scale.py --one llama3-8b-64 > llama3-8b-64.json        [SECONDS: of another limit]
    python docs/benchmarks/scale.py --from FOLDER                   the page of what `--one` has written there

Each case runs in a process of its own with nothing cached: import of the program, of the model, discovery, search,
verification and simulation of the best plans. All of it is to end after the seconds that are asked for, where some are:
a model of a thousand layers may take half as long again as one of 96.
Whole spaces are searched by two workers, for the targets are for two cores, or by the process itself where two take
more memory than is asked for; one mesh by the process itself. Seconds are of the wall clock; CPU seconds and memory are
those of the process and all it starts, together: resident bytes, looked at four times a second or, where that takes
longer, for a hundredth of the time, of which pages that several share count once.
"""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from usage import show_usage


@dataclass(frozen=True, slots=True)
class Case:
    """A job and what is asked of its search.

    Attributes:
        model: Name in the zoo.
        gpus: Number of devices.
        cluster: Preset.
        seconds: Wall seconds it should take, and its limit; 0 if it is there to be compared with.
        times: How often the seconds of another case it may take, which are its limit then, and of which.
        gap: Gap it should reach; infinity if none is asked for.
        gigabytes: Memory it should take at most.
        mesh: The mesh of the only stage, for cases that search placements alone; () for the whole space.
        dims: Settings of the model.
        batch: Samples per step; None for the published ones.
        workers: Processes that search a whole space: as many as the targets have cores, or fewer if that takes more
            memory than is asked for.
    """

    model: str
    gpus: int
    cluster: str
    seconds: float
    gap: float = float("inf")
    gigabytes: float = float("inf")
    mesh: tuple[int, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    batch: int | None = None
    workers: int = 2
    times: tuple[float, str] = (0.0, "")


CASES = {
    # The neighbour's problem: sequences of 8,192 tokens, two for each of 32 rows of 8 devices, as one microbatch.
    "llama3-8b-32x8": Case("llama3-8b", 256, "h100", 30, 1e-6, 1, mesh=(32, 8), batch=64),
    "llama3-8b-64": Case("llama3-8b", 64, "h100", 60, 0.01, 1.5),
    "gpt3-175b-1024": Case("gpt3-175b", 1024, "a100", 120, 0.02, 2),
    "megatron-1t-3072": Case("megatron-1t", 3072, "a100", 180, 0.03, 3),
    "mixtral-8x7b-64": Case("mixtral-8x7b", 64, "h100", 120, gigabytes=2),
    "gpt3-xl-96-layers": Case("gpt3-xl", 64, "h100", 0, dims={"num_layers": 96}),
    # As many parameters as with 1,000 layers of 2,048, so that memory is as short.
    "gpt3-xl-96-wide-layers": Case("gpt3-xl", 64, "h100", 0, dims={"num_layers": 96, "hidden": 6656, "heads": 52}),
    "gpt3-xl-1000-layers": Case("gpt3-xl", 64, "h100", 0, dims={"num_layers": 1000}, times=(1.5, "gpt3-xl-96-layers")),
    "gpt3-xl-1000-layers-unlimited": Case("gpt3-xl", 64, "h100", 0, dims={"num_layers": 1000}),
    "wide-resnet-2b-32": Case("wide-resnet-2b", 32, "v100", 180, gigabytes=2),
    "unet-sd1-32": Case("unet-sd1", 32, "v100", 180, gigabytes=2),
}


LOOK_SECONDS = 0.25
"""Between two looks, at least."""

LOOK_SHARE = 0.01
"""Of the time that looks may take: the kernel goes through all pages of a process, which has to wait for it."""


@dataclass(slots=True)
class Usage:
    """What processes took so far: resident bytes at the fullest moment, and CPU seconds by process."""

    bytes: int = 0
    seconds: dict[int, float] = field(default_factory=dict)

    def look(self, pid: int) -> None:
        """Take down what a process and its descendants have and have had."""
        tick = os.sysconf("SC_CLK_TCK")
        left, held = [pid], 0
        while left:
            own = Path("/proc", str(left.pop()))
            try:
                *_, last = own.joinpath("stat").read_text().rpartition(")")
                left += [int(child) for file in own.glob("task/*/children") for child in file.read_text().split()]
                shares = own.joinpath("smaps_rollup").read_text().split("\nPss:")[1]
                held += int(shares.split()[0]) * 1024
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            user, system = last.split()[11:13]
            self.seconds[int(own.name)] = (int(user) + int(system)) / tick
        self.bytes = max(self.bytes, held)


@contextmanager
def watched() -> Iterator[Usage]:
    """Watch what this process and those that it starts take."""
    usage, over = Usage(), threading.Event()

    def watch() -> None:
        pause = LOOK_SECONDS
        while not over.wait(pause):
            start = time.monotonic()
            usage.look(os.getpid())
            pause = max(LOOK_SECONDS, (time.monotonic() - start) / LOOK_SHARE)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield usage
    over.set()
    watcher.join()
    usage.look(os.getpid())


def run(name: str, limit: float | None) -> dict[str, object]:
    """Plan a case in this process and return what there is to say of it."""
    with watched() as usage:
        found = planned(name, limit)
    return {**found, "cpu": sum(usage.seconds.values()), "bytes": usage.bytes}


def planned(name: str, limit: float | None) -> dict[str, object]:
    """Plan a case and return what came of it, and in how many seconds."""
    start = time.monotonic()

    from autopar.api import plan_task
    from autopar.configuration import Configuration
    from autopar.progress import Progress
    from autopar.request import JobRequest
    from autopar.search.backends import Engine
    from autopar.sharding import Mesh
    from autopar.task import Effort, prepare

    case = CASES[name]
    task = prepare(
        JobRequest(f"zoo:{case.model}", gpus=case.gpus, cluster=case.cluster, dims=case.dims, global_batch=case.batch)
    )
    if case.mesh:
        outer, inner = case.mesh
        task.space[:] = [Configuration(1, Mesh.of(outer=outer, inner=inner), 1, "1f1b")]
        task = replace(task, unequal=None)
    first: list[float] = []

    def progress(at: Progress) -> None:
        if not first and at.incumbent < float("inf"):
            first.append(time.monotonic() - start)

    effort = Effort(time_limit=limit).after(time.monotonic() - start)
    engine = Engine(workers=1 if case.mesh else case.workers)
    plan = plan_task(task, effort, progress=progress, engine=engine)
    search = plan.search
    assert search is not None, "a plan that was searched says how"
    return {
        "seconds": time.monotonic() - start,
        "first": first[0] if first else None,
        "objective": search.least,
        "bound": search.bound,
        "termination": search.termination,
        "configurations": search.configurations,
        "solved": search.solved,
        "pruned": search.pruned,
        "phases": {phase.name: phase.seconds for phase in search.phases},
        "plans": [
            (each.summary, each.objective, each.simulated.step_seconds if each.simulated else None)
            for each in (plan, *plan.alternatives)
        ],
    }


def say(line: str = "") -> None:
    """Print a line of the page."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measured(name: str, seconds: float) -> dict[str, Any] | None:
    """Plan a case in a process of its own and return what it says; None if it fails."""
    command = [sys.executable, __file__, "--one", name, str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return None if done.returncode else dict(json.loads(done.stdout))


def page(names: list[str], result_of: Callable[[str, float], dict[str, Any] | None]) -> None:
    """Print the page of some cases."""
    say("# Search at scale")
    say()
    say(f"`python docs/benchmarks/scale.py {' '.join(names)}`")
    say(f"on {platform.machine()}, Python {platform.python_version()}; each case in a fresh process, nothing cached.")
    say("A search is stopped in time for the best plans to be verified within the seconds asked for.")
    say("CPU seconds and memory are of all processes together: the workers and the one that they work for.")
    say("The gap is (objective - bound) / objective over the whole declared space, of the least objective found:")
    say("the simulator ranks plans, so that it may be a runner-up's.")
    say()
    columns = "case | workers | seconds (asked) | CPU s | first plan | memory (asked) | objective | bound | gap (asked)"
    say(f"| {columns} | ended | searched |")
    say("|" + "---|" * 11)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        case = CASES[name]
        factor, other = case.times
        seconds = factor * found[other]["seconds"] if other in found else case.seconds
        result = result_of(name, seconds)
        if result is None:
            say(f"| {name} | failed | | | | | | | | | |")
            continue
        found[name] = result
        gap = 1 - result["bound"] / result["objective"]
        asked = f" (< {seconds:.3g})" if seconds else ""
        room = f" (< {case.gigabytes:g})" if case.gigabytes < float("inf") else ""
        close = f" (≤ {case.gap:.2%})" if case.gap < float("inf") else ""
        say(
            f"| {name} | {1 if case.mesh else case.workers} | {result['seconds']:.1f}{asked} "
            f"| {result['cpu']:.1f} | {result['first'] or 0:.1f} "
            f"| {result['bytes'] / 1e9:.2f} GB{room} | {result['objective']:.6g} s | {result['bound']:.6g} s "
            f"| {gap:.3%}{close} | {result['termination']} "
            f"| {result['solved']} solved, {result['pruned']} pruned of {result['configurations']} |"
        )
    for name, result in found.items():
        say()
        say(f"## {name}")
        say()
        say(", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in result["phases"].items()) + ".")
        say()
        say("| plan | objective | simulated |")
        say("|---|---|---|")
        for summary, objective, simulated in result["plans"]:
            say(f"| {summary} | {objective:.6g} s | {simulated:.6g} s |")


def main() -> None:
    """Run one case and print JSON, or measure the cases named."""
    match sys.argv[1:]:
        case ["--one", name, *limit]:
            seconds = float(limit[0]) if limit else CASES[name].seconds
            sys.stdout.write(json.dumps(run(name, seconds or None)))
        case ["--from", folder]:
            files = {name: Path(folder, f"{name}.json") for name in CASES}
            names = [name for name, file in files.items() if file.exists()]
            page(names, lambda name, _: dict(json.loads(files[name].read_text())))
        case names if set(names) <= set(CASES):
            page(names or list(CASES), measured)
        case _:
            raise SystemExit(f"the cases are {', '.join(CASES)}")


if __name__ == "__main__":
    show_usage(__doc__)
    main()

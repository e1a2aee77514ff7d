"""Measure the portfolio over time on problem files, and make a page of the table and the plots.

    python docs/benchmarks/selection_engine.py run "as of today" 60 FILE...   # adds to selection_engine.json
    python docs/benchmarks/selection_engine.py page                           # writes selection_engine.md and the plots

Each run is a process of its own. Its clock is the CPU time of the solver's main thread, which is what a wall clock
shows on an idle machine: so runs are comparable whatever else the machine does. Linear programs stop by that clock as
well, in their callbacks. To measure another version, set PYTHONPATH to its tree.
"""

import itertools
import json
import math
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import highspy

HERE = Path(__file__).parent
STEM = "selection_engine"
THREADS = 2
FLOOR = 1e-6
"""Distances to the best below this are drawn as 0."""


def measure(path: str, seconds: float, threads: int) -> dict[str, Any]:
    """Solve one problem file; the clock of this process becomes the CPU time of its main thread."""
    clock, ticks = time.pthread_getcpuclockid(threading.main_thread().ident or 0), itertools.count()
    time.monotonic = lambda: time.clock_gettime(clock) + 1e-9 * next(ticks)  # never the same time twice
    set_option = highspy.Highs.setOptionValue
    highspy.Highs.setOptionValue = (  # the limits of HiGHS are in seconds of wall time
        lambda highs, name, value: None if name == "time_limit" else set_option(highs, name, value)
    )

    from autopar import iopddl, solvers
    from autopar.problem import check

    history: list[tuple[float, float, float]] = []
    problem = iopddl.load(path)
    solution = solvers.load("portfolio").solve(
        problem,
        time_limit=seconds - time.monotonic(),
        threads=threads,
        watch=lambda _, cost, bound: history.append((time.monotonic(), cost, bound)),
    )
    check(problem, solution)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "problem": Path(path).name.removesuffix(".gz").removesuffix(".json"),
        "limit": seconds,
        "termination": str(solution.termination),
        "cost": solution.cost,
        "bound": solution.bound,
        "seconds": time.monotonic(),
        "cpu": used.ru_utime + used.ru_stime,
        "history": [(at, cost, bound) for at, cost, bound in history if math.isfinite(cost)],
    }


def run(label: str, seconds: float, paths: list[str]) -> None:
    """Measure problem files and add the results to the data."""
    data = HERE / f"{STEM}.json"
    known = json.loads(data.read_text()) if data.exists() else []
    for path in paths:
        done = subprocess.run(
            [sys.executable, __file__, "measure", path, str(seconds), str(THREADS)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result = {"label": label, **json.loads(done.stdout)}
        known = [each for each in known if (each["label"], each["problem"]) != (label, result["problem"])] + [result]
        data.write_text(json.dumps(known) + "\n")
        words = (label, result["problem"], result["termination"], result["cost"], result["bound"], result["seconds"])
        sys.stdout.write(" ".join(map(str, words)) + "\n")


def within(result: dict[str, Any], cost: float, near: float) -> str:
    """Return the seconds until the cost was at most `near` above `cost`, relative to it."""
    found = (at for at, own, _ in result["history"] if own <= cost + near * abs(cost))
    return next((f"{at:.1f}" for at in found), "-")


def after(result: dict[str, Any], share: float) -> str:
    """Return how far above its end the cost was after a share of the time limit."""
    known = [cost for at, cost, _ in result["history"] if at <= share * result["limit"]]
    return f"{100 * (known[-1] / result['cost'] - 1):.2f} %" if known else "-"


def page() -> None:
    """Write the page and its plots."""
    from autopar.bench.svg import Axis, Curve, chart

    results = json.loads((HERE / f"{STEM}.json").read_text())
    problems = list(dict.fromkeys(each["problem"] for each in results))
    lines = [
        "# The portfolio over time",
        "",
        "Made by `python docs/benchmarks/selection_engine.py`; seconds are CPU time of the solver's main thread (of two"
        " threads), reading the file included, CPU time of all threads beside it.",
        "Problems called hubs are of `python -m tests.instances DIR hubs`, those called tensors of `... DIR tensors`.",
        "Versions may have been measured on different machines: costs and bounds compare, seconds of M, S and tensors "
        "(one machine) do, those of others roughly.",
        "",
        "| problem | version | cost | bound | gap | stopped | seconds | CPU | within 1 % of its end | 0.1 % |"
        " above its end at a quarter of the limit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    folder = HERE / STEM
    folder.mkdir(exist_ok=True)
    pictures = []
    for problem in problems:
        runs = [each for each in results if each["problem"] == problem]
        best = min(each["cost"] for each in runs)
        curves = []
        for each in runs:
            gap = (each["cost"] - each["bound"]) / each["cost"]
            lines.append(
                f"| {problem} | {each['label']} | {each['cost']:,} | {each['bound']:,} | {100 * gap:.4f} % |"
                f" {each['termination']} | {each['seconds']:.1f} of {each['limit']:g} | {each['cpu']:.1f} |"
                f" {within(each, each['cost'], 0.01)} | {within(each, each['cost'], 0.001)} | {after(each, 0.25)} |"
            )
            points = [(at, cost / best - 1) for at, cost, _ in each["history"]]
            curves.append(Curve(each["label"], (*points, (each["seconds"], each["cost"] / best - 1))))
        title = f"{problem}: best cost so far, above the best of all, relative to it"
        end = max(each["seconds"] for each in runs)
        picture = chart(title, curves, Axis("seconds", 0.0, end), Axis("log", FLOOR, 10.0, log=True), steps=True)
        (folder / f"{problem}.svg").write_bytes(picture)
        pictures += ["", f"![{title}]({STEM}/{problem}.svg)"]
    (HERE / f"{STEM}.md").write_text("\n".join([*lines, *pictures]) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", path, seconds, threads]:
            sys.stdout.write(json.dumps(measure(path, float(seconds), int(threads))))
        case ["run", label, seconds, *paths]:
            run(label, float(seconds), paths)
        case ["page"]:
            page()
        case _:
            sys.exit(__doc__)

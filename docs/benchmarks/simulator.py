"""Measure how fast plans are simulated and estimated, and print a page.

    python docs/benchmarks/simulator.py > docs/benchmarks/simulator.md

Seconds are CPU seconds of one thread, the least of several runs; no GPU is needed. It takes about two minutes.
"""

import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
from usage import show_usage

from autopar.cluster import Cluster, load_cluster
from autopar.cluster.files import parse_cluster
from autopar.cost import CostModel
from autopar.cost.policy import POLICIES
from autopar.degrees import Degrees
from autopar.errors import JobError
from autopar.estimates import Estimator
from autopar.prediction import Predictor
from autopar.program.records import Program
from autopar.simulate import simulate, simulate_flat, write_chrome_trace
from autopar.workload import open_workload

RUNS = 7

# DistIR's machine: 16 V100-32GB; the constants of its cost model are 14 TFLOP/s, 900 GB/s, 10 us and 25 Gb/s.
DISTIR = """\
name: distir
devices_per_node: 16
device:
  name: V100-SXM2-32GB
  peaks: {half: 14 TFLOP/s, single: 14 TFLOP/s}
  memory: 32 GB
  memory_bandwidth: 900 GB/s
  launch: 10 us
  gemm_efficiency: 1.0
  bandwidth_efficiency: 1.0
intra: {tier: network, bandwidth: 3.125 GB/s, latency: 0 us}
inter: {tier: network, bandwidth: 3.125 GB/s, latency: 0 us}
"""
MLPS = ("mlp-small", "mlp-medium", "mlp-large")


def say(line: str = "") -> None:
    """Print a line of the page."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def cpu(work: Callable[[], object], runs: int = RUNS) -> float:
    """Return the least CPU seconds of several runs."""
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def predictor(model: str, optimizer: str = "adam") -> Predictor:
    """Return predictions for a model of the zoo; programs are not checked against the model each time."""
    return Predictor(open_workload(f"zoo:{model}", optimizer=optimizer), verify=False)


def event_rows() -> Iterator[tuple[str, ...]]:
    """Yield how long the event simulator takes for large plans, and what comes before it."""
    cluster = load_cluster("a100")
    cases = [
        ("gpt3-175b", Degrees(dp=8, tp=8, pp=8, zero=1, global_batch=1536)),
        ("gpt3-175b", Degrees(dp=64, tp=8, pp=8, zero=1, global_batch=1536 * 8)),
        ("gpt3-175b", Degrees(dp=8, tp=8, pp=8, interleave=6, zero=1, global_batch=1536)),
        (
            "megatron-530b",
            Degrees(dp=12, tp=8, pp=35, sequence_parallel=True, recompute="selective", global_batch=1920),
        ),
    ]
    predictors = {name: predictor(name) for name in dict.fromkeys(name for name, _ in cases)}
    for name, degrees in cases:
        found = predictors[name]
        start = time.process_time()
        program, _ = found.lowered(degrees, cluster)
        first = time.process_time() - start
        lower = cpu(lambda found=found, degrees=degrees: found.lowered(degrees, cluster), 3)
        costs = CostModel(cluster)
        seconds = cpu(lambda program=program, costs=costs: simulate(program, costs))
        flat = cpu(lambda program=program, costs=costs: simulate_flat(program, costs), 1)
        apart = simulate_flat(program, costs).step_seconds / simulate(program, costs).step_seconds - 1
        yield (
            name,
            f"{degrees}" + (f" interleave={degrees.interleave}" if degrees.interleave > 1 else ""),
            str(degrees.gpus),
            str(tasks(program)),
            f"{seconds * 1e3:.0f} ms",
            f"{lower * 1e3:.0f} ms",
            f"{first:.1f} s",
            f"{flat:.1f} s",
            f"{abs(apart):.0e}",
        )


def tasks(program: Program) -> int:
    """Return the number of passes of all stages."""
    return sum(len(order) for order in program.orders())


def plans(gpus: int, batch: int) -> list[Degrees]:
    """Return plans for so many devices: all degrees that divide, ZeRO 0 and 1, three flavours of recompute, ..."""
    found = []
    powers = [2**i for i in range(11)]
    for tp, pp, zero, sequence, recompute, microbatch, chunks in product(
        (1, 2, 4, 8), powers, (0, 1), (False, True), ("none", "selective", "full"), (1, 2, 4), (1, 2, 3)
    ):
        dp = gpus // (tp * pp)
        share = dp * microbatch
        if dp * tp * pp != gpus or not dp or batch % share or 96 % (pp * chunks) or (sequence and tp == 1):
            continue
        if chunks > 1 and (pp == 1 or batch // share % pp):
            continue
        found.append(
            Degrees(
                dp=dp, tp=tp, pp=pp, zero=zero, sequence_parallel=sequence, recompute=recompute,
                interleave=chunks, microbatch=microbatch, global_batch=batch,
            )
        )  # fmt: skip
    return found


def estimate_rows() -> Iterator[tuple[str, ...]]:
    """Yield how long estimates of GPT-3 on 64 to 1024 devices take, one table after the other."""
    cluster = load_cluster("a100")
    estimator = Estimator(predictor("gpt3-175b"), cluster)
    estimator.predictor.rules  # noqa: B018 - discovered once per model and kept on disk by the command line
    for gpus in (64, 256, 512, 1024):
        space = plans(gpus, 1536)
        before = len(estimator.tables)
        start = time.process_time()
        for degrees in space:
            estimator.table(degrees)
        made = time.process_time() - start
        start = time.process_time()
        estimator.estimate(space)
        seconds = time.process_time() - start
        yield (
            str(gpus),
            str(len(space)),
            str(len(estimator.tables) - before),
            f"{made:.1f} s",
            f"{seconds:.2f} s",
            f"{len(space) / seconds:,.0f}",
            f"{len(space) / (seconds + made):,.0f}",
        )


def accuracy() -> tuple[int, np.ndarray]:
    """Return the errors of estimates against the event simulator, on a sample of plans for 512 devices."""
    cluster = load_cluster("a100")
    found = predictor("gpt3-175b")
    sample = plans(512, 1536)[::29]
    estimates = Estimator(found, cluster).estimate(sample)
    predicted = np.array([found.predict(degrees, cluster).timeline.step_seconds for degrees in sample])
    return len(sample), np.abs(estimates.step_seconds / predicted - 1)


def grid() -> list[tuple[str, Degrees]]:
    """Return DistIR's default grid of MLPs: data, tensor and pipeline degrees on 1, 2 and 4 devices.

    Batches are powers of two up to 2^15, microbatches 2 to 128 where there is a pipeline.
    """
    found = []
    for model, world, batch in product(MLPS, (1, 2, 4), [2**i for i in range(16)]):
        for dp, tp, pp in product((1, 2, 4), repeat=3):
            counts = [2**i for i in range(1, 8)] if pp > 1 else [1]
            for count in counts:
                if dp * tp * pp == world and batch % (dp * count) == 0:
                    microbatch = batch // (dp * count)
                    degrees = Degrees(dp=dp, tp=tp, pp=pp, schedule="gpipe", microbatch=microbatch, global_batch=batch)
                    found.append((model, degrees))
    return found


def grid_rows() -> Iterator[tuple[str, ...]]:
    """Yield how long the grid takes, and its best plans."""
    cluster: Cluster = parse_cluster(DISTIR)
    start = time.process_time()
    rows = grid()
    total = 0.0
    for model in MLPS:
        chosen = [degrees for name, degrees in rows if name == model]
        begun = time.process_time()
        estimator = Estimator(predictor(model, "sgd"), cluster, policy=POLICIES["fp32"])
        found = estimator.estimate(chosen)
        seconds = time.process_time() - begun
        total += seconds
        fits = np.flatnonzero(found.peak_bytes <= 28e9)
        rates = np.array([degrees.global_batch for degrees in chosen]) / found.step_seconds
        best = fits[rates[fits].argmax()] if len(fits) else None
        text = "none fits 28 GB" if best is None else f"{chosen[best]} batch {chosen[best].global_batch}"
        yield model, str(len(chosen)), f"{seconds:.1f} s", str(len(fits)), text
    yield "all", str(len(rows)), f"{time.process_time() - start:.1f} s", "", ""


def trace_row() -> tuple[str, ...]:
    """Return size and time of a large trace."""
    cluster = load_cluster("a100")
    degrees = Degrees(dp=12, tp=8, pp=35, interleave=3, sequence_parallel=True, global_batch=1680 * 3)
    program, _ = predictor("megatron-530b").lowered(degrees, cluster)
    start = time.process_time()
    timeline = simulate(program, CostModel(cluster), trace=True)
    simulated = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        start = time.process_time()
        write_chrome_trace(timeline, path)
        written = time.process_time() - start
        size = path.stat().st_size
    return f"{len(timeline.events):,}", f"{simulated:.2f} s", f"{written:.2f} s", f"{size / 1e6:.1f} MB"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    """Print a table."""
    say("| " + " | ".join(head) + " |")
    say("|" + "---|" * len(head))
    for row in rows:
        say("| " + " | ".join(row) + " |")
    say()


def main() -> None:
    """Print the page."""
    say("# Speed of the simulator\n")
    say("Printed by `python docs/benchmarks/simulator.py`; it needs no GPU.")
    say("Seconds are CPU seconds of one thread, the least of several runs.")
    say(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}.")
    say("Nothing is compiled, so the first run costs what every run costs.\n")
    say("## Events\n")
    say("One step by the event simulator, laws of the program checked, memory of every stage included.")
    say("Before it a plan is placed and lowered: *first* is what that takes for the first plan of a model on a mesh, ")
    say("with its rules, and *lowered* for another one on the same mesh.")
    say("*Apart* simulates every device; the last column is by how much the step differs.\n")
    head = ("model", "degrees", "devices", "passes", "simulated", "lowered", "first", "apart", "differs")
    table(head, event_rows())
    say("## Estimates\n")
    say("GPT-3 175B, batch 1536: every power of two as degree, ZeRO 0 and 1, sequence parallelism or not, three ")
    say("flavours of recompute, 1 to 4 samples per microbatch, 1 to 3 stages per group; A100.")
    say("Tables are made once per tensor degree, ZeRO, sequence parallelism and microbatch, and used again.\n")
    head = ("devices", "plans", "new tables", "making them", "estimating", "plans/s", "with the tables")
    table(head, estimate_rows())
    count, errors = accuracy()
    shares = ", ".join(f"{np.quantile(errors, q):.2%} at {q:.0%}" for q in (0.5, 0.9, 1.0))
    say(f"Against the event simulator {count} of these plans for 512 devices differ by (quantiles) {shares}.\n")
    say("## DistIR's grid\n")
    say("The default grid of DistIR's search: three MLPs, 1, 2 and 4 devices, batches up to 2^15, GPipe, SGD.")
    say("DistIR itself takes 19 CPU minutes to transform and simulate it.\n")
    table(("model", "plans", "estimated", "fit 28 GB", "most samples per second"), grid_rows())
    say("## Trace\n")
    table(("events", "simulated", "written", "size"), iter([trace_row()]))


if __name__ == "__main__":
    show_usage(__doc__)
    try:
        main()
    except JobError as error:
        sys.exit(str(error))

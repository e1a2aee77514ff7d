"""Train a small model on two gloo ranks of this machine with several buckets of gradients, and compare predictions.

    python docs/benchmarks/bucket_order.py                a page: predicted and measured seconds of a step
    python docs/benchmarks/bucket_order.py --rounds 3     fewer rounds

Needs torch. First the ranks measure when each gradient is there in a backward without communication, and what
all-reduces of several sizes take; from this `solvers.batching` cuts buckets and predicts the step of every way to cut.
Then they train with PyTorch's DistributedDataParallel at several `bucket_cap_mb` and with our cuts as
`bucket_cap_mb_list`. The variants take turns, so that other work on the machine disturbs all of them equally.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from autopar.fusion.rules import MIB, SizeRule  # noqa: E402
from autopar.profile.measure import processor  # noqa: E402
from autopar.solvers.batching import cut_batches  # noqa: E402

RANKS = 2
WIDTH, DEPTH, BATCH = 512, 20, 64
"""A chain of linear layers: 1 MiB of gradients each."""
CAPS = (0.05, 1.0, 4.0, 25.0, 1000.0)
"""`bucket_cap_mb` that are tried: nearly every gradient alone, to all of them in one."""
SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of the all-reduces that are measured."""
IN_FLIGHT = 8
"""All-reduces that are started one after the other before the first is waited for, as buckets are."""
OURS = "ours"
CLEAR = 0.05
"""Pairs of ways count if their predictions differ by more."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the ranks measured.

    Attributes:
        ready: Seconds from the start of a step at which each gradient is there, in that order.
        sizes: Bytes of these.
        compute: Seconds of forward and backward.
        latency: Seconds of an all-reduce of nothing.
        per_byte: Seconds of a byte more.
        ours: Our cuts: one past the last gradient of each bucket.
        steps: Median seconds of a step by way.
    """

    ready: tuple[float, ...]
    sizes: tuple[float, ...]
    compute: float
    latency: float
    per_byte: float
    ours: tuple[int, ...]
    steps: dict[str, float]


def law(latency: float, per_byte: float) -> Callable[[Any], Any]:
    """Return the seconds of an all-reduce by its bytes."""
    return lambda nbytes: latency + per_byte * nbytes


def predicted(found: Found, ends: Sequence[int]) -> float:
    """Return the seconds of a step with some buckets: one stream of compute, one of all-reduces in order."""
    end, first = 0.0, 0
    for last in ends:
        seconds = found.latency + found.per_byte * sum(found.sizes[first:last])
        end, first = max(end, found.ready[last - 1]) + seconds, last
    return max(end, found.compute)


def ways(found: Found) -> dict[str, tuple[int, ...]]:
    """Return the buckets of every way."""
    table = {f"DDP {cap:g} MiB": SizeRule(cap * MIB).ends(found.sizes) for cap in CAPS}
    return {**table, OURS: found.ours}


def rank(number: int, store: Path, rounds: int, out: Path) -> None:
    """Be one rank; the first one writes what was found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    x = torch.randn(BATCH, WIDTH)
    parameters = list(model.parameters())

    def step(module: Any) -> None:
        module.zero_grad(set_to_none=True)
        module(x).square().mean().backward()

    def shared(values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(own) for own in tensor]

    order, ready, compute = _ready_times(step, model, parameters, 10 * rounds)
    ready, (compute,) = shared(ready), shared([compute])
    sizes = [float(parameters[own].numel() * 4) for own in order]
    times = []
    for nbytes in SIZES:
        tensors = [torch.zeros(nbytes // 4) for _ in range(IN_FLIGHT)]
        samples = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
            samples.append((time.perf_counter() - start) / IN_FLIGHT)
        times.append(median(samples))
    slope, latency = np.polyfit(SIZES, shared(times), 1)
    latency, slope = max(1e-5, float(latency)), max(1e-12, float(slope))
    ours = cut_batches(ready, sizes, law(latency, slope)).ends
    ends = (0, *ours)
    caps = [sum(sizes[first:last]) / MIB for first, last in pairwise(ends)]
    settings: dict[str, dict[str, Any]] = {f"DDP {cap:g} MiB": {"bucket_cap_mb": cap} for cap in CAPS}
    settings[OURS] = {"bucket_cap_mb_list": caps}
    runs = {
        name: partial(step, torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), **own))
        for name, own in settings.items()
    }
    samples = _timed(runs, rounds, dist)
    steps = dict(zip(samples, shared([median(own) for own in samples.values()]), strict=True))
    if number == 0:
        found = Found(tuple(ready), tuple(sizes), compute, latency, slope, ours, steps)
        out.write_text(json.dumps({name: getattr(found, name) for name in Found.__slots__}))
    dist.barrier()
    dist.destroy_process_group()


def _ready_times(
    step: Callable[[Any], None], model: Any, parameters: Sequence[Any], repeats: int
) -> tuple[list[int], list[float], float]:
    """Return the order of gradients, when each is there, and the seconds of forward and backward."""
    seen: list[tuple[int, float]] = []
    handles = [
        own.register_post_accumulate_grad_hook(lambda _, index=index: seen.append((index, time.perf_counter())))
        for index, own in enumerate(parameters)
    ]
    rows, ends = [], []
    for _ in range(repeats):
        seen.clear()
        start = time.perf_counter()
        step(model)
        ends.append(time.perf_counter() - start)
        rows.append([moment - start for _, moment in seen])
        order = [index for index, _ in seen]
    for handle in handles:
        handle.remove()
    return order, [median(column) for column in zip(*rows, strict=True)], median(ends)


def _timed(runs: dict[str, Callable[[], None]], rounds: int, dist: Any) -> dict[str, list[float]]:
    """Return the seconds of steps of all variants, which take turns."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for own in runs.values():
        own()
        own()  # DistributedDataParallel settles its buckets after the first step
    for _ in range(rounds):
        for name, own in runs.items():
            for _ in range(4):
                dist.barrier()
                start = time.perf_counter()
                own()
                samples[name].append(time.perf_counter() - start)
    return samples


def measure(rounds: int) -> Found:
    """Return what two ranks find on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(number), "--folder", folder, "--rounds", str(rounds)]
            )
            for number in range(RANKS)
        ]
        codes = [own.wait() for own in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        data = json.loads(out.read_text())
    return Found(**{name: tuple(own) if isinstance(own, list) else own for name, own in data.items()})


def agreeing(found: Found) -> tuple[int, int]:
    """Return the pairs of ways that are measured in the predicted order, and all pairs that clearly differ."""
    steps = {name: predicted(found, ends) for name, ends in ways(found).items()}
    clear = [(one, two) for one, two in combinations(steps, 2) if abs(steps[one] / steps[two] - 1) > CLEAR]
    return sum((steps[one] < steps[two]) == (found.steps[one] < found.steps[two]) for one, two in clear), len(clear)


def _priority() -> str:
    """Return that the ranks go before other work on the machine, if they do (`autogroup` of sched(7))."""
    path = Path("/proc/self/autogroup")
    nice = int(path.read_text().split()[-1]) if path.exists() else 0
    return f", ranks before other work (autogroup nice {nice})" if nice < 0 else ""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.folder / "store", args.rounds, args.folder / "found.json")
        return
    load = os.getloadavg()[0]
    found = measure(args.rounds)
    lines = [
        "# Buckets of gradients on two ranks\n",
        f"Printed by `python docs/benchmarks/bucket_order.py --rounds {args.rounds}` on {processor()}, "
        f"{os.cpu_count()} cores; load before: {load:.1f}{_priority()}.",
        f"A chain of {DEPTH} linear layers of width {WIDTH} trains on {BATCH} samples per rank, with PyTorch's "
        "DistributedDataParallel over gloo,",
        "at several `bucket_cap_mb` and with our cuts as `bucket_cap_mb_list`; ways take turns.",
        "*predicted*: from gradients timed one by one without communication, and all-reduces timed without compute.\n",
        f"{len(found.sizes)} gradients of {sum(found.sizes) / MIB:.1f} MiB, {found.compute * 1e3:.1f} ms of compute; "
        f"an all-reduce takes {found.latency * 1e3:.2f} ms and {found.per_byte * MIB * 1e3:.2f} ms per MiB.\n",
        "| buckets | number | predicted | measured |",
        "|---|---|---|---|",
    ]
    for name, ends in ways(found).items():
        lines.append(
            f"| {name} | {len(ends)} | {predicted(found, ends) * 1e3:.1f} ms | {found.steps[name] * 1e3:.1f} ms |"
        )
    same, pairs = agreeing(found)
    lines.append(
        f"\n{same} of {pairs} pairs whose predictions differ by more than {CLEAR:.0%} are measured in that order."
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

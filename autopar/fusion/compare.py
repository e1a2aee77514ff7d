"""One program with the buckets of others and with ours: the table that `autopar fuse` prints."""

import time
from dataclasses import dataclass

from autopar.cost import CostModel
from autopar.fusion.buckets import Bucketing, BucketTimer, Timed, cut_gradients, last_backward
from autopar.fusion.rules import MIB, RULES, SizeRule, best_rule, rule_cuts
from autopar.program.records import Program

EVERYTHING = SizeRule(float("inf"))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to put gradients into buckets.

    Attributes:
        name: The way, in words.
        timed: The step.
    """

    name: str
    timed: Timed


@dataclass(frozen=True, slots=True)
class BucketTime:
    """A bucket of the last backward, in seconds from the start of the step.

    Attributes:
        name: Collective, mesh axis and gradients.
        nbytes: Bytes it deals with on one device.
        ready: When its last gradient is there.
        start: When it has the link.
        end: When it is done.
    """

    name: str
    nbytes: float
    ready: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A program with several ways to cut its gradients.

    Attributes:
        ways: Those of others.
        found: Ours.
        seconds: How long it took to find ours.
        buckets: The buckets of the last backward of the devices that finish their gradients last, with ours.
        compute_end: When these devices are done with their last pass, in seconds.
    """

    ways: tuple[Way, ...]
    found: Bucketing
    seconds: float
    buckets: tuple[BucketTime, ...]
    compute_end: float

    @property
    def best(self) -> Way:
        """The fastest of the others."""
        return min(self.ways, key=lambda way: way.timed.step_seconds)

    @property
    def closed(self) -> float:
        """Share of what the best of the others leaves to the bound that our cuts save; 0 if it leaves nothing."""
        best = self.best.timed.step_seconds
        left = best - self.found.bound
        return (best - self.found.found.step_seconds) / left if left > 1e-9 * best else 0.0


def compare(program: Program, costs: CostModel) -> Comparison:
    """Return a program with the buckets that frameworks would give its gradients, and with ours."""
    timer = BucketTimer(program, costs)
    began = time.perf_counter()
    found = cut_gradients(program, costs)
    seconds = time.perf_counter() - began
    ways = [
        Way("every gradient alone", timer.time(rule_cuts(timer, SizeRule(0.0)))),
        Way("PyTorch DDP: 25 MiB, the first 1 MiB", timer.time(rule_cuts(timer, RULES["ddp"]))),
        Way("30 MiB (XLA in DisCo's comparison)", timer.time(rule_cuts(timer, SizeRule(30 * MIB)))),
        Way("uniform rule: 25 MB, 2 MB per device", found.uniform),
        Way("all in one", timer.time(rule_cuts(timer, EVERYTHING))),
    ]
    if found.num_gradients:
        rule, timed = best_rule(timer, SizeRule(0.0))
        ways.append(Way(f"best single size: {rule.limit / 1e6:.3g} MB", timed))
    return Comparison(tuple(ways), found, seconds, *_times(timer, found))


def _times(timer: BucketTimer, found: Bucketing) -> tuple[tuple[BucketTime, ...], float]:
    """Return the buckets of the group of devices that reduces its gradients last, and when its last pass ends."""
    traffic = timer.traffic(found.cuts)
    sim = timer.run(traffic)
    group = max(range(len(sim.reduced)), key=lambda number: sim.reduced[number])
    times: list[BucketTime] = []
    for chunk, stage in enumerate(timer.program.chunks[group]):
        _, first = last_backward(timer, traffic, sim, group, chunk)
        sizes = [0.0] * len(traffic[stage].last)
        for own in traffic[stage].issued:
            sizes[own.job] += own.traffic.nbytes
        for number, nbytes in enumerate(sizes):
            job, (start, end) = sim.jobs[group][first + number], sim.times[group][first + number].tolist()
            times.append(BucketTime(job.name, nbytes, job.ready, start, end))
    return tuple(sorted(times, key=lambda own: own.start)), sim.runs[group][-1].end

"""Prints published_megatron.md: Megatron-LM's published plans of SC'21 Table 1 beside ours, both simulated.

    python docs/benchmarks/published_megatron.py > docs/benchmarks/published_megatron.md

Models, devices, batches and achieved FLOP/s are those of Narayanan et al. 2021 (SC'21), Table 1; tensor and pipeline
degree, samples per microbatch and layers per virtual stage those of Megatron-LM's `examples/sc21/run_table_1.sh`, which
recomputes whole layers everywhere. Both plans are simulated with the same costs, on the A100 cluster and with the
default software stack; the measured seconds follow from the FLOP/s by the paper's formula,

    FLOPs = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)).

Measured seconds are of the software of 2021; our plan is not one of its space. Bounds are of the whole
declared space, and gaps those of the plan.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

import autopar
from autopar import models
from autopar.bench.conditions import conditions
from autopar.bench.report import condition_lines, markdown_table
from autopar.cluster import load_cluster
from autopar.degrees import Degrees
from autopar.errors import InterruptedSearchError
from autopar.models.gpt import GptConfig
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.units import format_bytes, format_seconds
from autopar.workload import open_workload

CLUSTER = "a100"


@dataclass(frozen=True)
class Row:
    """A row of the table: tflops are those achieved per device, chunks the stages per device."""

    name: str
    gpus: int
    tp: int
    pp: int
    microbatch: int
    chunks: int
    tflops: float

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return models.spec(self.name).global_batch

    @property
    def degrees(self) -> Degrees:
        """The plan."""
        return Degrees(
            dp=self.gpus // (self.tp * self.pp), tp=self.tp, pp=self.pp, recompute="full", interleave=self.chunks,
            microbatch=self.microbatch, global_batch=self.batch,
        )  # fmt: skip

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        config = models.spec(self.name).config
        assert isinstance(config, GptConfig)
        h, layers, s, vocab = config.hidden, config.num_layers, config.seq, config.vocab
        flops = 96 * self.batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
        return flops / (self.gpus * self.tflops * 1e12)


ROWS = (
    Row("megatron-1.7b", 32, 1, 1, 16, 1, 137),
    Row("megatron-3.6b", 64, 2, 1, 16, 1, 138),
    Row("megatron-7.5b", 128, 4, 1, 16, 1, 142),
    Row("megatron-18b", 256, 8, 1, 8, 1, 135),
    Row("megatron-39b", 512, 8, 2, 4, 1, 138),
    Row("megatron-76b", 1024, 8, 4, 2, 3, 140),
    Row("megatron-145b", 1536, 8, 8, 2, 2, 148),
    Row("megatron-310b", 1920, 8, 16, 1, 2, 155),
    Row("megatron-530b", 2520, 8, 35, 1, 3, 163),
    Row("megatron-1t", 3072, 8, 64, 1, 1, 163),
)

PLANS = 3

HEADER = (
    "model",
    "GPUs",
    "measured",
    "published plan",
    "its memory",
    "ours",
    "less time",
    "bound",
    "gap",
    "search",
    "our plan",
)


def compared(row: Row, time_limit: float, cache: Path) -> tuple[tuple[str, ...], Plan | None]:
    """Return the cells of a row, and our best plan; None if there was none in time."""
    theirs = Predictor(open_workload(f"zoo:{row.name}"), cache).predict(row.degrees, load_cluster(CLUSTER))
    cells = [
        row.name,
        str(row.gpus),
        format_seconds(row.measured),
        f"{format_seconds(theirs.timeline.step_seconds)}: {row.degrees}, {row.chunks} stages per device, "
        f"microbatch {row.microbatch}, full recompute",
        format_bytes(theirs.timeline.peak_bytes) + ("" if theirs.fits else " (does not fit)"),
    ]
    try:
        ours = autopar.solve(
            f"zoo:{row.name}", gpus=row.gpus, cluster=CLUSTER, time_limit=time_limit, cache_dir=cache, top_k=PLANS
        )
    except InterruptedSearchError as error:
        return (*cells, "-", "-", "-", "-", "-", str(error.args[0])), None
    assert ours.simulated is not None
    assert ours.search is not None
    seconds = ours.simulated.step_seconds
    figures = (
        format_seconds(seconds),
        f"{100 * (1 - seconds / theirs.timeline.step_seconds):.1f} %",
        format_seconds(ours.search.bound),
        f"{100 * ours.search.gap:.1f} %",
        format_seconds(sum(phase.seconds for phase in ours.search.phases)),
        ours.summary,
    )
    return (*cells, *figures), ours


def details(name: str, ours: Plan) -> list[str]:
    """Return the lines that say where the time of a search went, and what its best plans are."""
    assert ours.search is not None
    rows = []
    for number, plan in enumerate((ours, *ours.alternatives), 1):
        assert plan.simulated is not None
        rows.append((str(number), *map(format_seconds, (plan.objective, plan.simulated.step_seconds)), plan.summary))
    phases = ", ".join(f"{phase.name} {format_seconds(phase.seconds)}" for phase in ours.search.phases)
    ended = f"{phases}; stopped: {ours.search.termination}."
    return ["", f"## {name}", "", ended, "", *markdown_table(("#", "objective", "simulated", "plan"), rows)]


def main() -> None:
    """Print the page, row by row."""
    parser = argparse.ArgumentParser(description="Megatron-LM's published plans beside ours.")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds of our search per model")
    parser.add_argument("--only", default="", metavar="NAME,...", help="rows of these models only")
    arguments = parser.parse_args()
    wanted = [row for row in ROWS if not arguments.only or row.name in arguments.only.split(",")]
    command = "python docs/benchmarks/published_megatron.py" + "".join(f" {word}" for word in sys.argv[1:])
    cache = platformdirs.user_cache_path("autopar")
    lines = ["# Megatron-LM's published plans and ours", ""]
    lines += (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].splitlines()
    lines += ["", *condition_lines(conditions(command)), ""]
    print("\n".join(lines))  # noqa: T201
    plans = dict[str, Plan]()
    for number, row in enumerate(wanted):
        cells, ours = compared(row, arguments.time_limit, cache)
        if ours is not None:
            plans[row.name] = ours
        table = markdown_table(HEADER, [cells])
        print("\n".join(table if number == 0 else table[2:]), flush=True)  # noqa: T201
    for name, ours in plans.items():
        print("\n".join(details(name, ours)))  # noqa: T201


if __name__ == "__main__":
    main()

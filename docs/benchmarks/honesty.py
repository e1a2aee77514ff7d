"""Compare the search with every plan by degrees of 30 small random jobs, and print a page.

    python docs/benchmarks/honesty.py > docs/benchmarks/honesty.md      all jobs
    python docs/benchmarks/honesty.py 8 14                              some of them

The jobs, the plans by degrees and the violations are those of `tests/enumeration.py`; the ordinary tests run four of
the jobs, `pytest -m slow tests/test_honesty.py` the others.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autopar.simplicity import NEAR as SIMPLER  # noqa: E402
from autopar.units import format_seconds  # noqa: E402
from tests.enumeration import NEAR, NUM_JOBS, Comparison, left_out, small_job  # noqa: E402

HEAD = (
    "# Honesty by enumeration",
    "",
    "`python docs/benchmarks/honesty.py > docs/benchmarks/honesty.md`",
    "Small random jobs, searched without a time limit, beside every plan by degrees that `autopar predict` can make of "
    "them: all dp, tp, cp, ep, pp, ZeRO stages, groups that share, sequence parallelism, schedules, stages per group, "
    "microbatches and recompute, on all devices and on fewer.",
    f"All are priced by the formula; those that are not slower than {NEAR:g} times our plan by it are simulated.",
    "A violation is a plan by degrees of the declared space that fits and is below the bound, by the formula or "
    "simulated, or that is faster than our plan, simulated, by more than the gap; or a plan file "
    "that does not say what it is when it is read, verified and simulated again.",
    "Where our plan is said to be the simpler of two, or is on fewer devices, each may make it slower by another "
    f"{SIMPLER:.1%}.",
    "The last column has plans on numbers of devices, on meshes or with stages per group that the space does not name.",
    "The gradients of these models fill no bucket: when simulated they are reduced as one after the last backward.",
    "The formula, and with it the objective, has them beside the backward, at their share of the latency of a full "
    "bucket of 25 MB, and is below the simulator by what that makes of a step (job 1).",
    "Devices are a millionth as fast as an H100, so that tiny models are worth splitting.",
    "Memory is ample, or so far from the least peak of all plans by degrees (0 %) to that of the fastest (100 %).",
    "",
    "| job | plans by degrees | fit | best of these, simulated | our plan | simulated | objective | bound | gap "
    "| violations | faster, and left out of the space |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def row(number: int, found: Comparison) -> str:
    """Return the line of the table of a job."""
    plan, report, best = found.plan, found.plan.search, found.best
    assert report is not None, "it was searched"
    assert plan.simulated is not None, "it was simulated"
    outside, task = found.outside, found.enumeration.task
    others = f"{format_seconds(best.simulated)}: {best}" if best else f"none within {NEAR:g} times ours"
    cells = (
        f"{number}: {found.job}",
        len(found.enumeration.plans),
        len(found.enumeration.fitting),
        others,
        plan.summary,
        format_seconds(plan.simulated.step_seconds),
        format_seconds(plan.objective),
        format_seconds(report.bound),
        f"{report.gap:.1%}",
        "; ".join(found.violations) or 0,
        f"{format_seconds(outside.simulated)}: {outside} ({left_out(task, outside.degrees)})" if outside else "none",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the page of the jobs named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=int, nargs="*", metavar="JOB", help=f"0 to {NUM_JOBS - 1}; all if none is said")
    numbers = parser.parse_args().jobs or range(NUM_JOBS)
    if not set(numbers) <= set(range(NUM_JOBS)):
        parser.error(f"jobs are 0 to {NUM_JOBS - 1}")
    sys.stdout.write("\n".join((*HEAD, "")))
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            sys.stdout.write(f"{row(number, Comparison.of(small_job(number), Path(folder)))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

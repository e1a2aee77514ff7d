"""Prints op_order.md: what orders of the ops of a block are worth, where gradients are ready earlier by them.

    python docs/benchmarks/op_order.py > docs/benchmarks/op_order.md
    python docs/benchmarks/op_order.py --only gpt2-zero-2

The backward of every kind of block is put into another order in which each op follows what it reads. *gradients first*:
ops that lead to a gradient of a parameter and to nothing else run as soon as they can, as DisCo reorders; *gradients
last*: the others do. The order found is lowered, verified and simulated, with buckets by the uniform rule and with
buckets cut for it. *at most*: the step if all gradients of a block were there when its backward begins, which no order
inside blocks is faster than; buckets are cut for that, too.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import platformdirs  # noqa: E402

from autopar.cost import CostModel  # noqa: E402
from autopar.degrees import Degrees  # noqa: E402
from autopar.fusion import cut_gradients  # noqa: E402
from autopar.prediction import open_setting  # noqa: E402
from autopar.program.lower import lower  # noqa: E402
from autopar.program.records import Program, Segment, SegmentPhase, defines, reads  # noqa: E402
from autopar.program.verify import verify_program  # noqa: E402
from autopar.simulate import gradients  # noqa: E402
from autopar.simulate.layout import Layout  # noqa: E402
from autopar.task import job_costs  # noqa: E402
from autopar.workload import open_workload  # noqa: E402

CLUSTER = "v100-aws"
ROWS = {
    f"{model}{suffix}": (f"zoo:{model}", Degrees(dp=32, microbatch=4, global_batch=128 * steps, zero=zero))
    for model in ("gpt2", "bert-base")
    for suffix, zero, steps in (("", 0, 1), ("-zero-2", 2, 1), ("-zero-2-of-4", 2, 4))
}
"""Models and plans by name; "of-4" has four microbatches."""


def reordered(segment: Segment, *, gradients_first: bool) -> Segment:
    """Return a backward with its instructions in another order in which each follows what it reads."""
    instructions = segment.instructions
    maker = {own.value: number for number, item in enumerate(instructions) for own in defines(item)}
    needs = [{maker[own.value] for own in reads(item) if own.value in maker} for item in instructions]
    wanted = {own.value for own in (*segment.outputs, *segment.exports, *segment.saved)}
    leads_out = set()
    for number in reversed(range(len(instructions))):
        if any(own.value in wanted for own in defines(instructions[number])):
            leads_out.add(number)
            wanted.update(own.value for own in reads(instructions[number]))
    left, done, order = list(range(len(instructions))), set[int](), list[int]()
    while left:
        ready = [number for number in left if needs[number] <= done]
        chosen = min(ready, key=lambda number: ((number in leads_out) is gradients_first, number))
        left.remove(chosen)
        done.add(chosen)
        order.append(chosen)
    return replace(segment, instructions=tuple(instructions[number] for number in order))


def with_order(program: Program, *, gradients_first: bool) -> Program:
    """Return a program whose backwards are reordered."""
    segments = (
        reordered(own, gradients_first=gradients_first) if own.phase is SegmentPhase.BACKWARD else own
        for own in program.segments
    )
    return replace(program, segments=tuple(segments))


def steps(program: Program, costs: CostModel) -> tuple[float, float]:
    """Return the step by the uniform rule, and with buckets cut for the program."""
    found = cut_gradients(program, costs)
    return found.uniform.step_seconds, min(found.uniform.step_seconds, found.found.step_seconds)


def at_most(program: Program, costs: CostModel) -> tuple[float, float]:
    """Return the same steps if gradients were there when the backward of their block begins."""
    issue: Callable[[gradients._Buckets, float, Layout, bool], None] = gradients._Buckets.issue
    begins: dict[int, float] = {}  # start of the segment before, by queue: a reduction begins where its backward does

    def early(buckets: gradients._Buckets, start: float, what: Layout, once: bool) -> None:
        begins[id(buckets)] = begins[id(buckets)] if once else start
        ready = tuple(replace(own, ready=0.0) for own in what.traffic)
        issue(buckets, begins[id(buckets)], replace(what, traffic=ready), once)

    with patch.object(gradients._Buckets, "issue", early):
        return steps(program, costs)


def row(name: str) -> str:
    """Return the line of a plan."""
    model, degrees = ROWS[name]
    cache = platformdirs.user_cache_dir("autopar")
    plan = open_setting(model, cluster=CLUSTER, cache_dir=cache).predict(degrees).plan
    costs, folded = job_costs(plan.job), open_workload(model, optimizer=plan.job.optimizer).folded(plan.microbatch)
    program = lower(plan, folded, costs)
    first, last = (with_order(program, gradients_first=first) for first in (True, False))
    for changed in (first, last):
        verify_program(changed, folded)
    usual = steps(program, costs)
    cells = [f"{1e3 * seconds:.1f} ms" for seconds in usual]
    for other in (steps(first, costs), steps(last, costs), at_most(program, costs)):
        cells += [f"{100 * (seconds / before - 1):+.2f} %" for seconds, before in zip(other, usual, strict=True)]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the page, or one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ROWS), help="print this row")
    args = parser.parse_args()
    if args.only:
        sys.stdout.write(row(args.only) + "\n")
        return
    lines = [
        "# Orders of the ops of a block",
        "",
        f"Printed by `python docs/benchmarks/op_order.py`; 32 {CLUSTER}, 4 samples per device and microbatch.",
        *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(),
        "",
        "| plan | step | with cuts | gradients first | with cuts | gradients last | with cuts | at most | with cuts |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(row, ROWS),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

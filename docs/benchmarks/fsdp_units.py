"""What better units of FSDP than one per block would bring: which blocks share a gather of their parameters.

    python docs/benchmarks/fsdp_units.py                  the page
    python docs/benchmarks/fsdp_units.py --only gpt2      some rows

A unit is gathered by one all-gather, while the unit before it computes (FSDP prefetches one unit). With g the seconds
of gathers and c those of compute, a pass through units 1 to k takes

    g_1 + max(c_1, g_2) + ... + max(c_{k-1}, g_k) + c_k

The best contiguous units of n blocks come from a dynamic program over the first block of the last two units, O(n^3):
exact for any law of the all-gather. Memory is not limited, which favours large units. `check` holds it against all
2^(n - 1) cuts.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from operator import add
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fusion import CLUSTERS, MODELS  # noqa: E402
from fusion_models import BUILDERS, build  # noqa: E402

from autopar.cost import CostModel  # noqa: E402
from autopar.degrees import Degrees  # noqa: E402
from autopar.prediction import open_setting  # noqa: E402
from autopar.program.lower import lower  # noqa: E402
from autopar.program.records import Collective, Program, Segment, SegmentPhase  # noqa: E402
from autopar.simulate import simulate  # noqa: E402
from autopar.simulate.layout import lay_out  # noqa: E402
from autopar.task import job_costs  # noqa: E402
from autopar.units import format_seconds  # noqa: E402
from autopar.workload import open_workload  # noqa: E402

Law = Callable[[float], float]
LARGE = {"H100, 64 × 8": (512, "h100")}
"""A cluster on which gathers of small models are all latency."""
COLUMNS = (
    "model", "cluster", "step", "simulated", "a unit per block", "best units", "units, of blocks",
    "best over blocks",
)  # fmt: skip
HEAD = """\
# Units of FSDP

Printed by `python docs/benchmarks/fsdp_units.py`; it needs no GPU.
ZeRO-3 in float32 over all devices, one microbatch, the models and clusters of [fusion](fusion.md) and GPT-2 and a ViT
on 512 H100. All is computed by the cost model, nothing is measured.

*step* and *simulated*: by the simulator, a step and what collectives add to its forward and backward; the parameters
of a block are gathered together, beside the compute of their own block. All are gathers of parameters but for the
Reformer, which exchanges chunks, and the encoder-decoder, which gathers what the encoder made. *a unit per block*: what
gathers of parameters add if those of a block run while the block before computes, as PyTorch's FSDP has it. *best
units*: with the best contiguous units of blocks, found exactly, whatever they hold in memory. *best over blocks*: what
that saves, as a share of the step.

Units larger than a block save 0.03 % of a step or less of the ViT, the Reformer and the LSTM on the three clusters.
They pay where one block has most of the parameters, so that its gather needs the compute of several blocks before it:
VGG19 12 to 16 % or 8 %, ResNet-50 up to 7 %, the encoder-decoder, GPT-2 and BERT 0 to 2 %, whose heads read the table
of tokens. They also pay where gathers are all latency: 1.0 and 1.7 % of steps of less than 0.1 s on 512 devices.

Such blocks are also where the simulator is off: it takes the compute of a block for that of the one before, and a head
computes more than a layer. Of GPT-2 on cluster C that makes 14 % of a step. FSDP itself keeps a tied table from the
embedding to the head, as part of its root unit, which neither column counts.
"""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass through the blocks of a model in the order in which it runs them.

    Attributes:
        compute: Seconds of each block.
        nbytes: Bytes of the parameters that it gathers.
        simulated: Seconds that collectives add by the simulator, which gathers each block beside its own compute.
    """

    compute: tuple[float, ...]
    nbytes: tuple[float, ...]
    simulated: float


def exposed(own: Pass, law: Law, ends: Sequence[int]) -> float:
    """Return what gathers add to a pass with some units; `ends` are one past the last block of each."""
    parts = list(pairwise((0, *ends)))
    gathers = [_gather(sum(own.nbytes[begin:end]), law) for begin, end in parts]
    compute = [sum(own.compute[begin:end]) for begin, end in parts]
    hidden = zip(compute, gathers[1:], strict=False)
    return gathers[0] + sum(max(0.0, later - before) for before, later in hidden)


def _gather(nbytes: float, law: Law) -> float:
    return law(nbytes) if nbytes else 0.0


def best_units(own: Pass, law: Law) -> tuple[int, ...]:
    """Return the ends of the units with which gathers add least to a pass."""
    count = len(own.compute)
    spent, held = (np.concatenate([[0.0], np.cumsum(values)]) for values in (own.compute, own.nbytes))
    gather = np.array([[_gather(held[end] - held[begin], law) for end in range(count + 1)] for begin in range(count)])
    best = np.full((count, count + 1), np.inf)  # of blocks before `end`, whose last unit starts at `begin`
    before = np.full((count, count + 1), -1)
    for end in range(1, count + 1):
        best[0, end] = gather[0, end]
        for begin in range(1, end):
            first = np.arange(begin)
            values = best[first, begin] + np.maximum(0.0, gather[begin, end] - (spent[begin] - spent[first]))
            before[begin, end] = int(np.argmin(values))
            best[begin, end] = values[before[begin, end]]
    ends, begin = [count], int(np.argmin(best[:, count]))
    while begin:
        begin, last = int(before[begin, ends[-1]]), begin
        ends.append(last)
    return tuple(reversed(ends))


def check(cases: int = 200) -> None:
    """Hold the dynamic program against all cuts of drawn passes."""
    draw = random.Random(0)
    for _ in range(cases):
        count = draw.randint(1, 8)
        drawn = Pass(
            tuple(draw.random() for _ in range(count)),
            tuple(draw.choice((0.0, draw.random())) for _ in range(count)),
            0,
        )
        law = partial(add, draw.random())
        every = ((*inner, count) for number in range(count) for inner in combinations(range(1, count), number))
        least = min(exposed(drawn, law, ends) for ends in every)
        found = exposed(drawn, law, best_units(drawn, law))
        if abs(found - least) > 1e-9:
            raise SystemExit(f"{found} is not the least of all cuts, {least}: {drawn}")


def _gathers(segment: Segment) -> list[Collective]:
    """Return the collectives of a segment that gather parameters."""
    return [own for own in segment.instructions if isinstance(own, Collective) and own.unit]


def passes(program: Program, costs: CostModel) -> tuple[list[Pass], Law]:
    """Return forward and backward of a program of one stage, and the seconds of their gathers by bytes."""
    table, (stage,) = program.table(), program.stages
    found, every = [], []
    for phase, blocks in ((SegmentPhase.FORWARD, stage.blocks), (SegmentPhase.BACKWARD, stage.blocks[::-1])):
        layouts = {kind: lay_out(table[kind, phase], costs) for kind in dict.fromkeys(blocks)}
        gathers = {kind: _gathers(table[kind, phase]) for kind in layouts}
        every += [own for kind in layouts for own in gathers[kind]]
        found.append(
            Pass(
                tuple(layouts[kind].compute_seconds + layouts[kind].host_seconds for kind in blocks),
                tuple(sum(own.bytes for own in gathers[kind]) for kind in blocks),
                sum(layouts[kind].collective_seconds for kind in blocks),
            )
        )
    kind, axis = every[0].kind, every[0].axis
    return found, lambda nbytes: float(costs.collective_seconds(kind, nbytes, axis))


def row(model: str, cluster: str) -> str:
    """Return the line of a model on a cluster."""
    gpus, preset = {**CLUSTERS, **LARGE}[cluster]
    samples = MODELS[model]
    degrees = Degrees(dp=gpus, zero=3, microbatch=samples, global_batch=samples * gpus)
    with tempfile.TemporaryDirectory() as folder:
        name = str(build(model, Path(folder))) if model in BUILDERS else f"zoo:{model}"
        plan = open_setting(name, cluster=preset, stack="ideal", precision="fp32").predict(degrees).plan
        costs = job_costs(plan.job)
        program = lower(plan, open_workload(name, optimizer=plan.job.optimizer).folded(plan.microbatch), costs)
    step = simulate(program, costs).step_seconds
    found, law = passes(program, costs)
    blocks = [exposed(own, law, range(1, len(own.compute) + 1)) for own in found]
    units = [best_units(own, law) for own in found]
    best = [exposed(own, law, ends) for own, ends in zip(found, units, strict=True)]
    cells = (
        model,
        cluster,
        format_seconds(step),
        format_seconds(sum(own.simulated for own in found)),
        format_seconds(sum(blocks)),
        format_seconds(sum(best)),
        f"{' and '.join(str(len(ends)) for ends in units)}, of {len(found[0].compute)}",
        f"{100 * (sum(blocks) - sum(best)) / step:.3f} %",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the page, or some rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="print the rows of these models")
    args = parser.parse_args()
    check()
    if not args.only:
        rule = "|" + "---|" * len(COLUMNS)
        sys.stdout.write(f"{HEAD}\n| {' | '.join(COLUMNS)} |\n{rule}\n")
    for model in args.only or MODELS:
        for cluster in (*CLUSTERS, *(LARGE if model in ("gpt2", "vit-b16") else ())):
            sys.stdout.write(row(model, cluster) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Compare fusion of ops and gradients with what frameworks and DisCo's algorithm do, and print a page.

    python docs/benchmarks/fusion.py > docs/benchmarks/fusion.md      all of it
    python docs/benchmarks/fusion.py steps resnet50 gpt2              the first table, of some models
    python docs/benchmarks/fusion.py parts gpt2                       what each part brings
    python docs/benchmarks/fusion.py optimum gpt2                     kernels beside those of CP-SAT

The models are those of DisCo (Yi et al., TPDS 2022) and two of today, on its two clusters and a third one.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import fusion_disco  # noqa: E402
from fusion_models import BUILDERS, build  # noqa: E402
from usage import show_usage  # noqa: E402

from autopar.cluster import load_cluster  # noqa: E402
from autopar.cost import CostModel, Stack, load_policy, resolve_stack  # noqa: E402
from autopar.degrees import Degrees  # noqa: E402
from autopar.folding.fold import Folded  # noqa: E402
from autopar.fusion import OpSearch, fuse_jointly  # noqa: E402
from autopar.fusion.buckets import BucketTimer, StageCuts  # noqa: E402
from autopar.fusion.exact_ops import best_kernels  # noqa: E402
from autopar.fusion.ops import PHASES, segment_fusion  # noqa: E402
from autopar.fusion.rules import MIB, RULES, SizeRule, rule_cuts  # noqa: E402
from autopar.fusion.segment_kernels import SegmentKernels  # noqa: E402
from autopar.plan import Plan  # noqa: E402
from autopar.prediction import Predictor  # noqa: E402
from autopar.program.lower import lower  # noqa: E402
from autopar.program.records import Program  # noqa: E402
from autopar.simulate import simulate  # noqa: E402
from autopar.task import job_machine  # noqa: E402
from autopar.units import format_seconds  # noqa: E402
from autopar.workload import Workload, open_workload  # noqa: E402

Case = tuple[Plan, Program, Folded, CostModel]

CLUSTERS = {
    "A: 6 × 2 GTX 1080 Ti": (12, "gtx1080ti"),
    "B: 8 × 8 T4": (64, "t4"),
    "C: 4 × 8 V100, 25 Gb/s": (32, "v100-aws"),
}
"""Devices and preset; the third one is a cluster on which communication binds."""
MODELS = {
    "vgg19": 16,
    "resnet50": 32,
    "transformer": 4,
    "rnnlm": 32,
    "bert-base": 8,
    "reformer": 4,
    "gpt2": 4,
    "vit-b16": 32,
}
"""Samples per device and step, by hand: about as many as fit into 11 GB."""
ABLATED = ("B: 8 × 8 T4", "C: 4 × 8 V100, 25 Gb/s")
ABLATED_MODELS = ("bert-base", "gpt2", "transformer")

HEAD = """\
# Fusion: buckets of gradients, and ops

Printed by `python docs/benchmarks/fusion.py`; it needs no GPU.
Data parallelism in float32, one microbatch, as in DisCo (Yi et al., TPDS 2022): its six models (the encoder-decoder has
the sizes of T5-base, the LSTM language model those of Zaremba et al. 2014, the Reformer is one without sorting by
hash), GPT-2 and a ViT, on its two clusters (presets `gtx1080ti` and `t4`, from data sheets, 100 Gb/s Ethernet per
node) and on the preset `v100-aws`; kernels of a compiled stack without calibration (`--stack ideal`) by the analytic
cost. All steps are simulated, none is measured.

*none*: no op fused, every gradient alone. *ops*: chains of element-wise ops, which the stack fuses by a fixed rule,
every gradient alone. *tensors*: no op fused, buckets of 30 MiB (XLA's threshold in DisCo's comparison). *default*: both
of these. *DDP*: chains, buckets of 25 MiB, the first one of 1 MiB. *DisCo*: the paper's algorithm 1 from the unfused
graph (alpha 1.05, beta 10, seed 0), its result in our simulator. *ours*: `autopar fuse --fusion joint`. *bound*: full
overlap of ours, max(compute, communication). *gain*: over the best of the baselines, DisCo among them. *closed*: share
of what the best baseline leaves to the bound that ours saves. *overlap*: compute plus communication over the step.
*found in*: processor seconds of DisCo's search and of ours, with both cuts of gradients.
"""

COLUMNS = (
    "model", "cluster", "gradients", "none", "ops", "tensors", "default", "DDP", "DisCo", "ours", "bound", "gain",
    "closed", "overlap", "found in",
)  # fmt: skip

OPS_HEAD = """\

## What each part brings

The step with one thing changed in our search. *uniform*: the stack's rule for ops and gradients. *buckets*: gradients
cut, ops as the stack fuses them. *ops*: ops fused, the uniform rule for gradients. *once*: joint without duplication.
The others are joint with another alpha or beta; *states* are those that the usual search priced.
"""
OPS_COLUMNS = (
    "model", "cluster", "uniform", "buckets", "ops", "joint", "once", "alpha 1", "alpha 1.1", "beta 1", "beta 30",
    "states",
)  # fmt: skip

ORACLE_HEAD = """\

## How far from the optimum

Kernels of single segments of blocks (forward or backward of a kind of block) beside the optimum of CP-SAT over all
lawful kernels of up to 8 ops without duplication. *alone*: every op a kernel. *gap*: of our search without duplication
to the bound of CP-SAT; below 0 where our kernels have more than 8 ops. Segments in which no ops can share a kernel are
left out.
"""
ORACLE_COLUMNS = ("model", "segment", "ops", "alone", "stack", "ours", "with duplication", "optimum", "gap", "kernels")


def workload_of(model: str) -> Workload:
    """Return a model of the zoo or of `fusion_models`."""
    if model not in BUILDERS:
        return open_workload(f"zoo:{model}")
    return open_workload(str(build(model, Path(tempfile.gettempdir()))))


def posed(model: str, cluster: str, stack: Stack | None = None) -> Case:
    """Return the data-parallel plan of a model on a cluster, its program, its graph, and its costs."""
    samples = MODELS[model]
    gpus, preset = CLUSTERS[cluster]
    given = load_cluster(preset)
    machine, software = job_machine(gpus, given), stack or resolve_stack("ideal", given)
    policy = load_policy("fp32")
    degrees = Degrees(dp=gpus, microbatch=samples, global_batch=gpus * samples)
    predictor = Predictor(workload_of(model), verify=False)
    program, plan = predictor.lowered(predictor.settled(degrees), machine, software, policy=policy)
    return plan, program, predictor.workload.folded(degrees.samples), CostModel(machine, policy, software)


def by_rule(timer: BucketTimer, rule: SizeRule) -> float:
    """Return the step with buckets of a rule."""
    return timer.time(rule_cuts(timer, rule)).step_seconds


def overlap_of(timer: BucketTimer, cuts: Sequence[StageCuts]) -> float:
    """Return compute plus communication over the step."""
    sim = timer.run(timer.traffic(cuts))
    busy = sum(end - start for start, end in sim.times[0])
    return (sim.runs[0][-1].end - sim.begins[0] + busy) / sim.step


def row(model: str, cluster: str) -> str:
    """Return the line of the table of a model on a cluster."""
    plan, program, folded, costs = posed(model, cluster)
    _, bare, _, unfused = posed(model, cluster, replace(costs.stack, fusion="none"))
    timer, single = BucketTimer(program, costs), BucketTimer(bare, unfused)
    alone, thirty = SizeRule(0.0), SizeRule(30 * MIB)
    began = time.process_time()
    theirs = fusion_disco.search(program, costs, len(folded.kinds))
    searched = time.process_time() - began
    disco = simulate(lower(replace(plan, fusion=theirs.fusion), folded, costs), costs).step_seconds
    began = time.process_time()
    joint = fuse_jointly(plan, program, folded, costs)
    found = time.process_time() - began
    fused = BucketTimer(joint.program, costs)
    cuts = tuple(stage.buckets for stage in joint.program.stages)
    others = (by_rule(single, alone), by_rule(timer, alone), by_rule(single, thirty), by_rule(timer, thirty))
    others = (*others, by_rule(timer, RULES["ddp"]), disco)
    ours, bound, best = joint.step_seconds, fused.full_overlap(), min(others)
    left = best - bound
    cells = (
        model,
        cluster,
        joint.buckets.num_gradients,
        *map(format_seconds, (*others, ours, bound)),
        f"{best / ours - 1:.1%}",
        f"{(best - ours) / left:.0%}" if left > 1e-3 * best else "at the bound",
        f"{overlap_of(fused, cuts):.2f}",
        f"{searched:.1f} s, {found:.1f} s",
    )
    return f"| {' | '.join(map(str, cells))} |"


SETTINGS = (
    OpSearch(duplicates=False), OpSearch(alpha=1.0), OpSearch(alpha=1.1), OpSearch(beta=1), OpSearch(beta=30),
)  # fmt: skip
"""What is changed in the search, one thing each."""


def ops_row(model: str, cluster: str) -> str:
    """Return the line of the table of what each part brings."""
    case = posed(model, cluster)
    joint = fuse_jointly(*case)
    changed = [fuse_jointly(*case, search).step_seconds for search in SETTINGS]
    steps = (joint.neither, joint.buckets_only, joint.ops_only, joint.step_seconds, *changed)
    cells = (model, cluster, *map(format_milliseconds, steps), f"{joint.ops.evaluated:,}")
    return f"| {' | '.join(map(str, cells))} |"


def format_milliseconds(seconds: float) -> str:
    """Return milliseconds with digits for small differences."""
    return f"{seconds * 1e3:.2f} ms"


def oracle_rows(model: str) -> list[str]:
    """Return the lines of the table of optima of a model."""
    _, program, folded, costs = posed(model, ABLATED[1])
    lines = []
    for segment in program.segments:
        own = SegmentKernels(segment, costs)
        if segment.phase not in PHASES or not own.pairs():
            continue
        best = best_kernels(segment, costs)
        single, double = (
            segment_fusion(segment, costs, OpSearch(duplicates=duplicates)) for duplicates in (False, True)
        )
        cells = (
            model,
            f"{segment.phase} of kind {segment.kind % len(folded.kinds)}",
            len(own.fusible),
            *(f"{own * 1e6:.1f} us" for own in (own.alone, own.cost(own.start), single, double, best.seconds)),
            f"{round(single / best.bound - 1, 4) + 0.0:.2%}",  # no "-0.00 %"
            f"{best.enumerated:,}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def write_table(head: str, columns: Sequence[str], lines: Iterable[str]) -> None:
    """Print a table line by line, as its lines are known."""
    sys.stdout.write(f"{head}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> None:
    """Print the page, or one table of it."""
    table, names = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if table in ("", "steps"):
        write_table(HEAD, COLUMNS, (row(model, cluster) for model in names or MODELS for cluster in CLUSTERS))
    chosen = names or ABLATED_MODELS
    if table in ("", "parts"):
        write_table(OPS_HEAD, OPS_COLUMNS, (ops_row(model, cluster) for model in chosen for cluster in ABLATED))
    if table in ("", "optimum"):
        write_table(ORACLE_HEAD, ORACLE_COLUMNS, (line for model in chosen for line in oracle_rows(model)))


if __name__ == "__main__":
    show_usage(__doc__)
    main()

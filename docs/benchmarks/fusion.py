"""Compare buckets of gradients that are cut for a plan with those of frameworks, and print a page.

    python docs/benchmarks/fusion.py > docs/benchmarks/fusion.md      all of it
    python docs/benchmarks/fusion.py buckets resnet50 gpt2            the first table, of some models
    python docs/benchmarks/fusion.py ops gpt2                         the second one

The models are those of the zoo that are nearest to the ones of DisCo (Yi et al., TPDS 2022), on its two clusters.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from usage import show_usage  # noqa: E402

from autopar.cluster import Cluster, Device, Link, load_cluster  # noqa: E402
from autopar.cluster.networks import nics  # noqa: E402
from autopar.cost import CostModel, load_policy, resolve_stack  # noqa: E402
from autopar.degrees import Degrees  # noqa: E402
from autopar.folding.fold import Folded  # noqa: E402
from autopar.fusion import compare, fuse_jointly  # noqa: E402
from autopar.plan import Plan  # noqa: E402
from autopar.prediction import Predictor  # noqa: E402
from autopar.program.records import Program  # noqa: E402
from autopar.task import job_machine  # noqa: E402
from autopar.units import format_seconds  # noqa: E402
from autopar.workload import open_workload  # noqa: E402

_PCIE3 = Link("PCIe 3.0 x16 through the host", 6e9, 59.1e-6)
"""Hand-set: half of what `networks.PCIE4_HOST` has, its latency."""

_GTX1080TI = Device(
    name="GTX-1080Ti-11GB",
    peaks=(("single", 11.34e12),),  # NVIDIA GeForce GTX 1080 Ti data sheet; no tensor cores
    memory=11e9,
    memory_bandwidth=484e9,
    launch=4.2e-6,  # hand-set to the V100's
    gemm_efficiency=0.7,  # hand-set to the V100's
    attention_efficiency=0.3,  # hand-set to the V100's
    bandwidth_efficiency=0.85,  # hand-set, as other presets
    num_sms=28,
)
_T4 = Device(
    name="T4-16GB",
    peaks=(("single", 8.1e12), ("half", 65e12)),  # NVIDIA T4 data sheet
    memory=16e9,
    memory_bandwidth=320e9,
    launch=4.2e-6,
    gemm_efficiency=0.6,  # hand-set to the L4's, of as little power
    attention_efficiency=0.3,
    bandwidth_efficiency=0.85,
    num_sms=40,
)
CLUSTERS = {
    "A: 6 × 2 GTX 1080 Ti": (12, Cluster("disco-a", _GTX1080TI, 2, _PCIE3, nics("Ethernet", 1, 100, 2))),
    "B: 8 × 8 T4": (64, Cluster("disco-b", _T4, 8, _PCIE3, nics("Ethernet", 1, 100, 8))),
    "C: 4 × 8 V100, 25 Gb/s": (32, load_cluster("v100-aws")),
}
"""Devices, and the cluster; the third one is a preset on which communication binds."""
MODELS = {
    "resnet50": 32,
    "wide-resnet50-2": 16,
    "bert-base": 8,
    "bert-large": 4,
    "gpt2": 4,
    "gpt2-medium": 2,
    "vit-b16": 32,
    "vit-l16": 16,
}
"""Samples per device and step, by hand: about as many as fit into 11 GB."""

HEAD = """\
# Fusion: buckets of gradients, and ops

Printed by `python docs/benchmarks/fusion.py`; it needs no GPU.
Data parallelism in float32, one microbatch, as in DisCo (Yi et al., TPDS 2022), on its two clusters (constants from
data sheets, 100 Gb/s Ethernet per node, PCIe 3.0 within one) and on the preset `v100-aws`; kernels of a compiled stack
without calibration (`--stack ideal`). All steps are simulated, none is measured.

*alone*: every gradient travels alone. *30 MiB*: the threshold of XLA in DisCo's comparison. *DDP*: 25 MiB, the first
bucket 1 MiB. *uniform*: the simulator's rule without cuts, 25 MB or 2 MB per device. *one size*: the best of 24 sizes
for this row. *ours*: cut for the plan (`autopar fuse`). *bound*: full overlap, max(compute, communication), that no
buckets are below. *gain*: over the best of *alone*, *30 MiB*, *DDP* and *uniform*. *closed*: share of what the best of
all others, *one size* included, leaves to the bound that ours saves.

Each row has one collective on one axis, for which cuts are exact: no other contiguous buckets make a shorter step in
the simulator. What is left to the bound is traffic of gradients that come last (embeddings, first layers), which no
cuts bring forward.
"""

COLUMNS = (
    "model", "cluster", "gradients", "alone", "30 MiB", "DDP", "uniform", "one size", "ours", "bound", "gain",
    "closed", "buckets", "found in",
)  # fmt: skip


def posed(model: str, cluster: str) -> tuple[Plan, Program, Folded, CostModel]:
    """Return the data-parallel plan of a model on a cluster, its program, its graph, and its costs."""
    samples = MODELS[model]
    gpus, given = CLUSTERS[cluster]
    machine, stack = job_machine(gpus, given), resolve_stack("ideal", given)
    policy = load_policy("fp32")
    degrees = Degrees(dp=gpus, microbatch=samples, global_batch=gpus * samples)
    predictor = Predictor(open_workload(f"zoo:{model}"), verify=False)
    program, plan = predictor.lowered(predictor.settled(degrees), machine, stack, policy=policy)
    return plan, program, predictor.workload.folded(degrees.samples), CostModel(machine, policy, stack)


def row(model: str, cluster: str) -> str:
    """Return the line of the table of a model on a cluster."""
    _, program, _, costs = posed(model, cluster)
    result = compare(program, costs)
    alone, ddp, xla, uniform, _, size = (way.timed.step_seconds for way in result.ways)
    ours, bound = result.found.found, result.found.bound
    cells = (
        model,
        cluster,
        result.found.num_gradients,
        *map(format_seconds, (alone, xla, ddp, uniform, size, ours.step_seconds, bound)),
        f"{min(alone, xla, ddp, uniform) / ours.step_seconds - 1:.1%}",
        f"{result.closed:.0%}",
        ours.num_buckets,
        format_seconds(result.seconds),
    )
    return f"| {' | '.join(map(str, cells))} |"


OPS_HEAD = """\

## Fused ops

`autopar fuse --fusion joint` on some of these rows: kernels of several ops by the analytic cost, alpha 1.05, beta 10,
seed 0. *stack*: chains of element-wise ops, which the stack fuses by a fixed rule, and uniform buckets.
*kernels*: those of several ops that were found. *states*: priced by the search. *took*: with both cuts of gradients, on
a core that others used, too.
"""
OPS_COLUMNS = (
    "model",
    "cluster",
    "stack",
    "buckets cut",
    "ops fused",
    "both",
    "gain",
    "kernels",
    "states",
    "took",
)


def ops_row(model: str, cluster: str) -> str:
    """Return the line of the table of fused ops."""
    case = posed(model, cluster)
    began = time.perf_counter()
    joint = fuse_jointly(*case)
    seconds = time.perf_counter() - began
    cells = (
        model,
        cluster,
        *map(format_seconds, (joint.neither, joint.buckets_only, joint.ops_only, joint.both)),
        f"{joint.neither / joint.step_seconds - 1:.1%}",
        len(joint.ops.groups),
        f"{joint.ops.evaluated:,}",
        format_seconds(seconds),
    )
    return f"| {' | '.join(map(str, cells))} |"


def write_table(head: str, columns: Sequence[str], line: Callable[[str, str], str], models: Sequence[str]) -> None:
    """Print a table with a line per model and cluster."""
    sys.stdout.write(f"{head}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    for model in models:
        for cluster in CLUSTERS:
            sys.stdout.write(f"{line(model, cluster)}\n")
            sys.stdout.flush()


def main() -> None:
    """Print the page, or one table of it."""
    table, names = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if table in ("", "buckets"):
        write_table(HEAD, COLUMNS, row, names or list(MODELS))
    if table in ("", "ops"):
        write_table(OPS_HEAD, OPS_COLUMNS, ops_row, names or list(MODELS))


if __name__ == "__main__":
    show_usage(__doc__)
    main()

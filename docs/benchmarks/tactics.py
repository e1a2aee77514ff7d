"""How long tactics take: python docs/benchmarks/tactics.py speed, or: ... automatic [TIME_LIMIT]."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from usage import show_usage

from autopar.cluster.presets import PRESETS
from autopar.cost import CostModel
from autopar.discover import discover
from autopar.folding.fold import fold
from autopar.formulate.manual_recipes import batch_dims
from autopar.models.builder import Builder
from autopar.partitioning import partition_steps
from autopar.plan import Job, ModelInfo
from autopar.sharding import Mesh
from autopar.tactics import Automatic, DataParallel, Megatron, Recompute, SequenceParallel, Shard, Tactic, ZeRO
from autopar.tactics.count import traffic
from autopar.tactics.draft import Draft
from autopar.tactics.write import Writer
from autopar.task import rules_for
from autopar.units import format_bytes
from autopar.workload import Workload

COSTS = CostModel(PRESETS["a100"])
INFO = ModelInfo("small", "small", "", 1)
SCHEDULE = (DataParallel("b"), Megatron("m"), ZeRO(2, "b"), ZeRO(3, "b"), Shard({"embed": 1}, "m"))


def write(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def small_ops(num_layers: int, hidden: int = 1024, heads: int = 16, seq: int = 64, vocab: int = 4096) -> Workload:
    """Return the training step of a decoder written in small ops: norms, softmax and GELU as arithmetic."""
    g = Builder(f"small{num_layers}")
    size = hidden // heads
    tokens = g.input("tokens", ("batch", seq), "int64")
    embedding = g.parameter("embed", (vocab, hidden))
    half, one, cubic, root = (
        g.buffer(name, (), f"constant {value}")
        for name, value in (("half", 0.5), ("one", 1.0), ("cubic", 0.044715), ("root", 0.7978845608))
    )
    scale = g.buffer("scale", (), f"constant {size**-0.5}")
    mask = g.buffer("mask", (seq, seq), "constant 0")
    last = g.constant((-1,))

    def linear(x: str, name: str, num_in: int, num_out: int) -> str:
        product = g.op("MatMul", x, g.parameter(f"{name}.weight", (num_in, num_out)), name=f"{name}.product")
        return g.op("Add", product, g.parameter(f"{name}.bias", (num_out,)), name=name)

    def norm(x: str, name: str) -> str:
        mean = g.op("ReduceMean", x, last, name=f"{name}.mean", keepdims=1)
        centred = g.op("Sub", x, mean, name=f"{name}.centred")
        square = g.op("Mul", centred, centred, name=f"{name}.square")
        variance = g.op("ReduceMean", square, last, name=f"{name}.variance", keepdims=1)
        deviation = g.op("Sqrt", variance, name=f"{name}.deviation")
        normed = g.op("Div", centred, deviation, name=f"{name}.normed")
        scaled = g.op("Mul", normed, g.parameter(f"{name}.weight", (hidden,)), name=f"{name}.scaled")
        return g.op("Add", scaled, g.parameter(f"{name}.bias", (hidden,)), name=name)

    def heads_of(x: str, name: str, perm: Sequence[int]) -> str:
        parts = g.op("Reshape", x, g.constant((0, seq, heads, size)), name=f"{name}.parts")
        return g.op("Transpose", parts, name=f"{name}.heads", perm=perm)

    x = g.op("Gather", embedding, tokens, name="embedded", axis=0)
    for index in range(num_layers):
        name = f"layers.{index}"
        normed = norm(x, f"{name}.norm1")
        q, k, v = (linear(normed, f"{name}.{part}", hidden, hidden) for part in "qkv")
        columns = heads_of(k, f"{name}.k", (0, 2, 3, 1))
        scores = g.op("MatMul", heads_of(q, f"{name}.q", (0, 2, 1, 3)), columns, name=f"{name}.scores")
        scaled = g.op("Mul", scores, scale, name=f"{name}.scaled")
        masked = g.op("Add", scaled, mask, name=f"{name}.masked")
        highest = g.op("ReduceMax", masked, last, name=f"{name}.highest", keepdims=1)
        power = g.op("Exp", g.op("Sub", masked, highest, name=f"{name}.below"), name=f"{name}.power")
        total = g.op("ReduceSum", power, last, name=f"{name}.total", keepdims=1)
        weights = g.op("Div", power, total, name=f"{name}.weights")
        attended = g.op("MatMul", weights, heads_of(v, f"{name}.v", (0, 2, 1, 3)), name=f"{name}.attended")
        together = g.op("Transpose", attended, name=f"{name}.together", perm=(0, 2, 1, 3))
        merged = g.op("Reshape", together, g.constant((0, seq, hidden)), name=f"{name}.merged")
        x = g.op("Add", x, linear(merged, f"{name}.out", hidden, hidden), name=f"{name}.middle")
        up = linear(norm(x, f"{name}.norm2"), f"{name}.up", hidden, 4 * hidden)
        square = g.op("Mul", up, up, name=f"{name}.square")
        cube = g.op("Mul", g.op("Mul", square, up, name=f"{name}.cube"), cubic, name=f"{name}.cubic")
        inner = g.op("Mul", g.op("Add", up, cube, name=f"{name}.inner"), root, name=f"{name}.rooted")
        gate = g.op("Add", g.op("Tanh", inner, name=f"{name}.tanh"), one, name=f"{name}.gate")
        halved = g.op("Mul", g.op("Mul", up, half, name=f"{name}.halved"), gate, name=f"{name}.gelu")
        x = g.op("Add", x, linear(halved, f"{name}.down", 4 * hidden, hidden), name=f"{name}.end")
    head = g.op("Transpose", embedding, name="head", perm=(1, 0))
    g.op("MatMul", x, head, name="logits")
    return Workload(g.name, g.model({"logits": ("batch", seq, vocab)}), "train", {}, "auto", "adam")


def speed(layers: Sequence[int], repeats: int = 5) -> None:
    """Print the seconds of every part, by the number of layers; the least of some repeats."""
    mesh, cache = Mesh.of(b=16, m=2), Path(tempfile.mkdtemp())
    write("| layers | ops | fold | rules | five tactics | collectives | written down | together | us per op |")
    write("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for count in layers:
        workload = small_ops(count)
        graph, found = workload.graph(16), discover(workload.probe, cache_dir=cache)
        rows = []
        for _ in range(repeats):
            clock = [time.process_time()]
            folded = fold(graph)
            clock.append(time.process_time())
            rules = rules_for(folded, found)
            clock.append(time.process_time())
            dims = batch_dims(graph.values, workload.probe.values)
            job = Job("train", mesh.size, 16, 75e9, COSTS.cluster.to_dict())
            draft = Draft(
                folded, rules, mesh, COSTS, model=INFO, job=job, batch=dims, num_microbatches=1
            )  # fmt: skip
            for tactic in SCHEDULE:
                draft.decide(tactic)
            clock.append(time.process_time())
            writer = Writer(draft.state)
            traffic(writer, COSTS.policy)
            clock.append(time.process_time())
            draft.plan()
            clock.append(time.process_time())
            rows.append([end - start for start, end in pairwise(clock)])
        parts = [min(column) for column in zip(*rows, strict=True)]
        total, ops = sum(parts), len(graph.ops)
        cells = " | ".join(f"{part:.3f}" for part in parts)
        write(f"| {count} | {ops:,} | {cells} | {total:.3f} | {1e6 * total / ops:.0f} |")


MODELS = {
    "T32": {"num_layers": 32, "hidden": 3584, "heads": 28, "seq": 2048, "vocab": 32768},
    "T48": {"num_layers": 48, "hidden": 7168, "heads": 56, "seq": 2048, "vocab": 32768},
}
"""Decoders of about 5 and 30 billion parameters, the sizes of PartIR's."""


def by_hand(batch: str, tensor: str) -> dict[str, tuple[Tactic, ...]]:
    """Return the schedules people write by hand on two axes."""
    found: dict[str, tuple[Tactic, ...]] = {}
    for data in ((batch,), (batch, tensor)):
        for stage in range(4):
            schedule: list[Tactic] = [DataParallel(axis) for axis in data]
            name = f"data {'+'.join(data)}"
            zero = [ZeRO(stage, axis) for axis in data] if stage else []
            name_zero = f", zero {stage}" if stage else ""
            found[name + name_zero] = (*schedule, *zero)
            if len(data) == 1:
                for words, more in (
                    ("", (Megatron(tensor),)),
                    (" vocabulary", (Megatron(tensor, vocabulary=True),)),
                    (" sequence", (Megatron(tensor), SequenceParallel(tensor))),
                    (" vocabulary sequence", (Megatron(tensor, vocabulary=True), SequenceParallel(tensor))),
                ):
                    found[f"{name}, megatron{words}{name_zero}"] = (*schedule, *more, *zero)
    return found


@dataclass(frozen=True)
class Run:
    """What a schedule came to: bytes too many on a device, seconds of a step, seconds it took to find out."""

    excess: float
    seconds: float
    wall: float

    def __str__(self) -> str:
        kind = f", {format_bytes(self.excess)} too many" if self.excess else ""
        return f"{1e3 * self.seconds:.1f} ms{kind}"


def run(name: str, mesh: str, batch: int, schedule: Sequence[Tactic], cache: Path) -> Run:
    """Return what a schedule comes to with all layers recomputed."""
    start = time.perf_counter()
    found = partition_steps(
        "zoo:gpt2", mesh, (Recompute(), *schedule),
        cluster="a100", dims=MODELS[name], global_batch=batch, cache_dir=cache,
    )  # fmt: skip
    excess = max(0.0, found.timeline.peak_bytes - found.plan.job.memory_limit)
    return Run(excess, found.timeline.step_seconds, time.perf_counter() - start)


def automatic(time_limit: float) -> None:
    """Print the best schedule by hand, what the solver finds alone, and what the tree search does."""
    cache = Path(tempfile.mkdtemp())
    write("| model | mesh | best by hand | step | solver alone | in | tree search | in |")
    write("|---|---|---|--:|--:|--:|--:|--:|")
    for name, mesh, batch in product(MODELS, ("b=16,m=2", "b=32,m=4"), (128,)):
        manual = {words: run(name, mesh, batch, schedule, cache) for words, schedule in by_hand("b", "m").items()}
        best = min(manual, key=lambda words, manual=manual: (manual[words].excess, manual[words].seconds))
        solved = run(name, mesh, batch, [Automatic(("b", "m"), time_limit=time_limit)], cache)
        searched = run(name, mesh, batch, [Automatic(("b", "m"), method="mcts", time_limit=time_limit)], cache)
        write(
            f"| {name} | {mesh} | {best} | {manual[best]} | {solved} | {solved.wall:.0f} s | {searched} | "
            f"{searched.wall:.0f} s |"
        )


def main(arguments: Sequence[str]) -> None:
    """Run one of the two."""
    if arguments[:1] == ["speed"]:
        speed([4, 8, 16, 32, 48, 64])
    elif arguments[:1] == ["automatic"]:
        automatic(float(arguments[1]) if len(arguments) > 1 else 30.0)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    show_usage(__doc__)
    main(sys.argv[1:])

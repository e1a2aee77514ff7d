"""Train what fused groups of ops take, compare it with other models, and print a page.

    autopar profile --fusion --runtime onnxruntime -o groups     times groups: fused_groups.jsonl
    python docs/benchmarks/fused_kernels.py groups/fused_groups.jsonl ... -o autopar/cost/fused_kernels

Groups of a fifth of the structures are held out: no group of these structures is seen in training. Needs torch; the
comparison with gradient boosting needs scikit-learn, too.
"""

import argparse
import sys
import time
from math import log
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autopar.cost.fused_groups import FusedGroup  # noqa: E402
from autopar.cost.learned_kernels import (  # noqa: E402
    KNOTS,
    NUM_FEATURES,
    LearnedKernels,
    Provenance,
    Range,
    WeightsFile,
    curve,
    encode,
)
from autopar.profile.fused_timing import TimedGroup, load_timed  # noqa: E402

HIDDEN, LAYERS = 16, 2
EPOCHS, RATE, DECAY = 500, 5e-3, 0.05
SEED = 0
NEAR = 0.14
"""DisCo counts groups that are predicted within 14 %."""

Array = np.ndarray[Any, Any]


def split(timed: list[TimedGroup]) -> tuple[list[int], list[int]]:
    """Return the groups of training and those that are held out, by structure."""
    structures = sorted({repr(own.group.structure) for own in timed})
    order = np.random.default_rng(SEED).permutation(len(structures))
    held = {structures[place] for place in order[: len(structures) // 5]}
    outside = [number for number, own in enumerate(timed) if repr(own.group.structure) in held]
    return sorted(set(range(len(timed))) - set(outside)), outside


def train_network(groups: list[FusedGroup], seconds: Array, kinds: dict[str, int]) -> dict[str, Array]:
    """Return the weights of the network of `learned_kernels`, trained on the logarithm of seconds."""
    import torch

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    batch = encode(groups, kinds)
    kind, group = torch.from_numpy(batch.kinds), torch.from_numpy(batch.group)
    sources, targets = torch.from_numpy(batch.sources), torch.from_numpy(batch.targets)
    features, scale = torch.from_numpy(batch.features), torch.from_numpy(batch.scale)
    inputs, wanted = torch.from_numpy(batch.inputs), torch.from_numpy(np.log(seconds).astype(np.float32))

    def drawn(*shape: int, by: float) -> Any:
        return torch.nn.Parameter(torch.randn(*shape) * by)

    own = {
        "kinds": drawn(len(kinds), HIDDEN, by=0.3),
        "features": drawn(NUM_FEATURES, HIDDEN, by=0.3),
        "out": drawn(HIDDEN, by=0.05),
        "rates": torch.nn.Parameter(torch.full((len(kinds),), log(1e-9))),
        "curve": torch.nn.Parameter(torch.zeros(len(kinds), len(KNOTS))),
        "nodes": torch.nn.Parameter(torch.full((len(kinds),), log(1e-6))),
        "call": torch.nn.Parameter(torch.tensor([log(10e-6), log(1e-6)])),
    }
    for layer in range(LAYERS):
        own |= {f"{name}.{layer}": drawn(HIDDEN, HIDDEN, by=0.1) for name in ("self", "read", "given")}
        own[f"bias.{layer}"] = torch.nn.Parameter(torch.zeros(HIDDEN))
    hats = torch.from_numpy(curve(batch.scale))
    degree = torch.bincount(sources, minlength=len(kind)).clamp(min=1)[:, None]

    def predicted() -> Any:
        hidden = torch.relu(own["kinds"][kind] + features @ own["features"])
        for layer in range(LAYERS):
            read = torch.zeros_like(hidden).index_add(0, targets, hidden[sources])
            given = torch.zeros_like(hidden).index_add(0, sources, hidden[targets]) / degree
            step = hidden @ own[f"self.{layer}"] + read @ own[f"read.{layer}"] + given @ own[f"given.{layer}"]
            hidden = hidden + torch.relu(step + own[f"bias.{layer}"])
        rate = hidden @ own["out"] + own["rates"][kind] + (own["curve"][kind] * hats).sum(1)
        each = torch.exp((rate + scale).clamp(-40, 10)) + torch.exp(own["nodes"][kind])
        call, tensor = torch.exp(own["call"])
        return torch.zeros(len(inputs)).index_add(0, group, each) + call + tensor * inputs

    plain = ("rates", "nodes", "call")
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for name, weight in own.items() if name not in plain], "weight_decay": DECAY},
            {"params": [own[name] for name in plain], "weight_decay": 0.0},
        ],
        lr=RATE,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, EPOCHS, pct_start=0.1)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        off = torch.log(predicted()) - wanted
        torch.nn.functional.huber_loss(off, torch.zeros_like(off), delta=0.1).backward()
        optimizer.step()
        schedule.step()
    return {name: weight.detach().numpy() for name, weight in own.items()}


def fit_roofline(groups: list[FusedGroup], seconds: Array) -> tuple[float, float]:
    """Return launch seconds and bytes/s of the analytic cost that are nearest to the seconds, by their logarithm."""
    nbytes = np.array([own.read_bytes + own.written_bytes for own in groups], float)
    best = (float("inf"), 0.0, 0.0)
    for launch in np.geomspace(1e-6, 1e-3, 31):
        for rate in np.geomspace(1e8, 1e11, 91):
            off = float(np.median(np.abs(np.log(launch + nbytes / rate) - np.log(seconds))))
            best = min(best, (off, float(launch), float(rate)))
    return best[1], best[2]


def flat(groups: list[FusedGroup], kinds: dict[str, int]) -> Array:
    """Return features of whole groups for gradient boosting: elements by kind, bytes, counts."""
    rows = np.zeros((len(groups), len(kinds) + 5))
    for row, own in zip(rows, groups, strict=True):
        for op in own.ops:
            row[kinds[op.kind]] += op.elements / own.elements
        row[-5:] = (
            log(own.elements),
            log(1 + own.read_bytes),
            log(1 + own.written_bytes),
            len(own.ops),
            len(own.inputs),
        )
    return rows


def boosted(groups: list[FusedGroup], seconds: Array, unseen: list[FusedGroup], kinds: dict[str, int]) -> Array | None:
    """Return what gradient boosting makes of unseen groups; None without scikit-learn."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
    except ImportError:
        return None
    model = HistGradientBoostingRegressor(max_iter=600, learning_rate=0.05, random_state=SEED)
    size = np.log([own.elements for own in groups])
    model.fit(flat(groups, kinds), np.log(seconds) - size)
    return np.asarray(np.exp(model.predict(flat(unseen, kinds)) + np.log([own.elements for own in unseen])))


def told(name: str, predicted: Array, seconds: Array) -> str:
    """Return a line of the table of models."""
    off = np.abs(predicted / seconds - 1)
    return f"| {name} | {np.mean(off <= NEAR):.1%} | {np.median(off):.1%} | {np.quantile(off, 0.9):.1%} |"


HEAD = """\
# Kernels of fused groups: learned and analytic costs

Printed by `python docs/benchmarks/fused_kernels.py FILES -o FOLDER`, which trains the weights that autopar comes with.
Groups are drawn from training steps of the zoo, changed and extended at random (`autopar profile --fusion`), and run on
one thread of this machine. Seconds are processor time of that thread, a lower quartile of 8 to 60 calls in two rounds.
No group of a held-out structure (a fifth of all) is seen in training. Aims: 90 % within 14 % (DisCo's figure for its
graph network on a GPU), a median error below 6 %, 20,000 groups a second.

*analytic*: a launch and bytes of what enters and leaves at one bandwidth, both fitted to the training groups. *gradient
boosting*: scikit-learn's, over counts of ops and logarithms of bytes. *second round*: the measurement against itself a
moment later. *timed again*: at another hour, when other processes had the machine; no model can be much better.
"""


def write(line: str) -> None:
    """Print a line of the page."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Train on the groups of some files; print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--again", type=Path, help="some of the groups timed again at another hour")
    parser.add_argument("-o", dest="folder", type=Path, help="write weights there, a file per runtime")
    args = parser.parse_args()
    timed = [own for path in args.files for own in load_timed(path)]
    again = [] if args.again is None else load_timed(args.again)
    write(HEAD.rstrip())
    for runtime in sorted({own.runtime for own in timed}):
        report([own for own in timed if own.runtime == runtime], runtime, args.folder, again)
    return 0


def report(timed: list[TimedGroup], runtime: str, folder: Path | None, again: list[TimedGroup]) -> None:
    """Train on the groups of a runtime and print the comparison."""
    inside, outside = split(timed)
    kinds = {kind: number for number, kind in enumerate(sorted({op.kind for own in timed for op in own.group.ops}))}
    seen, unseen = ([timed[number] for number in chosen] for chosen in (inside, outside))
    groups, seconds = [own.group for own in seen], np.array([own.seconds for own in seen])
    others, measured = [own.group for own in unseen], np.array([own.seconds for own in unseen])
    weights = train_network(groups, seconds, kinds)
    span = Range(
        tuple(kinds),
        min(own.elements for own in groups),
        max(own.elements for own in groups),
        max(len(own.ops) for own in groups),
    )
    noise = np.array([own.first / own.second - 1 for own in timed])
    structures = len({repr(own.group.structure) for own in timed})
    known = {name: np.asarray(rows, np.float32) for name, rows in weights.items()}
    blank = Provenance(timed[0].machine, runtime, timed[0].version, len(timed), structures, len(unseen), 0, 0, 0, "")
    model = LearnedKernels(blank, span, known)
    start = time.process_time()
    batch = encode(others, kinds)
    encoding = time.process_time() - start
    start = time.process_time()
    predicted = model.of_batch(batch)
    network = time.process_time() - start
    write(f"\n## {runtime}\n")
    write(
        f"{len(timed)} groups of {structures} structures on {timed[0].machine}, {runtime} {timed[0].version}; held out"
    )
    write(f"{len(unseen)} groups of {len({repr(own.group.structure) for own in unseen})} structures.")
    write(f"Two rounds of the same measurement differ by {np.median(np.abs(noise)):.1%} (median),")
    write(f"{np.mean(np.abs(noise) <= NEAR):.0%} of them by less than 14 %.")
    write(f"Inference: {len(others) / network:,.0f} groups/s once encoded,")
    write(f"{len(others) / (network + encoding):,.0f} groups/s with encoding (processor time).\n")
    write("| model | within 14 % | median error | 90 % below |")
    write("|---|---|---|---|")
    launch, rate = fit_roofline(groups, seconds)
    nbytes = np.array([own.read_bytes + own.written_bytes for own in others], float)
    write(told(f"analytic: {launch * 1e6:.0f} us + bytes at {rate / 1e9:.1f} GB/s", launch + nbytes / rate, measured))
    trees = boosted(groups, seconds, others, kinds)
    if trees is not None:
        write(told("gradient boosting", trees, measured))
    write(told("graph network", predicted, measured))
    write(
        told(
            "second round of the measurement",
            np.array([own.second for own in unseen]),
            np.array([own.first for own in unseen]),
        )
    )
    before = {own.group: own.seconds for own in timed}
    later = [own for own in again if own.runtime == runtime and own.group in before]
    if later:
        first, second = (
            np.array(own) for own in zip(*((before[own.group], own.seconds) for own in later), strict=True)
        )
        write(told(f"{len(later)} groups timed again at another hour", second, first))
    if folder is not None:
        off = np.abs(predicted / measured - 1)
        provenance = Provenance(
            timed[0].machine,
            runtime,
            timed[0].version,
            len(timed),
            structures,
            len(unseen),
            round(float(np.mean(off <= NEAR)), 4),
            round(float(np.median(off)), 4),
            round(float(np.median(np.abs(noise))), 4),
            "python docs/benchmarks/fused_kernels.py",
        )
        rounded = {name: np.round(rows.astype(float), 5).tolist() for name, rows in weights.items()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{runtime}.json").write_bytes(msgspec.json.encode(WeightsFile(provenance, span, rounded)))


if __name__ == "__main__":
    sys.exit(main())

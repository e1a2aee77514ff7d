"""Plan GPTs on public profile databases in Aceso's form, and hold estimates of plans that were run against their times.

python docs/benchmarks/aceso.py DATABASES [DATA_DIR] > docs/benchmarks/aceso.md

DATABASES is the folder of the two archives, DATA_DIR one whose train.json has the rows `mist_aceso`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from usage import show_usage

from autopar.aceso import Configuration, CostModel, Database, Stage, plan
from autopar.aceso.measured_step import step_seconds
from autopar.aceso.profile_database import MIB
from autopar.aceso.recompute import choose_ops

NODE = 8
USABLE = 7 / 8  # of a device's memory, as in the published searches


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the databases.

    Attributes:
        archive: Name of its archive.
        row: What its name begins with in published rows.
        memory: MiB that nvidia-smi reports.
        published: Milliseconds of Aceso's best plan by its own estimate, after 200 s, by model.
    """

    archive: str
    row: str
    memory: int
    published: dict[str, float]


# Published objectives: Dazz993/Mist d69e530, benchmark/superscaler/results-ref/logs-mist-all-*/aceso/configs
DEVICES = {
    "L4": Device(
        "profiled-time-mist-all-l4.tar.xz", "L4-", 23034,
        {"1.3b": 12873.7, "2.6b": 20064.6, "6.7b": 39791.6, "13b": 77004.6, "22b": 154950.0},
    ),
    "A100-40": Device(
        "profiled-time-mist-all-a100-sxm4-40gb.tar.xz", "A100-SXM4-40", 40960,
        {"1.3b": 10106.3, "2.6b": 14809.3, "6.7b": 20784.9, "13b": 38342.4, "22b": 74648.2},
    ),
}  # fmt: skip
CASES = {"1.3b": (2, 32), "2.6b": (4, 64), "6.7b": (8, 128), "13b": (16, 256), "22b": (32, 512)}
"""Devices and samples of a step by model, as in the published searches."""
MOST_STAGES = 16  # that Aceso searches

HEAD = """\
# Plans on Aceso's profile databases

`python docs/benchmarks/aceso.py DATABASES DATA_DIR` prints this page.

Two public databases of measured ops and collectives in Aceso's form (Dazz993/Mist d69e530: L4 and A100-40, GPT of 1.3B
to 22B), planned by [`autopar aceso`](../commands.md) in Aceso's own cost model, so that objectives compare: memory up
to 7/8 of what nvidia-smi reports, microbatches of 1 to 8 samples as far as they were measured, stages of 1, 2, 4 or 8
devices that no border of a node divides, tensor- and data-parallel degrees per stage, ops that run again one by one.
The cost model reproduces published plans of Aceso's to the last printed digit, in time and in memory (in
`tests/test_aceso.py`); planner and bound are held to trying all plans of small models there.

The bound holds for all such plans with ops sharded as in Megatron-LM and one pair of degrees per stage; Aceso's search
with its default options has no others either. It tries at most 16 stages, we as many as there are devices; with 16 we
find what the last column says. Its 200 s are a budget per number of stages, run side by side. Ours are seconds of one
process that uses one core: by the clock, on a machine with other work, and of the processor. Kernels were compiled.
"""
RUN = """
## Plans that were run

Rows `mist_aceso` of `data/published-2026/train.json` on the two devices: measured steps of plans that Aceso had found,
and what it had estimated. Ours takes the same measured events, adds the gradients of weights, which the databases lack
(the backward of a product takes as long as its forward, so only one of its two products was measured), and lets
transfers block both stages under 1F1B (`autopar/aceso/measured_step.py`). Nothing is fitted to the rows. They do not
say which ops run again; ours are the fastest that fit. The mean error of Aceso's estimates is 17.6 % over all 37 runs
that were published, of which these rows are a part.
"""


def write(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def plans(databases: Path) -> None:
    """Print the table of plans."""
    write("| device | model | GPUs | ours, ms | bound, ms | gap | s | CPU s | Aceso, ms | to Aceso's | 16 stages, ms |")
    write("|" + "---|" * 11)
    for name, device in DEVICES.items():
        database = Database.open(databases / device.archive)
        limit = device.memory * USABLE * MIB
        for model, (devices, samples) in CASES.items():
            costs = CostModel.of(database, f"gpt-{model}", devices=devices, node=NODE, global_batch=samples)
            began = time.process_time()
            found = plan(costs, limit)
            busy = time.process_time() - began
            few = found
            if len(found.configuration.stages) > MOST_STAGES:
                few = plan(costs, limit, most_stages=MOST_STAGES)
            ours, theirs = 1e3 * found.estimate.seconds, device.published[model]
            bound, fewer = 1e3 * found.bound, 1e3 * few.estimate.seconds
            write(
                f"| {name} | GPT {model.upper()} | {devices} | {ours:,.1f} | {bound:,.1f} | {found.gap:.2%} | "
                f"{found.seconds:.1f} | {busy:.1f} | {theirs:,.1f} | {ours / theirs - 1:+.2%} | {fewer:,.1f} |"
            )


def runs(databases: Path, data: Path) -> None:
    """Print how far estimates of plans that were run are from their measured steps."""
    rows = [row for row in json.loads((data / "train.json").read_text()) if row["id"].startswith("mist_aceso")]
    write("\n| row | device | model | GPUs | stages | measured | Aceso | error | ours | error |")
    write("|---|---|---|---|---|---|---|---|---|---|")
    errors, groups = [], {}
    for row in rows:
        known = [each for each in DEVICES.values() if row["gpu"].startswith(each.row)]
        told = row["as_published"]
        if not known or "ops_per_stage" not in told:
            continue
        ours = _ours(databases, known[0], row)
        measured, theirs = row["step_time_s"], told["predicted_by_source_s"]
        errors.append((theirs / measured - 1, ours / measured - 1))
        groups.setdefault((row["gpu"], row["model"], row["n_gpus"]), []).append((measured, theirs, ours))
        write(
            f"| {row['id']} | {row['gpu']} | {row['model']} | {row['n_gpus']} | {len(told['ops_per_stage'])} | "
            f"{measured:.2f} s | {theirs:.2f} s | {errors[-1][0]:+.1%} | {ours:.2f} s | {errors[-1][1]:+.1%} |"
        )
    theirs, ours = (100 * float(np.mean(np.abs(column))) for column in zip(*errors, strict=True))
    write(f"\nMean absolute error over {len(errors)} runs: Aceso {theirs:.1f} %, ours {ours:.1f} %.")
    for place, who in ((1, "Aceso"), (2, "ours")):
        right, pairs = _ranked([group for group in groups.values() if len(group) > 1], place)
        write(f"Pairs of plans of one job in the measured order: {who} {right} of {pairs}.")


def _ranked(groups: Sequence[Sequence[tuple[float, ...]]], place: int) -> tuple[int, int]:
    pairs = [(one, other) for group in groups for i, one in enumerate(group) for other in group[:i]]
    return sum((one[0] < other[0]) == (one[place] < other[place]) for one, other in pairs), len(pairs)


def _ours(databases: Path, device: Device, row: dict[str, Any]) -> float:
    told, first = row["as_published"], 0
    costs = CostModel.of(
        Database.open(databases / device.archive), row["model"].replace(" ", "_"), devices=row["n_gpus"], node=NODE,
        global_batch=row["global_batch"],
    )  # fmt: skip
    stages = []
    for index, (ops, tensor, data) in enumerate(
        zip(told["ops_per_stage"], told["tp_per_stage"], told["dp_per_stage"], strict=True)
    ):
        behind = len(told["ops_per_stage"]) - 1 - index
        stage = Stage(first, ops, tensor[0], data[0], (False,) * ops)
        again = choose_ops(costs, stage, row["micro_batch"], behind, device.memory * USABLE * MIB)
        stages.append(stage if again is None else replace(stage, again=again))
        first += ops
    return step_seconds(costs, Configuration(row["micro_batch"], tuple(stages)))


if __name__ == "__main__":
    show_usage(__doc__)
    folder = Path(sys.argv[1])
    write(HEAD)
    plans(folder)
    if len(sys.argv) > 2:
        write(RUN)
        runs(folder, Path(sys.argv[2]))

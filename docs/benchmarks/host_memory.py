"""State in host memory: `python docs/benchmarks/host_memory.py` prints the page.

What searches find with the kinds of state of `autopar.recompute.STATE_KINDS` in host memory and without all but the
optimizer's, and predictions beside published step times of DeepSpeed.
"""

import sys
import time
from dataclasses import replace

from usage import show_usage

import autopar
from autopar import Degrees
from autopar.errors import InfeasibleError, InterruptedSearchError
from autopar.plan import Plan
from autopar.recompute import STATE_KINDS
from autopar.units import format_bytes, format_seconds

TIME_LIMIT = 20.0
JOBS = (
    ("llama3-8b", 1, "rtx4090", 8),
    ("llama3-8b", 1, "a100", 32),
    ("llama3-70b", 4, "h100", 32),
    ("llama3-70b", 8, "h100", 64),
)
"""Model, GPUs, cluster, global batch."""
OTHERS = [str(own) for own in STATE_KINDS if own != "optimizer"]
PREDICTED = (
    ("llama3-8b", "a100", Degrees(recompute="full", global_batch=32)),
    ("llama3-70b", "h100", Degrees(dp=8, zero=3, recompute="full", global_batch=64)),
)
"""Model, cluster, plan: with each kind of state in host memory."""
PUBLISHED = (
    (2, 1, "", 4.19),
    (2, 1, "gradients", 1.81),
    (3, 2, "", 4.45),
    (3, 2, "gradients", 2.05),
    (3, 4, "parameters", 2.06),
)
"""ZeRO, microbatch, state in host memory, samples/s of LLaMA-7B on 8 A800 with DeepSpeed 0.14.2: full recompute, 4096
tokens, 64 samples a step, two Xeon Platinum 8358 (gist d4cd6a20ab4b95cb3a49491747e2139a of chenyaofo)."""

HEAD = """\
# State in host memory

Printed by `python docs/benchmarks/host_memory.py`: searches of 20 processor seconds with one worker.
*Before* only activations and the optimizer's state may lie in host memory, and updates run on devices (pins forbid
`update`, `gradients` and `parameters`); *now* all kinds of state may
([decision 35](../decisions/0035-host-updates.md)).

| job | before | now |
|---|---|---|"""


def write(line: str) -> None:
    """Print a line of the page."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def found(model: str, gpus: int, cluster: str, batch: int, *, kinds: bool) -> str:
    """Return what a search finds, in words."""
    pins = None if kinds else {"forbid": {"offload": OTHERS}}
    try:
        plan = autopar.solve(
            f"zoo:{model}",
            gpus=gpus,
            cluster=cluster,
            global_batch=batch,
            time_limit=TIME_LIMIT,
            workers=1,
            pins=pins,
        )
    except (InfeasibleError, InterruptedSearchError):
        return "no plan fits"
    return f"{format_seconds(seconds_of(plan))}: {plan.summary}"


def seconds_of(plan: Plan) -> float:
    """Return the simulated step time of a plan."""
    assert plan.simulated is not None, "solved plans are simulated"
    return plan.simulated.step_seconds


def main() -> int:
    """Print the page."""
    write(HEAD)
    for model, gpus, cluster, batch in JOBS:
        each = [found(model, gpus, cluster, batch, kinds=kinds) for kinds in (False, True)]
        write(f"| {model} on {gpus} {cluster}, {batch} samples | {' | '.join(each)} |")
    write("\n## By kind\n\nOne plan with each kind of state in host memory (`autopar predict --offload`).\n")
    write("| job | in host memory | step | of it copies and updates of the host | device | host, per device |")
    write("|---|---|---|---|---|---|")
    for model, cluster, degrees in PREDICTED:
        for offload in ("", *STATE_KINDS):
            made = autopar.predict(f"zoo:{model}", replace(degrees, offload=str(offload)), cluster=cluster)
            (stage,) = made.timeline.stages
            write(
                f"| {model}, {degrees.gpus} {cluster}, {degrees.global_batch} samples | {offload or '-'} | "
                f"{format_seconds(made.timeline.step_seconds)} | {format_seconds(stage.copy_seconds)} | "
                f"{format_bytes(stage.memory.bytes)} | {format_bytes(stage.host_bytes)} |"
            )
    write(PUBLISHED_HEAD)
    for zero, microbatch, offload, rate in PUBLISHED:
        degrees = Degrees(dp=8, zero=zero, microbatch=microbatch, recompute="full", global_batch=64, offload=offload)
        made = autopar.predict("zoo:llama2-7b", degrees, cluster="a100", dims={"seq": 4096})
        write(
            f"| {zero} | {microbatch} | {offload or '-'} | {format_seconds(64 / rate)} | "
            f"{format_seconds(made.timeline.step_seconds)} |"
        )
    return 0


PUBLISHED_HEAD = """
## Beside published steps

LLaMA-7B on 8 A800 with DeepSpeed 0.14.2, 64 samples of 4096 tokens a step, full recompute
(gist d4cd6a20ab4b95cb3a49491747e2139a of chenyaofo), and predictions on `a100`. Updates are priced at 0.45 of the
memory bandwidth of the host, which CPU-Adam reaches with all cores (`autopar/cluster/host.py`). The run shows ten times
as much for its host: 17 to 20 s a step where 1 to 2 s are predicted, that is 3 % of that bandwidth. How many threads
each of its eight processes had is not stated.

| ZeRO | microbatch | in host memory | measured | predicted |
|---|---|---|---|---|"""


if __name__ == "__main__":
    show_usage(__doc__)
    time.monotonic = time.process_time  # so that limits do not depend on what else runs
    sys.exit(main())

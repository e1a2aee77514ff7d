"""Print how predicted peak memory compares with what PyTorch's memory tracker sees of the same training step.

python docs/benchmarks/memory.py [CACHE_DIR] > docs/benchmarks/memory.md
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from usage import show_usage

from tests.memory_cases import NAMED, NOT_TRACKED, PARTS, TOLERANCE, cases, compare

HEAD = f"""\
# Memory against PyTorch's tracker

`python docs/benchmarks/memory.py` prints this page, in about five minutes on one CPU core.

Torch modules with the parameters of models of the zoo run a training step on fake tensors and a fake process group:
FSDP2 in bfloat16 with a unit per block, tensor parallelism by `parallelize_module`, activation checkpointing per block,
fused AdamW, cross-entropy in float32, eager. `FSDPMemTracker` and `MemTracker` of `torch.distributed._tools` count what
rank 0 would allocate; data is left out. Fused kernels of CUDA (flash attention, RMSNorm) stand in for those of the CPU.
autopar predicts the same degrees with a stack of those kernels.
`pytest -m slow tests/test_memory_tracked.py` holds peaks to {100 * TOLERANCE:.0f} %, but for the cases named below.

Layouts: *one copy* is a device without sharing in float32, *tp* four devices in float32, *tp+sp* the same with sequence
parallelism, *fsdp* eight devices, *fsdp+tp* four by two, *full* and *selective* checkpointing of blocks, *by op* as
torchtitan has it (attention and every other product are kept), *no reshard* with parameters that stay gathered until
the backward.
"""


def write(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    show_usage(__doc__)
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    write(HEAD)
    write(f"| model | layout | peak, MB | predicted | error | {' | '.join(PARTS)} |")
    write("|" + "---|" * (5 + len(PARTS)))
    for name, layout in cases():
        found = compare(name, layout, cache)
        measured, ours = found.pop("peak")
        parts = " | ".join(f"{seen / 1e6:.0f} / {own / 1e6:.0f}" for seen, own in found.values())
        write(f"| {name} | {layout} | {measured / 1e6:.0f} | {ours / 1e6:.0f} | {ours / measured - 1:+.1%} | {parts} |")
    write("\nParts are tracked / predicted, in MB, at the fullest moment of each.\n")
    for (name, layout), (_, why) in NAMED.items():
        write(f"- {name}, {layout}: {why}.")
    for (name, layout), why in NOT_TRACKED.items():
        write(f"- {name}, {layout} is not tracked: {why}.")

"""Prints events.md: how many distinct events plans have, against their instructions if everything counts.

    python docs/benchmarks/events.py > docs/benchmarks/events.md

Distinct events are what `autopar profile` times: ops by kind, attributes and local shapes, pieces, transfers by bytes
and members. The naive count has every instruction of every device, microbatch and layer of a step. The number of events
has to stay where data-parallel degree, microbatches and layers grow, and may grow with other local shapes.
"""

import sys

import platformdirs

from autopar.prediction import open_setting
from autopar.profile.extract import Extraction
from autopar.profile.plans import extract_degrees, parse_degrees

PLANS = (
    (12, "dp=1 microbatch=1 global_batch=8"),
    (12, "dp=8 microbatch=1 global_batch=64"),
    (12, "dp=64 microbatch=1 global_batch=1024"),
    (48, "dp=8 microbatch=1 global_batch=64"),
    (12, "dp=4 tp=2 microbatch=1 global_batch=64"),
    (12, "dp=2 pp=4 microbatch=1 global_batch=64"),
    (48, "dp=2 pp=4 microbatch=1 global_batch=256"),
    (12, "dp=8 zero=3 microbatch=1 global_batch=64"),
)
"""Layers of GPT-2 and plans."""


def main() -> None:
    """Print the page."""
    lines = [
        "# Distinct events",
        "",
        "`python docs/benchmarks/events.py` prints this page.",
        "",
        *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(),
        "",
        "| GPT-2 of layers | plan | distinct events | instructions | ratio |",
        "|---|---|---|---|---|",
    ]
    every = Extraction()
    for layers, text in PLANS:
        setting = open_setting(
            "zoo:gpt2", dims={"num_layers": layers}, cluster="h100", precision="fp32",
            cache_dir=platformdirs.user_cache_dir("autopar"),
        )  # fmt: skip
        degrees = parse_degrees(text)
        found = Extraction()
        extract_degrees(setting, [degrees], found)
        extract_degrees(setting, [degrees], every)
        number = len(found.tasks)
        lines.append(f"| {layers} | {text} | {number} | {found.naive:,} | {found.naive / number:,.0f} |")
    lines += ["", f"All {len(PLANS)} plans together have {len(every.tasks)} distinct events of {every.naive:,}."]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

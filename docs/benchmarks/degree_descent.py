"""Print what the descent over degrees finds for Megatron-LM, by its patience.

    python docs/benchmarks/degree_descent.py > docs/benchmarks/degree_descent.md

The descent ends after `PATIENCE` cells in a row whose neighbours bring no better plan. It takes about three minutes.
"""

import math
import sys
import time

from autopar import degree_descent
from autopar.degree_descent import DegreeDescent
from autopar.frameworks import restriction
from autopar.pins import Pins
from autopar.request import JobRequest
from autopar.task import prepare

JOBS = (("qwen3-30b-a3b", 64, "h100", 1024), ("deepseek-v3", 256, "h800", 1920), ("llama3-70b", 256, "h100", 512))
"""Model, GPUs, cluster and samples per step."""
PATIENCES = (0, 3, 6, 12)
HEAD = """# Descent over degrees, by patience

`python docs/benchmarks/degree_descent.py` prints this page: the best plan for Megatron-LM without a time limit, by its estimate, the cells priced and processor seconds.
`PATIENCE` is 3 ([decision 33](../decisions/0033-seeds.md)).

| job | patience | step | cells | CPU s |
|---|---|---|---|---|"""  # noqa: E501


def main() -> None:
    """Print the page."""
    sys.stdout.write(HEAD + "\n")
    for name, gpus, cluster, batch in JOBS:
        model = f"zoo:{name}"
        pins = restriction.kept_to("megatron", Pins(), model=model, gpus=gpus, cluster=cluster)
        task = prepare(JobRequest(model, gpus=gpus, cluster=cluster, global_batch=batch, pins=pins))
        kinds = restriction.kinds_of_recompute("megatron", pins)
        flavours = [str(own) for kind in kinds for item in kind.pin.recompute for own in item.flavours]
        for patience in PATIENCES:
            degree_descent.PATIENCE = patience
            descent = DegreeDescent(task, restriction.runner("megatron", model), flavours)
            start = time.process_time()
            descent.run(math.inf)
            taken = time.process_time() - start
            best = min((own.seconds for flavour in flavours for own in descent.best(flavour)), default=math.inf)
            row = f"| {name} on {gpus} {cluster}, {batch} samples | {patience} | {best:.3f} s | {len(descent.cells)} "
            sys.stdout.write(f"{row}| {taken:.1f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

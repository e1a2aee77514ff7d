"""Print how well costs of single kernels meet published kernel times.

python docs/benchmarks/kernels.py gemm.json memory_bound_ops.json > docs/benchmarks/kernels.md
"""

import sys

from usage import show_usage

from autopar.cost.accuracy import KernelError, gemm_report, memory_report

HEAD = """\
# Kernels against published timings

`python docs/benchmarks/kernels.py gemm.json memory_bound_ops.json` prints this page; docs/cost_model.md has formulas.
Errors are absolute shares of the measured time; bias is the mean of signed ones.

## Matrix products

fp16, kernel times of microsoft/vidur.
Held out: a third of the pairs (N, K), drawn by a hash; no constant was fitted to any of their products.
"""
MEMORY = """
## Kernels bound by memory

Kernels of an inference engine, from the same source; none of the shares was fitted to A40.
Its norms reach 0.45 of the effective bandwidth; 0.7 is used, which the layer times of Megatron-LM ask for.
"""


def write(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


def table(errors: tuple[KernelError, ...]) -> None:
    """Print one row per group."""
    write("| kernels | number | mean | median | p90 | bias |\n|---|---|---|---|---|---|")
    for error in errors:
        write(
            f"| {error.group} | {error.kernels} | {error.mean:.1%} | {error.median:.1%} | {error.p90:.1%} | "
            f"{error.bias:+.1%} |"
        )


if __name__ == "__main__":
    show_usage(__doc__)
    write(HEAD)
    table(gemm_report(sys.argv[1]))
    write(MEMORY)
    table(memory_report(sys.argv[2]))

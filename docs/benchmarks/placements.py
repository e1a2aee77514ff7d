"""Measure how long placement problems take at many prices, as one of many and each alone, and print a page.

    python docs/benchmarks/placements.py > docs/benchmarks/placements.md

Of some pipelines that are not plain, blocks of the most frequent kind are priced as they are when the pipelines are
first bounded (`autopar/bounds/priced_cuts.py`), by one process. Each problem is written and solved as one of those that
are akin, and solved by itself, after one round of both that counts for nothing; costs that differ by more than the gap
asked for end the program.
"""

import math
import platform
import sys
import time
from dataclasses import dataclass, replace

from usage import show_usage

from autopar.bounds.priced_cuts import CutGenerator, levels_of
from autopar.configuration import Family, families
from autopar.problem import Problem, Solution
from autopar.request import JobRequest
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver
from autopar.search.settings import DEFAULT_SETTINGS
from autopar.solvers.auto import Auto
from autopar.task import Effort, prepare


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and the pipelines of it that are priced, as their names begin and end."""

    model: str
    gpus: int
    cluster: str
    pipelines: tuple[tuple[str, str], ...]


CASES = (
    Case(
        "megatron-1t",
        3072,
        "a100",
        (
            ("pp=12 mesh outer=64×inner=4 24 ", "interleaved v=2"),
            ("pp=12 mesh dp=16×outer=4×inner=4 24 ", "interleaved v=2"),
            ("pp=3 mesh dp=32×outer=8×inner=4 12 ", "interleaved v=2"),
        ),
    ),
    Case(
        "gpt3-175b",
        1024,
        "a100",
        (("pp=4 mesh outer=32×inner=8 12 ", "interleaved v=2"), ("pp=8 mesh dp=4×outer=8×inner=4 16 ", "zb-h1")),
    ),
)


def say(line: str = "") -> None:
    """Print a line of the page."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def priced(search: SearchContext, family: Family) -> tuple[list[Problem], float]:
    """Return the placement problems of the first prices of a family, and the seconds each takes to write and solve."""
    tables = search.tables(family)
    assert tables is not None, "nothing is pinned"
    node = NodeSolver(search, family, tables, math.inf)
    node.relax(math.inf)  # without memory, for a choice to begin with
    found: list[Problem] = []

    def solve(instance: Problem, cutoff: float) -> Solution:
        found.append(instance)
        return Auto().solve(instance, cutoff=cutoff, gap=DEFAULT_SETTINGS.node.block_gap)

    seconds = 0.0
    for _ in range(2):
        found.clear()
        cut_generator = CutGenerator(tables, node.cuts.program(), node.state.choices, solve)
        order = search.memory_bounds.order(family[0])
        began = time.perf_counter()
        cut_generator.price_memory(
            order, search.memory_bounds.remaining_costs(family[0], node.state.microbatch_bound), levels_of(order)
        )
        seconds = time.perf_counter() - began
    return found, seconds / len(found)


def alone(problems: list[Problem]) -> float:
    """Return the seconds each of some problems takes by itself."""
    seconds = 0.0
    for _ in range(2):
        seconds = 0.0
        for problem in problems:
            own = replace(problem, kinship=None)
            began = time.perf_counter()
            solution = Auto().solve(own, gap=DEFAULT_SETTINGS.node.block_gap)
            seconds += time.perf_counter() - began
            other = Auto().solve(problem, gap=DEFAULT_SETTINGS.node.block_gap)
            assert solution.bound <= other.cost * (1 + 1e-9), "a bound is above a choice"
            assert other.bound <= solution.cost * (1 + 1e-9), "a bound is above a choice"
    return seconds / len(problems)


def main() -> None:
    """Print the page."""
    say("# Placement problems at many prices")
    say()
    say(f"`python docs/benchmarks/placements.py` on {platform.machine()}, Python {platform.python_version()}.")
    say("Milliseconds per problem of a block: as one of many, written and priced included; and solved by itself.")
    say()
    say("| job | pipeline | problems | one of many | by itself | times |")
    say("|---|---|---|---|---|---|")
    for case in CASES:
        task = prepare(JobRequest(f"zoo:{case.model}", gpus=case.gpus, cluster=case.cluster))
        search = task.context(Effort())
        known = {str(family[0]): family for family in families(task.space)}
        for start, end in case.pipelines:
            name = next(own for own in known if own.startswith(start) and own.endswith(end))
            problems, together = priced(search, known[name])
            each = alone(problems)
            say(
                f"| {case.model}, {case.gpus} × {case.cluster} | {name} | {len(problems)} "
                f"| {together * 1e3:.1f} ms | {each * 1e3:.1f} ms | {each / together:.1f} |"
            )


if __name__ == "__main__":
    show_usage(__doc__)
    main()

"""Many cases in a row: which are drawn, how they are run, what they come to."""

import importlib
import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz import right
from tests.fuzz.cases import Case, Seeds, random_of
from tests.fuzz.kinds import KINDS
from tests.fuzz.outcomes import Outcome, judge
from tests.fuzz.sandbox import Run, run

_IMPORTED = (
    "autopar.cli.entry", "autopar.api", "autopar.prediction", "autopar.partitioning", "autopar.frameworks",
    "autopar.frameworks.configurations", "autopar.page", "autopar.report", "autopar.selection", "autopar.alternatives",
    "autopar.tactics.files", "autopar.pins", "autopar.report.prediction", "autopar.report.partitioning",
    "autopar.report.selection", "autopar.sizing.gpus", "platformdirs", "onnxruntime",
)  # fmt: skip
"""Modules that nearly every run needs, imported once before runs are forked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a case came to.

    Attributes:
        kind: Its kind.
        number: Its number, which makes it again with kind and seed.
        case: The case.
        run: How its run ended.
        outcome: What became of it.
        reason: What shows that, of failures.
    """

    kind: str
    number: int
    case: Case
    run: Run
    outcome: Outcome
    reason: str


def kinds_here(names: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds among `names` whose packages are installed."""
    return tuple(name for name in names if all(importlib.util.find_spec(package) for package in KINDS[name].packages))


def prepare(kinds: Sequence[str], folder: Path) -> Seeds:
    """Import what runs need, and return files that cases are mutations of.

    Raises:
        RuntimeError: If a command that is right does not print a plan or a program.
    """
    for name in (*_IMPORTED, *(package for kind in kinds for package in KINDS[kind].packages)):
        importlib.import_module(name)
    seeds = {}
    for name, command in right.SEED_PLANS.items():
        done = run(Case((*command, "--json"), {}), folder / name)
        if done.code != 0:
            raise RuntimeError(f"{' '.join(command)} does not print a plan:\n{done.err.decode(errors='replace')}")
        seeds[name] = done.out
    for name, plan in right.SEED_PROGRAMS.items():
        done = run(Case(("explain", "plan.json", "--program"), {"plan.json": seeds[plan]}), folder / name)
        if done.code != 0:
            raise RuntimeError(f"the program of {plan} is not printed:\n{done.err.decode(errors='replace')}")
        seeds[name] = done.out
    return seeds


def finding(kind: str, seed: int, number: int, seeds: Seeds, folder: Path) -> Finding:
    """Run the case of a number and return what it came to."""
    case = KINDS[kind].make(random_of(kind, seed, number), seeds)
    done = run(case, folder)
    return Finding(kind, number, case, done, *judge(done))


def campaign(
    kinds: Sequence[str], seed: int, seeds: Seeds, *, seconds: float = float("inf"), cases: int | None = None
) -> Iterator[Finding]:
    """Yield what cases come to, kinds drawn by their shares, until the time is over or all are done.

    Args:
        kinds: Names of kinds.
        seed: Seed of all cases.
        seeds: Files they are mutations of.
        seconds: Wall time after which no case is begun.
        cases: Number of cases; None for no limit.
    """
    end = time.monotonic() + seconds
    order = Random(f"order {seed}")
    shares = [KINDS[kind].share for kind in kinds]
    numbers: Counter[str] = Counter()
    while time.monotonic() < end and (cases is None or numbers.total() < cases):
        (kind,) = order.choices(kinds, shares)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            yield finding(kind, seed, numbers[kind], seeds, Path(folder))
        numbers[kind] += 1


def table(counts: Mapping[tuple[str, Outcome], int]) -> str:
    """Return how many cases of each kind came to what, as Markdown."""
    kinds = [kind for kind in KINDS if any(counts.get((kind, outcome)) for outcome in Outcome)]
    outcomes = [outcome for outcome in Outcome if any(counts.get((kind, outcome)) for kind in kinds)]
    rows = [("kind", "cases", *outcomes)]
    for kind in (*kinds, "all"):
        own = [
            sum(counts.get((each, outcome), 0) for each in (kinds if kind == "all" else (kind,)))
            for outcome in outcomes
        ]
        rows.append((kind, str(sum(own)), *map(str, own)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" + "|---:" * (len(outcomes) + 1) + "|")
    return "\n".join(lines) + "\n"

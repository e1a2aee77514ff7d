"""Writes how discovery and Shardy's rules differ: python -m tests.shardy_report -o docs/benchmarks/shardy_diff.md."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from autopar.discover import Strategy
from autopar.sharding import Shard
from tests.shardy import Comparison, compare
from tests.shardy_cases import CASES

_KINDS = {
    "terms": "inputs that are terms of a reduction and stay so; Shardy's rules have no partial inputs",
    "chunks": "block-cyclic shards; Shardy has one contiguous block per device",
    "stand-in": "shards of a dim the expert replicates, on which a device runs an op that knows where its block starts",
    "dims": "other sets of dims sharded together",
}


def kind(strategy: Strategy) -> str:
    """Return in what a strategy goes beyond Shardy's rules, a key of `_KINDS`."""
    placements = (*strategy.inputs, *strategy.outputs)
    if not any(isinstance(placement, Shard) for placement in placements):
        return "terms"
    if any(isinstance(placement, Shard) and placement.chunks > 1 for placement in placements):
        return "chunks"
    return "dims" if strategy.local is None else "stand-in"


def report(comparisons: Sequence[Comparison], seconds: float) -> str:
    """Return the report as Markdown."""
    sections = (_summary(comparisons, seconds), _table(comparisons), _missed(comparisons), _beyond(comparisons))
    return "\n".join(line for section in sections for line in section) + "\n"


def _summary(comparisons: Sequence[Comparison], seconds: float) -> Iterator[str]:
    met, missed, beyond = _counts(comparisons)
    kinds = Counter(kind(strategy) for c in comparisons for strategy in c.beyond)
    marks = Counter(wanted.mark for c in comparisons for wanted in c.met)
    chunks = sum("/" in str(wanted) for c in comparisons for wanted in c.met)
    ours, experts = {c.case.kind for c in comparisons}, {c.case.expert for c in comparisons}
    yield f"# Discovered rules against Shardy's, {date.today():%Y-%m-%d}\n"
    yield "Written by `python -m tests.shardy_report -o docs/benchmarks/shardy_diff.md`"
    yield f"with jaxlib {version('jaxlib')}."
    yield f"Discovering all rules and asking Shardy took {seconds:.1f} s.\n"
    yield "Shardy's authors wrote a sharding rule for every StableHLO op."
    yield f"Here {len(ours)} op kinds of ours are said again as {len(experts)} StableHLO ops,"
    yield f"in {len(comparisons)} cases of at least three shapes each,"
    yield "and the expert's rule is compared with what discovery finds by executing shards."
    yield "Each factor of an expert's rule that may be sharded is a strategy on one mesh axis.\n"
    yield "| | strategies |\n|---|--:|"
    yield f"| allowed by the expert | {met + missed} |"
    yield f"| found by discovery | {met} |"
    yield f"| … that end in a reduction | {marks['reduction']} |"
    yield f"| … that exchange rows (`permutation`) | {marks['permutation']} |"
    yield f"| … that are block-cyclic on one axis (a factor behind others in its dim) | {chunks} |"
    yield f"| not found, each with a reason | {missed} |"
    yield f"| found beyond the expert's rules | {beyond} |"
    for name, text in _KINDS.items():
        yield f"| … {text} | {kinds[name]} |"
    yield "\n`tests/test_discover_shardy.py` holds the reasons to what is not found:"
    yield "a miss without a reason fails, and so does a reason without a miss."


def _table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "\n## By op\n\n| op | StableHLO | cases | allowed | found | explained | beyond |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for (ours, expert), group in _grouped(comparisons).items():
        met, missed, beyond = _counts(group)
        row = (f"`{ours}`", f"`{expert}`", len(group), met + missed, met, missed, beyond)
        yield f"| {' | '.join(map(str, row))} |"


def _missed(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "\n## Not found\n\n| op | StableHLO | strategy | cases | why |\n|---|---|---|--:|---|"
    for (ours, expert), group in _grouped(comparisons).items():
        reasons = Counter(
            (str(wanted), c.case.missing.get(str(wanted), "**not explained**")) for c in group for wanted in c.missed
        )
        for (strategy, reason), count in reasons.items():
            yield f"| `{ours}` | `{expert}` | `{strategy}` | {count} | {reason} |"


def _beyond(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "\n## Beyond\n\nEach was found by execution on two shapes, with several sets of data."
    for name, text in _KINDS.items():
        yield f"\n### {text[0].upper()}{text[1:]}\n"
        for (ours, expert), group in _grouped(comparisons).items():
            texts = dict.fromkeys(str(strategy) for c in group for strategy in c.beyond if kind(strategy) == name)
            if texts:
                yield f"- `{ours}` (`{expert}`): " + ", ".join(f"`{strategy}`" for strategy in texts)


def _counts(comparisons: Sequence[Comparison]) -> tuple[int, int, int]:
    """Return the numbers of strategies met, missed and beyond."""
    return (
        sum(len(c.met) for c in comparisons),
        sum(len(c.missed) for c in comparisons),
        sum(len(c.beyond) for c in comparisons),
    )


def _grouped(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """Return the comparisons by op of ours and of the expert."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.case.kind, comparison.case.expert), []).append(comparison)
    return groups


def main() -> None:
    """Compare all cases and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    start = perf_counter()
    comparisons = compare(CASES)
    arguments.output.write_text(report(comparisons, perf_counter() - start), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes how discovery and Shardy's rules differ: python -m tests.shardy_report -o docs/benchmarks/shardy_diff.md."""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from autopar.discover import Strategy
from autopar.sharding import Partial, Replicate, Shard
from tests.shardy import Comparison, compare
from tests.shardy_cases import CASES

_KINDS = {
    "terms": "partial sums (or other terms) of inputs that stay partial: Shardy's rules have no partial inputs",
    "chunks": "block-cyclic shards: Shardy has one contiguous block per device",
    "stand-in": "shards of dims Shardy replicates, on which a device runs an op that knows where its block starts",
    "halo": "shards of dims Shardy replicates, with rows of neighbours",
    "dims": "shards of dims Shardy replicates, or of more inputs at once",
}


def kind(strategy: Strategy) -> str:
    """Return in what a strategy goes beyond Shardy's rules, a key of `_KINDS`."""
    placements = (*strategy.inputs, *strategy.outputs)
    if not any(isinstance(placement, Shard) for placement in placements):
        return "terms"
    if any(isinstance(placement, Shard) and placement.chunks > 1 for placement in placements):
        return "chunks"
    return "stand-in" if strategy.local else "halo" if strategy.halos else "dims"


def report(comparisons: Sequence[Comparison], seconds: float) -> str:
    """Return the report as Markdown."""
    return "\n".join(
        [*_summary(comparisons, seconds), *_table(comparisons), *_missed(comparisons), *_beyond(comparisons)]
    )


def _summary(comparisons: Sequence[Comparison], seconds: float) -> Iterator[str]:
    met, missed, minor, beyond = (
        sum(len(part) for part in parts)
        for parts in zip(*((c.met, c.missed, c.minor, c.beyond) for c in comparisons), strict=True)
    )
    kinds = Counter(kind(strategy) for c in comparisons for strategy in c.beyond)
    marks = Counter(wanted.mark or "plain" for c in comparisons for wanted in c.met)
    yield f"""# Discovered rules against Shardy's, {date.today():%Y-%m-%d}

`python -m tests.shardy_report -o docs/benchmarks/shardy_diff.md`, with jaxlib {version("jaxlib")}, took {seconds:.1f} s.

Shardy's authors wrote a sharding rule for every StableHLO op.
Here {len({c.case.kind for c in comparisons})} op kinds of ours are said again as \
{len({c.case.expert for c in comparisons})} StableHLO ops, in {len(comparisons)} cases of several shapes, and the \
expert's rule is compared with the one found by executing shards.
A *factor* of an expert's rule that may be sharded is a strategy on one mesh axis.

| | strategies |
|---|---:|
| allowed by the expert | {met + missed + minor} |
| found by discovery | {met} |
| … of them reductions | {marks["reduction"]} |
| … of them with rows exchanged (`permutation`) | {marks["permutation"]} |
| not found, with a reason in each case | {missed} |
| not found, minor factors | {minor} |
| found beyond the expert's rules | {beyond} |"""
    for name, text in _KINDS.items():
        yield f"| … {text} | {kinds[name]} |"
    yield """
The tests hold the list of reasons to what is really not found: an unexplained miss fails, and so does a reason that is \
no longer needed."""


def _table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "\n## By op\n\n| op | StableHLO | cases | allowed | found | explained | minor | beyond |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for (ours, expert), group in _grouped(comparisons).items():
        counts = [
            sum(len(part) for part in parts)
            for parts in zip(*((c.met, c.missed, c.minor, c.beyond) for c in group), strict=True)
        ]
        met, missed, minor, beyond = counts
        row = (f"`{ours}`", f"`{expert}`", len(group), met + missed + minor, met, missed, minor, beyond)
        yield f"| {' | '.join(map(str, row))} |"


def _missed(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "\n## Not found\n\n| op | StableHLO | strategy | cases | why |\n|---|---|---|--:|---|"
    for (ours, expert), group in _grouped(comparisons).items():
        reasons = Counter((str(wanted), c.case.missing[str(wanted)]) for c in group for wanted in c.missed)
        for (strategy, reason), count in reasons.items():
            yield f"| `{ours}` | `{expert}` | `{strategy}` | {count} | {reason} |"
    yield """
Minor factors are those behind another one in a dim, as the columns of a head in a hidden dim of heads by columns.
Shardy itself shards them only when the axes on the major factor use it up.
On one axis that is a block-cyclic shard with as many chunks as the major factor is large, which is a number of one \
shape and not of the op, so rules do not have it.
"""
    yield "| op | expert's rule | minor strategies |\n|---|---|---|"
    for (ours, _), group in _grouped(comparisons).items():
        for c in group:
            if c.minor:
                yield f"| `{ours}` | `{c.expert.text}` | {', '.join(f'`{wanted}`' for wanted in c.minor)} |"


def _beyond(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "\n## Beyond\n\nEach was found by execution on 2 and 3 devices with three sets of data."
    for name, text in _KINDS.items():
        yield f"\n### {text[0].upper()}{text[1:]}\n"
        for (ours, expert), group in _grouped(comparisons).items():
            counts = Counter(str(strategy) for c in group for strategy in c.beyond if kind(strategy) == name)
            if counts:
                yield f"- `{ours}` (`{expert}`): " + ", ".join(f"`{strategy}`" for strategy in counts)


def _grouped(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """Return the comparisons by op of ours and of the expert."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.case.kind, comparison.case.expert), []).append(comparison)
    return groups


def main() -> None:
    """Compare all cases and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/benchmarks/shardy_diff.md"))
    arguments = parser.parse_args()
    start = perf_counter()
    comparisons = compare(CASES)
    text = report(comparisons, perf_counter() - start)
    arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The fuzzer: files and arguments that nobody would write, given to every command that reads some.

    python -m tests.fuzz --seconds 600 --kind plan

runs cases, counts what they come to, and keeps those that fail. A case is made from its kind, a seed and a number
alone, so that it can be made again. `kinds` is the table of what is fuzzed; `trees`, `octets` and `protos` are the
mutations; `sandbox` runs a case in a process of its own under limits; `outcomes` says what became of it; `campaign`
runs many.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.campaign import Finding, campaign, finding, kinds_here, prepare, table
from tests.fuzz.kinds import KINDS
from tests.fuzz.outcomes import Outcome


def main() -> int:
    """Run the campaign that is asked for; return 1 if a case failed."""
    given = _arguments()
    kinds = kinds_here(given.kind or list(KINDS))
    missing = sorted({*(given.kind or KINDS)} - {*kinds})
    if missing:
        sys.stderr.write(f"left out, for want of packages: {', '.join(missing)}\n")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        seeds = prepare(kinds, Path(folder))
        if given.case is not None:
            return _replay(finding(kinds[0], given.seed, given.case, seeds, Path(folder) / "case"), given.save)
        counts: Counter[tuple[str, Outcome]] = Counter()
        for found in campaign(kinds, given.seed, seeds, seconds=given.seconds, cases=given.cases):
            counts[found.kind, found.outcome] += 1
            if found.outcome.failed:
                _tell(found, given.seed, given.save)
    sys.stdout.write(table(counts))
    return int(any(outcome.failed for _, outcome in counts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the program.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="wall time after which no case is begun")
    parser.add_argument("--cases", type=int, help="number of cases")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="a kind; can be repeated; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument("--case", type=int, metavar="N", help="run case N of the kind again, and print what it prints")
    parser.add_argument("--save", type=Path, default=Path("build/fuzz"), help="folder of cases that fail")
    given = parser.parse_args()
    if given.case is not None and len(given.kind or ()) != 1:
        parser.error("--case N goes with one --kind")
    if given.seconds == float("inf") and given.cases is None and given.case is None:
        parser.error("give --seconds or --cases")
    return given


def _tell(found: Finding, seed: int, save: Path) -> None:
    folder = save / f"{found.kind}-{seed}-{found.number}"
    found.case.write(folder)
    again = f"python -m tests.fuzz --kind {found.kind} --seed {seed} --case {found.number}"
    command = ascii(found.case.command)[:400]
    sys.stderr.write(f"{found.outcome}: {found.reason}\n  {again}\n  in {folder}: {command}\n")


def _replay(found: Finding, save: Path) -> int:
    found.case.write(save / f"{found.kind}-replay")
    sys.stdout.write(f"{found.case.command!a}\n")
    for data in (found.run.out, found.run.err):
        sys.stdout.write(f"{data.decode(errors='backslashreplace')}\n")
    sys.stdout.write(f"{found.outcome} {found.reason}: exit code {found.run.code} after {found.run.seconds:.1f} s\n")
    return int(found.outcome.failed)


if __name__ == "__main__":
    sys.exit(main())

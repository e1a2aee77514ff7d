"""Put the program through faults of the world, and print a page: what was done, what happened, what was left behind.

    python docs/benchmarks/reliability.py > docs/benchmarks/reliability.md      all faults
    python docs/benchmarks/reliability.py --only SIGKILL-worker --only full-cache    some of them
    python docs/benchmarks/reliability.py --list                                their names

Each runs the program in processes of its own, in a folder with an empty cache. Seconds are of the wall clock, from the
fault to the end of the program, or of the whole run where nothing happens to it; those of limits hold on a machine that
has nothing else to do. A row whose last column is not empty is a fault of ours.
"""

import argparse
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autopar.machine import usable_cores  # noqa: E402
from tests.faults import FAULTS, do  # noqa: E402

HEAD = """# Reliability

`python docs/benchmarks/reliability.py{only}` on {machine}, {cores} cores, Python {python}.
Each row is a test of its own, `pytest -m slow tests/test_faults.py -k NAME`.
Seconds are from the fault to the end of the program, or of the whole run where nothing happens to it.
Left behind are processes, and files in the temporary folder, the cache or the plan's folder.

| name | what was done | what happened | seconds | left behind | wrong |
|---|---|---|---|---|---|"""


def main() -> int:
    """Print the page; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=FAULTS, metavar="NAME")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        print("\n".join(FAULTS))  # noqa: T201
        return 0
    only = "".join(f" --only {name}" for name in given.only or ())
    machine = {"machine": platform.machine(), "cores": usable_cores(), "python": platform.python_version()}
    print(HEAD.format(only=only, **machine), flush=True)  # noqa: T201
    failed = False
    for name in given.only or FAULTS:
        fault = FAULTS[name]
        if fault.missing:
            row = [fault.missing, "", "", ""]
        else:
            seen = do(fault)
            failed |= bool(seen.wrong or seen.leftovers)
            row = [seen.happened, f"{seen.seconds:.1f}", ", ".join(seen.leftovers), "; ".join(seen.wrong)]
        cells = [name, fault.done, *row]
        print("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |", flush=True)  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

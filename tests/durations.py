"""Make the list of long tests, `slow.txt`, from what a run of the tests has measured.

    pytest -n 2 --durations=0 > durations.log      with an empty slow.txt, on a machine without other work
    python tests/durations.py durations.log ... > tests/slow.txt

On the list are cases that take over a quarter of a second, but for the shortest one of each function, and tests whose
shortest case takes over one and a half. They run with `-m slow`.
"""

import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

CASE_SECONDS, TEST_SECONDS = 0.25, 1.5


def long_tests(logs: Iterable[str]) -> list[str]:
    """Return the ids of the long tests in outputs of `pytest --durations=0`; of several runs the fastest counts."""
    seconds: dict[str, float] = {}
    for log in logs:
        for own, name in re.findall(r"^\s*([\d.]+)s call\s+(\S.*)$", log, re.MULTILINE):
            seconds[name.strip()] = min(float(own), seconds.get(name.strip(), math.inf))
    cases: dict[str, list[str]] = defaultdict(list)
    for name in seconds:
        cases[name.split("[")[0]].append(name)
    found = []
    for own in cases.values():
        shortest, *others = sorted(own, key=seconds.__getitem__)
        found += [name for name in others if seconds[name] > CASE_SECONDS]
        found += [shortest] if seconds[shortest] > TEST_SECONDS else []
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.write("\n".join(long_tests(Path(log).read_text() for log in sys.argv[1:])) + "\n")

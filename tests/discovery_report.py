"""Writes what discovery costs: python -m tests.discovery_report -o docs/benchmarks/discovery_cases.md."""

import argparse
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time

from autopar.discover import Rule, Rules, discover, format_rule
from tests.discovery_cases import CASES, Case, found, strategies
from tests.single_ops import Tensor, merge


def report(rules: Sequence[Rule], whole: Rules, wall: float, cpu: float) -> str:
    """Return the report as Markdown.

    Args:
        rules: The rule of each case.
        whole: All of them together.
        wall: Seconds it took.
        cpu: Seconds of it spent computing.
    """
    right = sum(found(rule) == strategies(case.rule) for rule, case in zip(rules, CASES, strict=True))
    lines = [
        f"# Discovery on a list of ops, {date.today():%Y-%m-%d}",
        "",
        "Written by `python -m tests.discovery_report -o docs/benchmarks/discovery_cases.md`: one process, no cache,",
        f"Python {platform.python_version()}, numpy {version('numpy')}, onnx {version('onnx')}.",
        "The list and the rules worked out by hand are `tests/discovery_cases.py`;",
        "`tests/test_discover_ops.py` has more.",
        "",
        "| | |",
        "|---|--:|",
        f"| cases | {len(CASES)} |",
        f"| op kinds | {len({case.kind for case in CASES})} |",
        f"| distinct signatures | {len(whole)} |",
        f"| all strategies right, no other found | {right} |",
        f"| strategies | {sum(len(rule.strategies) - 1 for rule in rules)} |",
        f"| executions of ops | {whole.num_executions} |",
        f"| seconds of CPU | {cpu:.1f} |",
        f"| seconds on the clock | {wall:.1f} |",
        "",
        "| op | inputs | executions | rule |",
        "|---|---|--:|---|",
    ]
    lines += [
        f"| `{case.kind}` | {_inputs(case)} | {rule.num_executions} | `{format_rule(rule)}` |".replace("b|c", "b\\|c")
        for rule, case in zip(rules, CASES, strict=True)
    ]
    return "\n".join(lines) + "\n"


def _inputs(case: Case) -> str:
    """Return the shapes of the tensors of a case; constants are left out."""
    return " ".join(str(list(item.shape)).replace(" ", "") for item in case.inputs if isinstance(item, Tensor))


def main() -> None:
    """Discover the rules of all cases and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    graph = merge([case.build()[0] for case in CASES])
    wall, cpu = perf_counter(), process_time()
    rules = discover(graph)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    text = report([rules.of(op) for op in graph.ops], rules, wall, cpu)
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

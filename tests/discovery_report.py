"""Writes what discovery costs: python -m tests.discovery_report -o docs/benchmarks/discovery_cases.md."""

import argparse
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from time import process_time

from autopar.discover import Rule, Rules, discover, format_rule
from autopar.discover.search import find_rule, signature
from autopar.discover.shrink import shrink
from autopar.discover.sketch import sketch_op
from autopar.execute import Executor
from autopar.ir.graph import Graph
from tests.discovery_cases import CASES, Case, found, strategies
from tests.single_ops import Tensor, merge


def seconds_alone(graph: Graph) -> float:
    """Return the seconds of CPU it takes to find the rules of all ops of a graph in this process, each once."""
    start = process_time()
    executor, known = Executor(), set()
    for sketch in dict.fromkeys(sketch_op(graph, op) for op in graph.ops):
        proxies = shrink(sketch, executor)
        if proxies is not None and signature(proxies) not in known:
            known.add(signature(proxies))
            find_rule(sketch, proxies, executor)
    return process_time() - start


def report(rules: Sequence[Rule], whole: Rules, alone: float) -> str:
    """Return the report as Markdown.

    Args:
        rules: The rule of each case.
        whole: All of them together.
        alone: Seconds of CPU it takes in one process.
    """
    right = sum(found(rule) == strategies(case.rule) for rule, case in zip(rules, CASES, strict=True))
    lines = [
        f"# Discovery on a list of ops, {date.today():%Y-%m-%d}",
        "",
        "Written by `python -m tests.discovery_report -o docs/benchmarks/discovery_cases.md`, without a cache:",
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
        f"| seconds of CPU in one process | {alone:.1f} |",
        f"| seconds on the clock, in processes of their own | {whole.seconds:.1f} |",
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
    alone = seconds_alone(graph)
    rules = discover(graph)
    text = report([rules.of(op) for op in graph.ops], rules, alone)
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

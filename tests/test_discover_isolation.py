"""Kernels that crash or hang cost what they were tried for, and nothing else."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from autopar.discover import Isolation, Rule, Rules, discover
from autopar.errors import ExecutionError, UnsupportedOpError
from autopar.execute import Executor
from autopar.ir.graph import Graph, Op, Value
from autopar.progress import Progress
from tests.faulty import FAULTS, Faulty

ROOT = Path(__file__).parent.parent


def line(*kinds: str) -> Graph:
    """Return ops of one input each, one after the other on a matrix."""
    values = {f"x{i}": Value(f"x{i}", (32, 64), "float32") for i in range(len(kinds) + 1)}
    ops = tuple(Op(kind, kind, (f"x{i}",), (f"x{i + 1}",)) for i, kind in enumerate(kinds))
    return Graph("line", 24, values, ("x0",), (), {}, ops, (f"x{len(kinds)}",))


GRAPH = line("Relu", "Softplus", "Neg")


def of(rules: Rules, kind: str) -> Rule:
    (rule,) = (rule for rule in rules if rule.kind == kind)
    return rule


def texts(rule: Rule) -> set[str]:
    return set(map(str, rule.strategies))


def without_rows(rule: Rule) -> set[str]:
    """Return the strategies that do not split the first dim of the first input."""
    return {text for text in texts(rule) if not text.startswith("S(0")}


def children(pid: int) -> list[int]:
    """Return the processes a process has started and not outlived."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def await_end(pids: list[int], seconds: float = 20) -> bool:
    """Return whether processes end within some time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


CAUSES = {
    "segmentation fault": "by SIGSEGV",
    "abort": "by SIGABRT",
    "exit": "by exit code 3",
    "sys.exit": "by exit code 4",
    "loop": "over 4 s",
    "sleep": "over 4 s",
    "memory": "out of memory",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_costs_one_strategy(fault: str) -> None:
    """Whatever a kernel does when the rows are split: the columns are found, and the rules of the other ops.

    A rule that may lack a strategy is not taken for a complete one.
    """
    healthy = discover(GRAPH)

    rules = discover(GRAPH, isolation=Isolation(max_seconds=4.0, executor=partial(Faulty, fault)))

    assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= texts(of(healthy, "Softplus"))
    assert texts(of(rules, "Softplus")) == without_rows(of(healthy, "Softplus"))
    assert of(rules, "Softplus").reason == f"runs that ended their process count as failed: 1 {CAUSES[fault]}"
    assert [of(rules, kind) for kind in ("Relu", "Neg")] == [of(healthy, kind) for kind in ("Relu", "Neg")]


def test_fault_while_a_strategy_is_confirmed_costs_that_strategy() -> None:
    """With 2 devices all is well."""
    rules = discover(GRAPH, isolation=Isolation(executor=partial(Faulty, "exit", where="rows on 3 devices")))

    assert texts(of(rules, "Softplus")) == without_rows(of(discover(GRAPH), "Softplus"))
    assert of(rules, "Softplus").reason


def test_kernel_that_never_works_is_replicated() -> None:
    """It is given up after a while, and the rest of the graph has its rules."""
    rules = discover(GRAPH, isolation=Isolation(executor=partial(Faulty, "segmentation fault", where="everywhere")))

    assert texts(of(rules, "Softplus")) == {"R -> R"}
    assert "no small shapes" in of(rules, "Softplus").reason
    assert "ended their process" in of(rules, "Softplus").reason
    assert of(rules, "Relu") == of(discover(GRAPH), "Relu")


def product() -> Graph:
    """Return a product of two matrices."""
    names = {"x": (32, 64), "w": (64, 48), "y": (32, 48)}
    values = {name: Value(name, shape, "float32") for name, shape in names.items()}
    return Graph("product", 24, values, ("x", "w"), (), {}, (Op("op", "MatMul", ("x", "w"), ("y",)),), ("y",))


def test_search_survives_many_crashes() -> None:
    """All candidates that split the rows of the first operand end their workers; the others are found."""
    (rule,) = discover(product(), isolation=Isolation(executor=partial(Faulty, "segmentation fault", "MatMul")))

    assert {"R,S(1) -> S(1)", "S(1),S(0) -> P"} <= texts(rule) == without_rows(next(iter(discover(product()))))
    assert re.fullmatch(r"runs that ended their process count as failed: \d+ by SIGSEGV", rule.reason)


def test_search_that_loses_too_many_workers_keeps_what_it_found() -> None:
    """No more candidates are tried; those that worked are confirmed, and the rule says that it is not complete."""
    faulty = partial(Faulty, "exit", "MatMul")

    (rule,) = discover(product(), isolation=Isolation(max_repeats=70, executor=faulty))

    assert {"R,R -> R", "R,S(1) -> S(1)"} <= texts(rule) < without_rows(next(iter(discover(product()))))
    assert rule.reason.startswith("search stopped after")
    assert rule.reason.endswith("by exit code 3")


def test_search_that_dies_of_all_it_does_is_given_up() -> None:
    """Not even data can be made."""
    faulty = partial(Faulty, "sleep", "MatMul", "everywhere")

    (rule,) = discover(product(), isolation=Isolation(max_seconds=0.1, max_hangs=2, executor=faulty))

    assert texts(rule) == {"R,R -> R"}
    assert rule.reason.startswith("replicated: ")


def test_worker_that_cannot_even_begin_is_given_up() -> None:
    """Whatever is refused, it dies again."""
    rules = discover(GRAPH, isolation=Isolation(executor=partial(Faulty, "no such fault")))

    assert [texts(rule) for rule in rules] == [{"R -> R"}] * 3
    assert all(rule.reason.endswith("count as failed: 4 by exit code 1") for rule in rules)


def test_number_of_workers_changes_nothing() -> None:
    """The same rules, with the same number of runs, faults included."""
    graph = line("Relu", "Softplus", "Neg", "Exp", "Softmax", "Transpose", "Tanh")

    one, two, three = (
        list(discover(graph, isolation=Isolation(number, executor=partial(Faulty, "exit")))) for number in (1, 2, 3)
    )

    assert one == two == three
    assert len(one) == 7


def test_incomplete_rules_are_not_cached(tmp_path: Path) -> None:
    """What went wrong may have been the machine's fault: the next run tries again."""
    discover(GRAPH, cache_dir=tmp_path, isolation=Isolation(executor=partial(Faulty, "exit")))

    again = discover(GRAPH, cache_dir=tmp_path)

    assert again.num_cached == 2
    assert of(again, "Softplus") == of(discover(GRAPH), "Softplus")


def test_known_rules_need_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If everything is in the cache, nothing is started."""
    expected = discover(GRAPH, cache_dir=tmp_path)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    rules = discover(GRAPH, cache_dir=tmp_path, isolation=Isolation(3))

    assert list(rules) == list(expected)


def test_nothing_runs_in_the_process_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other way to a rule than through a worker."""
    monkeypatch.setattr(Executor, "run_kind", lambda *_: pytest.fail("ran here"))

    assert discover(GRAPH).num_executions > 0


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_python_that_does_not_start_is_an_error(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule at all is no answer."""
    monkeypatch.setattr(sys, "executable", executable)

    with pytest.raises(ExecutionError, match=r"cannot be run in a process of their own(.|\n)*import autopar"):
        discover(GRAPH, isolation=Isolation(3))


def test_error_of_a_task_is_the_callers() -> None:
    """An op nobody implements is not a fault to be survived; of several, the first of the graph is named."""
    graph = line("Relu", "Unheard", "Neg", "Unknown")

    for _ in range(5):
        with pytest.raises(UnsupportedOpError, match=r"'Unheard' has no implementation(.|\n)*autopar\.ir\.functions"):
            discover(graph)


def test_server_that_is_killed_is_replaced() -> None:
    """What it had not answered is asked again."""
    graph = line("Relu", "Softplus", "Neg", "Exp")
    healthy = discover(graph)
    others = set(children(os.getpid()))  # of the tests before

    def kill(progress: Progress) -> None:
        if progress.done == 1:
            for server in set(children(os.getpid())) - others:
                os.kill(server, signal.SIGKILL)

    rules = discover(graph, progress=kill, isolation=Isolation(1))

    assert list(rules) == list(healthy)


def test_threads_can_discover_at_the_same_time() -> None:
    """Each with processes of its own."""
    graphs = [line("Relu", "Neg"), line("Exp", "Tanh"), line("Abs", "Softplus")]
    found: dict[str, Rules] = {}

    def work(graph: Graph) -> None:
        found[graph.ops[0].kind] = discover(graph)

    threads = [threading.Thread(target=work, args=(graph,)) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(found) == ["Abs", "Exp", "Relu"]
    assert [list(found[graph.ops[0].kind]) for graph in graphs] == [list(discover(graph)) for graph in graphs]


HEAD = f"""
import os, sys
from functools import partial
from pathlib import Path

sys.path.insert(0, {str(ROOT)!r})
from autopar.discover import Isolation, discover
from tests.faulty import Faulty
from tests.test_discover_isolation import GRAPH, children

print("runs once", flush=True)


def report(progress):
    print(progress.detail, *children(os.getpid()), flush=True)


"""


def script(tmp_path: Path, text: str) -> "subprocess.Popen[str]":
    """Start a script without a guard for its main module."""
    file = tmp_path / "script.py"
    file.write_text(HEAD + text)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(file)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def read_line(process: "subprocess.Popen[str]") -> tuple[str, list[int]]:
    """Return the next word a script prints, and the numbers behind it."""
    assert process.stdout is not None
    word, *numbers = process.stdout.readline().split()
    return word, [int(number) for number in numbers if number.isdigit()]


def test_script_without_a_guard_runs_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The main module is not imported again, and the processes end with it."""
    process = script(tmp_path, "print(len(discover(GRAPH, progress=report)))")

    output, errors = process.communicate(timeout=60)

    first, *reports, last = output.splitlines()
    assert (first, last, errors, process.returncode) == ("runs once", "3", "", 0)
    assert len(reports) == 3
    (server,) = {int(line.split()[1]) for line in reports}
    assert await_end([server])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ends_with_its_caller(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C while a kernel hangs: rules found so far are kept. Whatever ends the caller, no process stays."""
    hanging = 'Isolation(2, max_seconds=60, executor=partial(Faulty, "sleep"))'
    process = script(
        tmp_path, f"discover(GRAPH, cache_dir=Path({str(tmp_path)!r}), progress=report, isolation={hanging})"
    )
    words, (_, _, (server,)) = zip(*(read_line(process) for _ in range(3)), strict=True)
    family = [server, *children(server)]

    process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert sorted(words) == ["Neg", "Relu", "runs"]
    assert await_end(family)
    if number == signal.SIGINT:
        assert errors.endswith("KeyboardInterrupt\n")
        assert discover(GRAPH, cache_dir=tmp_path).num_cached == 2


def test_workers_end_with_their_server(tmp_path: Path) -> None:
    """Idle ones, too, while the caller lives on."""
    process = script(
        tmp_path,
        "discover(GRAPH, isolation=Isolation(2))\n"
        "(server,) = children(os.getpid())\n"
        "print('family', server, *children(server), flush=True)\n"
        "sys.stdin.read()\n",
    )
    read_line(process)
    _, (server, *workers) = read_line(process)

    os.kill(server, signal.SIGKILL)

    assert len(workers) == 2
    assert await_end(workers)
    process.communicate("", timeout=30)

"""Who searches does not matter: the same plans and bound from this process, from several, and when some of them die."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cluster import Cluster, NodeGroup
from autopar.configuration import Configuration, families
from autopar.errors import JobError, WorkerError
from autopar.plan import Plan
from autopar.request import JobRequest
from autopar.search import workbench
from autopar.search.backends import Engine
from autopar.search.branch_and_bound import search as run_search
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver, open_node
from autopar.search.ordered_execution import LAG, TaskSeries, horizon, run_series
from autopar.search.outcome import Outcome
from autopar.search.process_executor import ProcessExecutor
from autopar.search.settings import NodeSettings, SearchSettings
from autopar.search.task_executor import Assignment, Executor, InProcessExecutor, WorkerPool
from autopar.search.tasks import Finding, SearchTask, TaskKind
from autopar.sharding import Axis, Mesh
from autopar.task import Effort, Task, prepare
from tests.enumeration import slow_nodes
from tests.formulations import DIMS

FAR = float("inf")
"""When tasks have to end: a busy machine cuts none of them short."""
PACKED_BYTES = 100_000
"""What a node takes at most that is put away; caches of what memory has room for would take many times that."""

GPT: dict[str, Any] = {"gpus": 4, "dims": DIMS["gpt2"] | {"num_layers": 2}, "global_batch": 8}


@cache
def _task() -> Task:
    return prepare(JobRequest("zoo:gpt2", **GPT))


@cache
def _tight() -> Task:
    """Return a job in which memory binds."""
    return prepare(
        JobRequest("zoo:mlp-xs", gpus=2, dims=DIMS["mlp-xs"] | {"num_layers": 2}, global_batch=8, memory_limit=7.0e3)
    )


def _run(
    task: Task, open_executor: Callable[[SearchContext], Executor] = InProcessExecutor, *, keep: int = 3
) -> Outcome:
    return run_search(task.space, task.context(Effort(top_k=keep)), open_executor)


def _answer(outcome: Outcome) -> tuple[object, ...]:
    """Return all of an outcome but the clock."""
    found = [(c.configuration, c.choice, c.split, c.objective) for c in outcome.candidates]
    return found, outcome.bound, outcome.complete, outcome.solved, outcome.pruned, outcome.stopped


@cache
def _mixed() -> Task:
    """Return a job on two different devices, where stages may have different meshes."""
    slow, fast = (slow_nodes(1, 1e8, 1e8, speed=speed) for speed in (0.5, 1.0))
    cluster = Cluster.mixed("mixed", (NodeGroup(1, slow), NodeGroup(1, fast)), fast.inter)
    dims = {"num_layers": 6, "hidden": 16}
    return prepare(JobRequest("zoo:mlp-xs", gpus=2, cluster=cluster, global_batch=4, dims=dims))


@pytest.mark.parametrize("job", [_task, _tight, _mixed])
def test_two_processes_find_what_one_finds(job: Callable[[], Task]) -> None:
    """Candidates, choices, splits, bound and counts; with room, where memory binds, and with different devices."""
    task = job()

    alone, together = _run(task), _run(task, lambda search: ProcessExecutor(search, 2))

    assert alone.candidates
    assert alone.cut == together.cut == 0
    assert _answer(together) == _answer(alone)
    assert bool(alone.unequal and alone.unequal.opened) == (task is _mixed())


def test_tasks_that_stand_alone_leave_cells_alone() -> None:
    """A bound on a submesh has the name of a plan on fewer devices, whose solver it must not replace."""
    family = (Configuration(1, Mesh((Axis("inner", 2, 1),)), 4, "1f1b"),)

    keys = [SearchTask(kind, family, 0.0, FAR).solver_key for kind in TaskKind]

    assert len(set(keys)) == len(TaskKind) - 1
    assert keys[list(TaskKind).index(TaskKind.BOUND)] == keys[list(TaskKind).index(TaskKind.ADVANCE)]


def test_what_waits_long_is_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose tables are written again when they are gone on with end as those that were kept."""
    task, packed = _task(), []
    kept = _run(task)
    pack = workbench._pack

    def note(node: NodeSolver) -> bytes:
        packed.append(node)
        return pack(node)

    monkeypatch.setattr(workbench, "KEPT_BYTES", 0)
    monkeypatch.setattr(workbench, "_pack", note)

    anew = _run(task)

    assert packed
    assert _answer(anew) == _answer(kept)


def test_pipelines_go_on_from_what_was_put_away() -> None:
    """What is known of blocks spread over stages is packed, and no more than that: packing takes time, too."""
    task = prepare(
        JobRequest("zoo:gpt2", gpus=4, dims=DIMS["gpt2"] | {"num_layers": 8}, global_batch=16, memory_limit=3e5)
    )
    search = task.context(Effort(settings=SearchSettings(node=NodeSettings(cut_steps=1))))
    family = next(each for each in families(task.space) if str(each[0]) == "pp=2 mesh inner=2 2 microbatches zb-h1")

    def course(*, packs: bool) -> list[float]:
        node = open_node(search, family, FAR)
        assert node is not None
        node.state.proves = True
        bounds = [node.relax(FAR)]
        while not node.exhausted:
            bounds.append(node.advance(bounds[-1], FAR))
            if packs:
                packed = workbench._pack(node)
                assert len(packed) < PACKED_BYTES
                again = open_node(search, family, FAR)
                assert again is not None
                node = workbench._unpacked(packed, again)
        assert node.cuts.pipeline_bounds is not None
        return bounds

    kept = course(packs=False)

    assert len(kept) > 2
    assert course(packs=True) == kept


def test_what_is_let_go_is_gone_at_once() -> None:
    """Tables take most of the memory of a search: neither the collector nor a plan keeps those of a node."""
    search = _tight().context(Effort())
    node = open_node(search, (_tight().space[0],), FAR)
    assert node is not None
    node.solve(node.relax(FAR), FAR)
    found = Finding(0.0, node.best, 0)
    outcome, tables = Outcome(), weakref.ref(node.tables)
    assert found.best is not None
    outcome.add_finding(found, 1)

    gc.disable()
    try:
        del node, found
        assert tables() is None
    finally:
        gc.enable()
    assert outcome.candidates


def test_plans_of_several_processes_are_those_of_one() -> None:
    """From the public function: everything that is written down but the times."""
    alone = autopar.solve("zoo:gpt2", **GPT)
    together = autopar.solve("zoo:gpt2", workers=3, **GPT)

    assert _timeless(together) == _timeless(alone)
    assert _beside(alone) == 0
    assert _beside(together) > 3 * INTERPRETER_BYTES


INTERPRETER_BYTES = 50e6
"""What a process takes at least that has imported this package."""


def _beside(plan: Plan) -> float:
    """Return what the search had of memory besides this process, which may have had more since."""
    assert plan.search is not None
    peaks = {phase.name: phase.peak_bytes for phase in plan.search.phases}
    return max(0.0, peaks["search"] - peaks["simulate"])


def _timeless(plan: Plan) -> Plan:
    """Return a plan without what the clock has to do with."""
    assert plan.search is not None
    return replace(plan, search=replace(plan.search, phases=(), history=()))


class _Mortal(ProcessExecutor):
    """Processes one of which is killed when it has been given its third task."""

    deaths = 0
    given = 0

    def start(self, number: int, search_task: SearchTask, end: float) -> None:
        """Start a task, and kill who does it."""
        super().start(number, search_task, end)
        self.given += 1
        if self.given == 3:
            self.deaths += 1
            worker = next(
                own for own, assignments in self._assignments.items() if number in {each.number for each in assignments}
            )
            os.kill(self.pids[worker], signal.SIGKILL)


def test_what_a_killed_worker_did_is_done_again() -> None:
    """By its successor; nothing is lost, the answer is the same."""
    task = _task()
    executors: list[_Mortal] = []

    def open_executor(search: SearchContext) -> Executor:
        executors.append(_Mortal(search, 2))
        return executors[-1]

    outcome = _run(task, open_executor)

    assert executors[0].deaths == 1
    assert _answer(outcome) == _answer(_run(task))


class _Ahead(WorkerPool):
    """Workers that do nothing, and have two tasks at a time."""

    ahead = 2

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sent: list[tuple[int, Assignment, bytes | None]] = []

    def _send(self, worker: int, assignment: Assignment, state: bytes | None) -> None:
        self.sent.append((worker, assignment, state))

    def found(self, worker: int, finding: Finding) -> int:
        """Take what a worker has found, and return of which task that is."""
        return self._record_finding(worker, finding)[0]

    def die(self, worker: int) -> None:
        """Replace a worker."""
        self.sent.clear()
        self._reassign(worker, "killed")

    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """Nothing is ever done."""
        return []

    def stop(self) -> None:
        """Nothing is being done."""

    def close(self) -> None:
        """Nothing is held."""


def _of(number: int) -> SearchTask:
    """Return a task on a configuration of its own."""
    return SearchTask(TaskKind.BOUND, (_task().space[number],), 0.0, float("inf"))


def test_workers_have_a_second_task_once_all_have_one() -> None:
    executor = _Ahead(2)
    for number in range(4):
        assert executor.is_free
        executor.start(number, _of(number), FAR)
    assert not executor.is_free
    assert [(worker, assignment.number) for worker, assignment, _ in executor.sent] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert executor.found(0, Finding(1.0, None, 0)) == 0, "tasks are done in the order they were given"
    assert executor.is_free
    assert executor.is_preferred(_of(2)), "its owner has fewest to do"
    assert not executor.is_preferred(_of(1)), "its owner has more to do than the other one"
    executor.start(4, _of(1), FAR)
    assert executor.sent[-1][0] == 0


def test_what_a_dead_worker_was_to_do_then_is_done_by_its_successor_too() -> None:
    """In the same order, from what was found before; only what it was doing counts as a death."""
    executor = _Ahead(1)
    executor.start(0, _of(5), FAR)
    executor.found(0, Finding(1.0, None, 0, state=b"known", is_final=False))
    executor.start(1, _of(6), FAR)
    executor.start(2, _of(5), FAR)
    executor.die(0)

    assert [(assignment.number, assignment.deaths, state) for _, assignment, state in executor.sent] == [
        (1, 1, None),
        (2, 0, b"known"),
    ]
    assert [executor.found(0, Finding(1.0, None, 0)) for _ in range(2)] == [1, 2]


def test_a_process_has_a_second_task_to_go_on_with() -> None:
    """It begins that before anybody takes what it found of the first one."""
    with ProcessExecutor(_task().context(Effort()), 1) as executor:
        for number in range(2):
            assert executor.is_free
            executor.start(number, _of(number), FAR)
        assert not executor.is_free
        done = wait([*executor._workers[0].futures], 60).done
        assert len(done) == 2
        assert [number for _ in range(2) for number, _ in executor.wait(1.0)] == [0, 1], "in order, one at a time"
        assert executor.is_free


class _Doomed(ProcessExecutor):
    """Processes that are killed at whatever they do."""

    def _send(self, worker: int, assignment: Any, state: bytes | None) -> None:
        super()._send(worker, assignment, state)
        os.kill(self.pids[worker], signal.SIGKILL)


def test_a_task_that_kills_every_worker_is_an_error() -> None:
    """It names the configuration; no process is left."""
    task = _task()
    executors: list[_Doomed] = []

    def open_executor(search: SearchContext) -> Executor:
        executors.append(_Doomed(search, 1))
        return executors[-1]

    with pytest.raises(WorkerError, match=r"3 processes .* at pp=.* mesh"):
        _run(task, open_executor)


def test_workers_go_on_where_others_stopped() -> None:
    """A configuration bounded in one process and worked on in another, from what the first found."""
    task = _tight()
    search = task.context(Effort())
    configuration = min(task.space, key=lambda c: search.roofline.seconds(c, task.job.global_batch))
    bounding = SearchTask(TaskKind.BOUND, (configuration,), 0.0, float("inf"), needs_plan=True)

    def improved(executor: Executor) -> Finding:
        (first,) = _done(executor, 0, bounding)
        search_task = replace(bounding, kind=TaskKind.ADVANCE, bound=first.bound, needs_plan=False)
        if isinstance(
            executor, ProcessExecutor
        ):  # its owner is busy with the same again, so that the other one takes it
            executor.start(1, replace(bounding), FAR)
            executor.start(2, search_task, FAR)
            return _until(executor, 2)
        (second,) = _done(executor, 2, search_task)
        return second

    with InProcessExecutor(search) as alone, ProcessExecutor(search, 2) as processes:
        here, there = improved(alone), improved(processes)

    assert here.best is not None
    assert there.best is not None
    assert there.bound == here.bound
    assert (there.best.choice, there.best.split) == (here.best.choice, here.best.split)


def _done(executor: Executor, number: int, search_task: SearchTask) -> list[Finding]:
    executor.start(number, search_task, FAR)
    return [_until(executor, number)]


def _until(executor: Executor, number: int) -> Finding:
    while True:
        for found, finding in executor.wait(1.0):
            if found == number:
                return finding


def test_a_worker_survives_an_interruption() -> None:
    """Ctrl-C reaches all processes of a terminal, also those that wait for a task: who they work for decides."""
    task = _task()
    bounding = SearchTask(TaskKind.BOUND, (task.space[0],), 0.0, float("inf"))

    with ProcessExecutor(task.context(Effort()), 1) as executor:
        (before,) = _done(executor, 0, bounding)
        (pid,) = executor.pids
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        (after,) = _done(executor, 1, bounding)

        assert executor.pids == (pid,), "another one would have been started in its place"
    assert after.bound == before.bound


def test_an_interruption_ends_all_workers_and_keeps_the_best() -> None:
    """As soon as there is a plan; what was proven until then holds."""
    task = _task()
    complete = _run(task, keep=9)
    seen = threading.Event()
    search = task.context(
        Effort(top_k=9),
        should_stop=seen.is_set,
        progress=lambda progress: seen.set() if progress.incumbent < float("inf") else None,
    )
    executors: list[ProcessExecutor] = []

    def open_executor(search: SearchContext) -> Executor:
        executors.append(ProcessExecutor(search, 2))
        return executors[-1]

    outcome = run_search(task.space, search, open_executor)

    assert outcome.stopped == "interrupted"
    assert outcome.candidates
    assert outcome.bound <= complete.best
    assert outcome.solved + outcome.pruned < len(task.space)
    for pid in executors[0].pids:
        _await_end(pid)


def _await_end(pid: int) -> None:
    """Wait until a process is gone; it is no child of this one. Fails with the test's own time limit."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)


SCRIPT = """
import sys, autopar
plan = autopar.solve("zoo:gpt2", gpus=4, dims={dims!r}, global_batch=8, workers=2)
print(plan.summary)
"""


def test_a_script_without_a_guard_may_use_workers(tmp_path: Path) -> None:
    """Workers do not import the caller's script, which would start the search again and again."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(dims=GPT["dims"]))

    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)

    assert done.stdout == autopar.solve("zoo:gpt2", **GPT).summary + "\n"


def test_the_answer_does_not_depend_on_the_order_of_a_hash(tmp_path: Path) -> None:
    """Two runs in processes of their own, with other seeds of Python's hashes."""
    code = (
        "import autopar, sys; from dataclasses import replace;"
        f"plan = autopar.solve('zoo:gpt2', gpus=2, dims={GPT['dims']!r}, global_batch=8, seed=3);"
        "plain = replace(plan, search=replace(plan.search, phases=(), history=()));"
        "sys.stdout.buffer.write(plain.to_json())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }

    assert len(answers) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "spark"}, "no engine 'spark'"),
        ({"workers": 0}, "0 workers"),
        ({"address": "auto"}, "a Ray address 'auto' for engine local"),
    ],
)
def test_engines_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    """Before anything starts."""
    with pytest.raises(JobError, match=message):
        Engine(**arguments)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setattr("autopar.engines.find_spec", lambda name: None)

    with pytest.raises(WorkerError, match="Ray is not installed") as caught:
        autopar.solve("zoo:gpt2", engine="ray", **GPT)

    assert "autopar[ray]" in caught.value.hint


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_ctrl_c_does_not_reach_what_is_starting() -> None:
    """The server that workers are forked from and what it needs itself: both would say where they were interrupted.

    Nor do the signals by which batch systems end all processes of a group.
    """
    script = """
from pathlib import Path
from autopar.search.process_executor import open_server
open_server()
for pid in Path("/proc/self/task").glob("*/children"):
    for child in pid.read_text().split():
        print(next(line for line in Path("/proc", child, "status").read_text().splitlines() if "SigBlk" in line))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    blocked = [int(line.split()[1], 16) for line in done.stdout.splitlines()]
    assert len(blocked) == 2
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    assert all(mask & 1 << number - 1 for mask in blocked for number in signals)


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")


@needs_ray
@pytest.mark.slow
def test_ray_finds_what_one_process_finds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster started here; one of its actors is killed on the way and what it did is done again.

    Ray has its say about that where results are printed, and an address of another cluster in the environment.
    """
    import ray

    from autopar.search.ray_executor import RayExecutor

    class Mortal(RayExecutor):
        """Actors one of which is killed at its third task."""

        given = 0

        def start(self, number: int, search_task: SearchTask, end: float) -> None:
            """Start a task, and kill who does it."""
            super().start(number, search_task, end)
            self.given += 1
            if self.given == 3:
                worker = next(
                    own
                    for own, assignments in self._assignments.items()
                    if number in {each.number for each in assignments}
                )
                ray.kill(self.actors[worker], no_restart=False)

    task = _task()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")

    outcome = _run(task, lambda search: Mortal(search, 2, None))

    assert _answer(outcome) == _answer(_run(task))
    assert not ray.is_initialized()
    assert capsys.readouterr().out == ""


@needs_ray
@pytest.mark.slow
def test_a_ray_cluster_that_cannot_help_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has something else to do, and one whose nodes have another version of this package or none."""
    import ray

    from autopar.search.ray_executor import RayExecutor

    search = _task().context(Effort())
    monkeypatch.setattr("autopar.ray_cluster.FREE_SECONDS", 1.0)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        busy = ray.remote(num_cpus=1)(threading.Event).remote()
        ray.get(busy.is_set.remote())
        while ray.available_resources().get("CPU", 0) > 1:  # which a cluster says a moment later
            time.sleep(0.1)
        with pytest.raises(WorkerError, match="1 of the 2 CPUs of the Ray cluster are free") as caught:
            RayExecutor(search, 2, None)
        assert caught.value.hint == "--workers 1"
        for there, message in (("0.0.0", "has autopar 0.0.0"), (None, "has no autopar")):
            monkeypatch.setattr("autopar.ray_cluster.version", _version(there))
            with pytest.raises(WorkerError, match=message) as caught:
                RayExecutor(search, 1, None)
            assert "on every node" in caught.value.hint
        assert ray.is_initialized(), "it was not ours to end"
    finally:
        ray.shutdown()


def _version(there: str | None) -> Callable[[str], str]:
    """Return what tells another version of a package elsewhere than here; None if there is none."""
    here = os.getpid()

    def told(name: str) -> str:
        if os.getpid() == here:
            return "1.0.0"
        if there is None:
            raise PackageNotFoundError(name)
        return there

    return told


@needs_ray
@pytest.mark.slow
def test_ray_that_does_not_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises a bare exception if a node is slow, as on a busy machine."""
    import ray

    def slow(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", slow)

    with pytest.raises(WorkerError, match="Ray cannot be started: The current node timed out"):
        autopar.solve("zoo:gpt2", engine="ray", **GPT)


@needs_ray
@pytest.mark.slow
def test_a_ray_cluster_that_is_not_there_is_named() -> None:
    """One error, with the address."""
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:1"):
        autopar.solve("zoo:gpt2", engine="ray", ray_address="127.0.0.1:1", **GPT)


class _Numbers(TaskSeries):
    """Tasks whose outcome is a number, prepared from the numbers taken so far."""

    def __init__(self, count: int, lead: int = 1) -> None:
        self.lead = lead
        self.taken: list[int] = []
        self.seen: dict[int, int] = {}
        self.count = count

    def is_over(self, index: int) -> bool:
        """Never."""
        return False

    def next_task(self, index: int) -> SearchTask:
        """Remember how many were taken before."""
        self.seen[index] = len(self.taken)
        return SearchTask(TaskKind.BOUND, (_task().space[0],), float(index), 0.0)

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """Remember the order."""
        self.taken.append(index)


class _Backwards(Executor):
    """Does as many tasks at a time as it is given, the last one first."""

    def __init__(self, size: int) -> None:
        self.size, self.waiting, self.most = size, [], 0  # type: ignore[var-annotated]

    @property
    def is_free(self) -> bool:
        """Whether there is room."""
        return len(self.waiting) < self.size

    def start(self, number: int, search_task: SearchTask, end: float) -> None:
        """Put it on the pile."""
        self.waiting.append(number)
        self.most = max(self.most, len(self.waiting))

    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """Take one from the pile."""
        return [(self.waiting.pop(), Finding(0.0, None, 0))] if self.waiting else []

    def stop(self) -> None:
        """Nothing is being done."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("lead", [0, 1, LAG])
@pytest.mark.parametrize("size", [1, 2, 5, 16, 40])
def test_tasks_see_what_they_are_to_see(size: int, lead: int) -> None:
    """Whatever the number of workers and the order they finish in, a task is prepared at its horizon."""
    series, executor = _Numbers(60, lead), _Backwards(size)

    run_series(executor, series, 60, lambda: 0.0, lambda: False, lambda finding: None)

    assert series.taken == list(range(60))
    assert series.seen == {index: horizon(index, lead) for index in range(60)}
    assert executor.most <= min(size, LAG + 1)


@pytest.mark.parametrize(("lead", "first"), [(0, [1, 1, 1, 1, 2]), (1, [1, 2, 2, 2, 3]), (LAG, [1, 2, 3, 4, 5])])
def test_work_for_many_is_there_soon(lead: int, first: list[int]) -> None:
    """Tasks that may be done at a time become more until there are `LAG` + 1: at once, after one, or after four."""
    at_a_time = [1 + index - horizon(index, lead) for index in range(40)]

    assert at_a_time == sorted(at_a_time)
    assert at_a_time[-1] == LAG + 1
    assert at_a_time[:5] == first


class _Owned(_Backwards):
    """One worker, which has worked on odd tasks before."""

    def __init__(self) -> None:
        super().__init__(1)
        self.started: list[int] = []

    def is_preferred(self, search_task: SearchTask) -> bool:
        """Whether it is an odd one."""
        return int(search_task.bound) % 2 == 1

    def start(self, number: int, search_task: SearchTask, end: float) -> None:
        """Remember it."""
        self.started.append(number)
        super().start(number, search_task, end)


def test_tasks_go_to_who_worked_on_the_same_before() -> None:
    """Of those that are ready the first one that suits a free worker, else the first one; all are taken in order."""
    series, executor = _Numbers(6, lead=0), _Owned()

    run_series(executor, series, 6, lambda: 0.0, lambda: False, lambda finding: None)

    # tasks 4 and 5 are prepared once three and four of those before are done
    assert executor.started == [0, 1, 2, 3, 5, 4]
    assert series.taken == list(range(6))

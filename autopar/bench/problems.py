"""Solvers side by side on files of selection problems: what each found and proved, and when."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar import iopddl
from autopar.errors import JobError
from autopar.problem import check_together, relative_gap
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.selection import Known, Selection, select
from autopar.solvers.reductions.presolve import Step, presolve

NEAR = (0.01, 0.001)
"""How far above the best known cost, relative to it, a choice counts as near."""

SMALL_GAP = 0.01
"""The gap whose time is drawn against the number of nodes."""

_SUFFIXES = (".json", ".json.gz")

Select = Callable[..., Selection]
"""`select`, or what stands for it."""


@dataclass(frozen=True, slots=True)
class ProblemRun:
    """All solvers on one problem.

    Attributes:
        file: Name of the file.
        num_nodes: Nodes of the problem.
        num_edges: Edges of the problem.
        steps: What presolve removes, run apart from the solvers.
        selections: What each solver found, in the order they were asked for; fewer if somebody stopped it.
    """

    file: str
    num_nodes: int
    num_edges: int
    steps: tuple[Step, ...]
    selections: tuple[Selection, ...]

    @property
    def best_cost(self) -> float:
        """The least cost any of the solvers found; infinity without one."""
        return min((each.solution.cost for each in self.selections), default=math.inf)


def time_to(history: Sequence[Known], best: float, near: float) -> float:
    """Return the seconds until a choice cost at most `near` more than `best`, relative to it; infinity if none did.

    >>> time_to([Known(1.0, 120, 0), Known(2.0, 101, 90)], 100, 0.01)
    2.0
    """
    if math.isinf(best):
        return math.inf
    return next((known.seconds for known in history if known.cost <= best + near * abs(best)), math.inf)


def time_to_gap(history: Sequence[Known], gap: float) -> float:
    """Return the seconds until cost and bound were at most `gap` apart, relative to the cost; infinity if never.

    >>> time_to_gap([Known(1.0, 120, 0), Known(2.0, 101, 100)], 0.01)
    2.0
    """
    near = (known.seconds for known in history if relative_gap(known.cost, known.bound) <= gap)
    return next(near, math.inf)


def problem_files(folder: Path) -> list[Path]:
    """Return the problem files in a folder, by name; the file itself if it is none.

    Raises:
        JobError: If there are none.
    """
    if folder.is_file():
        return [folder]
    files = sorted(path for path in folder.glob("*") if path.name.endswith(_SUFFIXES)) if folder.is_dir() else []
    if not files:
        raise JobError(
            f"{str(folder)!r} has no problems", hint="give a folder of .json or .json.gz files of the IOPDDL contest"
        )
    return files


def problem_name(path: Path) -> str:
    """Return what a problem file or a folder of them is called, for file names.

    >>> problem_name(Path("contest/A.json.gz")), problem_name(Path("contest/"))
    ('A', 'contest')
    """
    return path.resolve().name.removesuffix(".gz").removesuffix(".json")


def run_problems(
    files: Sequence[Path],
    solvers: Sequence[str],
    *,
    time_limit: float,
    threads: int = 2,
    seed: int = 0,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    run: Select = select,
) -> Iterator[ProblemRun]:
    """Yield what solvers make of each problem, as soon as the last of them is done with it.

    Args:
        files: The problems.
        solvers: Names of the solvers, run one after another, each in a process of its own.
        time_limit: Seconds for each, reading the file included.
        threads: Threads a solver may use.
        seed: Of what it draws at random.
        progress: Told when a solver begins.
        should_stop: Polled all the time; once it is true, the solver that runs is cut off and no other begins.
        run: What solves; gets the arguments of `select`.

    Raises:
        ProblemError: If a file is not a problem, or what a solver claims does not hold.
        SolverError: If a solver refuses a problem, or dies with empty hands.
    """
    total = len(files) * len(solvers)
    for number, path in enumerate(files):
        if should_stop():
            return
        problem = iopddl.load(path)
        size = (problem.num_nodes, problem.num_edges)
        steps, _ = presolve(problem)
        del problem, _  # the solvers' processes need the room
        selections = []
        for done, name in enumerate(solvers, start=number * len(solvers)):
            if should_stop():
                break
            progress(Progress("benchmark", done, total, detail=f"{name} on {path.name}"))
            selections.append(
                run(path, time_limit=time_limit, solver=name, threads=threads, seed=seed, should_stop=should_stop)
            )
        check_together(iopddl.load(path), {each.solver: each.solution for each in selections})
        yield ProblemRun(path.name, *size, steps, tuple(selections))

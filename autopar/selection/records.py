"""What a selection is, and what its process says while it works."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.problem import Choice, Solution

if TYPE_CHECKING:  # the program that waits does not need the solvers, which take a while to import
    from autopar.solvers.bounds.infeasibility_proof import Conflict
    from autopar.solvers.reductions.presolve import Step


@dataclass(frozen=True, slots=True)
class Known:
    """What was known at some moment.

    Attributes:
        seconds: Since the beginning that the limit counts from.
        cost: Of the best choice; infinity before the first.
        bound: Proven lower bound.
    """

    seconds: float
    cost: float
    bound: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of a run on a problem file.

    Attributes:
        name: Name of the problem; empty if it was not read in time.
        num_nodes: Its nodes.
        num_edges: Its edges.
        solver: Name of the solver.
        time_limit: Seconds that were given.
        solution: What was found and proven.
        seconds: Seconds it took.
        peak_bytes: Peak memory of the process that solved it.
        history: What was known when, in order.
        steps: What presolve removed; empty if that was not asked for.
        conflict: Why nothing fits; None if something does, or if the time was not enough to say.
        failure: How a process of the solver died; empty if none did.
        workers: Processes that solved it together.
    """

    name: str
    num_nodes: int
    num_edges: int
    solver: str
    time_limit: float
    solution: Solution
    seconds: float
    peak_bytes: float
    history: tuple[Known, ...]
    steps: "tuple[Step, ...]" = ()
    conflict: "Conflict | None" = None
    failure: str = ""
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What the process is asked.

    Attributes:
        path: The problem file.
        solver: Name of the solver.
        end: When the solver has to be done, on the monotonic clock, which all processes share.
        threads: Threads the solver may use.
        seed: Of what it draws at random.
        reductions: Whether to say what presolve removes.
        number: Of the process, from 0.
    """

    path: str
    solver: str
    end: float
    threads: int
    seed: int
    reductions: bool
    number: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The problem has been read."""

    name: str
    num_nodes: int
    num_edges: int


@dataclass(frozen=True, slots=True)
class Reductions:
    """What presolve removes."""

    steps: "tuple[Step, ...]"


@dataclass(frozen=True, slots=True)
class Better:
    """A cheaper choice or a higher bound.

    Attributes:
        time: On the monotonic clock.
        choice: The best choice, None if it is the one of the message before (or there is none yet).
        cost: Its cost.
        bound: Proven lower bound.
    """

    time: float
    choice: Choice | None
    cost: float
    bound: float


@dataclass(frozen=True, slots=True)
class Done:
    """The solver returned."""

    solution: Solution


@dataclass(frozen=True, slots=True)
class Explained:
    """Why nothing fits."""

    conflict: "Conflict"


@dataclass(frozen=True, slots=True)
class Refused:
    """The file or the request is wrong."""

    error: Exception


Message = Loaded | Reductions | Better | Done | Explained | Refused

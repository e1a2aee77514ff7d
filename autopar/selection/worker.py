"""The process that reads a problem and solves it, and says at once whatever gets better."""

import os
import threading
import time
from multiprocessing.connection import Connection

from autopar import iopddl, solvers
from autopar.errors import AutoparError
from autopar.problem import Choice, Problem, Termination, check
from autopar.selection.records import Better, Done, Explained, Loaded, Reductions, Refused, Request
from autopar.solvers.bounds.infeasibility_proof import explain
from autopar.solvers.reductions.presolve import presolve


def serve(descriptor: int) -> None:
    """Do what the process at the other end of a connection asks, and end when it ends."""
    connection = Connection(descriptor)
    request: Request = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        _work(request, connection)
    except AutoparError as error:
        connection.send(Refused(error))
    except (BrokenPipeError, ConnectionResetError):  # nobody listens any more
        os._exit(1)


def _end_with(connection: Connection) -> None:
    """End this process once the other one is gone; it never says anything again."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


def _work(request: Request, connection: Connection) -> None:
    solver = solvers.load(request.solver)
    problem = iopddl.load(request.path)
    connection.send(Loaded(problem.name, problem.num_nodes, problem.num_edges))
    if request.reductions:
        connection.send(Reductions(presolve(problem)[0]))
    last: Choice | None = None
    turn = threading.Lock()  # solvers may have several threads

    def watch(choice: Choice | None, cost: float, bound: float) -> None:
        nonlocal last
        with turn:
            connection.send(Better(time.monotonic(), None if choice is last else choice, cost, bound))
            last = choice

    solution = solver.solve(
        problem,
        time_limit=max(0.0, request.end - time.monotonic()),
        threads=request.threads,
        seed=request.seed,
        watch=watch,
    )
    check(problem, solution)
    connection.send(Done(solution))
    if solution.termination is Termination.INFEASIBLE:
        _explain(problem, request, connection)


def _explain(problem: Problem, request: Request, connection: Connection) -> None:
    conflict = explain(problem, end=request.end)
    if conflict is not None:
        connection.send(Explained(conflict))

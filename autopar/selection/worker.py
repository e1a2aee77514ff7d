"""The process that reads a problem and solves it, and says at once whatever gets better."""

import math
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
    mailbox = _Mailbox()
    threading.Thread(target=_listen, args=(connection, mailbox), daemon=True).start()
    try:
        _work(request, connection, mailbox)
    except AutoparError as error:
        connection.send(Refused(error))
    except (BrokenPipeError, ConnectionResetError):  # nobody listens any more
        os._exit(1)


class _Mailbox:
    """What other processes found, until the solver asks for it."""

    def __init__(self) -> None:
        self._choice: Choice | None = None
        self._bound = -math.inf
        self._is_new = False
        self._lock = threading.Lock()

    def put(self, finding: Better) -> None:
        """Keep a finding; a bound comes without a choice."""
        with self._lock:
            self._choice = self._choice if finding.choice is None else finding.choice
            self._bound = max(self._bound, finding.bound)
            self._is_new = True

    def take(self) -> tuple[Choice | None, float] | None:
        """Return the newest choice and bound; None if they were taken before."""
        if not self._is_new:
            return None
        with self._lock:
            found = (self._choice, self._bound)
            self._choice, self._is_new = None, False
        return found


def _listen(connection: Connection, mailbox: _Mailbox) -> None:
    """Put what the other process says into the mailbox; end this process once the other one is gone."""
    try:
        while True:
            mailbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


def _work(request: Request, connection: Connection, mailbox: _Mailbox) -> None:
    solver = solvers.load(request.solver).companion(request.number)
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
        outside=mailbox.take,
    )
    check(problem, solution)
    connection.send(Done(solution))
    if solution.termination is Termination.INFEASIBLE:
        _explain(problem, request, connection)


def _explain(problem: Problem, request: Request, connection: Connection) -> None:
    conflict = explain(problem, end=request.end)
    if conflict is not None:
        connection.send(Explained(conflict))

"""Solvers of `autopar.problem.Problem`, a weighted constraint satisfaction problem (WCSP) under memory limits.

They see arrays only, never a neural net. `SOLVERS` is the table of all solvers; adding one is a file and a line.

>>> from autopar.problem import Problem
>>> problem = Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])])
>>> load("auto").solve(problem).choice
(1, 1)
"""

import difflib
from importlib import import_module, util

from autopar.errors import SolverError
from autopar.solvers.base import Solver

__all__ = ["SOLVERS", "Solver", "available", "load", "names"]

SOLVERS = {
    "auto": "autopar.solvers.auto:Auto",
    "portfolio": "autopar.solvers.portfolio:Portfolio",
    "highs": "autopar.solvers.backends.highs:HighsSolver",
    "ortools-highs": "autopar.solvers.backends.ortools_mip:OrtoolsHighs",
    "ortools-scip": "autopar.solvers.backends.ortools_mip:OrtoolsScip",
    "ortools-cbc": "autopar.solvers.backends.ortools_mip:OrtoolsCbc",
    "pulp-cbc": "autopar.solvers.backends.pulp_cbc:PulpCbc",
    "cp-sat": "autopar.solvers.backends.cp_sat:CpSat",
    "brute-force": "autopar.solvers.exact.brute_force:BruteForce",
    "beam": "autopar.solvers.local_search.beam_search:Beam",
    "grid": "autopar.solvers.local_search.grid_search:Grid",
    "coordinate-descent": "autopar.solvers.local_search.coordinate_descent:CoordinateDescent",
}
"""Name -> "module:class". The class is instantiated without arguments."""

NEEDS = {
    "auto": "highspy",
    "portfolio": "numba",
    "highs": "highspy",
    "ortools-highs": "ortools",
    "ortools-scip": "ortools",
    "ortools-cbc": "ortools",
    "pulp-cbc": "pulp",
    "cp-sat": "ortools",
}
"""Name -> the package the solver requires."""


def names() -> tuple[str, ...]:
    """Return the names of all solvers, the default first."""
    return tuple(SOLVERS)


def available() -> tuple[str, ...]:
    """Return the names of the solvers whose packages are installed."""
    return tuple(name for name in SOLVERS if name not in NEEDS or util.find_spec(NEEDS[name]) is not None)


def load(name: str) -> Solver:
    """Return the solver called `name`.

    Raises:
        SolverError: If there is none, or its package is not installed.
    """
    if name not in SOLVERS:
        near = difflib.get_close_matches(name, SOLVERS, n=3, cutoff=0.4) or list(SOLVERS)
        raise SolverError(f"there is no solver {name!r}", hint=f"use {' or '.join(near)}")
    if name not in available():
        raise SolverError(f"solver {name!r} needs the package {NEEDS[name]!r}", hint=f"pip install {NEEDS[name]}")
    module, _, attribute = SOLVERS[name].partition(":")
    solver: Solver = getattr(import_module(module), attribute)()
    return solver

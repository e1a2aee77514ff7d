"""Execution of single ops and of whole graphs on numpy arrays: the semantics every other part is checked against."""

from autopar.execute.executor import Executor, run_graph

__all__ = ["Executor", "run_graph"]

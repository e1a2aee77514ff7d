"""The frontier: which node is worked on next."""

import math
from functools import cache
from typing import cast

import pytest

from autopar.bounds.microbatch import COLD_START, WarmStart
from autopar.bounds.transfer import TransferBounds
from autopar.configuration import Family, families
from autopar.request import JobRequest
from autopar.search.frontier import Frontier
from autopar.search.node import Priority, priority_of
from autopar.search.outcome import NodeStatus, Outcome
from autopar.search.tasks import Finding
from autopar.task import Effort, Task, prepare


@cache
def _task() -> Task:
    return prepare(JobRequest("zoo:mlp-xs", gpus=8, global_batch=16, dims={"num_layers": 4}))


class _NoTransfer:
    """Bounds from other nodes, of which nothing follows."""

    def raise_least(self, *_: object) -> None:
        """Raise nothing."""

    def record_finding(self, *_: object) -> None:
        """Record nothing."""

    def warm_start(self, family: Family) -> WarmStart:
        """Return that nothing is known."""
        return COLD_START


def _frontier(bounds: dict[Priority, float], limit: float, relaxed: frozenset[Priority] = frozenset()) -> Frontier:
    """Return a frontier with one node of each class of these bounds, some of them relaxed."""
    found = {priority_of(family): family for family in families(_task().space)}
    outcome = Outcome()
    for priority in relaxed:
        outcome.record_standing(found[priority], bounds[priority], NodeStatus.OPEN)
    search = _task().context(Effort(time_limit=None if math.isinf(limit) else limit))
    own = Frontier(search, outcome, [found[priority] for priority in bounds], cast("TransferBounds", _NoTransfer()))
    for node in own.nodes:
        node.bound = bounds[node.priority]
    own.resume()
    return own


def _next(frontier: Frontier, index: int = 0) -> Priority:
    """Return the class of the node that is worked on next."""
    assert not frontier.is_over(index)
    task = frontier.next_task(index)
    assert task is not None
    return priority_of(task.family)


PLAIN, OTHER = Priority.PLAIN, Priority.OTHER_SCHEDULES


@pytest.mark.parametrize(("plain", "expected"), [(1.17, PLAIN), (1.18, OTHER)])
def test_under_a_time_limit_new_plain_nodes_have_a_lead(plain: float, expected: Priority) -> None:
    """Of 15 %; without a limit they come first whatever their bounds."""
    assert _next(_frontier({PLAIN: plain, OTHER: 1.0}, 60.0)) is expected
    assert _next(_frontier({PLAIN: plain, OTHER: 1.0}, math.inf)) is PLAIN


def test_relaxed_plain_nodes_have_no_lead() -> None:
    """Further work on them raises no other bound."""
    assert _next(_frontier({PLAIN: 1.04, OTHER: 1.0}, 60.0, frozenset({PLAIN}))) is OTHER


def test_a_proof_is_no_turn_of_the_best_plan() -> None:
    """Of four tasks one goes to a relaxed node: to one whose plan improved, but not if only its proof is left."""
    frontier = _frontier({PLAIN: 1.04, OTHER: 1.0}, 60.0, frozenset({PLAIN, OTHER}))
    node = next(own for own in frontier.nodes if own.priority is PLAIN)
    node.improves = True

    assert frontier._may_improve(frontier.nodes.index(node))
    node.status = NodeStatus.SETTLED
    assert not frontier._may_improve(frontier.nodes.index(node))
    assert _next(frontier, 3) is OTHER
    frontier.record_finding(3, Finding(1.1, None, 0))
    assert frontier.bound == 1.04
